//! Resuming reads the placement that a checkpoint recorded; one that fits no run is decided again
//! or refused, and a checkpoint of another format is refused by its number.

use std::fs;

use potluck_parallel::Placement;
use potluck_train::checkpoint::{Checkpoint, Store};

use crate::process::{Desk, Ran};

/// Steps of the run that the records are taken from.
const STEPS: u64 = 2;

/// Trains on two CPU devices with measured shares.
fn measured() -> Desk {
    let desk = Desk::new();
    let line = "train tiny.toml --data text.txt --devices cpu*2 --out run --steps 2 \
         --set train.batch=12 --set train.micro_batch_size=3 --set train.sample_tokens=0";
    let ran = desk.run(line).ok();
    assert!(ran.err.contains("measuring 2 devices"), "{}", ran.err);
    desk
}

/// Replaces the placement in the last checkpoint of the run.
fn record(desk: &Desk, placement: Placement) {
    let mut store = Store::open(&desk.path("run")).unwrap();
    let mut checkpoint = Checkpoint::load(&store.path(STEPS)).unwrap();
    checkpoint.meta.placement = placement;
    store.save(&checkpoint).unwrap();
}

fn recorded(desk: &Desk) -> Placement {
    let store = Store::open_to_read(&desk.path("run"));
    Checkpoint::load(&store.path(STEPS)).unwrap().meta.placement
}

/// Resumes with a changed placement, into another directory.
fn resume(desk: &Desk, out: &str, edit: impl FnOnce(&mut Placement)) -> Ran {
    let good = recorded(desk);
    let mut changed = good.clone();
    edit(&mut changed);
    record(desk, changed);
    let ran = desk.run(&format!("train --resume run --out {out} --devices cpu*2 --steps 3"));
    record(desk, good);
    assert!(!ran.err.contains("panicked"), "{}", ran.err);
    ran
}

#[test]
fn shares_recorded_wrong_are_remeasured() {
    let desk = measured();
    let is_measured = |ran: &Ran| ran.err.contains("measuring 2 devices");
    assert!(!is_measured(&resume(&desk, "same", |_| {}).ok()));
    assert!(is_measured(&resume(&desk, "sum", |p| p.ranks[0].share -= 1).ok()));
    assert!(is_measured(&resume(&desk, "wrap", |p| p.ranks[0].share = u32::MAX).ok()));
    assert!(is_measured(&resume(&desk, "none", |p| p.ranks.clear()).ok()));
    assert!(is_measured(&resume(&desk, "fewer", |p| p.candidates.truncate(1)).ok()));
    assert!(is_measured(&resume(&desk, "unnamed", |p| p.candidates.clear()).ok()));
    assert!(is_measured(&resume(&desk, "most", |p| p.micro_batch_max = 2).ok()));
}

#[test]
fn ranks_recorded_wrong_are_refused() {
    let desk = measured();
    let edits: [fn(&mut Placement); 6] = [
        |p| p.ranks[0].position = 2,
        |p| p.ranks[0].position = usize::MAX,
        |p| p.ranks[0].rows = 0,
        |p| p.ranks[0].rows = u32::MAX,
        |p| p.ranks[0].micro_batch = 0,
        |p| {
            let idle = p.ranks[0].clone();
            p.ranks.push(idle);
            p.mesh.data += 1;
            p.ranks[0].share = 0;
        },
    ];
    for (index, edit) in edits.into_iter().enumerate() {
        let ran = resume(&desk, &format!("refused{index}"), edit).ended(78);
        let error = ran.line("error:");
        assert!(error.contains("ranks that the checkpoint recorded"), "{index}: {error}");
        assert!(error.contains("--retune"), "{index}: {error}");
        assert!(!desk.path(&format!("refused{index}")).exists());
    }
    let good = recorded(&desk);
    let mut outside = good.clone();
    outside.ranks[0].position = 9;
    record(&desk, outside);
    let retuned = "train --resume run --out anew --devices cpu*2 --steps 3 --retune";
    assert!(desk.run(retuned).ok().err.contains("measuring 2 devices"));
    // What another device decided is of no use, and in nobody's way.
    desk.run("train --resume run --out alone --devices cpu --steps 3").ok();
}

#[test]
fn checkpoint_of_old_format_is_refused() {
    let desk = Desk::new();
    desk.train("--out run --quiet --steps 2 --set train.checkpoint_every=1").ok();
    for step in 0..=STEPS {
        let path = desk.path(&format!("run/checkpoints/step-{step:08}/manifest.json"));
        if let Ok(text) = fs::read_to_string(&path) {
            assert!(text.contains("\"format\": 5"), "{text}");
            fs::write(&path, text.replace("\"format\": 5", "\"format\": 3")).unwrap();
        }
    }
    let before = desk.files();
    let newest = "run/checkpoints/step-00000002";
    for line in ["train --steps 9 --resume", "eval", "generate", "eval --best"] {
        for path in ["run", newest] {
            if line.ends_with("--best") && path == newest {
                continue;
            }
            let ran = desk.run(&format!("{line} {path} --devices cpu")).ended(78);
            let error = ran.line("error:");
            for part in ["has format 3", "reads formats 4 to 5", "a3fe4cf"] {
                assert!(error.contains(part), "{line} {path}: {error}");
            }
            assert!(!error.contains("start a new run"), "{line} {path}: {error}");
            assert_eq!((ran.out.as_str(), desk.files()), ("", before.clone()), "{line} {path}");
        }
    }
}
