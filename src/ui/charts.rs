//! Line charts as SVG: of the course of a run, and of reports of benchmarks. This module has their
//! common part: a plot of lines over a pair of axes.

mod axis;
pub mod collectives;
pub mod curves;
#[cfg(test)]
#[path = "../../tests/common/golden.rs"]
mod golden;
mod pairs;
pub mod pipelines;
pub mod scaling;

use std::io;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use axis::TickAxis;
use potluck_core::format::xml_character;

/// Units of a drawing per pixel: places are whole numbers, and pixels are too coarse for curves.
const UNIT: u32 = 10;
/// Heights of lines of text, in pixels, for which the drawing library takes fonts of four fifths;
/// and an estimate of a character's width as a part of the height.
const FONT: u32 = 16;
const TITLE: u32 = 22;
const CHARACTER: f64 = 0.48;
/// Colours that remain distinguishable with colour blindness (Okabe and Ito, "Color universal
/// design", 2008).
const BLUE: RGBColor = RGBColor(0x00, 0x72, 0xb2);
const ORANGE: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
const GREEN: RGBColor = RGBColor(0x00, 0x9e, 0x73);
const PURPLE: RGBColor = RGBColor(0xcc, 0x79, 0xa7);
const YELLOW: RGBColor = RGBColor(0xe6, 0x9f, 0x00);
const TEXT: RGBColor = RGBColor(0x33, 0x33, 0x33);
const GRID: RGBColor = RGBColor(0xe2, 0xe2, 0xe2);

/// Part of a drawing.
type SvgArea<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type DrawResult<T = ()> = Result<T, DrawingAreaErrorKind<io::Error>>;

struct PlotLine {
    points: Vec<(f64, f64)>,
    color: RGBAColor,
    /// Width in pixels.
    width: f64,
    /// Length in pixels of the dashes and of the gaps between them; `None` for a whole line.
    dash: Option<u32>,
    /// Points that are marked one by one.
    marks: Vec<(f64, f64)>,
}

impl PlotLine {
    /// Creates a line without dashes and marks.
    fn whole(points: Vec<(f64, f64)>, color: RGBAColor, width: f64) -> Self {
        Self { points, color, width, dash: None, marks: Vec::new() }
    }
}

/// Axis of a plot with its texts.
struct PlotAxis<'a> {
    axis: TickAxis,
    title: &'a str,
    /// Label of a tick.
    label: &'a dyn Fn(&f64) -> String,
    /// Pixels for labels and title.
    space: u32,
}

/// Lines over a pair of axes.
struct Plot<'a> {
    x: PlotAxis<'a>,
    y: PlotAxis<'a>,
    lines: Vec<PlotLine>,
    /// Pixels right of the plot.
    right: u32,
}

impl Plot<'_> {
    /// Draws the plot over an area; returns the place of the last point of each line.
    fn draw(&self, area: &SvgArea<'_>) -> DrawResult<Vec<Option<(i32, i32)>>> {
        let font = ("sans-serif", units(FONT)).into_font().color(&TEXT);
        let mut builder = ChartBuilder::on(area);
        if !self.y.title.is_empty() {
            // The title is centered on the margin, with half of its height beyond.
            builder.margin_left(units(FONT / 2));
        }
        let mut chart = builder
            .margin_right(units(self.right))
            .set_label_area_size(LabelAreaPosition::Left, units(self.y.space))
            .set_label_area_size(LabelAreaPosition::Bottom, units(self.x.space))
            .build_cartesian_2d(self.x.axis.clone(), self.y.axis.clone())?;
        let mut mesh = chart.configure_mesh();
        mesh.light_line_style(TRANSPARENT)
            .bold_line_style(GRID.stroke_width(UNIT))
            .axis_style(TRANSPARENT)
            .label_style(font.clone())
            .axis_desc_style(font)
            .set_tick_mark_size(LabelAreaPosition::Left, units(4))
            .set_tick_mark_size(LabelAreaPosition::Bottom, units(4))
            .x_labels(self.x.axis.count())
            .y_labels(self.y.axis.count())
            .x_label_formatter(self.x.label)
            .y_label_formatter(self.y.label);
        if !self.x.title.is_empty() {
            mesh.x_desc(self.x.title);
        }
        if !self.y.title.is_empty() {
            mesh.y_desc(self.y.title);
        }
        mesh.draw()?;
        for line in &self.lines {
            let style = line.color.stroke_width((line.width * f64::from(UNIT)) as u32);
            let points = line.points.iter().copied();
            if let Some(length) = line.dash {
                let length = units(length);
                chart.draw_series(DashedLineSeries::new(points, length, length, style))?;
            } else {
                chart.draw_series(LineSeries::new(points, style))?;
            }
            let marks = line.marks.iter();
            chart.draw_series(
                marks.map(|place| Circle::new(*place, units(3), line.color.filled())),
            )?;
        }
        let area = chart.plotting_area();
        let last = self.lines.iter().map(|line| line.points.last());
        Ok(last.map(|point| Some(area.map_coordinate(point?))).collect())
    }
}

/// Returns a drawing of `width` by `height` pixels as an SVG document.
///
/// # Errors
/// Returns the error of the drawing library, which has none for drawings in memory.
fn document(
    width: u32,
    height: u32,
    draw: impl FnOnce(&SvgArea<'_>) -> DrawResult,
) -> io::Result<String> {
    let mut svg = String::new();
    draw_document(&mut svg, (units(width) as u32, units(height) as u32), draw)
        .map_err(|why| io::Error::other(why.to_string()))?;
    let in_units = format!("<svg width=\"{}\" height=\"{}\"", width * UNIT, height * UNIT);
    let in_pixels = format!("<svg width=\"{width}\" height=\"{height}\"");
    Ok(svg.replacen(&in_units, &in_pixels, 1))
}

fn draw_document(
    svg: &mut String,
    size: (u32, u32),
    draw: impl FnOnce(&SvgArea<'_>) -> DrawResult,
) -> DrawResult {
    let root = SVGBackend::with_string(svg, size).into_drawing_area();
    root.fill(&WHITE)?;
    draw(&root)?;
    root.present()
}

/// Place of a pixel.
fn units(pixels: u32) -> i32 {
    (pixels * UNIT) as i32
}

/// Draws a text from a place on, in pixels: its left end and its middle.
fn text(
    area: &SvgArea<'_>,
    text: &str,
    place: (u32, u32),
    size: u32,
    color: RGBColor,
) -> DrawResult {
    text_at(area, text, (units(place.0), units(place.1)), size, color)
}

/// Draws a text from a place on, in units.
fn text_at(
    area: &SvgArea<'_>,
    text: &str,
    place: (i32, i32),
    size: u32,
    color: RGBColor,
) -> DrawResult {
    let style = ("sans-serif", units(size)).into_font().color(&color);
    // The drawing library escapes only the characters of markup.
    let text: String = text.chars().map(xml_character).collect();
    area.draw_text(&text, &style.pos(Pos::new(HPos::Left, VPos::Center)), place)
}
