//! Secrets of runs and benchmarks over several machines: `potluck secret`, and the sources of the
//! secret of a command.

use std::fs::OpenOptions;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use clap::Args;

use super::prompt::typed_code;
use super::{UsageError, print};
use crate::ui::terminal::print_line;
use potluck_net::Secret;
use potluck_train::error::TrainError;

/// Variable with the file of the secret, used without a flag.
const FILE_VARIABLE: &str = "POTLUCK_SECRET_FILE";
/// Variable with a service's directory of secrets, and the name of this one.
const CREDENTIALS_VARIABLE: &str = "CREDENTIALS_DIRECTORY";
const CREDENTIAL: &str = "potluck";

/// Source of the secret, other than a question on the terminal.
#[derive(Clone, Debug, Default, Args)]
pub struct SecretArgs {
    /// File with the code of the run, the same on all machines. Without it and --secret-fd: the
    /// file that POTLUCK_SECRET_FILE names, else the file potluck in $CREDENTIALS_DIRECTORY, else
    /// the terminal, where the first node shows a new code and the others ask for it
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<PathBuf>,
    /// Read the code from this open file descriptor
    #[cfg(unix)]
    #[arg(long, value_name = "N", conflicts_with = "secret_file")]
    pub secret_fd: Option<u32>,
    /// Take a file of the code that its group may read (mode 0440 or 0640), as those of Kubernetes'
    /// secrets with fsGroup are
    #[arg(long)]
    pub secret_group_readable: bool,
}

impl SecretArgs {
    /// Returns true if a flag is given.
    pub fn is_given(&self) -> bool {
        #[cfg(unix)]
        if self.secret_fd.is_some() {
            return true;
        }
        self.secret_file.is_some() || self.secret_group_readable
    }

    /// Returns the secret of a flag or the environment; `None` without one.
    ///
    /// # Errors
    /// Returns `UsageError` if it cannot be read.
    fn find(&self) -> Result<Option<Secret>, UsageError> {
        #[cfg(unix)]
        if let Some(descriptor) = self.secret_fd {
            let secret = Secret::read_descriptor(descriptor);
            return Ok(Some(secret.map_err(|error| UsageError(error.to_string()))?));
        }
        let named = self.secret_file.clone().or_else(|| variable(FILE_VARIABLE));
        // systemd lets the user of a service read a file of root by an access list, whose mask is
        // in the place of the group's permissions.
        let group_may_read = self.secret_group_readable || named.is_none();
        let Some(file) = named.or_else(credential) else { return Ok(None) };
        let secret = if group_may_read {
            Secret::read_file_of_group(&file)
        } else {
            Secret::read_file(&file)
        };
        Ok(Some(secret.map_err(|error| UsageError(error.to_string()))?))
    }

    /// Returns the secret of a first node, and its code if it is new and must be shown.
    ///
    /// # Errors
    /// Returns `UsageError` if it cannot be read, and without a terminal: the output may be stored,
    /// and readable by others.
    pub fn to_host(&self) -> anyhow::Result<(Secret, Option<String>)> {
        if let Some(secret) = self.find()? {
            return Ok((secret, None));
        }
        if !std::io::stderr().is_terminal() {
            let why = format!(
                "there is no terminal to show a new code, and it must not be logged: write one \
                 with `potluck secret --out FILE`, and pass it with --secret-file or \
                 {FILE_VARIABLE}"
            );
            return Err(UsageError(why).into());
        }
        let secret = Secret::generate()?;
        let code = code_of(&secret);
        Ok((secret, Some(code)))
    }

    /// Returns the secret of a joining node; asks for it on the terminal if it has no other source.
    ///
    /// # Errors
    /// Returns `UsageError` if it cannot be read, and without a terminal.
    pub fn to_join(&self) -> anyhow::Result<Secret> {
        match self.find()? {
            Some(secret) => Ok(secret),
            None => typed_code(&format!("name a file with it by --secret-file or {FILE_VARIABLE}")),
        }
    }
}

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// File of a service manager, if there is one.
fn credential() -> Option<PathBuf> {
    let file = variable(CREDENTIALS_VARIABLE)?.join(CREDENTIAL);
    if file.is_file() { Some(file) } else { None }
}

fn code_of(secret: &Secret) -> String {
    // A generated secret has a code.
    secret.code().unwrap_or_default()
}

/// Makes a new code, and prints it or writes it to a new file that only its owner can read.
///
/// # Errors
/// Returns an error if the system has no random numbers, and if the file exists or cannot be
/// written.
pub fn make(out: Option<&Path>) -> anyhow::Result<()> {
    let code = code_of(&Secret::generate()?);
    let Some(out) = out else {
        print(&format!("{code}\n"));
        return Ok(());
    };
    let mut options = OpenOptions::new();
    // An existing file may be open elsewhere, or have the code of a run.
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options
        .open(out)
        .map_err(|why| UsageError(format!("{}: cannot be made: {why}", out.display())))?;
    let written = file.write_all(format!("{code}\n").as_bytes()).and_then(|()| file.sync_all());
    written.map_err(|why| TrainError::Io { path: out.into(), why })?;
    print_line(&format!("wrote a code to {}: give it to the other machines", out.display()));
    Ok(())
}
