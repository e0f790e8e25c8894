//! Devices that fail or are missing: the message, the exit code, how soon it comes, and that a
//! resumed run ends in the bits of the one that nothing happened to.

use std::collections::HashMap;
use std::process::Child;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::process::{Desk, Ran, adapter_name, adapter_selectors, is_swiftshader};
use potluck_graph::Precision;
use potluck_kernels::Pipelines;
use potluck_kernels::bench::spin::{GROUPS_MAX, Spin};
use potluck_kernels::device::{DeviceError, Gpu, INJECTED_HANG_MAX, ShaderChecks};

const STEPS: u64 = 14;
const SETTINGS: &str = "--quiet --steps 14 --set model.dropout=0.1 --set train.micro_batch_size=3 \
     --set train.checkpoint_every=5 --set train.eval_every=7 --set faults.device_timeout_s=10 \
     --set train.tune_s=0";

/// The CPU device, and the adapters under test.
fn selectors() -> Vec<String> {
    std::iter::once("cpu".to_string()).chain(adapter_selectors()).collect()
}

fn train_line(devices: &str) -> String {
    format!("train tiny.toml --data text.txt --out run {SETTINGS} --devices {devices}")
}

/// The run on a device that nothing happens to. Each is made once.
fn whole(devices: &str) -> Arc<Desk> {
    static WHOLE: Mutex<Option<HashMap<String, Arc<Desk>>>> = Mutex::new(None);
    let mut made = WHOLE.lock().unwrap();
    let made = made.get_or_insert_default();
    let make = || {
        let desk = Desk::certified();
        desk.run(&train_line(devices)).ok();
        Arc::new(desk)
    };
    made.entry(devices.to_string()).or_insert_with(make).clone()
}

/// A fault, and the part of its message that names it.
type Fault = (&'static str, &'static str);

/// Starts a run with a fault of the device, or resumes it.
fn start(desk: &Desk, fault: &str, devices: &str, is_first: bool) -> Child {
    let resume = format!("train --quiet --resume run --devices {devices}");
    let line = if is_first { train_line(devices) } else { resume };
    desk.command(&line).env("POTLUCK_FAULT", fault).spawn().unwrap()
}

/// Asserts that a run ended with its fault, told as such.
fn assert_failed(ran: &Ran, (fault, says): Fault, devices: &str) {
    let error = ran.line("error:");
    let name = match devices {
        "cpu" => "cpu (".to_string(),
        adapter => format!("{}: ", adapter_name(adapter)),
    };
    assert!(error.starts_with(&format!("error: {name}")), "{fault} on {devices}: {error}");
    assert!(error.contains(says), "{fault} on {devices}: {error}");
    let command = "; continue it with: potluck train --resume run";
    assert!(error.ends_with(command), "{fault} on {devices}: {error}");
    assert!(!ran.err.contains("panicked"), "{fault} on {devices}: {}", ran.err);
    assert_eq!(ran.out, "", "{fault} on {devices}");
}

/// Resumes a run that faults ended, and asserts that it comes to the end of the one that nothing
/// happened to.
fn assert_resumes(desk: &Desk, devices: &str) {
    let ran = desk.run(&format!("train --quiet --resume run --devices {devices}")).ok();
    assert_eq!(ran.err, "", "{devices}");
    let whole = whole(devices);
    for file in ["parameters.safetensors", "moments.safetensors"] {
        let same = desk.checkpoint("run", STEPS, file) == whole.checkpoint("run", STEPS, file);
        assert!(same, "{devices}: {file} differs");
    }
    assert_eq!(desk.losses("run"), whole.losses("run"), "{devices}");
}

/// Trains with a fault, resumes with the next one, and so on, and then to the end.
fn failed_and_resumed(faults: &[Fault], devices: &str) {
    let desk = Desk::certified();
    for (index, fault) in faults.iter().enumerate() {
        let child = start(&desk, fault.0, devices, index == 0);
        let ran = crate::process::finish(child, &format!("{} on {devices}", fault.0)).ended(75);
        assert_failed(&ran, *fault, devices);
    }
    assert_resumes(&desk, devices);
}

const LOST: &str = "the device was lost";
const NO_MEMORY: &str = "out of memory";

#[test]
fn a_lost_device_and_one_without_memory_end_a_run_that_resumes_to_the_same_bits() {
    // All before the checkpoint of step 10, so that each resumed run comes to its fault.
    let on_cpu = [
        ("lost@forward:9", LOST),
        ("out-of-memory@forward:9", NO_MEMORY),
        ("lost@backward:9", LOST),
        ("out-of-memory@backward:9", NO_MEMORY),
        ("lost@verdict:9", LOST),
        ("out-of-memory@verdict:9", NO_MEMORY),
        ("lost@update:9", LOST),
        ("out-of-memory@update:9", NO_MEMORY),
    ];
    failed_and_resumed(&on_cpu, "cpu");
    let on_adapter = [
        ("lost@forward:9", LOST),
        ("out-of-memory@backward:9", NO_MEMORY),
        ("lost@verdict:10", LOST),
        ("lost@update:14", LOST),
    ];
    for devices in selectors().iter().skip(1) {
        failed_and_resumed(&on_adapter, devices);
    }
}

/// Neither the run nor the end of the process waits for the end of a hang. The runs wait at the
/// same time, since each takes as long as its deadline.
#[test]
fn a_hung_device_ends_the_run_at_its_deadline() {
    const HANG: Fault = ("hang@update:9", "did not finish within 10 s");
    let selectors = selectors();
    // What the runs need is certified before, because they run at the same time.
    for devices in &selectors {
        whole(devices);
    }
    let desks: Vec<Desk> = selectors.iter().map(|_| Desk::certified()).collect();
    let started = Instant::now();
    let start = |(desk, devices): (&Desk, &String)| start(desk, HANG.0, devices, true);
    let children: Vec<Child> = desks.iter().zip(&selectors).map(start).collect();
    for (child, devices) in children.into_iter().zip(&selectors) {
        let ran = crate::process::finish(child, &format!("a hang on {devices}")).ended(75);
        let took = started.elapsed();
        assert!(took < INJECTED_HANG_MAX, "{devices} took {took:?}");
        assert_failed(&ran, HANG, devices);
    }
    desks.iter().zip(&selectors).for_each(|(desk, devices)| assert_resumes(desk, devices));
}

#[test]
fn without_an_adapter_a_run_says_what_to_install() {
    let desk = Desk::new();
    let before = desk.files();
    let run = |line: &str| {
        let mut command = desk.command(line);
        command.env("VK_DRIVER_FILES", "/nonexistent").env_remove("VK_ADD_DRIVER_FILES");
        command.env("__EGL_VENDOR_LIBRARY_FILENAMES", "/nonexistent");
        crate::process::finish(command.spawn().unwrap(), line)
    };
    let tiny = "train tiny.toml --data text.txt --steps 1 --quiet --out run";
    let ran = run(&format!("{tiny} --devices llvmpipe")).ended(78);
    let error = ran.line("error: no GPU adapter was found");
    assert!(error.contains("--devices cpu"), "{error}");
    if cfg!(target_os = "linux") {
        assert!(error.contains("apt-get install libvulkan1 mesa-vulkan-drivers"), "{error}");
    }
    assert_eq!(desk.files(), before);
    assert!(run("devices").ok().out.contains("no GPU adapter was found: "));
    let ran = run("train tiny.toml --data text.txt --steps 1 --out run").ok();
    ran.line("running on the CPU: no hardware GPU was found");
}

#[test]
fn a_run_that_the_memory_of_its_device_does_not_hold_is_refused_with_the_figures() {
    for devices in selectors().iter().skip(1) {
        let desk = Desk::new();
        let before = desk.files();
        let line = "train tiny.toml --data text.txt --out run --set train.device_memory_mib=1 \
                    --set train.batch=512 --micro-batch 512";
        let ran = desk.run(&format!("{line} --devices {devices}")).ended(78);
        let error = ran.line("error:");
        for part in
            ["the run needs", "it has 1.0 MiB, as train.device_memory_mib sets it", "micro_batch"]
        {
            assert!(error.contains(part), "'{part}' is missing in: {error}");
        }
        assert_eq!(desk.files(), before, "{devices}");
    }
}

/// SwiftShader refuses a buffer of 1 GiB, which its limits allow: its driver is asked for one, for
/// the 256 hidden values of 131,072 samples of 8 tokens.
#[test]
fn a_driver_that_refuses_memory_at_the_start_is_a_matter_of_the_configuration() {
    let swiftshader = adapter_selectors().into_iter().find(|adapter| is_swiftshader(adapter));
    let Some(swiftshader) = swiftshader else {
        return crate::process::skip("SwiftShader is not among the adapters under test");
    };
    let desk = Desk::new();
    let before = desk.files();
    let line = format!(
        "train tiny.toml --data text.txt --out run --devices {swiftshader} --set model.width=4 \
         --set model.kind=llama --set model.mlp_width=256 --set data.tokenizer=byte --set \
         train.batch=131072 --set train.device_memory_mib=100000 --set train.tune_s=0"
    );
    let ran = desk.run(&line).ended(78);
    let error = ran.line("error: SwiftShader");
    for part in ["it has no memory for", "1073741824 bytes", "that the run needs"] {
        assert!(error.contains(part), "'{part}' is missing in: {error}");
    }
    assert_eq!(desk.files(), before);
}

fn each_gpu(mut body: impl FnMut(&mut Gpu)) {
    let _turn = crate::common::turn();
    for adapter in crate::common::adapters() {
        body(&mut Gpu::open(&adapter, ShaderChecks::Disabled, Precision::F32).unwrap());
    }
}

fn assert_lost<T>(gpu: &Gpu, when: &str, result: Result<T, DeviceError>) {
    let Err(error) = result else { panic!("{} {when}: nothing was told", gpu.name) };
    assert!(matches!(error, DeviceError::Lost { .. }), "{} {when}: {error}", gpu.name);
    let text = error.to_string();
    assert!(text.contains(&gpu.name) && text.contains("start again"), "{text}");
    // It stays lost, and that is what is told, not what follows from it.
    assert!(matches!(gpu.check(), Err(DeviceError::Lost { .. })), "{} {when}", gpu.name);
    let again = gpu.wait("another wait", None);
    assert!(matches!(again, Err(DeviceError::Lost { .. })), "{} {when}: {again:?}", gpu.name);
}

#[test]
fn a_device_lost_after_an_upload_or_before_a_readback_says_lost() {
    each_gpu(|gpu| {
        let (buffer, staging) = (gpu.storage("a", 1024).unwrap(), gpu.readback(1024).unwrap());
        gpu.upload(&buffer, 0, &[7; 1024]);
        gpu.device.destroy();
        assert_lost(gpu, "between upload and readback", gpu.read(&staging, &[(&buffer, 0, 64)]));
    });
    each_gpu(|gpu| {
        gpu.device.destroy();
        // What is made on a lost device is of no use, which the first wait tells.
        let buffer = gpu.storage("a", 1024).unwrap();
        gpu.upload(&buffer, 0, &[7; 1024]);
        let lost = gpu.submit_and_wait(gpu.device.create_command_encoder(&Default::default()));
        assert_lost(gpu, "before an upload", lost);
        let staging = gpu.readback(1024).unwrap();
        assert_lost(gpu, "and then a readback", gpu.read(&staging, &[(&buffer, 0, 64)]));
    });
}

#[test]
fn a_device_lost_while_a_buffer_is_mapped_says_lost() {
    each_gpu(|gpu| {
        let (buffer, staging) = (gpu.storage("a", 1024).unwrap(), gpu.readback(1024).unwrap());
        let outcome = Arc::new(Mutex::new(None));
        let seen = Arc::clone(&outcome);
        staging.map_async(wgpu::MapMode::Read, .., move |mapped| {
            *seen.lock().unwrap() = Some(mapped.is_ok());
        });
        gpu.device.destroy();
        assert_lost(gpu, "with a mapping under way", gpu.wait("a mapping", None));
        // The mapping came to an end, well or badly: nobody waits for it for ever.
        assert!(outcome.lock().unwrap().is_some(), "{}", gpu.name);
        // The buffer is mapped or gone; using it again fails because the device is lost.
        assert_lost(gpu, "with a mapped buffer", gpu.read(&staging, &[(&buffer, 0, 64)]));
    });
}

#[test]
fn a_device_lost_in_the_middle_of_work_says_lost() {
    each_gpu(|gpu| {
        let spin = Spin::new(gpu, &mut Pipelines::default()).unwrap();
        let submission = spin.submit(gpu, 64);
        gpu.device.destroy();
        assert_lost(gpu, "at work", gpu.wait("the work", Some(submission)));
        let refused = spin.submit(gpu, 64);
        assert_lost(gpu, "with more work", gpu.wait("more work", Some(refused)));
    });
}

/// Waits for groups with a short deadline, and then until they are done; returns false if they were
/// done in time.
fn times_out(gpu: &mut Gpu, spin: &Spin, groups: u32) -> bool {
    gpu.deadline = Duration::from_millis(200);
    let (started, many) = (Instant::now(), spin.submit(gpu, groups));
    let submitted = started.elapsed();
    let waited = gpu.wait("many groups", Some(many.clone()));
    let after = started.elapsed() - submitted;
    gpu.deadline = Duration::from_secs(120);
    gpu.wait("many groups", Some(many)).unwrap();
    let Err(error) = waited else {
        // GL's llvmpipe is done with a submission before it says that it took it.
        return gpu.api == "gl" && submitted >= Duration::from_millis(200);
    };
    let text = error.to_string();
    assert!(matches!(error, DeviceError::Timeout { .. }), "{text}");
    for part in [gpu.name.as_str(), "many groups", "0.2 s", "faults.device_timeout_s"] {
        assert!(text.contains(part), "'{part}' is missing in: {text}");
    }
    assert!(after < Duration::from_secs(20), "{after:?}");
    true
}

/// As many groups as take seconds on the largest cards.
const MOST: u32 = 2048 * GROUPS_MAX;

#[test]
fn a_submission_that_takes_too_long_is_a_timeout_and_the_device_lives_on() {
    each_gpu(|gpu| {
        let spin = Spin::new(gpu, &mut Pipelines::default()).unwrap();
        let few_take = |_| {
            let started = Instant::now();
            let few = spin.submit(gpu, 64);
            gpu.wait("a few groups", Some(few)).unwrap();
            started.elapsed().as_secs_f64()
        };
        // As many as take about three seconds: the device is slow, not hung. A busy machine may
        // have measured too much.
        let few_take = (0..3).map(few_take).fold(f64::INFINITY, f64::min);
        let mut groups = ((64.0 * 3.0 / few_take) as u32).clamp(64, MOST);
        while !times_out(gpu, &spin, groups) {
            assert!(groups < MOST, "{}: {groups} groups do not time out", gpu.name);
            groups = (2 * groups).min(MOST);
        }
    });
}
