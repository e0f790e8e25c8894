//! Prices of runs of blocks in whole picoseconds, and the memory checks that were made.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

use super::{CutError, CutRequest, CutStage};

/// Picoseconds of a run that is ruled out.
pub(crate) const FORBIDDEN: u64 = u64::MAX;

/// Picoseconds in a second.
const PER_SECOND: f64 = 1e12;

/// The nearest whole picoseconds, 0 for a negative time.
fn picoseconds(seconds: f64) -> u64 {
    if seconds.is_finite() { (seconds * PER_SECOND).round() as u64 } else { FORBIDDEN }
}

/// Returns the seconds of whole picoseconds.
pub fn seconds(picoseconds: u64) -> f64 {
    picoseconds as f64 / PER_SECOND
}

/// Subject of a memory check: device, stage, and the blocks of the chunks.
type Subject = (usize, usize, Vec<Range<u32>>);

/// Prices and checked memory of a request.
pub(crate) struct Prices<'a> {
    request: &'a CutRequest<'a>,
    /// By device, then by block: picoseconds of all blocks before it.
    before_ps: Vec<Vec<u128>>,
    /// By device, then by block: picoseconds of a cut before it.
    cut_ps: Vec<Vec<u64>>,
    checked: RefCell<HashMap<Subject, bool>>,
}

impl<'a> Prices<'a> {
    /// Creates the prices of a request; panics if its tables disagree in size.
    pub fn of(request: &'a CutRequest<'a>) -> Prices<'a> {
        let CutRequest { times, cut_s, stages, chunks, .. } = *request;
        assert!(stages > 0 && chunks > 0, "{stages} stages of {chunks} chunks");
        assert!(times.len() == stages && cut_s.len() == stages, "a stage per device");
        let blocks = times[0].len();
        let mut before_ps = Vec::with_capacity(stages);
        let mut cut_ps = Vec::with_capacity(stages);
        for (times, cut_s) in times.iter().zip(cut_s) {
            let is_square = times.len() == blocks && cut_s.len() == blocks;
            assert!(is_square, "a time and a cut per device and block");
            let mut sum_ps = 0;
            let mut before = vec![sum_ps];
            for block in times {
                sum_ps += u128::from(picoseconds(block.sum_s()));
                before.push(sum_ps);
            }
            before_ps.push(before);
            cut_ps.push(cut_s.iter().map(|&s| picoseconds(s)).collect());
        }
        Prices { request, before_ps, cut_ps, checked: RefCell::default() }
    }

    pub fn request(&self) -> &CutRequest<'a> {
        self.request
    }

    /// Returns the number of the model's blocks.
    pub fn blocks(&self) -> usize {
        self.before_ps[0].len() - 1
    }

    /// Picoseconds of a run on a device, cuts included, or [`FORBIDDEN`].
    pub(crate) fn run_ps(&self, device: usize, run: Range<usize>) -> u64 {
        let before = &self.before_ps[device];
        let cuts = &self.cut_ps[device];
        let mut sum = before[run.end] - before[run.start];
        if run.start > 0 {
            sum += u128::from(cuts[run.start]);
        }
        if run.end < self.blocks() {
            sum += u128::from(cuts[run.end]);
        }
        u64::try_from(sum).unwrap_or(FORBIDDEN)
    }

    /// Returns true if the device has memory for these chunks as that stage; calls the request once
    /// for each.
    pub fn fits(&self, device: usize, stage: usize, blocks: Vec<Range<u32>>) -> bool {
        let subject = (device, stage, blocks);
        if let Some(&known) = self.checked.borrow().get(&subject) {
            return known;
        }
        let fits = (self.request.fits)(CutStage { device, stage, blocks: &subject.2 });
        self.checked.borrow_mut().insert(subject, fits);
        fits
    }

    /// Returns the error that memory does not suffice, for one chunk per stage: names the first
    /// stage or device for which none of the shortest allowed runs fits.
    pub(crate) fn memory_error(&self) -> CutError {
        let stages = self.request.stages;
        if self.request.is_ordered {
            let full = (0..stages).find(|&stage| !self.has_run(stage, stage));
            return CutError::Memory { device: full, stage: full };
        }
        for device in 0..stages {
            if !(0..stages).any(|stage| self.has_run(device, stage)) {
                return CutError::Memory { device: Some(device), stage: None };
            }
        }
        for stage in 0..stages {
            if !(0..stages).any(|device| self.has_run(device, stage)) {
                return CutError::Memory { device: None, stage: Some(stage) };
            }
        }
        CutError::Memory { device: None, stage: None }
    }

    /// Returns true if one of the shortest allowed runs from each block on fits.
    fn has_run(&self, device: usize, stage: usize) -> bool {
        let after = self.request.stages - 1 - stage;
        let last = self.blocks() - after;
        let starts = if stage == 0 { 0..1 } else { stage..last };
        for start in starts {
            let first = if after == 0 { last } else { start + 1 };
            let shortest = (first..=last).find(|&end| self.run_ps(device, start..end) != FORBIDDEN);
            if let Some(end) = shortest
                && self.fits(device, stage, vec![run_of(start..end)])
            {
                return true;
            }
        }
        false
    }
}

/// Returns a run of blocks as numbers of blocks.
pub fn run_of(run: Range<usize>) -> Range<u32> {
    run.start as u32..run.end as u32
}
