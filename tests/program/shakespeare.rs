//! Training on real text, for whoever has it: `POTLUCK_TEST_DATA` names a directory with
//! `tinyshakespeare.txt`.

use std::path::{Path, PathBuf};

use crate::process::Desk;

#[test]
fn shakespeare_200_steps_learn_letters() {
    let Some(data) = std::env::var_os("POTLUCK_TEST_DATA").map(PathBuf::from) else {
        let why = "POTLUCK_TEST_DATA names no directory with tinyshakespeare.txt";
        return crate::process::skip(why);
    };
    // The program runs in a directory of its own.
    let data = data.join("tinyshakespeare.txt").canonicalize().expect("the text is there");
    let config =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/configs/shakespeare-char.toml");
    let desk = Desk::new();
    let mut command = desk.command("train --devices cpu --quiet --out run --steps 200");
    command.arg("--data").arg(data).arg(config);
    crate::process::finish(command.spawn().unwrap(), "200 steps on tinyshakespeare").ok();

    // As a character-level table of pairs would do on its own: it is about 2.5.
    let losses = desk.losses("run");
    let last = losses[190..].iter().sum::<f64>() / 10.0;
    assert!(last < 2.6, "the last ten losses have the mean {last}");
    let val_loss = desk.metrics("run").last().unwrap()["val_loss"].as_f64().unwrap();
    assert!(val_loss < 2.6, "the loss on held-out text is {val_loss}");
}
