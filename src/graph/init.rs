//! Initial values of parameters: a pure function of the seed, the parameter's number and the
//! element's index in the whole tensor, computed on the host, so that every device starts from the
//! same bits.

use super::{Graph, Init};
use potluck_core::rng::Key;
use potluck_core::{ParamId, Site};

/// Random-number site of parameter 0; each parameter has its own, far from the sites of dropouts.
const FIRST_SITE: u32 = 1 << 20;

/// Draws an initial value; `index` is the element's index in the whole tensor.
fn value(init: Init, key: &Key, index: u64) -> f32 {
    match init {
        Init::Zeros => 0.0,
        Init::Ones => 1.0,
        Init::Normal { std } => (f64::from(std) * key.normal(index)) as f32,
        Init::Uniform { bound } => (f64::from(bound) * (2.0 * key.uniform(index) - 1.0)) as f32,
    }
}

/// Returns the initial values of a parameter.
pub fn values(graph: &Graph, parameter: ParamId, seed: u64) -> Vec<f32> {
    let known = &graph.parameters[parameter.index()];
    let key = Key::new(seed).site(Site(FIRST_SITE + known.whole.number));
    let mut values = Vec::with_capacity(graph.tensor(known.tensor).shape.per_row());
    for run in known.slice.runs() {
        for index in run {
            values.push(value(known.init, &key, index as u64));
        }
    }
    values
}
