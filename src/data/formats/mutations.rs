//! Each reader under 100,000 damaged files: it returns samples or an error, within the time of a
//! test, and holds no more memory than the bytes of the file justify.

use image::{GrayImage, ImageFormat, RgbImage};

use super::Targets;
use super::csv::TableTargets;
use super::tests::{cifar::records, held_bytes, idx, npy, pictures::encoded};
use crate::{DataError, Features, Samples};
use potluck_core::rng::Key;

const MUTATIONS: u64 = 100_000;

/// Random numbers of one mutation.
struct Random {
    key: Key,
    drawn: u32,
}

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.drawn += 1;
        self.key.words([self.drawn, 0])[0] as usize % bound.max(1)
    }
}

/// Damages bytes in one to three ways: bits that flip, bytes that are replaced, cut off, inserted
/// or repeated, and integers that become extreme.
fn damage(bytes: &mut Vec<u8>, random: &mut Random) {
    const EXTREMES: [u32; 6] = [0, 1, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 0x0000_ffff];
    const TEXTS: [&[u8]; 12] =
        [b",", b"\n", b"\"", b"nan", b"-", b"9", b"(", b"}", b"1e99", b"\r", b";", b"\xff\xd9"];
    for _ in 0..1 + random.below(3) {
        let at = random.below(bytes.len());
        // Heads are short, and decide the most.
        let at = if random.below(2) == 0 { at % 64 } else { at };
        match random.below(6) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            1 if at < bytes.len() => bytes[at] = random.below(256) as u8,
            2 => bytes.truncate(at),
            3 => {
                let text = TEXTS[random.below(TEXTS.len())];
                let at = at.min(bytes.len());
                bytes.splice(at..at, text.iter().copied());
            }
            4 => {
                let end = bytes.len().min(at + 1 + random.below(16));
                let repeated = bytes[at.min(end)..end].to_vec();
                bytes.extend(repeated);
            }
            _ if at + 4 <= bytes.len() => {
                let number = EXTREMES[random.below(EXTREMES.len())];
                bytes[at..at + 4].copy_from_slice(&number.to_be_bytes());
            }
            _ => {}
        }
    }
}

/// Reads damaged versions of valid files. Each reading returns the bytes that its result holds,
/// which may be `most.0`, and `most.1` per byte of the file. Fails unless some are read and some
/// refused.
fn survive(
    files: &[Vec<u8>],
    most: (usize, usize),
    mut read: impl FnMut(Vec<u8>) -> Result<usize, DataError>,
) {
    for file in files {
        read(file.clone()).expect("the file is valid");
    }
    let mut refused = 0;
    for seed in 0..MUTATIONS {
        let mut random = Random { key: Key::new(seed), drawn: 0 };
        let mut bytes = files[seed as usize % files.len()].clone();
        damage(&mut bytes, &mut random);
        let length = bytes.len();
        match read(bytes) {
            Ok(held) => {
                assert!(held <= most.0 + most.1 * length, "{held} for {length}, seed {seed}")
            }
            Err(why) => {
                refused += 1;
                assert!(matches!(why, DataError::Invalid { .. }), "{why}, seed {seed}");
                assert!(why.to_string().len() < 2000, "{why}");
            }
        }
    }
    assert!((MUTATIONS / 10..MUTATIONS).contains(&refused), "{refused} are refused");
}

#[test]
fn damaged_idx_files() {
    let images = idx::idx(&[2, 3, 4], &(0..24).collect::<Vec<u8>>());
    let channels = idx::idx(&[2, 3, 2, 2], &[7; 24]);
    let files = [idx::gzip(&images), images, channels];
    let labels = || super::idx::IdxArray { dims: vec![2], values: vec![1, 0] };
    survive(&files, (1 << 14, 1032), |bytes| {
        let images = super::idx::parse("x", bytes)?;
        let samples = super::idx::join("x".into(), images, Some((labels(), "y".into())))?;
        Ok(held_bytes(&samples))
    });
    let files = [idx::idx(&[5], &[1, 2, 3, 4, 0])];
    survive(&files, (1 << 14, 64), |bytes| {
        let images = super::idx::IdxArray { dims: vec![5, 1, 1], values: vec![0; 5] };
        let labels = super::idx::parse("y", bytes)?;
        Ok(held_bytes(&super::idx::join("x".into(), images, Some((labels, "y".into())))?))
    });
}

#[test]
fn damaged_cifar_records_and_names() {
    survive(&[records(&[3, 9])], (0, 8), |bytes| {
        let (mut ids, mut features) = (Vec::new(), Vec::new());
        super::cifar::parse("x", &bytes, 10, &mut ids, &mut features)?;
        Ok(features.capacity() + 4 * ids.capacity())
    });
    survive(&[b"plane\ncar\nbird\n".to_vec(), b"\n\na\r\nb".to_vec()], (0, 64), |bytes| {
        Ok(super::cifar::class_names("x", &bytes)?.len())
    });
}

#[test]
fn damaged_tables() {
    let files = [
        b"a,b,y\n1,2.5,3\n-4e3,5,6\n".to_vec(),
        b"\xEF\xBB\xBFa;\"b\";y\r\n1;2;red\r\n3;4;\"blue, or so\"\r\n".to_vec(),
        b"a\ty\n1\t2\n".to_vec(),
    ];
    let wanted = TableTargets { names: &[], kind: None, are_required: true };
    survive(&files, (1024, 96), |bytes| match super::csv::parse("x", &bytes, &wanted, None) {
        Ok(samples) => {
            let values = all_values(&samples);
            assert!(values.iter().all(|value| value.is_finite()));
            Ok(held_bytes(&samples))
        }
        Err(why) => Err(why),
    });
}

/// Features, and the targets if they are values.
fn all_values(samples: &Samples) -> Vec<f32> {
    let Features::Floats(values) = &samples.features else { panic!("no floats") };
    assert_eq!(values.len(), samples.len() * samples.width());
    let targets = match &samples.targets {
        Targets::Values { values, .. } => &values[..],
        Targets::Classes { ids, names } => {
            assert!(ids.iter().all(|id| (*id as usize) < names.len()));
            assert_eq!(ids.len(), samples.len());
            &[]
        }
        Targets::Absent => &[],
    };
    [values, targets].concat()
}

#[test]
fn damaged_arrays() {
    let fortran = "{'descr': '>f8', 'fortran_order': True, 'shape': (2, 3), }";
    let files = [
        npy::npy("<f4", "(2, 3)", &[0; 24]),
        npy::of_header(2, fortran, &[0; 48]),
        npy::of_header(3, "{'descr': '<f2', 'fortran_order': False, 'shape': (4,), }", &[0; 8]),
        npy::npy("|u1", "(2, 2, 2)", &[9; 8]),
    ];
    survive(&files, (1024, 8), |bytes| {
        let samples = super::npy::parse("x", &bytes)?.into_samples()?;
        assert!(all_values(&samples).iter().all(|value| value.is_finite()));
        Ok(held_bytes(&samples))
    });
    // Every class has a name, also if no sample is of it: at most 2^20 names.
    let files = [npy::npy("<i2", "(3,)", &[1, 0, 0, 0, 2, 0]), npy::npy("<f4", "(2, 1)", &[0; 8])];
    survive(&files, (64 << 20, 16), |bytes| {
        let targets = super::npy::parse("x", &bytes)?.into_targets(None)?;
        let samples = Samples {
            name: String::new(),
            shape: vec![1],
            columns: Vec::new(),
            target_columns: Vec::new(),
            features: Features::Floats(Vec::new()),
            targets,
            ids: None,
        };
        Ok(held_bytes(&samples))
    });
}

#[test]
fn damaged_pictures() {
    let gray = GrayImage::from_fn(5, 3, |x, y| image::Luma([(40 * x + 7 * y) as u8]));
    let colour = RgbImage::from_fn(9, 8, |x, y| image::Rgb([(20 * x) as u8, (9 * y) as u8, 3]));
    let files = [
        encoded(gray.clone(), ImageFormat::Png),
        encoded(colour.clone(), ImageFormat::Png),
        encoded(gray, ImageFormat::Jpeg),
        encoded(colour, ImageFormat::Jpeg),
    ];
    for shape in [[1, 2, 2], [3, 2, 2]] {
        let planes = super::pictures::decode("x", &files[0], shape, true).unwrap();
        assert_eq!(planes.len(), shape.iter().product::<usize>());
    }
    survive(&files, (12, 0), |bytes| {
        Ok(super::pictures::decode("x", &bytes, [3, 2, 2], true)?.len())
    });
}
