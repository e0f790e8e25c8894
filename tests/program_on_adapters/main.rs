//! The program as its users run it, on adapters and on several devices at once.

#[path = "../common/mod.rs"]
mod common;
mod faults;
mod kernels;
mod pipelines;
#[path = "../common/process.rs"]
mod process;
mod several_devices;
mod trainers;
