//! Faults at every point of a step of a pipeline, and signals: exit codes, valid checkpoints, and
//! the bits of the undisturbed run after the command that goes on.

use std::sync::LazyLock;

use crate::pipeline_bits::{SMALL, assert_same_bits, train};
use crate::process::{Desk, Ran};

const POINTS: [&str; 8] =
    ["forward", "send", "recv", "backward", "reduce", "verdict", "update", "gather"];
const PIPELINE: &str = "--devices cpu*2 --pipeline 2";
/// Two pipelines beside each other, cut alike whatever the blocks take, whose parameters are
/// compared after every second step.
const BESIDE: &str = "--devices cpu*4 --pipeline 2 --set parallel.blocks_per_stage=2,2 \
                      --set parallel.shares=7,5 --set faults.hash_every=2";

/// The untied model as a pipeline, to which nothing happens.
static WHOLE: LazyLock<Desk> = LazyLock::new(|| {
    let desk = Desk::new();
    train(&desk, "run", PIPELINE);
    desk
});

fn train_with(desk: &Desk, faults: &str, more: &str) -> Ran {
    desk.run_with(faults, &format!("{SMALL} --out run {more}"))
}

/// The step of the checkpoint that the run's directory gives, which must be good.
fn loadable(desk: &Desk) -> u64 {
    let ran = desk.run("eval run --devices cpu --json").ok();
    assert_eq!(ran.lines("warning:"), [""; 0], "{}", ran.err);
    serde_json::from_str::<serde_json::Value>(&ran.out).unwrap()["step"].as_u64().unwrap()
}

/// Injects faults at step 6, two steps behind a checkpoint: each ends the run that goes on after
/// the one before it, with the same devices; and the run comes to its end after the last one.
fn injected(faults: &[String], code: i32, (saved, says): (u64, &str)) {
    for rank in [0, 1] {
        let desk = Desk::new();
        for (index, fault) in faults.iter().enumerate() {
            let what = format!("{fault}:6/{rank}");
            let ran = match index {
                0 => train_with(&desk, &what, PIPELINE),
                _ => desk.run_with(&what, "train --quiet --resume run"),
            };
            assert_eq!(ran.code(), Some(code), "{what}: {}", ran.err);
            assert!(ran.err.contains(says), "{what}: {}", ran.err);
            if !says.contains("SIG") && !says.contains("interrupted") {
                assert!(ran.err.contains(&format!("rank {rank}: cpu")), "{what}: {}", ran.err);
            }
        }
        assert_eq!(loadable(&desk), saved, "{faults:?}");
        desk.run("train --quiet --resume run").ok();
        assert_same_bits(&desk, "run", (&WHOLE, "run"), &format!("{faults:?} of rank {rank}"));
    }
}

#[test]
fn device_lost_resumes_same_bits() {
    let faults = POINTS.map(|point| format!("lost@{point}"));
    injected(&faults, 75, (4, "the device was lost (injected)"));
    let faults = ["send", "recv"].map(|point| format!("out-of-memory@{point}"));
    injected(&faults, 75, (4, "out of memory at an injected"));
}

#[test]
fn thread_panic_names_the_rank() {
    let faults = ["forward", "send", "recv", "update"].map(|point| format!("panic@{point}"));
    injected(&faults, 70, (4, "its thread panicked (injected, at src"));
}

#[test]
fn signals_at_transfers_save_the_step() {
    for point in ["send", "recv"] {
        injected(&[format!("sigterm@{point}")], 75, (6, "terminated (SIGTERM)"));
        injected(&[format!("sigint@{point}")], 130, (6, "interrupted; the run is saved"));
    }
}

#[test]
fn stage_hung_is_named() {
    for fault in ["hang@recv:6/1", "hang@send:6/0"] {
        let desk = Desk::new();
        let limit = "--set faults.device_timeout_s=2";
        let ran = train_with(&desk, fault, &format!("{PIPELINE} {limit}")).ended(75);
        let rank = fault.rsplit('/').next().unwrap();
        let error = ran.line("error: ");
        assert!(error.contains(&format!("rank {rank}: cpu")), "{fault}: {error}");
        assert!(error.contains("within 2 s, so the device counts as hung"), "{fault}: {error}");
        assert_eq!(loadable(&desk), 4);
    }
}

#[test]
#[cfg(unix)]
fn pipeline_killed_resumes_same_bits() {
    use std::os::unix::process::ExitStatusExt;
    for (fault, saved) in [
        ("kill@send:6/1", 4),
        ("kill@recv:6", 4),
        ("kill@update:6/1", 4),
        ("kill@checkpoint-tensors:8", 4),
        ("kill@checkpoint-prune:8", 8),
    ] {
        let desk = Desk::new();
        let ran = train_with(&desk, fault, PIPELINE);
        assert_eq!(ran.status.signal(), Some(9), "{fault}: {}", ran.err);
        assert_eq!(loadable(&desk), saved, "{fault}");
        desk.run("train --quiet --resume run").ok();
        assert_same_bits(&desk, "run", (&WHOLE, "run"), fault);
    }
}

/// Each schedule orders sends and receives in its own way: in every one, the neighbours of a stage
/// that fails end, those with two neighbours and several chunks too.
#[test]
fn stage_failed_ends_all_schedules() {
    for line in [
        "--devices cpu*3 --pipeline 3 --schedule gpipe",
        "--devices cpu*3 --pipeline 3 --schedule zero-bubble",
        "--devices cpu*2 --pipeline 2 --schedule interleaved --set virtual_stages=2",
        "--devices cpu*2 --pipeline 2 --set model.tie=true",
        BESIDE,
    ] {
        let desk = Desk::new();
        let faults = ["lost@send:6/1", "lost@recv:6/0", "lost@backward:6/1"];
        for (index, fault) in faults.into_iter().enumerate() {
            // Each ends the run that goes on after the one before it.
            let ran = match index {
                0 => train_with(&desk, fault, line),
                _ => desk.run_with(fault, "train --quiet --resume run"),
            }
            .ended(75);
            let error = ran.line("error: ");
            let rank = &fault[fault.len() - 1..];
            assert!(error.contains(&format!("rank {rank}: cpu")), "{line} {fault}: {error}");
        }
        assert_eq!(loadable(&desk), 4, "{line}");
    }
}

/// The devices that are left make no pipeline of as many stages.
#[test]
fn fault_command_goes_on_on_one_device() {
    for line in [
        "--schedule gpipe",
        "--schedule interleaved --set virtual_stages=2",
        "--set blocks_per_stage=1,3",
    ] {
        let desk = Desk::new();
        let ran = train_with(&desk, "lost@backward:6/1", &format!("{PIPELINE} {line}")).ended(75);
        let error = ran.line("error: ");
        let command = "with: potluck train --resume run --devices auto";
        assert!(error.ends_with(command), "{line}: {error}");
        // The device that auto names here is not always the CPU.
        let ran = desk.run("train --resume run --devices cpu --pipeline 1").ok();
        assert_same_bits(&desk, "run", (&WHOLE, "run"), &ran.err);
    }
}

#[test]
fn signals_beside_save_and_end() {
    let whole = Desk::new();
    train(&whole, "run", BESIDE);
    for (fault, code, says) in [
        ("sigint@recv:6/3", 130, "interrupted; the run is saved: "),
        ("sigterm@send:6/2", 75, "terminated (SIGTERM); the run is saved: "),
    ] {
        let desk = Desk::new();
        let ran = train_with(&desk, fault, BESIDE).ended(code);
        assert!(ran.line(says).ends_with("potluck train --resume run"), "{}", ran.err);
        assert_eq!(loadable(&desk), 6);
        desk.run("train --quiet --resume run").ok();
        assert_same_bits(&desk, "run", (&whole, "run"), fault);
    }
}

/// A bit flips in a stage of the second pipeline, which is compared with the same stage of the
/// first one.
#[test]
fn bit_flipped_beside_is_found() {
    let whole = Desk::new();
    train(&whole, "run", BESIDE);
    for (rank, tensor) in [(2, "h.0."), (3, "lm_head.weight")] {
        let fault = format!("flip@gather:4/{rank}");
        let desk = Desk::new();
        let ran = train_with(&desk, &fault, BESIDE).ended(75);
        let error = ran.line("error: ");
        let named = format!("(rank {rank}) does not hold the same parameters as the other ranks ");
        for part in [&named, "after step 4: 1 of ", tensor, "faults.on_mismatch=repair"] {
            assert!(error.contains(part), "'{part}' is missing in: {error}");
        }
        assert_eq!(loadable(&desk), 0, "nothing that differs is saved");

        let desk = Desk::new();
        let repair = format!("{BESIDE} --set faults.on_mismatch=repair");
        let ran = train_with(&desk, &fault, &repair).ok();
        let warning = ran.line("warning: ");
        assert!(warning.contains(tensor) && warning.ends_with("they were repaired"), "{warning}");
        assert_same_bits(&desk, "run", (&whole, "run"), &fault);
    }
}

/// One pipeline holds each bucket once: there is nothing to compare it with, and the bits are
/// others.
#[test]
fn bit_flipped_alone_is_not_found() {
    let desk = Desk::new();
    train_with(&desk, "flip@gather:4/1", &format!("{PIPELINE} --set faults.hash_every=2")).ok();
    let parameters = |desk: &Desk| desk.checkpoint("run", 4, "parameters.safetensors");
    assert_ne!(parameters(&desk), parameters(&WHOLE));
}
