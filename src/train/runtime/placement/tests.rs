//! Tests of placements on CPU devices: memory that is admitted and taken, devices that fail.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use super::assemble::{OpenedPlacement, assemble, open_placement};
use super::decision::decide;
use super::names::display_names;
use super::open_one::RequestedDevices;
use super::open_plan::{admit, reserves_hold};
use super::repeat::{changes_note, repeated_by};
use super::shares::tests::model;
use super::start::ReadyRanks;
use super::types::{PlacedWorkers, PlacementRequest};
use super::{rank_memory, shares};
use crate::runtime::RuntimeError;
use crate::runtime::open::OpenOptions;
use crate::runtime::remote::NO_NODES;
use crate::runtime::step::{Inputs, StepInput};
use crate::runtime::timing::Probe;
use potluck_core::rng::Key;
use potluck_core::{HostTensor, Rank, TensorId};
use potluck_graph::MomentFormat;
use potluck_graph::optim::Optimizer;
use potluck_kernels::autotune::TuneOptions;
use potluck_kernels::device::Selection;
use potluck_kernels::exec::host_staging_bytes;
use potluck_parallel::collective::Topology;
use potluck_parallel::planner::laid_out::layout_of;
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::{
    Mesh, ParallelOptions, PlacedCluster, Placement, RankPlacement, ShareChange, Shares,
};

const BATCH: u32 = 4;
const MIB: usize = 1 << 20;

/// Options of a request that the tests change.
#[derive(Clone)]
struct Options {
    selector: &'static str,
    parallel: ParallelOptions,
    moments: MomentFormat,
    device_memory_mib: u64,
    faults: &'static str,
    /// Messages to the user.
    notified: Rc<RefCell<Vec<String>>>,
}

impl Options {
    fn new(selector: &'static str) -> Self {
        let parallel = ParallelOptions::default();
        let moments = MomentFormat::F32;
        let notified = Rc::default();
        Self { selector, parallel, moments, device_memory_mib: 0, faults: "", notified }
    }
}

fn inputs(plans: &Plans, rows: usize) -> Inputs {
    let graph = &plans.of_rows(1).graph;
    let values = |id: TensorId| vec![0.01; graph.tensor(id).shape.elements(rows)];
    graph.inputs.iter().map(|(_, id)| (*id, HostTensor::Float(values(*id)))).collect()
}

/// Calls `test` with a request for a model with 1 MiB of parameters and, with AdamW, 2 MiB of
/// moments.
fn with_request<R>(options: &Options, test: impl FnOnce(&PlacementRequest) -> R) -> R {
    let plans = Plans::new(model().with_moments(options.moments));
    let ids: Vec<TensorId> = plans.of_rows(1).graph.inputs.iter().map(|(_, id)| *id).collect();
    let probe: Probe = Arc::new(move |rows| {
        let values = |id: &TensorId| (*id, HostTensor::Float(vec![0.01; rows * 512]));
        ids.iter().map(values).collect()
    });
    let opening =
        OpenOptions { device_memory_mib: options.device_memory_mib, ..OpenOptions::default() };
    test(&PlacementRequest {
        nodes: &NO_NODES,
        selector: options.selector,
        parallel: &options.parallel,
        batch: BATCH,
        micro_batch: BATCH,
        fits_micro_batch: true,
        optimizer: &Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.0 },
        plans: &plans,
        steps: None,
        probe: Some(probe),
        seed: 1,
        opening,
        tuning: &TuneOptions::default(),
        saved: None,
        retune: false,
        notify: &|text| options.notified.borrow_mut().push(text.into()),
        trace: None,
        faults: options.faults.parse().unwrap(),
    })
}

fn place(request: &PlacementRequest) -> Result<PlacedWorkers, RuntimeError> {
    assemble(request, &mut |_, _| {})
}

/// Runs training steps on the placed devices.
fn train(request: &PlacementRequest, placed: &mut PlacedWorkers, steps: u64) {
    for step in 1..=steps {
        let round = placed.group.round().next(step);
        let input = |(rank, program): (usize, &Arc<_>)| {
            let program: Arc<potluck_parallel::Program> = Arc::clone(program);
            let parts = program.micro_batches.iter();
            let inputs = parts.map(|p| inputs(request.plans, p.rows as usize)).collect();
            Arc::new(StepInput {
                run_key: Key::new(1),
                samples: 8,
                update: request.optimizer.update(0.01, step),
                ..StepInput::new(round, Rank(rank as u32), program.clone(), inputs)
            })
        };
        let inputs: Vec<_> = placed.programs.iter().enumerate().map(input).collect();
        placed.group.step(&inputs).unwrap();
    }
}

/// Bytes of tensors, and the most bytes of readbacks, of each CPU device.
fn allocated(placed: &PlacedWorkers) -> Vec<(usize, usize)> {
    let bytes = placed.group.run_on_all("a count", |_, device| Ok(device.allocated())).unwrap();
    bytes.into_iter().flatten().map(|of| (of.tensors, of.staging_peak)).collect()
}

fn sweep(parallel: ParallelOptions) -> Vec<Option<usize>> {
    let of_limit = |limit: usize| {
        let device_memory_mib = limit as u64;
        let options =
            Options { device_memory_mib, parallel: parallel.clone(), ..Options::new("cpu*2") };
        with_request(&options, |request| match place(request) {
            Ok(mut placed) => {
                train(request, &mut placed, 2);
                for (tensors, _) in allocated(&placed) {
                    assert!(tensors <= limit * MIB, "{tensors} bytes in {limit} MiB");
                }
                Some(placed.placement.ranks.len())
            }
            Err(error) => {
                assert_eq!(error.exit_code(), 78, "{limit} MiB: {error}");
                assert!(error.to_string().contains("train.device_memory_mib"), "{error}");
                None
            }
        })
    };
    (1..=5).map(of_limit).collect()
}

#[test]
fn a_limit_of_device_memory_is_kept_by_measured_shares_or_refused() {
    // Parameters and gradients take 2 MiB, the moments of half the parameters 1 MiB, and
    // activations a few KiB.
    let measured = sweep(ParallelOptions::default());
    assert_eq!(measured[..4], [None, None, None, Some(2)]);
    assert!(measured[4].is_some());
    let shares = Shares::Fixed(vec![2, 2]);
    let fixed = sweep(ParallelOptions { shares, ..ParallelOptions::default() });
    assert_eq!(fixed, [None, None, None, Some(2), Some(2)]);
}

#[test]
fn what_the_cpu_device_allocates_is_what_is_admitted() {
    for (world, moments) in [
        ("cpu", MomentFormat::F32),
        ("cpu*3", MomentFormat::F32),
        ("cpu", MomentFormat::Bf16),
        ("cpu*3", MomentFormat::Bf16),
    ] {
        with_request(&Options { moments, ..Options::new(world) }, |request| {
            let placed = place(request).unwrap();
            let ranks = placed.placement.ranks.len();
            let layout = layout_of(request.parallel, &placed.plan, ranks);
            for (rank, (tensors, _)) in allocated(&placed).into_iter().enumerate() {
                let plan = request.plans.of_rows(placed.placement.ranks[rank].rows);
                let moments = shares::moments(request.optimizer, &layout, rank);
                let cpu = Selection::cpu(1);
                // Between two calls there are the tensors only.
                let within = crate::runtime::memory::workspace(&cpu, &plan, &moments);
                let needed = crate::runtime::memory::needed(&cpu, &plan, &moments);
                assert_eq!(tensors, needed - within);
            }
        });
    }
}

#[test]
fn what_travels_takes_no_more_host_memory_than_is_counted() {
    for (topology, world) in [(Topology::Ring, "cpu*2"), (Topology::Ring, "cpu*3")]
        .into_iter()
        .chain([(Topology::Star, "cpu*2"), (Topology::Star, "cpu*4")])
    {
        let shares = Shares::Even;
        let parallel =
            ParallelOptions { shares, topology, chunk_bytes: 1 << 14, ..Default::default() };
        with_request(&Options { parallel, ..Options::new(world) }, |request| {
            let mut placed = place(request).unwrap();
            train(request, &mut placed, 4);
            let ranks = placed.placement.ranks.len();
            let pools = rank_memory::pools(request.parallel, &placed.plan, ranks, false);
            for (rank, (_, staging)) in allocated(&placed).into_iter().enumerate() {
                let peak = placed.group.pool_bytes_peak(Rank(rank as u32));
                let what =
                    format!("rank {rank} of {topology:?} {world}: {peak} of {}", pools[rank]);
                assert!(peak > 0 && peak <= pools[rank], "{what}");
                assert!(staging > 0 && staging <= host_staging_bytes(&placed.plan), "{staging}");
            }
        });
    }
}

/// The rows of the admitted devices if the host has so much memory; `None` if it is refused.
fn admitted(selector: &'static str, mib: usize) -> Option<Vec<u32>> {
    with_request(&Options::new(selector), |request| {
        let selections = vec![Selection::cpu(2); 2];
        let names = display_names(&selections);
        let mut notes = Vec::new();
        match admit(request, &selections, &names, Some((mib * MIB) as u64), &mut notes) {
            Ok(candidates) => {
                assert_eq!(notes.len(), 2 - candidates.len(), "{notes:?}");
                let now: Vec<_> = candidates.iter().map(|one| &one.admissions[0]).collect();
                let reserves: Vec<_> = now.iter().map(|one| &one.reserve).collect();
                assert!(reserves_hold(request, &reserves), "{reserves:?} in {mib} MiB");
                Some(now.iter().map(|one| one.rows).collect())
            }
            Err(error) => {
                assert_eq!(error.exit_code(), 78, "{error}");
                None
            }
        }
    })
}

#[test]
fn host_memory_is_asked_for_once_per_device() {
    // Each device takes 4 MiB and 1 MiB of staging; both share pools of 1 MiB and 3 MiB for saving.
    assert_eq!(admitted("all", 15), Some(vec![4, 4]));
    // With activations that is too much: one of them gets fewer rows, or a smaller reserve.
    let fewer = admitted("all", 14).unwrap();
    assert!(fewer.len() == 2 && fewer.iter().all(|rows| *rows > 0), "{fewer:?}");
    assert_eq!(admitted("cpu*2", 11), None);
    assert_eq!(admitted("all", 11), Some(vec![4]));
    // One alone has no staging, no pool and no other rank that keeps a part of the moments.
    assert_eq!(admitted("all", 8), Some(vec![4]));
    assert_eq!(admitted("all", 6), None);
}

fn opened(options: &Options) -> Result<(Vec<String>, Vec<String>), RuntimeError> {
    with_request(options, |request| {
        let selections = vec![Selection::cpu(3); 3];
        let names = display_names(&selections);
        let devices = RequestedDevices { selections: &selections, names: &names };
        let report = &mut |_: &str, _| {};
        let OpenedPlacement { ready, .. } = open_placement(request, devices, None, report)?;
        let ReadyRanks { members, notes, .. } = ready;
        Ok((members.iter().map(|one| one.driver.name().to_string()).collect(), notes))
    })
}

#[test]
fn a_device_that_fails_before_the_start_is_left_out_unless_it_is_named() {
    for faults in ["lost@timing:0/1", "out-of-memory@timing:0/1"] {
        let (members, notes) = opened(&Options { faults, ..Options::new("all") }).unwrap();
        assert!(!members.iter().any(|name| name.starts_with("cpu 2 (")), "{members:?}");
        let left = notes.iter().filter(|note| note.starts_with("left out: cpu 2 (")).count();
        assert_eq!(left, 1, "{notes:?}");
        opened(&Options { faults, ..Options::new("cpu*3") }).map(|_| ()).unwrap_err();
    }
    let none = "out-of-memory@moments:0/0,out-of-memory@moments:0/1,out-of-memory@moments:0/2";
    for selector in ["all", "cpu*3"] {
        let options = Options { faults: none, ..Options::new(selector) };
        let error = opened(&options).unwrap_err();
        assert_eq!(error.exit_code(), 78, "{selector}: {error}");
        // Devices that were left out before the last one failed are not forgotten.
        let notified = options.notified.borrow();
        let left = notified.iter().filter(|text| text.starts_with("left out: cpu")).count();
        assert_eq!(left, if selector == "all" { 2 } else { 0 }, "{notified:?}");
    }
}

#[test]
fn a_device_that_fails_while_its_place_of_addition_is_timed_is_left_out() {
    let two = "lost@reduce-site:0/0,out-of-memory@reduce-site:0/2";
    opened(&Options { faults: two, ..Options::new("all") }).unwrap();
    // Only the failure of the last one ends the run.
    let three = "lost@reduce-site:0/0,lost@reduce-site:0/1,lost@reduce-site:0/2";
    let options = Options { faults: three, ..Options::new("all") };
    opened(&options).unwrap_err();
    let notified = options.notified.borrow();
    let left = notified.iter().filter(|text| text.starts_with("left out: cpu")).count();
    assert_eq!(left, 2, "{notified:?}");
    opened(&Options { faults: three, ..Options::new("cpu*3") }).unwrap_err();
}

#[test]
fn devices_without_a_sample_are_left_out_unless_they_are_named() {
    let shares = Shares::Even;
    let parallel = ParallelOptions { shares, ..ParallelOptions::default() };
    let options = |selector| Options { parallel: parallel.clone(), ..Options::new(selector) };
    let (members, notes) = opened(&options("all")).unwrap();
    assert_eq!((members.len(), notes.len()), (3, 0), "{notes:?}");
    let found = with_request(&options("all"), |request| {
        let selections = vec![Selection::cpu(6); 6];
        let names = display_names(&selections);
        let devices = RequestedDevices { selections: &selections, names: &names };
        decide(request, devices, None).unwrap().unwrap()
    });
    assert_eq!(found.arrangement.positions, [0, 1, 2, 3]);
    let [note] = &found.notes[..] else { panic!("{:?}", found.notes) };
    let ends = "are left out: a batch of 4 has no sample for them";
    assert!(note.starts_with("cpu 5 (") && note.contains(", cpu 6 (") && note.ends_with(ends));
    let error = with_request(&options("cpu*6"), |request| place(request).map(|_| ())).unwrap_err();
    assert!(error.to_string().contains("no sample for each of 6 devices"), "{error}");
}

#[test]
fn measured_shares_are_repeated_by_flags_or_said_to_end_in_other_bits() {
    let shares = Shares::Fixed(vec![2, 2]);
    let parallel = ParallelOptions { shares, ..ParallelOptions::default() };
    let placed = with_request(&Options { parallel, ..Options::new("cpu*2") }, place).unwrap();
    let flags = |change: &dyn Fn(&mut Placement)| {
        let mut placement = placed.placement.clone();
        change(&mut placement);
        with_request(&Options::new("cpu*2"), |request| {
            repeated_by(request, &[], &placement, &placed.plan)
        })
    };
    let halve = |rank: &mut RankPlacement| {
        (rank.micro_batch, rank.micro_batches) = (1, vec![1, 1]);
    };
    let as_given = "--set parallel.shares='[2, 2]'";
    assert_eq!(flags(&|_| {}).unwrap(), as_given);
    let halved = flags(&|placement| placement.ranks.iter_mut().for_each(halve)).unwrap();
    assert_eq!(halved, format!("{as_given} --set train.micro_batch_size=1"));
    let unlike = flags(&|placement| halve(&mut placement.ranks[1])).unwrap();
    assert_eq!(unlike, format!("{as_given} (but in other micro-batches, so in other bits)"));
    let alone = flags(&|placement| {
        placement.mesh = Mesh::default();
        placement.ranks.truncate(1);
    });
    let alone = alone.unwrap();
    assert_eq!(alone, "--devices cpu");
    assert_eq!(flags(&|placement| placement.candidates.truncate(1)), None, "nothing was measured");
}

#[test]
fn changes_of_shares_are_repeated_by_flags_with_their_devices() {
    let shares = Shares::Fixed(vec![2, 2]);
    let parallel = ParallelOptions { shares, ..ParallelOptions::default() };
    let placed = with_request(&Options { parallel, ..Options::new("cpu*2") }, place).unwrap();
    let mut placement = placed.placement.clone();
    let change = |step, shares: &[u32]| ShareChange { step, shares: shares.to_vec() };
    placement.share_history = vec![change(1, &[2, 2]), change(51, &[3, 1])];
    for rank in &mut placement.ranks {
        (rank.micro_batch, rank.rows) = (BATCH, BATCH);
    }
    let note = |placement: &Placement| changes_note(placement, &placed.plan, BATCH).unwrap();
    let flags = "--set parallel.shares='[2, 2]' --set parallel.share_changes='[\"51: 3 1\"]'";
    let of_all = note(&placement);
    assert!(of_all.ends_with(&format!(", add {flags}")), "{of_all}");
    // The second of three devices is left out.
    placement.devices_asked = "cpu*3".into();
    let identity = placement.candidates[0].clone();
    placement.candidates.push(identity);
    placement.ranks[1].position = 2;
    let of_two = note(&placement);
    assert!(of_two.ends_with(&format!(", add --devices 'cpu*2' {flags}")), "{of_two}");
    placement.cluster = Some(PlacedCluster { run: String::new(), nodes: Vec::new() });
    let over_nodes = note(&placement);
    let expected = "no flags repeat the run, because no selector names its devices alone";
    assert!(over_nodes.ends_with(expected), "{over_nodes}");
}
