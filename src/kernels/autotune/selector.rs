//! Kernel selection: only certified kernels run. Among the variants of a call, one is chosen by
//! measurements within a time budget, which are cached.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use super::cache::{Certificate, Timing, Timings};
use super::certify::{CertificationResult, Certifier, bucket_hash, fault_of, variant_hash};
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
    /// True to repeat the measurements in the cache, if the time allows it.
    pub retune: bool,
    /// Choices to keep, from the run that is resumed.
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
    /// Calls with variants that the time budget did not reach.
    pub untimed: usize,
}

/// Standing of a kernel on a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KernelStatus {
    /// It is right.
    Certified,
    /// It runs only if no other fits.
    Unusual,
    Refused,
}

impl KernelStatus {
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
    /// Buffers for the calls, made at first use.
    timer: Option<VariantTimer<'a>>,
    /// Checks with a result, and the largest deviations of the kernels that are right.
    checked: usize,
    worst: Option<Deviation>,
    /// Expected values by the key of the call.
    expectations: Expectations,
    /// Ops with a call whose reference takes too long.
    too_large: BTreeSet<String>,
    /// Keys of the calls that cannot be checked.
    given_up: BTreeSet<String>,
}

impl FullSizeSession<'_> {
    fn note(&mut self, result: &Result<Deviation, String>) {
        self.checked += 1;
        if let Ok(found) = result {
            self.worst = match self.worst {
                Some(worst) => Some(found.worst(worst)),
                None => Some(*found),
            };
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
    /// because they also depend on the op's reference, which has no hash.
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
        let prepared = self.prepare_calls(gpu, plan, tuning, report, &mut notes);
        self.reference_cache.clear();
        // Failures are cached too.
        self.cache.save();
        self.save_pipelines();
        notes.extend(self.cache.take_notes());
        prepared?;
        Ok(notes)
    }

    /// Certifies, chooses, compiles and checks the kernels of a plan.
    fn prepare_calls(
        &mut self,
        gpu: &Gpu,
        plan: &Plan,
        tuning: &TuneOptions,
        report: &mut dyn FnMut(TuneProgress),
        notes: &mut Vec<String>,
    ) -> Result<(), DeviceError> {
        let (calls, mut meter) = self.certify_needed(gpu, plan, tuning, report)?;
        self.choose_all(gpu, &calls, tuning, &mut meter, notes)?;
        self.compile_chosen(gpu, &calls, &mut meter);
        self.check_full_sizes(gpu, &calls, &mut meter)
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
        if let Some(file) = &mut self.pipelines_file
            && let Err(why) = file.save(&self.pipelines)
        {
            self.cache.note(format!("compiled kernels cannot be cached: {why}"));
        }
    }

    /// Certifies the kernels that run without measurements: for each call the plain variant, which
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
            let plain = &planned.variants[0];
            let plain_hash = variant_hash(gpu.checks, &call, plain);
            let plain_standing = self.standing(gpu, &call, plain)?;
            meter.passed(plain_hash.clone());
            // The twin's own choice may run without a plain kernel at which a process ended, but
            // not if the plain kernel has wrong results.
            if plain_standing == KernelStatus::Refused && !self.cache.has_ended(&plain_hash) {
                return Err(self.uncertified(gpu, &call, plain));
            }

            let default = default_variant(&call, &planned.variants, &Caps::of(gpu));
            let own = &planned.variants[default];
            let own_standing = self.standing(gpu, &call, own)?;
            meter.passed(variant_hash(gpu.checks, &call, own));
            if plain_standing == KernelStatus::Refused && own_standing == KernelStatus::Refused {
                // The processes may have been ended from outside: without a kernel there is no run,
                // so the plain one is tried again.
                self.cache.forget(&plain_hash);
                if self.standing(gpu, &call, plain)? == KernelStatus::Refused {
                    return Err(self.uncertified(gpu, &call, plain));
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
            for index in [0, default] {
                let variant = &planned.variants[index];
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
            if let Some(variant) = self.chosen(planned) {
                chosen.push((planned, variant));
            }
        }
        self.compile(gpu, &chosen, meter);
    }

    fn chosen<'a>(&self, planned: &'a PlanCall) -> Option<&'a Variant> {
        let name = self.choices.get(&planned.call_key);
        planned.variants.iter().find(|variant| name.is_none_or(|name| variant.name == name))
    }

    /// Returns the variant that was chosen for a call, unless it is from outside the crate: such
    /// variants are not checked at full size.
    fn chosen_to_check<'a>(&self, planned: &'a PlanCall) -> Option<&'a Variant> {
        self.chosen(planned).filter(|variant| !variant.is_foreign())
    }

    /// Checks the chosen variants of calls at full size, once on each driver, on a graphics card or
    /// with seeded errors. If one is wrong, another is chosen and checked too.
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
        // A kernel that is wrong for a call is switched off for the calls before it as well.
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

    /// Returns the next calls whose chosen variants are not checked at their size, with the parts
    /// to compare: as many as references are computed concurrently.
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
            let Some(variant) = self.chosen_to_check(planned) else { continue };
            let call = planned.owned_call.call();
            let key = &planned.call_key;
            let hash = variant_hash(gpu.checks, &call, variant);
            let is_checked = self.cache.is_checked_at_full_size(&hash, key);
            let is_known = session.expectations.contains_key(key) || session.given_up.contains(key);
            if is_checked || is_known {
                continue;
            }
            if let Some(check) = SpotCheck::of(&call) {
                checks.push((planned, check));
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
            let Some(variant) = self.chosen_to_check(planned) else { continue };
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
                let result = match self.check_full_size(gpu, planned, variant, session) {
                    Ok(result) => result,
                    // The plan, which holds only one such tensor, may still fit.
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
            if self.standing(gpu, &call, &planned.variants[0])? == KernelStatus::Refused
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

    /// Deviation of a variant of a call at full size, or why it is wrong there.
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
        let attempt = attempt_of(gpu, &call, variant);
        self.work.full_size += 1;
        let found = self.trying(gpu, attempt, |kernels| {
            let fault = fault_of(&kernels.faulty_kernels, &variant.name);
            let pipelines = &mut kernels.pipelines;
            expected.run(timer, pipelines, &planned.owned_call, variant, fault)
        })?;
        if spot_check::is_right(found) {
            return Ok(Ok(found));
        }
        let key = &planned.call_key;
        Ok(Err(format!("its results are wrong at full size, in {key}: {found}")))
    }

    /// Compiles the variants that may run, several concurrently, with their names on disk
    /// meanwhile. Kernels during whose compilation a process ended are compiled first, one by one.
    fn compile(
        &mut self,
        gpu: &Gpu,
        variants: &[(&PlanCall, &Variant)],
        meter: &mut ProgressMeter,
    ) {
        let mut together = Vec::new();
        let mut tried = Vec::new();
        for (planned, variant) in variants {
            // Nothing is kept on disk about a foreign one.
            if variant.is_foreign() || self.pipelines.has(&variant.dispatches) {
                continue;
            }
            let call = planned.owned_call.call();
            let hash = variant_hash(gpu.checks, &call, variant);
            let kernel = label(&call, variant);
            let known = self.cache.certificate(&hash);
            let is_off = known.is_some_and(|known| !known.result.is_usable());
            let is_suspect = self.cache.is_suspect(&hash);
            let attempt = (hash, kernel);
            if is_off || tried.contains(&attempt) {
                continue;
            }
            if is_suspect {
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
        // After a loss of the device, the file keeps the names of that attempt.
        if tried.is_empty() || gpu.is_lost() {
            return;
        }
        self.cache.begin_attempt(tried);
        for variant in variants {
            for faulty in &self.faulty_kernels {
                if faulty.name == variant.name {
                    faulty.compile();
                }
            }
        }
        let dispatches = variants.iter().flat_map(|variant| &variant.dispatches);
        self.pipelines.compile_all(gpu, dispatches, &mut |what| meter.compiling(what));
        if let [variant] = variants {
            for dispatch in &variant.dispatches {
                // Its certification reports the error if it does not compile.
                drop(self.pipelines.get(gpu, dispatch));
            }
        }
        self.cache.end_attempt(gpu.has_failed());
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
                "autotuning ran out of time ({} s) for {} of {} calls: this start uses the best \
                 kernels timed so far, or defaults, and the next one goes on; {} sets the time",
                tuning.seconds,
                self.work.untimed,
                calls.len(),
                Setting::TuneSeconds
            ));
        }
        Ok(())
    }

    /// Returns the variant to run: the saved one, else by cached timings, else by new ones; `None`
    /// if fewer than two were compared. Also returns true if all were timed.
    fn choose(
        &mut self,
        gpu: &Gpu,
        planned: &PlanCall,
        tuning: &TuneOptions,
        session: &mut TimingSession,
    ) -> Result<(Option<String>, bool), DeviceError> {
        let PlanCall { owned_call, call_key, variants, .. } = planned;
        let call = owned_call.call();
        if !tuning.retune
            && let Some(name) = tuning.saved.get(call_key)
        {
            let standing = match variants.iter().find(|variant| variant.name == name) {
                Some(variant) => Some(self.standing(gpu, &call, variant)?),
                None => None,
            };
            let why = match standing {
                Some(KernelStatus::Certified) => {
                    return Ok((Some(name.to_string()), !tuning.saved_untimed.contains(call_key)));
                }
                Some(KernelStatus::Unusual) => "is unusual here",
                Some(KernelStatus::Refused) => "is switched off here",
                None => "is not known",
            };
            session.notes.push(format!("{name}, which ran {call_key}, {why}: chosen again"));
        }
        let candidates = variant_set_hash(gpu, &call, variants);
        let is_measuring = tuning.seconds > 0.0;
        let is_timed_again = tuning.retune && is_measuring;
        let mut known = match self.cache.timings(call_key, &candidates) {
            Some(known) if !is_timed_again => known.clone(),
            _ => Timings { candidates, is_cut: true, ..Timings::default() },
        };
        if known.is_cut && is_measuring {
            // Variants not timed now are timed in the next run.
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

    /// Certified variant that took the least time.
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
                && self.standing(gpu, call, variant)? == KernelStatus::Certified
            {
                return Ok(Some(variant.name.clone()));
            }
        }
        Ok(None)
    }

    /// Times the certified variants that are not in `measured`, within the time budget; returns
    /// true if it was over before all were timed. A variant on which the device fails without being
    /// lost is left out.
    fn measure(
        &mut self,
        planned: &PlanCall,
        measured: &mut BTreeMap<String, Timing>,
        session: &mut TimingSession,
    ) -> Result<bool, DeviceError> {
        let gpu = session.gpu;
        let until = session.until;
        let call = planned.owned_call.call();
        if Instant::now() >= until {
            return Ok(true);
        }
        // Too little memory for the timer: the plan, which holds only one such tensor, may still
        // fit.
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
                best = Some(best.unwrap_or(seconds).min(seconds));
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
        let gpu = session.gpu;
        let until = session.until;
        if self.standing(gpu, call, variant)? != KernelStatus::Certified {
            return Ok(None);
        }
        let Some(timer) = &mut session.timer else { return Ok(None) };
        self.trying(gpu, attempt_of(gpu, call, variant), |kernels| {
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

    /// Returns the first certified variant among the preferred ones, or else among all; without
    /// one, the first unusual variant in the same order.
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
                KernelStatus::Certified => return Ok(index),
                KernelStatus::Unusual => unusual = unusual.or(Some(index)),
                KernelStatus::Refused => {}
            }
        }
        unusual.ok_or_else(|| self.uncertified(gpu, call, &variants[0]))
    }

    /// Returns the variant of a call: the one chosen for `full`, the same call at full capacity,
    /// if it fits this number of rows, or else the twin's own choice for it. The own choice also
    /// comes first if it is no candidate at full capacity, such as a kernel for a few rows. The
    /// variant is certified if need be.
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
        let least = variants.iter().map(Variant::workspace_bytes).min().unwrap_or(0);
        if least > self.workspace_bytes {
            let room = self.workspace_bytes;
            return Err(DeviceError::Refused {
                adapter: gpu.name.clone(),
                what: call_key(call),
                why: format!("it needs {least} bytes between its dispatches, of {room}"),
            });
        }
        variants.retain(|variant| variant.workspace_bytes() <= self.workspace_bytes);
        let own_key = call_key(call);
        let full_key = call_key(full);
        let mut chosen = None;
        if let Some(name) = self.choices.get(&full_key)
            && (own_key == full_key || counts_for(call, &variants, full, &Caps::of(gpu)))
        {
            chosen = Some(name.to_string());
        }
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
        let mut preferred = Vec::new();
        if let Some(name) = chosen {
            preferred.extend(variants.iter().position(|variant| variant.name == name));
        }
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
        let name = twin.name;
        let dispatch = (twin.dispatch)(update, range);
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
            for variant in twin::variants(&call, &Caps::of(gpu)) {
                self.standing(gpu, &call, &variant)?;
            }
        }
        for (rule, range) in catalog::updates() {
            let twin = update_twin(&rule);
            let dispatch = (twin.dispatch)(&rule, &range);
            let hash = bucket_hash(gpu.checks, twin.name, &[dispatch]);
            self.certified(gpu, twin.name.into(), hash, |certifier| {
                certifier.bucket(&BucketProbe::of_update(&rule, &range))
            })?;
        }
        for count in catalog::COUNTS {
            let caps = Caps::of(gpu);
            let places = NormSlots::new([count]);
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

    /// Takes the messages of the cache that were not taken yet.
    pub fn take_notes(&mut self) -> Vec<String> {
        self.cache.take_notes()
    }

    /// Standing of a kernel on this driver, certified if need be.
    fn standing(
        &mut self,
        gpu: &Gpu,
        call: &OpCall,
        variant: &Variant,
    ) -> Result<KernelStatus, DeviceError> {
        let hash = variant_hash(gpu.checks, call, variant);
        if variant.is_foreign() {
            return self.standing_of_foreign(gpu, call, variant, &hash);
        }
        // Only for this call: the kernel may be right for others.
        if beyond_limits(gpu, variant).is_some() {
            return Ok(KernelStatus::Refused);
        }
        let attempt = match self.cache.certificate(&hash) {
            Some(_) => None,
            None => attempt_of(gpu, call, variant),
        };
        self.trying(gpu, attempt, |kernels| {
            kernels.certified(gpu, label(call, variant), hash, |certifier| {
                certifier.variant(call, variant)
            })
        })
    }

    /// Runs `body`, in which a kernel of this hash and name runs for the first time, with a note on
    /// disk meanwhile.
    fn trying<T>(
        &mut self,
        gpu: &Gpu,
        attempt: Option<(String, String)>,
        body: impl FnOnce(&mut Self) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let attempt = match attempt {
            Some(attempt) if !gpu.is_lost() => attempt,
            _ => return body(self),
        };
        self.cache.begin_attempt(&[attempt]);
        let result = body(self);
        self.cache.end_attempt(result.is_err() && gpu.has_failed());
        result
    }

    /// Returns the standing of a kernel from outside the crate for a call; it is certified once for
    /// each size of call.
    fn standing_of_foreign(
        &mut self,
        gpu: &Gpu,
        call: &OpCall,
        variant: &Variant,
        hash: &str,
    ) -> Result<KernelStatus, DeviceError> {
        let key = foreign_key(call, hash);
        if let Some(known) = self.foreign.get(&key) {
            return Ok(KernelStatus::of(known));
        }
        self.work.certified += 1;
        // The results are not kept: inputs and outputs may be as large as the model's.
        let reference_cache = &mut ReferenceCache::default();
        let Self { pipelines, faulty_kernels, .. } = self;
        let mut certifier = Certifier { gpu, pipelines, reference_cache, faulty_kernels };
        let result = certifier.variant(call, variant)?;
        let standing = KernelStatus::of(&result);
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
            KernelStatus::Certified | KernelStatus::Unusual => Ok(()),
            KernelStatus::Refused => Err(self.refusal(gpu, kernel.into(), &hash)),
        }
    }

    /// Returns the standing of a kernel, by the cache or by certifying it now. If the device fails,
    /// the cache gets no result for the kernel, so the next run certifies it again.
    fn certified(
        &mut self,
        gpu: &Gpu,
        kernel: String,
        hash: String,
        attempt: impl FnOnce(&mut Certifier) -> Result<CertificationResult, DeviceError>,
    ) -> Result<KernelStatus, DeviceError> {
        if let Some(known) = self.cache.certificate(&hash) {
            return Ok(KernelStatus::of(&known.result));
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
        let standing = KernelStatus::of(&result);
        self.cache.certify(hash, Certificate::new(kernel, result));
        Ok(standing)
    }

    fn uncertified(&self, gpu: &Gpu, call: &OpCall, variant: &Variant) -> DeviceError {
        let hash = variant_hash(gpu.checks, call, variant);
        if let Some(CertificationResult::Fail { why }) = self.foreign.get(&foreign_key(call, &hash))
        {
            return DeviceError::CustomKernel {
                adapter: gpu.name.clone(),
                op: call.op.to_string(),
                why: why.clone(),
            };
        }
        if let Some(why) = beyond_limits(gpu, variant) {
            let kernel = label(call, variant);
            return DeviceError::Uncertified { adapter: gpu.name.clone(), kernel, why };
        }
        self.refusal(gpu, label(call, variant), &hash)
    }

    fn refusal(&self, gpu: &Gpu, kernel: String, hash: &str) -> DeviceError {
        let why = match self.cache.certificate(hash) {
            Some(Certificate { result: CertificationResult::Fail { why }, .. }) => why.clone(),
            _ => "it was never tried".into(),
        };
        DeviceError::Uncertified { adapter: gpu.name.clone(), kernel, why }
    }
}

/// Key of a kernel from outside the crate and the call on which it was certified.
fn foreign_key(call: &OpCall, hash: &str) -> String {
    format!("{hash} {}", call_key(call))
}

/// Returns true if the choice for `full` counts for a call with these variants: the twin's own
/// choice for the call must be a candidate of `full`.
fn counts_for(call: &OpCall, variants: &[Variant], full: &OpCall, caps: &Caps) -> bool {
    let own = &variants[default_variant(call, variants, caps)].name;
    twin::variants(full, caps).iter().any(|variant| variant.name == *own)
}

/// Returns the hash and the name of a kernel, under which an attempt at it is noted; `None` for the
/// plain variant: without it the call cannot run, so it is tried each time.
fn attempt_of(gpu: &Gpu, call: &OpCall, variant: &Variant) -> Option<(String, String)> {
    let variants = twin::variants(call, &Caps::of(gpu));
    let is_plain = variants.first().is_none_or(|plain| plain.name == variant.name);
    if is_plain {
        return None;
    }
    Some((variant_hash(gpu.checks, call, variant), label(call, variant)))
}

/// Reason if a parameter or a grid of a variant is beyond the device's limits.
fn beyond_limits(gpu: &Gpu, variant: &Variant) -> Option<String> {
    variant.dispatches.iter().find_map(|one| one.check(&gpu.limits).err())
}

fn label(call: &OpCall, variant: &Variant) -> String {
    format!("{} of {}", variant.name, call.op)
}

#[cfg(test)]
mod tests;
