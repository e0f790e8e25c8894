//! Kernel selection: only certified kernels run, and among those of a call the variant that was
//! chosen, by measurements within a time budget, which are cached.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use super::cache::{Certificate, Timing, Timings};
use super::certify::{CertificationResult, Certifier, bucket_hash, variant_hash};
use super::pipeline_cache::PipelineCacheFile;
use super::plan_calls::{PlanCall, call_key, distinct_calls, variant_set_hash};
use super::probes::ReferenceCache;
use super::session::{ProgressMeter, TimingSession, TuneProgress};
use super::spot_check::{self, Expectations, SpotCheck};
use super::timing::{VariantTimer, default_variant, timing_order};
use super::{KernelCache, catalog};
use crate::device::{DeviceError, Gpu};
use crate::harness::Deviation;
use crate::ops::norm::NormSlots;
use crate::ops::{hash, norm};
use crate::{
    BucketProbe, Caps, DeviceClass, Dispatch, OpCall, Pipelines, Variant, twin, update_twin,
};
use potluck_core::Setting;
use potluck_core::faults::FaultyKernel;
use potluck_core::format::counted;
use potluck_graph::plan::WORKSPACE_BYTES_MAX;
use potluck_graph::{MomentFormat, Plan, Update, UpdateRange, VariantChoices};

/// Options of autotuning.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct TuneOptions {
    /// Time budget for measuring, in seconds; 0: nothing is measured, and the cache decides.
    pub seconds: f64,
    /// True to measure again what is in the cache, if there is time for it.
    pub retune: bool,
    /// Choices to keep: those of the run that is resumed.
    pub saved: VariantChoices,
    /// Keys of the calls of `saved` that were chosen without timings of all variants.
    pub saved_untimed: Vec<String>,
    /// An update of the rule that will run, if there is one.
    pub update: Option<Update>,
    /// Kernels with a seeded error while they are certified, for tests.
    pub faulty_kernels: Vec<FaultyKernel>,
}

/// Counters of autotuning work; results from the cache do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TuneStats {
    /// Kernels certified, passed or failed.
    pub certified: usize,
    /// Kernels checked at the size of a call, passed or failed.
    pub full_size: usize,
    /// Variants of calls timed.
    pub timed: usize,
    /// Calls of which the time budget did not reach all variants.
    pub untimed: usize,
}

/// Standing of a kernel on a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// It is right.
    Certified,
    /// It runs only where no other fits.
    Unusual,
    Refused,
}

impl Standing {
    fn of(result: &CertificationResult) -> Self {
        match result {
            CertificationResult::Pass(_) => Self::Certified,
            CertificationResult::Unusual(_) => Self::Unusual,
            CertificationResult::Fail { .. } => Self::Refused,
        }
    }
}

/// Checks at full size in progress.
#[derive(Default)]
struct FullSizeSession<'a> {
    /// Its buffers, made at first use.
    timer: Option<VariantTimer<'a>>,
    /// Checks that came to a result, and the largest deviations of those that are right.
    checked: usize,
    worst: Option<Deviation>,
    /// What is expected, by the key of the call.
    expectations: Expectations,
    /// Ops with a call whose reference takes too long.
    too_large: BTreeSet<String>,
    /// Keys of the calls that cannot be checked.
    given_up: BTreeSet<String>,
}

impl FullSizeSession<'_> {
    /// Notes the result of a check.
    fn note(&mut self, result: &Result<Deviation, String>) {
        self.checked += 1;
        if let Ok(found) = result {
            self.worst = Some(self.worst.map_or(*found, |worst| found.worst(worst)));
        }
    }
}

/// Kernel selector of one device.
pub struct KernelSelector {
    pub pipelines: Pipelines,
    /// File of the driver's cache of pipelines, once it is open.
    pipelines_file: Option<PipelineCacheFile>,
    reference_cache: ReferenceCache,
    cache: KernelCache,
    choices: VariantChoices,
    /// Keys of the calls whose variants were chosen without timings of all, in order of weight.
    untimed: Vec<String>,
    faulty_kernels: Vec<FaultyKernel>,
    /// Variant that each (call, choice) runs.
    selected: HashMap<(String, String), String>,
    /// Results of kernels from outside the crate, by call and hash. They are not kept on disk,
    /// because they also depend on the op's reference, of which there is no hash.
    foreign: HashMap<String, CertificationResult>,
    /// Certified kernels on buckets (update rules, norm, hash), by name and entry point.
    certified_buckets: Vec<(&'static str, &'static str)>,
    /// Bytes of workspace of the executor; variants that need more are not selected.
    workspace_bytes: usize,
    work: TuneStats,
}

impl KernelSelector {
    /// Makes a selector with no kernel compiled and no variant chosen; `cache` has the results of
    /// earlier runs.
    pub fn new(cache: KernelCache) -> Self {
        Self {
            pipelines: Pipelines::default(),
            pipelines_file: None,
            reference_cache: ReferenceCache::default(),
            cache,
            choices: VariantChoices::default(),
            untimed: Vec::new(),
            faulty_kernels: Vec::new(),
            selected: HashMap::new(),
            foreign: HashMap::new(),
            certified_buckets: Vec::new(),
            workspace_bytes: WORKSPACE_BYTES_MAX,
            work: TuneStats::default(),
        }
    }

    pub fn choices(&self) -> &VariantChoices {
        &self.choices
    }

    /// Returns the keys of the calls whose variants were chosen without timings of all.
    pub fn untimed(&self) -> &[String] {
        &self.untimed
    }

    pub fn cache(&self) -> &KernelCache {
        &self.cache
    }

    /// Chooses how the values of a device are taken out of mapped memory, by rates that are
    /// measured when the device is opened for the first time.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory, or if the device fails.
    pub fn choose_read_method(&mut self, gpu: &mut Gpu) -> Result<(), DeviceError> {
        gpu.read_method = self.cache.measure_mapped_reads(gpu)?.method();
        Ok(())
    }

    /// Sets the bytes of workspace that the selected variants may use: a call of fewer rows
    /// than the plan's capacity may need more than any at full capacity.
    pub(crate) fn set_workspace_bytes(&mut self, bytes: usize) {
        self.workspace_bytes = bytes;
    }

    /// Returns the counters of the work so far.
    pub fn stats(&self) -> TuneStats {
        self.work
    }

    /// Certifies the kernels that a plan runs at full capacity, and chooses among variants. Calls
    /// `report` with the progress; returns messages for the user.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the plain variant of a call fails certification, or if the
    /// device fails.
    pub fn prepare(
        &mut self,
        gpu: &Gpu,
        plan: &Plan,
        tuning: &TuneOptions,
        report: &mut dyn FnMut(TuneProgress),
    ) -> Result<Vec<String>, DeviceError> {
        self.faulty_kernels.clone_from(&tuning.faulty_kernels);
        self.open_pipelines_file(gpu);
        if Caps::of(gpu).class == DeviceClass::Hardware || !self.faulty_kernels.is_empty() {
            self.cache.open_attempts();
        }
        if tuning.retune {
            self.cache.forget_attempts();
        }
        let mut notes = Vec::new();
        let prepared =
            self.certify_needed(gpu, plan, tuning, report).and_then(|(calls, mut meter)| {
                self.choose_all(gpu, &calls, tuning, &mut meter, &mut notes)?;
                self.compile_chosen(gpu, &calls, &mut meter);
                self.check_full_sizes(gpu, &calls, &mut meter)
            });
        self.reference_cache.clear();
        // Failures are cached too.
        self.cache.save();
        self.save_pipelines();
        notes.extend(self.cache.take_notes());
        prepared.map(|()| notes)
    }

    /// Opens the file of the driver's cache of pipelines, unless nothing is kept.
    fn open_pipelines_file(&mut self, gpu: &Gpu) {
        if self.pipelines_file.is_none()
            && let Some((path, device)) = self.cache.pipelines_file()
        {
            let pipelines = &mut self.pipelines;
            self.pipelines_file = PipelineCacheFile::open(gpu, pipelines, &path, device);
        }
    }

    /// Writes the driver's cache of pipelines, if there are new ones. A failure becomes a note,
    /// because a run does not depend on it.
    pub(crate) fn save_pipelines(&mut self) {
        let saved = self.pipelines_file.as_mut().map(|file| file.save(&self.pipelines));
        if let Some(Err(why)) = saved {
            self.cache.note(format!("compiled kernels cannot be cached: {why}"));
        }
    }

    /// Certifies the kernels that run without measurements: of each call the plain variant, which
    /// serves all numbers of rows, and the twin's own choice; the update rule; and the kernels of
    /// the averages, if the plan keeps them.
    fn certify_needed<'a>(
        &mut self,
        gpu: &Gpu,
        plan: &Plan,
        tuning: &TuneOptions,
        report: &'a mut dyn FnMut(TuneProgress),
    ) -> Result<(Vec<PlanCall>, ProgressMeter<'a>), DeviceError> {
        let calls = distinct_calls(plan, Caps::of(gpu));
        let mut meter = ProgressMeter::new(gpu, &calls, report);
        if let Some(update) = &tuning.update {
            for range in catalog::ranges_of_kernels(update, plan.options.moments) {
                self.update(gpu, update, &range)?;
            }
        }
        if plan.options.averages {
            let update = Update::of_average(1.0);
            for range in catalog::ranges_of_kernels(&update, MomentFormat::F32) {
                self.update(gpu, &update, &range)?;
            }
        }
        self.compile_uncertified(gpu, &calls, &mut meter);
        for planned in &calls {
            let call = planned.owned_call.call();
            let hash_of = |index: usize| variant_hash(gpu.checks, &call, &planned.variants[index]);
            let plain = self.standing(gpu, &call, &planned.variants[0])?;
            meter.passed(hash_of(0));
            // The twin's own choice may do without a plain kernel at which a process ended, but not
            // beside one with wrong results.
            if plain == Standing::Refused && !self.cache.has_ended(&hash_of(0)) {
                return Err(self.uncertified(gpu, &call, &planned.variants[0]));
            }
            let default = default_variant(&call, &planned.variants, &Caps::of(gpu));
            let own = self.standing(gpu, &call, &planned.variants[default])?;
            meter.passed(hash_of(default));
            if plain == Standing::Refused && own == Standing::Refused {
                // Somebody may have ended the processes just then: without a kernel there is no
                // run, so it is tried again.
                self.cache.forget(&hash_of(0));
                if self.standing(gpu, &call, &planned.variants[0])? == Standing::Refused {
                    return Err(self.uncertified(gpu, &call, &planned.variants[0]));
                }
            }
        }
        Ok((calls, meter))
    }

    /// Compiles the kernels that [`Self::certify_needed`] certifies.
    fn compile_uncertified(&mut self, gpu: &Gpu, calls: &[PlanCall], meter: &mut ProgressMeter) {
        let mut needed = Vec::new();
        for planned in calls {
            let call = planned.owned_call.call();
            let default = default_variant(&call, &planned.variants, &Caps::of(gpu));
            for variant in [0, default].map(|index| &planned.variants[index]) {
                if self.cache.certificate(&variant_hash(gpu.checks, &call, variant)).is_none() {
                    needed.push((planned, variant));
                }
            }
        }
        self.compile(gpu, &needed, meter);
    }

    /// Compiles the kernels that a plan runs.
    fn compile_chosen(&mut self, gpu: &Gpu, calls: &[PlanCall], meter: &mut ProgressMeter) {
        let mut chosen = Vec::new();
        for planned in calls {
            chosen.extend(self.chosen(planned).map(|variant| (planned, variant)));
        }
        self.compile(gpu, &chosen, meter);
    }

    /// Returns the variant that was chosen for a call.
    fn chosen<'a>(&self, planned: &'a PlanCall) -> Option<&'a Variant> {
        let name = self.choices.get(&planned.call_key);
        planned.variants.iter().find(|variant| name.is_none_or(|name| variant.name == name))
    }

    /// Checks the chosen variants of calls at full size, once on each driver, on a graphics card or
    /// with seeded errors. For one that is wrong there, another is chosen, and checked too.
    fn check_full_sizes(
        &mut self,
        gpu: &Gpu,
        calls: &[PlanCall],
        meter: &mut ProgressMeter,
    ) -> Result<(), DeviceError> {
        if Caps::of(gpu).class != DeviceClass::Hardware && self.faulty_kernels.is_empty() {
            return Ok(());
        }
        let mut session = FullSizeSession::default();
        // A kernel that is wrong for a call is switched off for those before it as well.
        while self.check_calls(gpu, calls, meter, &mut session)? {}
        if let Some(worst) = session.worst {
            self.cache.note(format!(
                "{} were compared with f64 at full size on {}: at most {worst}",
                counted(session.checked, "kernel", "kernels"),
                gpu.name
            ));
        }
        if !session.too_large.is_empty() {
            self.cache.note(format!(
                "skipped the comparison with f64 at full size on {}, which would take long: {}",
                gpu.name,
                Vec::from_iter(session.too_large).join(", ")
            ));
        }
        Ok(())
    }

    /// Returns the next calls whose chosen variants are not checked at their size, with what is
    /// compared: as many as references are computed at a time.
    fn next_checks<'c>(
        &self,
        gpu: &Gpu,
        calls: &'c [PlanCall],
        session: &FullSizeSession,
    ) -> Vec<(&'c PlanCall, SpotCheck)> {
        let mut checks = Vec::new();
        for planned in calls {
            if checks.len() == spot_check::THREADS_MAX {
                break;
            }
            let Some(variant) = self.chosen(planned).filter(|one| !one.is_foreign()) else {
                continue;
            };
            let call = planned.owned_call.call();
            let key = &planned.call_key;
            let hash = variant_hash(gpu.checks, &call, variant);
            let is_checked = self.cache.is_checked_at_full_size(&hash, key);
            let is_known = session.expectations.contains_key(key) || session.given_up.contains(key);
            if !is_checked && !is_known {
                checks.extend(SpotCheck::of(&call).map(|check| (planned, check)));
            }
        }
        checks
    }

    /// Checks the chosen variants of calls that are not checked yet; returns true if another was
    /// chosen for one of them.
    fn check_calls<'a>(
        &mut self,
        gpu: &'a Gpu,
        calls: &[PlanCall],
        meter: &mut ProgressMeter,
        session: &mut FullSizeSession<'a>,
    ) -> Result<bool, DeviceError> {
        let mut has_changed = false;
        for (index, planned) in calls.iter().enumerate() {
            let Some(variant) = self.chosen(planned).filter(|one| !one.is_foreign()) else {
                continue;
            };
            let call = planned.owned_call.call();
            let hash = variant_hash(gpu.checks, &call, variant);
            let known = self.cache.certificate(&hash);
            let is_checked = self.cache.is_checked_at_full_size(&hash, &planned.call_key);
            let is_off = known.is_some_and(|known| !known.result.is_usable());
            if is_checked && !is_off || session.given_up.contains(&planned.call_key) {
                continue;
            }
            if !is_off {
                meter.alive();
                if !session.expectations.contains_key(&planned.call_key) {
                    let checks = self.next_checks(gpu, &calls[index..], session);
                    let computed = spot_check::expectations(checks, || meter.alive());
                    session.expectations.extend(computed);
                }
                if !session.expectations.contains_key(&planned.call_key) {
                    session.too_large.insert(call.op.to_string());
                    session.given_up.insert(planned.call_key.clone());
                    continue;
                }
                let kernel = label(&call, variant);
                let found = self.check_full_size(gpu, planned, variant, session);
                let result = match found {
                    Ok(result) => result,
                    // The plan, which has one such tensor at a time, may still fit.
                    Err(error) if error.is_survivable() && !gpu.is_lost() => {
                        self.cache.note(format!("{kernel} is not checked at full size: {error}"));
                        session.given_up.insert(planned.call_key.clone());
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                session.note(&result);
                let is_right = result.is_ok();
                if let Err(why) = &result {
                    self.cache.note(format!("{kernel} is switched off on {}: {why}", gpu.name));
                }
                self.cache.certify_full_size(&hash, &planned.call_key, result);
                if is_right {
                    session.expectations.remove(&planned.call_key);
                    continue;
                }
            }
            // The plain variant serves all numbers of rows: without it there is no run.
            if self.standing(gpu, &call, &planned.variants[0])? == Standing::Refused
                && !self.cache.has_ended(&variant_hash(gpu.checks, &call, &planned.variants[0]))
            {
                return Err(self.uncertified(gpu, &call, &planned.variants[0]));
            }
            let candidates = variant_set_hash(gpu, &call, &planned.variants);
            let timings = self.cache.timings(&planned.call_key, &candidates).cloned();
            let measured = timings.unwrap_or_default().measured;
            let name = match self.fastest(gpu, &call, &planned.variants, &measured)? {
                Some(name) => name,
                None => self.fallback(gpu, planned)?,
            };
            has_changed = true;
            self.choices.insert(planned.call_key.clone(), name);
        }
        Ok(has_changed)
    }

    /// Returns the deviation of a variant of a call at full size, or why it is wrong there.
    fn check_full_size<'a>(
        &mut self,
        gpu: &'a Gpu,
        planned: &PlanCall,
        variant: &Variant,
        session: &mut FullSizeSession<'a>,
    ) -> Result<Result<Deviation, String>, DeviceError> {
        let expected = &session.expectations[&planned.call_key];
        let timer = match &mut session.timer {
            Some(timer) => timer,
            None => session.timer.insert(VariantTimer::new(gpu)?),
        };
        let call = planned.owned_call.call();
        let (hash, kernel) = (variant_hash(gpu.checks, &call, variant), label(&call, variant));
        let attempt = (!is_plain(gpu, &call, variant)).then_some((&hash, &kernel));
        self.work.full_size += 1;
        self.trying(gpu, attempt, |kernels| {
            let faults = &kernels.faulty_kernels;
            let fault = faults.iter().find(|one| one.name == variant.name).map(|one| one.fault);
            let pipelines = &mut kernels.pipelines;
            let found = expected.run(timer, pipelines, &planned.owned_call, variant, fault)?;
            Ok(if spot_check::is_right(found) {
                Ok(found)
            } else {
                Err(format!("its results are wrong at full size, in {}: {found}", planned.call_key))
            })
        })
    }

    /// Compiles variants of calls that may run, several at a time, with their names on disk as long
    /// as it lasts; those during whose compilation a process ended first, one by one.
    fn compile(
        &mut self,
        gpu: &Gpu,
        variants: &[(&PlanCall, &Variant)],
        meter: &mut ProgressMeter,
    ) {
        let mut together = Vec::new();
        let mut tried = Vec::new();
        for (planned, variant) in variants {
            // Nothing is kept on disk of a foreign one.
            if variant.is_foreign() || self.pipelines.has(&variant.dispatches) {
                continue;
            }
            let call = planned.owned_call.call();
            let attempt = (variant_hash(gpu.checks, &call, variant), label(&call, variant));
            let known = self.cache.certificate(&attempt.0);
            if tried.contains(&attempt) || known.is_some_and(|known| !known.result.is_usable()) {
                continue;
            }
            if self.cache.is_suspect(&attempt.0) {
                let why = "alone, because a process ended while it was compiled with others";
                meter.compiling(format!("{} {why}", attempt.1));
                self.compile_as(gpu, &[attempt], &[variant], meter);
            } else {
                tried.push(attempt);
                together.push(*variant);
            }
        }
        self.compile_as(gpu, &tried, &together, meter);
    }

    /// Compiles variants as these attempts, by hash and name.
    fn compile_as(
        &mut self,
        gpu: &Gpu,
        tried: &[(String, String)],
        variants: &[&Variant],
        meter: &mut ProgressMeter,
    ) {
        // After a loss, the file names what was tried then.
        if tried.is_empty() || gpu.is_lost() {
            return;
        }
        self.cache.begin_attempt(tried);
        for variant in variants {
            let faulty = self.faulty_kernels.iter().filter(|kernel| kernel.name == variant.name);
            faulty.for_each(FaultyKernel::compile);
        }
        let dispatches = || variants.iter().flat_map(|variant| &variant.dispatches);
        self.pipelines.compile_all(gpu, dispatches(), &mut |what| meter.compiling(what));
        if let [_] = variants {
            // The error of one that does not compile is that of its certification.
            dispatches().for_each(|dispatch| drop(self.pipelines.get(gpu, dispatch)));
        }
        self.cache.end_attempt(gpu.is_lost());
    }

    /// Chooses a variant of each call that has several.
    fn choose_all(
        &mut self,
        gpu: &Gpu,
        calls: &[PlanCall],
        tuning: &TuneOptions,
        meter: &mut ProgressMeter,
        notes: &mut Vec<String>,
    ) -> Result<(), DeviceError> {
        let mut calls: Vec<&PlanCall> =
            calls.iter().filter(|planned| planned.variants.len() > 1).collect();
        calls.sort_by(|a, b| b.weight.total_cmp(&a.weight));
        let until = Instant::now() + Duration::from_secs_f64(tuning.seconds);
        let mut session = TimingSession { gpu, timer: None, until, meter, notes };
        if tuning.retune && tuning.seconds == 0.0 && !calls.is_empty() {
            let text = format!("{} is 0: kernels are not timed again", Setting::TuneSeconds);
            session.notes.push(text);
        }
        for planned in &calls {
            let (name, is_timed) = self.choose(gpu, planned, tuning, &mut session)?;
            let name = match name {
                Some(name) => name,
                None => self.fallback(gpu, planned)?,
            };
            if !is_timed {
                self.untimed.push(planned.call_key.clone());
            }
            self.choices.insert(planned.call_key.clone(), name);
        }
        if self.work.untimed > 0 {
            session.notes.push(format!(
                "autotuning ran out of time ({} s) for {} of {} calls; for now they use the best \
                 kernels timed so far, or defaults. Rerun to continue, or raise {}.",
                tuning.seconds,
                self.work.untimed,
                calls.len(),
                Setting::TuneSeconds
            ));
        }
        Ok(())
    }

    /// Returns the variant to run: the saved one, else by cached timings, else by new ones; `None`
    /// if no two were compared. Returns also whether all were.
    fn choose(
        &mut self,
        gpu: &Gpu,
        planned: &PlanCall,
        tuning: &TuneOptions,
        session: &mut TimingSession,
    ) -> Result<(Option<String>, bool), DeviceError> {
        let PlanCall { owned_call, call_key, variants, .. } = planned;
        let call = owned_call.call();
        if let Some(name) = tuning.saved.get(call_key).filter(|_| !tuning.retune) {
            let saved = variants.iter().find(|variant| variant.name == name);
            let why = match saved.map(|variant| self.standing(gpu, &call, variant)).transpose()? {
                Some(Standing::Certified) => {
                    return Ok((Some(name.to_string()), !tuning.saved_untimed.contains(call_key)));
                }
                Some(Standing::Unusual) => "is unusual here",
                Some(Standing::Refused) => "is switched off here",
                None => "is not known",
            };
            session.notes.push(format!("{name}, which ran {call_key}, {why}: chosen again"));
        }
        let candidates = variant_set_hash(gpu, &call, variants);
        let is_measuring = tuning.seconds > 0.0;
        let known = self.cache.timings(call_key, &candidates);
        let known = known.filter(|_| !(tuning.retune && is_measuring)).cloned();
        let mut known = known.unwrap_or(Timings { candidates, is_cut: true, ..Timings::default() });
        if known.is_cut && is_measuring {
            // What is not timed now is timed in the next run.
            known.is_cut = self.measure(planned, &mut known.measured, session)?;
            self.work.untimed += usize::from(known.is_cut);
            if !known.measured.is_empty() {
                self.cache.insert_timings(call_key.clone(), known.clone());
            }
        }
        // A single timing allows no comparison.
        let is_compared = !known.is_cut || known.measured.len() > 1;
        let measured = if is_compared { known.measured } else { BTreeMap::new() };
        let fastest = self.fastest(gpu, &call, variants, &measured)?;
        let is_timed = fastest.is_some() && !known.is_cut;
        Ok((fastest, is_timed))
    }

    /// Returns the certified variant that took the least time.
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
                && self.standing(gpu, call, variant)? == Standing::Certified
            {
                return Ok(Some(variant.name.clone()));
            }
        }
        Ok(None)
    }

    /// Times the certified variants that are not in `measured`, as far as the time budget reaches;
    /// returns true if it did not reach all. A variant on which the device fails without being lost
    /// is left out.
    fn measure(
        &mut self,
        planned: &PlanCall,
        measured: &mut BTreeMap<String, Timing>,
        session: &mut TimingSession,
    ) -> Result<bool, DeviceError> {
        let (gpu, until, call) = (session.gpu, session.until, planned.owned_call.call());
        if Instant::now() >= until {
            return Ok(true);
        }
        // The plan, which has one such tensor at a time, may still fit.
        if session.begin(planned)?.is_none() {
            return Ok(false);
        }
        let mut order = timing_order(&call, &planned.variants, &Caps::of(gpu));
        order.retain(|index| {
            !measured.contains_key(&variant_hash(gpu.checks, &call, &planned.variants[*index]))
        });
        let candidates: Vec<(&PlanCall, &Variant)> =
            order.iter().map(|index| (planned, &planned.variants[*index])).collect();
        self.compile(gpu, &candidates, session.meter);
        let mut best = measured.values().map(|timing| timing.seconds).reduce(f64::min);
        for index in order {
            let variant = &planned.variants[index];
            if Instant::now() >= until {
                return Ok(true);
            }
            let hash = variant_hash(gpu.checks, &call, variant);
            let timed = self.time(&call, variant, best, session);
            let what = format!("{} of {} is", variant.name, planned.call_key);
            if let Some(seconds) = session.unless_lost(&what, timed)?.flatten() {
                self.work.timed += 1;
                best = Some(best.map_or(seconds, |best| best.min(seconds)));
                let timing = Timing { variant: variant.name.clone(), seconds };
                measured.insert(hash.clone(), timing);
            }
            // The budget may be over before the end of the first run.
            let is_cut = !measured.contains_key(&hash) && Instant::now() >= until;
            session.meter.passed(hash);
            if is_cut {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the seconds of a variant; `None` if it is not certified, or if the time budget was
    /// over before it had run.
    fn time(
        &mut self,
        call: &OpCall,
        variant: &Variant,
        best: Option<f64>,
        session: &mut TimingSession,
    ) -> Result<Option<f64>, DeviceError> {
        let (gpu, until) = (session.gpu, session.until);
        if self.standing(gpu, call, variant)? != Standing::Certified {
            return Ok(None);
        }
        let Some(timer) = &mut session.timer else { return Ok(None) };
        let (hash, kernel) = (variant_hash(gpu.checks, call, variant), label(call, variant));
        let attempt = (!is_plain(gpu, call, variant)).then_some((&hash, &kernel));
        self.trying(gpu, attempt, |kernels| {
            timer.time(&mut kernels.pipelines, variant, best, until)
        })
    }

    /// Returns the variant that runs without measurements: the twin's own choice, the plain
    /// variant, or another.
    fn fallback(&mut self, gpu: &Gpu, planned: &PlanCall) -> Result<String, DeviceError> {
        let call = planned.owned_call.call();
        let default = default_variant(&call, &planned.variants, &Caps::of(gpu));
        let index = self.first_usable(gpu, &call, &planned.variants, &[default, 0])?;
        Ok(planned.variants[index].name.clone())
    }

    /// Returns the first certified one of the preferred variants, or else of all; where none is,
    /// the first that is unusual, in the same order.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if all are refused, with the reason of the plain one, or if the
    /// device fails.
    fn first_usable(
        &mut self,
        gpu: &Gpu,
        call: &OpCall,
        variants: &[Variant],
        preferred: &[usize],
    ) -> Result<usize, DeviceError> {
        let mut unusual = None;
        for index in preferred.iter().copied().chain(0..variants.len()) {
            match self.standing(gpu, call, &variants[index])? {
                Standing::Certified => return Ok(index),
                Standing::Unusual => unusual = unusual.or(Some(index)),
                Standing::Refused => {}
            }
        }
        unusual.ok_or_else(|| self.uncertified(gpu, call, &variants[0]))
    }

    /// Returns the variant of a call: the one chosen for `full`, the same call at full capacity,
    /// if it fits this number of rows, or else the twin's own choice for it. That also comes first
    /// if it is no candidate at full capacity, such as a kernel for a few rows. Certifies it if
    /// need be.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the plain variant of the call fails certification, if a shader
    /// does not compile, or if the device fails.
    pub fn variant(
        &mut self,
        gpu: &Gpu,
        call: &OpCall,
        full: &OpCall,
    ) -> Result<Variant, DeviceError> {
        let mut variants = match twin(call.op) {
            Some(twin) => (twin.variants)(call, &Caps::of(gpu)),
            None => return Ok(Variant::new("none", Vec::new())),
        };
        variants.retain(|variant| variant.workspace_bytes() <= self.workspace_bytes);
        let (own_key, full_key) = (call_key(call), call_key(full));
        let chosen =
            self.choices.get(&full_key).map(str::to_string).filter(|_| {
                own_key == full_key || counts_for(call, &variants, full, &Caps::of(gpu))
            });
        let key = (own_key, chosen.clone().unwrap_or_default());
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

    /// Returns the first usable one of: the chosen variant if it fits the call, the twin's own
    /// choice for this size, the plain variant, another.
    fn select_certified(
        &mut self,
        gpu: &Gpu,
        call: &OpCall,
        variants: &[Variant],
        chosen: Option<&str>,
    ) -> Result<usize, DeviceError> {
        let fits = |name| variants.iter().position(|variant| variant.name == name);
        let mut preferred = Vec::from_iter(chosen.and_then(fits));
        preferred.extend([default_variant(call, variants, &Caps::of(gpu)), 0]);
        let index = self.first_usable(gpu, call, variants, &preferred);
        self.cache.save();
        index
    }

    /// Returns the dispatch of an update, with its kernel certified.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the kernel fails certification, or if the device fails.
    pub fn update(
        &mut self,
        gpu: &Gpu,
        update: &Update,
        range: &UpdateRange,
    ) -> Result<Dispatch, DeviceError> {
        let twin = update_twin(update);
        let (name, dispatch) = (twin.name, (twin.dispatch)(update, range));
        let entry = dispatch.shader.entry;
        if !self.certified_buckets.contains(&(name, entry)) {
            let hash = bucket_hash(gpu.checks, name, std::slice::from_ref(&dispatch));
            self.require_certified(gpu, name, hash, |certifier| {
                certifier.bucket(&BucketProbe::of_update(update, range))
            })?;
            self.certified_buckets.push((name, entry));
        }
        Ok(dispatch)
    }

    /// Returns the stages of the norm of a bucket, with their kernels certified; see
    /// [`norm::dispatch`].
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the kernel fails certification, or if the device fails.
    pub fn norm(
        &mut self,
        gpu: &Gpu,
        count: usize,
        places: NormSlots,
        slot: usize,
    ) -> Result<[Dispatch; 2], DeviceError> {
        let caps = Caps::of(gpu);
        let dispatches = norm::dispatch(count, &caps, places, slot);
        let entry = dispatches[0].shader.entry;
        if !self.certified_buckets.contains(&("norm", entry)) {
            let hash = bucket_hash(gpu.checks, "norm", &dispatches);
            self.require_certified(gpu, "norm", hash, |certifier| {
                certifier.bucket(&norm::probe(count, &caps))
            })?;
            self.certified_buckets.push(("norm", entry));
        }
        Ok(dispatches)
    }

    /// Returns the dispatches of the hash of a whole bucket, with their kernels certified; see
    /// [`hash::dispatch`].
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the kernel fails certification, or if the device fails.
    pub fn hash(
        &mut self,
        gpu: &Gpu,
        count: usize,
        parts: usize,
    ) -> Result<Vec<Dispatch>, DeviceError> {
        let dispatches = hash::dispatch(0..count, parts);
        let entry = dispatches[0].shader.entry;
        if !self.certified_buckets.contains(&("hash", entry)) {
            let key = bucket_hash(gpu.checks, "hash", &dispatches);
            self.require_certified(gpu, "hash", key, |certifier| {
                certifier.bucket(&hash::probe(count))
            })?;
            self.certified_buckets.push(("hash", entry));
        }
        Ok(dispatches)
    }

    /// Certifies every variant of the catalog and every update rule, again if they are in the
    /// cache; see [`super::catalog`].
    ///
    /// # Errors
    /// Returns [`DeviceError`] if the device fails. Kernels that fail certification are in the
    /// cache.
    pub fn certify_all(
        &mut self,
        gpu: &Gpu,
        faulty_kernels: &[FaultyKernel],
    ) -> Result<(), DeviceError> {
        self.faulty_kernels = faulty_kernels.to_vec();
        self.cache.forget_certificates();
        self.open_pipelines_file(gpu);
        let tried = self.try_all(gpu);
        self.reference_cache.clear();
        self.cache.save();
        self.save_pipelines();
        tried
    }

    fn try_all(&mut self, gpu: &Gpu) -> Result<(), DeviceError> {
        for owned_call in catalog::catalog_calls().into_iter().chain(catalog::mixed_calls()) {
            let call = owned_call.call();
            let variants = twin(call.op).map(|twin| (twin.variants)(&call, &Caps::of(gpu)));
            for variant in variants.unwrap_or_default() {
                self.standing(gpu, &call, &variant)?;
            }
        }
        for (rule, range) in catalog::updates() {
            let twin = update_twin(&rule);
            let (name, dispatch) = (twin.name, (twin.dispatch)(&rule, &range));
            let hash = bucket_hash(gpu.checks, name, &[dispatch]);
            self.certified(gpu, name.into(), hash, |certifier| {
                certifier.bucket(&BucketProbe::of_update(&rule, &range))
            })?;
        }
        for count in catalog::COUNTS {
            let (caps, places) = (Caps::of(gpu), NormSlots::new([count]));
            let key = bucket_hash(gpu.checks, "norm", &norm::dispatch(count, &caps, places, 0));
            self.certified(gpu, "norm".into(), key, |certifier| {
                certifier.bucket(&norm::probe(count, &caps))
            })?;
            let key = bucket_hash(gpu.checks, "hash", &hash::dispatch(0..count, 1));
            self.certified(gpu, "hash".into(), key, |certifier| {
                certifier.bucket(&hash::probe(count))
            })?;
        }
        Ok(())
    }

    /// Takes the messages of the cache that were not returned yet.
    pub fn take_notes(&mut self) -> Vec<String> {
        self.cache.take_notes()
    }

    /// Returns how a kernel stands on this driver, by certifying it if need be.
    fn standing(
        &mut self,
        gpu: &Gpu,
        call: &OpCall,
        variant: &Variant,
    ) -> Result<Standing, DeviceError> {
        let hash = variant_hash(gpu.checks, call, variant);
        if variant.is_foreign() {
            return self.standing_of_foreign(gpu, call, variant, &hash);
        }
        // Of this call alone: the kernel may be right for others.
        if beyond_limits(gpu, variant).is_some() {
            return Ok(Standing::Refused);
        }
        let kernel = label(call, variant);
        // Without the plain variant the call cannot run, so it is tried each time.
        let is_attempt = self.cache.certificate(&hash).is_none() && !is_plain(gpu, call, variant);
        self.trying(gpu, is_attempt.then_some((&hash, &kernel)), |kernels| {
            let attempt = |certifier: &mut Certifier| certifier.variant(call, variant);
            kernels.certified(gpu, kernel.clone(), hash.clone(), attempt)
        })
    }

    /// Runs `body`, in which a kernel of this hash and name runs for the first time, with a note on
    /// disk as long as it lasts.
    fn trying<T>(
        &mut self,
        gpu: &Gpu,
        attempt: Option<(&String, &String)>,
        body: impl FnOnce(&mut Self) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let Some((hash, kernel)) = attempt.filter(|_| !gpu.is_lost()) else { return body(self) };
        self.cache.begin_attempt(&[(hash.clone(), kernel.clone())]);
        let result = body(self);
        self.cache.end_attempt(result.is_err() && gpu.is_lost());
        result
    }

    /// Returns how a kernel from outside the crate stands for a call, by certifying it for each
    /// size of call once.
    fn standing_of_foreign(
        &mut self,
        gpu: &Gpu,
        call: &OpCall,
        variant: &Variant,
        hash: &str,
    ) -> Result<Standing, DeviceError> {
        let key = foreign_key(call, hash);
        if let Some(known) = self.foreign.get(&key) {
            return Ok(Standing::of(known));
        }
        self.work.certified += 1;
        // Not kept: its inputs and outputs may be as large as those of the model.
        let reference_cache = &mut ReferenceCache::default();
        let Self { pipelines, faulty_kernels, .. } = self;
        let mut certifier = Certifier { gpu, pipelines, reference_cache, faulty_kernels };
        let result = certifier.variant(call, variant)?;
        let standing = Standing::of(&result);
        self.foreign.insert(key, result);
        Ok(standing)
    }

    fn require_certified(
        &mut self,
        gpu: &Gpu,
        kernel: &str,
        hash: String,
        attempt: impl FnOnce(&mut Certifier) -> Result<CertificationResult, DeviceError>,
    ) -> Result<(), DeviceError> {
        let standing = self.certified(gpu, kernel.into(), hash.clone(), attempt)?;
        self.cache.save();
        match standing {
            Standing::Certified | Standing::Unusual => Ok(()),
            Standing::Refused => Err(self.refusal(gpu, kernel.into(), &hash)),
        }
    }

    /// Returns how a kernel stands, by the cache or by certifying it now. If the device fails, the
    /// cache gets no result for the kernel, so the next run certifies it again.
    fn certified(
        &mut self,
        gpu: &Gpu,
        kernel: String,
        hash: String,
        attempt: impl FnOnce(&mut Certifier) -> Result<CertificationResult, DeviceError>,
    ) -> Result<Standing, DeviceError> {
        if let Some(known) = self.cache.certificate(&hash) {
            return Ok(Standing::of(&known.result));
        }
        self.work.certified += 1;
        let Self { pipelines, reference_cache, faulty_kernels, .. } = self;
        let result = attempt(&mut Certifier { gpu, pipelines, reference_cache, faulty_kernels })?;
        if let CertificationResult::Unusual(deviation) = &result {
            self.cache.note(format!(
                "{kernel} is unusually inaccurate on {}; it is used only where no other kernel \
                 fits: {deviation}",
                gpu.name
            ));
        }
        let standing = Standing::of(&result);
        self.cache.certify(hash, Certificate::new(kernel, result));
        Ok(standing)
    }

    fn uncertified(&self, gpu: &Gpu, call: &OpCall, variant: &Variant) -> DeviceError {
        let hash = variant_hash(gpu.checks, call, variant);
        if let Some(CertificationResult::Fail { why }) = self.foreign.get(&foreign_key(call, &hash))
        {
            let (adapter, op, why) = (gpu.name.clone(), call.op.to_string(), why.clone());
            return DeviceError::CustomKernel { adapter, op, why };
        }
        if let Some(why) = beyond_limits(gpu, variant) {
            let (adapter, kernel) = (gpu.name.clone(), label(call, variant));
            return DeviceError::Uncertified { adapter, kernel, why };
        }
        self.refusal(gpu, label(call, variant), &hash)
    }

    fn refusal(&self, gpu: &Gpu, kernel: String, hash: &str) -> DeviceError {
        let why = match self.cache.certificate(hash).map(|known| &known.result) {
            Some(CertificationResult::Fail { why }) => why.clone(),
            _ => "it was never tried".into(),
        };
        DeviceError::Uncertified { adapter: gpu.name.clone(), kernel, why }
    }
}

/// Returns the key of a kernel from outside the crate and the call on which it was certified.
fn foreign_key(call: &OpCall, hash: &str) -> String {
    format!("{hash} {}", call_key(call))
}

/// Returns true if the choice for `full` counts for a call with these variants: unless the twin's
/// own choice for that is no candidate of `full`.
fn counts_for(call: &OpCall, variants: &[Variant], full: &OpCall, caps: &Caps) -> bool {
    let own = &variants[default_variant(call, variants, caps)].name;
    let of_full = twin(full.op).map(|twin| (twin.variants)(full, caps)).unwrap_or_default();
    of_full.iter().any(|variant| variant.name == *own)
}

/// Returns true if a variant is the plain one of a call.
fn is_plain(gpu: &Gpu, call: &OpCall, variant: &Variant) -> bool {
    let variants = twin(call.op).map(|twin| (twin.variants)(call, &Caps::of(gpu)));
    variants.is_none_or(|all| all.first().is_none_or(|plain| plain.name == variant.name))
}

/// Returns what of a variant's parameters and grids is beyond the device's limits.
fn beyond_limits(gpu: &Gpu, variant: &Variant) -> Option<String> {
    variant.dispatches.iter().find_map(|one| one.check(&gpu.limits).err())
}

/// Returns the display name of a kernel.
fn label(call: &OpCall, variant: &Variant) -> String {
    format!("{} of {}", variant.name, call.op)
}

#[cfg(test)]
mod tests;
