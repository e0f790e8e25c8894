//! Lines of the program on stderr, as text or as JSON, and also in a file.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::panic;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::SystemTime;

use potluck_core::metrics::rfc3339;
use potluck_core::{Lock, NodeRank, Rank};

/// Form of the lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Plain lines on stderr; in a file they begin with time, level and node.
    #[default]
    Text,
    /// One object of JSON per line.
    Json,
}

/// Importance of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Info,
    Warning,
    Error,
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }

    /// Beginning of a plain line.
    fn prefix(self) -> &'static str {
        match self {
            Self::Info => "",
            Self::Warning => "warning: ",
            Self::Error => "error: ",
        }
    }
}

/// Log of the process, once it is opened; before, lines are plain ones on stderr.
static LOG: OnceLock<Log> = OnceLock::new();
/// Number of this node, or [`NO_NODE`].
static NODE: AtomicU32 = AtomicU32::new(NO_NODE);
const NO_NODE: u32 = u32::MAX;

struct Log {
    format: LogFormat,
    file: Option<LogFile>,
}

struct LogFile {
    name: String,
    file: Lock<File>,
    /// True once a write has failed, which is reported once.
    has_failed: AtomicBool,
}

struct LogLine<'a> {
    time: SystemTime,
    level: Level,
    node: Option<u32>,
    rank: Option<Rank>,
    message: &'a str,
}

impl LogLine<'_> {
    fn json(&self) -> String {
        let mut object = serde_json::Map::new();
        object.insert("time".into(), rfc3339(self.time).into());
        object.insert("level".into(), self.level.name().into());
        if let Some(node) = self.node {
            object.insert("node".into(), node.into());
        }
        if let Some(rank) = self.rank {
            object.insert("rank".into(), rank.0.into());
        }
        object.insert("message".into(), self.message.trim_end().into());
        serde_json::Value::from(object).to_string()
    }

    fn in_file(&self) -> String {
        let time = rfc3339(self.time);
        let node = self.node.map(|node| format!(" node {node}")).unwrap_or_default();
        format!("{time} {}{node}: {}", self.level.name(), self.message)
    }
}

/// Opens the log of the process, once, before its first line. A file is appended to.
///
/// # Errors
/// Returns the error of a file that cannot be opened.
pub fn open(format: LogFormat, file: Option<&Path>) -> io::Result<()> {
    let file = match file {
        Some(path) => Some(LogFile {
            name: path.display().to_string(),
            file: Lock::new(OpenOptions::new().append(true).create(true).open(path)?),
            has_failed: AtomicBool::new(false),
        }),
        None => None,
    };
    let is_first = LOG.set(Log { format, file }).is_ok();
    if is_first && format == LogFormat::Json {
        panic::set_hook(Box::new(|info| write(Level::Error, None, &info.to_string())));
    }
    Ok(())
}

/// Names this node in all later lines.
pub fn set_node(node: NodeRank) {
    NODE.store(node.0, Ordering::Relaxed);
}

/// Returns true if lines are plain text, and not JSON.
pub fn is_text() -> bool {
    LOG.get().is_none_or(|log| log.format == LogFormat::Text)
}

/// Returns true if lines go to a file too.
pub fn has_file() -> bool {
    LOG.get().is_some_and(|log| log.file.is_some())
}

/// Writes a line to stderr, and to the file if there is one. Errors of stderr (a closed pipe or
/// terminal) are ignored, and do not panic as `eprintln` would.
pub fn write(level: Level, rank: Option<Rank>, message: &str) {
    write_to_stderr(level, rank, message);
    write_to_file(level, rank, message);
}

/// Writes a line to stderr alone: a secret, or a line with another form in the file.
pub fn write_to_stderr(level: Level, rank: Option<Rank>, message: &str) {
    let text = if is_text() {
        format!("{}{message}", level.prefix())
    } else {
        line(level, rank, message).json()
    };
    let _ = writeln!(io::stderr(), "{text}");
}

/// Writes a line to the file alone, if there is one. A failure is reported once.
pub fn write_to_file(level: Level, rank: Option<Rank>, message: &str) {
    let Some(Log { format, file: Some(of) }) = LOG.get() else { return };
    let line = line(level, rank, message);
    let text = match format {
        LogFormat::Text => line.in_file(),
        LogFormat::Json => line.json(),
    };
    // In one piece: other processes may append to the same file.
    let written = of.file.lock().write_all((text + "\n").as_bytes());
    if let Err(why) = written
        && !of.has_failed.swap(true, Ordering::Relaxed)
    {
        let warning = format!("{}: the log cannot be written: {why}", of.name);
        write_to_stderr(Level::Warning, None, &warning);
    }
}

fn line(level: Level, rank: Option<Rank>, message: &str) -> LogLine<'_> {
    let node = NODE.load(Ordering::Relaxed);
    let node = (node != NO_NODE).then_some(node);
    LogLine { time: SystemTime::now(), level, node, rank, message }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn lines_have_time_level_node_rank_and_message() {
        let line = |node, rank| LogLine {
            time: UNIX_EPOCH,
            level: Level::Warning,
            node,
            rank,
            message: "a \"b\"\nc",
        };
        assert_eq!(
            line(Some(1), Some(Rank(3))).json(),
            concat!(
                r#"{"time":"1970-01-01T00:00:00Z","level":"warning","node":1,"rank":3,"#,
                r#""message":"a \"b\"\nc"}"#
            )
        );
        assert_eq!(
            line(None, None).json(),
            r#"{"time":"1970-01-01T00:00:00Z","level":"warning","message":"a \"b\"\nc"}"#
        );
        let in_file = line(Some(1), None).in_file();
        assert_eq!(in_file, "1970-01-01T00:00:00Z warning node 1: a \"b\"\nc");
    }
}
