//! Tables of comma-separated values (RFC 4180) with a header line; `;` and tabs separate too.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use ::csv::{ByteRecord, ReaderBuilder};

use super::files::{self, FileSets, invalid, listed};
use super::{DataError, Expected, FileSet, ReadSet, Request, Samples, TargetKind, Targets};
use crate::Features;
use crate::text::without_byte_order_mark;
use potluck_core::{Setting, Wording};

/// Takes the file.
pub(super) fn find(path: &Path) -> Result<FileSets, DataError> {
    if path.is_dir() {
        let why = "is a directory; give the path of one table";
        return Err(invalid(&path.display().to_string(), "", why));
    }
    Ok(FileSets::only(FileSet { inputs: vec![path.into()], targets: None }))
}

/// Reads a table.
pub(super) fn read(set: &FileSet, request: &Request) -> Result<ReadSet, DataError> {
    let path = &set.inputs[0];
    let (bytes, file) = files::read(path, request.base)?;
    let wanted = TableTargets {
        names: &request.options.target,
        kind: request.kind(),
        are_required: request.targets,
    };
    let samples = parse(&path.display().to_string(), &bytes, &wanted, request.expected)?;
    Ok(ReadSet { samples, files: vec![file], is_numbered: false })
}

/// Requested targets of a table.
pub(super) struct TableTargets<'a> {
    /// Columns; if empty, the expected ones, or else the last one.
    pub names: &'a [String],
    /// Kind; if `None`, classes if a value is not a number.
    pub kind: Option<TargetKind>,
    pub(crate) are_required: bool,
}

/// Reads a table. The features are the expected columns, or else all columns that are not targets.
///
/// # Errors
/// Returns `DataError` with line and column if a column is missing, if rows are not as long as the
/// header, or if a feature is not a finite number.
pub(super) fn parse(
    name: &str,
    bytes: &[u8],
    wanted: &TableTargets,
    expected: Option<&Expected>,
) -> Result<Samples, DataError> {
    let table = CsvTable::new(name, bytes)?;
    let mut targets = table.target_columns(wanted, expected)?;
    let features = table.feature_columns(&targets, expected)?;
    if !wanted.are_required && table.are_empty(&targets)? {
        targets.clear();
    }
    let mut values = Vec::new();
    let mut labels = Labels::new(&table, &targets, wanted, expected)?;
    table.rows(|record| {
        for column in &features {
            values.push(table.number(
                record,
                *column,
                "encode text as numbers, or drop the column",
            )?);
        }
        labels.add(record)
    })?;
    if values.is_empty() {
        return Err(invalid(name, "", "has no rows below its header line"));
    }
    let columns = table.names(&features);
    Ok(Samples {
        name: name.into(),
        shape: vec![columns.len()],
        columns,
        target_columns: table.names(&targets),
        features: Features::Floats(values),
        targets: labels.finish(),
        ids: None,
    })
}

/// Table in memory.
struct CsvTable<'a> {
    name: &'a str,
    /// Content without the byte order mark.
    bytes: &'a [u8],
    delimiter: u8,
    header: Vec<String>,
}

impl<'a> CsvTable<'a> {
    fn new(name: &'a str, bytes: &'a [u8]) -> Result<Self, DataError> {
        let bytes = without_byte_order_mark(bytes);
        let mut table = Self { name, bytes, delimiter: delimiter(bytes), header: Vec::new() };
        let mut record = ByteRecord::new();
        if !table.reader().read_byte_record(&mut record).map_err(|why| table.broken(&why))? {
            return Err(invalid(name, "line 1", "is empty; expected the names of the columns"));
        }
        for (at, field) in record.iter().enumerate() {
            let field = std::str::from_utf8(field).map_err(|_| {
                invalid(name, "line 1", format!("the name of column {} is not UTF-8", at + 1))
            })?;
            table.header.push(field.trim().into());
        }
        table.check_header()?;
        Ok(table)
    }

    fn names(&self, columns: &[usize]) -> Vec<String> {
        columns.iter().map(|at| self.header[*at].clone()).collect()
    }

    /// Checks that columns have unique names.
    fn check_header(&self) -> Result<(), DataError> {
        let refuse = |why: String| Err(invalid(self.name, "line 1", why));
        let mut columns = HashMap::new();
        for (column, name) in (1..).zip(&self.header) {
            if name.is_empty() {
                return refuse(format!("column {column} has no name; give it one, or drop it"));
            }
            if let Some(first) = columns.insert(name, column) {
                let why = format!("columns {first} and {column} have the same name {name:?}");
                return refuse(why);
            }
        }
        // Tables whose columns are numbered from 0 are common.
        let is_numbered = self.header.iter().enumerate().all(|(at, name)| *name == at.to_string());
        let numbers = self.header.iter().filter(|name| name.parse::<f64>().is_ok());
        let count = numbers.clone().count();
        // Columns may have numbers for names, but these are whole ones.
        let figures = numbers.filter(|name| name.parse::<u64>().is_err()).count();
        let is_row = count == self.header.len() || 2 * figures > self.header.len();
        if !is_numbered && is_row {
            let names = listed(&self.header);
            return refuse(format!(
                "expected the names of the columns, found numbers: {names}; add a line of names"
            ));
        }
        Ok(())
    }

    /// Reader of the records; the first one is the header.
    fn reader(&self) -> ::csv::Reader<&'a [u8]> {
        let mut builder = ReaderBuilder::new();
        // Lengths of rows are compared here, for the message.
        builder.has_headers(false).flexible(true).delimiter(self.delimiter);
        builder.from_reader(self.bytes)
    }

    /// Calls a function with every record below the header.
    fn rows(
        &self,
        mut each: impl FnMut(&ByteRecord) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut reader = self.reader();
        let mut record = ByteRecord::new();
        let mut is_header = true;
        while reader.read_byte_record(&mut record).map_err(|why| self.broken(&why))? {
            if std::mem::take(&mut is_header) {
                continue;
            }
            if record.len() != self.header.len() {
                let found = record.len();
                let expected = self.header.len();
                let why = format!("has {found} columns, and the header line has {expected}");
                return Err(invalid(self.name, format!("line {}", self.line(&record)), why));
            }
            each(&record)?;
        }
        match self.open_quote() {
            None => Ok(()),
            Some(line) => {
                let why = "a quotation mark opens a cell that is never closed; close it";
                Err(invalid(self.name, format!("line {line}"), why))
            }
        }
    }

    /// Returns the line on which an unterminated quoted cell begins, which the reader extends to
    /// the end of the table.
    fn open_quote(&self) -> Option<usize> {
        let mut line = 1;
        let mut opened = None;
        let mut is_begin = true;
        for byte in self.bytes {
            line += usize::from(*byte == b'\n');
            match (opened, *byte) {
                // A doubled mark within a cell closes it and opens it again.
                (Some(_), b'"') => {
                    opened = None;
                    is_begin = true;
                }
                (Some(_), _) => {}
                (None, b'"') if is_begin => opened = Some(line),
                (None, byte) => is_begin = byte == self.delimiter || b"\r\n".contains(&byte),
            }
        }
        opened
    }

    fn broken(&self, why: &::csv::Error) -> DataError {
        invalid(self.name, "", format!("cannot be read as a table ({why})"))
    }

    /// Line on which a record begins, counted from 1.
    fn line(&self, record: &ByteRecord) -> usize {
        let at = record.position().map_or(0, |position| position.byte() as usize);
        // The position of a record includes the line end and the empty lines before it.
        let breaks = self.bytes[at..].iter().take_while(|byte| b"\r\n".contains(byte)).count();
        1 + self.bytes[..at + breaks].iter().filter(|byte| **byte == b'\n').count()
    }

    fn wrong(&self, record: &ByteRecord, column: usize, why: impl Into<Wording>) -> DataError {
        let place = format!("line {}, column {:?}", self.line(record), self.header[column]);
        invalid(self.name, place, why)
    }

    /// Number in a cell; `otherwise` is the advice if it is a text.
    fn number(
        &self,
        record: &ByteRecord,
        column: usize,
        otherwise: impl fmt::Display,
    ) -> Result<f32, DataError> {
        let cell = record[column].trim_ascii();
        let text = String::from_utf8_lossy(cell);
        let why: Wording = match text.parse::<f32>() {
            Ok(value) if value.is_finite() => return Ok(value),
            Ok(_) => format!("{} is not a finite 32-bit number", shown(&text)).into(),
            Err(_) if cell.is_empty() => "is empty; fill in missing values, or drop the row".into(),
            Err(_) => Wording::new(format_args!("{:?} is not a number; {otherwise}", shown(&text))),
        };
        Err(self.wrong(record, column, why))
    }

    fn column(&self, name: &str, whose: &str) -> Result<usize, DataError> {
        self.header.iter().position(|other| other == name).ok_or_else(|| {
            let names = listed(&self.header);
            let why = format!("has no column {name:?}, {whose}; its columns are {names}");
            invalid(self.name, "line 1", why)
        })
    }

    /// Target columns; empty if they are absent and not required.
    fn target_columns(
        &self,
        wanted: &TableTargets,
        expected: Option<&Expected>,
    ) -> Result<Vec<usize>, DataError> {
        let is_feature =
            |name: &String| expected.is_some_and(|expected| expected.columns.contains(name));
        let names = match expected {
            Some(expected) if wanted.names.is_empty() => &expected.target_columns,
            _ => wanted.names,
        };
        if let Some((at, name)) =
            names.iter().enumerate().find(|(at, name)| names[..*at].contains(name))
        {
            let why = format!("the target {name:?} is named twice, the second time as {}", at + 1);
            return Err(invalid(self.name, "line 1", why));
        }
        if !names.is_empty() {
            if !wanted.are_required && names.iter().all(|name| !self.header.contains(name)) {
                return Ok(Vec::new());
            }
            if let Some(Expected { whose, .. }) = expected
                && let Some(name) = names.iter().find(|name| is_feature(name))
            {
                let why = format!("the column {name:?} is a feature of {whose}, and no target of");
                let whose = if *whose == "the model" { "it" } else { "them" };
                return Err(invalid(self.name, "line 1", format!("{why} {whose}")));
            }
            return names.iter().map(|name| self.column(name, "which is a target")).collect();
        }
        let last = self.header.len() - 1;
        if !is_feature(&self.header[last]) {
            return Ok(vec![last]);
        }
        // The last column is a feature, so the only other one is the target.
        let others: Vec<usize> = (0..last).filter(|at| !is_feature(&self.header[*at])).collect();
        match others[..] {
            [target] => Ok(vec![target]),
            _ if !wanted.are_required => Ok(Vec::new()),
            _ => {
                let why = "its last column is a feature; name the column of the targets";
                Err(invalid(self.name, "line 1", why))
            }
        }
    }

    /// Returns true if no cell of these columns has a value.
    fn are_empty(&self, columns: &[usize]) -> Result<bool, DataError> {
        let mut are_empty = true;
        self.rows(|record| {
            are_empty &= columns.iter().all(|column| record[*column].trim_ascii().is_empty());
            Ok(())
        })?;
        Ok(are_empty)
    }

    /// Columns of features: the expected ones, or all that are not targets.
    fn feature_columns(
        &self,
        targets: &[usize],
        expected: Option<&Expected>,
    ) -> Result<Vec<usize>, DataError> {
        if let Some(Expected { whose, columns, .. }) = expected
            && !columns.is_empty()
        {
            let whose =
                format!("which {whose} {}", if *whose == "the model" { "needs" } else { "have" });
            return columns.iter().map(|name| self.column(name, &whose)).collect();
        }
        let features: Vec<usize> =
            (0..self.header.len()).filter(|at| !targets.contains(at)).collect();
        if features.is_empty() {
            let why = format!("has no column besides the target: {}", listed(&self.header));
            return Err(invalid(self.name, "line 1", why));
        }
        Ok(features)
    }
}

/// Targets, collected row by row.
struct Labels<'a> {
    table: &'a CsvTable<'a>,
    columns: &'a [usize],
    /// Classes by their text, if the targets are classes.
    classes: Option<HashMap<String, u32>>,
    /// Allowed names of classes, and their owner for messages.
    known: Option<(&'a [String], &'static str)>,
    ids: Vec<u32>,
    values: Vec<f32>,
}

impl<'a> Labels<'a> {
    fn new(
        table: &'a CsvTable<'a>,
        columns: &'a [usize],
        wanted: &TableTargets,
        expected: Option<&'a Expected>,
    ) -> Result<Self, DataError> {
        let kind = match (wanted.kind, columns) {
            (Some(kind), _) => kind,
            (None, [column]) if table.is_of_text(*column)? => TargetKind::Classes,
            (None, _) => TargetKind::Values,
        };
        if kind == TargetKind::Classes && columns.len() > 1 {
            let why = format!("classes have one target column, and {} are given", columns.len());
            return Err(invalid(table.name, "line 1", why));
        }
        let known = match expected {
            Some(expected) if expected.kind == TargetKind::Classes => {
                Some((&expected.names[..], expected.whose))
            }
            _ => None,
        };
        let mut classes = None;
        if kind == TargetKind::Classes {
            let names = known.map_or(&[][..], |(names, _)| names);
            classes = Some(names.iter().cloned().zip(0..).collect());
        }
        Ok(Self { table, columns, classes, known, ids: Vec::new(), values: Vec::new() })
    }

    /// Takes the targets of a record.
    fn add(&mut self, record: &ByteRecord) -> Result<(), DataError> {
        let table = self.table;
        for column in self.columns {
            let Some(classes) = &mut self.classes else {
                let otherwise =
                    Wording::new(format_args!("set {} if they are names", Setting::Classification));
                self.values.push(table.number(record, *column, otherwise)?);
                continue;
            };
            let cell = record[*column].trim_ascii();
            let text = std::str::from_utf8(cell)
                .map_err(|_| table.wrong(record, *column, "the name of the class is not UTF-8"))?;
            if text.is_empty() {
                let why = "is empty; expected the name of a class";
                return Err(table.wrong(record, *column, why));
            }
            let next = classes.len() as u32;
            let id = match (classes.get(text), self.known) {
                (Some(id), _) => *id,
                (None, None) => *classes.entry(text.into()).or_insert(next),
                (None, Some((names, whose))) => {
                    let text = shown(text);
                    let names = listed(names);
                    let why = format!("the class {text:?} is none of those of {whose}: {names}");
                    return Err(table.wrong(record, *column, why));
                }
            };
            self.ids.push(id);
        }
        Ok(())
    }

    /// Targets; classes in the order of their names, or in the known order.
    fn finish(self) -> Targets {
        if self.columns.is_empty() {
            return Targets::Absent;
        }
        let Some(classes) = self.classes else {
            let names = self.table.names(self.columns);
            return Targets::Values { values: self.values, names };
        };
        if let Some((names, _)) = self.known {
            return Targets::Classes { ids: self.ids, names: names.to_vec() };
        }
        let mut order: Vec<(String, u32)> = classes.into_iter().collect();
        let whole = |name: &str| name.parse::<i64>().ok();
        if order.iter().all(|(name, _)| whole(name).is_some()) {
            order.sort_by(|(a, _), (b, _)| (whole(a), a).cmp(&(whole(b), b)));
        } else {
            order.sort();
        }
        let mut ranks = vec![0; order.len()];
        for ((_, id), rank) in order.iter().zip(0..) {
            ranks[*id as usize] = rank;
        }
        let ids = self.ids.iter().map(|id| ranks[*id as usize]).collect();
        Targets::Classes { ids, names: order.into_iter().map(|(name, _)| name).collect() }
    }
}

impl CsvTable<'_> {
    /// Returns true if a column has values that are not numbers.
    ///
    /// # Errors
    /// Returns `DataError::Invalid` if most of its values are numbers: the others are then probably
    /// errors in the table, and not names of classes.
    fn is_of_text(&self, column: usize) -> Result<bool, DataError> {
        let mut numbers = 0;
        let mut texts = 0;
        let mut first = None;
        self.rows(|record| {
            let cell = String::from_utf8_lossy(record[column].trim_ascii());
            if cell.parse::<f64>().is_ok() {
                numbers += 1;
            } else if !cell.is_empty() {
                texts += 1;
                first.get_or_insert_with(|| (record.clone(), shown(&cell)));
            }
            Ok(())
        })?;
        match first {
            Some((record, text)) if numbers > texts => {
                let why = Wording::new(format_args!(
                    "{text:?} is not a number, and most targets are; correct it, or set {} if \
                     these are names of classes",
                    Setting::Classification
                ));
                Err(self.wrong(&record, column, why))
            }
            found => Ok(found.is_some()),
        }
    }
}

/// The most frequent delimiter of the first line; a comma if it has none.
fn delimiter(bytes: &[u8]) -> u8 {
    let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let mut counts = [(0, b','), (0, b';'), (0, b'\t')];
    let mut is_quoted = false;
    for byte in line {
        is_quoted ^= *byte == b'"';
        for (count, delimiter) in &mut counts {
            *count += usize::from(byte == delimiter && !is_quoted);
        }
    }
    let (mut most, mut delimiter) = counts[0];
    for (count, other) in &counts[1..] {
        if *count > most {
            most = *count;
            delimiter = *other;
        }
    }
    delimiter
}

/// Beginning of a cell, for a message.
fn shown(cell: &str) -> String {
    const MOST: usize = 40;
    let mut text: String = cell.chars().take(MOST).collect();
    if text.len() < cell.len() {
        text.push_str("..");
    }
    text
}
