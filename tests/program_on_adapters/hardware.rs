//! `potluck hardware` as whoever has borrowed a card meets it: a report that is stopped goes on,
//! and one of another program, or without a card, is refused with a sentence.

use std::fs;
use std::thread;
use std::time::Duration;

use crate::process::{Desk, adapter_selectors, finish, is_swiftshader, send_signal};
use serde_json::Value;

/// Longest time in which a part begins.
const BEGIN: Duration = Duration::from_secs(60);

/// An adapter that is no GL one, and not SwiftShader if there is another.
fn adapter() -> String {
    let names = adapter_selectors().into_iter().filter(|name| !name.starts_with("gl:"));
    names.min_by_key(|name| is_swiftshader(name)).expect("./x test installs software adapters")
}

/// The report of a part in the one folder of an adapter.
fn part(desk: &Desk, name: &str) -> Option<Value> {
    let mut places = desk.files().into_iter();
    let file = places.find(|file| file.ends_with(&format!("/{name}.json")))?;
    Some(serde_json::from_slice(&fs::read(desk.path(&file)).unwrap()).unwrap())
}

#[test]
fn a_report_keeps_its_parts_when_it_is_stopped_and_goes_on() {
    let desk = Desk::new();
    let line = |words: &str| format!("hardware --toy --out report {} {words}", adapter());
    let summary = || fs::read_to_string(desk.path("report/SUMMARY.md")).unwrap();
    let facts = desk.run(&line("--only facts")).ok();
    assert_eq!(facts.out, summary());
    assert!(facts.err.contains("report.tar.gz"), "{}", facts.err);
    let found = part(&desk, "facts").unwrap();
    assert_eq!(
        (&found["part"], &found["measures"][0]["name"]),
        (&"facts".into(), &"driver".into())
    );

    let training = line("--only training");
    let child = desk.command(&training).spawn().unwrap();
    let is_begun = || desk.files().iter().any(|file| file.ends_with("/training.log"));
    for _ in 0..BEGIN.as_millis() / 50 {
        if is_begun() {
            break;
        }
        thread::sleep(Duration::from_millis(50));
    }
    send_signal(child.id(), "INT");
    let stopped = finish(child, &training).ended(130);
    let told = stopped.line("interrupted; what is done is kept");
    assert!(told.contains("potluck hardware --out report --toy"), "{told}");
    assert!(part(&desk, "training").is_none() && part(&desk, "facts").is_some());
    assert!(summary().contains("| training | | | | not done |"), "{}", summary());

    let ran = desk.run(&training).ok();
    let found = part(&desk, "training").unwrap();
    let losses = found["details"]["losses"].as_array().unwrap().len();
    assert_eq!((losses, found["measures"][2]["is_right"].as_bool()), (10, Some(true)), "{found}");
    let page = summary();
    assert!(page.contains("2 of 12 parts are done; none has failed."), "{page}");
    assert!(page.contains("| facts | driver |") && page.contains("| training | on the CPU |"));
    assert_eq!(ran.out, page);
    let is_of_a_run = |file: &String| file.ends_with("metrics.jsonl");
    assert!(!desk.files().iter().any(is_of_a_run), "{:?}", desk.files());

    // Figures of other sizes do not go into the same table.
    let full = line("--only facts").replace("--toy ", "");
    let refused = desk.run(&full).ended(78);
    assert!(refused.line("error:").contains("name another folder with --out"), "{}", refused.err);
    // The archive is for others to read: nothing of the user's own goes into it.
    let own = format!("hardware --toy --only facts --out . {}", adapter());
    let refused = desk.run(&own).ended(78);
    assert!(refused.line("error:").contains("has other files and no report"), "{}", refused.err);
    let cpu = desk.run("hardware --toy --out other cpu").ended(78);
    assert!(cpu.line("error:").contains("it is no graphics card"), "{}", cpu.err);
}

#[test]
#[cfg(target_os = "linux")]
fn a_machine_without_a_card_is_told_what_is_missing() {
    let desk = Desk::new();
    let mut command = desk.command("hardware");
    command.env("VK_DRIVER_FILES", "/none.json").env("LIBGL_ALWAYS_SOFTWARE", "1");
    let ran = finish(command.spawn().unwrap(), "hardware").ended(78);
    ran.line("error: no graphics card was found");
    assert!(ran.err.contains("- VK_DRIVER_FILES is set"), "{}", ran.err);
    assert!(!desk.path("hardware-report").exists());
}
