//! Drawing of the curves of a run as SVG: a panel of losses, one per other metric, and one of the
//! learning rate, over the same axis of steps.

use std::io;
use std::ops::Range;

use plotters::prelude::*;

use super::axis::TickAxis;
use super::{
    BLUE, CHARACTER, DrawResult, FONT, GREEN, ORANGE, PURPLE, Plot, PlotAxis, PlotLine, SvgArea,
    TEXT, TITLE, document, text, units,
};
use potluck_core::format::grouped;
use potluck_core::metrics::{Curve, CurvePoint, Curves};

/// Width of the drawing, and heights of its parts, in pixels.
const WIDTH: u32 = 800;
const HEAD: u32 = 44;
const LOSS: u32 = 320;
const METRIC: u32 = 190;
const LR: u32 = 140;
/// Heights of a panel's heading and of the labels below the last panel.
const HEADING: u32 = 28;
const BELOW: u32 = 48;
/// Space for labels left of a panel, and right of it.
const LEFT: u32 = 72;
const RIGHT: u32 = 28;
/// Most labels of steps.
const X_TICKS: usize = 10;
/// Most points that are marked one by one.
const MARKED_MAX: usize = 100;
/// Share of a curve, to each side of a point, over which its smoothed line takes means; and minimum
/// number of points to each side for a smoothed line.
const SMOOTHING: f64 = 0.02;
const SMOOTHED_MIN: usize = 2;

/// Appearance of a curve.
#[derive(Clone, Copy, PartialEq)]
enum CurveStyle {
    /// A thin line of all values below a smoothed one.
    Noisy,
    /// A line with its points marked.
    Marked,
    Plain,
}

/// Curve in a panel.
struct NamedCurve<'a> {
    name: &'a str,
    curve: &'a Curve,
    color: RGBColor,
    style: CurveStyle,
}

/// Panel of curves with one vertical axis.
struct Panel<'a> {
    height: u32,
    curves: Vec<NamedCurve<'a>>,
    /// True if the vertical axis begins at 0.
    from_zero: bool,
}

/// Returns the drawing as an SVG document. Curves without points are left out.
///
/// # Errors
/// Returns the error of the drawing library, which has none for drawings in memory.
pub fn draw(curves: &Curves, title: &str) -> io::Result<String> {
    let panels = panels(curves);
    let height = HEAD + panels.iter().map(|panel| panel.height).sum::<u32>() + BELOW;
    document(WIDTH, height, |root| draw_panels(root, &panels, &steps(curves), title))
}

/// Panels that have points, from top to bottom.
fn panels(curves: &Curves) -> Vec<Panel<'_>> {
    use CurveStyle::{Marked, Noisy, Plain};
    let loss = NamedCurve { name: "training loss", curve: &curves.loss, color: BLUE, style: Noisy };
    let val_loss =
        NamedCurve { name: "val_loss", curve: &curves.val_loss, color: ORANGE, style: Marked };
    let lr = NamedCurve { name: "learning rate", curve: &curves.lr, color: PURPLE, style: Plain };
    let mut panels = vec![Panel { height: LOSS, curves: vec![loss, val_loss], from_zero: false }];
    for (name, curve) in &curves.metrics {
        let metric = NamedCurve { name, curve, color: GREEN, style: Marked };
        panels.push(Panel { height: METRIC, curves: vec![metric], from_zero: false });
    }
    panels.push(Panel { height: LR, curves: vec![lr], from_zero: true });
    for panel in &mut panels {
        panel.curves.retain(|named| !named.curve.points().is_empty());
    }
    panels.retain(|panel| !panel.curves.is_empty());
    panels
}

/// Steps of all curves, as a range that is not empty.
fn steps(curves: &Curves) -> Range<f64> {
    let mut all: Option<Range<f64>> = None;
    for curve in curves.all() {
        let (Some(first), Some((last, _))) = (curve.points().first(), curve.last()) else {
            continue;
        };
        let steps = first.step.floor()..last as f64;
        all = Some(match all {
            Some(all) => all.start.min(steps.start)..all.end.max(steps.end),
            None => steps,
        });
    }
    let all = all.unwrap_or(0.0..1.0);
    if all.start < all.end { all } else { all.start..all.start + 1.0 }
}

fn draw_panels(
    root: &SvgArea<'_>,
    panels: &[Panel<'_>],
    steps: &Range<f64>,
    title: &str,
) -> DrawResult {
    let (head, mut rest) = root.split_vertically(units(HEAD));
    text(&head, &title_text(title), (LEFT, HEAD / 2 + 4), TITLE, TEXT)?;
    for (index, panel) in panels.iter().enumerate() {
        let is_last = index + 1 == panels.len();
        let below = if is_last { BELOW } else { 0 };
        let (area, others) = rest.split_vertically(units(panel.height + below));
        rest = others;
        draw_panel(&area, panel, steps, below)?;
    }
    Ok(())
}

/// Returns a title that fits: the end of a longer one, such as a path.
fn title_text(title: &str) -> String {
    let most = (f64::from(WIDTH - LEFT - RIGHT) / (f64::from(TITLE) * CHARACTER)) as usize;
    let count = title.chars().count();
    if count <= most {
        return title.to_string();
    }
    let mut short = String::from("..");
    short.extend(title.chars().skip(count + 2 - most));
    short
}

/// Draws a panel; steps are labelled if there is space `below` for it.
fn draw_panel(area: &SvgArea<'_>, panel: &Panel<'_>, steps: &Range<f64>, below: u32) -> DrawResult {
    let (heading, plot) = area.split_vertically(units(HEADING));
    let mut left = LEFT;
    for NamedCurve { name, curve, color, .. } in &panel.curves {
        let name = match curve.last() {
            Some((_, value)) => format!("{name} {}", value_text(value)),
            None => name.to_string(),
        };
        text(&heading, &name, (left, HEADING / 2 + 2), FONT, *color)?;
        left += (f64::from(FONT) * CHARACTER * name.len() as f64) as u32 + 20;
    }
    let y = TickAxis::round(values(panel), (panel.height / 30) as usize);
    let is_labelled = below > 0;
    let plotted = Plot {
        x: PlotAxis {
            axis: TickAxis::round(steps.clone(), X_TICKS),
            title: if is_labelled { "steps" } else { "" },
            label: &|step| if is_labelled { step_text(*step) } else { String::new() },
            space: if is_labelled { below } else { 6 },
        },
        y: PlotAxis { axis: y.clone(), title: "", label: &|value| y.label(*value), space: LEFT },
        lines: panel.curves.iter().flat_map(lines).collect(),
        right: RIGHT,
    };
    plotted.draw(&plot)?;
    Ok(())
}

fn lines(named: &NamedCurve<'_>) -> Vec<PlotLine> {
    let points = named.curve.points();
    let color = named.color.to_rgba();
    if named.style == CurveStyle::Noisy
        && let Some(means) = smoothed(points)
    {
        let noise = PlotLine::whole(extremes(points), named.color.mix(0.3), 1.0);
        return vec![noise, PlotLine::whole(means, color, 2.2)];
    }
    let mut plain = PlotLine::whole(extremes(points), color, 2.0);
    let is_marked = named.style == CurveStyle::Marked || points.len() == 1;
    if is_marked && points.len() <= MARKED_MAX {
        plain.marks = points.iter().map(|point| (point.step, point.mean)).collect();
    }
    vec![plain]
}

/// Range of a panel's values with some space around them; it is not empty.
fn values(panel: &Panel<'_>) -> Range<f64> {
    let mut most = f64::NEG_INFINITY;
    let mut least = f64::INFINITY;
    for named in &panel.curves {
        for point in named.curve.points() {
            most = most.max(point.most);
            least = least.min(point.least);
        }
    }
    let least = if panel.from_zero { least.min(0.0) } else { least };
    let space = match most - least {
        0.0 if most == 0.0 => 1.0,
        0.0 => 0.1 * most.abs(),
        length => 0.05 * length,
    };
    let below = if panel.from_zero && least == 0.0 { 0.0 } else { space };
    least - below..most + space
}

/// Returns the line through all points; for a point that merges several values, through the least
/// and the greatest.
fn extremes(points: &[CurvePoint]) -> Vec<(f64, f64)> {
    let mut line = Vec::with_capacity(2 * points.len());
    for point in points {
        line.push((point.step, point.least));
        if point.least < point.most {
            line.push((point.step, point.most));
        }
    }
    line
}

/// Returns the means of a curve over neighbouring points, equally many to both sides; `None` if
/// there are too few points.
fn smoothed(points: &[CurvePoint]) -> Option<Vec<(f64, f64)>> {
    let reach_max = (SMOOTHING * points.len() as f64) as usize;
    if reach_max < SMOOTHED_MIN {
        return None;
    }
    let mut means = Vec::with_capacity(points.len());
    for (index, point) in points.iter().enumerate() {
        let reach = reach_max.min(index).min(points.len() - 1 - index);
        let near = &points[index - reach..=index + reach];
        let sum: f64 = near.iter().map(|point| point.mean).sum();
        means.push((point.step, sum / near.len() as f64));
    }
    Some(means)
}

/// Formats a value with at most four significant digits.
fn value_text(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        size if (1e-3..1e5).contains(&size) => {
            let digits = (3 - size.log10().floor() as i32).max(0) as usize;
            without_zeros(&format!("{value:.digits$}")).into()
        }
        _ => {
            let text = format!("{value:.3e}");
            let (digits, power) = text.split_once('e').unwrap_or((&text, "0"));
            format!("{}e{power}", without_zeros(digits))
        }
    }
}

/// A number without the zeros at the end of its fraction.
fn without_zeros(number: &str) -> &str {
    if number.contains('.') { number.trim_end_matches('0').trim_end_matches('.') } else { number }
}

/// Formats a step; places between steps have no label.
fn step_text(step: f64) -> String {
    if step.fract() == 0.0 { grouped(&format!("{step:.0}")) } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ui::charts::golden::assert_golden;

    fn curve(values: impl IntoIterator<Item = (u64, f64)>) -> Curve {
        let mut curve = Curve::default();
        values.into_iter().for_each(|(step, value)| curve.push(step, value));
        curve
    }

    /// Curves of 200 steps with ten evaluations, whose values all machines have to the bit.
    fn run() -> Curves {
        let noise = |step: u64| ((step * 7919) % 101) as f64 / 400.0;
        let loss = |step: u64| 1.0 + 3.0 / (1.0 + step as f64 / 40.0) + noise(step);
        let of = |value: fn(f64) -> f64| (0..=200).step_by(20).map(move |s| (s, value(s as f64)));
        Curves {
            loss: curve((1..=200).map(|step| (step, loss(step)))),
            lr: curve((1..=200).map(|step| (step, 4e-3 * (step as f64).min(20.0) / 20.0))),
            val_loss: curve(of(|step| 1.25 + 3.0 / (1.0 + step / 40.0))),
            metrics: vec![("val_accuracy".into(), curve(of(|step| step / 250.0)))],
        }
    }

    /// Points of the polylines of a colour, in units.
    fn polylines(svg: &str, color: &str) -> Vec<Vec<(f64, f64)>> {
        let begin = |line: &&str| line.starts_with("<polyline") && line.contains(color);
        let points = |line: &str| {
            let points = line.split("points=\"").nth(1)?.split('"').next()?;
            let point = |pair: &str| {
                let (x, y) = pair.split_once(',')?;
                Some((x.parse().ok()?, y.parse().ok()?))
            };
            points.split_whitespace().map(point).collect::<Option<Vec<(f64, f64)>>>()
        };
        svg.lines().filter(begin).map(|line| points(line).unwrap()).collect()
    }

    /// Asserts that every element of a document is closed, and that its numbers are some.
    fn assert_document(svg: &str) {
        let mut open = Vec::new();
        for tag in svg.split('<').skip(1).map(|part| part.split_once('>').unwrap().0) {
            match tag.strip_prefix('/') {
                Some(name) => assert_eq!(open.pop(), Some(name)),
                None if tag.ends_with('/') => assert!(tag.matches('"').count() % 2 == 0),
                None => open.push(tag.split(' ').next().unwrap()),
            }
        }
        assert!(open.is_empty(), "{open:?} is open");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn curves_are_the_golden_ones() {
        let svg = draw(&run(), "runs/<first> & \u{1}").unwrap();
        assert_document(&svg);
        assert_golden("curves.svg", &svg);
    }

    #[test]
    fn what_has_no_points_is_left_out() {
        let curves = Curves { loss: curve([(5, 2.0)]), ..Curves::default() };
        let svg = draw(&curves, "run").unwrap();
        assert_document(&svg);
        assert!(!svg.contains("val_loss") && !svg.contains("learning rate"), "{svg}");
        assert_eq!(svg.matches("<circle").count(), 1, "one point is no line");
        assert_document(&draw(&Curves::default(), "run").unwrap());
    }

    #[test]
    fn any_values_are_drawn() {
        for values in [[0.0, 0.0], [-2.0, -2.0], [-3e38, 3e38], [1e16, 1e16 + 2.0], [0.0, 1e-300]] {
            let loss = curve(values.into_iter().zip(1..).map(|(value, step)| (step, value)));
            let curves = Curves { lr: loss.clone(), loss, ..Curves::default() };
            assert_document(&draw(&curves, "run").unwrap());
        }
    }

    #[test]
    fn a_long_run_has_a_small_drawing() {
        let loss = curve((1..=200_000).map(|step| (step, (step % 17) as f64)));
        let curves = Curves { lr: loss.clone(), loss, ..Curves::default() };
        let svg = draw(&curves, "run").unwrap();
        assert!(svg.len() < 150_000, "{} bytes", svg.len());
        let points: Vec<usize> = polylines(&svg, "#0072B2").iter().map(Vec::len).collect();
        assert!(points[0] > 1000 && points[0] <= 2000 && points[1] <= 1000, "{points:?}");
    }

    #[test]
    fn values_read_well() {
        let texts =
            [0.0, 1.25, 0.30000000000000004, 123_456.0, 4e-4, -12.5, 99_999.0].map(value_text);
        assert_eq!(texts, ["0", "1.25", "0.3", "1.235e5", "4e-4", "-12.5", "99999"]);
        assert_eq!([step_text(2500.0), step_text(0.5)], ["2,500", ""]);
        assert_eq!(title_text(&"ab".repeat(50)).chars().count(), 66);
        assert!(title_text(&"ab".repeat(50)).starts_with("..ab"));
    }
}
