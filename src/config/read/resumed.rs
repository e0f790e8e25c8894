//! Tests of configurations that resume from a saved one.

use std::collections::BTreeSet;
use std::path::Path;

use super::*;
use crate::config::schema::Balance;
use crate::parallel::PipelineSchedule;

/// Resolves the configuration of a new run with these flags.
fn new(sets: &[&str]) -> Resolved {
    read(None, None, &overrides(sets)).unwrap_or_else(|error| panic!("{error}"))
}

fn overrides(sets: &[&str]) -> Vec<Override> {
    sets.iter().map(|set| Override::set(set).unwrap()).collect()
}

/// Resolves the configuration of a run that resumes with these flags from a checkpoint that
/// stores `saved`.
fn try_resumed(saved: &Resolved, sets: &[&str]) -> Result<Resolved, ConfigError> {
    let typed: Vec<String> = saved.typed.all().into_iter().map(String::from).collect();
    let saved = Resolved::saved(&saved.config.to_toml(), &typed).unwrap();
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
    assert_eq!(resumed(&saved, &["train.batch=2"]).config.train.micro_batch_size, 2);
    assert_eq!(resumed(&saved, &["train.batch=16"]).config.train.micro_batch_size, 4);
    let heads = try_resumed(&saved, &["model.heads=3"]).unwrap_err();
    let expected = "--set model.heads=3: model.heads expects a number that divides \
                    model.width = 64, got 3";
    assert_eq!(heads.to_string(), expected);
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
    // Through several starts.
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
fn the_micro_batch_follows_the_batch_until_it_is_typed() {
    let saved = new(&["train.batch=8"]);
    assert_eq!(resumed(&saved, &["train.batch=16"]).config.train.micro_batch_size, 16);
    assert_eq!(resumed(&saved, &["optim.lr=0.5"]).config.train.micro_batch_size, 8);
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

#[test]
fn saved_shares_are_those_of_the_saved_devices() {
    let saved = new(&["parallel.devices=cpu*3", "parallel.shares=4,4,4"]);
    let shares = |sets: &[&str]| {
        let parallel = resumed(&saved, sets).config.parallel;
        (parallel.balance, parallel.shares)
    };
    let kept = (Balance::Fixed, vec![4, 4, 4]);
    assert_eq!(shares(&[]), kept);
    assert_eq!(shares(&["parallel.devices=CPU * 3"]), kept);
    assert_eq!(shares(&["parallel.devices=cpu*2"]), (Balance::Measured, vec![]));
    let both = ["parallel.devices=cpu*2", "parallel.shares=8,4"];
    assert_eq!(shares(&both), (Balance::Fixed, vec![8, 4]));
    assert_eq!(shares(&["parallel.pipeline_stages=3"]), (Balance::Measured, vec![]));
    let both = ["parallel.pipeline_stages=3", "parallel.shares=12"];
    assert_eq!(shares(&both), (Balance::Fixed, vec![12]));
}

#[test]
fn saved_stages_are_those_of_the_saved_devices_and_model_chunks() {
    let saved = new(&[
        "parallel.devices=cpu*2",
        "parallel.pipeline_stages=2",
        "parallel.schedule=interleaved",
        "parallel.virtual_stages=2",
        "parallel.blocks_per_stage=1,2,2,1",
    ]);
    let stages = |sets: &[&str]| {
        let resumed = resumed(&saved, sets);
        let is_typed = resumed.typed.contains("parallel.blocks_per_stage");
        assert_eq!(is_typed, !resumed.config.parallel.blocks_per_stage.is_empty(), "{sets:?}");
        resumed.config.parallel.blocks_per_stage
    };
    let kept = vec![1, 2, 2, 1];
    assert_eq!(stages(&[]), kept);
    assert_eq!(stages(&["parallel.devices=CPU * 2", "parallel.virtual_stages=2"]), kept);
    assert_eq!(stages(&["parallel.pipeline_stages=2", "train.steps=9"]), kept);
    let none: Vec<u64> = Vec::new();
    for other in [
        "parallel.devices=cpu,0",
        "parallel.pipeline_stages=3",
        "parallel.pipeline_stages=1",
        "parallel.virtual_stages=3",
        "parallel.schedule=gpipe",
    ] {
        assert_eq!(stages(&[other]), none, "{other}");
    }
    assert_eq!(stages(&["parallel.schedule=gpipe", "parallel.blocks_per_stage=2,4"]), [2, 4]);
}

#[test]
fn a_run_goes_on_without_a_pipeline_and_back() {
    let saved = new(&[
        "parallel.pipeline_stages=3",
        "parallel.schedule=gpipe",
        "parallel.blocks_per_stage=2,2,2",
    ]);
    let alone = resumed(&saved, &["parallel.pipeline_stages=1"]);
    assert_eq!(alone.config.parallel, RunConfig::default().parallel);
    assert_eq!(alone.typed.all(), BTreeSet::from(["parallel.pipeline_stages"]));
    let back = resumed(&alone, &["parallel.pipeline_stages=2", "parallel.blocks_per_stage=1,5"])
        .config
        .parallel;
    assert_eq!(
        (back.pipeline, back.schedule, back.stages),
        (2, PipelineSchedule::OneFOneB, vec![1, 5])
    );
    // One schedule follows another; the model chunks of the interleaved one are dropped.
    let interleaved = ["parallel.schedule=interleaved", "parallel.virtual_stages=2"];
    let interleaved = resumed(&saved, &interleaved);
    assert_eq!(interleaved.config.parallel.virtual_stages, 2);
    let bubble = resumed(&interleaved, &["parallel.schedule=zero-bubble"]).config.parallel;
    assert_eq!((bubble.pipeline, bubble.chunks), (3, 1));
    let one = ["parallel.schedule=interleaved", "parallel.virtual_stages=1"];
    let error = try_resumed(&saved, &one).unwrap_err().to_string();
    assert!(
        error.ends_with("set parallel.virtual_stages to 2 or more, or leave it out"),
        "{error}"
    );
}

#[test]
fn the_interleaved_schedule_has_two_model_chunks_unless_they_are_typed() {
    let saved = new(&["pipeline_stages=2", "parallel.schedule=interleaved"]);
    assert_eq!(saved.config.parallel.virtual_stages, 2);
    assert!(!saved.typed.contains("parallel.virtual_stages"));
    let parallel = |saved: &Resolved, sets: &[&str]| {
        let parallel = resumed(saved, sets).config.parallel;
        (parallel.virtual_stages, parallel.blocks_per_stage)
    };
    assert_eq!(parallel(&saved, &["train.steps=9"]), (2, vec![]), "a run keeps its own");
    assert_eq!(parallel(&saved, &["parallel.schedule=gpipe"]), (1, vec![]));
    assert_eq!(parallel(&saved, &["parallel.pipeline_stages=1"]), (1, vec![]));
    assert_eq!(parallel(&saved, &["virtual_stages=3"]), (3, vec![]));
    let typed = new(&["pipeline_stages=2", "parallel.schedule=interleaved", "virtual_stages=3"]);
    assert_eq!(parallel(&typed, &["parallel.schedule=interleaved"]), (3, vec![]));
    // The cut of another number of chunks is dropped.
    let cut = new(&["pipeline_stages=2", "blocks_per_stage=3,3"]);
    assert_eq!(parallel(&cut, &["parallel.schedule=interleaved"]), (2, vec![]));
    assert_eq!(parallel(&cut, &["parallel.schedule=gpipe"]), (1, vec![3, 3]));

    let text = saved.config.to_run_toml(&saved.typed.all());
    assert!(text.contains("\n# virtual_stages = 2  # 2 for interleaved, or else 1\n"), "{text}");
    let path = Path::new("run.toml");
    let file = |sets: &[&str]| read(None, Some((path, &text)), &overrides(sets)).unwrap().config;
    assert_eq!(file(&[]), saved.config);
    assert_eq!(file(&["parallel.schedule=gpipe"]).parallel.virtual_stages, 1);
}

#[test]
fn a_flag_supersedes_the_pipeline_of_a_file_but_not_another_flag() {
    let path = Path::new("run.toml");
    let text = "[parallel]\npipeline = 2\nschedule = 'interleaved'\nchunks = 2";
    let read = |text: &str, sets: &[&str]| read(None, Some((path, text)), &overrides(sets));
    let alone = read(text, &["parallel.pipeline_stages=1"]).unwrap();
    assert_eq!(alone.config, RunConfig::default());
    let gpipe = read(text, &["parallel.schedule=gpipe"]).unwrap().config.parallel;
    assert_eq!((gpipe.pipeline, gpipe.chunks), (2, 1));
    for (text, sets) in [
        ("", &["pipeline_stages=1", "schedule=gpipe"][..]),
        ("", &["schedule=gpipe"]),
        ("[parallel]\nschedule = 'gpipe'\npipeline = 1", &[]),
    ] {
        let error = read(text, sets).unwrap_err().to_string();
        assert!(error.contains("schedule = \"gpipe\" has no effect without a pipeline"), "{error}");
    }
}

#[test]
fn a_run_file_reads_back_and_its_derived_keys_still_follow() {
    let path = Path::new("run.toml");
    let file =
        |text: &str, sets: &[&str]| read(None, Some((path, text)), &overrides(sets)).unwrap();
    let resolved = new(&["train.batch=8", "schedule.warmup=7"]);
    let text = resolved.config.to_run_toml(&resolved.typed.all());
    for line in ["# min_lr = 0.0004  # a tenth of optim.lr", "warmup = 7", "# micro_batch_size = 8"]
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
