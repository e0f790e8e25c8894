//! `potluck export`: writes the model of a checkpoint as files of others.

use super::args::ExportArgs;
use super::model::load_parameters;
use super::train::saved_spec;
use crate::ui::terminal::print_line;
use potluck_data::Tokenizer;
use potluck_train::TrainError;
use potluck_train::hugging_face;

/// Runs `potluck export`.
pub fn export(args: &ExportArgs) -> anyhow::Result<()> {
    let checkpoint = load_parameters(&args.checkpoint, args.best)?;
    let spec = saved_spec(&checkpoint, None)?;
    let tokenizer = checkpoint.meta.tokenizer.as_ref();
    let file = tokenizer.and_then(Tokenizer::file);
    hugging_face::export(&args.out, &*spec.model, &checkpoint.parameters, file, args.dtype)
        .map_err(TrainError::from)?;
    print_line(&format!("the model of step {} is in {}", checkpoint.meta.step, args.out.display()));
    if tokenizer.is_some() && file.is_none() {
        print_line("note: the tokenizer is one of potluck, and stays in the checkpoint");
    }
    Ok(())
}
