//! The rules of the tree: rooms and their layers, heads, leftovers. Each rule is a function
//! over a [`Source`] (or all of them) that returns what is wrong, so that planted violations can
//! prove that it finds them.

mod planted;
mod rules;
mod source;

use rules::*;
use source::{Source, tree};

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
    for (index, (package, room, allowed)) in ROOMS.iter().enumerate() {
        for name in allowed.split_whitespace() {
            let is_below = ROOMS[..index].iter().any(|row| (row.0, row.1) == (*package, name));
            assert!(is_below, "{room} may not know {name}, which is not below it");
        }
    }
}

#[test]
fn rooms_lack_what_is_not_theirs() {
    keep(absences, |_| true);
}

#[test]
fn few_files_know_the_configuration() {
    keep(configuration, |_| true);
}

#[test]
fn settings_are_named_by_their_table() {
    keep(settings_by_hand, |file| file.path != SETTINGS);
}

#[test]
fn lines_end_within_the_columns() {
    let places = ["src/", "shaders/", "tests/", "examples/", "benches/", "build.rs", "x", ".ci/"];
    for place in places {
        let is_here = |file: &&Source| {
            let of_charts = file.path.starts_with("tests/golden/charts/");
            if of_charts || file.path.contains("/proptest-regressions/") {
                return false;
            }
            if place.ends_with('/') { file.path.starts_with(place) } else { file.path == place }
        };
        let wrong: Vec<String> = tree().iter().filter(is_here).flat_map(columns).collect();
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
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
fn bits_do_not_depend_on_the_platforms_functions() {
    keep(platform_math, Source::is_rust);
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
fn an_op_is_known_to_its_rules_and_its_twin_only() {
    let wrong = op_users(&tree(), OP_EXCEPTIONS);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn doc_comments_open_with_a_name() {
    let wrong = question_openings(&tree());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn types_have_names_of_their_own() {
    let wrong = repeated_type_names(&tree(), REPEATED_TYPE_NAMES);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_machine_is_named() {
    keep(machine_paths, |_| true);
}
