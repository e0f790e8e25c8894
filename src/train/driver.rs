//! The thread that owns a device. Everything that touches the device is a job handed to it, and
//! every wait for a job has a deadline: a device that hangs is left behind, never joined.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use crate::device::DeviceError;
use crate::exec::Executor;

type Job = Box<dyn FnOnce(&mut dyn Executor) + Send>;

/// Jobs that may wait for the device; the loop hands over one at a time.
const QUEUE_MAX: usize = 2;

/// A handle on a device's thread.
pub struct Driver {
    name: String,
    jobs: mpsc::SyncSender<Job>,
    deadline: Duration,
}

impl Driver {
    /// Moves `executor` to a thread of its own, which ends when the handle is dropped. A job that
    /// takes longer than `deadline` counts as a hung device.
    pub fn start(mut executor: Box<dyn Executor>, deadline: Duration) -> std::io::Result<Self> {
        let (jobs, queue) = mpsc::sync_channel::<Job>(QUEUE_MAX);
        let name = executor.name().to_string();
        thread::Builder::new().name(format!("driver of {name}")).spawn(move || {
            for job in queue {
                job(executor.as_mut());
            }
        })?;
        Ok(Self { name, jobs, deadline })
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
        self.jobs.send(job).map_err(|_| panicked())?;
        match receiver.recv_timeout(self.deadline) {
            Ok(result) => result,
            Err(RecvTimeoutError::Disconnected) => Err(panicked()),
            Err(RecvTimeoutError::Timeout) => Err(DeviceError::Timeout {
                adapter: self.name.clone(),
                what: what.to_string(),
                seconds: self.deadline.as_secs(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::Cpu;
    use crate::graph::{Builder, Plan, PlanOptions};
    use crate::train::TrainError;
    use crate::train::error::EXIT_DEFECT;

    const DEADLINE: Duration = Duration::from_secs(60);

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
