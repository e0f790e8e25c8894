//! The configuration of a run: the table of its keys (`schema`, made of `key`), and what was typed,
//! read and checked against it (`read`).

pub mod key;
pub mod read;
pub mod schema;

pub use schema::RunConfig;
