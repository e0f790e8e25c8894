//! The count of the loss is exact at any size. The totals here are odd and above 2^24, where f32
//! has only even numbers.

use potluck_core::HostTensorView;
use potluck_graph::{Builder, IGNORE_INDEX, Plan, PlanOptions};
use potluck_kernels::exec::Executor;

use crate::common::{devices, pass, run_phase};

/// Checks the count of the step so far, in both reports.
fn check_count(device: &mut dyn Executor, expected: u64) {
    assert!(expected > 1 << 24 && expected % 2 == 1, "{expected} is exact in f32");
    let name = device.name().to_string();
    assert_eq!(device.loss().unwrap().count, expected as f64, "{name}, loss");
    assert_eq!(device.finish_step(&[]).unwrap().loss.count, expected as f64, "{name}, report");
}

#[test]
fn squared_error_counts_every_element_of_a_step() {
    const PER_ROW: usize = 349_527;
    const ROWS: usize = 3;
    let mut b = Builder::new();
    let (x, target) = (b.input("x", &[1, PER_ROW]), b.input("target", &[1, PER_ROW]));
    b.squared_error_loss(x, target).unwrap();
    let plan = Plan::new(b.finish(), PlanOptions::new(ROWS));
    let zeros = vec![0.0; ROWS * PER_ROW];
    for mut device in devices(&plan, 0) {
        let device = device.as_mut();
        let mut step = |passes: &[usize]| {
            device.begin_step().unwrap();
            for rows in passes {
                let values = HostTensorView::Float(&zeros[..rows * PER_ROW]);
                device.set_input(x, 0, values).unwrap();
                device.set_input(target, 0, values).unwrap();
                run_phase(device, true, &pass(0, *rows));
            }
        };
        // A step that counts nothing for the next one.
        step(&[2]);
        step(&[[ROWS; 16].as_slice(), &[1; 3]].concat());
        check_count(device, (51 * PER_ROW) as u64);
    }
}

/// Two micro-batches are in flight; each has other targets that do not count, and one has fewer
/// rows than the plan.
#[test]
fn cross_entropy_counts_every_class_of_a_step() {
    const PER_ROW: usize = (1 << 17) + 1;
    const ROWS: usize = 4;
    let mut b = Builder::new();
    let (x, targets) = (b.input("x", &[PER_ROW, 2]), b.input_ids("targets", &[PER_ROW]));
    let loss = b.cross_entropy_loss(x, targets).unwrap();
    let plan = Plan::new(b.finish(), PlanOptions { in_flight: 2, ..PlanOptions::new(ROWS) });
    let zeros = vec![0.0; ROWS * PER_ROW * 2];
    // Per copy of the targets: every so many targets are no class.
    let planted = [(1000, IGNORE_INDEX), (777, 2)].map(|(every, other)| -> Vec<u32> {
        let target = |i: usize| if i.is_multiple_of(every) { other } else { i as u32 % 2 };
        (0..ROWS * PER_ROW).map(target).collect()
    });
    for mut device in devices(&plan, 0) {
        let device = device.as_mut();
        device.begin_step().unwrap();
        let mut expected = 0;
        for turn in 0..19 {
            let rows = [ROWS, if turn == 0 { 1 } else { ROWS - 1 }];
            for (copy, (rows, planted)) in rows.iter().zip(&planted).enumerate() {
                let values = HostTensorView::Float(&zeros[..rows * PER_ROW * 2]);
                device.set_input(x, copy, values).unwrap();
                let planted = &planted[..rows * PER_ROW];
                device.set_input(targets, copy, HostTensorView::Int(planted)).unwrap();
                expected += planted.iter().filter(|target| **target < 2).count() as u64;
            }
            for (copy, rows) in rows.into_iter().enumerate() {
                run_phase(device, true, &pass(copy, rows));
            }
            if turn == 0 {
                let of_device = device.read(loss, &pass(0, 1)).unwrap()[1];
                assert_eq!(f64::from(of_device), expected as f64, "{}", device.name());
            }
        }
        check_count(device, expected);
    }
}
