//! A plan with two copies of its stash runs two micro-batches forward before it runs either
//! backward, as pipelines do, and gets the same bits as one after the other.

use potluck_core::BucketId;
use potluck_graph::model::{GptConfig, gpt};
use potluck_graph::{Plan, PlanOptions, SlotKind, Unary, differentiate, fuse};
use potluck_kernels::exec::{BucketTensor, Executor, LossSums};

const ROWS: usize = 2;

fn plan(in_flight: usize) -> Plan {
    let config = GptConfig {
        vocabulary: 11,
        context: 6,
        positions: 6,
        layers: 2,
        heads: 2,
        width: 12,
        bias: true,
        dropout: 0.2,
        tie: true,
        activation: Unary::Gelu,
    };
    let graph = fuse(differentiate(gpt(&config).unwrap()).unwrap());
    Plan::new(graph, PlanOptions { in_flight, ..PlanOptions::new(ROWS) })
}

/// Gradients and loss after two micro-batches, the second with one row less. Interleaved ones are
/// the fifth and the eighth of a step, which have different copies too.
fn gradients(device: &mut dyn Executor, interleaved: bool) -> Vec<u32> {
    crate::common::fill_parameters(device, 0.3);
    device.begin_step().unwrap();
    let [first, second] = if interleaved { [4, 7] } else { [0, 1] };
    let passes = [crate::common::pass(first, ROWS), crate::common::pass(second, ROWS - 1)];
    let load = |device: &mut dyn Executor, i: usize| {
        crate::common::fill_inputs(device, passes[i].micro_batch, passes[i].rows, i as u64, 11);
    };
    if interleaved {
        for (i, pass) in passes.iter().enumerate() {
            load(device, i);
            crate::common::run_phase(device, true, pass);
        }
        for pass in &passes {
            crate::common::run_phase(device, false, pass);
        }
    } else {
        for (i, pass) in passes.iter().enumerate() {
            load(device, i);
            crate::common::run_phase(device, true, pass);
            crate::common::run_phase(device, false, pass);
        }
    }
    let LossSums { loss, count, .. } = device.loss().unwrap();
    assert_eq!(count, ((2 * ROWS - 1) * 6) as f64);
    let mut bits = vec![(loss as f32).to_bits()];
    for bucket in 0..device.plan().buckets.len() as u32 {
        let values = device.read_bucket(BucketTensor::Gradients, BucketId(bucket)).unwrap();
        bits.extend(values.iter().map(|v| v.to_bits()));
    }
    bits
}

#[test]
fn interleaved_micro_batches_give_the_bits_of_sequential_ones() {
    for mut device in crate::common::devices(&plan(2), 0) {
        let sequential = gradients(device.as_mut(), false);
        assert!(sequential.iter().any(|bits| *bits != 0));
        let interleaved = gradients(device.as_mut(), true);
        assert!(sequential == interleaved, "{}: other bits", device.name());
    }
}

/// The test above can fail: without a second copy, the first micro-batch's stash is overwritten.
#[test]
fn one_copy_is_not_enough() {
    let two = plan(2);
    assert!(two.slots.iter().all(|slot| slot.kind != SlotKind::Stash || slot.copies == 2));
    assert!(plan(1).slots.iter().all(|slot| slot.copies == 1));
    let mut device = potluck_kernels::exec::Cpu::fast(two, 0);
    let sequential = gradients(&mut device, false);
    crate::common::fill_parameters(&mut device, 0.3);
    device.begin_step().unwrap();
    // Both micro-batches in copy 0.
    let passes = [crate::common::pass(0, ROWS), crate::common::pass(0, ROWS - 1)];
    for (i, pass) in passes.iter().enumerate() {
        crate::common::fill_inputs(&mut device, 0, pass.rows, i as u64, 11);
        crate::common::run_phase(&mut device, true, pass);
    }
    for pass in &passes {
        crate::common::run_phase(&mut device, false, pass);
    }
    let bits: Vec<u32> = device
        .read_bucket(BucketTensor::Gradients, BucketId(0))
        .unwrap()
        .iter()
        .map(|v| v.to_bits())
        .collect();
    assert!(!sequential[1..].starts_with(&bits));
}
