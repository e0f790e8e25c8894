//! Stochastic gradient descent with momentum over a range of a bucket, with the moment in bfloat16.
//! Twin of `shaders/sgd_bf16.wgsl`; [`bf16_moments::update`] is its reference and its CPU kernel.

use crate::bf16_moments;
use crate::{Dispatch, Operand, Shader};
use potluck_graph::{MomentRounding, UpdateRange};

/// Returns the dispatch of a range whose moments are rounded, with the operands of [`super::sgd`]
/// and its `params`: one invocation per 4 words of the moments.
pub fn dispatch(
    operands: Vec<Operand>,
    mut params: Vec<u32>,
    range: &UpdateRange,
    rounding: &MomentRounding,
) -> Dispatch {
    params.extend(bf16_moments::rounding_params(rounding));
    let shader = Shader::new("sgd_bf16", "sgd_bf16");
    Dispatch { shader, operands, params, groups: bf16_moments::groups(range) }
}

#[cfg(test)]
mod tests {
    use crate::ops::sgd::TWIN;
    use crate::testing::update::check_rounded_updates;
    use potluck_graph::Update;

    #[test]
    fn moments_in_bf16_are_rounded_alike_everywhere() {
        let step = Update::Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.2 };
        check_rounded_updates(&[step; 3], &TWIN);
    }
}
