//! Unlike devices on several nodes: adapters on one, the CPU device on the other.

use crate::node_processes::{desk, host_with, join, state};
use crate::process::{adapter_selectors, finish, send_signal, skip};

const SETTINGS: &str = "train tiny.toml --data text.txt --steps 8 --set train.batch=12 \
     --set model.dropout=0.1 --set train.micro_batch_size=3 --set train.checkpoint_every=4 \
     --set train.eval_every=4 --set train.tune_s=0 --set faults.hash_every=1 \
     --set faults.device_timeout_s=30";

/// Parameters are compared after each step, so that the run would end if nodes drifted apart.
#[test]
fn adapters_on_one_node_and_a_cpu_on_the_other_have_the_bits_of_one_process() {
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

/// The kernels of an adapter that nothing is known about are tried for seconds.
#[test]
fn a_signal_while_devices_are_opened_ends_all_nodes() {
    let Some(adapter) = adapter_selectors().into_iter().find(|one| one != "cpu") else {
        return skip("no adapter");
    };
    for first in [true, false] {
        let desk = desk();
        let line = "train tiny.toml --data text.txt --steps 3 --set train.tune_s=600 --out run";
        let mut host = host_with(&desk, 2, "", &format!("{line} --devices {adapter}"));
        let other = join(&desk, &host, "", "--devices cpu");
        host.wait_for("rank  node  host");
        std::thread::sleep(std::time::Duration::from_millis(300));
        send_signal(if first { host.child.id() } else { other.id() }, "INT");
        let ran = host.finish().ended(130);
        let expected = if first { "interrupted before the run began" } else { "interrupted" };
        assert!(ran.err.contains(expected), "{}", ran.err);
        finish(other, "the node that joined").ended(130);
    }
}
