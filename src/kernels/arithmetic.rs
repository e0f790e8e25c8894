//! Arithmetic of sizes.

/// Returns the greatest common divisor of two numbers that are not both 0.
pub(crate) fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
