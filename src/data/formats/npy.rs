//! NumPy arrays, `.npy`: a magic text, the version, the length of a header, the header (the literal
//! of a Python dictionary) and the values. Kern, "NEP 1: A simple file format for NumPy arrays";
//! versions 1.0 to 3.0 in `numpy.lib.format`.

use std::path::Path;

use half::f16;

use super::files::{self, FileSets, file_name, invalid};
use super::{DataError, FileSet, ReadSet, Request, Samples, TargetKind, Targets};
use crate::Features;
use potluck_core::format::{dims_text, listed};

pub(super) const MAGIC: &[u8] = b"\x93NUMPY";
/// Files of features in a directory: of the training samples, and of the held-out ones.
pub(super) const INPUTS: [&str; 2] = ["inputs.npy", "val_inputs.npy"];

/// Largest number of classes of integer targets; more are taken for a mistake.
const CLASSES_MAX: usize = 1 << 20;
/// Largest number of dimensions of an array in NumPy.
const DIMS_MAX: usize = 64;

/// Finds inputs and targets in a directory, or takes a file with the targets beside it.
pub(super) fn find(path: &Path) -> Result<FileSets, DataError> {
    let [train, held_out] = INPUTS;
    let sets = if path.is_dir() {
        FileSets::new(set_if_file(&path.join(train)), set_if_file(&path.join(held_out)))
    } else if file_name(path) == train {
        FileSets::new(Some(set_of(path)), set_if_file(&path.with_file_name(held_out)))
    } else {
        FileSets::new(Some(set_of(path)), None)
    };
    sets.ok_or_else(|| invalid(&path.display().to_string(), "", "has no inputs.npy"))
}

fn set_if_file(inputs: &Path) -> Option<FileSet> {
    if inputs.is_file() { Some(set_of(inputs)) } else { None }
}

/// Set of inputs with the targets beside them, if there are any.
fn set_of(inputs: &Path) -> FileSet {
    let path = inputs.with_file_name(file_name(inputs).replace("inputs", "targets"));
    let targets = if path != inputs && path.is_file() { Some(path) } else { None };
    FileSet { inputs: vec![inputs.into()], targets }
}

/// Reads inputs and targets.
pub(super) fn read(set: &FileSet, request: &Request) -> Result<ReadSet, DataError> {
    let path = &set.inputs[0];
    let name = path.display().to_string();
    let (bytes, file) = files::read(path, request.base)?;
    let inputs = parse(&name, &bytes)?;
    let mut files = vec![file];
    let mut samples = inputs.into_samples()?;
    drop(bytes);
    if let Some(path) = &set.targets {
        let (bytes, file) = files::read(path, request.base)?;
        files.push(file);
        let targets_name = path.display().to_string();
        let array = parse(&targets_name, &bytes)?;
        if array.shape[0] != samples.len() {
            let found = array.shape[0];
            let expected = samples.len();
            let why = format!("has targets of {found} samples, and {name} has {expected} samples");
            return Err(invalid(&targets_name, "", why));
        }
        samples.targets = array.into_targets(request.kind())?;
    } else if request.targets {
        let expected = file_name(path).replace("inputs", "targets");
        let why = if expected == file_name(path) {
            "has no targets: name it inputs.npy, with targets.npy beside it".into()
        } else {
            format!("has no targets: there is no {expected} beside it")
        };
        return Err(invalid(&name, "", why));
    }
    Ok(ReadSet { samples, files, is_numbered: true })
}

/// Array in the bytes of a file, with at least one dimension and one value.
#[derive(Debug)]
pub(super) struct NpyArray<'a> {
    name: &'a str,
    kind: NumberType,
    is_fortran: bool,
    pub shape: Vec<usize>,
    data: &'a [u8],
}

/// Reads the header and checks the length.
///
/// # Errors
/// Returns `DataError` if it is not an array of numbers, or not as long as the header says.
pub(super) fn parse<'a>(name: &'a str, bytes: &'a [u8]) -> Result<NpyArray<'a>, DataError> {
    if !bytes.starts_with(MAGIC) {
        let found = bytes[..bytes.len().min(MAGIC.len())].escape_ascii();
        let why = format!("begins with \"{found}\"; a NumPy array with \"\\x93NUMPY\"");
        return Err(invalid(name, "byte 0", why));
    }
    let cut = || invalid(name, "", format!("ends within its header, after {} bytes", bytes.len()));
    let version = *bytes.get(MAGIC.len()).ok_or_else(cut)?;
    let (length, start): (usize, usize) = match version {
        1 => (u16::from_le_bytes(at(bytes, 8).ok_or_else(cut)?) as usize, 10),
        2 | 3 => (u32::from_le_bytes(at(bytes, 8).ok_or_else(cut)?) as usize, 12),
        _ => {
            let why = format!("the format's version is {version}; expected 1, 2 or 3");
            return Err(invalid(name, "byte 6", why));
        }
    };
    let end = start.checked_add(length).ok_or_else(cut)?;
    let header = bytes.get(start..end).ok_or_else(cut)?;
    let Header { kind, is_fortran, shape } = Header::parse(header).map_err(|(at, why)| {
        let place = match at {
            Some(at) => format!("header, byte {at}"),
            None => "header".into(),
        };
        invalid(name, place, why)
    })?;
    let text = format!("({})", listed(&shape));
    if shape.is_empty() || shape.contains(&0) || shape.len() > DIMS_MAX {
        let why = format!("an array of shape {text} has no samples");
        return Err(invalid(name, "header", why));
    }
    let mut needed = kind.size;
    for size in &shape {
        needed = needed.checked_mul(*size).ok_or_else(|| {
            invalid(name, "header", format!("the shape {text} is too large for any memory"))
        })?;
    }
    let data = &bytes[end..];
    if data.len() != needed {
        let found = data.len();
        let size = kind.size;
        let why = format!(
            "has {found} bytes of values; the shape {text} of {size} bytes each needs {needed}"
        );
        return Err(invalid(name, "", why));
    }
    Ok(NpyArray { name, kind, is_fortran, shape, data })
}

/// Returns some bytes from an offset on.
fn at<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    bytes.get(offset..)?.first_chunk().copied()
}

impl NpyArray<'_> {
    fn len(&self) -> usize {
        self.data.len() / self.kind.size
    }

    /// Value by its place in C order.
    fn value(&self, index: usize) -> f64 {
        let mut place = index;
        if self.is_fortran {
            // The first dimension is the fastest in the file, and the last one in `index`.
            let mut rest = index;
            let mut stride = self.len();
            place = 0;
            for size in self.shape.iter().rev() {
                stride /= size;
                place += rest % size * stride;
                rest /= size;
            }
        }
        let start = place * self.kind.size;
        self.kind.value(&self.data[start..start + self.kind.size])
    }

    /// Values in C order.
    fn floats(&self) -> Result<Vec<f32>, DataError> {
        let mut values = Vec::with_capacity(self.len());
        let width = self.len() / self.shape[0];
        for index in 0..self.len() {
            let value = self.value(index);
            let float = value as f32;
            if !float.is_finite() {
                let why = format!("{value:?} is not a finite 32-bit number");
                return Err(invalid(self.name, format!("sample at index {}", index / width), why));
            }
            values.push(float);
        }
        Ok(values)
    }

    /// Array as features; `(n)` numbers are samples of one value.
    pub(crate) fn into_samples(self) -> Result<Samples, DataError> {
        let shape = if self.shape.len() > 1 { self.shape[1..].to_vec() } else { vec![1] };
        Ok(Samples {
            name: self.name.into(),
            shape,
            columns: Vec::new(),
            target_columns: Vec::new(),
            features: Features::Floats(self.floats()?),
            targets: Targets::Absent,
            ids: None,
        })
    }

    /// Returns the array as targets: integers `(n)` are classes and others are values, unless a
    /// kind is given.
    pub(crate) fn into_targets(self, kind: Option<TargetKind>) -> Result<Targets, DataError> {
        let shape = dims_text(&self.shape);
        let width = match self.shape[..] {
            [_] => 1,
            [_, width] => width,
            _ => {
                let why = format!("targets of shape {shape} are not read; expected (n) or (n, k)");
                return Err(invalid(self.name, "header", why));
            }
        };
        let is_float = self.kind.kind == b'f';
        let refuse = |why: &str| Err(invalid(self.name, "header", why));
        match kind {
            Some(TargetKind::Classes) if is_float => {
                refuse("has floats; classes are integers from 0 on, such as y.astype(np.int64)")
            }
            Some(TargetKind::Classes) if width > 1 => {
                refuse("has several values per sample; classes are one integer each")
            }
            None if !is_float && width > 1 => refuse(
                "has several integers per sample, which are no classes; save them as floats if \
                 they are values",
            ),
            Some(TargetKind::Values) => self.values(width),
            None if is_float => self.values(width),
            _ => self.classes(),
        }
    }

    fn values(&self, width: usize) -> Result<Targets, DataError> {
        let values = self.floats()?;
        let names = if width == 1 {
            vec!["target".into()]
        } else {
            (0..width).map(|at| format!("target {at}")).collect()
        };
        Ok(Targets::Values { values, names })
    }

    fn classes(&self) -> Result<Targets, DataError> {
        let mut ids = Vec::with_capacity(self.len());
        for index in 0..self.len() {
            let class = self.value(index);
            if !(0.0..CLASSES_MAX as f64).contains(&class) {
                let why = format!("the class {class} is not one of 0 to {}", CLASSES_MAX - 1);
                return Err(invalid(self.name, format!("sample at index {index}"), why));
            }
            ids.push(class as u32);
        }
        let count = ids.iter().max().map_or(0, |highest| highest + 1);
        let names = (0..count).map(|class| class.to_string()).collect();
        Ok(Targets::Classes { ids, names })
    }
}

/// Type of an array's values.
#[derive(Clone, Copy, Debug, PartialEq)]
struct NumberType {
    /// `b` for booleans, `u` and `i` for integers, `f` for floats.
    kind: u8,
    /// Bytes of a value.
    size: usize,
    is_big_endian: bool,
}

impl NumberType {
    /// Reads the text of a type, such as `<f4`.
    fn parse(text: &[u8]) -> Result<Self, String> {
        let shown = String::from_utf8_lossy(text);
        let refuse = || {
            format!(
                "values of type '{shown}' are not read; expected booleans, integers of up to 8 \
                 bytes, or floats of 2, 4 or 8 bytes"
            )
        };
        let [order, kind, size] = *text else {
            return Err(match text {
                [_, b'O', ..] => {
                    "holds Python objects (a pickle), which can run code and are not read; \
                                  save an array of numbers"
                        .into()
                }
                _ => refuse(),
            });
        };
        let size = usize::from(size.wrapping_sub(b'0'));
        let is_read =
            matches!((kind, size), (b'b', 1) | (b'u' | b'i', 1 | 2 | 4 | 8) | (b'f', 2 | 4 | 8));
        if !is_read || !b"<>|=".contains(&order) {
            return Err(refuse());
        }
        Ok(Self { kind, size, is_big_endian: order == b'>' })
    }

    /// Value of some bytes; integers above 2^53 are rounded.
    fn value(self, bytes: &[u8]) -> f64 {
        let mut padded = [0; 8];
        let padded_part = &mut padded[..self.size];
        padded_part.copy_from_slice(bytes);
        if self.is_big_endian {
            padded_part.reverse();
        }
        let bits = u64::from_le_bytes(padded);
        let unused = 64 - 8 * self.size as u32;
        match (self.kind, self.size) {
            (b'b', _) => f64::from(u8::from(bits != 0)),
            (b'u', _) => bits as f64,
            (b'f', 2) => f16::from_bits(bits as u16).to_f64(),
            (b'f', 4) => f64::from(f32::from_bits(bits as u32)),
            (b'f', _) => f64::from_bits(bits),
            _ => (((bits << unused) as i64) >> unused) as f64,
        }
    }
}

/// Header of an array.
struct Header {
    kind: NumberType,
    is_fortran: bool,
    shape: Vec<usize>,
}

impl Header {
    /// Reads the literal of a dictionary with `descr`, `fortran_order` and `shape`. An error is the
    /// place in it, if it has one, and the reason.
    fn parse(text: &[u8]) -> Result<Self, (Option<usize>, String)> {
        let mut literal = Literal { text, at: 0 };
        let mut kind = None;
        let mut is_fortran = None;
        let mut shape = None;
        literal.expect(b'{')?;
        while !literal.take(b'}') {
            let key = literal.string()?;
            literal.expect(b':')?;
            match key {
                b"descr" if literal.peek() == Some(b'[') => {
                    let why = "holds records of several fields, which are not read; save one array \
                               of numbers";
                    return Err((None, why.into()));
                }
                b"descr" => {
                    let text = literal.string()?;
                    kind = Some(NumberType::parse(text).map_err(|why| (None, why))?);
                }
                b"fortran_order" => is_fortran = Some(literal.boolean()?),
                b"shape" => shape = Some(literal.tuple()?),
                _ => {
                    let why = format!("has the unknown key '{}'", key.escape_ascii());
                    return Err((Some(literal.at), why));
                }
            }
            if !literal.take(b',') {
                literal.expect(b'}')?;
                break;
            }
        }
        literal.end()?;
        let (Some(kind), Some(is_fortran), Some(shape)) = (kind, is_fortran, shape) else {
            return Err((None, "expected the keys descr, fortran_order and shape".into()));
        };
        Ok(Self { kind, is_fortran, shape })
    }
}

/// Literal of Python, read from left to right.
struct Literal<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Literal<'a> {
    /// The next byte that is not a space.
    fn peek(&mut self) -> Option<u8> {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
        self.text.get(self.at).copied()
    }

    /// Takes a byte if it is the next one.
    fn take(&mut self, byte: u8) -> bool {
        let is_next = self.peek() == Some(byte);
        self.at += usize::from(is_next);
        is_next
    }

    fn wrong(&self, expected: &str) -> (Option<usize>, String) {
        let rest = &self.text[self.at..];
        let found = rest[..rest.len().min(12)].escape_ascii();
        (Some(self.at), format!("expected {expected}, found \"{found}\""))
    }

    fn expect(&mut self, byte: u8) -> Result<(), (Option<usize>, String)> {
        if self.take(byte) { Ok(()) } else { Err(self.wrong(&format!("'{}'", byte as char))) }
    }

    fn string(&mut self) -> Result<&'a [u8], (Option<usize>, String)> {
        let quote = match self.peek() {
            Some(quote @ (b'\'' | b'"')) => quote,
            _ => return Err(self.wrong("a text in quotes")),
        };
        let rest = &self.text[self.at + 1..];
        let Some(end) = rest.iter().position(|byte| *byte == quote) else {
            return Err(self.wrong("a text in quotes"));
        };
        self.at += end + 2;
        Ok(&rest[..end])
    }

    fn boolean(&mut self) -> Result<bool, (Option<usize>, String)> {
        self.peek();
        for (word, value) in [("True", true), ("False", false)] {
            if self.text[self.at..].starts_with(word.as_bytes()) {
                self.at += word.len();
                return Ok(value);
            }
        }
        Err(self.wrong("True or False"))
    }

    fn tuple(&mut self) -> Result<Vec<usize>, (Option<usize>, String)> {
        self.expect(b'(')?;
        let mut sizes = Vec::new();
        while !self.take(b')') {
            self.peek();
            let digits = self.text[self.at..].iter().take_while(|byte| byte.is_ascii_digit());
            let digits = &self.text[self.at..self.at + digits.count()];
            let size = std::str::from_utf8(digits).ok().and_then(|text| text.parse().ok());
            sizes.push(size.ok_or_else(|| self.wrong("a size below 2^64"))?);
            self.at += digits.len();
            // Python 2 wrote some sizes as long integers.
            self.take(b'L');
            if !self.take(b',') {
                self.expect(b')')?;
                break;
            }
        }
        Ok(sizes)
    }

    fn end(&mut self) -> Result<(), (Option<usize>, String)> {
        if self.peek().is_none() { Ok(()) } else { Err(self.wrong("the end of the header")) }
    }
}
