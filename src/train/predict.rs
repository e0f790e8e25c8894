//! Predictions of a [`Trainer`]: outputs of its graph for any number of rows, computed on all
//! devices.

use std::sync::Arc;

use ndarray::ArrayD;

use super::error::TrainError;
use super::trainer::Trainer;
use crate::base::{DType, HostTensor, TensorId};
use crate::parallel::MicroBatch;
use crate::runtime::step::{Inputs, forward, load};

impl Trainer {
    /// Computes an output of the graph for `rows` samples, without dropout, in the output's shape
    /// with the samples in their order. The samples are divided among the devices like a batch,
    /// and run in micro-batches. Inputs that the output does not depend on (targets) may be left
    /// out.
    ///
    /// # Errors
    /// Returns `TrainError` if there is no such output, if `rows` is 0 or 2^32 and more, if there
    /// are more rows than a micro-batch and the output has no dimension for them, if an input has
    /// another type or length, or if a device fails.
    pub fn predict(
        &mut self,
        output: &str,
        rows: usize,
        inputs: &[(&str, HostTensor)],
    ) -> Result<ArrayD<f32>, TrainError> {
        let fail = |why: String| Err(TrainError::InvalidRequest(why));
        let Some(tensor) = self.graph.output(output) else {
            return fail(format!("the graph has no output called {output}"));
        };
        if rows == 0 || u32::try_from(rows).is_err() {
            return fail(format!("{rows} rows asked for; give at least 1 and fewer than 2^32"));
        }
        let shape = self.graph.tensor(tensor).shape.clone();
        let parts = self.parts(rows as u32);
        if !shape.is_batched() && parts.iter().map(Vec::len).sum::<usize>() > 1 {
            return fail(format!(
                "{output} is {shape}, without a dimension for rows: ask for fewer rows than \
                 {rows}, so that they fit one micro-batch"
            ));
        }
        let of_rank = |parts: &Vec<MicroBatch>| -> Result<Vec<(usize, Inputs)>, TrainError> {
            let inputs = |part: &MicroBatch| self.cut_or_zero(inputs, rows, part);
            parts.iter().map(|part| Ok((part.rows as usize, inputs(part)?))).collect()
        };
        let work: Result<Vec<_>, TrainError> = parts.iter().map(of_rank).collect();
        let work = work?;
        let why = |error| TrainError::Defect(format!("an output has another shape: {error}"));
        if let Some(pipelines) = &self.session.pipelines {
            let mut values = Vec::new();
            for (pipeline, micro_batches) in work.iter().enumerate() {
                for (rows, inputs) in micro_batches {
                    let micro_batch = (*rows, inputs);
                    values.extend(pipelines.output(
                        &self.session.group,
                        pipeline,
                        micro_batch,
                        tensor,
                    )?);
                }
            }
            return ArrayD::from_shape_vec(shape.resolve(rows), values).map_err(why);
        }
        let work = Arc::new(work);
        let read = self.session.group.run_on_all("a prediction", move |rank, device| {
            let mut values = Vec::new();
            for (rows, inputs) in &work[rank.index()] {
                load(device, inputs, 0)?;
                let pass = forward(device, *rows)?;
                values.extend(device.read(tensor, &pass)?);
            }
            Ok(values)
        })?;
        ArrayD::from_shape_vec(shape.resolve(rows), read.concat()).map_err(why)
    }

    /// Returns the micro-batches of each rank or pipeline for `rows` samples, which are divided in
    /// proportion to the shares of a batch.
    fn parts(&self, rows: u32) -> Vec<Vec<MicroBatch>> {
        let units = self.session.placement.units();
        let weights: Vec<u32> = units.clone().map(|rank| rank.share).collect();
        let counts = proportional(rows, &weights);
        let mut first = 0;
        let of_rank = |(count, most): (u32, u32)| {
            let end = first + count;
            let starts = (first..end).step_by(most.max(1) as usize);
            let part = |first: u32| MicroBatch { first, rows: most.max(1).min(end - first) };
            first = end;
            starts.map(part).collect()
        };
        counts.into_iter().zip(units.map(|rank| rank.micro_batch)).map(of_rank).collect()
    }

    /// Returns a micro-batch's rows of the values for `rows` samples, with zeros for inputs that
    /// are not given.
    fn cut_or_zero(
        &self,
        values: &[(&str, HostTensor)],
        rows: usize,
        part: &MicroBatch,
    ) -> Result<Inputs, TrainError> {
        let is_given =
            |name: &str| name == "samples" || values.iter().any(|(known, _)| *known == name);
        let (given, missing): (Vec<_>, Vec<_>) =
            self.graph.inputs.iter().cloned().partition(|(name, _)| is_given(name));
        let mut inputs = self.cut(&given, values, rows, part)?;
        let zeros = |(_, id): (String, TensorId)| (id, self.zeros(id, part.rows as usize));
        inputs.extend(missing.into_iter().map(zeros));
        Ok(inputs)
    }

    fn zeros(&self, input: TensorId, rows: usize) -> HostTensor {
        let tensor = self.graph.tensor(input);
        let count = tensor.shape.elements(rows);
        match tensor.dtype {
            DType::F32 => HostTensor::Float(vec![0.0; count]),
            DType::U32 => HostTensor::Int(vec![0; count]),
        }
    }
}

/// Divides `count` in proportion to weights, of which one is not 0; what is left over goes to the
/// first.
fn proportional(count: u32, weights: &[u32]) -> Vec<u32> {
    let total: u128 = weights.iter().map(|weight| u128::from(*weight)).sum();
    let (mut seen, mut from) = (0, 0);
    let part = |weight: &u32| {
        seen += u128::from(*weight);
        // At most `count`, a u32.
        let to = (u128::from(count) * seen).div_ceil(total.max(1)) as u32;
        let part = to - from;
        from = to;
        part
    };
    weights.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Unary;
    use crate::model::{MlpConfig, MlpLoss, mlp};
    use crate::optim::Optimizer;
    use crate::train::TrainerOptions;

    const WIDTH: usize = 3;

    fn predicted(devices: &str, shares: &[usize], rows: usize) -> ArrayD<f32> {
        let widths = vec![WIDTH, 8, 2];
        let loss = MlpLoss::SquaredError;
        let graph =
            mlp(&MlpConfig { widths, activation: Unary::Relu, dropout: 0.0, loss }).unwrap();
        let optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
        let options = TrainerOptions {
            shares: shares.to_vec(),
            micro_batch: 2,
            ..TrainerOptions::new(devices, optimizer, 4)
        };
        let mut trainer = Trainer::new(graph, &options).unwrap();
        let values = (0..rows * WIDTH).map(|i| (i as f32 * 0.37).sin()).collect();
        trainer.predict("outputs", rows, &[("inputs", HostTensor::Float(values))]).unwrap()
    }

    #[test]
    fn any_number_of_rows_is_predicted_on_all_devices_to_the_bits_of_one() {
        for rows in [1, 2, 5, 11] {
            let alone = predicted("cpu", &[], rows);
            assert_eq!(alone.shape(), [rows, 2]);
            let bits = |found: &ArrayD<f32>| found.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            for (devices, shares) in [("cpu*2", &[][..]), ("cpu*2", &[3, 1]), ("cpu*4", &[])] {
                let shared = predicted(devices, shares, rows);
                assert_eq!(bits(&shared), bits(&alone), "{rows} rows on {devices} {shares:?}");
            }
        }
    }

    #[test]
    fn rows_are_divided_in_proportion_and_the_first_takes_the_rest() {
        assert_eq!(proportional(1, &[1, 1]), [1, 0]);
        assert_eq!(proportional(7, &[1, 1]), [4, 3]);
        assert_eq!(proportional(8, &[3, 0, 1]), [6, 0, 2]);
        assert_eq!(proportional(u32::MAX, &[u32::MAX, u32::MAX]), [1 << 31, (1 << 31) - 1]);
    }

    #[test]
    fn rows_that_cannot_be_are_refused() {
        let mut b = crate::graph::Builder::new();
        let x = b.input("x", &[1, 2]);
        let w = b.parameter("w", &[2, 2], crate::graph::Init::Ones);
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
}
