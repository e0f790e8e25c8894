//! Host information from the operating system: processor and memory.

use sysinfo::{MemoryRefreshKind, System};

/// Host on which the CPU device and software adapters run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostInfo {
    /// Name of the processor, if the system reports it.
    pub model: Option<String>,
    /// Bytes of memory, if the system reports them.
    pub memory: Option<u64>,
}

impl HostInfo {
    /// Queries the operating system.
    pub fn query() -> Self {
        Self { model: processor(), memory: memory(System::total_memory) }
    }
}

/// Returns the cores, or hardware threads if a core has several, that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the threads that all CPU devices of this machine have together: one per core, unless
/// `RAYON_NUM_THREADS` gives another number. The caller is no thread of a device.
pub fn threads() -> usize {
    rayon::current_num_threads()
}

/// Returns the bytes that can be allocated without swapping, if the system reports them.
pub fn available_memory() -> Option<u64> {
    memory(System::available_memory)
}

/// Returns a figure of the host's memory in bytes, if the system reports it.
fn memory(figure: fn(&System) -> u64) -> Option<u64> {
    let mut system = System::new();
    system.refresh_memory_specifics(MemoryRefreshKind::nothing().with_ram());
    match figure(&system) {
        // The figure is unknown.
        0 => None,
        bytes => Some(bytes),
    }
}

/// The processor's name, if the system reports it.
fn processor() -> Option<String> {
    let name = if cfg!(target_os = "macos") {
        let mut sysctl = std::process::Command::new("sysctl");
        let output = sysctl.args(["-n", "machdep.cpu.brand_string"]).output().ok()?;
        String::from_utf8(output.stdout).ok()?
    } else if cfg!(windows) {
        std::env::var("PROCESSOR_IDENTIFIER").ok()?
    } else {
        model(&std::fs::read_to_string("/proc/cpuinfo").ok()?)?
    };
    trimmed(&name)
}

/// Parses the line `model name : NAME` of the first processor.
fn model(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    let (_, name) = line.split_once(':')?;
    trimmed(name)
}

/// Returns a name without the spaces around it; `None` if nothing is left.
fn trimmed(name: &str) -> Option<String> {
    let name = name.trim();
    if name.is_empty() { None } else { Some(name.to_string()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_is_read() {
        let total = HostInfo::query().memory.unwrap();
        let available = available_memory().unwrap();
        assert!(available <= total, "{available} of {total} bytes");
        assert!(total >= 1 << 28, "{total} bytes");
    }

    #[test]
    fn the_processor_is_read() {
        let text = "processor\t: 0\nmodel name\t: Some CPU @ 2.0 GHz\nmodel name\t: Other\n";
        assert_eq!(model(text).as_deref(), Some("Some CPU @ 2.0 GHz"));
        assert_eq!(model("model name :\n"), None);
        assert_eq!(model(""), None);
        assert_eq!(model("Features\t: fp"), None);
    }
}
