//! Placement of a run: what is decided about its ranks before the first step.

use std::fmt;

/// Site at which a rank's gradients are added to partial sums of other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceSite {
    /// On the host, in the ring thread.
    Host,
    /// On the device by a kernel: partial sums are uploaded and read back.
    Device,
}

impl fmt::Display for ReduceSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::Device => "device",
        })
    }
}
