//! Error of a greeting.

use core::net::SocketAddr;

use super::bounds::{ADDRESSES_MAX, DEVICES_MAX};
use super::text::TextError;

/// Error of a greeting's content.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HelloError {
    #[error("{0}")]
    Text(#[from] TextError),
    #[error("it has no device")]
    NoDevice,
    #[error("it has {devices} devices, of at most {DEVICES_MAX}")]
    TooManyDevices { devices: usize },
    #[error("it asks to be node 0, which is the one that it joins")]
    FirstPlace,
    #[error("it has {identities} identities of {devices} devices")]
    Identities { identities: usize, devices: usize },
    #[error("it has {addresses} addresses, of at most {ADDRESSES_MAX}")]
    TooManyAddresses { addresses: usize },
    #[error("its address {address} cannot be dialed")]
    Address { address: SocketAddr },
    #[error("it listens at port 0, which is none")]
    NoPort,
}
