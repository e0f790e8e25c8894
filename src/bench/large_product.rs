//! Benchmarks of one large matrix product: with the checks that wgpu adds to shaders (bounds of
//! arrays, counters of loops) and, as in runs, without them; in f32 and in mixed precision.

use super::matmul::{MatmulShape, Rates, fastest_variant};
use super::report::{FigureKind, FigureRecorder};
use super::sample::Effort;
use potluck_graph::Precision;
use potluck_kernels::bench::device::BenchDevice;
use potluck_kernels::device::{Adapter, AdapterKind, DeviceError, ShaderChecks};

/// Side of the product on hardware GPUs, and on software adapters and in smoke tests.
const SIDE: usize = 4096;
const SIDE_SMALL: usize = 256;

/// Configuration in which the product is computed.
pub struct Case {
    /// Name of the figure.
    name: &'static str,
    kind: FigureKind,
    checks: ShaderChecks,
    precision: Precision,
}

/// The product with the checks of shaders and without them.
pub const ROBUSTNESS: [Case; 2] = [
    Case {
        name: "robustness.checked",
        kind: FigureKind::Robustness,
        checks: ShaderChecks::Enabled,
        precision: Precision::F32,
    },
    Case {
        name: "robustness.trusted",
        kind: FigureKind::Robustness,
        checks: ShaderChecks::Disabled,
        precision: Precision::F32,
    },
];

/// The product in each precision.
pub const PRECISIONS: [Case; 2] = [
    Case {
        name: "precision.f32",
        kind: FigureKind::Precision,
        checks: ShaderChecks::Disabled,
        precision: Precision::F32,
    },
    Case {
        name: "precision.mixed",
        kind: FigureKind::Precision,
        checks: ShaderChecks::Disabled,
        precision: Precision::Mixed,
    },
];

/// Measures the product on an adapter, which is opened once for each case.
pub fn measure(
    adapter: &Adapter,
    cases: &[Case],
    effort: Effort,
    recorder: &mut FigureRecorder,
) -> Result<(), DeviceError> {
    let is_small = adapter.kind == AdapterKind::Software || effort == Effort::Tiny;
    let side = if is_small { SIDE_SMALL } else { SIDE };
    for Case { name, kind, checks, precision } in cases {
        recorder.progress(name);
        let mut device = BenchDevice::open(adapter, *checks, *precision)?;
        let product = MatmulShape::new("product".into(), [side; 3], false, false);
        let product = product.with_precision(*precision);
        let mut figure =
            fastest_variant(&mut device, &effort.sampling_plan(), &product, &mut Rates::new())?;
        figure.name = (*name).into();
        figure.kind = kind.clone();
        recorder.add(figure);
    }
    Ok(())
}
