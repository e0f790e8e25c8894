//! Tables in Markdown of kernels on the GPUs of all vendors.

use std::fmt::Write as _;

use super::vendors::{FigureNames, GPUS, Made, NamedKernel, Survey, Surveyed};

/// Returns the text for a survey.
pub fn of(survey: &Survey) -> String {
    let mut text = "# Kernels as vendors' compilers make them\n\n\
         Figures of drivers, with robust buffer access. Nothing was run, and no GPU was there. A \
         kernel\nspills if it has accesses of memory in place of registers (shown), or bytes of \
         it (shown if there\nare no accesses). Registers are those of the driver: NVIDIA's of 255 \
         per invocation, Intel's live\nat a time of 128 per subgroup (Arc B: of 256), Apple's \
         halves of 256, AMD's of 256.\n\n"
        .to_string();
    gpus(&mut text, survey);
    families(&mut text, survey);
    text += "\nA cell below is registers, spilled, instructions, and the share of multiply-adds in \
             the hot\nloop, which is the block with the most of them. Of kernels of one name it \
             is the one that spills\nmost, then that of most registers.\n";
    choices(&mut text, "Step of GPT-2 124M", survey, |of| &of.step);
    choices(&mut text, "Static choices", survey, |of| &of.choices);
    text
}

/// Adds the head of a table with a column for each GPU behind these.
fn head(text: &mut String, title: &str, columns: &[&str]) {
    let columns: Vec<&str> = columns.iter().copied().chain(GPUS.map(|one| one.name)).collect();
    let _ = writeln!(text, "\n## {title}\n\n| {} |", columns.join(" | "));
    let _ = writeln!(text, "|{}", "---|".repeat(columns.len()));
}

fn gpus(text: &mut String, survey: &Survey) {
    *text += "## GPUs\n\n| GPU | | kernels for hardware | that spill | instructions | slowest |\n\
              |---|---|---|---|---|---|\n";
    for of in &survey.gpus {
        let names = &of.gpu.names;
        let mut numbers: Vec<usize> = survey.modules.iter().map(|one| one.number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let made = || numbers.iter().map(|number| &of.made[*number]);
        let spilling = made().filter(|one| one.spilled(names) > (0, 0)).count();
        let instructions: u64 = made().map(|one| one.figure(names.instructions)).sum();
        let milliseconds = |listed: &&NamedKernel| of.made[listed.number].milliseconds;
        let by_time =
            |a: &&NamedKernel, b: &&NamedKernel| milliseconds(a).total_cmp(&milliseconds(b));
        let slowest = survey.modules.iter().max_by(by_time);
        let slowest = slowest.map(|one| format!("{:.0} ms, {}", milliseconds(&one), one.name));
        let _ = writeln!(
            text,
            "| {} | {} | {} | {spilling} | {instructions} | {} |",
            of.gpu.name,
            of.gpu.title,
            numbers.len(),
            slowest.unwrap_or_default()
        );
    }
}

/// Adds registers and spills of modules of a kind.
fn families(text: &mut String, survey: &Survey) {
    head(text, "Families", &["kernels", "count"]);
    for (family, numbers) in grouped(&survey.modules, family) {
        let _ = write!(text, "| {family} | {} |", numbers.len());
        for of in &survey.gpus {
            let made = || numbers.iter().map(|number| &of.made[*number]);
            let registers = || made().map(|one| one.figure(of.gpu.names.registers));
            let (least, most) = (registers().min().unwrap_or(0), registers().max().unwrap_or(0));
            let _ = write!(text, " {least}..{most}");
            let spilled = || made().map(|one| one.spilled(&of.gpu.names));
            let spilling = spilled().filter(|spilled| *spilled > (0, 0)).count();
            if spilling > 0 {
                let most = shown(spilled().max().unwrap_or_default());
                let _ = write!(text, ", **{spilling} spill** ({most})");
            }
            *text += " |";
        }
        *text += "\n";
    }
}

/// Returns the family of a module: what fuses it, or its first word.
fn family(name: &str) -> String {
    let first = |text: &str| text.split(' ').next().unwrap_or_default().to_string();
    match name.split_once(" by ") {
        Some((_, kernel)) if !kernel.starts_with(char::is_numeric) => {
            format!("fused by {}", first(kernel))
        }
        _ => first(name),
    }
}

/// Adds what GPUs take.
fn choices(
    text: &mut String,
    title: &str,
    survey: &Survey,
    of: fn(&Surveyed) -> &Vec<NamedKernel>,
) {
    head(text, title, &["kernel"]);
    let all = survey.gpus.iter().flat_map(of);
    for (name, _) in grouped(all, str::to_string) {
        let _ = write!(text, "| {name} |");
        for surveyed in &survey.gpus {
            let of_name = of(surveyed).iter().filter(|one| one.name == name);
            let made = of_name.map(|one| &surveyed.made[one.number]);
            let names = &surveyed.gpu.names;
            let worst = |one: &&Made| (one.spilled(names), one.figure(names.registers));
            let cell = made.max_by_key(worst).map(|one| cell(one, names));
            let _ = write!(text, " {} |", cell.unwrap_or_default());
        }
        *text += "\n";
    }
}

fn cell(made: &Made, names: &FigureNames) -> String {
    let [registers, instructions] =
        [names.registers, names.instructions].map(|name| made.figure(name));
    let spilled = match made.spilled(names) {
        (0, 0) => "0".to_string(),
        spilled => format!("**{}**", shown(spilled)),
    };
    let mut cell = format!("{registers}, {spilled}, {instructions}");
    if made.hot_loop.multiply_adds > 0 {
        let _ = write!(cell, ", {} %", made.hot_loop.share());
    }
    cell
}

fn shown((accesses, bytes): (u64, u64)) -> String {
    if accesses > 0 { accesses.to_string() } else { format!("{bytes} B") }
}

/// Returns kernels by what a function makes of their names, in the order of the first of each.
fn grouped<'a>(
    all: impl IntoIterator<Item = &'a NamedKernel>,
    key: impl Fn(&str) -> String,
) -> Vec<(String, Vec<usize>)> {
    let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
    for NamedKernel { name, number } in all {
        let key = key(name);
        let index = groups.iter().position(|(known, _)| *known == key).unwrap_or_else(|| {
            groups.push((key, Vec::new()));
            groups.len() - 1
        });
        if !groups[index].1.contains(number) {
            groups[index].1.push(*number);
        }
    }
    groups
}
