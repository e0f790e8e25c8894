//! Convolutional, residual and recurrent models and llamas through the command line: trained,
//! evaluated, predicted and generated with, as pipelines, on several devices and over resumes, to
//! the same bits.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::process::{Desk, finish, skip};
use crate::samples::write_idx;

fn desk_with_images() -> Desk {
    let desk = Desk::new();
    write_idx(&desk.path("images"), "train", 0, 600);
    write_idx(&desk.path("images"), "t10k", 600, 200);
    desk
}

const CNN: &str = "train --data images --quiet --batch 32 --steps 40 --set model.kind=cnn \
                   --set model.channels=4,8 --set model.hidden=16 --set train.eval_every=20 \
                   --lr 0.01";
const RESNET: &str = "train --data images --quiet --batch 32 --steps 12 --set model.kind=resnet \
                      --set model.width=4 --set train.eval_every=6 --lr 0.02";
const RNN: &str = "train --quiet --batch 8 --steps 12 --set model.kind=rnn --set model.width=16 \
                   --set model.context=16 --set train.eval_every=6 --set train.sample_tokens=20";
const LLAMA: &str = "train --quiet --batch 8 --steps 20 --set model.kind=llama \
                     --set model.layers=2 --set model.kv_heads=2 --set model.width=32 \
                     --set model.context=16 --set rope_scaling=llama3 --set rope_context=8 \
                     --set model.tie=false --set model.qk_norm=true \
                     --set train.eval_samples=16 --set train.sample_tokens=0 --micro-batch 4 \
                     --set schedule.kind=constant --set schedule.warmup=0";

fn last_accuracy(desk: &Desk, run: &str) -> f64 {
    let mut lines = desk.metrics(run).into_iter();
    let last = lines.rfind(|line| line.get("val_accuracy").is_some()).unwrap();
    last["val_accuracy"].as_f64().unwrap()
}

fn parameters(desk: &Desk, run: &str, step: u64) -> Vec<u8> {
    let file = format!("{run}/checkpoints/step-{step:08}/parameters.safetensors");
    fs::read(desk.path(&file)).unwrap()
}

#[test]
fn cnn_learns_and_predicts() {
    let desk = desk_with_images();
    desk.run(&format!("{CNN} --devices cpu --out run")).ok();
    assert!(last_accuracy(&desk, "run") > 0.97);
    let json: Value = serde_json::from_str(&desk.run("eval run --json").ok().out).unwrap();
    assert_eq!(json["accuracy"].as_f64().unwrap(), last_accuracy(&desk, "run"));
    let predicted = desk.run("predict run --devices cpu --data images").ok().out;
    assert!(predicted.starts_with("sample,class,"), "{predicted}");
    // Those that are held out, below the heads of the columns.
    assert_eq!(predicted.lines().count(), 201);
    let text = desk.run(&format!("{CNN} --devices cpu --explain memory")).ok().out;
    assert!(text.contains("peak"), "{text}");
}

#[test]
fn resnet_cut_has_same_bits() {
    let desk = desk_with_images();
    for norm in ["batch", "group"] {
        let line = format!(
            "{RESNET} --set model.norm={norm} --set schedule.kind=constant --set schedule.warmup=0"
        );
        let [whole, cut] = ["whole", "cut"].map(|run| format!("{run}-{norm}"));
        desk.run(&format!("{line} --devices cpu --out {whole}")).ok();
        let cut_line = format!("{line} --devices cpu*2 --pipeline 2 --micro-batch 32");
        desk.run(&format!("{cut_line} --out {cut}")).ok();
        assert_eq!(parameters(&desk, &whole, 12), parameters(&desk, &cut, 12), "{norm}");
        let text = String::from_utf8_lossy(&parameters(&desk, &whole, 12)).into_owned();
        assert_eq!(text.contains("layer2.0.bn1.running_var"), norm == "batch", "{norm}");
    }
}

#[test]
fn rnn_shared_near_one_and_generates() {
    let desk = Desk::new();
    for cell in ["lstm", "gru"] {
        let line = format!("{RNN} --set model.cell={cell}");
        let [alone, shared] = ["alone", "shared"].map(|run| format!("{run}-{cell}"));
        let sample = desk.run(&format!("{line} --devices cpu --out {alone}")).ok().out;
        assert!(!sample.trim().is_empty());
        let shares = "--set parallel.balance=fixed --set parallel.shares=5,3 --micro-batch 5";
        desk.run(&format!("{line} --devices cpu*2 {shares} --out {shared}")).ok();
        for (one, two) in desk.losses(&alone).into_iter().zip(desk.losses(&shared)) {
            assert!((one - two).abs() < 1e-4 * one, "{cell}: {one} and {two}");
        }
        let text = desk.run(&format!("generate {alone} --prompt The --tokens 12")).ok().out;
        assert!(text.starts_with("The"), "{text}");
    }
}

#[test]
fn rnn_states_survive_resume_and_cut() {
    let desk = Desk::new();
    let line = format!(
        "{RNN} --set model.stateful=true --set train.checkpoint_every=6 \
         --set schedule.kind=constant --set schedule.warmup=0"
    );
    let alone = desk.run(&format!("{line} --devices cpu --out whole").replace("--quiet", "")).ok();
    assert!(alone.err.contains("state carried from step to step"), "{}", alone.err);
    desk.run(&format!("{line} --devices cpu --out part --steps 6")).ok();
    desk.run("train --resume part --quiet --devices cpu --steps 12").ok();
    assert_eq!(parameters(&desk, "whole", 12), parameters(&desk, "part", 12));
    let states = |run: &str| desk.checkpoint(run, 12, "carried.safetensors");
    assert_eq!(states("whole"), states("part"));
    desk.run(&format!("{line} --devices cpu*2 --pipeline 2 --micro-batch 2 --out cut")).ok();
    for (one, two) in desk.losses("whole").into_iter().zip(desk.losses("cut")) {
        assert!((one - two).abs() < 1e-4 * one, "{one} and {two}");
    }
    // Without the states, the second half is another one.
    let forgetful = line.replace("stateful=true", "stateful=false");
    desk.run(&format!("{forgetful} --devices cpu --out forgetful")).ok();
    assert_ne!(desk.losses("whole")[11], desk.losses("forgetful")[11]);
    let resume = "train --resume forgetful --devices cpu --set model.stateful=true --steps 13";
    let began = desk.run(resume).ok();
    assert!(began.err.contains("carries from step to step begins with zeros"), "{}", began.err);
    // Evaluations between the steps change nothing.
    let watched = line.replace("eval_every=6", "eval_every=5");
    desk.run(&format!("{watched} --devices cpu --out watched")).ok();
    assert_eq!(parameters(&desk, "whole", 12), parameters(&desk, "watched", 12));
    // Slots of the batch go through other texts in other data.
    desk.write("other.txt", "the cat sees the dog. ".repeat(40).as_bytes());
    let resume = "train --resume whole --devices cpu --data other.txt --steps 13 --out moved";
    let began = desk.run(resume).ok();
    assert!(began.err.contains("carries from step to step begins with zeros"), "{}", began.err);
}

#[test]
fn rnn_stateful_evaluates_and_generates() {
    let desk = Desk::new();
    desk.run(&format!("{RNN} --set model.stateful=true --devices cpu --out run")).ok();
    // Too short for a part for each slot of the batch.
    desk.write("short.txt", "the cat sees the dog. ".repeat(5).as_bytes());
    let evaluated = desk.run("eval run --devices cpu --data short.txt --json").ok().out;
    let line: serde_json::Value = serde_json::from_str(&evaluated).unwrap();
    assert_eq!(line["samples"], 6, "{line}");
    // The same parameters without states: each token is computed from the whole text before it.
    let line = "train --resume run --devices cpu --set model.stateful=false --out whole";
    desk.run(&format!("{line} --quiet")).ok();
    assert_eq!(parameters(&desk, "run", 12), parameters(&desk, "whole", 12));
    let texts = ["run", "whole"].map(|run| {
        let line = format!("generate {run} --devices cpu --prompt The --tokens 12 --seed 5");
        desk.run(&line).ok().out
    });
    assert_eq!(texts[0], texts[1]);
    assert!(texts[0].starts_with("The") && texts[0].trim_end().len() > 10, "{texts:?}");
}

/// The text at the end of a run: each token follows from the window before it, whose states begin
/// with zeros, as without states.
#[test]
fn rnn_stateful_sample_begins_with_zeros() {
    let desk = Desk::new();
    desk.write("guests.txt", "the cook brings bread and soup to a table of guests\n".repeat(60));
    let line = "--quiet --batch 8 --steps 40 --set model.kind=rnn --set model.width=32 --set \
                model.context=16 --set train.sample_tokens=80 --set optim.lr=0.02 --devices cpu";
    let stateful = "--data guests.txt --set model.stateful=true --out run";
    let sample = desk.run(&format!("train {line} {stateful}")).ok().out;
    let resumed = "train --resume run --devices cpu --set model.stateful=false --out whole --quiet";
    assert_eq!(desk.run(resumed).ok().out, sample);
    assert!(sample.trim().len() > 60, "{sample}");
}

#[test]
fn gpt_spare_rows_cut_has_same_bits() {
    let desk = Desk::new();
    let line = "train tiny.toml --data text.txt --quiet --steps 12 --set model.positions=24 \
                --set model.vocabulary=90 --set model.tie=false --micro-batch 2";
    desk.run(&format!("{line} --devices cpu --out one")).ok();
    desk.run(&format!("{line} --devices cpu*2 --pipeline 2 --out cut")).ok();
    assert!(parameters(&desk, "one", 12) == parameters(&desk, "cut", 12));
    desk.run(&format!("{line} --devices cpu*2 --tensor 2 --out divided")).ok();
    desk.run("train --resume divided --devices cpu --quiet --steps 13").ok();
    let text = desk.run("generate one --devices cpu --prompt t --tokens 300 --seed 5").ok().out;
    assert!(!text.contains('\u{fffd}'), "{text}");
    let few = desk.run(&format!("{line} --devices cpu --out no --set model.vocabulary=3"));
    let why = "model.vocabulary expects at least the ";
    assert!(few.code() == Some(78) && few.err.contains(why), "{}", few.err);
}

#[test]
fn llama_cut_has_same_bits_and_generates() {
    let desk = Desk::new();
    desk.run(&format!("{LLAMA} --devices cpu --out whole")).ok();
    let losses = desk.losses("whole");
    assert!(losses[19] < 0.9 * losses[0], "{losses:?}");
    desk.run(&format!("{LLAMA} --devices cpu*2 --pipeline 2 --out cut")).ok();
    assert!(parameters(&desk, "whole", 20) == parameters(&desk, "cut", 20));
    desk.run(&format!("{LLAMA} --devices cpu*2 --tensor 2 --out divided")).ok();
    for (one, two) in losses.into_iter().zip(desk.losses("divided")) {
        assert!((one - two).abs() < 1e-4 * one, "{one} and {two}");
    }
    let text = desk.run("generate divided --devices cpu --prompt The --tokens 12").ok().out;
    assert!(text.starts_with("The"), "{text}");
    let json: Value = serde_json::from_str(&desk.run("eval whole --json").ok().out).unwrap();
    assert!(json["loss"].as_f64().unwrap() < desk.losses("whole")[0], "{json}");
    // It would be another model.
    let other = desk.run("train --resume whole --devices cpu --set rope_theta=500 --steps 21");
    let why = "model.rope_theta does not fit the checkpoint: it is 10000.0 there, and 500.0 here";
    assert!(other.err.contains(why), "{}", other.err);
}

/// Trains on MNIST, for whoever has it.
#[test]
fn cnn_recognizes_mnist() {
    let Some(data) = std::env::var_os("POTLUCK_TEST_DATA") else {
        return skip("POTLUCK_TEST_DATA names no directory with mnist/");
    };
    let data = Path::new(&data).join("mnist").canonicalize().expect("the images are there");
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/configs/mnist.toml");
    let desk = Desk::new();
    let mut command = desk.command("train --devices cpu --quiet --out run");
    command.arg("--data").arg(data).arg(config);
    finish(command.spawn().unwrap(), "digits").ok();
    assert!(last_accuracy(&desk, "run") > 0.975, "{}", last_accuracy(&desk, "run"));
}

#[test]
fn label_smoothing_counts_for_classes() {
    let desk = Desk::new();
    let [plain, smoothed] = [("plain", 0.0), ("smoothed", 0.2)].map(|(run, part)| {
        let line = format!("--set optim.label_smoothing={part} --steps 3 --out {run} --quiet");
        desk.train(&line).ok();
        let evaluated = desk.run(&format!("eval {run} --devices cpu --json")).ok();
        let evaluated: Value = serde_json::from_str(&evaluated.out).unwrap();
        let loss = evaluated["loss"].as_f64().unwrap();
        [desk.losses(run)[0], loss]
    });
    // Logits are almost equal at first, and so is what they cost.
    for (plain, smoothed) in plain.into_iter().zip(smoothed) {
        assert!(plain != smoothed && (plain - smoothed).abs() < 0.05, "{plain} {smoothed}");
    }
    let graph = desk.train("--set optim.label_smoothing=0.2 --explain graph").ok().out;
    assert!(graph.contains("linear_cross_entropy_pass 1024 smoothing 0.2"), "{graph}");

    desk.write("t.csv", "a,b\n".to_string() + &"1,0.5\n3,4\n5,6\n2,1\n".repeat(20));
    let line = "train --data t.csv --devices cpu --set optim.label_smoothing=0.1";
    let refused = desk.run(line).ended(78);
    assert!(refused.line("error:").contains("needs targets that are classes"), "{}", refused.err);
    let refused = desk.train("--set optim.label_smoothing=1").ended(78);
    assert!(refused.line("error:").contains("expects a number"), "{}", refused.err);
}

#[test]
fn losses_chosen_must_fit_targets() {
    let desk = Desk::new();
    let rows = (0..40).map(|i| format!("{},{},{}\n", i % 7, i % 5, f64::from(i % 7) * 0.3 - 0.2));
    desk.write("values.csv", "a,b,c\n".to_string() + &rows.collect::<String>());
    let rows = (0..40).map(|i| format!("{},{},c{}\n", i % 7, i % 5, i % 3));
    desk.write("classes.csv", "a,b,c\n".to_string() + &rows.collect::<String>());
    let first_loss = |name: &str, line: &str| {
        let line = format!("train --devices cpu --steps 2 --quiet --out {name} {line}");
        desk.run(&line).ok();
        let evaluated = desk.run(&format!("eval {name} --devices cpu --json")).ok();
        let evaluated: Value = serde_json::from_str(&evaluated.out).unwrap();
        [desk.losses(name)[0], evaluated["loss"].as_f64().unwrap()]
    };
    let mse = first_loss("mse", "--data values.csv");
    assert_eq!(first_loss("named", "--data values.csv --set train.loss=mse"), mse);
    let l1 = first_loss("l1", "--data values.csv --set train.loss=l1");
    let huber = "--data values.csv --set train.loss=huber --set train.huber_delta=1000";
    let huber = first_loss("huber", huber);
    for ((mse, l1), huber) in mse.into_iter().zip(l1).zip(huber) {
        // The mean of squares is at least the square of the mean.
        assert!(l1 * l1 <= mse * 1.001 && l1 != mse, "{l1} {mse}");
        assert!((huber / mse - 0.5).abs() < 1e-3, "half the square far below delta: {huber} {mse}");
    }

    let classes = first_loss("classes", "--data classes.csv");
    let even = "--data classes.csv --set train.class_weights=2,2,2";
    for (even, classes) in first_loss("even", even).into_iter().zip(classes) {
        assert!((even - classes).abs() < 1e-5, "equal weights cancel: {even} {classes}");
    }
    let weighted = "--data classes.csv --set train.class_weights=[1,5.5,0] \
                    --set schedule.kind=constant --set schedule.warmup=0";
    assert!(first_loss("weighted", weighted)[1] != classes[1]);
    let kept = std::fs::read_to_string(desk.path("weighted/run.toml")).unwrap();
    assert!(kept.contains("class_weights = [1.0, 5.5, 0.0]"), "{kept}");
    // A pipeline of two stages and a resume have the loss of one device.
    let two = "--devices cpu*2 --pipeline 2 --steps 4 --quiet --out two";
    desk.run(&format!("train {two} {weighted}")).ok();
    desk.run("train --resume weighted --steps 4 --quiet").ok();
    for (two, one) in desk.losses("two").iter().zip(desk.losses("weighted")) {
        assert!((two - one).abs() < 1e-5, "{two} {one}");
    }
    assert_eq!(desk.losses("weighted").len(), 4);

    let rows = (0..40).map(|i| format!("{},{},{}\n", i % 7, i % 5, i % 3));
    desk.write("numbers.csv", "a,b,c\n".to_string() + &rows.collect::<String>());
    let numbers = "train --devices cpu --steps 1 --data numbers.csv";
    let hint = "c is trained as a number, and has only the values 0 to 2: if these are classes";
    assert!(desk.run(&format!("{numbers} --out hinted")).ok().err.contains(hint));
    let chosen = desk.run(&format!("{numbers} --out chosen --set data.task=regression")).ok();
    assert!(!chosen.err.contains(hint), "{}", chosen.err);

    for (line, why) in [
        ("--data classes.csv --set train.loss=l1", "the targets are classes"),
        ("--data values.csv --set train.loss=cross_entropy", "needs targets that are classes"),
        ("--data values.csv --set train.class_weights=1,2", "needs targets that are classes"),
        (
            "--data values.csv --set train.loss=l1 --set optim.label_smoothing=0.1",
            "needs targets that are classes",
        ),
        ("--data text.txt --set train.class_weights=1,2", "for models of tables, arrays and"),
        ("--data classes.csv --set train.class_weights=1,2", "each of the 3 classes, and 2 are"),
        ("--data classes.csv --set train.class_weights=1,-2,1", "a list of numbers from 0 on"),
        ("--data values.csv --set train.loss=mae", "expects \"auto\""),
        ("--data values.csv --set train.huber_delta=2", "train.huber_delta has no effect"),
    ] {
        let ran = desk.run(&format!("train --devices cpu --out no {line}"));
        assert!(ran.code() != Some(0) && ran.err.contains(why), "{line}: {}", ran.err);
    }
}

#[test]
fn optimizers_resumed_have_same_bits() {
    let desk = Desk::new();
    for (name, more) in [
        ("adam", "optim.kind=adam --set schedule.kind=one-cycle --set schedule.warmup=0"),
        ("rmsprop", "optim.kind=rmsprop --set optim.momentum=0.5 --set schedule.kind=step"),
        ("lion", "optim.kind=lion --lr 1e-4 --set schedule.kind=exponential"),
        ("nesterov", "optim.kind=sgd --set optim.nesterov=true --set optim.moments=bf16"),
    ] {
        let every = "--steps 6 --set train.checkpoint_every=3";
        desk.train(&format!("--quiet --out {name} {every} --set {more}")).ok();
        let losses = desk.losses(name);
        assert!(losses.iter().all(|loss| loss.is_finite()), "{name}: {losses:?}");
        let whole = parameters(&desk, name, 6);
        fs::remove_dir_all(desk.path(&format!("{name}/checkpoints/step-00000006"))).unwrap();
        desk.resume(name, "--quiet").ok();
        assert!(parameters(&desk, name, 6) == whole, "{name} goes on to other bits");
    }
    let refused = desk.train("--set optim.kind=sgd --set optim.alpha=0.9").ended(78);
    assert!(refused.line("error:").contains("optim.alpha has no effect"), "{}", refused.err);
}

#[test]
fn parameter_groups_resumed_are_kept() {
    let desk = Desk::new();
    let run = |line: &str, groups: &str| {
        let mut command = desk.command(line);
        if !groups.is_empty() {
            command.args(["--set", &format!("optim.groups={groups}")]);
        }
        finish(command.spawn().unwrap(), &format!("{line} {groups}"))
    };
    let new = "train tiny.toml --data text.txt --devices cpu";
    let groups = "wte.* frozen, *.ln_* lr_scale=2 weight_decay=0.1";
    let started = run(&format!("{new} --steps 2 --out run"), groups).ok();
    assert!(started.err.contains("of them frozen"), "{}", started.err);
    let kept = std::fs::read_to_string(desk.path("run/run.toml")).unwrap();
    let written = r#"groups = ["wte.* frozen", "*.ln_* lr_scale=2 weight_decay=0.1"]"#;
    assert!(kept.contains(written), "{kept}");
    desk.resume("run", "--steps 4 --quiet").ok();
    let refused = run("train --devices cpu --resume run --steps 6", "wpe.* frozen").ended(78);
    let why = "has no moments of 'wte.weight', which was frozen; freeze it here too (optim.groups)";
    assert!(refused.line("error:").contains(why), "{}", refused.err);
    // Neither gradients nor moments of the embedding.
    let memory = |groups: &str| {
        let text = run(&format!("{new} --explain memory"), groups).ok().out;
        let line = |name: &str| {
            let line = text.lines().find(|line| line.trim_start().starts_with(name));
            line.unwrap_or_else(|| panic!("{name} in {text}")).to_owned()
        };
        ["parameters", "gradients", "moments"].map(line)
    };
    let ([parameters, gradients, moments], plain) = (memory("wte.* frozen"), memory(""));
    assert_eq!(parameters, plain[0]);
    assert!(gradients != plain[1] && moments != plain[2], "{gradients} {moments}");
    let buckets = run(&format!("{new} --explain memory"), groups).ok().out;
    assert!(buckets.contains("1 tensor, frozen"), "{buckets}");
    assert!(buckets.contains("learning rate times 2, weight decay 0.1"), "{buckets}");

    for (groups, why) in [
        ("nothing frozen", "no trained parameter is called 'nothing' that"),
        ("* frozen", "there is nothing to train"),
        ("*.bias", "is no parameter group"),
        ("*.bias lr_scale=0", "must be a number above 0"),
    ] {
        let refused = run(new, groups).ended(78);
        assert!(refused.line("error:").contains(why), "{}", refused.err);
    }
}
