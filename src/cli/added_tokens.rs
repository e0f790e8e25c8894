//! Tokens that the data of a run have, and the model that it starts from has not.

use std::path::PathBuf;

use crate::ui::terminal::{print_line, print_warning};
use potluck_data::tokenizer::TOKENIZER;
use potluck_data::{TokenFile, Tokenizer, TokenizerFile};
use potluck_train::error::TrainError;
use potluck_train::run::StartingModel;
use potluck_train::spec::{DataSource, DataSpec, RunSpec};

/// Key with the number of tokens of a model.
pub const VOCABULARY: &str = "model.vocabulary";

/// Tokens that are added to the model that a run starts from.
pub struct AddedTokens {
    /// Number of tokens of the model.
    pub known: usize,
    /// Number of tokens of the run.
    pub wanted: usize,
    /// Tokenizer of the run's token ids, if it is beside them and no key names it.
    pub tokenizer: Option<PathBuf>,
}

/// Tokens of a run's data.
struct DataTokens {
    name: String,
    count: usize,
    tokenizer: Option<TokenizerFile>,
    /// Path of the tokenizer, if it is beside token ids and no key names it.
    beside: Option<PathBuf>,
}

impl AddedTokens {
    /// Finds out how many tokens are missing in a model that a run starts from; `None` if that is
    /// none. They are added only if `is_allowed`. `vocabulary` is what the run has for
    /// [`VOCABULARY`], the model's or a larger number that was typed; `has_tokenizer` says that it
    /// has another tokenizer than the model's by default.
    ///
    /// # Errors
    /// Returns `TrainError` if tokens are missing and may not be added, or cannot be: if the model
    /// has none or other ids, or the data are no text of a `tokenizer.json`, nor token ids.
    pub fn find(
        is_allowed: bool,
        init: &StartingModel,
        spec: &RunSpec,
        vocabulary: Option<usize>,
        has_tokenizer: bool,
    ) -> Result<Option<Self>, TrainError> {
        let refuse = |why: String| Err(TrainError::InvalidRequest(why));
        if !is_allowed && !has_tokenizer {
            // Text is tokenized as the model's, and token ids are checked when they are opened.
            return Ok(None);
        }
        let data = DataTokens::of(&spec.data, has_tokenizer)?;
        let named = init.path().display();
        let known = init.tokens(&*spec.model);
        let (data, known) = match (data, known) {
            (Some(data), Some(known)) => (data, known),
            _ if !is_allowed => return Ok(None),
            (None, _) => {
                let why = "--add-tokens needs data.tokenizer, the path of a tokenizer.json, or \
                           data of token ids";
                return refuse(why.into());
            }
            (_, None) => {
                let why = format!("--add-tokens is for a gpt or a llama, and {named} is none");
                return refuse(why);
            }
        };
        let wanted = data.count.max(vocabulary.unwrap_or(0));
        if !is_allowed {
            if data.count <= known {
                // Allowed: a model may be trained anew on other tokens.
                if let Err(why) = data.require_tokens_of(init) {
                    print_warning(&why.to_string());
                }
                return Ok(None);
            }
            return refuse(format!(
                "{} has {} tokens, and {named} has {known}; --add-tokens adds what is missing",
                data.name, data.count
            ));
        }
        data.require_tokens_of(init)?;
        if wanted <= known {
            let DataTokens { name, count, .. } = &data;
            print_line(&format!(
                "note: no tokens are added: {name} has {count}, and {named} has {known}"
            ));
            return Ok(None);
        }
        Ok(Some(Self { known, wanted, tokenizer: data.beside }))
    }

    /// Returns the line that says what is added.
    pub fn note(&self, init: &StartingModel) -> String {
        let Self { known, wanted, .. } = self;
        format!(
            "{} tokens are added to the {known} of {}, each with the mean of their rows",
            wanted - known,
            init.path().display()
        )
    }
}

impl DataTokens {
    /// Returns the tokens of a run's data; `None` if no file says which they are.
    fn of(data: &DataSpec, has_tokenizer: bool) -> Result<Option<Self>, TrainError> {
        if let (DataSource::Tokens(path), false) = (&data.source, has_tokenizer) {
            let file = TokenFile::open(path, 0.0, 1)?;
            let tokenizer = file.tokenizer()?;
            return Ok(Some(Self {
                name: path.display().to_string(),
                count: tokenizer.as_ref().map_or(file.vocabulary(), TokenizerFile::vocabulary),
                beside: tokenizer.is_some().then(|| file.tokenizer_path().to_path_buf()),
                tokenizer,
            }));
        }
        let Some(path) = data.tokenizer_file() else { return Ok(None) };
        let tokenizer = TokenizerFile::load(path)?;
        let (name, count) = (path.display().to_string(), tokenizer.vocabulary());
        Ok(Some(Self { name, count, tokenizer: Some(tokenizer), beside: None }))
    }

    /// Checks that the tokens of a model have the same ids here, as far as its files tell.
    fn require_tokens_of(&self, init: &StartingModel) -> Result<(), TrainError> {
        let named = init.path().display();
        if let Some(Tokenizer::Char { .. } | Tokenizer::Byte) = init.saved().tokenizer {
            return Err(TrainError::InvalidRequest(format!(
                "{named} has characters or bytes for tokens, whose ids no tokenizer.json has"
            )));
        }
        let path = init.path().join(TOKENIZER);
        let (Some(tokenizer), true) = (&self.tokenizer, path.is_file()) else {
            let name = &self.name;
            print_line(&format!(
                "note: no tokenizer.json tells whether {named} and {name} have the same ids"
            ));
            return Ok(());
        };
        tokenizer.require_tokens_of(&self.name, &TokenizerFile::load(&path)?)?;
        Ok(())
    }
}
