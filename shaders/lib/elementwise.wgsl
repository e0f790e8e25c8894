// The elementwise functions of one value and, with `_grad`, their gradients; the formulas are in
// shaders/unary.wgsl. `kernels::ops::epilogue` calls them on values that are still in registers.
// No bytes are moved.

fn relu_of(x: f32) -> f32 {
    return max(x, 0.0);
}

fn relu_grad_of(x: f32, dy: f32) -> f32 {
    return select(0.0, dy, x > 0.0);
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

fn gelu_grad_of(x: f32, dy: f32) -> f32 {
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

fn gelutanh_grad_of(x: f32, dy: f32) -> f32 {
    let th = tanh(gelutanh_inner(x));
    let slope = 0.7978845608 * (1.0 + 3.0 * 0.044715 * x * x);
    return dy * (0.5 * (1.0 + th) + 0.5 * x * (1.0 - th * th) * slope);
}
