//! Rates of a device that is not here, and the times of a model's blocks by them: each kernel
//! takes the longer of its arithmetic and its memory traffic (a roofline), and the overhead of a
//! dispatch.

use super::cards::{Card, CardBus};
use super::cut::BlockTimes;
use super::profile::{BlockSpeed, DeviceProfile};
use crate::sim::LinkModel;
use potluck_graph::PassKind;

/// Fraction of the nominal rate of PCI Express that copies between device and host reach, with the
/// copies that the host makes of them.
const BUS_REACHED: f64 = 0.5;
/// Seconds from the request of a copy between device and host to its end, besides its bytes.
const COPY_LATENCY_S: f64 = 50e-6;
/// Seconds of a dispatch besides its work: the barrier before it.
const DISPATCH_S: f64 = 3e-6;
/// Bytes per second at which a ring thread adds gradients, or copies those with which a sum begins.
const HOST_BYTES_PER_S: f64 = 8e9;
/// Fraction of a card's memory that a run may take.
const MEMORY_USABLE: f64 = 0.9;
/// Fraction of the host's memory that a device of the host may take.
const HOST_MEMORY_USABLE: f64 = 0.7;
/// Memory bandwidth of a processor in bytes per second: two channels.
const CPU_BYTES_PER_S: f64 = 40e9;
const GIB: f64 = (1u64 << 30) as f64;

/// Arithmetic of a kernel, which decides the unit that performs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkKind {
    /// Matrix products and convolutions.
    Product,
    Attention,
    /// All others, which memory bounds.
    Other,
}

/// Work of one kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelWork {
    pub kind: WorkKind,
    /// True if operands are in f16, so that matrix units can be used.
    pub is_mixed: bool,
    pub flops: f64,
    pub bytes: f64,
}

/// Work of the kernels of each pass of a block for one micro-batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockWork {
    pub forward: Vec<KernelWork>,
    pub backward_input: Vec<KernelWork>,
    pub backward_weight: Vec<KernelWork>,
}

impl BlockWork {
    /// Returns the kernels of a pass.
    pub fn pass_mut(&mut self, pass: PassKind) -> &mut Vec<KernelWork> {
        match pass {
            PassKind::Forward => &mut self.forward,
            PassKind::BackwardInput => &mut self.backward_input,
            PassKind::BackwardWeight => &mut self.backward_weight,
        }
    }
}

/// Work of a model: of each block for micro-batches of two sizes, and of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelWork {
    /// Samples of the two micro-batches, ascending or equal.
    pub rows: [u32; 2],
    /// By micro-batch, and then by block.
    pub blocks: [Vec<BlockWork>; 2],
    /// Bytes of a sample as it is loaded.
    pub input_bytes: f64,
    /// Bytes that the update moves for each parameter.
    pub update_bytes: f64,
}

/// Rates that a device reaches.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceRates {
    /// Display name.
    pub name: String,
    /// Floating-point operations per second in products and in attention, in f32.
    pub product_flops: f64,
    pub attention_flops: f64,
    /// Products with f16 operands, if matrix units do them.
    pub matrix_flops: Option<f64>,
    pub bytes_per_s: f64,
    pub dispatch_s: f64,
    /// Copies to and from the host, in bytes per second.
    pub upload_bytes_per_s: f64,
    pub read_back_bytes_per_s: f64,
    /// Bytes of memory for a run, if known.
    pub memory: Option<u64>,
}

impl DeviceRates {
    /// Returns the rates that are expected of a card in a host with this memory in GiB.
    pub fn of_card(card: &Card, host_gib: f64) -> Self {
        let reached = card.maker.reached();
        let bytes_per_s = 1e9 * card.gb_s * reached.bandwidth;
        let copies = match card.bus.nominal_bytes_per_s() {
            Some(nominal) => BUS_REACHED * nominal,
            // A copy within one memory reads and writes it.
            None => bytes_per_s / 2.0,
        };
        let gib = match card.bus {
            CardBus::Shared => HOST_MEMORY_USABLE * host_gib,
            CardBus::Pcie { .. } => MEMORY_USABLE * card.gib.unwrap_or(0.0),
        };
        Self {
            name: card.name.into(),
            product_flops: 1e12 * card.f32_tflops * reached.product,
            attention_flops: 1e12 * card.f32_tflops * reached.attention,
            matrix_flops: card.matrix_tflops.map(|rate| 1e12 * rate * reached.matrix),
            bytes_per_s,
            dispatch_s: DISPATCH_S,
            upload_bytes_per_s: copies,
            read_back_bytes_per_s: copies,
            memory: Some((gib * GIB) as u64),
        }
    }

    /// Returns the rates of a processor that reaches `tflops` TFLOP/s in products, in a host with
    /// this memory in GiB.
    pub fn of_cpu(tflops: f64, host_gib: f64) -> Self {
        Self {
            name: format!("cpu of {} TFLOP/s", (1e4 * tflops).round() / 1e4),
            product_flops: 1e12 * tflops,
            attention_flops: 0.5e12 * tflops,
            matrix_flops: None,
            bytes_per_s: CPU_BYTES_PER_S,
            dispatch_s: DISPATCH_S,
            upload_bytes_per_s: CPU_BYTES_PER_S / 2.0,
            read_back_bytes_per_s: CPU_BYTES_PER_S / 2.0,
            memory: Some((HOST_MEMORY_USABLE * host_gib * GIB) as u64),
        }
    }

    /// Returns the seconds of a kernel.
    pub fn seconds(&self, work: KernelWork) -> f64 {
        // Where matrix units do products, they do those of attention in the same proportion.
        let product = match self.matrix_flops {
            Some(matrix) if work.is_mixed => matrix,
            _ => self.product_flops,
        };
        let flops = match work.kind {
            WorkKind::Product => product,
            WorkKind::Attention => product * self.attention_flops / self.product_flops,
            WorkKind::Other => self.product_flops,
        };
        (work.flops / flops).max(work.bytes / self.bytes_per_s) + self.dispatch_s
    }

    fn pass_s(&self, pass: &[KernelWork]) -> f64 {
        pass.iter().map(|work| self.seconds(*work)).sum()
    }

    fn block_times(&self, block: &BlockWork) -> BlockTimes {
        BlockTimes {
            forward_s: self.pass_s(&block.forward),
            backward_input_s: self.pass_s(&block.backward_input),
            backward_weight_s: self.pass_s(&block.backward_weight),
        }
    }

    /// Returns the profile of a device with these rates on a node, for a model.
    pub fn profile(&self, work: &ModelWork, kind: usize, node: u32) -> DeviceProfile {
        let [few, many] = work.rows;
        let mut blocks = Vec::with_capacity(work.blocks[1].len());
        for (of_few, of_many) in work.blocks[0].iter().zip(&work.blocks[1]) {
            let times = [self.block_times(of_few), self.block_times(of_many)];
            blocks.push(BlockSpeed::through(few, times[0], many, times[1]));
        }
        let copy = |bytes_per_s: f64| LinkModel { latency_s: COPY_LATENCY_S, bytes_per_s };
        DeviceProfile {
            name: self.name.clone(),
            kind,
            node,
            is_on_host: false,
            blocks,
            load_row_s: work.input_bytes / self.upload_bytes_per_s,
            update_element_s: work.update_bytes / self.bytes_per_s,
            read_back: copy(self.read_back_bytes_per_s),
            upload: copy(self.upload_bytes_per_s),
            host: LinkModel { latency_s: 0.0, bytes_per_s: HOST_BYTES_PER_S },
            shares: None,
            memory: self.memory,
            micro_batch: None,
            refusals: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::cards::card_named;

    fn close(found: f64, expected: f64) -> bool {
        (found / expected - 1.0).abs() < 1e-6
    }

    #[test]
    fn kernel_takes_the_longer_of_arithmetic_and_traffic() {
        let rates = DeviceRates::of_card(card_named("RTX 4090").unwrap(), 64.0);
        let product =
            KernelWork { kind: WorkKind::Product, is_mixed: false, flops: 1e12, bytes: 1e9 };
        assert!(close(rates.seconds(product), 1.0 / 41.3 + 3e-6));
        let mixed = KernelWork { is_mixed: true, ..product };
        assert!(close(rates.seconds(mixed), 1.0 / 69.3 + 3e-6));
        let attention = KernelWork { kind: WorkKind::Attention, ..product };
        assert!(close(rates.seconds(attention), 1.0 / 28.91 + 3e-6));
        let other = KernelWork { kind: WorkKind::Other, flops: 1e6, ..product };
        assert!(close(rates.seconds(other), 1.0 / 826.56 + 3e-6));
        // Without matrix units, mixed precision gains nothing.
        let arc = DeviceRates::of_card(card_named("Arc A770").unwrap(), 64.0);
        assert_eq!(arc.seconds(product), arc.seconds(mixed));
    }

    #[test]
    fn memory_is_the_card_s_or_the_host_s() {
        let gib = |rates: DeviceRates| rates.memory.unwrap() as f64 / GIB;
        let of = |name| gib(DeviceRates::of_card(card_named(name).unwrap(), 32.0));
        assert!(close(of("RTX 4090"), 21.6) && close(of("M2"), 22.4));
        assert!(close(gib(DeviceRates::of_cpu(0.5, 10.0)), 7.0));
        let m2 = DeviceRates::of_card(card_named("M2").unwrap(), 8.0);
        assert!(close(m2.upload_bytes_per_s, 42.5e9));
    }

    #[test]
    fn profile_has_the_line_through_both_micro_batches() {
        let work = |rows: f64| {
            let kernel = KernelWork {
                kind: WorkKind::Other,
                is_mixed: false,
                flops: 0.0,
                bytes: 1e6 * rows,
            };
            let mut block = BlockWork::default();
            block.pass_mut(PassKind::Forward).push(kernel);
            block.pass_mut(PassKind::BackwardInput).extend([kernel; 2]);
            block.pass_mut(PassKind::BackwardWeight).push(kernel);
            vec![block]
        };
        let blocks = [work(1.0), work(9.0)];
        let work = ModelWork { rows: [1, 9], blocks, input_bytes: 4096.0, update_bytes: 32.0 };
        let rates = DeviceRates::of_cpu(1.0, 16.0);
        let profile = rates.profile(&work, 3, 7);
        assert_eq!((profile.kind, profile.node), (3, 7));
        let times = profile.blocks[0].at(4);
        assert!(close(times.forward_s, 4e6 / 40e9 + 3e-6), "{times:?}");
        assert!(close(times.backward_input_s, 2.0 * times.forward_s));
        assert!(close(profile.update_element_s, 32.0 / 40e9));
    }
}
