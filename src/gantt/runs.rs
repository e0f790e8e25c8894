//! Gantt chart of the segments that devices run in a step, predicted or recorded.

use std::collections::BTreeSet;

use super::{Chart, ChartPass, ChartSpan};

/// Largest gap within a pass over a micro-batch that is not drawn, as a part of the step: between
/// two blocks a device waits for its host.
const GAP_MAX: f64 = 0.002;

/// Pass of a segment, by its letter `F`, `B` or `W`, with the number of its block.
pub type TraceSegment = (char, usize);

/// Segment that a device runs on a micro-batch.
#[derive(Clone, Debug, PartialEq)]
pub struct SegmentRun {
    pub segment: TraceSegment,
    pub micro_batch: usize,
    /// Begin and end, in seconds since any origin that all runs share.
    pub from: f64,
    pub to: f64,
}

/// Row of a chart: the segments that one device runs in a step, in the order of time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunsOfRow {
    pub label: String,
    pub runs: Vec<SegmentRun>,
}

/// Returns the chart of a step with a row per device. Passes over a micro-batch through a model
/// chunk are one span each; the backward passes for inputs and for weights are shown separately if
/// the schedule delays the passes for weights.
pub fn chart_of_runs(title: String, rows: &[RunsOfRow]) -> Chart {
    let is_whole = rows.iter().all(|row| is_backward_whole(&row.runs));
    let mut from = f64::INFINITY;
    for row in rows {
        from = from.min(times(&row.runs).0);
    }
    let mut to = from;
    for row in rows {
        to = to.max(times(&row.runs).1);
    }
    let length = to - from;
    let mut spans: Vec<ChartSpan> = Vec::new();
    for (row, RunsOfRow { runs, .. }) in rows.iter().enumerate() {
        let chunks = chunks_of(runs);
        for run in runs.iter().filter(|run| run.to > run.from) {
            let pass = match run.segment.0 {
                'F' => ChartPass::Forward,
                _ if is_whole => ChartPass::Backward,
                'B' => ChartPass::BackwardInput,
                _ => ChartPass::BackwardWeight,
            };
            let block = run.segment.1;
            let chunk = chunks.iter().position(|(first, last)| (*first..=*last).contains(&block));
            let span = ChartSpan {
                row,
                from_s: run.from - from,
                to_s: run.to - from,
                pass,
                micro_batch: Some(run.micro_batch),
                chunk: chunk.unwrap_or(0),
            };
            match spans.last_mut() {
                Some(last) if continues(last, &span, GAP_MAX * length) => {
                    last.to_s = last.to_s.max(span.to_s);
                }
                _ => spans.push(span),
            }
        }
    }
    Chart { title, rows: rows.iter().map(|row| row.label.clone()).collect(), spans }
}

/// The first and the last block of each model chunk: runs of consecutive blocks.
pub(super) fn chunks_of(runs: &[SegmentRun]) -> Vec<(usize, usize)> {
    let blocks: BTreeSet<usize> = runs.iter().map(|run| run.segment.1).collect();
    let mut chunks: Vec<(usize, usize)> = Vec::new();
    for block in blocks {
        match chunks.last_mut() {
            Some((_, last)) if *last + 1 == block => *last = block,
            _ => chunks.push((block, block)),
        }
    }
    chunks
}

/// Begin and end of a step of a device; infinite ones if it ran nothing.
pub(super) fn times(step: &[SegmentRun]) -> (f64, f64) {
    let mut from = f64::INFINITY;
    let mut to = f64::NEG_INFINITY;
    for run in step {
        from = from.min(run.from);
        to = to.max(run.to);
    }
    (from, to)
}

/// Returns true if each segment for weights directly follows the segment for inputs of its block
/// and micro-batch: a whole backward pass.
fn is_backward_whole(step: &[SegmentRun]) -> bool {
    let mut inputs = BTreeSet::new();
    for run in step {
        if run.segment.0 == 'B' {
            inputs.insert((run.segment.1, run.micro_batch));
        }
    }
    for pair in step.windows(2) {
        let previous = &pair[0];
        let run = &pair[1];
        let of_block = (run.segment.1, run.micro_batch);
        if run.segment.0 != 'W' || !inputs.contains(&of_block) {
            continue;
        }
        let follows =
            previous.segment.0 == 'B' && (previous.segment.1, previous.micro_batch) == of_block;
        if !follows {
            return false;
        }
    }
    true
}

/// Returns true if a span continues the work of the previous one after at most `gap` seconds.
fn continues(last: &ChartSpan, next: &ChartSpan, gap: f64) -> bool {
    last.row == next.row
        && last.pass == next.pass
        && last.micro_batch == next.micro_batch
        && last.chunk == next.chunk
        && next.from_s - last.to_s <= gap
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns runs such as `F3 0`, of block 3 on micro-batch 0, of a second each.
    fn row(label: &str, from: f64, runs: &str) -> RunsOfRow {
        let run = |(index, run): (usize, &str)| {
            let (segment, micro_batch) = run.split_once(' ').unwrap();
            let segment = (segment.chars().next().unwrap(), segment[1..].parse().unwrap());
            let from = from + index as f64;
            SegmentRun { segment, micro_batch: micro_batch.parse().unwrap(), from, to: from + 1.0 }
        };
        RunsOfRow { label: label.into(), runs: runs.split(", ").enumerate().map(run).collect() }
    }

    fn spans(chart: &Chart) -> Vec<(usize, f64, f64, ChartPass, usize)> {
        let of = |span: &ChartSpan| (span.row, span.from_s, span.to_s, span.pass, span.chunk);
        chart.spans.iter().map(of).collect()
    }

    #[test]
    fn segments_of_a_pass_are_one_span_and_time_begins_with_the_first() {
        let first = row("stage 0", 5.0, "F0 0, F1 0, B1 0, W1 0, W0 0");
        let chart = chart_of_runs("a step".into(), &[first, row("stage 1", 7.0, "F2 0, B2 0")]);
        assert_eq!((&*chart.title, &chart.rows[1][..]), ("a step", "stage 1"));
        let (forward, backward) = (ChartPass::Forward, ChartPass::Backward);
        let expected = [
            (0, 0.0, 2.0, forward, 0),
            (0, 2.0, 5.0, backward, 0),
            (1, 2.0, 3.0, forward, 0),
            (1, 3.0, 4.0, backward, 0),
        ];
        assert_eq!(spans(&chart), expected);
    }

    #[test]
    fn one_delayed_pass_for_weights_shows_them_apart_in_all_rows() {
        let delayed = row("stage 0", 0.0, "F0 0, B0 0, F0 1, W0 0, B0 1, W0 1");
        let chart = chart_of_runs(String::new(), &[delayed, row("stage 1", 0.0, "B1 0, W1 0")]);
        let passes: Vec<ChartPass> = chart.spans.iter().map(|span| span.pass).collect();
        assert!(!passes.contains(&ChartPass::Backward), "{passes:?}");
        assert_eq!(passes.iter().filter(|pass| **pass == ChartPass::BackwardWeight).count(), 3);
    }

    #[test]
    fn rows_without_runs_are_kept() {
        let chart = chart_of_runs(String::new(), &[RunsOfRow::default(), row("b", 3.0, "F0 0")]);
        assert_eq!(
            (chart.rows.len(), spans(&chart)),
            (2, vec![(1, 0.0, 1.0, ChartPass::Forward, 0)])
        );
    }
}
