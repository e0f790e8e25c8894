//! Tests of configurations that resume from a saved one.

use std::collections::BTreeSet;
use std::path::Path;

use super::*;
use crate::config::schema::{Balance, MicroBatchSize, Parallel, is_of_placement};
use potluck_parallel::PipelineSchedule;

fn new(sets: &[&str]) -> Resolved {
    read(None, None, &overrides(sets)).unwrap_or_else(|error| panic!("{error}"))
}

fn overrides(sets: &[&str]) -> Vec<Override> {
    sets.iter().map(|set| Override::set(set).unwrap()).collect()
}

/// Resolves the configuration of a run that resumes with these flags from a checkpoint with the
/// configuration `saved`.
fn try_resumed(saved: &Resolved, sets: &[&str]) -> Result<Resolved, ConfigError> {
    let keys = saved.typed.all().into_iter().filter(|key| !is_of_placement(key));
    let typed: Vec<String> = keys.map(String::from).collect();
    let section = saved.config.parallel.clone();
    let mut saved = Resolved::saved(&saved.config.to_saved_toml(), &typed).unwrap();
    assert_eq!(saved.config.parallel, Parallel { overlap: section.overlap, ..Parallel::default() });
    // As in the placement.
    saved.config.parallel = section;
    read(Some(&saved), None, &overrides(sets))
}

fn resumed(saved: &Resolved, sets: &[&str]) -> Resolved {
    try_resumed(saved, sets).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn resuming_replaces_only_what_is_typed() {
    let saved = new(&["train.batch=8", "train.micro_batch_size=4", "optim.lr=0.5"]);
    assert_eq!(resumed(&saved, &[]).config, saved.config);
    let mut longer = saved.config.clone();
    longer.train.steps = 900;
    assert_eq!(resumed(&saved, &["train.steps=900"]).config, longer);
    assert_eq!(longer.schedule.decay_steps, 3500);
    longer.schedule.decay_steps = 900;
    let stretched = ["train.steps=900", "schedule.decay_steps=900"];
    assert_eq!(resumed(&saved, &stretched).config, longer);
    assert_eq!(
        resumed(&saved, &["train.batch=2"]).config.train.micro_batch_size,
        MicroBatchSize::Samples(2)
    );
    assert_eq!(
        resumed(&saved, &["train.batch=16"]).config.train.micro_batch_size,
        MicroBatchSize::Samples(4)
    );
    let heads = try_resumed(&saved, &["model.heads=3"]).unwrap_err();
    let expected = "--set model.heads=3: model.heads expects a number that divides \
                    model.width = 64, got 3";
    assert_eq!(heads.to_string(), expected);
}

#[test]
fn sections_on_models_that_earlier_versions_saved_are_read() {
    let sections = [
        "kind = \"gpt\"\nlayers = 4\nheads = 4\nwidth = 64\ncontext = 64\nbias = false\n\
         dropout = 0.0\ntie = true\nactivation = \"gelu\"",
        "kind = \"rnn\"\nlayers = 2\ncell = \"lstm\"\nstateful = false\nwidth = 128\n\
         context = 64\ndropout = 0.0",
        "kind = \"mlp\"\nhidden = [128]\ndropout = 0.0\nactivation = \"relu\"",
        "kind = \"cnn\"\nchannels = [6, 16]\nhidden = [120, 84]\ndropout = 0.0\n\
         activation = \"relu\"",
        "kind = \"resnet\"\nlayers = 1\nwidth = 16\nnorm = \"batch\"",
    ];
    for section in sections {
        let is_of_tokens = section.contains("context");
        let data = if is_of_tokens { "" } else { "[data]\nkind = \"idx\"\npath = \"images\"" };
        let saved = Resolved::saved(&format!("[model]\n{section}\n{data}"), &[]).unwrap();
        assert_eq!(saved.config.section_toml("model"), format!("[model]\n{section}\n"));
        assert_eq!(resumed(&saved, &["train.steps=9"]).config.model, saved.config.model);
    }
}

#[test]
fn a_checkpoint_of_no_steps_does_not_fix_the_schedule() {
    let start = new(&["train.steps=0"]);
    let whole = new(&["train.steps=300"]);
    assert_eq!(resumed(&start, &["train.steps=300"]).config, whole.config);
}

#[test]
fn a_warm_up_that_was_typed_stays_even_if_it_is_the_default() {
    let start = new(&["train.steps=0", "schedule.warmup=50"]);
    let longer = resumed(&start, &["train.steps=2000"]);
    assert_eq!(longer.config.schedule.warmup, 50);
    assert_eq!(
        resumed(&new(&["train.steps=0"]), &["train.steps=2000"]).config.schedule.warmup,
        100
    );
    // Over several starts.
    let again = resumed(&resumed(&start, &[]), &["train.steps=2000"]);
    assert_eq!(again.config.schedule.warmup, 50);
}

#[test]
fn min_lr_follows_lr_until_it_is_typed() {
    let lower = resumed(&new(&["optim.lr=1e-3"]), &["optim.lr=1e-5"]);
    assert_eq!(lower.config.schedule.min_lr, 1e-5 / 10.0);
    let typed = new(&["schedule.min_lr=1e-6"]);
    assert_eq!(resumed(&typed, &["optim.lr=1e-2"]).config.schedule.min_lr, 1e-6);
    let error = try_resumed(&new(&["schedule.min_lr=1e-4"]), &["optim.lr=1e-5"]).unwrap_err();
    let expected =
        "--set optim.lr=1e-5: schedule.min_lr expects at most optim.lr = 1e-5, got 0.0001";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn keys_that_lose_their_effect_at_a_resume_get_their_defaults() {
    let saved = new(&["optim.lr=1e-2", "optim.beta1=0.5", "optim.eps=1e-6"]);
    let sgd = resumed(&saved, &["optim.kind=sgd", "schedule.kind=constant"]);
    assert_eq!((sgd.config.optim.beta1, sgd.config.optim.eps), (0.9, 1e-8));
    let linear = resumed(&sgd, &["schedule.kind=linear"]).config.schedule;
    assert_eq!((linear.min_lr, linear.warmup), (1e-3, 100));
    let cycle = resumed(&sgd, &["schedule.kind=one-cycle"]);
    assert_eq!(cycle.config.schedule.warmup, 0);
    let kept = resumed(&cycle, &["schedule.kind=wsd"]).config.schedule;
    assert_eq!((kept.warmup, kept.cooldown_steps), (0, 350));
    let stretched = ["schedule.kind=wsd", "train.steps=900", "schedule.decay_steps=900"];
    assert_eq!(resumed(&cycle, &stretched).config.schedule.cooldown_steps, 90);
    let typed = new(&["optim.lr=1e-4", "schedule.min_lr=1e-6"]);
    let constant = resumed(&typed, &["schedule.kind=constant"]);
    let again = resumed(&constant, &["schedule.kind=linear"]);
    assert_eq!(again.config.schedule.min_lr, 1e-5);
    let error = try_resumed(&sgd, &["optim.beta1=0.5"]).unwrap_err().to_string();
    assert!(error.starts_with("--set optim.beta1=0.5: optim.beta1 has no effect"), "{error}");
}

#[test]
fn values_without_an_effect_that_earlier_versions_saved_are_ignored() {
    let text = "[optim]\nkind = \"sgd\"\nbeta1 = 0.5\nmomentum = 0.8\n\
                [schedule]\nkind = \"one-cycle\"\nwarmup = 100\nmin_lr = 1e-5\n";
    let saved = Resolved::saved(text, &["optim.beta1".into()]).unwrap();
    assert_eq!((saved.config.optim.momentum, saved.config.optim.beta1), (0.8, 0.9));
    assert_eq!((saved.config.schedule.warmup, saved.config.schedule.min_lr), (0, 4e-4));
    assert_eq!(resumed(&saved, &[]).config, saved.config);
}

#[test]
fn the_micro_batch_follows_the_batch_until_it_is_typed() {
    let saved = new(&["train.batch=8"]);
    assert_eq!(
        resumed(&saved, &["train.batch=16"]).config.train.micro_batch_size,
        MicroBatchSize::Auto
    );
    assert_eq!(
        resumed(&saved, &["optim.lr=0.5"]).config.train.micro_batch_size,
        MicroBatchSize::Auto
    );
}

#[test]
fn a_run_that_becomes_a_pipeline_gets_its_micro_batches() {
    let rows = |saved: &[&str], sets: &[&str]| -> usize {
        resumed(&new(saved), sets).config.train.micro_batch_size.of_batch(16)
    };
    assert_eq!(rows(&["train.batch=16"], &["pipeline_stages=2"]), 2);
    let typed = ["train.batch=16", "train.micro_batch_size=4"];
    assert_eq!(rows(&typed, &["pipeline_stages=2"]), 4);
    // A single device continues with the sums of the pipeline.
    assert_eq!(rows(&["train.batch=16", "pipeline_stages=2"], &["pipeline_stages=1"]), 2);
}

#[test]
fn a_key_of_a_pipeline_that_is_decided_anew_says_so() {
    let saved = new(&["pipeline_stages=2"]);
    let error = try_resumed(&saved, &["parallel.schedule=gpipe"]).unwrap_err().to_string();
    let end = "; parallel.schedule decides the placement anew, so that its other keys are those of \
               a new run";
    assert!(error.contains("without a pipeline") && error.ends_with(end), "{error}");
    resumed(&saved, &["parallel.schedule=gpipe", "pipeline_stages=2"]);
}

#[test]
fn devices_are_saved_as_they_were_typed() {
    let devices = |resolved: &Resolved| resolved.config.parallel.devices.clone();
    assert_eq!(devices(&new(&[])), "auto");
    for typed in ["0", "cpu*2", "RTX, Radeon,cpu", "\"llvmpipe (LLVM 19, 256 bits)\""] {
        let by_flag = read(None, None, &[Override::devices(typed)]).unwrap();
        assert_eq!(devices(&by_flag), typed);
        assert_eq!(devices(&resumed(&by_flag, &[])), typed);
        let by_key = new(&[&format!("parallel.devices={typed}")]);
        assert_eq!(devices(&by_key), typed.trim_matches('"'));
    }
    let other = read(Some(&new(&["parallel.devices=cpu*2"])), None, &[Override::devices("auto")]);
    assert_eq!(devices(&other.unwrap()), "auto");
}

/// A run on two pipelines of two devices, with every key of the placement set.
fn run_with_placement() -> Resolved {
    new(&[
        "parallel.devices=cpu*4",
        "parallel.shares=5,7",
        "parallel.pipeline_stages=2",
        "parallel.schedule=interleaved",
        "parallel.virtual_stages=2",
        "parallel.blocks_per_stage=1,2,2,1",
        "parallel.collective=star",
        "parallel.reduce_site=host",
        "parallel.message_kib=4",
        "parallel.overlap=false",
    ])
}

#[test]
fn other_keys_leave_the_placement_as_it_is() {
    let saved = run_with_placement();
    for sets in [&[][..], &["train.steps=9"], &["optim.lr=1e-3", "faults.on_loss=continue"]] {
        assert_eq!(resumed(&saved, sets).config.parallel, saved.config.parallel, "{sets:?}");
    }
    for same in ["parallel.devices=CPU * 4", "parallel.shares=5,7", "parallel.collective=star"] {
        let resumed = resumed(&saved, &[same]);
        assert_eq!(resumed.other_placement, None, "{same}");
        assert_eq!(resumed.config.parallel.shares, saved.config.parallel.shares, "{same}");
    }
    let overlapping = resumed(&saved, &["parallel.overlap=true"]).config.parallel;
    assert_eq!(overlapping, Parallel { overlap: true, ..saved.config.parallel });
}

#[test]
fn a_key_of_the_placement_decides_all_of_it_anew() {
    let saved = run_with_placement();
    let fresh =
        Parallel { devices: "cpu*4".into(), overlap: false, ..RunConfig::default().parallel };
    let parallel = |sets: &[&str]| {
        let resumed = resumed(&saved, sets);
        assert!(resumed.other_placement.is_some_and(is_of_placement), "{sets:?}");
        resumed.config.parallel
    };
    assert_eq!(
        parallel(&["parallel.devices=cpu*3"]),
        Parallel { devices: "cpu*3".into(), ..fresh.clone() }
    );
    assert_eq!(parallel(&["parallel.balance=measured"]), fresh);
    assert_eq!(
        parallel(&["parallel.shares=3,3,3,3"]),
        Parallel { balance: Balance::Fixed, shares: vec![3; 4], ..fresh.clone() }
    );
    assert_eq!(
        parallel(&["parallel.pipeline_stages=4"]),
        Parallel { pipeline_stages: 4, ..fresh.clone() }
    );
    assert_eq!(parallel(&["parallel.message_kib=8"]), Parallel { message_kib: 8, ..fresh.clone() });
    let schedule = PipelineSchedule::Interleaved;
    assert_eq!(
        parallel(&["parallel.pipeline_stages=4", "parallel.schedule=interleaved"]),
        Parallel { pipeline_stages: 4, schedule, virtual_stages: 2, ..fresh }
    );
    let alone = try_resumed(&saved, &["parallel.schedule=gpipe"]).unwrap_err().to_string();
    assert!(alone.contains("schedule = \"gpipe\" has no effect without a pipeline"), "{alone}");
}

#[test]
fn the_interleaved_schedule_has_two_model_chunks_unless_they_are_typed() {
    let saved = new(&["pipeline_stages=2", "parallel.schedule=interleaved"]);
    assert_eq!(saved.config.parallel.virtual_stages, 2);
    assert!(!saved.typed.contains("parallel.virtual_stages"));
    assert_eq!(resumed(&saved, &["train.steps=9"]).config.parallel.virtual_stages, 2);

    let text = saved.config.to_run_toml(&saved.typed.all());
    assert!(text.contains("\n# virtual_stages = 2  # 2 for interleaved, or else 1\n"), "{text}");
    let path = Path::new("run.toml");
    let file = |sets: &[&str]| read(None, Some((path, &text)), &overrides(sets)).unwrap().config;
    assert_eq!(file(&[]), saved.config);
    assert_eq!(file(&["parallel.schedule=gpipe"]).parallel.virtual_stages, 1);
}

#[test]
fn keys_of_a_file_that_a_flag_contradicts_are_refused_with_their_line() {
    let path = Path::new("run.toml");
    let error = |text: &str, sets: &[&str]| {
        read(None, Some((path, text)), &overrides(sets)).unwrap_err().to_string()
    };
    let pipeline = "[parallel]\npipeline_stages = 2\nschedule = 'gpipe'";
    assert_eq!(
        error(pipeline, &["parallel.pipeline_stages=1"]),
        "--set parallel.pipeline_stages=1: parallel.schedule = \"gpipe\" has no effect without a \
         pipeline; set parallel.pipeline_stages to 2 or more, or leave it out (parallel.schedule \
         is set in run.toml:3)"
    );
    for (text, sets) in [
        ("", &["pipeline_stages=1", "schedule=gpipe"][..]),
        ("", &["schedule=gpipe"]),
        ("[parallel]\nschedule = 'gpipe'\npipeline_stages = 1", &[]),
    ] {
        let error = error(text, sets);
        assert!(error.contains("schedule = \"gpipe\" has no effect without a pipeline"), "{error}");
    }
}

#[test]
fn the_defaults_of_a_gpt_follow_its_width_and_context() {
    let lr = |width: usize| new(&[&format!("model.width={width}")]).config.optim.lr;
    assert_eq!([lr(64), lr(128), lr(768)], [4e-3, 2.4e-3, 6.2e-4]);
    assert_eq!(new(&["model.width=768", "optim.lr=1e-3"]).config.optim.lr, 1e-3);
    assert_eq!(new(&["model.width=768"]).config.schedule.min_lr, 6.2e-5);
    let samples = |sets: &[&str]| new(sets).config.train.eval_samples;
    assert_eq!(samples(&[]), 1024);
    assert_eq!(samples(&["model.context=1024"]), 64);
    assert_eq!(samples(&["model.context=65536"]), 1);
    assert_eq!(samples(&["model.context=1024", "train.eval_samples=1024"]), 1024);
    // A resume keeps the values of the run.
    let typed = new(&["model.width=768", "optim.lr=1e-3", "train.eval_samples=7"]);
    let kept = resumed(&typed, &[]).config;
    assert_eq!((kept.optim.lr, kept.train.eval_samples), (1e-3, 7));
    let text = new(&["model.width=768"]).config.to_run_toml(&["model.width"].into());
    assert!(text.contains("\n# lr = 0.00062  # as model.kind has it, "), "{text}");
}

#[test]
fn a_run_file_and_a_checkpoint_keep_the_preset_and_what_overrides_it() {
    let run = new(&["preset=gpt2", "model.layers=2", "model.context=32"]);
    let text = run.config.to_run_toml(&run.typed.all());
    for line in
        ["preset = \"gpt2\"", "layers = 2", "# width = 768  # as model.preset", "context = 32"]
    {
        assert!(text.lines().any(|found| found == line), "'{line}' is missing: {text}");
    }
    let path = Path::new("run.toml");
    let file = |sets: &[&str]| read(None, Some((path, &text)), &overrides(sets)).unwrap().config;
    assert_eq!(file(&[]), run.config);
    assert_eq!(file(&["preset=gpt2-xl"]).value("model.width"), Some(1600.into()));
    // A resume keeps the sizes: another preset changes none, and is refused by name.
    assert_eq!(resumed(&run, &["preset=gpt2"]).config, run.config);
    let other = resumed(&run, &["preset=gpt2-xl"]).config;
    assert_eq!(other.value("model.width"), run.config.value("model.width"));
    assert_ne!(other.model, run.config.model);
}

#[test]
fn a_run_file_writes_what_a_written_key_would_derive_otherwise() {
    let mut config = RunConfig::default();
    config.optim.lr = 2.0;
    let text = config.to_run_toml(&BTreeSet::new());
    let path = Path::new("run.toml");
    assert_eq!(read(None, Some((path, &text)), &[]).unwrap().config, config);
}

#[test]
fn a_run_file_reads_back_and_its_derived_keys_still_follow() {
    let path = Path::new("run.toml");
    let file =
        |text: &str, sets: &[&str]| read(None, Some((path, text)), &overrides(sets)).unwrap();
    let resolved = new(&["train.batch=8", "schedule.warmup=7"]);
    let text = resolved.config.to_run_toml(&resolved.typed.all());
    for line in
        ["# min_lr = 0.0004  # a tenth of optim.lr", "warmup = 7", "# micro_batch_size = \"auto\""]
    {
        assert!(text.lines().any(|found| found.starts_with(line)), "'{line}' is missing: {text}");
    }
    assert_eq!(file(&text, &[]).config, resolved.config);
    let lower = file(&text, &["optim.lr=1e-5"]).config;
    assert_eq!((lower.schedule.min_lr, lower.schedule.warmup), (1e-5 / 10.0, 7));
    // A value that the rule of a new run would not give is written out.
    let longer = resumed(&resolved, &["train.steps=900"]);
    let text = longer.config.to_run_toml(&longer.typed.all());
    assert!(text.contains("\ndecay_steps = 3500\n"), "{text}");
    assert_eq!(file(&text, &[]).config, longer.config);
}

#[test]
fn changes_are_the_keys_that_were_set_to_another_value() {
    let saved = new(&["train.steps=5", "optim.lr=1e-3"]);
    let now = resumed(&saved, &["train.steps=9", "optim.lr=1e-3", "parallel.devices=cpu*2"]);
    let changes = now.changes(&saved.config);
    let expected = [("train.steps", "9"), ("parallel.devices", "\"cpu*2\"")];
    assert_eq!(changes, expected.map(|(key, value)| (key, value.to_string())));
    assert_eq!(now.typed.before, Some(BTreeSet::from(["optim.lr", "train.steps"])));
}
