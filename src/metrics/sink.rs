//! Sinks of events: the record on disk, the terminal.

use super::{Event, MetricsError};

/// Receiver of the events of a run.
pub trait Sink {
    /// Handles one event; events come in the order in which they happen.
    ///
    /// # Errors
    /// Returns [`MetricsError`] if something is lost that a later run relies on; the run then
    /// ends. A sink that only shows events never fails.
    fn event(&mut self, event: &Event) -> Result<(), MetricsError>;
}

/// The record of a run, if it is open, and a sink that shows it, as one. The latter gets an event
/// only if it was recorded.
pub struct Sinks {
    record: Option<Box<dyn Sink>>,
    shown: Box<dyn Sink>,
}

impl Sinks {
    /// Records later events.
    pub fn set_record(&mut self, record: impl Sink + 'static) {
        self.record = Some(Box::new(record));
    }

    /// Closes the record, if it is open.
    pub fn close_record(&mut self) {
        self.record = None;
    }
}

impl From<Box<dyn Sink>> for Sinks {
    fn from(shown: Box<dyn Sink>) -> Self {
        Self { record: None, shown }
    }
}

impl Sink for Sinks {
    fn event(&mut self, event: &Event) -> Result<(), MetricsError> {
        if let Some(record) = &mut self.record {
            record.event(event)?;
        }
        self.shown.event(event)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::io;
    use std::rc::Rc;

    use super::*;

    /// Sink that keeps the notes it gets, and fails at one of them.
    struct Notes {
        name: &'static str,
        fails_at: &'static str,
        seen: Rc<RefCell<Vec<String>>>,
    }

    impl Sink for Notes {
        fn event(&mut self, event: &Event) -> Result<(), MetricsError> {
            let Event::Note(text) = event else { return Ok(()) };
            if text == self.fails_at {
                let why = io::ErrorKind::StorageFull.into();
                return Err(MetricsError::Write { path: self.name.into(), why });
            }
            self.seen.borrow_mut().push(format!("{}: {text}", self.name));
            Ok(())
        }
    }

    #[test]
    fn sinks_get_events_in_order_and_only_what_those_before_them_took() {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let sink = |name, fails_at| Notes { name, fails_at, seen: seen.clone() };
        let terminal: Box<dyn Sink> = Box::new(sink("terminal", ""));
        let mut sinks = Sinks::from(terminal);
        let note = |sinks: &mut Sinks, text: &str| sinks.event(&Event::Note(text.into()));
        note(&mut sinks, "a").unwrap();
        sinks.set_record(sink("file", "b"));
        assert!(note(&mut sinks, "b").is_err());
        note(&mut sinks, "c").unwrap();
        sinks.close_record();
        note(&mut sinks, "d").unwrap();
        let expected = ["terminal: a", "file: c", "terminal: c", "terminal: d"];
        assert_eq!(*seen.borrow(), expected);
    }
}
