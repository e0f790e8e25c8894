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
use potluck_kernels::{OpCall, RandomContext, twin};
use potluck_train::runtime::RuntimeError;
use potluck_train::{TrainError, Trainer, TrainerOptions};

/// Warm-up steps between the first one and those that are measured.
const WARM_UP: usize = 2;

/// Minimum number of measured steps, however long they take.
const STEPS_MIN: usize = 3;

/// Batch sizes of GPT-2 124M, of which the largest that fits is measured.
const BATCHES: [usize; 6] = [32, 16, 8, 4, 2, 1];

/// Returns the model of nanoGPT's recipe for the CPU: 0.8 million parameters.
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
    /// Unit of what is counted, and the number of these in a sample.
    unit: &'static str,
    per_sample: usize,
    /// Classes of targets, and of tokens.
    classes: u32,
    /// Sizes of the step, for the reader.
    on: String,
}

impl MeasuredModel {
    fn gpt(name: &'static str, config: &GptConfig, batch: usize) -> Result<Self, TrainError> {
        let on = format!("batch {batch}, context {}, AdamW", config.context);
        let (graph, classes) = (gpt(config)?, config.vocabulary as u32);
        Ok(Self { name, graph, batch, unit: "tokens", per_sample: config.context, classes, on })
    }

    /// Returns a model of pictures of 28 x 28 in ten classes.
    fn of_pictures(name: &'static str, graph: Graph, batch: usize) -> Self {
        let on = format!("batch {batch}, 28 x 28, AdamW");
        Self { name, graph, batch, unit: "samples", per_sample: 1, classes: 10, on }
    }

    /// Returns values of all inputs, the same every time.
    fn inputs(&self) -> Vec<(&str, HostTensor)> {
        let value = |id: TensorId| {
            let tensor = self.graph.tensor(id);
            let (count, key) = (tensor.shape.elements(self.batch), Key::new(id.0.into()));
            match tensor.dtype {
                DType::U32 => {
                    let class = |i: u64| key.words([i as u32, 0])[0] % self.classes;
                    HostTensor::Int((0..count as u64).map(class).collect())
                }
                DType::F32 => {
                    HostTensor::Float((0..count as u64).map(|i| key.normal(i) as f32).collect())
                }
            }
        };
        let inputs = self.graph.inputs_of_samples();
        inputs.map(|(name, id)| (name.as_str(), value(*id))).collect()
    }
}

/// Returns the small models that are not GPTs, of the sizes of the examples.
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
    let recurrent = |cell| {
        let (vocabulary, context, layers, width) = (65, 64, 2, 128);
        RnnConfig { vocabulary, context, layers, width, cell, dropout: 0.0, stateful: false }
    };
    let of_cell = |name, cell| -> Result<MeasuredModel, TrainError> {
        let on = "batch 32, context 64, AdamW".to_string();
        let graph = rnn(&recurrent(cell))?;
        let (unit, per_sample, classes) = ("tokens", 64, 65);
        Ok(MeasuredModel { name, graph, batch: 32, unit, per_sample, classes, on })
    };
    Ok(vec![
        MeasuredModel::of_pictures("lenet", cnn(&lenet)?, 64),
        MeasuredModel::of_pictures("resnet", resnet(&residual)?, 64),
        of_cell("lstm", Cell::Lstm)?,
        of_cell("gru", Cell::Gru)?,
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
    let what = |what: &str| format!("step.{name}_{what}");
    let figures = [
        Figure::duration(FigureKind::Step, &what("time"), "ms", 1e3, &seconds),
        Figure::new(FigureKind::Step, &what(unit), &rate_unit, Direction::Higher, &rates),
        Figure::rate(FigureKind::Step, &what("flops"), GFLOPS, flops, &seconds),
        Figure::duration(FigureKind::Step, &what("first_step"), "ms", 1e3, &[first]),
    ];
    for figure in figures {
        recorder.add(figure.on(&model.on));
    }
    Ok(())
}

/// Returns the seconds from before the device is opened to the end of the first step, and those
/// of each measured step.
fn steps(
    model: &MeasuredModel,
    target: &Target,
    sampling_plan: &SamplingPlan,
) -> Result<(f64, Vec<f64>), TrainError> {
    let (values, batch) = (model.inputs(), model.batch);
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
    let options =
        TrainerOptions { clip: 1.0, ..TrainerOptions::new(&target.selector, optimizer, batch) };
    let opened = Instant::now();
    let mut trainer = Trainer::new(model.graph.clone(), &options)?;
    let mut step = || -> Result<f64, TrainError> {
        let begun = Instant::now();
        let step = trainer.step(&values, 1e-3)?;
        if !step.updated {
            let why = format!("a step was not finite, at a loss of {}", step.loss);
            return Err(TrainError::Defect(why));
        }
        Ok(begun.elapsed().as_secs_f64())
    };
    step()?;
    let first = opened.elapsed().as_secs_f64();
    for _ in 0..WARM_UP {
        step()?;
    }
    let mut seconds = Vec::with_capacity(sampling_plan.steps);
    let (begun, longest) =
        (Instant::now(), Duration::from_secs_f64(sampling_plan.steps_seconds_max));
    while seconds.len() < STEPS_MIN
        || (seconds.len() < sampling_plan.steps && begun.elapsed() < longest)
    {
        seconds.push(step()?);
    }
    Ok((first, seconds))
}

/// Returns the floating-point operations of a step of a training graph: matrix products,
/// convolutions and attention, forward and backward.
fn flops_of(graph: &Graph, batch: usize) -> f64 {
    let dims = |ids: &[potluck_core::TensorId]| -> Vec<Vec<usize>> {
        ids.iter().map(|id| graph.tensor(*id).shape.resolve(batch)).collect()
    };
    let of_step = graph.nodes.iter().filter(|node| node.when.includes(true));
    let cost = of_step.filter_map(|node| {
        let twin = twin(&node.op).filter(|twin| twin.counts_as_model_flops)?;
        let call = OpCall {
            op: &node.op,
            inputs: dims(&node.inputs),
            outputs: dims(&node.outputs),
            accumulate: node.accumulate,
            precision: node.precision,
            loss_scale: 1.0,
            random: RandomContext { step_key: Key::new(0), training: true },
        };
        Some((twin.cost)(&call).flops)
    });
    cost.sum()
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
