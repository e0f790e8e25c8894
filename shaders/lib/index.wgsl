// The number of an invocation in a grid of workgroups of 64 that is folded from x into y where it
// would be too long (`kernels::dispatch::grid`). No bytes are moved.
fn index(id: vec3u, groups: vec3u) -> u32 {
    return id.x + id.y * (groups.x * 64u);
}
