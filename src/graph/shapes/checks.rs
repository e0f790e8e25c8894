//! Checks that the shape rules of several topics share.

use potluck_core::Shape;

pub fn require(holds: bool, why: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(why.to_string()) }
}

pub fn are_equal(a: &Shape, b: &Shape) -> Result<(), String> {
    require(a == b, "the two shapes must be equal")
}

pub fn is_probability(p: f32) -> Result<(), String> {
    if (0.0..=1.0).contains(&p) {
        return Ok(());
    }
    Err(format!("the probability of dropout must be from 0 to 1, not {p}"))
}

pub fn are_samples(x: &[&Shape]) -> Result<(), String> {
    let fits = x.iter().all(|shape| **shape == Shape::batched(&[1]));
    require(fits, "sample ids are (b)")
}

/// Checks that kernels, which count in u32, can number the `count` heads, rows, classes or columns
/// of a rank from `first` on.
pub fn are_numbered(first: usize, count: usize) -> Result<(), String> {
    let fits = match first.checked_add(count) {
        Some(end) => u32::try_from(end).is_ok(),
        None => false,
    };
    // A whole graph numbers from 0, and memory bounds its count.
    if first == 0 || fits {
        return Ok(());
    }
    Err(format!("kernels number less than 2^32, and not {count} from {first} on"))
}
