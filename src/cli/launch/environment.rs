//! Place of a process among those that a launcher started, from flags, `POTLUCK_*` or the variables
//! of the launcher.
//!
//! Variables of these launchers are known: torchrun 2.15, Slurm 22.05, Open MPI 4.1 and 5, MPICH
//! 4.0 and Intel MPI, Kubernetes' Indexed Job and JobSet, SkyPilot, Ray Train.

use std::fmt;

use super::nodelist::first_host;
use crate::cli::UsageError;
use crate::cli::rendezvous::PORT;
use potluck_net::cluster::NODES_MAX;

/// Environment of a process: the value of a variable.
pub type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Number of ports of runs that Slurm starts, below the ephemeral ports of a system: the port is
/// computed from the job and the step, so that neighbouring jobs on one machine have different
/// ones.
const SLURM_PORTS: u64 = 12_000;
/// First port of runs that Slurm starts.
const SLURM_PORTS_FROM: u64 = 20_000;

/// Place of a process by flags or variables; `None` for a part that they do not give.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaskPlace {
    pub rank: Option<u32>,
    /// Number of processes.
    pub world: Option<u32>,
    /// Number of this process among the processes of its host.
    pub local_rank: Option<u32>,
    /// Number of processes on its host.
    pub local_world: Option<u32>,
    /// Host and UDP port of the first process.
    pub address: Option<String>,
}

/// Launcher whose variables are known.
#[derive(Debug)]
pub struct Launcher {
    name: &'static str,
    /// Nesting level: srun starts torchrun, and never the other way round.
    level: LauncherLevel,
    /// Variables of the place, as they are shown.
    variables: &'static str,
    place: fn(Variables) -> Result<Option<TaskPlace>, UsageError>,
}

/// Nesting levels of launchers, the innermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LauncherLevel {
    Workers,
    Mpi,
    Job,
    Cluster,
}

/// All launchers, the innermost first.
static LAUNCHERS: &[Launcher] = &[
    Launcher {
        name: "torchrun or Ray Train",
        level: LauncherLevel::Workers,
        variables: "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
        place: of_workers,
    },
    Launcher {
        name: "Open MPI",
        level: LauncherLevel::Mpi,
        variables: "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE",
        place: of_open_mpi,
    },
    Launcher {
        name: "MPICH or Intel MPI",
        level: LauncherLevel::Mpi,
        variables: "PMI_RANK, PMI_SIZE",
        place: of_mpich,
    },
    Launcher {
        name: "srun",
        level: LauncherLevel::Job,
        variables: "SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST",
        place: of_srun,
    },
    Launcher {
        name: "SkyPilot",
        level: LauncherLevel::Cluster,
        variables: "SKYPILOT_NODE_RANK, SKYPILOT_NUM_NODES, SKYPILOT_NODE_IPS",
        place: of_sky_pilot,
    },
    Launcher {
        name: "a Kubernetes Indexed Job",
        level: LauncherLevel::Cluster,
        variables: "JOB_COMPLETION_INDEX",
        place: of_indexed_job,
    },
];

/// Place of this process, and the source of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundTask {
    pub rank: u32,
    pub world: u32,
    pub local_rank: u32,
    pub local_world: u32,
    pub address: String,
    source: String,
}

impl fmt::Display for FoundTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, world, local_rank, local_world, address, source } = self;
        write!(f, "rank {rank} of {world}")?;
        if *local_world > 1 {
            write!(f, ", {local_rank} of {local_world} on this host")?;
        }
        write!(f, ", the first node at {address}; from {source}")
    }
}

/// Finds the place of this process. Parts that flags do not give are taken from `POTLUCK_RANK`,
/// `POTLUCK_WORLD`, `POTLUCK_LOCAL_RANK`, `POTLUCK_LOCAL_WORLD` and `POTLUCK_ADDRESS`, and then,
/// with `use_launcher`, from the innermost launcher. Without any of them the process is alone.
///
/// # Errors
/// Returns `UsageError` if a value is not a number, if two sources contradict each other, and if
/// the place is incomplete.
pub fn find(
    flags: &TaskPlace,
    use_launcher: bool,
    variables: Variables,
) -> Result<FoundTask, UsageError> {
    let own = own_variables(variables)?;
    agree("a flag", flags, "POTLUCK_*", &own)?;
    let mut given = Vec::new();
    if use_launcher {
        for launcher in LAUNCHERS {
            if let Some(place) = (launcher.place)(variables)? {
                given.push((launcher, place));
            }
        }
    }
    for (launcher, place) in &given {
        for (other, there) in &given {
            if launcher.level == other.level {
                agree(launcher.variables, place, other.variables, there)?;
            }
        }
    }
    let typed = flags.or(&own);
    let mut sources = Vec::new();
    if *flags != TaskPlace::default() {
        sources.push("the command line".to_string());
    }
    if own != TaskPlace::default() {
        sources.push("POTLUCK_*".to_string());
    }
    let mut place = typed.clone();
    if let Some((launcher, inner)) = given.first() {
        agree("a flag or POTLUCK_*", &typed, launcher.variables, inner)?;
        place = typed.or(inner);
        sources.push(format!("{} ({})", launcher.name, launcher.variables));
        for (outer, there) in &given[1..] {
            if (inner.rank, inner.world) == (there.rank, there.world) {
                // The same processes: `srun --mpi=pmi2` sets the variables of MPICH too.
                place = place.or(there);
            } else {
                place.address = place.address.or_else(|| there.address.clone());
            }
            if outer.level != launcher.level {
                sources.push(format!("inside of {}", outer.name));
            }
        }
    }
    if sources.is_empty() && use_launcher {
        require_no_batch_script(variables)?;
    }
    complete(&place, &sources)
}

/// Refuses the shell of a batch script of Slurm with several tasks or nodes, which is not a task.
fn require_no_batch_script(variables: Variables) -> Result<(), UsageError> {
    let has_many = |name| variables(name).is_some_and(|count| count != "1");
    if variables("SLURM_JOB_ID").is_some()
        && (has_many("SLURM_NTASKS") || has_many("SLURM_JOB_NUM_NODES"))
    {
        let why = "this is the shell of a batch script, not a task: start it with `srun potluck \
                   launch ..`, or alone with --launcher none";
        return Err(UsageError(why.into()));
    }
    Ok(())
}

/// Complete place, with defaults for missing parts.
fn complete(place: &TaskPlace, sources: &[String]) -> Result<FoundTask, UsageError> {
    if sources.is_empty() {
        return Ok(FoundTask {
            rank: 0,
            world: 1,
            local_rank: 0,
            local_world: 1,
            address: String::new(),
            source: "no launcher".into(),
        });
    }
    let source = sources.join(", ");
    let missing = |what: &str, flag: &str, variable: &str| {
        UsageError(format!("{source} does not tell {what}: give it by {flag} or {variable}"))
    };
    let Some(world) = place.world else {
        return Err(missing("the number of processes", "--world", "POTLUCK_WORLD"));
    };
    let Some(rank) = place.rank else {
        return Err(missing("the rank of this process", "--rank", "POTLUCK_RANK"));
    };
    if world == 0 || rank >= world {
        return Err(UsageError(format!("{source}: there is no rank {rank} of {world}")));
    }
    if world > NODES_MAX {
        let why = format!("{source}: a run has at most {NODES_MAX} processes, not {world}");
        return Err(UsageError(why));
    }
    let local_world = place.local_world.unwrap_or(1);
    let local_rank = place.local_rank.unwrap_or_default();
    if local_rank >= local_world.max(1) {
        return Err(UsageError(format!(
            "{source}: there is no process {local_rank} of {local_world} on this host"
        )));
    }
    let address = match &place.address {
        Some(address) => address.clone(),
        // All processes are on this host.
        None if local_world == world => format!("127.0.0.1:{PORT}"),
        None => {
            let what = "the address of the first node";
            return Err(missing(what, "--address HOST[:PORT]", "POTLUCK_ADDRESS"));
        }
    };
    Ok(FoundTask { rank, world, local_rank, local_world, address, source })
}

impl TaskPlace {
    /// Returns this place, with missing parts from another one.
    fn or(&self, other: &Self) -> Self {
        Self {
            rank: self.rank.or(other.rank),
            world: self.world.or(other.world),
            local_rank: self.local_rank.or(other.local_rank),
            local_world: self.local_world.or(other.local_world),
            address: self.address.clone().or_else(|| other.address.clone()),
        }
    }
}

/// Checks that two sources do not contradict each other.
///
/// # Errors
/// Returns `UsageError` with both values.
fn agree(one: &str, place: &TaskPlace, other: &str, there: &TaskPlace) -> Result<(), UsageError> {
    let pairs = [
        ("rank", place.rank, there.rank),
        ("number of processes", place.world, there.world),
        ("rank on this host", place.local_rank, there.local_rank),
        ("number of processes on this host", place.local_world, there.local_world),
    ];
    for (what, here, there) in pairs {
        if let (Some(here), Some(there)) = (here, there)
            && here != there
        {
            return Err(UsageError(format!(
                "the {what} is {here} by {one} and {there} by {other}; unset one of them, or give \
                 --launcher none with --rank, --world and --address"
            )));
        }
    }
    Ok(())
}

/// Returns the value of a variable that is a number.
///
/// # Errors
/// Returns `UsageError` if it is another text.
fn number(variables: Variables, name: &str) -> Result<Option<u32>, UsageError> {
    let Some(text) = variables(name) else { return Ok(None) };
    match text.trim().parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => Err(UsageError(format!("{name} = '{text}' is not a whole number"))),
    }
}

fn own_variables(variables: Variables) -> Result<TaskPlace, UsageError> {
    Ok(TaskPlace {
        rank: number(variables, "POTLUCK_RANK")?,
        world: number(variables, "POTLUCK_WORLD")?,
        local_rank: number(variables, "POTLUCK_LOCAL_RANK")?,
        local_world: number(variables, "POTLUCK_LOCAL_WORLD")?,
        address: variables("POTLUCK_ADDRESS"),
    })
}

/// torchrun, Ray Train, and other launchers that set the variables of `torch.distributed`. The TCP
/// port of the store is free as a UDP port, and differs from run to run.
fn of_workers(variables: Variables) -> Result<Option<TaskPlace>, UsageError> {
    let rank = number(variables, "RANK")?;
    let world = number(variables, "WORLD_SIZE")?;
    if rank.is_none() || world.is_none() {
        return Ok(None);
    }
    let address = match (variables("MASTER_ADDR"), variables("MASTER_PORT")) {
        (Some(host), Some(port)) => Some(format!("{}:{port}", bracketed(&host))),
        (Some(host), None) => Some(bracketed(&host)),
        (None, _) => None,
    };
    let local_rank = number(variables, "LOCAL_RANK")?;
    let local_world = number(variables, "LOCAL_WORLD_SIZE")?;
    Ok(Some(TaskPlace { rank, world, local_rank, local_world, address }))
}

/// Open MPI. Version 4 provides the address of `mpirun`, usually the host of the first process.
fn of_open_mpi(variables: Variables) -> Result<Option<TaskPlace>, UsageError> {
    let Some(rank) = number(variables, "OMPI_COMM_WORLD_RANK")? else { return Ok(None) };
    let world = number(variables, "OMPI_COMM_WORLD_SIZE")?;
    let local_world = number(variables, "OMPI_COMM_WORLD_LOCAL_SIZE")?;
    let address = if world == local_world {
        None
    } else {
        variables("OMPI_MCA_orte_hnp_uri").and_then(|uri| {
            let (_, addresses) = uri.split_once(";tcp://")?;
            let host = addresses.split([',', ':']).next()?;
            Some(host.to_string())
        })
    };
    let local_rank = number(variables, "OMPI_COMM_WORLD_LOCAL_RANK")?;
    Ok(Some(TaskPlace { rank: Some(rank), world, local_rank, local_world, address }))
}

/// MPICH and Intel MPI.
fn of_mpich(variables: Variables) -> Result<Option<TaskPlace>, UsageError> {
    let Some(rank) = number(variables, "PMI_RANK")? else { return Ok(None) };
    let world = number(variables, "PMI_SIZE")?;
    let local_rank = number(variables, "MPI_LOCALRANKID")?;
    let local_world = number(variables, "MPI_LOCALNRANKS")?;
    Ok(Some(TaskPlace { rank: Some(rank), world, local_rank, local_world, address: None }))
}

/// Tasks of srun. The shell of a batch script has a rank too, but no step.
fn of_srun(variables: Variables) -> Result<Option<TaskPlace>, UsageError> {
    let Some(step) = variables("SLURM_STEP_ID") else { return Ok(None) };
    let rank = number(variables, "SLURM_PROCID")?;
    let world = match number(variables, "SLURM_STEP_NUM_TASKS")? {
        Some(world) => Some(world),
        None => number(variables, "SLURM_NTASKS")?,
    };
    let local_rank = number(variables, "SLURM_LOCALID")?;
    let local_world = match number(variables, "SLURM_NODEID")? {
        Some(node) => tasks_of_node(variables, node)?,
        None => None,
    };
    let hosts = variables("SLURM_STEP_NODELIST").or_else(|| variables("SLURM_JOB_NODELIST"));
    let address = match hosts {
        Some(hosts) => {
            let host = first_host(&hosts)?;
            Some(format!("{host}:{}", slurm_port(variables, &step)))
        }
        None => None,
    };
    Ok(Some(TaskPlace { rank, world, local_rank, local_world, address }))
}

/// Number of tasks of a node, from a list such as `2(x3),1`.
fn tasks_of_node(variables: Variables, node: u32) -> Result<Option<u32>, UsageError> {
    let names = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];
    let Some(text) = names.iter().find_map(|name| variables(name)) else { return Ok(None) };
    let bad = || UsageError(format!("{} = '{text}' is no list of numbers of tasks", names[1]));
    let mut before = 0;
    for part in text.split(',') {
        let (tasks, nodes) = match part.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')').ok_or_else(bad)?),
            None => (part, "1"),
        };
        let tasks: u32 = tasks.trim().parse().map_err(|_| bad())?;
        let nodes: u32 = nodes.trim().parse().map_err(|_| bad())?;
        before = nodes.saturating_add(before);
        if node < before {
            return Ok(Some(tasks));
        }
    }
    Ok(None)
}

/// UDP port of a step, computed from the numbers of the job and of the step.
fn slurm_port(variables: Variables, step: &str) -> u64 {
    let job = variables("SLURM_JOB_ID").unwrap_or_default().parse::<u64>().unwrap_or_default();
    let step = step.parse::<u64>().unwrap_or_default();
    SLURM_PORTS_FROM + job.wrapping_mul(16).wrapping_add(step) % SLURM_PORTS
}

fn of_sky_pilot(variables: Variables) -> Result<Option<TaskPlace>, UsageError> {
    let Some(rank) = number(variables, "SKYPILOT_NODE_RANK")? else { return Ok(None) };
    let world = number(variables, "SKYPILOT_NUM_NODES")?;
    let address = variables("SKYPILOT_NODE_IPS").and_then(|ips| {
        let first = ips.split_whitespace().next()?;
        Some(bracketed(first))
    });
    Ok(Some(TaskPlace { rank: Some(rank), world, address, ..TaskPlace::default() }))
}

/// Pods of an Indexed Job, also of a JobSet. Their variables contain neither their number nor the
/// name of the first one.
fn of_indexed_job(variables: Variables) -> Result<Option<TaskPlace>, UsageError> {
    let Some(rank) = number(variables, "JOB_COMPLETION_INDEX")? else { return Ok(None) };
    Ok(Some(TaskPlace { rank: Some(rank), ..TaskPlace::default() }))
}

/// A host in the form that precedes a port.
fn bracketed(host: &str) -> String {
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.into() }
}

#[cfg(test)]
mod tests;
