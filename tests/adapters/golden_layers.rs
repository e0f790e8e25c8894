//! Parity with PyTorch of convolutional, residual and recurrent models, as `golden` has it of
//! others: on the CPU device and on every adapter, and on unlike devices together. A batch that is
//! normalized in pieces is compared with PyTorch on the same pieces. The data and the script that
//! made them are in `tests/golden/`.

use potluck_graph::model::{
    CnnConfig, MlpLoss, PictureNorm, PictureSizes, ResnetConfig, RnnConfig, cnn, resnet, rnn,
};
use potluck_graph::optim::Optimizer;
use potluck_graph::{Cell, Graph, Unary};
use potluck_train::{PipelineOptions, Shares, TrainerOptions};

use crate::golden::{Golden, Limits, options_on, three_devices};

/// PyTorch's own f32 is within an NMSE of 6e-12 of its f64, within 3e-14 after SGD, and within 2e-6
/// of the losses. The CPU device and software adapters reach 5e-12, 2e-13 and 2e-6.
const LIMITS: Limits = Limits { gradient_nmse: 1e-10, parameter_nmse: 1e-11, loss_error: 1e-5 };

const CASES: [&str; 5] = ["cnn", "resnet_batch", "resnet_group", "lstm", "gru"];

fn numbers(golden: &Golden, key: &str) -> Vec<usize> {
    serde_json::from_str(&golden.settings[key]).unwrap()
}

fn graph(golden: &Golden) -> Graph {
    let sizes = || PictureSizes {
        picture: numbers(golden, "picture").try_into().unwrap(),
        outputs: golden.number("classes"),
        loss: MlpLoss::CrossEntropy,
    };
    match golden.settings["kind"].as_str() {
        "cnn" => cnn(&CnnConfig {
            sizes: sizes(),
            channels: numbers(golden, "channels"),
            hidden: numbers(golden, "hidden"),
            activation: Unary::Relu,
            dropout: 0.0,
        }),
        "resnet" => resnet(&ResnetConfig {
            sizes: sizes(),
            blocks: golden.number("blocks"),
            width: golden.number("width"),
            norm: match golden.settings["norm"].as_str() {
                "batch" => PictureNorm::Batch,
                _ => PictureNorm::Group,
            },
        }),
        _ => rnn(&RnnConfig {
            stateful: false,
            vocabulary: golden.number("vocabulary"),
            context: golden.number("context"),
            layers: golden.number("layers"),
            width: golden.number("width"),
            cell: if golden.settings["cell"] == "lstm" { Cell::Lstm } else { Cell::Gru },
            dropout: 0.0,
        }),
    }
    .unwrap()
}

/// Training on the samples of all four batches in each step, which PyTorch did in pieces: those
/// are what is compared.
fn in_pieces(mut golden: Golden) -> Golden {
    for (kind, value) in golden.floats.clone() {
        if let Some(name) = kind.strip_prefix("pieces/") {
            golden.floats.insert(name.into(), value);
        }
    }
    let parts = |part: &str| (0..4).map(move |k| format!("batch/{k}/{part}")).collect::<Vec<_>>();
    let inputs: Vec<f32> =
        parts("inputs").iter().flat_map(|key| golden.floats[key].clone()).collect();
    let targets: Vec<u32> =
        parts("targets").iter().flat_map(|key| golden.ints[key].clone()).collect();
    for key in parts("inputs") {
        golden.floats.insert(key, inputs.clone());
    }
    for key in parts("targets") {
        golden.ints.insert(key, targets.clone());
    }
    let (batch, steps) = (4 * golden.number("batch"), golden.settings["pieces_sgd_steps"].clone());
    golden.settings.insert("batch".into(), batch.to_string());
    golden.settings.insert("sgd_steps".into(), steps);
    golden
}

fn check(case: &str) {
    let golden = Golden::read(case);
    golden.check(case, graph(&golden), golden.number("batch"), LIMITS);
}

#[test]
fn cnn_with_poolings_of_odd_sizes() {
    check("cnn");
}

/// Also the running averages of 10 steps of one micro-batch.
#[test]
fn resnet_with_batch_norm() {
    check("resnet_batch");
}

#[test]
fn resnet_with_batch_norm_in_pieces() {
    let golden = in_pieces(Golden::read("resnet_batch"));
    golden.check("resnet_batch in pieces", graph(&golden), golden.number("piece"), LIMITS);
}

#[test]
fn resnet_with_group_norm() {
    check("resnet_group");
}

#[test]
fn lstm_of_two_layers() {
    check("lstm");
}

#[test]
fn gru_of_two_layers() {
    check("gru");
}

/// Calls `f` with each case, its data and the most samples of a micro-batch: `rows` of them, or
/// where a batch is normalized, the piece that PyTorch normalized.
fn for_each_case(rows: usize, f: impl Fn(&str, &Golden, usize)) {
    for case in CASES {
        let golden = Golden::read(case);
        if golden.settings.contains_key("piece") {
            f(case, &in_pieces(golden), 8)
        } else {
            f(case, &golden, rows)
        }
    }
}

#[test]
fn unlike_devices_with_uneven_shares_train_as_pytorch_does() {
    let _turn = crate::common::turn();
    for_each_case(5, |case, golden, micro_batch| {
        let batch = golden.number("batch");
        let shares = if batch == 64 { vec![40, 16, 8] } else { vec![10, 4, 2] };
        let shares = Shares::Fixed(shares);
        let options = options_on(&three_devices().join(","), batch);
        let options = TrainerOptions { shares, micro_batch_size: micro_batch, ..options };
        golden.check_together(case, &graph(golden), &options, LIMITS);
    });
}

#[test]
fn a_pipeline_of_unlike_devices_trains_as_pytorch_does() {
    let _turn = crate::common::turn();
    let devices = three_devices()[..2].join(",").replace("*2", "");
    for_each_case(4, |case, golden, micro_batch| {
        let pipeline = PipelineOptions { stages: 2, ..PipelineOptions::default() };
        let options = options_on(&devices, golden.number("batch"));
        let options = TrainerOptions { pipeline, micro_batch_size: micro_batch, ..options };
        golden.check_together(case, &graph(golden), &options, LIMITS);
    });
}

/// Outside of training, running averages take the place of the batch's statistics, on however many
/// devices.
#[test]
fn evaluation_normalizes_by_running_averages_as_pytorch_does() {
    let _turn = crate::common::turn();
    let golden = Golden::read("resnet_batch");
    let expected = f64::from(golden.floats["eval/loss"][0]);
    let sgd = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
    for devices in [vec!["cpu".into()], three_devices()] {
        let options = options_on(&devices.join(","), 32);
        let options = TrainerOptions { shares: Shares::Even, micro_batch_size: 8, ..options };
        let graph = graph(&golden);
        let mut trainer = golden.trainer(&graph, &options, sgd);
        let loss = trainer.evaluate_rows(16, &golden.batch(&graph, 0)).unwrap().loss;
        let error = (loss / expected - 1.0).abs();
        assert!(error <= 1e-6, "loss {loss} on {devices:?}, expected {expected}");
    }
}

/// Each fault (the input of a convolution moved by one column, the unbiased variance, half as many
/// groups, a forget gate's bias doubled, hidden values reset before their product) is refused: the
/// comparison can fail.
#[test]
fn planted_wrong_gradients_are_refused() {
    for case in CASES {
        let golden = Golden::read(case);
        let name = &golden.settings["faulty"];
        let wrong = &golden.floats[&format!("wrong/{name}")];
        let nmse = crate::common::nmse(wrong, &golden.floats[&format!("grad/{name}")]);
        assert!(nmse > f64::max(1e-6, 100.0 * LIMITS.gradient_nmse), "{case}: NMSE {nmse:.1e}");
    }
}
