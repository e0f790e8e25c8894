//! Which devices work with which shares: opened or taken over from a checkpoint, measured,
//! recorded.

pub mod assemble;
pub mod open_ranks;
pub mod record;
pub mod shares;
pub mod types;
