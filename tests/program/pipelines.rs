//! Pipelines of CPU devices, as their user sees them: what is measured, repeated and advised.

use crate::process::{Desk, Ran};

const TINY: &str = "train tiny.toml --data text.txt --steps 3 --set train.batch=12 \
     --set train.micro_batch_size=3 --set train.sample_tokens=0 --set train.checkpoint_every=0 \
     --set data.held_out=0 --set model.layers=4";

fn train(desk: &Desk, more: &str) -> Ran {
    desk.run(&format!("{TINY} {more}"))
}

#[test]
fn cut_measured_is_repeated_by_flags() {
    let desk = Desk::new();
    let ran = train(&desk, "--devices cpu*2 --pipeline 2 --out measured --retune").ok();
    assert!(ran.err.contains("measuring 3 different blocks of 6 on 1 device"), "{}", ran.err);
    assert!(ran.err.contains("planned pipeline 2 (1f1b): "), "{}", ran.err);
    let line = ran.err.lines().find(|line| line.contains("stages: ")).unwrap();
    let (_, flags) = line.split_once("; to repeat this, add ").unwrap();
    let flags = flags.replace(", ", ",").replace('\'', "");
    let repeated =
        train(&desk, &format!("--devices cpu*2 --pipeline 2 --out repeated {flags}")).ok();
    assert!(!repeated.err.contains("measuring"), "{}", repeated.err);
    let losses = desk.losses("repeated");
    assert_eq!((losses.len(), losses), (3, desk.losses("measured")), "{flags}");
    let kept = desk.run("train --resume measured --steps 4").ok();
    assert!(!kept.err.contains("measuring"), "the cut is kept: {}", kept.err);
    let again = desk.run("train --resume measured --steps 5 --retune").ok();
    assert!(again.err.contains("measuring"), "{}", again.err);
}
