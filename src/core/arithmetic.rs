//! Arithmetic of whole numbers, of samples, and of matrices in memory.

/// Returns the greatest common divisor of two numbers; 0 if both are 0.
pub fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Returns the middle value, or the mean of the two in the middle.
///
/// # Panics
/// Panics if there is no sample.
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

/// Returns the transpose of a matrix; neither dimension may be 0.
pub fn transpose(matrix: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let mut transposed = vec![0.0; rows * columns];
    for (row, values) in matrix.chunks(columns).enumerate() {
        for (column, value) in values.iter().enumerate() {
            transposed[column * rows + row] = *value;
        }
    }
    transposed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_are_common_and_the_greatest() {
        assert_eq!([gcd(12, 18), gcd(18, 12), gcd(7, 5)], [6, 6, 1]);
        assert_eq!([gcd(0, 4), gcd(4, 0), gcd(0, 0)], [4, 4, 0]);
    }

    #[test]
    fn medians_of_even_and_odd_numbers() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[7.0]), 7.0);
    }

    #[test]
    fn a_transpose_has_rows_for_columns() {
        let matrix = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let transposed = transpose(&matrix, 2, 3);
        assert_eq!(transposed, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
        assert_eq!(transpose(&transposed, 3, 2), matrix);
    }
}
