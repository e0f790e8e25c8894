//! The rules, and the tables that they read.

use std::collections::BTreeMap;

use crate::source::{Source, doc_comments, enum_variants, imports_from, type_names, words};

pub const COLUMNS_MAX: usize = 100;

/// Types of one name in several files, with the reason.
pub const REPEATED_TYPE_NAMES: &[(&str, &str)] = &[
    ("Action", "what a sans-IO machine asks for, one per machine"),
    ("Event", "what a sans-IO machine is given, one per machine; and what happens in a run"),
    ("Features", "of an adapter, and of samples"),
    ("Key", "of a random stream, and of the configuration"),
    ("ReadbackQueue", "one per executor, with the same methods"),
];

/// Words with which doc comments do not open, and the part of them that does all the same. May only
/// fall.
pub const QUESTION_WORDS: &str = "What Whether Who Whom Whose How Where When Why Which";
pub const QUESTION_OPENINGS_MAX: f64 = 0.005;

/// Files that mention every op: its variant, shape rule, gradient rule, builder method, and the
/// line of its twin in the table.
pub const OP_FILES: [&str; 5] = [
    "src/graph/op.rs",
    "src/graph/shapes.rs",
    "src/graph/passes/gradients.rs",
    "src/graph/builder.rs",
    TWIN_TABLE,
];
/// Folders of the rules by topic, which the files beside them dispatch to.
pub const OP_FOLDERS: [&str; 2] = ["src/graph/shapes/", "src/graph/passes/gradients/"];
/// The table of ops and their twins.
pub const TWIN_TABLE: &str = "src/kernels/ops/mod.rs";

/// Further files that mention ops, the ops between spaces, and the reason.
pub const OP_EXCEPTIONS: &[(&str, &str, &str)] = &[
    ("src/graph/broadcasting.rs", "Binary Broadcast MaxPool2d", "composes functions of ops"),
    ("src/graph/loss_terms.rs", "Broadcast Concat", "composes a loss of ops"),
    ("src/graph/losses.rs", "CrossEntropy SquaredError", "the same, of those of losses"),
    ("src/graph/convolutions.rs", "Conv2dInputGrad Pad", "composes functions of ops"),
    ("src/graph/pools.rs", "MaxPool2d AvgPool2d Sum", "the same"),
    ("src/graph/indexing.rs", "Gather ScatterAdd", "the same"),
    ("src/kernels/autotune/cache.rs", "MatMul", "the hash of all kernels covers the emitted one"),
    ("src/bench/matmul.rs", "MatMul", "a benchmark of products"),
    (
        "src/kernels/autotune/certify.rs",
        "Attention AttentionGrad",
        "an op that rounds twice is certified at magnitudes of its own",
    ),
    ("src/kernels/ops/attention/coop.rs", "MatMul", "the types of matrices are those of products"),
    (
        "src/kernels/ops/linear_cross_entropy.rs",
        "MatMul CrossEntropy CrossEntropyGrad",
        "the ops of whose kernels it is composed",
    ),
    (
        "src/graph/lib.rs",
        "LinearCrossEntropy LinearCrossEntropyGrad LinearCrossEntropyPass",
        "sets the rows of a chunk",
    ),
    (
        "src/kernels/ops/recurrent/steps.rs",
        "Permute Slice Pad Concat",
        "transposes a weight by the kernel of the op",
    ),
    ("src/kernels/ops/conv/mod.rs", "MatMul", "tiles of products are those of convolutions"),
    ("src/kernels/ops/conv/shared.rs", "MatMul", "the same"),
    ("src/kernels/ops/conv/shared_weight.rs", "MatMul", "the same"),
    ("src/kernels/ops/conv/tile.rs", "MatMul", "the same"),
    (
        "src/graph/passes/shard.rs",
        "MatMul Unary Binary Reshape Dropout Attention CacheUpdate CachedAttention Rotary RmsNorm \
         Embedding CrossEntropy LinearCrossEntropy Spread AllReduce",
        "the ops that a rank of a tensor group computes a part of",
    ),
    (
        "src/graph/passes/large_parameters.rs",
        "MatMul Binary Concat Embedding LinearCrossEntropy JoinCrossEntropy",
        "the ops that read tables, and those that join what slices give",
    ),
    ("src/kernels/exec/gpu/add.rs", "Binary", "adds chunks of gradients by the kernel of the op"),
    (
        "src/graph/passes/fuse.rs",
        "MatMul Unary UnaryGrad Binary LayerNormGrad RmsNormGrad Conv2d Conv2dInputGrad Reshape \
         Fused",
        "the table of fusions",
    ),
    (
        "src/graph/passes/store_activations.rs",
        "PackBf16 UnpackBf16 Reshape AllReduce",
        "packs what is kept or sent, and reads aliases of it",
    ),
    (
        "src/graph/passes/merge_gradients.rs",
        "MatMul Sum LinearWeightGrad LayerNormGrad RmsNormGrad LayerNormWeightGrad \
         LayerNormAffineGrad NormBackward",
        "the gradients that become one node",
    ),
    ("src/kernels/ops/linear_weight_grad.rs", "MatMul Sum Broadcast", "the two that it computes"),
    (
        "src/kernels/ops/norm_backward.rs",
        "LayerNorm LayerNormGrad LayerNormWeightGrad LayerNormAffineGrad RmsNorm RmsNormGrad",
        "the same",
    ),
    ("src/kernels/ops/matmul/sizes.rs", "LinearWeightGrad", "one of its products"),
    ("src/kernels/ops/epilogue.rs", "Unary UnaryGrad Binary Fused", "the steps of a fused op"),
    (
        "src/kernels/ops/fused.rs",
        "MatMul Unary UnaryGrad Binary LayerNorm LayerNormGrad LayerNormWeightGrad \
         LayerNormAffineGrad RmsNorm RmsNormGrad BinaryGrad Conv2d Conv2dInputGrad \
         Conv2dWeightGrad",
        "the roots of a fused op",
    ),
    (
        "src/kernels/ops/fused/probes.rs",
        "MatMul Unary Binary LayerNormGrad RmsNormGrad Conv2d Conv2dInputGrad Conv2dWeightGrad",
        "the same",
    ),
];

/// Rooms of each crate, those below first: the crate, the room, and what it may import of its
/// crate, between spaces. A crate's own room has its name: the files beside its `lib.rs` that are
/// in no other room. Cargo sees to imports between crates.
pub const ROOMS: &[(&str, &str, &str)] = &[
    ("core", "core", ""),
    ("core", "files", ""),
    ("core", "faults", "core"),
    ("core", "metrics", "core faults files"),
    ("graph", "graph", ""),
    ("graph", "model", "graph"),
    ("graph", "optim", "graph"),
    ("data", "data", ""),
    ("parallel", "collective", ""),
    ("parallel", "comm", "collective"),
    ("parallel", "parallel", "collective"),
    ("parallel", "sim", "collective comm parallel"),
    ("parallel", "planner", "collective parallel sim"),
    ("net", "cluster", ""),
    ("net", "net", ""),
    ("net", "nodes", "cluster net"),
    ("net", "status", "net nodes"),
    ("kernels", "device", ""),
    ("kernels", "kernels", "device"),
    ("kernels", "autotune", "device kernels"),
    ("kernels", "exec", "device kernels autotune"),
    ("train", "keys", ""),
    ("train", "families", "keys"),
    ("train", "config", "keys families"),
    ("train", "checkpoint", ""),
    ("train", "hugging_face", "keys families checkpoint"),
    ("train", "gguf", "families checkpoint hugging_face"),
    ("train", "runtime", ""),
    ("train", "train", "keys families config checkpoint hugging_face gguf runtime"),
    ("bench", "bench", ""),
    ("gantt", "gantt", ""),
    ("ui", "ui", ""),
    ("cli", "cli", ""),
];

/// Files outside `config` that may know the configuration, with the reason. All others get what it
/// means, a `RunSpec`.
pub const CONFIGURATION: &[(&str, &str)] = &[
    ("src/train/spec.rs", "derives what it means"),
    ("src/cli/train.rs", "reads it, prints it, and compares it with that of a checkpoint"),
    ("src/cli/nodes.rs", "reads the keys of one node"),
    ("src/cli/mod.rs", "gives its errors their exit code"),
    ("src/cli/unknown_flags.rs", "leads unknown flags to keys"),
    ("src/cli/runs.rs", "reads how long a run is"),
];

/// The table of settings, with their names in the program and in the library.
pub const SETTINGS: &str = "src/core/setting.rs";
/// Sections of the configuration, of whose keys other rooms speak by that table.
pub const SECTIONS: &str = "train parallel model optim schedule data faults";

/// Packages that only some rooms of the crates which have them know, also in their tests.
pub const CRATES: &[(&str, &str)] = &[
    ("quinn", "net"),
    ("rustls", "net"),
    ("rcgen", "net"),
    ("socket2", "net"),
    ("tokio", "net status"),
    ("bytes", "net status"),
    ("hyper", "status"),
    ("hyper_util", "status"),
    ("http_body_util", "status"),
    ("arc_swap", "nodes status"),
    ("zeroize", "net"),
    ("indicatif", "ui"),
    ("plotters", "ui"),
    ("crc", "metrics"),
    ("fs4", "files"),
    ("clap", "cli"),
    ("anyhow", "cli"),
    ("signal_hook", "faults train"),
];

/// Rooms without IO, clocks and threads.
pub const PURE: &str = "core graph collective cluster model optim parallel planner";
/// Words that [`PURE`] rooms do not have outside tests.
pub const IMPURE: &str =
    "std::fs std::net std::io std::env std::thread std::time Instant SystemTime";
/// Rooms that start long-lived threads.
pub const THREADED: &str = "net nodes status runtime train";
/// Rooms that print, and that may name keys and flags.
pub const OF_THE_PROGRAM: &str = "train bench cli";
/// Rooms that name keys, because they have them. The messages of all others are also those of a
/// library.
pub const OF_KEYS: &str = "keys families config hugging_face gguf";

/// The room that a path of a crate leads to: one of the crate, or the crate's own.
pub fn room_named<'a>(package: &'a str, name: &str) -> &'a str {
    let found = ROOMS.iter().find(|row| row.0 == package && row.1 == name);
    found.map_or(package, |row| row.1)
}

/// Returns true if a list of names between spaces has this one.
pub fn lists(names: &str, name: &str) -> bool {
    names.split_whitespace().any(|known| known == name)
}

/// The rooms that a room may import, and its own; nothing if it is not in the table.
fn known_to(package: &str, room: &str) -> Option<Vec<&'static str>> {
    let (_, own, allowed) = ROOMS.iter().find(|row| (row.0, row.1) == (package, room))?;
    Some(allowed.split_whitespace().chain([*own]).collect())
}

/// Imports point to the rooms of the table; `super` does not lead around it.
pub fn layers(file: &Source) -> Vec<String> {
    let Some((package, room)) = file.place().filter(|_| file.is_rust()) else { return Vec::new() };
    let Some(known) = known_to(package, room) else {
        return vec![
            file.at(0, format!("{room} is not a room of the table in tests/tidy/rules.rs")),
        ];
    };
    let mut wrong = Vec::new();
    let mut imports = imports_from(&file.code, "crate");
    // In a file beside lib.rs, `super` is the crate.
    if file.is_below_root() {
        let leads_to_room = |name: &str| room_named(package, name) != package;
        let above = imports_from(&file.code, "super").into_iter();
        imports.extend(above.filter(|(_, name)| leads_to_room(name)));
    }
    for (offset, name) in imports {
        let is_glob = name == "*" || name == "self";
        if is_glob {
            wrong.push(file.at(offset, format!("{name} of a crate names no room")));
            continue;
        }
        let other = room_named(package, &name);
        if !known.contains(&other) {
            wrong.push(file.at(offset, format!("{room} may not know {other}")));
        }
    }
    for offset in words(&file.code, "super::super") {
        wrong.push(file.at(offset, "super::super hides the room: name it from crate"));
    }
    let own = format!("src/{package}/{room}");
    if file.path == format!("{own}/mod.rs") || file.path == format!("{own}.rs") {
        for offset in file.outside_tests("super::") {
            wrong.push(file.at(offset, "super:: leaves the room: name it from crate"));
        }
    }
    wrong
}

/// Places outside the room `config` that know the configuration.
fn configuration_places(file: &Source) -> Vec<usize> {
    let is_outside =
        !file.path.starts_with("src/train/config/") && !file.path.starts_with("tests/");
    if !file.is_rust() || !is_outside {
        return Vec::new();
    }
    let imports = imports_from(&file.code, "crate").into_iter();
    let mut places: Vec<usize> =
        imports.filter(|(_, name)| name == "config").map(|(at, _)| at).collect();
    let from_outside = ["potluck_train::config", "RunConfig"];
    places.extend(from_outside.iter().flat_map(|word| words(&file.code, word)));
    places.sort_unstable();
    places
}

/// Only the files of [`CONFIGURATION`] know the configuration, and all of them do.
pub fn configuration(file: &Source) -> Vec<String> {
    let places = configuration_places(file);
    if !CONFIGURATION.iter().any(|(path, _)| *path == file.path) {
        let why = "only CONFIGURATION in tests/tidy/rules.rs may know the configuration";
        places.into_iter().map(|at| file.at(at, why)).collect()
    } else if places.is_empty() {
        vec![file.at(0, "no longer knows the configuration: take it off the list")]
    } else {
        Vec::new()
    }
}

/// Some crates, clocks, files, threads and prints have their rooms.
pub fn absences(file: &Source) -> Vec<String> {
    let Some(room) = file.room().filter(|_| file.is_rust()) else { return Vec::new() };
    let mut wrong = Vec::new();
    for (name, rooms) in CRATES.iter().filter(|(_, rooms)| !lists(rooms, room)) {
        let paths = [format!("{name}::"), format!("use {name};"), format!("use {name} as")];
        for offset in paths.iter().flat_map(|path| words(&file.code, path)) {
            wrong.push(file.at(offset, format!("only {rooms} may know {name}")));
        }
    }
    let mut forbid = |forbidden: &str, why: &str| {
        for word in forbidden.split_whitespace() {
            for offset in file.outside_tests(word) {
                wrong.push(file.at(offset, format!("{word}: {why}")));
            }
        }
    };
    if lists(PURE, room) {
        forbid(IMPURE, &format!("{room} has no IO, no clock and no thread"));
    }
    if !lists(THREADED, room) {
        forbid("thread::spawn thread::Builder", &format!("only {THREADED} start threads"));
    }
    if !lists(OF_THE_PROGRAM, room) {
        forbid("println! print! eprintln! eprint!", &format!("{room} prints nothing"));
    }
    wrong
}

/// Literals of rooms whose messages users of the library read, too, name no keys and no flags.
pub fn settings_by_hand(file: &Source) -> Vec<String> {
    let is_checked = |room: &str| !lists(OF_KEYS, room) && !lists(OF_THE_PROGRAM, room);
    // Its names of parameters, those of Hugging Face's files, begin like the keys of a model.
    if file.path == "src/graph/model/llama.rs"
        || !file.is_rust()
        || !file.room().is_some_and(is_checked)
    {
        return Vec::new();
    }
    let (literals, tests) = (file.literals(), file.tests());
    let sections = SECTIONS.split_whitespace().map(|section| format!("{section}."));
    let mut wrong = Vec::new();
    for name in sections.chain(["--".into()]) {
        for at in words(&literals, &name) {
            let before = literals[..at].chars().next_back();
            let is_name = literals[at + name.len()..].starts_with(|c: char| c.is_ascii_lowercase())
                && before != Some('.');
            if is_name && !tests.iter().any(|test| test.contains(&at)) {
                wrong.push(file.at(at, format!("names a setting by hand: see {SETTINGS}")));
            }
        }
    }
    wrong
}

/// Lines end within the columns, but for the rows of tables in Markdown, which cannot be divided.
pub fn columns(file: &Source) -> Vec<String> {
    let is_row = |line: &str| file.path.ends_with(".md") && line.starts_with('|');
    let too_long = |line: &&str| line.chars().count() > COLUMNS_MAX && !is_row(line);
    let lines = file.text.lines().enumerate().filter(|(_, line)| too_long(line));
    lines.map(|(i, _)| format!("{}:{}: over {COLUMNS_MAX} columns", file.path, i + 1)).collect()
}

/// Nothing is left over from work in progress, and nothing is silenced without a reason.
pub fn leftovers(file: &Source) -> Vec<String> {
    let mut wrong = Vec::new();
    for word in ["dbg!", "todo!", "unimplemented!", "#[ignore"] {
        wrong.extend(words(&file.code, word).map(|at| file.at(at, format!("{word} is left over"))));
    }
    for word in ["FIXME", "XXX", "TODO"] {
        let found = words(&file.comments, word);
        wrong.extend(found.map(|at| file.at(at, format!("{word} is left over"))));
    }
    for at in ["#[allow", "#![allow"].iter().flat_map(|allow| words(&file.code, allow)) {
        let attribute = &file.code[at..at + file.code[at..].find(']').unwrap_or(0)];
        let line = file.text[..at].matches('\n').count();
        let is_comment = |line: Option<&str>| line.is_some_and(|line| !line.trim().is_empty());
        let above = line.checked_sub(1).and_then(|above| file.comments.lines().nth(above));
        let beside = file.comments.lines().nth(line);
        if !attribute.contains("reason") && !is_comment(above) && !is_comment(beside) {
            wrong.push(file.at(at, "allow without a reason"));
        }
    }
    wrong
}

/// Outside tests, whatever cannot fail says why (`expect`), and the rest is an error value.
pub fn unwraps(file: &Source) -> Vec<String> {
    let found = file.outside_tests(".unwrap()").into_iter();
    found.map(|at| file.at(at, "unwrap() outside tests: expect(why) or an error")).collect()
}

/// Where bits are decided that all machines should have, no function of the platform's C library,
/// whose last digits differ between systems: those of `libm`, or of `kernels::simd`.
pub fn platform_math(file: &Source) -> Vec<String> {
    const FUNCTIONS: &[&str] =
        &[".exp()", ".ln()", ".tanh()", ".sin()", ".cos()", ".powf(", "f64::sin", "f64::cos"];
    let decides =
        ["src/core/", "src/graph/", "src/train/sampling.rs", "src/kernels/ops/head_product.rs"];
    if !decides.iter().any(|place| file.path.starts_with(place)) {
        return Vec::new();
    }
    let mut wrong = Vec::new();
    for function in FUNCTIONS {
        for at in file.outside_tests(function) {
            wrong.push(file.at(at, format!("{function} of the platform: use libm's")));
        }
    }
    wrong
}

/// Every Rust file says at its top what it is.
pub fn heads(file: &Source) -> Vec<String> {
    let is_fine = !file.is_rust() || file.text.starts_with("//! ");
    if is_fine { Vec::new() } else { vec![file.at(0, "begins without a //! head")] }
}

/// A shader's head says what its threads are and how many bytes move; a snippet of
/// `shaders/lib` just says what it is.
pub fn shader_heads(file: &Source) -> Vec<String> {
    if !file.path.starts_with("shaders/") || !file.path.ends_with(".wgsl") {
        return Vec::new();
    }
    let head: Vec<&str> = file.text.lines().take_while(|line| line.starts_with("//")).collect();
    let head = head.join("\n").to_lowercase();
    let says = |words: &[&str]| words.iter().any(|word| head.contains(word));
    let mut wrong = Vec::new();
    if head.len() < 40 {
        wrong.push(file.at(0, "begins without a head comment"));
    } else if !file.path.starts_with("shaders/lib/") {
        if !says(&["invocation", "workgroup", "thread"]) {
            wrong.push(file.at(0, "the head does not say what its threads are"));
        }
        if !says(&["byte"]) {
            wrong.push(file.at(0, "the head does not say how many bytes move"));
        }
    }
    wrong
}

/// Every shader has its Rust twin, which is declared and used.
pub fn twins(files: &[Source]) -> Vec<String> {
    let text = |path: &str| files.iter().find(|f| f.path == path).map_or("", |f| &f.text);
    let mut wrong = Vec::new();
    for shader in files.iter().filter(|file| file.path.ends_with(".wgsl")) {
        let Some(name) = shader.path.strip_prefix("shaders/") else { continue };
        let name = name.trim_end_matches(".wgsl");
        if name.starts_with("lib/") {
            continue;
        }
        let Some((directory, module, twin)) =
            twin_places(name).into_iter().find(|(_, _, twin)| !text(twin).is_empty())
        else {
            wrong.push(shader.at(0, "has no twin in src/kernels"));
            continue;
        };
        let table = format!("{directory}/mod.rs");
        if words(text(&table), &format!("mod {module};")).next().is_none() {
            wrong.push(shader.at(0, format!("{module} is not declared in {table}")));
        }
        let uses = format!("{module}::");
        let others = files.iter().filter(|file| file.path != twin && file.path.starts_with("src/"));
        let is_used = |file: &Source| words(&file.code, &uses).next().is_some();
        if !others.into_iter().any(is_used) {
            wrong.push(shader.at(0, format!("nothing uses its twin {twin}")));
        }
    }
    wrong
}

/// An op is known to [`OP_FILES`], to the files of [`OP_FOLDERS`], to its twin and to the twin's
/// shaders; every other file that mentions it needs an exception. A file mentions an op by its
/// variant, by the module of its twin or by the name of a shader of the twin, and imports no
/// variants and renames no `Op`, so that it cannot mention one unseen. Tests may mention any.
pub fn op_users(files: &[Source], exceptions: &[(&str, &str, &str)]) -> Vec<String> {
    let code = |path: &str| files.iter().find(|f| f.path == path).map_or("", |f| &f.code);
    let (mut wrong, mut used) = (Vec::new(), Vec::new());
    for op in enum_variants(code("src/graph/op.rs"), "Op") {
        let twin = twin_of(code(TWIN_TABLE), &op);
        for file in files.iter().filter(|file| file.path.starts_with("src/") && file.is_rust()) {
            let is_known = knows_ops(&file.path);
            let is_own = twin.as_deref().is_some_and(|twin| is_twin_file(&file.path, twin));
            let mention = mention(file, &op, twin.as_deref(), files);
            let Some(at) = mention.filter(|_| !is_known && !is_own) else { continue };
            match exceptions.iter().find(|(path, ops, _)| *path == file.path && lists(ops, &op)) {
                Some((path, ..)) => used.push((*path, op.clone())),
                None => wrong.push(file.at(at, format!("mentions the op {op}"))),
            }
        }
    }
    let others = files.iter().filter(|file| file.path.starts_with("src/") && file.is_rust());
    for file in others.filter(|file| !knows_ops(&file.path)) {
        for hidden in ["Op::*", "Op::{", "Op as "] {
            let places = file.outside_tests(hidden).into_iter();
            wrong.extend(places.map(|at| file.at(at, format!("{hidden} hides the ops it brings"))));
        }
    }
    for (path, ops, _) in exceptions {
        for op in ops.split(' ').filter(|op| !used.contains(&(*path, op.to_string()))) {
            wrong.push(format!("{path} no longer mentions {op}: take it off the list"));
        }
    }
    wrong
}

/// Returns true for a file that may mention any op.
fn knows_ops(path: &str) -> bool {
    OP_FILES.contains(&path) || OP_FOLDERS.iter().any(|folder| path.starts_with(folder))
}

/// The module of an op's twin, by the table: `a` in `Op::A | Op::AGrad => a::TWIN,`.
fn twin_of(table: &str, op: &str) -> Option<String> {
    let arm = &table[words(table, &format!("Op::{op}")).next()?..];
    let (_, twin) = arm.split_once("=>")?;
    let twin = twin.split(',').next()?.trim().strip_suffix("::TWIN")?;
    Some(twin.to_string())
}

/// Returns true for a twin's own file: `a.rs`, `a_part.rs` or in the directory `a`.
fn is_twin_file(path: &str, twin: &str) -> bool {
    let behind = path.strip_prefix("src/kernels/ops/").and_then(|name| name.strip_prefix(twin));
    behind.is_some_and(|rest| rest == ".rs" || rest.starts_with(['/', '_']))
}

/// Offset at which a file first mentions an op outside tests.
fn mention(file: &Source, op: &str, twin: Option<&str>, files: &[Source]) -> Option<usize> {
    let mut found = file.outside_tests(&format!("Op::{op}"));
    let Some(twin) = twin else { return found.into_iter().min() };
    if file.room() == Some("kernels") {
        let is_generic = |at: &usize| file.code[at + twin.len()..].starts_with("::<");
        let inside = file.outside_tests(&format!("{twin}::"));
        found.extend(inside.into_iter().filter(|at| !is_generic(at)));
    }
    // `ops::a::f`, or `a` in `ops::{a, b}`.
    for at in file.outside_tests("ops::") {
        let rest = &file.code[at + "ops::".len()..];
        let end = if rest.starts_with('{') { rest.find('}') } else { rest.find([':', ';', '(']) };
        let names = &rest[..end.unwrap_or(rest.len())];
        found.extend(words(names, twin).next().map(|_| at));
    }
    let stems = files.iter().filter_map(|file| {
        let stem = file.path.strip_prefix("shaders/")?.strip_suffix(".wgsl")?;
        (stem == twin || stem.starts_with(&format!("{twin}_"))).then_some(stem)
    });
    for stem in stems {
        let shader = format!("Shader::new(\"{stem}\"");
        let tests = file.tests();
        let places = file.text.match_indices(&shader).map(|(at, _)| at);
        found.extend(places.filter(|at| !tests.iter().any(|test| test.contains(at))));
    }
    found.into_iter().min()
}

/// Doc comments open with the name of the thing in the field's terms: of all of them at most
/// [`QUESTION_OPENINGS_MAX`] begin with a question word.
pub fn question_openings(files: &[Source]) -> Vec<String> {
    let (mut all, mut found) = (0, Vec::new());
    let is_documented = |file: &&Source| {
        file.is_rust() && ["src/", "tests/"].iter().any(|place| file.path.starts_with(place))
    };
    for file in files.iter().filter(is_documented) {
        for (line, text) in doc_comments(&file.text) {
            all += 1;
            let first = text.split([' ', ',']).next().unwrap_or_default();
            if lists(QUESTION_WORDS, first) {
                found.push(format!("{}:{line}: opens with {first}", file.path));
            }
        }
    }
    let most = (QUESTION_OPENINGS_MAX * all as f64) as usize;
    if found.len() <= most {
        return Vec::new();
    }
    found.push(format!("{} of {all} doc comments, and at most {most} may", found.len()));
    found
}

/// Names of types that several files define, without an exception, and exceptions that are not
/// needed any more.
pub fn repeated_type_names(files: &[Source], exceptions: &[(&str, &str)]) -> Vec<String> {
    let mut places: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for file in files.iter().filter(|file| file.path.starts_with("src/") && !file.is_test) {
        for name in file.is_rust().then(|| type_names(file)).into_iter().flatten() {
            places.entry(name).or_default().push(&file.path);
        }
    }
    places.retain(|_, paths| paths.len() > 1);
    let excepted = |name: &str| exceptions.iter().any(|(known, _)| *known == name);
    let repeated = places.iter().filter(|(name, _)| !excepted(name));
    let mut wrong: Vec<String> =
        repeated.map(|(name, paths)| format!("{name} is a type of {}", paths.join(", "))).collect();
    let idle = exceptions.iter().filter(|(name, _)| !places.contains_key(*name));
    wrong.extend(
        idle.map(|(name, _)| format!("{name} is no longer repeated: take it off the list")),
    );
    wrong
}

/// Places at which the twin of a shader may be: directory, module and path. That of `a_b.wgsl` may
/// be `b` in a directory `a`.
fn twin_places(name: &str) -> Vec<(String, String, String)> {
    let place = |directory: String, module: &str, path: &str| {
        let twin = format!("{directory}/{path}.rs");
        (directory, module.to_string(), twin)
    };
    let ops = || "src/kernels/ops".to_string();
    let mut places = vec![
        place(ops(), name, name),
        place(ops(), name, &format!("{name}/mod")),
        place("src/kernels/bench".into(), name, name),
    ];
    let splits = name.match_indices('_').map(|(at, _)| name.split_at(at));
    places.extend(splits.map(|(a, b)| place(format!("{}/{a}", ops()), &b[1..], &b[1..])));
    places
}

/// No path of somebody's machine stands in the tree.
pub fn machine_paths(file: &Source) -> Vec<String> {
    let mut wrong = Vec::new();
    for place in ["home", "root", "Users", "work", "workspace", "mnt"] {
        for path in [format!("/{place}/"), format!("\\{place}\\")] {
            for (at, _) in file.text.match_indices(&path) {
                let before = file.text[..at].chars().next_back().unwrap_or(' ');
                if before.is_whitespace() || "\"'`(=:,[".contains(before) {
                    wrong.push(file.at(at, format!("a path of one machine, {path}")));
                }
            }
        }
    }
    wrong
}
