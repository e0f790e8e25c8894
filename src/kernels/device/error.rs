//! Errors of devices, each with the next action for the user.

use super::select::is_index;
use potluck_core::Setting;

/// Error of a device that is missing or failed. Each message is one sentence with the next action.
#[derive(Clone, Debug, thiserror::Error, serde::Serialize, serde::Deserialize)]
pub enum DeviceError {
    #[error(
        "no GPU adapter was found: {hint}, or train on the processor with {}",
        Setting::Devices.given("cpu")
    )]
    NoAdapter { hint: String },
    #[error("no adapter matches '{selector}'; there are: {found}{}", naming_advice(selector))]
    NoMatch { selector: String, found: String },
    #[error("'{selector}' is not a device selector: {why}")]
    BadSelector { selector: String, why: String },
    #[error("{} is in the list {times}; write {}*{count} once", names.join(" or "), names[0])]
    Repeated {
        /// Spellings of the device in the list, the first one first.
        names: Vec<String>,
        times: String,
        /// Ranks on the device by all of its entries.
        count: usize,
    },
    #[error("{adapter}: cannot be opened: {why}")]
    Open { adapter: String, why: String },
    #[error(
        "{adapter}: a buffer of {bytes} bytes is over its limit of {limit}; lower {} or the \
         model's width",
        Setting::MicroBatchSize
    )]
    TooLarge { adapter: String, bytes: u64, limit: u64 },
    #[error(
        "{adapter}: {what} would loop {iterations} times, and this driver ends loops silently \
         after {limit}; lower {}, the model's width or its context",
        Setting::MicroBatchSize
    )]
    LoopTooLong { adapter: String, what: String, iterations: usize, limit: usize },
    #[error("{adapter}: out of memory at {what}; lower {}", Setting::MicroBatchSize)]
    OutOfMemory { adapter: String, what: String },
    #[error(
        "{adapter}: the device was lost ({why}); start again, with another device if that fails too"
    )]
    Lost { adapter: String, why: String },
    /// The node of the device is lost; `why` is a sentence that names it.
    #[error("{why}")]
    NodeLost { adapter: String, why: String },
    #[error(
        "{adapter}: {what} did not finish within {seconds} s, so the device counts as hung; start \
         again with another device, a smaller micro-batch or a larger {}",
        Setting::DeviceTimeout
    )]
    Timeout { adapter: String, what: String, seconds: f64 },
    #[error(
        "{adapter}: what was read back of {what} is not what the device holds; save again, and \
         if that fails too, use another device"
    )]
    ReadBack { adapter: String, what: String },
    #[error(
        "{adapter}: the kernel {kernel} cannot be trusted on this driver: {why}; update the \
         driver, {}, or choose another device, such as {}",
        Setting::Recertify,
        Setting::Devices.given("cpu")
    )]
    Uncertified { adapter: String, kernel: String, why: String },
    #[error(
        "{adapter}: the kernel of the custom op {op} cannot run: {why}; correct the op, or train \
         with {}, which runs its reference",
        Setting::Devices.given("cpu")
    )]
    CustomKernel { adapter: String, op: String, why: String },
    #[error("{adapter}: {what} was refused by the driver or by validation: {why}")]
    Refused { adapter: String, what: String, why: String },
    /// Sample that the node of the device cannot read from its own copy of the data.
    #[error("{adapter}: the samples of step {step} cannot be read on its node: {why}")]
    Input { adapter: String, step: u64, why: String },
    #[error(
        "{adapter}: {what} did not end: its thread panicked{}, which is a defect of potluck; \
         please report it",
        .text.as_ref().map(|text| format!(" ({text})")).unwrap_or_default()
    )]
    Panicked {
        adapter: String,
        what: String,
        /// Message and place of the panic, if known.
        text: Option<String>,
    },
}

/// Names of devices in other frameworks, which say nothing of the adapter.
const OF_FRAMEWORKS: [&str; 7] = ["cuda", "gpu", "hip", "metal", "mps", "rocm", "xpu"];

/// What to write instead of a name of another framework (`cuda`, `cuda:1`), or of a number of
/// devices; empty for other names.
fn naming_advice(selector: &str) -> &'static str {
    if is_index(selector) {
        return "; a number is an index: name each device, such as \"0,1\" for two of them";
    }
    if selector.contains(';') {
        return "; separate devices by commas";
    }
    let name = selector.split(':').next().unwrap_or_default();
    if OF_FRAMEWORKS.iter().any(|known| name.eq_ignore_ascii_case(known)) {
        "; for every hardware GPU write auto alone, and for one its index or a part of its name"
    } else {
        ""
    }
}

impl DeviceError {
    /// Returns true for a refusal after which the device can still be used.
    pub(crate) fn is_survivable(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. } | Self::TooLarge { .. } | Self::Refused { .. })
    }

    /// Returns all of its texts, to be sanitized if they come from another node.
    pub fn texts_mut(&mut self) -> Vec<&mut String> {
        match self {
            Self::NoAdapter { hint } => vec![hint],
            Self::NoMatch { selector, found } => vec![selector, found],
            Self::BadSelector { selector, why } => vec![selector, why],
            Self::Repeated { names, times, count: _ } => names.iter_mut().chain([times]).collect(),
            Self::Open { adapter, why }
            | Self::Input { adapter, step: _, why }
            | Self::Lost { adapter, why }
            | Self::NodeLost { adapter, why } => vec![adapter, why],
            Self::TooLarge { adapter, bytes: _, limit: _ } => vec![adapter],
            Self::LoopTooLong { adapter, what, iterations: _, limit: _ }
            | Self::OutOfMemory { adapter, what }
            | Self::Timeout { adapter, what, seconds: _ }
            | Self::ReadBack { adapter, what } => vec![adapter, what],
            Self::Uncertified { adapter, kernel, why } => vec![adapter, kernel, why],
            Self::CustomKernel { adapter, op, why } => vec![adapter, op, why],
            Self::Refused { adapter, what, why } => vec![adapter, what, why],
            Self::Panicked { adapter, what, text } => {
                [adapter, what].into_iter().chain(text).collect()
            }
        }
    }
}

/// Returns the error that there is no adapter, with a hint on the drivers to install.
pub fn no_adapter() -> DeviceError {
    let hint = if cfg!(target_os = "linux") {
        "install the Vulkan loader and a driver (on Debian and Ubuntu: apt-get install \
         libvulkan1 mesa-vulkan-drivers; NVIDIA's driver brings its own)"
    } else {
        "update the graphics driver"
    };
    DeviceError::NoAdapter { hint: hint.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_core::setting::as_fields;

    #[test]
    fn advice_names_flags_of_the_program_or_fields_of_the_library() {
        let (adapter, kernel, why) = ("a".into(), "sum".into(), "it is wrong".into());
        let error = DeviceError::Uncertified { adapter, kernel, why };
        let text = error.to_string();
        assert!(text.contains("try it again with potluck devices --certify, or choose"), "{text}");
        assert!(text.ends_with("such as --devices cpu"), "{text}");
        let fields = as_fields(|| error.to_string());
        assert!(fields.contains("delete its entry in the cache of kernels, or choose"), "{fields}");
        assert!(fields.ends_with("such as TrainerOptions::devices = cpu"), "{fields}");
    }
}
