//! Groups over several processes, which are threads here: connected over loopback, with the bits of
//! one process, and with errors that name ranks when one ends.

use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use potluck_core::Rank;
use potluck_net::Secret;
use potluck_net::nodes::{ClusterOptions, ConnectEvent, First, connect};
use potluck_parallel::comm::{GroupError, ProcessGroup, ReduceOp, Transferable};

use super::dice::Dice;
use super::group::{all_contain, run, waited_s};
use super::subgroups::call_everything;

fn any_port() -> std::net::SocketAddr {
    std::net::SocketAddr::from(([127, 0, 0, 1], 0))
}

/// Options of a first process that sends its address.
fn host(nodes: u32, code: &str, tell: Sender<String>) -> ClusterOptions {
    let mut options = ClusterOptions::host(any_port(), nodes, Secret::parse(code).unwrap());
    options.on_news = Box::new(move |news| {
        if let ConnectEvent::Listening(address) = news {
            tell.send(address.to_string()).unwrap();
        }
    });
    options
}

fn code() -> String {
    Secret::generate().unwrap().code().unwrap()
}

/// Runs a thread per rank in processes with these numbers of ranks; returns the results by rank.
fn over<R: Send>(ranks: &[u32], rank: impl Fn(ProcessGroup) -> R + Sync) -> Vec<R> {
    let (code, (tell, told), rank) = (code(), channel(), &rank);
    let results = Mutex::new(Vec::new());
    let serve = |options: ClusterOptions| {
        let groups = connect(options).unwrap();
        thread::scope(|scope| {
            for group in groups {
                let results = &results;
                scope.spawn(move || {
                    let number = group.rank();
                    let result = rank(group);
                    results.lock().unwrap().push((number, result));
                });
            }
        });
    };
    thread::scope(|scope| {
        let nodes = ranks.len() as u32;
        let first = ClusterOptions { ranks: ranks[0], ..host(nodes, &code, tell) };
        scope.spawn(|| serve(first));
        let address = told.recv().unwrap();
        for &ranks in &ranks[1..] {
            let secret = Secret::parse(&code).unwrap();
            let options = ClusterOptions { ranks, ..ClusterOptions::join(&*address, secret) };
            scope.spawn(|| serve(options));
        }
    });
    let mut results = results.into_inner().unwrap();
    results.sort_by_key(|(rank, _)| *rank);
    assert_eq!(results.len(), ranks.iter().sum::<u32>() as usize);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Results of all collectives on values of one type, as bytes.
fn results<T: Transferable>(group: &mut ProcessGroup, of: fn(f32) -> T) -> Vec<u8> {
    let (rank, world) = (group.rank(), group.world_size());
    let other = Rank((rank.0 + 1) % world as u32);
    let mut bytes = Vec::new();
    let mut keep = |values: &[T]| bytes.extend_from_slice(bytemuck::cast_slice(values));
    // Few values along a tree, several around a ring (for one type so many that they take several
    // messages), and none.
    let many = if T::NAME == "f32" { 70_000 } else { 2000 };
    for length in [3, many, 0] {
        let mut dice = Dice(7, rank.0 << 20);
        let own: Vec<T> = (0..length).map(|_| of(1e3 * dice.value())).collect();
        let ops = [ReduceOp::Sum, ReduceOp::Min, ReduceOp::user(T::add)];
        for op in ops.into_iter().take(if length > 3 { 1 } else { 3 }) {
            let mut sum = own.clone();
            group.all_reduce(&mut sum, op.clone()).unwrap();
            keep(&sum);
            let whole: Vec<T> = own.iter().copied().cycle().take(length * world).collect();
            let mut part = own.clone();
            group.reduce_scatter(&whole, &mut part, op.clone()).unwrap();
            keep(&part);
            group.reduce(&mut part, Rank(1), op).unwrap();
            keep(&part);
        }
        if T::IS_FLOAT {
            let mut mean = own.clone();
            group.all_reduce(&mut mean, ReduceOp::Mean { weight: rank.0 as f64 + 0.3 }).unwrap();
            keep(&mean);
        }
        keep(&group.all_gather(&own).unwrap().concat());
        let mut copy = own.clone();
        group.broadcast(&mut copy, Rank(2)).unwrap();
        keep(&copy);
        let at_root = if rank == Rank(3) { length * world } else { 0 };
        let mut gathered = vec![T::default(); at_root];
        group.gather(&own, &mut gathered, Rank(3)).unwrap();
        keep(&gathered);
        group.scatter(&gathered, &mut copy, Rank(3)).unwrap();
        keep(&copy);
        group.send(&own, other).unwrap();
        group.recv(&mut copy, Rank((rank.0 + world as u32 - 1) % world as u32)).unwrap();
        keep(&copy);
    }
    bytes
}

/// Results of all types, as a hash.
fn all_results(mut group: ProcessGroup) -> String {
    let group = &mut group;
    let bytes = [
        results::<f32>(group, |value| value),
        results::<f64>(group, |value| f64::from(value) / 3.0),
        results::<i32>(group, |value| value as i32),
        results::<u32>(group, |value| value.abs() as u32),
        results::<i64>(group, |value| (value as i64).wrapping_mul(1 << 40)),
        results::<u64>(group, |value| (value.abs() as u64).wrapping_mul(1 << 58)),
    ];
    blake3::hash(&bytes.concat()).to_string()
}

#[test]
fn processes_have_bits_of_one_process() {
    let expected = run(5, all_results);
    assert_ne!(expected[0], expected[1]);
    assert_eq!(over(&[2, 1, 2], all_results), expected);
}

#[test]
fn subgroups_have_bits_of_their_size() {
    over(&[2, 1, 1], |mut group| {
        let rank = group.rank().0;
        // Pairs across processes, one pair within the first, and one rank that is left out.
        let mut halves = group.split(Some(rank % 2), -i64::from(rank)).unwrap().unwrap();
        let mut some = group.new_group(&[3, 0, 1].map(Rank)).unwrap();
        assert_eq!(some.is_none(), rank == 2);
        let mut none = group.split(None, 0).unwrap();
        assert!(none.take().is_none());
        for round in 0..3 {
            call_everything(&mut halves, 1500, round);
            if let Some(some) = &mut some {
                call_everything(some, 5, 10 + round);
                let mut inner = some.split(Some(rank / 3), 0).unwrap().unwrap();
                call_everything(&mut inner, 7, 20 + round);
            }
        }
        call_everything(&mut group, 3, 30);
        // What is dropped leaves the others alone.
        drop(halves);
        drop(some);
        (0..3).for_each(|_| group.barrier().unwrap());
    });
}

#[test]
fn processes_end_apart_first_one_last() {
    over(&[1, 1, 2], |mut group| {
        let rank = group.rank();
        let others = group.new_group(&[3, 1, 2].map(Rank)).unwrap();
        group.barrier().unwrap();
        drop(group);
        // The first process has no handle from here on.
        let Some(mut others) = others else { return };
        for _ in 0..20 {
            thread::sleep(Duration::from_millis(5));
            others.barrier().unwrap();
        }
        let last = others.new_group(&[2, 3].map(Rank)).unwrap();
        drop(others);
        if let Some(mut last) = last {
            assert!(rank.0 > 1);
            (0..20).for_each(|_| last.barrier().unwrap());
        }
    });
}

/// Errors of all ranks but one, which does something else in the second call.
fn disturbed(act: fn(ProcessGroup) -> Result<(), GroupError>) -> Vec<String> {
    let began = Instant::now();
    let ends = over(&[2, 1, 1], |mut group| {
        // One that is faster may have acted before this returns.
        let begun = group.barrier();
        if group.rank() == Rank(2) {
            return begun.and_then(|()| act(group));
        }
        begun?;
        loop {
            group.all_reduce(&mut [1.0f32; 2000], ReduceOp::Sum)?;
        }
    });
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    let ends = ends.into_iter().enumerate().filter(|(rank, _)| *rank != 2);
    ends.map(|(_, end)| end.unwrap_err().to_string()).collect()
}

#[test]
fn rank_failed_is_named_everywhere() {
    all_contain(&disturbed(|_| Ok(())), &["rank 2", "left the group"]);
    let failed = disturbed(|mut group| group.broadcast(&mut [1u32], Rank(7)).or(Ok(())));
    all_contain(&failed, &["rank 2", "broadcast(from rank 7)"]);
    let other = disturbed(|mut group| {
        let error = group.all_gather(&[1u64]).unwrap_err().to_string();
        assert!(error.contains("all_reduce(sum) of 2000 f32"), "{error}");
        Ok(())
    });
    all_contain(&other, &["rank 2", "all_gather of 1 u64"]);
    let late = disturbed(|mut group| {
        group.abort("the disk is full");
        group.barrier().or(Ok(()))
    });
    all_contain(&late, &["rank 2 gave up: the disk is full"]);
}

#[test]
fn rank_late_awaited_until_deadline() {
    let (failed, first_failed) = channel();
    let first_failed = Mutex::new(first_failed);
    let ends = over(&[1, 1], |mut group| {
        group.barrier().unwrap();
        if group.rank() == Rank(0) {
            group.set_deadline(Duration::from_millis(300));
            let end = group.all_reduce(&mut [1f32], ReduceOp::Sum);
            failed.send(()).unwrap();
            return end;
        }
        first_failed.lock().unwrap().recv_timeout(Duration::from_secs(60)).unwrap();
        group.all_reduce(&mut [1f32], ReduceOp::Sum)
    });
    let text = |rank: usize| ends[rank].as_ref().unwrap_err().to_string();
    assert!(text(0).contains("all_reduce(sum) of 1 f32: waited "), "{}", text(0));
    assert!(text(0).contains(" s for rank 1") && waited_s(&text(0)) >= 0.3, "{}", text(0));
    assert!(text(1).contains("rank 0 failed in all_reduce(sum)"), "{}", text(1));
}

#[test]
fn options_impossible_are_refused() {
    let refused = |change: fn(&mut ClusterOptions)| {
        let mut options = ClusterOptions::host(any_port(), 2, Secret::generate().unwrap());
        change(&mut options);
        match connect(options) {
            Err(GroupError::Connect(why)) => why,
            other => panic!("{:?}", other.map(|groups| groups.len())),
        }
    };
    let ranks = refused(|options| options.ranks = 0);
    assert_eq!(ranks, "a process has 1 to 64 ranks, and not 0 ranks");
    let nodes = refused(|options| options.first = First::Host { listen: any_port(), nodes: 1 });
    assert!(nodes.contains("2 to 64 nodes, and 1 are asked for"), "{nodes}");
    let endless = refused(|options| options.timeout = Duration::MAX);
    assert!(endless.starts_with("a node may be silent for "), "{endless}");
    let hasty = refused(|options| {
        options.first = First::Join { address: "127.0.0.1:9".into() };
        options.timeout = Duration::from_millis(1);
    });
    assert!(hasty.starts_with("a node may be silent for "), "{hasty}");
    let alone = refused(|options| options.connect_timeout = Some(Duration::from_millis(50)));
    assert!(alone.starts_with("only 1 of 2 processes came in time: "), "{alone}");
    let nowhere = refused(|options| options.first = First::Join { address: "no port".into() });
    assert!(nowhere.starts_with("no port: expects the host and port of the first"), "{nowhere}");
}
