//! Measure of a model of the built-in corpus: the fraction of sampled sentences accepted by its
//! grammar.

use std::collections::HashSet;
use std::fmt;

use crate::error::TrainError;
use crate::runtime::pipelines::ForwardUnits;
use crate::sampling::{Continuation, Sampling, next_tokens_of_all};
use crate::task::FinalMeasure;
use potluck_core::Site;
use potluck_core::metrics::{MeasureRecord, MeasuredValue};
use potluck_core::rng::Key;
use potluck_data::{Tokenizer, builtin};
use potluck_graph::model::LanguageModel;

/// Name of the measure.
pub const NAME: &str = "sentences";
const SAMPLES: usize = 200;
const TEMPERATURE: f64 = 0.7;

/// Sampled lines, and their counts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SampledSentences {
    /// Lines that start at the start of a sentence.
    pub lines: Vec<String>,
    /// Lines that complete each sum that is not in the corpus.
    pub held_out_sums: Vec<String>,
    pub record: SentenceRecord,
}

impl SampledSentences {
    /// Converts the lines to the measure of a task: the counts, with all lines as its text.
    pub(crate) fn into_measure(self) -> FinalMeasure {
        let mut text = String::new();
        for line in self.lines.iter().chain(&self.held_out_sums) {
            text += line;
            text += "\n";
        }
        FinalMeasure {
            summary: self.record.to_string(),
            record: self.record.measure(),
            text: Some(text),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SentenceRecord {
    /// Number of steps done before the measure.
    pub step: u64,
    pub temperature: f64,
    /// Number of sampled sentences.
    pub sampled: u64,
    /// Number of distinct ones; the following counts refer to these.
    pub distinct: u64,
    /// Sentences of the corpus's grammar, including sums with the right result.
    pub right: u64,
    /// Right sentences that are not in the corpus.
    pub new: u64,
    pub sums: u64,
    pub right_sums: u64,
    /// Sums that are not in the corpus, whose beginnings were given as prompts; not included in the
    /// counts above.
    pub held_out_sums: u64,
    pub right_held_out_sums: u64,
}

/// Sentence for the user. Percentages are rounded down, so that 100 means all.
impl fmt::Display for SentenceRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = 100 * self.right / self.distinct.max(1);
        let Self { temperature, sampled, distinct, right, new, sums, right_sums, .. } = self;
        let (held_out, right_held_out) = (self.held_out_sums, self.right_held_out_sums);
        write!(
            f,
            "{percent} % of the sentences are right ({right} of {distinct} different ones, \
             {sampled} sampled at temperature {temperature}; {new} of the right ones are not in \
             the corpus; sums {right_sums} of {sums}, held-out sums {right_held_out} of \
             {held_out})"
        )
    }
}

impl SentenceRecord {
    /// Counts by name, in the order of the record's line.
    fn measure(&self) -> MeasureRecord {
        let counts = [
            ("sampled", self.sampled),
            ("distinct", self.distinct),
            ("right", self.right),
            ("new", self.new),
            ("sums", self.sums),
            ("right_sums", self.right_sums),
            ("held_out_sums", self.held_out_sums),
            ("right_held_out_sums", self.right_held_out_sums),
        ];
        let mut values = vec![("temperature".into(), MeasuredValue::Real(self.temperature))];
        for (name, count) in counts {
            values.push((name.into(), MeasuredValue::Count(count)));
        }
        MeasureRecord { name: NAME.into(), step: self.step, values }
    }
}

/// Request for a measure of sampled sentences.
#[derive(Clone, Copy)]
pub(crate) struct SentenceRequest<'a> {
    pub units: ForwardUnits<'a>,
    pub tokenizer: &'a Tokenizer,
    pub model: LanguageModel,
    /// Largest number of rows in a pass of each unit.
    pub rows: &'a [u32],
    /// Step of the model, for the record.
    pub step: u64,
    pub seed: u64,
}

/// Samples sentences on all units of a group, and counts the right ones. Returns `None` if `stop`,
/// which is called before each token, returns true.
///
/// # Errors
/// Returns `TrainError` if the tokenizer is not the built-in corpus's, or if a device fails.
pub(crate) fn measure_sentences(
    request: &SentenceRequest,
    stop: impl FnMut() -> bool,
) -> Result<Option<SampledSentences>, TrainError> {
    let mut prompts = vec![String::new(); SAMPLES];
    prompts.extend(builtin::held_out_sums());
    let Some(mut lines) = request.sample(&prompts, stop)? else { return Ok(None) };
    let held_out_sums = lines.split_off(SAMPLES);
    let record = count(request.step, &lines, &held_out_sums);
    Ok(Some(SampledSentences { lines, held_out_sums, record }))
}

/// Counts sampled lines; equal lines count once.
fn count(step: u64, lines: &[String], held_out_sums: &[String]) -> SentenceRecord {
    let corpus = builtin::corpus();
    let known: HashSet<&str> = corpus.lines().collect();
    let distinct: HashSet<&str> = lines.iter().map(String::as_str).collect();
    let mut record = SentenceRecord {
        step,
        temperature: TEMPERATURE,
        sampled: lines.len() as u64,
        distinct: distinct.len() as u64,
        right: 0,
        new: 0,
        sums: 0,
        right_sums: 0,
        held_out_sums: held_out_sums.len() as u64,
        right_held_out_sums: 0,
    };
    for line in distinct {
        let is_right = builtin::check(line).is_ok();
        if is_right {
            record.right += 1;
            record.new += u64::from(!known.contains(line));
        }
        if builtin::is_sum(line) {
            record.sums += 1;
            record.right_sums += u64::from(is_right);
        }
    }
    for line in held_out_sums {
        record.right_held_out_sums += u64::from(builtin::check(line).is_ok());
    }
    record
}

struct Line {
    tokens: Vec<u32>,
    /// Key of the line's random numbers.
    key: Key,
    is_open: bool,
}

impl SentenceRequest<'_> {
    /// Continues each prompt, the start of a line, to the end of the line, or until the line is
    /// longer than any sentence. A line's random numbers depend only on its index, not on the
    /// number of devices or rows. Returns `None` if `stop` returns true.
    fn sample(
        &self,
        prompts: &[String],
        mut stop: impl FnMut() -> bool,
    ) -> Result<Option<Vec<String>>, TrainError> {
        let end = self.tokenizer.encode("\n")?;
        let key = Key::new(self.seed).site(Site(u32::MAX));
        let mut lines = Vec::with_capacity(prompts.len());
        for (prompt, index) in prompts.iter().zip(1..) {
            let tokens = self.tokenizer.encode(format!("\n{prompt}"))?;
            lines.push(Line { tokens, key: key.step(index), is_open: true });
        }
        while lines.iter().any(|line| line.is_open) {
            if stop() {
                return Ok(None);
            }
            self.extend(&mut lines, end[0])?;
        }
        let mut texts = Vec::with_capacity(lines.len());
        for line in lines {
            let text = self.tokenizer.decode(&line.tokens[1..]);
            texts.push(text.trim_end_matches('\n').to_string());
        }
        Ok(Some(texts))
    }

    /// Appends a token to the first open lines, as many as the devices hold in one pass.
    fn extend(&self, lines: &mut [Line], end: u32) -> Result<(), TrainError> {
        let capacity = self.rows.iter().map(|rows| (*rows).max(1) as usize).sum();
        let mut open: Vec<&mut Line> =
            lines.iter_mut().filter(|line| line.is_open).take(capacity).collect();
        let mut rest = open.iter();
        let mut parts = Vec::with_capacity(self.rows.len());
        for rows in self.rows {
            let mut of_unit = Vec::new();
            for line in rest.by_ref().take((*rows).max(1) as usize) {
                let uniform = line.key.uniform(line.tokens.len() as u64);
                of_unit.push(Continuation::new(&line.tokens, self.model.context, uniform));
            }
            parts.push(of_unit);
        }
        let vocabulary = self.tokenizer.vocabulary();
        let sampling =
            Sampling { temperature: TEMPERATURE, ..Sampling::new(vocabulary, self.seed) };
        let what = "tokens of sentences";
        let next = next_tokens_of_all(self.units, &self.model, &parts, &sampling, what)?;
        for (line, token) in open.iter_mut().zip(next.into_iter().flatten()) {
            line.tokens.push(token);
            line.is_open = token != end && line.tokens.len() <= builtin::LONGEST_SENTENCE + 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::runtime::open::{self, OpenOptions};
    use crate::runtime::pipelines::ModelPipelines;
    use crate::runtime::workers::WorkerGroup;
    use potluck_data::TokenizerKind;
    use potluck_graph::model::{GptConfig, gpt};
    use potluck_graph::{Plan, PlanOptions};

    #[test]
    fn equal_sentences_count_once_and_only_right_ones_count() {
        let known = builtin::corpus().lines().next().unwrap().to_string();
        let new = "Yesterday these hungry children followed this big bird behind the school.";
        let lines = [
            known.as_str(),
            known.as_str(),
            new,
            "The cat sleep.",
            "Two plus two is four.",
            "Two plus two is five.",
            "",
        ];
        let held_out: Vec<String> =
            ["ten.", "eleven."].map(|sum| format!("{} {sum}", builtin::held_out_sums()[2])).into();
        let record = count(7, &lines.map(String::from), &held_out);
        let is_sum = u64::from(builtin::is_sum(&known));
        let expected = SentenceRecord {
            step: 7,
            temperature: 0.7,
            sampled: 7,
            distinct: 6,
            right: 3,
            new: 1,
            sums: 2 + is_sum,
            right_sums: 1 + is_sum,
            held_out_sums: 2,
            right_held_out_sums: 1,
        };
        assert_eq!(record, expected);
        assert!(
            record.to_string().starts_with("50 % of the sentences are right (3 of 6 different")
        );
        let line = SentenceRecord { sums: 2, right_sums: 1, ..record }.measure().json();
        assert_eq!(
            line.to_string(),
            concat!(
                r#"{"step":7,"temperature":0.7,"sampled":7,"distinct":6,"right":3,"new":1,"#,
                r#""sums":2,"right_sums":1,"held_out_sums":2,"right_held_out_sums":1}"#
            )
        );
    }

    struct Untrained {
        group: WorkerGroup,
        pipelines: ModelPipelines,
        tokenizer: Tokenizer,
        model: LanguageModel,
    }

    impl Untrained {
        fn request<'a>(&'a self, rows: &'a [u32], step: u64, seed: u64) -> SentenceRequest<'a> {
            SentenceRequest {
                units: ForwardUnits { group: &self.group, pipelines: &self.pipelines },
                tokenizer: &self.tokenizer,
                model: self.model,
                rows,
                step,
                seed,
            }
        }
    }

    fn untrained(rows: usize) -> Untrained {
        let tokenizer = Tokenizer::derive(TokenizerKind::Char, builtin::corpus()).unwrap();
        let config = GptConfig {
            vocabulary: tokenizer.vocabulary(),
            context: 8,
            positions: 8,
            layers: 1,
            heads: 2,
            width: 8,
            bias: false,
            dropout: 0.0,
            tie: true,
            activation: potluck_graph::Unary::Gelu,
        };
        let plan = Plan::new(gpt(&config).unwrap(), PlanOptions::new(rows));
        let model = LanguageModel::of(&plan.graph).unwrap();
        let opened = open::open("cpu", plan.clone(), 0, &OpenOptions::default()).unwrap();
        let pipelines = ModelPipelines::of_replicas(Arc::new(plan), 1);
        let group = WorkerGroup::single(opened.driver).unwrap();
        group.run_on_all("initialization", |_, device| device.initialize(3)).unwrap();
        Untrained { group, pipelines, tokenizer, model }
    }

    #[test]
    fn an_untrained_model_scores_nothing_on_any_number_of_rows() {
        let measure = |rows: usize, seed| {
            let on = untrained(rows);
            let rows = [rows as u32];
            measure_sentences(&on.request(&rows, 5, seed), || false).unwrap().unwrap()
        };
        let few = measure(3, 1);
        assert_eq!((few.lines.len(), few.held_out_sums.len()), (200, 10));
        assert_eq!((few.record.step, few.record.sampled, few.record.right), (5, 200, 0));
        assert!(few.record.distinct > 190);
        for (line, prompt) in few.held_out_sums.iter().zip(builtin::held_out_sums()) {
            assert!(line.starts_with(&prompt), "{line}");
        }
        assert_eq!(measure(64, 1).lines, few.lines);
        assert_ne!(measure(64, 2).lines, few.lines);
    }

    #[test]
    fn a_measure_can_be_stopped() {
        let on = untrained(4);
        let mut calls = 0;
        let stop = || {
            calls += 1;
            calls > 3
        };
        assert_eq!(measure_sentences(&on.request(&[4], 0, 1), stop).unwrap(), None);
        assert_eq!(calls, 4);
    }
}
