//! Comparison of two placements of a run: which of their differences change bits.

use std::fmt;

use super::{Placement, RankPlacement};

/// Decision that differs from the earlier placement and changes the bits of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementChange {
    Devices,
    /// Number of pipelines, or of devices that hold the whole model.
    Pipelines,
    /// Ranks of the tensor groups, or their shares.
    Tensors,
    /// Blocks of the stages, on devices that round differently.
    Cut,
    Shares,
    MicroBatches,
    ReduceSites,
    Kernels,
}

impl fmt::Display for PlacementChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Devices => "other devices",
            Self::Pipelines => "another number of pipelines",
            Self::Tensors => "another division of tensors",
            Self::Cut => "another cut",
            Self::Shares => "other shares",
            Self::MicroBatches => "other micro-batches",
            Self::ReduceSites => "other reduce sites",
            Self::Kernels => "other kernels",
        })
    }
}

impl Placement {
    /// Returns the decisions that change the bits of a run that continues with this placement
    /// instead of `before`. The request, the schedule and, on devices of one kind, the cut may
    /// differ without an effect. `is_tied` is true if several blocks of the model use the same
    /// parameter.
    pub fn changes_since(&self, before: &Self, is_tied: bool) -> Vec<PlacementChange> {
        let may_be_cut = self.is_of_one_kind_with(before) && self.adds_as(before, is_tied);
        if !may_be_cut && self.devices() != before.devices() {
            return vec![PlacementChange::Devices];
        }
        if self.mesh.data != before.mesh.data {
            return vec![PlacementChange::Pipelines];
        }
        if !self.divides_tensors_as(before) {
            return vec![PlacementChange::Tensors];
        }
        let mut changes = Vec::new();
        if !may_be_cut && !self.has_cut_of(before) {
            changes.push(PlacementChange::Cut);
        }
        if self.differs_per_pipeline(before, |now, was| now.share != was.share) {
            changes.push(PlacementChange::Shares);
        } else if self
            .differs_per_pipeline(before, |now, was| now.micro_batches != was.micro_batches)
        {
            changes.push(PlacementChange::MicroBatches);
        }
        // The ranks of one pipeline add only the gradients of shared parameters.
        let is_reduced = self.mesh.data > 1 || is_tied;
        if is_reduced && self.differs_in_reduce_sites(before) {
            changes.push(PlacementChange::ReduceSites);
        }
        if self.differs_in_kernels(before, may_be_cut) {
            changes.push(PlacementChange::Kernels);
        }
        changes
    }

    fn is_of_one_kind_with(&self, other: &Self) -> bool {
        let mut all = self.ranks.iter().chain(&other.ranks).map(|rank| &rank.identity);
        let first = all.next();
        all.all(|identity| Some(identity) == first)
    }

    /// Returns true if equal devices add gradients as with the other placement. Tied parameters are
    /// used by the first and the last stage of every pipeline, whose gradients are then added: one
    /// device accumulates both uses instead.
    fn adds_as(&self, other: &Self, is_tied: bool) -> bool {
        self.mesh.data == other.mesh.data
            && self.divides_tensors_as(other)
            && (!is_tied || (self.mesh.pipeline > 1) == (other.mesh.pipeline > 1))
    }

    /// Returns true if the ranks of a tensor group have the same shares as with the other
    /// placement, so that they sum the same parts.
    fn divides_tensors_as(&self, other: &Self) -> bool {
        self.mesh.tensor == other.mesh.tensor && self.tensor_shares == other.tensor_shares
    }

    /// Returns true if the first ranks of any two pipelines differ.
    fn differs_per_pipeline(
        &self,
        before: &Self,
        differs: impl Fn(&RankPlacement, &RankPlacement) -> bool,
    ) -> bool {
        self.units().zip(before.units()).any(|(now, was)| differs(now, was))
    }

    /// Returns true if every rank holds the same blocks as before.
    fn has_cut_of(&self, before: &Self) -> bool {
        let now = self.ranks.iter().map(|rank| &rank.blocks);
        now.eq(before.ranks.iter().map(|rank| &rank.blocks))
    }

    fn differs_in_reduce_sites(&self, before: &Self) -> bool {
        let mut now = self.ranks.iter().map(|rank| rank.reduce_site);
        let mut was = before.ranks.iter().map(|rank| rank.reduce_site);
        if self.has_cut_of(before) {
            return !now.eq(was);
        }
        // Other ranks reduce: sites can only be compared if all are equal.
        let first = self.ranks.first().map(|rank| rank.reduce_site);
        now.any(|site| Some(site) != first) || was.any(|site| Some(site) != first)
    }

    /// Returns true if a call runs another kernel than before. With another cut a rank has calls
    /// that other ranks had, and on unlike devices also new ones.
    fn differs_in_kernels(&self, before: &Self, may_be_cut: bool) -> bool {
        let has_same_cut = self.has_cut_of(before);
        for (index, rank) in self.ranks.iter().enumerate() {
            let mut had = Vec::new();
            for (other, was) in before.ranks.iter().enumerate() {
                let is_alike =
                    if has_same_cut { other == index } else { was.identity == rank.identity };
                if is_alike {
                    had.push(&was.kernels);
                }
            }
            for (call, name) in rank.kernels.iter() {
                let mut is_known = false;
                for was in &had {
                    match was.get(call) {
                        Some(was) if was != name => return true,
                        Some(_) => is_known = true,
                        None => {}
                    }
                }
                if !is_known && (has_same_cut || may_be_cut) {
                    return true;
                }
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::PlacementChange::*;
    use super::*;
    use crate::placement::tests::placement;
    use crate::{Mesh, PipelineSchedule, ReduceSite};

    #[test]
    fn only_what_changes_bits_is_a_change_of_data_parallelism() {
        let changes = |edit: fn(&mut Placement)| {
            let mut now = placement();
            edit(&mut now);
            now.changes_since(&placement(), false)
        };
        assert_eq!(changes(|_| {}), []);
        assert_eq!(changes(|now| now.ranks[0].name = "another".into()), []);
        assert_eq!(changes(|now| now.micro_batch_max = 3), []);
        assert_eq!(
            changes(|now| (now.ranks[0].micro_batch, now.ranks[0].rows) = (4, 3)),
            [],
            "what is allowed is not what runs"
        );
        assert_eq!(changes(|now| now.candidates.push("D identity".into())), []);
        assert_eq!(changes(|now| now.ranks[1].micro_batches[0] = 2), [MicroBatches]);
        let other_share = |now: &mut Placement| {
            (now.ranks[0].share, now.ranks[0].micro_batches) = (2, vec![2]);
        };
        assert_eq!(changes(other_share), [Shares]);
        assert_eq!(changes(|now| now.ranks[1].reduce_site = ReduceSite::Host), [ReduceSites]);
        let added = |now: &mut Placement| {
            now.ranks[1].kernels.insert("add".into(), "vec4".into());
        };
        assert_eq!(changes(added), [Kernels]);
        assert_eq!(changes(|now| now.ranks.truncate(1)), [Devices]);
        assert_eq!(changes(|now| now.ranks.swap(0, 1)), [Devices]);
    }

    /// Placement of pipelines of 12 samples whose stages have these blocks, on these devices.
    fn cut(devices: &[&str], blocks: &[Range<u32>]) -> Placement {
        let rank = |(index, device): (usize, &&str)| RankPlacement {
            identity: device.to_string(),
            position: index,
            blocks: vec![blocks[index % blocks.len()].clone()],
            kernels: [(format!("matmul of {device}"), "tile".to_string())].into_iter().collect(),
            ..placement().ranks[1].clone()
        };
        Placement {
            candidates: devices.iter().map(|device| device.to_string()).collect(),
            mesh: Mesh::of_pipelines(devices.len() / blocks.len(), blocks.len()),
            ranks: devices.iter().enumerate().map(rank).collect(),
            ..placement()
        }
    }

    #[test]
    fn a_cut_is_a_change_on_unlike_devices_only() {
        let two = cut(&["A", "A"], &[0..1, 1..6]);
        let mut other = cut(&["A", "A"], &[0..3, 3..6]);
        other.options.pipeline.schedule = PipelineSchedule::ZeroBubble;
        let three = cut(&["A", "A", "A"], &[0..1, 1..3, 3..6]);
        for is_tied in [false, true] {
            assert_eq!(other.changes_since(&two, is_tied), []);
            assert_eq!(three.changes_since(&two, is_tied), []);
            assert_eq!(two.changes_since(&three, is_tied), []);
        }
        let one = cut(&["A"], std::slice::from_ref(&(0..6)));
        assert_eq!(one.changes_since(&two, false), []);
        assert_eq!(two.changes_since(&one, true), [Devices]);

        let unlike = cut(&["A", "B"], &[0..1, 1..6]);
        assert_eq!(unlike.changes_since(&unlike, false), []);
        assert_eq!(cut(&["A", "B"], &[0..3, 3..6]).changes_since(&unlike, false), [Cut]);
        assert_eq!(two.changes_since(&unlike, false), [Devices]);
        let mut schedule = unlike.clone();
        schedule.options.pipeline.schedule = PipelineSchedule::GPipe;
        assert_eq!(schedule.changes_since(&unlike, false), []);

        let beside = cut(&["A"; 4], &[0..1, 1..6]);
        assert_eq!(cut(&["A"; 6], &[0..1, 1..3, 3..6]).changes_since(&beside, true), []);
        assert_eq!(beside.changes_since(&two, false), [Devices]);
        let four = cut(&["A"; 4], &[0..1, 1..2, 2..3, 3..6]);
        assert_eq!(four.changes_since(&beside, false), [Pipelines]);
    }

    #[test]
    fn other_kernels_and_sites_are_changes_with_any_cut() {
        let two = cut(&["A", "A"], &[0..1, 1..6]);
        let changes = |edit: fn(&mut Placement), is_tied| {
            let mut now = cut(&["A", "A"], &[0..3, 3..6]);
            edit(&mut now);
            now.changes_since(&two, is_tied)
        };
        let kernel = |now: &mut Placement| {
            now.ranks[0].kernels.insert("matmul of A".into(), "plain".into());
        };
        assert_eq!(changes(kernel, false), [Kernels]);
        let unknown = |now: &mut Placement| {
            now.ranks[0].kernels.insert("add".into(), "vec4".into());
        };
        assert_eq!(changes(unknown, false), [Kernels]);
        let site = |now: &mut Placement| now.ranks[0].reduce_site = ReduceSite::Host;
        assert_eq!(changes(site, false), [], "nothing is reduced");
        assert_eq!(changes(site, true), [ReduceSites]);
        let rows = |now: &mut Placement| {
            now.ranks.iter_mut().for_each(|rank| rank.micro_batches = vec![1; 9]);
        };
        assert_eq!(changes(rows, false), [MicroBatches]);
    }
}
