// The weight decays of the vector of 4 elements at this place of a bucket: p.decay before
// p.decay_end, then 0.
fn decay_at(i: u32) -> Value {
    let decays = 4u * i + vec4u(0u, 1u, 2u, 3u) < vec4u(p.decay_end);
    return select(vec4f(0.0), vec4f(p.decay), decays);
}
