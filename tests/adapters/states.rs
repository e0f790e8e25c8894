//! States that are carried from step to step, read back from every adapter: losses are those of the
//! CPU device, alone, beside it with uneven shares, and in evaluations.

use std::sync::Arc;

use potluck_core::HostTensor;
use potluck_data::{Dataset, Split, TextData, TextWindows, TokenizerKind};
use potluck_graph::Cell;
use potluck_graph::model::{RnnConfig, rnn};
use potluck_train::{PipelineOptions, Shares, Trainer, TrainerOptions};

use crate::golden::{options_on, three_devices};

const BATCH: usize = 4;
const CONTEXT: usize = 6;
const VOCABULARY: usize = 5;

/// Losses of three steps through sequences, each from the state behind the one before, and that of
/// an evaluation which carries states through a text.
fn losses(cell: Cell, options: TrainerOptions) -> Vec<f64> {
    let (vocabulary, context) = (VOCABULARY, CONTEXT);
    let (layers, width, dropout, stateful) = (2, 8, 0.0, true);
    let config = RnnConfig { vocabulary, context, layers, width, cell, dropout, stateful };
    let mut trainer = Trainer::new(rnn(&config).unwrap(), &options).unwrap();
    let token = |slot: usize, time: usize| ((3 * slot + time * time) % VOCABULARY) as u32;
    let mut losses = Vec::new();
    for step in 0..3 {
        let of = |shift: usize| {
            let times = step * CONTEXT..(step + 1) * CONTEXT;
            let slot = |slot| times.clone().map(move |time| token(slot, time + shift));
            HostTensor::Int((0..BATCH).flat_map(slot).collect())
        };
        let step = trainer.step(&[("tokens", of(0)), ("targets", of(1))], 0.3).unwrap();
        losses.push(step.loss);
    }
    let characters: Vec<u8> = (0..50).map(|time| b'a' + token(1, time) as u8).collect();
    let text = TextData::from_bytes("text", &characters, TokenizerKind::Char, 0.0, CONTEXT);
    let data: Arc<dyn Dataset> =
        Arc::new(TextWindows { text: Arc::new(text.unwrap()), context: CONTEXT });
    losses.push(trainer.evaluate(&data, Split::Train, 0).unwrap().loss);
    losses
}

#[test]
fn states_are_carried_as_on_the_cpu_device() {
    let _turn = crate::common::turn();
    let devices = three_devices();
    let adapter = devices[0].trim_end_matches("*3");
    let both = format!("{adapter},cpu");
    for cell in [Cell::Lstm, Cell::Gru] {
        let alone = losses(cell, options_on("cpu", BATCH));
        let shares = Shares::Fixed(vec![3, 1]);
        let pipeline = PipelineOptions { stages: 2, ..PipelineOptions::default() };
        let options = || TrainerOptions { micro_batch_size: 2, ..options_on(&both, BATCH) };
        let cases = [
            options_on(adapter, BATCH),
            TrainerOptions { shares, ..options() },
            TrainerOptions { pipeline, ..options() },
        ];
        for options in cases {
            let devices = options.devices.clone();
            let found = losses(cell, options);
            let near = |(one, other): (&f64, &f64)| (one - other).abs() < 5e-6;
            assert!(found.iter().zip(&alone).all(near), "{devices}: {found:?}, not {alone:?}");
        }
    }
}
