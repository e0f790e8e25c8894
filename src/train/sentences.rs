//! Measure of a model of the built-in corpus: the share of sampled sentences that its grammar
//! accepts.

use std::collections::HashSet;

use super::error::TrainError;
use super::sampling::{Continuation, Sampling, next_tokens_of_all};
use crate::base::Site;
use crate::base::rng::Key;
use crate::data::{Tokenizer, world};
use crate::metrics::SentenceRecord;
use crate::model::LanguageModel;
use crate::runtime::pipelines::ForwardUnits;

/// Number of sentences that are sampled.
const SAMPLES: usize = 200;
const TEMPERATURE: f64 = 0.7;

/// Sampled lines, and their counts.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledSentences {
    /// Lines that begin where a sentence begins.
    pub lines: Vec<String>,
    /// Lines that complete each sum that the corpus does not have.
    pub held_out_sums: Vec<String>,
    pub record: SentenceRecord,
}

/// Samples sentences on all units of a group, up to `rows` of each at a time, and counts
/// those that are right. `step` is the step of the model, for the record. Returns `None` if
/// `stop`, which is called before each token, returns true.
///
/// # Errors
/// Returns `TrainError` if the tokenizer is not that of the built-in corpus, or if a device fails.
pub fn measure_sentences(
    units: ForwardUnits,
    tokenizer: &Tokenizer,
    model: LanguageModel,
    rows: &[u32],
    (step, seed): (u64, u64),
    stop: impl FnMut() -> bool,
) -> Result<Option<SampledSentences>, TrainError> {
    let mut prompts = vec![String::new(); SAMPLES];
    prompts.extend(world::held_out_sums());
    let sampling = Sampling { temperature: TEMPERATURE, top_k: 0, seed };
    let sampler = LineSampler { units, tokenizer, model, rows, sampling };
    let Some(mut lines) = sampler.sample(&prompts, stop)? else { return Ok(None) };
    let held_out_sums = lines.split_off(SAMPLES);
    let record = count(step, &lines, &held_out_sums);
    Ok(Some(SampledSentences { lines, held_out_sums, record }))
}

/// Counts sampled lines; equal lines count once.
fn count(step: u64, lines: &[String], held_out_sums: &[String]) -> SentenceRecord {
    let corpus = world::corpus();
    let known: HashSet<&str> = corpus.lines().collect();
    let distinct: HashSet<&str> = lines.iter().map(String::as_str).collect();
    let is_right = |line: &&str| world::check(line).is_ok();
    let count = |kept: &dyn Fn(&&str) -> bool| distinct.iter().filter(|l| kept(l)).count() as u64;
    SentenceRecord {
        step,
        temperature: TEMPERATURE,
        sampled: lines.len() as u64,
        distinct: distinct.len() as u64,
        right: count(&is_right),
        new: count(&|line| is_right(line) && !known.contains(line)),
        sums: count(&|line| world::is_sum(line)),
        right_sums: count(&|line| world::is_sum(line) && is_right(line)),
        held_out_sums: held_out_sums.len() as u64,
        right_held_out_sums: held_out_sums.iter().filter(|l| is_right(&l.as_str())).count() as u64,
    }
}

/// Sampler of lines, many at a time.
struct LineSampler<'a> {
    units: ForwardUnits<'a>,
    tokenizer: &'a Tokenizer,
    model: LanguageModel,
    /// The most rows of each unit.
    rows: &'a [u32],
    sampling: Sampling,
}

/// Line in progress.
struct Line {
    tokens: Vec<u32>,
    /// Key of its random numbers.
    key: Key,
    is_open: bool,
}

impl LineSampler<'_> {
    /// Continues each prompt, the beginning of a line, to the end of the line, or until the line
    /// is longer than any sentence. A line's random numbers depend on its index only, not on the
    /// number of devices or rows. Returns `None` if `stop` returns true.
    fn sample(
        &self,
        prompts: &[String],
        mut stop: impl FnMut() -> bool,
    ) -> Result<Option<Vec<String>>, TrainError> {
        let end = self.tokenizer.encode("\n")?;
        let key = Key::new(self.sampling.seed).site(Site(u32::MAX));
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
        let text = |line: &Line| self.tokenizer.decode(&line.tokens[1..]);
        Ok(Some(lines.iter().map(|line| text(line).trim_end_matches('\n').into()).collect()))
    }

    /// Appends a token to the first open lines, as many as the devices hold at a time.
    fn extend(&self, lines: &mut [Line], end: u32) -> Result<(), TrainError> {
        let capacity = self.rows.iter().map(|rows| (*rows).max(1) as usize).sum();
        let mut open: Vec<&mut Line> =
            lines.iter_mut().filter(|line| line.is_open).take(capacity).collect();
        let continuation = |line: &&mut Line| {
            let uniform = line.key.uniform(line.tokens.len() as u64);
            Continuation::new(&line.tokens, self.model.context, uniform)
        };
        let mut rest = open.iter().map(continuation);
        let of_unit = |rows: &u32| rest.by_ref().take((*rows).max(1) as usize).collect();
        let parts: Vec<Vec<Continuation>> = self.rows.iter().map(of_unit).collect();
        let next = next_tokens_of_all(self.units, &self.model, &parts, &self.sampling)?;
        for (line, token) in open.iter_mut().zip(next.into_iter().flatten()) {
            line.tokens.push(token);
            line.is_open = token != end && line.tokens.len() <= world::LONGEST_SENTENCE + 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::data::TokenizerKind;
    use crate::graph::{Plan, PlanOptions};
    use crate::model::{GptConfig, gpt};
    use crate::runtime::open::{self, OpenOptions};
    use crate::runtime::pipelines::ModelPipelines;
    use crate::runtime::workers::WorkerGroup;

    #[test]
    fn equal_sentences_count_once_and_only_right_ones_count() {
        let known = world::corpus().lines().next().unwrap().to_string();
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
            ["ten.", "eleven."].map(|sum| format!("{} {sum}", world::held_out_sums()[2])).into();
        let record = count(7, &lines.map(String::from), &held_out);
        let is_sum = u64::from(world::is_sum(&known));
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
    }

    /// CPU device with an untrained model.
    struct Untrained {
        group: WorkerGroup,
        pipelines: ModelPipelines,
        tokenizer: Tokenizer,
        model: LanguageModel,
    }

    impl Untrained {
        fn units(&self) -> ForwardUnits<'_> {
            ForwardUnits { group: &self.group, pipelines: &self.pipelines }
        }
    }

    /// Returns the CPU device with an untrained model, of up to `rows` rows.
    fn untrained(rows: usize) -> Untrained {
        let tokenizer = Tokenizer::derive(TokenizerKind::Char, world::corpus()).unwrap();
        let config = GptConfig {
            vocabulary: tokenizer.vocabulary(),
            context: 8,
            layers: 1,
            heads: 2,
            width: 8,
            bias: false,
            dropout: 0.0,
            tie: true,
            activation: crate::graph::Unary::Gelu,
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
            let measured =
                measure_sentences(on.units(), &on.tokenizer, on.model, &rows, (5, seed), || false);
            measured.unwrap().unwrap()
        };
        let few = measure(3, 1);
        assert_eq!((few.lines.len(), few.held_out_sums.len()), (200, 10));
        assert_eq!((few.record.step, few.record.sampled, few.record.right), (5, 200, 0));
        assert!(few.record.distinct > 190);
        for (line, prompt) in few.held_out_sums.iter().zip(world::held_out_sums()) {
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
        let measured = measure_sentences(on.units(), &on.tokenizer, on.model, &[4], (0, 1), stop);
        assert_eq!(measured.unwrap(), None);
        assert_eq!(calls, 4);
    }
}
