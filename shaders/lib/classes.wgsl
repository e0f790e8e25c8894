// Parameters and targets of the kernels of the cross-entropy (cross_entropy.wgsl,
// cross_entropy_subgroups.wgsl) and of its gradient (cross_entropy_grad.wgsl).

struct Params {
    n: u32,
    v: u32,
    across: u32,            // invocations per row of gradients
    step: u32,              // elements from one of an invocation to its next
    first: u32,             // the class of column 0
    classes: u32,           // of all columns, whoever has them
    kept: f32,              // probability of a target above that of other classes
    even: f32,              // probability of every class, by label smoothing
    loss_scale: f32,        // factor of gradients, a power of two
}
var<immediate> p: Params;

@group(0) @binding(1) var<storage, read> targets: array<u32>;         // (n)
