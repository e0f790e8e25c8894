//! Formulas of functions that the formulas of elementwise functions call, and that neither WGSL nor
//! [`crate::simd`] has for all arguments. Each is written once for both.

use super::real::{
    Arithmetic, Real, abs, bounded, exp_of, f32, floor, if_finite, log_of, max, min, power_of_two,
    round, select, sqrt_of, unless_nan,
};

macro_rules! formulas {
    ($($(#[$doc:meta])* fn $name:ident($($x:ident),*) $body:block)*) => {
        $(
            $(#[$doc])*
            #[inline(always)]
            #[allow(clippy::needless_return, clippy::approx_constant, reason = "as WGSL needs it")]
            pub fn $name<A: Arithmetic>($($x: Real<A>),*) -> Real<A> $body
        )*

        /// Names of the formulas, and their WGSL.
        pub const TEXTS: &[(&str, &str)] = &[$((
            stringify!($name),
            concat!(
                "fn ", stringify!($name), "(", $(stringify!($x), ": f32, ",)* ") -> f32 ",
                stringify!($body), "\n"
            ),
        )),*];
    };
}

formulas! {
    /// Returns `ln(1 + x)`: near 0, `2 atanh(x / (2 + x))` by its Taylor series, which leaves less
    /// than `0.2^10 / 11` of it.
    fn log1p(x) {
        let s = x / (2.0 + x);
        let q = s * s;
        let series = 0.2 + q * (0.14285714285714285 + q * 0.1111111111111111);
        let near = 2.0 * s * (1.0 + q * (0.3333333333333333 + q * series));
        return select(log_of(1.0 + x), near, (x > -0.33) & (x < 0.5));
    }

    /// Returns `e^x - 1`: near 0 by its Taylor series, which leaves less than `0.5^8 / 9!` of it.
    fn expm1(x) {
        let far = 0.001388888888888889 + x * (0.0001984126984126984 + x * 0.0000248015873015873);
        let series = 0.16666666666666666
            + x * (0.041666666666666664 + x * (0.008333333333333333 + x * far));
        let near = x * (1.0 + x * (0.5 + x * series));
        return select(exp_of(x) - 1.0, near, abs(x) < 0.5);
    }

    /// Returns `x` in quarters of a turn, rounded.
    fn quarters(x) {
        return round(x * 0.6366197723675814);
    }

    /// Returns `x - n pi/2`, by parts of pi/2 (Cody and Waite 1980): the first has 8 bits and the
    /// second 11, so that their products with `n` below 2^13 are exact.
    fn rest_of_turn(x, n) {
        let first = x - n * 1.5703125;
        let second = first - n * 0.0004837512969970703;
        // Beyond 2^16 no digit of the rest is left; any small number serves.
        return bounded(second - n * 0.00000007549789948768648, f32(1.0));
    }

    /// Sine of `|r| <= pi/4` by its Taylor series, which leaves less than 2e-9.
    fn sine_near(r) {
        let q = r * r;
        let far = 0.008333333333333333
            + q * (-0.0001984126984126984 + q * 0.0000027557319223985893);
        return r + r * q * (-0.16666666666666666 + q * far);
    }

    /// Cosine of `|r| <= pi/4` by its Taylor series, which leaves less than 2e-10.
    fn cosine_near(r) {
        let q = r * r;
        let far = 0.0000248015873015873 - q * 0.0000002755731922398589;
        let series = 0.041666666666666664 + q * (-0.001388888888888889 + q * far);
        return 1.0 + q * (-0.5 + q * series);
    }

    /// Sine; NaN of an infinity.
    fn sine(x) {
        let n = quarters(x);
        let r = rest_of_turn(x, n);
        let quarter = n - 4.0 * floor(0.25 * n);
        let is_odd = (quarter == 1.0) | (quarter == 3.0);
        let size = select(sine_near(r), cosine_near(r), is_odd);
        return if_finite(x, select(size, -size, quarter >= 2.0));
    }

    /// Cosine; NaN of an infinity.
    fn cosine(x) {
        let n = quarters(x);
        let r = rest_of_turn(x, n);
        let quarter = n - 4.0 * floor(0.25 * n);
        let is_odd = (quarter == 1.0) | (quarter == 3.0);
        let size = select(cosine_near(r), sine_near(r), is_odd);
        return if_finite(x, select(size, -size, (quarter == 1.0) | (quarter == 2.0)));
    }

    /// Returns the arctangent of `|u| <= tan(pi/8)`, with the coefficients of the Cephes library
    /// (Moshier 1989), which leave less than 2e-7 of it.
    fn arctangent_near(u) {
        let q = u * u;
        let series = 0.199777106478 + q * (-0.138776856032 + q * 0.0805374449538);
        return u + u * q * (-0.333329491539 + q * series);
    }

    /// Arctangent of `0 <= t <= 1`.
    fn arctangent_below_one(t) {
        let far = 0.7853981633974483 + arctangent_near((t - 1.0) / (t + 1.0));
        return select(arctangent_near(t), far, t > 0.4142135623730951);
    }

    /// Arctangent.
    fn arctangent(x) {
        let size = abs(x);
        let inner = arctangent_below_one(min(size, 1.0 / size));
        let value = select(inner, 1.5707963267948966 - inner, size > 1.0);
        return unless_nan(x, select(value, -value, x < 0.0));
    }

    /// Returns the arcsine of `|u| <= 1/2`, with the coefficients of the Cephes library (Moshier
    /// 1989), which leave less than 3e-7 of it.
    fn arcsine_near(u) {
        let q = u * u;
        let far = 0.045470025998 + q * (0.024181311049 + q * 0.042163199048);
        return u + u * q * (0.16666752422 + q * (0.074953002686 + q * far));
    }

    /// Returns the arcsine of the root of `(1 - |x|) / 2`, half of the arccosine of `|x|`; NaN
    /// where `|x|` is more than 1.
    fn half_arccosine(x) {
        return arcsine_near(sqrt_of(0.5 * (1.0 - abs(x))));
    }

    /// Arcsine; NaN beyond -1 and 1.
    fn arcsine(x) {
        let size = abs(x);
        let far = 1.5707963267948966 - 2.0 * half_arccosine(x);
        let value = select(arcsine_near(size), far, size > 0.5);
        return unless_nan(x, select(value, -value, x < 0.0));
    }

    /// Arccosine; NaN beyond -1 and 1.
    fn arccosine(x) {
        let inner = 2.0 * half_arccosine(x);
        let far = select(inner, 3.141592653589793 - inner, x < 0.0);
        return unless_nan(x, select(1.5707963267948966 - arcsine_near(x), far, abs(x) > 0.5));
    }

    /// Returns 1 less the error function: a polynomial in `1 / (1 + |x| / 2)` in an exponent
    /// (Press et al. 1992, `erfcc`), with a relative error of about `4e-7 + 1e-7 x^2`, because
    /// `x^2` is rounded.
    fn erfc(far) {
        // Beyond 12 it is 0 or 2 in f32.
        let x = bounded(far, f32(12.0));
        let a = abs(x);
        let t = 1.0 / (1.0 + 0.5 * a);
        let high = -1.13520398 + t * (1.48851587 + t * (-0.82215223 + t * 0.17087277));
        let middle = 0.09678418 + t * (-0.18628806 + t * (0.27886807 + t * high));
        let series = -1.26551223 + t * (1.00002368 + t * (0.37409196 + t * middle));
        let size = t * exp_of(series - a * a);
        return unless_nan(far, select(size, 2.0 - size, x < 0.0));
    }

    /// Angle of the point `(x, y)`, from -pi to pi.
    fn angle(y, x) {
        let low = min(abs(x), abs(y));
        let high = max(abs(x), abs(y));
        let share = select(select(low / high, f32(1.0), low == high), f32(0.0), high == 0.0);
        let inner = arctangent_below_one(share);
        let upright = select(inner, 1.5707963267948966 - inner, abs(y) > abs(x));
        let turned = select(upright, 3.141592653589793 - upright, x < 0.0);
        return select(turned, -turned, y < 0.0);
    }

    /// Returns `x 2^n` for a whole number `n` from -252 to 254; beyond 0 or infinity.
    fn scaled(x, n) {
        let half = round(0.5 * n);
        return x * power_of_two(half) * power_of_two(n - half);
    }

    /// Returns `a^b` of a number that is not negative, with a relative error of about
    /// `5e-7 + 2e-7 |b ln m|`, where `|ln m|` is at most 0.35. With `a = 2^n m` and `m` near 1,
    /// `b n` turns of the exponent are split from `b ln m` before anything is rounded.
    fn power_of_positive(a, b) {
        let logarithm = log_of(a);
        let n = bounded(round(logarithm * 1.4426950408889634), f32(200.0));
        let m = scaled(a, -n);
        let s = (m - 1.0) / (m + 1.0);
        let q = s * s;
        let series = 0.3333333333333333
            + q * (0.2 + q * (0.14285714285714285 + q * 0.1111111111111111));
        let rest = b * (2.0 * (s + s * q * series));
        // Few enough bits that the product with `n` is exact.
        let high = round(64.0 * b) / 64.0;
        let turns = high * n;
        let k = round(turns + rest * 1.4426950408889634);
        let r = ((turns - k) + (b - high) * n) * 0.6931471805599453 + rest;
        let near = scaled(exp_of(r), bounded(k, f32(300.0)));
        let is_end = (a == 0.0) | (a > 3.0e38) | (abs(b) > 1.0e5);
        return select(near, exp_of(b * logarithm), is_end);
    }

    /// Returns `a^b`; NaN of a negative number unless `b` is a whole one.
    fn power(a, b) {
        let size = power_of_positive(abs(a), b);
        let is_whole = floor(b) == b;
        let is_odd = is_whole & (2.0 * floor(0.5 * b) != b);
        let signed = select(size, -size, is_odd & (a < 0.0));
        // The root of a negative number is NaN.
        let defined = select(signed, sqrt_of(a), (a < 0.0) & !is_whole);
        return unless_nan(a, unless_nan(b, select(defined, f32(1.0), b == 0.0)));
    }
}
