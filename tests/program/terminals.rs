//! The question for the code of a run on a terminal, which a pseudo-terminal stands for.

use std::fs::File;
use std::io::Read;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};

use crate::process::{Desk, send_signal};

/// Opens a terminal, and the side of it that a person has.
pub fn pseudo_terminal() -> (File, File) {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
    let terminal = File::options().read(true).write(true).open(name).unwrap();
    (File::from(master), terminal)
}

/// Waits until a terminal shows what is typed, or does not.
fn wait_for_echo(terminal: &File, shows: bool) {
    let started = Instant::now();
    while tcgetattr(terminal).unwrap().local_modes.contains(LocalModes::ECHO) != shows {
        assert!(started.elapsed() < Duration::from_secs(20), "echo stays {}", !shows);
        thread::sleep(Duration::from_millis(5));
    }
}

/// Returns what was written to a terminal that nobody has open any more.
fn all_that_was_shown(mut master: File) -> String {
    let mut shown = Vec::new();
    // A read returns what one write wrote, or more; behind the last one, Linux returns EIO.
    let end = master.read_to_end(&mut shown);
    assert_eq!(end.unwrap_err().raw_os_error(), Some(Errno::IO.raw_os_error()));
    String::from_utf8_lossy(&shown).into_owned()
}

#[test]
fn signal_at_question_restores_terminal() {
    let desk = Desk::new();
    for (signal, code) in [("INT", 130), ("TERM", 75)] {
        let (master, terminal) = pseudo_terminal();
        let before = tcgetattr(&terminal).unwrap();
        assert!(before.local_modes.contains(LocalModes::ECHO));
        let line = desk.command("join 127.0.0.1:9");
        // The terminal is the process's own, as in a shell.
        let mut child = Command::new("setsid")
            .args(["--ctty", "--"])
            .arg(line.get_program())
            .args(line.get_args())
            .stdin(terminal.try_clone().unwrap())
            .stdout(Stdio::null())
            .stderr(terminal.try_clone().unwrap())
            .spawn()
            .unwrap();
        wait_for_echo(&terminal, false);
        send_signal(child.id(), signal);
        assert_eq!(child.wait().unwrap().code(), Some(code));
        wait_for_echo(&terminal, true);
        assert_eq!(tcgetattr(&terminal).unwrap().local_modes, before.local_modes);
        drop(terminal);
        let shown = all_that_was_shown(master);
        assert!(shown.contains("code of the run (not shown): "), "{shown}");
        assert!(shown.contains("before the run began; nothing was saved"), "{shown}");
    }
}

/// A terminal on which no progress bar can be drawn.
#[test]
fn dumb_terminal_gets_lines_of_steps() {
    let desk = Desk::new();
    let (master, terminal) = pseudo_terminal();
    let line = "train tiny.toml --data text.txt --devices cpu --out run --steps 3 --log-every 1";
    let mut command = desk.command(line);
    command.env("TERM", "dumb").stdout(Stdio::null()).stderr(terminal.try_clone().unwrap());
    assert!(command.status().unwrap().success());
    drop((command, terminal));
    let shown = all_that_was_shown(master);
    assert!(shown.contains("step 3/3"), "{shown}");
}
