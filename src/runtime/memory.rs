//! Whether host and device have the memory that a run needs, asked before anything is allocated: a
//! system that runs out of it kills processes without a word, and a driver may swap.

use super::RuntimeError;
use crate::device::host::available_memory;
use crate::device::{Adapter, AdapterMemory, Selection};
use crate::exec::Moments;
use crate::graph::Plan;
use crate::graph::print::MemoryUsage;
use crate::parallel::Instruction;

/// Refuses what needs more bytes than the host has available; where that is not known, nothing.
pub fn require(bytes: usize) -> Result<(), RuntimeError> {
    match available_memory() {
        Some(available) if bytes as u64 > available => {
            let needed = gibibytes(bytes as u64);
            Err(RuntimeError::Memory { needed, available: gibibytes(available) })
        }
        _ => Ok(()),
    }
}

/// Refuses a plan for a device that draws on the host's memory, if the host has no room for it.
pub fn require_of_host(
    selection: &Selection,
    plan: &Plan,
    moments: &Moments,
) -> Result<(), RuntimeError> {
    if uses_host_memory(selection) { require(device_bytes(plan, moments)) } else { Ok(()) }
}

/// Whether a device draws on the host's memory.
pub fn uses_host_memory(selection: &Selection) -> bool {
    match selection {
        Selection::Cpu { .. } => true,
        Selection::Adapter(adapter) => adapter.memory.of_host,
    }
}

/// Refuses a plan that an adapter has no room for. `setting`
/// is `train.device_memory_mib`, which goes before what the adapter tells. Where nothing is known, the
/// need is returned as a note.
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
        0 => (memory.bytes, "as its driver says (train.device_memory_mib overrides that)"),
        mebibytes => (Some(mebibytes << 20), "as train.device_memory_mib says"),
    };
    match has {
        Some(has) if needed > has => {
            let (adapter, needed, has) = (name.into(), gibibytes(needed), gibibytes(has));
            Err(RuntimeError::DeviceMemory { adapter, needed, has, basis })
        }
        Some(_) => Ok(None),
        None => Ok(Some(format!(
            "{name} does not tell how much memory it has; the run needs {} of it (train.device_memory_mib \
             sets what there is)",
            gibibytes(needed)
        ))),
    }
}

/// What a plan takes on a device that keeps these moments.
pub fn memory(plan: &Plan, moments: &Moments) -> MemoryUsage {
    match &moments.owned {
        Some(owned) => {
            let owned = owned.iter().map(ExactSizeIterator::len).sum();
            MemoryUsage::of_shard(plan, moments.count, owned)
        }
        None => MemoryUsage::of(plan, moments.count),
    }
}

/// What a plan takes on a device that shares the host's memory, with the copy of parameters and
/// moments that saving them makes.
pub fn device_bytes(plan: &Plan, moments: &Moments) -> usize {
    let memory = memory(plan, moments);
    let saved = memory.parameters.saturating_add(memory.moments);
    memory.peak().saturating_add(saved)
}

/// What a run of batches of `batch` samples takes besides the device: its program, and `loaded`
/// bytes of inputs that wait.
pub fn run_bytes(plan: &Plan, batch: usize, micro_batch: usize, loaded: usize) -> usize {
    let per_micro_batch = plan.segments.len() + 1;
    let instructions = batch.div_ceil(micro_batch.max(1)).saturating_mul(per_micro_batch);
    let program = instructions.saturating_mul(size_of::<Instruction>());
    program.saturating_add(loaded)
}

/// Bytes for people.
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
            outcome(Some(4 << 30), 1024).contains("has 1.0 GiB, as train.device_memory_mib says")
        );
        assert!(outcome(None, 0).contains("the run needs 3.0 GiB"), "{}", outcome(None, 0));
        assert!(require(0).is_ok());
    }
}
