//! How a run is placed on devices: the shares of a batch, and which devices are worth having. Pure:
//! what was measured comes in, a decision goes out.

pub mod balance;
