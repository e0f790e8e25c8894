//! Tests of the search, with profiles whose best layouts are known.

use super::*;
use crate::pipeline::used_inputs;
use crate::planner::cut::BlockTimes;
use crate::planner::profile::{BlockSpeed, DeviceProfile};
use crate::sim::LinkModel;
use crate::{ExcludedDivisions, PipelineOptions, ReduceSite};
use potluck_graph::model::{GptConfig, MlpConfig, MlpLoss, gpt, mlp};
use potluck_graph::print::MemoryUsage;
use potluck_graph::{ModelGraph, Unary};

const BATCH: u32 = 16;
const MICRO_BATCH: u32 = 4;

struct Model {
    whole: Plans,
    staged: Plans,
}

/// A GPT of four equal layers, with a block before and one behind them.
fn model() -> Model {
    let config = GptConfig {
        vocabulary: 65,
        context: 8,
        positions: 8,
        layers: 4,
        heads: 2,
        width: 32,
        bias: true,
        dropout: 0.0,
        tie: false,
        activation: Unary::Gelu,
    };
    let graph = ModelGraph::training(gpt(&config).unwrap(), true).unwrap();
    Model { whole: Plans::new(graph.clone().with_merged_backward()), staged: Plans::new(graph) }
}

/// Every device has `bytes` of memory, of which parts of the model take what their plans say.
struct Memory {
    bytes: u64,
}

impl MemoryModel for Memory {
    fn needs(&self, arrangement: &Arrangement, laid_out: &LaidOut) -> Vec<MemoryNeed> {
        let mut needs = Vec::new();
        for rank in arrangement.mesh.ranks() {
            let owned = laid_out.owned(rank).iter().map(ExactSizeIterator::len).sum();
            let plan = &laid_out.written.plans[rank.index()];
            let needed = MemoryUsage::of_shard(plan, 2, owned).peak() as u64;
            needs.push(MemoryNeed { needed, has: Some(self.bytes) });
        }
        needs
    }

    fn with_stage_memory(&self, _: StageQuestion<'_>, cut: &mut dyn FnMut(&StageFits<'_>)) {
        cut(&|_| true);
    }
}

/// Device that takes this many seconds per sample for each of six blocks.
fn device(kind: usize, node: u32, seconds: f64) -> DeviceProfile {
    let times = BlockTimes {
        forward_s: seconds / 4.0,
        backward_input_s: seconds / 2.0,
        backward_weight_s: seconds / 4.0,
    };
    DeviceProfile {
        name: format!("card {kind}"),
        kind,
        node,
        is_on_host: false,
        blocks: vec![BlockSpeed::in_proportion(1, times); 6],
        load_row_s: 0.0,
        update_element_s: 0.0,
        read_back: LinkModel::INSTANT,
        upload: LinkModel::INSTANT,
        host: LinkModel::INSTANT,
        shares: None,
        memory: None,
        micro_batch: None,
        refusals: Vec::new(),
    }
}

fn profile(devices: Vec<DeviceProfile>, link: LinkModel) -> PlanProfile {
    let nodes = devices.iter().map(|device| device.node as usize + 1).max().unwrap();
    PlanProfile {
        devices,
        links: vec![vec![link; nodes]; nodes],
        network_s_per_byte: Vec::new(),
        receives_inputs: Vec::new(),
        thread_message_s: 0.0,
        half_parts: Vec::new(),
    }
}

fn searched(
    profile: &PlanProfile,
    options: &ParallelOptions,
    bytes: u64,
    uses_all: bool,
) -> Result<Proposal, NoPlan> {
    searched_of(&model(), profile, options, bytes, uses_all)
}

fn searched_of(
    model: &Model,
    profile: &PlanProfile,
    options: &ParallelOptions,
    bytes: u64,
    uses_all: bool,
) -> Result<Proposal, NoPlan> {
    search(&SearchRequest {
        profile,
        whole: &model.whole,
        staged: &model.staged,
        options,
        uses_all,
        batch: BATCH,
        micro_batch: MICRO_BATCH,
        fits_micro_batch: true,
        prices_runners_up: true,
        may_divide: true,
        memory: &Memory { bytes },
    })
}

fn mesh_of(proposal: &Proposal) -> (usize, usize, usize) {
    let Mesh { data, pipeline, tensor } = proposal.chosen.arrangement.mesh;
    (data, pipeline, tensor)
}

#[test]
fn single_device_takes_the_time_of_its_samples() {
    let profile = profile(vec![device(0, 0, 0.001)], LinkModel::INSTANT);
    let proposal = searched(&profile, &ParallelOptions::default(), u64::MAX, false).unwrap();
    assert_eq!(mesh_of(&proposal), (1, 1, 1));
    let step_s = proposal.chosen.prediction.step_s;
    assert!((step_s - 16.0 * 0.006).abs() < 1e-6, "{step_s}");
    assert_eq!((proposal.tried, proposal.others.len()), (1, 0));
    assert!(proposal.advice.is_empty() && proposal.left_out.is_empty(), "{proposal:?}");
}

#[test]
fn free_messages_make_data_parallelism_over_all_devices_the_fastest() {
    let devices = vec![device(0, 0, 0.001), device(1, 0, 0.003)];
    let profile = profile(devices, LinkModel::INSTANT);
    let proposal = searched(&profile, &ParallelOptions::default(), u64::MAX, false).unwrap();
    assert_eq!(mesh_of(&proposal), (2, 1, 1));
    let counts: Vec<u32> =
        proposal.chosen.arrangement.shares.iter().map(|share| share.count).collect();
    assert_eq!(counts, [12, 4]);
    assert!((proposal.chosen.prediction.step_s - 12.0 * 0.006).abs() < 1e-6);
    // Alone, the faster one takes 16 samples; other layouts of both were compared too.
    assert!(proposal.others.iter().any(|other| other.arrangement.mesh.pipeline == 2));
}

#[test]
fn device_behind_a_slow_link_is_left_out_with_the_time_it_would_cost() {
    let devices = vec![device(0, 0, 0.001), device(1, 1, 0.001)];
    let link = LinkModel { latency_s: 0.02, bytes_per_s: 1e5 };
    let profile = profile(devices, link);
    let proposal = searched(&profile, &ParallelOptions::default(), u64::MAX, false).unwrap();
    assert_eq!(mesh_of(&proposal), (1, 1, 1));
    let [left] = &proposal.left_out[..] else { panic!("{proposal:?}") };
    assert_eq!(left.device, 1);
    assert!(left.reason.contains("card 1") && left.reason.contains("96.0 ms"), "{}", left.reason);
}

/// A lower bound rules it out before any layout with it is simulated.
#[test]
fn device_that_is_far_slower_is_left_out_with_the_time_it_would_cost() {
    let devices = vec![device(0, 0, 0.001), device(1, 0, 5.0)];
    let profile = profile(devices, LinkModel::INSTANT);
    let mut options = ParallelOptions::default();
    (options.excluded.pipelines, options.excluded.tensor_groups) = (true, true);
    let proposal = searched(&profile, &options, u64::MAX, false).unwrap();
    assert!(proposal.others.is_empty(), "{:?}", proposal.others);
    let [left] = &proposal.left_out[..] else { panic!("{proposal:?}") };
    let with = "card 1 is left out: with it a step would take 30000 ms, ";
    assert!(left.reason.starts_with(with), "{}", left.reason);
    assert!(left.reason.ends_with(" ms, without it 96.0 ms"), "{}", left.reason);
}

#[test]
fn model_that_fits_no_device_is_cut_into_stages() {
    let devices = vec![device(0, 0, 0.001), device(0, 0, 0.001)];
    let profile = profile(devices, LinkModel::INSTANT);
    let model = model();
    let one = Arrangement::of(
        Mesh::default(),
        vec![0],
        &[std::iter::once(0..6).collect()],
        crate::contiguous_shares(&[BATCH], &[1]),
        PipelineSchedule::OneFOneB,
    );
    let options = ParallelOptions::default();
    let laid_out = LaidOut::of(&options, &model.whole, &one).unwrap();
    let memory = Memory { bytes: u64::MAX };
    let whole = memory.needs(&one, &laid_out)[0].needed;
    // Data parallelism divides only the moments, which is not enough here.
    let proposal = searched(&profile, &options, whole * 7 / 10, false).unwrap();
    let (data, pipeline, tensor) = mesh_of(&proposal);
    assert_eq!(data, 1, "{proposal:?}");
    assert_eq!(pipeline * tensor, 2);
    assert!(proposal.chosen.prediction.memory.iter().all(|need| need.fits()));
    let refused: Vec<&str> = proposal.refused.iter().map(|one| &*one.layouts).collect();
    assert_eq!(refused, ["data 2", "alone"]);
    let error = searched(&profile, &options, whole / 100, false).unwrap_err();
    assert!(error.to_string().contains("alone: card 0 has too little memory"), "{error}");
}

#[test]
fn given_stages_and_named_devices_are_kept() {
    let devices = vec![device(0, 0, 0.001), device(1, 0, 0.05)];
    let profile = profile(devices, LinkModel::INSTANT);
    let mut options = ParallelOptions::default();
    let all = searched(&profile, &options, u64::MAX, true).unwrap();
    assert_eq!(all.chosen.arrangement.mesh.world_size(), 2);
    let some = searched(&profile, &options, u64::MAX, false).unwrap();
    assert_eq!(mesh_of(&some), (1, 1, 1), "the second one has no sample in time");
    options.pipeline.stages = 2;
    options.reduce_site = Some(ReduceSite::Host);
    let staged = searched(&profile, &options, u64::MAX, true).unwrap();
    assert_eq!(mesh_of(&staged), (1, 2, 1));
    assert!(staged.others.iter().all(|other| other.arrangement.mesh.pipeline == 2));
    options.pipeline.blocks_per_stage = vec![1, 5];
    let cut = searched(&profile, &options, u64::MAX, true).unwrap();
    assert_eq!(cut.chosen.arrangement.pipelines[0].chunks, [0..1, 1..6]);
}

#[test]
fn excluded_divisions_are_not_planned() {
    let devices = vec![device(0, 0, 0.001), device(0, 0, 0.001)];
    let profile = profile(devices, LinkModel::INSTANT);
    let mut options = ParallelOptions::default();
    let meshes = |options: &ParallelOptions| -> Vec<Mesh> {
        let found = searched(&profile, options, u64::MAX, true).unwrap();
        found.others.iter().chain([&found.chosen]).map(|one| one.arrangement.mesh).collect()
    };
    assert!(meshes(&options).iter().any(|mesh| mesh.pipeline == 2));
    options.excluded.pipelines = true;
    let groups = meshes(&options);
    assert!(groups.iter().all(|mesh| mesh.pipeline == 1), "{groups:?}");
    assert!(groups.iter().any(|mesh| mesh.tensor == 2), "{groups:?}");
    options.excluded.tensor_groups = true;
    assert!(meshes(&options).iter().all(|mesh| !mesh.is_divided()));
}

#[test]
fn devices_that_share_a_processor_gain_nothing() {
    let mut devices = vec![device(0, 0, 0.001), device(1, 0, 0.001)];
    for one in &mut devices {
        one.shares = Some(crate::planner::profile::SharedProcessor { number: 0, slowdown: 2.0 });
    }
    let profile = profile(devices, LinkModel::INSTANT);
    let proposal = searched(&profile, &ParallelOptions::default(), u64::MAX, false).unwrap();
    assert_eq!(mesh_of(&proposal), (1, 1, 1), "{:?}", proposal.chosen);
    let [left] = &proposal.left_out[..] else { panic!("{:?}", proposal.left_out) };
    assert!(left.reason.contains("card 1 is left out: with it a step would take"), "{left:?}");
    // In a pipeline, too, the processor has all the work, but for the gradient of the first input.
    let least_s = 0.096 - 16.0 * 0.001 / 2.0;
    for one in proposal.others.iter().chain([&proposal.chosen]) {
        assert!(one.prediction.step_s > least_s, "{one:?}");
    }
}

#[test]
fn faster_links_are_advised_where_they_help() {
    let devices = vec![device(0, 0, 0.01), device(0, 1, 0.01)];
    let link = LinkModel { latency_s: 0.0, bytes_per_s: 2e6 };
    let profile = profile(devices, link);
    let proposal = searched(&profile, &ParallelOptions::default(), u64::MAX, true).unwrap();
    assert!(proposal.chosen.prediction.communication_s > 0.0);
    let advice = &proposal.advice[0];
    assert!(advice.text.contains("links between machines"), "{:?}", proposal.advice);
    assert!(advice.step_s < proposal.chosen.prediction.step_s);
}

#[test]
fn model_that_devices_hold_is_divided_for_a_tenth_and_a_millisecond() {
    // Gradients take longer than activations over this link.
    let link = |bytes_per_s: f64| LinkModel { latency_s: 0.0, bytes_per_s };
    let chosen = |seconds: f64, link: LinkModel| {
        let devices = vec![device(0, 0, seconds), device(0, 1, seconds)];
        let profile = profile(devices, link);
        let proposal = searched(&profile, &ParallelOptions::default(), u64::MAX, true).unwrap();
        let mut best = [f64::INFINITY; 2];
        for one in proposal.others.iter().chain([&proposal.chosen]) {
            let is_divided = usize::from(one.arrangement.mesh.is_divided());
            best[is_divided] = best[is_divided].min(one.prediction.step_s);
        }
        (proposal.chosen.arrangement.mesh.is_divided(), best[1] / best[0])
    };
    let (is_divided, ratio) = chosen(0.01, link(3e5));
    assert!(is_divided && ratio < 0.9, "{ratio}");
    let (is_divided, ratio) = chosen(0.01, link(1e9));
    assert!(!is_divided && ratio > 0.9, "{ratio}");
    // Less than a millisecond of a step that is short anyway.
    let (is_divided, ratio) = chosen(1e-6, link(1e9));
    assert!(!is_divided && ratio < 0.9, "{ratio}");
}

/// The network takes processor time from devices that the processor computes for, as much as the
/// bytes of a step cost, and none from cards.
#[test]
fn network_takes_time_from_devices_on_the_host_only() {
    let link = LinkModel { latency_s: 1e-5, bytes_per_s: 1e9 };
    let excluded = ExcludedDivisions { pipelines: true, tensor_groups: true };
    let options = ParallelOptions { excluded, ..ParallelOptions::default() };
    let step_s = |is_on_host: bool, network_s_per_byte: f64| {
        let devices = [0, 1].map(|node| DeviceProfile { is_on_host, ..device(0, node, 0.001) });
        let mut profile = profile(devices.into(), link);
        profile.network_s_per_byte = vec![network_s_per_byte; 2];
        let proposal = searched(&profile, &options, u64::MAX, true).unwrap();
        assert_eq!(mesh_of(&proposal), (2, 1, 1));
        proposal.chosen.prediction.step_s
    };
    // Each of two ranks sends half of the sums and half of the parameters.
    let bytes = 4 * model().whole.of_rows(1).graph.parameter_count();
    let network_s = 0.01;
    let byte_s = network_s / bytes as f64;
    assert_eq!(step_s(false, byte_s), step_s(false, 0.0));
    let alone_s = step_s(true, 0.0);
    assert_eq!(alone_s, step_s(false, 0.0));
    let more_s = step_s(true, byte_s) - alone_s;
    assert!((0.8 * network_s..=1.05 * network_s).contains(&more_s), "{more_s} of {network_s}");
}

/// A node that does not read its inputs waits for them at the begin of each step.
#[test]
fn inputs_from_the_first_node_take_time_on_the_link() {
    let options = ParallelOptions {
        excluded: ExcludedDivisions { pipelines: true, tensor_groups: true },
        ..ParallelOptions::default()
    };
    let step_s = |nodes: [u32; 2], receives_inputs: bool, bytes_per_s: f64| {
        let link = LinkModel { latency_s: 1e-5, bytes_per_s };
        let mut profile = profile(nodes.map(|node| device(0, node, 0.001)).into(), link);
        profile.receives_inputs = vec![false, receives_inputs, receives_inputs];
        let proposal = searched(&profile, &options, u64::MAX, true).unwrap();
        assert_eq!(mesh_of(&proposal), (2, 1, 1));
        proposal.chosen.prediction.step_s
    };
    // Tokens and targets: the positions are the same in every step.
    let plan = model().whole.of_rows(1);
    let used = used_inputs(&plan);
    assert_eq!(used.len(), 2);
    let of_sample: usize = used.iter().map(|input| plan.graph.tensor(*input).bytes(1)).sum();
    let bytes_per_s = 1e5;
    let inputs_s = f64::from(BATCH / 2) * of_sample as f64 / bytes_per_s;
    // Without a device of the first node, two nodes receive at once.
    for nodes in [[0, 1], [1, 2]] {
        let more_s = step_s(nodes, true, bytes_per_s) - step_s(nodes, false, bytes_per_s);
        assert!((0.98 * inputs_s..=1.02 * inputs_s).contains(&more_s), "{more_s} of {inputs_s}");
    }
}

/// A stage that reads large inputs is on a node that need not wait for them.
#[test]
fn the_first_stage_is_where_the_inputs_are() {
    let config = MlpConfig {
        widths: vec![4096, 8, 8, 8, 8],
        activation: Unary::Gelu,
        dropout: 0.0,
        loss: MlpLoss::SquaredError,
    };
    let graph = ModelGraph::training(mlp(&config).unwrap(), true).unwrap();
    let model = Model {
        whole: Plans::new(graph.clone().with_merged_backward()),
        staged: Plans::new(graph),
    };
    let blocks = model.whole.of_rows(1).graph.blocks.len();
    let stages = |receives_inputs: bool| {
        let link = LinkModel { latency_s: 1e-5, bytes_per_s: 1e7 };
        let mut devices = [1, 0].map(|node| device(0, node, 0.001));
        for device in &mut devices {
            device.blocks.truncate(blocks);
        }
        let mut profile = profile(devices.into(), link);
        profile.receives_inputs = vec![false, receives_inputs];
        let options = ParallelOptions {
            pipeline: PipelineOptions { stages: 2, ..PipelineOptions::default() },
            ..ParallelOptions::default()
        };
        let proposal = searched_of(&model, &profile, &options, u64::MAX, true).unwrap();
        assert_eq!(mesh_of(&proposal), (1, 2, 1));
        proposal.chosen.arrangement.positions
    };
    assert_eq!(stages(false), [0, 1]);
    assert_eq!(stages(true), [1, 0]);
}
