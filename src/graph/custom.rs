//! Ops of the library's user: the trait that defines one, as plain data and functions on the host.
//! `kernels` compiles and certifies its kernel, and the CPU device runs its reference.

use std::fmt;
use std::sync::Arc;

use super::builder::{BuildResult, Builder};
use super::shapes::ShapeError;
use potluck_core::{DType, HostTensorView, Shape, TensorId};

/// Op defined outside the crate: name, inputs, shape rule, gradient, f64 reference and GPU kernel.
/// [`Builder::custom`] adds it to a graph. Elementwise ops are shorter with `Elementwise`.
///
/// The reference defines the op. It runs on the CPU device, and before a device runs the kernel on
/// inputs of some sizes, the kernel must give the reference's results there on random inputs: a
/// normalized mean squared error of at most `NMSE_MAX` of `potluck-kernels`. A kernel that does not
/// compile or gives other results is `DeviceError::CustomKernel`. `check_gradient` compares the
/// gradient with differences of the reference, and `check_kernel` tests the kernel on a device
/// without a model.
///
/// # Kernel
///
/// The WGSL of [`CustomOp::kernel`] has an entry point `main`. Inputs are bound in order as
/// `var<storage, read>` at `@group(0) @binding(0)` and following, the output as
/// `var<storage, read_write>` behind them, all as `array<f32>` (`array<u32>` for ids). The words of
/// [`CustomKernel::params`] are a `var<immediate>`. Buffers have room for the largest micro-batch,
/// and micro-batches may be smaller, so `arrayLength` is not the number of elements: sizes come
/// from `params`. The kernel must write every element of the output and may not read it before.
///
/// Every device allows 7 inputs, 256 invocations and 16 KiB of memory per workgroup, and 65,535
/// workgroups per dimension; `grid` folds longer grids. The text is compiled with all of wgpu's
/// checks, so an index out of bounds reads or writes another element of the same tensor, or
/// nothing, but no other memory (on GL, that is up to the driver). llvmpipe ends loops silently
/// after 65,535 iterations per invocation.
pub trait CustomOp: Send + Sync {
    /// Returns the op's name and all parameters that change what it computes, such as `snake 0.5`:
    /// two ops of one name are the same op. It is printed in graphs, profiles and errors; tensors
    /// are named after its first word.
    fn name(&self) -> String;

    /// Returns the kinds of the inputs, from 1 to 7; by default, one input of floats.
    fn inputs(&self) -> Vec<CustomInput> {
        vec![CustomInput::default()]
    }

    /// Returns the shape of the output, which is of floats, from the shapes of as many inputs as
    /// [`CustomOp::inputs`] lists. With [`Shape::with_dims`] of an input, the output has the batch
    /// in front where the input has it.
    ///
    /// # Errors
    /// Returns the reason if the shapes do not fit.
    fn shape(&self, inputs: &[&Shape]) -> Result<Shape, String>;

    /// Adds nodes that compute the gradient of the loss by one of the inputs, given that by the
    /// output, and returns it: a tensor of the input's shape. Called for each input of floats that
    /// depends on a parameter. It may use all methods of the builder but those for inputs,
    /// parameters, blocks, outputs, losses and random numbers.
    ///
    /// # Errors
    /// Returns [`ShapeError`] if the shapes of a node do not fit; by default, that there is no
    /// gradient.
    fn gradient(&self, b: &mut Builder, node: &CustomNode, input: usize) -> BuildResult {
        Err(node.without_gradient(b, self.name(), input))
    }

    /// Computes the output, which starts as NaN, from the inputs, in row-major order.
    fn reference(&self, call: &CustomCall, inputs: &[HostTensorView<'_, f64>], output: &mut [f64]);

    /// Returns the GPU kernel of a call. Text that is the same for all sizes is compiled once.
    fn kernel(&self, call: &CustomCall) -> CustomKernel;

    /// Returns the floating-point operations of a call, for the estimate of its time; by default,
    /// 10 per element of the output.
    fn flops(&self, call: &CustomCall) -> f64 {
        10.0 * call.output_len() as f64
    }

    /// Returns dimensions of all inputs of small calls, on which the kernel is certified where they
    /// run the same text. By default there are none, and the kernel is certified on each size at
    /// which it runs: that is the strictest test, and takes the time and the memory of the
    /// reference and of one more call on the device. The shape rule gets these dimensions as
    /// shapes without a batch.
    fn probes(&self) -> Vec<Vec<Vec<usize>>> {
        Vec::new()
    }
}

/// Kind of an input of a custom op, with the values on which its kernel and its gradient are
/// tested.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CustomInput {
    /// Floats; tested on values in `low .. high`.
    Float { low: f32, high: f32 },
    /// Integers, tested on values less than `below`. They have no gradient.
    Ids { below: u32 },
}

impl CustomInput {
    /// Returns the element type of the input.
    pub fn dtype(self) -> DType {
        match self {
            Self::Float { .. } => DType::F32,
            Self::Ids { .. } => DType::U32,
        }
    }
}

/// Floats in `-3 .. 3`.
impl Default for CustomInput {
    fn default() -> Self {
        Self::Float { low: -3.0, high: 3.0 }
    }
}

/// Call of a custom op: dimensions for the valid rows of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct CustomCall<'a> {
    /// Dimensions of each input.
    pub inputs: &'a [Vec<usize>],
    pub output: &'a [usize],
}

impl CustomCall<'_> {
    /// Returns the number of elements of input `index`.
    pub fn input_len(&self, index: usize) -> usize {
        self.inputs[index].iter().product()
    }

    /// Returns the number of elements of the output.
    pub fn output_len(&self) -> usize {
        self.output.iter().product()
    }
}

/// GPU kernel of a call of a custom op; see [`CustomOp`] for the rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CustomKernel {
    /// WGSL with the entry point `main`.
    pub wgsl: String,
    /// Words of the `var<immediate>`, at most 32; floats as [`f32::to_bits`].
    pub params: Vec<u32>,
    /// Workgroups in x, y and z: each at least 1 and at most the device's limit.
    pub workgroups: [u32; 3],
}

/// Node of a custom op that is differentiated.
#[derive(Clone, Copy, Debug)]
pub struct CustomNode<'a> {
    pub inputs: &'a [TensorId],
    pub output: TensorId,
    /// Gradient of the loss by the output, of its shape.
    pub dy: TensorId,
}

/// Prefix of the error text of an op without a gradient.
const NO_GRADIENT: &str = "has no gradient";

impl ShapeError {
    /// Returns true if the reason is an op without a gradient by an input.
    pub fn is_missing_gradient(&self) -> bool {
        self.why.starts_with(NO_GRADIENT)
    }
}

impl CustomNode<'_> {
    /// Returns the error that the op of this name has no gradient by an input.
    pub fn without_gradient(&self, b: &Builder, op: String, input: usize) -> ShapeError {
        let inputs: Vec<String> = self.inputs.iter().map(|x| b.shape(*x).to_string()).collect();
        let why = format!("{NO_GRADIENT} by input {input}");
        ShapeError { op, inputs: inputs.join(", "), why }
    }
}

/// Shared custom op. Two ops with the same name are equal.
#[derive(Clone)]
pub struct SharedCustomOp(Arc<dyn CustomOp>);

impl SharedCustomOp {
    pub fn new(op: impl CustomOp + 'static) -> Self {
        Self(Arc::new(op))
    }
}

impl std::ops::Deref for SharedCustomOp {
    type Target = dyn CustomOp;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl PartialEq for SharedCustomOp {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl fmt::Debug for SharedCustomOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

/// The most inputs of a custom op: every device binds 8 tensors, and one of them is the output.
const INPUTS_MAX: usize = 7;

/// Output shape of a custom op, after a check of the number of inputs.
pub(super) fn shape(op: &SharedCustomOp, inputs: &[&Shape]) -> Result<Vec<Shape>, String> {
    match inputs.len() {
        1..=INPUTS_MAX => Ok(vec![op.shape(inputs)?]),
        count => Err(format!("takes {count} inputs, and a kernel can bind 1 to {INPUTS_MAX}")),
    }
}
