//! Benchmark of the ways of parallelism on CPU devices of one thread: training steps of a GPT on
//! one such device, on two of them side by side without each other, as data parallelism, as a
//! pipeline and as a tensor group, medians of some rounds, in which the ways take turns.
//!
//!     cargo bench --bench layouts -- [--rounds N] [--steps N] [--width N] [--layers N]
//!                                    [--context N] [--batch N] [--micro-batch N] [--shares A,B]
//!
//!     alone       one device with the whole batch
//!     two alone   the same twice at a time, each with the whole batch: what they lose is what two
//!                 busy cores take from each other
//!     data        two devices with half of the batch each
//!     pipeline    two stages of four micro-batches
//!     tensor      a tensor group of two ranks, which runs two micro-batches at a time if a
//!                 `--micro-batch` smaller than the batch is given
//!
//! The column `/alone` is the time of a step by that of one device in the same round, and `/lost`
//! the same without what two busy cores take from each other. For tensor groups, the last line
//! tells which part of the steps went to all-reduces: sums, and waiting for the other rank.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use potluck_core::HostTensor;
use potluck_graph::Unary;
use potluck_graph::model::{GptConfig, gpt};
use potluck_graph::optim::Optimizer;
use potluck_train::{PipelineOptions, Shares, TensorOptions, TrainError, Trainer, TrainerOptions};

const WAYS: [&str; 5] = ["alone", "two alone", "data", "pipeline", "tensor"];
const VOCABULARY: usize = 65;
/// Channels of a head.
const HEAD: usize = 64;
/// Steps before those that are measured.
const WARM_UP: usize = 2;
/// File of the trace of a tensor group.
const TRACE: &str = "layouts-trace.json";

fn main() -> Result<(), TrainError> {
    if let Some(way) = text("--way") {
        println!("{}", step_seconds(&way)?);
        return Ok(());
    }
    let rounds = number("--rounds", 5);
    let mut seconds = vec![Vec::new(); WAYS.len()];
    for _ in 0..rounds {
        for (way, seconds) in WAYS.iter().zip(&mut seconds) {
            let children: Vec<Child> = match *way {
                "two alone" => vec![start("alone", 1), start("alone", 1)],
                "alone" => vec![start("alone", 1)],
                _ => vec![start(way, 2)],
            };
            let times: Vec<f64> = children.into_iter().map(end).collect();
            seconds.push(times.iter().sum::<f64>() / times.len() as f64);
        }
    }
    let ratio = |way: usize, to: usize| {
        let pairs = seconds[way].iter().zip(&seconds[to]);
        median(pairs.map(|(own, other)| own / other).collect())
    };
    println!("{:12}{:>10}{:>10}{:>10}", "", "ms", "/alone", "/lost");
    for (way, name) in WAYS.iter().enumerate() {
        let ms = 1e3 * median(seconds[way].clone());
        let (to_alone, to_lost) = (ratio(way, 0), ratio(way, 0) / ratio(1, 0));
        println!("{name:12}{ms:10.1}{to_alone:10.3}{to_lost:10.3}");
    }
    let (sums, waits) = parts_of_trace(Path::new(TRACE));
    println!("tensor: {:.1} % of the time in sums, {:.1} % waiting", 1e2 * sums, 1e2 * waits);
    Ok(())
}

/// Starts this program again for one way, whose devices share so many threads.
fn start(way: &str, threads: usize) -> Child {
    let program = std::env::current_exe().expect("the path of this program");
    let arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    Command::new(program)
        .args(arguments)
        .args(["--way", way])
        .env("RAYON_NUM_THREADS", threads.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program starts")
}

/// Waits for the end of a program, and returns the seconds that it prints.
fn end(mut child: Child) -> f64 {
    let mut text = String::new();
    let output = child.stdout.as_mut().expect("its output is piped");
    output.read_to_string(&mut text).expect("it prints text");
    assert!(child.wait().expect("it ends").success(), "{text}");
    text.trim().parse().expect("a number of seconds")
}

/// Returns the median seconds of the steps of a way.
fn step_seconds(way: &str) -> Result<f64, TrainError> {
    let (width, batch) = (number("--width", 512), number("--batch", 4));
    let context = number("--context", 256);
    let config = GptConfig {
        vocabulary: VOCABULARY,
        context,
        positions: context,
        layers: number("--layers", 8),
        heads: (width / HEAD).max(1),
        width,
        bias: false,
        dropout: 0.0,
        tie: true,
        activation: Unary::Gelu,
    };
    let adamw = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
    let devices = if way == "alone" { "cpu" } else { "cpu*2" };
    let mut options = TrainerOptions {
        shares: Shares::Even,
        tune_s: 0.0,
        ..TrainerOptions::new(devices, adamw, batch)
    };
    match way {
        "pipeline" => {
            options.pipeline = PipelineOptions { stages: 2, ..PipelineOptions::default() };
            options.micro_batch_size = (batch / 4).max(1);
        }
        "tensor" => {
            let shares = text("--shares").unwrap_or_default();
            let shares = shares.split(',').filter_map(|share| share.parse().ok()).collect();
            options.tensor = TensorOptions { ranks: 2, shares };
            options.micro_batch_size = number("--micro-batch", batch);
            options.trace = Some(TRACE.into());
        }
        _ => {}
    }
    let mut trainer = Trainer::new(gpt(&config)?, &options)?;
    let ids = |factor: usize| -> Vec<u32> {
        (0..batch * context).map(|at| (at * factor % VOCABULARY) as u32).collect()
    };
    let inputs = [("tokens", HostTensor::Int(ids(7))), ("targets", HostTensor::Int(ids(11)))];
    let mut seconds = Vec::new();
    for step in 0..WARM_UP + number("--steps", 5) {
        let started = Instant::now();
        trainer.step(&inputs, 1e-3)?;
        if step >= WARM_UP {
            seconds.push(started.elapsed().as_secs_f64());
        }
    }
    trainer.finish_trace()?;
    Ok(median(seconds))
}

/// Returns the parts of the time of device threads that went to sums of all-reduces and to waiting
/// for what they need, by a trace.
fn parts_of_trace(path: &Path) -> (f64, f64) {
    let text = std::fs::read_to_string(path).expect("the trace was written");
    let trace: serde_json::Value = serde_json::from_str(&text).expect("a trace is JSON");
    let events = trace.as_array().or_else(|| trace["traceEvents"].as_array());
    let (mut sums, mut waits) = (0.0, 0.0);
    let (mut first, mut last) = (f64::INFINITY, 0.0f64);
    let mut ranks = std::collections::BTreeSet::new();
    for event in events.expect("a trace has events") {
        let (Some(name), Some(duration)) = (event["name"].as_str(), event["dur"].as_f64()) else {
            continue;
        };
        let at = event["ts"].as_f64().unwrap_or(0.0);
        (first, last) = (first.min(at), last.max(at + duration));
        if name.starts_with("reduce all-reduce") {
            sums += duration;
            ranks.insert(event["pid"].to_string());
        } else if name.starts_with("wait for all-reduce") {
            waits += duration;
        }
    }
    let all = (last - first) * ranks.len().max(1) as f64;
    (sums / all, waits / all)
}

fn text(name: &str) -> Option<String> {
    let arguments: Vec<String> = std::env::args().collect();
    let at = arguments.iter().position(|argument| argument == name)?;
    arguments.get(at + 1).cloned()
}

fn number(name: &str, default: usize) -> usize {
    text(name).map_or(default, |text| text.parse().expect("a number"))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
