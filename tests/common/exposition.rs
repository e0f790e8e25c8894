//! Reader of the text format of Prometheus, version 0.0.4, that takes nothing else: also what
//! Prometheus itself puts up with, such as a metric without help, is an error.
#![allow(dead_code, reason = "each test binary uses a part of this file")]

use std::collections::{BTreeMap, BTreeSet};

/// Sample: its name, its labels in their order, its value.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub name: String,
    pub labels: Vec<(String, String)>,
    pub value: f64,
}

/// Reads all samples of a text, and checks it as a whole: each metric has one line of help, one of
/// its type, then all of its samples, each with labels of its own; names, units and types are those
/// of the conventions.
pub fn parse(text: &str) -> Result<Vec<Sample>, String> {
    let Some(lines) = text.strip_suffix('\n') else { return Err("no line feed at the end".into()) };
    let mut samples: Vec<Sample> = Vec::new();
    let (mut metrics, mut series) = (BTreeSet::new(), BTreeSet::new());
    let mut help: Option<String> = None;
    let mut metric: Option<(String, String, usize)> = None;
    for line in lines.split('\n') {
        let wrong = |why: &str| format!("{why}: {line}");
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, text) = rest.split_once(' ').ok_or_else(|| wrong("no help"))?;
            if let Some((before, _, 0)) = &metric {
                return Err(format!("{before} has no sample"));
            }
            check_name(name, ":").map_err(|why| wrong(&why))?;
            if text.trim() != text || text.is_empty() || text.contains('\\') {
                return Err(wrong("a help that is none"));
            }
            if !metrics.insert(name.to_string()) {
                return Err(wrong("a metric that was there before"));
            }
            help = Some(name.into());
            metric = None;
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').ok_or_else(|| wrong("no type"))?;
            if help.take().as_deref() != Some(name) {
                return Err(wrong("a type without its help before it"));
            }
            let is_counter = match kind {
                "counter" => true,
                "gauge" => false,
                _ => return Err(wrong("a type that is none")),
            };
            if is_counter != name.ends_with("_total") {
                return Err(wrong("_total is the end of counters, and of nothing else"));
            }
            metric = Some((name.into(), kind.into(), 0));
        } else {
            let sample = sample(line).map_err(|why| wrong(&why))?;
            let Some((name, kind, count)) = &mut metric else {
                return Err(wrong("a sample without its type before it"));
            };
            if *name != sample.name {
                return Err(wrong("a sample of another metric"));
            }
            if kind == "counter" && !(sample.value >= 0.0 && sample.value.is_finite()) {
                return Err(wrong("a counter that is no number from 0 on"));
            }
            let mut labels = sample.labels.clone();
            labels.sort();
            if !series.insert((sample.name.clone(), labels)) {
                return Err(wrong("a series that was there before"));
            }
            *count += 1;
            samples.push(sample);
        }
    }
    match (help, metric) {
        (Some(name), _) | (None, Some((name, _, 0))) => Err(format!("{name} has no sample")),
        _ => Ok(samples),
    }
}

/// Reads a text and returns its samples without labels by their name, and all others by name and
/// the value of their first label.
pub fn values(text: &str) -> BTreeMap<String, f64> {
    let samples = parse(text).unwrap_or_else(|why| panic!("{why}\n\n{text}"));
    let named = |sample: Sample| match sample.labels.first() {
        Some((_, value)) => (format!("{} {value}", sample.name), sample.value),
        None => (sample.name, sample.value),
    };
    samples.into_iter().map(named).collect()
}

fn check_name(name: &str, more: &str) -> Result<(), String> {
    let is_letter = |c: char| c.is_ascii_alphabetic() || c == '_' || more.contains(c);
    let mut letters = name.chars();
    let is_right = letters.next().is_some_and(is_letter)
        && letters.all(|c| is_letter(c) || c.is_ascii_digit());
    if is_right && !name.starts_with("__") { Ok(()) } else { Err(format!("the name '{name}'")) }
}

fn sample(line: &str) -> Result<Sample, String> {
    let end = line.find(['{', ' ']).ok_or("no value")?;
    let name = &line[..end];
    check_name(name, ":")?;
    let mut rest = &line[end..];
    let mut labels = Vec::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        loop {
            let (label, after) = rest.split_once("=\"").ok_or("a label without a value")?;
            check_name(label, "")?;
            if labels.iter().any(|(before, _)| before == label) {
                return Err(format!("the label {label} is there twice"));
            }
            let (value, after) = quoted(after)?;
            labels.push((label.to_string(), value));
            match (after.strip_prefix(','), after.strip_prefix('}')) {
                (Some(more), _) => rest = more,
                (_, Some(behind)) => {
                    rest = behind;
                    break;
                }
                _ => return Err("neither another label nor the end of them".into()),
            }
        }
    }
    let text = rest.strip_prefix(' ').ok_or("no blank in front of the value")?;
    let value = match text {
        "NaN" => f64::NAN,
        "+Inf" => f64::INFINITY,
        "-Inf" => f64::NEG_INFINITY,
        digits => {
            let is_number = digits.bytes().all(|b| b.is_ascii_digit() || b".e-+".contains(&b));
            let parsed = digits.parse().ok().filter(|_| is_number);
            parsed.ok_or_else(|| format!("the value '{digits}'"))?
        }
    };
    Ok(Sample { name: name.into(), labels, value })
}

/// Reads a value up to the quotation mark at its end, and returns what follows.
fn quoted(text: &str) -> Result<(String, &str), String> {
    let mut value = String::new();
    let mut letters = text.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return Ok((value, &text[at + 1..])),
            '\\' => value.push(match letters.next() {
                Some((_, 'n')) => '\n',
                Some((_, escaped @ ('\\' | '"'))) => escaped,
                _ => return Err("an escape that is none".into()),
            }),
            other => value.push(other),
        }
    }
    Err("a value without an end".into())
}

#[test]
fn texts_that_are_not_of_the_format_are_refused() {
    let right = "# HELP a_total A thing.\n# TYPE a_total counter\n\
                 a_total{b=\"c\\\"\\n\",d=\"\"} 1e3\n\
                 a_total 2\n# HELP b Another.\n# TYPE b gauge\nb NaN\n";
    let samples = parse(right).unwrap();
    assert_eq!(samples[0].labels[0], ("b".into(), "c\"\n".into()));
    assert_eq!((samples[0].value, samples.len()), (1000.0, 3));
    for (from, to) in [
        ("A thing.", ""),
        ("# HELP b Another.\n", ""),
        ("# TYPE b gauge\n", ""),
        ("b gauge", "b counter"),
        ("b gauge", "b untyped"),
        ("a_total counter", "a_total gauge"),
        ("a_total 2", "a_total{d=\"\",b=\"c\\\"\\n\"} 2"),
        ("a_total 2", "a_total -2"),
        ("a_total 2", "a_total two"),
        ("a_total 2", "a_total  2"),
        ("a_total 2", "other 2"),
        ("b NaN\n", "b NaN"),
        ("b NaN\n", ""),
        ("b NaN\n", "b NaN\n\n"),
        ("\\n\"", "\\t\""),
        ("\",d", "\" ,d"),
        ("d=\"\"", "b=\"\""),
        ("b Another", "a_total Another"),
    ] {
        let wrong = right.replacen(from, to, 1);
        assert_ne!(wrong, right);
        assert!(parse(&wrong).is_err(), "{wrong}");
    }
}
