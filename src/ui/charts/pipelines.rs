//! Chart of throughput and bubble over the number of micro-batches: a row of two plots per number
//! of stages, with a line per schedule, and for bubbles the prediction and the formula beside the
//! measurement.

use std::io;

use plotters::prelude::*;

use super::pairs::{
    COMPARED, CaseAxis, HEAD, LEFT, LEGEND, LineKind, PLOT, PREDICTED, ROW, WIDTH, draw_kinds,
    draw_over, line,
};
use super::{
    BLUE, DrawResult, FONT, GREEN, ORANGE, PURPLE, SvgArea, TEXT, TITLE, document, text, units,
};
use potluck_bench::{FigureKind, PipelineFigure, Report};
use potluck_parallel::PipelineSchedule;

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
    Shown { value: |(_, step)| 100.0 * step.formula_bubble, dash: Some(COMPARED) },
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
    for (index, schedule) in PipelineSchedule::ALL.into_iter().enumerate() {
        let x = LEFT + 100 * index as u32;
        text(head, schedule.name(), (x, LEGEND), FONT, color(schedule))?;
    }
    let kinds = [
        LineKind { name: "measured", color: TEXT, dash: None },
        LineKind { name: "predicted", color: TEXT, dash: Some(PREDICTED) },
        LineKind { name: "formula", color: TEXT, dash: Some(COMPARED) },
    ];
    draw_kinds(head, &kinds, PLOT + LEFT, 120)
}

/// Draws a plot over the micro-batches, with a line per schedule and value.
fn draw_plot(area: &SvgArea<'_>, steps: &[DrawnStep], title: &str, shown: &[Shown]) -> DrawResult {
    let counts = distinct(steps.iter().map(|(_, step)| step.micro_batches));
    let mut lines = Vec::new();
    for schedule in PipelineSchedule::ALL {
        for Shown { value, dash } in shown {
            let mut points = Vec::new();
            for step in steps {
                if step.1.schedule != schedule {
                    continue;
                }
                let place = counts.iter().position(|count| *count == step.1.micro_batches);
                points.push((place.unwrap_or(0) as f64, value(step)));
            }
            if points.is_empty() {
                continue;
            }
            lines.push(line(points, color(schedule), *dash));
        }
    }
    let cases = CaseAxis {
        count: counts.len(),
        title: "micro-batches",
        label: &|place| match counts.get(*place as usize) {
            Some(count) => count.to_string(),
            None => String::new(),
        },
    };
    draw_over(area, title, &cases, lines)
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
