//! Chart of scaling over the number of devices: samples per second beside the sum of the devices
//! alone and the prediction, and efficiency.

use std::io;

use super::pairs::{
    COMPARED, CaseAxis, HEAD, LEFT, LineKind, PLOT, PREDICTED, ROW, WIDTH, draw_kinds, draw_over,
    line,
};
use super::{
    BLUE, DrawResult, GREEN, ORANGE, PlotLine, SvgArea, TEXT, TITLE, document, text, units,
};
use potluck_bench::{FigureKind, Report, ScalingFigure};

/// Measured case: the samples per second of some devices, the fastest ones.
struct DrawnCase<'a> {
    samples_per_s: f64,
    figure: &'a ScalingFigure,
}

impl DrawnCase<'_> {
    /// Place on the axis of numbers of devices.
    fn place(&self) -> f64 {
        self.figure.devices.len() as f64 - 1.0
    }

    fn predicted_per_s(&self) -> Option<f64> {
        let predicted_s = self.figure.predicted_s?;
        Some(self.samples_per_s * self.figure.step_s / predicted_s)
    }
}

/// Returns the drawing as an SVG document. A report without scaling gives axes without lines.
///
/// # Errors
/// Returns the error of the drawing library, which has none for drawings in memory.
pub fn draw(report: &Report) -> io::Result<String> {
    let names: Vec<&str> = report.devices.iter().map(|device| device.name.as_str()).collect();
    let title = format!("Scaling: {}", names.join(", "));
    let cases = cases(report);
    document(WIDTH, HEAD + ROW, |root| {
        let (head, row) = root.split_vertically(units(HEAD));
        text(&head, &title, (LEFT, 30), TITLE, TEXT)?;
        let kinds = [
            LineKind { name: "measured", color: BLUE, dash: None },
            LineKind { name: "predicted", color: ORANGE, dash: Some(PREDICTED) },
            LineKind { name: "sum of the devices alone", color: GREEN, dash: Some(COMPARED) },
        ];
        draw_kinds(&head, &kinds, LEFT, 140)?;
        let (left, right) = row.split_horizontally(units(PLOT));
        draw_plot(&left, "samples/s", rate_lines(&cases), cases.len())?;
        draw_plot(&right, "efficiency in %", efficiency_lines(&cases), cases.len())
    })
}

/// Cases of 1, 2, .. devices; of the devices alone only the first, which is the fastest.
fn cases(report: &Report) -> Vec<DrawnCase<'_>> {
    let mut cases: Vec<DrawnCase> = Vec::new();
    for device in &report.devices {
        for figure in &device.figures {
            let FigureKind::Scaling(found) = &figure.kind else { continue };
            if found.devices.len() == cases.len() + 1 {
                cases.push(DrawnCase { samples_per_s: figure.median, figure: found });
            }
        }
    }
    cases
}

fn rate_lines(cases: &[DrawnCase]) -> Vec<PlotLine> {
    let mut alone = Vec::new();
    let mut predicted = Vec::new();
    let mut measured = Vec::new();
    for case in cases {
        alone.push((case.place(), case.samples_per_s / case.figure.efficiency));
        measured.push((case.place(), case.samples_per_s));
        if let Some(rate) = case.predicted_per_s() {
            predicted.push((case.place(), rate));
        }
    }
    let mut lines = vec![line(alone, GREEN, Some(COMPARED))];
    if !predicted.is_empty() {
        lines.push(line(predicted, ORANGE, Some(PREDICTED)));
    }
    lines.push(line(measured, BLUE, None));
    lines
}

fn efficiency_lines(cases: &[DrawnCase]) -> Vec<PlotLine> {
    let points = cases.iter().map(|case| (case.place(), 100.0 * case.figure.efficiency));
    vec![line(points.collect(), BLUE, None)]
}

fn draw_plot(area: &SvgArea<'_>, title: &str, lines: Vec<PlotLine>, count: usize) -> DrawResult {
    let cases = CaseAxis {
        count,
        title: "devices, the fastest first",
        label: &|place| (*place as usize + 1).to_string(),
    };
    draw_over(area, title, &cases, lines)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::ui::charts::golden::assert_golden;

    fn figure(name: &str, devices: &[&str], step_s: f64, predicted_s: Option<f64>) -> Value {
        let mut scaling = json!({
            "devices": devices, "step_s": step_s, "speedup": 0.5 / step_s,
            "efficiency": if devices.len() == 1 { 1.0 } else { 0.875 },
        });
        if let Some(predicted_s) = predicted_s {
            scaling["predicted_s"] = predicted_s.into();
        }
        let rate = 32.0 / step_s;
        json!({
            "name": name, "kind": { "scaling": scaling }, "unit": "samples/s", "median": rate,
            "min": rate, "max": rate, "samples": 5, "better": "higher",
        })
    }

    /// Three devices alone, two and three of them together.
    fn report() -> Report {
        let system = json!({
            "os": "linux", "architecture": "x86_64", "cpu": "a <CPU>", "cores": 2, "wgpu": "30.0.1",
        });
        let figures = [
            figure("scaling.1_device", &["a"], 0.5, None),
            figure("scaling.alone_2", &["b"], 1.0, None),
            figure("scaling.alone_3", &["c"], 2.0, None),
            figure("scaling.2_devices", &["a", "b"], 0.375, Some(0.34375)),
            figure("scaling.3_devices", &["a", "b", "c"], 0.3125, Some(0.28125)),
        ];
        let device = json!({
            "name": "a + b + c", "api": "cpu", "driver": "", "kind": "", "figures": figures,
            "skipped": [], "error": null,
        });
        let report = json!({
            "schema": 2, "potluck": "0.1.0", "effort": "normal", "system": system,
            "devices": [device],
        });
        Report::from_json(&report.to_string()).unwrap()
    }

    #[test]
    fn scaling_is_the_golden_one() {
        assert_golden("scaling.svg", &draw(&report()).unwrap());
    }
}
