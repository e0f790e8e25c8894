//! Quota of processor time, where this user may set one: a control group of Linux, of version 1 or
//! 2. See Documentation/scheduler/sched-bwc.rst and Documentation/admin-guide/cgroup-v2.rst of the
//! kernel.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Microseconds of a period of the quota: shorter than a step, so that every step has its part.
const PERIOD_US: u32 = 4_000;

/// Control group, which is removed when it is dropped; its processes have ended by then.
pub struct CpuQuota {
    directory: PathBuf,
}

impl Drop for CpuQuota {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.directory);
    }
}

impl CpuQuota {
    /// Makes a group without a limit.
    pub fn new() -> io::Result<Self> {
        let roots = ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup"].map(Path::new);
        let root = roots.into_iter().find(|root| root.join("cgroup.procs").exists());
        let root = root.ok_or_else(|| io::Error::other("no control groups"))?;
        let directory = root.join(format!("potluck-{}", std::process::id()));
        fs::create_dir(&directory)?;
        let quota = Self { directory };
        // Here, and not in mid-run, it shows whether the group has a limit of processor time.
        quota.limit(1.0)?;
        Ok(quota)
    }

    /// Command of a shell that puts the shell into the group.
    pub fn enter(&self) -> String {
        format!("echo $$ > {}", self.directory.join("cgroup.procs").display())
    }

    /// Gives the group this part of a core from now on.
    pub fn limit(&self, part: f64) -> io::Result<()> {
        let quota = (f64::from(PERIOD_US) * part) as u32;
        let both = self.directory.join("cpu.max");
        if both.exists() {
            return fs::write(both, format!("{quota} {PERIOD_US}"));
        }
        fs::write(self.directory.join("cpu.cfs_period_us"), PERIOD_US.to_string())?;
        fs::write(self.directory.join("cpu.cfs_quota_us"), quota.to_string())
    }
}
