//! Learning-rate schedules: a pure function of the step.

/// Decay of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    Constant,
    /// A straight line from `lr` to `min_lr`.
    Linear,
    /// Half a cosine from `lr` to `min_lr` (Loshchilov and Hutter 2017, one cycle).
    Cosine,
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
        let progress = (done - self.warmup) as f64 / (self.decay_steps - self.warmup) as f64;
        let remaining = match self.decay {
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
            Decay::Linear | Decay::Constant => 1.0 - progress,
        };
        self.min_lr + remaining * (self.lr - self.min_lr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(decay: Decay) -> Schedule {
        Schedule { decay, lr: 1e-3, min_lr: 1e-4, warmup: 100, decay_steps: 2000 }
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
    fn a_constant_schedule_stays() {
        assert_eq!(schedule(Decay::Constant).lr(5000), 1e-3);
    }

    #[test]
    fn no_step_divides_by_zero_when_warm_up_is_all() {
        let schedule = Schedule { decay_steps: 100, ..schedule(Decay::Cosine) };
        assert!((1..300).all(|step| schedule.lr(step).is_finite()));
    }
}
