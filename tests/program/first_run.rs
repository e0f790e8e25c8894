//! Runs on the built-in corpus: the measure of their sentences.

use std::collections::HashSet;
use std::fs;

use potluck_data::builtin;

use crate::process::Desk;

const SMALL: &str = "--set model.layers=1 --set model.width=32 \
                     --set model.context=32 --set data.held_out=0.01";

/// Recounts the lines that a run sampled after a step: (different ones, right ones, right ones that
/// are not in the corpus, right sums), and the right ones of the held-out sums.
fn recount(desk: &Desk, run: &str, step: u64) -> ([u64; 4], u64) {
    let path = desk.path(&format!("{run}/sentences-{step:08}.txt"));
    let text = fs::read_to_string(path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let (sampled, held_out) = lines.split_at(200);
    let corpus = builtin::corpus();
    let known: HashSet<&str> = corpus.lines().collect();
    let different: HashSet<&str> = sampled.iter().copied().collect();
    let mut right: Vec<&str> = different.iter().copied().collect();
    right.retain(|line| builtin::check(line).is_ok());
    let new = right.iter().filter(|line| !known.contains(**line)).count();
    let sums = right.iter().filter(|line| line.contains(" plus ")).count();
    assert_eq!(held_out.len(), builtin::held_out_sums().len());
    let held_out = held_out.iter().filter(|line| builtin::check(line).is_ok()).count();
    ([different.len(), right.len(), new, sums].map(|count| count as u64), held_out as u64)
}

/// Returns the last measure in a run's record, checked against a recount: the number of different
/// sentences, and of right ones.
fn measured(desk: &Desk, run: &str) -> (u64, u64) {
    let record = desk.metrics(run).pop().unwrap();
    let (counts, held_out) = recount(desk, run, record["step"].as_u64().unwrap());
    let keys = ["distinct", "right", "new", "right_sums"];
    assert_eq!(counts.map(Some), keys.map(|key| record[key].as_u64()), "{record}");
    assert_eq!(record["right_held_out_sums"], held_out, "{record}");
    assert_eq!(record["sampled"], 200);
    (counts[0], counts[1])
}

#[test]
fn sentences_right_share_rises_by_training() {
    let desk = Desk::new();
    desk.run(&format!("train --devices cpu --quiet --steps 0 {SMALL} --out new")).ok();
    let (_, untrained) = measured(&desk, "new");
    assert_eq!(untrained, 0);

    let more = "--devices cpu --quiet --steps 1100 --set train.batch=16 --set optim.lr=0.01 \
                --set train.eval_every=0";
    desk.run(&format!("train {SMALL} {more} --out run")).ok();
    let (different, right) = measured(&desk, "run");
    assert!(right > different / 50, "{right} of {different}");

    let share = format!("{} % of the sentences are right ({right} of", 100 * right / different);
    let evaluated = desk.run("eval run --devices cpu").ok();
    assert!(evaluated.out.contains(&share), "{share} in {}", evaluated.out);
    let json = desk.run("eval run --devices cpu --json").ok().out;
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&json["step"], &json["sentences"]["right"]), (&1100.into(), &right.into()));
}

#[test]
fn sentences_of_other_text_not_measured() {
    let desk = Desk::new();
    let run = desk.run(&format!("train --devices cpu*2 --steps 1 {SMALL} --out run")).ok();
    assert!(run.err.contains("\n0 % of the sentences are right (0 of "), "{}", run.err);
    let silent =
        format!("train --devices cpu --steps 1 {SMALL} --set train.sample_tokens=0 --out silent");
    assert!(!desk.run(&silent).ok().err.contains("sentences"));

    desk.write("text.txt", builtin::corpus());
    let other = desk
        .run(&format!("train --devices cpu --steps 1 {SMALL} --data text.txt --out other"))
        .ok();
    assert!(!other.err.contains("sentences are right"), "{}", other.err);
    assert!(!desk.path("other/sentences-00000001.txt").exists());
    assert!(!desk.run("eval other --devices cpu").ok().out.contains("sentences"));
}
