//! Sampling of the next tokens of texts from a model, several texts in one forward pass.

use std::borrow::Cow;
use std::ops::Range;

use super::error::TrainError;
use crate::runtime::pipelines::{ForwardUnits, OutputPass};
use crate::runtime::step::{Inputs, NextStates};
use potluck_core::HostTensor;
use potluck_graph::model::{CacheInputs, LanguageModel};
use potluck_graph::{Graph, IGNORE_INDEX};

/// Options for drawing tokens from logits, applied in the order of the fields, as in transformers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides positive logits, and multiplies negative logits, of tokens that the text contains
    /// (Keskar et al. 2019); 1: unchanged.
    pub repetition_penalty: f64,
    /// Divides the logits; 0 selects the most likely token.
    pub temperature: f64,
    /// Number of most likely tokens to draw from; 0: all.
    pub top_k: usize,
    /// Draws only from the most likely tokens whose probabilities add up to at least this value
    /// (Holtzman et al. 2019), at least one; 1: all.
    pub top_p: f64,
    /// Draws only from tokens whose probability is at least this fraction of the highest one; 0:
    /// all.
    pub min_p: f64,
    /// Number of tokens that the tokenizer has; a model may know more, which are never drawn.
    pub vocabulary: usize,
    pub seed: u64,
}

impl Sampling {
    /// Returns options that draw from the unmodified probabilities of the model.
    pub fn new(vocabulary: usize, seed: u64) -> Self {
        Self {
            repetition_penalty: 1.0,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            vocabulary,
            seed,
        }
    }
}

/// Text to be continued by one token: a row of a forward pass.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Continuation {
    /// Last tokens of the text, at least one and at most `context`.
    window: Vec<u32>,
    /// Index of the text among those whose keys and values the device caches.
    sequence: usize,
    /// Tokens whose repetition is penalized.
    said: Vec<u32>,
    /// Random number that selects the token: uniform in `[0, 1)`.
    uniform: f64,
}

impl Continuation {
    /// Creates the row that continues `tokens` (at least one), whose end the model sees; see
    /// [`window_start`].
    pub fn new(tokens: &[u32], context: usize, uniform: f64) -> Self {
        let window = tokens[window_start(tokens.len(), context)..].to_vec();
        Self { window, sequence: 0, said: Vec::new(), uniform }
    }

    /// Sets the index of the text in its pass.
    pub fn of_sequence(self, sequence: usize) -> Self {
        Self { sequence, ..self }
    }

    /// Sets the tokens whose repetition is penalized.
    pub fn penalizing(self, tokens: &[u32]) -> Self {
        Self { said: tokens.to_vec(), ..self }
    }

    fn last(&self) -> usize {
        self.window.len() - 1
    }
}

/// First token of a text of this length that the model sees. When the `context` is full, the first
/// half is dropped, and a cache of keys and values is computed anew for the rest. This happens once
/// per half context, and the model sees the same tokens without a cache.
fn window_start(tokens: usize, context: usize) -> usize {
    let dropped = context.div_ceil(2);
    tokens.saturating_sub(context).div_ceil(dropped) * dropped
}

/// Texts about which a unit of a worker group stores computed values.
#[derive(Debug, Default)]
pub struct TextMemory {
    /// States after the texts, for a model that carries them; zeros if empty.
    pub(crate) states: NextStates,
    /// Cached tokens, by sequence of the cache of keys and values.
    cached: Vec<Vec<u32>>,
}

/// Next token of each row from one unit of a worker group: a device that holds the model, or a
/// pipeline. A model that carries its states from token to token starts with the states in
/// `memory`, and stores the states after the texts there. A model with a cache computes only the
/// tokens that are not cached.
///
/// # Errors
/// Returns `TrainError` if a device fails.
pub(crate) fn next_tokens_of(
    units: ForwardUnits,
    unit: usize,
    model: &LanguageModel,
    rows: &[Continuation],
    memory: &mut TextMemory,
    sampling: &Sampling,
) -> Result<Vec<u32>, TrainError> {
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let logits = if let Some(cache) = model.cache {
        CachedPass { units, unit, model, cache }.logits(rows, &mut memory.cached)?
    } else {
        // A pass over a whole window begins anew, and ends behind what fills the window up.
        let none = NextStates::default();
        let before = if model.goes_by_token { &memory.states } else { &none };
        let pass = pass(units.pipelines.graph(), model, rows, before);
        let (logits, next) = units.output_parts(A_TOKEN, unit, pass)?;
        if model.goes_by_token {
            memory.states = next;
        }
        logits
    };
    Ok(draw_rows(&logits, model, rows, sampling))
}

/// Name, for errors, of a pass that computes tokens.
const A_TOKEN: &str = "a token";

/// State of passes over single tokens on a unit with caches of keys and values.
struct CachedPass<'a> {
    units: ForwardUnits<'a>,
    unit: usize,
    model: &'a LanguageModel,
    cache: CacheInputs,
}

/// Largest number of tokens of a pass over a prompt: enough for matrix products at about full
/// speed, few enough that the activations are small compared to the parameters.
pub const PROMPT_ROWS: usize = 128;

/// Token at a position of a sequence.
pub struct CachedToken {
    pub token: u32,
    pub sequence: usize,
    pub position: usize,
}

impl CachedToken {
    /// Returns the inputs of a pass over some tokens.
    pub fn inputs(model: &LanguageModel, cache: &CacheInputs, tokens: &[Self]) -> Inputs {
        let ints = |of: &dyn Fn(&Self) -> usize| {
            HostTensor::Int(tokens.iter().map(|token| of(token) as u32).collect())
        };
        vec![
            (model.tokens, ints(&|of| of.token as usize)),
            (cache.positions, ints(&|of| of.position)),
            (cache.places, ints(&|of| of.sequence * model.context + of.position)),
        ]
    }
}

impl CachedPass<'_> {
    /// Logits after each row. First computes the tokens before each row's last one that are not
    /// cached, for all rows together.
    fn logits(
        &self,
        rows: &[Continuation],
        cached: &mut Vec<Vec<u32>>,
    ) -> Result<Vec<f32>, TrainError> {
        cached.resize(self.cache.sequences, Vec::new());
        let (mut new, mut last) = (Vec::new(), Vec::new());
        for row in rows {
            let known = &mut cached[row.sequence];
            let is_same = |(known, token): &(&u32, &u32)| known == token;
            let same = known.iter().zip(&row.window).take_while(is_same).count().min(row.last());
            // Later tokens are overwritten, or lost if a device fails.
            known.truncate(same);
            for (position, &token) in row.window.iter().enumerate().skip(same) {
                let token = CachedToken { token, sequence: row.sequence, position };
                if position < row.last() { new.push(token) } else { last.push(token) }
            }
        }
        let most = self.units.pipelines.plan().options.rows;
        for tokens in new.chunks(most) {
            self.run(tokens, Vec::new())?;
        }
        let mut logits = Vec::with_capacity(rows.len() * self.model.vocabulary);
        for tokens in last.chunks(most) {
            let all = 0..tokens.len() * self.model.vocabulary;
            logits.extend(self.run(tokens, vec![all])?);
        }
        for row in rows {
            cached[row.sequence].clone_from(&row.window);
        }
        Ok(logits)
    }

    /// Computes tokens, and returns these ranges of their logits; without ranges, the head is not
    /// run.
    fn run(
        &self,
        tokens: &[CachedToken],
        parts: Vec<Range<usize>>,
    ) -> Result<Vec<f32>, TrainError> {
        let pass = OutputPass {
            rows: tokens.len(),
            inputs: CachedToken::inputs(self.model, &self.cache, tokens),
            output: self.model.logits,
            parts,
        };
        Ok(self.units.output_parts(A_TOKEN, self.unit, pass)?.0)
    }
}

/// Next token of each row of each unit; no unit has more rows than its plan holds. A model that
/// carries its states starts each text with states of zeros. Errors name the work by `what`.
///
/// # Errors
/// Returns `TrainError` if a device fails.
pub(crate) fn next_tokens_of_all(
    units: ForwardUnits,
    model: &LanguageModel,
    parts: &[Vec<Continuation>],
    sampling: &Sampling,
    what: &str,
) -> Result<Vec<Vec<u32>>, TrainError> {
    let graph = units.pipelines.graph();
    let mut passes = Vec::new();
    for rows in parts {
        if rows.is_empty() {
            passes.push(None);
        } else {
            passes.push(Some(pass(graph, model, rows, &NextStates::new())));
        }
    }
    let found = units.output_parts_of_all(what, passes)?;
    let mut tokens = Vec::with_capacity(parts.len());
    for (rows, (logits, _)) in parts.iter().zip(found) {
        tokens.push(draw_rows(&logits, model, rows, sampling));
    }
    Ok(tokens)
}

/// Forward pass over texts, with the logits after them, starting with these states or with zeros.
fn pass(
    graph: &Graph,
    model: &LanguageModel,
    rows: &[Continuation],
    states: &NextStates,
) -> OutputPass {
    OutputPass {
        rows: rows.len(),
        inputs: inputs(graph, model, rows, states),
        output: model.logits,
        parts: logits_of(model, rows),
    }
}

/// Inputs of a forward pass over texts, starting with these states or with zeros.
fn inputs(
    graph: &Graph,
    model: &LanguageModel,
    rows: &[Continuation],
    states: &NextStates,
) -> Inputs {
    let mut tokens = vec![0; rows.len() * model.context];
    for (row, padded) in rows.iter().zip(tokens.chunks_mut(model.context)) {
        // The last token does not see the padding after it: attention is causal.
        padded[..row.window.len()].copy_from_slice(&row.window);
    }
    let count = tokens.len();
    let mut inputs = vec![(model.tokens, HostTensor::Int(tokens))];
    if let Some(id) = model.targets {
        inputs.push((id, HostTensor::Int(vec![IGNORE_INDEX; count])));
    }
    if let Some(id) = model.position {
        inputs.push((id, HostTensor::Float(one_hot(model, rows))));
    }
    for (id, per_row) in graph.carried_sizes() {
        let values = match states.iter().find(|known| known.input == id) {
            Some(known) => known.values.clone(),
            None => vec![0.0; per_row * rows.len()],
        };
        inputs.push((id, HostTensor::Float(values)));
    }
    inputs
}

/// Selector of `(rows, 1, context)` values: 1 at the last token of each text, 0 elsewhere.
fn one_hot(model: &LanguageModel, rows: &[Continuation]) -> Vec<f32> {
    let mut values = vec![0.0; rows.len() * model.context];
    for (row, values) in rows.iter().zip(values.chunks_mut(model.context)) {
        values[row.last()] = 1.0;
    }
    values
}

/// Ranges of the logits after the last token of each text.
fn logits_of(model: &LanguageModel, rows: &[Continuation]) -> Vec<Range<usize>> {
    let mut parts = Vec::with_capacity(rows.len());
    for (index, row) in rows.iter().enumerate() {
        let row = match model.position {
            Some(_) => index,
            None => index * model.context + row.last(),
        };
        parts.push(row * model.vocabulary..(row + 1) * model.vocabulary);
    }
    parts
}

fn draw_rows(
    logits: &[f32],
    model: &LanguageModel,
    rows: &[Continuation],
    sampling: &Sampling,
) -> Vec<u32> {
    let mut tokens = Vec::with_capacity(rows.len());
    let drawn = model.vocabulary.min(sampling.vocabulary);
    for (row, logits) in rows.iter().zip(logits.chunks(model.vocabulary)) {
        let logits = penalized(&logits[..drawn], &row.said, sampling.repetition_penalty);
        tokens.push(draw(&logits, sampling, row.uniform));
    }
    tokens
}

/// Logits with a penalty for each repeated token, applied once per token.
fn penalized<'a>(logits: &'a [f32], said: &[u32], penalty: f64) -> Cow<'a, [f32]> {
    if penalty == 1.0 || said.is_empty() {
        return logits.into();
    }
    let mut changed = logits.to_vec();
    for token in said {
        let Some(before) = logits.get(*token as usize) else { continue };
        let value = f64::from(*before);
        changed[*token as usize] =
            if value < 0.0 { value * penalty } else { value / penalty } as f32;
    }
    changed.into()
}

/// Draws a token from the softmax of `logits` with a number uniform in `[0, 1)`.
fn draw(logits: &[f32], sampling: &Sampling, uniform: f64) -> u32 {
    let kept = kept(logits, sampling);
    let mut left = uniform * kept.iter().map(|(_, weight)| weight).sum::<f64>();
    for (token, weight) in &kept {
        left -= weight;
        if left < 0.0 {
            return *token;
        }
    }
    // Rounding may leave a remainder.
    kept[kept.len() - 1].0
}

/// Tokens that may be drawn, at least one, with weights proportional to their probabilities; the
/// most likely token has weight 1.
fn kept(logits: &[f32], sampling: &Sampling) -> Vec<(u32, f64)> {
    let (mut best, mut highest) = (0, f32::NEG_INFINITY);
    for (token, &logit) in logits.iter().enumerate() {
        if logit > highest {
            (best, highest) = (token as u32, logit);
        }
    }
    if sampling.temperature == 0.0 {
        return vec![(best, 1.0)];
    }
    // Includes tokens as likely as the last of the `top_k`.
    let least = match sampling.top_k {
        0 => f32::NEG_INFINITY,
        count if count >= logits.len() => f32::NEG_INFINITY,
        count => {
            let mut sorted = logits.to_vec();
            *sorted.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a)).1
        }
    };
    let mut kept = Vec::new();
    for (token, &logit) in (0u32..).zip(logits) {
        let below = (f64::from(logit) - f64::from(highest)) / sampling.temperature;
        let weight = libm::exp(below);
        if token == best {
            kept.push((token, 1.0));
        } else if logit >= least && !weight.is_nan() {
            kept.push((token, weight));
        }
    }
    if sampling.top_p < 1.0 {
        kept.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        let all: f64 = kept.iter().map(|(_, weight)| weight).sum();
        let (mut needed, mut before) = (0, 0.0);
        while needed < kept.len() && before < sampling.top_p * all {
            before += kept[needed].1;
            needed += 1;
        }
        kept.truncate(needed.max(1));
    }
    kept.retain(|(_, weight)| *weight >= sampling.min_p);
    kept
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::runtime::open::{self, OpenOptions};
    use crate::runtime::pipelines::ModelPipelines;
    use crate::runtime::workers::WorkerGroup;
    use potluck_core::rng::Key;
    use potluck_graph::model::gpt::next_token_gpt;
    use potluck_graph::model::{GptConfig, gpt};
    use potluck_graph::{Plan, PlanOptions, Unary};

    /// Next tokens from a graph with initial parameters, for texts of several lengths.
    fn next_of(graph: Graph, rows: &[Continuation], sampling: &Sampling) -> Vec<u32> {
        let model = LanguageModel::of(&graph).unwrap();
        let plan = Plan::new(graph, PlanOptions::new(rows.len()));
        let opened = open::open("cpu", plan.clone(), 0, &OpenOptions::default()).unwrap();
        let group = WorkerGroup::single(opened.driver).unwrap();
        group.run_on_all("initialization", |_, device| device.initialize(3)).unwrap();
        let pipelines = ModelPipelines::of_replicas(Arc::new(plan), 1);
        let units = ForwardUnits { group: &group, pipelines: &pipelines };
        let parts = [rows.to_vec()];
        next_tokens_of_all(units, &model, &parts, sampling, "tokens").unwrap().remove(0)
    }

    #[test]
    fn a_head_of_one_row_gives_the_same_tokens_as_one_of_all_rows() {
        let config = GptConfig {
            vocabulary: 97,
            context: 8,
            positions: 8,
            layers: 2,
            heads: 2,
            width: 16,
            bias: true,
            dropout: 0.0,
            tie: false,
            activation: Unary::Gelu,
        };
        let text: Vec<u32> = (0..40).map(|i| i * i % 97).collect();
        let row = |length: usize| Continuation::new(&text[..length], config.context, 0.5);
        let rows: Vec<Continuation> = [1, 2, 5, 8, 9, 40].map(row).into();
        let of_one = next_token_gpt(&config).unwrap();
        let logits = LanguageModel::of(&of_one).unwrap().logits;
        assert_eq!(of_one.tensor(logits).shape.per_row(), 97);
        let next = next_of(of_one.clone(), &rows, &sampling(0.0, 0));
        assert_eq!(next, next_of(gpt(&config).unwrap(), &rows, &sampling(0.0, 0)));
        assert!(next.iter().any(|token| *token != next[0]), "{next:?}");
        // A tokenizer may have fewer tokens than the model.
        let fewer = *next.iter().max().unwrap() as usize;
        let few = next_of(of_one, &rows, &Sampling { vocabulary: fewer, ..sampling(0.0, 0) });
        assert!(few.iter().all(|token| (*token as usize) < fewer), "{few:?} of {fewer}");
    }

    const LOGITS: [f32; 4] = [0.0, 3.0, 2.0, -1.0];

    fn sampling(temperature: f64, top_k: usize) -> Sampling {
        Sampling { temperature, top_k, ..Sampling::new(usize::MAX, 1) }
    }

    /// Probabilities of transformers 5.23, by its processors in its order.
    #[test]
    fn probabilities_are_those_of_transformers() {
        let logits = [0.0, 3.0, 2.0, -1.0, 2.5, 1.0, -4.0, 0.5];
        let said = [1, 3, 3, 6];
        for ((repetition_penalty, temperature, top_k, top_p, min_p), expected) in [
            (
                (1.3, 1.0, 0, 1.0, 0.0),
                [0.028354, 0.284997, 0.209513, 0.007727, 0.345428, 0.077075, 0.000156, 0.046749],
            ),
            ((1.0, 0.7, 3, 1.0, 0.0), [0.0, 0.578305, 0.138591, 0.0, 0.283104, 0.0, 0.0, 0.0]),
            ((1.0, 1.0, 0, 0.8, 0.0), [0.0, 0.50648, 0.186324, 0.0, 0.307196, 0.0, 0.0, 0.0]),
            ((1.0, 1.5, 0, 1.0, 0.2), [0.0, 0.401035, 0.205898, 0.0, 0.287354, 0.105712, 0.0, 0.0]),
            ((1.2, 0.9, 6, 0.9, 0.1), [0.0, 0.361974, 0.207684, 0.0, 0.361974, 0.068368, 0.0, 0.0]),
            ((0.8, 2.0, 5, 0.5, 0.05), [0.0, 0.651355, 0.0, 0.0, 0.348645, 0.0, 0.0, 0.0]),
            ((1.0, 1.0, 0, 0.05, 0.0), [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
            ((1.0, 0.0, 5, 0.5, 0.0), [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
        ] {
            let sampling = Sampling {
                repetition_penalty,
                temperature,
                top_k,
                top_p,
                min_p,
                ..Sampling::new(usize::MAX, 1)
            };
            let kept = kept(&penalized(&logits, &said, repetition_penalty), &sampling);
            let all: f64 = kept.iter().map(|(_, weight)| weight).sum();
            let mut found = [0.0; 8];
            for (token, weight) in kept {
                found[token as usize] = weight / all;
            }
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() < 1e-6, "{sampling:?}: {found} {expected}");
            }
        }
    }

    #[test]
    fn no_temperature_takes_the_best_and_top_k_never_leaves_the_top() {
        assert_eq!(draw(&LOGITS, &sampling(0.0, 0), 0.99), 1);
        for step in 0..100 {
            let token = draw(&LOGITS, &sampling(5.0, 2), f64::from(step) / 100.0);
            assert!(token == 1 || token == 2);
        }
    }

    #[test]
    fn tokens_come_as_often_as_the_softmax_says() {
        let draws = 20_000;
        let mut seen = [0u32; 4];
        for index in 0..draws {
            let uniform = Key::new(9).uniform(index);
            seen[draw(&LOGITS, &sampling(1.0, 0), uniform) as usize] += 1;
        }
        let total: f64 = LOGITS.iter().map(|l| f64::from(*l).exp()).sum();
        for (token, count) in seen.iter().enumerate() {
            let expected = f64::from(LOGITS[token]).exp() / total;
            let got = f64::from(*count) / draws as f64;
            assert!((got - expected).abs() < 0.02, "token {token}: {got} against {expected}");
        }
    }
}
