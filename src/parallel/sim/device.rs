//! Virtual device: performs queued commands in order, asynchronously to its device thread, and
//! copies chunks to and from the host.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;

use super::memory::TensorMemory;
use super::queue::nanos;
use super::scenario::{Costs, LinkModel};
use super::values::Model;
use potluck_core::Nanos;
use potluck_graph::{BucketTensor, Region};

/// Completed readback of a place. Dropping it frees its slot.
#[derive(Debug)]
pub(crate) struct VirtualRead {
    pub place: Region,
    values: Vec<f32>,
    _slot: Option<VirtualSlot>,
}

impl AsRef<[f32]> for VirtualRead {
    fn as_ref(&self) -> &[f32] {
        &self.values
    }
}

/// Counts a slot as freed when it is dropped.
#[derive(Debug)]
struct VirtualSlot(Rc<Cell<usize>>);

impl Drop for VirtualSlot {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

/// Readback that was started and not taken.
#[derive(Debug)]
struct Pending {
    read: VirtualRead,
    /// Time from which the values are final on the device.
    from: Nanos,
    bytes: Nanos,
    /// Time at which its copy is over; `None` without a slot.
    done_at: Option<Nanos>,
}

/// Destination of uploads that later commands wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UploadTarget {
    Gradients,
    Parameters,
    /// Tensors of edges.
    Tensors,
}

impl From<BucketTensor> for UploadTarget {
    fn from(tensor: BucketTensor) -> Self {
        match tensor {
            BucketTensor::Parameters => Self::Parameters,
            _ => Self::Gradients,
        }
    }
}

/// Period of a copy, for the timeline.
pub(crate) type Period = (Nanos, Nanos);

/// State of a virtual device.
#[derive(Debug)]
pub(crate) struct VirtualDevice {
    pub model: Model,
    /// Contents of the slots of its plan, if they are checked.
    pub memory: Option<TensorMemory>,
    /// Time at which all queued segments and updates are over.
    free_at: Nanos,
    /// Times at which all uploads to each [`UploadTarget`] are over.
    uploaded_at: [Nanos; 3],
    upload: LinkModel,
    upload_free_at: Nanos,
    read_back: LinkModel,
    read_free_at: Nanos,
    read_last: Nanos,
    reads: VecDeque<Pending>,
    slots_max: Option<usize>,
    slots_taken: usize,
    freed: Rc<Cell<usize>>,
}

impl VirtualDevice {
    /// Creates an idle device; `slots_max` is the number of its readback slots.
    pub fn new(
        model: Model,
        memory: Option<TensorMemory>,
        costs: &Costs,
        slots_max: Option<usize>,
    ) -> Self {
        Self {
            model,
            memory,
            free_at: 0,
            uploaded_at: [0; 3],
            upload: costs.upload,
            upload_free_at: 0,
            read_back: costs.read_back,
            read_free_at: 0,
            read_last: 0,
            reads: VecDeque::new(),
            slots_max,
            slots_taken: 0,
            freed: Rc::default(),
        }
    }

    // ---- Commands ----

    /// Queues a command that takes this long and needs the uploads to these targets so far.
    /// Returns the period in which the device performs it.
    pub fn run(&mut self, now: Nanos, takes: Nanos, needs: &[UploadTarget]) -> Period {
        let mut start = now.max(self.free_at);
        for target in needs {
            start = start.max(self.uploaded_at[*target as usize]);
        }
        self.free_at = start + takes;
        (start, self.free_at)
    }

    /// Stops the device for a time from now on.
    pub fn hang(&mut self, now: Nanos, takes: Nanos) {
        self.free_at = self.free_at.max(now).saturating_add(takes);
    }

    /// Time at which all queued commands and uploads are over, but not readbacks.
    pub(crate) fn idle_at(&self) -> Nanos {
        let mut idle_at = self.free_at;
        for uploaded_at in self.uploaded_at {
            idle_at = idle_at.max(uploaded_at);
        }
        idle_at
    }

    /// Queues the upload of `elements`. Returns the period in which they are copied.
    pub fn write(&mut self, now: Nanos, target: UploadTarget, elements: usize) -> Period {
        let start = now.max(self.upload_free_at);
        self.upload_free_at = start.saturating_add(self.upload.busy(elements));
        let end = self.upload_free_at.saturating_add(nanos(self.upload.latency_s));
        self.uploaded_at[target as usize] = end;
        (start, end)
    }

    // ---- Readbacks ----

    /// Starts a readback of a place, with the values that it has after all queued commands;
    /// `tensor` has the values if the place is a tensor.
    pub fn start_readback(&mut self, now: Nanos, place: Region, tensor: Vec<f32>) {
        let values = match &place {
            Region::Bucket { bucket_tensor: BucketTensor::Parameters, bucket, range } => {
                self.model.parameters(*bucket, range.clone()).to_vec()
            }
            Region::Bucket { bucket, range, .. } => {
                self.model.gradients(*bucket, range.clone()).to_vec()
            }
            Region::Tensor { .. } => tensor,
        };
        let bytes = self.read_back.busy(place.length());
        let read = VirtualRead { place, values, _slot: None };
        let from = now.max(self.free_at);
        self.reads.push_back(Pending { read, from, bytes, done_at: None });
    }

    /// Returns true if a slot was freed since the last copies were recorded.
    pub(crate) fn has_freed_slots(&self) -> bool {
        self.freed.get() > 0
    }

    /// Gives free slots to readbacks that wait for one. Returns the period of each copy.
    pub(crate) fn record_copies(&mut self, now: Nanos) -> Vec<Period> {
        self.slots_taken -= self.freed.take();
        let mut spans = Vec::new();
        for pending in self.reads.iter_mut().filter(|pending| pending.done_at.is_none()) {
            if self.slots_max.is_some_and(|most| self.slots_taken >= most) {
                break;
            }
            if self.slots_max.is_some() {
                self.slots_taken += 1;
                pending.read._slot = Some(VirtualSlot(self.freed.clone()));
            }
            let start = now.max(pending.from).max(self.read_free_at);
            self.read_free_at = start.saturating_add(pending.bytes);
            let done_at = self.read_free_at.saturating_add(nanos(self.read_back.latency_s));
            // Readbacks complete in order, even if they take no time.
            self.read_last = done_at.max(self.read_last.saturating_add(1));
            pending.done_at = Some(self.read_last);
            spans.push((start, self.read_last));
        }
        spans
    }

    /// Time at which the next readback completes; `None` without a readback, or if it has no slot.
    pub(crate) fn next_done_at(&self) -> Option<Nanos> {
        self.reads.front()?.done_at
    }

    /// Takes the next readback if it has completed.
    pub fn next_readback(&mut self, now: Nanos) -> Option<VirtualRead> {
        if self.next_done_at()? > now {
            return None;
        }
        Some(self.reads.pop_front()?.read)
    }

    /// Exchanges the two oldest readbacks, which a device must not do.
    pub(crate) fn swap_readbacks(&mut self) {
        if self.reads.len() >= 2 {
            let times = [self.reads[0].done_at, self.reads[1].done_at];
            self.reads.swap(0, 1);
            self.reads[0].done_at = times[0];
            self.reads[1].done_at = times[1];
        }
    }
}
