//! Built-in corpus: the project's own sources and documents, so that the first training run needs
//! no download. `build.rs` generates it.

/// All files in the order of their paths, each under a line with its path.
pub const CORPUS: &str = include_str!(concat!(env!("OUT_DIR"), "/corpus.txt"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpus_holds_this_file_and_the_shaders() {
        assert!(CORPUS.contains("==> src/data/corpus.rs <==\n"));
        assert!(CORPUS.contains(include_str!("corpus.rs").replace("\r\n", "\n").as_str()));
        assert!(CORPUS.contains("==> shaders/unary.wgsl <==\n"));
        assert!(CORPUS.len() > 50_000, "{}", CORPUS.len());
        assert!(!CORPUS.contains('\r'));
    }

    #[test]
    fn files_come_in_the_order_of_their_paths() {
        let paths: Vec<&str> = CORPUS
            .lines()
            .filter_map(|line| line.strip_prefix("==> ")?.strip_suffix(" <=="))
            .collect();
        assert!(paths.len() > 20);
        assert!(paths.is_sorted(), "{paths:?}");
    }
}
