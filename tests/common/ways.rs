//! The table of README: ways of parallelism, devices, tests and speeds. `benches/ways.rs` measures
//! and prints it; a test compares README with the newest results.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use potluck_core::format::thousands;
use serde::{Deserialize, Serialize};

/// Results of one machine at one commit, as a file of `benches/results`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WaysReport {
    pub commit: String,
    pub date: String,
    pub processor: String,
    pub ways: Vec<MeasuredWay>,
    pub peers: Vec<MeasuredPeer>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeasuredWay {
    /// Name of the [`Way`].
    pub name: String,
    pub tokens_per_s: f64,
    /// Half of the distance between the slowest and the fastest repeat, as a share of the median.
    pub spread: f64,
}

/// Another trainer on the same model and machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MeasuredPeer {
    pub name: String,
    /// Name of the [`Way`] beside which it stands.
    pub beside: String,
    pub tokens_per_s: f64,
}

/// A way to train on some devices.
pub struct Way {
    pub name: &'static str,
    pub title: &'static str,
    pub devices: &'static str,
    /// Files with its tests.
    pub tests: &'static [&'static str],
}

pub const WAYS: [Way; 10] = [
    Way {
        name: "cpu",
        title: "one device",
        devices: "CPU device, 2 cores",
        tests: &["tests/program/first_run.rs", "tests/adapters/golden.rs"],
    },
    Way {
        name: "llvmpipe-2",
        title: "one device",
        devices: "llvmpipe, 2 cores",
        tests: &["tests/program_on_adapters/small_gpt.rs", "tests/adapters/golden.rs"],
    },
    Way {
        name: "llvmpipe",
        title: "one device",
        devices: "llvmpipe, 1 core",
        tests: &["tests/program_on_adapters/small_gpt.rs", "tests/adapters/golden.rs"],
    },
    Way {
        name: "swiftshader",
        title: "one device",
        devices: "SwiftShader, 1 core",
        tests: &["tests/program_on_adapters/small_gpt.rs", "tests/adapters/golden.rs"],
    },
    Way {
        name: "data",
        title: "data parallel",
        devices: "llvmpipe and SwiftShader, a core each",
        tests: &["tests/program_on_adapters/several_devices.rs"],
    },
    Way {
        name: "cpu-1",
        title: "one device",
        devices: "CPU device, 1 core",
        tests: &["tests/program/first_run.rs"],
    },
    Way {
        name: "data-cpu",
        title: "data parallel",
        devices: "2 CPU devices, a core each",
        tests: &["tests/program/placement.rs"],
    },
    Way {
        name: "pipeline",
        title: "pipeline of 2 stages",
        devices: "2 CPU devices, a core each",
        tests: &["tests/program/pipelines.rs"],
    },
    Way {
        name: "tensor",
        title: "tensor group of 2",
        devices: "2 CPU devices, a core each",
        tests: &["tests/program/tensor.rs"],
    },
    Way {
        name: "nodes",
        title: "2 nodes over QUIC",
        devices: "a CPU device of 1 core on each",
        tests: &["tests/program/nodes.rs"],
    },
];

/// Where the table stands in README.
pub const MARKERS: [&str; 2] = ["<!-- table of ways -->", "<!-- end of table -->"];

/// The newest report in `benches/results`, by its date.
pub fn newest_report(root: &Path) -> Option<WaysReport> {
    let mut newest: Option<WaysReport> = None;
    for entry in std::fs::read_dir(root.join("benches/results")).ok()? {
        let path: PathBuf = entry.ok()?.path();
        let name = path.file_name()?.to_string_lossy().into_owned();
        if !name.starts_with("ways-") || !name.ends_with(".json") {
            continue;
        }
        let text = std::fs::read_to_string(&path).expect("a file that is listed can be read");
        let report: WaysReport =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        if newest.as_ref().is_none_or(|best| best.date < report.date) {
            newest = Some(report);
        }
    }
    newest
}

/// The table in Markdown, with its source below.
pub fn table(report: &WaysReport) -> String {
    let mut text =
        String::from("| way | devices | tests | tokens/s | beside |\n|---|---|---|---|---|\n");
    for way in &WAYS {
        let measured = report.ways.iter().find(|one| one.name == way.name);
        let Some(measured) = measured else { continue };
        let rate = thousands(measured.tokens_per_s);
        let speed = format!("{rate} ± {:.0} %", 100.0 * measured.spread);
        let mut beside = Vec::new();
        for peer in report.peers.iter().filter(|peer| peer.beside == way.name) {
            beside.push(format!("{} {}", peer.name, thousands(peer.tokens_per_s)));
        }
        let mut tests = Vec::new();
        for file in way.tests {
            let name = file.trim_start_matches("tests/").trim_end_matches(".rs");
            tests.push(format!("[{name}]({file})"));
        }
        let _ = writeln!(
            text,
            "| {} | {} | {} | {speed} | {} |",
            way.title,
            way.devices,
            tests.join(", "),
            beside.join(", ")
        );
    }
    let _ = write!(
        text,
        "\n*A step of nanoGPT's recipe for a CPU (4 layers, width 128, 12 x 64 tokens, f32; on \
         adapters of one core 48 x 64), medians of {} on {}, commit {}; `./x status --measure`.*",
        report.date, report.processor, report.commit
    );
    text
}
