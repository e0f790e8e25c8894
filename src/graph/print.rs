//! Graphs and plans as text for the user: tables, a drawing, and the memory that a plan takes.

use std::fmt::Write;

use super::passes::fuse::{Fusion, rules};
use super::{
    Bucket, Graph, MomentFormat, PassKind, Plan, Role, Slot, SlotKind, Tensor, TensorLocation,
    UpdateRates,
};
use potluck_core::format::{counted, listed, size_text};
use potluck_core::{DType, TensorId};

/// Formats a graph with one line per node: pass, block, op, and the shapes it maps.
pub fn graph_table(graph: &Graph) -> String {
    let mut text = format!("{} parameters, {} nodes\n", graph.parameter_count(), graph.nodes.len());
    let ops: Vec<String> = graph.nodes.iter().map(|node| node.op.to_string()).collect();
    let width = ops.iter().map(String::len).max().unwrap_or(0);
    for (index, node) in graph.nodes.iter().enumerate() {
        let block = &graph.blocks[node.block as usize];
        let arrow = if node.accumulate.any() { "+=>" } else { "->" };
        let op = &ops[index];
        let phase = node.phase;
        let inputs = operands(graph, &node.inputs);
        let outputs = operands(graph, &node.outputs);
        // Writing to a string cannot fail.
        let _ =
            writeln!(text, "{index:4} {phase} {block:<8} {op:<width$} {inputs} {arrow} {outputs}");
    }
    text
}

/// Formats the applied fusions by rule: their number, and the memory traffic that they save in a
/// micro-batch of `rows` rows.
pub fn fusion_table(done: &[Fusion], rows: usize) -> String {
    if done.is_empty() {
        return "nothing is fused\n".into();
    }
    let mut text = format!("fused, saving memory traffic per micro-batch of {rows} rows\n");
    for (name, why) in rules() {
        let applied: Vec<&Fusion> = done.iter().filter(|fusion| fusion.rule == name).collect();
        if applied.is_empty() {
            continue;
        }
        let times = counted(applied.len(), "time", "times");
        let saved = size_text(sum(applied.iter().map(|fusion| fusion.bytes_saved(rows))));
        let _ = writeln!(text, "  {name:<28}{times:>10}{saved:>14}  {why}");
    }
    let saved = size_text(sum(done.iter().map(|fusion| fusion.bytes_saved(rows))));
    let _ =
        writeln!(text, "  {:<28}{:>10}{saved:>14}", "all", counted(done.len(), "time", "times"));
    text
}

fn operands(graph: &Graph, ids: &[TensorId]) -> String {
    listed(ids.iter().map(|id| operand(graph, *id)))
}

/// Formats a tensor as an operand: parameters and inputs by name, activations by number, with the
/// shape.
fn operand(graph: &Graph, id: TensorId) -> String {
    let tensor = graph.tensor(id);
    match tensor.role {
        Role::Activation => format!("{id} {}", tensor.shape),
        _ => format!("{} {}", tensor.name, tensor.shape),
    }
}

/// Formats the graph in Graphviz's language: nodes as boxes, clustered by pass and block.
pub fn graph_dot(graph: &Graph) -> String {
    let mut text = String::from("digraph potluck {\n  rankdir=TB; node [shape=box];\n");
    let mut producer: Vec<Option<usize>> = vec![None; graph.tensors.len()];
    let mut open: Option<(PassKind, u32)> = None;
    for (index, node) in graph.nodes.iter().enumerate() {
        if open != Some((node.phase, node.block)) {
            let close = if open.is_some() { "  }\n" } else { "" };
            let label = format!("{} {}", node.phase, graph.blocks[node.block as usize]);
            let _ = writeln!(text, "{close}  subgraph \"cluster {index}\" {{ label=\"{label}\";");
            open = Some((node.phase, node.block));
        }
        let _ = writeln!(text, "    n{index} [label=\"{}\"];", node.op);
    }
    text.push_str(if open.is_some() { "  }\n" } else { "" });
    for (index, node) in graph.nodes.iter().enumerate() {
        for input in &node.inputs {
            let tensor = graph.tensor(*input);
            match producer[input.index()] {
                Some(from) => {
                    let _ = writeln!(text, "  n{from} -> n{index} [label=\"{}\"];", tensor.shape);
                }
                None => {
                    let style = "shape=ellipse, style=dashed";
                    let Tensor { name, shape, .. } = tensor;
                    let _ = writeln!(text, "  {input} [label=\"{name}\\n{shape}\", {style}];");
                    let _ = writeln!(text, "  {input} -> n{index};");
                }
            }
        }
        for output in &node.outputs {
            // Gradients and the loss are accumulated by several nodes: drawn as sinks.
            if graph.tensor(*output).role == Role::Activation {
                producer[output.index()] = Some(index);
            } else {
                let name = &graph.tensor(*output).name;
                let _ = writeln!(text, "  {output} [label=\"{name}\", shape=ellipse];");
                let _ = writeln!(text, "  n{index} -> {output};");
            }
        }
    }
    text.push_str("}\n");
    text
}

/// Device memory that a plan takes, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUsage {
    pub parameters: usize,
    pub gradients: usize,
    pub moments: usize,
    /// Exponential average of the parameters; 0 if none is kept.
    pub averages: usize,
    /// Activations kept from forward to backward, in all copies.
    pub stash: usize,
    pub scratch: usize,
    /// Tensors that stay on the device from step to step.
    pub states: usize,
    /// Memory for intermediate results of kernels within one call; 0 unless the caller sets it.
    pub workspace: usize,
    /// Host memory of a save: a copy of the parameters, the moments and the averages in f32, and
    /// another copy of the parameters if averages have displaced them. Not part of the peak.
    pub saved: usize,
}

impl MemoryUsage {
    /// Returns the memory of a plan whose optimizer keeps `moments` numbers per parameter.
    pub fn of(plan: &Plan, moments: usize) -> Self {
        Self::of_shard(plan, moments, updated_elements(plan))
    }

    /// Returns [`MemoryUsage::of`] for one of several ranks, which keeps moments and averages only
    /// of the `owned` parameters that it updates.
    pub fn of_shard(plan: &Plan, moments: usize, owned: usize) -> Self {
        let parameters = held_elements(plan) * DType::F32.bytes();
        let updated = updated_elements(plan) * DType::F32.bytes();
        let device_moments = plan.options.moments.bytes(owned).saturating_mul(moments);
        let saved_moments = MomentFormat::F32.bytes(owned).saturating_mul(moments);
        let averages = plan.options.average_bytes(owned);
        // After an evaluation with averages, the host has the parameters already.
        let displaced = if plan.options.averages { parameters } else { 0 };
        Self {
            parameters,
            gradients: if plan.graph.is_trained() { updated } else { 0 },
            moments: device_moments,
            averages,
            stash: slot_bytes(plan, SlotKind::Stash),
            scratch: slot_bytes(plan, SlotKind::Scratch),
            states: plan.state_bytes(),
            workspace: 0,
            saved: sum([parameters, displaced, saved_moments, averages]),
        }
    }

    /// Returns the peak, which is the sum, because everything is allocated before the first step.
    pub fn peak(&self) -> usize {
        let Self {
            parameters,
            gradients,
            moments,
            averages,
            stash,
            scratch,
            states,
            workspace,
            saved: _,
        } = *self;
        sum([parameters, gradients, moments, averages, stash, scratch, states, workspace])
    }
}

/// Buckets that a device with this plan holds, with their indices.
fn held_buckets(plan: &Plan) -> impl Iterator<Item = (usize, &Bucket)> {
    plan.buckets.iter().enumerate().filter(|(index, _)| plan.held[*index])
}

fn slots_of_kind(plan: &Plan, kind: SlotKind) -> impl Iterator<Item = &Slot> {
    plan.slots.iter().filter(move |slot| slot.kind == kind)
}

fn slot_bytes(plan: &Plan, kind: SlotKind) -> usize {
    sum(slots_of_kind(plan, kind).map(|slot| slot.bytes.saturating_mul(slot.copies)))
}

/// Elements of the held buckets, with the gaps.
fn held_elements(plan: &Plan) -> usize {
    held_buckets(plan).map(|(_, bucket)| bucket.length).sum()
}

/// Elements of the held buckets that have gradients.
fn updated_elements(plan: &Plan) -> usize {
    held_buckets(plan).map(|(_, bucket)| bucket.gradient_length()).sum()
}

/// Sum; on overflow, the largest number.
fn sum(bytes: impl IntoIterator<Item = usize>) -> usize {
    let mut sum = 0_usize;
    for bytes in bytes {
        sum = sum.saturating_add(bytes);
    }
    sum
}

/// Memory-relevant data of one rank in [`memory_tables`].
#[derive(Clone, Copy, Debug)]
pub struct RankMemoryUsage<'a> {
    /// The device's name.
    pub name: &'a str,
    pub plan: &'a Plan,
    /// Number of parameters that the rank updates.
    pub owned: usize,
    /// Bytes of the device that kernels use within one call.
    pub workspace: usize,
    /// Bytes of host memory in which the rank's transfers are staged, if known.
    pub staging: Option<usize>,
    /// Bytes of host memory of the buffers of the rank's messages, if known.
    pub pool: Option<usize>,
    /// Bytes of host memory of tensors in transit to other stages of a pipeline.
    pub edges: Option<usize>,
    /// Sentence on the stashes in flight in a pipeline.
    pub stashes: Option<&'a str>,
    /// Sentence that compares the peak with the memory that the device has.
    pub limit: &'a str,
}

/// Formats the memory of a plan as a table, with `workspace` bytes for kernels, with a sentence
/// about the memory that the device has, then its buckets.
pub fn memory_table(plan: &Plan, moments: usize, workspace: usize, limit: &str) -> String {
    let mut text = format!("memory for micro-batches of up to {} rows\n", plan.options.rows);
    let note = format!("{moments} per parameter{}{}", of_trained(plan), format_text(plan, moments));
    let memory = MemoryUsage { workspace, ..MemoryUsage::of(plan, moments) };
    text += &memory_rows(plan, &memory, &note, &[]);
    let _ = writeln!(text, "  {limit}");
    text + &bucket_rows(plan)
}

/// Clause on the number format of moments, if it differs from the parameters' format.
fn format_text(plan: &Plan, moments: usize) -> &'static str {
    match plan.options.moments {
        MomentFormat::Bf16 if moments > 0 => ", in bf16",
        _ => "",
    }
}

/// Formats the memory of ranks that share the moments, a table for each, and their buckets: once
/// after the tables if all ranks hold the same, else in each table.
pub fn memory_tables(ranks: &[RankMemoryUsage], moments: usize) -> String {
    let mut text = String::new();
    let alike = ranks.windows(2).all(|pair| pair[0].plan.held == pair[1].plan.held);
    for (rank, usage) in ranks.iter().enumerate() {
        let RankMemoryUsage { name, plan, owned, staging, pool, edges, stashes, limit, .. } = usage;
        let rows = plan.options.rows;
        let _ = writeln!(text, "rank {rank}: {name}, micro-batches of up to {rows} rows");
        let all: usize = held_buckets(plan).map(|(_, bucket)| bucket.gradient_length()).sum();
        let format = format_text(plan, moments);
        let note = format!("{moments} per parameter that it updates, {owned} of {all}{format}");
        let memory = MemoryUsage::of_shard(plan, moments, *owned);
        let memory = MemoryUsage { workspace: usage.workspace, ..memory };
        let mut host = Vec::new();
        if let Some(bytes) = staging {
            host.push(("staging", *bytes, "of the host, for what travels"));
        }
        if let Some(bytes) = pool {
            host.push(("pool", *bytes, "of the host, for messages of the rank"));
        }
        if let Some(bytes) = edges {
            host.push(("edges", *bytes, "of the host, for tensors on their way"));
        }
        text += &memory_rows(plan, &memory, &note, &host);
        for line in stashes.iter().chain([limit]) {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "  {line}");
        }
        if !alike {
            text += &bucket_rows(plan);
        }
    }
    if alike && let Some(first) = ranks.first() {
        text += &bucket_rows(first.plan);
    }
    text
}

/// Formats the memory of a device, then of the host: names, bytes and notes.
fn memory_rows(
    plan: &Plan,
    memory: &MemoryUsage,
    moments: &str,
    host: &[(&'static str, usize, &'static str)],
) -> String {
    let mut unshared = 0_usize;
    for (tensor, place) in plan.graph.tensors.iter().zip(&plan.places) {
        if matches!(place, TensorLocation::Slot(_)) {
            unshared = unshared.saturating_add(tensor.bytes(plan.options.rows));
        }
    }
    let stash = counted(slots_of_kind(plan, SlotKind::Stash).count(), "slot", "slots");
    let scratch = counted(slots_of_kind(plan, SlotKind::Scratch).count(), "slot", "slots");
    let copies = copies_text(plan);
    let mut rows = vec![
        ("parameters", memory.parameters, format!("{} values", held_values(plan))),
        ("gradients", memory.gradients, "accumulated over micro-batches".into()),
        ("moments", memory.moments, moments.into()),
        ("averages", memory.averages, "of the parameters, for evaluation".into()),
        ("stash", memory.stash, format!("{stash} kept between segments, {copies}")),
        ("scratch", memory.scratch, format!("{scratch} within a segment")),
        ("states", memory.states, "kept from step to step".into()),
        ("workspace", memory.workspace, "of kernels, within one call".into()),
        ("peak", memory.peak(), "all of it allocated before the first step".into()),
    ];
    rows.retain(|(name, bytes, _)| {
        !["averages", "scratch", "states", "workspace"].contains(name) || *bytes > 0
    });
    for (name, bytes, note) in host {
        rows.push((name, *bytes, note.to_string()));
    }
    let mut text = String::new();
    for (name, bytes, note) in rows {
        let _ = writeln!(text, "  {name:<11}{:>12}  {note}", size_text(bytes));
    }
    let unshared = size_text(unshared);
    let without = "without sharing of slots";
    let _ = writeln!(text, "  activations of one micro-batch would take {unshared} {without}");
    text + &words_line(plan)
}

/// Line on the tensors that are kept between segments in bf16; empty if none is.
fn words_line(plan: &Plan) -> String {
    let is_kept = |tensor: TensorId| match plan.places[tensor.index()] {
        TensorLocation::Slot(slot) => plan.slots[slot.index()].kind == SlotKind::Stash,
        _ => false,
    };
    let mut count = 0;
    let mut bytes = 0_usize;
    for node in plan.graph.nodes.iter().filter(|node| node.op.converts_format()) {
        let [source, result] = [node.inputs[0], node.outputs[0]];
        let rows = plan.options.rows;
        let [before, after] = [source, result].map(|id| plan.graph.tensor(id).bytes(rows));
        // Packed, not unpacked.
        if after < before && is_kept(result) {
            count += 1;
            bytes = bytes.saturating_add(after);
        }
    }
    if count == 0 {
        return String::new();
    }
    let tensors = counted(count, "tensor", "tensors");
    let [packed, exact] = [bytes, bytes.saturating_mul(2)].map(size_text);
    format!(
        "  {tensors} kept in bf16 between segments: {packed} of one micro-batch without sharing of \
         slots, {exact} in f32\n"
    )
}

/// Number of trained values that a device with this plan holds.
fn held_values(plan: &Plan) -> usize {
    let mut values = 0;
    for (_, bucket) in held_buckets(plan) {
        for (id, _) in &bucket.parameters {
            let tensor = plan.graph.parameters[id.index()].tensor;
            values += plan.graph.tensor(tensor).shape.per_row();
        }
    }
    values
}

/// Formats the numbers of copies of the slots kept between segments: `times 2`, `1 to 4 copies`.
fn copies_text(plan: &Plan) -> String {
    let copies: Vec<usize> = slots_of_kind(plan, SlotKind::Stash).map(|slot| slot.copies).collect();
    match (copies.iter().min(), copies.iter().max()) {
        (Some(least), Some(most)) if least < most => format!("{least} to {most} copies"),
        (_, Some(most)) => format!("times {most}"),
        (_, None) => format!("times {}", plan.options.in_flight),
    }
}

fn bucket_rows(plan: &Plan) -> String {
    let mut text = String::new();
    for (index, bucket) in held_buckets(plan) {
        let tensors = counted(bucket.parameters.len(), "tensor", "tensors");
        let size = size_text(bucket.length * DType::F32.bytes());
        let note = update_note(bucket);
        let _ = writeln!(text, "  bucket {index:<4}{size:>12}  {tensors}{note}");
    }
    text
}

/// Words that exclude frozen parameters, if there are any.
fn of_trained(plan: &Plan) -> &'static str {
    let all_are = plan.buckets.iter().all(Bucket::is_updated);
    if all_are { "" } else { " that is not frozen" }
}

/// Describes the update of a bucket, as far as it differs from the default.
fn update_note(bucket: &Bucket) -> String {
    let UpdateRates { lr_scale, weight_decay } = bucket.rates;
    let mut note = String::new();
    if !bucket.is_updated() {
        note += ", frozen";
    }
    if lr_scale != 1.0 {
        let _ = write!(note, ", learning rate times {lr_scale}");
    }
    if let Some(weight_decay) = weight_decay {
        let _ = write!(note, ", weight decay {weight_decay}");
    }
    note
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::store_activations::store_activations;
    use crate::{Builder, Init, PlanOptions, PlanPart, differentiate};
    use potluck_core::SegmentId;

    fn tiny() -> Graph {
        let mut b = Builder::new();
        b.block("only");
        let x = b.input("x", &[1, 64]);
        let w = b.parameter("w", &[64, 64], Init::Zeros);
        let y = b.linear(x, w, None).unwrap();
        let target = b.input("target", &[1, 64]);
        b.squared_error_loss(y, target).unwrap();
        differentiate(b.finish()).unwrap()
    }

    #[test]
    fn the_table_names_parameters_and_marks_accumulation() {
        let table = graph_table(&tiny());
        assert!(table.contains("matmul a b^T"), "{table}");
        assert!(table.contains("+=> gradient of w (64, 64)"), "{table}");
    }

    #[test]
    fn the_drawing_is_balanced_and_draws_every_node() {
        let graph = tiny();
        let dot = graph_dot(&graph);
        assert_eq!(dot.matches('{').count(), dot.matches('}').count());
        for index in 0..graph.nodes.len() {
            assert!(dot.contains(&format!("n{index} [label=")), "{dot}");
        }
    }

    #[test]
    fn more_than_can_be_counted_is_the_largest_number() {
        let mut plan = Plan::new(tiny(), PlanOptions::new(4));
        plan.slots.iter_mut().for_each(|slot| slot.bytes = usize::MAX / 3);
        assert_eq!(MemoryUsage::of(&plan, 2).peak(), usize::MAX);
    }

    #[test]
    fn memory_adds_up() {
        let plan = Plan::new(tiny(), PlanOptions::new(4));
        let memory = MemoryUsage::of(&plan, 2);
        assert_eq!(memory.parameters, 64 * 64 * 4);
        assert_eq!(memory.moments, 2 * memory.parameters);
        // x, target, y, dy and parts of the loss, in slots of 4 * 64 floats and less.
        assert!(memory.stash >= 2 * 4 * 64 * 4, "{memory:?}");
        assert_eq!(memory.peak(), 4 * memory.parameters + memory.stash + memory.scratch);
        let text = memory_table(&plan, 2, 0, "fits: all of it");
        assert!(text.contains("16.00 KiB") && text.contains("\n  fits: all of it\n"), "{text}");
        assert!(!text.contains("workspace"), "{text}");

        let peak = size_text(MemoryUsage::of(&plan, 2).peak() + (3 << 20));
        let text = memory_table(&plan, 2, 3 << 20, "fits");
        assert!(
            text.contains("\n  workspace      3.00 MiB  of kernels, within one call\n"),
            "{text}"
        );
        assert!(text.contains(&format!("{peak}  all of it allocated")), "{text}");
    }

    #[test]
    fn ranks_share_the_moments_and_nothing_else() {
        let plan = Plan::new(tiny(), PlanOptions::new(4));
        let whole = MemoryUsage::of(&plan, 2);
        assert_eq!(MemoryUsage::of_shard(&plan, 2, 64 * 64), whole);
        let part = MemoryUsage::of_shard(&plan, 2, 64);
        let moments = 2 * 64 * 4;
        assert_eq!(part, MemoryUsage { moments, saved: whole.parameters + moments, ..whole });
        assert_eq!(whole.peak() - part.peak(), 2 * (64 * 64 - 64) * 4);
        assert_eq!(MemoryUsage::of_shard(&plan, 2, usize::MAX).peak(), usize::MAX);

        let rank = |name, owned, staging: Option<usize>| {
            let (pool, limit) = (staging.map(|bytes| bytes / 2), "fits");
            let (edges, stashes) = (staging.map(|bytes| bytes / 4), None);
            let plan = &plan;
            let workspace = 0;
            RankMemoryUsage { name, plan, owned, workspace, staging, pool, edges, stashes, limit }
        };
        let stashes = "stashes in flight: 3 of 4 micro-batches (1f1b)";
        let cpu = rank("cpu", 64, Some(3 << 20));
        let cpu = RankMemoryUsage { stashes: Some(stashes), ..cpu };
        let ranks = [rank("llvmpipe", 4032, None), cpu];
        let text = memory_tables(&ranks, 2);
        for line in [
            "rank 0: llvmpipe, micro-batches of up to 4 rows",
            "rank 1: cpu, micro-batches of up to 4 rows",
            "  moments       31.50 KiB  2 per parameter that it updates, 4032 of 4096",
            "  moments        0.50 KiB  2 per parameter that it updates, 64 of 4096",
            "  staging        3.00 MiB  of the host, for what travels",
            "  pool           1.50 MiB  of the host, for messages of the rank",
            "  edges          0.75 MiB  of the host, for tensors on their way",
            "  stashes in flight: 3 of 4 micro-batches (1f1b)\n  fits",
        ] {
            assert_eq!(text.matches(&format!("{line}\n")).count(), 1, "{line} in:\n{text}");
        }
        assert_eq!(text.matches("  bucket 0").count(), 1, "{text}");
    }

    /// Two layers in blocks of their own.
    fn two_blocks() -> Graph {
        let mut b = Builder::new();
        b.block("one");
        let x = b.input("x", &[1, 64]);
        let w = b.parameter("w", &[64, 64], Init::Zeros);
        let y = b.linear(x, w, None).unwrap();
        b.block("two");
        let v = b.parameter("v", &[32, 64], Init::Zeros);
        let y = b.linear(y, v, None).unwrap();
        let target = b.input("target", &[1, 32]);
        b.squared_error_loss(y, target).unwrap();
        differentiate(b.finish()).unwrap()
    }

    #[test]
    fn the_memory_of_a_part_is_that_of_its_buckets_and_copies() {
        let options = PlanOptions::new(4);
        let whole = Plan::new(two_blocks(), options);
        let of_block = |block: u32| -> Vec<SegmentId> {
            let ids = (0..whole.segments.len()).filter(|id| whole.segments[*id].block == block);
            ids.map(|id| SegmentId(id as u32)).collect()
        };
        let plan = |block: usize, runs: &[(SegmentId, usize)]| {
            let blocks = [block == 0, block == 1];
            Plan::part(two_blocks(), options, &PlanPart { blocks: &blocks, runs })
        };
        // Block 0: all forward passes, then all backward passes.
        let (first, last) = (of_block(0), of_block(1));
        let mut runs: Vec<_> = (0..3).map(|m| (first[0], m)).collect();
        runs.extend((0..3).flat_map(|m| first[1..].iter().map(move |id| (*id, m))));
        let one = plan(0, &runs);
        let two = plan(1, &last.iter().map(|id| (*id, 0)).collect::<Vec<_>>());
        let memory = MemoryUsage::of(&one, 1);
        let row = 4 * 64 * 4;
        assert_eq!((memory.parameters, memory.moments), (64 * 64 * 4, 64 * 64 * 4));
        // x in three copies; y, which is sent, and its gradient, which arrives, in one each: a slot
        // for both would be in use from the forward to the backward pass.
        assert_eq!((memory.stash, memory.scratch), (3 * row + 2 * row, 0));
        assert_eq!(MemoryUsage::of(&two, 0).parameters, 32 * 64 * 4);

        let rank = |name, plan| RankMemoryUsage {
            name,
            plan,
            owned: 64,
            workspace: 0,
            staging: None,
            pool: None,
            edges: None,
            stashes: None,
            limit: "fits",
        };
        let text = memory_tables(&[rank("a", &one), rank("b", &two)], 1);
        for line in [
            "  parameters    16.00 KiB  4096 values",
            "  stash          5.00 KiB  3 slots kept between segments, 1 to 3 copies",
            "  moments        0.25 KiB  1 per parameter that it updates, 64 of 4096",
            "  bucket 1      16.00 KiB  1 tensor",
            "  parameters     8.00 KiB  2048 values",
            "  moments        0.25 KiB  1 per parameter that it updates, 64 of 2048",
            "  bucket 0       8.00 KiB  1 tensor",
        ] {
            assert_eq!(text.matches(&format!("{line}\n")).count(), 1, "{line} in:\n{text}");
        }
        assert!(text.find("bucket 1").unwrap() < text.find("rank 1").unwrap(), "{text}");
        assert!(memory_table(&whole, 1, 0, "fits").contains("kept between segments, times 1\n"));
        assert_eq!(two.tensor_bytes_max(), 32 * 64 * 4);
    }
    #[test]
    fn tensors_kept_in_bf16_are_told_with_their_bytes() {
        let table = |graph| memory_table(&Plan::new(graph, PlanOptions::new(4)), 1, 0, "fits");
        assert!(!table(two_blocks()).contains("bf16"));
        let text = table(store_activations(two_blocks(), None));
        // The product of the first layer and its gradient, of 4 rows of 64 values, and the 32
        // values of each row in front of the loss.
        let line = "  3 tensors kept in bf16 between segments: 1.25 KiB of one micro-batch without \
                    sharing of slots, 2.50 KiB in f32\n";
        assert!(text.contains(line), "{text}");
    }
}
