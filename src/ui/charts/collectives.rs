//! Chart of the bus bandwidth of an all-reduce over its size: a line per number of ranks, and the
//! copy in memory that alternated with them. Both axes are logarithmic.

use std::collections::BTreeMap;
use std::io;

use plotters::prelude::*;

use super::axis::TickAxis;
use super::{
    BLUE, DrawResult, FONT, GREEN, ORANGE, PURPLE, Plot, PlotAxis, PlotLine, SvgArea, TEXT, TITLE,
    YELLOW, document, text, text_at, units,
};
use potluck_bench::collectives::{COPY, GIBS, Kind, QUIC, SLICES};
use potluck_bench::units::size;
use potluck_bench::{FigureKind, Report};

/// Size of the drawing, and height of its heading, in pixels.
const WIDTH: u32 = 880;
const HEIGHT: u32 = 540;
const HEAD: u32 = 52;
/// Space left of the plot, right of it for the names of lines, and below it, in pixels.
const LEFT: u32 = 84;
const RIGHT: u32 = 92;
const BELOW: u32 = 60;
/// Least distance between two names at the ends of lines, in pixels.
const NAME_HEIGHT: u32 = 17;
/// Colours of the lines; further lines reuse them from the first on.
const COLORS: [RGBColor; 6] = [BLUE, ORANGE, GREEN, PURPLE, YELLOW, BLACK];
const GREY: RGBColor = RGBColor(0x77, 0x77, 0x77);

/// Points of a line, in binary logarithms of bytes and GiB/s.
type Points = Vec<(f64, f64)>;

/// Returns the drawing as an SVG document. A report without an all-reduce on slices gives axes
/// without lines.
///
/// # Errors
/// Returns the error of the drawing library, which has none for drawings in memory.
pub fn draw(report: &Report) -> io::Result<String> {
    let system = &report.system;
    let ranks = if report.devices.iter().any(|one| one.api == QUIC) { "nodes" } else { "threads" };
    let title = format!("All-reduce between {ranks}: {}, {} cores", system.cpu, system.cores);
    let measured = measured(report);
    document(WIDTH, HEIGHT, |root| {
        let (head, area) = root.split_vertically(units(HEAD));
        text(&head, &title, (LEFT + FONT / 2, HEAD / 2), TITLE, TEXT)?;
        draw_plot(root, &area, &measured)
    })
}

/// Measured points by number of ranks; points of the copy have number 0.
fn measured(report: &Report) -> BTreeMap<usize, Points> {
    let mut measured: BTreeMap<usize, Points> = BTreeMap::new();
    for device in &report.devices {
        if device.name != SLICES && device.api != QUIC {
            continue;
        }
        for figure in &device.figures {
            let FigureKind::Collective(call) = &figure.kind else { continue };
            let line = match call.by.as_str() {
                COPY => 0,
                by if by == Kind::AllReduce.name() => call.ranks,
                _ => continue,
            };
            let point = ((call.bytes as f64).log2(), figure.median.log2());
            measured.entry(line).or_default().push(point);
        }
    }
    measured
}

fn draw_plot(
    root: &SvgArea<'_>,
    area: &SvgArea<'_>,
    measured: &BTreeMap<usize, Points>,
) -> DrawResult {
    let mut colors = COLORS.iter().cycle();
    let mut names = Vec::new();
    let mut lines = Vec::new();
    for (ranks, points) in measured {
        let is_copy = *ranks == 0;
        let color = if is_copy { GREY } else { *colors.next().unwrap_or(&BLUE) };
        names.push((if is_copy { COPY.into() } else { format!("{ranks} ranks") }, color));
        lines.push(PlotLine {
            points: points.clone(),
            color: color.to_rgba(),
            width: 2.2,
            dash: if is_copy { Some(6) } else { None },
            marks: if is_copy { Vec::new() } else { points.clone() },
        });
    }
    let plot = Plot {
        x: PlotAxis {
            axis: TickAxis::whole(measured.values().flatten().map(|point| point.0)),
            title: "values of each rank",
            label: &|power| size(power.exp2() as u64),
            space: BELOW,
        },
        y: PlotAxis {
            axis: TickAxis::whole(measured.values().flatten().map(|point| point.1)),
            title: &format!("bus bandwidth, {GIBS}"),
            label: &|power| power.exp2().to_string(),
            space: LEFT,
        },
        lines,
        right: RIGHT,
    };
    let ends: Vec<(i32, i32)> = plot.draw(area)?.into_iter().flatten().collect();
    let heights: Vec<i32> = ends.iter().map(|end| end.1).collect();
    let heights = apart(&heights, units(HEIGHT - BELOW));
    for (index, (name, color)) in names.iter().enumerate() {
        let Some(end) = ends.get(index) else { break };
        text_at(root, name, (end.0 + units(9), heights[index]), FONT, *color)?;
    }
    Ok(())
}

/// Returns positions of names near the wanted ones, at least [`NAME_HEIGHT`] from each other: from
/// the top down, each no higher than wanted, and then moved up so that none is below `lowest`.
fn apart(wanted: &[i32], lowest: i32) -> Vec<i32> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by_key(|index| wanted[*index]);
    let mut places = wanted.to_vec();
    for pair in 1..order.len() {
        let above = order[pair - 1];
        let below = order[pair];
        places[below] = places[below].max(places[above] + units(NAME_HEIGHT));
    }
    let mut most = lowest;
    for index in order.into_iter().rev() {
        places[index] = places[index].min(most);
        most = places[index] - units(NAME_HEIGHT);
    }
    places
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::ui::charts::golden::assert_golden;

    /// A report of powers of two, whose logarithms all machines have to the bit.
    fn report() -> Report {
        let mut figures = Vec::new();
        let mut add = |by: &str, ranks: usize, bytes: u64, median: f64| {
            let call = json!({
                "by": by, "ranks": ranks, "bytes": bytes, "seconds": 1e-3, "algorithm": 1.0,
            });
            figures.push(json!({
                "name": format!("{by}.{bytes}"), "kind": { "collective": call }, "unit": GIBS,
                "median": median, "min": median, "max": median, "samples": 5, "better": "higher",
            }));
        };
        for (at, bytes) in [1 << 12, 1 << 16, 1 << 20, 1 << 26].into_iter().enumerate() {
            let times = (1 << at) as f64;
            add(Kind::AllReduce.name(), 2, bytes, 0.25 * times);
            add(Kind::AllReduce.name(), 3, bytes, 0.125 * times);
            add(COPY, 1, bytes, 2.0 * times);
        }
        // What is not drawn.
        add(Kind::Broadcast.name(), 2, 1 << 20, 64.0);
        let system = json!({
            "os": "linux", "architecture": "x86_64", "cpu": "a <CPU>", "cores": 2, "wgpu": "30.0.1",
        });
        let device = json!({
            "name": SLICES, "api": "cpu", "driver": "", "kind": "", "figures": figures,
            "skipped": [], "error": null,
        });
        let report = json!({
            "schema": 2, "potluck": "0.1.0", "effort": "normal", "system": system,
            "devices": [device],
        });
        Report::from_json(&report.to_string()).unwrap()
    }

    #[test]
    fn collectives_are_the_golden_ones() {
        assert_golden("collectives.svg", &draw(&report()).unwrap());
    }

    #[test]
    fn names_keep_their_distance() {
        let height = units(NAME_HEIGHT);
        let places = apart(&[1000, 3000, 1010, 1020], 9000);
        assert_eq!(places, [1000, 3000, 1000 + height, 1000 + 2 * height]);
        assert_eq!(apart(&[9000, 8970], 9000), [9000, 9000 - height]);
        assert!(apart(&[], 9000).is_empty());
    }
}
