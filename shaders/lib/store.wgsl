// Stores a finished value of a kernel without an epilogue: `c` is its output, and the value is
// added to the contents of `c` if `p.accumulate` is set. `kernels::ops::epilogue` generates other
// versions, which apply more steps to the value first. 4 bytes per value, 8 if accumulating.
fn store(at: u32, total: f32) {
    if (p.accumulate != 0u) { c[at] += total; } else { c[at] = total; }
}
