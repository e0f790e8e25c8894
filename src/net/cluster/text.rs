//! Texts of other nodes, which are shown to people: bounded, and without characters that would
//! steer a terminal.

/// Longest reason of a node, in bytes.
pub const WHY_BYTES_MAX: usize = 1024;
/// Longest sentence of another node about its part of a run, such as the error of a device, in
/// bytes.
pub const SENTENCE_BYTES_MAX: usize = 4096;

/// Error of a text from or for another node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    #[error("its {what} is empty")]
    Empty { what: &'static str },
    #[error("its {what} has {bytes} bytes, of at most {max}")]
    TooLong { what: &'static str, bytes: usize, max: usize },
    #[error("its {what} has a character that is not shown, {}", .character.escape_unicode())]
    NotShown { what: &'static str, character: char },
}

/// Returns false for a control character and for a format character that hides text or changes
/// its direction.
fn is_shown(character: char) -> bool {
    let is_format = matches!(character, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}');
    !character.is_control() && !is_format
}

/// Checks a text of at most `max` bytes, which may be empty.
pub(crate) fn check_text(what: &'static str, text: &str, max: usize) -> Result<(), TextError> {
    if text.len() > max {
        return Err(TextError::TooLong { what, bytes: text.len(), max });
    }
    match text.chars().find(|&character| !is_shown(character)) {
        Some(character) => Err(TextError::NotShown { what, character }),
        None => Ok(()),
    }
}

/// Checks a name of 1 to `max` bytes.
pub(crate) fn check_name(what: &'static str, name: &str, max: usize) -> Result<(), TextError> {
    if name.is_empty() {
        return Err(TextError::Empty { what });
    }
    check_text(what, name, max)
}

/// Returns a text that other nodes accept: characters that are not shown become spaces, and the
/// text is cut off after `max` bytes.
pub fn shown_text(text: &str, max: usize) -> String {
    let mut shown = String::new();
    for character in text.chars() {
        let character = if is_shown(character) { character } else { ' ' };
        if shown.len() + character.len_utf8() > max {
            break;
        }
        shown.push(character);
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_would_steer_a_terminal_are_refused_and_made_harmless() {
        for (text, character) in [
            ("a\u{1b}[2J", "\\u{1b}"),
            ("a\nb", "\\u{a}"),
            ("a\u{202e}b", "\\u{202e}"),
            ("\u{200b}", "\\u{200b}"),
            ("\u{9b}1m", "\\u{9b}"),
        ] {
            let error = check_text("host name", text, 9).unwrap_err().to_string();
            let expected = format!("its host name has a character that is not shown, {character}");
            assert_eq!(error, expected);
            assert_eq!(check_text("host name", &shown_text(text, 9), 9), Ok(()), "{text:?}");
        }
        assert_eq!(check_name("host name", "köln-1", 9), Ok(()));
    }

    #[test]
    fn texts_are_bounded_in_bytes_and_cut_between_characters() {
        assert_eq!(check_text("reason", "éé", 4), Ok(()));
        let error = check_text("reason", "éé", 3).unwrap_err().to_string();
        assert_eq!(error, "its reason has 4 bytes, of at most 3");
        assert_eq!(shown_text("éé", 3), "é");
        let error = check_name("host name", "", 3).unwrap_err().to_string();
        assert_eq!(error, "its host name is empty");
    }
}
