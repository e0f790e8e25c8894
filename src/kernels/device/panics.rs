//! Panics that are caught and become errors, without output of the default panic hook.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::{Arc, Once, OnceLock};
use std::thread;

/// Text of a caught panic with its place, known before the panic unwinds; shared by threads.
pub type PanicText = Arc<OnceLock<String>>;

thread_local! {
    /// Target of the text of a panic on this thread; `None` if panics are not caught.
    static CATCHER: RefCell<Option<PanicText>> = const { RefCell::new(None) };
}

/// Runs `job` and returns its result, or `None` if it panics. Then `text` has the message and the
/// place, and nothing is printed on stderr. Changes by `job` may be half done.
pub fn catch_quietly<R>(text: &PanicText, job: impl FnOnce() -> R) -> Option<R> {
    install_hook();
    let outer = CATCHER.replace(Some(text.clone()));
    let result = panic::catch_unwind(AssertUnwindSafe(job));
    CATCHER.set(outer);
    match result {
        Ok(result) => Some(result),
        Err(payload) => {
            // A panic that another thread has handed on has run no hook here.
            text.get_or_init(|| message_of(&*payload).to_string());
            None
        }
    }
}

/// Puts a hook in front of the current one, once per process.
fn install_hook() {
    static HOOK: Once = Once::new();
    // A thread that panics cannot change the hook.
    if thread::panicking() {
        return;
    }
    HOOK.call_once(|| {
        let previous = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let catcher = CATCHER.try_with(|catcher| catcher.borrow().clone()).ok().flatten();
            match catcher {
                // Only the first text counts: later panics follow from it.
                Some(text) => drop(text.set(described(info))),
                None => previous(info),
            }
        }));
    });
}

fn message_of(payload: &(dyn Any + Send)) -> &str {
    match payload.downcast_ref::<String>() {
        Some(text) => text,
        None => payload.downcast_ref::<&str>().copied().unwrap_or("no message"),
    }
}

fn described(info: &PanicHookInfo) -> String {
    let message = message_of(info.payload());
    match info.location() {
        Some(at) => format!("{message}, at {}:{}", at.file(), at.line()),
        None => message.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// The hook of the process is replaced before the first panic is caught, so this counts what
    /// would be printed; panics of other tests' threads do not count.
    #[test]
    fn a_caught_panic_is_a_text_and_prints_nothing() {
        static PRINTED: AtomicUsize = AtomicUsize::new(0);
        install_hook();
        let (me, wrapped) = (thread::current().id(), panic::take_hook());
        panic::set_hook(Box::new(move |info| {
            let is_caught = CATCHER.with(|catcher| catcher.borrow().is_some());
            if thread::current().id() == me && !is_caught {
                PRINTED.fetch_add(1, Ordering::Relaxed);
            } else {
                wrapped(info);
            }
        }));
        let text = PanicText::default();
        assert_eq!(catch_quietly(&text, || 7), Some(7));
        assert_eq!(catch_quietly(&text, || -> u32 { panic!("planted {}", 1) }), None);
        let line = text.get().unwrap();
        assert!(line.starts_with("planted 1, at ") && line.contains("panics.rs:"), "{line}");
        assert_eq!(PRINTED.load(Ordering::Relaxed), 0);
        // Afterwards, panics that are not caught quietly are printed as usual.
        panic::catch_unwind(|| panic!("planted 2")).unwrap_err();
        assert_eq!(PRINTED.load(Ordering::Relaxed), 1);
    }
}
