//! Runs over several machines: `potluck train --nodes`, `potluck join` and `potluck secret`; and
//! how nodes of runs and of benchmarks find together.

use std::fs;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::addresses::{addresses, all_addresses};
use super::args::{JoinArgs, TrainArgs};
use super::prompt::typed_code;
use super::resume::RunDirectory;
use super::{InterruptedError, UsageError, print};
use crate::ui::terminal::{Terminal, print_line};
use potluck_core::Generation;
use potluck_core::faults::Faults;
use potluck_kernels::autotune::catalog;
use potluck_kernels::device::Selection;
use potluck_net::Secret;
use potluck_net::cluster::{
    ClusterEnd, ClusterError, FirstNodeOptions, Hello, JoiningNodeOptions, NODE_TIMEOUT_MAX,
    NodeDevice, Presence,
};
use potluck_net::nodes::{
    ClusterNews, FrameReceiver, Meeting, MeetingOptions, StartedCluster, any_port_towards,
    greeting, host_name,
};
use potluck_parallel::comm::{RecvError, nanos};
use potluck_train::config::read::Override;
use potluck_train::error::TrainError;
use potluck_train::nodes::{JoinedNode, NodeOutcome, RunFailure, RunNodes, serve};
use potluck_train::run::RunOutcome;
use potluck_train::run_data::require_there;
use potluck_train::runtime::RuntimeError;
use potluck_train::runtime::placement::candidates::selections;
use potluck_train::runtime::placement::names::display_names;
use potluck_train::signals::{Interruption, Signals, leave};
use potluck_train::spec::RunSpec;

/// File of the secret, if the flag does not name one.
const SECRET_VARIABLE: &str = "POTLUCK_SECRET_FILE";
/// UDP port of the first node, unless another one is given.
pub const PORT: u16 = 7717;
/// Longest silence that the link of a joining node allows: the first node says what counts.
const JOIN_TIMEOUT: Duration = Duration::from_nanos(NODE_TIMEOUT_MAX);
/// Time between two looks for a signal while others are awaited.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);
/// Keys that a node may set for itself.
const NODE_KEYS: &[&str] =
    &["train.device_memory_mib", "train.submission_ms", "train.tune_s", VAL_PATH];
/// Key of the held-out data in a copy of the data.
const VAL_PATH: &str = "data.val_path";

/// Prints a new code.
///
/// # Errors
/// Returns an error if the system has no random numbers.
pub fn secret() -> anyhow::Result<()> {
    print(&format!("{}\n", code_of(&Secret::generate()?)));
    Ok(())
}

fn code_of(secret: &Secret) -> String {
    // A generated secret has a code.
    secret.code().unwrap_or_default()
}

/// Returns the secret of the file that a flag or the environment names, if one does.
fn secret_of_file(flag: Option<&Path>) -> anyhow::Result<Option<Secret>> {
    let file = match flag {
        Some(file) => file.to_path_buf(),
        None => match std::env::var_os(SECRET_VARIABLE) {
            Some(file) if !file.is_empty() => file.into(),
            _ => return Ok(None),
        },
    };
    let secret = Secret::read_file(&file).map_err(|error| UsageError(error.to_string()))?;
    Ok(Some(secret))
}

/// Returns the devices of this machine as the others see them.
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

/// Returns a name that no other run has.
fn run_name() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let text = format!("{} {} {}", host_name(), std::process::id(), now.as_nanos());
    blake3::hash(text.as_bytes()).to_hex()[..16].to_string()
}

// ---- The first node ----

/// Node that has met the others.
pub struct MetNode {
    pub meeting: Meeting,
    pub signals: Signals,
    pub frames: FrameReceiver,
    pub started: StartedCluster,
}

/// Gathering of nodes, for its first one.
pub struct Gathering<'a> {
    /// Subject of the prompt: `a run`.
    pub what: &'static str,
    /// Command of the others, and what follows its address.
    pub command: &'static str,
    pub flags: String,
    pub nodes: u32,
    pub listen: Option<SocketAddr>,
    pub secret_file: Option<&'a Path>,
    pub node_timeout: Duration,
}

impl Gathering<'_> {
    /// Prints what to type on the other machines and waits until all nodes are here. `hello` gets
    /// the port of this node.
    ///
    /// # Errors
    /// Returns an error for a secret that cannot be read, an address that is taken, and if the
    /// nodes cannot connect.
    pub fn host(&self, hello: impl FnOnce(u16) -> Hello) -> anyhow::Result<MetNode> {
        let mut code = None;
        let secret = match secret_of_file(self.secret_file)? {
            Some(secret) => secret,
            None => {
                let secret = Secret::generate()?;
                code = Some(code_of(&secret));
                secret
            }
        };
        let frames = FrameReceiver::default();
        let options = MeetingOptions {
            listen: self.listen.unwrap_or_else(|| all_addresses(PORT)),
            secret,
            node_timeout: self.node_timeout,
            frames: frames.clone(),
            faults: Faults::none(),
        };
        let signals = Signals::caught()?;
        let meeting = Meeting::host(options, |port| FirstNodeOptions {
            run: run_name(),
            nodes: self.nodes,
            hello: hello(port),
            addresses: Vec::new(),
            node_timeout: nanos(self.node_timeout),
            generation: Generation(0),
        })?;
        print_line(&self.invitation(meeting.address, code.as_deref()));
        wait(meeting, frames, signals, &mut print_line)
    }

    /// Returns what to type on the other machines.
    fn invitation(&self, listening: SocketAddr, code: Option<&str>) -> String {
        let Self { what, command, flags, nodes, .. } = self;
        let others = match nodes {
            2 => "the other machine".into(),
            nodes => format!("{} others", nodes - 1),
        };
        let mut text = format!("{what} of {nodes} nodes; on {others}, type");
        let file = if code.is_some() { "" } else { " --secret-file FILE" };
        for address in addresses(listening) {
            text += &format!("\n  {command} {address}{flags}{file}");
        }
        match code {
            Some(code) => text + &format!("\nand there the code  {code}"),
            None => text + "\nwith the same secret in FILE",
        }
    }
}

/// Waits for the other nodes of a run; returns `None` if it is a run of one node.
///
/// # Errors
/// Returns an error for flags without a meaning, a secret that cannot be read, an address that is
/// taken, and if the nodes cannot connect.
pub fn meet(
    args: &TrainArgs,
    spec: &RunSpec,
    directory: &RunDirectory,
) -> anyhow::Result<Option<Arc<RunNodes>>> {
    let Some(nodes) = args.nodes.filter(|nodes| *nodes > 1) else {
        if args.listen.is_some() || args.secret_file.is_some() {
            let why = "--listen and --secret-file need --nodes N of 2 or more";
            return Err(UsageError(why.into()).into());
        }
        return Ok(None);
    };
    // Nobody comes for nothing.
    spec.data.source.require_there().map_err(TrainError::from)?;
    let selections = selections(&spec.devices)?;
    let gathering = Gathering {
        what: "a run",
        command: "potluck join",
        flags: String::new(),
        nodes,
        listen: args.listen,
        secret_file: args.secret_file.as_deref(),
        node_timeout: spec.node_timeout,
    };
    let met = gathering.host(|port| greeting(port, None, shown_devices(&selections)))?;
    let StartedCluster { roster, links, .. } = met.started;
    print_line(&roster.to_string());
    let nodes = RunNodes::start(met.meeting, &met.frames, &roster, spec.node_timeout, links)?;
    end_by_signal(nodes.clone(), met.signals, directory.created.clone())
        .map_err(|why| TrainError::System { what: "a thread", why })?;
    Ok(Some(nodes))
}

/// Ends the nodes and this process if a signal comes while devices are opened and measured; from
/// the beginning of the run on, signals are the run's.
fn end_by_signal(
    nodes: Arc<RunNodes>,
    signals: Signals,
    created: Vec<PathBuf>,
) -> std::io::Result<()> {
    let of_run = nodes.clone();
    let signals = signals.with(of_run.signals());
    signals.watch(
        move || of_run.has_begun(),
        move |signal: Interruption| {
            let why = InterruptedError(signal).to_string();
            print_line(&why);
            nodes.end(&Err(RunFailure { why, exit_code: signal.exit_code() }));
            for directory in &created {
                // Fails if there is something in it.
                let _ = fs::remove_dir(directory);
            }
            leave(signal.exit_code());
        },
    )?;
    Ok(())
}

/// Shows who comes and goes until all are here. A signal leaves the others in order, so that they
/// know at once, and the caller cleans up.
fn wait(
    mut meeting: Meeting,
    frames: FrameReceiver,
    signals: Signals,
    show: &mut dyn FnMut(&str),
) -> anyhow::Result<MetNode> {
    loop {
        if let Some(signal) = signals.pending() {
            meeting.leave(&format!("it was {signal}"));
            return Err(InterruptedError(signal).into());
        }
        match meeting.news.recv(Some(Instant::now() + SIGNAL_INTERVAL)) {
            Ok(ClusterNews::Present(presence)) => show(&present(&presence)),
            Ok(ClusterNews::TurnedAway { address, why }) => {
                show(&format!("{address} was turned away: {why}"));
            }
            Ok(ClusterNews::Departed { host, why }) => {
                show(&format!("{host} left: {why}; its place is free again"));
            }
            Ok(ClusterNews::Started { roster, you, links }) => {
                let started = StartedCluster { roster, you, links };
                return Ok(MetNode { meeting, signals, frames, started });
            }
            Ok(ClusterNews::Left { .. }) | Err(RecvError::TimedOut) => {}
            Ok(ClusterNews::Ended(ClusterEnd::Failed(error @ ClusterError::NoAnswer { .. }))) => {
                return Err(NoAnswerError(error).into());
            }
            Ok(ClusterNews::Ended(end)) => return Err(ended(&end).into()),
            Err(RecvError::Closed(_)) => {
                return Err(TrainError::Defect("the cluster ended without a reason".into()).into());
            }
        }
    }
}

/// Nobody answers where the first node should be: it may not be there yet.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct NoAnswerError(ClusterError);

fn ended(end: &ClusterEnd) -> TrainError {
    match end {
        ClusterEnd::Left { why } => {
            let why = format!("the first node ended the run before it began: {why}");
            TrainError::NodesLost { why }
        }
        end if end.is_loss() => TrainError::NodesLost { why: end.to_string() },
        end => RuntimeError::InvalidRequest(end.to_string()).into(),
    }
}

fn present(presence: &Presence) -> String {
    let mut here = Vec::new();
    for node in &presence.here {
        let devices: Vec<&str> = node.devices.iter().map(|device| device.name.as_str()).collect();
        here.push(format!("{} ({})", node.host, devices.join(", ")));
    }
    let missing = match presence.missing() {
        0 => "all are here, connecting".into(),
        missing => format!("waiting for {missing}"),
    };
    format!("{} of {} nodes here: {}; {missing}", here.len(), presence.expected, here.join(", "))
}

// ---- The other nodes ----

/// What a node needs to join others.
#[derive(Clone)]
pub struct Joining {
    /// Addresses of the first node.
    pub first: Vec<SocketAddr>,
    pub listen: Option<SocketAddr>,
    pub secret: Secret,
    /// Faults to inject, for tests.
    pub faults: Faults,
}

impl Joining {
    /// Joins like [`Joining::join`], and tries again for some time if nobody answers.
    ///
    /// # Errors
    /// See [`Joining::join`].
    pub fn join_within(
        self,
        wait: Duration,
        show: &mut dyn FnMut(&str),
        hello: impl Fn(u16) -> Hello,
    ) -> anyhow::Result<MetNode> {
        let started = Instant::now();
        let mut is_shown = false;
        loop {
            match self.clone().join(show, &hello) {
                Err(error) if error.is::<NoAnswerError>() && started.elapsed() < wait => {
                    if !is_shown {
                        show(&format!("{error}; trying for {} seconds", wait.as_secs()));
                        is_shown = true;
                    }
                }
                ended => return ended,
            }
        }
    }

    /// Joins the first node at one of its addresses and waits until all nodes are here. `hello`
    /// gets the port of this node.
    ///
    /// # Errors
    /// Returns an error if the address is taken, the first node cannot be reached or refuses this
    /// one, and if the nodes cannot connect.
    pub fn join(
        self,
        show: &mut dyn FnMut(&str),
        hello: impl FnOnce(u16) -> Hello,
    ) -> anyhow::Result<MetNode> {
        let Self { first, listen, secret, faults } = self;
        let frames = FrameReceiver::default();
        let options = MeetingOptions {
            listen: listen.unwrap_or_else(|| any_port_towards(&first)),
            secret,
            node_timeout: JOIN_TIMEOUT,
            frames: frames.clone(),
            faults,
        };
        let signals = Signals::caught()?;
        let meeting =
            Meeting::join(options, |port| JoiningNodeOptions { hello: hello(port), first })?;
        wait(meeting, frames, signals, show)
    }
}

/// Returns the secret of the file that a flag or the environment names, or the code that is typed.
///
/// # Errors
/// Returns an error for a file that cannot be read, and without a terminal.
pub fn secret_to_join(file: Option<&Path>) -> anyhow::Result<Secret> {
    match secret_of_file(file)? {
        Some(secret) => Ok(secret),
        None => typed_code(&format!("name a file with it by --secret-file or {SECRET_VARIABLE}")),
    }
}

/// Runs `potluck join` and returns the process's exit code.
///
/// # Errors
/// Returns an error if the address, the code or the keys cannot be used, if the first node refuses
/// this one, or if a node is lost.
pub fn join(args: &JoinArgs) -> anyhow::Result<i32> {
    let faults = Faults::from_environment().map_err(TrainError::from)?;
    faults.check_kernels(&catalog::names()).map_err(TrainError::from)?;
    let first = resolve(&args.address)?;
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
    let secret = secret_to_join(args.secret_file.as_deref())?;
    let devices = args.devices.clone().unwrap_or_else(|| "auto".into());
    let offered = selections(&devices)?;
    let quiet = args.quiet;
    let mut show = |text: &str| {
        if !quiet {
            print_line(text);
        }
    };
    let joining = Joining { first, listen: args.listen, secret, faults: faults.clone() };
    let wait = Duration::from_secs(args.wait.unwrap_or_default());
    let met = joining
        .join_within(wait, &mut show, |port| greeting(port, None, shown_devices(&offered)))?;
    show(&met.started.roster.to_string());
    let mut node = JoinedNode {
        devices,
        configure: Box::new(move |config: &str| {
            RunSpec::of_node(config, &overrides).map_err(|error| error.to_string())
        }),
        data,
        faults,
        sink: Box::new(Terminal::new(quiet, 10)),
    };
    let StartedCluster { you, links, .. } = met.started;
    let outcome = serve(met.meeting, met.frames, you, links, met.signals, &mut node)?;
    Ok(report(&outcome, quiet))
}

/// Prints the end of the run and returns the exit code.
fn report(outcome: &NodeOutcome, quiet: bool) -> i32 {
    match outcome {
        Ok(RunOutcome::Done { .. }) => {
            if !quiet {
                print_line("done; the model is on the first node");
            }
            0
        }
        Ok(RunOutcome::Interrupted(signal)) => {
            print_line(&format!("{signal}; the run is saved on the first node"));
            signal.exit_code()
        }
        Err(RunFailure { why, exit_code }) => {
            print_line(&format!("error: the run ended on the first node: {why}"));
            *exit_code
        }
    }
}

/// Returns the addresses of a host and a port, which may be left out.
///
/// # Errors
/// Returns an error for a host that is not found, and for a text that names none.
pub fn resolve(text: &str) -> Result<Vec<SocketAddr>, UsageError> {
    if let Ok(ip) = text.trim_matches(['[', ']']).parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, PORT)]);
    }
    let with_port = if text.contains(':') { text.to_string() } else { format!("{text}:{PORT}") };
    let found = with_port.to_socket_addrs().map_err(|why| {
        UsageError(format!("{text} is not the host and the UDP port of the first node: {why}"))
    })?;
    Ok(found.collect())
}
