//! Which kernels run: only certified ones, and among those of a call the one that was chosen,
//! measured where there is time for it, and remembered.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use super::cache::{Certificate, Timing, Timings};
use super::certify::{CertificationResult, Certifier, kernel_hash, variant_hash};
use super::plan_calls::{PlanCall, call_key, distinct_calls, variant_set_hash};
use super::probes::ReferenceCache;
use super::timing::{VariantTimer, default_variant, timing_order};
use super::{KernelCache, VariantChoices, catalog, update_probes};
use crate::device::{DeviceError, Gpu};
use crate::graph::{Plan, Update, UpdateRange};
use crate::kernels::ops::{hash, norm};
use crate::kernels::{Dispatch, OpCall, Pipelines, Variant, twin};

/// How kernels are chosen.
#[derive(Clone, Debug, Default)]
pub struct TuneOptions {
    /// The most seconds to measure in; 0: nothing is measured.
    pub seconds: f64,
    /// Measure also what is recorded.
    pub retune: bool,
    /// Choices to keep: those of the run that goes on.
    pub saved: VariantChoices,
    /// Whether the device runs on the processor.
    pub is_software: bool,
    /// An update of the rule that will run, if there is one.
    pub update: Option<Update>,
    /// Names of kernels whose trials are spoiled, for tests of what happens then.
    pub corrupted_kernels: Vec<String>,
}

/// How far certifying and timing are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TuneProgress {
    /// Kernels of the plan, and how many of them are dealt with.
    pub done: usize,
    pub total: usize,
    pub elapsed: Duration,
}

/// What was found out, and not read from the record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TuneStats {
    /// Kernels tried.
    pub certified: usize,
    /// Variants of calls timed.
    pub timed: usize,
    /// Calls that the time for it did not reach.
    pub untimed: usize,
}

/// The kernels of one device.
pub struct KernelSelector {
    pub pipelines: Pipelines,
    reference_cache: ReferenceCache,
    record: KernelCache,
    choices: VariantChoices,
    corrupted_kernels: Vec<String>,
    /// The variant that each (call, choice) runs.
    selected: HashMap<(String, String), String>,
    /// The kernels on buckets (update rules, norm, hash) that are certified, by entry point.
    certified_buckets: Vec<(&'static str, &'static str)>,
    work: TuneStats,
}

impl KernelSelector {
    /// None compiled, none chosen; what is known about them is in `record`.
    pub fn new(record: KernelCache) -> Self {
        Self {
            pipelines: Pipelines::default(),
            reference_cache: ReferenceCache::default(),
            record,
            choices: VariantChoices::default(),
            corrupted_kernels: Vec::new(),
            selected: HashMap::new(),
            certified_buckets: Vec::new(),
            work: TuneStats::default(),
        }
    }

    pub fn choices(&self) -> &VariantChoices {
        &self.choices
    }

    pub fn record(&self) -> &KernelCache {
        &self.record
    }

    /// What was found out so far.
    pub fn work(&self) -> TuneStats {
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
        tuning: &TuneOptions,
        report: &mut dyn FnMut(TuneProgress),
    ) -> Result<Vec<String>, DeviceError> {
        self.corrupted_kernels.clone_from(&tuning.corrupted_kernels);
        let mut notes = Vec::new();
        let prepared =
            self.certify_needed(gpu, plan, tuning, report).and_then(|(calls, mut meter)| {
                self.choose_all(gpu, calls, tuning, &mut meter, &mut notes)
            });
        self.reference_cache.clear();
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
        tuning: &TuneOptions,
        report: &'a mut dyn FnMut(TuneProgress),
    ) -> Result<(Vec<PlanCall>, ProgressMeter<'a>), DeviceError> {
        let calls = distinct_calls(plan);
        let mut meter = ProgressMeter::new(gpu, &calls, report);
        if let Some(update) = &tuning.update {
            for range in catalog::RANGES {
                self.update(gpu, update, &range)?;
            }
        }
        for planned in &calls {
            let call = planned.owned_call.call();
            for index in [0, default_variant(&call, &planned.variants)] {
                let right = self.is_certified(gpu, &call, &planned.variants[index])?;
                if index == 0 && !right {
                    return Err(self.uncertified(gpu, &call, &planned.variants[0]));
                }
                meter.passed(variant_hash(gpu.checks, &call, &planned.variants[index]));
            }
        }
        Ok((calls, meter))
    }

    /// Chooses a variant of each call that has several.
    fn choose_all(
        &mut self,
        gpu: &Gpu,
        mut calls: Vec<PlanCall>,
        tuning: &TuneOptions,
        meter: &mut ProgressMeter,
        notes: &mut Vec<String>,
    ) -> Result<(), DeviceError> {
        calls.retain(|planned| planned.variants.len() > 1);
        calls.sort_by(|a, b| b.weight.total_cmp(&a.weight));
        let until = Instant::now() + Duration::from_secs_f64(tuning.seconds);
        for planned in &calls {
            let name = match self.choose(gpu, planned, tuning, until, meter, notes)? {
                Some(name) => name,
                None => self.fallback(gpu, planned)?,
            };
            self.choices.insert(planned.call_key.clone(), name);
        }
        if self.work.untimed > 0 {
            notes.push(format!(
                "the kernels of {} of {} calls were not timed within {} s: they run as chosen \
                 without measuring; to time all, give --retune and a larger train.tune_s",
                self.work.untimed,
                calls.len(),
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
        planned: &PlanCall,
        tuning: &TuneOptions,
        until: Instant,
        meter: &mut ProgressMeter,
        notes: &mut Vec<String>,
    ) -> Result<Option<String>, DeviceError> {
        let PlanCall { owned_call, call_key, variants, .. } = planned;
        let call = owned_call.call();
        if let Some(name) = tuning.saved.get(call_key).filter(|_| !tuning.retune) {
            let saved = variants.iter().find(|variant| variant.name == name);
            if let Some(variant) = saved
                && self.is_certified(gpu, &call, variant)?
            {
                return Ok(Some(name.to_string()));
            }
            let why = if saved.is_some() { "is switched off here" } else { "is not known" };
            notes.push(format!("{name}, which ran {call_key}, {why}: chosen anew"));
        }
        let candidates = variant_set_hash(gpu, &call, variants);
        let known = self.record.timings(call_key, &candidates).filter(|_| !tuning.retune);
        if let Some(known) = known {
            let timings = known.measured.clone();
            return self.fastest(gpu, &call, variants, &timings);
        }
        if tuning.seconds == 0.0 {
            return Ok(None);
        }
        let measured = self.measure(gpu, planned, tuning.is_software, until, meter)?;
        self.work.untimed += usize::from(measured.is_empty());
        let fastest = self.fastest(gpu, &call, variants, &measured);
        self.record.time(call_key.clone(), Timings { candidates, measured });
        fastest
    }

    /// The certified variant that took the least time.
    fn fastest(
        &mut self,
        gpu: &Gpu,
        call: &OpCall,
        variants: &[Variant],
        measured: &BTreeMap<String, Timing>,
    ) -> Result<Option<String>, DeviceError> {
        let mut timings: Vec<&Timing> = measured.values().collect();
        timings.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        for timing in timings {
            let variant = variants.iter().find(|variant| variant.name == timing.variant);
            if let Some(variant) = variant
                && self.is_certified(gpu, call, variant)?
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
        planned: &PlanCall,
        is_software: bool,
        until: Instant,
        meter: &mut ProgressMeter,
    ) -> Result<BTreeMap<String, Timing>, DeviceError> {
        let (call, mut measured) = (planned.owned_call.call(), BTreeMap::new());
        if Instant::now() >= until {
            return Ok(measured);
        }
        let timer = match VariantTimer::new(gpu, &planned.owned_call) {
            // The plan may still fit, which has one such tensor at a time.
            Err(DeviceError::OutOfMemory { .. } | DeviceError::TooLarge { .. }) => {
                return Ok(measured);
            }
            timer => timer?,
        };
        let mut best: Option<f64> = None;
        for index in timing_order(&call, &planned.variants, is_software) {
            let variant = &planned.variants[index];
            if Instant::now() >= until {
                break;
            }
            let hash = variant_hash(gpu.checks, &call, variant);
            if self.is_certified(gpu, &call, variant)? {
                let seconds = timer.time(&mut self.pipelines, variant, best, until)?;
                self.work.timed += 1;
                best = Some(best.map_or(seconds, |best| best.min(seconds)));
                let timing = Timing { variant: variant.name.clone(), seconds };
                measured.insert(hash.clone(), timing);
            }
            meter.passed(hash);
        }
        // One alone says nothing about the others, and would look like a choice.
        if measured.len() < 2 && planned.variants.len() > 1 && Instant::now() >= until {
            measured.clear();
        }
        Ok(measured)
    }

    /// What runs where nothing was measured: the twin's own choice if it is certified, or else the
    /// plain variant, which is.
    fn fallback(&mut self, gpu: &Gpu, planned: &PlanCall) -> Result<String, DeviceError> {
        let call = planned.owned_call.call();
        let variant = &planned.variants[default_variant(&call, &planned.variants)];
        let right = self.is_certified(gpu, &call, variant)?;
        Ok(if right { variant } else { &planned.variants[0] }.name.clone())
    }

    /// How to run a call: as chosen for `full`, the same call at full capacity, if that variant
    /// fits this number of rows, or else in a way that fits. Certifies it if need be.
    ///
    /// # Errors
    /// A call whose plain variant is wrong; a shader that does not compile; a device that fails.
    pub fn variant(
        &mut self,
        gpu: &Gpu,
        call: &OpCall,
        full: &OpCall,
    ) -> Result<Variant, DeviceError> {
        let mut variants = match twin(call.op) {
            Some(twin) => (twin.variants)(call),
            None => return Ok(Variant::new("none", Vec::new())),
        };
        let chosen = self.choices.get(&call_key(full)).map(str::to_string);
        let key = (call_key(call), chosen.clone().unwrap_or_default());
        let index = match self.selected.get(&key) {
            Some(name) => variants.iter().position(|variant| variant.name == *name).unwrap_or(0),
            None => {
                let index = self.select_certified(gpu, call, &variants, chosen.as_deref())?;
                self.selected.insert(key, variants[index].name.clone());
                index
            }
        };
        Ok(variants.swap_remove(index))
    }

    /// The first certified one of: the chosen variant, the twin's own choice if there is none, the
    /// plain variant.
    fn select_certified(
        &mut self,
        gpu: &Gpu,
        call: &OpCall,
        variants: &[Variant],
        chosen: Option<&str>,
    ) -> Result<usize, DeviceError> {
        let first = match chosen {
            Some(name) => variants.iter().position(|variant| variant.name == name),
            None => Some(default_variant(call, variants)),
        };
        for index in first.into_iter().chain([0]) {
            if self.is_certified(gpu, call, &variants[index])? {
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
        if !self.certified_buckets.contains(&(name, entry)) {
            let hash = kernel_hash(gpu.checks, name, std::slice::from_ref(&dispatch));
            self.require_certified(gpu, name, hash, |certifier| certifier.update(update, range))?;
            self.certified_buckets.push((name, entry));
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
        if !self.certified_buckets.contains(&("norm", entry)) {
            let hash = kernel_hash(gpu.checks, "norm", &dispatches);
            self.require_certified(gpu, "norm", hash, |certifier| certifier.norm(count))?;
            self.certified_buckets.push(("norm", entry));
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
        if !self.certified_buckets.contains(&("hash", entry)) {
            let key = kernel_hash(gpu.checks, "hash", &dispatches);
            self.require_certified(gpu, "hash", key, |certifier| certifier.hash(count))?;
            self.certified_buckets.push(("hash", entry));
        }
        Ok(dispatches)
    }

    /// Certifies every variant of the table and every update rule, again if they are known; see
    /// [`super::catalog`].
    ///
    /// # Errors
    /// A device that fails. Kernels that are wrong are in the record.
    pub fn certify_all(
        &mut self,
        gpu: &Gpu,
        corrupted_kernels: &[String],
    ) -> Result<(), DeviceError> {
        self.corrupted_kernels = corrupted_kernels.to_vec();
        self.record.forget_certificates();
        let tried = self.try_all(gpu);
        self.reference_cache.clear();
        self.record.save();
        tried
    }

    fn try_all(&mut self, gpu: &Gpu) -> Result<(), DeviceError> {
        for owned_call in catalog::catalog_calls() {
            let call = owned_call.call();
            let variants = twin(call.op).map(|twin| (twin.variants)(&call)).unwrap_or_default();
            for variant in variants {
                self.is_certified(gpu, &call, &variant)?;
            }
        }
        for (rule, range) in catalog::updates() {
            let dispatch = update_probes::dispatch(&rule, &range);
            let name = update_probes::name(&rule);
            let hash = kernel_hash(gpu.checks, name, &[dispatch]);
            self.certified(gpu, name.into(), hash, |certifier| certifier.update(&rule, &range))?;
        }
        for count in catalog::COUNTS {
            let key = kernel_hash(gpu.checks, "norm", &norm::dispatch(count, 1, 0));
            self.certified(gpu, "norm".into(), key, |certifier| certifier.norm(count))?;
            let key = kernel_hash(gpu.checks, "hash", &hash::dispatch(0..count, 1));
            self.certified(gpu, "hash".into(), key, |certifier| certifier.hash(count))?;
        }
        Ok(())
    }

    /// Notes of the record that nobody has seen.
    pub fn take_notes(&mut self) -> Vec<String> {
        self.record.take_notes()
    }

    fn is_certified(
        &mut self,
        gpu: &Gpu,
        call: &OpCall,
        variant: &Variant,
    ) -> Result<bool, DeviceError> {
        let hash = variant_hash(gpu.checks, call, variant);
        let kernel = label(call, variant);
        self.certified(gpu, kernel, hash, |certifier| certifier.variant(call, variant))
    }

    fn require_certified(
        &mut self,
        gpu: &Gpu,
        kernel: &str,
        hash: String,
        attempt: impl FnOnce(&mut Certifier) -> Result<CertificationResult, DeviceError>,
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
        attempt: impl FnOnce(&mut Certifier) -> Result<CertificationResult, DeviceError>,
    ) -> Result<bool, DeviceError> {
        if let Some(known) = self.record.certificate(&hash) {
            return Ok(known.result.is_certified());
        }
        self.work.certified += 1;
        let Self { pipelines, reference_cache, corrupted_kernels, .. } = self;
        let result =
            attempt(&mut Certifier { gpu, pipelines, reference_cache, corrupted_kernels })?;
        let right = result.is_certified();
        self.record.certify(hash, Certificate::new(kernel, result));
        Ok(right)
    }

    fn uncertified(&self, gpu: &Gpu, call: &OpCall, variant: &Variant) -> DeviceError {
        let hash = variant_hash(gpu.checks, call, variant);
        self.refusal(gpu, label(call, variant), &hash)
    }

    fn refusal(&self, gpu: &Gpu, kernel: String, hash: &str) -> DeviceError {
        let why = match self.record.certificate(hash).map(|known| &known.result) {
            Some(CertificationResult::Fail { why }) => why.clone(),
            _ => "it was never tried".into(),
        };
        DeviceError::Uncertified { adapter: gpu.name.clone(), kernel, why }
    }
}

/// A kernel's name for people.
fn label(call: &OpCall, variant: &Variant) -> String {
    format!("{} of {}", variant.name, call.op)
}

/// Counts the kernels that are dealt with.
struct ProgressMeter<'a> {
    started: Instant,
    waiting: BTreeSet<String>,
    total: usize,
    report: &'a mut dyn FnMut(TuneProgress),
}

impl<'a> ProgressMeter<'a> {
    fn new(gpu: &Gpu, calls: &[PlanCall], report: &'a mut dyn FnMut(TuneProgress)) -> Self {
        let started = Instant::now();
        let hashes = |planned: &PlanCall| -> Vec<String> {
            let call = planned.owned_call.call();
            planned
                .variants
                .iter()
                .map(|variant| variant_hash(gpu.checks, &call, variant))
                .collect()
        };
        let waiting: BTreeSet<String> = calls.iter().flat_map(hashes).collect();
        Self { started, total: waiting.len(), waiting, report }
    }

    fn passed(&mut self, hash: String) {
        self.waiting.remove(&hash);
        let done = self.total - self.waiting.len();
        (self.report)(TuneProgress { done, total: self.total, elapsed: self.started.elapsed() });
    }
}

#[cfg(test)]
mod tests;
