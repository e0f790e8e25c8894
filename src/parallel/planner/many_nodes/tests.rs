//! Tests of plans for many nodes.

use super::*;
use crate::planner::cut::BlockTimes;
use crate::planner::profile::{BlockSpeed, DeviceProfile};
use crate::sim::LinkModel;
use crate::sim::queue::Random;
use potluck_graph::model::{MlpConfig, MlpLoss, mlp};
use potluck_graph::{Builder, Init, ModelGraph, Unary};

fn plans() -> Plans {
    let config = MlpConfig {
        widths: vec![64, 1024, 1024, 512, 10],
        activation: Unary::Gelu,
        dropout: 0.0,
        loss: MlpLoss::CrossEntropy,
    };
    Plans::new(ModelGraph::training(mlp(&config).unwrap(), true).unwrap())
}

const LAN: LinkModel = LinkModel { latency_s: 1e-4, bytes_per_s: 1e8 };

/// Nodes with devices of these seconds per sample.
fn profile(nodes: &[&[f64]], blocks: usize) -> PlanProfile {
    let mut devices = Vec::new();
    for (node, speeds) in nodes.iter().enumerate() {
        for row_s in *speeds {
            let part_s = row_s / blocks as f64 / 3.0;
            let times = BlockTimes {
                forward_s: part_s,
                backward_input_s: part_s,
                backward_weight_s: part_s,
            };
            devices.push(DeviceProfile {
                name: format!("card of {row_s}"),
                kind: (row_s * 1e9) as usize,
                node: node as u32,
                is_on_host: false,
                blocks: vec![BlockSpeed::in_proportion(1, times); blocks],
                load_row_s: 0.0,
                update_element_s: 1e-10,
                read_back: LinkModel { latency_s: 1e-5, bytes_per_s: 1e10 },
                upload: LinkModel { latency_s: 1e-5, bytes_per_s: 1e10 },
                host: LinkModel { latency_s: 0.0, bytes_per_s: 8e9 },
                shares: None,
                memory: None,
                micro_batch: None,
                refusals: Vec::new(),
            });
        }
    }
    PlanProfile {
        devices,
        links: vec![vec![LAN; nodes.len()]; nodes.len()],
        network_s_per_byte: Vec::new(),
        receives_inputs: Vec::new(),
        thread_message_s: 0.0,
        half_parts: Vec::new(),
    }
}

fn request<'a>(
    profile: &'a PlanProfile,
    plans: &'a Plans,
    options: &'a ParallelOptions,
    batch: u32,
) -> ManyNodesRequest<'a> {
    ManyNodesRequest {
        profile,
        mixed: None,
        plans,
        options,
        batch,
        micro_batch: 8,
        fits_micro_batch: true,
        moments: 2,
    }
}

fn proposed(profile: &PlanProfile, batch: u32) -> NodesProposal {
    let (plans, options) = (plans(), ParallelOptions::default());
    propose(&request(profile, &plans, &options, batch)).unwrap()
}

fn blocks() -> usize {
    plans().model().whole().blocks.len()
}

#[test]
fn equal_nodes_share_equally_and_all_take_part() {
    let speeds: &[f64] = &[0.02];
    let proposal = proposed(&profile(&[speeds; 6], blocks()), 96);
    let NodesCandidate { units, step_s, computing_s, is_timed, .. } = &proposal.chosen;
    assert_eq!((proposal.chosen.layout().as_str(), units.len()), ("data 6", 6));
    assert!(units.iter().all(|unit| unit.samples == 16 && unit.micro_batch == 8));
    assert!((computing_s - 0.32).abs() < 1e-9 && *is_timed, "{computing_s}");
    assert!((0.33..0.6).contains(step_s), "{step_s}");
    assert_eq!((proposal.left_out, proposal.refused), (vec![], vec![]));
}

#[test]
fn node_behind_a_slow_link_is_left_out_with_the_reason() {
    let mut profile = profile(&[&[0.02], &[0.02], &[0.01], &[0.02]], blocks());
    for other in 0..4 {
        let slow = LinkModel { latency_s: 0.02, bytes_per_s: 1e6 };
        profile.links[2][other] = slow;
        profile.links[other][2] = slow;
    }
    let proposal = proposed(&profile, 96);
    let nodes: Vec<u32> = proposal.chosen.units.iter().map(|unit| unit.node).collect();
    assert_eq!(nodes, [0, 1, 3]);
    let [left] = &proposal.left_out[..] else { panic!("{:?}", proposal.left_out) };
    assert_eq!(left.devices, [2]);
    let begin = "the links of their nodes are too slow: with the best of them a step would take ";
    assert!(left.reason.starts_with(begin), "{}", left.reason);
    // The whole cluster is named, and is slower.
    assert!(proposal.others.iter().any(|other| other.units.len() == 4));
    assert!(proposal.others.iter().all(|other| other.step_s >= proposal.chosen.step_s));
}

#[test]
fn hopelessly_slow_device_has_no_sample() {
    let proposal = proposed(&profile(&[&[0.02], &[9.0], &[0.02]], blocks()), 64);
    let samples: Vec<u32> = proposal.chosen.units.iter().map(|unit| unit.samples).collect();
    assert_eq!(samples, [32, 32]);
    let [left] = &proposal.left_out[..] else { panic!("{:?}", proposal.left_out) };
    assert_eq!(left.reason, "they are too slow for a single sample of the batch");
}

#[test]
fn neighbours_within_a_node_are_neighbours_in_the_ring() {
    let speeds: &[f64] = &[0.03, 0.02];
    let proposal = proposed(&profile(&[speeds; 3], blocks()), 240);
    let nodes: Vec<u32> = proposal.chosen.units.iter().map(|unit| unit.node).collect();
    assert_eq!(nodes, [0, 0, 1, 1, 2, 2], "{}", proposal.chosen.layout());
    let samples: u32 = proposal.chosen.units.iter().map(|unit| unit.samples).sum();
    assert_eq!(samples, 240);
    assert!(proposal.tried > 10);
}

/// Adam's moments and the gradients: 12 bytes for each parameter, and 4 for itself.
#[test]
fn model_too_large_for_a_device_is_divided() {
    let plans = plans();
    let bytes = plans.model().parameter_bytes() as u64;
    let mut small = profile(&[&[0.02; 4], &[0.02; 4]], blocks());
    for device in &mut small.devices {
        device.memory = Some(2 * bytes);
    }
    let options = ParallelOptions::default();
    let found = propose(&request(&small, &plans, &options, 64)).unwrap();
    let within = found.chosen.within;
    assert!(matches!(within, WithinNode::Tensor(_) | WithinNode::Pipeline(_)), "{within}");
    assert!(found.chosen.units.iter().all(|unit| unit.memory.fits()), "{found:?}");
    for device in &mut small.devices {
        device.memory = Some(bytes / 100);
    }
    let error = propose(&request(&small, &plans, &options, 64)).unwrap_err().to_string();
    assert!(error.starts_with("no device has the memory for one sample"), "{error}");
}

#[test]
fn given_and_excluded_layouts_are_kept() {
    let plans = plans();
    let mut options = ParallelOptions::default();
    let machines = profile(&[&[0.02; 4], &[0.02; 4]], blocks());
    let within = |options: &ParallelOptions| {
        let found = propose(&request(&machines, &plans, options, 64)).map_err(|e| e.to_string())?;
        let mut all = vec![found.chosen.within];
        all.extend(found.others.iter().map(|other| other.within));
        Ok::<_, String>(all)
    };
    options.tensor.ranks = 2;
    assert!(within(&options).unwrap().iter().all(|one| *one == WithinNode::Tensor(2)));
    // Three of four devices, which are not compared unless they are asked for.
    (options.tensor.ranks, options.pipeline.stages) = (1, 3);
    assert!(within(&options).unwrap().iter().all(|one| *one == WithinNode::Pipeline(3)));
    options.pipeline.stages = 5;
    let error = within(&options).unwrap_err();
    assert!(error.starts_with("no node of the file has 5 devices for the given"), "{error}");
    options.pipeline.stages = 1;
    (options.excluded.pipelines, options.excluded.tensor_groups) = (true, true);
    let is_whole = |one: &WithinNode| matches!(one, WithinNode::Apart | WithinNode::Fastest);
    assert!(within(&options).unwrap().iter().all(is_whole));
}

/// With a share of two samples, a pipeline has micro-batches of two.
#[test]
fn pipelines_may_have_fewer_samples_than_a_given_micro_batch() {
    let (plans, mut options) = (plans(), ParallelOptions::default());
    options.pipeline.stages = 2;
    let pair: &[f64] = &[0.02; 2];
    let machines = profile(&[pair; 16], blocks());
    let of_32 = request(&machines, &plans, &options, 32);
    let given = ManyNodesRequest { micro_batch: 4, fits_micro_batch: false, ..of_32 };
    let found = propose(&given).unwrap();
    assert!(found.chosen.units.iter().all(|unit| unit.micro_batch <= unit.samples), "{found:?}");
    assert!(found.refused.is_empty(), "{:?}", found.refused);
}

#[test]
fn units_have_the_samples_that_batch_normalization_needs() {
    let mut b = Builder::new();
    let (x, targets) = (b.input("x", &[1, 8]), b.input("targets", &[1, 8]));
    let w = b.parameter("w", &[8, 8], Init::Normal { std: 0.1 });
    let y = b.linear(x, w, None).unwrap();
    let y = b.batch_norm("bn", y).unwrap();
    b.squared_error_loss(y, targets).unwrap();
    let plans = Plans::new(ModelGraph::training(b.finish(), true).unwrap());
    let options = ParallelOptions::default();
    let speeds: &[f64] = &[0.5];
    let nodes = profile(&[speeds; 32], plans.model().whole().blocks.len());
    let found = propose(&request(&nodes, &plans, &options, 64)).unwrap();
    let samples: Vec<u32> = found.chosen.units.iter().map(|unit| unit.samples).collect();
    assert_eq!(samples, [8; 8]);
    let [left] = &found.left_out[..] else { panic!("{:?}", found.left_out) };
    let why = "the batch has too few samples for them: batch normalization needs 8 for each";
    assert_eq!((left.devices.len(), left.reason.as_str()), (24, why));
    // A batch below that is that of one device.
    let few = propose(&request(&nodes, &plans, &options, 4)).unwrap();
    assert_eq!(few.chosen.units.len(), 1);
}

/// A ring of unequal units, by the estimate and by the recurrence.
#[test]
fn estimate_is_near_the_recurrence() {
    let (plans, options) = (plans(), ParallelOptions::default());
    let random = &mut Random::new(5);
    for nodes in [2, 5, 24] {
        let speeds: Vec<Vec<f64>> =
            (0..nodes).map(|_| vec![1e-3 * f64::from(5 + random.word() % 20)]).collect();
        let speeds: Vec<&[f64]> = speeds.iter().map(Vec::as_slice).collect();
        let mut profile = profile(&speeds, blocks());
        for link in profile.links.iter_mut().flatten() {
            link.bytes_per_s = 1e7 * f64::from(5 + random.word() % 20);
        }
        let request = request(&profile, &plans, &options, 40 * nodes as u32);
        let sizes = ModelSizes::of(&request);
        let units = Units::new(&request, &sizes, WithinNode::Apart).unwrap();
        let node_order = (0..nodes as usize).collect();
        let mut search =
            NodesSearch { request: &request, sizes: &sizes, node_order, tried: 0, scale: 1.0 };
        let set: Vec<usize> = (0..units.all.len()).collect();
        let trial = search.estimate(&units, &set).unwrap();
        let timed = search.times(&units, &trial).ended as f64 / 1e9;
        let ratio = trial.step_s / timed;
        assert!((0.85..1.1).contains(&ratio), "{nodes}: {} {timed}", trial.step_s);
    }
}

/// Nodes of four kinds of which no two are equal, in their speeds and their links.
fn unequal(nodes: usize, blocks: usize) -> PlanProfile {
    let random = &mut Random::new(11);
    let mut speeds = Vec::new();
    for _ in 0..nodes {
        let kind = 1 << (random.word() % 4);
        let row_s = 1e-3 * (f64::from(kind) + f64::from(random.word() % 1000) / 1e3);
        speeds.push(vec![row_s]);
    }
    let speeds: Vec<&[f64]> = speeds.iter().map(Vec::as_slice).collect();
    let mut profile = profile(&speeds, blocks);
    let own: Vec<f64> = (0..nodes).map(|_| 1e6 * f64::from(1 + random.word() % 120)).collect();
    for (from, links) in profile.links.iter_mut().enumerate() {
        for (to, link) in links.iter_mut().enumerate() {
            link.bytes_per_s = own[from].min(own[to]);
        }
    }
    profile
}

#[test]
fn two_hundred_unequal_nodes_are_planned() {
    let proposal = proposed(&unequal(200, blocks()), 2000);
    let NodesCandidate { units, step_s, computing_s, .. } = &proposal.chosen;
    assert_eq!(units.iter().map(|unit| unit.samples).sum::<u32>(), 2000);
    assert!(units.len() > 1 && units.len() <= 200);
    assert!(computing_s <= step_s);
    // Slow links bound a step with all of them.
    let whole = proposal.others.iter().find(|other| other.units.len() > units.len());
    assert!(whole.is_none_or(|whole| whole.step_s > *step_s), "{whole:?}");
    let left: usize = proposal.left_out.iter().map(|group| group.devices.len()).sum();
    assert_eq!(left + units.len(), 200);
}

#[test]
fn limits_are_refined_between_those_that_were_tried() {
    assert_eq!(limits(&[2.0, 1.0, 2.001, 4.0]), [1.01, 2.02, 4.04]);
    assert_eq!(spread(3..6), [3, 4, 5]);
    let some = spread(0..100);
    assert_eq!((some.len(), some[0], some[LIMITS_MAX - 1]), (LIMITS_MAX, 7, 99));
    assert_eq!(between(&some, 7, 100), 0..15);
    assert_eq!(between(&some, 99, 100), some[LIMITS_MAX - 2] + 1..100);
}
