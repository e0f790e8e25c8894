// Moments as bfloat16: two in a word, the first in its low half, rounded up or down at random. The
// same bits as src/kernels/bf16_moments.rs. Needs lib/rng.

// Rounding of the elements of a range; see `MomentRounding` of src/graph/update.rs.
struct Rounding {
    key0: u32,
    key1: u32,
    number: u32,          // of the first element of the range, in its series of runs
    run: u32,
    distance: u32,
    place: u32,           // of the first element of the series
}

fn place_of(r: Rounding, element: u32) -> u32 {
    let number = r.number + element;
    return number / r.run * r.distance + r.place + number % r.run;
}

// The random words of an element of the range and the next one: the low half of a word is for the
// first moment, the high half for the second. Where the range begins in the middle of a word, the
// element is -1, and nobody uses its word.
fn rounding_words(r: Rounding, element: u32) -> array<u32, 2> {
    let places = vec2u(place_of(r, element), place_of(r, element + 1u));
    let key = vec2u(r.key0, r.key1);
    let block = threefry2x32(key, vec2u(places.x / 2u, 0u));
    var next = block;
    if (places.y / 2u != places.x / 2u) { next = threefry2x32(key, vec2u(places.y / 2u, 0u)); }
    let odd = (places & vec2u(1u)) == vec2u(1u);
    return array(select(block.x, block.y, odd.x), select(next.x, next.y, odd.y));
}

// The half of a word, 0 or 1, as a float.
fn bf16_of(word: u32, half: u32) -> f32 {
    return bitcast<f32>(select(word << 16u, word & 0xffff0000u, half == 1u));
}

// The word with one of its halves replaced by a float, rounded with the low half of a random word.
fn with_bf16(word: u32, half: u32, value: f32, random: u32) -> u32 {
    let bits = bitcast<u32>(value);
    // Infinity stays infinity, and NaN stays NaN: with its quiet bit, so that it has a bit left.
    let exact = (bits >> 16u) | select(0u, 0x40u, (bits & 0x7fffffu) != 0u);
    let is_finite = (bits & 0x7f800000u) != 0x7f800000u;
    let rounded = select(exact, (bits + (random & 0xffffu)) >> 16u, is_finite);
    return select((word & 0xffff0000u) | rounded, (word & 0xffffu) | (rounded << 16u), half == 1u);
}
