//! Shards of models on several devices, whose all-reduces the test computes between segments: they
//! have the loss, the logits and the gradients of the whole graph, whatever the model's options.

use std::collections::BTreeMap;

use potluck_core::rng::Key;
use potluck_core::{BucketId, ParamId, TensorId};
use potluck_graph::model::{GptConfig, MlpConfig, MlpLoss, gpt, mlp};
use potluck_graph::{
    Bucket, Builder, Graph, Init, Op, Parameter, ParameterSplit, PassKind, Plan, PlanOptions,
    Reduction, Region, Segment, Shard, ShardError, SplitUnit, Unary, cut_large_parameters,
    differentiate, fuse, init, reported_once, shard,
};
use potluck_kernels::exec::{BucketTensor, Cpu, Executor, LossSums, PassContext};
use proptest::prelude::*;

use crate::common::{evaluation, fill_inputs, parameter, pass, squares};

/// Model that is divided.
#[derive(Clone, Debug)]
enum Model {
    Gpt(GptConfig),
    Mlp(MlpConfig),
}

impl Model {
    fn graph(&self) -> Graph {
        match self {
            Self::Gpt(config) => gpt(config).unwrap(),
            Self::Mlp(config) => mlp(config).unwrap(),
        }
    }

    /// Width of the output, and number of the ids and classes.
    fn classes(&self) -> usize {
        match self {
            Self::Gpt(config) => config.vocabulary,
            Self::Mlp(config) => config.widths[config.widths.len() - 1],
        }
    }
}

/// A model, and how it is divided.
#[derive(Clone, Debug)]
struct Case {
    model: Model,
    /// Samples of the micro-batch.
    rows: usize,
    shares: Vec<f64>,
    fused: bool,
    /// The most bytes of a parameter that the devices bind, if they have a limit.
    bytes_max: Option<usize>,
}

/// A limit of the devices, or none. All ranks cut a tensor into as many slices, so the limit has to
/// be one by which no rank needs more slices of a tensor than another one has rows.
fn limits(bytes_max: usize) -> impl Strategy<Value = Option<usize>> {
    any::<bool>().prop_map(move |is_limited| is_limited.then_some(bytes_max))
}

/// GPTs with as many heads, columns and classes as ranks, at least, of odd sizes.
fn gpts() -> impl Strategy<Value = Case> {
    let sizes = (4usize..7, 8usize..12, 4usize..90, 1usize..8, 1usize..3, 1usize..4);
    let options = (any::<[bool; 4]>(), 0usize..3);
    let shares = prop::collection::vec(0.2f64..4.0, 1..5);
    (sizes, options, shares, limits(4096)).prop_map(|(sizes, options, shares, bytes_max)| {
        let ([bias, tie, drops, fused], activation) = options;
        let (heads, columns, vocabulary, context, layers, rows) = sizes;
        let activation = [Unary::Gelu, Unary::GeluTanh, Unary::Relu][activation];
        let dropout = if drops { 0.3 } else { 0.0 };
        let width = heads * columns;
        let config = GptConfig {
            vocabulary,
            context,
            positions: context,
            layers,
            heads,
            width,
            bias,
            dropout,
            tie,
            activation,
        };
        Case { model: Model::Gpt(config), rows, shares, fused, bytes_max }
    })
}

/// Perceptrons with one to three hidden layers, also of odd numbers of columns.
fn perceptrons() -> impl Strategy<Value = Case> {
    let sizes = (1usize..9, 1usize..9, 1usize..4);
    let hidden = prop::collection::vec(128usize..200, 1..4);
    let shares = prop::collection::vec(0.2f64..4.0, 1..5);
    // Slices have 10 rows of up to 199 columns, so a rank needs 20 at most, and each has 32 rows.
    (sizes, hidden, any::<[bool; 3]>(), shares, limits(8192)).prop_map(
        |((inputs, outputs, rows), hidden, [drops, classes, fused], shares, bytes_max)| {
            let config = MlpConfig {
                widths: [vec![inputs], hidden, vec![outputs]].concat(),
                activation: Unary::Tanh,
                dropout: if drops { 0.3 } else { 0.0 },
                loss: if classes { MlpLoss::CrossEntropy } else { MlpLoss::SquaredError },
            };
            Case { model: Model::Mlp(config), rows, shares, fused, bytes_max }
        },
    )
}

/// One device of a tensor group.
struct Rank {
    device: Cpu<f64>,
    outputs: Vec<Vec<std::ops::Range<usize>>>,
    /// Output of the forward pass, once it has run.
    values: Vec<f32>,
}

impl Rank {
    fn new(part: Shard, case: &Case) -> Self {
        let &Case { rows, fused, bytes_max, .. } = case;
        let graph = match bytes_max {
            Some(bytes) => cut_large_parameters(part.graph, bytes),
            None => part.graph,
        };
        let graph = reported_once(differentiate(graph).unwrap());
        let graph = if fused { fuse(graph) } else { graph };
        let options = PlanOptions { parameter_bytes_max: bytes_max, ..PlanOptions::new(rows) };
        let plan = Plan::new(graph, options);
        let mut device = Cpu::oracle(plan, 0);
        write_parameters(&mut device);
        Self { device, outputs: part.outputs, values: Vec::new() }
    }

    fn plan(&self) -> &Plan {
        self.device.plan()
    }
}

/// Sets every parameter to its slice of a tensor of numbers that follow from its name.
fn write_parameters(device: &mut dyn Executor) {
    let plan = device.plan().clone();
    for (index, bucket) in plan.buckets.iter().enumerate().filter(|(index, _)| plan.held[*index]) {
        let mut values = vec![0.0; bucket.length];
        for (id, start) in &bucket.parameters {
            let parameter = &plan.graph.parameters[id.index()];
            let own = parameter.slice.cut(&whole_values(parameter));
            values[*start..start + own.len()].copy_from_slice(&own);
        }
        let bucket = BucketId(index as u32);
        device.write_bucket(BucketTensor::Parameters, bucket, &values).unwrap();
    }
}

fn whole_values(parameter: &Parameter) -> Vec<f32> {
    let seed = parameter
        .whole
        .name
        .bytes()
        .fold(7, |hash: u64, byte| hash.wrapping_mul(31) + u64::from(byte));
    let count: usize = parameter.slice.whole_dims().iter().product();
    let shift = if parameter.init == Init::Ones { 1.0 } else { 0.0 };
    (0..count).map(|index| (shift + 0.3 * Key::new(seed).normal(index as u64)) as f32).collect()
}

/// Reduction that a rank waits for, and the tensors of it that are reduced.
type Site = (Reduction, Vec<TensorId>);

impl Rank {
    /// Runs segments from number `next` on, up to one that ends with a reduction; `None` at the end
    /// of the backward pass, or outside of training of the forward pass.
    fn run_to_reduction(&mut self, next: &mut usize, pass: &PassContext) -> Option<Site> {
        let plan = self.device.plan().clone();
        let is_forward = |segment: &Segment| segment.phase == PassKind::Forward;
        let forward_end = plan.segments.iter().rposition(is_forward);
        let end = if pass.random.training { plan.segments.len() } else { forward_end? + 1 };
        while *next < end {
            let nodes = plan.segments[*next].nodes.clone();
            self.device.run(nodes.clone(), pass).unwrap();
            if Some(*next) == forward_end && !pass.random.training {
                self.values = self.device.read(plan.graph.outputs[0].1, pass).unwrap();
            }
            *next += 1;
            let last = &plan.graph.nodes[nodes.end - 1];
            if let Some(reduction) = last.op.reduction() {
                return Some((reduction, last.outputs.clone()));
            }
        }
        None
    }
}

/// Runs one micro-batch on all ranks, from reduction to reduction, and what the host does there.
fn run(ranks: &mut [Rank], pass: &PassContext, vocabulary: usize) {
    for rank in ranks.iter_mut() {
        rank.device.begin_step().unwrap();
        fill_inputs(&mut rank.device, 0, pass.rows, 3, vocabulary as u32);
    }
    let mut next = vec![0; ranks.len()];
    loop {
        let run = |(rank, next): (&mut Rank, &mut usize)| rank.run_to_reduction(next, pass);
        let sites: Vec<Option<Site>> = ranks.iter_mut().zip(&mut next).map(run).collect();
        let Some((reduction, _)) = sites[0] else {
            assert!(sites.iter().all(Option::is_none), "ranks end at other places: {sites:?}");
            return;
        };
        let mut parts = Vec::new();
        for (rank, site) in ranks.iter_mut().zip(&sites) {
            let (of_rank, tensors) = site.as_ref().unwrap();
            assert_eq!(*of_rank, reduction, "ranks reduce other things");
            let read = |id: &TensorId| rank.device.read(*id, pass).unwrap();
            parts.push(tensors.iter().map(read).collect::<Vec<Vec<f32>>>());
        }
        let reduced = reduction.reduce(&parts);
        for (rank, site) in ranks.iter_mut().zip(&sites) {
            for (tensor, values) in site.as_ref().unwrap().1.iter().zip(&reduced) {
                let (tensor, range) = (rank.plan().graph.root(*tensor), 0..values.len());
                let place = Region::Tensor { tensor, micro_batch: 0, range };
                rank.device.write_place(&place, values).unwrap();
            }
        }
    }
}

/// Returns the outputs, put together from the columns of all ranks, or those that each rank has
/// whole.
fn outputs(ranks: &[Rank], width: usize) -> Vec<f32> {
    let mut whole: Vec<f32> = Vec::new();
    let mut columns = 0;
    for rank in ranks {
        let own = rank.outputs[0].clone();
        let count: usize = own.iter().map(std::ops::Range::len).sum();
        whole.resize(rank.values.len() / count * width, 0.0);
        for (row, values) in rank.values.chunks_exact(count).enumerate() {
            let places = own.iter().cloned().flatten();
            places.zip(values).for_each(|(column, value)| whole[row * width + column] = *value);
        }
        columns += count;
    }
    if columns == width * ranks.len() {
        assert!(ranks.iter().all(|rank| rank.values == whole), "ranks have other outputs");
    } else {
        assert_eq!(columns, width, "each column is of one rank");
    }
    whole
}

fn check(case: &Case) {
    let Case { model, rows, shares, bytes_max, .. } = case;
    let (graph, classes) = (model.graph(), model.classes());
    let part = |shares: &[f64], position| shard(&graph, shares, position).unwrap();
    let of_one = Case { bytes_max: None, ..case.clone() };
    let mut whole = [Rank::new(part(&[1.0], 0), &of_one)];
    let parts = (0..shares.len()).map(|position| part(shares, position));
    let mut ranks: Vec<Rank> = parts.map(|part| Rank::new(part, case)).collect();
    let pass = pass(0, *rows);
    let evaluation = evaluation(0, *rows);
    run(&mut whole, &evaluation, classes);
    run(&mut ranks, &evaluation, classes);
    let of_whole = outputs(&whole, classes);
    // A single output may be what is left of a sum that cancels: it counts as 0.1 at least.
    let size = squares(&of_whole).max(0.01 * of_whole.len() as f64);
    let apart = outputs(&ranks, classes).into_iter().zip(&of_whole);
    let apart: Vec<f32> = apart.map(|(got, expected)| got - expected).collect();
    let error = squares(&apart) / size;
    assert!(error < 1e-9, "outputs: {error:e}");
    run(&mut whole, &pass, classes);
    run(&mut ranks, &pass, classes);

    let expected = whole[0].device.loss().unwrap();
    let mut found = LossSums::default();
    for rank in &mut ranks {
        found.add(&rank.device.loss().unwrap());
    }
    assert_eq!(found.count, expected.count);
    // Sums are exchanged in f32, so outputs are off by their last bits, whatever the loss is.
    let tolerance = 1e-6 * (expected.loss.abs() + expected.count);
    assert!((found.loss - expected.loss).abs() <= tolerance, "{found:?} {expected:?}");

    let buckets = ranks[0].plan().buckets.clone();
    assert!(ranks.iter().all(|rank| rank.plan().buckets == buckets), "buckets differ");
    if let Some(bytes) = bytes_max {
        // All tables here have rows of less.
        let is_table = |bucket: &Bucket| {
            let parameters = &ranks[0].plan().graph.parameters;
            let dims = |id: &ParamId| parameters[id.index()].slice.dims().len();
            bucket.parameters.iter().any(|(id, _)| dims(id) == 2)
        };
        let largest = buckets.iter().filter(|bucket| is_table(bucket)).map(|b| 4 * b.length).max();
        assert!(largest <= Some(*bytes), "a bucket has {largest:?} bytes");
    }
    let gradients: BTreeMap<String, Vec<f32>> = graph
        .parameters
        .iter()
        .map(|p| {
            (p.name.clone(), parameter(&mut whole[0].device, BucketTensor::Gradients, &p.name))
        })
        .collect();
    let square = |values: &[f32]| values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
    let of_model: f64 = gradients.values().map(|values| square(values)).sum();
    // Gradients of a squared error are as uncertain as the difference of outputs and targets, of
    // which the outputs come from sums in f32.
    let cancellation = match model {
        Model::Mlp(MlpConfig { loss: MlpLoss::SquaredError, .. }) => {
            square(&of_whole) / expected.loss
        }
        _ => 0.0,
    };
    let tolerance = 1e-9 + 1e-12 * cancellation;
    let mut elements = 0;
    for of_rank in &ranks[0].plan().graph.parameters.clone() {
        let expected = of_rank.slice.cut(&gradients[&of_rank.whole.name]);
        elements += expected.len();
        let mut sum = vec![0.0; expected.len()];
        let mut holders = 0;
        for (position, rank) in ranks.iter_mut().enumerate() {
            let is_own = of_rank.rank.is_none_or(|rank| rank as usize == position);
            assert_eq!(holds(rank.plan(), &of_rank.name), is_own, "{}", of_rank.name);
            if is_own {
                let own = parameter(&mut rank.device, BucketTensor::Gradients, &of_rank.name);
                holders += usize::from(own.iter().any(|value| *value != 0.0));
                sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
            }
        }
        assert!(holders <= 1, "{} has the gradients of several ranks", of_rank.name);
        let errors: Vec<f32> = sum.iter().zip(&expected).map(|(a, b)| a - b).collect();
        // What ranks exchange is rounded to f32, half a unit of 6e-8, which moves a slice of small
        // gradients by as much of those of the model.
        let own = square(&expected);
        let error = square(&errors);
        let is_right = error <= tolerance * own + 1e-14 * of_model;
        assert!(is_right, "{}: {error:e} of {own:e}, the model {of_model:e}", of_rank.name);
    }
    let whole_elements = gradients.values().map(Vec::len).sum::<usize>();
    assert_eq!(elements, whole_elements, "slices are not all of the tensors");
}

/// Returns true if a device that runs a plan has a parameter.
fn holds(plan: &Plan, name: &str) -> bool {
    let id = plan.graph.parameters.iter().position(|parameter| parameter.name == name).unwrap();
    let has = |bucket: &Bucket| bucket.parameters.iter().any(|(of, _)| of.index() == id);
    plan.held[plan.buckets.iter().position(has).unwrap()]
}

fn generated() -> ProptestConfig {
    ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(generated())]

    #[test]
    fn gpt_shards_have_whole_gradients(case in gpts()) {
        check(&case);
    }

    #[test]
    fn mlp_shards_have_whole_gradients(case in perceptrons()) {
        check(&case);
    }
}

fn tiny() -> GptConfig {
    GptConfig {
        vocabulary: 65,
        context: 4,
        positions: 4,
        layers: 2,
        heads: 4,
        width: 32,
        bias: true,
        dropout: 0.1,
        tie: true,
        activation: Unary::Gelu,
    }
}

/// Two all-reduces of activations and two of their gradients per layer, one of each for embedding
/// and head, and the losses.
#[test]
fn layer_has_two_reductions_each_way() {
    let part = shard(&gpt(&tiny()).unwrap(), &[1.0, 1.0], 1).unwrap();
    let graph = fuse(differentiate(part.graph).unwrap());
    let reductions = |forward: bool| {
        let nodes = graph.nodes.iter().filter(|node| matches!(node.op, Op::AllReduce(_)));
        nodes.filter(|node| (node.phase == PassKind::Forward) == forward).count()
    };
    assert_eq!((reductions(true), reductions(false)), (2 * 2 + 2, 2 * 2 + 1));
    let slice =
        |name: &str| graph.parameters.iter().find(|p| p.name == name).unwrap().slice.clone();
    assert_eq!(slice("h.0.attn.c_attn.weight/1").ranges(0), [16..32, 48..64, 80..96]);
    assert_eq!(slice("h.1.attn.c_proj.weight/1").ranges(1)[0], 16..32);
    assert_eq!(slice("h.1.mlp.c_proj.weight/1").ranges(1)[0], 64..128);
    assert_eq!(slice("wte.weight/1").ranges(0)[0], 32..65);
    assert!(slice("h.0.attn.c_proj.bias").is_whole() && slice("wpe.weight").is_whole());
}

/// Initial values and dropout of a shard are those of the whole model.
#[test]
fn initial_values_are_slices() {
    let whole = gpt(&tiny()).unwrap();
    for position in 0..2 {
        let part = shard(&whole, &[1.0, 3.0], position).unwrap().graph;
        for (index, parameter) in part.parameters.iter().enumerate() {
            let whole_id = ParamId(parameter.whole.number);
            let expected = parameter.slice.cut(&init::values(&whole, whole_id, 9));
            let values = init::values(&part, ParamId(index as u32), 9);
            assert_eq!(values, expected, "{}", parameter.name);
        }
    }
}

#[test]
fn rank_alone_computes_the_whole() {
    let whole = gpt(&tiny()).unwrap();
    let part = shard(&whole, &[5.0], 0).unwrap();
    assert_eq!((part.graph, part.outputs), (whole, vec![std::iter::once(0..65).collect()]));
}

#[test]
fn indivisible_parts_are_refused() {
    let told =
        |graph: &Graph, ranks: usize| shard(graph, &vec![1.0; ranks], 0).unwrap_err().to_string();
    let error = told(&gpt(&tiny()).unwrap(), 5);
    let expected = "h.0.attn.c_attn.weight: 4 heads cannot be divided over 5 ranks: 2 to 4 are \
                    possible";
    assert_eq!(error, expected);
    let narrow = GptConfig { width: 12, heads: 2, ..tiny() };
    assert!(told(&gpt(&narrow).unwrap(), 2).contains("48 columns in multiples of 32"));
    let mut b = Builder::new();
    let x = b.input("x", &[1, 64]);
    let weight = b.parameter("weight", &[64, 64], Init::Zeros);
    b.linear(x, weight, None).unwrap();
    assert_eq!(shard(&b.finish(), &[1.0; 2], 0), Err(ShardError::NoRule));
}

/// A rule that leaves an op with a part of what it needs whole.
#[test]
fn op_of_all_columns_is_refused() {
    let graph = |norms: bool| {
        let mut b = Builder::new();
        let x = b.input("x", &[1, 8]);
        let up = b.parameter("up", &[64, 8], Init::Zeros);
        let mut y = b.linear(x, up, None).unwrap();
        if norms {
            y = b.softmax(y).unwrap();
        }
        let down = b.parameter("down", &[3, 64], Init::Zeros);
        let y = b.linear(y, down, None).unwrap();
        b.output("y", y);
        b.split_parameters(|name| {
            Some(ParameterSplit::new(usize::from(name == "down"), SplitUnit::Columns))
        });
        b.finish()
    };
    assert!(shard(&graph(false), &[1.0; 2], 0).is_ok());
    let mut b = Builder::new();
    let weight = b.parameter("weight", &[64, 8], Init::Zeros);
    let scaled = b.scale(weight, 2.0).unwrap();
    b.output("scaled", scaled);
    b.split_parameters(|_| Some(ParameterSplit::new(0, SplitUnit::Columns)));
    let error = shard(&b.finish(), &[1.0; 2], 0).unwrap_err().to_string();
    assert!(error.ends_with("a rank has rows of its input, and not columns"), "{error}");
    let error = shard(&graph(true), &[1.0; 2], 0).unwrap_err().to_string();
    assert!(error.starts_with("softmax (softmax) cannot be divided over ranks"), "{error}");
}
