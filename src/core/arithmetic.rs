//! Arithmetic of whole numbers.

/// Returns the greatest common divisor of two numbers; 0 if both are 0.
pub fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_are_common_and_the_greatest() {
        assert_eq!([gcd(12, 18), gcd(18, 12), gcd(7, 5)], [6, 6, 1]);
        assert_eq!([gcd(0, 4), gcd(4, 0), gcd(0, 0)], [4, 4, 0]);
    }
}
