//! Autotuning: selects the kernel variant of each call on a device: the fastest certified one, by
//! timing. Results are cached per adapter and driver.
//!
//! Modules in layers: `probes` (small problems with their reference results), `certify`, `timing`
//! and `catalog`, `plan_calls`, `cache` and `pipeline_cache`, `spot_check`,
//! `session`, `selector`, `kernel_check`.

pub(crate) mod attempts;
pub mod cache;
pub mod catalog;
pub mod certify;
pub(crate) mod kernel_check;
pub(crate) mod pipeline_cache;
pub mod plan_calls;
pub(crate) mod probes;
pub mod selector;
pub mod session;
pub(crate) mod spot_check;
pub mod timing;

pub use cache::KernelCache;
pub use kernel_check::{KernelCheckError, check_kernel};
pub use selector::{KernelSelector, TuneOptions};
pub use session::TuneProgress;
