//! potluck trains neural networks on every GPU you have, from any vendor.
//!
//! The kernels are WGSL compute shaders on wgpu; the trainer is a library first and a binary on
//! top of it. To train a model of your own, start at [`train::Trainer`], whose example is
//! complete, and at [`graph::Builder`], with which models are written.
//!
//! Modules in layers; each module imports only from layers below its own:
//!
//! | layer | modules |
//! |---|---|
//! | 0 | [`base`], [`files`] |
//! | 1 | [`metrics`], [`device`], [`graph`], [`collective`], [`cluster`], [`data`] |
//! | 2 | [`kernels`], [`model`], [`optim`], [`parallel`], [`comm`], [`faults`], [`ui`] |
//! | 3 | [`checkpoint`], [`config`], [`autotune`], [`net`], [`sim`] |
//! | 4 | [`exec`], [`planner`] |
//! | 5 | [`runtime`] |
//! | 6 | [`train`] |
//! | 7 | [`mod@bench`] |
//! | 8 | `cli` |
//!
//! The feature `cli`, on by default, is the program `potluck`: the module of that name,
//! `ui::terminal`, and the handlers of signals in [`train::signals`]. With
//! `default-features = false` the library comes without them and without the crates that only they
//! need.

pub mod autotune;
pub mod base;
pub mod bench;
pub mod checkpoint;
#[cfg(feature = "cli")]
pub mod cli;
pub mod cluster;
pub mod collective;
pub mod comm;
pub mod config;
pub mod data;
pub mod device;
pub mod exec;
pub mod faults;
pub mod files;
pub mod graph;
pub mod kernels;
pub mod metrics;
pub mod model;
pub mod net;
pub mod optim;
pub mod parallel;
pub mod planner;
pub mod runtime;
pub mod sim;
pub mod train;
pub mod ui;

pub use runtime::nodes::{ClusterOptions, ConnectNews, First, connect};

/// The program in the guide, compiled and run as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../docs/guide.md")]
pub struct Guide;
