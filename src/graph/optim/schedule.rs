//! Learning-rate schedules: a pure function of the step.

/// Decay of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    Constant,
    /// A straight line from `lr` to `min_lr`.
    Linear,
    /// Half a cosine from `lr` to `min_lr` (Loshchilov and Hutter 2017, one cycle).
    Cosine,
    /// No decay until `cooldown_steps` before the end, and then a straight line from `lr` to
    /// `min_lr`: warm-up, stable, decay (Hu et al. 2024), so that a run can go on from the end of
    /// its constant part.
    Wsd,
}

/// Linear warm-up to `lr`, then a decay that ends at `decay_steps` and stays at `min_lr`.
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
    /// Returns the learning rate of a step, counted from 1.
    pub fn lr(&self, step: u64) -> f64 {
        let done = step.saturating_sub(1);
        if done < self.warmup {
            return self.lr * (done + 1) as f64 / (self.warmup + 1) as f64;
        }
        if self.decay == Decay::Constant {
            return self.lr;
        }
        if done >= self.decay_steps {
            return self.min_lr;
        }
        let start = match self.decay {
            Decay::Wsd => self.warmup.max(self.decay_steps.saturating_sub(self.cooldown_steps)),
            _ => self.warmup,
        };
        if done < start {
            return self.lr;
        }
        let progress = (done - start) as f64 / (self.decay_steps - start) as f64;
        let remaining = match self.decay {
            Decay::Cosine => 0.5 * (1.0 + libm::cos(std::f64::consts::PI * progress)),
            Decay::Linear | Decay::Wsd | Decay::Constant => 1.0 - progress,
        };
        self.min_lr + remaining * (self.lr - self.min_lr)
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

    #[test]
    fn no_step_divides_by_zero_when_warm_up_is_all() {
        let schedule = Schedule { decay_steps: 100, ..schedule(Decay::Cosine) };
        assert!((1..300).all(|step| schedule.lr(step).is_finite()));
    }
}
