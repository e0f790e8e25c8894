//! Files of a report: one per part, and one for their common subject.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::measures::PartReport;
use super::parts::HardwarePart;
use potluck_bench::System;
use potluck_core::files;
use potluck_kernels::device::Adapter;

/// Name of the file of the subject.
pub const HEADER: &str = "report.json";

/// Name of the page.
pub const SUMMARY: &str = "SUMMARY.md";

/// Start of the names of the folders of adapters.
const PLACE: &str = "adapter-";

/// Name of the folder of an adapter in which parts run, which is not part of the report.
pub const SCRATCH: &str = "scratch";

/// Subject of a report: the program, the machine and the adapters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    pub potluck: String,
    /// Hash of the sources.
    pub build: String,
    /// True for a rehearsal, whose figures are meaningless.
    pub is_toy: bool,
    pub system: System,
    /// Names of adapters and APIs by index.
    pub adapters: BTreeMap<usize, String>,
}

impl Header {
    pub fn of<'a>(adapters: impl Iterator<Item = (usize, &'a Adapter)>, is_toy: bool) -> Self {
        let mut names = BTreeMap::new();
        for (index, Adapter { name, api, kind, driver, .. }) in adapters {
            names.insert(index, format!("{name} on {api}, {kind}, {driver}"));
        }
        Self {
            potluck: env!("CARGO_PKG_VERSION").into(),
            build: env!("POTLUCK_BUILD").into(),
            is_toy,
            system: System::here(),
            adapters: names,
        }
    }

    /// Returns true for another program, other sizes, another machine, or another adapter under an
    /// index of both.
    fn differs(&self, found: &Self) -> bool {
        if self.build != found.build || self.is_toy != found.is_toy || self.system != found.system {
            return true;
        }
        self.adapters
            .iter()
            .any(|(index, name)| found.adapters.get(index).is_some_and(|other| other != name))
    }

    /// Writes the file into the folder of the report, and adds the adapters of an existing file.
    ///
    /// # Errors
    /// Returns a sentence if the folder has a report of another program or of other sizes, or other
    /// files and no report, or cannot be written.
    pub fn claim(&mut self, folder: &Path) -> Result<(), String> {
        let path = folder.join(HEADER);
        let has_files = fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some());
        if has_files && !path.exists() {
            return Err(format!(
                "{} has other files and no report; name another folder with --out",
                folder.display()
            ));
        }
        if let Ok(bytes) = fs::read(&path) {
            let found: Self = serde_json::from_slice(&bytes)
                .map_err(|why| format!("{} is no report: {why}", path.display()))?;
            if self.differs(&found) {
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
    folder.join(format!("{PLACE}{index}"))
}

/// Returns true for the name of the folder of an adapter.
pub fn is_place(name: &OsStr) -> bool {
    let index = name.to_str().and_then(|name| name.strip_prefix(PLACE));
    index.is_some_and(|index| index.parse::<usize>().is_ok())
}

/// Returns the report of a completed part.
pub fn read(place: &Path, part: HardwarePart) -> Option<PartReport> {
    let bytes = fs::read(path(place, part)).ok()?;
    serde_json::from_slice(&bytes).ok()
}

/// Writes the report of a part atomically.
pub fn write(place: &Path, report: &PartReport) -> io::Result<()> {
    let text = serde_json::to_string_pretty(report).map_err(io::Error::other)?;
    files::replace(&path(place, report.part), (text + "\n").as_bytes())
}

fn path(place: &Path, part: HardwarePart) -> PathBuf {
    place.join(format!("{}.json", part.name()))
}
