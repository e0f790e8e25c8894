//! Comparison of two benchmark reports.

use super::report::{DeviceReport, Direction, Figure, Report};
use super::units::number;
use potluck_core::Table;

/// Relative error that is assumed for a figure of one sample.
const SINGLE: f64 = 0.1;

/// Returns the comparison of report `b` with report `a` as text: for every figure in both, the
/// factor by which `b` is better. Figures whose samples overlap count as the same; a single sample
/// may be off by 10 %.
///
/// Devices are matched by name and API, several of one name in their order. If each report has
/// one device only, these two are compared, regardless of their names.
pub fn compare(a: &Report, b: &Report) -> String {
    let mut text = String::new();
    for (what, of_a, of_b) in
        [("potluck", &a.potluck, &b.potluck), ("effort", &a.effort, &b.effort)]
    {
        if of_a != of_b {
            text += &format!("note: not the same {what}, {of_a} in A and {of_b} in B\n");
        }
    }
    let pairs = pairs(a, b);
    for &(device_a, device_b) in &pairs {
        if !text.is_empty() {
            text.push('\n');
        }
        text += &pair(device_a, device_b);
    }
    for device in &a.devices {
        if !pairs.iter().any(|(a, _)| std::ptr::eq(*a, device)) {
            text += &format!("only in A: {}\n", title(device));
        }
    }
    for device in &b.devices {
        if !pairs.iter().any(|(_, b)| std::ptr::eq(*b, device)) {
            text += &format!("only in B: {}\n", title(device));
        }
    }
    if pairs.is_empty() {
        text += "no device is in both reports\n";
    }
    text
}

fn title(device: &DeviceReport) -> String {
    format!("{} on {}", device.name, device.api)
}

fn pairs<'a>(a: &'a Report, b: &'a Report) -> Vec<(&'a DeviceReport, &'a DeviceReport)> {
    if let ([one], [other]) = (&a.devices[..], &b.devices[..]) {
        return vec![(one, other)];
    }
    let mut free: Vec<&DeviceReport> = b.devices.iter().collect();
    let mut pairs = Vec::new();
    for device in &a.devices {
        let partner =
            free.iter().position(|other| other.name == device.name && other.api == device.api);
        if let Some(at) = partner {
            pairs.push((device, free.remove(at)));
        }
    }
    pairs
}

/// Returns the comparison of two devices: a table of their common figures, and the names of the
/// figures that only one of them has.
fn pair(a: &DeviceReport, b: &DeviceReport) -> String {
    let mut table = Table::new(&["<figure", "<unit", "A", "B", "B is"]);
    let mut group = None;
    for figure in &a.figures {
        let Some(other) = b.figure(&figure.name) else { continue };
        // An empty row separates groups.
        if group.is_some_and(|group| group != figure.kind.group()) {
            table.row(Vec::new());
        }
        group = Some(figure.kind.group());
        table.row(vec![
            figure.name.clone(),
            figure.unit.clone(),
            number(figure.median),
            number(other.median),
            verdict(figure, other),
        ]);
    }
    let mut text = format!("A: {}\nB: {}\n", title(a), title(b));
    if !table.is_empty() {
        text += &format!("\n{table}");
    }
    for (which, device, other) in [("A", a, b), ("B", b, a)] {
        let mut names = Vec::new();
        for figure in &device.figures {
            if other.figure(&figure.name).is_none() {
                names.push(figure.name.as_str());
            }
        }
        if !names.is_empty() {
            text += &format!("only in {which}: {}\n", names.join(", "));
        }
    }
    text
}

/// Factor by which the second figure is better, such as `1.50x`, or `same`.
fn verdict(a: &Figure, b: &Figure) -> String {
    if a.unit != b.unit || a.better != b.better {
        return "another unit".into();
    }
    let [a_min, a_max] = range(a);
    let [b_min, b_max] = range(b);
    if a_min <= b_max && b_min <= a_max {
        return "same".into();
    }
    let ratio = match a.better {
        Direction::Higher => b.median / a.median,
        Direction::Lower => a.median / b.median,
    };
    format!("{}x", number(ratio))
}

/// Interval in which another measurement may lie.
fn range(figure: &Figure) -> [f64; 2] {
    match figure.samples {
        1 => [1.0 - SINGLE, 1.0 + SINGLE].map(|factor| factor * figure.median),
        _ => [figure.min, figure.max],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Effort, FigureKind};

    fn figure(what: &str, better: Direction, samples: &[f64]) -> Figure {
        let unit = if better == Direction::Lower { "us" } else { "GB/s" };
        Figure::new(FigureKind::Memory, what, unit, better, samples)
    }

    fn device(name: &str, figures: Vec<Figure>) -> DeviceReport {
        let [api, driver, kind] = ["vulkan", "", "software"].map(String::from);
        let (name, skipped) = (name.to_string(), Vec::new());
        DeviceReport { name, api, driver, kind, figures, skipped, error: None }
    }

    #[test]
    fn ratios_are_in_the_direction_of_better_and_overlaps_are_the_same() {
        use Direction::{Higher, Lower};
        let verdict = |better, a: &[f64], b: &[f64]| {
            verdict(&figure("memory.copy", better, a), &figure("memory.copy", better, b))
        };
        assert_eq!(verdict(Higher, &[2.0], &[3.0]), "1.50x");
        assert_eq!(verdict(Higher, &[3.0], &[2.0]), "0.667x");
        assert_eq!(verdict(Lower, &[3.0], &[2.0]), "1.50x");
        assert_eq!(verdict(Lower, &[3.0], &[2.6]), "same");
        assert_eq!(verdict(Higher, &[2.0, 2.2, 2.4], &[2.4, 3.0, 3.1]), "same");
        assert_eq!(verdict(Higher, &[2.0, 2.2, 2.3], &[2.4, 3.0, 3.1]), "1.36x");
    }

    #[test]
    fn devices_are_matched_by_name_in_their_order() {
        let one = |name: &str, value| {
            device(name, vec![figure("memory.copy", Direction::Higher, &[value])])
        };
        let a = Report::new(Effort::Quick, vec![one("x", 1.0), one("y", 2.0), one("x", 3.0)]);
        let b = Report::new(Effort::Quick, vec![one("x", 10.0), one("z", 4.0), one("x", 33.0)]);
        let matched: Vec<(f64, f64)> = pairs(&a, &b)
            .into_iter()
            .map(|(a, b)| (a.figures[0].median, b.figures[0].median))
            .collect();
        assert_eq!(matched, [(1.0, 10.0), (3.0, 33.0)]);
        let text = compare(&a, &b);
        assert!(text.ends_with("only in A: y on vulkan\nonly in B: z on vulkan\n"), "{text}");

        let (only_x, only_z) = (vec![one("x", 1.0)], vec![one("z", 2.0)]);
        let [a, b] = [only_x, only_z].map(|devices| Report::new(Effort::Quick, devices));
        assert!(compare(&a, &b).contains("memory.copy  GB/s  1.00  2.00  2.00x"));
    }
    /// A report by hand: `figures` are lines of (name, unit, better, median, min, max).
    fn handmade(device: &str, figures: &[(&str, &str, &str, f64, f64, f64)]) -> Report {
        let figures: Vec<serde_json::Value> = figures
            .iter()
            .map(|(name, unit, better, median, min, max)| {
                serde_json::json!({
                    "name": name, "kind": name.split('.').next(), "unit": unit,
                    "median": median, "min": min, "max": max, "samples": 5, "better": better,
                })
            })
            .collect();
        let system = serde_json::json!({
            "os": "linux", "architecture": "x86_64", "cpu": "a", "cores": 2, "wgpu": "30.0.1"
        });
        let device = serde_json::json!({
            "name": device, "api": "vulkan", "driver": "d", "kind": "software",
            "figures": figures, "skipped": [], "error": null,
        });
        let report = serde_json::json!({
            "schema": 2, "potluck": "0.1.0", "effort": "normal", "system": system,
            "devices": [device],
        });
        Report::from_json(&report.to_string()).unwrap()
    }

    #[test]
    fn two_reports_compare_to_the_letter() {
        let a = handmade(
            "llvmpipe",
            &[
                ("peak.flops", "GFLOP/s", "higher", 55.0, 54.0, 56.0),
                ("memory.copy", "GB/s", "higher", 10.0, 9.0, 11.0),
                ("dispatch.in_pass", "us", "lower", 3.0, 2.9, 3.1),
                ("matmul.square_128", "GFLOP/s", "higher", 20.0, 19.0, 21.0),
            ],
        );
        let b = handmade(
            "RTX 4090",
            &[
                ("peak.flops", "GFLOP/s", "higher", 82_500.0, 82_000.0, 83_000.0),
                ("memory.copy", "GB/s", "higher", 10.5, 10.0, 11.5),
                ("dispatch.in_pass", "us", "lower", 6.0, 5.9, 6.1),
                ("step.gpt_small_time", "ms", "lower", 1.0, 0.9, 1.1),
            ],
        );
        let expected = "\
A: llvmpipe on vulkan
B: RTX 4090 on vulkan

figure            unit        A       B    B is
peak.flops        GFLOP/s  55.0  82,500  1,500x

memory.copy       GB/s     10.0    10.5    same

dispatch.in_pass  us       3.00    6.00  0.500x
only in A: matmul.square_128
only in B: step.gpt_small_time
";
        assert_eq!(compare(&a, &b), expected);
    }
}
