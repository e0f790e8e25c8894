//! Devices that a benchmark measures.

use potluck_kernels::device::{
    Adapter, AdapterKind, DeviceError, Selection, host, list_adapters, select,
};
use potluck_kernels::exec::cpu::cpu_name;

/// A device to measure.
#[derive(Clone, Debug)]
pub struct Target {
    /// Selector of this device, for runs that open it themselves.
    pub selector: String,
    pub place: TargetDevice,
}

/// Kind of device that a benchmark measures.
#[derive(Clone, Debug)]
pub enum TargetDevice {
    /// The built-in CPU device.
    Cpu,
    Adapter(Box<Adapter>),
}

impl Target {
    pub fn name(&self) -> String {
        match &self.place {
            TargetDevice::Cpu => cpu_name(host::threads()),
            TargetDevice::Adapter(adapter) => adapter.name.clone(),
        }
    }

    /// Returns the API: `vulkan`, `metal`, `dx12`, `gl`, or `cpu`.
    pub fn api(&self) -> String {
        match &self.place {
            TargetDevice::Cpu => "cpu".into(),
            TargetDevice::Adapter(adapter) => adapter.api.into(),
        }
    }

    pub fn driver(&self) -> String {
        match &self.place {
            TargetDevice::Cpu => String::new(),
            TargetDevice::Adapter(adapter) => adapter.driver.clone(),
        }
    }

    pub fn kind(&self) -> String {
        match &self.place {
            TargetDevice::Cpu => "the built-in CPU device".into(),
            TargetDevice::Adapter(adapter) => adapter.kind.to_string(),
        }
    }

    /// Returns true if the target is a hardware GPU, which has its own processors and possibly its
    /// own memory.
    pub fn is_hardware(&self) -> bool {
        match &self.place {
            TargetDevice::Adapter(adapter) => adapter.kind != AdapterKind::Software,
            TargetDevice::Cpu => false,
        }
    }
}

/// Returns the devices that a list of selectors chooses, in its order.
///
/// # Errors
/// Returns `DeviceError` if a selector chooses no usable device.
pub fn targets(devices: &str) -> Result<Vec<Target>, DeviceError> {
    let adapters = list_adapters();
    if devices.trim().eq_ignore_ascii_case("all") {
        return Ok(all(&adapters));
    }
    // A name may have commas in it, so the whole list is tried before its parts.
    let whole = target(devices, &adapters);
    if whole.is_ok() || !devices.contains(',') {
        return Ok(vec![whole?]);
    }
    let mut targets: Vec<Target> = Vec::new();
    for selector in devices.split(',').map(str::trim) {
        let target = target(selector, &adapters)?;
        if !targets.iter().any(|known| known.selector == target.selector) {
            targets.push(target);
        }
    }
    Ok(targets)
}

fn target(selector: &str, adapters: &[Adapter]) -> Result<Target, DeviceError> {
    let place = match select(selector, adapters)? {
        Selection::Cpu { .. } => TargetDevice::Cpu,
        Selection::Offered(device) => {
            let why = "devices of other nodes are benchmarked there".into();
            return Err(DeviceError::Open { adapter: device.name, why });
        }
        Selection::Adapter(adapter) => {
            if let Err(why) = adapter.usable() {
                return Err(DeviceError::Open { adapter: adapter.name, why });
            }
            TargetDevice::Adapter(adapter)
        }
    };
    Ok(Target { selector: selector.trim().to_lowercase(), place })
}

/// The CPU device and every usable adapter, each physical device once.
fn all(adapters: &[Adapter]) -> Vec<Target> {
    let mut targets = vec![Target { selector: "cpu".into(), place: TargetDevice::Cpu }];
    for (index, adapter) in adapters.iter().enumerate() {
        if adapter.merged_into.is_none() && adapter.usable().is_ok() {
            targets.push(Target {
                selector: index.to_string(),
                place: TargetDevice::Adapter(Box::new(adapter.clone())),
            });
        }
    }
    targets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_keep_their_order_and_name_each_device_once() {
        let selectors = |devices: &str| -> Vec<String> {
            targets(devices).unwrap().into_iter().map(|target| target.selector).collect()
        };
        assert_eq!(selectors("CPU"), ["cpu"]);
        assert_eq!(selectors("cpu, auto,cpu"), ["cpu", "auto"]);
        assert_eq!(selectors("all")[0], "cpu");
        assert!(targets("cpu,no such device").is_err());
        assert!(targets("").is_err());
    }
}
