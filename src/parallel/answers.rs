//! Answers to devices that fail or differ.

/// Answer to parameters that differ between devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MismatchAction {
    /// An error.
    #[default]
    Stop,
    /// They are overwritten by the values of most devices, or by their owner's without a majority.
    Repair,
}

/// Answer to the loss of one of several devices, which is lost, hangs, or has no memory left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceLoss {
    /// An error.
    #[default]
    Stop,
    /// Continue on the remaining devices from the last saved state, or without one from the start
    /// of the call.
    Continue,
}
