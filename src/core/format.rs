//! Formatting of numbers and lists for messages, and of texts for drawings.

use std::fmt;

use crate::Nanos;

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

/// Returns a count with its noun: `1 entry`, `2 entries`.
pub fn counted(count: usize, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

/// Returns a count like [`counted`], with commas between its thousands: `1,800 classes`.
pub fn counted_large(count: u64, one: &str, several: &str) -> String {
    format!("{} {}", grouped(&count.to_string()), if count == 1 { one } else { several })
}

/// Returns items with commas between them: `0, 2, 3`.
pub fn listed(items: impl IntoIterator<Item = impl fmt::Display>) -> String {
    let items: Vec<String> = items.into_iter().map(|item| item.to_string()).collect();
    items.join(", ")
}

/// Formats a share of the whole as a percentage with `digits` digits after its point: `12.5 %`.
pub fn percent(share: f64, digits: usize) -> String {
    format!("{:.digits$} %", 100.0 * share)
}

/// Formats a duration in seconds: `1 second`, `2.5 seconds`.
pub fn seconds(duration: Nanos) -> String {
    match duration {
        1_000_000_000 => "1 second".into(),
        _ => format!("{} seconds", duration as f64 / 1e9),
    }
}

/// Formats seconds as milliseconds with at least three digits, and without a fraction if three
/// digits suffice.
pub fn milliseconds(seconds: f64) -> String {
    let ms = seconds * 1e3;
    match ms {
        ..10.0 => format!("{ms:.2}"),
        10.0..100.0 => format!("{ms:.1}"),
        _ => format!("{ms:.0}"),
    }
}

/// Formats seconds as hours, minutes and seconds: `1:02:03` or `2:03`.
pub fn clock(seconds: f64) -> String {
    let total = seconds.round() as u64;
    let hours = total / 3600;
    let minutes = total / 60 % 60;
    let seconds = total % 60;
    if hours > 0 {
        format!("{hours}:{minutes:02}:{seconds:02}")
    } else {
        format!("{minutes}:{seconds:02}")
    }
}

/// Formats bytes for a table, in MiB, or in KiB below 128 KiB: `1.50 MiB`.
pub fn size_text(bytes: usize) -> String {
    match bytes {
        0 => "0 MiB".into(),
        1..0x2_0000 => format!("{:.2} KiB", bytes as f64 / 1024.0),
        _ => format!("{:.2} MiB", bytes as f64 / (1 << 20) as f64),
    }
}

/// Formats bytes in GiB, in MiB below 1 GiB and in TiB from 1 TiB on, for messages to the user:
/// `1.5 GiB`.
pub fn gibibytes(bytes: u64) -> String {
    in_tenths(bytes, f64::round)
}

/// Formats required bytes like [`gibibytes`], but rounded up.
pub fn gibibytes_up(bytes: u64) -> String {
    in_tenths(bytes, f64::ceil)
}

/// Formats available bytes like [`gibibytes`], but rounded down: they never read the same as a
/// larger number of required bytes.
pub fn gibibytes_down(bytes: u64) -> String {
    in_tenths(bytes, f64::floor)
}

fn in_tenths(bytes: u64, round: fn(f64) -> f64) -> String {
    let gibibytes = bytes as f64 / (1u64 << 30) as f64;
    let (value, unit) = match gibibytes {
        ..1.0 => (gibibytes * 1024.0, "MiB"),
        1.0..1024.0 => (gibibytes, "GiB"),
        _ => (gibibytes / 1024.0, "TiB"),
    };
    format!("{:.1} {unit}", round(value * 10.0) / 10.0)
}

/// Returns a word that a shell of this system reads as `text`.
pub fn shell_word(text: &str) -> String {
    if cfg!(windows) { windows_word(text) } else { posix_word(text) }
}

fn posix_word(text: &str) -> String {
    if is_plain_word(text, "_-./:=,+@%") {
        return text.into();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Word for cmd.exe and PowerShell, which a program splits by the rules of Microsoft's C runtime:
/// a backslash in front of a quotation mark quotes, and others are themselves.
fn windows_word(text: &str) -> String {
    if is_plain_word(text, "_-./:=+\\") {
        return text.into();
    }
    let mut word = String::from("\"");
    let mut backslashes = 0;
    for character in text.chars() {
        match character {
            '\\' => backslashes += 1,
            '"' => {
                word.extend(std::iter::repeat_n('\\', backslashes + 1));
                backslashes = 0;
            }
            _ => backslashes = 0,
        }
        word.push(character);
    }
    word.extend(std::iter::repeat_n('\\', backslashes));
    word.push('"');
    word
}

fn is_plain_word(text: &str, signs: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || signs.contains(c))
}

/// Formats the dimensions of a shape: `3x32x32`.
pub fn dims_text(dims: &[usize]) -> String {
    dims.iter().map(ToString::to_string).collect::<Vec<_>>().join("x")
}

/// Returns a text without signs of markup and without the characters that XML forbids.
pub fn xml_escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&apos;",
            other => escaped.push(xml_character(other)),
        }
    }
    escaped
}

/// Returns a character, or a question mark for one that XML forbids.
pub fn xml_character(character: char) -> char {
    let is_forbidden = character.is_control() || matches!(character, '\u{fffe}' | '\u{ffff}');
    if is_forbidden { '?' } else { character }
}

/// Returns a text element of an SVG drawing, of a class of its style, at a place in pixels.
pub fn svg_text(class: &str, x: f64, y: f64, text: &str) -> String {
    let text = xml_escaped(text);
    format!("<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{text}</text>\n")
}

/// Returns the error sentence for a thread that cannot be started.
pub fn no_thread(error: impl fmt::Display) -> String {
    format!("the system starts no more threads: {error}; raise its limit")
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

    #[test]
    fn words_are_quoted_for_each_shell() {
        for (text, posix, windows) in [
            ("runs/a-1", "runs/a-1", "runs/a-1"),
            (r"C:\runs\a", r"'C:\runs\a'", r"C:\runs\a"),
            ("0,1", "0,1", "\"0,1\""),
            ("cpu*2", "'cpu*2'", "\"cpu*2\""),
            ("[3, 9]", "'[3, 9]'", "\"[3, 9]\""),
            ("it's", r"'it'\''s'", "\"it's\""),
            (r#"a "b""#, r#"'a "b"'"#, r#""a \"b\"""#),
            (r"C:\my runs\", r"'C:\my runs\'", r#""C:\my runs\\""#),
            ("", "''", "\"\""),
        ] {
            assert_eq!((posix_word(text).as_str(), windows_word(text).as_str()), (posix, windows));
        }
    }

    #[test]
    fn lists_and_shares_read_well() {
        assert_eq!(listed([0, 2, 3]), "0, 2, 3");
        assert_eq!(listed([""; 0]), "");
        let counts = [0, 1, 1800].map(|count| counted_large(count, "class", "classes"));
        assert_eq!(counts, ["0 classes", "1 class", "1,800 classes"]);
        assert_eq!([percent(0.125, 1), percent(0.126, 0)], ["12.5 %", "13 %"]);
    }

    #[test]
    fn times_read_well() {
        assert_eq!([clock(62.0), clock(3723.4)], ["1:02", "1:02:03"]);
        assert_eq!([seconds(1_000_000_000), seconds(2_500_000_000)], ["1 second", "2.5 seconds"]);
        let each = [0.001, 0.0123, 0.5].map(milliseconds);
        assert_eq!(each, ["1.00", "12.3", "500"]);
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!([0, 16 << 10, 3 << 19].map(size_text), ["0 MiB", "16.00 KiB", "1.50 MiB"]);
        assert_eq!([3 << 29, 3 << 20].map(gibibytes), ["1.5 GiB", "3.0 MiB"]);
        assert_eq!([1 << 40, 5 << 39].map(gibibytes), ["1.0 TiB", "2.5 TiB"]);
        assert_eq!(gibibytes_up(3 << 29), "1.5 GiB");
        let more = (2 << 20) + 1;
        assert_eq!([gibibytes_up(more), gibibytes_down(more)], ["2.1 MiB", "2.0 MiB"]);
    }

    #[test]
    fn drawings_have_neither_markup_nor_forbidden_characters() {
        let text = "A&B <1> \"c\" 'd'\u{1b}[31m\n\u{ffff}\u{e9}";
        let expected = "A&amp;B &lt;1&gt; &quot;c&quot; &apos;d&apos;?[31m??\u{e9}";
        assert_eq!(xml_escaped(text), expected);
    }
}
