//! Shares of two equal devices while a run trains: one becomes half as fast in mid-run, by a fault
//! point or by a quota of processor time; and both stay as they are.

use std::error::Error;
use std::fs;
use std::thread;
use std::time::Duration;

use potluck_core::arithmetic::median;
use serde_json::Value;

use crate::program::{Place, RECORD, step_times};
use crate::quota::CpuQuota;
use crate::settings::{GPT_AT_TWO_CPUS, GPT_AT_TWO_NODES};

/// Step from which the second device is half as fast, and the steps within which the shares follow.
const SLOW_FROM: usize = 100;
const STEPS_TO_FOLLOW: usize = 60;

/// Steps of a run: one that is slowed down, and one that is not.
const SLOWED_STEPS: usize = 260;
const EVEN_STEPS: usize = 500;

/// Steps at the beginning of a run that are not counted.
const WARM_UP: usize = 20;

/// Both devices with the whole model.
const DATA_PARALLEL: &str = "--pipeline 1 --tensor 1";

/// Prints the throughput that is left of the devices' new sum, and the changes of shares of two
/// devices that keep their speed.
pub fn report(repeats: usize) -> Result<(), Box<dyn Error>> {
    let mut parts = Vec::new();
    for _ in 0..repeats {
        parts.push(part_by_fault()?);
    }
    print_parts("passes take twice as long by a fault point", &parts);
    match parts_by_quota(repeats) {
        Ok(parts) => print_parts("half a core by a quota", &parts),
        Err(why) => println!("half a core by a quota: not measured: {why}"),
    }
    let mut counts = Vec::new();
    for _ in 0..repeats {
        let record = Place::new(&GPT_AT_TWO_CPUS)?.train(&two_cpus(), EVEN_STEPS)?;
        counts.push(changes(&record));
    }
    println!("equal devices: changes of shares in {EVEN_STEPS} steps: {counts:?}");
    Ok(())
}

fn two_cpus() -> String {
    format!("--devices {} {DATA_PARALLEL}", GPT_AT_TWO_CPUS.devices.selector)
}

fn part_by_fault() -> Result<f64, Box<dyn Error>> {
    let place = Place::new(&GPT_AT_TWO_CPUS)?.with_faults(format!("slow@run:{SLOW_FROM}/1"));
    part_of_sum(&place.train(&two_cpus(), SLOWED_STEPS)?)
}

fn parts_by_quota(repeats: usize) -> Result<Vec<f64>, Box<dyn Error>> {
    let quota = CpuQuota::new()?;
    let mut parts = Vec::new();
    for _ in 0..repeats {
        parts.push(part_by_quota(&quota)?);
    }
    Ok(parts)
}

/// Two nodes on a core each, of which the second one has half a core from some step on.
fn part_by_quota(quota: &CpuQuota) -> Result<f64, Box<dyn Error>> {
    quota.limit(1.0)?;
    let place = Place::new(&GPT_AT_TWO_NODES)?.with_quota(quota);
    let record = place.path(RECORD);
    let flags = format!("--nodes 2 --devices cpu {DATA_PARALLEL}");
    let trained = thread::scope(|scope| {
        let run = scope.spawn(|| place.train(&flags, SLOWED_STEPS).map_err(|why| why.to_string()));
        let steps =
            || fs::read_to_string(&record).map_or(0, |text| text.matches("grad_norm").count());
        while !run.is_finished() && steps() < SLOW_FROM {
            thread::sleep(Duration::from_millis(5));
        }
        let limited = quota.limit(0.5);
        let trained = run.join().map_err(|_| "the run has panicked")??;
        limited?;
        Ok::<_, Box<dyn Error>>(trained)
    })?;
    quota.limit(1.0)?;
    let times = step_times(&trained);
    // Steps right after the change, before the shares follow.
    let slowed = median(&times[SLOW_FROM + 5..SLOW_FROM + 20]);
    if slowed < 1.3 * median(&times[WARM_UP..SLOW_FROM]) {
        return Err("the quota has not slowed the device down".into());
    }
    part_of_sum(&trained)
}

/// Throughput after the shares had time to follow, as a part of the sum of the devices' speeds:
/// three quarters of the sum before.
fn part_of_sum(record: &[Value]) -> Result<f64, Box<dyn Error>> {
    let times = step_times(record);
    if times.len() != SLOWED_STEPS {
        return Err(format!("{} steps are in the record", times.len()).into());
    }
    let before = median(&times[WARM_UP..SLOW_FROM]);
    let after = median(&times[SLOW_FROM + STEPS_TO_FOLLOW..]);
    Ok(before / (0.75 * after))
}

fn changes(record: &[Value]) -> usize {
    record.iter().filter(|line| line["event"] == "shares").count()
}

fn print_parts(what: &str, parts: &[f64]) {
    let parts: Vec<f64> = parts.iter().map(|part| (part * 1000.0).round() / 1000.0).collect();
    println!(
        "{what} from step {SLOW_FROM}: {:.3} of the new sum of speeds after {STEPS_TO_FOLLOW} \
         steps, median of {parts:?}",
        median(&parts)
    );
}
