// AdamW as in adamw.wgsl, with the moments in bfloat16: two in a word, rounded up or down at
// random.
// uses lib/span
// uses lib/bf16_pair
// uses lib/rng
//
// One invocation per 4 words of the range's moments, 20 bytes moved per element, and about 60
// integer operations for the random numbers.

struct Params {
    start: u32,
    length: u32,
    decay_end: u32,
    scale: f32,
    decay: f32,
    beta1: f32,
    rest1: f32,           // 1 - beta1
    beta2: f32,
    rest2: f32,           // 1 - beta2
    rate: f32,            // lr / correction1
    correction2: f32,
    eps: f32,
    rounding: Rounding,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> gradients: array<f32>;            // (bucket)
@group(0) @binding(1) var<storage, read_write> parameters: array<f32>;     // (bucket)
@group(0) @binding(2) var<storage, read_write> m: array<u32>;              // (bucket / 2)
@group(0) @binding(3) var<storage, read_write> v: array<u32>;              // (bucket / 2)

@compute @workgroup_size(64)
fn adamw_bf16(
    @builtin(workgroup_id) group: vec3u,
    @builtin(num_workgroups) groups: vec3u,
    @builtin(local_invocation_index) local: u32,
) {
    let end = p.start + p.length;
    let word = p.start / 2u;
    let own = span(group, groups, local, 256u, (end + 1u) / 2u - word);
    for (var at = own.x; at < own.y; at += 64u) {
        var averages = m[word + at];
        var squares = v[word + at];
        let first = 2u * (word + at);
        let words = rounding_words(p.rounding, first - p.start);
        for (var half = 0u; half < 2u; half++) {
            let i = first + half;
            if (i < p.start || i >= end) { continue; }
            let random = select(words[0], words[1], half == 1u);
            let g = p.scale * gradients[i];
            let average = p.beta1 * bf16_of(averages, half) + p.rest1 * g;
            let square = p.beta2 * bf16_of(squares, half) + p.rest2 * g * g;
            averages = with_bf16(averages, half, average, random);
            squares = with_bf16(squares, half, square, random >> 16u);
            var parameter = parameters[i];
            if (i < p.decay_end) { parameter -= p.decay * parameter; }
            parameters[i] = parameter - p.rate * average / (sqrt(square / p.correction2) + p.eps);
        }
        m[word + at] = averages;
        v[word + at] = squares;
    }
}
