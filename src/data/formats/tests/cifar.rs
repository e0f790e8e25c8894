//! Tests of CIFAR-10's records.

use super::*;

/// Returns records with these labels; the values of a record are its label, twice and three times
/// its label, in red, green and blue.
pub(in crate::formats) fn records(labels: &[u8]) -> Vec<u8> {
    let record = |label: &u8| {
        let planes = [1, 2, 3].map(|factor| [label.wrapping_mul(factor); 1024]);
        [&[*label], planes.as_flattened()].concat()
    };
    labels.iter().flat_map(record).collect()
}

const NAMES: &[u8] = b"airplane\nautomobile\nbird\ncat\ndeer\ndog\nfrog\nhorse\nship\ntruck\n\n";

#[test]
fn batches_are_joined_and_classes_named() {
    let [a, b, test] = [&[9, 0][..], &[3], &[5]].map(records);
    let files: [(&str, &[u8]); 4] = [
        ("data_batch_2.bin", &b),
        ("data_batch_1.bin", &a),
        ("test_batch.bin", &test),
        ("batches.meta.txt", NAMES),
    ];
    let loaded = loaded(SampleFormat::Cifar10, &files, "");
    assert_eq!(loaded.train.shape, [3, 32, 32]);
    assert_eq!(ids(&loaded.train), [9, 0, 3]);
    assert_eq!(names(&loaded.train)[9], "truck");
    let values = values(&loaded.train);
    let pixels = [0, 1024, 2048].map(|at| values[2 * 3072 + at] * 255.0);
    assert_eq!(pixels.map(f32::round), [3.0, 6.0, 9.0]);
    assert_eq!(ids(loaded.validation.as_ref().unwrap()), [5]);
    let expected = ["batches.meta.txt", "data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"];
    assert_eq!(file_names(&loaded), expected);
}

#[test]
fn a_test_batch_alone_is_trained_on_and_classes_are_numbered() {
    let loaded = loaded(SampleFormat::Cifar10, &[("test_batch.bin", &records(&[7]))], "");
    assert_eq!((ids(&loaded.train), names(&loaded.train).len()), (&[7][..], 10));
    assert!(loaded.validation.is_none());
}

#[test]
fn bad_files_are_refused() {
    let (sound, wrong) = (records(&[1]), records(&[1, 10]));
    let cut = &wrong[..wrong.len() - 1];
    let (batch, classes) = ("data_batch_1.bin", "batches.meta.txt");
    let cases: [BadFiles; 8] = [
        (&[(batch, &wrong)], "data_batch_1.bin: byte 3073: the label is 10; expected 0 to 9"),
        (
            &[(batch, cut)],
            "data_batch_1.bin: byte 3073: is 6145 bytes long, which is no multiple of the 3073 of \
             a record; record 2 is cut off, or this is not CIFAR-10",
        ),
        (&[("x", cut)], "DIR: has no files named like data_batch_1.bin or test_batch.bin"),
        (
            &[(batch, b"")],
            "data_batch_1.bin: is empty; give a file with data in it as --data or data.path",
        ),
        (&[(batch, &sound), (classes, b"a\xff")], "batches.meta.txt: byte 1: is not UTF-8"),
        (&[(batch, &sound), (classes, b"a\na")], "batches.meta.txt: names the class \"a\" twice"),
        (
            &[(batch, &sound), (classes, b"\n")],
            "batches.meta.txt: names no class; expected one in each line",
        ),
        (
            &[(batch, &sound), (classes, b"a")],
            "data_batch_1.bin: byte 0: the label is 1; expected 0 to 0",
        ),
    ];
    for (files, expected) in cases {
        assert_eq!(refusal(SampleFormat::Cifar10, files, ""), expected);
    }
    // A file that is named is refused as one of a directory is.
    let of_file = refusal(SampleFormat::Cifar10, &[(batch, cut)], batch);
    assert_eq!(of_file, refusal(SampleFormat::Cifar10, &[(batch, cut)], ""));
}
