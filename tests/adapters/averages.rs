//! Averages of the weights on every adapter: they are those of the CPU device, alone and beside it.

use potluck_core::HostTensor;
use potluck_graph::{Builder, Graph, nn};
use potluck_train::checkpoint::NamedTensor;
use potluck_train::{PipelineOptions, Shares, Trainer, TrainerOptions};

use crate::golden::{options_on, three_devices};

const BATCH: usize = 6;

fn model() -> Graph {
    let mut b = Builder::new();
    b.block("first");
    let x = b.input("x", &[1, 4]);
    let hidden = nn::linear(&mut b, "first", x, 37).unwrap();
    let hidden = b.tanh(hidden).unwrap();
    b.block("second");
    let y = nn::linear(&mut b, "second", hidden, 2).unwrap();
    let targets = b.input("targets", &[1, 2]);
    b.squared_error_loss(y, targets).unwrap();
    b.finish()
}

/// Returns the averages behind four steps, and the loss of a batch with them.
fn averages(options: &TrainerOptions) -> (Vec<NamedTensor>, f64) {
    let options = TrainerOptions { ema: 0.5, ..options.clone() };
    let mut trainer = Trainer::new(model(), &options).unwrap();
    let batch = |step: usize| {
        let values = |count: usize| {
            HostTensor::Float((0..count).map(|i| ((i + 9 * step) as f32 * 0.7).sin()).collect())
        };
        [("x", values(BATCH * 4)), ("targets", values(BATCH * 2))]
    };
    for step in 0..4 {
        trainer.step(&batch(step), 0.1).unwrap();
    }
    let loss = trainer.evaluate_rows(BATCH, &batch(4)).unwrap().loss;
    (trainer.averaged_parameters().unwrap(), loss)
}

#[test]
fn averages_are_those_of_the_cpu_device() {
    let _turn = crate::common::turn();
    let devices = three_devices();
    let adapter = devices[0].trim_end_matches("*3");
    let both = format!("{adapter},cpu");
    let options = TrainerOptions { micro_batch_size: 2, ..options_on(&both, BATCH) };
    let shares = Shares::Fixed(vec![4, 2]);
    let pipeline = PipelineOptions { stages: 2, ..PipelineOptions::default() };
    let cases = [
        options_on(adapter, BATCH),
        TrainerOptions { shares, ..options.clone() },
        TrainerOptions { pipeline, ..options },
    ];
    let (expected, alone) = averages(&options_on("cpu", BATCH));
    for options in cases {
        let (found, loss) = averages(&options);
        for (found, expected) in found.iter().zip(&expected) {
            let error = crate::common::nmse(&found.values, &expected.values);
            assert!(error <= 1e-10, "{}: {error:e}", found.name);
        }
        assert!((loss - alone).abs() < 1e-5, "{loss}, not {alone}");
    }
}
