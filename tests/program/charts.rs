//! Charts of a run: its curves as a drawing, and event files of TensorBoard, which are read here
//! and by TensorBoard's own reader, for whoever has it: `POTLUCK_TENSORBOARD_PYTHON` names a Python
//! with the package `tensorboard`.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crc::{CRC_32_ISCSI, Crc};
use serde_json::Value;

use crate::process::{Desk, finish, skip};

/// Settings of the runs: evaluations at steps 4, 8 and so on, and a checkpoint each.
const EVERY: &str = "--out run --quiet --eval-every 4 --set checkpoint_every=4 \
                     --set checkpoint_keep=9 --set sample_tokens=0";

/// Event of an event file, as far as runs write any.
#[derive(Clone, Debug, Default, PartialEq)]
struct Read {
    wall_time_s: f64,
    step: u64,
    version: Option<String>,
    is_start: bool,
    scalars: Vec<(String, f32)>,
}

/// Returns the drawing of a run.
fn drawing(desk: &Desk) -> String {
    fs::read_to_string(desk.path("run/curves.svg")).unwrap()
}

/// Returns the numbers of points of the lines of a colour.
fn lines(svg: &str, color: &str) -> Vec<usize> {
    let begins = |line: &&str| line.starts_with("<polyline") && line.contains(color);
    let points = |line: &str| {
        line.split("points=\"")
            .nth(1)
            .unwrap()
            .split('"')
            .next()
            .unwrap()
            .split_whitespace()
            .count()
    };
    svg.lines().filter(begins).map(points).collect()
}

#[test]
fn curves_resumed_begin_at_first_step() {
    let (desk, [blue, orange, purple]) = (Desk::new(), ["#0072B2", "#D55E00", "#CC79A7"]);
    desk.train(&format!("{EVERY} --steps 12")).ok();
    let first = drawing(&desk);
    for label in ["training loss ", "val_loss ", "learning rate ", "steps", "run", "12"] {
        assert!(first.lines().any(|line| line.starts_with(label)), "{label} is not in {first}");
    }
    let all = |svg: &str| [blue, orange, purple].map(|color| lines(svg, color));
    assert_eq!(all(&first), [vec![12], vec![3], vec![12]]);
    desk.resume("run", "--steps 20 --quiet").ok();
    assert_eq!(all(&drawing(&desk)), [vec![20], vec![5], vec![20]]);
    // From an earlier step on, the later points are those of the new course.
    desk.resume("run/checkpoints/step-00000008", "--steps 10 --quiet --lr 1e-4").ok();
    assert_eq!(all(&drawing(&desk)), [vec![10], vec![3], vec![10]]);
    assert!(!desk.path("run/tensorboard").exists(), "event files are written if asked for only");
}

#[test]
fn curves_unwritable_end_no_run() {
    let desk = Desk::new();
    fs::create_dir_all(desk.path("run/curves.svg")).unwrap();
    desk.write("run/tensorboard", "a file");
    let ran = desk.train(&format!("{EVERY} --steps 4 --set tensorboard=true")).ok();
    assert!(!ran.lines("warning: run/curves.svg: cannot be written").is_empty(), "{}", ran.err);
    ran.line("warning: run/tensorboard: cannot be written");
    assert_eq!(desk.losses("run").len(), 4);
}

/// Returns the event files of a run in the order of their names.
fn event_files(desk: &Desk) -> Vec<PathBuf> {
    let names = desk.files().into_iter().filter(|name| name.starts_with("run/tensorboard/"));
    let names: Vec<String> = names.collect();
    let is_known = |name: &String| name.starts_with("run/tensorboard/events.out.tfevents.");
    assert!(names.iter().all(is_known), "{names:?}");
    names.iter().map(|name| desk.path(name)).collect()
}

/// Parses the records of a file, and checks the lengths and the checksums.
fn records(bytes: &[u8]) -> Vec<&[u8]> {
    let crc = Crc::<u32>::new(&CRC_32_ISCSI);
    let mask = |sum: u32| sum.rotate_right(15).wrapping_add(0xa282_ead8);
    let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
    let (mut rest, mut records) = (bytes, Vec::new());
    while !rest.is_empty() {
        let (length, body) = rest.split_at(8);
        assert_eq!(number(&body[..4]), mask(crc.checksum(length)));
        let (data, end) =
            body[4..].split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
        assert_eq!(number(&end[..4]), mask(crc.checksum(data)));
        records.push(data);
        rest = &end[4..];
    }
    records
}

/// Parses the fields of a message: number and bytes, those of a number in little-endian order.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Vec<u8>)> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let length = 1 + bytes.iter().position(|byte| byte & 0x80 == 0).unwrap();
        let (number, rest) = bytes.split_at(length);
        *bytes = rest;
        number.iter().rev().fold(0, |value, byte| value << 7 | u64::from(byte & 0x7f))
    }
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let length = match key & 7 {
            0 => {
                fields.push((key >> 3, varint(&mut bytes).to_le_bytes().to_vec()));
                continue;
            }
            1 => 8,
            2 => varint(&mut bytes) as usize,
            5 => 4,
            other => panic!("wire type {other}"),
        };
        let (value, rest) = bytes.split_at(length);
        fields.push((key >> 3, value.to_vec()));
        bytes = rest;
    }
    fields
}

fn event(bytes: &[u8]) -> Read {
    let mut event = Read::default();
    for (field, value) in fields(bytes) {
        match field {
            1 => event.wall_time_s = f64::from_le_bytes(value.try_into().unwrap()),
            2 => event.step = u64::from_le_bytes(value.try_into().unwrap()),
            3 => event.version = Some(String::from_utf8(value).unwrap()),
            5 => event.scalars = fields(&value).iter().map(|(_, value)| scalar(value)).collect(),
            7 => event.is_start = fields(&value)[0] == (1, 1u64.to_le_bytes().to_vec()),
            other => panic!("field {other}"),
        }
    }
    event
}

fn scalar(bytes: &[u8]) -> (String, f32) {
    match &fields(bytes)[..] {
        [(1, tag), (2, value)] => {
            let value = f32::from_le_bytes(value[..].try_into().unwrap());
            (String::from_utf8(tag.clone()).unwrap(), value)
        }
        other => panic!("{other:?}"),
    }
}

/// Returns the scalars that a run has by its record, by tag: steps and values.
fn recorded(desk: &Desk) -> BTreeMap<String, Vec<(u64, f32)>> {
    let tags = [
        ("loss", "train/loss"),
        ("lr", "train/lr"),
        ("grad_norm", "train/grad_norm"),
        ("tokens_per_s", "throughput/tokens_per_s"),
        ("val_loss", "val/loss"),
    ];
    let mut scalars: BTreeMap<String, Vec<(u64, f32)>> = BTreeMap::new();
    for line in desk.metrics("run") {
        for (key, tag) in tags {
            let Some(value) = line.get(key).and_then(Value::as_f64) else { continue };
            let step = line["step"].as_u64().unwrap();
            scalars.entry(tag.into()).or_default().push((step, value as f32));
        }
    }
    scalars
}

#[test]
fn event_files_have_scalars_of_record() {
    let desk = Desk::new();
    desk.train(&format!("{EVERY} --steps 8 --set tensorboard=true")).ok();
    let mut expected = recorded(&desk);
    desk.resume("run/checkpoints/step-00000004", "--steps 6 --quiet").ok();
    let files = event_files(&desk);
    assert_eq!(files.len(), 2);
    for (file, first) in files.iter().zip([0, 5]) {
        let bytes = fs::read(file).unwrap();
        let events: Vec<Read> = records(&bytes).into_iter().map(event).collect();
        assert_eq!(events[0].version.as_deref(), Some("brain.Event:2"));
        assert!(events[1].is_start && events[1].step == first, "{:?}", events[1]);
        assert!(events.is_sorted_by(|a, b| a.wall_time_s <= b.wall_time_s));
        let since = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs_f64() - events[0].wall_time_s;
        assert!((0.0..600.0).contains(&since), "{since} s");
        let mut found: BTreeMap<String, Vec<(u64, f32)>> = BTreeMap::new();
        for event in &events {
            for (tag, value) in &event.scalars {
                found.entry(tag.clone()).or_default().push((event.step, *value));
            }
        }
        assert_eq!(found, expected);
        expected = recorded(&desk);
        for points in expected.values_mut() {
            points.retain(|(step, _)| *step > 4);
        }
    }
}

/// Prints the scalars of a directory as TensorBoard has them: a line per point.
const READER: &str = "
import sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={'scalars': 0}).Reload()
for tag in events.Tags()['scalars']:
    for point in events.Scalars(tag):
        print(tag, point.step, repr(point.value))
";

#[test]
fn event_files_resumed_read_by_tensorboard() {
    let Some(python) = std::env::var_os("POTLUCK_TENSORBOARD_PYTHON") else {
        return skip("POTLUCK_TENSORBOARD_PYTHON names no Python with tensorboard");
    };
    let desk = Desk::new();
    desk.train(&format!("{EVERY} --steps 12 --set tensorboard=true")).ok();
    for line in ["run --steps 16", "run/checkpoints/step-00000004 --steps 6 --lr 1e-3"] {
        desk.run(&format!("train --devices cpu --quiet --resume {line}")).ok();
    }
    assert_eq!(event_files(&desk).len(), 3);
    let mut reader = Command::new(python);
    reader.args(["-c", READER]).arg(desk.path("run/tensorboard"));
    reader.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let ran = finish(reader.spawn().unwrap(), "TensorBoard's reader").ok();
    let mut found: BTreeMap<String, Vec<(u64, f32)>> = BTreeMap::new();
    for line in ran.out.lines() {
        let [tag, step, value] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let point = (step.parse().unwrap(), value.parse().unwrap());
        found.entry(tag.into()).or_default().push(point);
    }
    let expected = recorded(&desk);
    assert_eq!(expected["train/loss"].len(), 6);
    assert_eq!(found, expected);
}
