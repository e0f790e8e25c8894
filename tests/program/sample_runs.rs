//! Models of samples: images, tables, arrays, pictures and token files are trained on, evaluated
//! and predicted through the command line.

use std::fs;
use std::path::Path;
use std::time::Instant;

use serde_json::Value;

use crate::process::{Desk, Ran, finish, skip};
use crate::samples::{CLASSES, picture, table, write_idx};

/// A desk with images of four classes in `images`.
fn desk_with_images() -> Desk {
    let desk = Desk::new();
    write_idx(&desk.path("images"), "train", 0, 600);
    write_idx(&desk.path("images"), "t10k", 600, 200);
    desk
}

const SMALL: &str = "train --data images --devices cpu --quiet --batch 32 --steps 60 \
                     --set model.hidden=16 --set train.eval_every=20 --lr 0.01";

fn evaluations(desk: &Desk, run: &str) -> Vec<Value> {
    let lines = desk.metrics(run).into_iter();
    lines.filter(|line| line.get("val_loss").is_some()).collect()
}

fn prediction(desk: &Desk, file: &str) -> Vec<Vec<String>> {
    let text = fs::read_to_string(desk.path(file)).unwrap();
    text.lines().map(|line| line.split(',').map(String::from).collect()).collect()
}

#[test]
fn images_are_classified_and_predicted() {
    let desk = desk_with_images();
    desk.run(&format!("{SMALL} --out run")).ok();
    let step = &desk.steps("run")[0];
    assert_eq!(step["samples"], 32, "{step}");
    assert!(step["samples_per_s"].as_f64().unwrap() > 0.0 && step.get("tokens").is_none());
    let last = evaluations(&desk, "run").pop().unwrap();
    assert!(last["val_accuracy"].as_f64().unwrap() > 0.97, "{last}");
    assert_eq!((&last["samples"], &last["targets"]), (&Value::from(200), &Value::from(200)));
    let resolved = fs::read_to_string(desk.path("run/resolved.toml")).unwrap();
    assert!(resolved.contains("\"t10k-labels-idx1-ubyte\" = \"208 bytes, BLAKE3 "), "{resolved}");

    let shown = desk.run("eval run --devices cpu").ok().out;
    assert!(shown.contains("  accuracy ") && shown.contains("class  chosen"), "{shown}");
    let json: Value = serde_json::from_str(&desk.run("eval run --json").ok().out).unwrap();
    let confusion = json["confusion"].as_array().unwrap();
    let row =
        |row: &Value| row.as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).sum::<u64>();
    assert_eq!(confusion.iter().map(row).sum::<u64>(), 200, "{json}");
    assert_eq!(json["accuracy"], last["val_accuracy"]);
    let other: Value =
        serde_json::from_str(&desk.run("eval run --json --data images").ok().out).unwrap();
    assert_eq!((&other["samples"], &other["loss"]), (&json["samples"], &json["loss"]));

    write_idx(&desk.path("new"), "new", 5000, 70);
    fs::remove_file(desk.path("new/new-labels-idx1-ubyte")).unwrap();
    desk.run("predict run --devices cpu*2 --data new --out new.csv").ok();
    let rows = prediction(&desk, "new.csv");
    assert_eq!(rows[0][..4], ["sample", "class", "probability", "p(0)"]);
    assert_eq!((rows.len(), rows[1].len()), (71, 3 + CLASSES));
    let is_right = |index: &usize| rows[1 + index][1] == picture(5000 + index).1.to_string();
    assert!((0..70).filter(is_right).count() >= 67);
    let probabilities = rows[1][3..].iter().map(|text| text.parse::<f64>().unwrap());
    assert!((probabilities.sum::<f64>() - 1.0).abs() < 1e-5);
    let labelled = desk.run("predict run --devices cpu --data images --out all.csv").ok();
    assert!(labelled.err.contains("200 samples predicted in all.csv; "), "{}", labelled.err);
    let percent = labelled.err.rsplit_once(" right, ").unwrap().1.trim_end_matches(" %\n");
    assert!(percent.parse::<f64>().unwrap() > 97.0, "{}", labelled.err);
    let same = desk.run("predict run --data new --out new/new-images-idx3-ubyte").ended(78);
    assert!(same.err.contains("is a file of --data new"), "{}", same.err);
}

#[test]
fn classifier_any_course_same_bits() {
    let desk = desk_with_images();
    let weights = |run: &str| desk.checkpoint(run, 60, "parameters.safetensors");
    let augmented = format!("{SMALL} --set data.crop=1 --set model.dropout=0.1");
    desk.run(&format!(
        "{augmented} --out whole --set train.checkpoint_every=30 \
                       --set train.checkpoint_keep=9"
    ))
    .ok();
    let half = "whole/checkpoints/step-00000030";
    desk.run(&format!("train --resume {half} --devices cpu --quiet --out rest")).ok();
    assert_eq!(weights("rest"), weights("whole"));
    let pipeline = augmented.replace("--devices cpu", "--devices cpu*2 --pipeline 2");
    desk.run(&format!("{pipeline} --micro-batch 32 --out pipeline")).ok();
    assert_eq!(weights("pipeline"), weights("whole"));
    let [of_pipeline, of_whole] =
        ["pipeline", "whole"].map(|run| evaluations(&desk, run).pop().unwrap());
    assert_eq!(of_pipeline["val_accuracy"], of_whole["val_accuracy"]);
    desk.run(&format!("{augmented} --out plain --set data.crop=0")).ok();
    assert_ne!(weights("plain"), weights("whole"));
}

#[test]
fn table_values_predicted_in_units() {
    let desk = Desk::new();
    desk.write("table.csv", table(500));
    let line = "train --data table.csv --devices cpu --quiet --steps 300 --batch 50 --out run \
                --set model.hidden=[] --lr 0.05 --set weight_decay=0 --set data.target=y";
    desk.run(line).ok();
    let last = evaluations(&desk, "run").pop().unwrap();
    let rmse = last["val_rmse"].as_f64().unwrap();
    // The noise has a deviation of 1, the targets one of about 2000.
    assert!((0.5..3.0).contains(&rmse), "{last}");
    let known = desk.run("predict run --devices cpu --data table.csv --out known.csv").ok();
    let told = known.line("warning: the run was trained on 450 of these 500 samples; ");
    assert!(told.ends_with("`potluck eval run` measures on the 50 that were held out"), "{told}");
    desk.write("new.csv", "b,more,a\n0,9,4\n10,9,4\n");
    let out = desk.run("predict run --data new.csv").ok().out;
    assert_eq!(desk.run("predict run --data new.csv --out -").ok().out, out);
    let rows: Vec<Vec<&str>> = out.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(rows[0], ["sample", "y"]);
    let value = |row: usize| rows[row][1].parse::<f64>().unwrap();
    assert!((value(1) - 6200.0).abs() < 10.0 && (value(2) - 4200.0).abs() < 10.0, "{out}");
    desk.write("large.csv", "a,b\n4,0\n3e38,3e38\n4,0\n-3e38,3e38\n");
    let warned = desk.run("predict run --devices cpu --data large.csv").ok().err;
    let expected = "warning: the predictions of 2 of 4 samples are not finite numbers, the first \
                    of them that of 1;";
    assert!(warned.contains(expected), "{warned}");
    let shown = desk.run("eval run").ok().out;
    assert!(shown.contains("  rmse ") && shown.contains(" 50 samples"), "{shown}");
}

#[test]
fn token_files_are_trained_on() {
    let desk = Desk::new();
    let tokens: Vec<u16> = (0..4000u32).map(|i| (i * i % 17) as u16).collect();
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    let described = serde_json::json!({
        "vocabulary": 17, "dtype": "u16", "count": tokens.len(),
        "blake3": blake3::hash(&bytes).to_hex().to_string(),
        "documents": [0, 1700, 3400],
    });
    desk.write("t.bin", &bytes);
    desk.write("t.json", described.to_string());
    desk.run("train tiny.toml --data t.bin --devices cpu --quiet --steps 60 --out run").ok();
    let (losses, last) = (desk.losses("run"), evaluations(&desk, "run").pop().unwrap());
    assert!(losses[59] < 0.7 * losses[0], "{losses:?}");
    assert!(last["val_loss"].as_f64().unwrap() < losses[0], "{last}");
    let evaluated = desk.run("eval run --devices cpu").ok().out;
    assert!(evaluated.contains("perplexity"), "{evaluated}");
    desk.write("t.csv", table(10));
    for line in ["generate run --devices cpu", "predict run --devices cpu --data t.csv"] {
        refused(&desk, line, &["of token ids without a tokenizer", "potluck eval"]);
    }
}

#[test]
fn pictures_of_directories_classified() {
    let desk = Desk::new();
    for index in 0..160 {
        let (pixels, class) = picture(index);
        let directory = desk.path(&format!("pictures/class {class}"));
        fs::create_dir_all(&directory).unwrap();
        let size = crate::samples::SIZE as u32;
        let path = directory.join(format!("{index:03}.png"));
        image::save_buffer(path, &pixels, size, size, image::ColorType::L8).unwrap();
    }
    let line = "train --data pictures --devices cpu --quiet --batch 16 --steps 60 --out run \
                --set data.held_out=0.25 --set data.flip=true --set model.hidden=16";
    refused(
        &desk,
        &line.replace("--out run", "--out pictures/run"),
        &["pictures/run: lies among the pictures of"],
    );
    desk.run(line).ok();
    let last = evaluations(&desk, "run").pop().unwrap();
    assert!(last["val_accuracy"].as_f64().unwrap() > 0.95, "{last}");
    assert_eq!(last["samples"], 40);
    fs::rename(desk.path("pictures/class 2"), desk.path("some")).unwrap();
    desk.run("predict run --data some --out some.csv --devices cpu").ok();
    let rows = prediction(&desk, "some.csv");
    assert!(rows[1][0].ends_with(".png") && rows[1][1] == "class 2", "{:?}", rows[1]);
}

/// Asserts that a command is refused with one sentence, and leaves no run.
fn refused(desk: &Desk, line: &str, parts: &[&str]) {
    let before = desk.files();
    let ran: Ran = desk.run(line).ended(78);
    let line = ran.line("error:");
    for part in parts {
        assert!(line.contains(part), "'{part}' is missing in: {line}");
    }
    assert_eq!(desk.files(), before);
}

#[test]
fn data_bad_names_file_and_place() {
    let desk = desk_with_images();
    let train = "train --devices cpu --quiet --steps 1 --out run --data";
    let images = desk.path("images/train-images-idx3-ubyte");
    let whole = fs::read(&images).unwrap();
    fs::write(&images, &whole[..100]).unwrap();
    refused(&desk, &format!("{train} images"), &["train-images-idx3-ubyte"]);
    desk.write("t.csv", "a,y\n1,2\n3,nan\n5,6\n");
    refused(&desk, &format!("{train} t.csv"), &["t.csv", "line 3"]);
    desk.write("t.csv", table(50));
    let target = format!("{train} t.csv --set data.target=z");
    refused(&desk, &target, &["t.csv", "z", "a, b, y"]);
    refused(&desk, &format!("{train} t.csv --set model.kind=gpt"), &["model.kind expects"]);
}

#[test]
fn data_other_refused_or_warned_of() {
    let desk = Desk::new();
    desk.write("t.csv", table(100));
    let line = "train --data t.csv --devices cpu --quiet --steps 5 --out run";
    desk.run(line).ok();
    desk.write("other.csv", "a,c,y\n1,2,3\n4,5,6\n");
    refused(&desk, "eval run --devices cpu --data other.csv", &["other.csv", "b"]);
    refused(&desk, "predict run --devices cpu --data missing.csv", &["missing.csv"]);
    refused(&desk, "generate run --devices cpu", &["not of a model of text"]);
    desk.train("--quiet --out text --steps 1").ok();
    refused(&desk, "predict text --devices cpu --data t.csv", &["model of text"]);
    for set in ["data.target=b", "data.task=classification", "data.normalize=false"] {
        let line = format!("train --resume run --devices cpu --steps 6 --set {set}");
        let key = set.split('=').next().unwrap();
        refused(&desk, &line, &[&format!("{key} does not fit"), "start a new run"]);
    }
    let more: String = table(50).lines().map(|line| format!("{line},z\n")).collect();
    desk.write("more.csv", more);
    let evaluated = desk.run("eval run --json --devices cpu --data more.csv").ok().out;
    assert!(evaluated.contains("\"samples\":50"), "{evaluated}");
    desk.write("bare.csv", "a,b,id\n1,2,7\n");
    let predicted = desk.run("predict run --devices cpu --data bare.csv").ok().out;
    assert!(predicted.starts_with("sample,y\n0,"), "{predicted}");
    desk.write("t.csv", table(120));
    let resumed = desk.run("train --resume run --devices cpu --steps 6").ok();
    assert!(resumed.err.contains("the data are not those"), "{}", resumed.err);
}

/// Trains on MNIST, for whoever has it.
#[test]
fn mlp_recognizes_mnist() {
    let Some(data) = std::env::var_os("POTLUCK_TEST_DATA") else {
        return skip("POTLUCK_TEST_DATA names no directory with mnist/");
    };
    let data = Path::new(&data).join("mnist").canonicalize().expect("the images are there");
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/configs/mnist-mlp.toml");
    let desk = Desk::new();
    let mut command = desk.command("train --devices cpu --quiet --out run");
    command.arg("--data").arg(data).arg(config);
    let started = Instant::now();
    finish(command.spawn().unwrap(), "digits").ok();
    assert!(started.elapsed().as_secs() < 60, "{:?}", started.elapsed());
    let last = evaluations(&desk, "run").pop().unwrap();
    assert_eq!(last["samples"], 2000);
    assert!(last["val_accuracy"].as_f64().unwrap() > 0.95, "{last}");
}
