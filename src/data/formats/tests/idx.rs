//! Tests of IDX files.

use std::io::Write;

use flate2::{Compression, write::GzEncoder};

use super::*;
use crate::formats::{load_for_evaluation, load_for_prediction};
use crate::{DataFile, Features, FileRole};

pub(in crate::formats) fn idx(dims: &[u32], values: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0, 0, 8, dims.len() as u8];
    bytes.extend(dims.iter().flat_map(|size| size.to_be_bytes()));
    bytes.extend(values);
    bytes
}

pub(in crate::formats) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

const IMAGES: &str = "train-images-idx3-ubyte";
const LABELS: &str = "train-labels-idx1-ubyte";

#[test]
fn images_and_labels_are_read_gzipped_or_not() {
    let images = idx(&[3, 1, 2], &[0, 51, 102, 153, 204, 255]);
    let labels = idx(&[3], &[2, 0, 1]);
    let test = idx(&[1, 1, 2], &[255, 0]);
    let test_labels = gzip(&idx(&[1], &[1]));
    let packed = gzip(&images);
    let files: [(&str, &[u8]); 4] = [
        ("train-images-idx3-ubyte.gz", &packed),
        (LABELS, &labels),
        ("t10k-images.idx3-ubyte", &test),
        ("t10k-labels-idx1-ubyte.gz", &test_labels),
    ];
    for path in ["", "train-images-idx3-ubyte.gz"] {
        let loaded = loaded(SampleFormat::Idx, &files, path);
        assert_eq!(loaded.train.shape, [1, 1, 2]);
        assert!(matches!(loaded.train.features, Features::Bytes(_)));
        assert_eq!(values(&loaded.train), [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]);
        assert_eq!(
            (ids(&loaded.train), names(&loaded.train)),
            (&[2, 0, 1][..], vec!["0", "1", "2"])
        );
        let held_out = loaded.validation.as_ref().unwrap();
        assert_eq!((values(held_out), ids(held_out)), (vec![1.0, 0.0], &[1][..]));
        assert_eq!(names(held_out), ["0", "1", "2"], "those of the training samples");
        let expected = [files[2].0, files[3].0, files[0].0, files[1].0];
        assert_eq!(file_names(&loaded), expected);
        let hash = blake3::hash(&packed).to_hex().to_string();
        let name = files[0].0.to_string();
        let role = Some(FileRole::Training);
        let file = DataFile { name, bytes: packed.len() as u64, blake3: hash, role };
        assert_eq!(loaded.files[2], file);
    }
}

#[test]
fn images_may_have_channels_and_sets_one_name_only() {
    let images = idx(&[2, 3, 1, 1], &[255, 0, 0, 0, 0, 255]);
    let labels = idx(&[2], &[0, 1]);
    let files: [(&str, &[u8]); 2] =
        [("t10k-images-idx4-ubyte", &images), ("t10k-labels-idx1-ubyte", &labels)];
    let loaded = loaded(SampleFormat::Idx, &files, "");
    assert_eq!((&loaded.train.shape[..], loaded.train.len()), (&[3, 1, 1][..], 2));
    assert!(loaded.validation.is_none());
}

#[test]
fn images_without_labels_can_be_predicted() {
    let images = idx(&[1, 1, 1], &[7]);
    let directory = directory(&[("mine.idx", &images), ("x/test-images-idx3-ubyte", &images)]);
    for path in ["mine.idx", "x", "x/test-images-idx3-ubyte"] {
        let path = directory.path().join(path);
        let samples =
            load_for_prediction(SampleFormat::Idx, &path, &ReadOptions::default()).unwrap();
        assert_eq!((samples.len(), &samples.targets), (1, &Targets::Absent));
    }
}

#[test]
fn a_model_is_evaluated_on_the_held_out_set_or_the_file_that_is_named() {
    let images = |count: u8| idx(&[count.into(), 1, 1], &vec![7; count.into()]);
    let labels = |count: u8| idx(&[count.into()], &vec![0; count.into()]);
    let directory = directory(&[
        (IMAGES, &images(3)),
        (LABELS, &labels(3)),
        ("t10k-images-idx3-ubyte", &images(2)),
        ("t10k-labels-idx1-ubyte", &labels(2)),
    ]);
    for (path, count) in [("", 2), (IMAGES, 3), ("t10k-images-idx3-ubyte", 2)] {
        let (path, options) = (below(directory.path(), path), ReadOptions::default());
        let evaluated = load_for_evaluation(SampleFormat::Idx, &path, &options).unwrap();
        assert_eq!((evaluated.train.len(), evaluated.files.len()), (count, 2), "{path:?}");
        assert!(evaluated.validation.is_none());
        let predicted = load_for_prediction(SampleFormat::Idx, &path, &options).unwrap();
        assert_eq!(predicted.len(), count, "{path:?}");
    }
    fs::remove_file(directory.path().join("t10k-labels-idx1-ubyte")).unwrap();
    let options = ReadOptions::default();
    let refused = load_for_evaluation(SampleFormat::Idx, directory.path(), &options).err().unwrap();
    assert!(refused.to_string().contains("has no labels beside it"), "{refused}");
}

/// Message about one image that is damaged, with a label that is sound.
fn of_images(images: &[u8]) -> String {
    let labels = idx(&[1], &[0]);
    let message = refusal(SampleFormat::Idx, &[(IMAGES, images), (LABELS, &labels)], "");
    message.strip_prefix(&format!("{IMAGES}: ")).unwrap().to_string()
}

#[test]
fn bad_images_are_refused() {
    let fine = idx(&[1, 2, 3], &[1, 2, 3, 4, 5, 6]);
    let long = [&fine[..], &[0]].concat();
    let packed = gzip(&fine);
    let mut flipped = packed.clone();
    let at = flipped.len() - 6;
    flipped[at] ^= 1;
    let packed_long = gzip(&[&fine[..], &[0; 9999]].concat());
    let bomb = gzip(&idx(&[60_000, 28, 28], &[0; 100]));
    let of_bomb = format!(
        "byte 4 unpacked: declares 60000x28x28 values, more than {} bytes of gzip can hold",
        bomb.len()
    );
    let cases: [(&[u8], &str); 15] = [
        (&[], "is empty; give a file with data in it as --data or data.path"),
        (&fine[..3], "ends within the first 4 bytes of IDX, after 3 bytes"),
        (&fine[..9], "ends within its dimensions, after 9 bytes"),
        (&fine[..20], "should be 22 bytes long for 1x2x3, and only 20 are there"),
        (&long, "should be 22 bytes long for 1x2x3, and more are there"),
        (b"PK\x03\x04", "byte 0: begins with 50 4b; an IDX file with 00 00"),
        (&[0, 0, 13, 3], "byte 2: the type is 0x0d; only unsigned bytes, 0x08, are read"),
        (&[0, 0, 8, 2], "byte 3: has 2 dimensions; expected 3 or 4 for images, 1 for labels"),
        (
            &idx(&[2], &[0, 1]),
            "byte 3: holds labels (1 dimension); give the images, with 3 or 4 dimensions",
        ),
        (&idx(&[0, 28, 28], &[]), "byte 4: is empty: its dimensions are 0x28x28"),
        (
            &idx(&[u32::MAX; 4], &[]),
            "byte 4: its dimensions 4294967295x4294967295x4294967295x4294967295 are too large",
        ),
        (&packed[..packed.len() - 9], "its gzip data is damaged or cut off ("),
        (&flipped, "its gzip data is damaged or cut off ("),
        (&packed_long, "should be 22 bytes long for 1x2x3, and more are there"),
        (&bomb, &of_bomb),
    ];
    for (bytes, expected) in cases {
        let message = of_images(bytes);
        // What the reader of gzip says follows in brackets.
        let is_whole = !expected.ends_with('(');
        let is_same = if is_whole { message == expected } else { message.contains(expected) };
        assert!(is_same, "'{message}' is not '{expected}'");
    }
}

#[test]
fn sets_that_do_not_fit_are_refused() {
    let (one, two) = (idx(&[1, 1, 1], &[7]), idx(&[2, 1, 1], &[0, 1]));
    let (labels, others) = (idx(&[2], &[0, 1]), idx(&[2], &[1, 2]));
    let three = idx(&[3], &[0, 1, 2]);
    let (test, test_labels) = ("test-images-idx3-ubyte", "test-labels-idx1-ubyte");
    let cases: [BadFiles; 6] = [
        (
            &[("a-train-images-idx3-ubyte", &one), ("b-test-images-idx3-ubyte", &one)],
            "DIR: has several sets of images (a-train-images-idx3-ubyte, \
             b-test-images-idx3-ubyte); give one file",
        ),
        (
            &[("readme", b"x")],
            "DIR: has no images named like train-images-idx3-ubyte or train-images-idx3-ubyte.gz",
        ),
        (
            &[(IMAGES, &one)],
            "train-images-idx3-ubyte: has no labels beside it; expected train-labels-idx1-ubyte, \
             gzipped or not",
        ),
        (
            &[(IMAGES, &two), (LABELS, &three)],
            "train-labels-idx1-ubyte: byte 4: has 3 labels for the 2 images of \
             train-images-idx3-ubyte",
        ),
        (
            &[(IMAGES, &two), (LABELS, &two)],
            "train-labels-idx1-ubyte: byte 3: has 3 dimensions; expected 1, a label of each image",
        ),
        (
            &[(IMAGES, &two), (LABELS, &labels), (test, &two), (test_labels, &others)],
            "test-images-idx3-ubyte: sample at index 1: its class \"2\" is none of those of the \
             training samples: 0, 1",
        ),
    ];
    for (files, expected) in cases {
        assert_eq!(refusal(SampleFormat::Idx, files, ""), expected);
    }
}
