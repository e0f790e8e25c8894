//! A table that an adapter cannot bind at once: it is cut there, and one tensor everywhere else.

use crate::process::adapter_selectors;
use potluck_core::HostTensor;
use potluck_core::rng::Key;
use potluck_graph::optim::Optimizer;
use potluck_graph::{Builder, Graph, IGNORE_INDEX, Init};
use potluck_kernels::device::{Selection, list_adapters, select_all};
use potluck_train::{Shares, Trainer, TrainerOptions};

/// 138 MB of table: llvmpipe binds 134 MB.
const ROWS: usize = 60_000;
const COLUMNS: usize = 576;
const TOKENS: usize = 5;
const BATCH: usize = 2;

/// Next ids by a tied table, without anything between.
fn model() -> Graph {
    let mut b = Builder::new();
    let table = b.parameter("table", &[ROWS, COLUMNS], Init::Normal { std: 0.1 });
    let ids = b.input_ids("tokens", &[1, TOKENS]);
    let targets = b.input_ids("targets", &[1, TOKENS]);
    let x = b.embedding(ids, table).unwrap();
    b.linear_cross_entropy_loss(x, table, targets, 64).unwrap();
    b.finish()
}

/// Ids from all of the table, the first and last rows too.
fn batch(step: u64) -> [(&'static str, HostTensor); 2] {
    let key = Key::new(4).step(step);
    let drawn = |of: u32| (0..(BATCH * TOKENS) as u32).map(move |i| key.words([i, of])[0]);
    let mut ids: Vec<u32> = drawn(1).map(|id| id % ROWS as u32).collect();
    ids[..2].copy_from_slice(&[0, ROWS as u32 - 1]);
    let mut targets: Vec<u32> = drawn(2).map(|id| id % ROWS as u32).collect();
    targets[3] = IGNORE_INDEX;
    [("tokens", HostTensor::Int(ids)), ("targets", HostTensor::Int(targets))]
}

fn options(devices: &str) -> TrainerOptions {
    let optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.01 };
    let shares = Shares::Even;
    TrainerOptions {
        shares,
        tune_s: 0.0,
        seed: 3,
        ..TrainerOptions::new(devices, optimizer, BATCH)
    }
}

fn losses(trainer: &mut Trainer, steps: std::ops::Range<u64>) -> Vec<f64> {
    let steps = steps.map(|step| {
        let done = trainer.step(&batch(step), 0.5).unwrap();
        [done.loss, done.gradient_norm]
    });
    steps.flatten().collect()
}

/// The first adapter that cannot bind the table at once.
fn limited() -> Option<String> {
    let adapters = list_adapters();
    let binds = |selector: &String| match &select_all(selector, &adapters).unwrap()[..] {
        [Selection::Adapter(adapter)] => adapter.limits().binding_bytes,
        _ => u64::MAX,
    };
    let table = (ROWS * COLUMNS * size_of::<f32>()) as u64;
    adapter_selectors().into_iter().find(|selector| binds(selector) < table)
}

#[test]
fn a_table_above_the_limit_of_a_binding_is_trained_and_saved_as_one() {
    let _turn = crate::common::turn();
    let Some(adapter) = limited() else {
        return eprintln!("skipped: every adapter binds {ROWS} rows of {COLUMNS}");
    };
    let place = tempfile::tempdir().unwrap();
    let mut cut = Trainer::new(model(), &options(&adapter)).unwrap();
    assert!(cut.placement().parameter_bytes_max.is_some());
    assert!(cut.notes().iter().any(|note| note.contains("cut by rows")), "{:?}", cut.notes());
    let first = losses(&mut cut, 0..1);
    cut.save(place.path()).unwrap();
    let saved = cut.parameters().unwrap();
    assert_eq!((saved.len(), &saved[0].shape[..]), (1, &[ROWS, COLUMNS][..]));
    let after = losses(&mut cut, 1..2);
    drop(cut);

    let mut whole = Trainer::new(model(), &options("cpu")).unwrap();
    assert_eq!(whole.placement().parameter_bytes_max, None);
    let expected = losses(&mut whole, 0..1);
    for (found, expected) in first.iter().zip(&expected) {
        assert!((found - expected).abs() <= 1e-5 * expected, "{first:?}, {expected:?}");
    }
    drop(whole);
    let mut loaded = Trainer::load(model(), &options("cpu"), place.path()).unwrap();
    let same = loaded.parameters().unwrap();
    assert!(saved[0].values == same[0].values, "the table is another");
    let expected = losses(&mut loaded, 1..2);
    assert!((after[0] - expected[0]).abs() <= 1e-5 * expected[0], "{after:?}, {expected:?}");
}
