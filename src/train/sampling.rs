//! Sampling of text from a model, one token after the other.

use crate::base::rng::Key;
use crate::base::{HostTensor, Site};
use crate::device::DeviceError;
use crate::exec::Executor;
use crate::graph::IGNORE_INDEX;
use crate::model::LanguageModel;
use crate::runtime::step::{Inputs, forward, load};

/// Options for drawing tokens from logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it; 0 takes the most likely token.
    pub temperature: f64,
    /// Only this many of the most likely tokens are drawn from; 0: all.
    pub top_k: usize,
    pub seed: u64,
}

/// Returns the token that follows `tokens` (at least one), as the `index`th draw of this seed.
/// The model sees only the last `context` tokens.
pub fn next_token(
    device: &mut dyn Executor,
    model: &LanguageModel,
    tokens: &[u32],
    sampling: &Sampling,
    index: u64,
) -> Result<u32, DeviceError> {
    let seen = &tokens[tokens.len().saturating_sub(model.context)..];
    let mut window = seen.to_vec();
    // The last token does not see the padding after it: attention is causal.
    window.resize(model.context, 0);
    let inputs: Inputs = vec![
        (model.tokens, HostTensor::Int(window)),
        (model.targets, HostTensor::Int(vec![IGNORE_INDEX; model.context])),
    ];
    load(device, &inputs, 0)?;
    let pass = forward(device, 1)?;
    let logits = device.read(model.logits, &pass)?;
    let row = &logits[(seen.len() - 1) * model.vocabulary..seen.len() * model.vocabulary];
    let uniform = Key::new(sampling.seed).site(Site(u32::MAX)).uniform(index);
    Ok(draw(row, sampling, uniform))
}

/// Draws a token from the softmax of `logits` with a number uniform in `[0, 1)`.
fn draw(logits: &[f32], sampling: &Sampling, uniform: f64) -> u32 {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let logit = |token: u32| f64::from(logits[token as usize]);
    order.sort_by(|&a, &b| logit(b).total_cmp(&logit(a)));
    if sampling.temperature == 0.0 {
        return order[0];
    }
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k);
    }
    let best = logit(order[0]);
    let weight = |&token: &u32| ((logit(token) - best) / sampling.temperature).exp();
    let total: f64 = order.iter().map(weight).sum();
    let mut left = uniform * total;
    for token in &order {
        left -= weight(token);
        if left < 0.0 {
            return *token;
        }
    }
    // Rounding may leave a remainder.
    order[order.len() - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 4] = [0.0, 3.0, 2.0, -1.0];

    fn sampling(temperature: f64, top_k: usize) -> Sampling {
        Sampling { temperature, top_k, seed: 1 }
    }

    #[test]
    fn no_temperature_takes_the_best_and_top_k_never_leaves_the_top() {
        assert_eq!(draw(&LOGITS, &sampling(0.0, 0), 0.99), 1);
        for step in 0..100 {
            let token = draw(&LOGITS, &sampling(5.0, 2), f64::from(step) / 100.0);
            assert!(token == 1 || token == 2);
        }
    }

    #[test]
    fn tokens_come_as_often_as_the_softmax_says() {
        let draws = 20_000;
        let mut seen = [0u32; 4];
        for index in 0..draws {
            let uniform = Key::new(9).uniform(index);
            seen[draw(&LOGITS, &sampling(1.0, 0), uniform) as usize] += 1;
        }
        let total: f64 = LOGITS.iter().map(|l| f64::from(*l).exp()).sum();
        for (token, count) in seen.iter().enumerate() {
            let expected = f64::from(LOGITS[token]).exp() / total;
            let got = f64::from(*count) / draws as f64;
            assert!((got - expected).abs() < 0.02, "token {token}: {got} against {expected}");
        }
    }
}
