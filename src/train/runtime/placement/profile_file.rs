//! Profiles of devices on disk, in the directory of the kernel caches: a file for each set of
//! devices and model.

use std::io;
use std::path::PathBuf;

use super::candidates::candidates;
use super::open_one::RequestedDevices;
use super::types::PlacementRequest;
use potluck_core::files;
use potluck_graph::print::graph_table;
use potluck_kernels::autotune::cache;
use potluck_kernels::device::Selection;
use potluck_parallel::planner::profile::PlanProfile;

/// Version of the files, and of what is measured.
const FORMAT: u32 = 6;

/// File of the profile of a set of devices for a model.
pub(crate) struct ProfileFile {
    path: PathBuf,
}

impl ProfileFile {
    /// Returns the file of a request; `None` without a cache directory, or for devices of other
    /// nodes, whose links change.
    pub fn of(request: &PlacementRequest, devices: RequestedDevices) -> Option<Self> {
        if !request.nodes.nodes.is_empty() {
            return None;
        }
        let rows = request.micro_batch.min(request.batch).max(1);
        let mut hasher = blake3::Hasher::new();
        hasher.update(&FORMAT.to_le_bytes());
        hasher.update(env!("CARGO_PKG_VERSION").as_bytes());
        for (identity, selection) in candidates(devices.selections).iter().zip(devices.selections) {
            hasher.update(identity.as_bytes());
            if let Selection::Cpu { threads, .. } = selection {
                hasher.update(&threads.to_le_bytes());
            }
            hasher.update(b"\n");
        }
        hasher.update(&request.opening.device_memory_mib.to_le_bytes());
        let model = request.plans.model();
        let of_run = format!(
            "{:?} {:?} {:?} {} {}",
            request.optimizer,
            model.precision(),
            model.plan_options(1),
            request.tuning.seconds,
            request.opening.submission_ms
        );
        hasher.update(of_run.as_bytes());
        hasher.update(&rows.to_le_bytes());
        hasher.update(graph_table(model.whole()).as_bytes());
        let name = &hasher.finalize().to_hex()[..32];
        Some(Self { path: cache::directory()?.join("profiles").join(format!("{name}.bin")) })
    }

    /// Returns the profile, unless there is none or the file is damaged.
    pub fn read(&self) -> Option<PlanProfile> {
        postcard::from_bytes(&std::fs::read(&self.path).ok()?).ok()
    }

    /// Writes the profile.
    ///
    /// # Errors
    /// Returns the system's error.
    pub fn write(&self, profile: &PlanProfile) -> io::Result<()> {
        if let Some(directory) = self.path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        let bytes = postcard::to_allocvec(profile).map_err(io::Error::other)?;
        files::replace(&self.path, &bytes)
    }

    /// Removes an earlier profile.
    ///
    /// # Errors
    /// Returns the system's error, also if there is none.
    pub fn remove(&self) -> io::Result<()> {
        std::fs::remove_file(&self.path)
    }
}
