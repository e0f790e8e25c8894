// One time step of an LSTM, and of its gradient, behind the product with its inputs. Gates i, f, g,
// o, and z = x + W h before + bias.
//
//   forward   i, f, o = sigmoid(z), g = tanh(z);  c = f (c before) + i g;  y = o tanh(c)
//   backward  dh = dy + W^T dx after;  dc = dh o (1 - tanh(c)^2) + dc after
//             dx of i = dc g i (1 - i);  of f = dc (c before) f (1 - f);  of g = dc i (1 - g^2);
//             of o = dh tanh(c) o (1 - o);  and dc f is left for the step before
//   state     dh0 = W^T dx of the first step
//
// Prepended (src/kernels/ops/recurrent/steps.rs): Value, a vector of 4 hidden columns or one; ROWS,
// samples per invocation; FROM_STATE, 1 if the step before is the initial state; and
// `rows_of_step`, which computes the products. 2 h FLOPs per gate on 4 h (1 + 1 / ROWS) bytes.

struct Params {
    b: u32,
    t: u32,
    width: u32,     // Values of hidden columns
    terms: u32,     // of a product, in Values
    step: u32,
    has_state: u32,
}
var<immediate> p: Params;

// forward binds x, matrix, bias, h0, c0, y, gates, cells.
@group(0) @binding(0) var<storage, read> x: array<Value>;                 // (b, t, 4, width)
@group(0) @binding(1) var<storage, read_write> transposed: array<Value>;  // (h, 4, width)
@group(0) @binding(2) var<storage, read> bias: array<Value>;              // (4, width)
@group(0) @binding(3) var<storage, read> h0: array<Value>;                // (b, width)
@group(0) @binding(4) var<storage, read> c0: array<Value>;                // (b, width)
@group(0) @binding(5) var<storage, read_write> y: array<Value>;           // (b, t, width)
@group(0) @binding(6) var<storage, read_write> new_gates: array<Value>;   // (b, t, 4, width)
@group(0) @binding(7) var<storage, read_write> new_cells: array<Value>;   // (b, t, width)
