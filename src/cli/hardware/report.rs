//! Files of a report: one per part, and one of what all of them are about.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::measures::PartReport;
use super::parts::HardwarePart;
use potluck_bench::System;
use potluck_core::files;
use potluck_kernels::device::Adapter;

/// Name of the file of what all parts are about.
const HEADER: &str = "report.json";

/// Name of the folder of an adapter in which parts run, and which is no part of the report.
pub const SCRATCH: &str = "scratch";

/// Subject of a report: the program, the machine and the adapters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    pub potluck: String,
    /// Hash of the sources.
    pub build: String,
    /// True for a rehearsal, whose figures mean nothing.
    pub is_toy: bool,
    pub system: System,
    /// Names of adapters and APIs by index.
    pub adapters: BTreeMap<usize, String>,
}

impl Header {
    pub fn of<'a>(adapters: impl Iterator<Item = (usize, &'a Adapter)>, is_toy: bool) -> Self {
        let name = |adapter: &Adapter| {
            format!("{} on {}, {}, {}", adapter.name, adapter.api, adapter.kind, adapter.driver)
        };
        Self {
            potluck: env!("CARGO_PKG_VERSION").into(),
            build: env!("POTLUCK_BUILD").into(),
            is_toy,
            system: System::here(),
            adapters: adapters.map(|(index, adapter)| (index, name(adapter))).collect(),
        }
    }

    /// Writes the file into the folder of the report, and adds the adapters that it has.
    ///
    /// # Errors
    /// Returns a sentence if the folder has a report of another program or of other sizes, or
    /// cannot be written.
    pub fn claim(&mut self, folder: &Path) -> Result<(), String> {
        let path = folder.join(HEADER);
        if let Ok(bytes) = fs::read(&path) {
            let found: Self = serde_json::from_slice(&bytes)
                .map_err(|why| format!("{} is no report: {why}", path.display()))?;
            let differs = |one: &Self, other: &Self| {
                let adapters = other.adapters.iter();
                let is_other = |(index, name): (&usize, &String)| {
                    one.adapters.get(index).is_some_and(|known| known != name)
                };
                one.build != other.build
                    || one.is_toy != other.is_toy
                    || one.system != other.system
                    || adapters.into_iter().any(is_other)
            };
            if differs(&found, self) {
                return Err(format!(
                    "{} has the report of another program or machine, or of other sizes; name \
                     another folder with --out",
                    folder.display()
                ));
            }
            self.adapters.extend(found.adapters);
        }
        let text = serde_json::to_string_pretty(self).expect("strings and numbers are JSON");
        files::replace(&path, (text + "\n").as_bytes())
            .map_err(|why| format!("{}: {why}", path.display()))
    }
}

/// Returns the folder of an adapter.
pub fn place_of(folder: &Path, index: usize) -> PathBuf {
    folder.join(format!("adapter-{index}"))
}

/// Returns the report of a part that is done.
pub fn read(place: &Path, part: HardwarePart) -> Option<PartReport> {
    let bytes = fs::read(path(place, part)).ok()?;
    serde_json::from_slice(&bytes).ok()
}

/// Writes the report of a part, whole or not at all.
pub fn write(place: &Path, report: &PartReport) -> io::Result<()> {
    let text = serde_json::to_string_pretty(report).map_err(io::Error::other)?;
    files::replace(&path(place, report.part), (text + "\n").as_bytes())
}

fn path(place: &Path, part: HardwarePart) -> PathBuf {
    place.join(format!("{}.json", part.name()))
}
