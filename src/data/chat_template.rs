//! Chat templates: the format of conversations that a model was trained on, as a Jinja template in
//! its files, rendered as in transformers.

use std::io;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use serde_json::ser::Formatter;

use super::DataError;
use super::tokenizer::config::{StoredTemplate, StoredToken, TokenizerConfig, read_text};
use potluck_core::format::size_text;

/// Largest size of a template and of a rendered conversation.
const BYTES_MAX: usize = 1 << 20;

/// Limit of template instructions per rendering, enough for thousands of messages.
const FUEL: u64 = 5_000_000;

/// Template of ChatML, on which many models without a template were trained.
const CHATML: &str = "\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}";

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ChatMessage {
    /// `system`, `user` or `assistant`.
    pub role: &'static str,
    pub content: String,
}

/// Chat template of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatTemplate {
    /// Name in messages: its path.
    name: String,
    source: String,
    /// Texts of the tokens that begin and end a text.
    bos_token: String,
    eos_token: String,
}

impl ChatTemplate {
    /// Returns the template of ChatML.
    pub fn chatml() -> Self {
        Self {
            name: "chatml".into(),
            source: CHATML.into(),
            bos_token: String::new(),
            eos_token: "<|im_end|>".into(),
        }
    }

    /// Reads the template in the directory of a model: `chat_template.jinja`, or else the one in
    /// its `tokenizer_config.json`; `None` without either.
    ///
    /// # Errors
    /// Returns a `DataError` that names the file if it cannot be read or is too large.
    pub fn of_directory(directory: &Path) -> Result<Option<Self>, DataError> {
        let config = TokenizerConfig::read(directory)?;
        let config_path = TokenizerConfig::path(directory);
        let own_path = directory.join("chat_template.jinja");
        let (path, source) = match (read_text(&own_path)?, config.chat_template) {
            (Some(source), _) => (own_path, source),
            (None, Some(StoredTemplate::One(source))) => (config_path, source),
            (None, Some(StoredTemplate::Named(all))) => {
                let Some(found) = all.into_iter().find(|one| one.name == "default") else {
                    let why = "has no default chat_template";
                    return Err(DataError::of_file(config_path.display(), why));
                };
                (config_path, found.template)
            }
            (None, None) => return Ok(None),
        };
        Ok(Some(Self {
            name: path.display().to_string(),
            source,
            bos_token: config.bos_token.map(StoredToken::text).unwrap_or_default(),
            eos_token: config.eos_token.map(StoredToken::text).unwrap_or_default(),
        }))
    }

    /// Returns the text of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Reads a template from a file, without tokens; see [`Self::with_tokens_of`].
    ///
    /// # Errors
    /// Returns a `DataError` that names the file if it cannot be read or is too large.
    pub fn load(path: &Path) -> Result<Self, DataError> {
        let Some(source) = read_text(path)? else {
            let why = io::Error::from(io::ErrorKind::NotFound);
            return Err(DataError::of_file(path.display(), format!("cannot be read ({why})")));
        };
        let name = path.display().to_string();
        Ok(Self { name, source, bos_token: String::new(), eos_token: String::new() })
    }

    /// Returns the template with the tokens that begin and end texts in a model's directory, by its
    /// `tokenizer_config.json`; empty ones without it.
    ///
    /// # Errors
    /// Returns a `DataError` that names the file if it is not a configuration.
    pub fn with_tokens_of(self, directory: &Path) -> Result<Self, DataError> {
        let TokenizerConfig { bos_token, eos_token, .. } = TokenizerConfig::read(directory)?;
        Ok(Self {
            bos_token: bos_token.map(StoredToken::text).unwrap_or_default(),
            eos_token: eos_token.map(StoredToken::text).unwrap_or_default(),
            ..self
        })
    }

    /// Returns the text that a model continues with the answer to a conversation.
    ///
    /// # Errors
    /// Returns `DataError::Invalid` if the template is invalid, refuses the conversation, or takes
    /// too long for it.
    pub fn render(&self, messages: &[ChatMessage]) -> Result<String, DataError> {
        let refuse = |why: String| DataError::of_file(&self.name, why);
        if self.source.len() > BYTES_MAX {
            return Err(refuse(format!("has more than {}", size_text(BYTES_MAX))));
        }
        let mut rendered = Bounded(Vec::new());
        match self.render_to(messages, &mut rendered) {
            Err(why) if why.kind() == ErrorKind::OutOfFuel => {
                Err(refuse("does not come to an end".into()))
            }
            Err(_) if rendered.is_full() => {
                Err(refuse(format!("makes more than {} of it", size_text(BYTES_MAX))))
            }
            Err(why) => Err(refuse(format!("cannot be rendered ({why})"))),
            Ok(()) => {
                String::from_utf8(rendered.0).map_err(|why| refuse(format!("is no text ({why})")))
            }
        }
    }

    fn render_to(&self, messages: &[ChatMessage], text: &mut Bounded) -> Result<(), Error> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", |why: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, why))
        });
        environment.add_function("strftime_now", |format: String| {
            let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            strftime(&format, since.as_secs())
        });
        let source = without_generation_tags(&self.source);
        let template = environment.template_from_str(&source)?;
        let context = context! {
            messages,
            add_generation_prompt => true,
            bos_token => self.bos_token,
            eos_token => self.eos_token,
            tools => Value::from(()),
            documents => Value::from(()),
        };
        template.render_captured_to(context, text).map(drop)
    }
}

/// Text of at most [`BYTES_MAX`].
struct Bounded(Vec<u8>);

impl Bounded {
    fn is_full(&self) -> bool {
        self.0.len() >= BYTES_MAX
    }
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(BYTES_MAX - self.0.len());
        self.0.extend_from_slice(&bytes[..taken]);
        // A full writer takes 0 bytes, which `write_all` reports as an error.
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Removes the tags that mark the answers for training, which do not appear in a rendering.
fn without_generation_tags(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        let Some(length) = tag.find("%}").map(|end| end + 2) else { break };
        let inner = tag[2..length - 2].trim_matches(['-', '+']).trim();
        text += before;
        if matches!(inner, "generation" | "endgeneration") {
            // A comment removes the same spaces around it.
            text += &tag[..length].replacen("{%", "{#", 1).replacen("%}", "#}", 1);
        } else {
            text += &tag[..length];
        }
        rest = &tag[length..];
    }
    text + rest
}

/// Filter `tojson` of transformers: Python's `json.dumps` without escapes.
fn to_json(value: Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let written = match indent {
        Some(columns) => {
            let spaces = vec![b' '; columns.min(64)];
            serialized(&value, serde_json::ser::PrettyFormatter::with_indent(&spaces))
        }
        None => serialized(&value, PythonFormat),
    };
    let bytes = written.map_err(|why| Error::new(ErrorKind::BadSerialization, why.to_string()))?;
    String::from_utf8(bytes).map_err(|why| Error::new(ErrorKind::BadSerialization, why.to_string()))
}

fn serialized(value: &Value, formatter: impl Formatter) -> serde_json::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, formatter);
    serde::Serialize::serialize(value, &mut serializer)?;
    Ok(bytes)
}

/// Separators of Python's `json.dumps`.
struct PythonFormat;

impl Formatter for PythonFormat {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.begin_array_value(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// Formats seconds since 1970 as a date in UTC; unknown directives are copied.
fn strftime(format: &str, seconds: u64) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let second = seconds % 86_400;
    let [year, month, day] = civil(seconds / 86_400);
    let name = MONTHS[month as usize - 1];
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(char) = chars.next() {
        if char != '%' {
            text.push(char);
            continue;
        }
        match chars.next() {
            Some('Y') => text += &year.to_string(),
            Some('m') => text += &format!("{month:02}"),
            Some('d') => text += &format!("{day:02}"),
            Some('b') => text += &name[..3],
            Some('B') => text += name,
            Some('H') => text += &format!("{:02}", second / 3600),
            Some('M') => text += &format!("{:02}", second / 60 % 60),
            Some('S') => text += &format!("{:02}", second % 60),
            Some(other) => text.extend(['%', other]),
            None => text.push('%'),
        }
    }
    text
}

/// Returns year, month and day of a day since 1970-01-01 in the Gregorian calendar (Hinnant 2013,
/// `civil_from_days`).
fn civil(days: u64) -> [u64; 3] {
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let of_era = shifted % 146_097;
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    [year + 400 * era + u64::from(month <= 2), month, day]
}

#[cfg(test)]
mod tests;
