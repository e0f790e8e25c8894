//! Registry of the groups that descend from one call of [`super::init`]: connects the members of a
//! new group, and ends all groups of a rank that fails.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use super::connection::{CREDITS, WINDOW};
use super::packet::Packet;
use crate::base::Rank;
use crate::collective::RankGroup;
use crate::comm::Mailbox;

/// Mailboxes of one group, which no other group uses: so packets of different groups never meet.
pub struct GroupContext {
    /// Number of the group in its registry.
    pub id: u64,
    pub members: RankGroup,
    /// By position.
    pub mailboxes: Vec<Mailbox<Packet>>,
}

impl GroupContext {
    /// Closes all mailboxes: the calls of all members fail with this reason.
    pub fn close(&self, why: &str) {
        self.mailboxes.iter().for_each(|mailbox| mailbox.close(why));
    }
}

/// Identity of a group before it has a context, equal on all of its members: the parent group's
/// id, the number of the parent's collective that creates it, and its first member.
pub type Birth = (u64, u64, Rank);

/// Groups of a registry, and what is known of their ranks.
#[derive(Default)]
struct GroupTable {
    created: u64,
    groups: Vec<Weak<GroupContext>>,
    /// Groups that some members have not joined yet, with the number of these members.
    pending: HashMap<Birth, (Arc<GroupContext>, u32)>,
    /// Ranks that have failed, with the reason.
    failed: Vec<(Rank, String)>,
}

/// Groups of the ranks of one [`super::init`].
#[derive(Default)]
pub struct GroupRegistry(Mutex<GroupTable>);

/// Returns the maximum number of packets from one member that may wait for another, in a group of
/// this size: of collectives, and of sends.
pub fn packets_max(size: usize) -> [usize; 2] {
    // Packets with credits, two exchanges, and two barriers.
    [CREDITS as usize + 8 * WINDOW * size + 2 * 32, CREDITS as usize]
}

impl GroupRegistry {
    fn lock(&self) -> MutexGuard<'_, GroupTable> {
        // No foreign code runs under the lock, so a panic cannot leave the table inconsistent.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Creates a group that all of its members know.
    pub fn create(&self, members: &RankGroup) -> Arc<GroupContext> {
        self.lock().create(members)
    }

    /// Returns the context of a new group, created by the first member that joins.
    pub fn join(&self, birth: Birth, members: &RankGroup) -> Arc<GroupContext> {
        let mut table = self.lock();
        let (context, absent) = match table.pending.remove(&birth) {
            Some(pending) => pending,
            None => (table.create(members), members.size()),
        };
        if absent > 1 {
            table.pending.insert(birth, (context.clone(), absent - 1));
        }
        context
    }

    /// Ends all groups to which a rank belongs, and those that it is yet to join.
    pub fn fail(&self, rank: Rank, why: &str) {
        let mut table = self.lock();
        if table.failed.iter().all(|(failed, _)| *failed != rank) {
            table.failed.push((rank, why.into()));
        }
        table.pending.retain(|_, (context, _)| context.members.position(rank).is_none());
        let groups = table.groups.iter().filter_map(Weak::upgrade);
        groups
            .filter(|context| context.members.position(rank).is_some())
            .for_each(|context| context.close(why));
    }
}

impl GroupTable {
    fn create(&mut self, members: &RankGroup) -> Arc<GroupContext> {
        let size = members.size() as usize;
        // Per sender: its packets of both kinds, the credits that it returns, and control packets:
        // a waiting notice, an acknowledgement and a leave.
        let [collective, direct] = packets_max(size);
        let items_max = size * (collective + direct + 2 * CREDITS as usize + 3);
        let mailboxes = (0..size).map(|_| Mailbox::new(items_max)).collect();
        let context =
            Arc::new(GroupContext { id: self.created, members: members.clone(), mailboxes });
        self.created += 1;
        let failed = self.failed.iter().find(|(rank, _)| members.position(*rank).is_some());
        if let Some((_, why)) = failed {
            context.close(why);
        }
        self.groups.retain(|group| group.strong_count() > 0);
        self.groups.push(Arc::downgrade(&context));
        context
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Position;

    fn members(ranks: &[u32]) -> RankGroup {
        RankGroup::new(&ranks.iter().copied().map(Rank).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn members_of_one_birth_share_a_context_and_no_two_births_do() {
        let registry = GroupRegistry::default();
        let (one, two) = (members(&[4, 1]), members(&[2, 3]));
        let parent = registry.create(&RankGroup::all(5));
        let join = |number, members: &RankGroup| {
            registry.join((parent.id, number, members.rank(Position(0))), members)
        };
        let ids = [join(1, &one), join(1, &two), join(1, &one), join(2, &one), join(1, &two)];
        assert_eq!(ids.map(|context| context.id), [1, 2, 1, 3, 2]);
        // Rank 1 has not joined the last group of rank 4 yet: it finds it there.
        assert_eq!(registry.lock().pending.len(), 1);
        assert_eq!(join(2, &one).id, 3);
        assert!(registry.lock().pending.is_empty());
    }

    #[test]
    fn a_rank_that_fails_ends_its_groups_also_those_that_begin_later() {
        let registry = GroupRegistry::default();
        let [with, without] = [registry.create(&members(&[0, 1])), registry.create(&members(&[2]))];
        registry.fail(Rank(1), "why");
        let later = registry.join((0, 1, Rank(1)), &members(&[1, 2]));
        let is_closed = |context: &GroupContext| context.mailboxes[0].closed().is_some();
        assert!(is_closed(&with) && is_closed(&later) && !is_closed(&without));
        // A group that nobody uses any more is forgotten with the next one.
        drop(without);
        registry.create(&members(&[3]));
        assert_eq!(registry.lock().groups.len(), 3);
    }
}
