//! Chart of throughput and bubble over the number of micro-batches: a row of two plots per number
//! of stages, with a line per schedule, and for bubbles the prediction and the formula beside the
//! measurement.

use std::io;

use plotters::element::DashedPathElement;
use plotters::prelude::*;

use super::axis::TickAxis;
use super::{
    BLUE, DrawResult, FONT, GREEN, ORANGE, PURPLE, Plot, PlotAxis, PlotLine, SvgArea, TEXT, TITLE,
    document, text, units,
};
use potluck_bench::units::number;
use potluck_bench::{FigureKind, PipelineFigure, Report};
use potluck_parallel::PipelineSchedule;

/// Widths of the drawing and of a plot, and heights of its heading and of a row, in pixels.
const WIDTH: u32 = 980;
const PLOT: u32 = WIDTH / 2;
const HEAD: u32 = 84;
const ROW: u32 = 300;
/// Height of a plot's heading, and its spaces left, right and below, in pixels.
const HEADING: u32 = 28;
const LEFT: u32 = 84;
const RIGHT: u32 = 26;
const BELOW: u32 = 48;
/// Lengths of dashes in pixels.
const PREDICTED: u32 = 7;
const FORMULA: u32 = 3;

fn color(schedule: PipelineSchedule) -> RGBColor {
    match schedule {
        PipelineSchedule::GPipe => ORANGE,
        PipelineSchedule::OneFOneB => BLUE,
        PipelineSchedule::Interleaved => GREEN,
        PipelineSchedule::ZeroBubble => PURPLE,
    }
}

/// Step of a pipeline with its tokens per second.
type DrawnStep<'a> = (f64, &'a PipelineFigure);

/// Value of a step that a line shows, and the length of the line's dashes; `None` for a measured
/// value, whose line is whole with its points marked.
struct Shown {
    value: fn(&DrawnStep) -> f64,
    dash: Option<u32>,
}

const RATES: [Shown; 1] = [Shown { value: |(rate, _)| *rate, dash: None }];
const BUBBLES: [Shown; 3] = [
    Shown { value: |(_, step)| 100.0 * step.formula_bubble, dash: Some(FORMULA) },
    Shown { value: |(_, step)| 100.0 * step.predicted_bubble, dash: Some(PREDICTED) },
    Shown { value: |(_, step)| 100.0 * step.bubble, dash: None },
];

/// Returns the drawing as an SVG document. A report without pipelines gives a drawing without
/// plots.
///
/// # Errors
/// Returns the error of the drawing library, which has none for drawings in memory.
pub fn draw(report: &Report) -> io::Result<String> {
    let mut names = Vec::new();
    let mut steps: Vec<DrawnStep> = Vec::new();
    for device in &report.devices {
        names.push(device.name.as_str());
        for figure in &device.figures {
            if let FigureKind::Pipeline(step) = &figure.kind {
                steps.push((figure.median, step));
            }
        }
    }
    let stages = distinct(steps.iter().map(|(_, step)| step.stages));
    let title = format!("Pipelines: {}", names.join(", "));
    document(WIDTH, HEAD + ROW * stages.len() as u32, |root| {
        let (head, mut rest) = root.split_vertically(units(HEAD));
        text(&head, &title, (LEFT, 30), TITLE, TEXT)?;
        draw_legend(&head)?;
        for count in stages {
            let mut of_row = steps.clone();
            of_row.retain(|(_, step)| step.stages == count);
            let (row, others) = rest.split_vertically(units(ROW));
            rest = others;
            let (left, right) = row.split_horizontally(units(PLOT));
            draw_plot(&left, &of_row, &format!("tokens/s, {count} stages"), &RATES)?;
            draw_plot(&right, &of_row, &format!("bubble in %, {count} stages"), &BUBBLES)?;
        }
        Ok(())
    })
}

fn distinct(values: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut values: Vec<usize> = values.collect();
    values.sort_unstable();
    values.dedup();
    values
}

/// Draws the names of the schedules in their colours, and of the kinds of lines.
fn draw_legend(head: &SvgArea<'_>) -> DrawResult {
    const Y: u32 = 62;
    for (index, schedule) in PipelineSchedule::ALL.into_iter().enumerate() {
        let x = LEFT + 100 * index as u32;
        text(head, schedule.name(), (x, Y), FONT, color(schedule))?;
    }
    let kinds = [(None, "measured"), (Some(PREDICTED), "predicted"), (Some(FORMULA), "formula")];
    for (index, (dash, name)) in kinds.into_iter().enumerate() {
        let x = PLOT + LEFT + 120 * index as u32;
        let ends = [(units(x), units(Y)), (units(x + 30), units(Y))];
        let style = TEXT.stroke_width(2 * super::UNIT);
        match dash {
            Some(length) => {
                let length = units(length);
                head.draw(&DashedPathElement::new(ends, length, length, style))?;
            }
            None => head.draw(&PathElement::new(ends, style))?,
        }
        text(head, name, (x + 36, Y), FONT, TEXT)?;
    }
    Ok(())
}

/// Draws a plot over the micro-batches, with a line per schedule and value. Plots begin at 0, so
/// that heights compare.
fn draw_plot(area: &SvgArea<'_>, steps: &[DrawnStep], title: &str, shown: &[Shown]) -> DrawResult {
    let counts = distinct(steps.iter().map(|(_, step)| step.micro_batches));
    let mut lines = Vec::new();
    let mut most: f64 = 0.0;
    for schedule in PipelineSchedule::ALL {
        for Shown { value, dash } in shown {
            let mut points = Vec::new();
            for step in steps {
                if step.1.schedule != schedule {
                    continue;
                }
                let place = counts.iter().position(|count| *count == step.1.micro_batches);
                points.push((place.unwrap_or(0) as f64, value(step)));
                most = most.max(value(step));
            }
            if points.is_empty() {
                continue;
            }
            let marks = if dash.is_none() { points.clone() } else { Vec::new() };
            let width = if dash.is_none() { 2.2 } else { 1.5 };
            let color = color(schedule).to_rgba();
            lines.push(PlotLine { points, color, width, dash: *dash, marks });
        }
    }
    let (heading, area) = area.split_vertically(units(HEADING));
    text(&heading, title, (LEFT, HEADING / 2), FONT, TEXT)?;
    let plot = Plot {
        x: PlotAxis {
            axis: TickAxis::places(counts.len()),
            title: "micro-batches",
            label: &|place| match counts.get(*place as usize) {
                Some(count) => count.to_string(),
                None => String::new(),
            },
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::ui::charts::golden::assert_golden;

    /// Every schedule with two stages, and one with three; the interleaved one has one point.
    fn report() -> Report {
        let mut figures = Vec::new();
        let mut add = |schedule: &str, stages: usize, count: usize, share: f64| {
            let ideal = (stages - 1) as f64 / (count + stages - 1) as f64;
            let step = json!({
                "schedule": schedule, "stages": stages, "chunks": 1, "micro_batches": count,
                "blocks": [2, 2], "step_s": 0.5, "predicted_s": 0.5, "bubble": share * ideal,
                "predicted_bubble": 0.5 * ideal, "formula_bubble": ideal,
            });
            let rate = 1000.0 * (1.0 - share * ideal);
            figures.push(json!({
                "name": format!("pipeline.{schedule}.{stages}.{count}"),
                "kind": { "pipeline": step }, "unit": "tokens/s", "median": rate, "min": rate,
                "max": rate, "samples": 5, "better": "higher",
            }));
        };
        for (schedule, share) in [("gpipe", 1.5), ("1f1b", 1.25), ("zero-bubble", 0.75)] {
            for count in [4, 8, 16] {
                add(schedule, 2, count, share);
            }
        }
        add("interleaved", 2, 4, 1.0);
        for count in [4, 8] {
            add("1f1b", 3, count, 1.125);
        }
        let system = json!({
            "os": "linux", "architecture": "x86_64", "cpu": "a <CPU>", "cores": 2, "wgpu": "30.0.1",
        });
        let device = json!({
            "name": "cpu + cpu 2", "api": "cpu", "driver": "", "kind": "", "figures": figures,
            "skipped": [], "error": null,
        });
        let report = json!({
            "schema": 2, "potluck": "0.1.0", "effort": "normal", "system": system,
            "devices": [device],
        });
        Report::from_json(&report.to_string()).unwrap()
    }

    #[test]
    fn pipelines_are_the_golden_ones() {
        assert_golden("pipelines.svg", &draw(&report()).unwrap());
    }
}
