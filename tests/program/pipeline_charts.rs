//! Pipelines as a user sees them: `--explain`, progress and records, traces and their charts.

use std::fs;

use potluck::gantt::{Chart, ChartPass, chart_of_trace};

use crate::process::Desk;

/// Two stages of a model of four blocks, and four micro-batches. Where blocks are measured, so is
/// the cut, unless [`EVEN`] gives it.
const LINE: &str = "train tiny.toml --data text.txt --set model.layers=2 --devices cpu*2 \
                    --pipeline 2 --micro-batch 1 --set parallel.balance=fixed --steps 4";

/// Each stage gets two blocks.
const EVEN: &str = "--set parallel.blocks_per_stage=2,2";

fn explain(desk: &Desk, what: &str) -> String {
    let ran = desk.run(&format!("{LINE} --explain {what}")).ok();
    assert_eq!(ran.err, "");
    ran.out
}

/// Trains and returns the trace.
fn traced(desk: &Desk, more: &str) -> String {
    desk.run(&format!("{LINE} {EVEN} --out run --trace trace.json {more}")).ok();
    fs::read_to_string(desk.path("trace.json")).unwrap()
}

fn count(chart: &Chart, row: usize, pass: ChartPass, micro_batch: usize) -> usize {
    let is_it = |span: &&potluck::gantt::ChartSpan| {
        (span.row, span.pass, span.micro_batch) == (row, pass, Some(micro_batch))
    };
    chart.spans.iter().filter(is_it).count()
}

#[test]
fn trace_zero_bubble_has_every_pass() {
    let desk = Desk::new();
    let trace = traced(&desk, "--schedule zero-bubble");
    let chart = chart_of_trace(&trace).unwrap();
    assert_eq!(chart.rows.len(), 2, "{:?}", chart.rows);
    for (rank, row) in chart.rows.iter().enumerate() {
        let blocks = ["blocks 0 to 1", "blocks 2 to 3"][rank];
        assert!(row.starts_with(&format!("rank {rank}: cpu")), "{row}");
        assert!(row.ends_with(&format!(", stage {rank}, {blocks}")), "{row}");
        for micro_batch in 0..4 {
            for pass in [ChartPass::Forward, ChartPass::BackwardInput, ChartPass::BackwardWeight] {
                assert_ne!(count(&chart, rank, pass, micro_batch), 0, "{rank} {pass:?}");
            }
        }
    }
    assert!((0.0..1.0).contains(&chart.bubble()), "{}", chart.bubble());
    for (what, edge) in [
        ("send", "edge 0 (h.0 -> stage 1)"),
        ("receive", "edge 0 (h.0 -> stage 1)"),
        ("wait for", "edge 0 (h.0 -> stage 1)"),
        ("send", "edge 1 (gradient from h.1 -> stage 0)"),
        ("receive", "edge 1 (gradient from h.1 -> stage 0)"),
    ] {
        let name = format!("\"name\":\"{what} {edge} of micro-batch ");
        assert!(trace.contains(&name), "{name} is missing");
    }
}

#[test]
fn trace_1f1b_has_whole_backwards() {
    let desk = Desk::new();
    let chart = chart_of_trace(&traced(&desk, "")).unwrap();
    for (row, micro_batch) in (0..2).flat_map(|row| (0..4).map(move |m| (row, m))) {
        assert_ne!(count(&chart, row, ChartPass::Backward, micro_batch), 0, "{row} {micro_batch}");
    }
    assert!(chart.svg().starts_with("<svg"));
}

#[test]
fn progress_has_stages_and_bubble() {
    let desk = Desk::new();
    let ran = desk.run(&format!("{LINE} --out run --log-every 1")).ok();
    let line = ran.lines("step 4/4")[0];
    assert!(line.contains("  stage 0 (cpu): idle ") && line.contains(", stage 1 (cpu 2): idle "));
    let record = &desk.steps("run")[3];
    let ranks = record["ranks"].as_array().unwrap();
    let of = |key: &str| ranks.iter().map(|rank| rank[key].as_f64().unwrap()).collect::<Vec<_>>();
    assert_eq!(
        (of("stage"), of("pipeline"), of("share")),
        ([0.0, 1.0].into(), vec![0.0; 2], vec![4.0; 2])
    );
    let (work, wait) = (of("work_ms"), of("wait_ms"));
    for (rank, idle) in of("idle").into_iter().enumerate() {
        assert!((idle - wait[rank] / (work[rank] + wait[rank])).abs() < 0.01, "{record}");
    }
    let (work, wait): (f64, f64) = (work.iter().sum(), wait.iter().sum());
    let bubble = record["bubble"].as_f64().unwrap();
    assert!((bubble - wait / (work + wait)).abs() < 0.01, "{record}");
    assert!(desk.run("runs run").ok().out.contains("cpu 2"));
}

#[test]
fn explain_stages_program_and_memory() {
    let desk = Desk::new();
    let before = desk.files();
    let program = explain(&desk, "program --set parallel.blocks_per_stage=1,3");
    let parts: Vec<&str> = program.split("\n\n").collect();
    let titles = [
        "rank 0: cpu, stage 0 of pipeline 0, embed, 4 samples\nmicro-batch 0: 1 sample from",
        "rank 1: cpu 2, stage 1 of pipeline 0, h.0 to head, 4 samples\nmicro-batch 0: 1 sample",
    ];
    assert_eq!(parts.len(), 2, "{program}");
    for (part, title) in parts.iter().zip(titles) {
        assert!(part.starts_with(title), "{part}");
    }
    for (rank, text) in [
        (0, " send edge 0 (embed -> rank 1) of micro-batch 3\n"),
        (0, " receive edge 1 (gradient from h.0 of rank 1) of micro-batch 3\n"),
        (0, " (W embed) on micro-batch 3\n"),
        (1, " receive edge 0 (embed of rank 0) of micro-batch 3\n"),
        (1, " (B h.1) on micro-batch 0\n"),
        (1, " tensors of h.1)\n"),
    ] {
        assert!(parts[rank].contains(text), "'{text}' is missing in:\n{}", parts[rank]);
    }

    let memory = explain(&desk, "memory");
    let alone =
        "train tiny.toml --data text.txt --set model.layers=2 --devices cpu --micro-batch 1";
    let alone = desk.run(&format!("{alone} --explain memory")).ok().out;
    for line in [
        "rank 0: cpu, stage 0 of pipeline 0, embed to h.0, micro-batches of up to 1 rows",
        "  stashes in flight: 2 of 4 micro-batches (1f1b)",
        "  stashes in flight: 1 of 4 micro-batches (1f1b)",
    ] {
        assert_eq!(memory.matches(&format!("{line}\n")).count(), 1, "{line} in:\n{memory}");
    }
    for line in ["\n  edges ", "\n  staging ", " needed, of the memory of the host\n"] {
        assert_eq!(memory.matches(line).count(), 2, "{line} in:\n{memory}");
    }
    assert!(memory.contains("\nmemory of the host: fits: "), "{memory}");
    let sum = |text: &str, row: &str| {
        let rows = text.lines().filter_map(|line| line.trim_start().strip_prefix(row));
        rows.map(|row| row.split_whitespace().next().unwrap().parse::<f64>().unwrap()).sum::<f64>()
    };
    // Every value of the model is on one of the stages, those of a tied embedding on both.
    let (parts, whole) = (sum(&memory, "parameters"), sum(&alone, "parameters"));
    assert!(parts >= whole - 0.05 && parts < 1.5 * whole, "{parts} {whole}");
    let gpipe = explain(&desk, "memory --schedule gpipe");
    assert_eq!(gpipe.matches("stashes in flight: 4 of 4 micro-batches (gpipe)").count(), 2);
    let interleaved = "memory --schedule interleaved --set parallel.virtual_stages=2";
    let interleaved = explain(&desk, interleaved);
    assert!(interleaved.contains("embed and h.1, micro-batches"), "{interleaved}");
    let chunks = "of 8, one per micro-batch and model chunk (interleaved)";
    assert_eq!(interleaved.matches(chunks).count(), 2, "{interleaved}");
    assert_eq!(desk.files(), before);
}

#[test]
fn explain_stages_communication() {
    let desk = Desk::new();
    let text = explain(&desk, &format!("communication {EVEN}"));
    assert!(text.starts_with("1 pipeline of 2 stages (1f1b), 4 micro-batches of up to 1 rows"));
    let row = |text: &str, beginning: &str| -> Vec<String> {
        let mut lines = text.lines().filter(|line| line.trim_start().starts_with(beginning));
        let line = lines.next().unwrap_or_else(|| panic!("{beginning} is missing in:\n{text}"));
        line.split_whitespace().map(String::from).collect()
    };
    // 8 positions of 16 values of 4 bytes, in each of 4 micro-batches.
    let forward = row(&text, "0       t");
    assert_eq!(forward[2..], ["h.0", "0", "1", "0.50", "KiB", "2.00", "KiB", "4"], "{text}");
    let backward = row(&text, "1       t");
    let expected = ["gradient", "from", "h.1", "1", "0", "0.50", "KiB", "2.00", "KiB", "4"];
    assert_eq!(backward[2..], expected, "{text}");
    // The last stage shares the embedding with the first one, which sums and updates all of it.
    assert!(text.contains("{0, 1}") && text.contains("  {1} "), "{text}");
    let senders: Vec<_> = ["rank 0", "rank 1"].map(|rank| row(&text, rank)).into();
    for sender in &senders {
        assert!(sender.windows(2).any(|pair| pair == ["2.00", "KiB"]), "{text}");
    }

    let both = "train tiny.toml --data text.txt --set model.layers=2 --devices cpu*4 --pipeline 2 \
                --micro-batch 1 --set parallel.balance=fixed --explain communication";
    let both = desk.run(&format!("{both} {EVEN}")).ok().out;
    let head = "2 pipelines of 2 stages (1f1b), 2 and 2 micro-batches of up to 1 rows";
    assert!(both.starts_with(head), "{both}");
    for group in ["{0, 2} ", "{1, 3} ", "{0, 1, 2, 3}  0.."] {
        assert!(both.contains(group), "{both}");
    }
    let measured = "train tiny.toml --data text.txt --devices cpu*2 --pipeline 2 --micro-batch 4 \
                    --explain";
    let caveat = "stages and shares are measured when the run starts, and devices may change \
                  places; here blocks and shares are even (--set blocks_per_stage=.. shows \
                  the cut of a run, and --explain schedule measures it)\n";
    for what in ["program", "memory", "communication", "schedule"] {
        let ran = desk.run(&format!("{measured} {what}")).ok();
        // The chart measures what the others only say will be measured.
        let head = if what == "schedule" { "planned pipeline 2 (1f1b): " } else { caveat };
        assert!(ran.out.starts_with(head), "{}", ran.out);
        // A run says so too.
        let note = "\n1 micro-batch keeps 2 stages idle most of the time; lower train.micro_batch";
        assert_eq!(ran.out.contains(note), what == "schedule", "{}", ran.out);
        assert!(!ran.out.contains("1 micro-batches"), "{}", ran.out);
        let refused = desk.run(&format!("{measured} {what} --pipeline 4 --devices cpu*4"));
        let error = refused.ended(78);
        assert!(error.line("error:").contains("3 blocks cannot be cut into 4 stages"));
    }
    // Fixed shares leave the cut to measurements.
    assert!(explain(&desk, "communication").starts_with(caveat));
}

#[test]
fn explain_resumed_has_recorded_stages() {
    let desk = Desk::new();
    let line = LINE.replace("--set parallel.balance=fixed", "");
    desk.run(&format!("{line} --out run --set parallel.balance=measured")).ok();
    let text = desk.run("train --resume run --explain program").ok().out;
    let resolved = fs::read_to_string(desk.path("run/resolved.toml")).unwrap();
    assert!(text.starts_with("rank 0: cpu"), "the stages are recorded: {resolved}\n{text}");
}

#[test]
fn explain_schedule_draws_a_chart() {
    let desk = Desk::new();
    let ran = desk.run(&format!("{LINE} {EVEN} --explain schedule --svg chart.svg")).ok();
    assert_eq!(ran.err, "wrote chart.svg\n");
    let text = ran.out;
    assert!(text.contains("measured alone") && text.contains("bubble"), "{text}");
    for row in ["stage 0: cpu, embed to h.0", "stage 1: cpu 2, h.1 to head"] {
        assert!(text.contains(row), "{text}");
    }
    let svg = fs::read_to_string(desk.path("chart.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("1f1b, 2 stages, 4 micro-batches"), "{svg}");
}
