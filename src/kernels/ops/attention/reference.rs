//! Reference of attention and its gradient: pair by pair, in any precision. In mixed precision it
//! rounds queries, keys, values and the gradient of `y`. It does not round weights or slopes of
//! scores, because kernels round these at different scales: relative to the highest score of all,
//! or to the highest one so far.

use std::borrow::Cow;

use super::{AttentionSizes, head_key};
use crate::{Float, OpCall, operands};
use potluck_core::HostTensorView;
use potluck_graph::Op;

/// Reference: `tensors [, samples] -> y, lse`, or `tensors, y, lse, dy [, samples] -> dtensors`.
pub(super) fn reference<T: Float>(
    call: &OpCall,
    inputs: &[HostTensorView<'_, T>],
    outputs: &mut [&mut [T]],
) {
    let sizes = AttentionSizes::of(call);
    let rounded: Vec<Cow<'_, [T]>> =
        inputs[..sizes.tensors].iter().map(|x| operands(call, x.floats())).collect();
    let tensors: Vec<&[T]> = rounded.iter().map(|x| &**x).collect();
    let mut heads = Vec::new();
    for sample in 0..sizes.b {
        let id = sizes.sample_id(inputs, sample);
        for h in 0..sizes.heads {
            heads.push(Head { sizes, sample, id, h });
        }
    }

    if matches!(call.op, Op::Attention(_)) {
        let [y, lse] = outputs else { panic!("{} has two outputs", call.op) };
        for head in &heads {
            forward(head, &tensors, y, lse);
        }
        return;
    }
    for gradient in outputs.iter_mut() {
        gradient.fill(T::zero());
    }
    let inputs = GradientInputs {
        y: inputs[sizes.tensors].floats(),
        lse: inputs[sizes.tensors + 1].floats(),
        dy: &operands(call, inputs[sizes.tensors + 2].floats()),
    };
    for head in &heads {
        gradient(head, &tensors, &inputs, outputs);
    }
}

/// One query head of one sample.
#[derive(Clone, Copy)]
pub(super) struct Head {
    pub sizes: AttentionSizes,
    pub sample: usize,
    /// Id of the sample, part of the counter of its random numbers.
    pub id: u32,
    pub h: usize,
}

impl Head {
    /// Returns the offset of the head's columns of query (`which` 0), key (1) or value (2) `i` in
    /// their tensor.
    pub(super) fn at(&self, which: usize, i: usize) -> usize {
        let AttentionSizes { t, d, group, places, .. } = self.sizes;
        let h = if which == 0 { self.h } else { self.h / group };
        (self.sample * t + i) * places[which].width + places[which].first + h * d
    }

    /// Offset in `y` of the head's columns of row `i`.
    pub(super) fn y_at(&self, i: usize) -> usize {
        let AttentionSizes { t, d, .. } = self.sizes;
        (self.sample * t + i) * self.sizes.c() + self.h * d
    }

    fn lse_at(&self, i: usize) -> usize {
        (self.sample * self.sizes.heads + self.h) * self.sizes.t + i
    }

    /// Query (`which` 0), key (1) or value (2) `i`.
    fn row<'a, T>(&self, tensors: &[&'a [T]], which: usize, i: usize) -> &'a [T] {
        &tensors[self.sizes.places[which].input][self.at(which, i)..][..self.sizes.d]
    }

    /// Scaled score of query `i` and key `j`.
    fn score<T: Float>(&self, tensors: &[&[T]], i: usize, j: usize) -> T {
        let q = self.row(tensors, 0, i);
        let k = self.row(tensors, 1, j);
        let product: T = q.iter().zip(k).map(|(q, k)| *q * *k).sum();
        product * T::from_f64(self.sizes.scale)
    }

    /// Dropout factor of the probability of a pair; 1 without dropout.
    pub(super) fn kept<T: Float>(&self, i: usize, j: usize) -> T {
        let Some(drop) = self.sizes.drop else { return T::one() };
        let word = head_key(drop.key, self.h).words([self.id, self.sizes.pair(i, j)])[0];
        if word >= drop.threshold { T::from_f64(drop.factor) } else { T::zero() }
    }
}

fn forward<T: Float>(head: &Head, tensors: &[&[T]], y: &mut [T], lse: &mut [T]) {
    for i in 0..head.sizes.t {
        let scores: Vec<T> = (0..head.sizes.keys(i)).map(|j| head.score(tensors, i, j)).collect();
        let highest = scores.iter().copied().fold(scores[0], T::max);
        let total: T = scores.iter().map(|s| (*s - highest).exp()).sum();
        lse[head.lse_at(i)] = highest + total.ln();
        let mut weights = Vec::with_capacity(scores.len());
        for (j, score) in scores.iter().enumerate() {
            weights.push((*score - highest).exp() / total * head.kept(i, j));
        }
        for column in 0..head.sizes.d {
            let values = (0..weights.len()).map(|j| weights[j] * head.row(tensors, 2, j)[column]);
            y[head.y_at(i) + column] = values.sum();
        }
    }
}

/// Inputs of the gradient besides queries, keys and values.
struct GradientInputs<'a, T> {
    y: &'a [T],
    lse: &'a [T],
    dy: &'a [T],
}

/// Adds the contributions of a query head to the gradients.
fn gradient<T: Float>(
    head: &Head,
    tensors: &[&[T]],
    inputs: &GradientInputs<T>,
    gradients: &mut [&mut [T]],
) {
    let AttentionSizes { t, d, places, .. } = head.sizes;
    let scale = T::from_f64(head.sizes.scale);
    for i in 0..t {
        let dy = &inputs.dy[head.y_at(i)..][..d];
        let y = &inputs.y[head.y_at(i)..][..d];
        let delta: T = dy.iter().zip(y).map(|(dy, y)| *dy * *y).sum();
        let q = head.row(tensors, 0, i);
        for j in 0..head.sizes.keys(i) {
            let k = head.row(tensors, 1, j);
            let v = head.row(tensors, 2, j);
            let probability = (head.score(tensors, i, j) - inputs.lse[head.lse_at(i)]).exp();
            let kept = head.kept::<T>(i, j);
            let dp: T = kept * dy.iter().zip(v).map(|(dy, v)| *dy * *v).sum::<T>();
            let ds = scale * probability * (dp - delta);
            let [dq_at, dk_at, dv_at] = [head.at(0, i), head.at(1, j), head.at(2, j)];
            let [dq, dk, dv] = places.map(|place| place.input);
            for column in 0..d {
                gradients[dq][dq_at + column] += ds * k[column];
                gradients[dk][dk_at + column] += ds * q[column];
                gradients[dv][dv_at + column] += probability * kept * dy[column];
            }
        }
    }
}
