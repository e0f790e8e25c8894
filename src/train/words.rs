//! Words of messages: the rooms below speak of keys and flags of the program, and users of the
//! library set fields.

/// Reader of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// A user of the program, who sets keys and flags.
    Program,
    /// A user of the library, who sets fields.
    Library,
}

impl Audience {
    /// Returns a message in the words of the reader.
    pub fn words(self, message: &str) -> String {
        match self {
            Self::Program => message.into(),
            Self::Library => in_library_words(message),
        }
    }
}

/// Parts of messages of the program and what they are called in the library. A part is replaced
/// where it stands as words of its own; the first that fits counts.
const WORDS: &[(&str, &str)] = &[
    (", model.context, model.width, model.layers or model.hidden", " or the size of the model"),
    (", model.context or model.width", " or the size of the model"),
    ("the model's width or its context", "the size of the model"),
    ("the model's width", "the size of the model"),
    (
        " (a longer model.channels or model.hidden of a cnn, a longer model.hidden of an mlp, else \
         a larger model.layers)",
        "",
    ),
    ("try it again with potluck devices --certify", "delete its entry in the cache of kernels"),
    ("or name others with --data PATH", "or name others"),
    ("choose another directory with --out", "choose another directory"),
    ("choose another --out", "choose another directory"),
    ("set another --out", "choose another directory"),
    (" as --data or data.path", ""),
    ("--data or data.path", "another path"),
    ("lower model.context or change data.held_out", "a shorter context or another held-out part"),
    ("set optim.clip", "set TrainerOptions::clip"),
    ("--devices '", "TrainerOptions::devices = '"),
    ("--set virtual_stages=", "PipelineOptions::virtual_stages = "),
    ("--set train.micro_batch_size=", "TrainerOptions::micro_batch_size = "),
    ("--set parallel.shares=", "TrainerOptions::shares = "),
    ("--set parallel.blocks_per_stage=", "PipelineOptions::blocks_per_stage = "),
    ("faults.on_mismatch=repair", "TrainerOptions::on_mismatch to MismatchAction::Repair"),
    ("parallel.shares", "TrainerOptions::shares"),
    ("parallel.pipeline_stages", "PipelineOptions::stages"),
    ("parallel.blocks_per_stage", "PipelineOptions::blocks_per_stage"),
    ("parallel.virtual_stages", "PipelineOptions::virtual_stages"),
    ("parallel.schedule", "PipelineOptions::schedule"),
    ("train.batch", "TrainerOptions::batch"),
    ("train.micro_batch_size", "TrainerOptions::micro_batch_size"),
    ("train.device_memory_mib", "TrainerOptions::device_memory_mib"),
    ("faults.device_timeout_s", "TrainerOptions::device_timeout"),
    ("train.tune_s", "TrainerOptions::tune_s"),
    ("optim.lr", "the learning rate"),
    ("set model.norm to group", "normalize by group (Builder::group_norm)"),
    ("model.context", "the context"),
    ("data.held_out", "held_out"),
    ("data.normalize", "normalize"),
    ("data.tokenizer", "tokenizer"),
    ("data.task to classification", "ReadOptions::kind to TargetKind::Classes"),
    ("data.crop and data.flip change", "an augmentation changes"),
    ("data.crop", "crop"),
    ("data.target", "ReadOptions::target"),
    ("data.image_size", "ReadOptions::image_size"),
    ("--devices", "TrainerOptions::devices"),
    ("--pipeline", "PipelineOptions::stages"),
    ("--schedule", "PipelineOptions::schedule"),
    ("--micro-batch", "TrainerOptions::micro_batch_size"),
    ("--batch", "TrainerOptions::batch"),
    ("--retune", "TrainerOptions::retune"),
];

/// Returns a message of the program in the words of the library.
pub fn in_library_words(message: &str) -> String {
    let (mut told, mut rest) = (String::with_capacity(message.len()), message);
    while let Some(next) = rest.chars().next() {
        let before = told.chars().next_back();
        match WORDS.iter().find(|(words, _)| stands_alone(words, before, rest)) {
            Some((words, instead)) => {
                told.push_str(instead);
                rest = &rest[words.len()..];
            }
            None => {
                told.push(next);
                rest = &rest[next.len_utf8()..];
            }
        }
    }
    told
}

/// Returns true if `rest` begins with these words, and they are no part of a longer one, such as
/// the name of a tensor or a path.
fn stands_alone(words: &str, before: Option<char>, rest: &str) -> bool {
    let Some(after) = rest.strip_prefix(words) else { return false };
    let joins = |c: char| c.is_alphanumeric() || "_-'/\\".contains(c);
    let begins = words.starts_with([',', ' ']) || before.is_none_or(|c| !joins(c) && c != '.');
    let mut after = after.chars();
    let ends = words.ends_with(['=', '\''])
        || match after.next() {
            Some('.') => after.next().is_none_or(|c| !c.is_alphanumeric()),
            Some(c) => !joins(c),
            None => true,
        };
    begins && ends
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    /// Sections of the configuration.
    const SECTIONS: [&str; 6] = ["train", "parallel", "model", "optim", "schedule", "data"];

    /// Directories and files whose messages a trainer may pass on. What reads data for users of the
    /// library (`formats::load`, `SampleSet::new`, `TokenFile::open`) returns its errors to them
    /// as they are, in the words of the program.
    const SOURCES: &str = "autotune base checkpoint collective comm data/augmentation.rs \
        data/dataset.rs data/error.rs data/formats data/normalization.rs data/sample_set.rs \
        data/samples.rs data/text.rs data/tokenizer.rs data/tokens.rs device exec faults files \
        graph kernels metrics model optim parallel planner runtime train/best.rs train/error.rs \
        train/evaluate.rs train/left_devices.rs train/loader.rs train/outputs.rs train/predict.rs \
        train/session.rs train/state.rs train/task train/task.rs train/trainer train/trainer.rs";

    /// Returns the code of all files of a place, without its tests.
    fn code(place: &Path) -> String {
        if place.is_dir() {
            let entries = fs::read_dir(place).unwrap();
            let mut paths: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
            paths.sort();
            return paths.iter().map(|path| code(path)).collect();
        }
        let name = place.display().to_string().replace('\\', "/");
        let is_test = |end: &str| name.ends_with(end) || name.contains("/tests/");
        if is_test("tests.rs") || is_test("/mutations.rs") {
            return String::new();
        }
        let text = fs::read_to_string(place).unwrap();
        text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default().to_string()
    }

    /// Returns the literals of code, each on one line.
    fn literals(code: &str) -> Vec<String> {
        let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
        let code = lines.collect::<Vec<_>>().join("\n").replace("'\"'", "").replace("\\\"", "''");
        let of_strings = code.split('"').skip(1).step_by(2);
        of_strings
            .map(|text| {
                let lines = text.split("\\\n").enumerate();
                lines.map(|(at, line)| if at == 0 { line } else { line.trim_start() }).collect()
            })
            .collect()
    }

    /// Returns the first key or flag in a text.
    fn key_or_flag(text: &str) -> Option<String> {
        let word = |at: usize| {
            let is_word = |c: &char| c.is_ascii_alphanumeric() || "_-.".contains(*c);
            text[at..].chars().take_while(is_word).collect::<String>()
        };
        let alone = |at: usize| !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let letter = |at: usize| text[at..].starts_with(|c: char| c.is_ascii_lowercase());
        let flag = text.match_indices("--").find(|(at, _)| letter(at + 2)).map(|(at, _)| word(at));
        let key = SECTIONS.iter().find_map(|section| {
            let dotted = format!("{section}.");
            let mut found = text.match_indices(&dotted);
            let at = found.find(|(at, _)| alone(*at) && letter(at + dotted.len()))?.0;
            Some(word(at))
        });
        flag.or(key)
    }

    #[test]
    fn no_message_of_a_trainer_names_a_key_or_a_flag() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let places = SOURCES.split_whitespace();
        let all: Vec<String> =
            places.flat_map(|place| literals(&code(&root.join(place)))).collect();
        let told = |text: &String| key_or_flag(text).is_some();
        assert!(all.iter().filter(|text| told(text)).count() > 30, "the sources are read");
        let left = |text: &String| Some((key_or_flag(&in_library_words(text))?, text.clone()));
        let left: Vec<_> = all.iter().filter_map(left).collect();
        assert!(left.is_empty(), "{left:#?}");
    }

    #[test]
    fn names_and_paths_are_no_keys() {
        for text in ["'train.batch'", "runs/--devices", "pretrain.batch", "train.batch.0.weight"] {
            assert_eq!(in_library_words(text), text);
        }
        let text =
            "train.batch = 4 (train.micro_batch_size); choose --devices, or lower train.batch.";
        let expected = "TrainerOptions::batch = 4 (TrainerOptions::micro_batch_size); choose \
                        TrainerOptions::devices, or lower TrainerOptions::batch.";
        assert_eq!(in_library_words(text), expected);
        let text = "points.csv: is empty; give a file with data in it as --data or data.path";
        assert_eq!(in_library_words(text), "points.csv: is empty; give a file with data in it");
        let text = "name the column with data.target, or change data.held_out";
        let expected = "name the column with ReadOptions::target, or change held_out";
        assert_eq!(in_library_words(text), expected);
        let text = "lower train.micro_batch_size, train.batch, model.context, model.width, \
                    model.layers or model.hidden";
        let expected = "lower TrainerOptions::micro_batch_size, TrainerOptions::batch or the size \
                        of the model";
        assert_eq!(in_library_words(text), expected);
    }
}
