//! Pipelines give the bits of one device, of each other and of data parallelism; their checkpoints
//! go on anywhere; and pipelines that cannot be are refused before anything is opened.

use std::fs;
use std::sync::LazyLock;

use serde_json::Value;

use crate::process::{Desk, Ran};
use crate::samples::write_idx;

/// Dropout, clipping, and micro-batches of 3 samples; 4 blocks with 2 layers.
pub const SMALL: &str = "train tiny.toml --data text.txt --quiet --steps 12 \
     --set model.layers=2 --set model.width=32 --set model.context=16 --set model.dropout=0.1 \
     --set model.tie=false --set train.batch=12 --set train.micro_batch_size=3 \
     --set train.sample_tokens=0 --set train.checkpoint_every=4 --set train.checkpoint_keep=9 \
     --set optim.clip=0.5 --set schedule.decay_steps=12 --set parallel.balance=fixed";

const STEPS: u64 = 12;
const SCHEDULES: [&str; 3] = ["gpipe", "1f1b", "zero-bubble"];
const INTERLEAVED: &str = "--schedule interleaved --set virtual_stages=2";
const FILES: [&str; 2] = ["parameters.safetensors", "moments.safetensors"];

/// The untied model on one device.
static ONE: LazyLock<Desk> = LazyLock::new(|| {
    let desk = Desk::new();
    train(&desk, "one", "--devices cpu");
    assert!(desk.steps("one").iter().any(|step| step["grad_norm"].as_f64() > Some(0.5)));
    desk
});

pub fn train(desk: &Desk, out: &str, more: &str) -> Ran {
    desk.run(&format!("{SMALL} --out {out} {more}")).ok()
}

fn resume(desk: &Desk, run: &str, more: &str) -> Ran {
    desk.run(&format!("train --quiet --resume {run} {more}")).ok()
}

/// Losses and norms of the steps, as they were written.
fn course(desk: &Desk, run: &str) -> Vec<(Value, Value)> {
    let steps = desk.steps(run).into_iter();
    steps.map(|step| (step["loss"].clone(), step["grad_norm"].clone())).collect()
}

fn has_files_of(desk: &Desk, run: &str, (other, others): (&Desk, &str), step: u64) -> bool {
    let of = |desk: &Desk, run: &str| FILES.map(|file| desk.checkpoint(run, step, file));
    of(desk, run) == of(other, others)
}

/// Asserts the same losses, norms, parameters and moments.
pub fn assert_same_bits(desk: &Desk, run: &str, (other, others): (&Desk, &str), what: &str) {
    assert_eq!(course(desk, run), course(other, others), "{what}");
    assert!(has_files_of(desk, run, (other, others), STEPS), "{what}: the tensors differ");
}

fn one() -> (&'static Desk, &'static str) {
    (&ONE, "one")
}

// ---- to the bit ----

#[test]
fn untied_any_cut_has_bits_of_one() {
    let desk = Desk::new();
    for stages in [2, 3, 4] {
        for schedule in SCHEDULES {
            let out = format!("{schedule}{stages}");
            let line = format!("--devices cpu*{stages} --pipeline {stages} --schedule {schedule}");
            train(&desk, &out, &line);
            assert_same_bits(&desk, &out, one(), &line);
        }
    }
    for line in [
        &format!("{INTERLEAVED} --devices cpu*2 --pipeline 2"),
        "--devices cpu*2 --pipeline 2 --set parallel.blocks_per_stage=1,3",
        "--devices cpu*2 --pipeline 2 --set parallel.blocks_per_stage=3,1 --schedule zero-bubble",
        "--devices cpu*2 --pipeline 2 --set message_kib=1",
        "--devices cpu*2 --pipeline 2 --set overlap=false --schedule gpipe",
    ] {
        train(&desk, "other", line);
        assert_same_bits(&desk, "other", one(), line);
        fs::remove_dir_all(desk.path("other")).unwrap();
    }
}

/// Evaluations, which run the forward passes only, and checkpoints too: recomputation may begin and
/// end with a resume.
#[test]
fn recompute_any_schedule_same_bits() {
    let desk = Desk::new();
    let (blocks, selective) = ("--set train.recompute=blocks", "--set train.recompute=selective");
    let stages = |schedule: &str| format!("--devices cpu*2 --pipeline 2 --schedule {schedule}");
    for line in [
        format!("{blocks} --devices cpu"),
        format!("{selective} {}", stages("gpipe")),
        format!("{blocks} {}", stages("1f1b")),
        format!("{blocks} {}", stages("zero-bubble")),
        format!("{blocks} {} --set virtual_stages=2", stages("interleaved")),
    ] {
        train(&desk, "other", &line);
        assert_same_bits(&desk, "other", one(), &line);
        fs::remove_dir_all(desk.path("other")).unwrap();
    }
    train(&desk, "run", &format!("{blocks} --devices cpu --steps 4"));
    resume(&desk, "run", &format!("{selective} --steps 8"));
    resume(&desk, "run", "--set train.recompute=none --steps 12");
    assert_same_bits(&desk, "run", one(), "a run that computes again for some time");
}

/// Values between blocks and what is kept are rounded alike, wherever the cuts are.
#[test]
fn bf16_activations_any_schedule_same_bits() {
    let desk = Desk::new();
    let bf16 = "--set train.activations=bf16";
    train(&desk, "one", &format!("{bf16} --devices cpu"));
    let (rounded, exact) = (desk.losses("one"), ONE.losses("one"));
    assert_ne!(rounded[0], exact[0], "the first forward pass");
    for (rounded, exact) in rounded.iter().zip(&exact) {
        assert!((rounded - exact).abs() < 0.005 * exact, "{rounded} {exact}");
    }
    for layout in [
        "cpu*2 --pipeline 2 --schedule gpipe",
        "cpu*2 --pipeline 2 --schedule interleaved --set virtual_stages=2",
        "cpu*2 --pipeline 2 --schedule 1f1b --set parallel.blocks_per_stage=1,3",
        "cpu*3 --pipeline 3 --schedule 1f1b",
        "cpu*4 --pipeline 4 --schedule zero-bubble",
    ] {
        let line = format!("{bf16} --devices {layout}");
        train(&desk, "other", &line);
        assert_same_bits(&desk, "other", (&desk, "one"), &line);
        fs::remove_dir_all(desk.path("other")).unwrap();
    }
    train(&desk, "run", &format!("{bf16} --devices cpu --steps 4"));
    resume(&desk, "run", "--steps 12");
    assert_same_bits(&desk, "run", (&desk, "one"), "a run that was resumed");
    // A pool, in front of which blocks hand on f32.
    fs::create_dir(desk.path("images")).unwrap();
    write_idx(&desk.path("images"), "train", 0, 60);
    let cnn = "train --data images --set model.kind=cnn --set train.batch=12 --steps 4 --quiet \
               --set train.micro_batch_size=4 --set train.activations=bf16";
    for (out, devices) in [("cnn", "cpu"), ("cnn-stages", "cpu*3 --pipeline 3")] {
        desk.run(&format!("{cnn} --out {out} --devices {devices}")).ok();
    }
    assert_eq!(desk.losses("cnn-stages"), desk.losses("cnn"));
    // What is recomputed follows from rounded values, and so has bits of its own.
    let again = format!("{bf16} --set train.recompute=selective");
    train(&desk, "again", &format!("{again} --devices cpu"));
    assert_ne!(desk.losses("again"), rounded);
    let line = format!("{again} --devices cpu*2 --pipeline 2 --schedule zero-bubble");
    train(&desk, "other", &line);
    assert_same_bits(&desk, "other", (&desk, "again"), &line);
    // A resume may begin to round.
    train(&desk, "begun", "--devices cpu --steps 4");
    resume(&desk, "begun", &format!("{bf16} --steps 12"));
    let begun = desk.losses("begun");
    assert_eq!(begun[..4], exact[..4]);
    assert_ne!(begun[4..], exact[4..]);
}

/// The comparisons above can fail: another seed, no dropout and other micro-batches have other
/// bits.
#[test]
fn other_runs_differ() {
    let desk = Desk::new();
    for (out, line) in
        [("a", "--seed 5"), ("b", "--set model.dropout=0"), ("c", "--set train.micro_batch_size=6")]
    {
        train(&desk, out, &format!("--devices cpu*2 --pipeline 2 {line}"));
        assert_ne!(course(&desk, out), course(&ONE, "one"), "{line}");
        assert!(!has_files_of(&desk, out, one(), STEPS), "{line}");
    }
}

#[test]
fn interleaved_8_blocks_has_bits_of_one() {
    let desk = Desk::new();
    let large = "--set model.layers=6 --set train.batch=36 --steps 4";
    train(&desk, "one", &format!("{large} --devices cpu"));
    for line in ["--devices cpu*3 --pipeline 3", "--devices cpu*4 --pipeline 4"] {
        train(&desk, "other", &format!("{large} {INTERLEAVED} {line}"));
        assert_eq!(course(&desk, "other"), course(&desk, "one"), "{line}");
        assert!(has_files_of(&desk, "other", (&desk, "one"), 4), "{line}");
        fs::remove_dir_all(desk.path("other")).unwrap();
    }
}

/// One device adds both parts of the tied gradient in the order of the micro-batches, a pipeline
/// the sums of its two stages.
#[test]
fn tied_any_cut_agrees_near_one() {
    let desk = Desk::new();
    let tied = "--set model.tie=true";
    train(&desk, "first", &format!("{tied} --devices cpu*2 --pipeline 2"));
    let mut lines = vec![
        format!("{INTERLEAVED} --devices cpu*2 --pipeline 2"),
        "--devices cpu*2 --pipeline 2 --set parallel.blocks_per_stage=1,3".into(),
        "--devices cpu*2 --pipeline 2 --set parallel.blocks_per_stage=3,1 --schedule gpipe".into(),
        "--devices cpu*2 --pipeline 2 --set collective=star".into(),
    ];
    for (stages, schedule) in [(2, "gpipe"), (2, "zero-bubble"), (3, "1f1b"), (4, "zero-bubble")] {
        lines.push(format!("--devices cpu*{stages} --pipeline {stages} --schedule {schedule}"));
    }
    for line in &lines {
        train(&desk, "other", &format!("{tied} {line}"));
        assert_same_bits(&desk, "other", (&desk, "first"), line);
        fs::remove_dir_all(desk.path("other")).unwrap();
    }
    train(&desk, "one", &format!("{tied} --devices cpu"));
    let (one, pipeline) = (desk.losses("one"), desk.losses("first"));
    assert_eq!(one[0], pipeline[0]);
    let error = one.iter().zip(&pipeline).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(error < 1e-5, "{error}");
    assert!(!has_files_of(&desk, "one", (&desk, "first"), STEPS), "both orders have one sum");
}

#[test]
fn beside_has_bits_of_data_parallel() {
    let desk = Desk::new();
    let shares = "--set parallel.shares=7,5";
    for collective in ["ring", "star"] {
        let collective = format!("{shares} --set collective={collective}");
        train(&desk, "both", &format!("{collective} --devices cpu*2"));
        assert_ne!(course(&desk, "both"), course(&ONE, "one"), "shares of one device");
        for schedule in SCHEDULES {
            let line = format!("{collective} --devices cpu*4 --pipeline 2 --schedule {schedule}");
            train(&desk, "other", &line);
            assert_same_bits(&desk, "other", (&desk, "both"), &line);
            fs::remove_dir_all(desk.path("other")).unwrap();
        }
        fs::remove_dir_all(desk.path("both")).unwrap();
    }
    let shares = "--set parallel.shares=6,6 --set train.micro_batch_size=3";
    train(&desk, "both", &format!("{shares} --devices cpu*2"));
    train(&desk, "other", &format!("{shares} {INTERLEAVED} --devices cpu*4 --pipeline 2"));
    assert_same_bits(&desk, "other", (&desk, "both"), "interleaved");
}

#[test]
fn beside_tied_agree_with_each_other() {
    let desk = Desk::new();
    let line = "--set model.tie=true --set parallel.shares=7,5 --devices cpu*4 --pipeline 2";
    train(&desk, "first", line);
    for more in ["--schedule gpipe", "--schedule zero-bubble --set overlap=false"] {
        train(&desk, "other", &format!("{line} {more}"));
        assert_same_bits(&desk, "other", (&desk, "first"), more);
        fs::remove_dir_all(desk.path("other")).unwrap();
    }
}

// ---- checkpoints ----

#[test]
fn resume_other_cut_has_same_bits() {
    let desk = Desk::new();
    train(&desk, "run", "--devices cpu*2 --pipeline 2 --schedule gpipe --steps 2");
    for (steps, line) in [
        (4, "--devices cpu --pipeline 1"),
        (5, "--devices cpu*2 --pipeline 2 --set parallel.blocks_per_stage=1,3"),
        (6, "--devices cpu*3 --pipeline 3 --schedule zero-bubble"),
        (8, "--devices cpu*2 --pipeline 2 --schedule interleaved --set virtual_stages=2"),
        (9, "--devices cpu*4 --pipeline 4 --schedule 1f1b"),
        (12, "--devices cpu*2 --pipeline 2 --schedule gpipe"),
    ] {
        resume(&desk, "run", &format!("{line} --steps {steps}"));
        if let Some(step) = [4, 8, 12].into_iter().find(|step| *step == steps) {
            assert!(has_files_of(&desk, "run", one(), step), "{line} to step {steps}");
        }
    }
    assert_same_bits(&desk, "run", one(), "a run that goes on with other cuts");
}

/// Sentences of a resumed run about its bits.
#[test]
fn resume_warns_of_other_bits_only() {
    let desk = Desk::new();
    let said = |run: &str, line: &str| {
        let line = format!("{line} --set train.sample_tokens=0");
        let ran = desk.run(&format!("train --resume {run} {line}")).ok();
        let about = ran.err.lines().filter(|line| line.contains("bits may differ"));
        about.map(String::from).collect::<Vec<_>>()
    };
    let none: [&str; 0] = [];
    train(&desk, "run", "--devices cpu*2 --pipeline 2 --steps 1");
    for (steps, line) in [
        (2, "--pipeline 2 --schedule zero-bubble"),
        (3, "--pipeline 2 --set blocks_per_stage=1,3 --schedule 1f1b"),
        (4, "--pipeline 2 --retune --set blocks_per_stage=3,1"),
        (5, "--devices cpu*3 --pipeline 3"),
        (6, "--devices cpu --pipeline 1"),
        (7, "--devices cpu*2 --pipeline 2 --schedule interleaved"),
    ] {
        assert_eq!(said("run", &format!("{line} --steps {steps}")), none, "{line}");
    }
    let rows = said("run", "--steps 8 --micro-batch 2");
    let [rows] = &rows[..] else { panic!("{rows:?}") };
    assert!(rows.starts_with("the run continues with other micro-batches: bits"), "{rows}");
    // One device adds both gradients of a tied embedding otherwise than two stages.
    let tied = "--set model.tie=true --devices cpu*2 --pipeline 2 --steps 1";
    train(&desk, "tied", tied);
    assert_eq!(said("tied", "--steps 2 --devices cpu*3 --pipeline 3"), none);
    let whole = said("tied", "--steps 3 --devices cpu --pipeline 1");
    let [whole] = &whole[..] else { panic!("{whole:?}") };
    assert!(whole.starts_with("the run was on cpu") && whole.contains("continues on"), "{whole}");
}

/// Cores differ between machines, and with `cpu*K` each device has few of them.
#[test]
fn threads_any_number_same_bits() {
    let desk = Desk::new();
    let trained = |threads: &str, line: &str| {
        let mut command = desk.command(line);
        let ran = command.env("RAYON_NUM_THREADS", threads).output().unwrap();
        assert!(ran.status.success(), "{threads} threads: {ran:?}");
        String::from_utf8(ran.stderr).unwrap()
    };
    trained("1", &format!("{SMALL} --out single --devices cpu --steps 4"));
    trained("3", &format!("{SMALL} --out three --devices cpu --steps 4"));
    assert!(has_files_of(&desk, "single", (&desk, "three"), 4), "1 thread and 3 differ");
    let resumed = trained("3", "train --quiet --resume single --devices cpu --steps 12");
    assert!(!resumed.contains("bits"), "{resumed}");
    assert_same_bits(&desk, "single", one(), "1 thread, then 3");
}

/// Products, convolutions and recurrences at sizes that threads share.
#[test]
fn models_any_threads_same_course() {
    let desk = Desk::new();
    desk.write("text.txt", "the cat sat on the mat and the dog ran after it. ".repeat(200));
    fs::create_dir(desk.path("images")).unwrap();
    write_idx(&desk.path("images"), "train", 0, 300);
    let text = "--data text.txt --set data.held_out=0.1 --set train.sample_tokens=0";
    for (kind, line) in [
        ("gpt", format!("{text} --set model.width=96 --set model.layers=2 --set train.batch=8")),
        ("cnn", "--data images --set model.kind=cnn --set train.batch=24".into()),
        ("rnn", format!("{text} --set model.kind=rnn --set model.cell=gru --set train.batch=12")),
    ] {
        for threads in ["1", "2", "3", "7"] {
            let mut command = desk.command(&format!(
                "train {line} --quiet --devices cpu --steps 50 --out {kind}-{threads} \
                 --set train.eval_every=50 --set train.checkpoint_every=50"
            ));
            let ran = command.env("RAYON_NUM_THREADS", threads).output().unwrap();
            assert!(ran.status.success(), "{kind} with {threads} threads: {ran:?}");
            let (own, of_one) = (format!("{kind}-{threads}"), format!("{kind}-1"));
            assert_eq!(desk.losses(&own), desk.losses(&of_one), "{own}");
            assert!(has_files_of(&desk, &own, (&desk, &of_one), 50), "{own}");
        }
    }
}

/// Data parallelism has bits of its own: what goes on from a pipeline's checkpoint equals what
/// goes on from that of one device.
#[test]
fn resume_data_parallel_and_back_same() {
    let desk = Desk::new();
    let (one, cut) = ("--devices cpu --pipeline 1", "--devices cpu*2 --pipeline 2");
    let parallel = "--devices cpu*2 --pipeline 1 --set parallel.shares=7,5 --steps 8";
    let pipelines = "--devices cpu*4 --pipeline 2 --set parallel.shares=7,5 --steps 8";
    for (run, lines) in [
        ("one", [one, parallel, one]),
        ("cut", [cut, parallel, cut]),
        ("both", [cut, pipelines, one]),
    ] {
        train(&desk, run, &format!("{} --steps 4", lines[0]));
        resume(&desk, run, lines[1]);
        resume(&desk, run, &format!("{} --steps 12", lines[2]));
        assert_eq!(desk.steps(run)[11]["step"], 12, "{run}");
    }
    assert_same_bits(&desk, "cut", (&desk, "one"), "a pipeline");
    assert_same_bits(&desk, "both", (&desk, "one"), "pipelines beside each other");
    assert_ne!(course(&desk, "one"), course(&ONE, "one"), "data parallelism has other bits");
}

#[test]
fn eval_and_text_any_cut_of_one_device() {
    let eval = |line: &str| -> Value {
        let line = format!("eval {line} --json --split train --samples 40");
        let ran = ONE.run(&line).ok();
        serde_json::from_str(&ran.out).unwrap()
    };
    let generate = |line: &str| {
        ONE.run(&format!("generate one --tokens 30 --temperature 1.2 {line}")).ok().out
    };
    let (loss, text) = (eval("one --devices cpu"), generate("--devices cpu"));
    assert!(text.chars().count() >= 30 && loss["samples"] == 40, "{text} {loss}");
    for line in [
        "--devices cpu*2 --pipeline 2",
        "--devices cpu*2 --pipeline 2 --schedule gpipe --set parallel.blocks_per_stage=1,3",
        "--devices cpu*3 --pipeline 3",
        "--devices cpu*4 --pipeline 4 --schedule zero-bubble",
        "--devices cpu*2 --pipeline 2 --schedule interleaved",
    ] {
        let evaluated = eval(&format!("one {line}"));
        // The sums of one device are those of 16 micro-batches at a time.
        let error = (evaluated["loss"].as_f64().unwrap() - loss["loss"].as_f64().unwrap()).abs();
        assert!(error < 1e-6, "{line}: {evaluated} is not {loss}");
        assert_eq!(evaluated["targets"], loss["targets"], "{line}");
        assert_eq!(generate(line), text, "{line}");
    }
    // One text needs one pipeline.
    for (devices, stages, said) in [
        ("cpu*4", 2, "generating on cpu and cpu 2, the first 2 of 4 devices"),
        ("cpu*3", 2, "generating on cpu and cpu 2, the first 2 of 3 devices"),
    ] {
        let line = format!("--devices {devices} --pipeline {stages} --temperature 1.2");
        let ran = ONE.run(&format!("generate one --tokens 30 {line}")).ok();
        assert_eq!(ran.out, text);
        assert_eq!(ran.line("generating"), said, "{}", ran.err);
        assert_eq!(ran.line("stages: ").matches("cpu").count(), 2, "{}", ran.err);
    }
    assert_ne!(generate("--devices cpu --seed 2"), text);
    let earlier = "one/checkpoints/step-00000008 --devices cpu*2 --pipeline 2";
    assert_ne!(eval(earlier)["loss"], loss["loss"]);
}

// ---- records ----

#[test]
fn pipeline_is_recorded_and_kept() {
    let desk = Desk::new();
    let line = "--devices cpu*4 --pipeline 2 --schedule zero-bubble --set parallel.shares=7,5 \
                --set parallel.blocks_per_stage=1,3 --steps 2";
    let ran = train(&desk, "run", line);
    assert_eq!(ran.err, "", "nothing is said with --quiet");
    let recorded = |step: u64| desk.manifest("run", step)["meta"]["placement"].clone();
    let placement = recorded(2);
    let mesh = serde_json::json!({ "data": 2, "pipeline": 2, "tensor": 1 });
    assert_eq!(placement["mesh"], mesh);
    assert_eq!(
        (
            &placement["options"]["pipeline"]["schedule"],
            &placement["options"]["pipeline"]["virtual_stages"],
        ),
        (&"zero-bubble".into(), &1.into())
    );
    let blocks = |first: u64, last: u64| serde_json::json!([{ "start": first, "end": last }]);
    let expected = [(blocks(0, 1), 7), (blocks(1, 4), 7), (blocks(0, 1), 5), (blocks(1, 4), 5)];
    for (index, (blocks, share)) in expected.iter().enumerate() {
        let rank = &placement["ranks"][index];
        assert_eq!((&rank["blocks"], &rank["share"]), (blocks, &(*share).into()), "{index}");
        assert_eq!(rank["position"], index);
    }
    let resolved = || fs::read_to_string(desk.path("run/resolved.toml")).unwrap();
    let first = resolved();
    for part in [
        "pipeline_stages = \"2\"\n",
        "schedule = \"zero-bubble\"\n",
        "virtual_stages = \"1\"\n",
        "\n[rank2]\nblocks = \"0..1\"\n",
        "\n[rank3]\nblocks = \"1..4\"\n",
    ] {
        assert!(first.contains(part), "'{part}' is missing in:\n{first}");
    }
    resume(&desk, "run", "--steps 4");
    assert_eq!((recorded(4), resolved()), (placement, first));
    // Without parallel.virtual_stages: two of them.
    train(&desk, "other", "--schedule interleaved --devices cpu*2 --pipeline 2 --steps 1");
    // What the run has set of its pipeline is not that of an evaluation.
    train(&desk, "typed", &format!("{INTERLEAVED} --devices cpu*2 --pipeline 2 --steps 1"));
    let eval = "eval typed --devices cpu*2 --pipeline 2 --schedule interleaved --samples 2";
    desk.run(&format!("{eval} --split train")).ok();
    let other = fs::read_to_string(desk.path("other/resolved.toml")).unwrap();
    assert!(other.contains("virtual_stages = \"2\"\n"), "{other}");
    assert!(other.contains("\n[rank1]\nblocks = \"1..2 3..4\"\n"), "{other}");
}

/// Without `--quiet`, a run says which device has which blocks.
#[test]
fn stages_are_told_with_their_blocks() {
    let desk = Desk::new();
    let line = SMALL.replace("--quiet", "");
    let ran = desk
        .run(&format!(
            "{line} --out run --steps 1 --devices cpu*3 --pipeline 3 --set blocks_per_stage=2,1,1"
        ))
        .ok();
    let stages = ran.line("stages: ");
    for part in ["cpu (", "embed to h.0, ", "cpu 2 (", "h.1", "cpu 3 (", "head", "(12 samples"] {
        assert!(stages.contains(part), "'{part}' is missing in: {stages}");
    }
}

// ---- refusals ----

/// Of each check that placement makes before it opens a device, one case.
#[test]
fn pipelines_impossible_are_refused() {
    let interleaved = format!("--devices cpu*2 --pipeline 2 {INTERLEAVED}");
    let cases: [(String, &str); 5] = [
        ("--devices cpu*5 --pipeline 5".into(), "4 blocks cannot be cut into 5 stages; lower"),
        (
            "--devices cpu*2 --pipeline 2 --set parallel.blocks_per_stage=3,2".into(),
            "parallel.blocks_per_stage = [3, 2] has 5 blocks and the model has 4; give 2",
        ),
        ("--devices cpu*3 --pipeline 2".into(), "a multiple of 2 devices, and there are 3; "),
        (
            format!("{interleaved} --set train.micro_batch_size=4"),
            "12 samples in micro-batches of 4 make 3 micro-batches, and interleaved needs a \
             multiple of the 2 stages; change train.micro_batch_size or train.batch",
        ),
        (
            "--devices cpu*4 --pipeline 2 --set parallel.shares=12".into(),
            "parallel.shares has 1 entry for 2 pipelines; give one per pipeline, in the order of",
        ),
    ];
    for (line, part) in cases {
        let desk = Desk::new();
        let before = desk.files();
        let ran = desk.run(&format!("{SMALL} {line}")).ended(78);
        let error = ran.line("error: ");
        assert!(error.contains(part), "'{part}' is missing in: {error}");
        assert_eq!((ran.out.as_str(), ran.err.lines().count()), ("", 1), "{}", ran.err);
        assert_eq!(desk.files(), before, "{error}");
        assert!(!desk.path("runs").exists(), "{error}");
    }
}
