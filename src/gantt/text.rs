//! Gantt chart as text of ASCII characters: below the label of a row a line of letters that name
//! the passes, a line with the numbers of the micro-batches, and a line with the numbers of the
//! model chunks if there are several.

use super::{Chart, ChartPass, ChartPeriod, ChartSpan, shortened, ticks};
use potluck_core::format::percent;

/// Least and largest width of a chart.
const COLUMNS_MIN: usize = 40;
const COLUMNS_MAX: usize = 1000;
/// Least distance of two ticks in columns.
const TICK_COLUMNS: usize = 10;
/// Tolerance in columns for ends of spans that rounding moved off a column's border.
const TOLERANCE: f64 = 1e-6;

/// The span that each column of a row shows, by its position in the chart.
type Cells = Vec<Option<usize>>;

/// Line of numbers below a row.
struct NumberLine {
    line: String,
    /// True if a number had room for its last digit only.
    is_cut: bool,
}

impl ChartPass {
    fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            // Lower case, to differ clearly from a forward pass.
            Self::Backward | Self::BackwardInput => 'b',
            Self::BackwardWeight => 'w',
            Self::Update => 'U',
            Self::Other => 'X',
        }
    }
}

impl Chart {
    /// Returns the chart as lines of at most `columns` ASCII characters, which is taken as at
    /// least 40. A column shows the span that takes most of its time, or a dot if more than half
    /// of it is idle.
    pub fn text(&self, columns: usize) -> String {
        let columns = columns.clamp(COLUMNS_MIN, COLUMNS_MAX);
        let mut lines = vec![shortened(&plain(&self.title), columns)];
        let Some(period) = self.period() else {
            lines.push("no spans to show".into());
            return lines.join("\n") + "\n";
        };
        let mut legend = self.legend();
        let mut visible = vec![false; self.spans.len()];
        let mut is_cut = false;
        for (row, label) in self.rows.iter().enumerate() {
            let cells = self.cells(row, &period, columns);
            for span in cells.iter().flatten() {
                visible[*span] = true;
            }
            lines.push(label_line(label, self.idle_share(row), columns));
            lines.push(self.letters(&cells));
            for numbers in [Some(self.micro_batches(&cells)), self.chunks(&cells)] {
                let Some(NumberLine { line, is_cut: cut }) = numbers else { continue };
                lines.push(line);
                is_cut |= cut;
            }
        }
        lines.extend(axis(&period, columns));
        if is_cut {
            legend.push("last digit where narrow".into());
        }
        lines.extend(wrapped(&legend, columns));
        let mut hidden = 0;
        for (span, is_visible) in self.spans.iter().zip(visible) {
            if self.shows(span) && !is_visible {
                hidden += 1;
            }
        }
        if hidden > 0 {
            let all = self.shown().count();
            lines.push(format!("{hidden} of {all} spans are too short for this width"));
        }
        lines.push(shortened(&self.summary(), columns));
        lines.join("\n") + "\n"
    }

    fn cells(&self, row: usize, period: &ChartPeriod, columns: usize) -> Cells {
        let mut best = vec![(0.0, None); columns];
        let mut busy = vec![0.0; columns];
        for (index, span) in self.spans.iter().enumerate() {
            if span.row != row || !self.shows(span) {
                continue;
            }
            let from = period.share(span.from_s) * columns as f64;
            let to = period.share(span.to_s) * columns as f64;
            for at in from.floor() as usize..(to.ceil() as usize).min(columns) {
                let part = to.min(at as f64 + 1.0) - from.max(at as f64);
                busy[at] += part;
                if part > best[at].0 + TOLERANCE {
                    best[at] = (part, Some(index));
                }
            }
        }
        let mut cells = Vec::with_capacity(columns);
        for ((_, span), busy) in best.into_iter().zip(busy) {
            cells.push(if busy >= 0.5 - TOLERANCE { span } else { None });
        }
        cells
    }

    fn letters(&self, cells: &Cells) -> String {
        let mut line = String::with_capacity(cells.len());
        for cell in cells {
            line.push(match cell {
                Some(span) => self.spans[*span].pass.letter(),
                None => '.',
            });
        }
        line
    }

    fn micro_batches(&self, cells: &Cells) -> NumberLine {
        numbers(cells, |span| self.spans[span].micro_batch)
    }

    /// Line of model chunks, if the chart has several.
    fn chunks(&self, cells: &Cells) -> Option<NumberLine> {
        if !self.has_chunks() {
            return None;
        }
        Some(numbers(cells, |span| {
            let ChartSpan { micro_batch, chunk, .. } = self.spans[span];
            micro_batch.map(|_| chunk)
        }))
    }

    fn legend(&self) -> Vec<String> {
        let mut legend: Vec<String> =
            self.passes().map(|pass| format!("{} {}", pass.letter(), pass.name())).collect();
        legend.push(". idle".into());
        let numbers = if self.has_chunks() { "micro-batch and model chunk" } else { "micro-batch" };
        legend.push(format!("below: {numbers}"));
        legend
    }
}

/// Returns the number of each span at its first column. Numbers of several digits are followed by a
/// space, which separates neighbours.
fn numbers(cells: &Cells, number: impl Fn(usize) -> Option<usize>) -> NumberLine {
    let mut line = String::new();
    let mut is_cut = false;
    for run in cells.chunk_by(|a, b| a == b) {
        let mut number = run[0].and_then(&number).map_or(String::new(), |n| n.to_string());
        if number.len() > 1 && number.len() >= run.len() {
            number = number.split_off(number.len() - 1);
            is_cut = true;
        }
        line += &format!("{number:<width$}", width = run.len());
    }
    NumberLine { line: line.trim_end().into(), is_cut }
}

/// Returns a label with the idle share at the right end of the line.
fn label_line(label: &str, idle: f64, columns: usize) -> String {
    let idle = format!(" idle {}", percent(idle, 1));
    let width = columns.saturating_sub(idle.len());
    format!("{:<width$}{idle}", shortened(&plain(label), width))
}

/// Returns a line with a cross at each tick, and the line of their labels.
fn axis(period: &ChartPeriod, columns: usize) -> [String; 2] {
    let length = period.milliseconds();
    let mut line = vec!['-'; columns];
    let mut labels = String::new();
    for (tick, label) in ticks(length, columns / TICK_COLUMNS) {
        let at = (tick / length * columns as f64 + TOLERANCE) as usize;
        let label = if tick == 0.0 { "0 ms".into() } else { label };
        if at < columns {
            line[at] = '+';
        }
        let is_free = labels.is_empty() || labels.len() < at;
        if is_free && at + label.len() <= columns {
            labels = format!("{labels:<at$}{label}");
        }
    }
    [line.into_iter().collect(), labels]
}

/// Returns lines of items with commas between them.
fn wrapped(items: &[String], columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for item in items {
        match lines.last_mut() {
            Some(line) if line.len() + ", ".len() + item.len() < columns => {
                *line += &format!(", {item}");
            }
            Some(line) => {
                line.push(',');
                lines.push(item.clone());
            }
            None => lines.push(item.clone()),
        }
    }
    lines
}

/// Returns a text with a question mark for each character that is not printable ASCII.
fn plain(text: &str) -> String {
    text.replace(|c: char| !c.is_ascii_graphic() && c != ' ', "?")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gantt::golden::assert_golden;
    use crate::gantt::tests::{one_forward_one_backward, one_of_each, span};

    const GOLDEN: &str = "\
1F1B, 4 micro-batches
stage 0: cpu, h.0                                            idle 33.3 %
FFFFFFFFFFFF................bbbbbbbbFFFFbbbbbbbb....bbbbbbbb....bbbbbbbb
0   1   2                   0       3   1           2           3
stage 1: cpu, h.1                                            idle 33.3 %
....FFFFFFFF........bbbbbbbbFFFFbbbbbbbbFFFFbbbbbbbb....bbbbbbbb........
    0   1           0       2   1       3   2           3
stage 2: cpu, h.2                                            idle 33.3 %
........FFFFbbbbbbbbFFFFbbbbbbbbFFFFbbbbbbbbFFFFbbbbbbbb................
        0   0       1   1       2   2       3   3
+-------------------+-------------------+-------------------+-----------
0 ms                5                   10                  15
F forward, b backward, . idle, below: micro-batch
step 18.000 ms, bubble 33.3 % (idle share of all rows)
";

    /// Lines of letters and of numbers of a chart's only row.
    fn row(spans: Vec<ChartSpan>, columns: usize) -> Vec<String> {
        let chart = Chart { title: "T".into(), rows: vec!["a".into()], spans };
        let lines: Vec<String> = chart.text(columns).lines().map(String::from).collect();
        let axis = lines.iter().position(|line| line.starts_with('+')).unwrap();
        lines[2..axis].to_vec()
    }

    #[test]
    fn a_chart_is_the_golden_one() {
        assert_golden("step.txt", &one_of_each().text(100));
    }

    #[test]
    fn a_small_pipeline_is_drawn() {
        let text = one_forward_one_backward(3, 4).text(72);
        assert_eq!(text, GOLDEN, "\n{text}");
    }

    #[test]
    fn lines_keep_to_the_width() {
        for (stages, micro_batches) in [(1, 1), (2, 4), (8, 32)] {
            let mut chart = one_forward_one_backward(stages, micro_batches);
            chart.title += &" and more".repeat(30);
            chart.rows[0] += &" \u{ae}, of a long name".repeat(20);
            chart.spans.push(span(0, 1, 2, ChartPass::BackwardInput, 0));
            chart.spans.push(span(0, 1, 2, ChartPass::BackwardWeight, 0));
            for columns in [60, 61, 80, 133, 200] {
                let text = chart.text(columns);
                assert!(text.lines().all(|line| line.len() <= columns), "{text}");
                assert!(text.is_ascii(), "{text}");
                let full = text.lines().filter(|line| line.len() == columns).count();
                // Labels, letters, the axis and the title.
                assert!(full >= 2 * stages + 2, "{text}");
            }
        }
        let text = one_forward_one_backward(2, 2).text(0);
        assert!(text.lines().any(|line| line.len() == COLUMNS_MIN), "{text}");
    }

    #[test]
    fn long_numbers_keep_apart() {
        let spans = |count: u32| {
            (0..count).map(|at| span(0, at, at + 1, ChartPass::Forward, 9 + at as usize)).collect()
        };
        let wide: String = (9..29).map(|n| format!("{n:<3}")).collect();
        assert_eq!(row(spans(20), 60)[1], wide.trim_end());
        let narrow: String = (9..39).map(|n| format!("{:<2}", n % 10)).collect();
        assert_eq!(row(spans(30), 60)[1], narrow.trim_end());
        let chart =
            |count| Chart { title: "T".into(), rows: vec!["a".into()], spans: spans(count) };
        assert!(!chart(20).text(60).contains("last digit"));
        assert!(chart(30).text(60).contains("last digit"));
    }

    #[test]
    fn a_column_shows_what_takes_most_of_it() {
        // 60 columns of 10 ms.
        let end = span(0, 590, 600, ChartPass::Update, 0);
        let spans = vec![
            span(0, 0, 4, ChartPass::Forward, 1),
            span(0, 4, 10, ChartPass::Backward, 2),
            // Less than half of a column, and half of one.
            span(0, 10, 14, ChartPass::Forward, 3),
            span(0, 20, 25, ChartPass::Forward, 4),
            end,
        ];
        let lines = row(spans.clone(), 60);
        assert_eq!(lines[0], format!("b.F{}U", ".".repeat(56)));
        assert!(lines[1].starts_with("2 4 "), "{lines:?}");
        let text = Chart { title: String::new(), rows: vec!["a".into()], spans }.text(60);
        assert!(text.contains("2 of 5 spans are too short for this width"), "{text}");
    }

    #[test]
    fn spans_without_length_are_not_missed() {
        let mut chart = one_forward_one_backward(3, 4);
        chart.spans.push(span(1, 3, 3, ChartPass::Update, 9));
        assert_eq!(chart.text(72), GOLDEN);
        chart.spans.clear();
        assert_eq!(chart.text(72), "1F1B, 4 micro-batches\nno spans to show\n");
        chart.spans.push(span(1, 3, 3, ChartPass::Update, 9));
        assert_eq!(chart.text(72), "1F1B, 4 micro-batches\nno spans to show\n");
    }
}
