//! Documents of the command line itself: completions of shells, and pages of the manual.

use std::fs;
use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;

use super::args::Cli;
use super::{UsageError, print};

/// Name of the program in its documents.
const PROGRAM: &str = "potluck";

/// Prints the script that completes command lines in a shell.
pub fn completions(shell: Shell) {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), PROGRAM, &mut script);
    // clap generates the script from the texts of this program, in UTF-8.
    print(&String::from_utf8_lossy(&script));
}

/// Writes the pages of the manual to a directory, which is created if necessary: `potluck.1`, and
/// one per subcommand.
///
/// # Errors
/// Returns `UsageError` if they cannot be written.
pub fn manual(directory: &Path) -> Result<(), UsageError> {
    fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(Cli::command().name(PROGRAM), directory))
        .map_err(|why| UsageError(format!("{}: {why}; name another DIR", directory.display())))
}
