// What the time steps of recurrent layers share (recurrent_lstm.wgsl, recurrent_gru.wgsl, both with
// bindings h0 and y): their parameters, and the values of a product. An element is read.
// Prepended: Value, FROM_STATE.

struct Params {
    b: u32,
    t: u32,
    width: u32,     // Values of hidden columns
    terms: u32,     // of a product, in Values
    step: u32,
    has_state: u32,
}
var<immediate> p: Params;

// Values of the product of a forward step: the hidden ones of the step before.
fn hidden(sample: u32, q: u32) -> Value {
    if (FROM_STATE == 1u) { return h0[sample * p.width + q]; }
    return y[(sample * p.t + p.step - 1u) * p.width + q];
}
