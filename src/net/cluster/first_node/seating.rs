//! Numbers of the joined nodes: first the requested ones, then the former ones of a resumed run,
//! then by arrival.

use super::{FirstNode, Joiner};
use crate::cluster::hello::Hello;

/// Node in the record of a run that is resumed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormerNode {
    pub host: String,
    /// Identities of its devices, by [`identity_hash`](crate::cluster::identity_hash).
    pub identities: Vec<u64>,
}

impl FirstNode {
    /// Brings the joiners into the order of their numbers.
    pub(super) fn seat_joiners(&mut self) {
        let greetings: Vec<&Hello> = self.joiners.iter().map(|joiner| &joiner.hello).collect();
        let seats = seats(&greetings, self.options.before.get(1..).unwrap_or_default());
        let mut standing: Vec<Option<Joiner>> =
            std::mem::take(&mut self.joiners).into_iter().map(Some).collect();
        for index in seats {
            self.joiners.extend(standing[index].take());
        }
    }
}

/// Returns the indices of the joiners in the order of their numbers, from 1 on. `before` are the
/// former nodes from number 1 on.
fn seats(joiners: &[&Hello], before: &[FormerNode]) -> Vec<usize> {
    let mut seats: Vec<Option<usize>> = vec![None; joiners.len()];
    let mut standing: Vec<usize> = Vec::new();
    for (index, hello) in joiners.iter().enumerate() {
        // Joiners are numbered from 1 on.
        if let Some(place) = hello.place
            && let Some(at) = place.index().checked_sub(1)
            && let Some(seat) = seats.get_mut(at)
            && seat.is_none()
        {
            *seat = Some(index);
        } else {
            standing.push(index);
        }
    }
    // First the same node, then a node with the same devices, on which the bits depend, then one on
    // the same host.
    let likenesses: [fn(&Hello, &FormerNode) -> bool; 3] = [
        |hello, former| hello.host == former.host && hello.identities == former.identities,
        |hello, former| hello.identities == former.identities,
        |hello, former| hello.host == former.host,
    ];
    for is_like in likenesses {
        for (seat, former) in seats.iter_mut().zip(before) {
            if seat.is_some() {
                continue;
            }
            let found = standing.iter().position(|&index| is_like(joiners[index], former));
            if let Some(found) = found {
                *seat = Some(standing.remove(found));
            }
        }
    }
    // The rest take the free numbers.
    let mut standing = standing.into_iter();
    let mut order = Vec::with_capacity(joiners.len());
    for seat in seats {
        order.extend(seat.or_else(|| standing.next()));
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::testing::hello;
    use potluck_core::NodeRank;

    fn node(host: &str, identities: &[u64]) -> Hello {
        Hello { identities: identities.into(), ..hello(host) }
    }

    fn seated(joiners: &[Hello], before: &[(&str, &[u64])]) -> Vec<usize> {
        let joiners: Vec<&Hello> = joiners.iter().collect();
        let mut former = Vec::new();
        for (host, identities) in before {
            former.push(FormerNode { host: (*host).into(), identities: (*identities).into() });
        }
        seats(&joiners, &former)
    }

    #[test]
    fn nodes_that_come_back_in_another_order_get_their_numbers() {
        let before: &[(&str, &[u64])] = &[("beta", &[1, 2]), ("gamma", &[3]), ("beta", &[4])];
        let joiners = [node("gamma", &[3]), node("beta", &[4]), node("beta", &[1, 2])];
        assert_eq!(seated(&joiners, before), [2, 0, 1]);
        // Names of pods change; the devices count.
        let joiners = [node("pod-9", &[3]), node("pod-8", &[4]), node("pod-7", &[1, 2])];
        assert_eq!(seated(&joiners, before), [2, 0, 1]);
        // One has other devices now, and is known by its host.
        let joiners = [node("gamma", &[7]), node("beta", &[4]), node("beta", &[1, 2])];
        assert_eq!(seated(&joiners, before), [2, 0, 1]);
    }

    #[test]
    fn others_sit_in_the_order_of_their_arrival() {
        let new = [node("gamma", &[3]), node("beta", &[4]), node("beta", &[1, 2])];
        assert_eq!(seated(&new, &[]), [0, 1, 2]);
        let before: &[(&str, &[u64])] = &[("delta", &[9]), ("beta", &[4])];
        assert_eq!(seated(&new, before), [0, 1, 2]);
        // A run of more nodes before.
        let before: &[(&str, &[u64])] = &[("a", &[8]), ("b", &[9]), ("c", &[7]), ("beta", &[4])];
        assert_eq!(seated(&new, before), [0, 1, 2]);
    }

    #[test]
    fn numbers_that_are_asked_for_come_first() {
        let mut joiners = [node("gamma", &[3]), node("beta", &[4]), node("delta", &[5])];
        joiners[0].place = Some(NodeRank(3));
        assert_eq!(seated(&joiners, &[]), [1, 2, 0]);
        let before: &[(&str, &[u64])] = &[("gamma", &[3]), ("delta", &[5]), ("beta", &[4])];
        assert_eq!(seated(&joiners, before), [1, 2, 0]);
    }
}
