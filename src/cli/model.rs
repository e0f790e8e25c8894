//! `potluck eval` and `potluck generate`: evaluation of a checkpoint, and text generation with
//! it.

use std::sync::Arc;

use super::args::{CheckpointArgs, EvalArgs, EvalSplit, GenerateArgs};
use super::resume::find_text;
use super::train::saved_spec;
use crate::checkpoint::{Checkpoint, Store};
use crate::data::{Split, TextData};
use crate::model::LanguageModel;
use crate::runtime::open::{self, OpenOptions};
use crate::runtime::workers::WorkerGroup;
use crate::train::error::TrainError;
use crate::train::evaluate::evaluate_split;
use crate::train::loader::BatchSource;
use crate::train::sampling::Sampling;
use crate::train::sentences::measure_sentences;
use crate::train::spec::{DataSource, RunSpec};
use crate::train::{generate, state};
use crate::ui::terminal::print_line;

/// Warning that the loss is not one of the text that the run was trained on.
const OTHER_DATA: &str = "warning: the data are not those that the checkpoint was trained on; the \
                          loss cannot be compared with the run's";

/// Prints the mean loss and the perplexity of a checkpoint on a split of its data or on another
/// text, and for the built-in corpus the share of sampled sentences that are right.
pub fn eval(args: &EvalArgs) -> anyhow::Result<()> {
    let (checkpoint, mut spec) = load(&args.checkpoint)?;
    let split = match args.split {
        EvalSplit::Val if args.data.is_none() => Split::Validation,
        EvalSplit::Val | EvalSplit::Train => Split::Train,
    };
    if split == Split::Validation && spec.data.held_out == 0.0 {
        let why = "the run held nothing out; give --split train or --data PATH";
        return Err(TrainError::InvalidRequest(why.into()).into());
    }
    let step = checkpoint.meta.step;
    let tokenizer = checkpoint.meta.tokenizer.clone();
    let data = match &args.data {
        Some(path) => spec.load_text(path, tokenizer)?,
        None => {
            if let DataSource::File(path) = &mut spec.data.source {
                *path = find_text(path, &args.checkpoint.checkpoint)?;
            }
            spec.load_data(tokenizer)?
        }
    };
    if args.data.is_none() && data.fingerprint() != checkpoint.meta.data {
        print_line(OTHER_DATA);
    }
    let (group, source) = open(&args.checkpoint, checkpoint, &spec, data)?;
    let rows = [spec.micro_batch];
    let request = crate::train::evaluate::EvalRequest {
        source: &source,
        split,
        samples: 0,
        rows: &rows,
        weights: &[1],
        signals: &Default::default(),
    };
    let loss = evaluate_split(&group, &request, &mut |_, _| Ok(()))?.unwrap().loss;
    let is_of_corpus = args.data.is_none() && spec.data.source == DataSource::Builtin;
    let sentences = is_of_corpus.then(|| {
        let (data, model, from) = (&source.data, source.model, (step, spec.seed));
        measure_sentences(&group, data.tokenizer(), model, &rows, from, || false)
    });
    let sentences = sentences.transpose()?.flatten().map(|sampled| sampled.record);
    let targets =
        source.data.evaluation_windows(split, source.model.context).len() * source.model.context;
    if args.json {
        let perplexity = loss.exp();
        let mut line = serde_json::json!({
            "step": step, "loss": loss, "perplexity": perplexity, "targets": targets
        });
        if let Some(sentences) = sentences {
            line["sentences"] = serde_json::json!(sentences);
        }
        super::print(&format!("{line}\n"));
    } else {
        let perplexity = loss.exp();
        super::print(&format!(
            "step {step}  loss {loss:.4}  perplexity {perplexity:.2}  {targets} targets\n"
        ));
        sentences.iter().for_each(|measure| _ = super::print(&format!("{measure}\n")));
    }
    Ok(())
}

/// Prints the prompt and the model's continuation of it, token by token as it is generated.
pub fn generate(args: &GenerateArgs) -> anyhow::Result<()> {
    let (checkpoint, spec) = load(&args.checkpoint)?;
    let no_text = || TrainError::InvalidRequest("the checkpoint is not of a model of text".into());
    let tokenizer = checkpoint.meta.tokenizer.clone().ok_or_else(no_text)?;
    let prompt = args.prompt.clone().unwrap_or_else(|| generate::default_prompt(&tokenizer));
    // A prompt that cannot be continued is refused before any of it is printed.
    tokenizer.encode(&prompt).map_err(TrainError::from)?;
    let plan = spec.forward_plan(tokenizer.vocabulary(), 1)?;
    let missing = || TrainError::Defect("the model has no logits".into());
    let model = LanguageModel::of(&plan.graph).ok_or_else(missing)?;
    let group = open_model(&args.checkpoint.devices, &spec, checkpoint, plan)?;
    let sampling = Sampling { temperature: args.temperature, top_k: args.top_k, seed: args.seed };
    super::print(args.prompt.as_deref().unwrap_or_default());
    generate::generate(
        group.leader()?,
        &tokenizer,
        model,
        &prompt,
        &sampling,
        args.tokens,
        super::print,
    )?;
    super::print("\n");
    Ok(())
}

/// Loads the checkpoint that the arguments name, and the specification of its run.
fn load(args: &CheckpointArgs) -> anyhow::Result<(Checkpoint, RunSpec)> {
    let (checkpoint, warnings) = match args.best {
        true => Store::open_to_read(&args.checkpoint).load_best(),
        false => Checkpoint::load_path(&args.checkpoint),
    }
    .map_err(TrainError::from)?;
    warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
    let spec = saved_spec(&checkpoint)?;
    Ok((checkpoint, spec))
}

fn open(
    args: &CheckpointArgs,
    checkpoint: Checkpoint,
    spec: &RunSpec,
    data: TextData,
) -> anyhow::Result<(WorkerGroup, BatchSource)> {
    let plan = spec.forward_plan(data.tokenizer().vocabulary(), spec.micro_batch)?;
    let source = spec.batch_source(&plan.graph, &Arc::new(data), (0, 0))?;
    Ok((open_model(&args.devices, spec, checkpoint, plan)?, source))
}

/// Opens a device with the checkpoint's parameters on it.
fn open_model(
    devices: &str,
    spec: &RunSpec,
    checkpoint: Checkpoint,
    plan: crate::graph::Plan,
) -> anyhow::Result<WorkerGroup> {
    // No autotuning: for the few passes made here, timing kernels takes longer than it saves.
    let options = OpenOptions { tune_s: 0.0, ..spec.opening };
    let opened = open::open(devices, plan, 0, &options)?;
    opened.notes.iter().for_each(|note| print_line(note));
    let group = WorkerGroup::single(opened.driver)?;
    state::restore(&group, checkpoint.parameters, &[], 0)?;
    Ok(group)
}
