// A value is one float; its twin lib/value4 takes four at a time. No bytes are moved.
alias Value = f32;
const FLOATS: u32 = 1u;
fn sum_of_value(v: Value) -> f32 { return v; }
fn max_of_value(v: Value) -> f32 { return v; }
fn top_of_value(v: Value) -> u32 { return bitcast<u32>(v) & 0x7FFFFFFFu; }
fn nan_value_where(is_nan: bool, v: Value) -> Value {
    return bitcast<Value>(select(bitcast<u32>(v), 0x7FC00000u, is_nan));
}
