//! The library without an adapter: state machines, graphs, gradients and shader texts, in the
//! test's own process, on the processor alone.

mod api;
mod attention;
mod batch_norm;
mod cluster;
mod collectives;
#[path = "../common/mod.rs"]
mod common;
mod custom_ops;
mod documents;
#[path = "../common/exposition.rs"]
mod exposition;
mod fusion;
mod gradients;
#[path = "../common/http.rs"]
mod http;
mod layouts;
mod loom_mailbox;
mod losses;
mod net;
mod parts;
mod pytorch;
mod pytorch_optimizers;
#[path = "../common/pytorch_samples/mod.rs"]
mod pytorch_samples;
mod refused_values;
#[path = "../common/shader_modules.rs"]
mod shader_modules;
mod shaders;
mod shape_rules;
mod sim;
mod stateful;
mod tensor_parallel;
mod tokenizers;
#[path = "../common/udp_proxy.rs"]
mod udp_proxy;
#[path = "../common/ways.rs"]
mod ways;
