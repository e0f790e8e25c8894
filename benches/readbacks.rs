//! Benchmark of readbacks and uploads of 64 MiB of gradients, on the CPU device and on every
//! adapter found: GB/s, medians of some rounds, in which the methods take turns.
//!
//!     cargo bench --bench readbacks -- [--rounds N]
//!
//!     copied      no device: memory copied on one core, 1 MiB at a time
//!     bank        read_bucket: mapped, and copied to one vector
//!     pieces      start_readback and next_readback: mapped, and dropped unread
//!     summed      the same, each readback added to a partial sum on another thread, as a ring
//!                 thread does
//!     written     write_place, 1 MiB at a time
//!     added       add: uploaded, added by the device, read back, 1 MiB at a time

use std::sync::{LazyLock, mpsc};
use std::time::Instant;

use potluck_core::{BucketId, DType};
use potluck_graph::{Builder, Init, Plan, PlanOptions, Precision, Region, differentiate};
use potluck_kernels::autotune::{KernelCache, KernelSelector};
use potluck_kernels::device::{DeviceError, Gpu, ShaderChecks, list_adapters};
use potluck_kernels::exec::{BucketTensor, Cpu, Executor, GpuExecutor, Readback};

const WIDTH: usize = 4096;
const BUCKET: BucketId = BucketId(0);

/// Method to move gradients.
type Way = fn(&mut dyn Executor) -> Result<(), DeviceError>;
const WAYS: [(&str, Way); 6] = [
    ("copied", copied),
    ("bank", bucket_tensor),
    ("pieces", |device| pieces(device, &mut drop)),
    ("summed", summed),
    ("written", written),
    ("added", added),
];

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let at = arguments.iter().position(|argument| argument == "--rounds");
    let rounds =
        at.and_then(|at| arguments.get(at + 1)).map_or(5, |n| n.parse().expect("--rounds"));
    println!("{:44}{}", "", WAYS.map(|(name, _)| format!("{name:>9}")).concat());
    measure(&mut Cpu::fast(plan(), 0), rounds);
    for adapter in list_adapters() {
        let opened = Gpu::open(&adapter, ShaderChecks::Disabled, Precision::F32).and_then(|gpu| {
            GpuExecutor::new(gpu, plan(), 0, KernelSelector::new(KernelCache::in_memory()))
        });
        match opened {
            Ok(mut device) => measure(&mut device, rounds),
            Err(error) => println!("{}: {error}", adapter.name),
        }
    }
}

/// Returns the plan of a model with one square matrix of 64 MiB.
fn plan() -> Plan {
    let mut b = Builder::new();
    let (x, target) = (b.input("x", &[1, WIDTH]), b.input("target", &[1, WIDTH]));
    let w = b.parameter("w", &[WIDTH, WIDTH], Init::Zeros);
    let y = b.linear(x, w, None).expect("shapes fit");
    b.squared_error_loss(y, target).expect("shapes fit");
    Plan::new(differentiate(b.finish()).expect("it has a loss"), PlanOptions::new(1))
}

fn measure(device: &mut dyn Executor, rounds: usize) {
    let mut seconds = WAYS.map(|_| Vec::new());
    // One warm-up round more, which creates what is created once.
    for _ in 0..=rounds {
        for ((name, way), seconds) in WAYS.iter().zip(&mut seconds) {
            let started = Instant::now();
            way(device).unwrap_or_else(|error| panic!("{name}: {error}"));
            seconds.push(started.elapsed().as_secs_f64());
        }
    }
    let bytes = (DType::F32.bytes() * length(device)) as f64;
    let cells = seconds.map(|mut seconds| {
        seconds.remove(0);
        seconds.sort_by(f64::total_cmp);
        format!("{:9.2}", bytes / seconds[seconds.len() / 2] * 1e-9)
    });
    let name: String = device.name().chars().take(43).collect();
    println!("{name:44}{}", cells.concat());
}

fn length(device: &dyn Executor) -> usize {
    device.plan().buckets[BUCKET.index()].length
}

/// Returns the start and the length of every readback.
fn parts(device: &dyn Executor) -> impl Iterator<Item = (usize, usize)> + use<> {
    let (all, most) = (length(device), device.readback_elements_max());
    (0..all).step_by(most).map(move |start| (start, most.min(all - start)))
}

fn place(start: usize, count: usize) -> Region {
    Region::bucket(BucketTensor::Gradients, BUCKET, start..start + count)
}

fn copied(device: &mut dyn Executor) -> Result<(), DeviceError> {
    static VALUES: LazyLock<Vec<f32>> = LazyLock::new(|| vec![1.0; WIDTH * WIDTH]);
    let mut copy = vec![0.0; device.readback_elements_max()];
    for (start, count) in parts(device) {
        copy[..count].copy_from_slice(&VALUES[start..start + count]);
        std::hint::black_box(&mut copy);
    }
    Ok(())
}

fn bucket_tensor(device: &mut dyn Executor) -> Result<(), DeviceError> {
    device
        .read_bucket(BucketTensor::Gradients, BUCKET)
        .map(|values| drop(std::hint::black_box(values)))
}

fn pieces(device: &mut dyn Executor, done: &mut dyn FnMut(Readback)) -> Result<(), DeviceError> {
    for (start, count) in parts(device) {
        device.start_readback(place(start, count))?;
    }
    while device.has_readbacks() {
        match device.next_readback(true)? {
            Some(piece) => done(piece),
            // The summing thread still holds all staging buffers.
            None => std::thread::yield_now(),
        }
    }
    Ok(())
}

fn summed(device: &mut dyn Executor) -> Result<(), DeviceError> {
    let (sender, received) = mpsc::channel::<Readback>();
    let mut sums = vec![1.0f32; device.readback_elements_max()];
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for piece in received {
                sums.iter_mut().zip(piece.values()).for_each(|(sum, value)| *sum += value);
            }
            std::hint::black_box(sums)
        });
        // The receiver ends after the sender.
        let moved = pieces(device, &mut |piece| sender.send(piece).expect("it receives"));
        drop(sender);
        moved
    })
}

fn written(device: &mut dyn Executor) -> Result<(), DeviceError> {
    let values = vec![1.0; device.readback_elements_max()];
    for (start, count) in parts(device) {
        device.write_place(&place(start, count), &values[..count])?;
    }
    // Reading the loss waits for all writes.
    device.loss().map(drop)
}

fn added(device: &mut dyn Executor) -> Result<(), DeviceError> {
    let mut values = vec![1.0; device.readback_elements_max()];
    for (start, count) in parts(device) {
        device.add(BUCKET, start, &mut values[..count])?;
    }
    Ok(())
}
