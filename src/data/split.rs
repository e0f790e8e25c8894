//! The two splits of the data.

use std::fmt;

/// Largest share of the data that can be held out.
pub const HELD_OUT_MAX: f64 = 0.5;

/// One of the two splits of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// The beginning of the text, for training.
    Train,
    /// The held-out tail of the text, for evaluation.
    Validation,
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Train => "training",
            Self::Validation => "held-out",
        })
    }
}
