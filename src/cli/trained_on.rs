//! Warning of `potluck eval` and `potluck predict` on data that a run was trained on.

use std::path::Path;

use potluck_core::format::{counted, counted_large, grouped, percent, shell_word};
use potluck_data::{DataFile, FileRole};
use potluck_train::spec::DataSource;

/// Data that are given to a command beside those of the run.
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
    pub fn warning(&self) -> Option<String> {
        let mut files = 0;
        let mut known = 0;
        for file in DataFile::recorded(self.files.clone()) {
            if file.role == Some(FileRole::Labels) {
                continue;
            }
            files += 1;
            let mut training = self.of_run.iter().filter(|one| self.is_of_training(one));
            if training.any(|one| one.blake3 == file.blake3) {
                known += 1;
            }
        }
        if known == 0 {
            return None;
        }
        let has_own = self.has_held_out_set();
        let trained;
        let mut rest = "what was held out".to_string();
        if known < files {
            trained = format!("{known} of these {}", counted(files, "file", "files"));
        } else if has_own || self.held_out == 0.0 {
            trained = "these data".to_string();
        } else if let Some(samples) = self.samples
            && self.is_whole_of_run(known)
        {
            let of_rest = (self.held_out * samples as f64) as u64;
            let of_training = grouped(&(samples - of_rest).to_string());
            let all = counted_large(samples, "sample", "samples");
            trained = format!("{of_training} of these {all}");
            rest = format!("the {} that were held out", grouped(&of_rest.to_string()));
        } else {
            trained = format!("{} of these data", percent(1.0 - self.held_out, 0));
            rest = "the rest, which was held out".to_string();
        }
        let mut warning = format!("the run was trained on {trained}");
        if has_own || self.held_out > 0.0 {
            let run = shell_word(&self.run.to_string_lossy());
            warning += &format!("; `potluck eval {run}` measures on {rest}");
        }
        Some(warning)
    }

    /// Returns true for a file of the run whose samples it was trained on. Of the files that an
    /// earlier version recorded, that is known of the only one of a run.
    fn is_of_training(&self, file: &DataFile) -> bool {
        match file.role {
            Some(role) => role == FileRole::Training,
            None => self.of_run.len() == 1,
        }
    }

    /// Returns true if the run has files with held-out samples, so that it was trained on all
    /// samples of the others.
    fn has_held_out_set(&self) -> bool {
        if let DataSource::Samples { val_path: Some(_), .. } = self.source {
            return true;
        }
        self.of_run.iter().any(|file| file.role == Some(FileRole::HeldOut))
    }

    /// Returns true if so many files are all that the run was trained on. It has held out a known
    /// number of samples of all of them together.
    fn is_whole_of_run(&self, files: usize) -> bool {
        self.of_run.iter().filter(|file| self.is_of_training(file)).count() == files
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use potluck_data::SampleFormat;

    use FileRole::{HeldOut, Labels, Training};

    /// File whose content is its name.
    fn file(name: &str, role: Option<FileRole>) -> DataFile {
        DataFile { role, ..DataFile::of(name, name.as_bytes()) }
    }

    fn table(val_path: Option<&str>) -> DataSource {
        let val_path = val_path.map(Into::into);
        DataSource::Samples { format: SampleFormat::Csv, path: "t.csv".into(), val_path }
    }

    /// Run that is asked about files.
    struct Known {
        of_run: Vec<DataFile>,
        source: DataSource,
        held_out: f64,
        samples: Option<u64>,
    }

    impl Known {
        fn new(of_run: &[(&str, FileRole)]) -> Self {
            let of_run = of_run.iter().map(|(name, role)| file(name, Some(*role))).collect();
            Self { of_run, source: table(None), held_out: 0.2, samples: Some(10_000) }
        }

        fn told(&self, files: Vec<DataFile>) -> Option<String> {
            let given = GivenData {
                run: Path::new("runs/a b"),
                of_run: &self.of_run,
                source: &self.source,
                held_out: self.held_out,
                files,
                samples: self.samples,
            };
            given.warning()
        }

        /// Returns the warning on files with samples.
        fn of(&self, given: &[&str]) -> Option<String> {
            self.told(given.iter().map(|name| file(name, None)).collect())
        }
    }

    #[test]
    fn data_that_a_run_was_trained_on_are_told() {
        let mut run = Known::new(&[("test.csv", Training)]);
        assert_eq!(
            run.of(&["test.csv"]).unwrap(),
            "the run was trained on 8,000 of these 10,000 samples; `potluck eval 'runs/a b'` \
             measures on the 2,000 that were held out"
        );
        assert_eq!(run.of(&["new.csv"]), None);
        let part = run.of(&["test.csv", "new.csv"]).unwrap();
        assert!(part.starts_with("the run was trained on 1 of these 2 files; "), "{part}");
        run.samples = None;
        let text = run.of(&["test.csv"]).unwrap();
        assert!(text.starts_with("the run was trained on 80 % of these data; "), "{text}");
        let pictures = Known::new(&[("valve/1.png", Training), ("tap/1.png", Training)]);
        let valves = pictures.of(&["valve/1.png"]).unwrap();
        assert!(valves.starts_with("the run was trained on 80 % of these data; "), "{valves}");
    }

    #[test]
    fn a_run_that_held_nothing_out_measures_on_nothing() {
        let mut run = Known::new(&[("t.csv", Training)]);
        run.held_out = 0.0;
        assert_eq!(run.of(&["t.csv"]).unwrap(), "the run was trained on these data");
        let part = run.of(&["t.csv", "new.csv"]).unwrap();
        assert_eq!(part, "the run was trained on 1 of these 2 files");
    }

    #[test]
    fn held_out_files_are_not_told_and_training_ones_are() {
        let run = Known::new(&[
            ("batches.meta.txt", Labels),
            ("data_batch_1.bin", Training),
            ("test_batch.bin", HeldOut),
        ]);
        let names = file("batches.meta.txt", Some(Labels));
        assert_eq!(run.told(vec![names.clone(), file("test_batch.bin", None)]), None);
        let told = run.told(vec![names, file("data_batch_1.bin", None)]).unwrap();
        assert_eq!(
            told,
            "the run was trained on these data; `potluck eval 'runs/a b'` measures on what was \
             held out"
        );
        // Names of the set that is evaluated are relative to another directory.
        let mut of_two = Known::new(&[("data.csv", Training)]);
        of_two.of_run.push(DataFile { name: "two/data.csv".into(), ..file("late", Some(HeldOut)) });
        of_two.source = table(Some("two/data.csv"));
        assert_eq!(of_two.of(&["late"]), None);
        let one = of_two.of(&["data.csv"]).unwrap();
        assert!(one.starts_with("the run was trained on these data; "), "{one}");
    }

    #[test]
    fn of_files_without_a_role_a_single_one_was_trained_on() {
        let mut run = Known::new(&[]);
        run.of_run.push(file("t.csv", None));
        assert!(run.of(&["t.csv"]).unwrap().contains("8,000 of these 10,000 samples"));
        run.of_run.push(file("labels", None));
        assert_eq!(run.of(&["t.csv"]), None);
    }
}
