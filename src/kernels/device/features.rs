//! Features of an adapter beyond the portable core, which kernel variants may use.

use std::fmt;

use potluck_graph::Precision;

/// Features of an adapter, or the ones requested when a device was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// 16-bit floats in shaders (`enable f16`).
    pub f16: bool,
    /// Smallest and largest subgroup size, if shaders may use subgroup operations.
    pub subgroups: Option<(u32, u32)>,
    /// True if passes can be timed by the device's clock.
    pub timestamps: bool,
    /// Cooperative matrices: products of small matrices by dedicated units.
    pub cooperative_matrix: bool,
    /// True if storage buffers can be mapped, which pays if host and device share their memory.
    pub mappable: bool,
}

impl Features {
    /// Converts wgpu's features, with the adapter's subgroup sizes.
    pub(super) fn of(features: wgpu::Features, info: &wgpu::AdapterInfo) -> Self {
        let sizes = (info.subgroup_min_size, info.subgroup_max_size);
        Self {
            f16: features.contains(wgpu::Features::SHADER_F16),
            subgroups: features.contains(wgpu::Features::SUBGROUP).then_some(sizes),
            timestamps: features.contains(wgpu::Features::TIMESTAMP_QUERY),
            cooperative_matrix: features.contains(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX),
            mappable: features.contains(wgpu::Features::MAPPABLE_PRIMARY_BUFFERS),
        }
    }
}

/// Configuration of cooperative matrices that an adapter offers: `c (m, n) += a (m, k) b (k, n)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CooperativeMatrix {
    pub m: u32,
    pub n: u32,
    pub k: u32,
    /// Element type of `a` and `b`, such as `f16`.
    pub operands: &'static str,
    /// Element type of `c`.
    pub sums: &'static str,
}

impl From<wgpu::CooperativeMatrixProperties> for CooperativeMatrix {
    fn from(properties: wgpu::CooperativeMatrixProperties) -> Self {
        Self {
            m: properties.m_size,
            n: properties.n_size,
            k: properties.k_size,
            operands: scalar_name(properties.ab_type),
            sums: scalar_name(properties.cr_type),
        }
    }
}

fn scalar_name(scalar: wgpu::CooperativeScalarType) -> &'static str {
    match scalar {
        wgpu::CooperativeScalarType::F32 => "f32",
        wgpu::CooperativeScalarType::F16 => "f16",
        wgpu::CooperativeScalarType::I32 => "i32",
        wgpu::CooperativeScalarType::U32 => "u32",
    }
}

/// Square cooperative matrices that kernels multiply, of f16 with sums in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CooperativeSquare {
    /// Rows, columns and terms.
    pub size: u32,
    /// The fewest and the most invocations of a subgroup.
    pub subgroups: [u32; 2],
}

impl CooperativeSquare {
    /// Returns the largest matrices that a driver of an API lists exactly; drivers crash with
    /// others.
    pub(super) fn of(listed: &[CooperativeMatrix], features: &Features, api: &str) -> Option<Self> {
        if !features.cooperative_matrix || !features.f16 {
            return None;
        }
        let (mut least, mut most) = features.subgroups?;
        if api == "metal" {
            // wgpu reports 4 to 64 for every adapter of Metal. All GPUs with matrix units there
            // have 32.
            least = 32;
            most = 32;
        }
        for size in COOPERATIVE_SIZES {
            let wanted =
                CooperativeMatrix { m: size, n: size, k: size, operands: "f16", sums: "f32" };
            if listed.contains(&wanted) {
                return Some(Self { size, subgroups: [least, most] });
            }
        }
        None
    }
}

/// Sizes of the square matrices for which WGSL has types.
const COOPERATIVE_SIZES: [u32; 2] = [16, 8];

impl fmt::Display for CooperativeMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { m, n, k, operands, sums } = self;
        write!(f, "{m}x{n}x{k} {operands} to {sums}")
    }
}

/// Returns the features with which every device is opened: immediates, which carry the parameters
/// of kernels, and timestamp queries if they are offered.
pub(super) fn portable(offered: wgpu::Features) -> wgpu::Features {
    wgpu::Features::IMMEDIATES | (offered & wgpu::Features::TIMESTAMP_QUERY)
}

/// Features that kernels in mixed precision may use.
const MIXED: wgpu::Features =
    wgpu::Features::SHADER_F16.union(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX);

/// Returns the features with which the devices of kernel tests are opened: the portable ones, and
/// the ones that variants use, which do not change other shaders.
pub(super) fn for_kernel_tests(offered: wgpu::Features) -> wgpu::Features {
    portable(offered) | (offered & (wgpu::Features::SUBGROUP | MIXED))
}

/// Returns the features with which the devices of a run are opened: the portable ones, those that
/// kernel variants of the precision may use, and the driver's cache of pipelines.
pub(super) fn for_runs(offered: wgpu::Features, precision: Precision) -> wgpu::Features {
    let of_precision = match precision {
        Precision::F32 => wgpu::Features::empty(),
        Precision::Mixed => MIXED,
    };
    // Ops from outside the crate may use f16 in any precision.
    let variants = wgpu::Features::SUBGROUP | wgpu::Features::SHADER_F16 | of_precision;
    portable(offered) | (offered & (variants | wgpu::Features::PIPELINE_CACHE))
}
