//! The program as its users run it, on the CPU device.

mod averages;
mod bench;
mod bench_nodes;
mod build_hash;
mod charts;
mod chat;
mod cli;
mod continuation;
mod costs;
mod evaluation;
mod events;
mod examples;
#[path = "../common/exposition.rs"]
mod exposition;
mod first_run;
mod generation;
#[cfg(unix)]
mod guide;
#[path = "../common/http.rs"]
mod http;
mod hugging_face;
mod interruptions;
#[path = "../common/language_models.rs"]
mod language_models;
mod launch;
#[cfg(unix)]
mod launch_files;
mod lengths;
mod library;
mod logs;
mod models;
#[cfg(target_os = "linux")]
#[path = "../common/namespaces.rs"]
mod namespaces;
#[path = "../common/node_peers.rs"]
mod node_peers;
#[path = "../common/node_processes.rs"]
mod node_processes;
mod nodes;
mod nodes_attacks;
mod nodes_exit_codes;
mod nodes_faults;
#[cfg(target_os = "linux")]
mod nodes_namespaces;
mod nodes_network;
mod nodes_secrets;
#[cfg(unix)]
mod nodes_signals;
mod nodes_start;
mod pipeline_bits;
mod pipeline_charts;
mod pipeline_faults;
mod pipelines;
mod placement;
mod plan;
mod prepared_data;
#[path = "../common/process.rs"]
mod process;
mod recorded_placement;
mod refusals;
mod resume;
mod runs;
mod sample_runs;
#[path = "../common/samples.rs"]
mod samples;
mod shakespeare;
mod shares;
mod status;
mod tensor;
#[cfg(target_os = "linux")]
mod terminals;
mod tokenizer_files;
#[path = "../common/udp_proxy.rs"]
mod udp_proxy;
