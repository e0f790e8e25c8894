//! End of a process without the exit handlers of its drivers.

/// Makes the end of the process, by the end of `main` or by [`std::process::exit`], skip the exit
/// handlers registered so far: handlers of drivers destroy objects that their threads still use.
/// Mesa's GL has ended processes with a segmentation fault that way on a busy machine. Found
/// adapters stay open until the end of the process, so they are not closed before.
///
/// Handlers run in the reverse order of their registration, and drivers register some late; so this
/// is called after the last use of a device, and may be called again. Buffered output of C
/// libraries is not written; output of Rust is. Does nothing except on Linux with glibc. A program
/// ends with `leave` of `potluck-train` instead.
pub fn skip_exit_handlers() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        use std::ffi::{c_int, c_void};

        unsafe extern "C" {
            fn on_exit(handler: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
            fn _exit(status: c_int) -> !;
        }
        extern "C" fn end(status: c_int, _: *mut c_void) {
            // SAFETY: it has no preconditions, and does not return.
            unsafe { _exit(status) }
        }
        // SAFETY: both are glibc's, with these types. The handler is called with a status at the
        // end of the process, while its code is still loaded. Without memory to register it, the
        // process ends with the exit handlers.
        unsafe { on_exit(end, std::ptr::null_mut()) };
    }
}
