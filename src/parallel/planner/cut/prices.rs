//! Prices of runs of blocks in whole picoseconds, and the memory checks that were made.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;

use super::{CutError, CutRequest, CutStage};

/// Picoseconds of a run that is ruled out.
pub(crate) const FORBIDDEN: u64 = u64::MAX;

/// Picoseconds in a second.
const PER_SECOND: f64 = 1e12;

/// Returns the nearest whole picoseconds, 0 for a negative time.
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
        let is_square = |device: usize| {
            times[device].len() == times[0].len() && cut_s[device].len() == times[0].len()
        };
        assert!((0..stages).all(is_square), "a time and a cut per device and block");
        let before = |times: &Vec<super::BlockTimes>| {
            let mut before = vec![0];
            for block in times {
                before.push(before[before.len() - 1] + u128::from(picoseconds(block.sum_s())));
            }
            before
        };
        Prices {
            request,
            before_ps: times.iter().map(before).collect(),
            cut_ps: cut_s.iter().map(|row| row.iter().map(|&s| picoseconds(s)).collect()).collect(),
            checked: RefCell::default(),
        }
    }

    /// Returns the request.
    pub fn request(&self) -> &CutRequest<'a> {
        self.request
    }

    /// Returns the number of the model's blocks.
    pub fn blocks(&self) -> usize {
        self.before_ps[0].len() - 1
    }

    /// Returns the picoseconds of a run on a device, cuts included, or [`FORBIDDEN`].
    pub(crate) fn run_ps(&self, device: usize, run: Range<usize>) -> u64 {
        let (before, cuts) = (&self.before_ps[device], &self.cut_ps[device]);
        let mut sum = before[run.end] - before[run.start];
        if run.start > 0 {
            sum += u128::from(cuts[run.start]);
        }
        if run.end < self.blocks() {
            sum += u128::from(cuts[run.end]);
        }
        u64::try_from(sum).unwrap_or(FORBIDDEN)
    }

    /// Returns true if the device has memory for these chunks as that stage; asks the request once
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
        let has_run = |device, stage| self.has_run(device, stage);
        let error = |device, stage| CutError::Memory { device, stage };
        if self.request.is_ordered {
            let full = (0..stages).find(|&stage| !has_run(stage, stage));
            return error(full, full);
        }
        let full = (0..stages).find(|&device| (0..stages).all(|stage| !has_run(device, stage)));
        if full.is_some() {
            return error(full, None);
        }
        error(None, (0..stages).find(|&stage| (0..stages).all(|device| !has_run(device, stage))))
    }

    /// Returns true if, of the shortest allowed runs from each block on, one fits.
    fn has_run(&self, device: usize, stage: usize) -> bool {
        let after = self.request.stages - 1 - stage;
        let last = self.blocks() - after;
        let starts = if stage == 0 { 0..1 } else { stage..last };
        let shortest = |start: usize| {
            let first = if after == 0 { last } else { start + 1 };
            (first..=last).find(|&end| self.run_ps(device, start..end) != FORBIDDEN)
        };
        let mut runs = starts.filter_map(|start| Some(start..shortest(start)?));
        runs.any(|run| self.fits(device, stage, vec![run_of(run)]))
    }
}

/// Returns a run of blocks as numbers of blocks.
pub fn run_of(run: Range<usize>) -> Range<u32> {
    run.start as u32..run.end as u32
}
