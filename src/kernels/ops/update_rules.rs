//! Formulas of the update rules that `super::update` computes, each written once in the common
//! subset of Rust and WGSL: the reference, the CPU kernel and the shaders come from one text.

use crate::Float;
use potluck_graph::Update;

/// Maximum number of coefficients of a formula.
pub(crate) const NUMBERS_MAX: usize = 7;

/// Values of a parameter and of its moments; the second is 0 for a rule with one moment.
#[derive(Clone, Copy)]
pub(crate) struct ElementState<T>(pub T, pub T, pub T);

/// Formula of a rule for one element.
pub(crate) trait UpdateFormula: Copy + Send + Sync {
    /// Returns the function `rule` of the shaders.
    fn wgsl(self) -> String;

    /// Returns the new values of an element with this scaled gradient and weight decay.
    fn step<T: Float>(
        self,
        state: ElementState<T>,
        gradient: T,
        decay: T,
        numbers: &[T; NUMBERS_MAX],
    ) -> ElementState<T>;
}

/// WGSL of [`sign_of`].
const SIGN: &str = "fn sign_of(x: Value) -> Value {
    return select(select(x, Value(-1.0), x < Value(0.0)), Value(1.0), x > Value(0.0));
}
";

/// Returns 1 of a positive number, -1 of a negative one, and 0 of 0.
#[inline(always)]
fn sign_of<T: Float>(x: T) -> T {
    let of_rest = if x < T::zero() { -T::one() } else { x };
    if x > T::zero() { T::one() } else { of_rest }
}

#[inline(always)]
fn sqrt<T: Float>(x: T) -> T {
    x.sqrt()
}

macro_rules! rules {
    ($(
        $(#[$doc:meta])*
        $name:ident($old:ident, $m:ident, $v:ident, $g:ident, $decay:ident; $($number:ident),*)
        $body:block
    )*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name;

        impl UpdateFormula for $name {
            fn wgsl(self) -> String {
                let mut text = String::from(SIGN);
                text += concat!(
                    "fn rule(state: ElementState, ", stringify!($g), ": Value, ",
                    stringify!($decay), ": Value) -> ElementState {\n",
                    "    let ", stringify!($old), " = state.parameter;\n",
                    "    let ", stringify!($m), " = state.m;\n",
                    "    let ", stringify!($v), " = state.v;\n",
                );
                for (index, name) in [$(stringify!($number)),*].iter().enumerate() {
                    text += &format!("    let {name} = p.n{index};\n");
                }
                text + stringify!($body) + "\n}\n"
            }

            #[inline(always)]
            #[allow(clippy::needless_return, reason = "as WGSL needs it")]
            fn step<T: Float>(
                self,
                ElementState($old, $m, $v): ElementState<T>,
                $g: T,
                $decay: T,
                numbers: &[T; NUMBERS_MAX],
            ) -> ElementState<T> {
                let [$($number,)* ..] = *numbers;
                $body
            }
        }
    )*};
}

rules! {
    /// See [`Update::Nesterov`].
    Nesterov(p_old, m_old, v_old, g, decay; lr, momentum) {
        let slope = g + decay * p_old;
        let average = momentum * m_old + slope;
        return ElementState(p_old - lr * (slope + momentum * average), average, v_old);
    }

    /// See [`Update::Adam`]; the rate is `lr / correction1`.
    Adam(p_old, m_old, v_old, g, decay; beta1, rest1, beta2, rest2, rate, correction2, eps) {
        let slope = g + decay * p_old;
        let average = beta1 * m_old + rest1 * slope;
        let square = beta2 * v_old + rest2 * slope * slope;
        let distance = rate * average / (sqrt(square / correction2) + eps);
        return ElementState(p_old - distance, average, square);
    }

    /// See [`Update::RmsProp`], without momentum.
    RmsProp(p_old, square_old, v_old, g, decay; lr, alpha, rest, eps) {
        let slope = g + decay * p_old;
        let square = alpha * square_old + rest * slope * slope;
        return ElementState(p_old - lr * slope / (sqrt(square) + eps), square, v_old);
    }

    /// See [`Update::RmsProp`], with momentum.
    RmsPropMomentum(p_old, square_old, m_old, g, decay; lr, alpha, rest, eps, momentum) {
        let slope = g + decay * p_old;
        let square = alpha * square_old + rest * slope * slope;
        let average = momentum * m_old + slope / (sqrt(square) + eps);
        return ElementState(p_old - lr * average, square, average);
    }

    /// See [`Update::Lion`]; the decay is `lr weight_decay`.
    Lion(p_old, m_old, v_old, g, decay; lr, beta1, rest1, beta2, rest2) {
        let direction = sign_of(beta1 * m_old + rest1 * g);
        let decayed = p_old - decay * p_old;
        return ElementState(decayed - lr * direction, beta2 * m_old + rest2 * g, v_old);
    }
}

/// Evaluates an expression with the formula of an update.
macro_rules! with_rule {
    ($update:expr, $rule:ident => $result:expr) => {
        with_rule!($update, $rule => $result;
            Nesterov { .. } => Nesterov,
            Adam { .. } => Adam,
            RmsProp { momentum: 0.0, .. } => RmsProp,
            RmsProp { .. } => RmsPropMomentum,
            Lion { .. } => Lion,
        )
    };
    ($update:expr, $rule:ident => $result:expr; $($name:ident $fields:tt => $formula:ident,)*) => {
        match $update {
            $(potluck_graph::Update::$name $fields => {
                let $rule = $crate::ops::update_rules::$formula;
                $result
            })*
            other => panic!("{other:?} has kernels of its own"),
        }
    };
}

pub(crate) use with_rule;

/// Weight decay and coefficients of a formula, in its order.
pub(crate) struct RuleNumbers {
    pub decay: f64,
    pub numbers: [f64; NUMBERS_MAX],
}

impl RuleNumbers {
    fn new(decay: f64, of_formula: &[f64]) -> Self {
        let mut numbers = [0.0; NUMBERS_MAX];
        numbers[..of_formula.len()].copy_from_slice(of_formula);
        Self { decay, numbers }
    }

    /// Returns the numbers of an update.
    ///
    /// # Panics
    /// If the rule has kernels of its own.
    pub(crate) fn of(update: &Update) -> Self {
        let wide = f64::from;
        match *update {
            Update::Nesterov { lr, momentum, weight_decay } => {
                Self::new(wide(weight_decay), &[lr, momentum].map(wide))
            }
            Update::Adam { lr, beta1, beta2, eps, weight_decay, correction1, correction2 } => {
                let [beta1, beta2] = [beta1, beta2].map(wide);
                let rate = wide(lr) / wide(correction1);
                let [correction2, eps] = [correction2, eps].map(wide);
                Self::new(
                    wide(weight_decay),
                    &[beta1, 1.0 - beta1, beta2, 1.0 - beta2, rate, correction2, eps],
                )
            }
            Update::RmsProp { lr, alpha, eps, momentum, weight_decay } => {
                let [lr, alpha, eps, momentum] = [lr, alpha, eps, momentum].map(wide);
                Self::new(wide(weight_decay), &[lr, alpha, 1.0 - alpha, eps, momentum])
            }
            Update::Lion { lr, beta1, beta2, weight_decay } => {
                let [lr, beta1, beta2] = [lr, beta1, beta2].map(wide);
                let decay = lr * wide(weight_decay);
                Self::new(decay, &[lr, beta1, 1.0 - beta1, beta2, 1.0 - beta2])
            }
            other => panic!("{other:?} has kernels of its own"),
        }
    }
}
