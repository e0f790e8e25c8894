//! Tests of measured pipelines on CPU devices: what is measured, kept, refused and advised.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use super::measure::measure_blocks;
use super::stage_memory::StageMemory;
use crate::runtime::open::OpenOptions;
use crate::runtime::placement::assemble::assemble;
use crate::runtime::placement::laid_out::{lay_out, moments_of_rank};
use crate::runtime::placement::names::display_names;
use crate::runtime::placement::open_one::RequestedDevices;
use crate::runtime::placement::planned::{PlanPurpose, plan_run};
use crate::runtime::placement::requested_pipelines::RequestedPipelines;
use crate::runtime::placement::types::{PlacedWorkers, PlacementRequest};
use crate::runtime::remote::NO_NODES;
use crate::runtime::timing::Probe;
use crate::runtime::{RuntimeError, memory};
use potluck_core::faults::Faults;
use potluck_core::setting::as_fields;
use potluck_core::{DType, HostTensor, Rank, TensorId};
use potluck_graph::model::gpt::{GptConfig, gpt};
use potluck_graph::optim::Optimizer;
use potluck_graph::{ModelGraph, Unary};
use potluck_kernels::autotune::TuneOptions;
use potluck_kernels::device::Selection;
use potluck_parallel::planner::cut::{CutStage, even, of_counts};
use potluck_parallel::planner::plans::Plans;
use potluck_parallel::{ParallelOptions, PipelineOptions, PipelineSchedule, Placement, Shares};

const BATCH: u32 = 12;

/// Sizes of micro-batches in which blocks are measured.
const SIZES: usize = 2;

/// Options of a request that the tests change.
#[derive(Clone)]
struct Asked {
    selector: &'static str,
    parallel: ParallelOptions,
    device_memory_mib: u64,
    faults: &'static str,
    saved: Option<Placement>,
    retune: bool,
    width: usize,
    tie: bool,
    averages: bool,
    notified: Rc<RefCell<Vec<String>>>,
}

impl Asked {
    fn of(selector: &'static str, stages: u32) -> Self {
        let pipeline = PipelineOptions { stages, ..PipelineOptions::default() };
        Self {
            selector,
            parallel: ParallelOptions { pipeline, ..ParallelOptions::default() },
            device_memory_mib: 0,
            faults: "",
            saved: None,
            retune: false,
            width: 16,
            tie: false,
            averages: false,
            notified: Rc::default(),
        }
    }

    fn with_cut(mut self, blocks: &[u32]) -> Self {
        self.parallel.pipeline.blocks_per_stage = blocks.to_vec();
        self
    }

    fn with_schedule(mut self, schedule: PipelineSchedule) -> Self {
        self.parallel.pipeline.schedule = schedule;
        self.parallel.pipeline.virtual_stages =
            if schedule == PipelineSchedule::Interleaved { 2 } else { 1 };
        self
    }

    /// A GPT of four layers: six blocks.
    fn model(&self) -> ModelGraph {
        let config = GptConfig {
            vocabulary: 65,
            context: 8,
            positions: 8,
            layers: 4,
            heads: 2,
            width: self.width,
            bias: true,
            dropout: 0.1,
            tie: self.tie,
            activation: Unary::Gelu,
        };
        ModelGraph::training(gpt(&config).unwrap(), true).unwrap().with_averages(self.averages)
    }

    fn request<R>(&self, test: impl FnOnce(&PlacementRequest) -> R) -> R {
        let plans = Plans::new(self.model());
        let inputs = plans.of_rows(1).graph.clone();
        let probe: Probe = Arc::new(move |rows| {
            let of = |tensor: TensorId| {
                let known = inputs.tensor(tensor);
                let count = known.shape.elements(rows);
                match known.dtype {
                    DType::U32 => HostTensor::Int((0..count as u32).map(|i| i % 65).collect()),
                    DType::F32 => HostTensor::Float(vec![0.1; count]),
                }
            };
            inputs.inputs.iter().map(|(_, tensor)| (*tensor, of(*tensor))).collect()
        });
        let device_memory_mib = self.device_memory_mib;
        test(&PlacementRequest {
            nodes: &NO_NODES,
            selector: self.selector,
            parallel: &self.parallel,
            batch: BATCH,
            micro_batch: 3,
            fits_micro_batch: true,
            optimizer: &Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.0 },
            plans: &plans,
            steps: None,
            probe: Some(probe),
            seed: 1,
            opening: OpenOptions { device_memory_mib, ..OpenOptions::default() },
            tuning: &TuneOptions::default(),
            saved: self.saved.as_ref(),
            retune: self.retune,
            notify: &|text| self.notified.borrow_mut().push(text.into()),
            trace: None,
            faults: self.faults.parse::<Faults>().unwrap(),
        })
    }

    fn placed(&self) -> Result<PlacedWorkers, RuntimeError> {
        self.request(|request| assemble(request, &mut |_, _| {}))
    }

    fn measures(&self) -> usize {
        let notified = self.notified.borrow();
        notified.iter().filter(|text| text.contains(" different blocks of ")).count()
    }
}

fn cut_of(placement: &Placement) -> Vec<Vec<u32>> {
    let lengths = |rank: &potluck_parallel::RankPlacement| {
        rank.blocks.iter().map(|run| run.len() as u32).collect()
    };
    placement.ranks.iter().map(lengths).collect()
}

#[test]
fn copies_and_equal_blocks_are_measured_once() {
    let asked = Asked::of("cpu*2", 2);
    asked.request(|request| {
        let selections = vec![Selection::cpu(2); 2];
        let names = display_names(&selections);
        let devices = RequestedDevices { selections: &selections, names: &names };
        let measured = measure_blocks(request, devices, 3, &mut |_, _| {}).unwrap();
        assert_eq!(measured.kinds, [0, 0]);
        assert_eq!(measured.times[0], measured.times[1]);
        assert_eq!(measured.cut_s[0], measured.cut_s[1]);
        let times = &measured.times[0];
        assert!(times[1..5].iter().all(|layer| *layer == times[1]), "{times:?}");
        for of in times {
            assert!(of.sum_s().is_finite() && of.forward_s > 0.0, "{times:?}");
        }
        // A layer computes gradients of both kinds; only the first block has no other before it.
        assert!(times[1].backward_input_s > 0.0 && times[1].backward_weight_s > 0.0);
        let cut_s = &measured.cut_s[0];
        assert!(cut_s[0] == 0.0 && cut_s[1..].iter().all(|s| *s > 0.0), "{cut_s:?}");
    });
    let told = &*asked.notified.borrow();
    assert_eq!(told, &["measuring 3 different blocks of 6 on 1 device"]);
}

#[test]
fn what_is_measured_is_recorded_kept_and_repeated_by_flags() {
    let asked = Asked { retune: true, ..Asked::of("cpu*2", 2) };
    let placed = asked.placed().unwrap();
    assert_eq!(asked.measures(), SIZES);
    let note = |start: &str| placed.notes.iter().find(|note| note.starts_with(start)).unwrap();
    assert!(note("planned pipeline 2 (1f1b): ").contains(" ms per step are predicted"));
    let cut = cut_of(&placed.placement).concat();
    // By noise, smaller micro-batches may be the fastest.
    let micro_batch = match placed.placement.ranks[0].micro_batch {
        3 => String::new(),
        planned => format!(" --set train.micro_batch_size={planned}"),
    };
    let flags =
        format!("; to repeat this, add --set parallel.blocks_per_stage='{cut:?}'{micro_batch}");
    assert!(note("stages: ").ends_with(&flags), "{:?}", placed.notes);
    // A cut and an order that measurements of equal devices hardly find show that it is kept.
    let mut saved = placed.placement.clone();
    saved.ranks[0].blocks[0] = 0..1;
    saved.ranks[1].blocks[0] = 1..6;
    saved.ranks[0].position = 1;
    saved.ranks[1].position = 0;
    let again = Asked { saved: Some(saved), ..Asked::of("cpu*2", 2) };
    let kept = again.placed().unwrap();
    assert_eq!((again.measures(), cut_of(&kept.placement)), (0, vec![vec![1], vec![5]]));
    let positions = |placement: &Placement| {
        placement.ranks.iter().map(|rank| rank.position).collect::<Vec<_>>()
    };
    assert_eq!(positions(&kept.placement), [1, 0]);
    assert!(!kept.notes.iter().any(|note| note.contains("to repeat")), "{:?}", kept.notes);
    let retuned = Asked { retune: true, ..again.clone() };
    // Times that other work disturbs may give any cut; equal devices keep their order.
    let measured = retuned.placed().unwrap();
    assert_eq!((retuned.measures(), positions(&measured.placement)), (SIZES, vec![0, 1]));
    assert!(measured.notes.iter().any(|note| note.contains("to repeat")), "{:?}", measured.notes);
    // What is given now is not what was recorded.
    let given = Asked::of("cpu*2", 2).with_cut(&[2, 4]);
    let given = Asked { saved: again.saved.clone(), ..given };
    assert_eq!(cut_of(&given.placed().unwrap().placement), [[2], [4]]);
    assert_eq!(given.measures(), 0);
    // The measurement of the devices is kept, too.
    let mut fixed = Asked { notified: Rc::default(), ..again };
    fixed.parallel.shares = Shares::Even;
    let fixed_placement = fixed.placed().unwrap().placement;
    assert_eq!((fixed.measures(), fixed_placement.ranks[0].position), (0, 0));
    let told = fixed.notified.borrow().concat();
    assert!(told.contains("planned with an earlier measurement of these devices"), "{told}");
}

#[test]
fn pipelines_share_the_samples_by_measurement_or_as_given() {
    let shares = |asked: &Asked| {
        let placement = asked.placed().unwrap().placement;
        let shares = placement.ranks.iter().step_by(2).map(|rank| rank.share);
        (shares.collect::<Vec<_>>(), cut_of(&placement))
    };
    // Copies of one device share their times, so their pipelines are equal.
    let measured = Asked { retune: true, ..Asked::of("cpu*4", 2) };
    let (counts, cuts) = shares(&measured);
    assert_eq!((counts, measured.measures()), (vec![6, 6], SIZES));
    assert_eq!((&cuts[0], &cuts[1]), (&cuts[2], &cuts[3]));
    let given_cut = Asked { retune: true, ..Asked::of("cpu*4", 2).with_cut(&[1, 5]) };
    assert_eq!(shares(&given_cut), (vec![6, 6], vec![vec![1], vec![5], vec![1], vec![5]]));
    assert_eq!(given_cut.measures(), SIZES);
    let mut given = Asked { retune: true, ..Asked::of("cpu*4", 2) };
    given.parallel.shares = Shares::Fixed(vec![9, 3]);
    assert_eq!((shares(&given).0, given.measures()), (vec![9, 3], SIZES));
    let given = Asked { notified: Rc::default(), ..given.with_cut(&[3, 3]) };
    assert_eq!((shares(&given).0, given.measures()), (vec![9, 3], 0));
}

#[test]
fn a_device_that_fails_while_its_blocks_are_timed_ends_the_run() {
    let asked = Asked { faults: "lost@timing:0/1", retune: true, ..Asked::of("cpu*2", 2) };
    let error = asked.placed().map(|_| ()).unwrap_err();
    assert_eq!(error.exit_code(), 75, "{error}");
    assert!(error.to_string().starts_with("rank 1: "), "{error}");
}

/// Memory that a driver refuses to a block rules the block out, on this device.
#[test]
fn a_block_that_no_device_can_run_is_named_with_the_reason() {
    // In both sizes of micro-batches.
    let faults = "out-of-memory@timing:0/0,out-of-memory@timing:0/1";
    let asked = Asked { faults, retune: true, width: 24, ..Asked::of("cpu*2", 2) };
    asked.request(|request| {
        let selections = vec![Selection::cpu(2); 2];
        let names = display_names(&selections);
        let devices = RequestedDevices { selections: &selections, names: &names };
        let measured = measure_blocks(request, devices, 3, &mut |_, _| {}).unwrap();
        let is_refused = |block: usize| measured.refusals[1][block].is_some();
        assert!(is_refused(0) && !measured.times[1][0].sum_s().is_finite());
        assert!((1..6).all(|block| !is_refused(block) && measured.times[1][block].sum_s() > 0.0));
        assert!(measured.may_fit_later);
    });
    let error = asked.placed().map(|_| ()).unwrap_err();
    assert_eq!(error.exit_code(), 78);
    let text = error.to_string();
    let (start, reason) = ("no device can run block embed, not even alone (cpu", "no memory for ");
    assert!(text.starts_with(start) && text.contains(reason), "{text}");
    assert!(text.contains("an injected allocation, of ") && text.contains("MiB that it"), "{text}");
    let advice = "); lower train.micro_batch_size or the model's size (model.context, ";
    assert!(text.contains(advice) && text.ends_with("or choose other devices"), "{text}");
    // Memory that another program may have had is asked for again.
    let later = Asked { faults: "", retune: false, notified: Rc::default(), ..asked };
    later.placed().unwrap();
    assert_eq!(later.measures(), SIZES);
}

#[test]
fn all_devices_take_part_in_a_plan_for_all() {
    let asked = Asked { retune: true, ..Asked::of("all", 1) };
    asked.request(|request| {
        let selections = vec![Selection::cpu(2); 2];
        let names = display_names(&selections);
        let devices = RequestedDevices { selections: &selections, names: &names };
        let planned = plan_run(request, devices, PlanPurpose::Explanation, &mut |_, _| {}).unwrap();
        assert_eq!(planned.proposal.chosen.arrangement.positions.len(), 2);
        assert!(planned.proposal.left_out.is_empty());
    });
}

#[test]
fn the_memory_of_stages_is_that_of_their_plans_and_within_the_bounds() {
    for schedule in PipelineSchedule::ALL {
        for (tie, pipelines) in [(false, 1), (true, 1), (false, 2), (true, 2)] {
            let (width, averages) = (64, !tie);
            let asked =
                Asked { tie, width, averages, ..Asked::of("cpu*4", 2).with_schedule(schedule) };
            asked.request(|request| {
                let requested = RequestedPipelines::of(request);
                let parts = requested.stages * requested.chunks;
                let chunks = match parts {
                    2 => of_counts(&[2, 4], 6, 2).unwrap(),
                    _ => even(6, parts),
                };
                let counts = vec![BATCH / pipelines; pipelines as usize];
                let positions = (0..2 * pipelines as usize).collect();
                let planned = requested.in_order(positions, &chunks, &counts, 3);
                let laid_out = lay_out(request, &planned).unwrap();
                let micro_batches = (BATCH / pipelines / 3) as usize;
                let cpu = Selection::cpu(1);
                let devices = vec![cpu.clone(); 2 * pipelines as usize];
                let kinds = vec![0; devices.len()];
                let of_stages = StageMemory::of(request, &devices, &kinds, micro_batches, 3);
                for (rank, plan) in laid_out.written.plans.iter().enumerate() {
                    let at = planned.mesh.coordinates(Rank(rank as u32));
                    let stage = at.pipeline;
                    let blocks = planned.pipelines[at.data].chunks_of(stage);
                    let moments = moments_of_rank(&laid_out, request, rank);
                    let needed = memory::needed(&cpu, plan, &moments);
                    let stage = CutStage { device: 0, stage, blocks: &blocks };
                    let found = of_stages.needed(stage);
                    let (least, most) = of_stages.bounds(stage);
                    let what = format!("{schedule}, tied {tie}, rank {rank} of {pipelines} x 2");
                    // The first rank of a bucket's group has the longest shard.
                    let exceeds = found - needed as u64;
                    assert!(exceeds <= if pipelines == 1 { 0 } else { 4096 }, "{what}: {exceeds}");
                    assert!(least < found && found <= most, "{what}");
                }
            });
        }
    }
}

#[test]
fn a_model_that_no_device_holds_is_planned_in_parts_or_refused_with_the_figures() {
    let placed = |device_memory_mib, stages| {
        Asked { device_memory_mib, width: 128, ..Asked::of("cpu*2", stages) }.placed()
    };
    let mut planned = 0;
    let mut refused = 0;
    for mib in 2..=10 {
        let error = match placed(mib, 1) {
            Ok(found) => {
                planned += u32::from(found.placement.mesh.is_divided());
                continue;
            }
            Err(error) => error,
        };
        refused += 1;
        assert_eq!(error.exit_code(), 78, "{error}");
        let text = error.to_string();
        assert!(text.contains("as train.device_memory_mib sets it"), "{text}");
        let advice = |text: &str| text.contains("into more stages (parallel.pipeline_stages)");
        assert!(advice(&text), "{text}");
        let fields = as_fields(|| error.to_string());
        assert!(fields.contains("as TrainerOptions::device_memory_mib sets it; "), "{fields}");
        assert!(fields.contains("into more stages (PipelineOptions::stages), "), "{fields}");
        // A plan overlooks no pipeline that fits.
        let error = placed(mib, 2).err().expect("a pipeline fits and was not planned");
        assert_eq!(error.exit_code(), 78, "{error}");
        assert!(advice(&error.to_string()), "{error}");
    }
    assert!(planned > 0 && refused > 0, "{planned} planned, {refused} refused");
}
