//! Command line: parses the arguments and runs the named command.

mod added_tokens;
pub mod args;
pub mod bench;
pub mod bench_nodes;
pub mod chat;
pub mod data;
pub mod devices;
pub mod documents;
pub mod explain;
pub mod export;
pub mod hardware;
pub mod launch;
mod missing_driver;
pub mod model;
pub mod nodes;
pub mod plan;
pub mod predict;
pub mod prompt;
pub mod rendezvous;
pub mod resume;
mod run_signals;
pub mod runs;
pub mod runs_directory;
pub mod schedule_chart;
pub mod secrets;
pub mod status;
pub mod train;
mod trained_on;
mod unknown_flags;

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;
use std::sync::OnceLock;

use crate::ui::log::{self, Level};
use crate::ui::terminal::{print_error, print_line};
use args::{Cli, Command};
use potluck_bench::machines::PlanMachinesError;
use potluck_core::{Remedy, files};
use potluck_net::nodes::ClusterHandleError;
use potluck_train::TrainError;
use potluck_train::config::read::ConfigError;
use potluck_train::runtime::error::{EXIT_CONFIGURATION, EXIT_DEFECT, EXIT_RESTART, RuntimeError};
use potluck_train::signals::Interruption;
use rendezvous::RendezvousError;

/// Exit code of a command line that does not parse, as usual.
pub const EXIT_USAGE: i32 = 2;

/// Runs the command on the command line and returns the process's exit code.
pub fn main() -> i32 {
    potluck_core::set_build_hash(env!("POTLUCK_BUILD"));
    let cli = match Cli::checked(std::env::args_os()) {
        Ok(cli) => cli,
        Err(error) => {
            // Fails if the pipe is closed, and then the failure cannot be reported.
            let _ = error.print();
            return if error.use_stderr() { EXIT_USAGE } else { 0 };
        }
    };
    let code = match open_log(&cli.command).and_then(|()| run(&cli.command)) {
        Ok(code) => code,
        Err(error) => {
            let is_interruption =
                error.is::<InterruptedError>() || error.is::<InterruptedReportError>();
            let level = if is_interruption { Level::Info } else { Level::Error };
            let rank = error.downcast_ref().and_then(TrainError::failed_rank);
            log::write(level, rank, &format!("{error:#}"));
            exit_code(&error)
        }
    };
    match STDOUT_FAILURE.get() {
        Some(why) if code == 0 => {
            print_error(&format!("stdout cannot be written: {why}; free space there"));
            EXIT_RESTART
        }
        _ => code,
    }
}

/// Opens the log that a command asks for.
fn open_log(command: &Command) -> anyhow::Result<()> {
    let watched = match command {
        Command::Train(args) => &args.watched,
        Command::Plan(args) => &args.train.watched,
        Command::Join(args) => &args.watched,
        Command::Launch(args) => &args.train.watched,
        _ => return Ok(()),
    };
    let file = watched.log_file.as_deref();
    log::open(watched.log, file).map_err(|why| {
        let path = file.unwrap_or_else(|| Path::new("")).display();
        UsageError(format!("--log-file {path}: cannot be opened: {why}"))
    })?;
    Ok(())
}

/// Runs a command and returns its exit code if it did not fail.
fn run(command: &Command) -> anyhow::Result<i32> {
    match command {
        Command::Devices { json, certify } => {
            devices::run(*json, certify.as_ref().map(Option::as_deref))?;
        }
        Command::Train(args) => return train::run(args),
        Command::Plan(args) => plan::run(args)?,
        Command::Join(args) => return nodes::join(args),
        Command::Launch(args) => return launch::run(args),
        Command::Secret { out } => secrets::make(out.as_deref())?,
        Command::Data(command) => data::run(command)?,
        Command::Eval(args) => model::eval(args)?,
        Command::Generate(args) => model::generate(args)?,
        Command::Chat(args) => chat::chat(args)?,
        Command::Predict(args) => predict::predict(args)?,
        Command::Export(args) => export::export(args)?,
        Command::Runs(args) => runs::run(args)?,
        Command::Bench(args) => return bench::run(args),
        Command::Hardware(args) => return hardware::run(args),
        Command::Completions { shell } => documents::completions(*shell),
        Command::Man { directory } => documents::manual(directory)?,
    }
    Ok(0)
}

/// First failure to write to stdout, except a closed pipe.
static STDOUT_FAILURE: OnceLock<String> = OnceLock::new();

/// Writes to stdout; returns false if that fails. Unlike with `println`, a reader that closes the
/// pipe early (head, less) is no error; any other failure is one at the end of the program.
fn print(text: &str) -> bool {
    let mut out = std::io::stdout();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    if let Err(why) = &written
        && why.kind() != io::ErrorKind::BrokenPipe
    {
        STDOUT_FAILURE.get_or_init(|| why.to_string());
    }
    written.is_ok()
}

/// A signal before the run had a state to save.
#[derive(Debug, thiserror::Error)]
#[error("{0} before the run began; nothing was saved")]
pub struct InterruptedError(pub Interruption);

/// A signal during a report on hardware.
#[derive(Debug, thiserror::Error)]
#[error("{signal}; what is done is kept, and the report goes on with: {command}")]
pub struct InterruptedReportError {
    pub signal: Interruption,
    pub command: String,
}

fn exit_code(error: &anyhow::Error) -> i32 {
    if let Some(error) = error.downcast_ref::<TrainError>() {
        return error.exit_code();
    }
    if let Some(error) = error.downcast_ref::<RuntimeError>() {
        return error.exit_code();
    }
    if let Some(error) = error.downcast_ref::<PlanMachinesError>() {
        return match error {
            PlanMachinesError::Train(error) => error.exit_code(),
            PlanMachinesError::Machines(_) | PlanMachinesError::NoLayout(_) => EXIT_CONFIGURATION,
        };
    }
    if let Some(InterruptedError(signal)) = error.downcast_ref() {
        return signal.exit_code();
    }
    if let Some(InterruptedReportError { signal, .. }) = error.downcast_ref() {
        return signal.exit_code();
    }
    if let Some(error) = error.downcast_ref::<RendezvousError>() {
        return match error.remedy {
            Remedy::Time => EXIT_RESTART,
            Remedy::Person => EXIT_CONFIGURATION,
        };
    }
    let typed =
        error.is::<ConfigError>() || error.is::<UsageError>() || error.is::<ClusterHandleError>();
    if typed { EXIT_CONFIGURATION } else { EXIT_DEFECT }
}

/// Checks that the file of a flag can be written, before minutes are spent on its content.
///
/// # Errors
/// Returns `UsageError` if the path is a directory, lies in no existing directory or cannot be
/// opened for writing.
fn writable(path: &Path, flag: &str) -> Result<(), UsageError> {
    let why = if path.is_dir() {
        "is a directory".to_string()
    } else if !files::parent(path).is_dir() {
        "is in no directory that exists".to_string()
    } else {
        // An existing file is opened and stays unchanged; a missing file is not created yet.
        match OpenOptions::new().write(true).open(path) {
            Err(why) if why.kind() != io::ErrorKind::NotFound => {
                format!("cannot be written: {why}")
            }
            _ => return Ok(()),
        }
    };
    Err(UsageError(format!("{} {why}; name a file for {flag}", path.display())))
}

/// Writes the file of a flag, and prints its path.
///
/// # Errors
/// Returns `TrainError::Io` if it cannot be written.
fn write_named(path: &Path, bytes: &[u8]) -> Result<(), TrainError> {
    files::replace_or_write(path, bytes)
        .map_err(|why| TrainError::Io { path: path.into(), why })?;
    print_line(&format!("wrote {}", path.display()));
    Ok(())
}

/// Arguments that parse but cannot be carried out.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);
