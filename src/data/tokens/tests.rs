//! Tests of token files.

use tempfile::TempDir;

use super::*;
use potluck_core::rng::Key;

/// Creates a directory with a token file of 16-bit tokens and its description.
fn directory(tokens: &[u16], change: impl Fn(&mut serde_json::Value)) -> TempDir {
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    directory_of(&bytes, "u16", tokens.len(), change)
}

fn directory_of(
    bytes: &[u8],
    dtype: &str,
    count: usize,
    change: impl Fn(&mut serde_json::Value),
) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let hash = blake3::hash(bytes).to_string();
    let mut info = serde_json::json!({
        "vocabulary": 300, "dtype": dtype, "count": count, "blake3": hash
    });
    change(&mut info);
    fs::write(directory.path().join("t.bin"), bytes).unwrap();
    fs::write(directory.path().join("t.json"), info.to_string()).unwrap();
    directory
}

fn digits() -> Vec<u16> {
    (0..20).map(|n| n % 10 + 256).collect()
}

fn open(directory: &TempDir, held_out: f64, context: usize) -> Result<TokenFile, String> {
    let opened = TokenFile::open(&directory.path().join("t.bin"), held_out, context);
    let prefix = format!("{}{}", directory.path().display(), std::path::MAIN_SEPARATOR);
    opened.map_err(|why| why.to_string().replace(&prefix, ""))
}

#[test]
fn windows_are_rows_of_tokens_and_of_those_that_follow() {
    let directory = directory(&digits(), |_| {});
    let file = Arc::new(open(&directory, 0.25, 4).unwrap());
    assert_eq!((file.vocabulary(), file.len(Split::Train)), (300, 15));
    let windows = TokenWindows { file: file.clone(), context: 4 };
    assert_eq!([Split::Train, Split::Validation].map(|split| windows.len(split)), [11, 1]);
    assert_eq!(windows.evaluation_samples(Split::Train), [0, 4, 8]);
    let rows = windows.rows(Split::Train, &[2, 0]).unwrap();
    let expected = [
        ("tokens", vec![258, 259, 260, 261, 256, 257, 258, 259]),
        ("targets", vec![259, 260, 261, 262, 257, 258, 259, 260]),
    ];
    assert_eq!(rows, expected.map(|(name, values)| (name, HostTensor::Int(values))));
    let rows = windows.rows(Split::Validation, &[0]).unwrap();
    assert_eq!(rows[0].1, HostTensor::Int(vec![261, 262, 263, 264]));
    let inputs = windows.inputs();
    assert!(
        inputs.iter().map(|input| (input.name, input.elements)).eq([("tokens", 4), ("targets", 4)])
    );
    let names: Vec<&str> = file.files().iter().map(|file| file.name.as_str()).collect();
    assert_eq!((names, file.files()[0].bytes), (vec!["t.bin", "t.json"], 40));
    assert_eq!(file.files()[1].blake3.len(), 64);
}

#[test]
fn tokens_may_have_32_bits() {
    let bytes: Vec<u8> = (0..8u32).flat_map(|n| (n * 70_000).to_le_bytes()).collect();
    let directory = directory_of(&bytes, "u32", 8, |info| info["vocabulary"] = 490_001.into());
    let file = open(&directory, 0.0, 4).unwrap();
    assert_eq!(file.tokens(Split::Train, 5..8), [350_000, 420_000, 490_000]);
    assert!(file.is_empty(Split::Validation));
}

#[test]
fn the_held_out_tail_begins_with_a_document() {
    let training = |documents: &[u64], held_out| {
        let directory = directory(&digits(), |info| info["documents"] = documents.into());
        open(&directory, held_out, 1).map(|file| file.len(Split::Train))
    };
    assert_eq!(training(&[0, 10, 15, 18], 0.25), Ok(15));
    assert_eq!(training(&[0, 10, 16, 18], 0.25), Ok(16));
    assert_eq!(training(&[0, 10], 0.0), Ok(20));
    // No document begins behind the share: the last one is held out; a single one is cut.
    assert_eq!(training(&[0, 10], 0.25), Ok(10));
    assert_eq!(training(&[0], 0.25), Ok(15));
    // A last document that is too short, and one that is nearly all.
    assert_eq!(training(&[0, 10, 19], 0.25), Ok(10));
    assert_eq!(training(&[0, 2], 0.25), Ok(15));
}

#[test]
fn a_fingerprint_is_that_of_tokens_and_boundary() {
    let of = |tokens: &[u16], held_out| {
        let windows = TokenWindows {
            file: Arc::new(open(&directory(tokens, |_| {}), held_out, 2).unwrap()),
            context: 2,
        };
        windows.fingerprint()
    };
    let mut other = digits();
    other[3] = 1;
    let all = [of(&digits(), 0.25), of(&digits(), 0.5), of(&other, 0.25)];
    assert!(all[0] != all[1] && all[0] != all[2]);
    assert_eq!(all[0], of(&digits(), 0.25));
}

#[test]
fn descriptions_that_do_not_fit_are_refused() {
    let refused = |key: &str, value: serde_json::Value| {
        open(&directory(&digits(), |info| info[key] = value.clone()), 0.0, 2).err().unwrap()
    };
    let hash = blake3::hash(b"x").to_string();
    let bytes: Vec<u8> = digits().iter().flat_map(|token| token.to_le_bytes()).collect();
    let found = blake3::hash(&bytes).to_string();
    for (key, value, expected) in [
        (
            "vocabulary",
            0.into(),
            "t.json: vocabulary: is 0; expected the number of different tokens",
        ),
        ("vocabulary", 265.into(), "t.bin: token 9: is 265, not below the vocabulary of 265"),
        ("count", 21.into(), "t.bin: is 40 bytes long; 21 tokens of 2 bytes were expected"),
        (
            "count",
            u64::MAX.into(),
            "t.bin: is 40 bytes long; 18446744073709551615 tokens of 2 bytes were expected",
        ),
        ("dtype", "u32".into(), "t.bin: is 40 bytes long; 20 tokens of 4 bytes were expected"),
        ("version", 3.into(), "t.json: version: is 3; this version reads up to 2"),
        (
            "tokenizer",
            "0".into(),
            "t.json: tokenizer: \"0\" is not a hash of 64 hexadecimal digits",
        ),
        ("blake3", "ab".into(), "t.json: blake3: \"ab\" is not a hash of 64 hexadecimal digits"),
        (
            "blake3",
            hash.clone().into(),
            &format!("t.bin: its BLAKE3 hash is {found}, and {hash} was expected; write it anew"),
        ),
        ("documents", [1, 2][..].into(), "t.json: documents: does not begin with 0"),
        ("documents", Vec::<u64>::new().into(), "t.json: documents: does not begin with 0"),
        (
            "documents",
            [0, 5, 5][..].into(),
            "t.json: documents: 5 follows 5; expected ascending starts",
        ),
        ("documents", [0, 20][..].into(), "t.json: documents: 20 is behind the end of 20 tokens"),
    ] {
        assert_eq!(refused(key, value), expected);
    }
    let message = refused("dtype", "f32".into());
    assert!(
        message.starts_with("t.json: does not describe tokens (unknown variant `f32`"),
        "{message}"
    );
}

#[test]
fn files_that_are_missing_or_empty_are_refused() {
    let directory = directory(&[], |_| {});
    let path = directory.path().join("t.bin");
    assert!(is_token_file(&path) && !is_token_file(&path.with_extension("json")));
    let empty = "t.bin: is empty; give a file with data in it as --data or data.path";
    assert_eq!(open(&directory, 0.0, 1).err().unwrap(), empty);
    assert!(matches!(TokenFile::open(&path, 1.0, 1), Err(DataError::HeldOut { .. })));
    assert!(!is_token_file(&directory.path().join("none.bin")) && !is_token_file(directory.path()));
    fs::rename(&path, directory.path().join(TOKENS)).unwrap();
    assert!(!is_token_file(directory.path()), "nothing describes it");
    fs::write(directory.path().join("tokens.json"), "{}").unwrap();
    assert!(is_token_file(directory.path()));
    fs::remove_file(path.with_extension("json")).unwrap();
    fs::create_dir(path.with_extension("json")).unwrap();
    fs::write(&path, [1, 0]).unwrap();
    assert!(open(&directory, 0.0, 1).err().unwrap().starts_with("t.json: cannot be read ("));
}

#[test]
fn damaged_descriptions_are_read_or_refused() {
    let hash = blake3::hash(b"x").to_string();
    let fine = format!(
        "{{\"vocabulary\":300,\"dtype\":\"u16\",\"count\":20,\"blake3\":\"{hash}\",\
         \"documents\":[0,7,12]}}"
    );
    let (mut read, mut refused) = (0, 0);
    for seed in 0..100_000 {
        let words = |counter| Key::new(seed).words([counter, 0]);
        let mut bytes = fine.clone().into_bytes();
        let [at, value] = words(0);
        let at = at as usize % bytes.len();
        match words(1)[0] % 4 {
            0 => bytes[at] = value as u8,
            1 => bytes[at] = b"0123456789,]"[value as usize % 12],
            2 => bytes.insert(at, b"0123456789,]"[value as usize % 12]),
            _ => bytes.truncate(at),
        }
        match TokenFileInfo::parse("t.json", &bytes) {
            Ok(info) => {
                read += 1;
                let boundary = info.training(0.3);
                assert!(boundary <= info.count, "{boundary} of {info:?}");
                assert!(check("t.bin", b"some bytes", &info).is_err());
            }
            Err(_) => refused += 1,
        }
    }
    assert!(read > 1000 && refused > 1000, "{read} are read, {refused} refused");
}

#[test]
fn tokens_without_a_description_have_16_bits_as_nanogpt_writes_them() {
    let directory = directory(&digits(), |_| {});
    fs::remove_file(directory.path().join("t.json")).unwrap();
    let file = open(&directory, 0.25, 2).unwrap();
    assert_eq!((file.vocabulary(), file.len(Split::Train)), (266, 15));
    assert_eq!(file.tokens(Split::Validation, 0..2), [261, 262]);
    assert_eq!(file.tokenizer_hash(), None);
    assert_eq!(file.files().len(), 1);
    fs::write(directory.path().join("t.bin"), [1, 2, 3]).unwrap();
    let odd = "t.bin: is 3 bytes long; 1 token of 2 bytes were expected";
    assert_eq!(open(&directory, 0.0, 1).err().unwrap(), odd);
}

#[test]
fn masked_tokens_are_no_targets() {
    let mask: Vec<u8> = (0..20).map(|n| u8::from(n % 3 != 0)).collect();
    let with = |mask: &[u8], hash: String| {
        let directory = directory(&digits(), |info| {
            info["version"] = 2.into();
            info["mask"] = hash.clone().into();
        });
        fs::write(directory.path().join("t.mask"), mask).unwrap();
        let file = open(&directory, 0.25, 4)?;
        Ok::<_, String>(TokenWindows { file: Arc::new(file), context: 4 })
    };
    let hash = |mask: &[u8]| blake3::hash(mask).to_string();
    let windows = with(&mask, hash(&mask)).unwrap();
    let targets = |split, index| windows.rows(split, &[index]).unwrap().remove(1).1;
    let none = u32::MAX;
    assert_eq!(targets(Split::Train, 1), HostTensor::Int(vec![258, none, 260, 261]));
    assert_eq!(targets(Split::Validation, 0), HostTensor::Int(vec![262, 263, none, 265]));
    let tokens = windows.rows(Split::Train, &[1]).unwrap().remove(0).1;
    assert_eq!(tokens, HostTensor::Int(vec![257, 258, 259, 260]));
    let plain = TokenWindows {
        file: Arc::new(open(&directory(&digits(), |_| {}), 0.25, 4).unwrap()),
        context: 4,
    };
    assert_ne!(windows.fingerprint(), plain.fingerprint());
    let why = |mask: &[u8], hash: String| with(mask, hash).err().unwrap();
    assert!(why(&mask[1..], hash(&mask[1..])).contains("is 19 bytes long; one for each of 20"));
    assert!(why(&mask, hash(b"x")).contains("its BLAKE3 hash is"));
    assert!(why(&[2; 20], hash(&[2; 20])).contains("byte 0: is 2; expected 0 or 1"));
}
