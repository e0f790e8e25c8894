//! Gantt chart of a step of a recorded trace.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::Chart;
use super::runs::{RunsOfRow, SegmentRun, TraceSegment, chart_of_runs, chunks_of, times};

/// Name of the tracks of devices in a trace.
const DEVICE_TRACK: &str = "device";

/// Segments that a device ran, in the order of time.
#[derive(Debug, Default)]
struct DeviceRow {
    name: String,
    runs: Vec<SegmentRun>,
}

/// Returns the chart of the last complete step of a trace that `potluck train --trace` wrote, with
/// a row per device. The backward passes for inputs and for weights are shown separately if the
/// schedule delays the passes for weights.
///
/// # Errors
/// Returns a sentence if the text is no trace, or if no step in it is complete: each device has
/// run all its segments, forward and backward, on each of the step's micro-batches.
pub fn chart_of_trace(json: &str) -> Result<Chart, String> {
    let rows = device_rows(&events(json)?);
    let has_backward = rows.iter().any(|row| row.runs.iter().any(is_backward));
    let Some(first) = rows.first().filter(|_| has_backward) else {
        return Err("the trace has no backward pass of a micro-batch on a device".into());
    };
    let firsts = first.steps();
    for step in firsts.iter().rev() {
        let found: Option<Vec<&[SegmentRun]>> =
            rows.iter().map(|row| row.complete_step(step)).collect();
        if let Some(found) = found {
            let mut number = 0;
            for other in &firsts {
                if other[0].from > step[0].from {
                    break;
                }
                // Passes of an evaluation are not counted.
                if other.iter().any(is_backward) {
                    number += 1;
                }
            }
            return Ok(chart(&rows, &found, number));
        }
    }
    Err("the trace has no complete step".into())
}

/// Events of a trace, which may lack its closing bracket.
fn events(json: &str) -> Result<Vec<Value>, String> {
    let error = match serde_json::from_str(json) {
        Ok(events) => return Ok(events),
        Err(error) => error,
    };
    let closed = format!("{}]", json.trim_end().trim_end_matches(','));
    serde_json::from_str(&closed).map_err(|_| format!("the file is no trace: {error}"))
}

/// Devices that ran segments, in the order of their ranks.
fn device_rows(events: &[Value]) -> Vec<DeviceRow> {
    let mut rows: BTreeMap<u64, DeviceRow> = BTreeMap::new();
    for event in events {
        let Some(rank) = event["pid"].as_u64() else { continue };
        if event["ph"] == "M" && event["name"] == "process_name" {
            let name = event["args"]["name"].as_str().unwrap_or_default();
            rows.entry(rank).or_default().name = name.into();
        } else if event["ph"] == "X" && event["cat"] == DEVICE_TRACK {
            rows.entry(rank).or_default().runs.extend(segment_run(event));
        }
    }
    for row in rows.values_mut() {
        // Stable: runs without length keep their order.
        row.runs.sort_by(|a, b| a.from.total_cmp(&b.from));
    }
    rows.into_values().filter(|row| !row.runs.is_empty()).collect()
}

/// Reads an event such as `F 3 of micro-batch 2`; `None` for other events of devices.
fn segment_run(event: &Value) -> Option<SegmentRun> {
    let (segment, micro_batch) = event["name"].as_str()?.split_once(" of micro-batch ")?;
    let (kind, block) = segment.split_once(' ')?;
    let kind: char = kind.parse().ok()?;
    if !"FBW".contains(kind) {
        return None;
    }
    let from = event["ts"].as_f64()? / 1e6;
    let length = event["dur"].as_f64()? / 1e6;
    Some(SegmentRun {
        segment: (kind, block.parse().ok()?),
        micro_batch: micro_batch.parse().ok()?,
        from,
        to: from + length,
    })
}

fn is_backward(run: &SegmentRun) -> bool {
    run.segment.0 != 'F'
}

impl DeviceRow {
    /// Returns the runs from each first segment on micro-batch 0 to the next: steps, and passes of
    /// an evaluation.
    fn steps(&self) -> Vec<&[SegmentRun]> {
        let first = self.segments().into_iter().find(|segment| segment.0 == 'F');
        let mut steps = Vec::new();
        let mut begin = None;
        for (index, run) in self.runs.iter().enumerate() {
            if Some(run.segment) == first && run.micro_batch == 0 {
                if let Some(begin) = begin {
                    steps.push(&self.runs[begin..index]);
                }
                begin = Some(index);
            }
        }
        if let Some(begin) = begin {
            steps.push(&self.runs[begin..]);
        }
        steps
    }

    /// Step that ran at the same time as a step of another device, if it is complete.
    fn complete_step(&self, other: &[SegmentRun]) -> Option<&[SegmentRun]> {
        let steps = self.steps();
        let step =
            steps.into_iter().max_by(|a, b| overlap_s(a, other).total_cmp(&overlap_s(b, other)))?;
        if overlap_s(step, other) <= 0.0 {
            return None;
        }
        let ran: BTreeSet<_> = step.iter().map(|run| (run.micro_batch, run.segment)).collect();
        let micro_batches: BTreeSet<usize> = step.iter().map(|run| run.micro_batch).collect();
        let segments = self.segments();
        for micro_batch in micro_batches {
            if !segments.iter().all(|segment| ran.contains(&(micro_batch, *segment))) {
                return None;
            }
        }
        Some(step)
    }

    fn segments(&self) -> BTreeSet<TraceSegment> {
        self.runs.iter().map(|run| run.segment).collect()
    }

    fn label(&self) -> String {
        let chunks = chunks_of(&self.runs);
        let mut ranges = Vec::with_capacity(chunks.len());
        for (first, last) in &chunks {
            ranges.push(if first == last {
                first.to_string()
            } else {
                format!("{first} to {last}")
            });
        }
        let is_one = matches!(chunks[..], [(first, last)] if first == last);
        format!("{}, {} {}", self.name, if is_one { "block" } else { "blocks" }, ranges.join(", "))
    }
}

/// Seconds in which both steps ran; negative if they did not overlap.
fn overlap_s(step: &[SegmentRun], other: &[SegmentRun]) -> f64 {
    let (from, to) = times(step);
    let (other_from, other_to) = times(other);
    to.min(other_to) - from.max(other_from)
}

/// Chart of the step `number` of a trace, which these devices ran.
fn chart(rows: &[DeviceRow], steps: &[&[SegmentRun]], number: usize) -> Chart {
    let mut shown = Vec::with_capacity(rows.len());
    for (device, step) in rows.iter().zip(steps) {
        shown.push(RunsOfRow { label: device.label(), runs: step.to_vec() });
    }
    chart_of_runs(format!("Step {number} of the trace"), &shown)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use serde_json::json;

    use super::*;
    use crate::gantt::ChartSpan;
    use potluck_core::metrics::Trace;

    /// Trace in the format of `metrics::trace`, with times in milliseconds.
    #[derive(Clone, Default)]
    struct Written(Vec<String>);

    impl Written {
        fn of(ranks: u32) -> Self {
            let name = |rank: u32| {
                let args = json!({ "name": format!("rank {rank}: cpu") });
                json!({ "name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": args })
            };
            Self((0..ranks).map(|rank| name(rank).to_string()).collect())
        }

        fn on(&mut self, track: &str, rank: u32, name: &str, from: f64, to: f64) {
            let (from, length) = (from * 1e3, (to - from) * 1e3);
            let event = json!({
                "name": name, "ph": "X", "ts": from, "dur": length, "pid": rank, "tid": rank,
                "cat": track
            });
            self.0.push(event.to_string());
        }

        /// Adds segments such as `F3 0`, of block 3 on micro-batch 0, of 1 ms each, one directly
        /// after the other.
        fn runs(&mut self, rank: u32, from: f64, segments: &str) {
            for (index, segment) in segments.split(", ").enumerate() {
                let (segment, micro_batch) = segment.split_once(' ').unwrap();
                let (kind, block) = segment.split_at(1);
                let name = format!("{kind} {block} of micro-batch {micro_batch}");
                let from = from + index as f64;
                self.on("device", rank, &name, from, from + 1.0);
            }
        }

        fn json(&self) -> String {
            format!("[\n{}\n]\n", self.0.join(",\n"))
        }

        fn chart(&self) -> Chart {
            chart_of_trace(&self.json()).unwrap()
        }

        /// Adds a step of 1F1B of two stages of two blocks on two micro-batches: 18 ms.
        fn step(&mut self, from: f64) {
            self.runs(0, from, "F0 0, F1 0, F0 1, F1 1");
            self.runs(1, from + 2.0, "F2 0, F3 0, B3 0, W3 0, B2 0, W2 0");
            self.runs(1, from + 8.0, "F2 1, F3 1, B3 1, W3 1, B2 1, W2 1");
            // The first block needs no gradients of inputs.
            self.runs(0, from + 8.0, "B1 0, W1 0, W0 0");
            self.runs(0, from + 14.0, "B1 1, W1 1, W0 1");
        }
    }

    /// Spans of a row as text, with times in milliseconds.
    fn row(chart: &Chart, row: usize) -> String {
        let own = chart.spans.iter().filter(|span| span.row == row);
        let text = |span: &ChartSpan| {
            let (from, to) = ((span.from_s * 1e3).round(), (span.to_s * 1e3).round());
            let micro_batch = span.micro_batch.unwrap();
            format!("{:?} {micro_batch} of chunk {}: {from}-{to}", span.pass, span.chunk)
        };
        own.map(text).collect::<Vec<_>>().join(", ")
    }

    const FIRST: &str = "Forward 0 of chunk 0: 0-2, Forward 1 of chunk 0: 2-4, \
                         Backward 0 of chunk 0: 8-11, Backward 1 of chunk 0: 14-17";
    const SECOND: &str = "Forward 0 of chunk 0: 2-4, Backward 0 of chunk 0: 4-8, \
                          Forward 1 of chunk 0: 8-10, Backward 1 of chunk 0: 10-14";

    #[test]
    fn the_last_complete_step_is_drawn() {
        let mut written = Written::of(2);
        written.step(100.0);
        // A step with another duration, to distinguish it, and one that was cut off.
        written.step(200.0);
        written.runs(1, 214.0, "B2 1, W2 1");
        let complete = written.clone();
        written.step(300.0);
        written.0.pop();
        for (written, number) in [(complete, 2), (written, 2)] {
            let chart = written.chart();
            assert_eq!(chart.title, format!("Step {number} of the trace"));
            assert_eq!(chart.rows, ["rank 0: cpu, blocks 0 to 1", "rank 1: cpu, blocks 2 to 3"]);
            assert_eq!(row(&chart, 0), FIRST);
            assert_eq!(row(&chart, 1), SECOND.replace("10-14", "10-16"));
        }
    }

    #[test]
    fn passes_of_an_evaluation_are_no_steps() {
        let mut written = Written::of(2);
        written.runs(0, 0.0, "F0 0, F1 0, F0 1, F1 1");
        written.runs(1, 2.0, "F2 0, F3 0, F2 1, F3 1");
        let error = chart_of_trace(&written.json()).unwrap_err();
        assert!(error.contains("no backward pass"), "{error}");
        written.step(100.0);
        written.runs(0, 200.0, "F0 0, F1 0");
        written.runs(1, 202.0, "F2 0, F3 0");
        let chart = written.chart();
        assert_eq!((chart.title.as_str(), row(&chart, 0).as_str()), ("Step 1 of the trace", FIRST));
    }

    #[test]
    fn other_tracks_and_names_are_not_drawn() {
        let mut written = Written::of(2);
        written.step(0.0);
        let plain = written.chart();
        written.on("driver", 0, "F 1 of micro-batch 1", 30.0, 40.0);
        for name in ["F 0", "F 0 of micro-batch x", "Q 0 of micro-batch 0", "update 3", "FB 0"] {
            written.on("device", 1, name, 15.0, 40.0);
        }
        written.0.push(r#"{"name":"now","ph":"i","ts":1.0,"pid":0,"tid":0,"cat":"device"}"#.into());
        assert_eq!(written.chart(), plain);
        written.on("device", 0, "F 0 of micro-batch 5", 17.0, 18.0);
        assert!(chart_of_trace(&written.json()).is_err(), "micro-batch 5 is not complete");
    }

    #[test]
    fn delayed_weights_are_drawn_apart() {
        let mut written = Written::of(2);
        written.runs(0, 0.0, "F0 0, F0 1");
        written.runs(1, 1.0, "F1 0, B1 0, F1 1, B1 1, W1 0, W1 1");
        written.runs(0, 3.0, "B0 0, W0 0, B0 1, W0 1");
        let chart = written.chart();
        assert_eq!(
            row(&chart, 1),
            "Forward 0 of chunk 0: 1-2, BackwardInput 0 of chunk 0: 2-3, \
             Forward 1 of chunk 0: 3-4, BackwardInput 1 of chunk 0: 4-5, \
             BackwardWeight 0 of chunk 0: 5-6, BackwardWeight 1 of chunk 0: 6-7"
        );
        // Also where nothing is delayed.
        assert!(row(&chart, 0).contains("BackwardWeight 0 of chunk 0: 4-5"), "{chart:?}");
    }

    #[test]
    fn chunks_are_runs_of_blocks() {
        let mut written = Written::of(1);
        written.runs(0, 0.0, "F0 0, F1 0, F4 0, W4 0, W1 0, W0 0");
        let chart = written.chart();
        assert_eq!(chart.rows, ["rank 0: cpu, blocks 0 to 1, 4"]);
        assert_eq!(
            row(&chart, 0),
            "Forward 0 of chunk 0: 0-2, Forward 0 of chunk 1: 2-3, \
             Backward 0 of chunk 1: 3-4, Backward 0 of chunk 0: 4-6"
        );
    }

    #[test]
    fn gaps_within_a_pass_are_kept_if_they_are_long() {
        let mut written = Written::of(1);
        written.runs(0, 0.0, "F0 0");
        written.runs(0, 1.01, "F1 0");
        written.runs(0, 3.0, "F2 0");
        written.runs(0, 10.0, "W2 0, W1 0, W0 0");
        let chart = written.chart();
        assert!(row(&chart, 0).starts_with(
            "Forward 0 of chunk 0: 0-2, Forward 0 of chunk 0: 3-4, Backward 0 of chunk 0: 10-13"
        ));
    }

    #[test]
    fn pipelines_whose_steps_begin_apart_are_drawn_together() {
        let mut written = Written::of(2);
        for from in [0.0, 10.0] {
            // The second device is the first to begin.
            written.runs(0, from + 1.0, "F0 0, B0 0, W0 0");
            written.runs(1, from, "F0 0, B0 0, W0 0, F0 1, B0 1, W0 1");
        }
        let chart = written.chart();
        assert_eq!(chart.title, "Step 2 of the trace");
        assert_eq!(row(&chart, 0), "Forward 0 of chunk 0: 1-2, Backward 0 of chunk 0: 2-4");
        assert!(row(&chart, 1).starts_with("Forward 0 of chunk 0: 0-1, "), "{chart:?}");
        assert!(row(&chart, 1).ends_with("Backward 1 of chunk 0: 4-6"), "{chart:?}");
    }

    #[test]
    fn a_trace_without_its_bracket_is_read() {
        let mut written = Written::of(2);
        written.step(0.0);
        let json = written.json();
        let cut = json.trim_end().trim_end_matches(']');
        assert_eq!(chart_of_trace(cut), Ok(written.chart()));
        assert_eq!(chart_of_trace(&format!("{},\n", cut.trim_end())), Ok(written.chart()));
        for text in ["", "{}", "potluck", "[1, 2", "[{\"pid\": 1, \"ph\": \"X\"}]"] {
            let error = chart_of_trace(text).unwrap_err();
            assert!(error.starts_with("the file is no trace") || error.contains("no backward"));
        }
    }

    #[test]
    fn what_a_run_writes_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace.json");
        let trace = Trace::create(&path).unwrap();
        let track = trace.track(0, "cpu", "device");
        let begin = Instant::now();
        for (index, kind) in ["F", "B", "W"].into_iter().enumerate() {
            let at = |index| begin + Duration::from_millis(2 * index as u64);
            track.record(|| format!("{kind} 0 of micro-batch 0"), at(index), at(index + 1));
        }
        trace.finish().unwrap();
        let chart = chart_of_trace(&std::fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(chart.rows, ["rank 0: cpu, block 0"]);
        assert_eq!(row(&chart, 0), "Forward 0 of chunk 0: 0-2, Backward 0 of chunk 0: 2-6");
    }
}
