//! Rates of the devices of a file of machines: of cards by name, of processors by their rate, and
//! of measured devices by their report.

use std::fs;

use super::file::{CPU_TFLOPS, MachineDevice, MachinesError, MeasuredEntry, Source};
use crate::report::{DeviceReport, FigureKind, Report};
use potluck_core::format::listed;
use potluck_parallel::planner::cards::card_named;
use potluck_parallel::planner::rates::DeviceRates;

/// Part of the rate of products that attention reaches, as on the cards of the table.
const ATTENTION: f64 = 0.7;
/// Fraction of a device's memory that a run may take.
const MEMORY_USABLE: f64 = 0.9;
/// Fraction of its host's memory that a processor may take.
const HOST_MEMORY_USABLE: f64 = 0.7;
/// Figures of a report that are read, besides those of products.
const RATES: [&str; 5] =
    ["memory.triad", "memory.copy", "transfer.upload", "transfer.readback", "precision.mixed"];
const GIB: f64 = (1u64 << 30) as f64;
const CPU: &str = "cpu:";

/// Returns the rates of a device at a place of the file, in a host with this memory in GiB.
///
/// # Errors
/// Returns [`MachinesError`] for an unknown name, and for a report that lacks the device or its
/// figures.
pub(super) fn rates(
    source: &Source<'_>,
    at: usize,
    device: &MachineDevice,
    host_gib: f64,
) -> Result<DeviceRates, MachinesError> {
    match device {
        MachineDevice::Named(name) => match name.strip_prefix(CPU) {
            Some(rate) => {
                let rate: f64 = rate.trim().parse().map_err(|_| {
                    let example = "as in \"cpu:0.5\"";
                    source.wrong(at, format!("\"{name}\" has no rate in TFLOP/s, {example}"))
                })?;
                source.within(at, "the rate of a processor in TFLOP/s", rate, CPU_TFLOPS)?;
                Ok(DeviceRates::of_cpu(rate, host_gib))
            }
            None => match card_named(name) {
                Ok(card) => Ok(DeviceRates::of_card(card, host_gib)),
                Err(unknown) => Err(source.unknown_card(at, &unknown)),
            },
        },
        MachineDevice::Measured(entry) => {
            let folder = source.path.parent().unwrap_or(source.path);
            let path = folder.join(&entry.bench);
            let text = fs::read_to_string(&path)
                .map_err(|why| MachinesError::Unreadable { path: path.clone(), why })?;
            let report = Report::from_json(&text)
                .map_err(|why| MachinesError::Report { path: path.clone(), why })?;
            of_report(&report, entry, host_gib)
                .map_err(|why| source.wrong(at, format!("{}: {why}", path.display())))
        }
    }
}

/// Rates that a report has for the device of an entry.
fn of_report(report: &Report, entry: &MeasuredEntry, host_gib: f64) -> Result<DeviceRates, String> {
    let device = device_of(report, entry.device.as_deref())?;
    let missing = |part: &str| {
        let name = &device.name;
        format!("{name} has no figure of {part}; measure it with potluck bench --only {part}")
    };
    let product_flops = products(device).ok_or_else(|| missing("matmul"))?;
    require_positive(device)?;
    let figure = |name: &str| device.figure(name).map(|figure| figure.median);
    let memory = figure("memory.triad").or_else(|| figure("memory.copy"));
    let bytes_per_s = 1e9 * memory.ok_or_else(|| missing("peaks"))?;
    // A copy within one memory reads and writes it.
    let copy = |name: &str| figure(name).map_or(bytes_per_s / 2.0, |rate| 1e9 * rate);
    let mixed = figure("precision.mixed").map(|rate| 1e9 * rate);
    let is_cpu = device.api == "cpu";
    let memory_gib = match entry.memory_gib {
        Some(gib) => Some(MEMORY_USABLE * gib),
        None if is_cpu => Some(HOST_MEMORY_USABLE * host_gib),
        None => None,
    };
    Ok(DeviceRates {
        name: device.name.clone(),
        product_flops,
        attention_flops: ATTENTION * product_flops,
        matrix_flops: mixed.filter(|rate| *rate > product_flops),
        bytes_per_s,
        dispatch_s: figure("dispatch.in_pass").map_or(0.0, |us| 1e-6 * us),
        upload_bytes_per_s: copy("transfer.upload"),
        read_back_bytes_per_s: copy("transfer.readback"),
        memory: memory_gib.map(|gib| (gib * GIB) as u64),
    })
}

/// Checks that the figures from which times are computed are numbers above 0.
fn require_positive(device: &DeviceReport) -> Result<(), String> {
    for figure in &device.figures {
        let is_read = figure.kind == FigureKind::Matmul || RATES.contains(&figure.name.as_str());
        if is_read && !(figure.median.is_finite() && figure.median > 0.0) {
            return Err(format!(
                "the figure {} of {} is {}, and must be above 0",
                figure.name, device.name, figure.median
            ));
        }
    }
    Ok(())
}

fn device_of<'a>(report: &'a Report, name: Option<&str>) -> Result<&'a DeviceReport, String> {
    let is_named = |device: &&DeviceReport| match name {
        Some(name) => device.name.to_lowercase().contains(&name.to_lowercase()),
        None => true,
    };
    let mut found: Vec<&DeviceReport> = report.devices.iter().filter(is_named).collect();
    // The one adapter beside the processor needs no name.
    if name.is_none() && found.len() > 1 {
        found.retain(|device| device.api != "cpu");
    }
    match found[..] {
        [device] => Ok(device),
        _ => {
            let names = listed(report.devices.iter().map(|device| &device.name));
            Err(format!("give device = a part of one name of: {names}"))
        }
    }
}

/// Median of the rates of the products of a large model, or of all products if there are none.
fn products(device: &DeviceReport) -> Option<f64> {
    let figures = |part: &str| {
        let mut rates = Vec::new();
        for figure in &device.figures {
            if figure.kind == FigureKind::Matmul && figure.name.contains(part) {
                rates.push(1e9 * figure.median);
            }
        }
        rates.sort_by(f64::total_cmp);
        rates.get(rates.len() / 2).copied()
    };
    figures("gpt2").or_else(|| figures(""))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::Effort;
    use crate::report::{Direction, Figure};

    fn device(name: &str, api: &str, figures: &[(FigureKind, &str, f64)]) -> DeviceReport {
        let figure = |(kind, name, value): &(FigureKind, &str, f64)| {
            Figure::new(kind.clone(), name, "x", Direction::Higher, &[*value])
        };
        DeviceReport {
            name: name.into(),
            api: api.into(),
            driver: String::new(),
            kind: String::new(),
            figures: figures.iter().map(figure).collect(),
            skipped: Vec::new(),
            error: None,
        }
    }

    fn report() -> Report {
        let figures = [
            (FigureKind::Matmul, "matmul.square_128", 100.0),
            (FigureKind::Matmul, "matmul.gpt2_qkv", 4_000.0),
            (FigureKind::Matmul, "matmul.gpt2_mlp_up", 5_000.0),
            (FigureKind::Matmul, "matmul.gpt2_head", 6_000.0),
            (FigureKind::Precision, "precision.mixed", 9_000.0),
            (FigureKind::Memory, "memory.copy", 200.0),
            (FigureKind::Memory, "memory.triad", 210.0),
            (FigureKind::Transfer, "transfer.upload", 11.0),
            (FigureKind::Transfer, "transfer.readback", 9.0),
            (FigureKind::Dispatch, "dispatch.in_pass", 4.0),
        ];
        let cpu = [(FigureKind::Matmul, "matmul.square_128", 50.0)];
        let devices =
            vec![device("a processor", "cpu", &cpu), device("Card X", "vulkan", &figures)];
        Report::new(Effort::Quick, devices)
    }

    fn entry(device: Option<&str>, memory_gib: Option<f64>) -> MeasuredEntry {
        MeasuredEntry { bench: "r.json".into(), device: device.map(String::from), memory_gib }
    }

    #[test]
    fn rates_of_a_report_are_its_medians() {
        let rates = of_report(&report(), &entry(None, Some(10.0)), 64.0).unwrap();
        assert_eq!(rates.name, "Card X");
        assert_eq!((rates.product_flops, rates.matrix_flops), (5e12, Some(9e12)));
        assert_eq!((rates.bytes_per_s, rates.upload_bytes_per_s), (210e9, 11e9));
        assert!((rates.dispatch_s - 4e-6).abs() < 1e-12);
        assert_eq!(rates.memory, Some((9.0 * GIB) as u64));
        assert_eq!(of_report(&report(), &entry(None, None), 64.0).unwrap().memory, None);
    }

    #[test]
    fn report_without_the_device_or_its_figures_is_refused() {
        let refused = |device| of_report(&report(), &entry(device, None), 64.0).unwrap_err();
        let names = "give device = a part of one name of: a processor, Card X";
        assert_eq!(refused(Some("card y")), names);
        let missing = refused(Some("PROCESSOR"));
        assert!(missing.contains("a processor has no figure of peaks"), "{missing}");
        for value in [0.0, f64::NAN] {
            let figures = [
                (FigureKind::Matmul, "matmul.x", 9.0),
                (FigureKind::Memory, "memory.triad", value),
            ];
            let report = Report::new(Effort::Quick, vec![device("Card", "vulkan", &figures)]);
            let refused = of_report(&report, &entry(None, None), 64.0).unwrap_err();
            assert_eq!(
                refused,
                format!("the figure memory.triad of Card is {value}, and must be above 0")
            );
        }
    }

    #[test]
    fn unknown_device_of_a_file_is_refused_with_its_line() {
        let text = "\n\ndevices";
        let source = Source::new(Path::new("m.toml"), text);
        let refused = |name: &str| {
            let device = MachineDevice::Named(name.into());
            rates(&source, 2, &device, 64.0).unwrap_err().to_string()
        };
        let unknown = refused("RTX 4099");
        assert!(unknown.starts_with("m.toml:3: there is no card \"RTX 4099\""), "{unknown}");
        assert!(refused("cpu:fast").contains("has no rate in TFLOP/s"));
        assert!(refused("cpu:0").contains("is 0, and must be from 0.001 to 1000"));
        let missing = MachineDevice::Measured(entry(None, None));
        let missing = rates(&source, 2, &missing, 64.0).unwrap_err().to_string();
        assert!(missing.starts_with("r.json: "), "{missing}");
    }
}
