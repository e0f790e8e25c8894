//! Endurance: an interruption by Ctrl-C and a resumption to the same bits, then steps until the end
//! of the time at a constant rate and with constant memory.

use std::fs;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::measures::{Findings, Measure};
use super::record::{Trained, numbers, steps_of, words};
use super::workshop::{Ended, Halt, Workshop};
use potluck_train::signals::Interruption;

/// Steps of the run without an interruption.
const STEPS: usize = 20;
const TOY_STEPS: usize = 60;
/// Longest time of the following steps; the part may end before.
const TOY_TIME: Duration = Duration::from_secs(5);
/// Time reserved for saving and for the summary.
const RESERVE: Duration = Duration::from_secs(20);
/// Time between two samples of the memory.
const LOOK: Duration = Duration::from_secs(5);
const TOY_LOOK: Duration = Duration::from_millis(500);
/// Steps of the long run: more than the time allows.
const STEPS_MAX: usize = 1_000_000;

pub fn perform(shop: &Workshop) -> Result<Findings, Halt> {
    if !cfg!(unix) {
        return Ok(Findings::skipped("a process cannot be sent Ctrl-C alone on this system"));
    }
    let steps = shop.sized(TOY_STEPS, STEPS);
    let mut more = words(&format!("--batch {} --set train.tune_s=0", shop.batch()));
    more.extend(shop.gpt2());
    more.extend(words(&format!("--set schedule.warmup=0 --steps {steps}")));
    let whole = shop.train_in("whole", &shop.selector, &more)?;
    let mut measures = vec![whole.end("without a break", steps)];
    let stopped = shop.work.join("stopped");
    let mut start = shop.train(&shop.selector, &more);
    start.extend(words("--out stopped"));
    let ended =
        shop.run_and_interrupt(shop.potluck(&start)?, |_| steps_of(&stopped).len() >= steps / 2)?;
    let taken = steps_of(&stopped).len();
    let text = format!("{taken} steps, {}", ended.end());
    let stop = shop.stop_signal();
    let name = if stop == Interruption::Interrupt { "Ctrl-C" } else { "SIGTERM" };
    measures.push(stopped_by(stop, name, text, &ended));
    let resume = |steps: usize| {
        let line =
            format!("train --quiet --devices {} --resume stopped --steps {steps}", shop.selector);
        shop.potluck(&words(&line))
    };
    let resumed = shop.run_command(resume(steps)?, shop.deadline, |_| Ok(()))?;
    let resumed = Trained { ended: resumed, steps: steps_of(&stopped) };
    measures.push(resumed.end("resumed", steps));
    let hashes = [shop.work.join("whole"), stopped.clone()].map(|run| parameters(&run, steps));
    let is_equal = hashes[0].is_some() && hashes[0] == hashes[1];
    let text = if is_equal { "equal" } else { "not equal" };
    measures.push(Measure::expected("hash of the parameters", text, "equal", is_equal));
    let has_time = shop.time_left() > 2 * RESERVE;
    if !has_time {
        measures.push(Measure::fact("steps until the end", "no time was left"));
    }
    if has_time && measures.iter().all(|measure| measure.is_right) {
        let samples = long_run(shop, &stopped, steps, resume(STEPS_MAX)?, &mut measures)?;
        let details = json!({ "hash": hashes[0], "samples": samples });
        Ok(Findings { measures, details, skipped: None })
    } else {
        Ok(Findings { measures, details: json!({ "hashes": hashes }), skipped: None })
    }
}

/// Continues a run until the time is up; returns the samples of its rate and memory.
fn long_run(
    shop: &Workshop,
    run: &Path,
    done: usize,
    command: std::process::Command,
    measures: &mut Vec<Measure>,
) -> Result<Value, Halt> {
    let time = shop.time_left().saturating_sub(RESERVE);
    let until = Instant::now() + if shop.is_toy { TOY_TIME.min(time) } else { time };
    let interval = shop.sized(TOY_LOOK, LOOK);
    let mut samples = Vec::new();
    let mut looked = Instant::now();
    let ended = shop.run_and_interrupt(command, |child| {
        if looked.elapsed() >= interval {
            looked = Instant::now();
            samples.push(json!({
                "host_kib": resident_kib(child),
                "device_free": shop.adapter.memory_now().free,
            }));
        }
        Instant::now() >= until
    })?;
    let steps = steps_of(run);
    let rates = numbers(&steps[done.min(steps.len())..], "tokens_per_s");
    let text = format!("{} steps, {}", rates.len(), ended.end());
    measures.push(stopped_by(shop.stop_signal(), "steps until the end", text, &ended));
    if let Some((first, last)) = ends(&rates) {
        measures.push(Measure::number("first tenth", first, "tokens/s"));
        measures.push(Measure::number("last tenth", last, "tokens/s"));
        measures.push(if shop.times_count() {
            Measure::at_least("last by first", last / first, 0.9, "")
        } else {
            Measure::number("last by first", last / first, "")
        });
    }
    // In the first half, drivers still compile, and allocators still grow.
    let warm = &samples[samples.len() / 2..];
    if let Some((first, last)) = ends(&numbers(warm, "host_kib")) {
        let name = "growth of the process's memory";
        let growth = last / first - 1.0;
        // In the seconds of a rehearsal, a process is still growing.
        measures.push(if shop.is_toy {
            Measure::number(name, growth, "")
        } else {
            Measure::at_most(name, growth, 0.1, "")
        });
    }
    if let Some((first, last)) = ends(&numbers(warm, "device_free")) {
        let lost = (first - last) / f64::from(1 << 20);
        measures.push(Measure::at_most("growth of the device's memory", lost, 64.0, "MiB"));
    }
    Ok(json!({ "tokens_per_s": means(&rates, 100), "memory": samples }))
}

/// Measure that a signal has ended a run with its exit code.
fn stopped_by(signal: Interruption, name: &str, text: String, ended: &Ended) -> Measure {
    let code = signal.exit_code();
    let wanted = format!("exit status: {code}");
    Measure::expected(name, text, &wanted, ended.code() == Some(code))
}

/// Returns the means of the first and of the last tenth of some values, without the very first
/// values, whose steps compile. `None` if there are fewer than four.
fn ends(values: &[f64]) -> Option<(f64, f64)> {
    let values = &values[(values.len() / 4).min(3)..];
    if values.len() < 3 {
        return None;
    }
    let count = (values.len() / 10).max(1);
    Some((mean(&values[..count]), mean(&values[values.len() - count..])))
}

/// Means of about `windows` windows.
fn means(values: &[f64], windows: usize) -> Vec<f64> {
    let size = values.len().div_ceil(windows).max(1);
    values.chunks(size).map(mean).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Hash of the parameters in the checkpoint of a step.
fn parameters(run: &Path, step: usize) -> Option<String> {
    let path = run.join(format!("checkpoints/step-{step:08}/manifest.json"));
    let manifest: Value = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    let files = manifest["files"].as_array()?;
    let file = files.iter().find(|file| file["name"] == "parameters.safetensors")?;
    Some(file["blake3"].as_str()?.to_string())
}

/// Memory of a process, if the system provides it.
fn resident_kib(child: &Child) -> Option<f64> {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_steps_are_compared_with_the_first_warm_ones() {
        let mut rates = vec![10.0; 23];
        rates[0] = 1.0;
        rates[21] = 5.0;
        rates[22] = 7.0;
        assert_eq!(ends(&rates), Some((10.0, 6.0)));
        assert_eq!(ends(&[1.0, 2.0]), None);
        assert_eq!(means(&[1.0, 3.0, 5.0], 2), [2.0, 5.0]);
        assert!(means(&[], 3).is_empty());
    }
}
