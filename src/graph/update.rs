//! Optimizer update as data: `optim` determines it for a step, and `kernels` compute it over a
//! range of a bucket.

use std::fmt;
use std::ops::Range;

use potluck_core::RunSeries;
use potluck_core::rng::Key;

/// One of the tensors that a device holds of each bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum BucketTensor {
    Parameters,
    Gradients,
    /// A running average of the optimizer.
    Moment(usize),
    /// The exponential average of the parameters.
    Average,
}

impl fmt::Display for BucketTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Parameters => f.write_str("parameters"),
            Self::Gradients => f.write_str("gradients"),
            Self::Moment(index) => write!(f, "moment {index}"),
            Self::Average => f.write_str("averages of the parameters"),
        }
    }
}

/// Rates at which the optimizer updates a parameter, where they differ from its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateRates {
    /// Factor of the learning rate, at every step of its schedule.
    pub lr_scale: f32,
    /// Weight decay; `None` for the optimizer's.
    pub weight_decay: Option<f32>,
}

impl UpdateRates {
    /// The largest factor of the learning rate, and the largest weight decay.
    pub const MAX: f32 = 1000.0;
}

impl Default for UpdateRates {
    fn default() -> Self {
        Self { lr_scale: 1.0, weight_decay: None }
    }
}

/// Update rule with the hyperparameters of one step.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum Update {
    /// Stochastic gradient descent with momentum, as PyTorch's `SGD`:
    /// `g += weight_decay p;  m = momentum m + g;  p -= lr m` (without momentum, `p -= lr g`).
    Sgd { lr: f32, momentum: f32, weight_decay: f32 },
    /// Adam with decoupled weight decay (Loshchilov and Hutter 2019), as PyTorch's `AdamW`:
    /// `p -= lr weight_decay p;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
    /// p -= lr (m / correction1) / (sqrt(v / correction2) + eps)`.
    AdamW {
        lr: f32,
        beta1: f32,
        beta2: f32,
        eps: f32,
        weight_decay: f32,
        /// `1 - beta1^t`, with `t` the optimizer's own step, from 1.
        correction1: f32,
        /// `1 - beta2^t`
        correction2: f32,
    },
    /// Stochastic gradient descent with Nesterov momentum, as PyTorch's `SGD(nesterov=True)`:
    /// `g += weight_decay p;  m = momentum m + g;  p -= lr (g + momentum m)`.
    Nesterov { lr: f32, momentum: f32, weight_decay: f32 },
    /// Adam (Kingma and Ba 2015) with the weight decay in the gradient, as PyTorch's `Adam`:
    /// `g += weight_decay p`, and then as [`Update::AdamW`] without its decay.
    Adam {
        lr: f32,
        beta1: f32,
        beta2: f32,
        eps: f32,
        weight_decay: f32,
        /// `1 - beta1^t`, with `t` the optimizer's own step, from 1.
        correction1: f32,
        /// `1 - beta2^t`
        correction2: f32,
    },
    /// RMSprop (Tieleman and Hinton 2012), as PyTorch's `RMSprop` that is not centered:
    /// `g += weight_decay p;  v = alpha v + (1 - alpha) g^2;  d = g / (sqrt(v) + eps);
    /// p -= lr d`, or with momentum `m = momentum m + d;  p -= lr m`. The first moment is `v`.
    RmsProp { lr: f32, alpha: f32, eps: f32, momentum: f32, weight_decay: f32 },
    /// Lion (Chen et al. 2023, algorithm 2), with decoupled weight decay:
    /// `p -= lr weight_decay p;  p -= lr sign(beta1 m + (1 - beta1) g);
    /// m = beta2 m + (1 - beta2) g`.
    Lion { lr: f32, beta1: f32, beta2: f32, weight_decay: f32 },
}

impl Update {
    /// Returns the rule at rates of a parameter group.
    pub fn at(self, rates: UpdateRates) -> Self {
        let UpdateRates { lr_scale, weight_decay: own } = rates;
        let mut update = self;
        match &mut update {
            Self::Sgd { lr, weight_decay, .. }
            | Self::AdamW { lr, weight_decay, .. }
            | Self::Nesterov { lr, weight_decay, .. }
            | Self::Adam { lr, weight_decay, .. }
            | Self::RmsProp { lr, weight_decay, .. }
            | Self::Lion { lr, weight_decay, .. } => {
                *lr *= lr_scale;
                *weight_decay = own.unwrap_or(*weight_decay);
            }
        }
        update
    }

    /// Returns the update `a -= weight (a - p)` that moves an average towards values `p`: an SGD
    /// with the average as parameters and the values as gradients, over
    /// [`UpdateRange::of_average`].
    pub fn of_average(weight: f32) -> Self {
        Self::Sgd { lr: weight, momentum: 0.0, weight_decay: 1.0 }
    }

    /// Returns the number of running averages that the rule keeps per parameter.
    pub fn moments(&self) -> usize {
        match self {
            Self::Sgd { momentum, .. } => usize::from(*momentum != 0.0),
            Self::AdamW { .. } | Self::Adam { .. } => 2,
            Self::Nesterov { .. } | Self::Lion { .. } => 1,
            Self::RmsProp { momentum, .. } => 1 + usize::from(*momentum != 0.0),
        }
    }

    /// Returns the number of the moment that averages squares, which is never negative.
    pub fn moment_of_squares(&self) -> Option<usize> {
        match self {
            Self::Sgd { .. } | Self::Nesterov { .. } | Self::Lion { .. } => None,
            Self::AdamW { .. } | Self::Adam { .. } => Some(1),
            Self::RmsProp { .. } => Some(0),
        }
    }
}

/// Number format in which a device keeps the moments of the optimizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum MomentFormat {
    #[default]
    F32,
    /// bfloat16, two in a word, the first in its low half. An update computes in f32 and rounds the
    /// result stochastically, so that its expected value is exact: rounded to nearest, a running
    /// average would ignore changes of less than 1/512 of it.
    Bf16,
}

impl MomentFormat {
    /// Returns the format of a bucket tensor of a device that keeps moments in this format.
    pub fn of_bucket_tensor(self, bucket_tensor: BucketTensor) -> Self {
        match bucket_tensor {
            BucketTensor::Parameters | BucketTensor::Gradients | BucketTensor::Average => Self::F32,
            BucketTensor::Moment(_) => self,
        }
    }

    /// Returns the words of 4 bytes that some elements take.
    pub fn words(self, elements: usize) -> usize {
        match self {
            Self::F32 => elements,
            Self::Bf16 => elements.div_ceil(2),
        }
    }

    /// Returns the bytes that some elements take.
    pub fn bytes(self, elements: usize) -> usize {
        self.words(elements).saturating_mul(size_of::<u32>())
    }
}

/// Stochastic rounding to bf16 of the moments of a range of one parameter. The random numbers of an
/// element depend on its place in the whole tensor, and so do not depend on the division of the
/// tensor.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct MomentRounding {
    /// Random numbers of the parameter in this step. Elements `2 n` and `2 n + 1` of the whole
    /// tensor have the two words of counter `n`; the low half of a word rounds the first moment,
    /// the high half the second.
    pub key: Key,
    /// Places of the slice's elements in the whole tensor, and the number in this series of the
    /// first element of the range.
    pub series: RunSeries,
    pub number: usize,
}

impl MomentRounding {
    /// Returns the place in the whole tensor of an element of the range, counted from its first.
    pub fn place(&self, element: usize) -> usize {
        self.series.place_of(self.number + element)
    }
}

/// Range of elements of a bucket that an update covers.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct UpdateRange {
    /// First element.
    pub start: usize,
    /// Number of elements.
    pub length: usize,
    /// Elements of the bucket before this one have weight decay, later ones have none: buckets
    /// begin with the parameters with weight decay, so that one dispatch updates both.
    pub decay_end: usize,
    /// Factor that gradient sums are multiplied by first: 1/count and the clipping factor.
    pub gradient_scale: f32,
    /// Rounding of the moments, if they are kept in bf16; `None` in f32 and without moments.
    pub rounding: Option<MomentRounding>,
}

impl UpdateRange {
    /// Returns the range of [`Update::of_average`] over elements of a bucket.
    pub fn of_average(elements: Range<usize>) -> Self {
        Self {
            start: elements.start,
            length: elements.len(),
            decay_end: elements.end,
            gradient_scale: -1.0,
            rounding: None,
        }
    }
}
