//! Warning of `potluck eval` and `potluck predict` on data that a run was trained on.

use std::path::Path;

use potluck_core::format::{counted, counted_large, grouped, percent, shell_word};
use potluck_data::DataFile;
use potluck_train::spec::DataSource;

/// Beginnings of the names that formats have for held-out files and directories.
const HELD_OUT: [&str; 3] = ["val", "test", "t10k"];

/// Data that are given to a command besides the run's.
pub(super) struct GivenData<'a> {
    /// Path of the run, as it was typed.
    pub run: &'a Path,
    /// Files of the run, as its checkpoint has them.
    pub of_run: &'a [DataFile],
    /// Data of the run, and the share of them that it held out.
    pub source: &'a DataSource,
    pub held_out: f64,
    pub files: Vec<DataFile>,
    /// Samples of these files; `None` for texts and tokens.
    pub samples: Option<u64>,
}

impl GivenData<'_> {
    /// Returns a warning if the run was trained on the data, or on a part of them.
    pub fn warning(self) -> Option<String> {
        let Self { run, of_run, source, held_out, files, samples } = self;
        let files = DataFile::recorded(files);
        let known: Vec<&DataFile> = files
            .iter()
            .filter(|file| of_run.iter().any(|one| one.blake3 == file.blake3))
            .collect();
        if known.iter().all(|file| is_held_out(file, source)) {
            return None;
        }
        let is_whole = known.len() == files.len();
        // A set of its own that is held out is not a part of these files.
        let has_own = files.len() < of_run.len();
        let part = if has_own { 0.0 } else { held_out };
        let (trained, rest) = match samples {
            _ if !is_whole => {
                let all = counted(files.len(), "file", "files");
                (format!("{} of these {all}", known.len()), "what was held out".into())
            }
            _ if part == 0.0 => ("these data".into(), "what was held out".into()),
            Some(samples) => {
                let rest = (part * samples as f64) as u64;
                let all = counted_large(samples, "sample", "samples");
                let text = format!("{} of these {all}", grouped(&(samples - rest).to_string()));
                (text, format!("the {} that were held out", grouped(&rest.to_string())))
            }
            None => {
                let text = format!("{} of these data", percent(1.0 - part, 0));
                (text, "the rest, which was held out".into())
            }
        };
        let mut warning = format!("the run was trained on {trained}");
        if held_out > 0.0 || has_own {
            let run = shell_word(&run.to_string_lossy());
            warning += &format!("; `potluck eval {run}` measures on {rest}");
        }
        Some(warning)
    }
}

/// Returns true if a file of a run is one that was held out as a whole, by its name.
fn is_held_out(file: &DataFile, source: &DataSource) -> bool {
    let DataSource::Samples { val_path, .. } = source else { return false };
    let mut names = file.name.split('/');
    match val_path.as_deref().and_then(Path::file_name) {
        Some(held_out) => names.any(|name| *name == *held_out),
        None => names.any(|name| HELD_OUT.iter().any(|held_out| name.starts_with(held_out))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_data::SampleFormat;

    fn warning(
        of_run: &[&str],
        given: &[&str],
        samples: Option<u64>,
        (source, held_out): (&DataSource, f64),
    ) -> Option<String> {
        let files = |names: &[&str]| -> Vec<DataFile> {
            names.iter().map(|name| DataFile::of(name, name.as_bytes())).collect()
        };
        let (run, of_run, files) = (Path::new("runs/a b"), &files(of_run), files(given));
        GivenData { run, of_run, source, held_out, files, samples }.warning()
    }

    fn table(val_path: Option<&str>) -> DataSource {
        let val_path = val_path.map(Into::into);
        DataSource::Samples { format: SampleFormat::Csv, path: "t.csv".into(), val_path }
    }

    #[test]
    fn data_that_a_run_was_trained_on_are_told() {
        let table = table(None);
        let told = |given: &[&str]| warning(&["t.csv"], given, Some(10_000), (&table, 0.2));
        assert_eq!(
            told(&["t.csv"]).unwrap(),
            "the run was trained on 8,000 of these 10,000 samples; `potluck eval 'runs/a b'` \
             measures on the 2,000 that were held out"
        );
        assert_eq!(told(&["new.csv"]), None);
        let part = told(&["t.csv", "new.csv"]).unwrap();
        assert!(part.starts_with("the run was trained on 1 of these 2 files; "), "{part}");
        let whole = warning(&["t.csv"], &["t.csv"], Some(9), (&table, 0.0));
        assert_eq!(whole.unwrap(), "the run was trained on these data");
        let text = DataSource::Text("a.txt".into());
        let told = warning(&["a.txt"], &["a.txt"], None, (&text, 0.2)).unwrap();
        assert!(told.starts_with("the run was trained on 80 % of these data; "), "{told}");
    }

    #[test]
    fn files_that_were_held_out_are_not_told() {
        let of_run = ["train-images", "t10k-images"];
        let of_one =
            |given: usize| warning(&of_run, &of_run[given..=given], Some(9), (&table(None), 0.2));
        assert_eq!(of_one(1), None);
        let trained = of_one(0).unwrap();
        assert!(trained.starts_with("the run was trained on these data; "), "{trained}");
        let two = table(Some("data/late.csv"));
        let of_two = |given: &str| warning(&["t.csv", "late.csv"], &[given], Some(9), (&two, 0.2));
        assert!(of_two("late.csv").is_none() && of_two("t.csv").is_some());
    }
}
