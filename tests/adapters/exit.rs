//! End of a process of tests: without the exit handlers of drivers.

use std::process::{Command, abort};

/// Names the process that the test starts.
const CHILD: &str = "POTLUCK_TEST_EXIT";

/// As drivers do, the child has a handler that ends it with a fault.
#[test]
fn a_process_of_tests_ends_without_the_exit_handlers_of_drivers() {
    unsafe extern "C" {
        fn atexit(handler: extern "C" fn()) -> std::ffi::c_int;
    }
    extern "C" fn fault() {
        abort();
    }
    if std::env::var_os(CHILD).is_some() {
        let _turn = crate::common::turn();
        // SAFETY: it is the C library's, with this type.
        assert_eq!(unsafe { atexit(fault) }, 0);
        return;
    }
    let name = "exit::a_process_of_tests_ends_without_the_exit_handlers_of_drivers";
    let this = std::env::current_exe().unwrap();
    let ended = Command::new(this).args(["--exact", name]).env(CHILD, "1").output().unwrap();
    let text = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success(), "{}: {text}", ended.status);
    assert!(text.contains("1 passed"), "{text}");
}
