//! The secret that the nodes of a run share: knowing it makes a node.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::num::NonZeroU32;
use std::path::Path;

use ring::rand::{SecureRandom, SystemRandom};
use ring::{hkdf, pbkdf2};
use zeroize::Zeroizing;

use super::code;
use super::code_size::KEY_BYTES;
use super::secret_error::{SecretError, TEXT_CHARACTERS};

/// Bytes of a file that are read; a text has up to four per character, and its end of line.
const FILE_BYTES_MAX: u64 = 1024;
/// Rounds of PBKDF2 for texts: about 0.1 s, which makes guessing of chosen texts slow.
const ROUNDS: u32 = 200_000;
const TEXT_SALT: &[u8] = b"potluck/1 text";

/// Key material of a run, 16 bytes or, made of a text, 32. Its memory is zeroed on drop, and only
/// [`Secret::code`] prints it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<Vec<u8>>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    /// Creates a secret of 128 random bits from the operating system.
    pub fn generate() -> Result<Self, SecretError> {
        let key = Zeroizing::new(random_bytes::<KEY_BYTES>()?);
        Ok(Self(Zeroizing::new(key.to_vec())))
    }

    /// Reads a code of [`Secret::code`], with or without hyphens, spaces and capitals.
    ///
    /// # Errors
    ///
    /// Names a character that is in no code, a wrong number of letters, or a typing error: any one
    /// or two wrong letters are found.
    pub fn parse(code: &str) -> Result<Self, SecretError> {
        Ok(Self(Zeroizing::new(code::decode(code)?.to_vec())))
    }

    /// Reads a file of one line: a code, or a text of 26 to 128 characters, from which the key is
    /// derived. A text of about the length and the letters of a code is read as a code, so that a
    /// typing error in it is found.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be read, if on Unix other users may read or write it, if
    /// on other systems it is no regular file, if its length is wrong, or if it holds a code with a
    /// typing error. The access lists of Windows are not checked.
    pub fn read_file(path: &Path) -> Result<Self, SecretError> {
        let text = read_protected(path)?;
        Self::of_line(path, &text)
    }

    /// Reads a file like [`Secret::read_file`], which the group of the file may read too.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Secret::read_file`].
    pub fn read_file_of_group(path: &Path) -> Result<Self, SecretError> {
        let text = read(path, Some(0o037))?;
        Self::of_line(path, &text)
    }

    /// Reads from an open file descriptor of this process, like the line of a file: a pipe, or a
    /// file of any mode that this process may open.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Secret::read_file`], except those about the rights of others.
    #[cfg(unix)]
    pub fn read_descriptor(descriptor: u32) -> Result<Self, SecretError> {
        let path = format!("/dev/fd/{descriptor}");
        let path = Path::new(&path);
        let text = read(path, None)?;
        Self::of_line(path, &text)
    }

    fn of_line(path: &Path, text: &str) -> Result<Self, SecretError> {
        let text = text.trim_end_matches(['\r', '\n']);
        if code::resembles(text) {
            return Self::parse(text)
                .map_err(|error| SecretError::Code { path: path.to_owned(), error: error.into() });
        }
        let found = text.chars().count();
        if !TEXT_CHARACTERS.contains(&found) {
            return Err(SecretError::Length { path: path.to_owned(), found });
        }
        Ok(Self::of_text(text))
    }

    /// Secret that is derived from a text, by PBKDF2-HMAC-SHA256 (RFC 8018).
    fn of_text(text: &str) -> Self {
        let mut key = Zeroizing::new(vec![0; 32]);
        let rounds = NonZeroU32::new(ROUNDS).unwrap_or(NonZeroU32::MIN);
        pbkdf2::derive(pbkdf2::PBKDF2_HMAC_SHA256, rounds, TEXT_SALT, text.as_bytes(), &mut key);
        Self(key)
    }

    /// Returns the code to show to the user; `None` for a secret derived from a text.
    pub fn code(&self) -> Option<String> {
        let key = <&[u8; KEY_BYTES]>::try_from(self.0.as_slice()).ok()?;
        Some(code::encode(key))
    }

    /// Returns 32 bytes for one purpose: HKDF-SHA256 (RFC 5869) with the purpose as its info.
    pub(super) fn derive(&self, purpose: &[u8]) -> Zeroizing<[u8; 32]> {
        let mut key = Zeroizing::new([0; 32]);
        let extracted = hkdf::Salt::new(hkdf::HKDF_SHA256, &[]).extract(&self.0);
        extracted
            .expand(&[purpose], hkdf::HKDF_SHA256)
            .and_then(|expanded| expanded.fill(&mut key[..]))
            .expect("one block of the hash is within the limit of HKDF");
        key
    }
}

pub(crate) fn random_bytes<const N: usize>() -> Result<[u8; N], SecretError> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).map_err(|_| SecretError::Random)?;
    Ok(bytes)
}

/// Reads the first 1024 bytes of a file that only its owner can read.
///
/// # Errors
///
/// Returns an error if the file cannot be read or is no text in UTF-8, if on Unix other users may
/// read or write it, and if on other systems it is no regular file.
pub(crate) fn read_protected(path: &Path) -> Result<Zeroizing<String>, SecretError> {
    read(path, Some(0o077))
}

/// Reads the first 1024 bytes of a file; `refused` are the rights that it must not have, if they
/// are checked.
fn read(path: &Path, refused: Option<u32>) -> Result<Zeroizing<String>, SecretError> {
    let unreadable = |why: String| SecretError::Read { path: path.to_owned(), why };
    let file = File::open(path).map_err(|error| unreadable(error.to_string()))?;
    if file.metadata().is_ok_and(|about| about.is_dir()) {
        return Err(unreadable("it is a directory".into()));
    }
    if let Some(refused) = refused {
        refuse_unprotected(&file, path, refused)?;
    }
    // All the capacity at once, so that a growing text leaves no copy behind.
    let mut text = Zeroizing::new(String::with_capacity(FILE_BYTES_MAX as usize));
    let mut file = file.take(FILE_BYTES_MAX);
    file.read_to_string(&mut text).map_err(|error| unreadable(error.to_string()))?;
    Ok(text)
}

/// Returns an error if a file has one of the rights in the mode `refused`, the rights of users
/// other than its owner. The open file is checked, so that it cannot be exchanged in between.
#[cfg(unix)]
fn refuse_unprotected(file: &File, path: &Path, refused: u32) -> Result<(), SecretError> {
    use std::os::unix::fs::PermissionsExt;
    let found = file
        .metadata()
        .map_err(|error| SecretError::Read { path: path.to_owned(), why: error.to_string() })?;
    let mode = found.permissions().mode() & 0o777;
    if mode & refused == 0 {
        return Ok(());
    }
    Err(SecretError::Mode { path: path.to_owned(), mode })
}

/// Returns an error for a console or a pipe, which no file owner protects. The access list of a
/// file is left to the user: by default, a home directory admits its owner and administrators.
#[cfg(not(unix))]
fn refuse_unprotected(file: &File, path: &Path, _: u32) -> Result<(), SecretError> {
    if file.metadata().is_ok_and(|about| about.is_file()) {
        return Ok(());
    }
    Err(SecretError::Read { path: path.to_owned(), why: "it is no regular file".into() })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    fn file(text: &str, mode: u32) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("code");
        fs::write(&path, text).unwrap();
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        }
        (directory, path)
    }

    #[test]
    fn generated_secrets_differ_and_pass_through_their_codes() {
        let [a, b] = [Secret::generate().unwrap(), Secret::generate().unwrap()];
        assert!(a != b);
        assert_eq!(Secret::parse(&a.code().unwrap()).unwrap(), a);
        assert_eq!(a.derive(b"x"), a.derive(b"x"));
        assert_ne!(a.derive(b"x"), a.derive(b"y"));
        assert_ne!(a.derive(b"x"), b.derive(b"x"));
    }

    #[test]
    fn files_hold_codes_or_texts() {
        let secret = Secret::generate().unwrap();
        let (_kept, path) = file(&format!("{}\n", secret.code().unwrap()), 0o600);
        assert_eq!(Secret::read_file(&path).unwrap(), secret);
        let text = "a text that somebody has chosen";
        let (_kept, path) = file(&format!("{text}\r\n"), 0o400);
        let of_text = Secret::read_file(&path).unwrap();
        assert_eq!((of_text.clone(), of_text.code()), (Secret::of_text(text), None));
    }

    #[test]
    fn files_that_cannot_be_right_are_refused() {
        let code = Secret::generate().unwrap().code().unwrap();
        let long = "x!".repeat(65);
        let cases = [
            ("short", "5 characters, and 26 to 128"),
            ("short", "use the code that `potluck secret` makes"),
            (&long[..129], "129 characters"),
            (&code[1..], "27 letters and digits, and codes have 28"),
            ("", "0 characters"),
        ];
        for (text, words) in cases {
            let (_kept, path) = file(text, 0o600);
            let error = Secret::read_file(&path).unwrap_err().to_string();
            let path = path.display().to_string();
            assert!(error.contains(words) && error.contains(&path), "{error}");
            assert!(text.len() < 6 || !error.contains(text), "{error}");
        }
        let missing = Secret::read_file(Path::new("no such file")).unwrap_err().to_string();
        assert!(missing.starts_with("no such file: cannot read"), "{missing}");
    }

    #[cfg(unix)]
    #[test]
    fn files_that_others_may_read_or_write_are_refused_with_the_command_to_type() {
        let code = Secret::generate().unwrap().code().unwrap();
        for mode in [0o640, 0o604, 0o620, 0o666] {
            let (_kept, path) = file(&code, mode);
            let error = Secret::read_file(&path).unwrap_err().to_string();
            let command = format!("chmod 600 {}", path.display());
            assert!(error.contains(&command) && error.contains(&format!("{mode:o}")), "{error}");
            assert!(!error.contains(&code));
        }
    }

    #[cfg(unix)]
    #[test]
    fn files_of_a_group_are_read_if_that_is_asked_for() {
        let secret = Secret::generate().unwrap();
        let code = secret.code().unwrap();
        for mode in [0o440, 0o640, 0o600] {
            let (_kept, path) = file(&code, mode);
            assert_eq!(Secret::read_file_of_group(&path).unwrap(), secret, "{mode:o}");
        }
        for mode in [0o660, 0o644, 0o444, 0o450] {
            let (_kept, path) = file(&code, mode);
            assert!(Secret::read_file_of_group(&path).is_err(), "{mode:o}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn descriptors_are_read_whatever_the_mode_of_their_file() {
        use std::os::fd::AsRawFd;
        let secret = Secret::generate().unwrap();
        let (_kept, path) = file(&secret.code().unwrap(), 0o644);
        let open = File::open(&path).unwrap();
        assert_eq!(Secret::read_descriptor(open.as_raw_fd() as u32).unwrap(), secret);
        let missing = Secret::read_descriptor(9999).unwrap_err().to_string();
        assert!(missing.starts_with("/dev/fd/9999: cannot read"), "{missing}");
    }

    #[cfg(windows)]
    #[test]
    fn what_is_no_file_is_refused() {
        let error = Secret::read_file(Path::new("NUL")).unwrap_err().to_string();
        assert!(error.contains("it is no regular file"), "{error}");
    }

    #[test]
    fn nothing_prints_a_secret() {
        let secret = Secret::generate().unwrap();
        let printed = format!("{secret:?} {secret:#?}");
        assert_eq!(printed, "Secret(..) Secret(..)");
        let code = secret.code().unwrap();
        let mut typed = code.clone();
        typed.replace_range(0..1, if code.starts_with('0') { "1" } else { "0" });
        let error = Secret::parse(&typed).unwrap_err();
        let printed = format!("{error} {error:?}");
        assert!(code.split('-').all(|group| !printed.contains(group)), "{printed}");
    }
}
