//! Two processes, on one machine or two, add a vector over both and measure how fast that is.
//!
//! `cargo run --release --example two_processes -- host [ADDRESS [MEGABYTES [ROUNDS]]]` prints
//! what to type on the other side: `.. join ADDRESS [MEGABYTES [ROUNDS]]`, which asks for the code.
//! Megabytes and rounds are to be equal on both.

use std::time::{Duration, Instant};

use anyhow::bail;
use potluck::Rank;
use potluck::collectives::{ClusterOptions, ConnectEvent, ProcessGroup, ReduceOp, Secret, connect};

/// Address at which the first process listens: all of its addresses, any free UDP port.
const ANY: &str = "0.0.0.0:0";

/// Options of the first process, which prints what to type on the other side.
fn host(listen: &str) -> anyhow::Result<ClusterOptions> {
    let secret = Secret::generate()?;
    let code = secret.code().unwrap_or_default();
    let mut options = ClusterOptions::host(listen.parse()?, 2, secret);
    options.on_news = Box::new(move |news| match news {
        ConnectEvent::Listening(address) => {
            let program = "cargo run --release --example two_processes --";
            println!("on the other side, type\n  {program} join {address}");
            if address.ip().is_unspecified() {
                println!("with the address of this machine in place of {}", address.ip());
            }
            println!("and there the code  {code}");
        }
        news => println!("{news}"),
    });
    Ok(options)
}

/// Options of the other process, which asks for the code.
fn join(address: &str) -> anyhow::Result<ClusterOptions> {
    println!("code: ");
    let mut typed = String::new();
    std::io::stdin().read_line(&mut typed)?;
    let mut options = ClusterOptions::join(address, Secret::parse(&typed)?);
    options.on_news = Box::new(|news| println!("{news}"));
    Ok(options)
}

/// Adds a vector over both processes, several times.
fn add(mut group: ProcessGroup, megabytes: usize, rounds: u32) -> anyhow::Result<()> {
    let (rank, world) = (group.rank(), group.world_size());
    let own: Vec<f32> =
        (0..megabytes * 250_000).map(|i| (i % 1000 + rank.index()) as f32).collect();
    let mut values = own.clone();
    group.barrier()?;
    println!("{rank} of {world} begins");
    let began = Instant::now();
    for _ in 0..rounds {
        values.copy_from_slice(&own);
        group.all_reduce(&mut values, ReduceOp::Sum)?;
    }
    let seconds = began.elapsed().as_secs_f64() / f64::from(rounds);
    // Each rank sends and receives 2 (world - 1) / world of the bytes.
    let share = 2.0 * (world - 1) as f64 / world as f64;
    let gigabytes = share * megabytes as f64 / 1e3 / seconds;
    let (first, last) = (values[0], values[values.len() - 1]);
    println!("{rank} sum of the first values {first}, of the last {last}");
    println!(
        "{rank} all_reduce of {megabytes} MB in {:.2} ms: {gigabytes:.3} GB/s each way",
        seconds * 1e3
    );
    // Both have the same bits.
    let mut bits: Vec<u32> = values.iter().map(|value| value.to_bits()).collect();
    group.broadcast(&mut bits, Rank(0))?;
    let is_equal = bits.iter().zip(&values).all(|(bits, value)| *bits == value.to_bits());
    println!("{rank} {}", if is_equal { "equal to the bit" } else { "other bits" });
    Ok(())
}

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let text = |at: usize| args.get(at).map(String::as_str);
    let options = match (text(0), text(1)) {
        (Some("host"), address) => host(address.unwrap_or(ANY))?,
        (Some("join"), Some(address)) => join(address)?,
        _ => bail!("expects host [ADDRESS] or join ADDRESS"),
    };
    let megabytes = text(2).map_or(Ok(16), str::parse)?;
    let rounds = text(3).map_or(Ok(20), str::parse)?;
    if megabytes == 0 || rounds == 0 {
        bail!("expects one megabyte and one round at least");
    }
    // A process that is silent for so long is lost; 10 s if it is not said.
    let options = ClusterOptions { timeout: Duration::from_secs(2), ..options };
    // One rank per process, unless the options say more.
    connect(options)?.into_iter().try_for_each(|group| add(group, megabytes, rounds))
}
