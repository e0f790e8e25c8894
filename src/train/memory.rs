//! Whether the host has the memory that a run needs, asked before anything is allocated: a
//! system that runs out of it kills processes without a word.

use crate::graph::Plan;
use crate::graph::print::Memory;
use crate::parallel::Instruction;

use super::error::TrainError;
use super::loader;

/// Refuses what needs more bytes than the host has available; where that is not known, nothing.
pub fn require(bytes: usize) -> Result<(), TrainError> {
    match available() {
        Some(available) if bytes > available => {
            let [needed, available] = [bytes, available].map(gibibytes);
            Err(TrainError::Memory { needed, available })
        }
        _ => Ok(()),
    }
}

/// What a plan takes on a device that shares the host's memory, with the copy of parameters and
/// moments that saving them makes.
pub fn of_device(plan: &Plan, moments: usize) -> usize {
    let memory = Memory::of(plan, moments);
    let saved = memory.parameters.saturating_add(memory.moments);
    memory.peak().saturating_add(saved)
}

/// What a run of batches of `batch` samples of `context` tokens takes besides the device.
pub fn of_run(plan: &Plan, batch: usize, micro_batch: usize, context: usize) -> usize {
    let per_micro_batch = plan.segments.len() + 1;
    let instructions = batch.div_ceil(micro_batch.max(1)).saturating_mul(per_micro_batch);
    let program = instructions.saturating_mul(size_of::<Instruction>());
    program.saturating_add(loader::bytes(batch, context))
}

fn gibibytes(bytes: usize) -> String {
    format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
}

/// The bytes that can be allocated without swapping, where the system says so.
fn available() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    parse(&text)
}

/// The line `MemAvailable:   123456 kB`, in bytes.
fn parse(meminfo: &str) -> Option<usize> {
    let rest = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: usize = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::config::RunConfig;
    use crate::train::setup;

    #[test]
    fn the_available_memory_is_read() {
        let text = "MemTotal:       24000000 kB\nMemAvailable:    1024 kB\n";
        assert_eq!(parse(text), Some(1 << 20));
        assert_eq!(parse("MemAvailable: lots"), None);
        assert_eq!(parse(""), None);
        assert!(require(0).is_ok());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_model_that_no_host_holds_is_refused_before_it_is_allocated() {
        let mut config = RunConfig::default();
        (config.model.width, config.model.layers) = (65_536, 1024);
        config.check().unwrap();
        let plan = setup::plan(&config, 65).unwrap();
        let Err(error) = setup::open("cpu", plan, 2) else { panic!("no host has this") };
        let text = error.to_string();
        assert!(text.contains("GiB") && text.contains("model.width"), "{text}");
        assert_eq!(error.exit_code(), crate::train::error::EXIT_CONFIGURATION);
    }

    #[test]
    fn the_largest_run_that_can_be_configured_is_counted_without_wrapping() {
        let plan = setup::plan(&RunConfig::default(), 65).unwrap();
        let all = of_run(&plan, 1 << 20, 1, 65_536);
        assert!(all > (1 << 36) && all < usize::MAX, "{all}");
    }
}
