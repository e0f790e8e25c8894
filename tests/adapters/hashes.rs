//! The hash of a bucket, computed where it stands, is that of what is read back, on every device.

use potluck_core::BucketId;
use potluck_graph::model::{MlpConfig, MlpLoss, mlp};
use potluck_graph::{MomentFormat, Plan, PlanOptions, Unary, Update, UpdateRange, differentiate};
use potluck_kernels::exec::{BucketTensor, bucket_words};
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
            for bucket_tensor in
                [BucketTensor::Parameters, BucketTensor::Gradients, BucketTensor::Moment(0)]
            {
                let held = device.read_bucket(bucket_tensor, bucket).unwrap();
                let expected = hash::reference(bytemuck::cast_slice(&held), 0);
                assert_eq!(
                    device.hash(bucket_tensor, bucket).unwrap(),
                    expected,
                    "{}",
                    device.name()
                );
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

/// What has more digits than bf16 is rounded to nearest, ties to even.
#[test]
fn moments_in_bf16_are_written_rounded_and_hashed_as_words() {
    let (widths, activation) = (vec![19, 37, 3], Unary::Relu);
    let config = MlpConfig { widths, activation, dropout: 0.0, loss: MlpLoss::SquaredError };
    let graph = differentiate(mlp(&config).unwrap()).unwrap();
    let options = PlanOptions { moments: MomentFormat::Bf16, ..PlanOptions::new(1) };
    let plan = Plan::new(graph, options);
    let digit = 0.007_812_5;
    let written =
        [1.0, 1.0 + 0.4 * digit, 1.0 + 0.5 * digit, 1.0 + 1.5 * digit, -2.0 - 1.2 * digit];
    let rounded = [1.0, 1.0, 1.0, 1.0 + 2.0 * digit, -2.0 - 2.0 * digit];
    for mut device in crate::common::devices(&plan, 2) {
        for bucket in (0..plan.buckets.len() as u32).map(BucketId) {
            let bucket_tensor = BucketTensor::Moment(1);
            let length = plan.buckets[bucket.index()].length;
            let repeated = |values: [f32; 5]| -> Vec<f32> {
                values.into_iter().cycle().take(length).collect()
            };
            device.write_bucket(bucket_tensor, bucket, &repeated(written)).unwrap();
            let read = device.read_bucket(bucket_tensor, bucket).unwrap();
            assert_eq!(read, repeated(rounded), "{}", device.name());
            let words = bucket_words(&plan, bucket_tensor, &read).unwrap();
            assert_eq!(words.len(), length / 2);
            let expected = hash::reference(&words, 0);
            assert_eq!(device.hash(bucket_tensor, bucket).unwrap(), expected, "{}", device.name());
            let other = device.read_bucket(BucketTensor::Moment(0), bucket).unwrap();
            assert_eq!(other, vec![0.0; length], "{}", device.name());
        }
    }
}
