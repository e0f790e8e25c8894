//! Elementwise functions: [`unary_functions!`](crate::unary_functions) and
//! [`binary_functions!`](crate::binary_functions) are the tables of all functions of one and of two
//! tensors. A row is all that a function needs: the enums of this module, the reference, the
//! kernels of the CPU device, the shaders, fusion, probes and tests are made from it.
//!
//! A formula is written once, in the expressions that Rust and WGSL have in common, and `return`s
//! its value. In Rust its functions come from `kernels::ops::elements::real`, in WGSL they are the
//! built-in ones and the ones of `shaders/lib/elementwise.wgsl`; those of
//! `kernels::ops::elements::formulas` (`log1p`, `expm1`, `erfc`, ..) are written once for both. A
//! test compiles a formula for both. `exp_of`, `log_of`, `sqrt_of` and `tanh_of` are right for any
//! argument; the built-in `exp`, `log`, `sqrt` and `tanh` only where the formula bounds it. Its
//! conditions are joined by `&` and `|`, since `&&` and `||` are branches in a shader: SwiftShader
//! compiles a loop with some of them for minutes. Numbers beside a value are literals; alone they
//! are `f32(1.0)`. A formula has NaN where an argument is one, which `unless_nan` sees to where
//! comparisons or a driver might lose it.

use std::fmt;

/// Shape of a function by one of its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slope {
    /// It has a gradient.
    Sloped,
    /// It is constant but for steps: nothing flows back.
    Flat,
}

/// Side of a function of two tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BinarySide {
    First,
    Second,
}

/// Arguments for which a function is tested. Its kernels are certified on the same ones, but for
/// `All` on standard normal ones, as those of other ops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Domain {
    /// All numbers: normal ones times 3.
    All,
    /// The same, for a function with large results: it is not fused, because its results for
    /// arguments that suit other functions do not test a kernel.
    Steep,
    /// Positive numbers: 0.05 to 4.
    Positive,
    /// Between -1 and 1: to 0.95.
    Unit,
    /// Numbers above 1: 1.05 to 4.
    AboveOne,
    /// Numbers at some distance from 0, where the function has a pole: 0.25 to 4.
    Apart,
}

/// The functions of one tensor: documentation, variant, its constants and their values in tests,
/// name in printed graphs, [`Domain`], [`Slope`], and the formulas of the value and of the
/// gradient, `dy` times the slope.
#[macro_export]
macro_rules! unary_functions {
    ($then:ident) => {
        $then! {
            /// `max(x, 0)`, and NaN for NaN. The gradient of an inactive one is 0, whatever `dy`
            /// is.
            Relu "relu" All Sloped
                value(x) { return unless_nan(x, select(x, f32(0.0), x <= 0.0)); }
                gradient(x, dy) { return unless_nan(x, select(dy, f32(0.0), x <= 0.0)); }

            /// `x * Phi(x)`, with the error function (Hendrycks and Gimpel 2016).
            Gelu "gelu" All Sloped
                value(x) { return 0.5 * x * (1.0 + erf(x * 0.7071067811865476)); }
                gradient(far, dy) {
                    // Beyond 20 the density is 0 in f32, and 0 times infinity would be NaN.
                    let x = bounded(far, f32(20.0));
                    let distribution = 0.5 * (1.0 + erf(x * 0.7071067811865476));
                    return dy * mul_add(x * 0.3989422804014327, exp(-0.5 * x * x), distribution);
                }

            /// GELU with `Phi` approximated by a tanh, as in GPT-2.
            GeluTanh "gelutanh" All Sloped
                value(x) {
                    // sqrt(2/pi) (x + 0.044715 x^3); beyond 20 the tanh is 1, and some
                    // drivers overflow in its exponentials.
                    let u = x * mul_add(x * x, f32(0.035677408136300125), f32(0.7978845608028654));
                    return 0.5 * x * (1.0 + tanh(bounded(u, f32(20.0))));
                }
                gradient(far, dy) {
                    // Beyond 20 the tanh is 1; the slope of its argument would overflow.
                    let x = bounded(far, f32(20.0));
                    let u = x * mul_add(x * x, f32(0.035677408136300125), f32(0.7978845608028654));
                    let th = tanh(bounded(u, f32(20.0)));
                    let slope = mul_add(x * x, f32(0.10703222440890037), f32(0.7978845608028654));
                    return dy * mul_add(0.5 * x * (1.0 - th * th), slope, 0.5 * (1.0 + th));
                }

            /// `1 / (1 + exp(-x))`
            Sigmoid "sigmoid" All Sloped
                value(x) { return sigmoid_of(x); }
                gradient(x, dy) { return dy * sigmoid_slope(x); }

            /// The hyperbolic tangent.
            Tanh "tanh" All Sloped
                value(x) { return tanh_of(x); }
                gradient(x, dy) { return dy * (4.0 * sigmoid_slope(2.0 * x)); }

            /// `x / (1 + exp(-x))` (Elfwing, Uchibe, Doya 2017; also Swish).
            Silu "silu" All Sloped
                value(x) { return x * sigmoid_of(x); }
                gradient(far, dy) {
                    // Beyond 80 the slope of the sigmoid is less than 1e-34.
                    let x = bounded(far, f32(80.0));
                    return dy * mul_add(x, sigmoid_slope(x), sigmoid_of(x));
                }

            /// `e^x`
            Exp "exp" Steep Sloped
                value(x) { return exp_of(x); }
                gradient(x, dy) { return dy * exp_of(x); }

            /// The natural logarithm; NaN below 0.
            Log "log" Positive Sloped
                value(x) { return log_of(x); }
                gradient(x, dy) { return dy / x; }

            /// The square root; NaN below 0.
            Sqrt "sqrt" Positive Sloped
                value(x) { return sqrt_of(x); }
                gradient(x, dy) { return dy * (0.5 / sqrt_of(x)); }

            /// `factor * x`
            Scale(factor = -1.5) "scale" All Sloped
                value(x) { return factor * x; }
                gradient(x, dy) { return factor * dy; }

            /// `x + offset`
            Offset(offset = 0.75) "offset" All Sloped
                value(x) { return x + offset; }
                gradient(x, dy) { return dy; }

            /// `x`, towards which no gradient flows.
            Detach "detach" All Flat
                value(x) { return x; }
                gradient(x, dy) { return f32(0.0); }

            /// The magnitude; its gradient at 0 is 0.
            Abs "abs" All Sloped
                value(x) { return abs(x); }
                gradient(x, dy) { return dy * sign_of(x); }

            /// -1, 0 or 1, whose gradient is 0.
            Sign "sign" All Flat
                value(x) { return sign_of(x); }
                gradient(x, dy) { return f32(0.0); }

            /// `1 / x`
            Reciprocal "reciprocal" Apart Sloped
                value(x) { return 1.0 / x; }
                gradient(x, dy) { return -(dy / (x * x)); }

            /// `1 / sqrt(x)`
            Rsqrt "rsqrt" Positive Sloped
                value(x) { return 1.0 / sqrt_of(x); }
                gradient(x, dy) { return dy * (-0.5 / (x * sqrt_of(x))); }

            /// `x * x`
            Square "square" All Sloped
                value(x) { return x * x; }
                gradient(x, dy) { return dy * (2.0 * x); }

            /// `ln(1 + x)`, exact near 0; NaN below -1.
            Log1p "log1p" Positive Sloped
                value(x) { return log1p(x); }
                gradient(x, dy) { return dy / (1.0 + x); }

            /// `e^x - 1`, exact near 0.
            Expm1 "expm1" Steep Sloped
                value(x) { return expm1(x); }
                gradient(x, dy) { return dy * exp_of(x); }

            /// The error function.
            Erf "erf" All Sloped
                value(x) { return unless_nan(x, erf(bounded(x, f32(10.0)))); }
                gradient(far, dy) {
                    let x = bounded(far, f32(10.0));
                    return dy * unless_nan(x, 1.1283791670955126 * exp(-1.0 * x * x));
                }

            /// 1 less the error function, exact where that is near 1.
            Erfc "erfc" All Sloped
                value(x) { return erfc(x); }
                gradient(far, dy) {
                    let x = bounded(far, f32(10.0));
                    return dy * unless_nan(x, -1.1283791670955126 * exp(-1.0 * x * x));
                }

            /// The sine within 1e-6 for `|x| < 80,000`; beyond, where floats are a hundredth
            /// apart, a number from -1 to 1. NaN of an infinity.
            Sin "sin" All Sloped
                value(x) { return sine(x); }
                gradient(x, dy) { return dy * cosine(x); }

            /// The cosine, as the sine.
            Cos "cos" All Sloped
                value(x) { return cosine(x); }
                gradient(x, dy) { return dy * -sine(x); }

            /// `ln(1 + e^x)` (Dugas et al. 2000).
            Softplus "softplus" All Sloped
                value(x) { return unless_nan(x, max(x, f32(0.0)) + log1p(decay(x))); }
                gradient(x, dy) { return dy * sigmoid_of(x); }

            /// `x / (1 + |x|)`
            Softsign "softsign" All Sloped
                value(x) { return x / (1.0 + abs(x)); }
                gradient(x, dy) {
                    let root = 1.0 / (1.0 + abs(x));
                    return dy * (root * root);
                }

            /// `x` above 0, and `alpha (e^x - 1)` below (Clevert et al. 2015).
            Elu(alpha = 0.8) "elu" All Sloped
                value(x) {
                    return unless_nan(x, select(alpha * expm1(min(x, f32(0.0))), x, x > 0.0));
                }
                gradient(x, dy) {
                    let slope = alpha * exp_of(min(x, f32(0.0)));
                    return dy * unless_nan(x, select(slope, f32(1.0), x > 0.0));
                }

            /// `x` above 0, and `slope * x` below (Maas et al. 2013).
            LeakyRelu(slope = 0.05) "leaky_relu" All Sloped
                value(x) { return unless_nan(x, x * select(slope, f32(1.0), x > 0.0)); }
                gradient(x, dy) {
                    return unless_nan(x, dy * select(slope, f32(1.0), x > 0.0));
                }

            /// `x tanh(softplus(x))` (Misra 2019).
            Mish "mish" All Sloped
                value(far) {
                    let x = max(far, f32(-100.0));
                    let softplus = max(x, f32(0.0)) + log1p(decay(x));
                    return unless_nan(far, x * tanh_of(softplus));
                }
                gradient(far, dy) {
                    let x = bounded(far, f32(80.0));
                    let th = tanh_of(max(x, f32(0.0)) + log1p(decay(x)));
                    return dy * unless_nan(x, th + x * (1.0 - th * th) * sigmoid_of(x));
                }

            /// `x min(max(x + 3, 0), 6) / 6` (Howard et al. 2019).
            HardSwish "hard_swish" All Sloped
                value(x) {
                    let share = min(max(x / 6.0 + 0.5, f32(0.0)), f32(1.0));
                    return unless_nan(x, select(x * share, f32(0.0), x <= -3.0));
                }
                gradient(x, dy) {
                    let slope = select(x / 3.0 + 0.5, f32(1.0), x >= 3.0);
                    return unless_nan(x, dy * select(slope, f32(0.0), x <= -3.0));
                }

            /// `min(max(x + 3, 0), 6) / 6`
            HardSigmoid "hard_sigmoid" All Sloped
                value(x) { return unless_nan(x, min(max(x / 6.0 + 0.5, f32(0.0)), f32(1.0))); }
                gradient(x, dy) {
                    let is_inside = (x > -3.0) & (x < 3.0);
                    return unless_nan(x, select(f32(0.0), dy / 6.0, is_inside));
                }

            /// The nearer of `low` and `high` where `x` is not between them; the gradient is 0
            /// beyond.
            Clamp(low = -1.25, high = 2.5) "clamp" All Sloped
                value(x) { return unless_nan(x, min(max(x, low), high)); }
                gradient(x, dy) {
                    return unless_nan(x, select(f32(0.0), dy, (x >= low) & (x <= high)));
                }

            /// The larger of `x` and `low`; the gradient is 0 below.
            AtLeast(low = -1.25) "at_least" All Sloped
                value(x) { return unless_nan(x, max(x, low)); }
                gradient(x, dy) { return unless_nan(x, select(f32(0.0), dy, x >= low)); }

            /// The smaller of `x` and `high`; the gradient is 0 above.
            AtMost(high = 2.5) "at_most" All Sloped
                value(x) { return unless_nan(x, min(x, high)); }
                gradient(x, dy) { return unless_nan(x, select(f32(0.0), dy, x <= high)); }

            /// `x^exponent`, NaN below 0 unless the exponent is a whole number; the gradient is 0
            /// with the exponent 0.
            Power(exponent = 2.3) "power" Positive Sloped
                value(x) { return power(x, exponent); }
                gradient(x, dy) {
                    let slope = exponent * power(x, exponent - 1.0);
                    return dy * select(slope, 0.0 * x, exponent == 0.0);
                }

            /// The largest whole number that is not above, whose gradient is 0.
            Floor "floor" All Flat
                value(x) { return unless_nan(x, floor(x)); }
                gradient(x, dy) { return f32(0.0); }

            /// The smallest whole number that is not below, whose gradient is 0.
            Ceil "ceil" All Flat
                value(x) { return unless_nan(x, ceil(x)); }
                gradient(x, dy) { return f32(0.0); }

            /// The nearest whole number, of two the even one, whose gradient is 0.
            Round "round" All Flat
                value(x) { return unless_nan(x, round(x)); }
                gradient(x, dy) { return f32(0.0); }

            /// The whole part, whose gradient is 0.
            Trunc "trunc" All Flat
                value(x) { return unless_nan(x, trunc(x)); }
                gradient(x, dy) { return f32(0.0); }

            /// The inverse of the sine, from -pi/2 to pi/2; NaN beyond -1 and 1.
            Asin "asin" Unit Sloped
                value(x) { return arcsine(x); }
                gradient(x, dy) { return dy / sqrt_of((1.0 - x) * (1.0 + x)); }

            /// The inverse of the cosine, from 0 to pi; NaN beyond -1 and 1.
            Acos "acos" Unit Sloped
                value(x) { return arccosine(x); }
                gradient(x, dy) { return -(dy / sqrt_of((1.0 - x) * (1.0 + x))); }

            /// The inverse of the tangent.
            Atan "atan" All Sloped
                value(x) { return arctangent(x); }
                gradient(x, dy) { return dy / (1.0 + x * x); }

            /// The hyperbolic sine.
            Sinh "sinh" Steep Sloped
                value(x) {
                    let m = expm1(abs(x));
                    let size = select(0.5 * (m + m / (m + 1.0)), 0.5 * m, m > 1.0e30);
                    return unless_nan(x, select(size, -size, x < 0.0));
                }
                gradient(x, dy) { return dy * (0.5 * exp_of(x) + 0.5 * exp_of(-x)); }

            /// The hyperbolic cosine.
            Cosh "cosh" Steep Sloped
                value(x) { return 0.5 * exp_of(x) + 0.5 * exp_of(-x); }
                gradient(x, dy) {
                    let m = expm1(abs(x));
                    let size = select(0.5 * (m + m / (m + 1.0)), 0.5 * m, m > 1.0e30);
                    return dy * unless_nan(x, select(size, -size, x < 0.0));
                }

            /// The inverse of the hyperbolic sine: `ln(x + sqrt(x^2 + 1))`, exact near 0.
            Asinh "asinh" All Sloped
                value(x) {
                    let a = abs(x);
                    // Beyond 1e6 the root is the argument, whose square would overflow.
                    let is_far = a > 1.0e6;
                    let near = a + a * a / (1.0 + sqrt_of(a * a + 1.0));
                    let inner = log1p(select(near, a, is_far));
                    let size = select(inner, inner + 0.6931471805599453, is_far);
                    return unless_nan(x, select(size, -size, x < 0.0));
                }
                gradient(x, dy) { return dy / sqrt_of(x * x + 1.0); }

            /// The inverse of the hyperbolic cosine: `ln(x + sqrt(x^2 - 1))`, exact near 1; NaN
            /// below 1.
            Acosh "acosh" AboveOne Sloped
                value(x) {
                    let more = x - 1.0;
                    // Below 1 the root is NaN.
                    let root = sqrt_of(select(more * (more + 2.0), more, more < 0.0));
                    let is_far = x > 1.0e6;
                    let inner = log1p(select(more + root, x, is_far));
                    return unless_nan(x, select(inner, inner + 0.6931471805599453, is_far));
                }
                gradient(x, dy) { return dy / sqrt_of((x - 1.0) * (x + 1.0)); }

            /// The inverse of the hyperbolic tangent: half of `ln((1 + x) / (1 - x))`.
            Atanh "atanh" Unit Sloped
                value(x) {
                    let size = 0.5 * log1p(2.0 * abs(x) / (1.0 - abs(x)));
                    return unless_nan(x, select(size, -size, x < 0.0));
                }
                gradient(x, dy) { return dy / (1.0 - x * x); }
        }
    };
}

/// The functions of two tensors: documentation, variant, name, [`Domain`] of the first argument,
/// [`Slope`] by each, and the formulas of the value and of the gradients. A comparison is 1 or 0.
#[macro_export]
macro_rules! binary_functions {
    ($then:ident) => { $then! {
        Add "add" All Sloped Sloped
            value(a, b) { return a + b; }
            by_first(a, b, dy) { return dy; }
            by_second(a, b, dy) { return dy; }

        Sub "sub" All Sloped Sloped
            value(a, b) { return a - b; }
            by_first(a, b, dy) { return dy; }
            by_second(a, b, dy) { return -dy; }

        Mul "mul" All Sloped Sloped
            value(a, b) { return a * b; }
            by_first(a, b, dy) { return dy * b; }
            by_second(a, b, dy) { return dy * a; }

        Div "div" All Sloped Sloped
            value(a, b) { return a / b; }
            by_first(a, b, dy) { return dy / b; }
            by_second(a, b, dy) { return -(dy * (a / b) / b); }

        /// The larger of the two, and NaN if one is. Where they are equal, each has half of the
        /// gradient, as in PyTorch.
        Maximum "maximum" All Sloped Sloped
            value(a, b) { return unless_nan(a, unless_nan(b, max(a, b))); }
            by_first(a, b, dy) {
                let passed = select(select(f32(0.0), 0.5 * dy, a == b), dy, a > b);
                return unless_nan(a, unless_nan(b, passed));
            }
            by_second(a, b, dy) {
                let passed = select(select(f32(0.0), 0.5 * dy, a == b), dy, a < b);
                return unless_nan(a, unless_nan(b, passed));
            }

        /// The smaller of the two, as the maximum.
        Minimum "minimum" All Sloped Sloped
            value(a, b) { return unless_nan(a, unless_nan(b, min(a, b))); }
            by_first(a, b, dy) {
                let passed = select(select(f32(0.0), 0.5 * dy, a == b), dy, a < b);
                return unless_nan(a, unless_nan(b, passed));
            }
            by_second(a, b, dy) {
                let passed = select(select(f32(0.0), 0.5 * dy, a == b), dy, a > b);
                return unless_nan(a, unless_nan(b, passed));
            }

        /// `a^b`; NaN of a negative number unless `b` is a whole one.
        Pow "pow" Positive Sloped Sloped
            value(a, b) { return power(a, b); }
            by_first(a, b, dy) {
                return dy * select(b * power(a, b - 1.0), 0.0 * a, b == 0.0);
            }
            by_second(a, b, dy) {
                let slope = power(a, b) * log_of(a);
                return dy * select(slope, 0.0 * b, (a == 0.0) & (b >= 0.0));
            }

        /// The angle of the point `(b, a)`, from -pi to pi.
        Atan2 "atan2" All Sloped Sloped
            value(a, b) { return unless_nan(a, unless_nan(b, angle(a, b))); }
            by_first(a, b, dy) { return dy * (b / (a * a + b * b)); }
            by_second(a, b, dy) { return -(dy * (a / (a * a + b * b))); }

        /// 1 where the two are equal.
        Equal "equal" All Flat Flat
            value(a, b) { return unless_nan(a, unless_nan(b, select(f32(0.0), f32(1.0), a == b))); }
            by_first(a, b, dy) { return f32(0.0); }
            by_second(a, b, dy) { return f32(0.0); }

        /// 1 where the first is smaller.
        Less "less" All Flat Flat
            value(a, b) { return unless_nan(a, unless_nan(b, select(f32(0.0), f32(1.0), a < b))); }
            by_first(a, b, dy) { return f32(0.0); }
            by_second(a, b, dy) { return f32(0.0); }

        /// 1 where the first is smaller, or the two are equal.
        LessEqual "less_equal" All Flat Flat
            value(a, b) { return unless_nan(a, unless_nan(b, select(f32(0.0), f32(1.0), a <= b))); }
            by_first(a, b, dy) { return f32(0.0); }
            by_second(a, b, dy) { return f32(0.0); }

        /// `a` where `b` is not 0, and 0 elsewhere, whatever `a` is there: a side of a selection.
        Keep "keep" All Sloped Flat
            value(a, b) { return unless_nan(b, select(a, f32(0.0), b == 0.0)); }
            by_first(a, b, dy) { return unless_nan(b, select(dy, f32(0.0), b == 0.0)); }
            by_second(a, b, dy) { return f32(0.0); }

        /// `a` where `b` is 0, and 0 elsewhere: the other side.
        Drop "drop" All Sloped Flat
            value(a, b) { return unless_nan(b, select(f32(0.0), a, b == 0.0)); }
            by_first(a, b, dy) { return unless_nan(b, select(f32(0.0), dy, b == 0.0)); }
            by_second(a, b, dy) { return f32(0.0); }
    } };
}

/// Expands to `f32`, the type of a constant.
macro_rules! constant {
    ($name:ident) => {
        f32
    };
}

macro_rules! declare_unary {
    ($($(#[$doc:meta])* $variant:ident $(($($constant:ident = $sample:expr),*))?
        $name:literal $domain:ident $slope:ident
        value $value:tt $_value:block gradient $gradient:tt $_gradient:block)*) => {
        /// Elementwise functions of one tensor.
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub enum Unary {
            $($(#[$doc])* $variant $(($(constant!($constant)),*))?,)*
        }

        impl Unary {
            /// All functions, with constants for tests.
            pub const SAMPLES: &[Unary] = &[$(Unary::$variant $(($($sample),*))?),*];

            /// Returns the name in printed graphs and in the text of kernels.
            pub fn name(self) -> &'static str {
                match self {
                    $(Unary::$variant { .. } => $name,)*
                }
            }

            /// Returns the constants in the order of the formula's.
            pub fn constants(self) -> Vec<f32> {
                match self {
                    $(Unary::$variant $(($($constant),*))? => vec![$($($constant),*)?],)*
                }
            }

            /// Returns the arguments for which the function is tested.
            pub fn domain(self) -> Domain {
                match self {
                    $(Unary::$variant { .. } => Domain::$domain,)*
                }
            }

            /// Returns the shape of the function.
            pub fn slope(self) -> Slope {
                match self {
                    $(Unary::$variant { .. } => Slope::$slope,)*
                }
            }
        }
    };
}

unary_functions!(declare_unary);

impl Unary {
    /// Writes the name, a suffix of it, and the constants.
    pub(super) fn write(self, f: &mut fmt::Formatter<'_>, behind: &str) -> fmt::Result {
        write!(f, "{}{behind}", self.name())?;
        for constant in self.constants() {
            write!(f, " {constant}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Unary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, "")
    }
}

macro_rules! declare_binary {
    ($($(#[$doc:meta])* $variant:ident $name:literal $domain:ident $first:ident $second:ident
        value $value:tt $_value:block
        by_first $by_first:tt $_by_first:block
        by_second $by_second:tt $_by_second:block)*) => {
        /// Elementwise functions of two tensors; the second may be a suffix of the first's shape.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Binary {
            $($(#[$doc])* $variant,)*
        }

        impl Binary {
            /// All functions.
            pub const ALL: &[Binary] = &[$(Binary::$variant),*];

            /// Returns the name in printed graphs and in the text of kernels.
            pub fn name(self) -> &'static str {
                match self {
                    $(Binary::$variant => $name,)*
                }
            }

            /// Returns the first arguments for which the function is tested.
            pub fn domain(self) -> Domain {
                match self {
                    $(Binary::$variant => Domain::$domain,)*
                }
            }

            /// Returns the shape of the function by one of its arguments.
            pub fn slope(self, by: BinarySide) -> Slope {
                match (self, by) {
                    $((Binary::$variant, BinarySide::First) => Slope::$first,
                    (Binary::$variant, BinarySide::Second) => Slope::$second,)*
                }
            }
        }
    };
}

binary_functions!(declare_binary);

impl Binary {
    /// Returns true if `f(a, b)` is `f(b, a)`.
    pub fn commutes(self) -> bool {
        matches!(
            self,
            Binary::Add | Binary::Mul | Binary::Maximum | Binary::Minimum | Binary::Equal
        )
    }
}
