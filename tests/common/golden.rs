//! Comparison of drawings with golden files in `tests/golden/charts`: `POTLUCK_RENEW_GOLDEN=1`
//! writes them anew, so that the change is seen as one of files.

use std::fs;
use std::path::Path;

/// Asserts that a text is that of a golden file.
pub fn assert_golden(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/charts").join(name);
    if std::env::var_os("POTLUCK_RENEW_GOLDEN").is_some_and(|value| value == "1") {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
    }
    let golden = fs::read_to_string(&path).unwrap_or_default().replace("\r\n", "\n");
    let differing = golden.lines().zip(text.lines()).find(|(golden, drawn)| golden != drawn);
    assert!(
        golden == text,
        "{name} is drawn otherwise than in tests/golden/charts ({differing:?}); if that is meant, \
         run this with POTLUCK_RENEW_GOLDEN=1 and look at the new file"
    );
}
