//! The schedules' lists run by a simulator: complete, free of deadlocks, in the order of
//! micro-batches, and with the memory and the idle time of the formulas.

use std::collections::{BTreeMap, BTreeSet};

use super::StagePass::{Backward, BackwardInput, BackwardWeight, Forward};
use super::*;

type Lists = Vec<Vec<StageWork>>;

fn lists_of(schedule: PipelineSchedule, shape: PipelineShape) -> Lists {
    (0..shape.stages).map(|stage| stage_work(schedule, shape, stage)).collect()
}

/// All shapes of up to 6 stages, 16 micro-batches and 4 chunks that fit.
fn shapes(schedule: PipelineSchedule) -> Vec<PipelineShape> {
    let mut shapes = Vec::new();
    for stages in 1..=6 {
        for micro_batches in 1..=16 {
            for chunks in 1..=4 {
                let shape = PipelineShape { stages, chunks, micro_batches };
                if require_fit(schedule, shape).is_ok() {
                    shapes.push(shape);
                }
            }
        }
    }
    shapes
}

/// The duration of a work: each chunk takes its part of the stage's time.
fn duration(work: StageWork, shape: PipelineShape, times: StageTimes) -> f64 {
    let StageTimes { forward, backward_input, backward_weight } = times;
    let whole = match work.pass {
        Forward => forward,
        Backward => backward_input + backward_weight,
        BackwardInput => backward_input,
        BackwardWeight => backward_weight,
    };
    whole / shape.chunks as f64
}

/// The times at which works end: by direction, chunk of the model and micro-batch.
#[derive(Default)]
struct Ends {
    forward: BTreeMap<(usize, usize), f64>,
    backward: BTreeMap<(usize, usize), f64>,
}

impl Ends {
    /// The time at which all inputs of a stage's work are ready, if all of them are computed.
    fn ready(&self, work: StageWork, shape: PipelineShape, stage: usize) -> Option<f64> {
        let chunk = work.chunk * shape.stages + stage;
        let forward = |chunk| self.forward.get(&(chunk, work.micro_batch)).copied();
        let backward = |chunk| self.backward.get(&(chunk, work.micro_batch)).copied();
        match work.pass {
            Forward if chunk == 0 => Some(0.0),
            Forward => forward(chunk - 1),
            Backward | BackwardInput if chunk + 1 == shape.stages * shape.chunks => forward(chunk),
            Backward | BackwardInput => Some(forward(chunk)?.max(backward(chunk + 1)?)),
            BackwardWeight => backward(chunk),
        }
    }

    fn insert(&mut self, work: StageWork, shape: PipelineShape, stage: usize, end: f64) {
        let key = (work.chunk * shape.stages + stage, work.micro_batch);
        match work.pass {
            Forward => drop(self.forward.insert(key, end)),
            Backward | BackwardInput => drop(self.backward.insert(key, end)),
            BackwardWeight => {}
        }
    }
}

/// Runs each stage's list in its order, each work as soon as its inputs are ready: returns the
/// duration of the step, or the stage and the work of a deadlock.
fn simulate(lists: &Lists, shape: PipelineShape, times: StageTimes) -> Result<f64, String> {
    let mut ends = Ends::default();
    let mut next = vec![0; lists.len()];
    let mut free = vec![0.0_f64; lists.len()];
    loop {
        let before = next.clone();
        for (stage, list) in lists.iter().enumerate() {
            while let Some(&work) = list.get(next[stage]) {
                let Some(ready) = ends.ready(work, shape, stage) else { break };
                free[stage] = free[stage].max(ready) + duration(work, shape, times);
                ends.insert(work, shape, stage, free[stage]);
                next[stage] += 1;
            }
        }
        if let Some(stage) = (0..lists.len()).find(|stage| next[*stage] < lists[*stage].len()) {
            if next == before {
                return Err(format!("stage {stage} waits at {:?}", lists[stage][next[stage]]));
            }
        } else {
            return Ok(free.into_iter().fold(0.0, f64::max));
        }
    }
}

fn passes(schedule: PipelineSchedule) -> &'static [StagePass] {
    if schedule.is_split() {
        &[Forward, BackwardInput, BackwardWeight]
    } else {
        &[Forward, Backward]
    }
}

/// Every pass of every chunk and micro-batch is there once, and nothing else.
fn require_complete(
    schedule: PipelineSchedule,
    shape: PipelineShape,
    list: &[StageWork],
) -> Result<(), String> {
    let mut missing = BTreeSet::new();
    for &pass in passes(schedule) {
        for chunk in 0..shape.chunks {
            for micro_batch in 0..shape.micro_batches {
                missing.insert(StageWork { pass, chunk, micro_batch });
            }
        }
    }
    for work in list {
        if !missing.remove(work) {
            return Err(format!("{work:?} twice or unknown"));
        }
    }
    missing.first().map_or(Ok(()), |work| Err(format!("{work:?} is missing")))
}

/// Each pass of each chunk runs in the order of micro-batches, and each micro-batch's works have
/// the same order.
fn require_one_order(list: &[StageWork]) -> Result<(), String> {
    let mut last = BTreeMap::new();
    let mut orders: BTreeMap<usize, Vec<(StagePass, usize)>> = BTreeMap::new();
    for work in list {
        let key = (work.pass, work.chunk);
        if last.insert(key, work.micro_batch).is_some_and(|before| before >= work.micro_batch) {
            return Err(format!("{work:?} after a later micro-batch"));
        }
        orders.entry(work.micro_batch).or_default().push(key);
    }
    let first = orders.values().next();
    match orders.iter().find(|(_, order)| Some(*order) != first) {
        Some((micro_batch, _)) => Err(format!("micro-batch {micro_batch} has an order of its own")),
        None => Ok(()),
    }
}

/// The most stashes at a time: each from its forward pass to the pass that `ends` it.
fn peak(list: &[StageWork], ends: &[StagePass]) -> usize {
    let (mut live, mut peak) = (0_usize, 0);
    for work in list {
        if work.pass == Forward {
            live += 1;
            peak = peak.max(live);
        } else if ends.contains(&work.pass) {
            live -= 1;
        }
    }
    peak
}

/// All that holds for the lists of a schedule: the duration of the step, or the first fault.
fn check(
    schedule: PipelineSchedule,
    shape: PipelineShape,
    times: StageTimes,
    lists: &Lists,
) -> Result<f64, String> {
    for (stage, list) in lists.iter().enumerate() {
        let in_stage = |fault| format!("stage {stage}: {fault}");
        require_complete(schedule, shape, list).map_err(in_stage)?;
        require_one_order(list).map_err(in_stage)?;
    }
    let step = simulate(lists, shape, times)?;
    for (stage, list) in lists.iter().enumerate() {
        let (found, formula) =
            (peak(list, &[Backward, BackwardWeight]), in_flight(schedule, shape, stage));
        if found != formula {
            return Err(format!("stage {stage}: {found} in flight and {formula} by the formula"));
        }
    }
    let StageTimes { forward, backward_input, backward_weight } = times;
    let busy = shape.micro_batches as f64 * (forward + backward_input + backward_weight);
    let (found, formula) = (1.0 - busy / step, ideal_bubble(schedule, shape, times));
    if (found - formula).abs() > 1e-9 {
        return Err(format!("idle for {found} and {formula} by the formula"));
    }
    Ok(step)
}

/// Times with every order of the three, equal ones among them.
fn all_times() -> Vec<StageTimes> {
    let values = [0.5, 1.0, 1.75];
    let mut all = Vec::new();
    for forward in values {
        for backward_input in values {
            for backward_weight in values {
                all.push(StageTimes { forward, backward_input, backward_weight });
            }
        }
    }
    all
}

const TIMES: StageTimes = StageTimes { forward: 2.0, backward_input: 3.0, backward_weight: 1.0 };

#[test]
fn memory_and_idle_time_are_those_of_the_formulas() {
    for schedule in PipelineSchedule::ALL {
        let shapes = shapes(schedule);
        assert!(shapes.len() >= 3 * 16, "{schedule}");
        for shape in shapes {
            let lists = lists_of(schedule, shape);
            for times in all_times() {
                let step = check(schedule, shape, times, &lists);
                assert!(step.is_ok(), "{schedule} {shape:?} {times:?}: {step:?}");
            }
        }
    }
}

#[test]
fn zero_bubble_has_the_step_of_its_paper() {
    let mut compared = 0;
    for shape in shapes(PipelineSchedule::ZeroBubble) {
        let lists = lists_of(PipelineSchedule::ZeroBubble, shape);
        let (ramp, batches) = ((shape.stages - 1) as f64, shape.micro_batches as f64);
        for times in all_times() {
            let StageTimes { forward: f, backward_input: b, backward_weight: w } = times;
            let paper = batches * (f + b + w) + ramp * (f + b - w);
            let step = simulate(&lists, shape, times).unwrap();
            if shape.micro_batches >= shape.stages && w <= f && w <= b {
                compared += 1;
                assert!((step - paper).abs() < 1e-9, "{shape:?} {times:?}: {step}, not {paper}");
            } else {
                assert!(step > paper - 1e-9, "{shape:?} {times:?}: {step} below {paper}");
            }
        }
    }
    assert!(compared > 1000, "{compared}");
}

#[test]
fn zero_bubble_holds_what_only_activations_need_as_1f1b_does() {
    for shape in shapes(PipelineSchedule::ZeroBubble) {
        for (stage, list) in lists_of(PipelineSchedule::ZeroBubble, shape).iter().enumerate() {
            let like = in_flight(PipelineSchedule::OneFOneB, shape, stage);
            assert_eq!(peak(list, &[BackwardInput]), like, "{shape:?}, stage {stage}");
        }
    }
}

/// The letters of a list, as papers draw them, with the number of the micro-batch; chunks after
/// the first have small letters.
fn drawn(schedule: PipelineSchedule, chunks: usize, stage: usize) -> String {
    let shape = PipelineShape { stages: 3, chunks, micro_batches: 6 };
    let letter = |work: StageWork| match (work.pass, work.chunk) {
        (Forward, 0) => 'F',
        (Forward, _) => 'f',
        (Backward | BackwardInput, 0) => 'B',
        (Backward | BackwardInput, _) => 'b',
        (BackwardWeight, _) => 'W',
    };
    let works = stage_work(schedule, shape, stage).into_iter();
    works.map(|work| format!("{}{}", letter(work), work.micro_batch)).collect::<Vec<_>>().join(" ")
}

#[test]
fn lists_are_those_of_the_papers() {
    let gpipe = "F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5";
    assert_eq!(drawn(PipelineSchedule::GPipe, 1, 0), gpipe);
    let first = "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5";
    assert_eq!(drawn(PipelineSchedule::OneFOneB, 1, 0), first);
    let last = "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5";
    assert_eq!(drawn(PipelineSchedule::OneFOneB, 1, 2), last);
    let first = "F0 F1 F2 f0 f1 f2 F3 F4 b0 F5 b1 f3 b2 f4 B0 f5 B1 B2 b3 b4 b5 B3 B4 B5";
    assert_eq!(drawn(PipelineSchedule::Interleaved, 2, 0), first);
    let first = "F0 F1 F2 B0 W0 F3 B1 W1 F4 B2 W2 F5 B3 W3 B4 W4 B5 W5";
    assert_eq!(drawn(PipelineSchedule::ZeroBubble, 1, 0), first);
    let last = "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 F5 B5 W3 W4 W5";
    assert_eq!(drawn(PipelineSchedule::ZeroBubble, 1, 2), last);
}

/// The fault that `check` finds in the lists of a schedule after a change.
fn fault(schedule: PipelineSchedule, change: impl Fn(&mut Lists)) -> String {
    let shape = PipelineShape { stages: 3, chunks: 1, micro_batches: 4 };
    let mut lists = lists_of(schedule, shape);
    check(schedule, shape, TIMES, &lists).unwrap();
    change(&mut lists);
    check(schedule, shape, TIMES, &lists).unwrap_err()
}

#[test]
fn wrong_lists_are_found() {
    let of_1f1b = |change: fn(&mut Lists)| fault(PipelineSchedule::OneFOneB, change);
    let found = of_1f1b(|lists| lists[1].truncate(7));
    assert!(found.contains("is missing"), "{found}");
    let found = of_1f1b(|lists| lists[1].push(StageWork::whole(Backward, 3)));
    assert!(found.contains("twice or unknown"), "{found}");
    // Stage 0 runs F0 F1 F2 B0 F3 B1 B2 B3, stage 2 F0 B0 F1 B1 ..
    let found = of_1f1b(|lists| lists[0].swap(0, 1));
    assert!(found.contains("after a later micro-batch"), "{found}");
    let found = of_1f1b(|lists| lists[2].swap(0, 1));
    assert!(found.contains("order of its own"), "{found}");
    let found = of_1f1b(|lists| lists[0].swap(2, 3));
    assert!(found.contains("idle for"), "{found}");
    let found = of_1f1b(|lists| lists[2].swap(1, 2));
    assert!(found.contains("2 in flight and 1"), "{found}");
    // Stage 0 waits for B0 before it sends F1, and stage 1 for F1 before it computes B0.
    let found = of_1f1b(|lists| {
        lists[0] = lists[2].clone();
        lists[2] = lists[1].clone();
    });
    assert!(found.contains("waits at"), "{found}");
}

#[test]
fn slow_lists_are_found() {
    // The last stage computes W1 before B3, which all others wait for.
    let found = fault(PipelineSchedule::ZeroBubble, |lists| {
        assert_eq!(lists[2][8], StageWork::whole(BackwardInput, 3));
        lists[2].swap(8, 9);
    });
    assert!(found.contains("idle for"), "{found}");
}

#[test]
fn names_are_read_back() {
    for schedule in PipelineSchedule::ALL {
        assert_eq!(PipelineSchedule::of_name(schedule.name()), Some(schedule));
    }
    assert_eq!(PipelineSchedule::of_name("1F1B"), None);
    assert_eq!(PipelineSchedule::ALL.map(PipelineSchedule::is_split), [false, false, false, true]);
}
