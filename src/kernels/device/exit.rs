//! End of a process without the exit handlers of its drivers.

/// Makes a process that ends, by the end of `main` or by [`std::process::exit`], do so without the
/// exit handlers registered so far: those of drivers, which take down what their threads still use.
/// Mesa's GL has ended processes with a segmentation fault that way on a busy machine. Found
/// adapters stay open as long as the process, so nothing of it is closed before.
///
/// Handlers run in the reverse order of their registration, and drivers register some late; so this
/// is called after the last use of a device, and may be called again. Buffered output of C
/// libraries is not written; that of Rust is. Does nothing but on Linux with glibc. A program of
/// its own ends with `leave` of `potluck-train` instead.
pub fn skip_exit_handlers() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        use std::ffi::{c_int, c_void};

        unsafe extern "C" {
            fn on_exit(handler: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
            fn _exit(status: c_int) -> !;
        }
        extern "C" fn end(status: c_int, _: *mut c_void) {
            // SAFETY: it has no preconditions, and returns to nobody.
            unsafe { _exit(status) }
        }
        // SAFETY: both are glibc's, with these types. The handler is called with a status at the
        // end of the process, in which functions stay where they are. Where there is no memory for
        // it, the process ends as it would have.
        unsafe { on_exit(end, std::ptr::null_mut()) };
    }
}
