//! `potluck export`: writes the model of a checkpoint in the formats of other programs.

use super::args::{ExportArgs, ExportFormat};
use super::model::{LoadedModel, load_with};
use crate::ui::terminal::print_line;
use potluck_data::{ChatTemplate, Tokenizer, TokenizerFile};
use potluck_train::TrainError;
use potluck_train::gguf::{self, GgufModel, SpecialTokens};
use potluck_train::hugging_face::{self, ExportedModel, ModelFiles};
use potluck_train::spec::RunSpec;

/// Runs `potluck export`.
pub fn export(args: &ExportArgs) -> anyhow::Result<()> {
    let (mut loaded, spec) = load_with(&args.checkpoint, args.best, None)?;
    if args.format != ExportFormat::Safetensors {
        let zeros = hugging_face::zero_biases(&*spec.model, &loaded.parameters);
        if !zeros.is_empty() {
            print_line("note: GPT-2 has biases, which are zeros here: the model has none");
        }
        loaded.parameters.extend(zeros);
    }
    write(args, &loaded, &spec)?;
    let whose = match loaded.step {
        Some(step) => format!(" of step {step}"),
        None => String::new(),
    };
    print_line(&format!("the model{whose} is in {}", args.out.display()));
    Ok(())
}

fn write(args: &ExportArgs, loaded: &LoadedModel, spec: &RunSpec) -> Result<(), TrainError> {
    let tokenizer = loaded.saved.tokenizer.as_ref();
    let begin = match &loaded.files {
        Some(directory) => hugging_face::begin_token(directory)?,
        None => None,
    };
    match args.format {
        ExportFormat::Huggingface => {
            let files = match &loaded.files {
                Some(directory) => ModelFiles::read(directory)?,
                None => ModelFiles::default(),
            };
            let tokenizer = match tokenizer {
                Some(tokenizer) => Some(as_trained(loaded, tokenizer.to_file()?)?),
                None => None,
            };
            let model = ExportedModel {
                family: &*spec.model,
                parameters: &loaded.parameters,
                tokenizer: tokenizer.as_ref(),
                begin,
                ends: &loaded.ends,
                files: &files,
                kind: args.dtype,
                shard_bytes: args.shard_size,
            };
            hugging_face::export(&args.out, &model)?;
        }
        ExportFormat::Gguf => {
            // A model without a form needs no tokenizer either.
            hugging_face::configuration(&*spec.model, 0)?;
            let Some(tokenizer) = tokenizer.and_then(Tokenizer::file) else {
                let why = "a GGUF file has the tokenizer.json of its model, and this model has \
                           none; train it with data.tokenizer = PATH";
                return Err(TrainError::InvalidRequest(why.into()));
            };
            let tokenizer = as_trained(loaded, tokenizer.clone())?;
            let template = match &loaded.files {
                Some(directory) => ChatTemplate::of_directory(directory)?,
                None => None,
            };
            // Among several end tokens, the one of the tokenizer's configuration.
            let end = match &loaded.files {
                Some(directory) => tokenizer.end_token(directory)?,
                None => None,
            };
            let end = end.filter(|end| loaded.ends.contains(end)).or(loaded.ends.first().copied());
            let name = args.out.file_stem().unwrap_or_default().to_string_lossy();
            let model = GgufModel {
                family: &*spec.model,
                parameters: &loaded.parameters,
                name: &name,
                tokenizer: tokenizer.json(),
                special: SpecialTokens { begin, end },
                chat_template: template.as_ref().map(ChatTemplate::source),
                kind: args.dtype,
            };
            gguf::export(&args.out, &model)?;
        }
        ExportFormat::Safetensors => {
            hugging_face::export_parameters(&args.out, &loaded.parameters, args.dtype)?;
        }
    }
    Ok(())
}

/// Returns the tokenizer with which other programs encode texts as they were encoded in training: a
/// run that did not start from a model's files has no tokens around its texts.
fn as_trained(loaded: &LoadedModel, tokenizer: TokenizerFile) -> Result<TokenizerFile, TrainError> {
    if loaded.files.is_some() {
        return Ok(tokenizer);
    }
    Ok(tokenizer.without_template()?)
}
