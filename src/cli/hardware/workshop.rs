//! Processes of a part, each limited by the time of the part: a driver that crashes or hangs in one
//! of them does not affect the others.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use potluck_kernels::device::{Adapter, AdapterKind};
use potluck_train::signals::{Interruption, Signals};

/// Time between two checks of a process.
const INTERVAL: Duration = Duration::from_millis(50);
/// Time for a killed process to exit: a hung driver may keep it for longer.
const END_TIME: Duration = Duration::from_secs(5);
/// Time for an interrupted process to save its state, after which it is terminated.
const SAVE_TIME: Duration = Duration::from_secs(60);

/// Place of a part: the adapter, the folders, and the time.
pub struct Workshop<'a> {
    pub adapter: &'a Adapter,
    /// Selector of the adapter.
    pub selector: String,
    /// Folder of the adapter, with the files of the report.
    pub place: &'a Path,
    /// Empty folder in which processes run, removed after the part.
    pub work: PathBuf,
    /// Separate cache of kernels, so that results of other runs do not enter the report.
    pub cache: &'a Path,
    pub log: PathBuf,
    pub deadline: Instant,
    /// True for sizes at which a software adapter takes seconds.
    pub is_toy: bool,
    pub signals: &'a Signals,
}

/// End of a part without findings.
#[derive(Debug)]
pub enum Halt {
    Interrupted(Interruption),
    Io(io::Error),
}

impl Halt {
    /// Returns true if a program is not installed.
    pub fn is_of_missing_program(&self) -> bool {
        matches!(self, Self::Io(why) if why.kind() == io::ErrorKind::NotFound)
    }
}

impl From<io::Error> for Halt {
    fn from(why: io::Error) -> Self {
        Self::Io(why)
    }
}

/// Process that ended.
pub struct Ended {
    /// Exit status; `None` if its time was up.
    pub status: Option<ExitStatus>,
    pub stdout: String,
    pub stderr: String,
    pub seconds: f64,
}

impl Ended {
    pub fn is_right(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }

    pub fn code(&self) -> Option<i32> {
        self.status.and_then(|status| status.code())
    }

    /// Returns the first error message.
    pub fn error(&self) -> Option<&str> {
        self.stderr.lines().find(|line| line.starts_with("error: "))
    }

    /// Describes the end of the process.
    pub fn end(&self) -> String {
        let Some(status) = self.status else {
            return format!("did not end within {:.0} s", self.seconds);
        };
        // An exit status is displayed with the signal that ended the process.
        match self.error() {
            Some(error) => format!("{status}: {}", error.trim_start_matches("error: ")),
            None => status.to_string(),
        }
    }
}

impl Workshop<'_> {
    /// Returns true if times have limits: not at toy sizes, and not on the processor, which is
    /// shared with other programs.
    pub fn times_count(&self) -> bool {
        self.adapter.kind != AdapterKind::Software && !self.is_toy
    }

    pub fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Returns a command of this program.
    pub fn potluck<W: AsRef<str>>(&self, words: &[W]) -> io::Result<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(words.iter().map(AsRef::as_ref)).env("POTLUCK_CACHE", self.cache);
        Ok(command)
    }

    /// Runs this program with some words until it ends or the time of the part is up.
    ///
    /// # Errors
    /// Returns `Halt` if the report is interrupted, or a process cannot be started.
    pub fn run<W: AsRef<str>>(&self, words: &[W]) -> Result<Ended, Halt> {
        self.run_command(self.potluck(words)?, self.deadline, |_| Ok(()))
    }

    /// Runs a command, with its output in the log of the part, until it ends or until a deadline.
    /// `watch` is called every few milliseconds.
    ///
    /// # Errors
    /// Returns `Halt` as [`Workshop::run`] does.
    pub fn run_command(
        &self,
        mut command: Command,
        deadline: Instant,
        mut watch: impl FnMut(&Child) -> io::Result<()>,
    ) -> Result<Ended, Halt> {
        let mut log = OpenOptions::new().create(true).append(true).open(&self.log)?;
        writeln!(log, "$ {}", line_of(&command))?;
        let stderr_begin = log.seek(SeekFrom::End(0))?;
        let output = self.work.join("stdout");
        let started = Instant::now();
        command.current_dir(&self.work).stdin(Stdio::null());
        command.stdout(File::create(&output)?).stderr(log.try_clone()?);
        let mut child = command.spawn()?;
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break Some(status);
            }
            if let Some(signal) = self.signals.pending() {
                end(&mut child);
                return Err(Halt::Interrupted(signal));
            }
            if Instant::now() >= deadline {
                end(&mut child);
                break None;
            }
            if let Err(why) = watch(&child) {
                end(&mut child);
                return Err(why.into());
            }
            thread::sleep(INTERVAL);
        };
        let stdout = String::from_utf8_lossy(&fs::read(&output)?).into_owned();
        let stderr = text_from(&self.log, stderr_begin)?;
        let seconds = started.elapsed().as_secs_f64();
        let ended = Ended { status, stdout, stderr, seconds };
        writeln!(log, "{}[{}, {seconds:.1} s]\n", ended.stdout, ended.end())?;
        Ok(ended)
    }

    /// Returns the signal by which a process is stopped: Ctrl-C, unless it is ignored here, and so
    /// in processes started from here.
    pub fn stop_signal(&self) -> Interruption {
        if self.signals.flags().catches(Interruption::Interrupt) {
            Interruption::Interrupt
        } else {
            Interruption::Terminate
        }
    }

    /// Runs a command, stops it by [`Workshop::stop_signal`] once `is_enough` returns true, and
    /// gives it time to save its state.
    ///
    /// # Errors
    /// Returns `Halt` as [`Workshop::run`] does.
    pub fn run_and_interrupt(
        &self,
        command: Command,
        mut is_enough: impl FnMut(&Child) -> bool,
    ) -> Result<Ended, Halt> {
        let mut asked: Option<Instant> = None;
        let mut is_terminated = false;
        self.run_command(command, self.deadline + SAVE_TIME, |child| {
            match asked {
                None if is_enough(child) || Instant::now() >= self.deadline => {
                    asked = Some(Instant::now());
                    send(child, self.stop_signal())?;
                }
                Some(since) if since.elapsed() > SAVE_TIME / 2 && !is_terminated => {
                    is_terminated = true;
                    send(child, Interruption::Terminate)?;
                }
                _ => (),
            }
            Ok(())
        })
    }
}

fn line_of(command: &Command) -> String {
    let words = command.get_args().map(|word| word.to_string_lossy());
    let program = Path::new(command.get_program()).file_name().unwrap_or_default();
    let mut line = program.to_string_lossy().into_owned();
    for word in words {
        line.push(' ');
        line.push_str(word.lines().next().unwrap_or_default());
    }
    line
}

/// Reads a file from an offset on.
fn text_from(path: &Path, begin: u64) -> io::Result<String> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(begin))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Ends a process, and waits for it briefly.
fn end(child: &mut Child) {
    // It may have exited already.
    let _ = child.kill();
    let begun = Instant::now();
    while begun.elapsed() < END_TIME && matches!(child.try_wait(), Ok(None)) {
        thread::sleep(INTERVAL);
    }
}

/// Sends a process Ctrl-C or SIGTERM.
#[cfg(unix)]
fn send(child: &Child, signal: Interruption) -> io::Result<()> {
    let signal = match signal {
        Interruption::Interrupt => rustix::process::Signal::INT,
        _ => rustix::process::Signal::TERM,
    };
    let process = rustix::process::Pid::from_raw(child.id() as i32);
    match process.map(|process| rustix::process::kill_process(process, signal)) {
        Some(Err(why)) if why != rustix::io::Errno::SRCH => Err(why.into()),
        _ => Ok(()),
    }
}

/// Elsewhere a process cannot be sent Ctrl-C alone.
#[cfg(not(unix))]
fn send(_: &Child, _: Interruption) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
