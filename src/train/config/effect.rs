//! Keys that have an effect on `eval`, `generate`, `chat` and `predict`, which do not train.

use super::read::{ConfigError, Origin, Override};
use super::schema::{is_of_parts, known_key};
use super::unknown::with_section;

/// Keys that have an effect besides the keys of pipelines, or whole sections of keys; and keys kept
/// in checkpoints, which are refused later with that reason.
const EFFECTIVE: &[&str] = &[
    "data.",
    "model.",
    "optim.kind",
    "optim.label_smoothing",
    "parallel.message_kib",
    "train.device_memory_mib",
    "train.submission_ms",
    "faults.device_timeout_s",
    "train.class_weights",
    "train.fuse",
    "train.huber_delta",
    "train.loss",
    "train.seed",
];

/// Flags of `eval` and `generate` that correspond to these keys of a run.
const FLAGS: [(&str, &str); 3] = [
    ("parallel.devices", "give --devices instead"),
    ("train.eval_samples", "give --samples of eval instead"),
    ("train.micro_batch_size", "give --micro-batch of eval instead"),
];

/// Checks that the keys set by `overrides` have an effect on `eval` and `generate`. Unknown names
/// are left to [`super::read::read`].
///
/// # Errors
/// Returns `ConfigError::Value` with the next action for the first key without an effect, and
/// `ConfigError::Unknown` for a name without its section that several sections have.
pub fn require_effect(overrides: &[Override]) -> Result<(), ConfigError> {
    for Override { flag, key: name, .. } in overrides {
        let origin = Origin::Flag(0, flag.clone());
        let Some(key) = known_key(with_section(&origin, name)?) else { continue };
        let name = key.full_name;
        let instead = match FLAGS.iter().find(|(of, _)| *of == name) {
            Some((_, instead)) => instead,
            None if is_of_parts(name) => continue,
            None if EFFECTIVE.iter().any(|known| name.starts_with(known)) => continue,
            None => "leave it out",
        };
        let why = format!("has no effect without training; {instead}");
        return Err(ConfigError::Value { origin, name: name.into(), why });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_without_an_effect_are_refused_with_what_to_do_instead() {
        for (set, instead) in [
            ("parallel.devices=cpu*2", "give --devices instead"),
            ("devices=cpu", "give --devices instead"),
            ("train.eval_samples=3", "give --samples of eval instead"),
            ("train.micro_batch_size=64", "give --micro-batch of eval instead"),
            ("train.steps=3", "leave it out"),
            ("optim.lr=0.1", "leave it out"),
        ] {
            let typed = Override::set(set).unwrap();
            let error = require_effect(&[typed]).unwrap_err().to_string();
            let why = format!("has no effect without training; {instead}");
            assert!(error.starts_with(&format!("--set {set}: ")), "{error}");
            assert!(error.ends_with(&why), "{error}");
        }
        for set in ["model.context=5", "parallel.pipeline_stages=2", "data.held_out=0.5"] {
            assert!(require_effect(&[Override::set(set).unwrap()]).is_ok(), "{set}");
        }
    }
}
