//! AdamW over a range of a bucket, with the moments in bfloat16. Twin of
//! `shaders/adamw_bf16.wgsl`; [`bf16_moments::update`] is its reference and its CPU kernel.

use crate::bf16_moments;
use crate::{Dispatch, Operand, Shader};
use potluck_graph::{MomentRounding, UpdateRange};

/// Returns the dispatch of a range whose moments are rounded, with the operands of [`super::adamw`]
/// and its `params`: one invocation per 4 words of the moments.
pub fn dispatch(
    operands: Vec<Operand>,
    mut params: Vec<u32>,
    range: &UpdateRange,
    rounding: &MomentRounding,
) -> Dispatch {
    params.extend(bf16_moments::rounding_params(rounding));
    let shader = Shader::new("adamw_bf16", "adamw_bf16");
    Dispatch { shader, operands, params, groups: bf16_moments::groups(range) }
}

#[cfg(test)]
mod tests {
    use crate::ops::adamw::TWIN;
    use crate::testing::update::check_rounded_updates;
    use potluck_graph::Update;

    #[test]
    fn moments_in_bf16_are_rounded_alike_everywhere() {
        let steps = [1, 2, 3].map(|step| Update::AdamW {
            lr: 0.01,
            beta1: 0.9,
            beta2: 0.99,
            eps: 1e-8,
            weight_decay: 0.5,
            correction1: 1.0 - 0.9f32.powi(step),
            correction2: 1.0 - 0.99f32.powi(step),
        });
        check_rounded_updates(&steps, &TWIN);
    }
}
