//! Device selection: parses the selector of `--devices` and finds the devices that it names.

mod spelling;

pub use spelling::{missing_devices, selector_of, selector_without};

use super::AdapterKind;
use super::adapters::Adapter;
use super::error::{DeviceError, no_adapter};
use super::host;

/// The most devices that `*K` makes of one adapter.
const COPIES_MAX: usize = 64;

/// Device that a selector selected.
#[derive(Clone, Debug)]
pub enum Selection {
    /// The built-in CPU device.
    Cpu {
        /// Reason for the choice, if it was not named.
        reason: Option<String>,
        /// Threads of this device: several CPU devices divide the cores.
        threads: usize,
    },
    /// An adapter to open.
    Adapter(Box<Adapter>),
    /// A device of another node.
    Offered(RemoteDeviceInfo),
}

/// Device that another node offers to a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteDeviceInfo {
    /// Number of the node.
    pub node: u32,
    /// Index of the device among the node's devices.
    pub index: u32,
    /// Display name, with the name of the host.
    pub name: String,
    /// Identity that determines the bits of its results.
    pub identity: String,
    pub is_cpu: bool,
    /// True if its node's processor computes for it.
    pub is_on_host: bool,
    /// The most bytes of a tensor that it can bind; `None` without a limit.
    pub binding_bytes: Option<u64>,
    /// Bytes of memory for it alone, as its driver or the user of its node says; `None` if unknown.
    pub memory: Option<u64>,
    /// Bytes of memory that its host has available, if that is where it has its tensors.
    pub host_memory: Option<u64>,
    /// Number of its adapter on the node: devices of one adapter share its memory. `None` for a CPU
    /// device.
    pub adapter: Option<u32>,
}

impl Selection {
    /// Returns one of `devices` CPU devices of this machine.
    pub fn cpu(devices: usize) -> Self {
        Self::Cpu { reason: None, threads: (host::threads() / devices.max(1)).max(1) }
    }

    /// Returns the display name of the device: `cpu`, or the name of the adapter.
    pub fn name(&self) -> &str {
        match self {
            Self::Cpu { .. } => "cpu",
            Self::Adapter(adapter) => &adapter.name,
            Self::Offered(device) => &device.name,
        }
    }

    /// Queries the memory of an adapter again, which was last done when the adapters were listed.
    pub fn refresh_memory(&mut self) {
        if let Self::Adapter(adapter) = self {
            adapter.memory = adapter.memory_now();
        }
    }

    /// Returns true if both are on one adapter, so that they share its memory.
    pub fn shares_adapter(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Adapter(one), Self::Adapter(other)) => one.is_same(other),
            (Self::Offered(one), Self::Offered(other)) => {
                one.node == other.node && one.adapter.is_some() && one.adapter == other.adapter
            }
            _ => false,
        }
    }
}

/// Chooses one device among `adapters`.
///
/// `auto` is the first hardware GPU, or else the CPU device; `cpu` is the CPU device; anything else
/// is an index or a part of a name, after `api:` if the API matters (which also finds merged
/// entries). Case is ignored.
///
/// # Errors
/// Returns [`DeviceError`] if no device has that name, or if the selector is a list or `all`,
/// which are several devices.
pub fn select(selector: &str, adapters: &[Adapter]) -> Result<Selection, DeviceError> {
    let known = known(adapters);
    let typed = selector.trim().to_lowercase();
    if typed == "auto" {
        return Ok(match automatic(&known) {
            Some(chosen) => selection(chosen, adapters, 1),
            None => no_hardware(),
        });
    }
    match one(&typed, &known) {
        Ok(chosen) => Ok(selection(chosen, adapters, 1)),
        // Names may have commas too, so this is a list only if nothing has that name.
        Err(_) if typed == "all" || typed.contains([',', '*']) => {
            Err(bad(&typed, "this command takes one device"))
        }
        Err(error) => Err(error),
    }
}

/// Chooses the devices of a run, in the order of their ranks.
///
/// `auto` is every hardware GPU, or else the CPU device; `all` is every adapter that can run
/// kernels, software ones too, and the CPU device at the end; anything else is a list, separated by
/// commas, of the selectors of [`select`] except `auto`. `*K` after a name makes K devices of it. A
/// name may itself contain commas and stars: the longest part that names a device is taken. `cpu*K`
/// are K devices that divide the cores, each with at least one thread.
///
/// # Errors
/// Returns [`DeviceError`] if a part of the list names no device, or if a device is named twice,
/// which must be written as `*2`.
pub fn select_all(selector: &str, adapters: &[Adapter]) -> Result<Vec<Selection>, DeviceError> {
    let chosen = choose(&selector.trim().to_lowercase(), &known(adapters))?;
    if chosen.is_empty() {
        return Ok(vec![no_hardware()]);
    }
    let cpus = chosen.iter().filter(|chosen| **chosen == Chosen::Cpu).count();
    Ok(chosen.into_iter().map(|chosen| selection(chosen, adapters, cpus)).collect())
}

/// Devices that a selector in lower case chooses; none for `auto` without hardware.
fn choose(selector: &str, known: &[Known]) -> Result<Vec<Chosen>, DeviceError> {
    match selector {
        "auto" => Ok(chosen_by(Known::is_hardware, known)),
        "all" => {
            let mut chosen = chosen_by(|entry| entry.is_listed && entry.is_usable, known);
            chosen.push(Chosen::Cpu);
            Ok(chosen)
        }
        list => parse_list(list, known),
    }
}

/// Adapters for which `is_chosen` is true.
fn chosen_by(is_chosen: impl Fn(&Known) -> bool, known: &[Known]) -> Vec<Chosen> {
    (0..known.len()).filter(|index| is_chosen(&known[*index])).map(Chosen::Index).collect()
}

/// Properties of an adapter on which a selector depends.
struct Known {
    name: String,
    api: &'static str,
    /// True if the entry is not merged into another one.
    is_listed: bool,
    is_software: bool,
    is_usable: bool,
}

impl Known {
    fn of(adapter: &Adapter) -> Self {
        Self {
            name: adapter.name.clone(),
            api: adapter.api,
            is_listed: adapter.merged_into.is_none(),
            is_software: adapter.kind == AdapterKind::Software,
            is_usable: adapter.usable().is_ok(),
        }
    }

    fn is_hardware(&self) -> bool {
        self.is_listed && self.is_usable && !self.is_software
    }
}

fn known(adapters: &[Adapter]) -> Vec<Known> {
    adapters.iter().map(Known::of).collect()
}

/// Selected device; an adapter by its index in the list of adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Chosen {
    Cpu,
    Index(usize),
}

/// Converts a chosen device; `cpus` is the number of CPU devices in the list.
fn selection(chosen: Chosen, adapters: &[Adapter], cpus: usize) -> Selection {
    match chosen {
        Chosen::Cpu => Selection::cpu(cpus),
        Chosen::Index(index) => Selection::Adapter(Box::new(adapters[index].clone())),
    }
}

/// First hardware GPU.
fn automatic(known: &[Known]) -> Option<Chosen> {
    known.iter().position(Known::is_hardware).map(Chosen::Index)
}

fn no_hardware() -> Selection {
    Selection::Cpu { reason: Some("no hardware GPU was found".into()), threads: host::threads() }
}

/// Parses a list in lower case; returns its devices.
fn parse_list(list: &str, known: &[Known]) -> Result<Vec<Chosen>, DeviceError> {
    let mut entries = Vec::new();
    let mut rest = Some(list);
    while let Some(list) = rest {
        let entry = longest(list, known)?;
        rest = list.get(entry.text.len() + 1..);
        entries.push(entry);
    }
    let mut devices = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        if entries[..index].iter().any(|earlier| earlier.device == entry.device) {
            let device = entry.device;
            entries.retain(|entry| entry.device == device);
            return Err(repeated(&entries));
        }
        devices.extend(std::iter::repeat_n(entry.device, entry.count));
    }
    Ok(devices)
}

struct ListEntry<'a> {
    /// The entry as typed, with the spaces around it.
    text: &'a str,
    device: Chosen,
    /// Ranks on the device.
    count: usize,
}

/// Returns the error of several entries that name one device.
fn repeated(entries: &[ListEntry]) -> DeviceError {
    let mut names: Vec<String> = Vec::new();
    for entry in entries {
        let mut name = entry.text.trim();
        if let Some((before, typed)) = name.rsplit_once('*')
            && typed.trim().parse() == Ok(entry.count)
        {
            name = before.trim_end();
        }
        if !names.iter().any(|known| known == name) {
            names.push(name.into());
        }
    }
    let times = match entries.len() {
        2 => "twice".into(),
        times => format!("{times} times"),
    };
    DeviceError::Repeated { names, times, count: entries.iter().map(|entry| entry.count).sum() }
}

/// Returns the longest part, up to a comma or the end, that names a device, because names may
/// contain commas.
///
/// # Errors
/// Returns the error of the shortest part, which is the wrong part of the list.
fn longest<'a>(rest: &'a str, known: &[Known]) -> Result<ListEntry<'a>, DeviceError> {
    let mut text = rest;
    loop {
        let error = match several(text.trim(), known) {
            Ok((device, count)) => return Ok(ListEntry { text, device, count }),
            Err(error) => error,
        };
        match text.rfind(',') {
            Some(comma) => text = &text[..comma],
            None => return Err(without_commas(text, known).unwrap_or(error)),
        }
    }
}

/// Error of a part that names no device, if each of its words names another one.
fn without_commas(part: &str, known: &[Known]) -> Option<DeviceError> {
    let words: Vec<&str> = part.split_whitespace().collect();
    let mut devices = Vec::with_capacity(words.len());
    for word in &words {
        let (device, _) = several(word, known).ok()?;
        // Words of one name are no list.
        if devices.contains(&device) {
            return None;
        }
        devices.push(device);
    }
    if words.len() < 2 {
        return None;
    }
    Some(bad(part, &format!("devices are separated by commas: {}", words.join(","))))
}

/// Parses one part of a list; returns a device, and the number of ranks on it.
fn several(part: &str, known: &[Known]) -> Result<(Chosen, usize), DeviceError> {
    let error = match one(part, known) {
        Ok(device) => return Ok((device, 1)),
        Err(error) => error,
    };
    let Some((name, count)) = part.rsplit_once('*') else { return Err(error) };
    let device = one(name.trim_end(), known)?;
    match count.trim().parse() {
        Ok(count) if (1..=COPIES_MAX).contains(&count) => Ok((device, count)),
        _ => Err(bad(part, &format!("a whole number from 1 to {COPIES_MAX} must follow *"))),
    }
}

/// Device that a text in lower case names.
fn one(typed: &str, known: &[Known]) -> Result<Chosen, DeviceError> {
    match typed {
        "" => Err(empty(typed)),
        "cpu" => Ok(Chosen::Cpu),
        // These are keywords, not parts of a name.
        "auto" | "all" => Err(bad(typed, "it cannot be part of a list")),
        name => named(name, known).map(Chosen::Index),
    }
}

/// Returns true for a number that is an index, and not a part of a name such as 3090.
pub(super) fn is_index(text: &str) -> bool {
    text.len() <= 2 && text.parse::<usize>().is_ok()
}

/// Index of the adapter that a text in lower case names.
fn named(typed: &str, known: &[Known]) -> Result<usize, DeviceError> {
    if known.is_empty() {
        return Err(no_adapter());
    }
    let (api, wanted) = match typed.split_once(':') {
        Some((api, name)) if ["vulkan", "metal", "dx12", "gl"].contains(&api) => (Some(api), name),
        _ => (None, typed),
    };
    if let Ok(index) = wanted.parse::<usize>()
        && let Some(entry) = known.get(index)
        && api.is_none_or(|api| entry.api == api)
    {
        return Ok(index);
    }
    let mut fits = Vec::new();
    for (index, entry) in known.iter().enumerate() {
        let is_candidate = match api {
            Some(api) => entry.api == api,
            None => entry.is_listed,
        };
        if is_candidate && !is_index(wanted) && entry.name.to_lowercase().contains(wanted) {
            fits.push(index);
        }
    }
    let Some(&first) = fits.first() else {
        return Err(DeviceError::NoMatch { selector: typed.into(), found: describe(known) });
    };
    let whole = fits.iter().find(|index| known[**index].name.to_lowercase() == wanted);
    // Of equal devices the first one is as good as any.
    let are_equal = fits.iter().all(|index| known[*index].name == known[first].name);
    match whole {
        Some(index) => Ok(*index),
        None if are_equal => Ok(first),
        None => {
            let mut names = Vec::with_capacity(fits.len());
            for index in fits {
                names.push(format!("{index} {}", known[index].name));
            }
            let names = names.join(" and ");
            Err(bad(typed, &format!("it fits {names}; write the index, or more of the name")))
        }
    }
}

fn describe(known: &[Known]) -> String {
    let mut devices = vec!["cpu".to_string()];
    for (index, Known { api, name, .. }) in known.iter().enumerate() {
        devices.push(format!("{index} {api}:{name}"));
    }
    devices.join(", ")
}

fn bad(part: &str, why: &str) -> DeviceError {
    DeviceError::BadSelector { selector: part.trim().into(), why: why.into() }
}

fn empty(part: &str) -> DeviceError {
    bad(part, "it is empty; say auto, all, cpu, an index or a part of a name")
}

#[cfg(test)]
mod tests {
    use super::Chosen::{Cpu, Index};
    use super::*;

    fn entry(api: &'static str, name: &str) -> Known {
        let is_software = name.contains("llvmpipe");
        let is_listed = api != "gl";
        Known { name: name.into(), api, is_listed, is_software, is_usable: true }
    }

    fn machine() -> Vec<Known> {
        vec![
            entry("vulkan", "llvmpipe (LLVM 19.1, 256 bits)"),
            entry("vulkan", "NVIDIA GeForce RTX 3060"),
            entry("vulkan", "Intel Graphics, UHD*2"),
            entry("gl", "llvmpipe (LLVM 19.1, 256 bits)"),
        ]
    }

    fn list(typed: &str) -> Result<Vec<Chosen>, String> {
        parse_list(&typed.to_lowercase(), &machine()).map_err(|error| error.to_string())
    }

    #[test]
    fn without_adapters_auto_is_the_cpu_and_names_are_errors() {
        assert!(matches!(select("auto", &[]), Ok(Selection::Cpu { reason: Some(_), .. })));
        let all = select_all("Auto", &[]).unwrap();
        assert!(matches!(all[..], [Selection::Cpu { reason: Some(_), .. }]));
        let all = select_all("all", &[]).unwrap();
        assert!(matches!(all[..], [Selection::Cpu { reason: None, .. }]));
        for cpu in ["cpu", "CPU", " cpu "] {
            assert!(matches!(select(cpu, &[]), Ok(Selection::Cpu { reason: None, .. })));
        }
        let threads = |selector: &str| -> Vec<usize> {
            let threads = |selection| match selection {
                Selection::Cpu { threads, .. } => threads,
                other => panic!("{other:?}"),
            };
            select_all(selector, &[]).unwrap().into_iter().map(threads).collect()
        };
        assert_eq!(threads("cpu"), [host::threads()]);
        assert_eq!(threads("cpu * 3"), [(host::threads() / 3).max(1); 3]);
        assert_eq!(threads("cpu*64"), [(host::threads() / 64).max(1); 64]);
        for error in [select("llvmpipe", &[]).unwrap_err(), select_all("x", &[]).unwrap_err()] {
            assert!(error.to_string().contains("--devices cpu"), "{error}");
        }
    }

    #[test]
    fn one_device_is_no_list() {
        for several in ["a,b", "all", "cpu*2"] {
            let error = select(several, &[]).unwrap_err().to_string();
            assert!(error.contains("this command takes one device"), "{error}");
        }
        assert!(select(" ", &[]).unwrap_err().to_string().contains("empty"));
    }

    #[test]
    fn lists_keep_their_order_and_their_counts() {
        assert_eq!(list("cpu"), Ok(vec![Cpu]));
        assert_eq!(list("cpu, RTX ,0"), Ok(vec![Cpu, Index(1), Index(0)]));
        assert_eq!(list("llvmpipe*2,cpu * 2"), Ok(vec![Index(0), Index(0), Cpu, Cpu]));
        assert_eq!(list("gl:llvmpipe,vulkan:llvmpipe"), Ok(vec![Index(3), Index(0)]));
        assert_eq!(list("3,0"), Ok(vec![Index(3), Index(0)]), "an index finds merged ones too");
    }

    #[test]
    fn the_longest_name_wins_over_cutting_it() {
        assert_eq!(list("llvmpipe (LLVM 19.1, 256 bits)"), Ok(vec![Index(0)]));
        assert_eq!(list("cpu,llvmpipe (LLVM 19.1, 256 bits)*2"), Ok(vec![Cpu, Index(0), Index(0)]));
        // A star within a name is no count.
        assert_eq!(list("uhd*2"), Ok(vec![Index(2)]));
        assert_eq!(list("3060"), Ok(vec![Index(1)]));
        assert_eq!(list("graphics, uhd*2*3,cpu"), Ok(vec![Index(2), Index(2), Index(2), Cpu]));
    }

    #[test]
    fn errors_name_the_part_that_is_wrong() {
        let refused = |typed: &str, parts: &[&str]| {
            let error = list(typed).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{typed}: {error}");
        };
        // Not a part of "LLVM 19.1".
        refused("9", &["no adapter matches '9'", "a number is an index", "\"0,1\""]);
        refused("i", &["it fits 0 llvmpipe", "and 1 NVIDIA", "write the index"]);
        refused("cpu,radeon,0", &["no adapter matches 'radeon'", "1 vulkan:NVIDIA"]);
        refused("cpu,,0", &["'' is not", "empty"]);
        refused("cpu,", &["'' is not", "empty"]);
        refused("cpu*0", &["'cpu*0' is not", "from 1 to 64"]);
        refused("cpu,rtx*65", &["'rtx*65' is not", "from 1 to 64"]);
        refused("rtx*x,cpu", &["'rtx*x' is not", "from 1 to 64"]);
        refused("radeon*2", &["no adapter matches 'radeon'"]);
        for of_framework in ["cuda", "CUDA:1", "mps"] {
            refused(of_framework, &["for every hardware GPU write auto"]);
        }
        assert!(!list("radeon").unwrap_err().contains("write auto"));
        refused("cpu 1", &["'cpu 1' is not", "separated by commas: cpu,1"]);
        refused("uhd, rtx  cpu*2", &["'rtx  cpu*2' is not", "commas: rtx,cpu*2"]);
        refused("rtx 4090", &["no adapter matches 'rtx 4090'"]);
        refused("nvidia 3060", &["no adapter matches 'nvidia 3060'"]);
        refused("cpu,auto", &["'auto' is not", "cannot be part of a list"]);
        refused("all*2,cpu", &["'all' is not", "cannot be part of a list"]);
        refused("cpu,rtx,cpu", &["cpu is in the list twice; write cpu*2 once"]);
        refused("cpu*2,1,cpu*3,cpu", &["cpu is in the list 3 times; write cpu*6 once"]);
        refused("rtx,nvidia*2", &["rtx or nvidia is in the list twice; write rtx*3 once"]);
        refused("uhd*2,cpu,uhd*2*2", &["uhd*2 is in the list twice; write uhd*2*3 once"]);
    }

    #[test]
    fn hardware_is_listed_usable_and_not_software() {
        let mut machine = machine();
        assert_eq!(automatic(&machine), Some(Index(1)));
        machine[1].is_usable = false;
        machine[2].is_listed = false;
        assert_eq!(automatic(&machine), None);
    }
}
