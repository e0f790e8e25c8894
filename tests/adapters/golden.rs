//! Parity with PyTorch: from equal weights and data, the gradients of the first step, the
//! parameters after 10 steps of SGD and the losses of 50 steps of AdamW, on the CPU device and on
//! every adapter, fused as runs are; of MLPs also on unlike devices together, with uneven shares
//! and as a pipeline. The data and the script that made them are in `tests/golden/`.

use std::collections::HashMap;

use potluck_core::{BucketId, HostTensor, HostTensorView};
use potluck_graph::model::{GptConfig, MlpConfig, MlpLoss, gpt, mlp};
use potluck_graph::optim::Optimizer;
use potluck_graph::{
    Graph, Parameter, ParameterKind, Plan, PlanOptions, Unary, UpdateRange, differentiate, fuse,
};
use potluck_kernels::exec::{BucketTensor, Executor, StepSums};
use potluck_train::checkpoint::NamedTensor;
use potluck_train::{PipelineOptions, Shares, Trainer, TrainerOptions};
use safetensors::{Dtype, SafeTensors};

/// The farthest that values may be from PyTorch's.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    pub(crate) gradient_nmse: f64,
    /// After the steps of SGD.
    pub(crate) parameter_nmse: f64,
    /// Relative, on every one of the losses.
    pub(crate) loss_error: f64,
}

/// Swapping one GELU for the other moves a gradient by an NMSE of 2e-7, a wrong epsilon by 1e-8;
/// PyTorch's own f32 is within 4e-13 of its f64.
const LIMITS: Limits = Limits { gradient_nmse: 1e-9, parameter_nmse: 1e-9, loss_error: 5e-5 };

/// Optimizers of the two runs.
const SGD: Optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
const ADAMW: Optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };

/// Data of one case, by name.
pub(crate) struct Golden {
    pub(crate) floats: HashMap<String, Vec<f32>>,
    pub(crate) ints: HashMap<String, Vec<u32>>,
    pub(crate) settings: HashMap<String, String>,
}

impl Golden {
    pub(crate) fn read(case: &str) -> Self {
        let path = format!("{}/tests/golden/{case}.safetensors", env!("CARGO_MANIFEST_DIR"));
        let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let settings = header.metadata().clone().unwrap_or_default();
        let (mut floats, mut ints) = (HashMap::new(), HashMap::new());
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().iter() {
            let words = view.data().chunks_exact(4).map(|w| [w[0], w[1], w[2], w[3]]);
            match view.dtype() {
                Dtype::F32 => {
                    floats.insert(name.to_string(), words.map(f32::from_le_bytes).collect());
                }
                Dtype::F64 => {
                    let words = view.data().chunks_exact(8);
                    let values = words.map(|w| f64::from_le_bytes(w.try_into().unwrap()) as f32);
                    floats.insert(name.to_string(), values.collect());
                }
                Dtype::U32 => {
                    ints.insert(name.to_string(), words.map(u32::from_le_bytes).collect());
                }
                other => panic!("{name} is {other:?}"),
            }
        }
        Self { floats, ints, settings }
    }

    pub(crate) fn number(&self, key: &str) -> usize {
        self.settings[key].parse().unwrap()
    }

    fn rate(&self, key: &str) -> f64 {
        self.settings[key].parse().unwrap()
    }

    /// What SGD makes of a parameter.
    fn after_sgd(&self, name: &str) -> &[f32] {
        &self.floats[&format!("sgd{}/{name}", self.number("sgd_steps"))]
    }

    fn graph(&self) -> Graph {
        let activation = match self.settings["activation"].as_str() {
            "gelu" => Unary::Gelu,
            "gelu_tanh" => Unary::GeluTanh,
            "relu" => Unary::Relu,
            other => panic!("activation {other}"),
        };
        if self.settings.contains_key("layers") {
            let config = GptConfig {
                vocabulary: self.number("vocabulary"),
                context: self.number("context"),
                positions: self.number("context"),
                layers: self.number("layers"),
                heads: self.number("heads"),
                width: self.number("width"),
                bias: self.settings["bias"] == "true",
                dropout: 0.0,
                tie: self.settings["tied"] == "true",
                activation,
            };
            return gpt(&config).unwrap();
        }
        let widths: Vec<usize> = serde_json::from_str(&self.settings["widths"]).unwrap();
        let loss = if self.ints.contains_key("batch/0/targets") {
            MlpLoss::CrossEntropy
        } else {
            MlpLoss::SquaredError
        };
        mlp(&MlpConfig { widths, activation, dropout: 0.0, loss }).unwrap()
    }

    pub(crate) fn load(&self, device: &mut dyn Executor) {
        let graph = device.plan().graph.clone();
        crate::common::set_parameters(device, |id| {
            self.floats[&format!("init/{}", graph.parameters[id.index()].name)].clone()
        });
    }

    /// Runs one step on a batch, in micro-batches of `rows` samples.
    fn step(&self, device: &mut dyn Executor, batch: usize, rows: usize) -> StepSums {
        let graph = device.plan().graph.clone();
        device.begin_step().unwrap();
        let samples = self.number("batch");
        for first in (0..samples).step_by(rows) {
            let rows = rows.min(samples - first);
            for (name, id) in graph.inputs_of_samples() {
                let per_row = graph.tensor(*id).shape.per_row();
                let range = first * per_row..(first + rows) * per_row;
                let key = format!("batch/{batch}/{name}");
                match self.floats.get(&key) {
                    Some(values) => device.set_input(*id, 0, HostTensorView::Float(&values[range])),
                    None => device.set_input(*id, 0, HostTensorView::Int(&self.ints[&key][range])),
                }
                .unwrap();
            }
            let pass = crate::common::pass(0, rows);
            crate::common::run_phase(device, true, &pass);
            crate::common::run_phase(device, false, &pass);
        }
        let buckets: Vec<_> = (0..device.plan().buckets.len() as u32).map(BucketId).collect();
        device.finish_step(&buckets).unwrap()
    }

    fn train(
        &self,
        device: &mut dyn Executor,
        optimizer: &Optimizer,
        lr: f64,
        steps: u64,
        rows: usize,
    ) -> Vec<f64> {
        self.load(device);
        let mut losses = Vec::new();
        for step in 1..=steps {
            let sums = self.step(device, (step as usize - 1) % 4, rows);
            losses.push(sums.loss.loss / sums.loss.count);
            for bucket in 0..device.plan().buckets.len() {
                let layout = &device.plan().buckets[bucket];
                let Some(update) = layout.update(&optimizer.update(lr, step)) else { continue };
                let is_state = layout.kind.is_state();
                let count = if is_state { self.number("batch") as f64 } else { sums.loss.count };
                let range = UpdateRange {
                    start: 0,
                    length: layout.length,
                    decay_end: layout.decay_end,
                    gradient_scale: (1.0 / count) as f32,
                    rounding: None,
                };
                device.update(BucketId(bucket as u32), &update, &range).unwrap();
            }
        }
        losses
    }

    /// The gradient of the mean loss on batch 0, by parameter; running averages have none.
    fn gradients(&self, device: &mut dyn Executor, rows: usize) -> Vec<(String, Vec<f32>)> {
        self.load(device);
        let sums = self.step(device, 0, rows);
        let trained = |p: &&Parameter| p.kind == ParameterKind::Trained;
        let parameters = device.plan().graph.parameters.iter().filter(trained);
        let names: Vec<String> = parameters.map(|p| p.name.clone()).collect();
        let mean = |name: String| {
            let sum = crate::common::parameter(device, BucketTensor::Gradients, &name);
            let mean = sum.iter().map(|g| (f64::from(*g) / sums.loss.count) as f32).collect();
            (name, mean)
        };
        names.into_iter().map(mean).collect()
    }
}

fn check(case: &str) {
    let golden = Golden::read(case);
    golden.check(case, golden.graph(), golden.number("batch"), LIMITS);
}

impl Golden {
    /// Compares a graph with PyTorch on every device, in micro-batches of `rows` samples.
    pub(crate) fn check(&self, case: &str, graph: Graph, rows: usize, limits: Limits) {
        let plan = Plan::new(fuse(differentiate(graph).unwrap()), PlanOptions::new(rows));
        for mut device in crate::common::devices(&plan, 2) {
            let device = device.as_mut();
            let who = format!("{case} on {}", device.name());
            self.check_gradients(&who, device, rows, limits);
            self.train(device, &SGD, self.rate("sgd_lr"), self.number("sgd_steps") as u64, rows);
            for parameter in &plan.graph.parameters {
                let name = &parameter.name;
                let got = crate::common::parameter(device, BucketTensor::Parameters, name);
                let nmse = crate::common::nmse(&got, self.after_sgd(name));
                let is_right = nmse <= limits.parameter_nmse;
                assert!(is_right, "{who}: {name} after SGD, NMSE {nmse:.1e}");
            }
            let losses = self.check_losses(&who, device, rows, limits);
            assert!(losses[losses.len() - 1] < 0.8 * losses[0], "{who}: the loss does not fall");
        }
    }

    /// Compares the gradients of the first batch.
    pub(crate) fn check_gradients(
        &self,
        who: &str,
        device: &mut dyn Executor,
        rows: usize,
        limits: Limits,
    ) {
        let gradients = self.gradients(device, rows);
        let of = |name: &str| &self.floats[&format!("grad/{name}")];
        let model: f64 = gradients.iter().map(|(name, _)| crate::common::squares(of(name))).sum();
        for (name, gradient) in &gradients {
            let nmse = crate::common::gradient_nmse(gradient, of(name), model);
            let is_right = nmse <= limits.gradient_nmse;
            assert!(is_right, "{who}: gradient of {name}, NMSE {nmse:.1e}");
        }
        let stored = self.floats.keys().filter(|key| key.starts_with("grad/")).count();
        assert_eq!(gradients.len(), stored, "{who}: parameters");
    }

    /// Compares the losses of the run of AdamW, and returns them.
    pub(crate) fn check_losses(
        &self,
        who: &str,
        device: &mut dyn Executor,
        rows: usize,
        limits: Limits,
    ) -> Vec<f64> {
        for bucket in 0..device.plan().buckets.len() as u32 {
            let zeros = vec![0.0; device.plan().buckets[bucket as usize].length];
            for moment in 0..2 {
                device
                    .write_bucket(BucketTensor::Moment(moment), BucketId(bucket), &zeros)
                    .unwrap();
            }
        }
        let expected = &self.floats["adamw/losses"];
        let steps = expected.len() as u64;
        let losses = self.train(device, &ADAMW, self.rate("adamw_lr"), steps, rows);
        for (step, (got, expected)) in losses.iter().zip(expected).enumerate() {
            let error = (got / f64::from(*expected) - 1.0).abs();
            let is_right = error <= limits.loss_error;
            assert!(is_right, "{who}: loss {got} of step {step}, expected {expected}");
        }
        losses
    }

    /// Inputs of a whole batch.
    pub(crate) fn batch<'g>(&self, graph: &'g Graph, batch: usize) -> Vec<(&'g str, HostTensor)> {
        let value = |(name, _): &'g (String, _)| {
            let key = format!("batch/{batch}/{name}");
            let floats = self.floats.get(&key).map(|values| HostTensor::Float(values.clone()));
            (name.as_str(), floats.unwrap_or_else(|| HostTensor::Int(self.ints[&key].clone())))
        };
        graph.inputs.iter().map(value).collect()
    }

    /// A trainer with the initial parameters.
    pub(crate) fn trainer(
        &self,
        graph: &Graph,
        options: &TrainerOptions,
        optimizer: Optimizer,
    ) -> Trainer {
        let options = TrainerOptions { optimizer, ..options.clone() };
        let mut trainer = Trainer::new(graph.clone(), &options).unwrap();
        let initial = |tensor: NamedTensor| {
            let values = self.floats[&format!("init/{}", tensor.name)].clone();
            NamedTensor { values, ..tensor }
        };
        let tensors: Vec<_> = trainer.parameters().unwrap().into_iter().map(initial).collect();
        trainer.set_parameters(&tensors).unwrap();
        trainer
    }

    /// Trains on several devices and compares with what PyTorch computes on one.
    pub(crate) fn check_together(
        &self,
        case: &str,
        graph: &Graph,
        options: &TrainerOptions,
        limits: Limits,
    ) {
        let mut trainer = self.trainer(graph, options, SGD);
        for step in 0..self.number("sgd_steps") {
            let taken = trainer.step(&self.batch(graph, step % 4), self.rate("sgd_lr")).unwrap();
            assert!(taken.updated);
        }
        for got in trainer.parameters().unwrap() {
            let nmse = crate::common::nmse(&got.values, self.after_sgd(&got.name));
            let is_right = nmse <= limits.parameter_nmse;
            assert!(is_right, "{case}: {} after SGD, NMSE {nmse:.1e}", got.name);
        }
        drop(trainer);
        let mut trainer = self.trainer(graph, options, ADAMW);
        for (step, expected) in self.floats["adamw/losses"].iter().enumerate() {
            let batch = self.batch(graph, step % 4);
            let loss = trainer.step(&batch, self.rate("adamw_lr")).unwrap().loss;
            let error = (loss / f64::from(*expected) - 1.0).abs();
            let is_right = error <= limits.loss_error;
            assert!(is_right, "{case}: loss {loss} of step {step}, not {expected}");
        }
    }
}

#[test]
fn gpt_with_biases_and_a_tied_head() {
    check("gpt");
}

#[test]
fn gpt_without_biases_and_with_its_own_head() {
    check("gpt_plain");
}

#[test]
fn mlp_with_cross_entropy_and_ignored_targets() {
    check("mlp");
}

#[test]
fn mlp_with_squared_error() {
    check("mlp_mse");
}

/// Selectors of two adapters and the CPU device; the CPU device several times if there are fewer
/// adapters.
pub(crate) fn three_devices() -> Vec<String> {
    let named = std::env::var("POTLUCK_TEST_ADAPTERS").unwrap_or_default();
    let mut selectors: Vec<String> = match named.as_str() {
        "" => (0..crate::common::adapters().len()).map(|index| index.to_string()).collect(),
        named => named.split(',').map(String::from).collect(),
    };
    selectors.truncate(2);
    selectors.push(format!("cpu*{}", 3 - selectors.len()).replace("*1", ""));
    selectors
}

fn check_together(case: &str, options: &TrainerOptions) {
    let golden = Golden::read(case);
    golden.check_together(case, &golden.graph(), options, LIMITS);
}

pub(crate) fn options_on(devices: &str, batch: usize) -> TrainerOptions {
    TrainerOptions { tune_s: 0.0, ..TrainerOptions::new(devices, SGD, batch) }
}

#[test]
fn unlike_devices_with_uneven_shares_train_as_pytorch_does() {
    let _turn = crate::common::turn();
    let shares = Shares::Fixed(vec![10, 4, 2]);
    let options = TrainerOptions {
        shares,
        micro_batch_size: 5,
        ..options_on(&three_devices().join(","), 16)
    };
    for case in ["mlp", "mlp_mse"] {
        check_together(case, &options);
    }
}

#[test]
fn a_pipeline_of_unlike_devices_trains_as_pytorch_does() {
    let _turn = crate::common::turn();
    let devices = three_devices()[..2].join(",").replace("*2", "");
    let pipeline = PipelineOptions { stages: 2, ..PipelineOptions::default() };
    let options = TrainerOptions { pipeline, micro_batch_size: 4, ..options_on(&devices, 16) };
    for case in ["mlp", "mlp_mse"] {
        check_together(case, &options);
    }
}

/// The gradient with V scaled by 1.01 in one block is refused: the comparison can fail.
#[test]
fn a_planted_wrong_gradient_is_refused() {
    let golden = Golden::read("gpt");
    let name = "h.0.attn.c_attn.weight";
    let wrong = &golden.floats[&format!("wrong/{name}")];
    let nmse = crate::common::nmse(wrong, &golden.floats[&format!("grad/{name}")]);
    assert!(nmse > f64::max(1e-6, LIMITS.gradient_nmse), "NMSE {nmse:.1e}");
}

/// Micro-batches of 1 and 3 samples accumulate to the gradient of the batch of 4, although their
/// numbers of ignored targets differ.
#[test]
fn accumulated_gradients_are_those_of_the_whole_batch() {
    let golden = Golden::read("gpt");
    let plan = Plan::new(fuse(differentiate(golden.graph()).unwrap()), PlanOptions::new(3));
    for mut device in crate::common::devices(&plan, 0) {
        for rows in [1, 3] {
            for (name, gradient) in golden.gradients(device.as_mut(), rows) {
                let nmse = crate::common::nmse(&gradient, &golden.floats[&format!("grad/{name}")]);
                let who = device.name();
                assert!(nmse <= LIMITS.gradient_nmse, "{name} on {who} by {rows}: NMSE {nmse:.1e}");
            }
        }
    }
}
