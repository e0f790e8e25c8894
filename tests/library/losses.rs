//! Losses that the builder composes: their values by their formulas in f64, and their gradients by
//! finite differences.

use potluck_core::{HostTensorView, TensorId};
use potluck_graph::builder::BuildResult;
use potluck_graph::{
    Builder, CrossEntropyOptions, IGNORE_INDEX, Init, LossTerm, Plan, PlanOptions, Unary,
    differentiate,
};
use potluck_kernels::exec::{Cpu, Executor, StepSums};

use crate::gradients::{check_graph, source};

const ROWS: usize = 3;
const CLASSES: usize = 4;

/// Values of the input `x (b, ..)`, and of the targets.
#[derive(Clone, Copy)]
struct Values<'a> {
    x: &'a [f32],
    targets: HostTensorView<'a>,
}

/// Returns the sums of a loss on the rows of the inputs `x` and `targets`, of `of_row` values each.
fn sums_of(
    values: Values,
    of_row: [usize; 2],
    build: impl Fn(&mut Builder, TensorId, TensorId) -> BuildResult,
) -> StepSums {
    let mut b = Builder::new();
    let input = b.input("x", &[1, of_row[0]]);
    let one = b.parameter("one", &[of_row[0]], Init::Ones);
    let x = b.mul(input, one).unwrap();
    let targets = match values.targets {
        HostTensorView::Int(_) => b.input_ids("targets", &[1]),
        HostTensorView::Float(_) => b.input("targets", &[1, of_row[1]]),
    };
    build(&mut b, x, targets).unwrap();
    let rows = values.x.len() / of_row[0];
    let plan = Plan::new(differentiate(b.finish()).unwrap(), PlanOptions::new(rows));
    let mut device = Cpu::oracle(plan, 0);
    crate::common::set_parameters(&mut device, |_| vec![1.0; of_row[0]]);
    device.set_input(input, 0, HostTensorView::Float(values.x)).unwrap();
    device.set_input(targets, 0, values.targets).unwrap();
    crate::common::run_step(&mut device, &crate::common::pass(0, rows))
}

/// The value of each reduction, with its weight, on elements 1 to 4 and 5 to 8 of two samples.
#[test]
fn terms_are_summed_and_reported() {
    let x: Vec<f32> = (1..=8).map(|value| value as f32).collect();
    let values = Values { x: &x, targets: HostTensorView::Float(&[0.0; 2]) };
    let sums = sums_of(values, [4, 1], |b, x, _| b.loss(&[LossTerm::mean("mean", x)]));
    assert_eq!((sums.loss.loss, sums.loss.count, sums.loss.terms.len()), (9.0, 2.0, 0));
    let sums = sums_of(values, [4, 1], |b, x, _| {
        let squares = b.unary(x, Unary::Square)?;
        b.loss(&[
            LossTerm::mean("mean", x).weighted(-2.0),
            LossTerm::sum("sum", x),
            LossTerm::mean("squares", squares).weighted(0.5),
        ])
    });
    assert_eq!((sums.loss.count, &sums.loss.terms[..]), (2.0, &[9.0, 36.0, 51.0][..]));
    assert_eq!(sums.loss.loss, -2.0 * 9.0 + 36.0 + 0.5 * 51.0);
}

/// Returns the loss and the weight of a row, by PyTorch's definition of `cross_entropy`.
fn cross_entropy(row: &[f32], target: u32, options: &CrossEntropyOptions) -> [f64; 2] {
    let CrossEntropyOptions { weights, smoothing, ignored } = options;
    if target as usize >= row.len() || *ignored == Some(target) {
        return [0.0; 2];
    }
    let weight = |class: usize| f64::from(*weights.get(class).unwrap_or(&1.0));
    let row: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
    let normalizer = row.iter().map(|x| x.exp()).sum::<f64>().ln();
    let surprise = |class: usize| weight(class) * (normalizer - row[class]);
    let even = (0..row.len()).map(surprise).sum::<f64>() / row.len() as f64;
    let (target, smoothing) = (target as usize, f64::from(*smoothing));
    [(1.0 - smoothing) * surprise(target) + smoothing * even, weight(target)]
}

#[test]
fn cross_entropy_options_count() {
    let x: Vec<f32> = (0..5 * CLASSES).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
    let targets = [3, 1, IGNORE_INDEX, 0, 1];
    let values = Values { x: &x, targets: HostTensorView::Int(&targets) };
    for weights in [vec![], vec![0.5, 2.0, 1.0, 0.25]] {
        for smoothing in [0.0, 0.125] {
            for ignored in [None, Some(1)] {
                let options = CrossEntropyOptions { weights: weights.clone(), smoothing, ignored };
                let sums = sums_of(values, [CLASSES, 1], |b, x, targets| {
                    b.cross_entropy_loss_with(x, targets, &options)
                });
                let mut expected = [0.0; 2];
                for (row, target) in x.chunks(CLASSES).zip(targets) {
                    let [loss, weight] = cross_entropy(row, target, &options);
                    expected[0] += loss;
                    expected[1] += weight;
                }
                let apart = (sums.loss.loss - expected[0]).abs();
                assert!(apart < 1e-9, "{options:?}: {} for {}", sums.loss.loss, expected[0]);
                assert_eq!(sums.loss.count, expected[1], "{options:?}");
                let sums = sums_of(values, [CLASSES, 1], |b, x, targets| {
                    let losses = b.cross_entropy(x, targets, &options)?;
                    b.loss(&[LossTerm::sum("loss", losses)])
                });
                assert!((sums.loss.loss - expected[0]).abs() < 1e-9, "{options:?} as a term");
                assert_eq!(sums.loss.count, 5.0);
                if smoothing > 0.0 {
                    continue;
                }
                let sums = sums_of(values, [CLASSES, 1], |b, x, targets| {
                    let logarithms = b.log_softmax(x)?;
                    let losses = b.negative_log_likelihood(logarithms, targets, &options)?;
                    b.loss(&[LossTerm::sum("loss", losses)])
                });
                assert!(
                    (sums.loss.loss - expected[0]).abs() < 1e-9,
                    "{options:?}: {}",
                    sums.loss.loss
                );
            }
        }
    }
}

/// A class that can never be, as of padding, has a logit of minus infinity; its rows count nothing.
#[test]
fn cross_entropy_infinite_loss_of_ignored_row_is_nothing() {
    let row = [0.5, -3.0, 1.0, -1.0];
    let x = [row, [0.5, f32::NEG_INFINITY, 1.0, -1.0], row].concat();
    let values = Values { x: &x, targets: HostTensorView::Int(&[2, 1, 0]) };
    let weights = [vec![], vec![0.5, 2.0, 1.0, 0.25]];
    for (weights, smoothing) in weights.iter().flat_map(|of| [(of, 0.0), (of, 0.125)]) {
        let options = CrossEntropyOptions { weights: weights.clone(), smoothing, ignored: Some(1) };
        let expected: f64 =
            [2, 0].iter().map(|target| cross_entropy(&row, *target, &options)[0]).sum();
        let sums = sums_of(values, [CLASSES, 1], |b, x, targets| {
            b.cross_entropy_loss_with(x, targets, &options)
        });
        assert!((sums.loss.loss - expected).abs() < 1e-9, "{options:?}: {}", sums.loss.loss);
        let sums = sums_of(values, [CLASSES, 1], |b, x, targets| {
            let losses = b.negative_log_likelihood(x, targets, &options)?;
            b.loss(&[LossTerm::sum("loss", losses)])
        });
        assert!(sums.loss.loss.is_finite(), "{options:?}: {}", sums.loss.loss);
    }
}

/// Returns an elementwise loss by its formula on differences or logits, summed up.
fn check_values(
    build: impl Fn(&mut Builder, TensorId, TensorId) -> BuildResult,
    formula: impl Fn(f64, f64) -> f64,
) {
    let x: Vec<f32> = (0..12).map(|i| (i as f32 * 0.9).sin() * 4.0).collect();
    let mut targets: Vec<f32> = (0..12).map(|i| (i as f32 * 1.3).cos().abs()).collect();
    targets[5] = 0.0;
    let values = Values { x: &x, targets: HostTensorView::Float(&targets) };
    let sums = sums_of(values, [4, 4], |b, x, target| {
        let losses = build(b, x, target)?;
        b.loss(&[LossTerm::sum("loss", losses)])
    });
    let pairs = x.iter().zip(&targets);
    let expected: f64 = pairs.map(|(x, t)| formula(f64::from(*x), f64::from(*t))).sum();
    assert!((sums.loss.loss - expected).abs() < 1e-6, "{} for {expected}", sums.loss.loss);
}

#[test]
fn elementwise_have_pytorchs_formulas() {
    check_values(|b, x, t| b.squared_error(x, t), |x, t| (x - t).powi(2));
    check_values(|b, x, t| b.absolute_error(x, t), |x, t| (x - t).abs());
    let huber = |x: f64, t: f64| {
        let d = (x - t).abs();
        if d < 1.5 { d * d / 2.0 } else { 1.5 * (d - 0.75) }
    };
    check_values(|b, x, t| b.huber(x, t, 1.5), huber);
    let binary = |x: f64, t: f64| {
        let yes = 1.0 / (1.0 + (-x).exp());
        -t * yes.ln() - (1.0 - t) * (1.0 - yes).ln()
    };
    check_values(|b, x, t| b.binary_cross_entropy(x, t), binary);
    let kl = |x: f64, t: f64| if t == 0.0 { 0.0 } else { t * (t.ln() - x) };
    check_values(|b, x, t| b.kl_divergence(x, t), kl);
}

#[test]
fn gradients_are_those_of_values() {
    let elementwise: [fn(&mut Builder, TensorId, TensorId) -> BuildResult; 5] = [
        |b, x, t| b.squared_error(x, t),
        |b, x, t| b.absolute_error(x, t),
        |b, x, t| b.huber(x, t, 0.5),
        |b, x, t| b.binary_cross_entropy(x, t),
        |b, x, t| {
            let logarithms = b.log_softmax(x)?;
            let probabilities = b.softmax(t)?;
            b.kl_divergence(logarithms, probabilities)
        },
    ];
    for build in elementwise {
        let mut b = Builder::new();
        b.block("test");
        let x = source(&mut b, "x", &[1, 4]);
        let target = source(&mut b, "t", &[1, 4]);
        let losses = build(&mut b, x, target).unwrap();
        let rows = b.sum(losses, &[1]).unwrap();
        let terms = [
            LossTerm::mean("mean", losses).weighted(0.7),
            LossTerm::sum("rows", rows).weighted(-0.5),
        ];
        b.loss(&terms).unwrap();
        check_graph(b);
    }
    for (smoothing, ignored) in [(0.0, None), (0.1, None), (0.1, Some(2))] {
        let weights = vec![0.5, 2.0, 1.0, 0.25, 1.5];
        let options = CrossEntropyOptions { weights, smoothing, ignored };
        let mut b = Builder::new();
        b.block("test");
        let logits = source(&mut b, "x", &[1, 5]);
        let targets = b.input_ids("targets", &[1]);
        b.cross_entropy_loss_with(logits, targets, &options).unwrap();
        check_graph(b);
    }
}

/// Uneven shares add up: a term is a mean over the samples, and not over their micro-batches.
#[test]
fn samples_are_counted_exactly() {
    let mut b = Builder::new();
    b.block("test");
    let x = source(&mut b, "x", &[2, 4]);
    let squares = b.unary(x, Unary::Square).unwrap();
    b.loss(&[LossTerm::mean("squares", squares)]).unwrap();
    let plan = Plan::new(differentiate(b.finish()).unwrap(), PlanOptions::new(ROWS));
    let mut device = Cpu::fast(plan, 0);
    crate::common::fill_parameters(&mut device, 0.7);
    crate::common::fill_inputs(&mut device, 0, ROWS, 11, 5);
    let sums = crate::common::run_step(&mut device, &crate::common::pass(0, ROWS));
    assert_eq!(sums.loss.count, ROWS as f64);
}
