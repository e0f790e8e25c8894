//! Tests of tables.

use super::*;
use crate::formats::{KnownSamples, TargetKind, load_for_evaluation, load_for_prediction};

fn table(text: &str) -> LoadedSamples {
    loaded(SampleFormat::Csv, &[("t.csv", text.as_bytes())], "t.csv")
}

fn refused_with(text: &str, options: &ReadOptions) -> String {
    refusal_with(SampleFormat::Csv, &[("t.csv", text.as_bytes())], "t.csv", options)
}

fn texts(names: &[&str]) -> Vec<String> {
    names.iter().map(ToString::to_string).collect()
}

fn options(target: &[&str], kind: Option<TargetKind>) -> ReadOptions {
    ReadOptions { target: texts(target), kind, ..ReadOptions::default() }
}

#[test]
fn the_last_column_is_the_target() {
    let loaded = table("a,b,y\n1,-2.5,3\n1e3, 0 ,4.5\n");
    assert_eq!(
        (&loaded.train.shape[..], &loaded.train.columns[..]),
        (&[2][..], &["a", "b"].map(String::from)[..])
    );
    assert_eq!(values(&loaded.train), [1.0, -2.5, 1000.0, 0.0]);
    let values = Targets::Values { values: vec![3.0, 4.5], names: vec!["y".into()] };
    assert_eq!(loaded.train.targets, values);
    assert_eq!(file_names(&loaded), ["t.csv"]);
}

#[test]
fn texts_are_classes_in_their_order() {
    let loaded = table("a,y\n1,red\n2,blue\n3,red\n4,10\n");
    assert_eq!(ids(&loaded.train), [2, 1, 2, 0]);
    assert_eq!(names(&loaded.train), ["10", "blue", "red"]);
}

#[test]
fn numbers_are_classes_if_the_kind_says_so() {
    let directory = directory(&[("t.csv", b"y,a\n10,1\n9,2\n-1,3\n")]);
    let options = options(&["y"], Some(TargetKind::Classes));
    let path = directory.path().join("t.csv");
    let loaded = load(SampleFormat::Csv, &path, None, &options).unwrap();
    assert_eq!((ids(&loaded.train), names(&loaded.train)), (&[2, 1, 0][..], vec!["-1", "9", "10"]));
    assert_eq!(values(&loaded.train), [1.0, 2.0, 3.0]);
}

#[test]
fn values_may_have_several_columns() {
    let directory = directory(&[("t.csv", b"u,a,v\n1,2,3\n4,5,6\n")]);
    let path = directory.path().join("t.csv");
    let loaded = load(SampleFormat::Csv, &path, None, &options(&["v", "u"], None)).unwrap();
    let names = vec!["v".into(), "u".into()];
    assert_eq!(loaded.train.targets, Targets::Values { values: vec![3.0, 1.0, 6.0, 4.0], names });
}

#[test]
fn marks_line_ends_delimiters_and_quotes_are_told_apart() {
    for text in [
        "\u{FEFF}a,y\r\n1,x\r\n\r\n2,z\r\n",
        "a;y\n1;x\n2;z",
        "a\ty\n1\tx\n2\tz\n",
        "\"a\",\"y\"\n\"1\",\"x\"\n2,z\n",
    ] {
        let loaded = table(text);
        assert_eq!(loaded.train.columns, ["a"], "{text:?}");
        assert_eq!((values(&loaded.train), names(&loaded.train)), (vec![1.0, 2.0], vec!["x", "z"]));
    }
    let loaded = table("\"a,b\";y\n1;2\n");
    assert_eq!(loaded.train.columns, ["a,b"]);
}

#[test]
fn numbers_in_names_of_columns_and_quotes_in_cells_are_read() {
    assert_eq!(table("0,1,2\n1,2,3\n").train.columns, ["0", "1"], "numbered columns are named");
    let closed = table("a,y\n1,\"x, \"\"y\"\"\n z\"\n2,5\" long\n");
    let names = match closed.train.targets {
        Targets::Classes { names, .. } => names,
        other => panic!("{other:?}"),
    };
    assert_eq!(names, ["5\" long", "x, \"y\"\n z"]);
    let directory = directory(&[("t.csv", b"a,y\n1,2\n2,3\n3,NA\n")]);
    let path = directory.path().join("t.csv");
    let classes = options(&[], Some(TargetKind::Classes));
    assert!(load(SampleFormat::Csv, &path, None, &classes).is_ok());
}

/// Options for a model of two columns and two classes.
fn known() -> ReadOptions {
    let known = KnownSamples {
        shape: vec![2],
        columns: texts(&["a", "b"]),
        target_columns: Vec::new(),
        classes: texts(&["x", "w"]),
    };
    ReadOptions { known: Some(known), ..ReadOptions::default() }
}

#[test]
fn bad_tables_are_refused() {
    let long = format!("a,y\n{},1\n", "é".repeat(60));
    let of_long = format!(
        "line 2, column \"a\": \"{}..\" is not a number; encode text as numbers, or drop the \
         column",
        "é".repeat(40)
    );
    for (text, expected) in [
        // Cells.
        (
            "a,y\n1,1\nred,2\n",
            "line 3, column \"a\": \"red\" is not a number; encode text as numbers, or drop the \
             column",
        ),
        (
            "a,y\r\n1,1\r\n\r\n,2\r\n",
            "line 4, column \"a\": is empty; fill in missing values, or drop the row",
        ),
        ("a,y\n1,1\nNaN,1\n", "line 3, column \"a\": NaN is not a finite 32-bit number"),
        ("a,y\n1,1\n1e39,1\n", "line 3, column \"a\": 1e39 is not a finite 32-bit number"),
        ("a,y\n1,inf\n", "line 2, column \"y\": inf is not a finite 32-bit number"),
        ("a,y\n1,\n", "line 2, column \"y\": is empty; fill in missing values, or drop the row"),
        ("a,y\n1,x\n2, \n", "line 3, column \"y\": is empty; expected the name of a class"),
        (&long, &of_long),
        (
            "a,y\n1,2\n2,3\n3,NA\n",
            "line 4, column \"y\": \"NA\" is not a number, and most targets are; correct it, or \
             set data.task to classification if these are names of classes",
        ),
        (
            "a,y\n1,x\n2,\"x\n3,y\n4,z\n",
            "line 3: a quotation mark opens a cell that is never closed; close it",
        ),
        // Structure.
        ("", "is empty; give a file with data in it as --data or data.path"),
        ("\u{FEFF}", "line 1: is empty; expected the names of the columns"),
        ("a,y\n", "has no rows below its header line"),
        ("a,y\n1,2\n1,2,3\n", "line 3: has 3 columns, and the header line has 2"),
        ("a,b,y\n1,2,3\n1\n", "line 3: has 1 columns, and the header line has 3"),
        (",a,y\n0,1,2\n", "line 1: column 1 has no name; give it one, or drop it"),
        ("a,b,a\n0,1,2\n", "line 1: columns 1 and 3 have the same name \"a\""),
        (
            "5.1,3.5,0\n4,3,0\n",
            "line 1: expected the names of the columns, found numbers: 5.1, 3.5, 0; add a line of \
             names",
        ),
        (
            "5.1,-3.5,1.4,setosa\n4.9,3,1.4,setosa\n",
            "line 1: expected the names of the columns, found numbers: 5.1, -3.5, 1.4, setosa; \
             add a line of names",
        ),
        ("y\n1\n", "line 1: has no column besides the target: y"),
    ] {
        let refused = refused_with(text, &ReadOptions::default());
        assert_eq!(refused, format!("t.csv: {expected}"));
    }
    for (text, options, expected) in [
        (
            "a,y\n1,x\n",
            options(&[], Some(TargetKind::Values)),
            "line 2, column \"y\": \"x\" is not a number; set data.task to classification if they \
             are names",
        ),
        (
            "a,b,y\n1,2,3\n",
            options(&["y", "y"], None),
            "line 1: the target \"y\" is named twice, the second time as 2",
        ),
        (
            "u,a,v\n1,2,3\n",
            options(&["v", "u"], Some(TargetKind::Classes)),
            "line 1: classes have one target column, and 2 are given",
        ),
        (
            "a,y\n1,2\n",
            options(&["z"], None),
            "line 1: has no column \"z\", which is a target; its columns are a, y",
        ),
        (
            "a,c,y\n1,2,x\n",
            known(),
            "line 1: has no column \"b\", which the model needs; its columns are a, c, y",
        ),
        (
            "a,b,y\n1,2,x\n1,2,z\n",
            known(),
            "line 3, column \"y\": the class \"z\" is none of those of the model: x, w",
        ),
    ] {
        assert_eq!(refused_with(text, &options), format!("t.csv: {expected}"));
    }
    let bytes: &[u8] = b"a,y\n1,\xff\n";
    for (path, expected) in [
        ("t.csv", "t.csv: line 2, column \"y\": the name of the class is not UTF-8"),
        ("", "DIR: is a directory; give the path of one table"),
    ] {
        assert_eq!(refusal(SampleFormat::Csv, &[("t.csv", bytes)], path), expected);
    }
}

#[test]
fn a_model_gets_its_columns_in_its_order_and_its_classes() {
    let options = known();
    let directory = directory(&[
        ("other.csv", b"b,text,a,y\n1,p,2,w\n3,q,4,x\n"),
        ("first.csv", b"y,b,a\nw,1,2\n"),
        ("bare.csv", b"b,a\n1,2\n"),
    ]);
    let read = |name: &str| {
        let path = directory.path().join(name);
        load_for_prediction(SampleFormat::Csv, &path, &options).unwrap()
    };
    let other = read("other.csv");
    assert_eq!(other.columns, ["a", "b"]);
    assert_eq!((values(&other), ids(&other)), (vec![2.0, 1.0, 4.0, 3.0], &[1, 0][..]));
    assert_eq!(names(&other), ["x", "w"]);
    assert_eq!(ids(&read("first.csv")), [1]);
    let bare = read("bare.csv");
    assert_eq!((values(&bare), &bare.targets), (vec![2.0, 1.0], &Targets::Absent));
    let path = directory.path().join("bare.csv");
    let refused = load(SampleFormat::Csv, &path, None, &options).err().unwrap();
    assert_eq!(
        message(directory.path(), &refused),
        "bare.csv: line 1: its last column is a feature; name the column of the targets"
    );
}

/// Returns the options for a model of the columns a and b that predicts y: one of two classes, or
/// a value.
fn known_target(classes: &[&str]) -> ReadOptions {
    let mut options = known();
    let known = options.known.as_mut().unwrap();
    (known.target_columns, known.classes) = (texts(&["y"]), texts(classes));
    options
}

#[test]
fn a_model_is_given_the_target_that_it_was_trained_on() {
    let directory = directory(&[
        ("more.csv", b"a,y,b,z\n1,0,2,1\n3,1,4,0\n"),
        ("bare.csv", b"a,b,id\n1,2,77\n"),
    ]);
    let path = |name: &str| directory.path().join(name);
    let classes = known_target(&["0", "1"]);
    let of_classes = load_for_evaluation(SampleFormat::Csv, &path("more.csv"), &classes).unwrap();
    assert_eq!(ids(&of_classes.train), [0, 1]);
    let of_values = load_for_prediction(SampleFormat::Csv, &path("more.csv"), &known_target(&[]));
    let values = Targets::Values { values: vec![0.0, 1.0], names: texts(&["y"]) };
    assert_eq!(of_values.unwrap().targets, values);
    let bare = load_for_prediction(SampleFormat::Csv, &path("bare.csv"), &classes).unwrap();
    assert_eq!(bare.targets, Targets::Absent);
    let refused = |result: Result<LoadedSamples, DataError>| {
        message(directory.path(), &result.err().unwrap())
    };
    assert_eq!(
        refused(load_for_evaluation(SampleFormat::Csv, &path("bare.csv"), &classes)),
        "bare.csv: line 1: has no column \"y\", which is a target; its columns are a, b, id"
    );
    let other = |name: &str| {
        let options = ReadOptions { target: texts(&[name]), ..known_target(&[]) };
        refused(load(SampleFormat::Csv, &path("more.csv"), None, &options))
    };
    assert_eq!(other("z"), "more.csv: its target is z, and that of the model is y");
    assert_eq!(
        other("b"),
        "more.csv: line 1: the column \"b\" is a feature of the model, and no target of it"
    );
}

#[test]
fn files_of_one_name_are_told_apart_by_their_directories() {
    let table = |value: u8| format!("a,y\n1,2\n3,{value}\n").into_bytes();
    let tables = [table(4), table(5), table(6)];
    let directory = directory(&[
        ("a/data.csv", &tables[0]),
        ("b/data.csv", &tables[1]),
        ("b/b/data.csv", &tables[2]),
    ]);
    let files = |train: &str, held_out: &str| {
        let [train, held_out] = [train, held_out].map(|name| directory.path().join(name));
        let loaded = load(SampleFormat::Csv, &train, Some(&held_out), &ReadOptions::default());
        file_names(&loaded.unwrap()).join(" ")
    };
    assert_eq!(files("a/data.csv", "b/data.csv"), "b/data.csv data.csv");
    assert_eq!(files("b/data.csv", "b/b/data.csv"), "b/data.csv data.csv");
}

#[test]
fn a_held_out_table_has_the_target_of_the_training_table() {
    let directory = directory(&[("t.csv", b"a,y\n1,2\n3,4\n"), ("v.csv", b"a,y,z\n5,6,7\n")]);
    let [train, held_out] = ["t.csv", "v.csv"].map(|name| directory.path().join(name));
    let loaded = load(SampleFormat::Csv, &train, Some(&held_out), &ReadOptions::default()).unwrap();
    let targets = Targets::Values { values: vec![6.0], names: texts(&["y"]) };
    assert_eq!(loaded.validation.unwrap().targets, targets);
}

#[test]
fn targets_may_be_missing_where_they_are_predicted() {
    let directory = directory(&[("t.csv", b"a,b\n1,2\n"), ("empty.csv", b"a,y,b\n1,,2\n3, ,4\n")]);
    for name in ["t.csv", "empty.csv"] {
        let path = directory.path().join(name);
        let options = options(&["y"], None);
        let samples = load_for_prediction(SampleFormat::Csv, &path, &options).unwrap();
        assert_eq!((samples.columns.len(), &samples.targets), (2, &Targets::Absent), "{name}");
    }
}

#[test]
fn a_held_out_table_has_the_columns_of_the_training_table() {
    let directory = directory(&[("t.csv", b"a,b,y\n1,2,p\n1,2,q\n"), ("v.csv", b"y,b,a\nq,3,4\n")]);
    let [train, held_out] = ["t.csv", "v.csv"].map(|name| directory.path().join(name));
    let read = |train, val| load(SampleFormat::Csv, train, Some(val), &ReadOptions::default());
    let loaded = read(&train, &held_out).unwrap();
    let validation = loaded.validation.as_ref().unwrap();
    assert_eq!((values(validation), ids(validation)), (vec![4.0, 3.0], &[1][..]));
    assert_eq!(file_names(&loaded), ["t.csv", "v.csv"]);
    fs::write(&held_out, "a,y\n1,p\n").unwrap();
    let refused = read(&train, &held_out).err().unwrap();
    assert_eq!(
        message(directory.path(), &refused),
        "v.csv: line 1: has no column \"b\", which the training samples have; its columns are a, y"
    );
}
