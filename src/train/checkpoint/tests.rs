//! Tests of checkpoints: crashes and damage that are survived, and files that are refused.

use std::fs;
use std::path::Path;
use std::process::Command;

use proptest::prelude::*;
use tempfile::TempDir;

use super::manifest::SavedSlice;
use super::*;
use potluck_core::faults::{FAULT_ENV, Faults};
use potluck_parallel::{Mesh, ParallelOptions, RankPlacement, ReduceSite};

/// Placement of 12 samples on the devices B and C of A, B and C.
fn placement() -> Placement {
    let rank = |name: &str, position, share| RankPlacement {
        name: name.into(),
        identity: format!("{name} identity"),
        position,
        share,
        micro_batch: 3,
        rows: 4,
        micro_batches: vec![3; share as usize / 3],
        blocks: Vec::new(),
        reduce_site: ReduceSite::Device,
        kernels: [("matmul (2, 3)".to_string(), "tile".to_string())].into_iter().collect(),
        untimed: Vec::new(),
    };
    Placement {
        devices_asked: "all".into(),
        options: ParallelOptions::default(),
        candidates: ["A", "B", "C"].map(|name| format!("{name} identity")).into(),
        micro_batch_max: 4,
        parameter_bytes_max: None,
        mesh: Mesh::of_pipelines(2, 1),
        tensor_shares: Vec::new(),
        ranks: vec![rank("B", 1, 3), rank("C", 2, 9)],
        share_history: Vec::new(),
        cluster: None,
    }
}

/// Environment variable with the run directory of a child process that is killed.
const RUN: &str = "POTLUCK_TEST_RUN";

fn directory() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn tensor(name: &str, shape: &[usize], first: f32) -> NamedTensor {
    let values = (0..shape.iter().product()).map(|i| first + i as f32).collect();
    NamedTensor { name: name.into(), shape: shape.into(), values }
}

fn checkpoint(step: u64) -> Checkpoint {
    let at = step as f32;
    Checkpoint {
        meta: Meta {
            step,
            optimizer_step: step.saturating_sub(1),
            moments: None,
            loss_scale: None,
            seed: u64::MAX,
            samples: step * 12,
            model: "kind = \"gpt\"\n".into(),
            run: "[train]\nbatch = 12\n".into(),
            typed: vec!["train.batch".into()],
            tokenizer: Some(Tokenizer::Char { chars: vec!['\n', '"', 'ß'] }),
            description: None,
            files: Vec::new(),
            best: Some(Best { step: 3, val_loss: 0.1 + 0.2, samples: 7, runs: 2 }),
            evaluations_since_best: 0,
            placement: placement(),
            data: "fingerprint".into(),
            version: "0.1.0".into(),
            unknown: BTreeMap::new(),
        },
        parameters: vec![tensor("wte", &[3, 4], at), tensor("bias", &[], at)],
        moments: vec![tensor("wte.0", &[3, 4], -at), tensor("wte.1", &[3, 4], at * at)],
        averages: Vec::new(),
        carried: Vec::new(),
    }
}

#[test]
fn averages_are_in_place_of_parameters_for_whoever_does_not_train() {
    let run = directory();
    let mut store = Store::open(run.path()).unwrap();
    let averages = vec![tensor("wte", &[3, 4], 0.5)];
    let mut saved = Checkpoint { averages: averages.clone(), ..checkpoint(4) };
    saved.meta.moments = Some("adam".into());
    let path = store.save(&saved).unwrap();
    assert_eq!(Checkpoint::load(&path).unwrap(), saved);
    let json = fs::read_to_string(path.join(manifest::NAME)).unwrap();
    let needs = serde_json::from_str::<serde_json::Value>(&json).unwrap()["needs"].clone();
    assert_eq!(needs, serde_json::json!(["averages"]));
    let (found, _) = Checkpoint::parameters_of_path(&path).unwrap();
    assert_eq!(found.parameters, [averages[0].clone(), saved.parameters[1].clone()]);
    fs::remove_file(path.join(AVERAGES)).unwrap();
    refused(&path, AVERAGES);
    Checkpoint::parameters_of_path(&path).unwrap_err();
}

#[test]
fn states_have_a_file_of_their_own_if_there_are_any() {
    let run = directory();
    let mut store = Store::open(run.path()).unwrap();
    let carried = vec![tensor("h_l0", &[2, 3], 0.5)];
    let with_states = Checkpoint { carried, ..checkpoint(4) };
    let path = store.save(&with_states).unwrap();
    assert_eq!(Checkpoint::load(&path).unwrap(), with_states);
    let file = path.join(CARRIED);
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    refused(&path, CARRIED);
    let without = store.save(&checkpoint(5)).unwrap();
    assert!(!without.join(CARRIED).exists());
    assert_eq!(Checkpoint::load(&without).unwrap(), checkpoint(5));
}

fn store(run: &Path, steps: &[u64]) -> Store {
    let mut store = Store::open(run).unwrap();
    for step in steps {
        store.save(&checkpoint(*step)).unwrap();
    }
    store
}

fn listing(run: &Path) -> Vec<String> {
    let entries = fs::read_dir(run.join("checkpoints")).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn refused(directory: &Path, file: &str) -> String {
    let error = Checkpoint::load(directory).unwrap_err().to_string();
    assert!(error.contains(directory.join(file).to_str().unwrap()), "{error} names {file}");
    error
}

#[test]
fn a_checkpoint_comes_back_bit_for_bit() {
    let run = directory();
    let mut saved = checkpoint(7);
    let bits = [0, 0x8000_0000, 0x7FC0_0000, 0x7F80_0001, 0xFFC1_2345, 0x7F80_0000, 0xFF80_0000, 1];
    let values: Vec<f32> = bits.map(f32::from_bits).into();
    saved.parameters.push(NamedTensor { name: "odd ü\"\n".into(), shape: vec![2, 4], values });
    saved.parameters.push(tensor("empty", &[0, 4], 0.0));
    let mut store = Store::open(run.path()).unwrap();
    let path = store.save(&saved).unwrap();
    assert_eq!(path, run.path().join("checkpoints/step-00000007"));

    for path in [path.as_path(), run.path()] {
        let (loaded, warnings) = Checkpoint::load_path(path).unwrap();
        assert!(warnings.is_empty());
        assert_eq!(loaded.meta, saved.meta);
        assert_eq!(loaded.moments, saved.moments);
        let odd = NamedTensor::find(&loaded.parameters, "odd ü\"\n", &[2, 4]).unwrap();
        assert!(odd.values.iter().map(|value| value.to_bits()).eq(bits));
        let names: Vec<&str> = loaded.parameters.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["wte", "bias", "odd ü\"\n", "empty"]);
        assert_eq!(loaded.parameters[..2], saved.parameters[..2]);
    }
}

#[test]
fn odd_numbers_of_the_best_loss_come_back() {
    for val_loss in [f64::MIN_POSITIVE, 1.0 / 3.0, 1e300, -0.0, f64::INFINITY] {
        let text = serde_json::to_string(&Best { step: 1, val_loss, samples: 7, runs: 0 }).unwrap();
        let best: Best = serde_json::from_str(&text).unwrap();
        assert_eq!(best.val_loss.to_bits(), val_loss.to_bits(), "{text}");
    }
}

#[test]
fn other_readers_of_safetensors_read_it() {
    let run = directory();
    let path = store(run.path(), &[5]).path(5).join(PARAMETERS);
    let bytes = fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let wte = file.tensor("wte").unwrap();
    assert_eq!(wte.shape(), [3, 4]);
    assert_eq!(wte.data()[4..8], 6f32.to_le_bytes());
}

#[test]
fn a_tensor_is_found_by_name_and_shape() {
    let tensors = checkpoint(1).parameters;
    assert!(NamedTensor::find(&tensors, "wte", &[3, 4]).is_ok());
    let error = NamedTensor::find(&tensors, "wte", &[4, 3]).unwrap_err().to_string();
    assert!(error.contains("'wte' has the shape [3, 4] instead of [4, 3]"), "{error}");
    let error = NamedTensor::find(&tensors, "wpe", &[4, 3]).unwrap_err();
    assert!(matches!(error, CheckpointError::NoTensor { .. }));
}

#[test]
fn tensors_that_could_not_be_read_back_are_not_saved() {
    let run = directory();
    let mut store = Store::open(run.path()).unwrap();
    let mut short = checkpoint(1);
    short.moments[1].values.pop();
    let mut double = checkpoint(1);
    double.parameters.push(tensor("wte", &[1], 0.0));
    let mut metadata = checkpoint(1);
    metadata.parameters[0].name = "__metadata__".into();
    for wrong in [short, double, metadata] {
        assert!(matches!(store.save(&wrong), Err(CheckpointError::Unsavable { .. })));
    }
    assert!(listing(run.path()).is_empty());
}

/// Damages one file of the newest checkpoint with `spoil`. The checkpoint must be refused with a
/// message that names the file, and the one before it loaded. Returns the warning.
fn falls_back(file: &str, spoil: impl FnOnce(&Path)) -> String {
    let run = directory();
    let store = store(run.path(), &[10, 20]);
    spoil(&store.path(20).join(file));
    refused(&store.path(20), file);
    let (loaded, warnings) = store.load_latest().unwrap();
    assert_eq!(loaded, checkpoint(10));
    let [warning, taken] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(warning.contains(file) && warning.contains("step-00000020"), "{warning}");
    assert!(taken.contains("step-00000010, the checkpoint before, is taken"), "{taken}");
    warning.clone()
}

#[test]
fn damaged_files_are_refused_and_the_checkpoint_before_is_used() {
    for file in [PARAMETERS, MOMENTS, manifest::NAME] {
        falls_back(file, |path| fs::remove_file(path).unwrap());
        falls_back(file, |path| {
            let bytes = fs::read(path).unwrap();
            fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
        });
        falls_back(file, |path| fs::write(path, b"").unwrap());
        falls_back(file, |path| {
            let mut bytes = fs::read(path).unwrap();
            bytes.push(0);
            fs::write(path, bytes).unwrap();
        });
        falls_back(file, |path| {
            fs::remove_file(path).unwrap();
            fs::create_dir(path).unwrap();
        });
        // File of another checkpoint, intact in itself.
        falls_back(file, |path| {
            let other = path.parent().unwrap().with_file_name("step-00000010");
            fs::copy(other.join(file), path).unwrap();
        });
    }
    falls_back(PARAMETERS, |path| {
        fs::copy(path.with_file_name(MOMENTS), path).unwrap();
    });
}

#[test]
fn every_flipped_bit_is_found() {
    let run = directory();
    let path = store(run.path(), &[1]).path(1);
    for file in [PARAMETERS, MOMENTS, manifest::NAME] {
        let good = fs::read(path.join(file)).unwrap();
        for place in 0..good.len() {
            let mut bytes = good.clone();
            bytes[place] ^= 1 << (place % 8);
            fs::write(path.join(file), &bytes).unwrap();
            assert!(Checkpoint::load(&path).is_err(), "{file}, byte {place}");
        }
        fs::write(path.join(file), &good).unwrap();
        assert!(Checkpoint::load(&path).is_ok());
    }
}

#[test]
fn a_checkpoint_under_the_name_of_another_is_refused() {
    let run = directory();
    let store = store(run.path(), &[10, 20]);
    fs::rename(store.path(20), store.path(30)).unwrap();
    assert!(refused(&store.path(30), manifest::NAME).contains("it is that of step 20"));
    // A directory name chosen by the user has no step to compare, and is accepted.
    let own = run.path().join("checkpoints/good");
    fs::rename(store.path(30), &own).unwrap();
    assert_eq!(Checkpoint::load(&own).unwrap(), checkpoint(20));
    assert_eq!(store.steps().unwrap(), [10]);
}

/// Changes a manifest and recomputes its hash, so that it can be refused only for its content.
fn forge(directory: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let path = directory.join(manifest::NAME);
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut json);
    json.as_object_mut().unwrap().remove("blake3");
    // The hash is the last field; the line before it gets a comma.
    let bare = serde_json::to_string_pretty(&json).unwrap();
    let bare = bare.strip_suffix("\n}").unwrap().to_string() + ",\n";
    let hash = blake3::hash(format!("{bare}}}\n").as_bytes()).to_hex();
    fs::write(&path, format!("{bare}  \"blake3\": \"{hash}\"\n}}\n")).unwrap();
}

#[test]
fn forged_manifests_are_refused() {
    let run = directory();
    let path = store(run.path(), &[1]).path(1);
    let good = fs::read(path.join(manifest::NAME)).unwrap();
    let restore = || fs::write(path.join(manifest::NAME), &good).unwrap();
    forge(&path, |json| json["meta"]["seed"] = 1.into());
    assert_eq!(Checkpoint::load(&path).unwrap().meta.seed, 1);

    // An existing file outside the checkpoint with the right hash.
    fs::copy(path.join(MOMENTS), path.with_file_name("outside")).unwrap();
    for name in ["../outside", "/etc/passwd", "manifest.json", PARAMETERS, ""] {
        restore();
        forge(&path, |json| json["files"][1]["name"] = name.into());
        assert!(refused(&path, manifest::NAME).contains("it names the files"));
    }
    restore();
    forge(&path, |json| json["files"].as_array_mut().unwrap().truncate(1));
    assert!(refused(&path, manifest::NAME).contains("it names the files"));
    restore();
    for (format, reader) in [(1, ""), (2, ""), (3, ", that of commit a3fe4cf"), (6, "")] {
        forge(&path, |json| json["format"] = format.into());
        let error = refused(&path, manifest::NAME);
        let expected =
            format!("has format {format}, and this version of potluck reads formats 4 to 5");
        assert!(error.contains(&expected), "{error}");
        let advice = format!("use the version that wrote it{reader}");
        assert!(error.ends_with(&advice), "{error}");
    }
    restore();
    forge(&path, |json| json["needs"] = serde_json::json!(["blocks", "float8"]));
    let error = refused(&path, manifest::NAME);
    let expected = "needs blocks, float8, which this version of potluck does not know";
    assert!(error.contains(expected), "{error}");
    restore();
    // A later version may write everything else differently.
    forge(&path, |json| {
        json["needs"] = serde_json::json!(["float8"]);
        json["meta"]["samples"] = "many".into();
        json["files"] = 3.into();
    });
    assert!(refused(&path, manifest::NAME).contains("needs float8, which this version"));
    restore();
    forge(&path, |json| json["needs"] = "float8".into());
    assert!(refused(&path, manifest::NAME).contains("is damaged: its needs: "));
    restore();
    forge(&path, |json| json["files"][0]["bytes"] = u64::MAX.into());
    assert!(refused(&path, PARAMETERS).contains("instead of 18446744073709551615"));
    for garbage in ["", "null", "[]", "{\"format\":4}", "{\"format\":-1}", "\u{FF}"] {
        fs::write(path.join(manifest::NAME), garbage).unwrap();
        refused(&path, manifest::NAME);
    }
}

#[test]
fn format_4_is_read_as_whole_tensors() {
    let run = directory();
    let path = store(run.path(), &[1]).path(1);
    forge(&path, |json| {
        json["format"] = 4.into();
        json.as_object_mut().unwrap().remove("needs");
    });
    assert_eq!(Checkpoint::load(&path).unwrap(), checkpoint(1));
}

/// Format 4 has no needs and slices, so these fields are unknown in it.
#[test]
fn fields_of_format_5_are_unknown_in_format_4() {
    let run = directory();
    let store = store(run.path(), &[1]);
    let slice = serde_json::json!({ "dims": [4], "ranges": [[[0, 2]]] });
    let slices = serde_json::json!({ "wte": { "tensor": "bias", "slice": slice } });
    let others = (serde_json::json!(7), serde_json::json!("none"));
    for (needs, slices) in [(serde_json::json!(["float8"]), slices), others] {
        forge(&store.path(1), |json| {
            json["format"] = 4.into();
            json["needs"] = needs;
            json["files"][0]["slices"] = slices;
        });
        let (loaded, warnings) = store.load_latest().unwrap();
        assert_eq!(loaded, checkpoint(1));
        let [warning] = &warnings[..] else { panic!("{warnings:?}") };
        assert!(warning.contains("does not know needs, files.slices, and"), "{warning}");
    }
}

/// Writes slices of `wte (3, 4)` and the whole `bias`, listed in the manifest as in `ranges`.
fn with_slices(path: &Path, parts: &[(&str, NamedTensor)], ranges: serde_json::Value) {
    let named = |(name, tensor): &(&str, NamedTensor)| NamedTensor {
        name: (*name).into(),
        ..tensor.clone()
    };
    let tensors: Vec<NamedTensor> = parts.iter().map(named).collect();
    let file = path.join(PARAMETERS);
    fs::remove_file(&file).unwrap();
    let entry = tensors::write(&file, &tensors, || Ok(())).unwrap();
    forge(path, |json| {
        json["files"][0] = serde_json::to_value(&entry).unwrap();
        let slice = |(name, ranges): (&String, &serde_json::Value)| {
            let slice = serde_json::json!({ "dims": [3, 4], "ranges": ranges });
            (name.clone(), serde_json::json!({ "tensor": "wte", "slice": slice }))
        };
        let slices = ranges.as_object().unwrap().iter().map(slice).collect();
        json["files"][0]["slices"] = serde_json::Value::Object(slices);
    });
}

/// Columns 0 and 3, and columns 1 and 2.
#[test]
fn slices_of_a_tensor_are_put_together() {
    let run = directory();
    let path = store(run.path(), &[1]).path(1);
    let [wte, bias] = <[NamedTensor; 2]>::try_from(checkpoint(1).parameters).unwrap();
    let columns = |columns: [usize; 2]| NamedTensor {
        shape: vec![3, 2],
        values: (0..3).flat_map(|row| columns.map(|of| wte.values[4 * row + of])).collect(),
        ..wte.clone()
    };
    let (outer, inner) = (columns([0, 3]), columns([1, 2]));
    let of_outer = serde_json::json!([[[0, 3]], [[0, 1], [3, 4]]]);
    let of_inner = serde_json::json!([[[0, 3]], [[1, 3]]]);
    let parts = [("wte/0", outer.clone()), ("wte/1", inner.clone()), ("bias", bias.clone())];
    with_slices(&path, &parts, serde_json::json!({ "wte/0": of_outer, "wte/1": of_inner }));
    assert_eq!(Checkpoint::load(&path).unwrap(), checkpoint(1));

    let told = |parts: &[(&str, NamedTensor)], ranges| {
        with_slices(&path, parts, ranges);
        refused(&path, PARAMETERS)
    };
    let error = told(&parts, serde_json::json!({ "wte/0": of_outer, "wte/1": of_outer }));
    assert!(error.contains("its slices of 'wte' contradict each other"), "{error}");
    let error = told(&parts[..1], serde_json::json!({ "wte/0": of_outer }));
    assert!(error.contains("its slices of 'wte' are not all of it"), "{error}");
    let error = told(&parts[..1], serde_json::json!({ "wte/0": of_outer, "wte/1": of_inner }));
    assert!(error.contains("it has no slice 'wte/1'"), "{error}");
    let wrong = [("wte/0", wte.clone()), ("wte/1", inner.clone())];
    let error = told(&wrong, serde_json::json!({ "wte/0": of_outer, "wte/1": of_inner }));
    assert!(error.contains("its slice 'wte/0' is [3, 4] instead of [3, 2]"), "{error}");
    // A slice that claims more than the file has is refused before any allocation for it.
    let huge = serde_json::json!({ "wte/0": of_outer, "wte/1": [[[0, 3]], [[0, 4]]] });
    with_slices(&path, &parts, huge);
    forge(&path, |json| {
        let slice = &mut json["files"][0]["slices"]["wte/1"]["slice"];
        *slice = serde_json::json!({
            "dims": [1u64 << 40, 4], "ranges": [[[0, 1u64 << 40]], [[0, 4]]]
        });
    });
    let error = refused(&path, PARAMETERS);
    assert!(error.contains("its slice 'wte/1' is [3, 2] instead of [1099511627776, 4]"), "{error}");
    for order in [["wte", "wte/0", "wte/1"], ["wte/0", "wte/1", "wte"]] {
        let part = |name| match name {
            "wte" => ("wte", wte.clone()),
            "wte/0" => ("wte/0", outer.clone()),
            name => (name, inner.clone()),
        };
        let parts = order.map(part);
        let error = told(&parts, serde_json::json!({ "wte/0": of_outer, "wte/1": of_inner }));
        assert!(error.contains("it has the tensor 'wte' whole and in slices"), "{error}");
    }
    let beyond = serde_json::json!([[[0, 3]], [[0, 5]]]);
    with_slices(&path, &parts[..1], serde_json::json!({ "wte/0": beyond }));
    assert!(refused(&path, manifest::NAME).contains("no ranges of dimension 1"));
}

/// Replaces the parameter file by `bytes`, with a manifest that matches them.
fn with_parameters(path: &Path, bytes: &[u8]) {
    fs::write(path.join(PARAMETERS), bytes).unwrap();
    forge(path, |json| {
        json["files"][0]["bytes"] = bytes.len().into();
        json["files"][0]["blake3"] = blake3::hash(bytes).to_hex().as_str().into();
    });
}

fn safetensors_file(header: &str, values: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + values, 0);
    bytes
}

#[test]
fn tensors_of_other_kinds_and_wrong_offsets_are_refused() {
    let run = directory();
    let path = store(run.path(), &[1]).path(1);
    let entry = |kind: &str, shape: &str, offsets: &str| {
        format!(r#"{{"w":{{"dtype":"{kind}","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    with_parameters(&path, &safetensors_file(&entry("F32", "[2]", "[0,8]"), 8));
    assert_eq!(Checkpoint::load(&path).unwrap().parameters[0].values, [0.0, 0.0]);

    with_parameters(&path, &safetensors_file(&entry("F16", "[4]", "[0,8]"), 8));
    assert!(refused(&path, PARAMETERS).contains("'w' is F16 instead of F32"));
    let huge = u64::MAX.to_string();
    for (shape, offsets, values) in [
        ("[3]", "[0,8]", 8),
        ("[2]", "[0,8]", 12),
        ("[2]", "[0,8]", 4),
        ("[2]", "[4,12]", 12),
        ("[2]", "[8,0]", 8),
        (&format!("[{huge},{huge}]")[..], "[0,8]", 8),
        ("[4611686018427387903]", "[0,18446744073709551612]", 8),
    ] {
        with_parameters(&path, &safetensors_file(&entry("F32", shape, offsets), values));
        refused(&path, PARAMETERS);
    }
    with_parameters(&path, &u64::MAX.to_le_bytes());
    refused(&path, PARAMETERS);
}

#[test]
#[cfg(unix)]
fn links_out_of_a_checkpoint_are_not_followed() {
    let tensors = "it is not a regular file";
    let files = [(PARAMETERS, tensors), (MOMENTS, tensors), (manifest::NAME, "not a manifest")];
    for (file, reason) in files {
        let warning = falls_back(file, |path| {
            let outside = path.parent().unwrap().with_extension("outside");
            fs::rename(path, &outside).unwrap();
            std::os::unix::fs::symlink(&outside, path).unwrap();
        });
        assert!(warning.contains(reason), "{warning}");
    }
}

#[test]
fn without_a_good_checkpoint_nothing_is_loaded() {
    let run = directory();
    let empty = Store::open_to_read(run.path());
    assert!(matches!(empty.load_latest(), Err(CheckpointError::None { .. })));
    assert!(!run.path().join("checkpoints").exists());
    let missing = Checkpoint::load_path(Path::new("no/such/run")).unwrap_err().to_string();
    assert!(missing.contains("no/such/run"), "{missing}");

    let store = store(run.path(), &[1, 2]);
    for step in [1, 2] {
        fs::remove_file(store.path(step).join(MOMENTS)).unwrap();
    }
    let error = store.load_latest().unwrap_err();
    assert!(matches!(&error, CheckpointError::NoneGood { reasons, .. } if reasons.len() == 2));
}

#[test]
fn a_full_disk_leaves_the_others_as_they_were() {
    for point in ["begin", "tensors", "manifest", "rename"] {
        let run = directory();
        let store = store(run.path(), &[10, 20]);
        let faults: Faults = format!("full@checkpoint-{point}:30").parse().unwrap();
        let mut store = store.with_faults(faults);
        let error = store.save(&checkpoint(30)).unwrap_err();
        assert!(matches!(
            &error,
            CheckpointError::Write { why, .. } if why.kind() == std::io::ErrorKind::StorageFull
        ));
        assert_eq!(listing(run.path()), ["step-00000010", "step-00000020"], "{point}");
        assert_eq!(store.load_latest().unwrap(), (checkpoint(20), vec![]));
        store.save(&checkpoint(30)).unwrap();
        assert_eq!(store.load_latest().unwrap(), (checkpoint(30), vec![]));
    }
    let run = directory();
    let store = store(run.path(), &[1, 2, 3]);
    let mut store = store.with_faults("full@checkpoint-prune:3".parse().unwrap());
    assert!(matches!(store.prune(2), Err(CheckpointError::Write { .. })));
    assert_eq!(store.steps().unwrap(), [1, 2, 3]);
    assert_eq!(store.prune(2).unwrap(), [1]);
}

#[test]
fn pruning_keeps_the_newest_good_ones_and_the_best() {
    let run = directory();
    let mut first = store(run.path(), &[1, 2, 3, 4, 5, 6]);
    first.mark_best(2).unwrap();
    assert_eq!(first.prune(5).unwrap(), [1]);
    fs::remove_file(first.path(5).join(MOMENTS)).unwrap();
    drop(first);

    // Another process does not know that 5 was good once.
    let mut second = store(run.path(), &[]);
    assert_eq!(second.best().unwrap(), Some(2));
    assert_eq!(second.prune(0).unwrap(), [3]);
    assert_eq!(second.steps().unwrap(), [2, 4, 5, 6]);
    second.save(&checkpoint(7)).unwrap();
    assert_eq!(second.prune(2).unwrap(), [5, 4]);
    assert_eq!(listing(run.path()), ["best", "step-00000002", "step-00000006", "step-00000007"]);
}

#[test]
fn the_best_is_one_that_is_there() {
    let run = directory();
    let mut store = store(run.path(), &[1]);
    assert_eq!(store.best().unwrap(), None);
    assert!(matches!(store.mark_best(2), Err(CheckpointError::None { .. })));
    store.mark_best(1).unwrap();
    assert_eq!(store.best().unwrap(), Some(1));
    for garbage in ["", "../step-00000001x", "step-1"] {
        fs::write(run.path().join("checkpoints/best"), garbage).unwrap();
        let error = store.best().unwrap_err().to_string();
        assert!(error.contains("checkpoints/best: does not name the best"), "{garbage}: {error}");
        store.set_aside_after(1).unwrap();
    }
    store.unmark_best().unwrap();
    store.unmark_best().unwrap();
    assert_eq!(store.best().unwrap(), None);
}

#[test]
fn unknown_fields_of_the_same_format_are_read_kept_and_warned_of() {
    let run = directory();
    let mut store = store(run.path(), &[1]);
    forge(&store.path(1), |json| {
        json["surprise"] = 1.into();
        json["meta"]["future"] = serde_json::json!({ "a": [1, 2] });
        json["meta"]["best"]["setting"] = "spread".into();
        json["meta"]["placement"]["ranks"][1]["stage"] = 3.into();
    });
    let (loaded, warnings) = store.load_latest().unwrap();
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    let names =
        ["surprise", "meta.future", "meta.best.setting", "meta.placement.ranks.stage", "step-0000"];
    assert!(names.iter().all(|name| warning.contains(name)), "{warning}");
    let (_, lost) = warning.split_once("; a run from here does not write ").unwrap();
    assert!(lost.contains("surprise") && lost.contains("meta.best.setting"), "{warning}");
    assert!(!lost.contains("meta.future"), "{warning}");
    assert_eq!(loaded.meta.best, checkpoint(1).meta.best);
    // A run that resumes writes them into its own checkpoints.
    let meta = Meta { unknown: loaded.meta.unknown, ..checkpoint(2).meta };
    store.save(&Checkpoint { meta, ..checkpoint(2) }).unwrap();
    let text = fs::read_to_string(store.path(2).join(manifest::NAME)).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["meta"]["future"]["a"][1], 2);
    assert!(Checkpoint::load(&store.path(2)).is_ok());
}

/// Manifests of formats 4 and 5 as first written, which every version must still read.
#[test]
fn the_golden_manifests_are_read() {
    golden_is_read("manifest.json", 4);
    let read = golden_is_read("manifest-5.json", 5);
    let [parameters, moments] = &read.files[..] else { panic!("{:?}", read.files) };
    assert_eq!((parameters.slices.len(), moments.slices.len()), (2, 0));
    let SavedSlice { tensor, slice } = &parameters.slices["wte/1"];
    assert_eq!(
        (tensor.as_str(), slice.dims(), slice.whole_dims()),
        ("wte", vec![3, 2], &[3, 4][..])
    );
    assert_eq!(slice.ranges(1), [0..1, 3..4]);
}

fn golden_is_read(name: &str, format: u64) -> Manifest {
    let run = directory();
    let path = run.path().join("step-00000007");
    fs::create_dir(&path).unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
    fs::copy(golden, path.join(manifest::NAME)).unwrap();
    let read = Manifest::read(&path).unwrap();
    assert_eq!(read.unknown_names, [""; 0]);
    let mut meta = checkpoint(7).meta;
    meta.best = meta.best.map(|best| Best { runs: 0, ..best });
    assert_eq!(read.meta, meta);
    let bytes = |name| read.file(name).map(|file| file.bytes);
    assert_eq!((bytes(PARAMETERS), bytes(MOMENTS), bytes(CARRIED)), (Some(180), Some(232), None));
    // Another whitespace character changes the content, although the JSON is the same.
    let text = fs::read_to_string(path.join(manifest::NAME)).unwrap();
    let (found, changed) = (format!("\"format\": {format}"), format!("\"format\":  {format}"));
    assert!(text.contains(&found), "{text}");
    fs::write(path.join(manifest::NAME), text.replacen(&found, &changed, 1)).unwrap();
    assert!(refused(&path, manifest::NAME).contains("BLAKE3"));
    read
}

#[test]
fn a_directory_that_is_a_checkpoint_and_a_run_is_refused() {
    let run = directory();
    let store = store(run.path(), &[1, 2]);
    for file in [manifest::NAME, PARAMETERS, MOMENTS] {
        fs::copy(store.path(1).join(file), run.path().join(file)).unwrap();
    }
    let error = Checkpoint::load_path(run.path()).unwrap_err().to_string();
    assert!(error.contains("is a checkpoint itself and has checkpoints/"), "{error}");
    assert_eq!(Checkpoint::load_path(&store.path(2)).unwrap().0, checkpoint(2));
}

#[test]
fn a_checkpoint_is_one_of_a_run_by_its_place_and_name() {
    let run = directory();
    let mut store = store(run.path(), &[1, 2]);
    assert_eq!(run_of(&store.path(1)), Some(run.path().into()));
    let aside = store.set_aside(2).unwrap();
    assert_eq!(run_of(&aside), None);
    assert_eq!(run_of(run.path()), None);
    let copy = run.path().join("step-00000001");
    fs::rename(store.path(1), &copy).unwrap();
    assert_eq!(run_of(&copy), None);
    assert_eq!(run_of(Path::new("no/such/checkpoints/step-00000001")), None);
}

#[test]
fn the_same_step_is_kept_if_equal_and_replaced_if_not() {
    let run = directory();
    let mut store = store(run.path(), &[1]);
    let mark = store.path(1).join("mark");
    fs::write(&mark, b"").unwrap();
    store.save(&checkpoint(1)).unwrap();
    assert!(mark.exists(), "an equal checkpoint stays");

    let mut other = checkpoint(1);
    other.parameters[0].values[0] = 0.5;
    store.save(&other).unwrap();
    assert_eq!(store.load_latest().unwrap(), (other.clone(), vec![]));
    fs::write(store.path(1).join(PARAMETERS), b"damaged").unwrap();
    store.save(&other).unwrap();
    assert_eq!(store.load_latest().unwrap(), (other, vec![]));
    assert_eq!(listing(run.path()), ["step-00000001"]);
}

#[test]
fn a_start_finishes_what_a_crash_interrupted() {
    let run = directory();
    let store = store(run.path(), &[1, 2, 3, 4, 5]);
    let rename = |step: u64, ending: &str| {
        fs::rename(store.path(step), potluck_core::files::beside(&store.path(step), ending))
            .unwrap()
    };
    rename(1, ".gone");
    rename(2, ".old");
    fs::create_dir(potluck_core::files::beside(&store.path(3), ".old")).unwrap();
    rename(4, ".tmp");
    fs::create_dir(run.path().join("checkpoints/of mine.tmp")).unwrap();
    drop(store);
    let store = Store::open(run.path()).unwrap();
    assert_eq!(store.steps().unwrap(), [2, 3, 5]);
    assert_eq!(
        listing(run.path()),
        ["of mine.tmp", "step-00000002", "step-00000003", "step-00000005"]
    );
    assert_eq!(Checkpoint::load(&store.path(2)).unwrap(), checkpoint(2));
}

#[test]
fn a_checkpoint_that_turns_out_to_be_the_best_is_no_other_one() {
    let run = directory();
    let mut store = Store::open(run.path()).unwrap();
    let mut saved = checkpoint(5);
    saved.meta.evaluations_since_best = 2;
    store.save(&saved).unwrap();
    saved.meta.best = Some(Best { step: 5, val_loss: 0.1, samples: 7, runs: 2 });
    saved.meta.evaluations_since_best = 0;
    assert_eq!(store.save_and_keep(&saved).unwrap(), None);
    // A start that loaded it before takes over what another one has found since.
    let loaded = Meta { best: None, evaluations_since_best: 2, ..saved.meta.clone() };
    assert_eq!(store.evaluated_since(&loaded), saved.meta);
    let other = Meta { samples: 1, ..loaded };
    assert_eq!(store.evaluated_since(&other), other);
    saved.meta.samples += 1;
    store.mark_best(5).unwrap();
    assert!(store.save_and_keep(&saved).unwrap().is_some());
    // Its mark was one of the other checkpoint.
    assert_eq!(store.best().unwrap(), None);
}

#[test]
fn later_checkpoints_can_be_set_aside() {
    let run = directory();
    let mut store = store(run.path(), &[1, 2, 3]);
    store.mark_best(3).unwrap();
    let aside = store.set_aside_after(1).unwrap();
    assert_eq!(store.steps().unwrap(), [1]);
    assert_eq!(store.best().unwrap(), None);
    assert_eq!(Checkpoint::load(&aside[1]).unwrap(), checkpoint(3));
    // Checkpoints set aside are never replaced.
    for seed in 1..=2 {
        let mut another = checkpoint(2);
        another.meta.seed = seed;
        store.save(&another).unwrap();
        store.set_aside_after(1).unwrap();
    }
    let aside = ["aside", "aside.1", "aside.2"].map(|ending| format!("step-00000002.{ending}"));
    let [first, second, third] = &aside;
    let names = ["step-00000001", first, second, third, "step-00000003.aside"];
    assert_eq!(listing(run.path()), names);
    let seed = |name: &String| Manifest::read(&run.path().join("checkpoints").join(name));
    assert_eq!(aside.each_ref().map(|name| seed(name).unwrap().meta.seed), [u64::MAX, 1, 2]);
}

#[test]
fn one_writer_at_a_time_and_any_number_of_readers() {
    let run = directory();
    let store = store(run.path(), &[1]);
    let error = Store::open(run.path()).unwrap_err();
    let CheckpointError::InUse { by, .. } = &error else { panic!("{error}") };
    assert_eq!(*by, format!("process {}", std::process::id()));

    let mut reader = Store::open_to_read(run.path());
    assert_eq!(reader.load_latest().unwrap().0, checkpoint(1));
    let refusals =
        [reader.save(&checkpoint(2)).err(), reader.prune(2).err(), reader.mark_best(1).err()];
    assert!(refusals.iter().all(|e| matches!(e, Some(CheckpointError::ReadOnly { .. }))));
    drop(store);
    Store::open(run.path()).unwrap();
}

/// Saves checkpoints in a child process: this test binary, running only the test that calls this,
/// with `RUN` set. Returns its exit code, or `None` if a signal ended it.
fn save_in_another_process(run: &Path, faults: &str) -> Option<i32> {
    let test = "a_process_killed_while_it_saves_leaves_good_checkpoints";
    let this = format!("{}::{test}", module_path!().split_once("::").unwrap().1);
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &this])
        .env(RUN, run)
        .env(FAULT_ENV, faults)
        .output()
        .unwrap()
        .status;
    status.code()
}

fn save_until_killed(run: &Path) {
    let faults = Faults::from_environment().unwrap();
    let mut store = Store::open(run).unwrap().with_faults(faults);
    for step in 1..=4 {
        store.save(&checkpoint(step)).unwrap();
        store.prune(2).unwrap();
    }
    // A checkpoint of the same step with other content.
    let mut other = checkpoint(4);
    other.meta.seed = 0;
    store.save(&other).unwrap();
}

#[test]
#[cfg(unix)]
fn a_process_killed_while_it_saves_leaves_good_checkpoints() {
    if let Some(run) = std::env::var_os(RUN) {
        return save_until_killed(Path::new(&run));
    }
    let run = directory();
    assert_eq!(save_in_another_process(run.path(), ""), Some(0));
    assert_eq!(Store::open(run.path()).unwrap().load_latest().unwrap().0.meta.seed, 0);

    for point in ["begin", "tensors", "manifest", "rename", "prune"] {
        let run = directory();
        let faults = format!("kill@checkpoint-{point}:3");
        assert_eq!(save_in_another_process(run.path(), &faults), None, "{point}");
        let saved = if point == "prune" { 3 } else { 2 };
        let before = Store::open_to_read(run.path()).load_latest().unwrap();
        assert_eq!(before, (checkpoint(saved), vec![]), "{point}");
        // The lock of the dead process is free, and its temporary directory is removed.
        let store = Store::open(run.path()).unwrap();
        assert_eq!(store.steps().unwrap(), (1..=saved).collect::<Vec<_>>());
        assert_eq!(listing(run.path()).len() as u64, saved, "{point}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_a_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..200)
    ) {
        let _ = tensors::parse(&bytes);
        let directory = directory();
        fs::write(directory.path().join(manifest::NAME), &bytes).unwrap();
        prop_assert!(Manifest::read(directory.path()).is_err());
    }

    #[test]
    fn any_header_is_read_without_a_panic(
        shape in proptest::collection::vec(any::<u64>(), 0..3),
        start in any::<u64>(),
        end in any::<u64>(),
        kind in proptest::sample::select(vec!["F32", "F64", "U8", "F4", "BOOL"]),
        values in 0..64usize,
    ) {
        let header = format!(
            r#"{{"w":{{"dtype":"{kind}","shape":{shape:?},"data_offsets":[{start},{end}]}}}}"#
        );
        if let Ok(tensors) = tensors::parse(&safetensors_file(&header, values)) {
            prop_assert_eq!(tensors[0].values.len() * 4, values);
        }
    }

    #[test]
    fn any_tensors_round_trip(
        shapes in proptest::collection::vec(proptest::collection::vec(0..5usize, 0..4), 0..5)
    ) {
        let tensors: Vec<NamedTensor> = shapes
            .iter()
            .enumerate()
            .map(|(i, shape)| tensor(&format!("t{i}"), shape, i as f32))
            .collect();
        let directory = directory();
        let path = directory.path().join(PARAMETERS);
        let entry = tensors::write(&path, &tensors, || Ok(())).unwrap();
        let read = tensors::read(&path, &entry).unwrap();
        prop_assert_eq!(read.len(), tensors.len());
        for tensor in &tensors {
            let found = NamedTensor::find(&read, &tensor.name, &tensor.shape).unwrap();
            prop_assert_eq!(found, tensor);
        }
    }
}
