//! Properties of the machine and the program that a report describes.

use serde::{Deserialize, Serialize};

use crate::device::HostInfo;

/// Properties that affect figures besides the device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct System {
    pub os: String,
    pub architecture: String,
    /// The processor's name, or `unknown`.
    pub cpu: String,
    /// Cores, or hardware threads where a core has several, that this process may use.
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
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            wgpu: version_of(LOCK, "wgpu").unwrap_or("unknown").into(),
        }
    }
}

/// Lock file with the versions of all dependencies: a crate does not expose its own version.
const LOCK: &str = include_str!("../../Cargo.lock");

fn version_of<'a>(lock: &'a str, name: &str) -> Option<&'a str> {
    let wanted = format!("name = \"{name}\"");
    let mut lines = lock.lines().skip_while(|line| *line != wanted).skip(1);
    lines.next()?.strip_prefix("version = \"")?.strip_suffix('"')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found() {
        let lock = "[[package]]\nname = \"wgpu-core\"\nversion = \"1.0.0\"\n\n\
                    [[package]]\nname = \"wgpu\"\nversion = \"30.1.2\"\n";
        assert_eq!(version_of(lock, "wgpu"), Some("30.1.2"));
        assert_eq!(version_of(lock, "naga"), None);
        let here = System::here();
        assert!(here.wgpu.starts_with("30.") && here.cores > 0, "{here:?}");
    }
}
