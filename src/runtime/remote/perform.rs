//! Calls of the first node on a device of this one.

use super::wire::{CallReply, DeviceCall, PlanRecipe};
use crate::device::DeviceError;
use crate::exec::Executor;
use crate::graph::{Graph, Plan, PlanPart, PlannedPart};
use crate::runtime::tasks::perform_named;

/// Performs a call on a device.
///
/// # Errors
/// Returns `DeviceError` if the device fails.
pub fn perform_call(device: &mut dyn Executor, call: DeviceCall) -> Result<CallReply, DeviceError> {
    let done = |()| CallReply::Done;
    match call {
        DeviceCall::Task { name, task } => {
            Ok(CallReply::Task(perform_named(device, &name, &task)?))
        }
        DeviceCall::InjectFault(fault) => device.inject_fault(fault).map(done),
        DeviceCall::SetInput { tensor, micro_batch, values } => {
            device.set_input(tensor, micro_batch, values.as_view()).map(done)
        }
        DeviceCall::BeginStep => device.begin_step().map(done),
        DeviceCall::Run { nodes, pass } => device.run(nodes, &pass).map(done),
        DeviceCall::FinishStep { norms } => device.finish_step(&norms).map(CallReply::Sums),
        DeviceCall::Loss => device.loss().map(|(sum, count)| CallReply::Loss(sum, count)),
        DeviceCall::Update { bucket, update, range } => {
            device.update(bucket, &update, &range).map(done)
        }
        DeviceCall::Flush => device.flush().map(done),
        DeviceCall::Read { tensor, parts, pass } => {
            device.read_parts(tensor, &parts, &pass).map(CallReply::Values)
        }
        DeviceCall::ReadBank { bank, bucket } => {
            device.read_bank(bank, bucket).map(CallReply::Values)
        }
        DeviceCall::Hash { bank, bucket } => device.hash(bank, bucket).map(CallReply::Hash),
        DeviceCall::WriteBank { bank, bucket, values } => {
            device.write_bank(bank, bucket, &values).map(done)
        }
        DeviceCall::SetMoments(moments) => device.set_moments(moments).map(done),
        DeviceCall::ReadPlace(place) => {
            device.start_readback(place)?;
            let read = device.next_readback(true)?;
            Ok(CallReply::Values(read.map(|read| read.values().to_vec()).unwrap_or_default()))
        }
        DeviceCall::WritePlace { place, values } => device.write_place(&place, &values).map(done),
        DeviceCall::PrepareAdd { lengths } => device.prepare_add(&lengths).map(done),
        DeviceCall::Add { bucket, start, mut partial } => {
            device.add(bucket, start, &mut partial)?;
            Ok(CallReply::Values(partial))
        }
    }
}

impl PlanRecipe {
    /// Returns the recipe of a plan.
    pub fn of(plan: &Plan) -> Self {
        Self { options: plan.options, part: plan.part.clone() }
    }

    /// Returns the plan of a graph by this recipe.
    ///
    /// # Errors
    /// Returns why the recipe is not one of this graph.
    pub fn plan(self, graph: Graph) -> Result<Plan, String> {
        let Self { options, part } = self;
        if options.rows == 0 || options.in_flight == 0 {
            return Err("a plan has rows and a copy of each slot".into());
        }
        let Some(PlannedPart { blocks, runs }) = part else { return Ok(Plan::new(graph, options)) };
        if blocks.len() != graph.blocks.len() {
            let (given, has) = (blocks.len(), graph.blocks.len());
            return Err(format!("a part of {given} blocks of a model that has {has}"));
        }
        Ok(Plan::part(graph, options, &PlanPart { blocks: &blocks, runs: &runs }))
    }
}

/// Returns the hash of a plan, by which two nodes know that they have the same.
pub fn plan_hash(plan: &Plan) -> [u8; 32] {
    struct Hashed(blake3::Hasher);
    impl std::fmt::Write for Hashed {
        fn write_str(&mut self, text: &str) -> std::fmt::Result {
            self.0.update(text.as_bytes());
            Ok(())
        }
    }
    let mut hashed = Hashed(blake3::Hasher::new());
    // Writing to a hasher never fails.
    let _ = std::fmt::Write::write_fmt(&mut hashed, format_args!("{plan:?}"));
    *hashed.0.finalize().as_bytes()
}
