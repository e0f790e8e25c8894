//! `potluck eval` and `potluck generate`: evaluation of a checkpoint, and text generation with it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use super::UsageError;
use super::args::{CheckpointArgs, EvalArgs, EvalSplit, GenerateArgs, SamplingArgs};
use super::resume::find_data;
use super::runs_directory::nothing_at;
use super::train::{saved_spec, spec_of_files};
use super::trained_on::GivenData;
use crate::ui::terminal::{Terminal, print_line, print_warning};
use potluck_core::Rank;
use potluck_core::format::{counted, shell_word};
use potluck_core::metrics::{Event, Sink, Unit};
use potluck_data::tokenizer::TOKENIZER;
use potluck_data::{
    DataDescription, DataFile, Sampler, Split, StridedWindows, Tokenizer, TokenizerFile,
    is_token_file,
};
use potluck_graph::model::LanguageModel;
use potluck_kernels::device::{AdapterKind, Selection};
use potluck_parallel::placement::Placement;
use potluck_parallel::planner::plans::Plans;
use potluck_train::checkpoint::{Checkpoint, CheckpointError, NamedTensor, Store, is_checkpoint};
use potluck_train::error::TrainError;
use potluck_train::evaluate::{EvalRequest, Evaluation, evaluate_split};
use potluck_train::families::DataShape;
use potluck_train::hugging_face::{
    HuggingFaceError, ModelDirectory, directory_of_run, end_tokens, require_model,
};
use potluck_train::language_model::language_model;
use potluck_train::loader::BatchSource;
use potluck_train::run_data::{RunData, SavedData};
use potluck_train::runtime::open::OpenOptions;
use potluck_train::runtime::pipelines::{ForwardUnits, ModelPipelines};
use potluck_train::runtime::placement::candidates::selections;
use potluck_train::runtime::placement::names::{distinct, is_auto};
use potluck_train::runtime::placement::pipeline::{ForwardDevices, open_forward};
use potluck_train::runtime::workers::WorkerGroup;
use potluck_train::sampling::{PROMPT_ROWS, Sampling, TextMemory};
use potluck_train::signals::SignalFlags;
use potluck_train::spec::RunSpec;
use potluck_train::task::{EvalContext, FinalMeasure, Task};
use potluck_train::{generate, state};

/// Warning if the evaluated data are not the run's.
const OTHER_DATA: &str = "warning: the data are not those that the checkpoint was trained on; the \
                          loss cannot be compared with the run's";

/// Prints the mean loss and the metrics of a checkpoint on a split of its data or on other data:
/// the perplexity of a text, the accuracy and the confusions of classes, the error of values, and
/// the task's final measure.
pub fn eval(args: &EvalArgs) -> anyhow::Result<()> {
    let (loaded, mut spec) = load(&args.checkpoint)?;
    let split = match args.split {
        EvalSplit::Val if args.data.is_none() => Split::Validation,
        EvalSplit::Val | EvalSplit::Train => Split::Train,
    };
    let step = loaded.step;
    let mut data = data_of(args, &loaded, &mut spec)?;
    if let Some(stride) = args.stride {
        let strided = StridedWindows::new(data.dataset, stride).map_err(TrainError::from)?;
        data.dataset = Arc::new(strided);
    }
    if data.dataset.is_empty(split) {
        let why = "the run held nothing out; use --split train or --data PATH";
        return Err(TrainError::InvalidRequest(why.into()).into());
    }
    let plans = spec.forward_plans(&data.shape)?;
    let graph = plans.model().whole();
    if args.stride.is_some() && !graph.carried.is_empty() {
        let why = "the model carries its state from each sample to the next, and samples with \
                   --stride overlap; leave it out";
        return Err(TrainError::InvalidRequest(why.into()).into());
    }
    // No batch is drawn, so that the text may be too short for training.
    let sampler = Sampler::new(spec.seed, 1, spec.batch);
    let source = BatchSource::new(graph, data.dataset.clone(), sampler)?;
    let task = data.task(graph)?;
    let devices = &args.checkpoint.devices;
    let EvalDevices { mut group, pipelines, weights } =
        open_for_eval(devices, &spec, loaded, &plans)?;
    let rows = vec![spec.micro_batch; weights.len()];
    let request = EvalRequest {
        source: &source,
        graph,
        task: &task,
        pipelines: &pipelines,
        split,
        samples: args.samples,
        rows: &rows,
        weights: &weights,
        signals: &SignalFlags::default(),
    };
    let started = Instant::now();
    let mut terminal = Terminal::new(false, 0);
    let evaluated = evaluate_split(&mut group, &request, &mut |done, total| {
        Ok(terminal.event(&Event::Evaluating { done, total, elapsed: started.elapsed() })?)
    })?;
    let Some(evaluation) = evaluated else {
        let why = "an evaluation without signals was stopped";
        return Err(TrainError::Defect(why.into()).into());
    };
    let units = ForwardUnits { group: &group, pipelines: &pipelines };
    let seed = spec.seed;
    let ending =
        EvalContext { units, rows: &rows, step: step.unwrap_or_default(), seed, stop: &|| false };
    let measure = match args.data {
        None => task.measure(&ending)?,
        Some(_) => None,
    };
    // The exponential of a loss with label smoothing is not a perplexity.
    let mut perplexity = None;
    if task.unit() == Unit::Tokens && spec.label_smoothing == 0.0 {
        perplexity = Some(evaluation.loss.exp());
    }
    super::print(&report(args.json, step, &*task, &evaluation, perplexity, measure));
    Ok(())
}

/// Loads the data to evaluate. Warns if the run was trained on others.
fn data_of(
    args: &EvalArgs,
    loaded: &LoadedModel,
    spec: &mut RunSpec,
) -> Result<RunData, TrainError> {
    let saved = &loaded.saved;
    if let Some(path) = &args.data {
        if loaded.data.is_none() && saved.tokenizer.is_none() && !is_token_file(path) {
            let model = shell_word(&args.checkpoint.checkpoint.to_string_lossy());
            return Err(TrainError::InvalidRequest(format!(
                "the model has no tokenizer.json to tokenize a text with; pass token ids as \
                 --data, or if its tokens are the characters of a text, make a run of it: potluck \
                 train --init {model} --data TEXT --steps 0"
            )));
        }
        let data = spec.load_other(path, saved)?;
        let given = GivenData {
            run: &args.checkpoint.checkpoint,
            of_run: &loaded.data_files,
            source: &spec.data.source,
            held_out: spec.data.held_out,
            files: data.dataset.files(),
            samples: data.samples(),
        };
        if let Some(warning) = given.warning() {
            print_warning(&warning);
        }
        return Ok(data);
    }
    let Some(fingerprint) = &loaded.data else {
        let why = "the model has no data of its own; pass --data PATH";
        return Err(TrainError::InvalidRequest(why.into()));
    };
    for path in spec.data.source.paths_mut() {
        *path = find_data(path, &args.checkpoint.checkpoint)?;
    }
    let data = spec.load_data(saved)?;
    if data.dataset.fingerprint() != *fingerprint {
        print_line(OTHER_DATA);
    }
    Ok(data)
}

/// Formats the result of an evaluation, as a line of JSON or for the user.
fn report(
    json: bool,
    step: Option<u64>,
    task: &dyn Task,
    evaluation: &Evaluation,
    perplexity: Option<f64>,
    measure: Option<FinalMeasure>,
) -> String {
    let &Evaluation { loss, samples, targets, ref sums, .. } = evaluation;
    let metrics = task.metrics(sums);
    if json {
        let mut line = serde_json::json!({});
        if let Some(step) = step {
            line["step"] = step.into();
        }
        line["loss"] = loss.into();
        if let Some(perplexity) = perplexity {
            line["perplexity"] = perplexity.into();
        }
        line["samples"] = samples.into();
        line["targets"] = targets.into();
        for (name, value) in &metrics {
            line[without_split(name)] = (*value).into();
        }
        for (name, value) in task.tables_json(sums) {
            line[name] = value;
        }
        if let Some(FinalMeasure { record, .. }) = measure {
            line[&*record.name] = record.json();
        }
        return format!("{line}\n");
    }
    let step = step.map(|step| format!("step {step}  ")).unwrap_or_default();
    let mut text = format!("{step}loss {loss:.4}");
    if let Some(perplexity) = perplexity {
        text += &format!("  perplexity {perplexity:.2}");
    }
    for (name, value) in &metrics {
        text += &format!("  {} {value:.4}", without_split(name));
    }
    let in_samples = counted(samples as usize, "sample", "samples");
    text += &match task.unit() {
        Unit::Tokens => {
            format!("  {} in {in_samples}\n", counted(targets as usize, "target", "targets"))
        }
        Unit::Samples => format!("  {in_samples}\n"),
    };
    text += &task.tables(sums);
    if let Some(FinalMeasure { summary, .. }) = measure {
        text += &format!("{summary}\n");
    }
    text
}

fn without_split(name: &str) -> &str {
    name.strip_prefix("val_").unwrap_or(name)
}

/// Maximum number of texts continued at once: each needs memory for its context.
const SEQUENCES_MAX: usize = 16;

/// Line between texts.
const BETWEEN_TEXTS: &str = "-----\n";

/// Prints the prompts and their continuations: the first continuation token by token, and the
/// others when all are complete.
pub fn generate(args: &GenerateArgs) -> anyhow::Result<()> {
    let (loaded, spec) = load(&args.checkpoint)?;
    let tokenizer = tokenizer_of(&loaded, "text to continue")?;
    let mut prompts = Vec::new();
    if args.prompt.is_empty() {
        prompts.push(generate::default_prompt(&tokenizer));
    }
    prompts.extend_from_slice(&args.prompt);
    // Runs of potluck are trained without it.
    let file = tokenizer.file().filter(|_| loaded.step.is_none());
    let begin = file.and_then(TokenizerFile::begin_token);
    // An invalid prompt must be refused before any output.
    let mut tokens = Vec::with_capacity(prompts.len());
    for prompt in &prompts {
        let ids = tokenizer.encode(prompt).map_err(TrainError::from)?;
        generate::require_tokens(&ids)?;
        tokens.push(begin.into_iter().chain(ids).collect());
    }
    let sequences =
        if args.sampling.no_cache { None } else { Some(prompts.len().min(SEQUENCES_MAX)) };
    let mut writer = TextWriter::open(&args.checkpoint, loaded, &spec, tokenizer, sequences)?;
    // The default prompt is not shown.
    super::print(args.prompt.first().map(String::as_str).unwrap_or_default());
    let written = writer.write(&tokens, args.tokens, &args.sampling, |number, text| {
        number > 0 || super::print(text)
    })?;
    super::print("\n");
    for (prompt, text) in prompts.iter().zip(&written).skip(1) {
        super::print(&format!("{BETWEEN_TEXTS}{prompt}{text}\n"));
    }
    Ok(())
}

/// Returns the tokenizer of a model.
///
/// # Errors
/// Returns an error if it has none; `what` is the purpose of the tokenizer.
pub(super) fn tokenizer_of(loaded: &LoadedModel, what: &str) -> Result<Tokenizer, TrainError> {
    match (&loaded.saved.tokenizer, &loaded.saved.description) {
        (Some(tokenizer), _) => Ok(tokenizer.clone()),
        (None, Some(DataDescription::Tokens { .. })) => Err(of_tokens(what)),
        (None, _) => {
            let why = "the checkpoint is not of a model of text; for models of samples see \
                       potluck predict --help";
            Err(TrainError::InvalidRequest(why.into()))
        }
    }
}

/// Model on its devices that continues texts.
pub(super) struct TextWriter {
    devices: EvalDevices,
    model: LanguageModel,
    tokenizer: Tokenizer,
    /// Tokens that end a text.
    ends: Vec<u32>,
    memory: TextMemory,
    /// Calls of [`TextWriter::write`].
    written: u64,
}

impl TextWriter {
    /// Writes a model to the devices of the arguments. If `sequences` is given and the model can
    /// have a cache of keys and values, it gets one for that number of sequences.
    pub fn open(
        args: &CheckpointArgs,
        loaded: LoadedModel,
        spec: &RunSpec,
        tokenizer: Tokenizer,
        sequences: Option<usize>,
    ) -> anyhow::Result<Self> {
        if args.micro_batch.is_some() {
            let why = "--micro-batch is for eval and predict: texts are written token by token; \
                       leave it out";
            return Err(UsageError(why.into()).into());
        }
        let shape = DataShape::Tokens { vocabulary: tokenizer.vocabulary() };
        let plans = spec.generation_plans(&shape, sequences)?;
        let model = language_model(plans.model().whole())?;
        let first = first_devices(&args.devices, spec.parallel.devices_per_pipeline())?;
        let ends = loaded.ends.clone();
        let rows = if model.cache.is_some() { PROMPT_ROWS as u32 } else { 1 };
        let devices = open_on(first, spec, loaded, &plans, rows)?;
        let memory = TextMemory::default();
        Ok(Self { devices, model, tokenizer, ends, memory, written: 0 })
    }

    /// Returns the model's context in tokens.
    pub fn context(&self) -> usize {
        self.model.context
    }

    /// Continues prompts by at most `count` tokens, and returns the texts; see
    /// [`generate::generate`].
    pub fn write(
        &mut self,
        prompts: &[Vec<u32>],
        count: u64,
        args: &SamplingArgs,
        piece: impl FnMut(usize, &str) -> bool,
    ) -> Result<Vec<String>, TrainError> {
        let EvalDevices { group, pipelines, .. } = &self.devices;
        let tokens = if args.ignore_end { Vec::new() } else { self.ends.clone() };
        let ends = generate::Ends { tokens, texts: args.stop.clone() };
        let generation = generate::Generation {
            units: ForwardUnits { group, pipelines },
            tokenizer: &self.tokenizer,
            ends: &ends,
            model: self.model,
            prompts,
            sampling: Sampling {
                repetition_penalty: args.repetition_penalty,
                temperature: args.temperature,
                top_k: args.top_k,
                top_p: args.top_p,
                min_p: args.min_p,
                ..Sampling::new(self.tokenizer.vocabulary(), args.seed)
            },
            count,
            turn: self.written,
        };
        self.written += 1;
        generate::generate(&generation, &mut self.memory, piece)
    }
}

/// Returns the error of a command that needs `what` of a model without a tokenizer.
pub(super) fn of_tokens(what: &str) -> TrainError {
    TrainError::InvalidRequest(format!(
        "the checkpoint is of a model of token ids without a tokenizer, which has no {what}; its \
         loss is printed by potluck eval"
    ))
}

/// Model of a checkpoint or of Hugging Face's files.
pub(super) struct LoadedModel {
    /// Step of the checkpoint; `None` for files.
    pub step: Option<u64>,
    pub saved: SavedData,
    /// Tokens that end a text.
    pub ends: Vec<u32>,
    /// Directory with files on the use of the model, such as its end tokens: the model's directory,
    /// or the directory of a run that started from one.
    pub files: Option<PathBuf>,
    /// Fingerprint of the run's data; `None` for files.
    data: Option<String>,
    /// Files of these data.
    pub data_files: Vec<DataFile>,
    /// Placement of the run; `None` for files.
    placement: Option<Placement>,
    pub parameters: Vec<NamedTensor>,
}

impl From<Checkpoint> for LoadedModel {
    fn from(checkpoint: Checkpoint) -> Self {
        let saved = SavedData::of(&checkpoint.meta);
        let file = saved.tokenizer.as_ref().and_then(Tokenizer::file);
        Self {
            step: Some(checkpoint.meta.step),
            ends: file.and_then(TokenizerFile::named_end_token).into_iter().collect(),
            files: None,
            saved,
            data: Some(checkpoint.meta.data),
            data_files: checkpoint.meta.files,
            placement: Some(checkpoint.meta.placement),
            parameters: checkpoint.parameters,
        }
    }
}

/// Loads the model of the arguments, and the specification of its run or of one that uses it, with
/// the keys that the arguments set.
pub(super) fn load(args: &CheckpointArgs) -> anyhow::Result<(LoadedModel, RunSpec)> {
    let (loaded, mut spec) = load_with(&args.checkpoint, args.best, Some(args))?;
    spec.micro_batch = args.micro_batch.unwrap_or(spec.micro_batch);
    Ok((loaded, spec))
}

/// Loads the model at a path, and its specification with the keys that `args` set.
pub(super) fn load_with(
    path: &Path,
    best: bool,
    args: Option<&CheckpointArgs>,
) -> anyhow::Result<(LoadedModel, RunSpec)> {
    match files_of(path)? {
        Some(directory) if best => {
            let text = format!(
                "{}: is no run, whose best checkpoint --best takes; leave it out",
                directory.path().display()
            );
            Err(TrainError::InvalidRequest(text).into())
        }
        Some(directory) => load_files(&directory, args),
        None => {
            let checkpoint = load_parameters(path, best)?;
            let spec = saved_spec(&checkpoint, args)?;
            let mut loaded = LoadedModel::from(checkpoint);
            loaded.files = directory_of_run(path);
            if let Some(directory) = &loaded.files {
                let file = loaded.saved.tokenizer.as_ref().and_then(Tokenizer::file);
                loaded.ends = ends_of(directory, file)?;
            }
            Ok((loaded, spec))
        }
    }
}

/// Returns the model in Hugging Face's files at a directory, or named `org/name` in the cache of
/// `hf download`; `None` for a run or a checkpoint.
pub(super) fn files_of(path: &Path) -> anyhow::Result<Option<ModelDirectory>> {
    let name = path.to_string_lossy();
    if path.exists() {
        if is_checkpoint(path) || path.join("checkpoints").is_dir() {
            return Ok(None);
        }
        require_model(path).map_err(TrainError::from)?;
        return Ok(Some(ModelDirectory::open(&name).map_err(TrainError::from)?));
    }
    match ModelDirectory::open(&name) {
        Ok(directory) => Ok(Some(directory)),
        // Probably a mistyped path of a run.
        Err(HuggingFaceError::NotInCache { .. } | HuggingFaceError::NoDirectory { .. }) => {
            match nothing_at(path) {
                Some(why) => Err(UsageError(why).into()),
                None => Ok(None),
            }
        }
        Err(error) => Err(TrainError::from(error).into()),
    }
}

/// Tokens that end a text of a model: from the files in a directory, or else from the tokenizer.
fn ends_of(directory: &Path, tokenizer: Option<&TokenizerFile>) -> Result<Vec<u32>, TrainError> {
    let mut ends = end_tokens(directory)?;
    let Some(file) = tokenizer else { return Ok(ends) };
    let first = if ends.is_empty() { file.end_token(directory)? } else { file.end_of_data() };
    if let Some(first) = first {
        ends.retain(|end| *end != first);
        ends.insert(0, first);
    }
    Ok(ends)
}

/// Loads a model in Hugging Face's files, with its tokenizer if it has one.
fn load_files(
    directory: &ModelDirectory,
    args: Option<&CheckpointArgs>,
) -> anyhow::Result<(LoadedModel, RunSpec)> {
    let spec = spec_of_files(directory, args)?;
    let path = directory.path().join(TOKENIZER);
    let Some(vocabulary) = directory.vocabulary() else {
        return Err(TrainError::Defect("a model of files without a vocabulary".into()).into());
    };
    let mut saved = SavedData::default();
    if path.is_file() {
        let tokenizer = TokenizerFile::load(&path).map_err(TrainError::from)?;
        if tokenizer.vocabulary() > vocabulary {
            let text = format!(
                "{}: has {} tokens, and the model beside it {vocabulary}",
                path.display(),
                tokenizer.vocabulary()
            );
            return Err(TrainError::InvalidRequest(text).into());
        }
        saved.tokenizer = Some(Tokenizer::File(tokenizer));
    } else {
        saved.description = Some(DataDescription::Tokens { vocabulary });
    }
    let shape = saved.shape().ok_or_else(|| TrainError::Defect("data without sizes".into()))?;
    let plans = spec.forward_plans(&shape)?;
    let tensors = directory.tensors(plans.model().whole(), &*spec.model, None);
    let tensors = tensors.map_err(TrainError::from)?;
    let parameters = tensors.read().map_err(TrainError::from)?;
    let files = Some(directory.path().to_path_buf());
    let ends = ends_of(directory.path(), saved.tokenizer.as_ref().and_then(Tokenizer::file))?;
    let loaded = LoadedModel {
        step: None,
        saved,
        ends,
        files,
        data: None,
        data_files: Vec::new(),
        placement: None,
        parameters,
    };
    Ok((loaded, spec))
}

/// Loads the newest checkpoint of a path, or the best one of a run, without its moments.
pub(super) fn load_parameters(path: &Path, best: bool) -> anyhow::Result<Checkpoint> {
    let (checkpoint, warnings) = if best {
        Store::open_to_read(path).load_best().map_err(|error| without_best(path, error))?
    } else {
        Checkpoint::parameters_of_path(path).map_err(TrainError::from)?
    };
    for warning in warnings {
        print_warning(&warning);
    }
    Ok(checkpoint)
}

/// Returns the error of `--best`, which explains why no checkpoint is marked as the best.
fn without_best(path: &Path, error: CheckpointError) -> anyhow::Error {
    if !matches!(error, CheckpointError::None { .. }) {
        return TrainError::from(error).into();
    }
    if is_checkpoint(path) {
        let text = format!(
            "{}: is a checkpoint, and --best takes the directory of a run; leave out --best",
            path.display()
        );
        return TrainError::InvalidRequest(text).into();
    }
    let newest = match Checkpoint::parameters_of_path(path) {
        Ok((newest, _)) => newest,
        Err(error) => return TrainError::from(error).into(),
    };
    let why = match saved_spec(&newest, None) {
        Ok(spec) if spec.data.held_out == 0.0 => "the run held nothing out, so it has no best",
        Ok(_) => "no checkpoint is marked as the best",
        Err(error) => return error,
    };
    let text = format!("{}: {why}; for the newest checkpoint leave out --best", path.display());
    TrainError::InvalidRequest(text).into()
}

/// Devices with the parameters of a checkpoint on them.
pub(super) struct EvalDevices {
    pub group: WorkerGroup,
    /// Pipelines of the devices, of one stage each if every device holds the whole model.
    pub pipelines: ModelPipelines,
    /// Weights by which samples are divided among the devices or pipelines.
    pub weights: Vec<u32>,
}

/// Opens the devices of a selector. With `auto`, it opens only the first device if the model is not
/// divided.
pub(super) fn open_for_eval(
    devices: &str,
    spec: &RunSpec,
    loaded: LoadedModel,
    plans: &Plans,
) -> anyhow::Result<EvalDevices> {
    let mut chosen = selections(devices)?;
    if is_auto(devices) && !spec.parallel.is_divided() {
        chosen.truncate(1);
    }
    open_on(chosen, spec, loaded, plans, spec.micro_batch)
}

/// Opens devices, with the checkpoint's parameters on them. Prints their names if several have the
/// whole model.
fn open_on(
    devices: Vec<Selection>,
    spec: &RunSpec,
    loaded: LoadedModel,
    plans: &Plans,
    rows: u32,
) -> anyhow::Result<EvalDevices> {
    let options = options(spec, &devices);
    let opened = open_forward(devices, &spec.parallel, &options, plans, rows)?;
    for note in &opened.notes {
        print_line(note);
    }
    let ForwardDevices { group, pipelines, plans, identities, .. } = opened;
    let mut weights = vec![1; pipelines.stages.len()];
    if !pipelines.is_divided() && group.world() > 1 {
        let recorded = loaded.placement.map(|placement| placement.ranks).unwrap_or_default();
        let mut shares = "with equal shares";
        if recorded.iter().map(|rank| &rank.identity).eq(&identities) {
            weights = recorded.iter().map(|rank| rank.share).collect();
            shares = "with the shares of the run";
        }
        let mut names = Vec::new();
        for rank in 0..group.world() as u32 {
            names.push(group.name(Rank(rank)));
        }
        print_line(&format!("on {} devices {shares}: {}", names.len(), names.join(", ")));
    }
    state::write_parameters(&group, &plans, &loaded.parameters)?;
    Ok(EvalDevices { group, pipelines, weights })
}

/// Returns the first `wanted` devices, or all if there are fewer. Prints their names if a list has
/// more.
fn first_devices(devices: &str, wanted: usize) -> anyhow::Result<Vec<Selection>> {
    let mut chosen = selections(devices)?;
    let names = distinct(chosen.iter().map(|one| one.name().to_string()).collect());
    if chosen.len() > wanted && !is_auto(devices) {
        let on = names[..wanted].join(" and ");
        let count = chosen.len();
        let first = if wanted == 1 { "first".into() } else { format!("first {wanted}") };
        print_line(&format!("generating on {on}, the {first} of {count} devices"));
    }
    chosen.truncate(wanted);
    Ok(chosen)
}

/// Maximum time to measure kernels on a GPU, in seconds, for a command with only a few passes.
const TUNE_S_MAX: f64 = 1.0;

/// Returns the options of devices for only a few passes. Devices use earlier measurements of
/// kernels. GPUs, which measure the shapes of a few rows quickly, add missing ones, unless a stage
/// of a pipeline is no GPU. On the processor a measurement would take longer than it saves.
fn options(spec: &RunSpec, devices: &[Selection]) -> Vec<OpenOptions> {
    let is_mixed = !devices.iter().all(is_gpu);
    let mut options = Vec::with_capacity(devices.len());
    for device in devices {
        let is_tuned = is_gpu(device) && !(is_mixed && spec.parallel.is_divided());
        let most = if is_tuned { TUNE_S_MAX } else { 0.0 };
        options.push(OpenOptions { tune_s: spec.opening.tune_s.min(most), ..spec.opening });
    }
    options
}

fn is_gpu(device: &Selection) -> bool {
    match device {
        Selection::Adapter(adapter) => adapter.kind != AdapterKind::Software,
        Selection::Cpu { .. } | Selection::Offered(_) => false,
    }
}
