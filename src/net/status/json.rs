//! State of a run as JSON. Numbers that are not finite are `null`, as in its record.

use std::path::Path;

use serde_json::{Value, json};

use super::board::StatusView;
use super::health::Health;
use super::run_status::{RankTotals, RunStatus, StatusNode};
use crate::nodes::LinkStatus;
use potluck_core::metrics::{StepRecord, rfc3339};
use potluck_core::{build_hash, whole_hash};

pub(super) fn status(view: &StatusView) -> Value {
    let run = &*view.run;
    let health = Health::of(run, view.now);
    let nodes: Vec<Value> = run.nodes.nodes.iter().map(node).collect();
    let mut ranks = Vec::with_capacity(run.ranks.len());
    for (number, totals) in run.ranks.iter().enumerate() {
        ranks.push(rank(number, totals));
    }
    let mut shown = json!({
        "run": {
            "name": run.about.name,
            "directory": text(run.about.directory.as_deref()),
            "configuration": text(run.about.configuration.as_deref()),
        },
        "version": run.about.version,
        "build": whole_hash(build_hash()),
        "node": run.nodes.you.map(|node| node.0),
        "generation": run.nodes.generation.0,
        "nodes": nodes,
        "phase": run.phase.name(),
        "health": {
            "healthy": health.is_healthy,
            "sentence": health.sentence,
            "silence_s": health.silence.as_secs_f64(),
            "limit_s": health.limit.map(|limit| limit.as_secs_f64()),
        },
        "step": run.done,
        "steps": run.steps,
        "steps_taken": run.steps_taken,
        "skipped_steps": run.steps_skipped,
        "warnings": run.warnings,
        "last_step": run.last_step.as_deref().map(|step| last_step(step, run)),
        "last_evaluation": run.last_evaluation.as_ref().map(|evaluation| json!({
            "step": evaluation.step,
            "val_loss": evaluation.val_loss,
        })),
        "last_checkpoint": run.last_checkpoint.map(|checkpoint| json!({
            "step": checkpoint.step,
            "time": checkpoint.at.map(rfc3339),
        })),
        "ranks": ranks,
        "links": Value::Null,
        "refused_peers": Value::Null,
        "socket_buffers": Value::Null,
    });
    if let Some(state) = &view.links {
        shown["links"] = state.links.iter().map(|of| link(of, view)).collect();
        shown["refused_peers"] = state.refused.into();
        if let Some(buffers) = state.socket_buffers {
            shown["socket_buffers"] = json!({ "receive": buffers.receive, "send": buffers.send });
        }
    }
    shown
}

fn text(path: Option<&Path>) -> Option<String> {
    Some(path?.to_string_lossy().into_owned())
}

fn node(node: &StatusNode) -> Value {
    json!({ "node": node.node.0, "host": node.host, "devices": node.devices })
}

fn last_step(step: &StepRecord, run: &RunStatus) -> Value {
    let mut shown = json!({
        "time": run.last_step_at.map(rfc3339),
        "loss": step.loss,
        "lr": step.lr,
        "grad_norm": step.grad_norm,
        "ms": step.ms,
    });
    let unit = step.unit.name();
    shown[unit] = step.count.into();
    shown[format!("{unit}_per_s")] = step.per_s.into();
    if let Some(scale) = step.loss_scale {
        shown["loss_scale"] = scale.into();
    }
    shown
}

fn rank(number: usize, rank: &RankTotals) -> Value {
    json!({
        "rank": number,
        "device": rank.device,
        "share": rank.share,
        "busy_s": rank.busy.as_secs_f64(),
        "waiting_s": rank.waiting.as_secs_f64(),
    })
}

fn link(link: &LinkStatus, view: &StatusView) -> Value {
    let age = link.heard.map(|heard| view.now.saturating_duration_since(heard));
    json!({
        "node": link.node.0,
        "host": link.host,
        "address": link.address.to_string(),
        "bytes_sent": link.stats.bytes_sent,
        "bytes_received": link.stats.bytes_received,
        "bytes_sent_per_s": link.bytes_sent_per_s,
        "bytes_received_per_s": link.bytes_received_per_s,
        "round_trip_ms": 1e3 * link.stats.round_trip.as_secs_f64(),
        "packets_sent": link.stats.packets_sent,
        "packets_lost": link.stats.packets_lost,
        "congestion_events": link.stats.congestion_events,
        "congestion_window": link.stats.congestion_window,
        "datagram_bytes": link.stats.datagram_bytes,
        "heartbeat_age_s": age.map(|age| age.as_secs_f64()),
    })
}
