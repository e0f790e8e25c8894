//! Runs over several machines: `potluck train --nodes` and `potluck join`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::args::{JoinArgs, TrainArgs};
use super::rendezvous::{Joining, Rendezvous, RendezvousError, check_address, rest};
use super::status::ShownStatus;
use super::{UsageError, exit_code};
use crate::ui::log;
use crate::ui::terminal::{Terminal, print_error, print_line};
use potluck_core::NodeRank;
use potluck_core::faults::Faults;
use potluck_core::metrics::Sink;
use potluck_kernels::autotune::catalog;
use potluck_kernels::device::Selection;
use potluck_net::Secret;
use potluck_net::cluster::{FormerNode, Hello, NodeDevice, identity_hash};
use potluck_net::nodes::{StartedCluster, greeting, run_name};
use potluck_net::status::RunAbout;
use potluck_parallel::{PlacedNode, Placement};
use potluck_train::config::read::Override;
use potluck_train::error::TrainError;
use potluck_train::nodes::{
    ClusterLinks, JoinedNode, NodeOutcome, NodesResult, RunFailure, RunNodes, serve,
};
use potluck_train::run::RunOutcome;
use potluck_train::run_data::require_there;
use potluck_train::runtime::error::EXIT_RESTART;
use potluck_train::runtime::placement::candidates::{identity, selections};
use potluck_train::runtime::placement::names::display_names;
use potluck_train::signals::{Interruption, SignalFlags, Signals};
use potluck_train::spec::RunSpec;

/// Keys that a node may set for itself.
const NODE_KEYS: &[&str] =
    &["train.device_memory_mib", "train.submission_ms", "train.tune_s", VAL_PATH];
/// Key of the held-out data in a copy of the data.
const VAL_PATH: &str = "data.val_path";

/// Devices of this machine as the other nodes print them.
fn shown_devices(selections: &[Selection]) -> Vec<NodeDevice> {
    let mut devices = Vec::new();
    for (selection, name) in selections.iter().zip(display_names(selections)) {
        let kind = match selection {
            Selection::Adapter(adapter) => adapter.api.to_string(),
            Selection::Cpu { .. } | Selection::Offered(_) => String::new(),
        };
        devices.push(NodeDevice { name, kind });
    }
    devices
}

fn greeting_with(port: u16, selections: &[Selection]) -> Hello {
    let identities = selections.iter().map(|one| identity_hash(&identity(one))).collect();
    Hello { identities, ..greeting(port, None, shown_devices(selections)) }
}

/// Returns a function that prints notes, or ignores them with `--quiet`.
fn notes(quiet: bool) -> fn(&str) {
    if quiet { |_| {} } else { print_line }
}

// ---- The first node ----

/// Nodes and name of a resumed run; empty in a new run.
#[derive(Default)]
pub struct RunBefore {
    /// Name of the run.
    run: Option<String>,
    nodes: Vec<FormerNode>,
}

impl RunBefore {
    /// Returns the nodes and the name in the record of a placement. A run that is continued in
    /// another directory has the same nodes, but not the name.
    pub fn of(placement: &Placement, is_continued: bool) -> Self {
        let Some(cluster) = &placement.cluster else { return Self::default() };
        let mut nodes = Vec::new();
        let mut candidates = placement.candidates.iter();
        for PlacedNode { host, devices } in &cluster.nodes {
            let own = candidates.by_ref().take(*devices);
            let identities = own.map(|identity| identity_hash(identity)).collect();
            nodes.push(FormerNode { host: host.clone(), identities });
        }
        let run = if is_continued { Some(cluster.run.clone()) } else { None };
        Self { run, nodes }
    }
}

/// Checks that a command without other nodes has no flags for them.
///
/// # Errors
/// Returns `UsageError` if it has.
pub fn refuse_node_flags(args: &TrainArgs) -> Result<(), UsageError> {
    let has_address = args.listen.is_some() || !args.advertise.is_empty();
    let has_network = args.network.congestion.is_some();
    if has_address || has_network || args.secret.is_given() || args.wait.is_some() {
        let why = "--listen, --advertise, --congestion, --wait and flags of the secret need \
                   --nodes N of 2 or more";
        return Err(UsageError(why.into()));
    }
    Ok(())
}

/// Waits for the other nodes of a run; returns `None` if it is a run of one node.
///
/// # Errors
/// Returns an error for flags without effect, a secret that cannot be read, an address in use, and
/// if the nodes cannot connect.
pub fn meet(
    args: &TrainArgs,
    spec: &RunSpec,
    before: &RunBefore,
    signals: &SignalFlags,
    status: Option<&ShownStatus>,
) -> anyhow::Result<Option<Arc<RunNodes>>> {
    let Some(nodes) = args.nodes.filter(|nodes| *nodes > 1) else {
        refuse_node_flags(args)?;
        if let Some(status) = status {
            status.opens(display_names(&selections(&spec.devices)?));
        }
        return Ok(None);
    };
    // Missing data must be found before other nodes join.
    spec.data.source.require_there().map_err(TrainError::from)?;
    let selections = selections(&spec.devices)?;
    let (run, flags) = match &before.run {
        Some(run) => (run.clone(), format!(" --run {run}")),
        None => (run_name()?, String::new()),
    };
    let gathering = Rendezvous {
        what: "a run",
        command: "potluck join",
        flags,
        run: run.clone(),
        before: before.nodes.clone(),
        nodes,
        listen: args.listen,
        advertise: args.advertise.clone(),
        congestion: args.network.congestion.unwrap_or_default(),
        secret: &args.secret,
        wait: args.wait,
        node_timeout: spec.node_timeout,
        signals: signals.clone(),
    };
    let met = gathering.host(|port| greeting_with(port, &selections))?;
    let StartedCluster { roster, links, you } = met.started;
    print_line(&roster.to_string());
    if let Some(status) = status {
        status.meets(you, &roster, met.cluster.links.clone());
    }
    let cluster = ClusterLinks { roster: &roster, run, links };
    let show = notes(args.quiet);
    let nodes = RunNodes::start(met.cluster, &met.frames, cluster, spec.node_timeout, show)?;
    Ok(Some(nodes))
}

// ---- The other nodes ----

/// Pause before a node with `--stay` joins the next run.
const STAY_PAUSE: Duration = Duration::from_secs(1);

/// Returns true if a node without its own data may set the key of `KEY=VALUE`.
pub fn is_own_key(typed: &str) -> bool {
    let key = typed.split('=').next().unwrap_or_default().trim();
    key != VAL_PATH && NODE_KEYS.contains(&key)
}

/// Runs `potluck join` and returns the process's exit code.
///
/// # Errors
/// Returns an error if the address, the code or the keys cannot be used, if the first node refuses
/// this one, or if a node is lost.
pub fn join(args: &JoinArgs) -> anyhow::Result<i32> {
    // The first node determines the meaning of SIGUSR1.
    let signals = Signals::caught()?.until_exit().saving_on_usr1();
    check_address(&args.address)?;
    let about = RunAbout { version: env!("CARGO_PKG_VERSION"), ..RunAbout::default() };
    // One for all runs, so that a node that stays can be watched between them.
    let status = ShownStatus::start(&args.watched, about, None, args.quiet)?;
    let mut secret = None;
    loop {
        let ended = join_once(args, &mut secret, status.as_ref(), &signals);
        let is_over = match &ended {
            // The time of the job is up.
            Ok(Ok(NodesResult::Run(RunOutcome::Interrupted(Interruption::TimeLimit)))) => true,
            Ok(outcome) => exit_code_of(outcome) != EXIT_RESTART,
            // After a `RendezvousError` the time of --wait has passed.
            Err(error) => error.is::<RendezvousError>() || exit_code(error) != EXIT_RESTART,
        };
        if !args.stay || is_over || signals.pending().is_some() {
            return ended.map(|outcome| exit_code_of(&outcome));
        }
        if let Some(status) = &status {
            status.waits();
        }
        match ended {
            Ok(_) => print_line("joining the next run"),
            Err(error) => print_line(&format!("{error:#}; joining the next run")),
        }
        rest(STAY_PAUSE, &signals)?;
    }
}

/// Joins one run. The secret is read only for the first one: a descriptor can be read once, and the
/// user must not type it again.
fn join_once(
    args: &JoinArgs,
    secret: &mut Option<Secret>,
    status: Option<&ShownStatus>,
    signals: &SignalFlags,
) -> anyhow::Result<NodeOutcome> {
    let faults = Faults::from_environment().map_err(TrainError::from)?;
    faults.check_kernels(&catalog::names()).map_err(TrainError::from)?;
    let mut overrides = Vec::new();
    for typed in &args.sets {
        overrides.push(Override::set(typed)?);
    }
    for typed in &overrides {
        if !NODE_KEYS.contains(&typed.key.as_str()) {
            let why = format!(
                "{}: the first node sets the keys of the run; a node sets only {}",
                typed.flag,
                NODE_KEYS.join(", ")
            );
            return Err(UsageError(why).into());
        }
    }
    let data = args.data.clone();
    if let Some(typed) = overrides.iter().find(|typed| typed.key == VAL_PATH && data.is_none()) {
        let why = format!("{}: has no effect without --data, this node's copy", typed.flag);
        return Err(UsageError(why).into());
    }
    if let Some(data) = &data {
        require_there(data).map_err(TrainError::from)?;
        overrides.extend(Override::data(data)?);
    }
    let secret = match secret {
        Some(secret) => secret.clone(),
        None => secret.insert(args.secret.to_join()?).clone(),
    };
    let devices = args.devices.clone().unwrap_or_else(|| "auto".into());
    let mut offered = selections(&devices)?;
    // Since the last run, others may have taken memory of the devices, or given some back.
    offered.iter_mut().for_each(Selection::refresh_memory);
    let quiet = args.quiet;
    let mut show = notes(quiet);
    let joining = Joining {
        address: args.address.clone(),
        listen: args.listen,
        advertise: args.advertise.clone(),
        congestion: args.network.congestion.unwrap_or_default(),
        secret,
        wait: Duration::from_secs(args.wait.unwrap_or_default()),
        signals: signals.clone(),
        faults: faults.clone(),
    };
    let met = joining.join(&mut show, |port| Hello {
        place: args.node.map(NodeRank),
        run: args.run.clone(),
        ..greeting_with(port, &offered)
    })?;
    let StartedCluster { roster, you, links } = met.started;
    log::set_node(you);
    show(&roster.to_string());
    let terminal = Terminal::new(quiet, 10);
    let log_every = terminal.log_every();
    let mut sink: Box<dyn Sink> = Box::new(terminal);
    let mut specified = None;
    if let Some(status) = status {
        status.meets(you, &roster, met.cluster.links.clone());
        sink = status.sink(sink);
        specified = Some(status.specify());
    }
    let mut node = JoinedNode {
        devices,
        configure: Box::new(move |config: &str| {
            let spec = RunSpec::of_node(config, &overrides).map_err(|error| error.to_string())?;
            log_every.store(spec.every.progress, Ordering::Relaxed);
            if let Some(specify) = &specified {
                specify(&spec);
            }
            Ok(spec)
        }),
        data,
        faults,
        signals: signals.clone(),
        term_timeout: args.watched.term_timeout,
        sink,
        show,
        show_error: print_error,
    };
    let outcome = serve(met.cluster, met.frames, you, links, &mut node)?;
    report(&outcome, quiet);
    Ok(outcome)
}

/// Prints the end of the run.
fn report(outcome: &NodeOutcome, quiet: bool) {
    match outcome {
        Ok(NodesResult::Run(RunOutcome::Done { .. })) => {
            if !quiet {
                print_line("done; the model is on the first node");
            }
        }
        Ok(NodesResult::Run(RunOutcome::Interrupted(signal))) => {
            print_line(&format!("{signal}; the run is saved on the first node"));
        }
        Ok(NodesResult::Plan) => {
            if !quiet {
                print_line("done; the plan is on the first node");
            }
        }
        Err(RunFailure { why, .. }) => {
            print_error(&format!("the run ended on the first node: {why}"));
        }
    }
}

fn exit_code_of(outcome: &NodeOutcome) -> i32 {
    match outcome {
        Ok(NodesResult::Run(RunOutcome::Done { .. }) | NodesResult::Plan) => 0,
        Ok(NodesResult::Run(RunOutcome::Interrupted(signal))) => signal.exit_code(),
        Err(RunFailure { exit_code, .. }) => *exit_code,
    }
}
