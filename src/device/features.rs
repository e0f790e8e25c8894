//! What an adapter can do beyond the portable core: what variants of kernels may use.

/// Capabilities of an adapter, or of an opened device the part of them that was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// 16-bit floats in shaders (`enable f16`).
    pub f16: bool,
    /// The smallest and the largest subgroup, if shaders may use subgroup operations.
    pub subgroups: Option<(u32, u32)>,
    /// Passes can be timed by the device's clock.
    pub timestamps: bool,
    /// Products of small matrices by dedicated units.
    pub cooperative_matrix: bool,
    /// Storage buffers can be mapped, which pays where host and device share their memory.
    pub mappable: bool,
}

impl Features {
    /// Those among `features`, with the adapter's sizes of subgroups.
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

/// What every device is opened with: parameters of kernels, and a clock where there is one.
pub(super) fn portable(offered: wgpu::Features) -> wgpu::Features {
    wgpu::Features::IMMEDIATES | (offered & wgpu::Features::TIMESTAMP_QUERY)
}

/// What runs are opened with: also what variants of kernels may use.
pub(super) fn for_runs(offered: wgpu::Features) -> wgpu::Features {
    let variants = wgpu::Features::SHADER_F16 | wgpu::Features::SUBGROUP;
    portable(offered) | (offered & variants)
}
