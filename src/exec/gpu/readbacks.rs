//! What comes back while the device goes on: slots of memory that the host can read, copied into
//! by the device and mapped when that is done. A piece is the mapped memory itself, so nothing is
//! copied on the host; when it is dropped, on whatever thread, its slot is given back through a
//! channel, and the device's own thread unmaps it. (GL allows only one thread at a time.)

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use crate::base::BucketId;
use crate::base::shape::ELEMENT_BYTES;
use crate::device::{DeviceError, Gpu, Mapping};
use crate::exec::staging::ReadbackBudget;
use crate::exec::{BucketTensor, Readback};

/// Once there was no free slot, the copies that wait begin when this part of the slots is free.
const BATCH: usize = 4;

const WHAT: &str = "a piece on its way back";

/// What a piece is to hold.
pub struct ReadbackRequest {
    pub bank: BucketTensor,
    pub bucket: BucketId,
    /// Elements of the bucket.
    pub range: Range<usize>,
    /// Where they are: a buffer, and a position in bytes.
    pub source: wgpu::Buffer,
    pub offset: u64,
}

impl ReadbackRequest {
    fn bytes(&self) -> u64 {
        (self.range.len() * ELEMENT_BYTES) as u64
    }

    /// Whether it takes some of these bytes of a buffer.
    fn is_of(&self, buffer: &wgpu::Buffer, bytes: &Range<u64>) -> bool {
        let end = self.offset + self.bytes();
        self.source == *buffer && self.offset.max(bytes.start) < end.min(bytes.end)
    }
}

/// A copy to record: source and position, slot, bytes.
pub type Copy = (wgpu::Buffer, u64, wgpu::Buffer, u64);

/// A piece that has a slot.
struct InFlight {
    wanted: ReadbackRequest,
    slot: usize,
    /// Once its copy is submitted: when that was, and what becomes of it.
    sent: Option<(Instant, Mapping)>,
}

/// The slots of a device, and the pieces that are under way.
pub struct ReadbackQueue {
    /// The most elements of a piece.
    elements: usize,
    slot_bytes: u64,
    /// How many slots there are to be; they are made at first use.
    count: usize,
    slots: Vec<wgpu::Buffer>,
    free: Vec<usize>,
    /// All slots were taken, and since then too few have been given back to be worth a submission.
    starved: bool,
    /// Begun and without a slot, oldest first.
    waiting: VecDeque<ReadbackRequest>,
    /// Begun before those, oldest first.
    coming: VecDeque<InFlight>,
    returned: Receiver<usize>,
    back: Sender<usize>,
}

impl ReadbackQueue {
    /// For pieces of at most `elements` elements, in these slots.
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
            coming: VecDeque::new(),
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

    /// Makes the slots, if there are none.
    ///
    /// # Errors
    /// Too little memory.
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

    /// Puts a piece behind the others.
    ///
    /// # Errors
    /// Too little memory for the slots.
    pub fn begin(&mut self, gpu: &Gpu, wanted: ReadbackRequest) -> Result<(), DeviceError> {
        self.make(gpu)?;
        self.waiting.push_back(wanted);
        Ok(())
    }

    /// The next copy that has a slot. The caller records it before it asks again.
    pub fn next_copy(&mut self) -> Option<Copy> {
        if self.waiting.is_empty() {
            return None;
        }
        self.take_back();
        let worth_it = self.free.len() >= self.slots.len() / BATCH || self.coming.is_empty();
        self.starved = self.free.is_empty() || (self.starved && !worth_it);
        let slot = if self.starved { None } else { self.free.pop() }?;
        let wanted = self.waiting.pop_front()?;
        let (source, offset, bytes) = (wanted.source.clone(), wanted.offset, wanted.bytes());
        self.coming.push_back(InFlight { wanted, slot, sent: None });
        Some((source, offset, self.slots[slot].clone(), bytes))
    }

    /// Frees the slots of pieces that were dropped.
    fn take_back(&mut self) {
        while let Ok(slot) = self.returned.try_recv() {
            self.slots[slot].unmap();
            self.free.push(slot);
        }
    }

    /// Finds slots for the copies out of `bytes` of `buffer` that wait for one, because these are
    /// about to change, and for those before them, because pieces come in order; makes some if too
    /// few are free. Whether there are such copies: they are to be recorded then.
    ///
    /// # Errors
    /// Too little memory.
    pub fn reserve_slots(
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

    /// Whether pieces were begun and not taken.
    pub fn has_readbacks(&self) -> bool {
        self.is_waiting() || !self.coming.is_empty()
    }

    /// Whether copies wait for a slot.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether copies are recorded and not submitted.
    pub fn is_recorded(&self) -> bool {
        self.coming.back().is_some_and(|coming| coming.sent.is_none())
    }

    /// Maps the slots whose copies were in a submission.
    pub fn sent(&mut self, submission: &wgpu::SubmissionIndex) {
        let now = Instant::now();
        for coming in self.coming.iter_mut().rev().take_while(|coming| coming.sent.is_none()) {
            // At least 4 bytes: nothing cannot be mapped.
            let (bytes, submission) = (coming.wanted.bytes().max(4), Some(submission.clone()));
            let slot = &self.slots[coming.slot];
            let mapping = Mapping::begin(slot, wgpu::MapMode::Read, bytes, submission);
            coming.sent = Some((now, mapping));
        }
    }

    /// The next piece, if it has come; see [`crate::exec::Executor::next_readback`]. What is recorded
    /// must have been submitted.
    pub fn take(&mut self, gpu: &Gpu, wait: bool) -> Result<Option<Readback>, DeviceError> {
        let Some((since, mapping)) = self.coming.front_mut().and_then(|next| next.sent.as_mut())
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
        self.coming.pop_front().map(|coming| self.piece(gpu, coming)).transpose()
    }

    fn piece(&self, gpu: &Gpu, coming: InFlight) -> Result<Readback, DeviceError> {
        let InFlight { wanted: ReadbackRequest { bank, bucket, range, .. }, slot, .. } = coming;
        let bytes = (range.len() * ELEMENT_BYTES) as u64;
        let back = SlotGuard { slot, to: self.back.clone() };
        let view = self.slots[slot].get_mapped_range(0..bytes.max(4));
        let view = view.map_err(|why| gpu.refused(WHAT, why.to_string()))?;
        let elements = range.len();
        // Mapped memory starts at multiples of 64 bytes, but where GL has to be asked for a copy.
        let values: Box<dyn AsRef<[f32]> + Send + Sync> =
            match bytemuck::try_cast_slice::<u8, f32>(&view) {
                Ok(_) => Box::new(Mapped { view, elements, _back: back }),
                Err(_) => {
                    Box::new(bytemuck::pod_collect_to_vec::<u8, f32>(&view[..bytes as usize]))
                }
            };
        Ok(Readback { bank, bucket, range, values })
    }
}

/// Values in a slot. Fields are dropped in this order: a slot is free when nobody looks at it.
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

/// Gives a slot back when it is dropped.
struct SlotGuard {
    slot: usize,
    to: Sender<usize>,
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        // A device that is closed needs no slot.
        let _ = self.to.send(self.slot);
    }
}
