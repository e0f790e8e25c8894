//! Capabilities of a device on which the choice of kernel variants depends.

use crate::device::{Adapter, AdapterKind, CooperativeSquare, Gpu};

/// Capabilities of a device, by which a twin chooses the variants of a call that may win there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    pub class: DeviceClass,
    /// Bytes of workgroup memory.
    pub workgroup_bytes: u32,
    /// The most invocations of a workgroup.
    pub invocations: u32,
    /// True if shaders may use subgroup operations.
    pub subgroups: bool,
    /// Cooperative matrices that kernels may use.
    pub cooperative: Option<CooperativeSquare>,
    /// The most bytes of a buffer that a kernel can bind.
    pub binding_bytes: u64,
    /// Registers of 32 bits that a kernel may need before the device's compiler spills, by the
    /// count of Intel's compiler.
    pub registers: u32,
}

/// Class of a device by its performance characteristics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceClass {
    /// A GPU: workgroups have fast shared memory, and registers bound how many of them run
    /// concurrently.
    Hardware,
    /// A driver that runs kernels on the host's processor: barriers are costly, all memory is
    /// cache.
    Software,
    /// Either: variants for both classes are candidates; for tests and catalogs.
    Any,
}

impl Caps {
    /// Capabilities with which every variant is a candidate.
    pub const EVERY: Self = Self {
        class: DeviceClass::Any,
        workgroup_bytes: u32::MAX,
        invocations: u32::MAX,
        subgroups: true,
        cooperative: Some(CooperativeSquare { size: 16, subgroups: [32; 2] }),
        binding_bytes: u64::MAX,
        registers: u32::MAX,
    };

    /// Returns the capabilities with which every variant is a candidate, with the shader texts of
    /// a device.
    pub(crate) fn every_on(gpu: &Gpu) -> Self {
        Self { cooperative: gpu.cooperative, ..Self::EVERY }
    }

    /// Returns the capabilities of an opened device.
    pub fn of(gpu: &Gpu) -> Self {
        Self {
            class: class(gpu.kind),
            workgroup_bytes: gpu.limits.workgroup_bytes,
            invocations: gpu.limits.invocations,
            subgroups: gpu.features.subgroups.is_some(),
            cooperative: gpu.cooperative,
            binding_bytes: gpu.limits.binding_bytes,
            registers: registers(gpu.vendor, &gpu.name),
        }
    }

    /// Returns the capabilities that an adapter will have when it is opened.
    pub fn of_adapter(adapter: &Adapter) -> Self {
        Self {
            class: class(adapter.kind),
            workgroup_bytes: adapter.limits().workgroup_bytes,
            invocations: adapter.limits().invocations,
            subgroups: adapter.features().subgroups.is_some(),
            cooperative: adapter.cooperative_square(),
            binding_bytes: adapter.limits().binding_bytes,
            registers: registers(adapter.vendor, &adapter.name),
        }
    }

    pub(crate) fn wants_gpu_variants(&self) -> bool {
        self.class != DeviceClass::Software
    }

    /// Returns true if variants for drivers that run on the host's processor are candidates.
    pub(crate) fn wants_cpu_driver_variants(&self) -> bool {
        self.class != DeviceClass::Hardware
    }

    /// Returns the same capabilities with every variant that the device can run as a candidate,
    /// also the slow ones; for tests.
    #[cfg(test)]
    pub(crate) fn with_all_that_run(self) -> Self {
        Self { class: DeviceClass::Any, ..self }
    }
}

/// PCI vendor ID of Intel.
const INTEL: u32 = 0x8086;

/// Returns [`Caps::registers`] of a GPU, given its PCI vendor ID, which neither Metal nor Mesa's
/// driver for Apple reports, and its name. Intel's GPUs have 128. Apple's have 128 too, but its
/// compilers use them better: kernels for which Intel's compiler needs 200 fit.
pub fn registers(vendor: u32, name: &str) -> u32 {
    if vendor == INTEL || name.contains("Intel") {
        128
    } else if name.contains("Apple") {
        200
    } else {
        256
    }
}

fn class(kind: AdapterKind) -> DeviceClass {
    match kind {
        AdapterKind::Software => DeviceClass::Software,
        _ => DeviceClass::Hardware,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_follow_vendor_and_name() {
        assert_eq!(registers(INTEL, "Arc A770"), 128);
        assert_eq!(registers(0, "Intel Iris Plus Graphics 655"), 128);
        // The names that Metal and Mesa's driver report.
        assert_eq!(registers(0, "Apple M2 Pro"), 200);
        assert_eq!(registers(0x1_0005, "Apple M1 (G13G B1)"), 200);
        assert_eq!(registers(0x10DE, "NVIDIA GeForce RTX 4090"), 256);
    }
}
