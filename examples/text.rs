//! Training of a GPT on a text of your own, with the parts that `potluck train` is made of: data,
//! model, trainer, schedule, evaluations.
//!
//!     cargo run --release --example text -- FILE [DEVICE] [STEPS]

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use ndarray::s;
use potluck::HostTensor;
use potluck::data::{Dataset, Split, TextData, TextWindows, TokenizerKind};
use potluck::graph::Unary;
use potluck::metrics::{Event, StepRecord};
use potluck::model::{GptConfig, gpt};
use potluck::optim::{Decay, Optimizer, Schedule};
use potluck::train::{FitLength, FitOptions, TrainError, Trainer, TrainerOptions};

const CONTEXT: usize = 32;
const BATCH: usize = 8;

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let path = args.next().unwrap_or_else(|| "README.md".into());
    let device = args.next().unwrap_or_else(|| "auto".into());
    let steps = args.next().and_then(|n| n.parse().ok()).unwrap_or(200);

    let data = Arc::new(TextData::load(Path::new(&path), TokenizerKind::Char, 0.1, CONTEXT)?);
    let config = GptConfig {
        vocabulary: data.tokenizer().vocabulary(),
        context: CONTEXT,
        positions: CONTEXT,
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
    let schedule = Schedule {
        decay,
        lr: 3e-3,
        min_lr: 3e-4,
        warmup: 20,
        decay_steps: steps,
        cooldown_steps: 0,
    };
    let fit = FitOptions { eval_every: 50, ..FitOptions::new(FitLength::Steps(steps), schedule) };
    let windows: Arc<dyn Dataset> = Arc::new(TextWindows { text: data.clone(), context: CONTEXT });
    trainer.fit_with(&windows, &fit, &mut |event| {
        match event {
            Event::Step(StepRecord { step, loss, grad_norm, .. })
                if *step == 1 || step % 50 == 0 =>
            {
                println!("step {step:4}  loss {loss:.3}  norm {grad_norm:.2}");
            }
            Event::Evaluation(record) => println!("held-out text: {:.3}", record.val_loss),
            _ => {}
        }
        ControlFlow::Continue(())
    })?;
    println!("{}", continuation(&mut trainer, &data)?);
    Ok(())
}

/// Returns the beginning of the text and its greedy continuation: the most likely token at each
/// position.
fn continuation(trainer: &mut Trainer, data: &TextData) -> Result<String, TrainError> {
    let (start, _) = data.sample(Split::Train, 0, CONTEXT);
    let vocabulary = data.tokenizer().vocabulary();
    let mut tokens = start.to_vec();
    // The logits that are computed are those of the last token.
    let mut position = vec![0.0; CONTEXT];
    position[CONTEXT - 1] = 1.0;
    for _ in 0..CONTEXT {
        let window = tokens[tokens.len() - CONTEXT..].to_vec();
        let inputs = [
            ("tokens", HostTensor::Int(window)),
            ("position", HostTensor::Float(position.clone())),
        ];
        let logits = trainer.predict("logits", 1, &inputs)?;
        let last = logits.slice(s![0, 0, ..]);
        let best = (0..vocabulary).max_by(|a, b| last[*a].total_cmp(&last[*b]));
        tokens.push(best.unwrap_or(0) as u32);
    }
    Ok(data.tokenizer().decode(&tokens))
}
