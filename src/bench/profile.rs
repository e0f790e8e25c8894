//! Profile of a training step: every kernel timed separately on the device, and whole steps.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Instant;

use potluck_core::rng::Key;
use potluck_core::{Rank, Round, TensorId};
use potluck_graph::optim::average_weight;
use potluck_graph::{Plan, UpdateRange};
use potluck_kernels::RandomContext;
use potluck_kernels::device::{DeviceError, Selection};
use potluck_kernels::exec::{Executor, KernelProfile, PassContext, ProfileTarget, load};
use potluck_parallel::pipeline::used_inputs;
use potluck_parallel::{Instruction, Program, single_rank};
use potluck_train::error::TrainError;
use potluck_train::loader::{BatchSource, LoadedRanks, Loader};
use potluck_train::run_data::SavedData;
use potluck_train::runtime::device_thread::DeviceThread;
use potluck_train::runtime::open::{self, OpenDevice};
use potluck_train::runtime::placement::device_limits::binding_bytes;
use potluck_train::runtime::step::{NoPeers, StepInput, run_step};
use potluck_train::runtime::trace_tracks::TraceTracks;
use potluck_train::spec::RunSpec;

/// Warm-up steps before any measurement: the first compiles the shaders.
const WARM_UP: u64 = 2;
/// Number of measured whole steps, whose median is reported.
const STEPS: usize = 5;
/// Number of steps whose kernels are timed one by one; medians are reported.
const REPEATS: usize = 3;

/// Ends of the lines of the table with the durations of a step and of its longest submission.
const WALL_TIME: &str = "wall time of a step, the median of";
const LONGEST_SUBMISSION: &str = "longest submission, by its clock";

/// Profile of a training step of a configured model on a device.
pub struct Profile {
    device: String,
    rows: Vec<ProfileRow>,
    /// Wall time of a whole step in seconds.
    seconds: f64,
    /// Share of this time in which the device was busy, by its own clock.
    busy: Option<f64>,
    /// Seconds of the longest submission of the steps, by the device's clock.
    longest_submission: Option<f64>,
}

/// Kernels of a step with the same op, shape and variant.
struct ProfileRow {
    /// Profile of the kernels; seconds and cost are the sums over all of them.
    timing: KernelProfile,
    count: usize,
    part: StepPart,
}

/// Part of a step in the sums below the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StepPart {
    Nodes,
    Norms,
    Updates,
}

impl Profile {
    /// Runs a few steps with random parameters on the configured data, with whole batches on one
    /// device; writes no files.
    ///
    /// # Errors
    /// Returns `TrainError` in the same cases as the start of a training run.
    pub fn measure(
        spec: &RunSpec,
        selection: Selection,
        saved: &SavedData,
    ) -> Result<Self, TrainError> {
        let data = spec.load_data(saved)?;
        let bytes = binding_bytes(&selection).and_then(|bytes| usize::try_from(bytes).ok());
        let training = spec.training_graph(&data.shape)?.with_parameter_bytes_max(bytes)?;
        let options = training.plan_options(spec.micro_batch as usize);
        let plan = Plan::new(training.whole().clone(), options);
        let program = Arc::new(single_rank(&plan, spec.batch, spec.micro_batch));
        let source = spec.batch_source(&plan.graph, &data, 0, 0)?;
        let inputs = inputs(spec, source, &program, used_inputs(&plan))?;
        let moments = spec.optimizer.moments();
        let opened = open::open_alone(selection, plan, moments, &spec.opening)?;
        let OpenDevice { driver, identity, is_cpu, .. } = opened;
        let device = if is_cpu { driver.name().to_string() } else { identity };
        let seed = spec.seed;
        driver.run("initialization", move |device| device.initialize(seed))?;
        let mut seconds = Vec::new();
        let mut busy = Vec::new();
        for input in &inputs {
            let (share, took) = timed_step(&driver, input)?;
            if input.round.step > WARM_UP {
                seconds.push(took);
                busy.extend(share);
            }
        }
        let longest_submission = driver.run("a step", |device| Ok(device.longest_submission()))?;
        let input = Arc::clone(&inputs[0]);
        let rows = driver.run("timing kernels", move |device| timed_rows(device, &input))?;
        let has_clock = busy.len() == seconds.len();
        Ok(Self {
            device,
            rows,
            seconds: median(&mut seconds),
            busy: if has_clock { Some(median(&mut busy)) } else { None },
            longest_submission,
        })
    }

    fn sum(&self, part: StepPart) -> f64 {
        self.rows.iter().filter(|row| row.part == part).map(|row| row.timing.seconds).sum()
    }

    /// Returns the table: a row per op, shape and variant, the longest first, and the sums.
    pub fn table(&self) -> String {
        let total: f64 = self.rows.iter().map(|row| row.timing.seconds).sum();
        let mut text = format!("a step on {}, every kernel timed alone\n\n", self.device);
        let mut op_width = 2;
        let mut variant_width = 7;
        for row in &self.rows {
            op_width = op_width.max(row.timing.op.len());
            variant_width = variant_width.max(row.timing.variant.len());
        }
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:>10} {:>7} {:>6} {:>9} {:>8}  {:<op_width$}  {:<variant_width$}  shape",
            "ms/step", "share", "count", "GFLOP/s", "GB/s", "op", "variant"
        );
        for ProfileRow { timing, count, .. } in &self.rows {
            let KernelProfile { op, shape, variant, seconds, cost } = timing;
            let share = 100.0 * seconds / total;
            let flops = giga_rate(cost.flops, *seconds);
            let bytes = giga_rate(cost.bytes, *seconds);
            let _ = writeln!(
                text,
                "{:>10.3} {share:>5.1} % {count:>6} {flops:>9.2} {bytes:>8.2}  {op:<op_width$}  \
                 {variant:<variant_width$}  {shape}",
                1e3 * seconds
            );
        }
        text.push('\n');
        let parts = [
            (StepPart::Nodes, "nodes"),
            (StepPart::Norms, "norms"),
            (StepPart::Updates, "updates"),
        ];
        for (part, name) in parts {
            let seconds = self.sum(part);
            let ms = 1e3 * seconds;
            let share = 100.0 * seconds / total;
            let _ = writeln!(text, "{ms:>10.3} {share:>5.1} %  {name}");
        }
        let _ = writeln!(text, "{:>10.3} {:>5.1} %  sum of kernels", 1e3 * total, 100.0);
        let _ = writeln!(text, "{:>10.3}          {WALL_TIME} {STEPS}", 1e3 * self.seconds);
        let _ = match self.busy {
            Some(busy) => writeln!(
                text,
                "{:>10} {:>5.1} %  of it the device was busy, by its own clock",
                "",
                100.0 * busy
            ),
            None => writeln!(text, "{:>10} {:>7}  busy share: the device has no clock", "", "-"),
        };
        if let Some(seconds) = self.longest_submission {
            let _ = writeln!(text, "{:>10.3}          {LONGEST_SUBMISSION}", 1e3 * seconds);
        }
        text
    }
}

/// Returns 1e9 units of work per second; 0 without a time.
fn giga_rate(work: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { 1e-9 * work / seconds } else { 0.0 }
}

/// Figures of [`Profile::table`], parsed from the output of the program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProfileFigures {
    pub kernels: Vec<KernelFigures>,
    /// Milliseconds of a step.
    pub step_ms: f64,
    /// Milliseconds of its longest submission.
    pub longest_submission_ms: Option<f64>,
}

/// Row of [`Profile::table`]: the kernels of a step with the same op, shape and variant.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct KernelFigures {
    /// Op, variant and shape, as in the table.
    pub kernel: String,
    pub count: usize,
    pub ms: f64,
    /// Rate in GFLOP/s.
    pub gflops: f64,
    /// Rate in GB/s.
    pub gbs: f64,
}

impl KernelFigures {
    /// Returns the least milliseconds of the kernels on a device with these peak rates, in GFLOP/s
    /// and GB/s.
    pub fn roofline_ms(&self, peak_gflops: f64, peak_gbs: f64) -> f64 {
        self.ms * (self.gflops / peak_gflops).max(self.gbs / peak_gbs)
    }
}

impl ProfileFigures {
    /// Parses the table of one device; `None` if the text is no such table.
    pub fn of_table(table: &str) -> Option<Self> {
        let mut figures = Self::default();
        for line in table.lines() {
            if line.contains(WALL_TIME) {
                figures.step_ms = first_number(line)?;
            } else if line.ends_with(LONGEST_SUBMISSION) {
                figures.longest_submission_ms = first_number(line);
            } else {
                figures.kernels.extend(kernel_of_row(line));
            }
        }
        if figures.step_ms > 0.0 && !figures.kernels.is_empty() { Some(figures) } else { None }
    }
}

fn first_number(line: &str) -> Option<f64> {
    line.split_whitespace().next()?.parse().ok()
}

/// Parses a row of the table; `None` for another line, including the sums, which have no count.
fn kernel_of_row(line: &str) -> Option<KernelFigures> {
    let mut words = line.split_whitespace();
    let ms = words.next()?.parse().ok()?;
    words.next()?.parse::<f64>().ok()?;
    words.next().filter(|word| *word == "%")?;
    let count = words.next()?.parse().ok()?;
    let gflops = words.next()?.parse().ok()?;
    let gbs = words.next()?.parse().ok()?;
    let kernel = words.collect::<Vec<_>>().join(" ");
    Some(KernelFigures { kernel, count, ms, gflops, gbs })
}

/// Inputs of the steps to run, which are the inputs of a run's first steps.
fn inputs(
    spec: &RunSpec,
    source: BatchSource,
    program: &Arc<Program>,
    wanted: Vec<TensorId>,
) -> Result<Vec<Arc<StepInput>>, TrainError> {
    let count = WARM_UP + STEPS as u64;
    let ranks =
        LoadedRanks { programs: vec![program.clone()], inputs: vec![wanted], are_read: vec![true] };
    let loader = Loader::start(source, ranks, 1, count);
    let loader = loader.map_err(|why| TrainError::Defect(format!("no thread: {why}")))?;
    let mut inputs = Vec::with_capacity(count as usize);
    for step in 1..=count {
        let ranks = loader.next_step().ok_or_else(early_end)??;
        let micro_batches = ranks.into_iter().next().ok_or_else(early_end)?;
        let round = Round { generation: 0, step, settles: false };
        inputs.push(Arc::new(StepInput {
            run_key: Key::new(spec.seed),
            update: spec.optimizer.update(spec.schedule.lr, step),
            average_weight: average_weight(spec.ema, step),
            clip: spec.clip,
            ..StepInput::new(round, Rank(0), program.clone(), micro_batches)
        }));
    }
    Ok(inputs)
}

fn early_end() -> TrainError {
    TrainError::Defect("the loader ended before the last step".into())
}

/// Runs a step and returns the busy share that it reports, and its wall time in seconds.
fn timed_step(
    driver: &DeviceThread,
    input: &Arc<StepInput>,
) -> Result<(Option<f64>, f64), DeviceError> {
    let input = Arc::clone(input);
    driver.run("a step", move |device| {
        let started = Instant::now();
        let report = run_step(device, &input, &mut NoPeers::default(), &TraceTracks::default())?;
        // The updates are part of the step: a read waits for them.
        device.loss()?;
        Ok((report.busy, started.elapsed().as_secs_f64()))
    })
}

/// Kernels of a step, summed by op, shape and variant, the longest first.
fn timed_rows(
    device: &mut dyn Executor,
    input: &StepInput,
) -> Result<Vec<ProfileRow>, DeviceError> {
    let mut steps = Vec::with_capacity(REPEATS);
    for _ in 0..REPEATS {
        steps.push(kernels(device, input)?);
    }
    let mut rows: Vec<ProfileRow> = Vec::new();
    for (index, (part, timing)) in steps[0].iter().enumerate() {
        let mut seconds: Vec<f64> = steps.iter().map(|step| step[index].1.seconds).collect();
        let seconds = median(&mut seconds);
        let known = rows.iter_mut().find(|row| {
            row.timing.op == timing.op
                && row.timing.shape == timing.shape
                && row.timing.variant == timing.variant
        });
        if let Some(row) = known {
            row.timing.cost.flops += timing.cost.flops;
            row.timing.cost.bytes += timing.cost.bytes;
            row.timing.seconds += seconds;
            row.count += 1;
        } else {
            let timing = KernelProfile { seconds, ..timing.clone() };
            rows.push(ProfileRow { timing, count: 1, part: *part });
        }
    }
    rows.sort_by(|a, b| b.timing.seconds.total_cmp(&a.timing.seconds));
    Ok(rows)
}

/// Profiles one step kernel by kernel, in the order of its program.
fn kernels(
    device: &mut dyn Executor,
    input: &StepInput,
) -> Result<Vec<(StepPart, KernelProfile)>, DeviceError> {
    let samples: u32 = input.program.micro_batches.iter().map(|m| m.rows).sum();
    let mut timings = Vec::new();
    device.begin_step()?;
    for instruction in &input.program.instructions {
        let (part, works, pass) = match *instruction {
            Instruction::Load { micro_batch } => {
                load(device, &input.micro_batches[micro_batch], 0)?;
                continue;
            }
            Instruction::Run { segment, micro_batch } => {
                let nodes = device.plan().segments[segment.index()].nodes.clone();
                let works: Vec<ProfileTarget> = nodes.map(ProfileTarget::Node).collect();
                (StepPart::Nodes, works, pass_of(input, micro_batch))
            }
            Instruction::ZeroGradients
            | Instruction::Send { .. }
            | Instruction::Recv { .. }
            | Instruction::AllReduce { .. }
            | Instruction::Start(_)
            | Instruction::Wait(_) => continue,
            Instruction::Verdict => {
                let buckets = device.plan().updated_buckets();
                (StepPart::Norms, buckets.map(ProfileTarget::Norm).collect(), pass_of(input, 0))
            }
            Instruction::Update { bucket } => {
                let layout = &device.plan().buckets[bucket.index()];
                let range = UpdateRange {
                    start: 0,
                    length: layout.length,
                    decay_end: layout.decay_end,
                    gradient_scale: 1.0 / samples as f32,
                    rounding: None,
                };
                let pass = pass_of(input, 0);
                let key = pass.random.step_key;
                let mut works = Vec::new();
                for range in device.plan().update_ranges(bucket, &input.update, range, key) {
                    works.push(ProfileTarget::Update(bucket, input.update, range));
                }
                (StepPart::Updates, works, pass)
            }
        };
        for work in works {
            if let Some(timing) = device.profile(&work, &pass)? {
                timings.push((part, timing));
            }
        }
    }
    Ok(timings)
}

fn pass_of(input: &StepInput, micro_batch: usize) -> PassContext {
    let random = RandomContext { step_key: input.run_key.step(input.round.step), training: true };
    let rows = input.program.micro_batches[micro_batch].rows as usize;
    PassContext { micro_batch: 0, rows, loss_scale: 1.0, random }
}

/// The middle value of a list that is not empty.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_kernels::Cost;

    #[test]
    fn the_table_adds_up_and_the_longest_comes_first() {
        let row = |op: &str, seconds: f64, part: StepPart| ProfileRow {
            timing: KernelProfile {
                op: op.into(),
                shape: "(8,8) -> (8,8)".into(),
                variant: "plain".into(),
                seconds,
                cost: Cost { flops: 3e9 * seconds, bytes: 1.5e9 * seconds },
            },
            count: 2,
            part,
        };
        let rows = vec![row("matmul", 3e-3, StepPart::Nodes), row("norm", 1e-3, StepPart::Norms)];
        let device = "a device".into();
        let longest_submission = Some(2e-3);
        let table =
            Profile { device, rows, seconds: 5e-3, busy: Some(0.8), longest_submission }.table();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "a step on a device, every kernel timed alone");
        let words = |line: &str| line.split_whitespace().map(String::from).collect::<Vec<_>>();
        let matmul = ["3.000", "75.0", "%", "2", "3.00", "1.50", "matmul", "plain"];
        assert_eq!(words(lines[3])[..8], matmul);
        assert_eq!(words(lines[4])[..4], ["1.000", "25.0", "%", "2"]);
        assert_eq!(words(lines[6]), ["3.000", "75.0", "%", "nodes"]);
        assert_eq!(words(lines[9])[..3], ["4.000", "100.0", "%"]);
        assert!(lines[10].contains("5.000") && lines[11].contains("80.0 %"), "{table}");

        let read = ProfileFigures::of_table(&table).unwrap();
        assert_eq!((read.step_ms, read.longest_submission_ms), (5.0, Some(2.0)));
        let kernel = "matmul plain (8,8) -> (8,8)".to_string();
        let matmul = KernelFigures { kernel, count: 2, ms: 3.0, gflops: 3.0, gbs: 1.5 };
        assert_eq!((read.kernels.len(), &read.kernels[0]), (2, &matmul));
        // Bound by memory: 1.5 of 3 GB/s, and 3 of 60 GFLOP/s.
        assert_eq!(matmul.roofline_ms(60.0, 3.0), 1.5);
        assert_eq!(ProfileFigures::of_table("error: no adapter"), None);
    }
}
