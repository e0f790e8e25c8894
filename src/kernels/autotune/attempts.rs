//! Attempts at kernels on a graphics card. A file beside the kernel cache names the kernel that
//! runs for the first time, until it has run. One that a process finds there has lost the device or
//! kept it from answering, or somebody ended the process just then: a second time tells.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::Path;

/// A kernel that is tried.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Attempt {
    pub hash: String,
    /// Display name (variant and op).
    pub kernel: String,
    /// True if it was the attempt before, too.
    is_second: bool,
    /// True if the device was lost.
    is_lost: bool,
}

impl Attempt {
    /// Returns true if the kernel is the cause of the end.
    fn is_cause(&self) -> bool {
        self.is_lost || self.is_second
    }
}

/// The file of the attempts at the kernels of one driver, which one process at a time holds.
#[derive(Debug)]
pub(crate) struct AttemptFile {
    file: File,
    /// Attempt that did not end before, and that which goes on.
    left: Option<Attempt>,
    current: Option<Attempt>,
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
        let left: Option<Attempt> = serde_json::from_str(&text).ok();
        let cause = left.clone().filter(Attempt::is_cause);
        Some((Self { file, left, current: None }, cause))
    }

    /// Names the kernel that is tried, on disk before it runs.
    pub fn begin(&mut self, hash: &str, kernel: &str) {
        let is_second = self.left.as_ref().is_some_and(|left| left.hash == hash);
        let (hash, kernel) = (hash.into(), kernel.into());
        self.current = Some(Attempt { hash, kernel, is_second, is_lost: false });
        self.write();
    }

    /// Removes the name, unless the device was lost.
    pub fn end(&mut self, is_lost: bool) {
        match &mut self.current {
            Some(current) if is_lost => current.is_lost = true,
            _ => self.current = None,
        }
        self.write();
    }

    /// Writes the attempt that goes on. If that fails, a kernel that ends the run is tried again.
    fn write(&mut self) {
        let text = self.current.as_ref().map(serde_json::to_string);
        let text = text.and_then(Result::ok).unwrap_or_default();
        let _: io::Result<()> = (|| {
            self.file.set_len(0)?;
            self.file.rewind()?;
            self.file.write_all(text.as_bytes())?;
            // A card that hangs may take the machine with it.
            if text.is_empty() { Ok(()) } else { self.file.sync_data() }
        })();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_that_does_not_end_is_found_by_the_next_process() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kernels.attempt");
        // The kernel that must not be tried again, after an attempt that ends or not.
        let next = |ends: Option<bool>| {
            let (mut file, cause) = AttemptFile::open(&path).unwrap();
            assert!(AttemptFile::open(&path).is_none(), "one process at a time");
            file.begin("other", "another kernel");
            file.end(false);
            file.begin("abc", "tile of matmul");
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
