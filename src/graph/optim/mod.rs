//! Optimizers: the update rule, learning rate and gradient clipping of a step, and parameter
//! groups, as pure functions.

mod groups;
pub mod schedule;

pub use groups::{GroupRule, ParameterGroup, ParameterGroupError, assign_groups};
pub use schedule::{Decay, OneCycle, Schedule};

use std::ops::Range;

use crate::Update;

/// Update rule with its hyperparameters; [`Optimizer::update`] adds the values of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// See [`Update::Sgd`].
    Sgd { momentum: f32, weight_decay: f32 },
    /// See [`Update::AdamW`].
    AdamW { beta1: f32, beta2: f32, eps: f32, weight_decay: f32 },
    /// See [`Update::Nesterov`].
    Nesterov { momentum: f32, weight_decay: f32 },
    /// See [`Update::Adam`].
    Adam { beta1: f32, beta2: f32, eps: f32, weight_decay: f32 },
    /// See [`Update::RmsProp`].
    RmsProp { alpha: f32, eps: f32, momentum: f32, weight_decay: f32 },
    /// See [`Update::Lion`].
    Lion { beta1: f32, beta2: f32, weight_decay: f32 },
}

impl Optimizer {
    /// Returns a sentence on the first number with which an update would not be finite; `None` if
    /// there is none.
    pub fn flaw(&self) -> Option<String> {
        const BELOW_1: Range<f32> = 0.0..1.0;
        const ANY: Range<f32> = 0.0..f32::INFINITY;
        // A gradient of zeros is divided by it alone, and devices take subnormal numbers for zeros.
        const ABOVE_0: Range<f32> = f32::MIN_POSITIVE..f32::INFINITY;
        let numbers = match *self {
            Self::Sgd { momentum, weight_decay } | Self::Nesterov { momentum, weight_decay } => {
                vec![("momentum", momentum, ANY), ("weight_decay", weight_decay, ANY)]
            }
            Self::AdamW { beta1, beta2, eps, weight_decay }
            | Self::Adam { beta1, beta2, eps, weight_decay } => vec![
                ("beta1", beta1, BELOW_1),
                ("beta2", beta2, BELOW_1),
                ("eps", eps, ABOVE_0),
                ("weight_decay", weight_decay, ANY),
            ],
            Self::RmsProp { alpha, eps, momentum, weight_decay } => vec![
                ("alpha", alpha, BELOW_1),
                ("eps", eps, ABOVE_0),
                ("momentum", momentum, ANY),
                ("weight_decay", weight_decay, ANY),
            ],
            Self::Lion { beta1, beta2, weight_decay } => vec![
                ("beta1", beta1, BELOW_1),
                ("beta2", beta2, BELOW_1),
                ("weight_decay", weight_decay, ANY),
            ],
        };
        let (name, value, range) =
            numbers.into_iter().find(|(_, value, range)| !range.contains(value))?;
        let most = if range == BELOW_1 { "below 1" } else { "finite" };
        let least = if range == ABOVE_0 { "1.2e-38" } else { "0" };
        Some(format!("{name} must be at least {least} and {most}, and is {value}"))
    }

    /// Returns the update of step `t` of the optimizer (from 1; skipped steps do not count).
    pub fn update(&self, lr: f64, t: u64) -> Update {
        let lr = lr as f32;
        // In f64, because for large t the bias corrections differ from 1 by very little.
        let correction = |beta: f32| (1.0 - libm::pow(f64::from(beta), t as f64)) as f32;
        match *self {
            Self::Sgd { momentum, weight_decay } => Update::Sgd { lr, momentum, weight_decay },
            Self::AdamW { beta1, beta2, eps, weight_decay } => Update::AdamW {
                lr,
                beta1,
                beta2,
                eps,
                weight_decay,
                correction1: correction(beta1),
                correction2: correction(beta2),
            },
            Self::Nesterov { momentum, weight_decay } => {
                Update::Nesterov { lr, momentum, weight_decay }
            }
            Self::Adam { beta1, beta2, eps, weight_decay } => Update::Adam {
                lr,
                beta1,
                beta2,
                eps,
                weight_decay,
                correction1: correction(beta1),
                correction2: correction(beta2),
            },
            Self::RmsProp { alpha, eps, momentum, weight_decay } => {
                Update::RmsProp { lr, alpha, eps, momentum, weight_decay }
            }
            Self::Lion { beta1, beta2, weight_decay } => {
                Update::Lion { lr, beta1, beta2, weight_decay }
            }
        }
    }

    /// Returns the number of running averages kept per parameter.
    pub fn moments(&self) -> usize {
        self.update(0.0, 1).moments()
    }

    /// Returns the kind of the running averages: optimizers of the same kind can continue with each
    /// other's.
    pub fn kind_of_moments(&self) -> &'static str {
        match self {
            Self::Sgd { .. } | Self::Nesterov { .. } => "momentum",
            Self::AdamW { .. } | Self::Adam { .. } => "adam",
            Self::RmsProp { .. } => "rmsprop",
            Self::Lion { .. } => "lion",
        }
    }
}

/// Returns the weight of the parameters in the update `t` (from 1) of their exponential average, as
/// PyTorch's `AveragedModel` with `get_ema_multi_avg_fn(ema)`: 1 in the first update, `1 - ema`
/// later. `None` if no average is kept, for an `ema` of 0.
pub fn average_weight(ema: f64, t: u64) -> Option<f32> {
    match (ema, t) {
        (0.0, _) => None,
        (_, ..=1) => Some(1.0),
        _ => Some((1.0 - ema) as f32),
    }
}

/// Returns the factor that clips a gradient of this norm to `norm_max` (0: no clipping), as
/// PyTorch's `clip_grad_norm_`: `min(1, norm_max / (norm + 1e-6))`.
pub fn clip_factor(norm: f64, norm_max: f64) -> f64 {
    if norm_max == 0.0 { 1.0 } else { (norm_max / (norm + 1e-6)).min(1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clipping_scales_down_and_never_up() {
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert!((clip_factor(4.0, 1.0) - 0.25).abs() < 1e-6);
        assert_eq!(clip_factor(4.0, 0.0), 1.0);
    }

    #[test]
    fn an_eps_of_zero_is_a_flaw_of_each_optimizer_with_one() {
        let of = |eps| {
            let (beta1, beta2, weight_decay) = (0.9, 0.99, 0.0);
            [
                Optimizer::AdamW { beta1, beta2, eps, weight_decay },
                Optimizer::Adam { beta1, beta2, eps, weight_decay },
                Optimizer::RmsProp { alpha: beta2, eps, momentum: 0.0, weight_decay },
            ]
        };
        assert_eq!(of(1e-8).map(|optimizer| optimizer.flaw()), [None, None, None]);
        for eps in [0.0, -1e-8, 1e-40, f32::INFINITY, f32::NAN] {
            for optimizer in of(eps) {
                let flaw = optimizer.flaw().unwrap_or_default();
                assert!(flaw.starts_with("eps must be at least 1.2e-38 and"), "{flaw}");
            }
        }
    }

    #[test]
    fn averages_begin_as_the_parameters_and_follow_them_slowly() {
        assert_eq!([1, 2, 9].map(|t| average_weight(0.0, t)), [None; 3]);
        assert_eq!([1, 2].map(|t| average_weight(0.75, t)), [Some(1.0), Some(0.25)]);
    }

    #[test]
    fn corrections_start_at_one_minus_beta_and_end_at_one() {
        let adam = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
        let at = |t| match adam.update(1e-3, t) {
            Update::AdamW { correction1, correction2, .. } => (correction1, correction2),
            other => unreachable!("{other:?}"),
        };
        assert!((at(1).0 - 0.1).abs() < 1e-6 && (at(1).1 - 0.01).abs() < 1e-6);
        assert_eq!(at(100_000), (1.0, 1.0));
        assert_eq!(adam.moments(), 2);
        assert_eq!(Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 }.moments(), 0);
        let rms_prop = |momentum| {
            Optimizer::RmsProp { alpha: 0.99, eps: 1e-8, momentum, weight_decay: 0.0 }.moments()
        };
        assert_eq!((rms_prop(0.0), rms_prop(0.9)), (1, 2));
    }
}
