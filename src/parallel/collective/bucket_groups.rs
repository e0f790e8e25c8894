//! Groups of buckets: the ranks that hold each bucket, and the positions of a rank in them.

use std::fmt;
use std::sync::Arc;

use super::RankGroup;
use potluck_core::{BucketId, Position, Rank};

/// Group of each bucket of a run: the ranks that hold it, reduce its gradients and share out its
/// moments. Clones share it.
#[derive(Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct BucketGroups {
    world: u32,
    groups: Arc<[RankGroup]>,
}

/// Positions of one rank in the groups of the buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Positions {
    /// The same in the group of every bucket.
    Same(Position),
    /// By bucket; `None`: the rank does not hold it.
    Each(Arc<[Option<Position>]>),
}

impl Positions {
    /// Returns the position in the group of a bucket; `None` if the rank does not hold the bucket.
    pub fn of(&self, bucket: BucketId) -> Option<Position> {
        match self {
            Self::Same(position) => Some(*position),
            Self::Each(positions) => positions[bucket.index()],
        }
    }
}

impl From<Position> for Positions {
    fn from(position: Position) -> Self {
        Self::Same(position)
    }
}

impl BucketGroups {
    /// Creates the groups of a run of `world` ranks, by bucket.
    ///
    /// # Panics
    ///
    /// Panics if a group has a rank outside `0..world`.
    pub fn new(world: u32, groups: Vec<RankGroup>) -> Self {
        for group in &groups {
            let is_inside = group.iter().all(|(_, rank)| rank.0 < world);
            assert!(is_inside, "a group has a rank outside of 0..{world}");
        }
        Self { world, groups: groups.into() }
    }

    /// Creates the groups of a run in which every rank holds each bucket.
    ///
    /// # Panics
    ///
    /// Panics if `world` is 0.
    pub fn all(world: u32, buckets: usize) -> Self {
        Self::new(world, vec![RankGroup::all(world); buckets])
    }

    /// Returns true for groups of a run of `world` ranks: false only for those of a damaged
    /// message.
    pub fn is_sound(&self, world: usize) -> bool {
        let is_inside = |group: &RankGroup| group.iter().all(|(_, rank)| rank.0 < self.world);
        self.world > 0 && self.world as usize == world && self.groups.iter().all(is_inside)
    }

    /// Returns the number of ranks of the run.
    pub fn world(&self) -> u32 {
        self.world
    }

    /// Returns the number of buckets.
    pub fn buckets(&self) -> usize {
        self.groups.len()
    }

    /// Returns the ranks that hold a bucket.
    pub fn of(&self, bucket: BucketId) -> &RankGroup {
        &self.groups[bucket.index()]
    }

    /// Returns the positions of a rank.
    pub fn positions(&self, rank: Rank) -> Positions {
        let all = RankGroup::all(self.world);
        if self.groups.iter().all(|group| *group == all) {
            return Positions::Same(Position(rank.0));
        }
        Positions::Each(self.groups.iter().map(|group| group.position(rank)).collect())
    }

    /// Returns the buckets that a rank holds alone: they are never exchanged.
    pub fn alone(&self, rank: Rank) -> Vec<BucketId> {
        let mut alone = Vec::new();
        for (bucket, group) in self.groups.iter().enumerate() {
            if group.size() == 1 && group.position(rank).is_some() {
                alone.push(BucketId(bucket as u32));
            }
        }
        alone
    }
}

impl fmt::Debug for BucketGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.groups.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(ranks: &[u32]) -> RankGroup {
        let ranks: Vec<Rank> = ranks.iter().copied().map(Rank).collect();
        RankGroup::new(&ranks).unwrap()
    }

    #[test]
    fn positions_are_those_in_the_group_of_each_bucket() {
        let groups = BucketGroups::new(4, vec![group(&[1, 3]), group(&[0]), group(&[2, 0, 3])]);
        let of = |rank| groups.positions(Rank(rank));
        let positions = |rank| [0, 1, 2].map(|bucket| of(rank).of(BucketId(bucket)).map(|p| p.0));
        assert_eq!(positions(0), [None, Some(0), Some(1)]);
        assert_eq!(positions(3), [Some(1), None, Some(2)]);
        assert_eq!(groups.alone(Rank(0)), [BucketId(1)]);
        assert_eq!(groups.alone(Rank(3)), []);
        assert_eq!(BucketGroups::all(3, 2).positions(Rank(2)), Positions::Same(Position(2)));
    }

    #[test]
    #[should_panic(expected = "outside of 0..2")]
    fn a_rank_outside_of_the_run_is_refused() {
        BucketGroups::new(2, vec![group(&[0, 2])]);
    }
}
