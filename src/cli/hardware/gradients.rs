//! Gradients of GPT-2 124M at its full context on the adapter against the CPU device, tensor by
//! tensor. They are computed from the parameters before and after a step of plain SGD.

use std::path::Path;

use serde_json::json;

use super::measures::{Findings, Measure};
use super::record::{largest_difference, words};
use super::workshop::{Halt, Workshop};
use potluck_train::checkpoint::{Checkpoint, NamedTensor};

/// Learning rate of the step: so large that the rounding of the parameters does not matter, and a
/// power of two, so that multiplications by it are exact.
const RATE: f32 = 512.0;
/// Largest NMSE of the gradient of a tensor, for f32 sums in other orders through all layers. On
/// llvmpipe it is 1.4e-12 at full size.
const NMSE_MAX: f64 = 1e-9;
/// Number of tensors in the file of the part: those with the largest error.
const WORST: usize = 20;

pub fn perform(shop: &Workshop) -> Result<Findings, Halt> {
    let mut more = words(&format!(
        "--steps 1 --batch 1 --set optim.kind=sgd --set optim.momentum=0 --set optim.lr={RATE} \
         --set optim.weight_decay=0 --set optim.clip=0 --set schedule.warmup=0"
    ));
    more.extend(shop.gpt2());
    let cpu = shop.train_in("cpu", "cpu", &more)?;
    let card = shop.train_in("card", &shop.selector, &more)?;
    let mut measures = vec![cpu.end("on the CPU", 1), card.end("on the device", 1)];
    if measures.iter().any(|measure| !measure.is_right) {
        return Ok(Findings { measures, ..Findings::default() });
    }
    if let Some(difference) = largest_difference(&card.losses(), &cpu.losses()) {
        measures.push(Measure::at_most("difference of the loss", difference, 1e-5, "nats"));
    }
    let runs = ["cpu", "card"].map(|run| shop.work.join(run));
    let mut errors = match compared(&runs[0], &runs[1]) {
        Ok(errors) => errors,
        Err(why) => {
            measures.push(Measure::expected("gradients", why, "those of both", false));
            return Ok(Findings { measures, ..Findings::default() });
        }
    };
    errors.sort_by(|one, other| other.nmse.total_cmp(&one.nmse));
    let worst = &errors[0];
    measures.push(Measure::number("tensors compared", errors.len() as f64, ""));
    let name = format!("largest NMSE of a tensor, {}", worst.name);
    measures.push(Measure::at_most(&name, worst.nmse, NMSE_MAX, ""));
    errors.truncate(WORST);
    let mut worst = Vec::new();
    for TensorDeviation { name, nmse } in &errors {
        worst.push(json!({ "tensor": name, "nmse": nmse }));
    }
    Ok(Findings { measures, details: json!({ "worst": worst }), skipped: None })
}

/// Error of the gradient of a tensor.
#[derive(Clone, Debug, PartialEq)]
struct TensorDeviation {
    name: String,
    /// Mean square of the errors over the mean square of the expected values.
    nmse: f64,
}

/// Returns the errors of all gradients of the first step of two runs.
fn compared(expected: &Path, run: &Path) -> Result<Vec<TensorDeviation>, String> {
    let before = load(expected, 0)?;
    if before != load(run, 0)? {
        return Err("the initial parameters differ".into());
    }
    let errors = errors(&before, &load(expected, 1)?, &load(run, 1)?);
    if errors.is_empty() { Err("there are no parameters".into()) } else { Ok(errors) }
}

fn load(run: &Path, step: u64) -> Result<Vec<NamedTensor>, String> {
    let path = run.join(format!("checkpoints/step-{step:08}"));
    let loaded = Checkpoint::load(&path).map_err(|why| why.to_string())?;
    Ok(loaded.parameters)
}

/// Returns the error of each tensor, given the parameters before and after a step: the NMSE, or the
/// sum of squares where the expected gradient is 0.
fn errors(
    before: &[NamedTensor],
    expected: &[NamedTensor],
    found: &[NamedTensor],
) -> Vec<TensorDeviation> {
    let mut errors = Vec::with_capacity(before.len());
    for ((before, expected), found) in before.iter().zip(expected).zip(found) {
        let mut wrong = 0.0;
        let mut all = 0.0;
        let values = before.values.iter().zip(&expected.values).zip(&found.values);
        for ((before, expected), found) in values {
            let gradient = f64::from((before - expected) / RATE);
            wrong += (gradient - f64::from((before - found) / RATE)).powi(2);
            all += gradient.powi(2);
        }
        let nmse = if all > 0.0 { wrong / all } else { wrong };
        errors.push(TensorDeviation { name: before.name.clone(), nmse });
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_are_compared_tensor_by_tensor() {
        let tensor = |name: &str, values: &[f32]| NamedTensor {
            name: name.into(),
            shape: vec![values.len()],
            values: values.to_vec(),
        };
        let before = [tensor("a", &[1.0, 2.0]), tensor("b", &[0.0])];
        let expected = [tensor("a", &[1.0 - RATE, 2.0]), tensor("b", &[0.0])];
        let found = [tensor("a", &[1.0 - RATE, 2.0 + RATE / 2.0]), tensor("b", &[-RATE])];
        let errors = errors(&before, &expected, &found);
        assert_eq!(errors[0], TensorDeviation { name: "a".into(), nmse: 0.25 });
        assert_eq!(errors[1].nmse, 1.0);
    }
}
