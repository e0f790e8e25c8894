//! `potluck plan`: the layout of a run, with its predicted step, and why.

mod report;

use std::cell::RefCell;
use std::path::Path;

use super::args::{PlanArgs, TrainArgs};
use super::explain::{ResumedParts, data_shape};
use super::nodes::RunBefore;
use super::run_signals::SignalWatch;
use super::schedule_chart::probe;
use super::train::{DescribedRun, described};
use super::{UsageError, exit_code, nodes};
use crate::ui::log;
use crate::ui::terminal::Terminal;
use potluck_bench::machines::plan_machines;
use potluck_core::NodeRank;
use potluck_core::metrics::{Event, Sink};
use potluck_kernels::autotune::TuneOptions;
use potluck_kernels::device::select_all;
use potluck_parallel::collective::Topology;
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::{ParallelOptions, PipelineSchedule, Shares};
use potluck_train::error::TrainError;
use potluck_train::nodes::{NodesResult, RunFailure, RunNodes};
use potluck_train::run::event_of_tuning;
use potluck_train::run_data::SavedData;
use potluck_train::runtime::placement::candidate_flags::SelectableDevices;
use potluck_train::runtime::placement::candidates::adapters_for;
use potluck_train::runtime::placement::device_limits::cut_plans;
use potluck_train::runtime::placement::names::{display_names, is_named};
use potluck_train::runtime::placement::open_one::RequestedDevices;
use potluck_train::runtime::placement::planned::{PlanPurpose, plan_run};
use potluck_train::runtime::placement::types::PlacementRequest;
use potluck_train::runtime::remote::RemoteNodes;
use potluck_train::signals::Signals;
use potluck_train::spec::RunSpec;
use report::PlanReport;

/// Runs `potluck plan`.
///
/// # Errors
/// Returns the errors of the configuration and the data, of the other nodes, and of [`plan_run`].
pub fn run(args: &PlanArgs) -> anyhow::Result<()> {
    log::set_node(NodeRank(0));
    refuse_flags_of_runs(&args.train)?;
    let signals = Signals::caught()?.until_exit();
    let watch = SignalWatch::start(signals, args.train.watched.term_timeout)?;
    let DescribedRun { spec, resumed } = described(&args.train)?;
    if let Some(file) = &args.machines {
        if args.train.nodes.is_some() {
            let why = "--machines plans for the nodes of a file; leave out --nodes";
            return Err(UsageError(why.into()).into());
        }
        nodes::refuse_node_flags(&args.train)?;
        refuse_unpriced(&spec.parallel)?;
        return plan_elsewhere(file, args.json, &spec, &resumed.data);
    }
    // Nodes of a resumed run have their numbers again, to which its shares and cuts belong.
    let before = match &resumed.placement {
        Some(placement) => RunBefore::of(placement, false),
        None => RunBefore::default(),
    };
    let signals = watch.meet(&[]);
    let nodes = nodes::meet(&args.train, &spec, &before, &signals, None)?;
    watch.met(nodes.as_ref());
    let planned = plan_here(args, &spec, &resumed, nodes.as_deref());
    if planned.is_err() {
        watch.settle();
    }
    if let Some(nodes) = nodes {
        nodes.end(&match &planned {
            Ok(_) => Ok(NodesResult::Plan),
            Err(error) => {
                Err(RunFailure { why: format!("{error:#}"), exit_code: exit_code(error) })
            }
        });
    }
    super::print(&planned?);
    Ok(())
}

/// Refuses flags of `potluck train` that would have no effect.
fn refuse_flags_of_runs(args: &TrainArgs) -> Result<(), UsageError> {
    for (is_given, flag) in [
        (args.watched.status.is_some(), "--status"),
        (args.explain.is_some(), "--explain"),
        (args.trace.is_some(), "--trace"),
        (args.svg.is_some(), "--svg"),
    ] {
        if is_given {
            return Err(UsageError(format!("{flag} is for `potluck train`; leave it out")));
        }
    }
    Ok(())
}

/// Plans a run on the devices of this machine and of the nodes that have joined; returns the
/// report.
fn plan_here(
    args: &PlanArgs,
    spec: &RunSpec,
    resumed: &ResumedParts,
    nodes: Option<&RunNodes>,
) -> anyhow::Result<String> {
    let data = spec.load_data(&resumed.data)?;
    let remote = match nodes {
        Some(nodes) => {
            nodes.begin(spec, &data, resumed.done)?;
            nodes.remote()
        }
        None => RemoteNodes::default(),
    };
    let plans = Plans::new(spec.training_graph(&data.shape)?);
    let probe = probe(spec, &data, plans.model().whole())?;
    let adapters = adapters_for(&spec.devices);
    let mut selections = select_all(&spec.devices, &adapters).map_err(TrainError::from)?;
    selections.extend(remote.offered());
    let names = display_names(&selections);
    let devices = RequestedDevices { selections: &selections, names: &names };
    let cut = cut_plans(&plans, is_named(&spec.devices), devices, None)?;
    let plans = cut.as_ref().map_or(&plans, |cut| &cut.plans);
    let tuning = TuneOptions::default();
    let options = spec.trainer_options();
    let parallel = options.parallel();
    let shown = RefCell::new(Terminal::new(args.json || args.train.quiet, 0));
    // The terminal takes every event.
    let emit = |event: Event| drop(shown.borrow_mut().event(&event));
    let notify = |note: &str| emit(Event::Note(note.into()));
    let mut report = |device: &str, progress| emit(event_of_tuning(device, progress));
    let request = PlacementRequest {
        probe: Some(probe),
        notify: &notify,
        retune: args.train.retune,
        nodes: &remote,
        ..options.placement_request(&parallel, plans, &tuning)
    };
    let planned = plan_run(&request, devices, PlanPurpose::Explanation, &mut report)?;
    let selectable =
        SelectableDevices { selector: &spec.devices, adapters: &adapters, selections: &selections };
    let report = PlanReport {
        spec,
        planned: &planned,
        graph: plans.model().whole(),
        devices: selectable,
        nodes: nodes.map_or(1, RunNodes::count),
    };
    Ok(if args.json { report.json() } else { report.text() })
}

/// Checks that a plan for the machines of a file prices what is given.
fn refuse_unpriced(parallel: &ParallelOptions) -> Result<(), UsageError> {
    let ParallelOptions { shares, topology, pipeline, tensor, .. } = parallel;
    let has_other_schedule =
        pipeline.has_stages() && pipeline.schedule != PipelineSchedule::OneFOneB;
    let unpriced = [
        (matches!(shares, Shares::Fixed(_)), "parallel.shares"),
        (*shares == Shares::Even, "parallel.balance"),
        (!pipeline.blocks_per_stage.is_empty(), "parallel.blocks_per_stage"),
        (!tensor.shares.is_empty(), "parallel.tensor_shares"),
        (*topology != Topology::Ring, "parallel.collective"),
        (has_other_schedule, "--schedule, as pipelines are priced with 1f1b"),
        (pipeline.has_stages() && tensor.has_groups(), "--tensor or --pipeline, one of both"),
    ];
    match unpriced.iter().find(|(is_given, _)| *is_given) {
        Some((_, what)) => Err(UsageError(format!(
            "--machines chooses the layout of the whole file, and does not price all layouts: \
             leave out {what}"
        ))),
        None => Ok(()),
    }
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
