// The elements of invocation `a` of a run (`kernels::dispatch::Runs`): from the first number on
// every `step`-th below the second. No bytes are moved.
fn run(a: u32, step: u32, length: u32) -> vec2u {
    let start = a / step * 8u * step;
    return vec2u(start + a % step, min(start + 8u * step, length));
}
