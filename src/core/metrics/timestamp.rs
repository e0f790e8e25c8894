//! Times of events as text.

use std::time::SystemTime;

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Formats a time in UTC as in RFC 3339, to the millisecond.
pub fn rfc3339(time: SystemTime) -> String {
    let time = OffsetDateTime::from(time);
    let milliseconds = u32::from(time.millisecond());
    // Both fail only for years without four digits.
    let rounded = time.replace_nanosecond(1_000_000 * milliseconds).unwrap_or(time);
    rounded.format(&Rfc3339).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn times_are_in_utc_to_the_millisecond() {
        assert_eq!(rfc3339(UNIX_EPOCH), "1970-01-01T00:00:00Z");
        // A leap day, by `date -u -d @1709210096`.
        let leap = UNIX_EPOCH + Duration::new(1_709_210_096, 120_999_999);
        assert_eq!(rfc3339(leap), "2024-02-29T12:34:56.12Z");
    }
}
