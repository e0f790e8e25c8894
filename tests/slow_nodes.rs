//! Runs under many faults, over nodes and on one machine: `./x slow`.

#[path = "common/node_peers.rs"]
mod node_peers;
#[path = "common/node_processes.rs"]
mod node_processes;
#[path = "common/process.rs"]
mod process;
#[path = "common/udp_proxy.rs"]
mod udp_proxy;

use std::process::Child;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{fs, thread};

use node_peers::{Treason, betray};
use node_processes::{END_S, Host, SILENCE_S, desk, host_with, join_at, last_saved, state};
use potluck_core::decode;
use potluck_core::rng::Key;
use potluck_parallel::comm::FrameHeader;
use potluck_train::runtime::remote::wire::{ToFirst, ToNode};
use process::{Desk, Ran, finish, send_signal};
use serde::Serialize;
use serde::de::DeserializeOwned;
use udp_proxy::{UdpProxy, Way, Weather};

/// A model of about 100,000 parameters.
const MODEL: &str = "train tiny.toml --data text.txt --set train.sample_tokens=0 \
     --set data.held_out=0 --set train.checkpoint_every=0 --set model.width=64 \
     --set model.layers=2 --set model.context=32";

/// The weather of a home: 20 ms there and back, a percent of losses, and reordering.
fn rough(seed: u64) -> Weather {
    Weather {
        seed,
        delay: Duration::from_millis(8),
        jitter: Duration::from_millis(4),
        lost: 10,
        doubled: 10,
        bytes_per_s: 0,
    }
}

fn proxy_before(host: &Host, weather: Weather) -> UdpProxy {
    UdpProxy::start(host.address.parse().unwrap(), weather)
}

#[test]
fn a_model_of_100_000_parameters_has_the_same_bits_over_a_rough_network() {
    let desk = desk();
    let line = format!("{MODEL} --steps 10 --set parallel.shares=2,1,1");
    desk.run(&format!("{line} --devices cpu*3 --out one")).ok();
    let began = Instant::now();
    let mut host = host_with(&desk, 3, "", &format!("{line} --devices cpu --out run"));
    let weather = Weather { bytes_per_s: 4 << 20, ..rough(3) };
    let proxies = [4, 5].map(|seed| proxy_before(&host, Weather { seed, ..weather }));
    let mut others = Vec::new();
    for (number, proxy) in (2..).zip(&proxies) {
        others.push(join_at(&desk, &proxy.address.to_string(), "", "--devices cpu"));
        host.wait_for(&format!("{number} of 3 nodes here"));
    }
    host.finish().ok();
    for other in others {
        finish(other, "a node that joined").ok();
    }
    assert!(state(&desk, "run", 10) == state(&desk, "one", 10), "other bits by a bad network");
    let counts = proxies.map(|proxy| proxy.counts());
    eprintln!("10 steps in {:.1} s; {counts:?}", began.elapsed().as_secs_f64());
}

/// A hole of Wi-Fi that is longer than the default of `faults.node_timeout_s`, and half as long as
/// the run's: its links stay, and go on soon after it. QUIC's own probes would be up to 32 s apart.
#[test]
fn hole_of_31_s_is_survived_with_its_links() {
    const HOLE: Duration = Duration::from_secs(31);
    let desk = desk();
    let line = format!("{MODEL} --steps 30 --set parallel.shares=2,2 --log-every 1");
    desk.run(&format!("{line} --devices cpu*2 --out one")).ok();
    let timeout = "--set faults.node_timeout_s=60";
    let mut host = host_with(&desk, 2, "", &format!("{line} --devices cpu --out run {timeout}"));
    let proxy = proxy_before(&host, rough(5));
    let other = join_at(&desk, &proxy.address.to_string(), "", "--devices cpu");
    host.wait_for("step 2/30");
    proxy.cut(&[Way::There, Way::Back], true);
    thread::sleep(HOLE);
    let before = host.times_printed("/30 ");
    proxy.cut(&[Way::There, Way::Back], false);
    let mended = Instant::now();
    host.wait_for_times("/30 ", before + 1);
    let waited_s = mended.elapsed().as_secs_f64();
    eprintln!("the next step ended {waited_s:.1} s after the hole");
    assert!(waited_s < 8.0, "it went on late");
    let first = host.finish().ok();
    finish(other, "the other node").ok();
    assert!(!first.err.contains("is lost"), "{}", first.err);
    assert!(state(&desk, "run", 30) == state(&desk, "one", 30), "other bits after the hole");
}

/// Fault in the middle of a run.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// Signal to the first node, or to the other one.
    First(&'static str),
    Other(&'static str),
    Cut(&'static [Way]),
}

const FAULTS: [Fault; 9] = [
    Fault::First("KILL"),
    Fault::First("STOP"),
    Fault::First("TERM"),
    Fault::Other("KILL"),
    Fault::Other("STOP"),
    Fault::Other("TERM"),
    Fault::Cut(&[Way::There, Way::Back]),
    Fault::Cut(&[Way::There]),
    Fault::Cut(&[Way::Back]),
];

const ROUNDS: u32 = 20;
/// Steps of the whole run, more than the faults leave it the time for.
const STEPS: u64 = 4000;

/// A run that goes on over nodes after each of 20 faults, and ends in the bits of one that was not
/// disturbed. Prints the seconds from each fault to the end of both processes.
#[test]
fn a_run_that_is_disturbed_20_times_ends_in_the_same_bits() {
    let desk = desk();
    let seed = std::env::var("POTLUCK_SOAK_SEED").map_or(1, |seed| seed.parse().unwrap());
    let setting =
        "--set parallel.shares=2,2 --set train.checkpoint_every=2 --set schedule.decay_steps=500";
    let line = format!("{MODEL} {setting} --set faults.node_timeout_s={SILENCE_S} --out run");
    eprintln!("seed {seed}: fault, seconds to the end of both, exit codes, step saved");
    // On other devices, a resume chooses shares by their speed.
    let alone = "--devices cpu*2 --set parallel.shares=2,2 --quiet";
    let (mut saved, mut compared) = (0, 0);
    for round in 0..ROUNDS {
        let [which, when] = Key::new(seed).words([round, 0]);
        let fault = FAULTS[which as usize % FAULTS.len()];
        let wait = Duration::from_millis(u64::from(when % 2500));
        // Where nothing was saved yet, it begins anew.
        let line = match saved {
            0 => format!("{line} --steps {STEPS} --devices cpu --log-every 1"),
            _ => "train --resume run --devices cpu --log-every 1".into(),
        };
        if saved == 0 {
            let _ = fs::remove_dir_all(desk.path("run"));
        }
        let ([first, other], seconds) = disturbed(&desk, &line, fault, wait, u64::from(round));
        for ran in [&first, &other] {
            assert!(!ran.err.contains("panicked"), "{fault:?}: {}", ran.err);
        }
        check_end(fault, &first, &other);
        saved = last_saved(&desk, "run");
        let code = |ran: &Ran| ran.code().map_or("-".into(), |code| code.to_string());
        let (what, wait, codes) = (format!("{fault:?}"), wait.as_millis(), [&first, &other]);
        let codes = codes.map(code).join(" and ");
        eprintln!("{round:>2}  {what:<20} after {wait:>4} ms: {seconds:>4.1} s, {codes}, {saved}");
        assert!(seconds < END_S, "{seconds}");
        if saved > compared {
            // The run that is not disturbed goes as far.
            let of_whole = match compared {
                0 => format!("{MODEL} {setting} --out whole"),
                _ => "train --resume whole".into(),
            };
            desk.run(&format!("{of_whole} --steps {saved} {alone}")).ok();
            let is_same = state(&desk, "run", saved) == state(&desk, "whole", saved);
            assert!(is_same, "{fault:?} after {wait} ms in round {round}: other bits");
            compared = saved;
        }
    }
    assert!(saved > 0 && saved < STEPS, "the run is at step {saved}");
    let end = saved + 10;
    for run in ["run", "whole"] {
        desk.run(&format!("train --resume {run} --steps {end} {alone}")).ok();
    }
    assert!(state(&desk, "run", end) == state(&desk, "whole", end), "other bits after faults");
}

/// Ways to run: a name, the flags, and the number of nodes.
const WAYS: [(&str, &str, usize); 5] = [
    ("one device", "--devices cpu", 1),
    ("three devices", "--devices cpu*3 --set parallel.shares=2,1,1", 1),
    ("a pipeline", "--devices cpu*2 --pipeline 2 --set parallel.blocks_per_stage=2,2", 1),
    ("a star", "--devices cpu*3 --set parallel.shares=2,1,1 --set parallel.collective=star", 1),
    ("two nodes", "--devices cpu --set parallel.shares=2,2 --set faults.node_timeout_s=3", 2),
];

/// Each way to run is killed 20 times, at any moment from its start on (opening, steps, saves),
/// goes on from what is saved, and ends in the bits of a run that was not disturbed.
#[test]
fn runs_that_are_killed_at_random_moments_end_in_the_same_bits() {
    let seed = std::env::var("POTLUCK_SOAK_SEED").map_or(1, |seed| seed.parse().unwrap());
    for (number, (name, flags, nodes)) in (0..).zip(WAYS) {
        let desk = desk();
        let setting = "--set train.checkpoint_every=2 --set schedule.decay_steps=500";
        let begin = format!("{MODEL} {setting} {flags} --steps {STEPS} --out run");
        let mut anew = 0;
        for round in 0..ROUNDS {
            let [when, which] = Key::new(seed).words([round, 1 + number]);
            let wait = Duration::from_millis(u64::from(when % 1500));
            let line = if last_saved(&desk, "run") == 0 {
                let _ = fs::remove_dir_all(desk.path("run"));
                anew += 1;
                begin.clone()
            } else {
                "train --resume run".into()
            };
            if nodes == 1 {
                let child = desk.command(&line).spawn().unwrap();
                thread::sleep(wait);
                send_signal(child.id(), "KILL");
                assert_eq!(finish(child, "a run that is killed").code(), None);
                continue;
            }
            let line = format!("{line} --devices cpu");
            for ran in killed_over_nodes(&desk, &line, wait, which % 2 == 0) {
                assert!(!ran.err.contains("panicked"), "{}", ran.err);
            }
        }
        let saved = last_saved(&desk, "run");
        eprintln!(
            "{name}: {ROUNDS} kills, {anew} of them before the first save, {saved} steps saved"
        );
        assert!(saved > 0 && saved < STEPS, "{name}: the run is at step {saved}");
        let end = saved + 10;
        let on_one_node = "--devices cpu*2 --set parallel.shares=2,2";
        let devices = if nodes == 1 { "" } else { on_one_node };
        desk.run(&format!("train --resume run {devices} --steps {end} --quiet")).ok();
        let flags = if nodes == 1 { flags } else { on_one_node };
        desk.run(&format!("{MODEL} {setting} {flags} --steps {end} --out whole --quiet")).ok();
        assert!(state(&desk, "run", end) == state(&desk, "whole", end), "{name}: other bits");
    }
}

/// Starts two nodes and kills the first or the other one after `wait`; returns how all end.
fn killed_over_nodes(desk: &Desk, line: &str, wait: Duration, kills_first: bool) -> Vec<Ran> {
    const ALL_ARE_HERE: &str = "2 of 2 nodes here";
    let mut host = host_with(desk, 2, "", line);
    let mut others = vec![join_at(desk, &host.address, "", "--devices cpu")];
    thread::sleep(wait);
    if kills_first {
        send_signal(host.child.id(), "KILL");
    } else {
        send_signal(others[0].id(), "KILL");
        // Killed before it had joined: the first node waits for one that does.
        if !host.has_printed(ALL_ARE_HERE) {
            let next = join_at(desk, &host.address, "", "--devices cpu");
            host.wait_for(ALL_ARE_HERE);
            send_signal(next.id(), "KILL");
            others.push(next);
        }
    }
    let mut ran = vec![host.finish()];
    ran.extend(others.into_iter().map(ended));
    ran
}

/// Runs two nodes until a time after the first step, and disturbs them; returns how both end, and
/// the seconds until then.
fn disturbed(desk: &Desk, line: &str, fault: Fault, wait: Duration, seed: u64) -> ([Ran; 2], f64) {
    let mut host = host_with(desk, 2, "", line);
    let proxy = proxy_before(&host, rough(seed));
    let other = join_at(desk, &proxy.address.to_string(), "", "--devices cpu");
    host.wait_for("tokens/s");
    thread::sleep(wait);
    let (first_id, other_id) = (host.child.id(), other.id());
    let began = Instant::now();
    let stopped = match fault {
        Fault::First(signal) => send(first_id, signal),
        Fault::Other(signal) => send(other_id, signal),
        Fault::Cut(ways) => {
            proxy.cut(ways, true);
            None
        }
    };
    let ended = match stopped {
        // The one that was stopped goes on when the other one has given it up.
        Some(id) if id == first_id => {
            let other = ended(other);
            send_signal(id, "CONT");
            [host.finish(), other]
        }
        Some(id) => {
            let first = host.finish();
            send_signal(id, "CONT");
            [first, ended(other)]
        }
        None => {
            let other = thread::spawn(move || ended(other));
            [host.finish(), other.join().unwrap()]
        }
    };
    (ended, began.elapsed().as_secs_f64())
}

/// Sends a signal; returns the process if it is to be sent another one to go on.
fn send(process: u32, signal: &str) -> Option<u32> {
    send_signal(process, signal);
    (signal == "STOP").then_some(process)
}

fn ended(other: Child) -> Ran {
    finish(other, "the node that joined")
}

/// Checks the exit codes: those of a loss, which are also those of SIGTERM.
fn check_end(fault: Fault, first: &Ran, other: &Ran) {
    let codes = (first.code(), other.code());
    let expected = match fault {
        Fault::First("KILL") => (None, Some(75)),
        Fault::Other("KILL") => (Some(75), None),
        _ => (Some(75), Some(75)),
    };
    assert!(codes == expected, "{fault:?}: {codes:?}\n{}\n{}", first.err, other.err);
}

/// Keeps what a node and the first one send each other, and changes nothing.
#[derive(Clone, Default)]
struct Record {
    to_first: Arc<Mutex<Vec<Vec<u8>>>>,
    to_node: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Treason for Record {
    fn message(&self, message: ToFirst) -> Vec<Vec<u8>> {
        let bytes = postcard::to_allocvec(&message).unwrap();
        self.to_first.lock().unwrap().push(bytes.clone());
        vec![bytes]
    }

    fn hears(&self, message: &[u8]) {
        self.to_node.lock().unwrap().push(message.to_vec());
    }
}

/// Mutates messages of a run, and checks that each is refused or holds no more than its bytes.
fn survive<T: Serialize + DeserializeOwned>(messages: &[Vec<u8>], what: &str) {
    const MUTATIONS: u32 = 3_000_000;
    let (began, mut taken) = (Instant::now(), 0);
    let short: Vec<_> = messages.iter().filter(|message| message.len() < 4000).collect();
    for seed in 0..MUTATIONS {
        let word = |counter: u32| Key::new(13).words([seed, counter])[0] as usize;
        let mut bytes = short[word(0) % short.len()].clone();
        for change in 1..=1 + (word(1) % 4) as u32 {
            let (at, value) = (word(10 + change) % bytes.len().max(1), word(20 + change) as u8);
            match word(30 + change) % 6 {
                0 if at < bytes.len() => bytes[at] = value,
                1 if at < bytes.len() => bytes[at] ^= 1 << (value % 8),
                2 => bytes.insert(at, value),
                3 => bytes.truncate(at),
                4 => drop(bytes.splice(at..at, [255, 255, 255, 255, 15])),
                _ => drop(bytes.splice(at..at, vec![255; 9])),
            }
        }
        if let Ok(message) = decode::<T>(&bytes) {
            let again = postcard::to_allocvec(&message).unwrap();
            assert!(again.len() <= bytes.len(), "seed {seed}: {} bytes", again.len());
            let longer = [&bytes[..], &[seed as u8]].concat();
            assert!(decode::<T>(&longer).is_err(), "seed {seed}: a byte behind the message");
            taken += 1;
        }
        bytes.resize(FrameHeader::BYTES, 0);
        let bytes: [u8; FrameHeader::BYTES] = bytes.try_into().unwrap();
        if let Some(header) = FrameHeader::decode(&bytes) {
            assert_eq!(header.encode(), bytes, "seed {seed}");
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    let (count, of) = (short.len(), messages.len());
    eprintln!("{what}: {taken} of {MUTATIONS} mutations of {count} of {of}, {seconds:.1} s");
    assert!(taken > MUTATIONS / 1000 && taken < MUTATIONS, "{taken} are messages");
}

#[test]
fn millions_of_mutated_messages_of_a_run_are_refused_or_hold_no_more_than_their_bytes() {
    let desk = desk();
    let line = format!("{MODEL} --steps 6 --devices cpu --out run --set train.tune_s=0");
    let host = host_with(&desk, 2, "", &line);
    let record = Record::default();
    betray(&desk.path("code"), &host.address, record.clone());
    host.finish().ok();
    survive::<ToFirst>(&record.to_first.lock().unwrap(), "to the first node");
    survive::<ToNode>(&record.to_node.lock().unwrap(), "to the other node");
}
