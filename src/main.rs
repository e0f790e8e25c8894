//! The trainer's binary; everything is in the library's `cli` room.

use std::io::Write;

use potluck::cli;
use potluck::train::error::EXIT_DEFECT;

fn main() {
    // Mesa's Vulkan layer asks a display server which GPU is the default one, and prints an error
    // where there is none. potluck chooses its devices itself, so the layer is switched off.
    // SAFETY: no other thread exists yet that could read the environment.
    unsafe { std::env::set_var("NODEVICE_SELECT", "1") };
    // What panicked has said so on stderr.
    let code = std::panic::catch_unwind(cli::main).unwrap_or(EXIT_DEFECT);
    leave(code);
}

/// Ends the process without the exit handlers of drivers: those of a device that hangs wait for
/// it, and some fail while a thread still runs. Nothing of potluck is left to do then: files are
/// synced when they are written.
fn leave(code: i32) -> ! {
    // Fails if the reader is gone; then there is nobody to tell.
    let _ = std::io::stdout().flush();
    #[cfg(unix)]
    signal_hook::low_level::exit(code);
    #[cfg(not(unix))]
    std::process::exit(code)
}
