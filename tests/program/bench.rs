//! `potluck bench` as its users run it: the report's fields and order, plausible figures, and a
//! report compared with itself. How fast something is, no test asks.

use crate::process::Desk;
use serde_json::Value;

/// The next to nothing that `--tiny` measures, as JSON.
fn measured(desk: &Desk, line: &str) -> Value {
    let ran = desk.run(&format!("bench --tiny --json - {line}")).ok();
    serde_json::from_str(&ran.out).unwrap()
}

pub fn names(device: &Value, list: &str) -> Vec<String> {
    let entries = device[list].as_array().unwrap().iter();
    entries.map(|entry| entry["name"].as_str().unwrap().to_string()).collect()
}

fn median(device: &Value, name: &str) -> f64 {
    let mut figures = device["figures"].as_array().unwrap().iter();
    let figure = figures.find(|figure| figure["name"] == name);
    figure.unwrap_or_else(|| panic!("{name} is missing"))["median"].as_f64().unwrap()
}

const STEP: [&str; 4] = ["time", "tokens", "flops", "first_step"];

/// Every figure is positive, in order, of a known unit, and better in the right direction.
fn check_figures(device: &Value) {
    for figure in device["figures"].as_array().unwrap() {
        let number = |field: &str| figure[field].as_f64().unwrap();
        let [min, median, max] = ["min", "median", "max"].map(number);
        assert!(0.0 < min && min <= median && median <= max, "{figure}");
        assert!(number("samples") >= 1.0, "{figure}");
        let better = match figure["unit"].as_str().unwrap() {
            "GFLOP/s" | "GB/s" | "tokens/s" => "higher",
            "ms" | "us" => "lower",
            other => panic!("the unit {other}"),
        };
        assert_eq!(figure["better"], better, "{figure}");
        let known = ["name", "kind", "unit", "median", "min", "max", "samples", "better"];
        let fields: Vec<&String> = figure.as_object().unwrap().keys().collect();
        assert!(fields.iter().zip(known).all(|(field, known)| *field == known), "{fields:?}");
    }
}

#[test]
fn bench_cpu_and_adapter_same_figures() {
    let desk = Desk::new();
    let report = measured(&desk, "--devices cpu,llvmpipe");
    assert_eq!((&report["schema"], &report["effort"]), (&2.into(), &"tiny".into()));
    assert_eq!(report["potluck"], env!("CARGO_PKG_VERSION"));
    for field in ["os", "architecture", "cpu", "wgpu"] {
        assert!(report["system"][field].as_str().is_some_and(|text| !text.is_empty()), "{field}");
    }
    let devices = report["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 2);
    assert_eq!((&devices[0]["api"], &devices[1]["api"]), (&"cpu".into(), &"vulkan".into()));
    assert!(devices[1]["name"].as_str().unwrap().contains("llvmpipe"));
    assert_eq!(devices[1]["kind"], "software");
    for (device, peaks) in devices.iter().zip([
        &["peak.flops", "memory.copy", "memory.triad"][..],
        &[
            "peak.flops",
            "memory.copy",
            "memory.triad",
            "transfer.upload",
            "transfer.readback",
            "dispatch.in_pass",
            "dispatch.round_trip",
        ],
    ]) {
        assert!(device["error"].is_null(), "{device}");
        check_figures(device);
        let figures = names(device, "figures");
        let step = STEP.map(|what| format!("step.gpt_small_{what}"));
        assert_eq!(figures[..4], step);
        assert_eq!(figures[4..4 + peaks.len()], *peaks);
        let products = &figures[4 + peaks.len()..];
        assert!(products[0] == "matmul.square_128", "{products:?}");
        assert!(products.iter().all(|name| name.starts_with("matmul.")), "{products:?}");
        let skipped = names(device, "skipped");
        // Squares, six products of each model, and three per head.
        assert_eq!(products.len() + skipped.len(), 6 + 2 * 6 + 3 * 3, "{skipped:?}");
        assert!(skipped.contains(&"matmul.square_4096".to_string()), "{skipped:?}");
    }
}

/// Registers are faster than products, whose operands come from memory: with so much room that a
/// busy machine does not matter.
#[test]
fn bench_figures_fit_each_other() {
    let desk = Desk::new();
    let report = measured(&desk, "--devices llvmpipe --only peaks,matmul");
    let device = &report["devices"][0];
    let peak = median(device, "peak.flops");
    let product = median(device, "matmul.square_128");
    assert!(peak > 0.2 * product, "the peak {peak}, a product {product}");
    let share = device["figures"].as_array().unwrap().iter();
    let square = share.clone().find(|f| f["name"] == "matmul.square_128").unwrap();
    // On a busy machine a product may be measured above the peak, and stands for it.
    let products = names(device, "figures").into_iter().filter(|name| name.starts_with("matmul."));
    let highest = products.map(|name| median(device, &name)).fold(peak, f64::max);
    assert!((square["of_peak"].as_f64().unwrap() - product / highest).abs() < 1e-9);
    assert!(square["by"].as_str().unwrap().starts_with("matmul_"), "{square}");
    assert_eq!(square["on"], "(128, 128) (128, 128)");
    // The smoke test takes one sample of each, of which another process may have stretched the
    // short one; not three times in a row.
    let costs = |report: &Value| {
        let device = &report["devices"][0];
        ["dispatch.round_trip", "dispatch.in_pass"].map(|name| median(device, name))
    };
    let again = || measured(&desk, "--devices llvmpipe --only peaks");
    let mut tries = [costs(&report)].into_iter().chain((0..2).map(|_| costs(&again())));
    let is_right = tries.any(|[alone, in_pass]| alone > in_pass);
    assert!(is_right, "a submission costs less than a dispatch in one");
}

#[test]
fn bench_outputs_go_to_their_places() {
    let desk = Desk::new();
    let ran = desk.run("bench --tiny --devices cpu --only peaks --json report.json").ok();
    let lines: Vec<&str> = ran.out.lines().collect();
    assert!(lines[0].starts_with("potluck ") && lines[0].ends_with("; tiny run"), "{}", ran.out);
    assert!(lines[2].starts_with("cpu (") && lines[2].contains(" thread"), "{}", ran.out);
    let columns: Vec<&str> = lines[4].split_whitespace().collect();
    assert_eq!(columns, ["peaks", "median", "unit", "spread", "by", "on"]);
    let rows = ["peak flops ", "memory copy ", "memory triad "];
    let found = lines[5..8].iter().zip(rows).all(|(line, row)| line.starts_with(row));
    assert!(found, "{}", ran.out);
    // What may follow depends on how busy the machine is.
    let behind: Vec<&&str> = lines[8..].iter().filter(|line| !line.is_empty()).collect();
    assert!(behind.iter().all(|line| line.starts_with("note: half of")), "{}", ran.out);
    let Some((progress, "wrote report.json")) = ran.err.trim_end().rsplit_once('\n') else {
        panic!("{}", ran.err)
    };
    assert!(progress.lines().all(|line| line.starts_with("cpu (")), "{progress}");
    let file = std::fs::read_to_string(desk.path("report.json")).unwrap();
    let report: Value = serde_json::from_str(&file).unwrap();
    assert_eq!(names(&report["devices"][0], "figures").len(), 3);

    let same = desk.run("bench compare report.json report.json").ok();
    assert_eq!(same.out.matches("  same").count(), 3, "{}", same.out);
}

/// Asserts exit code 78, nothing on stdout, and one sentence with these words.
fn refuses(desk: &Desk, line: &str, words: &[&str]) {
    let ran = desk.run(line).ended(78);
    assert_eq!(ran.out, "");
    let error = ran.line("error:");
    assert!(words.iter().all(|word| error.contains(word)), "{error}");
}

#[test]
fn bench_impossible_requests_are_refused() {
    let desk = Desk::new();
    desk.write("text.json", "no report");
    refuses(&desk, "bench compare missing.json text.json", &["missing.json: cannot be read"]);
    refuses(&desk, "bench compare text.json missing.json", &["text.json: is not a report"]);
    refuses(&desk, "bench --tiny --devices nothing-like-it", &["nothing-like-it"]);
    refuses(&desk, "bench --tiny --devices cpu,", &["it is empty"]);
    refuses(&desk, "bench --tiny --json no/such/place.json", &["in no directory"]);
    refuses(&desk, "bench --tiny --json .", &[". is a directory"]);
}

#[test]
fn bench_collectives_has_points_and_chart() {
    let desk = Desk::new();
    let line = "bench collectives --tiny --ranks 2,3 --devices cpu,llvmpipe --svg all.svg";
    let ran = desk.run(&format!("{line} --json report.json")).ok();
    assert!(ran.out.contains("\ncollective  ") && ran.out.contains("of copy"), "{}", ran.out);
    assert!(ran.out.contains("of transfers"), "{}", ran.out);
    let file = std::fs::read_to_string(desk.path("report.json")).unwrap();
    let report: Value = serde_json::from_str(&file).unwrap();
    let [slices, gradients] = &report["devices"].as_array().unwrap()[..] else {
        panic!("{file}");
    };
    assert_eq!((&slices["name"], &slices["api"]), (&"slices in memory".into(), &"cpu".into()));
    assert!(gradients["name"].as_str().unwrap().starts_with("cpu + llvmpipe"), "{gradients}");
    let mut expected = Vec::new();
    for ranks in [2, 3] {
        let sizes = ["4_KiB", "1_MiB"];
        expected.extend(sizes.map(|size| format!("all_reduce.{size}_{ranks}_ranks")));
    }
    for other in ["reduce_scatter", "all_gather", "broadcast"] {
        expected.extend([2, 3].map(|ranks| format!("{other}.1_MiB_{ranks}_ranks")));
    }
    expected.extend(["copy.4_KiB", "copy.1_MiB"].map(String::from));
    assert_eq!(names(slices, "figures"), expected);
    let of_devices = ["all_reduce.1_MiB_2_devices", "transfers.1_MiB_2_devices"];
    assert_eq!(names(gradients, "figures"), of_devices);
    check_moved(slices, "of_copy");
    check_moved(gradients, "of_transfers");

    let svg = std::fs::read_to_string(desk.path("all.svg")).unwrap();
    check_markup(&svg);
    assert_eq!(svg.matches("<circle").count(), 4, "{svg}");
    assert!(texts(&svg).contains(&"2 ranks") && texts(&svg).contains(&"3 ranks"), "{svg}");

    let same = desk.run("bench compare report.json report.json").ok();
    assert_eq!(same.out.matches("  same").count(), expected.len() + 2, "{}", same.out);
}

/// The figures of a device's collectives fit together.
pub fn check_moved(device: &Value, share: &str) {
    assert!(device["error"].is_null(), "{device}");
    for figure in device["figures"].as_array().unwrap() {
        let (moved, bus) = (&figure["kind"]["collective"], figure["median"].as_f64().unwrap());
        assert_eq!((&figure["unit"], &figure["better"]), (&"GiB/s".into(), &"higher".into()));
        let number = |field: &str| moved[field].as_f64().unwrap_or_else(|| panic!("{figure}"));
        let (ranks, algorithm) = (number("ranks"), number("algorithm"));
        assert!(bus > 0.0 && number("seconds") > 0.0 && number("bytes") >= 4096.0, "{figure}");
        let factor = match moved["by"].as_str().unwrap() {
            "all_reduce" => 2.0 * (ranks - 1.0) / ranks,
            "reduce_scatter" | "all_gather" => (ranks - 1.0) / ranks,
            "broadcast" | "copy" | "transfers" => 1.0,
            other => panic!("{other}"),
        };
        assert!((bus / algorithm / factor - 1.0).abs() < 1e-9, "{figure}");
        let is_alone = ["copy", "transfers"].contains(&moved["by"].as_str().unwrap());
        assert_eq!(moved[share].as_f64().is_some_and(|share| share > 0.0), !is_alone, "{figure}");
    }
}

/// The texts of a chart, which has each on a line of its own.
pub fn texts(svg: &str) -> Vec<&str> {
    let lines: Vec<&str> = svg.lines().collect();
    let pairs = lines.windows(2).filter(|pair| pair[0].starts_with("<text"));
    pairs.map(|pair| pair[1]).collect()
}

/// Every element is closed, in order, and its attributes are quoted.
pub fn check_markup(svg: &str) {
    let mut open: Vec<&str> = Vec::new();
    for tag in svg.split('<').skip(1) {
        let (tag, text) = tag.split_once('>').unwrap_or_else(|| panic!("<{tag} has no end"));
        assert!(!text.contains('>') && tag.matches('"').count() % 2 == 0, "<{tag}>{text}");
        match (tag.strip_prefix('/'), tag.ends_with('/')) {
            (Some(name), _) => assert_eq!(open.pop(), Some(name)),
            (None, false) => open.push(tag.split_whitespace().next().unwrap()),
            (None, true) => {}
        }
    }
    assert!(svg.starts_with("<svg ") && open.is_empty(), "{open:?}");
}

#[test]
fn bench_collectives_needs_no_device() {
    let desk = Desk::new();
    let ran = desk.run("bench collectives --tiny --ranks 5 --devices none --json -").ok();
    let report: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!(report["devices"].as_array().unwrap().len(), 1);
    check_moved(&report["devices"][0], "of_copy");
    refuses(&desk, "bench collectives --tiny --devices nothing-like-it", &["nothing-like-it"]);
    refuses(&desk, "bench collectives --tiny --svg no/such/place.svg", &["in no directory"]);
}

/// Cases of the test below that fit, in order.
fn fitting_cases() -> Vec<(&'static str, u64, u64)> {
    let all = ["gpipe", "1f1b", "interleaved", "zero-bubble"];
    let of = |(stages, count): (u64, u64)| {
        let fits = move |schedule: &&str| *schedule != "interleaved" || (stages, count) == (2, 4);
        all.into_iter().filter(fits).map(move |schedule| (schedule, stages, count))
    };
    [(2, 3), (2, 4), (3, 3), (3, 4)].into_iter().flat_map(of).collect()
}

#[test]
fn bench_pipeline_has_row_per_case() {
    let desk = Desk::new();
    let line = "bench pipeline --tiny --stages 2,3 --micro-batches 3,4 --layers 2 --svg p.svg";
    let ran = desk.run(&format!("{line} --json report.json")).ok();
    let file = std::fs::read_to_string(desk.path("report.json")).unwrap();
    let report: Value = serde_json::from_str(&file).unwrap();
    let [device] = &report["devices"].as_array().unwrap()[..] else { panic!("{file}") };
    assert!(device["error"].is_null(), "{device}");
    check_figures(device);
    let cases = fitting_cases();
    let name = |(schedule, stages, count): &(&str, u64, u64)| {
        format!("pipeline.{schedule}_{stages}_stages_{count}_micro_batches")
    };
    assert_eq!(names(device, "figures"), cases.iter().map(name).collect::<Vec<_>>());
    let rows: Vec<Vec<&str>> =
        ran.out.lines().map(|line| line.split_whitespace().collect()).collect();
    for (figure, case) in device["figures"].as_array().unwrap().iter().zip(&cases) {
        check_pipeline(figure, *case);
        let begin = [case.0.to_string(), case.1.to_string(), case.2.to_string()];
        let found = rows.iter().filter(|row| row.len() > 3 && row[..3] == begin);
        assert_eq!(found.count(), 1, "{begin:?} in {}", ran.out);
    }
    let below = "\npredicted: by times of blocks, measured alone, and of transfers; updates, ";
    assert_eq!(ran.out.matches(below).count(), 1, "{}", ran.out);
    assert!(ran.out.contains(" predicted ms ") && !ran.out.contains("priced"), "{}", ran.out);
    for file in ["p.svg", "report.json"] {
        assert!(ran.err.lines().any(|line| line == format!("wrote {file}")), "{}", ran.err);
    }
    let skipped = device["skipped"].as_array().unwrap().iter();
    let whys: Vec<&str> = skipped.map(|one| one["why"].as_str().unwrap()).collect();
    assert_eq!(whys.len(), 3, "{whys:?}");
    assert!(whys[0].contains("a multiple of 2 micro-batches"), "{whys:?}");
    assert!(whys[1].contains("4 blocks has no 6 parts"), "{whys:?}");

    let svg = std::fs::read_to_string(desk.path("p.svg")).unwrap();
    check_markup(&svg);
    // Each step is a point of both plots.
    assert_eq!(svg.matches("<circle").count(), 2 * cases.len(), "{svg}");
    for text in ["tokens/s, 2 stages", "bubble in %, 3 stages"] {
        assert!(texts(&svg).contains(&text), "{text} is missing: {svg}");
    }
    let same = desk.run("bench compare report.json report.json").ok();
    assert_eq!(same.out.matches("  same").count(), cases.len(), "{}", same.out);
}

/// The parts of a pipeline's figure fit together.
fn check_pipeline(figure: &Value, (schedule, stages, count): (&str, u64, u64)) {
    let found = &figure["kind"]["pipeline"];
    let number = |field: &str| found[field].as_f64().unwrap_or_else(|| panic!("{figure}"));
    assert_eq!(found["schedule"], schedule, "{figure}");
    assert_eq!((&found["stages"], &found["micro_batches"]), (&stages.into(), &count.into()));
    let blocks = found["blocks"].as_array().unwrap();
    assert_eq!(blocks.len() as u64, stages * found["chunks"].as_u64().unwrap(), "{figure}");
    assert_eq!(blocks.iter().map(|one| one.as_u64().unwrap()).sum::<u64>(), 4, "{figure}");
    assert!(number("step_s") > 0.0 && number("predicted_s") > 0.0, "{figure}");
    for bubble in ["bubble", "predicted_bubble", "formula_bubble"] {
        assert!((0.0..1.0).contains(&number(bubble)), "{bubble}: {figure}");
    }
    // Micro-batches of 2 samples of 8 tokens.
    let rate = (count * 16) as f64 / number("step_s");
    let [min, max] = ["min", "max"].map(|field| figure[field].as_f64().unwrap());
    assert!(min * 0.999 <= rate && rate <= max * 1.001, "{figure}");
    let (k, m) = (stages as f64, count as f64);
    let formula = match schedule {
        "gpipe" | "1f1b" => (k - 1.0) / (m + k - 1.0),
        "interleaved" => (k - 1.0) / (2.0 * m + k - 1.0),
        _ => return,
    };
    assert!((number("formula_bubble") - formula).abs() < 1e-9, "{figure}");
}

#[test]
fn bench_pipeline_impossible_is_refused() {
    let desk = Desk::new();
    let line = "bench pipeline --tiny --schedules interleaved --stages 2 --micro-batches 3";
    let ran = desk.run(line).ended(78);
    assert!(ran.out.contains("a multiple of 2 micro-batches"), "{}", ran.out);
    assert!(ran.line("error:").contains("no pipeline could run"), "{}", ran.err);
    refuses(&desk, "bench pipeline --tiny --devices nothing-like-it", &["nothing-like-it"]);
    refuses(&desk, "bench pipeline --tiny --svg no/such/place.svg", &["in no directory"]);
    let measured = "bench pipeline --tiny --cut measured --schedules 1f1b,1f1b --stages 2,2 \
                    --micro-batches 4,4";
    let ran = desk.run(&format!("{measured} --json -")).ok();
    let report: Value = serde_json::from_str(&ran.out).unwrap();
    let figures = report["devices"][0]["figures"].as_array().unwrap();
    assert_eq!(figures.len(), 1, "a case that is asked for twice is measured once");
    check_pipeline(&figures[0], ("1f1b", 2, 4));
}
