//! `potluck plan`: the layout of a run, with its predicted step, and why.

mod report;

use std::path::Path;

use super::UsageError;
use super::args::PlanArgs;
use super::explain::data_shape;
use super::schedule_chart::probe;
use super::train::{DescribedRun, described};
use crate::ui::terminal::print_line;
use potluck_bench::machines::plan_machines;
use potluck_kernels::autotune::TuneOptions;
use potluck_parallel::planner::plans::Plans;
use potluck_train::run_data::SavedData;
use potluck_train::runtime::placement::candidates::{adapters_for, selections};
use potluck_train::runtime::placement::device_limits::cut_plans;
use potluck_train::runtime::placement::names::{display_names, is_named};
use potluck_train::runtime::placement::open_one::RequestedDevices;
use potluck_train::runtime::placement::planned::{PlanPurpose, plan_run};
use potluck_train::runtime::placement::types::PlacementRequest;
use potluck_train::spec::RunSpec;
use report::PlanReport;

/// Runs `potluck plan`.
///
/// # Errors
/// Returns the errors of the configuration and the data, and of [`plan_run`].
pub fn run(args: &PlanArgs) -> anyhow::Result<()> {
    if args.train.nodes.is_some() {
        let why = "plan measures the devices of this machine; leave out --nodes";
        return Err(UsageError(why.into()).into());
    }
    let DescribedRun { spec, resumed } = described(&args.train)?;
    if let Some(file) = &args.machines {
        return plan_elsewhere(file, args.json, &spec, &resumed.data);
    }
    let data = spec.load_data(&resumed.data)?;
    let plans = Plans::new(spec.training_graph(&data.shape)?);
    let probe = probe(&spec, &data, plans.model().whole())?;
    let selections = selections(&spec.devices)?;
    let names = display_names(&selections);
    let devices = RequestedDevices { selections: &selections, names: &names };
    let cut = cut_plans(&plans, is_named(&spec.devices), devices, None)?;
    let plans = cut.as_ref().map_or(&plans, |cut| &cut.plans);
    let tuning = TuneOptions::default();
    let options = spec.trainer_options();
    let parallel = options.parallel();
    let is_quiet = args.json || args.train.quiet;
    let notify = |note: &str| {
        if !is_quiet {
            print_line(note);
        }
    };
    let request = PlacementRequest {
        probe: Some(probe),
        notify: &notify,
        retune: args.train.retune,
        ..options.placement_request(&parallel, plans, &tuning)
    };
    let planned = plan_run(&request, devices, PlanPurpose::Explanation, &mut |_, _| {})?;
    let report = PlanReport {
        spec: &spec,
        planned: &planned,
        graph: plans.model().whole(),
        adapters: &adapters_for(&spec.devices),
    };
    super::print(&if args.json { report.json() } else { report.text() });
    Ok(())
}

/// Plans a run on the machines of a file.
fn plan_elsewhere(
    file: &Path,
    is_json: bool,
    spec: &RunSpec,
    saved: &SavedData,
) -> anyhow::Result<()> {
    let shape = data_shape(spec, saved)?;
    let plan = plan_machines(file, spec, &shape)?;
    if is_json {
        super::print(&format!("{:#}\n", plan.json()));
    } else {
        super::print(&plan.table());
    }
    Ok(())
}
