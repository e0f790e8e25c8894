//! The program as a user meets it: train, explain, evaluate, generate. What it refuses is in
//! `refusals.rs`, what interrupts it in `interruptions.rs` and `resume.rs`.

use std::fs;
use std::process::Stdio;
use std::sync::LazyLock;

use crate::process::{Desk, Ran, finish};
use potluck_core::format::counted;
use potluck_train::checkpoint::Checkpoint;
use serde_json::Value;

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// A desk with a run of the tiny model in `run`, evaluated every 10 steps.
fn trained() -> Desk {
    let desk = Desk::new();
    desk.train("--out run --quiet --set train.eval_every=10").ok();
    desk
}

/// [`trained`], once for all tests that only read the run.
static TRAINED: LazyLock<Desk> = LazyLock::new(trained);

fn parameters(desk: &Desk, run: &str) -> Vec<u8> {
    desk.checkpoint(run, 30, "parameters.safetensors")
}

fn json(ran: &Ran) -> Value {
    serde_json::from_str(&ran.out).unwrap()
}

// ---- train ----

#[test]
#[cfg(target_os = "linux")]
fn error_without_stderr_keeps_exit_code() {
    let desk = Desk::new();
    for line in ["train --resume nosuchrun", "bench --devices nosuchdevice --tiny"] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let child = desk.command(line).stderr(full).spawn().unwrap();
        crate::process::finish(child, line).ended(78);
    }
}

#[test]
fn train_learns_and_records_each_step() {
    let desk = Desk::new();
    desk.train("--steps 60 --set train.eval_every=20 --quiet").ok();
    let losses = desk.losses("runs/0001");
    assert_eq!(losses.len(), 60);
    assert!(mean(&losses[55..]) < mean(&losses[..5]) - 0.5, "{losses:?}");

    let keys = ["step", "loss", "lr", "grad_norm", "tokens", "ms", "tokens_per_s"];
    for (line, step) in desk.steps("runs/0001").iter().zip(1u64..) {
        let found: Vec<&String> = line.as_object().unwrap().keys().collect();
        assert_eq!(found, keys, "{line}");
        assert_eq!((line["step"].as_u64(), line["tokens"].as_u64()), (Some(step), Some(4 * 8)));
    }
    let evaluations: Vec<Value> = desk.metrics("runs/0001");
    let evaluations = evaluations.iter().filter(|line| line.get("val_loss").is_some());
    let at: Vec<_> = evaluations.map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(at, [20, 40, 60]);
}

#[test]
fn run_files_are_those_documented() {
    let desk = trained();
    let checkpoint = ["manifest.json", "moments.safetensors", "parameters.safetensors"];
    let in_run =
        ["checkpoints/best", "curves.svg", "lock", "metrics.jsonl", "resolved.toml", "run.toml"];
    let mut expected: Vec<String> = in_run.iter().map(|name| format!("run/{name}")).collect();
    for step in [20, 30] {
        let path = format!("run/checkpoints/step-{step:08}");
        expected.extend(checkpoint.iter().map(|name| format!("{path}/{name}")));
    }
    expected.extend(["text.txt".into(), "tiny.toml".into()]);
    expected.sort();
    assert_eq!(desk.files(), expected);

    let written = fs::read_to_string(desk.path("run/run.toml")).unwrap();
    assert_eq!(desk.run("train run/run.toml --explain config").ok().out, written);
    desk.run("train run/run.toml --devices cpu --quiet --out again").ok();
    assert_eq!(parameters(&desk, "again"), parameters(&desk, "run"));
}

#[test]
fn configuration_in_out_is_kept() {
    let desk = Desk::new();
    let text = fs::read_to_string(desk.path("tiny.toml")).unwrap();
    fs::create_dir(desk.path("mine")).unwrap();
    desk.write("mine/run.toml", &text);
    let line = "mine/run.toml --data text.txt --devices cpu --quiet --steps 2";
    let refused = desk.run(&format!("train {line} --out mine")).ended(78);
    assert!(refused.line("error:").contains("the run writes a run.toml of its own"));
    assert_eq!(fs::read_to_string(desk.path("mine/run.toml")).unwrap(), text);
    desk.run(&format!("train {line} --out other")).ok();
}

/// The name of a directory of another system, which is not UTF-8.
#[test]
#[cfg(target_os = "linux")]
fn run_in_a_directory_of_any_name_resumes() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let desk = Desk::new();
    let named = |line: &str, flag: &str| {
        let mut command = desk.command(line);
        command.arg(flag).arg(OsStr::from_bytes(b"r\xE9sum\xE9"));
        finish(command.spawn().unwrap(), line).ok()
    };
    named("train tiny.toml --data text.txt --devices cpu --quiet --steps 2", "--out");
    named("train --devices cpu --quiet --steps 3", "--resume");
    let again = "launch tiny.toml --data text.txt --devices cpu --quiet --rank 0 --world 1";
    named(again, "--out");
}

#[test]
fn train_output_goes_to_its_streams() {
    let desk = Desk::new();
    let ran = desk.train("").ok();
    assert_eq!(ran.out.chars().count(), 20 + 1, "{:?}", ran.out);
    assert!(!ran.err.contains('\x1b') && !ran.err.contains('\r'), "{:?}", ran.err);
    let lines: Vec<&str> = ran.err.lines().collect();
    assert!(lines[0].starts_with("1 layer, 2 heads, width 16, context 8; 3,"), "{}", ran.err);
    assert!(lines[0].contains(" parameters; vocabulary "), "{}", ran.err);
    assert!(lines[1].starts_with("an epoch is 1,"), "{}", ran.err);
    assert!(lines[1].contains(" steps of 32; device memory "), "{}", ran.err);
    for (line, step) in lines[2..6].iter().zip([1, 10, 20, 30]) {
        assert!(line.starts_with(&format!("step {step}/30  loss ")), "{line}");
        assert!(line.contains("tokens/s  eta 0:0") && line.ends_with("  cpu"), "{line}");
        assert!(line.contains("  lr ") && line.contains("  norm "), "{line}");
        assert!(line.len() < 100, "{line}");
    }
    assert!(lines[6].starts_with("step 30  val_loss "), "{}", lines[6]);
    assert_eq!(lines[7..], ["done; the model is in runs/0001"]);

    let every = desk.train("--log-every 7 --steps 15").ok();
    let shown = every.lines("step ").into_iter().filter_map(|line| line.split('/').next());
    assert!(shown.take(4).eq(["step 1", "step 7", "step 14", "step 15"]), "{}", every.err);

    let quiet = desk.train("--quiet --set train.sample_tokens=0").ok();
    assert_eq!((quiet.out.as_str(), quiet.err.as_str()), ("", ""));
}

#[test]
fn resume_done_run_or_schedule_is_told() {
    let desk = Desk::new();
    desk.train("--out run --steps 6 --quiet --set schedule.warmup=2").ok();
    let fewer = desk.resume("run", "--steps 4").ended(78);
    let refused = fewer.line("error:");
    assert!(refused.contains("train.steps = 4 is below the 6 steps of "), "{refused}");
    let done = desk.resume("run", "").ok();
    let note = done.line("warning: step 6 of 6 is already done");
    assert!(note.ends_with("raise --steps or --epochs"), "{note}");

    let longer = desk.resume("run", "--steps 9").ok();
    let note = longer.line("the learning rate stays");
    assert!(note.contains("from step 6 on") && note.ends_with("decay_steps=9"), "{note}");
    let lr = |index: usize| desk.steps("run")[index]["lr"].clone();
    assert_eq!(lr(7), lr(6));

    let stretched = desk.resume("run", "--steps 12 --set schedule.decay_steps=12").ok();
    assert!(!stretched.err.contains("the learning rate stays"), "{}", stretched.err);
}

#[test]
fn runs_are_numbered_latest_is_newest() {
    let desk = Desk::new();
    desk.train("--steps 3 --quiet").ok();
    desk.train("--steps 4 --quiet").ok();
    assert_eq!((desk.steps("runs/0001").len(), desk.steps("runs/0002").len()), (3, 4));
    desk.resume("latest", "--quiet --steps 6").ok();
    assert_eq!((desk.steps("runs/0001").len(), desk.steps("runs/0002").len()), (3, 6));
    // A checkpoint's directory names its run, and --out another place to go on in.
    desk.resume("runs/0001/checkpoints/step-00000003", "--quiet --steps 5").ok();
    desk.resume("runs/0001", "--quiet --steps 7 --out elsewhere").ok();
    assert_eq!((desk.steps("runs/0001").len(), desk.steps("elsewhere").len()), (5, 2));
    assert_eq!(desk.manifest("elsewhere", 7)["meta"]["step"], 7);
    // A run with a name is one of them.
    desk.train("--steps 3 --quiet --name named").ok();
    desk.resume("latest", "--quiet --steps 4").ok();
    assert_eq!(desk.steps("runs/named").len(), 4);
    desk.resume("runs/0001", "--quiet --steps 6").ok();
    desk.resume("latest", "--quiet --steps 8").ok();
    assert_eq!(desk.steps("runs/0001").len(), 8);
}

#[test]
fn train_zero_steps_saves_the_start() {
    let desk = Desk::new();
    desk.train("--steps 0 --quiet --out run").ok();
    assert_eq!(desk.steps("run").len(), 0);
    assert_eq!(desk.manifest("run", 0)["meta"]["optimizer_step"], 0);
    // It is where a run with steps begins.
    desk.resume("run", "--quiet --steps 30").ok();
    desk.train("--quiet --out whole").ok();
    assert_eq!(parameters(&desk, "run"), parameters(&desk, "whole"));
}

#[test]
fn train_bare_takes_builtin_corpus() {
    let desk = Desk::new();
    let small = "--set model.layers=1 --set model.heads=2 --set model.width=16 \
                 --set model.context=8 --set train.batch=4";
    desk.run(&format!("train --devices cpu --steps 2 --quiet {small}")).ok();
    assert_eq!(desk.steps("runs/0001").len(), 2);
    let toml = fs::read_to_string(desk.path("runs/0001/run.toml")).unwrap();
    assert!(toml.contains("kind = \"builtin\"") && !toml.contains("path ="), "{toml}");
}

#[test]
fn flags_win_over_file_and_earlier_ones() {
    let desk = Desk::new();
    let config =
        |line: &str| desk.run(&format!("train tiny.toml --explain config {line}")).ok().out;
    assert!(config("").contains("\nlayers = 1\n") && config("").contains("\nsteps = 30\n"));
    // Flags of common keys, and keys without their section.
    let typed = config(
        "--set model.layers=3 --steps 9 --set train.steps=8 --seed 5 --batch 8 --micro-batch 2 \
         --lr 0.5 --eval-every 3 --set eval_samples=5 --set width=32",
    );
    for line in [
        "layers = 3",
        "heads = 2",
        "width = 32",
        "steps = 8",
        "seed = 5",
        "batch = 8",
        "micro_batch_size = 2",
        "lr = 0.5",
        "eval_every = 3",
        "eval_samples = 5",
        "# decay_steps = 8  # as train.steps",
    ] {
        assert!(typed.contains(&format!("\n{line}\n")), "{line} in {typed}");
    }
}

#[test]
fn completions_and_man_have_the_flags() {
    let desk = Desk::new();
    for (shell, words) in [
        ("bash", "complete -F _potluck"),
        ("zsh", "#compdef potluck"),
        ("fish", "complete -c potluck"),
        ("powershell", "Register-ArgumentCompleter -Native -CommandName 'potluck'"),
    ] {
        let script = desk.run(&format!("completions {shell}")).ok().out;
        assert!(script.contains(words) && script.contains("micro-batch"), "{shell}: {script}");
    }
    desk.run("completions tcsh").ended(2);

    desk.run("man share/man1").ok();
    let page = |name| fs::read_to_string(desk.path(&format!("share/man1/{name}.1"))).unwrap();
    assert!(page("potluck").contains("potluck\\-data(1)"));
    assert!(page("potluck-train").contains("Samples per step, over all devices (train.batch)"));
    assert!(page("potluck-data-prepare").contains("tokens.json"));
    desk.write("file", "");
    desk.run("man file").ended(78).line("error: file: ");
}

#[test]
fn run_named_has_its_directory() {
    let desk = Desk::new();
    desk.train("--name warm-up --quiet --steps 2").ok();
    assert_eq!(desk.steps("runs/warm-up").len(), 2);
    let again = desk.train("--name warm-up --quiet --steps 2").ended(78);
    let error = again.line("error: --name warm-up: runs/warm-up exists already");
    assert!(error.contains("--resume runs/warm-up"), "{error}");
    // A run of another name goes on from it.
    desk.resume("runs/warm-up", "--name other --quiet --steps 4").ok();
    assert_eq!((desk.steps("runs/warm-up").len(), desk.steps("runs/other").len()), (2, 2));
}

#[test]
fn seed_same_gives_same_bits() {
    let desk = Desk::new();
    for (out, seed) in [("one", 1), ("same", 1), ("other", 2)] {
        desk.train(&format!("--quiet --out {out} --seed {seed} --set model.dropout=0.1")).ok();
    }
    assert_eq!(parameters(&desk, "one"), parameters(&desk, "same"));
    assert_eq!(desk.losses("one"), desk.losses("same"));
    assert_ne!(parameters(&desk, "one"), parameters(&desk, "other"));
}

#[test]
fn micro_batches_change_rounding_only() {
    let desk = Desk::new();
    desk.train("--quiet --out whole").ok();
    for rows in [1, 3] {
        let out = format!("rows{rows}");
        desk.train(&format!("--quiet --out {out} --set train.micro_batch_size={rows}")).ok();
        let (losses, whole) = (desk.losses(&out), desk.losses("whole"));
        assert!((losses[0] - whole[0]).abs() < 1e-5, "{} and {}", losses[0], whole[0]);
        assert!((losses[29] - whole[29]).abs() < 1e-3, "{} and {}", losses[29], whole[29]);
    }
}

// ---- devices ----

fn assert_fields(value: &Value, fields: &[&str]) {
    let found: Vec<&String> = value.as_object().unwrap().keys().collect();
    assert_eq!(found, fields, "{value}");
}

#[test]
fn devices_are_listed_once_each() {
    let desk = Desk::new();
    let ran = desk.run("devices --json").ok();
    assert_eq!(ran.err, "");
    let (listed, table) = (json(&ran), desk.run("devices").ok().out);
    assert_fields(&listed, &["cpu", "adapters"]);
    assert_fields(&listed["cpu"], &["selector", "name", "threads", "memory_bytes"]);
    assert!(listed["cpu"]["threads"].as_u64() > Some(0), "{listed}");
    assert!(table.starts_with("cpu  "), "{table}");

    let adapters = listed["adapters"].as_array().unwrap();
    let mut selectors = Vec::new();
    for adapter in adapters {
        let fields = [
            "selector",
            "name",
            "api",
            "kind",
            "driver",
            "merged",
            "usable",
            "why_not",
            "memory_bytes",
            "memory_free_bytes",
            "memory_of_host",
            "limits",
            "features",
            "cooperative_matrices",
            "mixed_matrix_size",
            "mapped_reads",
            "kernels",
        ];
        assert_fields(adapter, &fields);
        let fields = ["certified", "deviations", "unusual", "switched_off", "full_size"];
        assert_fields(&adapter["kernels"], &fields);
        let limits = [
            "binding_bytes",
            "buffer_bytes",
            "workgroups",
            "storage_buffers",
            "workgroup_bytes",
            "invocations",
            "immediate_bytes",
        ];
        assert_fields(&adapter["limits"], &limits);
        let features = ["f16", "subgroups", "timestamps", "cooperative_matrix", "mappable"];
        assert_fields(&adapter["features"], &features);
        let (name, api) = (adapter["name"].as_str().unwrap(), adapter["api"].as_str().unwrap());
        let selector = adapter["selector"].as_str().unwrap();
        assert!(table.contains(&format!("{selector:>3}  {name} on {api}\n")), "{table}");
        selectors.push(selector);
        for merged in adapter["merged"].as_array().unwrap() {
            assert_fields(merged, &["selector", "api", "name"]);
            assert_ne!(merged["api"], api);
            selectors.push(merged["selector"].as_str().unwrap());
        }
        // Vulkan tells how much memory there is; software adapters take the host's.
        assert!(api != "vulkan" || adapter["memory_bytes"].as_u64() > Some(1 << 20), "{adapter}");
        let of_host = ["software", "integrated GPU"].map(Value::from).contains(&adapter["kind"]);
        assert_eq!(adapter["memory_of_host"], of_host, "{adapter}");
    }
    selectors.sort_by_key(|selector| selector.parse::<usize>().unwrap());
    let numbers: Vec<String> = (0..selectors.len()).map(|index| index.to_string()).collect();
    assert_eq!(selectors, numbers, "an adapter is missing or is listed twice");
}

/// llvmpipe is one adapter through two APIs, and SwiftShader another one. Without names there is
/// still an adapter, and llvmpipe at most once.
#[test]
fn devices_of_two_apis_are_merged() {
    let wanted = crate::process::adapter_selectors();
    let desk = Desk::new();
    let listed = json(&desk.run("devices --json").ok());
    let found = |api: &str, name: &str| {
        let adapters = listed["adapters"].as_array().unwrap().iter();
        let merged = adapters.clone().flat_map(|adapter| adapter["merged"].as_array().unwrap());
        adapters.chain(merged).any(|entry| {
            entry["api"] == api && entry["name"].as_str().is_some_and(|has| has.contains(name))
        })
    };
    for (api, name) in wanted.iter().filter_map(|name| name.split_once(':')) {
        assert!(found(api, name), "{api}:{name} is not in {listed}");
    }
    let physical = listed["adapters"].as_array().unwrap().iter();
    assert_ne!(physical.len(), 0, "{listed}");
    let llvmpipes = physical.filter(|a| a["name"].as_str().unwrap().contains("llvmpipe")).count();
    assert!(llvmpipes <= 1, "{listed}");
}

// ---- --explain ----

#[test]
fn explain_prints_and_writes_no_file() {
    let desk = Desk::new();
    let before = desk.files();
    let explain = |what: &str| {
        let ran = desk.train(&format!("--explain {what}")).ok();
        assert_eq!(ran.err, "");
        ran.out
    };
    let graph = explain("graph");
    assert!(graph.lines().next().unwrap().contains("parameters, "), "{graph}");
    for part in ["F embed", "B head", "B embed", "wte.weight", "attention", "cross_entropy"] {
        assert!(graph.contains(part), "{part} is missing in:\n{graph}");
    }
    // Gradients of parameters have a pass of their own in pipelines only.
    assert!(!graph.contains("W embed"), "{graph}");
    let line = "train tiny.toml --data text.txt --devices cpu*2 --pipeline 2 --explain graph";
    let of_pipeline = desk.run(line).ok().out;
    assert!(of_pipeline.contains("W embed"), "{of_pipeline}");
    let dot = explain("dot");
    assert!(dot.starts_with("digraph potluck {") && dot.trim_end().ends_with('}'), "{dot}");
    assert!(dot.contains("->"));
    let memory = explain("memory");
    for part in ["parameters", "gradients", "moments", "peak"] {
        assert!(memory.contains(&format!("\n  {part}")), "{part} is missing in:\n{memory}");
    }
    let program = explain("program --set train.micro_batch_size=3");
    for part in
        ["micro-batch 0: 3 samples", "micro-batch 1: 1 sample ", "load", "verdict", "(F h.0)"]
    {
        assert!(program.contains(part), "{part} is missing in:\n{program}");
    }
    let keys = explain("keys");
    for section in ["model", "data", "train", "parallel", "optim", "schedule"] {
        assert!(keys.contains(&format!("[{section}]")), "{section} is missing in:\n{keys}");
    }
    assert_eq!(explain("communication"), "one device: nothing travels\n");
    assert!(explain("config").contains("/text.txt\"\n"));
    assert_eq!(desk.files(), before);
}

/// The numbers in the lines that begin with this.
fn numbers(text: &str, start: &str) -> Vec<f64> {
    let lines = text.lines().filter_map(|line| line.trim_start().strip_prefix(start));
    lines.map(|line| line.split_whitespace().next().unwrap().parse().unwrap()).collect()
}

#[test]
fn explain_memory_tells_what_is_kept() {
    let desk = Desk::new();
    let explain = |set: &str| {
        let line = "train tiny.toml --data text.txt --devices cpu --set model.layers=6";
        desk.run(&format!("{line} --explain memory --set train.{set}")).ok().out
    };
    let [none, selective, blocks] =
        ["recompute=none", "recompute=selective", "recompute=blocks"].map(explain);
    let bf16 = explain("activations=bf16");
    let of =
        |text: &str| text.lines().find(|line| line.starts_with("recomputation ")).map(String::from);
    assert_eq!(of(&none), None);
    let told = "recomputation (train.recompute = \"blocks\"): 36 of 45 forward operations run \
                again in the backward pass";
    assert_eq!(of(&blocks).as_deref(), Some(told), "{blocks}");
    assert!(of(&selective).unwrap().contains("\"selective\"): 18 of 45 forward"), "{selective}");
    let [bf16, blocks, selective, none] = [bf16, blocks, selective, none].map(|text| {
        let line = text.lines().find(|line| line.starts_with("  stash ")).unwrap();
        let kib = if line.contains(" MiB ") { 1024.0 } else { 1.0 };
        kib * numbers(line, "stash")[0]
    });
    assert!(blocks < selective && selective < none, "{blocks} {selective} {none}");
    assert!(bf16 < 0.75 * none, "{bf16} {none}");
}

/// Of the powers of two and the divisors of the batch, the most samples at a time with which nine
/// tenths of the memory are enough: on every device, by the plan; a run has as many.
#[test]
fn micro_batch_auto_fits_the_memory() {
    let desk = Desk::new();
    let mut devices = crate::process::adapter_selectors();
    devices.push("cpu".into());
    for device in devices {
        let line = format!(
            "train tiny.toml --data text.txt --devices {device} --batch 24 --set model.width=128 \
             --set model.context=64 --explain memory"
        );
        let explain = |flags: String| desk.run(&format!("{line} {flags}"));
        let needed = |samples: usize| {
            let out = explain(format!("--micro-batch {samples}")).ok().out;
            let words: Vec<&str> = out.split_whitespace().collect();
            let at = words.iter().position(|word| *word == "needed" || *word == "needed,").unwrap();
            assert_eq!(words[at - 1], "MiB", "{out}");
            words[at - 2].parse::<f64>().unwrap()
        };
        let sizes = [24, 16, 12, 8, 6, 4, 3, 2, 1];
        let bytes = sizes.map(needed);
        assert!(bytes.is_sorted_by(|a, b| a > b), "{device}: {bytes:?}");
        for limit in [bytes[1] + 2.0, bytes[4] * 1.2, bytes[8] * 1.05] {
            let limit = limit.ceil();
            let out = explain(format!("--set train.device_memory_mib={limit}")).ok().out;
            let fitting = bytes.iter().position(|bytes| *bytes <= 0.9 * limit).unwrap_or(8);
            let told = format!("memory for micro-batches of up to {} rows", sizes[fitting]);
            assert!(out.starts_with(&told), "{device}, {limit} MiB: {out}");
        }
    }
    let sets = "--batch 24 --set model.width=128 --set model.context=64 --steps 2 --quiet";
    let limited = |mebibytes: u32| format!("{sets} --set train.device_memory_mib={mebibytes}");
    desk.train(&format!("{} --out run", limited(12))).ok();
    let recorded = desk.manifest("run", 2)["meta"]["placement"]["ranks"][0].clone();
    let samples = recorded["micro_batch"].as_u64().unwrap();
    assert!((1..24).contains(&samples), "{recorded}");
    // What was recorded is kept, and refused if it fits no more; so is a number that is given.
    for line in [
        "train --resume run --steps 4 --set train.device_memory_mib=4".to_string(),
        format!("train tiny.toml --data text.txt --devices cpu --micro-batch 24 {}", limited(12)),
    ] {
        let refused = desk.run(&line).ended(78);
        let error = refused.line("error:");
        assert!(error.contains(" MiB of its memory and it has "), "{error}");
        assert!(error.contains("set train.recompute to blocks"), "{error}");
    }
    let line = format!("{} --micro-batch 24 --explain memory", limited(12));
    let small = desk.train(&line).ended(78).out;
    assert!(small.contains("\nwith --micro-batch 1, "), "{small}");
    assert!(small.contains("\nwith --set train.recompute=blocks, "), "{small}");
    assert!(small.contains("\nwith --set optim.moments=bf16, "), "{small}");
}

#[test]
fn moments_bf16_halve_memory_and_stay() {
    let desk = Desk::new();
    let explain = |moments: &str| {
        let line = "train tiny.toml --data text.txt --devices cpu --set model.layers=6 --explain";
        let out = desk.run(&format!("{line} memory --set optim.moments={moments}")).ok().out;
        let line = out.lines().find(|line| line.starts_with("  moments ")).unwrap().to_string();
        let kib = if line.contains(" MiB ") { 1024.0 } else { 1.0 };
        (kib * numbers(&line, "moments")[0], line)
    };
    let ((exact, line), (rounded, of_rounded)) = (explain("f32"), explain("bf16"));
    assert!((exact - 2.0 * rounded).abs() <= 6.0, "{line}\n{of_rounded}");
    assert!(of_rounded.ends_with("2 per parameter, in bf16"), "{of_rounded}");
    desk.train("--steps 3 --quiet --set optim.moments=bf16 --out run").ok();
    let are_rounded = |step: u64| {
        let path = desk.path("run").join(format!("checkpoints/step-{step:08}"));
        let moments = Checkpoint::load(&path).unwrap().moments;
        let mut values = moments.iter().flat_map(|tensor| &tensor.values);
        assert!(values.clone().any(|value| *value != 0.0));
        values.all(|value| value.to_bits() % (1 << 16) == 0)
    };
    assert!(are_rounded(3));
    // A resumed run keeps the format, and may have the other.
    desk.resume("run", "--steps 6 --quiet").ok();
    assert!(are_rounded(6));
    desk.resume("run", "--steps 8 --quiet --set optim.moments=f32").ok();
    assert!(!are_rounded(8));
    let refused = desk.train("--steps 3 --set optim.moments=f16").ended(78);
    assert!(
        refused.line("error:").contains("optim.moments expects \"f32\" or \"bf16\""),
        "{}",
        refused.err
    );
}

#[test]
fn explain_several_devices_tells_each() {
    let desk = Desk::new();
    let before = desk.files();
    let explain = |what: &str| {
        let line = "train tiny.toml --data text.txt --devices cpu*3 --explain";
        let ran = desk.run(&format!("{line} {what}")).ok();
        assert_eq!(ran.err, "");
        ran.out
    };
    let memory = explain("memory");
    let alone = desk.run("train tiny.toml --data text.txt --devices cpu --explain memory").ok().out;
    for (rank, name) in ["cpu", "cpu 2", "cpu 3"].into_iter().enumerate() {
        assert!(memory.contains(&format!("rank {rank}: {name}, micro-batches")), "{memory}");
    }
    for line in ["\n  staging ", "\n  pool ", " needed, of the memory of the host\n"] {
        assert_eq!(memory.matches(line).count(), 3, "{line} in:\n{memory}");
    }
    let most = " with a measured share, of up to 4 samples at a time\n";
    assert_eq!(memory.matches(most).count(), 3, "{memory}");
    assert!(!explain("memory --set parallel.shares=2,1,1").contains(most));
    assert!(memory.contains("\nmemory of the host: fits: "), "{memory}");
    assert!(alone.contains("\nmemory of the host: fits: "), "{alone}");
    let fits = |mib: u32| explain(&format!("memory --set train.device_memory_mib={mib}"));
    assert_eq!(fits(1).matches("\n  fits: ").count(), 3, "{}", fits(1));
    let large = "memory --set model.width=512 --set train.device_memory_mib=1";
    let line = format!("train tiny.toml --data text.txt --devices cpu*3 --explain {large}");
    let large = desk.run(&line).ended(78).out;
    assert_eq!(large.matches("\n  does not fit: ").count(), 3);
    let fewer = "; with fewer samples at a time neither\n";
    assert_eq!(large.matches(fewer).count(), 3, "{large}");
    let line = "train --data text.txt --devices cpu*2 --batch 64 --set model.width=128 --explain \
                memory --set train.device_memory_mib=60";
    let fewer = desk.run(line).ok().out;
    let fits = "; it fits with 16 samples at a time (";
    assert_eq!(fewer.matches("does not fit: ").count(), 2, "{fewer}");
    assert_eq!(fewer.matches(fits).count(), 2, "{fewer}");
    let (shared, whole) = (numbers(&memory, "moments"), numbers(&alone, "moments")[0]);
    // Each rank keeps about a third, and all together everything.
    assert!(shared.iter().all(|part| (0.2 * whole..0.5 * whole).contains(part)), "{memory}");
    assert!((shared.iter().sum::<f64>() - whole).abs() < 0.05, "{memory}");

    let program = explain("program --set parallel.shares=2,1,1");
    let parts: Vec<&str> = program.split("\n\n").collect();
    for (part, (rank, rows)) in parts.iter().zip([(0, 2), (1, 1), (2, 1)]) {
        let name = ["cpu", "cpu 2", "cpu 3"][rank];
        let samples = counted(rows, "sample", "samples");
        let title = format!("rank {rank}: {name}, {samples}\nmicro-batch 0: {samples} from");
        assert!(part.starts_with(&title), "{part}");
        for step in
            ["start reduce-scatter of bucket 0", "verdict", "wait for all-gather of bucket 0"]
        {
            assert!(part.contains(step), "{step} is missing in:\n{part}");
        }
    }
    assert_eq!(parts.len(), 3);

    let caveat = "shares are measured when the run starts";
    assert!(explain("communication").starts_with(caveat));
    let ring = explain("communication --set parallel.balance=fixed");
    let star = explain("communication --set parallel.balance=fixed --set parallel.collective=star");
    assert!(ring.starts_with("ring of 3 devices") && star.starts_with("star of 3 devices"));
    // The server of a star sends all parameters twice and no gradient; the sums are the same.
    let sums = |text: &str| numbers(text, "all");
    assert_eq!(sums(&ring), sums(&star));
    assert_eq!(numbers(&star, "rank 0 "), [0.0], "{star}");
    assert!(numbers(&ring, "rank 0 ")[0] > 0.0, "{ring}");
    assert_eq!(desk.files(), before);
}

#[test]
fn explain_kernels_times_all_of_a_step() {
    let desk = Desk::new();
    let before = desk.files();
    for device in ["cpu", "0"] {
        let line =
            "train tiny.toml --data text.txt --set train.micro_batch_size=3 --explain kernels";
        let table = desk.run(&format!("{line} --devices {device}")).ok().out;
        let lines: Vec<&str> = table.lines().collect();
        let head: Vec<&str> = lines[2].split_whitespace().collect();
        let columns = ["ms/step", "share", "count", "GFLOP/s", "GB/s", "op", "variant", "shape"];
        assert_eq!(head, columns, "{table}");
        let rows: Vec<&str> = lines[3..].iter().copied().take_while(|l| !l.is_empty()).collect();
        let number = |line: &str, word: usize| -> f64 {
            line.split_whitespace().nth(word).unwrap().parse().unwrap()
        };
        for op in ["matmul a b^T", "attention_grad 2 heads", "embedding_grad", "norm", "adamw"] {
            let found = rows.iter().any(|row| row.contains(&format!("  {op} ")));
            assert!(found, "{op} is missing in:\n{table}");
        }
        let times: Vec<f64> = rows.iter().map(|row| number(row, 0)).collect();
        assert!(times.is_sorted_by(|a, b| a >= b) && times[0] > 0.0, "{table}");
        let shares: f64 = rows.iter().map(|row| number(row, 1)).sum();
        assert!((shares - 100.0).abs() < 0.05 * rows.len() as f64, "{shares} % in:\n{table}");
        // Two micro-batches, of three rows and of one.
        let attention: Vec<&&str> = rows.iter().filter(|r| r.contains("  attention 2")).collect();
        assert_eq!(attention.len(), 2, "{table}");
        let line = |part: &str| lines.iter().find(|line| line.contains(part)).copied();
        let total = number(line("sum of kernels").unwrap(), 0);
        assert!((total - times.iter().sum::<f64>()).abs() < 0.001 * rows.len() as f64, "{table}");
        assert!(number(line("wall time of a step").unwrap(), 0) > 0.0, "{table}");
        assert!(line("busy").is_some(), "{table}");
        // The CPU device has no clock, and no submissions.
        let longest = line("longest submission, by its clock").map(|line| number(line, 0));
        assert_eq!(longest.is_some_and(|ms| ms > 0.0), device == "0", "{table}");
    }
    assert_eq!(desk.files(), before);
}

#[test]
fn explain_kernels_list_has_table_each() {
    let desk = Desk::new();
    let line = "train tiny.toml --data text.txt --explain kernels --devices cpu*2";
    let tables = desk.run(line).ok().out;
    assert_eq!(tables.matches("a step on cpu (").count(), 2, "{tables}");
}

/// The exit code of a program whose output nobody reads.
fn with_closed_stdout(desk: &Desk, line: &str) -> Ran {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let child = desk.command(line).stdout(Stdio::from(writer)).spawn().unwrap();
    crate::process::finish(child, line)
}

#[test]
fn stdout_closed_is_no_error() {
    let desk = &*TRAINED;
    for line in [
        "generate run --devices cpu --tokens 1000000",
        "eval run --devices cpu",
        "train tiny.toml --explain graph",
        "train --explain keys",
        "train tiny.toml --data text.txt --devices cpu --quiet --steps 1",
        "devices",
    ] {
        let ran = with_closed_stdout(desk, line);
        assert_eq!(ran.code(), Some(0), "{line}: {}", ran.err);
        assert!(!ran.err.contains("panicked") && !ran.err.contains("Broken pipe"), "{}", ran.err);
    }
}

// ---- eval ----

#[test]
fn eval_has_the_loss_of_the_record() {
    let desk = &*TRAINED;
    let recorded = desk.metrics("run").last().unwrap()["val_loss"].as_f64().unwrap();
    let ran = desk.run("eval run --devices cpu --json").ok();
    let line = json(&ran);
    let keys: Vec<&String> = line.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["step", "loss", "perplexity", "samples", "targets"]);
    assert_eq!((line["step"].as_u64(), line["loss"].as_f64()), (Some(30), Some(recorded)));
    assert!((line["perplexity"].as_f64().unwrap() - recorded.exp()).abs() < 1e-9);

    let human = desk.run("eval run --devices cpu").ok();
    assert!(human.out.starts_with(&format!("step 30  loss {recorded:.4}  ")), "{}", human.out);
    assert_eq!(ran.err.clone() + &human.err, "");
}

#[test]
fn eval_any_micro_batch_same_loss() {
    let desk = &*TRAINED;
    let eval = |line: &str| desk.run(&format!("eval run --json --split train {line}")).ok();
    let field = |ran: &Ran, name: &str| json(ran)[name].as_f64().unwrap();
    let whole = eval("--devices cpu");
    let samples = field(&whole, "samples");
    assert_eq!(field(&whole, "targets"), 8.0 * samples);
    for line in ["--devices cpu --micro-batch 3", "--devices cpu --micro-batch 1"] {
        let ran = eval(line);
        assert_eq!(field(&ran, "samples"), samples);
        assert!((field(&ran, "loss") - field(&whole, "loss")).abs() < 1e-5, "{line}");
        assert_eq!(ran.err, "");
    }
    let some = eval("--devices cpu --samples 10");
    assert_eq!((field(&some, "samples"), field(&some, "targets")), (10.0, 80.0));

    let two = eval("--devices cpu*2");
    assert_eq!(field(&two, "samples"), samples);
    assert!((field(&two, "loss") - field(&whole, "loss")).abs() < 1e-5);
    assert_eq!(eval("--devices cpu*2").out, two.out);
    assert!(two.line("on 2 devices with equal shares: cpu (").contains("), cpu 2 ("));
}

#[test]
fn generate_list_takes_first_device() {
    let desk = &*TRAINED;
    let one = desk.run("generate run --devices cpu --tokens 20").ok();
    let listed = desk.run("generate run --devices cpu*2 --tokens 20").ok();
    assert_eq!(
        (&one.out, listed.err.as_str()),
        (&listed.out, "generating on cpu, the first of 2 devices\n")
    );
}

#[test]
fn eval_other_splits_texts_and_best() {
    let desk = trained();
    let eval = |line: &str| json(&desk.run(&format!("eval run --devices cpu --json {line}")).ok());
    let (held_out, training) = (eval(""), eval("--split train"));
    let targets = |line: &Value| line["targets"].as_u64().unwrap();
    assert!(targets(&training) > 8 * targets(&held_out), "{training} {held_out}");

    // All of the text, which is both parts: its loss lies between theirs.
    let all = eval("--data text.txt");
    let loss = |line: &Value| line["loss"].as_f64().unwrap();
    assert!(targets(&all) >= targets(&training) + targets(&held_out) && loss(&all) > 0.0);
    let (low, high) = (loss(&training).min(loss(&held_out)), loss(&training).max(loss(&held_out)));
    assert!((low - 0.01..high + 0.01).contains(&loss(&all)), "{low} {} {high}", loss(&all));
    desk.write("other.txt", "the table and the guests of the cook\n");
    assert_ne!(loss(&eval("--data other.txt")), loss(&all));

    // A learning rate that ruins the model after its best evaluation.
    desk.resume("run", "--quiet --set optim.lr=1 --set schedule.min_lr=1 --steps 50").ok();
    assert_eq!((eval("")["step"].as_u64(), eval("--best")["step"].as_u64()), (Some(50), Some(30)));
    assert!(loss(&eval("")) > loss(&eval("--best")));
}

// ---- generate ----

#[test]
fn generate_same_seed_same_text() {
    let desk = &*TRAINED;
    let generate = |line: &str| {
        let tokens = if line.contains("--tokens") { "" } else { "--tokens 40" };
        let ran = desk.run(&format!("generate run --devices cpu {tokens} {line}")).ok();
        assert_eq!(ran.err, "");
        ran.out
    };
    let text = generate("--prompt the --seed 3");
    assert!(text.starts_with("the") && text.ends_with('\n'), "{text:?}");
    assert_eq!(text.chars().count(), 3 + 40 + 1);
    assert_eq!(generate("--prompt the --seed 3"), text);
    assert_ne!(generate("--prompt the --seed 4"), text);

    // The most likely token needs no seed, and is the choice among one.
    let safest = generate("--prompt the --temperature 0");
    assert_eq!(generate("--prompt the --temperature 0 --seed 9"), safest);
    assert_eq!(generate("--prompt the --top-k 1 --seed 7"), safest);
    assert_ne!(generate("--prompt the --top-k 3 --temperature 5 --seed 7"), safest);
    assert_eq!(generate("--prompt the --tokens 0").trim_end(), "the");
    assert!(!generate("--best").is_empty());
}

#[test]
fn tokenizer_byte_takes_any_file() {
    let desk = Desk::new();
    let bytes: Vec<u8> = (0..600u32).map(|i| (i * i % 251) as u8).collect();
    desk.write("bytes", &bytes);
    let line = "train tiny.toml --data bytes --devices cpu --out run --quiet --set \
                data.tokenizer=byte --steps 5";
    desk.run(line).ok();
    let text = desk.run("generate run --devices cpu --tokens 30 --prompt ü").ok().out;
    assert!(text.starts_with('ü'), "{text:?}");
}
