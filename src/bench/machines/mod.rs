//! Plans for machines that are not here: a file of machines, the times of a model on them from data
//! sheets or reports of benchmarks, and the layout that a run would have.

mod file;
mod rates;
mod table;
#[cfg(test)]
mod tests;
mod work;

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use self::file::{MachinesFile, NodeEntry, Source};
use self::rates::rates;
use self::work::model_work;
use potluck_graph::Precision;
use potluck_parallel::ParallelOptions;
use potluck_parallel::planner::many_nodes::{
    ManyNodesRequest, NoNodesLayout, NodesProposal, propose,
};
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::planner::profile::{DeviceProfile, PlanProfile};
use potluck_parallel::planner::rates::{DeviceRates, ModelWork};
use potluck_train::TrainError;
use potluck_train::families::DataShape;
use potluck_train::runtime::placement::block_work::half_parts;
use potluck_train::spec::RunSpec;

pub use file::{DEVICES_MAX, MachinesError, NODES_MAX};

/// Plan that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum PlanMachinesError {
    #[error(transparent)]
    Machines(#[from] MachinesError),
    #[error(transparent)]
    Train(#[from] TrainError),
    #[error(transparent)]
    NoLayout(#[from] NoNodesLayout),
}

/// Machines of a file with the times of a model on them, which is all that a planner needs.
pub struct MachinesProfile {
    pub profile: PlanProfile,
    /// The same with the model in mixed precision; `None` for a model that is.
    pub mixed: Option<PlanProfile>,
    pub plans: Plans,
    /// Name of each node, by number; equal nodes share one.
    pub names: Vec<String>,
    /// Devices whose rates were measured, of all.
    measured: usize,
}

impl MachinesProfile {
    /// Reads a file of machines, and computes the times of a model on them.
    ///
    /// # Errors
    /// Returns [`MachinesError`] for a file that cannot be used.
    pub fn of_model(
        path: &Path,
        plans: Plans,
        step: &PlannedStep<'_>,
    ) -> Result<Self, MachinesError> {
        let text = fs::read_to_string(path)
            .map_err(|why| MachinesError::Unreadable { path: path.into(), why })?;
        let source = Source::new(path, &text);
        let file = source.parse()?;
        let devices = DevicesOfEntries::read(&source, &file)?;
        let entries = file.entries();
        let work = model_work(&plans, step.micro_batch, step.moments);
        let mut names = Vec::with_capacity(entries.len());
        let mut measured = 0;
        for entry in &entries {
            names.push(file.node[*entry].as_ref().name.clone());
            for kind in &devices.by_entry[*entry] {
                measured += usize::from(devices.are_measured[*kind]);
            }
        }
        let profile = PlanProfile {
            devices: devices.profiles(&entries, &work),
            links: file.links(),
            network_s_per_byte: Vec::new(),
            receives_inputs: Vec::new(),
            thread_message_s: 0.0,
            half_parts: half_parts(&plans, step.micro_batch),
        };
        let mut mixed = None;
        if plans.model().precision() == Precision::F32 {
            let model = plans.model().clone().with_precision(Precision::Mixed);
            let work = model_work(&Plans::new(model), step.micro_batch, step.moments);
            mixed =
                Some(PlanProfile { devices: devices.profiles(&entries, &work), ..profile.clone() });
        }
        Ok(Self { profile, mixed, plans, names, measured })
    }
}

/// Rates of the devices of all entries, each kind once.
#[derive(Default)]
struct DevicesOfEntries {
    kinds: Vec<DeviceRates>,
    are_measured: Vec<bool>,
    /// By entry: the kind of each of its devices.
    by_entry: Vec<Vec<usize>>,
}

impl DevicesOfEntries {
    fn read(source: &Source<'_>, file: &MachinesFile) -> Result<Self, MachinesError> {
        let mut devices = Self::default();
        let mut known: HashMap<String, usize> = HashMap::new();
        for entry in &file.node {
            let NodeEntry { devices: of_entry, memory_gib, .. } = entry.as_ref();
            let mut kinds = Vec::with_capacity(of_entry.len());
            for device in of_entry {
                // Devices of one name in hosts of different memory may differ.
                let key = format!("{:?} {memory_gib}", device.as_ref());
                let kind = match known.get(&key) {
                    Some(kind) => *kind,
                    None => {
                        let at = device.span().start;
                        devices.kinds.push(rates(source, at, device.as_ref(), *memory_gib)?);
                        let is_measured =
                            matches!(device.as_ref(), file::MachineDevice::Measured(_));
                        devices.are_measured.push(is_measured);
                        known.insert(key, devices.kinds.len() - 1);
                        devices.kinds.len() - 1
                    }
                };
                kinds.push(kind);
            }
            devices.by_entry.push(kinds);
        }
        Ok(devices)
    }

    /// Times of a model on the devices of the nodes, whose entries these are.
    fn profiles(&self, entries: &[usize], work: &ModelWork) -> Vec<DeviceProfile> {
        let mut of_kind: Vec<DeviceProfile> = Vec::with_capacity(self.kinds.len());
        for (kind, rates) in self.kinds.iter().enumerate() {
            of_kind.push(rates.profile(work, kind, 0));
        }
        let mut profiles = Vec::new();
        for (node, entry) in entries.iter().enumerate() {
            for kind in &self.by_entry[*entry] {
                profiles.push(DeviceProfile { node: node as u32, ..of_kind[*kind].clone() });
            }
        }
        profiles
    }
}

/// Plan of a run on the machines of a file.
pub struct MachinesPlan {
    pub machines: MachinesProfile,
    pub proposal: NodesProposal,
    /// Samples of a step.
    batch: u32,
}

/// Plans a run on the machines of a file; `shape` is that of the run's data.
///
/// # Errors
/// Returns [`PlanMachinesError`] for a file that cannot be used, for a model that cannot be built,
/// and for one that fits on no device.
pub fn plan_machines(
    path: &Path,
    spec: &RunSpec,
    shape: &DataShape,
) -> Result<MachinesPlan, PlanMachinesError> {
    let plans = Plans::new(spec.training_graph(shape)?);
    let step = PlannedStep {
        options: &spec.parallel,
        batch: spec.batch,
        micro_batch: spec.micro_batch,
        fits_micro_batch: spec.fits_micro_batch,
        moments: spec.optimizer.moments(),
    };
    plan_model(path, plans, step)
}

/// Step that a plan is for.
#[derive(Clone, Copy)]
pub struct PlannedStep<'a> {
    pub options: &'a ParallelOptions,
    /// Samples of a step.
    pub batch: u32,
    /// Most samples of a micro-batch.
    pub micro_batch: u32,
    /// True to run smaller micro-batches on devices with too little memory.
    pub fits_micro_batch: bool,
    /// Moments of the optimizer per parameter.
    pub moments: usize,
}

/// Plans steps of a model on the machines of a file.
///
/// # Errors
/// Returns the errors of [`plan_machines`], except those of the model.
pub fn plan_model(
    path: &Path,
    plans: Plans,
    step: PlannedStep<'_>,
) -> Result<MachinesPlan, PlanMachinesError> {
    let machines = MachinesProfile::of_model(path, plans, &step)?;
    let proposal = propose(&ManyNodesRequest {
        profile: &machines.profile,
        mixed: machines.mixed.as_ref(),
        plans: &machines.plans,
        options: step.options,
        batch: step.batch,
        micro_batch: step.micro_batch,
        fits_micro_batch: step.fits_micro_batch,
        moments: step.moments,
    })?;
    Ok(MachinesPlan { machines, proposal, batch: step.batch })
}
