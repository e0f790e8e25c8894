//! The files of the tree, and as much of Rust as the rules need to know.

use std::fs;
use std::ops::Range;
use std::path::Path;

use crate::rules::room_named;

/// A file in three views of the same length and lines.
pub struct Source {
    pub path: String,
    pub text: String,
    /// The text with comments and the insides of strings blanked.
    pub code: String,
    /// The text with everything but comments blanked.
    pub comments: String,
    /// Tests only, because the file that declares it says so.
    pub is_test: bool,
}

impl Source {
    pub fn new(path: &str, text: &str) -> Self {
        let (code, comments) = split(text);
        let is_test = path.starts_with("tests/") || path.starts_with("benches/");
        Self { path: path.into(), text: text.into(), code, comments, is_test }
    }

    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    /// The crate and the room of a file: `kernels` and `exec` for `src/kernels/exec/cpu.rs`,
    /// `kernels` twice for `src/kernels/twin.rs`, nothing for `src/main.rs`.
    pub fn place(&self) -> Option<(&str, &str)> {
        let (package, inside) = self.path.strip_prefix("src/")?.split_once('/')?;
        let name = inside.split('/').next()?;
        Some((package, room_named(package, name.strip_suffix(".rs").unwrap_or(name))))
    }

    /// The room of a file; see [`Source::place`].
    pub fn room(&self) -> Option<&str> {
        self.place().map(|(_, room)| room)
    }

    /// True for the file of a module that `lib.rs` declares.
    pub fn is_below_root(&self) -> bool {
        let Some((_, inside)) = self.path.strip_prefix("src/").and_then(|p| p.split_once('/'))
        else {
            return false;
        };
        inside.trim_end_matches("/mod.rs").split('/').count() == 1 && inside != "lib.rs"
    }

    /// A violation at an offset of the text.
    pub fn at(&self, offset: usize, what: impl std::fmt::Display) -> String {
        let line = 1 + self.code[..offset].matches('\n').count();
        format!("{}:{line}: {what}", self.path)
    }

    /// The stretches of code that only tests compile.
    pub fn tests(&self) -> Vec<Range<usize>> {
        if self.is_test {
            return std::iter::once(0..self.code.len()).collect();
        }
        words(&self.code, "#[cfg(test)]").map(|start| start..item_end(&self.code, start)).collect()
    }

    /// The text with everything but the insides of strings and characters blanked.
    pub fn literals(&self) -> String {
        let blank =
            |at: usize| self.code.as_bytes()[at] == b' ' && self.comments.as_bytes()[at] == b' ';
        let bytes = self.text.bytes().enumerate();
        let inside = bytes.map(|(at, byte)| if blank(at) || byte == b'\n' { byte } else { b' ' });
        // Literals begin and end with whole characters.
        String::from_utf8(inside.collect()).unwrap()
    }

    /// Offsets of a word in code that not only tests compile.
    pub fn outside_tests(&self, word: &str) -> Vec<usize> {
        let tests = self.tests();
        words(&self.code, word).filter(|at| !tests.iter().any(|test| test.contains(at))).collect()
    }
}

/// Every text file of the tree but what git ignores, sorted by path.
pub fn tree() -> Vec<Source> {
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

pub fn walk(directory: &Path, prefix: &str, skip: &[String], files: &mut Vec<Source>) {
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
pub fn mark_test_files(files: &mut [Source]) {
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
pub fn split(text: &str) -> (String, String) {
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
pub fn block_comment(text: &str) -> usize {
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
pub fn literal(text: &str, at: usize) -> Option<usize> {
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
pub fn quoted(text: &str, quote: u8) -> usize {
    let bytes = text.as_bytes();
    let mut at = 1;
    while at < bytes.len() && bytes[at] != quote {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

/// Offsets at which `word` stands by itself: not inside a longer name.
pub fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let is_name = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    text.match_indices(word).map(|(at, _)| at).filter(move |at| {
        let before = text[..*at].chars().next_back();
        let behind = text[at + word.len()..].chars().next();
        let (first, last) = (word.chars().next(), word.chars().next_back());
        let is_inside = (is_name(before) && is_name(first)) || (is_name(behind) && is_name(last));
        !is_inside
    })
}

/// The names that follow `crate::` or `super::`, of groups in braces each one, with where they
/// stand.
pub fn imports_from(code: &str, root: &str) -> Vec<(usize, String)> {
    let name_at = |at: usize| {
        let rest = code[at..].trim_start();
        let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
        // A glob has no name: it is reported as what it is.
        if end == 0 { rest.chars().take(1).collect() } else { rest[..end].to_owned() }
    };
    let mut names = Vec::new();
    for at in words(code, root) {
        let behind = code[at + root.len()..].trim_start();
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

/// End of the item that starts at `start` (with its attributes): behind its closing brace, or
/// behind its semicolon.
pub fn item_end(code: &str, start: usize) -> usize {
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

/// The variants of an enum.
pub fn enum_variants(code: &str, name: &str) -> Vec<String> {
    let Some(start) = words(code, &format!("enum {name}")).next() else { return Vec::new() };
    let (mut depth, mut found) = (0, Vec::new());
    for line in code[start..item_end(code, start)].lines() {
        let word = line.trim_start();
        let end = word.find(|c: char| !c.is_alphanumeric()).unwrap_or(word.len());
        if depth == 1 && word.starts_with(char::is_uppercase) {
            found.push(word[..end].to_owned());
        }
        depth += line.matches(['{', '(']).count() as i32 - line.matches(['}', ')']).count() as i32;
    }
    found
}

/// The first line of each doc comment, with its number.
pub fn doc_comments(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut is_within = false;
    for (index, line) in text.lines().enumerate() {
        let line = line.trim_start();
        let doc = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
        let doc = doc.filter(|rest| !rest.starts_with('/'));
        if let Some(doc) = doc.filter(|_| !is_within) {
            found.push((index + 1, doc.trim().to_string()));
        }
        is_within = doc.is_some();
    }
    found
}

/// Types that a file defines at its top level, outside tests.
pub fn type_names(file: &Source) -> Vec<String> {
    let mut names = Vec::new();
    for keyword in ["struct ", "enum ", "trait ", "type "] {
        for at in file.outside_tests(keyword) {
            let line_start = file.code[..at].rfind('\n').map_or(0, |end| end + 1);
            let before = &file.code[line_start..at];
            let is_top_level = before.is_empty() || before.starts_with("pub");
            let rest = &file.code[at + keyword.len()..];
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            if is_top_level && end > 0 {
                names.push(rest[..end].to_string());
            }
        }
    }
    names
}
