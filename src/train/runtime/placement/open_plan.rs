//! Admission of devices with measured shares: the rows of each device's plan, and the memory
//! reserved for its moments until the devices of the run are known.

use std::cmp::Reverse;
use std::collections::VecDeque;

use super::names::is_named;
use super::rank_memory::{RankMemory, host_bytes, micro_batch_sizes, pools_most};
use super::shares::{moments, owned_elements};
use super::types::PlacementRequest;
use crate::runtime::{RuntimeError, memory};
use potluck_core::format::gibibytes_up;
use potluck_kernels::device::Selection;
use potluck_kernels::exec::Moments;
use potluck_parallel::planner::laid_out::{layout_of, shards};

/// Rows and moments for the opening of a device.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct OpenPlan {
    pub rows: u32,
    /// Reserved moments: the largest possible shard of the device.
    pub reserve: Moments,
    /// Memory of the device with the reserve.
    pub memory: RankMemory,
}

/// Requested device that fits its memory.
#[derive(Clone)]
pub(crate) struct MeasuredCandidate {
    /// Index of the device among the requested ones.
    pub position: usize,
    pub selection: Selection,
    /// Display name.
    pub name: String,
    /// Admissions that fit its memory, the preferred one first; at least one.
    pub(crate) admissions: VecDeque<OpenPlan>,
}

impl MeasuredCandidate {
    /// Advances to the first admission with less host memory; without one, changes nothing and
    /// returns false.
    fn take_less_host_memory(&mut self) -> bool {
        let now = self.host_bytes();
        let Some(less) = self.admissions.iter().position(|one| one.memory.of_host() < now) else {
            return false;
        };
        self.admissions.drain(..less);
        true
    }

    fn host_bytes(&self) -> usize {
        self.admissions.front().map_or(0, |one| one.memory.of_host())
    }
}

/// Returns the requested devices that fit their memory, and adds notes about excluded ones. Each
/// device's memory, and `available` bytes of host memory for all, must hold all moments if fewer
/// rows make that possible, because the run may use only one device. Otherwise they must hold the
/// largest shard of the smallest possible number of ranks. After each exclusion of a device the
/// others are admitted again, as ranks of a smaller group.
///
/// # Errors
/// Returns `RuntimeError` if the memory is insufficient for a named device, or for all devices.
pub fn admit(
    request: &PlacementRequest,
    selections: &[Selection],
    names: &[String],
    available: Option<u64>,
    notes: &mut Vec<String>,
) -> Result<Vec<MeasuredCandidate>, RuntimeError> {
    let mut positions: Vec<usize> = (0..selections.len()).collect();
    loop {
        let candidates = fit_devices(request, selections, names, &positions, notes)?;
        if candidates.len() < positions.len() {
            positions = candidates.iter().map(|one| one.position).collect();
            continue;
        }
        // The last admission with the most host memory.
        let mut largest = 0;
        for (index, one) in candidates.iter().enumerate() {
            if one.host_bytes() >= candidates[largest].host_bytes() {
                largest = index;
            }
        }
        let error = match fitting(request, candidates, available) {
            Ok(fitting) => return Ok(fitting),
            Err(error) => error,
        };
        if is_named(request.selector) || positions.len() == 1 {
            return Err(error);
        }
        let left = positions.remove(largest);
        notes.push(format!("{} is left out: {error}", names[left]));
    }
}

/// Returns the devices at these positions with sufficient memory as the ranks of a run, and adds
/// notes about the others.
fn fit_devices(
    request: &PlacementRequest,
    selections: &[Selection],
    names: &[String],
    positions: &[usize],
    notes: &mut Vec<String>,
) -> Result<Vec<MeasuredCandidate>, RuntimeError> {
    let mut candidates = Vec::new();
    let mut failed = None;
    for (rank, &position) in positions.iter().enumerate() {
        let selection = selections[position].clone();
        let name = names[position].clone();
        match admissions(request, &selection, &name, rank, positions.len()) {
            Ok(admissions) => {
                candidates.push(MeasuredCandidate { position, selection, name, admissions });
            }
            // A named device must not be excluded.
            Err(error) if is_named(request.selector) => return Err(error),
            Err(error) => {
                notes.push(format!("left out: {error}"));
                failed = Some(error);
            }
        }
    }
    match failed {
        Some(error) if candidates.is_empty() => Err(error),
        _ => Ok(candidates),
    }
}

/// Returns the error of the device at a position among `world` that does not fit the whole model in
/// any of the micro-batches of the request; `None` if it does.
pub(crate) fn lack_of_memory(
    request: &PlacementRequest,
    selection: &Selection,
    name: &str,
    position: usize,
    world: usize,
) -> Option<RuntimeError> {
    admissions(request, selection, name, position, world).err()
}

/// Returns the admissions of a device that fit its memory, sorted by descending reserve and then
/// rows.
fn admissions(
    request: &PlacementRequest,
    selection: &Selection,
    name: &str,
    position: usize,
    world: usize,
) -> Result<VecDeque<OpenPlan>, RuntimeError> {
    let mut fitting = VecDeque::new();
    let mut failed = None;
    let most = request.micro_batch.min(request.batch).max(1);
    let sizes = if request.fits_micro_batch { micro_batch_sizes(most) } else { vec![most] };
    let setting = request.opening.device_memory_mib;
    for reserve in reserves(request, position, world) {
        for &rows in &sizes {
            let plan = request.plans.of_rows(rows);
            match memory::require_on(selection, name, setting, &plan, &reserve) {
                Ok(_) => {
                    let memory = RankMemory::of(selection, &plan, &reserve, world);
                    let is_least = sizes.last() == Some(&rows);
                    if is_least || memory::fits_amply(selection, setting, &plan, memory.device) {
                        fitting.push_back(OpenPlan { rows, memory, reserve: reserve.clone() });
                    }
                }
                Err(error) => failed = Some(error),
            }
        }
    }
    match failed {
        _ if !fitting.is_empty() => Ok(fitting),
        Some(error) => Err(error),
        // Without a reserve there is neither an admission nor an error.
        None => Err(RuntimeError::Defect(format!("{name} has no shard to reserve"))),
    }
}

/// Returns the possible shards of the device at a position, the largest first: for 1 to `world`
/// ranks, as its lowest possible rank and the next one, because lower ranks have larger shards.
fn reserves(request: &PlacementRequest, position: usize, world: usize) -> Vec<Moments> {
    let plan = request.plans.of_rows(1);
    let mut reserves = Vec::new();
    for ranks in 1..=world {
        let layout = layout_of(request.parallel, &plan, ranks);
        let lowest = position.saturating_sub(world - ranks);
        for rank in lowest..=(lowest + 1).min(position).min(ranks - 1) {
            let count = request.optimizer.moments();
            let owned = Some(shards(&layout, rank));
            reserves.push(Moments { count, owned });
        }
    }
    reserves.sort_by_key(|reserve| Reverse(owned_elements(reserve)));
    reserves.dedup_by_key(|reserve| owned_elements(reserve));
    reserves
}

/// Chooses admissions that fit the host's memory together: reduces the device with the most of it,
/// until all fit.
fn fitting(
    request: &PlacementRequest,
    mut candidates: Vec<MeasuredCandidate>,
    available: Option<u64>,
) -> Result<Vec<MeasuredCandidate>, RuntimeError> {
    let plan = request.plans.of_rows(1);
    let pools =
        pools_most(request.parallel, &plan, candidates.len(), !request.nodes.nodes.is_empty());
    'fit: loop {
        let ranks = candidates.iter().filter_map(|one| Some(one.admissions.front()?.memory));
        let all = host_bytes(request, ranks, pools);
        let Err(error) = memory::require_of(available, all) else { return Ok(candidates) };
        let mut largest: Vec<usize> = (0..candidates.len()).collect();
        largest.sort_by_key(|&index| Reverse(candidates[index].host_bytes()));
        for index in largest {
            if candidates[index].take_less_host_memory() {
                continue 'fit;
            }
        }
        return Err(error);
    }
}

/// Returns true if the reserve of each device of a set holds its shard.
pub(crate) fn reserves_hold(request: &PlacementRequest, reserves: &[&Moments]) -> bool {
    let plan = request.plans.of_rows(1);
    let layout = layout_of(request.parallel, &plan, reserves.len());
    for (rank, reserve) in reserves.iter().enumerate() {
        let shard = Moments { count: reserve.count, owned: Some(shards(&layout, rank)) };
        if owned_elements(&shard) > owned_elements(reserve) {
            return false;
        }
    }
    true
}

/// Returns the error of a device whose reserve holds no shard of any group of devices: the moments
/// of a single device do not fit its memory.
pub(crate) fn too_little_for_one(
    request: &PlacementRequest,
    selection: &Selection,
    name: &str,
    rows: u32,
) -> RuntimeError {
    let plan = request.plans.of_rows(rows);
    let layout = layout_of(request.parallel, &plan, 1);
    let all = moments(request.optimizer, &layout, 0);
    let setting = request.opening.device_memory_mib;
    match memory::require_on(selection, name, setting, &plan, &all) {
        Err(error) => error,
        Ok(_) => RuntimeError::NoRoom {
            adapter: name.into(),
            what: "the moments of all parameters".into(),
            needed: gibibytes_up(memory::needed(selection, &plan, &all) as u64),
        },
    }
}
