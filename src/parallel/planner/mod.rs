//! Placement of a run on devices: the split of the batch, and the devices worth using. Pure
//! functions from measurements to a decision.

pub mod arrangement;
pub mod balance;
pub mod cards;
pub mod cut;
pub mod division;
pub mod laid_out;
pub mod links;
pub mod many_nodes;
pub mod plans;
pub mod price;
pub mod profile;
pub mod proposal;
pub mod rates;
pub mod rebalance;
pub mod ring_time;
pub mod search;
pub mod step_time;
pub mod tensor;
