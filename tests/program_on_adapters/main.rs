//! The program as its users run it, on adapters and on several devices at once.

#[path = "../common/mod.rs"]
mod common;
mod faults;
mod generation;
mod groups;
mod hardware;
mod kernels;
#[path = "../common/language_models.rs"]
mod language_models;
mod large_tables;
mod moments;
#[path = "../common/node_processes.rs"]
mod node_processes;
mod nodes;
mod pipelines;
mod precision;
#[path = "../common/process.rs"]
mod process;
mod recompute;
mod several_devices;
mod small_gpt;
mod tensor;
mod trainers;
