//! Integer inputs that select rows of a table or classes of a loss, and the check of their values
//! on the host. Kernels do not check them: an id beyond a table selects zeros, and a target that is
//! not a class is ignored.

use super::{Graph, IGNORE_INDEX, Numbered, Role};
use potluck_core::TensorId;

/// Range of the values of an input of integers: ids less than `below`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdRange {
    /// Name of the input.
    pub name: String,
    pub numbered: Numbered,
    pub below: u32,
    /// Values per sample or, if all samples share them, in all.
    pub per_sample: usize,
    /// True of an input that all samples share.
    pub is_shared: bool,
}

/// First value of an input that is out of its range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("input {name}: {}: {}", self.place(), self.why())]
pub struct IdError {
    pub name: String,
    /// Number of the sample; `None` of an input that all samples share.
    pub sample: Option<u64>,
    /// Index of the value in the sample, or among those that samples share; `None` if it is the
    /// only one.
    pub position: Option<usize>,
    pub value: u32,
    pub numbered: Numbered,
    pub below: u32,
}

impl IdError {
    /// Returns the place, such as "sample 3, position 7".
    pub fn place(&self) -> String {
        match (self.sample, self.position) {
            (Some(sample), Some(position)) => format!("sample {sample}, position {position}"),
            (Some(sample), None) => format!("sample {sample}"),
            (None, Some(position)) => format!("position {position}, for all samples"),
            (None, None) => "for all samples".into(),
        }
    }

    /// Returns what is wrong and what would be right.
    pub fn why(&self) -> String {
        let Self { value, below, .. } = self;
        match self.numbered {
            Numbered::Rows => format!(
                "{value} is no row of its table, which has {below}; give ids less than {below}"
            ),
            Numbered::Classes => format!(
                "{value} is none of the {below} classes; give a target less than {below}, or \
                 {IGNORE_INDEX} (graph::IGNORE_INDEX) for one that does not count"
            ),
        }
    }
}

impl IdRange {
    fn has(&self, value: u32) -> bool {
        let is_ignored = self.numbered == Numbered::Classes && value == IGNORE_INDEX;
        value < self.below || is_ignored
    }

    /// Checks the values of some samples; `sample` returns the number of the sample at an index.
    ///
    /// # Errors
    /// Returns [`IdError`] with the first value that is out of the range.
    pub fn check(&self, values: &[u32], sample: impl Fn(usize) -> u64) -> Result<(), IdError> {
        let Some(at) = values.iter().position(|value| !self.has(*value)) else { return Ok(()) };
        let number = if self.is_shared { None } else { Some(sample(at / self.per_sample)) };
        let position = if self.per_sample > 1 { Some(at % self.per_sample) } else { None };
        Err(IdError {
            name: self.name.clone(),
            sample: number,
            position,
            value: values[at],
            numbered: self.numbered,
            below: self.below,
        })
    }
}

impl Graph {
    /// Returns the ranges of the integer inputs of a whole graph, several of an input that is used
    /// in several ways. A shard has only some of the rows.
    pub fn id_ranges(&self) -> Vec<IdRange> {
        let mut ranges = Vec::new();
        let mut of_constants = Vec::new();
        for node in &self.nodes {
            let Some(numbered) = node.op.root_op().numbered() else { continue };
            let (ids, below) = match node.op.root_op().targets() {
                Some(targets) => targets,
                None => (0, self.tensor(node.inputs[1]).shape.dims()[0]),
            };
            let input = self.root(node.inputs[ids]);
            let Some(name) = self.name_of_input(input) else { continue };
            let below = u32::try_from(below).unwrap_or(u32::MAX);
            let per_sample = self.tensor(input).shape.per_row();
            let is_shared = !self.tensor(input).shape.is_batched();
            let name = name.to_string();
            let range = IdRange { name, numbered, below, per_sample, is_shared };
            let is_of_constant = numbered == Numbered::Rows
                && matches!(self.tensor(node.inputs[1]).role, Role::State(_));
            let known = if is_of_constant { &mut of_constants } else { &mut ranges };
            if !known.contains(&range) {
                known.push(range);
            }
        }
        // An ignored target selects no row of a constant with the weights of the classes, and gets
        // 0 instead: the range of the classes is sufficient.
        for range in of_constants {
            let of_classes = IdRange { numbered: Numbered::Classes, ..range.clone() };
            if !ranges.contains(&range) && !ranges.contains(&of_classes) {
                ranges.push(range);
            }
        }
        ranges
    }

    fn name_of_input(&self, input: TensorId) -> Option<&str> {
        let (name, _) = self.inputs.iter().find(|(_, id)| *id == input)?;
        Some(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builder, Init, differentiate, fuse};

    #[test]
    fn ids_and_targets_have_the_ranges_of_their_uses() {
        let mut b = Builder::new();
        let table = b.parameter("table", &[9, 4], Init::Zeros);
        let tokens = b.input_ids("tokens", &[1, 3]);
        let x = b.embedding(tokens, table).unwrap();
        let again = b.embedding(tokens, table).unwrap();
        let x = b.add(x, again).unwrap();
        let head = b.parameter("head", &[7, 4], Init::Zeros);
        let logits = b.linear(x, head, None).unwrap();
        let targets = b.input_ids("targets", &[1, 3]);
        b.cross_entropy_loss(logits, targets).unwrap();
        let forward = b.finish();
        let ranges = forward.id_ranges();
        let range = |name: &str, numbered, below| IdRange {
            name: name.into(),
            numbered,
            below,
            per_sample: 3,
            is_shared: false,
        };
        let expected = [range("tokens", Numbered::Rows, 9), range("targets", Numbered::Classes, 7)];
        assert_eq!(ranges, expected);
        assert_eq!(fuse(differentiate(forward).unwrap()).id_ranges(), expected);

        let [rows, classes] = ranges.try_into().unwrap();
        let told = |range: &IdRange, values: &[u32]| {
            range.check(values, |row| row as u64 + 10).map_err(|error| error.to_string())
        };
        assert_eq!(told(&rows, &[0, 8, 3]), Ok(()));
        let error = "input tokens: sample 11, position 1: 9 is no row of its table, which has 9; \
                     give ids less than 9";
        assert_eq!(told(&rows, &[0, 1, 2, 3, 9, 5]), Err(error.into()));
        assert!(told(&rows, &[IGNORE_INDEX]).is_err());
        assert_eq!(told(&classes, &[0, 6, IGNORE_INDEX]), Ok(()));
        let error = "input targets: sample 10, position 2: 7 is none of the 7 classes; give a \
                     target less than 7, or 4294967295 (graph::IGNORE_INDEX) for one that does not \
                     count";
        assert_eq!(told(&classes, &[0, 6, 7]), Err(error.into()));
    }

    #[test]
    fn a_target_without_a_weight_is_none_of_a_table_of_tokens() {
        let range = |numbered| IdRange {
            name: "ids".into(),
            numbered,
            below: 5,
            per_sample: 1,
            is_shared: false,
        };
        let ranges_of = |has_table: bool, has_loss: bool| {
            let mut b = Builder::new();
            let ids = b.input_ids("ids", &[1]);
            let weights = b.constant("weights", &[5, 1], vec![1.0; 5]).unwrap();
            b.embedding(ids, weights).unwrap();
            if has_table {
                let table = b.parameter("table", &[5, 4], Init::Zeros);
                b.embedding(ids, table).unwrap();
            }
            if has_loss {
                let logits = b.input("logits", &[1, 5]);
                b.cross_entropy_loss(logits, ids).unwrap();
            }
            b.finish().id_ranges()
        };
        let [rows, classes] = [Numbered::Rows, Numbered::Classes].map(range);
        assert_eq!(ranges_of(true, true), [rows.clone(), classes.clone()]);
        assert_eq!(ranges_of(false, true), vec![classes]);
        assert_eq!(ranges_of(false, false), vec![rows]);
    }
}
