//! Selectors derived from selectors: for some of the devices, or without one; and the parts that
//! name no device.

use super::{Adapter, Chosen, Known, choose, known, longest, one, parse_list};

/// Returns a selector for the devices that `selector` chooses, without the one at `position` and
/// its copies; `None` if there is no other.
pub fn selector_without(selector: &str, position: usize, adapters: &[Adapter]) -> Option<String> {
    without(selector, position, &known(adapters))
}

/// Returns a selector for the devices at these positions among those that `selector` chooses, in
/// their order; `None` if it has no such devices, if `positions` is empty, or if no list names them
/// in this order.
pub fn selector_of(selector: &str, positions: &[usize], adapters: &[Adapter]) -> Option<String> {
    of_positions(selector, positions, &known(adapters))
}

/// Returns the parts of a list that name no device.
pub fn missing_devices(selector: &str, adapters: &[Adapter]) -> Vec<String> {
    missing(&selector.trim().to_lowercase(), &known(adapters))
}

fn without(selector: &str, position: usize, known: &[Known]) -> Option<String> {
    let chosen = choose(&selector.trim().to_lowercase(), known).ok()?;
    let failed = *chosen.get(position)?;
    let mut rest = chosen;
    rest.retain(|device| *device != failed);
    list_of(&rest, known)
}

fn of_positions(selector: &str, positions: &[usize], known: &[Known]) -> Option<String> {
    let chosen = choose(&selector.trim().to_lowercase(), known).ok()?;
    // Without a hardware GPU, `auto` is the CPU device.
    let chosen = if chosen.is_empty() { vec![Chosen::Cpu] } else { chosen };
    let mut devices = Vec::with_capacity(positions.len());
    for position in positions {
        devices.push(*chosen.get(*position)?);
    }
    list_of(&devices, known)
}

/// Returns a list that chooses these devices in this order; `None` if there are none, or if copies
/// of a device do not follow each other.
fn list_of(devices: &[Chosen], known: &[Known]) -> Option<String> {
    if devices.is_empty() {
        return None;
    }
    // Names that hide each other in a list are replaced by indices.
    let lists =
        [spelled(devices, |index| name(index, known)), spelled(devices, |index| index.to_string())];
    lists
        .into_iter()
        .find(|list| parse_list(&list.to_lowercase(), known).is_ok_and(|read| read == devices))
}

/// Formats a list of devices, in which the copies of one device are consecutive.
fn spelled(devices: &[Chosen], name: impl Fn(usize) -> String) -> String {
    let mut parts = Vec::new();
    for copies in devices.chunk_by(|one, next| one == next) {
        let name = match copies[0] {
            Chosen::Cpu => "cpu".to_string(),
            Chosen::Index(index) => name(index),
        };
        parts.push(if copies.len() == 1 { name } else { format!("{name}*{}", copies.len()) });
    }
    parts.join(",")
}

/// Name of an adapter, with its API or as its index if another one has that name.
fn name(index: usize, known: &[Known]) -> String {
    let Known { name, api, .. } = &known[index];
    for name in [name.clone(), format!("{api}:{name}")] {
        if one(&name.to_lowercase(), known).ok() == Some(Chosen::Index(index)) {
            return name;
        }
    }
    index.to_string()
}

fn missing(list: &str, known: &[Known]) -> Vec<String> {
    let mut missing = Vec::new();
    let mut rest = list;
    loop {
        let part = match longest(rest, known) {
            Ok(entry) => entry.text,
            Err(_) => {
                let part = rest.split(',').next().unwrap_or_default();
                missing.push(part.trim().to_string());
                part
            }
        };
        match rest.get(part.len() + 1..) {
            Some(more) => rest = more,
            None => return missing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(api: &'static str, name: &str) -> Known {
        let is_software = name.contains("llvmpipe");
        Known { name: name.into(), api, is_listed: api != "gl", is_software, is_usable: true }
    }

    fn machine() -> Vec<Known> {
        vec![
            entry("vulkan", "llvmpipe (LLVM 19.1, 256 bits)"),
            entry("vulkan", "NVIDIA GeForce RTX 3060"),
            entry("vulkan", "NVIDIA GeForce RTX 3060"),
            entry("gl", "llvmpipe (LLVM 19.1, 256 bits)"),
        ]
    }

    #[test]
    fn a_list_without_a_device_names_the_others() {
        let left = |selector: &str, position| without(selector, position, &machine());
        let named = |text: &str| Some(text.to_string());
        assert_eq!(left("llvmpipe,cpu", 0), named("cpu"));
        assert_eq!(left("cpu,llvmpipe", 0), named("llvmpipe (LLVM 19.1, 256 bits)"));
        assert_eq!(left("1, CPU*3,2", 0), named("cpu*3,2"));
        assert_eq!(left("1,cpu*3,2", 4), named("NVIDIA GeForce RTX 3060,cpu*3"));
        assert_eq!(left("1,cpu*3,2", 2), named("NVIDIA GeForce RTX 3060,2"));
        assert_eq!(left("gl:llvmpipe,0", 1), named("gl:llvmpipe (LLVM 19.1, 256 bits)"));
        // Hardware for auto, everything for all.
        assert_eq!(left("auto", 1), named("NVIDIA GeForce RTX 3060"));
        let all = "llvmpipe (LLVM 19.1, 256 bits),2,cpu";
        assert_eq!(left("all", 1), named(all));
        assert_eq!(left("cpu*2", 1), None);
        assert_eq!(without("auto", 0, &[]), None);
        assert_eq!(left("cpu", 7), None);
    }

    #[test]
    fn every_list_without_a_device_is_read_back() {
        let machine = machine();
        for selector in ["auto", "all", "0,1,2,3,cpu*2", "3*2,1,0"] {
            let chosen = choose(selector, &machine).unwrap();
            for (position, failed) in chosen.iter().enumerate() {
                let rest: Vec<Chosen> = chosen.iter().filter(|c| *c != failed).copied().collect();
                let text = without(selector, position, &machine).unwrap().to_lowercase();
                assert_eq!(parse_list(&text, &machine).unwrap(), rest, "{selector}: {text}");
            }
        }
    }

    #[test]
    fn a_list_of_some_devices_names_each_of_two_equal_ones() {
        let machine = machine();
        let of = |selector: &str, positions: &[usize]| {
            let text = of_positions(selector, positions, &machine)?;
            let chosen = choose(selector, &machine).unwrap();
            let wanted: Vec<Chosen> = positions.iter().map(|at| chosen[*at]).collect();
            assert_eq!(parse_list(&text.to_lowercase(), &machine).unwrap(), wanted, "{text}");
            Some(text)
        };
        let named = |text: &str| Some(text.to_string());
        assert_eq!(of("all", &[1, 2]), named("NVIDIA GeForce RTX 3060,2"));
        assert_eq!(of("auto", &[1]), named("2"));
        assert_eq!(of("all", &[0, 3]), named("llvmpipe (LLVM 19.1, 256 bits),cpu"));
        assert_eq!(of("cpu*3", &[0, 2]), named("cpu*2"));
        assert_eq!(of("cpu*2,1", &[2, 0]), named("NVIDIA GeForce RTX 3060,cpu"));
        // Copies of a device stand together in a list.
        assert_eq!(of("cpu*2,1", &[0, 2, 1]), None);
        assert_eq!(of("auto", &[]), None);
        assert_eq!(of_positions("cpu", &[1], &machine), None);
        assert_eq!(of_positions("auto", &[0], &[]), named("cpu"));
    }

    #[test]
    fn what_is_not_there_is_listed() {
        let not = |list: &str| missing(list, &machine());
        assert_eq!(not("cpu,radeon,1,arc*2"), ["radeon", "arc*2"]);
        assert_eq!(not("cpu*2,llvmpipe (llvm 19.1, 256 bits)"), [""; 0]);
        assert_eq!(missing("cpu,0", &[]), ["0"]);
    }
}
