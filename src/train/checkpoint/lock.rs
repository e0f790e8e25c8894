//! Lock of a run directory: one writer only.

use std::fs::{File, TryLockError};
use std::io::{Read, Write};
use std::path::Path;
use std::thread;
use std::time::Duration;

use super::CheckpointError;

/// Attempts to take a lock that another process holds, `PAUSE` apart: a process that is ending, or
/// a child that the holder is starting and that briefly shares its open files, soon releases it.
const TRIES: u32 = 10;
const PAUSE: Duration = Duration::from_millis(50);

/// Holds `DIR/lock` until it is dropped. The operating system releases the lock however the process
/// ends, so there are no stale locks; the file itself stays. It contains the process id, for the
/// error messages of other processes.
#[derive(Debug)]
pub(crate) struct RunLock {
    _file: File,
}

impl RunLock {
    /// Takes the lock of a run directory.
    ///
    /// # Errors
    /// Returns `CheckpointError::InUse` if another process keeps the lock for half a second, and
    /// `CheckpointError::Write` if the lock file cannot be written.
    pub fn take(run: &Path) -> Result<Self, CheckpointError> {
        let path = run.join("lock");
        let error = |why| CheckpointError::Write { path: path.clone(), why };
        let mut options = File::options();
        let mut file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(error)?;
        let held = || matches!(file.try_lock(), Err(TryLockError::WouldBlock));
        if stays(held) {
            return Err(in_use(run, &file));
        }
        // Any other failure of `try_lock` means a file system without locks; training continues
        // unlocked.
        file.set_len(0).map_err(error)?;
        writeln!(file, "{}", std::process::id()).map_err(error)?;
        Ok(Self { _file: file })
    }
}

/// Waits until the lock of a run directory is free, without taking it.
///
/// # Errors
/// Returns `CheckpointError::InUse` if another process keeps the lock for half a second.
pub fn wait(run: &Path) -> Result<(), CheckpointError> {
    if stays(|| is_held(run)) {
        match File::open(run.join("lock")) {
            Ok(file) => Err(in_use(run, &file)),
            // The run was removed in the meantime.
            Err(_) => Ok(()),
        }
    } else {
        Ok(())
    }
}

/// Returns true if the lock is held at all attempts.
fn stays(held: impl Fn() -> bool) -> bool {
    (0..TRIES).all(|_| {
        let is_held = held();
        if is_held {
            thread::sleep(PAUSE);
        }
        is_held
    })
}

fn in_use(run: &Path, file: &File) -> CheckpointError {
    let mut pid = String::new();
    // If a locked file cannot be read, the message omits the id.
    let read = file.take(20).read_to_string(&mut pid);
    let by = match (read, pid.trim()) {
        (Ok(_), pid) if !pid.is_empty() => format!("process {pid}"),
        _ => "another process".into(),
    };
    CheckpointError::InUse { path: run.into(), by }
}

/// Returns true if a process holds the lock of a run directory. Does not create the lock file.
pub fn is_held(run: &Path) -> bool {
    let file = File::open(run.join("lock"));
    // Shared, so that two readers do not mistake each other for the writer; a writer that starts at
    // this moment tries again.
    file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_is_let_go_soon_is_waited_for() {
        let run = tempfile::tempdir().unwrap();
        assert!(!is_held(run.path()));
        let first = RunLock::take(run.path()).unwrap();
        assert!(is_held(run.path()));
        assert!(matches!(RunLock::take(run.path()), Err(CheckpointError::InUse { .. })));
        assert!(matches!(wait(run.path()), Err(CheckpointError::InUse { .. })));
        let ending = thread::spawn(move || {
            thread::sleep(2 * PAUSE);
            drop(first);
        });
        RunLock::take(run.path()).unwrap();
        ending.join().unwrap();
        wait(run.path()).unwrap();
    }
}
