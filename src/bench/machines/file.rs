//! File of machines: nodes with their devices, and the links between them.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor, value::MapAccessDeserializer};
use toml::Spanned;

use crate::report::ReportError;
use potluck_core::format::listed;
use potluck_parallel::planner::cards::UnknownCard;
use potluck_parallel::sim::LinkModel;

/// Most nodes of a file.
pub const NODES_MAX: usize = 1_000;
/// Most devices of a node.
pub const DEVICES_MAX: usize = 16;
/// Fraction of a link's rate that is left for values: the rest are headers.
const RATE_REACHED: f64 = 0.94;
/// Seconds of a message from thread to thread and through encryption, on both sides of a link.
const HOP_S: f64 = 0.3e-3;

/// Bounds of the numbers of a file.
const RATE_GBIT_S: [f64; 2] = [1e-6, 1e5];
const LATENCY_MS: [f64; 2] = [0.0, 1e4];
const MEMORY_GIB: [f64; 2] = [0.1, 1e5];
/// Bounds of the rate of a processor.
pub(super) const CPU_TFLOPS: [f64; 2] = [1e-3, 1e3];

/// File of machines that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MachinesError {
    #[error("{}: {why}", path.display())]
    Unreadable { path: PathBuf, why: std::io::Error },
    #[error("{}:{line}: {why}", path.display())]
    Line { path: PathBuf, line: usize, why: String },
    #[error("{} {why}", path.display())]
    Report { path: PathBuf, why: ReportError },
}

/// Contents of a file of machines.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MachinesFile {
    pub node: Vec<Spanned<NodeEntry>>,
    pub network: Option<Spanned<NetworkEntry>>,
    #[serde(default)]
    pub link: Vec<Spanned<LinkEntry>>,
}

/// Node, or several equal ones.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NodeEntry {
    pub name: String,
    #[serde(default = "one")]
    pub count: usize,
    pub devices: Vec<Spanned<MachineDevice>>,
    /// Memory of the host.
    pub memory_gib: f64,
    /// Connection of the node, if it is not that of the network.
    rate_gbit_s: Option<f64>,
    latency_ms: Option<f64>,
}

fn one() -> usize {
    1
}

/// Network that connects all nodes.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NetworkEntry {
    rate_gbit_s: f64,
    latency_ms: f64,
}

/// Link between two nodes that is not that of the network.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LinkEntry {
    from: String,
    to: String,
    rate_gbit_s: f64,
    latency_ms: f64,
    #[serde(default)]
    one_way: bool,
}

/// Device of a node.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum MachineDevice {
    /// A card of the table, or `cpu:TFLOPS`.
    Named(String),
    Measured(MeasuredEntry),
}

/// Device by the report of a benchmark.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MeasuredEntry {
    /// Report of `potluck bench --json`, relative to the file of machines.
    pub bench: PathBuf,
    /// Part of the device's name, if the report has several.
    pub device: Option<String>,
    pub memory_gib: Option<f64>,
}

impl<'de> Deserialize<'de> for MachineDevice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DeviceVisitor)
    }
}

struct DeviceVisitor;

impl<'de> Visitor<'de> for DeviceVisitor {
    type Value = MachineDevice;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a card, \"cpu:TFLOPS\", or { bench = \"REPORT.json\" }")
    }

    fn visit_str<E>(self, name: &str) -> Result<MachineDevice, E> {
        Ok(MachineDevice::Named(name.into()))
    }

    fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<MachineDevice, M::Error> {
        MeasuredEntry::deserialize(MapAccessDeserializer::new(map)).map(MachineDevice::Measured)
    }
}

/// File of machines with its text, to which errors refer.
pub(super) struct Source<'a> {
    pub path: &'a Path,
    text: &'a str,
}

impl<'a> Source<'a> {
    pub(super) fn new(path: &'a Path, text: &'a str) -> Self {
        Self { path, text }
    }

    /// Error at a place of the text.
    pub(super) fn wrong(&self, at: usize, why: impl Into<String>) -> MachinesError {
        let line = 1 + self.text[..at.min(self.text.len())].matches('\n').count();
        MachinesError::Line { path: self.path.into(), line, why: why.into() }
    }

    pub(super) fn unknown_card(&self, at: usize, error: &UnknownCard) -> MachinesError {
        let others = "or { bench = \"REPORT.json\" }, made by potluck bench --json";
        self.wrong(at, format!("{error}; or give \"cpu:TFLOPS\", {others}"))
    }

    pub(super) fn within(
        &self,
        at: usize,
        name: &str,
        value: f64,
        [least, most]: [f64; 2],
    ) -> Result<(), MachinesError> {
        // Not finite numbers are not within.
        if (least..=most).contains(&value) {
            return Ok(());
        }
        Err(self.wrong(at, format!("{name} is {value}, and must be from {least} to {most}")))
    }

    /// Reads and checks the file.
    ///
    /// # Errors
    /// Returns [`MachinesError::Line`] for what is no such file, or has impossible numbers or
    /// unknown names.
    pub(super) fn parse(&self) -> Result<MachinesFile, MachinesError> {
        let file: MachinesFile = toml::from_str(self.text).map_err(|error| {
            let at = error.span().unwrap_or(0..0).start;
            self.wrong(at, error.message().trim_end())
        })?;
        let mut nodes = 0;
        let mut names: HashMap<&str, usize> = HashMap::new();
        for node in &file.node {
            self.check_node(node)?;
            nodes += node.as_ref().count;
            let at = node.span().start;
            if names.insert(&node.as_ref().name, at).is_some() {
                let name = &node.as_ref().name;
                let why = format!("there are two nodes \"{name}\"; give equal ones a count");
                return Err(self.wrong(at, why));
            }
        }
        if !(1..=NODES_MAX).contains(&nodes) {
            let why = format!("the file has {nodes} nodes, and must have from 1 to {NODES_MAX}");
            return Err(self.wrong(0, why));
        }
        if nodes > 1 && file.network.is_none() {
            let why = "several nodes need [network] with rate_gbit_s and latency_ms";
            return Err(self.wrong(0, why));
        }
        if let Some(network) = &file.network {
            let NetworkEntry { rate_gbit_s, latency_ms } = *network.as_ref();
            self.check_link(network.span().start, rate_gbit_s, latency_ms)?;
        }
        for link in &file.link {
            let LinkEntry { from, to, rate_gbit_s, latency_ms, .. } = link.as_ref();
            let at = link.span().start;
            self.check_link(at, *rate_gbit_s, *latency_ms)?;
            for name in [from, to] {
                if !names.contains_key(name.as_str()) {
                    let known = listed(names.keys().take(8));
                    let why = format!("there is no node \"{name}\" for this link, but {known}");
                    return Err(self.wrong(at, why));
                }
            }
        }
        Ok(file)
    }

    fn check_node(&self, node: &Spanned<NodeEntry>) -> Result<(), MachinesError> {
        let at = node.span().start;
        let NodeEntry { count, devices, memory_gib, rate_gbit_s, latency_ms, .. } = node.as_ref();
        if !(1..=NODES_MAX).contains(count) {
            let why = format!("count is {count}, and must be from 1 to {NODES_MAX}");
            return Err(self.wrong(at, why));
        }
        if !(1..=DEVICES_MAX).contains(&devices.len()) {
            let count = devices.len();
            let why = format!("a node has from 1 to {DEVICES_MAX} devices, and this one {count}");
            return Err(self.wrong(at, why));
        }
        self.within(at, "memory_gib", *memory_gib, MEMORY_GIB)?;
        for device in devices {
            if let MachineDevice::Measured(MeasuredEntry { memory_gib: Some(memory), .. }) =
                device.as_ref()
            {
                self.within(device.span().start, "memory_gib", *memory, MEMORY_GIB)?;
            }
        }
        let rate = rate_gbit_s.unwrap_or(RATE_GBIT_S[0]);
        self.check_link(at, rate, latency_ms.unwrap_or(0.0))
    }

    fn check_link(&self, at: usize, rate: f64, latency: f64) -> Result<(), MachinesError> {
        self.within(at, "rate_gbit_s", rate, RATE_GBIT_S)?;
        self.within(at, "latency_ms", latency, LATENCY_MS)
    }
}

fn link(rate_gbit_s: f64, latency_ms: f64) -> LinkModel {
    let bytes_per_s = RATE_REACHED * 1e9 / 8.0 * rate_gbit_s;
    LinkModel { latency_s: 1e-3 * latency_ms + HOP_S, bytes_per_s }
}

impl MachinesFile {
    /// Returns the entry of each node, by its number.
    pub(super) fn entries(&self) -> Vec<usize> {
        let mut entries = Vec::new();
        for (index, node) in self.node.iter().enumerate() {
            entries.extend(std::iter::repeat_n(index, node.as_ref().count));
        }
        entries
    }

    /// Returns the links between all nodes, by sender and then by receiver: as fast as the slower
    /// connection of both, and as late as the later one, unless the file has another link between
    /// nodes of these names.
    pub(super) fn links(&self) -> Vec<Vec<LinkModel>> {
        let entries = self.entries();
        let mut numbers = HashMap::new();
        let mut own = Vec::new();
        for (index, node) in self.node.iter().enumerate() {
            let NodeEntry { name, rate_gbit_s, latency_ms, .. } = node.as_ref();
            numbers.insert(name.as_str(), index);
            let network = self.network.as_ref().map(|network| *network.as_ref());
            let rate = rate_gbit_s.or(network.map(|network| network.rate_gbit_s));
            let latency = latency_ms.or(network.map(|network| network.latency_ms));
            // A single node has no link.
            own.push(link(rate.unwrap_or(RATE_GBIT_S[1]), latency.unwrap_or(0.0)));
        }
        let mut others = HashMap::new();
        for entry in &self.link {
            let LinkEntry { from, to, rate_gbit_s, latency_ms, one_way } = entry.as_ref();
            let link = link(*rate_gbit_s, *latency_ms);
            let between = [numbers[from.as_str()], numbers[to.as_str()]];
            others.insert(between, link);
            if !one_way {
                others.insert([between[1], between[0]], link);
            }
        }
        let mut links = Vec::with_capacity(entries.len());
        for from in &entries {
            let mut row = Vec::with_capacity(entries.len());
            for to in &entries {
                let shared = LinkModel {
                    latency_s: own[*from].latency_s.max(own[*to].latency_s),
                    bytes_per_s: own[*from].bytes_per_s.min(own[*to].bytes_per_s),
                };
                row.push(others.get(&[*from, *to]).copied().unwrap_or(shared));
            }
            links.push(row);
        }
        links
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = "[[node]]\nname = \"desk\"\ndevices = [\"RTX 4090\"]\nmemory_gib = 64\n\
                       [[node]]\nname = \"attic\"\ncount = 2\ndevices = [\"cpu:0.5\"]\n\
                       memory_gib = 16\nrate_gbit_s = 0.1\n\
                       [network]\nrate_gbit_s = 1.0\nlatency_ms = 0.2\n";

    fn parsed(text: &str) -> Result<MachinesFile, String> {
        Source::new(Path::new("m.toml"), text).parse().map_err(|error| error.to_string())
    }

    #[test]
    fn links_are_those_of_the_slower_node_unless_the_file_has_another() {
        let other = "[[link]]\nfrom = \"desk\"\nto = \"attic\"\nrate_gbit_s = 2\nlatency_ms = 7\n";
        for (text, rate, back) in [
            (TWO.to_string(), 0.1, 0.1),
            (format!("{TWO}{other}"), 2.0, 2.0),
            (format!("{TWO}{other}one_way = true\n"), 2.0, 0.1),
        ] {
            let file = parsed(&text).unwrap();
            assert_eq!(file.entries(), [0, 1, 1]);
            let links = file.links();
            let gbit_s = |from: usize, to: usize| {
                (links[from][to].bytes_per_s * 8.0 / 1e9 / RATE_REACHED * 1e6).round() / 1e6
            };
            assert_eq!((gbit_s(0, 1), gbit_s(2, 0), gbit_s(1, 2)), (rate, back, 0.1), "{text}");
        }
        assert!((parsed(TWO).unwrap().links()[0][1].latency_s - 0.5e-3).abs() < 1e-12);
    }

    #[test]
    fn file_with_a_mistake_is_refused_with_its_line() {
        let one = "[[node]]\nname = \"a\"\ndevices = [\"M2\"]\nmemory_gib = 8\n";
        for (text, line, part) in [
            ("".into(), 1, "missing field `node`"),
            (format!("{one}cores = 8\n"), 5, "unknown field `cores`"),
            (format!("{one}count = 0\n"), 1, "count is 0"),
            (format!("{one}count = 1001\n"), 1, "from 1 to 1000"),
            (one.replace("8", "-1"), 1, "memory_gib is -1"),
            (one.replace("8", "nan"), 1, "memory_gib is NaN"),
            (one.replace("\"M2\"", ""), 1, "this one 0"),
            (one.replace("\"M2\"", "7"), 3, "the name of a card"),
            (one.replace("\"M2\"", "{ file = \"x\" }"), 3, "unknown field `file`"),
            (format!("{one}{one}"), 5, "two nodes \"a\""),
            (format!("{one}count = 2\n"), 1, "several nodes need [network]"),
            (TWO.replace("1.0", "0"), 11, "rate_gbit_s is 0"),
            (TWO.replace("0.2", "-1"), 11, "latency_ms is -1"),
            (TWO.replace("0.1", "inf"), 5, "rate_gbit_s is inf"),
            (
                format!("{TWO}[[link]]\nfrom='b'\nto='desk'\nrate_gbit_s=1\nlatency_ms=1"),
                14,
                "there is no node \"b\"",
            ),
        ] {
            let error = parsed(&text).unwrap_err();
            let begin = format!("m.toml:{line}: ");
            assert!(error.starts_with(&begin) && error.contains(part), "{text}\n{error}");
        }
    }
}
