//! Directories of PNG and JPEG files, one directory per class; also pictures without classes, for
//! prediction. Pictures are decoded when they are read: to 8 bits per channel, in gray if all of
//! them are gray, else in red, green and blue; transparent pixels are composited onto black. The
//! orientation of EXIF (JEITA CP-3451) is applied.

use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use image::imageops::{self, FilterType};
use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits, Luma, Rgb};
use rayon::prelude::*;

use super::files::{self, Base, FileSets, entries, file_name, has_ending, invalid};
use super::{DataError, DataFile, FileSet, ReadSet, Request, Samples, Targets};
use crate::{Features, LazyFeatures};
use potluck_core::{Setting, Wording};

/// Directories of held-out pictures beside `train`; if there are several, the first one is taken.
const HELD_OUT: [&str; 4] = ["val", "valid", "validation", "test"];
const TRAIN: &str = "train";

const ENDINGS: &[&str] = &["png", "jpg", "jpeg", "jpe", "jfif"];
/// Extensions of unsupported pictures, which are refused and not silently left out.
const OTHER_ENDINGS: &[&str] = &["avif", "bmp", "gif", "heic", "tif", "tiff", "webp"];

/// Directories below that of a class in which pictures are looked for, to be refused.
const DEPTH_MAX: usize = 8;

/// Largest width and height, in pixels.
const SIDE_MAX: u32 = 1 << 15;
/// Upper bound of the memory for decoding a picture, in bytes.
const DECODED_MAX: u64 = 256 << 20;
/// Largest number of pixels per byte of a PNG: deflate packs 1032 bytes of 8 pixels each.
const PNG_PIXELS_MAX: u64 = 1032 * 8;
/// Largest number of pixels per byte of a JPEG: a block of 64 takes a bit or more, and colours that
/// are sampled at half the resolution do not add pixels.
const JPEG_PIXELS_MAX: u64 = 64 * 8;

pub(super) fn is_read(format: ImageFormat) -> bool {
    matches!(format, ImageFormat::Png | ImageFormat::Jpeg)
}

pub(super) fn is_picture(path: &Path) -> bool {
    has_ending(path, ENDINGS)
}

/// Directories in which a data set may have its training and its held-out pictures.
pub(super) fn splits(path: &Path) -> Vec<PathBuf> {
    [TRAIN].iter().chain(&HELD_OUT).map(|name| path.join(name)).collect()
}

/// Returns true if a directory has a directory of a class: one with a picture or, if there is no
/// picture beside it, with a single directory of pictures.
pub(super) fn has_classes(path: &Path) -> bool {
    if !path.is_dir() {
        return false;
    }
    let has_loose = has_picture(path);
    let directories = entries(path).unwrap_or_default();
    directories.iter().any(|path| {
        let is_deeper = || !has_loose && directories_of_pictures(path).len() == 1;
        path.is_dir() && (has_picture(path) || is_deeper())
    })
}

fn has_picture(directory: &Path) -> bool {
    entries(directory).unwrap_or_default().iter().any(|path| is_picture(path))
}

/// Directories in a directory that have a picture.
fn directories_of_pictures(directory: &Path) -> Vec<PathBuf> {
    let mut found = entries(directory).unwrap_or_default();
    found.retain(|path| path.is_dir() && has_picture(path));
    found
}

/// Finds the directories with the classes.
pub(super) fn find(path: &Path) -> Result<FileSets, DataError> {
    let splits = splits(path);
    let (train, held_out) = splits.split_at(1);
    match FileSets::new(first_with_classes(train), first_with_classes(held_out)) {
        Some(found) => Ok(found),
        None => Ok(FileSets::only(set_of(path))),
    }
}

fn first_with_classes(paths: &[PathBuf]) -> Option<FileSet> {
    let path = paths.iter().find(|path| has_classes(path))?;
    Some(set_of(path))
}

fn set_of(path: &Path) -> FileSet {
    FileSet { inputs: vec![path.into()], targets: None }
}

/// Picture of a data set, with the number of its class.
struct Listed {
    path: PathBuf,
    class: Option<u32>,
}

/// Lists the pictures of a directory of classes, a flat directory or a file, and the classes.
fn list(path: &Path) -> Result<(Vec<Listed>, Vec<String>), DataError> {
    let name = path.display().to_string();
    if !path.is_dir() {
        return Ok((vec![Listed { path: path.into(), class: None }], Vec::new()));
    }
    let (directories, loose): (Vec<_>, Vec<_>) =
        entries(path)?.into_iter().partition(|path| path.is_dir());
    let loose = pictures_of(loose)?;
    if !has_classes(path) {
        if loose.is_empty() {
            let why = "has no PNG or JPEG file; expected one directory per class, or pictures";
            return Err(invalid(&name, "", why));
        }
        let listed = loose.into_iter().map(|path| Listed { path, class: None });
        return Ok((listed.collect(), Vec::new()));
    }
    if let Some(path) = loose.first() {
        let why = "lies beside the directories of the classes; move it into one of them";
        return Err(invalid(&path.display().to_string(), "", why));
    }
    let parts: Vec<&PathBuf> = directories.iter().filter(|path| is_part(path)).collect();
    if let [part, _, ..] = parts[..] {
        let why = "has pictures without classes; expected a directory per class in each part";
        return Err(invalid(&part.display().to_string(), "", why));
    }
    let mut listed = Vec::new();
    let mut classes = Vec::new();
    for directory in directories {
        let pictures = pictures_of_class(&directory)?;
        if pictures.is_empty() {
            let why = "has no PNG or JPEG file, and is among directories of classes; remove it";
            return Err(invalid(&directory.display().to_string(), "", why));
        }
        let class = Some(classes.len() as u32);
        listed.extend(pictures.into_iter().map(|path| Listed { path, class }));
        classes.push(file_name(&directory));
    }
    Ok((listed, classes))
}

/// Returns true for a directory with the name of a part of a data set.
fn is_part(path: &Path) -> bool {
    let name = file_name(path).to_lowercase();
    name == TRAIN || HELD_OUT.contains(&name.as_str())
}

/// Returns true if there is a picture of any kind in a directory, or in one below it.
fn holds_pictures(directory: &Path, depth: usize) -> bool {
    entries(directory).unwrap_or_default().iter().any(|path| {
        is_picture(path)
            || has_ending(path, OTHER_ENDINGS)
            || depth > 0 && path.is_dir() && holds_pictures(path, depth - 1)
    })
}

/// Lists the pictures of a class: those in its directory or, if it has none, in the single
/// directory of pictures there, as in Tiny ImageNet. Others would be of more than one class, or
/// left out, so they are refused.
fn pictures_of_class(directory: &Path) -> Result<Vec<PathBuf>, DataError> {
    let (mut below, files): (Vec<_>, Vec<_>) =
        entries(directory)?.into_iter().partition(|path| path.is_dir());
    let pictures = pictures_of(files)?;
    below.retain(|path| holds_pictures(path, DEPTH_MAX));
    match &below[..] {
        [] => Ok(pictures),
        [only] if pictures.is_empty() => pictures_of_class(only),
        [first, ..] => {
            let why = "has pictures, in the directory of a class; move them up into it, or away";
            Err(invalid(&first.display().to_string(), "", why))
        }
    }
}

fn pictures_of(paths: Vec<PathBuf>) -> Result<Vec<PathBuf>, DataError> {
    if let Some(path) = paths.iter().find(|path| has_ending(path, OTHER_ENDINGS)) {
        let why = "is a picture that is neither PNG nor JPEG; convert it, or move it away";
        return Err(invalid(&path.display().to_string(), "", why));
    }
    Ok(paths.into_iter().filter(|path| is_picture(path) && path.is_file()).collect())
}

/// Reads the heads of pictures and hashes them.
pub(super) fn read(set: &FileSet, request: &Request) -> Result<ReadSet, DataError> {
    let root = &set.inputs[0];
    let (listed, classes) = list(root)?;
    if request.targets && classes.is_empty() {
        let why = "has pictures without classes; expected a directory of pictures per class";
        return Err(invalid(&root.display().to_string(), "", why));
    }
    let open = |listed: &Listed| -> Result<(DataFile, PictureHead), DataError> {
        let (bytes, file) = files::read(&listed.path, request.base)?;
        Ok((file, PictureHead::parse(&listed.path.display().to_string(), &bytes)?))
    };
    let opened: Vec<_> = listed.par_iter().map(open).collect();
    let opened = opened.into_iter().collect::<Result<Vec<_>, _>>()?;
    let (files, heads): (Vec<DataFile>, Vec<PictureHead>) = opened.into_iter().unzip();

    let paths: Vec<PathBuf> = listed.iter().map(|listed| listed.path.clone()).collect();
    let shape = shape_of(&paths, &heads, request)?;
    let base = Base::of(root);
    let ids = paths.iter().map(|path| base.name(path)).collect();
    let targets = match listed.iter().map(|listed| listed.class).collect() {
        Some(ids) => Targets::Classes { ids, names: classes },
        None => Targets::Absent,
    };
    let hashes = files.iter().map(|file| file.blake3.clone()).collect();
    let resize = request.options.image_size.is_some();
    let lazy = PictureFiles { paths, hashes, shape, resize };
    let samples = Samples {
        name: root.display().to_string(),
        shape: shape.into(),
        columns: Vec::new(),
        target_columns: Vec::new(),
        features: Features::Lazy(Arc::new(lazy)),
        targets,
        ids: Some(ids),
    };
    Ok(ReadSet { samples, files, is_numbered: false })
}

/// Channels, height and width of all pictures.
fn shape_of(
    paths: &[PathBuf],
    heads: &[PictureHead],
    request: &Request,
) -> Result<[usize; 3], DataError> {
    let expected = match request.expected {
        Some(expected) if expected.shape.len() == 3 => Some(expected),
        _ => None,
    };
    let channels = match expected {
        Some(expected) if [1, 3].contains(&expected.shape[0]) => expected.shape[0],
        _ if heads.iter().all(|head| head.is_gray) => 1,
        _ => 3,
    };
    let most = SIDE_MAX as usize;
    let refuse = |at: usize, why: Wording| Err(invalid(&paths[at].display().to_string(), "", why));
    let [height, width] = match (request.options.image_size, expected) {
        (Some((height, width)), _) if ![height, width].iter().all(|n| (1..=most).contains(n)) => {
            let why = format!("cannot be resized to {height}x{width} pixels; use 1 to {most}");
            return refuse(0, why.into());
        }
        (Some((height, width)), _) => [height, width],
        (None, Some(expected)) => [expected.shape[1], expected.shape[2]],
        (None, None) => heads[0].size(),
    };
    let first = match expected {
        Some(expected) => format!("those of {}", expected.whose),
        None => format!("the first one, {}", paths[0].display()),
    };
    for (at, head) in heads.iter().enumerate() {
        let [found_height, found_width] = head.size();
        if request.options.image_size.is_none() && head.size() != [height, width] {
            let why = Wording::new(format_args!(
                "is {found_height}x{found_width} pixels, and {first}, {height}x{width}; set \
                 {}=[H,W] to resize all",
                Setting::ImageSize
            ));
            return refuse(at, why);
        }
        if channels == 1 && !head.is_gray {
            return refuse(at, format!("is in colour, and {first}, in gray; convert it").into());
        }
    }
    Ok([channels, height, width])
}

/// Pictures that are decoded when they are read.
struct PictureFiles {
    paths: Vec<PathBuf>,
    /// BLAKE3 hash of each file, in hexadecimal.
    hashes: Vec<String>,
    shape: [usize; 3],
    resize: bool,
}

impl LazyFeatures for PictureFiles {
    fn len(&self) -> usize {
        self.paths.len()
    }

    fn read(&self, index: usize, into: &mut [f32]) -> Result<(), DataError> {
        let path = &self.paths[index];
        let name = path.display().to_string();
        let bytes = fs::read(path).map_err(|why| DataError::Read { name: name.clone(), why })?;
        if blake3::hash(&bytes).to_hex().as_str() != self.hashes[index] {
            let why = "was changed since the data was opened; start again";
            return Err(invalid(&name, "", why));
        }
        let planes = decode(&name, &bytes, self.shape, self.resize)?;
        for (to, value) in into.iter_mut().zip(planes) {
            *to = f32::from(value) / 255.0;
        }
        Ok(())
    }
}

#[derive(Debug)]
pub(super) struct PictureHead {
    format: ImageFormat,
    orientation: Orientation,
    /// Width and height in that orientation.
    width: u32,
    height: u32,
    is_gray: bool,
}

impl PictureHead {
    /// Reads the head of a PNG or JPEG file, and looks for its end.
    ///
    /// # Errors
    /// Returns `DataError` if it is neither, if it is cut off, or if it declares more pixels than
    /// its bytes can encode or than are decoded.
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Self, DataError> {
        let refuse = |why: String| Err(invalid(name, "", why));
        let format = match image::guess_format(bytes) {
            Ok(format) if is_read(format) => format,
            _ => return refuse("is no PNG or JPEG picture by its first bytes".into()),
        };
        let decoder = reader(format, bytes).into_decoder();
        let mut decoder = decoder.map_err(|why| damaged(name, &why))?;
        let orientation = decoder.orientation().map_err(|why| damaged(name, &why))?;
        let (mut width, mut height) = decoder.dimensions();
        let colour = decoder.color_type();
        let pixels = u64::from(width) * u64::from(height);
        let (per_byte, end): (_, &[u8]) = match format {
            ImageFormat::Png => (PNG_PIXELS_MAX, b"IEND"),
            _ => (JPEG_PIXELS_MAX, b"\xFF\xD9"),
        };
        if pixels == 0 {
            return refuse("has no pixels".into());
        }
        let is_large = width.max(height) > SIDE_MAX || decoder.total_bytes() > DECODED_MAX;
        if is_large {
            let most = format!("{SIDE_MAX} per side and {} MiB in all", DECODED_MAX >> 20);
            return refuse(format!("has {width}x{height} pixels, and the most is {most}"));
        }
        if pixels > per_byte.saturating_mul(bytes.len() as u64) {
            let length = bytes.len();
            return refuse(format!(
                "declares {width}x{height} pixels, more than its {length} bytes can stand for"
            ));
        }
        // Decoders of JPEG fill up missing data. Behind its end, cameras keep films.
        let begin = if format == ImageFormat::Jpeg { scan_of_jpeg(bytes) } else { 0 };
        if last(&bytes[begin..], end).is_none() {
            return refuse("is cut off: its end marker is missing".into());
        }
        if matches!(
            orientation,
            Orientation::Rotate90
                | Orientation::Rotate270
                | Orientation::Rotate90FlipH
                | Orientation::Rotate270FlipH
        ) {
            std::mem::swap(&mut width, &mut height);
        }
        Ok(Self { format, orientation, width, height, is_gray: !colour.has_color() })
    }

    /// Height and width.
    fn size(&self) -> [usize; 2] {
        [self.height as usize, self.width as usize]
    }
}

/// Offset of the first scan of a JPEG, behind the segments in front of it, one of which may be a
/// smaller picture; 0 if they are damaged.
fn scan_of_jpeg(bytes: &[u8]) -> usize {
    const SCAN: u8 = 0xDA;
    let mut at = 2;
    while let Some([0xFF, marker, high, low]) = bytes.get(at..at + 4) {
        match *marker {
            // Bytes that fill up.
            0xFF => at += 1,
            SCAN => return at,
            _ => at += 2 + usize::from(u16::from_be_bytes([*high, *low])),
        }
    }
    0
}

/// Offset of the last occurrence of a text.
fn last(bytes: &[u8], text: &[u8]) -> Option<usize> {
    bytes.windows(text.len()).rposition(|window| window == text)
}

fn reader(format: ImageFormat, bytes: &[u8]) -> ImageReader<Cursor<&[u8]>> {
    let mut limits = Limits::default();
    limits.max_image_width = Some(SIDE_MAX);
    limits.max_image_height = Some(SIDE_MAX);
    limits.max_alloc = Some(DECODED_MAX);
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    reader.limits(limits);
    reader
}

fn damaged(name: &str, why: &image::ImageError) -> DataError {
    invalid(name, "", format!("is damaged and cannot be decoded ({why})"))
}

/// Decodes a picture to bytes of channels, rows and columns.
///
/// # Errors
/// Returns `DataError` if it cannot be decoded, or has another size and is not to be resized.
pub(super) fn decode(
    name: &str,
    bytes: &[u8],
    shape: [usize; 3],
    resize: bool,
) -> Result<Vec<u8>, DataError> {
    let [channels, height, width] = shape;
    let head = PictureHead::parse(name, bytes)?;
    if !resize && head.size() != [height, width] {
        let [found_height, found_width] = head.size();
        let why = format!("is {found_width}x{found_height} pixels; expected {width}x{height}");
        return Err(invalid(name, "", why));
    }
    let mut picture = reader(head.format, bytes).decode().map_err(|why| damaged(name, &why))?;
    picture.apply_orientation(head.orientation);
    let to_width = width as u32;
    let to_height = height as u32;
    let is_resized = head.size() != [height, width];
    let pixels = if channels == 1 {
        let mut gray = on_black_gray(picture);
        if is_resized {
            gray = imageops::resize(&gray, to_width, to_height, FilterType::Triangle);
        }
        gray.into_raw()
    } else {
        let mut colour = on_black(picture);
        if is_resized {
            colour = imageops::resize(&colour, to_width, to_height, FilterType::Triangle);
        }
        colour.into_raw()
    };
    let mut planes = Vec::with_capacity(pixels.len());
    for channel in 0..channels {
        planes.extend(pixels.iter().skip(channel).step_by(channels));
    }
    Ok(planes)
}

/// Returns a value with an opacity over black.
fn composited(value: u8, alpha: u8) -> u8 {
    ((u16::from(value) * u16::from(alpha) + 127) / 255) as u8
}

/// Returns a picture in gray, over black.
fn on_black_gray(picture: DynamicImage) -> image::GrayImage {
    if !picture.color().has_alpha() {
        return picture.into_luma8();
    }
    let picture = picture.into_luma_alpha8();
    image::GrayImage::from_fn(picture.width(), picture.height(), |x, y| {
        let [value, alpha] = picture.get_pixel(x, y).0;
        Luma([composited(value, alpha)])
    })
}

/// Returns a picture in red, green and blue, over black.
fn on_black(picture: DynamicImage) -> image::RgbImage {
    if !picture.color().has_alpha() {
        return picture.into_rgb8();
    }
    let picture = picture.into_rgba8();
    image::RgbImage::from_fn(picture.width(), picture.height(), |x, y| {
        let [red, green, blue, alpha] = picture.get_pixel(x, y).0;
        Rgb([red, green, blue].map(|value| composited(value, alpha)))
    })
}
