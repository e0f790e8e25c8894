//! The rules of the tree: rooms and their layers, sizes, heads, leftovers. Each rule is a function
//! over a [`Source`] (or all of them) that returns what is wrong, so that planted violations can
//! prove that it finds them.

use std::fs;
use std::ops::Range;
use std::path::Path;

const COLUMNS_MAX: usize = 100;
const FILE_LINES_MAX: usize = 800;
const FUNCTION_LINES_MAX: usize = 70;

/// Files (`src/a.rs`) and functions (`src/a.rs: name`) that may be longer, with the reason. One
/// that is no longer needed fails.
const LONG: &[(&str, &str)] = &[
    ("src/graph/shapes.rs: rule", "one arm per op"),
    ("src/graph/gradients.rs: rule", "one arm per op"),
];

/// Rooms with their layer and what they may import, between spaces.
const ROOMS: &[(u8, &str, &str)] = &[
    (0, "base", ""),
    (0, "files", ""),
    (1, "metrics", "base files"),
    (1, "device", "base"),
    (1, "graph", "base"),
    (1, "collective", "base"),
    (1, "cluster", "base"),
    (1, "data", "base"),
    (2, "kernels", "base device graph"),
    (2, "model", "base graph"),
    (2, "optim", "base graph"),
    (2, "parallel", "base graph collective"),
    (2, "group", "base collective"),
    (2, "faults", "base device"),
    (2, "net", "base collective cluster"),
    (3, "checkpoint", "base files data faults"),
    (3, "config", "base data graph model optim collective parallel"),
    (3, "autotune", "base device files graph kernels"),
    (3, "sim", "base collective cluster parallel"),
    (4, "exec", "base device graph kernels autotune"),
    (6, "train", ALL_BELOW),
    (7, "bench", ALL_BELOW),
    (7, "dashboard", ALL_BELOW),
    (8, "cli", ALL_BELOW),
];
/// Every room of a lower layer; but only `cli` knows `sim`.
const ALL_BELOW: &str = "all below";

/// Crates that only some rooms know, also in their tests.
const CRATES: &[(&str, &str)] = &[
    ("wgpu", "device kernels autotune exec"),
    ("quinn", "net"),
    ("rustls", "net"),
    ("rcgen", "net"),
    ("tokio", "net"),
    ("clap", "cli"),
    ("anyhow", "cli"),
];

/// Rooms without IO, clocks and threads.
const PURE: &str = "base graph collective cluster model optim parallel";
/// What [`PURE`] rooms have no word of outside tests.
const IMPURE: &str = "std::fs std::net std::io std::env std::thread std::time Instant SystemTime";
/// Rooms that start long-lived threads.
const THREADED: &str = "net train dashboard";
/// Rooms of this layer and below print nothing.
const SILENT_LAYER_MAX: u8 = 5;

/// Whether a list of names between spaces has this one.
fn lists(names: &str, name: &str) -> bool {
    names.split_whitespace().any(|known| known == name)
}

/// The layer of a room, if it is one.
fn layer_of(room: &str) -> Option<u8> {
    ROOMS.iter().find(|(_, name, _)| *name == room).map(|(layer, ..)| *layer)
}

/// A file in three views of the same length and lines.
struct Source {
    path: String,
    text: String,
    /// The text with comments and the insides of strings blanked.
    code: String,
    /// The text with everything but comments blanked.
    comments: String,
    /// Tests only, because the file that declares it says so.
    is_test: bool,
}

impl Source {
    fn new(path: &str, text: &str) -> Self {
        let (code, comments) = split(text);
        let is_test = path.starts_with("tests/") || path.starts_with("benches/");
        Self { path: path.into(), text: text.into(), code, comments, is_test }
    }

    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// The room of a file in it: `graph` for `src/graph/op.rs`, nothing for `src/main.rs`.
    fn room(&self) -> Option<&str> {
        self.path.strip_prefix("src/")?.split_once('/').map(|(room, _)| room)
    }

    /// A violation at an offset of the text.
    fn at(&self, offset: usize, what: impl std::fmt::Display) -> String {
        let line = 1 + self.code[..offset].matches('\n').count();
        format!("{}:{line}: {what}", self.path)
    }

    /// The stretches of code that only tests compile.
    fn tests(&self) -> Vec<Range<usize>> {
        if self.is_test {
            return std::iter::once(0..self.code.len()).collect();
        }
        words(&self.code, "#[cfg(test)]").map(|start| start..item_end(&self.code, start)).collect()
    }

    /// Where a word stands in code that not only tests compile.
    fn outside_tests(&self, word: &str) -> Vec<usize> {
        let tests = self.tests();
        words(&self.code, word).filter(|at| !tests.iter().any(|test| test.contains(at))).collect()
    }
}

// ---- The rules ----

/// Imports point to the rooms of the table; `super` does not lead around it.
fn layers(file: &Source) -> Vec<String> {
    let Some(room) = file.room().filter(|_| file.is_rust()) else { return Vec::new() };
    let Some((layer, _, allowed)) = ROOMS.iter().find(|(_, name, _)| *name == room) else {
        return vec![file.at(0, format!("{room} is not a room of the table in tests/tidy.rs"))];
    };
    let mut wrong = Vec::new();
    for (offset, name) in crate_imports(&file.code) {
        let Some(other) = layer_of(&name) else {
            wrong.push(file.at(offset, format!("crate::{name} is not a room")));
            continue;
        };
        let is_below = other < *layer && (name != "sim" || room == "cli");
        let is_allowed = lists(allowed, &name) || (*allowed == ALL_BELOW && is_below);
        if name != room && !is_allowed {
            wrong.push(file.at(offset, format!("{room} may not know {name}")));
        }
    }
    for offset in words(&file.code, "super::super") {
        wrong.push(file.at(offset, "super::super hides the room: name it from crate"));
    }
    if file.path == format!("src/{room}/mod.rs") {
        for offset in file.outside_tests("super::") {
            wrong.push(file.at(offset, "super:: leaves the room: name it from crate"));
        }
    }
    wrong
}

/// Some crates, clocks, files, threads and prints have their rooms.
fn absences(file: &Source) -> Vec<String> {
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
    if layer_of(room).is_some_and(|layer| layer <= SILENT_LAYER_MAX) {
        forbid("println! print! eprintln! eprint!", &format!("{room} prints nothing"));
    }
    wrong
}

/// Lines of code end within the columns.
fn columns(file: &Source) -> Vec<String> {
    let too_long = |line: &&str| line.chars().count() > COLUMNS_MAX;
    let lines = file.text.lines().enumerate().filter(|(_, line)| too_long(line));
    lines.map(|(i, _)| format!("{}:{}: over {COLUMNS_MAX} columns", file.path, i + 1)).collect()
}

/// Files and functions beyond their size, by the name that [`LONG`] uses.
fn sizes(file: &Source) -> Vec<String> {
    let mut long = Vec::new();
    if file.text.lines().count() > FILE_LINES_MAX {
        long.push(file.path.clone());
    }
    for (name, lines) in functions(&file.code) {
        if lines > FUNCTION_LINES_MAX {
            long.push(format!("{}: {name}", file.path));
        }
    }
    long
}

/// What is long without an exception, and exceptions that nothing needs.
fn beyond_exceptions(long: &[String], exceptions: &[(&str, &str)]) -> Vec<String> {
    let excepted = |name: &String| exceptions.iter().any(|(known, _)| known == name);
    let mut wrong: Vec<String> = long
        .iter()
        .filter(|name| !excepted(name))
        .map(|name| {
            format!("{name} is over {FILE_LINES_MAX} (file) or {FUNCTION_LINES_MAX} (fn) lines")
        })
        .collect();
    for (name, _) in exceptions.iter().filter(|(name, _)| !long.iter().any(|l| l == name)) {
        wrong.push(format!("{name} is no longer long: take it off the list"));
    }
    wrong
}

/// Nothing is left over from work in progress, and nothing is silenced without a reason.
fn leftovers(file: &Source) -> Vec<String> {
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
fn unwraps(file: &Source) -> Vec<String> {
    let found = file.outside_tests(".unwrap()").into_iter();
    found.map(|at| file.at(at, "unwrap() outside tests: expect(why) or an error")).collect()
}

/// Every Rust file says at its top what it is.
fn heads(file: &Source) -> Vec<String> {
    let is_fine = !file.is_rust() || file.text.starts_with("//! ");
    if is_fine { Vec::new() } else { vec![file.at(0, "begins without a //! head")] }
}

/// A shader's head says what its threads are and how many bytes move; a snippet of
/// `shaders/lib` just says what it is.
fn shader_heads(file: &Source) -> Vec<String> {
    if !file.path.starts_with("shaders/") {
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

/// Every shader has its Rust twin, which is declared, in the list of sources, and used.
fn twins(files: &[Source]) -> Vec<String> {
    let text = |path: &str| files.iter().find(|f| f.path == path).map_or("", |f| &f.text);
    let mut wrong = Vec::new();
    for shader in files.iter().filter(|file| file.path.ends_with(".wgsl")) {
        let Some(name) = shader.path.strip_prefix("shaders/") else { continue };
        let name = name.trim_end_matches(".wgsl");
        if let Some(snippet) = name.strip_prefix("lib/") {
            if !text("src/kernels/source.rs").contains(&format!("(\"{snippet}\",")) {
                wrong.push(shader.at(0, "is not in LIBRARY of src/kernels/source.rs"));
            }
            continue;
        }
        let twin = format!("src/kernels/{name}.rs");
        if text(&twin).is_empty() {
            wrong.push(shader.at(0, format!("has no twin {twin}")));
        }
        if !text("src/kernels/source.rs").contains(&format!("\"{name}\"")) {
            wrong.push(shader.at(0, "is not in FILES of src/kernels/source.rs"));
        }
        if words(text("src/kernels/mod.rs"), &format!("mod {name};")).next().is_none() {
            wrong.push(shader.at(0, format!("{name} is not declared in src/kernels/mod.rs")));
        }
        let uses = [format!("twin!({name})"), format!("{name}::")];
        let others = files.iter().filter(|file| file.path != twin && file.path.starts_with("src/"));
        let is_used = |file: &Source| uses.iter().any(|u| words(&file.code, u).next().is_some());
        if !others.into_iter().any(is_used) {
            wrong.push(shader.at(0, format!("nothing uses its twin {twin}")));
        }
    }
    wrong
}

/// No path of somebody's machine stands in the tree.
fn machine_paths(file: &Source) -> Vec<String> {
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

// ---- Reading the tree ----

/// Every text file of the tree but what git ignores, sorted by path.
fn tree() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let ignored = fs::read_to_string(root.join(".gitignore")).unwrap_or_default();
    let mut skip: Vec<String> = ignored.lines().map(|l| l.trim_matches('/').to_owned()).collect();
    skip.push(".git".into());
    let mut files = Vec::new();
    walk(root, "", &skip, &mut files);
    files.sort_by(|a, b| a.path.cmp(&b.path));
    mark_test_files(&mut files);
    files
}

fn walk(directory: &Path, prefix: &str, skip: &[String], files: &mut Vec<Source>) {
    for entry in fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
        let kind = entry.file_type().unwrap();
        if skip.contains(&path) || kind.is_symlink() {
            continue;
        }
        if kind.is_dir() {
            walk(&entry.path(), &format!("{path}/"), skip, files);
        } else if let Ok(text) = fs::read_to_string(entry.path()) {
            files.push(Source::new(&path, &text));
        }
    }
}

/// A module that is declared under `#[cfg(test)]` is a test file.
fn mark_test_files(files: &mut [Source]) {
    let mut found = Vec::new();
    for file in files.iter().filter(|file| file.is_rust() && file.path.starts_with("src/")) {
        let directory = file.path.rsplit_once('/').map_or("", |(directory, _)| directory);
        let inside = file.path.trim_end_matches(".rs");
        for test in file.tests() {
            let Some(name) = file.code[test].trim_end().strip_suffix(';') else { continue };
            let name = name.rsplit(' ').next().unwrap_or_default().to_owned();
            found.push(format!("{directory}/{name}.rs"));
            found.push(format!("{inside}/{name}.rs"));
        }
    }
    for file in files.iter_mut() {
        file.is_test |= found.contains(&file.path);
    }
}

/// Code and comments apart, each with the other blanked by spaces (byte by byte, so that offsets
/// stay). Strings and characters keep their quotes in the code.
fn split(text: &str) -> (String, String) {
    let bytes = text.as_bytes();
    let mut code = vec![b' '; bytes.len()];
    let mut comments = code.clone();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &text[at..];
        let (length, is_comment) = if rest.starts_with("//") {
            (rest.find('\n').unwrap_or(rest.len()), true)
        } else if rest.starts_with("/*") {
            (block_comment(rest), true)
        } else if let Some(length) = literal(text, at) {
            code[at] = bytes[at];
            code[at + length - 1] = bytes[at + length - 1];
            at += length;
            continue;
        } else {
            (rest.chars().next().map_or(1, char::len_utf8), false)
        };
        let view = if is_comment { &mut comments } else { &mut code };
        view[at..at + length].copy_from_slice(&bytes[at..at + length]);
        at += length;
    }
    for (i, _) in bytes.iter().enumerate().filter(|(_, byte)| **byte == b'\n') {
        code[i] = b'\n';
        comments[i] = b'\n';
    }
    // Quotes are ASCII and everything else is copied by whole characters.
    (String::from_utf8(code).unwrap(), String::from_utf8(comments).unwrap())
}

/// The length of the block comment at the start of the text; they nest.
fn block_comment(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        let pair = &text.as_bytes()[at..text.len().min(at + 2)];
        match pair {
            b"/*" => depth += 1,
            b"*/" => depth -= 1,
            _ => {
                at += 1;
                continue;
            }
        }
        at += 2;
        if depth == 0 {
            break;
        }
    }
    at
}

/// The length of the string or character that starts at `at`, if one does.
fn literal(text: &str, at: usize) -> Option<usize> {
    let rest = &text[at..];
    let before = text[..at].chars().next_back().unwrap_or(' ');
    let starts_word = !(before.is_alphanumeric() || before == '_');
    let raw = ["r", "br", "cr"].iter().find(|prefix| {
        let behind = rest.strip_prefix(**prefix).map(|r| r.trim_start_matches('#'));
        starts_word && behind.is_some_and(|behind| behind.starts_with('"'))
    });
    if let Some(prefix) = raw {
        let hashes = rest[prefix.len()..].bytes().take_while(|byte| *byte == b'#').count();
        let start = prefix.len() + hashes + 1;
        let end = format!("\"{}", "#".repeat(hashes));
        return Some(rest[start..].find(&end).map_or(rest.len(), |i| start + i + end.len()));
    }
    match rest.as_bytes()[0] {
        b'"' => Some(quoted(rest, b'"')),
        // 'a' and '\n' are characters, 'a is a lifetime.
        b'\'' => {
            let mut characters = rest.chars().skip(1);
            let first = characters.next()?;
            let is_character = first == '\\' || characters.next() == Some('\'');
            is_character.then(|| quoted(rest, b'\''))
        }
        _ => None,
    }
}

/// The length up to the closing quote, past escaped ones.
fn quoted(text: &str, quote: u8) -> usize {
    let bytes = text.as_bytes();
    let mut at = 1;
    while at < bytes.len() && bytes[at] != quote {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

/// Where `word` stands by itself: not inside a longer name.
fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let is_name = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    text.match_indices(word).map(|(at, _)| at).filter(move |at| {
        let before = text[..*at].chars().next_back();
        let behind = text[at + word.len()..].chars().next();
        let (first, last) = (word.chars().next(), word.chars().next_back());
        let is_inside = (is_name(before) && is_name(first)) || (is_name(behind) && is_name(last));
        !is_inside
    })
}

/// The names that follow `crate::`, of groups in braces each one, with where they stand.
fn crate_imports(code: &str) -> Vec<(usize, String)> {
    let name_at = |at: usize| {
        let rest = code[at..].trim_start();
        let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
        // A glob has no name: it is reported as what it is.
        if end == 0 { rest.chars().take(1).collect() } else { rest[..end].to_owned() }
    };
    let mut names = Vec::new();
    for at in words(code, "crate") {
        let behind = code[at + "crate".len()..].trim_start();
        let Some(path) = behind.strip_prefix("::").map(str::trim_start) else {
            // `pub(crate)` names nothing; `use crate as other` would.
            if behind.starts_with("as ") {
                names.push((at, "self".into()));
            }
            continue;
        };
        let start = code.len() - path.len();
        if !path.starts_with('{') {
            names.push((at, name_at(start)));
            continue;
        }
        let mut depth = 0;
        for (i, c) in path.char_indices() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => (),
            }
            let starts_name = (c == '{' || c == ',') && depth == 1;
            let name = if starts_name { name_at(start + i + 1) } else { "}".into() };
            if name != "}" {
                names.push((start + i, name));
            }
            if depth == 0 {
                break;
            }
        }
    }
    names
}

/// Where the item that starts at `start` (with its attributes) ends: behind its closing brace,
/// or behind its semicolon.
fn item_end(code: &str, start: usize) -> usize {
    let (mut braces, mut brackets) = (0, 0);
    for (i, c) in code[start..].char_indices() {
        match c {
            '(' | '[' => brackets += 1,
            ')' | ']' => brackets -= 1,
            '{' => braces += 1,
            '}' => braces -= 1,
            _ => (),
        }
        let ends = (c == '}' && braces == 0) || (c == ';' && braces == 0 && brackets == 0);
        if ends {
            return start + i + 1;
        }
    }
    code.len()
}

/// Every function with a name, and the lines from its `fn` to its end.
fn functions(code: &str) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    for at in words(code, "fn ").chain(words(code, "fn\n")) {
        let rest = code[at + 3..].trim_start();
        let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
        if end > 0 {
            let lines = 1 + code[at..item_end(code, at)].matches('\n').count();
            found.push((rest[..end].to_owned(), lines));
        }
    }
    found
}

// ---- The tree keeps the rules ----

/// Fails with everything that a rule finds in files whose path the filter takes.
fn keep(rule: fn(&Source) -> Vec<String>, filter: fn(&Source) -> bool) {
    let wrong: Vec<String> = tree().iter().filter(|file| filter(file)).flat_map(rule).collect();
    assert!(wrong.is_empty(), "{} violations:\n{}", wrong.len(), wrong.join("\n"));
}

fn is_code(file: &Source) -> bool {
    file.is_rust() || file.path.ends_with(".wgsl")
}

#[test]
fn rooms_know_only_what_lies_below() {
    keep(layers, |_| true);
}

#[test]
fn the_table_points_downward() {
    for (layer, room, allowed) in ROOMS.iter().filter(|(.., allowed)| *allowed != ALL_BELOW) {
        for name in allowed.split_whitespace() {
            let is_below = layer_of(name).is_some_and(|other| other < *layer);
            assert!(is_below, "{room} may not know {name}, which is not below it");
        }
    }
}

#[test]
fn rooms_lack_what_is_not_theirs() {
    keep(absences, |_| true);
}

#[test]
fn lines_end_within_the_columns() {
    let places = ["src/", "shaders/", "tests/", "examples/", "benches/", "build.rs", "x", ".ci/"];
    for place in places {
        let is_here = |file: &&Source| match place.ends_with('/') {
            true => file.path.starts_with(place),
            false => file.path == place,
        };
        let wrong: Vec<String> = tree().iter().filter(is_here).flat_map(columns).collect();
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}

#[test]
fn files_and_functions_keep_their_size() {
    let long: Vec<String> = tree().iter().filter(|file| is_code(file)).flat_map(sizes).collect();
    let wrong = beyond_exceptions(&long, LONG);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn nothing_is_left_over() {
    keep(leftovers, is_code);
}

#[test]
fn nothing_unwraps_outside_tests() {
    keep(unwraps, Source::is_rust);
}

#[test]
fn every_file_says_what_it_is() {
    keep(|file| [heads(file), shader_heads(file)].concat(), |_| true);
}

#[test]
fn every_shader_has_a_registered_twin() {
    let wrong = twins(&tree());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_machine_is_named() {
    keep(machine_paths, |_| true);
}

// ---- Planted violations: each rule finds them and nothing else ----

/// Asserts on which lines a rule finds something.
fn finds(rule: fn(&Source) -> Vec<String>, path: &str, text: &str, lines: &[usize]) {
    let found: Vec<String> = rule(&Source::new(path, text));
    let expected: Vec<String> = lines.iter().map(|line| format!("{path}:{line}: ")).collect();
    let agree = found.len() == expected.len()
        && found.iter().zip(&expected).all(|(found, expected)| found.starts_with(expected));
    assert!(agree, "in {text:?} expected lines {lines:?}, found {found:?}");
}

#[test]
fn planted_imports_are_found() {
    let op = |text: &str, lines: &[usize]| finds(layers, "src/graph/op.rs", text, lines);
    op("use crate::base::Site;\nuse super::shapes;\nuse crate::graph::Op;", &[]);
    op("use crate::device::Gpu;", &[1]);
    op("fn f() {\n    crate::kernels::twin();\n}", &[2]);
    op("use crate::{base::{Site, ids}, graph};", &[]);
    op("use crate::{\n    base::{Site, device},\n    metrics, train,\n};", &[2, 3]);
    op("use crate::{base::Site, };", &[]);
    op("use crate::*;", &[1]);
    op("use crate as other;", &[1]);
    op("use crate::utils::f;", &[1]);
    op("pub(crate) fn f() {}", &[]);
    op("use super::super::device;", &[1]);
    op("#[cfg(test)]\nmod tests {\n    use crate::exec::Cpu;\n}", &[3]);
    op("// use crate::device\nconst A: &str = \"crate::device\"; /* crate::device */", &[]);
    finds(layers, "src/graph/mod.rs", "use super::device::Gpu;", &[1]);
    finds(layers, "src/graph/mod.rs", "#[cfg(test)]\nmod tests {\n    use super::*;\n}", &[]);
    finds(layers, "src/kernels/unary.rs", "use crate::{base, device, graph};", &[]);
    finds(layers, "src/device/gpu.rs", "use crate::graph::Op;", &[1]);
    finds(layers, "src/train/run.rs", "use crate::{exec, sim};", &[1]);
    finds(layers, "src/cli/mod.rs", "use crate::{sim, train, bench};", &[]);
    finds(layers, "src/utils/mod.rs", "", &[1]);
    finds(layers, "src/main.rs", "use potluck::cli;", &[]);
}

#[test]
fn planted_intruders_are_found() {
    let graph = |text: &str, lines: &[usize]| finds(absences, "src/graph/op.rs", text, lines);
    graph("use wgpu::Buffer;", &[1]);
    graph("use wgpu;\nfn f(x: wgpu::Buffer) {}", &[2, 1]);
    graph("fn f() { self.wgpu.limits() }", &[]);
    graph("fn f() { std::fs::read(); }\n#[cfg(test)]\nmod tests { use std::fs; }", &[1]);
    graph("use std::time::Instant;", &[1, 1]);
    finds(absences, "src/device/gpu.rs", "use wgpu::Buffer;\nuse std::time::Instant;", &[]);
    finds(absences, "src/exec/gpu.rs", "std::thread::spawn(f);\nprintln!();", &[1, 2]);
    finds(absences, "src/train/run.rs", "std::thread::spawn(f);\nprintln!();", &[]);
    finds(absences, "src/train/run.rs", "use anyhow::Result;\nuse tokio::net;", &[2, 1]);
}

#[test]
fn planted_long_lines_are_found() {
    let line = |length: usize| format!("{}\n{}\n", "short", "ü".repeat(length));
    finds(columns, "src/a.rs", &line(COLUMNS_MAX), &[]);
    finds(columns, "src/a.rs", &line(COLUMNS_MAX + 1), &[2]);
}

#[test]
fn planted_long_files_and_functions_are_found() {
    let function = |lines: usize| format!("fn big() -> [u8; 2] {{\n{}}}\n", "x;\n".repeat(lines));
    let long = |text: &str| sizes(&Source::new("src/a.rs", text));
    assert_eq!(long(&function(FUNCTION_LINES_MAX - 2)), Vec::<String>::new());
    assert_eq!(long(&function(FUNCTION_LINES_MAX - 1)), ["src/a.rs: big"]);
    assert_eq!(long(&"\n".repeat(FILE_LINES_MAX)), Vec::<String>::new());
    assert_eq!(long(&"\n".repeat(FILE_LINES_MAX + 1)), ["src/a.rs"]);
    let braces = format!("fn a() {{ \"}}\"; '}}'; }}\n{}fn b(x: &'static str);", "\n".repeat(99));
    assert_eq!(long(&braces), Vec::<String>::new());
}

#[test]
fn exceptions_are_kept_only_while_they_are_needed() {
    let long = ["src/a.rs".to_owned()];
    assert_eq!(beyond_exceptions(&long, &[("src/a.rs", "a table")]), Vec::<String>::new());
    assert_eq!(beyond_exceptions(&long, &[]).len(), 1);
    assert_eq!(beyond_exceptions(&[], &[("src/a.rs", "a table")]).len(), 1);
}

#[test]
fn planted_leftovers_are_found() {
    let text = "fn f() {\n    dbg!(1);\n    todo!();\n    unimplemented!(\"{}\", 1);\n}";
    finds(leftovers, "src/a.rs", text, &[2, 3, 4]);
    finds(leftovers, "src/a.rs", "// FIXME\n/* XXX: */\n/// a TODO\n#[ignore]", &[4, 1, 2, 3]);
    finds(leftovers, "src/a.rs", "const A: &str = r#\"// FIXME \"dbg!\"#; // XXXL", &[]);
    finds(leftovers, "src/a.rs", "// Why: because.\n#[allow(dead_code)]", &[]);
    finds(leftovers, "src/a.rs", "#[allow(dead_code, reason = \"a\")]\nfn f() {}", &[]);
    finds(leftovers, "src/a.rs", "\n#![allow(dead_code)]", &[2]);
    finds(leftovers, "shaders/a.wgsl", "// FIXME", &[1]);
}

#[test]
fn planted_unwraps_are_found() {
    let text = "/// x.unwrap()\nfn f() { x.unwrap(); x.unwrap_or(1); }\n\
                #[cfg(test)]\nmod tests {\n    fn g() { x.unwrap(); }\n}\nfn h() { x.unwrap() }";
    finds(unwraps, "src/a.rs", text, &[2, 7]);
    finds(unwraps, "examples/a.rs", "fn main() { x.unwrap() }", &[1]);
    finds(unwraps, "tests/a.rs", "fn f() { x.unwrap() }", &[]);
    let mut files = vec![
        Source::new("src/a/mod.rs", "//! A.\n#[cfg(test)]\npub mod testing;\npub mod b;"),
        Source::new("src/a/testing.rs", "fn f() { x.unwrap() }"),
        Source::new("src/a/b.rs", "fn f() { x.unwrap() }"),
    ];
    mark_test_files(&mut files);
    let found: Vec<String> = files.iter().flat_map(unwraps).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with("src/a/b.rs:1:"));
}

#[test]
fn planted_missing_heads_are_found() {
    finds(heads, "src/a.rs", "use std::fs;", &[1]);
    finds(heads, "src/a.rs", "//! A.\nuse std::fs;", &[]);
    let head = "// A sum over rows, as a formula.\n// One invocation per row; 8 bytes each.\n";
    finds(shader_heads, "shaders/a.wgsl", head, &[]);
    finds(shader_heads, "shaders/a.wgsl", "// a", &[1]);
    finds(shader_heads, "shaders/a.wgsl", &format!("struct A {{}}\n{head}"), &[1]);
    let formula = "// A sum over rows, which is the formula here.\n";
    finds(shader_heads, "shaders/a.wgsl", formula, &[1, 1]);
    finds(shader_heads, "shaders/lib/a.wgsl", formula, &[]);
}

#[test]
fn planted_lonely_shaders_are_found() {
    let with = |twin: &str, registry: &str, table: &str| {
        let files = [
            Source::new("shaders/a.wgsl", "// A."),
            Source::new(twin, "//! Twin. a::f"),
            Source::new("src/kernels/source.rs", registry),
            Source::new("src/kernels/mod.rs", table),
        ];
        twins(&files).len()
    };
    assert_eq!(with("src/kernels/a.rs", "\"a\",", "pub mod a;\ntwin!(a)"), 0);
    assert_eq!(with("src/kernels/a.rs", "\"a\",", "mod a;\na::dispatch()"), 0);
    assert_eq!(with("src/kernels/b.rs", "\"a\",", "pub mod a;\ntwin!(a)"), 1);
    assert_eq!(with("src/kernels/a.rs", "\"b\",", "pub mod a;\ntwin!(a)"), 1);
    assert_eq!(with("src/kernels/a.rs", "\"a\",", "pub mod ba;\ntwin!(a)"), 1);
    assert_eq!(with("src/kernels/a.rs", "\"a\",", "pub mod a;"), 1);
}

#[test]
fn planted_machine_paths_are_found() {
    let place = |name: &str| format!("run in /{name}/somebody, or `/{name}/x`\n");
    finds(machine_paths, "README.md", &place("home"), &[1, 1]);
    finds(machine_paths, "README.md", &format!("\n{}", place("root")), &[2, 2]);
    let fine = ["https://host/home", "/a $root/wo", "rk/b /usr/share/vulkan"].concat();
    finds(machine_paths, "README.md", &fine, &[]);
}

#[test]
fn code_and_comments_come_apart() {
    let (code, comments) =
        split("a /* b /* c */ d */ e // f\n\"g\\\"\" 'h' '\\'' 'i r#\"j\"k\"# l");
    assert_eq!(code.split_whitespace().collect::<String>(), "ae\"\"'''''ir#l");
    assert_eq!(comments.split_whitespace().collect::<Vec<_>>().join(" "), "/* b /* c */ d */ // f");
}
