//! Evaluation: the loss on a split, by forward passes over windows that do not overlap.
//!
//! An evaluation is divided into jobs of bounded duration. Signals are checked between jobs and
//! between the segments of a forward pass. The windows of each device, the micro-batches and the
//! order in which losses are added depend only on the request, never on timing, so a loss has the
//! same bits every time.
//!
//! For a model that carries its state from step to step, the windows are divided into runs of
//! consecutive windows, one per sample of a batch; the state is carried through each run.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::best::EvalExtent;
use super::error::TrainError;
use super::loader::BatchSource;
use super::signals::SignalFlags;
use super::task::Task;
use crate::runtime::pipelines::ModelPipelines;
use crate::runtime::step::{Inputs, NextState, NextStates, inference_pass, read_states};
use crate::runtime::workers::WorkerGroup;
use potluck_core::{HostTensor, Rank, SegmentId, TensorId};
use potluck_data::{DataError, Split};
use potluck_graph::{Graph, PassKind};
use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::{Executor, LossSums, load};
use potluck_parallel::planner::laid_out::forward_micro_batches_max;

/// Largest number of micro-batches whose losses a device sums in f32; the host adds those sums in
/// f64.
const BATCHES_PER_SUM: usize = 16;

/// Duration after which the job of a device ends, unless it or another device has not finished its
/// first batch.
const JOB_TIME: Duration = Duration::from_millis(200);

/// Largest amount of work, in seconds at the measured pace, queued on a device before waiting for
/// it.
const QUEUED_MAX_S: f64 = 0.2;

/// Request for an evaluation.
pub struct EvalRequest<'a> {
    pub source: &'a BatchSource,
    /// Graph of the model.
    pub graph: &'a Graph,
    /// Task whose metrics are computed.
    pub task: &'a Arc<dyn Task>,
    /// Pipelines of the group; each has one stage if every rank holds the whole model.
    pub pipelines: &'a ModelPipelines,
    pub split: Split,
    /// Samples (windows) to evaluate, spread evenly over the split; 0: all.
    pub samples: u64,
    /// Largest number of samples in a pass of each rank or pipeline.
    pub rows: &'a [u32],
    /// Weights for dividing the samples among the ranks or pipelines.
    pub weights: &'a [u32],
    /// Signals that end the evaluation early: between the segments of a rank's passes, or between
    /// groups of [`forward_micro_batches_max`] micro-batches of a pipeline.
    pub signals: &'a SignalFlags,
}

/// Result of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// Mean loss over the targets that count, in nats; NaN if none counts.
    pub loss: f64,
    pub samples: u64,
    /// Number of targets that count; with class weights, the integer part of the sum of their
    /// weights.
    pub targets: u64,
    /// Means of the terms of a loss of several terms, by name and without their weights.
    pub terms: Vec<(String, f64)>,
    /// Sums for the metrics of the task; empty from [`Trainer::evaluate`] and
    /// [`Trainer::evaluate_rows`], which have no task.
    ///
    /// [`Trainer::evaluate`]: crate::Trainer::evaluate
    /// [`Trainer::evaluate_rows`]: crate::Trainer::evaluate_rows
    pub sums: Vec<f64>,
}

/// Windows that a rank evaluates in one pass.
#[derive(Clone, Debug, PartialEq, Eq)]
struct EvalBatch {
    windows: Vec<u64>,
    /// True if each window follows the window in the same row of the previous batch.
    continues: bool,
}

/// Sums of one rank over its first `done` batches. The losses of a partial sum of fewer than
/// [`BATCHES_PER_SUM`] batches are still on the device.
#[derive(Clone, Debug, Default)]
struct RankSums {
    done: usize,
    loss: LossSums,
    /// Sums of the task.
    scores: Vec<f64>,
    /// States after the last batch, for a model that carries them.
    states: NextStates,
    /// Pace of the device; only affects when the host waits for it.
    pace: Pace,
}

/// Constant part of the jobs of an evaluation.
struct EvalJob {
    source: BatchSource,
    split: Split,
    parts: Vec<Vec<EvalBatch>>,
    signals: SignalFlags,
    scoring: Option<Scoring>,
}

#[derive(Clone)]
struct Scoring {
    task: Arc<dyn Task>,
    output: TensorId,
    targets: TensorId,
}

impl Scoring {
    /// Scoring of a model by a task; `None` if the task scores nothing.
    fn of(graph: &Graph, task: &Arc<dyn Task>) -> Result<Option<Self>, TrainError> {
        let Some(name) = task.scored_output() else { return Ok(None) };
        let (Some(output), Some(targets)) = (graph.output(name), graph.input("targets")) else {
            let why = format!("the model has no output {name} or no input targets to be scored");
            return Err(TrainError::InvalidRequest(why));
        };
        let (width, dtype) = task.scored_type();
        let found = graph.tensor(output).shape.per_row();
        let is_typed = graph.tensor(targets).dtype == dtype;
        if found != width || !is_typed {
            let why = format!(
                "the task scores {width} values of {name} per sample and targets of type \
                 {dtype:?}, and the model has {found} values and targets of type {:?}",
                graph.tensor(targets).dtype
            );
            return Err(TrainError::InvalidRequest(why));
        }
        Ok(Some(Self { task: task.clone(), output, targets }))
    }

    fn add(&self, outputs: &[f32], inputs: &Inputs, sums: &mut [f64]) {
        if let Some((_, targets)) = inputs.iter().find(|(id, _)| *id == self.targets) {
            self.task.score(outputs, targets, sums);
        }
    }
}

/// Extent of an evaluation of `samples` samples; 0: all samples of the split.
pub(crate) fn extent_of(source: &BatchSource, split: Split, samples: u64) -> EvalExtent {
    let all = source.data.evaluation_samples(split).len() as u64;
    let samples = if samples == 0 { all } else { samples.min(all) };
    let runs = u64::from(source.sampler.batch()).min(samples);
    EvalExtent { samples, runs: if source.carries() { runs } else { 0 } }
}

/// Evaluates windows of a split that do not overlap, divided among ranks or pipelines. `progress`
/// receives the numbers of finished and of all samples after each job. Returns `None` if a signal
/// arrived.
///
/// # Errors
/// Returns `TrainError` if a device fails, and the errors of `progress`.
pub fn evaluate_split(
    group: &mut WorkerGroup,
    request: &EvalRequest,
    progress: &mut dyn FnMut(u64, u64) -> Result<(), TrainError>,
) -> Result<Option<Evaluation>, TrainError> {
    let EvalRequest { source, graph, task, pipelines, split, samples, rows, weights, signals } =
        *request;
    let windows = source.data.evaluation_samples(split);
    let runs = if graph.carried.is_empty() {
        spread(&windows, samples).into_iter().map(|window| vec![window]).collect()
    } else {
        consecutive(&windows, samples, source.sampler.batch() as usize)
    };
    let total = runs.iter().map(Vec::len).sum::<usize>() as u64;
    let mut parts = Vec::with_capacity(rows.len());
    for (part, rows) in share_out(&runs, weights).into_iter().zip(rows) {
        parts.push(batches(part, (*rows).max(1) as usize));
    }
    let scoring = Scoring::of(graph, task)?;
    let job = EvalJob { source: source.clone(), split, parts, signals: signals.clone(), scoring };
    let job = Arc::new(job);
    let none = RankSums { scores: vec![0.0; task.sum_count()], ..RankSums::default() };
    let mut sums = vec![none; job.parts.len()];
    while job.samples_done(&sums) < total {
        if signals.pending().is_some() {
            return Ok(None);
        }
        sums = if pipelines.is_divided() {
            run_pipelines(group, pipelines, &job, sums)?
        } else {
            run_jobs(group, &job, sums)?
        };
        progress(job.samples_done(&sums), total)?;
    }
    let mut loss = LossSums::default();
    let mut scores = vec![0.0; task.sum_count()];
    for sums in &sums {
        loss.add(&sums.loss);
        for (all, of_rank) in scores.iter_mut().zip(&sums.scores) {
            *all += of_rank;
        }
    }
    Ok(Some(Evaluation::of(graph, &loss, total, scores)))
}

impl Evaluation {
    /// Means computed from the sums of the loss over `samples` samples.
    pub(crate) fn of(graph: &Graph, sums: &LossSums, samples: u64, scores: Vec<f64>) -> Self {
        let means = sums.means_of_terms();
        Self {
            loss: sums.loss / sums.count,
            samples,
            targets: sums.count as u64,
            terms: graph.loss_terms.iter().cloned().zip(means).collect(),
            sums: scores,
        }
    }
}

/// Runs one job on every rank; returns their new sums.
fn run_jobs(
    group: &WorkerGroup,
    job: &Arc<EvalJob>,
    sums: Vec<RankSums>,
) -> Result<Vec<RankSums>, TrainError> {
    let job = Arc::clone(job);
    let begun = Arc::new(sums);
    // Ranks that have not finished their first batch of this job.
    let first = Arc::new(AtomicUsize::new(begun.len()));
    let ended = group.run_on_all("an evaluation", move |rank, device| {
        match run_job(device, &job, rank, begun[rank.index()].clone(), &first) {
            Err(EvalError::Device(error)) => Err(error),
            Err(EvalError::Data(error)) => Ok(Err(error)),
            Ok(sums) => Ok(Ok(sums)),
        }
    })?;
    Ok(ended.into_iter().collect::<Result<_, DataError>>()?)
}

#[derive(Debug, thiserror::Error)]
enum EvalError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Data(#[from] DataError),
}

/// Runs as many micro-batches on every pipeline as it runs at once; returns the new sums.
fn run_pipelines(
    group: &mut WorkerGroup,
    pipelines: &ModelPipelines,
    job: &EvalJob,
    mut sums: Vec<RankSums>,
) -> Result<Vec<RankSums>, TrainError> {
    let most = if pipelines.graph().carried.is_empty() {
        forward_micro_batches_max(pipelines.depth())
    } else {
        // Each begins with the states after the previous one.
        1
    };
    let mut work = Vec::with_capacity(sums.len());
    for (part, sums) in job.parts.iter().zip(&mut sums) {
        let end = part.len().min(sums.done + most);
        let mut batches = Vec::new();
        for batch in &part[sums.done..end] {
            batches.push((batch.windows.len() as u32, job.inputs(batch, &sums.states)?));
        }
        work.push(batches);
        sums.done = end;
    }
    if let Some(scoring) = &job.scoring {
        for (pipeline, (batches, sums)) in work.iter().zip(&mut sums).enumerate() {
            for (rows, inputs) in batches {
                let rows = *rows as usize;
                let outputs = pipelines.output(group, pipeline, rows, inputs, scoring.output)?;
                scoring.add(&outputs, inputs, &mut sums.scores);
            }
        }
    }
    for (sums, passed) in sums.iter_mut().zip(pipelines.forward(group, work)?) {
        sums.loss.add(&passed.loss);
        sums.states = passed.states.into_iter().next_back().unwrap_or_default();
    }
    Ok(sums)
}

fn run_job(
    device: &mut dyn Executor,
    job: &EvalJob,
    rank: Rank,
    mut sums: RankSums,
    first: &AtomicUsize,
) -> Result<RankSums, EvalError> {
    let part = &job.parts[rank.index()];
    let mut turn = FirstBatch(Some(first));
    let started = Instant::now();
    // The host waited for the device at the end of the previous job.
    sums.pace = Pace { queued: 0, since: None, ..sums.pace };
    while sums.done < part.len() {
        // Otherwise this continues a sum whose first batches ran in earlier jobs.
        if sums.done.is_multiple_of(BATCHES_PER_SUM) {
            device.begin_step()?;
        }
        if !run_batch(device, &part[sums.done], job, &mut sums)? {
            break;
        }
        sums.done += 1;
        if sums.done.is_multiple_of(BATCHES_PER_SUM) || sums.done == part.len() {
            sums.loss.add(&device.loss()?);
        }
        turn.finish();
        // Without the second condition, fast devices would wait for a slow one in every job.
        if started.elapsed() >= JOB_TIME && first.load(Ordering::Relaxed) == 0 {
            // Reading the partial sum waits for the device, and does not change it.
            device.loss()?;
            break;
        }
    }
    Ok(sums)
}

/// Counts a rank down once: when it has finished its first batch of a job, or has no batch.
struct FirstBatch<'a>(Option<&'a AtomicUsize>);

impl FirstBatch<'_> {
    fn finish(&mut self) {
        if let Some(first) = self.0.take() {
            first.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for FirstBatch<'_> {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Runs a batch, whose loss the device adds to its sum; adds its scores to `sums`, and stores the
/// new states there. Returns false if a signal arrived during the batch.
fn run_batch(
    device: &mut dyn Executor,
    batch: &EvalBatch,
    job: &EvalJob,
    sums: &mut RankSums,
) -> Result<bool, EvalError> {
    let segments: Vec<SegmentId> = device.plan().phase(PassKind::Forward).collect();
    let inputs = job.inputs(batch, &sums.states)?;
    load(device, &inputs, 0)?;
    let pass = inference_pass(batch.windows.len());
    for segment in segments {
        if job.signals.pending().is_some() {
            return Ok(false);
        }
        let nodes = device.plan().segments[segment.index()].nodes.clone();
        device.run(nodes, &pass)?;
        sums.pace.queued(device)?;
    }
    if let Some(scoring) = &job.scoring {
        scoring.add(&device.read(scoring.output, &pass)?, &inputs, &mut sums.scores);
    }
    sums.states = read_states(device, &pass)?;
    Ok(true)
}

impl EvalJob {
    /// Inputs of a batch, with the states `before` it if it continues the previous one.
    fn inputs(&self, batch: &EvalBatch, before: &NextStates) -> Result<Inputs, DataError> {
        let mut inputs = self.source.rows(self.split, &batch.windows)?;
        if !batch.continues {
            return Ok(inputs);
        }
        for NextState { input, values } in before {
            let zeros = inputs.iter_mut().find(|(id, _)| id == input);
            if let Some((_, HostTensor::Float(zeros))) = zeros {
                // The previous batch may have more rows.
                for (zero, value) in zeros.iter_mut().zip(values) {
                    *zero = *value;
                }
            }
        }
        Ok(inputs)
    }

    fn samples_done(&self, sums: &[RankSums]) -> u64 {
        let mut samples = 0;
        for (part, sums) in self.parts.iter().zip(sums) {
            for batch in &part[..sums.done] {
                samples += batch.windows.len() as u64;
            }
        }
        samples
    }
}

/// Pace of a device: waits for it when the queued work may take longer than [`QUEUED_MAX_S`].
#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    /// Segments queued since the last wait, and the limit for the next wait.
    queued: u32,
    most: u32,
    since: Option<Instant>,
}

impl Pace {
    fn queued(&mut self, device: &mut dyn Executor) -> Result<(), DeviceError> {
        self.queued += 1;
        let since = *self.since.get_or_insert_with(Instant::now);
        if self.queued <= self.most {
            return Ok(());
        }
        // Reading the partial sum waits for the device, and does not change it.
        device.loss()?;
        let per_segment = since.elapsed().as_secs_f64() / f64::from(self.queued);
        // The first segments may be the fastest, so the limit at most doubles.
        let fits = (QUEUED_MAX_S / per_segment.max(1e-9)).min(f64::from(2 * self.queued));
        *self = Self { queued: 0, most: fits as u32, since: Some(Instant::now()) };
        Ok(())
    }
}

/// Selects `samples` of the windows, spread evenly and deterministically; 0: all.
fn spread(starts: &[u64], samples: u64) -> Vec<u64> {
    let all = starts.len() as u64;
    if samples == 0 || samples >= all {
        return starts.to_vec();
    }
    (0..samples).map(|index| starts[(index * all / samples) as usize]).collect()
}

/// Selects `samples` of the windows (0: all) in at most `count` runs of consecutive windows. The
/// runs have nearly equal lengths, and so do the gaps between them.
fn consecutive(windows: &[u64], samples: u64, count: usize) -> Vec<Vec<u64>> {
    let all = windows.len();
    let samples = if samples == 0 { all } else { all.min(samples as usize) };
    let count = count.min(samples);
    let mut runs = Vec::with_capacity(count);
    for index in 0..count {
        let taken = index * samples / count;
        let next = (index + 1) * samples / count;
        let first = taken + index * (all - samples) / count;
        runs.push(windows[first..first + next - taken].to_vec());
    }
    runs
}

/// Divides runs of windows into consecutive parts in proportion to weights.
fn share_out(runs: &[Vec<u64>], weights: &[u32]) -> Vec<Vec<Vec<u64>>> {
    let total: u64 = weights.iter().map(|weight| u64::from(*weight)).sum();
    let mut parts = Vec::with_capacity(weights.len());
    let mut seen = 0;
    let mut from = 0;
    for weight in weights {
        seen += u64::from(*weight);
        let to = (runs.len() as u64 * seen / total.max(1)) as usize;
        parts.push(runs[from..to].to_vec());
        from = to;
    }
    parts
}

/// Batches of at most `rows` rows that traverse runs of windows, one run per row.
fn batches(mut runs: Vec<Vec<u64>>, rows: usize) -> Vec<EvalBatch> {
    let mut batches = Vec::new();
    for rows in runs.chunks_mut(rows) {
        // Shorter runs come last, so that a row always belongs to the same run.
        rows.sort_by_key(|run| std::cmp::Reverse(run.len()));
        for index in 0..rows[0].len() {
            let mut windows = Vec::with_capacity(rows.len());
            for run in rows.iter() {
                if let Some(window) = run.get(index) {
                    windows.push(*window);
                }
            }
            batches.push(EvalBatch { windows, continues: index > 0 });
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_window_is_evaluated_once_by_someone() {
        let runs: Vec<Vec<u64>> = (0..10).map(|window| vec![window]).collect();
        let parts = share_out(&runs, &[7, 0, 3]);
        assert_eq!(parts.iter().map(Vec::len).collect::<Vec<_>>(), [7, 0, 3]);
        for weights in [vec![1], vec![1, 1, 1], vec![5, 90, 1]] {
            assert_eq!(share_out(&runs, &weights).concat(), runs, "{weights:?}");
        }
        let alone = batches(runs, 4);
        assert_eq!(alone.iter().map(|batch| batch.windows.len()).collect::<Vec<_>>(), [4, 4, 2]);
        assert!(alone.iter().all(|batch| !batch.continues));
    }

    #[test]
    fn rows_go_through_consecutive_windows() {
        let windows: Vec<u64> = (0..10).map(|index| 8 * index).collect();
        let all = consecutive(&windows, 0, 4);
        assert_eq!(all, [vec![0, 8], vec![16, 24, 32], vec![40, 48], vec![56, 64, 72]]);
        assert_eq!(consecutive(&windows, 5, 2), [vec![0, 8], vec![32, 40, 48]]);
        assert_eq!(consecutive(&windows, 2, 4), [[0], [40]]);
        let batch = |windows: &[u64], continues| EvalBatch { windows: windows.into(), continues };
        let expected = [
            batch(&[16, 0, 40], false),
            batch(&[24, 8, 48], true),
            batch(&[32], true),
            batch(&[56], false),
            batch(&[64], true),
            batch(&[72], true),
        ];
        assert_eq!(batches(all, 3), expected);
        assert!(consecutive(&[], 0, 4).is_empty());
        // No window occurs twice, and their number is right, for all inputs.
        for all in 1..=16 {
            let windows: Vec<u64> = (0..all).collect();
            for (samples, count) in (1..=all).flat_map(|some| (1..=6).map(move |runs| (some, runs)))
            {
                let runs = consecutive(&windows, samples, count);
                let taken: Vec<u64> = runs.concat();
                assert!(taken.is_sorted_by(|one, next| one < next), "{runs:?}");
                assert_eq!(taken.len() as u64, samples, "{runs:?}");
            }
        }
    }

    #[test]
    fn samples_are_spread_evenly_and_zero_means_all() {
        let starts: Vec<u64> = (0..10).map(|index| 8 * index).collect();
        assert_eq!(spread(&starts, 0), starts);
        assert_eq!(spread(&starts, 10), starts);
        assert_eq!(spread(&starts, 1024), starts);
        assert_eq!(spread(&starts, 5), [0, 16, 32, 48, 64]);
        assert_eq!(spread(&starts, 3), [0, 24, 48]);
        assert_eq!(spread(&starts, 1), [0]);
        assert!(spread(&[], 4).is_empty());
    }

    #[test]
    fn a_model_that_a_task_cannot_score_is_refused() {
        use crate::task::task_of_samples;
        use potluck_data::{Normalization, SampleDescription, TargetNames};
        use potluck_graph::Unary;
        use potluck_graph::model::{MlpConfig, MlpLoss, mlp};
        let scoring = |outputs, loss| {
            let widths = vec![2, outputs];
            let graph = mlp(&MlpConfig { widths, activation: Unary::Relu, dropout: 0.0, loss });
            let targets = TargetNames::Classes(vec!["a".into(), "b".into(), "c".into()]);
            let normalization = Normalization::default();
            let samples = SampleDescription {
                shape: vec![2],
                columns: Vec::new(),
                target_columns: Vec::new(),
                targets,
                normalization,
            };
            let found = Scoring::of(&graph.unwrap(), &task_of_samples(&samples));
            found.map(|scoring| scoring.is_some()).map_err(|error| error.to_string())
        };
        assert_eq!(scoring(3, MlpLoss::CrossEntropy), Ok(true));
        let wide = scoring(4, MlpLoss::CrossEntropy).unwrap_err();
        assert!(wide.contains("scores 3 values of outputs per sample"), "{wide}");
        assert!(scoring(3, MlpLoss::SquaredError).unwrap_err().contains("targets of type F32"));
    }
}
