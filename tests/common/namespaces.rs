//! Machines that are network namespaces of this one, where the system lets a user make them: they
//! have different addresses, and links whose rate is limited and that go down as cables do.
#![allow(dead_code, reason = "each binary uses a part of this file")]

use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

/// Namespaces of nodes on one bridge, which is in that of the first one. Dropped, they end.
pub struct Machines(Vec<Child>);

impl Drop for Machines {
    fn drop(&mut self) {
        for holder in &mut self.0 {
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}

/// Starts a process that keeps new namespaces for so long, and waits until they are there.
fn keep(mut command: Command, what: &[&str], most: Duration) -> Result<Child, String> {
    // The word is printed in the new namespace.
    let holder = format!("echo here; exec sleep {}", most.as_secs());
    command.args(what).args(["sh", "-c", &holder]).stdout(Stdio::piped());
    let mut child = command.stderr(Stdio::null()).spawn().map_err(|why| why.to_string())?;
    let mut word = [0; 5];
    let printed = child.stdout.take().map(|mut out| std::io::Read::read_exact(&mut out, &mut word));
    match printed {
        Some(Ok(())) => Ok(child),
        _ => {
            let _ = child.wait();
            Err("no network namespaces for users".into())
        }
    }
}

impl Machines {
    /// Creates so many machines, for so long at most; machine `n` is at 10.77.0.(n + 1).
    pub fn start(count: usize, most: Duration) -> Result<Self, String> {
        let mut machines = Self(vec![keep(Command::new("unshare"), &["-Urn"], most)?]);
        machines.ip(0, "link set lo up")?;
        machines.ip(0, "link add bridge type bridge")?;
        machines.ip(0, "addr add 10.77.0.1/24 dev bridge")?;
        machines.ip(0, "link set bridge up")?;
        for number in 1..count {
            let holder = keep(machines.enter(0), &["unshare", "-n"], most)?;
            let id = holder.id();
            machines.0.push(holder);
            machines.ip(0, &format!("link add to{number} type veth peer name cable netns {id}"))?;
            machines.ip(0, &format!("link set to{number} master bridge"))?;
            machines.ip(0, &format!("link set to{number} up"))?;
            let address = number + 1;
            machines.ip(number, &format!("addr add 10.77.0.{address}/24 dev cable"))?;
            machines.ip(number, "link set cable up")?;
        }
        Ok(machines)
    }

    /// Returns the number of machines.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Returns the command that enters a machine.
    pub fn enter(&self, machine: usize) -> Command {
        let mut command = Command::new("nsenter");
        let id = self.0[machine].id().to_string();
        command.args(["-t", &id, "-U", "-n", "--preserve-credentials", "--"]);
        command
    }

    pub fn ip(&self, machine: usize, line: &str) -> Result<(), String> {
        self.run(machine, &format!("ip {line}"))
    }

    fn run(&self, machine: usize, line: &str) -> Result<(), String> {
        let output = self.enter(machine).args(line.split(' ')).output();
        let Output { status, stderr, .. } = output.map_err(|why| format!("{line}: {why}"))?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("{line}: {}", String::from_utf8_lossy(&stderr).trim()))
        }
    }

    /// Limits the rate of the cable of machine 1 in both directions.
    pub fn limit(&self, mbit_per_s: u32) -> Result<(), String> {
        // With more, a message of tens of kilobytes would not wait for its own bytes, as it does on
        // a cable.
        self.limit_in_bursts(mbit_per_s, Duration::from_micros(504))
    }

    /// Limits the rate like [`Self::limit`]; what arrives in the time of a burst, but at least
    /// three packets, passes at once: a timer does not release single packets in time.
    pub fn limit_in_bursts(&self, mbit_per_s: u32, burst: Duration) -> Result<(), String> {
        let burst = (u128::from(mbit_per_s) * burst.as_micros() / 8).max(5_000);
        let limit = format!("root tbf rate {mbit_per_s}mbit burst {burst} latency 400ms");
        self.run(0, &format!("tc qdisc add dev to1 {limit}"))?;
        self.run(1, &format!("tc qdisc add dev cable {limit}"))
    }
}
