//! Bytes of an event file of TensorBoard: records in the framing of TFRecord, each an `Event` in
//! the wire format of Protocol Buffers.
//!
//! The framing follows TensorFlow's guide "TFRecord and tf.train.Example"; the numbers of the
//! fields are from `event.proto` and `summary.proto` of TensorBoard, and the wire format is from
//! the guide "Encoding" of Protocol Buffers.

use crc::{CRC_32_ISCSI, Crc};

/// CRC-32C, the polynomial of Castagnoli.
static CRC32C: Crc<u32> = Crc::<u32>::new(&CRC_32_ISCSI);
/// Number that TFRecord adds to a rotated checksum, so that a checksum of bytes that contain
/// checksums stays a good one.
const MASK: u32 = 0xa282_ead8;
/// Version of the format: steps of a restarted run supersede the same steps of earlier files.
const VERSION: &str = "brain.Event:2";

/// Content of an event.
#[derive(Clone, Debug, PartialEq)]
pub enum EventContent {
    /// The first event of each file: the version of its format.
    Version,
    /// A start: TensorBoard drops what earlier files have at its step and later ones.
    Start,
    /// Values by tag.
    Scalars(Vec<(String, f64)>),
}

/// Checksum of bytes as TFRecord stores it.
fn masked_crc(bytes: &[u8]) -> u32 {
    CRC32C.checksum(bytes).rotate_right(15).wrapping_add(MASK)
}

/// Returns a record: the length of its bytes, the checksum of the length, the bytes, and their
/// checksum, with numbers in little-endian order.
pub fn record(bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u64).to_le_bytes();
    let parts: [&[u8]; 4] =
        [&length, &masked_crc(&length).to_le_bytes(), bytes, &masked_crc(bytes).to_le_bytes()];
    parts.concat()
}

/// Returns the bytes of an event of a step; `wall_time_s` is in seconds since 1970.
pub fn event(wall_time_s: f64, step: u64, content: &EventContent) -> Vec<u8> {
    let event = WireMessage::default().double(1, wall_time_s).integer(2, step);
    match content {
        EventContent::Version => event.bytes(3, VERSION.as_bytes()),
        // The status START of a SessionLog.
        EventContent::Start => event.bytes(7, &WireMessage::default().integer(1, 1).0),
        EventContent::Scalars(scalars) => {
            let mut summary = WireMessage::default();
            for (tag, value) in scalars {
                let scalar =
                    WireMessage::default().bytes(1, tag.as_bytes()).float(2, *value as f32);
                summary = summary.bytes(1, &scalar.0);
            }
            event.bytes(5, &summary.0)
        }
    }
    .0
}

/// Message in the wire format of Protocol Buffers, to which fields are appended.
#[derive(Default)]
struct WireMessage(Vec<u8>);

impl WireMessage {
    /// Appends the number of a field with its wire type.
    fn key(self, field: u8, wire_type: u8) -> Self {
        self.varint(u64::from(field << 3 | wire_type))
    }

    /// Appends a number in groups of 7 bits, the lowest first.
    fn varint(mut self, mut value: u64) -> Self {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
        self
    }

    /// Appends a whole number, unless it is 0, which a missing field is read as.
    fn integer(self, field: u8, value: u64) -> Self {
        if value == 0 { self } else { self.key(field, 0).varint(value) }
    }

    fn double(self, field: u8, value: f64) -> Self {
        self.key(field, 1).raw(&value.to_le_bytes())
    }

    fn float(self, field: u8, value: f32) -> Self {
        self.key(field, 5).raw(&value.to_le_bytes())
    }

    /// Appends a text or another message.
    fn bytes(self, field: u8, bytes: &[u8]) -> Self {
        self.key(field, 2).varint(bytes.len() as u64).raw(bytes)
    }

    fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standard() {
        // RFC 3720, appendix B.4: 32 zeros, and the numbers from 0 to 31.
        assert_eq!(CRC32C.checksum(&[0; 32]), 0x8a91_36aa);
        let ascending: Vec<u8> = (0..32).collect();
        assert_eq!(CRC32C.checksum(&ascending), 0x46dd_794e);
        assert_eq!(masked_crc(&[0; 32]), 0x0fd7_fffa);
    }

    /// TensorBoard's own `event_pb2` and `RecordWriter` write the same records.
    #[test]
    fn events_have_the_bytes_of_the_reference() {
        let version = concat!(
            "1800000000000000a37f4b22",
            "09000000000000f83f1a0d627261696e2e4576656e743a32",
            "2a28646c"
        );
        assert_eq!(hex(&record(&event(1.5, 0, &EventContent::Version))), version);
        let start = "100000000000000095fbfe1809000000000000f83f10ac023a020801713b788a";
        assert_eq!(hex(&record(&event(1.5, 300, &EventContent::Start))), start);
        let scalars = concat!(
            "31000000000000009d8383e9",
            "09000000000000f83f10072a240a110a0a747261696e2f6c6f73731500008840",
            "0a0f0a08747261696e2f6c72156f12833a",
            "bd208ea0"
        );
        let values = vec![("train/loss".into(), 4.25), ("train/lr".into(), 1e-3)];
        assert_eq!(hex(&record(&event(1.5, 7, &EventContent::Scalars(values)))), scalars);
    }

    #[test]
    fn numbers_take_as_many_groups_of_seven_bits_as_they_need() {
        let varint = |value| WireMessage::default().varint(value).0;
        assert_eq!((varint(0), varint(127), varint(128)), (vec![0], vec![127], vec![0x80, 1]));
        assert_eq!(varint(u64::MAX).len(), 10);
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}
