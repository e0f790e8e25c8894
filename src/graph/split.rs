//! Splits of parameters: the dimension along which the ranks of a tensor group divide a parameter,
//! and the unit of the division.

use std::ops::Range;

use potluck_core::format::counted;

/// Unit of a division: a rank has a whole number of units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SplitUnit {
    /// Heads of attention, of `columns` columns each.
    Heads { columns: usize },
    /// Columns of a hidden layer, in multiples of 32.
    Columns,
    /// Rows of a vocabulary, in multiples of 64, or of less for a small vocabulary.
    Vocabulary,
}

/// Columns of a unit: the width of a tile of a product.
const COLUMNS: usize = 32;
/// Largest number of rows of a vocabulary in a unit.
const ROWS: usize = 64;

/// Split of a parameter over the ranks of a tensor group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterSplit {
    /// Dimension that is divided.
    pub dimension: usize,
    /// Number of tensors packed in this dimension; each is divided: 3 for queries, keys and values
    /// in one.
    pub packed: usize,
    /// Unit of the division.
    pub unit: SplitUnit,
}

impl ParameterSplit {
    /// Creates a split of a dimension of one tensor.
    pub fn new(dimension: usize, unit: SplitUnit) -> Self {
        Self { dimension, packed: 1, unit }
    }

    /// Returns the size in the dimension of each of the packed tensors.
    ///
    /// # Errors
    /// Returns a sentence if a tensor of these dimensions has no such split.
    pub(crate) fn size_of_packed(&self, dims: &[usize]) -> Result<usize, String> {
        let Self { dimension, packed, unit } = *self;
        let Some(size) = dims.get(dimension) else {
            return Err(format!("it has no dimension {dimension}"));
        };
        if unit == (SplitUnit::Heads { columns: 0 }) {
            return Err("a head has no columns".into());
        }
        if packed == 0 {
            return Err(format!("0 tensors are packed in dimension {dimension}"));
        }
        if !size.is_multiple_of(packed) {
            return Err(format!("{size} is not divisible by {packed} packed tensors"));
        }
        Ok(size / packed)
    }
}

/// Error of a division over more ranks than there are units.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} cannot be divided over {}: {}", counted(*.ranks, "rank", "ranks"), self.why())]
pub struct SplitError {
    /// Divided units with their number: `4 heads`.
    pub what: String,
    /// Requested number of ranks.
    pub ranks: usize,
    /// Largest possible number of ranks.
    pub most: usize,
}

impl SplitError {
    fn why(&self) -> String {
        match self.most {
            0 | 1 => "they stay whole".into(),
            2 => "2 are possible".into(),
            most => format!("2 to {most} are possible"),
        }
    }
}

impl SplitUnit {
    /// Returns the range of each rank of a dimension of `size` entries. A rank has units in
    /// proportion to its share, at least one, and the last rank also has the remainder.
    ///
    /// # Errors
    /// Returns [`SplitError`] if there are fewer units than ranks.
    pub fn divide(self, size: usize, shares: &[f64]) -> Result<Vec<Range<usize>>, SplitError> {
        let ranks = shares.len();
        let unit = match self {
            Self::Heads { columns } => columns,
            Self::Columns => COLUMNS,
            // A vocabulary of few characters is divided more finely.
            Self::Vocabulary => largest_unit(size, ranks),
        };
        // Without columns there are no heads.
        let units = size.checked_div(unit).unwrap_or(0);
        if units < ranks {
            let what = match self {
                Self::Heads { .. } => counted(units, "head", "heads"),
                Self::Columns => format!("{size} columns in multiples of {COLUMNS}"),
                Self::Vocabulary => format!("a vocabulary of {size}"),
            };
            return Err(SplitError { what, ranks, most: units });
        }
        let mut ranges = Vec::with_capacity(ranks);
        let mut start = 0;
        for (rank, count) in apportion(units, shares).into_iter().enumerate() {
            let end = if rank + 1 == ranks { size } else { start + count * unit };
            ranges.push(start..end);
            start = end;
        }
        Ok(ranges)
    }
}

/// The largest power of two, up to 64 rows, with which each rank has a unit.
fn largest_unit(size: usize, ranks: usize) -> usize {
    let mut unit = ROWS;
    while unit > 1 && size / unit < ranks {
        unit /= 2;
    }
    unit
}

/// Distributes `units`, at least as many as shares: each share gets one, and each further unit goes
/// to the share with the fewest units for its size, the first of equal ones.
fn apportion(units: usize, shares: &[f64]) -> Vec<usize> {
    let mut counts = vec![1; shares.len()];
    for _ in shares.len()..units {
        let load = |rank: &usize| (counts[*rank] + 1) as f64 / shares[*rank];
        let next = (0..shares.len()).min_by(|a, b| load(a).total_cmp(&load(b)));
        if let Some(next) = next {
            counts[next] += 1;
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_whole_units_by_their_shares() {
        let heads = SplitUnit::Heads { columns: 16 };
        assert_eq!(heads.divide(128, &[1.0, 1.0]).unwrap(), [0..64, 64..128]);
        assert_eq!(heads.divide(128, &[3.0, 1.0]).unwrap(), [0..96, 96..128]);
        assert_eq!(heads.divide(128, &[1e9, 1.0]).unwrap(), [0..112, 112..128]);
        let three = [0..48, 48..96, 96..128];
        assert_eq!(heads.divide(128, &[1.0; 3]).unwrap(), three);
        // The last has what remains.
        assert_eq!(SplitUnit::Columns.divide(100, &[1.0, 1.0]).unwrap(), [0..64, 64..100]);
        assert_eq!(SplitUnit::Vocabulary.divide(50_257, &[1.0, 3.0]).unwrap()[0], 0..12_544);
        assert_eq!(SplitUnit::Vocabulary.divide(65, &[1.0, 1.0]).unwrap(), [0..32, 32..65]);
        let four = SplitUnit::Vocabulary.divide(65, &[1.0; 4]).unwrap();
        assert_eq!(four, [0..16, 16..32, 32..48, 48..65]);
    }

    #[test]
    fn what_has_too_few_units_says_how_many_ranks_it_could_have() {
        let told = |unit: SplitUnit, size, ranks| {
            unit.divide(size, &vec![1.0; ranks]).unwrap_err().to_string()
        };
        let heads = told(SplitUnit::Heads { columns: 8 }, 32, 5);
        let none = told(SplitUnit::Heads { columns: 0 }, 32, 2);
        assert_eq!(none, "0 heads cannot be divided over 2 ranks: they stay whole");
        assert_eq!(heads, "4 heads cannot be divided over 5 ranks: 2 to 4 are possible");
        let columns = told(SplitUnit::Columns, 63, 2);
        let expected =
            "63 columns in multiples of 32 cannot be divided over 2 ranks: they stay whole";
        assert_eq!(columns, expected);
        let words = told(SplitUnit::Vocabulary, 3, 4);
        assert_eq!(words, "a vocabulary of 3 cannot be divided over 4 ranks: 2 to 3 are possible");
    }
}
