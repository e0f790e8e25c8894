//! Tests of shares that follow the speed of simulated devices.

use super::*;

const FREE: ShareLimits = ShareLimits { micro_batch: 256, rows_min: 1 };

/// Devices with a time per sample and per step, and noise.
struct Devices {
    row_s: Vec<f64>,
    fixed_s: f64,
    /// Largest relative deviation of a step.
    noise: f64,
    random: u64,
}

impl Devices {
    fn equal(count: usize) -> Self {
        Self { row_s: vec![1e-3; count], fixed_s: 0.0, noise: 0.0, random: 1 }
    }

    /// Pseudo-random number from -1 to 1.
    fn next(&mut self) -> f64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.random >> 33) as f64 / f64::from(1u32 << 30) - 1.0
    }

    fn step(&mut self, shares: &[u32]) -> StepSeconds {
        let mut work_s = Vec::new();
        for (rank, share) in shares.iter().enumerate() {
            let seconds = self.fixed_s + self.row_s[rank] * f64::from(*share);
            work_s.push(seconds * (1.0 + self.noise * self.next()));
        }
        let slowest_s = work_s.iter().copied().fold(0.0, f64::max);
        StepSeconds { step_s: slowest_s + 1e-3, work_s }
    }

    /// Speed of a step by the sum of the speeds.
    fn part_of_sum(&self, shares: &[u32]) -> f64 {
        let sum: f64 = self.row_s.iter().map(|row_s| 1.0 / row_s).sum();
        let mut slowest_s: f64 = 0.0;
        for (share, row_s) in shares.iter().zip(&self.row_s) {
            slowest_s = slowest_s.max(f64::from(*share) * row_s);
        }
        f64::from(shares.iter().sum::<u32>()) / slowest_s / sum
    }
}

/// Takes steps, and returns the changes with the steps after which they came.
fn run(balancer: &mut ShareBalancer, devices: &mut Devices, steps: u64) -> Vec<(u64, Vec<u32>)> {
    let mut changes = Vec::new();
    for step in 1..=steps {
        let shares = balancer.shares.clone();
        balancer.observe(devices.step(&shares));
        if let Some(proposed) = balancer.propose() {
            balancer.change_to(proposed.shares.clone());
            changes.push((step, proposed.shares));
        }
    }
    changes
}

fn balancer(shares: &[u32]) -> ShareBalancer {
    ShareBalancer::new(shares.to_vec(), vec![FREE; shares.len()])
}

#[test]
fn equal_devices_with_noise_keep_shares() {
    for seed in 1..200 {
        for batch in [8, 96] {
            let mut devices = Devices { noise: 0.05, random: seed, ..Devices::equal(2) };
            let mut balancer = balancer(&[batch / 2, batch / 2]);
            let changes = run(&mut balancer, &mut devices, 500);
            assert!(changes.is_empty(), "seed {seed}, batch {batch}: {changes:?}");
        }
    }
}

#[test]
fn device_of_half_speed_gets_its_share() {
    for seed in 1..50 {
        let mut devices = Devices { noise: 0.05, random: seed, ..Devices::equal(2) };
        let mut balancer = balancer(&[48, 48]);
        assert!(run(&mut balancer, &mut devices, 29).is_empty());
        devices.row_s[1] *= 2.0;
        let changes = run(&mut balancer, &mut devices, 60);
        assert!((1..=2).contains(&changes.len()), "seed {seed}: {changes:?}");
        let part = devices.part_of_sum(&balancer.shares);
        assert!(part >= 0.92, "seed {seed}: {part} of the sum, {changes:?}");
        assert!(changes[0].0 <= 20, "seed {seed}: {changes:?}");
    }
}

#[test]
fn device_of_old_speed_regains_share() {
    let mut devices = Devices { noise: 0.02, ..Devices::equal(2) };
    let mut balancer = balancer(&[48, 48]);
    run(&mut balancer, &mut devices, 30);
    devices.row_s[1] *= 2.0;
    run(&mut balancer, &mut devices, 60);
    assert!(balancer.shares[1] < 36, "{:?}", balancer.shares);
    devices.row_s[1] /= 2.0;
    run(&mut balancer, &mut devices, 60);
    assert!(devices.part_of_sum(&balancer.shares) >= 0.95, "{:?}", balancer.shares);
}

#[test]
fn shares_do_not_oscillate() {
    // A sample is much of a share, and the time that no sample takes is not known.
    for (batch, fixed_s) in [(5, 0.0), (7, 2e-3), (12, 10e-3), (96, 30e-3)] {
        for slower in [1.3, 1.7, 2.0, 4.0] {
            let mut devices = Devices { fixed_s, noise: 0.03, ..Devices::equal(3) };
            devices.row_s[2] *= slower;
            let third = batch / 3;
            let mut balancer = balancer(&[batch - 2 * third, third, third]);
            let changes = run(&mut balancer, &mut devices, 3000);
            let what = format!("batch {batch}, {fixed_s} s fixed, slower {slower}");
            assert!(changes.len() <= 4, "{what}: {changes:?}");
            let mut seen: Vec<_> = changes.iter().map(|(_, shares)| shares).collect();
            seen.sort();
            seen.dedup();
            assert_eq!(seen.len(), changes.len(), "{what}: {changes:?}");
        }
    }
}

#[test]
fn device_fast_and_slow_in_turn_is_followed_rarely() {
    let mut devices = Devices::equal(2);
    let mut balancer = balancer(&[48, 48]);
    let mut changes = 0;
    for turn in 0..100 {
        devices.row_s[1] = if turn % 2 == 0 { 1e-3 } else { 1.3e-3 };
        changes += run(&mut balancer, &mut devices, 30).len();
    }
    assert!((1..=20).contains(&changes), "{changes} changes in 3,000 steps");
}

#[test]
fn changes_are_25_steps_apart() {
    let mut devices = Devices { fixed_s: 40e-3, ..Devices::equal(2) };
    devices.row_s[1] *= 8.0;
    let mut balancer = balancer(&[96, 96]);
    let changes = run(&mut balancer, &mut devices, 200);
    assert_eq!(changes[0].0, 20);
    assert!(changes.len() > 1, "{changes:?}");
    for pair in changes.windows(2) {
        assert!(pair[1].0 - pair[0].0 >= STEPS_BETWEEN, "{changes:?}");
    }
}

#[test]
fn gain_of_less_than_3_percent_changes_nothing() {
    let changes = |slower: f64| {
        let mut devices = Devices::equal(2);
        devices.row_s[1] *= slower;
        run(&mut balancer(&[100, 100]), &mut devices, 300).len()
    };
    assert_eq!((changes(1.03), changes(1.1)), (0, 1));
    // The gain counts by the whole step, most of which may be a wait for the network.
    let mut waiting = balancer(&[100, 100]);
    for _ in 0..60 {
        waiting.observe(StepSeconds { step_s: 2.0, work_s: vec![0.1, 0.15] });
        assert_eq!(waiting.propose(), None);
    }
}

#[test]
fn each_rank_keeps_least_samples() {
    let mut devices = Devices::equal(2);
    devices.row_s[1] *= 1000.0;
    let mut alone = balancer(&[4, 4]);
    run(&mut alone, &mut devices, 100);
    assert_eq!(alone.shares, [7, 1]);
    let limits = vec![ShareLimits { micro_batch: 64, rows_min: 8 }; 2];
    let mut normalized = ShareBalancer::new(vec![20, 20], limits.clone());
    run(&mut normalized, &mut devices, 100);
    assert_eq!(normalized.shares, [32, 8]);
    // A rank that has fewer from the start keeps those.
    let mut few = ShareBalancer::new(vec![20, 4], limits);
    run(&mut few, &mut devices, 100);
    assert_eq!(few.shares, [20, 4]);
}

#[test]
fn micro_batches_of_batch_norm_do_not_shrink() {
    // 20 samples in micro-batches of at most 9 would be three of 6 or 7.
    let limits = vec![ShareLimits { micro_batch: 9, rows_min: 8 }; 2];
    let mut balancer = ShareBalancer::new(vec![16, 16], limits);
    let mut devices = Devices::equal(2);
    devices.row_s[1] *= 20.0 / 12.0;
    assert_eq!(run(&mut balancer, &mut devices, 100), []);
}

#[test]
fn proposal_says_what_changed_and_what_it_gains() {
    let mut devices = Devices::equal(2);
    let mut balancer = balancer(&[48, 48]);
    run(&mut balancer, &mut devices, 30);
    devices.row_s[1] *= 2.0;
    for _ in 0..WINDOW {
        balancer.observe(devices.step(&[48, 48]));
    }
    let proposed = balancer.propose().unwrap();
    assert_eq!(proposed.shares, [64, 32]);
    assert_eq!(proposed.cause, Some(ChangedSpeed { rank: 1, is_slower: true }));
    assert!((proposed.step_s - 0.097).abs() < 1e-9, "{proposed:?}");
    assert!((proposed.predicted_s - 0.065).abs() < 1e-9, "{proposed:?}");
    balancer.change_to(proposed.shares);
    for _ in 0..30 {
        let shares = balancer.shares.clone();
        balancer.observe(devices.step(&shares));
    }
    devices.row_s[1] /= 2.0;
    for _ in 0..WINDOW {
        balancer.observe(devices.step(&[64, 32]));
    }
    let back = balancer.propose().unwrap();
    assert_eq!(back.cause, Some(ChangedSpeed { rank: 1, is_slower: false }));
    // Shares that never fitted have no such cause.
    let mut wrong = ShareBalancer::new(vec![24, 72], vec![FREE; 2]);
    for _ in 0..WINDOW {
        wrong.observe(devices.step(&[24, 72]));
    }
    assert_eq!(wrong.propose().unwrap().cause, None);
}

#[test]
fn forgotten_steps_do_not_count() {
    let mut devices = Devices::equal(2);
    devices.row_s[1] *= 2.0;
    let mut balancer = balancer(&[48, 48]);
    for _ in 0..WINDOW {
        balancer.observe(devices.step(&[48, 48]));
    }
    assert!(balancer.propose().is_some());
    balancer.forget_steps();
    for _ in 1..WINDOW {
        balancer.observe(devices.step(&[48, 48]));
    }
    assert_eq!(balancer.propose(), None);
    balancer.observe(devices.step(&[48, 48]));
    assert!(balancer.propose().is_some());
}
