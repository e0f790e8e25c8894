//! Program `potluck`: its command line in `cli`, its display in `ui`.

mod cli;
mod ui;

use potluck_train::runtime::error::EXIT_DEFECT;
use potluck_train::signals::leave;

fn main() {
    // Mesa's Vulkan layer asks a display server which GPU is the default one, and prints an error
    // where there is none. potluck chooses its devices itself, so the layer is switched off.
    // SAFETY: no other thread exists yet that could read the environment.
    unsafe { std::env::set_var("NODEVICE_SELECT", "1") };
    // The panic hook has already printed the panic to stderr.
    let code = std::panic::catch_unwind(cli::main).unwrap_or(EXIT_DEFECT);
    leave(code);
}
