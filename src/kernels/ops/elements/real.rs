//! Numbers of the formulas of elementwise functions, and the functions that formulas call: for the
//! references by the standard library in f32 or f64, for the CPU kernels by f32 functions that
//! vectorize. Names and order of arguments are the same as of WGSL's built-in functions and of the
//! functions of `shaders/lib/elementwise.wgsl`.

use std::cmp::Ordering;
use std::marker::PhantomData;
use std::ops::{Add, Div, Mul, Neg, Sub};

use num_traits::Float as _;
use pulp::Simd;

use super::formulas;
use crate::{Float, simd};

/// Implementation of the functions for which processors have no instruction.
pub trait Arithmetic: Copy {
    type Number: Float;

    fn mul_add(a: Self::Number, b: Self::Number, c: Self::Number) -> Self::Number;
    /// Rounds to the nearest whole number, ties to even.
    fn round(x: Self::Number) -> Self::Number;
    /// The exponential function of arguments for which it neither overflows nor underflows.
    fn exp(x: Self::Number) -> Self::Number;
    /// The exponential function, infinite where it overflows.
    fn whole_exp(x: Self::Number) -> Self::Number;
    /// `e^-x` of a positive number, 0 where it underflows.
    fn decay(x: Self::Number) -> Self::Number;
    fn log(x: Self::Number) -> Self::Number;
    /// `2^n` for a whole number.
    fn power_of_two(n: Self::Number) -> Self::Number;
    fn tanh(x: Self::Number) -> Self::Number;
    fn erf(x: Self::Number) -> Self::Number;

    #[inline(always)]
    fn log1p(x: Real<Self>) -> Real<Self> {
        formulas::log1p(x)
    }

    #[inline(always)]
    fn expm1(x: Real<Self>) -> Real<Self> {
        formulas::expm1(x)
    }

    #[inline(always)]
    fn sine(x: Real<Self>) -> Real<Self> {
        formulas::sine(x)
    }

    #[inline(always)]
    fn cosine(x: Real<Self>) -> Real<Self> {
        formulas::cosine(x)
    }

    #[inline(always)]
    fn arctangent(x: Real<Self>) -> Real<Self> {
        formulas::arctangent(x)
    }

    #[inline(always)]
    fn arcsine(x: Real<Self>) -> Real<Self> {
        formulas::arcsine(x)
    }

    #[inline(always)]
    fn arccosine(x: Real<Self>) -> Real<Self> {
        formulas::arccosine(x)
    }

    #[inline(always)]
    fn erfc(x: Real<Self>) -> Real<Self> {
        formulas::erfc(x)
    }

    #[inline(always)]
    fn angle(y: Real<Self>, x: Real<Self>) -> Real<Self> {
        formulas::angle(y, x)
    }

    #[inline(always)]
    fn power(a: Real<Self>, b: Real<Self>) -> Real<Self> {
        formulas::power(a, b)
    }
}

/// Exact functions, for the references.
#[derive(Clone, Copy)]
pub struct Exact<T>(PhantomData<T>);

impl<T: Float> Arithmetic for Exact<T> {
    type Number = T;

    fn mul_add(a: T, b: T, c: T) -> T {
        a * b + c
    }

    fn round(x: T) -> T {
        let nearest = x.round();
        let half = T::from_f64(0.5);
        if (nearest - x).abs() == half { (x * half).round() / half } else { nearest }
    }

    fn exp(x: T) -> T {
        x.exp()
    }

    fn whole_exp(x: T) -> T {
        x.exp()
    }

    fn decay(x: T) -> T {
        (-x).exp()
    }

    fn log(x: T) -> T {
        x.ln()
    }

    fn power_of_two(n: T) -> T {
        n.exp2()
    }

    fn tanh(x: T) -> T {
        x.tanh()
    }

    fn erf(x: T) -> T {
        Float::erf(x)
    }

    fn log1p(x: Real<Self>) -> Real<Self> {
        Real(x.0.ln_1p())
    }

    fn expm1(x: Real<Self>) -> Real<Self> {
        Real(x.0.exp_m1())
    }

    fn sine(x: Real<Self>) -> Real<Self> {
        Real(x.0.sin())
    }

    fn cosine(x: Real<Self>) -> Real<Self> {
        Real(x.0.cos())
    }

    fn arctangent(x: Real<Self>) -> Real<Self> {
        Real(x.0.atan())
    }

    fn arcsine(x: Real<Self>) -> Real<Self> {
        Real(x.0.asin())
    }

    fn arccosine(x: Real<Self>) -> Real<Self> {
        Real(x.0.acos())
    }

    fn erfc(x: Real<Self>) -> Real<Self> {
        Real(Float::erfc(x.0))
    }

    fn angle(y: Real<Self>, x: Real<Self>) -> Real<Self> {
        Real(y.0.atan2(x.0))
    }

    fn power(a: Real<Self>, b: Real<Self>) -> Real<Self> {
        // `powf` makes 1 of NaN^0 and of 1^NaN, and 0 or infinity of an infinity below 0.
        let is_defined = a.0 >= T::zero() || b.0.floor() == b.0;
        let value = if is_defined { a.0.powf(b.0) } else { T::nan() };
        unless_nan(a, unless_nan(b, Real(value)))
    }
}

/// Functions in f32 that vectorize, compiled for an instruction set.
#[derive(Clone, Copy)]
pub struct Fast<S>(PhantomData<S>);

impl<S: Simd> Arithmetic for Fast<S> {
    type Number = f32;

    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        simd::mul_add::<S>(a, b, c)
    }

    #[inline(always)]
    fn round(x: f32) -> f32 {
        x.round_ties_even()
    }

    #[inline(always)]
    fn exp(x: f32) -> f32 {
        simd::exp::<S>(x)
    }

    #[inline(always)]
    fn whole_exp(x: f32) -> f32 {
        // The factors do not overflow where the product does, so that they need no limits.
        let root = simd::exp::<S>(0.5 * x);
        root * root
    }

    #[inline(always)]
    fn decay(x: f32) -> f32 {
        // Beyond 87, the limited `exp` would not vanish in a product with a large argument.
        if x > 87.0 { 0.0 } else { simd::exp::<S>(-x) }
    }

    #[inline(always)]
    fn log(x: f32) -> f32 {
        simd::ln::<S>(x)
    }

    #[inline(always)]
    fn power_of_two(n: f32) -> f32 {
        simd::power_of_two(n.clamp(-126.0, 127.0))
    }

    #[inline(always)]
    fn tanh(x: f32) -> f32 {
        simd::tanh::<S>(x)
    }

    #[inline(always)]
    fn erf(x: f32) -> f32 {
        simd::erf::<S>(x)
    }
}

/// Number in a formula.
#[derive(Clone, Copy)]
pub struct Real<A: Arithmetic>(pub A::Number);

/// Returns the value of a number, as WGSL's conversion does.
#[inline(always)]
pub fn f32<A: Arithmetic>(number: f64) -> Real<A> {
    Real(A::Number::from_f64(number))
}

macro_rules! operators {
    ($($operator:ident $method:ident),*) => {$(
        impl<A: Arithmetic> $operator for Real<A> {
            type Output = Self;

            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                Real(self.0.$method(other.0))
            }
        }

        impl<A: Arithmetic> $operator<f64> for Real<A> {
            type Output = Self;

            #[inline(always)]
            fn $method(self, other: f64) -> Self {
                self.$method(f32::<A>(other))
            }
        }

        impl<A: Arithmetic> $operator<Real<A>> for f64 {
            type Output = Real<A>;

            #[inline(always)]
            fn $method(self, other: Real<A>) -> Real<A> {
                f32::<A>(self).$method(other)
            }
        }
    )*};
}

operators!(Add add, Sub sub, Mul mul, Div div);

impl<A: Arithmetic> Neg for Real<A> {
    type Output = Self;

    #[inline(always)]
    fn neg(self) -> Self {
        Real(-self.0)
    }
}

impl<A: Arithmetic> PartialEq for Real<A> {
    #[inline(always)]
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl<A: Arithmetic> PartialEq<f64> for Real<A> {
    #[inline(always)]
    fn eq(&self, other: &f64) -> bool {
        self.0 == A::Number::from_f64(*other)
    }
}

/// Comparisons of the numbers, each one instruction.
macro_rules! comparisons {
    ($other:ty, $number:expr) => {
        #[inline(always)]
        fn partial_cmp(&self, other: &$other) -> Option<Ordering> {
            self.0.partial_cmp(&$number(other))
        }

        #[inline(always)]
        fn lt(&self, other: &$other) -> bool {
            self.0 < $number(other)
        }

        #[inline(always)]
        fn le(&self, other: &$other) -> bool {
            self.0 <= $number(other)
        }

        #[inline(always)]
        fn gt(&self, other: &$other) -> bool {
            self.0 > $number(other)
        }

        #[inline(always)]
        fn ge(&self, other: &$other) -> bool {
            self.0 >= $number(other)
        }
    };
}

impl<A: Arithmetic> PartialOrd for Real<A> {
    comparisons!(Self, |other: &Self| other.0);
}

impl<A: Arithmetic> PartialOrd<f64> for Real<A> {
    comparisons!(f64, |other: &f64| A::Number::from_f64(*other));
}

/// Returns `then` where the condition holds.
#[inline(always)]
pub fn select<A: Arithmetic>(otherwise: Real<A>, then: Real<A>, condition: bool) -> Real<A> {
    if condition { then } else { otherwise }
}

/// Returns `value`, or `x` where `x` is a NaN.
#[inline(always)]
pub fn unless_nan<A: Arithmetic>(x: Real<A>, value: Real<A>) -> Real<A> {
    select(value, x, x.0.is_nan())
}

/// Returns `value`, or NaN where `x` is infinite or NaN.
#[inline(always)]
pub fn if_finite<A: Arithmetic>(x: Real<A>, value: Real<A>) -> Real<A> {
    select(Real(A::Number::nan()), value, x.0.is_finite())
}

/// Returns `x` limited to `-limit ..= limit`; NaN for NaN.
#[inline(always)]
pub fn bounded<A: Arithmetic>(x: Real<A>, limit: Real<A>) -> Real<A> {
    let above = select(x, limit, x > limit);
    select(above, -limit, x < -limit)
}

#[inline(always)]
pub fn max<A: Arithmetic>(a: Real<A>, b: Real<A>) -> Real<A> {
    select(b, a, a > b)
}

#[inline(always)]
pub fn min<A: Arithmetic>(a: Real<A>, b: Real<A>) -> Real<A> {
    select(b, a, a < b)
}

/// Returns -1, 0 or 1; NaN for NaN.
#[inline(always)]
pub fn sign_of<A: Arithmetic>(x: Real<A>) -> Real<A> {
    let positive = select(f32(0.0), f32(1.0), x > 0.0);
    unless_nan(x, select(positive, f32(-1.0), x < 0.0))
}

/// Returns `a b + c`, rounded once or twice.
#[inline(always)]
pub fn mul_add<A: Arithmetic>(a: Real<A>, b: Real<A>, c: Real<A>) -> Real<A> {
    Real(A::mul_add(a.0, b.0, c.0))
}

macro_rules! functions {
    ($($name:ident($($x:ident),*) = $value:expr;)*) => {$(
        #[inline(always)]
        pub fn $name<A: Arithmetic>($($x: Real<A>),*) -> Real<A> {
            $value
        }
    )*};
}

functions! {
    abs(x) = Real(x.0.abs());
    exp(x) = Real(A::exp(x.0));
    exp_of(x) = Real(A::whole_exp(x.0));
    log_of(x) = Real(A::log(x.0));
    power_of_two(n) = Real(A::power_of_two(n.0));
    sqrt_of(x) = Real(x.0.sqrt());
    tanh(x) = Real(A::tanh(x.0));
    tanh_of(x) = Real(A::tanh(x.0));
    erf(x) = Real(A::erf(x.0));
    floor(x) = Real(x.0.floor());
    ceil(x) = Real(x.0.ceil());
    trunc(x) = Real(x.0.trunc());
    round(x) = Real(A::round(x.0));
    log1p(x) = A::log1p(x);
    expm1(x) = A::expm1(x);
    sine(x) = A::sine(x);
    cosine(x) = A::cosine(x);
    arctangent(x) = A::arctangent(x);
    arcsine(x) = A::arcsine(x);
    arccosine(x) = A::arccosine(x);
    erfc(x) = A::erfc(x);
    angle(y, x) = A::angle(y, x);
    power(a, b) = A::power(a, b);
    decay(x) = Real(A::decay(x.0.abs()));
}

/// Returns the logistic function.
#[inline(always)]
pub fn sigmoid_of<A: Arithmetic>(x: Real<A>) -> Real<A> {
    let e = decay(x);
    let larger = 1.0 / (1.0 + e);
    select(e * larger, larger, x >= 0.0)
}

/// Returns the derivative of the logistic function, which is even.
#[inline(always)]
pub fn sigmoid_slope<A: Arithmetic>(x: Real<A>) -> Real<A> {
    let e = decay(x);
    let larger = 1.0 / (1.0 + e);
    e * larger * larger
}
