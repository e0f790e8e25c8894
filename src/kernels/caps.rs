//! What a device offers to kernels, as far as the choice of variants depends on it.

use crate::device::{Adapter, AdapterKind, Gpu};

/// Capabilities of a device, by which a twin chooses the variants of a call that may win there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    pub class: DeviceClass,
    /// Bytes of memory that a workgroup shares.
    pub workgroup_bytes: u32,
    /// True if shaders may use subgroup operations.
    pub subgroups: bool,
    /// The most bytes that a kernel sees of a buffer.
    pub binding_bytes: u64,
    /// Registers of an invocation, as floats, that a kernel may need before its compiler spills.
    pub registers: u32,
}

/// Class of a device by what is fast on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceClass {
    /// A GPU: workgroups share fast memory, and registers bound how many of them run at a time.
    Hardware,
    /// A driver that runs kernels on the host's processor: barriers are costly, all memory is
    /// cache.
    Software,
    /// Neither: what suits one of them is a candidate; for tests and catalogs.
    Any,
}

impl Caps {
    /// Capabilities with which every variant is a candidate.
    pub const EVERY: Self = Self {
        class: DeviceClass::Any,
        workgroup_bytes: u32::MAX,
        subgroups: true,
        binding_bytes: u64::MAX,
        registers: u32::MAX,
    };

    /// Returns the capabilities of an opened device.
    pub fn of(gpu: &Gpu) -> Self {
        Self {
            class: class(gpu.kind),
            workgroup_bytes: gpu.limits.workgroup_bytes,
            subgroups: gpu.features.subgroups.is_some(),
            binding_bytes: gpu.limits.binding_bytes,
            registers: registers(gpu.vendor, gpu.api),
        }
    }

    /// Returns the capabilities that an adapter will have when it is opened.
    pub fn of_adapter(adapter: &Adapter) -> Self {
        Self {
            class: class(adapter.kind),
            workgroup_bytes: adapter.limits().workgroup_bytes,
            subgroups: adapter.features().subgroups.is_some(),
            binding_bytes: adapter.limits().binding_bytes,
            registers: registers(adapter.vendor, adapter.api),
        }
    }

    /// Returns true if variants for GPUs are candidates.
    pub(crate) fn suits_hardware(&self) -> bool {
        self.class != DeviceClass::Software
    }

    /// Returns true if variants for drivers that run on the host's processor are candidates.
    pub(crate) fn suits_software(&self) -> bool {
        self.class != DeviceClass::Hardware
    }

    /// Returns the same capabilities with every variant that the device can run as a candidate,
    /// also those that are slow there; for tests.
    #[cfg(test)]
    pub(crate) fn with_all_that_run(self) -> Self {
        Self { class: DeviceClass::Any, ..self }
    }
}

/// PCI's number of Intel.
const INTEL: u32 = 0x8086;

/// Returns the registers of an invocation on a vendor's GPUs. Those of Intel have 128, and those of
/// Apple 128 of 32 bits, into which its open driver fits what that of Intel needs 200 for.
fn registers(vendor: u32, api: &str) -> u32 {
    match (vendor, api) {
        (INTEL, _) => 128,
        (_, "metal") => 200,
        _ => 256,
    }
}

fn class(kind: AdapterKind) -> DeviceClass {
    match kind {
        AdapterKind::Software => DeviceClass::Software,
        _ => DeviceClass::Hardware,
    }
}
