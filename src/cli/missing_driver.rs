//! Missing driver files if no graphics card is found: the Vulkan loader, the driver's libraries and
//! manifests, and settings that hide them from a container.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Directories of libraries; each system has some of them.
const LIBRARIES: [&str; 9] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/lib",
    "lib64",
    "lib",
];
/// Directories of manifests of Vulkan drivers.
const MANIFESTS: [&str; 4] = [
    "etc/vulkan/icd.d",
    "usr/share/vulkan/icd.d",
    "usr/local/share/vulkan/icd.d",
    "usr/local/etc/vulkan/icd.d",
];
/// Variables that name the only manifests that the loader reads.
const NAMED: [&str; 2] = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"];

/// Returns sentences on the missing files of this machine.
pub fn sentences() -> Vec<String> {
    if !cfg!(target_os = "linux") {
        return vec!["update the driver of the graphics card".into()];
    }
    Surroundings { root: Path::new("/"), environment: environment() }.sentences()
}

/// Variables of this process; invalid UTF-8 is replaced.
fn environment() -> BTreeMap<String, String> {
    let mut environment = BTreeMap::new();
    for (name, value) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        environment.insert(name, value.to_string_lossy().into_owned());
    }
    environment
}

/// Returns sentences on the graphics cards of this machine of which no adapter has the PCI vendor.
/// Only Linux tells them.
pub fn unlisted(vendors: &[u32]) -> Vec<String> {
    if !cfg!(target_os = "linux") {
        return Vec::new();
    }
    Surroundings { root: Path::new("/"), environment: environment() }.unlisted(vendors)
}

/// PCI vendor of NVIDIA's cards.
const NVIDIA: u32 = 0x10de;
/// PCI vendors whose drivers are Mesa's, with their names.
const OF_MESA: [(u32, &str, &str); 2] =
    [(0x1002, "AMD", "radeon_icd"), (0x8086, "Intel", "intel_icd")];

/// File system and environment of the program.
struct Surroundings<'a> {
    root: &'a Path,
    environment: BTreeMap<String, String>,
}

impl Surroundings<'_> {
    fn sentences(&self) -> Vec<String> {
        let mut missing = Vec::new();
        if !self.has_library("libvulkan.so.1") {
            missing.push(
                "the Vulkan loader, libvulkan.so.1, is missing: install libvulkan1 (Debian, \
                 Ubuntu) or vulkan-loader (Fedora, RHEL)"
                    .into(),
            );
        }
        missing.extend(self.named_drivers());
        if self.has_nvidia() {
            self.of_nvidia(&mut missing);
        } else if self.has_render_node() {
            if self.manifests().is_empty() {
                missing.push(
                    "there is a card (/dev/dri), but no manifest of a Vulkan driver in \
                     /usr/share/vulkan/icd.d: install mesa-vulkan-drivers"
                        .into(),
                );
            } else {
                missing.push(
                    "there is a card (/dev/dri): this user may have to be in the group render to \
                     use it, or the driver may be older than the card"
                        .into(),
                );
            }
        } else {
            let how = if self.is_container() {
                "start the container with the card (docker run --gpus all, or --device /dev/dri)"
            } else {
                "the card's kernel driver is not loaded"
            };
            missing.push(format!(
                "no device file of a card is there (/dev/nvidia0, /dev/dri/renderD128): {how}"
            ));
        }
        missing
    }

    /// Sentences on the variables that name the only drivers that load.
    fn named_drivers(&self) -> Vec<String> {
        let mut sentences = Vec::new();
        for name in NAMED {
            if let Some(value) = self.environment.get(name).filter(|value| !value.is_empty()) {
                sentences.push(format!("{name} is set, so that only these drivers load: {value}"));
            }
        }
        sentences
    }

    /// Sentences on the cards of which none of these PCI vendors is.
    fn unlisted(&self, vendors: &[u32]) -> Vec<String> {
        // A container sees the names of the host's cards, which need not be given to it.
        let cards = if self.is_container() { Vec::new() } else { self.pci_vendors() };
        let is_missing = |vendor: u32| cards.contains(&vendor) && !vendors.contains(&vendor);
        let mut sentences = Vec::new();
        if is_missing(NVIDIA) || self.has_nvidia() && !vendors.contains(&NVIDIA) {
            if !self.has_nvidia() {
                sentences.push(
                    "there is an NVIDIA card, but NVIDIA's driver is not loaded: install its \
                     package"
                        .into(),
                );
            } else if vendors.is_empty() {
                sentences.extend(self.sentences());
            } else {
                self.of_nvidia(&mut sentences);
            }
        }
        let mut of_mesa = OF_MESA.to_vec();
        of_mesa.retain(|(vendor, ..)| is_missing(*vendor));
        let named = self.named_drivers();
        if !of_mesa.is_empty() && !named.is_empty() {
            sentences.extend(named);
            return sentences;
        }
        for (_, maker, manifest) in of_mesa {
            let has_driver = self.manifests().iter().any(|name| name.starts_with(manifest));
            let how = if has_driver {
                "its driver is there: this user may have to be in the group render, or the driver \
                 may be older than the card"
            } else {
                "its Vulkan driver is missing: install mesa-vulkan-drivers (vulkan-radeon or \
                 vulkan-intel on Arch)"
            };
            sentences
                .push(format!("there is a graphics card of {maker} that is not listed; {how}"));
        }
        sentences
    }

    /// PCI vendors of the graphics cards.
    fn pci_vendors(&self) -> Vec<u32> {
        let mut vendors = Vec::new();
        for name in self.names("sys/class/drm") {
            let digits = name.strip_prefix("card").unwrap_or_default();
            if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
                continue;
            }
            let file = self.root.join("sys/class/drm").join(&name).join("device/vendor");
            let text = fs::read_to_string(file).unwrap_or_default();
            let digits = text.trim().trim_start_matches("0x");
            vendors.extend(u32::from_str_radix(digits, 16).ok());
        }
        vendors
    }

    /// Adds missing files of an NVIDIA card's driver. CUDA needs fewer of them than Vulkan.
    fn of_nvidia(&self, missing: &mut Vec<String>) {
        if !self.has_library("libGLX_nvidia.so.0") {
            missing.push(
                "there is an NVIDIA card, but its Vulkan driver, libGLX_nvidia.so.0, is missing: \
                 the full driver package has it (libnvidia-gl-VERSION on Ubuntu; neither the \
                 headless packages nor --no-opengl-files)"
                    .into(),
            );
        }
        if !self.manifests().iter().any(|name| name.contains("nvidia")) {
            missing.push(
                "the manifest of NVIDIA's Vulkan driver, nvidia_icd.json, is in neither \
                 /etc/vulkan/icd.d nor /usr/share/vulkan/icd.d: the driver package installs it"
                    .into(),
            );
        }
        let capabilities = self.environment.get("NVIDIA_DRIVER_CAPABILITIES");
        let list = capabilities.map_or("", String::as_str);
        let has_graphics = list.split(',').any(|one| ["all", "graphics"].contains(&one.trim()));
        if self.is_container() && !has_graphics {
            let given = if list.is_empty() { "not set".into() } else { format!("'{list}'") };
            missing.push(format!(
                "this is a container, and NVIDIA_DRIVER_CAPABILITIES is {given}, which leaves \
                 Vulkan out: start it with -e NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics"
            ));
        }
        if missing.is_empty() {
            missing.push(
                "there is an NVIDIA card, and its driver and manifest are there: libraries of X11 \
                 that the driver needs may be missing (apt-get install libx11-6 libxext6), or \
                 VK_LOADER_DEBUG=all potluck devices tells more"
                    .into(),
            );
        }
    }

    fn has_nvidia(&self) -> bool {
        ["dev/nvidia0", "proc/driver/nvidia/version"].iter().any(|file| self.has(file))
    }

    fn has_render_node(&self) -> bool {
        self.names("dev/dri").iter().any(|name| name.starts_with("renderD"))
    }

    fn is_container(&self) -> bool {
        let files = [".dockerenv", "run/.containerenv"];
        let variables = ["container", "KUBERNETES_SERVICE_HOST"];
        files.iter().any(|file| self.has(file))
            || variables.iter().any(|name| self.environment.contains_key(*name))
    }

    fn has(&self, file: &str) -> bool {
        self.root.join(file).exists()
    }

    fn has_library(&self, name: &str) -> bool {
        let mut places = LIBRARIES.to_vec();
        if let Some(paths) = self.environment.get("LD_LIBRARY_PATH") {
            for path in paths.split(':').filter(|path| !path.is_empty()) {
                places.push(path.trim_start_matches('/'));
            }
        }
        places.iter().any(|place| self.root.join(place).join(name).exists())
    }

    /// Names of the manifests of all Vulkan drivers.
    fn manifests(&self) -> Vec<String> {
        let mut names = Vec::new();
        for place in MANIFESTS {
            names.extend(self.names(place));
        }
        names.retain(|name| name.ends_with(".json"));
        names
    }

    /// Names of the files in a directory; none if it cannot be read.
    fn names(&self, place: &str) -> Vec<String> {
        let directory: PathBuf = self.root.join(place);
        let mut names = Vec::new();
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOADER: &str = "usr/lib/x86_64-linux-gnu/libvulkan.so.1";
    const DRIVER: &str = "usr/lib64/libGLX_nvidia.so.0";
    const MANIFEST: &str = "usr/share/vulkan/icd.d/nvidia_icd.json";
    const CARD: &str = "dev/nvidia0";

    /// Machine with these files, each with a text if it is behind a colon.
    fn machine(files: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for file in files {
            let (file, text) = file.split_once(':').unwrap_or((file, ""));
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    /// Sentences of a machine with these files, in this environment.
    fn told(files: &[&str], environment: &[(&str, &str)]) -> String {
        let root = machine(files);
        let pairs = environment.iter().map(|(name, value)| (name.to_string(), value.to_string()));
        let around = Surroundings { root: root.path(), environment: pairs.collect() };
        around.sentences().join("\n")
    }

    #[test]
    fn a_data_centre_machine_is_told_what_its_driver_lacks() {
        let bare = told(&[CARD], &[]);
        for part in ["libvulkan1", "libGLX_nvidia.so.0", "nvidia_icd.json"] {
            assert!(bare.contains(part), "{part} in\n{bare}");
        }
        assert!(!bare.contains("container"), "{bare}");
        let without_manifest = told(&["proc/driver/nvidia/version", LOADER, DRIVER], &[]);
        assert!(without_manifest.starts_with("the manifest of NVIDIA's"), "{without_manifest}");
        let whole = told(&[CARD, LOADER, DRIVER, MANIFEST], &[]);
        assert!(whole.contains("libx11-6") && !whole.contains("missing:"), "{whole}");
        let elsewhere = told(&[CARD, "opt/libvulkan.so.1"], &[("LD_LIBRARY_PATH", "/opt")]);
        assert!(!elsewhere.contains("libvulkan"), "{elsewhere}");
    }

    #[test]
    fn a_container_is_told_its_variable() {
        let files = [CARD, LOADER, DRIVER, MANIFEST, ".dockerenv"];
        let variable = "NVIDIA_DRIVER_CAPABILITIES";
        let text = told(&files, &[(variable, "compute,utility")]);
        assert!(text.contains("is 'compute,utility', which leaves Vulkan out"), "{text}");
        assert!(told(&files, &[]).contains("is not set"), "{text}");
        for given in ["all", "compute, graphics"] {
            let text = told(&files, &[(variable, given)]);
            assert!(!text.contains(variable), "{text}");
        }
        let text = told(&[LOADER, "run/.containerenv"], &[]);
        assert!(text.contains("--gpus all"), "{text}");
    }

    #[test]
    fn other_cards_and_named_drivers_are_told() {
        let text = told(&[LOADER, "dev/dri/renderD128"], &[("VK_DRIVER_FILES", "/a.json")]);
        assert!(text.contains("mesa-vulkan-drivers"), "{text}");
        assert!(text.contains("VK_DRIVER_FILES is set, so that only these drivers"), "{text}");
        let icd = "usr/share/vulkan/icd.d/radeon_icd.json";
        assert!(told(&[LOADER, "dev/dri/renderD128", icd], &[]).contains("group render"));
        assert!(told(&[LOADER], &[]).contains("kernel driver is not loaded"));
    }

    #[test]
    fn cards_without_an_adapter_are_told_by_vendor() {
        let unlisted = |files: &[&str], vendors: &[u32]| {
            let root = machine(files);
            let around = Surroundings { root: root.path(), environment: BTreeMap::new() };
            around.unlisted(vendors).join("\n")
        };
        let amd = "sys/class/drm/card1/device/vendor:0x1002\n";
        let nvidia = "sys/class/drm/card0/device/vendor:0x10de\n";
        let output = "sys/class/drm/card1-HDMI-A-1/device/vendor:0x8086\n";
        let text = unlisted(&[nvidia, amd, output, CARD, LOADER, DRIVER, MANIFEST], &[NVIDIA]);
        assert!(text.contains("card of AMD that is not listed; its Vulkan driver is"), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        let icd = "usr/share/vulkan/icd.d/radeon_icd.x86_64.json";
        assert!(unlisted(&[amd, icd], &[NVIDIA]).contains("group render"));
        let text = unlisted(&[nvidia, amd, LOADER], &[0x1002]);
        assert!(text.contains("NVIDIA's driver is not loaded"), "{text}");
        let text = unlisted(&[nvidia, amd, CARD, LOADER, MANIFEST], &[0x1002]);
        assert!(text.contains("libGLX_nvidia.so.0"), "{text}");
        assert_eq!(unlisted(&[nvidia, amd, CARD], &[0x1002, NVIDIA]), "");
        assert_eq!(unlisted(&[nvidia, amd, ".dockerenv"], &[]), "");
        assert_eq!(unlisted(&[LOADER], &[]), "");
    }
}
