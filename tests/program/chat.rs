//! `potluck chat`: conversations from stdin.

use std::fs;
use std::io::{ErrorKind, Write};
use std::process::Stdio;

use crate::process::{Desk, Ran, finish};

/// Runs a line with these lines as input.
fn with_input(desk: &Desk, line: &str, input: impl AsRef<[u8]>) -> Ran {
    let mut child = desk.command(line).stdin(Stdio::piped()).spawn().unwrap();
    if let Err(why) = child.stdin.take().unwrap().write_all(input.as_ref()) {
        // A command that is refused ends before it reads.
        assert_eq!(why.kind(), ErrorKind::BrokenPipe, "{line}");
    }
    finish(child, line)
}

#[test]
fn chat_lines_are_one_conversation() {
    let desk = Desk::new();
    let line = "--set model.bias=true --set model.activation=gelu_tanh --set data.tokenizer=byte \
                --set model.context=400 --batch 2";
    desk.write("text.txt", "one two three four five\n".repeat(400));
    desk.train(&format!("{line} --steps 2 --out run --quiet")).ok();
    let chat = "chat run --tokens 6 --temperature 0";
    let answers = |line: &str, input: &str| -> Vec<String> {
        let told = with_input(&desk, line, input).ok();
        told.out.lines().map(String::from).collect()
    };
    // The end of the input ends it, as /exit does, and empty lines are none.
    let two = answers(chat, "hello\n\n/reset\nhello\n");
    assert_eq!(two.len(), 2, "{two:?}");
    assert_eq!(two[0], two[1]);
    assert_eq!(answers(chat, "hello\n/exit\nhello\n"), two[..1]);
    // Answers have random numbers of their own, which the seed of the session decides.
    let drawn = "chat run --tokens 30 --temperature 1 --seed 3";
    let session = answers(drawn, "hello\n/reset\nhello\n");
    assert_ne!(session[0], session[1]);
    assert_eq!(answers(drawn, "hello\n/reset\nhello\n"), session);
    // A message that is too long changes nothing.
    let long = "words ".repeat(80);
    let told = with_input(&desk, chat, format!("hello\n{long}\nhello\n")).ok();
    assert!(told.err.contains("the message is longer than the context"), "{}", told.err);
    assert!(!told.err.contains("not fit the context any more"), "{}", told.err);
    let without = with_input(&desk, chat, "hello\nhello\n").ok();
    assert_eq!(told.out, without.out);
    // A line that is no text is told, and is no message.
    let told = with_input(&desk, chat, b"caf\xE9\nhello\n").ok();
    assert_eq!(told.out.lines().collect::<Vec<_>>(), two[..1]);
    assert!(told.err.contains("no answer: the line is not UTF-8"), "{}", told.err);
    let refused = with_input(&desk, &format!("{chat} --micro-batch 1"), "a\n").ended(78);
    assert!(refused.line("error:").contains("--micro-batch is for eval"), "{}", refused.err);
    assert_eq!(answers(&format!("{chat} --devices cpu*2 --pipeline 2"), "hello\n"), two[..1]);
    // A template says what the model sees: the last messages, by which it answers.
    desk.write("last.jinja", "{{ messages[-1].content }}:");
    let last = format!("{chat} --template last.jinja");
    let repeated = answers(&last, "hello\nhello\n");
    assert_eq!(repeated[0], repeated[1]);
    let generated = desk.run("generate run --prompt hello: --tokens 6 --temperature 0").ok().out;
    assert_eq!(generated.lines().next().unwrap(), format!("hello:{}", repeated[0]));
    // What no longer fits the context is told.
    let long = format!("{}\n", "word ".repeat(30)).repeat(4);
    let told = with_input(&desk, chat, long).ok();
    assert!(told.err.contains("not fit the context any more"), "{}", told.err);

    desk.write("raises.jinja", "{{ raise_exception('no such roles') }}");
    for (template, expected) in [
        ("raises.jinja", "raises.jinja: cannot be rendered"),
        ("missing.jinja", "missing.jinja: cannot be read"),
    ] {
        let refused = with_input(&desk, &format!("{chat} --template {template}"), "a\n").ended(78);
        assert!(refused.line("error:").contains(expected), "{}", refused.err);
    }
    // A model of a text's characters, among which those of chatml are not.
    desk.train("--steps 1 --out letters --quiet").ok();
    let refused = with_input(&desk, "chat letters", "a\n").ended(78);
    assert!(refused.line("error:").contains("has no chat template"), "{}", refused.err);
    // A character of the user's without a token is told, and ends nothing.
    desk.write("plain.jinja", "{% for message in messages %}{{ message.content }} {% endfor %}");
    let letters = "chat letters --tokens 4 --temperature 0 --template plain.jinja";
    let told = with_input(&desk, letters, "one\non\u{e9}\ntwo\n").ok();
    assert!(
        told.err.contains("note: no answer: ") && told.err.contains("'\u{e9}'"),
        "{}",
        told.err
    );
    let without = with_input(&desk, letters, "one\ntwo\n").ok();
    assert_eq!(told.out, without.out);
    let ids: Vec<u8> = (0..400u16).flat_map(|n| (n % 97).to_le_bytes()).collect();
    fs::write(desk.path("ids.bin"), ids).unwrap();
    desk.run("train tiny.toml --data ids.bin --devices cpu --steps 1 --out ids --quiet").ok();
    let refused = with_input(&desk, "chat ids", "a\n").ended(78);
    assert!(refused.line("error:").contains("has no conversation"), "{}", refused.err);
}
