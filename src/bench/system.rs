//! Properties of the machine and of the program in a report.

use serde::{Deserialize, Serialize};

use potluck_kernels::autotune::certify::WGPU;
use potluck_kernels::device::{HostInfo, host};

/// Properties that affect figures besides the device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct System {
    pub os: String,
    pub architecture: String,
    /// The processor's name, or `unknown`.
    pub cpu: String,
    /// Cores, or hardware threads if a core has several, that this process may use.
    pub cores: usize,
    /// Version of wgpu, the library through which every GPU is used.
    pub wgpu: String,
}

impl System {
    /// Returns the properties of this machine and this program.
    pub fn here() -> Self {
        Self {
            os: std::env::consts::OS.into(),
            architecture: std::env::consts::ARCH.into(),
            cpu: HostInfo::query().model.unwrap_or_else(|| "unknown".into()),
            cores: host::cores(),
            wgpu: WGPU.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_properties_of_this_machine_are_found() {
        let here = System::here();
        assert!(here.wgpu.starts_with("30.") && here.cores > 0, "{here:?}");
    }
}
