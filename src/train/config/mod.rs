//! Configuration of a run: the table of its keys (`schema`, built from the types in `key`), the
//! reader that merges and checks the values set by file and flags (`read`), and the keys that have
//! an effect without training (`effect`).

pub mod effect;
pub mod key;
pub mod read;
pub mod schema;

pub use schema::RunConfig;
