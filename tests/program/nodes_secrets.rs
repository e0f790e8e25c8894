//! Sources of the secret of a run over several machines.
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::node_processes::{Host, LINE, desk, host_with, write_secret};
use crate::process::{Desk, finish};

#[test]
fn secret_without_terminal_not_made() {
    let desk = Desk::new();
    for line in ["train tiny.toml --nodes 2", "bench collectives --tiny --nodes 2"] {
        let ran = desk.run(&format!("{line} --listen 127.0.0.1:0")).ended(78);
        let error = ran.line("error:");
        assert!(
            error.contains("--secret-file") && error.contains("potluck secret --out"),
            "{error}"
        );
        assert!(!ran.err.contains("the code"), "{}", ran.err);
    }
}

#[test]
fn secret_out_is_new_file_of_owner() {
    let desk = Desk::new();
    let ran = desk.run("secret --out code").ok();
    let code = fs::read_to_string(desk.path("code")).unwrap();
    assert_eq!((code.trim().len(), ran.out.as_str()), (34, ""), "{code}");
    assert!(!ran.err.contains(code.trim()));
    let mode = fs::metadata(desk.path("code")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let again = desk.run("secret --out code").ended(78);
    assert!(again.line("error:").contains("code: cannot be made: "), "{}", again.err);
    assert_eq!(fs::read_to_string(desk.path("code")).unwrap(), code);
}

/// A service manager's directory, an open descriptor, and a file that its group may read.
#[test]
fn secret_of_supervisor_is_taken() {
    let desk = desk();
    let code = fs::read_to_string(desk.path("code")).unwrap();
    fs::create_dir(desk.path("credentials")).unwrap();
    write_secret(&desk, "credentials/potluck", &code);
    // The mode of a file that a service may read by an access list alone.
    let read = fs::Permissions::from_mode(0o440);
    fs::set_permissions(desk.path("credentials/potluck"), read.clone()).unwrap();
    let line = format!("{LINE} --devices cpu --set parallel.shares=1,1,1,1 --batch 4");
    let mut host = host_with(&desk, 4, "", &line);
    let address = host.address.clone();
    let by_directory = desk
        .command(&format!("join {address} --devices cpu"))
        .env("CREDENTIALS_DIRECTORY", desk.path("credentials"))
        .spawn()
        .unwrap();
    host.wait_for("2 of 4 nodes here");
    fs::set_permissions(desk.path("code"), read).unwrap();
    let refused = desk.run(&format!("join {address} --secret-file code --devices cpu")).ended(78);
    assert!(refused.line("error:").contains("--secret-group-readable"), "{}", refused.err);
    let flags = "--secret-file code --secret-group-readable";
    let of_group = desk.command(&format!("join {address} --devices cpu {flags}")).spawn().unwrap();
    host.wait_for("3 of 4 nodes here");
    let by_descriptor = desk
        .command(&format!("join {address} --devices cpu --secret-fd 0"))
        .stdin(fs::File::open(desk.path("credentials/potluck")).unwrap())
        .spawn()
        .unwrap();
    host.finish().ok();
    for node in [by_directory, of_group, by_descriptor] {
        finish(node, "a node").ok();
    }
}

/// Ends at once: nothing is asked where there is nobody.
#[test]
fn secret_fd_not_open_is_named() {
    let desk = Desk::new();
    let child = desk.command("join 127.0.0.1:9 --secret-fd 99").spawn().unwrap();
    let ran = Host::started(child).finish().ended(78);
    assert!(ran.line("error:").contains("/dev/fd/99"), "{}", ran.err);
}
