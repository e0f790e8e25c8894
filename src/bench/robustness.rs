//! Benchmark of the checks that wgpu adds to shaders (bounds of arrays, counters of loops): a large
//! matrix product with them, and as runs have it, without them.

use super::matmul::{MatmulShape, Rates, fastest_variant};
use super::report::{FigureKind, FigureRecorder};
use super::sample::Effort;
use potluck_graph::Precision;
use potluck_kernels::bench::device::BenchDevice;
use potluck_kernels::device::{Adapter, AdapterKind, DeviceError, ShaderChecks};

/// Sides of the product on hardware GPUs, and of the one on all others and of smoke tests.
const SIDE: usize = 4096;
const SIDE_SMALL: usize = 256;

/// Measures the product on an adapter, which is opened once for each.
pub fn measure(
    adapter: &Adapter,
    effort: Effort,
    recorder: &mut FigureRecorder,
) -> Result<(), DeviceError> {
    let is_small = adapter.kind == AdapterKind::Software || effort == Effort::Tiny;
    let side = if is_small { SIDE_SMALL } else { SIDE };
    for (name, checks) in [
        ("robustness.checked", ShaderChecks::Enabled),
        ("robustness.trusted", ShaderChecks::Disabled),
    ] {
        recorder.progress(name);
        let mut device = BenchDevice::open(adapter, checks, Precision::F32)?;
        let product = MatmulShape::new("product".into(), [side; 3], false, false);
        let mut figure =
            fastest_variant(&mut device, &effort.sampling_plan(), &product, &mut Rates::new())?;
        figure.name = name.into();
        figure.kind = FigureKind::Robustness;
        recorder.add(figure);
    }
    Ok(())
}
