//! Features of an adapter beyond the portable core, which kernel variants may use.

/// Features of an adapter, or those that were requested when a device was opened.
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
    /// True if storage buffers can be mapped, which pays where host and device share their memory.
    pub mappable: bool,
}

impl Features {
    /// Returns those among `features`, with the adapter's subgroup sizes.
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

/// Returns the features that every device is opened with: immediates, which carry the parameters
/// of kernels, and timestamp queries where they are offered.
pub(super) fn portable(offered: wgpu::Features) -> wgpu::Features {
    wgpu::Features::IMMEDIATES | (offered & wgpu::Features::TIMESTAMP_QUERY)
}

/// Returns the features that the devices of kernel tests are opened with: the portable ones, and
/// subgroup operations, which their variants ask for. Shaders without them are the same with them.
pub(super) fn for_kernel_tests(offered: wgpu::Features) -> wgpu::Features {
    portable(offered) | (offered & wgpu::Features::SUBGROUP)
}

/// Returns the features that the devices of a run are opened with: the portable ones, and those
/// that kernel variants may use, and the driver's cache of pipelines.
pub(super) fn for_runs(offered: wgpu::Features) -> wgpu::Features {
    let variants = wgpu::Features::SHADER_F16 | wgpu::Features::SUBGROUP;
    portable(offered) | (offered & (variants | wgpu::Features::PIPELINE_CACHE))
}
