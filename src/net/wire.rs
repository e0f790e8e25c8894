//! Bytes on the wire. Every number is big-endian; every length is checked against its limit here,
//! before anything is allocated.
//!
//! ```text
//! the dialing side opens one bidirectional stream; each side sends on it
//!   greeting   magic (4)  bytes behind (2)  protocol (2)  bytes of the version (1)  version
//!              and, in this protocol,  idle timeout in milliseconds (8)  hello
//!   control    bytes (4)  message                           any number of times; without a byte it
//!              is a probe, which nobody is handed
//! each side opens unidirectional streams
//!   data       1  then, any number of times,  version (1)  tag (40)  bytes (4)  payload
//!   blob       2  version (1)  id (8)  bytes (4)  BLAKE3 (32)  payload, and the end of the stream
//! ```
//!
//! All protocols have the same greeting up to the version, and the same name for TLS (ALPN): nodes
//! of two protocols can report each other's versions.

use std::time::Duration;

/// Bytes of the tag of a payload, which only the layer above interprets.
pub const TAG_BYTES: usize = 40;
/// Most bytes of the hello in a node's greeting.
pub const HELLO_MAX: usize = 4 << 10;
/// Most bytes of a control message.
pub const CONTROL_MAX: usize = 64 << 10;
/// Most bytes of a blob, and of a payload.
pub const PAYLOAD_MAX: usize = 64 << 20;
/// Most characters of a peer's reason that are shown.
const REASON_CHARACTERS: usize = 300;
/// Most bytes of a reason that are sent: it must fit into one packet of the smallest size.
const REASON_BYTES: usize = 900;

pub(crate) const GREETING_HEAD_BYTES: usize = 6;
const PROTOCOL_BYTES: usize = 2;
const IDLE_TIMEOUT_BYTES: usize = 8;
/// Maximum number of bytes of a greeting after its head.
const GREETING_BYTES_MAX: usize =
    PROTOCOL_BYTES + 1 + u8::MAX as usize + IDLE_TIMEOUT_BYTES + HELLO_MAX;
pub(crate) const CONTROL_HEAD_BYTES: usize = 4;
pub(crate) const DATA_HEAD_BYTES: usize = 1 + TAG_BYTES + 4;
pub(crate) const BLOB_HEAD_BYTES: usize = 1 + 8 + 4 + 32;
/// Shortest idle timeout of a connection.
pub(crate) const IDLE_TIMEOUT_MIN: Duration = Duration::from_millis(1);
const MAGIC: [u8; 4] = *b"PTLK";
/// Protocol of everything after the version in a greeting, the messages between nodes included. Any
/// change makes another protocol.
pub(crate) const PROTOCOL: u16 = 13;
const VERSION: u8 = 1;

/// Code with which an application closes a QUIC connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CloseCode {
    End = 0,
    Refused = 1,
    Violation = 2,
    Defect = 3,
}

impl CloseCode {
    pub fn of(code: u64) -> Option<Self> {
        [Self::End, Self::Refused, Self::Violation, Self::Defect]
            .into_iter()
            .find(|known| *known as u64 == code)
    }
}

/// Kind of a unidirectional stream: its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamKind {
    Data = 1,
    Blob = 2,
}

impl StreamKind {
    pub fn decode(byte: u8) -> Result<Self, String> {
        match byte {
            1 => Ok(Self::Data),
            2 => Ok(Self::Blob),
            other => Err(format!("a stream is of the unknown kind {other}")),
        }
    }
}

/// First message of each side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Greeting {
    pub hello: Vec<u8>,
    pub idle_timeout: Duration,
}

/// Reason to refuse a greeting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum GreetingError {
    /// The bytes are no greeting.
    Malformed(String),
    /// It is of another protocol, by a program of this version.
    OtherProtocol { protocol: u16, version: String },
}

impl GreetingError {
    /// Returns the sentence for both sides; `has_dialed` is true at the side that has dialed.
    pub fn sentence(&self, has_dialed: bool) -> String {
        match self {
            Self::Malformed(why) => why.clone(),
            Self::OtherProtocol { protocol, version } => {
                let theirs = format!("potluck {version} (protocol {protocol})");
                let own = format!("potluck {} (protocol {PROTOCOL})", env!("CARGO_PKG_VERSION"));
                let (dials, is_dialed) = if has_dialed { (own, theirs) } else { (theirs, own) };
                format!(
                    "the node that dials has {dials}, and the one that is dialed {is_dialed}: \
                     install the same version on both"
                )
            }
        }
    }
}

/// Returns a greeting of a side that closes its connection after this time without a packet; the
/// length of the hello was checked when the endpoint was made.
pub fn greeting(hello: &[u8], idle_timeout: Duration) -> Vec<u8> {
    let milliseconds = u64::try_from(idle_timeout.as_millis()).unwrap_or(u64::MAX);
    let rest = [&milliseconds.to_be_bytes(), hello].concat();
    greeting_of(PROTOCOL, env!("CARGO_PKG_VERSION"), &rest)
}

/// Returns a greeting of a protocol; `rest` are the bytes that it defines.
pub(crate) fn greeting_of(protocol: u16, version: &str, rest: &[u8]) -> Vec<u8> {
    let mut behind = protocol.to_be_bytes().to_vec();
    behind.push(version.len() as u8);
    behind.extend(version.as_bytes());
    behind.extend(rest);
    let mut bytes = MAGIC.to_vec();
    bytes.extend((behind.len() as u16).to_be_bytes());
    bytes.extend(behind);
    bytes
}

/// Number of bytes of a greeting after this head.
pub(crate) fn greeting_length(head: &[u8; GREETING_HEAD_BYTES]) -> Result<usize, String> {
    if head[..4] != MAGIC {
        return Err("a greeting does not begin as one".into());
    }
    let bytes = usize::from(u16::from_be_bytes([head[4], head[5]]));
    within("a greeting", bytes, GREETING_BYTES_MAX)
}

impl Greeting {
    /// Returns the greeting of the bytes after its head. Its idle timeout is at least 1 ms, as in
    /// the options of a connection.
    ///
    /// # Errors
    /// Returns the fault of the bytes, or their protocol if that is another one.
    pub fn decode(behind: &[u8]) -> Result<Self, GreetingError> {
        let short = || GreetingError::Malformed("a greeting is too short".into());
        let (protocol, behind) = behind.split_first_chunk::<PROTOCOL_BYTES>().ok_or_else(short)?;
        let (length, behind) = behind.split_first().ok_or_else(short)?;
        let (version, rest) = behind.split_at_checked(usize::from(*length)).ok_or_else(short)?;
        let protocol = u16::from_be_bytes(*protocol);
        if protocol != PROTOCOL {
            let version = reason_text(version);
            return Err(GreetingError::OtherProtocol { protocol, version });
        }
        let (milliseconds, hello) =
            rest.split_first_chunk::<IDLE_TIMEOUT_BYTES>().ok_or_else(short)?;
        let idle_timeout = Duration::from_millis(u64::from_be_bytes(*milliseconds));
        Ok(Self { hello: hello.to_vec(), idle_timeout: idle_timeout.max(IDLE_TIMEOUT_MIN) })
    }
}

pub(crate) fn control_head(bytes: usize) -> [u8; CONTROL_HEAD_BYTES] {
    (bytes as u32).to_be_bytes()
}

pub(crate) fn control_length(head: &[u8; CONTROL_HEAD_BYTES]) -> Result<usize, String> {
    within("a control message", length(head), CONTROL_MAX)
}

/// Head of a payload on the data stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DataHead {
    pub tag: [u8; TAG_BYTES],
    pub bytes: usize,
}

impl DataHead {
    pub fn encode(&self) -> [u8; DATA_HEAD_BYTES] {
        let mut head = [0; DATA_HEAD_BYTES];
        head[0] = VERSION;
        head[1..=TAG_BYTES].copy_from_slice(&self.tag);
        head[1 + TAG_BYTES..].copy_from_slice(&(self.bytes as u32).to_be_bytes());
        head
    }

    pub fn decode(head: &[u8; DATA_HEAD_BYTES]) -> Result<Self, String> {
        version("a payload", head[0])?;
        let (tag, bytes) = head[1..].split_at(TAG_BYTES);
        let bytes = within("a payload", length(bytes), PAYLOAD_MAX)?;
        let mut copied = [0; TAG_BYTES];
        copied.copy_from_slice(tag);
        Ok(Self { tag: copied, bytes })
    }
}

/// Head of a blob, after the kind of its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlobHead {
    pub id: u64,
    pub bytes: usize,
    pub hash: [u8; 32],
}

impl BlobHead {
    pub fn encode(&self) -> [u8; BLOB_HEAD_BYTES] {
        let mut head = [0; BLOB_HEAD_BYTES];
        head[0] = VERSION;
        head[1..9].copy_from_slice(&self.id.to_be_bytes());
        head[9..13].copy_from_slice(&(self.bytes as u32).to_be_bytes());
        head[13..].copy_from_slice(&self.hash);
        head
    }

    pub fn decode(head: &[u8; BLOB_HEAD_BYTES]) -> Result<Self, String> {
        version("a blob", head[0])?;
        let bytes = within("a blob", length(&head[9..13]), PAYLOAD_MAX)?;
        let mut id = [0; 8];
        id.copy_from_slice(&head[1..9]);
        let id = u64::from_be_bytes(id);
        let mut hash = [0; 32];
        hash.copy_from_slice(&head[13..]);
        Ok(Self { id, bytes, hash })
    }
}

fn length(bytes: &[u8]) -> usize {
    let mut length = 0;
    for byte in bytes {
        length = length << 8 | usize::from(*byte);
    }
    length
}

fn version(what: &str, found: u8) -> Result<(), String> {
    if found == VERSION {
        return Ok(());
    }
    Err(format!("{what} is of version {found} of the protocol, and {VERSION} is known"))
}

fn within(what: &str, bytes: usize, max: usize) -> Result<usize, String> {
    if bytes <= max {
        return Ok(bytes);
    }
    Err(format!("{what} has {bytes} bytes, and at most {max} are allowed"))
}

pub(crate) fn reason_bytes(why: &str) -> &[u8] {
    let mut end = why.len().min(REASON_BYTES);
    while !why.is_char_boundary(end) {
        end -= 1;
    }
    &why.as_bytes()[..end]
}

/// Returns a peer's reason for display: one line, without characters that control a terminal, and
/// not longer than a message.
pub(crate) fn reason_text(bytes: &[u8]) -> String {
    // A character has at most four bytes.
    let bytes = &bytes[..bytes.len().min(4 * REASON_CHARACTERS)];
    let text = String::from_utf8_lossy(bytes);
    let mut shown = String::new();
    for character in text.chars().take(REASON_CHARACTERS) {
        shown.push(if is_harmful(character) { '\u{FFFD}' } else { character });
    }
    if shown.is_empty() { "no reason was given".into() } else { shown }
}

/// Returns true for a control character, and for a mark that reverses the direction of text, which
/// would disguise it.
fn is_harmful(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{200E}'..='\u{200F}' | '\u{2028}'..='\u{202E}')
        || matches!(character, '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_core::rng::threefry2x32;

    /// Mutates encoded bytes: a byte is replaced, a bit is turned, all is noise, a length is at a
    /// border.
    fn mutated<const N: usize>(valid: &[u8; N], seed: u32) -> [u8; N] {
        let word = |i: u32| threefry2x32([seed, 7], [i, 0])[0];
        let mut bytes = *valid;
        for change in 0..=word(0) % 3 {
            let at = word(10 + change) as usize % N;
            match word(20 + change) % 4 {
                0 => bytes[at] = word(30 + change) as u8,
                1 => bytes[at] ^= 1 << (word(30 + change) % 8),
                2 => bytes.iter_mut().zip(40..).for_each(|(byte, i)| *byte = word(i) as u8),
                _ => {
                    let near = PAYLOAD_MAX as u32 - 1 + word(30 + change) % 3;
                    let end = (at + 4).min(N);
                    bytes[at..end].copy_from_slice(&near.to_be_bytes()[..end - at]);
                }
            }
        }
        bytes
    }

    const MUTATIONS: u32 = 100_000;

    #[test]
    fn heads_pass_through_their_encoding() {
        let data =
            DataHead { tag: std::array::from_fn(|i| i as u8), bytes: 0x0123_4567 & 0x3FF_FFFF };
        assert_eq!(DataHead::decode(&data.encode()), Ok(data));
        let blob = BlobHead { id: u64::MAX - 5, bytes: PAYLOAD_MAX, hash: [7; 32] };
        assert_eq!(BlobHead::decode(&blob.encode()), Ok(blob));
        assert_eq!(control_length(&control_head(CONTROL_MAX)), Ok(CONTROL_MAX));
        for idle in [IDLE_TIMEOUT_MIN, Duration::from_millis(1500), Duration::from_secs(1 << 30)] {
            let greeted = greeting(b"hello", idle);
            let (head, behind) = greeted.split_first_chunk().unwrap();
            assert_eq!(greeting_length(head), Ok(behind.len()));
            let decoded = Greeting { hello: b"hello".into(), idle_timeout: idle };
            assert_eq!(Greeting::decode(behind), Ok(decoded));
        }
        let shortest = Greeting::decode(&greeting(b"", Duration::ZERO)[GREETING_HEAD_BYTES..]);
        assert_eq!(shortest.unwrap().idle_timeout, IDLE_TIMEOUT_MIN);
        assert!(greeting(b"", Duration::MAX).ends_with(&[255; 8]));
        for kind in [StreamKind::Data, StreamKind::Blob] {
            assert_eq!(StreamKind::decode(kind as u8), Ok(kind));
        }
    }

    /// These bytes may not change: nodes of all versions tell each other by them.
    #[test]
    fn greetings_of_all_protocols_name_their_version() {
        let rest = [&1500u64.to_be_bytes()[..], b"hello"].concat();
        let third = b"PTLK\0\x15\0\x03\x050.2.0\0\0\0\0\0\0\x05\xdchello";
        let error = Greeting::decode(&third[GREETING_HEAD_BYTES..]).unwrap_err();
        let past = GreetingError::OtherProtocol { protocol: 3, version: "0.2.0".into() };
        assert_eq!(error, past);
        let own = b"PTLK\0\x15\0\x0d\x050.2.0\0\0\0\0\0\0\x05\xdchello";
        assert_eq!(greeting_of(PROTOCOL, "0.2.0", &rest), own);
        let (head, behind) = own.split_first_chunk().unwrap();
        assert_eq!(greeting_length(head), Ok(behind.len()));
        let idle_timeout = Duration::from_millis(1500);
        let decoded = Greeting { hello: b"hello".into(), idle_timeout };
        assert_eq!(Greeting::decode(behind), Ok(decoded));
        // A greeting of a later protocol; only its beginning is known.
        let later = b"PTLK\0\x0b\0\x0e\x059.8.7\xff\xfe\xfd";
        let error = Greeting::decode(&later[GREETING_HEAD_BYTES..]).unwrap_err();
        let own = format!("potluck {} (protocol 13)", env!("CARGO_PKG_VERSION"));
        assert_eq!(
            error.sentence(true),
            format!(
                "the node that dials has {own}, and the one that is dialed potluck 9.8.7 \
                 (protocol 14): install the same version on both"
            )
        );
        assert!(error.sentence(false).starts_with("the node that dials has potluck 9.8.7"));
        for length in 0..behind.len() - b"hello".len() {
            let error = Greeting::decode(&behind[..length]).unwrap_err();
            assert_eq!(error.sentence(true), "a greeting is too short", "{length}");
        }
    }

    #[test]
    fn mutated_heads_are_refused_or_are_within_the_limits() {
        let data = DataHead { tag: [3; TAG_BYTES], bytes: 1000 }.encode();
        let blob = BlobHead { id: 3, bytes: 1000, hash: [3; 32] }.encode();
        let greeted = *greeting(&[0; 100], IDLE_TIMEOUT_MIN).first_chunk().unwrap();
        let mut refused = [0; 4];
        for seed in 0..MUTATIONS {
            let lengths = [
                DataHead::decode(&mutated(&data, seed)).map(|head| (head.bytes, PAYLOAD_MAX)),
                BlobHead::decode(&mutated(&blob, seed)).map(|head| (head.bytes, PAYLOAD_MAX)),
                greeting_length(&mutated(&greeted, seed)).map(|bytes| (bytes, GREETING_BYTES_MAX)),
                control_length(&mutated(&control_head(9), seed)).map(|bytes| (bytes, CONTROL_MAX)),
            ];
            for (refused, length) in refused.iter_mut().zip(lengths) {
                match length {
                    Ok((bytes, max)) => assert!(bytes <= max, "seed {seed}: {bytes}"),
                    Err(why) => {
                        assert!(why.len() < 100, "{why}");
                        *refused += 1;
                    }
                }
            }
        }
        assert!(refused.iter().all(|count| (1000..MUTATIONS).contains(count)), "{refused:?}");
    }

    #[test]
    fn unknown_versions_kinds_and_lengths_are_named() {
        let mut data = DataHead { tag: [0; TAG_BYTES], bytes: 0 }.encode();
        data[0] = 2;
        assert!(DataHead::decode(&data).unwrap_err().contains("version 2"));
        let blob = BlobHead { id: 0, bytes: PAYLOAD_MAX + 1, hash: [0; 32] }.encode();
        assert!(BlobHead::decode(&blob).unwrap_err().contains("67108865 bytes"));
        assert!(StreamKind::decode(0).unwrap_err().contains("kind 0"));
        assert!(control_length(&[255; 4]).unwrap_err().contains("at most 65536"));
        assert!(greeting_length(b"HTTP/1").unwrap_err().contains("begin"));
    }

    #[test]
    fn reasons_are_made_harmless() {
        assert_eq!(reason_text(b"a\x1b[31m\nb\xff"), "a\u{FFFD}[31m\u{FFFD}b\u{FFFD}");
        assert_eq!(reason_text("\u{202E}x".as_bytes()), "\u{FFFD}x");
        assert_eq!(reason_text(b""), "no reason was given");
        let long = "ä".repeat(5000);
        assert!(reason_text(long.as_bytes()).chars().count() <= REASON_CHARACTERS + 1);
        assert_eq!(reason_bytes(&long).len(), REASON_BYTES);
        assert_eq!(reason_bytes("aä").len(), 3);
        for seed in 0..MUTATIONS / 10 {
            let shown = reason_text(&mutated(&[b'a'; 64], seed));
            assert!(!shown.chars().any(char::is_control));
        }
    }
}
