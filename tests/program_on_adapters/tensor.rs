//! Tensor groups of unlike devices: gradients and losses of one CPU device, and slices that all
//! ranks hold with the same bits at every step.

use crate::pipelines::{largest_error, train};
use crate::process::{Desk, adapter_selectors, skip};

/// A learning rate with which little but the gradient is left of the parameters.
const GRADIENTS: &str = "--steps 1 --set optim.kind=sgd --set optim.momentum=0 --set optim.lr=1000 \
     --set optim.weight_decay=0 --set optim.clip=0 --set schedule.warmup=0";

const STEPS: usize = 50;

/// Returns the groups of this machine's adapters: two of them, and one with the CPU device, of
/// unlike shares.
fn groups() -> Vec<String> {
    let names = adapter_selectors();
    let mut groups = Vec::new();
    if let [first, second, ..] = &names[..] {
        groups.push(format!("--devices {first},{second} --tensor 2"));
    }
    if let Some(first) = names.first() {
        groups.push(format!("--devices {first},cpu --tensor 2 --set parallel.tensor_shares=3,1"));
    }
    groups
}

#[test]
fn tensor_groups_of_unlike_devices_are_the_cpu_device() {
    let groups = groups();
    if groups.is_empty() {
        return skip("there is no adapter");
    }
    // Dropout and a tied head; a width whose hidden columns four ranks can divide.
    let model = "--set model.width=32 --set model.heads=4";
    let (curve, step) = (Desk::new(), Desk::new());
    train(&curve, "", &format!("{model} --steps {STEPS} --devices cpu")).ok();
    train(&step, "", &format!("{model} {GRADIENTS} --devices cpu")).ok();
    for group in groups {
        let (desk, gradients) = (Desk::certified(), Desk::certified());
        train(&gradients, "", &format!("{model} {GRADIENTS} {group}")).ok();
        let error = largest_error(&gradients, &step);
        println!("{group}: gradients of the first step differ by {error:.1e} at most");
        assert!(error > 0.0 && error <= 1e-9, "{group}: {error}");
        train(&desk, "", &format!("{model} --steps {STEPS} {group}")).ok();
        let (losses, expected) = (desk.losses("run"), curve.losses("run"));
        assert_eq!(losses.len(), STEPS);
        for (step, (a, b)) in losses.iter().zip(&expected).enumerate() {
            assert!((a - b).abs() <= 1e-5 * b, "{group}, step {}: {a} is not {b}", step + 1);
        }
    }
}
