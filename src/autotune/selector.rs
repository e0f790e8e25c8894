//! Which kernels run: only certified ones, and among those of a call the one that was chosen,
//! measured where there is time for it, and remembered.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use super::cache::{Certificate, Timing, Timings};
use super::certify::{Finding, Subject, kernel_hash, variant_hash};
use super::plan_calls::{Use, candidates, signature, uses};
use super::probes::Oracle;
use super::timing::{Bench, order, unmeasured};
use super::{Choices, Record, catalog, update_probes};
use crate::device::{DeviceError, Gpu};
use crate::graph::{Plan, Update, UpdateRange};
use crate::kernels::ops::{hash, norm};
use crate::kernels::{Call, Dispatch, Pipelines, Variant, twin};

/// How kernels are chosen.
#[derive(Clone, Debug, Default)]
pub struct Tuning {
    /// The most seconds to measure in; 0: nothing is measured.
    pub seconds: f64,
    /// Measure also what is recorded.
    pub again: bool,
    /// Choices to keep: those of the run that goes on.
    pub saved: Choices,
    /// Whether the device runs on the processor.
    pub is_software: bool,
    /// An update of the rule that will run, if there is one.
    pub update: Option<Update>,
    /// Names of kernels whose trials are spoiled, for tests of what happens then.
    pub planted: Vec<String>,
}

/// How far certifying and timing are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Kernels of the plan, and how many of them are dealt with.
    pub done: usize,
    pub total: usize,
    pub elapsed: Duration,
}

/// What was found out, and not read from the record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Kernels tried.
    pub certified: usize,
    /// Variants of calls timed.
    pub timed: usize,
    /// Calls that the time for it did not reach.
    pub untimed: usize,
}

/// The kernels of one device.
pub struct Kernels {
    pub pipelines: Pipelines,
    oracle: Oracle,
    record: Record,
    choices: Choices,
    planted: Vec<String>,
    /// The variant that each (call, choice) runs.
    admitted: HashMap<(String, String), String>,
    /// The kernels on buckets (update rules, norm, hash) that are certified, by entry point.
    admitted_buckets: Vec<(&'static str, &'static str)>,
    work: Work,
}

impl Kernels {
    /// None compiled, none chosen; what is known about them is in `record`.
    pub fn new(record: Record) -> Self {
        Self {
            pipelines: Pipelines::default(),
            oracle: Oracle::default(),
            record,
            choices: Choices::default(),
            planted: Vec::new(),
            admitted: HashMap::new(),
            admitted_buckets: Vec::new(),
            work: Work::default(),
        }
    }

    pub fn choices(&self) -> &Choices {
        &self.choices
    }

    pub fn record(&self) -> &Record {
        &self.record
    }

    /// What was found out so far.
    pub fn work(&self) -> Work {
        self.work
    }

    /// Certifies the kernels that a plan runs at full capacity, and chooses among variants. Tells
    /// `report` how far it is; returns what a person should know.
    ///
    /// # Errors
    /// A call whose plain variant is wrong; a device that fails.
    pub fn prepare(
        &mut self,
        gpu: &Gpu,
        plan: &Plan,
        tuning: &Tuning,
        report: &mut dyn FnMut(Progress),
    ) -> Result<Vec<String>, DeviceError> {
        self.planted.clone_from(&tuning.planted);
        let mut notes = Vec::new();
        let prepared =
            self.certify_needed(gpu, plan, tuning, report).and_then(|(uses, mut meter)| {
                self.choose_all(gpu, uses, tuning, &mut meter, &mut notes)
            });
        self.oracle.forget();
        // What is wrong is kept too.
        self.record.save();
        notes.extend(self.record.take_notes());
        prepared.map(|()| notes)
    }

    /// Certifies what runs where nothing is measured: of each call the plain variant, which serves
    /// all numbers of rows, and the twin's own choice; and the update rule.
    fn certify_needed<'a>(
        &mut self,
        gpu: &Gpu,
        plan: &Plan,
        tuning: &Tuning,
        report: &'a mut dyn FnMut(Progress),
    ) -> Result<(Vec<Use>, Meter<'a>), DeviceError> {
        let uses = uses(plan);
        let mut meter = Meter::new(gpu, &uses, report);
        if let Some(update) = &tuning.update {
            for range in catalog::RANGES {
                self.update(gpu, update, &range)?;
            }
        }
        for used in &uses {
            let call = used.problem.call();
            for index in [0, unmeasured(&call, &used.variants)] {
                let right = self.is_right(gpu, &call, &used.variants[index])?;
                if index == 0 && !right {
                    return Err(self.uncertified(gpu, &call, &used.variants[0]));
                }
                meter.passed(variant_hash(gpu.checks, &call, &used.variants[index]));
            }
        }
        Ok((uses, meter))
    }

    /// Chooses a variant of each call that has several.
    fn choose_all(
        &mut self,
        gpu: &Gpu,
        mut uses: Vec<Use>,
        tuning: &Tuning,
        meter: &mut Meter,
        notes: &mut Vec<String>,
    ) -> Result<(), DeviceError> {
        uses.retain(|used| used.variants.len() > 1);
        uses.sort_by(|a, b| b.weight.total_cmp(&a.weight));
        let until = Instant::now() + Duration::from_secs_f64(tuning.seconds);
        for used in &uses {
            let name = match self.choose(gpu, used, tuning, until, meter, notes)? {
                Some(name) => name,
                None => self.fallback(gpu, used)?,
            };
            self.choices.insert(used.signature.clone(), name);
        }
        if self.work.untimed > 0 {
            notes.push(format!(
                "the kernels of {} of {} calls were not timed within {} s: they run as chosen \
                 without measuring; to time all, give --retune and a larger train.tune_seconds",
                self.work.untimed,
                uses.len(),
                tuning.seconds
            ));
        }
        Ok(())
    }

    /// The variant to run: the saved one, else by recorded timings, else by new ones; `None` if
    /// nothing was measured.
    fn choose(
        &mut self,
        gpu: &Gpu,
        used: &Use,
        tuning: &Tuning,
        until: Instant,
        meter: &mut Meter,
        notes: &mut Vec<String>,
    ) -> Result<Option<String>, DeviceError> {
        let Use { problem, signature, variants, .. } = used;
        let call = problem.call();
        if let Some(name) = tuning.saved.get(signature).filter(|_| !tuning.again) {
            let saved = variants.iter().find(|variant| variant.name == name);
            if let Some(variant) = saved
                && self.is_right(gpu, &call, variant)?
            {
                return Ok(Some(name.to_string()));
            }
            let why = if saved.is_some() { "is switched off here" } else { "is not known" };
            notes.push(format!("{name}, which ran {signature}, {why}: chosen anew"));
        }
        let candidates = candidates(gpu, &call, variants);
        let known = self.record.timings(signature, &candidates).filter(|_| !tuning.again);
        if let Some(known) = known {
            let timings = known.measured.clone();
            return self.fastest(gpu, &call, variants, &timings);
        }
        if tuning.seconds == 0.0 {
            return Ok(None);
        }
        let measured = self.measure(gpu, used, tuning.is_software, until, meter)?;
        self.work.untimed += usize::from(measured.is_empty());
        let fastest = self.fastest(gpu, &call, variants, &measured);
        self.record.time(signature.clone(), Timings { candidates, measured });
        fastest
    }

    /// The certified variant that took the least time.
    fn fastest(
        &mut self,
        gpu: &Gpu,
        call: &Call,
        variants: &[Variant],
        measured: &BTreeMap<String, Timing>,
    ) -> Result<Option<String>, DeviceError> {
        let mut timings: Vec<&Timing> = measured.values().collect();
        timings.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        for timing in timings {
            let variant = variants.iter().find(|variant| variant.name == timing.variant);
            if let Some(variant) = variant
                && self.is_right(gpu, call, variant)?
            {
                return Ok(Some(variant.name.clone()));
            }
        }
        Ok(None)
    }

    /// Times the variants that are right, as far as the time reaches.
    fn measure(
        &mut self,
        gpu: &Gpu,
        used: &Use,
        is_software: bool,
        until: Instant,
        meter: &mut Meter,
    ) -> Result<BTreeMap<String, Timing>, DeviceError> {
        let (call, mut measured) = (used.problem.call(), BTreeMap::new());
        if Instant::now() >= until {
            return Ok(measured);
        }
        let bench = match Bench::new(gpu, &used.problem) {
            // The plan may still fit, which has one such tensor at a time.
            Err(DeviceError::OutOfMemory { .. } | DeviceError::TooLarge { .. }) => {
                return Ok(measured);
            }
            bench => bench?,
        };
        let mut best: Option<f64> = None;
        for index in order(&call, &used.variants, is_software) {
            let variant = &used.variants[index];
            if Instant::now() >= until {
                break;
            }
            let hash = variant_hash(gpu.checks, &call, variant);
            if self.is_right(gpu, &call, variant)? {
                let seconds = bench.time(&mut self.pipelines, variant, best, until)?;
                self.work.timed += 1;
                best = Some(best.map_or(seconds, |best| best.min(seconds)));
                let timing = Timing { variant: variant.name.clone(), seconds };
                measured.insert(hash.clone(), timing);
            }
            meter.passed(hash);
        }
        // One alone says nothing about the others, and would look like a choice.
        if measured.len() < 2 && used.variants.len() > 1 && Instant::now() >= until {
            measured.clear();
        }
        Ok(measured)
    }

    /// What runs where nothing was measured: the twin's own choice if it is certified, or else the
    /// plain variant, which is.
    fn fallback(&mut self, gpu: &Gpu, used: &Use) -> Result<String, DeviceError> {
        let call = used.problem.call();
        let variant = &used.variants[unmeasured(&call, &used.variants)];
        let right = self.is_right(gpu, &call, variant)?;
        Ok(if right { variant } else { &used.variants[0] }.name.clone())
    }

    /// How to run a call: as chosen for `full`, the same call at full capacity, if that variant
    /// fits this number of rows, or else in a way that fits. Certifies it if need be.
    ///
    /// # Errors
    /// A call whose plain variant is wrong; a shader that does not compile; a device that fails.
    pub fn variant(&mut self, gpu: &Gpu, call: &Call, full: &Call) -> Result<Variant, DeviceError> {
        let mut variants = match twin(call.op) {
            Some(twin) => (twin.variants)(call),
            None => return Ok(Variant::new("none", Vec::new())),
        };
        let chosen = self.choices.get(&signature(full)).map(str::to_string);
        let key = (signature(call), chosen.clone().unwrap_or_default());
        let index = match self.admitted.get(&key) {
            Some(name) => variants.iter().position(|variant| variant.name == *name).unwrap_or(0),
            None => {
                let index = self.admit(gpu, call, &variants, chosen.as_deref())?;
                self.admitted.insert(key, variants[index].name.clone());
                index
            }
        };
        Ok(variants.swap_remove(index))
    }

    /// The first certified one of: the chosen variant, the twin's own choice if there is none, the
    /// plain variant.
    fn admit(
        &mut self,
        gpu: &Gpu,
        call: &Call,
        variants: &[Variant],
        chosen: Option<&str>,
    ) -> Result<usize, DeviceError> {
        let first = match chosen {
            Some(name) => variants.iter().position(|variant| variant.name == name),
            None => Some(unmeasured(call, variants)),
        };
        for index in first.into_iter().chain([0]) {
            if self.is_right(gpu, call, &variants[index])? {
                self.record.save();
                return Ok(index);
            }
        }
        self.record.save();
        Err(self.uncertified(gpu, call, &variants[0]))
    }

    /// How an update runs.
    ///
    /// # Errors
    /// Its kernel is wrong; a device that fails.
    pub fn update(
        &mut self,
        gpu: &Gpu,
        update: &Update,
        range: &UpdateRange,
    ) -> Result<Dispatch, DeviceError> {
        let dispatch = update_probes::dispatch(update, range);
        let entry = dispatch.shader.entry;
        let name = update_probes::name(update);
        if !self.admitted_buckets.contains(&(name, entry)) {
            let hash = kernel_hash(gpu.checks, name, std::slice::from_ref(&dispatch));
            self.require(gpu, name, hash, |subject| subject.update(update, range))?;
            self.admitted_buckets.push((name, entry));
        }
        Ok(dispatch)
    }

    /// How the norm of a bucket runs; see [`norm::dispatch`].
    ///
    /// # Errors
    /// Its kernel is wrong; a device that fails.
    pub fn norm(
        &mut self,
        gpu: &Gpu,
        count: usize,
        parts: usize,
        slot: usize,
    ) -> Result<Vec<Dispatch>, DeviceError> {
        let dispatches = norm::dispatch(count, parts, slot);
        let entry = dispatches[0].shader.entry;
        if !self.admitted_buckets.contains(&("norm", entry)) {
            let hash = kernel_hash(gpu.checks, "norm", &dispatches);
            self.require(gpu, "norm", hash, |subject| subject.norm(count))?;
            self.admitted_buckets.push(("norm", entry));
        }
        Ok(dispatches)
    }

    /// How the hash of a whole bucket runs; see [`hash::dispatch`].
    ///
    /// # Errors
    /// Its kernel is wrong; a device that fails.
    pub fn hash(
        &mut self,
        gpu: &Gpu,
        count: usize,
        parts: usize,
    ) -> Result<Vec<Dispatch>, DeviceError> {
        let dispatches = hash::dispatch(0..count, parts);
        let entry = dispatches[0].shader.entry;
        if !self.admitted_buckets.contains(&("hash", entry)) {
            let key = kernel_hash(gpu.checks, "hash", &dispatches);
            self.require(gpu, "hash", key, |subject| subject.hash(count))?;
            self.admitted_buckets.push(("hash", entry));
        }
        Ok(dispatches)
    }

    /// Certifies every variant of the table and every update rule, again if they are known; see
    /// [`super::catalog`].
    ///
    /// # Errors
    /// A device that fails. Kernels that are wrong are in the record.
    pub fn certify_all(&mut self, gpu: &Gpu, planted: &[String]) -> Result<(), DeviceError> {
        self.planted = planted.to_vec();
        self.record.forget_certificates();
        let tried = self.try_all(gpu);
        self.oracle.forget();
        self.record.save();
        tried
    }

    fn try_all(&mut self, gpu: &Gpu) -> Result<(), DeviceError> {
        for problem in catalog::problems() {
            let call = problem.call();
            let variants = twin(call.op).map(|twin| (twin.variants)(&call)).unwrap_or_default();
            for variant in variants {
                self.is_right(gpu, &call, &variant)?;
            }
        }
        for (rule, range) in catalog::updates() {
            let dispatch = update_probes::dispatch(&rule, &range);
            let name = update_probes::name(&rule);
            let hash = kernel_hash(gpu.checks, name, &[dispatch]);
            self.certified(gpu, name.into(), hash, |subject| subject.update(&rule, &range))?;
        }
        for count in catalog::COUNTS {
            let key = kernel_hash(gpu.checks, "norm", &norm::dispatch(count, 1, 0));
            self.certified(gpu, "norm".into(), key, |subject| subject.norm(count))?;
            let key = kernel_hash(gpu.checks, "hash", &hash::dispatch(0..count, 1));
            self.certified(gpu, "hash".into(), key, |subject| subject.hash(count))?;
        }
        Ok(())
    }

    /// Notes of the record that nobody has seen.
    pub fn take_notes(&mut self) -> Vec<String> {
        self.record.take_notes()
    }

    fn is_right(&mut self, gpu: &Gpu, call: &Call, variant: &Variant) -> Result<bool, DeviceError> {
        let hash = variant_hash(gpu.checks, call, variant);
        let kernel = label(call, variant);
        self.certified(gpu, kernel, hash, |subject| subject.variant(call, variant))
    }

    fn require(
        &mut self,
        gpu: &Gpu,
        kernel: &str,
        hash: String,
        attempt: impl FnOnce(&mut Subject) -> Result<Finding, DeviceError>,
    ) -> Result<(), DeviceError> {
        let right = self.certified(gpu, kernel.into(), hash.clone(), attempt)?;
        self.record.save();
        if right { Ok(()) } else { Err(self.refusal(gpu, kernel.into(), &hash)) }
    }

    /// Whether a kernel is right, from the record or by a trial. A device that fails says nothing
    /// about the kernel: the next run tries it again.
    fn certified(
        &mut self,
        gpu: &Gpu,
        kernel: String,
        hash: String,
        attempt: impl FnOnce(&mut Subject) -> Result<Finding, DeviceError>,
    ) -> Result<bool, DeviceError> {
        if let Some(known) = self.record.certificate(&hash) {
            return Ok(known.finding.is_right());
        }
        self.work.certified += 1;
        let Self { pipelines, oracle, planted, .. } = self;
        let finding = attempt(&mut Subject { gpu, pipelines, oracle, planted })?;
        let right = finding.is_right();
        self.record.certify(hash, Certificate::new(kernel, finding));
        Ok(right)
    }

    fn uncertified(&self, gpu: &Gpu, call: &Call, variant: &Variant) -> DeviceError {
        let hash = variant_hash(gpu.checks, call, variant);
        self.refusal(gpu, label(call, variant), &hash)
    }

    fn refusal(&self, gpu: &Gpu, kernel: String, hash: &str) -> DeviceError {
        let why = match self.record.certificate(hash).map(|known| &known.finding) {
            Some(Finding::Wrong { why }) => why.clone(),
            _ => "it was never tried".into(),
        };
        DeviceError::Uncertified { adapter: gpu.name.clone(), kernel, why }
    }
}

/// A kernel's name for people.
fn label(call: &Call, variant: &Variant) -> String {
    format!("{} of {}", variant.name, call.op)
}

/// Counts the kernels that are dealt with.
struct Meter<'a> {
    started: Instant,
    waiting: BTreeSet<String>,
    total: usize,
    report: &'a mut dyn FnMut(Progress),
}

impl<'a> Meter<'a> {
    fn new(gpu: &Gpu, uses: &[Use], report: &'a mut dyn FnMut(Progress)) -> Self {
        let started = Instant::now();
        let hashes = |used: &Use| -> Vec<String> {
            let call = used.problem.call();
            used.variants.iter().map(|variant| variant_hash(gpu.checks, &call, variant)).collect()
        };
        let waiting: BTreeSet<String> = uses.iter().flat_map(hashes).collect();
        Self { started, total: waiting.len(), waiting, report }
    }

    fn passed(&mut self, hash: String) {
        self.waiting.remove(&hash);
        let done = self.total - self.waiting.len();
        (self.report)(Progress { done, total: self.total, elapsed: self.started.elapsed() });
    }
}

#[cfg(test)]
mod tests;
