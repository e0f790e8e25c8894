//! Binary of the trainer; all else is in the library's `cli` module.

use std::io::Write;

use potluck::cli;
use potluck::train::error::EXIT_DEFECT;

fn main() {
    // Mesa's Vulkan layer asks a display server which GPU is the default one, and prints an error
    // where there is none. potluck chooses its devices itself, so the layer is switched off.
    // SAFETY: no other thread exists yet that could read the environment.
    unsafe { std::env::set_var("NODEVICE_SELECT", "1") };
    // The panic hook has already printed the panic to stderr.
    let code = std::panic::catch_unwind(cli::main).unwrap_or(EXIT_DEFECT);
    leave(code);
}

/// Ends the process without running the exit handlers of GPU drivers: those of a hung device wait
/// for it, and some fail while a thread still runs. No cleanup of potluck is skipped: files are
/// synced when they are written.
fn leave(code: i32) -> ! {
    // Fails if the reader of the pipe is gone; there is no other place to report to.
    let _ = std::io::stdout().flush();
    #[cfg(unix)]
    signal_hook::low_level::exit(code);
    #[cfg(not(unix))]
    std::process::exit(code)
}
