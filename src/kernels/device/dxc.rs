//! Microsoft's shader compiler DXC, a library that DirectX 12 does not include: its own compiler,
//! FXC, takes minutes for a tile and refuses barriers in loops that it considers varying.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Name of the library.
const LIBRARY: &str = "dxcompiler.dll";

/// Returns the path of the library, if it is beside the program or on `PATH`.
pub fn library() -> Option<&'static Path> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let program = env::current_exe().ok();
        let directory = program.as_deref().and_then(Path::parent);
        find(directory, env::var_os("PATH").as_deref())
    });
    found.as_deref()
}

/// Returns the library in the directory of the program, or else in the first directory of `path`
/// that has it.
fn find(program: Option<&Path>, path: Option<&OsStr>) -> Option<PathBuf> {
    let mut directories = Vec::new();
    if let Some(program) = program {
        directories.push(program.to_path_buf());
    }
    if let Some(path) = path {
        directories.extend(env::split_paths(path));
    }
    for directory in directories {
        let file = directory.join(LIBRARY);
        if file.is_file() {
            return Some(file);
        }
    }
    None
}

/// Returns the message for a user without the library.
pub fn missing() -> String {
    format!(
        "{LIBRARY} is missing, with which kernels are compiled for DirectX 12: put it beside the \
         program or on PATH, from \
         https://github.com/microsoft/DirectXShaderCompiler/releases (1.8.2502 or later)"
    )
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_library_beside_the_program_comes_before_those_on_the_path() {
        let place = tempfile::tempdir().unwrap();
        let directory = |name: &str, has: bool| {
            let directory = place.path().join(name);
            fs::create_dir(&directory).unwrap();
            if has {
                fs::write(directory.join(LIBRARY), "").unwrap();
            }
            directory
        };
        let (beside, none) = (directory("beside", true), directory("none", false));
        let (first, second) = (directory("first", true), directory("second", true));
        let path = env::join_paths([&none, &first, &second]).unwrap();
        let found = |program: &Path| find(Some(program), Some(&path));
        assert_eq!(found(&beside), Some(beside.join(LIBRARY)));
        assert_eq!(found(&none), Some(first.join(LIBRARY)));
        assert_eq!((find(Some(&none), None), find(None, None)), (None, None));
        fs::create_dir(none.join(LIBRARY)).unwrap();
        assert_eq!(found(&none), Some(first.join(LIBRARY)), "a directory is no library");
    }
}
