//! Groups of some ranks of a group.

use super::packet::{CallKind, CollectiveCall};
use crate::collective::RankGroup;
use crate::comm::{GroupError, ProcessGroup};
use potluck_core::{Position, Rank};

impl ProcessGroup {
    /// Divides the group: ranks that pass the same color form a new group, ordered by key, and by
    /// position in this group if keys are equal. Every rank of this group must call it; a rank
    /// without a color gets no group. These are the rules of `MPI_Comm_split`, with `None` for
    /// `MPI_UNDEFINED` (MPI 4.1, section 7.4.2).
    ///
    /// The new group is independent of this one: each may be used at any time, divided again or
    /// dropped, as long as all members of a group make its calls in the same order. It begins with
    /// the deadline of this group. A rank that fails in one of its groups ends all of them.
    ///
    /// # Errors
    ///
    /// Returns the errors of any collective: a rank that makes another call, leaves, fails or
    /// misses the deadline.
    pub fn split(
        &mut self,
        color: Option<u32>,
        key: i64,
    ) -> Result<Option<ProcessGroup>, GroupError> {
        let own = [i64::from(color.is_some()), color.unwrap_or(0).into(), key];
        let all = self.gather_words(CallKind::Split, &own)?;
        let mut members: Vec<(i64, Position)> = Vec::new();
        for (position, words) in (0..).map(Position).zip(all.chunks_exact(own.len())) {
            if words[..2] == own[..2] {
                members.push((words[2], position));
            }
        }
        members.sort();
        let group = match color {
            Some(_) => {
                let ranks = members.iter().map(|(_, position)| self.members().rank(*position));
                self.subgroup(&ranks.collect::<Vec<_>>())?
            }
            None => None,
        };
        self.wait_for_groups()?;
        Ok(group)
    }

    /// Creates a group of these ranks, in this order: the first has position 0. Every rank of this
    /// group must call it with the same list, also a rank that is not in the list and gets no
    /// group. These are the rules of `torch.distributed.new_group`. The new group is as
    /// independent as one of [`Self::split`].
    ///
    /// # Errors
    ///
    /// Returns [`GroupError::Argument`] if a list is longer than this group,
    /// [`GroupError::Mismatch`] if two ranks passed different lists, and [`GroupError::Argument`]
    /// if the list is empty, names a rank twice, or names one that is not in this group. All ranks
    /// get these errors alike, and may continue to use this group. Returns the errors of any
    /// collective as well.
    pub fn new_group(&mut self, ranks: &[Rank]) -> Result<Option<ProcessGroup>, GroupError> {
        let lengths = self.gather_words(CallKind::NewGroup, &[ranks.len() as i64])?;
        // The length of another process may be anything.
        let most = self.world_size() as i64;
        for (position, length) in (0..).map(Position).zip(&lengths) {
            if !(0..=most).contains(length) {
                let member = self.members().member(position);
                let why = format!("{member} called it with {length} ranks, of {most} of the group");
                return Err(self.argument(why));
            }
        }
        let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
        let mut own: Vec<i64> = ranks.iter().map(|rank| rank.0.into()).collect();
        own.resize(longest, 0);
        let words = self.gather_words(CallKind::NewGroup, &own)?;
        let list = |position: usize| {
            let start = position * longest;
            &words[start..start + lengths[position] as usize]
        };
        let first = list(0);
        for position in 1..self.world_size() {
            let other = list(position);
            if other != first {
                let one = self.members().member(Position(0));
                let member = self.members().member(Position(position as u32));
                return Err(GroupError::Mismatch(format!(
                    "{one} called new_group({first:?}), and {member} called new_group({other:?})"
                )));
            }
        }
        let group = self.subgroup(ranks)?;
        self.wait_for_groups()?;
        Ok(group)
    }

    /// Waits until all processes have the new groups, so that no packet of a group arrives in a
    /// process that is yet to create it.
    fn wait_for_groups(&mut self) -> Result<(), GroupError> {
        if self.channels.spans_processes() { self.barrier() } else { Ok(()) }
    }

    /// Gathers the words of all ranks, in order of positions, which must be equally many.
    fn gather_words(&mut self, kind: CallKind, words: &[i64]) -> Result<Vec<i64>, GroupError> {
        let mut all = vec![0; self.world_size() * words.len()];
        let call = CollectiveCall::of_groups(kind, words.len());
        self.call(call, |group| group.gather_blocks(words, &mut all))?;
        Ok(all)
    }

    /// Returns this rank's handle on a group of these members, once all ranks know the list.
    fn subgroup(&self, ranks: &[Rank]) -> Result<Option<ProcessGroup>, GroupError> {
        let members = RankGroup::new(ranks).map_err(|error| self.argument(error.to_string()))?;
        for rank in ranks {
            self.expect_rank(*rank)?;
        }
        let Some(channels) = self.channels.subgroup(&members) else { return Ok(None) };
        Ok(Some(ProcessGroup { channels, layout: None }))
    }
}
