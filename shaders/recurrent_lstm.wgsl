// One time step of an LSTM, and of its gradient, behind the product with its inputs. Gates are i,
// f, g, o, and z = x + W h' + bias, with h' and c' those of the step before.
//
//   forward   i, f, o = sigmoid(z), g = tanh(z);  c = f c' + i g;  y = o tanh(c)
//   backward  dh = dy + W^T dx of the step after;  dc = dh o (1 - tanh(c)^2) + what that has left
//             dx: dc g i (1 - i), dc c' f (1 - f), dc i (1 - g^2), dh tanh(c) o (1 - o)
//             and leaves dc f in dc0, which is that of the initial state at the end
//   state     dh0 = W^T dx of the first step
//
// Prepended (src/kernels/ops/recurrent/steps.rs): Value, a vector of 4 hidden columns or one, and
// its functions sigmoid and squash, the hyperbolic tangent; FROM_STATE, 1 if h' is the initial
// state; the matrix; and the entry point, which computes products for some ROWS samples per
// invocation and calls one of the functions `finish`. 2 h FLOPs per gate on 4 h (1 + 1 / ROWS)
// bytes.
// uses lib/elementwise
// uses lib/recurrent

// forward binds x, the matrix, bias, h0, c0, y, gates, cells; x in place of states that are not.
@group(0) @binding(0) var<storage, read> x: array<Value>;                // (b, t, 4, width)
@group(0) @binding(2) var<storage, read> bias: array<Value>;             // (4, width)
@group(0) @binding(3) var<storage, read> h0: array<Value>;               // (b, width)
@group(0) @binding(4) var<storage, read> c0: array<Value>;               // (b, width)
@group(0) @binding(5) var<storage, read_write> y: array<Value>;          // (b, t, width)
@group(0) @binding(6) var<storage, read_write> new_gates: array<Value>;  // (b, t, 4, width)
@group(0) @binding(7) var<storage, read_write> new_cells: array<Value>;  // (b, t, width)
// Gradients bind gates, the matrix, cells, dy, c0 or dy again, dx, dh0, dc0.
@group(0) @binding(0) var<storage, read> gates: array<Value>;            // (b, t, 4, width)
@group(0) @binding(2) var<storage, read> cells: array<Value>;            // (b, t, width)
@group(0) @binding(3) var<storage, read> dy: array<Value>;               // (b, t, width)
@group(0) @binding(5) var<storage, read_write> dx: array<Value>;         // (b, t, 4, width)
@group(0) @binding(6) var<storage, read_write> dh0: array<Value>;        // (b, width)
@group(0) @binding(7) var<storage, read_write> dc0: array<Value>;        // (b, width)

// Values of the product of a gradient: those of the step after.
fn slope(sample: u32, q: u32) -> Value {
    return dx[(sample * p.t + p.step + 1u) * 4u * p.width + q];
}

fn finish_forward(sample: u32, column: u32, zi: Value, zf: Value, zg: Value, zo: Value) {
    let row = sample * p.t + p.step;
    let at = 4u * row * p.width + column;
    let i = sigmoid(zi + x[at] + bias[column]);
    let f = sigmoid(zf + x[at + p.width] + bias[column + p.width]);
    let g = squash(zg + x[at + 2u * p.width] + bias[column + 2u * p.width]);
    let o = sigmoid(zo + x[at + 3u * p.width] + bias[column + 3u * p.width]);
    var c = i * g;
    if (p.step > 0u) {
        c += f * new_cells[(row - 1u) * p.width + column];
    } else if (p.has_state == 1u) {
        c += f * c0[sample * p.width + column];
    }
    new_gates[at] = i;
    new_gates[at + p.width] = f;
    new_gates[at + 2u * p.width] = g;
    new_gates[at + 3u * p.width] = o;
    new_cells[row * p.width + column] = c;
    y[row * p.width + column] = o * squash(c);
}

fn finish_backward(sample: u32, column: u32, product: Value) {
    let row = sample * p.t + p.step;
    let at = 4u * row * p.width + column;
    let own = sample * p.width + column;
    let i = gates[at];
    let f = gates[at + p.width];
    let g = gates[at + 2u * p.width];
    let o = gates[at + 3u * p.width];
    let squashed = squash(cells[row * p.width + column]);
    let dh = dy[row * p.width + column] + product;
    var dc = dh * o * (1.0 - squashed * squashed);
    if (p.step + 1u < p.t) { dc += dc0[own]; }
    var before = Value();
    if (p.step > 0u) {
        before = cells[(row - 1u) * p.width + column];
    } else if (p.has_state == 1u) {
        before = c0[own];
    }
    dx[at] = dc * g * i * (1.0 - i);
    dx[at + p.width] = dc * before * f * (1.0 - f);
    dx[at + 2u * p.width] = dc * i * (1.0 - g * g);
    dx[at + 3u * p.width] = dh * squashed * o * (1.0 - o);
    dc0[own] = dc * f;
}

fn finish_state(sample: u32, column: u32, product: Value) {
    dh0[sample * p.width + column] = product;
}
