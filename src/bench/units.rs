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
    const UNITS: [&str; 4] = ["bytes", "KiB", "MiB", "GiB"];
    let fits = |unit: &u32| bytes > 0 && bytes.is_multiple_of(1 << (10 * unit));
    let unit = (0..UNITS.len() as u32).rev().find(fits).unwrap_or(0);
    format!("{} {}", bytes >> (10 * unit), UNITS[unit as usize])
}
