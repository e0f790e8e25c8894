//! Predictions of a graph without training: parameters from a file or from values, and outputs for
//! any number of rows.

use std::path::Path;

use ndarray::ArrayD;

use super::error::TrainError;
use super::given_inputs::GivenInputs;
use super::given_parameters::{parameters_of_file, set_parameters};
use super::outputs::divided;
use super::predict::predicted;
use crate::checkpoint::NamedTensor;
use crate::runtime::open::OpenOptions;
use crate::runtime::pipelines::{ForwardUnits, ModelPipelines};
use crate::runtime::placement::candidates::selections;
use crate::runtime::placement::pipeline::open_forward;
use crate::runtime::workers::WorkerGroup;
use potluck_core::HostTensor;
use potluck_core::setting::as_fields;
use potluck_graph::{Graph, ModelGraph, Precision};
use potluck_parallel::ParallelOptions;
use potluck_parallel::planner::plans::Plans;

/// Options of a [`Predictor`].
#[derive(Clone, Debug)]
pub struct PredictorOptions {
    /// Device selector, as for `potluck train --devices`. Each device holds the whole model, and
    /// rows are divided evenly among the devices.
    pub devices: String,
    /// Largest number of rows in a pass of a device.
    pub rows: usize,
    /// Arithmetic of matrix products.
    pub precision: Precision,
    /// Time budget in seconds for autotuning kernels without recorded timings on this machine; 0:
    /// none.
    pub tune_s: f64,
}

impl PredictorOptions {
    /// Returns options with 64 rows per pass, f32, and no autotuning.
    pub fn new(devices: &str) -> Self {
        Self { devices: devices.into(), rows: 64, precision: Precision::default(), tune_s: 0.0 }
    }
}

/// Forward passes of a graph with given parameters, on one or several devices. The graph needs no
/// loss; dropout is disabled, and batch norms use their running averages.
pub struct Predictor {
    model: ModelGraph,
    group: WorkerGroup,
    pipelines: ModelPipelines,
    rows: usize,
    notes: Vec<String>,
}

impl Predictor {
    /// Opens devices for a graph, with the initial values of seed 0 as parameters.
    ///
    /// # Errors
    /// Returns `TrainError` if no device matches, or if the graph does not fit one.
    pub fn new(graph: Graph, options: &PredictorOptions) -> Result<Self, TrainError> {
        as_fields(|| Self::open(graph, options)).map_err(TrainError::of_library)
    }

    /// Opens devices for a graph, with parameters read by
    /// [`checkpoint::parameters_of_file`](parameters_of_file): from a safetensors file, a
    /// checkpoint or the directory of a run.
    ///
    /// # Errors
    /// Returns the errors of [`Predictor::new`] and [`parameters_of_file`].
    pub fn from_file(
        graph: Graph,
        options: &PredictorOptions,
        path: &Path,
    ) -> Result<Self, TrainError> {
        let tensors = parameters_of_file(&graph, path).map_err(TrainError::of_library)?;
        let mut predictor = Self::new(graph, options)?;
        predictor.set_parameters(&tensors)?;
        Ok(predictor)
    }

    fn open(graph: Graph, options: &PredictorOptions) -> Result<Self, TrainError> {
        let rows = u32::try_from(options.rows).ok().filter(|rows| *rows > 0).ok_or_else(|| {
            TrainError::InvalidRequest("rows must be at least 1, and below 2^32".into())
        })?;
        if !(options.tune_s.is_finite() && options.tune_s >= 0.0) {
            let why = "tune_s must be a number of seconds, and not negative";
            return Err(TrainError::InvalidRequest(why.into()));
        }
        let devices = selections(&options.devices)?;
        let opening = OpenOptions { tune_s: options.tune_s, ..OpenOptions::default() };
        let of_devices = vec![opening; devices.len()];
        let model = ModelGraph::forward(graph, true).with_precision(options.precision);
        let plans = Plans::new(model);
        let parallel = ParallelOptions::default();
        let opened = open_forward(devices, &parallel, &of_devices, &plans, rows)?;
        opened.group.run_on_all("initialization", |_, device| device.initialize(0))?;
        let model = plans.model().clone();
        let (group, pipelines) = (opened.group, opened.pipelines);
        Ok(Self { model, group, pipelines, rows: options.rows, notes: opened.notes })
    }

    /// Returns sentences for the user about the devices.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Sets all or some parameters on all devices.
    ///
    /// # Errors
    /// Returns `TrainError` if a parameter does not exist, or has another shape or number of
    /// values, before any is set; and if a device fails.
    pub fn set_parameters(&mut self, tensors: &[NamedTensor]) -> Result<(), TrainError> {
        set_parameters(&self.group, self.model.whole(), tensors).map_err(TrainError::of_library)
    }

    /// Computes an output of the graph for `rows` samples, in the output's shape, with the samples
    /// in their order. Inputs that the output does not depend on (targets) may be omitted.
    ///
    /// # Errors
    /// Returns `TrainError` if the output does not exist, if `rows` is 0, or 2^32 or more, if an
    /// input is unknown, has another type or length, or is missing although the output depends on
    /// it, if an id is not a row of its table, or if a device fails.
    pub fn predict(
        &mut self,
        output: &str,
        rows: usize,
        inputs: &[(&str, HostTensor)],
    ) -> Result<ArrayD<f32>, TrainError> {
        self.predicted(output, rows, inputs).map_err(TrainError::of_library)
    }

    fn predicted(
        &self,
        output: &str,
        rows: usize,
        inputs: &[(&str, HostTensor)],
    ) -> Result<ArrayD<f32>, TrainError> {
        let given = GivenInputs::new(self.model.whole(), inputs, rows)?;
        let units = ForwardUnits { group: &self.group, pipelines: &self.pipelines };
        let devices = self.group.world();
        let most = vec![self.rows as u32; devices];
        predicted(units, output, &given, &|rows| divided(rows, &vec![1; devices], &most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Trainer, TrainerOptions};
    use potluck_graph::optim::Optimizer;
    use potluck_graph::{Builder, Init};

    /// `y = x weight^T + bias` of 3 inputs and 2 outputs, without a loss.
    fn linear(b: &mut Builder) -> potluck_core::TensorId {
        let x = b.input("x", &[1, 3]);
        let weight = b.parameter("fc.weight", &[2, 3], Init::Normal { std: 1.0 });
        let bias = b.parameter("fc.bias", &[2], Init::Ones);
        let y = b.linear(x, weight, Some(bias)).unwrap();
        b.output("y", y);
        y
    }

    fn graph() -> Graph {
        let mut b = Builder::new();
        linear(&mut b);
        b.finish()
    }

    fn tensors() -> Vec<NamedTensor> {
        vec![
            NamedTensor {
                name: "fc.weight".into(),
                shape: vec![2, 3],
                values: vec![1.0, 2.0, 3.0, -1.0, 0.5, 0.0],
            },
            NamedTensor { name: "fc.bias".into(), shape: vec![2], values: vec![0.5, -0.5] },
        ]
    }

    fn rows(count: usize) -> [(&'static str, HostTensor); 1] {
        [("x", HostTensor::Float((0..count * 3).map(|i| i as f32).collect()))]
    }

    #[test]
    fn graphs_without_a_loss_are_predicted_with_given_parameters() {
        for devices in ["cpu", "cpu*2"] {
            let options = PredictorOptions { rows: 2, ..PredictorOptions::new(devices) };
            let mut predictor = Predictor::new(graph(), &options).unwrap();
            predictor.set_parameters(&tensors()).unwrap();
            let y = predictor.predict("y", 5, &rows(5)).unwrap();
            assert_eq!(y.shape(), [5, 2]);
            for (row, y) in y.outer_iter().enumerate() {
                let x = (3 * row) as f32;
                assert_eq!(y[0], 6.0 * x + 8.5, "row {row} on {devices}");
                assert_eq!(y[1], -0.5 * x, "row {row} on {devices}");
            }
            let unknown = predictor.predict("z", 1, &rows(1)).unwrap_err().to_string();
            assert!(unknown.contains("no output called z; its outputs are y"), "{unknown}");
            let short = predictor.predict("y", 2, &rows(1)).unwrap_err().to_string();
            assert!(short.contains("which are 6 values; it has 3 of F32"), "{short}");
        }
    }

    #[test]
    fn transposed_weights_are_named() {
        let mut predictor = Predictor::new(graph(), &PredictorOptions::new("cpu")).unwrap();
        let shape = vec![3, 2];
        let weight = NamedTensor { shape, ..tensors().swap_remove(0) };
        let error = predictor.set_parameters(&[weight]).unwrap_err().to_string();
        assert!(error.contains("its transpose: as in PyTorch"), "{error}");
    }

    #[test]
    fn parameters_come_from_files_of_safetensors_and_saves_of_a_trainer() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("linear.safetensors");
        let views = tensors();
        let of = |tensor: &NamedTensor| bytemuck::cast_slice::<f32, u8>(&tensor.values).to_vec();
        let bytes: Vec<Vec<u8>> = views.iter().map(of).collect();
        let views = views.iter().zip(&bytes).map(|(tensor, bytes)| {
            let dtype = safetensors::Dtype::F32;
            let view = safetensors::tensor::TensorView::new(dtype, tensor.shape.clone(), bytes);
            (tensor.name.clone(), view.unwrap())
        });
        std::fs::write(&file, safetensors::serialize(views, None).unwrap()).unwrap();
        let options = PredictorOptions::new("cpu");
        let mut from_file = Predictor::from_file(graph(), &options, &file).unwrap();
        let expected = from_file.predict("y", 2, &rows(2)).unwrap();
        assert_eq!(expected[[0, 0]], 8.5);

        let mut b = Builder::new();
        let (y, target) = (linear(&mut b), b.input("target", &[1, 2]));
        b.squared_error_loss(y, target).unwrap();
        let sgd = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
        let mut trainer = Trainer::new(b.finish(), &TrainerOptions::new("cpu", sgd, 2)).unwrap();
        trainer.set_parameters(&tensors()).unwrap();
        let run = directory.path().join("run");
        trainer.save(&run).unwrap();
        let mut from_save = Predictor::from_file(graph(), &options, &run).unwrap();
        assert_eq!(from_save.predict("y", 2, &rows(2)).unwrap(), expected);

        let missing = Predictor::from_file(graph(), &options, &run.join("no.safetensors"));
        let error = missing.err().unwrap().to_string();
        assert!(error.contains("no.safetensors: cannot be read"), "{error}");
        let pickled = Predictor::from_file(graph(), &options, &run.join("model.pt"));
        assert!(pickled.err().unwrap().to_string().contains("is a Python pickle"));
    }
}
