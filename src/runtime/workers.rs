//! Worker group: a device thread and a ring thread per device, and the coordinator of their
//! steps, which runs on the run's thread.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use super::RuntimeError;
use super::device_thread::{DeviceThread, PendingJob, Watchdog};
use super::messages::{CoordinatorMsg, DriverMsg, RingMsg};
use super::peers::{RingPeers, TraceTracks, WaitStatus};
use super::ring::RingChannels;
use super::step::{NoPeers, Peers, StepInput, StepReport, run_step};
use crate::base::{Position, Rank};
use crate::collective::{RankGroup, ShardLayout, Topology};
use crate::comm::{Mailbox, RecvError};
use crate::device::DeviceError;
use crate::exec::{BucketTensor, Executor};
use crate::graph::Plan;
use crate::graph::plan::ALIGNMENT_BYTES;
use crate::metrics::Trace;
use crate::parallel::{Coordinator, Decision, Outcome, ReduceSite};

const ELEMENT_BYTES: usize = crate::base::shape::ELEMENT_BYTES;

/// Guard that reports the end of a rank's step to the coordinator, also if the job panics.
struct FinishOnDrop {
    rank: Rank,
    group: Mailbox<CoordinatorMsg>,
    panicked: Option<DeviceError>,
}

impl FinishOnDrop {
    fn with(mut self, result: Result<StepReport, DeviceError>) {
        self.panicked = None;
        // The receiver may be gone if the worker group was dropped.
        let _ = self.group.send(CoordinatorMsg::Finished(self.rank, result));
    }
}

impl Drop for FinishOnDrop {
    fn drop(&mut self) {
        if let Some(error) = self.panicked.take() {
            let _ = self.group.send(CoordinatorMsg::Finished(self.rank, Err(error)));
        }
    }
}

/// One rank: its device thread, and its connection to the other ranks.
struct Worker {
    driver: DeviceThread,
    /// Locked only by the job of a step.
    peers: Arc<Mutex<Box<dyn Peers + Send>>>,
    /// Mailbox of the device thread; closed to end a step, and the run.
    inbox: Mailbox<DriverMsg>,
    ring: Mailbox<RingMsg>,
    waiting: Arc<WaitStatus>,
    /// Ring thread; `None` if there is only one rank.
    thread: Option<JoinHandle<()>>,
}

/// Options of a worker group.
#[derive(Clone, Debug, Default)]
pub struct WorkerGroupOptions {
    /// Reduce site per rank; the host for ranks that are not listed.
    pub reduce_site: Vec<ReduceSite>,
    /// True if the group only all-reduces gradients: for
    /// [`crate::parallel::gradient_all_reduce`].
    pub is_chained: bool,
    pub trace: Option<Trace>,
}

/// All devices of a run, with their threads.
pub struct WorkerGroup {
    workers: Vec<Worker>,
    inbox: Mailbox<CoordinatorMsg>,
    /// Ranks that hold the buckets: all of them.
    members: RankGroup,
    layout: Arc<ShardLayout>,
    /// Failure after which no further step is possible.
    broken: Option<(Rank, DeviceError)>,
}

/// Returns the shard layout of a plan's buckets for `world` ranks.
pub fn layout(plan: &Plan, topology: Topology, world: usize, chunk_bytes: usize) -> ShardLayout {
    let lengths: Vec<usize> = plan.buckets.iter().map(|bucket| bucket.length).collect();
    let (align, chunk_max) = (ALIGNMENT_BYTES / ELEMENT_BYTES, chunk_bytes / ELEMENT_BYTES);
    ShardLayout::new(topology, world as u32, &lengths, align, chunk_max)
}

impl WorkerGroup {
    /// Starts a worker group of device threads; the position of each is its rank. A single device
    /// needs no ring thread.
    ///
    /// # Errors
    /// Returns `RuntimeError` if a thread cannot be started.
    pub fn start(
        drivers: Vec<DeviceThread>,
        layout: ShardLayout,
        options: &WorkerGroupOptions,
    ) -> Result<Self, RuntimeError> {
        let (layout, world) = (Arc::new(layout), drivers.len());
        let members = RankGroup::all(world as u32);
        // Messages of other ranks, twice because those may be in the next step already; and the
        // rank's own values, twice because there are two collectives.
        let queued_max = |position| 2 * (layout.messages_max(position) + layout.chunks.len()) + 2;
        let inbox = Mailbox::new(2 * world + 2);
        let rings: Arc<[Mailbox<RingMsg>]> =
            members.iter().map(|(position, _)| Mailbox::new(queued_max(position))).collect();
        let mut group =
            Self { workers: Vec::new(), inbox, members: members.clone(), layout, broken: None };
        for (member, driver) in members.iter().zip(drivers) {
            let worker = group.spawn_worker(member, driver, &rings, options)?;
            group.workers.push(worker);
        }
        Ok(group)
    }

    fn spawn_worker(
        &self,
        (position, rank): (Position, Rank),
        driver: DeviceThread,
        rings: &Arc<[Mailbox<RingMsg>]>,
        options: &WorkerGroupOptions,
    ) -> Result<Worker, RuntimeError> {
        let tracks = TraceTracks::of(options.trace.as_ref(), rank, driver.name(), rings.len() > 1);
        let ring = rings[rank.index()].clone();
        // Per chunk its sum, or a request to add, and its final values; per bucket the ends of
        // its two collectives; and the verdict.
        let (chunks, buckets) = (self.layout.chunks.len(), self.layout.buckets());
        let inbox = Mailbox::new(2 * (chunks + buckets) + 1);
        if rings.len() == 1 {
            let alone = NoPeers::traced(tracks.driver, tracks.device);
            let peers: Arc<Mutex<Box<dyn Peers + Send>>> = Arc::new(Mutex::new(Box::new(alone)));
            let waiting = Arc::default();
            return Ok(Worker { driver, peers, inbox, ring, waiting, thread: None });
        }
        let channels = RingChannels {
            rank,
            members: self.members.clone(),
            position,
            layout: self.layout.clone(),
            inbox: ring.clone(),
            rings: rings.clone(),
            driver: inbox.clone(),
            track: tracks.ring.clone(),
            is_chained: options.is_chained,
        };
        let why = |error| {
            let reason = format!("the system starts no more threads: {error}; raise its limit");
            RuntimeError::InvalidRequest(reason)
        };
        let thread = Some(crate::runtime::ring::start(channels).map_err(why)?);
        let reduce_site =
            options.reduce_site.get(rank.index()).copied().unwrap_or(ReduceSite::Host);
        let waiting: Arc<WaitStatus> = Arc::default();
        let link = RingPeers {
            position,
            layout: self.layout.clone(),
            reduce_site,
            gathers: if options.is_chained {
                BucketTensor::Gradients
            } else {
                BucketTensor::Parameters
            },
            ring: ring.clone(),
            inbox: inbox.clone(),
            group: self.inbox.clone(),
            tracks,
            waiting: Arc::clone(&waiting),
            awaited: None,
            in_flight: VecDeque::new(),
            sums: Vec::new(),
        };
        let peers: Arc<Mutex<Box<dyn Peers + Send>>> = Arc::new(Mutex::new(Box::new(link)));
        Ok(Worker { driver, peers, inbox, ring, waiting, thread })
    }

    /// Starts a worker group of one device, for work that needs no step.
    ///
    /// # Errors
    /// Returns the same errors as `start`; none applies, as a single device needs no ring thread.
    pub fn single(driver: DeviceThread) -> Result<Self, RuntimeError> {
        Self::start(
            vec![driver],
            ShardLayout::new(Topology::Ring, 1, &[], 1, 1),
            &Default::default(),
        )
    }

    /// Returns the number of ranks.
    pub fn world(&self) -> usize {
        self.workers.len()
    }

    /// Returns the name of a rank's device.
    pub fn name(&self, rank: Rank) -> &str {
        self.workers[rank.index()].driver.name()
    }

    /// Returns the device thread of a rank.
    ///
    /// # Errors
    /// Returns the error that ended an earlier step: parameters may then be a mix of two steps.
    pub fn driver(&self, rank: Rank) -> Result<&DeviceThread, RuntimeError> {
        self.require_whole()?;
        Ok(&self.workers[rank.index()].driver)
    }

    /// Returns the device thread of the first rank, for work that needs only one device.
    ///
    /// # Errors
    /// Returns the same errors as [`WorkerGroup::driver`].
    pub fn leader(&self) -> Result<&DeviceThread, RuntimeError> {
        self.driver(Rank(0))
    }

    fn require_whole(&self) -> Result<(), RuntimeError> {
        let broken = self.broken.clone();
        broken.map_or(Ok(()), |(rank, error)| Err(self.error(rank, error)))
    }

    /// Returns the ranks that hold the buckets.
    pub fn members(&self) -> &RankGroup {
        &self.members
    }

    /// Returns the shard layout of the buckets.
    pub fn layout(&self) -> &ShardLayout {
        &self.layout
    }

    /// Runs a job on every device concurrently; returns the results by rank.
    ///
    /// # Errors
    /// Returns the `RuntimeError` of the lowest rank that fails, or the error that ended an
    /// earlier step.
    pub fn run_on_all<R, F>(&self, what: &str, job: F) -> Result<Vec<R>, RuntimeError>
    where
        R: Send + 'static,
        F: Fn(Rank, &mut dyn Executor) -> Result<R, DeviceError> + Clone + Send + 'static,
    {
        self.require_whole()?;
        let mut pending = Vec::with_capacity(self.world());
        for (rank, worker) in self.workers.iter().enumerate() {
            let (rank, job) = (Rank(rank as u32), job.clone());
            pending.push((rank, worker.driver.submit(what, move |device| job(rank, device))));
        }
        // All jobs are awaited, so that none still runs when a failure is returned.
        let mut ended = Vec::with_capacity(self.world());
        for (rank, pending) in pending {
            let result = pending.and_then(PendingJob::wait);
            ended.push(result.map_err(|error| self.error(rank, error)));
        }
        ended.into_iter().collect()
    }

    /// Returns a device's error, with its rank if there are several.
    pub fn error(&self, rank: Rank, error: DeviceError) -> RuntimeError {
        match self.world() {
            1 => error.into(),
            _ => RuntimeError::Rank { rank, error },
        }
    }

    /// Runs a step on all ranks; returns the reports by rank.
    ///
    /// # Errors
    /// Returns the `RuntimeError` of the first device that fails. Then either no rank has
    /// updated, or the run is over before the other ranks receive the updated parameters. No
    /// further step is possible.
    pub fn step(&mut self, inputs: &[Arc<StepInput>]) -> Result<Vec<StepReport>, RuntimeError> {
        self.require_whole()?;
        for worker in self.workers.iter().filter(|worker| worker.thread.is_some()) {
            // Sent before any rank runs, so that no message of this step can arrive earlier. The
            // step reports a closed mailbox.
            let _ = worker.ring.send(RingMsg::Restart);
        }
        let mut round = StepRound::new(self);
        for (worker, input) in self.workers.iter().zip(inputs) {
            round.submit(worker, input);
        }
        let ended = round.run();
        ended.map_err(|(rank, error)| {
            self.broken = Some((rank, error.clone()));
            self.error(rank, error)
        })
    }
}

impl Drop for WorkerGroup {
    /// Ends the ring threads; device threads end by themselves, or are abandoned if they hang.
    fn drop(&mut self) {
        for worker in &self.workers {
            worker.inbox.close("the run is over");
            worker.ring.close("the run is over");
        }
        for worker in &mut self.workers {
            if let Some(thread) = worker.thread.take() {
                // The ring thread waits only at its mailbox, or for a device thread whose mailbox
                // is closed as well.
                let _ = thread.join();
            }
        }
    }
}

/// Coordinator's state of a step in progress.
struct StepRound<'t> {
    group: &'t WorkerGroup,
    coordinator: Coordinator,
    watches: Vec<Watchdog>,
    /// Per rank: its result, once its step has ended.
    reports: Vec<Option<Result<StepReport, ()>>>,
    failed: Option<(Rank, DeviceError)>,
    /// Progress for deadlock detection: the wakeups of all ranks at the last change, and its
    /// time.
    progress: (u64, Instant),
}

impl<'t> StepRound<'t> {
    fn new(group: &'t WorkerGroup) -> Self {
        let watches = group.workers.iter().map(|worker| worker.driver.watch()).collect();
        let reports = group.workers.iter().map(|_| None).collect();
        let coordinator = Coordinator::new(group.world() as u32);
        let progress = (0, Instant::now());
        Self { group, coordinator, watches, reports, failed: None, progress }
    }

    fn submit(&mut self, worker: &Worker, input: &Arc<StepInput>) {
        const WHAT: &str = "a step";
        let (rank, input) = (input.rank, Arc::clone(input));
        let peers = Arc::clone(&worker.peers);
        let panicked = Some(worker.driver.panicked(WHAT));
        let ending = FinishOnDrop { rank, group: self.group.inbox.clone(), panicked };
        let posted = worker.driver.submit_detached(WHAT, move |device| {
            let mut peers = lock(&peers);
            peers.restart();
            ending.with(run_step(device, &input, peers.as_mut()));
        });
        if let Err(error) = posted {
            self.end(rank, Err(error));
        }
    }

    /// Processes messages until every rank has ended or is abandoned.
    fn run(mut self) -> Result<Vec<StepReport>, (Rank, DeviceError)> {
        while self.reports.iter().any(Option::is_none) {
            let look_every = self.watches.iter().map(Watchdog::poll_interval).min();
            let look_at = look_every.map(|every| Instant::now() + every);
            match self.group.inbox.recv(look_at) {
                Ok(CoordinatorMsg::Vote(vote)) => {
                    let decision = self.coordinator.vote(vote);
                    self.announce(decision);
                }
                Ok(CoordinatorMsg::Finished(rank, result)) => self.end(rank, result),
                Err(RecvError::TimedOut) => {}
                Err(RecvError::Closed(closed)) => self.end_all(&closed.0),
            }
            self.check_liveness();
        }
        match self.failed {
            Some(failed) => Err(failed),
            None => Ok(self.reports.into_iter().flatten().flatten().collect()),
        }
    }

    /// Ends the step of every rank that has not ended: their messages arrive no more.
    fn end_all(&mut self, why: &str) {
        for rank in (0..self.reports.len() as u32).map(Rank) {
            if self.reports[rank.index()].is_none() {
                let adapter = self.group.name(rank).to_string();
                let (what, why) = ("a step".into(), why.into());
                self.end(rank, Err(DeviceError::Refused { adapter, what, why }));
            }
        }
    }

    /// Abandons ranks whose watchdog has expired, and the step if all ranks wait for each other.
    fn check_liveness(&mut self) {
        let mut works = false;
        for rank in 0..self.reports.len() {
            if self.reports[rank].is_some() {
                continue;
            }
            if self.group.workers[rank].waiting.is_waiting() {
                self.watches[rank].reset();
                continue;
            }
            works = true;
            if self.watches[rank].is_expired() {
                let error = self.group.workers[rank].driver.abandon("a step");
                self.end(Rank(rank as u32), Err(error));
            }
        }
        let received = self.group.workers.iter().map(|worker| worker.waiting.received()).sum();
        if works || received != self.progress.0 {
            self.progress = (received, Instant::now());
        }
        self.detect_deadlock();
    }

    /// Deadlock detection: fails the step if, for one deadline, no device has worked and no rank
    /// has received a message.
    fn detect_deadlock(&mut self) {
        let Some(rank) = self.reports.iter().position(Option::is_none) else { return };
        let deadline = self.watches[rank].deadline();
        if self.progress.1.elapsed() < deadline {
            return;
        }
        let waiting =
            self.coordinator.pending_ranks().iter().map(Rank::to_string).collect::<Vec<_>>();
        let (adapter, seconds) = (self.group.workers[rank].driver.name(), deadline.as_secs_f64());
        let error = DeviceError::Refused {
            adapter: adapter.into(),
            what: "a step".into(),
            why: format!(
                "all devices have waited for each other for {seconds} s, without a vote of {}, \
                 which is a defect of potluck; please report it",
                waiting.join(", ")
            ),
        };
        for rank in 0..self.reports.len() {
            self.end(Rank(rank as u32), Err(error.clone()));
        }
    }

    fn end(&mut self, rank: Rank, result: Result<StepReport, DeviceError>) {
        // A rank that was abandoned may still report its end.
        if self.reports[rank.index()].is_some() {
            return;
        }
        let result = match result {
            // Only a failure discards a step; without one, a thread ended that should not have.
            Ok(StepReport { outcome: Outcome::Discarded(why), .. }) if self.failed.is_none() => {
                let adapter = self.group.name(rank).to_string();
                Err(DeviceError::Refused { adapter, what: "a step".into(), why })
            }
            result => result,
        };
        let result = result.map_err(|error| self.fail(rank, error));
        self.reports[rank.index()] = Some(result);
    }

    fn fail(&mut self, rank: Rank, error: DeviceError) {
        self.group.workers[rank.index()].driver.note(&error);
        let decision = self.coordinator.fail(rank, &error.to_string());
        self.failed.get_or_insert((rank, error));
        self.announce(decision);
    }

    fn announce(&self, decision: Option<Decision>) {
        let Some(decision) = decision else { return };
        for worker in &self.group.workers {
            match &decision {
                Decision::Verdict(verdict) => {
                    // The receiver may be gone if the rank has failed meanwhile.
                    let _ = worker.inbox.send(DriverMsg::Decided(verdict.clone()));
                }
                // A closed mailbox wakes a rank from any wait.
                Decision::Abort { why, .. } => {
                    worker.inbox.close(why);
                    worker.ring.close(why);
                }
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A job that panicked ends the run before another job could see the state it left.
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
