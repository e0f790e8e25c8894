//! Detection of the format of the data at a path.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use flate2::read::GzDecoder;

use super::files::{entries, file_name, has_ending};
use super::{SampleFormat, cifar, idx, npy, pictures};

/// Returns the format of the samples at a path, by names, first bytes and structure; `None` for
/// other data: a text, or tokens.
pub fn detect(path: &Path) -> Option<SampleFormat> {
    if path.is_dir() { of_directory(path) } else { of_file(path) }
}

fn of_directory(path: &Path) -> Option<SampleFormat> {
    let entries = entries(path).ok()?;
    let has = |found: fn(&str) -> bool| entries.iter().any(|path| found(&file_name(path)));
    if has(|name| idx::role_of(name).is_some_and(|role| role.is_images)) {
        Some(SampleFormat::Idx)
    } else if has(cifar::is_batch) {
        Some(SampleFormat::Cifar10)
    } else if has(|name| npy::INPUTS.contains(&name)) {
        Some(SampleFormat::Npy)
    } else {
        let is_pictures = pictures::has_classes(path)
            || pictures::splits(path).iter().any(|split| pictures::has_classes(split))
            || entries.iter().any(|path| pictures::is_picture(path) && path.is_file());
        if is_pictures { Some(SampleFormat::Pictures) } else { None }
    }
}

fn of_file(path: &Path) -> Option<SampleFormat> {
    let name = file_name(path);
    let head = head(path);
    if has_ending(path, &["csv", "tsv"]) {
        Some(SampleFormat::Csv)
    } else if has_ending(path, &["npy"]) || head.starts_with(npy::MAGIC) {
        Some(SampleFormat::Npy)
    } else if idx::role_of(&name).is_some() || head.starts_with(idx::MAGIC) {
        Some(SampleFormat::Idx)
    } else if cifar::is_batch(&name) {
        Some(SampleFormat::Cifar10)
    } else if pictures::is_picture(path) || image::guess_format(&head).is_ok_and(pictures::is_read)
    {
        Some(SampleFormat::Pictures)
    } else {
        None
    }
}

/// The first bytes of a file, unpacked if it is gzipped; none if it cannot be read.
fn head(path: &Path) -> Vec<u8> {
    let mut head = Vec::new();
    // Reading anything but a regular file might block, or consume its data.
    if path.is_file()
        && let Ok(file) = File::open(path)
        && file.take(64).read_to_end(&mut head).is_ok()
        && head.starts_with(idx::GZIP)
        && let Ok(file) = File::open(path)
    {
        head.clear();
        // The bytes unpacked before an error are sufficient.
        let _ = GzDecoder::new(file).take(64).read_to_end(&mut head);
    }
    head
}
