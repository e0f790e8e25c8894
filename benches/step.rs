//! Benchmark of the training step of a small GPT (4 layers, 4 heads, width 128, context 64, batch
//! 12, vocabulary 65, AdamW) and of matrix products on the CPU device and on every adapter found:
//! the parts `step` and `matmul` of `potluck bench`.
//!
//!     cargo bench --bench step -- [DEVICES]

use potluck_bench::{Effort, Options, Part, run};
use potluck_train::TrainError;

fn main() -> Result<(), TrainError> {
    // Cargo passes --bench to every benchmark.
    let devices = std::env::args().skip(1).find(|arg| arg != "--bench");
    let options = Options {
        devices: devices.unwrap_or_else(|| "all".into()),
        effort: Effort::Normal,
        parts: vec![Part::Matmul, Part::Step],
        full: false,
    };
    let report = run(&options, &mut |progress| eprintln!("{progress}"))?;
    print!("{report}");
    Ok(())
}
