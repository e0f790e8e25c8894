//! Products of the head of GPT-2 with its vocabulary, whose rows of logits are no whole vectors,
//! and with a padded one: what it would save to pad the logits.
//!
//! The compiler's estimate of cycles (inverse throughput) is that of the busiest unit, which is the
//! vector unit here: memory is not in it, but for the addresses. A loop counts 8 times, and each
//! way of a uniform branch half, so the stores of a tile, behind 48 and more stages, and the
//! guarded loads of the last stage count for more than they take.

use std::fmt::Write as _;

use potluck_bench::step::gpt2;
use potluck_core::rng::Key;
use potluck_graph::Op;
use potluck_kernels::source::text;
use potluck_kernels::{OwnedCall, RandomContext, twin};

use super::Compiled;
use super::roofline::{CAPS, SAMPLES};

const TILES: [&str; 2] = ["matmul_shared_128x128", "matmul_shared_64x64"];

/// Terms that the tiles stage at a time.
const STAGE: usize = 16;

/// A product of the head with one tile, as it is and with a padded vocabulary.
pub struct Pair<'a> {
    pub own: &'a Compiled,
    pub padded: &'a Compiled,
}

impl Pair<'_> {
    /// Returns the cycles of the product in those of the padded one, by the compiler's estimate.
    pub fn cycles(&self) -> f64 {
        let [own, padded] = [self.own, self.padded].map(|one| one.figure("inverse throughput"));
        own as f64 / padded as f64
    }

    /// Returns the instructions of the product's hot loop in those of the padded one.
    pub fn hot_loop(&self) -> f64 {
        let [own, padded] = [self.own, self.padded].map(|one| one.hot_loop.instructions);
        own as f64 / padded as f64
    }
}

/// Returns the shaders of the products: each with every tile, and each of these with both
/// vocabularies, in this order.
pub fn modules() -> Vec<(String, String)> {
    let gpt = gpt2();
    let (n, c, v) = (SAMPLES * gpt.context, gpt.width, gpt.vocabulary);
    let mut modules = Vec::new();
    for product in ["logits", "dx", "dtable"] {
        for tile in TILES {
            for v in [v, v.next_multiple_of(STAGE)] {
                let (transpose_a, transpose_b, inputs) = match product {
                    "logits" => (false, true, [[n, c], [v, c]]),
                    "dx" => (false, false, [[n, v], [v, c]]),
                    _ => (true, false, [[n, v], [n, c]]),
                };
                let op = Op::MatMul { transpose_a, transpose_b };
                let name = format!("{product} of {v} by {tile}");
                modules.push((name, shader(op, inputs, tile)));
            }
        }
    }
    modules
}

fn shader(op: Op, inputs: [[usize; 2]; 2], tile: &str) -> String {
    let random = RandomContext { step_key: Key::new(1), training: true };
    let owned = OwnedCall::new(op, inputs.map(|dims| dims.to_vec()).to_vec(), random).unwrap();
    let call = owned.call();
    let mut variants = (twin(call.op).unwrap().variants)(&call, &CAPS).into_iter();
    text(&variants.find(|one| one.name == tile).unwrap().dispatches[0].shader)
}

/// Returns the products that were compiled from [`modules`].
pub fn pairs(compiled: &[Compiled]) -> impl Iterator<Item = Pair<'_>> {
    compiled.chunks_exact(2).map(|two| Pair { own: &two[0], padded: &two[1] })
}

/// Returns a table of the products in Markdown.
pub fn table(title: &str, compiled: &[Compiled]) -> String {
    let mut text = format!(
        "## Head of GPT-2 with a padded vocabulary, {title}\n\n\
         Cycles: the compiler's inverse throughput, in that of the product with the padded \
         vocabulary. Loops\ncount 8 times, and each way of a branch half: stores, and the last \
         stage of a sum, for more than\nthey take.\n\n\
         | product | registers | waves | code | hot loop | cycles |\n|---|---|---|---|---|---|\n"
    );
    let mut add = |one: &Compiled, cycles: String| {
        let [registers, waves, code] =
            ["vgprs", "subgroups per simd", "instructions"].map(|name| one.figure(name));
        let (name, hot) = (&one.name, one.hot_loop.instructions);
        let _ = writeln!(text, "| {name} | {registers} | {waves} | {code} | {hot} | {cycles} |");
    };
    for pair in pairs(compiled) {
        add(pair.own, format!("{:.3}", pair.cycles()));
        add(pair.padded, String::new());
    }
    text
}
