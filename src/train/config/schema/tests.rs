//! Tests of the schema: defaults, ranges, and keys that contradict each other.

use super::*;
use crate::families::FAMILIES;

/// Default configuration with a kind of model, on data suitable for it.
fn of_kind(kind: &str) -> RunConfig {
    let mut config = RunConfig::default();
    config.set("model.kind", kind.into());
    if config.model.context().is_none() {
        (config.data.kind, config.data.path) = (DataKind::Idx, Some("x".into()));
    }
    config
}

fn of_kinds() -> Vec<RunConfig> {
    FAMILIES.iter().map(|family| of_kind(family.name)).collect()
}

#[test]
fn the_default_is_sound_and_follows_itself() {
    let mut config = RunConfig::default();
    config.apply_derived_defaults(&TypedKeys::default());
    assert_eq!(config, RunConfig::default());
    assert_eq!(config.check(), Ok(()));
}

#[test]
fn every_word_of_a_key_sets_a_value_of_its_own() {
    for mut config in of_kinds() {
        for key in config.keys() {
            let Constraint::OneOf(words) = key.accepts else { continue };
            for word in words.iter().filter(|_| key.full_name != MODEL_KIND) {
                config.set(key.full_name, (*word).into());
                assert_eq!(config.value(key.full_name), Some((*word).into()), "{}", key.full_name);
            }
        }
    }
}

#[test]
fn every_key_is_documented_and_its_default_is_accepted() {
    for config in of_kinds() {
        let mut names = BTreeSet::new();
        for key in config.keys() {
            assert!(key.doc.trim().ends_with('.'), "{} has no sentence", key.full_name);
            assert_eq!(key.full_name, format!("{}.{}", key.section, key.name));
            assert!(names.insert(key.full_name), "{} is there twice", key.full_name);
            if let Some(value) = config.value(key.full_name) {
                assert_eq!(key.accepts.check(value.clone()), Some(value), "{}", key.full_name);
            }
        }
    }
}

#[test]
fn defaults_that_depend_on_the_model_are_accepted_by_their_keys() {
    for mut config in of_kinds() {
        for (name, value) in config.model.defaults() {
            let key = known_key(name).unwrap();
            assert!(key.accepts.check(value).is_some() && key.section != "model", "{name}");
        }
        config.apply_derived_defaults(&TypedKeys::default());
        assert_eq!(config.check(), Ok(()));
    }
}

/// Checks the default configuration after `edit`; returns the message.
fn check(edit: impl Fn(&mut RunConfig)) -> String {
    let mut config = RunConfig::default();
    edit(&mut config);
    config.check().map_or_else(|invalid| invalid.to_string(), |()| "fine".into())
}

#[test]
fn impossible_values_name_the_key_and_what_is_accepted() {
    let heads = "model.heads expects a number that divides model.width = 64, got 3";
    assert_eq!(check(|c| c.set("model.heads", 3.into())), heads);
    let shares = |c: &mut RunConfig, shares: &[u64]| {
        (c.parallel.shares, c.parallel.balance) = (shares.to_vec(), Balance::Fixed);
    };
    let sum = "parallel.shares expects numbers with the sum train.batch = 12, got [4, 4], \
               whose sum is 8";
    assert_eq!(check(|c| shares(c, &[4, 4])), sum);
    assert!(check(|c| shares(c, &[u64::MAX, 13])).contains("18446744073709551628"));
    assert!(check(|c| shares(c, &[12, 0])).contains("whole numbers from 1 on"));
    assert_eq!(check(|c| shares(c, &[4, 8])), "fine");
    let measured = check(|c| c.parallel.shares = vec![12]);
    assert!(measured.contains("conflicts with parallel.balance"), "{measured}");
    let changes = |c: &mut RunConfig, changes: &[&str]| {
        c.parallel.balance = Balance::Fixed;
        c.parallel.share_changes = changes.iter().map(ToString::to_string).collect();
    };
    assert_eq!(check(|c| changes(c, &["9: 4 8", "34: 5 7"])), "fine");
    for (wrong, why) in [
        (&["9 4 8"][..], "'9 4 8' is not a change of shares"),
        (&["9: 4 9"], "with the sum train.batch = 12, got '9: 4 9'"),
        (&["9: 12 0"], "at least 1 sample for each device"),
        (&["1: 4 8"], "in the order of their steps, from step 2 on"),
        (&["9: 4 8", "9: 5 7"], "in the order of their steps, from step 2 on"),
    ] {
        let refused = check(|c| changes(c, wrong));
        assert!(refused.contains(why), "{wrong:?}: {refused}");
    }
    let measured = check(|c| c.parallel.share_changes = vec!["9: 4 8".into()]);
    assert!(measured.contains("conflicts with parallel.balance"), "{measured}");
    let stages = check(|c| {
        changes(c, &["9: 4 8"]);
        c.parallel.pipeline_stages = 2;
    });
    assert!(stages.contains("leave it or parallel.pipeline_stages out"), "{stages}");
    let layers = "model.layers expects a whole number from 1 to 1024, got 1000000000000";
    assert_eq!(check(|c| c.set("model.layers", 1_000_000_000_000.into())), layers);
    assert!(check(|c| c.train.seed = u64::MAX).ends_with("got 18446744073709551615"));
    let micro = "train.micro_batch_size expects at most train.batch = 12, got 13";
    assert_eq!(check(|c| c.train.micro_batch_size = MicroBatchSize::Samples(13)), micro);
    assert_eq!(check(|c| c.train.micro_batch_size = MicroBatchSize::Samples(5)), "fine");
    let lr = "optim.lr expects a number above 0, at most 1000, got NaN";
    assert_eq!(check(|c| c.optim.lr = f64::NAN), lr);
    let min_lr = "schedule.min_lr expects at most optim.lr = 0.004, got 0.01";
    assert_eq!(check(|c| c.schedule.min_lr = 0.01), min_lr);
    let constant = |c: &mut RunConfig| (c.optim.lr, c.schedule.kind) = (1e-4, DecayKind::Constant);
    assert_eq!(check(constant), "fine");
    let nesterov = |momentum: f64| {
        check(|c| {
            (c.optim.kind, c.optim.nesterov, c.optim.momentum) = (OptimKind::Sgd, true, momentum);
        })
    };
    assert_eq!(nesterov(0.9), "fine");
    let without = "optim.nesterov expects an optim.momentum above 0; set one, or leave it out";
    assert_eq!(nesterov(0.0), without);
    let alpha = "optim.alpha has no effect with optim.kind = \"adamw\", only with \"rmsprop\"; \
                 leave it out";
    assert_eq!(check(|c| c.optim.alpha = 0.5), alpha);
    let csv = |c: &mut RunConfig| {
        (c.data.kind, c.data.path) = (DataKind::Csv, Some("x.csv".into()));
        c.set("model.kind", "mlp".into());
    };
    assert_eq!(check(csv), "fine");
    let scope = "train.sample_tokens has no effect with model.kind = \"mlp\", only with \"gpt\", \
                 \"llama\" or \"rnn\"; leave it out";
    assert_eq!(check(|c| (csv(c), c.train.sample_tokens = 2).1), scope);
    let crop = "data.crop has no effect with data.kind = \"csv\", only with \"idx\", \"cifar10\", \
                \"npy\" or \"images\"; leave it out";
    assert_eq!(check(|c| (csv(c), c.data.crop = 2).1), crop);
    let model = "model.kind expects \"mlp\" for tables (data.kind = \"csv\")";
    assert_eq!(check(|c| (csv(c), c.set("model.kind", "gpt".into())).1), model);
    assert_eq!(check(|c| (csv(c), c.set("model.kind", "cnn".into())).1), model);
    let model = "model.kind expects \"gpt\", \"llama\" or \"rnn\" for texts and tokens \
                 (data.kind = \"builtin\")";
    assert_eq!(check(|c| c.set("model.kind", "mlp".into())), model);
    let hidden = |widths: &[u64]| {
        check(|c| (csv(c), c.set("model.hidden", Value::IntList(widths.to_vec()))).1)
    };
    assert_eq!(hidden(&[]), "fine");
    assert_eq!(hidden(&[65_537]), "model.hidden expects widths from 1 to 65536, got 65537");
    assert_eq!(hidden(&[1; 1025]), "model.hidden expects at most 1024 layers, got 1025");
    let size = "data.image_size expects [height, width], got [8]";
    let images = |c: &mut RunConfig| {
        csv(c);
        (c.data.kind, c.data.image_size) = (DataKind::Images, vec![8]);
    };
    assert_eq!(check(images), size);
    let kind = "data.kind = \"text\" expects a data.path; give --data PATH";
    assert_eq!(check(|c| c.data.kind = DataKind::Text), kind);
    let path = "data.path conflicts with data.kind = \"builtin\"; leave one of them out";
    assert_eq!(check(|c| c.data.path = Some("x".into())), path);
}

#[test]
fn a_recurrent_model_has_defaults_and_keys_of_its_own() {
    let mut config = of_kind("rnn");
    config.set("model.width", 48.into());
    let now = ["model.kind", "model.width"].into();
    config.apply_derived_defaults(&TypedKeys { now, before: None });
    let text = config.to_toml();
    for line in ["layers = 2", "cell = \"lstm\"", "width = 48", "batch = 32", "lr = 0.002"] {
        assert!(text.contains(&format!("\n{line}\n")), "{line}: {text}");
    }
    assert!(!text.contains("heads") && !text.contains("activation ="), "{text}");
}

#[test]
fn a_model_of_samples_has_defaults_of_its_own_unless_they_are_set() {
    let mut config = RunConfig::default();
    config.data.kind = DataKind::Csv;
    config.optim.lr = 0.5;
    let now = ["data.kind", "optim.lr"].into();
    let typed = TypedKeys { now, before: None };
    config.select_kinds(&typed);
    config.apply_derived_defaults(&typed);
    assert_eq!(config.value("model.kind"), Some("mlp".into()));
    assert_eq!(config.value("model.activation"), Some("relu".into()));
    assert_eq!(config.train.batch, 128);
    assert_eq!((config.train.micro_batch_size, config.optim.lr), (MicroBatchSize::Auto, 0.5));
    let text = config.to_toml();
    assert!(text.contains("hidden = [128]") && !text.contains("heads"), "{text}");
    let text = RunConfig::default().to_toml();
    assert!(text.contains("heads = 4") && !text.contains("hidden"), "{text}");
}

fn check_pipeline(
    pipeline: usize,
    schedule: PipelineSchedule,
    chunks: usize,
    stages: &[u64],
) -> String {
    check(|c| {
        c.parallel = Parallel {
            pipeline_stages: pipeline,
            schedule,
            virtual_stages: chunks,
            blocks_per_stage: stages.to_vec(),
            ..Parallel::default()
        };
    })
}

#[test]
fn a_pipeline_has_four_micro_batches_per_stage_unless_they_are_given() {
    use PipelineSchedule::{Interleaved, OneFOneB};
    let of_model = |kind, batch, pipeline, schedule| {
        let mut config = of_kind(kind);
        (config.train.batch, config.parallel.pipeline_stages) = (batch, pipeline);
        config.parallel.schedule = schedule;
        let now = ["train.batch", "parallel.pipeline_stages"].into();
        let mut typed = TypedKeys { now, before: None };
        config.apply_derived_defaults(&typed);
        let derived = config.train.micro_batch_size.of_batch(batch);
        typed.now.insert("train.micro_batch_size");
        config.train.micro_batch_size = MicroBatchSize::Samples(5);
        config.apply_derived_defaults(&typed);
        assert_eq!(config.train.micro_batch_size, MicroBatchSize::Samples(5));
        derived
    };
    let of = |batch, pipeline, schedule| of_model("gpt", batch, pipeline, schedule);
    assert_eq!([of(64, 1, OneFOneB), of(64, 2, OneFOneB), of(64, 4, OneFOneB)], [64, 8, 4]);
    assert_eq!([of(12, 2, OneFOneB), of(7, 2, OneFOneB), of(100, 3, OneFOneB)], [1, 1, 8]);
    // Batches of 50 samples: micro-batches of 6 give 9; of 5 they give 10, a multiple of 2.
    assert_eq!([of(50, 2, OneFOneB), of(50, 2, Interleaved)], [6, 5]);
    // For 7 samples only micro-batches of 2 give a multiple of 4, but 2 is above the limit.
    assert_eq!(of(7, 4, Interleaved), 1);
    // Batch normalization needs 8 samples, if the batch has that many.
    let resnet = |batch| of_model("resnet", batch, 2, OneFOneB);
    assert_eq!([resnet(128), resnet(32), resnet(6)], [16, 8, 6]);
}

#[test]
fn pipelines_that_fit_are_fine() {
    use PipelineSchedule::{GPipe, Interleaved, OneFOneB, ZeroBubble};
    for schedule in [GPipe, OneFOneB, ZeroBubble] {
        assert_eq!(check_pipeline(3, schedule, 1, &[]), "fine");
        assert_eq!(check_pipeline(3, schedule, 1, &[2, 3, 1]), "fine");
    }
    assert_eq!(check_pipeline(2, Interleaved, 2, &[]), "fine");
    assert_eq!(check_pipeline(2, Interleaved, 2, &[1, 2, 2, 1]), "fine");
    assert_eq!(check_pipeline(64, Interleaved, 16, &[BLOCKS_MAX; 1024]), "fine");
}

#[test]
fn keys_of_a_pipeline_that_contradict_each_other_are_refused() {
    use PipelineSchedule::{GPipe, Interleaved, OneFOneB};
    let alone = "has no effect without a pipeline; set parallel.pipeline_stages to 2 or more, or \
                 leave it out";
    let refused = |given: &str| format!("{given} {alone}");
    let schedule = refused("parallel.schedule = \"gpipe\"");
    assert_eq!(check_pipeline(1, GPipe, 1, &[]), schedule);
    assert_eq!(check_pipeline(1, OneFOneB, 2, &[]), refused("parallel.virtual_stages = 2"));
    assert_eq!(check_pipeline(1, OneFOneB, 1, &[6]), refused("parallel.blocks_per_stage = [6]"));
    let chunks = "parallel.schedule = \"interleaved\" needs several model chunks per device, \
                  got parallel.virtual_stages = 1; set parallel.virtual_stages to 2 or more, or \
                  leave it out";
    assert_eq!(check_pipeline(2, Interleaved, 1, &[]), chunks);
    let interleaved = "parallel.virtual_stages expects 1 with parallel.schedule = \"1f1b\", got 2; \
                       set parallel.schedule to \"interleaved\", or leave it out";
    assert_eq!(check_pipeline(2, OneFOneB, 2, &[]), interleaved);
    let stages = "parallel.blocks_per_stage expects 2 numbers of blocks, one for each stage of \
                  parallel.pipeline_stages = 2, got [3, 2, 1]";
    assert_eq!(check_pipeline(2, GPipe, 1, &[3, 2, 1]), stages);
    let each = "parallel.blocks_per_stage expects 4 numbers of blocks, one for each model chunk of \
                parallel.pipeline_stages = 2 and parallel.virtual_stages = 2, got [3, 3]";
    assert_eq!(check_pipeline(2, Interleaved, 2, &[3, 3]), each);
    let large = "parallel.blocks_per_stage expects numbers of blocks from 1 to 65536, got 65537";
    assert_eq!(check_pipeline(2, GPipe, 1, &[65_537, 1]), large);
    assert!(check_pipeline(2, GPipe, 1, &[3, 0]).contains("from 1 on"));
    let range = "parallel.pipeline_stages expects a whole number from 1 to 64, got 65";
    assert_eq!(check_pipeline(65, GPipe, 1, &[]), range);
    let range = "parallel.virtual_stages expects a whole number from 1 to 16, got 17";
    assert_eq!(check_pipeline(2, Interleaved, 17, &[]), range);
}
