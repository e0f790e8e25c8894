// Functions that the formulas of elementwise functions call and that are no functions of WGSL, or
// not for all arguments. `kernels::ops::elements` puts them in front of the formulas; see the table
// in src/graph/elements.rs. No bytes are moved.
//
// A NaN stays a NaN. Comparisons that decide about one are of bits, because a driver may compile
// a shader as if no float were NaN.

fn mul_add(a: f32, b: f32, c: f32) -> f32 {
    return a * b + c;
}

// `value`, or x where x is a NaN.
fn unless_nan(x: f32, value: f32) -> f32 {
    let bits = bitcast<u32>(x);
    return bitcast<f32>(select(bitcast<u32>(value), bits, (bits & 0x7FFFFFFFu) > 0x7F800000u));
}

// `value`, or NaN where x is infinite or NaN.
fn if_finite(x: f32, value: f32) -> f32 {
    let is_finite = (bitcast<u32>(x) & 0x7F800000u) != 0x7F800000u;
    return bitcast<f32>(select(0x7FC00000u, bitcast<u32>(value), is_finite));
}

// x where it lies between -limit and limit, else the nearer of the two.
fn bounded(x: f32, limit: f32) -> f32 {
    let bits = bitcast<u32>(x);
    let magnitude = bits & 0x7FFFFFFFu;
    let cut = min(magnitude, bitcast<u32>(limit));
    let kept = select(cut, magnitude, magnitude > 0x7F800000u);
    return bitcast<f32>(kept | (bits & 0x80000000u));
}

// -1, 0 or 1.
fn sign_of(x: f32) -> f32 {
    return unless_nan(x, sign(x));
}

// The error function, relative error below 5e-7: below 0.5 the Taylor series to the 11th power,
// beyond 1 - e^(-a q(a)) with the polynomial q of `kernels::simd`. Beyond 4 it is 1.
fn erf(v: f32) -> f32 {
    let a = min(abs(v), 4.0);
    let s = a * a;
    let series = -0.3333333333 + s * (0.1 + s * (-0.0238095238 + s * (0.0046296296
        - s * 0.0007575758)));
    let near = 1.1283791671 * (a + a * s * series);
    let q = 1.1283791671 + a * (0.63661647 + a * (0.10281441 + a * (-0.01932172 + a * (0.0002057207
        + a * (0.0012517436 + a * (-0.0003809997 + a * 0.00004070781))))));
    let size = select(1.0 - exp(-a * q), near, a < 0.5);
    return unless_nan(v, select(size, -size, v < 0.0));
}

// e^-|x|, which is 0 in f32 from 104 on, denormal numbers included.
fn decay(x: f32) -> f32 {
    return exp(-min(abs(x), 150.0));
}

// 1 / (1 + e^-x)
fn sigmoid_of(x: f32) -> f32 {
    let e = decay(x);
    return unless_nan(x, select(e, 1.0, x >= 0.0) / (1.0 + e));
}

// The derivative of the sigmoid, which is that of both x and -x.
fn sigmoid_slope(x: f32) -> f32 {
    let e = decay(x);
    let larger = 1.0 / (1.0 + e);
    return unless_nan(x, e * larger * larger);
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

fn exp_of(x: f32) -> f32 {
    return unless_nan(x, exp(x));
}

// The natural logarithm, NaN below 0.
fn log_of(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    let of_ends = select(0x7F800000u, 0xFF800000u, (bits & 0x7FFFFFFFu) == 0u);
    let is_end = ((bits & 0x7FFFFFFFu) == 0u) | (bits == 0x7F800000u);
    let value = select(bitcast<u32>(log(x)), of_ends, is_end);
    let is_below = (bits > 0x7F800000u) & (bits != 0x80000000u);
    return bitcast<f32>(select(value, 0x7FC00000u, is_below));
}

// 2^n for a whole number from -126 to 127, else the nearer of these.
fn power_of_two(n: f32) -> f32 {
    return bitcast<f32>(u32(i32(clamp(n, -126.0, 127.0)) + 127) << 23u);
}

// The square root, NaN below 0.
fn sqrt_of(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    let value = bitcast<u32>(sqrt(x));
    let is_below = (bits > 0x7F800000u) & (bits != 0x80000000u);
    return bitcast<f32>(select(value, 0x7FC00000u, is_below));
}
