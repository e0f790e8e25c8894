//! Benchmark of training steps of models, with the same trainer as a training run.

use std::time::{Duration, Instant};

use super::report::{Direction, Figure, FigureKind, FigureRecorder, GFLOPS};
use super::sample::SamplingPlan;
use super::target::Target;
use potluck_core::rng::Key;
use potluck_core::{DType, HostTensor, TensorId};
use potluck_graph::model::{
    CnnConfig, GptConfig, MlpLoss, PictureNorm, PictureSizes, ResnetConfig, RnnConfig, cnn, gpt,
    resnet, rnn,
};
use potluck_graph::optim::Optimizer;
use potluck_graph::{Cell, Graph, Unary, differentiate};
use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::PassContext;
use potluck_kernels::{RandomContext, twin};
use potluck_train::runtime::RuntimeError;
use potluck_train::{TrainError, Trainer, TrainerOptions};

/// Warm-up steps between the first one and the measured ones.
const WARM_UP: usize = 2;

/// Minimum number of measured steps, regardless of their duration.
const STEPS_MIN: usize = 3;

/// Batch sizes of GPT-2 124M; the largest that fits is measured.
const BATCHES: [usize; 6] = [32, 16, 8, 4, 2, 1];

/// Model of nanoGPT's recipe for the CPU: 0.8 million parameters.
pub(crate) fn small() -> GptConfig {
    GptConfig {
        vocabulary: 65,
        context: 64,
        positions: 64,
        layers: 4,
        heads: 4,
        width: 128,
        bias: false,
        dropout: 0.0,
        tie: true,
        activation: Unary::Gelu,
    }
}

/// Returns the model of GPT-2 with 124 million parameters.
pub fn gpt2() -> GptConfig {
    GptConfig {
        vocabulary: 50_257,
        context: 1024,
        positions: 1024,
        layers: 12,
        heads: 12,
        width: 768,
        bias: true,
        dropout: 0.0,
        tie: true,
        activation: Unary::GeluTanh,
    }
}

/// Model whose steps are measured, with its inputs.
struct MeasuredModel {
    /// Name in figures.
    name: &'static str,
    graph: Graph,
    batch: usize,
    /// Unit of the throughput, such as `tokens`.
    unit: &'static str,
    /// Units in a sample.
    per_sample: usize,
    /// Number of classes of targets, and of tokens.
    classes: u32,
    /// Sizes of the step, for display.
    on: String,
}

impl MeasuredModel {
    fn gpt(name: &'static str, config: &GptConfig, batch: usize) -> Result<Self, TrainError> {
        Ok(Self {
            name,
            graph: gpt(config)?,
            batch,
            unit: "tokens",
            per_sample: config.context,
            classes: config.vocabulary as u32,
            on: format!("batch {batch}, context {}, AdamW", config.context),
        })
    }

    /// Returns a model of pictures of 28 x 28 in ten classes.
    fn of_pictures(name: &'static str, graph: Graph, batch: usize) -> Self {
        let on = format!("batch {batch}, 28 x 28, AdamW");
        Self { name, graph, batch, unit: "samples", per_sample: 1, classes: 10, on }
    }

    /// Returns a recurrent model of tokens.
    fn recurrent(name: &'static str, cell: Cell) -> Result<Self, TrainError> {
        let graph = rnn(&RnnConfig {
            vocabulary: 65,
            context: 64,
            layers: 2,
            width: 128,
            cell,
            dropout: 0.0,
            stateful: false,
        })?;
        let on = "batch 32, context 64, AdamW".to_string();
        Ok(Self { name, graph, batch: 32, unit: "tokens", per_sample: 64, classes: 65, on })
    }

    /// Returns values of all inputs, the same every time.
    fn inputs(&self) -> Vec<(&str, HostTensor)> {
        let inputs = self.graph.inputs_of_samples();
        inputs.map(|(name, id)| (name.as_str(), self.input(*id))).collect()
    }

    fn input(&self, id: TensorId) -> HostTensor {
        let tensor = self.graph.tensor(id);
        let count = tensor.shape.elements(self.batch) as u64;
        let key = Key::new(id.0.into());
        match tensor.dtype {
            DType::U32 => HostTensor::Int(
                (0..count).map(|i| key.words([i as u32, 0])[0] % self.classes).collect(),
            ),
            DType::F32 => HostTensor::Float((0..count).map(|i| key.normal(i) as f32).collect()),
        }
    }
}

/// Small models that are not GPTs, with the sizes of the examples.
fn small_models() -> Result<Vec<MeasuredModel>, TrainError> {
    let sizes = PictureSizes { picture: [1, 28, 28], outputs: 10, loss: MlpLoss::CrossEntropy };
    let lenet = CnnConfig {
        sizes: sizes.clone(),
        channels: vec![6, 16],
        hidden: vec![120, 84],
        activation: Unary::Relu,
        dropout: 0.0,
    };
    let residual = ResnetConfig { sizes, blocks: 1, width: 16, norm: PictureNorm::Batch };
    Ok(vec![
        MeasuredModel::of_pictures("lenet", cnn(&lenet)?, 64),
        MeasuredModel::of_pictures("resnet", resnet(&residual)?, 64),
        MeasuredModel::recurrent("lstm", Cell::Lstm)?,
        MeasuredModel::recurrent("gru", Cell::Gru)?,
    ])
}

/// Measures the steps of the small GPT and, with `full` on hardware, of GPT-2.
pub fn measure(
    target: &Target,
    sampling_plan: &SamplingPlan,
    full: bool,
    recorder: &mut FigureRecorder,
) -> Result<(), TrainError> {
    recorder.progress("the step of a small GPT");
    let of_gpt = MeasuredModel::gpt("gpt_small", &small(), sampling_plan.batch)?;
    measure_model(&of_gpt, target, sampling_plan, recorder)?;
    if !full {
        return Ok(());
    }
    for model in small_models()? {
        recorder.progress(&format!("the step of a {}", model.name));
        measure_model(&model, target, sampling_plan, recorder)?;
    }
    if !target.is_hardware() {
        recorder.skip("step.gpt2", "it is for hardware GPUs");
        return Ok(());
    }
    for batch in BATCHES {
        recorder.progress(&format!("the step of GPT-2 124M, batch {batch}"));
        let model = MeasuredModel::gpt("gpt2", &gpt2(), batch)?;
        match measure_model(&model, target, sampling_plan, recorder) {
            Err(error) if does_not_fit(&error) => (),
            other => return other,
        }
    }
    recorder.skip("step.gpt2", "no batch fits");
    Ok(())
}

fn does_not_fit(error: &TrainError) -> bool {
    use DeviceError::{LoopTooLong, OutOfMemory, TooLarge};
    use RuntimeError::{Device, DeviceMemory, Memory, NoRoom};
    let TrainError::Runtime(error) = error else { return false };
    matches!(
        error,
        Memory { .. }
            | DeviceMemory { .. }
            | NoRoom { .. }
            | Device(LoopTooLong { .. } | OutOfMemory { .. } | TooLarge { .. })
    )
}

fn measure_model(
    model: &MeasuredModel,
    target: &Target,
    sampling_plan: &SamplingPlan,
    recorder: &mut FigureRecorder,
) -> Result<(), TrainError> {
    let MeasuredModel { name, unit, .. } = model;
    let units = (model.batch * model.per_sample) as f64;
    let flops = flops_of(&differentiate(model.graph.clone())?, model.batch);
    let (first, seconds) = steps(model, target, sampling_plan)?;
    let rates: Vec<f64> = seconds.iter().map(|seconds| units / seconds).collect();
    let rate_unit = format!("{unit}/s");
    let kind = FigureKind::Step;
    let [time, throughput, rate, first_step] =
        ["time", *unit, "flops", "first_step"].map(|what| format!("step.{name}_{what}"));
    let figures = [
        Figure::duration(kind.clone(), &time, "ms", 1e3, &seconds),
        Figure::new(kind.clone(), &throughput, &rate_unit, Direction::Higher, &rates),
        Figure::rate(kind.clone(), &rate, GFLOPS, flops, &seconds),
        Figure::duration(kind, &first_step, "ms", 1e3, &[first]),
    ];
    for figure in figures {
        recorder.add(figure.on(&model.on));
    }
    Ok(())
}

/// Returns the seconds from before the device is opened to the end of the first step, and the
/// seconds of each measured step.
fn steps(
    model: &MeasuredModel,
    target: &Target,
    sampling_plan: &SamplingPlan,
) -> Result<(f64, Vec<f64>), TrainError> {
    let values = model.inputs();
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
    let options = TrainerOptions {
        clip: 1.0,
        ..TrainerOptions::new(&target.selector, optimizer, model.batch)
    };
    let opened = Instant::now();
    let mut trainer = Trainer::new(model.graph.clone(), &options)?;
    step(&mut trainer, &values)?;
    let first = opened.elapsed().as_secs_f64();
    for _ in 0..WARM_UP {
        step(&mut trainer, &values)?;
    }
    let mut seconds = Vec::with_capacity(sampling_plan.steps);
    let longest = Duration::from_secs_f64(sampling_plan.steps_seconds_max);
    let begun = Instant::now();
    while seconds.len() < STEPS_MIN
        || (seconds.len() < sampling_plan.steps && begun.elapsed() < longest)
    {
        seconds.push(step(&mut trainer, &values)?);
    }
    Ok((first, seconds))
}

/// Performs a step; returns its seconds.
fn step(trainer: &mut Trainer, values: &[(&str, HostTensor)]) -> Result<f64, TrainError> {
    let begun = Instant::now();
    let step = trainer.step(values, 1e-3)?;
    if !step.updated {
        let why = format!("a step was not finite, at a loss of {}", step.loss);
        return Err(TrainError::Defect(why));
    }
    Ok(begun.elapsed().as_secs_f64())
}

/// Returns the floating-point operations of a step of a training graph: matrix products,
/// convolutions and attention, forward and backward.
fn flops_of(graph: &Graph, batch: usize) -> f64 {
    let random = RandomContext { step_key: Key::new(0), training: true };
    let pass = PassContext { micro_batch: 0, rows: batch, loss_scale: 1.0, random };
    let mut flops = 0.0;
    for node in &graph.nodes {
        if let Some(twin) = twin(&node.op)
            && twin.counts_as_model_flops
            && let Some(cost) = pass.cost(graph, node)
        {
            flops += cost.flops;
        }
    }
    flops
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every weight takes part in a product forward and in two backward; see
    /// Kaplan et al. 2020, section 2.1.
    #[test]
    fn the_operations_of_a_step_are_those_of_its_weights_and_of_attention() {
        for (config, batch) in [(small(), 12), (gpt2(), 1)] {
            let tokens = (batch * config.context) as f64;
            let c = config.width as f64;
            let layers = config.layers as f64;
            let weights = layers * 12.0 * c * c + config.vocabulary as f64 * c;
            // Two products forward and five backward, over half of the square.
            let attention = 7.0 * tokens * (config.context as f64 + 1.0) * c * layers;
            let expected = 6.0 * tokens * weights + attention;
            let counted = flops_of(&differentiate(gpt(&config).unwrap()).unwrap(), batch);
            assert!((counted / expected - 1.0).abs() < 0.02, "{counted:e}, not {expected:e}");
        }
    }

    #[test]
    fn gpt_2_has_124_million_parameters() {
        let graph = gpt(&gpt2()).unwrap();
        let count = |id: &potluck_core::TensorId| graph.tensor(*id).shape.elements(1);
        let tensors = graph.parameters.iter().map(|parameter| count(&parameter.tensor));
        assert_eq!(tensors.sum::<usize>(), 124_439_808);
    }
}
