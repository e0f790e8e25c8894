//! Greeting of a node: its identity, its addresses and its devices.

use core::net::SocketAddr;
use serde::{Deserialize, Serialize};

use super::bounds::{
    ADDRESSES_MAX, BUILD_BYTES_MAX, DEVICE_BYTES_MAX, DEVICES_MAX, HOST_BYTES_MAX,
    VERSION_BYTES_MAX,
};
use super::hello_error::HelloError;
use super::ids::EndpointId;
use super::refusal::Refusal;
use super::roster::can_be_dialed;
use super::text::{check_name, check_text};
use potluck_core::NodeRank;

/// Device of a node, for display.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeDevice {
    pub name: String,
    /// Kind and API, such as `discrete GPU, Vulkan`; may be empty.
    pub kind: String,
}

/// Greeting, the first message of a node that joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Version of the program, followed by a space and the node's purpose if it is not a run.
    pub version: String,
    /// Hash of the build, as text, and of its crates, as in `01ab core=02cd net=03ef`.
    pub build: String,
    /// Run that the node belongs to, if it returns to one; `None` joins any run.
    pub run: Option<String>,
    /// Requested number of the node; `None` takes any.
    pub place: Option<NodeRank>,
    pub host: String,
    /// UDP port at which the node listens.
    pub port: u16,
    /// Addresses at which the node may be reachable, besides the one at which it is seen.
    pub addresses: Vec<SocketAddr>,
    /// Number of the socket with that port, which is also in the greeting of its links.
    pub endpoint: EndpointId,
    /// Devices in the order of their ranks, at least one.
    pub devices: Vec<NodeDevice>,
    /// Identities of the devices, in their order, by [`identity_hash`]; may be empty. A resumed run
    /// recognizes its nodes by them.
    pub identities: Vec<u64>,
}

/// Returns a hash of the identity of a device, which fits into a greeting.
pub fn identity_hash(identity: &str) -> u64 {
    let hash = blake3::hash(identity.as_bytes());
    match hash.as_bytes().first_chunk() {
        Some(bytes) => u64::from_le_bytes(*bytes),
        None => 0,
    }
}

impl Hello {
    /// Checks the bounds of all values.
    ///
    /// # Errors
    /// Returns [`HelloError`] for an empty or too long text, one with control characters, no port,
    /// too many addresses or one that cannot be dialed, and no or too many devices.
    pub fn check(&self) -> Result<(), HelloError> {
        check_name("version", &self.version, VERSION_BYTES_MAX)?;
        check_name("build", &self.build, BUILD_BYTES_MAX)?;
        if let Some(run) = &self.run {
            check_name("run", run, VERSION_BYTES_MAX)?;
        }
        if self.port == 0 {
            return Err(HelloError::NoPort);
        }
        let addresses = self.addresses.len();
        if addresses > ADDRESSES_MAX {
            return Err(HelloError::TooManyAddresses { addresses });
        }
        if let Some(&address) = self.addresses.iter().find(|address| !can_be_dialed(address)) {
            return Err(HelloError::Address { address });
        }
        if self.place == Some(NodeRank(0)) {
            return Err(HelloError::FirstPlace);
        }
        let identities = self.identities.len();
        let devices = self.devices.len();
        if identities > 0 && identities != devices {
            return Err(HelloError::Identities { identities, devices });
        }
        check_host_and_devices(&self.host, &self.devices)
    }

    /// Compares the greeting of a joining node with this one of the first node.
    ///
    /// # Errors
    /// Returns [`Refusal`] for another version, build or run.
    pub fn accept(&self, run: &str, theirs: &Self) -> Result<(), Refusal> {
        let hosts = (theirs.host.clone(), self.host.clone());
        if theirs.version != self.version {
            let values = (theirs.version.clone(), self.version.clone());
            return Err(Refusal::Version { hosts, values });
        }
        if theirs.build != self.build {
            let values = (theirs.build.clone(), self.build.clone());
            return Err(Refusal::Build { hosts, values });
        }
        match &theirs.run {
            Some(wanted) if wanted != run => {
                Err(Refusal::Run { hosts, values: (wanted.clone(), run.to_owned()) })
            }
            _ => Ok(()),
        }
    }
}

/// Checks the host name of a node and its devices.
pub(crate) fn check_host_and_devices(host: &str, devices: &[NodeDevice]) -> Result<(), HelloError> {
    check_name("host name", host, HOST_BYTES_MAX)?;
    match devices.len() {
        0 => return Err(HelloError::NoDevice),
        devices if devices > DEVICES_MAX => return Err(HelloError::TooManyDevices { devices }),
        _ => {}
    }
    for device in devices {
        check_name("device name", &device.name, DEVICE_BYTES_MAX)?;
        check_text("kind of device", &device.kind, DEVICE_BYTES_MAX)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::testing::{address, hello};

    #[test]
    fn greetings_are_bounded() {
        assert_eq!(hello("beta").check(), Ok(()));
        let wrong = |change: fn(&mut Hello)| {
            let mut hello = hello("beta");
            change(&mut hello);
            hello.check().unwrap_err().to_string()
        };
        let long = "its host name has 256 bytes, of at most 255";
        assert_eq!(wrong(|hello| hello.host = "h".repeat(256)), long);
        assert_eq!(wrong(|hello| hello.devices.clear()), "it has no device");
        let many = "it has 65 devices, of at most 64";
        assert_eq!(wrong(|hello| hello.devices = vec![hello.devices[0].clone(); 65]), many);
        let name = "its device name has 257 bytes, of at most 256";
        assert_eq!(wrong(|hello| hello.devices[0].name = "d".repeat(257)), name);
        let kind = "its kind of device has a character that is not shown, \\u{7}";
        assert_eq!(wrong(|hello| hello.devices[0].kind = "\u{7}".into()), kind);
        let addresses = "it has 9 addresses, of at most 8";
        assert_eq!(wrong(|hello| hello.addresses = vec![address(1); 9]), addresses);
        let none = "its address 0.0.0.0:7 cannot be dialed";
        assert_eq!(wrong(|hello| hello.addresses.push(([0; 4], 7).into())), none);
        assert_eq!(wrong(|hello| hello.port = 0), "it listens at port 0, which is none");
        assert_eq!(wrong(|hello| hello.version.clear()), "its version is empty");
        assert_eq!(wrong(|hello| hello.build.clear()), "its build is empty");
        assert_eq!(wrong(|hello| hello.run = Some(String::new())), "its run is empty");
        let first = "it asks to be node 0, which is the one that it joins";
        assert_eq!(wrong(|hello| hello.place = Some(NodeRank(0))), first);
        let identities = "it has 3 identities of 1 devices";
        assert_eq!(wrong(|hello| hello.identities = vec![1; 3]), identities);
    }

    #[test]
    fn nodes_that_do_not_match_learn_the_values_of_both_sides() {
        let own = hello("alpha");
        let refusal = |change: fn(&mut Hello)| {
            let mut theirs = hello("beta");
            change(&mut theirs);
            own.accept("run-7", &theirs).unwrap_err().to_string()
        };
        assert_eq!(own.accept("run-7", &hello("beta")), Ok(()));
        assert_eq!(
            refusal(|hello| hello.version = "0.2.0".into()),
            "beta has potluck 0.2.0 and alpha potluck 0.1.0: install the same version on both"
        );
        assert_eq!(
            refusal(|hello| hello.version = "0.1.0 (bench link)".into()),
            "beta has potluck 0.1.0 (bench link) and alpha potluck 0.1.0: join with the command \
             that alpha shows"
        );
        assert_eq!(
            refusal(|hello| hello.build = "beef".into()),
            "beta has the build beef of potluck and alpha the build cafe: install the same build \
             on both"
        );
        let own_rooms = Hello { build: "cafe core=01 net=02 shaders=03".into(), ..hello("alpha") };
        let theirs = Hello { build: "beef core=01 net=04 shaders=05".into(), ..hello("beta") };
        assert_eq!(
            own_rooms.accept("run-7", &theirs).unwrap_err().to_string(),
            "beta has the build beef of potluck and alpha the build cafe, which differ first in \
             net: install the same build on both"
        );
        assert_eq!(
            refusal(|hello| hello.run = Some("run-6".into())),
            "beta asks for the run run-6, and the run of alpha is run-7: join the node that \
             started run-6"
        );
        let mut same = hello("beta");
        same.run = Some("run-7".into());
        assert_eq!(own.accept("run-7", &same), Ok(()));
    }
}
