//! SIMD support of the CPU kernels: loops compiled for the best instruction set of the machine,
//! and f32 functions without branches or lookup tables, so that such loops vectorize.
//!
//! A function inside `vectorized!` is compiled with AVX-512, with AVX2 and FMA, and for the
//! baseline (NEON belongs to the baseline of aarch64). The version is selected at run time, so the
//! binary stays portable. The compiler vectorizes plain loops in it. It neither reorders sums nor
//! contracts `a * b + c`, so a loop has the same bits in all versions, except for results of
//! [`mul_add`].
//!
//! The functions take the instruction set as the type `S` only to know whether a fused
//! multiply-add is one instruction. All of them return NaN for NaN.

use pulp::Simd;

/// Defines functions whose body is compiled for each instruction set; see the module
/// documentation. The body may use the type `S` for functions that are generic over the
/// instruction set; these must be `#[inline(always)]` to be compiled for the same instruction
/// set. A type parameter after `S` is a parameter of the function itself.
macro_rules! vectorized {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident<$S:ident $(, $T:ident: $bound:path)?>(
        $($arg:ident: $type:ty),* $(,)?
    ) $(-> $result:ty)? $body:block)*) => {$(
        $(#[$meta])*
        $vis fn $name$(<$T: $bound>)?($($arg: $type),*) $(-> $result)? {
            struct Task<A>(A);
            impl$(<$T: $bound>)? pulp::WithSimd for Task<($($type,)*)> {
                type Output = $crate::simd::result_type!($($result)?);

                #[inline(always)]
                fn with_simd<$S: pulp::Simd>(self, _: $S) -> Self::Output {
                    let Task(($($arg,)*)) = self;
                    $body
                }
            }
            pulp::Arch::new().dispatch(Task(($($arg,)*)))
        }
    )*};
}

/// Expands to the given result type, or to `()` without one.
macro_rules! result_type {
    () => {
        ()
    };
    ($type:ty) => {
        $type
    };
}

pub(crate) use {result_type, vectorized};

/// Name of the instruction set for which the loops of `vectorized!` are compiled here.
pub(crate) fn instruction_set() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        use pulp::x86::{V3, V4};
        if V4::try_new().is_some() {
            return "avx512";
        }
        if V3::try_new().is_some() {
            return "avx2";
        }
    }
    if cfg!(target_arch = "aarch64") { "neon" } else { "scalar" }
}

/// Number of partial sums of a reduction: enough to keep the adders of an AVX2 machine busy. The
/// number is fixed, so that the order of a sum does not depend on the machine.
pub(crate) const LANES: usize = 32;

/// Returns `a b + c`, fused if a fused multiply-add is one instruction and not a library call.
#[inline(always)]
pub(crate) fn mul_add<S: Simd>(a: f32, b: f32, c: f32) -> f32 {
    // NEON has a fused multiply-add, and pulp counts it as vectors; the remaining scalar targets
    // have no such instruction.
    if S::IS_SCALAR { a * b + c } else { a.mul_add(b, c) }
}

/// Requests that the cache line of an element be fetched from memory into the second-level cache,
/// if the processor has an instruction for it.
#[inline(always)]
pub(crate) fn prefetch(values: &[f32], at: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: the instruction belongs to the baseline, and has no observable effect for any
        // address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(values.as_ptr().wrapping_add(at).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (values, at);
}

/// Adds `x` to the first elements of `y`, inside of `vectorized!`.
#[inline(always)]
pub(crate) fn add_elements(y: &mut [f32], x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += x;
    }
}

vectorized! {
    /// Adds `x` to the first elements of `y`.
    pub(crate) fn add<S>(y: &mut [f32], x: &[f32]) {
        add_elements(y, x);
    }
}

/// Sum of `f(i)` over `0..count`, computed in [`LANES`] interleaved partial sums.
#[inline(always)]
pub(crate) fn sum_of(count: usize, f: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let whole = count - count % LANES;
    for start in (0..whole).step_by(LANES) {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += f(start + lane);
        }
    }
    for i in whole..count {
        lanes[i - whole] += f(i);
    }
    // Adds the upper half to the lower half repeatedly, which is how vector code reduces a
    // register.
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Returns the largest of one or more values, in lanes: a sequential maximum would not be
/// vectorized. NaNs do not count, except that if the first is NaN, the result may be any value or
/// NaN.
#[inline(always)]
pub(crate) fn largest(x: &[f32]) -> f32 {
    let mut lanes = [x[0]; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (m, x) in lanes.iter_mut().zip(chunk) {
            *m = if x > m { *x } else { *m };
        }
    }
    lanes.iter().chain(rest).fold(x[0], |m, x| m.max(*x))
}

/// `ln 2` in two parts: products of the first with integers up to 2^11 are exact.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;

/// `(n, e^r - 1)` with `x = n ln 2 + r` and `|r| <= ln(2)/2`, for `|x| < 2^20`. The Taylor series
/// to the 7th power leaves less than `0.347^8 / 8! = 5.2e-9`.
#[inline(always)]
fn reduced<S: Simd>(x: f32) -> (f32, f32) {
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let n = mul_add::<S>(x, std::f32::consts::LOG2_E, ROUND) - ROUND;
    let r = mul_add::<S>(n, -LN_2_LOW, mul_add::<S>(n, -LN_2_HIGH, x));
    let mut series = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5] {
        series = mul_add::<S>(series, r, coefficient);
    }
    (n, mul_add::<S>(series * r, r, r))
}

/// `2^n` for an integer `-126 <= n <= 127`.
#[inline(always)]
pub(crate) fn power_of_two(n: f32) -> f32 {
    // Adding 2^23 puts the exponent's bits into the mantissa's lowest; for NaN it is arbitrary.
    f32::from_bits(((n + (8_388_608.0 + 127.0)).to_bits()) << 23)
}

/// The exponential function, relative error below 2e-7. Arguments are clamped to -87.3 and 88,
/// where it is 1.2e-38 and 1.7e38: the result is never zero, denormal or infinite.
#[inline(always)]
pub fn exp<S: Simd>(x: f32) -> f32 {
    let (n, fraction) = reduced::<S>(x.clamp(-87.3, 88.0));
    let scale = power_of_two(n);
    mul_add::<S>(fraction, scale, scale)
}

/// `e^x - 1`, relative error below 3e-7 also near 0, for `-80 < x < 80`.
#[inline(always)]
fn exp_minus_1<S: Simd>(x: f32) -> f32 {
    let (n, fraction) = reduced::<S>(x);
    let scale = power_of_two(n);
    mul_add::<S>(fraction, scale, scale - 1.0)
}

/// The hyperbolic tangent, relative error below 5e-7: `m / (m + 2)` with `m = e^(2x) - 1`.
#[inline(always)]
pub fn tanh<S: Simd>(x: f32) -> f32 {
    // Beyond 10 it is 1 in f32.
    let m = exp_minus_1::<S>(2.0 * x.abs().clamp(0.0, 10.0));
    (m / (m + 2.0)).copysign(x)
}

/// Bits of the square root of 1/2.
const SQRT_HALF: u32 = 0x3F35_04F3;

/// The natural logarithm, relative error below 3e-7: `n ln 2 + 2 atanh((m - 1) / (m + 1))` with
/// `x = 2^n m` and `m` from `sqrt(1/2)` to `sqrt(2)`. Minus infinity at 0, NaN below.
#[inline(always)]
pub fn ln<S: Simd>(x: f32) -> f32 {
    let is_denormal = x < f32::MIN_POSITIVE;
    let bits = if is_denormal { x * 8_388_608.0 } else { x }.to_bits().wrapping_sub(SQRT_HALF);
    let n = ((bits as i32) >> 23) as f32 - if is_denormal { 23.0 } else { 0.0 };
    let m = f32::from_bits((bits & 0x007F_FFFF) + SQRT_HALF);
    let s = (m - 1.0) / (m + 1.0);
    let mut series = 1.0 / 9.0;
    for coefficient in [1.0 / 7.0, 0.2, 1.0 / 3.0] {
        series = mul_add::<S>(series, s * s, coefficient);
    }
    let of_m = 2.0 * mul_add::<S>(series * s * s, s, s);
    let y = mul_add::<S>(n, LN_2_HIGH, mul_add::<S>(n, LN_2_LOW, of_m));
    let below = if x == 0.0 { f32::NEG_INFINITY } else { f32::NAN };
    let positive = if x == f32::INFINITY { x } else { y };
    if x > 0.0 { positive } else { below }
}

/// The logistic function, relative error below 5e-7 also where it is nearly 0.
#[inline(always)]
pub fn sigmoid<S: Simd>(x: f32) -> f32 {
    let e = exp::<S>(-x.abs());
    let numerator = if x < 0.0 { e } else { 1.0 };
    numerator / (1.0 + e)
}

/// `-ln(1 - erf(a)) / a` on `0..=4`, fitted to `erf` by Lawson's algorithm (iteratively reweighted
/// least squares; Lawson 1961) with a maximum error of 5.2e-8 relative to `erf(a)`.
const ERF: [f32; 8] = [
    std::f32::consts::FRAC_2_SQRT_PI,
    0.636_616_47,
    0.102_814_41,
    -0.019_321_72,
    2.057_207e-4,
    1.251_743_6e-3,
    -3.809_997e-4,
    4.070_781e-5,
];

/// The error function, relative error below 5e-7: `1 - e^(-a q(a))` with a polynomial `q`.
#[inline(always)]
pub(crate) fn erf<S: Simd>(x: f32) -> f32 {
    // Beyond 4 it is 1 in f32.
    let a = x.abs().clamp(0.0, 4.0);
    let mut q = ERF[7];
    for coefficient in ERF[..7].iter().rev() {
        q = mul_add::<S>(q, a, *coefficient);
    }
    (-exp_minus_1::<S>(-a * q)).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    vectorized! {
        fn apply_exp<S>(x: &mut [f32]) {
            for x in x {
                *x = exp::<S>(*x);
            }
        }

        fn apply_tanh<S>(x: &mut [f32]) {
            for x in x {
                *x = tanh::<S>(*x);
            }
        }

        fn apply_sigmoid<S>(x: &mut [f32]) {
            for x in x {
                *x = sigmoid::<S>(*x);
            }
        }

        fn apply_erf<S>(x: &mut [f32]) {
            for x in x {
                *x = erf::<S>(*x);
            }
        }

        fn apply_ln<S>(x: &mut [f32]) {
            for x in x {
                *x = ln::<S>(*x);
            }
        }

        fn sum<S>(x: &[f32]) -> f32 { sum_of(x.len(), |i| x[i]) }
    }

    /// A function compiled for the best instruction set of the machine, and its scalar version.
    type Function = (Apply, fn(f32) -> f32);
    type Apply = fn(&mut [f32]);

    /// Returns arguments of both signs: a geometric series from 1e-30 to `limit`, and even steps.
    fn arguments(limit: f64) -> Vec<f32> {
        let powers = (0..20_000).map(|i| 1e-30 * (limit / 1e-30).powf(f64::from(i) / 19_999.0));
        let steps = (0..=20_000).map(|i| limit * f64::from(i) / 20_000.0);
        powers.chain(steps).flat_map(|x| [x as f32, -x as f32]).collect()
    }

    fn worst((vector, scalar): Function, exact: fn(f64) -> f64, limit: f64) -> f64 {
        let x = arguments(limit);
        let mut y = x.clone();
        vector(&mut y);
        let scalars = x.iter().map(|x| scalar(*x));
        let pairs = x.iter().zip(y).chain(x.iter().zip(scalars));
        pairs.fold(0.0, |worst, (x, y)| {
            let exact = exact(f64::from(*x));
            assert!(y.is_finite(), "{x} gives {y}");
            f64::max(worst, (f64::from(y) - exact).abs() / exact.abs().max(1e-37))
        })
    }

    #[test]
    fn functions_stay_within_their_error_bounds() {
        type Scalar = pulp::Scalar;
        let error = worst((apply_exp, exp::<Scalar>), f64::exp, 87.0);
        assert!(error < 2e-7, "exp {error:.2e}");
        let error = worst((apply_tanh, tanh::<Scalar>), f64::tanh, 50.0);
        assert!(error < 5e-7, "tanh {error:.2e}");
        let logistic = |x: f64| 1.0 / (1.0 + (-x).exp());
        let error = worst((apply_sigmoid, sigmoid::<Scalar>), logistic, 87.0);
        assert!(error < 5e-7, "sigmoid {error:.2e}");
        let error = worst((apply_erf, erf::<Scalar>), libm::erf, 50.0);
        assert!(error < 5e-7, "erf {error:.2e}");
    }

    #[test]
    fn logarithms_stay_within_their_error_bound() {
        let near_one = (1..4000).map(|i| 1.0 + i as f32 * 1e-5);
        let powers = (0..20_000).map(|i| (1e-44 * 10f64.powf(f64::from(i) / 243.0)) as f32);
        let x: Vec<f32> = near_one.chain(powers).filter(|x| *x < f32::MAX).collect();
        let mut y = x.clone();
        apply_ln(&mut y);
        let scalars = x.iter().map(|x| (*x, ln::<pulp::Scalar>(*x)));
        for (x, y) in x.iter().copied().zip(y).chain(scalars) {
            let exact = f64::from(x).ln();
            let error = (f64::from(y) - exact).abs() / exact.abs().max(1e-30);
            assert!(x == 1.0 || error < 3e-7, "{x}: {y} for {exact}");
        }
        let mut y = [0.0, -0.0, f32::INFINITY, 1.0, -1.0, f32::NEG_INFINITY, f32::NAN];
        apply_ln(&mut y);
        assert_eq!(y[..4], [f32::NEG_INFINITY, f32::NEG_INFINITY, f32::INFINITY, 0.0]);
        assert!(y[4..].iter().all(|y| y.is_nan()), "{y:?}");
    }

    #[test]
    fn extremes_saturate_and_nan_stays_nan() {
        let functions: [(Apply, [f32; 2]); 4] = [
            (apply_exp, [0.0, 1.6e38]),
            (apply_tanh, [-1.0, 1.0]),
            (apply_sigmoid, [0.0, 1.0]),
            (apply_erf, [-1.0, 1.0]),
        ];
        for (function, [low, high]) in functions {
            let mut y = [-1e4, -3e38, 1e4, 3e38, f32::NAN, 0.0];
            function(&mut y);
            assert!(y[..2].iter().all(|y| (low..low + 1e-30).contains(y) || *y == low), "{y:?}");
            assert!(y[2..4].iter().all(|y| y.is_finite() && *y >= high), "{y:?}");
            assert!(y[4].is_nan(), "{y:?}");
        }
    }

    #[test]
    fn sums_of_every_length_are_complete() {
        for count in 0..100 {
            let values: Vec<f32> = (1..=count).map(|i| i as f32).collect();
            assert_eq!(sum(&values), (count * (count + 1) / 2) as f32);
        }
    }
}
