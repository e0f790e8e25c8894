// Operands of products in f16, rounded by integer arithmetic on f32: to nearest, ties to even,
// with subnormals, infinity from 65520 on, and NaN as it is (IEEE 754 binary16).

// Magnitudes, as bits of f32, of the smallest normal f16 and of the largest f16.
const F16_NORMAL = 0x38800000u;
const F16_MAX = 0x477fe000u;
const INFINITY = 0x7f800000u;

fn operand4(x: vec4f) -> vec4f {
    let bits = bitcast<vec4u>(x);
    let sign = bits & vec4u(0x80000000u);
    let magnitude = bits ^ sign;
    let odd = (magnitude >> vec4u(13u)) & vec4u(1u);
    let normal = (magnitude + 0xfffu + odd) & vec4u(0xffffe000u);
    // Subnormals are multiples of 2^-24.
    let steps = round(bitcast<vec4f>(magnitude) * 16777216.0);
    let subnormal = bitcast<vec4u>(steps * 5.9604644775390625e-8);
    var rounded = select(normal, subnormal, magnitude < vec4u(F16_NORMAL));
    rounded = select(rounded, vec4u(INFINITY), rounded > vec4u(F16_MAX));
    rounded = select(rounded, magnitude, magnitude > vec4u(INFINITY));
    return bitcast<vec4f>(rounded | sign);
}

fn operand(x: f32) -> f32 { return operand4(vec4f(x)).x; }
