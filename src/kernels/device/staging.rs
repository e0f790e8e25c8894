//! Staging rings of mapped buffers between host and device, made once. An upload is written into
//! mapped memory and copied from there by the next submission; a readback is copied into a slot,
//! which is mapped when its submission is done. Both rings hold a fixed number of bytes: longer
//! transfers are split into chunks, with double buffering, so that the host works on one slot while
//! the device works on another.

use std::sync::mpsc;

use super::error::DeviceError;
use super::gpu::Gpu;

/// Alignment of chunks in a slot; mapped ranges must start at multiples of 8.
const ALIGNMENT: u64 = 16;

/// Pending mapping of a slot, which completes when the device is done with a submission.
pub(crate) struct Mapping {
    submission: Option<wgpu::SubmissionIndex>,
    result: mpsc::Receiver<Result<(), wgpu::BufferAsyncError>>,
    done: bool,
}

impl Mapping {
    /// Starts mapping the front of a buffer; the mapping completes when the device is done with
    /// `submission` and all other submissions that use the buffer.
    pub fn begin(
        buffer: &wgpu::Buffer,
        mode: wgpu::MapMode,
        bytes: u64,
        submission: Option<wgpu::SubmissionIndex>,
    ) -> Self {
        let (sender, result) = mpsc::sync_channel(1);
        buffer.map_async(mode, 0..bytes, move |mapped| {
            // The receiver may be gone: the device is being closed.
            let _ = sender.send(mapped);
        });
        Self { submission, result, done: false }
    }

    /// Returns true if calls to the device have reported so far that the slot is mapped.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the device fails.
    pub fn is_done(&mut self, gpu: &Gpu, what: &str) -> Result<bool, DeviceError> {
        if let Ok(mapped) = self.result.try_recv() {
            mapped.map_err(|why| gpu.refused(what, why.to_string()))?;
            self.done = true;
        }
        Ok(self.done)
    }

    /// Waits until the slot is mapped: not at all if earlier calls have found it done, otherwise
    /// for its submission and earlier ones.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the device fails or misses its deadline.
    pub fn wait(&mut self, gpu: &Gpu, what: &str) -> Result<(), DeviceError> {
        if self.is_done(gpu, what)? {
            return Ok(());
        }
        gpu.wait(what, self.submission.clone())?;
        // The callbacks of a submission are called by the poll that finds it done.
        if self.is_done(gpu, what)? {
            Ok(())
        } else {
            Err(gpu.refused(what, "it was not mapped".into()))
        }
    }
}

/// Staged bytes in a slot, to be copied to their destination.
pub(crate) struct Staged<'a> {
    pub buffer: &'a wgpu::Buffer,
    pub offset: u64,
    pub bytes: u64,
}

struct UploadSlot {
    buffer: wgpu::Buffer,
    /// `None` while the slot is mapped.
    mapping: Option<Mapping>,
}

/// Upload ring. A submission uses one slot: the caller calls [`UploadRing::seal`] before it
/// submits and [`UploadRing::sent`] after, and submits when [the slot is full](Self::is_full).
pub(crate) struct UploadRing {
    slots: Vec<UploadSlot>,
    slot_bytes: u64,
    /// Slot of the next submission.
    current: usize,
    /// Bytes of this slot that are taken.
    taken: u64,
}

impl UploadRing {
    /// Returns a ring of `slots` slots of `slot_bytes` bytes each, a multiple of 256.
    pub fn new(gpu: &Gpu, slots: usize, slot_bytes: u64) -> Result<Self, DeviceError> {
        use wgpu::BufferUsages as Usage;
        let usage = Usage::MAP_WRITE | Usage::COPY_SRC;
        let mut made = Vec::with_capacity(slots);
        for _ in 0..slots {
            let buffer = gpu.buffer("upload", slot_bytes, usage)?;
            let mut mapping = Mapping::begin(&buffer, wgpu::MapMode::Write, slot_bytes, None);
            mapping.wait(gpu, "mapping an upload buffer")?;
            made.push(UploadSlot { buffer, mapping: None });
        }
        Ok(Self { slots: made, slot_bytes, current: 0, taken: 0 })
    }

    /// Returns the bytes of all slots.
    #[cfg(test)]
    pub fn bytes(&self) -> u64 {
        self.slots.len() as u64 * self.slot_bytes
    }

    /// Returns true if nothing fits before the next submission.
    pub fn is_full(&self) -> bool {
        self.taken >= self.slot_bytes
    }

    /// Stages as much of the front of `bytes`, whose length is a multiple of 4, as fits. Waits if
    /// the device has not yet read the previous contents of the slot.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the device fails or misses its deadline.
    pub fn stage(&mut self, gpu: &Gpu, bytes: &[u8]) -> Result<Staged<'_>, DeviceError> {
        let what = "an upload";
        let offset = self.taken;
        let room = self.slot_bytes.saturating_sub(self.taken);
        let count = room.min(bytes.len() as u64);
        let slot = &mut self.slots[self.current];
        if let Some(mut mapping) = slot.mapping.take() {
            mapping.wait(gpu, what)?;
        }
        let range = offset..offset + count;
        let view = slot.buffer.get_mapped_range_mut(range);
        let mut view = view.map_err(|why| gpu.refused(what, why.to_string()))?;
        view.copy_from_slice(&bytes[..count as usize]);
        self.taken = (offset + count).next_multiple_of(ALIGNMENT);
        Ok(Staged { buffer: &slot.buffer, offset, bytes: count })
    }

    /// Unmaps the slot, so that the device can read it. Nothing may be staged until
    /// [`UploadRing::sent`].
    pub(crate) fn seal(&mut self) {
        if self.taken > 0 {
            self.slots[self.current].buffer.unmap();
        }
    }

    /// Advances to the next slot; the submitted one is mapped again when the submission is done.
    pub fn sent(&mut self, submission: &wgpu::SubmissionIndex) {
        if self.taken == 0 {
            return;
        }
        let slot = &mut self.slots[self.current];
        slot.mapping = Some(Mapping::begin(
            &slot.buffer,
            wgpu::MapMode::Write,
            self.slot_bytes,
            Some(submission.clone()),
        ));
        self.current = (self.current + 1) % self.slots.len();
        self.taken = 0;
    }
}

struct ReadbackSlot {
    buffer: wgpu::Buffer,
    /// Pending mapping of the slot, and the number of bytes that are copied into it.
    coming: Option<(Mapping, u64)>,
}

/// Readback ring: slots used in rotation.
pub(crate) struct ReadbackRing {
    slots: Vec<ReadbackSlot>,
    slot_bytes: u64,
}

impl ReadbackRing {
    /// Returns a ring of `slots` slots of `slot_bytes` bytes each, a multiple of 256.
    pub fn new(gpu: &Gpu, slots: usize, slot_bytes: u64) -> Result<Self, DeviceError> {
        let mut made = Vec::with_capacity(slots);
        for _ in 0..slots {
            made.push(ReadbackSlot { buffer: gpu.readback(slot_bytes)?, coming: None });
        }
        Ok(Self { slots: made, slot_bytes })
    }

    /// Returns the bytes of all slots.
    #[cfg(test)]
    pub fn bytes(&self) -> u64 {
        self.slots.len() as u64 * self.slot_bytes
    }

    /// The most bytes of a chunk.
    pub(crate) fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Returns the buffer into which chunk `piece` is copied. [`ReadbackRing::finish`] must have
    /// taken the previous chunk in it, `slots` chunks before.
    pub fn buffer(&self, piece: usize) -> &wgpu::Buffer {
        &self.slots[piece % self.slots.len()].buffer
    }

    /// Returns the number of chunks that may be in flight.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Starts mapping a chunk of `bytes` bytes; the mapping completes when the submission that
    /// copies it is done.
    pub fn begin(&mut self, piece: usize, bytes: u64, submission: &wgpu::SubmissionIndex) {
        let index = piece % self.slots.len();
        let slot = &mut self.slots[index];
        let submission = Some(submission.clone());
        let mapping = Mapping::begin(&slot.buffer, wgpu::MapMode::Read, bytes, submission);
        slot.coming = Some((mapping, bytes));
    }

    /// Waits for a chunk, passes its mapped bytes to `take`, and frees its slot.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the device fails or misses its deadline.
    pub fn finish(
        &mut self,
        gpu: &Gpu,
        piece: usize,
        take: impl FnOnce(&[u8]),
    ) -> Result<(), DeviceError> {
        let what = "a readback";
        let index = piece % self.slots.len();
        let slot = &mut self.slots[index];
        let Some((mut mapping, bytes)) = slot.coming.take() else { return Ok(()) };
        mapping.wait(gpu, what)?;
        let view = slot.buffer.get_mapped_range(0..bytes);
        let view = view.map_err(|why| gpu.refused(what, why.to_string()))?;
        take(&view);
        drop(view);
        slot.buffer.unmap();
        Ok(())
    }
}
