//! Data parallelism by hand: threads fit one line to their own parts of the points, and
//! all-reduce their gradients to a mean in every step, each with the number of its points as its
//! weight.
//!
//! `cargo run --release --example all_reduce [THREADS]`, or without building wgpu
//! `cargo run --release -p collectives --bin all_reduce [THREADS]`

use std::error::Error;
use std::thread;

use potluck::Rank;
use potluck::collectives::{GroupError, ProcessGroup, ReduceOp, init};

const POINTS: usize = 1000;
const STEPS: usize = 200;

/// Points on a line with a slope of 3 and an offset of -1.
fn point(i: usize) -> (f32, f32) {
    let x = i as f32 / POINTS as f32 * 2.0 - 1.0;
    (x, 3.0 * x - 1.0)
}

/// Returns the gradient of the mean squared error of `slope * x + offset` over some points.
fn gradient([slope, offset]: [f32; 2], points: &[(f32, f32)]) -> [f32; 2] {
    let mut sums = [0.0; 2];
    for (x, y) in points {
        let error = slope * x + offset - y;
        sums[0] += 2.0 * error * x;
        sums[1] += 2.0 * error;
    }
    sums.map(|sum| sum / points.len().max(1) as f32)
}

/// Training loop of one rank: the same on all ranks, each on its own points.
fn train(mut group: ProcessGroup) -> Result<[f32; 2], GroupError> {
    let (rank, world) = (group.rank().index(), group.world_size());
    // Uneven on purpose: rank 0 takes two parts of `world + 1`.
    let bound = |part: usize| part * POINTS / (world + 1);
    let first = if rank == 0 { 0 } else { bound(rank + 1) };
    let points: Vec<(f32, f32)> = (first..bound(rank + 2)).map(point).collect();

    let mut line = [rank as f32, 7.0];
    group.broadcast(&mut line, Rank(0))?;
    for _ in 0..STEPS {
        let mut gradient = gradient(line, &points);
        // The mean over all points, not over ranks.
        group.all_reduce(&mut gradient, ReduceOp::Mean { weight: points.len() as f64 })?;
        line = [line[0] - 0.3 * gradient[0], line[1] - 0.3 * gradient[1]];
    }
    Ok(line)
}

fn main() -> Result<(), Box<dyn Error>> {
    let world = std::env::args().nth(1).map_or(Ok(4), |threads| threads.parse())?;
    if world == 0 {
        return Err("a group needs a thread".into());
    }
    let lines: Vec<Result<[f32; 2], GroupError>> = thread::scope(|scope| {
        let threads: Vec<_> =
            init(world).into_iter().map(|group| scope.spawn(|| train(group))).collect();
        threads.into_iter().map(|thread| thread.join().expect("nothing here panics")).collect()
    });
    for (rank, line) in lines.into_iter().enumerate() {
        let [slope, offset] = line?;
        println!("rank {rank} slope {slope:.4} offset {offset:.4} bits {:x}", slope.to_bits());
    }
    Ok(())
}
