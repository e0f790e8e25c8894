//! Small data sets of samples on disk, which a small model learns in a second.
#![allow(dead_code, reason = "each test binary uses a part of this file")]

use std::fs;
use std::path::Path;

use potluck_core::rng::Key;

/// Height and width of the pictures.
pub const SIZE: usize = 8;
pub const CLASSES: usize = 4;

/// A noisy picture of a class: a bright bar in one of four places.
pub fn picture(index: usize) -> (Vec<u8>, u8) {
    let class = (Key::new(1).uniform(index as u64) * CLASSES as f64) as usize;
    let pixel = |place: usize| {
        let noise = Key::new(2).uniform((index * SIZE * SIZE + place) as u64);
        let is_bar = place / SIZE / 2 == class;
        (if is_bar { 120.0 } else { 20.0 } + 100.0 * noise) as u8
    };
    ((0..SIZE * SIZE).map(pixel).collect(), class as u8)
}

/// Writes images and labels as MNIST has them; `first` is the number of the first picture.
pub fn write_idx(directory: &Path, prefix: &str, first: usize, count: usize) {
    let (mut images, mut labels) = (Vec::new(), Vec::new());
    images.extend([0, 0, 8, 3]);
    labels.extend([0, 0, 8, 1]);
    for size in [count, SIZE, SIZE] {
        images.extend((size as u32).to_be_bytes());
    }
    labels.extend((count as u32).to_be_bytes());
    for index in first..first + count {
        let (pixels, class) = picture(index);
        images.extend(pixels);
        labels.push(class);
    }
    fs::create_dir_all(directory).unwrap();
    fs::write(directory.join(format!("{prefix}-images-idx3-ubyte")), images).unwrap();
    fs::write(directory.join(format!("{prefix}-labels-idx1-ubyte")), labels).unwrap();
}

/// Returns a table of `count` rows with the columns a, b and y = 300 a - 200 b + 5000, a bit noisy.
pub fn table(count: u64) -> String {
    let mut text = String::from("a,b,y\n");
    for row in 0..count {
        let draw = |column: u64| Key::new(3 + column).normal(row);
        let (a, b) = (4.0 + draw(0), 10.0 * draw(1));
        text += &format!("{a:.4},{b:.4},{:.3}\n", 300.0 * a - 200.0 * b + 5000.0 + draw(2));
    }
    text
}
