//! The page that summarizes a report, made from the files of its parts.

use std::fmt::Write as _;

use super::measures::{Measure, PartReport};
use super::parts::{PLANS, PartPlan};
use super::report::Header;

/// Longest text of a cell; the file of the part has the whole text.
const CELL_MAX: usize = 160;

/// Number of measures of a part in a line.
const NUMBERS: usize = 4;

/// The page of a report.
pub struct Page {
    pub text: String,
    /// True if a part has failed.
    pub has_failed: bool,
}

/// Reports of an adapter, in the order of [`PLANS`]; `None` for an unfinished part.
pub struct OfAdapter<'a> {
    pub name: &'a str,
    pub reports: Vec<Option<PartReport>>,
}

/// Returns the page of a report with a time in minutes for each adapter.
pub fn page(header: &Header, adapters: &[OfAdapter], minutes: u32) -> Page {
    let Header { potluck, build, system, .. } = header;
    let mut text = format!(
        "# potluck {potluck} ({build}) on {} {}, {}, {} cores\n",
        system.os, system.architecture, system.cpu, system.cores
    );
    if header.is_toy {
        text += "\nA rehearsal at toy sizes: its figures say nothing about a device.\n";
    }
    let mut has_failed = false;
    for OfAdapter { name, reports } in adapters {
        // Writing to a string cannot fail.
        let _ = write!(text, "\n## {name}\n\n{}\n\n", in_short(reports));
        text += "| part | | number | limit | result | time |\n|---|---|---|---|---|---|\n";
        for (plan, report) in PLANS.iter().zip(reports) {
            has_failed |= report.as_ref().is_some_and(PartReport::has_failed);
            text += &match report {
                Some(report) => rows(report),
                None => not_done(plan, minutes),
            };
        }
    }
    Page { text, has_failed }
}

/// Returns a sentence with the number of completed parts and the names of failed ones.
fn in_short(reports: &[Option<PartReport>]) -> String {
    let mut done = 0;
    let mut failed = Vec::new();
    for report in reports.iter().flatten() {
        done += 1;
        if report.has_failed() {
            failed.push(report.part.name());
        }
    }
    let parts = format!("{done} of {} parts are done", reports.len());
    if failed.is_empty() {
        format!("{parts}; none has failed.")
    } else {
        format!("{parts}; **failed: {}**.", failed.join(", "))
    }
}

fn not_done(plan: &PartPlan, minutes: u32) -> String {
    let limit = plan.time(minutes).as_secs_f64();
    let part = plan.part.name();
    format!("| {part} | | | | not done | of {limit:.0} s |\n")
}

/// Rows of a part; the first row has its name and its time.
fn rows(report: &PartReport) -> String {
    let PartReport { seconds, seconds_max, .. } = report;
    let mut part = report.part.name();
    let mut time = format!("{seconds:.0} of {seconds_max:.0} s");
    if let Some(why) = &report.skipped {
        return format!("| {part} | | | | skipped: {} | {time} |\n", cell(why));
    }
    let mut text = String::new();
    for Measure { name, text: number, limit, is_right, .. } in &report.measures {
        let result = match (limit, is_right) {
            (None, _) => "",
            (Some(_), true) => "pass",
            (Some(_), false) => "**fail**",
        };
        let limit = limit.as_deref().unwrap_or_default();
        let [name, number, limit] = [name, number, limit].map(cell);
        let _ = writeln!(text, "| {part} | {name} | {number} | {limit} | {result} | {time} |");
        part.clear();
        time.clear();
    }
    text
}

/// Returns a text as a cell of a table: its first line, shortened.
fn cell(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default().replace('|', "\\|");
    let mut short: String = line.chars().take(CELL_MAX).collect();
    if short.len() < line.len() {
        short += "..";
    }
    short
}

/// Returns the result of a part in a line: the failed measures, or else the first ones.
pub fn in_a_line(report: &PartReport) -> String {
    if let Some(why) = &report.skipped {
        return format!("skipped: {why}");
    }
    let mut all = Vec::new();
    let mut failed = Vec::new();
    for measure in &report.measures {
        let text = format!("{} {}", measure.name, cell(&measure.text));
        if !measure.is_right {
            failed.push(text.clone());
        }
        all.push(text);
    }
    if !failed.is_empty() {
        return format!("FAILED: {}", failed.join("; "));
    }
    all.truncate(NUMBERS);
    format!("pass, {:.0} s: {}", report.seconds, all.join("; "))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::cli::hardware::parts::HardwarePart;
    use potluck_bench::System;
    use serde_json::Value;

    fn header() -> Header {
        Header {
            potluck: "1".into(),
            build: "abc".into(),
            is_toy: true,
            system: System::here(),
            adapters: BTreeMap::new(),
        }
    }

    fn report(part: HardwarePart, measures: Vec<Measure>) -> PartReport {
        let (seconds, seconds_max, skipped) = (2.0, 60.0, None);
        PartReport { part, seconds, seconds_max, skipped, measures, details: Value::Null }
    }

    #[test]
    fn each_part_has_its_lines_with_numbers_limits_and_results() {
        let mut reports: Vec<Option<PartReport>> = vec![None; PLANS.len()];
        let long = format!("a | b\n{}", "x".repeat(999));
        let facts = vec![Measure::number("memory", 8.0, "GiB"), Measure::fact("driver", long)];
        reports[0] = Some(report(HardwarePart::Facts, facts));
        let limit = Measure::at_most("kernels switched off", 2.0, 0.0, "");
        reports[1] = Some(report(HardwarePart::Certification, vec![limit]));
        let skipped = Some("python3 has no torch".to_string());
        reports[10] = Some(PartReport { skipped, ..report(HardwarePart::Peer, Vec::new()) });
        let page = page(&header(), &[OfAdapter { name: "card", reports }], 60);
        for line in [
            "A rehearsal at toy sizes: its figures say nothing about a device.",
            "## card",
            "3 of 12 parts are done; **failed: certification**.",
            "| facts | memory | 8 GiB |  |  | 2 of 60 s |",
            "|  | driver | a \\| b |  |  |  |",
            "| certification | kernels switched off | 2 | at most 0 | **fail** | 2 of 60 s |",
            "| training | | | | not done | of 180 s |",
            "| peer | | | | skipped: python3 has no torch | 2 of 60 s |",
        ] {
            assert!(page.text.lines().any(|found| found == line), "{line} in\n{}", page.text);
        }
        assert!(page.has_failed);
    }

    #[test]
    fn a_line_names_what_failed() {
        let failed = Measure::at_most("loss", 2.0, 1.0, "nats");
        let measures = vec![Measure::number("steps", 3.0, ""), failed];
        assert_eq!(in_a_line(&report(HardwarePart::Training, measures)), "FAILED: loss 2 nats");
        let right = vec![Measure::number("steps", 3.0, "")];
        assert_eq!(in_a_line(&report(HardwarePart::Training, right)), "pass, 2 s: steps 3");
    }
}
