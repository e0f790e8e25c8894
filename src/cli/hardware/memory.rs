//! The largest batch that trains in one micro-batch, and the refusal of a larger one: a sentence
//! with an exit code, never a crash.

use std::time::{Duration, Instant};

use serde_json::json;

use super::measures::{Findings, Measure};
use super::record::{BATCH, steps_of, words};
use super::workshop::{Ended, Halt, Workshop};
use potluck_kernels::device::AdapterKind;
use potluck_train::runtime::error::{EXIT_CONFIGURATION, EXIT_RESTART};

/// Largest batch that is tried.
const BATCH_MAX: usize = 1 << 14;
/// Memory limit of a rehearsal: a software adapter would take all of the host's.
const TOY_MIB: usize = 16;
/// Limit at which only the driver refuses.
const ANY_MIB: usize = 1 << 24;
/// Time between two samples of the free memory.
const LOOK: Duration = Duration::from_millis(500);

pub fn perform(shop: &Workshop) -> Result<Findings, Halt> {
    let limit = if shop.is_toy { TOY_MIB } else { 0 };
    let mut batch = shop.sized(1, BATCH);
    let mut measures = Vec::new();
    let mut trained = Vec::new();
    let refusal = loop {
        let trial = trial(shop, batch, limit)?;
        if !trial.has_trained {
            // A process that was ended at its time limit was not refused.
            break if trial.ended.status.is_some() { Some(trial.ended) } else { None };
        }
        trained.push(json!({ "batch": batch, "device_bytes": trial.bytes }));
        if batch >= BATCH_MAX || shop.time_left().is_zero() {
            break None;
        }
        batch *= 2;
    };
    match trained.last() {
        Some(last) => {
            let largest = last["batch"].as_f64().unwrap_or(0.0);
            measures.push(Measure::at_least("largest batch that trains", largest, 1.0, ""));
            if let Some(bytes) = last["device_bytes"].as_f64() {
                let size = bytes / f64::from(1 << 30);
                measures.push(Measure::number("memory it takes", size, "GiB"));
            }
        }
        None => measures.push(Measure::fact("largest batch that trains", "none")),
    }
    match &refusal {
        Some(ended) => measures.push(refused(&format!("batch {batch}"), ended)),
        None => measures.push(Measure::fact("refusal", "no batch was refused in the time")),
    }
    // On the host's memory the system would kill this process, or another one.
    let is_own = matches!(shop.adapter.kind, AdapterKind::Discrete | AdapterKind::Virtual);
    if is_own && refusal.is_some() && !shop.time_left().is_zero() {
        let trial = trial(shop, 2 * batch, ANY_MIB)?;
        let name = format!("batch {}, by the driver", 2 * batch);
        measures.push(refused(&name, &trial.ended));
    }
    Ok(Findings { measures, details: json!({ "trained": trained }), skipped: None })
}

struct BatchTrial {
    ended: Ended,
    has_trained: bool,
    /// Largest decrease of the driver's free memory, in bytes.
    bytes: Option<u64>,
}

/// Takes two steps of GPT-2 124M with the batch as one micro-batch.
fn trial(shop: &Workshop, batch: usize, limit_mib: usize) -> Result<BatchTrial, Halt> {
    let run = format!("batch-{batch}-{limit_mib}");
    let mut more = words(&format!(
        "--steps 2 --batch {batch} --micro-batch {batch} --set train.tune_s=0 \
         --set train.device_memory_mib={limit_mib} --out {run}"
    ));
    more.extend(shop.gpt2());
    let before = shop.adapter.memory_now().free;
    let mut least: Option<u64> = None;
    let mut looked = Instant::now();
    let command = shop.potluck(&shop.train(&shop.selector, &more))?;
    let ended = shop.run_command(command, shop.deadline, |_| {
        if looked.elapsed() >= LOOK {
            looked = Instant::now();
            if let Some(free) = shop.adapter.memory_now().free {
                least = Some(least.map_or(free, |least| least.min(free)));
            }
        }
        Ok(())
    })?;
    // Some drivers report to each process only its own memory.
    let mut bytes = None;
    if let (Some(before), Some(least)) = (before, least)
        && before > least
    {
        bytes = Some(before - least);
    }
    let has_trained = ended.is_right() && steps_of(&shop.work.join(&run)).len() == 2;
    // A large model's checkpoints would fill the disk.
    let _ = std::fs::remove_dir_all(shop.work.join(&run));
    Ok(BatchTrial { ended, has_trained, bytes })
}

/// Measure of a refusal, which should be a sentence with one of two exit codes.
fn refused(name: &str, ended: &Ended) -> Measure {
    let has_code =
        ended.code().is_some_and(|code| [EXIT_CONFIGURATION, EXIT_RESTART].contains(&code));
    let is_refused = has_code && ended.error().is_some();
    let text = if ended.is_right() { "trains".into() } else { ended.end() };
    // A process that was ended at its time limit was not refused.
    let is_right = is_refused || ended.is_right() || ended.status.is_none();
    Measure::expected(name, text, "exit status 78 or 75 with a sentence", is_right)
}
