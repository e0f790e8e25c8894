//! Formatting of numbers for messages, and of texts for drawings.

use std::fmt;

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

/// Returns a word that a POSIX shell reads as `text`.
pub fn shell_word(text: &str) -> String {
    let is_plain = text.chars().all(|c| c.is_alphanumeric() || "_-./:=,+@%".contains(c));
    if is_plain && !text.is_empty() {
        text.into()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
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

/// Returns the sentence of a thread that cannot be started.
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
    fn drawings_have_neither_markup_nor_forbidden_characters() {
        let text = "A&B <1> \"c\" 'd'\u{1b}[31m\n\u{ffff}\u{e9}";
        let expected = "A&amp;B &lt;1&gt; &quot;c&quot; &apos;d&apos;?[31m??\u{e9}";
        assert_eq!(xml_escaped(text), expected);
    }
}
