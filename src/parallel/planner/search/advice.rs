//! Changes that would make the chosen layout faster, each priced like a candidate.

use super::SearchRequest;
use crate::contiguous_shares;
use crate::planner::arrangement::Arrangement;
use crate::planner::laid_out::LaidOut;
use crate::planner::profile::PlanProfile;
use crate::planner::proposal::{Advice, Candidate};
use crate::planner::step_time::step_time;
use crate::sim::LinkModel;

/// Factor of the links and transfers whose gain is told.
const FASTER: f64 = 10.0;

/// Changes that make a step of the chosen candidate shorter, the best first.
pub(super) fn advice(request: &SearchRequest, chosen: &Candidate) -> Vec<Advice> {
    let mut found = Vec::new();
    if let Some(laid_out) = lay_out(request, &chosen.arrangement) {
        found.extend(faster_network(request, chosen, &laid_out));
        found.extend(faster_transfers(request, chosen, &laid_out));
    }
    found.extend(larger_batch(request, chosen));
    found.sort_by(|a: &Advice, b| a.step_s.total_cmp(&b.step_s));
    found
}

fn lay_out(request: &SearchRequest, arrangement: &Arrangement) -> Option<LaidOut> {
    LaidOut::of(request.options, request.plans(arrangement.mesh), arrangement).ok()
}

/// Step of the chosen arrangement with another profile.
fn step_with(
    request: &SearchRequest,
    chosen: &Candidate,
    laid_out: &LaidOut,
    profile: &PlanProfile,
) -> Option<f64> {
    let overlap = request.options.overlap;
    Some(step_time(profile, &chosen.arrangement, laid_out, overlap)?.seconds)
}

fn faster(link: LinkModel) -> LinkModel {
    LinkModel { bytes_per_s: FASTER * link.bytes_per_s, ..link }
}

fn faster_network(
    request: &SearchRequest,
    chosen: &Candidate,
    laid_out: &LaidOut,
) -> Option<Advice> {
    let mut profile = request.profile.clone();
    for of_sender in &mut profile.links {
        for link in of_sender {
            *link = faster(*link);
        }
    }
    let step_s = step_with(request, chosen, laid_out, &profile)?;
    Advice::of("ten times faster links between machines", chosen.prediction.step_s, step_s)
}

fn faster_transfers(
    request: &SearchRequest,
    chosen: &Candidate,
    laid_out: &LaidOut,
) -> Option<Advice> {
    let mut profile = request.profile.clone();
    for device in &mut profile.devices {
        device.read_back = faster(device.read_back);
        device.upload = faster(device.upload);
    }
    let step_s = step_with(request, chosen, laid_out, &profile)?;
    let change = "ten times faster transfers between devices and host memory";
    Advice::of(change, chosen.prediction.step_s, step_s)
}

/// Twice the samples per step: the seconds are for the samples of one step of before.
fn larger_batch(request: &SearchRequest, chosen: &Candidate) -> Option<Advice> {
    let mut arrangement = chosen.arrangement.clone();
    let mut counts = Vec::with_capacity(arrangement.shares.len());
    let mut micro_batches = Vec::with_capacity(arrangement.shares.len());
    for share in &arrangement.shares {
        counts.push(share.count.checked_mul(2)?);
        micro_batches.push(share.micro_batch);
    }
    arrangement.shares = contiguous_shares(&counts, &micro_batches);
    let laid_out = lay_out(request, &arrangement)?;
    let overlap = request.options.overlap;
    let step_s = step_time(request.profile, &arrangement, &laid_out, overlap)?.seconds / 2.0;
    let batch = 2 * u64::from(request.batch);
    let change = format!("a batch of {batch}, in the time of {} samples", request.batch);
    Advice::of(&change, chosen.prediction.step_s, step_s)
}
