//! Losses of rows of logits, whose targets are classes or probabilities of classes. PyTorch has
//! classes at the second axis.

use potluck_core::{HostTensor, TensorId};
use potluck_graph::{CrossEntropyOptions, IGNORE_INDEX};

use super::calls::{Arguments, reduced_over};
use super::{Built, Refusal};

/// The class that PyTorch ignores if none is named.
const IGNORED: i64 = -100;

/// Logits with classes last.
struct Logits {
    rows: TensorId,
    classes: usize,
    /// Weight of each class; empty: 1.
    weights: Vec<f32>,
    smoothing: f32,
}

/// Computes a cross-entropy or a negative log likelihood.
pub(super) fn of_classes(a: &mut Arguments, op: &str) -> Built {
    if a.has_keywords_but(&["weight", "ignore_index", "label_smoothing", "reduction"]) {
        return Err(Refusal::Unknown);
    }
    let x = a.tensor(0)?;
    let rank = a.rank(x);
    let axis = usize::from(rank > 1);
    let classes = a.dims(x)[axis];
    let order: Vec<usize> = (0..rank).filter(|other| *other != axis).chain([axis]).collect();
    let weight = a.sample["kwargs"]["weight"]["tensor"].as_u64();
    let weights = weight.map_or_else(Vec::new, |at| a.given[at as usize].values.clone());
    if weights.iter().any(|weight| *weight < 0.0) {
        return Err(Refusal::Because("the weight of a class is 0 or more"));
    }
    let smoothing = a.number(9, "label_smoothing", 0.0)?;
    let logits = Logits { rows: a.b.permute(x, &order)?, classes, weights, smoothing };
    let target = a.tensor(1)?;
    if op == "cross_entropy" && a.rank(target) == rank {
        let target = a.b.permute(target, &order)?;
        return of_probabilities(a, &logits, target);
    }
    of_indices(a, op, logits)
}

/// Computes the loss of targets that are numbers of classes, which are an input of the batch: one
/// row of it has all of them.
fn of_indices(a: &mut Arguments, op: &str, logits: Logits) -> Built {
    let Logits { rows, classes, weights, smoothing } = logits;
    let target = a.argument(1, "target")["tensor"].as_u64().ok_or(Refusal::Unknown)? as usize;
    let ignored = a.argument(9, "ignore_index").as_i64().unwrap_or(IGNORED);
    let is_class = |class: i64| (0..classes as i64).contains(&class);
    let dims = a.given[target].dims.clone();
    let targets: Vec<i64> = a.given[target].values.iter().map(|class| *class as i64).collect();
    let weight_of = |class: &i64| match weights.get(*class as usize) {
        _ if *class == ignored => 0.0,
        Some(weight) => *weight,
        None => 1.0,
    };
    let total: f32 = targets.iter().map(weight_of).sum();
    let ids =
        targets.iter().map(|class| if is_class(*class) { *class as u32 } else { IGNORE_INDEX });

    let count = targets.len();
    let ids_name = format!("{}targets", a.prefix);
    let ids_input = a.b.input_ids(&ids_name, &[count]);
    a.inputs.push((ids_name, HostTensor::Int(ids.collect())));
    let zeros_name = format!("{}zeros", a.prefix);
    let zeros = a.b.input(&zeros_name, &[1, count, classes]);
    a.inputs.push((zeros_name, HostTensor::Float(vec![0.0; count * classes])));
    let rows = a.b.reshape(rows, &[count, classes])?;
    let batch = a.b.add(zeros, rows)?;
    let batch = a.b.reshape(batch, &[count, classes])?;
    let ignored = is_class(ignored).then_some(ignored as u32);
    let options = CrossEntropyOptions { weights, smoothing, ignored };
    let losses = match op {
        "cross_entropy" => a.b.cross_entropy(batch, ids_input, &options),
        _ => a.b.negative_log_likelihood(batch, ids_input, &options),
    }?;
    let losses = a.b.reshape(losses, &[&[1], &dims[..]].concat())?;
    reduced_over(a, losses, total)
}

/// Computes the cross-entropy of targets that are probabilities.
fn of_probabilities(a: &mut Arguments, logits: &Logits, target: TensorId) -> Built {
    let Logits { rows, classes, weights, smoothing } = logits;
    let logarithms = a.b.log_softmax(*rows)?;
    let kept = a.b.scale(target, 1.0 - smoothing)?;
    let smooth = a.b.offset(kept, smoothing / *classes as f32)?;
    let mut losses = a.b.mul(logarithms, smooth)?;
    if !weights.is_empty() {
        let weights = a.constant("weights", &[*classes], weights.clone())?;
        losses = a.b.mul(losses, weights)?;
    }
    let last = a.rank(losses) - 1;
    let losses = a.b.sum(losses, &[last])?;
    let losses = a.b.scale(losses, -1.0)?;
    let count: usize = a.dims(losses).iter().product();
    reduced_over(a, losses, count as f32)
}
