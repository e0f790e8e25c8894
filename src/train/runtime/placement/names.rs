//! Names of the requested devices.

use crate::runtime::open::display_name;
use potluck_kernels::device::Selection;

/// Returns true if a selector names devices, which must then all be used, instead of leaving the
/// choice to the program.
pub fn is_named(selector: &str) -> bool {
    !["auto", "all"].contains(&selector.trim().to_lowercase().as_str())
}

/// Returns true if a selector lets the program leave out devices that make a step longer.
pub fn is_auto(selector: &str) -> bool {
    selector.trim().eq_ignore_ascii_case("auto")
}

/// Returns the names of devices as they are shown to the user, with a number where several have
/// the same: `cpu (8 threads)` and `cpu 2 (8 threads)`.
pub fn display_names(selections: &[Selection]) -> Vec<String> {
    distinct(selections.iter().map(display_name).collect())
}

/// Returns names of which those that are equal have a number, from the second on.
pub fn distinct(names: Vec<String>) -> Vec<String> {
    let mut distinct = Vec::new();
    for (index, name) in names.iter().enumerate() {
        let earlier = names[..index].iter().filter(|other| *other == name).count();
        distinct.push(if earlier == 0 { name.clone() } else { numbered(name, earlier + 1) });
    }
    distinct
}

/// Inserts a number after the part of a name that short displays keep.
fn numbered(name: &str, number: usize) -> String {
    let (short, rest) = name.split_at(name.find(['(', '/']).unwrap_or(name.len()));
    let space = if rest.starts_with('(') { " " } else { "" };
    format!("{} {number}{space}{rest}", short.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_names_are_numbered_before_what_short_displays_leave_out() {
        let names = ["cpu (2 threads)", "RTX 3060/PCIe", "cpu (2 threads)", "A", "A", "A"];
        let found = distinct(names.map(String::from).into());
        let expected = ["cpu (2 threads)", "RTX 3060/PCIe", "cpu 2 (2 threads)", "A", "A 2", "A 3"];
        assert_eq!(found, expected);
        assert_eq!(numbered("RTX 3060/PCIe", 2), "RTX 3060 2/PCIe");
    }

    #[test]
    fn the_selectors_that_leave_the_choice_name_nothing() {
        assert!(!is_named(" Auto ") && !is_named("all"));
        assert!(is_named("cpu") && is_named("cpu*2") && is_named("llvmpipe, cpu"));
    }
}
