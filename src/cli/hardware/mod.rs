//! `potluck hardware`: a report on the graphics cards of this machine, made within an hour. Each
//! part of the report has a time limit and a separate file, which is kept after an interruption; a
//! page summarizes them, and an archive contains both.

mod archive;
mod certification;
mod endurance;
mod facts;
mod gpt2;
mod gradients;
mod measures;
mod memory;
pub mod parts;
mod peaks;
mod peer;
mod ranks;
mod record;
mod report;
mod robustness;
mod submissions;
mod summary;
mod training;
mod workshop;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::args::HardwareArgs;
use super::missing_driver;
use super::{InterruptedReportError, UsageError};
use crate::ui::terminal::{print_error, print_line};
use measures::PartReport;
use parts::{PLANS, PartPlan};
use potluck_core::files;
use potluck_core::format::shell_word;
use potluck_kernels::device::{Adapter, AdapterKind, Selection, list_adapters, no_adapter, select};
use potluck_train::TrainError;
use potluck_train::runtime::error::EXIT_CONFIGURATION;
use potluck_train::signals::Signals;
use report::Header;
use workshop::{Halt, Workshop};

/// Exit code of a report with a failed part.
const EXIT_FAILED: i32 = 1;

/// Adapter of the report, with its index in the list of all adapters.
struct ChosenAdapter {
    index: usize,
    adapter: Adapter,
}

/// Makes the report; returns the process's exit code.
///
/// # Errors
/// Returns `UsageError` for a folder with a report of other adapters, sizes or another version,
/// `InterruptedReportError` after a signal, and the errors of selecting devices and of files.
pub fn run(args: &HardwareArgs) -> anyhow::Result<i32> {
    let chosen = chosen(&args.devices)?;
    if chosen.is_empty() {
        print_error("no graphics card was found");
        for adapter in list_adapters() {
            if let Err(why) = adapter.usable() {
                print_line(&format!("- {} on {} is not used: {why}", adapter.name, adapter.api));
            }
        }
        for sentence in missing_driver::sentences() {
            print_line(&format!("- {sentence}"));
        }
        print_line("potluck devices lists what there is; name a device to report on it anyway");
        return Ok(EXIT_CONFIGURATION);
    }
    let signals = Signals::install()?;
    let failed = |why: io::Error| TrainError::Io { path: args.out.clone(), why };
    fs::create_dir_all(&args.out).map_err(failed)?;
    let folder = dunce::canonicalize(&args.out).map_err(failed)?;
    let adapters = chosen.iter().map(|one| (one.index, &one.adapter));
    let mut header = Header::of(adapters, args.toy);
    header.claim(&folder).map_err(UsageError)?;
    let report = Reporting { folder: &folder, header, args, signals: &signals };
    let outcome = report.all(&chosen);
    let page = report.sum_up();
    if let Ok(page) = &page {
        super::print(&page.text);
    }
    if let Err(Halt::Io(why)) = outcome {
        return Err(failed(why).into());
    }
    let page = page.map_err(failed)?;
    let path = archive::path(&folder);
    let archived =
        archive::write(&folder).map_err(|why| TrainError::Io { path: path.clone(), why });
    if let Err(Halt::Interrupted(signal)) = outcome {
        let command = command_to_go_on(args);
        return Err(InterruptedReportError { signal, command }.into());
    }
    print_line(&format!("the report is in {}", folder.display()));
    archived?;
    print_line(&format!("send {}: docs/hardware.md says where to", path.display()));
    Ok(if page.has_failed { EXIT_FAILED } else { 0 })
}

/// Adapters with these names, or else all graphics cards.
fn chosen(names: &[String]) -> Result<Vec<ChosenAdapter>, TrainError> {
    let listed = list_adapters();
    let mut chosen: Vec<ChosenAdapter> = Vec::new();
    if names.is_empty() {
        for (index, adapter) in listed.iter().enumerate() {
            let is_card = adapter.kind != AdapterKind::Software && adapter.merged_into.is_none();
            if is_card && adapter.usable().is_ok() {
                chosen.push(ChosenAdapter { index, adapter: adapter.clone() });
            }
        }
        return Ok(chosen);
    }
    if listed.is_empty() {
        return Err(no_adapter().into());
    }
    for name in names {
        let Selection::Adapter(adapter) = select(name, &listed)? else {
            let why = "it is no graphics card".into();
            let selector = name.clone();
            return Err(potluck_kernels::device::DeviceError::BadSelector { selector, why }.into());
        };
        let index = listed
            .iter()
            .position(|one| one.is_same_entry(&adapter))
            .expect("a selected adapter is one of the list");
        if !chosen.iter().any(|one| one.index == index) {
            chosen.push(ChosenAdapter { index, adapter: *adapter });
        }
    }
    Ok(chosen)
}

fn command_to_go_on(args: &HardwareArgs) -> String {
    let mut command = format!("potluck hardware --out {}", shell_word(&args.out.to_string_lossy()));
    if args.minutes != parts::MINUTES as u32 {
        command += &format!(" --minutes {}", args.minutes);
    }
    if args.toy {
        command += " --toy";
    }
    for part in &args.only {
        command += &format!(" --only {}", part.name());
    }
    for name in &args.devices {
        command += &format!(" {}", shell_word(name));
    }
    command
}

/// Report in progress.
struct Reporting<'a> {
    folder: &'a Path,
    header: Header,
    args: &'a HardwareArgs,
    signals: &'a Signals,
}

impl Reporting<'_> {
    /// Performs all unfinished parts, or the requested ones, on all adapters.
    fn all(&self, chosen: &[ChosenAdapter]) -> Result<(), Halt> {
        let cache = self.folder.join("cache");
        fs::create_dir_all(&cache)?;
        for one in chosen {
            let place = report::place_of(self.folder, one.index);
            fs::create_dir_all(&place)?;
            for plan in &PLANS {
                let is_asked_for = self.args.only.contains(&plan.part);
                let is_done = report::read(&place, plan.part).is_some();
                let is_due = if self.args.only.is_empty() { !is_done } else { is_asked_for };
                if is_due {
                    self.part(one, &place, &cache, plan)?;
                }
            }
        }
        Ok(())
    }

    fn part(
        &self,
        chosen: &ChosenAdapter,
        place: &Path,
        cache: &Path,
        plan: &PartPlan,
    ) -> Result<(), Halt> {
        let name = plan.part.name();
        let time = plan.time(self.args.minutes);
        let device = &chosen.adapter.name;
        print_line(&format!("{device}: {name}, for at most {}", minutes(time)));
        // Separate for each part, because a hung process of another part may still write to its
        // folder.
        let work = place.join(report::SCRATCH).join(&name);
        empty(&work)?;
        let log = place.join(format!("{name}.log"));
        // Removes the log of an earlier attempt.
        fs::write(&log, "")?;
        let started = Instant::now();
        let shop = Workshop {
            adapter: &chosen.adapter,
            selector: chosen.index.to_string(),
            place,
            work: work.clone(),
            cache,
            log,
            deadline: started + time,
            is_toy: self.args.toy,
            signals: self.signals,
        };
        let performed = (plan.perform)(&shop);
        // A process that was ended may still write to the folder, so errors are ignored.
        let _ = fs::remove_dir_all(&work);
        let found = performed?;
        let report = PartReport {
            part: plan.part,
            seconds: started.elapsed().as_secs_f64(),
            seconds_max: time.as_secs_f64(),
            skipped: found.skipped,
            measures: found.measures,
            details: found.details,
        };
        report::write(place, &report)?;
        self.sum_up()?;
        print_line(&format!("{device}: {name}: {}", summary::in_a_line(&report)));
        Ok(())
    }

    /// Writes the summary of the parts so far.
    fn sum_up(&self) -> io::Result<summary::Page> {
        let mut found = Vec::new();
        for (index, name) in &self.header.adapters {
            let place = report::place_of(self.folder, *index);
            let reports = PLANS.iter().map(|plan| report::read(&place, plan.part)).collect();
            found.push(summary::OfAdapter { name, reports });
        }
        let page = summary::page(&self.header, &found, self.args.minutes);
        files::replace(&self.folder.join(report::SUMMARY), page.text.as_bytes())?;
        Ok(page)
    }
}

/// Creates an empty folder, or empties an existing one.
fn empty(folder: &PathBuf) -> io::Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder)
}

fn minutes(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if seconds < 60.0 { format!("{seconds:.0} s") } else { format!("{:.1} min", seconds / 60.0) }
}
