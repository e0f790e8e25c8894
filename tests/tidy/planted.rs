//! Planted violations: each rule finds them and nothing else.

use crate::rules::*;
use crate::source::{Source, mark_test_files, split};

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
    let exec = |text: &str, lines: &[usize]| finds(layers, "src/kernels/exec/a.rs", text, lines);
    exec("use crate::device::Gpu;\nuse super::shapes;\nuse crate::exec::Op;\nuse crate::Op;", &[]);
    exec("use crate::{device::{Gpu, ids}, autotune};", &[]);
    exec("use crate::*;", &[1]);
    exec("use crate as other;", &[1]);
    exec("pub(crate) fn f() {}", &[]);
    exec("use super::super::device;", &[1]);
    let gpu = |text: &str, lines: &[usize]| finds(layers, "src/kernels/device/a.rs", text, lines);
    gpu("use crate::exec::Cpu;", &[1]);
    gpu("fn f() {\n    crate::twin();\n}", &[2]);
    gpu("use crate::{\n    device::{Site, exec},\n    autotune, exec,\n};", &[2, 3]);
    gpu("#[cfg(test)]\nmod tests {\n    use crate::exec::Cpu;\n}", &[3]);
    gpu("// use crate::exec\nconst A: &str = \"crate::exec\"; /* crate::exec */", &[]);
    finds(layers, "src/kernels/device/mod.rs", "use super::exec::Cpu;", &[1, 1]);
    finds(layers, "src/core/files.rs", "use super::Rank;", &[1]);
    let tests = "#[cfg(test)]\nmod tests {\n    use super::*;\n}";
    finds(layers, "src/kernels/device/mod.rs", tests, &[]);
    finds(layers, "src/kernels/twin.rs", "use crate::{device, variant};", &[]);
    finds(layers, "src/kernels/twin.rs", "use crate::exec;\nuse super::exec;", &[1, 2]);
    finds(layers, "src/kernels/twin.rs", "use super::{device, variant};", &[]);
    finds(layers, "src/kernels/ops/mod.rs", "use super::autotune::a;", &[1]);
    finds(layers, "src/kernels/ops/sum.rs", "use super::exec;", &[]);
    finds(layers, "src/train/run/mod.rs", "use crate::{runtime, config, spec};", &[]);
    finds(layers, "src/train/runtime/open.rs", "use crate::spec::RunSpec;", &[1]);
    finds(layers, "src/net/cluster/mod.rs", "use crate::Link;\nuse crate::nodes::a;", &[1, 2]);
    finds(layers, "src/utils/mod.rs", "", &[1]);
    finds(layers, "src/main.rs", "use potluck::cli;", &[]);
}

#[test]
fn planted_intruders_are_found() {
    let graph = |text: &str, lines: &[usize]| finds(absences, "src/graph/op.rs", text, lines);
    graph("use tokio::Runtime;", &[1]);
    graph("use tokio;\nfn f(x: tokio::Runtime) {}", &[2, 1]);
    graph("fn f() { self.tokio.limits() }", &[]);
    graph("fn f() { std::fs::read(); }\n#[cfg(test)]\nmod tests { use std::fs; }", &[1]);
    graph("use std::time::Instant;", &[1, 1]);
    finds(absences, "src/net/nodes/a.rs", "use std::time::Instant;\nuse quinn::A;", &[2]);
    finds(absences, "src/net/link.rs", "use quinn::A;", &[]);
    finds(absences, "src/kernels/exec/gpu.rs", "std::thread::spawn(f);\nprintln!();", &[1, 2]);
    finds(absences, "src/train/run.rs", "std::thread::spawn(f);\nprintln!();", &[]);
    finds(absences, "src/train/run.rs", "use anyhow::Result;\nuse tokio::net;", &[2, 1]);
    graph("use signal_hook::flag;", &[1]);
}

#[test]
fn planted_readers_of_the_configuration_are_found() {
    let text = "use crate::config::key;\nuse crate::{spec, config::schema};\n\
                // RunConfig\nfn f(a: &RunConfig) {}\nuse crate::model::GptConfig;";
    finds(configuration, "src/train/run/mod.rs", text, &[1, 2, 4]);
    finds(configuration, "src/bench/profile.rs", text, &[1, 2, 4]);
    finds(configuration, "src/train/spec.rs", text, &[]);
    finds(configuration, "src/train/spec.rs", "fn f() {}", &[1]);
    finds(configuration, "src/train/config/read.rs", text, &[]);
    finds(configuration, "examples/a.rs", "use potluck_train::config;", &[1]);
    finds(configuration, "tests/slow.rs", "use potluck_train::config::RunConfig;", &[]);
}

#[test]
fn planted_names_of_settings_are_found() {
    let exec =
        |text: &str, lines: &[usize]| finds(settings_by_hand, "src/kernels/exec/a.rs", text, lines);
    exec("const A: &str = \"lower train.batch\";\nconst B: &str = \"add --out\";", &[1, 2]);
    exec("f(\"a long text \\\n    --devices cpu, or data.crop\")", &[2, 2]);
    exec("// train.batch, --out\nfn f() { self.train.batch -= 1; a --b }", &[]);
    exec("const A: &str = \"pretrain.batch a.train.b train. trains -- --- é\";", &[]);
    exec("#[cfg(test)]\nmod tests { const A: &str = \"train.batch\"; }", &[]);
    finds(settings_by_hand, "src/train/config/a.rs", "const A: &str = \"train.batch\";", &[]);
    finds(settings_by_hand, "src/cli/a.rs", "const A: &str = \"--out\";", &[]);
}

#[test]
fn planted_long_lines_are_found() {
    let line = |length: usize| format!("{}\n{}\n", "short", "ü".repeat(length));
    finds(columns, "src/a.rs", &line(COLUMNS_MAX), &[]);
    finds(columns, "src/a.rs", &line(COLUMNS_MAX + 1), &[2]);
    let rows = format!("| {0} |\n{0}\n", "wide ".repeat(COLUMNS_MAX));
    finds(columns, "benches/results/a.md", &rows, &[2]);
    finds(columns, "src/a.rs", &rows, &[1, 2]);
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
fn planted_platform_functions_are_found() {
    let text =
        "fn f(x: f64) -> f64 {\n    x.exp()\n}\n#[cfg(test)]\nmod tests {\n    f(1.0).ln()\n}";
    finds(platform_math, "src/core/a.rs", text, &[2]);
    finds(platform_math, "src/bench/a.rs", text, &[]);
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
    let with = |twin: &str, table: &str| {
        let files = [
            Source::new("shaders/a.wgsl", "// A."),
            Source::new(twin, "//! Twin. a::f"),
            Source::new("src/kernels/ops/mod.rs", table),
        ];
        twins(&files).len()
    };
    assert_eq!(with("src/kernels/ops/a.rs", "pub mod a;\nOp::A => a::TWIN"), 0);
    assert_eq!(with("src/kernels/ops/a.rs", "mod a;\na::dispatch()"), 0);
    assert_eq!(with("src/kernels/ops/b.rs", "pub mod a;\na::TWIN"), 1);
    assert_eq!(with("src/kernels/ops/a.rs", "pub mod ba;\na::TWIN"), 1);
    assert_eq!(with("src/kernels/ops/a.rs", "pub mod a;"), 1);
    let inside = [
        Source::new("shaders/a_b.wgsl", "// A."),
        Source::new("src/kernels/ops/a/b.rs", "//! Twin."),
        Source::new("src/kernels/ops/a/mod.rs", "mod b;\nb::dispatch()"),
    ];
    assert_eq!(twins(&inside), Vec::<String>::new());
}

#[test]
fn planted_mentions_of_ops_are_found() {
    let with = |path: &str, text: &str, exceptions: &[(&str, &str, &str)]| {
        let files = [
            Source::new(
                "src/graph/op.rs",
                "pub enum Op {\n    /// A.\n    A { x: u8 },\n    B,\n}",
            ),
            Source::new(TWIN_TABLE, "table! {\n    Op::A { .. } => a::TWIN,\n}"),
            Source::new("src/kernels/ops/a.rs", "match op { Op::A { x } => x }"),
            Source::new("src/kernels/ops/a_group.rs", "Op::A"),
            Source::new("src/kernels/ops/a/probes.rs", "Op::A"),
            Source::new("shaders/a_group.wgsl", "// A."),
            Source::new(path, text),
        ];
        op_users(&files, exceptions)
    };
    let probes = "src/kernels/autotune/probes.rs";
    for text in [
        "match op { Op::A { .. } => 1 }",
        "use crate::kernels::ops::{a, b};",
        "crate::kernels::ops::a::cost(call)",
        "\nShader::new(\"a_group\", e)",
    ] {
        let wrong = with(probes, text, &[]);
        assert_eq!(wrong.len(), 1, "{text}: {wrong:?}");
        assert!(wrong[0].ends_with("mentions the op A"), "{wrong:?}");
        assert!(with(probes, text, &[(probes, "A", "why")]).is_empty());
    }
    let own = "src/kernels/ops/a_group.rs";
    for text in ["use crate::graph::Op::*;", "use Op::{A, B};", "use crate::graph::{Op as O};"] {
        for path in [probes, own] {
            let wrong = with(path, text, &[]);
            assert_eq!(wrong.len(), 1, "{text}: {wrong:?}");
            assert!(wrong[0].ends_with("hides the ops it brings"), "{wrong:?}");
        }
        assert!(with(OP_FILES[1], text, &[]).is_empty());
        assert!(with(&format!("{}a.rs", OP_FOLDERS[1]), text, &[]).is_empty());
        let tests = format!("#[cfg(test)]\nmod tests {{ {text} }}");
        assert!(with(probes, &tests, &[]).is_empty());
    }
    for text in ["use EpilogueOp::*;", "use x::{EpilogueOp as E};", "EpilogueOp::{A}"] {
        assert!(with(probes, text, &[]).is_empty(), "{text}");
    }
    assert_eq!(with("src/kernels/call.rs", "a::cost(call)", &[]).len(), 1);
    assert_eq!(with("src/cli/a.rs", "Op::B", &[]), ["src/cli/a.rs:1: mentions the op B"]);
    assert_eq!(with(probes, "", &[(probes, "A", "why")]).len(), 1, "an idle exception");
    for text in
        ["// Op::A", "Op::AB", "ba::f()", "a::cost(call)", "#[cfg(test)]\nmod tests { use Op::A; }"]
    {
        assert_eq!(with(probes, text, &[]), Vec::<String>::new());
    }
}

#[test]
fn planted_question_openings_are_found() {
    let at = |path: &str, text: &str| question_openings(&[Source::new(path, text)]);
    let of = |text: &str| at("src/graph/a.rs", text);
    let one = "//! Ranks.\n\n/// Which rank.\nfn f() {}\n";
    assert_eq!(of(one).len(), 2, "one, and the total");
    assert_eq!([at("tests/a/main.rs", one).len(), at("benches/a.rs", one).len()], [2, 0]);
    assert_eq!(of("/// The rank: where it is.\n/// What it does.\n// How\nfn f() {}").len(), 0);
    let many = "/// A rank.\nfn f() {}\n".repeat(200);
    assert_eq!(of(&format!("{many}/// Whether it is.\n")).len(), 0, "few are allowed");
}

#[test]
fn planted_repeated_type_names_are_found() {
    let files = [
        Source::new("src/graph/a.rs", "pub struct Link;\nenum Own {}\n"),
        Source::new("src/comm/b.rs", "struct Link<T>(T);\nimpl X { type Own = u8; }\n"),
        Source::new("src/comm/c.rs", "#[cfg(test)]\nmod tests { struct Own; }\n"),
    ];
    let wrong = repeated_type_names(&files, &[]);
    assert_eq!(wrong, ["Link is a type of src/graph/a.rs, src/comm/b.rs"]);
    assert!(repeated_type_names(&files, &[("Link", "")]).is_empty());
    assert_eq!(repeated_type_names(&files, &[("Link", ""), ("Own", "")]).len(), 1);
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
