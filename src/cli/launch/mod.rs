//! `potluck launch`: the same line on every node of a run, for launchers, pods and service
//! managers.

mod environment;
mod nodelist;

use std::net::SocketAddr;

use self::environment::{FoundTask, TaskPlace};
use super::args::{JoinArgs, LaunchArgs, LauncherChoice, NetworkArgs, TrainArgs, WatchedArgs};
use super::rendezvous::{PORT, check_address, with_port};
use super::resume::holds_run;
use super::secrets::SecretArgs;
use super::{UsageError, nodes, train};
use crate::ui::terminal::print_line;
use potluck_kernels::device::{AdapterKind, list_adapters};
use potluck_net::nodes::all_addresses;

/// Seconds for which nodes wait for each other, unless a flag says otherwise.
const WAIT: u64 = 600;

/// Runs `potluck launch` and returns the process's exit code.
///
/// # Errors
/// Returns `UsageError` if the place of this process is missing or contradictory, and the errors of
/// the command that it runs.
pub fn run(args: &LaunchArgs) -> anyhow::Result<i32> {
    let TrainArgs { nodes, resume, explain, .. } = &args.train;
    if nodes.is_some() || resume.is_some() || explain.is_some() {
        let why = "--nodes, --resume and --explain are for `potluck train`: launch takes the \
                   number of nodes from --world or the launcher, and resumes from the newest \
                   checkpoint in --out";
        return Err(UsageError(why.into()).into());
    }
    if args.train.svg.is_some() {
        return Err(UsageError("--svg is for `potluck train --explain schedule`".into()).into());
    }
    let flags = TaskPlace {
        rank: args.rank,
        world: args.world,
        local_rank: args.local_rank,
        local_world: args.local_world,
        address: args.address.clone(),
    };
    let variables = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let use_launcher = args.launcher == LauncherChoice::Auto;
    let found = environment::find(&flags, use_launcher, &variables)?;
    if !args.train.quiet {
        print_line(&format!("launch: {found}"));
    }
    if found.world > 1 {
        check_address(&found.address)?;
    }
    let devices = devices(&args.train, &found)?;
    if found.rank == 0 {
        return train::run(&first_node(&args.train, &found, devices)?);
    }
    nodes::join(&other_node(&args.train, &found, devices))
}

/// Returns the arguments of the first node: the given ones, the nodes to wait for, and the
/// checkpoint from which it continues if there is one.
fn first_node(
    args: &TrainArgs,
    found: &FoundTask,
    devices: Option<String>,
) -> Result<TrainArgs, UsageError> {
    let out = match (&args.out, &args.name) {
        (Some(out), _) => out.clone(),
        (None, Some(name)) => train::run_path(name)?,
        (None, None) => {
            let why = "launch needs --out DIR or --name NAME: a restart resumes from there";
            return Err(UsageError(why.into()));
        }
    };
    let holds = holds_run(&out).map_err(|error| UsageError(error.to_string()))?;
    let mut first = args.clone();
    first.devices = devices;
    first.watched = watched(args, found);
    if holds {
        // The arguments of a new run do not apply to its continuation.
        first.resume = Some(out.clone());
        first.init = None;
        first.add_tokens = false;
    }
    // A start that ended before its first checkpoint has left the directory of its name.
    first.name = None;
    first.out = Some(out);
    if found.world > 1 {
        first.nodes = Some(found.world);
        first.wait = Some(args.wait.unwrap_or(WAIT));
        first.listen = Some(args.listen.unwrap_or_else(|| listening(&found.address)));
    } else {
        // There are no other nodes.
        first.listen = None;
        first.advertise = Vec::new();
        first.network = NetworkArgs::default();
        first.wait = None;
        first.secret = SecretArgs::default();
    }
    Ok(first)
}

/// Returns the address at which the first node listens: all of its addresses, at the port to which
/// the others connect.
fn listening(address: &str) -> SocketAddr {
    let address = with_port(address);
    let port = address.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    all_addresses(port.unwrap_or(PORT))
}

/// Arguments of another node, with its rank by the launcher.
fn other_node(args: &TrainArgs, found: &FoundTask, devices: Option<String>) -> JoinArgs {
    let sets = args.sets.iter().filter(|typed| nodes::is_own_key(typed)).cloned().collect();
    JoinArgs {
        address: found.address.clone(),
        devices,
        listen: None,
        advertise: args.advertise.clone(),
        secret: args.secret.clone(),
        network: args.network.clone(),
        data: None,
        wait: Some(args.wait.unwrap_or(WAIT)),
        node: Some(found.rank),
        run: None,
        stay: true,
        sets,
        quiet: args.quiet,
        watched: watched(args, found),
    }
}

/// Arguments of monitoring, with a separate port for each process of a host.
fn watched(args: &TrainArgs, found: &FoundTask) -> WatchedArgs {
    let mut watched = args.watched.clone();
    if let Some(address) = &mut watched.status
        && address.port() != 0
    {
        // The local rank is less than the number of processes of a run.
        address.set_port(address.port().saturating_add(found.local_rank as u16));
    }
    watched
}

/// Returns the devices of this process: the given ones, or its part of the graphics cards of a host
/// with several processes.
///
/// # Errors
/// Returns `UsageError` if there are fewer cards than processes.
fn devices(args: &TrainArgs, found: &FoundTask) -> Result<Option<String>, UsageError> {
    if args.devices.is_some() || found.local_world <= 1 {
        return Ok(args.devices.clone());
    }
    let mut cards = Vec::new();
    for (index, adapter) in list_adapters().iter().enumerate() {
        let is_card = adapter.kind != AdapterKind::Software && adapter.merged_into.is_none();
        if is_card && adapter.usable().is_ok() {
            cards.push(index);
        }
    }
    let part = part(&cards, found.local_rank, found.local_world);
    if part.is_empty() {
        return Err(UsageError(format!(
            "{} graphics cards are not enough for {} processes on this host: start one process per \
             host, which uses all of its devices, or name those of each process by a flag, such as \
             --devices cpu",
            cards.len(),
            found.local_world
        )));
    }
    Ok(Some(part.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")))
}

/// The part of a process: every `processes`th card. Empty if there are too few cards.
fn part(cards: &[usize], process: u32, processes: u32) -> Vec<usize> {
    let processes = processes as usize;
    if cards.len() < processes {
        return Vec::new();
    }
    cards.iter().copied().skip(process as usize).step_by(processes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_shared_out_to_all_processes_or_to_none() {
        assert_eq!(part(&[0, 2, 3, 5], 0, 2), [0, 3]);
        assert_eq!(part(&[0, 2, 3, 5], 1, 2), [2, 5]);
        assert_eq!(part(&[0, 2, 3], 2, 3), [3]);
        assert!(part(&[0], 0, 2).is_empty() && part(&[], 1, 2).is_empty());
    }

    #[test]
    fn the_first_node_listens_at_the_port_that_the_others_dial() {
        assert_eq!(listening("n1:20016").port(), 20016);
        assert_eq!(listening("[fd00::1]:9000").port(), 9000);
        assert_eq!(listening("n1").port(), PORT);
        assert_eq!(listening("fd00::1").port(), PORT);
    }
}
