//! Placement of a run: the decisions about its devices before the first step. Recorded in
//! `resolved.toml` and in every checkpoint, and kept by a run that resumes on the same devices.

mod change;

pub use change::PlacementChange;

use std::ops::Range;

use super::options::TENSOR_SHARE_MAX;
use super::{Mesh, ParallelOptions, ReduceSite, ShareChange};

use potluck_graph::VariantChoices;

/// Devices of a run, with the decisions about each.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Placement {
    /// Requested device selector and options, which a run that resumes requests again.
    pub devices_asked: String,
    pub options: ParallelOptions,
    /// Identities of all requested devices, in the order of the request.
    pub candidates: Vec<String>,
    /// The most samples that any device was allowed to run at a time.
    pub micro_batch_max: u32,
    /// The most bytes of a parameter that every device can bind, if larger ones are cut by rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parameter_bytes_max: Option<u64>,
    pub mesh: Mesh,
    /// Shares of the tensors by rank of a tensor group; empty if stages have one rank each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tensor_shares: Vec<u32>,
    pub ranks: Vec<RankPlacement>,
    /// Shares by the steps from which they were in effect, if they have followed the speed of the
    /// devices while the run trained; the last are those of the ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub share_history: Vec<ShareChange>,
    /// The nodes of a run over several machines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<PlacedCluster>,
}

/// Nodes of the candidates, in their order: the candidates of the first node come first.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PlacedCluster {
    /// Name of the run, which identifies it to returning nodes.
    pub run: String,
    pub nodes: Vec<PlacedNode>,
}

/// Node of a run, with the number of its devices among the candidates.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PlacedNode {
    pub host: String,
    pub devices: usize,
}

/// Device of one rank, its share, and its resolved options.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct RankPlacement {
    /// Display name of the device; never a lookup key.
    pub name: String,
    /// Device identity that decides the bits of results: compared on resume.
    pub identity: String,
    /// Index of the device among the candidates.
    pub position: usize,
    /// Samples of the device in each step; `micro_batch` is the most that it runs at a time.
    pub share: u32,
    pub micro_batch: u32,
    /// Rows of the device's plan.
    pub rows: u32,
    /// Samples of each micro-batch of a step.
    pub micro_batches: Vec<u32>,
    /// In a pipeline or a tensor group: the blocks of each model chunk that the device holds. Else
    /// empty: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocks: Vec<Range<u32>>,
    pub reduce_site: ReduceSite,
    /// Selected kernel variant of each call that has several.
    pub kernels: VariantChoices,
    /// Keys of the calls whose variants were chosen without timings of all variants.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub untimed: Vec<String>,
}

impl RankPlacement {
    /// Returns true if the micro-batches are the samples of the share, none of them too large.
    fn has_its_share(&self) -> bool {
        let sum: u64 = self.micro_batches.iter().map(|rows| u64::from(*rows)).sum();
        sum == u64::from(self.share)
            && self.micro_batches.iter().all(|rows| *rows <= self.micro_batch)
    }
}

impl Placement {
    /// Returns true if several devices were requested, so that the shares may have been measured.
    pub fn has_alternatives(&self) -> bool {
        self.candidates.len() > 1
    }

    /// Returns the identities of the ranks' devices, for messages.
    pub fn devices(&self) -> String {
        let identities: Vec<&str> = self.ranks.iter().map(|rank| &*rank.identity).collect();
        identities.join(", ")
    }

    /// Returns true if these decisions apply to a run on these candidates that divides the model
    /// among them or not: choices for a whole model do not apply to a part.
    pub fn is_of(&self, candidates: &[String], is_divided: bool) -> bool {
        self.candidates == candidates && self.mesh.is_divided() == is_divided
    }

    /// Returns the decisions about the device at a position among the candidates, for a run with
    /// `world` ranks; `None` if it has no rank, or if only one of the two runs has several. The two
    /// runs may have their devices in different orders of ranks.
    pub fn of_position(&self, position: usize, world: usize) -> Option<&RankPlacement> {
        let rank = self.ranks.iter().find(|rank| rank.position == position);
        rank.filter(|_| (self.ranks.len() == 1) == (world == 1))
    }

    /// Returns the samples of each rank.
    pub fn shares(&self) -> Vec<u32> {
        self.ranks.iter().map(|rank| rank.share).collect()
    }

    /// Returns the first rank of each pipeline; all stages have its share.
    pub fn units(&self) -> impl Iterator<Item = &RankPlacement> + Clone {
        self.mesh.first_ranks().map_while(|rank| self.ranks.get(rank.index()))
    }

    /// Returns the tensor groups of each pipeline, by stage; of a damaged record only the ranks
    /// that exist.
    pub fn pipelines(&self) -> impl Iterator<Item = Vec<Vec<&RankPlacement>>> + Clone {
        self.mesh.pipelines().map(|stages| {
            let mut groups = Vec::with_capacity(stages.len());
            for ranks in stages {
                groups.push(ranks.iter().filter_map(|rank| self.ranks.get(rank.index())).collect());
            }
            groups
        })
    }

    /// Returns true if these shares were decided for batches of `batch` samples, in micro-batches
    /// of at most `micro_batch_max`, among several devices.
    pub fn shares_fit(&self, batch: u32, micro_batch_max: u32) -> bool {
        if !self.has_ranks_of_mesh() {
            return false;
        }
        let sum: u64 = self.units().map(|rank| u64::from(rank.share)).sum();
        self.has_alternatives()
            && self.micro_batch_max == micro_batch_max
            && sum == u64::from(batch)
    }

    /// Returns true if the ranks are devices among the candidates, in their order, each with
    /// samples and micro-batches that it may have. False only for a damaged record.
    pub fn is_consistent(&self) -> bool {
        self.has_ranks_of_mesh()
            && self.ranks.iter().all(|rank| self.is_sound(rank))
            && self.has_sound_order()
    }

    /// Returns true if a rank is one of the candidates and has possible samples and micro-batches.
    fn is_sound(&self, rank: &RankPlacement) -> bool {
        let sizes = 1..=self.micro_batch_max;
        rank.position < self.candidates.len()
            && rank.share > 0
            && sizes.contains(&rank.micro_batch)
            && sizes.contains(&rank.rows)
            && rank.has_its_share()
    }

    /// Returns true if there are as many ranks as the mesh has places.
    fn has_ranks_of_mesh(&self) -> bool {
        let Mesh { data, pipeline, tensor } = self.mesh;
        let has_axes = data > 0 && pipeline > 0 && tensor > 0;
        has_axes && self.mesh.world_size() == self.ranks.len()
    }

    /// Returns true if no device has two ranks, and if the ranks are in the order of the devices or
    /// hold parts of the model, each with blocks and the share of its pipeline.
    fn has_sound_order(&self) -> bool {
        if !self.mesh.is_divided() {
            return self.ranks.is_sorted_by(|one, next| one.position < next.position);
        }
        let mut positions: Vec<usize> = self.ranks.iter().map(|rank| rank.position).collect();
        positions.sort_unstable();
        positions.is_sorted_by(|one, next| one < next)
            && self.has_sound_tensor_shares()
            && self.pipelines().all(|stages| self.is_pipeline(&stages))
    }

    /// Returns true if the ranks of a pipeline have the parts of one, and each tensor group the
    /// same blocks.
    fn is_pipeline(&self, stages: &[Vec<&RankPlacement>]) -> bool {
        let Some(first) = stages.first().and_then(|group| group.first()) else { return false };
        stages.iter().all(|group| {
            group.iter().all(|rank| self.is_stage(rank, first) && rank.blocks == group[0].blocks)
        })
    }

    fn has_sound_tensor_shares(&self) -> bool {
        let count = if self.mesh.tensor > 1 { self.mesh.tensor } else { 0 };
        let sizes = 1..=TENSOR_SHARE_MAX;
        self.tensor_shares.len() == count
            && self.tensor_shares.iter().all(|share| sizes.contains(share))
    }

    /// Returns true if a rank has the blocks of a stage, and the micro-batches of the first one.
    fn is_stage(&self, rank: &RankPlacement, first: &RankPlacement) -> bool {
        rank.blocks.len() == self.options.pipeline.virtual_stages as usize
            && rank.blocks.iter().all(|run| run.start < run.end)
            && rank.micro_batches == first.micro_batches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a placement of 12 samples on the devices B and C of A, B and C.
    pub fn placement() -> Placement {
        let rank = |name: &str, position, share| RankPlacement {
            name: name.into(),
            identity: format!("{name} identity"),
            position,
            share,
            micro_batch: 3,
            rows: 4,
            micro_batches: vec![3; share as usize / 3],
            blocks: Vec::new(),
            reduce_site: ReduceSite::Device,
            kernels: [("matmul (2, 3)".to_string(), "tile".to_string())].into_iter().collect(),
            untimed: Vec::new(),
        };
        Placement {
            devices_asked: "all".into(),
            options: ParallelOptions::default(),
            candidates: ["A", "B", "C"].map(|name| format!("{name} identity")).into(),
            micro_batch_max: 4,
            parameter_bytes_max: None,
            mesh: Mesh::of_pipelines(2, 1),
            tensor_shares: Vec::new(),
            ranks: vec![rank("B", 1, 3), rank("C", 2, 9)],
            share_history: Vec::new(),
            cluster: None,
        }
    }

    #[test]
    fn a_placement_reads_back_from_json_with_numbers_and_lists() {
        let json = serde_json::to_value(placement()).unwrap();
        assert_eq!(
            json["candidates"],
            serde_json::json!(["A identity", "B identity", "C identity"])
        );
        let rank = &json["ranks"][1];
        assert_eq!((&rank["share"], &rank["position"]), (&9.into(), &2.into()));
        assert_eq!(rank["micro_batches"], serde_json::json!([3, 3, 3]));
        assert_eq!(rank["reduce_site"], "device");
        for site in [ReduceSite::Host, ReduceSite::Device] {
            assert_eq!(serde_json::to_value(site).unwrap(), site.name(), "one name everywhere");
        }
        assert_eq!(rank["kernels"]["matmul (2, 3)"], "tile");
        assert_eq!(serde_json::from_value::<Placement>(json).unwrap(), placement());
    }

    #[test]
    fn shares_fit_the_batch_and_micro_batches_they_were_decided_for() {
        assert!(placement().shares_fit(12, 4));
        assert!(!placement().shares_fit(13, 4));
        assert!(!placement().shares_fit(12, 5));
        let none = Placement { ranks: Vec::new(), ..placement() };
        assert!(!none.shares_fit(12, 4));
        let one = Placement { candidates: vec!["B identity".into()], ..placement() };
        assert!(!one.shares_fit(12, 4), "nothing is measured for one device");
        let mut huge = placement();
        huge.ranks[0].share = u32::MAX;
        assert!(!huge.shares_fit(8, 4), "the sum does not wrap");
    }

    #[test]
    fn ranks_that_no_run_records_are_inconsistent() {
        assert!(placement().is_consistent());
        let edits: [fn(&mut RankPlacement); 11] = [
            |rank| rank.position = 3,
            |rank| rank.position = 2,
            |rank| rank.share = 0,
            |rank| rank.micro_batch = 0,
            |rank| rank.micro_batch = 5,
            |rank| rank.rows = 0,
            |rank| rank.rows = u32::MAX,
            |rank| rank.micro_batches.clear(),
            |rank| rank.micro_batches = vec![3, 1],
            |rank| rank.micro_batches = vec![3, u32::MAX, 1],
            |rank| (rank.micro_batch, rank.rows) = (2, 2),
        ];
        for (index, edit) in edits.into_iter().enumerate() {
            let mut placement = placement();
            edit(&mut placement.ranks[0]);
            assert!(!placement.is_consistent(), "edit {index}");
        }
        for mesh in [Mesh::of_pipelines(3, 1), Mesh { pipeline: 0, ..placement().mesh }] {
            let damaged = Placement { mesh, ..placement() };
            assert!(!damaged.is_consistent() && !damaged.shares_fit(13, 4), "{mesh:?}");
        }
        let many = Mesh { data: 1 << 60, pipeline: 0, tensor: 2 };
        let damaged = Placement { mesh: many, ..placement() };
        assert!(!damaged.is_consistent() && !damaged.shares_fit(12, 4));
        let none = Mesh { pipeline: 0, tensor: 2, ..placement().mesh };
        let empty = Placement { mesh: none, ranks: Vec::new(), ..placement() };
        assert!(!Placement { tensor_shares: vec![1, 1], ..empty }.is_consistent());
    }

    #[test]
    fn tensor_groups_have_shares_and_blocks_of_their_own() {
        let mut sound = placement();
        sound.mesh = Mesh { data: 1, pipeline: 1, tensor: 2 };
        sound.tensor_shares = vec![3, 1];
        for rank in &mut sound.ranks {
            (rank.share, rank.micro_batches) = (12, vec![3; 4]);
            rank.blocks = vec![std::ops::Range { start: 0, end: 3 }];
        }
        assert!(sound.is_consistent());
        let edits: [fn(&mut Placement); 6] = [
            |placement| placement.tensor_shares.clear(),
            |placement| placement.tensor_shares = vec![1, 0],
            |placement| placement.tensor_shares = vec![1, u32::MAX],
            |placement| placement.tensor_shares = vec![1; 3],
            |placement| placement.ranks[1].blocks[0].end = 2,
            |placement| placement.ranks[1].position = 1,
        ];
        for (index, edit) in edits.into_iter().enumerate() {
            let mut damaged = sound.clone();
            edit(&mut damaged);
            assert!(!damaged.is_consistent(), "edit {index}");
        }
    }

    #[test]
    fn a_device_finds_its_record_in_a_run_of_its_kind() {
        let mut several = placement();
        assert_eq!(several.of_position(0, 3), None, "it was left out");
        for of in [1, 0] {
            assert_eq!(several.of_position(1, 2).unwrap().identity, "B identity");
            assert_eq!(several.of_position(2, 3), several.ranks.get(of));
            assert_eq!(several.of_position(1, 1), None);
            // A pipeline takes its devices in another order.
            several.ranks.reverse();
        }
        assert_eq!(several.devices(), "B identity, C identity");
    }

    #[test]
    fn records_of_other_devices_or_without_stages_are_those_of_another_run() {
        let (record, mut candidates) = (placement(), placement().candidates);
        assert!(record.is_of(&candidates, false) && !record.is_of(&candidates, true));
        let cut = Placement { mesh: Mesh::of_pipelines(1, 2), ..placement() };
        assert!(cut.is_of(&candidates, true) && !cut.is_of(&candidates, false));
        candidates.reverse();
        assert!(!record.is_of(&candidates, false));
    }
}
