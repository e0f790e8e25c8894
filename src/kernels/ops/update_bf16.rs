//! Update rules with their moments in bfloat16. Twin of `shaders/update_bf16.wgsl`;
//! [`bf16_moments::update`] is its reference and its CPU kernel.

use super::update::with_formula;
use crate::bf16_moments;
use crate::{Dispatch, Operand, Shader};
use potluck_graph::{MomentRounding, Update, UpdateRange};

/// Returns the dispatch of a range whose moments are rounded, with the operands of
/// [`super::update`] and its `params`: one invocation per 4 words of the moments.
pub fn dispatch(
    update: &Update,
    operands: Vec<Operand>,
    mut params: Vec<u32>,
    range: &UpdateRange,
    rounding: &MomentRounding,
) -> Dispatch {
    params.extend(bf16_moments::rounding_params(rounding));
    let entry = if update.moments() == 1 { "one_moment_bf16" } else { "two_moments_bf16" };
    let shader = with_formula(Shader::new("update_bf16", entry), update, 1);
    Dispatch { shader, operands, params, groups: bf16_moments::groups(range) }
}

#[cfg(test)]
mod tests {
    use crate::ops::update::TWIN;
    use crate::testing::update::check_rounded_updates;

    #[test]
    fn moments_in_bf16_are_rounded_alike_everywhere() {
        for step in (TWIN.catalog)() {
            check_rounded_updates(&[step; 3], &TWIN);
        }
    }
}
