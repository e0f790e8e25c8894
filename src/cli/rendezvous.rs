//! Meetings of the nodes of runs and of benchmarks: the first node waits for the others, and the
//! others try to join it.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, IsTerminal};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use super::secrets::SecretArgs;
use super::{InterruptedError, UsageError};
use crate::ui::log::{self, Level};
use crate::ui::terminal::print_line;
use potluck_core::faults::Faults;
use potluck_core::{Generation, Remedy};
use potluck_net::cluster::{
    ClusterEnd, FirstNodeOptions, FormerNode, Hello, JoiningNodeOptions, NODE_TIMEOUT_MAX, Presence,
};
use potluck_net::nodes::{
    self, ClusterEvent, ClusterHandle, ClusterHandleOptions, FrameReceiver, StartedCluster,
    advertised, all_addresses, any_port_towards,
};
use potluck_net::{Congestion, Secret};
use potluck_parallel::comm::{RecvError, nanos};
use potluck_train::error::TrainError;
use potluck_train::signals::SignalFlags;

/// Default UDP port of the first node.
pub const PORT: u16 = 7717;
/// Longest silence on the link of a joining node; the first node then sets the limit.
const JOIN_TIMEOUT: Duration = Duration::from_nanos(NODE_TIMEOUT_MAX);
/// Longest wait of a first node for the others without a terminal.
const WAIT_WITHOUT_TERMINAL: Duration = Duration::from_secs(600);
/// Time between two checks for a signal during a wait.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);
/// First pause between attempts to join.
const PAUSE_MIN: Duration = Duration::from_millis(500);
/// Longest pause between attempts to join.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Node that has met the others.
pub struct JoinedCluster {
    pub cluster: ClusterHandle,
    pub frames: FrameReceiver,
    pub started: StartedCluster,
}

/// Error of nodes that have not met.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct RendezvousError {
    why: String,
    /// Remedy: a restart, or a person.
    pub remedy: Remedy,
}

impl RendezvousError {
    fn of(end: &ClusterEnd) -> Self {
        let why = match end {
            ClusterEnd::Left { why } => {
                format!("the first node ended the run before it began: {why}")
            }
            end => end.to_string(),
        };
        Self { why, remedy: end.remedy() }
    }
}

// ---- The first node ----

/// Gathering of nodes, for its first one.
pub struct Rendezvous<'a> {
    /// Subject of the prompt: `a run`.
    pub what: &'static str,
    /// Command of the others.
    pub command: &'static str,
    /// Flags of the command, after the address.
    pub flags: String,
    /// Name of the run.
    pub run: String,
    /// Nodes of the run before it was resumed.
    pub before: Vec<FormerNode>,
    pub nodes: u32,
    pub listen: Option<SocketAddr>,
    /// Addresses of this node for the others, instead of the addresses of its interfaces.
    pub advertise: Vec<SocketAddr>,
    /// Congestion control of what this node sends.
    pub congestion: Congestion,
    pub secret: &'a SecretArgs,
    /// Seconds to wait for the others; by default unlimited on a terminal.
    pub wait: Option<u64>,
    pub node_timeout: Duration,
    /// Signals that end the wait.
    pub signals: SignalFlags,
}

impl Rendezvous<'_> {
    /// Prints the command for the other machines and waits until all nodes are present. `hello`
    /// gets the port of this node.
    ///
    /// # Errors
    /// Returns an error for a secret that cannot be read, an address in use, and if the nodes
    /// cannot connect.
    pub fn host(&self, hello: impl FnOnce(u16) -> Hello) -> anyhow::Result<JoinedCluster> {
        let (secret, code) = self.secret.to_host()?;
        let frames = FrameReceiver::default();
        let options = ClusterHandleOptions {
            listen: self.listen.unwrap_or_else(|| all_addresses(PORT)),
            advertise: self.advertise.clone(),
            secret,
            node_timeout: self.node_timeout,
            frames: frames.clone(),
            congestion: self.congestion,
            faults: Faults::none(),
        };
        let mut cluster = ClusterHandle::host(options, |port| FirstNodeOptions {
            run: self.run.clone(),
            nodes: self.nodes,
            hello: hello(port),
            node_timeout: nanos(self.node_timeout),
            generation: Generation(0),
            before: self.before.clone(),
        })?;
        print_line(&self.invitation(cluster.address, code.is_some()));
        if let Some(code) = code {
            // The log file must not contain secrets.
            log::write_to_stderr(Level::Info, None, &format!("and there the code  {code}"));
        }
        let started = wait_for_all(&mut cluster, &self.signals, self.limit(), &mut print_line)?;
        Ok(JoinedCluster { cluster, frames, started })
    }

    /// The longest wait: unlimited on a terminal, where the user sees the missing nodes.
    fn limit(&self) -> Option<Duration> {
        match self.wait {
            Some(seconds) => Some(Duration::from_secs(seconds)),
            None if std::io::stderr().is_terminal() => None,
            None => Some(WAIT_WITHOUT_TERMINAL),
        }
    }

    /// Addresses at which the others can join.
    fn invited_to(&self, listening: SocketAddr) -> Vec<SocketAddr> {
        let mut addresses = advertised(listening, &self.advertise);
        if addresses.is_empty() {
            addresses.push(SocketAddr::from(([127, 0, 0, 1], listening.port())));
        }
        addresses
    }

    fn invitation(&self, listening: SocketAddr, has_code: bool) -> String {
        let Self { what, command, flags, nodes, .. } = self;
        let others = match nodes {
            2 => "the other machine".into(),
            nodes => format!("{} others", nodes - 1),
        };
        let mut text = format!("{what} of {nodes} nodes; on {others}, type");
        let file = if has_code { "" } else { " --secret-file FILE" };
        for address in self.invited_to(listening) {
            text += &format!("\n  {command} {address}{flags}{file}");
        }
        if !has_code {
            text += "\nwith the same secret in FILE";
        }
        text
    }
}

/// Prints joining and leaving nodes until all are present, at most for `limit`. On a signal, the
/// others are notified at once, and the caller cleans up.
///
/// # Errors
/// Returns [`InterruptedError`], [`RendezvousError`], and a defect.
pub fn wait_for_all(
    cluster: &mut ClusterHandle,
    signals: &SignalFlags,
    limit: Option<Duration>,
    show: &mut dyn FnMut(&str),
) -> anyhow::Result<StartedCluster> {
    let until = limit.and_then(|limit| Instant::now().checked_add(limit));
    let mut here = None;
    loop {
        if let Some(signal) = signals.pending() {
            cluster.leave(&format!("it was {signal}"));
            return Err(InterruptedError(signal).into());
        }
        if until.is_some_and(|until| Instant::now() >= until) {
            let why = too_few(here.as_ref(), limit.unwrap_or_default());
            cluster.leave(&why);
            return Err(RendezvousError { why, remedy: Remedy::Time }.into());
        }
        match cluster.news.recv(Some(Instant::now() + SIGNAL_INTERVAL)) {
            Ok(ClusterEvent::Present(presence)) => {
                show(&present(&presence));
                here = Some(presence);
            }
            Ok(ClusterEvent::TurnedAway { address, why }) => {
                show(&format!("{address} was turned away: {why}"));
            }
            Ok(ClusterEvent::Moved(moved)) => show(&moved.to_string()),
            Ok(ClusterEvent::Paused(pause)) => show(&pause.to_string()),
            Ok(ClusterEvent::Departed { host, why }) => {
                show(&format!("{host} left: {why}; its place is free again"));
            }
            Ok(ClusterEvent::Started { roster, you, links }) => {
                if let Some(note) = &cluster.buffers_note {
                    show(note);
                }
                return Ok(StartedCluster { roster, you, links });
            }
            Ok(ClusterEvent::Left { .. }) | Err(RecvError::TimedOut) => {}
            Ok(ClusterEvent::Ended(end)) => return Err(RendezvousError::of(&end).into()),
            Err(RecvError::Closed(_)) => {
                return Err(TrainError::Defect("the cluster ended without a reason".into()).into());
            }
        }
    }
}

/// Lists the present nodes with their devices.
fn named(presence: &Presence) -> String {
    let mut here = Vec::new();
    for node in &presence.here {
        let devices: Vec<&str> = node.devices.iter().map(|device| device.name.as_str()).collect();
        here.push(format!("{} ({})", node.host, devices.join(", ")));
    }
    here.join(", ")
}

fn present(presence: &Presence) -> String {
    let missing = match presence.missing() {
        0 => "all are here, connecting".into(),
        missing => format!("waiting for {missing}"),
    };
    let here = presence.here.len();
    let expected = presence.expected;
    format!("{here} of {expected} nodes here: {}; {missing}", named(presence))
}

fn too_few(presence: Option<&Presence>, limit: Duration) -> String {
    let seconds = limit.as_secs();
    match presence {
        Some(presence) => {
            let here = presence.here.len();
            let expected = presence.expected;
            let who = named(presence);
            format!("only {here} of {expected} nodes were here after {seconds} seconds: {who}")
        }
        None => format!("no other node was here after {seconds} seconds"),
    }
}

// ---- The other nodes ----

/// Options of a node that joins others.
pub struct Joining {
    /// Host and port of the first node, as typed.
    pub address: String,
    pub listen: Option<SocketAddr>,
    /// Addresses of this node for the others, instead of the addresses of its interfaces.
    pub advertise: Vec<SocketAddr>,
    /// Congestion control of what this node sends.
    pub congestion: Congestion,
    pub secret: Secret,
    /// Time during which attempts that fail temporarily are repeated.
    pub wait: Duration,
    /// Signals that end the attempts.
    pub signals: SignalFlags,
    /// Faults to inject, for tests.
    pub faults: Faults,
}

impl Joining {
    /// Joins the first node and waits until all nodes are present. `hello` gets the port of this
    /// node. Temporary failures are retried: a name or a node that does not exist yet, a run that
    /// is full or about to end, a first node that leaves before the start.
    ///
    /// # Errors
    /// Returns [`UsageError`] for an invalid address, [`RendezvousError`], [`InterruptedError`],
    /// and an error if the own address is in use.
    pub fn join(
        &self,
        show: &mut dyn FnMut(&str),
        hello: impl Fn(u16) -> Hello,
    ) -> anyhow::Result<JoinedCluster> {
        let until = Instant::now().checked_add(self.wait);
        let mut pause = PAUSE_MIN;
        let mut shown = String::new();
        loop {
            if let Some(signal) = self.signals.pending() {
                return Err(InterruptedError(signal).into());
            }
            let error = match self.attempt(show, &hello) {
                Ok(met) => return Ok(met),
                Err(error) => error,
            };
            let is_healed =
                error.downcast_ref::<RendezvousError>().is_some_and(|of| of.remedy == Remedy::Time);
            let now = Instant::now();
            let left = until.map_or(Duration::MAX, |until| until.saturating_duration_since(now));
            if !is_healed || left.is_zero() {
                return Err(error);
            }
            let why = error.to_string();
            if why != shown {
                show(&format!("{why}; trying for {} more seconds", left.as_secs_f64().round()));
                shown = why;
            }
            rest(jittered(pause).min(left), &self.signals)?;
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }

    fn attempt(
        &self,
        show: &mut dyn FnMut(&str),
        hello: impl FnOnce(u16) -> Hello,
    ) -> anyhow::Result<JoinedCluster> {
        let first = resolve(&self.address)?;
        let frames = FrameReceiver::default();
        let options = ClusterHandleOptions {
            listen: self.listen.unwrap_or_else(|| any_port_towards(&first)),
            advertise: self.advertise.clone(),
            secret: self.secret.clone(),
            node_timeout: JOIN_TIMEOUT,
            frames: frames.clone(),
            congestion: self.congestion,
            faults: self.faults.clone(),
        };
        let mut cluster =
            ClusterHandle::join(options, |port| JoiningNodeOptions { hello: hello(port), first })?;
        let started = wait_for_all(&mut cluster, &self.signals, None, show)?;
        Ok(JoinedCluster { cluster, frames, started })
    }
}

/// Waits until a pause is over or a signal arrives.
///
/// # Errors
/// Returns [`InterruptedError`] on a signal.
pub fn rest(pause: Duration, signals: &SignalFlags) -> Result<(), InterruptedError> {
    let until = Instant::now() + pause;
    loop {
        if let Some(signal) = signals.pending() {
            return Err(InterruptedError(signal));
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(SIGNAL_INTERVAL));
    }
}

/// Returns a random pause of half to all of this length, so that nodes that failed at the same time
/// do not try again at the same time.
fn jittered(pause: Duration) -> Duration {
    let random = RandomState::new().build_hasher().finish();
    pause.mul_f64(0.5 + 0.5 * (random as f64 / u64::MAX as f64))
}

/// Returns the address of a first node with its port, which may be left out.
pub fn with_port(text: &str) -> String {
    let bare = text.trim_matches(['[', ']']);
    if let Ok(ip) = bare.parse::<IpAddr>() {
        return SocketAddr::new(ip, PORT).to_string();
    }
    if let Some((ip, _zone)) = bare.split_once('%')
        && ip.parse::<Ipv6Addr>().is_ok()
        && !text.contains("]:")
    {
        return format!("[{bare}]:{PORT}");
    }
    if text.contains(':') { text.into() } else { format!("{text}:{PORT}") }
}

/// Addresses of a host and a port, which may be left out.
fn resolve(text: &str) -> anyhow::Result<Vec<SocketAddr>> {
    let why = match nodes::resolve(&with_port(text)) {
        Ok(found) if !found.is_empty() => return Ok(found),
        Ok(_) => "it has no address".into(),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            let why = format!("{text} is not the host and the UDP port of the first node: {error}");
            return Err(UsageError(why).into());
        }
        Err(error) => error.to_string(),
    };
    // The name of a service or machine may not exist until it runs.
    let why = format!("the first node is not found at {text}: {why}");
    Err(RendezvousError { why, remedy: Remedy::Time }.into())
}

/// Checks that a text can be the address of a first node.
///
/// # Errors
/// Returns [`UsageError`] if it cannot.
pub fn check_address(text: &str) -> anyhow::Result<()> {
    match resolve(text) {
        Err(error) if error.is::<UsageError>() => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_do_not_resolve_are_healed_by_time_and_texts_that_are_none_by_a_person() {
        assert_eq!(resolve("127.0.0.1").unwrap(), [SocketAddr::from(([127, 0, 0, 1], PORT))]);
        assert_eq!(resolve("[::1]:7").unwrap(), ["[::1]:7".parse().unwrap()]);
        for text in ["fe80::1%1", "[fe80::1%1]", "[fe80::1%1]:7717"] {
            assert_eq!(resolve(text).unwrap(), ["[fe80::1%1]:7717".parse().unwrap()], "{text}");
        }
        assert!(resolve("fe80::1%no-such").unwrap_err().is::<UsageError>());
        let error = resolve("no-such-host.invalid").unwrap_err();
        let not_met: &RendezvousError = error.downcast_ref().unwrap();
        assert_eq!(not_met.remedy, Remedy::Time);
        assert!(error.to_string().contains("not found at no-such-host.invalid: "), "{error}");
        for text in ["host:port", "host:99999", "host:"] {
            assert!(resolve(text).unwrap_err().is::<UsageError>(), "{text}");
            assert!(check_address(text).is_err(), "{text}");
        }
        assert!(check_address("no-such-host.invalid").is_ok());
    }

    #[test]
    fn pauses_are_half_to_all_of_their_length_and_differ() {
        let pauses: Vec<Duration> = (0..100).map(|_| jittered(PAUSE_MAX)).collect();
        assert!(pauses.iter().all(|pause| (PAUSE_MAX / 2..=PAUSE_MAX).contains(pause)));
        assert!(pauses.iter().any(|pause| *pause != pauses[0]), "{pauses:?}");
    }
}
