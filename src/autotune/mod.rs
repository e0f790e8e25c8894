//! Autotuning: selects the kernel variant of each call on a device: only certified variants, and
//! among those of a call the fastest, by timing. Results are cached per adapter and driver.
//!
//! Modules in layers: `probes` (small problems with their reference results), `certify`, `timing`
//! and `catalog`, `plan_calls` and `cache`, `selector`.

pub mod cache;
pub mod catalog;
pub mod certify;
pub mod plan_calls;
pub mod probes;
pub mod selector;
pub mod timing;

pub use cache::KernelCache;
pub use selector::{KernelSelector, TuneOptions, TuneProgress};
