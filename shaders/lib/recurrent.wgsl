// What the time steps of recurrent layers share (recurrent_lstm.wgsl, recurrent_gru.wgsl): their
// parameters and the functions of gates. No bytes are moved. Prepended: Value.

struct Params {
    b: u32,
    t: u32,
    width: u32,     // Values of hidden columns
    terms: u32,     // of a product, in Values
    step: u32,
    has_state: u32,
}
var<immediate> p: Params;

// Both functions are right at both ends, where the exponential is 0 or infinite.
fn sigmoid(v: Value) -> Value {
    return 1.0 / (1.0 + exp(-v));
}

// The hyperbolic tangent.
fn squash(v: Value) -> Value {
    return 1.0 - 2.0 / (1.0 + exp(2.0 * v));
}
