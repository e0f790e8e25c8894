//! Formatting of numbers and sizes in reports.

use potluck_core::format::grouped;

/// Formats a number with three significant digits, and commas between thousands.
pub fn number(value: f64) -> String {
    let digits = if value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else if value >= 0.9995 {
        2
    } else {
        3
    };
    grouped(&format!("{value:.digits$}"))
}

/// Formats bytes in the largest unit that gives a whole number: `64 MiB`.
pub fn size(bytes: u64) -> String {
    for (shift, unit) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes > 0 && bytes.is_multiple_of(1 << shift) {
            return format!("{} {unit}", bytes >> shift);
        }
    }
    format!("{bytes} bytes")
}
