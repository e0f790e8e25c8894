//! Device of another node as an [`Executor`]: each call is sent to the node. Calls without a result
//! are not waited for; their error is that of the next call with one.

use std::collections::VecDeque;
use std::ops::Range;

use super::first::RemoteSlot;
use super::wire::{CallReply, DeviceCall};
use crate::base::{BucketId, HostTensor, HostTensorView, TensorId};
use crate::device::{DeviceError, Heartbeat, InjectedFault};
use crate::exec::{
    BucketTensor, Executor, KernelProfile, Moments, PassContext, ProfileTarget, Readback,
    RemoteDevice, Shards, StepSums,
};
use crate::graph::{Place, Plan, Update, UpdateRange};

/// Calls that are sent before one is waited for, which bounds what is queued on the node.
const UNANSWERED_MAX: usize = 64;

/// Device of another node.
pub struct RemoteExecutor {
    slot: RemoteSlot,
    name: String,
    plan: Plan,
    shards: Shards,
    heartbeat: Heartbeat,
    readback_elements_max: usize,
    /// Readbacks that were started.
    reads: VecDeque<Place>,
    unanswered: usize,
}

impl RemoteExecutor {
    /// Creates the executor of a device that its node has opened with this plan.
    pub fn new(
        slot: RemoteSlot,
        name: &str,
        plan: Plan,
        moments: &Moments,
        readback_elements_max: usize,
    ) -> Self {
        let shards = Shards::new(&plan, moments);
        let heartbeat = slot.state().heartbeat.clone();
        let (name, reads, unanswered) = (name.to_string(), VecDeque::new(), 0);
        Self { slot, name, plan, shards, heartbeat, readback_elements_max, reads, unanswered }
    }

    fn post(&mut self, call: DeviceCall) -> Result<(), DeviceError> {
        if self.unanswered == UNANSWERED_MAX {
            self.call(DeviceCall::Flush)?;
        }
        self.unanswered += 1;
        self.slot.post(&self.name, call)
    }

    fn call(&mut self, call: DeviceCall) -> Result<CallReply, DeviceError> {
        self.unanswered = 0;
        self.slot.call(&self.name, call)
    }

    fn done(&mut self, call: DeviceCall) -> Result<(), DeviceError> {
        match self.call(call)? {
            CallReply::Done => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    fn values(&mut self, call: DeviceCall) -> Result<Vec<f32>, DeviceError> {
        match self.call(call)? {
            CallReply::Values(values) => Ok(values),
            other => Err(self.unexpected(&other)),
        }
    }

    fn unexpected(&self, reply: &CallReply) -> DeviceError {
        let kind = match reply {
            CallReply::Done => "no value",
            CallReply::Task(_) => "the reply of a task",
            CallReply::Sums(_) => "sums",
            CallReply::Loss(..) => "a loss",
            CallReply::Hash(_) => "a hash",
            CallReply::Values(_) => "values",
        };
        let why =
            format!("its node replied {kind}, which is a defect of potluck; please report it");
        DeviceError::Refused { adapter: self.name.clone(), what: "a call".into(), why }
    }
}

impl Drop for RemoteExecutor {
    fn drop(&mut self) {
        self.slot.close();
    }
}

impl RemoteDevice for RemoteExecutor {
    fn perform(&mut self, name: &str, task: Vec<u8>) -> Result<Vec<u8>, DeviceError> {
        match self.call(DeviceCall::Task { name: name.into(), task })? {
            CallReply::Task(reply) => Ok(reply),
            other => Err(self.unexpected(&other)),
        }
    }
}

impl Executor for RemoteExecutor {
    fn name(&self) -> &str {
        &self.name
    }

    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn remote(&mut self) -> Option<&mut dyn RemoteDevice> {
        Some(self)
    }

    fn heartbeat(&self) -> Heartbeat {
        self.heartbeat.clone()
    }

    fn inject_fault(&mut self, fault: InjectedFault) -> Result<(), DeviceError> {
        self.done(DeviceCall::InjectFault(fault))
    }

    fn set_input(
        &mut self,
        tensor: TensorId,
        micro_batch: usize,
        values: HostTensorView,
    ) -> Result<(), DeviceError> {
        let values = match values {
            HostTensorView::Float(values) => HostTensor::Float(values.to_vec()),
            HostTensorView::Int(values) => HostTensor::Int(values.to_vec()),
        };
        self.post(DeviceCall::SetInput { tensor, micro_batch, values })
    }

    fn begin_step(&mut self) -> Result<(), DeviceError> {
        self.post(DeviceCall::BeginStep)
    }

    fn run(&mut self, nodes: Range<usize>, pass: &PassContext) -> Result<(), DeviceError> {
        self.post(DeviceCall::Run { nodes, pass: *pass })
    }

    fn finish_step(&mut self, norms: &[BucketId]) -> Result<StepSums, DeviceError> {
        match self.call(DeviceCall::FinishStep { norms: norms.to_vec() })? {
            CallReply::Sums(sums) => Ok(sums),
            other => Err(self.unexpected(&other)),
        }
    }

    fn loss(&mut self) -> Result<(f64, f64), DeviceError> {
        match self.call(DeviceCall::Loss)? {
            CallReply::Loss(sum, count) => Ok((sum, count)),
            other => Err(self.unexpected(&other)),
        }
    }

    fn update(
        &mut self,
        bucket: BucketId,
        update: &Update,
        range: &UpdateRange,
    ) -> Result<(), DeviceError> {
        self.post(DeviceCall::Update { bucket, update: *update, range: *range })
    }

    fn flush(&mut self) -> Result<(), DeviceError> {
        self.post(DeviceCall::Flush)
    }

    fn read_parts(
        &mut self,
        tensor: TensorId,
        parts: &[Range<usize>],
        pass: &PassContext,
    ) -> Result<Vec<f32>, DeviceError> {
        self.values(DeviceCall::Read { tensor, parts: parts.to_vec(), pass: *pass })
    }

    fn read_bank(&mut self, bank: BucketTensor, bucket: BucketId) -> Result<Vec<f32>, DeviceError> {
        self.values(DeviceCall::ReadBank { bank, bucket })
    }

    fn hash(&mut self, bank: BucketTensor, bucket: BucketId) -> Result<u64, DeviceError> {
        match self.call(DeviceCall::Hash { bank, bucket })? {
            CallReply::Hash(hash) => Ok(hash),
            other => Err(self.unexpected(&other)),
        }
    }

    fn write_bank(
        &mut self,
        bank: BucketTensor,
        bucket: BucketId,
        values: &[f32],
    ) -> Result<(), DeviceError> {
        self.done(DeviceCall::WriteBank { bank, bucket, values: values.to_vec() })
    }

    fn set_moments(&mut self, moments: Moments) -> Result<(), DeviceError> {
        self.shards = Shards::new(&self.plan, &moments);
        self.done(DeviceCall::SetMoments(moments))
    }

    fn owned(&self, bucket: BucketId) -> Range<usize> {
        self.shards.owned(bucket)
    }

    /// Only remembers the place: the values are read when they are asked for, by a caller that
    /// queues nothing in between which changes them.
    fn start_readback(&mut self, place: Place) -> Result<(), DeviceError> {
        self.reads.push_back(place);
        Ok(())
    }

    fn next_readback(&mut self, wait: bool) -> Result<Option<Readback>, DeviceError> {
        let Some(place) = self.reads.front().filter(|_| wait).cloned() else { return Ok(None) };
        self.reads.pop_front();
        let values = self.values(DeviceCall::ReadPlace(place.clone()))?;
        Ok(Some(Readback::new(place, values)))
    }

    fn has_readbacks(&self) -> bool {
        !self.reads.is_empty()
    }

    fn readback_elements_max(&self) -> usize {
        self.readback_elements_max
    }

    fn write_place(&mut self, place: &Place, values: &[f32]) -> Result<(), DeviceError> {
        self.done(DeviceCall::WritePlace { place: place.clone(), values: values.to_vec() })
    }

    fn prepare_add(&mut self, lengths: &[usize]) -> Result<(), DeviceError> {
        self.done(DeviceCall::PrepareAdd { lengths: lengths.to_vec() })
    }

    fn add(
        &mut self,
        bucket: BucketId,
        start: usize,
        partial: &mut [f32],
    ) -> Result<(), DeviceError> {
        let sum = self.values(DeviceCall::Add { bucket, start, partial: partial.to_vec() })?;
        if sum.len() != partial.len() {
            return Err(self.unexpected(&CallReply::Values(sum)));
        }
        partial.copy_from_slice(&sum);
        Ok(())
    }

    fn on_queue_done(&mut self, then: Box<dyn FnOnce() + Send>) -> Result<(), DeviceError> {
        self.done(DeviceCall::Flush)?;
        then();
        Ok(())
    }

    fn profile(
        &mut self,
        _: &ProfileTarget,
        _: &PassContext,
    ) -> Result<Option<KernelProfile>, DeviceError> {
        let (adapter, what) = (self.name.clone(), "a profile".to_string());
        let why = "kernels are profiled on their own node".to_string();
        Err(DeviceError::Refused { adapter, what, why })
    }
}
