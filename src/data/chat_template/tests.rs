//! Tests of chat templates.

use std::collections::HashMap;
use std::fs;

use super::*;

#[derive(serde::Deserialize)]
struct Golden {
    templates: HashMap<String, String>,
    conversations: Vec<Vec<GoldenMessage>>,
    rendered: HashMap<String, Vec<String>>,
}

#[derive(serde::Deserialize)]
struct GoldenMessage {
    role: String,
    content: String,
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate {
        name: "t".into(),
        source: source.into(),
        bos_token: "<s>".into(),
        eos_token: "</s>".into(),
    }
}

fn user(content: &str) -> ChatMessage {
    ChatMessage { role: "user", content: content.into() }
}

#[test]
fn conversations_are_rendered_as_transformers_renders_them() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/chat.json.gz");
    let file = flate2::read::GzDecoder::new(fs::File::open(path).unwrap());
    let Golden { templates, conversations, rendered } = serde_json::from_reader(file).unwrap();
    assert_eq!((templates.len(), conversations.len()), (5, 2));
    for (name, source) in &templates {
        for (conversation, expected) in conversations.iter().zip(&rendered[name]) {
            let of = |message: &GoldenMessage| ChatMessage {
                role: match &*message.role {
                    "user" => "user",
                    "system" => "system",
                    _ => "assistant",
                },
                content: message.content.clone(),
            };
            let messages: Vec<ChatMessage> = conversation.iter().map(of).collect();
            assert_eq!(template(source).render(&messages).unwrap(), *expected, "{name}");
        }
    }
    let chatml = ChatTemplate::chatml().render(&[user("hello")]).unwrap();
    assert_eq!(chatml, "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n");
}

#[test]
fn templates_that_refuse_or_never_end_are_errors() {
    let refused = |source: &str| template(source).render(&[user("a")]).unwrap_err().to_string();
    let raised = refused("{{ raise_exception('roles must alternate') }}");
    assert!(raised.contains("roles must alternate"), "{raised}");
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% set c = b %}{% endfor %}\
                   {% endfor %}";
    assert_eq!(refused(endless), "t: does not come to an end");
    assert!(refused("{% if %}").contains("cannot be rendered (syntax error"));
    assert!(refused(&" ".repeat(BYTES_MAX + 1)).contains("has more than 1.00 MiB"));
    let long = "{% for a in range(9999) %}{{ messages[0].content * 999 }}{% endfor %}";
    let long = template(long).render(&[user(&"x".repeat(999))]).unwrap_err().to_string();
    assert_eq!(long, "t: makes more than 1.00 MiB of it");
}

#[test]
fn a_template_is_found_in_the_files_of_a_model() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
    let of = || ChatTemplate::of_directory(directory.path());
    assert_eq!(of().unwrap(), None);
    write("tokenizer_config.json", r#"{"eos_token": {"content": "</s>"}, "bos_token": null}"#);
    assert_eq!(of().unwrap(), None);
    write("tokenizer_config.json", r#"{"chat_template": "one{{ eos_token }}", "eos_token": "e"}"#);
    assert_eq!(of().unwrap().unwrap().render(&[]).unwrap(), "onee");
    let named = r#"{"chat_template": [{"name": "tool_use", "template": "tools"},
                                      {"name": "default", "template": "two"}]}"#;
    write("tokenizer_config.json", named);
    assert_eq!(of().unwrap().unwrap().render(&[]).unwrap(), "two");
    write("chat_template.jinja", "three");
    assert_eq!(of().unwrap().unwrap().render(&[]).unwrap(), "three");
    fs::remove_file(directory.path().join("chat_template.jinja")).unwrap();
    write("tokenizer_config.json", r#"{"chat_template": [{"name": "rag", "template": "tools"}]}"#);
    assert!(of().unwrap_err().to_string().contains("no default chat_template"));
    write("tokenizer_config.json", "{");
    assert!(of().unwrap_err().to_string().contains("is no configuration of a tokenizer"));
    assert!(ChatTemplate::load(&directory.path().join("none")).is_err());
}

#[test]
fn a_template_of_a_file_gets_the_tokens_of_a_model() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("own.jinja");
    fs::write(&path, "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}").unwrap();
    let config = r#"{"bos_token": "<s>", "eos_token": {"content": "</s>"}}"#;
    fs::write(directory.path().join("tokenizer_config.json"), config).unwrap();
    let bare = ChatTemplate::load(&path).unwrap();
    assert_eq!(bare.render(&[user("hi")]).unwrap(), "hi");
    let with_tokens = bare.with_tokens_of(directory.path()).unwrap();
    assert_eq!(with_tokens.render(&[user("hi")]).unwrap(), "<s>hi</s>");
}

#[test]
fn dates_are_those_of_the_calendar() {
    assert_eq!(strftime("%Y-%m-%d %H:%M:%S", 951_782_399), "2000-02-28 23:59:59");
    assert_eq!(strftime("%d %b %Y, %B%", 951_782_400), "29 Feb 2000, February%");
    assert_eq!(strftime("%d %b %Y %q", 4_102_444_800), "01 Jan 2100 %q");
}
