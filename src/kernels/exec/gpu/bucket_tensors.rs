//! GPU buffers of the buckets.

use std::ops::Range;

use crate::device::{DeviceError, Gpu};
use crate::exec::shards::Shards;
use crate::exec::{BucketTensor, Moments};
use crate::{Binding, Operand};
use potluck_core::BucketId;
use potluck_graph::{MomentFormat, Plan};

/// Buffers of the parameters and gradients of every bucket, and of the moments and averages of the
/// owned shards. Buckets that the plan does not hold have none, frozen ones only parameters.
pub(crate) struct BucketTensors {
    parameters: Vec<Option<wgpu::Buffer>>,
    /// Empty unless the plan is trained.
    pub gradients: Vec<Option<wgpu::Buffer>>,
    /// Per moment, then per bucket.
    moments: Vec<Vec<Option<wgpu::Buffer>>>,
    moment_format: MomentFormat,
    /// Averages of the parameters; empty unless the plan keeps them.
    averages: Vec<Option<wgpu::Buffer>>,
    pub shards: Shards,
}

impl BucketTensors {
    /// Allocates the buffers.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory.
    pub fn new(gpu: &Gpu, plan: &Plan, moments: &Moments) -> Result<Self, DeviceError> {
        let shards = Shards::new(plan, moments);
        let parameters = make(gpu, plan, &shards, "parameters", BucketTensor::Parameters)?;
        let mut gradients = Vec::new();
        if plan.graph.is_trained() {
            gradients = make(gpu, plan, &shards, "gradients", BucketTensor::Gradients)?;
        }
        let mut bucket_tensors = Self {
            parameters,
            gradients,
            moments: Vec::new(),
            moment_format: plan.options.moments,
            averages: Vec::new(),
            shards,
        };
        bucket_tensors.set_moments(gpu, plan, moments)?;
        Ok(bucket_tensors)
    }

    /// Replaces the moments and averages by new ones, which are zero.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory.
    pub fn set_moments(
        &mut self,
        gpu: &Gpu,
        plan: &Plan,
        moments: &Moments,
    ) -> Result<(), DeviceError> {
        self.moments.clear();
        self.averages.clear();
        self.shards = Shards::new(plan, moments);
        for moment in 0..moments.count {
            let bucket_tensor = BucketTensor::Moment(moment);
            self.moments.push(make(gpu, plan, &self.shards, "moments", bucket_tensor)?);
        }
        if plan.options.averages {
            self.averages = make(gpu, plan, &self.shards, "averages", BucketTensor::Average)?;
        }
        Ok(())
    }

    /// Returns the buffer of a bucket.
    ///
    /// # Panics
    /// If the plan does not hold the bucket.
    pub fn buffer(&self, bucket_tensor: BucketTensor, bucket: BucketId) -> &wgpu::Buffer {
        let buffers = match bucket_tensor {
            BucketTensor::Parameters => &self.parameters,
            BucketTensor::Gradients => &self.gradients,
            BucketTensor::Moment(moment) => &self.moments[moment],
            BucketTensor::Average => &self.averages,
        };
        let Some(buffer) = &buffers[bucket.index()] else {
            panic!("the device does not hold {bucket}")
        };
        buffer
    }

    /// Returns the buffer that holds elements of a bucket, and their bytes in it: for moments in
    /// bf16, all words that hold one of them.
    ///
    /// # Panics
    /// If the bucket tensor does not hold all of them.
    pub fn place(
        &self,
        bucket_tensor: BucketTensor,
        bucket: BucketId,
        elements: &Range<usize>,
    ) -> (wgpu::Buffer, Range<u64>) {
        let Range { start, end } = self.shards.place(bucket_tensor, bucket, elements);
        let bytes = match self.moment_format.of_bucket_tensor(bucket_tensor) {
            MomentFormat::F32 => start * 4..end * 4,
            MomentFormat::Bf16 => start / 2 * 4..end.div_ceil(2) * 4,
        };
        (self.buffer(bucket_tensor, bucket).clone(), bytes.start as u64..bytes.end as u64)
    }

    /// Returns the binding of an operand of an update of `target`, which is the parameters or their
    /// average, in a bucket.
    pub fn update_operand(
        &self,
        operand: Operand,
        target: BucketTensor,
        bucket: BucketId,
    ) -> Binding {
        let bucket_tensor = match operand {
            Operand::Input(_) if target == BucketTensor::Average => BucketTensor::Parameters,
            Operand::Input(_) => BucketTensor::Gradients,
            Operand::Output(0) => target,
            Operand::Output(moment) => BucketTensor::Moment(moment - 1),
            other => unreachable!("only ops have {other:?}"),
        };
        self.owned(bucket_tensor, bucket)
    }

    /// Returns the binding of a bucket tensor for an update of a bucket: the owned elements, at
    /// least one.
    fn owned(&self, bucket_tensor: BucketTensor, bucket: BucketId) -> Binding {
        let owned = self.shards.owned(bucket);
        let (buffer, bytes) = self.place(bucket_tensor, bucket, &owned);
        Binding { buffer, offset: bytes.start, bytes: bytes.end - bytes.start }
    }
}

/// Allocates the buffers of a bucket tensor, one per bucket that the plan holds; a bucket that is
/// not updated has only parameters.
fn make(
    gpu: &Gpu,
    plan: &Plan,
    shards: &Shards,
    label: &str,
    bucket_tensor: BucketTensor,
) -> Result<Vec<Option<wgpu::Buffer>>, DeviceError> {
    let mut buffers = Vec::with_capacity(plan.buckets.len());
    for (bucket, planned) in (0..).map(BucketId).zip(&plan.buckets) {
        let is_held = bucket_tensor == BucketTensor::Parameters || planned.is_updated();
        if !plan.holds(bucket) || !is_held {
            buffers.push(None);
            continue;
        }
        let format = plan.options.moments.of_bucket_tensor(bucket_tensor);
        let bytes = format.bytes(shards.held(bucket_tensor, bucket).len());
        buffers.push(Some(gpu.storage(label, bytes as u64)?));
    }
    Ok(buffers)
}
