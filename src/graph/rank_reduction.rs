//! Reductions over the ranks of a tensor group, on the host: in the order of the ranks, so that
//! every rank continues with the same bits.

use super::{Plan, Reduction};
use potluck_core::{SegmentId, TensorId};

/// Tensors that a rank reduces with the other ranks of its group behind a segment. None is an
/// alias.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReducedTensors {
    pub kind: Reduction,
    /// Tensors of which the rank sends its values.
    pub sent: Vec<TensorId>,
    /// Tensors that the results replace.
    pub results: Vec<TensorId>,
}

impl ReducedTensors {
    /// Returns the tensors of the reduction at the end of a segment, if there is one.
    pub fn of(plan: &Plan, segment: SegmentId) -> Option<Self> {
        let nodes = plan.segments[segment.index()].nodes.clone();
        let last = plan.graph.nodes[nodes].last()?;
        let kind = last.op.reduction()?;
        let roots = |tensors: &[TensorId]| tensors.iter().map(|id| plan.graph.root(*id)).collect();
        Some(Self { kind, sent: roots(kind.sent(&last.inputs)), results: roots(&last.outputs) })
    }
}

impl Reduction {
    /// Returns the number of tensors that are reduced together.
    pub fn tensors(self) -> usize {
        match self {
            Self::Sum | Self::SumBf16 => 1,
            Self::CrossEntropy { .. } => 2,
        }
    }

    /// Returns the inputs of the node that a rank sends to the others.
    pub(crate) fn sent(self, inputs: &[TensorId]) -> &[TensorId] {
        match self {
            Self::SumBf16 => &inputs[1..],
            Self::Sum | Self::CrossEntropy { .. } => inputs,
        }
    }

    /// Returns the number of elements of a result for each element that a rank sends.
    pub fn expansion(self) -> usize {
        match self {
            Self::SumBf16 => 2,
            Self::Sum | Self::CrossEntropy { .. } => 1,
        }
    }

    /// Reduces the tensors of all ranks, `ranks[rank][tensor]`, of the same rows; returns the
    /// reduced tensors.
    ///
    /// # Panics
    /// If there is no rank, or the ranks have tensors of other lengths or numbers.
    pub fn reduce<T: AsRef<[f32]>>(self, ranks: &[Vec<T>]) -> Vec<Vec<f32>> {
        let mut reduced: Vec<Vec<f32>> =
            ranks[0].iter().map(|tensor| tensor.as_ref().to_vec()).collect();
        assert_eq!(reduced.len(), self.tensors(), "tensors of {self:?}");
        for rank in &ranks[1..] {
            let lengths = rank.iter().map(|tensor| tensor.as_ref().len());
            let are_alike = reduced.iter().map(Vec::len).eq(lengths);
            assert!(are_alike, "ranks have the same tensors");
        }
        match self {
            Self::Sum => {
                for rank in &ranks[1..] {
                    for (sum, value) in reduced[0].iter_mut().zip(rank[0].as_ref()) {
                        *sum += value;
                    }
                }
            }
            Self::SumBf16 => {
                let mut sum: Vec<f32> = unpacked(&reduced[0]).collect();
                for rank in &ranks[1..] {
                    for (sum, value) in sum.iter_mut().zip(unpacked(rank[0].as_ref())) {
                        *sum += value;
                    }
                }
                reduced[0] = sum;
            }
            Self::CrossEntropy { .. } => {
                for row in 0..reduced[1].len() {
                    let parts = ranks.iter().map(|tensors| ClassLoss {
                        loss: f64::from(tensors[0].as_ref()[2 * row]),
                        count: f64::from(tensors[0].as_ref()[2 * row + 1]),
                        lse: f64::from(tensors[1].as_ref()[row]),
                    });
                    let ClassLoss { loss, count, lse } = ClassLoss::joined(parts);
                    reduced[0][2 * row] = loss as f32;
                    reduced[0][2 * row + 1] = count as f32;
                    reduced[1][row] = lse as f32;
                }
            }
        }
        reduced
    }
}

/// Values of words of two bfloat16 values, of which the first is in the low half.
fn unpacked(words: &[f32]) -> impl Iterator<Item = f32> + '_ {
    words.iter().flat_map(|word| {
        let bits = word.to_bits();
        [bits << 16, bits & 0xffff_0000].map(f32::from_bits)
    })
}

/// Loss of a row over some classes.
#[derive(Clone, Copy, Debug)]
pub struct ClassLoss {
    pub loss: f64,
    /// Count of the target: 0 if it is not one of the classes.
    pub count: f64,
    /// Logarithm of the sum of the exponentials of the logits of the classes.
    pub lse: f64,
}

impl ClassLoss {
    /// Returns the loss over the classes of all parts: `lse = m + log(sum_i exp(lse_i - m))` with
    /// the largest `m` of the `lse_i`, and the sum of the losses, with `lse_i` replaced by `lse` in
    /// the loss of the part that has the target. The loss is infinite if all logits of that part,
    /// and so its `lse_i`, are `-inf`.
    pub fn joined(parts: impl Iterator<Item = Self> + Clone) -> Self {
        let m = parts.clone().map(|part| part.lse).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = parts.clone().map(|part| libm::exp(part.lse - m)).sum();
        let lse = m + libm::log(sum);
        let mut joined = Self { loss: 0.0, count: 0.0, lse };
        for part in parts {
            if part.count == 0.0 {
                // The contribution of label smoothing.
                joined.loss += part.loss;
                continue;
            }
            joined.loss += if part.lse == f64::NEG_INFINITY && !lse.is_nan() {
                f64::INFINITY
            } else {
                part.loss + (lse - part.lse)
            };
            joined.count += part.count;
        }
        joined
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_in_the_order_of_the_ranks() {
        let ranks = [1.0f32, 1e8, -1e8].map(|x| vec![vec![x, 2.0 * x]]);
        let forward = (1.0f32 + 1e8) - 1e8;
        assert_eq!(Reduction::Sum.reduce(&ranks), [[forward, 2.0 * forward]]);
        let [a, b, c] = ranks;
        assert_eq!(Reduction::Sum.reduce(&[b, c, a]), [[1.0, 2.0]]);
    }

    /// 1 and -2, and 2^-7 and 0.5.
    #[test]
    fn words_of_all_ranks_are_unpacked_and_added() {
        let ranks = [0xc000_3f80, 0x3f00_3c00].map(|word: u32| vec![vec![f32::from_bits(word)]]);
        assert_eq!(Reduction::SumBf16.reduce(&ranks), [[1.0 + 0.0078125, -1.5]]);
        assert_eq!((Reduction::SumBf16.expansion(), Reduction::Sum.expansion()), (2, 1));
    }

    /// Rows whose target the first rank has, the second, and none; one with infinite and one with
    /// undefined logits.
    #[test]
    fn losses_over_the_classes_of_ranks_are_the_loss_over_all() {
        let logits = [[0.5, -1.0, 2.0, 3.5, -0.25], [900.0, -3.0, 899.0, 4.0, 901.0], [0.0; 5]];
        let targets = [1, 4, u32::MAX as usize];
        let over = |row: usize, classes: std::ops::Range<usize>| {
            let own = &logits[row][classes.clone()];
            let m = own.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let lse = m + own.iter().map(|x| (x - m).exp()).sum::<f64>().ln();
            let has = classes.contains(&targets[row]);
            let loss = if has { lse - logits[row][targets[row]] } else { 0.0 };
            [loss, f64::from(u8::from(has)), lse]
        };
        let tensors = |classes: std::ops::Range<usize>| {
            let rows: Vec<[f64; 3]> = (0..3).map(|row| over(row, classes.clone())).collect();
            let losses = rows.iter().flat_map(|row| [row[0] as f32, row[1] as f32]);
            let parts: Vec<f32> = losses.collect();
            let lse: Vec<f32> = rows.iter().map(|row| row[2] as f32).collect();
            vec![parts, lse]
        };
        let reduction = Reduction::CrossEntropy { classes: 5 };
        let joined = reduction.reduce(&[tensors(0..2), tensors(2..3), tensors(3..5)]);
        let whole = tensors(0..5);
        for (joined, whole) in joined.iter().flatten().zip(whole.iter().flatten()) {
            assert!((joined - whole).abs() <= 1e-6 * whole.abs().max(100.0), "{joined} {whole}");
        }
        assert_eq!(joined[0][4..], [0.0, 0.0]);

        let row = |loss: f32, count: f32, lse: f32| vec![vec![loss, count], vec![lse]];
        let nan = reduction.reduce(&[row(0.5, 1.0, 1.0), row(0.0, 0.0, f32::NAN)]);
        assert!(nan[0][0].is_nan() && nan[1][0].is_nan(), "{nan:?}");
        let ignored = reduction.reduce(&[row(0.0, 0.0, 1.0), row(0.0, 0.0, f32::NAN)]);
        assert_eq!(ignored[0], [0.0, 0.0]);
    }

    /// A kernel has no loss of a row of such logits alone, as their sum of exponentials is 0.
    #[test]
    fn a_target_among_logits_of_minus_infinity_costs_infinitely_much() {
        let row = |loss: f32, count: f32, lse: f32| vec![vec![loss, count], vec![lse]];
        let reduction = Reduction::CrossEntropy { classes: 4 };
        let (empty, other) = (f32::NEG_INFINITY, row(0.0, 0.0, 1.5));
        for loss in [f32::NAN, f32::INFINITY] {
            let joined = reduction.reduce(&[row(loss, 1.0, empty), other.clone()]);
            assert_eq!(joined, [vec![f32::INFINITY, 1.0], vec![1.5]]);
        }
        // The rank without the target adds nothing to the sum.
        let joined = reduction.reduce(&[row(0.0, 0.0, empty), row(0.25, 1.0, 1.5)]);
        assert_eq!(joined, [vec![0.25, 1.0], vec![1.5]]);
        // Where all are, the sum over all classes is none either, as without ranks.
        let joined = reduction.reduce(&[row(f32::NAN, 1.0, empty), row(0.0, 0.0, empty)]);
        assert!(joined[0][0].is_nan() && joined[1][0].is_nan(), "{joined:?}");
    }

    /// Each rank has a part of what label smoothing gives all classes, the target or not.
    #[test]
    fn smoothed_losses_over_the_classes_of_ranks_are_the_loss_over_all() {
        let logits = [0.5f32, -1.0, 2.0, 3.5, -0.25];
        let (target, kept, even) = (1, 0.75, 0.05);
        let lse = |x: &[f32]| x.iter().map(|x| x.exp()).sum::<f32>().ln();
        let of_rank = |classes: std::ops::Range<usize>| {
            let own = &logits[classes.clone()];
            let smoothed = even * own.iter().sum::<f32>();
            let has = classes.contains(&target);
            let loss = if has { lse(own) - kept * logits[target] } else { 0.0 };
            vec![vec![loss - smoothed, f32::from(u8::from(has))], vec![lse(own)]]
        };
        let joined = Reduction::CrossEntropy { classes: 5 }.reduce(&[of_rank(0..2), of_rank(2..5)]);
        let expected = of_rank(0..5);
        for (joined, expected) in joined.concat().iter().zip(expected.concat()) {
            assert!((joined - expected).abs() < 1e-6, "{joined}, not {expected}");
        }
    }
}
