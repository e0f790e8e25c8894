//! Packets between two registries of one process: over links that carry them as they are, and over
//! links that change them.

use std::sync::{Mutex, OnceLock};
use std::thread;

use super::*;
use crate::comm::{Closed, GroupError, PacketLink, PacketValues, ReduceOp};
use potluck_core::rng::Key;
use potluck_core::{Position, Rank};

/// Link that hands bytes to the receiver of another process, after a change.
struct Wire {
    from: Range<u32>,
    to: OnceLock<PacketReceiver>,
    change: Box<dyn Fn(Sent) -> Sent + Send + Sync>,
    refused: Mutex<Vec<String>>,
}

/// Header and values of a sent packet.
type Sent = ([u8; PACKET_HEADER_BYTES], Vec<u8>);

impl PacketLink for Wire {
    fn send(&self, header: [u8; PACKET_HEADER_BYTES], values: PacketValues) -> Result<(), Closed> {
        let (header, values) = (self.change)((header, values.as_ref().to_vec()));
        let receiver = self.to.get().expect("both sides are connected");
        let arrived = receiver.place(&self.from, &header, values.len()).and_then(|mut packet| {
            packet.bytes_mut().copy_from_slice(&values);
            packet.arrived()
        });
        if let Err(why) = arrived {
            receiver.end(&format!("a peer sent {why}"));
            self.refused.lock().unwrap().push(why);
        }
        Ok(())
    }
}

/// Returns the handles of a group of two processes of these ranks, where the change is applied to
/// the packets from the first to the second one, and the link between the two.
fn processes(
    [first, second]: [Range<u32>; 2],
    change: impl Fn(Sent) -> Sent + Send + Sync + 'static,
) -> (Vec<ProcessGroup>, Arc<Wire>) {
    let wire = |from: &Range<u32>, change: Box<dyn Fn(Sent) -> Sent + Send + Sync>| {
        let (from, to, refused) = (from.clone(), OnceLock::new(), Mutex::default());
        Arc::new(Wire { from, to, change, refused })
    };
    let (there, back) = (wire(&first, Box::new(change)), wire(&second, Box::new(|sent| sent)));
    let deadline = Duration::from_secs(20);
    let init = |own: &Range<u32>, other: &Range<u32>, link: &Arc<Wire>| {
        let process =
            RemoteProcess { ranks: other.clone(), host: "beta".into(), link: link.clone() };
        init_over(own.clone(), vec![process], deadline, Arc::new(()))
    };
    let (mut groups, receives) = init(&first, &second, &there);
    let _ = back.to.set(receives);
    let (others, receives) = init(&second, &first, &back);
    let _ = there.to.set(receives);
    groups.extend(others);
    (groups, there)
}

/// Calls something on all handles, each on its thread; returns the results by rank.
fn run<R: Send>(groups: Vec<ProcessGroup>, rank: impl Fn(ProcessGroup) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> =
            groups.into_iter().map(|group| scope.spawn(move || rank(group))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

/// Calls of all kinds, with few and with many values, in the group and in a part of it.
fn call_all(mut group: ProcessGroup) -> Result<Vec<u64>, GroupError> {
    let (rank, world) = (group.rank(), group.world_size());
    let mut sums: Vec<f32> = (0..3000).map(|i| (i * (rank.index() + 1)) as f32).collect();
    group.all_reduce(&mut sums, ReduceOp::Sum)?;
    let mut found: Vec<u64> = sums[..2].iter().map(|sum| sum.to_bits().into()).collect();
    let mut few = [rank.0 as i64 + 1];
    group.all_reduce(&mut few, ReduceOp::Max)?;
    let mut part = [0u64];
    group.reduce_scatter(&vec![u64::from(rank.0); world], &mut part, ReduceOp::Sum)?;
    found.extend([few[0] as u64, part[0]]);
    let mut half = group.split(Some(rank.0 % 2), 0)?.expect("all have a color");
    found.extend(half.all_gather(&[rank.0])?.concat().into_iter().map(u64::from));
    let mut copy = [f64::from(rank.0); 3];
    group.broadcast(&mut copy, Rank(1))?;
    group.reduce(&mut copy, Rank(0), ReduceOp::Sum)?;
    let mut gathered = vec![0.0; if rank == Rank(1) { 3 * world } else { 0 }];
    group.gather(&copy, &mut gathered, Rank(1))?;
    group.scatter(&gathered, &mut copy, Rank(1))?;
    found.push(copy[2].to_bits());
    let mut came = [0u32; 2];
    match rank.index() {
        0 => group.send(&[7u32, 8], Rank(world as u32 - 1))?,
        last if last == world - 1 => group.recv(&mut came, Rank(0))?,
        _ => {}
    }
    group.barrier()?;
    found.push(came[1].into());
    Ok(found)
}

#[test]
fn ranks_of_two_processes_get_what_those_of_one_get() {
    let expected = run(crate::comm::init(5), call_all);
    assert!(expected.iter().all(Result::is_ok));
    for ranks in [[0..2, 2..5], [0..1, 1..5]] {
        let (groups, wire) = processes(ranks, |sent| sent);
        assert_eq!(run(groups, call_all), expected);
        assert!(wire.refused.lock().unwrap().is_empty());
    }
}

#[test]
fn a_rank_that_fails_leaves_or_panics_is_named_in_the_other_process() {
    let ends = |act: fn(ProcessGroup) -> Result<(), GroupError>| {
        let (groups, wire) = processes([0..1, 1..3], |sent| sent);
        let mut ends = run(groups, |mut group| match group.rank() {
            Rank(2) => act(group),
            _ => group.all_reduce(&mut [1f32], ReduceOp::Sum).and_then(|()| group.barrier()),
        });
        // What a process passes on does not come back to the one that reported it.
        assert_eq!(*wire.refused.lock().unwrap(), [""; 0]);
        ends.truncate(2);
        ends.into_iter().map(|end| end.unwrap_err().to_string()).collect::<Vec<_>>()
    };
    let failed = ends(|mut group| group.broadcast(&mut [1f32], Rank(9)));
    assert!(failed.iter().all(|end| end.contains("rank 2 failed in broadcast(from rank 9)")));
    let other = ends(|mut group| group.all_reduce(&mut [1f64; 2], ReduceOp::Sum));
    assert!(other.iter().all(|end| end.contains("rank 2") && end.contains("all_reduce(sum) of")));
    let left = ends(|group| {
        drop(group);
        Ok(())
    });
    assert!(left.iter().any(|end| end.ends_with("rank 2 left the group")), "{left:?}");
    assert!(left.iter().all(|end| end.contains("rank 2")), "{left:?}");
    let gave_up = ends(|group| {
        group.abort("no more disk");
        Ok(())
    });
    assert_eq!(gave_up, ["rank 2 gave up: no more disk"; 2]);
}

#[test]
fn a_group_whose_handles_are_gone_takes_what_still_comes() {
    let (mut groups, wire) = processes([0..1, 1..2], |sent| sent);
    let other = groups.pop().expect("there are two");
    let (receiver, context) = (wire.to.get().unwrap().clone(), 0);
    drop(other);
    let content = PacketContent::WaitingAck;
    let (from, to) = (Position(0), Position(1));
    let header = PacketHeader { group: context, from, to, content };
    receiver.place(&(0..1), &header.encode(), 0).unwrap().arrived().unwrap();
    let error = receiver.place(&(0..1), &header.encode(), CHUNK_BYTES + 1).err().unwrap();
    assert!(error.starts_with("a packet that is longer than any"), "{error}");
    let error = groups[0].barrier().unwrap_err().to_string();
    assert_eq!(error, "barrier: rank 1 left the group");
}

/// Returns the errors of both ranks if the values that rank 0 sends back are changed in this way.
fn changed(change: fn(Sent) -> Sent) -> Vec<String> {
    const ALL_REDUCE: u8 = 1;
    let of_call = move |sent: Sent| if sent.0[1] == ALL_REDUCE { change(sent) } else { sent };
    let (groups, _) = processes([0..1, 1..2], of_call);
    let ends = run(groups, |mut group| {
        let mut sum = [1f32, 2.0];
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        // Only rank 0 gets here. The link is not closed, as the network does for such packets.
        group.set_deadline(Duration::from_millis(60));
        group.barrier()
    });
    ends.into_iter().map(|end| end.unwrap_err().to_string()).collect()
}

#[test]
fn values_of_another_length_type_or_receiver_end_the_call_with_an_error() {
    let told = |change: fn(Sent) -> Sent, text: &str| {
        let errors = changed(change);
        assert!(errors[1].contains(text), "{errors:?}");
        assert!(!errors[0].is_empty());
    };
    // More and fewer bytes than two f32 have.
    told(
        |(header, mut values)| {
            values.extend([0; 4]);
            (header, values)
        },
        "a packet whose values are not due: 12 bytes",
    );
    told(
        |(header, mut values)| {
            values.truncate(4);
            (header, values)
        },
        "a packet whose values are not due: 4 bytes",
    );
    // A call of three values, and one of two f64, with what belongs to them.
    told(
        |(mut header, mut values)| {
            header[24] += 1;
            values.extend([0; 4]);
            (header, values)
        },
        "all_reduce(sum) of 3 f32",
    );
    told(
        |(mut header, values)| {
            header[3] = 2;
            (header, [&values[..], &values[..]].concat())
        },
        "all_reduce(sum) of 2 f64",
    );
    // The right values in another form.
    told(
        |(mut header, values)| {
            header[32] = 1;
            (header, values)
        },
        "of another form, type or length",
    );
    told(
        |(mut header, values)| {
            header[6] = 0;
            (header, values)
        },
        "a packet for a rank of another process",
    );
    told(
        |(mut header, values)| {
            header[4] = 1;
            (header, values)
        },
        "a packet of a rank of another process",
    );
}

#[test]
fn no_header_takes_more_memory_than_a_message_has_or_makes_the_receiver_panic() {
    // Headers that a group really sends, by a link that keeps them.
    let kept = Arc::new(Mutex::new(Vec::new()));
    let keeps = kept.clone();
    let (groups, _) = processes([0..2, 2..5], move |sent: Sent| {
        keeps.lock().unwrap().push((sent.0, sent.1.len()));
        sent
    });
    for end in run(groups, |group| call_all(group).map(drop)) {
        end.unwrap();
    }
    let kept = kept.lock().unwrap().clone();
    assert!(kept.len() > 20);
    let (groups, wire) = processes([0..2, 2..5], |sent| sent);
    let (receiver, key) = (wire.to.get().unwrap(), Key::new(11));
    let mut taken = 0;
    for seed in 0..100_000u32 {
        let [at, what] = key.words([seed, 0]);
        let (mut header, mut bytes) = kept[at as usize % kept.len()];
        for change in 0..what % 4 {
            let [place, value] = key.words([seed, 1 + change]);
            match place % 48 {
                place if place < 40 => header[place as usize] = value as u8,
                40..44 => header[(value % 40) as usize] ^= 1 << (value >> 8 & 7),
                _ => bytes = (value >> (value % 32)) as usize,
            }
        }
        let decoded = PacketHeader::decode(&header);
        assert!(decoded.is_none_or(|decoded| decoded.encode() == header));
        if let Ok(mut packet) = receiver.place(&(0..2), &header, bytes) {
            let place = packet.bytes_mut();
            assert!(place.len() == bytes && bytes <= CHUNK_BYTES, "{bytes}");
            place.fill(b'x');
            // The reason of an abort may be refused.
            let _ = packet.arrived();
            taken += 1;
        }
    }
    assert!(taken > 20_000 && taken < 80_000, "{taken}");
    // The ranks for whom it was see what came.
    let ends = run(groups, |mut group| {
        group.set_deadline(Duration::from_millis(60));
        group.barrier()
    });
    assert!(ends.iter().skip(2).all(Result::is_err));
}

#[test]
fn calls_over_a_link_that_changes_a_header_end_with_an_error_or_the_right_result() {
    let expected = run(crate::comm::init(3), call_all);
    let key = Key::new(23);
    for seed in 0..40u32 {
        let count = Mutex::new(0u32);
        let [at, place] = key.words([seed, 0]);
        let (groups, _) = processes([0..1, 1..3], move |(mut header, values)| {
            let mut count = count.lock().unwrap();
            *count += 1;
            if *count == 1 + at % 20 {
                header[(place % 40) as usize] ^= 1 << (place >> 8 & 7);
            }
            (header, values)
        });
        let ends = run(groups, |mut group| {
            group.set_deadline(Duration::from_millis(30));
            call_all(group)
        });
        for (end, expected) in ends.into_iter().zip(&expected) {
            assert!(end.is_err() || end == *expected, "{seed}: {end:?}");
        }
    }
}
