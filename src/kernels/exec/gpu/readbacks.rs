//! Asynchronous readbacks: slots of host-visible memory into which the device copies while it
//! continues to compute, and which are mapped when the copy is done. A completed readback is the
//! mapped slot itself, so nothing is copied on the host; when it is dropped, on any thread, it
//! returns its slot through a channel, and the device's own thread unmaps it. (GL allows calls from
//! only one thread.)

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use crate::device::{DeviceError, Gpu, Mapping, ReadMethod, mapped_reads};
use crate::exec::Readback;
use crate::exec::staging::ReadbackBudget;
use potluck_core::DType;
use potluck_graph::Region;

/// Batching of copies: after all slots were taken, waiting copies are recorded only once this
/// fraction (one in `BATCH`) of the slots is free.
const BATCH: usize = 4;

const WHAT: &str = "a piece on its way back";

pub(crate) struct ReadbackRequest {
    pub place: Region,
    /// Source of the copy: a buffer, and a position in bytes.
    pub source: wgpu::Buffer,
    pub offset: u64,
}

impl ReadbackRequest {
    fn bytes(&self) -> u64 {
        (self.place.length() * DType::F32.bytes()) as u64
    }

    /// Returns true if the readback overlaps these bytes of a buffer.
    fn is_of(&self, buffer: &wgpu::Buffer, bytes: &Range<u64>) -> bool {
        let end = self.offset + self.bytes();
        self.source == *buffer && self.offset.max(bytes.start) < end.min(bytes.end)
    }
}

/// A copy to record.
pub struct SlotCopy {
    pub source: wgpu::Buffer,
    /// Position in the source, in bytes.
    pub offset: u64,
    pub slot: wgpu::Buffer,
    pub bytes: u64,
}

/// Readback that has a slot.
struct InFlight {
    wanted: ReadbackRequest,
    slot: usize,
    /// After its copy was submitted: the time of the submission, and the mapping of the slot.
    sent: Option<(Instant, Mapping)>,
}

/// Readback slots of a device, and the readbacks that wait or are in flight.
pub struct ReadbackQueue {
    /// The most elements of a readback.
    elements: usize,
    slot_bytes: u64,
    /// Number of slots; they are allocated at first use.
    count: usize,
    slots: Vec<wgpu::Buffer>,
    free: Vec<usize>,
    /// True if all slots were taken, and since then too few have been returned to be worth a
    /// submission.
    starved: bool,
    /// Readbacks that were started and have no slot yet, oldest first.
    waiting: VecDeque<ReadbackRequest>,
    /// Readbacks that have a slot, all started before those in `waiting`, oldest first.
    in_flight: VecDeque<InFlight>,
    /// Slots that were returned and not taken back, each at most once, so the length of the channel
    /// is bounded by the number of slots.
    returned: Receiver<usize>,
    back: Sender<usize>,
}

impl ReadbackQueue {
    /// Makes a queue for readbacks of at most `elements` elements, within a memory budget.
    pub fn new(elements: usize, places: ReadbackBudget) -> Self {
        let (back, returned) = channel();
        Self {
            elements,
            slot_bytes: places.bytes as u64,
            count: places.count,
            slots: Vec::new(),
            free: Vec::new(),
            starved: false,
            waiting: VecDeque::new(),
            in_flight: VecDeque::new(),
            returned,
            back,
        }
    }

    pub fn elements(&self) -> usize {
        self.elements
    }

    #[cfg(test)]
    pub fn slots(&self) -> &[wgpu::Buffer] {
        &self.slots
    }

    /// Allocates the missing slots.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory.
    pub fn make(&mut self, gpu: &Gpu) -> Result<(), DeviceError> {
        while self.slots.len() < self.count {
            self.add_slot(gpu)?;
        }
        Ok(())
    }

    fn add_slot(&mut self, gpu: &Gpu) -> Result<(), DeviceError> {
        self.slots.push(gpu.readback(self.slot_bytes)?);
        self.free.push(self.slots.len() - 1);
        Ok(())
    }

    /// Appends a readback to the queue.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory for the slots.
    ///
    /// # Panics
    /// If the readback is longer than a slot.
    pub fn begin(&mut self, gpu: &Gpu, wanted: ReadbackRequest) -> Result<(), DeviceError> {
        assert!(wanted.bytes() <= self.slot_bytes, "{} is longer than a slot", wanted.place);
        self.make(gpu)?;
        self.waiting.push_back(wanted);
        Ok(())
    }

    /// Returns the next copy for which a slot is free. The caller records it before it calls this
    /// again.
    pub(crate) fn next_copy(&mut self) -> Option<SlotCopy> {
        if self.waiting.is_empty() {
            return None;
        }
        self.take_back();
        let worth_it = self.free.len() >= self.slots.len() / BATCH || self.in_flight.is_empty();
        self.starved = self.free.is_empty() || (self.starved && !worth_it);
        let slot = if self.starved { None } else { self.free.pop() }?;
        let wanted = self.waiting.pop_front()?;
        let copy = SlotCopy {
            source: wanted.source.clone(),
            offset: wanted.offset,
            slot: self.slots[slot].clone(),
            bytes: wanted.bytes(),
        };
        self.in_flight.push_back(InFlight { wanted, slot, sent: None });
        Some(copy)
    }

    /// Unmaps and frees the slots of readbacks that were dropped.
    fn take_back(&mut self) {
        while let Ok(slot) = self.returned.try_recv() {
            self.slots[slot].unmap();
            self.free.push(slot);
        }
    }

    /// Reserves slots for the waiting readbacks of `bytes` of `buffer`, which are about to change,
    /// and for the readbacks before them, because readbacks are returned in order; allocates slots
    /// if too few are free. Returns true if there are such readbacks; the caller must then record
    /// their copies.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory.
    pub(crate) fn reserve_slots(
        &mut self,
        gpu: &Gpu,
        buffer: &wgpu::Buffer,
        bytes: &Range<u64>,
    ) -> Result<bool, DeviceError> {
        let Some(last) = self.waiting.iter().rposition(|wanted| wanted.is_of(buffer, bytes)) else {
            return Ok(false);
        };
        self.take_back();
        while self.free.len() <= last {
            self.add_slot(gpu)?;
        }
        self.starved = false;
        Ok(true)
    }

    /// Returns true if a readback was started and not taken.
    pub fn has_readbacks(&self) -> bool {
        self.is_waiting() || !self.in_flight.is_empty()
    }

    /// Returns true if copies wait for a slot.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns true if copies are recorded and not submitted.
    pub fn is_recorded(&self) -> bool {
        self.in_flight.back().is_some_and(|in_flight| in_flight.sent.is_none())
    }

    /// Starts mapping the slots whose copies were in a submission.
    pub fn sent(&mut self, submission: &wgpu::SubmissionIndex) {
        let now = Instant::now();
        for in_flight in self.in_flight.iter_mut().rev() {
            if in_flight.sent.is_some() {
                break;
            }
            let slot = &self.slots[in_flight.slot];
            // At least 4 bytes, because an empty range cannot be mapped.
            let bytes = in_flight.wanted.bytes().max(4);
            let submission = Some(submission.clone());
            let mapping = Mapping::begin(slot, wgpu::MapMode::Read, bytes, submission);
            in_flight.sent = Some((now, mapping));
        }
    }

    /// Returns the next readback, if it has completed; see
    /// [`crate::exec::Executor::next_readback`]. Recorded copies must have been submitted.
    pub fn take(&mut self, gpu: &Gpu, wait: bool) -> Result<Option<Readback>, DeviceError> {
        let Some((since, mapping)) = self.in_flight.front_mut().and_then(|next| next.sent.as_mut())
        else {
            gpu.poll_now()?;
            return Ok(None);
        };
        if wait {
            mapping.wait(gpu, WHAT)?;
        } else if !mapping.is_done(gpu, WHAT)? {
            gpu.poll_now()?;
            if !mapping.is_done(gpu, WHAT)? {
                let overdue = since.elapsed() > gpu.deadline;
                return if overdue { Err(gpu.timeout(WHAT)) } else { Ok(None) };
            }
        }
        gpu.heartbeat.tick();
        let Some(in_flight) = self.in_flight.pop_front() else { return Ok(None) };
        Ok(Some(self.piece(gpu, in_flight)?))
    }

    fn piece(&self, gpu: &Gpu, in_flight: InFlight) -> Result<Readback, DeviceError> {
        let InFlight { wanted, slot, .. } = in_flight;
        let bytes = wanted.bytes();
        let back = SlotGuard { slot, to: self.back.clone() };
        let view = self.slots[slot].get_mapped_range(0..bytes.max(4));
        let view = view.map_err(|why| gpu.refused(WHAT, why.to_string()))?;
        let elements = wanted.place.length();
        // Mapped memory is aligned to 64 bytes, unless GL has to return a copy.
        let is_aligned = bytemuck::try_cast_slice::<u8, f32>(&view).is_ok();
        if gpu.read_method == ReadMethod::InPlace && is_aligned {
            let values = Box::new(Mapped { view, elements, _back: back });
            return Ok(Readback { place: wanted.place, values });
        }
        let mut values = vec![0.0f32; elements];
        let into = bytemuck::cast_slice_mut(&mut values);
        mapped_reads::copy(gpu.read_method, &view[..bytes as usize], into);
        // The slot is returned before the values are used.
        drop(view);
        drop(back);
        Ok(Readback::new(wanted.place, values))
    }
}

/// Values in a mapped slot. Fields are dropped in this order: the view is released before the slot
/// is returned.
struct Mapped {
    view: wgpu::BufferView,
    elements: usize,
    _back: SlotGuard,
}

impl AsRef<[f32]> for Mapped {
    fn as_ref(&self) -> &[f32] {
        &bytemuck::cast_slice(&self.view)[..self.elements]
    }
}

/// Returns a slot to the queue when it is dropped.
struct SlotGuard {
    slot: usize,
    to: Sender<usize>,
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        // The receiver may be gone: a closed device needs no slot.
        let _ = self.to.send(self.slot);
    }
}
