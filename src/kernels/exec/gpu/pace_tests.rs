//! Tests of the length of submissions: long dispatches are submitted in parts, with the same
//! results.

use super::tests::{executors, executors_with, fill, step};
use super::*;
use potluck_graph::{Builder, Init, PlanOptions, differentiate};

/// Returns a plan whose products have half a GFLOP each, which take a software adapter a tenth of a
/// second or more.
fn plan() -> Plan {
    const ROWS: usize = 4;
    let mut b = Builder::new();
    let x = b.input("x", &[128, 512]);
    let w = b.parameter("w", &[1024, 512], Init::Zeros);
    let y = b.linear(x, w, None).unwrap();
    let target = b.input("target", &[128, 1024]);
    b.squared_error_loss(y, target).unwrap();
    Plan::new(differentiate(b.finish()).unwrap(), PlanOptions::new(ROWS))
}

fn bits(device: &mut GpuExecutor) -> Vec<u32> {
    let values = device.read_bucket(BucketTensor::Parameters, BucketId(0)).unwrap();
    values.iter().map(|v| v.to_bits()).collect()
}

/// Replaces the measured paces as if each of these dispatches took `seconds`.
fn set_paces(device: &GpuExecutor, seconds: f64) {
    for task in device.prepared.values() {
        for (bound, pace) in task.dispatches.iter().zip(&task.paces) {
            let of_workgroup = seconds / f64::from(bound.workgroups());
            pace.set(pace.get().map(|_| of_workgroup));
        }
    }
}

fn paced(device: &GpuExecutor) -> usize {
    let paces = device.prepared.values().flat_map(|task| &task.paces);
    paces.filter(|pace| pace.get().is_some()).count()
}

/// The bound of simulated devices (`kernels::pace`) is a quarter of a second. Here other processes
/// may use the processor, so it is half of what watchdogs allow, in the calmest of three steps.
#[test]
fn no_submission_of_a_step_is_long() {
    let plan = plan();
    for mut device in executors(&plan) {
        fill(&mut device);
        let mut calmest = f64::INFINITY;
        // The first step does not know the pace, the others do.
        for number in 1..4 {
            let before = device.stream.traffic.submissions;
            device.stream.traffic.longest_submission_s = 0.0;
            step(&mut device, number);
            let made = device.stream.traffic.submissions - before;
            let longest = device.stream.traffic.longest_submission_s;
            println!("{}: {longest:.3} s is the longest of {made} submissions", device.name());
            assert!(paced(&device) >= 2, "{}: products are long", device.name());
            // The first part of each of two products is a thirtieth, and the next one four times
            // as long or less.
            assert!(number > 1 || made >= 8, "{}: {made} submissions", device.name());
            let has_clock = device.gpu.timestamp_period_ns.is_some();
            assert_eq!(longest > 0.0, has_clock, "{}", device.name());
            calmest = calmest.min(longest);
        }
        assert!(calmest <= 1.0, "{calmest} s on {}", device.name());
    }
}

/// A device that another process uses: parts become shorter, and longer again when it is free.
#[test]
fn parts_follow_a_device_that_becomes_slower() {
    let plan = plan();
    for mut device in executors(&plan) {
        fill(&mut device);
        step(&mut device, 1);
        let made = |device: &mut GpuExecutor, number: u64, pace: f64| {
            set_paces(device, pace);
            let before = device.stream.traffic.submissions;
            step(device, number);
            device.stream.traffic.submissions - before
        };
        let few = made(&mut device, 2, 0.09);
        // It takes far longer than by this pace.
        made(&mut device, 3, 0.01);
        let many = made(&mut device, 4, 0.09);
        let has_clock = device.gpu.timestamp_period_ns.is_some();
        assert_eq!(many >= few + 5, has_clock, "{few}, {many} submissions on {}", device.name());
        // And then less.
        made(&mut device, 5, 2.0);
        let again = made(&mut device, 6, 0.09);
        assert_eq!(again < many, has_clock, "{many}, {again} submissions on {}", device.name());
    }
}

/// As configured by `train.submission_ms`.
#[test]
fn submissions_are_as_short_as_asked_for() {
    let plan = plan();
    let short = executors_with(&plan, 2, |gpu| gpu.submission_seconds = 0.01);
    for (mut whole, mut cut) in executors(&plan).zip(short) {
        let made = [&mut whole, &mut cut].map(|device| {
            fill(device);
            step(device, 1);
            set_paces(device, 0.09);
            let before = device.stream.traffic.submissions;
            step(device, 2);
            device.stream.traffic.submissions - before
        });
        assert!(made[1] >= made[0] + 10, "{made:?} submissions on {}", cut.name());
    }
}

#[test]
fn steps_in_parts_have_the_same_bits() {
    let plan = plan();
    for (mut whole, mut cut) in executors(&plan).zip(executors(&plan)) {
        for device in [&mut whole, &mut cut] {
            fill(device);
            step(device, 1);
        }
        assert!(bits(&mut whole) == bits(&mut cut), "{}: trials", cut.name());
        set_paces(&whole, 1e-4);
        set_paces(&cut, 2.0);
        let before = [&whole, &cut].map(|device| device.stream.traffic.submissions);
        assert_eq!(step(&mut whole, 2).loss, step(&mut cut, 2).loss, "{}", cut.name());
        let made = [&whole, &cut].map(|device| device.stream.traffic.submissions);
        assert!(bits(&mut whole) == bits(&mut cut), "{}: other bits", cut.name());
        let [few, many] = [0, 1].map(|index| made[index] - before[index]);
        // A part is to take a tenth of a second.
        assert!(many >= few + 10, "{few} and {many} submissions on {}", cut.name());
    }
}
