//! The library beside the program: a trainer that fits the same data ends in the same bits, and
//! goes on from a checkpoint of a run.

use std::sync::Arc;

use crate::process::Desk;
use potluck_data::Dataset;
use potluck_graph::Graph;
use potluck_train::checkpoint::Checkpoint;
use potluck_train::config::read::Resolved;
use potluck_train::run_data::SavedData;
use potluck_train::spec::RunSpec;
use potluck_train::{FitLength, FitOptions, Shares, Trainer, TrainerOptions};

/// A run of the program, in terms of the library.
struct Described {
    checkpoint: Checkpoint,
    graph: Graph,
    data: Arc<dyn Dataset>,
    options: TrainerOptions,
    fit: FitOptions,
}

/// Reads what a run was from its checkpoint of a step.
fn described(desk: &Desk, devices: &str, step: u64) -> Described {
    let place = desk.path(&format!("run/checkpoints/step-{step:08}"));
    let checkpoint = Checkpoint::load(&place).unwrap();
    let resolved = Resolved::saved(&checkpoint.meta.run, &checkpoint.meta.typed).unwrap();
    let spec = RunSpec::resolved(&resolved);
    let data = spec.load_data(&SavedData::of(&checkpoint.meta)).unwrap();
    let graph = spec.model.graph(&data.shape);
    let shares = checkpoint.meta.placement.ranks.iter().map(|rank| rank.share as usize);
    let options = TrainerOptions {
        shares: Shares::Fixed(shares.collect()),
        micro_batch_size: spec.micro_batch as usize,
        clip: spec.clip,
        seed: spec.seed,
        ..TrainerOptions::new(devices, spec.optimizer, spec.batch as usize)
    };
    let fit = FitOptions {
        eval_every: spec.every.evaluation,
        eval_samples: spec.eval_samples,
        ..FitOptions::new(FitLength::Steps(spec.steps), spec.schedule)
    };
    let data = data.dataset;
    Described { checkpoint, graph: graph.unwrap(), data, options, fit }
}

const LINE: &str = "--out run --steps 12 --set model.dropout=0.1 --set train.micro_batch_size=2 \
    --set train.checkpoint_every=6 --set train.checkpoint_keep=9 --set train.eval_every=5";

#[test]
fn trainer_has_bits_of_the_program() {
    for (devices, shares) in [("cpu", ""), ("cpu*2", "--set parallel.shares=3,1")] {
        let desk = Desk::new();
        desk.train(&format!("{LINE} {shares} --devices {devices}")).ok();
        let Described { checkpoint, graph, data, options, fit } = described(&desk, devices, 12);
        let mut trainer = Trainer::new(graph.clone(), &options).unwrap();
        let report = trainer.fit(&data, &fit).unwrap();
        trainer.save(&desk.path("own")).unwrap();
        let own = Checkpoint::load_path(&desk.path("own")).unwrap().0;
        assert_eq!(own.parameters, checkpoint.parameters, "{devices}");
        assert_eq!(own.moments, checkpoint.moments, "{devices}");
        assert_eq!((own.meta.samples, own.meta.best), (48, checkpoint.meta.best));
        assert_eq!(own.meta.data, checkpoint.meta.data);
        assert_eq!(report.loss.as_ref(), desk.losses("run").last());

        // A run is a save like others.
        let half = desk.path("run/checkpoints/step-00000006");
        let mut resumed = Trainer::load(graph, &options, &half).unwrap();
        resumed.fit(&data, &fit).unwrap();
        assert_eq!(resumed.parameters().unwrap(), checkpoint.parameters, "{devices}");
    }
}

#[test]
fn library_save_refused_by_program() {
    let desk = Desk::new();
    desk.train("--out run --steps 1").ok();
    let Described { graph, options, .. } = described(&desk, "cpu", 1);
    Trainer::new(graph, &options).unwrap().save(&desk.path("own")).unwrap();
    for line in ["train --resume own", "eval own", "generate own"] {
        let ran = desk.run(line);
        assert_eq!(ran.code(), Some(78), "{line}: {}", ran.err);
        assert!(ran.err.contains("was saved by the library"), "{line}: {}", ran.err);
    }
    let listed = desk.run("runs own").ok();
    assert!(listed.out.contains("own"), "{}", listed.out);
}
