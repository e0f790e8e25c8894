//! Several CPU devices in one run, as its user sees it: names, measured shares, limits of memory.

use crate::process::{Desk, Ran};

const TINY: &str = "train tiny.toml --data text.txt --steps 3 --set train.batch=12 \
     --set train.micro_batch_size=3 --set train.sample_tokens=0 --set train.checkpoint_every=0";

fn train(desk: &Desk, more: &str) -> Ran {
    desk.run(&format!("{TINY} {more}"))
}

#[test]
fn devices_equal_have_own_names() {
    let desk = Desk::new();
    let line = "--devices cpu*2 --out run --trace trace.json --set parallel.shares=8,4";
    let ran = train(&desk, line).ok();
    let shares = ran.err.lines().find(|line| line.contains("samples per step")).unwrap();
    assert!(shares.contains("samples per step: cpu (") && shares.contains("): 8, cpu 2 ("));
    assert!(!shares.contains("--set"), "the shares were given: {shares}");
    let resolved = std::fs::read_to_string(desk.path("run/resolved.toml")).unwrap();
    let trace = std::fs::read_to_string(desk.path("trace.json")).unwrap();
    for text in [&resolved, &trace] {
        assert!(text.contains("cpu 2 ("), "{text}");
    }
    let step = ran.lines("step 3/3")[0];
    assert!(step.contains("  cpu: 8 samples (") && step.contains(", cpu 2: 4 samples ("), "{step}");
}

/// Several devices of the same few cores make hardly any step shorter.
#[test]
fn devices_named_all_take_part() {
    let desk = Desk::new();
    let ran = train(&desk, "--devices cpu*5 --out run").ok();
    assert!(!ran.err.contains("left out"), "{}", ran.err);
    let resolved = std::fs::read_to_string(desk.path("run/resolved.toml")).unwrap();
    assert_eq!(resolved.lines().filter(|line| line.starts_with("device = ")).count(), 5);
    // What they cost is said, with the selector of the others, if it was measured so.
    if let Some(note) = ran.err.lines().find(|line| line.contains(" used as requested")) {
        let (told, selector) = note.split_once("; to train without: --devices ").unwrap();
        assert!(told.contains(" training down (") && told.contains(" ms without)"), "{note}");
        let fewer = train(&desk, &format!("--out fewer --devices {}", selector.replace('\'', "")));
        fewer.ok();
    }
}

#[test]
fn shares_measured_repeated_by_flags() {
    let desk = Desk::new();
    // In micro-batches of one sample: larger ones are halved where that measures clearly faster,
    // which a busy machine makes differ between the devices, and no flag repeats that.
    let one = "--devices cpu*2 --set train.micro_batch_size=1";
    let ran = train(&desk, &format!("{one} --out measured")).ok();
    let line = ran.err.lines().find(|line| line.contains("samples per step")).unwrap();
    let (_, flags) = line.split_once("; to repeat this, add ").unwrap();
    assert!(!flags.contains("in other bits"), "{line}");
    // The flags come last, so that they count; a shell would take the quotes away.
    let flags = flags.replace(", ", ",").replace('\'', "");
    train(&desk, &format!("{one} --out repeated {flags}")).ok();
    let losses = desk.losses("repeated");
    assert_eq!((losses.len(), losses), (3, desk.losses("measured")), "{flags}");
    let resolved = || std::fs::read_to_string(desk.path("measured/resolved.toml")).unwrap();
    let decided = resolved();
    let kept = desk.run("train --resume measured --steps 4").ok();
    assert_eq!(resolved(), decided);
    assert!(!kept.err.contains("to repeat this"), "the shares are kept: {}", kept.err);
}

#[test]
fn device_named_fails_timing_ends_run() {
    let desk = Desk::new();
    let run = |fault: &str| {
        let line = format!("{TINY} --devices cpu*2 --out run");
        let child = desk.command(&line).env("POTLUCK_FAULT", fault).spawn().unwrap();
        crate::process::finish(child, fault)
    };
    let lost = run("lost@timing:0/1").ended(75);
    assert!(lost.line("error:").contains("cpu 2 ("), "{}", lost.err);
    let full = run("out-of-memory@moments:0/0,out-of-memory@moments:0/1").ended(78);
    assert!(full.line("error:").contains("has no memory for"), "{}", full.err);
    assert!(!desk.path("run").exists());
}
