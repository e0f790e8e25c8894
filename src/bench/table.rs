//! Text tables of reports: a block per device, and a summary of several devices.

use std::fmt;

use super::report::{
    DeviceReport, Figure, FigureKind, GFLOPS, LinkFigure, Report, ScalingFigure, Skipped,
    highest_rate,
};
use super::units::{number, size};
use potluck_core::Table;
use potluck_core::arithmetic::median;
use potluck_core::format::percent;

fn spread(figure: &Figure) -> String {
    match figure.samples {
        1 => "one sample".into(),
        _ => format!("±{}", percent(figure.spread(), 0)),
    }
}

fn share(share: Option<f64>) -> String {
    match share {
        Some(share) => percent(share, 0),
        None => String::new(),
    }
}

/// Name of a figure without its group.
fn what(figure: &Figure) -> String {
    let what = match figure.name.split_once('.') {
        Some((_, what)) => what,
        None => &figure.name,
    };
    what.replace('_', " ")
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let system = &self.system;
        let os = &system.os;
        let architecture = &system.architecture;
        let cpu = &system.cpu;
        writeln!(
            f,
            "potluck {}, wgpu {}, {os} {architecture}, {cpu}, {} cores; {} run",
            self.potluck, system.wgpu, system.cores, self.effort
        )?;
        for device in &self.devices {
            writeln!(f, "\n{device}")?;
        }
        let mut figures = self.devices.iter().flat_map(|device| &device.figures);
        let is_of_ranks = figures.any(|figure| matches!(figure.kind, FigureKind::Collective(_)));
        if self.devices.len() > 1 && !is_of_ranks {
            write!(f, "\n{}", summary(&self.devices))?;
        }
        Ok(())
    }
}

impl fmt::Display for DeviceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}, {}", self.name, self.api, self.kind)?;
        if !self.driver.is_empty() {
            write!(f, ", driver {}", self.driver)?;
        }
        let tables = [
            peaks(self),
            products(self),
            steps(self),
            generation(self),
            collectives(self),
            pipelines(self),
            scaling(self),
            ranks(self),
            links(self),
            skipped(self),
        ];
        for table in tables {
            if !table.is_empty() {
                write!(f, "\n\n{}", table.to_string().trim_end())?;
            }
        }
        if let Some(advice) = last_scaling(self).and_then(|found| found.advice.as_ref()) {
            write!(f, "\n\nwould help: {advice}")?;
        }
        if let Some(note) = low_peak(self) {
            write!(f, "\n\n{note}")?;
        }
        if let Some(spread) = unsteady(self) {
            let spread = percent(spread, 0);
            write!(f, "\n\nnote: half of the figures spread by ±{spread} or more; ")?;
            write!(f, "something else kept this device busy")?;
        }
        match &self.error {
            Some(error) => write!(f, "\n\nended early: {error}"),
            None => Ok(()),
        }
    }
}

/// Share of a peak by which another rate may exceed it on a machine without other load.
const ABOVE_PEAK: f64 = 0.05;

/// Returns a note on a peak that another rate clearly exceeds, which then stands for it.
fn low_peak(device: &DeviceReport) -> Option<String> {
    let peak = device.of_kind(FigureKind::Peak).next()?;
    let highest = highest_rate(&device.figures)?;
    if highest.median < (1.0 + ABOVE_PEAK) * peak.median {
        return None;
    }
    Some(format!(
        "note: the peak was measured too low ({} {GFLOPS}, and {} reached {}); the machine may \
         have been busy: run it again. Shares are of the highest rate",
        number(peak.median),
        highest.name.replace(['.', '_'], " "),
        number(highest.median)
    ))
}

/// Maximum median spread of the figures on a machine without other load.
const STEADY: f64 = 0.2;

/// The median spread, if it exceeds the spread on a machine without other load.
fn unsteady(device: &DeviceReport) -> Option<f64> {
    let figures = device.figures.iter().filter(|figure| figure.samples > 1);
    let spreads: Vec<f64> = figures.map(Figure::spread).collect();
    if spreads.is_empty() {
        return None;
    }
    let spread = median(&spreads);
    if spread > STEADY { Some(spread) } else { None }
}

fn peaks(device: &DeviceReport) -> Table {
    let mut table = Table::new(&["<peaks", "median", "<unit", "spread", "<by", "<on"]);
    use FigureKind::{Dispatch, Memory, Peak, Precision, Robustness, Transfer};
    for figure in &device.figures {
        if !matches!(figure.kind, Peak | Memory | Transfer | Dispatch | Robustness | Precision) {
            continue;
        }
        table.row(vec![
            figure.name.replace(['.', '_'], " "),
            number(figure.median),
            figure.unit.clone(),
            spread(figure),
            figure.by.clone().unwrap_or_default(),
            figure.on.clone().unwrap_or_default(),
        ]);
    }
    table
}

fn products(device: &DeviceReport) -> Table {
    let head = ["<matrix product", GFLOPS, "spread", "of peak", "<by", "<(m, k) (k, n)"];
    let mut table = Table::new(&head);
    for figure in device.of_kind(FigureKind::Matmul) {
        table.row(vec![
            what(figure),
            number(figure.median),
            spread(figure),
            share(figure.of_peak),
            figure.by.clone().unwrap_or_default(),
            figure.on.clone().unwrap_or_default(),
        ]);
    }
    table
}

fn steps(device: &DeviceReport) -> Table {
    models(device, FigureKind::Step, "<training step")
}

fn generation(device: &DeviceReport) -> Table {
    models(device, FigureKind::Generation, "<generation")
}

/// Table of figures of models, of one kind.
fn models(device: &DeviceReport, kind: FigureKind, head: &str) -> Table {
    let mut table = Table::new(&[head, "median", "<unit", "spread", "of peak", "<on"]);
    for figure in device.of_kind(kind) {
        table.row(vec![
            what(figure),
            number(figure.median),
            figure.unit.clone(),
            spread(figure),
            share(figure.of_peak),
            figure.on.clone().unwrap_or_default(),
        ]);
    }
    table
}

/// Returns the table of collectives, with an empty row between different collectives and numbers of
/// ranks.
fn collectives(device: &DeviceReport) -> Table {
    let is_of_devices = device.figures.iter().any(|figure| {
        matches!(&figure.kind, FigureKind::Collective(call) if call.of_transfers.is_some())
    });
    let share_of = if is_of_devices { "of transfers" } else { "of copy" };
    let mut table = Table::new(&[
        "<collective",
        "ranks",
        "size",
        "time",
        "algorithm GiB/s",
        "bus GiB/s",
        "spread",
        share_of,
    ]);
    let mut last = None;
    for figure in &device.figures {
        let FigureKind::Collective(call) = &figure.kind else { continue };
        let this = (&call.by, call.ranks);
        if last.is_some_and(|last| last != this) {
            table.row(Vec::new());
        }
        last = Some(this);
        let share_of_call = if is_of_devices { call.of_transfers } else { call.of_copy };
        table.row(vec![
            call.by.replace('_', " "),
            call.ranks.to_string(),
            size(call.bytes),
            duration(call.seconds),
            number(call.algorithm),
            number(figure.median),
            spread(figure),
            share(share_of_call),
        ]);
    }
    table
}

/// Note on the predicted columns of the table of pipelines.
const PREDICTED: &str = "predicted: by times of blocks, measured alone, and of transfers; updates, \
                         reductions and loading come in addition, and stages that share a device \
                         slow each other down";

/// Table of pipelines, with an empty row between different shapes.
fn pipelines(device: &DeviceReport) -> Table {
    let mut table = Table::new(&[
        "<schedule",
        "stages",
        "micro-batches",
        "tokens/s",
        "spread",
        "step ms",
        "predicted ms",
        "bubble",
        "predicted bubble",
        "formula bubble",
    ]);
    table.set_note(PREDICTED);
    let mut last = None;
    for figure in &device.figures {
        let FigureKind::Pipeline(found) = &figure.kind else { continue };
        let this = (found.stages, found.micro_batches);
        if last.is_some_and(|last| last != this) {
            table.row(Vec::new());
        }
        last = Some(this);
        table.row(vec![
            found.schedule.to_string(),
            found.stages.to_string(),
            found.micro_batches.to_string(),
            number(figure.median),
            spread(figure),
            number(1e3 * found.step_s),
            number(1e3 * found.predicted_s),
            percent(found.bubble, 1),
            percent(found.predicted_bubble, 1),
            percent(found.formula_bubble, 1),
        ]);
    }
    table
}

/// Note on the columns of the table of scaling.
const SCALED: &str = "the same batch on each row; speed-up by the fastest device alone, efficiency \
                      by the sum of the devices alone";

fn scaling(device: &DeviceReport) -> Table {
    let mut table = Table::new(&[
        "<devices",
        "samples/s",
        "spread",
        "step ms",
        "predicted ms",
        "speed-up",
        "efficiency",
        "exposed ms",
        "hidden ms",
    ]);
    table.set_note(SCALED);
    let ms = |seconds: Option<f64>| cell(seconds.map(|seconds| 1e3 * seconds));
    for figure in &device.figures {
        let FigureKind::Scaling(found) = &figure.kind else { continue };
        table.row(vec![
            found.devices.join(" + "),
            number(figure.median),
            spread(figure),
            number(1e3 * found.step_s),
            ms(found.predicted_s),
            format!("{:.2}", found.speedup),
            percent(found.efficiency, 0),
            ms(found.exposed_s),
            ms(found.hidden_s),
        ]);
    }
    table
}

/// Scaling to the most devices.
fn last_scaling(device: &DeviceReport) -> Option<&ScalingFigure> {
    match &device.figures.last()?.kind {
        FigureKind::Scaling(found) => Some(found),
        _ => None,
    }
}

/// Table of the shares of a step of all devices, by rank.
fn ranks(device: &DeviceReport) -> Table {
    let mut table = Table::new(&[
        "<on all devices",
        "computes",
        "waits for gradients",
        "for other ranks",
        "between steps",
    ]);
    let Some(found) = last_scaling(device) else { return table };
    for (rank, cost) in found.ranks.iter().enumerate() {
        let mut row = vec![format!("rank {rank} {}", cost.name)];
        let shares = [cost.computing, cost.gradients, cost.others, cost.between];
        row.extend(shares.map(|share| percent(share, 0)));
        table.row(row);
    }
    table
}

/// Note on the steps in the table of a link.
const STEPS: &str = "step: an all-reduce of the gradients of so many parameters between the two \
                     nodes, alone; a run overlaps it with the backward pass";

/// Table of a link, with an empty row between different kinds of figures.
fn links(device: &DeviceReport) -> Table {
    let mut table = Table::new(&["<link", "median", "<unit", "spread", "<on"]);
    let mut last = None;
    for figure in &device.figures {
        let FigureKind::Link(kind) = figure.kind else { continue };
        if kind == LinkFigure::Step {
            table.set_note(STEPS);
        }
        if last.is_some_and(|last| last != kind) {
            table.row(Vec::new());
        }
        last = Some(kind);
        table.row(vec![
            what(figure),
            number(figure.median),
            figure.unit.clone(),
            spread(figure),
            figure.on.clone().unwrap_or_default(),
        ]);
    }
    table
}

/// Formats seconds in the largest unit in which they are at least 1, or in microseconds.
fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{} us", number(s * 1e6)),
        s if s < 1.0 => format!("{} ms", number(s * 1e3)),
        s => format!("{} s", number(s)),
    }
}

fn skipped(device: &DeviceReport) -> Table {
    let mut table = Table::new(&["<skipped", "<why"]);
    for Skipped { name, why } in &device.skipped {
        // The reason of a driver may end with a line break.
        table.row(vec![name.replace(['.', '_'], " "), why.trim_end().into()]);
    }
    table
}

/// Figures of the summary with their column heads.
const SUMMARY: [(&str, &str); 7] = [
    ("peak.flops", "peak GFLOP/s"),
    ("memory.copy", "copy GB/s"),
    ("transfer.upload", "up GB/s"),
    ("transfer.readback", "down GB/s"),
    ("dispatch.in_pass", "us/dispatch"),
    ("step.gpt_small_time", "ms/step"),
    ("step.gpt_small_tokens", "tokens/s"),
];

fn summary(devices: &[DeviceReport]) -> Table {
    let mut head = vec!["<device"];
    head.extend(SUMMARY.map(|(_, head)| head));
    head.insert(6, "best matmul");
    let mut table = Table::new(&head);
    for device in devices {
        let mut row = vec![device.name.clone()];
        for (name, _) in SUMMARY {
            row.push(cell(device.figure(name).map(|figure| figure.median)));
        }
        let products = device.of_kind(FigureKind::Matmul).map(|figure| figure.median);
        row.insert(6, cell(products.reduce(f64::max)));
        table.row(row);
    }
    table
}

fn cell(value: Option<f64>) -> String {
    match value {
        Some(value) => number(value),
        None => "-".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Direction, FigureRecorder};
    use crate::{Effort, System};
    use potluck_core::metrics::RankCost;

    #[test]
    fn numbers_have_three_digits_that_count() {
        let texts = [0.01234, 0.9996, 1.5, 9.996, 12.34, 99.96, 999.6, 1234.0, 1_234_567.8];
        let expected =
            ["0.012", "1.00", "1.50", "10.0", "12.3", "100", "1,000", "1,234", "1,234,568"];
        assert_eq!(texts.map(number), expected);
    }

    fn device(name: &str) -> DeviceReport {
        let mut note = |_: &str| {};
        let mut recorder = FigureRecorder::new(&mut note);
        let peak = Figure::rate(FigureKind::Peak, "peak.flops", GFLOPS, 1e12, &[1.0, 0.5, 2.0]);
        recorder.add(peak.by("fused"));
        let square =
            Figure::rate(FigureKind::Matmul, "matmul.square_128", GFLOPS, 1e9, &[0.01, 0.01]);
        recorder.add(square.by("matmul_naive").on("(128, 128) (128, 128)"));
        let ms = [0.001, 0.002];
        let time = Figure::duration(FigureKind::Step, "step.gpt_small_time", "ms", 1e3, &ms);
        recorder.add(time.on("batch 12"));
        recorder.add(Figure::new(
            FigureKind::Step,
            "step.gpt_small_tokens",
            "tokens/s",
            Direction::Higher,
            &[44_100.0],
        ));
        let (figures, _) = recorder.finish();
        let skipped = vec![Skipped { name: "matmul.square_256".into(), why: "too slow".into() }];
        let [api, driver, kind] = ["vulkan", "Mesa", "software"].map(String::from);
        DeviceReport { name: name.into(), api, driver, kind, figures, skipped, error: None }
    }

    #[test]
    fn a_peak_below_another_rate_is_told() {
        let mut report = device("d");
        assert_eq!(low_peak(&report), None);
        report.figures[0].median = 96.0;
        assert_eq!(low_peak(&report), None, "a difference of less than 5 %");
        report.figures[0].median = 40.0;
        let note = "\n\nnote: the peak was measured too low (40.0 GFLOP/s, and matmul square 128 \
                    reached 100); the machine may have been busy: run it again. Shares are of the \
                    highest rate";
        assert!(report.to_string().contains(note), "{report}");
    }

    #[test]
    fn a_report_reads_as_tables() {
        let mut report = Report::new(Effort::Quick, vec![device("first"), device("second one")]);
        report.potluck = "1.2.3".into();
        let [os, architecture, cpu, wgpu] =
            ["linux", "x86_64", "Some CPU", "30.0.1"].map(String::from);
        report.system = System { os, architecture, cpu, cores: 2, wgpu };
        report.devices.iter_mut().for_each(|device| device.figures[0].on = Some("all".into()));
        report.devices[1].error = Some("it was lost".into());
        let block = "\
on vulkan, software, driver Mesa

peaks       median  unit     spread  by     on
peak flops   1,000  GFLOP/s   ±75 %  fused  all

matrix product  GFLOP/s  spread  of peak  by            (m, k) (k, n)
square 128          100    ±0 %     10 %  matmul_naive  (128, 128) (128, 128)

training step     median  unit          spread  of peak  on
gpt small time      1.50  ms             ±33 %           batch 12
gpt small tokens  44,100  tokens/s  one sample

skipped            why
matmul square 256  too slow

note: half of the figures spread by ±33 % or more; something else kept this device busy
";
        let row =
            "1,000          -        -          -            -          100     1.50    44,100";
        let expected = format!(
            "potluck 1.2.3, wgpu 30.0.1, linux x86_64, Some CPU, 2 cores; quick run\n\n\
             first {block}\nsecond one {block}\nended early: it was lost\n\n\
             device      peak GFLOP/s  copy GB/s  up GB/s  down GB/s  us/dispatch  best matmul  \
             ms/step  tokens/s\n\
             first              {row}\n\
             second one         {row}\n"
        );
        assert_eq!(report.to_string(), expected);
    }

    #[test]
    fn scaling_reads_as_rows_of_devices_and_of_ranks() {
        let mut note = |_: &str| {};
        let mut recorder = FigureRecorder::new(&mut note);
        let rank = |name: &str, computing, gradients| RankCost {
            name: name.into(),
            computing,
            gradients,
            tensors: 0.0,
            others: 0.0,
            between: 0.02,
        };
        let alone = ScalingFigure {
            devices: vec!["gpu".into()],
            step_s: 0.5,
            speedup: 1.0,
            efficiency: 1.0,
            predicted_s: None,
            exposed_s: None,
            hidden_s: None,
            ranks: Vec::new(),
            advice: None,
        };
        let both = ScalingFigure {
            devices: vec!["gpu".into(), "cpu".into()],
            step_s: 0.375,
            speedup: 4.0 / 3.0,
            efficiency: 0.875,
            predicted_s: Some(0.35),
            exposed_s: Some(0.004),
            hidden_s: Some(0.012),
            ranks: vec![rank("gpu", 0.9, 0.08), rank("cpu", 0.97, 0.01)],
            advice: Some("nothing".into()),
        };
        for (name, figure) in [("scaling.1_device", alone), ("scaling.2_devices", both)] {
            let rate = 24.0 / figure.step_s;
            let kind = FigureKind::Scaling(figure);
            recorder.add(Figure::new(kind, name, "samples/s", Direction::Higher, &[rate]));
        }
        let (figures, skipped) = recorder.finish();
        let figures = DeviceReport { figures, skipped, ..device("gpu + cpu") };
        let expected = "\
gpu + cpu on vulkan, software, driver Mesa

devices    samples/s      spread  step ms  predicted ms  speed-up  efficiency  exposed ms  hidden ms
gpu             48.0  one sample      500             -      1.00       100 %           -          -
gpu + cpu       64.0  one sample      375           350      1.33        88 %        4.00       12.0
the same batch on each row; speed-up by the fastest device alone, efficiency by the sum of the \
devices alone

on all devices  computes  waits for gradients  for other ranks  between steps
rank 0 gpu          90 %                  8 %              0 %            2 %
rank 1 cpu          97 %                  1 %              0 %            2 %

would help: nothing";
        assert_eq!(figures.to_string(), expected);
    }
}
