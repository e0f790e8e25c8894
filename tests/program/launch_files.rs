//! The files of examples/launch and the lines of docs/clusters.md: their command lines parse, their
//! variables are read, their exit codes are those of the table, and their scripts are shell.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::node_processes::Host;
use crate::nodes_exit_codes::documented;
use crate::process::{Desk, send_signal};
use crate::status::address_of;

/// Commands that the files start.
const COMMANDS: [&str; 4] = ["launch", "train", "join", "secret"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the files of a directory and of those in it.
fn files_below(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(files_below(&path));
        } else {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// Returns the files with their names and texts, and the page with its shell blocks alone.
fn files() -> Vec<(String, String)> {
    let mut files = Vec::new();
    for path in files_below(&root().join("examples/launch")) {
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        files.push((name, fs::read_to_string(path).unwrap()));
    }
    let page = fs::read_to_string(root().join("docs/clusters.md")).unwrap();
    let mut shell = String::new();
    for block in page.split("\n```sh\n").skip(1) {
        shell += block.split("\n```").next().unwrap();
        shell.push('\n');
    }
    files.push(("docs/clusters.md".into(), shell));
    files
}

/// Returns the command lines of a text, without `potluck`: in scripts, in comments and in lists of
/// YAML, which go on to their bracket.
fn commands(text: &str) -> Vec<String> {
    let mut joined = String::new();
    let mut is_list = false;
    for line in text.lines() {
        let line = line.trim().trim_start_matches('#').trim_start();
        is_list |= line.contains("[potluck,");
        joined += line.trim_end_matches('\\');
        is_list &= !line.contains(']');
        joined.push(if is_list || line.ends_with('\\') { ' ' } else { '\n' });
    }
    let mut found = Vec::new();
    for line in joined.lines() {
        let line = line.replace(['[', ']', ',', '"'], " ");
        let words: Vec<&str> = line.split_whitespace().collect();
        for (at, pair) in words.windows(2).enumerate() {
            let is_program = pair[0].rsplit(['/', '=']).next() == Some("potluck");
            if is_program && COMMANDS.contains(&pair[1]) {
                let own =
                    words[at + 1..].iter().take_while(|word| !word.starts_with(['(', '|', '&']));
                found.push(own.copied().collect::<Vec<_>>().join(" "));
            }
        }
    }
    found
}

#[test]
fn launch_files_command_lines_parse() {
    let mut files_with_launch = 0;
    for (name, text) in files() {
        let commands = commands(&text);
        files_with_launch += usize::from(commands.iter().any(|line| line.starts_with("launch ")));
        for line in commands {
            let desk = Desk::new();
            let ran = desk.run(&line);
            if let Some(config) = line.strip_prefix("launch ") {
                // What it needs is not here; it was understood.
                let config = config.split_whitespace().next().unwrap();
                let why = format!("{config}: cannot be read");
                assert!(ran.ended(78).err.contains(&why), "{name}: {line}");
            } else {
                assert_ne!(ran.code(), Some(2), "{name}: {line}\n{}", ran.err);
            }
        }
    }
    assert!(files_with_launch >= 9, "{files_with_launch}");
}

#[test]
fn launch_files_commands_are_found() {
    let text = "srun potluck launch a.toml \\\n  --out run || exit=$?\n\
                #   potluck secret --out code (once)\n\
                command: [potluck, launch,\n  \"b.toml\"]\nenv: x\nExecStart=/bin/potluck join x\n\
                systemctl stop potluck\n";
    let found = ["launch a.toml --out run", "secret --out code", "launch b.toml", "join x"];
    assert_eq!(commands(text), found);
}

/// Returns the variables of potluck that a text names.
fn variables(text: &str) -> BTreeSet<&str> {
    let is_part = |c: char| c.is_ascii_uppercase() || c == '_';
    let places = text.match_indices("POTLUCK_").map(|(at, _)| &text[at..]);
    places.map(|rest| &rest[..rest.find(|c| !is_part(c)).unwrap_or(rest.len())]).collect()
}

#[test]
fn launch_files_variables_are_read() {
    let sources = files_below(&root().join("src"));
    let sources: Vec<String> = sources
        .iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .map(|path| fs::read_to_string(path).unwrap())
        .collect();
    let mut found = BTreeSet::new();
    for (name, text) in files() {
        for variable in variables(&text) {
            let quoted = format!("\"{variable}\"");
            assert!(sources.iter().any(|source| source.contains(&quoted)), "{name}: {variable}");
            found.insert(variable.to_string());
        }
    }
    assert!(found.len() >= 4, "{found:?}");
}

/// Returns the numbers of up to three digits in a line.
fn numbers(line: &str) -> Vec<i32> {
    let digits = line.split(|c: char| !c.is_ascii_digit());
    digits.filter(|number| number.len() <= 3).filter_map(|number| number.parse().ok()).collect()
}

#[test]
fn launch_files_exit_codes_are_known() {
    let mut codes: BTreeSet<i32> = documented().into_values().collect();
    // From there on it is a signal that ended a process.
    codes.insert(128);
    let mut with_restart = 0;
    for (name, text) in files() {
        let mut found = BTreeSet::new();
        for line in text.lines().filter(|line| line.contains("xit") || line.contains("values:")) {
            found.extend(numbers(line));
        }
        let unknown: Vec<_> = found.difference(&codes).collect();
        assert!(unknown.is_empty(), "{name}: {unknown:?}");
        with_restart += usize::from(found.contains(&75));
    }
    assert!(with_restart >= 6, "{with_restart}");
}

#[test]
fn launch_files_scripts_are_shell() {
    let mut scripts = 0;
    for path in files_below(&root().join("examples/launch")) {
        let extension = path.extension().and_then(|extension| extension.to_str());
        if let Some("sh" | "sbatch") = extension {
            let ran = Command::new("bash").arg("-n").arg(&path).output().unwrap();
            let why = String::from_utf8_lossy(&ran.stderr);
            assert!(ran.status.success() && why.is_empty(), "{}: {why}", path.display());
            scripts += 1;
        }
    }
    assert_eq!(scripts, 3);
}

/// Returns the script of the probe of the Job, as bash runs it in the pod.
fn probe() -> String {
    let text = fs::read_to_string(root().join("examples/launch/indexed-job.yaml")).unwrap();
    let (_, rest) = text.split_once("- -c\n").unwrap();
    let (_, rest) = rest.split_once("- |\n").unwrap();
    rest.split("initialDelaySeconds").next().unwrap().into()
}

#[test]
fn launch_files_probe_finds_live_run() {
    let desk = Desk::new();
    let line = "train tiny.toml --data text.txt --devices cpu --out run --steps 1000000 --status 0";
    let mut run = Host::started(desk.command(line).spawn().unwrap());
    let port = address_of(&mut run).port().to_string();
    let asks = || {
        let script = probe().replace("9464", &port);
        Command::new("bash").args(["-c", &script]).output().unwrap().status.success()
    };
    assert!(asks());
    send_signal(run.child.id(), "TERM");
    run.finish().ended(75);
    assert!(!asks());
}
