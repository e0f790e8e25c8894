//! `resolved.toml`: decisions made before the first step of a run.

use std::collections::BTreeMap;

use potluck_data::DataFile;
use potluck_parallel::{PipelineOptions, Placement, RankPlacement};

/// Formats `resolved.toml`: top-level keys first, then a table per rank (omitted for a single rank)
/// and a table of its kernels. `data` is the fingerprint of the data with their files, which have
/// their own table; `version` is potluck's.
pub(crate) fn resolved_toml(
    placement: &Placement,
    data: &str,
    files: &[DataFile],
    version: &str,
) -> String {
    let mut tables: BTreeMap<String, BTreeMap<&str, String>> = BTreeMap::new();
    for (rank, decided) in placement.ranks.iter().enumerate() {
        let is_alone = placement.ranks.len() == 1;
        let table = if is_alone { String::new() } else { format!("rank{rank}") };
        let prefix = if is_alone { String::new() } else { format!("rank{rank}.") };
        tables.entry(table).or_default().extend(rank_entries(placement, decided));
        let kernels = tables.entry(format!("{prefix}kernels")).or_default();
        for (call, name) in decided.kernels.iter() {
            kernels.insert(call, name.to_string());
        }
        let untimed = tables.entry(format!("{prefix}untimed")).or_default();
        for call in &decided.untimed {
            if let Some(name) = decided.kernels.get(call) {
                untimed.insert(call, name.to_string());
            }
        }
    }
    let run = tables.entry(String::new()).or_default();
    run.extend([("data", data.to_string()), ("version", version.to_string())]);
    if placement.has_alternatives() {
        run.insert("devices", placement.candidates.join(" | "));
        run.insert("micro_batch_max", placement.micro_batch_max.to_string());
    }
    if placement.ranks.len() > 1 {
        run.insert("collective", placement.options.topology.name().to_string());
        run.insert("message_kib", (placement.options.chunk_bytes >> 10).to_string());
    }
    if !placement.share_history.is_empty() {
        let shares = placement.share_history.iter().map(ToString::to_string);
        run.insert("share_history", shares.collect::<Vec<String>>().join(", "));
    }
    if placement.mesh.is_divided() {
        let PipelineOptions { schedule, virtual_stages, .. } = &placement.options.pipeline;
        run.insert("pipeline_stages", placement.mesh.pipeline.to_string());
        run.insert("schedule", schedule.to_string());
        run.insert("virtual_stages", virtual_stages.to_string());
    }
    let file_entries = tables.entry("files".into()).or_default();
    for file in files {
        file_entries.insert(&file.name, format!("{} bytes, BLAKE3 {}", file.bytes, file.blake3));
    }
    tables.retain(|_, entries| !entries.is_empty());
    let mut text = String::from("# What this run decided before its first step.\n");
    for (table, entries) in &tables {
        text += &table_text(table, entries);
    }
    text
}

fn rank_entries<'a>(placement: &Placement, decided: &RankPlacement) -> BTreeMap<&'a str, String> {
    let micro_batches: Vec<String> = decided.micro_batches.iter().map(u32::to_string).collect();
    let mut entries = BTreeMap::from([
        ("device", decided.identity.clone()),
        ("micro_batches", micro_batches.join(" ")),
    ]);
    if placement.has_alternatives() {
        entries.insert("position", decided.position.to_string());
        entries.insert("micro_batch", decided.micro_batch.to_string());
        entries.insert("rows", decided.rows.to_string());
        entries.insert("share", decided.share.to_string());
    }
    if placement.ranks.len() > 1 {
        entries.insert("name", decided.name.clone());
        entries.insert("reduce_site", decided.reduce_site.to_string());
    }
    if !decided.blocks.is_empty() {
        let mut blocks = Vec::with_capacity(decided.blocks.len());
        for run in &decided.blocks {
            blocks.push(format!("{}..{}", run.start, run.end));
        }
        entries.insert("blocks", blocks.join(" "));
    }
    entries
}

fn table_text(table: &str, entries: &BTreeMap<&str, String>) -> String {
    let mut text = String::new();
    if table.ends_with("kernels") {
        text += "\n# The variant of each call that has several.";
    }
    if table.ends_with("untimed") {
        text += "\n# Those of them that were chosen without timing all variants.";
    }
    if !table.is_empty() {
        text += &format!("\n[{table}]\n");
    }
    for (key, value) in entries {
        let simple = key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        let key = if simple { key.to_string() } else { quoted(key) };
        text += &format!("{key} = {}\n", quoted(value));
    }
    text
}

fn quoted(text: &str) -> String {
    toml::Value::String(text.into()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_parallel::{Mesh, ReduceSite, ShareChange};

    fn change(step: u64, shares: &[u32]) -> ShareChange {
        ShareChange { step, shares: shares.to_vec() }
    }

    fn rank(identity: &str, share: u32) -> RankPlacement {
        RankPlacement {
            name: "a name".into(),
            identity: identity.into(),
            position: 1,
            share,
            micro_batch: 2,
            rows: 4,
            micro_batches: vec![2, 1],
            blocks: Vec::new(),
            reduce_site: ReduceSite::Host,
            kernels: [("matmul (2, 3)".to_string(), "tile".to_string())].into_iter().collect(),
            untimed: Vec::new(),
        }
    }

    #[test]
    fn one_device_has_keys_without_a_rank() {
        let mut placement = Placement {
            candidates: vec!["A".into()],
            micro_batch_max: 4,
            mesh: Mesh::default(),
            ranks: vec![rank("A", 3)],
            ..Placement::default()
        };
        let expected = "# What this run decided before its first step.\n\
                        data = \"abc\"\ndevice = \"A\"\nmicro_batches = \"2 1\"\nversion = \"1\"\n";
        let kernels = "\n# The variant of each call that has several.\n[kernels]\n\
                       \"matmul (2, 3)\" = \"tile\"\n";
        assert_eq!(resolved_toml(&placement, "abc", &[], "1"), format!("{expected}{kernels}"));
        placement.ranks[0].untimed = vec!["matmul (2, 3)".into()];
        let untimed = "\n# Those of them that were chosen without timing all variants.\n[untimed]\n\
                       \"matmul (2, 3)\" = \"tile\"\n";
        let all = format!("{expected}{kernels}{untimed}");
        assert_eq!(resolved_toml(&placement, "abc", &[], "1"), all);
        placement.ranks[0].kernels = [].into_iter().collect();
        assert_eq!(resolved_toml(&placement, "abc", &[], "1"), expected);
        placement.candidates.push("B".into());
        let expected = "# What this run decided before its first step.\n\
                        data = \"abc\"\ndevice = \"A\"\ndevices = \"A | B\"\nmicro_batch = \"2\"\n\
                        micro_batch_max = \"4\"\nmicro_batches = \"2 1\"\nposition = \"1\"\n\
                        rows = \"4\"\nshare = \"3\"\nversion = \"1\"\n";
        assert_eq!(resolved_toml(&placement, "abc", &[], "1"), expected);
    }

    #[test]
    fn several_ranks_have_a_table_each_sorted_by_name() {
        let placement = Placement {
            candidates: vec!["A".into(), "B".into()],
            micro_batch_max: 4,
            mesh: Mesh::of_pipelines(11, 1),
            ranks: vec![rank("A", 4); 11],
            ..Placement::default()
        };
        assert!(!resolved_toml(&placement, "abc", &[], "1").contains("share_history"));
        let share_history = vec![change(1, &[2, 2]), change(51, &[3, 1])];
        let placement = Placement { share_history, ..placement };
        let text = resolved_toml(&placement, "abc", &[], "1");
        assert!(text.contains("share_history = \"1: 2 2, 51: 3 1\"\n"), "{text}");
        let is_table = |line: &&str| line.starts_with('[');
        let tables: Vec<&str> = text.lines().filter(is_table).collect();
        assert_eq!(tables[..4], ["[rank0]", "[rank0.kernels]", "[rank1]", "[rank1.kernels]"]);
        assert_eq!(tables[4..6], ["[rank10]", "[rank10.kernels]"]);
        let table: toml::Table = text.parse().unwrap();
        assert_eq!(table["devices"].as_str(), Some("A | B"));
        assert_eq!(table["collective"].as_str(), Some("ring"));
        assert_eq!(table["message_kib"].as_str(), Some("1024"));
        assert_eq!(table["rank10"]["name"].as_str(), Some("a name"));
        assert_eq!(table["rank10"]["reduce_site"].as_str(), Some("host"));
        assert_eq!(table["rank10"]["share"].as_str(), Some("4"));
        assert_eq!(table["rank10"]["kernels"]["matmul (2, 3)"].as_str(), Some("tile"));
    }
}
