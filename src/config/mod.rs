//! Configuration of a run: the table of its keys (`schema`, built from the types in `key`), and
//! the reader that merges and checks the values set by file and flags (`read`).

pub mod key;
pub mod read;
pub mod schema;

pub use schema::RunConfig;
