//! Nodes that find together, start and lose each other, by seed: any order of arrivals, delays,
//! leaves, crashes, silences and cuts. `POTLUCK_SIM_SEED=n` runs one seed only.

mod network;

use std::cell::Cell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use network::{Incident, MILLISECOND, Network, SECOND, name};
use potluck_core::{Generation, Nanos};
use potluck_net::cluster::{ClusterEnd, ClusterError, Loss, Roster, heartbeat_interval};
use potluck_parallel::sim::queue::Random;

/// Runs `test` for the seeds `0..count`, or for the one of the environment. A seed whose test
/// panics is named.
fn for_seeds(count: u64, test: impl Fn(u64)) {
    let chosen = std::env::var("POTLUCK_SIM_SEED").ok();
    let chosen = chosen.map(|text| text.parse().expect("POTLUCK_SIM_SEED is a number"));
    let seeds = chosen.map_or(0..count, |seed: u64| seed..seed + 1);
    for seed in seeds {
        if catch_unwind(AssertUnwindSafe(|| test(seed))).is_err() {
            panic!("seed {seed} fails: POTLUCK_SIM_SEED={seed} runs it alone");
        }
    }
}

/// Run of one seed before its incidents.
struct Case {
    network: Network,
    nodes: u32,
    node_timeout: Nanos,
    random: Random,
}

impl Case {
    /// Draws a run of 2 to 5 nodes, for which `extra` joiners too many arrive within 2 seconds. A
    /// node may be silent for 0.1 to 60 seconds, short and long times alike.
    fn new(seed: u64, extra: usize) -> Self {
        let mut random = Random::new(seed ^ 0x5eed);
        let nodes = 2 + random.word() % 4;
        let decades = random.up_to(600_000) as f64 / 600_000.0;
        let node_timeout = (0.1 * 600f64.powf(decades) * SECOND as f64) as Nanos;
        let joiners = nodes as usize - 1 + extra;
        let mut network = Network::new(seed, nodes, joiners, node_timeout);
        for joiner in 1..=joiners {
            let at = random.up_to(2 * SECOND);
            network.plan(at, joiner, Incident::Arrive);
        }
        Self { network, nodes, node_timeout, random }
    }

    /// Longest time from a fault to its news at all nodes.
    fn news_within(&self) -> Nanos {
        self.node_timeout + 2 * heartbeat_interval(self.node_timeout)
    }

    fn draw(&mut self, below: usize) -> usize {
        self.random.word() as usize % below
    }

    /// Draws a pair of joined nodes.
    fn joined_pair(&mut self) -> (usize, usize) {
        let one = 1 + self.draw(self.nodes as usize - 1);
        let other = 1 + self.draw(self.nodes as usize - 1);
        (one, other)
    }

    /// Runs until everybody has started, and returns the time.
    fn start(&mut self) -> Nanos {
        self.network.run_until(5 * SECOND);
        for host in 0..self.nodes as usize {
            assert!(self.network.hosts[host].started.is_some(), "{} has not started", name(host));
        }
        self.network.now
    }

    fn rosters(&self) -> Vec<&Roster> {
        let started = self.network.hosts.iter().filter_map(|host| host.started.as_ref());
        started.map(|(_, roster, _)| roster).collect()
    }

    /// Checks what holds in every run, whatever happened.
    fn check(&self) {
        let rosters = self.rosters();
        for pair in rosters.windows(2) {
            assert_eq!(pair[0], pair[1], "two rosters started");
        }
        for (index, host) in self.network.hosts.iter().enumerate() {
            let Some((_, roster, you)) = &host.started else { continue };
            assert_eq!(roster.node(*you).unwrap().host, host.name());
            assert_eq!(roster.nodes.len(), self.nodes as usize);
            let has_ended = host.has_crashed || host.ended.is_some();
            let goes_on = !has_ended && host.left.is_empty();
            assert!(
                !goes_on || host.links + 1 == roster.nodes.len(),
                "{} lacks links",
                name(index)
            );
            assert!(host.losses <= 1, "{} reports {} losses", name(index), host.losses);
        }
        for (index, host) in self.network.hosts.iter().enumerate() {
            for error in &host.errors {
                let is_expected = matches!(error, ClusterError::OverGeneration { .. })
                    || (index == 0 && matches!(error, ClusterError::Refused(_)));
                assert!(is_expected, "{}: {error}", name(index));
            }
        }
    }

    /// Checks that no machine is left in between: each is over, or runs, or waits for people.
    fn check_settled(&self) {
        let hosts = &self.network.hosts;
        let roster = self.rosters().first().copied().cloned();
        for (index, host) in hosts.iter().enumerate() {
            let is_member = roster.as_ref().is_some_and(|roster| {
                roster.nodes.iter().any(|of| of.host == host.name()) && !host.has_crashed
            });
            if is_member && host.started.is_none() {
                assert!(host.ended.is_some(), "{} has not started, others have", name(index));
            }
            if host.has_crashed || host.ended.is_some() || host.started.is_some() {
                continue;
            }
            let Some(shown) = &host.shown else { continue };
            assert!(shown.missing() > 0, "{} waits, and all are here", name(index));
        }
    }
}

/// Tells what happened to a seed that fails.
impl Drop for Case {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for (at, host, incident) in &self.network.planned {
            eprintln!("{at:>12} {}: {incident:?}", name(*host));
        }
        for (index, host) in self.network.hosts.iter().enumerate() {
            let started = host.started.as_ref().map(|(at, ..)| at);
            let (index, ended, errors) = (name(index), &host.ended, &host.errors);
            eprintln!("{index} starts at {started:?}, ends with {ended:?}; errors {errors:?}");
        }
    }
}

fn sentence(end: &Option<(Nanos, ClusterEnd)>) -> String {
    end.as_ref().map(|(_, end)| end.to_string()).unwrap_or_default()
}

#[test]
fn start_has_one_roster_for_all() {
    for_seeds(200, |seed| {
        let extra = seed as usize % 3;
        let mut case = Case::new(seed, extra);
        case.network.run_until(10 * SECOND);
        case.check();
        case.check_settled();
        let hosts = &case.network.hosts;
        let started: Vec<usize> =
            (0..hosts.len()).filter(|&h| hosts[h].started.is_some()).collect();
        assert_eq!(started.len(), case.nodes as usize, "{started:?}");
        assert_eq!(case.rosters()[0].generation, Generation(5));
        let names: Vec<String> = case.rosters()[0].nodes.iter().map(|of| of.host.clone()).collect();
        for (index, host) in hosts.iter().enumerate().filter(|(h, _)| !started.contains(h)) {
            let why = sentence(&host.ended);
            let (list, count) = (names.join(", "), names.len());
            let full = format!("this run is of {count} nodes, and all are here: {list}");
            let late = format!(
                "{} comes too late: this run has started with its {count} nodes, {list}",
                name(index)
            );
            assert!(why == full || why == late, "{why}");
            assert!(hosts[0].turned_away.contains(&why));
        }
        for &host in &started {
            assert!(hosts[host].ended.is_none(), "{}", sentence(&hosts[host].ended));
            let peers = if host == 0 { case.nodes as usize - 1 } else { 1 };
            assert_eq!(hosts[host].links, names.len() - 1, "links of {}", name(host));
            assert_eq!(hosts[host].beating.len(), peers, "heartbeats of {}", name(host));
        }
    });
}

#[test]
fn node_gone_before_start_frees_place() {
    let (again, later) = (Cell::new(0), Cell::new(0));
    for_seeds(200, |seed| {
        let leavers = 1 + seed as usize % 2;
        let mut case = Case::new(seed, leavers);
        for leaver in 1..=leavers {
            let at = case.random.up_to(2200 * MILLISECOND);
            let incident = match case.draw(3) {
                0 => Incident::Leave,
                kind => Incident::Crash { is_seen: kind == 1 },
            };
            case.network.plan(at, leaver, incident);
        }
        case.network.run_until(30 * SECOND + 2 * case.node_timeout);
        case.check();
        case.check_settled();
        let hosts = &case.network.hosts;
        if let Some((_, roster, _)) = &hosts[0].started {
            again.set(again.get() + 1);
            later.set(later.get() + u32::from(roster.generation > Generation(5)));
            return;
        }
        let why = sentence(&hosts[0].ended);
        assert!(hosts[0].ended.is_none(), "the start ends for all: {why}");
        let mut here = BTreeSet::new();
        for host in hosts.iter().filter(|host| host.ended.is_none() && !host.has_crashed) {
            here.insert(host.name());
        }
        let shown = hosts[0].shown.as_ref().unwrap().here.iter().map(|of| of.host.clone());
        assert_eq!(shown.collect::<BTreeSet<_>>(), here);
    });
    if std::env::var("POTLUCK_SIM_SEED").is_err() {
        let (again, later) = (again.get(), later.get());
        assert!(again > 50 && later > 0, "{again} started, {later} in a later generation");
    }
}

/// So it is under a supervisor: what was killed comes back at once, while nobody knows yet that it
/// was gone.
#[test]
fn joiner_restarted_takes_part() {
    let replaced = Cell::new(0);
    for_seeds(400, |seed| {
        let mut case = Case::new(seed, 0);
        case.network.is_patient = true;
        let victim = 1 + case.draw(case.nodes as usize - 1);
        let successor = case.network.successor_of(victim);
        let killed_at = case.random.up_to(2 * SECOND);
        case.network.plan(killed_at, victim, Incident::Crash { is_seen: false });
        let again_at = killed_at + case.random.up_to(10 * SECOND);
        case.network.plan(again_at, successor, Incident::Arrive);
        case.network.run_until(again_at + 40 * SECOND);
        case.check();
        let hosts = &case.network.hosts;
        let why = sentence(&hosts[0].ended);
        let Some((at, ..)) = &hosts[0].started else { panic!("the run has not started: {why}") };
        replaced.set(replaced.get() + u32::from(*at > killed_at));
    });
    if std::env::var("POTLUCK_SIM_SEED").is_err() {
        assert!(replaced.get() > 200, "{} started with the successor", replaced.get());
    }
}

#[test]
fn node_lost_is_named_to_all_in_time() {
    for_seeds(200, |seed| {
        let mut case = Case::new(seed, 0);
        let began = case.start();
        let victim = case.draw(case.nodes as usize);
        let at = began + case.random.up_to(2 * SECOND);
        let incident = match case.draw(3) {
            0 => Incident::Freeze { nanos: 3 * case.node_timeout },
            kind => Incident::Crash { is_seen: kind == 1 },
        };
        case.network.plan(at, victim, incident);
        case.network.run_until(at + case.news_within());
        case.check();
        for (index, host) in case.network.hosts.iter().enumerate() {
            if index != victim {
                let Some((_, ClusterEnd::Lost { loss: Loss::Node { node, .. }, why })) =
                    &host.ended
                else {
                    panic!("{} ends with {:?}", name(index), host.ended);
                };
                let lost = format!("{node} ({}) is lost: it", name(victim));
                assert!(why.starts_with(&lost), "{} of {}: {why}", name(index), name(victim));
                assert_eq!(host.losses, 1);
            }
        }
        case.network.run_until(at + 4 * case.node_timeout);
        let host = &case.network.hosts[victim];
        assert!(host.has_crashed || host.ended.is_some(), "{} never learns", name(victim));
    });
}

#[test]
fn cut_between_live_nodes_names_both() {
    for_seeds(200, |seed| {
        let mut case = Case::new(seed, 0);
        let (one, other) = case.joined_pair();
        if one == other {
            return;
        }
        let at = case.start();
        case.network.plan(at, one, Incident::Cut { other });
        case.network.run_until(at + case.news_within());
        case.check();
        for (index, host) in case.network.hosts.iter().enumerate() {
            let Some((_, ClusterEnd::Lost { loss: Loss::Link { .. }, why })) = &host.ended else {
                panic!("{} ends with {:?}", name(index), host.ended);
            };
            for end in [one, other] {
                assert!(why.contains(&format!("({})", name(end))), "{why}");
            }
        }
    });
}

#[test]
fn silence_short_is_no_loss() {
    for_seeds(200, |seed| {
        let mut case = Case::new(seed, 0);
        let at = case.start();
        let victim = case.draw(case.nodes as usize);
        let nanos = case.node_timeout - 2 * heartbeat_interval(case.node_timeout);
        case.network.plan(at, victim, Incident::Freeze { nanos });
        case.network.run_until(at + 3 * case.node_timeout);
        case.check();
        for host in &case.network.hosts {
            assert!(host.ended.is_none(), "{}", sentence(&host.ended));
        }
    });
}

#[test]
fn pair_without_way_is_named_to_all() {
    for_seeds(200, |seed| {
        let mut case = Case::new(seed, 0);
        let (one, other) = case.joined_pair();
        if one == other {
            return;
        }
        case.network.blocked.insert((one.min(other), one.max(other)));
        case.network.run_until(15 * SECOND);
        case.check();
        for (index, host) in case.network.hosts.iter().enumerate() {
            let why = sentence(&host.ended);
            assert!(host.started.is_none() && !why.is_empty(), "{} waits", name(index));
            for end in [one, other] {
                assert!(why.contains(&format!("({})", name(end))), "{why}");
                assert!(why.contains(&network::address(end).to_string()), "{why}");
            }
            assert!(why.contains("UDP"), "{why}");
        }
    });
}

#[test]
fn node_left_after_start_is_no_loss() {
    for_seeds(200, |seed| {
        let mut case = Case::new(seed, 0);
        let at = case.start();
        let leaver = case.draw(case.nodes as usize);
        case.network.plan(at, leaver, Incident::Leave);
        case.network.run_until(at + 3 * case.node_timeout);
        case.check();
        for (index, host) in case.network.hosts.iter().enumerate() {
            assert_eq!(host.losses, 0, "{}", name(index));
            if index == leaver || leaver == 0 {
                assert_eq!(sentence(&host.ended), "somebody pressed Ctrl+C");
            } else if case.nodes == 2 {
                assert_eq!(sentence(&host.ended), "all other nodes have left");
            } else {
                assert!(host.ended.is_none(), "{}: {}", name(index), sentence(&host.ended));
                assert_eq!(host.left.len(), 1);
            }
        }
    });
}

#[test]
fn machines_never_wait_whatever_happens() {
    for_seeds(600, |seed| {
        let mut case = Case::new(seed, seed as usize % 2);
        for _ in 0..1 + case.draw(3) {
            let victim = case.draw(case.network.hosts.len());
            let at = case.random.up_to(4 * SECOND);
            let incident = match case.draw(6) {
                0 => Incident::Leave,
                1 => Incident::Cut { other: case.draw(case.network.hosts.len()) },
                2 => Incident::Freeze { nanos: 3 * case.random.up_to(case.node_timeout * 2 / 3) },
                kind => Incident::Crash { is_seen: kind < 5 },
            };
            case.network.plan(at, victim, incident);
        }
        let settled = case.network.quiet_from + 30 * SECOND + 2 * case.node_timeout;
        case.network.run_until(settled);
        case.check();
        case.check_settled();
    });
}
