//! Progress display of several devices: the share of each, its speed while it computes, and the
//! fraction of a step that it waits for other devices.

use potluck_core::format::{counted, listed, thousands};
use potluck_core::metrics::{RankRecord, StageRecord};

/// The most characters of a line of [`RunningMeans::block`], fewer than most terminals have.
const COLUMNS: usize = 78;
/// The most lines of [`RunningMeans::block`].
const LINES_MAX: usize = 6;

/// Running means of all devices over steps.
#[derive(Clone, Debug, Default)]
pub struct RunningMeans {
    ranks: Vec<Mean>,
}

#[derive(Clone, Debug, Default)]
struct Mean {
    name: String,
    /// Share of the last step.
    share: u64,
    /// Sums over steps: samples, their seconds, and fractions of a step that the device waited and
    /// was idle.
    samples: f64,
    seconds: f64,
    waited: f64,
    idle: f64,
    steps: f64,
    stage: Option<StageRecord>,
}

impl RunningMeans {
    /// Adds the values of one step.
    pub fn add(&mut self, ranks: &[RankRecord]) {
        self.ranks.resize_with(ranks.len(), Mean::default);
        for (mean, rank) in self.ranks.iter_mut().zip(ranks) {
            mean.name = short_name(&rank.name);
            mean.share = rank.share;
            mean.stage = rank.stage;
            let samples_per_s = rank.samples_per_s();
            // Unknown speeds are left out.
            if samples_per_s > 0.0 && samples_per_s.is_finite() {
                mean.samples += rank.share as f64;
                mean.seconds += rank.share as f64 / samples_per_s;
            }
            mean.waited += rank.wait().clamp(0.0, 1.0);
            mean.idle += rank.idle.clamp(0.0, 1.0);
            mean.steps += 1.0;
        }
    }

    /// Multiplies the weight of all steps so far by `part`.
    pub fn forget(&mut self, part: f64) {
        for mean in &mut self.ranks {
            let Mean { samples, seconds, waited, idle, steps, .. } = mean;
            for sum in [samples, seconds, waited, idle, steps] {
                *sum *= part;
            }
        }
    }

    /// Formats all devices in one line.
    pub fn line(&self) -> String {
        let pipelines = self.has_pipelines();
        listed(self.ranks.iter().map(|mean| mean.text(pipelines, true)))
    }

    /// Returns true if the ranks are the stages of several pipelines.
    fn has_pipelines(&self) -> bool {
        self.ranks.iter().any(|mean| mean.stage.is_some_and(|stage| stage.pipeline > 0))
    }

    /// Formats all devices in at most `LINES_MAX` short lines, to fit under a progress bar.
    pub fn block(&self) -> String {
        let mut lines = vec![String::new()];
        let pipelines = self.has_pipelines();
        let has_room = self.ranks.len() <= LINES_MAX;
        for (index, mean) in self.ranks.iter().enumerate() {
            let left = self.ranks.len() - index;
            let text =
                format!("{}{}", mean.text(pipelines, has_room), if left > 1 { "," } else { "" });
            // There is always a last line; it only grows here.
            let full = lines.last().is_some_and(|line| {
                !line.is_empty() && line.chars().count() + 1 + text.chars().count() > COLUMNS - 2
            });
            if full && lines.len() == LINES_MAX {
                lines.push(format!("and {left} more"));
                break;
            } else if full {
                lines.push(String::new());
            }
            if let Some(line) = lines.last_mut() {
                line.push_str(if line.is_empty() { "" } else { " " });
                line.push_str(&text);
            }
        }
        format!("  {}", lines.join("\n  "))
    }
}

impl Mean {
    /// Formats one device: `llvmpipe: 4 samples (55/s, waits 3 %)`, without `samples` if there is
    /// no room, or as the stage of a pipeline: `stage 1 (llvmpipe): idle 3 %`.
    fn text(&self, pipelines: bool, has_room: bool) -> String {
        let waits = 100.0 * self.waited / self.steps;
        let idle = 100.0 * self.idle / self.steps;
        if let Some(StageRecord { pipeline, stage, tensor }) = self.stage {
            let of = if pipelines { format!(" of pipeline {pipeline}") } else { String::new() };
            let place = match tensor {
                Some(rank) => format!(", tensor rank {rank}"),
                None => String::new(),
            };
            return format!("stage {stage}{of}{place} ({}): idle {idle:.0} %", self.name);
        }
        let speed = self.samples / self.seconds;
        let speed = if !speed.is_finite() {
            // The device had no samples.
            String::new()
        } else if speed < 9.95 {
            format!("{speed:.1}/s, ")
        } else {
            format!("{}/s, ", thousands(speed))
        };
        let share = if has_room {
            counted(self.share as usize, "sample", "samples")
        } else {
            self.share.to_string()
        };
        format!("{}: {share} ({speed}waits {waits:.0} %)", self.name)
    }
}

/// Returns a short name that still distinguishes the devices of a machine: "RTX 3060" of "NVIDIA
/// GeForce RTX 3060".
pub fn short_name(name: &str) -> String {
    let mut plain = name.replace("(R)", "").replace("(TM)", "");
    if let Some(at) = plain.find(['(', '/']) {
        plain.truncate(at);
    }
    let words = plain.split_whitespace();
    let dull = ["nvidia", "geforce", "amd", "intel", "corporation", "device", "mesa"];
    let telling: Vec<&str> =
        words.filter(|word| !dull.contains(&word.to_lowercase().as_str())).collect();
    let short = if telling.is_empty() { plain.trim().to_string() } else { telling.join(" ") };
    match short.char_indices().nth(20) {
        Some((end, _)) => format!("{}..", short[..end].trim_end()),
        None => short,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Returns a rank that computes at this speed and then waits for the rest
    /// of the step.
    fn rank(name: &str, share: u64, samples_per_s: f64, wait: f64) -> RankRecord {
        let work = if share == 0 { 0.0 } else { share as f64 / samples_per_s };
        let waited = if share == 0 { 1.0 } else { work * wait / (1.0 - wait) };
        let time = Duration::from_secs_f64(work + waited);
        let waited = Duration::from_secs_f64(waited);
        RankRecord { name: name.into(), share, time, waited, idle: 0.0, stage: None }
    }

    #[test]
    fn a_line_tells_share_speed_and_waiting() {
        let mut means = RunningMeans::default();
        means.add(&[
            rank("llvmpipe (LLVM 19.1.7, 256 bits)", 4, 55.2, 0.031),
            rank("SwiftShader Device (LLVM 10.0.0)", 4, 3.12, 0.0),
            rank("cpu (8 threads)", 0, 0.0, 1.0),
            rank("RTX", 4, 5432.1, 0.999),
        ]);
        let line = "llvmpipe: 4 samples (55/s, waits 3 %), SwiftShader: 4 samples (3.1/s, waits \
                    0 %), cpu: 0 samples (waits 100 %), RTX: 4 samples (5,432/s, waits 100 %)";
        assert_eq!(means.line(), line);
    }

    #[test]
    fn stages_are_named_with_their_idle_shares() {
        let stage = |pipeline, stage, idle| RankRecord {
            stage: Some(StageRecord { pipeline, stage, tensor: None }),
            idle,
            ..rank("llvmpipe (LLVM 19.1.7, 256 bits)", 12, 55.0, 0.9)
        };
        let mut means = RunningMeans::default();
        means.add(&[stage(0, 0, 0.03), stage(0, 1, 0.25)]);
        assert_eq!(means.line(), "stage 0 (llvmpipe): idle 3 %, stage 1 (llvmpipe): idle 25 %");
        assert!(means.block().starts_with("  stage 0 (llvmpipe): idle 3 %, stage 1"));
        let mut group = RunningMeans::default();
        let member = |tensor| RankRecord {
            stage: Some(StageRecord { pipeline: 0, stage: 1, tensor: Some(tensor) }),
            ..stage(0, 1, 0.1)
        };
        group.add(&[member(0), member(1)]);
        let of_group = "stage 1, tensor rank 0 (llvmpipe): idle 10 %, stage 1, tensor rank 1";
        assert!(group.line().starts_with(of_group), "{}", group.line());
        means.add(&[stage(0, 0, 0.05), stage(1, 0, 0.5)]);
        let both = "stage 0 of pipeline 0 (llvmpipe): idle 4 %, \
                    stage 0 of pipeline 1 (llvmpipe): idle 38 %";
        assert_eq!(means.line(), both);
    }

    #[test]
    fn speeds_are_means_over_time_and_waits_over_steps() {
        let mut means = RunningMeans::default();
        // 4 samples in 1 s and 4 in 3 s are 8 in 4 s.
        means.add(&[rank("a", 4, 4.0, 0.1)]);
        means.add(&[rank("a", 4, 4.0 / 3.0, 0.3)]);
        assert_eq!(means.line(), "a: 4 samples (2.0/s, waits 20 %)");
        // Forgotten steps have no weight, and a change shows gradually.
        means.forget(0.5);
        means.add(&[rank("a", 2, 2.0, 0.2)]);
        assert_eq!(means.line(), "a: 2 samples (2.0/s, waits 20 %)");
        means.forget(0.0);
        means.add(&[rank("a", 2, 8.0, 0.9)]);
        assert_eq!(means.line(), "a: 2 samples (8.0/s, waits 90 %)");
        // A speed without a time of work does not count.
        let waited = Duration::from_secs(1);
        means.add(&[RankRecord { time: waited, waited, ..rank("a", 2, 1.0, 0.0) }]);
        assert_eq!(means.line(), "a: 2 samples (8.0/s, waits 95 %)");
    }

    #[test]
    fn under_a_bar_lines_are_short_and_few() {
        let mut means = RunningMeans::default();
        means.add(&vec![rank("llvmpipe", 4, 55.0, 0.03); 3]);
        let long = "llvmpipe: 4 samples (55/s, waits 3 %)";
        assert_eq!(means.block(), format!("  {long},\n  {long}, {long}"));
        let one = "llvmpipe: 4 (55/s, waits 3 %)";
        means.add(&vec![rank("llvmpipe", 4, 55.0, 0.03); 64]);
        let block = means.block();
        assert!(block.lines().all(|line| line.len() <= COLUMNS), "{block}");
        assert_eq!(block.lines().count(), LINES_MAX + 1);
        assert_eq!(block.matches(one).count() + 52, 64);
        assert!(block.ends_with("\n  and 52 more"), "{block}");
    }

    #[test]
    fn names_are_short_and_still_tell_cards_apart() {
        for (name, short) in [
            ("llvmpipe (LLVM 19.1.7, 256 bits)", "llvmpipe"),
            ("SwiftShader Device (LLVM 10.0.0)", "SwiftShader"),
            ("NVIDIA GeForce RTX 3060 Ti", "RTX 3060 Ti"),
            ("AMD Radeon RX 6600 (RADV NAVI23)", "Radeon RX 6600"),
            ("Intel(R) UHD Graphics 620 (KBL GT2)", "UHD Graphics 620"),
            ("NVIDIA H200/PCIe/SSE2", "H200"),
            ("cpu (AMD EPYC, 2 threads)", "cpu"),
            ("NVIDIA", "NVIDIA"),
            ("A Card With A Very Long Name", "A Card With A Very L.."),
            ("", ""),
        ] {
            assert_eq!(short_name(name), short);
        }
    }
}
