//! Terminal sink of a run's events: a progress bar on a terminal, plain lines elsewhere, warnings
//! only if quiet. It writes to stderr; stdout is for the results of the run.

use std::borrow::Cow;
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::cost::cost_lines;
use super::log::{self, Level};
use super::ranks::{RunningMeans, short_name};
use potluck_core::format::{clock, counted_large, thousands};
use potluck_core::metrics::{EvalRecord, Event, MetricsError, Sink, StepRecord};

const TEMPLATE: &str = "{pos}/{len} [{bar:16}] {msg} eta {eta} {prefix}";

/// Decay per step of the means that the bar shows of each device.
const SMOOTHING: f64 = 0.8;

/// Delay of the first message about the progress of tuning, and interval of later ones: tuning
/// mostly ends sooner.
const TUNING_DELAY: Duration = Duration::from_secs(1);
const TUNING_INTERVAL: Duration = Duration::from_secs(5);

/// The same for an evaluation in plain text; a progress bar shows it at once.
const EVALUATING_DELAY: Duration = Duration::from_secs(3);
const EVALUATING_INTERVAL: Duration = Duration::from_secs(10);

/// Returns true if stderr is a terminal on which a line can replace the one before.
pub fn moves_cursor() -> bool {
    !ProgressDrawTarget::stderr().is_hidden()
}

/// Sink that shows events on stderr.
pub struct Terminal {
    quiet: bool,
    log_every: Arc<AtomicU64>,
    /// Bar on a terminal, with running means of the devices; `None` if quiet, or not started.
    bar: Option<(ProgressBar, RunningMeans)>,
    /// Lines about the steps if no bar shows them, or if the log has a file.
    lines: Option<PlainText>,
    /// Step from which evaluations are compared, if not all are.
    best_since: Option<u64>,
    /// Time of tuning from which its progress is shown again.
    next_tuning: Duration,
    /// Time of the evaluation in progress from which it is shown again.
    next_evaluating: Duration,
}

/// State of the plain-text display.
struct PlainText {
    steps: u64,
    started: Instant,
    first: u64,
    device: String,
    /// Means since the last line.
    means: RunningMeans,
}

impl Terminal {
    /// Creates a sink that shows only warnings if `quiet`; without a terminal it prints a line
    /// every `log_every` steps.
    pub fn new(quiet: bool, log_every: u64) -> Self {
        Self {
            quiet,
            log_every: Arc::new(AtomicU64::new(log_every)),
            bar: None,
            lines: None,
            best_since: None,
            next_tuning: TUNING_DELAY,
            next_evaluating: EVALUATING_DELAY,
        }
    }

    /// Returns the number of steps between two lines, to be set once it is known.
    pub fn log_every(&self) -> Arc<AtomicU64> {
        self.log_every.clone()
    }

    fn start(&mut self, done: u64, steps: u64, device: &str) {
        let device = short_name(device);
        if self.quiet {
            return;
        }
        let bar = self.new_bar(done, steps);
        if bar.is_none() || log::has_file() {
            self.lines = Some(PlainText {
                steps,
                started: Instant::now(),
                first: done,
                device: device.clone(),
                means: RunningMeans::default(),
            });
        }
        let Some(bar) = bar else { return };
        bar.set_prefix(device);
        bar.reset_eta();
        bar.enable_steady_tick(Duration::from_millis(200));
        self.bar = Some((bar, RunningMeans::default()));
    }

    /// Returns the progress bar; `None` where lines take its place: in a file or a pipe, as JSON,
    /// and on a terminal that cannot move its cursor (`TERM=dumb`).
    fn new_bar(&self, done: u64, steps: u64) -> Option<ProgressBar> {
        if !std::io::stderr().is_terminal() || !log::is_text() {
            return None;
        }
        let bar = ProgressBar::new(steps).with_position(done);
        // A test parses the template, so it cannot fail here.
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style.progress_chars("=> "));
        }
        if bar.is_hidden() { None } else { Some(bar) }
    }

    fn step(&mut self, step: &StepRecord) {
        let text = step_text(step);
        let every = self.log_every.load(Ordering::Relaxed);
        let line = match &mut self.lines {
            Some(lines) => lines.step(step, &text, every),
            None => None,
        };
        let Some((bar, means)) = &mut self.bar else {
            if let Some(line) = line {
                print_line(&line);
            }
            return;
        };
        if let Some(line) = line {
            log::write_to_file(Level::Info, None, &line);
        }
        bar.set_message(text);
        if !step.ranks.is_empty() {
            means.forget(SMOOTHING);
            means.add(&step.ranks);
            bar.set_prefix(format!("\n{}", means.block()));
        }
        bar.set_position(step.step);
    }

    /// Prints a line that stays above the progress bar.
    fn print(&self, level: Level, text: &str) {
        match &self.bar {
            Some((bar, _)) => bar.suspend(|| log::write(level, None, text)),
            None => log::write(level, None, text),
        }
    }

    fn note(&self, text: &str) {
        if !self.quiet {
            self.print(Level::Info, text);
        }
    }

    fn evaluating(&mut self, done: u64, total: u64, elapsed: Duration) {
        let of = counted_large(total, "sample", "samples");
        let text = format!("evaluating {} of {of}", thousands(done as f64));
        match &self.bar {
            Some((bar, _)) => bar.set_message(text),
            _ if done < total && elapsed >= self.next_evaluating => {
                self.next_evaluating = elapsed + EVALUATING_INTERVAL;
                self.note(&format!("{text}, {:.0} s", elapsed.as_secs_f64()));
            }
            _ => {}
        }
        if done == total {
            self.next_evaluating = EVALUATING_DELAY;
        }
    }

    fn evaluation(&self, record: &EvalRecord) {
        self.note(&evaluation_text(record, self.best_since));
    }

    fn tuning(&mut self, device: &str, done: usize, total: usize, elapsed: Duration) {
        if elapsed < self.next_tuning {
            return;
        }
        self.next_tuning = elapsed + TUNING_INTERVAL;
        let seconds = elapsed.as_secs_f64();
        self.note(&format!(
            "certifying and timing kernels on {device}: {done} of {total}, {seconds:.1} s"
        ));
    }
}

impl Sink for Terminal {
    fn event(&mut self, event: &Event) -> Result<(), MetricsError> {
        match event {
            Event::Note(text) => self.note(text),
            Event::Shares(record) => self.note(&record.sentence()),
            Event::Warning(text) => self.print(Level::Warning, text),
            Event::Tuning { device, done, total, elapsed } => {
                self.tuning(device, *done, *total, *elapsed);
            }
            Event::Started { done, steps, device } => self.start(*done, *steps, device),
            Event::Step(step) => self.step(step),
            Event::Evaluating { done, total, elapsed } => {
                self.evaluating(*done, *total, *elapsed);
            }
            Event::Evaluation(evaluation) => self.evaluation(evaluation),
            // Measures are shown after the sample text, at the end of the program.
            Event::Opening
            | Event::Measuring
            | Event::Saving { .. }
            | Event::Checkpoint { .. }
            | Event::Measure(_) => {}
            Event::Cost(cost) => {
                for line in cost_lines(cost) {
                    self.note(&line);
                }
            }
            Event::Ended => {
                if let Some((bar, _)) = &self.bar {
                    bar.finish_and_clear();
                }
            }
        }
        Ok(())
    }

    fn forget_evaluations(&mut self, step: u64) {
        self.best_since = Some(step);
    }
}

impl PlainText {
    /// Line about a step, if one is due.
    fn step(&mut self, step: &StepRecord, text: &str, log_every: u64) -> Option<String> {
        let Self { steps, started, first, device, means } = self;
        means.add(&step.ranks);
        let number = step.step;
        let due = log_every > 0 && number.is_multiple_of(log_every);
        if !due && number != *first + 1 && number != *steps {
            return None;
        }
        let done = (number - *first) as f64;
        let left = (*steps - number) as f64 * started.elapsed().as_secs_f64() / done;
        let eta = clock(left);
        let devices = if step.ranks.is_empty() { device.clone() } else { means.line() };
        *means = RunningMeans::default();
        Some(format!("step {number}/{steps}  {text}  eta {eta}  {devices}"))
    }
}

/// Formats an evaluation: `step 20  val_loss 0.4133 on 1,024 samples, the best so far`, or since
/// the step from which evaluations are compared.
fn evaluation_text(record: &EvalRecord, best_since: Option<u64>) -> String {
    let EvalRecord { step, val_loss, metrics, terms, samples, is_best, .. } = record;
    let mark = match best_since {
        _ if !is_best => String::new(),
        None => ", the best so far".into(),
        Some(since) => format!(", the best since step {since}"),
    };
    let samples = counted_large(*samples, "sample", "samples");
    let metric = |(name, value): &(Cow<str>, f64)| format!("  {name} {value:.4}");
    let metrics: String = metrics.iter().chain(terms).map(metric).collect();
    format!("step {step}  val_loss {val_loss:.4}{metrics} on {samples}{mark}")
}

/// Formats the figures of a step: `loss 2.3775  lr 9.52e-4  norm 0.53  2,036 tokens/s`.
fn step_text(step: &StepRecord) -> String {
    let StepRecord { loss, terms, lr, grad_norm: norm, unit, per_s, .. } = step;
    let speed = thousands(*per_s);
    let unit = unit.name();
    let norm = if *norm < 1e4 { format!("{norm:.2}") } else { format!("{norm:.2e}") };
    let mut text = format!("loss {loss:.4}");
    for (name, value) in terms {
        text += &format!("  {name} {value:.4}");
    }
    text + &format!("  lr {lr:.2e}  norm {norm}  {speed} {unit}/s")
}

/// Writes a line to stderr and the log.
pub fn print_line(text: &str) {
    log::write(Level::Info, None, text);
}

/// Writes a line about something that went wrong without ending the command.
pub fn print_warning(text: &str) {
    log::write(Level::Warning, None, text);
}

/// Writes the error with which a command ends.
pub fn print_error(text: &str) {
    log::write(Level::Error, None, text);
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_core::metrics::Unit;

    #[test]
    fn a_step_is_shown_with_its_learning_rate_and_its_gradient_norm() {
        let step = |lr, grad_norm| StepRecord {
            step: 400,
            loss: 2.37751,
            terms: Vec::new(),
            lr,
            grad_norm,
            loss_scale: None,
            unit: Unit::Tokens,
            count: 768,
            ms: 377.0,
            per_s: 2036.4,
            busy: None,
            ranks: Vec::new(),
            skipped: None,
        };
        let text = step_text(&step(9.517e-4, 0.5349));
        assert_eq!(text, "loss 2.3775  lr 9.52e-4  norm 0.53  2,036 tokens/s");
        let terms = vec![("kl".into(), 0.25), ("errors".into(), 2.0)];
        let text = step_text(&StepRecord { terms, ..step(1e-3, 0.5) });
        assert!(text.starts_with("loss 2.3775  kl 0.2500  errors 2.0000  lr 1.00e-3"), "{text}");
        assert!(step_text(&step(1e-3, 123_456.0)).contains("lr 1.00e-3  norm 1.23e5  "));
        assert!(step_text(&step(1e-3, f64::NAN)).contains("norm NaN  "));
    }

    #[test]
    fn an_evaluation_is_the_best_of_those_with_which_it_is_compared() {
        let mut record = EvalRecord {
            step: 20,
            val_loss: 0.41331,
            metrics: vec![("val_accuracy".into(), 0.5)],
            terms: Vec::new(),
            samples: 1024,
            targets: 1024,
            is_best: true,
        };
        let text = evaluation_text(&record, None);
        let start = "step 20  val_loss 0.4133  val_accuracy 0.5000 on 1,024 samples";
        assert_eq!(text, format!("{start}, the best so far"));
        let text = evaluation_text(&record, Some(10));
        assert_eq!(text, format!("{start}, the best since step 10"));
        (record.is_best, record.samples) = (false, 1);
        assert!(evaluation_text(&record, Some(10)).ends_with(" on 1 sample"));
    }

    #[test]
    fn the_bar_has_a_valid_template() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok());
    }
}
