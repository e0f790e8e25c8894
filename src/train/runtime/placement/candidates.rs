//! Candidates of a run: the devices that a selector chooses, and the identities by which a
//! placement knows them.

use crate::runtime::RuntimeError;
use potluck_kernels::autotune::cache;
use potluck_kernels::device::{Adapter, Selection, list_adapters, select_all};
use potluck_kernels::exec::cpu::cpu_identity;

/// Returns the devices that a selector chooses.
pub fn selections(selector: &str) -> Result<Vec<Selection>, RuntimeError> {
    Ok(select_all(selector, &adapters_for(selector))?)
}

/// Returns the adapters among which a selector chooses. Enumerating them takes a while, so it is
/// skipped for a selector that names only the CPU.
pub fn adapters_for(selector: &str) -> Vec<Adapter> {
    for part in selector.split(',') {
        let name = part.split('*').next().unwrap_or_default();
        if !name.trim().eq_ignore_ascii_case("cpu") {
            return list_adapters();
        }
    }
    Vec::new()
}

/// Returns the identities of devices, by which a placement knows them.
pub fn candidates(selections: &[Selection]) -> Vec<String> {
    selections.iter().map(identity).collect()
}

/// Returns the identity of a device, which decides the bits of its results.
pub fn identity(selection: &Selection) -> String {
    match selection {
        Selection::Cpu { .. } => cpu_identity(),
        Selection::Adapter(adapter) => cache::device_key(adapter),
        Selection::Offered(device) => device.identity.clone(),
    }
}
