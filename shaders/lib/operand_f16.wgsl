// Operands of products in f16, rounded by the device's own conversion.

fn operand(x: f32) -> f32 { return f32(f16(x)); }

fn operand4(x: vec4f) -> vec4f { return vec4f(vec4<f16>(x)); }
