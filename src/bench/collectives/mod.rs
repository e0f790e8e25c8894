//! Benchmark of communication between ranks: the collectives of [`potluck_parallel::comm`] on
//! slices in memory, of threads of one process or of the nodes of a cluster, and an all-reduce of
//! gradients between devices.
//!
//! Rates follow the rule of nccl-tests. The *algorithm bandwidth* is the bytes of the longest
//! buffer of a rank per second of a call; the *bus bandwidth* is the rate on the slowest
//! connection, the figure by which different numbers of ranks compare ([`Kind::bus_factor`]). Both
//! are in GiB/s, and compared with a copy in memory of the same bytes by one thread, which
//! alternates with the calls.

pub mod devices;
pub mod host;
pub mod nodes;

use crate::report::{CollectiveFigure, DeviceReport, Figure, FigureKind, FigureRecorder, Report};
use crate::sample::Effort;
use crate::units::{number, size};
use host::{GridPoint, PointError, TimedCalls};
use potluck_core::arithmetic::median;
use potluck_kernels::device::host::available_memory;
use potluck_parallel::comm::ProcessGroup;
use potluck_train::TrainError;

/// Unit of the bandwidths.
pub const GIBS: &str = "GiB/s";
pub(super) const GIB: f64 = (1u64 << 30) as f64;
const MIB: u64 = 1 << 20;

/// Collective that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
}

impl Kind {
    pub const ALL: [Self; 4] =
        [Self::AllReduce, Self::ReduceScatter, Self::AllGather, Self::Broadcast];

    /// Returns the name in figures: the name of the method of [`ProcessGroup`].
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
        }
    }

    /// Returns bus bandwidth per algorithm bandwidth: the share of the bytes that must pass each
    /// rank's connection in one direction (nccl-tests, `doc/PERFORMANCE.md`).
    pub(crate) fn bus_factor(self, ranks: usize) -> f64 {
        let others = (ranks - 1) as f64 / ranks as f64;
        match self {
            Self::AllReduce => 2.0 * others,
            Self::ReduceScatter | Self::AllGather => others,
            Self::Broadcast => 1.0,
        }
    }
}

/// Options of a benchmark of collectives.
#[derive(Clone, Debug)]
pub struct CollectiveOptions {
    /// Device selectors as for `potluck train --devices`; `none` for slices in memory only. A
    /// single device is used twice.
    pub devices: String,
    pub effort: Effort,
    /// Numbers of ranks, at least 2 each; if empty, the effort determines them.
    pub ranks: Vec<usize>,
    /// True to measure every power of two in bytes and 2 to 8 ranks.
    pub full: bool,
}

/// Measures slices, then devices, and reports each next measurement to `progress`.
///
/// # Errors
/// Returns `TrainError` if a selector chooses no device; then nothing is measured. Any other
/// failure is recorded in [`DeviceReport::error`].
pub fn run(
    options: &CollectiveOptions,
    progress: &mut dyn FnMut(&str),
) -> Result<Report, TrainError> {
    let world = devices::choose(&options.devices)?;
    let mut reports = vec![slices(options, progress)];
    if let Some(world) = world {
        reports.push(devices::measure(world, options.effort, progress));
    }
    Ok(Report::new(options.effort, reports))
}

/// Name of the report on slices.
pub const SLICES: &str = "slices in memory";

fn slices(options: &CollectiveOptions, progress: &mut dyn FnMut(&str)) -> DeviceReport {
    let mut note = |what: &str| progress(&format!("{SLICES}: {what}"));
    let mut recorder = FigureRecorder::new(&mut note);
    let error = measure(options, &mut recorder).err();
    let (figures, skipped) = recorder.finish();
    DeviceReport {
        name: SLICES.into(),
        api: "cpu".into(),
        driver: String::new(),
        kind: "the threads of a process".into(),
        figures,
        skipped,
        error,
    }
}

/// Measurements in order: by collective, ranks, size.
fn points(options: &CollectiveOptions) -> Vec<GridPoint> {
    let ranks = match (&options.ranks[..], options.full, options.effort) {
        ([], true, _) => (2..=8).collect(),
        ([], _, Effort::Normal) => vec![2, 3, 4, 8],
        ([], _, Effort::Quick) => vec![2, 4],
        ([], _, Effort::Tiny) => vec![2, 3],
        (given, ..) => given.to_vec(),
    };
    let mut points = Vec::new();
    for kind in Kind::ALL {
        let sizes = sizes(kind, options);
        for &ranks in &ranks {
            for &bytes in &sizes {
                points.push(GridPoint { kind, ranks, bytes });
            }
        }
    }
    points
}

/// Sizes in bytes, in ascending order.
fn sizes(kind: Kind, options: &CollectiveOptions) -> Vec<u64> {
    match (kind, options.full, options.effort) {
        (Kind::AllReduce, true, _) => sizes_by(2),
        (Kind::AllReduce, _, Effort::Normal) | (_, true, _) => sizes_by(4),
        (Kind::AllReduce, _, Effort::Quick) => {
            vec![4 << 10, 64 << 10, MIB, 16 * MIB, 64 * MIB]
        }
        (Kind::AllReduce, _, Effort::Tiny) => vec![4 << 10, MIB],
        (_, _, Effort::Normal) => vec![64 << 10, 4 * MIB, 64 * MIB],
        (_, _, Effort::Quick) => vec![16 * MIB],
        (_, _, Effort::Tiny) => vec![MIB],
    }
}

/// Sizes from 4 KiB to 256 MiB, each a multiple of the one before by `factor`.
fn sizes_by(factor: u64) -> Vec<u64> {
    let mut sizes = Vec::new();
    let mut bytes = 4 << 10;
    while bytes <= 256 * MIB {
        sizes.push(bytes);
        bytes *= factor;
    }
    sizes
}

fn measure(options: &CollectiveOptions, recorder: &mut FigureRecorder) -> Result<(), String> {
    let sampling_plan = options.effort.sampling_plan();
    measure_points(&points(options), recorder, |point| {
        let needs = point.needs(point.ranks);
        if let Some(available) = available_memory()
            && available < needs
        {
            let [needs, available] = [needs, available].map(|bytes| number((bytes / MIB) as f64));
            let why = format!("needs {needs} MiB of memory and {available} MiB are free");
            return Ok(PointOutcome::Skipped(why));
        }
        Ok(PointOutcome::Timed(host::measure(point, &sampling_plan)?))
    })
}

/// Outcome of a measurement: its samples, or the reason why it has none.
pub(crate) enum PointOutcome {
    Timed(TimedCalls),
    Skipped(String),
}

/// Records the figures of measurements, and then the figures of the copies that alternated with
/// them.
fn measure_points(
    points: &[GridPoint],
    recorder: &mut FigureRecorder,
    mut measure: impl FnMut(&GridPoint) -> Result<PointOutcome, PointError>,
) -> Result<(), String> {
    let mut copies: Vec<(u64, Vec<f64>)> = Vec::new();
    for point in points {
        recorder.progress(&point.to_string());
        let timed = match measure(point).map_err(|error| format!("{point}: {error}"))? {
            PointOutcome::Timed(timed) => timed,
            PointOutcome::Skipped(why) => {
                recorder.skip(&name(point), why);
                continue;
            }
        };
        recorder.add(figure(point, &timed));
        match copies.iter_mut().find(|(bytes, _)| *bytes == point.bytes) {
            Some((_, seconds)) => seconds.extend(timed.copies),
            None => copies.push((point.bytes, timed.copies)),
        }
    }
    copies.sort_by_key(|(bytes, _)| *bytes);
    for (bytes, seconds) in &copies {
        recorder.add(copy_figure(*bytes, seconds));
    }
    Ok(())
}

/// API of devices that are connections between nodes.
pub const QUIC: &str = "quic";

/// Measures the ranks of all nodes, led by this node, which is the first: `groups` are the handles
/// of its ranks, and the other nodes call [`nodes::follow`]. All ranks take part in each
/// measurement.
pub fn over_nodes(
    groups: Vec<ProcessGroup>,
    hosts: &[String],
    options: &CollectiveOptions,
    progress: &mut dyn FnMut(&str),
) -> Report {
    let ranks = match groups.first() {
        Some(group) => group.world_size(),
        None => 0,
    };
    let options = CollectiveOptions { ranks: vec![ranks], ..options.clone() };
    let mut recorder = FigureRecorder::new(progress);
    let mut failed = None;
    let measured = nodes::lead(groups, |leader| {
        failed = measure_points(&points(&options), &mut recorder, |point| {
            leader.measure(point, options.effort)
        })
        .err();
        Ok(())
    });
    // The first failure counts: later ones only say that the group has ended.
    let error = failed.or(measured.err().map(|error| error.to_string()));
    let (figures, skipped) = recorder.finish();
    let nodes = DeviceReport {
        name: hosts.join(" + "),
        api: QUIC.into(),
        driver: String::new(),
        kind: format!("{ranks} ranks of {} nodes", hosts.len()),
        figures,
        skipped,
        error,
    };
    Report::new(options.effort, vec![nodes])
}

/// Name of a figure, which begins with the name of its collective.
fn name(point: &GridPoint) -> String {
    let GridPoint { kind, ranks, bytes } = point;
    format!("{}.{}_{ranks}_ranks", kind.name(), size(*bytes).replace(' ', "_"))
}

fn figure(point: &GridPoint, timed: &TimedCalls) -> Figure {
    let bytes = point.bytes as f64;
    let factor = point.kind.bus_factor(point.ranks);
    let rates: Vec<f64> = timed.calls.iter().map(|call| bytes * factor / call / GIB).collect();
    let seconds = median(&timed.calls);
    // Both values of one round, so that other load on the machine slows both down.
    let mut shares = Vec::with_capacity(timed.calls.len());
    for (call, copy) in timed.calls.iter().zip(&timed.copies) {
        shares.push(factor * copy / call);
    }
    let call = CollectiveFigure {
        by: point.kind.name().into(),
        ranks: point.ranks,
        bytes: point.bytes,
        seconds,
        algorithm: median(&rates) / factor,
        of_copy: Some(median(&shares)),
        of_transfers: None,
    };
    let kind = FigureKind::Collective(call);
    Figure::new(kind, &name(point), GIBS, super::Direction::Higher, &rates)
}

/// Name of the copy in figures of copies, instead of the name of a collective.
pub const COPY: &str = "copy";

fn copy_figure(bytes: u64, seconds: &[f64]) -> Figure {
    let rates: Vec<f64> = seconds.iter().map(|seconds| bytes as f64 / seconds / GIB).collect();
    let name = format!("{COPY}.{}", size(bytes).replace(' ', "_"));
    let call = CollectiveFigure {
        by: COPY.into(),
        ranks: 1,
        bytes,
        seconds: median(seconds),
        algorithm: median(&rates),
        of_copy: None,
        of_transfers: None,
    };
    Figure::new(FigureKind::Collective(call), &name, GIBS, super::Direction::Higher, &rates)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_bandwidth_is_by_the_rule_of_nccl_tests() {
        let factors = |ranks: usize| Kind::ALL.map(|kind| kind.bus_factor(ranks));
        assert_eq!(factors(2), [1.0, 0.5, 0.5, 1.0]);
        assert_eq!(factors(4), [1.5, 0.75, 0.75, 1.0]);
        assert_eq!(factors(8), [1.75, 0.875, 0.875, 1.0]);
        let point = GridPoint { kind: Kind::AllReduce, ranks: 4, bytes: 2 << 30 };
        let timed = TimedCalls { calls: vec![2.0, 1.0, 4.0], copies: vec![1.0, 0.25, 0.5] };
        let figure = figure(&point, &timed);
        assert_eq!((figure.median, figure.min, figure.max), (1.5, 0.75, 3.0));
        assert_eq!(
            (figure.name.as_str(), figure.unit.as_str()),
            ("all_reduce.2_GiB_4_ranks", GIBS)
        );
        let FigureKind::Collective(call) = figure.kind else { panic!("{figure:?}") };
        assert_eq!((call.seconds, call.algorithm, call.ranks), (2.0, 1.0, 4));
        // Per round 1.5 times 1/2, 1/4, 1/8.
        assert_eq!(call.of_copy, Some(0.375));
    }

    #[test]
    fn sizes_go_from_4_kib_to_256_mib() {
        let options = |effort, full| {
            let (devices, ranks) = ("none".into(), Vec::new());
            CollectiveOptions { devices, effort, ranks, full }
        };
        let normal = sizes(Kind::AllReduce, &options(Effort::Normal, false));
        let names: Vec<String> = normal.iter().map(|bytes| size(*bytes)).collect();
        assert_eq!(names[..3], ["4 KiB", "16 KiB", "64 KiB"]);
        assert_eq!(names[names.len() - 2..], ["64 MiB", "256 MiB"]);
        assert_eq!(sizes(Kind::AllReduce, &options(Effort::Quick, true)).len(), 17);
        let ranks = |options: &CollectiveOptions| {
            let mut ranks: Vec<usize> = points(options).iter().map(|point| point.ranks).collect();
            ranks.sort_unstable();
            ranks.dedup();
            ranks
        };
        assert_eq!(ranks(&options(Effort::Normal, false)), [2, 3, 4, 8]);
        assert_eq!(ranks(&options(Effort::Normal, true)), [2, 3, 4, 5, 6, 7, 8]);
        let given = CollectiveOptions { ranks: vec![5], ..options(Effort::Tiny, true) };
        assert_eq!(ranks(&given), [5]);
        assert_eq!([0, 5, 1536, 3 << 30].map(size), ["0 bytes", "5 bytes", "1536 bytes", "3 GiB"]);
    }
}
