//! `potluck bench` over several machines, which are processes here: the reports have all figures,
//! and all processes end in order.

use serde_json::Value;

use crate::bench::{check_markup, check_moved, names, texts};
use crate::node_processes::{Host, desk, write_secret};
use crate::process::{Desk, finish};

/// Starts a process that waits for others with a line that begins with `command`.
fn waiting(desk: &Desk, line: &str, command: &str) -> Host {
    let line = format!("bench {line} --secret-file code");
    Host::showing(desk.command(&line).spawn().unwrap(), command)
}

fn listening(desk: &Desk) -> Host {
    waiting(desk, "link --listen 127.0.0.1:0", "potluck bench link ")
}

fn report(desk: &Desk, file: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(desk.path(file)).unwrap()).unwrap()
}

#[test]
fn bench_nodes_collectives_one_report() {
    let desk = desk();
    let line = "collectives --tiny --nodes 2 --ranks-per-node 2 --listen 127.0.0.1:0 \
                --json report.json --svg nodes.svg";
    let mut host = waiting(&desk, line, "potluck bench join ");
    let typed = format!("bench join {} --ranks-per-node 2 --secret-file ", host.address);
    host.wait_for(&format!("potluck {typed}FILE"));
    // A node may have another number of ranks.
    let line = format!("bench join {} --secret-file code --congestion bbr", host.address);
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
    assert!(svg.contains("between nodes: ") && texts(&svg).contains(&"3 ranks"), "{svg}");
    let same = desk.run("bench compare report.json report.json").ok();
    assert_eq!(same.out.matches("  same").count(), expected.len(), "{}", same.out);
}

#[test]
fn bench_link_has_all_its_figures() {
    let desk = desk();
    let host = listening(&desk);
    let line = format!("bench link {} --secret-file code --tiny", host.address);
    let other = desk.run(&format!("{line} --parameters 5K,0.02M --json report.json")).ok();
    let first = host.finish().ok();
    assert_eq!(first.lines("done; the report is on the other node").len(), 1, "{}", first.err);
    for ran in [&first, &other] {
        assert_eq!(ran.lines("2 of 2 nodes here: ").len(), 1, "{}", ran.err);
    }
    let report = report(&desk, "report.json");
    let [link] = &report["devices"].as_array().unwrap()[..] else { panic!("{report}") };
    assert!(link["error"].is_null() && link["api"] == "quic", "{link}");
    assert_eq!(link["name"].as_str().unwrap().matches(" to ").count(), 1, "{link}");
    let mut expected = ["link.round_trip", "link.round_trip_p99"].map(String::from).to_vec();
    for ways in ["send", "receive", "both"] {
        expected.extend(["4_KiB", "1_MiB"].map(|size| format!("link.{ways}_{size}")));
    }
    expected.extend(["5K", "20K"].map(|count| format!("link.step_{count}_parameters")));
    assert_eq!(names(link, "figures"), expected);
    let figures = link["figures"].as_array().unwrap();
    for figure in figures {
        let number = |field: &str| figure[field].as_f64().unwrap();
        let [min, median, max] = ["min", "median", "max"].map(number);
        assert!(0.0 < min && min <= median && median <= max && max < 1e9, "{figure}");
        assert!(number("samples") >= 3.0, "{figure}");
        let [group, unit, better] = ["name", "unit", "better"].map(|field| &figure[field]);
        let what = group.as_str().unwrap().split(['.', '_']).nth(1).unwrap();
        let (expected, direction) = match what {
            "round" => ("us", "lower"),
            "step" => ("ms", "lower"),
            _ => ("MB/s", "higher"),
        };
        assert_eq!((unit, better), (&expected.into(), &direction.into()), "{figure}");
    }
    let median = |at: usize| figures[at]["median"].as_f64().unwrap();
    assert!(median(1) >= median(0), "the 99th percentile is below the median: {link}");
    assert_eq!(figures[8]["on"], "0.020 MB in each direction");
    for at in [3, 7] {
        let on = figures[at]["on"].as_str().unwrap();
        let words = ["packets lost, ", "congestion event", ", window "];
        assert!(words.iter().all(|word| on.contains(word)), "{on}");
    }
    assert!(figures[5]["on"].is_null(), "what is received is lost elsewhere: {link}");

    let rows: Vec<Vec<&str>> =
        other.out.lines().map(|line| line.split_whitespace().collect()).collect();
    let note = "\nstep: an all-reduce of the gradients of so many parameters between the two nodes";
    assert_eq!(other.out.matches(note).count(), 1, "{}", other.out);
    let units = [("round trip p99", "us"), ("both 1 MiB", "MB/s"), ("step 20K parameters", "ms")];
    for (name, unit) in units {
        let begin: Vec<&str> = name.split(' ').collect();
        let found: Vec<_> = rows.iter().filter(|row| row.starts_with(&begin)).collect();
        assert!(found.len() == 1 && found[0][begin.len() + 1] == unit, "{name}: {}", other.out);
    }
    let same = desk.run("bench compare report.json report.json").ok();
    assert_eq!(same.out.matches("  same").count(), expected.len(), "{}", same.out);
}

#[test]
fn bench_link_stranger_is_refused() {
    let desk = desk();
    let code = desk.run("secret").ok().out;
    write_secret(&desk, "other", &code);
    let mut host = listening(&desk);
    let address = host.address.clone();
    let ended = |line: &str, code: i32, part: &str| {
        let ran = desk.run(line).ended(code);
        assert_eq!(ran.out, "");
        assert!(ran.line("error:").contains(part), "'{part}' is missing in: {}", ran.err);
    };
    let refused = |line: &str, part: &str| ended(line, 78, part);
    let silence = "that the code is that of the first node";
    ended(&format!("bench link {address} --secret-file other"), 75, silence);
    host.wait_for("was turned away: ");
    let advice = "(bench link): join with the command that";
    refused(&format!("bench join {address} --secret-file code"), advice);
    refused(&format!("join {address} --secret-file code --devices cpu"), advice);
    refused(&format!("bench link --listen {address} --secret-file code"), "taken");
    refused(&format!("bench link {address} --secret-file nothing"), "nothing");
    refused(&format!("bench link {address}"), "--secret-file");
    refused(&format!("bench link {address} --secret-file code --json no/such/place"), "directory");
    let line = format!("bench link {address} --secret-file code --tiny --parameters 1K --json -");
    let other = desk.command(&line).spawn().unwrap();
    let ran = finish(other, "the node that may measure").ok();
    assert!(serde_json::from_str::<Value>(&ran.out).is_ok(), "{}", ran.out);
    host.finish().ok();
}
