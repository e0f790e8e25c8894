//! Attempts at kernels on a graphics card. A file beside the kernel cache names the kernel that
//! runs for the first time, until it has run, or the kernels that the driver is compiling. A
//! process that finds a kernel there knows that it ended another process, lost the device or kept
//! it from answering, or that the process was ended from outside just then: a second time decides.
//! If several were compiled together, each is then compiled alone, as an attempt of its own.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::Path;

/// A kernel that is tried.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Attempt {
    pub hash: String,
    /// Display name (variant and op).
    pub kernel: String,
    /// True if it was already among the previous attempts.
    is_second: bool,
    /// True if the device was lost or did not answer.
    is_lost: bool,
}

impl Attempt {
    /// Returns true if the kernel is the cause of the end.
    fn is_cause(&self) -> bool {
        self.is_lost || self.is_second
    }
}

/// File of the attempts at the kernels of one driver, held exclusively by one process.
#[derive(Debug)]
pub(crate) struct AttemptFile {
    file: File,
    /// Attempts of the previous process that did not end.
    left: Vec<Attempt>,
    /// Attempts in progress.
    current: Vec<Attempt>,
}

impl AttemptFile {
    /// Opens a file, and returns it with the kernel that must not be tried again, if any; `None` if
    /// another process holds the file or it cannot be opened, and attempts leave no trace.
    pub fn open(path: &Path) -> Option<(Self, Option<Attempt>)> {
        let mut options = File::options();
        let mut file =
            options.read(true).write(true).create(true).truncate(false).open(path).ok()?;
        file.try_lock().ok()?;
        let mut text = String::new();
        file.read_to_string(&mut text).ok()?;
        let left: Vec<Attempt> = serde_json::from_str(&text).unwrap_or_default();
        let cause = match &left[..] {
            [only] if only.is_cause() => Some(only.clone()),
            _ => None,
        };
        Some((Self { file, left, current: Vec::new() }, cause))
    }

    /// Returns true if a kernel of this hash is one of several that were tried together when the
    /// previous process ended.
    pub fn is_suspect(&self, hash: &str) -> bool {
        self.left.len() > 1 && self.left.iter().any(|left| left.hash == hash)
    }

    /// Names the kernels that are tried, by hash and name, on disk before they are.
    pub fn begin(&mut self, tried: &[(String, String)]) {
        self.current.clear();
        for (hash, kernel) in tried {
            let is_second = self.left.iter().any(|left| left.hash == *hash);
            self.current.push(Attempt {
                hash: hash.clone(),
                kernel: kernel.clone(),
                is_second,
                is_lost: false,
            });
        }
        self.write();
    }

    /// Removes the names, unless the device was lost or did not answer.
    pub fn end(&mut self, is_lost: bool) {
        if is_lost {
            for attempt in &mut self.current {
                attempt.is_lost = true;
            }
        } else {
            self.current.clear();
        }
        self.write();
    }

    /// Writes the attempts in progress. A failure is ignored: a kernel that ends the run is then
    /// tried again.
    fn write(&mut self) {
        let mut text = String::new();
        if !self.current.is_empty() {
            text = serde_json::to_string(&self.current).unwrap_or_default();
        }
        let _ = self.replace(&text);
    }

    /// Replaces the content of the file.
    fn replace(&mut self, text: &str) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.file.write_all(text.as_bytes())?;
        if text.is_empty() {
            return Ok(());
        }
        // A card that hangs may take the machine with it.
        self.file.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(hash: &str, kernel: &str) -> (String, String) {
        (hash.into(), kernel.into())
    }

    /// The first process ends while it compiles all, the second while it compiles one alone.
    #[test]
    fn of_kernels_that_are_compiled_together_the_one_that_ends_a_process_alone_is_the_cause() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kernels.attempt");
        let all = [attempt("a", "one"), attempt("b", "two"), attempt("c", "three")];
        let (mut first, _) = AttemptFile::open(&path).unwrap();
        assert!(!first.is_suspect("a"));
        first.begin(&all);
        drop(first);
        let (mut second, cause) = AttemptFile::open(&path).unwrap();
        assert!(cause.is_none() && second.is_suspect("b") && !second.is_suspect("d"));
        second.begin(&all[..1]);
        second.end(false);
        second.begin(&all[1..2]);
        drop(second);
        let (third, cause) = AttemptFile::open(&path).unwrap();
        assert_eq!(cause.map(|cause| cause.kernel), Some("two".to_string()));
        assert!(!third.is_suspect("b") && !third.is_suspect("a"));
    }

    #[test]
    fn an_attempt_that_does_not_end_is_found_by_the_next_process() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kernels.attempt");
        // The kernel that must not be tried again, after an attempt that ends or not.
        let next = |ends: Option<bool>| {
            let (mut file, cause) = AttemptFile::open(&path).unwrap();
            assert!(AttemptFile::open(&path).is_none(), "one process at a time");
            file.begin(&[attempt("other", "another kernel")]);
            file.end(false);
            file.begin(&[attempt("abc", "tile of matmul")]);
            if let Some(is_lost) = ends {
                file.end(is_lost);
            }
            cause.map(|cause| cause.kernel)
        };
        let found = Some("tile of matmul".to_string());
        assert_eq!((next(Some(false)), next(Some(true))), (None, None));
        assert_eq!(next(Some(false)), found, "the device was lost");
        assert_eq!((next(None), next(Some(false))), (None, None), "the process was ended, once");
        assert_eq!((next(None), next(None), next(None)), (None, None, found), "or twice");
    }
}
