//! Unlike devices on several nodes: adapters on one, the CPU device on the other.

use crate::node_processes::{desk, host_with, join, state};
use crate::process::{adapter_selectors, finish};

const SETTINGS: &str = "train tiny.toml --data text.txt --steps 8 --set train.batch=12 \
     --set model.dropout=0.1 --set train.micro_batch=3 --set train.checkpoint_every=4 \
     --set train.eval_every=4 --set train.tune_s=0 --set parallel.hash_every=1 \
     --set train.device_timeout_s=30";

/// Parameters are compared after each step, so that the run would end if nodes drifted apart.
#[test]
fn adapters_on_one_node_and_a_cpu_on_the_other_have_the_bits_of_one_process() {
    let _turn = crate::common::turn();
    let mut adapters = adapter_selectors();
    adapters.truncate(2);
    if adapters.is_empty() {
        adapters.push("cpu*2".into());
    }
    let shares = if adapters.len() == 1 && adapters[0] != "cpu*2" { "7,5" } else { "5,4,3" };
    let (adapters, desk) = (adapters.join(","), desk());
    let line = format!("{SETTINGS} --set parallel.shares={shares}");
    desk.run(&format!("{line} --devices {adapters},cpu --out one --quiet")).ok();
    let host = host_with(&desk, 2, "", &format!("{line} --devices {adapters} --out two"));
    let other = join(&desk, &host, "", "--devices cpu");
    host.finish().ok();
    finish(other, "the node that joined").ok();
    assert!(state(&desk, "two", 8) == state(&desk, "one", 8), "{adapters} and cpu");
    assert_eq!(desk.losses("two"), desk.losses("one"));
}
