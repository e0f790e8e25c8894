//! Attacks by a node of the run: the run ends with the exit code of a loss, and names it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use potluck_core::{ChunkId, Generation, NodeRank, Position, Rank, Round};
use potluck_kernels::device::DeviceError;
use potluck_net::Payload;
use potluck_net::cluster::ClusterMsg;
use potluck_parallel::Vote;
use potluck_parallel::comm::{BufferPool, FrameContent, FrameHeader, FrameValues};
use potluck_train::runtime::remote::calls::CallReply;
use potluck_train::runtime::remote::wire::ToFirst;

use crate::node_peers::{Talk, Treason, betray, cluster, endpoint, hello, whole};
use crate::node_processes::{LINE, desk, host_with};
use crate::process::{Desk, Ran};

/// Returns what is wrong with the end of a run that its other node has attacked: it names the rank
/// or the node, and is that of a loss, or that of a defect where only one could do the same. No
/// process panics.
fn complaint(what: &str, ran: &Ran, names: [&str; 2]) -> Option<String> {
    let error = ran.lines("error:").first().map(|line| line.to_string()).unwrap_or_default();
    let code = if error.contains("is a defect of potluck") { 70 } else { 75 };
    let is_right = ran.code() == Some(code)
        && names.iter().any(|name| error.contains(name))
        && !ran.err.contains("panicked");
    (!is_right).then(|| format!("{what}: {}\n{}", ran.status, ran.err))
}

/// Tries cases in some threads, and fails with all that is wrong.
fn try_all<T: Sync>(cases: &[T], attack: impl Fn(&T) -> Option<String> + Sync) {
    const THREADS: usize = 4;
    let attack = &attack;
    let complaints: Vec<String> = thread::scope(|scope| {
        let parts = cases.chunks(cases.len().div_ceil(THREADS));
        let parts: Vec<_> = parts
            .map(|cases| scope.spawn(move || cases.iter().filter_map(attack).collect::<Vec<_>>()))
            .collect();
        parts.into_iter().flat_map(|part| part.join().unwrap()).collect()
    });
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

/// Names of a traitor in the error of its run.
const NAMES: [&str; 2] = ["rank 1", "(traitor)"];

fn encoded(message: &ToFirst) -> Vec<u8> {
    postcard::to_allocvec(message).unwrap()
}

fn vote(rank: u32, step: u64) -> ToFirst {
    let round = Round { generation: 1, step, settles: false };
    let (rank, gradients) = (Rank(rank), Vec::new());
    let terms = Vec::new();
    let loss_scale = 1.0;
    ToFirst::Vote(Vote { round, rank, loss: 1.0, count: 1.0, terms, loss_scale, gradients })
}

#[test]
fn node_out_of_turn_is_lost() {
    let beat = |generation, sequence| {
        let generation = Generation(generation);
        cluster(&ClusterMsg::Heartbeat { generation, sequence })
    };
    let connected = |peer| {
        let (generation, peer) = (Generation(1), NodeRank(peer));
        cluster(&ClusterMsg::PairConnected { generation, peer })
    };
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("a second hello", cluster(&ClusterMsg::Hello(hello("attacker", 9)))),
        ("no first byte", vec![]),
        ("an unknown first byte", vec![3, 1, 2]),
        ("no message of the cluster", vec![0, 99, 1]),
        ("a heartbeat out of order", beat(1, 7)),
        ("a heartbeat of a later generation", beat(9, 1)),
        ("a pair that is not its own", connected(7)),
        ("no message", whole(&[200; 10])),
        ("an empty message", whole(b"")),
        ("a byte behind a message", whole(&[encoded(&ToFirst::Working), vec![0]].concat())),
        (
            "a reply to no call",
            whole(&encoded(&ToFirst::Reply { id: 7, reply: Ok(CallReply::Flush(())) })),
        ),
        ("a vote without a group", whole(&encoded(&vote(1, 1)))),
        ("an assembly that was not asked for", whole(&encoded(&ToFirst::Assembled(Ok(()))))),
        ("blobs without a number", vec![2, 1, 2, 3]),
    ];
    try_all(&cases, |(what, bytes)| {
        let desk = desk();
        let host = host_with(&desk, 2, "", &format!("{LINE} --devices cpu --out run"));
        let endpoint = endpoint(&desk.path("code"));
        let talk = Talk::begin(&endpoint, host.address.parse().unwrap());
        talk.join(hello("attacker", 9));
        talk.say(bytes.clone());
        complaint(what, &host.finish(), ["node 1 (attacker)"; 2])
    });
}

#[test]
fn node_bad_frames_is_lost() {
    try_all(&["values", "blobs"], |what| {
        let desk = desk();
        let host = host_with(&desk, 2, "", &format!("{LINE} --devices cpu --out run"));
        let endpoint = endpoint(&desk.path("code"));
        let talk = Talk::begin(&endpoint, host.address.parse().unwrap());
        talk.join(hello("attacker", 9));
        match *what {
            "values" => talk.link.send_data([255; 40], Payload::from(vec![0; 64])).unwrap(),
            _ => (0..2).for_each(|_| talk.link.send_blob(7, Payload::from(vec![0; 64])).unwrap()),
        }
        complaint(what, &host.finish(), ["node 1 (attacker)"; 2])
    });
}

/// Messages to send instead of one that is to be changed; others come back.
type Change = fn(ToFirst) -> Result<Vec<ToFirst>, Box<ToFirst>>;

/// Changes one kind of message, once a number of messages of that kind have passed.
struct Messages {
    change: Change,
    after: u64,
    seen: AtomicU64,
}

impl Treason for Messages {
    fn message(&self, message: ToFirst) -> Vec<Vec<u8>> {
        let whole = encoded(&message);
        match (self.change)(message) {
            Ok(changed) if self.seen.fetch_add(1, Ordering::SeqCst) >= self.after => {
                changed.iter().map(encoded).collect()
            }
            _ => vec![whole],
        }
    }
}

/// Runs two nodes of which the one that joined is a traitor; returns the end of the other.
fn betrayed(treason: impl Treason) -> Ran {
    betrayed_on(&desk(), "", treason)
}

fn betrayed_on(desk: &Desk, flags: &str, treason: impl Treason) -> Ran {
    let more = "--devices cpu --out run --set parallel.shares=2,2 --steps 30 \
                --set faults.device_timeout_s=4 --set faults.hash_every=2 \
                --set faults.node_timeout_s=3";
    let host = host_with(desk, 2, "", &format!("{LINE} {more} {flags}"));
    let (address, code) = (host.address.clone(), desk.path("code"));
    let traitor = thread::spawn(move || betray(&code, &address, treason));
    let ran = host.finish();
    traitor.join().unwrap();
    ran
}

/// Every node of a run has its secret, so any of them can end it; with `faults.on_loss` it costs
/// the run that node only.
#[test]
fn node_wrong_vote_leaves_others_going_on() {
    let desk = desk();
    let change: Change = |of| match of {
        ToFirst::Vote(vote) => Ok(vec![ToFirst::Vote(Vote { rank: Rank(9), ..vote })]),
        other => Err(Box::new(other)),
    };
    let flags = "--set faults.on_loss=continue --set train.checkpoint_every=2";
    let ran = betrayed_on(&desk, flags, Messages { change, after: 5, seen: AtomicU64::new(0) });
    let ran = ran.ok();
    let told = ran.line("warning: continuing from step ");
    assert!(told.contains("node 1 (traitor) is lost: it sent a report of rank 9"), "{told}");
    assert_eq!(desk.losses("run").len(), 30, "{}", ran.err);
}

#[test]
fn node_wrong_votes_is_lost() {
    let cases: [(&str, u64, Change); 7] = [
        ("it sent a report of rank 0, which is not its own", 2, |of| match of {
            ToFirst::Vote(vote) => Ok(vec![ToFirst::Vote(Vote { rank: Rank(0), ..vote })]),
            other => Err(Box::new(other)),
        }),
        ("it sent a report of rank 9, which is not its own", 2, |of| match of {
            ToFirst::Vote(vote) => Ok(vec![ToFirst::Vote(Vote { rank: Rank(9), ..vote })]),
            other => Err(Box::new(other)),
        }),
        ("it sent two votes of rank 1 for step 3", 2, |of| match of {
            ToFirst::Vote(vote) => Ok(vec![ToFirst::Vote(vote.clone()), ToFirst::Vote(vote)]),
            other => Err(Box::new(other)),
        }),
        ("it sent a vote of another round: rank 1 voted for step 8", 2, |of| match of {
            ToFirst::Vote(mut vote) => {
                vote.round.step += 5;
                Ok(vec![ToFirst::Vote(vote)])
            }
            other => Err(Box::new(other)),
        }),
        ("it has sent no vote of rank 1 for step 3", 2, |of| match of {
            ToFirst::Vote(_) => Ok(vec![]),
            other => Err(Box::new(other)),
        }),
        ("it sent a vote of another round: rank 1 voted for step 2", 2, |of| match of {
            ToFirst::Vote(mut vote) => {
                vote.round.step -= 1;
                Ok(vec![ToFirst::Vote(vote)])
            }
            other => Err(Box::new(other)),
        }),
        ("it sent two votes of rank 1 for step 3", 2, |of| match of {
            ToFirst::Vote(vote) => Ok((0..100).map(|_| ToFirst::Vote(vote.clone())).collect()),
            other => Err(Box::new(other)),
        }),
    ];
    try_all(&cases, |(what, after, change)| {
        let (seen, change, after) = (AtomicU64::new(0), *change, *after);
        let ran = betrayed(Messages { change, after, seen });
        let named = format!("node 1 (traitor) is lost: {what}");
        complaint(what, &ran, [&named; 2]).or((ran.code() != Some(75)).then_some(ran.err))
    });
}

#[test]
fn node_wrong_messages_is_found_out() {
    let cases: [(&str, u64, Change); 5] = [
        ("the end of a step of another rank", 2, |of| match of {
            ToFirst::Finished { group, result, .. } => {
                Ok(vec![ToFirst::Finished { rank: Rank(0), group, result }])
            }
            other => Err(Box::new(other)),
        }),
        ("replies to other calls", 0, |of| match of {
            ToFirst::Reply { id, reply } => Ok(vec![ToFirst::Reply { id: id + 1000, reply }]),
            other => Err(Box::new(other)),
        }),
        ("replies of another kind", 0, |of| match of {
            ToFirst::Reply { id, .. } => {
                Ok(vec![ToFirst::Reply { id, reply: Ok(CallReply::Hash(3)) }])
            }
            other => Err(Box::new(other)),
        }),
        ("too few values", 0, |of| match of {
            ToFirst::Reply { id, reply: Ok(mut reply) } => {
                if let CallReply::Read(values)
                | CallReply::ReadBank(values)
                | CallReply::ReadPlace(values)
                | CallReply::Add(values) = &mut reply
                {
                    values.pop();
                }
                Ok(vec![ToFirst::Reply { id, reply: Ok(reply) }])
            }
            other => Err(Box::new(other)),
        }),
        ("a device that was not to be opened", 0, |of| match of {
            ToFirst::Opened { slot, opened } => {
                Ok(vec![ToFirst::Opened { slot: slot + 1, opened }])
            }
            other => Err(Box::new(other)),
        }),
    ];
    try_all(&cases, |(what, after, change)| {
        let (seen, change, after) = (AtomicU64::new(0), *change, *after);
        complaint(what, &betrayed(Messages { change, after, seen }), NAMES)
    });
}

/// Such a node has done all that it swallows: its heartbeats go on, and its server has no
/// work.
#[test]
fn node_silent_is_lost_question_named() {
    let cases: [(&str, u64, Change); 5] = [
        ("the description of the run", 0, |of| match of {
            ToFirst::Offer(_) => Ok(vec![]),
            other => Err(Box::new(other)),
        }),
        ("the order to open traitor cpu", 0, |of| match of {
            ToFirst::Opened { .. } => Ok(vec![]),
            other => Err(Box::new(other)),
        }),
        ("the order to seat its ranks", 0, |of| match of {
            ToFirst::Assembled(_) => Ok(vec![]),
            other => Err(Box::new(other)),
        }),
        ("a call of traitor cpu", 0, |of| match of {
            ToFirst::Reply { .. } => Ok(vec![]),
            other => Err(Box::new(other)),
        }),
        ("a call of traitor cpu", 9, |of| match of {
            ToFirst::Reply { .. } => Ok(vec![]),
            other => Err(Box::new(other)),
        }),
    ];
    try_all(&cases, |(what, after, change)| {
        let (seen, change, after) = (AtomicU64::new(0), *change, *after);
        let ran = betrayed(Messages { change, after, seen });
        let named = ["node 1 (traitor) is lost: it is connected, but it has neither answered "; 2];
        let is_named = ran.line("error:").contains(what) && ran.code() == Some(75);
        complaint(what, &ran, named).or((!is_named).then(|| format!("{what}: {}", ran.err)))
    });
}

/// Changes the frames of a step.
struct Frames(fn(&mut FrameHeader, &mut Vec<f32>));

impl Treason for Frames {
    fn frame(&self, mut header: FrameHeader, values: FrameValues) -> (FrameHeader, FrameValues) {
        if header.round.step < 3 {
            return (header, values);
        }
        let mut changed = AsRef::<[f32]>::as_ref(&values).to_vec();
        (self.0)(&mut header, &mut changed);
        let mut sent = BufferPool::new(1).take(changed.len());
        sent.copy_from_slice(&changed);
        (header, FrameValues::Owned(sent))
    }
}

#[test]
fn node_wrong_values_is_found_out() {
    type Alter = fn(&mut FrameHeader, &mut Vec<f32>);
    let cases: [(&str, Alter); 6] = [
        ("values for a rank of its own", |header, _| header.to = Rank(1)),
        ("values for no rank", |header, _| header.to = Rank(u32::MAX)),
        ("too few values", |_, values| values.truncate(values.len() - 1)),
        ("too many values", |_, values| values.push(0.0)),
        ("no chunk", |header, _| {
            if let FrameContent::Chunk { chunk, .. } = &mut header.content {
                *chunk = ChunkId(u32::MAX);
            }
        }),
        ("no position", |header, _| {
            if let FrameContent::Chunk { from, .. } = &mut header.content {
                *from = Position(9);
            }
        }),
    ];
    try_all(&cases, |(what, change)| complaint(what, &betrayed(Frames(*change)), NAMES));
}

/// Names and sentences of another node do not steer the terminal of the first one.
#[test]
fn node_texts_have_no_control_characters() {
    let named: Change = |of| match of {
        ToFirst::Offer(Ok(mut offered)) => {
            offered.devices[0].name = "\u{1b}[2Jcpu".into();
            Ok(vec![ToFirst::Offer(Ok(offered))])
        }
        other => Err(Box::new(other)),
    };
    let refused: Change = |of| match of {
        ToFirst::Offer(_) => Ok(vec![ToFirst::Offer(Err("\u{1b}[2Jno\n".repeat(1000)))]),
        other => Err(Box::new(other)),
    };
    let lost: Change = |of| match of {
        ToFirst::Finished { rank, group, .. } => {
            let (adapter, why) = ("\u{1b}]0;cpu\u{7}".into(), "\u{9b}2Jgone".into());
            let result = Err(DeviceError::Lost { adapter, why });
            Ok(vec![ToFirst::Finished { rank, group, result }])
        }
        other => Err(Box::new(other)),
    };
    for (change, shown) in [
        (named, "traitor  [2Jcpu"),
        (refused, "cannot take part:  [2Jno"),
        (lost, " ]0;cpu : the device was lost ( 2Jgone)"),
    ] {
        let ran = betrayed(Messages { change, after: 0, seen: AtomicU64::new(0) });
        assert!(
            !ran.err.contains(['\u{1b}', '\u{7}', '\u{9b}']) && ran.err.len() < 5000,
            "{:?}",
            ran.err
        );
        assert!(ran.err.contains(shown), "{}", ran.err);
    }
}
