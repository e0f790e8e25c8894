//! The kinds of adapters.

use std::fmt;

/// Kind of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterKind {
    Discrete,
    Integrated,
    Virtual,
    /// Runs on the host's processor; `auto` never selects it.
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

/// Parts of the names of drivers that run on the processor: they may report another type, as behind
/// a layer that forwards Vulkan to another machine, or through GL.
const SOFTWARE: [&str; 5] =
    ["llvmpipe", "softpipe", "swiftshader", "warp", "microsoft basic render driver"];

impl AdapterKind {
    pub(super) fn of(kind: wgpu::DeviceType, name: &str) -> Self {
        let name = name.to_lowercase();
        if SOFTWARE.iter().any(|part| name.contains(part)) {
            return Self::Software;
        }
        match kind {
            wgpu::DeviceType::DiscreteGpu => Self::Discrete,
            wgpu::DeviceType::IntegratedGpu => Self::Integrated,
            wgpu::DeviceType::VirtualGpu => Self::Virtual,
            wgpu::DeviceType::Cpu => Self::Software,
            wgpu::DeviceType::Other => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wgpu::DeviceType;

    #[test]
    fn drivers_that_run_on_the_processor_are_known_by_name() {
        for (kind, name, expected) in [
            (DeviceType::VirtualGpu, "Virtio-GPU Venus (llvmpipe)", AdapterKind::Software),
            (DeviceType::Other, "Microsoft Basic Render Driver", AdapterKind::Software),
            (DeviceType::IntegratedGpu, "SwiftShader Device (Subzero)", AdapterKind::Software),
            (DeviceType::Cpu, "a new one", AdapterKind::Software),
            (DeviceType::DiscreteGpu, "NVIDIA H100 80GB HBM3", AdapterKind::Discrete),
            (DeviceType::Other, "Mesa Intel(R) Arc(tm)", AdapterKind::Other),
        ] {
            assert_eq!(AdapterKind::of(kind, name), expected, "{name}");
        }
    }
}
