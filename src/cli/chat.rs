//! `potluck chat`: a conversation with a model.

use std::io::{self, BufRead, IsTerminal};
use std::path::Path;

use super::args::ChatArgs;
use super::model::{TextWriter, load, tokenizer_of};
use crate::ui::terminal::print_line;
use potluck_core::format::counted;
use potluck_data::{ChatMessage, ChatTemplate, Tokenizer};
use potluck_train::TrainError;

const HELP: &str = "type a message; /reset begins anew, /exit or the end of input ends";

/// Tokens that end a turn of a model, in common templates.
const TURN_ENDS: [&str; 4] = ["<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"];

/// Answers the lines of stdin in one conversation, until its end.
pub fn chat(args: &ChatArgs) -> anyhow::Result<()> {
    let (mut loaded, spec) = load(&args.checkpoint)?;
    let mut stands_in = false;
    let template = match args.template.as_deref() {
        Some(name) if name == Path::new("chatml") => ChatTemplate::chatml(),
        Some(path) => {
            let template = ChatTemplate::load(path).map_err(TrainError::from)?;
            match &loaded.files {
                Some(files) => template.with_tokens_of(files).map_err(TrainError::from)?,
                None => template,
            }
        }
        None => {
            let own = match &loaded.files {
                Some(files) => ChatTemplate::of_directory(files).map_err(TrainError::from)?,
                None => None,
            };
            stands_in = own.is_none();
            own.unwrap_or_else(ChatTemplate::chatml)
        }
    };
    let tokenizer = tokenizer_of(&loaded, "conversation")?;
    // In a conversation, the template writes special tokens.
    let tokenizer = match tokenizer {
        Tokenizer::File(file) => {
            loaded.ends.extend(TURN_ENDS.iter().filter_map(|token| file.id_of(token)));
            Tokenizer::File(file.with_special())
        }
        other => other,
    };
    let mut conversation = Conversation::new(args.system.as_deref());
    // Checked before the model is loaded on its devices: the template may not be usable.
    let empty = template.render(&conversation.with("")).map_err(TrainError::from)?;
    if let Err(error) = tokenizer.encode(empty) {
        let why = if stands_in {
            "the model has no chat template, and no tokens for chatml, which stands in for one; \
             give a --template, or continue a text with potluck generate"
                .into()
        } else {
            format!("the model has no tokens for its chat template: {error}")
        };
        return Err(TrainError::InvalidRequest(why).into());
    }
    let sequences = if args.sampling.no_cache { None } else { Some(1) };
    let mut writer =
        TextWriter::open(&args.checkpoint, loaded, &spec, tokenizer.clone(), sequences)?;
    let is_terminal = io::stdin().is_terminal();
    if is_terminal {
        print_line(HELP);
    }
    let mut stdin = io::stdin().lock();
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = stdin.read_until(b'\n', &mut line);
        if read.map_err(|why| TrainError::InvalidRequest(format!("stdin: {why}")))? == 0 {
            break;
        }
        let Ok(line) = str::from_utf8(&line) else {
            print_line("note: no answer: the line is not UTF-8");
            continue;
        };
        match line.trim() {
            "" => continue,
            "/exit" => break,
            "/reset" => {
                conversation = Conversation::new(args.system.as_deref());
                print_line("new conversation");
                continue;
            }
            message => conversation.add("user", message),
        }
        // At least half of the context is for the conversation.
        let context = writer.context();
        let room = context - (context / 2).min(args.tokens as usize);
        let before = conversation.forgotten;
        let (tokens, forgotten) = match conversation.tokens(&template, &tokenizer, room) {
            Ok(found) => found,
            Err(error) => {
                let refused = conversation.messages.pop();
                conversation.forgotten = before;
                // Only what the user typed now can be typed otherwise.
                match refused.map(|message| tokenizer.encode(&message.content)) {
                    Some(Err(why)) => print_line(&format!("note: no answer: {why}")),
                    _ => return Err(error.into()),
                }
                continue;
            }
        };
        // Beyond the context, the model would lose the beginning of the conversation.
        let left = context.saturating_sub(tokens.len()) as u64;
        if left == 0 {
            print_line("note: no answer: the message is longer than the context");
            conversation.messages.pop();
            conversation.forgotten = before;
            continue;
        }
        if forgotten > 0 {
            let messages = counted(forgotten, "message does", "messages do");
            print_line(&format!("note: the first {messages} not fit the context any more"));
        }
        let count = args.tokens.min(left);
        let answer =
            writer.write(&[tokens], count, &args.sampling, |_, piece| super::print(piece))?;
        if !super::print("\n") {
            break;
        }
        conversation.add("assistant", answer.concat().trim());
    }
    Ok(())
}

/// Messages so far.
#[derive(Debug)]
struct Conversation {
    system: Option<ChatMessage>,
    messages: Vec<ChatMessage>,
    /// Messages at the beginning that did not fit the context.
    forgotten: usize,
}

impl Conversation {
    fn new(system: Option<&str>) -> Self {
        let system = system.map(|text| ChatMessage { role: "system", content: text.into() });
        Self { system, messages: Vec::new(), forgotten: 0 }
    }

    fn add(&mut self, role: &'static str, content: &str) {
        self.messages.push(ChatMessage { role, content: content.into() });
    }

    /// Messages with a further one of the user.
    fn with(&self, content: &str) -> Vec<ChatMessage> {
        let more = ChatMessage { role: "user", content: content.into() };
        self.system.iter().chain(&self.messages).cloned().chain([more]).collect()
    }

    /// Returns the tokens of the latest messages that fit `room`, beginning with one of the user
    /// and including at least the last, and the number of messages that no longer fit.
    fn tokens(
        &mut self,
        template: &ChatTemplate,
        tokenizer: &Tokenizer,
        room: usize,
    ) -> Result<(Vec<u32>, usize), TrainError> {
        let before = self.forgotten;
        loop {
            let kept = self.system.iter().chain(&self.messages[self.forgotten..]);
            let kept: Vec<ChatMessage> = kept.cloned().collect();
            let tokens = tokenizer.encode(template.render(&kept)?)?;
            // A question goes with its answer.
            let is_last = self.forgotten + 2 >= self.messages.len();
            if tokens.len() <= room || is_last {
                return Ok((tokens, self.forgotten - before));
            }
            self.forgotten += 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_data::TokenizerKind;

    #[test]
    fn the_oldest_messages_are_forgotten_first_and_the_system_message_never() {
        let tokenizer = Tokenizer::derive(TokenizerKind::Byte, "").unwrap();
        let template = ChatTemplate::chatml();
        let mut conversation = Conversation::new(Some("be short"));
        let text = |conversation: &mut Conversation, room| {
            let (tokens, forgotten) = conversation.tokens(&template, &tokenizer, room).unwrap();
            (tokenizer.decode(&tokens), forgotten)
        };
        conversation.add("user", "one");
        let (all, _) = text(&mut conversation, 1000);
        for (role, content) in [("assistant", "1"), ("user", "two"), ("assistant", "2")] {
            conversation.add(role, content);
        }
        conversation.add("user", "three");
        assert_eq!(text(&mut conversation, 1000).1, 0);
        let (short, forgotten) = text(&mut conversation, all.len() + 90);
        assert_eq!(forgotten, 2);
        assert!(short.contains("be short") && !short.contains("one") && short.contains("two"));
        // The last message stays, however little room there is, and forgotten messages stay
        // forgotten.
        let (last, forgotten) = text(&mut conversation, 1);
        assert_eq!(forgotten, 2);
        assert!(last.contains("three") && !last.contains("two"));
        assert_eq!(text(&mut conversation, 1000), (last, 0));
    }
}
