//! A run's events, as a sink of the caller's gets them.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use potluck_core::faults::Faults;
use potluck_core::metrics::{Event, MeasuredValue, MetricsError, Sink};
use potluck_train::config::read;
use potluck_train::run::{Run, RunOptions, train};
use potluck_train::spec::RunSpec;

const CONFIGURATION: &str = "\
model = { layers = 1, heads = 2, width = 16, context = 8 }
train = { batch = 4, steps = 4, eval_every = 2, checkpoint_every = 3 }
parallel = { devices = 'cpu*2', shares = [3, 1] }
";

/// Sink that keeps a word for each event, and its step.
struct ConfigEnum(Rc<RefCell<Vec<String>>>);

impl Sink for ConfigEnum {
    fn event(&mut self, event: &Event) -> Result<(), MetricsError> {
        let word = match event {
            Event::Note(_) | Event::Evaluating { .. } | Event::Saving { .. } | Event::Measuring => {
                return Ok(());
            }
            Event::Warning(text) => format!("warning {text}"),
            Event::Tuning { device, .. } => format!("tuning {device}"),
            Event::Started { done, steps, .. } => format!("started {done} of {steps}"),
            Event::Step(step) => {
                assert!(step.loss.is_finite() && step.skipped.is_none());
                let shares: Vec<u64> = step.ranks.iter().map(|rank| rank.share).collect();
                assert!(step.ranks.iter().all(|rank| rank.name.starts_with("cpu")));
                format!("step {} {shares:?}", step.step)
            }
            Event::Evaluation(evaluation) => {
                format!("evaluation {}, best: {}", evaluation.step, evaluation.is_best)
            }
            Event::Checkpoint { step } => format!("checkpoint {step}"),
            Event::Measure(measure) => {
                let sampled = measure.values.iter().find(|(name, _)| name == "sampled");
                let Some((_, MeasuredValue::Count(sampled))) = sampled else {
                    panic!("{measure:?}")
                };
                format!("{} {}: {sampled}", measure.name, measure.step)
            }
            Event::Shares(record) => record.sentence(),
            Event::Cost(cost) => format!("cost of {} ranks", cost.ranks.len()),
            Event::Ended => "ended".into(),
            Event::Opening => "opening".into(),
        };
        self.0.borrow_mut().push(word);
        Ok(())
    }
}

#[test]
fn events_reach_the_sink_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let file = Some((Path::new("run.toml"), CONFIGURATION));
    let config = read::read(None, file, &[]).unwrap().config;
    let options = RunOptions {
        continued: None,
        out: directory.path().join("run"),
        unsaved: Vec::new(),
        trace: None,
        retune: false,
        nodes: None,
        signals: Default::default(),
        init: None,
        add_tokens: None,
        files: Default::default(),
        faults: Faults::none(),
    };
    let words = Rc::new(RefCell::new(Vec::new()));
    let sink = Box::new(ConfigEnum(words.clone()));
    let mut run = Run::start(RunSpec::new(&config), options, None, sink).unwrap();
    train(&mut run).unwrap();
    let expected = [
        "started 0 of 4",
        "checkpoint 0",
        "step 1 [3, 1]",
        "step 2 [3, 1]",
        "evaluation 2, best: true",
        "checkpoint 2",
        "step 3 [3, 1]",
        "checkpoint 3",
        "step 4 [3, 1]",
        "evaluation 4, best: true",
        "checkpoint 4",
        "sentences 4: 200",
        "ended",
    ];
    assert_eq!(*words.borrow(), expected);
    let record = std::fs::read_to_string(directory.path().join("run/metrics.jsonl")).unwrap();
    assert_eq!(record.lines().count(), 7, "{record}");
}
