//! Peak-throughput benchmarks: chains of multiply-adds in registers, and streams through memory.
//! Twin of `shaders/peak.wgsl`, which has the formulas. They belong to no op; only the benchmarks
//! run them.

use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::dispatch::grid;
use crate::simd::vectorized;
use crate::{Dispatch, Float, Operand, Shader};

/// Chains per invocation: enough to hide the latency of a multiply-add on two units, and few
/// enough for 16 registers.
const CHAINS: usize = 8;
/// Multiply-adds per chain and round: enough to make the loop overhead small.
const STEPS: usize = 16;
/// Number of distinct start values of chains, after which they repeat.
const STARTS: usize = 64;

/// Outputs per rayon task of the CPU chains.
const TASK: usize = 1024;
/// Floats per rayon task of the CPU streams.
const STREAM_TASK: usize = 64 * 1024;

/// Compute-bound load in registers: `count` invocations of `rounds` rounds of
/// `x = x factor + addend`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FmaChains {
    pub count: usize,
    pub rounds: usize,
    pub factor: f32,
    pub(crate) addend: f32,
}

impl FmaChains {
    /// Creates chains that converge slowly to 512, so that every round changes their values and
    /// none leaves the range where arithmetic is fast.
    pub fn new(count: usize, rounds: usize) -> Self {
        Self { count, rounds, factor: 1.0 - 1.0 / 1024.0, addend: 0.5 }
    }

    /// Returns the floating-point operations of all invocations; a multiply-add is two.
    pub fn flops(&self) -> f64 {
        (2 * CHAINS * STEPS) as f64 * self.rounds as f64 * self.count as f64
    }

    /// Returns the two GPU kernels by name, without and with `fma`; output 0 holds the sums
    /// (count).
    pub fn dispatches(&self) -> [(&'static str, Dispatch); 2] {
        ["mul_add", "fused"].map(|entry| {
            let Self { count, rounds, factor, addend } = *self;
            let params = vec![count as u32, rounds as u32, factor.to_bits(), addend.to_bits()];
            let operands = vec![Operand::Output(0)];
            let shader = Shader::new("peak", entry);
            (entry, Dispatch { shader, operands, params, groups: grid(count, 64) })
        })
    }
}

/// Value of chain `chain` of invocation `index` before the first round.
fn start(index: usize, chain: usize) -> f32 {
    (index % STARTS) as f32 / STARTS as f32 + chain as f32
}

/// Reference: computes the sum of the chains of each invocation.
pub fn reference<T: Float>(chains: &FmaChains, sums: &mut [T]) {
    let [factor, addend] = [chains.factor, chains.addend].map(|v| T::from_f64(f64::from(v)));
    for (index, sum) in sums.iter_mut().enumerate() {
        *sum = T::zero();
        for chain in 0..CHAINS {
            let mut x = T::from_f64(f64::from(start(index, chain)));
            for _ in 0..chains.rounds * STEPS {
                x = x * factor + addend;
            }
            *sum += x;
        }
    }
}

/// CPU kernel: the reference on all threads, in the widest registers of the processor.
pub fn fast(chains: &FmaChains, sums: &mut [f32]) {
    assert_eq!(sums.len(), chains.count, "one sum per invocation");
    let tasks = sums.par_chunks_mut(TASK);
    tasks.for_each(|sums| Arch::new().dispatch(PeakTask { chains, sums }));
}

/// One task of [`fast`], which starts at a multiple of [`STARTS`].
struct PeakTask<'a> {
    chains: &'a FmaChains,
    sums: &'a mut [f32],
}

impl WithSimd for PeakTask<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        // With 32 or more registers, twice the chains hide the latency of four units.
        if S::REGISTER_COUNT >= 32 {
            blocks::<S, 2>(simd, self)
        } else {
            blocks::<S, 1>(simd, self)
        }
    }
}

/// Computes a task in blocks of `G` vectors of invocations. Values that the last block computes
/// past the end are discarded.
#[inline(always)]
fn blocks<S: Simd, const G: usize>(simd: S, task: PeakTask<'_>) {
    let [a, b] = [task.chains.factor, task.chains.addend].map(|v| simd.splat_f32s(v));
    let step = |x: S::f32s| {
        if S::IS_SCALAR {
            // Without vectors a fused operation may be a call.
            simd.add_f32s(simd.mul_f32s(x, a), b)
        } else {
            simd.mul_add_f32s(x, a, b)
        }
    };
    let width = G * S::F32_LANES;
    for (block, sums) in task.sums.chunks_mut(width).enumerate() {
        let mut x: [[S::f32s; CHAINS]; G] = std::array::from_fn(|group| {
            let first = block * width + group * S::F32_LANES;
            let starts: [f32; STARTS] = std::array::from_fn(|i| start(first + i, 0));
            let starts = S::as_simd_f32s(&starts).0[0];
            // These sums need few bits, so they equal the results of `start` exactly.
            std::array::from_fn(|chain| simd.add_f32s(starts, simd.splat_f32s(chain as f32)))
        });
        for _ in 0..task.chains.rounds {
            for _ in 0..STEPS {
                for group in &mut x {
                    for x in group {
                        *x = step(*x);
                    }
                }
            }
        }
        for (x, sums) in x.into_iter().zip(sums.chunks_mut(S::F32_LANES)) {
            let pairs = [0, 2, 4, 6].map(|chain| simd.add_f32s(x[chain], x[chain + 1]));
            let total =
                simd.add_f32s(simd.add_f32s(pairs[0], pairs[1]), simd.add_f32s(pairs[2], pairs[3]));
            sums.copy_from_slice(&bytemuck::cast_slice(&[total])[..sums.len()]);
        }
    }
}

/// A bandwidth-bound load: one pass through memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryStream {
    /// `y = x`
    Copy,
    /// `y = x + factor z`
    Triad,
}

impl MemoryStream {
    /// Returns the bytes read and written per output element.
    pub fn bytes_per_element(self) -> f64 {
        match self {
            Self::Copy => 8.0,
            Self::Triad => 12.0,
        }
    }

    /// Returns the scalar and the vectorized GPU kernel by name, for `count` elements (a multiple
    /// of 4). Input 0 is x, input 1 is z, output 0 is y.
    pub fn dispatches(self, count: usize, factor: f32) -> [(&'static str, Dispatch); 2] {
        assert!(count.is_multiple_of(4), "vectors of four elements");
        let (one, four) = match self {
            Self::Copy => ("copy", "copy4"),
            Self::Triad => ("triad", "triad4"),
        };
        let mut operands = vec![Operand::Input(0), Operand::Output(0)];
        if self == Self::Triad {
            operands.push(Operand::Input(1));
        }
        [(one, count), (four, count / 4)].map(|(entry, count)| {
            let params = vec![count as u32, 0, factor.to_bits(), 0];
            let dispatch = Dispatch {
                shader: Shader::new("peak", entry),
                operands: operands.clone(),
                params,
                groups: grid(count, 64),
            };
            (entry, dispatch)
        })
    }

    /// CPU kernel: runs the stream on all threads. All slices must have the same length.
    pub fn fast(self, x: &[f32], z: &[f32], factor: f32, y: &mut [f32]) {
        let tasks = y.par_chunks_mut(STREAM_TASK).zip(x.par_chunks(STREAM_TASK));
        match self {
            Self::Copy => tasks.for_each(|(y, x)| y.copy_from_slice(x)),
            Self::Triad => {
                let tasks = tasks.zip(z.par_chunks(STREAM_TASK));
                tasks.for_each(|((y, x), z)| triad(x, z, factor, y));
            }
        }
    }
}

vectorized! {
    fn triad<S>(x: &[f32], z: &[f32], factor: f32, y: &mut [f32]) {
        for ((y, x), z) in y.iter_mut().zip(x).zip(z) {
            *y = x + factor * z;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{compare, for_each_gpu, run_dispatches};

    fn widen(values: &[f32]) -> Vec<Vec<f64>> {
        vec![values.iter().map(|v| f64::from(*v)).collect()]
    }

    /// The sums depend on every round, so a skipped round would be detected.
    #[test]
    fn chains_compute_every_round_everywhere() {
        for (count, rounds) in [(1, 0), (63, 1), (200, 7), (3001, 100)] {
            let chains = FmaChains::new(count, rounds);
            let mut expected = vec![0.0f64; count];
            reference(&chains, &mut expected);
            let mut fewer = vec![0.0f64; count];
            reference(&FmaChains { rounds: rounds + 1, ..chains }, &mut fewer);
            assert!(fewer.iter().zip(&expected).all(|(more, value)| more / value > 1.002));
            let mut sums = vec![f32::NAN; count];
            fast(&chains, &mut sums);
            let expected = [expected];
            compare("the fast chains", &widen(&sums), &expected);
            for_each_gpu(|gpu, pipelines| {
                for (name, dispatch) in chains.dispatches() {
                    let starts = [vec![f32::NAN; count]];
                    let got = run_dispatches(gpu, pipelines, name, &[dispatch], &[], &starts);
                    compare(&format!("{name} on {}", gpu.name), &widen(&got[0]), &expected);
                }
            });
        }
    }

    #[test]
    fn streams_reach_every_element_everywhere() {
        let values = |step: f32, count: usize| -> Vec<f32> {
            (0..count).map(|i| (i as f32 * step).sin()).collect()
        };
        for count in [4, 260, 70_000] {
            let (x, z, factor) = (values(0.1, count), values(0.3, count), 3.0);
            let triad: Vec<f32> = x.iter().zip(&z).map(|(x, z)| x + factor * z).collect();
            for (stream, expected) in [(MemoryStream::Copy, &x), (MemoryStream::Triad, &triad)] {
                let mut y = vec![f32::NAN; count];
                stream.fast(&x, &z, factor, &mut y);
                assert_eq!(&y, expected, "{stream:?} on the CPU");
                let inputs = [bytemuck::cast_slice(&x), bytemuck::cast_slice(&z)];
                for_each_gpu(|gpu, pipelines| {
                    for (name, dispatch) in stream.dispatches(count, factor) {
                        let starts = [vec![f32::NAN; count]];
                        let got =
                            run_dispatches(gpu, pipelines, name, &[dispatch], &inputs, &starts);
                        let what = format!("{name} on {}", gpu.name);
                        compare(&what, &widen(&got[0]), &widen(expected));
                    }
                });
            }
        }
    }

    #[test]
    fn operations_and_bytes_are_counted() {
        assert_eq!(FmaChains::new(3, 5).flops(), 3.0 * 5.0 * 16.0 * 8.0 * 2.0);
        assert_eq!(MemoryStream::Copy.bytes_per_element(), 4.0 * 2.0);
        assert_eq!(MemoryStream::Triad.bytes_per_element(), 4.0 * 3.0);
    }
}
