//! Command stream of one device: records copies, clears and dispatches in call order into one open
//! encoder with long passes, and submits them in batches of bounded duration: neither so short
//! that submitting costs more than computing, nor so long that a watchdog of the driver fires. A
//! dispatch that would take longer is submitted in parts.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::pass_count::{self, COUNT_BYTES, PassCounter};
use super::prepare::PreparedKernel;
use super::readbacks::{ReadbackQueue, ReadbackRequest};
use crate::device::{
    DeviceError, Gpu, ReadMethod, ReadbackRing, Timestamps, UploadRing, mapped_reads,
};
use crate::exec::Readback;
use crate::exec::staging::{READBACK_SLOTS, SLOT_BYTES, UPLOAD_SLOTS};
use crate::pace::{fitting, part_seconds};
use crate::{BoundDispatch, PaceTrial, Pipelines};

/// Backpressure: submissions that may be in flight. Without a bound, a step of many micro-batches
/// would be queued as a whole, and the wait at its end would pass the deadline on a slow device.
const QUEUED_MAX: usize = 8;

/// Dispatches after which the recorded nodes are submitted, so that the device has work while the
/// next ones are recorded.
const DISPATCHES: usize = 32;

/// Passes that are timed between two readings; a step has a few per micro-batch.
const TIMED_PASSES_MAX: u32 = 1024;

/// Range of a buffer to read: offset and size in bytes.
pub(crate) type ReadRange<'a> = (&'a wgpu::Buffer, u64, u64);

/// Counters of submissions and of bytes uploaded and read back.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Traffic {
    pub submissions: u64,
    pub(crate) bytes_up: u64,
    pub(crate) bytes_back: u64,
    /// Longest time from the beginning of the first pass of a submission to the end of its last
    /// one, in the steps reported so far, by the device's clock; 0 without one.
    pub(crate) longest_submission_s: f64,
}

/// Command stream of one device, with its transfers.
pub(crate) struct CommandStream {
    gpu: Arc<Gpu>,
    /// Open compute pass. It records into `encoder`, so it is dropped first.
    pass: Option<wgpu::ComputePass<'static>>,
    encoder: Option<wgpu::CommandEncoder>,
    /// Dispatches that are recorded and not submitted: their number, the seconds that they may
    /// take, and the names of their kernels.
    dispatches: usize,
    seconds: f64,
    names: Vec<Arc<str>>,
    /// Submissions that no call has waited for, oldest first.
    queued: VecDeque<wgpu::SubmissionIndex>,
    uploads: UploadRing,
    readbacks: ReadbackRing,
    passes: PassCounter,
    pub(crate) readback_queue: ReadbackQueue,
    clock: Option<Timestamps>,
    /// Start of the current step: its first command, or the report before it if only the previous
    /// step's updates were recorded since.
    began: Option<Instant>,
    /// Nominal seconds of the kernels of the current step.
    nominal: f64,
    /// Allocation count at the start of the current step.
    made: u64,
    /// Measured seconds per nominal second, from the last step.
    pub(crate) cost_ratio: f64,
    /// Predicted seconds of the dispatches of the current step.
    predicted: f64,
    /// Part of `predicted` in dispatches at known paces.
    paced: f64,
    /// Factor, at least 1, by which the device was slower in the last step than when paces were
    /// measured: another process uses it, or it has become hot.
    slowdown: f64,
    pub traffic: Traffic,
    /// True to submit nothing in place of the next commands.
    #[cfg(test)]
    pub(crate) drops_next: bool,
}

impl CommandStream {
    pub fn new(
        gpu: Arc<Gpu>,
        pipelines: &mut Pipelines,
        readback_queue: ReadbackQueue,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            pass: None,
            encoder: None,
            dispatches: 0,
            seconds: 0.0,
            names: Vec::new(),
            queued: VecDeque::new(),
            uploads: UploadRing::new(&gpu, UPLOAD_SLOTS, SLOT_BYTES)?,
            readbacks: ReadbackRing::new(&gpu, READBACK_SLOTS, SLOT_BYTES)?,
            passes: PassCounter::new(&gpu, pipelines)?,
            readback_queue,
            clock: Timestamps::new(&gpu, TIMED_PASSES_MAX)?,
            began: None,
            nominal: 0.0,
            made: 0,
            cost_ratio: 1.0,
            predicted: 0.0,
            paced: 0.0,
            slowdown: 1.0,
            traffic: Traffic::default(),
            #[cfg(test)]
            drops_next: false,
            gpu,
        })
    }

    #[cfg(test)]
    pub(crate) fn rings_bytes(&self) -> u64 {
        self.uploads.bytes() + self.readbacks.bytes()
    }

    fn end_pass(&mut self) {
        if let Some(mut pass) = self.pass.take() {
            self.passes.end(&mut pass);
        }
    }

    /// Encoder, after ending the open pass.
    fn encoder(&mut self) -> &mut wgpu::CommandEncoder {
        self.end_pass();
        let device = &self.gpu.device;
        self.encoder.get_or_insert_with(|| device.create_command_encoder(&Default::default()))
    }

    /// Returns the open pass, or begins one.
    fn pass(&mut self) -> &mut wgpu::ComputePass<'static> {
        let Self { pass, encoder, clock, gpu, .. } = self;
        pass.get_or_insert_with(|| {
            let encoder = encoder
                .get_or_insert_with(|| gpu.device.create_command_encoder(&Default::default()));
            let timestamp_writes = clock.as_mut().and_then(Timestamps::next_pass);
            let descriptor = wgpu::ComputePassDescriptor { label: None, timestamp_writes };
            encoder.begin_compute_pass(&descriptor).forget_lifetime()
        })
    }

    /// Records a prepared kernel. Submits the commands recorded before it first if together with it
    /// they could take too long. A dispatch that would take too long by itself is submitted in
    /// parts.
    pub fn run(&mut self, task: &PreparedKernel) -> Result<(), DeviceError> {
        for (bound, pace) in task.dispatches.iter().zip(&task.paces) {
            // One of several dispatches may have almost all of the cost.
            let seconds_max = task.seconds * self.cost_ratio.max(1.0);
            match pace.get() {
                Some(pace) => self.run_at_pace(bound, pace)?,
                None if bound.can_split() && seconds_max > self.part_seconds() => {
                    pace.set(self.try_pace(bound, seconds_max)?);
                }
                None => {
                    let each = task.seconds * self.cost_ratio / task.dispatches.len() as f64;
                    self.predicted += each;
                    self.make_room(each)?;
                    self.record(bound, &bound.part(0, u32::MAX), each);
                }
            }
        }
        self.nominal += task.seconds;
        Ok(())
    }

    /// Submits the recorded dispatches if they could take too long together with another of
    /// `seconds`.
    fn make_room(&mut self, seconds: f64) -> Result<(), DeviceError> {
        if self.dispatches > 0 && self.seconds + seconds > self.gpu.submission_seconds {
            self.submit()?;
        }
        Ok(())
    }

    fn part_seconds(&self) -> f64 {
        part_seconds(self.gpu.submission_seconds)
    }

    /// Records a part of a dispatch that may take `seconds`.
    fn record(&mut self, bound: &BoundDispatch, part: &Range<u32>, seconds: f64) {
        bound.record_part(self.pass(), part);
        self.names.push(bound.label().clone());
        self.dispatches += 1;
        self.seconds += seconds;
    }

    /// Records a dispatch at a known pace; a long one in parts, each in a separate submission.
    fn run_at_pace(&mut self, bound: &BoundDispatch, pace: f64) -> Result<(), DeviceError> {
        let predicted = pace * f64::from(bound.workgroups());
        self.predicted += predicted;
        self.paced += predicted;
        let pace = pace * self.slowdown;
        let most = fitting(self.part_seconds(), pace);
        let workgroups = bound.workgroups();
        if workgroups <= most {
            let whole = bound.part(0, most);
            let seconds = pace * f64::from(whole.end - whole.start);
            self.make_room(seconds)?;
            self.record(bound, &whole, seconds);
            return Ok(());
        }
        self.submit()?;
        let mut first = 0;
        while first < workgroups {
            let part = bound.part(first, most);
            self.record(bound, &part, pace * f64::from(part.end - part.start));
            self.submit()?;
            first = part.end;
        }
        Ok(())
    }

    /// Runs a dispatch that takes at most `seconds_max` on the slowest device in parts that grow,
    /// and waits for each; returns the pace.
    fn try_pace(
        &mut self,
        bound: &BoundDispatch,
        seconds_max: f64,
    ) -> Result<Option<f64>, DeviceError> {
        self.finish()?;
        let submission = self.gpu.submission_seconds;
        let mut trial = PaceTrial::new(bound.workgroups(), seconds_max, submission);
        while let Some((first, most)) = trial.next_part() {
            let part = bound.part(first, most);
            let started = Instant::now();
            self.record(bound, &part, 0.0);
            self.finish()?;
            trial.note(&part, started.elapsed().as_secs_f64());
        }
        Ok(trial.pace())
    }

    /// Submits the recorded commands if there are enough of them.
    pub(crate) fn submit_if_large(&mut self) -> Result<(), DeviceError> {
        if self.dispatches >= DISPATCHES {
            self.submit()?;
        }
        Ok(())
    }

    pub fn clear(&mut self, buffer: &wgpu::Buffer) {
        self.encoder().clear_buffer(buffer, 0, None);
    }

    /// Copies bytes of one buffer, starting at an offset, to the front of another.
    pub fn copy(&mut self, from: &wgpu::Buffer, offset: u64, to: &wgpu::Buffer, bytes: u64) {
        self.encoder().copy_buffer_to_buffer(from, offset, to, 0, bytes);
    }

    /// Starts a readback. Its copy is recorded now if a slot is free, and not submitted before
    /// [`CommandStream::submit_readbacks`] unless other commands are, so that several share a
    /// submission.
    pub fn start_readback(&mut self, wanted: ReadbackRequest) -> Result<(), DeviceError> {
        self.readback_queue.begin(&self.gpu, wanted)?;
        self.record_pieces();
        Ok(())
    }

    fn record_pieces(&mut self) {
        while let Some(copy) = self.readback_queue.next_copy() {
            self.traffic.bytes_back += copy.bytes;
            self.copy(&copy.source, copy.offset, &copy.slot, copy.bytes);
        }
    }

    /// Records the waiting readbacks for which a slot is free now, and submits recorded readbacks,
    /// so that they complete while the device runs the commands that follow.
    pub(crate) fn submit_readbacks(&mut self) -> Result<(), DeviceError> {
        self.record_pieces();
        if self.readback_queue.is_recorded() {
            self.submit()?;
        }
        Ok(())
    }

    /// Returns the next completed readback; see [`crate::exec::Executor::next_readback`].
    pub fn next_readback(&mut self, wait: bool) -> Result<Option<Readback>, DeviceError> {
        self.submit_readbacks()?;
        self.readback_queue.take(&self.gpu, wait)
    }

    /// Records the copies that wait for a slot and cover some of `bytes` of `buffer`. Must be
    /// called before these bytes change.
    pub(crate) fn preserve_readbacks(
        &mut self,
        buffer: &wgpu::Buffer,
        bytes: Range<u64>,
    ) -> Result<(), DeviceError> {
        if self.readback_queue.reserve_slots(&self.gpu, buffer, &bytes)? {
            self.record_pieces();
        }
        Ok(())
    }

    /// Uploads bytes to `offset`; their number and the offset are multiples of 4.
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
                encoder.copy_buffer_to_buffer(
                    staged.buffer,
                    staged.offset,
                    target,
                    offset,
                    staged.bytes,
                );
            }
            offset += staged.bytes;
            bytes = &bytes[staged.bytes as usize..];
        }
        Ok(())
    }

    /// Submits the recorded commands, and waits for an earlier submission if too many are in
    /// flight.
    pub fn submit(&mut self) -> Result<Option<wgpu::SubmissionIndex>, DeviceError> {
        self.end_pass();
        let Some(mut encoder) = self.encoder.take() else { return Ok(None) };
        self.passes.require_pass(&mut encoder);
        #[cfg(test)]
        if std::mem::take(&mut self.drops_next) {
            encoder = self.gpu.device.create_command_encoder(&Default::default());
        }
        self.uploads.seal();
        if let Some(clock) = &mut self.clock {
            clock.end_submission();
        }
        self.gpu.note_submitted(&self.names);
        self.names.clear();
        let submission = self.gpu.queue.submit([encoder.finish()]);
        self.passes.sent();
        self.uploads.sent(&submission);
        self.readback_queue.sent(&submission);
        self.dispatches = 0;
        self.seconds = 0.0;
        self.traffic.submissions += 1;
        self.queued.push_back(submission.clone());
        if self.queued.len() > QUEUED_MAX {
            let oldest = self.queued.pop_front();
            self.gpu.wait("a submission", oldest)?;
        }
        self.gpu.check()?;
        Ok(Some(submission))
    }

    /// Reads ranges, multiples of 4 bytes, one after the other into `into`, whose length is the sum
    /// of the ranges' lengths. Waits for everything recorded so far, and ends the current step.
    pub fn read(&mut self, ranges: &[ReadRange], into: &mut [u8]) -> Result<(), DeviceError> {
        self.transfer(ranges, into)?;
        self.forget_step();
        Ok(())
    }

    /// Discards the timing so far, because it belongs to no step. The timed commands must have
    /// been submitted.
    fn forget_step(&mut self) {
        self.began = None;
        if let Some(clock) = &mut self.clock {
            clock.forget();
        }
    }

    /// Reads ranges as [`CommandStream::read`] does, without ending the current step. The count
    /// of the passes that the device has run is read with them, and checked.
    pub fn transfer(&mut self, ranges: &[ReadRange], into: &mut [u8]) -> Result<(), DeviceError> {
        let mut parts = cut(ranges, self.readbacks.slot_bytes());
        if bytes_of(parts.last()) + COUNT_BYTES > self.readbacks.slot_bytes() {
            parts.push(Vec::new());
        }
        let in_flight_max = self.readbacks.slots();
        let mut taken = Taken { method: self.gpu.read_method, values: into, count: Vec::new() };
        for (part, copies) in parts.iter().enumerate() {
            if part >= in_flight_max {
                let earlier = part - in_flight_max;
                self.readbacks.finish(&self.gpu, earlier, |mapped| taken.take(mapped))?;
            }
            let target = self.readbacks.buffer(part).clone();
            let mut bytes = 0;
            for (buffer, offset, count) in copies {
                self.encoder().copy_buffer_to_buffer(buffer, *offset, &target, bytes, *count);
                bytes += count;
            }
            self.traffic.bytes_back += bytes;
            if part + 1 == parts.len() {
                self.copy_count(&target, bytes);
                bytes += COUNT_BYTES;
            }
            if let Some(submission) = self.submit()? {
                self.readbacks.begin(part, bytes, &submission);
            }
        }
        for part in parts.len().saturating_sub(in_flight_max)..parts.len() {
            self.readbacks.finish(&self.gpu, part, |mapped| taken.take(mapped))?;
        }
        // The last chunk was copied after everything else.
        self.queued.clear();
        pass_count::check(&self.gpu, self.passes.recorded, &taken.count)
    }

    /// Records a copy of the count of passes, one of these commands among them, to an offset of
    /// `target`.
    fn copy_count(&mut self, target: &wgpu::Buffer, offset: u64) {
        self.encoder();
        let Some(encoder) = &mut self.encoder else { return };
        self.passes.require_pass(encoder);
        encoder.copy_buffer_to_buffer(&self.passes.count, 0, target, offset, COUNT_BYTES);
    }

    /// Begins a step; its time counts from here, unless the previous report has already begun it.
    pub fn begin_step(&mut self) -> Result<(), DeviceError> {
        if self.began.is_none() {
            self.submit()?;
            self.forget_step();
            self.mark(Instant::now());
        }
        Ok(())
    }

    fn mark(&mut self, now: Instant) {
        self.began = Some(now);
        self.nominal = 0.0;
        self.made = self.gpu.allocation_count();
        self.predicted = 0.0;
        self.paced = 0.0;
    }

    /// Resolves the timestamps of the passes so far; returns the buffer with the ticks, and its
    /// bytes.
    fn resolve(&mut self) -> Option<(wgpu::Buffer, u64)> {
        self.encoder();
        self.clock.as_ref()?.resolve(self.encoder.as_mut()?)
    }

    /// Reads ranges at the end of a step, as [`CommandStream::read`] does; returns the fraction of
    /// the step in which the device was busy, if it has a clock. The next step counts from here.
    pub fn report(
        &mut self,
        ranges: &[ReadRange],
        into: &mut [u8],
    ) -> Result<Option<f64>, DeviceError> {
        let ticks = self.resolve();
        let mut ranges = ranges.to_vec();
        let mut tick_bytes = 0;
        if let Some((buffer, bytes)) = &ticks {
            ranges.push((buffer, 0, *bytes));
            tick_bytes = *bytes as usize;
        }
        let mut read = vec![0; into.len() + tick_bytes];
        self.transfer(&ranges, &mut read)?;
        let (values, ticks) = read.split_at(into.len());
        into.copy_from_slice(values);
        Ok(self.close_step(ticks))
    }

    /// Calibrates the cost ratio by the step that was reported, and begins the next step; returns
    /// the busy fraction.
    fn close_step(&mut self, ticks: &[u8]) -> Option<f64> {
        let now = Instant::now();
        let mut busy = None;
        if let Some(clock) = &mut self.clock {
            busy = clock.busy_seconds(ticks);
            let longest = clock.longest_submission_seconds(ticks).unwrap_or(0.0);
            self.traffic.longest_submission_s = self.traffic.longest_submission_s.max(longest);
            clock.forget();
        }
        if let Some(busy) = busy {
            self.follow(busy);
        }
        let seconds = self.began.map(|began| now.duration_since(began).as_secs_f64());
        let share = match (busy, seconds) {
            (Some(busy), Some(seconds)) => share(busy, seconds),
            _ => None,
        };
        // The time of a step that compiled shaders does not represent the device, and without a
        // clock it includes the time that the device waited for other ranks.
        if let Some(seconds) = seconds
            && self.made == self.gpu.allocation_count()
            && self.nominal > 0.0
        {
            self.cost_ratio = seconds * share.unwrap_or(1.0) / self.nominal;
        }
        self.mark(now);
        share
    }

    /// Adapts the slowdown to the seconds in which the device was busy in a step, if most of them
    /// were in dispatches at known paces.
    fn follow(&mut self, busy: f64) {
        /// Below this ratio, the paces are right.
        const SLOWER: f64 = 2.0;
        /// Above this ratio, parts would have no work.
        const SLOWEST: f64 = 64.0;
        let ratio = busy / self.predicted;
        let is_slower = self.paced > 0.5 * self.predicted && ratio > SLOWER;
        self.slowdown = if is_slower { ratio.min(SLOWEST) } else { 1.0 };
    }

    /// Returns the seconds that a prepared kernel takes by itself, by the device's clock, or else
    /// by many repetitions in one submission. Waits for the device.
    pub fn time(&mut self, task: &PreparedKernel) -> Result<f64, DeviceError> {
        self.finish()?;
        self.forget_step();
        self.run(task)?;
        // The count of passes is no part of the kernel's time.
        self.pass = None;
        if let Some((buffer, bytes)) = self.resolve() {
            let mut ticks = vec![0; bytes as usize];
            self.transfer(&[(&buffer, 0, bytes)], &mut ticks)?;
            if let Some(clock) = &self.clock
                && let Some(seconds) = clock.busy_seconds(&ticks)
            {
                return Ok(seconds);
            }
        }
        self.time_by_repeating(task)
    }

    /// Measures as [`CommandStream::time`] does, without the device's clock.
    pub(crate) fn time_by_repeating(&mut self, task: &PreparedKernel) -> Result<f64, DeviceError> {
        /// Long compared with the cost of a submission, short compared with the timeout of a
        /// watchdog.
        const SECONDS: f64 = 0.02;
        const REPEATS_MAX: f64 = 256.0;
        let empty = self.wall(task, 0)?;
        let once = (self.wall(task, 1)? - empty).max(1e-6);
        let repeats = (SECONDS / once).clamp(1.0, REPEATS_MAX) as u32;
        let seconds = self.wall(task, repeats)? - empty;
        Ok(seconds.max(0.0) / f64::from(repeats))
    }

    /// Wall time of a submission with `repeats` runs of a prepared kernel.
    fn wall(&mut self, task: &PreparedKernel, repeats: u32) -> Result<f64, DeviceError> {
        let started = Instant::now();
        self.encoder();
        for _ in 0..repeats {
            self.run(task)?;
        }
        self.finish()?;
        Ok(started.elapsed().as_secs_f64())
    }

    /// Submits the recorded commands and waits for all submissions.
    fn finish(&mut self) -> Result<(), DeviceError> {
        self.submit()?;
        self.queued.clear();
        self.gpu.wait("what was queued", None)
    }
}

/// Returns the busy fraction of a step; `None` if the clock counted more time than passed, which
/// makes it unusable.
fn share(busy: f64, seconds: f64) -> Option<f64> {
    const OFF: f64 = 1.05;
    if busy <= OFF * seconds { Some((busy / seconds).min(1.0)) } else { None }
}

/// Bytes taken from the slots of a transfer: the values, and behind them the count of passes.
struct Taken<'a> {
    method: ReadMethod,
    /// Values that are still to come.
    values: &'a mut [u8],
    count: Vec<u8>,
}

impl Taken<'_> {
    fn take(&mut self, mapped: &[u8]) {
        let (values, count) = mapped.split_at(mapped.len().min(self.values.len()));
        let (into, rest) = std::mem::take(&mut self.values).split_at_mut(values.len());
        mapped_reads::copy(self.method, values, into);
        self.values = rest;
        self.count.extend_from_slice(count);
    }
}

/// Bytes of the ranges of a chunk.
fn bytes_of(part: Option<&Vec<ReadRange>>) -> u64 {
    part.iter().flat_map(|ranges| ranges.iter()).map(|(_, _, bytes)| bytes).sum()
}

/// Splits ranges into chunks of at most `piece_bytes` bytes, each from one or more ranges.
fn cut<'a>(ranges: &[ReadRange<'a>], piece_bytes: u64) -> Vec<Vec<ReadRange<'a>>> {
    let mut parts = vec![Vec::new()];
    let mut room = piece_bytes;
    for &(buffer, mut offset, mut bytes) in ranges {
        while bytes > 0 {
            if room == 0 {
                parts.push(Vec::new());
                room = piece_bytes;
            }
            let count = bytes.min(room);
            if let Some(part) = parts.last_mut() {
                part.push((buffer, offset, count));
            }
            offset += count;
            bytes -= count;
            room -= count;
        }
    }
    parts
}
