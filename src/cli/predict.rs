//! `potluck predict`: the outputs of a model for samples, as a CSV file.

use std::fs;
use std::path::Path;

use super::args::PredictArgs;
use super::model::{EvalDevices, load, of_tokens, open_for_eval};
use super::trained_on::GivenData;
use super::{UsageError, writable};
use crate::ui::terminal::{print_line, print_warning};
use potluck_core::format::counted;
use potluck_core::{HostTensor, files};
use potluck_data::{
    DataDescription, DataFile, SampleDescription, Samples, TargetNames, Targets, formats,
};
use potluck_train::error::TrainError;
use potluck_train::outputs::{OutputRequest, model_outputs};
use potluck_train::runtime::pipelines::ForwardUnits;
use potluck_train::spec::{DataSource, RunSpec};
use potluck_train::task::chosen;

/// Number of samples whose features are in memory at once.
const AT_A_TIME: usize = 4096;

/// Predicts samples with a checkpoint and writes a row per sample: its name or number, the chosen
/// class with the probability of each, or the predicted values in their units.
pub fn predict(args: &PredictArgs) -> anyhow::Result<()> {
    // A dash is standard output, as without the flag.
    let out = args.out.as_deref().filter(|out| *out != Path::new("-"));
    if let Some(out) = out {
        writable(out, "--out")?;
        // The table of predictions would replace the samples.
        if fs::canonicalize(out).is_ok_and(|out| is_within(&out, &args.data)) {
            let why = format!(
                "--out {}: is a file of --data {}; name another file",
                out.display(),
                args.data.display()
            );
            return Err(UsageError(why).into());
        }
    }
    let (loaded, spec) = load(&args.checkpoint)?;
    let description = match loaded.saved.description.clone() {
        Some(DataDescription::Samples(description)) => description,
        Some(DataDescription::Tokens { .. }) => return Err(of_tokens("samples to predict").into()),
        None => {
            let why = "the checkpoint is of a model of text, which predicts tokens; see potluck \
                       generate --help";
            return Err(TrainError::InvalidRequest(why.into()).into());
        }
    };
    let (samples, files) = samples_of(&spec, &args.data, &description)?;
    let given = GivenData {
        run: &args.checkpoint.checkpoint,
        of_run: &loaded.data_files,
        source: &spec.data.source,
        held_out: spec.data.held_out,
        files,
        samples: Some(samples.len() as u64),
    };
    if let Some(warning) = given.warning() {
        print_warning(&warning);
    }
    let shape =
        loaded.saved.shape().ok_or_else(|| TrainError::Defect("data without sizes".into()))?;
    let plans = spec.forward_plans(&shape)?;
    let devices = &args.checkpoint.devices;
    let graph = plans.model().whole();
    let opened = open_for_eval(devices, &spec, loaded, &plans)?;
    let mut csv = csv_writer(&description)?;
    let mut right = 0;
    let mut bad = 0;
    let mut first_bad = None;
    for first in (0..samples.len()).step_by(AT_A_TIME) {
        let rows = first..samples.len().min(first + AT_A_TIME);
        let inputs = features(&samples, rows.clone(), &description)?;
        let EvalDevices { group, pipelines, weights } = &opened;
        let outputs = model_outputs(&OutputRequest {
            units: ForwardUnits { group, pipelines },
            graph,
            output: "outputs",
            rows: rows.len() as u32,
            inputs: &[("inputs", inputs)],
            most: spec.micro_batch,
            weights,
        })?;
        let width = outputs.len() / rows.len();
        for (index, outputs) in rows.zip(outputs.chunks_exact(width)) {
            if !is_finite(outputs, &description) {
                first_bad.get_or_insert(index);
                bad += 1;
            }
            let (record, is_right) = record(&samples, index, outputs, &description);
            csv.write_record(&record)?;
            right += u64::from(is_right);
        }
    }
    let text = csv.into_inner().map_err(|error| anyhow::anyhow!("{error}"))?;
    write(out, &text)?;
    summary(&samples, right, &description, out);
    if let Some(index) = first_bad {
        let name = name_of(&samples, index);
        print_line(&format!(
            "warning: the predictions of {bad} of {} are not finite numbers, the first of them \
             that of {name}; look for very large values in the data",
            counted(samples.len(), "sample", "samples")
        ));
    }
    Ok(())
}

/// Returns true if a file is that at a path, or lies below it.
fn is_within(file: &Path, path: &Path) -> bool {
    fs::canonicalize(path).is_ok_and(|path| file.starts_with(path))
}

/// Returns true if the predictions of a sample are finite numbers, values in their units.
fn is_finite(outputs: &[f32], description: &SampleDescription) -> bool {
    for (column, value) in outputs.iter().enumerate() {
        if !restored(column, *value, description).is_finite() {
            return false;
        }
    }
    true
}

/// Value of a column in its unit, if it has one.
fn restored(column: usize, value: f32, description: &SampleDescription) -> f32 {
    match description.normalization.targets.get(column) {
        Some(scale) => scale.restore(value),
        None => value,
    }
}

/// Name of a sample, or its number.
fn name_of(samples: &Samples, index: usize) -> String {
    match &samples.ids {
        Some(ids) => ids[index].clone(),
        None => index.to_string(),
    }
}

/// Loads the samples to predict, which have the same features as the training samples and may have
/// no targets, with their files.
fn samples_of(
    spec: &RunSpec,
    path: &Path,
    description: &SampleDescription,
) -> Result<(Samples, Vec<DataFile>), TrainError> {
    let DataSource::Samples { format, .. } = spec.data.source else {
        return Err(TrainError::Defect("a model of samples without samples".into()));
    };
    let format = formats::detect(path).unwrap_or(format);
    let options = spec.read_options(Some(description));
    Ok(formats::read_for_prediction(format, path, &options)?)
}

fn features(
    samples: &Samples,
    rows: std::ops::Range<usize>,
    description: &SampleDescription,
) -> Result<HostTensor, TrainError> {
    let width = samples.width();
    let mut values = vec![0.0; rows.len() * width];
    for (index, row) in rows.zip(values.chunks_mut(width)) {
        samples.read(index, row)?;
        description.normalization.apply(row);
    }
    Ok(HostTensor::Float(values))
}

/// Creates the table with its header line.
fn csv_writer(description: &SampleDescription) -> anyhow::Result<csv::Writer<Vec<u8>>> {
    let mut header = vec!["sample".to_string()];
    match &description.targets {
        TargetNames::Classes(names) => {
            header.extend(["class".into(), "probability".into()]);
            for name in names {
                header.push(format!("p({name})"));
            }
        }
        TargetNames::Values(names) => header.extend(names.iter().cloned()),
    }
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(&header)?;
    Ok(writer)
}

/// Row of a sample, and true if its class was predicted.
fn record(
    samples: &Samples,
    index: usize,
    outputs: &[f32],
    description: &SampleDescription,
) -> (Vec<String>, bool) {
    let mut row = vec![name_of(samples, index)];
    match &description.targets {
        TargetNames::Classes(names) => {
            let class = chosen(outputs);
            let probabilities = softmax(outputs);
            row.extend([names[class].clone(), probability(probabilities[class])]);
            row.extend(probabilities.into_iter().map(probability));
            // As in an evaluation, outputs that include NaN choose no class.
            let is_choice = !outputs.iter().any(|output| output.is_nan());
            let is_right = match &samples.targets {
                Targets::Classes { ids, .. } => is_choice && ids[index] as usize == class,
                _ => false,
            };
            (row, is_right)
        }
        TargetNames::Values(_) => {
            for (column, value) in outputs.iter().enumerate() {
                row.push(restored(column, *value, description).to_string());
            }
            (row, false)
        }
    }
}

/// Formats a probability with 6 digits.
fn probability(value: f64) -> String {
    format!("{value:.6}")
}

fn softmax(logits: &[f32]) -> Vec<f64> {
    let mut most = f32::NEG_INFINITY;
    for logit in logits {
        most = most.max(*logit);
    }
    let exponentials: Vec<f64> = logits.iter().map(|logit| f64::from(logit - most).exp()).collect();
    let sum: f64 = exponentials.iter().sum();
    exponentials.into_iter().map(|value| value / sum).collect()
}

/// Writes the table to a file atomically, or to stdout.
fn write(out: Option<&Path>, text: &[u8]) -> anyhow::Result<()> {
    match out {
        Some(path) => files::replace_or_write(path, text)
            .map_err(|why| TrainError::Io { path: path.into(), why }.into()),
        None => {
            let text = std::str::from_utf8(text)
                .map_err(|_| UsageError("names are not Unicode; give --out FILE".into()))?;
            super::print(text);
            Ok(())
        }
    }
}

/// Prints the number of samples, and the accuracy if they have classes.
fn summary(samples: &Samples, right: u64, description: &SampleDescription, out: Option<&Path>) {
    let Some(out) = out else { return };
    let count = samples.len();
    let has_classes = matches!(
        (&samples.targets, &description.targets),
        (Targets::Classes { .. }, TargetNames::Classes(_))
    );
    let accuracy = if has_classes {
        format!("; {right} right, {:.2} %", 100.0 * right as f64 / count.max(1) as f64)
    } else {
        String::new()
    };
    let samples = counted(count, "sample", "samples");
    print_line(&format!("{samples} predicted in {}{accuracy}", out.display()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_data::{Features, MeanStd, Normalization};

    fn samples(targets: Targets) -> Samples {
        Samples {
            name: "test".into(),
            shape: vec![1],
            columns: Vec::new(),
            target_columns: Vec::new(),
            features: Features::Floats(vec![1.0, 2.0]),
            targets,
            ids: Some(vec!["a.png".into(), "b.png".into()]),
        }
    }

    fn description(targets: TargetNames) -> SampleDescription {
        let scale = MeanStd { mean: 10.0, std: 2.0 };
        let normalization = Normalization { features: Vec::new(), targets: vec![scale] };
        SampleDescription {
            shape: vec![1],
            columns: Vec::new(),
            target_columns: Vec::new(),
            targets,
            normalization,
        }
    }

    #[test]
    fn classes_have_probabilities_and_values_their_units() {
        let names = vec!["cat".to_string(), "dog".to_string()];
        let of_classes = Targets::Classes { ids: vec![1, 0], names: names.clone() };
        let classes = description(TargetNames::Classes(names));
        let of_classes = samples(of_classes);
        let (row, right) = record(&of_classes, 0, &[0.0, 3f32.ln()], &classes);
        assert_eq!((row.join(" "), right), ("a.png dog 0.750000 0.250000 0.750000".into(), true));
        // Outputs that include NaN choose no class, also where the others would be right.
        assert!(!record(&of_classes, 1, &[f32::NAN; 2], &classes).1);
        assert!(!record(&of_classes, 0, &[f32::NAN, 1.0], &classes).1);
        let values = description(TargetNames::Values(vec!["y".into()]));
        let (row, _) = record(&samples(Targets::Absent), 1, &[-1.5], &values);
        assert_eq!(row.join(" "), "b.png 7");
    }
}
