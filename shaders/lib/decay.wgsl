// The weight decay of the element at this place of a bucket: p.decay before p.decay_end, then 0.
fn decay_at(i: u32) -> Value {
    return select(0.0, p.decay, i < p.decay_end);
}
