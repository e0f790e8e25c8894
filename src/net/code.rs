//! Codes that people read to each other and type: 128 bits in the letters of Crockford's base32
//! (<https://www.crockford.com/base32.html>: no I, L, O, U; capital or not), in groups of four.
//!
//! The last two of the 28 letters are checks: the letters are a word of the Reed-Solomon code over
//! GF(32) with the generator (x - 1)(x - a), whose distance is 3 for up to 31 letters. So any one
//! or two wrong letters are found, and with them any two that were exchanged.

use zeroize::Zeroizing;

use super::code_size::{CODE_LETTERS, KEY_BYTES, KEY_LETTERS};
use super::secret_error::SecretError;

/// Letters by value. I and L are read as 1, O as 0; U is in no code.
const LETTERS: &[u8; 32] = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
const GROUP: usize = 4;

/// Returns the code of a key.
pub fn encode(key: &[u8; KEY_BYTES]) -> String {
    let bits = u128::from_be_bytes(*key);
    let mut values = Zeroizing::new([0u8; CODE_LETTERS]);
    // The first letter has 3 bits of the key, so that no bits are left over at the end.
    for (i, value) in values[..KEY_LETTERS].iter_mut().enumerate() {
        *value = (bits >> (5 * (KEY_LETTERS - 1 - i))) as u8 & 31;
    }
    let checks = remainder(&values[..KEY_LETTERS]);
    values[KEY_LETTERS..].copy_from_slice(&checks);
    let mut code = String::with_capacity(CODE_LETTERS + CODE_LETTERS / GROUP);
    for (i, &value) in values.iter().enumerate() {
        if i > 0 && i.is_multiple_of(GROUP) {
            code.push('-');
        }
        code.push(char::from(LETTERS[usize::from(value)]));
    }
    code
}

/// Returns the key of a code; hyphens and spaces may be anywhere.
///
/// # Errors
///
/// Returns a character that is in no code, a wrong number of letters, or letters that do not
/// match their checks.
pub fn decode(code: &str) -> Result<Zeroizing<[u8; KEY_BYTES]>, SecretError> {
    let mut values = Zeroizing::new([0u8; CODE_LETTERS]);
    let mut found = 0;
    for (i, character) in code.chars().enumerate() {
        if is_separator(character) {
            continue;
        }
        let value = value_of(character).ok_or(SecretError::Character { position: i + 1 })?;
        if let Some(place) = values.get_mut(found) {
            *place = value;
        }
        found += 1;
    }
    if found != CODE_LETTERS {
        return Err(SecretError::Letters { found });
    }
    // The first letter has only the 3 upper bits of the key.
    if values[0] > 7 || remainder(&values[..]) != [0, 0] {
        return Err(SecretError::Check);
    }
    let mut bits: u128 = 0;
    for &value in &values[..KEY_LETTERS] {
        bits = bits << 5 | u128::from(value);
    }
    Ok(Zeroizing::new(bits.to_be_bytes()))
}

/// Returns true for a text that may be meant as a code: about as many letters of a code, all
/// capital or none, with a digit (one code in 30,000 has none), and in short groups or in one.
pub(crate) fn resembles(text: &str) -> bool {
    let letters = || text.chars().filter(|c| !is_separator(*c));
    let mixes_cases =
        letters().any(|c| c.is_ascii_uppercase()) && letters().any(|c| c.is_ascii_lowercase());
    let is_near = letters().count().abs_diff(CODE_LETTERS) <= 2;
    let mut groups = text.split(is_separator);
    let is_grouped =
        !text.trim().contains(is_separator) || groups.all(|group| group.len() <= GROUP + 1);
    let is_made_of_letters =
        letters().all(|c| value_of(c).is_some()) && letters().any(|c| c.is_ascii_digit());
    is_near && !mixes_cases && is_grouped && is_made_of_letters
}

fn is_separator(c: char) -> bool {
    c == '-' || c.is_ascii_whitespace()
}

fn value_of(c: char) -> Option<u8> {
    let letter = match c.to_ascii_uppercase() {
        'I' | 'L' => '1',
        'O' => '0',
        other => other,
    };
    let found = LETTERS.iter().position(|&known| char::from(known) == letter)?;
    u8::try_from(found).ok()
}

/// Returns the remainder of the division of a polynomial over GF(32), highest coefficient first, by
/// x^2 + 3x + 2 = (x - 1)(x - a); it is zero for letters with their checks.
fn remainder(values: &[u8]) -> [u8; 2] {
    let mut high = 0;
    let mut low = 0;
    for value in values {
        let factor = value ^ high;
        let doubled = double(factor);
        high = low ^ doubled ^ factor;
        low = doubled;
    }
    [high, low]
}

/// Returns a value of GF(32) (modulo x^5 + x^2 + 1) times a, which is 2.
fn double(value: u8) -> u8 {
    let shifted = value << 1;
    if shifted & 32 == 0 { shifted } else { (shifted ^ 0b10_0101) & 31 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: [u8; KEY_BYTES] = *b"\xffan example key\x80";

    #[test]
    fn codes_give_their_keys_however_they_are_typed() {
        for key in [KEY, [0; KEY_BYTES], [0xFF; KEY_BYTES], [0x5A; KEY_BYTES]] {
            let code = encode(&key);
            assert_eq!(code.len(), CODE_LETTERS + 6);
            let typed = [
                code.clone(),
                code.to_lowercase(),
                code.replace('-', ""),
                format!("  {} \n", code.replace('-', " ")),
                code.replace('0', "o").replace('1', "L"),
            ];
            for typed in typed {
                assert_eq!(*decode(&typed).unwrap(), key, "{typed}");
            }
        }
    }

    /// The checks are part of the format: another version must read the codes of this one.
    #[test]
    fn a_code_is_fixed() {
        assert_eq!(encode(&[0; KEY_BYTES]), "0000-0000-0000-0000-0000-0000-0000");
        let counted: [u8; KEY_BYTES] = std::array::from_fn(|i| i as u8 * 17);
        assert_eq!(encode(&counted), "0024-H36H-2NCS-VRH6-DAQF-6DVV-QZ3A");
    }

    #[test]
    fn every_change_of_one_letter_and_every_exchange_is_found() {
        let code = encode(&KEY).replace('-', "").into_bytes();
        let mut changed = 0;
        for i in 0..code.len() {
            for &letter in LETTERS.iter().filter(|&&letter| letter != code[i]) {
                let mut wrong = code.clone();
                wrong[i] = letter;
                let decoded = decode(std::str::from_utf8(&wrong).unwrap());
                assert_eq!(decoded.err(), Some(SecretError::Check));
                changed += 1;
            }
            for j in (i + 1..code.len()).filter(|&j| code[j] != code[i]) {
                let mut wrong = code.clone();
                wrong.swap(i, j);
                let decoded = decode(std::str::from_utf8(&wrong).unwrap());
                assert_eq!(decoded.err(), Some(SecretError::Check));
            }
        }
        assert_eq!(changed, 28 * 31);
    }

    #[test]
    fn mutated_codes_are_refused_or_are_codes() {
        let valid: Vec<char> = encode(&KEY).chars().collect();
        let word = |seed: u32, i: u32| potluck_core::rng::threefry2x32([seed, 5], [i, 0])[0];
        let mut accepted = 0;
        for seed in 0..100_000u32 {
            let mut typed = valid.clone();
            for change in 0..1 + word(seed, 0) % 4 {
                let at = word(seed, 3 * change + 1) as usize % typed.len();
                let letter = char::from(LETTERS[word(seed, 3 * change + 2) as usize % 32]);
                match word(seed, 3 * change + 3) % 8 {
                    0 => typed.insert(at, letter),
                    1 => drop(typed.remove(at)),
                    2 => typed[at] = char::from_u32(word(seed, 99) % 0x3000).unwrap_or('-'),
                    _ => typed[at] = letter,
                }
            }
            let typed: String = typed.into_iter().collect();
            if let Ok(key) = decode(&typed) {
                accepted += 1;
                let letters = |text: &str| text.replace(is_separator, "").to_uppercase();
                assert_eq!(letters(&encode(&key)), letters(&typed), "seed {seed}");
            }
        }
        // Codes in which only hyphens changed, and one in a thousand of the codes with three
        // changes.
        assert!(accepted < 15_000, "{accepted}");
    }

    #[test]
    fn what_is_wrong_with_a_code_is_named() {
        let code = encode(&KEY);
        let error = |text: &str| decode(text).err().map(|error| error.to_string());
        let says = |text: &str, words: &str| {
            let error = error(text).unwrap_or_default();
            assert!(error.contains(words), "{text}: {error}");
        };
        says(&code.replacen('-', "!", 1), "character 5");
        says(&format!("U{}", &code[1..]), "character 1");
        says(&code[..code.len() - 1], "27 letters");
        says(&format!("{code}0"), "29 letters");
        says("", "0 letters");
        says("Ünïcode", "character 1");
    }

    #[test]
    fn texts_that_resemble_codes_are_told_from_others() {
        let code = encode(&KEY);
        let typed = [code.to_lowercase(), code[1..].to_owned(), code.replace('-', "")];
        for text in typed.into_iter().chain([format!("{code}7"), code.replace('-', " ")]) {
            assert!(resembles(&text), "{text}");
        }
        let others = [
            "correct horse battery staple",
            "a text that somebody has chosen",
            "chosen 4 the cats by somebody",
            "0123456789abcdef0123456789abcdef",
        ];
        for text in others.into_iter().chain(["aB3dE6gH9jK2mN5pQ8rS1tV4wX7"]) {
            assert!(!resembles(text), "{text}");
        }
    }
}
