//! SVG chart of throughput and bubble over the number of micro-batches: a row of two plots per
//! number of stages, with a line per schedule, and for bubbles the prediction and the formula
//! beside the measurement.

use std::fmt::Write;

use crate::report::{FigureKind, PipelineFigure, Report};
use crate::units::number;
use potluck_core::format::svg_text;
use potluck_parallel::PipelineSchedule;

/// Size of the drawing and of its plots in pixels; the height depends on the number of rows.
const WIDTH: f64 = 980.0;
const HEAD: f64 = 84.0;
const ROW: f64 = 300.0;
const PLOT_WIDTH: f64 = 380.0;
const PLOT_HEIGHT: f64 = 210.0;
/// Left ends of both plots.
const LEFT: [f64; 2] = [84.0, 564.0];
/// Horizontal lines of a plot.
const TICKS: usize = 4;
const STYLE: &str = "\
text { font: 13px sans-serif; fill: #333 }
.title { font-size: 18px }
.grid { stroke: #e2e2e2 }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round }
.predicted { stroke-dasharray: 7 5; stroke-width: 1.5 }
.formula { stroke-dasharray: 2 4; stroke-width: 1.5 }
.middle { text-anchor: middle }
.end { text-anchor: end }
";

/// Returns a colour that remains distinguishable with colour blindness (Okabe and Ito, "Color
/// universal design", 2008).
fn color(schedule: PipelineSchedule) -> &'static str {
    match schedule {
        PipelineSchedule::GPipe => "#d55e00",
        PipelineSchedule::OneFOneB => "#0072b2",
        PipelineSchedule::Interleaved => "#009e73",
        PipelineSchedule::ZeroBubble => "#cc79a7",
    }
}

/// Step of a pipeline with its tokens per second.
type DrawnStep<'a> = (f64, &'a PipelineFigure);

/// Value of a step that a line shows.
type ShownValue = fn(&DrawnStep) -> f64;

/// Returns the drawing as SVG. A report without pipelines gives a drawing without plots.
pub fn draw(report: &Report) -> String {
    let figures = report.devices.iter().flat_map(|device| &device.figures);
    let steps: Vec<DrawnStep> = figures
        .filter_map(|figure| match &figure.kind {
            FigureKind::Pipeline(step) => Some((figure.median, step)),
            _ => None,
        })
        .collect();
    let stages = distinct(steps.iter().map(|(_, step)| step.stages));
    let height = HEAD + ROW * stages.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         width=\"{WIDTH}\" height=\"{height}\">\n<style>\n{STYLE}</style>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let names: Vec<&str> = report.devices.iter().map(|device| device.name.as_str()).collect();
    svg += &svg_text("title", LEFT[0], 34.0, &format!("Pipelines: {}", names.join(", ")));
    svg += &legend();
    for (row, count) in stages.iter().enumerate() {
        let of_row: Vec<DrawnStep> =
            steps.iter().filter(|(_, step)| step.stages == *count).copied().collect();
        let top = HEAD + ROW * row as f64 + 24.0;
        let rates: [(&str, ShownValue); 1] = [("line", |(rate, _)| *rate)];
        svg += &plot(&of_row, (LEFT[0], top), &format!("tokens/s, {count} stages"), &rates);
        let bubbles: [(&str, ShownValue); 3] = [
            ("line formula", |(_, step)| 100.0 * step.formula_bubble),
            ("line predicted", |(_, step)| 100.0 * step.predicted_bubble),
            ("line", |(_, step)| 100.0 * step.bubble),
        ];
        svg += &plot(&of_row, (LEFT[1], top), &format!("bubble in %, {count} stages"), &bubbles);
    }
    svg + "</svg>\n"
}

fn distinct(values: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut values: Vec<usize> = values.collect();
    values.sort_unstable();
    values.dedup();
    values
}

/// Returns the names of the schedules in their colours, and of the kinds of lines.
fn legend() -> String {
    let mut svg = String::new();
    let y = 60.0;
    for (index, schedule) in PipelineSchedule::ALL.into_iter().enumerate() {
        let (x, color) = (LEFT[0] + 110.0 * index as f64, color(schedule));
        // Writing to a string cannot fail.
        let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\" style=\"fill:{color}\">{schedule}</text>");
    }
    for (index, (class, name)) in
        [("", "measured"), ("predicted", "predicted"), ("formula", "formula")].iter().enumerate()
    {
        let x = LEFT[1] + 120.0 * index as f64;
        let (end, at) = (x + 30.0, y - 4.0);
        svg += &format!(
            "<polyline class=\"line {class}\" stroke=\"#333\" points=\"{x},{at} {end},{at}\"/>\n"
        );
        svg += &svg_text("", end + 6.0, y, name);
    }
    svg
}

/// Returns a plot over the micro-batches, with a line per schedule and value.
fn plot(
    steps: &[DrawnStep],
    (left, top): (f64, f64),
    title: &str,
    shown: &[(&str, ShownValue)],
) -> String {
    let counts = distinct(steps.iter().map(|(_, step)| step.micro_batches));
    let values = shown.iter().flat_map(|(_, value)| steps.iter().map(value));
    // Plots begin at 0, so that heights compare; a plot of zeros has some height nevertheless.
    let most = rounded_up(values.fold(0.0, f64::max).max(1e-9));
    let bottom = top + PLOT_HEIGHT;
    let x = |count: usize| {
        let index = counts.iter().position(|one| *one == count).unwrap_or(0);
        left + PLOT_WIDTH * (index as f64 + 0.5) / counts.len().max(1) as f64
    };
    let y = |value: f64| bottom - PLOT_HEIGHT * value / most;
    let mut svg = svg_text("", left, top - 8.0, title);
    for tick in 0..=TICKS {
        let value = most * tick as f64 / TICKS as f64;
        let (at, right) = (y(value), left + PLOT_WIDTH);
        let label = if tick == 0 { "0".into() } else { number(value) };
        svg += &format!(
            "<line class=\"grid\" x1=\"{left}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\"/>\n"
        );
        svg += &svg_text("end", left - 6.0, at + 4.0, &label);
    }
    for count in &counts {
        svg += &svg_text("middle", x(*count), bottom + 18.0, &count.to_string());
    }
    svg += &svg_text("middle", left + PLOT_WIDTH / 2.0, bottom + 38.0, "micro-batches");
    for schedule in PipelineSchedule::ALL {
        for (class, value) in shown {
            let of_schedule = steps.iter().filter(|(_, step)| step.schedule == schedule);
            let points: Vec<(f64, f64)> =
                of_schedule.map(|step| (x(step.1.micro_batches), y(value(step)))).collect();
            svg += &curve(class, color(schedule), &points);
        }
    }
    svg
}

/// Returns the end of an axis from 0 whose lines are at round values.
fn rounded_up(most: f64) -> f64 {
    let step = most / TICKS as f64;
    let power = 10f64.powf(step.log10().floor());
    let round = [1.0, 2.0, 2.5, 5.0].map(|factor| factor * power);
    round.into_iter().find(|one| *one >= step).unwrap_or(10.0 * power) * TICKS as f64
}

/// Returns a line through points, which are marked if they were measured.
fn curve(class: &str, color: &str, points: &[(f64, f64)]) -> String {
    if points.is_empty() {
        return String::new();
    }
    let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let path = path.join(" ");
    let mut svg = format!("<polyline class=\"{class}\" stroke=\"{color}\" points=\"{path}\"/>\n");
    for (x, y) in points.iter().filter(|_| class == "line") {
        // Writing to a string cannot fail.
        let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.2\" fill=\"{color}\"/>");
    }
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_values() {
        let close = |most: f64, end: f64| (rounded_up(most) / end - 1.0).abs() < 1e-9;
        assert!(close(96_220.0, 100_000.0) && close(30.6, 40.0) && close(3.9, 4.0));
        assert!(close(0.3, 0.4) && close(21.0, 40.0) && close(8.0, 8.0));
    }
}
