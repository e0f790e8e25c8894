//! Tips for flags that `train` and `launch` do not have: those of other trainers, and names of keys
//! of the configuration.

use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::args::Cli;
use potluck_train::config::unknown::{RESUME, as_flags, keys_of_flag, of_other_trainers};

/// Commands that set keys of the configuration, as a usage names them.
const COMMANDS: [&str; 2] = [" train ", LAUNCH];
const LAUNCH: &str = " launch ";

/// Adds to the error of an unknown flag what to type instead, unless the suggestion of the parser
/// says that already.
pub(super) fn with_tip(mut error: clap::Error) -> clap::Error {
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    let usage = error.get(ContextKind::Usage).map(ToString::to_string).unwrap_or_default();
    let Some(command) = COMMANDS.into_iter().find(|name| usage.contains(name)) else {
        return error;
    };
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else {
        return error;
    };
    let Some(tip) = flag.strip_prefix("--").and_then(|name| tip(name, command)) else {
        // Its values are never flags, as the parser supposes.
        if error.get(ContextKind::SuggestedArg).is_none() {
            error.remove(ContextKind::Suggested);
        }
        return error;
    };
    if let Some(ContextValue::String(suggested)) = error.get(ContextKind::SuggestedArg)
        && tip == format!("use {suggested}")
    {
        return error;
    }
    // The usage is that of the parser's own suggestion.
    for kind in [ContextKind::SuggestedArg, ContextKind::Usage] {
        error.remove(kind);
    }
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    error
}

/// Returns what to type instead of the unknown flag `--name`.
fn tip(name: &str, command: &str) -> Option<String> {
    if let Some(answer) = of_other_trainers(name) {
        if answer == RESUME && command == LAUNCH {
            return Some("launch resumes from the newest checkpoint in --out by itself".into());
        }
        return Some(as_flags(answer, flag_of_key));
    }
    let keys = keys_of_flag(name);
    match keys[..] {
        [] => None,
        [key] => Some(match flag_of_key(key) {
            Some(flag) => format!("use {flag}"),
            None => format!("{key} has no flag of its own: type --set {key}=VALUE"),
        }),
        _ => Some(format!("type --set KEY=VALUE, with one of the keys {}", keys.join(", "))),
    }
}

/// Returns the flag of `train` that sets a key: the one whose help has the key in brackets.
fn flag_of_key(key: &str) -> Option<String> {
    let command = Cli::command();
    let in_brackets = format!("({key})");
    for argument in command.find_subcommand("train")?.get_arguments() {
        let Some(help) = argument.get_help() else { continue };
        if help.to_string().contains(&in_brackets) {
            return argument.get_long().map(|long| format!("--{long}"));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::cli::args::Command;

    /// Returns the flags that a sentence names.
    fn flags_in(sentence: &str) -> Vec<&str> {
        let is_of_flag = |c: char| c.is_ascii_alphanumeric() || c == '-';
        sentence.split(|c: char| !is_of_flag(c)).filter(|word| word.starts_with("--")).collect()
    }

    /// Returns what the program says to a line.
    fn said(line: &str) -> String {
        let words = format!("potluck {line}");
        Cli::checked(words.split_whitespace().map(OsString::from)).unwrap_err().to_string()
    }

    /// Returns the tip of what the program says to a line, which is without a usage then.
    fn tip_for(line: &str) -> String {
        let said = said(line);
        assert!(!said.contains("Usage:"), "{said}");
        let tip = said.lines().find_map(|line| line.trim().strip_prefix("tip: "));
        tip.unwrap_or_else(|| panic!("no tip in {said}")).to_owned()
    }

    #[test]
    fn every_flag_that_sets_a_key_is_found_by_it() {
        let cli = Cli::checked(["potluck", "train"].map(OsString::from)).unwrap();
        let Command::Train(args) = cli.command else { panic!("{cli:?}") };
        for known in args.key_flags() {
            assert_eq!(flag_of_key(known.key).as_deref(), Some(known.flag));
        }
        assert_eq!(flag_of_key("data.path").as_deref(), Some("--data"));
        assert_eq!(flag_of_key("parallel.devices").as_deref(), Some("--devices"));
        assert_eq!(flag_of_key("optim.clip"), None);
    }

    #[test]
    fn unknown_flags_lead_to_flags_and_keys() {
        assert_eq!(
            tip_for("train --weight-decay 0.1"),
            "optim.weight_decay has no flag of its own: type --set optim.weight_decay=VALUE"
        );
        assert_eq!(
            tip_for("train --max-grad-norm 1"),
            "type --set optim.clip=VALUE, the largest norm of the gradient"
        );
        assert_eq!(tip_for("launch --tp 2"), "use --tensor");
        assert_eq!(tip_for("train --path x"), "use --data");
        assert_eq!(tip_for("train --ckpt-path x"), "use --resume DIR");
        for flag in ["--ckpt-path", "--resume-from"] {
            let own = "launch resumes from the newest checkpoint in --out by itself";
            assert_eq!(tip_for(&format!("launch {flag} x")), own);
        }
        let kinds = tip_for("train --kind gpt");
        let start = "type --set KEY=VALUE, with one of the keys ";
        assert!(kinds.starts_with(start) && kinds.contains("schedule.kind"), "{kinds}");
        assert!(kinds.contains("model.kind"), "{kinds}");
        for (line, part) in [
            ("train --save_total_limit 2", "--set train.checkpoint_keep=VALUE"),
            ("train --batch-size 8", "use --batch, the samples of a step over all devices"),
            ("train --nproc_per_node 2", "every device that --devices names takes part"),
            ("train --accelerator gpu", "use --devices: auto, cpu, or indices"),
            ("train --nnodes 2", "use --nodes N on the first machine"),
            ("train --config a.toml", "give the configuration file without a flag"),
        ] {
            let tip = tip_for(line);
            assert!(tip.contains(part), "{line}: {tip}");
        }
        // What the parser would say: a flag as a value.
        let said_of_nonsense = said("train --zzz 1");
        assert!(!said_of_nonsense.contains("as a value"), "{said_of_nonsense}");
        // The parser says it, or the tip does.
        for (line, flag) in [
            ("train --tensor-ranks 2", "--tensor"),
            ("train --pipeline-stages 2", "--pipeline"),
            ("train --micro-batch-size 2", "--micro-batch"),
            ("train --batch-size 2", "--batch"),
            ("train --resume-from x", "--resume"),
        ] {
            let said = said(line);
            assert!(flags_in(&said).contains(&flag) && !said.contains("--set"), "{said}");
        }
    }

    #[test]
    fn other_words_and_other_commands_have_no_tip_of_a_key() {
        for line in ["train a.toml lr", "train -shares", "eval run --weight-decay 1"] {
            let said = said(line);
            assert!(!said.contains("--set "), "{said}");
        }
        for command in ["eval run", "generate run"] {
            let said = said(&format!("{command} --batch-size 8"));
            assert!(!said.contains("all devices"), "{said}");
        }
    }
}
