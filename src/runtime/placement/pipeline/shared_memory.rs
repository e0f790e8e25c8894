//! Memory of adapters that several ranks share: each rank may fit alone where all together do not.

use crate::runtime::placement::arrangement::Arrangement;
use crate::runtime::placement::laid_out::LaidOut;
use crate::runtime::placement::open_ranks::RequestedDevices;
use crate::runtime::placement::types::PlacementRequest;
use crate::runtime::{RuntimeError, memory};

/// Checks that each adapter has the memory that its ranks take together. A rank alone is checked
/// when its device is opened.
///
/// # Errors
/// Returns `RuntimeError::DeviceMemory` with the first adapter that has less.
pub fn require_shared_memory(
    request: &PlacementRequest,
    devices: RequestedDevices,
    planned: &Arrangement,
    laid_out: &LaidOut,
) -> Result<(), RuntimeError> {
    let needed = |(rank, position): (usize, &usize)| {
        let (plan, moments) = (&laid_out.written.plans[rank], laid_out.moments(request, rank));
        (*position, memory::needed(&devices.selections[*position], plan, &moments) as u64)
    };
    let needed: Vec<(usize, u64)> = planned.positions.iter().enumerate().map(needed).collect();
    overfull(request, devices, &needed).map_or(Ok(()), Err)
}

/// Returns the error of the first adapter that has less memory than its ranks take together;
/// `needed` are the positions of the ranks' devices and their bytes.
pub fn overfull(
    request: &PlacementRequest,
    devices: RequestedDevices,
    needed: &[(usize, u64)],
) -> Option<RuntimeError> {
    let selection = |position: usize| &devices.selections[position];
    let limit = |position| memory::limit(selection(position), request.opening.device_memory_mib);
    let is_shared = |one: usize, other: usize| selection(one).shares_adapter(selection(other));
    let has = |position| limit(position).map(|(has, _)| has);
    let (position, ranks, bytes) = first_overfull(needed, &is_shared, &has)?;
    let (has, basis) = limit(position)?;
    Some(RuntimeError::DeviceMemory {
        adapter: format!("{} (its {ranks} ranks together)", devices.names[position]),
        needed: memory::gibibytes_up(bytes),
        has: memory::gibibytes_down(has),
        basis,
    })
}

/// Returns the first device of several ranks that has less memory than they take: its position,
/// their number and their bytes.
fn first_overfull(
    needed: &[(usize, u64)],
    is_shared: &dyn Fn(usize, usize) -> bool,
    has: &dyn Fn(usize) -> Option<u64>,
) -> Option<(usize, usize, u64)> {
    let sum = |(position, _): &(usize, u64)| {
        let of_device = needed.iter().filter(|(other, _)| is_shared(*position, *other));
        let bytes: Vec<u64> = of_device.map(|(_, bytes)| *bytes).collect();
        (*position, bytes.len(), bytes.into_iter().fold(0, u64::saturating_add))
    };
    let exceeds = |(position, ranks, bytes): &(usize, usize, u64)| {
        *ranks > 1 && has(*position).is_some_and(|has| *bytes > has)
    };
    needed.iter().map(sum).find(exceeds)
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
