//! Benchmark of an all-reduce of gradients between devices, compared with transfers of the same
//! bytes without communication: each device reads its gradients back to host memory and uploads
//! them again, all devices at the same time.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::host::{fill, is_filled, value};
use super::{GIB, GIBS, Kind};
use crate::report::{
    CollectiveFigure, DeviceReport, Direction, Figure, FigureKind, FigureRecorder,
};
use crate::sample::{Effort, SamplingPlan};
use crate::units::size;
use potluck_core::arithmetic::median;
use potluck_core::{BucketId, DType, Lock, Rank};
use potluck_graph::{Builder, Init, Plan, PlanOptions, Region, differentiate};
use potluck_kernels::autotune::TuneOptions;
use potluck_kernels::device::{DeviceError, Selection, list_adapters, select_all};
use potluck_kernels::exec::{BucketTensor, Executor, Moments};
use potluck_parallel::collective::{BucketGroups, Topology};
use potluck_parallel::planner::laid_out::layout;
use potluck_parallel::{ParallelOptions, Program, ReduceSite, gradient_all_reduce};
use potluck_train::TrainError;
use potluck_train::runtime::open::{
    DeviceToOpen, OpenDevice, OpenOptions, display_name, open_selected,
};
use potluck_train::runtime::step::StepInput;
use potluck_train::runtime::workers::{WorkerGroup, WorkerGroupOptions};
use potluck_train::runtime::{RuntimeError, memory, timing};

/// Only bucket of the plan.
const BUCKET: BucketId = BucketId(0);

/// Devices that take part in the all-reduce, at least two.
pub struct World {
    selections: Vec<Selection>,
}

/// Returns the devices of a list of selectors: `None` for `none`, and a single device twice.
///
/// # Errors
/// Returns `TrainError` if a selector chooses no device.
pub fn choose(devices: &str) -> Result<Option<World>, TrainError> {
    if devices.trim().eq_ignore_ascii_case("none") {
        return Ok(None);
    }
    let mut selections = select_all(devices, &list_adapters())?;
    if let [alone] = &selections[..] {
        selections = match alone {
            Selection::Cpu { .. } => vec![Selection::cpu(2); 2],
            adapter => vec![adapter.clone(); 2],
        };
    }
    Ok(Some(World { selections }))
}

impl World {
    /// Names of all devices, in the order of ranks.
    fn name(&self) -> String {
        self.selections.iter().map(Selection::name).collect::<Vec<_>>().join(" + ")
    }
}

/// APIs of devices, sorted and each once.
pub(crate) fn apis(selections: &[Selection]) -> String {
    let mut apis = BTreeSet::new();
    for selection in selections {
        apis.insert(match selection {
            Selection::Cpu { .. } => "cpu",
            Selection::Adapter(adapter) => adapter.api,
            Selection::Offered(_) => "node",
        });
    }
    Vec::from_iter(apis).join(", ")
}

/// Measures the all-reduce of these devices and returns the report.
pub fn measure(world: World, effort: Effort, progress: &mut dyn FnMut(&str)) -> DeviceReport {
    let name = world.name();
    let mut note = |what: &str| progress(&format!("{name}: {what}"));
    let mut recorder = FigureRecorder::new(&mut note);
    let error = measure_sizes(&world, effort, &mut recorder).err().map(|error| error.to_string());
    let (figures, skipped) = recorder.finish();
    let kind = format!("{} devices that sum gradients", world.selections.len());
    DeviceReport {
        name,
        api: apis(&world.selections),
        driver: String::new(),
        kind,
        figures,
        skipped,
        error,
    }
}

/// Widths of the square parameters, which take 1, 4, 16 or 64 MiB.
fn widths(effort: Effort) -> &'static [usize] {
    match effort {
        Effort::Tiny => &[512],
        Effort::Quick => &[4096],
        Effort::Normal => &[1024, 2048, 4096],
    }
}

fn measure_sizes(
    world: &World,
    effort: Effort,
    recorder: &mut FigureRecorder,
) -> Result<(), TrainError> {
    for &width in widths(effort) {
        let plan = plan(width)?;
        let bytes = (plan.buckets[BUCKET.index()].length * DType::F32.bytes()) as u64;
        let mut group = match start(world, &plan) {
            Err(error @ (RuntimeError::Memory { .. } | RuntimeError::NoRoom { .. })) => {
                recorder.skip(&name(Kind::AllReduce.name(), bytes, world), error.to_string());
                continue;
            }
            started => started?,
        };
        recorder.progress(&format!("all_reduce of {} of gradients", size(bytes)));
        let program = Arc::new(gradient_all_reduce(&plan));
        check(&mut group, &program)?;
        let timed = rounds(&mut group, &program, &effort.sampling_plan())?;
        add(world, bytes, &timed, recorder);
    }
    Ok(())
}

fn name(what: &str, bytes: u64, world: &World) -> String {
    format!("{what}.{}_{}_devices", size(bytes).replace(' ', "_"), world.selections.len())
}

fn plan(width: usize) -> Result<Plan, TrainError> {
    let mut b = Builder::new();
    let x = b.input("x", &[1, width]);
    let target = b.input("target", &[1, width]);
    let w = b.parameter("w", &[width, width], Init::Zeros);
    let y = b.linear(x, w, None)?;
    b.squared_error_loss(y, target)?;
    Ok(Plan::new(differentiate(b.finish())?, PlanOptions::new(1)))
}

/// Opens the devices, times the reduce sites of each, and starts a worker group as a run does.
fn start(world: &World, plan: &Plan) -> Result<WorkerGroup, RuntimeError> {
    let of_host = world.selections.iter().filter(|selection| memory::uses_host_memory(selection));
    memory::require(of_host.count().saturating_mul(memory::device_bytes(plan, &0.into())))?;
    let chunk_bytes = ParallelOptions::default().chunk_bytes;
    let layout = layout(plan, Topology::Ring, world.selections.len(), chunk_bytes);
    let mut drivers = Vec::new();
    let mut reduce_site = Vec::new();
    for selection in &world.selections {
        let opened = open(selection, plan)?;
        reduce_site.push(if opened.is_cpu {
            ReduceSite::Host
        } else {
            let chunks = layout.chunks.clone();
            opened.driver.run("timing the addition of gradients", move |device| {
                timing::faster_reduce_site(device, &chunks)
            })?
        });
        drivers.push(opened.driver);
    }
    let groups = BucketGroups::all(layout.size, layout.buckets());
    WorkerGroup::start(
        drivers,
        layout,
        groups,
        &WorkerGroupOptions { reduce_site, all_reduces: true, ..Default::default() },
    )
}

/// Opens a device without autotuning: no kernel of the plan runs, so none is timed.
fn open(selection: &Selection, plan: &Plan) -> Result<OpenDevice, RuntimeError> {
    let tuning = TuneOptions { seconds: 0.0, ..TuneOptions::default() };
    let device = DeviceToOpen {
        selection: selection.clone(),
        name: &display_name(selection),
        plan: plan.clone(),
        moments: Moments::from(0),
        options: &OpenOptions::default(),
    };
    open_selected(device, |_| tuning, &mut |_, _| {})
}

/// Performs an all-reduce of the gradients on the devices.
fn sum(group: &mut WorkerGroup, program: &Arc<Program>) -> Result<(), TrainError> {
    let round = group.round().next(1);
    let mut inputs = Vec::with_capacity(group.world());
    for rank in 0..group.world() {
        let input = StepInput::new(round, Rank(rank as u32), program.clone(), Vec::new());
        inputs.push(Arc::new(StepInput { samples: 1, ..input }));
    }
    group.step(&inputs)?;
    Ok(())
}

/// Sums known values and compares every bit on every device. Afterwards all gradients are zero, and
/// repeated sums keep them zero.
fn check(group: &mut WorkerGroup, program: &Arc<Program>) -> Result<(), TrainError> {
    let world = group.world();
    group.run_on_all("writing gradients", |rank, device| {
        let mut values = vec![0.0; device.plan().buckets[BUCKET.index()].length];
        fill(&mut values, 0, |at| value(rank.index(), at));
        device.write_bucket(BucketTensor::Gradients, BUCKET, &values)
    })?;
    sum(group, program)?;
    let right = group.run_on_all("reading gradients", move |_, device| {
        let values = device.read_bucket(BucketTensor::Gradients, BUCKET)?;
        let total = |at: usize| (0..world).map(|rank| value(rank, at)).sum::<f32>();
        device.begin_step()?;
        Ok(is_filled(&values, 0, total))
    })?;
    let Some(wrong) = right.iter().position(|right| !right) else { return Ok(()) };
    let rank = Rank(wrong as u32);
    let name = group.name(rank);
    Err(TrainError::Defect(format!("{rank} ({name}) has wrong sums of gradients")))
}

/// Samples of the rounds: seconds of an all-reduce and of the transfers.
#[derive(Default)]
struct TimedRounds {
    sums: Vec<f64>,
    transfers: Vec<f64>,
}

fn rounds(
    group: &mut WorkerGroup,
    program: &Arc<Program>,
    sampling_plan: &SamplingPlan,
) -> Result<TimedRounds, TrainError> {
    // Host memory for the gradients of each device, the same in every round.
    let host: Arc<[Lock<Vec<f32>>]> = (0..group.world()).map(|_| Lock::default()).collect();
    let transfers = move |rank: Rank, device: &mut dyn Executor| {
        transfer(device, &mut host[rank.index()].lock())
    };
    // Warm-up: performs all one-time initialization.
    sum(group, program)?;
    group.run_on_all("transfers", transfers.clone())?;
    let mut timed = TimedRounds::default();
    let begun = Instant::now();
    while !sampling_plan.is_enough(timed.sums.len(), begun) {
        let started = Instant::now();
        sum(group, program)?;
        group.run_on_all("waiting", |_, device| settle(device))?;
        timed.sums.push(started.elapsed().as_secs_f64());
        let started = Instant::now();
        group.run_on_all("transfers", transfers.clone())?;
        timed.transfers.push(started.elapsed().as_secs_f64());
    }
    Ok(timed)
}

/// Waits until the device has completed all submitted work.
fn settle(device: &mut dyn Executor) -> Result<(), DeviceError> {
    device.finish_step(&[])?;
    Ok(())
}

/// Reads all gradients back to host memory, uploads them again, and waits for completion.
fn transfer(device: &mut dyn Executor, values: &mut Vec<f32>) -> Result<(), DeviceError> {
    let length = device.plan().buckets[BUCKET.index()].length;
    let most = device.readback_elements_max();
    values.resize(length, 0.0);
    for range in pieces(length, most) {
        device.start_readback(Region::bucket(BucketTensor::Gradients, BUCKET, range))?;
    }
    for range in pieces(length, most) {
        if let Some(piece) = device.next_readback(true)? {
            values[range].copy_from_slice(piece.values());
        }
    }
    for range in pieces(length, most) {
        let place = Region::bucket(BucketTensor::Gradients, BUCKET, range.clone());
        device.write_place(&place, &values[range])?;
    }
    settle(device)
}

/// Ranges of at most `most` elements that cover `length` elements.
fn pieces(length: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    (0..length).step_by(most).map(move |start| start..(start + most).min(length))
}

fn add(world: &World, bytes: u64, timed: &TimedRounds, recorder: &mut FigureRecorder) {
    let mut shares = Vec::with_capacity(timed.sums.len());
    for (transfers, sum) in timed.transfers.iter().zip(&timed.sums) {
        shares.push(transfers / sum);
    }
    let by = Kind::AllReduce.name();
    let factor = Kind::AllReduce.bus_factor(world.selections.len());
    recorder.add(figure(world, bytes, by, factor, &timed.sums, Some(median(&shares))));
    recorder.add(figure(world, bytes, "transfers", 1.0, &timed.transfers, None));
}

/// Returns the figure of an operation whose bus bandwidth is `factor` times the algorithm
/// bandwidth.
fn figure(
    world: &World,
    bytes: u64,
    by: &str,
    factor: f64,
    seconds: &[f64],
    of_transfers: Option<f64>,
) -> Figure {
    let rates: Vec<f64> = seconds.iter().map(|s| bytes as f64 * factor / s / GIB).collect();
    let kind = FigureKind::Collective(CollectiveFigure {
        by: by.into(),
        ranks: world.selections.len(),
        bytes,
        seconds: median(seconds),
        algorithm: median(&rates) / factor,
        of_copy: None,
        of_transfers,
    });
    Figure::new(kind, &name(by, bytes, world), GIBS, Direction::Higher, &rates)
}
