//! Formatting of numbers for messages.

/// Formats `12345.6` as `12,346`.
pub fn thousands(value: f64) -> String {
    grouped(&format!("{value:.0}"))
}

/// Returns a number in decimal digits with commas between the thousands before its point.
pub fn grouped(plain: &str) -> String {
    let whole = plain.split('.').next().unwrap_or_default().len();
    let mut text = String::with_capacity(plain.len() + whole / 3);
    for (index, digit) in plain.chars().enumerate() {
        if index > 0 && index < whole && (whole - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(thousands(12345.6), "12,346");
        assert_eq!(thousands(999.0), "999");
        assert_eq!(thousands(1_234_567.0), "1,234,567");
    }
}
