//! States that a model carries from step to step: a sample goes on where that of the step before
//! ended, on any devices, over saves, and in evaluations.

use std::sync::Arc;

use potluck_core::HostTensor;
use potluck_data::{Dataset, Split, TextData, TextWindows, TokenizerKind};
use potluck_graph::model::{RnnConfig, rnn};
use potluck_graph::optim::Optimizer;
use potluck_graph::{Builder, Cell, Graph, Init, ShapeError};
use potluck_train::{
    FitLength, FitOptions, PipelineOptions, PipelineSchedule, Shares, Trainer, TrainerOptions,
};

const BATCH: usize = 4;
const CONTEXT: usize = 5;
const VOCABULARY: usize = 7;

fn model(cell: Cell, context: usize, stateful: bool) -> Graph {
    let (vocabulary, layers, width, dropout) = (VOCABULARY, 2, 6, 0.0);
    let config = RnnConfig { vocabulary, context, layers, width, cell, dropout, stateful };
    rnn(&config).unwrap()
}

fn options(devices: &str) -> TrainerOptions {
    let optimizer = Optimizer::Sgd { momentum: 0.9, weight_decay: 0.0 };
    TrainerOptions { seed: 3, ..TrainerOptions::new(devices, optimizer, BATCH) }
}

fn trainer(cell: Cell, options: &TrainerOptions) -> Trainer {
    Trainer::new(model(cell, CONTEXT, true), options).unwrap()
}

/// Tokens of a slot.
fn token(slot: usize, time: usize) -> u32 {
    ((slot * 5 + time * time + time / 3) % VOCABULARY) as u32
}

/// Takes a step on the times `times` of each slot, with the next tokens as targets.
fn step(trainer: &mut Trainer, times: std::ops::Range<usize>, lr: f64) -> f64 {
    let of = |shift: usize| {
        let slot = |slot| times.clone().map(move |time| token(slot, time + shift));
        HostTensor::Int((0..BATCH).flat_map(slot).collect())
    };
    trainer.step(&[("tokens", of(0)), ("targets", of(1))], lr).unwrap().loss
}

/// Takes steps through the sequences from the step `first` on.
fn steps(trainer: &mut Trainer, first: usize, count: usize, lr: f64) -> Vec<f64> {
    let one = |index: usize| step(trainer, index * CONTEXT..(index + 1) * CONTEXT, lr);
    (first..first + count).map(one).collect()
}

#[test]
fn sequence_in_pieces_has_whole_loss() {
    for cell in [Cell::Lstm, Cell::Gru] {
        let mut whole = Trainer::new(model(cell, 3 * CONTEXT, false), &options("cpu")).unwrap();
        let expected = step(&mut whole, 0..3 * CONTEXT, 0.0);
        let mut pieces = trainer(cell, &options("cpu"));
        let losses = steps(&mut pieces, 0, 3, 0.0);
        let mean = losses.iter().sum::<f64>() / 3.0;
        assert!((mean - expected).abs() < 1e-6, "{cell:?}: {mean}, not {expected}");
        // Not carried, the third piece has another loss.
        pieces.reset_states();
        let alone = steps(&mut pieces, 2, 1, 0.0)[0];
        assert!((alone - losses[2]).abs() > 1e-5, "{cell:?}: {alone} is {}", losses[2]);
    }
}

#[test]
fn states_follow_slots_on_any_devices() {
    let alone = steps(&mut trainer(Cell::Lstm, &options("cpu")), 0, 6, 0.2);
    let stages = |stages| PipelineOptions { stages, ..PipelineOptions::default() };
    let of_schedule = |schedule, chunks| {
        let pipeline = PipelineOptions { schedule, virtual_stages: chunks, ..stages(2) };
        TrainerOptions { pipeline, micro_batch_size: 1, ..options("cpu*2") }
    };
    let others = [
        TrainerOptions { micro_batch_size: 3, ..options("cpu") },
        TrainerOptions { shares: Shares::Fixed(vec![1, 3]), ..options("cpu*2") },
        TrainerOptions { pipeline: stages(2), micro_batch_size: 1, ..options("cpu*2") },
        TrainerOptions { pipeline: stages(2), micro_batch_size: 1, ..options("cpu*4") },
        of_schedule(PipelineSchedule::GPipe, 1),
        of_schedule(PipelineSchedule::ZeroBubble, 1),
        of_schedule(PipelineSchedule::Interleaved, 2),
    ];
    for options in others {
        let losses = steps(&mut trainer(Cell::Lstm, &options), 0, 6, 0.2);
        for (loss, expected) in losses.iter().zip(&alone) {
            assert!((loss - expected).abs() < 2e-6, "{}: {losses:?}", options.devices);
        }
    }
}

#[test]
fn save_has_the_states() {
    let directory = tempfile::tempdir().unwrap();
    let options = options("cpu");
    let mut whole = trainer(Cell::Gru, &options);
    let before = steps(&mut whole, 0, 3, 0.2);
    whole.save(directory.path()).unwrap();
    let after = steps(&mut whole, 3, 3, 0.2);
    let load = |options| {
        Trainer::load(model(Cell::Gru, CONTEXT, true), options, directory.path()).unwrap()
    };
    let mut loaded = load(&options);
    assert_eq!(steps(&mut loaded, 3, 3, 0.2), after);
    // Back to the save.
    loaded.restore(directory.path()).unwrap();
    assert_eq!(steps(&mut loaded, 3, 3, 0.2), after);
    assert!(before != after);
    let larger =
        TrainerOptions { batch: BATCH + 1, micro_batch_size: BATCH + 1, ..options.clone() };
    let larger = load(&larger);
    let notes = larger.notes().join("\n");
    assert!(notes.contains("carries from step to step begins with zeros"), "{notes}");
}

#[test]
fn state_cannot_be_given() {
    let mut trainer = trainer(Cell::Gru, &options("cpu"));
    let zeros = HostTensor::Float(vec![0.0; 24]);
    let error = trainer.step(&[("h_l0", zeros)], 0.1).unwrap_err().to_string();
    assert!(error.contains("'h_l0' is carried from step to step"), "{error}");
}

/// A text of `count` tokens.
fn text(count: usize, context: usize) -> Arc<dyn Dataset> {
    let characters: Vec<u8> = (0..count).map(|time| b'a' + token(1, time) as u8).collect();
    let text = TextData::from_bytes("text", &characters, TokenizerKind::Char, 0.0, context);
    Arc::new(TextWindows { text: Arc::new(text.unwrap()), context })
}

#[test]
fn fit_goes_through_text_in_order() {
    // Windows begin at 0 to 50, so that each of 4 slots has 12 of them: 2 samples of 5.
    let data = text(51 + CONTEXT, CONTEXT);
    let mut fitted = trainer(Cell::Lstm, &options("cpu"));
    let mut losses = Vec::new();
    let lr = FitOptions::constant(FitLength::Epochs(2), 0.1);
    let report = fitted.fit_with(&data, &lr, &mut |event| {
        if let potluck_core::metrics::Event::Step(record) = event {
            losses.push(record.loss);
        }
        std::ops::ControlFlow::Continue(())
    });
    assert_eq!(report.unwrap().steps, 4);
    let mut by_hand = trainer(Cell::Lstm, &options("cpu"));
    let mut expected = Vec::new();
    for index in [0, 1, 0, 1] {
        if index == 0 {
            by_hand.reset_states();
        }
        let windows: Vec<u64> = (0..4).map(|slot| 12 * slot + 5 * index).collect();
        let rows = data.rows(Split::Train, &windows).unwrap();
        expected.push(by_hand.step(&rows, 0.1).unwrap().loss);
    }
    assert_eq!(losses, expected);
    // A text that is too short for the batch.
    let short = fitted.fit(&text(20, CONTEXT), &lr).unwrap_err().to_string();
    assert!(short.contains("a sample of 5 tokens"), "{short}");
}

#[test]
fn evaluation_carries_states() {
    let stateful = |devices, batch, micro_batch, stages| {
        let pipeline = PipelineOptions { stages, ..PipelineOptions::default() };
        let options =
            TrainerOptions { batch, micro_batch_size: micro_batch, pipeline, ..options(devices) };
        let mut trainer = trainer(Cell::Lstm, &options);
        trainer.evaluate(&text(6 * CONTEXT + 1, CONTEXT), Split::Train, 0).unwrap().loss
    };
    let mut long = Trainer::new(model(Cell::Lstm, 6 * CONTEXT, false), &options("cpu")).unwrap();
    let whole = text(6 * CONTEXT + 1, 6 * CONTEXT);
    let expected = long.evaluate(&whole, Split::Train, 0).unwrap().loss;
    let one_run = stateful("cpu", 1, 1, 1);
    assert!((one_run - expected).abs() < 1e-6, "{one_run}, not {expected}");
    // Two runs of three windows, in both rows of a batch, one after the other, on two devices, and
    // through a pipeline.
    let two_runs = stateful("cpu", 2, 2, 1);
    assert!((two_runs - expected).abs() > 1e-6);
    for other in [stateful("cpu", 2, 1, 1), stateful("cpu*2", 2, 1, 1), stateful("cpu*2", 2, 1, 2)]
    {
        assert!((other - two_runs).abs() < 1e-6, "{other}, not {two_runs}");
    }
}

/// A model of two blocks that carries the sum of its inputs, of two rows per sample.
fn sums() -> Builder {
    let mut b = Builder::new();
    b.block("sum");
    let (x, before) = (b.input("x", &[2, 3]), b.input("before", &[2, 3]));
    let sum = b.add(before, x).unwrap();
    b.carry(before, sum).unwrap();
    b.block("head");
    let target = b.input("target", &[2, 3]);
    let weight = b.parameter("weight", &[3], Init::Zeros);
    let y = b.add(sum, weight).unwrap();
    b.squared_error_loss(y, target).unwrap();
    b
}

#[test]
fn input_any_is_carried_anywhere() {
    let stages = PipelineOptions { stages: 2, ..PipelineOptions::default() };
    let cases = [
        options("cpu"),
        TrainerOptions { micro_batch_size: 1, ..options("cpu") },
        TrainerOptions { shares: Shares::Fixed(vec![1, 3]), ..options("cpu*2") },
        TrainerOptions { pipeline: stages, micro_batch_size: 2, ..options("cpu*2") },
    ];
    for options in cases {
        let mut trainer = Trainer::new(sums().finish(), &options).unwrap();
        let rows = |value: f32| HostTensor::Float(vec![value; 6 * BATCH]);
        let mut loss = |x| {
            let inputs = [("x", rows(x)), ("target", rows(0.0))];
            trainer.step(&inputs, 0.0).unwrap().loss
        };
        let losses = [1.0, 2.0, -1.0].map(&mut loss);
        // Mean squares of the running sums 1, 3 and 2.
        assert_eq!(losses, [1.0, 9.0, 4.0], "{}", options.devices);
    }
}

#[test]
fn input_has_one_computed_next_value() {
    let mut b = sums();
    let graph = sums().finish();
    let (x, before) = (graph.input("x").unwrap(), graph.input("before").unwrap());
    let refused = |result: Result<(), ShapeError>| result.unwrap_err().to_string();
    let sum = graph.carried[0].output;
    assert!(refused(b.carry(before, sum)).contains("is carried already"));
    assert!(refused(b.carry(x, before)).contains("is computed, and not an input"));
    assert!(refused(b.carry(sum, sum)).contains("a state is an input of floats"));
}

#[test]
fn fit_on_other_text_begins_with_zeros() {
    let other = || {
        let characters: Vec<u8> = (0..90).map(|time| b'a' + token(2, time) as u8).collect();
        let text = TextData::from_bytes("other", &characters, TokenizerKind::Char, 0.0, CONTEXT);
        Arc::new(TextWindows { text: Arc::new(text.unwrap()), context: CONTEXT })
            as Arc<dyn Dataset>
    };
    // Of 4 slots, each goes through 3 samples.
    let first = text(61 + CONTEXT, CONTEXT);
    let steps = |steps| FitOptions::constant(FitLength::Steps(steps), 0.1);
    let second_loss = |data: &Arc<dyn Dataset>, resets: bool| {
        let mut trainer = trainer(Cell::Lstm, &options("cpu"));
        trainer.fit(&first, &steps(1)).unwrap();
        if resets {
            trainer.reset_states();
        }
        trainer.fit(data, &steps(2)).unwrap().loss.unwrap()
    };
    assert_eq!(second_loss(&other(), false), second_loss(&other(), true));
    assert_ne!(second_loss(&first, false), second_loss(&first, true));
}

/// A step that is skipped leaves the states of the step before, which the next one begins with.
#[test]
fn step_skipped_carries_nothing() {
    let mut trainer = Trainer::new(sums().finish(), &options("cpu")).unwrap();
    let mut step = |x: f32| {
        let rows = |value| HostTensor::Float(vec![value; 6 * BATCH]);
        trainer.step(&[("x", rows(x)), ("target", rows(0.0))], 0.0).unwrap()
    };
    assert_eq!(step(1.0).loss, 1.0);
    assert!(!step(f32::NAN).updated);
    assert_eq!(step(2.0).loss, 9.0);
}
