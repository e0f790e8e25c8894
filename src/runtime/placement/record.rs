//! Record of the decisions made before the first step: written to resolved.toml and checkpoints,
//! read by a resumed run.

use std::collections::BTreeMap;

use super::types::{PlacedWorkers, PlacementRequest, SEPARATOR};

/// Prefix of a call's signature in the resolved keys.
pub const KERNEL: &str = "kernels.";

/// Key of the most samples that any device was allowed to run at a time.
const MICRO_BATCH_MAX: &str = "micro_batch_max";

/// Returns the key of one resolved value of a rank; a run on one device has keys without a rank.
pub fn key(rank: usize, world: usize, what: &str) -> String {
    if world == 1 { what.to_string() } else { format!("rank{rank}.{what}") }
}

/// Recorded values of a rank: position, share, micro-batch and rows.
pub type RecordedRank = [u32; 4];

/// Returns the recorded ranks of a run with measured shares that resumes on the same devices;
/// `None` if they must be decided again.
pub fn recorded(
    saved: &BTreeMap<String, String>,
    request: &PlacementRequest,
) -> Option<Vec<RecordedRank>> {
    let same_most = saved.get(MICRO_BATCH_MAX) == Some(&request.micro_batch.to_string());
    if request.parallel.shares.is_some() || !same_most {
        return None;
    }
    let world = match saved.contains_key("position") {
        // One rank: the other candidates were excluded.
        true => 1,
        false => (0..).take_while(|rank| saved.contains_key(&key(*rank, 2, "position"))).count(),
    };
    let of_rank = |rank| {
        let number = |what| saved.get(&key(rank, world, what))?.parse().ok();
        Some([number("position")?, number("share")?, number("micro_batch")?, number("rows")?])
    };
    let kept: Vec<RecordedRank> = (0..world).map(of_rank).collect::<Option<_>>()?;
    let sum: u64 = kept.iter().map(|[_, share, ..]| u64::from(*share)).sum();
    (!kept.is_empty() && sum == u64::from(request.batch)).then_some(kept)
}

/// Returns the saved entries of one rank, under the keys of a run on one device.
pub fn rank_entries(
    saved: Option<&BTreeMap<String, String>>,
    rank: usize,
    world: usize,
) -> BTreeMap<String, String> {
    let prefix = key(rank, world, "");
    let entries = saved.into_iter().flatten();
    let of_rank = |(key, value): (&String, &String)| {
        Some((key.strip_prefix(&prefix)?.to_string(), value.clone()))
    };
    entries.filter_map(of_rank).collect()
}

impl PlacedWorkers {
    /// Returns the decisions by key, as resolved.toml and checkpoints hold them.
    pub fn resolved(&self) -> BTreeMap<String, String> {
        let world = self.placed.len();
        let mut resolved = BTreeMap::new();
        let several = self.candidates.contains(SEPARATOR);
        if several {
            resolved.insert("devices".to_string(), self.candidates.clone());
            resolved.insert(MICRO_BATCH_MAX.to_string(), self.micro_batch_max.to_string());
        }
        for (rank, placed) in self.placed.iter().enumerate() {
            let rows = self.programs[rank].micro_batches.iter().map(|m| m.rows.to_string());
            let mut set = |what: &str, value: String| {
                resolved.insert(key(rank, world, what), value);
            };
            set("device", placed.identity.clone());
            set("micro_batches", rows.collect::<Vec<_>>().join(" "));
            if several {
                set("position", placed.position.to_string());
                set("micro_batch", placed.micro_batch.to_string());
                set("rows", placed.rows.to_string());
                set("share", placed.count.to_string());
            }
            if world > 1 {
                set("reduce_site", placed.reduce_site.to_string());
            }
            for (call, name) in placed.choices.iter() {
                set(&format!("{KERNEL}{call}"), name.into());
            }
        }
        resolved
    }
}

/// Returns the names of a run's devices from its resolved values.
pub fn devices(resolved: &BTreeMap<String, String>) -> String {
    let of_rank = |rank: usize| resolved.get(&format!("rank{rank}.device"));
    let ranks: Vec<&str> = (0..).map_while(of_rank).map(String::as_str).collect();
    match resolved.get("device") {
        Some(device) => device.clone(),
        None => ranks.join(", "),
    }
}

/// Formats `resolved.toml`: top-level keys first, then a table per rank and a table of its
/// kernels.
pub fn resolved_toml(resolved: &BTreeMap<String, String>) -> String {
    let mut text = String::from("# What this run decided before its first step.\n");
    let mut tables: BTreeMap<&str, Vec<(&str, &str)>> = BTreeMap::new();
    for (key, value) in resolved {
        let in_rank = key.strip_prefix("rank").and_then(|rest| rest.find('.'));
        let rank_end = in_rank.map_or(0, |dot| "rank".len() + dot + 1);
        let kernel_end = key[rank_end..].strip_prefix(KERNEL).map(|_| rank_end + KERNEL.len());
        let end = kernel_end.unwrap_or(rank_end);
        tables.entry(key[..end].trim_end_matches('.')).or_default().push((&key[end..], value));
    }
    for (table, entries) in tables {
        if table.ends_with(KERNEL.trim_end_matches('.')) {
            text += "\n# The variant of each call that has several.";
        }
        if !table.is_empty() {
            text += &format!("\n[{table}]\n");
        }
        for (key, value) in entries {
            let simple = key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            let key = if simple { key.to_string() } else { quoted(key) };
            text += &format!("{key} = {}\n", quoted(value));
        }
    }
    text
}

fn quoted(text: &str) -> String {
    toml::Value::String(text.into()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
    }

    #[test]
    fn what_was_resolved_is_toml_and_says_which_devices() {
        let resolved = entries(&[
            ("data", "abc"),
            ("rank0.device", "A"),
            ("rank0.kernels.matmul (2, 3)", "tile"),
            ("rank1.device", "B"),
            ("rank1.share", "4"),
        ]);
        assert_eq!(devices(&resolved), "A, B");
        let table: toml::Table = resolved_toml(&resolved).parse().unwrap();
        assert_eq!(table["data"].as_str(), Some("abc"));
        assert_eq!(table["rank0"]["kernels"]["matmul (2, 3)"].as_str(), Some("tile"));
        assert_eq!(table["rank1"]["share"].as_str(), Some("4"));
        let one = entries(&[("device", "A"), ("kernels.add", "vec4"), ("version", "1")]);
        assert_eq!(devices(&one), "A");
        let table: toml::Table = resolved_toml(&one).parse().unwrap();
        assert_eq!(table["kernels"]["add"].as_str(), Some("vec4"));
        assert_eq!(table["version"].as_str(), Some("1"));
    }

    #[test]
    fn a_rank_finds_what_was_saved_of_it() {
        let saved = entries(&[("rank1.device", "B"), ("rank10.device", "C"), ("data", "x")]);
        assert_eq!(rank_entries(Some(&saved), 1, 2), entries(&[("device", "B")]));
        assert_eq!(rank_entries(Some(&saved), 0, 1), saved);
    }
}
