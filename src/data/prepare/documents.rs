//! Documents of the input files, in pieces that are encoded one by one.

use std::io::{BufRead, Cursor, Read};
use std::mem;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::inputs::{InputFile, unreadable};
use crate::DataError;
use crate::error::NotText;
use crate::text::BYTE_ORDER_MARK;
use crate::tokenizer::{TextDivision, TokenizerFile};
use potluck_core::Setting;
use potluck_core::format::size_text;

/// Longest line of JSON, in bytes.
const LINE_BYTES_MAX: usize = 64 << 20;

/// Longest piece, in bytes. A tokenizer that cannot divide texts needs about 250 times as much
/// memory.
const PIECE_BYTES_MAX: usize = 8 << 20;

/// Place between two pieces from which reading can continue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct ReadPlace {
    /// Index of the file.
    pub file: usize,
    /// Unpacked bytes of the file that were read.
    offset: u64,
    /// Lines of the file that were read.
    line: u64,
    /// True within a document.
    is_within: bool,
}

/// Piece of a document.
#[derive(Debug)]
pub(super) struct Piece {
    pub text: String,
    pub begins: bool,
    pub ends: bool,
    /// Place after the piece; `None` within a line of JSON.
    pub place: Option<ReadPlace>,
}

pub(super) struct PieceSource<'a> {
    pub files: &'a [InputFile],
    pub tokenizer: &'a TokenizerFile,
    /// Key of the text in a line of JSON.
    pub key: &'a str,
    /// Bytes of a piece of a long document, and of a single read of a text.
    pub piece_bytes: usize,
    /// Counts the bytes that are read from the disk.
    pub read: Arc<AtomicU64>,
}

/// Pieces of all documents, in order.
pub(super) struct Pieces<'a> {
    source: PieceSource<'a>,
    place: ReadPlace,
    reader: Option<Box<dyn BufRead + Send>>,
    /// Text that was read, but is not in a piece yet.
    text: String,
    /// First bytes of the character after `text`.
    incomplete: Vec<u8>,
    is_end: bool,
    /// Pieces of a line that are still to be returned, the last one first.
    of_line: Vec<Piece>,
}

impl<'a> Pieces<'a> {
    /// Starts at a place.
    pub fn new(source: PieceSource<'a>, place: ReadPlace) -> Self {
        Self {
            source,
            place,
            reader: None,
            text: String::new(),
            incomplete: Vec::new(),
            is_end: false,
            of_line: Vec::new(),
        }
    }

    /// Returns the next piece; `None` at the end of all files.
    ///
    /// # Errors
    /// Returns a `DataError` that names the file and the place in it if it cannot be read, or does
    /// not have the format of its name.
    pub fn piece(&mut self) -> Result<Option<Piece>, DataError> {
        loop {
            if let Some(piece) = self.of_line.pop() {
                return Ok(Some(piece));
            }
            let Some(file) = self.source.files.get(self.place.file) else { return Ok(None) };
            if self.reader.is_none() {
                self.reader = Some(self.open(file)?);
                self.skip_byte_order_mark(file)?;
            }
            let found = if file.is_lines { self.line(file)? } else { self.part(file)? };
            if found.is_some() {
                return Ok(found);
            }
            self.place = ReadPlace { file: self.place.file + 1, ..ReadPlace::default() };
            self.reader = None;
            self.is_end = false;
        }
    }

    /// Opens a file at the current place.
    fn open(&self, file: &InputFile) -> Result<Box<dyn BufRead + Send>, DataError> {
        let opened = file.open(self.place.offset, &self.source.read);
        opened.map_err(|why| unreadable(&file.path, why))
    }

    /// Reads over the byte order mark of a file that was just opened at its beginning.
    fn skip_byte_order_mark(&mut self, file: &InputFile) -> Result<(), DataError> {
        let Some(mut reader) = self.reader.take() else { return Ok(()) };
        if self.place.offset == 0 {
            let mut start = Vec::new();
            let read = (&mut reader).take(BYTE_ORDER_MARK.len() as u64).read_to_end(&mut start);
            read.map_err(|why| unreadable(&file.path, why))?;
            if start == BYTE_ORDER_MARK {
                self.place.offset = start.len() as u64;
            } else {
                reader = Box::new(Cursor::new(start).chain(reader));
            }
        }
        self.reader = Some(reader);
        Ok(())
    }

    /// Reads a document in JSON, returns its first piece and leaves the others in `of_line`; `None`
    /// at the end of the file.
    fn line(&mut self, file: &InputFile) -> Result<Option<Piece>, DataError> {
        let Some(reader) = &mut self.reader else { return Ok(None) };
        loop {
            let mut line = Vec::new();
            let most = &mut reader.take(LINE_BYTES_MAX as u64 + 1);
            let read = most.read_until(b'\n', &mut line);
            if read.map_err(|why| unreadable(&file.path, why))? == 0 {
                return Ok(None);
            }
            self.place.offset += line.len() as u64;
            self.place.line += 1;
            let number = self.place.line;
            let refuse = |why: String| DataError::Invalid {
                name: file.path.display().to_string(),
                place: format!("line {number}"),
                why: why.into(),
            };
            if line.len() > LINE_BYTES_MAX {
                let most = size_text(LINE_BYTES_MAX);
                return Err(refuse(format!("is longer than {most}")));
            }
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let text = document(&line, self.source.key).map_err(refuse)?;
            if text.is_empty() {
                continue;
            }
            self.of_line = self.divided(file, &text)?;
            return Ok(self.of_line.pop());
        }
    }

    /// Pieces of a document that was read as a whole, the last one first.
    fn divided(&self, file: &InputFile, text: &str) -> Result<Vec<Piece>, DataError> {
        let name = file.path.display().to_string();
        let PieceSource { tokenizer, piece_bytes, .. } = self.source;
        let parts = tokenizer.parts(&name, text, piece_bytes)?;
        let last = parts.len().saturating_sub(1);
        if parts.get(last).is_some_and(|part| part.len() > PIECE_BYTES_MAX) {
            return Err(indivisible(file, self.place.line));
        }
        let mut pieces = Vec::with_capacity(parts.len());
        for (index, part) in parts.into_iter().enumerate().rev() {
            let ends = index == last;
            pieces.push(Piece {
                text: part.to_owned(),
                begins: index == 0,
                ends,
                place: if ends { Some(self.place) } else { None },
            });
        }
        Ok(pieces)
    }

    /// Reads a piece of a text; `None` at its end.
    fn part(&mut self, file: &InputFile) -> Result<Option<Piece>, DataError> {
        let name = file.path.display().to_string();
        let PieceSource { tokenizer, piece_bytes, .. } = self.source;
        let mut wanted = 2 * piece_bytes;
        loop {
            self.fill(file, wanted)?;
            if self.is_end && self.text.len() <= piece_bytes {
                break;
            }
            match tokenizer.division(&name, &self.text, piece_bytes, self.is_end)? {
                TextDivision::At(end) => {
                    let text = self.text[..end].to_owned();
                    self.text.drain(..end);
                    return Ok(Some(self.piece_of_text(text, false)));
                }
                TextDivision::Nowhere => break,
                TextDivision::Unknown => wanted = 2 * self.text.len(),
            }
            if self.text.len() > PIECE_BYTES_MAX {
                break;
            }
        }
        if self.text.len() > PIECE_BYTES_MAX {
            return Err(indivisible(file, self.place.line + 1));
        }
        if self.text.is_empty() && !self.place.is_within {
            return Ok(None);
        }
        let text = mem::take(&mut self.text);
        Ok(Some(self.piece_of_text(text, true)))
    }

    /// Returns a piece of a text, and moves the place after it.
    fn piece_of_text(&mut self, text: String, ends: bool) -> Piece {
        let begins = !self.place.is_within;
        self.place.offset += text.len() as u64;
        self.place.line += line_ends(text.as_bytes()) as u64;
        self.place.is_within = !ends;
        Piece { text, begins, ends, place: Some(self.place) }
    }

    /// Reads until `wanted` bytes of a text are buffered, or to its end.
    fn fill(&mut self, file: &InputFile, wanted: usize) -> Result<(), DataError> {
        let Some(reader) = &mut self.reader else { return Ok(()) };
        while !self.is_end && self.text.len() < wanted {
            let mut bytes = mem::take(&mut self.incomplete);
            let most = (wanted - self.text.len()).max(self.source.piece_bytes) as u64;
            let read = reader.take(most).read_to_end(&mut bytes);
            self.is_end = read.map_err(|why| unreadable(&file.path, why))? == 0;
            let valid = match str::from_utf8(&bytes) {
                Ok(text) => text.len(),
                // The rest of the character may follow.
                Err(why) if why.error_len().is_none() && !self.is_end => why.valid_up_to(),
                Err(why) => {
                    let good = &bytes[..why.valid_up_to()];
                    let offset = self.place.offset as usize + self.text.len() + good.len();
                    let before = self.place.line as usize + line_ends(self.text.as_bytes());
                    let name = file.path.display().to_string();
                    let line = 1 + before + line_ends(good);
                    let kind = NotText::of(&name, &bytes);
                    return Err(DataError::NotUtf8 { name, offset, line, kind });
                }
            };
            self.incomplete = bytes.split_off(valid);
            self.text += str::from_utf8(&bytes).unwrap_or_default();
        }
        Ok(())
    }
}

fn line_ends(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte == b'\n').count()
}

fn indivisible(file: &InputFile, line: u64) -> DataError {
    let why = format!(
        "begins {} and more that this tokenizer cannot take in parts; divide it into documents, as \
         JSON Lines or files",
        size_text(PIECE_BYTES_MAX)
    );
    DataError::Invalid {
        name: file.path.display().to_string(),
        place: format!("line {line}"),
        why: why.into(),
    }
}

fn document(line: &[u8], key: &str) -> Result<String, String> {
    let read: Result<serde_json::Value, _> = serde_json::from_slice(line);
    let mut value = read.map_err(|why| format!("is no JSON ({why})"))?;
    let Some(fields) = value.as_object_mut() else {
        return Err("is no JSON object with a text".into());
    };
    match fields.remove(key) {
        Some(serde_json::Value::String(text)) => Ok(text),
        Some(other) => {
            let kind = match other {
                serde_json::Value::Array(_) => "a list",
                serde_json::Value::Object(_) => "an object",
                serde_json::Value::Number(_) => "a number",
                _ => "no text",
            };
            Err(format!("has {kind} as {key:?}; a text was expected"))
        }
        None => {
            let names: Vec<&str> = fields.keys().map(String::as_str).take(8).collect();
            let names = names.join(", ");
            let setting = Setting::TextKey;
            Err(format!("has no {key:?}, and these keys: {names}; set {setting} to the text's"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_is_the_text_of_its_key() {
        let text = |line: &str| document(line.as_bytes(), "text");
        assert_eq!(text(r#"{"id": 3, "text": "a\n\u00e9"}"#), Ok("a\né".into()));
        assert!(text("[1]").unwrap_err().contains("no JSON object"));
        assert!(text(r#"{"text": "#).unwrap_err().contains("is no JSON (EOF"));
        let other = text(r#"{"body": "b", "id": 3}"#).unwrap_err();
        assert!(other.contains("and these keys: body, id; set "), "{other}");
        assert!(text(r#"{"text": [1, 2]}"#).unwrap_err().contains("has a list as \"text\""));
    }
}
