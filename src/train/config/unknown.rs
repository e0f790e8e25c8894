//! Refusals of unknown keys, sections and values: suggests the nearest known names, and answers
//! names typed by users of other trainers.

use super::read::{ConfigError, Origin};
use super::schema::{RENAMED, SECTIONS, known_key, known_keys};

/// Number of keys suggested for a name that is near to none.
const SUGGESTIONS: usize = 3;

/// Hint to the list of all keys.
const ALL_KEYS: &str = "`potluck train --explain keys` lists all";

/// Answer to names of the checkpoint from which a run continues.
pub const RESUME: &str = "use --resume DIR";

/// Names of settings in other trainers, in lower case with underscores, and the setting that it is
/// here.
const OTHER_TRAINERS: &[(&[&str], &str)] = &[
    (
        &[
            "accumulate",
            "accumulation",
            "accumulate_grad_batches",
            "accumulation_steps",
            "grad_accum",
            "gradient_accumulation",
            "gradient_accumulation_steps",
        ],
        "gradients accumulate over train.batch / train.micro_batch_size passes: set train.batch \
         (--batch) to the samples of a step, and train.micro_batch_size (--micro-batch) to those \
         that run at once",
    ),
    (
        &[
            "batch_size",
            "bs",
            "global_batch_size",
            "mini_batch_size",
            "train_batch_size",
            "per_device_train_batch_size",
        ],
        "set train.batch (--batch), the samples of a step over all devices",
    ),
    (&["learning_rate", "base_lr", "max_lr"], "set optim.lr (--lr)"),
    (&["max_steps", "num_steps", "iterations", "iters", "max_iters"], "set train.steps (--steps)"),
    (&["max_epochs", "num_epochs", "n_epochs", "num_train_epochs"], "set train.epochs (--epochs)"),
    (
        &["early_stopping", "early_stop", "early_stopping_patience"],
        "set train.patience (--patience), the evaluations without a better one after which the run \
         ends",
    ),
    (
        &["lr_scheduler", "lr_scheduler_type", "scheduler", "lr_schedule", "lr_decay", "decay_lr"],
        "set schedule.kind; the keys of [schedule] have its warm-up and its end",
    ),
    (&["warmup_steps", "warmup_iters", "warmup_ratio"], "set schedule.warmup, in steps"),
    (
        &["max_grad_norm", "grad_clip", "clip_grad", "gradient_clip_val", "clip_grad_norm"],
        "set optim.clip, the largest norm of the gradient",
    ),
    (&["optimizer", "optim", "opt"], "set optim.kind"),
    (&["betas", "adam_beta1", "adam_beta2"], "set optim.beta1 and optim.beta2"),
    (&["ema_decay", "swa"], "set optim.ema"),
    (
        &["fp16", "bf16", "amp", "autocast", "half", "mixed_precision", "dtype", "torch_dtype"],
        "set train.precision=\"mixed\" (--precision): products multiply in f16 and sum in f32",
    ),
    (
        &["tf32", "matmul_precision"],
        "products are in f32; train.precision=mixed is faster on cards",
    ),
    (
        &["gradient_checkpointing", "activation_checkpointing", "checkpoint_activations"],
        "set train.recompute=\"blocks\" or train.recompute=\"selective\"",
    ),
    (
        &["compile", "torch_compile", "jit"],
        "kernels are always compiled; train.tune_s bounds the time for choosing them",
    ),
    (
        &["num_workers", "dataloader_num_workers", "pin_memory", "prefetch"],
        "batches are read ahead on a thread of their own; nothing needs to be set",
    ),
    (&["shuffle"], "training samples are shuffled by train.seed, but for model.stateful"),
    (&["random_seed", "manual_seed"], "set train.seed (--seed)"),
    (
        &["deterministic", "full_determinism", "benchmark"],
        "the same devices, shares and seed give the same bits; nothing needs to be set",
    ),
    (
        &["save_steps", "save_every", "save_interval", "save_strategy"],
        "set train.checkpoint_every, in steps",
    ),
    (&["save_total_limit", "save_top_k"], "set train.checkpoint_keep"),
    (
        &[
            "eval_steps",
            "eval_interval",
            "eval_strategy",
            "evaluation_strategy",
            "val_check_interval",
        ],
        "set train.eval_every (--eval-every), in steps",
    ),
    (
        &["load_best_model_at_end", "best"],
        "the best checkpoint is kept besides the newest: eval, generate, predict and export take \
         it with --best",
    ),
    (&["eval_iters", "limit_val_batches"], "set train.eval_samples"),
    (
        &["logging_steps", "log_interval", "log_every_n_steps", "verbose", "verbosity"],
        "set train.log_every (--log-every), in steps",
    ),
    (&["profile", "profiler"], "use --trace FILE"),
    (
        &["fast_dev_run", "dry_run", "dryrun"],
        "use --steps 1, or --explain memory to see what a run needs without it",
    ),
    (&["val_split", "test_size", "validation_split"], "set data.held_out"),
    (&["dataset", "train_file", "data_dir", "dataset_name"], "set data.path (--data)"),
    (
        &["validation_file", "val_data", "val_file", "eval_dataset"],
        "set data.val_path, for samples; with texts and tokens use potluck eval RUN --data FILE",
    ),
    (&["config", "config_file", "cfg", "yaml"], "give the configuration file without a flag"),
    (&["n_layer", "num_layers", "n_layers", "num_hidden_layers", "depth"], "set model.layers"),
    (&["n_head", "num_heads", "n_heads", "num_attention_heads", "nhead"], "set model.heads"),
    (&["num_key_value_heads", "n_kv_heads"], "set model.kv_heads"),
    (
        &["n_embd", "hidden_size", "d_model", "dim", "hidden_dim", "embed_dim", "embedding_dim"],
        "set model.width; model.hidden of a perceptron",
    ),
    (&["intermediate_size", "ffn_dim", "d_ff", "dim_feedforward"], "set model.mlp_width"),
    (
        &[
            "block_size",
            "seq_len",
            "seq_length",
            "sequence_length",
            "max_length",
            "max_seq_len",
            "max_seq_length",
            "max_position_embeddings",
            "n_positions",
            "context_length",
        ],
        "set model.context, in tokens",
    ),
    (&["vocab_size"], "set model.vocabulary"),
    (
        &["tp", "tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size"],
        "set parallel.tensor_ranks (--tensor)",
    ),
    (
        &["pp", "pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size"],
        "set parallel.pipeline_stages (--pipeline)",
    ),
    (
        &[
            "dp",
            "ddp",
            "multi_gpu",
            "strategy",
            "world_size",
            "num_gpus",
            "gpus",
            "n_gpus",
            "nproc_per_node",
            "num_processes",
            "local_rank",
        ],
        "every device that --devices names takes part; --nodes adds machines, --pipeline and \
         --tensor divide the model",
    ),
    (
        &[
            "nnodes",
            "num_nodes",
            "num_machines",
            "node_rank",
            "machine_rank",
            "master_addr",
            "master_port",
            "rdzv_endpoint",
            "rdzv_backend",
            "main_process_ip",
        ],
        "use --nodes N on the first machine and `potluck join` on the others, or `potluck launch` \
         on all of them",
    ),
    (
        &["accelerator", "cpu", "use_cpu", "no_cuda", "cuda", "gpu", "gpu_ids", "device"],
        "set parallel.devices (--devices): auto, cpu, or indices and parts of names from `potluck \
         devices`, such as \"0,1\"",
    ),
    (
        &["backend", "dist_backend"],
        "devices exchange gradients by themselves, over QUIC between machines; nothing needs to be \
         set",
    ),
    (
        &["sync_batchnorm", "sync_bn"],
        "statistics are those of a micro-batch; model.norm=group depends on no batch",
    ),
    (
        &["zero", "zero_stage", "fsdp", "deepspeed"],
        "the optimizer's state is always divided among the devices (ZeRO 1); --pipeline and \
         --tensor divide the parameters",
    ),
    (
        &["rotation", "mixup", "cutmix", "color_jitter", "augmentation", "transforms"],
        "pictures are changed at random by data.crop and data.flip only",
    ),
    (
        &[
            "model",
            "pretrained",
            "model_name",
            "model_name_or_path",
            "init_from",
            "from_pretrained",
            "weights",
            "pretrained_weights",
        ],
        "set model.kind or model.preset for a new model; --init DIR starts from weights",
    ),
    (&["resume_from", "resume_from_checkpoint", "ckpt_path", "load"], RESUME),
    (&["output_dir", "out_dir", "save_dir", "default_root_dir"], "use --out DIR"),
    (
        &["overwrite", "overwrite_output_dir", "force"],
        "no run is overwritten: name another with --out, or leave it out for the next one in runs/",
    ),
    (
        &["wandb", "report_to", "logger", "tensorboard_dir"],
        "set metrics.tensorboard for event files; each run has a record in JSON lines besides",
    ),
    (
        &["lora", "lora_alpha", "lora_r", "lora_rank", "peft", "qlora"],
        "adapters are not trained; optim.groups freezes parameters",
    ),
    (&["class_weight", "loss_weights"], "set train.class_weights"),
    (&["criterion", "loss_fn", "loss_function", "objective"], "set train.loss"),
];

/// Values of keys typed by users of other trainers, with their meaning here.
const OTHER_VALUES: &[(&str, &[&str], &str)] = &[
    (
        "train.precision",
        &[
            "bf16",
            "fp16",
            "f16",
            "16",
            "16-mixed",
            "bf16-mixed",
            "amp",
            "half",
            "float16",
            "bfloat16",
        ],
        "\"mixed\" multiplies in f16 and sums in f32",
    ),
    ("train.precision", &["fp32", "float32", "32", "full", "tf32"], "it is called \"f32\""),
    (
        "model.kind",
        &["gpt2", "gpt-2", "nanogpt", "transformer"],
        "use \"gpt\"; model.preset=gpt2 has its sizes",
    ),
    (
        "model.kind",
        &["llama2", "llama3", "mistral", "qwen", "smollm"],
        "use \"llama\"; model.preset names sizes of it",
    ),
    ("model.kind", &["lstm", "gru"], "use \"rnn\", and set model.cell"),
    ("model.kind", &["lenet", "convnet"], "use \"cnn\""),
    (
        "model.kind",
        &["resnet18", "resnet50"],
        "use \"resnet\"; model.layers=3 has 20 layers (6 layers + 2)",
    ),
    ("schedule.kind", &["steplr", "step_lr"], "it is called \"step\""),
    ("schedule.kind", &["onecycle", "one_cycle"], "it is called \"one-cycle\""),
    ("schedule.kind", &["plateau", "reduce_on_plateau"], "train.patience ends a run on a plateau"),
    (
        "train.loss",
        &["ce", "crossentropy", "cross-entropy", "nll"],
        "it is called \"cross_entropy\"",
    ),
    ("train.loss", &["mae"], "it is called \"l1\""),
    ("train.loss", &["smooth_l1"], "it is called \"huber\""),
];

/// Full name of a key that a flag names without its section, if only one section has it; any other
/// name unchanged.
pub(super) fn with_section<'a>(origin: &Origin, name: &'a str) -> Result<&'a str, ConfigError> {
    let found = keys_named(name);
    match found[..] {
        [] => Ok(name),
        [one] => Ok(one),
        _ => {
            let hint = format!("there are {}", found.join(", "));
            Err(ConfigError::Unknown { origin: origin.clone(), name: format!("key {name}"), hint })
        }
    }
}

/// Returns the counterpart of another trainer's setting. `name` is a key, with or without its
/// section, or a flag without its hyphens.
pub fn of_other_trainers(name: &str) -> Option<&'static str> {
    let name = in_words(name);
    let setting = name.rsplit('.').next().unwrap_or(&name);
    OTHER_TRAINERS.iter().find(|(names, _)| names.contains(&setting)).map(|(_, answer)| *answer)
}

/// Returns an answer to the name of a setting in the words of a command line: what it says to set
/// becomes the flags of these keys, by `flag_of_key`, or else values of `--set`.
pub fn as_flags(answer: &str, flag_of_key: impl Fn(&str) -> Option<String>) -> String {
    let Some(setting) = answer.strip_prefix("set ") else { return answer.to_owned() };
    let end = setting.find([',', ';', ':']).unwrap_or(setting.len());
    let (keys, rest) = setting.split_at(end);
    let mut words = Vec::new();
    for word in keys.split(' ') {
        // The flag of the key before it.
        if word.starts_with("(--") {
            continue;
        }
        let (name, value) = word.split_once('=').unwrap_or((word, ""));
        let value = value.trim_matches('"');
        if known_key(name).is_none() {
            words.push(word.to_owned());
        } else if let Some(flag) = flag_of_key(name) {
            words.push(format!("{flag} {value}").trim_end().to_owned());
        } else if value.is_empty() {
            words.push(format!("--set {name}=VALUE"));
        } else {
            words.push(format!("--set {name}={value}"));
        }
    }
    let verb = if words[0].starts_with("--set ") { "type" } else { "use" };
    format!("{verb} {}{rest}", words.join(" "))
}

/// Full names of the keys that a flag would set if it existed, such as `parallel.shares` for
/// `--shares`.
pub fn keys_of_flag(flag: &str) -> Vec<&'static str> {
    let name = in_words(flag);
    match known_key(&name) {
        Some(key) => vec![key.full_name],
        None => keys_named(&name),
    }
}

/// Full names of the keys that have a name without their section.
fn keys_named(name: &str) -> Vec<&'static str> {
    let mut found = Vec::new();
    for key in known_keys() {
        if key.name == name && !found.contains(&key.full_name) {
            found.push(key.full_name);
        }
    }
    found
}

/// Explanation of a refused value that is known from another trainer.
pub(super) fn value_of_other_trainers(key: &str, written: &str) -> Option<&'static str> {
    let value = written.trim_matches('"').to_lowercase();
    let found = OTHER_VALUES.iter().find(|(of, values, _)| *of == key && values.contains(&&*value));
    found.map(|(.., answer)| *answer)
}

pub(super) fn unknown_section(origin: Origin, name: &str) -> ConfigError {
    let hint = match nearest(name, SECTIONS.iter().map(|(section, _)| (*section, *section))) {
        Some(near) => format!("did you mean [{near}]?"),
        None => {
            let known: Vec<String> =
                SECTIONS.iter().map(|(section, _)| format!("[{section}]")).collect();
            format!("there are {}", known.join(", "))
        }
    };
    ConfigError::Unknown { origin, name: format!("section [{name}]"), hint }
}

pub(super) fn unknown_key(origin: Origin, name: &str) -> ConfigError {
    ConfigError::Unknown { origin, name: format!("key {name}"), hint: hint_for_key(name) }
}

fn hint_for_key(name: &str) -> String {
    if let Some(now) = renamed(name) {
        return format!("it is called {now} now");
    }
    if SECTIONS.iter().any(|(section, _)| *section == name) {
        return format!("{name} is a section: [{name}]");
    }
    if let Some(answer) = of_other_trainers(name) {
        return answer.to_owned();
    }
    match likely_key(name) {
        Some(key) => format!("did you mean {key}?"),
        None => format!("the nearest are {}; {ALL_KEYS}", nearest_keys(name).join(", ")),
    }
}

/// Current name of a key by its former one, with or without its section.
fn renamed(name: &str) -> Option<&'static str> {
    let name = in_words(name);
    for (before, now) in RENAMED {
        if before == name || before.split_once('.').is_some_and(|(_, key)| key == name) {
            return Some(now);
        }
    }
    None
}

/// Key that is probably meant: if the section is misspelled, if only another section has the key,
/// or if the key is misspelled; in this order.
fn likely_key(name: &str) -> Option<&'static str> {
    let key_name = name.rsplit('.').next().unwrap_or(name);
    let keys = known_keys();
    let mut namesakes = Vec::new();
    for key in &keys {
        if key.name == key_name {
            namesakes.push(key.full_name);
        }
    }
    if let Some(near) = nearest(name, namesakes.iter().map(|of| (*of, *of))) {
        return Some(near);
    }
    if let [only] = namesakes[..] {
        return Some(only);
    }
    nearest(name, keys.iter().map(|key| (key.full_name, key.full_name)))
        .or_else(|| nearest(key_name, keys.iter().map(|key| (key.name, key.full_name))))
}

/// Keys with the most similar names, within the named section if it exists.
fn nearest_keys(name: &str) -> Vec<&'static str> {
    let name = in_words(name);
    let (section, key_name) = name.rsplit_once('.').unwrap_or(("", &name));
    let has_section = SECTIONS.iter().any(|(known, _)| *known == section);
    let mut similar: Vec<(f64, &'static str)> = Vec::new();
    for key in known_keys() {
        let is_listed = similar.iter().any(|(_, listed)| *listed == key.full_name);
        if !is_listed && (!has_section || key.section == section) {
            similar.push((strsim::jaro_winkler(key_name, key.name), key.full_name));
        }
    }
    // A stable sort, so that equally similar keys stay in the order of the listing.
    similar.sort_by(|(one, _), (other, _)| other.total_cmp(one));
    similar.truncate(SUGGESTIONS);
    similar.into_iter().map(|(_, key)| key).collect()
}

/// Meaning of the spelling nearest to `typed` among pairs (spelling, meaning), if it is near enough
/// to be a typo: one edit per four letters (rounded up), at most three.
fn nearest<'a>(typed: &str, known: impl Iterator<Item = (&'a str, &'a str)>) -> Option<&'a str> {
    let typed = in_words(typed);
    let mut near = None;
    let mut least = usize::MAX;
    for (spelling, meaning) in known {
        let distance = strsim::osa_distance(&typed, spelling);
        if distance <= spelling.len().div_ceil(4).min(3) && distance < least {
            near = Some(meaning);
            least = distance;
        }
    }
    near
}

/// Name in the form of keys: lower case, with underscores.
fn in_words(name: &str) -> String {
    name.to_lowercase().replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keys that a sentence mentions: words with a point between letters.
    fn keys_in(answer: &str) -> Vec<&str> {
        let words = answer.split([' ', ',', ';', ':']);
        words
            .map(|word| word.split('=').next().unwrap_or(word))
            .filter(|word| {
                word.split_once('.').is_some_and(|(section, key)| {
                    SECTIONS.iter().any(|(known, _)| *known == section) && !key.is_empty()
                })
            })
            .collect()
    }

    #[test]
    fn names_of_other_trainers_lead_to_keys() {
        for (names, answer) in OTHER_TRAINERS {
            for name in *names {
                let is_key = known_keys().iter().any(|key| key.name == *name);
                assert!(!is_key, "{name} is a key of potluck");
                assert_eq!(in_words(name), *name);
                assert_eq!(of_other_trainers(name), Some(*answer), "{name} is listed twice");
                assert_eq!(of_other_trainers(&format!("train.{name}")), Some(*answer));
            }
            for key in keys_in(answer) {
                assert!(known_key(key).is_some(), "{key} of {answer:?} is no key");
            }
        }
        assert_eq!(of_other_trainers("Batch-Size"), of_other_trainers("batch_size"));
        assert_eq!(of_other_trainers("steps"), None);
    }

    #[test]
    fn values_of_other_trainers_lead_to_values() {
        for (key, values, answer) in OTHER_VALUES {
            let accepts = &known_key(key).unwrap_or_else(|| panic!("{key} is no key")).accepts;
            for value in *values {
                let is_word = accepts.to_string().contains(&format!("\"{value}\""));
                assert!(!is_word, "{key} accepts {value}");
                assert_eq!(value_of_other_trainers(key, value), Some(*answer));
            }
            for other in keys_in(answer) {
                assert!(known_key(other).is_some(), "{other} of {answer:?} is no key");
            }
        }
        assert!(value_of_other_trainers("train.precision", "\"BF16\"").is_some());
        assert_eq!(value_of_other_trainers("train.loss", "bf16"), None);
    }

    #[test]
    fn flags_lead_to_keys() {
        assert_eq!(keys_of_flag("shares"), ["parallel.shares"]);
        assert_eq!(keys_of_flag("weight-decay"), ["optim.weight_decay"]);
        assert_eq!(keys_of_flag("optim.weight-decay"), ["optim.weight_decay"]);
        let kinds = keys_of_flag("kind");
        assert!(kinds.contains(&"data.kind") && kinds.contains(&"optim.kind"), "{kinds:?}");
        assert!(keys_of_flag("zebra").is_empty());
    }

    #[test]
    fn answers_are_in_the_words_of_a_command_line() {
        let reworded = |name: &str| {
            let answer = of_other_trainers(name).unwrap();
            as_flags(answer, |key| match key {
                "train.batch" => Some("--batch".into()),
                "train.precision" => Some("--precision".into()),
                _ => None,
            })
        };
        assert_eq!(
            reworded("max_grad_norm"),
            "type --set optim.clip=VALUE, the largest norm of the gradient"
        );
        assert_eq!(reworded("bs"), "use --batch, the samples of a step over all devices");
        assert_eq!(
            reworded("fp16"),
            "use --precision mixed: products multiply in f16 and sum in f32"
        );
        assert_eq!(reworded("betas"), "type --set optim.beta1=VALUE and --set optim.beta2=VALUE");
        assert_eq!(
            reworded("gradient_checkpointing"),
            "type --set train.recompute=blocks or --set train.recompute=selective"
        );
        assert_eq!(reworded("shuffle"), of_other_trainers("shuffle").unwrap());
    }

    #[test]
    fn a_checkpoint_alone_is_no_setting() {
        assert_eq!(of_other_trainers("checkpoint"), None);
        assert_eq!(of_other_trainers("ckpt_path"), Some(RESUME));
        let answer = value_of_other_trainers("model.kind", "resnet50").unwrap();
        assert_eq!(answer, "use \"resnet\"; model.layers=3 has 20 layers (6 layers + 2)");
        let shuffled = of_other_trainers("shuffle").unwrap();
        assert!(shuffled.ends_with("by train.seed, but for model.stateful"), "{shuffled}");
    }
}
