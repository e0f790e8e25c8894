//! Kernel cache of one driver, kept on disk: certification results and timings of kernels. One
//! file per adapter, API and driver, which several processes may write.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use super::attempts::AttemptFile;
use super::certify::CertificationResult;
use crate::device::{Adapter, DeviceError, Gpu, MappedReadRates};
use crate::harness::Deviation;
use crate::ops::matmul::tile;
use crate::source;
use potluck_core::{Setting, files};

/// Environment variable that names another directory for the files kept between runs.
pub(crate) const CACHE_DIR_ENV: &str = "POTLUCK_CACHE";

const FORMAT: u64 = 4;

/// Attempts to take a lock that another process holds for writing, and the pause between them.
const TRIES: u32 = 40;
const PAUSE: Duration = Duration::from_millis(50);

/// Reason of the failure of a kernel whose attempt did not end.
const ENDED: &str =
    "the process ended, or the device was lost or did not answer, when it was tried";

/// Certification result of a kernel.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Certificate {
    /// Display name (variant and op); never a lookup key.
    pub kernel: String,
    pub result: CertificationResult,
    /// Deviations at full size, by the key of the call.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub full_size: BTreeMap<String, Deviation>,
    /// Build that the kernel belongs to: a hash of all its kernels.
    pub build: String,
}

impl Certificate {
    /// Returns the certificate of a kernel of this build.
    pub fn new(kernel: impl Into<String>, result: CertificationResult) -> Self {
        Self { kernel: kernel.into(), result, full_size: BTreeMap::new(), build: build().into() }
    }
}

/// Returns the hash of this build's kernels: other builds may have corrected kernels that are wrong
/// here.
fn build() -> &'static str {
    static BUILD: OnceLock<String> = OnceLock::new();
    BUILD.get_or_init(|| {
        let mut hasher = blake3::Hasher::new();
        hasher.update(env!("CARGO_PKG_VERSION").as_bytes());
        for (name, text) in source::FILES.iter().chain(source::LIBRARY) {
            hasher.update(name.as_bytes()).update(text.as_bytes());
        }
        hasher.update(tile::text(tile::TILES[0], false, false, "").as_bytes());
        hasher.finalize().to_hex()[..16].to_string()
    })
}

/// Measured time of one variant of a call.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Timing {
    pub variant: String,
    pub seconds: f64,
}

/// Timings of the variants of a call.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Timings {
    /// Hash of all variants that could be selected.
    pub candidates: String,
    /// Timings by kernel hash.
    pub measured: BTreeMap<String, Timing>,
    /// True if the time budget was over before all variants were timed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_cut: bool,
}

/// Content of the cache file.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct CacheFile {
    format: u64,
    device: String,
    /// Certificates by kernel hash.
    #[serde(default)]
    certificates: BTreeMap<String, Certificate>,
    /// Timings by the key of the call.
    #[serde(default)]
    timings: BTreeMap<String, Timings>,
    /// Rates of reading mapped memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mapped_reads: Option<MappedReadRates>,
}

/// Kernel cache of one device.
#[derive(Debug)]
pub struct KernelCache {
    /// Path of the file; `None`: kept in memory only.
    path: Option<PathBuf>,
    content: CacheFile,
    /// Keys of the certificates and of the timings that are not on disk yet.
    dirty: [BTreeSet<String>; 2],
    /// True if the rates of mapped reads are not on disk yet.
    has_new_rates: bool,
    notes: Vec<String>,
    /// True if a note says that nothing is kept.
    is_lost: bool,
    /// File of attempts, on a graphics card.
    attempts: Option<AttemptFile>,
    /// Kernels whose attempts did not end, but that may be tried again.
    forgotten: BTreeSet<String>,
}

/// Reason why a file cannot be used as a cache.
enum Unusable {
    /// It cannot be read; the content may be right.
    Unreadable(io::Error),
    /// The content is wrong.
    Damaged(String),
}

/// Returns the name of a device in the cache, which includes the driver: another driver may be
/// right or wrong in other ways.
pub fn device_key(adapter: &Adapter) -> String {
    format!("{}:{} ({})", adapter.api, adapter.name, adapter.driver)
}

/// Returns the directory of the cache files: `POTLUCK_CACHE`, or `potluck` in the user's cache
/// directory.
pub fn directory() -> Option<PathBuf> {
    match std::env::var_os(CACHE_DIR_ENV) {
        Some(path) if !path.is_empty() => Some(PathBuf::from(path)),
        _ => Some(dirs::cache_dir()?.join("potluck")),
    }
}

impl KernelCache {
    /// Returns an empty cache that is never written.
    pub fn in_memory() -> Self {
        let content = CacheFile {
            format: FORMAT,
            device: String::new(),
            certificates: BTreeMap::new(),
            timings: BTreeMap::new(),
            mapped_reads: None,
        };
        Self {
            path: None,
            content,
            dirty: Default::default(),
            has_new_rates: false,
            notes: Vec::new(),
            is_lost: false,
            attempts: None,
            forgotten: BTreeSet::new(),
        }
    }

    /// Returns the cache of an adapter in [`directory`]; in memory, with a note, if there is no
    /// directory.
    pub fn of(adapter: &Adapter) -> Self {
        match directory() {
            Some(directory) => Self::open(&directory, &device_key(adapter)),
            None => {
                let mut cache = Self::in_memory();
                cache.notes.push(format!(
                    "what is found out about kernels is not kept: there is no directory for it; \
                     name one with {CACHE_DIR_ENV}"
                ));
                cache
            }
        }
    }

    /// Opens the cache of a device in a directory. A damaged or foreign file is reported by a
    /// note, and set aside when this cache is saved; a file that cannot be read is left unchanged.
    pub fn open(directory: &Path, device: &str) -> Self {
        let path = directory.join(file_name(device));
        let mut cache = Self::in_memory();
        cache.content.device = device.to_string();
        match read(&path, device) {
            Ok(Some(content)) => cache.content = content,
            Ok(None) => {}
            Err(Unusable::Unreadable(why)) => cache.note_lost(&path, &why),
            Err(Unusable::Damaged(why)) => cache.notes.push(format!(
                "{} is no record of kernels ({why}): a new one replaces it, and it is kept as {}",
                path.display(),
                damaged(&path).display()
            )),
        }
        cache.path = Some(path);
        cache
    }

    /// Returns the path of the file with the driver's compiled pipelines and the name of the device
    /// in it; `None` if nothing is kept.
    pub(crate) fn pipelines_file(&self) -> Option<(PathBuf, &str)> {
        let path = self.path.as_ref()?.with_extension("pipelines");
        Some((path, &self.content.device))
    }

    /// Adds a message for the user.
    pub fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    /// Returns the certification result of a kernel.
    pub fn certificate(&self, hash: &str) -> Option<&Certificate> {
        self.content.certificates.get(hash)
    }

    /// Returns true if a kernel was checked at the size of a call, and was right.
    pub fn is_checked_at_full_size(&self, hash: &str, call_key: &str) -> bool {
        let known = self.certificate(hash);
        known.is_some_and(|known| known.full_size.contains_key(call_key))
    }

    /// Sets the certificate of a kernel.
    pub fn certify(&mut self, hash: String, certificate: Certificate) {
        self.dirty[0].insert(hash.clone());
        self.forgotten.remove(&hash);
        self.content.certificates.insert(hash, certificate);
    }

    /// Notes the deviation of a certified kernel at the size of a call, or the reason why it is
    /// wrong there, which replaces its certification.
    pub(crate) fn certify_full_size(
        &mut self,
        hash: &str,
        call_key: &str,
        result: Result<Deviation, String>,
    ) {
        let Some(certificate) = self.content.certificates.get_mut(hash) else { return };
        match result {
            Ok(deviation) => {
                certificate.full_size.insert(call_key.into(), deviation);
            }
            Err(why) => certificate.result = CertificationResult::Fail { why },
        }
        self.dirty[0].insert(hash.into());
    }

    /// Opens the file of attempts. A kernel whose attempt did not end is switched off, with a note.
    pub(crate) fn open_attempts(&mut self) {
        if self.attempts.is_some() {
            return;
        }
        let Some(path) = &self.path else { return };
        // If the directory cannot be made, saving says so.
        let _ = fs::create_dir_all(files::parent(path));
        let Some((file, left)) = AttemptFile::open(&path.with_extension("attempt")) else { return };
        self.attempts = Some(file);
        if let Some(left) = left {
            self.notes.push(format!(
                "{} is switched off: {ENDED}; {} tries it again",
                left.kernel,
                Setting::Retune
            ));
            let failed = CertificationResult::Fail { why: ENDED.into() };
            self.certify(left.hash, Certificate::new(left.kernel, failed));
            self.save();
        }
    }

    /// Notes on disk that kernels are tried, by hash and name, until [`Self::end_attempt`].
    pub(crate) fn begin_attempt(&mut self, tried: &[(String, String)]) {
        if let Some(file) = &mut self.attempts {
            file.begin(tried);
        }
    }

    /// Returns true if a process ended while it compiled several kernels, this one among them.
    pub(crate) fn is_suspect(&self, hash: &str) -> bool {
        self.attempts.as_ref().is_some_and(|file| file.is_suspect(hash))
    }

    /// Forgets the certificate of a kernel in memory, so that it is tried again.
    pub(crate) fn forget(&mut self, hash: &str) {
        self.content.certificates.remove(hash);
    }

    /// Returns true if a kernel of this hash is switched off because an attempt at it did not end.
    pub(crate) fn has_ended(&self, hash: &str) -> bool {
        match self.certificate(hash) {
            Some(Certificate { result: CertificationResult::Fail { why }, .. }) => why == ENDED,
            _ => false,
        }
    }

    /// Notes that the attempt is over, or that it lost the device.
    pub(crate) fn end_attempt(&mut self, is_lost: bool) {
        if let Some(file) = &mut self.attempts {
            file.end(is_lost);
        }
    }

    /// Forgets the kernels whose attempts did not end, here and on disk.
    pub(crate) fn forget_attempts(&mut self) {
        let ended = CertificationResult::Fail { why: ENDED.into() };
        let forgotten = &mut self.forgotten;
        self.content.certificates.retain(|hash, known| {
            let is_over = known.result != ended;
            if !is_over {
                forgotten.insert(hash.clone());
            }
            is_over
        });
    }

    /// Discards all certificates in memory; those on disk stay until the kernel is certified
    /// again.
    pub(crate) fn forget_certificates(&mut self) {
        self.content.certificates.clear();
    }

    /// Returns the certificates of all kernels, passed or failed.
    pub fn certificates(&self) -> impl Iterator<Item = &Certificate> {
        self.content.certificates.values()
    }

    /// Returns the timings of a call, if they were measured with these candidates.
    pub fn timings(&self, call_key: &str, candidates: &str) -> Option<&Timings> {
        self.content.timings.get(call_key).filter(|known| known.candidates == candidates)
    }

    pub(crate) fn insert_timings(&mut self, call_key: String, timings: Timings) {
        self.dirty[1].insert(call_key.clone());
        self.content.timings.insert(call_key, timings);
    }

    /// Returns the rates of reading mapped memory, if they were measured.
    pub fn mapped_reads(&self) -> Option<MappedReadRates> {
        self.content.mapped_reads
    }

    /// Returns the rates of reading mapped memory, measured and kept if they are not known.
    ///
    /// # Errors
    /// Returns [`DeviceError`] if there is too little memory, or if the device fails.
    pub fn measure_mapped_reads(&mut self, gpu: &Gpu) -> Result<MappedReadRates, DeviceError> {
        if let Some(known) = self.content.mapped_reads {
            return Ok(known);
        }
        let rates = MappedReadRates::measure(gpu)?;
        self.content.mapped_reads = Some(rates);
        self.has_new_rates = true;
        self.save();
        Ok(rates)
    }

    /// Takes the messages for the user about the file; each is returned once.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    /// Writes the new entries, merged with entries that other processes have written meanwhile. A
    /// failure becomes a note, once, because a run does not depend on it; the entries are written
    /// with the next ones.
    pub fn save(&mut self) {
        let is_dirty = self.has_new_rates || self.dirty.iter().any(|keys| !keys.is_empty());
        if !is_dirty {
            return;
        }
        let Some(path) = self.path.clone() else { return };
        let dirty = std::mem::take(&mut self.dirty);
        if let Err(why) = self.merge_into(&path, &dirty) {
            self.dirty = dirty;
            self.note_lost(&path, &why);
        } else {
            self.has_new_rates = false;
        }
    }

    /// Notes, once, that nothing is kept.
    fn note_lost(&mut self, path: &Path, why: &io::Error) {
        if !std::mem::replace(&mut self.is_lost, true) {
            self.notes.push(format!(
                "what was found out about kernels is not kept: {}: {why}; name another directory \
                 with {CACHE_DIR_ENV}",
                path.display()
            ));
        }
    }

    /// Adds the new entries to the current content of the file, and takes over its other entries.
    fn merge_into(&mut self, path: &Path, dirty: &[BTreeSet<String>; 2]) -> io::Result<()> {
        fs::create_dir_all(files::parent(path))?;
        let _lock = lock(&files::beside(path, ".lock"))?;
        match read(path, &self.content.device) {
            Ok(Some(theirs)) => {
                let own = std::mem::replace(&mut self.content, theirs);
                for (hash, certificate) in own.certificates {
                    if dirty[0].contains(&hash) {
                        self.content.certificates.insert(hash, certificate);
                    }
                }
                for (call_key, timings) in own.timings {
                    if dirty[1].contains(&call_key) {
                        self.content.timings.insert(call_key, timings);
                    }
                }
                self.content.mapped_reads = own.mapped_reads.or(self.content.mapped_reads);
                let forgotten = &self.forgotten;
                self.content.certificates.retain(|hash, _| !forgotten.contains(hash));
            }
            Ok(None) => {}
            Err(Unusable::Unreadable(why)) => return Err(why),
            Err(Unusable::Damaged(_)) => fs::rename(path, damaged(path))?,
        }
        let mut json = serde_json::to_vec_pretty(&self.content)?;
        json.push(b'\n');
        files::replace(path, &json)
    }
}

/// Path to which a damaged or foreign file is moved.
fn damaged(path: &Path) -> PathBuf {
    files::beside(path, ".damaged")
}

/// Takes the exclusive lock of the cache file, held until the file is dropped. On a file system
/// without locks, the file is returned without one.
pub(super) fn lock(path: &Path) -> io::Result<File> {
    let file = File::options().write(true).create(true).truncate(false).open(path)?;
    for _ in 0..TRIES {
        match file.try_lock() {
            Err(fs::TryLockError::WouldBlock) => std::thread::sleep(PAUSE),
            _ => return Ok(file),
        }
    }
    Err(io::Error::new(io::ErrorKind::WouldBlock, "another process keeps it locked"))
}

/// Reads a cache file; `None` if there is no file.
fn read(path: &Path, device: &str) -> Result<Option<CacheFile>, Unusable> {
    match fs::read(path) {
        Ok(bytes) => parse(&bytes, device).map(Some).map_err(Unusable::Damaged),
        Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(why) => Err(Unusable::Unreadable(why)),
    }
}

/// Content of a cache file, or the reason why it is no cache of this device.
fn parse(bytes: &[u8], device: &str) -> Result<CacheFile, String> {
    let content: CacheFile = serde_json::from_slice(bytes).map_err(|why| why.to_string())?;
    if content.format != FORMAT {
        return Err(format!("its format is {}, not {FORMAT}", content.format));
    }
    if content.device != device {
        return Err(format!("it is that of {}", content.device));
    }
    for timings in content.timings.values() {
        for timing in timings.measured.values() {
            if !(timing.seconds.is_finite() && timing.seconds > 0.0) {
                return Err(format!("{} takes {} s", timing.variant, timing.seconds));
            }
        }
    }
    Ok(content)
}

/// File name of a device: readable, and different for different devices.
fn file_name(device: &str) -> String {
    let mut slug = String::new();
    for letter in device.to_lowercase().chars() {
        match letter {
            'a'..='z' | '0'..='9' => slug.push(letter),
            _ if !slug.ends_with('-') => slug.push('-'),
            _ => {}
        }
    }
    let slug: String = slug.chars().take(60).collect();
    let hash = blake3::hash(device.as_bytes()).to_hex();
    format!("kernels-{}-{}.json", slug.trim_matches('-'), &hash[..8])
}

/// Kernels of this build by their certificates.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    /// Kernels that are right, by name; a name may occur several times.
    pub certified: Vec<(String, Deviation)>,
    /// Kernels that deviate more than f32 arithmetic explains, by name.
    pub unusual: Vec<(String, Deviation)>,
    /// Kernels that are switched off, each with the reason, by name.
    pub off: Vec<(String, String)>,
    /// Checks at the size of a call: kernel and call, and the deviation.
    pub full_size: Vec<(String, Deviation)>,
}

/// Returns the kernels of this build by their certificates.
pub fn summary(cache: &KernelCache) -> Summary {
    let mut found = Summary::default();
    for certificate in cache.certificates() {
        if certificate.build != build() {
            continue;
        }
        let name = certificate.kernel.clone();
        for (call, deviation) in &certificate.full_size {
            found.full_size.push((format!("{name}, in {call}"), *deviation));
        }
        match &certificate.result {
            CertificationResult::Pass(deviation) => found.certified.push((name, *deviation)),
            CertificationResult::Unusual(deviation) => found.unusual.push((name, *deviation)),
            CertificationResult::Fail { why } => found.off.push((name, why.clone())),
        }
    }
    found.certified.sort_by(|a, b| a.0.cmp(&b.0));
    found.unusual.sort_by(|a, b| a.0.cmp(&b.0));
    found.full_size.sort_by(|a, b| a.0.cmp(&b.0));
    found.off.sort();
    found.off.dedup_by(|a, b| a.0 == b.0);
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::ReadMethod;
    use crate::testing::for_each_gpu;

    /// The numbers of certified kernels and of kernels that are switched off.
    fn told(cache: &KernelCache) -> (usize, Vec<(String, String)>) {
        let Summary { certified, off, .. } = summary(cache);
        (certified.len(), off)
    }

    fn certificate(kernel: &str) -> Certificate {
        Certificate::new(
            kernel,
            CertificationResult::Pass(Deviation { nmse: 1.25e-13, element: 1e-6 }),
        )
    }

    fn timings(seconds: f64) -> Timings {
        let timing = Timing { variant: "a".into(), seconds };
        let measured = [("hash".into(), timing)].into();
        Timings { candidates: "all".into(), measured, is_cut: false }
    }

    #[test]
    fn what_is_saved_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path().join("new");
        let mut cache = KernelCache::open(&directory, "vulkan:A (1)");
        cache.certify("one".into(), certificate("one"));
        let wrong = CertificationResult::Fail { why: "NMSE 1".into() };
        cache.certify("two".into(), Certificate::new("two", wrong));
        cache.insert_timings("call".into(), timings(0.1 + 0.2));
        cache.save();
        assert_eq!(cache.take_notes(), [""; 0]);

        let reopened = KernelCache::open(&directory, "vulkan:A (1)");
        assert_eq!(reopened.content, cache.content);
        assert_eq!(reopened.timings("call", "all"), Some(&timings(0.1 + 0.2)));
        assert_eq!(reopened.timings("call", "other candidates"), None);
        assert_eq!(told(&reopened), (1, vec![("two".into(), "NMSE 1".into())]));
        let other = KernelCache::open(&directory, "vulkan:A (2)");
        assert_eq!(summary(&other), Summary::default(), "another driver knows nothing");
    }

    #[test]
    fn a_kernel_whose_attempt_lost_the_device_is_off_until_it_is_forgotten() {
        let directory = tempfile::tempdir().unwrap();
        let open = || {
            let mut cache = KernelCache::open(directory.path(), "device");
            cache.open_attempts();
            cache
        };
        let mut first = open();
        first.begin_attempt(&[("abc".into(), "tile of matmul".into())]);
        first.end_attempt(true);
        drop(first);
        let mut second = open();
        let ended = || (0, vec![("tile of matmul".to_string(), ENDED.to_string())]);
        assert_eq!(told(&second), ended());
        assert!(second.take_notes()[0].starts_with("tile of matmul is switched off: "));
        // The attempt of another kernel replaces the name, and the result stays.
        second.begin_attempt(&[("other".into(), "other".into())]);
        second.end_attempt(false);
        drop(second);
        let mut third = open();
        assert_eq!((told(&third), third.take_notes()), (ended(), Vec::new()));
        third.forget_attempts();
        third.certify("other".into(), certificate("other"));
        third.save();
        assert_eq!((told(&third), told(&open())), ((1, vec![]), (1, vec![])));
    }

    #[test]
    fn writers_keep_what_others_wrote() {
        let directory = tempfile::tempdir().unwrap();
        let open = || KernelCache::open(directory.path(), "device");
        let writers: Vec<_> = (0..8)
            .map(|writer| {
                let mut cache = open();
                std::thread::spawn(move || {
                    for i in 0..5 {
                        let name = format!("{writer}-{i}");
                        cache.certify(name.clone(), certificate(&name));
                        cache.save();
                    }
                    cache.take_notes()
                })
            })
            .collect();
        for writer in writers {
            assert_eq!(writer.join().unwrap(), [""; 0]);
        }
        assert_eq!(told(&open()).0, 40);
    }

    #[test]
    fn rates_of_mapped_reads_are_measured_once() {
        for_each_gpu(|gpu, _| {
            let directory = tempfile::tempdir().unwrap();
            let mut cache = KernelCache::open(directory.path(), "device");
            assert_eq!(cache.mapped_reads(), None);
            let rates = cache.measure_mapped_reads(gpu).unwrap();
            println!("{}: {rates:?}", gpu.name);
            // A processor maps its own memory.
            assert!(rates.mapped > 1e6 && rates.own > 1e6, "{} {rates:?}", gpu.name);
            assert_eq!(rates.method(), ReadMethod::InPlace, "{} {rates:?}", gpu.name);
            let mut cache = KernelCache::open(directory.path(), "device");
            assert_eq!(cache.mapped_reads(), Some(rates));
            assert_eq!(cache.measure_mapped_reads(gpu).unwrap(), rates);
        });
    }

    #[test]
    fn damaged_and_foreign_files_are_set_aside() {
        let good = {
            let directory = tempfile::tempdir().unwrap();
            let mut cache = KernelCache::open(directory.path(), "device");
            cache.insert_timings("call".into(), timings(0.5));
            cache.save();
            fs::read_to_string(cache.path.unwrap()).unwrap()
        };
        let spoiled = [
            (String::new(), "EOF"),
            (good[..good.len() / 2].to_string(), "EOF"),
            (good.replace("\"format\": 4", "\"format\": 5"), "format is 5"),
            (good.replace("\"device\": \"device\"", "\"device\": \"B\""), "that of B"),
            (good.replace("0.5", "-0.5"), "takes -0.5 s"),
            ("{\"a\": 1}".into(), "unknown field"),
        ];
        for (text, why) in spoiled {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join(file_name("device"));
            fs::write(&path, &text).unwrap();
            let mut cache = KernelCache::open(directory.path(), "device");
            let notes = cache.take_notes();
            assert!(notes.len() == 1 && notes[0].contains(why), "{why}: {notes:?}");
            cache.certify("one".into(), certificate("one"));
            cache.save();
            assert_eq!(fs::read_to_string(damaged(&path)).unwrap(), text);
            assert_eq!(told(&KernelCache::open(directory.path(), "device")).0, 1);
        }
    }

    #[test]
    fn a_directory_that_cannot_be_written_is_a_note() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        let mut cache = KernelCache::open(&file.join("below"), "device");
        cache.certify("one".into(), certificate("one"));
        cache.save();
        cache.certify("two".into(), certificate("two"));
        cache.save();
        let notes = cache.take_notes();
        assert!(notes.len() == 1 && notes[0].contains(CACHE_DIR_ENV), "{notes:?}");
        assert!(cache.certificate("one").is_some(), "the run goes on");
        // Entries that were not written are written once that is possible.
        fs::remove_file(&file).unwrap();
        cache.save();
        assert_eq!(told(&KernelCache::open(&file.join("below"), "device")).0, 2);
        assert_eq!(cache.take_notes(), [""; 0]);
    }

    /// A directory cannot be read as a file, regardless of permissions.
    #[test]
    fn what_cannot_be_read_is_not_set_aside() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(file_name("device"));
        fs::create_dir(&path).unwrap();
        let mut cache = KernelCache::open(directory.path(), "device");
        cache.certify("one".into(), certificate("one"));
        cache.save();
        let notes = cache.take_notes();
        assert!(notes.len() == 1 && notes[0].contains("is not kept"), "{notes:?}");
        assert!(path.is_dir() && !damaged(&path).exists());
    }

    #[test]
    fn names_of_files_are_readable_and_differ() {
        let name = file_name("vulkan:llvmpipe (LLVM 15.0.6, 256 bits) (Mesa)");
        assert!(name.starts_with("kernels-vulkan-llvmpipe-llvm-15-0-6-256-bits-mesa-"), "{name}");
        assert_ne!(name, file_name("vulkan:llvmpipe (LLVM 15.0.6; 256 bits) (Mesa)"));
        assert!(file_name(&"x".repeat(1000)).len() < 100);
    }
}
