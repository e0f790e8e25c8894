// How a kernel stores a finished value where nothing follows it: `c` is its output, and
// `p.accumulate` says whether to add to what stands there. Beside it, `kernels::epilogue` writes
// others, which apply more steps to the value first. 4 bytes per value, 8 if accumulating.
fn store(at: u32, total: f32) {
    if (p.accumulate != 0u) { c[at] += total; } else { c[at] = total; }
}
