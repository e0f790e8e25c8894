//! Element types whose values collectives send between ranks.

use std::fmt;

/// Sealing of `Element`: only the types of this file implement it.
mod sealed {
    pub trait Sealed {}
}

/// A number that collectives work on: `f32`, `f64`, `i32`, `u32`, `i64` or `u64`.
pub trait Element:
    sealed::Sealed + bytemuck::Pod + Default + PartialOrd + fmt::Debug + Send + Sync
{
    /// Name of the type as written in Rust, such as `f32`.
    const NAME: &'static str;
    /// True if the type is a floating-point type, so that a mean of its values has the same type.
    const IS_FLOAT: bool;

    /// Returns the sum; integers wrap modulo `2^bits`.
    fn add(self, other: Self) -> Self;

    /// Returns the product with a factor that is first rounded to this type.
    fn scale(self, factor: f64) -> Self;

    /// Returns the quotient by a divisor that is first rounded to this type.
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
