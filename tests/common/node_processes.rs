//! Nodes of a run as processes: the first one, which prints the line to type elsewhere, and those
//! that join.
#![allow(dead_code, reason = "each test binary uses a part of this file")]

use std::io::{BufRead, BufReader, Read};
use std::net::UdpSocket;
use std::process::Child;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{fs, thread};

use crate::process::{Desk, Ran, finish};

/// Longest silence of a node, in seconds: longer than a busy machine keeps one that lives from
/// running.
pub const SILENCE_S: f64 = 3.0;
/// Longest time from a fault to the end of all nodes, in seconds: much less than without what finds
/// the fault.
pub const END_S: f64 = 30.0;

/// Returns a UDP port at which a process may listen later: below those that a system hands out, so
/// that no other test gets it meanwhile.
pub fn later_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let candidates = (0..10_000).map(|_| {
        let next = std::process::id().wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        20_000 + (next.wrapping_mul(7) % 10_000) as u16
    });
    let is_free = |port: &u16| UdpSocket::bind(("0.0.0.0", *port)).is_ok();
    candidates.into_iter().find(is_free).expect("a port is free")
}

/// Returns whether an error or a line tells of a silence that was too long.
pub fn tells_silence(text: &str) -> bool {
    text.contains(&format!("it has been silent for {SILENCE_S} seconds"))
}

pub const LINE: &str = "train tiny.toml --data text.txt --set train.sample_tokens=0 \
     --set data.held_out=0 --set train.checkpoint_every=0 --set schedule.decay_steps=12 \
     --steps 6";

/// First node of a run, which has printed the line for the others.
pub struct Host {
    pub child: Child,
    pub address: String,
    pub lines: Arc<Mutex<String>>,
    reader: thread::JoinHandle<()>,
}

pub fn desk() -> Desk {
    let desk = Desk::new();
    let code = desk.run("secret").ok().out;
    write_secret(&desk, "code", &code);
    desk
}

pub fn write_secret(desk: &Desk, name: &str, code: &str) {
    desk.write(name, code);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(desk.path(name), fs::Permissions::from_mode(0o600)).unwrap();
    }
}

pub fn host_with(desk: &Desk, nodes: usize, faults: &str, line: &str) -> Host {
    let line = format!("{line} --nodes {nodes} --listen 127.0.0.1:0 --secret-file code");
    Host::of(desk.command(&line).env("POTLUCK_FAULT", faults).spawn().unwrap())
}

/// Starts a run of two nodes, each with one CPU device, that goes on until it is ended, and waits
/// for its second step. `faults` are those of the node that joins.
pub fn endless(desk: &Desk, of_first: &str, faults: &str, of_other: &str) -> (Host, Host) {
    let line = format!(
        "{LINE} --devices cpu --batch 4 --set parallel.shares=2,2 --steps 1000000 --log-every 1 \
         --set faults.node_timeout_s={SILENCE_S} {of_first}"
    );
    let mut host = host_with(desk, 2, "", &line);
    let other = join(desk, &host, faults, &format!("--devices cpu {of_other}"));
    host.wait_for("step 2/");
    // It prints each step, too: more than a pipe holds that nobody reads.
    (host, Host::started(other))
}

impl Host {
    /// Waits until a first node has printed the line for the others.
    pub fn of(child: Child) -> Self {
        Self::showing(child, "potluck join ")
    }

    /// Waits until a first node has printed the line for the others, which begins so.
    pub fn showing(child: Child, command: &str) -> Self {
        Self::started(child).with_address(command)
    }

    /// Waits until it has printed the line for the others, which begins so.
    pub fn with_address(self, command: &str) -> Self {
        let mut host = self;
        host.wait_for(command);
        let text = host.lines.lock().unwrap().clone();
        let (_, rest) = text.split_once(command).unwrap();
        host.address = rest.split_whitespace().next().unwrap().into();
        host
    }

    /// Reads what a process prints.
    pub fn started(mut child: Child) -> Self {
        let stderr = child.stderr.take().unwrap();
        Self::printing(child, stderr)
    }

    /// Reads what a process prints there.
    pub fn printing(child: Child, stderr: impl Read + Send + 'static) -> Self {
        let lines = Arc::new(Mutex::new(String::new()));
        let read = lines.clone();
        let reader = thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                read.lock().unwrap().push_str(&(line + "\n"));
            }
        });
        Host { child, address: String::new(), lines, reader }
    }

    /// Returns whether it has printed this by now.
    pub fn has_printed(&self, text: &str) -> bool {
        self.lines.lock().unwrap().contains(text)
    }

    /// Returns how many times it has printed this by now.
    pub fn times_printed(&self, text: &str) -> usize {
        self.lines.lock().unwrap().matches(text).count()
    }

    /// Waits until it has printed this.
    pub fn wait_for(&mut self, text: &str) {
        self.wait_for_times(text, 1);
    }

    /// Waits until it has printed this so many times.
    pub fn wait_for_times(&mut self, text: &str, times: usize) {
        let started = Instant::now();
        while self.times_printed(text) < times {
            let printed = self.lines.lock().unwrap().clone();
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "the first node ended without '{text}':\n{printed}");
            assert!(started.elapsed() < Duration::from_secs(60), "no '{text}' in:\n{printed}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn finish(self) -> Ran {
        let ran = finish(self.child, "the first node");
        self.reader.join().unwrap();
        let err = self.lines.lock().unwrap().clone();
        Ran { err, ..ran }
    }
}

pub fn join(desk: &Desk, host: &Host, faults: &str, more: &str) -> Child {
    join_at(desk, &host.address, faults, more)
}

/// Joins at another address than the one that was printed.
pub fn join_at(desk: &Desk, address: &str, faults: &str, more: &str) -> Child {
    let line = format!("join {address} --secret-file code {more}");
    desk.command(&line).env("POTLUCK_FAULT", faults).spawn().unwrap()
}

pub fn state(desk: &Desk, run: &str, step: u64) -> [Vec<u8>; 2] {
    ["parameters.safetensors", "moments.safetensors"].map(|file| desk.checkpoint(run, step, file))
}

/// Returns the step of the newest checkpoint of a run, 0 without any.
pub fn last_saved(desk: &Desk, run: &str) -> u64 {
    let Ok(entries) = fs::read_dir(desk.path(run).join("checkpoints")) else { return 0 };
    let names = entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    let steps = names.filter_map(|name| name.strip_prefix("step-")?.parse().ok());
    steps.max().unwrap_or(0)
}

/// Resumes on one machine, and checks the bits of what comes of it.
pub fn goes_on(desk: &Desk, first: &Ran) {
    let error = first.line("error:");
    assert!(error.contains("with: potluck train --resume run"), "{error}");
    let saved = error.split("step-").nth(1).unwrap()[..8].parse::<u64>().unwrap();
    assert!(saved >= 2, "{error}");
    let line = "--steps 12 --devices cpu*2 --set parallel.shares=2,2 --quiet";
    if saved <= 12 {
        desk.run(&format!("train --resume run {line}")).ok();
        desk.run(&format!("{LINE} {line} --out whole --set train.checkpoint_every=2")).ok();
        assert!(state(desk, "run", 12) == state(desk, "whole", 12), "other bits after a fault");
    }
}
