//! What the documents say about the tree is so: paths and links exist, names of types exist, and
//! README's table is what the newest results say.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::ways::{MARKERS, WAYS, newest_report, table};

/// Lines that README may have.
const README_LINES_MAX: usize = 200;

/// Folders whose files documents name in backticks.
const FOLDERS: [&str; 6] = ["src/", "tests/", "shaders/", "docs/", "examples/", "benches/"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Markdown files of the root, `docs` and `tests`, by their paths in the tree.
fn documents() -> Vec<PathBuf> {
    let mut found = vec![PathBuf::from("README.md"), PathBuf::from("ARCHITECTURE.md")];
    for folder in ["docs", "docs/internals", "tests"] {
        for entry in fs::read_dir(root().join(folder)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if name.ends_with(".md") {
                found.push(Path::new(folder).join(name));
            }
        }
    }
    found.sort();
    found
}

/// Parts of a text in backticks, outside of fenced code.
fn code_words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut is_fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            is_fenced = !is_fenced;
        } else if !is_fenced {
            words.extend(line.split('`').skip(1).step_by(2).map(str::to_owned));
        }
    }
    words
}

/// Targets of the links of a text, without those to other hosts and to sections.
fn links(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for part in text.split("](").skip(1) {
        let target = part.split(')').next().unwrap_or(part);
        let path = target.split('#').next().unwrap_or(target);
        if !path.is_empty() && !path.contains("://") && !path.contains(' ') {
            found.push(path);
        }
    }
    found
}

#[test]
fn documents_name_paths_that_exist() {
    let mut missing = Vec::new();
    for document in documents() {
        let text = fs::read_to_string(root().join(&document)).unwrap();
        for word in code_words(&text) {
            let is_path = FOLDERS.iter().any(|folder| word.starts_with(folder));
            // A name in capitals stands for any, and a star for several.
            let is_pattern = word.contains(['*', '{', ' ', '<'])
                || word.split(['/', '.', '_', '-']).any(|part| {
                    part.len() > 1
                        && part.chars().all(|c| c.is_ascii_uppercase())
                        && part != "README"
                });
            if is_path && !is_pattern && !root().join(word.split(':').next().unwrap()).exists() {
                missing.push(format!("{}: {word}", document.display()));
            }
        }
        let folder = root().join(&document).parent().unwrap().to_owned();
        for target in links(&text) {
            if !folder.join(target).exists() {
                missing.push(format!("{}: link to {target}", document.display()));
            }
        }
    }
    assert!(missing.is_empty(), "documents name what does not exist:\n{}", missing.join("\n"));
}

/// Rust files below a folder.
fn sources(folder: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(fs::read_to_string(path).unwrap());
        }
    }
}

#[test]
fn documents_name_types_that_exist() {
    let mut texts = Vec::new();
    for folder in ["src", "tests", "shaders", "examples"] {
        sources(&root().join(folder), &mut texts);
    }
    let mut known = BTreeSet::new();
    for text in &texts {
        known.extend(text.split(|c: char| !c.is_alphanumeric() && c != '_'));
    }
    let mut missing = Vec::new();
    for document in documents() {
        let is_internal = document.starts_with("docs/internals");
        if document != Path::new("ARCHITECTURE.md") && !is_internal {
            continue;
        }
        let text = fs::read_to_string(root().join(&document)).unwrap();
        for word in code_words(&text) {
            for name in word.split(|c: char| !c.is_alphanumeric() && c != '_') {
                let is_type = name.starts_with(|c: char| c.is_ascii_uppercase())
                    && name.contains(|c: char| c.is_ascii_lowercase())
                    && name.len() > 3;
                if is_type && !known.contains(name) {
                    missing.push(format!("{}: {name}", document.display()));
                }
            }
        }
    }
    assert!(missing.is_empty(), "documents name types that do not exist:\n{}", missing.join("\n"));
}

#[test]
fn readme_is_short_and_its_table_is_measured() {
    let text = fs::read_to_string(root().join("README.md")).unwrap();
    let lines = text.lines().count();
    assert!(lines <= README_LINES_MAX, "README.md has {lines} lines");
    let report = newest_report(root()).expect("benches/results has ways-COMMIT.json");
    let (_, rest) = text.split_once(MARKERS[0]).expect("README has the table");
    let (shown, _) = rest.split_once(MARKERS[1]).expect("README has the end of the table");
    assert_eq!(shown.trim(), table(&report), "run ./x status");
    for way in &WAYS {
        for file in way.tests {
            assert!(root().join(file).exists(), "{}: there is no {file}", way.name);
        }
    }
}
