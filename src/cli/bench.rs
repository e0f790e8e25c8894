//! `potluck bench`: what the devices here can do, and how two reports compare.

use std::fs;
use std::path::Path;

use super::Usage;
use super::args::{BenchArgs, BenchCommand, BenchPart};
use crate::bench::{self, Effort, Options, Part, Report};
use crate::files;
use crate::train::TrainError;
use crate::train::error::EXIT_RESTART;

/// What `--json` takes for stdout.
const STDOUT: &str = "-";

/// Runs the suite or compares two reports; the exit code.
pub fn run(args: &BenchArgs) -> anyhow::Result<i32> {
    if let Some(BenchCommand::Compare { a, b }) = &args.command {
        super::print(&bench::compare(&read(a)?, &read(b)?));
        return Ok(0);
    }
    if let Some(path) = args.json.as_deref().filter(|path| *path != Path::new(STDOUT)) {
        super::writable(path, "--json")?;
    }
    let report = bench::run(&options(args), &mut |progress| eprintln!("{progress}"))?;
    match args.json.as_deref() {
        Some(path) if path == Path::new(STDOUT) => {
            super::print(&report.to_json());
        }
        Some(path) => {
            super::print(&report.to_string());
            let failed = |why| TrainError::Io { path: path.into(), why };
            files::replace(path, report.to_json().as_bytes()).map_err(failed)?;
        }
        None => {
            super::print(&report.to_string());
        }
    }
    let failed: Vec<&String> = report.devices.iter().filter_map(|d| d.error.as_ref()).collect();
    failed.iter().for_each(|error| eprintln!("error: {error}"));
    Ok(if failed.is_empty() { 0 } else { EXIT_RESTART })
}

fn options(args: &BenchArgs) -> Options {
    let effort = match (args.tiny, args.quick) {
        (true, _) => Effort::Tiny,
        (_, true) => Effort::Quick,
        _ => Effort::Normal,
    };
    let part = |part: &BenchPart| match part {
        BenchPart::Peaks => Part::Peaks,
        BenchPart::Matmul => Part::Matmul,
        BenchPart::Step => Part::Step,
    };
    let parts = args.only.iter().map(part).collect();
    Options { devices: args.devices.clone(), effort, parts, full: args.full }
}

fn read(path: &Path) -> Result<Report, Usage> {
    let refused = |why: String| Usage(format!("{}: {why}", path.display()));
    let text = fs::read_to_string(path);
    let text = text.map_err(|why| refused(format!("cannot be read: {why}")))?;
    Report::from_json(&text).map_err(|why| refused(why.to_string()))
}
