//! `potluck train`: starts, resumes or explains a run.

use std::fs;
use std::path::{Path, PathBuf};

use super::args::{Explain, TrainArgs};
use super::explain::explanation;
use super::{UsageError, writable};
use crate::autotune::catalog;
use crate::checkpoint::{Checkpoint, Store};
use crate::config::RunConfig;
use crate::config::read::{self, Override, Resolved};
use crate::faults::Faults;
use crate::runtime::error::EXIT_RESTART;
use crate::train::error::TrainError;
use crate::train::run::{Run, RunOptions, RunOutcome, train};
use crate::train::signals::{EXIT_INTERRUPTED, Interruption};
use crate::train::spec::RunSpec;
use crate::ui::terminal::{Terminal, print_line};

/// Parent directory of runs for which no --out is given.
const RUNS: &str = "runs";

/// Runs `potluck train` and returns the process's exit code.
pub fn run(args: &TrainArgs) -> anyhow::Result<i32> {
    if args.explain == Some(Explain::Keys) {
        super::print(&read::keys_help());
        return Ok(0);
    }
    let faults = Faults::from_environment().map_err(TrainError::from)?;
    faults.check_kernels(&catalog::names()).map_err(TrainError::from)?;
    if let Some(path) = &args.trace {
        writable(path, "--trace")?;
    }
    let resumed = args.resume.as_deref().map(|from| resume_point(from, args.out.as_deref()));
    let (out, checkpoint) = match resumed.transpose()? {
        Some((out, checkpoint)) => (Some(out), Some(checkpoint)),
        None => (args.out.clone(), None),
    };
    let config = configuration(args, checkpoint.as_ref())?;
    if let Some(explain) = args.explain {
        let tokenizer = checkpoint.and_then(|checkpoint| checkpoint.meta.tokenizer);
        let text = explanation(explain, &RunSpec::new(&config), &args.devices, tokenizer)?;
        super::print(&text);
        return Ok(0);
    }
    let out = match out {
        Some(out) => out,
        None => next_free(Path::new(RUNS)),
    };
    let goes_on = args.resume.as_deref().is_some_and(|from| is_of_run(from, &out));
    if !goes_on && !Store::open_to_read(&out).steps().map_err(TrainError::from)?.is_empty() {
        return Err(TrainError::Occupied { out }.into());
    }
    let (devices, retune) = (args.devices.clone(), args.retune);
    let options = RunOptions { out, devices, trace: args.trace.clone(), retune, faults };
    execute(RunSpec::new(&config), options, checkpoint, args.quiet)
}

fn execute(
    spec: RunSpec,
    options: RunOptions,
    checkpoint: Option<Checkpoint>,
    quiet: bool,
) -> anyhow::Result<i32> {
    let out = options.out.clone();
    let terminal = Terminal::new(quiet, spec.every.progress);
    let mut run = Run::start(spec, options, checkpoint, Box::new(terminal))?;
    run.emit_summary()?;
    let ending = train(&mut run)?;
    let resume = format!("continue it with: potluck train --resume {}", out.display());
    match ending {
        RunOutcome::Done { .. } => {
            let text = run.sample()?;
            if !text.is_empty() {
                super::print(&format!("{text}\n"));
            }
            if !quiet {
                print_line(&format!("done; the model is in {}", out.display()));
            }
            Ok(0)
        }
        RunOutcome::Interrupted(Interruption::Interrupt) => {
            print_line(&format!("interrupted; the run is saved: {resume}"));
            Ok(EXIT_INTERRUPTED)
        }
        RunOutcome::Interrupted(Interruption::Terminate) => {
            print_line(&format!("terminated; the run is saved: {resume}"));
            Ok(EXIT_RESTART)
        }
    }
}

/// Returns the run's directory and the checkpoint that `--resume` names.
fn resume_point(from: &str, out: Option<&Path>) -> anyhow::Result<(PathBuf, Checkpoint)> {
    let from = match (from, out) {
        ("latest", Some(out)) => out.to_path_buf(),
        ("latest", None) => newest(Path::new(RUNS)).ok_or_else(|| {
            UsageError(format!("there is no run in {RUNS}/ to resume; name one with --resume DIR"))
        })?,
        (path, _) => PathBuf::from(path),
    };
    let (checkpoint, warnings) = Checkpoint::load_path(&from).map_err(TrainError::from)?;
    warnings.iter().for_each(|warning| print_line(&format!("warning: {warning}")));
    Ok((out.map_or_else(|| run_of(&from), Path::to_path_buf), checkpoint))
}

/// Returns true if `--resume` names the run in the directory `out`.
fn is_of_run(from: &str, out: &Path) -> bool {
    let named = run_of(Path::new(from));
    let is_same = || named.canonicalize().ok().zip(out.canonicalize().ok());
    from == "latest" || is_same().is_some_and(|(named, out)| named == out)
}

/// Returns the run's directory: `from` itself, or `RUN` if `from` is a checkpoint
/// `RUN/checkpoints/step-N`.
fn run_of(from: &Path) -> PathBuf {
    let parent = from.parent().filter(|parent| parent.ends_with("checkpoints"));
    parent.and_then(Path::parent).unwrap_or(from).to_path_buf()
}

/// Resolves the configuration: the checkpoint's, the file's, the flags', later ones on top.
fn configuration(args: &TrainArgs, checkpoint: Option<&Checkpoint>) -> anyhow::Result<RunConfig> {
    let saved = checkpoint.map(saved_config).transpose()?;
    let text = args.config.as_deref().map(read::load).transpose()?;
    let mut overrides = Vec::new();
    if let Some(path) = &args.data {
        overrides.extend(Override::data(path)?);
    }
    let named = [
        ("--steps", "train.steps", args.steps),
        ("--seed", "train.seed", args.seed),
        ("--log-every", "train.log_every", args.log_every),
    ];
    for (flag, key, value) in named {
        overrides.extend(value.map(|value| Override::named(flag, key, value)));
    }
    for typed in &args.sets {
        overrides.push(Override::set(typed)?);
    }
    let file = args.config.as_deref().zip(text.as_deref());
    let Resolved { config, .. } = read::read(saved.clone(), file, &overrides)?;
    if let Some(saved) = saved {
        refuse_another(&saved, &config)?;
    }
    Ok(config)
}

/// Returns the specification of the run that wrote a checkpoint.
pub fn saved_spec(checkpoint: &Checkpoint) -> anyhow::Result<RunSpec> {
    Ok(RunSpec::new(&saved_config(checkpoint)?))
}

/// Reads the configuration stored in a checkpoint.
fn saved_config(checkpoint: &Checkpoint) -> anyhow::Result<RunConfig> {
    let place = Path::new("the checkpoint's configuration");
    Ok(read::read(None, Some((place, &checkpoint.meta.run)), &[])?.config)
}

/// Refuses to resume with another model, another tokenizer or another kind of optimizer (for
/// which the moments would have another meaning); everything else may change.
fn refuse_another(saved: &RunConfig, config: &RunConfig) -> Result<(), TrainError> {
    let (what, kept) = if saved.model != config.model {
        ("the configuration's [model]", "model")
    } else if saved.optim.kind != config.optim.kind {
        ("optim.kind", "optimizer")
    } else if saved.data.tokenizer != config.data.tokenizer {
        ("data.tokenizer", "tokenizer")
    } else {
        return Ok(());
    };
    let why = format!("a resumed run keeps its {kept}; start a new run for another one");
    Err(TrainError::Mismatch { what: what.into(), why })
}

/// Returns `runs/0001`, or the number after the highest that exists.
fn next_free(runs: &Path) -> PathBuf {
    let highest = numbered(runs).into_iter().max().unwrap_or(0);
    runs.join(format!("{:04}", highest + 1))
}

/// Returns the run with the highest number, if there is a run.
fn newest(runs: &Path) -> Option<PathBuf> {
    let highest = numbered(runs).into_iter().max()?;
    Some(runs.join(format!("{highest:04}")))
}

fn numbered(runs: &Path) -> Vec<u32> {
    let entries = fs::read_dir(runs).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resumed_run_keeps_its_model_and_its_optimizer() {
        let resumed = |edit: fn(&mut RunConfig)| {
            let (saved, mut config) = (RunConfig::default(), RunConfig::default());
            edit(&mut config);
            refuse_another(&saved, &config).map_err(|error| error.to_string())
        };
        assert_eq!(resumed(|c| c.optim.lr = 0.5), Ok(()));
        assert!(resumed(|c| c.model.layers = 5).unwrap_err().contains("[model]"));
        let kind = resumed(|c| c.optim.kind = crate::config::schema::OptimKind::Sgd);
        assert!(kind.unwrap_err().starts_with("optim.kind does not fit"));
    }

    #[test]
    fn runs_are_numbered_one_after_the_other() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(next_free(dir.path()), dir.path().join("0001"));
        assert_eq!(newest(dir.path()), None);
        fs::create_dir(dir.path().join("0009")).unwrap();
        fs::create_dir(dir.path().join("notes")).unwrap();
        assert_eq!(next_free(dir.path()), dir.path().join("0010"));
        assert_eq!(newest(dir.path()), Some(dir.path().join("0009")));
    }
}
