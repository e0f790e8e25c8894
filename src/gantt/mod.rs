//! Gantt charts of a step: a row per stage and a span per pass over a micro-batch, drawn as text
//! for a terminal and as SVG.

mod runs;
mod svg;
mod text;
mod trace;

pub use runs::{RunsOfRow, SegmentRun, chart_of_runs};
pub use trace::chart_of_trace;

use potluck_core::format::percent;

/// Work that a span of a chart shows, which decides its letter and its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ChartPass {
    Forward,
    /// The gradients of inputs and of weights in one.
    Backward,
    /// The gradients of inputs only.
    BackwardInput,
    /// The gradients of weights only.
    BackwardWeight,
    Update,
    Other,
}

/// Time in which a row of a chart was busy with one pass.
#[derive(Clone, Debug, PartialEq)]
pub struct ChartSpan {
    /// Position in [`Chart::rows`].
    pub row: usize,
    /// Begin and end, in seconds since any origin that all spans share.
    pub from_s: f64,
    pub to_s: f64,
    pub pass: ChartPass,
    pub micro_batch: Option<usize>,
    /// Index of the model chunk among the chunks of the row.
    pub chunk: usize,
}

/// Gantt chart. It begins with its first span and ends with its last one. Spans without length,
/// with an infinite or unknown time, or of a row that it does not have are ignored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chart {
    pub title: String,
    /// Label of each row, such as `stage 0: llvmpipe, embed to h.1`.
    pub rows: Vec<String>,
    pub spans: Vec<ChartSpan>,
}

/// Time that a chart shows, in seconds. Its length is above zero.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ChartPeriod {
    from: f64,
    length: f64,
}

impl ChartPass {
    const ALL: [Self; 6] = [
        Self::Forward,
        Self::Backward,
        Self::BackwardInput,
        Self::BackwardWeight,
        Self::Update,
        Self::Other,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::BackwardInput => "backward for inputs",
            Self::BackwardWeight => "backward for weights",
            Self::Update => "update",
            Self::Other => "other work",
        }
    }
}

impl ChartSpan {
    fn length(&self) -> f64 {
        self.to_s - self.from_s
    }
}

impl ChartPeriod {
    /// Share of the period that has passed at `time`.
    fn share(&self, time: f64) -> f64 {
        (time - self.from) / self.length
    }

    fn milliseconds(&self) -> f64 {
        self.length * 1e3
    }
}

impl Chart {
    /// Returns the time from the first to the last span, in seconds; 0 without any.
    pub fn length_s(&self) -> f64 {
        match self.period() {
            Some(period) => period.length,
            None => 0.0,
        }
    }

    /// Returns the fraction of the chart's time in which a row has no span: 1 for a row without
    /// spans, 0 if the whole chart has none.
    pub fn idle_share(&self, row: usize) -> f64 {
        match self.period() {
            Some(period) => 1.0 - (self.busy(row) / period.length).min(1.0),
            None => 0.0,
        }
    }

    /// Returns the bubble: the fraction of the time of all rows in which they are idle.
    pub fn bubble(&self) -> f64 {
        let shares = (0..self.rows.len()).map(|row| self.idle_share(row));
        shares.sum::<f64>() / self.rows.len().max(1) as f64
    }

    /// Seconds in which a row has a span. Time that several spans cover counts once.
    fn busy(&self, row: usize) -> f64 {
        let own = self.shown().filter(|span| span.row == row);
        let mut times: Vec<(f64, f64)> = own.map(|span| (span.from_s, span.to_s)).collect();
        times.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut busy = 0.0;
        let mut covered = f64::NEG_INFINITY;
        for (from, to) in times {
            busy += (to - from.max(covered)).max(0.0);
            covered = covered.max(to);
        }
        busy
    }

    fn shown(&self) -> impl Iterator<Item = &ChartSpan> {
        self.spans.iter().filter(|span| self.shows(span))
    }

    fn shows(&self, span: &ChartSpan) -> bool {
        let is_known = span.from_s.is_finite() && span.to_s.is_finite();
        is_known && span.length() > 0.0 && span.row < self.rows.len()
    }

    fn period(&self) -> Option<ChartPeriod> {
        let from = self.shown().map(|span| span.from_s).reduce(f64::min)?;
        let to = self.shown().map(|span| span.to_s).reduce(f64::max)?;
        Some(ChartPeriod { from, length: to - from })
    }

    /// Passes that the chart shows, in the order of its legend.
    fn passes(&self) -> impl Iterator<Item = ChartPass> {
        ChartPass::ALL.into_iter().filter(|pass| self.shown().any(|span| span.pass == *pass))
    }

    fn has_chunks(&self) -> bool {
        self.shown().any(|span| span.chunk > 0)
    }

    /// Sentence below a chart: its time and its bubble.
    fn summary(&self) -> String {
        let time = milliseconds(self.length_s() * 1e3);
        format!("step {time} ms, bubble {} (idle share of all rows)", percent(self.bubble(), 1))
    }
}

fn milliseconds(value: f64) -> String {
    let decimals = if value >= 100.0 { 1 } else { 3 };
    format!("{value:.decimals$}")
}

/// Returns the ticks of an axis from 0 to `length` with their labels: multiples of 1, 2 or 5
/// times a power of ten, at most `most` besides the one at 0.
fn ticks(length: f64, most: usize) -> Vec<(f64, String)> {
    let least = length / most.max(1) as f64;
    let exponent = least.log10().floor();
    let steps = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * 10f64.powf(exponent));
    // A step that misses the least one by rounding only is as good.
    let found = steps.into_iter().find(|step| *step >= least * (1.0 - 1e-9));
    let step = found.unwrap_or(steps[3]);
    let decimals = (-(step * (1.0 + 1e-9)).log10().floor()).max(0.0) as usize;
    let count = (length / step * (1.0 + 1e-9)).floor() as usize;
    let mut ticks = Vec::with_capacity(count + 1);
    for index in 0..=count {
        let tick = index as f64 * step;
        ticks.push((tick, format!("{tick:.decimals$}")));
    }
    ticks
}

/// Returns a text of at most `most` characters; a longer one is cut and ends with two dots.
fn shortened(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.into();
    }
    let mut short: String = text.chars().take(most.saturating_sub(2)).collect();
    short += &".."[..most.min(2)];
    short
}

#[cfg(test)]
#[path = "../../tests/common/golden.rs"]
mod golden;

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Returns a span of whole milliseconds.
    pub fn span(row: usize, from: u32, to: u32, pass: ChartPass, micro_batch: usize) -> ChartSpan {
        let (from_s, to_s) = (f64::from(from) / 1e3, f64::from(to) / 1e3);
        ChartSpan { row, from_s, to_s, pass, micro_batch: Some(micro_batch), chunk: 0 }
    }

    /// Returns the chart of 1F1B over `stages`, with forward passes of 1 ms and backward passes
    /// of 2 ms: each pass begins as soon as its stage and its inputs are ready.
    pub fn one_forward_one_backward(stages: usize, micro_batches: usize) -> Chart {
        let order = |stage: usize| {
            let warm = (stages - stage - 1).min(micro_batches);
            let steady = (warm..micro_batches).flat_map(move |m| [(true, m), (false, m - warm)]);
            let first = (0..warm).map(|m| (true, m));
            let last = (micro_batches - warm..micro_batches).map(|m| (false, m));
            first.chain(steady).chain(last).collect::<Vec<_>>()
        };
        let orders: Vec<_> = (0..stages).map(order).collect();
        let mut done = std::collections::BTreeMap::new();
        let (mut next, mut free) = (vec![0; stages], vec![0u32; stages]);
        let mut spans = Vec::new();
        while spans.len() < stages * micro_batches * 2 {
            for stage in 0..stages {
                let Some(&(forward, m)) = orders[stage].get(next[stage]) else { continue };
                let before = if forward {
                    stage.checked_sub(1).map(|before| (true, before, m))
                } else if stage + 1 < stages {
                    Some((false, stage + 1, m))
                } else {
                    Some((true, stage, m))
                };
                let ready = before.map_or(Some(0), |before| done.get(&before).copied());
                let Some(ready) = ready else { continue };
                let from = free[stage].max(ready);
                let (pass, to) = if forward {
                    (ChartPass::Forward, from + 1)
                } else {
                    (ChartPass::Backward, from + 2)
                };
                spans.push(span(stage, from, to, pass, m));
                done.insert((forward, stage, m), to);
                (free[stage], next[stage]) = (to, next[stage] + 1);
            }
        }
        let rows = (0..stages).map(|stage| format!("stage {stage}: cpu, h.{stage}")).collect();
        Chart { title: format!("1F1B, {micro_batches} micro-batches"), rows, spans }
    }

    /// Chart with everything that is drawn differently: all passes, two model chunks, a span that
    /// is too short for its number, signs of markup, and a label in two lines.
    pub fn one_of_each() -> Chart {
        use ChartPass::{BackwardInput, BackwardWeight, Forward, Other, Update};
        let mut chart = one_forward_one_backward(3, 4);
        chart.title = "<1F1B> & \"all\" 'passes' \u{1}".into();
        chart.rows[0] = "stage 0: GeForce <4090> (8 GB, 2), h.0 & h.1".into();
        let passes = [BackwardInput, BackwardWeight, Update, Other];
        chart.spans.extend((18..).zip(passes).map(|(at, pass)| span(1, at, at + 1, pass, 9)));
        chart.spans.push(ChartSpan { chunk: 1, ..span(0, 18, 20, Forward, 71) });
        chart.spans.push(ChartSpan { micro_batch: None, ..span(2, 18, 19, Update, 0) });
        chart.spans.push(ChartSpan { to_s: 20.01e-3, ..span(2, 20, 21, Forward, 5) });
        chart
    }

    fn close(found: f64, wanted: f64) -> bool {
        (found - wanted).abs() < 1e-9
    }

    #[test]
    fn the_bubble_of_equal_stages_is_that_of_the_formula() {
        for (stages, micro_batches) in [(1, 3), (2, 4), (3, 4), (4, 16), (8, 32)] {
            let chart = one_forward_one_backward(stages, micro_batches);
            // PipeDream-flush: (K - 1) / (M + K - 1).
            let wanted = (stages - 1) as f64 / (micro_batches + stages - 1) as f64;
            assert!(close(chart.bubble(), wanted), "{} is not {wanted}", chart.bubble());
            assert!(close(chart.length_s(), (micro_batches + stages - 1) as f64 * 3e-3));
        }
    }

    #[test]
    fn idle_time_is_that_without_any_span() {
        let mut chart =
            Chart { rows: vec!["a".into(), "b".into(), "c".into()], ..Chart::default() };
        chart.spans.push(span(0, 10, 20, ChartPass::Forward, 0));
        chart.spans.push(span(1, 10, 13, ChartPass::Forward, 0));
        // Two overlapping spans; one holds the other.
        chart.spans.push(span(1, 12, 14, ChartPass::Other, 0));
        chart.spans.push(span(1, 12, 13, ChartPass::Other, 0));
        let shares: Vec<f64> = (0..3).map(|row| chart.idle_share(row)).collect();
        assert!(close(shares[0], 0.0) && close(shares[1], 0.6), "{shares:?}");
        assert!(close(shares[2], 1.0) && close(chart.bubble(), 1.6 / 3.0), "{shares:?}");
    }

    #[test]
    fn spans_that_are_none_count_for_nothing() {
        let mut chart = one_forward_one_backward(2, 2);
        let (bubble, length) = (chart.bubble(), chart.length_s());
        chart.spans.push(span(0, 50, 50, ChartPass::Update, 0));
        chart.spans.push(span(0, 70, 60, ChartPass::Update, 0));
        chart.spans.push(span(2, 50, 60, ChartPass::Update, 0));
        let unknown = span(0, 50, 60, ChartPass::Update, 0);
        chart.spans.push(ChartSpan { to_s: f64::NAN, ..unknown.clone() });
        chart.spans.push(ChartSpan { from_s: f64::NEG_INFINITY, ..unknown.clone() });
        assert_eq!((chart.bubble(), chart.length_s()), (bubble, length));
        assert!(chart.passes().eq([ChartPass::Forward, ChartPass::Backward]));
        chart.spans.push(unknown);
        assert!(chart.bubble() != bubble && chart.length_s() != length);
    }

    #[test]
    fn a_chart_of_nothing_has_no_bubble() {
        let mut chart = Chart::default();
        assert_eq!((chart.bubble(), chart.idle_share(0), chart.length_s()), (0.0, 0.0, 0.0));
        chart.rows.push("a".into());
        chart.spans.push(span(0, 5, 5, ChartPass::Forward, 0));
        assert_eq!((chart.bubble(), chart.idle_share(0), chart.length_s()), (0.0, 0.0, 0.0));
    }

    #[test]
    fn ticks_are_round_numbers() {
        let labels = |length, most| -> Vec<String> {
            ticks(length, most).into_iter().map(|(_, label)| label).collect()
        };
        assert_eq!(labels(18.0, 7), ["0", "5", "10", "15"]);
        assert_eq!(labels(18.0, 9), ["0", "2", "4", "6", "8", "10", "12", "14", "16", "18"]);
        assert_eq!(labels(0.3, 3), ["0.0", "0.1", "0.2", "0.3"]);
        assert_eq!(labels(0.0042, 2), ["0.000", "0.005"][..1]);
        assert_eq!(labels(1000.0, 1), ["0", "1000"]);
        for length in [1e-6, 0.07, 3.3, 99.9, 12_345.6] {
            for most in 1..20 {
                let found = ticks(length, most);
                assert!((1..=most + 1).contains(&found.len()), "{length} {most}: {found:?}");
                assert!(found.iter().all(|(tick, _)| *tick <= length * 1.001), "{found:?}");
            }
        }
    }

    #[test]
    fn long_texts_end_with_dots() {
        assert_eq!(shortened("abcdef", 6), "abcdef");
        assert_eq!(shortened("abcdefg", 6), "abcd..");
        assert_eq!(shortened("\u{e4}\u{e4}\u{e4}", 3), "\u{e4}\u{e4}\u{e4}");
        assert_eq!(shortened("abc", 1), ".");
    }
}
