//! Slurm's lists of hosts: `n[001-003,7],h2`, `r[1-2]n[1-4]`.

use crate::cli::UsageError;

/// Returns the first host of a list.
///
/// # Errors
/// Returns `UsageError` if the text is not a list of hosts.
pub fn first_host(list: &str) -> Result<String, UsageError> {
    let bad = || UsageError(format!("'{list}' is no list of hosts"));
    let mut host = String::new();
    let mut rest = list;
    loop {
        let Some(at) = rest.find(['[', ']', ',']) else {
            host.push_str(rest);
            break;
        };
        host.push_str(&rest[..at]);
        match rest.as_bytes()[at] {
            b',' => break,
            b']' => return Err(bad()),
            _ => {}
        }
        let (ranges, behind) = rest[at + 1..].split_once(']').ok_or_else(bad)?;
        let first = ranges.split([',', '-']).next().unwrap_or_default();
        if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(bad());
        }
        host.push_str(first);
        rest = behind;
    }
    if host.is_empty() || host.contains(char::is_whitespace) { Err(bad()) } else { Ok(host) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_host_keeps_zeros_and_all_dimensions() {
        for (list, host) in [
            ("n1", "n1"),
            ("n[1-3]", "n1"),
            ("n[001-003,7],h2", "n001"),
            ("h2,n[1-3]", "h2"),
            ("r[1-2]n[4-5]x,b", "r1n4x"),
            ("gpu-a.example.org,gpu-b", "gpu-a.example.org"),
        ] {
            assert_eq!(first_host(list).unwrap(), host);
        }
        for list in ["", ",a", "n[1-3", "n]1", "n[]", "n[a-b]", "a b"] {
            assert!(first_host(list).is_err(), "{list}");
        }
    }
}
