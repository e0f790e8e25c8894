//! The image of the Dockerfile in `examples/launch`, built and run without a daemon.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::node_processes::desk;
use crate::process::{Desk, Ran, finish, skip};
use crate::{POTLUCK, command_of, file, program, run};

/// Images from which the Dockerfile starts.
const BUILD_BASE: &str = "docker.io/library/rust:1-bookworm";
const RUN_BASE: &str = "docker.io/library/debian:trixie-slim";

const MIRROR: &str = "http://deb.debian.org/debian";

/// In place of cargo: checks its line and the files that it needs, and gives the program that is
/// built already.
const CARGO: &str = "#!/bin/sh
set -e
test \"$*\" = 'build --release --locked --bin potluck'
test -f Cargo.toml -a -f Cargo.lock -a -f src/main.rs -a -d shaders
if test -e target -o -e .git; then exit 1; fi
install -D /usr/local/bin/built target/release/potluck
";

/// A short run with all devices of the image, by the image's user.
const TRAIN: &str = "id -u && pwd && potluck devices && potluck train --steps 3 --devices all \
    --set model.width=32 --set model.layers=1 --set model.heads=2 --quiet --out run && \
    test -f run/curves.svg && ls /cache";

/// Images and containers of a desk.
struct Images<'a> {
    desk: &'a Desk,
    buildah: &'a Path,
}

impl Images<'_> {
    /// Starts a command of buildah in the project's directory.
    fn command(&self) -> Command {
        let mut command = command_of(self.desk, self.buildah);
        command.current_dir(env!("CARGO_MANIFEST_DIR"));
        command.env("CONTAINERS_STORAGE_CONF", self.desk.path("storage.conf"));
        command.env("CONTAINERS_REGISTRIES_CONF", self.desk.path("registries.conf"));
        command.env("BUILDAH_ISOLATION", "chroot");
        command
    }

    fn run(&self, words: &[&str]) -> Ran {
        let child = self.command().args(words).spawn().unwrap();
        finish(child, &format!("buildah {}", words.join(" "))).ok()
    }

    /// Starts a container, and returns its name.
    fn container(&self, image: &str) -> String {
        self.run(&["from", "--pull-never", image]).out.trim().to_owned()
    }

    /// Commits an image that has the files of a directory besides those of another one.
    fn commit(&self, name: &str, from: &str, files: &Path) {
        let container = self.container(from);
        self.run(&["add", "--quiet", &container, files.to_str().unwrap(), "/"]);
        self.run(&["commit", "--quiet", "--rm", &container, name]);
    }
}

/// Registries of images are not asked: both bases are a Debian of its packages.
#[test]
fn image_of_dockerfile_trains() {
    let (Some(buildah), Some(debootstrap)) = (program("buildah"), program("debootstrap")) else {
        return skip("launchers: there is no buildah or no debootstrap, which make an image");
    };
    let desk = desk();
    let is_root = run(&desk, Path::new("/usr/bin/id"), &["-u"]).out.trim() == "0";
    if !is_root {
        return skip("launchers: an image is made by root only");
    }
    let store = desk.path("store");
    let storage = format!(
        "[storage]\ndriver = 'vfs'\nrunroot = '{0}/run'\ngraphroot = '{0}/root'\n",
        store.display()
    );
    desk.write("storage.conf", storage);
    desk.write("registries.conf", "unqualified-search-registries = []\n");

    let debian = desk.path("debian");
    let words = ["--variant=minbase", "trixie", debian.to_str().unwrap(), MIRROR];
    let made = run(&desk, &debootstrap, &words);
    if made.code() != Some(0) {
        return skip(
            "launchers: debootstrap reaches no mirror, of whose packages an image is made",
        );
    }
    let images = Images { desk: &desk, buildah: &buildah };
    images.commit(RUN_BASE, "scratch", &debian);
    let tools = desk.path("tools/usr/local/bin");
    fs::create_dir_all(&tools).unwrap();
    fs::copy(POTLUCK, tools.join("built")).unwrap();
    desk.write("tools/usr/local/bin/cargo", CARGO);
    run(&desk, Path::new("/bin/chmod"), &["755", tools.join("cargo").to_str().unwrap()]).ok();
    images.commit(BUILD_BASE, RUN_BASE, &desk.path("tools"));

    let (dockerfile, ignored) = (file("Dockerfile"), file("Dockerfile.dockerignore"));
    let files = ["--file", dockerfile.to_str().unwrap(), "--ignorefile", ignored.to_str().unwrap()];
    let build = [&["build", "--pull-never", "--tag", "localhost/potluck"][..], &files, &["."]];
    images.run(&build.concat());
    let container = images.container("localhost/potluck");
    let ran = images.run(&["run", &container, "--", "sh", "-c", TRAIN]);
    assert!(ran.out.starts_with("10001\n/runs\n"), "{}", ran.out);
    assert!(ran.out.contains("llvmpipe"), "{}", ran.out);
    assert!(ran.out.contains("kernels-vulkan-llvmpipe"), "no cache: {}", ran.out);
}
