//! Attention over queries, keys and values of their own: the composed form has the values of the
//! formula in f64 and those of the kernel, and the gradients of finite differences.

use potluck_core::{HostTensorView, TensorId};
use potluck_graph::{Builder, DotAttentionOptions, LossTerm, Plan, PlanOptions};
use potluck_kernels::exec::{Cpu, Executor};

use crate::gradients::{check_graph, source};

const HEADS: usize = 2;
const WIDTH: usize = 3;

/// Sizes of a case; a mask is by query and key.
#[derive(Clone, Copy)]
struct Case {
    queries: usize,
    keys: usize,
    kv_heads: usize,
    causal: bool,
    scale: Option<f32>,
    has_mask: bool,
    has_lengths: bool,
}

const PLAIN: Case = Case {
    queries: 4,
    keys: 4,
    kv_heads: HEADS,
    causal: false,
    scale: None,
    has_mask: false,
    has_lengths: false,
};

const LENGTHS: [f32; 2] = [3.0, 2.0];

impl Case {
    fn mask(&self) -> Vec<f32> {
        (0..self.queries * self.keys).map(|i| (i as f32 * 0.9).sin()).collect()
    }

    /// Adds the attention of `q`, `k` and `v`.
    fn add(&self, b: &mut Builder, inputs: [TensorId; 3]) -> TensorId {
        let mask = if self.has_mask {
            Some(b.constant("mask", &[self.queries, self.keys], self.mask()).unwrap())
        } else {
            None
        };
        let key_lengths = if self.has_lengths { Some(b.input("lengths", &[1])) } else { None };
        let Self { kv_heads, causal, scale, .. } = *self;
        let options = DotAttentionOptions {
            kv_heads,
            causal,
            scale,
            mask,
            key_lengths,
            ..DotAttentionOptions::new(HEADS)
        };
        b.scaled_dot_product_attention(inputs, &options).unwrap()
    }

    fn dims(&self) -> [[usize; 3]; 3] {
        let keys = [1, self.keys, self.kv_heads * WIDTH];
        [[1, self.queries, HEADS * WIDTH], keys, keys]
    }

    /// Returns the values of `q`, `k` and `v` of two samples.
    fn values(&self) -> [Vec<f32>; 3] {
        let mut rate = 0.3;
        self.dims().map(|dims| {
            rate += 0.31;
            let count = 2 * dims.iter().product::<usize>();
            (0..count).map(|i| (i as f32 * rate).sin() * 1.5).collect()
        })
    }

    fn computed(&self) -> Vec<f32> {
        let mut b = Builder::new();
        let mut dims = self.dims().into_iter();
        let inputs = ["q", "k", "v"].map(|name| b.input(name, &dims.next().unwrap()));
        let y = self.add(&mut b, inputs);
        b.output("y", y);
        let plan = Plan::new(b.finish(), PlanOptions::new(2));
        let mut device = Cpu::fast(plan, 0);
        device.initialize(0).unwrap();
        for (input, values) in inputs.into_iter().zip(self.values()) {
            device.set_input(input, 0, HostTensorView::Float(&values)).unwrap();
        }
        if let Some(lengths) = device.plan().graph.input("lengths") {
            device.set_input(lengths, 0, HostTensorView::Float(&LENGTHS)).unwrap();
        }
        let pass = crate::common::evaluation(0, 2);
        crate::common::run_phase(&mut device, true, &pass);
        device.read(y, &pass).unwrap()
    }

    /// `softmax(q k^T scale + mask) v` in f64.
    fn expected(&self) -> Vec<f64> {
        let [q, k, v] = self.values();
        let Self { queries, keys, kv_heads, .. } = *self;
        let scale = f64::from(self.scale.unwrap_or((WIDTH as f32).sqrt().recip()));
        let mask = self.mask();
        let mut y = vec![0.0; 2 * queries * HEADS * WIDTH];
        for sample in 0..2 {
            for head in 0..HEADS {
                let kv_head = head / (HEADS / kv_heads);
                for query in 0..queries {
                    let mut weights = Vec::new();
                    for key in 0..keys {
                        let row = ((sample * queries + query) * HEADS + head) * WIDTH;
                        let other = ((sample * keys + key) * kv_heads + kv_head) * WIDTH;
                        let product = |c| f64::from(q[row + c]) * f64::from(k[other + c]);
                        let mut score = (0..WIDTH).map(product).sum::<f64>() * scale;
                        if self.has_mask {
                            score += f64::from(mask[query * keys + key]);
                        }
                        let is_later = self.causal && key > query;
                        let is_padding = self.has_lengths && key as f32 >= LENGTHS[sample];
                        weights.push(if is_later || is_padding { 0.0 } else { score.exp() });
                    }
                    let total: f64 = weights.iter().sum();
                    for c in 0..WIDTH {
                        let value = |key: usize| {
                            f64::from(v[((sample * keys + key) * kv_heads + kv_head) * WIDTH + c])
                        };
                        let sum: f64 = (0..keys).map(|key| weights[key] * value(key)).sum();
                        y[((sample * queries + query) * HEADS + head) * WIDTH + c] = sum / total;
                    }
                }
            }
        }
        y
    }
}

fn cases() -> Vec<Case> {
    let cross = Case { queries: 3, keys: 5, ..PLAIN };
    vec![
        PLAIN,
        Case { causal: true, scale: Some(0.4), kv_heads: 1, ..PLAIN },
        Case { has_mask: true, ..PLAIN },
        Case { has_mask: true, causal: true, kv_heads: 1, ..PLAIN },
        cross,
        Case { causal: true, scale: Some(1.5), ..cross },
        Case { has_lengths: true, kv_heads: 1, ..cross },
        Case { has_lengths: true, has_mask: true, causal: true, ..PLAIN },
    ]
}

#[test]
fn attention_has_values_of_formula() {
    for (number, case) in cases().into_iter().enumerate() {
        let expected = case.expected();
        for (got, expected) in case.computed().into_iter().zip(&expected) {
            assert!((f64::from(got) - expected).abs() < 2e-6, "case {number}: {got}, {expected}");
        }
    }
}

#[test]
fn attention_has_gradients_of_values() {
    for case in cases() {
        let mut b = Builder::new();
        b.block("test");
        let mut dims = case.dims().into_iter();
        let inputs = ["q", "k", "v"].map(|name| source(&mut b, name, &dims.next().unwrap()));
        let y = case.add(&mut b, inputs);
        let squares = b.mul(y, y).unwrap();
        b.loss(&[LossTerm::sum("squares", squares)]).unwrap();
        check_graph(b);
    }
}

/// One tensor in several roles, as self-attention without projections has it.
#[test]
fn attention_takes_one_tensor_as_queries_keys_and_values() {
    for roles in [[0, 0, 0], [0, 1, 1], [0, 0, 1], [0, 1, 0]] {
        for scale in [None, Some(0.7)] {
            let mut b = Builder::new();
            b.block("test");
            let tensors = ["x", "y"].map(|name| source(&mut b, name, &[1, 4, HEADS * WIDTH]));
            let options = DotAttentionOptions { scale, ..DotAttentionOptions::new(HEADS) };
            let inputs = roles.map(|role| tensors[role]);
            let y = b.scaled_dot_product_attention(inputs, &options).unwrap();
            let squares = b.mul(y, y).unwrap();
            b.loss(&[LossTerm::sum("squares", squares)]).unwrap();
            check_graph(b);
        }
    }
}
