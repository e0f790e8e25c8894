//! SVG chart of the bus bandwidth of an all-reduce over its size: a line per number of ranks, and
//! the copy in memory that alternated with them. Both axes are logarithmic.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::{COPY, GIBS, Kind, QUIC, SLICES};
use crate::report::{DeviceReport, FigureKind, Report};
use crate::units::size;
use potluck_core::format::svg_text;

/// Size of the drawing in pixels.
const WIDTH: f64 = 880.0;
const HEIGHT: f64 = 540.0;
/// Positions of the axes and of their ends, in pixels.
const LEFT: f64 = 78.0;
const RIGHT: f64 = WIDTH - 92.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = HEIGHT - 66.0;
/// Minimum distance between two labels at the ends of lines.
const LINE_HEIGHT: f64 = 17.0;
/// Colours that remain distinguishable with colour blindness (Okabe and Ito, "Color universal
/// design", 2008, but for yellow and sky blue); further lines reuse them from the first on.
const COLORS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#000000"];
const STYLE: &str = "\
text { font: 14px sans-serif; fill: #333 }
.title { font-size: 18px }
.grid { stroke: #e2e2e2 }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round }
.copy { stroke: #777; stroke-dasharray: 7 5 }
.middle { text-anchor: middle }
.end { text-anchor: end }
";

/// Points of a line, in binary logarithms of bytes and GiB/s.
type SvgLine = Vec<(f64, f64)>;

/// ChartAxis from one power of two to another.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ChartAxis {
    least: f64,
    most: f64,
    /// Pixel of `least`; `to` is the pixel of `most`.
    from: f64,
    to: f64,
}

impl ChartAxis {
    /// Creates the axis around some logarithms, or from 2^0 to 2^1 if there are none.
    fn around(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let wider = |(least, most): (f64, f64), value: f64| (least.min(value), most.max(value));
        let (least, most) = values.fold((f64::INFINITY, f64::NEG_INFINITY), wider);
        let (least, most) = if least <= most { (least, most) } else { (0.0, 1.0) };
        Self { least: least.floor(), most: most.ceil().max(least.floor() + 1.0), from, to }
    }

    fn pixel(&self, logarithm: f64) -> f64 {
        let share = (logarithm - self.least) / (self.most - self.least);
        self.from + share * (self.to - self.from)
    }

    /// Returns the powers that have a label: at most nine.
    fn ticks(&self) -> impl Iterator<Item = f64> + use<> {
        let step = ((self.most - self.least) / 8.0).ceil() as usize;
        (self.least as i32..=self.most as i32).step_by(step).map(f64::from)
    }
}

/// Returns the drawing as SVG. A report without an all-reduce on slices gives axes without lines.
pub fn draw(report: &Report) -> String {
    let lines = lines(report);
    let points = || lines.values().flatten();
    let x = ChartAxis::around(points().map(|point| point.0), LEFT, RIGHT);
    let y = ChartAxis::around(points().map(|point| point.1), BOTTOM, TOP);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         width=\"{WIDTH}\" height=\"{HEIGHT}\">\n<style>\n{STYLE}</style>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let system = &report.system;
    let ranks = if report.devices.iter().any(|one| one.api == QUIC) { "nodes" } else { "threads" };
    let title = format!("All-reduce between {ranks}: {}, {} cores", system.cpu, system.cores);
    svg += &svg_text("title", LEFT, TOP - 30.0, &title);
    svg += &axes(&x, &y);
    svg += &curves(&lines, &x, &y);
    svg + "</svg>\n"
}

/// Returns the lines by number of ranks; the line of the copy has number 0.
fn lines(report: &Report) -> BTreeMap<usize, SvgLine> {
    let mut lines: BTreeMap<usize, SvgLine> = BTreeMap::new();
    let is_of_slices = |device: &&DeviceReport| device.name == SLICES || device.api == QUIC;
    let slices = report.devices.iter().filter(is_of_slices);
    for figure in slices.flat_map(|device| &device.figures) {
        let FigureKind::Collective(call) = &figure.kind else { continue };
        let line = match call.by.as_str() {
            COPY => 0,
            by if by == Kind::AllReduce.name() => call.ranks,
            _ => continue,
        };
        lines.entry(line).or_default().push(((call.bytes as f64).log2(), figure.median.log2()));
    }
    lines
}

/// Returns the grid with the labels of its lines and of both axes.
fn axes(x: &ChartAxis, y: &ChartAxis) -> String {
    let mut svg = String::new();
    for tick in x.ticks() {
        let at = x.pixel(tick);
        svg += &segment(at, BOTTOM, at, TOP);
        svg += &svg_text("middle", at, BOTTOM + 22.0, &size(tick.exp2() as u64));
    }
    for tick in y.ticks() {
        let at = y.pixel(tick);
        svg += &segment(LEFT, at, RIGHT, at);
        svg += &svg_text("end", LEFT - 9.0, at + 5.0, &tick.exp2().to_string());
    }
    svg += &svg_text("middle", (LEFT + RIGHT) / 2.0, BOTTOM + 50.0, "values of each rank");
    let (at, middle) = (22.0, (TOP + BOTTOM) / 2.0);
    svg + &format!(
        "<text class=\"middle\" transform=\"translate({at} {middle}) rotate(-90)\">\
         bus bandwidth, {GIBS}</text>\n"
    )
}

/// Returns the lines with their points, and their labels at the ends.
fn curves(lines: &BTreeMap<usize, SvgLine>, x: &ChartAxis, y: &ChartAxis) -> String {
    let mut svg = String::new();
    let mut names: Vec<(f64, &str, String)> = Vec::new();
    let mut colors = COLORS.iter().cycle();
    for (ranks, line) in lines {
        let pixels: SvgLine =
            line.iter().map(|point| (x.pixel(point.0), y.pixel(point.1))).collect();
        let path = pixels.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect::<Vec<_>>();
        let path = path.join(" ");
        let end = pixels.last().map_or(BOTTOM, |end| end.1);
        if *ranks == 0 {
            svg += &format!("<polyline class=\"line copy\" points=\"{path}\"/>\n");
            names.push((end, "#777", "copy".into()));
            continue;
        }
        let color = colors.next().unwrap_or(&COLORS[0]);
        svg += &format!("<polyline class=\"line\" stroke=\"{color}\" points=\"{path}\"/>\n");
        for (x, y) in pixels {
            // Writing to a string cannot fail.
            let _ =
                writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.2\" fill=\"{color}\"/>");
        }
        names.push((end, color, format!("{ranks} ranks")));
    }
    let ends: Vec<f64> = names.iter().map(|name| name.0).collect();
    for ((_, color, name), at) in names.iter().zip(apart(&ends)) {
        let (x, y) = (RIGHT + 9.0, at + 5.0);
        svg += &format!("<text x=\"{x}\" y=\"{y:.1}\" style=\"fill:{color}\">{name}</text>\n");
    }
    svg
}

/// Returns positions of labels near those wanted, at least [`LINE_HEIGHT`] from each other: from
/// the top down, each no higher than wanted, and then all moved up as far as the last one is
/// below the axis.
fn apart(wanted: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by(|a, b| wanted[*a].total_cmp(&wanted[*b]));
    let mut places = wanted.to_vec();
    for pair in 1..order.len() {
        let (above, below) = (order[pair - 1], order[pair]);
        places[below] = places[below].max(places[above] + LINE_HEIGHT);
    }
    let mut most = BOTTOM;
    for index in order.into_iter().rev() {
        places[index] = places[index].min(most);
        most = places[index] - LINE_HEIGHT;
    }
    places
}

fn segment(x1: f64, y1: f64, x2: f64, y2: f64) -> String {
    format!("<line class=\"grid\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_whole_powers_of_two_around_what_is_shown() {
        let axis = ChartAxis::around([12.0, 28.0, 13.3].into_iter(), 100.0, 900.0);
        assert_eq!((axis.least, axis.most), (12.0, 28.0));
        assert_eq!((axis.pixel(12.0), axis.pixel(20.0), axis.pixel(28.0)), (100.0, 500.0, 900.0));
        assert!(axis.ticks().eq((0..9).map(|tick| 12.0 + 2.0 * f64::from(tick))));
        let one = ChartAxis::around([3.0].into_iter(), 9.0, 0.0);
        assert_eq!((one.pixel(3.0), one.pixel(4.0)), (9.0, 0.0));
        let none = ChartAxis::around(std::iter::empty(), 0.0, 1.0);
        assert_eq!((none.least, none.most), (0.0, 1.0));
        let rates = ChartAxis::around([-3.5, 6.2].into_iter(), 0.0, 1.0);
        assert_eq!((rates.least, rates.most), (-4.0, 7.0));
    }

    #[test]
    fn names_keep_their_distance() {
        let places = apart(&[100.0, 300.0, 101.0, 102.0]);
        assert_eq!(places, [100.0, 300.0, 117.0, 134.0]);
        let low = apart(&[BOTTOM, BOTTOM - 3.0]);
        assert_eq!(low, [BOTTOM, BOTTOM - LINE_HEIGHT]);
        assert!(apart(&[]).is_empty());
    }

    #[test]
    fn signs_of_markup_are_escaped() {
        assert!(svg_text("", 0.0, 0.0, "A&B <1>").contains("A&amp;B &lt;1&gt;"));
    }
}
