//! Tables of text, for terminals and reports.

use std::fmt;

/// Table of rows under a head, with columns as wide as their widest cell.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// True for each column that holds text, which is aligned to the left.
    text: Vec<bool>,
    rows: Vec<Vec<String>>,
    /// Line below the table, if there is one.
    note: Option<&'static str>,
}

impl Table {
    /// Creates a table with these columns; a head that begins with `<` marks a column of text.
    pub fn new(head: &[&str]) -> Self {
        let text = head.iter().map(|cell| cell.starts_with('<')).collect();
        let head = head.iter().map(|cell| cell.trim_start_matches('<').to_string()).collect();
        Self { text, rows: vec![head], note: None }
    }

    /// Adds a row; one without cells is an empty line.
    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Sets the line below the table.
    pub fn set_note(&mut self, note: &'static str) {
        self.note = Some(note);
    }

    /// Returns true if there is no row below the head.
    pub fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }

    fn width(&self, column: usize) -> usize {
        let mut width = 0;
        for row in &self.rows {
            if let Some(cell) = row.get(column) {
                width = width.max(cell.chars().count());
            }
        }
        width
    }
}

impl fmt::Display for Table {
    /// Writes the table with two spaces between columns, and none after the last text of a line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths: Vec<usize> = (0..self.text.len()).map(|column| self.width(column)).collect();
        for row in &self.rows {
            let shown = match row.iter().rposition(|cell| !cell.is_empty()) {
                Some(last) => last + 1,
                None => 0,
            };
            for (column, (cell, width)) in row[..shown].iter().zip(&widths).enumerate() {
                if column > 0 {
                    write!(f, "  ")?;
                }
                if !self.text[column] {
                    write!(f, "{cell:>width$}")?;
                } else if column + 1 < shown {
                    write!(f, "{cell:<width$}")?;
                } else {
                    write!(f, "{cell}")?;
                }
            }
            writeln!(f)?;
        }
        if let Some(note) = self.note {
            writeln!(f, "{note}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["<name", "count", "<on"]);
        assert!(table.is_empty());
        table.row(["é", "12,345", "all"].map(String::from).to_vec());
        table.row(Vec::new());
        table.row(["a longer name", "7", ""].map(String::from).to_vec());
        table.set_note("a note");
        assert!(!table.is_empty());
        let expected = "\
name            count  on
é              12,345  all

a longer name       7
a note
";
        assert_eq!(table.to_string(), expected);
    }
}
