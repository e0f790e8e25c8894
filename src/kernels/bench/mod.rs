//! Benchmark kernels: a device for timing dispatches, loads that reach the peak throughput of a
//! device, and a busy loop for tests.

pub mod device;
pub mod peak;
pub mod spin;
