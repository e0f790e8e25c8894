//! Calls of PyTorch's functions as what the builder makes of them.

use potluck_core::{HostTensor, TensorId};
use potluck_graph::builder::BuildResult;
use potluck_graph::{Binary, Builder, Unary};
use serde_json::Value;

use super::{Built, Refusal, Tensor, indexing, losses, norms, pictures};

/// Arguments of a sample, with the tensors of the graph.
pub(super) struct Arguments<'a> {
    pub b: &'a mut Builder,
    pub sample: &'a Value,
    pub x: &'a [TensorId],
    /// Values of the tensors of `x`.
    pub given: &'a [Tensor],
    /// What names of the graph begin with.
    pub prefix: &'a str,
    /// Inputs that the call takes, with their values.
    pub inputs: &'a mut Vec<(String, HostTensor)>,
}

impl Arguments<'_> {
    pub fn count(&self) -> usize {
        self.sample["args"].as_array().unwrap().len()
    }

    /// Returns the argument at a place or, if there are fewer, of a name; null if there is none.
    pub fn argument(&self, at: usize, name: &str) -> &Value {
        let placed = &self.sample["args"][at];
        if placed.is_null() { &self.sample["kwargs"][name] } else { placed }
    }

    pub fn has_keywords_but(&self, known: &[&str]) -> bool {
        let keywords = self.sample["kwargs"].as_object().unwrap();
        keywords.iter().any(|(key, value)| !known.contains(&key.as_str()) && !value.is_null())
    }

    pub fn tensor(&self, at: usize) -> Result<TensorId, Refusal> {
        self.named_tensor(at, "")
    }

    pub fn named_tensor(&self, at: usize, name: &str) -> Result<TensorId, Refusal> {
        let number = self.argument(at, name)["tensor"].as_u64().ok_or(Refusal::Unknown)?;
        Ok(self.x[number as usize])
    }

    pub fn number(&self, at: usize, name: &str, default: f64) -> Result<f32, Refusal> {
        match self.argument(at, name) {
            Value::Null => Ok(default as f32),
            Value::Number(number) => Ok(number.as_f64().unwrap() as f32),
            _ => Err(Refusal::Unknown),
        }
    }

    pub fn is(&self, at: usize, name: &str) -> bool {
        self.argument(at, name).as_bool().unwrap_or(false)
    }

    pub fn rank(&self, x: TensorId) -> usize {
        self.b.shape(x).rank()
    }

    pub fn axis(&self, value: &Value, rank: usize) -> Result<usize, Refusal> {
        let axis = value.as_i64().ok_or(Refusal::Unknown)?;
        let axis = if axis < 0 { axis + rank as i64 } else { axis };
        if (0..rank as i64).contains(&axis) { Ok(axis as usize) } else { Err(Refusal::Unknown) }
    }

    /// Returns axes of a tensor of this rank: one or a list, all of them if none are given.
    pub fn axes(&self, at: usize, name: &str, rank: usize) -> Result<Vec<usize>, Refusal> {
        match self.argument(at, name) {
            Value::Null => Ok((0..rank).collect()),
            Value::Array(list) if list.is_empty() => Ok((0..rank).collect()),
            Value::Array(list) => list.iter().map(|value| self.axis(value, rank)).collect(),
            value => Ok(vec![self.axis(value, rank)?]),
        }
    }

    /// Returns whole numbers, which are one or a list.
    pub fn lengths(&self, value: &Value) -> Result<Vec<i64>, Refusal> {
        let list = match value {
            Value::Array(list) => list.as_slice(),
            value => std::slice::from_ref(value),
        };
        list.iter().map(|value| value.as_i64().ok_or(Refusal::Unknown)).collect()
    }

    pub fn dims(&self, x: TensorId) -> Vec<usize> {
        self.b.shape(x).dims().to_vec()
    }

    pub fn unary(&mut self, function: Unary) -> Built {
        let x = self.tensor(0)?;
        Ok(vec![self.b.unary(x, function)?])
    }

    pub fn binary(&mut self, function: Binary) -> Built {
        if self.has_keywords_but(&[]) {
            return Err(Refusal::Unknown);
        }
        let [a, b] = [self.tensor(0)?, self.tensor(1)?];
        Ok(vec![self.b.binary(function, a, b)?])
    }

    pub fn offset(&mut self, y: BuildResult, offset: f32) -> BuildResult {
        self.b.offset(y?, offset)
    }

    /// Applies a reduction, and keeps its axes where the sample says so.
    pub fn reduction(
        &mut self,
        keep: bool,
        axes: &[usize],
        reduce: impl FnOnce(&mut Builder, TensorId, &[usize]) -> BuildResult,
    ) -> BuildResult {
        let x = self.x[0];
        let y = reduce(self.b, x, axes)?;
        if keep { self.b.unsqueeze(y, axes) } else { Ok(y) }
    }

    /// Adds `factor` times a tensor.
    pub fn plus(&mut self, a: TensorId, factor: f32, other: TensorId) -> BuildResult {
        let scaled = self.b.scale(other, factor)?;
        self.b.add(a, scaled)
    }

    /// Adds a constant under a name of the sample's own.
    pub fn constant(&mut self, name: &str, dims: &[usize], values: Vec<f32>) -> BuildResult {
        self.b.constant(&format!("{}{name}", self.prefix), dims, values)
    }
}

/// Builds what a sample computes.
pub(super) fn build(a: &mut Arguments) -> Built {
    let sample = a.sample;
    let op = sample["op"].as_str().unwrap();
    let variant = sample["variant"].as_str().unwrap();
    let op = op.strip_prefix("nn.functional.").unwrap_or(op);
    match op {
        "abs" | "ceil" | "floor" | "reciprocal" | "exp" | "expm1" | "log" | "log1p" | "sqrt"
        | "rsqrt" | "square" | "sin" | "cos" | "atan" | "sinh" | "cosh" | "tanh" | "asin"
        | "acos" | "asinh" | "acosh" | "atanh" | "erfc" | "sigmoid" | "erf" | "sign" | "trunc"
        | "relu" | "silu" | "mish" | "softsign" => {
            let function = Unary::SAMPLES.iter().find(|function| function.name() == op).unwrap();
            a.unary(*function)
        }
        "neg" => a.unary(Unary::Scale(-1.0)),
        "round" if variant.is_empty() => a.unary(Unary::Round),
        "hardswish" => a.unary(Unary::HardSwish),
        "hardsigmoid" => a.unary(Unary::HardSigmoid),
        "positive" => Ok(vec![a.tensor(0)?]),
        "deg2rad" => a.unary(Unary::Scale(std::f32::consts::PI / 180.0)),
        "rad2deg" => a.unary(Unary::Scale(180.0 / std::f32::consts::PI)),
        "gelu" if a.argument(1, "approximate") == "tanh" => a.unary(Unary::GeluTanh),
        "gelu" => a.unary(Unary::Gelu),
        "elu" | "celu" | "leaky_relu" | "hardtanh" | "relu6" => {
            let function = match op {
                "elu" => Unary::Elu(a.number(1, "alpha", 1.0)?),
                "celu" if a.number(1, "alpha", 1.0)? == 1.0 => Unary::Elu(1.0),
                "leaky_relu" => Unary::LeakyRelu(a.number(1, "negative_slope", 0.01)?),
                "hardtanh" => {
                    let [low, high] = [a.number(1, "min_val", -1.0)?, a.number(2, "max_val", 1.0)?];
                    Unary::Clamp(low, high)
                }
                "relu6" => Unary::Clamp(0.0, 6.0),
                _ => return Err(Refusal::Unknown),
            };
            a.unary(function)
        }
        "selu" => {
            let x = a.tensor(0)?;
            let y = a.b.unary(x, Unary::Elu(1.673_263_2))?;
            Ok(vec![a.b.scale(y, 1.050_701)?])
        }
        "softplus" if a.sample["kwargs"].as_object().unwrap().is_empty() && a.count() == 1 => {
            a.unary(Unary::Softplus)
        }
        "softplus" => {
            let x = a.tensor(0)?;
            let [beta, limit] = [a.number(1, "beta", 1.0)?, a.number(2, "threshold", 20.0)?];
            let scaled = a.b.scale(x, beta)?;
            let curved = a.b.unary(scaled, Unary::Softplus)?;
            let curved = a.b.scale(curved, 1.0 / beta)?;
            let limit = a.constant("limit", &[], vec![limit])?;
            let is_curved = a.b.less_equal(scaled, limit)?;
            Ok(vec![a.b.select(is_curved, curved, x)?])
        }
        "logsigmoid" => {
            let x = a.tensor(0)?;
            let negated = a.b.scale(x, -1.0)?;
            let softplus = a.b.unary(negated, Unary::Softplus)?;
            Ok(vec![a.b.scale(softplus, -1.0)?])
        }
        "tanhshrink" => {
            let x = a.tensor(0)?;
            let y = a.b.tanh(x)?;
            Ok(vec![a.b.sub(x, y)?])
        }
        "frac" => {
            let x = a.tensor(0)?;
            let y = a.b.unary(x, Unary::Trunc)?;
            Ok(vec![a.b.sub(x, y)?])
        }
        "exp2" | "log2" | "log10" => {
            let x = a.tensor(0)?;
            Ok(vec![match op {
                "exp2" => {
                    let y = a.b.scale(x, std::f32::consts::LN_2)?;
                    a.b.exp(y)?
                }
                "log2" => {
                    let y = a.b.log(x)?;
                    a.b.scale(y, std::f32::consts::LOG2_E)?
                }
                _ => {
                    let y = a.b.log(x)?;
                    a.b.scale(y, std::f32::consts::LOG10_E)?
                }
            }])
        }
        "tan" => {
            let x = a.tensor(0)?;
            let [sine, cosine] = [a.b.unary(x, Unary::Sin)?, a.b.unary(x, Unary::Cos)?];
            Ok(vec![a.b.div(sine, cosine)?])
        }
        "threshold" | "hardshrink" | "softshrink" => {
            let x = a.tensor(0)?;
            let limit = a.number(1, if op == "threshold" { "threshold" } else { "lambd" }, 0.5)?;
            if op == "softshrink" {
                let inside = a.b.unary(x, Unary::Clamp(-limit, limit))?;
                return Ok(vec![a.b.sub(x, inside)?]);
            }
            let size = if op == "threshold" { x } else { a.b.unary(x, Unary::Abs)? };
            let bound = a.constant("bound", &[], vec![limit])?;
            let within = a.b.less_equal(size, bound)?;
            let value = if op == "threshold" { a.number(2, "value", 0.0)? } else { 0.0 };
            let value = a.constant("value", &[], vec![value])?;
            Ok(vec![a.b.select(within, value, x)?])
        }
        "add" | "sub" => {
            let alpha = a.number(9, "alpha", 1.0)?;
            if a.has_keywords_but(&["alpha"]) {
                return Err(Refusal::Unknown);
            }
            let [x, other] = [a.tensor(0)?, a.tensor(1)?];
            Ok(vec![a.plus(x, if op == "add" { alpha } else { -alpha }, other)?])
        }
        "mul" => a.binary(Binary::Mul),
        "div" if variant == "no_rounding_mode" => a.binary(Binary::Div),
        "true_divide" => a.binary(Binary::Div),
        "maximum" | "fmax" => a.binary(Binary::Maximum),
        "minimum" | "fmin" => a.binary(Binary::Minimum),
        "max" if variant == "binary" => a.binary(Binary::Maximum),
        "min" if variant == "binary" => a.binary(Binary::Minimum),
        "pow" | "float_power" => a.binary(Binary::Pow),
        "atan2" => a.binary(Binary::Atan2),
        "eq" => a.binary(Binary::Equal),
        "lt" => a.binary(Binary::Less),
        "le" => a.binary(Binary::LessEqual),
        "gt" | "ge" => {
            let [x, other] = [a.tensor(0)?, a.tensor(1)?];
            let function = if op == "gt" { Binary::Less } else { Binary::LessEqual };
            Ok(vec![a.b.binary(function, other, x)?])
        }
        "ne" => {
            let [x, other] = [a.tensor(0)?, a.tensor(1)?];
            let equal = a.b.equal(x, other)?;
            let negated = a.b.scale(equal, -1.0);
            Ok(vec![a.offset(negated, 1.0)?])
        }
        "rsub" if !a.has_keywords_but(&[]) => {
            let [x, other] = [a.tensor(0)?, a.tensor(1)?];
            Ok(vec![a.b.sub(other, x)?])
        }
        "hypot" => {
            let [x, other] = [a.tensor(0)?, a.tensor(1)?];
            let squares = [a.b.unary(x, Unary::Square)?, a.b.unary(other, Unary::Square)?];
            let sum = a.b.add(squares[0], squares[1])?;
            Ok(vec![a.b.sqrt(sum)?])
        }
        "logaddexp" => {
            let [x, other] = [a.tensor(0)?, a.tensor(1)?];
            let apart = a.b.sub(other, x)?;
            let more = a.b.unary(apart, Unary::Softplus)?;
            Ok(vec![a.b.add(x, more)?])
        }
        "xlogy" => {
            let [x, other] = [a.tensor(0)?, a.tensor(1)?];
            let logarithm = a.b.log(other)?;
            Ok(vec![a.b.mul(x, logarithm)?])
        }
        "lerp" => {
            let [x, end] = [a.tensor(0)?, a.tensor(1)?];
            let apart = a.b.sub(end, x)?;
            let part = match a.tensor(2) {
                Ok(weight) => a.b.mul(apart, weight)?,
                Err(_) => {
                    let weight = a.number(2, "weight", 0.0)?;
                    a.b.scale(apart, weight)?
                }
            };
            Ok(vec![a.b.add(x, part)?])
        }
        "addcmul" | "addcdiv" => {
            let [x, first, second] = [a.tensor(0)?, a.tensor(1)?, a.tensor(2)?];
            let value = a.number(9, "value", 1.0)?;
            let function = if op == "addcmul" { Binary::Mul } else { Binary::Div };
            let both = a.b.binary(function, first, second)?;
            Ok(vec![a.plus(x, value, both)?])
        }
        "where" => {
            let [x, condition, other] = [a.tensor(0)?, a.tensor(1)?, a.tensor(2)?];
            Ok(vec![a.b.select(condition, x, other)?])
        }
        "masked_fill" => {
            let [x, mask] = [a.tensor(0)?, a.tensor(1)?];
            let value = match a.tensor(2) {
                Ok(value) => value,
                Err(_) => {
                    let value = a.number(2, "value", 0.0)?;
                    a.constant("value", &[], vec![value])?
                }
            };
            Ok(vec![a.b.select(mask, value, x)?])
        }
        "clamp" => {
            let [x, low, high] = [a.tensor(0)?, a.tensor(1)?, a.tensor(2)?];
            let above = a.b.maximum(x, low)?;
            Ok(vec![a.b.minimum(above, high)?])
        }
        "clamp_min" => a.binary(Binary::Maximum),
        "clamp_max" => a.binary(Binary::Minimum),
        "prelu" => {
            let [x, weight] = [a.tensor(0)?, a.named_tensor(1, "weight")?];
            if a.rank(weight) > 0 && a.dims(weight) != [1] {
                return Err(Refusal::Unknown);
            }
            let weight = a.b.reshape(weight, &[])?;
            let [above, below] = [a.b.relu(x)?, a.b.unary(x, Unary::AtMost(0.0))?];
            let scaled = a.b.mul(below, weight)?;
            Ok(vec![a.b.add(above, scaled)?])
        }
        "glu" => {
            let x = a.tensor(0)?;
            let last = Value::from(-1);
            let given = a.argument(1, "dim");
            let axis = a.axis(if given.is_null() { &last } else { given }, a.rank(x))?;
            let half = a.dims(x)[axis] / 2;
            let [value, gate] = [a.b.slice(x, axis, 0, half)?, a.b.slice(x, axis, half, half)?];
            let gate = a.b.sigmoid(gate)?;
            Ok(vec![a.b.mul(value, gate)?])
        }
        "sum" | "mean" | "amax" | "amin" | "logsumexp" | "var" | "std" => {
            let rank = a.rank(a.tensor(0)?);
            let axes = a.axes(1, "dim", rank)?;
            if a.argument(1, "dim").is_boolean()
                || a.has_keywords_but(&["dim", "keepdim", "unbiased", "correction"])
            {
                return Err(Refusal::Unknown);
            }
            let keep = a.is(if op == "logsumexp" { 2 } else { 9 }, "keepdim");
            let unbiased = a.argument(9, "unbiased").as_bool();
            let correction = match a.argument(9, "correction") {
                Value::Null => usize::from(unbiased.unwrap_or(true)),
                value => value.as_u64().ok_or(Refusal::Unknown)? as usize,
            };
            let y = a.reduction(keep, &axes, |b, x, axes| match op {
                "sum" => b.sum(x, axes),
                "mean" => b.mean(x, axes),
                "amax" => b.max(x, axes),
                "amin" => b.min(x, axes),
                "logsumexp" => b.logsumexp(x, axes),
                "var" => b.variance(x, axes, correction),
                _ => {
                    let variance = b.variance(x, axes, correction)?;
                    b.sqrt(variance)
                }
            })?;
            Ok(vec![y])
        }
        "max" | "min" if variant == "reduction_no_dim" => {
            let axes: Vec<usize> = (0..a.rank(a.tensor(0)?)).collect();
            Ok(vec![a.reduction(false, &axes, |b, x, axes| match op {
                "max" => b.max(x, axes),
                _ => b.min(x, axes),
            })?])
        }
        "max" | "min" => {
            let x = a.tensor(0)?;
            let axis = a.axis(a.argument(1, "dim"), a.rank(x))?;
            let keep = a.is(2, "keepdim");
            let y = a.reduction(keep, &[axis], |b, x, axes| match op {
                "max" => b.max(x, axes),
                _ => b.min(x, axes),
            })?;
            let compared = if op == "max" { x } else { a.b.scale(x, -1.0)? };
            let place = a.b.argmax(compared, axis)?;
            let place = if keep { a.b.unsqueeze(place, &[axis])? } else { place };
            Ok(vec![y, place])
        }
        "argmax" | "argmin" => {
            let x = a.tensor(0)?;
            let compared = if op == "argmax" { x } else { a.b.scale(x, -1.0)? };
            let keep = a.is(2, "keepdim");
            if a.argument(1, "dim").is_null() {
                let rank = a.rank(x);
                let count = a.dims(x).iter().product();
                let flat = a.b.reshape(compared, &[count])?;
                let place = a.b.argmax(flat, 0)?;
                let ones = vec![1; if keep { rank } else { 0 }];
                return Ok(vec![a.b.reshape(place, &ones)?]);
            }
            let axis = a.axis(a.argument(1, "dim"), a.rank(x))?;
            let place = a.b.argmax(compared, axis)?;
            Ok(vec![if keep { a.b.unsqueeze(place, &[axis])? } else { place }])
        }
        "cumsum" => {
            let x = a.tensor(0)?;
            let axis = a.axis(a.argument(1, "dim"), a.rank(x))?;
            Ok(vec![a.b.cumsum(x, axis)?])
        }
        "softmax" | "log_softmax" | "softmin" => {
            let x = a.tensor(0)?;
            let axis = a.axis(a.argument(1, "dim"), a.rank(x))?;
            if a.has_keywords_but(&["dim"]) {
                return Err(Refusal::Unknown);
            }
            let x = if op == "softmin" { a.b.scale(x, -1.0)? } else { x };
            let total = a.b.logsumexp(x, &[axis])?;
            let total = a.b.unsqueeze(total, &[axis])?;
            let logarithm = a.b.sub(x, total)?;
            Ok(vec![if op == "log_softmax" { logarithm } else { a.b.exp(logarithm)? }])
        }
        "norm" if variant == "fro" && !a.has_keywords_but(&[]) && a.count() <= 2 => {
            let axes: Vec<usize> = (0..a.rank(a.tensor(0)?)).collect();
            Ok(vec![a.reduction(false, &axes, |b, x, axes| {
                let squares = b.unary(x, Unary::Square)?;
                let sum = b.sum(squares, axes)?;
                b.sqrt(sum)
            })?])
        }
        "reshape" | "view" => {
            let x = a.tensor(0)?;
            let mut dims = a.lengths(a.argument(1, "shape"))?;
            let count = a.dims(x).iter().product::<usize>() as i64;
            let known: i64 = dims.iter().filter(|dim| **dim >= 0).product();
            for dim in dims.iter_mut().filter(|dim| **dim < 0) {
                *dim = count / known;
            }
            let dims: Vec<usize> = dims.iter().map(|dim| *dim as usize).collect();
            Ok(vec![a.b.reshape(x, &dims)?])
        }
        "flatten" => {
            let x = a.tensor(0)?;
            let rank = a.rank(x);
            let [zero, minus_one] = [Value::from(0), Value::from(-1)];
            let or = |value: &'_ Value, default: &'_ Value| -> Value {
                if value.is_null() { default.clone() } else { value.clone() }
            };
            let first = a.axis(&or(a.argument(1, "start_dim"), &zero), rank)?;
            let last = a.axis(&or(a.argument(2, "end_dim"), &minus_one), rank)?;
            let dims = a.dims(x);
            let middle = dims[first..=last].iter().product();
            let dims = [&dims[..first], &[middle], &dims[last + 1..]].concat();
            Ok(vec![a.b.reshape(x, &dims)?])
        }
        "squeeze" | "unsqueeze" => {
            let x = a.tensor(0)?;
            let rank = a.rank(x);
            if op == "unsqueeze" {
                let axis = a.axis(a.argument(1, "dim"), rank + 1)?;
                return Ok(vec![a.b.unsqueeze(x, &[axis])?]);
            }
            let is_none = a.argument(1, "dim").as_array().is_some_and(Vec::is_empty);
            let axes = if is_none { Vec::new() } else { a.axes(1, "dim", rank)? };
            let dims = a.dims(x);
            let kept = (0..rank).filter(|axis| !(axes.contains(axis) && dims[*axis] == 1));
            let dims: Vec<usize> = kept.map(|axis| dims[axis]).collect();
            Ok(vec![a.b.reshape(x, &dims)?])
        }
        "permute" => {
            let x = a.tensor(0)?;
            let axes = a.axes(1, "dims", a.rank(x))?;
            Ok(vec![a.b.permute(x, &axes)?])
        }
        "transpose" | "t" => {
            let x = a.tensor(0)?;
            let rank = a.rank(x);
            let mut axes: Vec<usize> = (0..rank).collect();
            if op == "transpose" {
                let [first, second] = [a.argument(1, "dim0"), a.argument(2, "dim1")];
                axes.swap(a.axis(first, rank)?, a.axis(second, rank)?);
            } else {
                axes.reverse();
            }
            Ok(vec![a.b.permute(x, &axes)?])
        }
        "expand" | "broadcast_to" => {
            let x = a.tensor(0)?;
            let own = a.dims(x);
            let dims = a.lengths(a.argument(1, "size"))?;
            let absent = dims.len() - own.len();
            let known = |(axis, dim): (usize, &i64)| {
                if *dim < 0 { own[axis - absent] } else { *dim as usize }
            };
            let dims: Vec<usize> = dims.iter().enumerate().map(known).collect();
            Ok(vec![a.b.broadcast_to(x, &dims)?])
        }
        "cat" | "hstack" | "vstack" => {
            let parts = a.sample["args"][0].as_array().unwrap().clone();
            let parts: Vec<TensorId> =
                parts.iter().map(|part| a.x[part["tensor"].as_u64().unwrap() as usize]).collect();
            let rank = a.rank(parts[0]);
            let axis = match (op, rank) {
                ("cat", _) => {
                    let zero = Value::from(0);
                    let given = a.argument(1, "dim");
                    a.axis(if given.is_null() { &zero } else { given }, rank)?
                }
                ("hstack", 1) => 0,
                ("hstack", 2..) => 1,
                ("vstack", 2..) => 0,
                _ => return Err(Refusal::Unknown),
            };
            Ok(vec![a.b.concat(&parts, axis)?])
        }
        "stack" => {
            let parts = a.sample["args"][0].as_array().unwrap().clone();
            let rank = a.rank(a.x[0]) + 1;
            let axis = a.axis(a.argument(1, "dim"), rank)?;
            let mut stacked = Vec::new();
            for part in &parts {
                let part = a.x[part["tensor"].as_u64().unwrap() as usize];
                stacked.push(a.b.unsqueeze(part, &[axis])?);
            }
            Ok(vec![a.b.concat(&stacked, axis)?])
        }
        "chunk" | "split" => {
            let x = a.tensor(0)?;
            let zero = Value::from(0);
            let given = a.argument(2, "dim");
            let axis = a.axis(if given.is_null() { &zero } else { given }, a.rank(x))?;
            let length = a.dims(x)[axis];
            let sizes = match a.argument(1, "chunks") {
                Value::Array(_) => a.lengths(a.argument(1, "chunks"))?,
                value => {
                    let given = value.as_u64().ok_or(Refusal::Unknown)? as usize;
                    let each = if op == "chunk" { length.div_ceil(given) } else { given };
                    let whole = (0..length).step_by(each);
                    whole.map(|start| each.min(length - start) as i64).collect()
                }
            };
            let (mut start, mut parts) = (0, Vec::new());
            for size in sizes {
                parts.push(a.b.slice(x, axis, start, size as usize)?);
                start += size as usize;
            }
            Ok(parts)
        }
        "narrow" | "select" => {
            let x = a.tensor(0)?;
            let axis = a.axis(a.argument(1, "dim"), a.rank(x))?;
            let dims = a.dims(x);
            let start = a.axis(a.argument(2, "start"), dims[axis])?;
            if op == "narrow" {
                let length = a.argument(3, "length").as_u64().ok_or(Refusal::Unknown)?;
                return Ok(vec![a.b.slice(x, axis, start, length as usize)?]);
            }
            let entry = a.b.slice(x, axis, start, 1)?;
            let left = [&dims[..axis], &dims[axis + 1..]].concat();
            Ok(vec![a.b.reshape(entry, &left)?])
        }
        "repeat" | "tile" => {
            let mut y = a.tensor(0)?;
            let times = a.lengths(a.argument(1, "repeats"))?;
            let rank = a.rank(y);
            if times.len() != rank || times.iter().any(|times| *times < 1 || *times > 8) {
                return Err(Refusal::Unknown);
            }
            for (axis, times) in times.iter().enumerate() {
                y = a.b.concat(&vec![y; *times as usize], axis)?;
            }
            Ok(vec![y])
        }
        "roll" => {
            let x = a.tensor(0)?;
            let axis = a.axis(a.argument(2, "dims"), a.rank(x))?;
            let length = a.dims(x)[axis] as i64;
            let shift = a.argument(1, "shifts").as_i64().ok_or(Refusal::Unknown)?;
            let front = shift.rem_euclid(length) as usize;
            if front == 0 {
                return Ok(vec![x]);
            }
            let behind = length as usize - front;
            let parts = [a.b.slice(x, axis, behind, front)?, a.b.slice(x, axis, 0, behind)?];
            Ok(vec![a.b.concat(&parts, axis)?])
        }
        "pad" => indexing::pad(a, variant),
        "tril" | "triu" => {
            let x = a.tensor(0)?;
            let dims = a.dims(x);
            let [rows, columns] = dims[dims.len() - 2..] else { return Err(Refusal::Unknown) };
            let diagonal = a.argument(1, "diagonal").as_i64().unwrap_or(0);
            let is_kept = |at: usize| {
                let above = (at % columns) as i64 - (at / columns) as i64 - diagonal;
                if op == "tril" { above <= 0 } else { above >= 0 }
            };
            let mask = (0..rows * columns).map(|at| if is_kept(at) { 1.0 } else { 0.0 }).collect();
            let mask = a.constant("mask", &[rows, columns], mask)?;
            Ok(vec![a.b.binary(Binary::Keep, x, mask)?])
        }
        "mm" | "bmm" | "matmul" => {
            let [x, y] = [a.tensor(0)?, a.tensor(1)?];
            if a.rank(x) < 2 || a.rank(x) != a.rank(y) {
                return Err(Refusal::Unknown);
            }
            Ok(vec![a.b.matmul(x, y, false, false)?])
        }
        "mv" | "dot" | "outer" => {
            let [x, y] = [a.tensor(0)?, a.tensor(1)?];
            let count = a.dims(y)[0];
            let [left, right] = match op {
                "mv" => [x, a.b.reshape(y, &[count, 1])?],
                "dot" => [a.b.reshape(x, &[1, count])?, a.b.reshape(y, &[count, 1])?],
                _ => [a.b.unsqueeze(x, &[1])?, a.b.reshape(y, &[1, count])?],
            };
            let product = a.b.matmul(left, right, false, false)?;
            let dims = a.dims(product);
            let dims = match op {
                "mv" => &dims[..1],
                "dot" => &[],
                _ => &dims[..],
            };
            Ok(vec![a.b.reshape(product, dims)?])
        }
        "inner" => {
            let [x, y] = [a.tensor(0)?, a.tensor(1)?];
            if [x, y].map(|side| a.rank(side)) != [2, 2] {
                return Err(Refusal::Unknown);
            }
            Ok(vec![a.b.matmul(x, y, false, true)?])
        }
        "addmm" | "baddbmm" | "addbmm" => {
            let [x, left, right] = [a.tensor(0)?, a.tensor(1)?, a.tensor(2)?];
            let [alpha, beta] = [a.number(9, "alpha", 1.0)?, a.number(9, "beta", 1.0)?];
            let mut product = a.b.matmul(left, right, false, false)?;
            if op == "addbmm" {
                product = a.b.sum(product, &[0])?;
            }
            let product = a.b.scale(product, alpha)?;
            let x = a.b.scale(x, beta)?;
            Ok(vec![a.b.add(product, x)?])
        }
        "linear" => {
            let [x, weight] = [a.tensor(0)?, a.tensor(1)?];
            if a.rank(x) < 2 || a.rank(weight) != 2 {
                return Err(Refusal::Unknown);
            }
            let bias = a.tensor(2).ok();
            Ok(vec![a.b.linear(x, weight, bias)?])
        }
        "conv1d" | "conv2d" | "conv_transpose1d" | "conv_transpose2d" => {
            pictures::convolution(a, op)
        }
        "max_pool1d" | "max_pool2d" | "avg_pool1d" | "avg_pool2d" => pictures::pooling(a, op),
        "adaptive_avg_pool2d" => pictures::adaptive_pooling(a),
        "interpolate" | "upsample_nearest" => pictures::interpolation(a, op),
        "gather" | "index_select" | "take_along_dim" => indexing::gather(a, op),
        "embedding" => indexing::embedding(a),
        "flip" => indexing::flip(a),
        "topk" | "sort" => indexing::largest(a, op),
        "one_hot" => indexing::one_hot(a),
        "pixel_shuffle" => {
            let x = a.tensor(0)?;
            let factor = a.argument(1, "upscale_factor").as_u64().ok_or(Refusal::Unknown)? as usize;
            let [n, c, h, w] = a.dims(x)[..] else { return Err(Refusal::Unknown) };
            let channels = c / factor / factor;
            let y = a.b.reshape(x, &[n * channels, factor, factor, h, w])?;
            let y = a.b.permute(y, &[0, 3, 1, 4, 2])?;
            Ok(vec![a.b.reshape(y, &[n, channels, h * factor, w * factor])?])
        }
        "layer_norm" | "rms_norm" => norms::over_last_axes(a, op),
        "group_norm" | "instance_norm" => norms::by_groups(a, op),
        "batch_norm" => norms::over_batch(a),
        "scaled_dot_product_attention" => norms::attention(a),
        "cosine_similarity" => {
            let [first, second] = [a.tensor(0)?, a.tensor(1)?];
            let rank = a.rank(first);
            if rank == 0 || a.rank(second) != rank {
                return Err(Refusal::Unknown);
            }
            let mut dims = a.dims(first);
            for (dim, other) in dims.iter_mut().zip(a.dims(second)) {
                *dim = (*dim).max(other);
            }
            let [first, second] =
                [a.b.broadcast_to(first, &dims)?, a.b.broadcast_to(second, &dims)?];
            let axis = [a.axis(a.argument(2, "dim"), rank)?];
            let least = a.number(3, "eps", 1e-8)?;
            let least = a.constant("least", &[], vec![least])?;
            let product = a.b.mul(first, second)?;
            let mut y = a.b.sum(product, &axis)?;
            for x in [first, second] {
                let squares = a.b.unary(x, Unary::Square)?;
                let sum = a.b.sum(squares, &axis)?;
                let norm = a.b.sqrt(sum)?;
                let norm = a.b.maximum(norm, least)?;
                y = a.b.div(y, norm)?;
            }
            Ok(vec![y])
        }
        "movedim" => {
            let x = a.tensor(0)?;
            let rank = a.rank(x);
            let [from, to] = [a.axes(1, "", rank)?, a.axes(2, "", rank)?];
            let mut axes = vec![rank; rank];
            for (from, to) in from.iter().zip(&to) {
                axes[*to] = *from;
            }
            let mut left = (0..rank).filter(|axis| !from.contains(axis));
            for axis in &mut axes {
                if *axis == rank {
                    *axis = left.next().unwrap();
                }
            }
            Ok(vec![a.b.permute(x, &axes)?])
        }
        "dropout" if !a.is(2, "training") && a.sample["kwargs"]["training"] == false => {
            Ok(vec![a.tensor(0)?])
        }
        "cross_entropy" | "nll_loss" => losses::of_classes(a, op),
        "mse_loss" | "l1_loss" | "smooth_l1_loss" | "huber_loss" => {
            let [x, target] = [a.tensor(0)?, a.tensor(1)?];
            if a.has_keywords_but(&["reduction", "beta", "delta"]) || a.dims(x) != a.dims(target) {
                return Err(Refusal::Unknown);
            }
            let apart = a.b.sub(x, target)?;
            let losses = match op {
                "mse_loss" => a.b.unary(apart, Unary::Square)?,
                "l1_loss" => a.b.unary(apart, Unary::Abs)?,
                _ => {
                    // With the error cut at delta, c (|e| - c/2) is both of its branches.
                    let delta =
                        a.number(9, if op == "huber_loss" { "delta" } else { "beta" }, 1.0)?;
                    if delta <= 0.0 {
                        return Err(Refusal::Unknown);
                    }
                    let size = a.b.unary(apart, Unary::Abs)?;
                    let cut = a.b.unary(size, Unary::AtMost(delta))?;
                    let rest = a.plus(size, -0.5, cut)?;
                    let y = a.b.mul(cut, rest)?;
                    if op == "huber_loss" { y } else { a.b.scale(y, 1.0 / delta)? }
                }
            };
            reduced(a, losses)
        }
        "soft_margin_loss" => {
            let [x, target] = [a.tensor(0)?, a.tensor(1)?];
            let product = a.b.mul(x, target)?;
            let negated = a.b.scale(product, -1.0)?;
            let losses = a.b.unary(negated, Unary::Softplus)?;
            reduced(a, losses)
        }
        "binary_cross_entropy_with_logits" => {
            let [x, target] = [a.tensor(0)?, a.tensor(1)?];
            if a.has_keywords_but(&["reduction"]) || a.count() > 2 {
                return Err(Refusal::Unknown);
            }
            // softplus(x) - x target
            let softplus = a.b.unary(x, Unary::Softplus)?;
            let product = a.b.mul(x, target)?;
            let losses = a.b.sub(softplus, product)?;
            reduced(a, losses)
        }
        "kl_div" => {
            let [x, target] = [a.tensor(0)?, a.tensor(1)?];
            if !a.is(9, "log_target") {
                return Err(Refusal::Unknown);
            }
            let apart = a.b.sub(target, x)?;
            let probability = a.b.exp(target)?;
            let losses = a.b.mul(probability, apart)?;
            reduced(a, losses)
        }
        "margin_ranking_loss" => {
            let [first, second, sign] = [a.tensor(0)?, a.tensor(1)?, a.tensor(2)?];
            let margin = a.number(9, "margin", 0.0)?;
            let apart = a.b.sub(second, first)?;
            let signed = a.b.mul(apart, sign);
            let over = a.offset(signed, margin)?;
            let losses = a.b.relu(over)?;
            reduced(a, losses)
        }
        "poisson_nll_loss" => {
            let [x, target] = [a.tensor(0)?, a.tensor(1)?];
            if !a.sample["kwargs"]["log_input"].as_bool().unwrap_or(true) || a.is(9, "full") {
                return Err(Refusal::Unknown);
            }
            let [power, product] = [a.b.exp(x)?, a.b.mul(x, target)?];
            let losses = a.b.sub(power, product)?;
            reduced(a, losses)
        }
        _ => Err(Refusal::Unknown),
    }
}

/// Applies the reduction that a sample of a loss names, whose mean is over the elements.
pub(super) fn reduced(a: &mut Arguments, losses: TensorId) -> Built {
    let count = a.dims(losses).iter().product::<usize>();
    reduced_over(a, losses, count as f32)
}

/// Applies the reduction that a sample of a loss names, whose mean is the sum over `total`.
pub(super) fn reduced_over(a: &mut Arguments, losses: TensorId, total: f32) -> Built {
    let first = usize::from(a.b.shape(losses).is_batched());
    let axes: Vec<usize> = (first..a.rank(losses)).collect();
    let rows = a.dims(losses).first().copied().unwrap_or(1);
    let divisor = match a.sample["kwargs"]["reduction"].as_str() {
        Some("none") => return Ok(vec![losses]),
        Some("sum") => 1.0,
        Some("batchmean") => rows as f32,
        Some("mean") | None => total,
        Some(_) => return Err(Refusal::Unknown),
    };
    let sum = a.b.sum(losses, &axes)?;
    Ok(vec![a.b.scale(sum, 1.0 / divisor)?])
}
