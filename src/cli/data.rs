//! `potluck data prepare`: texts become token files.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::args::{DataCommand, PrepareArgs};
use super::{UsageError, print};
use crate::ui::terminal::{moves_cursor, print_line};
use potluck_core::files;
use potluck_core::format::{clock, counted, counted_large, grouped, shell_word};
use potluck_data::tokenizer::TOKENIZER;
use potluck_data::{PrepareOptions, PrepareProgress, Prepared, TokenizerFile, prepare};
use potluck_train::TrainError;
use potluck_train::hugging_face::located;

/// Time between progress lines on a terminal, where they replace each other, and elsewhere.
const INTERVALS: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(10)];

/// Runs `potluck data`.
pub fn run(command: &DataCommand) -> anyhow::Result<()> {
    match command {
        DataCommand::Prepare(args) => run_prepare(args),
    }
}

fn run_prepare(args: &PrepareArgs) -> anyhow::Result<()> {
    let path = tokenizer_path(&args.tokenizer)?;
    let tokenizer = TokenizerFile::load(&path).map_err(TrainError::from)?;
    let end_token = match args.end_token.as_deref() {
        Some("none") => None,
        Some(name) => match tokenizer.id_of(name) {
            Some(id) => Some(id),
            None => {
                return Err(usage(format!(
                    "--end-token {name}: is no token of {}",
                    path.display()
                )));
            }
        },
        None => match tokenizer.end_token(files::parent(&path)).map_err(TrainError::from)? {
            Some(id) => Some(id),
            None => {
                return Err(usage(format!(
                    "{}: it is not known which token ends a document; name it with --end-token \
                     TOKEN, or none",
                    path.display()
                )));
            }
        },
    };
    let end = match end_token {
        Some(id) => format!("documents end with the token {} ({id})", tokenizer.decode(&[id])),
        None => "no token ends documents".into(),
    };
    let options = PrepareOptions {
        inputs: args.inputs.clone(),
        tokenizer,
        end_token,
        key: args.key.clone(),
        allow_special: args.allow_special,
        out: args.out.clone(),
        plain: false,
        wait: false,
    };
    let mut meter = Meter::new(args.quiet);
    let prepared = prepare(&options, &mut |progress| meter.show(progress));
    meter.end();
    let prepared = prepared.map_err(TrainError::from)?;
    report(&prepared, &end, &args.out);
    Ok(())
}

/// Returns the path of the tokenizer of a name: a file, the directory of a model, or a model in the
/// cache of `hf download`.
fn tokenizer_path(named: &Path) -> anyhow::Result<PathBuf> {
    if named.is_file() {
        return Ok(named.into());
    }
    if named.is_dir() {
        return Ok(named.join(TOKENIZER));
    }
    let name = named.to_string_lossy();
    let directory = located(&name).map_err(|why| {
        usage(format!("--tokenizer {name}: is no tokenizer.json and no directory with one ({why})"))
    })?;
    Ok(directory.join(TOKENIZER))
}

fn usage(why: String) -> anyhow::Error {
    UsageError(why).into()
}

fn report(prepared: &Prepared, end: &str, out: &Path) {
    let Prepared { path, tokens, documents, vocabulary, before, left_out } = prepared;
    let count = |count: u64| grouped(&count.to_string());
    if before == tokens {
        print_line("the tokens were already prepared");
    } else if *before > 0 {
        print_line(&format!("resumed after {}", counted_large(*before, "token", "tokens")));
    }

    if *left_out > 0 {
        let files = counted(*left_out, "file of another format", "files of other formats");
        print_line(&format!("note: skipped {files}; name texts with other endings one by one"));
    }
    let documents = counted_large(*documents, "document", "documents");
    print(&format!(
        "{} of {documents}, vocabulary {}, in {}; {end}\n\
         train on them with: potluck train --data {}\n",
        counted_large(*tokens, "token", "tokens"),
        count(*vocabulary as u64),
        path.display(),
        shell_word(&out.to_string_lossy())
    ));
}

/// Line of the progress on stderr.
struct Meter {
    is_quiet: bool,
    is_terminal: bool,
    started: Instant,
    /// Bytes that were read before this start.
    first: Option<u64>,
    shown: Option<Instant>,
    /// Characters of the shown line, which the next one overwrites.
    width: usize,
}

impl Meter {
    fn new(is_quiet: bool) -> Self {
        let is_terminal = moves_cursor();
        Self { is_quiet, is_terminal, started: Instant::now(), first: None, shown: None, width: 0 }
    }

    fn show(&mut self, progress: PrepareProgress) {
        let first = *self.first.get_or_insert(progress.bytes);
        let interval = INTERVALS[usize::from(!self.is_terminal)];
        let since = self.shown.unwrap_or(self.started);
        if self.is_quiet || since.elapsed() < interval {
            return;
        }
        self.shown = Some(Instant::now());
        let seconds = self.started.elapsed().as_secs_f64();
        let rate = (progress.bytes - first) as f64 / seconds;
        let left = (progress.total - progress.bytes) as f64 / rate.max(1.0);
        let [read, total] = [progress.bytes, progress.total]
            .map(|bytes| grouped(&format!("{:.0}", bytes as f64 / 1e6)));
        let text = format!(
            "{read} of {total} MB, {:.1} MB/s, {} tokens, eta {}",
            rate / 1e6,
            grouped(&progress.tokens.to_string()),
            clock(left)
        );
        if self.is_terminal {
            // A closed terminal does not end the preparation.
            let _ = write!(io::stderr(), "\r{text:width$}", width = self.width);
            self.width = text.len();
        } else {
            print_line(&text);
        }
    }

    fn end(&self) {
        if self.is_terminal && self.shown.is_some() {
            let _ = writeln!(io::stderr());
        }
    }
}
