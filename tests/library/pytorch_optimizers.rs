//! Optimizers and schedules beside PyTorch's, with the settings of PyTorch's own tests: the
//! reference in f64 and the CPU kernel walk through the steps of
//! `tests/pytorch/optimizer_samples.json`, by the script beside it. Settings that potluck has no
//! counterpart of are refused, and the table says why.

use potluck_graph::optim::{Decay, OneCycle, Optimizer, Schedule};
use potluck_graph::{Update, UpdateRange};
use potluck_kernels::{UpdateTwin, update_twin};
use serde_json::Value;

/// The farthest that values may be from PyTorch's, in parts of their size, and those of the
/// reference in f64 in parts of the way that they moved.
const NMSE_MAX: f64 = 1e-10;

/// The farthest that rates may be from PyTorch's, in parts of them.
const RATE_MAX: f64 = 1e-12;

/// Samples of optimizers that pass, and of schedules.
const PASSED: [usize; 2] = [26, 14];

/// SampleOutcome of a sample: its error, or why it is refused.
type SampleOutcome = Result<f64, String>;

fn numbers(values: &Value) -> Vec<f64> {
    values.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
}

fn rows(values: &Value) -> Vec<Vec<f64>> {
    values.as_array().unwrap().iter().map(numbers).collect()
}

/// SampleSettings of a sample, with PyTorch's defaults.
struct SampleSettings<'a>(&'a Value);

impl SampleSettings<'_> {
    fn number(&self, name: &str, default: f64) -> f64 {
        self.0[name].as_f64().unwrap_or(default)
    }

    fn is(&self, name: &str) -> bool {
        self.0[name].as_bool().unwrap_or(false) || self.0[name].as_f64().is_some_and(|x| x != 0.0)
    }

    fn betas(&self) -> [f32; 2] {
        match self.0["betas"].as_array() {
            Some(betas) => [0, 1].map(|at| betas[at].as_f64().unwrap() as f32),
            None => [0.9, 0.999],
        }
    }

    /// Returns why potluck has no counterpart of the settings, if one of these is set.
    fn refuse(&self, names: &[&str]) -> Result<(), String> {
        match names.iter().find(|name| self.is(name)) {
            Some(name) => Err(format!("there is no {name}")),
            None => Ok(()),
        }
    }
}

/// Returns the optimizer of a class of PyTorch, and its learning rate.
fn optimizer(class: &str, settings: &SampleSettings) -> Result<(Optimizer, f64), String> {
    settings.refuse(&["amsgrad", "centered", "dampening"])?;
    let weight_decay = |default: f64| settings.number("weight_decay", default) as f32;
    let momentum = settings.number("momentum", 0.0) as f32;
    let eps = settings.number("eps", 1e-8) as f32;
    let [beta1, beta2] = settings.betas();
    Ok(match class {
        "SGD" if settings.is("nesterov") => {
            let weight_decay = weight_decay(0.0);
            (Optimizer::Nesterov { momentum, weight_decay }, settings.number("lr", 1e-3))
        }
        "SGD" => {
            let weight_decay = weight_decay(0.0);
            (Optimizer::Sgd { momentum, weight_decay }, settings.number("lr", 1e-3))
        }
        "Adam" => {
            let weight_decay = weight_decay(0.0);
            (Optimizer::Adam { beta1, beta2, eps, weight_decay }, settings.number("lr", 1e-3))
        }
        "AdamW" => {
            let weight_decay = weight_decay(0.01);
            (Optimizer::AdamW { beta1, beta2, eps, weight_decay }, settings.number("lr", 1e-3))
        }
        "RMSprop" => {
            let alpha = settings.number("alpha", 0.99) as f32;
            let weight_decay = weight_decay(0.0);
            let rule = Optimizer::RmsProp { alpha, eps, momentum, weight_decay };
            (rule, settings.number("lr", 1e-2))
        }
        _ => return Err("there is no such optimizer".into()),
    })
}

/// Values of a run: those at its start, the gradients of each step, and the expected values after
/// it.
struct SampleSteps {
    start: Vec<f64>,
    gradients: Vec<Vec<f64>>,
    expected: Vec<Vec<f64>>,
}

impl SampleSteps {
    /// Walks through the steps with `step`, and returns the largest squared error of the values
    /// after one, in parts of the squared way from `origin`.
    fn error(&self, origin: &[f64], mut step: impl FnMut(u64, &[f64]) -> Vec<f64>) -> f64 {
        let mut worst = 0.0f64;
        for (t, (gradients, expected)) in (1..).zip(self.gradients.iter().zip(&self.expected)) {
            let values = step(t, gradients);
            let (mut error, mut scale) = (0.0, 0.0);
            for ((value, expected), origin) in values.iter().zip(expected).zip(origin) {
                error += (value - expected).powi(2);
                scale += (expected - origin).powi(2);
            }
            assert!(values.iter().all(|value| value.is_finite()), "step {t}: {values:?}");
            if error > 0.0 {
                worst = worst.max(error / scale);
            }
        }
        worst
    }
}

/// Returns the larger error of the reference in f64 and of the CPU kernel.
fn error_of(steps: &SampleSteps, range: &UpdateRange, update: impl Fn(u64) -> Update) -> f64 {
    let twin: &UpdateTwin = update_twin(&update(1));
    let (elements, moments) = (steps.start.len(), update(1).moments());
    let mut values = steps.start.clone();
    let mut kept = vec![vec![0.0; elements]; moments];
    let of_reference = steps.error(&steps.start, |t, gradients| {
        let mut moments: Vec<&mut [f64]> = kept.iter_mut().map(Vec::as_mut_slice).collect();
        (twin.reference_f64)(&update(t), range, &mut values, gradients, &mut moments);
        values.clone()
    });
    let narrow = |values: &[f64]| -> Vec<f32> { values.iter().map(|x| *x as f32).collect() };
    let mut values = narrow(&steps.start);
    let mut kept = vec![vec![0.0f32; elements]; moments];
    // A small step of f32 is mostly rounding.
    let of_kernel = steps.error(&vec![0.0; elements], |t, gradients| {
        let mut moments: Vec<&mut [f32]> = kept.iter_mut().map(Vec::as_mut_slice).collect();
        (twin.fast)(&update(t), range, &mut values, &narrow(gradients), &mut moments);
        values.iter().map(|x| f64::from(*x)).collect()
    });
    of_reference.max(of_kernel)
}

fn check_optimizer(samples: &Value, sample: &Value) -> SampleOutcome {
    let settings = SampleSettings(&sample["settings"]);
    let (rule, lr) = optimizer(sample["optimizer"].as_str().unwrap(), &settings)?;
    let steps = SampleSteps {
        start: numbers(&samples["start"]),
        gradients: rows(&samples["gradients"]),
        expected: rows(&sample["values"]),
    };
    let length = steps.start.len();
    let range = UpdateRange {
        start: 0,
        length,
        decay_end: length,
        gradient_scale: if settings.is("maximize") { -1.0 } else { 1.0 },
        rounding: None,
    };
    Ok(error_of(&steps, &range, |t| rule.update(lr, t)))
}

/// Returns the schedule of a class of PyTorch.
fn schedule(class: &str, settings: &SampleSettings, lr: f64) -> Result<Schedule, String> {
    let (mut min_lr, mut decay_steps) = (0.0, 0);
    let gamma = settings.number("gamma", 0.1);
    let decay = match class {
        "StepLR" => Decay::Step { step_size: settings.number("step_size", 0.0) as u64, gamma },
        "ExponentialLR" => Decay::Exponential { gamma },
        "CosineAnnealingLR" => {
            min_lr = settings.number("eta_min", 0.0);
            decay_steps = settings.number("T_max", 0.0) as u64;
            Decay::Cosine
        }
        "LinearLR" if settings.number("start_factor", 1.0 / 3.0) == 1.0 => {
            min_lr = lr * settings.number("end_factor", 1.0);
            decay_steps = settings.number("total_iters", 5.0) as u64;
            Decay::Linear
        }
        "LinearLR" => return Err("a line begins at the rate itself".into()),
        "ConstantLR" if settings.number("factor", 1.0 / 3.0) == 1.0 => Decay::Constant,
        "ConstantLR" => return Err("a constant rate has no factor".into()),
        "OneCycleLR" => {
            settings.refuse(&["three_phase"])?;
            if settings.0["anneal_strategy"] == "linear" {
                return Err("a cycle has no lines".into());
            }
            decay_steps = settings.number("total_steps", 0.0) as u64;
            Decay::OneCycle(OneCycle {
                pct_start: settings.number("pct_start", 0.3),
                div_factor: settings.number("div_factor", 25.0),
                final_div_factor: settings.number("final_div_factor", 1e4),
            })
        }
        _ => return Err("there is no such schedule".into()),
    };
    Ok(Schedule { decay, lr, min_lr, warmup: 0, decay_steps, cooldown_steps: 0 })
}

fn check_schedule(_: &Value, sample: &Value) -> SampleOutcome {
    if let Some(why) = sample["refused"].as_str() {
        return Err(why.into());
    }
    let settings = SampleSettings(&sample["settings"]);
    let lr = sample["lr"].as_f64().unwrap();
    let schedule = schedule(sample["schedule"].as_str().unwrap(), &settings, lr)?;
    let mut worst = 0.0f64;
    for (step, expected) in (1..).zip(numbers(&sample["rates"])) {
        let difference = (schedule.lr(step) - expected).abs();
        assert!(difference.is_finite(), "step {step}");
        worst = worst.max(if expected == 0.0 { difference } else { difference / expected });
    }
    Ok(worst)
}

#[test]
fn optimizers_step_as_pytorchs() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/pytorch/optimizer_samples.json");
    let samples: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    type SampleCheck = fn(&Value, &Value) -> SampleOutcome;
    let tables: [(&str, &str, SampleCheck, f64); 2] = [
        ("optimizers", "optimizer", check_optimizer, NMSE_MAX),
        ("schedules", "schedule", check_schedule, RATE_MAX),
    ];
    let mut passed = [0; 2];
    for (at, (list, class, check, most)) in tables.into_iter().enumerate() {
        for sample in samples[list].as_array().unwrap() {
            let name = format!("{} {}", sample[class].as_str().unwrap(), sample["settings"]);
            match check(&samples, sample) {
                Ok(error) => {
                    println!("{name:<90} passed {error:.1e}");
                    assert!(error <= most, "{name}: {error:.2e}");
                    passed[at] += 1;
                }
                Err(why) => println!("{name:<90} refused: {why}"),
            }
        }
        let all = samples[list].as_array().unwrap().len();
        println!("{list}: {all} usable, {} passed, {} refused", passed[at], all - passed[at]);
    }
    assert_eq!(passed, PASSED, "what passes has changed");
}
