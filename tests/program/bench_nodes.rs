//! `potluck bench` over several machines, which are processes here: the reports have all figures,
//! and all processes end in order.

use serde_json::Value;

use crate::bench::{check_markup, check_moved, names};
use crate::node_processes::{Host, desk};
use crate::process::Desk;

/// Starts a process that waits for others with a line that begins with `command`.
fn waiting(desk: &Desk, line: &str, command: &str) -> Host {
    let line = format!("bench {line} --secret-file code");
    Host::showing(desk.command(&line).spawn().unwrap(), command)
}

fn report(desk: &Desk, file: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(desk.path(file)).unwrap()).unwrap()
}

#[test]
fn collectives_of_all_nodes_are_in_one_report() {
    let desk = desk();
    let line = "collectives --tiny --nodes 2 --ranks-per-node 2 --listen 127.0.0.1:0 \
                --json report.json --svg nodes.svg";
    let mut host = waiting(&desk, line, "potluck bench join ");
    let typed = format!("bench join {} --ranks-per-node 2 --secret-file ", host.address);
    host.wait_for(&format!("potluck {typed}FILE"));
    // A node may have another number of ranks.
    let line = format!("bench join {} --secret-file code", host.address);
    let other = desk.run(&line).ok();
    let first = host.finish().ok();
    assert_eq!(other.lines("done; the report is on the first node").len(), 1, "{}", other.err);
    for ran in [&first, &other] {
        assert_eq!(ran.lines("2 of 2 nodes here: ").len(), 1, "{}", ran.err);
        assert_eq!(ran.lines("all_reduce of 1 MiB by 3 ranks").len(), 1, "{}", ran.err);
    }
    assert!(first.out.contains("\ncollective  ") && first.out.contains("of copy"), "{}", first.out);
    let report = report(&desk, "report.json");
    let [nodes] = &report["devices"].as_array().unwrap()[..] else { panic!("{report}") };
    assert_eq!((&nodes["api"], &nodes["kind"]), (&"quic".into(), &"3 ranks of 2 nodes".into()));
    assert_eq!(nodes["name"].as_str().unwrap().matches(" + ").count(), 1, "{nodes}");
    let collectives =
        ["all_reduce.4_KiB", "all_reduce.1_MiB", "reduce_scatter.1_MiB", "all_gather.1_MiB"];
    let mut expected: Vec<String> = collectives.iter().map(|of| format!("{of}_3_ranks")).collect();
    expected.extend(["broadcast.1_MiB_3_ranks", "copy.4_KiB", "copy.1_MiB"].map(String::from));
    assert_eq!(names(nodes, "figures"), expected);
    check_moved(nodes, "of_copy");
    let svg = std::fs::read_to_string(desk.path("nodes.svg")).unwrap();
    check_markup(&svg);
    assert!(svg.contains("between nodes: ") && svg.contains(">3 ranks<"), "{svg}");
    let same = desk.run("bench compare report.json report.json").ok();
    assert_eq!(same.out.matches("  same").count(), expected.len(), "{}", same.out);
}
