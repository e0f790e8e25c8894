// One time step of a GRU, and of its gradient, behind the product with its inputs. Gates are r, z,
// n; q = W h' + bias, with h' that of the step before, and p the part of q for n.
//
//   forward   r, z = sigmoid(x + q), n = tanh(x + r p);  y = (1 - z) n + z h'
//   backward  dh = dy + W^T dq of the step after + what that has left
//             dx: dn p r (1 - r), dh (h' - n) z (1 - z), dn = dh (1 - z) (1 - n^2)
//             dq: the same, with dn r for n;  and leaves dh z in dh0
//   state     dh0 += W^T dq of the first step
//
// An invocation has a Value of hidden columns of some ROWS samples. Prepended: see
// recurrent_lstm.wgsl. 2 h FLOPs per gate on 4 h (1 + 1 / ROWS) bytes.
// uses lib/elementwise
// uses lib/recurrent

// forward binds x, the matrix, bias, h0, y, gates; x in place of a state that is not.
@group(0) @binding(0) var<storage, read> x: array<Value>;                // (b, t, 3, width)
@group(0) @binding(2) var<storage, read> bias: array<Value>;             // (3, width)
@group(0) @binding(3) var<storage, read> h0: array<Value>;               // (b, width)
@group(0) @binding(4) var<storage, read_write> y: array<Value>;          // (b, t, width)
@group(0) @binding(5) var<storage, read_write> new_gates: array<Value>;  // (b, t, 4, width)
// Gradients bind gates, the matrix, y, dy, h0 or dy again, dx, dq, dh0.
@group(0) @binding(0) var<storage, read> gates: array<Value>;            // (b, t, 4, width)
@group(0) @binding(2) var<storage, read> finished: array<Value>;         // (b, t, width): y
@group(0) @binding(3) var<storage, read> dy: array<Value>;               // (b, t, width)
@group(0) @binding(4) var<storage, read> state0: array<Value>;           // (b, width): h0
@group(0) @binding(5) var<storage, read_write> dx: array<Value>;         // (b, t, 3, width)
@group(0) @binding(6) var<storage, read_write> dq: array<Value>;         // (b, t, 3, width)
@group(0) @binding(7) var<storage, read_write> dh0: array<Value>;        // (b, width)

// Values of the product of a gradient: those of the step after.
fn slope(sample: u32, q: u32) -> Value {
    return dq[(sample * p.t + p.step + 1u) * 3u * p.width + q];
}

fn finish_forward(sample: u32, column: u32, qr: Value, qz: Value, qn: Value) {
    let row = sample * p.t + p.step;
    let at = 3u * row * p.width + column;
    let r = sigmoid(x[at] + qr + bias[column]);
    let z = sigmoid(x[at + p.width] + qz + bias[column + p.width]);
    let part = qn + bias[column + 2u * p.width];
    let n = squash(x[at + 2u * p.width] + r * part);
    var value = (1.0 - z) * n;
    if (p.step > 0u) {
        value += z * y[(row - 1u) * p.width + column];
    } else if (p.has_state == 1u) {
        value += z * h0[sample * p.width + column];
    }
    let own = 4u * row * p.width + column;
    new_gates[own] = r;
    new_gates[own + p.width] = z;
    new_gates[own + 2u * p.width] = n;
    new_gates[own + 3u * p.width] = part;
    y[row * p.width + column] = value;
}

fn finish_backward(sample: u32, column: u32, product: Value) {
    let row = sample * p.t + p.step;
    let place = 4u * row * p.width + column;
    let own = sample * p.width + column;
    let r = gates[place];
    let z = gates[place + p.width];
    let n = gates[place + 2u * p.width];
    var dh = dy[row * p.width + column] + product;
    if (p.step + 1u < p.t) { dh += dh0[own]; }
    var before = Value();
    if (p.step > 0u) {
        before = finished[(row - 1u) * p.width + column];
    } else if (p.has_state == 1u) {
        before = state0[own];
    }
    let dn = dh * (1.0 - z) * (1.0 - n * n);
    let dr = dn * gates[place + 3u * p.width] * r * (1.0 - r);
    let dz = dh * (before - n) * z * (1.0 - z);
    let at = 3u * row * p.width + column;
    dx[at] = dr;
    dx[at + p.width] = dz;
    dx[at + 2u * p.width] = dn;
    dq[at] = dr;
    dq[at + p.width] = dz;
    dq[at + 2u * p.width] = dn * r;
    dh0[own] = dh * z;
}

fn finish_state(sample: u32, column: u32, product: Value) {
    dh0[sample * p.width + column] += product;
}
