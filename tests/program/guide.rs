//! Every command of docs/guide.md is run, in the order of the page and in one directory, with a
//! smaller model and fewer steps.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::process::{Desk, finish};

/// Stands for `potluck` in the commands: makes models small and runs short. What it appends goes
/// before what the page sets. Each resumed run has 3 steps more than the one before it.
const POTLUCK: &str = r#"#!/bin/sh
case "$1" in
train)
    case " $* " in
    *" --resume "*)
        steps=$(($(cat steps) + 3))
        echo "$steps" >steps
        small="--set train.steps=$steps" ;;
    *) small="--set train.steps=6 --set model.layers=1 --set model.heads=2 --set model.width=16
        --set model.context=8 --set train.checkpoint_every=3 --set train.eval_every=3" ;;
    esac
    exec "$PROGRAM" "$@" $small --set train.sample_tokens=20 ;;
bench)
    case "$2" in
    compare) exec "$PROGRAM" "$@" ;;
    esac
    exec "$PROGRAM" "$@" --tiny ;;
*) exec "$PROGRAM" "$@" ;;
esac
"#;

/// Parts of commands that name what a test machine does not have, and what stands for them. Every
/// one of them is on the page.
const REPLACED: [(&str, &str); 4] = [
    ("RTX,Radeon", "cpu*2"),
    ("step-00001750", "step-00000003"),
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
    desk.write("steps", "6");
    fs::create_dir(desk.path("bin")).unwrap();
    desk.write("bin/potluck", POTLUCK);
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(desk.path("bin/potluck"), mode).unwrap();
}

#[test]
fn every_command_of_the_guide_runs() {
    let (page, desk) = (page(), Desk::new());
    let blocks = blocks(&page);
    prepare(&desk, &blocks);
    let shells = blocks.iter().filter(|block| block.language == "sh");
    let commands: Vec<&str> = shells.flat_map(|block| block.text.lines()).collect();
    assert!(commands.len() >= 25, "{commands:#?}");
    for (what, _) in REPLACED {
        assert!(commands.iter().any(|command| command.contains(what)), "{what}");
    }
    for command in commands {
        let replaced = REPLACED
            .iter()
            .fold(command.to_string(), |line, (what, with)| line.replace(what, with));
        let path = format!("{}:{}", desk.path("bin").display(), std::env::var("PATH").unwrap());
        let mut shell = Command::new("sh");
        shell.args(["-c", &replaced]).current_dir(desk.path("")).stdin(Stdio::null());
        shell.stdout(Stdio::piped()).stderr(Stdio::piped()).env("PATH", path);
        shell.env("PROGRAM", env!("CARGO_BIN_EXE_potluck")).env("POTLUCK_CACHE", desk.cache());
        let ran = finish(shell.spawn().unwrap(), command);
        assert_eq!(ran.code(), Some(0), "{command}\n{}{}", ran.out, ran.err);
        if command.contains("--json here.json") {
            // The report of another machine.
            fs::copy(desk.path("here.json"), desk.path("there.json")).unwrap();
        }
    }
    // What the commands left is what the page says.
    assert!(desk.steps("runs/first").len() > 6, "it was resumed");
    assert_eq!(desk.steps("runs/fork").len(), 3, "a fork starts where it was taken");
    assert!(desk.files().iter().any(|file| file.contains("step-") && file.contains(".aside")));
    assert!(desk.path("trace.json").exists());
}
