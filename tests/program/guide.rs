//! Every command of docs/guide.md is run, in the order of the page and in one directory, with a
//! smaller model and fewer steps.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::process::{Desk, finish};

/// Stands for `potluck` in the commands: makes models small, and runs 500 times shorter. What it
/// appends takes precedence over what the page sets.
const POTLUCK: &str = r#"#!/bin/sh
steps="" previous="" small="" batch=""
for word in "$@"; do
    case "$previous" in
    --steps) steps=$(((word + 499) / 500)) ;;
    esac
    previous=$word
done
case "$1" in
train)
    case " $* " in
    *" --resume "*) ;;
    *" --epochs "*) steps="" batch="--set train.batch=500" ;;
    *" small.toml "*) steps=2 ;;
    *) steps=${steps:-7} ;;
    esac
    case " $* " in
    *" --resume "*) ;;
    *) small="--set model.layers=1 --set model.heads=2 --set model.width=16 --set model.context=8
        --set train.checkpoint_every=1 --set train.eval_every=1" ;;
    esac
    length=${steps:+--set train.steps=$steps}
    exec "$PROGRAM" "$@" $small $batch $length --set train.sample_tokens=20 ;;
bench)
    case "$2" in
    compare) exec "$PROGRAM" "$@" ;;
    esac
    "$PROGRAM" "$@" --tiny || exit
    # The report of another machine.
    [ ! -e here.json ] || cp here.json there.json ;;
*) exec "$PROGRAM" "$@" ;;
esac
"#;

/// Parts of commands that name what a test machine does not have, or what is 500 times smaller,
/// and what stands for them. Every one of them is on the page.
const REPLACED: [(&str, &str); 4] = [
    ("RTX,Radeon", "cpu*2"),
    ("step-00001500", "step-00000003"),
    ("bench --quick", "bench"),
    ("collectives --quick", "collectives"),
];

/// A fenced block: its language and its lines.
struct Block {
    language: String,
    text: String,
}

fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut parts = page.split("\n```");
    parts.next();
    while let (Some(block), Some(_)) = (parts.next(), parts.next()) {
        let (language, text) = block.split_once('\n').unwrap();
        blocks.push(Block { language: language.into(), text: format!("{text}\n") });
    }
    blocks
}

fn page() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guide.md")).unwrap()
}

/// Files that the page takes for granted.
fn prepare(desk: &Desk, blocks: &[Block]) {
    fs::copy(desk.path("text.txt"), desk.path("input.txt")).unwrap();
    fs::copy(desk.path("text.txt"), desk.path("other.txt")).unwrap();
    for block in blocks.iter().filter(|block| block.language == "toml") {
        let name = block.text.lines().next().unwrap().strip_prefix("# ").unwrap();
        desk.write(name, &block.text);
    }
    fs::create_dir(desk.path("bin")).unwrap();
    desk.write("bin/potluck", POTLUCK);
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(desk.path("bin/potluck"), mode).unwrap();
}

#[test]
fn guide_commands_all_run() {
    let (page, desk) = (page(), Desk::new());
    let blocks = blocks(&page);
    prepare(&desk, &blocks);
    let scripts: Vec<&str> =
        blocks.iter().filter(|block| block.language == "sh").map(|block| &*block.text).collect();
    let commands = scripts.concat().matches("potluck ").count();
    assert!(commands >= 25, "{commands}: {scripts:#?}");
    for (what, _) in REPLACED {
        assert!(scripts.iter().any(|script| script.contains(what)), "{what}");
    }
    let path = format!("{}:{}", desk.path("bin").display(), std::env::var("PATH").unwrap());
    for script in scripts {
        let replaced =
            REPLACED.iter().fold(script.to_string(), |text, (what, with)| text.replace(what, with));
        let mut shell = Command::new("sh");
        shell.args(["-ec", &replaced]).current_dir(desk.path("")).stdin(Stdio::null());
        shell.stdout(Stdio::piped()).stderr(Stdio::piped()).env("PATH", &path);
        shell.env("PROGRAM", env!("CARGO_BIN_EXE_potluck")).env("POTLUCK_CACHE", desk.cache());
        let ran = finish(shell.spawn().unwrap(), script).ok();
        assert!(!ran.err.contains("nothing is left to train"), "{script}\n{}", ran.err);
    }
    // What the commands left is what the page says.
    assert_eq!(desk.steps("runs/first").len(), 12);
    assert_eq!(desk.steps("runs/fork").len(), 5, "a fork starts where it was taken");
    assert!(desk.files().iter().any(|file| file.contains("step-") && file.contains(".aside")));
    assert!(desk.path("trace.json").exists());
}
