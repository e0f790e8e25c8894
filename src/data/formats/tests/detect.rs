//! Tests of the detection of formats.

use super::*;
use crate::formats::{detect, tests};

#[test]
fn formats_are_told_by_names_first_bytes_and_structure() {
    let images = tests::idx::idx(&[1, 1, 1], &[0]);
    let packed = tests::idx::gzip(&images);
    let array = tests::npy::npy("|u1", "(1,)", &[0]);
    let picture = [0x89, b'P', b'N', b'G', 13, 10, 26, 10];
    let directory = directory(&[
        ("idx/x-images-idx3-ubyte.gz", &packed),
        ("idx/t10k-labels-idx1-ubyte", b"x"),
        ("some", &images),
        ("packed", &packed),
        ("cifar/test_batch.bin", b"x"),
        ("table.CSV", b"a,b"),
        ("npy/inputs.npy", &array),
        ("npy/array", &array),
        ("pictures/cat/1.JPG", b"x"),
        ("split/val/cat/1.jpeg", b"x"),
        ("single", &picture),
        ("flat/1.png", &picture),
        ("text.txt", b"some words"),
        ("text.gz", &tests::idx::gzip(b"some words")),
        ("tokens.bin", b"ab"),
        ("empty", b""),
    ]);
    fs::create_dir(directory.path().join("nothing")).unwrap();
    for (path, expected) in [
        ("idx", Some(SampleFormat::Idx)),
        ("idx/t10k-labels-idx1-ubyte", Some(SampleFormat::Idx)),
        ("some", Some(SampleFormat::Idx)),
        ("packed", Some(SampleFormat::Idx)),
        ("cifar", Some(SampleFormat::Cifar10)),
        ("cifar/test_batch.bin", Some(SampleFormat::Cifar10)),
        ("table.CSV", Some(SampleFormat::Csv)),
        ("npy", Some(SampleFormat::Npy)),
        ("npy/inputs.npy", Some(SampleFormat::Npy)),
        ("npy/array", Some(SampleFormat::Npy)),
        ("pictures", Some(SampleFormat::Pictures)),
        ("pictures/cat", Some(SampleFormat::Pictures)),
        ("pictures/cat/1.JPG", Some(SampleFormat::Pictures)),
        ("split", Some(SampleFormat::Pictures)),
        ("split/val", Some(SampleFormat::Pictures)),
        ("single", Some(SampleFormat::Pictures)),
        ("flat", Some(SampleFormat::Pictures)),
        ("text.txt", None),
        ("text.gz", None),
        ("tokens.bin", None),
        ("empty", None),
        ("nothing", None),
        ("missing", None),
    ] {
        assert_eq!(detect(&directory.path().join(path)), expected, "{path}");
    }
}

#[test]
fn a_missing_path_is_refused_by_every_reader() {
    use SampleFormat::*;
    for format in [Idx, Cifar10, Csv, Npy, Pictures] {
        let message = refusal(format, &[], "missing");
        assert!(message.starts_with("missing: cannot be read ("), "{message}");
    }
}

/// A device or a pipe might never end.
#[test]
#[cfg(unix)]
fn what_is_no_regular_file_is_refused() {
    let read = |format| load(format, Path::new("/dev/zero"), None, &ReadOptions::default());
    for format in [SampleFormat::Csv, SampleFormat::Npy, SampleFormat::Idx] {
        let message = read(format).err().unwrap().to_string();
        assert!(
            message.contains("/dev/zero: cannot be read (it is not a regular file)"),
            "{message}"
        );
    }
}
