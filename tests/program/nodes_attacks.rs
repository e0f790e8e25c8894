//! Attacks on a run over nodes: by those without its code, by those who have it and are no node of
//! the run, and by a node of the run.

mod strangers;
mod traitors;

use std::net::{SocketAddr, UdpSocket};
use std::process::Child;
use std::time::Duration;
use std::{fs, thread};

use potluck_core::rng::Key;
use potluck_core::{ChunkId, EdgeId, Generation, NodeRank, Position, Rank, Round};
use potluck_net::cluster::ClusterMsg;
use potluck_net::{NetError, Payload};
use potluck_parallel::collective::CollectiveKind;
use potluck_parallel::comm::{FrameContent, FrameHeader};

use crate::node_peers::{Talk, cluster, endpoint, hello, whole};
use crate::node_processes::{
    Host, LINE, desk, host_with, join_at, later_port, state, write_secret,
};
use crate::process::{Desk, finish, send_signal};
use crate::udp_proxy::{UdpProxy, Way, Weather};

const STEPS: &str = "--steps 300 --set parallel.shares=2,2 --set schedule.decay_steps=300";

/// Run of two nodes on a slow network, so that it is under way while it is attacked.
struct Attacked {
    desk: Desk,
    host: Host,
    other: Child,
    first: SocketAddr,
    second: SocketAddr,
    proxy: UdpProxy,
}

impl Attacked {
    fn begin() -> Self {
        let desk = desk();
        desk.run(&format!("{LINE} {STEPS} --devices cpu*2 --out one")).ok();
        let line = format!("{LINE} {STEPS} --devices cpu --out run --log-every 1");
        let mut host = host_with(&desk, 2, "", &line);
        let first = host.address.parse().unwrap();
        let weather = Weather { delay: Duration::from_millis(10), ..Weather::default() };
        let proxy = UdpProxy::start(first, weather);
        let second = SocketAddr::from(([127, 0, 0, 1], later_port()));
        let more = format!("--devices cpu --listen {second}");
        let other = join_at(&desk, &proxy.address.to_string(), "", &more);
        host.wait_for("step 1/300");
        Self { desk, host, other, first, second, proxy }
    }

    /// Checks that the run is still under way, and that it ends in the bits of an undisturbed one.
    fn check_unharmed(self) {
        let Self { desk, host, other, proxy, .. } = self;
        let printed = host.lines.lock().unwrap().clone();
        assert!(!printed.contains("step 300/300"), "the run was over before the attacks were");
        proxy.clear();
        let first = host.finish().ok();
        let other = finish(other, "the node that joined").ok();
        assert!(state(&desk, "run", 300) == state(&desk, "one", 300), "other bits by an attack");
        assert_eq!(desk.losses("run"), desk.losses("one"));
        for ran in [&first, &other] {
            assert!(!ran.err.contains("panicked"), "{}", ran.err);
        }
        has_no_code(&desk, &[&first.err, &first.out, &other.err, &other.out]);
    }
}

/// Checks that no text and no file of the run has the code, or a group of its letters.
fn has_no_code(desk: &Desk, texts: &[&str]) {
    let code = fs::read_to_string(desk.path("code")).unwrap();
    let code = code.trim();
    let places = desk.files().into_iter().filter(|file| file.contains('/'));
    let files: Vec<_> = places.map(|file| (fs::read(desk.path(&file)).unwrap(), file)).collect();
    assert!(files.iter().any(|(_, file)| file.ends_with(".toml")), "the run has no files");
    for hidden in [code.to_string(), code.replace('-', ""), code.to_lowercase()] {
        assert!(texts.iter().all(|text| !text.contains(&hidden)), "the code was printed");
        for (bytes, file) in &files {
            let mut windows = bytes.windows(hidden.len());
            assert!(!windows.any(|window| window == hidden.as_bytes()), "the code is in {file}");
        }
    }
}

fn frame(to: u32, content: FrameContent) -> FrameHeader {
    FrameHeader { to: Rank(to), round: Round { generation: 1, step: 3, settles: false }, content }
}

/// Control messages of a peer that has the code, each with a part of the sentence with which it is
/// refused.
fn messages() -> Vec<(Vec<u8>, &'static str)> {
    let hello = hello("guest", 9);
    let generation = Generation(1);
    let heartbeat = ClusterMsg::Heartbeat { generation, sequence: 1 };
    let connected = ClusterMsg::PairConnected { generation, peer: NodeRank(0) };
    let with = |change: fn(&mut potluck_net::cluster::Hello)| {
        let mut changed = hello.clone();
        change(&mut changed);
        cluster(&ClusterMsg::Hello(changed))
    };
    let blobs =
        |first: u64, count: u64| [&[2][..], &first.to_le_bytes(), &count.to_le_bytes()].concat();
    vec![
        (with(|_| {}), "comes too late"),
        (with(|hello| hello.build = "another".into()), "install the same build on both"),
        (with(|hello| hello.version = "9.9.9".into()), "install the same version on both"),
        (with(|hello| hello.port = 0), "port 0"),
        (with(|hello| hello.host = "\u{1b}[2J".into()), "not shown"),
        (with(|hello| hello.devices.clear()), "no device"),
        (vec![0, 9, 255, 255], "no message of a node"),
        (cluster(&heartbeat), "where a hello is expected"),
        (cluster(&connected), "where a hello is expected"),
        (vec![3], "no kind"),
        (vec![255; 100], "no kind"),
        (vec![0; 60_000], "bytes follow behind a hello"),
        (whole(b""), "no node of the run"),
        (whole(&[255; 1000]), "no node of the run"),
        (blobs(0, 1), "no node of the run"),
        (blobs(0, 0), "a message of 0 blobs"),
        (blobs(0, u64::MAX), "blobs from 0"),
        (blobs(u64::MAX, 2), "blobs from"),
        (vec![2, 0], "of another length"),
    ]
}

/// Frames of such a peer: for a rank of this node, as of a node of the run; for one of another
/// node; of no chunk; and without a header.
fn frames() -> Vec<[u8; 40]> {
    let chunk = |kind, chunk| {
        let (chunk, from) = (ChunkId(chunk), Position(1));
        FrameContent::Chunk { kind, chunk, from }
    };
    let piece = FrameContent::Piece { edge: EdgeId(0), micro_batch: 0, start: 0 };
    vec![
        frame(0, chunk(CollectiveKind::ReduceScatter, 0)).encode(),
        frame(0, chunk(CollectiveKind::AllGather, 1)).encode(),
        frame(1, chunk(CollectiveKind::ReduceScatter, 0)).encode(),
        frame(0, chunk(CollectiveKind::ReduceScatter, u32::MAX)).encode(),
        frame(u32::MAX, piece).encode(),
        [255; 40],
    ]
}

#[test]
fn peers_with_code_lose_own_link_only() {
    let run = Attacked::begin();
    let endpoint = endpoint(&run.desk.path("code"));
    let mut talks = Vec::new();
    for (message, part) in messages() {
        let talk = Talk::begin(&endpoint, run.first);
        talk.say(message);
        talks.push((talk, part));
    }
    for node in [run.first, run.second] {
        for tag in frames() {
            let talk = Talk::begin(&endpoint, node);
            talk.link.send_data(tag, Payload::from(vec![0; 64])).unwrap();
            talks.push((talk, "a frame of a peer that is no node of the run"));
        }
        let talk = Talk::begin(&endpoint, node);
        talk.link.send_blob(0, Payload::from(vec![0; 1 << 20])).unwrap();
        talks.push((talk, "a blob of a peer that is no node of the run"));
        let talk = Talk::begin(&endpoint, node);
        talk.say(whole(&[9; 100]));
        talks.push((talk, "a message of a peer that is no node of the run"));
    }
    let talk = Talk::begin(&endpoint, run.second);
    talk.say(cluster(&ClusterMsg::Hello(hello("guest", 9))));
    talks.push((talk, "is not the first node of its run"));
    for (talk, part) in talks {
        let why = talk.closed();
        assert!(why.contains(part), "'{part}' is missing in: {why}");
    }
    run.check_unharmed();
}

/// More messages at once than the thread of the cluster takes do not fill its mailbox.
#[test]
fn floods_close_own_link_only() {
    let run = Attacked::begin();
    let endpoint = endpoint(&run.desk.path("code"));
    let (generation, why) = (Generation(1), "x".repeat(1000));
    let leave = cluster(&ClusterMsg::Left { generation, node: NodeRank(1), why });
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let talk = Talk::begin(&endpoint, run.first);
                let mut sent = 0;
                // The queue of the link is full before it has sent all.
                while sent < 100_000 && talk.link.send_control(leave.clone()).is_ok() {
                    sent += 1;
                }
                talk.closed();
            });
        }
    });
    run.check_unharmed();
}

#[test]
fn random_bytes_disturb_nothing() {
    let run = Attacked::begin();
    let endpoint = endpoint(&run.desk.path("code"));
    let one_way = UdpProxy::start(run.first, Weather::default());
    one_way.cut(&[Way::Back], true);
    thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| endpoint.dial(one_way.address, Duration::from_millis(300)).unwrap_err());
        }
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        for number in 0..10_000u32 {
            let word = |counter: u32| Key::new(5).words([number, counter]);
            let length = word(0)[0] as usize % 1400;
            let words = (1..).flat_map(word).flat_map(u32::to_le_bytes);
            let mut datagram: Vec<u8> = words.take(length).collect();
            // Half of them look like first packets of QUIC: a long header of version 1.
            if number % 2 == 0 && length > 5 {
                datagram[..5].copy_from_slice(&[0xc3, 0, 0, 0, 1]);
            }
            let node = if number % 4 < 2 { run.first } else { run.second };
            // The socket's buffer may be full.
            let _ = socket.send_to(&datagram, node);
        }
    });
    run.check_unharmed();
}

#[test]
fn other_secret_gets_no_answer() {
    let run = Attacked::begin();
    let other = run.desk.run("secret").ok().out;
    write_secret(&run.desk, "other", &other);
    let endpoint = endpoint(&run.desk.path("other"));
    for node in [run.first, run.second] {
        for _ in 0..10 {
            let after = Duration::from_millis(300);
            let error = endpoint.dial(node, after).unwrap_err();
            assert_eq!(error, NetError::RpcError { address: node, after });
        }
    }
    run.check_unharmed();
}

#[cfg(target_os = "linux")]
use crate::terminals::pseudo_terminal;

/// The first node shows the code that it has made, to its user, once. Nothing else has it: no
/// argument or variable of a process, and no file.
#[cfg(target_os = "linux")]
#[test]
fn code_made_is_shown_once_only() {
    let desk = Desk::new();
    let line = format!("{LINE} --steps 100000 --log-every 1 --devices cpu --out run --nodes 2");
    let (master, terminal) = pseudo_terminal();
    let mut command = desk.command(&format!("{line} --listen 127.0.0.1:0"));
    let child = command.stderr(terminal).spawn().unwrap();
    // It holds the terminal, whose end is that of the process.
    drop(command);
    let mut host = Host::printing(child, master).with_address("potluck join ");
    host.wait_for("and there the code  ");
    let text = host.lines.lock().unwrap().clone();
    let code = text.split_once("and there the code  ").unwrap().1.lines().next().unwrap();
    write_secret(&desk, "code", code);
    let mut other = Host::started(join_at(&desk, &host.address, "", "--devices cpu"));
    other.wait_for("step 10/");
    for process in [host.child.id(), other.child.id()] {
        for place in ["cmdline", "environ"] {
            let bytes = fs::read(format!("/proc/{process}/{place}")).unwrap();
            assert!(!String::from_utf8_lossy(&bytes).contains(code), "the code is in {place}");
        }
    }
    send_signal(host.child.id(), "INT");
    let (first, other) = (host.finish(), other.finish());
    assert_eq!(first.err.matches(code).count(), 1, "{}", first.err);
    has_no_code(&desk, &[&first.out, &other.err, &other.out, &first.err.replacen(code, "", 1)]);
}
