//! Command-line arguments, as clap parses and documents them.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{
    NonEmptyStringValueParser, PathBufValueParser, PossibleValue, TypedValueParser,
};
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

use super::hardware::parts::HardwarePart;
use super::runs_directory::{RUNS, named_run};
use super::secrets::SecretArgs;
use super::unknown_flags::with_tip;
use crate::ui::log::LogFormat;
use potluck_net::Congestion;
use potluck_net::cluster::NODES_MAX;
use potluck_net::nodes::{all_addresses, resolve};
use potluck_parallel::PipelineSchedule;
use potluck_train::hugging_face::FileType;

/// Trains neural networks on every GPU you have, from any vendor
#[derive(Debug, Parser)]
#[command(version, propagate_version = true, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Returns the command line, parsed.
    ///
    /// # Errors
    /// Returns `clap::Error` for arguments that do not parse or do not go together, and for
    /// `--help` and `--version`.
    pub fn checked(words: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let cli = Self::try_parse_from(words).map_err(with_tip)?;
        // A flag cannot require a value of another flag in clap.
        if let Command::Train(args) = &cli.command
            && args.svg.is_some()
            && args.explain != Some(Explain::Schedule)
        {
            let why = "the argument '--svg <FILE>' goes with '--explain schedule' only";
            return Err(Self::command().error(ErrorKind::MissingRequiredArgument, why));
        }
        Ok(cli)
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// List the devices of this machine and their limits
    Devices {
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
        /// Certify every kernel on an adapter, or on all of them, and list the result
        #[arg(long, value_name = "SELECTOR")]
        certify: Option<Option<String>>,
    },
    /// Train a model; without arguments a small GPT on the built-in corpus
    Train(Box<TrainArgs>),
    /// Show how a run would be spread over devices, and why, without running it: measures them,
    /// and compares every layout
    #[command(after_help = "\
Takes the line of `potluck train`. Named devices and given layouts, such as --pipeline 2, are kept;
with --devices auto, devices that make a step longer are left out.")]
    Plan(Box<PlanArgs>),
    /// Take part in a run that another machine started with `potluck train --nodes N`
    Join(JoinArgs),
    /// Start or continue a run over several machines by the same line on each of them, as a
    /// launcher types it
    #[command(after_help = "\
The place of a process is told by flags, by POTLUCK_RANK, POTLUCK_WORLD, POTLUCK_LOCAL_RANK,
POTLUCK_LOCAL_WORLD and POTLUCK_ADDRESS, or by the launcher: torchrun and Ray Train, Open MPI,
MPICH and Intel MPI, srun, SkyPilot, Kubernetes' Indexed Job and JobSet. Rank 0 trains, from the
newest checkpoint in --out if there is one; the others join it, and join again after
exit code 75.")]
    Launch(Box<LaunchArgs>),
    /// Make a new code for runs over several machines, and print it or write it to a file
    Secret {
        /// Write the code to this new file, which only its owner can read, for --secret-file of
        /// train, join and bench
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Prepare data for training
    #[command(subcommand)]
    Data(DataCommand),
    /// Print the loss of a checkpoint on a data set
    Eval(EvalArgs),
    /// Generate text with a checkpoint
    Generate(GenerateArgs),
    /// Talk to a model: lines from stdin, answers on stdout; /reset begins anew, /exit ends
    Chat(ChatArgs),
    /// Predict samples with a checkpoint: classes with probabilities, or values, as a CSV file
    Predict(PredictArgs),
    /// Write the model of a run for Hugging Face's transformers, as a GGUF file for llama.cpp and
    /// others, or as a safetensors file of its parameters
    Export(ExportArgs),
    /// List the runs of a directory with their steps, losses, devices and states
    Runs(RunsArgs),
    /// Benchmark the devices of this machine, or compare two benchmark reports
    Bench(BenchArgs),
    /// Report on the graphics cards of this machine within an hour: whether all is right, how fast,
    /// and why; one archive to send
    Hardware(HardwareArgs),
    /// Print the completions of command lines for a shell
    #[command(after_help = "\
bash:        potluck completions bash > ~/.local/share/bash-completion/completions/potluck
zsh:         potluck completions zsh > DIR/_potluck, for a DIR of $fpath
fish:        potluck completions fish > ~/.config/fish/completions/potluck.fish
PowerShell:  potluck completions powershell >> $PROFILE")]
    Completions {
        /// Shell that reads them
        shell: Shell,
    },
    /// Write the pages of the manual to a directory, for man
    Man {
        /// Directory, such as ~/.local/share/man/man1
        #[arg(value_name = "DIR")]
        directory: PathBuf,
    },
}

/// Subcommands of `data`.
#[derive(Debug, Subcommand)]
pub enum DataCommand {
    /// Make token ids of texts, in parallel; one that was stopped goes on where it was
    Prepare(PrepareArgs),
}

/// Arguments of `plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Plan for the machines of this file, which need not be here: cards by name, links by rate and
    /// latency; nothing is measured
    #[arg(long, value_name = "FILE", conflicts_with = "devices")]
    pub machines: Option<PathBuf>,
    /// Print JSON instead of tables
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub train: TrainArgs,
}

/// Arguments of `data prepare`.
#[derive(Debug, Args)]
pub struct PrepareArgs {
    /// Texts, files of JSON Lines with a document in each line (.jsonl, .ndjson), and directories
    /// of them; .gz behind the name is unpacked
    #[arg(required = true, value_name = "INPUT")]
    pub inputs: Vec<PathBuf>,
    /// tokenizer.json, the directory of a model that has one, or org/name of a model that
    /// `hf download` has put in the cache
    #[arg(long, value_name = "FILE|DIR|ORG/NAME")]
    pub tokenizer: PathBuf,
    /// Directory to write: tokens.bin, tokens.json and tokenizer.json
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Key of the text in a line of JSON
    #[arg(long, value_name = "KEY", default_value = "text")]
    pub key: String,
    /// Token behind every document, or none [default: the eos_token of tokenizer_config.json beside
    /// the tokenizer, or else the one of its tokens that is named as one]
    #[arg(long, value_name = "TOKEN")]
    pub end_token: Option<String>,
    /// Take what looks like a special token in a text for one, instead of for text
    #[arg(long)]
    pub allow_special: bool,
    /// Print no progress
    #[arg(long)]
    pub quiet: bool,
}

/// Arguments of `train`. A flag that is given twice counts as it is given last, so that flags can
/// be added to a command.
#[derive(Clone, Debug, Args)]
#[command(args_override_self = true)]
#[command(after_help = "All keys of the configuration: potluck train --explain keys")]
pub struct TrainArgs {
    /// Configuration file in TOML; keys not in it have their defaults
    pub config: Option<PathBuf>,
    /// Data to train on (data.path): a text, a token file, a CSV table, or a directory of images
    /// and labels as MNIST and CIFAR-10 have them, of NumPy arrays, or of pictures by class
    #[arg(long, value_name = "PATH")]
    pub data: Option<PathBuf>,
    /// Step after which the run ends (train.steps)
    #[arg(long, value_name = "N", value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub steps: Option<u64>,
    /// Passes through the training split after which the run ends, instead of --steps
    /// (train.epochs)
    #[arg(long, value_name = "N", value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub epochs: Option<u64>,
    /// Samples per step, over all devices (train.batch)
    #[arg(long, value_name = "N", value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub batch: Option<u64>,
    /// The most samples that a device runs at a time, or auto, as many as fit its memory: less
    /// memory, the same gradient (train.micro_batch_size)
    #[arg(long, value_name = "N")]
    pub micro_batch: Option<String>,
    /// Arithmetic of matrix products: f32, or mixed, which rounds what is multiplied to f16 and
    /// sums in f32 (train.precision)
    #[arg(long, value_name = "CLASS")]
    pub precision: Option<String>,
    /// Learning rate after the warm-up (optim.lr)
    #[arg(long, value_name = "LR", value_parser = non_negative, allow_negative_numbers = true)]
    pub lr: Option<f64>,
    /// Steps between evaluations on the validation split; 0: none (train.eval_every)
    #[arg(long, value_name = "N", value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub eval_every: Option<u64>,
    /// Evaluations without a better one after which the run ends (train.patience)
    #[arg(long, value_name = "N", value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub patience: Option<u64>,
    /// Devices: auto (every hardware GPU, or else the CPU), all (every adapter, software ones
    /// too, and the CPU), or a comma-separated list of cpu and of indices or parts of names from
    /// `potluck devices`, each with an optional suffix *K for K ranks on it: 0 or rtx,radeon or
    /// vulkan:llvmpipe,cpu or llvmpipe*2,cpu
    /// [default: auto, or the devices of the resumed run] (parallel.devices)
    #[arg(long, value_name = "SELECTOR,..")]
    pub devices: Option<String>,
    /// Cut the model into the K stages of a pipeline, one per device; n devices make n/K pipelines;
    /// 1 for none, also where a plan would take them (parallel.pipeline_stages)
    #[arg(long, value_name = "K", value_parser = stages, allow_negative_numbers = true)]
    pub pipeline: Option<u64>,
    /// Divide the tensors of the model, or of each stage, among K devices that compute every sample
    /// together; 1 for none, also where a plan would take them (parallel.tensor_ranks)
    #[arg(long, value_name = "K", value_parser = stages, allow_negative_numbers = true)]
    pub tensor: Option<u64>,
    /// Schedule of a pipeline: 1f1b, gpipe, interleaved (with 2 model chunks per device, or
    /// parallel.virtual_stages) or zero-bubble (parallel.schedule)
    #[arg(long, value_name = "S")]
    pub schedule: Option<String>,
    /// Machines of the run, this one included: it waits until the others have typed the line that
    /// it prints, `potluck join ADDR`
    #[arg(long, value_name = "N", conflicts_with = "explain")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(NODES_MAX)))]
    pub nodes: Option<u32>,
    /// With --nodes: address and UDP port at which to listen [default: port 7717 of all addresses]
    #[arg(long, value_parser = listening, value_name = "ADDR:PORT")]
    pub listen: Option<SocketAddr>,
    /// With --nodes: addresses at which the others reach this machine, up to 8 [default: those of
    /// its networks, at the port of --listen]
    #[arg(long, value_parser = advertised, value_delimiter = ',', value_name = "ADDR[:PORT],..")]
    pub advertise: Vec<SocketAddr>,
    #[command(flatten)]
    pub secret: SecretArgs,
    #[command(flatten)]
    pub network: NetworkArgs,
    /// With --nodes: give up with exit code 75 if the others are not here after so long [default:
    /// none on a terminal, else 600]
    #[arg(long, value_name = "SECONDS", value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub wait: Option<u64>,
    /// Directory of the run [default: the next free runs/NNNN]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Name of a new run: its directory is runs/NAME
    #[arg(long, conflicts_with = "out")]
    pub name: Option<String>,
    /// Seed of all random numbers (train.seed)
    #[arg(long, value_name = "N", value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Resume a run: its directory, its name in runs/, a checkpoint's directory, or `latest`, which
    /// is the run in --out, or else the one in runs/ that changed last and has a checkpoint. With
    /// another --out, or from a checkpoint outside a run, a new run starts there
    #[arg(long, value_name = "latest|DIR")]
    pub resume: Option<PathBuf>,
    /// Start a new run from a model: the directory of a run, its name in runs/, or `latest`; the
    /// directory of a checkpoint, or of a model in Hugging Face's files, or org/name of one that
    /// `hf download` has put in the cache. Its keys of the model are taken over. Or from weights
    /// alone, in a file of safetensors, whose model the keys describe. The learning rate is a
    /// tenth of that of a new model, and the warm-up 3 % of train.steps
    #[arg(long, value_name = "RUN|DIR|ORG/NAME|FILE", conflicts_with = "resume")]
    pub init: Option<String>,
    /// If the tokenizer (data.tokenizer, or the one beside token ids) has more tokens than the
    /// model of --init: give the model rows for them, each the mean of its own. Without this, such
    /// data are refused
    #[arg(long, requires = "init")]
    pub add_tokens: bool,
    /// Repeat the autotuning of GPU kernels and the measurement of shares, and ignore cached and
    /// saved results
    #[arg(long)]
    pub retune: bool,

    /// Print a description of the run instead of running it
    #[arg(long, value_enum, value_name = "WHAT")]
    #[arg(conflicts_with_all = ["status", "log_file"])]
    pub explain: Option<Explain>,
    /// Print only warnings, errors and the sample
    #[arg(long)]
    pub quiet: bool,
    /// Steps between progress lines if stderr is not a terminal (train.log_every)
    #[arg(long, value_name = "N", value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub log_every: Option<u64>,
    /// Write a timeline of all devices to a file, for ui.perfetto.dev or chrome://tracing: at most
    /// two million events
    #[arg(long, value_name = "FILE", conflicts_with = "explain")]
    pub trace: Option<PathBuf>,
    /// With --explain schedule: draw the chart to an SVG file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Set any key of the configuration (optim.lr=1e-4, or lr=1e-4 where no other section has that
    /// key); may be repeated, the last value counts
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Answer to SIGUSR1, the warning of a job manager before the time of the job is up
    #[arg(long, value_enum, value_name = "WHAT", default_value = "save")]
    pub on_usr1: Usr1Answer,
    #[command(flatten)]
    pub watched: WatchedArgs,
}

/// Arguments of the network to other nodes.
#[derive(Clone, Debug, Default, Args)]
pub struct NetworkArgs {
    /// Congestion control of what this machine sends to other nodes: bbr is faster where packets
    /// are lost for other reasons than full queues, as on Wi-Fi [default: cubic]
    #[arg(long, value_name = "cubic|bbr")]
    pub congestion: Option<Congestion>,
}

/// Answer to SIGUSR1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Usr1Answer {
    /// Save a checkpoint and go on
    Save,
    /// Save a checkpoint and end all nodes with exit code 75
    Stop,
}

/// Arguments of commands that run for long without a person beside them.
#[derive(Clone, Debug, Args)]
pub struct WatchedArgs {
    /// Answer GET /healthz (200 while steps come, else 503), /metrics (for Prometheus) and /status
    /// (JSON) by HTTP at a TCP port of this machine alone, or at an address. Others than loopback
    /// ones need --status-token-file
    #[arg(long, value_parser = status_address, value_name = "PORT|ADDR:PORT")]
    pub status: Option<SocketAddr>,
    /// With --status: file with the token, of 16 to 128 characters, that requests must have, as in
    /// Authorization: Bearer TOKEN; only its owner may read it
    #[arg(long, value_name = "FILE", requires = "status")]
    pub status_token_file: Option<PathBuf>,
    /// Form of the lines on stderr: text, or json, in which each line is an object with time,
    /// level, node, rank where it is known, and message
    #[arg(long, value_name = "FORM", default_value = "text")]
    pub log: LogFormat,
    /// Append the lines on stderr to a file too; text has time, level and node there
    #[arg(long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,
    /// Time for the checkpoint after SIGTERM, behind which whoever sent it uses force; then the
    /// process ends with exit code 75 all the same, and the last checkpoint is as it was
    #[arg(long, value_parser = seconds, value_name = "SECONDS", default_value = "25")]
    pub term_timeout: Duration,
}

impl ValueEnum for LogFormat {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Text, Self::Json]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(match self {
            Self::Text => "text",
            Self::Json => "json",
        }))
    }
}

/// Arguments of `join`.
#[derive(Debug, Args)]
pub struct JoinArgs {
    /// Host and UDP port of the first node [default port: 7717]
    #[arg(value_name = "HOST[:PORT]")]
    pub address: String,
    /// Devices of this machine that take part, as for `potluck train` [default: auto]
    #[arg(long, value_name = "SELECTOR,..")]
    pub devices: Option<String>,
    /// Address and UDP port at which this node listens for the others [default: any free port]
    #[arg(long, value_parser = listening, value_name = "ADDR:PORT")]
    pub listen: Option<SocketAddr>,
    /// Addresses at which the other nodes reach this one, besides the one at which the first node
    /// sees it, up to 8 [default: those of its networks, at the port of --listen]
    #[arg(long, value_parser = advertised, value_delimiter = ',', value_name = "ADDR[:PORT],..")]
    pub advertise: Vec<SocketAddr>,
    #[command(flatten)]
    pub secret: SecretArgs,
    #[command(flatten)]
    pub network: NetworkArgs,
    /// This machine's copy of the run's data: its samples are read here, and not sent by the first
    /// node; its hash must be that of the first node's data
    #[arg(long, value_name = "PATH")]
    pub data: Option<PathBuf>,
    /// Try again for so long what time heals: a name or a first node that is not there yet, a run
    /// that is full or about to end, a first node that goes before the start [default: 0, which
    /// gives the first node 5 s to answer]
    #[arg(long, value_name = "SECONDS", value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub wait: Option<u64>,
    /// Number that this node is to have, from 1 on, so that its devices have the same ranks in each
    /// start [default: the one that it had before in a run that is resumed, else by arrival]
    #[arg(long, value_name = "K")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..i64::from(NODES_MAX)))]
    pub node: Option<u32>,
    /// Join only the run of this name, which the first node of a resumed run prints
    #[arg(long, value_name = "NAME")]
    pub run: Option<String>,
    /// Join again after a run that ended with exit code 75, unless a signal to this process ended
    /// it: the first node is expected to be started again
    #[arg(long)]
    pub stay: bool,
    /// Set a key of this node alone: train.device_memory_mib, train.submission_ms, train.tune_s, or
    /// with --data data.val_path; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Print only warnings and errors
    #[arg(long)]
    pub quiet: bool,
    #[command(flatten)]
    pub watched: WatchedArgs,
}

/// Arguments of `launch`.
#[derive(Debug, Args)]
pub struct LaunchArgs {
    /// Rank of this process, from 0 on [default: POTLUCK_RANK, or what the launcher says]
    #[arg(long, value_name = "K", help_heading = "Place")]
    pub rank: Option<u32>,
    /// Number of processes of the run [default: POTLUCK_WORLD, or what the launcher says]
    #[arg(long, value_name = "N", help_heading = "Place")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(NODES_MAX)))]
    pub world: Option<u32>,
    /// Rank among the processes of this host [default: POTLUCK_LOCAL_RANK, or what the launcher
    /// says, or 0]
    #[arg(long, value_name = "K", help_heading = "Place")]
    pub local_rank: Option<u32>,
    /// Number of processes on this host, which share its graphics cards out [default:
    /// POTLUCK_LOCAL_WORLD, or what the launcher says, or 1]
    #[arg(long, value_name = "N", help_heading = "Place")]
    pub local_world: Option<u32>,
    /// Host and UDP port of the process with rank 0 [default: POTLUCK_ADDRESS, or what the launcher
    /// says]
    #[arg(long, value_name = "HOST[:PORT]", help_heading = "Place")]
    pub address: Option<String>,
    /// Read the variables of the launcher, or only flags and POTLUCK_*
    #[arg(long, value_enum, default_value = "auto", help_heading = "Place")]
    pub launcher: LauncherChoice,
    #[command(flatten)]
    pub train: TrainArgs,
}

/// Launchers whose variables count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LauncherChoice {
    /// Those of all launchers that are known
    Auto,
    /// None
    None,
}

/// Output of `train --explain`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Explain {
    /// The training graph as a table
    Graph,
    /// The training graph in Graphviz's DOT language: pipe it into `dot -Tsvg`
    Dot,
    /// Memory of each device: parameters, gradients, moments, activations and the peak; exit code
    /// 78 if there is not as much
    Memory,
    /// The instructions of a step on each device
    Program,
    /// Bytes and messages that devices send each other in a step
    Communication,
    /// Gantt chart of a step, from measured times of blocks
    Schedule,
    /// Every kernel of a step, timed on each device alone
    Kernels,
    /// Every key of the configuration with its meaning, range and default
    Keys,
    /// The resolved configuration
    Config,
}

/// Flag that sets a key of the configuration, with its value if it was typed.
pub struct KeyFlag {
    pub flag: &'static str,
    pub key: &'static str,
    pub value: Option<String>,
}

impl KeyFlag {
    fn of(flag: &'static str, key: &'static str, value: Option<String>) -> Self {
        Self { flag, key, value }
    }

    fn of_number(flag: &'static str, key: &'static str, number: Option<u64>) -> Self {
        Self::of(flag, key, number.map(|number| number.to_string()))
    }
}

fn part_flags(stages: Option<u64>, ranks: Option<u64>, schedule: Option<&String>) -> [KeyFlag; 3] {
    [
        KeyFlag::of_number("--pipeline", "parallel.pipeline_stages", stages),
        KeyFlag::of_number("--tensor", "parallel.tensor_ranks", ranks),
        KeyFlag::of("--schedule", "parallel.schedule", schedule.cloned()),
    ]
}

impl TrainArgs {
    /// Returns the flags that set keys to what was typed, as it is.
    pub fn key_flags(&self) -> Vec<KeyFlag> {
        let lr = self.lr.map(|lr| format!("{lr:?}"));
        let mut flags = vec![
            KeyFlag::of_number("--steps", "train.steps", self.steps),
            KeyFlag::of_number("--epochs", "train.epochs", self.epochs),
            KeyFlag::of_number("--batch", "train.batch", self.batch),
            KeyFlag::of("--micro-batch", "train.micro_batch_size", self.micro_batch.clone()),
            KeyFlag::of("--precision", "train.precision", self.precision.clone()),
            KeyFlag::of("--lr", "optim.lr", lr),
            KeyFlag::of_number("--eval-every", "train.eval_every", self.eval_every),
            KeyFlag::of_number("--patience", "train.patience", self.patience),
            KeyFlag::of_number("--seed", "train.seed", self.seed),
            KeyFlag::of_number("--log-every", "train.log_every", self.log_every),
        ];
        flags.extend(part_flags(self.pipeline, self.tensor, self.schedule.as_ref()));
        flags
    }
}

impl CheckpointArgs {
    /// Returns the flags that set keys to what was typed, as it is.
    pub fn key_flags(&self) -> [KeyFlag; 3] {
        part_flags(self.pipeline, self.tensor, self.schedule.as_ref())
    }
}

/// Checkpoint that a command reads, and the devices that run it.
#[derive(Debug, Args)]
pub struct CheckpointArgs {
    /// Directory of a run (for its newest checkpoint), of a checkpoint, or of a model in Hugging
    /// Face's files, org/name of one that `hf download` has put in the cache, the name of a run in
    /// runs/, or `latest`, the run in runs/ that was last trained
    #[arg(value_name = "latest|RUN|DIR|ORG/NAME")]
    #[arg(value_parser = PathBufValueParser::new().try_map(named_run))]
    pub checkpoint: PathBuf,
    /// Use the run's checkpoint with the best validation loss instead of the newest
    #[arg(long)]
    pub best: bool,
    /// Devices: auto (the first hardware GPU, or else the CPU), or a selector or list of selectors
    /// as for `potluck train`; `eval` and `predict` divide the samples among them, `generate` uses
    /// the first, or as many as --pipeline and --tensor need
    #[arg(long, value_name = "SELECTOR,..", default_value = "auto")]
    pub devices: String,
    /// Run the model as a pipeline of K devices
    #[arg(long, value_name = "K", value_parser = stages, allow_negative_numbers = true)]
    pub pipeline: Option<u64>,
    /// Divide the tensors of the model, or of each stage, among K devices
    #[arg(long, value_name = "K", value_parser = stages, allow_negative_numbers = true)]
    pub tensor: Option<u64>,
    /// Schedule of the pipeline: 1f1b, gpipe, interleaved (with 2 model chunks per device, or
    /// --set virtual_stages=V) or zero-bubble
    #[arg(long, value_name = "S")]
    pub schedule: Option<String>,
    /// The most samples that a device runs at a time in `eval` and `predict`, if not as in the run
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub micro_batch: Option<u32>,
    /// Set a key of the run's configuration that has an effect without training, such as
    /// train.device_memory_mib=4096; others are refused; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
}

/// Arguments of `eval`.
#[derive(Debug, Args)]
pub struct EvalArgs {
    #[command(flatten)]
    pub checkpoint: CheckpointArgs,
    /// Evaluate all of these data instead of a split of the run's; of a training and a held-out
    /// set in one directory, the held-out one
    #[arg(long, value_name = "PATH", conflicts_with = "split")]
    pub data: Option<PathBuf>,
    /// Split of the run's own data
    #[arg(long, value_enum, default_value = "val")]
    pub split: EvalSplit,
    /// Samples to evaluate, spread evenly; 0: all
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = whole::<u64>)]
    #[arg(allow_negative_numbers = true)]
    pub samples: u64,
    /// Distance in tokens from one sample of a text to the next, which counts only what the one
    /// before it has not [default: the context, so that samples do not overlap]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..))]
    pub stride: Option<u64>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Split of a run's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EvalSplit {
    /// The validation split, which was held out from training
    Val,
    /// The training split
    Train,
}

/// Arguments of `generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub checkpoint: CheckpointArgs,
    /// Text to continue; may be repeated, and all are then continued at the same time [default: a
    /// line break]
    #[arg(long, value_name = "TEXT")]
    pub prompt: Vec<String>,
    /// Number of tokens to generate, of each text
    #[arg(long, default_value_t = 500, value_name = "N", value_parser = whole::<u64>)]
    #[arg(allow_negative_numbers = true)]
    pub tokens: u64,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// Arguments of `chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    #[command(flatten)]
    pub checkpoint: CheckpointArgs,
    /// Message that precedes the conversation and says how to answer
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Jinja template of a conversation, or chatml [default: that of the model in its files, or
    /// else chatml]
    #[arg(long, value_name = "FILE|chatml")]
    pub template: Option<PathBuf>,
    /// The most tokens of an answer
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = whole::<u64>)]
    #[arg(allow_negative_numbers = true)]
    pub tokens: u64,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// Choice of the next tokens of a text, in the order in which it is made.
#[derive(Debug, Args)]
pub struct SamplingArgs {
    /// Sampling temperature; below 1: safer choices; above: wilder ones; 0: always the most
    /// likely token
    #[arg(long, default_value_t = 0.8, value_name = "T", value_parser = non_negative)]
    #[arg(allow_negative_numbers = true)]
    pub temperature: f64,
    /// Sample from the K most likely tokens only; 0: all
    #[arg(long, default_value_t = 0, value_name = "K", value_parser = whole::<usize>)]
    pub top_k: usize,
    /// Sample from the most likely tokens that have the probability P together; 1: all
    #[arg(long, default_value_t = 1.0, value_name = "P", value_parser = share)]
    pub top_p: f64,
    /// Sample from tokens that are at least P times as likely as the most likely one; 0: all
    #[arg(long, default_value_t = 0.0, value_name = "P", value_parser = share)]
    pub min_p: f64,
    /// Divide positive logits of tokens that the text has by X, and multiply negative ones; 1: none
    #[arg(long, default_value_t = 1.0, value_name = "X", value_parser = positive)]
    pub repetition_penalty: f64,
    /// End the text in front of TEXT; may be repeated
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
    /// Go on behind the token that ends a text
    #[arg(long)]
    pub ignore_end: bool,
    /// Compute all that the model sees again for each token, and keep no keys and values on the
    /// device
    #[arg(long)]
    pub no_cache: bool,
    /// Seed of the sampling; the same seed generates the same text
    #[arg(long, default_value_t = 1337, value_name = "N", value_parser = whole::<u64>)]
    #[arg(allow_negative_numbers = true)]
    pub seed: u64,
}

/// Arguments of `predict`.
#[derive(Debug, Args)]
pub struct PredictArgs {
    #[command(flatten)]
    pub checkpoint: CheckpointArgs,
    /// Samples to predict, in any format that `potluck train` reads; targets may be missing, and
    /// are compared if they are there; of a training and a held-out set in one directory, the
    /// held-out one is taken
    #[arg(long, value_name = "PATH")]
    pub data: PathBuf,
    /// File of the predictions, or - [default: stdout]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
}

/// Arguments of `export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Directory of a run (for its newest checkpoint), of a checkpoint, or of a model in Hugging
    /// Face's files, org/name of one that `hf download` has put in the cache, the name of a run in
    /// runs/, or `latest`, the run in runs/ that was last trained
    #[arg(value_name = "latest|RUN|DIR|ORG/NAME")]
    #[arg(value_parser = PathBufValueParser::new().try_map(named_run))]
    pub checkpoint: PathBuf,
    /// Use the run's checkpoint with the best validation loss instead of the newest
    #[arg(long)]
    pub best: bool,
    /// Form of what is written
    #[arg(long, value_enum, default_value_t = ExportFormat::Huggingface)]
    pub format: ExportFormat,
    /// Directory to write, or the file of gguf and safetensors; it must not exist
    #[arg(long, value_name = "PATH")]
    pub out: PathBuf,
    /// Type of the values: f32, f16, bf16, or for gguf q8_0
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = file_type)]
    pub dtype: FileType,
    /// The most bytes of a file of parameters in a directory, such as 5GB: a larger model is in
    /// several
    #[arg(long, value_name = "SIZE", default_value = "50GB", value_parser = file_bytes)]
    pub shard_size: u64,
}

/// Forms of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExportFormat {
    /// A directory that transformers reads
    Huggingface,
    /// A file that llama.cpp, ollama and LM Studio read: of a gpt with model.activation =
    /// gelu_tanh, of Llama, Mistral, Qwen2 and Qwen3, with a tokenizer.json
    Gguf,
    /// A file of the parameters of any model, under their own names
    Safetensors,
}

/// Reads the name of a type of values.
fn file_type(text: &str) -> Result<FileType, String> {
    match FileType::NAMES.into_iter().find(|(name, _)| *name == text) {
        Some((_, kind)) => Ok(kind),
        None => Err("expects f32, f16, bf16 or q8_0".into()),
    }
}

/// Reads a number of bytes, with an optional decimal unit.
fn file_bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => Some(1),
        "KB" => Some(1000),
        "MB" => Some(1000 * 1000),
        "GB" => Some(1000 * 1000 * 1000),
        _ => None,
    };
    if let Some(unit) = unit
        && let Ok(count) = digits.parse::<u64>()
        && let Some(bytes) = count.checked_mul(unit)
        && bytes > 0
    {
        return Ok(bytes);
    }
    Err("expects a number of bytes, such as 5GB or 500MB".into())
}

/// Arguments of `runs`.
#[derive(Debug, Args)]
pub struct RunsArgs {
    /// Directory of the runs
    #[arg(default_value = RUNS, value_name = "DIR")]
    pub directory: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `bench`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub command: Option<BenchCommand>,
    /// Devices, benchmarked one after the other: selectors as for `potluck eval`, with commas
    /// between; or all, the CPU device and every adapter
    #[arg(long, value_name = "SELECTOR,..", default_value = "all")]
    pub devices: String,
    /// Fewer and shorter samples: about 15 s per device instead of up to 60 s
    #[arg(long)]
    pub quick: bool,
    /// Also benchmark the training steps of a LeNet, a ResNet, an LSTM and a GRU, and on hardware
    /// GPUs that of GPT-2 124M at context 1024
    #[arg(long)]
    pub full: bool,
    #[command(flatten)]
    pub report: ReportArgs,
    /// Parts to measure
    #[arg(
        long,
        value_enum,
        value_name = "PART,..",
        value_delimiter = ',',
        default_value = "peaks,matmul,step"
    )]
    pub only: Vec<BenchPart>,
}

/// Arguments of `hardware`.
#[derive(Debug, Args)]
pub struct HardwareArgs {
    /// Devices to report on: selectors of adapters as for `potluck train`, also of software ones
    /// [default: every graphics card]
    #[arg(value_name = "DEVICE")]
    pub devices: Vec<String>,
    /// Folder of the report; parts that are done there are kept, and DIR.tar.gz is the archive
    #[arg(long, value_name = "DIR", default_value = "hardware-report")]
    pub out: PathBuf,
    /// Minutes for each device, which the parts share
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = within::<1, 1440>)]
    pub minutes: u32,
    /// Perform these parts, also if they are done already
    #[arg(long, value_enum, value_name = "PART,..", value_delimiter = ',')]
    pub only: Vec<HardwarePart>,
    /// Rehearsal: sizes at which a software adapter takes seconds; its figures say nothing
    #[arg(long)]
    pub toy: bool,
}

/// Subcommands of `bench`.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Compare report B with report A, figure by figure
    Compare {
        /// Baseline report: a file that `potluck bench --json` wrote
        a: PathBuf,
        /// Report to compare with the baseline
        b: PathBuf,
    },
    /// Benchmark collectives between ranks: on slices in memory (2 to 8 ranks, 4 KiB to 256 MiB)
    /// and on the gradients of devices; with --nodes on slices in memory of several machines
    Collectives(CollectivesArgs),
    /// Take part in `potluck bench collectives --nodes N` of another machine
    Join(BenchJoinArgs),
    /// Benchmark the link to another machine, which waits with `potluck bench link --listen`: round
    /// trips, bandwidth in one direction and in both, and all-reduces of gradients
    Link(LinkArgs),
    /// Benchmark training steps of pipelines: throughput and bubble of every schedule, beside the
    /// prediction by simulation and the formula
    Pipeline(PipelineArgs),
    /// Benchmark the training step of a GPT on the fastest device, the two fastest ones, and so on
    /// to all of them, beside each one alone
    Scaling(ScalingArgs),
}

/// Arguments of all benchmarks, which have a flag `quick` each.
#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Smoke test: as little work as possible, to check that everything runs
    #[arg(long, hide = true, conflicts_with = "quick")]
    pub tiny: bool,
    /// Write the report as JSON to a file, or with - to stdout instead of the table
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
}

/// Arguments of `bench scaling`.
#[derive(Debug, Args)]
pub struct ScalingArgs {
    /// Devices: selectors as for `potluck train`
    #[arg(long, value_name = "SELECTOR,..", default_value = "all")]
    pub devices: String,
    /// Samples of a step, the same on any number of devices [default: 12 per device]
    #[arg(long, value_name = "N", value_parser = within::<1, 65536>)]
    pub batch: Option<u32>,
    /// Fewer steps
    #[arg(long)]
    pub quick: bool,
    #[command(flatten)]
    pub report: ReportArgs,
    /// Draw throughput and efficiency over the number of devices to an SVG file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Arguments of `bench pipeline`.
#[derive(Debug, Args)]
pub struct PipelineArgs {
    /// Devices: selectors as for `potluck train`; a single device is used once per stage, of
    /// several the first ones
    #[arg(long, value_name = "SELECTOR,..", default_value = "cpu")]
    pub devices: String,
    /// Numbers of stages
    #[arg(
        long,
        value_name = "K,..",
        value_delimiter = ',',
        default_value = "2",
        value_parser = within::<2, 64>,
        allow_negative_numbers = true
    )]
    pub stages: Vec<u32>,
    /// Numbers of micro-batches per step
    #[arg(
        long,
        value_name = "M,..",
        value_delimiter = ',',
        default_value = "4,8,16",
        value_parser = within::<1, 1024>,
        allow_negative_numbers = true
    )]
    pub micro_batches: Vec<u32>,
    /// Schedules: 1f1b, gpipe, interleaved, zero-bubble [default: all]
    #[arg(long, value_name = "S,..", value_delimiter = ',', value_parser = schedule)]
    pub schedules: Vec<PipelineSchedule>,
    /// Samples of a micro-batch
    #[arg(
        long,
        value_name = "N",
        default_value_t = 2,
        value_parser = clap::value_parser!(u32).range(1..=1024)
    )]
    pub micro_batch: u32,
    /// Channels of the GPT [default: 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub width: Option<u32>,
    /// Layers of the GPT, which has two more blocks than layers [default: 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub layers: Option<u32>,
    /// Tokens of a sample [default: 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8192))]
    pub context: Option<u32>,
    /// Cut of the model into stages
    #[arg(long, value_enum, value_name = "CUT", default_value = "even")]
    pub cut: PipelineCut,
    /// Fewer steps
    #[arg(long)]
    pub quick: bool,
    #[command(flatten)]
    pub report: ReportArgs,
    /// Draw throughput and bubble over micro-batches to an SVG file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Cut of the model in `bench pipeline`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PipelineCut {
    /// Nearly equal numbers of blocks
    Even,
    /// By measured times of blocks, as in a run
    Measured,
}

/// Arguments of `bench collectives`.
#[derive(Debug, Args)]
pub struct CollectivesArgs {
    /// Devices that reduce gradients: selectors as for `potluck train`, a single device is used
    /// twice; or none, for slices in memory only
    #[arg(long, value_name = "SELECTOR,..", default_value = "auto")]
    pub devices: String,
    /// Numbers of ranks on slices in memory [default: 2,3,4,8, and 2,4 with --quick]
    #[arg(
        long,
        value_name = "N,..",
        value_delimiter = ',',
        value_parser = within::<2, 64>,
        allow_negative_numbers = true
    )]
    pub ranks: Vec<u32>,
    /// Machines, this one included: it waits until the others have typed the line that it prints,
    /// `potluck bench join ADDR`, and measures all of their ranks
    #[arg(long, value_name = "N", conflicts_with_all = ["devices", "ranks"])]
    #[arg(value_parser = within::<2, 64>)]
    pub nodes: Option<u32>,
    /// With --nodes: ranks of this node, each of them a thread, which are also in the line that it
    /// prints
    #[arg(long, value_name = "R", default_value_t = 1, requires = "nodes")]
    #[arg(value_parser = within::<1, 64>)]
    pub ranks_per_node: u32,
    /// With --nodes: address and UDP port at which to listen [default: port 7717 of all addresses]
    #[arg(long, value_parser = listening, value_name = "ADDR:PORT", requires = "nodes")]
    pub listen: Option<SocketAddr>,
    #[command(flatten)]
    pub secret: SecretArgs,
    #[command(flatten)]
    pub network: NetworkArgs,
    /// Fewer sizes and samples: some seconds instead of about a minute
    #[arg(long)]
    pub quick: bool,
    /// Every power of two and every number of ranks: some minutes
    #[arg(long)]
    pub full: bool,
    #[command(flatten)]
    pub report: ReportArgs,
    /// Write a plot of the bus bandwidth of all-reduce over its size to an SVG file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Arguments of `bench join`.
#[derive(Debug, Args)]
pub struct BenchJoinArgs {
    /// Host and UDP port of the first node [default port: 7717]
    #[arg(value_name = "HOST[:PORT]")]
    pub address: String,
    /// Ranks of this node, each of them a thread
    #[arg(long, value_name = "R", default_value_t = 1, value_parser = within::<1, 64>)]
    pub ranks_per_node: u32,
    /// Address and UDP port at which this node listens for the others [default: any free port]
    #[arg(long, value_parser = listening, value_name = "ADDR:PORT")]
    pub listen: Option<SocketAddr>,
    #[command(flatten)]
    pub secret: SecretArgs,
    #[command(flatten)]
    pub network: NetworkArgs,
}

/// Arguments of `bench link`.
#[derive(Debug, Args)]
pub struct LinkArgs {
    /// Host and UDP port of the machine that waits with --listen [default port: 7717]
    #[arg(value_name = "HOST[:PORT]", required_unless_present = "listen")]
    pub address: Option<String>,
    /// Wait for the other machine, which measures, at an address and UDP port [default: port 7717
    /// of all addresses]
    #[arg(long, value_parser = listening, value_name = "ADDR:PORT")]
    #[arg(conflicts_with_all = ["address", "parameters", "quick", "tiny", "json"])]
    pub listen: Option<Option<SocketAddr>>,
    #[command(flatten)]
    pub secret: SecretArgs,
    #[command(flatten)]
    pub network: NetworkArgs,
    /// Parameters of models, for the time in which the gradients of a step are summed: numbers,
    /// also in thousands (K), millions (M) and billions (G) [default: 1M,10M,124M, and 10M with
    /// --quick]
    #[arg(long, value_name = "P,..", value_delimiter = ',', value_parser = parameters)]
    pub parameters: Vec<u64>,
    /// Fewer sizes and samples
    #[arg(long)]
    pub quick: bool,
    #[command(flatten)]
    pub report: ReportArgs,
}

/// Part of the benchmark suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchPart {
    /// Arithmetic, memory, transfers, dispatches
    Peaks,
    /// Matrix products over shapes
    Matmul,
    /// A large product with the checks of shaders, and as runs have it, without them. Not by
    /// default
    Robustness,
    /// A large product in f32 and in mixed precision, by matrix units where there are any. Not by
    /// default
    Precision,
    /// The training step of a GPT
    Step,
    /// Tokens per second that GPTs write: of a prompt, and one by one for a text and for 8 at the
    /// same time; with --full also of GPT-2 124M, but on software adapters. Not by default
    Generation,
}

fn whole<T: std::str::FromStr>(typed: &str) -> Result<T, String> {
    typed.parse().map_err(|_| "expects a non-negative integer".into())
}

/// Reads an address and a port to listen at; without an address, all of them.
fn listening(typed: &str) -> Result<SocketAddr, String> {
    if let Some(port) = typed.strip_prefix(':')
        && let Ok(port) = port.parse()
    {
        return Ok(all_addresses(port));
    }
    if let Ok(found) = resolve(typed)
        && let Some(address) = found.first()
    {
        return Ok(*address);
    }
    Err("expects an address and a port, such as 0.0.0.0:7717 or :7717".into())
}

/// Reads an address at which others reach this machine; port 0 is the one at which it listens.
fn advertised(typed: &str) -> Result<SocketAddr, String> {
    let with_port = typed.parse::<SocketAddr>();
    let alone = typed.trim_matches(['[', ']']).parse::<IpAddr>().map(|ip| SocketAddr::new(ip, 0));
    match with_port.or(alone) {
        Ok(address) if !address.ip().is_unspecified() && !address.ip().is_multicast() => {
            Ok(address)
        }
        _ => Err("expects addresses of this machine, such as 192.168.1.20 or 10.8.0.2:7717".into()),
    }
}

/// Reads an address and a port for requests of the state of a run; without an address, the loopback
/// address.
fn status_address(typed: &str) -> Result<SocketAddr, String> {
    if let Ok(port) = typed.parse() {
        return Ok(SocketAddr::from(([127, 0, 0, 1], port)));
    }
    listening(typed).map_err(|_| {
        "expects a port of this machine, such as 9464, or an address and a port, such as \
         0.0.0.0:9464"
            .into()
    })
}

/// Reads the stages of a pipeline, or the ranks of a tensor group. A number out of range is refused
/// later, with the key of the configuration.
fn stages(typed: &str) -> Result<u64, String> {
    typed.parse().map_err(|_| "expects a whole number from 1 to 64".into())
}

/// Reads a whole number in a range.
fn within<const LEAST: u32, const MOST: u32>(typed: &str) -> Result<u32, String> {
    match typed.parse() {
        Ok(number) if (LEAST..=MOST).contains(&number) => Ok(number),
        _ => Err(format!("expects a whole number from {LEAST} to {MOST}")),
    }
}

/// Largest number of parameters of a model in `bench link`.
const PARAMETERS_MAX: u64 = 1_000_000_000_000;

/// Reads a number of parameters, such as `10M`.
fn parameters(typed: &str) -> Result<u64, String> {
    let mut digits = typed;
    let mut factor = 1.0;
    for (unit, size) in [('K', 1e3), ('M', 1e6), ('G', 1e9), ('B', 1e9)] {
        if let Some(before) = typed.strip_suffix([unit, unit.to_ascii_lowercase()]) {
            digits = before;
            factor = size;
        }
    }
    if let Ok(number) = digits.parse::<f64>() {
        let count = (number * factor).round();
        if (1.0..=PARAMETERS_MAX as f64).contains(&count) {
            return Ok(count as u64);
        }
    }
    Err("expects a number from 1 to 1000G, such as 10M".into())
}

fn schedule(typed: &str) -> Result<PipelineSchedule, String> {
    let names = PipelineSchedule::ALL.map(PipelineSchedule::name).join(", ");
    PipelineSchedule::of_name(typed).ok_or(format!("expects one of {names}"))
}

fn share(typed: &str) -> Result<f64, String> {
    match typed.parse::<f64>() {
        Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
        _ => Err("expects a number from 0 to 1".into()),
    }
}

fn positive(typed: &str) -> Result<f64, String> {
    match typed.parse::<f64>() {
        Ok(value) if value.is_finite() && value > 0.0 => Ok(value),
        _ => Err("expects a number above 0".into()),
    }
}

fn non_negative(typed: &str) -> Result<f64, String> {
    match typed.parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
        _ => Err("expects a non-negative number".into()),
    }
}

/// Reads a time in seconds, of at most a day.
fn seconds(typed: &str) -> Result<Duration, String> {
    match typed.parse::<f64>() {
        Ok(seconds) if (0.0..=86_400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("expects a number of seconds from 0 to 86400".into()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parsed(line: &str) -> Result<Command, clap::Error> {
        Cli::checked(line.split_whitespace().map(OsString::from)).map(|cli| cli.command)
    }

    #[test]
    fn a_flag_that_is_added_to_a_command_counts() {
        let line = "potluck train --devices cpu*2 --set lr=1 --steps 3 --quiet --devices cpu \
                    --set lr=2 --steps 4 --quiet";
        let Command::Train(args) = parsed(line).unwrap() else { panic!("{line}") };
        assert_eq!((args.devices.as_deref(), args.steps, args.quiet), (Some("cpu"), Some(4), true));
        assert_eq!(args.sets, ["lr=1", "lr=2"]);
    }

    #[test]
    fn a_drawing_is_one_of_a_schedule() {
        assert!(parsed("potluck train --svg x.svg --explain schedule").is_ok());
        assert!(parsed("potluck train --svg x.svg --explain graph --explain schedule").is_ok());
        for line in ["train --svg x.svg", "train --explain graph --svg x.svg"] {
            let error = parsed(&format!("potluck {line}")).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::MissingRequiredArgument, "{line}");
            let why = "'--svg <FILE>' goes with '--explain schedule'";
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn lines_that_do_not_parse_name_the_argument_and_what_it_takes() {
        let refused = |line: &str, parts: &[&str]| {
            let error = parsed(&format!("potluck {line}")).unwrap_err();
            assert!(error.use_stderr() && error.exit_code() == 2, "{line}");
            let text = error.to_string();
            let first = text.lines().next().unwrap();
            assert!(first.starts_with("error: "), "{text}");
            // What is missing is listed in the lines below.
            assert!(parts.iter().all(|part| text.contains(part)), "{parts:?} in {text}");
        };
        refused("train --bogus", &["--bogus"]);
        refused("train --steps x", &["'x'", "--steps", "a non-negative integer"]);
        refused("train --lr fast", &["fast", "--lr", "a non-negative number"]);
        refused("train --explain all", &["'all'", "--explain"]);
        refused("train --name a --out b", &["--name", "--out", "cannot be used with"]);
        refused("train --trace t.json --explain memory", &["--trace", "--explain"]);
        refused("generate", &["required arguments"]);
        refused("generate run --temperature -1", &["-1"]);
        refused("generate run --temperature=nan", &["nan", "non-negative number"]);
        refused("eval run --micro-batch 0", &["'0'", "--micro-batch"]);
        for stages in ["-1", "x", "1.5"] {
            for command in ["train", "eval run", "generate run"] {
                let line = format!("{command} --pipeline {stages}");
                refused(&line, &[stages, "a whole number from 1 to 64"]);
            }
        }
        refused("dance", &["dance"]);
        refused("bench --tiny --only peaks,nothing", &["nothing"]);
        refused("bench collectives --tiny --ranks 1", &["'1'", "from 2 to 64"]);
        refused("bench pipeline --tiny --schedules 2f2b", &["2f2b", "1f1b"]);
        refused("bench pipeline --tiny --stages 1", &["'1'", "from 2 to 64"]);
        refused("bench pipeline --tiny --micro-batches 2,-1", &["'-1'", "from 1 to 1024"]);
        for stages in ["abc", "2,abc", "-1"] {
            let line = format!("bench pipeline --tiny --stages {stages}");
            refused(&line, &["a whole number from 2 to 64"]);
        }
    }

    #[test]
    fn parameters_have_units() {
        let read = ["7", "10M", "1.5k", "124m", "2G", "2b"].map(|typed| parameters(typed).unwrap());
        assert_eq!(read, [7, 10_000_000, 1500, 124_000_000, 2_000_000_000, 2_000_000_000]);
        for wrong in ["", "M", "0", "-3", "1e30", "nan", "10Mé", "1001G", "0.1"] {
            assert!(parameters(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_link_has_one_side_that_waits() {
        for line in ["--listen", "--listen 127.0.0.1:0", "desk", "desk:7 --parameters 1M,2M"] {
            let Command::Bench(args) = parsed(&format!("potluck bench link {line}")).unwrap()
            else {
                panic!("{line}")
            };
            let Some(BenchCommand::Link(args)) = args.command else { panic!("{line}") };
            assert_eq!(args.listen.is_some(), args.address.is_none(), "{line}");
        }
        for line in ["", "--listen 127.0.0.1:0 desk", "--listen 127.0.0.1:0 --quick"] {
            assert!(parsed(&format!("potluck bench link {line}")).is_err(), "{line}");
        }
    }

    #[test]
    fn flags_of_nodes_need_their_number() {
        for line in ["--listen 127.0.0.1:0", "--nodes 2 --ranks 3", "--nodes 1"] {
            assert!(parsed(&format!("potluck bench collectives {line}")).is_err(), "{line}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
