//! Tests of worker groups in this process: steps, failures, and the threads left when a group
//! ends.

use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use super::*;
use potluck_core::faults::Faults;
use potluck_core::rng::Key;
use potluck_core::{BucketId, HostTensor, Lock, Position, Round};
use potluck_graph::optim::Optimizer;
use potluck_graph::{Builder, Init, Plan, PlanOptions, differentiate};
use potluck_kernels::exec::{BucketTensor, Cpu, Moments};
#[cfg(target_os = "linux")]
use potluck_parallel::comm::{Carrier, Closed, FrameHeader, FrameValues};
use potluck_parallel::planner::laid_out::layout;
use potluck_parallel::{ReduceSite, Share, Vote, data_parallel};

const WORLD: u32 = 3;
const SGD: Optimizer = Optimizer::Sgd { momentum: 0.9, weight_decay: 0.0 };

fn plan() -> Plan {
    let mut b = Builder::new();
    b.block("only");
    let x = b.input("x", &[1, 40]);
    let w = b.parameter("w", &[40, 40], Init::Normal { std: 0.1 });
    let y = b.linear(x, w, None).unwrap();
    b.squared_error_loss(y, x).unwrap();
    Plan::new(differentiate(b.finish()).unwrap(), PlanOptions::new(2))
}

fn group(reduce_site: ReduceSite) -> WorkerGroup {
    let layout = layout(&plan(), Topology::Ring, WORLD as usize, 1024);
    let drivers = (0..WORLD).map(|rank| {
        let owned = vec![layout.shard(BucketId(0), Position(rank))];
        let moments = Moments { count: SGD.moments(), owned: Some(owned) };
        DeviceThread::start(Box::new(Cpu::oracle(plan(), moments)), Duration::from_secs(60))
            .unwrap()
    });
    let reduce_site = vec![reduce_site; WORLD as usize];
    let options = WorkerGroupOptions { reduce_site, ..WorkerGroupOptions::default() };
    let groups = BucketGroups::all(WORLD, 1);
    let group = WorkerGroup::start(drivers.collect(), layout.clone(), groups, &options).unwrap();
    group.run_on_all("initialization", |_, device| device.initialize(5)).unwrap();
    group
}

fn inputs(step: u64, faults: &Faults) -> Vec<Arc<StepInput>> {
    let plan = plan();
    let x = plan.graph.input("x").unwrap();
    let input = |rank: u32| {
        let share = Share { first: 2 * rank, count: 2, micro_batch: 2 };
        let values = (0..80).map(|i| Key::new(3).step(step).normal(i + 80 * u64::from(rank)));
        let values = HostTensor::Float(values.map(|value| value as f32).collect());
        let (round, program) =
            (Round { generation: 0, step, settles: false }, data_parallel(&plan, share, true));
        Arc::new(StepInput {
            run_key: Key::new(7),
            samples: 6,
            update: SGD.update(0.1, step),
            faults: faults.clone(),
            ..StepInput::new(round, Rank(rank), Arc::new(program), vec![vec![(x, values)]])
        })
    };
    (0..WORLD).map(input).collect()
}

/// Serializes the tests that start a worker group, so that none counts the threads of another.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Lock<()> = Lock::new(());
    // Started here, the threads of the pool do not inherit the name of a device thread.
    rayon::broadcast(|_| ());
    TURN.lock()
}

/// Waits until the threads of all worker groups in this process are gone, which the system may
/// show a little later than they are joined. No other test has a device thread of this name.
#[cfg(target_os = "linux")]
fn await_no_thread(what: &str) {
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm"));
    let left = || -> Vec<String> {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| name(task).ok());
        names.filter(|n| n.starts_with("ring of") || n.starts_with("driver of orac")).collect()
    };
    let started = Instant::now();
    while !left().is_empty() {
        assert!(started.elapsed() < Duration::from_secs(10), "{what}: {:?}", left());
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
#[cfg(target_os = "linux")]
fn no_thread_is_left_behind_whatever_fails_where() {
    let _turn = turn();
    for reduce_site in [ReduceSite::Host, ReduceSite::Device] {
        drop(group(reduce_site));
        await_no_thread("a sound team");
        for point in ["forward", "backward", "reduce", "verdict", "update", "gather"] {
            for rank in 0..WORLD {
                let faults: Faults = format!("lost@{point}:2/{rank}").parse().unwrap();
                let mut group = group(reduce_site);
                group.step(&inputs(1, &faults)).unwrap();
                let error = match group.step(&inputs(2, &faults)) {
                    Err(error) => error.to_string(),
                    Ok(_) => panic!("{point} of {rank}: a step with a lost device"),
                };
                assert!(error.starts_with(&format!("rank {rank}: ")), "{point}: {error}");
                // Later calls return the same error, not the partial state.
                let again = group.step(&inputs(3, &faults)).unwrap_err().to_string();
                assert_eq!(again, error);
                let read = group.run_on_all("reading", |_, device| device.loss()).unwrap_err();
                assert_eq!(read.to_string(), error);
                drop(group);
                await_no_thread(&format!("{point} of {rank}"));
            }
        }
    }
}

/// A group with its second rank on an unknown node.
#[test]
#[cfg(target_os = "linux")]
fn no_thread_is_left_behind_by_a_group_that_fails_on_its_way() {
    struct Nowhere;
    impl Carrier for Nowhere {
        fn send(&self, _: FrameHeader, _: FrameValues) -> Result<(), Closed> {
            Err(Closed("nowhere".into()))
        }
    }
    let _turn = turn();
    let shards = Arc::new(layout(&plan(), Topology::Ring, 2, 1024));
    let (groups, options) = (BucketGroups::all(2, 1), WorkerGroupOptions::default());
    let layout = GroupLayout { shards, groups, options, generation: 0 };
    let nowhere = RankAddress::Remote(Arc::new(Nowhere));
    let addresses: RankAddresses = [layout.mailboxes(Rank(0)), nowhere].into();
    let inbox = Mailbox::new(6);
    let start = |rank| LocalEndpoint::start(Rank(rank), "a device", &layout, &addresses, &inbox);
    let started: Result<Vec<LocalEndpoint>, RuntimeError> = (0..2).map(start).collect();
    let Err(error) = started else { panic!("a rank of nowhere") };
    assert!(error.to_string().contains("rank 1 is on another node"), "{error}");
    await_no_thread("half of a group");
}

/// Reads the parameters of a rank.
fn held(group: &WorkerGroup, rank: Rank) -> Result<Vec<f32>, RuntimeError> {
    let read =
        |device: &mut dyn Executor| device.read_bucket(BucketTensor::Parameters, BucketId(0));
    group.read_on(rank, "reading", read)
}

#[test]
fn after_a_failure_the_other_devices_hold_the_step_before_unless_the_update_had_begun() {
    let _turn = turn();
    for point in ["forward", "backward", "reduce", "verdict", "update", "gather"] {
        let faults: Faults = format!("lost@{point}:2/1").parse().unwrap();
        let mut group = group(ReduceSite::Host);
        group.step(&inputs(1, &faults)).unwrap();
        let before = held(&group, Rank(0)).unwrap();
        let error = group.step(&inputs(2, &faults)).err().unwrap().to_string();
        let left = group.readable();
        if ["update", "gather"].contains(&point) {
            let told = left.unwrap_err().to_string();
            assert!(told.starts_with(&error) && told.contains("of two steps"), "{point}: {told}");
            assert_eq!(held(&group, Rank(0)).unwrap_err().to_string(), told);
            continue;
        }
        assert_eq!(left.unwrap(), [Rank(0), Rank(2)], "{point}");
        for rank in [Rank(0), Rank(2)] {
            assert_eq!(held(&group, rank).unwrap(), before, "{point}");
        }
        assert_eq!(held(&group, Rank(1)).unwrap_err().to_string(), error);
        group.close();
        for told in [group.readable().unwrap_err(), group.step(&[]).err().unwrap()] {
            assert!(told.to_string().contains("the devices are closed"), "{told}");
        }
    }
}

#[test]
fn a_job_that_panics_ends_the_step_for_all() {
    let _turn = turn();
    let mut group = group(ReduceSite::Host);
    let mut broken = inputs(1, &Faults::none());
    let input = StepInput { micro_batches: Vec::new(), ..(*broken[1]).clone() };
    broken[1] = Arc::new(input);
    let error = group.step(&broken).unwrap_err().to_string();
    assert!(error.contains("rank 1: ") && error.contains("panicked"), "{error}");
}

#[test]
fn a_queue_beyond_its_bound_ends_the_step_and_the_run() {
    let _turn = turn();
    let mut group = group(ReduceSite::Host);
    let rank = Rank(0);
    let round = Round::default();
    let vote = || {
        let gradients = Vec::new();
        Vote { round, rank, loss: 0.0, count: 1.0, terms: Vec::new(), loss_scale: 1.0, gradients }
    };
    while group.inbox.send(CoordinatorMsg::Vote(vote())).is_ok() {}
    let input = inputs(1, &Faults::none());
    let error = group.step(&input).unwrap_err().to_string();
    assert!(error.contains("a mailbox for 8 items is full, which is a defect"), "{error}");
    assert_eq!(group.step(&input).unwrap_err().to_string(), error);
}

#[test]
fn all_ranks_hold_the_same_and_a_difference_is_found_and_repaired() {
    let _turn = turn();
    let mut group = group(ReduceSite::Device);
    for step in 1..=3 {
        let reports = group.step(&inputs(step, &Faults::none())).unwrap();
        assert!(reports.iter().all(StepReport::is_updated));
    }
    let plan = plan();
    let compare = |repair| crate::runtime::replica_check::compare(&group, &plan, repair).unwrap();
    assert_eq!(compare(false), []);
    for rank in 0..WORLD {
        let flip = move |device: &mut dyn Executor| {
            let mut values = device.read_bucket(BucketTensor::Parameters, BucketId(0))?;
            values[777] = f32::from_bits(values[777].to_bits() ^ 1);
            device.write_bucket(BucketTensor::Parameters, BucketId(0), &values)
        };
        group.driver(Rank(rank)).unwrap().run("a flip", flip).unwrap();
        let found = compare(true);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].rank, Rank(rank));
        assert_eq!(found[0].what, "1 of 1600 values of w differ, the first at 777");
        assert_eq!(compare(false), []);
    }
}
