//! Several devices in one run: shares, sums, order, equal parameters, faults, and checkpoints, on
//! CPU devices and on the adapters that are found.

use std::sync::OnceLock;
use std::time::Instant;

use crate::process::{Desk, Ran, adapter_selectors, finish, is_swiftshader};
use ndarray::{Array1, Array2};
use potluck_core::HostTensor;
use potluck_core::rng::Key;
use potluck_data::builtin;
use potluck_graph::model::{MlpConfig, MlpLoss, mlp};
use potluck_graph::optim::Optimizer;
use potluck_graph::{Graph, Unary};
use potluck_kernels::device::INJECTED_HANG_MAX;
use potluck_parallel::ReduceSite;
use potluck_train::{Shares, Trainer, TrainerOptions};

/// The CPU device and two adapters of unlike makers, or as many as there are.
pub fn unlike() -> String {
    with_cpus(adapter_selectors(), 1)
}

/// Devices as [`unlike`], for tests of many processes: SwiftShader only where there is no other
/// adapter.
pub fn warm() -> String {
    let mut names = adapter_selectors();
    if !names.iter().all(|name| is_swiftshader(name)) {
        names.retain(|name| !is_swiftshader(name));
    }
    with_cpus(names, 1)
}

/// The first two of some adapters and so many CPU devices, or CPU devices instead of adapters.
pub fn with_cpus(mut names: Vec<String>, cpus: usize) -> String {
    names.truncate(2);
    names.push(match cpus + 2 - names.len() {
        1 => "cpu".into(),
        cpus => format!("cpu*{cpus}"),
    });
    names.join(",")
}

const CLASSES: u32 = 5;
const WIDTH: usize = 70;
const BATCH: usize = 12;

fn classifier() -> Graph {
    let widths = vec![WIDTH, 130, CLASSES as usize];
    mlp(&MlpConfig { widths, activation: Unary::Gelu, dropout: 0.0, loss: MlpLoss::CrossEntropy })
        .unwrap()
}

/// A batch of which some targets do not count: all of the last device's but one, so that shares
/// of samples are not shares of targets.
fn batch(step: u64) -> [(&'static str, HostTensor); 2] {
    let key = Key::new(9).step(step);
    let inputs =
        Array2::from_shape_fn((BATCH, WIDTH), |(i, j)| key.normal((i * WIDTH + j) as u64) as f32);
    let ignored = u32::MAX;
    let targets = Array1::from_shape_fn(BATCH, |i| match i {
        1 | 10 => ignored,
        i => key.words([i as u32, 7])[0] % CLASSES,
    });
    [("inputs", HostTensor::from(inputs)), ("targets", HostTensor::from(targets))]
}

/// Losses, gradient norms and final parameters of some steps.
fn trained(devices: &str, shares: &[usize], micro_batch: usize) -> (Vec<f64>, Vec<f32>) {
    let optimizer = Optimizer::Sgd { momentum: 0.9, weight_decay: 0.01 };
    let options = TrainerOptions {
        shares: if shares.is_empty() { Shares::Even } else { Shares::Fixed(shares.to_vec()) },
        reduce_site: Some(ReduceSite::Host),
        micro_batch_size: micro_batch,
        clip: 0.5,
        tune_s: 0.0,
        ..TrainerOptions::new(devices, optimizer, BATCH)
    };
    let mut trainer = Trainer::new(classifier(), &options).unwrap();
    let mut figures = Vec::new();
    for step in 1..=5 {
        let done = trainer.step(&batch(step), 0.2).unwrap();
        assert!(done.updated);
        figures.extend([done.loss, done.gradient_norm]);
    }
    let parameters = trainer.parameters().unwrap();
    (figures, parameters.into_iter().flat_map(|tensor| tensor.values).collect())
}

#[test]
fn masked_targets_in_shares_7_3_2_are_one_batch_of_12() {
    let _turn = crate::common::turn();
    let (figures, parameters) = trained("cpu", &[], BATCH);
    for devices in ["cpu*3", &unlike()] {
        for micro_batch in [12, 2] {
            let (shared, others) = trained(devices, &[7, 3, 2], micro_batch);
            for (a, b) in figures.iter().zip(&shared) {
                assert!((a - b).abs() <= 1e-5 * a.abs(), "{devices}: {a} and {b}");
            }
            let nmse = crate::common::nmse(&others, &parameters);
            assert!(nmse <= 1e-9, "{devices}, micro-batches of {micro_batch}: {nmse}");
        }
    }
}

/// The mean of the ranks' means, which a trainer that forgets the counts computes, must not pass
/// for the above.
#[test]
fn the_mean_of_means_is_not_the_mean() {
    let after = |rows: std::ops::Range<usize>| {
        let optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
        let options = TrainerOptions::new("cpu", optimizer, rows.len());
        let mut trainer = Trainer::new(classifier(), &options).unwrap();
        let [(_, HostTensor::Float(inputs)), (_, HostTensor::Int(targets))] = batch(1) else {
            panic!("inputs are floats and targets integers")
        };
        let part = [
            ("inputs", HostTensor::Float(inputs[rows.start * WIDTH..rows.end * WIDTH].to_vec())),
            ("targets", HostTensor::Int(targets[rows].to_vec())),
        ];
        trainer.step(&part, 0.2).unwrap();
        let parameters = trainer.parameters().unwrap();
        parameters.into_iter().flat_map(|tensor| tensor.values).collect::<Vec<f32>>()
    };
    let whole = after(0..12);
    let parts = [after(0..7), after(7..10), after(10..12)];
    let mean: Vec<f32> =
        (0..whole.len()).map(|i| parts.iter().map(|part| part[i]).sum::<f32>() / 3.0).collect();
    let nmse = crate::common::nmse(&mean, &whole);
    assert!(nmse > 1e-6, "{nmse}");
}

#[test]
fn two_runs_of_unlike_devices_end_in_the_same_bits() {
    let _turn = crate::common::turn();
    let devices = unlike();
    let once = trained(&devices, &[6, 3, 3], 3);
    assert_eq!(trained(&devices, &[6, 3, 3], 3), once);
}

const SETTINGS: &str = "--quiet --steps 12 --set train.batch=12 --set model.dropout=0.1 \
     --set train.micro_batch_size=3 --set train.checkpoint_every=4 --set train.eval_every=6 \
     --set train.tune_s=0 \
     --set parallel.shares=7,3,2 --set faults.hash_every=1 --set faults.device_timeout_s=10";
const STEPS: u64 = 12;

fn line(devices: &str, more: &str) -> String {
    format!("train tiny.toml --data text.txt --out run {SETTINGS} --devices {devices} {more}")
}

fn train(desk: &Desk, fault: &str, devices: &str, more: &str) -> Ran {
    desk.run_with(fault, &line(devices, more))
}

/// The run on [`warm`] devices that nothing happens to, which is made once.
fn undisturbed() -> &'static Desk {
    static UNDISTURBED: OnceLock<Desk> = OnceLock::new();
    UNDISTURBED.get_or_init(|| {
        let desk = Desk::certified();
        train(&desk, "", &warm(), "").ok();
        desk
    })
}

fn state(desk: &Desk) -> [Vec<u8>; 2] {
    ["parameters.safetensors", "moments.safetensors"]
        .map(|file| desk.checkpoint("run", STEPS, file))
}

#[test]
fn overlap_chunks_and_resuming_change_no_bit_and_the_star_only_the_order() {
    let (devices, desk) = (warm(), undisturbed());
    let whole = state(desk);
    let same = |more: &str| {
        let other = Desk::certified();
        train(&other, "", &devices, more).ok();
        state(&other) == whole
    };
    assert!(same("--set parallel.overlap=false"));
    assert!(same("--set parallel.reduce_site=host"));
    assert!(same("--set parallel.reduce_site=device"), "addition is exact on every device");
    // Norms are added up by chunk, so clipping would see other last bits. There are more chunks
    // than places to read them back to.
    let unclipped = Desk::certified();
    train(&unclipped, "", &devices, "--set optim.clip=0").ok();
    let small = Desk::certified();
    train(&small, "", &devices, "--set optim.clip=0 --set parallel.message_kib=1").ok();
    assert!(state(&small) == state(&unclipped), "smaller chunks change a sum");

    let resumed = Desk::certified();
    train(&resumed, "lost@backward:7/1", &devices, "").ended(75);
    resumed.run(&format!("train --quiet --resume run --devices {devices}")).ok();
    assert!(state(&resumed) == whole, "a resumed run ends in other bits");
    assert_eq!(resumed.losses("run"), desk.losses("run"));

    let star = Desk::certified();
    train(&star, "", &devices, "--set parallel.collective=star").ok();
    for (a, b) in star.losses("run").iter().zip(desk.losses("run")) {
        assert!((a - b).abs() < 1e-4, "star {a}, ring {b}");
    }
}

#[test]
fn a_checkpoint_of_three_devices_goes_on_with_one_or_two_and_back() {
    let three = unlike();
    let desk = Desk::certified();
    train(&desk, "", &three, "").ok();
    let mut before = "run".to_string();
    // Nothing is left to train, so what is saved is what was restored and gathered.
    for (world, devices) in [(1, "cpu"), (2, "cpu*2"), (5, "cpu*5"), (3, &three)] {
        let now = format!("on-{world}");
        let line = format!(
            "train --quiet --resume {before} --out {now} --devices {devices} --set \
             parallel.balance=fixed --set parallel.shares=[] --set train.sample_tokens=0"
        );
        desk.run(&line).ok();
        for file in ["parameters.safetensors", "moments.safetensors"] {
            let same = desk.checkpoint(&now, STEPS, file) == desk.checkpoint("run", STEPS, file);
            assert!(same, "{file} on {devices}");
        }
        before = now;
    }
}

#[test]
fn a_flipped_bit_is_named_with_its_device_and_stops_the_run_or_is_repaired() {
    let devices = warm();
    for rank in [0, 2] {
        let desk = Desk::certified();
        let ran = train(&desk, &format!("flip@gather:6/{rank}"), &devices, "").ended(75);
        let error = ran.line("error:");
        assert!(error.contains(&format!("(rank {rank})")), "{error}");
        assert!(error.contains("after step 6"), "{error}");
        assert!(error.contains("1 of "), "{error}");
    }
    // Where only checkpoints compare, too: the one of step 8 is not written.
    let desk = Desk::certified();
    let rarely = "--set faults.hash_every=0";
    let ran = train(&desk, "flip@gather:8/1", &devices, rarely).ended(75);
    assert!(ran.line("error:").contains("after step 8"), "{}", ran.err);
    assert!(!desk.path("run/checkpoints/step-00000008").exists());
    let desk = Desk::certified();
    let repair = "--set faults.on_mismatch=repair";
    let ran = train(&desk, "flip@gather:6/1", &devices, repair).ok();
    assert!(ran.line("warning:").contains("were repaired"), "{}", ran.err);
    assert!(state(&desk) == state(undisturbed()), "a repaired run has other bits");
}

#[test]
fn a_fault_of_any_device_at_any_point_ends_the_run_for_all_and_names_it() {
    let (devices, desk) = (warm(), Desk::certified());
    let resume = format!("train --quiet --resume run --devices {devices}");
    // Each fault ends the run that resumed after the one before it, from the checkpoint of step 4.
    let mut is_first = true;
    for point in ["forward", "backward", "reduce", "verdict", "update", "gather"] {
        for (fault, says) in [("lost", "was lost"), ("out-of-memory", "out of memory")] {
            let rank = point.len() % 3;
            let fault = format!("{fault}@{point}:7/{rank}");
            let ran = if is_first {
                train(&desk, &fault, &devices, "")
            } else {
                desk.run_with(&fault, &resume)
            }
            .ended(75);
            is_first = false;
            let error = ran.line("error:");
            assert!(error.contains(&format!("rank {rank}: ")), "{fault}: {error}");
            assert!(error.contains(says), "{fault}: {error}");
        }
    }
    desk.run(&resume).ok();
    assert!(state(&desk) == state(undisturbed()), "other bits after resuming");
}

#[test]
fn the_command_after_a_fault_leaves_the_device_out() {
    let devices = unlike();
    for rank in [0, 2] {
        let desk = Desk::certified();
        let ran = train(&desk, &format!("lost@backward:7/{rank}"), &devices, "").ended(75);
        let error = ran.line("error:");
        let words = "step-00000006; continue without that device with: potluck train --resume run \
                     --devices ";
        assert!(error.contains(words), "{rank} of {devices}: {error}");
        let failed = format!("error: rank {rank}: ");
        let name = error.strip_prefix(&failed).and_then(|rest| rest.split(": ").next()).unwrap();
        desk.run_suggested(error).ok();
        assert_eq!(desk.losses("run").len() as u64, STEPS);
        let resolved = std::fs::read_to_string(desk.path("run/resolved.toml")).unwrap();
        let used = resolved.lines().filter(|line| line.starts_with("device = "));
        assert_eq!(used.filter(|line| line.contains(name)).count(), 0, "{name}: {resolved}");
    }
}

/// One device after the other is left out, as by the commands that a run prints which stops.
#[test]
fn a_run_goes_on_by_itself_as_it_would_by_hand() {
    // Two devices are lost.
    if unlike().contains('*') {
        return crate::process::skip("two adapters and the processor are needed");
    }
    // Shares of three devices would be measured anew on two.
    let settings = SETTINGS.replace("parallel.shares=7,3,2", "parallel.balance=fixed");
    let train = |desk: &Desk, fault: &str, more: &str| {
        let (head, devices) = ("train tiny.toml --data text.txt --out run", unlike());
        desk.run_with(fault, &format!("{head} {settings} --devices {devices} {more}"))
    };
    let (first, second) = ("lost@backward:5/1", "out-of-memory@update:11/1");
    let by_hand = Desk::certified();
    let ran = train(&by_hand, first, "").ended(75);
    let ran = by_hand.run_suggested_with(second, ran.line("error:")).ended(75);
    by_hand.run_suggested(ran.line("error:")).ok();

    let desk = Desk::certified();
    let on_loss = "--set faults.on_loss=continue --set tensorboard=true --trace trace.json";
    let ran = train(&desk, &format!("{first},{second}"), on_loss).ok();
    let going_on: Vec<&str> =
        ran.err.lines().filter(|line| line.contains("continuing from")).collect();
    let [to_two, to_one] = going_on[..] else { panic!("{}", ran.err) };
    assert!(to_two.contains("from step 4 on ") && to_two.contains("rank 1: "), "{to_two}");
    assert!(to_one.contains("from step 8 on ") && to_one.contains("rank 1: "), "{to_one}");
    assert_eq!(desk.losses("run"), by_hand.losses("run"));
    assert!(state(&desk) == state(&by_hand), "the run ends in other bits than by hand");
    for trace in ["trace.json", "trace.json.from-4", "trace.json.from-8"] {
        let text = std::fs::read_to_string(desk.path(trace)).unwrap();
        assert!(text.trim_end().ends_with(']'), "{trace} is not finished");
    }
    // Each start supersedes the steps of the event files before: fields step and session_log.
    let files = desk.files().into_iter().filter(|name| name.starts_with("run/tensorboard/"));
    let files: Vec<Vec<u8>> = files.map(|name| std::fs::read(desk.path(&name)).unwrap()).collect();
    assert_eq!(files.len(), 3);
    for (file, first) in files[1..].iter().zip([5, 9]) {
        assert!(file.windows(6).any(|bytes| bytes == [0x10, first, 0x3a, 2, 8, 1]), "{first}");
    }
}

/// The answer of a run to the loss of a device is saved with it.
#[test]
fn a_resumed_run_still_goes_on_after_the_loss_of_a_device() {
    let settings = SETTINGS.replace("parallel.shares=7,3,2", "parallel.balance=fixed");
    let line = format!("train tiny.toml --data text.txt {settings} --devices {}", unlike());
    for (run, on_loss, code) in [("goes-on", "continue", 0), ("stops", "stop", 75)] {
        let desk = Desk::certified();
        let begin = format!("{line} --steps 5 --out {run} --set faults.on_loss={on_loss}");
        desk.run(&begin).ok();
        let resume = format!("train --resume {run} --steps 8");
        let resumed = desk.run_with("lost@forward:7/1", &resume).ended(code);
        let goes_on = resumed.err.contains("continuing from step ");
        assert_eq!(goes_on, on_loss == "continue", "{}", resumed.err);
    }
}

/// Nobody waits for a device that hangs: not the others, not the ring thread that asked it to add,
/// and not the end of the process.
#[test]
fn a_device_that_hangs_ends_the_run_for_all_at_its_deadline() {
    // What the runs need is certified before, because they run at the same time.
    undisturbed();
    let started = Instant::now();
    let runs = ["host", "device"].map(|adding| {
        let desk = Desk::certified();
        let adding = format!("--set parallel.reduce_site={adding}");
        let mut command = desk.command(&line(&warm(), &adding));
        (command.env("POTLUCK_FAULT", "hang@reduce:7/1").spawn().unwrap(), desk)
    });
    for (child, _desk) in runs {
        let ran = finish(child, "a hang").ended(75);
        let error = ran.line("error:");
        assert!(error.contains("rank 1: "), "{error}");
        assert!(error.contains("did not finish within 10 s"), "{error}");
        assert!(started.elapsed() < INJECTED_HANG_MAX, "{:?}", started.elapsed());
    }
}

#[test]
fn a_value_that_is_not_finite_skips_the_step_everywhere() {
    let desk = Desk::certified();
    let ran = train(&desk, "nan@backward:7/1", &unlike(), "").ok();
    let warning = ran.line("warning:");
    assert!(warning.contains("step 7 was skipped"), "{warning}");
    // Rank 0 holds the sum that the value went into, and is not the one that brought it.
    assert!(warning.contains("gradient of ") && warning.contains(" on rank 1, "), "{warning}");
    let steps = desk.steps("run");
    assert_eq!(steps[6]["skipped"], true);
    assert_eq!(steps.len() as u64, STEPS);
    assert!(steps[7]["loss"].as_f64().is_some());
}

/// The spans of a trace as (rank, lane, name, start, end), in microseconds.
fn spans(desk: &Desk) -> Vec<(u64, String, String, f64, f64)> {
    let text = std::fs::read_to_string(desk.path("trace.json")).unwrap();
    let events: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    let complete = events.iter().filter(|event| event["ph"] == "X");
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_string();
    let span = |event: &serde_json::Value| {
        let (from, length) = (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
        let rank = event["pid"].as_u64().unwrap();
        (rank, text(&event["cat"]), text(&event["name"]), from, from + length)
    };
    complete.map(span).collect()
}

/// Number of additions of gradients that were over before their rank's last backward segment was.
fn inside_backward(more: &str) -> usize {
    let desk = Desk::new();
    // Behind the head, whose gradients are added first, are several layers.
    let line = format!("--trace trace.json --set model.layers=12 {more}");
    train(&desk, "", "cpu*3", &line).ok();
    let spans = spans(&desk);
    for lane in ["driver", "device", "staging", "ring"] {
        for rank in 0..3 {
            assert!(spans.iter().any(|span| span.0 == rank && span.1 == lane), "{rank} {lane}");
        }
    }
    for (lane, name) in [("ring", "add "), ("driver", "update "), ("driver", "wait")] {
        assert!(spans.iter().any(|s| s.1 == lane && s.2.starts_with(name)), "{name}");
    }
    let last = |rank| {
        let backward = spans.iter().filter(move |s| s.0 == rank && s.1 == "device");
        backward.filter(|s| s.2.starts_with("B 0 of")).collect::<Vec<_>>()
    };
    let adds = spans.iter().filter(|s| s.1 == "ring" && s.2.starts_with("add bucket 0"));
    // The segment that ends a backward pass comes at most a step later than the addition.
    let is_inside = |add: &&(u64, String, String, f64, f64)| {
        let next_end = last(add.0).iter().map(|s| s.4).find(|end| *end > add.4);
        let next_update = spans.iter().filter(|s| s.0 == add.0 && s.2.starts_with("update"));
        let next_update = next_update.map(|s| s.3).find(|start| *start > add.4);
        next_end.is_some_and(|end| next_update.is_none_or(|update| end < update))
    };
    adds.filter(is_inside).count()
}

#[test]
fn gradients_are_added_inside_the_backward_pass_and_only_with_overlap() {
    assert!(inside_backward("") > 0);
    assert_eq!(inside_backward("--set parallel.overlap=false"), 0);
}

/// A run with measured shares keeps them, and its kernels, and so its bits.
#[test]
fn a_resumed_run_with_measured_shares_ends_in_the_same_bits() {
    let devices = unlike();
    let desk = Desk::new();
    let more = "--set train.batch=24 --set train.micro_batch_size=6 --set train.checkpoint_every=4 \
         --set train.checkpoint_keep=9 --set train.tune_s=1 --set train.sample_tokens=0";
    let line = format!("train tiny.toml --data text.txt --out run --devices {devices} {more}");
    desk.run(&format!("{line} --steps 12")).ok();
    let from = "run/checkpoints/step-00000004";
    let again = format!("train --resume {from} --out again --devices {devices}");
    let ran = desk.run(&again).ok();
    assert!(!ran.err.contains("measuring"), "{}", ran.err);
    assert!(!ran.err.contains("bits will differ"), "{}", ran.err);
    for file in ["parameters.safetensors", "moments.safetensors"] {
        let same = desk.checkpoint("again", 12, file) == desk.checkpoint("run", 12, file);
        assert!(same, "{file}");
    }
}

#[test]
fn additions_on_devices_are_in_the_trace() {
    let desk = Desk::new();
    let site = "--trace trace.json --set parallel.reduce_site=device";
    train(&desk, "", "cpu*3", site).ok();
    let spans = spans(&desk);
    for rank in 0..3 {
        let of_ring = spans.iter().filter(|span| span.0 == rank && span.1 == "ring");
        assert_ne!(of_ring.filter(|span| span.2.starts_with("add ")).count(), 0, "rank {rank}");
    }
}

#[test]
fn sentences_are_sampled_on_all_devices() {
    let desk = Desk::new();
    desk.run(&format!(
        "train --devices {} --steps 1 --out run --quiet --set model.layers=1 --set model.heads=2 \
         --set model.width=8 --set model.context=8 --set train.batch=192 --set train.tune_s=0 \
         --set parallel.shares=64,64,64 --set train.sample_tokens=1 --set data.held_out=0",
        unlike()
    ))
    .ok();
    let lines = std::fs::read_to_string(desk.path("run/sentences-00000001.txt")).unwrap();
    let lines: Vec<&str> = lines.lines().collect();
    let (sampled, held_out) = lines.split_at(200);
    assert!(sampled.iter().all(|line| line.len() <= builtin::LONGEST_SENTENCE + 1));
    for (line, beginning) in held_out.iter().zip(builtin::held_out_sums()) {
        assert!(line.starts_with(&beginning), "{line}");
    }
    // The model is untrained: a device whose rows are all alike or empty would show.
    let different: std::collections::HashSet<&&str> = sampled.iter().collect();
    let letters: usize = sampled.iter().map(|line| line.len()).sum();
    assert!(different.len() > 150 && letters > 2000, "{} lines, {letters}", different.len());
    assert_eq!(desk.metrics("run").pop().unwrap()["right"], 0);
}
