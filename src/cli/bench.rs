//! `potluck bench`: benchmarks of the devices of this machine, of several machines and of the link
//! between two, and comparisons of two reports.

use std::fs;
use std::path::Path;

use super::args::{
    BenchArgs, BenchCommand, BenchPart, CollectivesArgs, LinkArgs, PipelineArgs, PipelineCut,
};
use super::{UsageError, bench_nodes, write_named};
use crate::bench::{self, Effort, Options, Part, Report, collectives, pipeline};
use crate::parallel::PipelineSchedule;
use crate::runtime::error::{EXIT_CONFIGURATION, EXIT_RESTART};
use crate::train::TrainError;
use crate::ui::terminal::print_line;

/// Value of `--json` that selects stdout.
const STDOUT: &str = "-";

/// Runs the benchmark suite or that of collectives, of a link or of pipelines, takes part in one of
/// another machine, or compares two reports; returns the process's exit code.
pub fn run(args: &BenchArgs) -> anyhow::Result<i32> {
    match &args.command {
        Some(BenchCommand::Compare { a, b }) => {
            super::print(&bench::compare(&read(a)?, &read(b)?));
            Ok(0)
        }
        Some(BenchCommand::Collectives(args)) => collectives(args),
        Some(BenchCommand::Join(args)) => bench_nodes::join(args),
        Some(BenchCommand::Link(args)) => link(args),
        Some(BenchCommand::Pipeline(args)) => pipelines(args),
        None => {
            writable(args.json.as_deref(), "--json")?;
            let report = bench::run(&options(args), &mut |progress| print_line(progress))?;
            deliver(&report, args.json.as_deref())
        }
    }
}

fn collectives(args: &CollectivesArgs) -> anyhow::Result<i32> {
    writable(args.json.as_deref(), "--json")?;
    writable(args.svg.as_deref(), "--svg")?;
    let options = collectives::CollectiveOptions {
        devices: args.devices.clone(),
        effort: effort(args.tiny, args.quick),
        ranks: args.ranks.iter().map(|ranks| *ranks as usize).collect(),
        full: args.full,
    };
    let report = match args.nodes {
        Some(nodes) => bench_nodes::collectives(nodes, args, &options)?,
        None => collectives::run(&options, &mut |progress| print_line(progress))?,
    };
    draw(args.svg.as_deref(), || collectives::svg::draw(&report))?;
    deliver(&report, args.json.as_deref())
}

fn link(args: &LinkArgs) -> anyhow::Result<i32> {
    let Some(address) = &args.address else { return bench_nodes::answer_link(args) };
    writable(args.json.as_deref(), "--json")?;
    let report = bench_nodes::measure_link(args, address, effort(args.tiny, args.quick))?;
    deliver(&report, args.json.as_deref())
}

/// Runs the benchmark of pipelines. If nothing that was asked for can run, that is an error of the
/// command line, although there is a report of the reasons.
fn pipelines(args: &PipelineArgs) -> anyhow::Result<i32> {
    writable(args.json.as_deref(), "--json")?;
    writable(args.svg.as_deref(), "--svg")?;
    let report = pipeline::run(&pipeline_options(args), &mut |progress| print_line(progress))?;
    draw(args.svg.as_deref(), || pipeline::svg::draw(&report))?;
    let code = deliver(&report, args.json.as_deref())?;
    let is_empty = report.devices.iter().all(|device| device.figures.is_empty());
    if code == 0 && is_empty {
        print_line("error: no pipeline could run; the report has the reasons");
        return Ok(EXIT_CONFIGURATION);
    }
    Ok(code)
}

fn pipeline_options(args: &PipelineArgs) -> pipeline::PipelineBenchOptions {
    let sizes = |given: &[u32]| {
        without_repeats(&given.iter().map(|size| *size as usize).collect::<Vec<_>>())
    };
    let size = |given: Option<u32>, tiny: u32, usual: u32| {
        given.unwrap_or(if args.tiny { tiny } else { usual }) as usize
    };
    pipeline::PipelineBenchOptions {
        devices: args.devices.clone(),
        effort: effort(args.tiny, args.quick),
        schedules: match args.schedules.is_empty() {
            true => PipelineSchedule::ALL.to_vec(),
            false => without_repeats(&args.schedules),
        },
        stages: sizes(&args.stages),
        micro_batches: sizes(&args.micro_batches),
        samples: args.micro_batch as usize,
        width: size(args.width, 16, 128),
        layers: size(args.layers, 2, 8),
        context: size(args.context, 8, 64),
        cut: match args.cut {
            PipelineCut::Even => pipeline::CutChoice::Even,
            PipelineCut::Measured => pipeline::CutChoice::Measured,
        },
    }
}

/// Returns the first of each equal values, in their order: a case is measured once.
fn without_repeats<T: Copy + PartialEq>(values: &[T]) -> Vec<T> {
    let mut kept = Vec::new();
    for value in values {
        if !kept.contains(value) {
            kept.push(*value);
        }
    }
    kept
}

/// Writes a drawing to the file of `--svg`, if there is one.
fn draw(path: Option<&Path>, drawing: impl FnOnce() -> String) -> Result<(), TrainError> {
    path.map_or(Ok(()), |path| write_named(path, drawing().as_bytes()))
}

/// Checks that the file of a flag can be written, before anything is measured for it.
fn writable(path: Option<&Path>, flag: &str) -> Result<(), UsageError> {
    let file = path.filter(|path| *path != Path::new(STDOUT));
    file.map_or(Ok(()), |path| super::writable(path, flag))
}

/// Prints a report, or writes it as JSON to the target of `--json`; returns the process's exit
/// code.
fn deliver(report: &Report, json: Option<&Path>) -> anyhow::Result<i32> {
    match json {
        Some(path) if path == Path::new(STDOUT) => {
            super::print(&report.to_json());
        }
        Some(path) => {
            super::print(&report.to_string());
            write_named(path, report.to_json().as_bytes())?;
        }
        None => {
            super::print(&report.to_string());
        }
    }
    let failed: Vec<&String> = report.devices.iter().filter_map(|d| d.error.as_ref()).collect();
    failed.iter().for_each(|error| print_line(&format!("error: {error}")));
    Ok(if failed.is_empty() { 0 } else { EXIT_RESTART })
}

fn effort(tiny: bool, quick: bool) -> Effort {
    match (tiny, quick) {
        (true, _) => Effort::Tiny,
        (_, true) => Effort::Quick,
        _ => Effort::Normal,
    }
}

fn options(args: &BenchArgs) -> Options {
    let part = |part: &BenchPart| match part {
        BenchPart::Peaks => Part::Peaks,
        BenchPart::Matmul => Part::Matmul,
        BenchPart::Step => Part::Step,
    };
    let parts = args.only.iter().map(part).collect();
    let effort = effort(args.tiny, args.quick);
    Options { devices: args.devices.clone(), effort, parts, full: args.full }
}

fn read(path: &Path) -> Result<Report, UsageError> {
    let refused = |why: String| UsageError(format!("{}: {why}", path.display()));
    let text = fs::read_to_string(path);
    let text = text.map_err(|why| refused(format!("cannot be read: {why}")))?;
    Report::from_json(&text).map_err(|why| refused(why.to_string()))
}
