//! Thread that owns a device. All access to the device is a job submitted to this thread. If the
//! device has no heartbeat for a deadline, a watchdog ends each wait for a job: a hung device is
//! abandoned, and its thread is never joined.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::runtime::remote::executor::RemoteExecutor;
use crate::runtime::remote::first::RemoteSlot;
use potluck_core::Lock;
use potluck_kernels::device::panics::{PanicText, catch_quietly};
use potluck_kernels::device::{DeviceError, Heartbeat};
use potluck_kernels::exec::Executor;
use potluck_parallel::comm::nanos;
use potluck_parallel::coordinator::check_interval;

type Job = Box<dyn FnOnce(&mut dyn Executor) + Send>;

/// Capacity of the job queue of a device thread; the training loop submits one job at a time.
const QUEUE_MAX: usize = 2;

/// Deadline for closing the device when its handle is dropped. Closing takes milliseconds; some GPU
/// drivers (GL's) fail if the process ends meanwhile.
const CLOSING_DEADLINE: Duration = Duration::from_secs(5);

/// Handle of a device thread.
pub struct DeviceThread {
    name: String,
    /// Taken by the handle's drop: the thread ends with the last sender.
    jobs: Option<mpsc::SyncSender<Job>>,
    /// Disconnects when the thread has closed the device.
    closed: Lock<mpsc::Receiver<()>>,
    /// Set if a job panicked, which ends the thread.
    panic: PanicText,
    heartbeat: Heartbeat,
    /// True after a missed deadline or a timeout of a job: no thread waits for this device again.
    hung: AtomicBool,
    deadline: Duration,
    /// Place of the device, if it is on another node.
    remote: Option<RemoteSlot>,
}

impl DeviceThread {
    /// Moves `executor` to a new thread, which ends when the handle is dropped. A device without a
    /// heartbeat for `deadline` during a job counts as hung; the whole job may take longer.
    ///
    /// # Errors
    /// Returns the error of the system if it cannot start the thread.
    pub fn start(mut executor: Box<dyn Executor>, deadline: Duration) -> std::io::Result<Self> {
        let (jobs, queue) = mpsc::sync_channel::<Job>(QUEUE_MAX);
        let (closing, closed) = mpsc::sync_channel(1);
        let (entering, entered) = mpsc::sync_channel(1);
        let name = executor.name().to_string();
        let heartbeat = executor.heartbeat();
        let panic = PanicText::default();
        let text = panic.clone();
        thread::Builder::new().name(format!("driver of {name}")).spawn(move || {
            let pool = match executor.thread_pool() {
                Ok(pool) => pool,
                Err(error) => {
                    // The receiver waits for this.
                    let _ = entering.send(Err(error));
                    return;
                }
            };
            let _ = entering.send(Ok(()));
            let work = move || {
                for job in queue {
                    if catch_quietly(&text, || job(executor.as_mut())).is_none() {
                        break;
                    }
                }
                drop(executor);
            };
            // All jobs run on one thread of the pool, so that no other is needed to begin a kernel.
            // This thread is not in the pool: a pool with a thread that it did not start leaks.
            match &pool {
                Some(pool) => pool.install(work),
                None => work(),
            }
            drop(pool);
            drop(closing);
        })?;
        // Without an answer, the thread ended by a panic.
        entered.recv().map_err(std::io::Error::other)??;
        Ok(Self {
            name,
            jobs: Some(jobs),
            closed: Lock::new(closed),
            panic,
            heartbeat,
            hung: AtomicBool::new(false),
            deadline,
            remote: None,
        })
    }

    /// Starts the thread that calls a device of another node.
    pub(crate) fn start_remote(
        executor: RemoteExecutor,
        slot: RemoteSlot,
        deadline: Duration,
    ) -> std::io::Result<Self> {
        let mut thread = Self::start(Box::new(executor), deadline)?;
        thread.remote = Some(slot);
        Ok(thread)
    }

    /// Returns the place of the device, if it is on another node.
    pub fn remote(&self) -> Option<&RemoteSlot> {
        self.remote.as_ref()
    }

    /// Returns the device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs `job` on the device thread and waits for its result.
    ///
    /// # Errors
    /// Returns the job's error, `DeviceError::Timeout` if the device hangs, or
    /// `DeviceError::Panicked` if the device thread has ended. It ends early only if a job panics,
    /// which is a defect of potluck, so that another start would not help.
    pub fn run<R, F>(&self, what: &str, job: F) -> Result<R, DeviceError>
    where
        R: Send + 'static,
        F: FnOnce(&mut dyn Executor) -> Result<R, DeviceError> + Send + 'static,
    {
        self.submit(what, job)?.wait()
    }

    /// Submits `job` to the device thread; `PendingJob::wait` returns its result.
    ///
    /// # Errors
    /// Returns `DeviceError` if the device hung before or its thread has ended.
    pub fn submit<R, F>(&self, what: &str, job: F) -> Result<PendingJob<'_, R>, DeviceError>
    where
        R: Send + 'static,
        F: FnOnce(&mut dyn Executor) -> Result<R, DeviceError> + Send + 'static,
    {
        let (sender, result) = mpsc::sync_channel(1);
        self.submit_detached(what, move |executor| {
            // Fails if the receiver was dropped; the result is then not needed.
            let _ = sender.send(job(executor));
        })?;
        Ok(PendingJob { driver: self, what: what.to_string(), result })
    }

    /// Submits a job that reports its result itself.
    ///
    /// # Errors
    /// Returns `DeviceError` if the device hung before or its thread has ended.
    pub(crate) fn submit_detached<F>(&self, what: &str, job: F) -> Result<(), DeviceError>
    where
        F: FnOnce(&mut dyn Executor) + Send + 'static,
    {
        if self.hung.load(Ordering::Relaxed) {
            // The queue would fill up behind a job that never ends.
            return Err(self.abandon(what));
        }
        let jobs = self.jobs.as_ref().ok_or_else(|| self.panicked(what))?;
        jobs.send(Box::new(job)).map_err(|_| self.panicked(what))
    }

    /// Returns the error of a job that ended without a result.
    pub fn panicked(&self, what: &str) -> DeviceError {
        self.on_panic(what)()
    }

    /// Returns a function for the error of a job, called after the job has panicked.
    pub(crate) fn on_panic(&self, what: &str) -> impl FnOnce() -> DeviceError + Send + 'static {
        let adapter = self.name.clone();
        let what = what.to_string();
        let text = self.panic.clone();
        move || DeviceError::Panicked { adapter, what, text: text.get().cloned() }
    }

    /// Abandons the device: no thread waits for it again. Returns the timeout error.
    pub(crate) fn abandon(&self, what: &str) -> DeviceError {
        self.hung.store(true, Ordering::Relaxed);
        DeviceError::Timeout {
            adapter: self.name.clone(),
            what: what.to_string(),
            seconds: self.deadline.as_secs_f64(),
        }
    }

    /// Marks the device as hung if `error` is a timeout: the GPU driver may then hang too when the
    /// device is closed.
    pub fn note(&self, error: &DeviceError) {
        let hung = matches!(error, DeviceError::Timeout { .. });
        self.hung.fetch_or(hung, Ordering::Relaxed);
    }

    /// Returns the number of heartbeats of the device so far.
    pub fn heartbeats(&self) -> u64 {
        self.heartbeat.count()
    }

    /// Returns the longest time without a heartbeat.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Starts a watchdog on the device's heartbeat, with its deadline counted from now.
    pub fn watch(&self) -> Watchdog {
        let heartbeat = self.heartbeat.clone();
        Watchdog {
            ticks: heartbeat.count(),
            alive: Instant::now(),
            heartbeat,
            deadline: self.deadline,
        }
    }
}

/// Submitted job.
pub struct PendingJob<'d, R> {
    driver: &'d DeviceThread,
    what: String,
    result: mpsc::Receiver<Result<R, DeviceError>>,
}

impl<R> PendingJob<'_, R> {
    /// Waits for the result as long as the device's heartbeat continues.
    ///
    /// # Errors
    /// Returns the same errors as [`DeviceThread::run`].
    pub fn wait(self) -> Result<R, DeviceError> {
        let mut watch = self.driver.watch();
        loop {
            match self.result.recv_timeout(watch.poll_interval()) {
                Ok(result) => {
                    return result.inspect_err(|error| self.driver.note(error));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.driver.panicked(&self.what));
                }
                Err(RecvTimeoutError::Timeout) if watch.is_expired() => {
                    return Err(self.driver.abandon(&self.what));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

/// Watchdog of a device: expires when its heartbeat has stopped for the deadline.
pub struct Watchdog {
    heartbeat: Heartbeat,
    ticks: u64,
    alive: Instant,
    deadline: Duration,
}

impl Watchdog {
    pub(crate) fn poll_interval(&self) -> Duration {
        Duration::from_nanos(check_interval(nanos(self.deadline)))
    }

    pub(crate) fn is_expired(&mut self) -> bool {
        if self.heartbeat.count() != self.ticks {
            self.ticks = self.heartbeat.count();
            self.alive = Instant::now();
        }
        self.alive.elapsed() >= self.deadline
    }
}

impl Drop for DeviceThread {
    /// Closes the device, and waits until it is closed unless it hangs.
    fn drop(&mut self) {
        drop(self.jobs.take());
        if !self.hung.load(Ordering::Relaxed) {
            // The expected result is a disconnect; on a timeout the device is abandoned.
            let closed = self.closed.get_mut();
            let _ = closed.recv_timeout(CLOSING_DEADLINE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::RuntimeError;
    use crate::runtime::error::EXIT_DEFECT;
    use potluck_graph::{Builder, Plan, PlanOptions};
    use potluck_kernels::exec::Cpu;
    use std::sync::Arc;

    const DEADLINE: Duration = Duration::from_secs(60);

    #[test]
    fn a_dropped_driver_has_closed_its_device_and_a_hung_one_is_left_behind() {
        let executor = || {
            let plan = Plan::new(Builder::new().finish(), PlanOptions::new(1));
            Box::new(Cpu::reference(plan, 0))
        };
        let driver = DeviceThread::start(executor(), DEADLINE).unwrap();
        let alive = Arc::new(());
        let held = Arc::clone(&alive);
        // Dropped when the thread has emptied its queue.
        let last: Job = Box::new(move |_| drop(held));
        driver.jobs.as_ref().unwrap().send(last).unwrap();
        drop(driver);
        assert_eq!(Arc::strong_count(&alive), 1);

        let driver = DeviceThread::start(executor(), Duration::from_millis(1)).unwrap();
        let (release, blocked) = mpsc::channel::<()>();
        let error = driver.run("a job", move |_| {
            // Blocks until the test ends.
            let _ = blocked.recv();
            Ok(())
        });
        assert!(matches!(error, Err(DeviceError::Timeout { .. })));
        let started = std::time::Instant::now();
        drop(driver);
        assert!(started.elapsed() < CLOSING_DEADLINE);
        drop(release);
    }

    #[cfg(target_os = "linux")]
    fn threads_named(start: &str) -> Vec<String> {
        let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        tasks.filter_map(name).filter(|name| name.starts_with(start)).collect()
    }

    #[test]
    fn a_cpu_device_computes_on_threads_of_its_own_which_end_with_it() {
        let device = |threads| {
            let plan = Plan::new(Builder::new().finish(), PlanOptions::new(1));
            let device = Box::new(Cpu::fast(plan, 0).with_threads(threads));
            DeviceThread::start(device, DEADLINE).unwrap()
        };
        // The thread of the device, and the number of threads of its pool.
        let asked = |device: &DeviceThread| {
            let ask =
                |_: &mut dyn Executor| Ok((thread::current().id(), rayon::current_num_threads()));
            let asked = device.run("a question", ask).unwrap();
            let worker = device.run("a question", |_| Ok(rayon::current_thread_index()));
            assert!(worker.unwrap().is_some(), "jobs run on a thread of the pool");
            asked
        };
        let devices = [device(1), device(3)];
        let [(alone, one), (first, three)] = [&devices[0], &devices[1]].map(asked);
        assert!(alone != first && [one, three] == [1, 3]);
        let used =
            devices[1].run("a broadcast", |_| Ok(rayon::broadcast(|_| thread::current().id())));
        let mut used = used.unwrap();
        used.dedup();
        assert!(used.len() == 3 && used.contains(&first) && !used.contains(&alone));
        #[cfg(target_os = "linux")]
        {
            assert!(threads_named("cpu worker").len() >= 2);
            drop(devices);
            let started = Instant::now();
            while !threads_named("cpu worker").is_empty() {
                assert!(started.elapsed() < CLOSING_DEADLINE, "{:?}", threads_named("cpu worker"));
                thread::sleep(Duration::from_millis(5));
            }
        }
    }

    /// In a process of its own, whose memory and threads no other test changes.
    #[test]
    #[cfg(target_os = "linux")]
    fn devices_that_are_opened_and_closed_leave_nothing() {
        const ALONE: &str = "POTLUCK_TEST_ALONE";
        if std::env::var_os(ALONE).is_none() {
            let own =
                "runtime::device_thread::tests::devices_that_are_opened_and_closed_leave_nothing";
            let mut command = std::process::Command::new(std::env::current_exe().unwrap());
            let ran = command.args(["--exact", own]).env(ALONE, "1").output().unwrap();
            let text = String::from_utf8_lossy(&ran.stdout).into_owned();
            assert!(ran.status.success() && text.contains("1 passed"), "{text}");
            return;
        }
        let open_and_close = |times: usize| {
            for _ in 0..times {
                let plan = Plan::new(Builder::new().finish(), PlanOptions::new(1));
                let device = Box::new(Cpu::fast(plan, 0).with_threads(2));
                let driver = DeviceThread::start(device, DEADLINE).unwrap();
                driver.run("a sum", |_| Ok(rayon::broadcast(|_| ()).len())).unwrap();
            }
        };
        let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
        // Pages that the process has in memory, and its threads. All threads of a device end a
        // little later, not only the threads of its pool.
        let held = || {
            let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
            let pages: usize = pages.split(' ').nth(1).unwrap().parse().unwrap();
            let started = Instant::now();
            let mut count = threads();
            loop {
                thread::sleep(Duration::from_millis(100));
                let before = std::mem::replace(&mut count, threads());
                let have_ended = count == before && threads_named("cpu worker").is_empty();
                if have_ended || started.elapsed() >= CLOSING_DEADLINE {
                    return (pages, count);
                }
            }
        };
        open_and_close(100);
        let (pages, threads) = held();
        open_and_close(900);
        let (pages_after, threads_after) = held();
        assert_eq!(threads_after, threads);
        // A leak of a kilobyte each would be 225 pages.
        assert!(pages_after < pages + 200, "{pages} pages, then {pages_after}");
    }

    #[test]
    fn a_long_job_of_a_device_that_lives_is_waited_for() {
        let plan = Plan::new(Builder::new().finish(), PlanOptions::new(1));
        let deadline = Duration::from_secs(2);
        let driver = DeviceThread::start(Box::new(Cpu::reference(plan, 0)), deadline).unwrap();
        let step = Duration::from_millis(50);
        let beating = driver.run("a long job", move |device| {
            for _ in 0..50 {
                thread::sleep(step);
                device.heartbeat().tick();
            }
            Ok(7)
        });
        assert_eq!(beating.unwrap(), 7);
        let (release, blocked) = mpsc::channel::<()>();
        let silent = driver.run("a silent job", move |_| {
            // Blocks until the test ends.
            let _ = blocked.recv();
            Ok(7)
        });
        assert!(matches!(silent, Err(DeviceError::Timeout { seconds: 2.0, .. })));
        drop(release);
    }

    #[test]
    fn a_timeout_that_the_device_tells_leaves_it_behind() {
        let plan = Plan::new(Builder::new().finish(), PlanOptions::new(1));
        let driver = DeviceThread::start(Box::new(Cpu::reference(plan, 0)), DEADLINE).unwrap();
        let timeout = |_: &mut dyn Executor| -> Result<(), DeviceError> {
            let (adapter, what) = ("a".into(), "a submission".into());
            Err(DeviceError::Timeout { adapter, what, seconds: 1.0 })
        };
        driver.run("a step", timeout).unwrap_err();
        assert!(driver.hung.load(Ordering::Relaxed));
    }

    #[test]
    fn a_job_that_panics_is_a_defect_also_for_those_after_it() {
        let plan = Plan::new(Builder::new().finish(), PlanOptions::new(1));
        let driver = DeviceThread::start(Box::new(Cpu::reference(plan, 0)), DEADLINE).unwrap();
        assert_eq!(driver.run("a sum", |_| Ok(1 + 1)).unwrap(), 2);
        for what in ["a step", "another step"] {
            let error = driver.run(what, |_| -> Result<(), _> { panic!("planted") }).unwrap_err();
            assert!(error.to_string().contains(what), "{error}");
            assert!(error.to_string().contains("panicked (planted, at src"), "{error}");
            assert_eq!(RuntimeError::from(error).exit_code(), EXIT_DEFECT);
        }
    }
}
