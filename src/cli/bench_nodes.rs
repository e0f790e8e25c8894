//! Benchmarks over several machines: `potluck bench collectives --nodes`, `potluck bench join` and
//! `potluck bench link`.

use std::net::SocketAddr;
use std::time::Duration;

use super::args::{BenchJoinArgs, CollectivesArgs, LinkArgs, NetworkArgs};
use super::rendezvous::{JoinedCluster, Joining, Rendezvous, check_address};
use super::secrets::SecretArgs;
use crate::ui::terminal::print_line;
use potluck_bench::collectives::nodes::follow;
use potluck_bench::collectives::{self, CollectiveOptions};
use potluck_bench::link::{self, LinkOptions, LinkedNodes};
use potluck_bench::{Effort, Report};
use potluck_core::Rank;
use potluck_core::faults::Faults;
use potluck_net::nodes::{group_over, rank_greeting, run_name};
use potluck_parallel::comm::ProcessGroup;
use potluck_train::TrainError;
use potluck_train::signals::Signals;

/// Longest silence of a node.
const NODE_TIMEOUT: Duration = Duration::from_secs(10);
/// Purpose of a node of `bench collectives`, for the message to nodes of other commands.
const COLLECTIVES: &str = "bench collectives";
/// Purpose of a node of `bench link`.
const LINK: &str = "bench link";

/// Prints the nodes of a benchmark, and makes a group of their ranks.
fn group(met: JoinedCluster) -> Result<Vec<ProcessGroup>, TrainError> {
    print_line(&met.started.roster.to_string());
    group_over(met.cluster, met.started, NODE_TIMEOUT)
        .map_err(|why| TrainError::NodesLost { why: why.to_string() })
}

/// Returns the parameters with which a node of a benchmark joins the others, in a single attempt.
/// Signals are caught until it has joined; they end the benchmark itself at once.
fn joining(
    address: &str,
    listen: Option<SocketAddr>,
    network: &NetworkArgs,
    secret: &SecretArgs,
    signals: &Signals,
) -> anyhow::Result<Joining> {
    check_address(address)?;
    let secret = secret.to_join()?;
    Ok(Joining {
        address: address.into(),
        listen,
        advertise: Vec::new(),
        congestion: network.congestion.unwrap_or_default(),
        secret,
        wait: Duration::ZERO,
        signals: signals.flags(),
        faults: Faults::none(),
    })
}

/// Waits for the other nodes and measures the collectives of the ranks of all.
///
/// # Errors
/// Returns the errors of [`Rendezvous::host`], and one if a node is lost before the first
/// measurement.
pub fn collectives(
    nodes: u32,
    args: &CollectivesArgs,
    options: &CollectiveOptions,
) -> anyhow::Result<Report> {
    let ranks = args.ranks_per_node;
    let signals = Signals::caught()?;
    let gathering = Rendezvous {
        what: "a benchmark",
        command: "potluck bench join",
        flags: match ranks {
            1 => String::new(),
            ranks => format!(" --ranks-per-node {ranks}"),
        },
        run: run_name()?,
        before: Vec::new(),
        nodes,
        listen: args.listen,
        advertise: Vec::new(),
        congestion: args.network.congestion.unwrap_or_default(),
        secret: &args.secret,
        wait: None,
        node_timeout: NODE_TIMEOUT,
        signals: signals.flags(),
    };
    let met = gathering.host(|port| rank_greeting(port, COLLECTIVES, ranks))?;
    drop(signals);
    let hosts: Vec<String> = met.started.roster.nodes.iter().map(|of| of.host.clone()).collect();
    let groups = group(met)?;
    Ok(collectives::over_nodes(groups, &hosts, options, &mut |progress| print_line(progress)))
}

/// Runs `potluck bench join` and returns the process's exit code.
///
/// # Errors
/// Returns the errors of [`Joining::join`], and one if a node is lost.
pub fn join(args: &BenchJoinArgs) -> anyhow::Result<i32> {
    let signals = Signals::caught()?;
    let joining = joining(&args.address, args.listen, &args.network, &args.secret, &signals)?;
    let ranks = args.ranks_per_node;
    let met = joining.join(&mut print_line, |port| rank_greeting(port, COLLECTIVES, ranks))?;
    drop(signals);
    let groups = group(met)?;
    follow(groups, Rank(0), &mut |progress| print_line(progress)).map_err(TrainError::from)?;
    print_line("done; the report is on the first node");
    Ok(0)
}

/// Measures the link to a machine that waits.
///
/// # Errors
/// Returns the errors of [`Joining::join`].
pub fn measure_link(args: &LinkArgs, address: &str, effort: Effort) -> anyhow::Result<Report> {
    let signals = Signals::caught()?;
    let joining = joining(address, None, &args.network, &args.secret, &signals)?;
    let met = joining.join(&mut print_line, |port| rank_greeting(port, LINK, 1))?;
    drop(signals);
    let options = LinkOptions { effort, parameters: args.parameters.clone() };
    Ok(link::run(linked(met), &options, &mut |progress| print_line(progress)))
}

/// Waits for the machine that measures the link, and answers it; returns the process's exit code.
///
/// # Errors
/// Returns the errors of [`Rendezvous::host`], and one if the other node is lost.
pub fn answer_link(args: &LinkArgs) -> anyhow::Result<i32> {
    let signals = Signals::caught()?;
    let gathering = Rendezvous {
        what: "a benchmark",
        command: "potluck bench link",
        flags: String::new(),
        run: run_name()?,
        before: Vec::new(),
        nodes: 2,
        listen: args.listen.flatten(),
        advertise: Vec::new(),
        congestion: args.network.congestion.unwrap_or_default(),
        secret: &args.secret,
        wait: None,
        node_timeout: NODE_TIMEOUT,
        signals: signals.flags(),
    };
    let met = gathering.host(|port| rank_greeting(port, LINK, 1))?;
    drop(signals);
    link::answer(linked(met), &mut |progress| print_line(progress))?;
    print_line("done; the report is on the other node");
    Ok(0)
}

fn linked(met: JoinedCluster) -> LinkedNodes {
    print_line(&met.started.roster.to_string());
    LinkedNodes { cluster: met.cluster, started: met.started, timeout: NODE_TIMEOUT }
}
