//! `potluck bench`: benchmarks of the devices of this machine, of several machines and of the link
//! between two, and comparisons of two reports.

use std::path::Path;
use std::{fs, io};

use super::args::{
    BenchArgs, BenchCommand, BenchPart, CollectivesArgs, LinkArgs, PipelineArgs, PipelineCut,
    ScalingArgs,
};
use super::{UsageError, bench_nodes, write_named};
use crate::ui::charts;
use crate::ui::terminal::{print_error, print_line};
use potluck_bench::{Effort, Options, Part, Report, collectives, pipeline, scaling};
use potluck_parallel::PipelineSchedule;
use potluck_train::runtime::error::{EXIT_CONFIGURATION, EXIT_RESTART};

/// Value of `--json` that selects stdout.
const STDOUT: &str = "-";

/// Runs the benchmark suite or the benchmark of collectives, of a link, of pipelines or of scaling,
/// joins another machine's benchmark, or compares two reports; returns the process's exit code.
pub fn run(args: &BenchArgs) -> anyhow::Result<i32> {
    match &args.command {
        Some(BenchCommand::Compare { a, b }) => {
            super::print(&potluck_bench::compare(&read(a)?, &read(b)?));
            Ok(0)
        }
        Some(BenchCommand::Collectives(args)) => collectives(args),
        Some(BenchCommand::Join(args)) => bench_nodes::join(args),
        Some(BenchCommand::Link(args)) => link(args),
        Some(BenchCommand::Pipeline(args)) => pipelines(args),
        Some(BenchCommand::Scaling(args)) => scale(args),
        None => {
            writable(args.report.json.as_deref(), "--json")?;
            let report = potluck_bench::run(&options(args), &mut |progress| print_line(progress))?;
            deliver(&report, args.report.json.as_deref())
        }
    }
}

fn collectives(args: &CollectivesArgs) -> anyhow::Result<i32> {
    writable(args.report.json.as_deref(), "--json")?;
    writable(args.svg.as_deref(), "--svg")?;
    let options = collectives::CollectiveOptions {
        devices: args.devices.clone(),
        effort: effort(args.report.tiny, args.quick),
        ranks: args.ranks.iter().map(|ranks| *ranks as usize).collect(),
        full: args.full,
    };
    let has_node_flags = args.secret.is_given() || args.network.congestion.is_some();
    if args.nodes.is_none() && has_node_flags {
        let why = "--congestion and the flags of the secret need --nodes N";
        return Err(UsageError(why.into()).into());
    }
    let report = match args.nodes {
        Some(nodes) => bench_nodes::collectives(nodes, args, &options)?,
        None => collectives::run(&options, &mut |progress| print_line(progress))?,
    };
    draw(args.svg.as_deref(), || charts::collectives::draw(&report))?;
    deliver(&report, args.report.json.as_deref())
}

fn link(args: &LinkArgs) -> anyhow::Result<i32> {
    let Some(address) = &args.address else { return bench_nodes::answer_link(args) };
    writable(args.report.json.as_deref(), "--json")?;
    let report = bench_nodes::measure_link(args, address, effort(args.report.tiny, args.quick))?;
    deliver(&report, args.report.json.as_deref())
}

/// Runs the benchmark of pipelines. If none of the requested pipelines can run, that is an error of
/// the command line, although there is a report of the reasons.
fn pipelines(args: &PipelineArgs) -> anyhow::Result<i32> {
    writable(args.report.json.as_deref(), "--json")?;
    writable(args.svg.as_deref(), "--svg")?;
    let report = pipeline::run(&pipeline_options(args), &mut |progress| print_line(progress))?;
    draw(args.svg.as_deref(), || charts::pipelines::draw(&report))?;
    let code = deliver(&report, args.report.json.as_deref())?;
    let is_empty = report.devices.iter().all(|device| device.figures.is_empty());
    if code == 0 && is_empty {
        print_error("no pipeline could run; the report has the reasons");
        return Ok(EXIT_CONFIGURATION);
    }
    Ok(code)
}

fn scale(args: &ScalingArgs) -> anyhow::Result<i32> {
    writable(args.report.json.as_deref(), "--json")?;
    writable(args.svg.as_deref(), "--svg")?;
    let options = scaling::ScalingOptions {
        devices: args.devices.clone(),
        effort: effort(args.report.tiny, args.quick),
        batch: args.batch.map(|batch| batch as usize),
    };
    let report = scaling::run(&options, &mut |progress| print_line(progress))?;
    draw(args.svg.as_deref(), || charts::scaling::draw(&report))?;
    deliver(&report, args.report.json.as_deref())
}

fn pipeline_options(args: &PipelineArgs) -> pipeline::PipelineBenchOptions {
    let (width, layers, context) = if args.report.tiny { (16, 2, 8) } else { (128, 8, 64) };
    pipeline::PipelineBenchOptions {
        devices: args.devices.clone(),
        effort: effort(args.report.tiny, args.quick),
        schedules: if args.schedules.is_empty() {
            PipelineSchedule::ALL.to_vec()
        } else {
            without_repeats(&args.schedules)
        },
        stages: sizes(&args.stages),
        micro_batches: sizes(&args.micro_batches),
        samples: args.micro_batch as usize,
        width: args.width.unwrap_or(width) as usize,
        layers: args.layers.unwrap_or(layers) as usize,
        context: args.context.unwrap_or(context) as usize,
        cut: match args.cut {
            PipelineCut::Even => pipeline::CutChoice::Even,
            PipelineCut::Measured => pipeline::CutChoice::Measured,
        },
    }
}

fn sizes(given: &[u32]) -> Vec<usize> {
    without_repeats(given).iter().map(|size| *size as usize).collect()
}

/// Values in their order without repetitions, so that each case is measured once.
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
fn draw(path: Option<&Path>, drawing: impl FnOnce() -> io::Result<String>) -> anyhow::Result<()> {
    if let Some(path) = path {
        write_named(path, drawing()?.as_bytes())?;
    }
    Ok(())
}

/// Checks that the file of a flag can be written, before anything is measured for it.
fn writable(path: Option<&Path>, flag: &str) -> Result<(), UsageError> {
    match path {
        Some(path) if path != Path::new(STDOUT) => super::writable(path, flag),
        _ => Ok(()),
    }
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
    let mut code = 0;
    for device in &report.devices {
        if let Some(error) = &device.error {
            print_error(&error.to_string());
            code = EXIT_RESTART;
        }
    }
    Ok(code)
}

fn effort(tiny: bool, quick: bool) -> Effort {
    if tiny {
        Effort::Tiny
    } else if quick {
        Effort::Quick
    } else {
        Effort::Normal
    }
}

fn options(args: &BenchArgs) -> Options {
    let mut parts = Vec::new();
    for part in &args.only {
        parts.push(match part {
            BenchPart::Peaks => Part::Peaks,
            BenchPart::Matmul => Part::Matmul,
            BenchPart::Robustness => Part::Robustness,
            BenchPart::Precision => Part::Precision,
            BenchPart::Step => Part::Step,
            BenchPart::Generation => Part::Generation,
        });
    }
    let effort = effort(args.report.tiny, args.quick);
    Options { devices: args.devices.clone(), effort, parts, full: args.full }
}

fn read(path: &Path) -> Result<Report, UsageError> {
    let text = fs::read_to_string(path)
        .map_err(|why| UsageError(format!("{}: cannot be read: {why}", path.display())))?;
    Report::from_json(&text).map_err(|why| UsageError(format!("{}: {why}", path.display())))
}
