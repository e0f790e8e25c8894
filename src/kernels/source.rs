//! WGSL source of every shader: the files of `shaders/` and the snippets of `shaders/lib/` that
//! they use.

use super::dispatch::Shader;

/// All shader files as (file stem, text), sorted by stem; the build script lists them.
pub const FILES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/shaders.rs"));

/// All shared snippets as (name, text); a shader includes one by a line `// uses lib/NAME` in its
/// head.
pub const LIBRARY: &[(&str, &str)] = &[
    ("attention", include_str!("../../shaders/lib/attention.wgsl")),
    ("elementwise", include_str!("../../shaders/lib/elementwise.wgsl")),
    ("nan", include_str!("../../shaders/lib/nan.wgsl")),
    ("index", include_str!("../../shaders/lib/index.wgsl")),
    ("run", include_str!("../../shaders/lib/run.wgsl")),
    ("span", include_str!("../../shaders/lib/span.wgsl")),
    ("rng", include_str!("../../shaders/lib/rng.wgsl")),
    ("store", include_str!("../../shaders/lib/store.wgsl")),
];

/// Returns the shared snippet with this name, which must exist.
pub fn snippet(name: &str) -> &'static str {
    let found = LIBRARY.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("no shared snippet is called {name}")).1
}

/// Returns the WGSL of a shader: its prepended header, the snippets that it uses, and its file.
pub fn text(shader: &Shader) -> String {
    if let Some(text) = &shader.text {
        return text.clone();
    }
    let file = FILES.iter().find(|(name, _)| *name == shader.file);
    let (_, body) = file.unwrap_or_else(|| panic!("no shader file is called {}", shader.file));
    let mut text = shader.header.clone();
    for (name, snippet) in LIBRARY {
        if body.lines().any(|line| line.trim() == format!("// uses lib/{name}")) {
            text.push_str(snippet);
        }
    }
    text.push_str(body);
    text
}
