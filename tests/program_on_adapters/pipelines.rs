//! Pipelines whose stages are on unlike devices: losses and gradients of one device, replicas that
//! stay equal, schedules that change no bit, faults while a stage sends, resuming.

use crate::common::{gradient_nmse, squares};
use crate::process::{Desk, Ran, adapter_selectors};
use crate::several_devices::{unlike, warm, with_cpus};
use safetensors::SafeTensors;

const STEPS: u64 = 8;

/// Starts from a model of five blocks, of which most stages hold several.
const SETTINGS: &str = "--quiet --set model.layers=3 --set model.dropout=0.1 --set train.tune_s=0 \
     --set train.batch=12 --set train.micro_batch_size=3 --set train.sample_tokens=0 \
     --set train.eval_samples=9 --set train.checkpoint_every=4 --set parallel.balance=fixed \
     --set faults.hash_every=1 --set faults.device_timeout_s=30";

pub fn train(desk: &Desk, fault: &str, more: &str) -> Ran {
    let line = format!("train tiny.toml --data text.txt --out run {SETTINGS} {more}");
    desk.run_with(fault, &line)
}

pub fn state(desk: &Desk) -> [Vec<u8>; 2] {
    ["parameters.safetensors", "moments.safetensors"]
        .map(|file| desk.checkpoint("run", STEPS, file))
}

/// The change of each parameter in the first step, by name.
fn first_changes(desk: &Desk) -> Vec<(String, Vec<f32>)> {
    let [before, after] = [0, 1].map(|step| desk.checkpoint("run", step, "parameters.safetensors"));
    let read = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
    };
    let (before, after) =
        (SafeTensors::deserialize(&before).unwrap(), SafeTensors::deserialize(&after).unwrap());
    let mut names = before.names();
    names.sort_unstable();
    let change = |name: &str| {
        let of = |tensors: &SafeTensors| read(tensors.tensor(name).unwrap().data());
        let (before, after) = (of(&before), of(&after));
        (name.to_string(), before.iter().zip(&after).map(|(a, b)| b - a).collect())
    };
    names.into_iter().map(change).collect()
}

/// Asserts that each tensor's changes are those of the CPU device; returns the largest error.
fn assert_same_gradients(desk: &Desk, alone: &Desk) -> f64 {
    let largest = largest_error(desk, alone);
    assert!(largest <= 1e-6, "{largest}");
    largest
}

/// Returns the largest error of a tensor's changes in the first step against those on the CPU
/// device; of a tensor that hardly changes, as a part of the norm of all changes.
pub fn largest_error(desk: &Desk, alone: &Desk) -> f64 {
    let (changes, expected) = (first_changes(desk), first_changes(alone));
    assert!(expected.len() > 10, "{} tensors", expected.len());
    let all: f64 = expected.iter().map(|(_, values)| squares(values)).sum();
    let mut largest = 0f64;
    for ((name, got), (of, wanted)) in changes.iter().zip(&expected) {
        assert_eq!(name, of);
        assert!(wanted.iter().any(|value| *value != 0.0), "{name} has no gradient");
        largest = largest.max(gradient_nmse(got, wanted, all));
    }
    largest
}

fn assert_losses_near(desk: &Desk, alone: &Desk) {
    let (losses, expected) = (desk.losses("run"), alone.losses("run"));
    assert_eq!(losses.len() as u64, STEPS);
    for (step, (a, b)) in losses.iter().zip(&expected).enumerate() {
        assert!((a - b).abs() <= 1e-4, "step {}: {a}, on the CPU device {b}", step + 1);
    }
}

/// Settings of one step whose changes are the negative gradients.
const GRADIENTS: &str = "--steps 1 --set optim.kind=sgd --set optim.momentum=0 --set optim.lr=1 \
     --set optim.weight_decay=0 --set optim.clip=0 --set schedule.warmup=0";

fn alone(untied: &str) -> (Desk, Desk) {
    let (curve, step) = (Desk::new(), Desk::new());
    train(&curve, "", &format!("--steps {STEPS} --devices cpu {untied}")).ok();
    train(&step, "", &format!("{GRADIENTS} --devices cpu {untied}")).ok();
    (curve, step)
}

const UNTIED: &str = "--set model.tie=false";

/// Pipelines of unlike devices have the same bits only if they are cut alike; a measured cut
/// depends on how busy the machine is.
const CUT: &str = "--pipeline 3 --set parallel.blocks_per_stage=[1,2,2]";

#[test]
fn a_pipeline_of_three_unlike_devices_is_the_cpu_device_in_every_schedule() {
    let (curve, step) = alone(UNTIED);
    let devices = format!("--devices {} {CUT} {UNTIED}", unlike());
    let first = Desk::certified();
    train(&first, "", &format!("--steps {STEPS} {devices}")).ok();
    assert_losses_near(&first, &curve);
    assert!(state(&first) != state(&curve), "the pipeline was not on the adapters");

    let gradients = Desk::certified();
    train(&gradients, "", &format!("{GRADIENTS} {devices}")).ok();
    assert_same_gradients(&gradients, &step);

    // Each device computes its micro-batches in the same order, whatever is in between.
    for schedule in ["gpipe", "zero-bubble"] {
        let other = Desk::certified();
        train(&other, "", &format!("--steps {STEPS} {devices} --schedule {schedule}")).ok();
        assert_eq!(other.losses("run"), first.losses("run"), "{schedule}");
        assert!(state(&other) == state(&first), "{schedule}: other bits");
    }
}

/// The tied embedding is held by both stages of both pipelines.
#[test]
fn two_pipelines_of_two_unlike_stages_are_the_cpu_device() {
    let (curve, step) = alone("");
    let devices = format!("--devices {} --pipeline 2", with_cpus(adapter_selectors(), 2));
    let desk = Desk::certified();
    train(&desk, "", &format!("--steps {STEPS} {devices}")).ok();
    assert_losses_near(&desk, &curve);
    let gradients = Desk::certified();
    train(&gradients, "", &format!("{GRADIENTS} {devices}")).ok();
    let largest = assert_same_gradients(&gradients, &step);
    assert!(largest > 0.0, "the pipelines were not on the adapters");
}

#[test]
fn a_fault_while_a_stage_sends_ends_with_75_and_resumes_to_the_same_bits() {
    let devices = warm();
    let pipeline = format!("--devices {devices} {CUT} {UNTIED}");
    let (whole, desk) = (Desk::certified(), Desk::certified());
    train(&whole, "", &format!("--steps {STEPS} {pipeline}")).ok();
    let resume = format!("train --quiet --resume run --devices {devices}");
    for (nth, fault) in
        ["lost@send:6/0", "out-of-memory@send:7/1", "lost@recv:7/1"].into_iter().enumerate()
    {
        let ran = match nth {
            0 => train(&desk, fault, &format!("--steps {STEPS} {pipeline}")),
            _ => desk.run_with(fault, &resume),
        }
        .ended(75);
        let (error, rank) = (ran.line("error:"), fault.rsplit('/').next().unwrap());
        assert!(error.contains(&format!("rank {rank}: ")), "{fault}: {error}");
    }
    desk.run(&resume).ok();
    assert_eq!(desk.losses("run"), whole.losses("run"));
    assert!(state(&desk) == state(&whole), "a resumed pipeline ends in other bits");
}

/// Each stage fits the memory that an adapter is said to have; both together do not.
#[test]
fn ranks_on_one_adapter_share_its_memory() {
    let Some(adapter) = adapter_selectors().into_iter().next() else {
        return crate::process::skip("there is no adapter");
    };
    let pipeline = "--pipeline 2 --set parallel.blocks_per_stage=[2,3] --set model.width=128 \
                    --set train.device_memory_mib=8 --steps 1";
    train(&Desk::new(), "", &format!("--devices {adapter},cpu {pipeline}")).ok();
    let desk = Desk::new();
    let before = desk.files();
    let ran = train(&desk, "", &format!("--devices {adapter}*2 {pipeline}")).ended(78);
    let error = ran.line("error:");
    for part in [" (its 2 ranks together): the run needs 1", "has 8.0 MiB, as train.device_memory_"]
    {
        assert!(error.contains(part), "'{part}' is missing in: {error}");
    }
    assert_eq!(desk.files(), before);
}

/// Three CPU devices are left of two pipelines: one pipeline, and a device without a stage.
#[test]
fn the_suggested_command_goes_on_with_a_pipeline_of_those_that_are_left() {
    let Some(adapter) = adapter_selectors().into_iter().next() else {
        return crate::process::skip("there is no adapter");
    };
    let desk = Desk::new();
    let line = format!("--steps {STEPS} --devices {adapter},cpu*3 --pipeline 2");
    let ran = train(&desk, "lost@backward:6/0", &line).ended(75);
    let error = ran.line("error:");
    let text = "continue without that device, and without another one, which fits in no pipeline \
                or tensor group, with: potluck train --resume run --devices 'cpu*2' --pipeline 2";
    assert!(error.contains(text), "{error}");
    desk.run_suggested(error).ok();
}
