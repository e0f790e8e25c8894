//! Types of values in the files of an export.

/// Type of the values in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileType {
    F32,
    F16,
    Bf16,
    /// Blocks of 32 values in GGUF files: a factor in f16, and 32 signed bytes that it multiplies.
    Q8_0,
}

/// Values of a block of [`FileType::Q8_0`].
pub const BLOCK: usize = 32;

impl FileType {
    /// Names of all types, as in flags.
    pub const NAMES: [(&str, Self); 4] =
        [("f32", Self::F32), ("f16", Self::F16), ("bf16", Self::Bf16), ("q8_0", Self::Q8_0)];

    /// Returns true if a value is finite in this type.
    pub fn holds(self, value: f32) -> bool {
        match self {
            Self::F32 => value.is_finite(),
            Self::F16 => half::f16::from_f32(value).is_finite(),
            Self::Bf16 => half::bf16::from_f32(value).is_finite(),
            // The largest factor in f16, times 127.
            Self::Q8_0 => value.abs() < 127.0 * half::f16::MAX.to_f32(),
        }
    }

    /// Returns the reason why this type cannot represent a value.
    pub fn why_not(self, value: f32) -> String {
        if value.is_finite() {
            format!("has {value:e}, too large for the type; use --dtype f32")
        } else {
            format!("has {value}, with which no model is of use")
        }
    }

    /// Returns the bytes of this many values, in whole blocks.
    pub fn bytes(self, values: usize) -> usize {
        match self {
            Self::F32 => 4 * values,
            Self::F16 | Self::Bf16 => 2 * values,
            Self::Q8_0 => values / BLOCK * (2 + BLOCK),
        }
    }

    /// Converts values, in whole blocks, to this type. Rounds to nearest, ties to even, but in
    /// blocks ties away from zero, as in ggml.
    pub fn bytes_of(self, values: &[f32]) -> Vec<u8> {
        match self {
            Self::F32 => bytemuck::cast_slice(values).to_vec(),
            Self::F16 => halves(values, |value| half::f16::from_f32(value).to_bits()),
            Self::Bf16 => halves(values, |value| half::bf16::from_f32(value).to_bits()),
            Self::Q8_0 => {
                let mut bytes = Vec::with_capacity(self.bytes(values.len()));
                for block in values.chunks_exact(BLOCK) {
                    let largest = block.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
                    let factor = largest / 127.0;
                    let inverse = if factor == 0.0 { 0.0 } else { 1.0 / factor };
                    bytes.extend(half::f16::from_f32(factor).to_le_bytes());
                    bytes.extend(block.iter().map(|value| (value * inverse).round() as i8 as u8));
                }
                bytes
            }
        }
    }
}

fn halves(values: &[f32], bits: impl Fn(f32) -> u16) -> Vec<u8> {
    values.iter().flat_map(|value| bits(*value).to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_bytes_keep_values_within_half_a_step() {
        let values: Vec<f32> = (0..64).map(|i| ((i * 37 % 64) as f32 - 31.5) / 7.0).collect();
        let bytes = FileType::Q8_0.bytes_of(&values);
        assert_eq!(bytes.len(), FileType::Q8_0.bytes(64));
        for (block, values) in bytes.chunks(34).zip(values.chunks(BLOCK)) {
            let factor = half::f16::from_le_bytes([block[0], block[1]]).to_f32();
            for (byte, value) in block[2..].iter().zip(values) {
                let found = f32::from(*byte as i8) * factor;
                assert!((found - value).abs() <= 0.51 * factor, "{found} for {value}");
            }
        }
        assert_eq!(FileType::Q8_0.bytes_of(&[0.0; 32]), [0; 34]);
    }

    #[test]
    fn types_hold_what_is_finite_in_them() {
        for (kind, held, beyond) in [
            (FileType::F16, 65_504.0, 65_520.0),
            (FileType::Bf16, 3e38, f32::MAX),
            (FileType::Q8_0, 8e6, 8.4e6),
            (FileType::F32, f32::MAX, f32::INFINITY),
        ] {
            assert!(kind.holds(held) && !kind.holds(beyond) && !kind.holds(f32::NAN), "{kind:?}");
        }
    }
}
