// Places in the grid of a dispatch, which is folded from x into y where it would be too long
// (`kernels::dispatch::grid`), and may be dispatched in parts. `p.first_workgroup`, the first
// workgroup of the part, is the last parameter of every shader (`kernels::source` adds it). No
// bytes are moved.

// The number of a workgroup in the grid.
fn workgroup_of(group: vec3u, groups: vec3u) -> u32 {
    return p.first_workgroup + group.x + group.y * groups.x;
}

// The number of an invocation in the grid, where a workgroup has `size` of them.
fn invocation_of(id: vec3u, groups: vec3u, size: u32) -> u32 {
    return p.first_workgroup * size + id.x + id.y * (groups.x * size);
}
