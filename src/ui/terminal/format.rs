//! Formatting of times for the progress display.

/// Formats seconds as `1:02:03` or `2:03`.
pub fn duration(seconds: f64) -> String {
    let total = seconds.round() as u64;
    let (hours, minutes, seconds) = (total / 3600, total / 60 % 60, total % 60);
    if hours > 0 {
        format!("{hours}:{minutes:02}:{seconds:02}")
    } else {
        format!("{minutes}:{seconds:02}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_read_well() {
        assert_eq!(duration(62.0), "1:02");
        assert_eq!(duration(3723.4), "1:02:03");
    }
}
