//! Configuration of a run: its keys (`schema`; the keys of models come from `families`), the reader
//! that merges and checks values from a file and flags (`read`), refusals of unknown names
//! (`unknown`), and the keys that have an effect without training (`effect`).

pub mod effect;
pub mod read;
pub mod schema;
pub mod unknown;

pub use schema::RunConfig;
