//! Adapter discovery: lists the adapters of this machine, and merges the entries of one physical
//! adapter that several APIs expose.

use std::sync::OnceLock;

use super::adapter_kind::AdapterKind;
use super::dxc;
use super::features::{CooperativeMatrix, CooperativeSquare, Features};
use super::limits::Limits;
use super::memory::AdapterMemory;

/// Adapter as one API exposes it.
#[derive(Clone, Debug)]
pub struct Adapter {
    pub name: String,
    /// `vulkan`, `metal`, `dx12` or `gl`.
    pub api: &'static str,
    pub kind: AdapterKind,
    pub driver: String,
    /// PCI vendor ID, or 0 if the API reports none.
    pub vendor: u32,
    /// Index of the preferred API's entry of the same physical adapter, if this is another entry.
    pub merged_into: Option<usize>,
    pub memory: AdapterMemory,
    /// PCI bus address, or empty if the API reports none or a wrong one.
    bus: String,
    pub(super) wgpu: wgpu::Adapter,
}

impl Adapter {
    /// Returns true if both are one physical adapter, possibly through two APIs. Two cards of one
    /// model are different adapters.
    pub fn is_same(&self, other: &Self) -> bool {
        self.is_same_entry(other) || have_one_address(&self.bus, &other.bus)
    }

    /// Returns true if both are one entry of the list: an adapter through one API and driver.
    pub fn is_same_entry(&self, other: &Self) -> bool {
        self.wgpu == other.wgpu
    }

    /// Returns the limits that the adapter reports.
    pub fn limits(&self) -> Limits {
        Limits::from(&self.wgpu.limits())
    }

    /// Queries its memory again: this process and others may have taken some since it was listed.
    pub fn memory_now(&self) -> AdapterMemory {
        AdapterMemory::of(&self.wgpu, self.kind)
    }

    /// Returns the features that the adapter offers beyond the portable core.
    pub fn features(&self) -> Features {
        Features::of(self.wgpu.features(), &self.wgpu.get_info())
    }

    /// Returns the configurations of cooperative matrices that the adapter offers.
    pub fn cooperative_matrices(&self) -> Vec<CooperativeMatrix> {
        self.wgpu.cooperative_matrix_properties().into_iter().map(Into::into).collect()
    }

    /// Returns the cooperative matrices that kernels would use on the adapter.
    pub fn cooperative_square(&self) -> Option<CooperativeSquare> {
        CooperativeSquare::of(&self.cooperative_matrices(), &self.features(), self.api)
    }

    /// Checks that potluck's kernels can run on the adapter; the error names the missing property.
    pub fn usable(&self) -> Result<(), String> {
        match missing_property(&self.wgpu) {
            Some(why) => Err(why),
            None => Ok(()),
        }
    }
}

/// Returns what kernels need and an adapter lacks, or `None`.
fn missing_property(adapter: &wgpu::Adapter) -> Option<String> {
    if adapter.get_info().backend == wgpu::Backend::Dx12 && dxc::library().is_none() {
        return Some(dxc::missing());
    }
    if !adapter.features().contains(wgpu::Features::IMMEDIATES) {
        return Some("it offers no immediates".into());
    }
    let compute = wgpu::DownlevelFlags::COMPUTE_SHADERS;
    if !adapter.get_downlevel_capabilities().flags.contains(compute) {
        return Some("it offers no compute shaders".into());
    }
    missing_limit(&adapter.limits())
}

/// Returns the first limit that is below the needs of every kernel (`tests/library/shaders.rs`
/// counts them), or `None`. Without this check, such an adapter would fail when a shader is
/// compiled.
fn missing_limit(limits: &wgpu::Limits) -> Option<String> {
    let needed = [
        ("bytes of immediates", limits.max_immediate_size, 128),
        ("storage buffers per kernel", limits.max_storage_buffers_per_shader_stage, 8),
        ("invocations per workgroup", limits.max_compute_invocations_per_workgroup, 256),
        ("invocations per workgroup in x", limits.max_compute_workgroup_size_x, 256),
        ("bytes of workgroup memory", limits.max_compute_workgroup_storage_size, 16 * 1024),
        ("workgroups in one dimension", limits.max_compute_workgroups_per_dimension, 65_535),
    ];
    for (what, has, needs) in needed {
        if has < needs {
            return Some(format!("it offers {has} {what}, and {needs} are needed"));
        }
    }
    None
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

/// Returns every adapter of every API, native APIs before GL and unusable entries last; entries of
/// one adapter through two APIs or drivers are merged (`merged_into`). The order is stable on a
/// machine, so an index keeps its meaning.
///
/// The list is made once per process: drivers are not designed to be loaded and unloaded
/// repeatedly, and all devices of a GL adapter must share the lock that keeps its context on one
/// thread.
pub fn list_adapters() -> Vec<Adapter> {
    static FOUND: OnceLock<Vec<Adapter>> = OnceLock::new();
    FOUND.get_or_init(find_adapters).clone()
}

fn find_adapters() -> Vec<Adapter> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.flags = wgpu::InstanceFlags::empty().with_env();
    if let Some(library) = dxc::library() {
        let dxc_path = library.to_string_lossy().into_owned();
        let compiler = wgpu::Dx12Compiler::DynamicDxc { dxc_path };
        descriptor.backend_options.dx12.shader_compiler = compiler;
    }
    let instance = wgpu::Instance::new(descriptor);
    let mut found = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
    found.sort_by_key(|adapter| {
        let is_gl = adapter.get_info().backend == wgpu::Backend::Gl;
        (missing_property(adapter).is_some(), is_gl)
    });
    let infos: Vec<wgpu::AdapterInfo> = found.iter().map(wgpu::Adapter::get_info).collect();
    let mut seen = Vec::with_capacity(infos.len());
    for info in &infos {
        seen.push(ListedAdapter {
            api: api_name(info.backend),
            name: &info.name,
            bus: &info.device_pci_bus_id,
        });
    }
    forget_wrong_addresses(&mut seen);
    let merged = merge(&seen);
    let mut list = Vec::with_capacity(infos.len());
    for (index, wgpu) in found.into_iter().enumerate() {
        let info = &infos[index];
        let kind = AdapterKind::of(info.device_type, &info.name);
        list.push(Adapter {
            name: info.name.clone(),
            api: api_name(info.backend),
            kind,
            driver: driver_text(info),
            vendor: info.vendor,
            merged_into: merged[index],
            memory: AdapterMemory::of(&wgpu, kind),
            bus: seen[index].bus.to_string(),
            wgpu,
        });
    }
    // Memory that one API does not report may be known by another: GL has no way to query it.
    for index in 0..list.len() {
        if let Some(preferred) = list[index].merged_into {
            let AdapterMemory { bytes, free, .. } = list[preferred].memory;
            let memory = &mut list[index].memory;
            memory.bytes = memory.bytes.or(bytes);
            memory.free = memory.free.or(free);
        }
    }
    list
}

/// Name and version of a driver. Metal's is a part of the system, and has the system's version.
fn driver_text(info: &wgpu::AdapterInfo) -> String {
    let own = format!("{} {}", info.driver, info.driver_info);
    if !own.trim().is_empty() {
        return own.trim().to_string();
    }
    let version = sysinfo::System::long_os_version().unwrap_or_default();
    let kernel = sysinfo::System::kernel_version().unwrap_or_default();
    format!("{version} {kernel}").trim().to_string()
}

/// Properties by which two entries are recognized as one adapter.
struct ListedAdapter<'a> {
    api: &'static str,
    name: &'a str,
    /// PCI bus address, if the API reports it.
    bus: &'a str,
}

/// Clears the addresses of entries of DX12 that have one together: wgpu asks for the address of the
/// first card with the vendor and the device number of an adapter, so that equal cards get the same
/// (wgpu-hal 30, `dx12/adapter.rs`).
fn forget_wrong_addresses(seen: &mut [ListedAdapter]) {
    let of_dx12 = seen.iter().filter(|entry| entry.api == "dx12");
    let known: Vec<&str> = of_dx12.map(|entry| entry.bus).collect();
    for entry in seen.iter_mut().filter(|entry| entry.api == "dx12") {
        if known.iter().filter(|bus| **bus == entry.bus).count() > 1 {
            entry.bus = "";
        }
    }
}

/// Returns for each entry the earlier entry that is the same adapter: of another API, or of another
/// driver of the same API. Two entries of one API are two adapters unless they have one address,
/// so at most one entry of each API is merged by its name.
fn merge(seen: &[ListedAdapter]) -> Vec<Option<usize>> {
    let mut merged: Vec<Option<usize>> = Vec::with_capacity(seen.len());
    for _ in seen {
        // One card's name may be a part of another's, so equal names are tried first, and then
        // those of one chip.
        let into = earlier_entry(seen, &merged, equal_name)
            .or_else(|| earlier_entry(seen, &merged, equal_chip))
            .or_else(|| earlier_entry(seen, &merged, same_adapter));
        merged.push(into);
    }
    merged
}

/// The first entry into which the entry behind `merged` can be merged.
fn earlier_entry(
    seen: &[ListedAdapter],
    merged: &[Option<usize>],
    is_same: fn(&ListedAdapter, &ListedAdapter) -> bool,
) -> Option<usize> {
    let entry = &seen[merged.len()];
    for index in 0..merged.len() {
        let known = &seen[index];
        if merged[index].is_some() || !is_same(known, entry) {
            continue;
        }
        if have_one_address(known.bus, entry.bus) {
            return Some(index);
        }
        let is_taken = known.api == entry.api
            || (0..merged.len())
                .any(|other| merged[other] == Some(index) && seen[other].api == entry.api);
        if !is_taken {
            return Some(index);
        }
    }
    None
}

fn equal_name(known: &ListedAdapter, other: &ListedAdapter) -> bool {
    known.name == other.name && same_adapter(known, other)
}

/// Returns true if the drivers' remarks in two names have a word in common, such as `navi21` in
/// `RX 6800 (RADV NAVI21)` and in `RX 6800 (radeonsi, navi21, LLVM 15)`.
fn equal_chip(known: &ListedAdapter, other: &ListedAdapter) -> bool {
    let words = |name: &str| -> Vec<String> {
        let (_, remark) = card_and_remark(name);
        let words = remark.split(|c: char| !c.is_alphanumeric());
        words.filter(|word| !word.is_empty()).map(str::to_lowercase).collect()
    };
    let of_known = words(known.name);
    words(other.name).iter().any(|word| of_known.contains(word)) && same_adapter(known, other)
}

/// Returns true if two APIs expose one card: they agree on its bus address or, if one does not
/// report it, on its name without the driver's remark.
fn same_adapter(known: &ListedAdapter, other: &ListedAdapter) -> bool {
    if !known.bus.is_empty() && !other.bus.is_empty() {
        return known.bus == other.bus;
    }
    let ((known, _), (other, _)) = (card_and_remark(known.name), card_and_remark(other.name));
    let named = !known.is_empty() && !other.is_empty();
    named && (other.contains(known) || known.contains(other))
}

/// Splits a name at the remark in parentheses that Mesa's drivers add, each another one.
fn card_and_remark(name: &str) -> (&str, &str) {
    name.split_once(" (").unwrap_or((name, ""))
}

fn have_one_address(one: &str, other: &str) -> bool {
    !one.is_empty() && one == other
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

    #[test]
    fn a_name_within_another_is_taken_by_its_equal() {
        let seen = |api, name| ListedAdapter { api, name, bus: "" };
        let cards = [
            seen("vulkan", "RTX 3060"),
            seen("vulkan", "RTX 3060 Ti"),
            seen("gl", "RTX 3060 Ti"),
            seen("gl", "RTX 3060"),
        ];
        assert_eq!(merge(&cards), [None, None, Some(1), Some(0)]);
    }

    #[test]
    fn entries_of_two_apis_are_merged_and_two_of_one_api_are_not() {
        let seen = |api, name, bus| ListedAdapter { api, name, bus };
        let two_cards = [
            seen("vulkan", "Card", ""),
            seen("vulkan", "Card", ""),
            seen("dx12", "Card", ""),
            seen("dx12", "Card", ""),
            seen("gl", "Card/PCIe", ""),
        ];
        assert_eq!(merge(&two_cards), [None, None, Some(0), Some(1), Some(0)]);
        let by_address = [
            seen("vulkan", "Card", "0000:01:00.0"),
            seen("vulkan", "Card", "0000:02:00.0"),
            seen("dx12", "Card", "0000:02:00.0"),
            seen("gl", "", ""),
        ];
        assert_eq!(merge(&by_address), [None, None, Some(1), None]);
    }

    #[test]
    fn two_drivers_of_one_card_are_merged_by_its_address() {
        let seen = |name, bus| ListedAdapter { api: "vulkan", name, bus };
        let drivers = [
            seen("AMD Radeon RX 6800", "0000:03:00.0"),
            seen("AMD Radeon RX 6800", "0000:07:00.0"),
            seen("AMD Radeon RX 6800 (RADV NAVI21)", "0000:03:00.0"),
            seen("AMD Radeon RX 6800 (RADV NAVI21)", "0000:07:00.0"),
        ];
        assert_eq!(merge(&drivers), [None, None, Some(0), Some(1)]);
    }

    /// GL reports no address, and Mesa's drivers name one card in two ways.
    #[test]
    fn names_with_remarks_of_two_drivers_are_one_card() {
        let seen = |api, name| ListedAdapter { api, name, bus: "" };
        let cards = [
            seen("vulkan", "AMD Radeon Graphics (RADV RENOIR)"),
            seen("vulkan", "AMD Radeon Graphics (RADV NAVI21)"),
            seen("vulkan", "Intel(R) UHD Graphics 620 (KBL GT2)"),
            seen("vulkan", "llvmpipe (LLVM 15.0.6, 256 bits)"),
            seen("gl", "AMD Radeon Graphics (radeonsi, navi21, LLVM 15.0.6, DRM 3.49, 6.1.0)"),
            seen("gl", "Mesa Intel(R) UHD Graphics 620 (KBL GT2)"),
            seen("gl", "llvmpipe (LLVM 15.0.6, 256 bits)"),
            seen("gl", "NVIDIA GeForce RTX 3060/PCIe/SSE2"),
        ];
        let merged = merge(&cards);
        assert_eq!(merged, [None, None, None, None, Some(1), Some(2), Some(3), None]);
    }

    #[test]
    fn equal_cards_that_dx12_gives_one_address_are_merged_by_their_names() {
        let seen = |api, bus| ListedAdapter { api, name: "RTX 3060", bus };
        let mut cards = [
            seen("vulkan", "0000:01:00.0"),
            seen("vulkan", "0000:02:00.0"),
            seen("dx12", "0000:01:00.0"),
            seen("dx12", "0000:01:00.0"),
        ];
        forget_wrong_addresses(&mut cards);
        assert_eq!(merge(&cards), [None, None, Some(0), Some(1)]);
    }
}
