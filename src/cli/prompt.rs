//! Question for the code of a run on the terminal, without echo.

use std::io::{self, IsTerminal};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{InterruptedError, UsageError};
use crate::ui::terminal::print_line;
use potluck_net::Secret;
use potluck_train::error::TrainError;
use potluck_train::signals::{Interruption, Signals, leave};

/// Asks for the code on the terminal until it has no typing error. A signal restores the terminal
/// and ends the process.
///
/// # Errors
/// Returns an error without a terminal, if it cannot be read, and if signals cannot be caught;
/// `elsewhere` is the advice without a terminal.
pub fn typed_code(elsewhere: &str) -> anyhow::Result<Secret> {
    if !std::io::stdin().is_terminal() {
        let why = format!("there is no terminal to ask for the code; {elsewhere}");
        return Err(UsageError(why).into());
    }
    let _restored = RestoredTerminal::watch()?;
    loop {
        let typed = rpassword::prompt_password("code of the run (not shown): ").map_err(unread)?;
        if typed.trim().is_empty() {
            print_line("type the code shown by the first node, or press Ctrl-C to quit");
            continue;
        }
        match Secret::parse(&typed) {
            Ok(secret) => return Ok(secret),
            Err(error) => print_line(&format!("{error}; try again")),
        }
    }
}

/// Error of a code that cannot be read. Where the terminal gives Ctrl-C as a character, the
/// question ends before the signal is seen.
fn unread(why: io::Error) -> anyhow::Error {
    if why.kind() == io::ErrorKind::Interrupted {
        InterruptedError(Interruption::Interrupt).into()
    } else {
        UsageError(format!("the code cannot be read: {why}")).into()
    }
}

/// Terminal whose settings are restored on a signal until this is dropped.
struct RestoredTerminal {
    is_over: Arc<AtomicBool>,
    _signals: Signals,
}

impl RestoredTerminal {
    /// Starts to watch for signals.
    ///
    /// # Errors
    /// Returns an error if the settings of the terminal cannot be read, if signals cannot be
    /// caught, or if no thread can be started.
    fn watch() -> Result<Self, TrainError> {
        let restore =
            restoring().map_err(|why| TrainError::System { what: "the terminal", why })?;
        let is_over = Arc::new(AtomicBool::new(false));
        let over = is_over.clone();
        let signals = Signals::caught()?;
        signals.flags().watch(move |signals| {
            if over.load(Ordering::SeqCst) {
                return ControlFlow::Break(());
            }
            let Some(signal) = signals.pending() else { return ControlFlow::Continue(()) };
            restore();
            print_line(&format!("\n{}", InterruptedError(signal)));
            leave(signal.exit_code());
        })?;
        Ok(Self { is_over, _signals: signals })
    }
}

impl Drop for RestoredTerminal {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}

/// Returns a function that restores the current settings of the terminal.
#[cfg(unix)]
fn restoring() -> io::Result<impl Fn() + Send + 'static> {
    use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
    let terminal = std::fs::File::open("/dev/tty")?;
    let before = tcgetattr(&terminal)?;
    // Fails only if the terminal is gone.
    Ok(move || {
        let _ = tcsetattr(&terminal, OptionalActions::Now, &before);
    })
}

/// Windows restores its console.
#[cfg(not(unix))]
fn restoring() -> io::Result<impl Fn() + Send + 'static> {
    Ok(|| ())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::exit_code;
    use potluck_train::error::EXIT_CONFIGURATION;

    #[test]
    fn control_c_at_the_question_is_an_interruption() {
        let ended = |kind: io::ErrorKind| exit_code(&unread(kind.into()));
        assert_eq!(ended(io::ErrorKind::Interrupted), Interruption::Interrupt.exit_code());
        assert_eq!(ended(io::ErrorKind::UnexpectedEof), EXIT_CONFIGURATION);
    }
}
