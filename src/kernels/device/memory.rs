//! Memory size of an adapter, queried from its back end because wgpu does not report it.

use super::AdapterKind;

/// Memory of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterMemory {
    /// Bytes that the driver offers; `None` if there is no known way to query them.
    pub bytes: Option<u64>,
    /// Bytes that this process could still allocate when it listed its adapters for the first time:
    /// other programs had the rest. `None` if the driver does not report them
    /// (`VK_EXT_memory_budget`).
    pub free: Option<u64>,
    /// True if the memory is part of the host's, as with software and integrated adapters: then it
    /// must not be counted in addition.
    pub of_host: bool,
}

impl AdapterMemory {
    /// Queries the back end of an adapter.
    pub(super) fn of(adapter: &wgpu::Adapter, kind: AdapterKind) -> Self {
        let of_host = matches!(kind, AdapterKind::Software | AdapterKind::Integrated);
        match driver_bytes(adapter) {
            Some((bytes, free)) => Self { bytes: Some(bytes), free, of_host },
            None => Self { bytes: None, free: None, of_host },
        }
    }

    /// Returns the bytes that a run may take: the free ones if they are known, or else all.
    pub fn available(&self) -> Option<u64> {
        self.free.or(self.bytes)
    }
}

/// Sum of Vulkan's device-local heaps, and the free bytes in them.
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
        // SAFETY: as above, and instance and device have Vulkan 1.1, which has the call.
        unsafe {
            let instance = shared.raw_instance();
            instance.get_physical_device_memory_properties2(device, &mut with_budget);
        }
    }
    let mut bytes = 0u64;
    let mut free = 0u64;
    for (index, heap) in properties.memory_heaps_as_slice().iter().enumerate() {
        if heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL) {
            bytes += heap.size;
            // The budget of the whole process, which is not 0 by the specification.
            let left = match budget.heap_budget[index] {
                0 => heap.size,
                budgeted => budgeted.saturating_sub(budget.heap_usage[index]),
            };
            free += left.min(heap.size);
        }
    }
    if bytes == 0 {
        return None;
    }
    Some((bytes, if has_budget { Some(free) } else { None }))
}

/// Returns `None`: a query of Metal's working set can be compiled only on its platform.
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
