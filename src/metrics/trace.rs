//! A trace of a run in the format of Chrome and Perfetto: what each rank did when.
//!
//! The file is a JSON array of events, one per line: see "Trace Event Format" of the Chromium
//! project. Both viewers also read it without the bracket at the end, so that the trace of a
//! process that was killed can be looked at: it lacks what happened in its last second or so.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::recorder::MetricsError;

/// The most events of a trace: some hundred MB of text, which viewers still open.
const EVENTS_MAX: u64 = 2_000_000;
/// Bytes after which what is buffered is written.
const BUFFER_BYTES: usize = 64 * 1024;
/// How long an event may be buffered when others follow.
const BUFFER_TIME: Duration = Duration::from_secs(1);

/// A trace that is being written. Clones write to the same file, which is complete after
/// [`Trace::finish`] or when the last clone and the last [`Track`] are dropped.
#[derive(Clone, Debug)]
pub struct Trace {
    shared: Arc<Shared>,
}

/// One line of the picture: a thread, a device or a link of a rank. Clones write to the same
/// line, from any thread.
#[derive(Clone, Debug, Default)]
pub struct Track {
    line: Option<Arc<Line>>,
}

/// Something under way; it is written when it is dropped.
#[must_use = "a span ends when it is dropped"]
pub struct Span {
    begun: Option<(Track, String, Instant)>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    /// What times count from.
    epoch: Instant,
    /// Whether another event would be written.
    is_open: AtomicBool,
    sink: Mutex<Sink>,
}

#[derive(Debug)]
struct Line {
    shared: Arc<Shared>,
    /// What stands at the end of each of its events.
    ending: String,
    /// When the last event of [`Track::record_since`] ended.
    last: Mutex<Option<Instant>>,
}

impl Trace {
    /// Replaces the file.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn create(path: &Path) -> Result<Self, MetricsError> {
        Self::with_limit(path, EVENTS_MAX)
    }

    fn with_limit(path: &Path, events_max: u64) -> Result<Self, MetricsError> {
        let failed = |why| MetricsError::Trace { path: path.into(), why };
        let mut file = File::create(path).map_err(failed)?;
        file.write_all(b"[").map_err(failed)?;
        let sink = Mutex::new(Sink {
            file: Some(file),
            failed: None,
            buffer: Vec::new(),
            written: Instant::now(),
            separator: "\n",
            events: 0,
            events_max,
            tracks: Vec::new(),
        });
        let (path, is_open) = (path.into(), AtomicBool::new(true));
        Ok(Self { shared: Arc::new(Shared { path, epoch: Instant::now(), is_open, sink }) })
    }

    /// A line of rank `rank`, whose device is called `device`; the same line for the same name.
    pub fn track(&self, rank: u32, device: &str, name: &str) -> Track {
        let mut sink = self.shared.sink();
        if sink.tracks.iter().all(|(known, _)| *known != rank) {
            sink.describe(
                "process_name",
                rank,
                0,
                json!({"name": format!("rank {rank}: {device}")}),
            );
            sink.describe("process_sort_index", rank, 0, json!({ "sort_index": rank }));
        }
        let wanted = (rank, name.to_string());
        let known = sink.tracks.iter().position(|track| *track == wanted);
        let thread = known.unwrap_or_else(|| {
            let thread = sink.tracks.len();
            sink.tracks.push(wanted);
            sink.describe("thread_name", rank, thread, json!({ "name": name }));
            sink.describe("thread_sort_index", rank, thread, json!({ "sort_index": thread }));
            thread
        });
        let category = Value::from(name);
        let ending = format!(r#","pid":{rank},"tid":{thread},"cat":{category}}}"#);
        drop(sink);
        Track {
            line: Some(Arc::new(Line {
                shared: self.shared.clone(),
                ending,
                last: Mutex::new(None),
            })),
        }
    }

    /// Writes what is left, and closes the list, so that the file is complete; what comes later
    /// is dropped. May be called again.
    ///
    /// # Errors
    /// The first failure of any write to the file.
    pub fn finish(&self) -> Result<(), MetricsError> {
        self.shared.is_open.store(false, Ordering::Relaxed);
        let mut sink = self.shared.sink();
        sink.close();
        match &sink.failed {
            Some(why) => {
                // Kept, so that every caller is told.
                let why = io::Error::new(why.kind(), why.to_string());
                Err(MetricsError::Trace { path: self.shared.path.clone(), why })
            }
            None => Ok(()),
        }
    }
}

impl Track {
    /// A line that is written nowhere.
    pub fn none() -> Self {
        Self::default()
    }

    /// Whether anything is written.
    pub fn is_on(&self) -> bool {
        self.line.as_ref().is_some_and(|line| line.shared.is_open.load(Ordering::Relaxed))
    }

    /// Begins something; costs nothing if nothing is written.
    pub fn span(&self, name: impl FnOnce() -> String) -> Span {
        Span { begun: self.is_on().then(|| (self.clone(), name(), Instant::now())) }
    }

    /// Writes something that is over.
    pub fn record(&self, name: impl FnOnce() -> String, from: Instant, to: Instant) {
        if let Some(line) = self.line.as_ref().filter(|_| self.is_on()) {
            let length = Micros(to.saturating_duration_since(from));
            line.write("X", &name(), from, format_args!(r#","dur":{length}"#));
        }
    }

    /// Writes something that ends now and began at `since`, or when what was written before it by
    /// this call ended: what a queue works on one after the other.
    pub fn record_since(&self, name: impl FnOnce() -> String, since: Instant) {
        let Some(line) = self.line.as_ref().filter(|_| self.is_on()) else { return };
        let now = Instant::now();
        let mut last = line.last.lock().unwrap_or_else(PoisonError::into_inner);
        self.record(name, last.map_or(since, |last| last.max(since)), now);
        *last = Some(now);
    }

    /// Writes something that takes no time.
    pub fn mark(&self, name: impl FnOnce() -> String) {
        if let Some(line) = self.line.as_ref().filter(|_| self.is_on()) {
            line.write("i", &name(), Instant::now(), format_args!(r#","s":"t""#));
        }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some((track, name, from)) = self.begun.take() {
            track.record(|| name, from, Instant::now());
        }
    }
}

impl Line {
    fn write(&self, kind: &str, name: &str, at: Instant, rest: std::fmt::Arguments<'_>) {
        let Self { shared, ending, .. } = self;
        // The text is made before the lock is taken: several threads write.
        let (name, at) = (Value::from(name), Micros(at.saturating_duration_since(shared.epoch)));
        let mut event = String::with_capacity(128);
        // Writing to a string cannot fail.
        let _ = write!(event, r#"{{"name":{name},"ph":"{kind}","ts":{at}{rest}{ending}"#);
        let mut sink = shared.sink();
        sink.event(&event);
        if sink.events == sink.events_max {
            let note = format!("the trace ends here, at its limit of {} events", sink.events);
            let note = json!({"name": note, "ph": "i", "s": "g", "ts": at.0.as_micros() as u64});
            sink.append(&note.to_string());
        }
        if sink.events >= sink.events_max || sink.failed.is_some() {
            shared.is_open.store(false, Ordering::Relaxed);
        }
    }
}

impl Shared {
    fn sink(&self) -> MutexGuard<'_, Sink> {
        // A thread that panicked has left whole events behind.
        self.sink.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// A time in microseconds with nanoseconds behind the point.
struct Micros(Duration);

impl std::fmt::Display for Micros {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let nanos = self.0.as_nanos();
        write!(f, "{}.{:03}", nanos / 1000, nanos % 1000)
    }
}

/// The file. Events are buffered and written whole.
#[derive(Debug)]
struct Sink {
    /// `None` when the list is closed.
    file: Option<File>,
    /// Why nothing is written any more.
    failed: Option<io::Error>,
    buffer: Vec<u8>,
    /// When the buffer was written last.
    written: Instant,
    /// What goes before the next event.
    separator: &'static str,
    events: u64,
    events_max: u64,
    /// Rank and name of each line; the position is its number.
    tracks: Vec<(u32, String)>,
}

impl Sink {
    /// Says something about a rank or one of its lines. These are few and do not count.
    fn describe(&mut self, what: &str, rank: u32, thread: usize, args: Value) {
        let event = json!({"name": what, "ph": "M", "pid": rank, "tid": thread, "args": args});
        self.append(&event.to_string());
    }

    fn event(&mut self, event: &str) {
        if self.events < self.events_max {
            self.events += 1;
            self.append(event);
        }
    }

    fn append(&mut self, event: &str) {
        if self.file.is_none() || self.failed.is_some() {
            return;
        }
        self.buffer.extend_from_slice(self.separator.as_bytes());
        self.buffer.extend_from_slice(event.as_bytes());
        self.separator = ",\n";
        if self.buffer.len() >= BUFFER_BYTES || self.written.elapsed() >= BUFFER_TIME {
            self.flush();
        }
    }

    fn flush(&mut self) {
        if let Some(file) = self.file.as_mut().filter(|_| self.failed.is_none()) {
            self.failed = file.write_all(&self.buffer).err();
        }
        self.buffer.clear();
        self.written = Instant::now();
    }

    fn close(&mut self) {
        if self.file.is_some() {
            self.buffer.extend_from_slice(b"\n]\n");
            self.flush();
            self.file = None;
        }
    }
}

/// Where a run ends without [`Trace::finish`], nobody can be told of an error.
impl Drop for Sink {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace.json");
        (directory, path)
    }

    fn read(path: &Path) -> Vec<Value> {
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    fn of_kind<'a>(events: &'a [Value], kind: &str) -> Vec<&'a Value> {
        events.iter().filter(|event| event["ph"] == kind).collect()
    }

    fn number(value: &Value) -> f64 {
        value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
    }

    #[test]
    fn spans_nest_in_time_and_lines_are_named() {
        let (_directory, path) = file();
        let trace = Trace::create(&path).unwrap();
        let track = trace.track(1, "llvm \"pipe\"", "driver");
        let outer = track.span(|| "outer \\ \n".into());
        track.mark(|| "now".into());
        drop(track.span(|| "inner".into()));
        std::thread::sleep(Duration::from_millis(2));
        drop(outer);
        trace.finish().unwrap();
        let events = read(&path);
        let names: Vec<&Value> = of_kind(&events, "M").iter().map(|e| &e["args"]["name"]).collect();
        assert_eq!([names[0], names[2]], ["rank 1: llvm \"pipe\"", "driver"]);
        let spans = of_kind(&events, "X");
        let (inner, outer) = (spans[0], spans[1]);
        assert_eq!([&inner["name"], &outer["name"]], ["inner", "outer \\ \n"]);
        assert_eq!((&outer["pid"], &outer["cat"]), (&json!(1), &json!("driver")));
        assert_eq!(inner["tid"], outer["tid"]);
        let begin = |event: &Value| number(&event["ts"]);
        let end = |event: &Value| number(&event["ts"]) + number(&event["dur"]);
        assert!(begin(outer) <= begin(inner) && end(inner) <= end(outer), "{spans:?}");
        assert!((2e3..1e7).contains(&number(&outer["dur"])), "{outer} is in microseconds");
        let mark = of_kind(&events, "i")[0];
        assert!(begin(outer) <= begin(mark) && begin(mark) <= begin(inner), "{mark}");
    }

    #[test]
    fn threads_write_whole_events_to_lines_of_their_own() {
        let (_directory, path) = file();
        let trace = Trace::create(&path).unwrap();
        std::thread::scope(|scope| {
            for rank in 0..4u32 {
                let track = trace.track(rank, "cpu", "ring");
                scope.spawn(move || {
                    let now = Instant::now();
                    (0..2000)
                        .for_each(|index| track.record(|| format!("{rank} {index}"), now, now));
                });
            }
        });
        // The last handle closes the list.
        drop(trace);
        let events = read(&path);
        for rank in 0..4u32 {
            let own: Vec<&Value> =
                of_kind(&events, "X").into_iter().filter(|e| e["pid"] == rank).collect();
            assert!(own.iter().enumerate().all(|(i, e)| e["name"] == format!("{rank} {i}")));
            assert_eq!(own.len(), 2000);
            assert!(own.iter().all(|event| event["tid"] == own[0]["tid"]));
        }
    }

    #[test]
    fn a_line_that_is_asked_for_again_is_the_same() {
        let (_directory, path) = file();
        let trace = Trace::create(&path).unwrap();
        for name in ["driver", "ring", "driver"] {
            trace.track(0, "cpu", name).mark(|| name.into());
        }
        drop(trace);
        let events = read(&path);
        let threads: Vec<&Value> =
            of_kind(&events, "i").iter().map(|event| &event["tid"]).collect();
        assert_eq!(threads, [0, 1, 0]);
        assert_eq!(of_kind(&events, "M").len(), 2 + 2 * 2);
    }

    #[test]
    fn a_trace_that_was_cut_off_lacks_a_bracket_only() {
        let (_directory, path) = file();
        let trace = Trace::create(&path).unwrap();
        let track = trace.track(0, "cpu", "driver");
        let now = Instant::now();
        (0..2000).for_each(|index| track.record(|| format!("{index}"), now, now));
        // What a killed process leaves: what is on its way into the file is not there yet.
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.len() >= BUFFER_BYTES && text.ends_with('}'), "{} bytes", text.len());
        let events: Vec<Value> = serde_json::from_str(&(text + "]")).unwrap();
        assert!((500..2000).contains(&of_kind(&events, "X").len()));
    }

    #[test]
    fn a_line_that_is_off_makes_no_names() {
        let (_directory, path) = file();
        let trace = Trace::create(&path).unwrap();
        let closed = trace.track(0, "cpu", "driver");
        trace.finish().unwrap();
        for track in [Track::none(), closed] {
            assert!(!track.is_on());
            drop(track.span(|| panic!("not asked for")));
            track.mark(|| panic!("not asked for"));
            track.record(|| panic!("not asked for"), Instant::now(), Instant::now());
        }
        trace.finish().unwrap();
        assert_eq!(of_kind(&read(&path), "X").len(), 0);
    }

    #[test]
    fn a_full_trace_says_so_once() {
        let (_directory, path) = file();
        let trace = Trace::with_limit(&path, 10).unwrap();
        let track = trace.track(0, "cpu", "driver");
        (0..30).for_each(|index| drop(track.span(|| format!("{index}"))));
        assert!(!track.is_on());
        trace.finish().unwrap();
        let events = read(&path);
        assert_eq!(of_kind(&events, "X").len(), 10);
        let notes = of_kind(&events, "i");
        assert_eq!(notes.len(), 1);
        assert!(notes[0]["name"].as_str().unwrap().contains("limit of 10 events"), "{notes:?}");
    }

    #[test]
    fn a_place_that_is_none_is_refused() {
        let (directory, _) = file();
        assert!(Trace::create(directory.path()).is_err());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_is_told_at_the_end() {
        // Opening and writing there is possible, until something is to be kept.
        let full = Path::new("/dev/full");
        assert!(Trace::create(full).is_err());
        let (directory, path) = file();
        let trace = Trace::create(&path).unwrap();
        let track = trace.track(0, "cpu", "driver");
        trace.shared.sink().file = Some(File::options().write(true).open(full).unwrap());
        (0..2000).for_each(|_| track.mark(|| "x".repeat(50)));
        assert!(!track.is_on(), "nothing is made for a file that takes nothing");
        for _ in 0..2 {
            let error = trace.finish().unwrap_err().to_string();
            assert!(error.contains("trace.json: the trace cannot"), "{error}");
        }
        drop(directory);
    }
}
