//! Roofline of a training step on graphics cards that are not there: from the bytes and FLOPs of
//! each kernel (Williams et al. 2009), the share of multiply-adds that AMD's compiler leaves in its
//! hot loop, and how its workgroups fill the card.

use std::collections::HashMap;
use std::fmt::Write as _;

use potluck_bench::step::gpt2;
use potluck_core::rng::Key;
use potluck_graph::model::gpt;
use potluck_graph::{Graph, Op, Plan, PlanOptions, Update, UpdateRange, differentiate, fuse};
use potluck_kernels::autotune::plan_calls::call_key;
use potluck_kernels::exec::PassContext;
use potluck_kernels::ops::norm;
use potluck_kernels::source::text;
use potluck_kernels::{
    Caps, Cost, DeviceClass, Dispatch, OpCall, RandomContext, Variant, twin, update_twin,
};

/// A graphics card by its makers' figures.
struct Card {
    name: &'static str,
    /// FLOP/s of f32 multiply-adds, one per lane and cycle.
    flops: f64,
    /// Bytes per second of memory.
    bandwidth: f64,
    /// Cores that run a workgroup each at a time at least.
    cores: f64,
}

/// The RX 7900 XTX without dual issue, which the compiler makes of no loop here.
const CARDS: [Card; 4] = [
    Card { name: "RX 7900 XTX", flops: 30.7e12, bandwidth: 960e9, cores: 96.0 },
    Card { name: "RTX 4090", flops: 82.6e12, bandwidth: 1008e9, cores: 128.0 },
    Card { name: "M2", flops: 3.6e12, bandwidth: 100e9, cores: 10.0 },
    Card { name: "H200", flops: 66.9e12, bandwidth: 4800e9, cores: 132.0 },
];

/// Capabilities of all these cards.
pub const CAPS: Caps = Caps {
    class: DeviceClass::Hardware,
    workgroup_bytes: 32 * 1024,
    subgroups: true,
    ..Caps::EVERY
};

/// Share of the memory's bandwidth that a kernel of long rows of accesses reaches.
const BANDWIDTH_SHARE: f64 = 0.85;

/// Seconds between the end of a dispatch and the beginning of one that reads what it wrote.
const BARRIER_S: f64 = 3e-6;

/// Bandwidth that one core can use, in parts of its share of the card's.
const CORE_BANDWIDTH: f64 = 2.0;

/// Dispatches after which a segment's work is submitted.
const DISPATCHES_PER_SUBMISSION: usize = 32;

/// End of the title of the gradient of attention.
const OF_ATTENTION_GRADIENT: &str = ", gradient";

/// Samples of a batch.
pub const SAMPLES: usize = 8;

/// Kernels of a step that run the same variant of the same op.
struct Row {
    title: String,
    dispatches: usize,
    cost: Cost,
    /// FLOPs that are computed for one of the formula.
    computed: f64,
    /// Cost of each call, and the workgroups of its largest dispatch.
    calls: Vec<(Cost, f64)>,
    /// Shaders: text and entry point. The best hot loop of them stands for the row.
    shaders: Vec<(String, &'static str)>,
}

impl Row {
    /// Returns the expected seconds on a card.
    fn seconds(&self, card: &Card, share: f64) -> f64 {
        let of_call = |(cost, groups): &(Cost, f64)| {
            let filled = groups / ((groups / card.cores).ceil() * card.cores);
            let computing = cost.flops * self.computed / (card.flops * share * filled);
            let moving = (CORE_BANDWIDTH * groups / card.cores).min(1.0) * BANDWIDTH_SHARE;
            computing.max(cost.bytes / (card.bandwidth * moving))
        };
        self.calls.iter().map(of_call).sum::<f64>() + self.dispatches as f64 * BARRIER_S
    }
}

/// Returns the plan of a training step of GPT-2 124M.
pub fn plan() -> Plan {
    plan_of(gpt(&gpt2()).unwrap(), SAMPLES)
}

/// Returns the plan of a training step of a model.
pub fn plan_of(model: Graph, samples: usize) -> Plan {
    Plan::new(fuse(differentiate(model).unwrap()), PlanOptions::new(samples))
}

/// Returns the variant of a call that is chosen without measuring.
pub fn chosen(call: &OpCall, caps: &Caps) -> Variant {
    twin(call.op).unwrap().static_choice(call, caps)
}

/// Returns the title of a variant of a call: its name, with that of the op unless it says so.
pub fn title(op: &Op, variant: &Variant) -> String {
    let twin = twin(op).unwrap();
    let by_name = variant.name.starts_with(twin.name);
    let by_op = if by_name { String::new() } else { format!("{} by ", twin.name) };
    let of_gradient = matches!(op, Op::AttentionGrad(_));
    let kind = if of_gradient { OF_ATTENTION_GRADIENT } else { "" };
    format!("{by_op}{}{kind}", variant.name)
}

/// Returns the shaders of dispatches, each once: text and entry point.
pub fn shaders(dispatches: &[Dispatch]) -> Vec<(String, &'static str)> {
    let mut shaders = Vec::new();
    for dispatch in dispatches {
        let shader = (text(&dispatch.shader), dispatch.shader.entry);
        if !shaders.contains(&shader) {
            shaders.push(shader);
        }
    }
    shaders
}

/// Returns the kernels of a step, those of most FLOPs and bytes first.
fn rows(plan: &Plan, caps: &Caps) -> Vec<Row> {
    let random = RandomContext { step_key: Key::new(1), training: true };
    let pass = PassContext { micro_batch: 0, rows: plan.options.rows, loss_scale: 1.0, random };
    let mut rows: Vec<Row> = Vec::new();
    let mut add = |title: String, cost: Cost, dispatches: &[Dispatch]| {
        let groups = dispatches.iter().map(|one| one.groups.map(f64::from).iter().product());
        let groups = groups.fold(0.0, f64::max);
        let index = rows.iter().position(|row| row.title == title).unwrap_or_else(|| {
            let (shaders, cost, calls) = (Vec::new(), Cost::default(), Vec::new());
            // The gradients of queries and of keys each compute the weights and their slopes.
            let computed = if title.ends_with(OF_ATTENTION_GRADIENT) { 7.0 / 5.0 } else { 1.0 };
            rows.push(Row { title, dispatches: 0, cost, computed, calls, shaders });
            rows.len() - 1
        });
        let row = &mut rows[index];
        row.dispatches += dispatches.len();
        row.cost.flops += cost.flops;
        row.cost.bytes += cost.bytes;
        row.calls.push((cost, groups));
        for shader in shaders(dispatches) {
            if !row.shaders.contains(&shader) {
                row.shaders.push(shader);
            }
        }
    };
    let mut known: HashMap<String, Variant> = HashMap::new();
    for node in &plan.graph.nodes {
        let Some(twin) = twin(&node.op) else { continue };
        let call = pass.call(&plan.graph, node);
        let chosen = known.entry(call_key(&call)).or_insert_with(|| chosen(&call, caps));
        // What is handed on is written and read.
        let mut cost = (twin.cost)(&call);
        cost.bytes += 2.0 * chosen.workspace_bytes() as f64;
        add(title(&node.op, chosen), cost, &chosen.dispatches);
    }
    let (moments, betas) = (1.0, (0.9, 0.95));
    let update = Update::AdamW {
        lr: 6e-4,
        beta1: betas.0,
        beta2: betas.1,
        eps: 1e-8,
        weight_decay: 0.1,
        correction1: moments,
        correction2: moments,
    };
    for (index, bucket) in plan.buckets.iter().enumerate() {
        let length = bucket.length;
        let range = UpdateRange {
            start: 0,
            length,
            decay_end: length,
            gradient_scale: 1.0,
            rounding: None,
        };
        let places = norm::NormSlots::new([length]);
        let [sums, total] = norm::dispatch(length, caps, places, 0);
        let bytes = 4.0 * length as f64;
        add("norm".into(), Cost { flops: 2.0 * length as f64, bytes }, &[sums]);
        if index == 0 {
            add("norm of all buckets".into(), Cost::default(), &[total]);
        }
        let twin = update_twin(&update);
        let cost = Cost { flops: (twin.flops)(&update) * length as f64, bytes: 7.0 * bytes };
        add("adamw".into(), cost, &[(twin.dispatch)(&update, &range)]);
    }
    rows.sort_by(|a, b| b.cost.flops.total_cmp(&a.cost.flops));
    rows
}

/// Shaders of a step for the compiler, each once, as they are chosen for these capabilities. The
/// last word of a name is the entry point that runs.
pub fn modules(plan: &Plan, caps: &Caps) -> Vec<(String, String)> {
    let mut modules: Vec<(String, String)> = Vec::new();
    for row in rows(plan, caps) {
        for (text, entry) in row.shaders {
            modules.push((format!("{} {entry}", row.title), text));
        }
    }
    modules
}

/// Returns the table of a step in Markdown. `share_of` returns the share of multiply-adds in the
/// hot loop of an entry point of a module, 0 if it has none.
pub fn table(share_of: &dyn Fn(&str, &str) -> f64) -> String {
    let plan = plan();
    let rows = rows(&plan, &CAPS);
    let mut text = format!(
        "## Roofline of a step of GPT-2 124M\n\n\
         Batch {SAMPLES}, context 1024, f32, kernels as chosen without measuring. \
         Milliseconds: the\nlarger one of FLOPs at the card's peak times the share of \
         multiply-adds in the hot loop (RDNA 3),\non the cores that the workgroups fill, and of \
         bytes at {} % of the bandwidth; {} us per\ndispatch between them. Latencies, caches and \
         conflicts of banks are not counted: no kernel can be\nfaster, and most are slower.\n\n\
         | kernel | dispatches | GFLOP | MB | share |",
        100.0 * BANDWIDTH_SHARE,
        1e6 * BARRIER_S
    );
    for card in &CARDS {
        text += &format!(" {} |", card.name);
    }
    text += "\n|---|---|---|---|---|---|---|---|---|\n";
    let mut sums = [0.0; CARDS.len()];
    let (mut dispatches, mut total) = (0, Cost::default());
    for row in &rows {
        let shares = row.shaders.iter().map(|(_, entry)| share_of(&row.title, entry));
        let share = shares.fold(0.0, f64::max);
        let seconds: Vec<f64> = CARDS
            .iter()
            .map(|card| row.seconds(card, if share > 0.0 { share } else { 0.1 }))
            .collect();
        sums.iter_mut().zip(&seconds).for_each(|(sum, one)| *sum += one);
        dispatches += row.dispatches;
        total.flops += row.cost.flops;
        total.bytes += row.cost.bytes;
        let shown = if share > 0.0 { format!("{:.0} %", 100.0 * share) } else { String::new() };
        let _ = line(&mut text, &row.title, (row.dispatches, row.cost), &shown, &seconds);
    }
    let _ = line(&mut text, "all", (dispatches, total), "", &sums);
    let tokens = (SAMPLES * 1024) as f64;
    let rates = CARDS.iter().zip(sums).map(|(card, s)| format!("{} {:.0}", card.name, tokens / s));
    let _ = writeln!(text, "\nTokens/s: {}.", rates.collect::<Vec<_>>().join(", "));
    let of_peak = CARDS.iter().zip(sums);
    let of_peak = of_peak
        .map(|(card, s)| format!("{} {:.0} %", card.name, 100.0 * total.flops / (s * card.flops)));
    let _ = writeln!(text, "Share of the peak: {}.", of_peak.collect::<Vec<_>>().join(", "));
    let _ = writeln!(text, "Submissions per step, if none takes too long: {}.", submissions(&plan));
    text
}

/// Returns the submissions of a step by the number of its dispatches alone.
fn submissions(plan: &Plan) -> usize {
    let random = RandomContext { step_key: Key::new(1), training: true };
    let pass = PassContext { micro_batch: 0, rows: SAMPLES, loss_scale: 1.0, random };
    let (mut submissions, mut waiting) = (0, 0);
    for segment in &plan.segments {
        for node in &plan.graph.nodes[segment.nodes.clone()] {
            let call = pass.call(&plan.graph, node);
            waiting += twin(&node.op).map_or(0, |twin| (twin.dispatch)(&call, &CAPS).len());
        }
        if waiting >= DISPATCHES_PER_SUBMISSION {
            (submissions, waiting) = (submissions + 1, 0);
        }
    }
    // The norms with the rest, and the updates.
    submissions + 2
}

fn line(
    text: &mut String,
    title: &str,
    (dispatches, cost): (usize, Cost),
    share: &str,
    seconds: &[f64],
) -> std::fmt::Result {
    let (gflop, mb) = (cost.flops / 1e9, cost.bytes / 1e6);
    write!(text, "| {title} | {dispatches} | {gflop:.0} | {mb:.0} | {share} |")?;
    seconds.iter().try_for_each(|one| write!(text, " {:.2} |", 1e3 * one))?;
    writeln!(text)
}

/// Returns the dispatches of a step with the logits of `rows` rows at a time, or of as many as the
/// model takes.
fn dispatches(rows_at_a_time: Option<usize>) -> usize {
    let mut graph = fuse(differentiate(gpt(&gpt2()).unwrap()).unwrap());
    for node in &mut graph.nodes {
        if let Op::LinearCrossEntropy { rows, .. }
        | Op::LinearCrossEntropyGrad { rows, .. }
        | Op::LinearCrossEntropyPass { rows, .. } = &mut node.op
        {
            *rows = rows_at_a_time.unwrap_or(*rows);
        }
    }
    let plan = Plan::new(graph, PlanOptions::new(SAMPLES));
    rows(&plan, &CAPS).iter().map(|row| row.dispatches).sum()
}

/// Dispatches of a step of GPT-2 124M with all logits at once, and in chunks: 121 fewer than with
/// kernels of their own for the gradients of biases and of the parameters of norms.
#[test]
fn a_step_of_gpt2_has_few_dispatches() {
    assert_eq!([Some(usize::MAX), None].map(dispatches), [361, 418]);
}
