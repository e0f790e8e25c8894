//! Memory checks of host and devices before allocations: a system without free memory kills
//! processes without an error message, and a GPU driver may swap.

use std::fmt;

use super::RuntimeError;
use super::limit_basis::LimitBasis;
use potluck_core::Setting;
use potluck_core::format::{gibibytes, gibibytes_down, gibibytes_up};
use potluck_graph::Plan;
use potluck_graph::print::MemoryUsage;
use potluck_kernels::Caps;
use potluck_kernels::device::host::available_memory;
use potluck_kernels::device::{AdapterMemory, Selection};
use potluck_kernels::exec::Moments;
use potluck_kernels::exec::cpu::{host_extra_bytes, workspace_bytes};
use potluck_kernels::exec::gpu::{CallMemory, adder_bytes, tensor_bytes_max};
use potluck_parallel::Instruction;

/// Checks that the host has `bytes` of memory available, if the available amount is known.
///
/// # Errors
/// Returns `RuntimeError::Memory` if it has less.
pub fn require(bytes: usize) -> Result<(), RuntimeError> {
    require_of(available_memory(), bytes)
}

/// Checks that `bytes` are no more than `available`, if that is known.
///
/// # Errors
/// Returns `RuntimeError::Memory` if they are more.
pub(crate) fn require_of(available: Option<u64>, bytes: usize) -> Result<(), RuntimeError> {
    match available {
        Some(available) if bytes as u64 > available => {
            let needed = gibibytes_up(bytes as u64);
            Err(RuntimeError::Memory { needed, available: gibibytes_down(available) })
        }
        _ => Ok(()),
    }
}

/// Checks that the host has memory for a plan if the device uses host memory.
pub(crate) fn require_of_host(
    selection: &Selection,
    plan: &Plan,
    moments: &Moments,
) -> Result<(), RuntimeError> {
    require(host_bytes_of(selection, plan, moments))
}

/// Returns the bytes of host memory that a device needs for a plan and its moments; 0 if it has
/// memory of its own.
pub(crate) fn host_bytes_of(selection: &Selection, plan: &Plan, moments: &Moments) -> usize {
    if !uses_host_memory(selection) {
        return 0;
    }
    device_bytes(plan, moments).saturating_add(workspace(selection, plan, moments))
}

/// Returns a note if little of a device's memory is free after the allocation of all buffers:
/// drivers may move buffers to the host, which makes a run many times slower without an error.
pub(crate) fn note_if_full(name: &str, now: &AdapterMemory) -> Option<String> {
    let bytes = now.bytes?;
    let free = now.free?;
    // Host memory has other checks.
    if now.of_host || free >= bytes / 10 {
        return None;
    }
    Some(format!(
        "{name} has {} of {} left, with what other programs have: the driver may move memory to \
         the host, which makes steps much slower; end other programs on it, or lower {}",
        gibibytes_down(free),
        gibibytes(bytes),
        Setting::MicroBatchSize
    ))
}

/// Returns true if a device uses host memory.
pub fn uses_host_memory(selection: &Selection) -> bool {
    match selection {
        Selection::Cpu { .. } => true,
        Selection::Adapter(adapter) => adapter.memory.of_host,
        // Its node checks its own memory.
        Selection::Offered(_) => false,
    }
}

/// Returns the memory of the host of a device that has its tensors there, if known; `available` is
/// what this host has.
pub(crate) fn host_memory(selection: &Selection, available: Option<u64>) -> Option<u64> {
    match selection {
        Selection::Offered(device) => device.host_memory,
        Selection::Cpu { .. } | Selection::Adapter(_) => {
            available.filter(|_| uses_host_memory(selection))
        }
    }
}

/// Returns the bytes of a device's memory that a plan and its moments need.
pub fn needed(selection: &Selection, plan: &Plan, moments: &Moments) -> usize {
    memory(plan, moments).peak().saturating_add(beside_tensors(selection, plan, moments))
}

/// Bytes of a device's memory that a plan needs besides its tensors.
pub(crate) fn beside_tensors(selection: &Selection, plan: &Plan, moments: &Moments) -> usize {
    match selection {
        Selection::Cpu { .. } => {
            host_extra_bytes(plan).saturating_add(workspace(selection, plan, moments))
        }
        Selection::Adapter(_) | Selection::Offered(_) => workspace(selection, plan, moments),
    }
}

/// Returns the bytes of a device's memory that the kernels of a plan use within one call, and on an
/// adapter with a shard of the moments also for the addition of gradients to partial sums; 0 for a
/// device of another node.
pub fn workspace(selection: &Selection, plan: &Plan, moments: &Moments) -> usize {
    match selection {
        Selection::Adapter(adapter) => {
            let sums = if moments.owned.is_some() { adder_bytes(plan) } else { 0 };
            CallMemory::of(plan, &Caps::of_adapter(adapter)).bytes().saturating_add(sums)
        }
        Selection::Cpu { .. } => workspace_bytes(plan),
        Selection::Offered(_) => 0,
    }
}

/// Checks that a device has memory for a plan. `setting` is `train.device_memory_mib`, which
/// overrides the amount that an adapter reports, and limits the CPU device too. Returns the
/// required amount as a note if the available amount is unknown.
///
/// # Errors
/// Returns `RuntimeError::DeviceMemory` if the device, called `name`, has too little memory.
pub(crate) fn require_on(
    selection: &Selection,
    name: &str,
    setting: u64,
    plan: &Plan,
    moments: &Moments,
) -> Result<Option<String>, RuntimeError> {
    let needed = needed(selection, plan, moments) as u64;
    match limit(selection, setting) {
        Some((has, basis)) if needed > has => Err(RuntimeError::DeviceMemory {
            adapter: name.into(),
            needed: gibibytes_up(needed),
            has: gibibytes_down(has),
            basis,
        }),
        Some(_) => Ok(None),
        // The host's memory is checked for all devices together, and another node checks the memory
        // of its devices.
        None if matches!(selection, Selection::Cpu { .. } | Selection::Offered(_)) => Ok(None),
        None => Ok(Some(format!(
            "{name} does not report how much memory it has; the run needs {} of it ({} sets it)",
            gibibytes(needed),
            Setting::DeviceMemory
        ))),
    }
}

/// Returns true if the device can bind a plan's tensors, and its bytes are at most nine tenths of
/// the device's limit, if there is one. The rest is for other programs and the driver.
pub(crate) fn fits_amply(selection: &Selection, setting: u64, plan: &Plan, bytes: usize) -> bool {
    let binds_tensors = match selection {
        Selection::Adapter(adapter) => {
            plan.tensor_bytes_max() as u64 <= tensor_bytes_max(&adapter.limits())
        }
        Selection::Cpu { .. } | Selection::Offered(_) => true,
    };
    let limit = limit(selection, setting);
    binds_tensors && limit.is_none_or(|(has, _)| bytes as u64 <= has / 10 * 9)
}

/// Returns true if a device without memory for `needed` bytes may have it later: other programs may
/// have it now. A limit that is set does not change.
pub(crate) fn may_fit_later(selection: &Selection, setting: u64, needed: usize) -> bool {
    let most = match (selection, setting) {
        (Selection::Adapter(adapter), 0) => adapter.memory.bytes,
        _ => limit(selection, setting).map(|(bytes, _)| bytes),
    };
    most.is_none_or(|most| needed as u64 <= most)
}

/// Returns the limit of a device's memory in bytes, with its basis; `None` without a limit.
pub fn limit(selection: &Selection, setting: u64) -> Option<(u64, LimitBasis)> {
    match (selection, setting) {
        (Selection::Adapter(adapter), 0) => {
            let basis = match adapter.memory.free {
                Some(_) => LimitBasis::Free,
                None => LimitBasis::Driver,
            };
            adapter.memory.available().map(|bytes| (bytes, basis))
        }
        (Selection::Cpu { .. }, 0) => None,
        (Selection::Offered(device), _) => device.memory.map(|bytes| (bytes, LimitBasis::Node)),
        (_, mebibytes) => Some((mebibytes.saturating_mul(1 << 20), LimitBasis::Setting)),
    }
}

/// Returns a sentence for the user that compares the required bytes with the limit and its basis.
pub fn comparison(needed: usize, limit: Option<(u64, impl fmt::Display)>) -> String {
    let needed = needed as u64;
    match limit {
        Some((has, basis)) if needed > has => {
            let need = gibibytes_up(needed);
            let has = gibibytes_down(has);
            format!("does not fit: {need} needed of {has}, {basis}")
        }
        // The same rounding never shows the required amount as the larger one.
        Some((has, basis)) => {
            format!("fits: {} needed of {}, {basis}", gibibytes(needed), gibibytes(has))
        }
        None => format!("{} needed; how much there is, is not known", gibibytes_up(needed)),
    }
}

/// Returns the memory that a plan and its moments need on a device.
pub fn memory(plan: &Plan, moments: &Moments) -> MemoryUsage {
    match &moments.owned {
        Some(owned) => {
            let owned = owned.iter().map(ExactSizeIterator::len).sum();
            MemoryUsage::of_shard(plan, moments.count, owned)
        }
        None => MemoryUsage::of(plan, moments.count),
    }
}

/// Returns the bytes that a plan needs on a device in host memory, including the copy of
/// parameters, moments and averages for a checkpoint.
pub fn device_bytes(plan: &Plan, moments: &Moments) -> usize {
    let memory = memory(plan, moments);
    memory.peak().saturating_add(memory.saved)
}

/// Returns the bytes that a run with batches of `batch` samples needs besides the device: for its
/// program, and `loaded` bytes of prefetched inputs.
pub(crate) fn run_bytes(plan: &Plan, batch: usize, micro_batch: usize, loaded: usize) -> usize {
    let per_micro_batch = plan.segments.len() + 1;
    let instructions = batch.div_ceil(micro_batch.max(1)).saturating_mul(per_micro_batch);
    let program = instructions.saturating_mul(size_of::<Instruction>());
    program.saturating_add(loaded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_never_reads_as_more_than_there_is() {
        let text = |needed, has| comparison(needed, Some((has, "basis")));
        let mebi = 1 << 20;
        assert_eq!(text(257 * mebi, 260 << 20), "fits: 257.0 MiB needed of 260.0 MiB, basis");
        assert_eq!(text(1560 * mebi, 1590 << 20), "fits: 1.5 GiB needed of 1.6 GiB, basis");
        assert_eq!(text(1590 * mebi, 1590 << 20), "fits: 1.6 GiB needed of 1.6 GiB, basis");
        let refused = "does not fit: 1.6 GiB needed of 1.5 GiB, basis";
        assert_eq!(text(1590 * mebi, 1589 << 20), refused);
    }

    #[test]
    fn a_device_without_a_tenth_of_its_memory_is_noted() {
        let note =
            |bytes, free| note_if_full("Card", &AdapterMemory { bytes, free, of_host: false });
        let (all, tenth) = (Some(8 << 30), (8 << 30) / 10);
        assert_eq!(
            [note(None, Some(0)), note(all, None), note(all, Some(tenth))],
            [const { None }; 3]
        );
        let told = note(all, Some(100 << 20)).unwrap();
        assert!(told.starts_with("Card has 100.0 MiB of 8.0 GiB left, "), "{told}");
    }

    #[test]
    fn what_is_known_and_too_small_is_refused_with_the_figures() {
        let plan = crate::runtime::placement::shares::tests::plan(4);
        let cpu = Selection::cpu(1);
        let outcome = |setting| match require_on(&cpu, "Card", setting, &plan, &2.into()) {
            Ok(note) => note.unwrap_or_else(|| "fits".into()),
            Err(error) => format!("{}: {error}", error.exit_code()),
        };
        let needs = needed(&cpu, &plan, &2.into());
        assert!(needs > 4 << 20 && needs < 5 << 20, "{needs}");
        assert_eq!((outcome(0), outcome(5)), ("fits".to_string(), "fits".to_string()));
        let refused = outcome(4);
        for part in ["78: Card:", "needs 4.", "has 4.0 MiB, as train.device_memory_mib", "micro_"] {
            assert!(refused.contains(part), "'{part}' is missing in: {refused}");
        }
        // A lack of one byte shows in the figures.
        let error = require_of(Some(2 << 20), (2 << 20) + 1).unwrap_err().to_string();
        assert!(error.contains("needs 2.1 MiB of memory and 2.0 MiB are available"), "{error}");
        // A limit that is set stays, and a driver may have more later.
        assert!(!may_fit_later(&cpu, 4, needs) && may_fit_later(&cpu, 5, needs));
        assert!(may_fit_later(&cpu, 0, usize::MAX));
        assert!(require(0).is_ok() && require_of(None, usize::MAX).is_ok());
        assert_eq!(require_of(Some(3), 4).unwrap_err().exit_code(), 78);
    }
}
