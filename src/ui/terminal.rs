//! Progress output of a run: a bar on a terminal, plain lines elsewhere, nothing if quiet. It
//! goes to stderr; stdout is for the results of the run.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::format::{duration, thousands};
use super::ranks::{RankDisplay, RunningMeans};

const TEMPLATE: &str = "{pos}/{len} [{bar:24}] {msg} eta {eta} {prefix}";

/// Decay per step of the means that the bar shows of each device.
const SMOOTHING: f64 = 0.8;

/// Display of one step.
#[derive(Clone, Debug)]
pub struct StepDisplay {
    pub step: u64,
    pub loss: f64,
    pub tokens_per_s: f64,
    /// Devices by rank, if there are several.
    pub ranks: Vec<RankDisplay>,
}

/// State of the plain-text display.
pub struct PlainText {
    log_every: u64,
    steps: u64,
    started: Instant,
    first: u64,
    device: String,
    /// Means since the last line.
    means: RunningMeans,
}

/// Progress display of a run.
pub enum ProgressDisplay {
    Bar(ProgressBar, RunningMeans),
    PlainText(PlainText),
    Quiet,
}

impl ProgressDisplay {
    /// Creates the display of a run from step `done` to `steps` on `device`.
    pub fn new(quiet: bool, log_every: u64, done: u64, steps: u64, device: &str) -> Self {
        if quiet {
            return Self::Quiet;
        }
        if !std::io::stderr().is_terminal() {
            let (started, device, means) =
                (Instant::now(), device.to_string(), RunningMeans::default());
            return Self::PlainText(PlainText {
                log_every,
                steps,
                started,
                first: done,
                device,
                means,
            });
        }
        let bar = ProgressBar::new(steps).with_position(done);
        // A test parses the template, so it cannot fail here.
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(device.to_string());
        bar.reset_eta();
        bar.enable_steady_tick(Duration::from_millis(200));
        Self::Bar(bar, RunningMeans::default())
    }

    /// Shows a step; called after every step.
    pub fn step(&mut self, shown: &StepDisplay) {
        let text = format!("loss {:.4}  {} tokens/s", shown.loss, thousands(shown.tokens_per_s));
        match self {
            Self::Bar(bar, means) => {
                bar.set_message(text);
                if !shown.ranks.is_empty() {
                    means.forget(SMOOTHING);
                    means.add(&shown.ranks);
                    bar.set_prefix(format!("\n{}", means.block()));
                }
                bar.set_position(shown.step);
            }
            Self::PlainText(lines) => lines.step(shown, &text),
            Self::Quiet => {}
        }
    }

    /// Prints a line that stays: an evaluation, a checkpoint, a note.
    pub fn note(&self, text: &str) {
        match self {
            Self::Bar(bar, _) => bar.suspend(|| print_line(text)),
            Self::PlainText(_) => print_line(text),
            Self::Quiet => {}
        }
    }

    /// Prints a warning, even if quiet.
    pub fn warn(&self, text: &str) {
        let text = format!("warning: {text}");
        match self {
            Self::Bar(bar, _) => bar.suspend(|| print_line(&text)),
            _ => print_line(&text),
        }
    }

    /// Removes the progress bar.
    pub fn finish(&self) {
        if let Self::Bar(bar, _) = self {
            bar.finish_and_clear();
        }
    }
}

impl PlainText {
    fn step(&mut self, shown: &StepDisplay, text: &str) {
        let Self { log_every, steps, started, first, device, means } = self;
        means.add(&shown.ranks);
        let due = *log_every > 0 && shown.step.is_multiple_of(*log_every);
        if due || shown.step == *first + 1 || shown.step == *steps {
            let done = (shown.step - *first) as f64;
            let left = (*steps - shown.step) as f64 * started.elapsed().as_secs_f64() / done;
            let eta = duration(left);
            let devices = if shown.ranks.is_empty() { device.clone() } else { means.line() };
            print_line(&format!("step {}/{steps}  {text}  eta {eta}  {devices}", shown.step));
            *means = RunningMeans::default();
        }
    }
}

/// Returns a callback that prints the progress of certifying and autotuning kernels, if it takes
/// long: after a second, and then every five seconds.
pub fn kernels_note(quiet: bool) -> impl FnMut(&str, (usize, usize), Duration) {
    let mut next = Duration::from_secs(1);
    move |device, (done, total), elapsed| {
        if !quiet && elapsed >= next {
            next = elapsed + Duration::from_secs(5);
            let seconds = elapsed.as_secs_f64();
            print_line(&format!(
                "certifying and timing kernels on {device}: {done} of {total}, {seconds:.1} s"
            ));
        }
    }
}

/// Writes a line to stderr. A write error (a closed pipe, a terminal that is gone) is ignored,
/// and does not panic as `eprintln` would.
pub fn print_line(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_has_a_valid_template() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok());
    }
}
