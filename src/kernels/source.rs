//! WGSL source of every shader: the files of `shaders/` and the snippets of `shaders/lib/` that
//! they use.

use super::dispatch::Shader;

pub use potluck_shaders::FILES;
pub(crate) use potluck_shaders::LIBRARY;

/// Returns the shared snippet with this name, which must exist.
pub fn snippet(name: &str) -> &'static str {
    let found = LIBRARY.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("no shared snippet is called {name}")).1
}

/// Snippet of values of this number of floats: vectors for 4, or else single ones.
pub(crate) fn values_of(lanes: usize) -> &'static str {
    snippet(if lanes == 4 { "value4" } else { "value" })
}

/// Name of the snippet that every shader of this crate includes.
const GRID: &str = "grid";

/// Last parameter of every shader of this crate: the first workgroup of the part of the grid that
/// is dispatched.
const FIRST_WORKGROUP: &str = "first_workgroup";

/// Returns the WGSL of a shader: its prepended header, the snippets that it uses, and its file,
/// with the first workgroup among the parameters unless the text comes from outside the crate.
pub fn text(shader: &Shader) -> String {
    let body = match &shader.text {
        Some(text) if shader.is_foreign => return text.clone(),
        Some(text) => with_first_workgroup(&(shader.header.clone() + text)),
        None => with_first_workgroup(&text_of_file(shader)),
    };
    let enables: String = shader.enables.iter().map(|name| format!("enable {name};\n")).collect();
    enables + &body
}

fn text_of_file(shader: &Shader) -> String {
    let file = FILES.iter().find(|(name, _)| *name == shader.file);
    let (_, body) = file.unwrap_or_else(|| panic!("no shader file is called {}", shader.file));
    let mut text = shader.header.clone();
    for (name, snippet) in LIBRARY {
        let uses = format!("// uses lib/{name}");
        if body.lines().any(|line| line.trim() == uses) {
            text.push_str(snippet);
        }
    }
    text.push_str(body);
    text
}

/// Adds the first workgroup to `struct Params`, and the functions that read it; once.
fn with_first_workgroup(text: &str) -> String {
    let Some((before, rest)) = text.split_once("struct Params {") else {
        return text.to_string();
    };
    let Some((fields, after)) = rest.split_once('}') else { return text.to_string() };
    if fields.contains(FIRST_WORKGROUP) {
        return text.to_string();
    }
    // A list of fields in one line ends without a comma.
    let comma = if fields.ends_with('\n') { "" } else { "," };
    let fields = fields.trim_end_matches(' ');
    let grid = snippet(GRID);
    format!("{grid}{before}struct Params {{{fields}{comma} {FIRST_WORKGROUP}: u32 }}{after}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_has_the_first_workgroup_as_its_last_parameter_once() {
        for (file, _) in FILES {
            let text = text(&Shader::new(file, ""));
            let (_, params) = text.split_once("struct Params {").unwrap();
            let (fields, _) = params.split_once('}').unwrap();
            assert!(fields.ends_with(" first_workgroup: u32 "), "{file}: {fields}");
            let again = Shader::emitted("again", "", text.clone());
            assert_eq!(super::text(&again), text, "{file}");
            let own = text.replace(snippet(GRID), "");
            let others = own.matches("group.x +").count() + own.matches("id.x +").count();
            assert_eq!(others, 0, "{file} finds its place without shaders/lib/grid.wgsl");
        }
        let foreign = Shader::foreign("own".into(), "", "struct Params { n: u32 }".into());
        assert_eq!(super::text(&foreign), "struct Params { n: u32 }");
    }
}
