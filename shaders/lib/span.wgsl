// The elements of an invocation where a workgroup of 64 has `size` neighbouring ones: from the
// first number on every 64th below the second, so that neighbours touch neighbours. 8 elements of
// 4 bytes, or 4 vectors of 16 bytes, make up for what a software adapter pays per invocation.
fn span(group: vec3u, groups: vec3u, local: u32, size: u32, count: u32) -> vec2u {
    let start = workgroup_of(group, groups) * size;
    return vec2u(start + local, min(start + size, count));
}
