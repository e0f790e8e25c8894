//! The types whose values travel between ranks.

use std::fmt;

/// Only the types of this file are elements.
mod sealed {
    pub trait Sealed {}
}

/// A number that collectives work on: `f32`, `f64`, `i32`, `u32`, `i64` or `u64`.
pub trait Element:
    sealed::Sealed + Copy + Default + PartialOrd + fmt::Debug + Send + Sync + 'static
{
    /// As Rust writes it.
    const NAME: &'static str;
    /// Whether a mean of them is one of them.
    const IS_FLOAT: bool;

    /// The sum; of integers modulo their number of bits.
    fn add(self, other: Self) -> Self;

    /// The product with a number rounded to this type.
    fn scale(self, factor: f64) -> Self;

    /// The quotient by a number rounded to this type.
    fn div(self, divisor: f64) -> Self;
}

macro_rules! elements {
    ($is_float:literal, $plus:expr; $($type:ident)*) => {$(
        impl sealed::Sealed for $type {}

        impl Element for $type {
            const NAME: &'static str = stringify!($type);
            const IS_FLOAT: bool = $is_float;

            #[inline(always)]
            fn add(self, other: Self) -> Self {
                let plus: fn(Self, Self) -> Self = $plus;
                plus(self, other)
            }

            #[inline(always)]
            fn scale(self, factor: f64) -> Self {
                self * factor as Self
            }

            #[inline(always)]
            fn div(self, divisor: f64) -> Self {
                self / divisor as Self
            }
        }
    )*};
}

elements!(true, |a, b| a + b; f32 f64);
elements!(false, |a, b| a.wrapping_add(b); i32 u32 i64 u64);
