//! Tests of NumPy arrays.

use super::*;
use crate::formats::{KnownSamples, TargetKind, load_for_prediction};

/// Returns an array as `numpy.save` writes it.
pub(in crate::formats) fn npy(descr: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    of_header(
        1,
        &format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"),
        data,
    )
}

pub(in crate::formats) fn of_header(version: u8, header: &str, data: &[u8]) -> Vec<u8> {
    let start = if version == 1 { 10 } else { 12 };
    let padding = 63 - (start + header.len()) % 64;
    let length = (header.len() + padding + 1) as u32;
    let mut bytes = b"\x93NUMPY".to_vec();
    bytes.extend([version, 0]);
    bytes.extend(&length.to_le_bytes()[..if version == 1 { 2 } else { 4 }]);
    bytes.extend(header.as_bytes());
    bytes.extend(" ".repeat(padding).as_bytes());
    bytes.push(b'\n');
    bytes.extend(data);
    bytes
}

fn floats(shape: &str, values: &[f32]) -> Vec<u8> {
    let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    npy("<f4", shape, &data)
}

fn read(inputs: &[u8], targets: &[u8]) -> LoadedSamples {
    loaded(SampleFormat::Npy, &[("inputs.npy", inputs), ("targets.npy", targets)], "")
}

fn refused(inputs: &[u8], targets: &[u8], options: &ReadOptions) -> String {
    let files = [("inputs.npy", inputs), ("targets.npy", targets)];
    refusal_with(SampleFormat::Npy, &files, "", options)
}

#[test]
fn inputs_and_targets_are_read() {
    let inputs = floats("(2, 1, 2)", &[1.0, 2.0, 3.0, 4.5]);
    let classes = npy("<i8", "(2,)", &[[3u8, 0, 0, 0, 0, 0, 0, 0], [0; 8]].concat());
    let val = floats("(1, 1, 2)", &[5.0, 6.0]);
    let val_classes = npy("|u1", "(1,)", &[2]);
    let files: [(&str, &[u8]); 4] = [
        ("inputs.npy", &inputs),
        ("targets.npy", &classes),
        ("val_inputs.npy", &val),
        ("val_targets.npy", &val_classes),
    ];
    for path in ["", "inputs.npy"] {
        let loaded = loaded(SampleFormat::Npy, &files, path);
        assert_eq!(loaded.train.shape, [1, 2]);
        assert_eq!(values(&loaded.train), [1.0, 2.0, 3.0, 4.5]);
        assert_eq!(ids(&loaded.train), [3, 0]);
        assert_eq!(names(&loaded.train), ["0", "1", "2", "3"]);
        let validation = loaded.validation.as_ref().unwrap();
        assert_eq!((values(validation), ids(validation)), (vec![5.0, 6.0], &[2][..]));
        assert_eq!(names(validation).len(), 4);
        assert_eq!(file_names(&loaded), files.map(|(name, _)| name));
    }
    let loaded = loaded(SampleFormat::Npy, &files, "val_inputs.npy");
    assert_eq!((loaded.train.len(), loaded.validation.is_none()), (1, true));
}

#[test]
fn every_type_has_its_values() {
    for (descr, data, expected) in [
        ("|b1", &[1u8, 0][..], [1.0, 0.0]),
        ("|u1", &[255, 1], [255.0, 1.0]),
        ("|i1", &[255, 1], [-1.0, 1.0]),
        ("<u2", &[1, 2, 255, 255], [513.0, 65535.0]),
        (">u2", &[1, 2, 255, 255], [258.0, 65535.0]),
        (">i2", &[255, 254, 0, 1], [-2.0, 1.0]),
        ("<u4", &[255, 255, 255, 255, 0, 0, 0, 1], [4_294_967_295.0, 16_777_216.0]),
        ("<i4", &[255, 255, 255, 255, 0, 0, 0, 1], [-1.0, 16_777_216.0]),
        (">i4", &[255, 255, 255, 254, 0, 0, 0, 1], [-2.0, 1.0]),
        ("<u8", &[[255; 8], [1, 0, 0, 0, 0, 0, 0, 0]].concat(), [u64::MAX as f32, 1.0]),
        ("<i8", &[[255; 8], [1, 0, 0, 0, 0, 0, 0, 0]].concat(), [-1.0, 1.0]),
        ("<f2", &[0, 0x3c, 0, 0xc0], [1.0, -2.0]),
        (">f2", &[0x3c, 0, 0x04, 0], [1.0, 2f32.powi(-14)]),
        (">f4", &[1.5f32.to_be_bytes(), (-2f32).to_be_bytes()].concat(), [1.5, -2.0]),
        ("<f8", &[0.1f64.to_le_bytes(), (-2f64).to_le_bytes()].concat(), [0.1, -2.0]),
    ] {
        let array = npy(descr, "(2, 1)", data);
        assert_eq!(values(&read(&array, &array_of_zeros()).train), expected, "{descr}");
    }
}

/// Returns targets of two samples.
fn array_of_zeros() -> Vec<u8> {
    npy("|u1", "(2,)", &[0, 0])
}

#[test]
fn all_versions_and_fortran_order_are_read() {
    let header = "{'descr': '|u1', 'fortran_order': True, 'shape': (2L, 3, 2), }";
    // The element [i, j, k] is 100 i + 10 j + k, and i is the fastest.
    let data = [0, 100, 10, 110, 20, 120, 1, 101, 11, 111, 21, 121];
    for version in [1, 2, 3] {
        let loaded = read(&of_header(version, header, &data), &array_of_zeros());
        let expected = [0, 1, 10, 11, 20, 21, 100, 101, 110, 111, 120, 121].map(|n| n as f32);
        assert_eq!(
            (values(&loaded.train), &loaded.train.shape[..]),
            (expected.to_vec(), &[3, 2][..])
        );
    }
}

#[test]
fn floats_are_values_and_a_kind_overrides_integers() {
    let inputs = floats("(2,)", &[1.0, 2.0]);
    let loaded = read(&inputs, &floats("(2, 2)", &[1.0, 2.0, 3.0, 4.0]));
    assert_eq!(
        (loaded.train.shape.as_slice(), names(&loaded.train)),
        (&[1][..], vec!["target 0", "target 1"])
    );
    let values = |targets: &[u8]| {
        let directory = directory(&[("inputs.npy", &inputs), ("targets.npy", targets)]);
        let kind = Some(TargetKind::Values);
        let options = ReadOptions { kind, ..ReadOptions::default() };
        load(SampleFormat::Npy, directory.path(), None, &options).unwrap().train.targets
    };
    let names = vec!["target".into()];
    let expected = Targets::Values { values: vec![255.0, 0.0], names };
    assert_eq!(values(&npy("|u1", "(2,)", &[255, 0])), expected);
}

#[test]
fn inputs_alone_can_be_predicted() {
    let inputs = floats("(2, 3)", &[0.0; 6]);
    let directory = directory(&[("inputs.npy", &inputs), ("x.npy", &inputs)]);
    for path in ["", "x.npy"] {
        let path = directory.path().join(path);
        let mut options = ReadOptions::default();
        let samples = load_for_prediction(SampleFormat::Npy, &path, &options).unwrap();
        assert_eq!((samples.len(), samples.targets), (2, Targets::Absent));
        let known = KnownSamples { shape: vec![1, 28, 28], ..KnownSamples::default() };
        options.known = Some(known);
        let refused = load_for_prediction(SampleFormat::Npy, &path, &options).err().unwrap();
        let expected = "its samples are 3, and those of the model are 1x28x28";
        assert!(refused.to_string().ends_with(expected), "{refused}");
    }
    assert_eq!(
        refusal(SampleFormat::Npy, &[("inputs.npy", &inputs)], ""),
        "inputs.npy: has no targets: there is no targets.npy beside it"
    );
    assert_eq!(
        refusal(SampleFormat::Npy, &[("x.npy", &inputs)], "x.npy"),
        "x.npy: has no targets: name it inputs.npy, with targets.npy beside it"
    );
    assert_eq!(refusal(SampleFormat::Npy, &[("x", b"")], ""), "DIR: has no inputs.npy");
}

#[test]
fn bad_arrays_are_refused() {
    let header = |text: &str| of_header(1, text, &[]);
    let records =
        "{'descr': [('a', '<f4'), ('b', '<i4')], 'fortran_order': False, 'shape': (1,), }";
    let fine = floats("(2, 1)", &[1.0, 2.0]);
    let long = [&fine[..], &[0; 3]].concat();
    let large = npy("<f8", "(2, 1)", &[0f64.to_le_bytes(), 1e39f64.to_le_bytes()].concat());
    let mut version = fine.clone();
    version[6] = 4;
    let cases: [(Vec<u8>, &str); 21] = [
        (Vec::new(), "is empty; give a file with data in it as --data or data.path"),
        (
            b"PK\x03\x04".to_vec(),
            "byte 0: begins with \"PK\\x03\\x04\"; a NumPy array with \"\\x93NUMPY\"",
        ),
        (fine[..6].to_vec(), "ends within its header, after 6 bytes"),
        (fine[..60].to_vec(), "ends within its header, after 60 bytes"),
        (version, "byte 6: the format's version is 4; expected 1, 2 or 3"),
        (
            fine[..fine.len() - 1].to_vec(),
            "has 7 bytes of values; the shape (2, 1) of 4 bytes each needs 8",
        ),
        (long, "has 11 bytes of values; the shape (2, 1) of 4 bytes each needs 8"),
        (
            floats("(2, 1)", &[1.0, f32::NAN]),
            "sample at index 1: NaN is not a finite 32-bit number",
        ),
        (large, "sample at index 1: 1e39 is not a finite 32-bit number"),
        (
            npy("|O", "(1,)", b"\x80\x04."),
            "header: holds Python objects (a pickle), which can run code and are not read; save an \
             array of numbers",
        ),
        (
            header(records),
            "header: holds records of several fields, which are not read; save one array of \
             numbers",
        ),
        (
            npy("<U5", "(1,)", &[0; 20]),
            "header: values of type '<U5' are not read; expected booleans, integers of up to 8 \
             bytes, or floats of 2, 4 or 8 bytes",
        ),
        (
            npy("<c8", "(1,)", &[0; 8]),
            "header: values of type '<c8' are not read; expected booleans, integers of up to 8 \
             bytes, or floats of 2, 4 or 8 bytes",
        ),
        (npy("<f4", "()", &[0; 4]), "header: an array of shape () has no samples"),
        (npy("<f4", "(0, 3)", &[]), "header: an array of shape (0, 3) has no samples"),
        (
            npy("<f4", "(4294967296, 4294967296)", &[]),
            "header: the shape (4294967296, 4294967296) is too large for any memory",
        ),
        (
            npy("<f4", "(99999999999999999999,)", &[]),
            "header, byte 51: expected a size below 2^64, found \"999999999999\"",
        ),
        (
            npy("<f4", "(-1,)", &[]),
            "header, byte 51: expected a size below 2^64, found \"-1,), }     \"",
        ),
        (header("{'descr': '<f4'}"), "header: expected the keys descr, fortran_order and shape"),
        (header("{'a': 1}"), "header, byte 5: has the unknown key 'a'"),
        (header("[]"), "header, byte 0: expected '{', found \"[]          \""),
    ];
    for (inputs, expected) in cases {
        let refused = refused(&inputs, &array_of_zeros(), &ReadOptions::default());
        assert_eq!(refused, format!("inputs.npy: {expected}"));
    }
    let inputs = floats("(2,)", &[1.0, 2.0]);
    let classes = ReadOptions { kind: Some(TargetKind::Classes), ..ReadOptions::default() };
    let none = ReadOptions::default();
    let inputs_name = "inputs.npy has 2 samples";
    let cases: [(Vec<u8>, &ReadOptions, &str); 6] = [
        (
            npy("|i1", "(2,)", &[0, 255]),
            &none,
            "sample at index 1: the class -1 is not one of 0 to 1048575",
        ),
        (
            npy("<u4", "(2,)", &[0, 0, 16, 0, 0, 0, 0, 0]),
            &none,
            "sample at index 0: the class 1048576 is not one of 0 to 1048575",
        ),
        (
            floats("(2,)", &[0.0, 1.0]),
            &classes,
            "header: has floats; classes are integers from 0 on, such as y.astype(np.int64)",
        ),
        (
            npy("|u1", "(2, 2)", &[0; 4]),
            &classes,
            "header: has several values per sample; classes are one integer each",
        ),
        (
            npy("|u1", "(2, 2)", &[0; 4]),
            &none,
            "header: has several integers per sample, which are no classes; save them as floats if \
             they are values",
        ),
        (
            npy("|u1", "(2, 1, 1)", &[0; 2]),
            &none,
            "header: targets of shape 2x1x1 are not read; expected (n) or (n, k)",
        ),
    ];
    for (targets, options, expected) in cases {
        assert_eq!(refused(&inputs, &targets, options), format!("targets.npy: {expected}"));
    }
    assert_eq!(
        refused(&inputs, &npy("|u1", "(3,)", &[0; 3]), &none),
        format!("targets.npy: has targets of 3 samples, and {inputs_name}")
    );
}
