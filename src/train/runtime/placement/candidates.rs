//! Candidates of a run: the devices of a selector, and their identities in a placement.

use crate::runtime::RuntimeError;
use crate::runtime::remote::FIRST_NODE;
use potluck_kernels::autotune::cache;
use potluck_kernels::device::{Adapter, AdapterKind, Selection, list_adapters, select_all};
use potluck_kernels::exec::cpu::cpu_identity;

/// Returns the devices of a selector.
pub fn selections(selector: &str) -> Result<Vec<Selection>, RuntimeError> {
    Ok(select_all(selector, &adapters_for(selector))?)
}

/// Returns the adapters for a selector. Their enumeration is slow, and skipped for a selector of
/// only the CPU.
pub fn adapters_for(selector: &str) -> Vec<Adapter> {
    for part in selector.split(',') {
        let name = part.split('*').next().unwrap_or_default();
        if !name.trim().eq_ignore_ascii_case("cpu") {
            return list_adapters();
        }
    }
    Vec::new()
}

/// Returns the identities of devices in a placement.
pub fn candidates(selections: &[Selection]) -> Vec<String> {
    selections.iter().map(identity).collect()
}

/// Returns the kind of each device: the first device of the same node with the same identity. An
/// identity tells nothing of the speed of a processor on another machine, so that nodes have kinds
/// of their own.
pub fn kinds(selections: &[Selection]) -> Vec<usize> {
    let of_kind: Vec<(u32, String)> =
        selections.iter().map(|one| (node_of(one), identity(one))).collect();
    let mut kinds = Vec::with_capacity(of_kind.len());
    for (place, kind) in of_kind.iter().enumerate() {
        kinds.push(of_kind.iter().position(|other| other == kind).unwrap_or(place));
    }
    kinds
}

/// Returns the number of the node of a device.
pub fn node_of(selection: &Selection) -> u32 {
    match selection {
        Selection::Offered(device) => device.node,
        Selection::Adapter(_) | Selection::Cpu { .. } => FIRST_NODE,
    }
}

/// Returns whether the processor of its node computes for a device.
pub(crate) fn is_on_host(selection: &Selection) -> bool {
    match selection {
        Selection::Cpu { .. } => true,
        Selection::Adapter(adapter) => adapter.kind == AdapterKind::Software,
        Selection::Offered(device) => device.is_on_host,
    }
}

/// Returns the identity of a device, which determines the bits of its results.
pub fn identity(selection: &Selection) -> String {
    match selection {
        Selection::Cpu { .. } => cpu_identity(),
        Selection::Adapter(adapter) => cache::device_key(adapter),
        Selection::Offered(device) => device.identity.clone(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use potluck_kernels::device::RemoteDeviceInfo;

    /// CPU device of another node, whose memory is unknown.
    pub fn cpu_of_node(node: u32, index: u32) -> RemoteDeviceInfo {
        RemoteDeviceInfo {
            node,
            index,
            name: "cpu".into(),
            identity: cpu_identity(),
            is_cpu: true,
            is_on_host: true,
            binding_bytes: None,
            memory: None,
            host_memory: None,
            adapter: None,
        }
    }

    #[test]
    fn equal_devices_are_of_one_kind_on_one_node_only() {
        let offered = |node: u32, index: u32| Selection::Offered(cpu_of_node(node, index));
        let devices = [Selection::cpu(2), Selection::cpu(2), offered(1, 0), offered(1, 1)];
        assert_eq!(kinds(&devices), [0, 0, 2, 2]);
        assert_eq!(kinds(&[offered(2, 0), offered(1, 0), offered(2, 1)]), [0, 1, 0]);
    }
}
