//! State of a run in the text format of Prometheus, version 0.0.4.

use std::fmt::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use super::board::StatusView;
use super::health::Health;
use super::run_status::{RankTotals, RunPhase, RunStatus};
use crate::nodes::{LinkStatus, LinksStatus};
use potluck_core::metrics::StepRecord;
use potluck_core::{build_hash, whole_hash};

pub(super) const MEDIA_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Returns all metrics of a run. Unknown values are left out.
pub(super) fn metrics(view: &StatusView) -> String {
    let mut text = Exposition::default();
    let run = &*view.run;
    about(&mut text, view);
    progress(&mut text, run);
    if let Some(step) = &run.last_step {
        last_step(&mut text, step);
    }
    work(&mut text, run);
    if let Some(links) = &view.links {
        network(&mut text, links, view);
    }
    text.0
}

/// Text under construction.
#[derive(Default)]
struct Exposition(String);

/// Labels of a sample, by name.
type Labels<'a> = [(&'static str, &'a str)];

impl Exposition {
    /// Begins a metric, whose samples follow. A name that ends in `_total` makes it a counter,
    /// which only rises, until the program starts again. The help is one line without backslashes.
    fn begin(&mut self, name: &str, help: &str) {
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        self.write(format_args!("# HELP potluck_{name} {help}\n# TYPE potluck_{name} {kind}\n"));
    }

    fn sample(&mut self, name: &str, labels: &Labels, value: f64) {
        self.write(format_args!("potluck_{name}"));
        for (index, (label, value)) in labels.iter().enumerate() {
            let opening = if index == 0 { '{' } else { ',' };
            self.write(format_args!("{opening}{label}=\"{}\"", Escaped(value)));
        }
        let closing = if labels.is_empty() { "" } else { "}" };
        self.write(format_args!("{closing} {}\n", SampleValue(value)));
    }

    /// Writes a metric with one sample.
    fn one(&mut self, name: &str, help: &str, value: f64) {
        self.begin(name, help);
        self.sample(name, &[], value);
    }

    fn write(&mut self, text: fmt::Arguments) {
        // Writing to a string never fails.
        let _ = self.0.write_fmt(text);
    }
}

/// Value of a label, with the characters escaped that would end it.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for letter in self.0.chars() {
            match letter {
                '\\' => f.write_str("\\\\")?,
                '"' => f.write_str("\\\"")?,
                '\n' => f.write_str("\\n")?,
                other => f.write_char(other)?,
            }
        }
        Ok(())
    }
}

struct SampleValue(f64);

impl fmt::Display for SampleValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(value) = *self;
        if value.is_nan() {
            f.write_str("NaN")
        } else if value.is_infinite() {
            f.write_str(if value > 0.0 { "+Inf" } else { "-Inf" })
        } else {
            // As short as possible, with an exponent if that is shorter.
            write!(f, "{value:?}")
        }
    }
}

fn unix_seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn flag(is_set: bool) -> f64 {
    f64::from(u8::from(is_set))
}

fn about(text: &mut Exposition, view: &StatusView) {
    let run = &*view.run;
    text.begin("build_info", "Version of the program and hash of its sources.");
    text.sample(
        "build_info",
        &[("version", run.about.version), ("build", whole_hash(build_hash()))],
        1.0,
    );
    let name = run.about.name.as_deref().unwrap_or_default();
    let node = match run.nodes.you {
        Some(node) => node.0.to_string(),
        None => String::new(),
    };
    let generation = run.nodes.generation.0.to_string();
    text.begin("run_info", "Name of the run, number of this node, generation.");
    let labels = [("run", name), ("node", &*node), ("generation", &*generation)];
    text.sample("run_info", &labels, 1.0);
    if !run.nodes.nodes.is_empty() {
        text.begin("node_info", "Host and devices of each node of the run.");
        for node in &run.nodes.nodes {
            let number = node.node.0.to_string();
            let devices = node.devices.join(", ");
            let labels = [("node", &*number), ("host", &*node.host), ("devices", &*devices)];
            text.sample("node_info", &labels, 1.0);
        }
    }
    let health = Health::of(run, view.now);
    let help = "1 while the run goes on as it should, and 0 if no step came in time.";
    text.one("healthy", help, flag(health.is_healthy));
    let help = "Time since the last sign of progress.";
    text.one("progress_age_seconds", help, health.silence.as_secs_f64());
    text.begin("phase", "1 for what the run does at present.");
    for name in RunPhase::NAMES {
        text.sample("phase", &[("phase", name)], flag(run.phase.name() == name));
    }
}

fn progress(text: &mut Exposition, run: &RunStatus) {
    text.one("step", "Steps that are done, over all starts.", run.done as f64);
    if let Some(steps) = run.steps {
        text.one("planned_steps", "Step after which the run ends.", steps as f64);
    }
    let taken = run.steps_taken as f64;
    text.one("steps_total", "Steps since the start of the program.", taken);
    let help = "Steps that updated nothing, because a value was not finite.";
    text.one("skipped_steps_total", help, run.steps_skipped as f64);
    text.one("warnings_total", "Warnings of the run.", run.warnings as f64);
    if let Some(at) = run.last_step_at {
        let help = "Time of the last step.";
        text.one("last_step_timestamp_seconds", help, unix_seconds(at));
    }
    if let Some(evaluation) = &run.last_evaluation {
        let help = "Mean loss of the last evaluation.";
        text.one("validation_loss", help, evaluation.val_loss);
        let help = "Step of the last evaluation.";
        text.one("validation_step", help, evaluation.step as f64);
    }
    if let Some(checkpoint) = run.last_checkpoint {
        let help = "Step of the last checkpoint.";
        text.one("checkpoint_step", help, checkpoint.step as f64);
        if let Some(at) = checkpoint.at {
            let help = "Time of the last checkpoint.";
            text.one("checkpoint_timestamp_seconds", help, unix_seconds(at));
        }
    }
}

fn last_step(text: &mut Exposition, step: &StepRecord) {
    text.one("loss", "Mean loss of the last step.", step.loss);
    text.one("learning_rate", "Learning rate of the last step.", step.lr);
    let help = "Norm of the gradient of the last step, before clipping.";
    text.one("gradient_norm", help, step.grad_norm);
    if let Some(scale) = step.loss_scale {
        text.one("loss_scale", "Loss scale of the last step.", scale);
    }
    text.one("step_seconds", "Time of the last step.", step.ms / 1e3);
    let unit = step.unit.name();
    let help = format!("Rate of the last step, in {unit}.");
    text.one(&format!("{unit}_per_second"), &help, step.per_s);
}

fn work(text: &mut Exposition, run: &RunStatus) {
    if let Some(step) = &run.last_step {
        let unit = step.unit.name();
        let help = format!("Trained {unit} since the start of the program.");
        text.one(&format!("{unit}_total"), &help, run.counted as f64);
    }
    if run.ranks.is_empty() {
        return;
    }
    let help = "Time of steps in which a rank has worked.";
    ranks(text, run, "rank_busy_seconds_total", help, |rank| rank.busy.as_secs_f64());
    let help = "Time of steps in which a rank has waited for others.";
    ranks(text, run, "rank_waiting_seconds_total", help, |rank| rank.waiting.as_secs_f64());
    if run.ranks.len() > 1 {
        let help = "Samples of a rank in a step.";
        ranks(text, run, "rank_share_samples", help, |rank| rank.share as f64);
    }
}

/// Writes a metric with one sample per rank.
fn ranks(
    text: &mut Exposition,
    run: &RunStatus,
    name: &str,
    help: &str,
    value: impl Fn(&RankTotals) -> f64,
) {
    text.begin(name, help);
    for (number, rank) in run.ranks.iter().enumerate() {
        let number = number.to_string();
        text.sample(name, &[("rank", &number), ("device", &rank.device)], value(rank));
    }
}

fn network(text: &mut Exposition, state: &LinksStatus, view: &StatusView) {
    let help = "Peers that were refused.";
    text.one("refused_peers_total", help, state.refused as f64);
    if let Some(buffers) = state.socket_buffers {
        let help = "Buffers of the UDP socket, as the system has made them.";
        text.begin("socket_buffer_bytes", help);
        for (direction, bytes) in [("receive", buffers.receive), ("send", buffers.send)] {
            text.sample("socket_buffer_bytes", &[("direction", direction)], bytes as f64);
        }
    }
    let mut metric = |name: &str, help: &str, value: &dyn Fn(&LinkStatus) -> Option<f64>| {
        let name = format!("link_{name}");
        let mut has_begun = false;
        for link in &state.links {
            let Some(value) = value(link) else { continue };
            if !has_begun {
                text.begin(&name, help);
                has_begun = true;
            }
            let number = link.node.0.to_string();
            text.sample(&name, &[("node", &number), ("host", &link.host)], value);
        }
    };
    metric("sent_bytes_total", "Bytes of datagrams that were sent.", &|link| {
        Some(link.stats.bytes_sent as f64)
    });
    metric("received_bytes_total", "Bytes of datagrams that came.", &|link| {
        Some(link.stats.bytes_received as f64)
    });
    let help = "Rate of sending over the last five seconds or more.";
    metric("sent_bytes_per_second", help, &|link| Some(link.bytes_sent_per_s));
    let help = "Rate of receiving over the last five seconds or more.";
    metric("received_bytes_per_second", help, &|link| Some(link.bytes_received_per_s));
    metric("round_trip_seconds", "Smoothed round trip time.", &|link| {
        Some(link.stats.round_trip.as_secs_f64())
    });
    metric("sent_packets_total", "Packets that were sent.", &|link| {
        Some(link.stats.packets_sent as f64)
    });
    let help = "Packets that were lost, and whose content was sent again.";
    metric("lost_packets_total", help, &|link| Some(link.stats.packets_lost as f64));
    let help = "Times at which losses made the congestion window smaller.";
    metric("congestion_events_total", help, &|link| Some(link.stats.congestion_events as f64));
    let help = "Bytes that may be on their way at a time.";
    metric("congestion_window_bytes", help, &|link| Some(link.stats.congestion_window as f64));
    let help = "Largest datagrams at present.";
    metric("datagram_bytes", help, &|link| Some(f64::from(link.stats.datagram_bytes)));
    let help = "Time since the node was last heard, on links that heartbeats watch.";
    metric("heartbeat_age_seconds", help, &|link| {
        Some(view.now.saturating_duration_since(link.heard?).as_secs_f64())
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_labels_are_those_of_the_format() {
        for (value, text) in [
            (0.0, "0.0"),
            (1e-7, "1e-7"),
            (3.0, "3.0"),
            (1e16, "1e16"),
            (f64::NAN, "NaN"),
            (f64::INFINITY, "+Inf"),
            (f64::NEG_INFINITY, "-Inf"),
        ] {
            assert_eq!(SampleValue(value).to_string(), text);
        }
        assert_eq!(Escaped("a \\ \"b\"\nc").to_string(), r#"a \\ \"b\"\nc"#);
        let mut text = Exposition::default();
        text.begin("a_total", "A thing.");
        text.sample("a_total", &[("b", "x\""), ("c", "")], 2.0);
        text.sample("a_total", &[], 3.0);
        let expected = "# HELP potluck_a_total A thing.\n# TYPE potluck_a_total counter\n\
                        potluck_a_total{b=\"x\\\"\",c=\"\"} 2.0\npotluck_a_total 3.0\n";
        assert_eq!(text.0, expected);
    }
}
