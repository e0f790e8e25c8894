//! What a device is told, in the order in which it was said: copies, clears and dispatches are
//! recorded into one open encoder with long passes, and submitted in stretches that are neither
//! so short that submitting costs more than computing, nor so long that a watchdog fires.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::clock::Clock;
use super::prepare::PreparedKernel;
use super::readbacks::{ReadbackQueue, ReadbackRequest};
use crate::device::{DeviceError, Gpu, ReadbackRing, UploadRing};
use crate::exec::Readback;
use crate::exec::staging::{READBACK_SLOTS, SLOT_BYTES, UPLOAD_SLOTS};

/// Submissions that may wait for the device. Without a bound, a step of many micro-batches would
/// queue up as a whole, and the wait at its end would pass the deadline on a slow device.
const QUEUED_MAX: usize = 8;

/// The longest that a submission should take: watchdogs of drivers fire after two seconds and
/// more, and until then a screen that the device also draws stands still.
const SUBMISSION_SECONDS: f64 = 0.2;

/// Dispatches after which a stretch of nodes is submitted, so that the device has something to do
/// while the next ones are recorded.
const DISPATCHES: usize = 32;

/// A range of a buffer to read: offset and size in bytes.
pub type ReadRange<'a> = (&'a wgpu::Buffer, u64, u64);

/// What went to the device and came back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    pub submissions: u64,
    pub bytes_up: u64,
    pub bytes_back: u64,
}

/// The commands of one device.
pub struct CommandStream {
    gpu: Arc<Gpu>,
    /// Within the encoder below, so it is dropped before it.
    pass: Option<wgpu::ComputePass<'static>>,
    encoder: Option<wgpu::CommandEncoder>,
    /// What is recorded and not submitted: dispatches, and the seconds they may take.
    dispatches: usize,
    seconds: f64,
    /// Submissions that nobody has waited for, oldest first.
    queued: VecDeque<wgpu::SubmissionIndex>,
    uploads: UploadRing,
    readbacks: ReadbackRing,
    pub pieces: ReadbackQueue,
    clock: Option<Clock>,
    /// When the step under way began: at its first command, or at the report before it if only
    /// that step's updates came since.
    began: Option<Instant>,
    /// Of that step: the nominal seconds of its tasks, and what had been made when it began.
    nominal: f64,
    made: u64,
    /// Seconds per nominal second, as the last step has shown.
    pub cost_ratio: f64,
    pub traffic: Traffic,
}

impl CommandStream {
    pub fn new(gpu: Arc<Gpu>, pieces: ReadbackQueue) -> Result<Self, DeviceError> {
        Ok(Self {
            pass: None,
            encoder: None,
            dispatches: 0,
            seconds: 0.0,
            queued: VecDeque::new(),
            uploads: UploadRing::new(&gpu, UPLOAD_SLOTS, SLOT_BYTES)?,
            readbacks: ReadbackRing::new(&gpu, READBACK_SLOTS, SLOT_BYTES)?,
            pieces,
            clock: Clock::new(&gpu)?,
            began: None,
            nominal: 0.0,
            made: 0,
            cost_ratio: 1.0,
            traffic: Traffic::default(),
            gpu,
        })
    }

    /// The bytes of both rings.
    #[cfg(test)]
    pub fn rings_bytes(&self) -> u64 {
        self.uploads.bytes() + self.readbacks.bytes()
    }

    /// The encoder, outside passes.
    fn encoder(&mut self) -> &mut wgpu::CommandEncoder {
        self.pass = None;
        let device = &self.gpu.device;
        self.encoder.get_or_insert_with(|| device.create_command_encoder(&Default::default()))
    }

    /// The open pass.
    fn pass(&mut self) -> &mut wgpu::ComputePass<'static> {
        let Self { pass, encoder, clock, gpu, .. } = self;
        pass.get_or_insert_with(|| {
            let new = || gpu.device.create_command_encoder(&Default::default());
            let timestamp_writes = clock.as_mut().and_then(Clock::next_pass);
            let descriptor = wgpu::ComputePassDescriptor { label: None, timestamp_writes };
            let encoder = encoder.get_or_insert_with(new);
            encoder.begin_compute_pass(&descriptor).forget_lifetime()
        })
    }

    /// Records a task; what is recorded is submitted first if both together could take too long.
    pub fn run(&mut self, task: &PreparedKernel) -> Result<(), DeviceError> {
        let seconds = task.seconds * self.cost_ratio;
        if self.dispatches > 0 && self.seconds + seconds > SUBMISSION_SECONDS {
            self.submit()?;
        }
        task.record(self.pass());
        self.dispatches += task.dispatches.len();
        self.seconds += seconds;
        self.nominal += task.seconds;
        Ok(())
    }

    /// Submits what is recorded if it is worth it.
    pub fn submit_if_large(&mut self) -> Result<(), DeviceError> {
        if self.dispatches >= DISPATCHES {
            self.submit()?;
        }
        Ok(())
    }

    /// Zeroes a buffer.
    pub fn clear(&mut self, buffer: &wgpu::Buffer) {
        self.encoder().clear_buffer(buffer, 0, None);
    }

    /// Copies bytes of one buffer, from a position on, to the front of another.
    pub fn copy(&mut self, (from, offset): (&wgpu::Buffer, u64), to: &wgpu::Buffer, bytes: u64) {
        self.encoder().copy_buffer_to_buffer(from, offset, to, 0, bytes);
    }

    /// Begins a piece. Its copy is recorded now if a slot is free, and not submitted before
    /// [`CommandStream::submit_readbacks`] unless other commands are, so that several share a submission.
    pub fn begin_piece(&mut self, wanted: ReadbackRequest) -> Result<(), DeviceError> {
        self.pieces.begin(&self.gpu, wanted)?;
        self.record_pieces();
        Ok(())
    }

    fn record_pieces(&mut self) {
        while let Some((source, offset, slot, bytes)) = self.pieces.next_copy() {
            self.traffic.bytes_back += bytes;
            self.copy((&source, offset), &slot, bytes);
        }
    }

    /// Gives pieces that wait for a slot those that are free now, and submits what is recorded
    /// for pieces, so that they come while the device does what follows.
    pub fn submit_readbacks(&mut self) -> Result<(), DeviceError> {
        self.record_pieces();
        if self.pieces.is_recorded() {
            self.submit()?;
        }
        Ok(())
    }

    /// The next piece; see [`crate::exec::Executor::next_readback`].
    pub fn take_piece(&mut self, wait: bool) -> Result<Option<Readback>, DeviceError> {
        self.submit_readbacks()?;
        self.pieces.take(&self.gpu, wait)
    }

    /// To be called before `bytes` of `buffer` change: copies of some of them that wait for a slot
    /// are recorded.
    pub fn preserve_readbacks(
        &mut self,
        buffer: &wgpu::Buffer,
        bytes: Range<u64>,
    ) -> Result<(), DeviceError> {
        if self.pieces.reserve_slots(&self.gpu, buffer, &bytes)? {
            self.record_pieces();
        }
        Ok(())
    }

    /// Writes bytes at `offset`, both multiples of 4.
    pub fn upload(
        &mut self,
        target: &wgpu::Buffer,
        mut offset: u64,
        mut bytes: &[u8],
    ) -> Result<(), DeviceError> {
        self.traffic.bytes_up += bytes.len() as u64;
        while !bytes.is_empty() {
            if self.uploads.is_full() {
                self.submit()?;
            }
            self.encoder();
            let staged = self.uploads.stage(&self.gpu, bytes)?;
            if let Some(encoder) = &mut self.encoder {
                let (from, start, count) = (staged.buffer, staged.offset, staged.bytes);
                encoder.copy_buffer_to_buffer(from, start, target, offset, count);
            }
            offset += staged.bytes;
            bytes = &bytes[staged.bytes as usize..];
        }
        Ok(())
    }

    /// Submits what is recorded, and waits for an earlier submission if too many are queued.
    pub fn submit(&mut self) -> Result<Option<wgpu::SubmissionIndex>, DeviceError> {
        self.pass = None;
        let Some(encoder) = self.encoder.take() else { return Ok(None) };
        self.uploads.seal();
        let submission = self.gpu.queue.submit([encoder.finish()]);
        self.uploads.sent(&submission);
        self.pieces.sent(&submission);
        (self.dispatches, self.seconds) = (0, 0.0);
        self.traffic.submissions += 1;
        self.queued.push_back(submission.clone());
        if self.queued.len() > QUEUED_MAX {
            let oldest = self.queued.pop_front();
            self.gpu.wait("a submission", oldest)?;
        }
        self.gpu.check()?;
        Ok(Some(submission))
    }

    /// Reads ranges, multiples of 4 bytes, one after the other into `into`, whose length is
    /// theirs. Waits for everything recorded so far, and ends the step under way.
    pub fn read(&mut self, ranges: &[ReadRange], into: &mut [u8]) -> Result<(), DeviceError> {
        self.transfer(ranges, into)?;
        self.forget_step();
        Ok(())
    }

    /// What was timed so far belongs to no step. It has been submitted.
    fn forget_step(&mut self) {
        self.began = None;
        if let Some(clock) = &mut self.clock {
            clock.forget();
        }
    }

    /// The same within a step.
    pub fn transfer(
        &mut self,
        ranges: &[ReadRange],
        mut into: &mut [u8],
    ) -> Result<(), DeviceError> {
        let pieces = cut(ranges, self.readbacks.slot_bytes());
        let under_way = self.readbacks.slots();
        for (piece, copies) in pieces.iter().enumerate() {
            if piece >= under_way {
                let read = self.readbacks.finish(&self.gpu, piece - under_way, into)?;
                into = &mut into[read..];
            }
            let target = self.readbacks.buffer(piece).clone();
            let mut bytes = 0;
            for (buffer, offset, count) in copies {
                self.encoder().copy_buffer_to_buffer(buffer, *offset, &target, bytes, *count);
                bytes += count;
            }
            if let Some(submission) = self.submit()?.filter(|_| bytes > 0) {
                self.readbacks.begin(piece, bytes, &submission);
            }
            self.traffic.bytes_back += bytes;
        }
        for piece in pieces.len().saturating_sub(under_way)..pieces.len() {
            let read = self.readbacks.finish(&self.gpu, piece, into)?;
            into = &mut into[read..];
        }
        // The last piece came after everything else.
        self.queued.clear();
        Ok(())
    }

    /// Begins a step; its time counts from here, unless the last step's updates are still running.
    pub fn begin_step(&mut self) -> Result<(), DeviceError> {
        if self.began.is_none() {
            self.submit()?;
            self.forget_step();
            self.mark(Instant::now());
        }
        Ok(())
    }

    fn mark(&mut self, now: Instant) {
        (self.began, self.nominal, self.made) = (Some(now), 0.0, self.gpu.allocation_count());
    }

    /// Resolves the passes so far; the buffer to read then, and its bytes.
    fn resolve(&mut self) -> Option<(wgpu::Buffer, u64)> {
        self.encoder();
        self.clock.as_ref()?.resolve(self.encoder.as_mut()?)
    }

    /// [`CommandStream::read`] at the end of a step: gives the share of it in which the device was busy,
    /// if it has a clock. The next step counts from here.
    pub fn report(
        &mut self,
        ranges: &[ReadRange],
        into: &mut [u8],
    ) -> Result<Option<f64>, DeviceError> {
        let ticks = self.resolve();
        let mut ranges = ranges.to_vec();
        let tick_bytes = ticks.as_ref().map_or(0, |(_, bytes)| *bytes);
        ranges.extend(ticks.as_ref().map(|(buffer, bytes)| (buffer, 0, *bytes)));
        let mut read = vec![0; into.len() + tick_bytes as usize];
        self.transfer(&ranges, &mut read)?;
        let (values, ticks) = read.split_at(into.len());
        into.copy_from_slice(values);
        Ok(self.close_step(ticks))
    }

    /// Learns from the step that was reported, and begins the next; the busy share.
    fn close_step(&mut self, ticks: &[u8]) -> Option<f64> {
        let now = Instant::now();
        let busy = self.clock.as_mut().and_then(|clock| {
            let busy = clock.busy_seconds(ticks);
            clock.forget();
            busy
        });
        let seconds = self.began.map(|began| now.duration_since(began).as_secs_f64());
        let share = busy.zip(seconds).and_then(|(busy, seconds)| share(busy, seconds));
        // The time of a step that compiled shaders says little about the device, and without a
        // clock what it waited for others counts as well.
        if let Some(seconds) = seconds
            && self.made == self.gpu.allocation_count()
            && self.nominal > 0.0
        {
            self.cost_ratio = seconds * share.unwrap_or(1.0) / self.nominal;
        }
        self.mark(now);
        share
    }

    /// The seconds that a task takes alone, by the device's clock, or else by many repetitions in
    /// one submission. Waits.
    pub fn profile(&mut self, task: &PreparedKernel) -> Result<f64, DeviceError> {
        self.finish()?;
        self.forget_step();
        self.run(task)?;
        if let Some((buffer, bytes)) = self.resolve() {
            let mut ticks = vec![0; bytes as usize];
            self.transfer(&[(&buffer, 0, bytes)], &mut ticks)?;
            let seconds = self.clock.as_ref().and_then(|clock| clock.busy_seconds(&ticks));
            if let Some(seconds) = seconds {
                return Ok(seconds);
            }
        }
        self.time_by_repeating(task)
    }

    /// [`CommandStream::profile`] without the device's clock.
    pub fn time_by_repeating(&mut self, task: &PreparedKernel) -> Result<f64, DeviceError> {
        /// Long beside a submission, short beside a watchdog.
        const SECONDS: f64 = 0.02;
        const REPEATS_MAX: f64 = 256.0;
        let empty = self.wall(task, 0)?;
        let once = (self.wall(task, 1)? - empty).max(1e-6);
        let repeats = (SECONDS / once).clamp(1.0, REPEATS_MAX) as u32;
        let seconds = self.wall(task, repeats)? - empty;
        Ok(seconds.max(0.0) / f64::from(repeats))
    }

    /// The wall time of a submission with so many repetitions of a task.
    fn wall(&mut self, task: &PreparedKernel, repeats: u32) -> Result<f64, DeviceError> {
        let started = Instant::now();
        self.encoder();
        for _ in 0..repeats {
            task.record(self.pass());
        }
        self.finish()?;
        Ok(started.elapsed().as_secs_f64())
    }

    /// Submits what is recorded and waits for all of it.
    fn finish(&mut self) -> Result<(), DeviceError> {
        self.submit()?;
        self.queued.clear();
        self.gpu.wait("what was queued", None)
    }
}

/// The busy share of a step. A clock that counts more than the time that passed is no clock.
fn share(busy: f64, seconds: f64) -> Option<f64> {
    const OFF: f64 = 1.05;
    (busy <= OFF * seconds).then(|| (busy / seconds).min(1.0))
}

/// Ranges in pieces of at most `piece_bytes` bytes, each from as many ranges as it takes.
fn cut<'a>(ranges: &[ReadRange<'a>], piece_bytes: u64) -> Vec<Vec<ReadRange<'a>>> {
    let (mut pieces, mut room) = (vec![Vec::new()], piece_bytes);
    for &(buffer, mut offset, mut bytes) in ranges {
        while bytes > 0 {
            if room == 0 {
                pieces.push(Vec::new());
                room = piece_bytes;
            }
            let count = bytes.min(room);
            if let Some(piece) = pieces.last_mut() {
                piece.push((buffer, offset, count));
            }
            (offset, bytes, room) = (offset + count, bytes - count, room - count);
        }
    }
    pieces
}
