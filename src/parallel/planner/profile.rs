//! Profile of the devices and links of a plan: the times of a model's blocks, transfers, updates
//! and memory, as measured or as computed from data sheets. It is all that a plan depends on,
//! besides the model and the request.

use serde::{Deserialize, Serialize};

use super::balance::ThroughputModel;
use super::cut::BlockTimes;
use crate::sim::LinkModel;

/// Number of the node that sends the inputs.
pub const FIRST_NODE: u32 = 0;

/// Times of the passes of one block on one device, as a line over the samples of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockSpeed {
    /// Seconds of a micro-batch of any size.
    pub fixed: BlockTimes,
    /// Seconds of each sample.
    pub per_row: BlockTimes,
}

impl BlockSpeed {
    /// Returns the [`line()`] of each pass through the times of two micro-batches.
    pub fn through(few: u32, of_few: BlockTimes, many: u32, of_many: BlockTimes) -> Self {
        let forward = line(few, of_few.forward_s, many, of_many.forward_s);
        let input = line(few, of_few.backward_input_s, many, of_many.backward_input_s);
        let weight = line(few, of_few.backward_weight_s, many, of_many.backward_weight_s);
        let times = |at: usize| BlockTimes {
            forward_s: forward[at],
            backward_input_s: input[at],
            backward_weight_s: weight[at],
        };
        Self { fixed: times(0), per_row: times(1) }
    }

    /// Returns the times in proportion to the samples, from those of a micro-batch of `rows`.
    pub fn in_proportion(rows: u32, times: BlockTimes) -> Self {
        let none = BlockTimes { forward_s: 0.0, backward_input_s: 0.0, backward_weight_s: 0.0 };
        Self { fixed: none, per_row: times.scaled(1.0 / f64::from(rows.max(1))) }
    }

    /// Returns the times of a micro-batch of `rows` samples.
    pub fn at(&self, rows: u32) -> BlockTimes {
        self.fixed.plus(self.per_row.scaled(f64::from(rows)))
    }
}

/// Returns the fixed seconds and the seconds per sample of a line through the times of two
/// micro-batches, the second of which has more samples; in proportion to one if it has not. By
/// noise, the smaller one may be slower than the larger one, or faster than its part of it: neither
/// part of the line is negative, and a sample takes at least half of the larger one's mean.
pub fn line(few: u32, few_s: f64, many: u32, many_s: f64) -> [f64; 2] {
    let per_row = many_s / f64::from(many.max(1));
    if many <= few {
        return [0.0, per_row];
    }
    let slope = ((many_s - few_s) / f64::from(many - few)).clamp(0.5 * per_row, per_row);
    [(many_s - slope * f64::from(many)).max(0.0), slope]
}

/// Profile of a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceProfile {
    /// Display name.
    pub name: String,
    /// Number of its kind: devices of one kind and node are interchangeable.
    pub kind: usize,
    /// Number of its node.
    pub node: u32,
    /// Whether the node's processor computes for it, which so has less time while the network takes
    /// some.
    pub is_on_host: bool,
    /// Times of each block of the model, undivided; infinite for one that the device cannot run.
    pub blocks: Vec<BlockSpeed>,
    /// Seconds to load one sample.
    pub load_row_s: f64,
    /// Seconds to update one parameter.
    pub update_element_s: f64,
    /// Readback from the device, and upload to it.
    pub read_back: LinkModel,
    pub upload: LinkModel,
    /// Additions of gradients on the host, by the device's ring thread.
    pub host: LinkModel,
    /// Processor or memory that it shares with other devices, if any.
    pub shares: Option<SharedProcessor>,
    /// Bytes of memory for a run; `None` if unknown, or if the host's memory decides.
    pub memory: Option<u64>,
    /// Most samples of a micro-batch of the whole model, if that was measured: larger ones lack
    /// memory, or are slower per sample.
    pub micro_batch: Option<u32>,
    /// Blocks that the device cannot run.
    pub refusals: Vec<BlockRefusal>,
}

/// Block that a device cannot run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockRefusal {
    /// Index of the block in the graph.
    pub block: u32,
    pub reason: String,
}

/// Processor that computes for several devices.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SharedProcessor {
    /// Number of the processor.
    pub number: u32,
    /// Factor by which the passes of this device take longer while all devices of the processor
    /// compute. Samples, cuts and tensor shares are divided by it; the step of a layout counts the
    /// part of it in which the others are busy.
    pub slowdown: f64,
}

/// Profile of all devices and the links between their nodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanProfile {
    pub devices: Vec<DeviceProfile>,
    /// Links between nodes, by sender and then by receiver. Within a node, copies are part of the
    /// devices' readbacks and uploads.
    pub links: Vec<Vec<LinkModel>>,
    /// By node: seconds of all its cores for each byte that it sends to other nodes, and for as
    /// many that arrive. If empty, the network takes no time from devices.
    pub network_s_per_byte: Vec<f64>,
    /// By node: true if the first node sends it the inputs of each step, false if it sends only the
    /// states that are carried from step to step. If empty, it sends neither.
    pub receives_inputs: Vec<bool>,
    /// Seconds of a message between threads of one process.
    pub thread_message_s: f64,
    /// By block: the part of its work that each of two equal ranks of a tensor group has. More than
    /// half, because both compute what is not divided. If empty, everything is divided.
    pub half_parts: Vec<f64>,
}

impl DeviceProfile {
    /// Returns the seconds of the passes of the whole model for `rows` samples, alone; infinite if
    /// the device cannot run a block.
    pub fn whole_model_s(&self, rows: u32) -> f64 {
        self.blocks.iter().map(|block| block.at(rows).sum_s()).sum()
    }

    /// Returns the speed of the passes of the whole model in micro-batches of up to `micro_batch`
    /// samples; infinite times if the device cannot run a block.
    pub fn throughput(&self, micro_batch: u32) -> ThroughputModel {
        let mut speed = ThroughputModel { fixed_s: 0.0, row_s: 0.0, micro_batch };
        for block in &self.blocks {
            speed.fixed_s += block.fixed.sum_s();
            speed.row_s += block.per_row.sum_s();
        }
        speed
    }
}

/// Gives the devices of a kind on a node the mean of their slowdowns, so that noise does not tell
/// them apart.
pub fn equalize_slowdowns(devices: &mut [DeviceProfile]) {
    for first in 0..devices.len() {
        let DeviceProfile { kind, node, .. } = devices[first];
        let mut slowdowns = Vec::new();
        for device in devices.iter().filter(|other| other.kind == kind && other.node == node) {
            slowdowns.extend(device.shares.map(|shared| shared.slowdown));
        }
        let mean = slowdowns.iter().sum::<f64>() / slowdowns.len() as f64;
        for device in devices.iter_mut().filter(|other| other.kind == kind && other.node == node) {
            if let Some(shared) = &mut device.shares {
                shared.slowdown = mean;
            }
        }
    }
}

impl PlanProfile {
    /// Returns the link between two devices. Within a node, values are not copied, but two threads
    /// must wake up: the one that sends for the first device, and that of the second one.
    pub fn link(&self, from: usize, to: usize) -> LinkModel {
        let sender = self.devices[from].node as usize;
        let receiver = self.devices[to].node as usize;
        if from == to {
            LinkModel::INSTANT
        } else if sender == receiver {
            LinkModel { latency_s: 2.0 * self.thread_message_s, ..LinkModel::INSTANT }
        } else {
            self.links[sender][receiver]
        }
    }

    /// Returns true if the first node sends a device the inputs of each step.
    pub fn receives_inputs(&self, device: usize) -> bool {
        self.receives_inputs.get(self.devices[device].node as usize) == Some(&true)
    }

    /// Returns the link from the first node to that of a device.
    pub fn input_link(&self, device: usize) -> LinkModel {
        self.links[FIRST_NODE as usize][self.devices[device].node as usize]
    }

    /// Returns the seconds of a message between the coordinator of the votes, on the first node,
    /// and the farthest rank of a run with ranks on these nodes.
    pub fn control_s(&self, nodes: impl Iterator<Item = u32>) -> f64 {
        let mut farthest: f64 = 0.0;
        for node in nodes {
            if node > 0 {
                let node = node as usize;
                farthest = farthest.max(self.links[0][node].latency_s);
                farthest = farthest.max(self.links[node][0].latency_s);
            }
        }
        self.thread_message_s + farthest
    }

    /// Returns the factor by which the passes of a device take longer while `set`, with itself,
    /// computes: a line from 1, alone, to the measured factor of all devices of its processor.
    pub fn slowdown(&self, device: usize, set: &[usize]) -> f64 {
        let Some(shared) = self.devices[device].shares else { return 1.0 };
        let is_of_it = |other: &DeviceProfile| {
            other.shares.is_some_and(|of_other| of_other.number == shared.number)
        };
        let all = self.devices.iter().filter(|other| is_of_it(other)).count();
        let busy = set.iter().filter(|other| is_of_it(&self.devices[**other])).count();
        if all < 2 || busy < 2 {
            return 1.0;
        }
        1.0 + (shared.slowdown - 1.0) * (busy - 1) as f64 / (all - 1) as f64
    }

    /// Returns the part of a block's work that a rank of a tensor group has with this part of the
    /// divided elements: a line through half of them and all of them.
    pub fn part_of_block(&self, block: usize, part: f64) -> f64 {
        let half = self.half_parts.get(block).copied().unwrap_or(0.5);
        let slope = (1.0 - half) / 0.5;
        1.0 - slope * (1.0 - part)
    }

    /// Returns the seconds of one device for `rows` samples of the whole model, alone; infinite if
    /// it cannot run a block.
    pub fn whole_model_s(&self, device: usize, rows: u32) -> f64 {
        self.devices[device].whole_model_s(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(forward_s: f64) -> BlockTimes {
        BlockTimes { forward_s, backward_input_s: 2.0 * forward_s, backward_weight_s: 0.0 }
    }

    #[test]
    fn line_through_two_times_gives_both_and_noise_is_bounded() {
        let speed = BlockSpeed::through(4, times(0.6), 12, times(1.4));
        assert!((speed.at(4).forward_s - 0.6).abs() < 1e-12);
        assert!((speed.at(12).backward_input_s - 2.8).abs() < 1e-12);
        assert!((speed.at(0).forward_s - 0.2).abs() < 1e-12);
        // More samples in less time cannot be; nor can they cost more than in proportion.
        let odd = BlockSpeed::through(4, times(2.0), 8, times(1.0));
        assert!((odd.at(8).forward_s - 1.0).abs() < 1e-12);
        assert!((odd.per_row.forward_s - 0.0625).abs() < 1e-12);
        let odd = BlockSpeed::through(4, times(0.1), 8, times(1.0));
        assert_eq!((odd.fixed.forward_s, odd.per_row.forward_s), (0.0, 0.125));
        let one = BlockSpeed::through(1, times(0.5), 1, times(0.5));
        assert_eq!((one.fixed.forward_s, one.at(3).forward_s), (0.0, 1.5));
        assert_eq!(BlockSpeed::in_proportion(4, times(1.0)).at(2), times(0.5));
    }

    #[test]
    fn slowdown_follows_the_number_of_busy_devices_of_a_processor() {
        let device = |processor: Option<u32>| DeviceProfile {
            name: "card".into(),
            kind: 0,
            node: 0,
            is_on_host: false,
            blocks: vec![BlockSpeed::in_proportion(1, times(1.0)); 2],
            load_row_s: 0.0,
            update_element_s: 0.0,
            read_back: LinkModel::INSTANT,
            upload: LinkModel::INSTANT,
            host: LinkModel::INSTANT,
            shares: processor.map(|number| SharedProcessor { number, slowdown: 3.0 }),
            memory: None,
            micro_batch: None,
            refusals: Vec::new(),
        };
        let mut devices = [Some(0), None, Some(0), Some(0), Some(1)].map(device);
        // Noise does not tell equal devices apart.
        for (device, slowdown) in devices.iter_mut().zip([2.0, 0.0, 3.0, 4.0, 3.0]) {
            if let Some(shared) = &mut device.shares {
                shared.slowdown = slowdown;
            }
        }
        equalize_slowdowns(&mut devices);
        let profile = PlanProfile {
            devices: devices.into(),
            links: Vec::new(),
            network_s_per_byte: Vec::new(),
            receives_inputs: Vec::new(),
            thread_message_s: 0.0,
            half_parts: vec![0.6],
        };
        assert_eq!(profile.slowdown(0, &[0]), 1.0);
        assert_eq!(profile.slowdown(0, &[0, 1, 4]), 1.0);
        assert_eq!(profile.slowdown(0, &[0, 1, 3]), 2.0);
        assert_eq!(profile.slowdown(2, &[0, 2, 3]), 3.0);
        assert_eq!(profile.slowdown(1, &[0, 1, 2, 3]), 1.0);
        assert_eq!(profile.whole_model_s(0, 2), 12.0);
        // A fifth of block 0 is not divided, and nothing is known of block 1.
        let close = |found: f64, expected: f64| (found - expected).abs() < 1e-12;
        assert!(close(profile.part_of_block(0, 0.5), 0.6));
        assert!(close(profile.part_of_block(0, 1.0), 1.0));
        assert!(close(profile.part_of_block(0, 0.25), 0.4));
        assert!(close(profile.part_of_block(1, 0.25), 0.25));
    }
}
