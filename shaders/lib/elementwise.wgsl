// The elementwise functions of one value, and of two that are no operator of the language; with
// `_grad`, their gradients. The formulas are in shaders/unary.wgsl and shaders/binary.wgsl.
// `kernels::ops::epilogue` calls them on values that are still in registers. No bytes are moved.
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

// `value`, or x where x is a NaN.
fn unless_nan(x: f32, value: f32) -> f32 {
    let bits = bitcast<u32>(x);
    return bitcast<f32>(select(bitcast<u32>(value), bits, (bits & 0x7FFFFFFFu) > 0x7F800000u));
}

// e^-|x|, which is 0 in f32 from 104 on, denormal numbers included.
fn decay(x: f32) -> f32 {
    return exp(-min(abs(x), 150.0));
}

fn sigmoid_of(x: f32) -> f32 {
    let e = decay(x);
    return unless_nan(x, select(e, 1.0, x >= 0.0) / (1.0 + e));
}

fn sigmoid_grad_of(x: f32, dy: f32) -> f32 {
    let e = decay(x);
    let larger = 1.0 / (1.0 + e);
    return dy * unless_nan(x, e * larger * larger);
}

fn tanh_of(x: f32) -> f32 {
    // Drivers compute tanh by exponentials, which overflow far from 0 and round near it: below
    // 0.35 the Taylor series to the 9th power.
    let a = min(abs(x), 20.0);
    let q = a * a;
    let series = -0.3333333333 + q * (0.1333333333 + q * (-0.0539682540 + q * 0.0218694885));
    let far = 1.0 - 2.0 / (exp(2.0 * a) + 1.0);
    let size = select(far, a + a * q * series, a < 0.35);
    return unless_nan(x, select(size, -size, x < 0.0));
}

fn tanh_grad_of(x: f32, dy: f32) -> f32 {
    let e = decay(2.0 * x);
    let larger = 1.0 / (1.0 + e);
    return dy * unless_nan(x, 4.0 * e * larger * larger);
}

fn silu_of(x: f32) -> f32 {
    return x * sigmoid_of(x);
}

fn silu_grad_of(far: f32, dy: f32) -> f32 {
    // Beyond 100 the slope of the sigmoid is 0 in f32.
    let x = bounded(far, 100.0);
    return dy * (sigmoid_of(x) + sigmoid_grad_of(x, x));
}

fn exp_of(x: f32) -> f32 {
    return unless_nan(x, exp(x));
}

fn exp_grad_of(x: f32, dy: f32) -> f32 {
    return dy * exp_of(x);
}

fn log_of(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    let of_ends = select(0x7F800000u, 0xFF800000u, (bits & 0x7FFFFFFFu) == 0u);
    let is_end = (bits & 0x7FFFFFFFu) == 0u || bits == 0x7F800000u;
    let value = select(bitcast<u32>(log(x)), of_ends, is_end);
    return bitcast<f32>(select(value, 0x7FC00000u, bits > 0x7F800000u && bits != 0x80000000u));
}

fn log_grad_of(x: f32, dy: f32) -> f32 {
    return dy / x;
}

fn sqrt_of(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    let value = bitcast<u32>(sqrt(x));
    return bitcast<f32>(select(value, 0x7FC00000u, bits > 0x7F800000u && bits != 0x80000000u));
}

fn sqrt_grad_of(x: f32, dy: f32) -> f32 {
    return 0.5 * dy / sqrt_of(x);
}

fn maximum_of(a: f32, b: f32) -> f32 {
    return unless_nan(a, unless_nan(b, max(a, b)));
}

fn maximum_grad_of(a: f32, b: f32, dy: f32) -> f32 {
    let passed = select(select(0.0, 0.5 * dy, a == b), dy, a > b);
    return unless_nan(a, unless_nan(b, passed));
}
