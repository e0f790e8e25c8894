//! Training of a GPT on a text of your own, with the parts that `potluck train` is made of: data,
//! sampler, model, trainer, schedule.
//!
//!     cargo run --release --example text -- FILE [DEVICE] [STEPS]

use std::path::Path;

use ndarray::s;
use potluck::base::HostTensor;
use potluck::data::{Sampler, Split, TextData, TokenizerKind};
use potluck::graph::Unary;
use potluck::model::{GptConfig, gpt};
use potluck::optim::{Decay, Optimizer, Schedule};
use potluck::train::{TrainError, Trainer, TrainerOptions};

const CONTEXT: usize = 32;
const BATCH: usize = 8;

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let path = args.next().unwrap_or_else(|| "README.md".into());
    let device = args.next().unwrap_or_else(|| "auto".into());
    let steps = args.next().and_then(|n| n.parse().ok()).unwrap_or(200);

    let data = TextData::load(Path::new(&path), TokenizerKind::Char, 0.1, CONTEXT)?;
    let config = GptConfig {
        vocabulary: data.tokenizer().vocabulary(),
        context: CONTEXT,
        layers: 2,
        heads: 4,
        width: 64,
        bias: false,
        dropout: 0.0,
        tie: true,
        activation: Unary::Gelu,
    };
    let optimizer = Optimizer::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
    let options = TrainerOptions { clip: 1.0, ..TrainerOptions::new(&device, optimizer, BATCH) };
    let mut trainer = Trainer::new(gpt(&config)?, &options)?;
    println!("training on {}, {} characters", trainer.device(), data.tokens(Split::Train).len());

    let decay = Decay::Cosine;
    let schedule = Schedule { decay, lr: 3e-3, min_lr: 3e-4, warmup: 20, decay_steps: steps };
    let sampler = Sampler::new(1, data.window_count(Split::Train, CONTEXT), BATCH as u32);
    for step in 1..=steps {
        let (mut tokens, mut targets) = (Vec::new(), Vec::new());
        for slot in 0..BATCH as u32 {
            let start = sampler.sample(step, slot).index;
            let (window, next) = data.sample(Split::Train, start, CONTEXT);
            tokens.extend_from_slice(window);
            targets.extend_from_slice(next);
        }
        let batch = [("tokens", HostTensor::Int(tokens)), ("targets", HostTensor::Int(targets))];
        let report = trainer.step(&batch, schedule.lr(step))?;
        if step == 1 || step % 50 == 0 {
            println!("step {step:4}  loss {:.3}  norm {:.2}", report.loss, report.gradient_norm);
        }
    }
    println!("{}", continuation(&mut trainer, &data)?);
    Ok(())
}

/// Returns the beginning of the text and its greedy continuation: the most likely token at each
/// position.
fn continuation(trainer: &mut Trainer, data: &TextData) -> Result<String, TrainError> {
    let (start, _) = data.sample(Split::Train, 0, CONTEXT);
    let vocabulary = data.tokenizer().vocabulary();
    let mut tokens = start.to_vec();
    for _ in 0..CONTEXT {
        let window = tokens[tokens.len() - CONTEXT..].to_vec();
        let logits = trainer.predict("logits", 1, &[("tokens", HostTensor::Int(window))])?;
        let last = logits.slice(s![0, CONTEXT - 1, ..]);
        let best = (0..vocabulary).max_by(|a, b| last[*a].total_cmp(&last[*b]));
        tokens.push(best.unwrap_or(0) as u32);
    }
    Ok(data.tokenizer().decode(&tokens))
}
