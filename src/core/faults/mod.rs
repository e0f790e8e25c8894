//! Injected faults for tests, at named points of a step instead of by timing:
//! `POTLUCK_FAULT=kill@verdict:37` kills the process at the verdict of step 37. The faults
//! `wrong@kernel:NAME`, `element@kernel:NAME` and `half@kernel:NAME` are not bound to a step: they
//! corrupt the results by which that kernel variant is certified, and `shift@kernel:NAME` the
//! results of its check at full size; `kill@kernel:NAME` kills the process when it is compiled.

#[cfg(feature = "signals")]
mod signal;
/// Stand-in without the feature `cli`: nothing catches signals then, so that they end the process,
/// and so does an abort.
#[cfg(not(feature = "signals"))]
mod signal {
    pub use std::process::{abort as kill, abort as stop};
    pub(crate) use std::process::{abort as interrupt, abort as terminate};
}

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::{fmt, io};

use crate::Rank;
use crate::format::listed;

/// Environment variable with the faults to inject into a process: `FAULT@POINT:STEP`, several
/// with commas between them; `FAULT@POINT:STEP/RANK` for another rank than 0.
pub const FAULT_ENV: &str = "POTLUCK_FAULT";

/// Factor of the time of passes with [`Fault::Slow`].
const SLOWDOWN: f64 = 2.0;

/// Prefixes of the faults that are not bound to a step.
const KERNEL_FAULTS: [(&str, KernelFault); 5] = [
    ("wrong@kernel:", KernelFault::Scaled),
    ("element@kernel:", KernelFault::Element),
    ("half@kernel:", KernelFault::Half),
    ("shift@kernel:", KernelFault::Shift),
    ("kill@kernel:", KernelFault::Kill),
];

/// Fault of a kernel while it is compiled or certified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum KernelFault {
    /// All results are off by one in a hundred.
    Scaled,
    /// One result is off, by as much as the mean square over all still hides.
    Element,
    /// The inputs are rounded to half precision.
    Half,
    /// Rows of the results are shifted by one, at full size only.
    Shift,
    /// The process is killed when it is compiled, as by a driver that crashes.
    Kill,
}

/// Kernel variant that has a fault.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct FaultyKernel {
    pub name: String,
    pub fault: KernelFault,
}

impl FaultyKernel {
    /// Kills the process if that is the fault, as [`Fault::Kill`].
    pub fn compile(&self) {
        if self.fault == KernelFault::Kill {
            signal::kill();
        }
    }

    /// Parses a fault such as `wrong@kernel:NAME`; `None` if it is another.
    fn parse(item: &str) -> Option<Self> {
        for (prefix, fault) in KERNEL_FAULTS {
            if let Some(name) = item.strip_prefix(prefix) {
                return Some(Self { name: name.to_string(), fault });
            }
        }
        None
    }
}

/// Kind of fault to inject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The process ends at once, as by SIGKILL.
    Kill,
    /// The process is stopped, as by SIGSTOP, and continues after SIGCONT.
    Stop,
    /// The process receives SIGTERM, as from a job manager.
    Sigterm,
    /// The process receives SIGINT, as from Ctrl-C.
    Sigint,
    /// A value of the gradient becomes NaN.
    Nan,
    /// The disk has no space left: a write fails with `StorageFull`.
    Full,
    /// The device is lost.
    Lost,
    /// The device has no memory left.
    OutOfMemory,
    /// The device hangs: a call to its driver does not return.
    Hang,
    /// One bit of the device's parameters flips.
    Flip,
    /// The device is slow: from the step on, its passes take twice as long.
    Slow,
    /// A thread panics, as by a defect of potluck: the device's at a point of a step, the main one
    /// before the first step (at timing and moments).
    Panic,
}

/// Point of a step at which a fault is injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// In a node that joins a run, at step 0: after the first node has taken it in, before it knows
    /// of the others.
    Join,
    /// In a node that joins a run, at step 0: after all nodes are known, before it is connected
    /// with them.
    Roster,
    /// Before devices are timed, at step 0; the rank is the index of the device in `--devices`.
    Timing,
    /// Before the moments of a device are allocated once the shares are measured, as `Timing`.
    Moments,
    /// Before the place of addition of a device is timed, as `Timing`.
    ReduceSite,
    /// Before a state is brought onto the devices, at the step of that state.
    Restore,
    /// All passes of a device from the step on, and not one point in them.
    Run,
    Forward,
    /// Before the first tensor is sent to another stage of a pipeline.
    Send,
    /// Before the first tensor of another stage of a pipeline is received.
    Recv,
    Backward,
    /// During the reduction of gradients over devices.
    Reduce,
    /// After the gradients are summed, before the vote.
    Verdict,
    Update,
    /// After the all-gather of the updated parameters.
    Gather,
    /// Before the line of the step is written to the metrics.
    Metrics,
    /// Before anything of a checkpoint is written.
    CheckpointBegin,
    /// In the middle of a checkpoint's tensor file.
    CheckpointTensors,
    /// After the tensor files, before the manifest.
    CheckpointManifest,
    /// After the manifest, before the checkpoint is renamed to its final name.
    CheckpointRename,
    /// Before old checkpoints are removed.
    CheckpointPrune,
}

const FAULTS: [(Fault, &str); 12] = [
    (Fault::Kill, "kill"),
    (Fault::Stop, "stop"),
    (Fault::Sigterm, "sigterm"),
    (Fault::Sigint, "sigint"),
    (Fault::Nan, "nan"),
    (Fault::Full, "full"),
    (Fault::Lost, "lost"),
    (Fault::OutOfMemory, "out-of-memory"),
    (Fault::Hang, "hang"),
    (Fault::Flip, "flip"),
    (Fault::Slow, "slow"),
    (Fault::Panic, "panic"),
];

const POINTS: [(Point, &str); 21] = [
    (Point::Join, "join"),
    (Point::Roster, "roster"),
    (Point::Timing, "timing"),
    (Point::Moments, "moments"),
    (Point::ReduceSite, "reduce-site"),
    (Point::Restore, "restore"),
    (Point::Run, "run"),
    (Point::Forward, "forward"),
    (Point::Send, "send"),
    (Point::Recv, "recv"),
    (Point::Backward, "backward"),
    (Point::Reduce, "reduce"),
    (Point::Verdict, "verdict"),
    (Point::Update, "update"),
    (Point::Gather, "gather"),
    (Point::Metrics, "metrics"),
    (Point::CheckpointBegin, "checkpoint-begin"),
    (Point::CheckpointTensors, "checkpoint-tensors"),
    (Point::CheckpointManifest, "checkpoint-manifest"),
    (Point::CheckpointRename, "checkpoint-rename"),
    (Point::CheckpointPrune, "checkpoint-prune"),
];

/// Value of [`FAULT_ENV`] that is not a list of possible faults: an error of the configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultError {
    #[error(
        "{FAULT_ENV}: '{text}' is not FAULT@POINT:STEP or FAULT@POINT:STEP/RANK, such as \
         kill@verdict:37"
    )]
    Form { text: String },
    #[error("{FAULT_ENV}: '{text}' is not a fault; there are: {known}")]
    Fault { text: String, known: String },
    #[error("{FAULT_ENV}: '{text}' is not a point; there are: {known}")]
    Point { text: String, known: String },
    #[error("{FAULT_ENV}: '{text}' is not a step; use a whole number")]
    Step { text: String },
    #[error("{FAULT_ENV}: '{text}' is not a kernel; there are: {known}")]
    Kernel { text: String, known: String },
    #[error("{FAULT_ENV}: '{text}' is not a rank; use a non-negative integer")]
    Rank { text: String },
    #[error(
        "{FAULT_ENV}: '{point}' is a point of the process, not of rank {rank}; leave /{rank} out"
    )]
    NoRank { point: Point, rank: u32 },
    #[error("{FAULT_ENV}: '{fault}' cannot happen at '{point}'; use {allowed}")]
    Region { fault: Fault, point: Point, allowed: String },
}

/// Faults to inject into a process, each once. Clones share the record of injected faults.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    planned: Arc<[PlannedFault]>,
    kernels: Arc<[FaultyKernel]>,
}

#[derive(Debug)]
struct PlannedFault {
    fault: Fault,
    point: Point,
    step: u64,
    /// Rank that the fault hits; 0 at a point of the process.
    rank: Rank,
    happened: AtomicBool,
}

impl Faults {
    /// Returns no faults, as for every run outside of tests.
    pub fn none() -> Self {
        Self::default()
    }

    /// Parses the faults in [`FAULT_ENV`]; no faults if it is not set.
    pub fn from_environment() -> Result<Self, FaultError> {
        match std::env::var_os(FAULT_ENV) {
            Some(text) => text.to_string_lossy().parse(),
            None => Ok(Self::none()),
        }
    }

    /// Checks the names of the kernels to corrupt against the names in `known`.
    ///
    /// # Errors
    /// Returns `FaultError::Kernel` for the first name that is not among `known`.
    pub fn check_kernels(&self, known: &[String]) -> Result<(), FaultError> {
        for kernel in self.kernels.iter() {
            if !known.contains(&kernel.name) {
                let text = kernel.name.clone();
                return Err(FaultError::Kernel { text, known: known.join(", ") });
            }
        }
        Ok(())
    }

    /// Returns the kernels with a planned fault.
    pub fn kernels(&self) -> &[FaultyKernel] {
        &self.kernels
    }

    /// Injects and returns the fault planned for a point of the process: the points that write
    /// metrics and checkpoints, and the points of a joining node. [`Fault::Kill`] and
    /// [`Fault::Panic`] do not return; [`Fault::Stop`] returns once the process continues, and
    /// [`Fault::Sigterm`] and [`Fault::Sigint`] return after the signal was handled. On
    /// [`Fault::Full`] the caller must fail with [`full`].
    pub fn at(&self, point: Point, step: u64) -> Option<Fault> {
        self.at_rank(point, step, Rank(0))
    }

    /// Like [`Faults::at`], for a point of a step of one device: `lost@backward:3/1` is rank 1's,
    /// and `lost@backward:3` rank 0's. The caller must carry out these faults: for [`Fault::Nan`]
    /// it corrupts a gradient, for [`Fault::Flip`] a bit of its parameters, and device faults
    /// ([`Fault::of_device`]) it injects into the device.
    pub fn at_rank(&self, point: Point, step: u64, rank: Rank) -> Option<Fault> {
        let planned = self.planned.iter().find(|planned| {
            planned.point == point
                && planned.step == step
                && planned.rank == rank
                && !planned.happened.swap(true, Ordering::Relaxed)
        })?;
        match planned.fault {
            Fault::Kill => signal::kill(),
            Fault::Stop => signal::stop(),
            Fault::Sigterm => signal::terminate(),
            Fault::Sigint => signal::interrupt(),
            Fault::Panic => panic!("injected"),
            Fault::Nan
            | Fault::Full
            | Fault::Lost
            | Fault::OutOfMemory
            | Fault::Hang
            | Fault::Flip
            | Fault::Slow => {}
        }
        Some(planned.fault)
    }

    /// Returns the factor by which the passes of a device take longer in a step: `slow@run:30/1`
    /// doubles those of rank 1 from step 30 on, and each further such fault doubles them again.
    pub fn slowdown(&self, step: u64, rank: Rank) -> f64 {
        let mut factor = 1.0;
        for planned in self.planned.iter() {
            if planned.fault == Fault::Slow && planned.rank == rank && planned.step <= step {
                factor *= SLOWDOWN;
            }
        }
        factor
    }

    /// Like [`Faults::at`], at a point that writes: returns [`Fault::Full`] as an I/O error.
    pub fn at_write(&self, point: Point, step: u64) -> io::Result<()> {
        match self.at(point, step) {
            Some(Fault::Full) => Err(full()),
            _ => Ok(()),
        }
    }
}

impl FromStr for Faults {
    type Err = FaultError;

    fn from_str(text: &str) -> Result<Self, FaultError> {
        let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
        let mut kernels = Vec::new();
        let mut planned = Vec::new();
        for item in items {
            match FaultyKernel::parse(item) {
                Some(kernel) => kernels.push(kernel),
                None => planned.push(PlannedFault::parse(item)?),
            }
        }
        Ok(Self { planned: planned.into(), kernels: kernels.into() })
    }
}

impl PlannedFault {
    fn parse(text: &str) -> Result<Self, FaultError> {
        let Some((fault, rest)) = text.split_once('@') else {
            return Err(FaultError::Form { text: text.into() });
        };
        let Some((point, rest)) = rest.split_once(':') else {
            return Err(FaultError::Form { text: text.into() });
        };
        let fault: Fault = fault.parse()?;
        let point: Point = point.parse()?;
        let (step, rank) = match rest.split_once('/') {
            Some((step, rank)) => (step, Some(rank)),
            None => (rest, None),
        };
        let step = step.parse().map_err(|_| FaultError::Step { text: step.into() })?;
        let rank = match rank {
            Some(text) => Some(text.parse().map_err(|_| FaultError::Rank { text: text.into() })?),
            None => None,
        };
        // A fault without an effect at its point would make a test pass that tests nothing.
        if !fault.may_happen_at(point) {
            let points = POINTS.iter().filter(|(point, _)| fault.may_happen_at(*point));
            let allowed = listed(points.map(|(_, name)| name));
            return Err(FaultError::Region { fault, point, allowed });
        }
        // Points of the process query only rank 0, so that the fault would never be injected.
        if let Some(rank) = rank
            && !point.is_of_rank()
        {
            return Err(FaultError::NoRank { point, rank });
        }
        let rank = Rank(rank.unwrap_or(0));
        Ok(Self { fault, point, step, rank, happened: AtomicBool::new(false) })
    }
}

/// Fault that a device simulates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum InjectedFault {
    /// The device is lost.
    Lost,
    /// The driver refuses an allocation.
    OutOfMemory,
    /// The driver does not return, for two minutes.
    Hang,
}

impl Fault {
    fn may_happen_at(self, point: Point) -> bool {
        match self {
            Self::Slow => point == Point::Run,
            _ if point == Point::Run => false,
            Self::Kill | Self::Stop | Self::Sigterm | Self::Sigint => true,
            Self::Nan => matches!(point, Point::Forward | Point::Backward),
            Self::Full => point.writes(),
            Self::Flip => point == Point::Gather,
            Self::Lost | Self::OutOfMemory | Self::Hang | Self::Panic => point.is_of_rank(),
        }
    }

    /// Returns the fault to inject into the device; `None` if it is not the device that fails.
    pub fn of_device(self) -> Option<InjectedFault> {
        match self {
            Self::Lost => Some(InjectedFault::Lost),
            Self::OutOfMemory => Some(InjectedFault::OutOfMemory),
            Self::Hang => Some(InjectedFault::Hang),
            Self::Kill
            | Self::Stop
            | Self::Sigterm
            | Self::Sigint
            | Self::Nan
            | Self::Full
            | Self::Flip
            | Self::Slow
            | Self::Panic => None,
        }
    }
}

impl Point {
    fn writes(self) -> bool {
        !self.is_of_rank() && !matches!(self, Self::Join | Self::Roster)
    }

    /// Returns true if every device passes this point; the other points are passed once per
    /// process.
    fn is_of_rank(self) -> bool {
        match self {
            Self::Timing
            | Self::Moments
            | Self::ReduceSite
            | Self::Restore
            | Self::Run
            | Self::Forward
            | Self::Send
            | Self::Recv
            | Self::Backward
            | Self::Reduce
            | Self::Verdict
            | Self::Update
            | Self::Gather => true,
            Self::Join
            | Self::Roster
            | Self::Metrics
            | Self::CheckpointBegin
            | Self::CheckpointTensors
            | Self::CheckpointManifest
            | Self::CheckpointRename
            | Self::CheckpointPrune => false,
        }
    }
}

/// Returns the I/O error of a disk without space.
pub fn full() -> io::Error {
    io::ErrorKind::StorageFull.into()
}

impl FromStr for Fault {
    type Err = FaultError;

    fn from_str(text: &str) -> Result<Self, FaultError> {
        value_of(&FAULTS, text)
            .ok_or_else(|| FaultError::Fault { text: text.into(), known: names(&FAULTS) })
    }
}

impl FromStr for Point {
    type Err = FaultError;

    fn from_str(text: &str) -> Result<Self, FaultError> {
        value_of(&POINTS, text)
            .ok_or_else(|| FaultError::Point { text: text.into(), known: names(&POINTS) })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(name_of(&FAULTS, *self))
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(name_of(&POINTS, *self))
    }
}

fn value_of<T: Copy>(table: &[(T, &str)], text: &str) -> Option<T> {
    let (value, _) = table.iter().find(|(_, name)| *name == text)?;
    Some(*value)
}

fn name_of<T: PartialEq>(table: &[(T, &'static str)], value: T) -> &'static str {
    // The tests check that the tables are complete.
    match table.iter().find(|(known, _)| *known == value) {
        Some((_, name)) => name,
        None => "?",
    }
}

fn names<T>(table: &[(T, &str)]) -> String {
    listed(table.iter().map(|(_, name)| name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_and_point_has_its_name() {
        for (fault, name) in FAULTS {
            assert_eq!((name.parse(), fault.to_string().as_str()), (Ok(fault), name));
        }
        for (point, name) in POINTS {
            assert_eq!((name.parse(), point.to_string().as_str()), (Ok(point), name));
        }
        // The variants are numbered in the order of the tables, and the last ones close them.
        assert!(FAULTS.iter().enumerate().all(|(i, (fault, _))| *fault as usize == i));
        assert!(POINTS.iter().enumerate().all(|(i, (point, _))| *point as usize == i));
        assert_eq!(Fault::Panic as usize + 1, FAULTS.len());
        assert_eq!(Point::CheckpointPrune as usize + 1, POINTS.len());
    }

    #[test]
    fn a_fault_happens_once_at_its_point_and_step() {
        let faults: Faults = "nan@backward:3, full@metrics:4".parse().unwrap();
        let shared = faults.clone();
        assert_eq!(faults.at(Point::Backward, 2), None);
        assert_eq!(faults.at(Point::Forward, 3), None);
        assert_eq!(faults.at(Point::Backward, 3), Some(Fault::Nan));
        assert_eq!(shared.at(Point::Backward, 3), None);
        assert!(faults.at_write(Point::Metrics, 3).is_ok());
        let error = shared.at_write(Point::Metrics, 4).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert!(faults.at_write(Point::Metrics, 4).is_ok());
        assert_eq!("".parse::<Faults>().unwrap().at(Point::Forward, 0), None);
    }

    #[test]
    fn a_fault_of_a_rank_happens_to_no_other() {
        let faults: Faults = "lost@reduce:3/2, flip@gather:4/1, hang@gather:3".parse().unwrap();
        let at = |point, step, rank| faults.at_rank(point, step, Rank(rank));
        assert_eq!((at(Point::Reduce, 3, 0), at(Point::Reduce, 3, 1)), (None, None));
        assert_eq!(at(Point::Reduce, 3, 2), Some(Fault::Lost));
        assert_eq!(at(Point::Reduce, 3, 2), None, "it happened");
        assert_eq!((at(Point::Gather, 4, 0), at(Point::Gather, 4, 1)), (None, Some(Fault::Flip)));
        assert_eq!((at(Point::Gather, 3, 1), at(Point::Gather, 3, 0)), (None, Some(Fault::Hang)));
    }

    #[test]
    fn a_slow_device_is_slow_from_its_step_on() {
        let faults: Faults = "slow@run:30/1, slow@run:90/1".parse().unwrap();
        let factor = |step, rank| faults.slowdown(step, Rank(rank));
        assert_eq!((factor(29, 1), factor(30, 0)), (1.0, 1.0));
        assert_eq!((factor(30, 1), factor(30, 1), factor(99, 1)), (2.0, 2.0, 4.0));
    }

    #[test]
    fn mistakes_name_what_would_be_accepted() {
        let message = |text: &str| text.parse::<Faults>().unwrap_err().to_string();
        assert!(message("kill").contains("'kill' is not FAULT@POINT:STEP"));
        assert!(message("kill@verdict").contains("FAULT@POINT:STEP"));
        assert!(
            message("slay@verdict:1")
                .contains("there are: kill, stop, sigterm, sigint, nan, full, lost, out-of-memory")
        );
        assert!(message("kill@lunch:1").contains(
            "there are: join, roster, timing, moments, reduce-site, restore, run, forward"
        ));
        assert!(message("kill@verdict:-1").contains("'-1' is not a step"));
        assert!(message("nan@metrics:1").ends_with("use forward, backward"));
        let places = "use timing, moments, reduce-site, restore, forward, send, recv, backward, \
                      reduce, verdict, update, gather";
        assert!(message("lost@metrics:1").ends_with(places));
        assert!(message("flip@update:1/1").ends_with("use gather"));
        assert!(message("slow@forward:1").ends_with("use run"));
        assert!(message("kill@run:1").contains("'kill' cannot happen at 'run'"));
        assert!(message("lost@forward:1/x").contains("'x' is not a rank"));
        assert!(message("lost@forward:1/-1").contains("'-1' is not a rank"));
        assert!(message("lost@forward:1/").contains("'' is not a rank"));
        assert!(message("lost@forward:/1").contains("'' is not a step"));
        assert!(message("kill@metrics:1/1").contains("'metrics' is a point of the process"));
        assert!(message("stop@join:0/1").contains("'join' is a point of the process"));
        assert!(message("lost@roster:0").contains("'lost' cannot happen at 'roster'"));
        assert!(message("full@join:0").ends_with("checkpoint-rename, checkpoint-prune"));
        assert!(message("full@update:1").contains("'full' cannot happen at 'update'"));
        assert!("kill@verdict:1,x".parse::<Faults>().is_err());
    }
}
