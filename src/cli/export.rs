//! `potluck export`: writes the model of a checkpoint as files of others.

use super::args::ExportArgs;
use super::model::load_with;
use crate::ui::terminal::print_line;
use potluck_data::Tokenizer;
use potluck_train::TrainError;
use potluck_train::hugging_face;

/// Runs `potluck export`.
pub fn export(args: &ExportArgs) -> anyhow::Result<()> {
    let (loaded, spec) = load_with(&args.checkpoint, args.best, None)?;
    let tokenizer = loaded.saved.tokenizer.as_ref();
    let file = tokenizer.and_then(Tokenizer::file);
    hugging_face::export(&args.out, &*spec.model, &loaded.parameters, file, args.dtype)
        .map_err(TrainError::from)?;
    let whose = loaded.step.map(|step| format!(" of step {step}")).unwrap_or_default();
    print_line(&format!("the model{whose} is in {}", args.out.display()));
    if tokenizer.is_some() && file.is_none() {
        print_line("note: the tokenizer is one of potluck, and stays in the checkpoint");
    }
    Ok(())
}
