//! Measured links between the nodes of a request.

use super::types::PlacementRequest;
use crate::runtime::RuntimeError;
use potluck_core::format::milliseconds;
use potluck_parallel::planner::links::RingLinks;

/// Measures the links between nodes if one of `count` devices, at position `on_other`, is on
/// another node than the first, and notifies the user of them.
///
/// # Errors
/// Returns `RuntimeError` of that device if a node is lost.
pub(crate) fn measured_links(
    request: &PlacementRequest,
    on_other: Option<usize>,
    count: usize,
) -> Result<Option<RingLinks>, RuntimeError> {
    let Some(position) = on_other else { return Ok(None) };
    let measured = request.nodes.measure_links();
    let links = measured.map_err(|error| error.of_position(position, count))?;
    if let Some(note) = links_note(&links, &request.nodes.hosts) {
        (request.notify)(&note);
    }
    Ok(Some(links))
}

/// Maximum number of links in a note.
const LINKS_TOLD: usize = 8;

/// Returns a sentence on the links between hosts, or the slowest of many; `None` without any.
fn links_note(links: &RingLinks, hosts: &[String]) -> Option<String> {
    let mut known = Vec::new();
    for (from, rate) in links.0.iter().enumerate() {
        if let Some(rate) = rate {
            known.push((from, *rate));
        }
    }
    known.sort_by(|a, b| a.1.bytes_per_s.total_cmp(&b.1.bytes_per_s));
    let mut told = Vec::new();
    for (from, rate) in known.iter().take(LINKS_TOLD) {
        let to = (from + 1) % links.0.len();
        let name = |node: usize| hosts.get(node).map_or("?", |host| host);
        told.push(format!(
            "{} to {} {:.1} MB/s and {} ms",
            name(*from),
            name(to),
            rate.bytes_per_s / 1e6,
            milliseconds(rate.round_trip_s)
        ));
    }
    let which = if known.len() > LINKS_TOLD { "slowest links between nodes" } else { "links" };
    if told.is_empty() {
        return None;
    }
    Some(format!("{which}, with their round trips: {}", told.join(", ")))
}
