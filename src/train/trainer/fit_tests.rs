//! Tests of training on a data set.

use std::ops::ControlFlow;
use std::time::Duration;

use super::tests::graph;
use super::*;
use crate::task::Task;
use crate::{ShareChange, Shares};
use potluck_core::DType;
use potluck_core::metrics::{Event, Unit};
use potluck_data::{DataError, DatasetInput, NamedInputs, Split};
use potluck_graph::optim::{Decay, OneCycle, Optimizer, Schedule};
use potluck_graph::{Builder, Init};

/// Points of a wave: 23 to train on, 5 held out.
struct Waves;

impl Dataset for Waves {
    fn inputs(&self) -> Vec<DatasetInput> {
        let input = |name, elements| DatasetInput { name, dtype: DType::F32, elements };
        vec![input("x", 2), input("y", 1)]
    }

    fn len(&self, split: Split) -> u64 {
        if split == Split::Train { 23 } else { 5 }
    }

    fn evaluation_samples(&self, split: Split) -> Vec<u64> {
        (0..self.len(split)).collect()
    }

    fn fingerprint(&self) -> String {
        "waves".into()
    }

    fn rows(&self, split: Split, indices: &[u64]) -> Result<NamedInputs, DataError> {
        let shift = if split == Split::Train { 0.0 } else { 0.05 };
        let at = |index: &u64| *index as f32 * 0.3 + shift;
        let x = indices.iter().flat_map(|index| [at(index), 1.0]).collect();
        let y = indices.iter().map(|index| at(index).sin()).collect();
        Ok(vec![("x", HostTensor::Float(x)), ("y", HostTensor::Float(y))])
    }
}

pub fn waves() -> Arc<dyn Dataset> {
    Arc::new(Waves)
}

/// Two blocks, with dropout.
pub(crate) fn wave_model() -> Graph {
    let mut b = Builder::new();
    b.block("first");
    let x = b.input("x", &[1, 2]);
    let w = b.parameter("w", &[8, 2], Init::Normal { std: 0.5 });
    let h = b.linear(x, w, None).unwrap();
    let h = b.unary(h, potluck_graph::Unary::GeluTanh).unwrap();
    let h = b.dropout(h, 0.1).unwrap();
    b.block("second");
    let v = b.parameter("v", &[1, 8], Init::Normal { std: 0.5 });
    let z = b.linear(h, v, None).unwrap();
    let y = b.input("y", &[1, 1]);
    b.squared_error_loss(z, y).unwrap();
    b.finish()
}

/// Options for batches of 6, in micro-batches of 2, with even shares.
pub fn options(devices: &str) -> TrainerOptions {
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.01 };
    TrainerOptions {
        micro_batch_size: 2,
        shares: Shares::Even,
        clip: 1.0,
        seed: 5,
        ..TrainerOptions::new(devices, optimizer, 6)
    }
}

/// Returns the bits of all parameters.
pub fn bits(trainer: &Trainer) -> Vec<u32> {
    let tensors = trainer.parameters().unwrap();
    tensors.iter().flat_map(|tensor| &tensor.values).map(|value| value.to_bits()).collect()
}

/// Options for `count` steps, with an evaluation every 4 steps.
pub fn steps(count: u64) -> FitOptions {
    FitOptions { eval_every: 4, ..FitOptions::constant(FitLength::Steps(count), 0.05) }
}

fn fitted(devices: &str) -> (Trainer, FitReport) {
    let mut trainer = Trainer::new(wave_model(), &options(devices)).unwrap();
    let report = trainer.fit(&waves(), &steps(12)).unwrap();
    (trainer, report)
}

#[test]
fn two_halves_are_one_call_to_the_bit_also_over_a_save() {
    for devices in ["cpu", "cpu*3"] {
        let (whole, report) = fitted(devices);
        assert_eq!((report.end, report.steps), (FitEnd::Done, 12));
        let mut halves = Trainer::new(wave_model(), &options(devices)).unwrap();
        let place = tempfile::tempdir().unwrap();
        let directory = Some(place.path().to_path_buf());
        halves.fit(&waves(), &FitOptions { directory, ..steps(7) }).unwrap();
        let saved = Trainer::load(wave_model(), &options(devices), place.path()).unwrap();
        for mut trainer in [halves, saved] {
            assert_eq!(trainer.steps(), 7);
            let second = trainer.fit(&waves(), &steps(12)).unwrap();
            assert_eq!(bits(&trainer), bits(&whole), "{devices}");
            assert_eq!((second.val_loss, second.loss), (report.val_loss, report.loss));
            assert_eq!(second.best.unwrap().val_loss, report.best.unwrap().val_loss);
            // Nothing is left to do.
            let third = trainer.fit(&waves(), &steps(12)).unwrap();
            assert_eq!((third.steps, third.loss), (12, None));
        }
    }
}

#[test]
fn given_changes_of_shares_have_the_same_bits_in_any_calls() {
    let changes = [(5, [1, 5]), (8, [4, 2])];
    let changes = changes.map(|(step, shares)| ShareChange { step, shares: shares.to_vec() });
    let options = TrainerOptions { share_changes: changes.into(), ..options("cpu*2") };
    let new = || Trainer::new(wave_model(), &options).unwrap();
    let mut whole = new();
    let mut told = Vec::new();
    let mut shares = Vec::new();
    whole
        .fit_with(&waves(), &steps(12), &mut |event| {
            match event {
                Event::Shares(change) => told.push(change.sentence()),
                Event::Step(step) => shares.push([step.ranks[0].share, step.ranks[1].share]),
                _ => {}
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    let sentence = |change| format!("shares {change}, as given by TrainerOptions::share_changes");
    let changes = ["3 : 3 -> 1 : 5 from step 5", "1 : 5 -> 4 : 2 from step 8"];
    assert_eq!(told, changes.map(sentence));
    assert_eq!(shares, [[[3, 3]; 4].as_slice(), &[[1, 5]; 3], &[[4, 2]; 5]].concat());
    let place = tempfile::tempdir().unwrap();
    let directory = Some(place.path().to_path_buf());
    for first in [4, 6, 7] {
        let mut halves = new();
        let directory = directory.clone();
        halves.fit(&waves(), &FitOptions { directory, ..steps(first) }).unwrap();
        let saved = Trainer::load(wave_model(), &options, place.path()).unwrap();
        let told = saved.notes().join("\n");
        let given = format!("from step {}, as given by TrainerOptions::share_changes", first + 1);
        assert!(told.contains("shares 3 : 3 -> ") && told.contains(&given), "{told}");
        for mut trainer in [halves, saved] {
            trainer.fit(&waves(), &steps(12)).unwrap();
            assert_eq!(bits(&trainer), bits(&whole), "{first}");
        }
    }
    let mut by_hand = new();
    let sampler = potluck_data::Sampler::new(5, 23, 6);
    for step in 1..=12 {
        let indices: Vec<u64> = (0..6).map(|slot| sampler.sample(step, slot).index).collect();
        by_hand.step(&Waves.rows(Split::Train, &indices).unwrap(), 0.05).unwrap();
    }
    assert_eq!(bits(&by_hand), bits(&whole));
    let even = fitted("cpu*2").0;
    assert_ne!(bits(&even), bits(&whole), "shares change the order of sums");
}

#[test]
fn a_restored_trainer_has_the_changes_of_shares_that_lead_to_its_state() {
    let measured =
        TrainerOptions { shares: Shares::Measured, follows_speed: true, ..options("cpu*2") };
    let mut trainer = Trainer::on_data(wave_model(), &measured, &waves()).unwrap();
    let shares = trainer.placement().shares();
    let change = |step| ShareChange { step, shares: shares.clone() };
    trainer.session.placement.share_history = vec![change(1), change(3)];
    trainer.fit(&waves(), &steps(5)).unwrap();
    let place = tempfile::tempdir().unwrap();
    trainer.save(place.path()).unwrap();
    let loaded = Trainer::load(wave_model(), &measured, place.path()).unwrap();
    assert_eq!(loaded.placement().share_history, [change(1), change(3)]);
    // The shares of the open devices may be others than those that led to the save.
    trainer.fit(&waves(), &steps(7)).unwrap();
    for _ in 0..2 {
        trainer.restore(place.path()).unwrap();
        assert_eq!(trainer.placement().share_history, [change(6)]);
    }
    let anew = TrainerOptions { retune: true, ..measured };
    let loaded = Trainer::load(wave_model(), &anew, place.path()).unwrap();
    let history = &loaded.placement().share_history;
    assert_eq!((history.len(), history[0].step), (1, 6));
    assert_eq!(history[0].shares, loaded.placement().shares());
}

#[test]
fn later_shares_have_enough_samples_for_batch_normalization() {
    let mut b = Builder::new();
    let x = b.input("x", &[1, 2]);
    let y = b.input("y", &[1, 1]);
    let w = b.parameter("w", &[1, 2], Init::Normal { std: 0.5 });
    let h = b.linear(x, w, None).unwrap();
    let h = b.batch_norm("norm", h).unwrap();
    b.squared_error_loss(h, y).unwrap();
    let graph = b.finish();
    let opened = |shares: [u32; 2]| {
        let share_changes = vec![ShareChange { step: 5, shares: shares.to_vec() }];
        let even = TrainerOptions { micro_batch_size: 6, ..options("cpu*2") };
        Trainer::new(graph.clone(), &TrainerOptions { share_changes, ..even })
    };
    let notes = opened([4, 2]).unwrap().notes().join("\n");
    assert!(notes.contains("as few as 2 samples"), "{notes}");
    let error = opened([5, 1]).err().unwrap().to_string();
    assert!(error.contains("one value per channel"), "{error}");
}

#[test]
fn changes_of_shares_that_fit_no_trainer_are_refused() {
    let refused = |shares: Shares, changes: &[(u64, &[u32])]| {
        let mut options = TrainerOptions { shares, ..options("cpu*2") };
        for (step, shares) in changes {
            options.share_changes.push(ShareChange { step: *step, shares: shares.to_vec() });
        }
        Trainer::new(wave_model(), &options).err().unwrap().to_string()
    };
    let measured = refused(Shares::Measured, &[(5, &[1, 5])]);
    assert!(measured.contains("need shares that are not measured"), "{measured}");
    for wrong in [&[(5, &[1, 4][..])][..], &[(1, &[1, 5])], &[(5, &[0, 6])]] {
        let error = refused(Shares::Even, wrong);
        assert!(error.contains("with the sum of the batch"), "{wrong:?}: {error}");
    }
    let order = refused(Shares::Even, &[(5, &[1, 5]), (5, &[2, 4])]);
    assert!(order.contains("in the order of their steps"), "{order}");
    let devices = refused(Shares::Even, &[(5, &[2, 2, 2])]);
    assert!(devices.contains("TrainerOptions::share_changes has '5: 2 2 2'"), "{devices}");
}

#[test]
fn a_call_is_the_steps_that_the_sampler_draws_and_epochs_end_with_their_last_sample() {
    let (whole, _) = fitted("cpu");
    let mut by_hand = Trainer::new(wave_model(), &options("cpu")).unwrap();
    let sampler = potluck_data::Sampler::new(5, 23, 6);
    for step in 1..=12 {
        let indices: Vec<u64> = (0..6).map(|slot| sampler.sample(step, slot).index).collect();
        by_hand.step(&Waves.rows(Split::Train, &indices).unwrap(), 0.05).unwrap();
    }
    assert_eq!(bits(&by_hand), bits(&whole));

    let mut trainer = Trainer::new(wave_model(), &options("cpu")).unwrap();
    for (epochs, steps) in [(1, 4), (3, 12), (2, 12)] {
        let options = FitOptions::constant(FitLength::Epochs(epochs), 0.05);
        assert_eq!(trainer.fit(&waves(), &options).unwrap().steps, steps);
    }
    assert_eq!(bits(&trainer), bits(&whole));
}

#[test]
fn devices_are_timed_on_the_data_and_refused_data_are_told() {
    let measured = TrainerOptions { shares: Shares::Measured, ..options("cpu*2") };
    let trainer = Trainer::on_data(wave_model(), &measured, &waves()).unwrap();
    assert!(trainer.notes().join("\n").contains("measuring 2 devices"));
    let refused = |graph: Graph| {
        let by_fit = Trainer::new(graph.clone(), &options("cpu")).unwrap().fit(&waves(), &steps(1));
        let told = by_fit.unwrap_err().to_string();
        let by_new = Trainer::on_data(graph, &measured, &waves()).err().unwrap();
        assert_eq!(by_new.to_string(), told);
        told
    };
    assert_eq!(refused(graph(true)), "the data have y, which the model does not take");
    let mut b = Builder::new();
    let [x, y, z] = [("x", 2), ("y", 1), ("z", 1)].map(|(name, n)| b.input(name, &[1, n]));
    let w = b.parameter("w", &[1, 2], Init::Zeros);
    let h = b.linear(x, w, None).unwrap();
    let h = b.add(h, z).unwrap();
    b.squared_error_loss(h, y).unwrap();
    let missing = "the graph has the input 'z', for which the data have no values";
    assert_eq!(refused(b.finish()), missing);
}

#[test]
fn a_callback_sees_what_happens_and_ends_the_call() {
    let mut trainer = Trainer::new(wave_model(), &options("cpu")).unwrap();
    let mut seen = Vec::new();
    let report = trainer.fit_with(&waves(), &steps(12), &mut |event| {
        seen.push(match event {
            Event::Started { done, steps, .. } => format!("{done} of {steps}"),
            Event::Step(record) => format!("step {}", record.step),
            Event::Evaluation(record) => format!("evaluation {}", record.step),
            Event::Ended => "ended".into(),
            _ => return ControlFlow::Continue(()),
        });
        match event {
            Event::Step(record) if record.step == 5 => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    });
    let report = report.unwrap();
    assert_eq!((report.end, report.steps), (FitEnd::Stopped, 5));
    let expected = "0 of 12, step 1, step 2, step 3, step 4, evaluation 4, step 5, evaluation 5, \
                    ended";
    assert_eq!(seen.join(", "), expected);
}

/// Waves; the samples of one split take their time.
struct Slow {
    split: Split,
    ms: u64,
}

impl Dataset for Slow {
    fn inputs(&self) -> Vec<DatasetInput> {
        Waves.inputs()
    }

    fn len(&self, split: Split) -> u64 {
        Waves.len(split)
    }

    fn evaluation_samples(&self, split: Split) -> Vec<u64> {
        Waves.evaluation_samples(split)
    }

    fn fingerprint(&self) -> String {
        "slow".into()
    }

    fn rows(&self, split: Split, indices: &[u64]) -> Result<NamedInputs, DataError> {
        if split == self.split {
            std::thread::sleep(Duration::from_millis(self.ms));
        }
        Waves.rows(split, indices)
    }
}

#[test]
fn the_progress_of_a_slow_evaluation_moves_with_each_micro_batch_and_its_loss_is_the_same() {
    let fit = FitOptions { eval_every: 2, ..FitOptions::constant(FitLength::Steps(2), 0.05) };
    let evaluated = |data: Arc<dyn Dataset>| {
        let mut trainer = Trainer::new(wave_model(), &options("cpu")).unwrap();
        let mut seen = Vec::new();
        let report = trainer.fit_with(&data, &fit, &mut |event| {
            if let Event::Evaluating { done, total, .. } = event {
                seen.push((*done, *total));
            }
            ControlFlow::Continue(())
        });
        (seen, report.unwrap().val_loss.unwrap().to_bits())
    };
    let (_, loss) = evaluated(waves());
    // Longer than a job.
    let (seen, slow_loss) = evaluated(Arc::new(Slow { split: Split::Validation, ms: 210 }));
    assert_eq!(seen, [(2, 5), (4, 5), (5, 5)]);
    assert_eq!(slow_loss, loss);
}

#[test]
fn a_step_lasts_from_the_wait_for_its_samples_and_counts_what_its_task_does() {
    #[derive(Debug)]
    struct Counted;
    impl Task for Counted {
        fn unit(&self) -> Unit {
            Unit::Tokens
        }
        fn summary(&self) -> String {
            String::new()
        }
    }
    let slow: Arc<dyn Dataset> = Arc::new(Slow { split: Split::Train, ms: 10 });
    let mut records = Vec::new();
    let mut fitted = |fit: FitOptions| {
        let mut trainer = Trainer::new(wave_model(), &options("cpu")).unwrap();
        trainer
            .fit_with(&slow, &fit, &mut |event| {
                if let Event::Step(record) = event {
                    records.push((record.unit, record.count, record.ms));
                }
                ControlFlow::Continue(())
            })
            .unwrap();
    };
    let fit = FitOptions::constant(FitLength::Steps(3), 0.05);
    fitted(FitOptions { task: Arc::new(Counted), ..fit.clone() });
    fitted(fit);
    // Reading the samples of a step takes 30 ms, and training on them hardly any.
    let waited: f64 = records.iter().map(|(.., ms)| ms).sum();
    assert!(waited > 90.0, "{records:?}");
    // Each of six samples has one target.
    let units: Vec<_> = records.iter().map(|(unit, count, _)| (*unit, *count)).collect();
    assert_eq!(units[..3], [(Unit::Tokens, 6); 3]);
    assert_eq!(units[3..], [(Unit::Samples, 6); 3]);
}

#[test]
fn without_improvement_a_call_ends_and_the_best_parameters_are_kept() {
    let fit = |calls: &[u64]| {
        let mut trainer = Trainer::new(wave_model(), &options("cpu")).unwrap();
        // The model learns, and then is spoiled.
        let constant = |count, lr| FitOptions::constant(FitLength::Steps(count), lr);
        let good = FitOptions { eval_every: 2, keep_best: true, ..constant(8, 0.05) };
        let learned = trainer.fit(&waves(), &good).unwrap();
        let mut end = None;
        for last in calls {
            let bad = FitOptions { eval_every: 2, patience: 3, ..constant(*last, 100.0) };
            end = Some(trainer.fit(&waves(), &bad).unwrap());
        }
        (trainer, learned, end.unwrap())
    };
    let (mut trainer, learned, end) = fit(&[40]);
    let best = end.best.unwrap();
    assert_eq!(end.best, learned.best);
    assert_eq!((trainer.steps(), end.end), (best.step + 6, FitEnd::NoImprovement));
    assert!(end.val_loss.unwrap() > best.val_loss);
    // In pieces, a call ends where one in a piece does. The evaluation at the end of a piece counts
    // as every other.
    for (first, last) in [(4, 6), (3, 4)] {
        let (pieces, _, of_pieces) = fit(&[best.step + first, 40]);
        assert_eq!((pieces.steps(), of_pieces.end), (best.step + last, FitEnd::NoImprovement));
    }

    trainer.set_parameters(&learned.best_parameters.unwrap()).unwrap();
    let again = trainer.evaluate(&waves(), Split::Validation, 0).unwrap();
    assert_eq!(again.loss, best.val_loss);
}

#[test]
fn rates_that_are_no_numbers_are_refused() {
    let refused = |optimizer: Optimizer| {
        let options = TrainerOptions { optimizer, ..options("cpu") };
        Trainer::new(wave_model(), &options).err().unwrap().to_string()
    };
    let adam = |beta1| Optimizer::AdamW { beta1, beta2: 0.9, eps: 1e-8, weight_decay: 0.0 };
    assert!(refused(adam(1.0)).contains("beta1 must be at least 0 and below 1"));
    let sgd = Optimizer::Sgd { momentum: f32::NAN, weight_decay: 0.0 };
    assert!(refused(sgd).contains("momentum must be at least 0 and finite, and is NaN"));
    let mut trainer = Trainer::new(wave_model(), &options("cpu")).unwrap();
    let before = bits(&trainer);
    for rate in [f64::NAN, -1.0, f64::INFINITY] {
        let fit = FitOptions::constant(FitLength::Steps(1), rate);
        let error = trainer.fit(&waves(), &fit).err().unwrap().to_string();
        assert!(error.contains("FitOptions::schedule: lr must be 0 or more"), "{error}");
    }
    let schedule = FitOptions::constant(FitLength::Steps(1), 0.05).schedule;
    let cycle = OneCycle { pct_start: 0.3, div_factor: 0.0, final_div_factor: 1e4 };
    for (decay, field) in [
        (Decay::OneCycle(cycle), "div_factor"),
        (Decay::Exponential { gamma: f64::NAN }, "gamma"),
        (Decay::Step { step_size: 0, gamma: 0.5 }, "step_size"),
    ] {
        let fit = FitOptions::new(FitLength::Steps(1), Schedule { decay, ..schedule });
        let error = trainer.fit(&waves(), &fit).unwrap_err().to_string();
        assert!(error.contains(&format!("FitOptions::schedule: {field} must be")), "{error}");
    }
    let error = trainer.step(&[], f64::NAN).unwrap_err();
    assert!(matches!(error, TrainError::Library(_)), "{error}");
    assert!(error.to_string().contains("a learning rate must be 0 or more"), "{error}");
    assert_eq!(bits(&trainer), before);
}

/// Classes of points, all of them masked.
struct Masked;

impl Dataset for Masked {
    fn inputs(&self) -> Vec<DatasetInput> {
        vec![
            DatasetInput { name: "x", dtype: DType::F32, elements: 2 },
            DatasetInput { name: "targets", dtype: DType::U32, elements: 1 },
        ]
    }

    fn len(&self, _: Split) -> u64 {
        12
    }

    fn evaluation_samples(&self, _: Split) -> Vec<u64> {
        Vec::new()
    }

    fn fingerprint(&self) -> String {
        "masked".into()
    }

    fn rows(&self, _: Split, indices: &[u64]) -> Result<NamedInputs, DataError> {
        let (count, ignored) = (indices.len(), potluck_graph::IGNORE_INDEX);
        let x = HostTensor::Float(vec![0.5; 2 * count]);
        Ok(vec![("x", x), ("targets", HostTensor::Int(vec![ignored; count]))])
    }
}

/// A batch without a target that counts is no divergence.
#[test]
fn batches_without_targets_are_skipped_with_a_note() {
    let mut b = Builder::new();
    let (x, targets) = (b.input("x", &[1, 2]), b.input_ids("targets", &[1]));
    let w = b.parameter("w", &[3, 2], Init::Normal { std: 0.5 });
    let logits = b.linear(x, w, None).unwrap();
    b.cross_entropy_loss(logits, targets).unwrap();
    let mut trainer = Trainer::new(b.finish(), &options("cpu")).unwrap();
    let before = bits(&trainer);
    let fit = FitOptions { skipped_steps_max: 1, ..FitOptions::constant(FitLength::Steps(3), 0.1) };
    let mut notes = Vec::new();
    let data: Arc<dyn Dataset> = Arc::new(Masked);
    let report = trainer.fit_with(&data, &fit, &mut |event| {
        if let Event::Note(text) = event {
            notes.push(text.clone());
        }
        ControlFlow::Continue(())
    });
    let report = report.unwrap();
    assert_eq!((report.steps, report.loss, bits(&trainer)), (3, None, before));
    let rows = data.rows(Split::Train, &[0, 1, 2, 3, 4, 5]).unwrap();
    let evaluated = trainer.evaluate_rows(6, &rows).unwrap();
    assert!(evaluated.loss.is_nan() && evaluated.targets == 0, "{evaluated:?}");
    let noted = notes.iter().filter(|note| note.contains(" was skipped: no target of its batch"));
    assert_eq!(noted.count(), 1, "{notes:?}");
    let error = trainer.fit(&data, &FitOptions::constant(FitLength::Steps(500), 0.1)).unwrap_err();
    assert!(error.to_string().contains("no target of the last 100 batches counts"), "{error}");
    assert_eq!(trainer.steps(), 103);
}

#[test]
fn a_directory_gets_the_start_the_best_and_the_newest() {
    let place = tempfile::tempdir().unwrap();
    let directory = Some(place.path().to_path_buf());
    let fit = FitOptions { directory, save_every: 3, ..steps(11) };
    let mut trainer = Trainer::new(wave_model(), &options("cpu*2")).unwrap();
    let mut saved = Vec::new();
    let report = trainer.fit_with(&waves(), &fit, &mut |event| {
        saved.extend(match event {
            Event::Checkpoint { step } => Some(*step),
            _ => None,
        });
        ControlFlow::Continue(())
    });
    let best = report.unwrap().best.unwrap();
    assert_eq!(saved.first(), Some(&0));
    assert!([3, 6, 9, 11].iter().all(|step| saved.contains(step)), "{saved:?}");
    let store = crate::checkpoint::Store::open_to_read(place.path());
    assert_eq!(store.best().unwrap(), Some(best.step));
    let steps = store.steps().unwrap();
    assert!(steps.ends_with(&[11]) && steps.contains(&best.step) && steps.len() <= 3, "{steps:?}");
    assert_eq!(store.load_best().unwrap().0.meta.best, Some(best));
}

#[test]
fn saves_of_an_earlier_training_are_set_aside_with_a_note() {
    let place = tempfile::tempdir().unwrap();
    let directory = Some(place.path().to_path_buf());
    let fit = FitOptions { directory, ..FitOptions::constant(FitLength::Steps(3), 0.05) };
    let mut first = Trainer::new(wave_model(), &options("cpu")).unwrap();
    first.fit(&waves(), &fit).unwrap();
    let seeded = TrainerOptions { seed: 6, ..options("cpu") };
    let mut second = Trainer::new(wave_model(), &seeded).unwrap();
    let mut told = Vec::new();
    let report = second.fit_with(&waves(), &fit, &mut |event| {
        if let Event::Note(text) = event {
            told.push(text.clone());
        }
        ControlFlow::Continue(())
    });
    report.unwrap();
    let checkpoints = place.path().join("checkpoints");
    let path = |name: &str| checkpoints.join(name).display().to_string();
    let expected = [
        format!("set aside: 1 later checkpoint as {}", path("step-00000003.aside")),
        format!("set aside: the checkpoint of step 0 as {}", path("step-00000000.aside")),
    ];
    for text in expected {
        assert!(told.contains(&text) && second.notes().contains(&text), "{text}: {told:?}");
    }
    let store = crate::checkpoint::Store::open_to_read(place.path());
    assert_eq!(store.steps().unwrap(), [0, 3]);
}

/// Data set like [`Waves`], with a name and rows of its own.
struct OtherWaves<R> {
    name: &'static str,
    rows: R,
}

impl<R> Dataset for OtherWaves<R>
where
    R: Fn(Split, &[u64]) -> Result<NamedInputs, DataError> + Send + Sync,
{
    fn inputs(&self) -> Vec<DatasetInput> {
        Waves.inputs()
    }
    fn len(&self, split: Split) -> u64 {
        Waves.len(split)
    }
    fn evaluation_samples(&self, split: Split) -> Vec<u64> {
        Waves.evaluation_samples(split)
    }
    fn fingerprint(&self) -> String {
        self.name.into()
    }
    fn rows(&self, split: Split, indices: &[u64]) -> Result<NamedInputs, DataError> {
        (self.rows)(split, indices)
    }
}

fn other_waves<R>(name: &'static str, rows: R) -> Arc<dyn Dataset>
where
    R: Fn(Split, &[u64]) -> Result<NamedInputs, DataError> + Send + Sync + 'static,
{
    Arc::new(OtherWaves { name, rows })
}

#[test]
fn evaluations_of_other_data_are_not_compared() {
    let (mut trainer, report) = fitted("cpu");
    let others = other_waves("others", |split, indices| {
        let mut rows = Waves.rows(split, indices)?;
        rows[1].1 = HostTensor::Float(vec![50.0; indices.len()]);
        Ok(rows)
    });
    let second = trainer.fit(&others, &steps(16)).unwrap();
    let (was, is) = (report.best.unwrap(), second.best.unwrap());
    assert!(is.step == 16 && is.val_loss > was.val_loss, "{was:?} {is:?}");
}

#[test]
fn data_set_that_panics_is_an_error_and_the_trainer_goes_on() {
    let (mut trainer, report) = fitted("cpu");
    for split in [Split::Train, Split::Validation] {
        let data = other_waves("panicking", move |of, indices| {
            assert!(of != split, "no rows of {of}");
            Waves.rows(of, indices)
        });
        let options = FitOptions { eval_every: 1, ..steps(report.steps + 4) };
        let error = trainer.fit(&data, &options).unwrap_err().to_string();
        let told = format!("the data set: panicked: no rows of {split}");
        assert!(error.contains(&told), "{error}");
        assert!(!trainer.parameters().unwrap().is_empty());
    }
}

#[test]
fn best_parameters_outlive_a_call_that_fails() {
    let mut trainer = Trainer::new(wave_model(), &options("cpu")).unwrap();
    let data = other_waves("ending", |split, indices| {
        let is_last = split == Split::Train && indices.contains(&(Waves.len(split) - 1));
        assert!(!is_last, "the last sample");
        Waves.rows(split, indices)
    });
    let options = FitOptions { eval_every: 1, keep_best: true, ..steps(100) };
    let error = trainer.fit(&data, &options).unwrap_err().to_string();
    assert!(error.contains("panicked: the last sample"), "{error}");
    assert!(trainer.steps() > 0, "no step before the last sample");
    let best = trainer.take_best_parameters().unwrap();
    trainer.set_parameters(&best).unwrap();
    assert!(trainer.take_best_parameters().is_none());
}

#[test]
fn a_call_without_evaluations_keeps_the_best_and_refuses_options_that_need_them() {
    let (mut trainer, report) = fitted("cpu");
    let silent = FitOptions::constant(FitLength::Steps(13), 0.05);
    let between = trainer.fit(&waves(), &FitOptions { eval_samples: 2, ..silent.clone() }).unwrap();
    assert!(report.best.is_some() && between.best == report.best);
    let needing = [
        ("patience", FitOptions { patience: 1, ..silent.clone() }),
        ("keep_best", FitOptions { keep_best: true, ..silent }),
    ];
    for (name, options) in needing {
        let told = trainer.fit(&waves(), &options).unwrap_err().to_string();
        assert!(told.starts_with(name) && told.ends_with("set eval_every"), "{told}");
    }
    // An evaluation of other samples is not compared.
    let fewer = FitOptions { eval_samples: 2, ..steps(14) };
    let best = trainer.fit(&waves(), &fewer).unwrap().best.unwrap();
    assert_eq!((best.step, best.samples), (14, 2));
}

#[test]
fn a_length_that_is_reached_already_is_noted() {
    let mut trainer = Trainer::new(wave_model(), &options("cpu")).unwrap();
    let epoch = FitOptions::constant(FitLength::Epochs(1), 0.05);
    for told in ["", "this one ends with step 4, and 4 are taken already"] {
        let mut notes = String::new();
        let report = trainer.fit_with(&waves(), &epoch, &mut |event| {
            if let Event::Note(note) = event {
                notes.push_str(note);
            }
            ControlFlow::Continue(())
        });
        let report = report.unwrap();
        assert_eq!((report.end, report.steps), (FitEnd::Done, 4));
        assert_eq!((report.loss.is_none(), notes.ends_with(told)), (!told.is_empty(), true));
        assert_eq!(notes.is_empty(), told.is_empty(), "{notes}");
    }
}

#[test]
fn an_augmentation_is_one_of_pictures_like_those_of_the_data() {
    use potluck_data::{Augmentation, Normalization, SampleDescription, TargetNames};
    let mut trainer = Trainer::new(wave_model(), &options("cpu")).unwrap();
    let mut fitted = |shape: &[usize]| {
        let samples = SampleDescription {
            shape: shape.to_vec(),
            columns: Vec::new(),
            target_columns: Vec::new(),
            targets: TargetNames::Values(vec!["y".into()]),
            normalization: Normalization::default(),
        };
        let augmentation = Some(Augmentation::new(&samples, 1, true).unwrap());
        let options = FitOptions::constant(FitLength::Steps(1), 0.05);
        let options = FitOptions { augmentation, ..options };
        trainer.fit(&waves(), &options).map_or_else(|e| e.to_string(), |_| "trains".into())
    };
    let told = fitted(&[1, 1, 3]);
    assert!(told.contains("pictures of 1 x 1 x 3 values, and the data have 2"), "{told}");
    assert_eq!(fitted(&[1, 1, 2]), "trains");
    assert_eq!(fitted(&[2, 1, 1]), "trains");
}
