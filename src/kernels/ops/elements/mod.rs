//! Formulas of the elementwise functions, from the tables in `graph::elements`: in Rust for the
//! references and the CPU kernels, and in WGSL for the shaders.

mod formulas;
mod real;

use potluck_graph::{Binary, BinarySide, Domain, Unary, binary_functions, unary_functions};

use crate::harness::InputFill;
use crate::simd::vectorized;
use crate::twin::InputSpec;
use crate::{Dims, Float, source};
use real::{Arithmetic, Exact, Fast, Real};

/// The formulas of a function of one tensor.
trait UnaryFormula: Copy {
    fn value<A: Arithmetic>(self, x: Real<A>) -> Real<A>;
    fn gradient<A: Arithmetic>(self, x: Real<A>, dy: Real<A>) -> Real<A>;
}

/// The formulas of a function of two tensors.
trait BinaryFormula: Copy {
    fn value<A: Arithmetic>(self, a: Real<A>, b: Real<A>) -> Real<A>;
    fn gradient<A: Arithmetic>(
        self,
        by: BinarySide,
        a: Real<A>,
        b: Real<A>,
        dy: Real<A>,
    ) -> Real<A>;
}

macro_rules! define_unary {
    ($($(#[$doc:meta])* $variant:ident $(($($constant:ident = $sample:expr),*))?
        $name:literal $domain:ident $slope:ident
        value($x:ident) $value:block gradient($far:ident, $dy:ident) $gradient:block)*) => {
        /// Types of the functions, with their formulas.
        #[allow(clippy::needless_return, clippy::approx_constant, unused_imports, unused_variables)]
        mod unary_formulas {
            use super::{Arithmetic, UnaryFormula, Real};
            use super::real::*;

            $(
                #[derive(Clone, Copy)]
                pub struct $variant {
                    $($(pub $constant: core::primitive::f32),*)?
                }

                impl UnaryFormula for $variant {
                    #[inline(always)]
                    fn value<A: Arithmetic>(self, $x: Real<A>) -> Real<A> {
                        $($(let $constant = f32::<A>(f64::from(self.$constant));)*)?
                        $value
                    }

                    #[inline(always)]
                    fn gradient<A: Arithmetic>(self, $far: Real<A>, $dy: Real<A>) -> Real<A> {
                        $($(let $constant = f32::<A>(f64::from(self.$constant));)*)?
                        $gradient
                    }
                }
            )*
        }

        /// Returns `f(x)` of the reference.
        pub fn value<T: Float>(function: Unary, x: T) -> T {
            match function {
                $(Unary::$variant $(($($constant),*))? => {
                    let formula = unary_formulas::$variant { $($($constant),*)? };
                    exact_value(formula, x)
                })*
            }
        }

        /// Returns `f'(x) dy` of the reference.
        pub fn gradient<T: Float>(function: Unary, x: T, dy: T) -> T {
            match function {
                $(Unary::$variant $(($($constant),*))? => {
                    let formula = unary_formulas::$variant { $($($constant),*)? };
                    exact_gradient(formula, x, dy)
                })*
            }
        }

        /// Computes `y = f(x)` on the calling thread.
        pub fn values(function: Unary, x: &[f32], y: &mut [f32]) {
            match function {
                $(Unary::$variant $(($($constant),*))? => {
                    let formula = unary_formulas::$variant { $($($constant),*)? };
                    fast_values(formula, x, y)
                })*
            }
        }

        /// Computes `dx = f'(x) dy` on the calling thread.
        pub fn gradients(function: Unary, x: &[f32], dy: &[f32], dx: &mut [f32]) {
            match function {
                $(Unary::$variant $(($($constant),*))? => {
                    let formula = unary_formulas::$variant { $($($constant),*)? };
                    fast_gradients(formula, x, dy, dx)
                })*
            }
        }

        /// WGSL functions of the value and of the gradient.
        fn unary_texts(function: Unary) -> [&'static str; 2] {
            match function {
                $(Unary::$variant { .. } => [
                    concat!(
                        "fn ", $name, "_value(", stringify!($x), ": f32",
                        $($(", ", stringify!($constant), ": f32",)*)? ") -> f32 ",
                        stringify!($value), "\n"
                    ),
                    concat!(
                        "fn ", $name, "_gradient(", stringify!($far), ": f32, ",
                        stringify!($dy), ": f32"
                        $($(, ", ", stringify!($constant), ": f32")*)?, ") -> f32 ",
                        stringify!($gradient), "\n"
                    ),
                ],)*
            }
        }
    };
}

unary_functions!(define_unary);

macro_rules! define_binary {
    ($($(#[$doc:meta])* $variant:ident $name:literal $domain:ident $first:ident $second:ident
        value($a:ident, $b:ident) $value:block
        by_first($fa:ident, $fb:ident, $fdy:ident) $by_first:block
        by_second($sa:ident, $sb:ident, $sdy:ident) $by_second:block)*) => {
        /// Types of the functions, with their formulas.
        #[allow(clippy::needless_return, clippy::approx_constant, unused_imports, unused_variables)]
        mod binary_formulas {
            use super::{Arithmetic, BinaryFormula, BinarySide, Real};
            use super::real::*;

            $(
                #[derive(Clone, Copy)]
                pub struct $variant;

                impl $variant {
                    #[inline(always)]
                    fn by_first<A: Arithmetic>(
                        $fa: Real<A>,
                        $fb: Real<A>,
                        $fdy: Real<A>,
                    ) -> Real<A> {
                        $by_first
                    }

                    #[inline(always)]
                    fn by_second<A: Arithmetic>(
                        $sa: Real<A>,
                        $sb: Real<A>,
                        $sdy: Real<A>,
                    ) -> Real<A> {
                        $by_second
                    }
                }

                impl BinaryFormula for $variant {
                    #[inline(always)]
                    fn value<A: Arithmetic>(self, $a: Real<A>, $b: Real<A>) -> Real<A> {
                        $value
                    }

                    #[inline(always)]
                    fn gradient<A: Arithmetic>(
                        self,
                        by: BinarySide,
                        a: Real<A>,
                        b: Real<A>,
                        dy: Real<A>,
                    ) -> Real<A> {
                        match by {
                            BinarySide::First => Self::by_first(a, b, dy),
                            BinarySide::Second => Self::by_second(a, b, dy),
                        }
                    }
                }
            )*
        }

        /// Returns `f(a, b)` of the reference.
        pub fn value_of_two<T: Float>(function: Binary, a: T, b: T) -> T {
            match function {
                $(Binary::$variant => exact_value_of_two(binary_formulas::$variant, a, b),)*
            }
        }

        /// Returns a gradient of `f(a, b)` of the reference, from `[a, b, dy]`.
        pub fn gradient_of_two<T: Float>(
            function: Binary,
            by: BinarySide,
            inputs: [T; 3],
        ) -> T {
            match function {
                $(Binary::$variant => {
                    exact_gradient_of_two(binary_formulas::$variant, by, inputs)
                })*
            }
        }

        /// Computes `y = f(a, b)` on the calling thread.
        pub fn combine(function: Binary, y: &mut [f32], a: &[f32], b: &[f32]) {
            match function {
                $(Binary::$variant => fast_values_of_two(binary_formulas::$variant, y, a, b),)*
            }
        }

        /// Computes a gradient of `f(a, b)` from `[a, b, dy]` on the calling thread.
        pub fn combine_gradients(
            function: Binary,
            by: BinarySide,
            inputs: [&[f32]; 3],
            d: &mut [f32],
        ) {
            match function {
                $(Binary::$variant => {
                    fast_gradients_of_two(binary_formulas::$variant, by, inputs, d)
                })*
            }
        }

        /// WGSL functions of the value and of the gradients by both arguments.
        fn binary_texts(function: Binary) -> [&'static str; 3] {
            match function {
                $(Binary::$variant => [
                    concat!(
                        "fn ", $name, "_value(", stringify!($a), ": f32, ", stringify!($b),
                        ": f32) -> f32 ", stringify!($value), "\n"
                    ),
                    concat!(
                        "fn ", $name, "_by_first(", stringify!($fa), ": f32, ", stringify!($fb),
                        ": f32, ", stringify!($fdy), ": f32) -> f32 ", stringify!($by_first), "\n"
                    ),
                    concat!(
                        "fn ", $name, "_by_second(", stringify!($sa), ": f32, ", stringify!($sb),
                        ": f32, ", stringify!($sdy), ": f32) -> f32 ", stringify!($by_second), "\n"
                    ),
                ],)*
            }
        }
    };
}

binary_functions!(define_binary);

/// A function whose WGSL a kernel calls.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Called {
    Unary(Unary),
    UnaryGrad(Unary),
    Binary(Binary),
    BinaryGrad(Binary, BinarySide),
}

impl Called {
    fn text(self) -> &'static str {
        match self {
            Self::Unary(function) => unary_texts(function)[0],
            Self::UnaryGrad(function) => unary_texts(function)[1],
            Self::Binary(function) => binary_texts(function)[0],
            Self::BinaryGrad(function, BinarySide::First) => binary_texts(function)[1],
            Self::BinaryGrad(function, BinarySide::Second) => binary_texts(function)[2],
        }
    }

    /// WGSL of a call if it is an operator, which applies to vectors too.
    fn operation(self, arguments: &[&str]) -> Option<String> {
        let operator = match self {
            Self::Unary(Unary::Scale(factor)) => {
                return Some(format!("{factor:?}f * {}", arguments[0]));
            }
            Self::UnaryGrad(Unary::Scale(factor)) => {
                return Some(format!("{factor:?}f * {}", arguments[1]));
            }
            Self::Binary(Binary::Add) => "+",
            Self::Binary(Binary::Sub) => "-",
            Self::Binary(Binary::Mul) => "*",
            Self::Binary(Binary::Div) => "/",
            _ => return None,
        };
        Some(format!("{} {operator} {}", arguments[0], arguments[1]))
    }

    /// Returns the WGSL of a call with these arguments.
    pub fn call(self, arguments: &[&str]) -> String {
        if let Some(operation) = self.operation(arguments) {
            return operation;
        }
        let (name, kind, constants) = match self {
            Self::Unary(function) => (function.name(), "value", function.constants()),
            Self::UnaryGrad(function) => (function.name(), "gradient", function.constants()),
            Self::Binary(function) => (function.name(), "value", Vec::new()),
            Self::BinaryGrad(function, BinarySide::First) => {
                (function.name(), "by_first", Vec::new())
            }
            Self::BinaryGrad(function, BinarySide::Second) => {
                (function.name(), "by_second", Vec::new())
            }
        };
        let mut all: Vec<String> = arguments.iter().map(|text| text.to_string()).collect();
        all.extend(constants.iter().map(|constant| format!("{constant:?}f")));
        format!("{name}_{kind}({})", all.join(", "))
    }

    /// Returns the WGSL of a call for each element of vectors of 4, whose arguments are names of
    /// variables.
    pub fn call4(self, arguments: &[&str]) -> String {
        if let Some(operation) = self.operation(arguments) {
            return operation;
        }
        let mut elements = Vec::new();
        for lane in ["x", "y", "z", "w"] {
            let each: Vec<String> = arguments.iter().map(|name| format!("{name}.{lane}")).collect();
            let each: Vec<&str> = each.iter().map(String::as_str).collect();
            elements.push(self.call(&each));
        }
        format!("vec4f({})", elements.join(", "))
    }
}

/// Returns the WGSL of functions and of the formulas that they call; an empty text if all calls are
/// operators.
pub fn library(functions: &[Called]) -> String {
    let mut texts: Vec<&str> = Vec::new();
    for function in functions {
        let is_operator = function.operation(&[""; 2]).is_some();
        if !is_operator && !texts.contains(&function.text()) {
            texts.push(function.text());
        }
    }
    if texts.is_empty() {
        return String::new();
    }
    let mut text = texts.concat();
    // A formula may call the formulas above it.
    for (name, formula) in formulas::TEXTS.iter().rev() {
        if calls(&text, name) {
            text += formula;
        }
    }
    source::snippet("elementwise").to_string() + &text
}

fn calls(text: &str, name: &str) -> bool {
    for (at, _) in text.match_indices(&format!("{name}(")) {
        let before = &text[..at];
        let is_part_of_name = before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let is_definition = before.trim_end().ends_with("fn");
        if !is_part_of_name && !is_definition {
            return true;
        }
    }
    false
}

fn exact_value<T: Float>(formula: impl UnaryFormula, x: T) -> T {
    formula.value(Real::<Exact<T>>(x)).0
}

fn exact_gradient<T: Float>(formula: impl UnaryFormula, x: T, dy: T) -> T {
    formula.gradient(Real::<Exact<T>>(x), Real(dy)).0
}

fn exact_value_of_two<T: Float>(formula: impl BinaryFormula, a: T, b: T) -> T {
    formula.value(Real::<Exact<T>>(a), Real(b)).0
}

fn exact_gradient_of_two<T: Float>(
    formula: impl BinaryFormula,
    by: BinarySide,
    inputs: [T; 3],
) -> T {
    let [a, b, dy] = inputs.map(Real::<Exact<T>>);
    formula.gradient(by, a, b, dy).0
}

vectorized! {
    fn fast_values<S, F: UnaryFormula>(formula: F, x: &[f32], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = formula.value(Real::<Fast<S>>(*x)).0;
        }
    }

    fn fast_gradients<S, F: UnaryFormula>(formula: F, x: &[f32], dy: &[f32], dx: &mut [f32]) {
        for ((dx, x), dy) in dx.iter_mut().zip(x).zip(dy) {
            *dx = formula.gradient(Real::<Fast<S>>(*x), Real(*dy)).0;
        }
    }

    fn fast_values_of_two<S, F: BinaryFormula>(formula: F, y: &mut [f32], a: &[f32], b: &[f32]) {
        for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
            *y = formula.value(Real::<Fast<S>>(*a), Real(*b)).0;
        }
    }

    fn fast_gradients_of_two<S, F: BinaryFormula>(
        formula: F,
        by: BinarySide,
        inputs: [&[f32]; 3],
        d: &mut [f32],
    ) {
        let [a, b, dy] = inputs;
        for (((d, a), b), dy) in d.iter_mut().zip(a).zip(b).zip(dy) {
            *d = formula.gradient(by, Real::<Fast<S>>(*a), Real(*b), Real(*dy)).0;
        }
    }
}

/// Returns the inputs on which kernels of a function are certified: the first in its domain.
pub fn inputs_of(domain: Domain, inputs: &[Dims]) -> InputSpec {
    let spec = InputSpec::normal(inputs);
    if domain == Domain::All { spec } else { spec.with(0, fill_of(domain)) }
}

/// Returns values for which a function is tested.
pub fn fill_of(domain: Domain) -> InputFill {
    match domain {
        Domain::All | Domain::Steep => InputFill::Scaled(3.0, 0.0),
        Domain::Positive => InputFill::Uniform(0.05, 4.0),
        Domain::Unit => InputFill::Uniform(-0.95, 0.95),
        Domain::AboveOne => InputFill::Uniform(1.05, 4.0),
        Domain::Apart => InputFill::Uniform(0.25, 4.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::{Dispatch, Operand, Shader};
    use crate::harness::generate;
    use crate::testing::{for_each_gpu, run_dispatches};
    use potluck_core::HostTensor;

    /// Elements on which each formula is tried; some are NaN.
    const COUNT: usize = 256;
    const NANS: [usize; 2] = [3, 100];

    fn values_of(fill: InputFill, which: usize) -> Vec<f32> {
        let HostTensor::Float(values) = generate(fill, COUNT, which) else {
            panic!("elementwise functions are of floats");
        };
        values.iter().map(|value| *value as f32).collect()
    }

    /// A formula with its arguments and the results of the reference.
    struct Case {
        called: Called,
        arguments: Vec<Vec<f32>>,
        expected: Vec<f64>,
        /// Results of the CPU's kernel.
        fast: Vec<f32>,
    }

    fn unary_cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for &function in Unary::SAMPLES {
            let (mut x, dy) =
                (values_of(fill_of(function.domain()), 0), values_of(InputFill::Normal, 1));
            for at in NANS {
                x[at] = f32::NAN;
            }
            let wide = |values: &[f32]| values.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
            let expected = wide(&x).iter().map(|x| value(function, *x)).collect();
            let mut fast = vec![0.0; COUNT];
            values(function, &x, &mut fast);
            let arguments = vec![x.clone()];
            cases.push(Case { called: Called::Unary(function), arguments, expected, fast });
            let both = wide(&x).into_iter().zip(wide(&dy));
            let expected = both.map(|(x, dy)| gradient(function, x, dy)).collect();
            let mut fast = vec![0.0; COUNT];
            gradients(function, &x, &dy, &mut fast);
            let arguments = vec![x, dy];
            cases.push(Case { called: Called::UnaryGrad(function), arguments, expected, fast });
        }
        cases
    }

    fn binary_cases() -> Vec<Case> {
        let mut cases = Vec::new();
        for &function in Binary::ALL {
            let mut a = values_of(fill_of(function.domain()), 0);
            let (mut b, dy) = (values_of(InputFill::Normal, 1), values_of(InputFill::Normal, 2));
            for (at, value) in [(NANS[0], &mut a), (NANS[1], &mut b)] {
                value[at] = f32::NAN;
            }
            // Equal ones, and a side that is 0.
            b[7] = a[7];
            b[9] = 0.0;
            let wide = |at: usize| [a[at], b[at], dy[at]].map(f64::from);
            let expected = (0..COUNT).map(|at| value_of_two(function, wide(at)[0], wide(at)[1]));
            let expected = expected.collect();
            let mut fast = vec![0.0; COUNT];
            combine(function, &mut fast, &a, &b);
            let arguments = vec![a.clone(), b.clone()];
            cases.push(Case { called: Called::Binary(function), arguments, expected, fast });
            for by in [BinarySide::First, BinarySide::Second] {
                let expected =
                    (0..COUNT).map(|at| gradient_of_two(function, by, wide(at))).collect();
                let mut fast = vec![0.0; COUNT];
                combine_gradients(function, by, [&a, &b, &dy], &mut fast);
                let arguments = vec![a.clone(), b.clone(), dy.clone()];
                let called = Called::BinaryGrad(function, by);
                cases.push(Case { called, arguments, expected, fast });
            }
        }
        cases
    }

    /// Asserts that values are NaN where they should be, and else within an NMSE of 1e-10.
    fn assert_close(case: &Case, who: &str, got: &[f32]) {
        let (mut error, mut size) = (0.0, 1e-30);
        for (at, (got, expected)) in got.iter().zip(&case.expected).enumerate() {
            let is_nan = got.to_bits() & 0x7FFF_FFFF > 0x7F80_0000;
            let arguments: Vec<f32> = case.arguments.iter().map(|values| values[at]).collect();
            let what = format!("{:?} of {arguments:?} by {who}: {got} for {expected}", case.called);
            assert_eq!(is_nan, expected.is_nan(), "{what}");
            // Where the reference is infinite, a driver may give the largest number.
            if expected.is_finite() {
                error += (f64::from(*got) - expected).powi(2);
                size += expected.powi(2);
            } else if !is_nan {
                assert!(f64::from(*got) * expected.signum() > 1e38, "{what}");
            }
        }
        let nmse = error / size;
        assert!(nmse <= 1e-10, "{:?} by {who}: NMSE {nmse:.1e}", case.called);
    }

    /// Returns a kernel that computes all cases, each of its own range of the arguments.
    fn kernel(cases: &[Case]) -> Dispatch {
        let called: Vec<Called> = cases.iter().map(|case| case.called).collect();
        let mut text = library(&called);
        text += "struct Params { count: u32 }\nvar<immediate> p: Params;\n";
        for (binding, name) in ["a", "b", "c"].into_iter().enumerate() {
            text +=
                &format!("@group(0) @binding({binding}) var<storage, read> {name}: array<f32>;\n");
        }
        text += "@group(0) @binding(3) var<storage, read_write> y: array<f32>;\n\
            @compute @workgroup_size(64)\n\
            fn formulas(@builtin(global_invocation_id) id: vec3u) {\n    let i = id.x;\n    \
            if (i >= p.count) { return; }\n";
        for (number, case) in cases.iter().enumerate() {
            let at = format!("{}u + i", number * COUNT);
            let all = ["a", "b", "c"].map(|name| format!("{name}[{at}]"));
            let given: Vec<&str> = all[..case.arguments.len()].iter().map(String::as_str).collect();
            text += &format!("    y[{at}] = {};\n", case.called.call(&given));
        }
        text += "}\n";
        Dispatch {
            shader: Shader::emitted("formulas", "formulas", text),
            operands: vec![
                Operand::Input(0),
                Operand::Input(1),
                Operand::Input(2),
                Operand::Output(0),
            ],
            params: vec![COUNT as u32],
            groups: [COUNT.div_ceil(64) as u32, 1, 1],
        }
    }

    /// All formulas in one kernel: a kernel of each would take minutes to compile.
    fn check_together(cases: &[Case]) {
        for case in cases {
            assert_close(case, "the CPU", &case.fast);
        }
        let inputs = [0, 1, 2].map(|number| {
            let argument = |case: &Case| case.arguments.get(number).cloned();
            let values: Vec<f32> = cases
                .iter()
                .flat_map(|case| argument(case).unwrap_or_else(|| vec![0.0; COUNT]))
                .collect();
            bytemuck::cast_slice::<f32, u8>(&values).to_vec()
        });
        let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        let starts = [vec![0.0; cases.len() * COUNT]];
        for_each_gpu(|gpu, pipelines| {
            let dispatch = [kernel(cases)];
            let got = run_dispatches(gpu, pipelines, "formulas", &dispatch, &inputs, &starts);
            for (case, got) in cases.iter().zip(got[0].chunks(COUNT)) {
                assert_close(case, &gpu.name, got);
            }
        });
    }

    #[test]
    fn formulas_of_one_tensor_agree_everywhere() {
        check_together(&unary_cases());
    }

    #[test]
    fn formulas_of_two_tensors_agree_everywhere() {
        check_together(&binary_cases());
    }

    #[test]
    fn sines_of_large_arguments_are_right() {
        let x: Vec<f32> = (0..4000).map(|i| -80_000.0 + 40.017 * i as f32).collect();
        let mut y = vec![0.0; x.len()];
        for function in [Unary::Sin, Unary::Cos] {
            values(function, &x, &mut y);
            for (x, y) in x.iter().zip(&y) {
                let exact = value(function, f64::from(*x));
                assert!((f64::from(*y) - exact).abs() < 1e-6, "{function} of {x}: {y} for {exact}");
            }
            // Beyond, where floats are far apart, a number from -1 to 1.
            let far: Vec<f32> = (0..100).map(|i| -1e6 * 2f32.powi(i)).collect();
            let mut y = vec![f32::NAN; far.len()];
            values(function, &far, &mut y);
            let is_right = |(x, y): (&f32, &f32)| {
                if x.is_finite() { y.abs() <= 1.000_001 } else { y.is_nan() }
            };
            assert!(far.iter().zip(&y).all(is_right), "{function}: {y:?}");
        }
    }

    #[test]
    fn only_called_formulas_are_in_a_text() {
        let text = library(&[Called::Unary(Unary::Softplus), Called::Unary(Unary::Softplus)]);
        assert_eq!(text.matches("fn log1p(").count(), 1);
        assert_eq!(text.matches("fn softplus_value(").count(), 1);
        assert!(!text.contains("fn sine("), "{text}");
        assert_eq!(library(&[Called::Binary(Binary::Add)]), "");
    }
}
