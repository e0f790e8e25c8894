//! `potluck train`: starts, resumes or explains a run.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::added_tokens::{AddedTokens, VOCABULARY};
use super::args::{CheckpointArgs, Explain, KeyFlag, TrainArgs, Usr1Answer};
use super::explain::{Explanation, ResumedParts, explanation};
use super::model::load_parameters;
use super::nodes::RunBefore;
use super::resume::{ResumePoint, RunDirectory, find_data, holds_run};
use super::run_signals::SignalWatch;
use super::runs_directory::{self, RUNS};
use super::status::ShownStatus;
use super::{UsageError, exit_code, nodes, writable};
use crate::ui::curves::CurveDrawing;
use crate::ui::log;
use crate::ui::terminal::{Terminal, print_line};
use potluck_core::NodeRank;
use potluck_core::faults::Faults;
use potluck_core::format::shell_word;
use potluck_core::metrics::{Sink, Sinks};
use potluck_data::tokenizer::TOKENIZER;
use potluck_data::{Tokenizer, TokenizerKind, is_described, is_json_lines};
use potluck_kernels::autotune::catalog;
use potluck_net::status::RunAbout;
use potluck_train::checkpoint::{self, Checkpoint, Meta, Store};
use potluck_train::config::RunConfig;
use potluck_train::config::effect::require_effect;
use potluck_train::config::read::{self, ConfigError, InitialModel, Override, Resolved};
use potluck_train::config::schema::{DataKind, DecayKind, TokenizerSource, is_of_placement};
use potluck_train::error::{EXIT_CONFIGURATION, TrainError};
use potluck_train::hugging_face::{self, BareWeights, ModelDirectory, ModelFiles};
use potluck_train::keys::Value;
use potluck_train::nodes::{NodesResult, NodesSink, RunFailure};
use potluck_train::run::OWN_FILES;
use potluck_train::run::{Run, RunOptions, RunOutcome, StartingModel, train};
use potluck_train::run_data::SavedData;
use potluck_train::runtime::placement::candidates::selections;
use potluck_train::signals::{SignalFlags, Signals};
use potluck_train::spec::{RunSpec, section_asked, section_on};

/// Run that a command line describes, without running it.
pub struct DescribedRun {
    pub spec: RunSpec,
    pub resumed: ResumedParts,
}

/// Returns the run that the arguments of `potluck train` describe.
///
/// # Errors
/// Returns the errors of the configuration, and of the checkpoint or the model with which the run
/// begins.
pub fn described(args: &TrainArgs) -> anyhow::Result<DescribedRun> {
    let ResolvedStart { point, init, mut resolved, .. } = ResolvedStart::of(args)?;
    if let Some(point) = &point {
        // Data that are nowhere are missed by what reads them.
        let _ = find_saved_data(&mut resolved, point);
    }
    let resumed = resumed_parts(&resolved, init.as_ref(), point);
    Ok(DescribedRun { spec: RunSpec::resolved(&resolved), resumed })
}

/// Configuration of a run, and the checkpoint or the model with which it begins.
struct ResolvedStart {
    point: Option<ResumePoint>,
    /// Configuration of the checkpoint.
    saved: Option<Resolved>,
    init: Option<StartingModel>,
    resolved: Resolved,
    /// The model's number of tokens, if more are added.
    known_tokens: Option<usize>,
}

impl ResolvedStart {
    /// Reads what the arguments name.
    fn of(args: &TrainArgs) -> anyhow::Result<Self> {
        let point = match &args.resume {
            Some(from) => Some(ResumePoint::find(from, args.out.as_deref())?),
            None => None,
        };
        let saved = match &point {
            Some(point) => Some(resumed_config(&point.checkpoint, args.nodes.is_some())?),
            None => None,
        };
        let init = args.init.as_deref().map(starting_model).transpose()?;
        let (resolved, known_tokens) = configuration(args, saved.as_ref(), init.as_ref())?;
        Ok(Self { point, saved, init, resolved, known_tokens })
    }
}

/// Parts of the checkpoint or the model with which a run begins.
fn resumed_parts(
    resolved: &Resolved,
    init: Option<&StartingModel>,
    point: Option<ResumePoint>,
) -> ResumedParts {
    let mut resumed = ResumedParts::default();
    if let Some(init) = init {
        resumed.data = RunSpec::resolved(resolved).known_data(init.saved());
    }
    if let Some(point) = point {
        let meta = point.checkpoint.meta;
        resumed.data = SavedData::of(&meta);
        resumed.done = (meta.step, meta.samples);
        if resolved.other_placement.is_none() {
            resumed.placement = Some(meta.placement);
        }
    }
    resumed
}

/// Runs `potluck train` and returns the process's exit code.
pub fn run(args: &TrainArgs) -> anyhow::Result<i32> {
    if args.explain == Some(Explain::Keys) {
        super::print(&read::keys_help());
        return Ok(0);
    }
    log::set_node(NodeRank(0));
    let mut signals = SignalFlags::default();
    if args.explain.is_none() {
        signals = Signals::caught()?.until_exit();
        if args.on_usr1 == Usr1Answer::Save {
            signals = signals.saving_on_usr1();
        }
    }
    let watch = SignalWatch::start(signals, args.watched.term_timeout)?;
    let faults = Faults::from_environment().map_err(TrainError::from)?;
    faults.check_kernels(&catalog::names()).map_err(TrainError::from)?;
    for (path, flag) in [(&args.trace, "--trace"), (&args.svg, "--svg")] {
        if let Some(path) = path {
            writable(path, flag)?;
        }
    }
    let ResolvedStart { point, saved, init, mut resolved, known_tokens } = ResolvedStart::of(args)?;
    let named = args.name.as_deref().map(named_run).transpose()?;
    let typed_out = named.as_deref().or(args.out.as_deref());
    if let Some(explain) = args.explain {
        if let Some(point) = &point {
            // Data that are nowhere are missed by what reads them.
            let _ = find_saved_data(&mut resolved, point);
        }
        let resumed = resumed_parts(&resolved, init.as_ref(), point);
        let spec = RunSpec::resolved(&resolved);
        let Explanation { text, fits } = explanation(explain, &spec, resumed, args.svg.as_deref())?;
        super::print(&text);
        if !fits {
            return Ok(EXIT_CONFIGURATION);
        }
        return Ok(0);
    }
    // Kept until the end of the run, because its drop removes an empty directory.
    let directory = RunDirectory::choose(typed_out, point.as_ref(), Path::new(RUNS))?;
    let out = directory.path.clone();
    refuse_in_data(&out, &resolved.config)?;
    let continued = point.as_ref().and_then(|point| point.continued(&out));
    if continued.is_none() {
        if holds_run(&out)? {
            return Err(TrainError::Occupied { out }.into());
        }
        refuse_own_file(args.config.as_deref(), &out)?;
    }
    let mut unsaved = Vec::new();
    if let Some(point) = &point
        && let Some(saved) = &saved
    {
        unsaved = resolved.changes(&saved.config);
        if resolved.typed.now.contains("train.steps") {
            point.require_steps(resolved.config.train.steps)?;
        }
        find_saved_data(&mut resolved, point)?;
        require_saved_devices(&resolved, point, typed_out, &unsaved)?;
        if !args.quiet
            && let Some(note) = placement_note(saved, &resolved)
        {
            print_line(&note);
        }
        if !args.quiet {
            let step = point.checkpoint.meta.step;
            print_line(&format!("continuing at step {step}, from {}", point.loaded().display()));
            if let Some(note) = changes_note(&unsaved) {
                print_line(&note);
            }
        }
        if point.run.is_none() && typed_out.is_none() && !args.quiet {
            print_line(&format!(
                "{} is a checkpoint outside a run; starting a new run in {}",
                point.from.display(),
                out.display()
            ));
        }
    }
    if let Some(init) = &init
        && !args.quiet
    {
        let config = &resolved.config;
        let has_warmup = config.schedule.kind != DecayKind::OneCycle;
        let warmup = if has_warmup && config.train.epochs == 0 && config.train.steps > 0 {
            format!(", schedule.warmup = {}", config.schedule.warmup)
        } else {
            String::new()
        };
        let lr = config.optim.lr;
        print_line(&format!(
            "starting from {}: optim.lr = {lr:.2e}{warmup}",
            init.path().display()
        ));
        if config.data.kind == DataKind::Builtin && !resolved.typed.now.contains("data.kind") {
            print_line(
                "note: no --data given: training on the built-in text; use --data FILE for your \
                 own",
            );
        }
        let is_text = matches!(config.data.kind, DataKind::Text | DataKind::Builtin);
        if let TokenizerSource::Kind(kind) = &config.data.tokenizer
            && init.saved() == SavedData::default()
            && is_text
            && !resolved.typed.now.contains("data.tokenizer")
        {
            print_line(&format!(
                "note: {} has no tokenizer.json; using data.tokenizer = \"{kind}\"",
                init.path().display()
            ));
        }
    }
    if point.is_none()
        && !args.quiet
        && let Some(note) = note_of_raw_json(&resolved.config)
    {
        print_line(&note);
    }
    let spec = RunSpec::resolved(&resolved);
    let before = match &point {
        Some(point) => RunBefore::of(&point.checkpoint.meta.placement, continued.is_some()),
        None => RunBefore::default(),
    };
    let about = RunAbout {
        name: out.file_name().map(|name| name.to_string_lossy().into_owned()),
        directory: Some(absolute(&out)),
        configuration: args.config.as_deref().map(absolute),
        version: env!("CARGO_PKG_VERSION"),
    };
    // Kept until the end of the run, because its drop ends the server.
    let status = ShownStatus::start(&args.watched, about, Some(&spec), args.quiet)?;
    let signals = watch.meet(&directory.created);
    let nodes = nodes::meet(args, &spec, &before, &signals, status.as_ref())?;
    let signals = watch.met(nodes.as_ref());
    let options = RunOptions {
        out,
        continued,
        unsaved,
        trace: args.trace.clone(),
        retune: args.retune,
        faults,
        nodes: nodes.clone(),
        signals,
        files: match (&init, &point) {
            (Some(model), _) => model.files()?,
            (None, Some(point)) => ModelFiles::of_run(&point.from).map_err(TrainError::from)?,
            (None, None) => ModelFiles::default(),
        },
        init,
        add_tokens: known_tokens,
    };
    let checkpoint = point.map(|point| point.checkpoint);
    let mut shown: Box<dyn Sink> = Box::new(Terminal::new(args.quiet, spec.every.progress));
    if let Some(status) = &status {
        shown = status.sink(shown);
    }
    let ended = execute(spec, options, checkpoint, shown, args.quiet);
    if ended.is_err() {
        watch.settle();
    }
    if let Some(nodes) = nodes {
        nodes.end(&match &ended {
            Ok((outcome, _)) => Ok(NodesResult::Run(outcome.clone())),
            Err(error) => {
                Err(RunFailure { why: format!("{error:#}"), exit_code: exit_code(error) })
            }
        });
    }
    let (_, code) = ended?;
    Ok(code)
}

/// Refuses the name of a device in place of a configuration, which is what a space in a list of
/// devices leads to.
fn require_no_device(configuration: &Path, devices: Option<&str>) -> Result<(), UsageError> {
    if let Some(devices) = devices
        && let Some(word) = configuration.to_str()
        && !configuration.exists()
        && selections(word).is_ok()
    {
        let joined = format!("{devices},{word}");
        let advice = match selections(&joined) {
            Ok(_) => format!("type --devices {}", shell_word(&joined)),
            Err(why) => why.to_string(),
        };
        return Err(UsageError(format!("{word}: is no configuration but a device; {advice}")));
    }
    Ok(())
}

/// Refuses a directory of a run among directories of pictures: it would become a class.
fn refuse_in_data(out: &Path, config: &RunConfig) -> Result<(), UsageError> {
    if config.data.kind == DataKind::Images
        && let Some(data) = &config.data.path
        && absolute(out).starts_with(absolute(data))
    {
        return Err(UsageError(format!(
            "{}: lies among the pictures of {}; name another with --out",
            out.display(),
            data.display()
        )));
    }
    Ok(())
}

/// Refuses a configuration that is a file which the run would write.
fn refuse_own_file(config: Option<&Path>, out: &Path) -> Result<(), UsageError> {
    let Some(config) = config else { return Ok(()) };
    let Ok(given) = dunce::canonicalize(config) else { return Ok(()) };
    for name in OWN_FILES {
        if dunce::canonicalize(out.join(name)).is_ok_and(|own| own == given) {
            return Err(UsageError(format!(
                "{}: the run writes a {name} of its own into {}, in place of this one; rename it, \
                 or name another --out",
                config.display(),
                out.display()
            )));
        }
    }
    Ok(())
}

/// Returns a note on a file of JSON lines whose text is trained on as it is.
fn note_of_raw_json(config: &RunConfig) -> Option<String> {
    let path = config.data.path.as_ref()?;
    if config.data.kind != DataKind::Text || !is_json_lines(path) {
        return None;
    }
    Some(format!(
        "note: {} has documents as lines of JSON, and its text is trained on as it is, with keys \
         and escapes: `potluck data prepare` makes tokens of the documents",
        path.display()
    ))
}

/// Finds the saved data of a resumed run, unless others are set.
fn find_saved_data(resolved: &mut Resolved, point: &ResumePoint) -> Result<(), TrainError> {
    let typed = &resolved.typed;
    let data = &mut resolved.config.data;
    for (name, path) in [("data.path", &mut data.path), ("data.val_path", &mut data.val_path)] {
        if let Some(saved) = path
            && !typed.now.contains(name)
        {
            *saved = absolute(&find_data(saved, &point.from)?);
        }
    }
    Ok(())
}

/// Checks the saved devices of a resumed run, unless others are set.
fn require_saved_devices(
    resolved: &Resolved,
    point: &ResumePoint,
    out: Option<&Path>,
    settings: &[(&'static str, String)],
) -> Result<(), TrainError> {
    let typed = &resolved.typed;
    if !typed.now.contains("parallel.devices") {
        point.require_devices(&RunSpec::resolved(resolved), out, settings.to_vec())?;
    }
    Ok(())
}

/// Returns a note if a key of the placement is set to another value, so that the saved placement is
/// not used.
fn placement_note(saved: &Resolved, resolved: &Resolved) -> Option<String> {
    let key = resolved.other_placement?;
    let was = saved.config.parallel.devices_text();
    Some(format!("{key} is set: choosing a new placement in place of {was}"))
}

/// Returns a note on the settings of a resumed run that are not those of its checkpoint; those of
/// the placement have a note of their own.
fn changes_note(changes: &[(&'static str, String)]) -> Option<String> {
    let mut told = Vec::new();
    for (key, value) in changes {
        match *key {
            "train.seed" => {
                told.push(format!("{key} = {value} (draws other samples from here on)"))
            }
            key if is_of_placement(key) => {}
            key => told.push(format!("{key} = {value}")),
        }
    }
    if told.is_empty() { None } else { Some(format!("changed since then: {}", told.join(", "))) }
}

fn execute(
    spec: RunSpec,
    options: RunOptions,
    checkpoint: Option<Checkpoint>,
    shown: Box<dyn Sink>,
    quiet: bool,
) -> anyhow::Result<(RunOutcome, i32)> {
    let out = options.out.clone();
    let terminal: Box<dyn Sink> = match options.nodes.clone() {
        Some(nodes) => Box::new(NodesSink { nodes, shown }),
        None => shown,
    };
    let mut shown = Sinks::from(terminal);
    shown.set_chart(CurveDrawing::new(&out));
    let mut run = Run::start(spec, options, checkpoint, Box::new(shown))?;
    run.emit_summary()?;
    let ending = train(&mut run)?;
    let resume = format!("continue it with: {}", run.resume_command());
    let code = match &ending {
        RunOutcome::Done { measure, .. } => {
            let text = run.sample()?;
            if !text.is_empty() {
                super::print(&format!("{text}\n"));
            }
            if !quiet {
                if let Some(measure) = measure {
                    print_line(&format!("\n{measure}"));
                }
                print_line(&format!("done; the model is in {}", out.display()));
            }
            0
        }
        RunOutcome::Interrupted(signal) => {
            print_line(&format!("{signal}; the run is saved: {resume}"));
            signal.exit_code()
        }
    };
    Ok((ending, code))
}

/// Resolves the configuration: the checkpoint's or the keys of the initial model, overridden by the
/// file, and then by flags. Also returns the model's number of tokens if more are added.
fn configuration(
    args: &TrainArgs,
    saved: Option<&Resolved>,
    init: Option<&StartingModel>,
) -> anyhow::Result<(Resolved, Option<usize>)> {
    let file = match args.config.as_deref() {
        Some(path) => {
            require_no_device(path, args.devices.as_deref())?;
            Some((path, read::load(path)?))
        }
        None => None,
    };
    let mut overrides = Vec::new();
    if let Some(path) = &args.data {
        overrides.extend(Override::data(path)?);
    }
    overrides.extend(named(args.key_flags()));
    if let Some(selector) = &args.devices {
        overrides.push(Override::devices(selector));
    }
    for typed in &args.sets {
        overrides.push(Override::set(typed)?);
    }
    let file = file.as_ref().map(|(path, text)| (*path, text.as_str()));
    let mut known_tokens = None;
    let mut resolved = match init {
        Some(init) => {
            let model = initial_model(init)?;
            let typed = read::read_from(&model, file, &overrides)?.typed.now;
            let mut model = model.with_defaults(file, &overrides)?;
            let resolved = read::read_from(&model, file, &overrides)?;
            let has_tokenizer = typed.contains("data.tokenizer");
            let vocabulary = match resolved.config.value(VOCABULARY) {
                Some(Value::Whole(vocabulary)) => usize::try_from(vocabulary).ok(),
                _ => None,
            };
            let spec = RunSpec::resolved(&resolved);
            let added = AddedTokens::find(args.add_tokens, init, &spec, vocabulary, has_tokenizer)?;
            if let Some(added) = &added {
                if !args.quiet {
                    print_line(&added.note(init));
                }
                model.settings.retain(|(name, _)| *name != VOCABULARY);
                model.settings.push((VOCABULARY, added.wanted.into()));
                if let Some(path) = &added.tokenizer {
                    let path = absolute(path).to_string_lossy().into_owned();
                    model.settings.retain(|(name, _)| *name != "data.tokenizer");
                    model.settings.push(("data.tokenizer", Value::Text(path)));
                }
                known_tokens = Some(added.known);
                read::read_from(&model, file, &overrides)?
            } else {
                resolved
            }
        }
        None => read::read(saved, file, &overrides)?,
    };
    let data = &mut resolved.config.data;
    for (name, path) in [("data.path", &mut data.path), ("data.val_path", &mut data.val_path)] {
        if let Some(typed) = path
            && resolved.typed.now.contains(name)
        {
            *typed = absolute(typed);
        }
    }
    if let TokenizerSource::File(path) = &mut data.tokenizer
        && resolved.typed.now.contains("data.tokenizer")
    {
        *path = absolute(path);
    }
    if let (DataKind::Tokens, Some(path)) = (data.kind, &data.path)
        && path.is_file()
        && !is_described(path)
    {
        print_line(&format!(
            "note: {} has no {} beside it: its ids are read as 16 bits each",
            path.display(),
            path.with_extension("json").display()
        ));
    }
    if let Some(saved) = saved {
        refuse_another(&saved.config, &resolved.config)?;
    }
    Ok((resolved, known_tokens))
}

/// Model of `--init`: from a run or a checkpoint, in Hugging Face's files, or weights alone.
fn starting_model(typed: &str) -> anyhow::Result<StartingModel> {
    let path = runs_directory::named_run(typed.into()).map_err(UsageError)?;
    let path = path.as_path();
    let is_run = checkpoint::is_checkpoint(path) || holds_run(path)?;
    if !is_run && let Some(weights) = BareWeights::at(path) {
        return Ok(StartingModel::Weights(weights));
    }
    if !is_run {
        hugging_face::require_model(path).map_err(TrainError::from)?;
        let directory = ModelDirectory::open(typed).map_err(TrainError::from)?;
        return Ok(StartingModel::Files(directory));
    }
    let checkpoint = load_parameters(path, false)?;
    let path = if checkpoint::is_checkpoint(path) {
        path.to_path_buf()
    } else {
        Store::open_to_read(path).path(checkpoint.meta.step)
    };
    Ok(StartingModel::Checkpoint { path, checkpoint: Arc::new(checkpoint) })
}

/// Keys that a run takes from its initial model.
fn initial_model(init: &StartingModel) -> anyhow::Result<InitialModel> {
    let name = format!("--init {}", init.path().display());
    let (settings, tokenizer) = match init {
        StartingModel::Files(directory) => (directory.settings().clone(), tokenizer_file(init)),
        StartingModel::Weights(_) => (Vec::new(), tokenizer_file(init)),
        StartingModel::Checkpoint { checkpoint, .. } => {
            let config = saved_run(&checkpoint.meta)?.config;
            let mut settings = Vec::new();
            for key in config.keys() {
                if key.section == "model"
                    && let Some(value) = config.value(key.full_name)
                {
                    settings.push((key.full_name, value));
                }
            }
            let tokenizer = match &checkpoint.meta.tokenizer {
                Some(Tokenizer::File(_)) => tokenizer_file(init),
                Some(Tokenizer::Char { .. }) => Some(TokenizerKind::Char.to_string()),
                Some(Tokenizer::Byte) => Some(TokenizerKind::Byte.to_string()),
                None => None,
            };
            (settings, tokenizer)
        }
    };
    Ok(InitialModel { name, settings, tokenizer })
}

/// Path of the initial model's `tokenizer.json`, if it has one.
fn tokenizer_file(init: &StartingModel) -> Option<String> {
    let path = absolute(&init.path().join(TOKENIZER));
    if path.is_file() { Some(path.to_string_lossy().into_owned()) } else { None }
}

fn named(flags: impl IntoIterator<Item = KeyFlag>) -> Vec<Override> {
    let mut overrides = Vec::new();
    for KeyFlag { flag, key, value } in flags {
        if let Some(value) = value {
            overrides.push(Override::named(flag, key, value));
        }
    }
    overrides
}

/// Returns the absolute path, by which a run started in another directory finds the file, or the
/// path itself if that is not Unicode, which a configuration cannot contain.
fn absolute(path: &Path) -> PathBuf {
    match std::path::absolute(path) {
        Ok(absolute) if absolute.to_str().is_some() => absolute,
        _ => path.into(),
    }
}

/// Returns the specification of the run that wrote a checkpoint, with the keys, devices and
/// pipeline of `args`.
///
/// # Errors
/// Returns an error if the configuration cannot be read, if a key is set that does not exist, has
/// no effect without training or cannot have the value, or if a key would change the model.
pub fn saved_spec(
    checkpoint: &Checkpoint,
    args: Option<&CheckpointArgs>,
) -> anyhow::Result<RunSpec> {
    let mut saved = saved_run(&checkpoint.meta)?;
    let overrides = match args {
        Some(args) => overrides_of(args)?,
        None => Vec::new(),
    };
    require_effect(&overrides)?;
    let resolved = read::read(Some(&saved), None, &overrides)?;
    // Pictures of another size may be resized to the model's.
    saved.config.data.image_size.clone_from(&resolved.config.data.image_size);
    refuse_another(&saved.config, &resolved.config)?;
    Ok(RunSpec::resolved(&resolved))
}

/// Returns the specification of a run that uses a model in Hugging Face's files, with the keys that
/// `args` set.
///
/// # Errors
/// Returns `ConfigError` if a key is set that does not exist, has no effect without training or
/// cannot have the value.
pub fn spec_of_files(
    directory: &ModelDirectory,
    args: Option<&CheckpointArgs>,
) -> anyhow::Result<RunSpec> {
    let overrides = match args {
        Some(args) => overrides_of(args)?,
        None => Vec::new(),
    };
    require_effect(&overrides)?;
    let name = directory.path().display().to_string();
    let settings = directory.settings().clone();
    let model = InitialModel { name, settings, tokenizer: None };
    Ok(RunSpec::resolved(&read::read_from(&model, None, &overrides)?))
}

fn overrides_of(args: &CheckpointArgs) -> Result<Vec<Override>, ConfigError> {
    let mut overrides = named(args.key_flags());
    for typed in &args.sets {
        overrides.push(Override::set(typed)?);
    }
    Ok(overrides)
}

/// Parses the configuration in a `run.toml`.
///
/// # Errors
/// Returns `ConfigError` for an invalid text.
pub fn config_of(path: &Path, run_toml: &str) -> Result<RunConfig, ConfigError> {
    Ok(read::read(None, Some((path, run_toml)), &[])?.config)
}

/// Reads the configuration stored in a checkpoint, with the keys of its requested placement: all of
/// them, or, without nodes, those that fit the available devices.
fn resumed_config(checkpoint: &Checkpoint, has_nodes: bool) -> anyhow::Result<Resolved> {
    let mut saved = saved_run(&checkpoint.meta)?;
    let overlap = saved.config.parallel.overlap;
    let placement = &checkpoint.meta.placement;
    saved.config.parallel = match selections(&placement.devices_asked) {
        Ok(own) if !has_nodes => section_on(placement, overlap, own.len()),
        // Missing devices are reported later.
        _ => section_asked(placement, overlap),
    };
    Ok(saved)
}

/// Reads the configuration stored in a checkpoint.
fn saved_run(meta: &Meta) -> anyhow::Result<Resolved> {
    if meta.is_of_library() {
        let what = "this command".into();
        let why = "it was saved by the library, and describes no run; load it with Trainer::load";
        return Err(TrainError::Mismatch { what, why: why.into() }.into());
    }
    Ok(Resolved::saved(&meta.run, &meta.typed)?)
}

/// Returns the configuration stored in a checkpoint.
///
/// # Errors
/// Returns `ConfigError` if it is invalid.
pub fn saved_config(meta: &Meta) -> Result<RunConfig, ConfigError> {
    Ok(Resolved::saved(&meta.run, &meta.typed)?.config)
}

/// Refuses to resume with another model, another tokenizer, another kind of optimizer (for which
/// the moments would have another meaning), or another preparation of samples. Everything else may
/// change, also keys of the model without an effect on parameters: dropout and carried states.
fn refuse_another(saved: &RunConfig, config: &RunConfig) -> Result<(), TrainError> {
    const KEPT: [&str; 6] = [
        "optim.kind",
        "data.tokenizer",
        "data.target",
        "data.task",
        "data.normalize",
        "data.image_size",
    ];
    for key in config.keys() {
        let is_kept = match key.section {
            "model" => !matches!(key.name, "dropout" | "stateful"),
            _ => KEPT.contains(&key.full_name),
        };
        let there = saved.value(key.full_name);
        let got = config.value(key.full_name);
        if is_kept && there != got {
            let why = format!(
                "it is {} there, and {} here; leave it out, or start a new run with it",
                shown(there),
                shown(got)
            );
            return Err(TrainError::Mismatch { what: key.full_name.into(), why });
        }
    }
    Ok(())
}

fn shown(value: Option<Value>) -> String {
    match value {
        Some(value) => value.to_string(),
        None => "not set".into(),
    }
}

/// Returns the directory of a run with this name.
///
/// # Errors
/// Returns `UsageError` for an invalid name.
pub fn run_path(name: &str) -> Result<PathBuf, UsageError> {
    let is_forbidden = |character: char| character.is_control() || "/\\".contains(character);
    let is_plain = !name.is_empty() && !name.starts_with('.') && !name.contains(is_forbidden);
    if !is_plain || name == "latest" {
        return Err(UsageError(format!(
            "--name {}: expects the name of a directory in {RUNS}/, other than latest and without \
             separators and control characters; for another place give --out",
            name.escape_debug()
        )));
    }
    Ok(Path::new(RUNS).join(name))
}

/// Directory of a new run with this name.
fn named_run(name: &str) -> Result<PathBuf, UsageError> {
    let path = run_path(name)?;
    if fs::symlink_metadata(&path).is_ok() {
        return Err(taken(name, &path));
    }
    Ok(path)
}

/// Returns the error of a name whose directory exists.
fn taken(name: &str, path: &Path) -> UsageError {
    UsageError(format!(
        "--name {name}: {} exists already; continue it with --resume {}, or choose another name",
        path.display(),
        shell_word(&path.to_string_lossy())
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_runs_are_those_of_directories() {
        assert_eq!(run_path("warm up").ok(), Some(Path::new(RUNS).join("warm up")));
        for name in ["", "latest", "a/b", "..", ".hidden", "a\\b", "a\0", "a\nb", "\u{1b}[31m"] {
            let refused = run_path(name).unwrap_err().to_string();
            assert!(refused.contains("expects the name of a directory"), "{refused}");
            assert!(!refused.contains(char::is_control), "{refused:?}");
        }
        let taken = taken("warm up", &Path::new(RUNS).join("warm up")).to_string();
        assert!(taken.contains("--resume 'runs/warm up', or"), "{taken}");
    }

    #[test]
    fn a_resumed_run_keeps_its_model_its_optimizer_and_the_preparation_of_samples() {
        let resumed_of = |kind: &str, edit: fn(&mut RunConfig)| {
            let mut saved = RunConfig::default();
            saved.set("model.kind", kind.into());
            let mut config = saved.clone();
            edit(&mut config);
            refuse_another(&saved, &config).map_err(|error| error.to_string())
        };
        let resumed = |edit: fn(&mut RunConfig)| resumed_of("gpt", edit);
        assert_eq!(resumed(|c| c.optim.lr = 0.5), Ok(()));
        assert_eq!(resumed(|c| c.set("model.dropout", 0.5.into())), Ok(()));
        assert_eq!(resumed_of("rnn", |c| c.set("model.stateful", true.into())), Ok(()));
        let model = resumed(|c| c.set("model.kind", "rnn".into())).unwrap_err();
        let expected = "model.kind does not fit the checkpoint: it is \"gpt\" there, and \"rnn\" \
                        here; leave it out";
        assert!(model.starts_with(expected), "{model}");
        let layers = resumed(|c| c.set("model.layers", 5.into())).unwrap_err();
        assert!(layers.starts_with("model.layers does not fit"), "{layers}");
        assert!(layers.contains("it is 4 there, and 5 here"), "{layers}");
        let kind = resumed(|c| c.optim.kind = potluck_train::config::schema::OptimKind::Sgd);
        assert!(kind.unwrap_err().starts_with("optim.kind does not fit"));
        for (key, edit) in [
            ("data.target", (|c| c.data.target = Some("b".into())) as fn(&mut RunConfig)),
            ("data.task", |c| c.data.task = Some(potluck_data::TargetKind::Values)),
            ("data.normalize", |c| c.data.normalize = false),
            ("data.image_size", |c| c.data.image_size = vec![8, 8]),
        ] {
            let refused = resumed(edit).unwrap_err();
            assert!(refused.starts_with(&format!("{key} does not fit")), "{refused}");
        }
        assert_eq!(resumed(|c| c.data.held_out = 0.2), Ok(()));
    }
}
