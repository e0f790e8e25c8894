// Tests for NaN by the bits of a value, and NaN made from bits: a driver may compile a shader as
// if no float were NaN, and then drop a comparison or let max, min or exp return a number. For the
// same reason the results of forward kernels are made NaN where they are stored: a NaN that
// arithmetic follows, as in gradients, may be dropped. No bytes are moved.

// Bits without the sign: above NAN_ABOVE, the value is a NaN; equal to it, an infinity.
const NAN_ABOVE: u32 = 0x7F800000u;

fn magnitude_of(x: f32) -> u32 {
    return bitcast<u32>(x) & 0x7FFFFFFFu;
}

fn nan_where(is_nan: bool, x: f32) -> f32 {
    return bitcast<f32>(select(bitcast<u32>(x), 0x7FC00000u, is_nan));
}

fn nan4_where(is_nan: bool, v: vec4f) -> vec4f {
    return bitcast<vec4f>(select(bitcast<vec4u>(v), vec4u(0x7FC00000u), is_nan));
}
