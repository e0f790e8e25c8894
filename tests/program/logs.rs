//! Lines on stderr as JSON, and in a file.

use std::fs;

use serde_json::Value;

use crate::node_processes::{LINE, desk, host_with, join};
use crate::process::{Desk, finish};

/// Reads lines of which each is an object with what every line has.
fn objects(text: &str) -> Vec<Value> {
    let mut objects = Vec::new();
    for line in text.lines() {
        let object: Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
        let time = object["time"].as_str().unwrap();
        assert!(time.starts_with("20") && time.contains('T') && time.ends_with('Z'), "{line}");
        assert!(["info", "warning", "error"].contains(&object["level"].as_str().unwrap()));
        assert!(!object["message"].as_str().unwrap().is_empty(), "{line}");
        objects.push(object);
    }
    assert!(!objects.is_empty());
    objects
}

fn messages<'a>(objects: &'a [Value], beginning: &str) -> Vec<&'a str> {
    let texts = objects.iter().map(|object| object["message"].as_str().unwrap());
    texts.filter(|text| text.starts_with(beginning)).collect()
}

#[test]
fn log_json_lines_of_nodes_are_objects() {
    let desk = desk();
    let line = format!("{LINE} --devices cpu --set parallel.shares=2,2 --out run --log json");
    let first = host_with(&desk, 2, "", &line);
    let more = "--devices cpu --log json --log-file other.log";
    let other = join(&desk, &first, "", more);
    let first = objects(&first.finish().ok().err);
    assert!(first.iter().all(|object| object["node"] == 0));
    assert_eq!(messages(&first, "step 6/6  loss").len(), 1);
    assert_eq!(messages(&first, "a run of 2 nodes; ").len(), 1);
    let other = finish(other, "the other node").ok();
    let shown = objects(&other.err);
    assert_eq!(messages(&shown, "step 6/6  loss").len(), 1);
    let joined = shown.iter().skip_while(|object| object.get("node").is_none());
    assert!(joined.clone().count() > 2 && joined.clone().all(|object| object["node"] == 1));
    let file = fs::read_to_string(desk.path("other.log")).unwrap();
    assert_eq!(messages(&objects(&file), ""), messages(&shown, ""));
}

#[test]
fn log_json_has_level_and_rank() {
    let desk = Desk::new();
    let line = "--devices cpu*2 --set parallel.shares=2,2 --out run --log json --quiet";
    let ran = desk.train_with("panic@verdict:3/1", line);
    assert_ne!(ran.code(), Some(0));
    let lines = objects(&ran.err);
    let errors: Vec<_> = lines.iter().filter(|object| object["level"] == "error").collect();
    let [error] = errors[..] else { panic!("{}", ran.err) };
    assert_eq!(error["rank"], 1, "{error}");
    let message = error["message"].as_str().unwrap();
    assert!(!message.starts_with("error"), "{error}");
    let nan = desk.train_with("nan@backward:3", "--out nan --log json --quiet").ok();
    let lines = objects(&nan.err);
    assert!(lines.iter().all(|object| object["level"] == "warning"), "{}", nan.err);
    assert_eq!(messages(&lines, "step 3 was skipped").len(), 1, "{}", nan.err);
}

#[test]
fn log_file_has_times_and_is_appended() {
    let desk = Desk::new();
    for _ in 0..2 {
        let ran = desk.train("--steps 2 --log-file train.log --set train.sample_tokens=0").ok();
        let file = fs::read_to_string(desk.path("train.log")).unwrap();
        for line in ran.err.lines() {
            assert!(file.contains(&format!(" info node 0: {line}\n")), "{line} in:\n{file}");
        }
    }
    let file = fs::read_to_string(desk.path("train.log")).unwrap();
    assert_eq!(file.matches(" info node 0: step 2/2  loss ").count(), 2, "{file}");
    let error = desk.train("--steps 2 --out new --log-file none/train.log").ended(78);
    let expected = "error: --log-file none/train.log: cannot be opened: ";
    assert!(error.err.starts_with(expected), "{}", error.err);
}

/// The code that a first node makes is for its terminal.
#[cfg(target_os = "linux")]
#[test]
fn log_file_has_no_code() {
    let desk = Desk::new();
    let line = format!("{LINE} --devices cpu --nodes 2 --listen 127.0.0.1:0 --log-file nodes.log");
    let (master, terminal) = crate::terminals::pseudo_terminal();
    let mut command = desk.command(&line);
    let child = command.stderr(terminal).spawn().unwrap();
    // It holds the terminal, whose end is that of the process.
    drop(command);
    let host = crate::node_processes::Host::printing(child, master);
    let mut host = host.with_address("potluck join ");
    host.wait_for("and there the code  ");
    crate::process::send_signal(host.child.id(), "TERM");
    let ran = host.finish();
    let code = ran.line("and there the code  ").rsplit(' ').next().unwrap().to_string();
    let file = fs::read_to_string(desk.path("nodes.log")).unwrap();
    assert!(file.contains("potluck join ") && !file.contains(&code), "{file}");
}
