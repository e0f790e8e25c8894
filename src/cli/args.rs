//! The command line as it is typed.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Trains neural networks on every GPU you have, whoever made it.
#[derive(Debug, Parser)]
#[command(version, propagate_version = true, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the devices of this machine and their limits
    Devices {
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
        /// Try every kernel on an adapter, or on all of them, and say which are certified
        #[arg(long, value_name = "SELECTOR")]
        certify: Option<Option<String>>,
    },
    /// Train a model; without arguments a small GPT on the built-in corpus
    Train(TrainArgs),
    /// Print the loss of a checkpoint on a data set
    Eval(EvalArgs),
    /// Write text with a checkpoint
    Generate(GenerateArgs),
    /// Measure what the devices of this machine can do, or compare two such reports
    Bench(BenchArgs),
}

/// What `train` takes.
#[derive(Debug, Args)]
#[command(after_help = "All keys of the configuration: potluck train --explain keys")]
pub struct TrainArgs {
    /// A configuration in TOML; keys not in it have defaults
    pub config: Option<PathBuf>,
    /// A text file to train on (data.path)
    #[arg(long, value_name = "PATH")]
    pub data: Option<PathBuf>,
    /// The step at which the run ends (train.steps)
    #[arg(long, value_name = "N", value_parser = whole::<u64>)]
    pub steps: Option<u64>,
    /// The devices: auto (every hardware GPU, or else the CPU), all (every adapter, software ones
    /// too, and the CPU), or a list of cpu and indices or parts of names from `potluck devices`,
    /// *K behind one for K devices on it: 0 or rtx,radeon or vulkan:llvmpipe,cpu or llvmpipe*2,cpu
    #[arg(long, value_name = "SELECTOR,..", default_value = "auto")]
    pub devices: String,
    /// The run's directory [default: the next free runs/NNNN]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// The seed of everything random (train.seed)
    #[arg(long, value_name = "N", value_parser = whole::<u64>)]
    pub seed: Option<u64>,
    /// Continue a run: its directory, a checkpoint's, or `latest`, which is the run in --out, or
    /// else the one with the highest number in runs/
    #[arg(long, value_name = "latest|DIR")]
    pub resume: Option<String>,
    /// Time the kernels of GPUs and measure the shares of devices again, whatever is recorded or
    /// saved with the run
    #[arg(long)]
    pub retune: bool,

    /// Print something about the run instead of running it
    #[arg(long, value_enum, value_name = "WHAT")]
    pub explain: Option<Explain>,
    /// Print errors and the sample only
    #[arg(long)]
    pub quiet: bool,
    /// Steps between lines of progress where stderr is no terminal (train.log_every)
    #[arg(long, value_name = "N", value_parser = whole::<u64>)]
    pub log_every: Option<u64>,
    /// Write what each device does when to a file, for ui.perfetto.dev or chrome://tracing
    #[arg(long, value_name = "FILE", conflicts_with = "explain")]
    pub trace: Option<PathBuf>,
    /// Set any key of the configuration; may be repeated, the last one counts
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
}

/// What can be explained of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Explain {
    /// The training graph as a table
    Graph,
    /// The training graph in Graphviz's language: pipe it into `dot -Tsvg`
    Dot,
    /// Parameters, gradients, moments, activations and the peak of each device
    Memory,
    /// The instructions of a step, for each device
    Program,
    /// What devices send each other in a step
    Communication,
    /// Every kernel of a step, timed on the device
    Kernels,
    /// Every key of the configuration with its meaning, range and default
    Keys,
    /// The configuration as it would run
    Config,
}

/// The checkpoint that a command reads.
#[derive(Debug, Args)]
pub struct CheckpointArgs {
    /// A run's directory (its newest checkpoint) or a checkpoint's
    pub checkpoint: PathBuf,
    /// Use the run's checkpoint with the best validation loss instead of the newest
    #[arg(long)]
    pub best: bool,
    /// One device: auto (the first hardware GPU, or else the CPU), cpu, or an index or a part of a
    /// name from `potluck devices`, such as 0, llvmpipe or vulkan:llvmpipe
    #[arg(long, value_name = "SELECTOR", default_value = "auto")]
    pub devices: String,
}

/// What `eval` takes.
#[derive(Debug, Args)]
pub struct EvalArgs {
    #[command(flatten)]
    pub checkpoint: CheckpointArgs,
    /// Another text file; all of it is evaluated
    #[arg(long, value_name = "PATH", conflicts_with = "split")]
    pub data: Option<PathBuf>,
    /// Which split of the run's own data
    #[arg(long, value_enum, default_value = "val")]
    pub split: EvalSplit,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A split of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EvalSplit {
    /// What was not trained on
    Val,
    /// What was trained on
    Train,
}

/// What `generate` takes.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub checkpoint: CheckpointArgs,
    /// The text to continue [default: a line break]
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// How many tokens to write
    #[arg(long, default_value_t = 500, value_name = "N", value_parser = whole::<u64>)]
    pub tokens: u64,
    /// Below 1: safer choices; above: wilder ones; 0: always the most likely token
    #[arg(long, default_value_t = 0.8, value_name = "T", value_parser = temperature)]
    pub temperature: f64,
    /// Choose among this many of the most likely tokens only; 0: all
    #[arg(long, default_value_t = 0, value_name = "K", value_parser = whole::<usize>)]
    pub top_k: usize,
    /// The same seed writes the same text
    #[arg(long, default_value_t = 1337, value_name = "N", value_parser = whole::<u64>)]
    pub seed: u64,
}

/// What `bench` takes.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub command: Option<BenchCommand>,
    /// Devices, one after the other: selectors as for `potluck eval`, with commas between; or all,
    /// the CPU device and every adapter
    #[arg(long, value_name = "SELECTOR,..", default_value = "all")]
    pub devices: String,
    /// Fewer and shorter samples: a quarter of a minute per device, and not up to a minute
    #[arg(long)]
    pub quick: bool,
    /// Next to nothing, to see that everything runs
    #[arg(long, hide = true, conflicts_with = "quick")]
    pub tiny: bool,
    /// Also the training step of GPT-2 124M at context 1024, on hardware GPUs
    #[arg(long)]
    pub full: bool,
    /// Write the report as JSON to a file, or instead of the table to stdout: -
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
    /// The parts to measure
    #[arg(
        long,
        value_enum,
        value_name = "PART,..",
        value_delimiter = ',',
        default_value = "peaks,matmul,step"
    )]
    pub only: Vec<BenchPart>,
}

/// What `bench` does instead of measuring.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Say how much better B is than A, figure by figure
    Compare {
        /// A report: a file that `potluck bench --json` wrote
        a: PathBuf,
        /// The report that is set beside it
        b: PathBuf,
    },
    /// Measure how fast ranks exchange values: slices in memory, 2 to 8 ranks, 4 KiB to 256 MiB,
    /// and the gradients of devices
    Collectives(CollectivesArgs),
}

/// What `bench collectives` takes.
#[derive(Debug, Args)]
pub struct CollectivesArgs {
    /// The devices that sum gradients: selectors as for `potluck train`, one alone counts twice; or
    /// none, for slices in memory only
    #[arg(long, value_name = "SELECTOR,..", default_value = "auto")]
    pub devices: String,
    /// Numbers of ranks on slices in memory [default: 2,3,4,8, and 2,4 with --quick]
    #[arg(
        long,
        value_name = "N,..",
        value_delimiter = ',',
        value_parser = clap::value_parser!(u32).range(2..=64)
    )]
    pub ranks: Vec<u32>,
    /// Fewer sizes and samples: some seconds, and not about a minute
    #[arg(long)]
    pub quick: bool,
    /// Next to nothing, to see that everything runs
    #[arg(long, hide = true, conflicts_with = "quick")]
    pub tiny: bool,
    /// Every power of two and every number of ranks: some minutes
    #[arg(long)]
    pub full: bool,
    /// Write the report as JSON to a file, or instead of the table to stdout: -
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
    /// Draw the bus bandwidth of all-reduce over its size
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// A part of the suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchPart {
    /// Arithmetic, memory, transfers, dispatches
    Peaks,
    /// Matrix products over shapes
    Matmul,
    /// The training step of a GPT
    Step,
}

fn whole<T: std::str::FromStr>(typed: &str) -> Result<T, String> {
    typed.parse().map_err(|_| "expects a whole number from 0 up".into())
}

fn temperature(typed: &str) -> Result<f64, String> {
    match typed.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("expects a number from 0 up".into()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
