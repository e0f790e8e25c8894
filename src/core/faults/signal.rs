//! Signals that the process sends to itself.

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::low_level;

/// Ends the process at once, as SIGKILL does.
pub fn kill() -> ! {
    #[cfg(unix)]
    raise(signal_hook::consts::SIGKILL);
    // Without such signals, an abort is the closest: nothing is cleaned up.
    std::process::abort()
}

/// Stops the process, as SIGSTOP does, until it is continued.
pub fn stop() {
    #[cfg(unix)]
    raise(signal_hook::consts::SIGSTOP);
    // Where there is no such signal, a process that ends is silent as well.
    #[cfg(not(unix))]
    std::process::abort()
}

/// Sends SIGTERM.
pub(crate) fn terminate() {
    raise(SIGTERM);
}

/// Sends SIGINT.
pub(crate) fn interrupt() {
    raise(SIGINT);
}

fn raise(number: i32) {
    // Raising can only fail for a number that is not a signal.
    let _ = low_level::raise(number);
}
