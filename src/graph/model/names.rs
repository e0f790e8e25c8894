//! Tables from our names of parameters to the names in Hugging Face's files.

/// Parameter of a family, under our name and under theirs. `#` stands for the number of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileName {
    pub ours: &'static str,
    pub theirs: &'static str,
    /// True if their matrix is the transpose of ours: `(in, out)` and not `(out, in)`.
    pub is_transposed: bool,
}

impl FileName {
    /// Returns an entry of a matrix or vector that has the same shape in their files.
    pub const fn same(ours: &'static str, theirs: &'static str) -> Self {
        Self { ours, theirs, is_transposed: false }
    }

    /// Returns an entry of a matrix whose transpose is in their files.
    pub(crate) const fn transposed(ours: &'static str, theirs: &'static str) -> Self {
        Self { ours, theirs, is_transposed: true }
    }
}

/// Returns the name in their files of one of our parameters, and true if their matrix is the
/// transpose of ours; `None` if the table has no such parameter.
pub fn their_name(table: &[FileName], ours: &str) -> Option<(String, bool)> {
    renamed(table, ours, |entry| [entry.ours, entry.theirs])
}

/// Returns our name of a parameter in their files, and true if their matrix is the transpose of
/// ours; `None` if the table has no such parameter.
pub fn our_name(table: &[FileName], theirs: &str) -> Option<(String, bool)> {
    renamed(table, theirs, |entry| [entry.theirs, entry.ours])
}

/// Returns the translation of `name` by the first entry that matches, in the direction of
/// `from_to`.
fn renamed(
    table: &[FileName],
    name: &str,
    from_to: impl Fn(&FileName) -> [&'static str; 2],
) -> Option<(String, bool)> {
    for entry in table {
        let [from, to] = from_to(entry);
        if let Some(layer) = layer_of(from, name) {
            return Some((to.replace('#', layer), entry.is_transposed));
        }
    }
    None
}

/// Returns the number of the layer if a name matches a pattern, empty for a pattern without `#`;
/// `None` if it does not match.
fn layer_of<'n>(pattern: &str, name: &'n str) -> Option<&'n str> {
    let Some((before, behind)) = pattern.split_once('#') else {
        return if pattern == name { Some("") } else { None };
    };
    let layer = name.strip_prefix(before)?.strip_suffix(behind)?;
    let is_number = !layer.is_empty() && layer.bytes().all(|byte| byte.is_ascii_digit());
    if is_number { Some(layer) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Graph;
    use crate::model::{gpt, llama};

    #[test]
    fn layers_keep_their_numbers_in_both_directions() {
        let theirs = their_name(gpt::NAMES, "h.11.attn.c_attn.weight").unwrap();
        assert_eq!(theirs, ("transformer.h.11.attn.c_attn.weight".into(), true));
        let ours = our_name(gpt::NAMES, "transformer.h.11.ln_1.bias").unwrap();
        assert_eq!(ours, ("h.11.ln_1.bias".into(), false));
        for unknown in ["h.x.attn.c_attn.weight", "h..ln_1.bias", "transformer.h.1.attn.bias"] {
            assert_eq!(their_name(gpt::NAMES, unknown), None);
            assert_eq!(our_name(gpt::NAMES, unknown), None);
        }
    }

    #[test]
    fn every_parameter_has_a_name_that_leads_back_to_it() {
        let all = |graph: &Graph, table: &[FileName]| {
            for parameter in &graph.parameters {
                let (theirs, is_transposed) = their_name(table, &parameter.name).unwrap();
                let back = our_name(table, &theirs).unwrap();
                assert_eq!(back, (parameter.name.clone(), is_transposed));
            }
        };
        all(&gpt::tests::with_all_parameters(), gpt::NAMES);
        all(&llama::tests::with_all_parameters(), llama::NAMES);
    }
}
