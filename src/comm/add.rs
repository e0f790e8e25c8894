//! Sums on the host.

use super::Element;

/// `partial[i] += own[i]`.
///
/// # Panics
///
/// If the lengths differ.
pub fn add_assign<T: Element>(partial: &mut [T], own: &[T]) {
    assert_eq!(partial.len(), own.len(), "a partial sum and what is added have one length");
    // A plain loop: it becomes vector instructions, and the memory is slower than those.
    for (sum, value) in partial.iter_mut().zip(own) {
        *sum = sum.add(*value);
    }
}
