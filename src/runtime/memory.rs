//! Memory checks of host and devices before anything is allocated: a system that runs out of
//! memory kills processes without an error message, and a GPU driver may swap.

use super::RuntimeError;
use crate::device::host::available_memory;
use crate::device::{Adapter, AdapterMemory, Selection};
use crate::exec::Moments;
use crate::graph::Plan;
use crate::graph::print::MemoryUsage;
use crate::parallel::Instruction;

/// Checks that the host has `bytes` of memory available; passes where the available amount is
/// unknown.
pub fn require(bytes: usize) -> Result<(), RuntimeError> {
    match available_memory() {
        Some(available) if bytes as u64 > available => {
            let needed = gibibytes(bytes as u64);
            Err(RuntimeError::Memory { needed, available: gibibytes(available) })
        }
        _ => Ok(()),
    }
}

/// Checks that the host has memory for a plan, if the device uses host memory.
pub fn require_of_host(
    selection: &Selection,
    plan: &Plan,
    moments: &Moments,
) -> Result<(), RuntimeError> {
    if uses_host_memory(selection) { require(device_bytes(plan, moments)) } else { Ok(()) }
}

/// Returns true if a device uses host memory.
pub fn uses_host_memory(selection: &Selection) -> bool {
    match selection {
        Selection::Cpu { .. } => true,
        Selection::Adapter(adapter) => adapter.memory.of_host,
    }
}

/// Checks that an adapter has memory for a plan. `setting` is `train.device_memory_mib`, which
/// overrides the amount that the adapter reports. Returns the required amount as a note if the
/// available amount is unknown.
pub fn require_on(
    adapter: &Adapter,
    setting: u64,
    plan: &Plan,
    moments: &Moments,
) -> Result<Option<String>, RuntimeError> {
    let needed = memory(plan, moments).peak() as u64;
    fits(&adapter.name, adapter.memory, setting, needed)
}

fn fits(
    name: &str,
    memory: AdapterMemory,
    setting: u64,
    needed: u64,
) -> Result<Option<String>, RuntimeError> {
    let (has, basis) = match setting {
        0 => (memory.bytes, "as its driver reports (train.device_memory_mib overrides that)"),
        mebibytes => (Some(mebibytes << 20), "as train.device_memory_mib sets it"),
    };
    match has {
        Some(has) if needed > has => {
            let (adapter, needed, has) = (name.into(), gibibytes(needed), gibibytes(has));
            Err(RuntimeError::DeviceMemory { adapter, needed, has, basis })
        }
        Some(_) => Ok(None),
        None => Ok(Some(format!(
            "{name} does not report how much memory it has; the run needs {} of it \
             (train.device_memory_mib sets it)",
            gibibytes(needed)
        ))),
    }
}

/// Returns the memory that a plan takes on a device with these moments.
pub fn memory(plan: &Plan, moments: &Moments) -> MemoryUsage {
    match &moments.owned {
        Some(owned) => {
            let owned = owned.iter().map(ExactSizeIterator::len).sum();
            MemoryUsage::of_shard(plan, moments.count, owned)
        }
        None => MemoryUsage::of(plan, moments.count),
    }
}

/// Returns the bytes that a plan takes on a device that uses host memory, including the copy of
/// parameters and moments that saving a checkpoint makes.
pub fn device_bytes(plan: &Plan, moments: &Moments) -> usize {
    let memory = memory(plan, moments);
    let saved = memory.parameters.saturating_add(memory.moments);
    memory.peak().saturating_add(saved)
}

/// Returns the bytes that a run with batches of `batch` samples takes besides the device: its
/// program, and `loaded` bytes of prefetched inputs.
pub fn run_bytes(plan: &Plan, batch: usize, micro_batch: usize, loaded: usize) -> usize {
    let per_micro_batch = plan.segments.len() + 1;
    let instructions = batch.div_ceil(micro_batch.max(1)).saturating_mul(per_micro_batch);
    let program = instructions.saturating_mul(size_of::<Instruction>());
    program.saturating_add(loaded)
}

/// Formats bytes in GiB, or in MiB below 0.1 GiB, for messages to the user.
pub fn gibibytes(bytes: u64) -> String {
    let gibibytes = bytes as f64 / (1u64 << 30) as f64;
    if gibibytes < 0.1 {
        return format!("{:.1} MiB", bytes as f64 / (1u64 << 20) as f64);
    }
    format!("{gibibytes:.1} GiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_and_too_small_is_refused_with_the_figures() {
        let memory = |bytes| AdapterMemory { bytes, of_host: false };
        let outcome = |bytes, setting| match fits("Card", memory(bytes), setting, 3 << 30) {
            Ok(note) => note.unwrap_or_else(|| "fits".into()),
            Err(error) => format!("{}: {error}", error.exit_code()),
        };
        assert_eq!(outcome(Some(4 << 30), 0), "fits");
        assert_eq!(outcome(None, 4096), "fits");
        let refused = outcome(Some(2 << 30), 0);
        for part in ["78: Card:", "needs 3.0 GiB", "has 2.0 GiB, as its driver", "micro_batch"] {
            assert!(refused.contains(part), "'{part}' is missing in: {refused}");
        }
        assert!(
            outcome(Some(4 << 30), 1024)
                .contains("has 1.0 GiB, as train.device_memory_mib sets it")
        );
        assert!(outcome(None, 0).contains("the run needs 3.0 GiB"), "{}", outcome(None, 0));
        assert!(require(0).is_ok());
    }
}
