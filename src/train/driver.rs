//! The thread that owns a device. Everything that touches the device is a job handed to it, and
//! every wait for a job has a deadline: a device that hangs is left behind, never joined.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use crate::device::DeviceError;
use crate::exec::Executor;

type Job = Box<dyn FnOnce(&mut dyn Executor) + Send>;

/// Jobs that may wait for the device; the loop hands over one at a time.
const QUEUE_MAX: usize = 2;

/// How long a dropped handle waits for its device to be closed. Closing takes milliseconds; some
/// drivers (GL's) fail when the process ends in the middle of it.
const CLOSING_DEADLINE: Duration = Duration::from_secs(5);

/// A handle on a device's thread.
pub struct Driver {
    name: String,
    /// Taken when the handle is dropped: the thread ends with the last sender.
    jobs: Option<mpsc::SyncSender<Job>>,
    /// Disconnects when the thread has closed the device.
    closed: mpsc::Receiver<()>,
    /// A job did not end in time: nobody waits for this device any more.
    hung: AtomicBool,
    deadline: Duration,
}

impl Driver {
    /// Moves `executor` to a thread of its own, which ends when the handle is dropped. A job that
    /// takes longer than `deadline` counts as a hung device.
    pub fn start(mut executor: Box<dyn Executor>, deadline: Duration) -> std::io::Result<Self> {
        let (jobs, queue) = mpsc::sync_channel::<Job>(QUEUE_MAX);
        let (closing, closed) = mpsc::sync_channel(1);
        let name = executor.name().to_string();
        thread::Builder::new().name(format!("driver of {name}")).spawn(move || {
            for job in queue {
                job(executor.as_mut());
            }
            drop(executor);
            drop(closing);
        })?;
        Ok(Self { name, jobs: Some(jobs), closed, hung: AtomicBool::new(false), deadline })
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs `job` on the device's thread and waits for its result.
    ///
    /// # Errors
    /// What the job gives; a device that does not answer counts as hung. The thread of a device
    /// ends early only if a job panics, which is a defect: starting again would not help.
    pub fn run<R, F>(&self, what: &str, job: F) -> Result<R, DeviceError>
    where
        R: Send + 'static,
        F: FnOnce(&mut dyn Executor) -> Result<R, DeviceError> + Send + 'static,
    {
        let (sender, receiver) = mpsc::sync_channel(1);
        let panicked = || DeviceError::Refused {
            adapter: self.name.clone(),
            what: what.to_string(),
            why: "its thread panicked, which is a defect of potluck; please report it".into(),
        };
        let job: Job = Box::new(move |executor| {
            // If nobody waits any more, the result is of no use.
            let _ = sender.send(job(executor));
        });
        let jobs = self.jobs.as_ref().ok_or_else(panicked)?;
        jobs.send(job).map_err(|_| panicked())?;
        match receiver.recv_timeout(self.deadline) {
            Ok(result) => result,
            Err(RecvTimeoutError::Disconnected) => Err(panicked()),
            Err(RecvTimeoutError::Timeout) => {
                self.hung.store(true, Ordering::Relaxed);
                Err(DeviceError::Timeout {
                    adapter: self.name.clone(),
                    what: what.to_string(),
                    seconds: self.deadline.as_secs(),
                })
            }
        }
    }
}

impl Drop for Driver {
    /// Closes the device and waits until that is done, unless it hangs.
    fn drop(&mut self) {
        drop(self.jobs.take());
        if !self.hung.load(Ordering::Relaxed) {
            // Disconnected is what is waited for, and a timeout leaves the device behind.
            let _ = self.closed.recv_timeout(CLOSING_DEADLINE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use crate::exec::Cpu;
    use crate::graph::{Builder, Plan, PlanOptions};
    use crate::train::TrainError;
    use crate::train::error::EXIT_DEFECT;

    const DEADLINE: Duration = Duration::from_secs(60);

    #[test]
    fn a_dropped_driver_has_closed_its_device_and_a_hung_one_is_left_behind() {
        let executor = || {
            let plan = Plan::new(Builder::new().finish(), PlanOptions::new(1));
            Box::new(Cpu::reference(plan, 0))
        };
        let driver = Driver::start(executor(), DEADLINE).unwrap();
        let alive = Arc::new(());
        let held = Arc::clone(&alive);
        // Dropped when the thread has gone through its queue.
        let last: Job = Box::new(move |_| drop(held));
        driver.jobs.as_ref().unwrap().send(last).unwrap();
        drop(driver);
        assert_eq!(Arc::strong_count(&alive), 1);

        let driver = Driver::start(executor(), Duration::from_millis(1)).unwrap();
        let (release, blocked) = mpsc::channel::<()>();
        let error = driver.run("a job", move |_| {
            // Until the test ends.
            let _ = blocked.recv();
            Ok(())
        });
        assert!(matches!(error, Err(DeviceError::Timeout { .. })));
        let started = std::time::Instant::now();
        drop(driver);
        assert!(started.elapsed() < CLOSING_DEADLINE);
        drop(release);
    }

    #[test]
    fn a_job_that_panics_is_a_defect_also_for_those_after_it() {
        let plan = Plan::new(Builder::new().finish(), PlanOptions::new(1));
        let driver = Driver::start(Box::new(Cpu::reference(plan, 0)), DEADLINE).unwrap();
        assert_eq!(driver.run("a sum", |_| Ok(1 + 1)).unwrap(), 2);
        for what in ["a step", "another step"] {
            let error = driver.run(what, |_| -> Result<(), _> { panic!("planted") }).unwrap_err();
            assert!(error.to_string().contains(what), "{error}");
            assert_eq!(TrainError::from(error).exit_code(), EXIT_DEFECT);
        }
    }
}
