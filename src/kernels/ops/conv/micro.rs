//! Innermost loops of the direct CPU kernels of convolutions: tiles of sums in registers, for each
//! instruction set. A tile has `R` rows and `V` vectors of columns.

use pulp::Simd;

/// Available numbers of rows of a tile. Rows are cut into tiles of one of these.
const ROWS: [usize; 7] = [1, 2, 4, 6, 7, 8, 12];

/// Runs of fewer terms than this are combined in tiles of several runs.
const SHORT: usize = 8;

/// Returns the rows of the tiles that cut `count` rows at the least cost. The last tile may overlap
/// the one before it.
fn tile_rows(count: usize) -> usize {
    let fitting = ROWS.into_iter().filter(|rows| *rows <= count);
    // The cost of reading the vectors of weights does not depend on a tile's rows: the constant.
    fitting.min_by_key(|rows| count.div_ceil(*rows) * (2 * rows + 3)).unwrap_or(1)
}

/// Calls a method with the numbers of rows and of vectors as constants.
macro_rules! with_tile {
    ($rows:expr, $vectors:expr, $self:ident.$method:ident($($arg:expr),*)) => {
        match ($rows, $vectors) {
            (1, 1) => $self.$method::<S, 1, 1>($($arg),*),
            (2, 1) => $self.$method::<S, 2, 1>($($arg),*),
            (4, 1) => $self.$method::<S, 4, 1>($($arg),*),
            (6, 1) => $self.$method::<S, 6, 1>($($arg),*),
            (7, 1) => $self.$method::<S, 7, 1>($($arg),*),
            (8, 1) => $self.$method::<S, 8, 1>($($arg),*),
            (12, 1) => $self.$method::<S, 12, 1>($($arg),*),
            (1, _) => $self.$method::<S, 1, 2>($($arg),*),
            (2, _) => $self.$method::<S, 2, 2>($($arg),*),
            (4, _) => $self.$method::<S, 4, 2>($($arg),*),
            (6, _) => $self.$method::<S, 6, 2>($($arg),*),
            (7, _) => $self.$method::<S, 7, 2>($($arg),*),
            (8, _) => $self.$method::<S, 8, 2>($($arg),*),
            (_, _) => $self.$method::<S, 12, 2>($($arg),*),
        }
    };
}

/// Repeats a block for each `$at` below a constant `$count`, which is at most the largest number of
/// rows of a tile. `$at` is a constant: sums in arrays with constant indices are registers.
macro_rules! repeat {
    ($count:expr, $at:ident, $body:block) => {
        repeat!(@ $count, $at, $body, 0 1 2 3 4 5 6 7 8 9 10 11)
    };
    (@ $count:expr, $at:ident, $body:block, $($each:literal)*) => {
        $({
            const $at: usize = $each;
            if $at < $count $body
        })*
    };
}

/// Number of floats in a vector of this machine.
pub(crate) fn lanes() -> usize {
    struct Lanes;
    impl pulp::WithSimd for Lanes {
        type Output = usize;

        fn with_simd<S: Simd>(self, _: S) -> usize {
            S::F32_LANES
        }
    }
    pulp::Arch::new().dispatch(Lanes)
}

/// Runs of terms: each begins at an offset in the panel and has `length` neighbouring elements.
#[derive(Clone)]
pub(crate) struct TermRuns {
    pub offsets: Vec<usize>,
    pub length: usize,
}

impl TermRuns {
    pub fn terms(&self) -> usize {
        self.offsets.len() * self.length
    }

    fn each(&self) -> impl Iterator<Item = usize> {
        self.offsets.iter().flat_map(|offset| *offset..offset + self.length)
    }

    /// The end of the elements that a place reads, relative to its own first element.
    fn end(&self) -> usize {
        match self.offsets.iter().max() {
            Some(last) => last + self.length,
            None => 0,
        }
    }
}

/// Sums of places of one row of a grid: at each of `count` places, `step` elements apart in `x`,
/// the sum over all terms of x times the weights of that term. `weights` is (terms, vectors), and
/// the values of the first `columns` columns go to `out`, `out_step` elements apart.
pub(crate) struct PlaceSums<'a> {
    pub x: &'a [f32],
    pub step: usize,
    pub count: usize,
    pub runs: &'a TermRuns,
    pub weights: &'a [f32],
    pub(crate) vectors: usize,
    pub columns: usize,
    pub out: &'a mut [f32],
    pub(crate) out_step: usize,
}

impl pulp::WithSimd for PlaceSums<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let rows = tile_rows(self.count);
        let end = (self.count - 1) * self.step + self.runs.end();
        assert!(end <= self.x.len(), "{end} of {}", self.x.len());
        let wanted = self.runs.terms() * self.vectors * S::F32_LANES;
        assert_eq!(self.weights.len(), wanted, "weights");
        for first in (0..self.count).step_by(rows) {
            let first = first.min(self.count - rows);
            with_tile!(rows, self.vectors, self.tile(simd, first));
        }
    }
}

impl PlaceSums<'_> {
    /// Computes the sums of `R` places.
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, first: usize) {
        let length = self.runs.length;
        let (weights, _) = S::as_simd_f32s(self.weights);
        let (weights, _) = weights.as_chunks::<V>();
        let mut sums = [[simd.splat_f32s(0.0); V]; R];
        for (offset, weights) in self.runs.offsets.iter().zip(weights.chunks_exact(length)) {
            let start = first * self.step + offset;
            let mut rows: [&[f32]; R] = [&[]; R];
            repeat!(R, ROW, {
                rows[ROW] = &self.x[start + ROW * self.step..][..length];
            });
            for term in 0..length {
                let by = &weights[term];
                repeat!(R, ROW, {
                    let x = simd.splat_f32s(rows[ROW][term]);
                    repeat!(V, AT, {
                        sums[ROW][AT] = simd.mul_add_e_f32s(x, by[AT], sums[ROW][AT]);
                    });
                });
            }
        }
        repeat!(R, ROW, {
            let out = &mut self.out[(first + ROW) * self.out_step..];
            repeat!(V, AT, {
                let start = (AT * S::F32_LANES).min(self.columns);
                let end = (start + S::F32_LANES).min(self.columns);
                simd.partial_store_f32s(&mut out[start..end], sums[ROW][AT]);
            });
        });
    }
}

/// Sums of the gradient by the weight: to each term and column, the products of x of the term and
/// dy of the column at all places are added. `dy` is (places, vectors), `sums` (terms, columns of
/// all blocks) with rows `sums_step` elements apart.
pub(crate) struct TermSums<'a> {
    pub x: &'a [f32],
    /// Elements from a picture to the next, from a row of places, and from a place.
    pub steps: [usize; 3],
    /// Pictures, rows of places of each, and places in a row.
    pub counts: [usize; 3],
    pub runs: &'a TermRuns,
    pub dy: &'a [f32],
    /// Elements from a place to the next in `dy`.
    pub(crate) dy_step: usize,
    pub(crate) vectors: usize,
    pub sums: &'a mut [f32],
    pub(crate) sums_step: usize,
}

impl pulp::WithSimd for TermSums<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let length = self.runs.length;
        let rows = tile_rows(length);
        let mut last = 0;
        for (count, step) in self.counts.into_iter().zip(self.steps) {
            last += (count - 1) * step;
        }
        assert!(last + self.runs.end() <= self.x.len(), "x");
        let places: usize = self.counts.iter().product();
        let dy_end = (places - 1) * self.dy_step + self.vectors * S::F32_LANES;
        assert!(dy_end <= self.dy.len(), "dy");
        if length < SHORT {
            let terms: Vec<usize> = self.runs.each().collect();
            let rows = tile_rows(terms.len());
            for begin in (0..terms.len()).step_by(rows) {
                with_tile!(rows, self.vectors, self.scattered_tile(simd, &terms, begin));
            }
            return;
        }
        for run in 0..self.runs.offsets.len() {
            for begin in (0..length).step_by(rows) {
                with_tile!(rows, self.vectors, self.tile(simd, run, begin));
            }
        }
    }
}

impl TermSums<'_> {
    /// Does the same as [`TermSums::tile`] for `R` terms of any runs; `terms` are the offsets of
    /// all terms.
    #[inline(always)]
    fn scattered_tile<S: Simd, const R: usize, const V: usize>(
        &mut self,
        simd: S,
        terms: &[usize],
        begin: usize,
    ) {
        let first = begin.min(terms.len() - R);
        let mut offsets = [0; R];
        offsets.copy_from_slice(&terms[first..first + R]);
        let [_, _, step] = self.steps;
        let mut sums = [[simd.splat_f32s(0.0); V]; R];
        for row in 0..self.counts[0] * self.counts[1] {
            let at = self.row(row);
            let mut dy = &self.dy[row * self.counts[2] * self.dy_step..];
            let length = (self.counts[2] - 1) * step + 1;
            let mut rows: [&[f32]; R] = [&[]; R];
            repeat!(R, ROW, {
                rows[ROW] = &self.x[at + offsets[ROW]..][..length];
            });
            for place in (0..length).step_by(step) {
                let (by, _) = S::as_simd_f32s(&dy[..V * S::F32_LANES]);
                repeat!(R, ROW, {
                    let x = simd.splat_f32s(rows[ROW][place]);
                    repeat!(V, AT, {
                        sums[ROW][AT] = simd.mul_add_e_f32s(x, by[AT], sums[ROW][AT]);
                    });
                });
                dy = dy.get(self.dy_step..).unwrap_or_default();
            }
        }
        repeat!(R, ROW, {
            if first + ROW >= begin {
                self.add(simd, first + ROW, &sums[ROW]);
            }
        });
    }

    /// Offset of the first place of a row; rows are numbered over all pictures.
    #[inline(always)]
    fn row(&self, row: usize) -> usize {
        row / self.counts[1] * self.steps[0] + row % self.counts[1] * self.steps[1]
    }

    /// Adds to the sums of a term.
    #[inline(always)]
    fn add<S: Simd, const V: usize>(&mut self, simd: S, term: usize, own: &[S::f32s; V]) {
        for (v, own) in own.iter().enumerate() {
            let at = term * self.sums_step + v * S::F32_LANES;
            let to = &mut self.sums[at..at + S::F32_LANES];
            let sum = simd.add_f32s(*own, simd.partial_load_f32s(to));
            simd.partial_store_f32s(to, sum);
        }
    }

    /// Adds to the sums of `R` terms of a run. The tile may begin before `begin`; the previous tile
    /// has already added to the terms before it.
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, run: usize, begin: usize) {
        let first = begin.min(self.runs.length - R);
        let [_, _, step] = self.steps;
        let mut sums = [[simd.splat_f32s(0.0); V]; R];
        for row in 0..self.counts[0] * self.counts[1] {
            let mut x = &self.x[self.runs.offsets[run] + first + self.row(row)..];
            let mut dy = &self.dy[row * self.counts[2] * self.dy_step..];
            for _ in 0..self.counts[2] {
                let (own, by) = (&x[..R], &dy[..V * S::F32_LANES]);
                let (by, _) = S::as_simd_f32s(by);
                repeat!(R, ROW, {
                    let x = simd.splat_f32s(own[ROW]);
                    repeat!(V, AT, {
                        sums[ROW][AT] = simd.mul_add_e_f32s(x, by[AT], sums[ROW][AT]);
                    });
                });
                x = x.get(step..).unwrap_or_default();
                dy = dy.get(self.dy_step..).unwrap_or_default();
            }
        }
        repeat!(R, ROW, {
            if first + ROW >= begin {
                self.add(simd, run * self.runs.length + first + ROW, &sums[ROW]);
            }
        });
    }
}
