// A value is a vector of 4 neighbouring floats, 16 bytes; its twin lib/value takes one at a time.
alias Value = vec4f;
const FLOATS: u32 = 4u;
fn sum_of_value(v: Value) -> f32 { return (v.x + v.y) + (v.z + v.w); }
fn max_of_value(v: Value) -> f32 { return max(max(v.x, v.y), max(v.z, v.w)); }
// The largest magnitude, as bits without the sign.
fn top_of_value(v: Value) -> u32 {
    let bits = bitcast<vec4u>(v) & vec4u(0x7FFFFFFFu);
    return max(max(bits.x, bits.y), max(bits.z, bits.w));
}
fn nan_value_where(is_nan: bool, v: Value) -> Value {
    return bitcast<Value>(select(bitcast<vec4u>(v), vec4u(0x7FC00000u), is_nan));
}
