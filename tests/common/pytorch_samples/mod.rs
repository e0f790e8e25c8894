//! The builder's functions beside PyTorch's, on PyTorch's own samples: values and gradients by all
//! inputs, from a file that `tests/pytorch/op_samples.py` makes. A sample whose arguments the
//! builder has no counterpart of is refused, and the table says so.
#![allow(dead_code, reason = "each test binary uses a part of this module")]

mod calls;
mod indexing;
mod losses;
mod norms;
mod pictures;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use potluck_core::{BucketId, HostTensor, HostTensorView, TensorId};
use potluck_graph::{
    Builder, Graph, Init, LossTerm, Plan, PlanOptions, ShapeError, differentiate, fuse,
};
use potluck_kernels::exec::{BucketTensor, Executor};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::common::{pass, run_step, set_parameters};
use calls::Arguments;

/// The farthest that values and gradients may be from PyTorch's, computed in f64.
pub const NMSE_MAX: f64 = 1e-10;

/// Ops of which kept samples pass, and all kept samples that do, on every device. Both grow with
/// the builder.
pub const KEPT_PASSED: [usize; 2] = [178, 749];

/// Why a sample is not computed: the builder has no such function, or not with these arguments.
#[derive(Debug)]
pub enum Refusal {
    Unknown,
    Because(&'static str),
    Shape(ShapeError),
    /// The result has these dimensions, and PyTorch's has those.
    Dims(Vec<usize>, Vec<usize>),
}

impl From<ShapeError> for Refusal {
    fn from(error: ShapeError) -> Self {
        Self::Shape(error)
    }
}

type Built = Result<Vec<TensorId>, Refusal>;

#[derive(Clone)]
pub struct Tensor {
    pub dims: Vec<usize>,
    pub values: Vec<f32>,
}

/// Returns the bytes of the samples that are kept with the tests.
pub fn kept_samples() -> Vec<u8> {
    read_samples(&format!("{}/tests/pytorch/op_samples.safetensors", env!("CARGO_MANIFEST_DIR")))
}

/// Returns the bytes of a file of samples.
pub fn read_samples(path: &str) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Samples of a file.
pub struct Samples<'a> {
    list: Vec<Value>,
    tensors: SafeTensors<'a>,
}

impl<'a> Samples<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
        let list = serde_json::from_str(&header.metadata().as_ref().unwrap()["samples"]).unwrap();
        Self { list, tensors: SafeTensors::deserialize(bytes).unwrap() }
    }

    fn op(&self, number: usize) -> &str {
        self.list[number]["op"].as_str().unwrap()
    }

    fn tensor(&self, name: &str) -> Option<Tensor> {
        let view = self.tensors.tensor(name).ok()?;
        let values = match view.dtype() {
            Dtype::F32 => {
                let words = view.data().chunks_exact(4);
                words.map(|w| f32::from_le_bytes(w.try_into().unwrap())).collect()
            }
            Dtype::I64 => {
                let words = view.data().chunks_exact(8);
                words.map(|w| i64::from_le_bytes(w.try_into().unwrap()) as f32).collect()
            }
            other => panic!("{name} is {other:?}"),
        };
        Some(Tensor { dims: view.shape().to_vec(), values })
    }
}

/// Gradient that a sample should have: of a parameter.
pub struct Expected {
    pub sample: usize,
    pub name: String,
    pub tensor: Tensor,
}

/// Graph of samples: its loss is the sum of the products of all results with `dout`, so that the
/// gradients by `dout` are the results.
pub struct SampleGraph {
    pub graph: Graph,
    pub parameters: HashMap<String, Vec<f32>>,
    pub inputs: Vec<(String, HostTensor)>,
    pub expected: Vec<Expected>,
}

impl SampleGraph {
    /// Builds the graph of samples by their numbers.
    fn of(samples: &Samples, numbers: &[usize]) -> Result<Self, Refusal> {
        let mut b = Builder::new();
        let mut loss = b.input("batch", &[1]);
        let mut joined = Self {
            graph: Graph::default(),
            parameters: HashMap::new(),
            inputs: vec![("batch".into(), HostTensor::Float(vec![0.0]))],
            expected: Vec::new(),
        };
        for number in numbers {
            loss = joined.add(&mut b, samples, *number, loss)?;
        }
        b.loss(&[LossTerm::sum("loss", loss)])?;
        joined.graph = differentiate(b.finish())?;
        Ok(joined)
    }

    /// Adds a sample, and returns the loss with its own.
    fn add(
        &mut self,
        b: &mut Builder,
        samples: &Samples,
        number: usize,
        mut loss: TensorId,
    ) -> Result<TensorId, Refusal> {
        let sample = &samples.list[number];
        let prefix = format!("{number}.");
        let (mut x, mut given) = (Vec::new(), Vec::new());
        while let Some(tensor) = samples.tensor(&format!("{number}/in/{}", x.len())) {
            let name = format!("{prefix}in.{}", x.len());
            x.push(b.parameter(&name, &tensor.dims, Init::Zeros));
            self.parameters.insert(name, tensor.values.clone());
            given.push(tensor);
        }
        let inputs = &mut self.inputs;
        let results = calls::build(&mut Arguments {
            b,
            sample,
            x: &x,
            given: &given,
            prefix: &prefix,
            inputs,
        })?;
        assert_eq!(results.len(), sample["outputs"].as_u64().unwrap() as usize, "{sample}");
        for (k, result) in results.into_iter().enumerate() {
            let Some(out) = samples.tensor(&format!("{number}/out/{k}")) else {
                panic!("sample {number} has no result {k}");
            };
            let shape = b.shape(result).clone();
            // One row of the batch has the whole result.
            let first = usize::from(shape.is_batched());
            let dims = shape.dims()[first..].to_vec();
            if dims != out.dims {
                return Err(Refusal::Dims(dims, out.dims));
            }
            let name = format!("{prefix}dout.{k}");
            let weights = b.parameter(&name, &dims, Init::Zeros);
            let dout = samples.tensor(&format!("{number}/dout/{k}"));
            let ones = || vec![1.0; out.values.len()];
            self.parameters.insert(name.clone(), dout.map_or_else(ones, |tensor| tensor.values));
            self.expected.push(Expected { sample: number, name, tensor: out });
            let product = b.mul(result, weights)?;
            let sum = b.sum(product, &(first..shape.rank()).collect::<Vec<_>>())?;
            loss = b.add(loss, sum)?;
        }
        for k in sample["gradients"].as_array().unwrap() {
            let tensor = samples.tensor(&format!("{number}/grad/{k}")).unwrap();
            let name = format!("{prefix}in.{k}");
            self.expected.push(Expected { sample: number, name, tensor });
        }
        Ok(loss)
    }

    /// Returns the plan of the graph as it is, or fused.
    pub fn plan(&self, is_fused: bool) -> Plan {
        let graph = self.graph.clone();
        Plan::new(if is_fused { fuse(graph) } else { graph }, PlanOptions::new(1))
    }

    /// Runs a step on a device with a plan of the graph. Returns the worst NMSE of each sample.
    pub fn worst(&self, device: &mut dyn Executor) -> BTreeMap<usize, (f64, String)> {
        let graph = device.plan().graph.clone();
        set_parameters(device, |id| self.parameters[&graph.parameters[id.index()].name].clone());
        for (name, values) in &self.inputs {
            let input = graph.input(name).unwrap();
            let values = match values {
                HostTensor::Float(values) => HostTensorView::Float(values),
                HostTensor::Int(values) => HostTensorView::Int(values),
            };
            device.set_input(input, 0, values).unwrap();
        }
        run_step(device, &pass(0, 1));
        let gradients = gradients(device);
        let mut worst = BTreeMap::new();
        for Expected { sample, name, tensor } in &self.expected {
            let got = &gradients[name];
            let error = error_of(got, &tensor.values);
            let (known, what) = worst.entry(*sample).or_insert((0.0, String::new()));
            if error >= *known {
                *known = error;
                *what = format!("{name}: {got:?} for {:?}", tensor.values);
            }
        }
        worst
    }
}

/// Returns all gradients by the names of their parameters.
fn gradients(device: &mut dyn Executor) -> HashMap<String, Vec<f32>> {
    let graph = device.plan().graph.clone();
    let mut found = HashMap::new();
    for (bucket, layout) in device.plan().buckets.clone().iter().enumerate() {
        let bucket_tensor =
            device.read_bucket(BucketTensor::Gradients, BucketId(bucket as u32)).unwrap().to_vec();
        for (id, start) in &layout.parameters {
            let parameter = &graph.parameters[id.index()];
            let count = graph.tensor(parameter.tensor).shape.per_row();
            found.insert(parameter.name.clone(), bucket_tensor[*start..start + count].to_vec());
        }
    }
    found
}

/// Returns the NMSE. What is below a millionth counts as 0: some gradients are what is left of
/// sums that cancel.
fn error_of(got: &[f32], expected: &[f32]) -> f64 {
    let (mut error, mut size) = (0.0, 1e-12f64);
    for (got, expected) in got.iter().zip(expected) {
        let is_finite = got.is_finite() && expected.is_finite();
        if !is_finite && got != expected && !(got.is_nan() && expected.is_nan()) {
            return f64::INFINITY;
        }
        if is_finite {
            let apart = f64::from(got - expected);
            error += if apart.abs() < 1e-6 { 0.0 } else { apart * apart };
            size += f64::from(*expected).powi(2);
        }
    }
    error / size
}

/// The samples that a device has run.
struct DeviceRun {
    name: String,
    passed: BTreeSet<usize>,
}

/// The samples of a file by what became of them.
pub struct Survey<'a> {
    samples: &'a Samples<'a>,
    /// Numbers of the samples of which the builder makes graphs.
    pub built: Vec<usize>,
    /// How many are refused by op and reason.
    refused: BTreeMap<&'a str, BTreeMap<String, usize>>,
    runs: Vec<DeviceRun>,
    wrong: Vec<String>,
}

impl<'a> Survey<'a> {
    /// Builds the graph of each sample.
    pub fn new(samples: &'a Samples<'a>) -> Self {
        let mut survey = Self {
            samples,
            built: Vec::new(),
            refused: BTreeMap::new(),
            runs: Vec::new(),
            wrong: Vec::new(),
        };
        for number in 0..samples.list.len() {
            match SampleGraph::of(samples, &[number]) {
                Ok(_) => survey.built.push(number),
                Err(refusal) => survey.note(number, refusal),
            }
        }
        survey
    }

    /// Notes a refusal, which is an error if the builder has the function.
    fn note(&mut self, number: usize, refusal: Refusal) {
        let (op, sample) = (self.samples.op(number), &self.samples.list[number]);
        let why = match refusal {
            Refusal::Unknown => "the builder has no such function".to_string(),
            Refusal::Because(why) => why.to_string(),
            // Only products are refused, by their axes.
            Refusal::Shape(error) if op == "matmul" => error.why,
            Refusal::Shape(error) => {
                self.wrong.push(format!("{number} {sample}: {error}"));
                return;
            }
            Refusal::Dims(got, expected) => {
                self.wrong.push(format!("{number} {sample}: {got:?} for {expected:?}"));
                return;
            }
        };
        *self.refused.entry(op).or_default().entry(why).or_default() += 1;
    }

    /// Returns the first built sample of each op.
    pub fn first_of_each_op(&self) -> Vec<usize> {
        let mut seen = BTreeSet::new();
        self.built.iter().copied().filter(|number| seen.insert(self.samples.op(*number))).collect()
    }

    /// Runs samples plain and fused on devices that `open` makes for plans, with so many samples
    /// in a graph.
    pub fn run(
        &mut self,
        device: &str,
        numbers: &[usize],
        per_graph: usize,
        open: &mut dyn FnMut(Plan) -> Box<dyn Executor>,
    ) {
        let mut passed = BTreeSet::new();
        for group in numbers.chunks(per_graph) {
            let joined = SampleGraph::of(self.samples, group).unwrap();
            let mut right: BTreeSet<usize> = group.iter().copied().collect();
            for is_fused in [false, true] {
                let worst = joined.worst(open(joined.plan(is_fused)).as_mut());
                for (number, (error, what)) in worst {
                    if error <= NMSE_MAX {
                        continue;
                    }
                    right.remove(&number);
                    let sample = &self.samples.list[number];
                    self.wrong.push(format!(
                        "{number} {sample} on {device}, fused {is_fused}: NMSE {error:.1e}, \
                         {what:.300}"
                    ));
                }
            }
            passed.extend(right);
        }
        self.runs.push(DeviceRun { name: device.into(), passed });
    }

    /// Returns the ops of which samples passed, and all samples that did, per device.
    pub fn passed(&self) -> Vec<[usize; 2]> {
        let mut all = Vec::new();
        for run in &self.runs {
            let ops: BTreeSet<&str> = run.passed.iter().map(|at| self.samples.op(*at)).collect();
            all.push([ops.len(), run.passed.len()]);
        }
        all
    }

    /// Prints the table of ops and devices.
    pub fn print(&self) {
        let mut usable: BTreeMap<&str, usize> = BTreeMap::new();
        for number in 0..self.samples.list.len() {
            *usable.entry(self.samples.op(number)).or_default() += 1;
        }
        for (op, count) in &usable {
            let mut line = format!("{op:45} {count:4} usable");
            for run in &self.runs {
                let is_own = |number: &&usize| self.samples.op(**number) == *op;
                let passed = run.passed.iter().filter(is_own).count();
                line += &format!(", {passed:4} passed on {}", run.name);
            }
            let refused = self.refused.get(op).cloned().unwrap_or_default();
            println!("{line}; refused: {refused:?}");
        }
        for (run, [ops, passed]) in self.runs.iter().zip(self.passed()) {
            let (all, name) = (self.samples.list.len(), &run.name);
            println!("{ops} of {} ops, {passed} of {all} samples on {name}", usable.len());
        }
    }

    /// Fails if a sample was refused or computed wrongly.
    pub fn assert_right(&self) {
        assert!(self.wrong.is_empty(), "{} samples:\n{}", self.wrong.len(), self.wrong.join("\n"));
    }
}
