//! Names of the requested devices.

use crate::runtime::open::display_name;
use potluck_kernels::device::Selection;

/// Returns true if a selector names devices, which must all be used, instead of `auto` or `all`.
pub fn is_named(selector: &str) -> bool {
    !["auto", "all"].contains(&selector.trim().to_lowercase().as_str())
}

/// Returns true if a selector permits the exclusion of devices that make a step longer.
pub fn is_auto(selector: &str) -> bool {
    selector.trim().eq_ignore_ascii_case("auto")
}

/// Returns the display names of devices, with a number in equal ones: `cpu (8 threads)` and
/// `cpu 2 (8 threads)`.
pub fn display_names(selections: &[Selection]) -> Vec<String> {
    distinct(selections.iter().map(display_name).collect())
}

/// Adds a number to each name that is equal to an earlier one.
pub fn distinct(names: Vec<String>) -> Vec<String> {
    let mut distinct = Vec::new();
    for (index, name) in names.iter().enumerate() {
        let earlier = names[..index].iter().filter(|other| *other == name).count();
        distinct.push(if earlier == 0 { name.clone() } else { numbered(name, earlier + 1) });
    }
    distinct
}

/// Inserts a number after the short part of a name.
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
