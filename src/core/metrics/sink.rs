//! Sinks of events: the record on disk, charts, the terminal.

use super::{Event, MetricsError};

/// Receiver of the events of a run.
pub trait Sink {
    /// Handles one event; events are passed in the order in which they happen.
    ///
    /// # Errors
    /// Returns [`MetricsError`] if something is lost that a later run relies on; the run then
    /// ends. The failure of a chart is a warning, see [`Sinks`]; any other sink that only shows
    /// events never fails.
    fn event(&mut self, event: &Event) -> Result<(), MetricsError>;

    /// Announces that evaluations from this step on are compared with none before it.
    fn forget_evaluations(&mut self, _step: u64) {}

    /// Returns a note or a warning about the sink itself, if there is one since the last call.
    fn take_news(&mut self) -> Option<Event> {
        None
    }
}

/// The record of a run, if it is open, a chart of it, if there is one, and a sink that shows
/// events, as one. The latter two get an event only if it was recorded. A failure of the chart is
/// shown as a warning. For several charts, one of these may be the sink of another one that shows
/// events.
pub struct Sinks {
    record: Option<Box<dyn Sink>>,
    chart: Option<Box<dyn Sink>>,
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

    /// Draws later events on a chart, instead of any earlier one.
    pub fn set_chart(&mut self, chart: impl Sink + 'static) {
        self.chart = Some(Box::new(chart));
    }
}

impl From<Box<dyn Sink>> for Sinks {
    fn from(shown: Box<dyn Sink>) -> Self {
        Self { record: None, chart: None, shown }
    }
}

impl Sink for Sinks {
    fn event(&mut self, event: &Event) -> Result<(), MetricsError> {
        if let Some(record) = &mut self.record {
            record.event(event)?;
            if let Some(news) = record.take_news() {
                self.shown.event(&news)?;
            }
        }
        if let Some(chart) = &mut self.chart
            && let Err(why) = chart.event(event)
        {
            self.shown.event(&Event::Warning(why.to_string()))?;
        }
        self.shown.event(event)
    }

    fn forget_evaluations(&mut self, step: u64) {
        self.shown.forget_evaluations(step);
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
            let (Event::Note(text) | Event::Warning(text)) = event else { return Ok(()) };
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

    #[test]
    fn a_chart_gets_what_was_recorded_and_its_failures_are_warnings() {
        let seen = Rc::new(RefCell::new(Vec::new()));
        let sink = |name, fails_at| Notes { name, fails_at, seen: seen.clone() };
        let terminal: Box<dyn Sink> = Box::new(sink("terminal", ""));
        let mut sinks = Sinks::from(terminal);
        sinks.set_record(sink("file", "b"));
        sinks.set_chart(sink("chart", "c"));
        for (text, is_recorded) in [("a", true), ("b", false), ("c", true)] {
            assert_eq!(sinks.event(&Event::Note(text.into())).is_ok(), is_recorded);
        }
        let seen = seen.borrow();
        assert_eq!(seen[..4], ["file: a", "chart: a", "terminal: a", "file: c"]);
        assert!(seen[4].starts_with("terminal: chart: cannot be written"), "{}", seen[4]);
        assert_eq!(seen[5..], ["terminal: c"]);
    }
}
