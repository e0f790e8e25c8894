//! Trace of a run in the format of Chrome and Perfetto: a timeline of the activities of each rank.
//!
//! The file is a JSON array of events, one per line: see "Trace Event Format" of the Chromium
//! project. Both viewers also read it without the closing bracket, so that the trace of a killed
//! process can be viewed: it lacks the events of about the last second.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::error::MetricsError;
use crate::Lock;

/// Largest number of events in a trace: some hundred MB of text, which viewers still open.
const EVENTS_MAX: u64 = 2_000_000;
/// Bytes in the buffer at which it is written to the file.
const BUFFER_BYTES: usize = 64 * 1024;
/// Longest time for which an event is buffered while other events follow.
const BUFFER_TIME: Duration = Duration::from_secs(1);

/// Trace file being written. Clones write to the same file, which is complete after
/// [`Trace::finish`] or when the last clone and the last [`Track`] are dropped.
#[derive(Clone, Debug)]
pub struct Trace {
    shared: Arc<SharedFile>,
}

/// Track of a trace, a row of its timeline: a thread, a device or a link of a rank. Clones write
/// to the same track, from any thread.
#[derive(Clone, Debug, Default)]
pub struct Track {
    line: Option<Arc<TrackState>>,
}

/// Span of time in progress; written to the trace when it is dropped.
#[must_use = "a span ends when it is dropped"]
pub struct Span {
    begun: Option<(Track, String, Instant)>,
}

#[derive(Debug)]
struct SharedFile {
    path: PathBuf,
    /// Origin of the timestamps.
    epoch: Instant,
    /// True if the trace still accepts events.
    is_open: AtomicBool,
    sink: Lock<TraceWriter>,
}

#[derive(Debug)]
struct TrackState {
    shared: Arc<SharedFile>,
    /// Text at the end of each event of the track: process, thread and category.
    ending: String,
    /// End of the last event of [`Track::record_since`].
    last: Lock<Option<Instant>>,
}

impl Trace {
    /// Creates the file, or replaces an existing one.
    ///
    /// # Errors
    /// Returns a `MetricsError` if the file cannot be written.
    pub fn create(path: &Path) -> Result<Self, MetricsError> {
        Self::with_limit(path, EVENTS_MAX)
    }

    /// Creates the file, or replaces an existing one; `start` returns what writes its events.
    ///
    /// # Errors
    /// Returns a `MetricsError` if the file cannot be written.
    pub fn create_with(
        path: &Path,
        start: impl FnOnce(File) -> io::Result<Box<dyn TraceFile>>,
    ) -> Result<Self, MetricsError> {
        Self::begin(path, EVENTS_MAX, start)
    }

    fn with_limit(path: &Path, events_max: u64) -> Result<Self, MetricsError> {
        Self::begin(path, events_max, |file| Ok(Box::new(file)))
    }

    fn begin(
        path: &Path,
        events_max: u64,
        start: impl FnOnce(File) -> io::Result<Box<dyn TraceFile>>,
    ) -> Result<Self, MetricsError> {
        let failed = |why| MetricsError::Trace { path: path.into(), why };
        let mut file = File::create(path).map_err(failed)?;
        file.write_all(b"[").map_err(failed)?;
        let file = start(file).map_err(failed)?;
        Ok(Self::of(path, Instant::now(), TraceTarget::File(file), events_max))
    }

    /// Creates a trace whose events are sent to the trace of another process, in pieces of whole
    /// lines for [`Trace::append_lines`]. Its timestamps are counted from `epoch`, which is the
    /// time at which the other trace was created.
    pub fn sent(epoch: Instant, send: impl FnMut(Vec<u8>) + Send + 'static) -> Self {
        Self::of(Path::new(""), epoch, TraceTarget::Sent(Box::new(send)), EVENTS_MAX)
    }

    fn of(path: &Path, epoch: Instant, target: TraceTarget, events_max: u64) -> Self {
        let sink = Lock::new(TraceWriter {
            target: Some(target),
            failed: None,
            buffer: Vec::new(),
            written: Instant::now(),
            separator: "\n",
            events: 0,
            events_max,
            tracks: Vec::new(),
        });
        let is_open = AtomicBool::new(true);
        Self { shared: Arc::new(SharedFile { path: path.into(), epoch, is_open, sink }) }
    }

    /// Returns the origin of the timestamps.
    pub fn epoch(&self) -> Instant {
        self.shared.epoch
    }

    /// Writes events that another process has sent, see [`Trace::sent`].
    pub fn append_lines(&self, lines: &str) {
        let mut sink = self.shared.sink();
        for line in lines.lines() {
            let event = line.trim_end_matches(',');
            if !event.is_empty() {
                sink.event(event);
            }
        }
    }

    /// Writes a label after the name of a rank, whose tracks must exist already.
    pub fn label(&self, rank: u32, label: &str) {
        self.shared.sink().describe("process_labels", rank, 0, json!({ "labels": label }));
    }

    /// Writes or sends the buffered events.
    pub fn flush(&self) {
        self.shared.sink().flush();
    }

    /// Returns the track `name` of rank `rank`, whose device is called `device`; the same track
    /// for the same rank and name.
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
            line: Some(Arc::new(TrackState {
                shared: self.shared.clone(),
                ending,
                last: Lock::new(None),
            })),
        }
    }

    /// Writes the buffered events and closes the JSON array, so that the file is complete; later
    /// events are dropped. May be called again.
    ///
    /// # Errors
    /// Returns a `MetricsError` with the first failure of any write to the file.
    pub fn finish(&self) -> Result<(), MetricsError> {
        self.shared.is_open.store(false, Ordering::Relaxed);
        let closed = self.shared.sink().close();
        // Outside of the lock, which threads of the network take.
        let written = match closed {
            Some((file, last)) => file.finish(last),
            None => Ok(()),
        };
        let mut sink = self.shared.sink();
        sink.failed = sink.failed.take().or(written.err());
        match &sink.failed {
            Some(why) => {
                // Kept, so that every call returns the error.
                let why = io::Error::new(why.kind(), why.to_string());
                Err(MetricsError::Trace { path: self.shared.path.clone(), why })
            }
            None => Ok(()),
        }
    }
}

impl Track {
    /// Returns a disabled track, which drops its events.
    pub fn none() -> Self {
        Self::default()
    }

    /// Returns true if events of the track are written.
    pub fn is_on(&self) -> bool {
        self.line.as_ref().is_some_and(|line| line.shared.is_open.load(Ordering::Relaxed))
    }

    /// Begins a span; costs nothing if the track is not written.
    pub fn span(&self, name: impl FnOnce() -> String) -> Span {
        let begun = if self.is_on() { Some((self.clone(), name(), Instant::now())) } else { None };
        Span { begun }
    }

    /// Writes a span that has ended.
    pub fn record(&self, name: impl FnOnce() -> String, from: Instant, to: Instant) {
        if let Some(line) = self.open_line() {
            let length = Micros(to.saturating_duration_since(from));
            line.write("X", &name(), from, format_args!(r#","dur":{length}"#));
        }
    }

    /// Writes a span that ends now and began at `since`, or at the end of the previous span
    /// written by this method if that is later: for a queue that processes its items one after
    /// the other.
    pub fn record_since(&self, name: impl FnOnce() -> String, since: Instant) {
        let Some(line) = self.open_line() else { return };
        let now = Instant::now();
        let mut last = line.last.lock();
        let from = match *last {
            Some(last) => last.max(since),
            None => since,
        };
        self.record(name, from, now);
        *last = Some(now);
    }

    /// State of the track if its events are written.
    fn open_line(&self) -> Option<&TrackState> {
        self.line.as_deref().filter(|_| self.is_on())
    }

    /// Writes an instant event.
    pub fn mark(&self, name: impl FnOnce() -> String) {
        if let Some(line) = self.open_line() {
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

impl TrackState {
    fn write(&self, kind: &str, name: &str, at: Instant, rest: std::fmt::Arguments<'_>) {
        let Self { shared, ending, .. } = self;
        // Formatted before the lock is taken, because several threads write.
        let name = Value::from(name);
        let at = Micros(at.saturating_duration_since(shared.epoch));
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

impl SharedFile {
    fn sink(&self) -> MutexGuard<'_, TraceWriter> {
        // A thread that panicked while it held the lock has written complete events only.
        self.sink.lock()
    }
}

/// Duration that is formatted as microseconds with 3 decimals.
struct Micros(Duration);

impl std::fmt::Display for Micros {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let nanos = self.0.as_nanos();
        write!(f, "{}.{:03}", nanos / 1000, nanos % 1000)
    }
}

/// File of a trace.
pub trait TraceFile: Send + std::fmt::Debug {
    /// Writes a piece of whole events, or loses it if the disk is too slow.
    ///
    /// # Errors
    /// Returns the error of this write or of an earlier one.
    fn write(&mut self, piece: Vec<u8>) -> io::Result<()>;

    /// Returns true if pieces are lost.
    fn has_lost(&self) -> bool {
        false
    }

    /// Writes the last piece, and waits until everything is written.
    ///
    /// # Errors
    /// Returns the error of a write.
    fn finish(self: Box<Self>, last: Vec<u8>) -> io::Result<()>;
}

impl TraceFile for File {
    fn write(&mut self, piece: Vec<u8>) -> io::Result<()> {
        self.write_all(&piece)
    }

    fn finish(mut self: Box<Self>, last: Vec<u8>) -> io::Result<()> {
        self.write_all(&last)
    }
}

/// Destination of a trace.
enum TraceTarget {
    File(Box<dyn TraceFile>),
    /// The trace of another process.
    Sent(Box<dyn FnMut(Vec<u8>) + Send>),
}

impl std::fmt::Debug for TraceTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::File(_) => "a file",
            Self::Sent(_) => "another process",
        })
    }
}

/// Trace file with its buffer. Events are written whole.
#[derive(Debug)]
struct TraceWriter {
    /// `None` after the JSON array was closed.
    target: Option<TraceTarget>,
    /// First write error; nothing is written after it.
    failed: Option<io::Error>,
    buffer: Vec<u8>,
    /// Time of the last write of the buffer.
    written: Instant,
    /// Text before the next event.
    separator: &'static str,
    events: u64,
    events_max: u64,
    /// Rank and name of each track; the position is the track's thread number.
    tracks: Vec<(u32, String)>,
}

impl TraceWriter {
    /// Writes a metadata event of a rank or of one of its tracks. These are few and do not count
    /// towards `events_max`.
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
        if self.target.is_none() || self.failed.is_some() {
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
        if self.failed.is_none() {
            match &mut self.target {
                Some(TraceTarget::File(file)) => {
                    self.failed = file.write(std::mem::take(&mut self.buffer)).err();
                }
                Some(TraceTarget::Sent(send)) => send(std::mem::take(&mut self.buffer)),
                None => {}
            }
        }
        self.buffer.clear();
        self.written = Instant::now();
    }

    /// Ends the events; returns the file with the last of them and the end of the JSON array, which
    /// are still to be written, unless an earlier write has failed.
    fn close(&mut self) -> Option<(Box<dyn TraceFile>, Vec<u8>)> {
        if let Some(TraceTarget::File(file)) = &self.target
            && file.has_lost()
        {
            let note = "events are lost here and there, because the disk took them too slowly";
            let event = json!({"name": note, "ph": "i", "s": "g", "ts": 0}).to_string();
            // Without a flush, which might lose it too.
            self.buffer.extend_from_slice(self.separator.as_bytes());
            self.buffer.extend_from_slice(event.as_bytes());
        }
        if !matches!(self.target, Some(TraceTarget::File(_))) {
            self.flush();
        }
        match self.target.take() {
            Some(TraceTarget::File(file)) if self.failed.is_none() => {
                self.buffer.extend_from_slice(b"\n]\n");
                Some((file, std::mem::take(&mut self.buffer)))
            }
            _ => None,
        }
    }
}

/// Completes the file of a run that ends without [`Trace::finish`]; errors cannot be reported here.
impl Drop for TraceWriter {
    fn drop(&mut self) {
        if let Some((file, last)) = self.close() {
            let _ = file.finish(last);
        }
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
        // Dropping the last handle closes the JSON array.
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
        // The file that a killed process leaves: events in the buffer are missing.
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
        // The file can be opened, but every write to it fails.
        let full = Path::new("/dev/full");
        assert!(Trace::create(full).is_err());
        let (directory, path) = file();
        let trace = Trace::create(&path).unwrap();
        let track = trace.track(0, "cpu", "driver");
        let target = File::options().write(true).open(full).unwrap();
        trace.shared.sink().target = Some(TraceTarget::File(Box::new(target)));
        (0..2000).for_each(|_| track.mark(|| "x".repeat(50)));
        assert!(!track.is_on(), "nothing is made for a file that takes nothing");
        for _ in 0..2 {
            let error = trace.finish().unwrap_err().to_string();
            assert!(error.contains("trace.json: the trace cannot"), "{error}");
        }
        drop(directory);
    }
}
