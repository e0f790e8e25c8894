//! Placement of a run on devices: the split of the batch, and the devices worth using. Pure
//! functions from measurements to a decision.

pub mod balance;
pub mod cut;
pub mod division;
pub mod links;
pub mod price;
pub mod rebalance;
