//! Benchmark of plans: the step that `potluck plan` predicts for each layout of some models and
//! devices, beside the step that `potluck train` takes with the flags of that layout.
//!
//!     cargo bench --bench plans -- [--repeats N] [--layouts N] [--only NAME,..] [--out FILE]
//!     cargo bench --bench plans -- --slowed [--repeats N]
//!     cargo bench --bench plans -- --overlap [--repeats N]
//!
//! Settings with two nodes need Linux, network namespaces for users, and `tc`; all need a shell.
//! Repeats of the layouts of a setting take turns, and each repeat begins with a plan of its own,
//! so that a change of the machine's speed meets all of them alike. The error is that of the best
//! repeat, and 0 if some are predicted too long and others too short: what is beyond the spread of
//! the measurement. A plan is as good as its chosen layout, by measurement, beside the best
//! measured one. Settings that were kept aside while the planner was adjusted are reported apart.
//!
//! With `--slowed`, two equal devices train, of which one becomes half as fast in mid-run: how much
//! of the speed that is left the shares use that follow. A fault point doubles the time of passes
//! only, by sleeping; a quota of processor time takes half of a core.
//!
//! With `--overlap`, two nodes train over a network at which their messages take as long as their
//! passes: how much longer a step takes than without a limit of the rate.

#[path = "../../tests/common/namespaces.rs"]
mod namespaces;
mod overlap;
mod program;
mod quota;
mod settings;
mod slowed;

use std::error::Error;
use std::fs;

use potluck_bench::System;
use potluck_core::arithmetic::median;
use serde_json::{Value, json};

use program::Place;
use settings::{SETTINGS, Setting};

/// Milliseconds of the counted steps of a run, and bounds of their number.
const RUN_MS: f64 = 1_500.0;
const STEPS_MIN: f64 = 10.0;
const STEPS_MAX: f64 = 100.0;

/// Loss of a choice up to which it counts as good.
const GOOD: f64 = 0.07;

/// What is asked for on the command line.
struct Options {
    repeats: usize,
    layouts: usize,
    only: Option<Vec<String>>,
    out: Option<String>,
    /// Whether a device that becomes slow is measured, instead of plans.
    slowed: bool,
    /// Whether the communication of two nodes beside their computation is measured.
    overlap: bool,
}

impl Options {
    fn parsed() -> Result<Self, Box<dyn Error>> {
        let mut options =
            Self { repeats: 5, layouts: 4, only: None, out: None, slowed: false, overlap: false };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            match word.as_str() {
                // Cargo adds it.
                "--bench" => {}
                "--repeats" => options.repeats = words.next().ok_or("--repeats N")?.parse()?,
                "--layouts" => options.layouts = words.next().ok_or("--layouts N")?.parse()?,
                "--only" => {
                    let names = words.next().ok_or("--only NAME,..")?;
                    options.only = Some(names.split(',').map(str::to_owned).collect());
                }
                "--slowed" => options.slowed = true,
                "--overlap" => options.overlap = true,
                "--out" => options.out = words.next(),
                other => return Err(format!("unknown argument {other}").into()),
            }
        }
        let is_alone = options.slowed != options.overlap;
        if (options.slowed || options.overlap)
            && !(is_alone && options.only.is_none() && options.out.is_none())
        {
            return Err("--slowed and --overlap take only --repeats".into());
        }
        if options.repeats == 0 || options.layouts == 0 {
            return Err("--repeats and --layouts are at least 1".into());
        }
        Ok(options)
    }

    fn has(&self, setting: &Setting) -> bool {
        let names = [setting.model.name, setting.devices.name, &setting.name()];
        match &self.only {
            Some(only) => only.iter().any(|one| names.contains(&one.as_str())),
            None => true,
        }
    }
}

/// Layout with its predicted step and the measured ones, in milliseconds.
struct Layout {
    name: String,
    flags: String,
    /// By repeat, as are the measured ones.
    predicted: Vec<f64>,
    measured: Vec<f64>,
}

impl Layout {
    fn of(candidate: &Value) -> Self {
        let text = |key: &str| candidate[key].as_str().unwrap_or_default().to_string();
        let devices = candidate["devices"].as_array().map_or(0, Vec::len);
        Self {
            name: format!("{} on {devices} m{}", text("layout"), candidate["micro_batch"]),
            flags: text("flags"),
            predicted: vec![candidate["step_ms"].as_f64().unwrap_or(f64::NAN)],
            measured: Vec::new(),
        }
    }

    fn steps(&self) -> usize {
        (RUN_MS / self.predicted[0]).clamp(STEPS_MIN, STEPS_MAX) as usize
    }

    /// Takes what a later plan predicts; a plan that does not list the layout changes nothing.
    fn predict_again(&mut self, plan: &Value) -> Result<(), Box<dyn Error>> {
        let mut predicted = self.predicted[self.predicted.len() - 1];
        for candidate in candidates(plan)? {
            let other = Self::of(candidate);
            if other.name == self.name {
                predicted = other.predicted[0];
                break;
            }
        }
        self.predicted.push(predicted);
        Ok(())
    }

    fn median(&self) -> f64 {
        median(&self.measured)
    }

    /// Fastest and slowest repeat.
    fn range(&self) -> (f64, f64) {
        let fastest = self.measured.iter().copied().fold(f64::INFINITY, f64::min);
        (fastest, self.measured.iter().copied().fold(0.0, f64::max))
    }

    /// Relative error of the predictions beyond the spread of the measurement.
    fn error(&self) -> f64 {
        let mut errors = [f64::INFINITY, f64::NEG_INFINITY];
        for (predicted, measured) in self.predicted.iter().zip(&self.measured) {
            let error = predicted / measured - 1.0;
            errors = [errors[0].min(error), errors[1].max(error)];
        }
        let [least, most] = errors;
        if least <= 0.0 && most >= 0.0 { 0.0 } else { least.abs().min(most.abs()) }
    }

    fn json(&self, setting: &Setting) -> Value {
        json!({
            "setting": setting.name(),
            "aside": setting.is_aside,
            "layout": self.name,
            "predicted_ms": self.predicted,
            "measured_ms": self.measured,
            "error": self.error(),
        })
    }
}

/// Errors of layouts and losses of choices.
#[derive(Default)]
struct Summary {
    errors: Vec<f64>,
    losses: Vec<f64>,
}

impl Summary {
    /// Adds the layouts of a setting, the chosen one first.
    fn add(&mut self, layouts: &[Layout]) {
        let best = layouts.iter().map(Layout::median).fold(f64::INFINITY, f64::min);
        self.losses.push(layouts[0].median() / best - 1.0);
        self.errors.extend(layouts.iter().map(Layout::error));
    }

    fn line(&mut self) -> String {
        if self.errors.is_empty() {
            return "nothing".into();
        }
        self.errors.sort_by(f64::total_cmp);
        let at = |part: f64| {
            let last = self.errors.len() - 1;
            100.0 * self.errors[(last as f64 * part).round() as usize]
        };
        let good = self.losses.iter().filter(|loss| **loss <= GOOD).count();
        format!(
            "{} layouts of {} settings: error beyond the spread, median {:.1} %, 90th percentile \
             {:.1} %, most {:.1} %; {good} of {} choices within {:.0} % of the best",
            self.errors.len(),
            self.losses.len(),
            at(0.5),
            at(0.9),
            at(1.0),
            self.losses.len(),
            100.0 * GOOD
        )
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parsed()?;
    let here = System::here();
    println!("{}, {} cores; medians of {} repeats", here.cpu, here.cores, options.repeats);
    if options.overlap {
        return overlap::report(options.repeats);
    }
    if options.slowed {
        return slowed::report(options.repeats);
    }
    println!(
        "{:36} {:26} {:>9}  {:>8}  {:>6}  {:>7}",
        "setting", "layout", "predicted", "ms", "+-", "error"
    );
    let mut adjusted = Summary::default();
    let mut aside = Summary::default();
    let mut rows = Vec::new();
    for setting in SETTINGS.iter().filter(|setting| options.has(setting)) {
        let layouts = match measured_setting(setting, &options) {
            Ok(layouts) => layouts,
            Err(why) => {
                println!("{}: not measured: {why}", setting.name());
                continue;
            }
        };
        let summary = if setting.is_aside { &mut aside } else { &mut adjusted };
        summary.add(&layouts);
        rows.extend(layouts.iter().map(|layout| layout.json(setting)));
    }
    println!("{}", adjusted.line());
    println!("kept aside: {}", aside.line());
    if let Some(path) = &options.out {
        let report = json!({
            "processor": format!("{}, {} cores", here.cpu, here.cores),
            "repeats": options.repeats,
            "layouts": rows,
        });
        fs::write(path, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    Ok(())
}

/// Measures the layouts of a setting, prints them, and returns them, the chosen one first.
fn measured_setting(setting: &Setting, options: &Options) -> Result<Vec<Layout>, Box<dyn Error>> {
    let place = Place::new(setting)?;
    let mut layouts = compared(&place.plan()?, options.layouts)?;
    for repeat in 0..options.repeats {
        if repeat > 0 {
            let plan = place.plan()?;
            for layout in &mut layouts {
                layout.predict_again(&plan)?;
            }
        }
        for layout in &mut layouts {
            let step_ms = place.step_ms(&layout.flags, layout.steps())?;
            layout.measured.push(step_ms);
        }
    }
    for layout in &layouts {
        let (fastest, slowest) = layout.range();
        println!(
            "{:36} {:26} {:9.2}  {:8.2}  {:4.1} %  {:5.1} %",
            setting.name(),
            layout.name,
            median(&layout.predicted),
            layout.median(),
            50.0 * (slowest - fastest) / layout.median(),
            100.0 * layout.error()
        );
    }
    Ok(layouts)
}

/// Layouts of a plan to measure: the chosen one, or else the fastest one that flags can run, of
/// each kind of layout the fastest, and the next fastest.
fn compared(plan: &Value, most: usize) -> Result<Vec<Layout>, Box<dyn Error>> {
    let mut kinds = Vec::new();
    let mut layouts = Vec::new();
    let mut later = Vec::new();
    for candidate in candidates(plan)? {
        let layout = Layout::of(candidate);
        if layout.flags.is_empty() {
            continue;
        }
        if kinds.contains(&kind(candidate)) {
            later.push(layout);
        } else {
            kinds.push(kind(candidate));
            layouts.push(layout);
        }
    }
    if layouts.is_empty() {
        return Err(format!("no flags run a layout of {plan}").into());
    }
    layouts.extend(later);
    layouts.truncate(most);
    Ok(layouts)
}

/// Candidates of a plan, the chosen one first.
fn candidates(plan: &Value) -> Result<Vec<&Value>, Box<dyn Error>> {
    let others = plan["others"].as_array().ok_or("a plan without others")?;
    Ok([&plan["chosen"]].into_iter().chain(others).collect())
}

/// Mesh of a candidate: ranks of each axis.
fn kind(candidate: &Value) -> String {
    candidate["mesh"].to_string()
}
