//! Tint, the other compiler of WGSL, accepts the shaders: `./x slow`, which installs it.

#[path = "common/shader_modules.rs"]
mod shader_modules;

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use shader_modules::{demanding_modules, modules};

/// Directory in which npm has installed Dawn's bindings.
const MODULES_ENV: &str = "POTLUCK_TINT";

/// Texts that Tint does not accept, by the beginning of their names, each with the reason.
const REFUSED: &[(&str, &str)] = &[
    (
        "cross_entropy_subgroups",
        "naga does not know the line that enables subgroups, and takes them without it",
    ),
    (
        "embedding_rows",
        "the bounds of its loops are in workgroup memory, where all invocations read the same; \
         Tint takes what is read there for varying",
    ),
];

#[test]
fn tint_accepts_the_shaders() {
    let Some(installed) = std::env::var_os(MODULES_ENV) else {
        // As `./x` counts skipped tests.
        println!("skipped: {MODULES_ENV} does not name where npm has installed webgpu");
        return;
    };
    let mut texts: Vec<(String, String)> = modules();
    texts.extend(demanding_modules().into_iter().map(|(name, text, _)| (name, text)));
    // A text that nobody accepts shows that texts are looked at.
    let wrong = "a wrong text".to_string();
    texts.push((wrong.clone(), "fn f() -> u32 { return g(); }".into()));
    let listed: Vec<Value> =
        texts.iter().map(|(name, text)| json!({ "name": name, "text": text })).collect();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("texts.json");
    std::fs::write(&file, serde_json::to_vec(&listed).unwrap()).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tint/compile.mjs");
    let mut node = Command::new("node");
    let ran = node.arg(script).arg(&file).env("TINT_MODULES", installed).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success(), "{err}");
    let last = out.lines().last().unwrap_or_default();
    let errors: Vec<Value> =
        serde_json::from_str(last).unwrap_or_else(|why| panic!("{why}: {out}"));
    let name_of = |error: &Value| error["name"].as_str().unwrap_or_default().to_string();
    assert!(errors.iter().any(|error| name_of(error) == wrong), "{errors:?}");
    let is_known = |error: &&Value| {
        let name = name_of(error);
        name == wrong || REFUSED.iter().any(|(beginning, _)| name.starts_with(beginning))
    };
    let unknown: Vec<&Value> = errors.iter().filter(|error| !is_known(error)).collect();
    println!("{} texts, {} refused", texts.len() - 1, errors.len() - 1);
    assert!(unknown.is_empty(), "{} of {}: {unknown:#?}", unknown.len(), texts.len());
    for (beginning, why) in REFUSED {
        let is_refused = errors.iter().any(|error| name_of(error).starts_with(beginning));
        assert!(is_refused, "{beginning} is accepted now, and was not because {why}");
    }
}
