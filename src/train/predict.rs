//! Forward passes of a [`Trainer`] on all devices, without dropout: predictions (outputs of its
//! graph for any number of rows) and losses.

use std::sync::Arc;

use ndarray::ArrayD;

use super::error::TrainError;
use super::evaluate::{EvalRequest, Evaluation, evaluate_split};
use super::evaluated_part::EvaluatedPart;
use super::given_inputs::GivenInputs;
use super::loader::{BatchSource, require_no_shared, rows_of};
use super::outputs::divided;
use super::signals::SignalFlags;
use super::task::{LossTask, Task};
use super::trainer::Trainer;
use crate::runtime::pipelines::ForwardUnits;
use crate::runtime::step::Inputs;
use potluck_core::{HostTensor, Shape, TensorId};
use potluck_data::{Dataset, Sampler, Split};
use potluck_graph::Graph;
use potluck_kernels::exec::LossSums;
use potluck_parallel::MicroBatch;

impl Trainer {
    /// Computes an output of the graph for `rows` samples, without dropout. The result has the
    /// output's shape, with the samples in their order. The samples are divided among the devices
    /// like a batch, and run in micro-batches. Inputs that the output does not depend on (targets)
    /// may be omitted. The `logits` of a language model belong to one `position` of each sample, an
    /// input (rows, 1, context) that is 1 there and 0 elsewhere.
    ///
    /// With [`TrainerOptions::ema`](super::TrainerOptions::ema) the averages are used: the first
    /// prediction or evaluation after a step loads them onto all devices, and the next step
    /// restores the parameters.
    ///
    /// # Errors
    /// Returns `TrainError` if the output does not exist, if `rows` is 0, or 2^32 or more, if there
    /// are more rows than in a micro-batch and the output has no dimension for them, if an input is
    /// unknown, has another type or length, or is missing although the output depends on it, if
    /// [`Trainer::step`] would refuse an id or a target, or if a device fails.
    pub fn predict(
        &mut self,
        output: &str,
        rows: usize,
        inputs: &[(&str, HostTensor)],
    ) -> Result<ArrayD<f32>, TrainError> {
        let predicted = self.predict_rows(output, rows, inputs);
        self.noting_failure(predicted)
    }

    fn predict_rows(
        &mut self,
        output: &str,
        rows: usize,
        inputs: &[(&str, HostTensor)],
    ) -> Result<ArrayD<f32>, TrainError> {
        self.hold_evaluated()?;
        let given = GivenInputs::new(self.graph(), inputs, rows)?;
        self.array_of(output, &given)
    }

    fn array_of(&self, output: &str, given: &GivenInputs) -> Result<ArrayD<f32>, TrainError> {
        predicted(self.session.units(), output, given, &|rows| self.parts(rows))
    }

    /// Computes an output for all samples of a split of a data set, in the order of their indices,
    /// without dropout. The result has the output's shape. Averages are used if they are kept, as
    /// in [`Trainer::predict`]. Samples are read batch by batch, so that the host holds little more
    /// than the result.
    ///
    /// # Errors
    /// Returns `TrainError` if the output does not exist or has no dimension for samples, if the
    /// split has no samples, if the data do not fit the graph, lack an input on which the output
    /// depends, or cannot be read, or if a device fails.
    pub fn predict_data(
        &mut self,
        data: &Arc<dyn Dataset>,
        split: Split,
        output: &str,
    ) -> Result<ArrayD<f32>, TrainError> {
        let predicted = self.predict_split(data, split, output);
        self.noting_failure(predicted)
    }

    fn predict_split(
        &mut self,
        data: &Arc<dyn Dataset>,
        split: Split,
        output: &str,
    ) -> Result<ArrayD<f32>, TrainError> {
        let tensor = output_of(self.graph(), output)?;
        let shape = self.graph().tensor(tensor).shape.clone();
        if !shape.is_batched() {
            let why = format!("{output} is {shape}, without a dimension for samples");
            return Err(TrainError::InvalidRequest(why));
        }
        let count = data.len(split);
        if count == 0 {
            let why = "the data have no sample of that split to predict";
            return Err(TrainError::InvalidRequest(why.into()));
        }
        require_no_shared(self.graph())?;
        self.hold_evaluated()?;
        // Checks that the data fit; nothing is drawn from the sampler.
        BatchSource::new(self.graph(), data.clone(), Sampler::new(0, 1, 1))?;
        let batch = self.options().batch as u64;
        let mut values = Vec::with_capacity(shape.elements(count as usize));
        for first in (0..count).step_by(self.options().batch) {
            let indices: Vec<u64> = (first..count.min(first + batch)).collect();
            let rows = rows_of(&**data, split, &indices)?;
            let given = GivenInputs::from_sample(self.graph(), &rows, indices.len(), first)?;
            values.extend(self.array_of(output, &given)?);
        }
        array(&shape, count as usize, values)
    }

    /// Computes the loss on non-overlapping samples of a split of a data set, without dropout: on
    /// `samples` of them, spread over the split, or on all (0). Averages are used if they are kept,
    /// as in [`Trainer::predict`]. The samples are divided among the devices. The loss is NaN if no
    /// target of them counts.
    ///
    /// # Errors
    /// Returns `TrainError` if the split has no samples, if the data do not fit the graph, or if a
    /// device fails.
    pub fn evaluate(
        &mut self,
        data: &Arc<dyn Dataset>,
        split: Split,
        samples: u64,
    ) -> Result<Evaluation, TrainError> {
        let task: Arc<dyn Task> = Arc::new(LossTask);
        self.evaluate_task(data, &task, split, samples)
    }

    /// Evaluates like [`Trainer::evaluate`], and adds up the sums from which a task computes its
    /// metrics: `task.metrics(&evaluation.sums)`.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::evaluate`], and an error if the graph lacks the output that
    /// the task scores.
    pub fn evaluate_task(
        &mut self,
        data: &Arc<dyn Dataset>,
        task: &Arc<dyn Task>,
        split: Split,
        samples: u64,
    ) -> Result<Evaluation, TrainError> {
        let evaluated = self.evaluate_samples(data, task, split, samples);
        self.noting_failure(evaluated)
    }

    fn evaluate_samples(
        &mut self,
        data: &Arc<dyn Dataset>,
        task: &Arc<dyn Task>,
        split: Split,
        samples: u64,
    ) -> Result<Evaluation, TrainError> {
        if data.evaluation_samples(split).is_empty() {
            let why = "the data have no sample of that split to evaluate on";
            return Err(TrainError::InvalidRequest(why.into()));
        }
        // Nothing is drawn from the sampler.
        let sampler = Sampler::new(0, 1, self.options().batch as u32);
        let source = BatchSource::new(self.graph(), data.clone(), sampler)?;
        source.require_all_inputs(self.graph())?;
        let signals = &SignalFlags::default();
        let part = EvaluatedPart { source: &source, task, split, samples, signals };
        self.evaluate_part(&part, &mut |_, _| Ok(()))?
            .ok_or_else(|| TrainError::Defect("an evaluation ended without a signal".into()))
    }

    /// Computes the loss on `rows` samples, given like the batch of [`Trainer::step`], without
    /// dropout. Averages are used if they are kept, as in [`Trainer::predict`]. The loss is NaN if
    /// no target counts.
    ///
    /// # Errors
    /// Returns `TrainError` if `rows` is 0, or 2^32 or more, if an input is missing, unknown or has
    /// another type or length, if [`Trainer::step`] would refuse an id or a target, or if a device
    /// fails.
    pub fn evaluate_rows(
        &mut self,
        rows: usize,
        inputs: &[(&str, HostTensor)],
    ) -> Result<Evaluation, TrainError> {
        let evaluated = self.evaluate_given(rows, inputs);
        self.noting_failure(evaluated)
    }

    fn evaluate_given(
        &mut self,
        rows: usize,
        inputs: &[(&str, HostTensor)],
    ) -> Result<Evaluation, TrainError> {
        self.hold_evaluated()?;
        let given = GivenInputs::new(self.graph(), inputs, rows)?;
        if rows == 0 || u32::try_from(rows).is_err() {
            let why = format!("{rows} rows given; give at least 1 and fewer than 2^32");
            return Err(TrainError::InvalidRequest(why));
        }
        let work = work_of(&self.parts(rows as u32), &|part| given.cut(part))?;
        let session = &mut self.session;
        let mut loss = LossSums::default();
        for of_unit in session.pipelines.losses(&mut session.group, work)? {
            loss.add(&of_unit);
        }
        Ok(Evaluation::of(self.graph(), &loss, rows as u64, Vec::new()))
    }

    /// Computes the loss on a part of a split. `progress` receives the numbers of finished and of
    /// all samples. Returns `None` if a signal arrived.
    pub(super) fn evaluate_part(
        &mut self,
        part: &EvaluatedPart,
        progress: &mut dyn FnMut(u64, u64) -> Result<(), TrainError>,
    ) -> Result<Option<Evaluation>, TrainError> {
        if part.signals.pending().is_some() {
            return Ok(None);
        }
        self.hold_evaluated()?;
        let EvaluatedPart { source, task, split, samples, signals } = *part;
        let placement = &self.session.placement;
        let weights: Vec<u32> = placement.units().map(|rank| rank.share).collect();
        let rows: Vec<u32> = placement.units().map(|rank| rank.micro_batch).collect();
        let request = EvalRequest {
            source,
            graph: self.model.whole(),
            task,
            pipelines: &self.session.pipelines,
            split,
            samples,
            rows: &rows,
            weights: &weights,
            signals,
        };
        evaluate_split(&mut self.session.group, &request, progress)
    }

    /// Micro-batches of each rank or pipeline for `rows` samples, divided in proportion to the
    /// shares of a batch.
    fn parts(&self, rows: u32) -> Vec<Vec<MicroBatch>> {
        let placement = &self.session.placement;
        let weights: Vec<u32> = placement.units().map(|rank| rank.share).collect();
        let most: Vec<u32> = placement.units().map(|rank| rank.micro_batch).collect();
        divided(rows, &weights, &most)
    }
}

/// Computes an output of a graph for rows, in its shape, without dropout; other inputs than those
/// on which it depends may be missing. `parts` returns the micro-batches of each rank or pipeline
/// for a number of rows.
///
/// # Errors
/// Returns `TrainError` if the output does not exist or cannot have this many rows, if an input is
/// missing or has another type or length, or if a device fails.
pub(crate) fn predicted(
    units: ForwardUnits,
    output: &str,
    given: &GivenInputs,
    parts: &dyn Fn(u32) -> Vec<Vec<MicroBatch>>,
) -> Result<ArrayD<f32>, TrainError> {
    let GivenInputs { graph, rows, .. } = *given;
    let tensor = output_of(graph, output)?;
    if rows == 0 || u32::try_from(rows).is_err() {
        let why = format!("{rows} rows asked for; give at least 1 and fewer than 2^32");
        return Err(TrainError::InvalidRequest(why));
    }
    require_inputs(given, output, tensor)?;
    let shape = &graph.tensor(tensor).shape;
    let parts = parts(rows as u32);
    if !shape.is_batched() && parts.iter().map(Vec::len).sum::<usize>() > 1 {
        return Err(TrainError::InvalidRequest(format!(
            "{output} is {shape}, without a dimension for rows: ask for fewer rows than {rows}, so \
             that they fit one micro-batch"
        )));
    }
    let work = work_of(&parts, &|part| given.cut_or_zero(part))?;
    array(shape, rows, units.outputs(tensor, work)?)
}

/// Checks that the inputs on which an output depends are given, except numbers of samples and
/// carried states, which the trainer provides.
fn require_inputs(given: &GivenInputs, output: &str, tensor: TensorId) -> Result<(), TrainError> {
    let graph = given.graph;
    for (name, id) in graph.inputs_of(tensor) {
        if name == "samples" || graph.is_carried(*id) || given.has(name) {
            continue;
        }
        let why = if graph.is_selector(*id) {
            format!("the input {name} is missing, by which {output} is selected")
        } else {
            format!("the input {name} is missing, on which {output} depends")
        };
        return Err(TrainError::InvalidRequest(why));
    }
    Ok(())
}

fn output_of(graph: &Graph, name: &str) -> Result<TensorId, TrainError> {
    graph.output(name).ok_or_else(|| {
        let names: Vec<&str> = graph.outputs.iter().map(|(name, _)| &**name).collect();
        let known = match &names[..] {
            [] => "it has none; name one with Builder::output".to_string(),
            names => format!("its outputs are {}", names.join(", ")),
        };
        TrainError::InvalidRequest(format!("the graph has no output called {name}; {known}"))
    })
}

fn array(shape: &Shape, rows: usize, values: Vec<f32>) -> Result<ArrayD<f32>, TrainError> {
    ArrayD::from_shape_vec(shape.resolve(rows), values)
        .map_err(|error| TrainError::Defect(format!("an output has another shape: {error}")))
}

/// Rows and inputs of each rank's or pipeline's micro-batches.
fn work_of(
    parts: &[Vec<MicroBatch>],
    cut: &dyn Fn(&MicroBatch) -> Result<Inputs, TrainError>,
) -> Result<Vec<Vec<(usize, Inputs)>>, TrainError> {
    let mut work = Vec::with_capacity(parts.len());
    for parts in parts {
        let mut of_unit = Vec::with_capacity(parts.len());
        for part in parts {
            of_unit.push((part.rows as usize, cut(part)?));
        }
        work.push(of_unit);
    }
    Ok(work)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Predictor, PredictorOptions, Shares, TrainerOptions};
    use potluck_graph::Unary;
    use potluck_graph::model::{GptConfig, MlpConfig, MlpLoss, mlp};
    use potluck_graph::optim::Optimizer;

    const WIDTH: usize = 3;

    fn predicted(devices: &str, shares: &Shares, rows: usize) -> ArrayD<f32> {
        let widths = vec![WIDTH, 8, 2];
        let loss = MlpLoss::SquaredError;
        let graph =
            mlp(&MlpConfig { widths, activation: Unary::Relu, dropout: 0.0, loss }).unwrap();
        let optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
        let options = TrainerOptions {
            shares: shares.clone(),
            micro_batch_size: 2,
            ..TrainerOptions::new(devices, optimizer, 4)
        };
        let mut trainer = Trainer::new(graph, &options).unwrap();
        let values = (0..rows * WIDTH).map(|i| (i as f32 * 0.37).sin()).collect();
        trainer.predict("outputs", rows, &[("inputs", HostTensor::Float(values))]).unwrap()
    }

    #[test]
    fn any_number_of_rows_is_predicted_on_all_devices_to_the_bits_of_one() {
        for rows in [1, 2, 5, 11] {
            let alone = predicted("cpu", &Shares::Even, rows);
            assert_eq!(alone.shape(), [rows, 2]);
            let bits = |found: &ArrayD<f32>| found.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            for (devices, shares) in [
                ("cpu*2", Shares::Even),
                ("cpu*2", Shares::Fixed(vec![3, 1])),
                ("cpu*4", Shares::Even),
            ] {
                let shared = predicted(devices, &shares, rows);
                assert_eq!(bits(&shared), bits(&alone), "{rows} rows on {devices} {shares:?}");
            }
        }
    }

    #[test]
    fn rows_that_cannot_be_are_refused() {
        let mut b = potluck_graph::Builder::new();
        let x = b.input("x", &[1, 2]);
        let w = b.parameter("w", &[2, 2], potluck_graph::Init::Ones);
        let y = b.linear(x, w, None).unwrap();
        b.output("w", w);
        b.squared_error_loss(y, x).unwrap();
        let optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
        let mut trainer =
            Trainer::new(b.finish(), &TrainerOptions::new("cpu", optimizer, 2)).unwrap();
        let mut refused = |output: &str, rows: usize| {
            trainer.predict(output, rows, &[]).map_or_else(|e| e.to_string(), |_| "runs".into())
        };
        assert!(refused("v", 1).contains("no output called v"));
        assert!(refused("w", 0).contains("0 rows asked for"));
        assert!(refused("w", 1 << 32).contains("fewer than 2^32"));
        assert!(refused("w", 3).contains("without a dimension for rows"), "{}", refused("w", 3));
        assert_eq!(refused("w", 2), "runs");
    }

    /// The output `drawn` depends on `x` and `noise`; `hidden`, of which it is made, is also read
    /// by the loss with `targets`.
    fn drawing() -> Graph {
        let mut b = potluck_graph::Builder::new();
        let x = b.input("x", &[1, 2]);
        let noise = b.input("noise", &[1, 3]);
        let targets = b.input("targets", &[1, 3]);
        let weight = b.parameter("weight", &[3, 2], potluck_graph::Init::Ones);
        let hidden = b.linear(x, weight, None).unwrap();
        let apart = b.sub(hidden, targets).unwrap();
        let active = b.relu(hidden).unwrap();
        let drawn = b.add(active, noise).unwrap();
        b.output("active", active);
        b.output("drawn", drawn);
        b.squared_error_loss(apart, noise).unwrap();
        b.finish()
    }

    #[test]
    fn an_input_that_the_output_depends_on_is_asked_for() {
        let optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
        let options = TrainerOptions::new("cpu", optimizer, 2);
        let mut trainer = Trainer::new(drawing(), &options).unwrap();
        let mut predictor = Predictor::new(drawing(), &PredictorOptions::new("cpu")).unwrap();
        let x = ("x", HostTensor::Float(vec![0.5, -0.25]));
        let noise = ("noise", HostTensor::Float(vec![1.0, 2.0, 3.0]));
        let cases = [
            ("active", vec![x.clone()], None),
            ("active", vec![noise.clone()], Some("the input x is missing")),
            ("drawn", vec![x.clone()], Some("the input noise is missing, on which drawn depends")),
            ("drawn", vec![x, noise], None),
        ];
        for (output, given, missing) in cases {
            let found = [trainer.predict(output, 1, &given), predictor.predict(output, 1, &given)];
            for found in found {
                let told = found.map_or_else(|error| error.to_string(), |_| String::new());
                let is_told = missing.map_or(told.is_empty(), |missing| told.contains(missing));
                assert!(is_told, "{output} of {given:?}: {told}");
            }
        }
    }

    /// The logits of a language model belong to the given position; without it they are refused.
    #[test]
    fn an_output_of_a_position_needs_it() {
        let (vocabulary, context) = (7, 4);
        let graph = potluck_graph::model::gpt(&GptConfig {
            vocabulary,
            context,
            positions: context,
            layers: 1,
            heads: 2,
            width: 8,
            bias: true,
            dropout: 0.0,
            tie: true,
            activation: Unary::Gelu,
        });
        let optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
        let options = TrainerOptions::new("cpu", optimizer, 2);
        let mut trainer = Trainer::new(graph.unwrap(), &options).unwrap();
        let tokens = ("tokens", HostTensor::Int(vec![1, 2, 3, 4]));
        let refused = trainer.predict("logits", 1, std::slice::from_ref(&tokens)).unwrap_err();
        assert!(refused.to_string().contains("input position is missing"), "{refused}");
        let at = |position: usize| {
            let one_hot = (0..context).map(|i| f32::from(u8::from(i == position))).collect();
            ("position", HostTensor::Float(one_hot))
        };
        let mut logits = |position| {
            let predicted = trainer.predict("logits", 1, &[tokens.clone(), at(position)]).unwrap();
            assert_eq!(predicted.shape(), [1, 1, vocabulary]);
            predicted
        };
        assert!(logits(1) != logits(2));
    }
}
