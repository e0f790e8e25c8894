//! Memory of adapters with several ranks: each rank may fit alone, but not all together.

use crate::runtime::placement::open_one::RequestedDevices;
use crate::runtime::placement::rank_memory::RankMemory;
use crate::runtime::placement::types::PlacementRequest;
use crate::runtime::{RuntimeError, memory};
use potluck_core::format::{gibibytes_down, gibibytes_up};

/// Checks that each adapter has enough memory for its ranks together: `ranks`, on the devices at
/// these positions. The opening of a device checks each rank alone.
///
/// # Errors
/// Returns `RuntimeError::DeviceMemory` with the first adapter that has too little.
pub(crate) fn require_shared_memory(
    request: &PlacementRequest,
    devices: RequestedDevices,
    positions: &[usize],
    ranks: &[RankMemory],
) -> Result<(), RuntimeError> {
    let mut needed = Vec::new();
    for (position, rank) in positions.iter().zip(ranks) {
        needed.push((*position, rank.device as u64));
    }
    match overfull(request, devices, &needed) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// Returns the error of the first adapter with too little memory for its ranks together; `needed`
/// has the positions of the ranks' devices and their bytes.
pub(crate) fn overfull(
    request: &PlacementRequest,
    devices: RequestedDevices,
    needed: &[(usize, u64)],
) -> Option<RuntimeError> {
    let selections = devices.selections;
    let setting = request.opening.device_memory_mib;
    let (position, ranks, bytes) = first_overfull(
        needed,
        &|one, other| selections[one].shares_adapter(&selections[other]),
        &|position| Some(memory::limit(&selections[position], setting)?.0),
    )?;
    let (has, basis) = memory::limit(&selections[position], setting)?;
    Some(RuntimeError::DeviceMemory {
        adapter: format!("{} (its {ranks} ranks together)", devices.names[position]),
        needed: gibibytes_up(bytes),
        has: gibibytes_down(has),
        basis,
    })
}

/// Returns the first device with too little memory for its several ranks: its position, their
/// number and their bytes.
fn first_overfull(
    needed: &[(usize, u64)],
    is_shared: &dyn Fn(usize, usize) -> bool,
    has: &dyn Fn(usize) -> Option<u64>,
) -> Option<(usize, usize, u64)> {
    for &(position, _) in needed {
        let mut ranks = 0;
        let mut all: u64 = 0;
        for &(other, bytes) in needed {
            if is_shared(position, other) {
                ranks += 1;
                all = all.saturating_add(bytes);
            }
        }
        if let Some(has) = has(position)
            && ranks > 1
            && all > has
        {
            return Some((position, ranks, all));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Devices 0 and 2 are on one adapter of 10 bytes, device 1 on another.
    #[test]
    fn ranks_on_one_adapter_are_summed() {
        let first = |needed: &[(usize, u64)], has: Option<u64>| {
            first_overfull(needed, &|one, other| one % 2 == other % 2, &|_| has)
        };
        assert_eq!(first(&[(0, 6), (1, 9), (2, 5)], Some(10)), Some((0, 2, 11)));
        assert_eq!(first(&[(1, 9), (2, 5), (0, 6)], Some(10)), Some((2, 2, 11)));
        assert_eq!(first(&[(0, 6), (1, 9), (2, 4)], Some(10)), None);
        assert_eq!(first(&[(0, 6), (1, 9), (2, 5)], None), None);
        assert_eq!(first(&[(0, 11), (1, 9)], Some(10)), None, "one rank is checked elsewhere");
        assert_eq!(first(&[(0, u64::MAX), (2, 1)], Some(10)), Some((0, 2, u64::MAX)));
    }
}
