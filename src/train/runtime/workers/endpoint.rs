//! Seats: the parts of each rank in a worker group besides its device. A rank of this process has a
//! ring thread and the mailboxes of its threads; one of another node is controlled by messages.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::thread::JoinHandle;

use super::round::FinishOnDrop;
use crate::runtime::RuntimeError;
use crate::runtime::addresses::{RankAddress, RankAddresses};
use crate::runtime::device_thread::DeviceThread;
use crate::runtime::group_layout::GroupLayout;
use crate::runtime::messages::{CoordinatorMsg, DriverMsg, RankRingMsg};
use crate::runtime::peers::{RingPeers, WaitStatus};
use crate::runtime::remote_endpoint::RemoteEndpoint;
use crate::runtime::ring::RingChannels;
use crate::runtime::ring_work::RingWork;
use crate::runtime::step::{NoPeers, Peers, StepInput, run_step};
use crate::runtime::trace_tracks::TraceTracks;
use potluck_core::{Lock, Rank, Round};
use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::BucketTensor;
use potluck_parallel::comm::{BufferPool, Mailbox, ring_inbox_max, send_restart};
use potluck_parallel::coordinator::RankActivity;
use potluck_parallel::transfers::{PeerTransfers, device_inbox_max};
use potluck_parallel::{ReduceSite, Verdict};

impl GroupLayout {
    /// Returns the mailboxes of a rank of this process.
    pub fn mailboxes(&self, rank: Rank) -> RankAddress {
        let Self { shards, groups, options, .. } = self;
        let messages = ring_inbox_max(shards, groups.positions(rank));
        let ring = Mailbox::new(messages + options.edges.messages_from(rank));
        let driver = Mailbox::new(device_inbox_max(shards, &options.edges, rank));
        RankAddress::Local { ring, driver }
    }
}

/// Seat of one rank.
pub(crate) enum RankEndpoint {
    Local(LocalEndpoint),
    Remote(Arc<dyn RemoteEndpoint>),
}

/// Rank of this process: the state of its device thread in a step, and its ring thread.
pub(crate) struct LocalEndpoint {
    /// Locked only by the job of a step.
    peers: Arc<Lock<Box<dyn Peers + Send>>>,
    /// Mailbox of the device thread, closed at the end of a failed step and of the run.
    inbox: Mailbox<DriverMsg>,
    ring: Mailbox<RankRingMsg>,
    waiting: Arc<WaitStatus>,
    tracks: TraceTracks,
    /// Ring thread, and its buffer pool; `None` for a single rank.
    thread: Option<JoinHandle<()>>,
    #[cfg_attr(not(test), expect(dead_code, reason = "tests compare it with what is admitted"))]
    pool: Option<BufferPool<f32>>,
}

impl LocalEndpoint {
    /// Starts the ring thread of a rank, whose votes are sent to `coordinator`. A single rank
    /// needs none.
    ///
    /// # Errors
    /// Returns `RuntimeError` if the thread cannot be started, or if the rank's address is on
    /// another node.
    pub fn start(
        rank: Rank,
        device: &str,
        layout: &GroupLayout,
        addresses: &RankAddresses,
        coordinator: &Mailbox<CoordinatorMsg>,
    ) -> Result<Self, RuntimeError> {
        let GroupLayout { shards, groups, options, .. } = layout;
        let tracks = TraceTracks::of(options, rank, device, addresses.len() > 1);
        let RankAddress::Local { ring, driver: inbox } = addresses[rank.index()].clone() else {
            return Err(RuntimeError::Defect(format!("{rank} is on another node")));
        };
        if addresses.len() == 1 {
            let peers: Arc<Lock<Box<dyn Peers + Send>>> =
                Arc::new(Lock::new(Box::new(NoPeers::default())));
            let waiting = Arc::default();
            return Ok(Self { peers, inbox, ring, waiting, tracks, thread: None, pool: None });
        }
        let ring_work = RingWork::default();
        let channels = RingChannels {
            rank,
            groups: groups.clone(),
            layout: shards.clone(),
            inbox: ring.clone(),
            driver: inbox.clone(),
            addresses: addresses.clone(),
            edges: options.edges.clone(),
            track: tracks.ring.clone(),
            adding_since: None,
            all_reduces: options.all_reduces,
            work: ring_work.clone(),
        };
        let (thread, pool) =
            crate::runtime::ring::start(channels).map_err(RuntimeError::no_thread)?;
        let reduce_site =
            options.reduce_site.get(rank.index()).copied().unwrap_or(ReduceSite::Host);
        let waiting: Arc<WaitStatus> = Arc::default();
        let gathers =
            if options.all_reduces { BucketTensor::Gradients } else { BucketTensor::Parameters };
        let transfers =
            PeerTransfers::new(shards.clone(), groups.positions(rank), reduce_site, gathers)
                .with_edges(rank, options.edges.clone());
        let peers = RingPeers {
            transfers,
            layout: shards.clone(),
            ring: ring.clone(),
            inbox: inbox.clone(),
            coordinator: coordinator.clone(),
            tracks: tracks.clone(),
            waiting: Arc::clone(&waiting),
            read_starts: VecDeque::new(),
            kept: HashMap::new(),
            due: VecDeque::new(),
            ring_work,
        };
        let peers: Arc<Lock<Box<dyn Peers + Send>>> = Arc::new(Lock::new(Box::new(peers)));
        Ok(Self { peers, inbox, ring, waiting, tracks, thread: Some(thread), pool: Some(pool) })
    }

    /// Begins a round in the ring thread. Must be called for all ranks of the process before one of
    /// them runs, so that no message of this round arrives earlier.
    pub fn restart(&self, round: Round) {
        if self.thread.is_some() {
            // The step reports a closed mailbox.
            let _ = send_restart(&self.ring, round);
        }
    }

    /// Begins the step of the rank on its device thread; its end is always sent to `coordinator`.
    ///
    /// # Errors
    /// Returns `DeviceError` if the device hung before or its thread has ended.
    pub fn submit(
        &self,
        driver: &DeviceThread,
        input: &Arc<StepInput>,
        coordinator: &Mailbox<CoordinatorMsg>,
    ) -> Result<(), DeviceError> {
        const WHAT: &str = "a step";
        let input = Arc::clone(input);
        let peers = Arc::clone(&self.peers);
        let tracks = self.tracks.clone();
        let panicked = Box::new(driver.on_panic(WHAT));
        let ending = FinishOnDrop::new(input.rank, coordinator.clone(), panicked);
        driver.submit_detached(WHAT, move |device| {
            let mut peers = peers.lock();
            peers.restart(input.round);
            ending.with(run_step(device, &input, peers.as_mut(), &tracks));
        })
    }

    /// Announces the verdict on a round.
    pub fn decide(&self, round: Round, verdict: &Verdict) {
        // Fails if the rank has failed meanwhile.
        let _ = self.inbox.send(DriverMsg::Decided { round, verdict: verdict.clone() });
    }

    /// Closes the mailboxes of the rank, which ends all its waits.
    pub fn close(&self, why: &str) {
        self.inbox.close(why);
        self.ring.close(why);
    }

    /// Waits for the end of the ring thread, whose mailbox is closed.
    pub fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // The ring thread waits only at its mailbox.
            let _ = thread.join();
        }
    }

    /// Returns the activity of the rank, whose device has shown this many heartbeats.
    pub fn activity(&self, heartbeats: u64) -> RankActivity {
        self.waiting.activity(heartbeats)
    }

    /// Peak size of the ring thread's buffer pool in bytes; 0 for a single rank.
    #[cfg(test)]
    pub(crate) fn pool_bytes_peak(&self) -> usize {
        self.pool.as_ref().map_or(0, BufferPool::bytes_peak)
    }
}

impl Drop for LocalEndpoint {
    /// Ends the ring thread without waiting for it: it may be sending to another node.
    fn drop(&mut self) {
        self.close("its seat is gone");
    }
}

impl RankEndpoint {
    /// Seat if it is in this process.
    #[cfg(test)]
    pub(crate) fn local(&self) -> Option<&LocalEndpoint> {
        match self {
            Self::Local(endpoint) => Some(endpoint),
            Self::Remote(_) => None,
        }
    }

    /// Begins the step of the rank.
    ///
    /// # Errors
    /// Returns `DeviceError` if its device hung before, its thread has ended, or its node is lost.
    pub fn submit(
        &self,
        driver: &DeviceThread,
        input: &Arc<StepInput>,
        coordinator: &Mailbox<CoordinatorMsg>,
    ) -> Result<(), DeviceError> {
        match self {
            Self::Local(endpoint) => endpoint.submit(driver, input, coordinator),
            Self::Remote(endpoint) => endpoint.submit(input),
        }
    }

    /// Announces the verdict on a round.
    pub fn decide(&self, round: Round, verdict: &Verdict) {
        match self {
            Self::Local(endpoint) => endpoint.decide(round, verdict),
            Self::Remote(endpoint) => endpoint.decide(round, verdict),
        }
    }

    /// Ends the step of the rank, and with it the group.
    pub fn close(&self, why: &str) {
        match self {
            Self::Local(endpoint) => endpoint.close(why),
            Self::Remote(endpoint) => endpoint.abort(why),
        }
    }

    /// Returns the activity of the rank, whose device has shown this many heartbeats.
    pub fn activity(&self, heartbeats: u64) -> RankActivity {
        match self {
            Self::Local(endpoint) => endpoint.activity(heartbeats),
            Self::Remote(endpoint) => endpoint.activity(heartbeats),
        }
    }
}
