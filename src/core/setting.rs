//! Names of settings in messages: users of the program set keys and flags, and users of the library
//! set fields of options.

use std::cell::Cell;
use std::fmt;

use super::format::shell_word;

/// Table of settings: a name, the wording of the program, and the wording of the library.
macro_rules! settings {
    ($($(#[doc = $doc:literal])? $name:ident: $program:literal, $library:literal;)*) => {
        /// Setting that a message names, or a part of advice with different wordings for the two
        /// readers. It is displayed in the wording of the program, and within [`as_fields`] of the
        /// library.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Setting {
            $($(#[doc = $doc])? $name,)*
        }

        impl Setting {
            #[cfg(test)]
            const ALL: &[Self] = &[$(Self::$name),*];

            /// Wordings of the program and of the library.
            const fn names(self) -> (&'static str, &'static str) {
                match self {
                    $(Self::$name => ($program, $library),)*
                }
            }
        }
    };
}

settings! {
    Devices: "--devices", "TrainerOptions::devices";
    Nodes: "--nodes", "the number of nodes";
    Retune: "--retune", "TrainerOptions::retune";
    Batch: "train.batch", "TrainerOptions::batch";
    MicroBatchSize: "train.micro_batch_size", "TrainerOptions::micro_batch_size";
    Groups: "optim.groups", "TrainerOptions::groups";
    DeviceMemory: "train.device_memory_mib", "TrainerOptions::device_memory_mib";
    DeviceTimeout: "faults.device_timeout_s", "TrainerOptions::device_timeout";
    TuneSeconds: "train.tune_s", "TrainerOptions::tune_s";
    Shares: "parallel.shares", "TrainerOptions::shares";
    ShareChanges: "parallel.share_changes", "TrainerOptions::share_changes";
    Overlap: "parallel.overlap", "TrainerOptions::overlap";
    PipelineStages: "parallel.pipeline_stages", "PipelineOptions::stages";
    /// Advice, as an order.
    MoreStages: "cut the model into more stages (parallel.pipeline_stages)",
        "cut the model into more stages (PipelineOptions::stages)";
    Schedule: "parallel.schedule", "PipelineOptions::schedule";
    VirtualStages: "parallel.virtual_stages", "PipelineOptions::virtual_stages";
    BlocksPerStage: "parallel.blocks_per_stage", "PipelineOptions::blocks_per_stage";
    TensorRanks: "parallel.tensor_ranks", "TensorOptions::ranks";
    TensorShares: "parallel.tensor_shares", "TensorOptions::shares";
    LearningRate: "optim.lr", "the learning rate";
    Clip: "optim.clip", "TrainerOptions::clip";
    /// Repair of parameters that differ, to follow "set".
    Repair: "faults.on_mismatch=repair", "TrainerOptions::on_mismatch to MismatchAction::Repair";
    Context: "model.context", "the context";
    /// Recomputation of activations instead of keeping them, to follow "set".
    Recompute: "train.recompute to blocks", "TrainerOptions::recompute to Recompute::Blocks";
    /// Number format of activations, to follow "set".
    Activations: "train.activations to bf16",
        "TrainerOptions::activations to ActivationFormat::Bf16";
    /// Arithmetic of products, for a change that is named.
    MixedPrecision: "train.precision = \"mixed\"", "TrainerOptions::precision = Precision::Mixed";
    /// All settings that determine the size of a model.
    ModelSize: "the model's size (model.context, model.width, model.layers, model.hidden)",
        "the model's size";
    /// Normalization of pictures by group, as an order.
    GroupNorm: "set model.norm to group", "normalize by group (Builder::group_norm)";
    /// Path of the data, to follow "give the path of ..".
    AsData: " as --data or data.path", "";
    HeldOut: "data.held_out", "held_out";
    Tokenizer: "data.tokenizer", "tokenizer";
    /// Targets that are classes, to follow "set".
    Classification: "data.task to classification", "ReadOptions::kind to TargetKind::Classes";
    /// Targets that are numbers, behind "set".
    Regression: "data.task=regression", "ReadOptions::kind to TargetKind::Values";
    Crop: "data.crop", "crop";
    Flip: "data.flip", "flip";
    Target: "data.target", "ReadOptions::target";
    ImageSize: "data.image_size", "ReadOptions::image_size";
    /// Directory of a run, to follow "another".
    Out: "--out", "directory";
    /// Permission for the group of a secret's file, as an order.
    SecretOfGroup: "give --secret-group-readable", "call Secret::read_file_of_group";
    /// Key of the text in a line of JSON.
    TextKey: "--key", "PrepareOptions::key";
    /// Another certification of a kernel, as an order.
    Recertify: "try it again with potluck devices --certify",
        "delete its entry in the cache of kernels";
}

impl Setting {
    /// Returns the setting with a value, as it is typed: `--set parallel.shares='[3, 2]'`, or
    /// `TrainerOptions::shares = [3, 2]`.
    pub fn given<V: fmt::Display>(self, value: V) -> GivenSetting<V> {
        GivenSetting { setting: self, value }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (program, library) = self.names();
        f.write_str(match READER.get() {
            Reader::Program => program,
            Reader::Library => library,
        })
    }
}

/// Setting with a value.
#[derive(Clone, Copy, Debug)]
pub struct GivenSetting<V> {
    setting: Setting,
    value: V,
}

impl<V: fmt::Display> fmt::Display for GivenSetting<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { setting, value } = self;
        if let Reader::Library = READER.get() {
            return write!(f, "{setting} = {value}");
        }
        let value = shell_word(&value.to_string());
        if setting.names().0.starts_with("--") {
            write!(f, "{setting} {value}")
        } else {
            write!(f, "--set {setting}={value}")
        }
    }
}

/// Text that names settings, kept in the wordings of both readers until it is displayed.
#[derive(Clone, PartialEq, Eq)]
pub struct Wording {
    of_program: String,
    of_library: String,
}

impl Wording {
    /// Keeps a text with its settings: `Wording::new(format_args!("lower {}", Setting::Batch))`.
    pub fn new(text: impl fmt::Display) -> Self {
        Self {
            of_program: Reader::Program.during(|| text.to_string()),
            of_library: Reader::Library.during(|| text.to_string()),
        }
    }
}

impl fmt::Display for Wording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match READER.get() {
            Reader::Program => &self.of_program,
            Reader::Library => &self.of_library,
        })
    }
}

impl fmt::Debug for Wording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_string())
    }
}

impl From<String> for Wording {
    fn from(text: String) -> Self {
        Self { of_program: text.clone(), of_library: text }
    }
}

impl From<&str> for Wording {
    fn from(text: &str) -> Self {
        String::from(text).into()
    }
}

/// Performs work during which this thread displays settings as fields of the library's options. A
/// text that is formatted meanwhile keeps this wording.
pub fn as_fields<T>(work: impl FnOnce() -> T) -> T {
    Reader::Library.during(work)
}

/// Reader of messages.
#[derive(Clone, Copy)]
enum Reader {
    Program,
    Library,
}

thread_local! {
    /// Reader of the messages of this thread.
    static READER: Cell<Reader> = const { Cell::new(Reader::Program) };
}

impl Reader {
    fn during<T>(self, work: impl FnOnce() -> T) -> T {
        let _restored = RestoredReader(READER.replace(self));
        work()
    }
}

/// Guard that restores a reader, also after a panic.
struct RestoredReader(Reader);

impl Drop for RestoredReader {
    fn drop(&mut self) {
        READER.set(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_has_the_words_of_both_readers() {
        for setting in Setting::ALL {
            let (program, library) = (setting.to_string(), as_fields(|| setting.to_string()));
            assert!(program.contains("--") || program.contains('.'), "{program}");
            assert!(!library.contains("--") && library != program, "{program}: {library}");
        }
    }

    #[test]
    fn a_setting_with_a_value_is_typed_as_its_reader_does() {
        let shares = Setting::Shares.given("[3, 2]");
        assert_eq!(shares.to_string(), "--set parallel.shares='[3, 2]'");
        assert_eq!(as_fields(|| shares.to_string()), "TrainerOptions::shares = [3, 2]");
        assert_eq!(Setting::Devices.given("cpu").to_string(), "--devices cpu");
        assert_eq!(Setting::Devices.given("cpu*2").to_string(), "--devices 'cpu*2'");
    }

    #[test]
    fn scopes_nest_and_end_with_their_work_and_with_a_panic() {
        let batch = || Setting::Batch.to_string();
        let kept = Wording::new(format_args!("raise {}", Setting::Batch));
        as_fields(|| {
            as_fields(|| assert_eq!(batch(), "TrainerOptions::batch"));
            assert_eq!(batch(), "TrainerOptions::batch");
            assert_eq!(kept.to_string(), "raise TrainerOptions::batch");
            assert_eq!(Wording::new(Setting::Batch).of_program, "train.batch");
            assert_eq!(batch(), "TrainerOptions::batch");
        });
        let panicked = std::panic::catch_unwind(|| as_fields(|| panic!("on purpose")));
        assert!(panicked.is_err());
        assert_eq!((batch(), kept.to_string()), ("train.batch".into(), "raise train.batch".into()));
    }
}
