//! Pairs of plots beside each other, below a heading with a legend: sizes, lines and their names.

use plotters::element::DashedPathElement;
use plotters::prelude::*;

use super::axis::TickAxis;
use super::{DrawResult, FONT, Plot, PlotAxis, PlotLine, SvgArea, TEXT, UNIT, text, units};
use potluck_bench::units::number;

/// Widths of the drawing and of a plot, and heights of its heading and of a row of plots, in
/// pixels.
pub(super) const WIDTH: u32 = 980;
pub(super) const PLOT: u32 = WIDTH / 2;
pub(super) const HEAD: u32 = 84;
pub(super) const ROW: u32 = 300;
/// Height of a plot's heading, and its spaces left, right and below, in pixels.
const HEADING: u32 = 28;
pub(super) const LEFT: u32 = 84;
const RIGHT: u32 = 26;
const BELOW: u32 = 48;
/// Height of the legend in the heading.
pub(super) const LEGEND: u32 = 62;
/// Lengths of dashes in pixels, of predictions and of what measurements are compared with.
pub(super) const PREDICTED: u32 = 7;
pub(super) const COMPARED: u32 = 3;

/// Kind of lines in a legend.
pub(super) struct LineKind {
    pub name: &'static str,
    pub color: RGBColor,
    /// Length of the dashes; `None` for measured values.
    pub dash: Option<u32>,
}

/// Returns a line of measured values, whole and with its points marked, or a dashed one.
pub(super) fn line(points: Vec<(f64, f64)>, color: RGBColor, dash: Option<u32>) -> PlotLine {
    let marks = if dash.is_none() { points.clone() } else { Vec::new() };
    let width = if dash.is_none() { 2.2 } else { 1.5 };
    PlotLine { points, color: color.to_rgba(), width, dash, marks }
}

/// Draws kinds of lines with their names, from `left` on, `apart` pixels from each other.
pub(super) fn draw_kinds(
    head: &SvgArea<'_>,
    kinds: &[LineKind],
    left: u32,
    apart: u32,
) -> DrawResult {
    for (index, LineKind { name, color, dash }) in kinds.iter().enumerate() {
        let x = left + apart * index as u32;
        let ends = [(units(x), units(LEGEND)), (units(x + 30), units(LEGEND))];
        let style = color.stroke_width(2 * UNIT);
        match dash {
            Some(length) => {
                let length = units(*length);
                head.draw(&DashedPathElement::new(ends, length, length, style))?;
            }
            None => head.draw(&PathElement::new(ends, style))?,
        }
        text(head, name, (x + 36, LEGEND), FONT, TEXT)?;
    }
    Ok(())
}

/// Axis of a plot of a pair: places of cases side by side.
pub(super) struct CaseAxis<'a> {
    pub count: usize,
    pub title: &'a str,
    /// Label of a place.
    pub label: &'a dyn Fn(&f64) -> String,
}

/// Draws lines over cases. Plots begin at 0, so that heights compare.
pub(super) fn draw_over(
    area: &SvgArea<'_>,
    title: &str,
    cases: &CaseAxis<'_>,
    lines: Vec<PlotLine>,
) -> DrawResult {
    let mut most: f64 = 0.0;
    for line in &lines {
        for (_, value) in &line.points {
            most = most.max(*value);
        }
    }
    let (heading, area) = area.split_vertically(units(HEADING));
    text(&heading, title, (LEFT, HEADING / 2), FONT, TEXT)?;
    let plot = Plot {
        x: PlotAxis {
            axis: TickAxis::places(cases.count),
            title: cases.title,
            label: cases.label,
            space: BELOW,
        },
        y: PlotAxis {
            axis: TickAxis::from_zero(most),
            title: "",
            label: &|value| if *value == 0.0 { "0".into() } else { number(*value) },
            space: LEFT,
        },
        lines,
        right: RIGHT,
    };
    plot.draw(&area)?;
    Ok(())
}
