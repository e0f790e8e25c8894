//! Tests of pictures.

use std::io::Cursor;

use image::{DynamicImage, GrayAlphaImage, GrayImage, ImageFormat, Luma, RgbImage, RgbaImage};

use super::*;
use crate::formats::{KnownSamples, load_for_prediction};

/// Returns a picture in a file's bytes.
pub(in crate::formats) fn encoded(picture: impl Into<DynamicImage>, to: ImageFormat) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    picture.into().write_to(&mut bytes, to).unwrap();
    bytes.into_inner()
}

/// Returns a gray PNG of 2 columns and a row.
fn gray(values: [u8; 2]) -> Vec<u8> {
    encoded(GrayImage::from_raw(2, 1, values.to_vec()).unwrap(), ImageFormat::Png)
}

/// Returns a PNG of 2 columns and a row.
fn colour(values: [u8; 6]) -> Vec<u8> {
    encoded(RgbImage::from_raw(2, 1, values.to_vec()).unwrap(), ImageFormat::Png)
}

fn bytes_of(samples: &Samples) -> Vec<u8> {
    values(samples).iter().map(|value| (value * 255.0).round() as u8).collect()
}

fn sized(height: usize, width: usize) -> ReadOptions {
    ReadOptions { image_size: Some((height, width)), ..ReadOptions::default() }
}

/// Returns a JPEG in which a camera notes an orientation.
fn turned(jpeg: &[u8], orientation: u8) -> Vec<u8> {
    // A TIFF directory of one entry: tag 0x0112, one 16-bit number.
    let mut exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0".to_vec();
    exif.extend([orientation, 0, 0, 0, 0, 0, 0, 0]);
    let length = (exif.len() + 2) as u16;
    [&jpeg[..2], &[0xff, 0xe1], &length.to_be_bytes(), &exif, &jpeg[2..]].concat()
}

#[test]
fn pictures_are_turned_as_the_camera_notes() {
    let left_dark = GrayImage::from_fn(16, 8, |x, _| Luma([if x < 8 { 0 } else { 255 }]));
    let jpeg = encoded(left_dark, ImageFormat::Jpeg);
    // 1: as it is, 3: turned by half, 6: clockwise by a quarter.
    for (orientation, shape, is_dark_first) in
        [(1, [1, 8, 16], true), (3, [1, 8, 16], false), (6, [1, 16, 8], true)]
    {
        let file = turned(&jpeg, orientation);
        let loaded = loaded(SampleFormat::Pictures, &[("a/x.jpg", &file)], "");
        assert_eq!(loaded.train.shape, shape);
        let planes = crate::formats::pictures::decode("x", &file, shape, false).unwrap();
        let (first, last) = (planes[0], planes[planes.len() - 1]);
        assert_eq!((first < 9, last < 9), (is_dark_first, !is_dark_first), "{orientation}");
    }
}

#[test]
fn directories_are_classes() {
    let [a, b, c] = [[0, 255], [1, 2], [3, 4]].map(gray);
    let files: [(&str, &[u8]); 5] = [
        ("dog/b.PNG", &b),
        ("dog/a.png", &a),
        ("cat/c.png", &c),
        ("cat/notes.txt", b"none"),
        (".hidden/x.png", b"none"),
    ];
    let directory = directory(&files);
    let loaded =
        load(SampleFormat::Pictures, directory.path(), None, &ReadOptions::default()).unwrap();
    let train = &loaded.train;
    assert_eq!((&train.shape[..], train.len()), (&[1, 1, 2][..], 3));
    assert_eq!((names(train), ids(train)), (vec!["cat", "dog"], &[0, 1, 1][..]));
    assert_eq!(bytes_of(train), [3, 4, 0, 255, 1, 2]);
    assert_eq!(file_names(&loaded), ["cat/c.png", "dog/a.png", "dog/b.PNG"]);
    assert_eq!(train.ids.as_ref().unwrap()[2], "dog/b.PNG");
    assert!(loaded.validation.is_none());
}

#[test]
fn a_class_may_have_its_pictures_one_directory_further_down() {
    let [a, b, c] = [[0, 255], [1, 2], [3, 4]].map(gray);
    let files: [(&str, &[u8]); 5] = [
        ("train/n01/images/a.png", &a),
        ("train/n01/boxes.txt", b"none"),
        ("train/n02/images/b.png", &b),
        ("train/n02/images/c.png", &c),
        ("val/n02/c.png", &c),
    ];
    let directory = directory(&files);
    assert_eq!(crate::formats::detect(directory.path()), Some(SampleFormat::Pictures));
    let loaded =
        load(SampleFormat::Pictures, directory.path(), None, &ReadOptions::default()).unwrap();
    assert_eq!((names(&loaded.train), ids(&loaded.train)), (vec!["n01", "n02"], &[0, 1, 1][..]));
    assert_eq!(loaded.train.ids.as_ref().unwrap()[0], "n01/images/a.png");
    assert_eq!(ids(loaded.validation.as_ref().unwrap()), [1]);
}

#[test]
fn a_directory_of_held_out_pictures_is_found() {
    let [gray, colour] = [gray([7, 8]), colour([1, 2, 3, 4, 5, 6])];
    let files: [(&str, &[u8]); 3] =
        [("train/a/1.png", &colour), ("train/b/2.png", &gray), ("test/b/3.png", &gray)];
    let directory = directory(&files);
    let read = |path| {
        load(SampleFormat::Pictures, directory.path(), path, &ReadOptions::default()).unwrap()
    };
    let loaded = read(None);
    assert_eq!(loaded.train.shape, [3, 1, 2]);
    assert_eq!(bytes_of(&loaded.train), [1, 4, 2, 5, 3, 6, 7, 8, 7, 8, 7, 8]);
    let validation = loaded.validation.as_ref().unwrap();
    assert_eq!((ids(validation), bytes_of(validation)), (&[1][..], vec![7, 8, 7, 8, 7, 8]));
    assert_eq!(file_names(&loaded), ["test/b/3.png", "train/a/1.png", "train/b/2.png"]);
    let held_out = directory.path().join("test");
    assert_eq!(ids(read(Some(&held_out)).validation.as_ref().unwrap()), [1]);
    fs::rename(directory.path().join("test/b"), directory.path().join("test/c")).unwrap();
    let refused = load(SampleFormat::Pictures, directory.path(), None, &ReadOptions::default());
    assert_eq!(
        message(directory.path(), &refused.err().unwrap()),
        "test: sample at index 0: its class \"c\" is none of those of the training samples: a, b"
    );
}

#[test]
fn what_is_transparent_is_black() {
    let rgba = RgbaImage::from_raw(2, 1, vec![255, 100, 50, 128, 255, 255, 255, 0]).unwrap();
    let files = [("a/x.png", &encoded(rgba, ImageFormat::Png)[..])];
    let expected = [128, 0, 50, 0, 25, 0];
    assert_eq!(bytes_of_class(&files), expected);
    let gray = GrayAlphaImage::from_raw(2, 1, vec![255, 128, 200, 255]).unwrap();
    assert_eq!(bytes_of_class(&[("a/x.png", &encoded(gray, ImageFormat::Png))]), [128, 200]);
    let gray = image::ImageBuffer::<Luma<u16>, Vec<u16>>::from_raw(2, 1, vec![65535, 257]).unwrap();
    assert_eq!(bytes_of_class(&[("a/x.png", &encoded(gray, ImageFormat::Png))]), [255, 1]);
}

fn bytes_of_class(files: &[(&str, &[u8])]) -> Vec<u8> {
    let directory = directory(files);
    let options = ReadOptions::default();
    let loaded = load(SampleFormat::Pictures, directory.path(), None, &options).unwrap();
    bytes_of(&loaded.train)
}

#[test]
fn pictures_are_resized_if_a_size_is_given() {
    let wide = gray([100, 200]);
    let square = encoded(GrayImage::from_pixel(8, 8, Luma([40])), ImageFormat::Jpeg);
    let files: [(&str, &[u8]); 2] = [("a/1.png", &wide), ("a/2.jpeg", &square)];
    let directory = directory(&files);
    let loaded = load(SampleFormat::Pictures, directory.path(), None, &sized(1, 1)).unwrap();
    assert_eq!((&loaded.train.shape[..], bytes_of(&loaded.train)), (&[1, 1, 1][..], vec![150, 40]));
    assert_eq!(
        refusal(SampleFormat::Pictures, &files, ""),
        "a/2.jpeg: is 8x8 pixels, and the first one, a/1.png, 1x2; set \
         data.image_size=[H,W] to resize all"
    );
    assert_eq!(
        refusal_with(SampleFormat::Pictures, &files, "", &sized(0, 3)),
        "a/1.png: cannot be resized to 0x3 pixels; use 1 to 32768"
    );
}

#[test]
fn pictures_without_classes_can_be_predicted() {
    let [a, b] = [[1, 2], [3, 4]].map(gray);
    let directory = directory(&[("b.png", &b), ("a.png", &a)]);
    let read = |path: &str, options: &ReadOptions| {
        load_for_prediction(SampleFormat::Pictures, &directory.path().join(path), options)
    };
    let samples = read("", &ReadOptions::default()).unwrap();
    assert_eq!((bytes_of(&samples), &samples.targets), (vec![1, 2, 3, 4], &Targets::Absent));
    assert_eq!(samples.ids.unwrap(), ["a.png", "b.png"]);
    let known = KnownSamples { shape: vec![3, 1, 2], ..KnownSamples::default() };
    let options = ReadOptions { known: Some(known), ..ReadOptions::default() };
    let samples = read("b.png", &options).unwrap();
    assert_eq!(
        (bytes_of(&samples), samples.ids.as_ref().unwrap()[0].as_str()),
        (vec![3, 4, 3, 4, 3, 4], "b.png")
    );
    let refused = load(SampleFormat::Pictures, directory.path(), None, &options).err().unwrap();
    assert_eq!(
        message(directory.path(), &refused),
        "DIR: has pictures without classes; expected a directory of pictures per class"
    );
}

#[test]
fn pictures_that_a_model_cannot_take_are_refused() {
    let colour = colour([0; 6]);
    let directory = directory(&[("a/x.png", &colour), ("b/x.png", &colour)]);
    let read = |shape: &[usize], classes: &[&str]| {
        let classes = classes.iter().map(ToString::to_string).collect();
        let known = KnownSamples { shape: shape.into(), classes, ..KnownSamples::default() };
        let options = ReadOptions { known: Some(known), ..ReadOptions::default() };
        let read = load_for_prediction(SampleFormat::Pictures, directory.path(), &options);
        read.map_err(|error| message(directory.path(), &error))
    };
    let fine = read(&[3, 1, 2], &["b", "c", "a"]).unwrap();
    assert_eq!((ids(&fine), names(&fine)), (&[2, 0][..], vec!["b", "c", "a"]));
    let refused = |shape, classes| read(shape, classes).err().unwrap();
    assert_eq!(
        refused(&[3, 1, 2], &["a", "c"]),
        "DIR: sample at index 1: its class \"b\" is none of those of the model: a, c"
    );
    assert_eq!(
        refused(&[1, 1, 2], &["a", "b"]),
        "a/x.png: is in colour, and those of the model, in gray; convert it"
    );
    assert_eq!(
        refused(&[3, 2, 2], &["a", "b"]),
        "a/x.png: is 1x2 pixels, and those of the model, 2x2; set \
         data.image_size=[H,W] to resize all"
    );
    assert_eq!(
        refused(&[4], &["a", "b"]),
        "DIR: its samples are 3x1x2, and those of the model are 4"
    );
}

/// Cameras keep a film behind the picture, in which markers stand by chance.
#[test]
fn what_lies_behind_a_jpeg_is_no_part_of_it() {
    let jpeg = encoded(GrayImage::from_pixel(8, 8, Luma([40])), ImageFormat::Jpeg);
    let with_film = [&jpeg[..], b"film \xFF\xD9 and \xFF\xDA film"].concat();
    assert_eq!(bytes_of_class(&[("a/1.jfif", &with_film)]), bytes_of_class(&[("a/1.jpg", &jpeg)]));
}

#[test]
fn bad_files_and_directories_are_refused() {
    let fine = gray([1, 2]);
    let refused = |files: &[(&str, &[u8])]| refusal(SampleFormat::Pictures, files, "");
    let jpeg = encoded(RgbImage::new(16, 16), ImageFormat::Jpeg);
    let frame = jpeg.windows(2).position(|two| two == [0xff, 0xc0]).unwrap();
    // A picture that declares `size` as its rows and columns.
    let declaring = |size: [u8; 4]| {
        let mut bytes = jpeg.clone();
        bytes[frame + 5..frame + 9].copy_from_slice(&size);
        bytes
    };
    let (huge, large) = (declaring([0x3f, 0xff, 0x3f, 0xff]), declaring([0x1f, 0xff, 0x1f, 0xff]));
    let of_large = format!(
        "a/1.png: declares 8191x8191 pixels, more than its {} bytes can stand for",
        large.len()
    );
    let mut wrong = fine.clone();
    wrong[29] ^= 1;
    let cases: [BadFiles; 17] = [
        (
            &[("a/1.png", &fine), ("a/x/y/2.webp", &fine)],
            "a/x: has pictures, in the directory of a class; move them up into it, or away",
        ),
        // Without classes, as what is below is no class.
        (
            &[("1.png", &fine), ("done/batch/2.png", &fine)],
            "DIR: has pictures without classes; expected a directory of pictures per class",
        ),
        (
            &[("a/1.png", &fine), ("b/1.png", &fine), ("b/more/2.png", &fine)],
            "b/more: has pictures, in the directory of a class; move them up into it, or away",
        ),
        (
            &[("a/1.png", &fine), ("b/x/1.png", &fine), ("b/y/2.png", &fine)],
            "b/x: has pictures, in the directory of a class; move them up into it, or away",
        ),
        (
            &[("training/0/1.png", &fine), ("training/1/2.png", &fine)],
            "DIR: has no PNG or JPEG file; expected one directory per class, or pictures",
        ),
        (
            &[("a/1.png", &fine), ("a/2.png", b"GIF89a")],
            "a/2.png: is no PNG or JPEG picture by its first bytes",
        ),
        (
            &[("a/1.png", &fine), ("a/2.png", b"")],
            "a/2.png: is empty; give a file with data in it as --data or data.path",
        ),
        (
            &[("a/1.png", &fine), ("a/2.png", &fine[..fine.len() - 12])],
            "a/2.png: is cut off: its end marker is missing",
        ),
        (
            &[("a/1.png", &fine), ("a/2.png", &jpeg[..jpeg.len() - 2])],
            "a/2.png: is cut off: its end marker is missing",
        ),
        (
            &[("a/1.png", &fine), ("a/2.png", &huge)],
            "a/2.png: has 16383x16383 pixels, and the most is 32768 per side and 256 MiB in all",
        ),
        (&[("a/1.png", &large)], &of_large),
        (&[("a/1.png", &wrong)], "a/1.png: is damaged and cannot be decoded ("),
        (
            &[("a/1.png", &fine), ("b/x.txt", b"")],
            "b: has no PNG or JPEG file, and is among directories of classes; remove it",
        ),
        (
            &[("train/1.png", &fine), ("Test/2.png", &fine)],
            "Test: has pictures without classes; expected a directory per class in each part",
        ),
        (
            &[("a/1.png", &fine), ("2.png", &fine)],
            "2.png: lies beside the directories of the classes; move it into one of them",
        ),
        (
            &[("a/1.png", &fine), ("a/2.webp", &fine)],
            "a/2.webp: is a picture that is neither PNG nor JPEG; convert it, or move it away",
        ),
        (
            &[("x", b"")],
            "DIR: has no PNG or JPEG file; expected one directory per class, or pictures",
        ),
    ];
    for (files, expected) in cases {
        let message = refused(files);
        // What the decoder says follows in brackets.
        let is_whole = !expected.ends_with('(');
        let is_same = if is_whole { message == expected } else { message.starts_with(expected) };
        assert!(is_same, "'{message}' is not '{expected}'");
    }
}

#[test]
fn a_picture_that_changes_is_noticed() {
    let [before, after] = [[1, 2], [3, 4]].map(gray);
    let directory = directory(&[("a/1.png", &before)]);
    let options = ReadOptions::default();
    let loaded = load(SampleFormat::Pictures, directory.path(), None, &options).unwrap();
    let path = directory.path().join("a/1.png");
    let read = || loaded.train.read(0, &mut [0.0; 2]);
    assert!(read().is_ok());
    fs::write(&path, after).unwrap();
    let refused = read().unwrap_err();
    assert_eq!(
        message(directory.path(), &refused),
        "a/1.png: was changed since the data was opened; start again"
    );
    fs::remove_file(&path).unwrap();
    assert!(matches!(read(), Err(DataError::Read { .. })));
}
