//! Executors in the test's own process, on the CPU device and on the adapters that
//! `POTLUCK_TEST_ADAPTERS` selects.

mod averages;
#[path = "../common/mod.rs"]
mod common;
mod counts;
mod custom_ops;
#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod exit;
mod golden;
mod golden_language;
mod golden_layers;
mod hashes;
mod losses;
mod nonfinite;
mod norms;
mod order;
mod pytorch;
#[path = "../common/pytorch_samples/mod.rs"]
mod pytorch_samples;
mod readbacks;
mod stages;
mod states;
