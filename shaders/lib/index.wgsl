// The number of an invocation in a grid of workgroups of 64. No bytes are moved.
fn index(id: vec3u, groups: vec3u) -> u32 {
    return invocation_of(id, groups, 64u);
}
