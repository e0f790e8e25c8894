//! Tokens of a run's data that are missing in the model from which the run starts.

use std::path::PathBuf;

use crate::ui::terminal::{print_line, print_warning};
use potluck_data::tokenizer::TOKENIZER;
use potluck_data::{TokenFile, Tokenizer, TokenizerFile};
use potluck_train::error::TrainError;
use potluck_train::run::StartingModel;
use potluck_train::spec::{DataSource, DataSpec, RunSpec};

/// Key with the number of tokens of a model.
pub const VOCABULARY: &str = "model.vocabulary";

/// Tokens that are added to the model from which a run starts.
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
    /// Returns the tokens that are missing in the model from which a run starts; `None` if there
    /// are none. They are added only if `is_allowed`. `vocabulary` is the run's value of
    /// [`VOCABULARY`], the model's or a larger typed number; `has_tokenizer` is true if the run has
    /// another tokenizer than the model.
    ///
    /// # Errors
    /// Returns `TrainError` if tokens are missing and may not be added, or cannot be: if the model
    /// has no tokens or other ids, or the data are neither token ids nor a text with a
    /// `tokenizer.json`.
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
        let named = init.path().display();
        let found = DataTokens::of(&spec.data, has_tokenizer)?;
        let (data, known) = match (found, init.tokens(&*spec.model)) {
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
                // Allowed: a model may be trained on other tokens.
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

    /// Returns the note on the added tokens.
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
    /// Tokens of a run's data; `None` if no file describes them.
    fn of(data: &DataSpec, has_tokenizer: bool) -> Result<Option<Self>, TrainError> {
        if let DataSource::Tokens(path) = &data.source
            && !has_tokenizer
        {
            let file = TokenFile::open(path, 0.0, 1)?;
            let name = path.display().to_string();
            return Ok(Some(match file.tokenizer()? {
                Some(tokenizer) => Self {
                    name,
                    count: tokenizer.vocabulary(),
                    tokenizer: Some(tokenizer),
                    beside: Some(file.tokenizer_path().to_path_buf()),
                },
                None => Self { name, count: file.vocabulary(), tokenizer: None, beside: None },
            }));
        }
        let Some(path) = data.tokenizer_file() else { return Ok(None) };
        let tokenizer = TokenizerFile::load(path)?;
        Ok(Some(Self {
            name: path.display().to_string(),
            count: tokenizer.vocabulary(),
            tokenizer: Some(tokenizer),
            beside: None,
        }))
    }

    /// Checks that the tokens of a model have the same ids here, if its files contain them.
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
