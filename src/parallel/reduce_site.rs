//! Site at which gradients are added.

use std::fmt;

/// Site at which a rank's gradients are added to partial sums of other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReduceSite {
    /// On the host, in the ring thread.
    Host,
    /// On the device by a kernel: partial sums are uploaded and read back.
    Device,
}

impl ReduceSite {
    /// Returns the name in configurations and records.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Device => "device",
        }
    }
}

impl fmt::Display for ReduceSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
