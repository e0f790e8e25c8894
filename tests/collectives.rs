//! Collectives: the state machines under random deliveries, and the groups of threads on top of
//! them, both against sums in the stated order, bit by bit.

#[path = "collectives/dice.rs"]
mod dice;
#[path = "collectives/exchange.rs"]
mod exchange;
#[path = "collectives/group.rs"]
mod group;
