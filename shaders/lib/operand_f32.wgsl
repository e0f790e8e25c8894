// Operands of products in f32: as they are.

fn operand(x: f32) -> f32 { return x; }

fn operand4(x: vec4f) -> vec4f { return x; }
