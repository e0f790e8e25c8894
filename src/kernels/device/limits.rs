//! Device limits that a plan and its kernels must respect.

/// Limits of an adapter, or of an opened device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one binding, and so of one tensor.
    pub binding_bytes: u64,
    /// Bytes of one buffer, and so of one bucket.
    pub buffer_bytes: u64,
    /// Workgroups in one dimension of a dispatch.
    pub workgroups: u32,
    /// Storage buffers that one kernel may bind.
    pub storage_buffers: u32,
    /// Bytes of workgroup memory.
    pub workgroup_bytes: u32,
    /// Invocations of one workgroup.
    pub invocations: u32,
    /// Bytes of parameters that a dispatch may carry.
    pub immediate_bytes: u32,
}

impl From<&wgpu::Limits> for Limits {
    fn from(limits: &wgpu::Limits) -> Self {
        Self {
            binding_bytes: limits.max_storage_buffer_binding_size,
            buffer_bytes: limits.max_buffer_size,
            workgroups: limits.max_compute_workgroups_per_dimension,
            storage_buffers: limits.max_storage_buffers_per_shader_stage,
            workgroup_bytes: limits.max_compute_workgroup_storage_size,
            invocations: limits.max_compute_invocations_per_workgroup,
            immediate_bytes: limits.max_immediate_size,
        }
    }
}

impl Limits {
    /// Returns the limits on which every kernel may rely, and with which kernel tests open devices.
    pub fn portable() -> Self {
        Self::from(&wgpu::Limits { max_immediate_size: 128, ..wgpu::Limits::defaults() })
    }
}

/// Returns the limits on which every kernel may rely: the WebGPU defaults and 128 bytes of
/// immediates; less if the adapter has less, which concerns textures only, because
/// `Adapter::usable` has refused the other adapters.
pub(super) fn portable(own: &wgpu::Limits) -> wgpu::Limits {
    let portable = wgpu::Limits { max_immediate_size: 128, ..wgpu::Limits::defaults() };
    portable.or_worse_values_from(own)
}

/// Returns the limits with which the devices of a run are opened: the adapter's own, field by
/// field, for everything that kernels and tensors use.
pub(super) fn for_runs(own: &wgpu::Limits) -> wgpu::Limits {
    wgpu::Limits {
        max_storage_buffer_binding_size: own.max_storage_buffer_binding_size,
        max_buffer_size: own.max_buffer_size,
        max_storage_buffers_per_shader_stage: own.max_storage_buffers_per_shader_stage,
        max_compute_workgroup_storage_size: own.max_compute_workgroup_storage_size,
        max_compute_invocations_per_workgroup: own.max_compute_invocations_per_workgroup,
        max_compute_workgroup_size_x: own.max_compute_workgroup_size_x,
        max_compute_workgroup_size_y: own.max_compute_workgroup_size_y,
        max_compute_workgroup_size_z: own.max_compute_workgroup_size_z,
        max_compute_workgroups_per_dimension: own.max_compute_workgroups_per_dimension,
        max_immediate_size: own.max_immediate_size,
        ..portable(own)
    }
}
