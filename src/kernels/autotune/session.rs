//! Session of certification and timing: the progress meter, and the timer with the errors that the
//! session survives.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::certify::variant_hash;
use super::plan_calls::PlanCall;
use super::timing::VariantTimer;
use crate::device::{DeviceError, Gpu};

/// Progress of certification and timing.
#[derive(Clone, Debug, PartialEq)]
pub struct TuneProgress {
    /// Kernels of the plan that are done, out of `total`.
    pub done: usize,
    pub total: usize,
    pub elapsed: Duration,
    /// Names of the kernels that the driver compiles, if it takes long or if one is suspected of
    /// ending the process.
    pub compiling: Option<String>,
}

/// Counts the kernels that are done, and reports the progress.
pub(crate) struct ProgressMeter<'a> {
    started: Instant,
    waiting: BTreeSet<String>,
    total: usize,
    report: &'a mut dyn FnMut(TuneProgress),
}

impl<'a> ProgressMeter<'a> {
    /// Returns a meter of the kernels of these calls, with no kernel done.
    pub fn new(gpu: &Gpu, calls: &[PlanCall], report: &'a mut dyn FnMut(TuneProgress)) -> Self {
        let started = Instant::now();
        let mut waiting = BTreeSet::new();
        for planned in calls {
            let call = planned.owned_call.call();
            for variant in &planned.variants {
                waiting.insert(variant_hash(gpu.checks, &call, variant));
            }
        }
        Self { started, total: waiting.len(), waiting, report }
    }

    /// Notes that a kernel is done, and reports the progress.
    pub fn passed(&mut self, hash: String) {
        self.waiting.remove(&hash);
        self.tell(None);
    }

    /// Reports the progress again, as a sign of life.
    pub fn alive(&mut self) {
        self.tell(None);
    }

    /// Reports the kernels that the driver compiles.
    pub fn compiling(&mut self, what: String) {
        self.tell(Some(what));
    }

    fn tell(&mut self, compiling: Option<String>) {
        (self.report)(TuneProgress {
            done: self.total - self.waiting.len(),
            total: self.total,
            elapsed: self.started.elapsed(),
            compiling,
        });
    }
}

/// Timing of the calls of a plan.
pub(crate) struct TimingSession<'a, 'b> {
    pub gpu: &'a Gpu,
    /// Timer with its buffers, made at first use.
    pub timer: Option<VariantTimer<'a>>,
    pub until: Instant,
    pub(crate) meter: &'a mut ProgressMeter<'b>,
    pub notes: &'a mut Vec<String>,
}

impl TimingSession<'_, '_> {
    /// Prepares the timer for a call; `None`, with a note, if there is too little memory for it.
    pub fn begin(&mut self, planned: &PlanCall) -> Result<Option<()>, DeviceError> {
        let begun = self.begin_timer(planned);
        self.unless_lost(&format!("the kernels of {} are", planned.call_key), begun)
    }

    fn begin_timer(&mut self, planned: &PlanCall) -> Result<(), DeviceError> {
        let timer = match &mut self.timer {
            Some(timer) => timer,
            None => self.timer.insert(VariantTimer::new(self.gpu)?),
        };
        timer.begin(&planned.owned_call)
    }

    /// Returns a result; `None`, with a note on `what`, such as `a call is`, if it is an error that
    /// the device survived.
    pub(crate) fn unless_lost<T>(
        &mut self,
        what: &str,
        result: Result<T, DeviceError>,
    ) -> Result<Option<T>, DeviceError> {
        match result {
            Err(error) if error.is_survivable() && !self.gpu.is_lost() => {
                self.notes.push(format!("{what} not timed: {error}"));
                Ok(None)
            }
            result => result.map(Some),
        }
    }
}
