//! Learning-rate schedules: a pure function of the step.

use std::ops::RangeInclusive;

/// Decay of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    Constant,
    /// A straight line from `lr` to `min_lr`.
    Linear,
    /// Half a cosine from `lr` to `min_lr` (Loshchilov and Hutter 2017, one cycle).
    Cosine,
    /// No decay until `cooldown_steps` before the end, and then a straight line from `lr` to
    /// `min_lr`: warm-up, stable, decay (Hu et al. 2024), so that a run can be continued from the
    /// end of its constant part.
    Wsd,
    /// PyTorch's `StepLR` per step of the optimizer: every `step_size` steps (at least 1) the rate
    /// is multiplied by `gamma`, without an end.
    Step {
        step_size: u64,
        gamma: f64,
    },
    /// PyTorch's `ExponentialLR` per step of the optimizer: every step the rate is multiplied by
    /// `gamma`, without an end.
    Exponential {
        gamma: f64,
    },
    /// One cycle (Smith and Topin 2018), as PyTorch's `OneCycleLR` of two phases with cosines and
    /// `decay_steps` as its `total_steps`, without a cycle of momentum. `warmup` and `min_lr` do
    /// not apply.
    OneCycle(OneCycle),
}

/// Shape of [`Decay::OneCycle`], with PyTorch's names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OneCycle {
    /// Part of the steps in which the rate rises, from 0 to 1.
    pub pct_start: f64,
    /// The first rate is `lr / div_factor`.
    pub div_factor: f64,
    /// The last rate is `lr / div_factor / final_div_factor`.
    pub final_div_factor: f64,
}

impl OneCycle {
    /// Returns the rate after `done` of `total` steps, with the largest rate `lr`; it is constant
    /// from the last step on.
    fn lr(&self, lr: f64, done: u64, total: u64) -> f64 {
        let first = lr / self.div_factor;
        let last = first / self.final_div_factor;
        let end = total.saturating_sub(1) as f64;
        let top = self.pct_start * total as f64 - 1.0;
        let done = (done as f64).min(end);
        if done >= end {
            return last;
        }
        if done < top {
            return first + (1.0 - remaining_of_cosine(done / top)) * (lr - first);
        }
        last + remaining_of_cosine((done - top) / (end - top)) * (lr - last)
    }
}

/// Value of half a cosine from 1 to 0 at `progress` from 0 to 1.
fn remaining_of_cosine(progress: f64) -> f64 {
    0.5 * (1.0 + libm::cos(std::f64::consts::PI * progress))
}

/// Numbers that a field of a schedule may be, and words for them.
#[derive(Clone)]
struct Allowed {
    numbers: RangeInclusive<f64>,
    words: &'static str,
}

const RATE: Allowed = Allowed { numbers: 0.0..=f32::MAX as f64, words: "0 or more, and finite" };
const GAMMA: Allowed = Allowed { numbers: f64::MIN_POSITIVE..=1.0, words: "above 0, at most 1" };
const PART: Allowed = Allowed { numbers: 0.0..=1.0, words: "from 0 to 1" };
const DIVISOR: Allowed = Allowed { numbers: 1.0..=1e9, words: "from 1 to 1e9" };

/// Linear warm-up to `lr`, then a decay. [`Decay::Cosine`], [`Decay::Linear`] and [`Decay::Wsd`]
/// end at `decay_steps` and stay at `min_lr`; [`Decay::Step`] and [`Decay::Exponential`] have no
/// end and no `min_lr`; [`Decay::OneCycle`] ends at `decay_steps` at its last rate, and has no
/// warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    pub decay: Decay,
    pub lr: f64,
    pub min_lr: f64,
    /// Steps of warm-up; the first has the learning rate `lr / (warmup + 1)`.
    pub warmup: u64,
    pub decay_steps: u64,
    /// Steps of the decay of [`Decay::Wsd`]: the last before `decay_steps`, after the warm-up.
    pub cooldown_steps: u64,
}

impl Schedule {
    /// Returns a sentence on the first field that is out of the range which it has in a
    /// configuration (factors from above 0 to 1, parts from 0 to 1, divisors from 1 to 1e9, rates
    /// finite and not below 0); `None` if there is none.
    pub fn flaw(&self) -> Option<String> {
        let mut numbers = vec![("lr", self.lr, RATE), ("min_lr", self.min_lr, RATE)];
        match self.decay {
            Decay::Constant | Decay::Linear | Decay::Cosine | Decay::Wsd => {}
            Decay::Step { step_size: 0, .. } => {
                return Some("step_size must be at least 1; it is 0".into());
            }
            Decay::Step { gamma, .. } | Decay::Exponential { gamma } => {
                numbers.push(("gamma", gamma, GAMMA));
            }
            Decay::OneCycle(OneCycle { pct_start, div_factor, final_div_factor }) => {
                numbers.push(("pct_start", pct_start, PART));
                numbers.push(("div_factor", div_factor, DIVISOR));
                numbers.push(("final_div_factor", final_div_factor, DIVISOR));
            }
        }
        for (name, value, Allowed { numbers, words }) in numbers {
            if !numbers.contains(&value) {
                return Some(format!("{name} must be {words}; it is {value}"));
            }
        }
        None
    }

    /// Returns the learning rate of a step, counted from 1.
    pub fn lr(&self, step: u64) -> f64 {
        let done = step.saturating_sub(1);
        if let Decay::OneCycle(cycle) = &self.decay {
            return cycle.lr(self.lr, done, self.decay_steps);
        }
        if done < self.warmup {
            return self.lr * (done + 1) as f64 / (self.warmup as f64 + 1.0);
        }
        let decayed = |gamma: f64, times: u64| self.lr * libm::pow(gamma, times as f64);
        let after = done - self.warmup;
        match self.decay {
            Decay::Constant => return self.lr,
            Decay::Step { step_size, gamma } => return decayed(gamma, after / step_size.max(1)),
            Decay::Exponential { gamma } => return decayed(gamma, after),
            Decay::Linear | Decay::Cosine | Decay::Wsd | Decay::OneCycle(_) => {}
        }
        if done >= self.decay_steps {
            return self.min_lr;
        }
        let start = match self.decay {
            Decay::Wsd => self.warmup.max(self.decay_steps.saturating_sub(self.cooldown_steps)),
            Decay::Constant
            | Decay::Linear
            | Decay::Cosine
            | Decay::Step { .. }
            | Decay::Exponential { .. }
            | Decay::OneCycle(_) => self.warmup,
        };
        if done < start {
            return self.lr;
        }
        let progress = (done - start) as f64 / (self.decay_steps - start) as f64;
        let remaining = match self.decay {
            Decay::Cosine => remaining_of_cosine(progress),
            Decay::Constant
            | Decay::Linear
            | Decay::Wsd
            | Decay::Step { .. }
            | Decay::Exponential { .. }
            | Decay::OneCycle(_) => 1.0 - progress,
        };
        self.min_lr + remaining * (self.lr - self.min_lr)
    }

    /// Returns the constant rate from `decay_steps` on; `None` for a schedule without an end or
    /// without a decay.
    pub fn last_lr(&self) -> Option<f64> {
        match self.decay {
            Decay::Constant | Decay::Step { .. } | Decay::Exponential { .. } => None,
            Decay::Linear | Decay::Cosine | Decay::Wsd | Decay::OneCycle(_) => {
                Some(self.lr(self.decay_steps.max(self.warmup).saturating_add(1)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(decay: Decay) -> Schedule {
        let (warmup, decay_steps, cooldown_steps) = (100, 2000, 500);
        Schedule { decay, lr: 1e-3, min_lr: 1e-4, warmup, decay_steps, cooldown_steps }
    }

    #[test]
    fn warm_up_rises_to_lr_and_decay_falls_to_min() {
        for decay in [Decay::Linear, Decay::Cosine] {
            let schedule = schedule(decay);
            assert!((schedule.lr(1) - 1e-3 / 101.0).abs() < 1e-12);
            assert!((schedule.lr(101) - 1e-3).abs() < 1e-12);
            assert!((schedule.lr(1051) - 5.5e-4).abs() < 1e-9, "{}", schedule.lr(1051));
            assert_eq!(schedule.lr(2001), 1e-4);
            assert_eq!(schedule.lr(1_000_000), 1e-4);
            assert!((2..2100).all(|s| s <= 101 || schedule.lr(s) <= schedule.lr(s - 1)));
        }
    }

    #[test]
    fn warm_up_stable_decay_falls_in_the_last_steps() {
        let wsd = schedule(Decay::Wsd);
        assert!(wsd.lr(50) < 1e-3 && (101..=1501).all(|step| wsd.lr(step) == 1e-3));
        assert!((wsd.lr(1751) - 5.5e-4).abs() < 1e-9, "{}", wsd.lr(1751));
        assert_eq!((wsd.lr(2001), wsd.lr(9999)), (1e-4, 1e-4));
        // The warm-up comes first; without a cool-down the rate falls at once.
        let short = Schedule { cooldown_steps: 5000, ..wsd };
        assert_eq!(short.lr(1051), schedule(Decay::Linear).lr(1051));
        let sudden = Schedule { cooldown_steps: 0, ..wsd };
        assert_eq!((sudden.lr(2000), sudden.lr(2001)), (1e-3, 1e-4));
    }

    #[test]
    fn a_constant_schedule_stays() {
        assert_eq!(schedule(Decay::Constant).lr(5000), 1e-3);
    }

    /// Compares the rates from the first step on, without a warm-up, with PyTorch's in f64.
    fn check_rates(decay: Decay, decay_steps: u64, expected: &[f64]) {
        let schedule = Schedule { warmup: 0, decay_steps, ..schedule(decay) };
        for (step, expected) in (1..).zip(expected) {
            let lr = schedule.lr(step);
            assert!((lr / expected - 1.0).abs() < 1e-12, "{decay:?} {step}: {lr}, not {expected}");
        }
    }

    #[test]
    fn factors_per_step_give_the_rates_of_pytorch() {
        let steps = [1e-3, 1e-3, 1e-3, 0.00025, 0.00025, 0.00025, 6.25e-05, 6.25e-05];
        check_rates(Decay::Step { step_size: 3, gamma: 0.25 }, 0, &steps);
        let every = [0.001, 0.000875, 0.000765625, 0.000669921875, 0.000586181640625];
        check_rates(Decay::Exponential { gamma: 0.875 }, 3, &every);
        // They begin after the warm-up, and have no end.
        let step = schedule(Decay::Step { step_size: 10, gamma: 0.5 });
        assert!(step.lr(100) < 1e-3 && step.lr(110) == 1e-3 && step.lr(111) == 5e-4);
        assert!(step.lr(2_101) < 1e-60 && step.last_lr().is_none());
    }

    #[test]
    fn one_cycle_gives_the_rates_of_pytorch_and_stays_at_the_last() {
        let cycle = |pct_start, div_factor, final_div_factor| {
            Decay::OneCycle(OneCycle { pct_start, div_factor, final_div_factor })
        };
        let of_defaults = [
            3.9999999999999996e-05,
            0.00042234111373473584,
            0.0009602614247226174,
            0.0009797465678213016,
            0.0008844757247686302,
            0.0007260870492975282,
            0.0005305827080875997,
            0.00033005802898729487,
            0.00015743251279950787,
            4.104554320629086e-05,
            4e-09,
            4e-09,
        ];
        check_rates(cycle(0.3, 25.0, 1e4), 11, &of_defaults);
        let of_halves = [
            0.00025,
            0.0003911913243029749,
            0.000708445350233618,
            0.0009628633254634072,
            0.0009706001526331304,
            0.00075625,
            0.0004278465133873715,
            0.00013905333397949828,
            2.5e-05,
        ];
        check_rates(cycle(0.5, 4.0, 10.0), 9, &of_halves);
        // The rise is its warm-up.
        assert_eq!(schedule(cycle(0.3, 25.0, 1e4)).lr(1), 4e-5);
        for (pct_start, total) in [(0.0, 5), (0.2, 5), (0.9, 1), (0.5, 0), (0.99, 2)] {
            let decay = cycle(pct_start, 25.0, 1e4);
            let schedule = Schedule { decay_steps: total, ..schedule(decay) };
            let is_fine = |lr: f64| lr.is_finite() && lr > 0.0 && lr <= 1e-3;
            assert!((1..9).all(|step| is_fine(schedule.lr(step))), "{schedule:?}");
        }
    }

    #[test]
    fn a_flaw_of_a_schedule_names_the_field() {
        let cycle = OneCycle { pct_start: 0.3, div_factor: 25.0, final_div_factor: 1e4 };
        let fine = [
            Decay::Constant,
            Decay::Step { step_size: 1, gamma: 1.0 },
            Decay::Exponential { gamma: 1e-9 },
            Decay::OneCycle(cycle),
            Decay::OneCycle(OneCycle { pct_start: 1.0, div_factor: 1.0, final_div_factor: 1.0 }),
        ];
        assert!(fine.into_iter().all(|decay| schedule(decay).flaw().is_none()));
        let step = |step_size, gamma| schedule(Decay::Step { step_size, gamma });
        let of_cycle = |cycle| schedule(Decay::OneCycle(cycle));
        let constant = schedule(Decay::Constant);
        let mut wrong = vec![("step_size", step(0, 0.5))];
        for value in [f64::NAN, f64::INFINITY, -1.0] {
            let decay = Decay::Exponential { gamma: value };
            wrong.extend([
                ("lr", Schedule { lr: value, ..constant }),
                ("min_lr", Schedule { min_lr: value, ..constant }),
                ("gamma", step(5, value)),
                ("gamma", schedule(decay)),
                ("pct_start", of_cycle(OneCycle { pct_start: value, ..cycle })),
                ("div_factor", of_cycle(OneCycle { div_factor: value, ..cycle })),
                ("final_div_factor", of_cycle(OneCycle { final_div_factor: value, ..cycle })),
            ]);
        }
        wrong.push(("gamma", step(5, 0.0)));
        wrong.push(("gamma", step(5, 1.5)));
        wrong.push(("pct_start", of_cycle(OneCycle { pct_start: 1.1, ..cycle })));
        wrong.push(("div_factor", of_cycle(OneCycle { div_factor: 0.5, ..cycle })));
        wrong.push(("final_div_factor", of_cycle(OneCycle { final_div_factor: 0.0, ..cycle })));
        for (name, schedule) in wrong {
            let flaw = schedule.flaw().unwrap_or_default();
            assert!(flaw.starts_with(&format!("{name} must be ")), "{schedule:?}: {flaw}");
        }
    }

    #[test]
    fn no_step_divides_by_zero_when_warm_up_is_all() {
        let schedule = Schedule { decay_steps: 100, ..schedule(Decay::Cosine) };
        assert!((1..300).all(|step| schedule.lr(step).is_finite()));
    }
}
