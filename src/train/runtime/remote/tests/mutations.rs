//! Mutated messages between nodes: each is refused, or is a message that holds no more than its
//! bytes.

use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::*;
use crate::runtime::remote::wire::{SlotActivity, ToFirst, ToNode};
use potluck_parallel::planner::links::LinkRate;

/// Mutations of the messages of each direction. `POTLUCK_MUTATIONS` sets another number.
const MUTATIONS: u32 = 100_000;
const LIMIT: Duration = Duration::from_secs(20);
/// Messages of each kind that are mutated.
const PER_KIND: usize = 4;

/// Changes bytes in one to three ways: a byte is replaced, a bit is turned, one is inserted, what
/// follows is cut off, or a length becomes huge.
fn mutate(bytes: &mut Vec<u8>, seed: u32) {
    let word = |counter: u32| Key::new(11).words([seed, counter])[0] as usize;
    for change in 0..=(word(0) % 3) as u32 {
        let (at, value) = (word(10 + change) % bytes.len().max(1), word(20 + change) as u8);
        // Heads are short, and decide the most.
        let at = if value.is_multiple_of(2) { at % 24 } else { at }.min(bytes.len());
        match word(30 + change) % 6 {
            0 if at < bytes.len() => bytes[at] = value,
            1 if at < bytes.len() => bytes[at] ^= 1 << (value % 8),
            2 => bytes.insert(at, value),
            3 => bytes.truncate(at),
            4 => drop(bytes.splice(at..at, [255, 255, 255, 255, 15])),
            5 => drop(bytes.splice(at..at, [255, 255, 255, 255, 255, 255, 255, 255, 255, 1])),
            _ => {}
        }
    }
}

/// Returns messages of every kind that nodes send each other: messages to nodes, and messages to
/// the first node.
fn recorded() -> [Vec<Vec<u8>>; 2] {
    let mut heard = [Vec::new(), Vec::new()];
    let pipeline =
        PipelineOptions { stages: 2, blocks_per_stage: vec![1, 3], ..PipelineOptions::default() };
    let piped = ParallelOptions { pipeline, ..fixed(&[5, 7]) };
    for (tie, parallel, faults) in [
        (true, fixed(&[4, 4, 4]), ""),
        (true, piped, ""),
        (false, ParallelOptions::default(), ""),
        (true, fixed(&[4, 4, 4]), "lost@reduce:2/2"),
    ] {
        let graph = graph(tie);
        let devices: &[usize] = if parallel.pipeline.stages == 2 { &[3] } else { &[2] };
        let nodes = Nodes::start(&graph, devices, faults);
        with_request(&graph, ("cpu", &nodes.remote), &parallel, |request| match faults {
            "" => drop(train(request)),
            _ => {
                let mut placed = assemble(request, &mut |_, _| {}).unwrap();
                step(&mut placed, 1).unwrap();
                step(&mut placed, 2).unwrap_err();
            }
        });
        nodes.remote.nodes[0].show(b"news".into());
        for (heard, end) in heard.iter_mut().zip([1, 0]) {
            heard.append(&mut nodes.ends[end].heard.lock().unwrap());
        }
        nodes.end();
    }
    heard.map(some_of_each_kind)
}

/// Keeps some messages of each kind, by the bytes with which they begin: a kind and, for a call or
/// a reply, its number and kind.
fn some_of_each_kind(messages: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let mut kept: Vec<(Vec<u8>, usize, Vec<u8>)> = Vec::new();
    for message in messages {
        let kind = [&message[..1], message.get(3..6).unwrap_or_default()].concat();
        let length = message.len().ilog2() as usize;
        let known = kept.iter().filter(|(known, of, _)| (known, *of) == (&kind, length)).count();
        if known < PER_KIND {
            kept.push((kind, length, message));
        }
    }
    kept.into_iter().map(|(.., message)| message).collect()
}

/// Decodes mutations of messages; a valid message with a byte behind it must be refused. Each
/// decoded element came as a byte at least, so encoding it again gives no more bytes than came.
fn survive<T: Serialize + DeserializeOwned>(messages: &[Vec<u8>], names: &[&str]) {
    let mut kinds: Vec<u8> = messages.iter().map(|message| message[0]).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let missing = names.iter().zip(0u8..).filter(|(_, kind)| !kinds.contains(kind));
    assert_eq!(missing.map(|(name, _)| *name).collect::<Vec<_>>(), Vec::<&str>::new());
    let mutations = std::env::var("POTLUCK_MUTATIONS").ok();
    let mutations = mutations.map_or(MUTATIONS, |count| count.parse().unwrap());
    let (began, mut taken) = (Instant::now(), 0);
    for seed in 0..mutations {
        let mut bytes = messages[seed as usize % messages.len()].clone();
        mutate(&mut bytes, seed);
        if let Ok(message) = decode::<T>(&bytes) {
            let again = postcard::to_allocvec(&message).unwrap();
            assert!(again.len() <= bytes.len(), "seed {seed}: {} bytes", again.len());
            if seed.is_multiple_of(8) {
                bytes.push(seed as u8);
                assert!(decode::<T>(&bytes).is_err(), "seed {seed}: a byte behind the message");
            }
            taken += 1;
        }
    }
    assert!((mutations / 100..mutations).contains(&taken), "{taken} of {mutations} are messages");
    let limit = LIMIT * (mutations / MUTATIONS).max(1);
    assert!(began.elapsed() < limit, "{:?}", began.elapsed());
}

#[test]
fn mutated_messages_between_nodes_are_refused_or_hold_no_more_than_their_bytes() {
    let [to_node, to_first] = recorded();
    let names = [
        "begin",
        "show",
        "end",
        "open",
        "close",
        "call",
        "assemble",
        "step",
        "decided",
        "abort",
        "measure the link",
        "arrival rate",
        "clock",
        "flush the trace",
    ];
    let more = [
        ToNode::End(b"over".into()),
        ToNode::Clock,
        ToNode::MeasureLink,
        ToNode::ArrivalRate,
        ToNode::FlushTrace,
    ];
    let more = more.iter().map(|message| postcard::to_allocvec(message).unwrap());
    let to_node = [to_node, more.collect()].concat();
    survive::<ToNode>(&to_node, &names);
    let activity = |slot| SlotActivity { slot, heartbeats: 900, is_waiting: true, received: 70 };
    let more = [
        ToFirst::Signal(1),
        ToFirst::Tuning {
            slot: 1,
            done: 3,
            total: 300,
            elapsed_ms: 70_000,
            compiling: Some("a kernel".into()),
        },
        // A run may be over before the first report.
        ToFirst::Activity(vec![activity(0), activity(1)]),
        ToFirst::LinkRate(Some(LinkRate {
            bytes_per_s: 1e8,
            round_trip_s: 1e-3,
            processor_s_per_byte: 1e-9,
        })),
        ToFirst::ArrivalRate(Some(1e8)),
        ToFirst::Clock(1 << 40),
        ToFirst::Trace(b"{}".into()),
        ToFirst::Flushed,
        ToFirst::Working,
    ];
    let more = more.iter().map(|message| postcard::to_allocvec(message).unwrap());
    let to_first = [to_first, more.collect()].concat();
    let names = [
        "offer",
        "signal",
        "opened",
        "tuning",
        "reply",
        "assembled",
        "link rate",
        "arrival rate",
        "vote",
        "finished",
        "activity",
        "clock",
        "trace",
        "flushed",
        "working",
    ];
    survive::<ToFirst>(&to_first, &names);
}

#[test]
fn mutated_headers_of_frames_are_none_or_those_that_they_encode() {
    use potluck_core::{ChunkId, EdgeId, Position, Round};
    use potluck_parallel::collective::CollectiveKind;
    use potluck_parallel::comm::FrameContent;
    let round = Round { generation: 1, step: 300, settles: false };
    let header = |content| FrameHeader { to: Rank(2), round, content }.encode().to_vec();
    let chunk = |kind| FrameContent::Chunk { kind, chunk: ChunkId(7), from: Position(1) };
    let headers = [
        header(chunk(CollectiveKind::ReduceScatter)),
        header(chunk(CollectiveKind::AllGather)),
        header(FrameContent::Piece { edge: EdgeId(1), micro_batch: 2, start: 64 }),
    ];
    let mut taken = 0;
    for seed in 0..MUTATIONS {
        let mut bytes = headers[seed as usize % 3].clone();
        mutate(&mut bytes, seed);
        bytes.resize(FrameHeader::BYTES, 0);
        let bytes = bytes.try_into().unwrap();
        if let Some(header) = FrameHeader::decode(&bytes) {
            assert_eq!(header.encode(), bytes, "seed {seed}");
            taken += 1;
        }
    }
    assert!((MUTATIONS / 100..MUTATIONS).contains(&taken), "{taken} are headers");
}
