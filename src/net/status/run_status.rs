//! State of a run at one moment, derived from its events.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use potluck_core::metrics::{EvalRecord, Event, RankRecord, StepRecord, Unit};
use potluck_core::{Generation, NodeRank};

/// Number of last steps whose times bound the time of the next one.
pub(super) const STEPS_KEPT: usize = 64;

/// Unchanging description of a run.
#[derive(Clone, Debug, Default)]
pub struct RunAbout {
    /// Name of the run; `None` on a node that has joined it.
    pub name: Option<String>,
    pub directory: Option<PathBuf>,
    /// File of the configuration, if it has one.
    pub configuration: Option<PathBuf>,
    /// Version of the program.
    pub version: &'static str,
}

/// Node of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatusNode {
    pub node: NodeRank,
    pub host: String,
    /// Names of its devices.
    pub devices: Vec<String>,
}

/// Nodes of a run that this node knows.
#[derive(Clone, Debug, Default)]
pub struct StatusNodes {
    /// Number of this node, once it has one.
    pub you: Option<NodeRank>,
    pub generation: Generation,
    pub nodes: Vec<StatusNode>,
}

impl StatusNodes {
    /// Returns this node without the others.
    pub(super) fn alone(&self) -> Self {
        let mut alone = self.clone();
        alone.nodes.retain(|node| Some(node.node) == self.you);
        alone
    }
}

/// Longest times without a sign of progress in a healthy run.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Longest silence of a node.
    pub node: Duration,
    /// Longest silence of a device, which may be about as long as a save.
    pub device: Duration,
}

/// Present work of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum RunPhase {
    /// Other nodes are awaited.
    #[default]
    Rendezvous,
    /// Devices are opened.
    Opening,
    /// Kernels of a device are certified and timed.
    Tuning {
        device: String,
        done: usize,
        total: usize,
    },
    /// The state is restored and the first step compiles its kernels.
    Starting,
    Training,
    Evaluating {
        done: u64,
        total: u64,
    },
    Saving,
    /// All steps are done.
    Finishing,
    Over,
}

impl RunPhase {
    /// Returns the name, which is a label of the metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Rendezvous => "gathering",
            Self::Opening => "opening",
            Self::Tuning { .. } => "tuning",
            Self::Starting => "starting",
            Self::Training => "training",
            Self::Evaluating { .. } => "evaluating",
            Self::Saving => "saving",
            Self::Finishing => "finishing",
            Self::Over => "over",
        }
    }

    pub(super) const NAMES: [&'static str; 9] = [
        "gathering",
        "opening",
        "tuning",
        "starting",
        "training",
        "evaluating",
        "saving",
        "finishing",
        "over",
    ];
}

/// Work of a rank since the start of the program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankTotals {
    /// Name of the device.
    pub device: String,
    /// Samples of the last step.
    pub share: u64,
    pub busy: Duration,
    pub waiting: Duration,
}

/// Checkpoint that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastCheckpoint {
    pub step: u64,
    /// Time at which it was written; `None` if an earlier start wrote it.
    pub at: Option<SystemTime>,
}

/// State of a run at one moment.
#[derive(Clone, Debug)]
pub struct RunStatus {
    pub about: Arc<RunAbout>,
    pub nodes: Arc<StatusNodes>,
    pub patience: Patience,
    pub phase: RunPhase,
    /// Time of the last sign of progress.
    pub progressed: Instant,
    /// Step after which the run ends, once that is known.
    pub steps: Option<u64>,
    /// Steps that are done, over all starts of the run.
    pub done: u64,
    pub last_step: Option<Arc<StepRecord>>,
    pub last_step_at: Option<SystemTime>,
    pub last_evaluation: Option<Arc<EvalRecord>>,
    pub last_checkpoint: Option<LastCheckpoint>,
    /// Since the start of the program: the steps, the steps without an update, and the tokens or
    /// samples of all steps.
    pub steps_taken: u64,
    pub steps_skipped: u64,
    pub counted: u64,
    pub warnings: u64,
    /// Work of each rank, by its number; empty on a node that has joined the run.
    pub ranks: Vec<RankTotals>,
    /// Times of the last steps; of the first one, which compiles its kernels, until there is
    /// another.
    pub step_times: VecDeque<Duration>,
    /// Name of the device of a run with one rank.
    device: String,
    /// Steps taken since the devices were opened.
    since_opening: u64,
    /// True if the state includes the ranks, as only on the first node.
    tells_ranks: bool,
}

impl RunStatus {
    /// Creates the state of a run at its begin; `tells_ranks` on its first node, whose state
    /// includes the ranks.
    pub fn new(about: RunAbout, patience: Patience, tells_ranks: bool) -> Self {
        Self {
            about: Arc::new(about),
            nodes: Arc::default(),
            patience,
            phase: RunPhase::default(),
            progressed: Instant::now(),
            steps: None,
            done: 0,
            last_step: None,
            last_step_at: None,
            last_evaluation: None,
            last_checkpoint: None,
            steps_taken: 0,
            steps_skipped: 0,
            counted: 0,
            warnings: 0,
            ranks: Vec::new(),
            step_times: VecDeque::new(),
            device: String::new(),
            since_opening: 0,
            tells_ranks,
        }
    }

    /// Records that the process waits for its next run. What is counted since the start of the
    /// program stays.
    pub fn wait_for_next(&mut self, patience: Patience) {
        let waiting = Self::new(RunAbout::default(), patience, self.tells_ranks);
        *self = Self {
            about: self.about.clone(),
            steps_taken: self.steps_taken,
            steps_skipped: self.steps_skipped,
            counted: self.counted,
            warnings: self.warnings,
            ..waiting
        };
    }

    /// Takes an event that happened at the time `now`.
    pub fn take(&mut self, event: &Event, now: Instant) {
        match event {
            // The only sign of life of a failed save.
            Event::Warning(_) => {
                self.warnings += 1;
                if self.phase != RunPhase::Saving {
                    return;
                }
                self.phase = self.between_steps();
            }
            Event::Note(_) | Event::Measure(_) | Event::Shares(_) | Event::Cost(_) => return,
            Event::Tuning { device, done, total, .. } => {
                self.phase =
                    RunPhase::Tuning { device: device.clone(), done: *done, total: *total };
            }
            Event::Opening => self.phase = RunPhase::Opening,
            // Also behind fewer steps than were asked for, without an improvement.
            Event::Measuring => self.phase = RunPhase::Finishing,
            Event::Started { done, steps, device } => {
                self.device.clone_from(device);
                self.start(*done, *steps);
            }
            Event::Step(record) => self.step(record, now),
            Event::Evaluating { done, total, .. } => {
                self.phase = RunPhase::Evaluating { done: *done, total: *total };
            }
            Event::Evaluation(record) => {
                self.last_evaluation = Some(Arc::new(record.clone()));
                self.phase = self.between_steps();
            }
            Event::Saving { .. } => self.phase = RunPhase::Saving,
            Event::Checkpoint { step } => {
                self.last_checkpoint =
                    Some(LastCheckpoint { step: *step, at: Some(SystemTime::now()) });
                self.phase = self.between_steps();
            }
            Event::Ended => self.phase = RunPhase::Over,
        }
        self.progressed = now;
    }

    /// Records that the devices are open, at the beginning or after the loss of one.
    fn start(&mut self, done: u64, steps: u64) {
        self.steps = Some(steps);
        self.done = done;
        self.since_opening = 0;
        self.step_times.clear();
        self.phase = self.between_steps();
        if done > 0 && self.last_checkpoint.is_none_or(|last| last.step != done) {
            self.last_checkpoint = Some(LastCheckpoint { step: done, at: None });
        }
    }

    fn step(&mut self, record: &StepRecord, now: Instant) {
        // The first step compiles its kernels, so that the next one tells more.
        if self.since_opening == 1 {
            self.step_times.clear();
        }
        self.step_times.truncate(STEPS_KEPT - 1);
        self.step_times.push_front(now.saturating_duration_since(self.progressed));
        self.since_opening += 1;
        self.done = record.step;
        self.steps_taken += 1;
        self.steps_skipped += u64::from(record.skipped.is_some());
        self.counted += record.count;
        if self.tells_ranks {
            self.add_ranks(record);
        }
        self.last_step = Some(Arc::new(record.clone()));
        self.last_step_at = Some(SystemTime::now());
        self.phase = self.between_steps();
    }

    /// Adds the work of the ranks in a step. A single rank waits for no other.
    fn add_ranks(&mut self, record: &StepRecord) {
        let alone = [RankRecord {
            name: self.device.clone(),
            share: if record.unit == Unit::Samples { record.count } else { 0 },
            time: Duration::try_from_secs_f64(record.ms / 1e3).unwrap_or_default(),
            waited: Duration::ZERO,
            idle: 0.0,
            stage: None,
        }];
        let ranks = if record.ranks.is_empty() { &alone[..] } else { &record.ranks };
        self.ranks.resize_with(ranks.len(), RankTotals::default);
        for (totals, rank) in self.ranks.iter_mut().zip(ranks) {
            // After the loss of a device, the rank is that of another one.
            if totals.device != rank.name {
                *totals = RankTotals { device: rank.name.clone(), ..RankTotals::default() };
            }
            totals.share = rank.share;
            totals.busy += rank.time.saturating_sub(rank.waited);
            totals.waiting += rank.waited;
        }
    }

    fn between_steps(&self) -> RunPhase {
        match self.steps {
            Some(steps) if self.done >= steps => RunPhase::Finishing,
            _ if self.since_opening > 0 => RunPhase::Training,
            _ => RunPhase::Starting,
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn status() -> RunStatus {
        let patience = Patience { node: Duration::from_secs(30), device: Duration::from_secs(300) };
        let about = RunAbout { version: "1.2.3", ..RunAbout::default() };
        RunStatus::new(about, patience, true)
    }

    pub fn rank(name: &str, busy_ms: u64, waited_ms: u64) -> RankRecord {
        RankRecord {
            name: name.into(),
            share: 4,
            time: Duration::from_millis(busy_ms + waited_ms),
            waited: Duration::from_millis(waited_ms),
            idle: 0.0,
            stage: None,
        }
    }

    pub fn step(step: u64) -> StepRecord {
        StepRecord {
            step,
            loss: 2.5,
            terms: Vec::new(),
            lr: 1e-3,
            grad_norm: 0.5,
            loss_scale: None,
            unit: Unit::Tokens,
            count: 768,
            ms: 40.0,
            per_s: 19_200.0,
            busy: None,
            ranks: vec![rank("a", 30, 10), rank("b", 40, 0)],
            skipped: None,
        }
    }

    #[test]
    fn events_lead_from_one_phase_to_the_next() {
        let mut status = status();
        let device = String::from("a");
        let none = Duration::ZERO;
        for (event, name) in [
            (Event::Tuning { device: device.clone(), done: 1, total: 9, elapsed: none }, "tuning"),
            (Event::Note("a note".into()), "tuning"),
            (Event::Started { done: 2, steps: 4, device }, "starting"),
            (Event::Saving { step: 2 }, "saving"),
            (Event::Checkpoint { step: 2 }, "starting"),
            (Event::Step(step(3)), "training"),
            (Event::Evaluating { done: 1, total: 3, elapsed: none }, "evaluating"),
            (Event::Warning("a device is slow".into()), "evaluating"),
            (Event::Saving { step: 3 }, "saving"),
            (Event::Warning("step 3 was not saved".into()), "training"),
            (Event::Measuring, "finishing"),
            (Event::Step(step(4)), "finishing"),
            (Event::Saving { step: 4 }, "saving"),
            (Event::Checkpoint { step: 4 }, "finishing"),
            (Event::Ended, "over"),
        ] {
            status.take(&event, Instant::now());
            assert_eq!(status.phase.name(), name, "{event:?}");
            assert!(RunPhase::NAMES.contains(&name));
        }
        assert_eq!((status.warnings, status.steps_taken, status.done), (2, 2, 4));
    }

    #[test]
    fn work_adds_up_and_times_of_steps_are_the_last_ones() {
        let mut status = status();
        let start = Instant::now();
        let mut now = start;
        let device = String::from("a");
        status.take(&Event::Started { done: 0, steps: 1000, device }, now);
        for number in 1..=100 {
            // The first one takes long, and the save after every tenth is no part of a step.
            now += Duration::from_millis(if number == 1 { 5000 } else { 100 + number });
            let skipped = (number % 50 == 0).then(|| "not finite".into());
            status.take(&Event::Step(StepRecord { skipped, ..step(number) }), now);
            if number % 10 == 0 {
                status.take(&Event::Saving { step: number }, now);
                now += Duration::from_secs(9);
                status.take(&Event::Checkpoint { step: number }, now);
            }
        }
        assert_eq!((status.steps_taken, status.steps_skipped, status.counted), (100, 2, 76_800));
        let work: Vec<_> = status.ranks.iter().map(|rank| (rank.busy, rank.waiting)).collect();
        let seconds = Duration::from_secs;
        assert_eq!(work, [(seconds(3), seconds(1)), (seconds(4), seconds(0))]);
        assert_eq!(status.step_times.len(), STEPS_KEPT);
        let [newest, oldest] = [status.step_times.front(), status.step_times.back()];
        assert_eq!(newest, Some(&Duration::from_millis(200)));
        assert_eq!(oldest, Some(&Duration::from_millis(137)));
        assert_eq!(status.last_checkpoint.map(|last| last.step), Some(100));
    }

    #[test]
    fn work_is_told_of_the_device_that_did_it() {
        let mut status = status();
        let now = Instant::now();
        let started = |device: &str| Event::Started { done: 0, steps: 9, device: device.into() };
        status.take(&started("a"), now);
        status.take(&Event::Step(step(1)), now);
        // The first one is lost, and the other one is alone.
        status.take(&Event::Opening, now);
        assert_eq!(status.phase, RunPhase::Opening);
        status.take(&started("b"), now);
        assert_eq!(status.phase, RunPhase::Starting);
        status.take(&Event::Step(StepRecord { ranks: Vec::new(), ..step(1) }), now);
        let [only] = &status.ranks[..] else { panic!("{:?}", status.ranks) };
        assert_eq!((&*only.device, only.busy), ("b", Duration::from_millis(40)));
    }

    #[test]
    fn counts_go_on_from_one_run_to_the_next() {
        let mut status = status();
        let device = String::from("a");
        status.take(&Event::Started { done: 0, steps: 1, device }, Instant::now());
        status.take(&Event::Step(step(1)), Instant::now());
        status.take(&Event::Warning("a device is slow".into()), Instant::now());
        status.wait_for_next(status.patience);
        assert_eq!((&status.phase, status.done, status.steps), (&RunPhase::Rendezvous, 0, None));
        assert!(status.step_times.is_empty() && status.last_step.is_none());
        assert_eq!((status.steps_taken, status.counted, status.warnings), (1, 768, 1));
    }

    #[test]
    fn a_node_that_has_joined_tells_no_ranks() {
        let mut status = status();
        status.tells_ranks = false;
        status.take(&Event::Step(step(1)), Instant::now());
        assert!(status.ranks.is_empty() && status.steps_taken == 1);
    }
}
