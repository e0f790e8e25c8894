//! Memory size of an adapter, queried from its back end because wgpu does not report it.

use super::AdapterKind;

/// Memory of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterMemory {
    /// Bytes that the driver offers; `None` where no way to query them is known.
    pub bytes: Option<u64>,
    /// True if they are part of the host's memory, as with software and integrated adapters: then
    /// they must not be counted in addition to it.
    pub of_host: bool,
}

impl AdapterMemory {
    /// Queries the back end of an adapter.
    pub(super) fn of(adapter: &wgpu::Adapter, kind: AdapterKind) -> Self {
        let of_host = matches!(kind, AdapterKind::Software | AdapterKind::Integrated);
        Self { bytes: driver_bytes(adapter), of_host }
    }
}

/// Returns the sum of Vulkan's device-local heaps.
#[cfg(any(target_os = "linux", target_os = "android", windows))]
fn driver_bytes(adapter: &wgpu::Adapter) -> Option<u64> {
    /// `VK_MEMORY_HEAP_DEVICE_LOCAL_BIT`.
    const DEVICE_LOCAL: u32 = 1;
    // SAFETY: nothing of the adapter is destroyed, and the guard outlives the call.
    let adapter = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
    let instance = adapter.shared_instance().raw_instance();
    // SAFETY: the physical device is one of this instance, which the guard keeps alive.
    let properties =
        unsafe { instance.get_physical_device_memory_properties(adapter.raw_physical_device()) };
    let heaps = properties.memory_heaps_as_slice().iter();
    let own = heaps.filter(|heap| heap.flags.as_raw() & DEVICE_LOCAL != 0);
    Some(own.map(|heap| heap.size).sum()).filter(|bytes| *bytes > 0)
}

/// Returns `None`: Metal's working set can only be queried where that code can be compiled.
#[cfg(not(any(target_os = "linux", target_os = "android", windows)))]
fn driver_bytes(_: &wgpu::Adapter) -> Option<u64> {
    None
}
