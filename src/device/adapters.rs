//! The adapters of this machine: one entry per physical one, whichever APIs show it.

use std::fmt;

/// What an adapter is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterKind {
    Discrete,
    Integrated,
    Virtual,
    /// Runs on the processor; never chosen by `auto`.
    Software,
    Other,
}

impl fmt::Display for AdapterKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Discrete => "discrete GPU",
            Self::Integrated => "integrated GPU",
            Self::Virtual => "virtual GPU",
            Self::Software => "software",
            Self::Other => "other",
        })
    }
}

impl From<wgpu::DeviceType> for AdapterKind {
    fn from(kind: wgpu::DeviceType) -> Self {
        match kind {
            wgpu::DeviceType::DiscreteGpu => Self::Discrete,
            wgpu::DeviceType::IntegratedGpu => Self::Integrated,
            wgpu::DeviceType::VirtualGpu => Self::Virtual,
            wgpu::DeviceType::Cpu => Self::Software,
            wgpu::DeviceType::Other => Self::Other,
        }
    }
}

/// An adapter as one API shows it.
#[derive(Clone, Debug)]
pub struct Adapter {
    pub name: String,
    /// `vulkan`, `metal`, `dx12` or `gl`.
    pub api: &'static str,
    pub kind: AdapterKind,
    pub driver: String,
    /// The preferred API's entry of the same physical adapter, if this is another.
    pub merged_into: Option<usize>,
    pub(super) wgpu: wgpu::Adapter,
}

impl Adapter {
    /// The limits the adapter states.
    pub fn limits(&self) -> super::Limits {
        super::Limits::from(&self.wgpu.limits())
    }

    /// Whether potluck's kernels can run there, or what is missing.
    pub fn usable(&self) -> Result<(), String> {
        if !self.wgpu.features().contains(wgpu::Features::IMMEDIATES) {
            return Err("it offers no immediates".into());
        }
        let compute = wgpu::DownlevelFlags::COMPUTE_SHADERS;
        if !self.wgpu.get_downlevel_capabilities().flags.contains(compute) {
            return Err("it offers no compute shaders".into());
        }
        missing_limit(&self.wgpu.limits()).map_or(Ok(()), Err)
    }
}

/// The first limit that is below what every kernel relies on (`tests/shaders.rs` counts that), or
/// `None`. Without this, such an adapter would fail when a shader is compiled.
fn missing_limit(limits: &wgpu::Limits) -> Option<String> {
    let needed = [
        ("bytes of immediates", limits.max_immediate_size, 128),
        ("storage buffers per kernel", limits.max_storage_buffers_per_shader_stage, 8),
        ("invocations per workgroup", limits.max_compute_invocations_per_workgroup, 256),
        ("invocations per workgroup in x", limits.max_compute_workgroup_size_x, 256),
        ("bytes of workgroup memory", limits.max_compute_workgroup_storage_size, 16 * 1024),
        ("workgroups in one dimension", limits.max_compute_workgroups_per_dimension, 65_535),
    ];
    let short = needed.into_iter().find(|(_, has, needs)| has < needs);
    short.map(|(what, has, needs)| format!("it offers {has} {what}, and {needs} are needed"))
}

fn api_name(backend: wgpu::Backend) -> &'static str {
    match backend {
        wgpu::Backend::Vulkan => "vulkan",
        wgpu::Backend::Metal => "metal",
        wgpu::Backend::Dx12 => "dx12",
        wgpu::Backend::Gl => "gl",
        _ => "other",
    }
}

/// Every adapter of every API, native APIs before GL; those seen through two APIs are merged
/// (`merged_into`). The order is stable on a machine, so an index selects the same one again.
pub fn list_adapters() -> Vec<Adapter> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.flags = wgpu::InstanceFlags::empty().with_env();
    let instance = wgpu::Instance::new(descriptor);
    let mut found = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
    found.sort_by_key(|adapter| adapter.get_info().backend == wgpu::Backend::Gl);
    let mut list: Vec<Adapter> = Vec::with_capacity(found.len());
    for wgpu in found {
        let info = wgpu.get_info();
        let api = api_name(info.backend);
        let merged_into = list.iter().position(|known| {
            known.api != api && known.merged_into.is_none() && same_adapter(&known.wgpu, &info)
        });
        let driver = format!("{} {}", info.driver, info.driver_info).trim().to_string();
        let kind = info.device_type.into();
        list.push(Adapter { name: info.name, api, kind, driver, merged_into, wgpu });
    }
    list
}

/// Two APIs show one card if they agree on its bus address or, where one does not tell, on its
/// name. Two entries of one API are always two adapters.
fn same_adapter(known: &wgpu::Adapter, info: &wgpu::AdapterInfo) -> bool {
    let known = known.get_info();
    if !known.device_pci_bus_id.is_empty() && !info.device_pci_bus_id.is_empty() {
        return known.device_pci_bus_id == info.device_pci_bus_id;
    }
    known.name == info.name || info.name.contains(&known.name) || known.name.contains(&info.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_below_the_portable_limits_is_told_why() {
        let enough = wgpu::Limits { max_immediate_size: 128, ..wgpu::Limits::defaults() };
        assert_eq!(missing_limit(&enough), None);
        let few = wgpu::Limits { max_storage_buffers_per_shader_stage: 4, ..enough };
        let told = "it offers 4 storage buffers per kernel, and 8 are needed";
        assert_eq!(missing_limit(&few).as_deref(), Some(told));
    }
}
