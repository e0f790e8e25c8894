//! Keys that have an effect on `eval` and `generate`, which do not train.

use super::read::{ConfigError, Origin, Override};
use super::schema::{is_of_parts, known_key};
use super::unknown::with_section;

/// Keys that have an effect besides those of pipelines, or sections of them; and those that a
/// checkpoint keeps, which are refused later, with that reason.
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

/// Flags of `eval` and `generate` for what these keys set in a run.
const FLAGS: [(&str, &str); 3] = [
    ("parallel.devices", "give --devices instead"),
    ("train.eval_samples", "give --samples of eval instead"),
    ("train.micro_batch_size", "give --micro-batch instead"),
];

/// Checks that the keys that `overrides` set have an effect on `eval` and `generate`. Names that
/// are no keys are left to [`super::read::read`].
///
/// # Errors
/// Returns `ConfigError::Value` with the next action for the first key that has none, and
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
        let why = format!("has no effect on eval and generate; {instead}");
        return Err(ConfigError::Value { origin, name: name.into(), why });
    }
    Ok(())
}
