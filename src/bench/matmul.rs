//! Benchmark of matrix products in f32: squares, and the shapes of two GPTs. On a GPU every kernel
//! variant is tried, and the fastest one gives the figure.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::peaks::{timed, values};
use super::report::{Figure, FigureKind, FigureRecorder, GFLOPS};
use super::sample::{SamplingPlan, fastest};
use potluck_core::rng::Key;
use potluck_core::{DType, HostTensorView};
use potluck_graph::{Accumulation, Op, Precision};
use potluck_kernels::bench::device::{BenchDevice, DeviceBuffer};
use potluck_kernels::device::DeviceError;
use potluck_kernels::{Caps, OpCall, RandomContext, Twin, twin};

/// Sides of square products.
const SQUARES: [usize; 6] = [128, 256, 512, 1024, 2048, 4096];

/// Heads of a model: name and vocabulary.
type Heads = &'static [(&'static str, usize)];

/// Models whose products are measured: name, tokens in a batch, width, heads. The padded head of
/// GPT-2 shows the cost of its odd vocabulary.
const MODELS: [(&str, usize, usize, Heads); 2] = [
    ("gpt_small", 12 * 64, 128, &[("head", 65)]),
    ("gpt2", 1024, 768, &[("head", 50_257), ("head_padded", 50_272)]),
];

/// Rates of variants on earlier shapes in FLOP/s, which predict the duration of a product.
pub(crate) type Rates = HashMap<String, f64>;

/// Product of an (m, k) and a (k, n) matrix; each may be given transposed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct MatmulShape {
    name: String,
    op: Op,
    a: [usize; 2],
    b: [usize; 2],
    c: [usize; 2],
    precision: Precision,
}

impl MatmulShape {
    pub(crate) fn new(
        name: String,
        [m, k, n]: [usize; 3],
        transpose_a: bool,
        transpose_b: bool,
    ) -> Self {
        Self {
            name: format!("matmul.{name}"),
            op: Op::MatMul { transpose_a, transpose_b },
            a: if transpose_a { [k, m] } else { [m, k] },
            b: if transpose_b { [n, k] } else { [k, n] },
            c: [m, n],
            precision: Precision::F32,
        }
    }

    pub(crate) fn with_precision(self, precision: Precision) -> Self {
        Self { precision, ..self }
    }

    fn call(&self) -> OpCall<'_> {
        OpCall {
            op: &self.op,
            inputs: vec![self.a.to_vec(), self.b.to_vec()],
            outputs: vec![self.c.to_vec()],
            accumulate: Accumulation::NONE,
            precision: self.precision,
            loss_scale: 1.0,
            random: RandomContext { step_key: Key::new(0), training: false },
        }
    }

    fn twin(&self) -> &'static Twin {
        twin(&self.op).expect("matrix products have a kernel")
    }

    fn flops(&self) -> f64 {
        (self.twin().cost)(&self.call()).flops
    }

    /// Shapes of both matrices as text: `(768, 128) (384, 128)^T`.
    fn shape(&self) -> String {
        let Op::MatMul { transpose_a, transpose_b } = self.op else { return String::new() };
        format!("{} {}", matrix_text(self.a, transpose_a), matrix_text(self.b, transpose_b))
    }
}

fn matrix_text([rows, columns]: [usize; 2], is_transposed: bool) -> String {
    format!("({rows}, {columns}){}", if is_transposed { "^T" } else { "" })
}

/// Returns all products in the order of the report: the small ones of a family before the large.
fn products() -> Vec<MatmulShape> {
    let mut products = Vec::new();
    for n in SQUARES {
        products.push(MatmulShape::new(format!("square_{n}"), [n, n, n], false, false));
    }
    for (model, t, c, heads) in MODELS {
        // Linear layers hold their weights as (outputs, inputs).
        let mut add = |name: &str, sizes: [usize; 3], transpose_a: bool, transpose_b: bool| {
            let name = format!("{model}_{name}");
            products.push(MatmulShape::new(name, sizes, transpose_a, transpose_b));
        };
        add("proj", [t, c, c], false, true);
        add("qkv", [t, c, 3 * c], false, true);
        add("mlp_up", [t, c, 4 * c], false, true);
        add("mlp_down", [t, 4 * c, c], false, true);
        add("mlp_up_dx", [t, 4 * c, c], false, false);
        add("mlp_up_dw", [4 * c, t, c], true, false);
        for &(head, v) in heads {
            add(head, [t, c, v], false, true);
            add(&format!("{head}_dx"), [t, v, c], false, false);
            add(&format!("{head}_dw"), [v, t, c], true, false);
        }
    }
    products
}

/// Returns the reason for skipping a product of `flops` operations, if there is one: it would take
/// too long at the best rate so far, or the time for all products, which began at `begun`, is up.
fn too_long(
    sampling_plan: &SamplingPlan,
    flops: f64,
    rates: &Rates,
    begun: Instant,
) -> Option<String> {
    if begun.elapsed() >= Duration::from_secs_f64(sampling_plan.products_seconds_max) {
        return Some("the time for products was used up".into());
    }
    let best = rates.values().copied().reduce(f64::max)?;
    let seconds = flops / best;
    if seconds > sampling_plan.product_seconds_max {
        return Some(format!("it would take about {seconds:.2} s at the best rate so far"));
    }
    None
}

/// Measures the matrix products of the CPU device.
pub fn of_host(sampling_plan: &SamplingPlan, recorder: &mut FigureRecorder) {
    let mut rates = Rates::new();
    let begun = Instant::now();
    for product in products() {
        let flops = product.flops();
        if let Some(why) = too_long(sampling_plan, flops, &rates, begun) {
            recorder.skip(&product.name, why);
            continue;
        }
        recorder.progress(&product.name);
        let call = product.call();
        let a = values(call.input_len(0));
        let b = values(call.input_len(1));
        let inputs = [HostTensorView::Float(&a[..]), HostTensorView::Float(&b[..])];
        let mut c = vec![0.0; call.output_len(0)];
        let seconds = timed(sampling_plan, || (product.twin().fast)(&call, &inputs, &mut [&mut c]));
        let figure = Figure::rate(FigureKind::Matmul, &product.name, GFLOPS, flops, &seconds);
        let known = rates.entry("gemm".into()).or_insert(0.0);
        *known = known.max(figure.max * 1e9);
        recorder.add(figure.by("gemm").on(product.shape()));
    }
}

/// Measures the matrix products of an adapter.
pub(crate) fn of_gpu(
    device: &mut BenchDevice,
    sampling_plan: &SamplingPlan,
    recorder: &mut FigureRecorder,
) -> Result<(), DeviceError> {
    let mut rates = Rates::new();
    let begun = Instant::now();
    for product in products() {
        let mut largest = 0;
        for [rows, columns] in [product.a, product.b, product.c] {
            largest = largest.max((DType::F32.bytes() * rows * columns) as u64);
        }
        let limit = device.gpu.limits.binding_bytes.min(device.gpu.limits.buffer_bytes);
        if let Some(why) = too_long(sampling_plan, product.flops(), &rates, begun) {
            recorder.skip(&product.name, why);
        } else if largest > limit {
            let [largest, limit] = [largest, limit].map(|bytes| bytes >> 20);
            let why = format!("it needs {largest} MiB in a matrix, and {limit} MiB are possible");
            recorder.skip(&product.name, why);
        } else {
            recorder.progress(&product.name);
            match fastest_variant(device, sampling_plan, &product, &mut rates) {
                Ok(figure) => recorder.add(figure),
                Err(DeviceError::OutOfMemory { .. }) => {
                    recorder.skip(&product.name, "out of memory")
                }
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

/// Returns the figure of the fastest variant, with the best rate of each; variants known to be too
/// slow are not tried.
pub(crate) fn fastest_variant(
    device: &mut BenchDevice,
    sampling_plan: &SamplingPlan,
    product: &MatmulShape,
    rates: &mut Rates,
) -> Result<Figure, DeviceError> {
    let call = product.call();
    let [a, b] = [filled(device, call.input_len(0))?, filled(device, call.input_len(1))?];
    let c = device.memory((DType::F32.bytes() * call.output_len(0)) as u64)?;
    let flops = product.flops();
    let mut variants = (product.twin().variants)(&call, &Caps::of(&device.gpu));
    variants.retain(|variant| match rates.get(&variant.name) {
        Some(rate) => flops / rate <= sampling_plan.product_seconds_max,
        // A variant that was not tried yet may be the best one.
        None => true,
    });
    let mut ready = Vec::with_capacity(variants.len());
    for variant in &variants {
        ready.push(device.prepare(&variant.dispatches, &[&a, &b], &[&c])?);
    }
    let mut rates_here = vec![0.0f64; variants.len()];
    let (best, seconds) = fastest(sampling_plan, variants.len(), |way, repeats| {
        let seconds = device.run(&ready[way], repeats)?.running;
        let rate = flops * repeats as f64 / seconds;
        rates_here[way] = rates_here[way].max(rate);
        let known = rates.entry(variants[way].name.clone()).or_insert(rate);
        *known = known.max(rate);
        Ok::<_, DeviceError>(seconds)
    })?;
    let figure = Figure::rate(FigureKind::Matmul, &product.name, GFLOPS, flops, &seconds);
    let mut among = Vec::with_capacity(variants.len());
    for (variant, rate) in variants.iter().zip(rates_here) {
        among.push((variant.name.clone(), rate / 1e9));
    }
    Ok(figure.by(&variants[best].name).among(among).on(product.shape()))
}

/// Allocates device memory filled with `count` values.
fn filled(device: &BenchDevice, count: usize) -> Result<DeviceBuffer, DeviceError> {
    let memory = device.memory((DType::F32.bytes() * count) as u64)?;
    device.upload(&memory, bytemuck::cast_slice(&values(count)))?;
    Ok(memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Effort;
    use potluck_core::{DType, Shape};
    use potluck_graph::shapes;

    #[test]
    fn every_product_has_its_own_name_and_a_shape_that_fits() {
        let products = products();
        let mut names: Vec<&str> = products.iter().map(|product| &product.name[..]).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), products.len());
        for product in &products {
            let inputs = [product.a, product.b].map(|dims| (Shape::fixed(&dims), DType::F32));
            let outputs = shapes::outputs(&product.op, &inputs).unwrap();
            assert_eq!(outputs[0].0, Shape::fixed(&product.c), "{product:?}");
        }
        let find = |name: &str| products.iter().find(|product| product.name == name).unwrap();
        let qkv = find("matmul.gpt_small_qkv");
        assert_eq!(qkv.shape(), "(768, 128) (384, 128)^T");
        assert_eq!(qkv.flops(), 2.0 * 768.0 * 128.0 * 384.0);
        assert_eq!(find("matmul.gpt2_mlp_up_dw").shape(), "(1024, 3072)^T (1024, 768)");
        assert_eq!(find("matmul.gpt2_head_dx").shape(), "(1024, 50257) (50257, 768)");
        assert_eq!(find("matmul.gpt2_head_padded_dw").shape(), "(1024, 50272)^T (1024, 768)");
    }

    #[test]
    fn what_would_take_too_long_is_left_out() {
        let (sampling_plan, begun) = (Effort::Normal.sampling_plan(), Instant::now());
        let mut rates = Rates::new();
        assert_eq!(too_long(&sampling_plan, 1e12, &rates, begun), None);
        rates.insert("slow".into(), 1e9);
        rates.insert("fast".into(), 1e10);
        assert_eq!(too_long(&sampling_plan, 5e8, &rates, begun), None);
        let why = "it would take about 0.50 s at the best rate so far";
        assert_eq!(too_long(&sampling_plan, 5e9, &rates, begun).as_deref(), Some(why));
        let over = SamplingPlan { products_seconds_max: 0.0, ..sampling_plan };
        let why = "the time for products was used up";
        assert_eq!(too_long(&over, 1.0, &rates, begun).as_deref(), Some(why));
    }
}
