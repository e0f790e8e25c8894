//! Collectives: the state machines under random deliveries, and the groups of threads and of
//! processes on top of them, both against sums in the stated order, bit by bit.

mod dice;
mod exchange;
mod group;
mod processes;
mod subgroups;
