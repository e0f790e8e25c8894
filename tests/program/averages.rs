//! Averages of the weights (`optim.ema`): a run evaluates, samples and exports with them, and
//! trains to the same bits as without.

use serde_json::Value;

use crate::process::Desk;

const LINE: &str = "--quiet --steps 6 --set data.held_out=0.5 --set train.eval_every=3 \
                    --set train.checkpoint_every=3 --set train.checkpoint_keep=9";

fn val_losses(desk: &Desk, run: &str) -> Vec<f64> {
    let lines = desk.metrics(run);
    lines.iter().filter_map(|line| line["val_loss"].as_f64()).collect()
}

#[test]
fn ema_evaluates_averages_trains_same_bits() {
    let desk = Desk::new();
    desk.train(&format!("--out plain {LINE}")).ok();
    desk.train(&format!("--out run {LINE} --set optim.ema=0.9")).ok();
    let saved = |run: &str, file: &str| desk.checkpoint(run, 6, file);
    for file in ["parameters.safetensors", "moments.safetensors"] {
        assert_eq!(saved("run", file), saved("plain", file), "{file}");
    }
    assert!(!desk.path("plain/checkpoints/step-00000006/averages.safetensors").exists());
    let losses = val_losses(&desk, "run");
    assert_eq!(losses.len(), 2);
    assert_ne!(losses, val_losses(&desk, "plain"));

    let evaluated = desk.run("eval run --devices cpu --samples 1024 --json").ok();
    let evaluated: Value = serde_json::from_str(&evaluated.out).unwrap();
    assert_eq!(evaluated["loss"].as_f64(), losses.last().copied());
    let written =
        |run: &str| desk.run(&format!("generate {run} --devices cpu --tokens 40")).ok().out;
    assert_ne!(written("run"), written("plain"));

    // From the middle to the same averages, and on two devices to nearly the same losses.
    desk.run("train --resume run/checkpoints/step-00000003 --out again --quiet --steps 6").ok();
    let averages = saved("run", "averages.safetensors");
    assert_eq!(saved("again", "averages.safetensors"), averages);
    desk.run(&format!(
        "train tiny.toml --data text.txt --out pair {LINE} --set optim.ema=0.9 --devices cpu*2"
    ))
    .ok();
    for (found, expected) in val_losses(&desk, "pair").iter().zip(&losses) {
        assert!((found - expected).abs() < 1e-5, "{found} for {expected}");
    }
    assert_eq!(saved("pair", "averages.safetensors").len(), averages.len());

    let memory =
        desk.run("train tiny.toml --data text.txt --set optim.ema=0.9 --explain memory").ok();
    assert!(memory.out.contains("of the parameters, for evaluation"), "{}", memory.out);
}

#[test]
fn ema_resumed_begins_at_checkpoint() {
    let desk = Desk::new();
    desk.train(&format!("--out run {LINE}")).ok();
    let resumed = desk.run("train --resume run --steps 8 --set optim.ema=0.9").ok();
    let told = "the checkpoint has no averages of the parameters: they begin at step 6";
    assert!(resumed.err.contains(told), "{}", resumed.err);
    let refused = desk.run("train --resume run --steps 9 --set optim.ema=1").ended(78);
    assert!(refused.err.contains("optim.ema"), "{}", refused.err);
}
