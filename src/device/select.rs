//! The selector of `--devices`: from what was typed to what is opened.

use super::adapters::{Adapter, AdapterKind};
use super::error::{DeviceError, driver_hint};

/// What a selector chose.
#[derive(Clone, Debug)]
pub enum Selection {
    /// The built-in CPU device; with the reason, if it was not asked for by name.
    Cpu { because: Option<String> },
    /// An adapter to open.
    Adapter(Box<Adapter>),
}

/// Chooses one device among `adapters`.
///
/// `auto` is the first hardware GPU, or the CPU device if there is none; `cpu` is the CPU
/// device; anything else is an index or a part of a name, after `api:` if the API matters (which
/// also finds merged entries). Upper and lower case are the same.
pub fn select(selector: &str, adapters: &[Adapter]) -> Result<Selection, DeviceError> {
    let bad = |why: &str| {
        let why = format!("{why}; say auto, cpu, an index or a part of a name");
        Err(DeviceError::BadSelector { selector: selector.into(), why })
    };
    let one_device = "a run takes one device";
    match selector.trim().to_lowercase().as_str() {
        "" => bad("it is empty"),
        "cpu" => Ok(Selection::Cpu { because: None }),
        "auto" => Ok(automatic(adapters)),
        "all" => bad(one_device),
        one => match named(one, adapters) {
            Ok(adapter) => Ok(Selection::Adapter(Box::new(adapter.clone()))),
            // Names may have commas too, so this is a list only if nothing has that name.
            Err(_) if one.contains([',', '*']) => bad(one_device),
            Err(error) => Err(error),
        },
    }
}

fn automatic(adapters: &[Adapter]) -> Selection {
    let hardware = adapters.iter().find(|adapter| {
        let software = adapter.kind == AdapterKind::Software;
        !software && adapter.merged_into.is_none() && adapter.usable().is_ok()
    });
    match hardware {
        Some(adapter) => Selection::Adapter(Box::new(adapter.clone())),
        None => {
            let because = "no hardware GPU was found".to_string();
            Selection::Cpu { because: Some(because) }
        }
    }
}

/// The adapter that a selector in lower case names.
fn named<'a>(selector: &str, adapters: &'a [Adapter]) -> Result<&'a Adapter, DeviceError> {
    if adapters.is_empty() {
        return Err(DeviceError::NoAdapter { hint: driver_hint() });
    }
    let (api, wanted) = match selector.split_once(':') {
        Some((api, name)) if ["vulkan", "metal", "dx12", "gl"].contains(&api) => (Some(api), name),
        _ => (None, selector),
    };
    let visible = |adapter: &&Adapter| match api {
        Some(api) => adapter.api == api,
        None => adapter.merged_into.is_none(),
    };
    let by_index = wanted.parse::<usize>().ok().and_then(|index| adapters.get(index));
    by_index
        .filter(|adapter| api.is_none() || visible(adapter))
        .or_else(|| {
            let mut shown = adapters.iter().filter(visible);
            shown.find(|adapter| adapter.name.to_lowercase().contains(wanted))
        })
        .ok_or_else(|| DeviceError::NoMatch {
            selector: selector.into(),
            found: describe(adapters),
        })
}

fn describe(adapters: &[Adapter]) -> String {
    let shown: Vec<String> = adapters
        .iter()
        .enumerate()
        .map(|(index, adapter)| format!("{index} {}:{}", adapter.api, adapter.name))
        .collect();
    format!("cpu, {}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_adapters_auto_is_the_cpu_and_names_are_errors() {
        assert!(matches!(select("auto", &[]), Ok(Selection::Cpu { because: Some(_) })));
        for cpu in ["cpu", "CPU", " cpu "] {
            assert!(matches!(select(cpu, &[]), Ok(Selection::Cpu { because: None })));
        }
        let error = select("llvmpipe", &[]).unwrap_err().to_string();
        assert!(error.contains("--devices cpu"), "{error}");
    }

    #[test]
    fn lists_are_refused_with_the_reason() {
        let error = select("a,b", &[]).unwrap_err().to_string();
        assert!(error.contains("one device"), "{error}");
        assert!(select(" ", &[]).unwrap_err().to_string().contains("empty"));
    }
}
