// The elementwise functions of one value and, with `_grad`, their gradients; the formulas are in
// shaders/unary.wgsl. `kernels::ops::epilogue` calls them on values that are still in registers.
// No bytes are moved.
//
// A NaN stays a NaN. Comparisons that decide about one are of bits, because a driver may compile
// a shader as if no float were NaN.

fn relu_of(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    // From -0 to minus infinity; a NaN is not among them.
    return bitcast<f32>(select(bits, 0u, bits - 0x80000000u <= 0x7F800000u));
}

fn relu_grad_of(x: f32, dy: f32) -> f32 {
    let bits = bitcast<u32>(x);
    let passed = select(0.0, dy, bits - 1u < 0x7F800000u);
    return select(passed, x, (bits & 0x7FFFFFFFu) > 0x7F800000u);
}

// x where it lies between -limit and limit, else the nearer of the two.
fn bounded(x: f32, limit: f32) -> f32 {
    let bits = bitcast<u32>(x);
    let magnitude = bits & 0x7FFFFFFFu;
    let cut = min(magnitude, bitcast<u32>(limit));
    let kept = select(cut, magnitude, magnitude > 0x7F800000u);
    return bitcast<f32>(kept | (bits & 0x80000000u));
}

// The error function by 7.1.26 of Abramowitz and Stegun, |error| < 1.5e-7.
fn erf(v: f32) -> f32 {
    let a = abs(v);
    let t = 1.0 / (1.0 + 0.3275911 * a);
    let poly = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t
        + 0.254829592) * t;
    return sign(v) * (1.0 - poly * exp(-a * a));
}

fn gelu_of(x: f32) -> f32 {
    return 0.5 * x * (1.0 + erf(x * 0.7071067812));
}

fn gelu_grad_of(far: f32, dy: f32) -> f32 {
    // Beyond 20 the density is 0 in f32, and 0 times infinity would be NaN.
    let x = bounded(far, 20.0);
    let distribution = 0.5 * (1.0 + erf(x * 0.7071067812));
    let density = 0.3989422804 * exp(-0.5 * x * x);
    return dy * (distribution + x * density);
}

fn gelutanh_inner(x: f32) -> f32 {
    // Beyond 10 the tanh is 1 in f32, and some drivers overflow in its exponentials.
    return clamp(0.7978845608 * (x + 0.044715 * x * x * x), -10.0, 10.0);
}

fn gelutanh_of(x: f32) -> f32 {
    return 0.5 * x * (1.0 + tanh(gelutanh_inner(x)));
}

fn gelutanh_grad_of(far: f32, dy: f32) -> f32 {
    // Beyond 10 the tanh is 1 in f32; the slope of its argument would overflow.
    let x = bounded(far, 10.0);
    let th = tanh(gelutanh_inner(x));
    let slope = 0.7978845608 * (1.0 + 3.0 * 0.044715 * x * x);
    return dy * (0.5 * (1.0 + th) + 0.5 * x * (1.0 - th * th) * slope);
}
