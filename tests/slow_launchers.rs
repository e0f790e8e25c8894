//! Real launchers on this machine, which start the tasks of a run by one line, and the files of
//! examples/launch by the schemas of those who read them: `./x launchers`.
#![cfg(target_os = "linux")]

#[path = "slow_launchers/files.rs"]
mod files;
#[path = "slow_launchers/image.rs"]
mod image;
#[path = "common/node_processes.rs"]
mod node_processes;
#[path = "common/process.rs"]
mod process;

use std::env;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use node_processes::{LINE, desk, last_saved, later_port, state};
use process::{Desk, Ran, finish, send_signal, skip};

/// The program that launchers start.
const POTLUCK: &str = env!("CARGO_BIN_EXE_potluck");
/// Steps of a run that is long enough for a task to be killed in it, and its settings.
const STEPS: u64 = 2500;
const LONG: &str = "--steps 2500 --set train.checkpoint_every=100 --log-every 100";
/// Longest wait for what a launcher does.
const PATIENCE: Duration = Duration::from_secs(120);

/// Returns the path of a program, in the directory that `./x` made, in the PATH or beside it.
fn program(name: &str) -> Option<PathBuf> {
    let named = ["POTLUCK_LAUNCHERS", "PATH"].map(|name| env::var_os(name).unwrap_or_default());
    let mut places: Vec<PathBuf> = named.iter().flat_map(env::split_paths).collect();
    // That of daemons, which not every user has in the PATH.
    places.push("/usr/sbin".into());
    places.iter().map(|place| place.join(name)).find(|path| path.is_file())
}

/// Returns a command that runs on a desk, as the program does there.
fn command_of(desk: &Desk, program: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(desk.path(""));
    for (name, value) in desk.command("").get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs a program on a desk to its end.
fn run(desk: &Desk, program: &Path, words: &[&str]) -> Ran {
    let child = command_of(desk, program).args(words).spawn().unwrap();
    finish(child, &format!("{} {}", program.display(), words.join(" ")))
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < PATIENCE, "not within {} s: {what}", PATIENCE.as_secs());
        sleep(Duration::from_millis(50));
    }
}

/// Launcher on this machine.
struct Launcher {
    name: &'static str,
    program: PathBuf,
    /// Words behind it, in which {} stands for the number of tasks.
    words: &'static str,
    /// Variable in which a task finds its rank.
    rank: &'static str,
    variables: Vec<(&'static str, String)>,
    /// Exit codes of the launcher when one of its tasks was killed: none if it starts it again.
    killed: &'static [i32],
}

impl Launcher {
    /// Starts tasks that run `potluck LINE`.
    fn start(&self, desk: &Desk, tasks: usize, line: &str) -> Child {
        let mut command = command_of(desk, &self.program);
        command.args(self.words.replace("{}", &tasks.to_string()).split_whitespace());
        command.arg(POTLUCK).args(line.split_whitespace());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        // What torchrun sets where nobody else has.
        command.env("OMP_NUM_THREADS", "1");
        command.spawn().unwrap()
    }

    fn run(&self, desk: &Desk, tasks: usize, line: &str) -> Ran {
        finish(self.start(desk, tasks, line), self.name)
    }
}

/// Returns the process of a task of the desk, which finds its rank in a variable.
fn task(desk: &Desk, variable: &str, rank: u32) -> Option<u32> {
    let place = fs::canonicalize(desk.path("")).unwrap();
    let variable = format!("{variable}={rank}");
    for entry in fs::read_dir("/proc").unwrap() {
        let process = entry.unwrap().path();
        // What is no process, or has ended meanwhile, has none of them.
        let is_here = fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd == place);
        let is_task = fs::read_link(process.join("exe")).is_ok_and(|exe| exe == Path::new(POTLUCK));
        let Ok(variables) = fs::read(process.join("environ")) else { continue };
        let has_rank = variables.split(|byte| *byte == 0).any(|one| one == variable.as_bytes());
        if is_here && is_task && has_rank {
            return process.file_name()?.to_str()?.parse().ok();
        }
    }
    None
}

/// Returns a launcher of MPI, whose tasks meet at a port of their own.
fn mpi(
    name: &'static str,
    file: &str,
    words: &'static str,
    killed: &'static [i32],
) -> Option<Launcher> {
    let address = format!("127.0.0.1:{}", later_port());
    let mut variables = vec![("POTLUCK_ADDRESS", address)];
    let rank = if name == "Open MPI" {
        // It refuses root otherwise.
        variables.push(("OMPI_ALLOW_RUN_AS_ROOT", "1".into()));
        variables.push(("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1".into()));
        "OMPI_COMM_WORLD_RANK"
    } else {
        "PMI_RANK"
    };
    Some(Launcher { name, program: program(file)?, words, rank, variables, killed })
}

fn open_mpi() -> Option<Launcher> {
    let words = "--oversubscribe --bind-to none -x POTLUCK_ADDRESS -x OMP_NUM_THREADS -np {}";
    mpi("Open MPI", "mpirun.openmpi", words, &[137])
}

fn mpich() -> Option<Launcher> {
    // It has the number of a signal alone.
    mpi("MPICH", "mpiexec.hydra", "-n {}", &[9])
}

fn torchrun() -> Option<Launcher> {
    Some(Launcher {
        name: "torchrun",
        program: program("torchrun")?,
        words: "--standalone --nproc-per-node {} --max-restarts 2 --no-python",
        rank: "RANK",
        variables: Vec::new(),
        killed: &[],
    })
}

/// Line of a task.
fn line_of(shares: &str, more: &str) -> String {
    let of_run = LINE.strip_prefix("train").unwrap();
    format!(
        "launch{of_run} --devices cpu --out run --secret-file code --set parallel.shares={shares} \
         --set faults.node_timeout_s=3 --wait 20 {more}"
    )
}

/// Three tasks have the bits of one process, also if one of them is killed and the same line is
/// started again where the launcher does not do so by itself.
fn check(launcher: &Launcher) {
    let began = Instant::now();
    let desk = desk();
    let line = line_of("2,1,1", "");
    let ran = launcher.run(&desk, 3, &line).ok();
    assert!(ran.err.contains("launch: rank 0 of 3"), "{}", ran.err);
    let one = format!("{LINE} --devices cpu*3 --set parallel.shares=2,1,1 --quiet");
    desk.run(&format!("{one} --out one")).ok();
    assert!(state(&desk, "run", 6) == state(&desk, "one", 6), "other bits by {}", launcher.name);
    let three = began.elapsed().as_secs_f64();

    let line = line_of("2,1,1", &format!("{LONG} --out killed"));
    let mut tasks = launcher.start(&desk, 3, &line);
    kill_one(&desk, launcher.rank, "killed", &mut tasks);
    let killed = Instant::now();
    let ran = finish(tasks, launcher.name);
    let (code, seconds) = (ran.code().unwrap(), killed.elapsed().as_secs_f64());
    let saved = last_saved(&desk, "killed");
    if launcher.killed.is_empty() {
        ran.ok();
    } else {
        assert!(launcher.killed.contains(&code), "{code}: {}", ran.err);
        assert!(saved < STEPS, "nobody was killed in time");
        let ran = launcher.run(&desk, 3, &line).ok();
        assert!(ran.err.contains("continuing at step"), "{}", ran.err);
    }
    compare_with_one(&desk, "killed");
    eprintln!(
        "{}: three tasks in {three:.1} s; after one was killed, code {code} in {seconds:.1} s at \
         step {saved}; all in {:.1} s",
        launcher.name,
        began.elapsed().as_secs_f64()
    );
}

/// Kills the task with rank 1 when a long run has its first checkpoint.
fn kill_one(desk: &Desk, variable: &str, run: &str, launcher: &mut Child) {
    wait_until("a checkpoint", || {
        assert!(launcher.try_wait().unwrap().is_none(), "ended: {}", read(launcher));
        last_saved(desk, run) >= 100
    });
    send_signal(task(desk, variable, 1).expect("rank 1 runs"), "KILL");
}

/// Returns what a launcher has printed that has ended early.
fn read(launcher: &mut Child) -> String {
    let mut text = String::new();
    if let Some(mut err) = launcher.stderr.take() {
        // What is there is all there is.
        let _ = err.read_to_string(&mut text);
    }
    text
}

/// Compares a long run of three tasks with one of one process.
fn compare_with_one(desk: &Desk, run: &str) {
    let one = format!("{LINE} --devices cpu*3 --set parallel.shares=2,1,1 --quiet {LONG}");
    desk.run(&format!("{one} --out whole")).ok();
    assert!(state(desk, run, STEPS) == state(desk, "whole", STEPS), "other bits: {run}");
}

#[test]
fn tasks_of_open_mpi_have_the_bits_of_one_process() {
    match open_mpi() {
        Some(launcher) => check(&launcher),
        None => skip("launchers: there is no mpirun.openmpi"),
    }
}

#[test]
fn tasks_of_mpich_have_the_bits_of_one_process() {
    match mpich() {
        Some(launcher) => check(&launcher),
        None => skip("launchers: there is no mpiexec.hydra"),
    }
}

#[test]
fn tasks_of_torchrun_have_the_bits_of_one_process() {
    let Some(launcher) = torchrun() else { return skip("launchers: there is no torchrun") };
    check(&launcher);
    let desk = desk();
    for (name, more) in [
        ("stages", "--pipeline 2 --set parallel.blocks_per_stage=1,2"),
        ("tensors", "--tensor 2 --set model.width=16"),
    ] {
        launcher.run(&desk, 4, &line_of("3,1", &format!("{more} --out {name}"))).ok();
        let shares = "--set parallel.shares=3,1 --quiet";
        desk.run(&format!("{LINE} {more} {shares} --devices cpu*4 --out one-{name}")).ok();
        let one = state(&desk, &format!("one-{name}"), 6);
        assert!(state(&desk, name, 6) == one, "other bits: {name}");
    }
}

// ---- Slurm ----

/// Slurm with three nodes on this machine, whose names are loopback addresses.
struct Slurm {
    directory: tempfile::TempDir,
    daemons: Vec<Child>,
}

impl Slurm {
    /// Starts the daemons, or says why there are none.
    fn start() -> Result<Self, &'static str> {
        let (Some(controller), Some(node)) = (program("slurmctld"), program("slurmd")) else {
            return Err("launchers: there is no slurmctld and slurmd");
        };
        if !rustix::process::geteuid().is_root() {
            return Err("launchers: the daemons of Slurm need root");
        }
        let directory = tempfile::tempdir().unwrap();
        let mut slurm = Self { directory, daemons: Vec::new() };
        fs::write(slurm.configuration(), slurm.settings()).unwrap();
        slurm.daemon(&controller, &[]);
        for number in 1..=3 {
            let name = format!("127.0.0.{number}");
            fs::create_dir(slurm.directory.path().join(&name)).unwrap();
            slurm.daemon(&node, &["-N", &name]);
        }
        wait_until("three nodes of Slurm", || slurm.run("sinfo", "-h -o %D%t").out == "3idle\n");
        Ok(slurm)
    }

    fn configuration(&self) -> PathBuf {
        self.directory.path().join("slurm.conf")
    }

    fn settings(&self) -> String {
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let host = host.trim();
        let place = self.directory.path().display();
        let ports: Vec<u16> = (0..4).map(|_| later_port()).collect();
        let mut text = format!(
            "ClusterName=potluck\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={}\n\
             FirstJobId={}\nSlurmUser=root\nSlurmdUser=root\nAuthType=auth/none\n\
             CredType=cred/none\nStateSaveLocation={place}\nSlurmdSpoolDir={place}/%n\n\
             SlurmctldPidFile={place}/controller.pid\nSlurmdPidFile={place}/%n.pid\n\
             SlurmctldLogFile={place}/controller.log\nSlurmdLogFile={place}/%n.log\n\
             ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n\
             SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\n\
             SchedulerType=sched/backfill\nSchedulerParameters=sched_interval=2\n\
             ReturnToService=2\nSwitchType=switch/none\nMpiDefault=none\n\
             JobAcctGatherType=jobacct_gather/none\n\
             AccountingStorageType=accounting_storage/none\n\
             PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE\n",
            ports[0],
            1 + std::process::id() % 500
        );
        for (number, port) in (1..).zip(&ports[1..]) {
            text += &format!(
                "NodeName=127.0.0.{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} \
                 CPUs=2 State=UNKNOWN\n"
            );
        }
        text
    }

    /// Starts a daemon that stays in the foreground, and is ended with this value.
    fn daemon(&mut self, program: &Path, words: &[&str]) {
        let mut command = Command::new(program);
        command.arg("-D").args(words).env("SLURM_CONF", self.configuration());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.daemons.push(command.spawn().unwrap());
    }

    /// Runs a command of Slurm.
    fn run(&self, name: &str, line: &str) -> Ran {
        let mut command = Command::new(program(name).expect("Slurm has its commands"));
        command.args(line.split_whitespace()).env("SLURM_CONF", self.configuration());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        finish(command.spawn().unwrap(), name)
    }

    fn srun(&self) -> Launcher {
        Launcher {
            name: "srun",
            program: program("srun").expect("Slurm has its commands"),
            words: "-N {} -n {} --kill-on-bad-exit",
            rank: "SLURM_PROCID",
            variables: vec![("SLURM_CONF", self.configuration().display().to_string())],
            killed: &[75, 137],
        }
    }

    /// State of a job that is not over for long.
    fn state(&self, job: &str) -> String {
        let told = self.run("scontrol", &format!("-o show job {job}")).ok().out;
        let (_, state) = told.split_once("JobState=").expect("a job has a state");
        state.split(' ').next().unwrap_or_default().into()
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        // Nodes wait for their tasks, which are ended first.
        self.run("scancel", "--user root");
        let began = Instant::now();
        while !self.run("squeue", "-h").out.is_empty() && began.elapsed() < PATIENCE {
            sleep(Duration::from_millis(100));
        }
        for daemon in &mut self.daemons {
            send_signal(daemon.id(), "TERM");
            let began = Instant::now();
            while daemon.try_wait().unwrap().is_none() && began.elapsed() < Duration::from_secs(5) {
                sleep(Duration::from_millis(50));
            }
            // One that has ended is not killed.
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

#[test]
fn tasks_of_srun_have_the_bits_of_one_process_also_over_a_time_limit() {
    let slurm = match Slurm::start() {
        Ok(slurm) => slurm,
        Err(why) => return skip(why),
    };
    check(&slurm.srun());
    a_job_whose_time_is_up_goes_on(&slurm);
}

/// The script of examples/launch, on three nodes, for two minutes: the signal before the limit
/// saves the run and ends it, the script has the job queued again, and the job goes on.
fn a_job_whose_time_is_up_goes_on(slurm: &Slurm) {
    let began = Instant::now();
    let desk = desk();
    fs::rename(desk.path("code"), desk.path("potluck-code")).unwrap();
    let own = format!("{} --set parallel.shares=2,1,1 --steps $(cat steps)", settings());
    let script = changed(
        "slurm.sbatch",
        &[
            ("potluck launch config.toml", &format!("{POTLUCK} launch tiny.toml")),
            // Three ports of one machine would be one.
            ("--status 9464", &own),
        ],
    );
    desk.write("job", script);
    desk.write("steps", "100000000");
    let mut sbatch = command_of(&desk, &program("sbatch").expect("Slurm has its commands"));
    sbatch.args(["--parsable", "--nodes=3", "--time=2", "--signal=USR1@50", "job"]);
    sbatch.env("SLURM_CONF", slurm.configuration()).env("HOME", desk.path(""));
    let job = finish(sbatch.spawn().unwrap(), "sbatch").ok().out.trim().to_string();
    wait_until("the job runs", || slurm.state(&job) == "RUNNING");
    wait_until("the job is queued again", || slurm.state(&job) == "PENDING");
    let (saved, first) = (last_saved(&desk, "run"), began.elapsed().as_secs_f64());
    let log = || fs::read_to_string(desk.path(&format!("potluck-{job}.log"))).unwrap();
    assert!(saved > 0, "{}", log());
    let end = saved + 100;
    desk.write("steps", end.to_string());
    // It would begin in some minutes, so that the end of its script is not taken for that of the
    // next one.
    sleep(Duration::from_secs(5));
    slurm.run("scontrol", &format!("update JobId={job} StartTime=now")).ok();
    let before = ["PENDING", "CONFIGURING", "RUNNING", "COMPLETING"];
    let is_over = |state: &str| !before.contains(&state);
    wait_until("the job is over", || is_over(&slurm.state(&job)));
    assert_eq!(slurm.state(&job), "COMPLETED", "{}", log());
    assert!(log().contains(&format!("continuing at step {saved}")), "{}", log());
    let one = format!("{LINE} --devices cpu*3 --set parallel.shares=2,1,1 --quiet --steps {end}");
    desk.run(&format!("{one} --out one")).ok();
    assert!(state(&desk, "run", end) == state(&desk, "one", end), "other bits over two jobs");
    eprintln!(
        "Slurm: queued again with {saved} steps after {first:.1} s, done after {:.1} s",
        began.elapsed().as_secs_f64()
    );
}

// ---- The files ----

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/launch").join(name)
}

/// Returns a file with other words in it, each of which it has once.
fn changed(name: &str, changes: &[(&str, &str)]) -> String {
    let mut text = fs::read_to_string(file(name)).unwrap();
    for (was, is) in changes {
        assert_eq!(text.matches(was).count(), 1, "{name}: {was}");
        text = text.replace(was, is);
    }
    text
}

/// Settings of a short run, without its length.
fn settings() -> &'static str {
    LINE.strip_prefix("train tiny.toml").unwrap().strip_suffix("--steps 6").unwrap()
}

/// Writes a script of examples/launch, for a long run, as `script` on the desk.
fn write_script(desk: &Desk, name: &str, changes: &[(&str, &str)]) {
    let own = format!(
        "{} --devices cpu --set parallel.shares=2,1,1 --set faults.node_timeout_s=3 {LONG}",
        settings()
    );
    let program = format!("{POTLUCK} launch tiny.toml");
    let mut all = vec![("potluck launch config.toml", &*program), ("--status 9464", &own)];
    all.extend(changes);
    desk.write("script", changed(name, &all));
}

/// Starts the script of the desk.
fn start_script(desk: &Desk, words: &[&str]) -> Child {
    let mut command = command_of(desk, Path::new("bash"));
    command.arg("script").args(words);
    let own = env::var_os("POTLUCK_LAUNCHERS").unwrap_or_default();
    let path = env::var_os("PATH").unwrap_or_default();
    let places = env::split_paths(&own).chain(env::split_paths(&path));
    command.env("PATH", env::join_paths(places).unwrap());
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command.spawn().unwrap()
}

/// Each of three machines has a torchrun: that of the lost process starts it again, and the others
/// stay.
#[test]
fn the_script_for_torchrun_starts_a_lost_process_again() {
    if program("torchrun").is_none() {
        return skip("launchers: there is no torchrun");
    }
    let (desk, port) = (desk(), later_port().to_string());
    write_script(&desk, "torchrun.sh", &[("-port 29500", &format!("-port {port}"))]);
    let mut machines =
        ["0", "1", "2"].map(|number| start_script(&desk, &["127.0.0.1", "3", number]));
    kill_one(&desk, "RANK", "run", &mut machines[0]);
    for (number, machine) in machines.into_iter().enumerate() {
        let ran = finish(machine, "torchrun.sh").ok();
        // The one that was lost is a new process.
        if number == 2 {
            assert!(ran.err.contains("joining the next run"), "{}", ran.err);
        }
    }
    compare_with_one(&desk, "run");
}

/// MPI starts nobody again: the script starts all of them.
#[test]
fn the_script_for_mpi_starts_all_processes_again() {
    let Some(mpirun) = program("mpirun.openmpi") else {
        return skip("launchers: there is no mpirun.openmpi");
    };
    let (desk, port) = (desk(), later_port().to_string());
    desk.write("hosts", "127.0.0.1\n127.0.0.1\n127.0.0.1\n");
    let changes = [
        (":7717", &*format!(":{port}")),
        ("mpirun --version", &format!("{} --version", mpirun.display())),
        ("(mpirun ", &format!("({} ", mpirun.display())),
    ];
    write_script(&desk, "mpirun.sh", &changes);
    let mut script = start_script(&desk, &["hosts"]);
    kill_one(&desk, "OMPI_COMM_WORLD_RANK", "run", &mut script);
    let ran = finish(script, "mpirun.sh").ok();
    assert!(ran.err.contains("attempt 1 ended with exit code 137"), "{}", ran.err);
    assert!(ran.err.contains("continuing at step"), "{}", ran.err);
    compare_with_one(&desk, "run");
}
