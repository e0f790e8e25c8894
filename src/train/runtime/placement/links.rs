//! Measured links between the nodes of a request.

use std::collections::BTreeMap;

use super::types::PlacementRequest;
use crate::runtime::RuntimeError;
use crate::runtime::remote::FIRST_NODE;
use potluck_core::format::milliseconds;
use potluck_parallel::planner::links::RingLinks;

/// Measures the links between nodes if some of `count` devices are on other nodes than the first,
/// and notifies the user of them. `places` are the node and the position of each device, in order.
///
/// # Errors
/// Returns `RuntimeError` of the first device of a node if that is lost.
pub(crate) fn measured_links(
    request: &PlacementRequest,
    places: impl IntoIterator<Item = (u32, usize)>,
    count: usize,
) -> Result<Option<RingLinks>, RuntimeError> {
    let mut first_of_nodes = BTreeMap::new();
    for (node, position) in places {
        first_of_nodes.entry(node).or_insert(position);
    }
    if first_of_nodes.keys().all(|node| *node == FIRST_NODE) {
        return Ok(None);
    }
    let links = request.nodes.measure_links(&first_of_nodes, count)?;
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
