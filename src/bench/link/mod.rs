//! Benchmark of the link between two nodes: round trips of small frames, bandwidth in one direction
//! and in both, and a ring all-reduce of gradients.
//!
//! Latency and bandwidth are measured with frames as training runs send them, the all-reduce with a
//! process group. One node measures ([`run`]), the other answers ([`answer`]).

mod frames;
#[cfg(test)]
mod testing;

use std::time::{Duration, Instant};

use crate::collectives::host::{GridPoint, PointError};
use crate::collectives::nodes::{self, Leader};
use crate::collectives::{Kind, PointOutcome, QUIC};
use crate::report::{
    DeviceReport, Direction, Figure, FigureKind, FigureRecorder, LinkFigure, Report,
};
use crate::sample::{Effort, SamplingPlan, samples};
use crate::units::{number, size};
use frames::{LinkEnd, PING_BYTES, TRANSFER_BYTES_MAX};
use potluck_core::format::{counted, thousands};
use potluck_core::{DType, Rank};
use potluck_net::LinkStats;
use potluck_net::nodes::{ClusterEvent, ClusterHandle, StartedCluster, group_over};
use potluck_train::TrainError;

/// Unit of the bandwidths: 1e6 bytes per second, in each direction.
pub(crate) const MBS: &str = "MB/s";
const MIB: u64 = 1 << 20;
/// Pings whose median determines the number of pings in a batch, and the limits of that number.
const FIRST_PINGS: usize = 20;
const PINGS_MIN: usize = 20;
const PINGS_MAX: usize = 1000;
/// Longest measured transfer in seconds, predicted by the rate of the previous one.
const TRANSFER_SECONDS_MAX: f64 = 10.0;
/// Bytes of the shortest and of the longest bucket that is reduced, and its longest time in
/// seconds, predicted by the rate in both directions.
const BUCKET_BYTES: [u64; 2] = [256 << 10, 64 * MIB];
const BUCKET_SECONDS_MAX: f64 = 2.0;
/// Longest wait for the cluster's description of a loss.
const NEWS_TIMEOUT: Duration = Duration::from_secs(2);
/// Rank of the measuring node, which joins the answering one.
const MEASURING: Rank = Rank(1);

/// Options of a benchmark of a link.
#[derive(Clone, Debug)]
pub struct LinkOptions {
    pub effort: Effort,
    /// Numbers of parameters of models whose gradients are reduced; if empty, the effort determines
    /// them.
    pub parameters: Vec<u64>,
}

/// Cluster of two nodes, one rank each, that has started.
pub struct LinkedNodes {
    pub cluster: ClusterHandle,
    pub started: StartedCluster,
    /// Longest silence of the other node.
    pub timeout: Duration,
}

impl LinkedNodes {
    fn open(&self) -> Result<LinkEnd, String> {
        let (_, link) = self.started.links.first().ok_or("the other node has left")?;
        Ok(LinkEnd::open(link.clone()))
    }

    /// Returns the cluster's description of the loss if there is one, or else the reason given by
    /// the link.
    fn why(&self, reason: String) -> String {
        let until = Instant::now() + NEWS_TIMEOUT;
        loop {
            match self.cluster.news.recv(Some(until)) {
                Ok(ClusterEvent::Ended(end)) => return end.to_string(),
                Ok(_) => {}
                Err(_) => return reason,
            }
        }
    }

    fn host(&self, number: usize) -> &str {
        match self.started.roster.nodes.get(number) {
            Some(node) => &node.host,
            None => "",
        }
    }
}

/// Measures the link to the answering node. A failure is recorded in [`DeviceReport::error`], after
/// the figures measured before.
pub fn run(nodes: LinkedNodes, options: &LinkOptions, progress: &mut dyn FnMut(&str)) -> Report {
    let name = format!("{} to {}", nodes.host(1), nodes.host(0));
    let mut recorder = FigureRecorder::new(progress);
    let error = measure(nodes, options, &mut recorder).err();
    let (figures, skipped) = recorder.finish();
    let report = DeviceReport {
        name,
        api: QUIC.into(),
        driver: String::new(),
        kind: "the link of two nodes".into(),
        figures,
        skipped,
        error,
    };
    Report::new(options.effort, vec![report])
}

/// Answers the measurements of the other node until it has finished.
///
/// # Errors
/// Returns `TrainError` if the other node is lost or sends an invalid request.
pub fn answer(nodes: LinkedNodes, progress: &mut dyn FnMut(&str)) -> Result<(), TrainError> {
    if let Err(reason) = nodes.open().and_then(LinkEnd::answer) {
        return Err(TrainError::NodesLost { why: nodes.why(reason) });
    }
    let LinkedNodes { cluster, started, timeout } = nodes;
    let groups = group_over(cluster, started, timeout)
        .map_err(|why| TrainError::NodesLost { why: why.to_string() })?;
    Ok(nodes::follow(groups, MEASURING, progress)?)
}

fn measure(
    nodes: LinkedNodes,
    options: &LinkOptions,
    recorder: &mut FigureRecorder,
) -> Result<(), String> {
    let rate = nodes
        .open()
        .and_then(|end| measure_frames(end, options.effort, recorder))
        .map_err(|reason| nodes.why(reason))?;
    let LinkedNodes { cluster, started, timeout } = nodes;
    let groups = group_over(cluster, started, timeout).map_err(|why| why.to_string())?;
    nodes::lead(groups, |leader| measure_steps(leader, options, rate, recorder))
        .map_err(|why| why.to_string())
}

// ---- Frames ----

/// Measures latency and bandwidth; returns the rate in both directions at once, in bytes per second
/// and direction.
fn measure_frames(
    mut end: LinkEnd,
    effort: Effort,
    recorder: &mut FigureRecorder,
) -> Result<f64, String> {
    let sampling_plan = effort.sampling_plan();
    end.meet()?;
    recorder.progress("round trips of small frames");
    for figure in round_trips(&mut end, &sampling_plan)? {
        recorder.add(figure);
    }
    let mut rate = 0.0;
    for (direction, what, ways) in [
        (LinkFigure::Send, "send", [true, false]),
        (LinkFigure::Receive, "receive", [false, true]),
        (LinkFigure::Both, "both", [true, true]),
    ] {
        rate = 0.0;
        for &bytes in transfer_sizes(effort) {
            let name = format!("link.{what}_{}", size(bytes).replace(' ', "_"));
            let seconds = bytes as f64 / rate;
            if rate > 0.0 && seconds > TRANSFER_SECONDS_MAX {
                recorder.skip(&name, format!("would take {} s", number(seconds)));
                continue;
            }
            recorder.progress(&format!("{what} {}", size(bytes)));
            let before = end.stats();
            let timed = samples(&sampling_plan, |repeats| {
                let started = Instant::now();
                for _ in 0..repeats {
                    end.transfer(ways, bytes as usize)?;
                }
                Ok::<f64, String>(started.elapsed().as_secs_f64())
            })?;
            let rates: Vec<f64> = timed.iter().map(|one| bytes as f64 / one / 1e6).collect();
            let figure =
                Figure::new(FigureKind::Link(direction), &name, MBS, Direction::Higher, &rates);
            rate = figure.median * 1e6;
            let losses = losses(&before, &end.stats());
            recorder.add(match direction {
                LinkFigure::Both => figure.on(format!("in each direction; {losses}")),
                LinkFigure::Send => figure.on(losses),
                // The other side counts the losses of received frames.
                _ => figure,
            });
        }
    }
    end.finish()?;
    Ok(rate)
}

/// Returns a text on the packets that this side has sent and lost between two counts.
fn losses(before: &LinkStats, after: &LinkStats) -> String {
    let lost = after.packets_lost - before.packets_lost;
    let sent = after.packets_sent - before.packets_sent;
    let events = after.congestion_events - before.congestion_events;
    format!(
        "{} of {} packets lost, {}, window {} KiB",
        thousands(lost as f64),
        thousands(sent as f64),
        counted(events as usize, "congestion event", "congestion events"),
        thousands(after.congestion_window as f64 / 1024.0)
    )
}

/// Sizes in bytes, in ascending order.
fn transfer_sizes(effort: Effort) -> &'static [u64] {
    const LONGEST: u64 = TRANSFER_BYTES_MAX as u64;
    match effort {
        Effort::Tiny => &[4 << 10, MIB],
        Effort::Quick => &[64 << 10, MIB, LONGEST],
        Effort::Normal => &[4 << 10, 64 << 10, MIB, 16 * MIB, LONGEST],
    }
}

/// Figures of the median and of the 99th percentile of batches of round trips.
fn round_trips(end: &mut LinkEnd, plan: &SamplingPlan) -> Result<[Figure; 2], String> {
    let [median, _] = ping_batch(end, FIRST_PINGS)?;
    let count = plan.figure_seconds_max / plan.samples as f64 / median.max(1e-9);
    let count = (count as usize).clamp(PINGS_MIN, PINGS_MAX);
    let mut medians = Vec::new();
    let mut slow = Vec::new();
    let begun = Instant::now();
    while !plan.is_enough(medians.len(), begun) {
        let [median, percentile] = ping_batch(end, count)?;
        medians.push(median);
        slow.push(percentile);
    }
    let on = format!("frames of {PING_BYTES} bytes, {count} in a sample");
    let kind = FigureKind::Link(LinkFigure::RoundTrip);
    let median = Figure::duration(kind.clone(), "link.round_trip", "us", 1e6, &medians);
    let slow = Figure::duration(kind, "link.round_trip_p99", "us", 1e6, &slow);
    Ok([median.on(on.clone()), slow.on(on)])
}

/// The median and the 99th percentile of the seconds of `count` round trips.
fn ping_batch(end: &mut LinkEnd, count: usize) -> Result<[f64; 2], String> {
    let mut seconds = Vec::with_capacity(count);
    for _ in 0..count {
        seconds.push(end.ping()?);
    }
    seconds.sort_by(f64::total_cmp);
    Ok([percentile(&seconds, 0.5), percentile(&seconds, 0.99)])
}

/// Percentile of sorted values by nearest rank; `share` is the fraction at or below it.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

// ---- Steps ----

/// Measures an all-reduce of the gradients of each model, in buckets one after the other: a full
/// bucket is measured once, and its time is multiplied by the number of full buckets.
fn measure_steps(
    leader: &mut Leader,
    options: &LinkOptions,
    rate: f64,
    recorder: &mut FigureRecorder,
) -> Result<(), PointError> {
    let bucket = bucket_elements(rate);
    let mut full = None;
    for parameters in models(options) {
        let name = format!("link.step_{}_parameters", count_text(parameters));
        recorder.progress(&format!("all_reduce of {} gradients", count_text(parameters)));
        let sent = number((parameters * DType::F32.bytes() as u64) as f64 / 1e6);
        match step_seconds(leader, options.effort, [parameters, bucket], &mut full)? {
            Ok(seconds) => {
                let figure = Figure::duration(
                    FigureKind::Link(LinkFigure::Step),
                    &name,
                    "ms",
                    1e3,
                    &seconds,
                );
                recorder.add(figure.on(format!("{sent} MB in each direction")));
            }
            Err(why) => recorder.skip(&name, why),
        }
    }
    Ok(())
}

/// Returns the seconds of the buckets of a model, or the reason for skipping them; `full` keeps the
/// seconds of a full bucket.
fn step_seconds(
    leader: &mut Leader,
    effort: Effort,
    [parameters, bucket]: [u64; 2],
    full: &mut Option<Vec<f64>>,
) -> Result<Result<Vec<f64>, String>, PointError> {
    let count = parameters / bucket;
    let rest = parameters % bucket;
    let mut parts: Vec<Vec<f64>> = Vec::new();
    if count > 0 {
        if full.is_none() {
            match reduce(leader, bucket, effort)? {
                Ok(seconds) => *full = Some(seconds),
                Err(why) => return Ok(Err(why)),
            }
        }
        parts.push(full.iter().flatten().map(|seconds| seconds * count as f64).collect());
    }
    if rest > 0 {
        match reduce(leader, rest, effort)? {
            Ok(seconds) => parts.push(seconds),
            Err(why) => return Ok(Err(why)),
        }
    }
    let samples = parts.iter().map(Vec::len).min().unwrap_or(0);
    let mut seconds = Vec::with_capacity(samples);
    for at in 0..samples {
        seconds.push(parts.iter().map(|part| part[at]).sum());
    }
    Ok(Ok(seconds))
}

/// Seconds of an all-reduce of `elements` gradients, or the reason for skipping it.
fn reduce(
    leader: &mut Leader,
    elements: u64,
    effort: Effort,
) -> Result<Result<Vec<f64>, String>, PointError> {
    let bytes = elements * DType::F32.bytes() as u64;
    let point = GridPoint { kind: Kind::AllReduce, ranks: 2, bytes };
    Ok(match leader.measure(&point, effort)? {
        PointOutcome::Timed(timed) => Ok(timed.calls),
        PointOutcome::Skipped(why) => Err(why),
    })
}

fn models(options: &LinkOptions) -> Vec<u64> {
    match (&options.parameters[..], options.effort) {
        ([], Effort::Tiny) => vec![10_000],
        ([], Effort::Quick) => vec![10_000_000],
        ([], Effort::Normal) => vec![1_000_000, 10_000_000, 124_000_000],
        (given, _) => given.to_vec(),
    }
}

/// Elements of a bucket: the largest power of two that takes at most [`BUCKET_SECONDS_MAX`], but at
/// least the smallest bucket of [`BUCKET_BYTES`].
fn bucket_elements(bytes_per_s: f64) -> u64 {
    let [least, most] = BUCKET_BYTES;
    let mut bytes = most;
    while bytes > least {
        if bytes as f64 <= bytes_per_s * BUCKET_SECONDS_MAX {
            break;
        }
        bytes /= 2;
    }
    bytes.max(least) / DType::F32.bytes() as u64
}

/// Formats a number in the largest of K, M and G that leaves it whole: `10M`.
pub(crate) fn count_text(count: u64) -> String {
    for (unit, name) in [(1_000_000_000, "G"), (1_000_000, "M"), (1000, "K")] {
        if count > 0 && count.is_multiple_of(unit) {
            return format!("{}{name}", count / unit);
        }
    }
    count.to_string()
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_link_that_ends_is_told_on_both_sides() {
        let [first, other] = testing::pair();
        let options = LinkOptions { effort: Effort::Normal, parameters: Vec::new() };
        let link = first.started.links[0].1.clone();
        let (report, answered) = thread::scope(|scope| {
            let answered = scope.spawn(|| answer(first, &mut |_| {}));
            let mut seen = 0;
            let report = run(other, &options, &mut |_| {
                // The round trips are measured, and a transfer begins.
                seen += 1;
                if seen == 2 {
                    link.close("enough");
                }
            });
            (report, answered.join().unwrap())
        });
        let device = &report.devices[0];
        let error = device.error.as_deref().unwrap_or_default();
        assert!(error.contains("enough"), "{error}");
        assert_eq!(device.figures.len(), 2, "{:?}", device.figures);
        let error = answered.unwrap_err();
        assert_eq!(error.exit_code(), 75, "{error}");
    }

    #[test]
    fn percentiles_are_values_of_the_samples() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!([0.5, 0.99, 1.0].map(|share| percentile(&values, share)), [100.0, 198.0, 200.0]);
        assert_eq!([0.0, 0.5, 0.99].map(|share| percentile(&[3.0], share)), [3.0; 3]);
    }

    #[test]
    fn buckets_are_shorter_on_slow_links() {
        assert_eq!(bucket_elements(1e9), 16 << 20);
        assert_eq!(bucket_elements(10e6), 4 << 20);
        assert_eq!(bucket_elements(1e3), 64 << 10);
        assert_eq!(bucket_elements(0.0), 64 << 10);
    }

    #[test]
    fn counts_are_written_in_whole_units() {
        let texts = [0, 7, 1500, 2000, 1_500_000, 124_000_000, 3_000_000_000].map(count_text);
        assert_eq!(texts, ["0", "7", "1500", "2K", "1500K", "124M", "3G"]);
    }
}
