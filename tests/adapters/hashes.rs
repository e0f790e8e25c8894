//! The hash of a bucket, computed where it stands, is that of what is read back, on every device.

use potluck_core::BucketId;
use potluck_graph::model::{MlpConfig, MlpLoss, mlp};
use potluck_graph::{Plan, PlanOptions, Unary, Update, UpdateRange, differentiate};
use potluck_kernels::exec::BucketTensor;
use potluck_kernels::ops::hash;

#[test]
fn devices_hash_what_they_hold() {
    let (widths, activation) = (vec![19, 37, 3], Unary::Relu);
    let config = MlpConfig { widths, activation, dropout: 0.0, loss: MlpLoss::SquaredError };
    let graph = differentiate(mlp(&config).unwrap()).unwrap();
    let plan = Plan::new(graph, PlanOptions::new(1));
    for mut device in crate::common::devices(&plan, 1) {
        crate::common::fill_parameters(&mut *device, 0.3);
        for bucket in (0..plan.buckets.len() as u32).map(BucketId) {
            for bank in [BucketTensor::Parameters, BucketTensor::Gradients, BucketTensor::Moment(0)]
            {
                let held = device.read_bank(bank, bucket).unwrap();
                let expected = hash::reference(bytemuck::cast_slice(&held), 0);
                assert_eq!(device.hash(bank, bucket).unwrap(), expected, "{}", device.name());
            }
            let before = device.hash(BucketTensor::Parameters, bucket).unwrap();
            let update = Update::Sgd { lr: 0.5, momentum: 0.0, weight_decay: 0.5 };
            // One element, which decays.
            let range = UpdateRange {
                start: 0,
                length: 1,
                decay_end: 1,
                gradient_scale: 1.0,
                rounding: None,
            };
            device.update(bucket, &update, &range).unwrap();
            assert_ne!(
                device.hash(BucketTensor::Parameters, bucket).unwrap(),
                before,
                "{}",
                device.name()
            );
        }
    }
}
