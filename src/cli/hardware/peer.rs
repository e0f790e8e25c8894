//! Steps of the same model in PyTorch, on the device that it selects.

use std::process::Command;

use serde_json::Value;

use super::gpt2;
use super::measures::{Findings, Measure};
use super::workshop::{Halt, Workshop};

/// Times steps of a GPT of given sizes, and prints JSON.
const SCRIPT: &str = include_str!("peer.py");
/// Layers, heads, width, context, vocabulary, steps.
const SIZES: [&str; 6] = ["12", "12", "768", "1024", "50257", "20"];
const TOY_SIZES: [&str; 6] = ["2", "2", "32", "32", "64", "2"];

/// Exit code of the shell of Windows for a missing program.
const NOT_INSTALLED: i32 = 9009;

pub fn perform(shop: &Workshop) -> Result<Findings, Halt> {
    let mut command = Command::new("python3");
    command.args(["-c", SCRIPT, &shop.batch().to_string()]).args(shop.sized(TOY_SIZES, SIZES));
    let ended = match shop.run_command(command, shop.deadline, |_| Ok(())) {
        Ok(ended) => ended,
        Err(halt) if halt.is_of_missing_program() => {
            return Ok(Findings::skipped("there is no python3"));
        }
        Err(halt) => return Err(halt),
    };
    // Windows has a placeholder of this name for a program that is not installed.
    if ended.code() == Some(NOT_INSTALLED) {
        return Ok(Findings::skipped("there is no python3"));
    }
    if ended.status.is_none() {
        return Ok(Findings::skipped("PyTorch took longer than the time of the part"));
    }
    if ended.stderr.contains("No module named 'torch'") {
        return Ok(Findings::skipped("python3 has no torch"));
    }
    let measured = ended.stdout.lines().last().and_then(|line| serde_json::from_str(line).ok());
    let Some(details) = measured.filter(|_: &Value| ended.is_right()) else {
        let last = ended.stderr.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
        let text = format!("{}: {last}", ended.end());
        let measure = Measure::expected("PyTorch", text, "exit status: 0", false);
        return Ok(Findings { measures: vec![measure], ..Findings::default() });
    };
    let version = details["torch"].as_str().unwrap_or("unknown");
    let device = details["device"].as_str().unwrap_or("unknown");
    let mut measures = vec![Measure::fact("PyTorch", format!("{version} on {device}"))];
    let own = gpt2::known_rate(shop);
    for row in details["rows"].as_array().into_iter().flatten() {
        let name = row["precision"].as_str().unwrap_or_default();
        let Some(rate) = row["tokens_per_s"].as_f64() else { continue };
        let mut measure = Measure::number(name, rate, "tokens/s");
        if let Some(own) = own {
            measure.text += &format!(", {:.2} times potluck's", rate / own);
        }
        measures.push(measure);
    }
    Ok(Findings { measures, details, skipped: None })
}
