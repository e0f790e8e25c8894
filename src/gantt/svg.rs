//! Gantt chart as SVG.

use std::fmt::Write;

use super::{Chart, ChartPass, ChartPeriod, ChartSpan, milliseconds, shortened, ticks};
use potluck_core::format::{percent, svg_text, xml_escaped};

/// Width of the time axis in pixels: as much per span of the fullest row, within these bounds.
const PLOT_MIN: f64 = 760.0;
const PLOT_MAX: f64 = 1600.0;
const SPAN_WIDTH: f64 = 24.0;
/// Space left of the labels, between labels and plot, and right of the plot, in pixels.
const MARGIN: f64 = 18.0;
const GAP: f64 = 12.0;
const RIGHT: f64 = 76.0;
/// Position of the first row, distance of rows, height of a bar, and space below the rows.
const TOP: f64 = 92.0;
const ROW: f64 = 46.0;
const BAR: f64 = 36.0;
const BELOW: f64 = 78.0;
/// Most characters of a line of a label, and estimates of the width of a character.
const LABEL_MAX: usize = 44;
const LABEL_CHARACTER: f64 = 7.0;
const TITLE_CHARACTER: f64 = 9.6;
/// Font sizes of the numbers of micro-batches; the first one that fits is used. Then the width of a
/// digit as a part of a font's size.
const NUMBER_FONTS: [f64; 2] = [11.0, 9.0];
const NUMBER_CHARACTER: f64 = 0.57;
/// Least distance of two ticks in pixels.
const TICK_WIDTH: f64 = 76.0;
/// Factor of a colour's brightness from one model chunk of a row to the next.
const SHADE: f64 = 0.72;
const STYLE: &str = "\
text { font: 13px sans-serif; fill: #333 }
.title { font-size: 18px }
.dull { fill: #666 }
.grid { stroke: #dcdcdc }
.row { fill: #f2f2f2 }
.middle { text-anchor: middle }
.end { text-anchor: end }
.number { text-anchor: middle; pointer-events: none }
";

/// Places of a drawing, in pixels.
struct ChartLayout {
    /// Left and right end of the time axis.
    left: f64,
    right: f64,
    /// Position of the time axis.
    bottom: f64,
}

impl ChartLayout {
    fn of(chart: &Chart) -> Self {
        let mut longest = 0;
        let mut fullest = 0;
        for (row, label) in chart.rows.iter().enumerate() {
            for line in label_lines(label) {
                longest = longest.max(line.chars().count());
            }
            fullest = fullest.max(chart.shown().filter(|span| span.row == row).count());
        }
        let left = MARGIN + longest as f64 * LABEL_CHARACTER + GAP;
        let plot = (fullest as f64 * SPAN_WIDTH).clamp(PLOT_MIN, PLOT_MAX);
        Self { left, right: left + plot, bottom: TOP + chart.rows.len() as f64 * ROW }
    }

    fn width(&self) -> f64 {
        self.right + RIGHT
    }

    fn height(&self) -> f64 {
        self.bottom + BELOW
    }

    /// Place of a share of the chart's time.
    fn at(&self, share: f64) -> f64 {
        self.left + share * (self.right - self.left)
    }
}

impl ChartPass {
    /// Returns red, green and blue of the first model chunk: lighter shades of colours that remain
    /// distinguishable with colour blindness (Okabe and Ito, "Color universal design", 2008).
    fn color(self) -> [f64; 3] {
        match self {
            Self::Forward => [104.0, 176.0, 228.0],
            Self::Backward | Self::BackwardInput => [240.0, 168.0, 58.0],
            Self::BackwardWeight => [64.0, 178.0, 138.0],
            Self::Update => [204.0, 140.0, 180.0],
            Self::Other => [170.0, 170.0, 170.0],
        }
    }

    /// Colours of a model chunk and of text on it.
    fn colors(self, chunk: usize) -> (String, &'static str) {
        let factor = SHADE.powi(chunk.min(4) as i32);
        let [red, green, blue] = self.color().map(|part| (part * factor).round());
        let luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue;
        let text = if luminance > 120.0 { "#111" } else { "#fff" };
        (format!("#{:02x}{:02x}{:02x}", red as u8, green as u8, blue as u8), text)
    }
}

impl Chart {
    /// Returns the chart as an SVG document. A chart without spans has its title and its labels
    /// only.
    pub fn svg(&self) -> String {
        let layout = ChartLayout::of(self);
        let width = layout.width();
        let height = layout.height();
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             width=\"{width}\" height=\"{height}\">\n<style>\n{STYLE}</style>\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        );
        let title = shortened(&self.title, ((width - 2.0 * MARGIN) / TITLE_CHARACTER) as usize);
        svg += &svg_text("title", MARGIN, 32.0, &title);
        let period = self.period();
        let summary =
            if period.is_some() { self.summary() } else { "no spans to show".to_string() };
        svg += &svg_text("dull", MARGIN, 56.0, &summary);
        svg += &self.labels(&layout);
        if let Some(period) = period {
            svg += &axis(&layout, &period);
            for span in self.shown() {
                svg += &bar(span, &layout, &period);
            }
            svg += &self.swatches(&layout);
        }
        svg + "</svg>\n"
    }

    /// Empty rows with their labels at the left and their idle shares at the right.
    fn labels(&self, layout: &ChartLayout) -> String {
        let mut svg = String::new();
        let has_spans = self.period().is_some();
        if has_spans {
            svg += &svg_text("end dull", layout.width() - MARGIN, TOP - 12.0, "idle");
        }
        for (row, label) in self.rows.iter().enumerate() {
            let top = TOP + row as f64 * ROW;
            let lines = label_lines(label);
            let middle = top + BAR / 2.0 + 4.5 - 8.0 * (lines.len() - 1) as f64;
            for (index, line) in lines.iter().enumerate() {
                svg += &svg_text("", MARGIN, middle + 16.0 * index as f64, line);
            }
            // Writing to a string cannot fail.
            let _ = writeln!(
                svg,
                "<rect class=\"row\" x=\"{:.1}\" y=\"{top}\" width=\"{:.1}\" height=\"{BAR}\"/>",
                layout.left,
                layout.right - layout.left
            );
            if has_spans {
                let idle = percent(self.idle_share(row), 1);
                svg += &svg_text("end", layout.width() - MARGIN, top + BAR / 2.0 + 4.5, &idle);
            }
        }
        svg
    }

    /// The legend below the axis.
    fn swatches(&self, layout: &ChartLayout) -> String {
        let mut svg = String::new();
        let mut x = layout.left;
        let y = layout.bottom + 46.0;
        for pass in self.passes() {
            let (color, _) = pass.colors(0);
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{y}\" width=\"14\" height=\"14\" fill=\"{color}\"/>"
            );
            svg += &svg_text("", x + 20.0, y + 12.0, pass.name());
            x += 44.0 + pass.name().len() as f64 * LABEL_CHARACTER;
        }
        if self.has_chunks() {
            svg += &svg_text("dull", x, y + 12.0, "darker: later model chunks");
        }
        svg
    }
}

/// Lines of a label: it is broken after its first comma that is not in parentheses.
fn label_lines(label: &str) -> Vec<String> {
    for (at, comma) in label.match_indices(", ") {
        let before = &label[..at];
        if before.matches('(').count() <= before.matches(')').count() {
            let after = &label[at + comma.len()..];
            return vec![shortened(before, LABEL_MAX), shortened(after, LABEL_MAX)];
        }
    }
    vec![shortened(label, LABEL_MAX)]
}

/// Background grid with its labels in milliseconds.
fn axis(layout: &ChartLayout, period: &ChartPeriod) -> String {
    let length = period.milliseconds();
    let bottom = layout.bottom;
    let mut svg = String::new();
    let most = ((layout.right - layout.left) / TICK_WIDTH) as usize;
    for (tick, label) in ticks(length, most) {
        let at = layout.at((tick / length).min(1.0));
        let top = TOP - 6.0;
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{at:.1}\" y1=\"{top}\" x2=\"{at:.1}\" y2=\"{bottom}\"/>"
        );
        let label = if tick == 0.0 { "0 ms".into() } else { label };
        svg += &svg_text("middle", at, bottom + 18.0, &label);
    }
    svg
}

/// Returns the rectangle of a span with a description that viewers show beside the pointer, and
/// its micro-batch if that fits.
fn bar(span: &ChartSpan, layout: &ChartLayout, period: &ChartPeriod) -> String {
    let x = layout.at(period.share(span.from_s));
    let width = layout.at(period.share(span.to_s)) - x;
    let top = TOP + span.row as f64 * ROW;
    let (color, text_color) = span.pass.colors(span.chunk);
    // An edge separates neighbours of one colour; a wide one would cover narrow spans.
    let edge = (width / 8.0).min(1.0);
    let number = span.micro_batch.map(|number| number.to_string());
    let of = match &number {
        Some(number) => format!(" of micro-batch {number}"),
        None => String::new(),
    };
    let begin = milliseconds((span.from_s - period.from) * 1e3);
    let description = format!(
        "{}{of}: {} ms from {begin} on",
        span.pass.name(),
        milliseconds(span.length() * 1e3)
    );
    let mut svg = format!(
        "<rect x=\"{x:.2}\" y=\"{top}\" width=\"{width:.2}\" height=\"{BAR}\" fill=\"{color}\" \
         stroke=\"white\" stroke-width=\"{edge:.2}\"><title>{}</title></rect>\n",
        xml_escaped(&description)
    );
    let Some(number) = number else { return svg };
    let font = NUMBER_FONTS
        .into_iter()
        .find(|font| number.len() as f64 * font * NUMBER_CHARACTER + 2.0 <= width);
    if let Some(font) = font {
        let middle = x + width / 2.0;
        let y = top + BAR / 2.0 + font * 0.36;
        // Writing to a string cannot fail.
        let _ = writeln!(
            svg,
            "<text class=\"number\" x=\"{middle:.1}\" y=\"{y:.1}\" \
             style=\"fill:{text_color};font-size:{font}px\">{number}</text>"
        );
    }
    svg
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gantt::golden::assert_golden;
    use crate::gantt::tests::{one_forward_one_backward, one_of_each, span};

    /// Values of an attribute of all elements that begin with `begin`.
    fn values(svg: &str, begin: &str, attribute: &str) -> Vec<f64> {
        let pattern = format!(" {attribute}=\"");
        let lines = svg.lines().filter(|line| line.starts_with(begin));
        let value = |line: &str| line.split(&pattern).nth(1)?.split('"').next()?.parse().ok();
        lines.filter_map(value).collect()
    }

    /// Bars: elements with a description.
    fn bars(svg: &str) -> String {
        svg.lines().filter(|line| line.contains("<title>")).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn a_chart_is_the_golden_one() {
        assert_golden("step.svg", &one_of_each().svg());
    }

    #[test]
    fn an_origin_of_the_times_is_not_seen() {
        let mut chart = one_forward_one_backward(2, 1);
        let svg = chart.svg();
        chart.spans.iter_mut().for_each(|span| span.from_s += 7.0);
        chart.spans.iter_mut().for_each(|span| span.to_s += 7.0);
        assert_eq!(chart.svg(), svg);
    }

    #[test]
    fn chunks_and_passes_have_colors_of_their_own() {
        let mut colors: Vec<String> = Vec::new();
        for pass in [ChartPass::Forward, ChartPass::Backward, ChartPass::BackwardWeight] {
            colors.extend((0..4).map(|chunk| pass.colors(chunk).0));
        }
        let distinct: std::collections::BTreeSet<&String> = colors.iter().collect();
        assert_eq!(distinct.len(), colors.len(), "{colors:?}");
        // The legend explains chunks where there are several.
        assert!(!one_forward_one_backward(2, 1).svg().contains("model chunks"));
    }

    #[test]
    fn labels_break_outside_parentheses() {
        assert_eq!(label_lines("stage 0: a (b, c), d, e"), ["stage 0: a (b, c)", "d, e"]);
        assert_eq!(label_lines("cpu"), ["cpu"]);
        assert_eq!(label_lines(""), [""]);
        let long = label_lines(&"x".repeat(99));
        assert_eq!(long, [format!("{}..", "x".repeat(LABEL_MAX - 2))]);
    }

    #[test]
    fn nothing_lies_outside_the_drawing() {
        let mut chart = one_forward_one_backward(8, 32);
        chart.rows[3] = "stage 3: ".to_string() + &"long ".repeat(30);
        let svg = chart.svg();
        let size = (values(&svg, "<svg", "width")[0], values(&svg, "<svg", "height")[0]);
        for (attribute, most) in [("x", size.0), ("y", size.1)] {
            for element in ["<rect", "<text"] {
                let found = values(&svg, element, attribute);
                assert!(found.len() > 8 && found.iter().all(|at| (0.0..most).contains(at)));
            }
        }
        let ends = values(&svg, "<rect", "x").into_iter().zip(values(&svg, "<rect", "width"));
        assert!(ends.into_iter().all(|(x, width)| x + width <= size.0 - RIGHT + 0.1));
    }

    #[test]
    fn a_chart_of_nothing_is_drawn() {
        let mut chart = Chart { title: "T".into(), ..Chart::default() };
        for _ in 0..2 {
            let svg = chart.svg();
            assert!(svg.contains("no spans to show") && svg.ends_with("</svg>\n"), "{svg}");
            assert!(!svg.contains("NaN") && !svg.contains("inf") && bars(&svg).is_empty());
            chart.rows.push("a".into());
            chart.spans.push(span(0, 1, 1, ChartPass::Forward, 0));
        }
    }
}
