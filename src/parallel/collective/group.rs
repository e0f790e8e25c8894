//! Group of ranks: the members of a collective. Layouts, exchanges and lists of steps know
//! positions in a group only; callers map them to ranks when they send.

use std::fmt;
use std::sync::Arc;

use potluck_core::format::listed;
use potluck_core::{Position, Rank};

/// Ordered list of ranks without repetition; clones share it.
#[derive(Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct RankGroup(Arc<[Rank]>);

/// List of ranks that is no group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RankGroupError {
    #[error("a group needs a rank")]
    Empty,
    #[error("{rank} is in the group twice, at {} and {}", positions[0], positions[1])]
    Repeated { rank: Rank, positions: [Position; 2] },
}

/// Member of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    pub rank: Rank,
    pub position: Position,
}

/// Display name: the rank, and its position if the two differ.
impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rank.0 == self.position.0 {
            write!(f, "{}", self.rank)
        } else {
            write!(f, "{} ({})", self.rank, self.position)
        }
    }
}

impl RankGroup {
    /// Creates a group of these ranks, in this order.
    ///
    /// # Errors
    ///
    /// Returns [`RankGroupError`] if the list is empty or names a rank twice.
    pub fn new(ranks: &[Rank]) -> Result<Self, RankGroupError> {
        let group = Self(ranks.into());
        if ranks.is_empty() {
            return Err(RankGroupError::Empty);
        }
        for (position, rank) in group.iter() {
            // `position` finds the first member, which is an earlier one if the rank is repeated.
            if let Some(first) = group.position(rank)
                && first != position
            {
                return Err(RankGroupError::Repeated { rank, positions: [first, position] });
            }
        }
        Ok(group)
    }

    /// Creates the group of ranks `0..world`, in which positions equal ranks.
    ///
    /// # Panics
    ///
    /// Panics if `world` is 0.
    pub fn all(world: u32) -> Self {
        assert!(world > 0, "{}", RankGroupError::Empty);
        Self((0..world).map(Rank).collect())
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> u32 {
        self.0.len() as u32
    }

    /// Returns the rank at a position.
    ///
    /// # Panics
    ///
    /// Panics if the position is not in `0..size`.
    pub fn rank(&self, position: Position) -> Rank {
        self.0[position.index()]
    }

    /// Returns the member at a position.
    ///
    /// # Panics
    ///
    /// Panics if the position is not in `0..size`.
    pub fn member(&self, position: Position) -> Member {
        Member { rank: self.rank(position), position }
    }

    /// Returns true if positions equal ranks, as in the group of all ranks.
    pub(crate) fn is_identity(&self) -> bool {
        self.iter().all(|(position, rank)| position.0 == rank.0)
    }

    /// Returns the position of a rank; `None` if the rank is not in the group.
    pub fn position(&self, rank: Rank) -> Option<Position> {
        self.0.iter().position(|other| *other == rank).map(|index| Position(index as u32))
    }

    /// Returns all positions with their ranks, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (Position, Rank)> + '_ {
        self.0.iter().enumerate().map(|(index, rank)| (Position(index as u32), *rank))
    }
}

/// Display name: the numbers of the ranks in order, as in `{4, 1, 7}`.
impl fmt::Display for RankGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{}}}", listed(self.0.iter().map(|rank| rank.0)))
    }
}

impl fmt::Debug for RankGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_and_ranks_are_each_others_inverse() {
        let group = RankGroup::new(&[4, 1, 7].map(Rank)).unwrap();
        assert_eq!((group.size(), group.to_string().as_str()), (3, "{4, 1, 7}"));
        let members = [(0, 4), (1, 1), (2, 7)].map(|(p, r)| (Position(p), Rank(r)));
        assert_eq!(group.iter().collect::<Vec<_>>(), members);
        for (position, rank) in members {
            assert_eq!((group.rank(position), group.position(rank)), (rank, Some(position)));
        }
        assert_eq!(group.position(Rank(0)), None);
        let names = [0, 1].map(|position| group.member(Position(position)).to_string());
        assert_eq!(names, ["rank 4 (position 0)", "rank 1"]);
        assert!(!group.is_identity() && RankGroup::all(5).is_identity());
        assert!(RankGroup::all(5).iter().all(|(position, rank)| position.0 == rank.0));
    }

    #[test]
    fn a_list_that_is_empty_or_names_a_rank_twice_is_no_group() {
        assert_eq!(RankGroup::new(&[]), Err(RankGroupError::Empty));
        let error = RankGroup::new(&[3, 0, 2, 0].map(Rank)).unwrap_err();
        assert_eq!(error.to_string(), "rank 0 is in the group twice, at position 1 and position 3");
    }
}
