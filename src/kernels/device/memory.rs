//! Memory size of an adapter, queried from its back end because wgpu does not report it.

use super::AdapterKind;

/// Memory of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterMemory {
    /// Bytes that the driver offers; `None` where no way to query them is known.
    pub bytes: Option<u64>,
    /// Bytes of them that this process could still allocate when it listed its adapters for the
    /// first time: other programs had the rest. `None` if the driver does not tell
    /// (`VK_EXT_memory_budget`).
    pub free: Option<u64>,
    /// True if they are part of the host's memory, as with software and integrated adapters: then
    /// they must not be counted in addition to it.
    pub of_host: bool,
}

impl AdapterMemory {
    /// Queries the back end of an adapter.
    pub(super) fn of(adapter: &wgpu::Adapter, kind: AdapterKind) -> Self {
        let of_host = matches!(kind, AdapterKind::Software | AdapterKind::Integrated);
        let (bytes, free) = driver_bytes(adapter).unzip();
        Self { bytes, free: free.flatten(), of_host }
    }

    /// Returns the bytes that a run may take: those that are free, or else those that there are.
    pub fn available(&self) -> Option<u64> {
        self.free.or(self.bytes)
    }
}

/// Returns the sum of Vulkan's device-local heaps, and what is free of them.
#[cfg(any(target_os = "linux", target_os = "android", windows))]
fn driver_bytes(adapter: &wgpu::Adapter) -> Option<(u64, Option<u64>)> {
    use ash::{ext, vk};

    // SAFETY: nothing of the adapter is destroyed, and the guard outlives the calls.
    let adapter = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
    let shared = adapter.shared_instance();
    let capabilities = adapter.physical_device_capabilities();
    let device = adapter.raw_physical_device();
    // SAFETY: the physical device is one of this instance, which the guard keeps alive.
    let properties = unsafe { shared.raw_instance().get_physical_device_memory_properties(device) };
    let version = shared.instance_api_version().min(capabilities.properties().api_version);
    let has_budget =
        version >= vk::API_VERSION_1_1 && capabilities.supports_extension(ext::memory_budget::NAME);
    let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
    if has_budget {
        let mut with_budget = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
        // SAFETY: as above, and instance and device have Vulkan 1.1, of which the call is.
        unsafe {
            let instance = shared.raw_instance();
            instance.get_physical_device_memory_properties2(device, &mut with_budget);
        }
    }
    let (mut bytes, mut free) = (0u64, 0u64);
    for (index, heap) in properties.memory_heaps_as_slice().iter().enumerate() {
        if heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL) {
            bytes += heap.size;
            // A budget is that of the whole process, which the specification says is not 0.
            let left = match budget.heap_budget[index] {
                0 => heap.size,
                budgeted => budgeted.saturating_sub(budget.heap_usage[index]),
            };
            free += left.min(heap.size);
        }
    }
    Some((bytes, has_budget.then_some(free))).filter(|_| bytes > 0)
}

/// Returns `None`: Metal's working set can only be queried where that code can be compiled.
#[cfg(not(any(target_os = "linux", target_os = "android", windows)))]
fn driver_bytes(_: &wgpu::Adapter) -> Option<(u64, Option<u64>)> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::list_adapters;

    #[test]
    fn what_is_free_is_no_more_than_there_is() {
        for adapter in list_adapters() {
            let AdapterMemory { bytes, free, .. } = adapter.memory;
            assert!(free.is_none_or(|free| Some(free) <= bytes), "{bytes:?} {free:?}");
        }
        let memory = |free| AdapterMemory { bytes: Some(8), free, of_host: false }.available();
        assert_eq!([memory(None), memory(Some(3))], [Some(8), Some(3)]);
    }
}
