//! Values of parameters by name, given by a caller of the library or read from a file.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use super::error::TrainError;
use crate::checkpoint::{Checkpoint, NamedTensor, has_checkpoints, is_checkpoint, transposed_hint};
use crate::hugging_face::files::{StoredTensors, TensorNames};
use crate::runtime::workers::WorkerGroup;
use potluck_core::BucketId;
use potluck_graph::{Graph, Parameter, Plan};
use potluck_kernels::device::DeviceError;
use potluck_kernels::exec::{BucketTensor, Executor};

/// Reads the parameters of a graph. `path` is a file in safetensors format, as written by PyTorch's
/// `safetensors.torch.save_file(model.state_dict(), path)`, in f32, f16 or bf16; a directory with a
/// `model.safetensors` or its shards; a checkpoint; or the directory of a run or of
/// [`Trainer::save`](super::Trainer::save), whose newest checkpoint is read. Names and shapes must
/// match the graph.
///
/// # Errors
/// Returns `TrainError` if the file cannot be read, or for the first tensor that is missing, has
/// another shape, or is not in the graph.
pub fn parameters_of_file(graph: &Graph, path: &Path) -> Result<Vec<NamedTensor>, TrainError> {
    if path.is_dir() && (is_checkpoint(path) || has_checkpoints(path)) {
        let (checkpoint, _) = Checkpoint::parameters_of_path(path)?;
        let mut found = Vec::with_capacity(graph.parameters.len());
        for parameter in &graph.parameters {
            let wanted = parameter.slice.whole_dims();
            let tensor = NamedTensor::find(&checkpoint.parameters, &parameter.whole.name, wanted)?;
            found.push(tensor.clone());
        }
        let is_known = |name: &str| graph.parameters.iter().any(|of| of.whole.name == name);
        if let Some(other) = checkpoint.parameters.iter().find(|tensor| !is_known(&tensor.name)) {
            let what = path.display().to_string();
            let why = format!("its tensor '{}' is none of the graph", other.name);
            return Err(TrainError::Mismatch { what, why });
        }
        return Ok(found);
    }
    Ok(StoredTensors::open(path)?.of_model(graph, &[], TensorNames::Graph, None)?.read()?)
}

/// Sets all or some parameters, and their averages if the devices keep them, to the same bytes on
/// all devices. `graph` is the model's.
///
/// # Errors
/// Returns `TrainError` if a parameter does not exist, or has another shape or number of values,
/// before any is set; and if a device fails.
pub(crate) fn set_parameters(
    group: &WorkerGroup,
    graph: &Graph,
    tensors: &[NamedTensor],
) -> Result<(), TrainError> {
    for NamedTensor { name, shape, values } in tensors {
        let wanted = shape_of(graph, name)?;
        let fits = values.len() == wanted.iter().product::<usize>();
        if shape != wanted || !fits {
            let count = values.len();
            let hint = transposed_hint(shape, wanted);
            return Err(TrainError::InvalidRequest(format!(
                "the parameter '{name}' has the shape {wanted:?}, and {count} values of the shape \
                 {shape:?} are given{hint}"
            )));
        }
    }
    let tensors = Arc::new(tensors.to_vec());
    group.run_on_all("setting parameters", move |_, device| {
        for bucket in 0..device.plan().buckets.len() as u32 {
            write_into(device, BucketId(bucket), &tensors)?;
        }
        Ok(())
    })?;
    Ok(())
}

/// Shape of a parameter.
///
/// # Errors
/// Returns `TrainError::InvalidRequest` if the graph has no parameter of this name.
pub(crate) fn shape_of<'g>(graph: &'g Graph, name: &str) -> Result<&'g [usize], TrainError> {
    let parameter = graph.parameters.iter().find(|parameter| parameter.name == name);
    let parameter = parameter.ok_or_else(|| unknown_parameter(graph, name))?;
    Ok(graph.tensor(parameter.tensor).shape.dims())
}

pub(crate) fn unknown_parameter(graph: &Graph, name: &str) -> TrainError {
    let names: Vec<&str> = graph.parameters.iter().map(|parameter| &*parameter.name).collect();
    let known = names.join(", ");
    TrainError::InvalidRequest(format!(
        "the model has no parameter '{name}'; its parameters are {known}"
    ))
}

/// Writes the given tensors that are in a bucket, if the device holds the bucket.
fn write_into(
    device: &mut dyn Executor,
    bucket: BucketId,
    tensors: &[NamedTensor],
) -> Result<(), DeviceError> {
    let plan = device.plan();
    let given = given_in(plan, bucket, tensors);
    if given.is_empty() || !plan.holds(bucket) {
        return Ok(());
    }
    let mut values = device.read_bucket(BucketTensor::Parameters, bucket)?;
    for (start, own) in &given {
        values[*start..start + own.len()].copy_from_slice(own);
    }
    device.write_bucket(BucketTensor::Parameters, bucket, &values)?;
    let (plan, owned) = (device.plan(), device.owned(bucket));
    if !plan.options.averages || owned.is_empty() {
        return Ok(());
    }
    let mut averages = device.read_bucket(BucketTensor::Average, bucket)?;
    for (start, own) in given {
        let [from, to] = [owned.start.max(start), owned.end.min(start + own.len())];
        if from < to {
            let held = from - owned.start..to - owned.start;
            averages[held].copy_from_slice(&own[from - start..to - start]);
        }
    }
    device.write_bucket(BucketTensor::Average, bucket, &averages)
}

/// Values of the given tensors in a bucket, with their offsets; for a slice, its part of the
/// tensor.
fn given_in<'t>(
    plan: &Plan,
    bucket: BucketId,
    tensors: &'t [NamedTensor],
) -> Vec<(usize, Cow<'t, [f32]>)> {
    let mut given = Vec::new();
    for &(id, start) in &plan.buckets[bucket.index()].parameters {
        let Parameter { whole, slice, .. } = &plan.graph.parameters[id.index()];
        // Of several tensors with the same name, the last one counts.
        if let Some(tensor) = tensors.iter().rfind(|tensor| tensor.name == whole.name) {
            let own = if slice.is_whole() {
                Cow::Borrowed(&tensor.values[..])
            } else {
                Cow::Owned(slice.cut(&tensor.values))
            };
            given.push((start, own));
        }
    }
    given
}
