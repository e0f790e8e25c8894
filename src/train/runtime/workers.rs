//! Worker group: the device and the seat of each rank, and the coordinator of their steps, which
//! runs on the run's thread.

pub(crate) mod endpoint;
mod round;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use super::addresses::{RankAddress, RankAddresses};
use super::device_thread::{DeviceThread, PendingJob};
use super::group_layout::GroupLayout;
pub use super::group_layout::WorkerGroupOptions;
use super::messages::CoordinatorMsg;
use super::step::{StepInput, StepReport};
use super::{RuntimeError, remote};
use endpoint::{LocalEndpoint, RankEndpoint};
use potluck_core::{Nanos, Rank, Round};
use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::Executor;
use potluck_parallel::Program;
use potluck_parallel::collective::{BucketGroups, ShardLayout, Topology};
use potluck_parallel::comm::{Mailbox, nanos};
use round::{RoundPrograms, StepRound};

/// One rank: its device, and its connection to the other ranks.
struct Worker {
    driver: DeviceThread,
    endpoint: RankEndpoint,
}

/// All devices of a run, with their threads.
pub struct WorkerGroup {
    workers: Vec<Worker>,
    inbox: Mailbox<CoordinatorMsg>,
    layout: GroupLayout,
    /// End of the group, after which no further step is possible.
    ended: Option<GroupEnd>,
    /// Last round that was begun.
    round: Round,
    /// True while ranks have old parameters of the shards of others: the last step has left its
    /// all-gathers.
    is_unsettled: bool,
}

/// Reason for which a worker group takes no further step.
#[derive(Clone, Debug)]
enum GroupEnd {
    Failed(StepFailure),
    /// The devices were closed.
    Closed,
}

#[derive(Clone, Debug)]
pub(crate) struct StepFailure {
    /// First device that failed, with its error.
    first: (Rank, DeviceError),
    /// All ranks whose devices failed; the other devices still answer.
    failed: Vec<Rank>,
    /// True if the devices had begun to update their parameters.
    has_begun_update: bool,
}

impl WorkerGroup {
    /// Starts a worker group of device threads, in the order of ranks. Each bucket of `layout` is
    /// held by the ranks of its group. A single device needs no ring thread.
    ///
    /// # Errors
    /// Returns `RuntimeError` if a thread cannot be started.
    pub fn start(
        drivers: Vec<DeviceThread>,
        layout: ShardLayout,
        groups: BucketGroups,
        options: &WorkerGroupOptions,
    ) -> Result<Self, RuntimeError> {
        // Per rank its vote and its end.
        let inbox = Mailbox::new(2 * drivers.len() + 2);
        // In one process, messages of different groups never meet.
        let is_spread = drivers.iter().any(|driver| driver.remote().is_some());
        let generation = if is_spread { remote::next_generation() } else { 0 };
        let options = options.clone();
        let layout = GroupLayout { shards: Arc::new(layout), groups, options, generation };
        let endpoints = endpoints(&drivers, &layout, &inbox)?;
        let mut workers = Vec::with_capacity(drivers.len());
        for (driver, endpoint) in drivers.into_iter().zip(endpoints) {
            workers.push(Worker { driver, endpoint });
        }
        let round = Round { generation, ..Round::default() };
        Ok(Self { workers, inbox, layout, ended: None, round, is_unsettled: false })
    }

    /// Starts a worker group of one device, for work that needs no step.
    ///
    /// # Errors
    /// Returns the same errors as `start`; none applies, as a single device needs no ring thread.
    pub fn single(driver: DeviceThread) -> Result<Self, RuntimeError> {
        Self::start(
            vec![driver],
            ShardLayout::new(Topology::Ring, 1, &[], 1, 1),
            BucketGroups::all(1, 0),
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

    /// Returns the most bytes that the buffer pool of a rank's ring thread has taken at once; 0
    /// if there is only one rank.
    #[cfg(test)]
    pub(crate) fn pool_bytes_peak(&self, rank: Rank) -> usize {
        self.workers[rank.index()].endpoint.local().map_or(0, LocalEndpoint::pool_bytes_peak)
    }

    /// Returns true if a rank's node reads the inputs of its steps from its own copy of the data.
    pub(crate) fn reads_inputs(&self, rank: Rank) -> bool {
        self.workers[rank.index()].driver.remote().is_some_and(|slot| slot.node.has_data())
    }

    /// Returns the device thread of a rank.
    ///
    /// # Errors
    /// Returns the error that ended an earlier step: parameters may then be a mix of two steps.
    pub fn driver(&self, rank: Rank) -> Result<&DeviceThread, RuntimeError> {
        self.require_settled()?;
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
        match &self.ended {
            None => Ok(()),
            Some(GroupEnd::Closed) => Err(closed()),
            Some(GroupEnd::Failed(StepFailure { first: (rank, error), .. })) => {
                Err(self.error(*rank, error.clone()))
            }
        }
    }

    /// Requires that the devices are there, and have the parameters of one step.
    fn require_settled(&self) -> Result<(), RuntimeError> {
        self.require_whole()?;
        if self.is_unsettled {
            let why = format!("the parameters behind {} are not gathered yet", self.round);
            return Err(RuntimeError::Defect(why));
        }
        Ok(())
    }

    /// Returns the ranks whose devices answer and hold the parameters of the last step that was
    /// completed: all ranks, or after the failure of a step those that did not fail.
    ///
    /// # Errors
    /// Returns the error that ended an earlier step if no device is left, and
    /// `RuntimeError::HalfUpdated` if the devices had begun to update their parameters.
    pub(crate) fn readable(&self) -> Result<Vec<Rank>, RuntimeError> {
        let mut left: Vec<Rank> = (0..self.world() as u32).map(Rank).collect();
        let failure = match &self.ended {
            None => return self.require_settled().map(|()| left),
            Some(GroupEnd::Closed) => return Err(closed()),
            Some(GroupEnd::Failed(failure)) => failure,
        };
        left.retain(|rank| !failure.failed.contains(rank));
        let (rank, error) = failure.first.clone();
        let error = self.error(rank, error);
        if left.is_empty() {
            return Err(error);
        }
        if failure.has_begun_update {
            return Err(RuntimeError::HalfUpdated { error: Box::new(error) });
        }
        Ok(left)
    }

    /// Runs a job that only reads on the device of a rank, also after the failure of a step, if it
    /// is one of [`WorkerGroup::readable`].
    ///
    /// # Errors
    /// Returns the `RuntimeError` of the device, or the errors of [`WorkerGroup::readable`].
    pub(crate) fn read_on<R, F>(&self, rank: Rank, what: &str, job: F) -> Result<R, RuntimeError>
    where
        R: Send + 'static,
        F: FnOnce(&mut dyn Executor) -> Result<R, DeviceError> + Send + 'static,
    {
        if !self.readable()?.contains(&rank) {
            self.require_whole()?;
        }
        let driver = &self.workers[rank.index()].driver;
        driver.run(what, job).map_err(|error| self.error(rank, error))
    }

    /// Returns the ranks that hold each bucket.
    pub fn groups(&self) -> &BucketGroups {
        &self.layout.groups
    }

    /// Returns the shard layout of the buckets.
    pub fn layout(&self) -> &ShardLayout {
        &self.layout.shards
    }

    /// Runs a job on the device of a rank, and waits for it.
    ///
    /// # Errors
    /// Returns the `RuntimeError` of the device, or the error that ended an earlier step.
    pub(crate) fn run_on<R, F>(&self, rank: Rank, what: &str, job: F) -> Result<R, RuntimeError>
    where
        R: Send + 'static,
        F: FnOnce(&mut dyn Executor) -> Result<R, DeviceError> + Send + 'static,
    {
        self.driver(rank)?.run(what, job).map_err(|error| self.error(rank, error))
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
        self.require_settled()?;
        let mut pending = Vec::with_capacity(self.world());
        for (rank, worker) in self.workers.iter().enumerate() {
            let rank = Rank(rank as u32);
            let job = job.clone();
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
        if self.world() == 1 { error.into() } else { RuntimeError::Rank { rank, error } }
    }

    /// Returns true if the last step has left its all-gathers.
    pub(crate) fn is_unsettled(&self) -> bool {
        self.is_unsettled
    }

    /// Returns the last round that was begun.
    pub fn round(&self) -> Round {
        self.round
    }

    /// The longest time for which a device may be silent.
    fn deadline(&self) -> Nanos {
        let deadlines = self.workers.iter().map(|worker| worker.driver.deadline());
        deadlines.min().map_or(Nanos::MAX, nanos)
    }

    /// Round of the inputs, which must be one for all ranks, and later than the last.
    fn begin_round(&mut self, inputs: &[Arc<StepInput>]) -> Result<Round, RuntimeError> {
        let world = self.world();
        let round = inputs.first().map_or(self.round, |input| input.round);
        let is_one = inputs.len() == world && inputs.iter().all(|input| input.round == round);
        if !is_one || round <= self.round {
            let last = self.round;
            let why = format!("{} inputs of {round} for {world} ranks after {last}", inputs.len());
            return Err(RuntimeError::Defect(why));
        }
        self.round = round;
        Ok(round)
    }

    /// Runs a step on all ranks; returns the reports by rank.
    ///
    /// # Errors
    /// Returns the `RuntimeError` of the first device that fails. Then either no rank has
    /// updated, or the run is over before the other ranks receive the updated parameters. No
    /// further step is possible; [`WorkerGroup::readable`] tells what can still be read.
    pub fn step(&mut self, inputs: &[Arc<StepInput>]) -> Result<Vec<StepReport>, RuntimeError> {
        self.require_whole()?;
        let is_any = |of: fn(&Program) -> bool| inputs.iter().any(|input| of(&input.program));
        let programs = RoundPrograms {
            updates: is_any(Program::updates),
            begins_with_gathers: is_any(Program::begins_with_gathers),
        };
        if !programs.begins_with_gathers {
            self.require_settled()?;
        }
        let round = self.begin_round(inputs)?;
        for worker in &self.workers {
            if let RankEndpoint::Local(endpoint) = &worker.endpoint {
                endpoint.restart(round);
            }
        }
        let mut round = StepRound::new(self, round, programs);
        // Other nodes first: an order with inputs takes a while to arrive, and would wait behind
        // the parameters that local ranks send as soon as they have their orders.
        for is_remote in [true, false] {
            for (worker, input) in self.workers.iter().zip(inputs) {
                if worker.driver.remote().is_some() == is_remote {
                    round.submit(worker, input);
                }
            }
        }
        match round.run() {
            Ok(reports) => {
                let is_updated = reports.iter().any(StepReport::is_updated);
                self.is_unsettled = is_updated && is_any(Program::leaves_gathers);
                Ok(reports)
            }
            Err(failure) => {
                let (rank, error) = failure.first.clone();
                self.ended = Some(GroupEnd::Failed(failure));
                Err(self.error(rank, error))
            }
        }
    }
}

impl WorkerGroup {
    /// Closes all devices, and frees what is on them: ends the ring threads; device threads end by
    /// themselves, or are abandoned if they hang. The group has no ranks then, and all that needs
    /// one is an error.
    pub fn close(&mut self) {
        self.ended = Some(GroupEnd::Closed);
        for worker in &self.workers {
            worker.endpoint.close("the run is over");
        }
        for worker in &mut self.workers {
            if let RankEndpoint::Local(endpoint) = &mut worker.endpoint {
                endpoint.join();
            }
        }
        self.workers.clear();
    }
}

impl Drop for WorkerGroup {
    fn drop(&mut self) {
        self.close();
    }
}

/// Starts the seats of these devices, by rank.
fn endpoints(
    drivers: &[DeviceThread],
    layout: &GroupLayout,
    inbox: &Mailbox<CoordinatorMsg>,
) -> Result<Vec<RankEndpoint>, RuntimeError> {
    let mut addresses = Vec::with_capacity(drivers.len());
    for (rank, driver) in drivers.iter().enumerate() {
        addresses.push(match driver.remote() {
            Some(slot) => RankAddress::Remote(slot.node.carrier()),
            None => layout.mailboxes(Rank(rank as u32)),
        });
    }
    let addresses = RankAddresses::from(addresses);
    let remote = remote::assemble(drivers, layout, &addresses, inbox)?;
    let mut endpoints = Vec::with_capacity(drivers.len());
    for (rank, (driver, remote)) in drivers.iter().zip(remote).enumerate() {
        let rank = Rank(rank as u32);
        endpoints.push(match remote {
            Some(endpoint) => RankEndpoint::Remote(endpoint),
            None => RankEndpoint::Local(LocalEndpoint::start(
                rank,
                driver.name(),
                layout,
                &addresses,
                inbox,
            )?),
        });
    }
    Ok(endpoints)
}

fn closed() -> RuntimeError {
    RuntimeError::InvalidRequest("the devices are closed; open them again".into())
}
