//! Calls of a device on another node. The messages, their display names, the client (`executor`)
//! and the server (`perform`) are generated from one list.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use potluck_core::faults::InjectedFault;
use potluck_core::{BucketId, HostTensor, TensorId, raw};
use potluck_graph::{Region, Update, UpdateRange};
use potluck_kernels::exec::{
    BlockTiming, BucketTensor, LossSums, Moments, PassContext, Shards, StepSums,
};

/// Expands the macro `$make` with the list of all calls. A call is
///
/// ```text
/// Message "name for people": client method(argument: Type, &borrowed: Type) -> Reply;
/// ```
///
/// where `method` is one of `Executor` or of `OnNode`, and the client `posts` the call without
/// waiting for the reply, `calls` and waits for it, or has a method written `by_hand`. Attributes
/// apply to the fields of the messages.
macro_rules! device_calls {
    ($make:ident) => {
        $make! {
            InjectFault "inject a fault": calls inject_fault(fault: InjectedFault) -> ();
            SetInput "set an input":
                by_hand set_owned(tensor: TensorId, micro_batch: usize, values: HostTensor) -> ();
            BeginStep "begin a step": posts begin_step() -> ();
            Run "run a pass": posts run(nodes: Range<usize>, &pass: PassContext) -> ();
            FinishStep "end a step": calls finish_step(&norms: [BucketId]) -> StepSums;
            Loss "read the loss": calls loss() -> LossSums;
            Update "update parameters":
                posts update(bucket: BucketId, &update: Update, &range: UpdateRange) -> ();
            Average "average parameters":
                posts average(bucket: BucketId, elements: Range<usize>, weight: f32) -> ();
            Flush "submit what is queued": posts flush() -> ();
            Read "read values":
                calls read_parts(tensor: TensorId, &parts: [Range<usize>], &pass: PassContext)
                -> #[serde(with = "raw")] Vec<f32>;
            ReadBank "read values":
                calls read_bucket(bucket_tensor: BucketTensor, bucket: BucketId)
                -> #[serde(with = "raw")] Vec<f32>;
            Hash "hash values": calls hash(bucket_tensor: BucketTensor, bucket: BucketId) -> u64;
            WriteBank "write values":
                by_hand write_bucket(
                    bucket_tensor: BucketTensor,
                    bucket: BucketId,
                    #[serde(with = "raw")] &values: [f32]
                ) -> ();
            SetMoments "set the moments": by_hand set_moments(moments: Moments) -> ();
            ReadPlace "read values":
                by_hand read_place(place: Region) -> #[serde(with = "raw")] Vec<f32>;
            WritePlace "write values":
                calls write_place(&place: Region, #[serde(with = "raw")] &values: [f32]) -> ();
            PrepareAdd "add values": calls prepare_add(&lengths: [usize]) -> ();
            Add "add values":
                by_hand sum(
                    bucket: BucketId,
                    start: usize,
                    #[serde(with = "raw")] partial: Vec<f32>
                ) -> #[serde(with = "raw")] Vec<f32>;
            Initialize "initialize": calls initialize(seed: u64) -> ();
            TimeMicroBatch "time a micro-batch":
                calls time_micro_batch(
                    &inputs: [(TensorId, HostTensor)],
                    rows: u32,
                    repeats: u32
                ) -> f64;
            TimeExchange "time an exchange": calls time_exchange() -> (f64, f64);
            TimeUpdate "time an update": calls time_update(&update: Update) -> f64;
            TimeBlocks "time blocks":
                calls time_blocks(
                    &inputs: [(TensorId, HostTensor)],
                    rows: usize,
                    repeats: u32
                ) -> Vec<BlockTiming>;
            TimeAddition "time the addition of gradients":
                calls time_addition(bucket: BucketId, range: Range<usize>) -> (f64, f64);
        }
    };
}
pub(super) use device_calls;

macro_rules! messages {
    ($($call:ident $name:literal: $client:ident $method:ident(
        $($(#[$field:meta])* $(&$borrowed:ident)? $($owned:ident)?: $type:ty),*
    ) -> $(#[$result:meta])* $reply:ty;)*) => {
        /// Call of a device.
        #[derive(Debug, Serialize, Deserialize)]
        pub enum DeviceCall {
            $($call {
                $($(#[$field])* $($borrowed)? $($owned)?: <$type as ToOwned>::Owned,)*
            },)*
        }

        /// Reply to the call of the same name.
        #[derive(Debug, PartialEq, Serialize, Deserialize)]
        pub enum CallReply {
            $($call($(#[$result])* $reply),)*
        }

        impl DeviceCall {
            /// Returns the display name of the call.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$call { .. } => $name,)*
                }
            }
        }

        impl CallReply {
            /// Returns the display name of the call of this reply.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$call(_) => $name,)*
                }
            }
        }
    };
}
device_calls!(messages);

impl DeviceCall {
    /// Returns the number of values in the reply of a device with these shards; `None` for a reply
    /// without values.
    pub fn reply_values(&self, shards: &Shards) -> Option<usize> {
        match self {
            Self::Read { parts, .. } => Some(parts.iter().map(Range::len).sum()),
            Self::ReadBank { bucket_tensor, bucket } => {
                Some(shards.held(*bucket_tensor, *bucket).len())
            }
            Self::ReadPlace { place } => Some(place.length()),
            Self::Add { partial, .. } => Some(partial.len()),
            _ => None,
        }
    }
}

impl CallReply {
    /// Returns the values that were read.
    pub fn values(&self) -> Option<&[f32]> {
        match self {
            Self::Read(values)
            | Self::ReadBank(values)
            | Self::ReadPlace(values)
            | Self::Add(values) => Some(values),
            _ => None,
        }
    }
}
