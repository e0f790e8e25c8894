//! The devices of a run together: a driver thread and a ring thread each, and the coordinator of
//! their steps, which is the thread of the run.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use super::RuntimeError;
use super::device_thread::{DeviceThread, PendingJob, Watchdog};
use super::messages::{CoordinatorMsg, DriverMsg, RingMsg};
use super::peers::{ReduceSite, RingPeers, TraceTracks, WaitStatus};
use super::ring::RingChannels;
use super::step::{NoPeers, Peers, StepInput, StepReport, run_step};
use crate::base::Rank;
use crate::collective::{ShardLayout, Topology};
use crate::comm::{Mailbox, RecvError};
use crate::device::DeviceError;
use crate::exec::{BucketTensor, Executor};
use crate::graph::Plan;
use crate::graph::plan::ALIGNMENT_BYTES;
use crate::metrics::Trace;
use crate::parallel::{Coordinator, Decision, Outcome};

const ELEMENT_BYTES: usize = crate::base::shape::ELEMENT_BYTES;

/// Says that a rank's part is over, also if the job panics.
struct FinishOnDrop {
    rank: Rank,
    group: Mailbox<CoordinatorMsg>,
    panicked: Option<DeviceError>,
}

impl FinishOnDrop {
    fn with(mut self, result: Result<StepReport, DeviceError>) {
        self.panicked = None;
        // Nobody hears it if the team was given up.
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

/// A rank: its device's thread, and what ties it to the others.
struct Worker {
    driver: DeviceThread,
    /// Locked by the job of a step only.
    peers: Arc<Mutex<Box<dyn Peers + Send>>>,
    /// Closed to end a step, and the run.
    inbox: Mailbox<DriverMsg>,
    ring: Mailbox<RingMsg>,
    waiting: Arc<WaitStatus>,
    /// The ring thread; none if there is one rank only.
    thread: Option<JoinHandle<()>>,
}

/// How a team works together.
#[derive(Clone, Debug, Default)]
pub struct TeamOptions {
    /// Per rank; the host where it says nothing.
    pub reduce_site: Vec<ReduceSite>,
    /// Sums of gradients go to all ranks, and nothing else does: for
    /// [`crate::parallel::gradient_all_reduce`].
    pub is_chained: bool,
    pub trace: Option<Trace>,
}

/// All devices of a run.
pub struct WorkerGroup {
    workers: Vec<Worker>,
    said: Mailbox<CoordinatorMsg>,
    layout: Arc<ShardLayout>,
    /// Why no further step is possible.
    broken: Option<(Rank, DeviceError)>,
}

/// The cut of a plan's buckets for so many ranks.
pub fn layout(plan: &Plan, topology: Topology, world: usize, chunk_bytes: usize) -> ShardLayout {
    let lengths: Vec<usize> = plan.buckets.iter().map(|bucket| bucket.length).collect();
    let (align, chunk_max) = (ALIGNMENT_BYTES / ELEMENT_BYTES, chunk_bytes / ELEMENT_BYTES);
    ShardLayout::new(topology, world as u32, &lengths, align, chunk_max)
}

impl WorkerGroup {
    /// Ties drivers together; the position of each is its rank. One alone needs no ring.
    ///
    /// # Errors
    /// A thread that cannot be started.
    pub fn start(
        drivers: Vec<DeviceThread>,
        layout: ShardLayout,
        options: &TeamOptions,
    ) -> Result<Self, RuntimeError> {
        let (layout, world) = (Arc::new(layout), drivers.len());
        // What a rank receives of others, twice because they may be in the next step already; and
        // its own values, twice because of the way back.
        let queued_max = |rank| 2 * (layout.messages_max(Rank(rank)) + layout.chunks.len()) + 2;
        let said = Mailbox::new(2 * world + 2);
        let rings: Arc<[Mailbox<RingMsg>]> =
            (0..world as u32).map(|rank| Mailbox::new(queued_max(rank))).collect();
        let mut group = Self { workers: Vec::new(), said, layout, broken: None };
        for (rank, driver) in drivers.into_iter().enumerate() {
            let worker = group.spawn_worker(Rank(rank as u32), driver, &rings, options)?;
            group.workers.push(worker);
        }
        Ok(group)
    }

    fn spawn_worker(
        &self,
        rank: Rank,
        driver: DeviceThread,
        rings: &Arc<[Mailbox<RingMsg>]>,
        options: &TeamOptions,
    ) -> Result<Worker, RuntimeError> {
        let tracks = TraceTracks::of(options.trace.as_ref(), rank, driver.name(), rings.len() > 1);
        let ring = rings[rank.index()].clone();
        // Per chunk its sum, or a request to add, and the final values; per bucket its two ends;
        // and the verdict.
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
            rank,
            layout: self.layout.clone(),
            reduce_site,
            gathers: if options.is_chained {
                BucketTensor::Gradients
            } else {
                BucketTensor::Parameters
            },
            ring: ring.clone(),
            inbox: inbox.clone(),
            group: self.said.clone(),
            tracks,
            waiting: Arc::clone(&waiting),
            awaited: None,
            in_flight: VecDeque::new(),
            sums: Vec::new(),
        };
        let peers: Arc<Mutex<Box<dyn Peers + Send>>> = Arc::new(Mutex::new(Box::new(link)));
        Ok(Worker { driver, peers, inbox, ring, waiting, thread })
    }

    /// A team of one, for work that needs no step.
    ///
    /// # Errors
    /// None of its own: one device needs no thread.
    pub fn single(driver: DeviceThread) -> Result<Self, RuntimeError> {
        Self::start(
            vec![driver],
            ShardLayout::new(Topology::Ring, 1, &[], 1, 1),
            &Default::default(),
        )
    }

    /// How many ranks there are.
    pub fn world(&self) -> usize {
        self.workers.len()
    }

    /// The name of a rank's device.
    pub fn name(&self, rank: Rank) -> &str {
        self.workers[rank.index()].driver.name()
    }

    /// The device of a rank.
    ///
    /// # Errors
    /// What ended an earlier step: parameters may be those of two steps then.
    pub fn driver(&self, rank: Rank) -> Result<&DeviceThread, RuntimeError> {
        self.require_whole()?;
        Ok(&self.workers[rank.index()].driver)
    }

    /// The first rank's device, which writes text where one is enough.
    ///
    /// # Errors
    /// As [`WorkerGroup::driver`].
    pub fn leader(&self) -> Result<&DeviceThread, RuntimeError> {
        self.driver(Rank(0))
    }

    fn require_whole(&self) -> Result<(), RuntimeError> {
        let broken = self.broken.clone();
        broken.map_or(Ok(()), |(rank, error)| Err(self.error(rank, error)))
    }

    /// How buckets are shared out.
    pub fn layout(&self) -> &ShardLayout {
        &self.layout
    }

    /// Runs a job on every device at the same time; the results by rank.
    ///
    /// # Errors
    /// The first rank's that fails.
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
        // All are waited for, so that nothing runs on behind a failure.
        let mut ended = Vec::with_capacity(self.world());
        for (rank, pending) in pending {
            let result = pending.and_then(PendingJob::wait);
            ended.push(result.map_err(|error| self.error(rank, error)));
        }
        ended.into_iter().collect()
    }

    /// A device's error, which says whose it is if there are several.
    pub fn error(&self, rank: Rank, error: DeviceError) -> RuntimeError {
        match self.world() {
            1 => error.into(),
            _ => RuntimeError::Rank { rank, error },
        }
    }

    /// Runs a step on all ranks: their inputs in, their reports out.
    ///
    /// # Errors
    /// The first device that fails; then no rank has made the step, or the run is over before the
    /// others know its parameters. No further step is possible.
    pub fn step(&mut self, inputs: &[Arc<StepInput>]) -> Result<Vec<StepReport>, RuntimeError> {
        self.require_whole()?;
        for worker in self.workers.iter().filter(|worker| worker.thread.is_some()) {
            // Before any rank runs, so that no message of this step can come earlier. A mailbox
            // that is closed shows in the step.
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
    /// Ends the ring threads; the drivers end by themselves, or are left behind if they hang.
    fn drop(&mut self) {
        for worker in &self.workers {
            worker.inbox.close("the run is over");
            worker.ring.close("the run is over");
        }
        for worker in &mut self.workers {
            if let Some(thread) = worker.thread.take() {
                // It waits at its mailbox only, or for a driver whose mailbox is closed as well.
                let _ = thread.join();
            }
        }
    }
}

/// A step under way, as its coordinator sees it.
struct StepRound<'t> {
    group: &'t WorkerGroup,
    coordinator: Coordinator,
    watches: Vec<Watchdog>,
    /// Per rank: its report, once it has ended.
    reports: Vec<Option<Result<StepReport, ()>>>,
    failed: Option<(Rank, DeviceError)>,
    /// What all ranks were told when something last changed, and when that was.
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
        let ending = FinishOnDrop { rank, group: self.group.said.clone(), panicked };
        let posted = worker.driver.submit_detached(WHAT, move |device| {
            let mut peers = lock(&peers);
            peers.restart();
            ending.with(run_step(device, &input, peers.as_mut()));
        });
        if let Err(error) = posted {
            self.end(rank, Err(error));
        }
    }

    /// Until every rank has ended, or is given up.
    fn run(mut self) -> Result<Vec<StepReport>, (Rank, DeviceError)> {
        while self.reports.iter().any(Option::is_none) {
            let look_every = self.watches.iter().map(Watchdog::poll_interval).min();
            let look_at = look_every.map(|every| Instant::now() + every);
            match self.group.said.recv(look_at) {
                Ok(CoordinatorMsg::Vote(vote)) => {
                    let announcement = self.coordinator.vote(vote);
                    self.announce(announcement);
                }
                Ok(CoordinatorMsg::Finished(rank, result)) => self.end(rank, result),
                Err(RecvError::TimedOut | RecvError::Closed(_)) => {}
            }
            self.check_liveness();
        }
        match self.failed {
            Some(failed) => Err(failed),
            None => Ok(self.reports.into_iter().flatten().flatten().collect()),
        }
    }

    /// Gives up the ranks whose devices have been silent for too long, and the step if all wait
    /// for each other.
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
        let wakeups = self.group.workers.iter().map(|worker| worker.waiting.wakeups()).sum();
        if works || wakeups != self.progress.0 {
            self.progress = (wakeups, Instant::now());
        }
        self.detect_deadlock();
    }

    /// No device works and nobody is told anything: that would last for ever.
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
        // One that was given up may come back after all.
        if self.reports[rank.index()].is_some() {
            return;
        }
        let result = match result {
            // Only a failure discards a step; without one, something ended that should not.
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
        let announcement = self.coordinator.fail(rank, &error.to_string());
        self.failed.get_or_insert((rank, error));
        self.announce(announcement);
    }

    fn announce(&self, announcement: Option<Decision>) {
        let Some(announcement) = announcement else { return };
        for worker in &self.group.workers {
            match &announcement {
                Decision::Verdict(verdict) => {
                    // Nobody is there to hear it if the rank has failed meanwhile.
                    let _ = worker.inbox.send(DriverMsg::Announced(verdict.clone()));
                }
                // Whatever a rank waits for, a closed mailbox wakes it.
                Decision::Abort { why, .. } => {
                    worker.inbox.close(why);
                    worker.ring.close(why);
                }
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A job that panicked ends the run before the next could see what it left.
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
