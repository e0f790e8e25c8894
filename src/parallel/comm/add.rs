//! Element-wise sums on the host.

use super::Element;

/// Adds element by element: `partial[i] += own[i]`.
///
/// # Panics
///
/// Panics if the lengths differ.
pub fn add_assign<T: Element>(partial: &mut [T], own: &[T]) {
    assert_eq!(partial.len(), own.len(), "a partial sum and what is added have one length");
    // A plain loop: the compiler vectorizes it, and memory bandwidth is the bottleneck.
    for (sum, value) in partial.iter_mut().zip(own) {
        *sum = sum.add(*value);
    }
}
