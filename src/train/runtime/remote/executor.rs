//! Device of another node as an [`Executor`]: each call is sent to the node. Calls without a result
//! do not wait; their error is returned by the next call with a result.

use std::collections::VecDeque;
use std::ops::Range;

use super::calls::{CallReply, DeviceCall, device_calls};
use super::first::RemoteSlot;
use potluck_core::faults::InjectedFault;
use potluck_core::{BucketId, HostTensor, HostTensorView, TensorId};
use potluck_graph::{MomentFormat, Plan, Region, Update, UpdateRange};
use potluck_kernels::device::{DeviceError, Heartbeat};
use potluck_kernels::exec::{
    BlockTiming, BucketTensor, Executor, KernelProfile, LossSums, Moments, PassContext,
    ProfileTarget, Readback, Shards, StepSums,
};

/// Maximum number of calls without a reply, which bounds the queue of the node.
const UNANSWERED_MAX: usize = 64;

/// Maximum number of values of a bucket tensor in one message: 512 KiB, with three copies in
/// transit to each node.
const PIECE_ELEMENTS: usize = 1 << 17;

/// Device of another node.
pub(crate) struct RemoteExecutor {
    slot: RemoteSlot,
    name: String,
    plan: Plan,
    shards: Shards,
    heartbeat: Heartbeat,
    readback_elements_max: usize,
    /// Started readbacks.
    reads: VecDeque<Region>,
    unanswered: usize,
}

impl RemoteExecutor {
    /// Creates the executor of a device opened by its node with this plan.
    pub fn new(
        slot: RemoteSlot,
        name: &str,
        plan: Plan,
        moments: &Moments,
        readback_elements_max: usize,
    ) -> Self {
        let shards = Shards::new(&plan, moments);
        let heartbeat = slot.state().heartbeat.clone();
        Self {
            slot,
            name: name.to_string(),
            plan,
            shards,
            heartbeat,
            readback_elements_max,
            reads: VecDeque::new(),
            unanswered: 0,
        }
    }

    fn post(&mut self, call: DeviceCall) -> Result<(), DeviceError> {
        if self.unanswered == UNANSWERED_MAX {
            self.call(DeviceCall::Flush {})?;
        }
        self.unanswered += 1;
        self.slot.post(&self.name, call)
    }

    fn call(&mut self, call: DeviceCall) -> Result<CallReply, DeviceError> {
        self.unanswered = 0;
        let expected = call.reply_values(&self.shards);
        let reply = self.slot.call(&self.name, call)?;
        match (expected, reply.values()) {
            (Some(expected), Some(values)) if values.len() != expected => {
                let got = format!("with {} values instead of {expected}", values.len());
                Err(self.wrong_reply(&reply, &got))
            }
            _ => Ok(reply),
        }
    }

    fn unexpected(&self, reply: &CallReply) -> DeviceError {
        self.wrong_reply(reply, "to another call")
    }

    fn wrong_reply(&self, reply: &CallReply, how: &str) -> DeviceError {
        let why = format!(
            "its node replied {how} ({}), which is a defect of potluck; please report it",
            reply.name()
        );
        DeviceError::Refused { adapter: self.name.clone(), what: "a call".into(), why }
    }
}

impl Drop for RemoteExecutor {
    fn drop(&mut self) {
        self.slot.close();
    }
}

macro_rules! client {
    ($($call:ident $name:literal: $client:ident $method:ident(
        $($(#[$field:meta])* $(&$borrowed:ident)? $($owned:ident)?: $type:ty),*
    ) -> $(#[$result:meta])* $reply:ty;)*) => {
        $(client! {
            @$client $call $method(
                $($(&$borrowed)? $($owned)?: $type = $($borrowed.to_owned())? $($owned)?),*
            ) -> $reply
        })*
    };
    (@posts $call:ident $method:ident(
        $($(&$borrowed:ident)? $($owned:ident)?: $type:ty = $value:expr),*
    ) -> $reply:ty) => {
        fn $method(
            &mut self,
            $($($borrowed: &$type)? $($owned: $type)?),*
        ) -> Result<$reply, DeviceError> {
            self.post(DeviceCall::$call { $($($borrowed)? $($owned)?: $value),* })
        }
    };
    (@calls $call:ident $method:ident(
        $($(&$borrowed:ident)? $($owned:ident)?: $type:ty = $value:expr),*
    ) -> $reply:ty) => {
        fn $method(
            &mut self,
            $($($borrowed: &$type)? $($owned: $type)?),*
        ) -> Result<$reply, DeviceError> {
            match self.call(DeviceCall::$call { $($($borrowed)? $($owned)?: $value),* })? {
                CallReply::$call(reply) => Ok(reply),
                other => Err(self.unexpected(&other)),
            }
        }
    };
    (@by_hand $($rest:tt)*) => {};
}

impl Executor for RemoteExecutor {
    device_calls!(client);

    fn name(&self) -> &str {
        &self.name
    }

    fn plan(&self) -> &Plan {
        &self.plan
    }

    fn heartbeat(&self) -> Heartbeat {
        self.heartbeat.clone()
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

    /// Writes in pieces, so that messages are no copy of a whole bucket.
    fn write_bucket(
        &mut self,
        bucket_tensor: BucketTensor,
        bucket: BucketId,
        values: &[f32],
    ) -> Result<(), DeviceError> {
        if self.plan.options.moments.of_bucket_tensor(bucket_tensor) == MomentFormat::Bf16 {
            let values = values.to_vec();
            return match self.call(DeviceCall::WriteBank { bucket_tensor, bucket, values })? {
                CallReply::WriteBank(()) => Ok(()),
                other => Err(self.unexpected(&other)),
            };
        }
        let mut start = self.shards.held(bucket_tensor, bucket).start;
        for piece in values.chunks(PIECE_ELEMENTS) {
            let range = start..start + piece.len();
            start = range.end;
            self.write_place(&Region::bucket(bucket_tensor, bucket, range), piece)?;
        }
        Ok(())
    }

    fn set_moments(&mut self, moments: Moments) -> Result<(), DeviceError> {
        self.shards = Shards::new(&self.plan, &moments);
        match self.call(DeviceCall::SetMoments { moments })? {
            CallReply::SetMoments(()) => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    fn owned(&self, bucket: BucketId) -> Range<usize> {
        self.shards.owned(bucket)
    }

    /// Stores only the place: the values are read by `next_readback`. Callers do not change them in
    /// between.
    fn start_readback(&mut self, place: Region) -> Result<(), DeviceError> {
        self.reads.push_back(place);
        Ok(())
    }

    fn next_readback(&mut self, wait: bool) -> Result<Option<Readback>, DeviceError> {
        if !wait {
            return Ok(None);
        }
        let Some(place) = self.reads.pop_front() else { return Ok(None) };
        match self.call(DeviceCall::ReadPlace { place: place.clone() })? {
            CallReply::ReadPlace(values) => Ok(Some(Readback::new(place, values))),
            other => Err(self.unexpected(&other)),
        }
    }

    fn has_readbacks(&self) -> bool {
        !self.reads.is_empty()
    }

    fn readback_elements_max(&self) -> usize {
        self.readback_elements_max
    }

    fn add(
        &mut self,
        bucket: BucketId,
        start: usize,
        partial: &mut [f32],
    ) -> Result<(), DeviceError> {
        match self.call(DeviceCall::Add { bucket, start, partial: partial.to_vec() })? {
            CallReply::Add(sum) => partial.copy_from_slice(&sum),
            other => return Err(self.unexpected(&other)),
        }
        Ok(())
    }

    fn on_queue_done(&mut self, then: Box<dyn FnOnce() + Send>) -> Result<(), DeviceError> {
        match self.call(DeviceCall::Flush {})? {
            CallReply::Flush(()) => then(),
            other => return Err(self.unexpected(&other)),
        }
        Ok(())
    }

    fn profile(
        &mut self,
        _: &ProfileTarget,
        _: &PassContext,
    ) -> Result<Option<KernelProfile>, DeviceError> {
        Err(DeviceError::Refused {
            adapter: self.name.clone(),
            what: "a profile".into(),
            why: "kernels are profiled on their own node".into(),
        })
    }
}
