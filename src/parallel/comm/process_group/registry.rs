//! Registry of the groups that descend from one call of [`super::init`]: connects the members of a
//! new group, and ends all groups of a rank that fails.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Weak};

use super::limits::{CREDITS, WINDOW};
use super::packet::{Packet, PacketKind};
use super::payload::Pools;
use super::remote_process::RemoteProcess;
use crate::collective::RankGroup;
use crate::comm::Mailbox;
use potluck_core::rng::threefry2x32;
use potluck_core::{Lock, Position, Rank};

#[derive(Clone)]
pub(crate) enum MemberAddress {
    /// Mailbox of a rank of this process.
    Here(Mailbox<Packet>),
    There(Arc<RemoteProcess>),
}

/// Addresses of one group, whose mailboxes no other group uses: so packets of different groups
/// never meet.
pub(crate) struct GroupContext {
    /// Number of the group, equal in all processes.
    pub id: u64,
    pub members: RankGroup,
    /// By position.
    pub addresses: Vec<MemberAddress>,
}

impl GroupContext {
    /// Closes all mailboxes: the calls of all members of this process fail with this reason.
    pub fn close(&self, why: &str) {
        for mailbox in self.mailboxes() {
            mailbox.close(why);
        }
    }

    fn mailboxes(&self) -> impl Iterator<Item = &Mailbox<Packet>> {
        self.addresses.iter().filter_map(|address| match address {
            MemberAddress::Here(mailbox) => Some(mailbox),
            MemberAddress::There(_) => None,
        })
    }

    /// Returns the mailbox of a member; `None` for one of another process.
    pub fn mailbox(&self, position: Position) -> Option<&Mailbox<Packet>> {
        match &self.addresses[position.index()] {
            MemberAddress::Here(mailbox) => Some(mailbox),
            MemberAddress::There(_) => None,
        }
    }
}

/// Identity of a group before it has a context, equal on all of its members: the parent group's
/// id, the number of the parent's collective that creates it, and its first member.
pub(crate) type GroupKey = (u64, u64, Rank);

/// Returns the number of a group, which every process computes for itself: 64 mixed bits, so that
/// two groups practically never have the same.
fn id_of(birth: GroupKey) -> u64 {
    let (parent, number, first) = birth;
    let parent = [parent as u32, (parent >> 32) as u32];
    let number = [number as u32, (number >> 32) as u32];
    let mixed = threefry2x32(threefry2x32(parent, number), [first.0, 1]);
    u64::from(mixed[0]) | u64::from(mixed[1]) << 32
}

/// Groups of a registry, and the failures of their ranks.
#[derive(Default)]
struct GroupTable {
    groups: Vec<Weak<GroupContext>>,
    /// Groups that some members have not joined yet, with the number of these members.
    pending: HashMap<GroupKey, (Arc<GroupContext>, u32)>,
    /// Ranks that have failed, with the reason.
    failed: Vec<(Rank, String)>,
    /// Set once all groups are over, with the reason.
    ended: Option<String>,
}

/// Groups of the ranks of one [`super::init`], or of the ranks of this process.
#[derive(Default)]
pub(crate) struct GroupRegistry {
    table: Lock<GroupTable>,
    /// Other processes of the groups.
    others: Vec<Arc<RemoteProcess>>,
    /// Buffers of values that arrive from them.
    pools: Pools,
}

/// Returns the maximum number of packets from one member that may wait for another, in a group of
/// this size: of collectives, and of sends.
pub(crate) fn packets_max(size: usize) -> [usize; 2] {
    // Packets with credits, two exchanges, and two barriers.
    [CREDITS as usize + 8 * WINDOW * size + 2 * 32, CREDITS as usize]
}

impl GroupRegistry {
    /// Creates the registry of a process beside others.
    pub fn over(others: Vec<Arc<RemoteProcess>>) -> Self {
        Self { others, ..Self::default() }
    }

    pub(crate) fn spans_processes(&self) -> bool {
        !self.others.is_empty()
    }

    /// Returns the buffers of values that arrive.
    pub fn pools(&self) -> &Pools {
        &self.pools
    }

    /// Creates the group of all ranks.
    pub fn create(&self, members: &RankGroup) -> Arc<GroupContext> {
        self.table.lock().create(0, members, &self.others)
    }

    /// Returns the group of this number, if a rank of this process has a handle on it.
    pub fn find(&self, id: u64) -> Option<Arc<GroupContext>> {
        let table = self.table.lock();
        table.groups.iter().filter_map(Weak::upgrade).find(|context| context.id == id)
    }

    /// Returns the context of a new group, created by the first member that joins.
    pub fn join(&self, birth: GroupKey, members: &RankGroup) -> Arc<GroupContext> {
        let mut table = self.table.lock();
        let (context, absent) = match table.pending.remove(&birth) {
            Some(pending) => pending,
            None => {
                let context = table.create(id_of(birth), members, &self.others);
                let here = context.mailboxes().count() as u32;
                (context, here)
            }
        };
        if absent > 1 {
            table.pending.insert(birth, (context.clone(), absent - 1));
        }
        context
    }

    pub(crate) fn is_elsewhere(&self, rank: Rank) -> bool {
        self.others.iter().any(|other| other.ranks.contains(&rank.0))
    }

    /// Ends all present and future groups of a rank, in all processes; once for each rank.
    pub fn fail(&self, rank: Rank, why: &str) {
        if self.fail_here(rank, why) {
            for other in &self.others {
                other.send_abort(rank, why);
            }
        }
    }

    /// Ends all groups of a rank of another process after a report of its failure, and passes the
    /// report on to the processes of other ranks. They come first: a rank of this process that
    /// learns of the failure may end the process, and with it the links.
    pub(crate) fn fail_elsewhere(&self, rank: Rank, why: &str) {
        if self.table.lock().failed.iter().any(|(failed, _)| *failed == rank) {
            return;
        }
        for other in &self.others {
            if !other.ranks.contains(&rank.0) {
                other.send_abort(rank, why);
            }
        }
        self.fail_here(rank, why);
    }

    /// Ends all groups of this process with a rank as member; returns false if the failure is
    /// known.
    pub(crate) fn fail_here(&self, rank: Rank, why: &str) -> bool {
        let mut table = self.table.lock();
        let is_new = table.failed.iter().all(|(failed, _)| *failed != rank);
        if is_new {
            table.failed.push((rank, why.into()));
        }
        table.pending.retain(|_, (context, _)| context.members.position(rank).is_none());
        for context in table.groups.iter().filter_map(Weak::upgrade) {
            if context.members.position(rank).is_some() {
                context.close(why);
            }
        }
        is_new
    }

    /// Reports the leave of all ranks of another process to the members of this one.
    pub fn process_left(&self, ranks: &Range<u32>) {
        // Sent outside the lock, as all packets are.
        let groups: Vec<_> = self.table.lock().groups.iter().filter_map(Weak::upgrade).collect();
        for context in &groups {
            for (from, rank) in context.members.iter() {
                if !ranks.contains(&rank.0) {
                    continue;
                }
                for mailbox in context.mailboxes() {
                    // A closed mailbox needs no packet; a full one is closed by it, which its rank
                    // reports.
                    let kind = PacketKind::Left { panicked: false };
                    let _ = mailbox.send(Packet { from, kind });
                }
            }
        }
    }

    /// Ends all groups of this process, also later ones.
    pub fn end(&self, why: &str) {
        let mut table = self.table.lock();
        table.ended.get_or_insert_with(|| why.into());
        table.pending.clear();
        for context in table.groups.iter().filter_map(Weak::upgrade) {
            context.close(why);
        }
    }

    /// Returns true if a rank has failed, or if all groups were ended.
    pub fn has_failed(&self) -> bool {
        let table = self.table.lock();
        table.ended.is_some() || !table.failed.is_empty()
    }
}

impl GroupTable {
    fn create(
        &mut self,
        id: u64,
        members: &RankGroup,
        others: &[Arc<RemoteProcess>],
    ) -> Arc<GroupContext> {
        let size = members.size() as usize;
        // Per sender: its packets of both kinds, the credits that it returns, and control packets:
        // a waiting notice, an acknowledgement, and a leave of the rank and one of its process.
        let [collective, direct] = packets_max(size);
        let items_max = size * (collective + direct + 2 * CREDITS as usize + 4);
        let mut addresses = Vec::with_capacity(size);
        for (_, rank) in members.iter() {
            let other = others.iter().find(|other| other.ranks.contains(&rank.0));
            addresses.push(match other {
                Some(other) => MemberAddress::There(other.clone()),
                None => MemberAddress::Here(Mailbox::new(items_max)),
            });
        }
        let context = Arc::new(GroupContext { id, members: members.clone(), addresses });
        let failed = self.failed.iter().find(|(rank, _)| members.position(*rank).is_some());
        if let Some(why) = &self.ended {
            context.close(why);
        } else if let Some((_, why)) = failed {
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
    use potluck_core::Position;

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
        let [a, b, c] = [0, 1, 3].map(|at: usize| ids[at].id);
        assert_eq!(ids.map(|context| context.id), [a, b, a, c, b]);
        assert!(a != b && b != c && a != c && a != parent.id);
        // Rank 1 has not joined the last group of rank 4 yet: it finds it there.
        assert_eq!(registry.table.lock().pending.len(), 1);
        assert_eq!(join(2, &one).id, c);
        assert!(registry.table.lock().pending.is_empty());
    }

    #[test]
    fn a_rank_that_fails_ends_its_groups_also_those_that_begin_later() {
        let registry = GroupRegistry::default();
        let [with, without] = [registry.create(&members(&[0, 1])), registry.create(&members(&[2]))];
        registry.fail(Rank(1), "why");
        let later = registry.join((0, 1, Rank(1)), &members(&[1, 2]));
        let is_closed =
            |context: &GroupContext| context.mailboxes().all(|of| of.closed().is_some());
        assert!(is_closed(&with) && is_closed(&later) && !is_closed(&without));
        // A group without users is removed when the next one is created.
        drop(without);
        registry.create(&members(&[3]));
        assert_eq!(registry.table.lock().groups.len(), 3);
    }
}
