//! Slices of named tensors: the part of a parameter that a rank of a tensor group holds.

use std::ops::Range;

/// Most dimensions of a tensor whose slice is read from a file: more than any op takes.
const DIMENSIONS_MAX: usize = 16;

/// Slice of a tensor: for each dimension one or more ranges, in ascending order, whose entries
/// follow each other in the slice. A packed tensor of queries, keys and values is cut in three
/// ranges of one dimension.
#[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "Raw", into = "Raw")]
pub struct TensorSlice {
    dims: Vec<usize>,
    ranges: Vec<Vec<Range<usize>>>,
}

/// Form of a slice in files: `[start, end]` of each range.
#[derive(Clone, serde::Serialize, serde::Deserialize)]
struct Raw {
    dims: Vec<usize>,
    ranges: Vec<Vec<[usize; 2]>>,
}

/// Ranges that are no slice of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SliceError {
    #[error("{ranges:?} are no ranges of dimension {dimension} of a tensor of {dims:?}")]
    Ranges { dims: Vec<usize>, dimension: usize, ranges: Vec<Range<usize>> },
    #[error("a tensor of {dims:?} has more elements than can be counted")]
    TooLarge { dims: Vec<usize> },
    #[error("a tensor of {dimensions} dimensions has more than the {DIMENSIONS_MAX} that are read")]
    TooManyDimensions { dimensions: usize },
}

impl TryFrom<Raw> for TensorSlice {
    type Error = SliceError;

    fn try_from(raw: Raw) -> Result<Self, SliceError> {
        // Each dimension is checked on a copy of the slice.
        if raw.dims.len() > DIMENSIONS_MAX {
            return Err(SliceError::TooManyDimensions { dimensions: raw.dims.len() });
        }
        let elements = raw.dims.iter().try_fold(1, |count: usize, dim| count.checked_mul(*dim));
        if elements.is_none() {
            return Err(SliceError::TooLarge { dims: raw.dims });
        }
        let mut slice = Self::whole(&raw.dims);
        if raw.ranges.len() != raw.dims.len() {
            let dimension = raw.ranges.len().min(raw.dims.len());
            return Err(SliceError::Ranges { dims: raw.dims, dimension, ranges: Vec::new() });
        }
        for (dimension, ranges) in raw.ranges.into_iter().enumerate() {
            let ranges: Vec<Range<usize>> =
                ranges.into_iter().map(|[start, end]| start..end).collect();
            slice = slice.with_ranges(dimension, &ranges)?;
        }
        Ok(slice)
    }
}

impl From<TensorSlice> for Raw {
    fn from(slice: TensorSlice) -> Self {
        let mut raw = Vec::with_capacity(slice.ranges.len());
        for ranges in slice.ranges {
            raw.push(ranges.into_iter().map(|range| [range.start, range.end]).collect());
        }
        Self { dims: slice.dims, ranges: raw }
    }
}

impl TensorSlice {
    /// Returns the slice that is the whole tensor.
    pub fn whole(dims: &[usize]) -> Self {
        let ranges = dims.iter().map(|dim| std::iter::once(0..*dim).collect()).collect();
        Self { dims: dims.to_vec(), ranges }
    }

    /// Returns the slice with other ranges of a dimension.
    ///
    /// # Errors
    /// Returns [`SliceError`] if there is no such dimension, or the ranges are none, empty, beyond
    /// it or not in ascending order.
    pub fn with_ranges(
        &self,
        dimension: usize,
        ranges: &[Range<usize>],
    ) -> Result<Self, SliceError> {
        if !self.has_ranges(dimension, ranges) {
            let dims = self.dims.clone();
            return Err(SliceError::Ranges { dims, dimension, ranges: ranges.to_vec() });
        }
        let mut slice = self.clone();
        slice.ranges[dimension] = ranges.to_vec();
        Ok(slice)
    }

    /// Returns true if these are ranges of a dimension: not empty, and in ascending order.
    fn has_ranges(&self, dimension: usize, ranges: &[Range<usize>]) -> bool {
        let Some(&size) = self.dims.get(dimension) else { return false };
        let mut end = 0;
        for range in ranges {
            if range.start < end || range.is_empty() || range.end > size {
                return false;
            }
            end = range.end;
        }
        !ranges.is_empty()
    }

    /// Returns the dimensions of the whole tensor.
    pub fn whole_dims(&self) -> &[usize] {
        &self.dims
    }

    /// Returns the ranges of a dimension.
    pub fn ranges(&self, dimension: usize) -> &[Range<usize>] {
        &self.ranges[dimension]
    }

    /// Returns the dimensions of the slice.
    pub fn dims(&self) -> Vec<usize> {
        self.ranges.iter().map(|ranges| total(ranges)).collect()
    }

    /// Returns true if the slice is the whole tensor.
    pub fn is_whole(&self) -> bool {
        self.dims() == self.dims
    }

    /// Returns the number of elements of the slice.
    pub fn elements(&self) -> usize {
        self.dims().iter().product()
    }

    /// Returns the ranges of elements of the whole tensor, in row-major order, that follow each
    /// other in the slice.
    pub fn runs(&self) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = std::iter::once(0..1).collect();
        for (size, ranges) in self.dims.iter().zip(&self.ranges) {
            let is_whole = total(ranges) == *size;
            let mut inner = Vec::new();
            for run in runs {
                if is_whole {
                    inner.push(run.start * size..run.end * size);
                    continue;
                }
                for entry in run {
                    let offset = entry * size;
                    inner.extend(ranges.iter().map(|of| offset + of.start..offset + of.end));
                }
            }
            runs = inner;
        }
        runs
    }

    /// Returns the slice as series of runs: one series, if it is cut in one range of one dimension.
    pub fn series(&self) -> Vec<RunSeries> {
        let cut: Vec<usize> = (0..self.dims.len())
            .filter(|&dimension| total(&self.ranges[dimension]) != self.dims[dimension])
            .collect();
        // Most slices are one series, which needs no list of runs.
        match cut[..] {
            [] => return vec![RunSeries::of(0, 0..self.elements())],
            [dimension] => {
                if let [range] = &self.ranges[dimension][..] {
                    let inner: usize = self.dims[dimension + 1..].iter().product();
                    return vec![RunSeries {
                        start: 0,
                        elements: self.elements(),
                        place: range.start * inner,
                        run: range.len() * inner,
                        distance: self.dims[dimension] * inner,
                    }];
                }
            }
            _ => {}
        }
        let mut series: Vec<RunSeries> = Vec::new();
        let mut elements = 0;
        for run in self.runs() {
            let is_next = series.last_mut().is_some_and(|last| last.extend(&run));
            if !is_next {
                series.push(RunSeries::of(elements, run.clone()));
            }
            elements += run.len();
        }
        series
    }

    /// Returns the values of the slice, given the values of the whole tensor.
    ///
    /// # Panics
    /// If `whole` has another number of elements than the tensor.
    pub fn cut<T: Copy>(&self, whole: &[T]) -> Vec<T> {
        assert_eq!(whole.len(), self.dims.iter().product::<usize>(), "a slice of {:?}", self.dims);
        let mut part = Vec::with_capacity(self.elements());
        for run in self.runs() {
            part.extend_from_slice(&whole[run]);
        }
        part
    }

    /// Writes the values of the slice to their places in the whole tensor.
    ///
    /// # Panics
    /// If one of the two has another number of elements than its dimensions.
    pub fn put<T: Copy>(&self, part: &[T], whole: &mut [T]) {
        assert_eq!(whole.len(), self.dims.iter().product::<usize>(), "a slice of {:?}", self.dims);
        assert_eq!(part.len(), self.elements(), "the slice {:?}", self.ranges);
        let mut rest = part;
        for run in self.runs() {
            let (values, others) = rest.split_at(run.len());
            whole[run].copy_from_slice(values);
            rest = others;
        }
    }
}

/// Elements of a slice whose places in the whole tensor are runs of one length, each at the same
/// distance from the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RunSeries {
    /// First element of the slice that is in the series, and the number of elements.
    pub start: usize,
    pub elements: usize,
    /// Place of the first element in the whole tensor.
    pub place: usize,
    /// Elements of a run, and from the start of one to the start of the next.
    pub run: usize,
    pub distance: usize,
}

impl RunSeries {
    /// Returns a series of one run, whose first element is `start` of the slice.
    fn of(start: usize, run: Range<usize>) -> Self {
        let elements = run.len();
        Self { start, elements, place: run.start, run: elements, distance: elements }
    }

    /// Adds a run at the end, if it belongs there; returns true if it did.
    fn extend(&mut self, run: &Range<usize>) -> bool {
        let runs = self.elements / self.run;
        let distance = if runs == 1 { run.start - self.place } else { self.distance };
        let belongs = run.len() == self.run && run.start == self.place + runs * distance;
        if belongs {
            self.distance = distance;
            self.elements += run.len();
        }
        belongs
    }

    /// Returns the place in the whole tensor of the element with this number in the series.
    pub fn place_of(&self, number: usize) -> usize {
        number / self.run * self.distance + self.place + number % self.run
    }
}

fn total(ranges: &[Range<usize>]) -> usize {
    ranges.iter().map(Range::len).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranges by their ends.
    fn ranges(ends: &[[usize; 2]]) -> Vec<Range<usize>> {
        ends.iter().map(|[start, end]| *start..*end).collect()
    }

    fn slice(dims: &[usize], of_dimensions: &[&[[usize; 2]]]) -> TensorSlice {
        let mut slice = TensorSlice::whole(dims);
        for (dimension, ends) in of_dimensions.iter().enumerate() {
            slice = slice.with_ranges(dimension, &ranges(ends)).unwrap();
        }
        slice
    }

    #[test]
    fn rows_and_columns_are_cut_and_put_back() {
        let whole: Vec<u32> = (0..24).collect();
        let all = slice(&[4, 6], &[]);
        assert!(all.is_whole());
        assert_eq!((all.runs(), all.cut(&whole)), (ranges(&[[0, 24]]), whole.clone()));

        let rows = slice(&[4, 6], &[&[[1, 3]]]);
        assert_eq!((rows.dims(), rows.runs()), (vec![2, 6], ranges(&[[6, 18]])));
        assert_eq!(rows.cut(&whole), (6..18).collect::<Vec<u32>>());

        // Two ranges of rows, as of packed queries, keys and values, and two of columns.
        let both = slice(&[4, 6], &[&[[0, 1], [2, 3]], &[[1, 2], [4, 6]]]);
        assert_eq!((both.dims(), both.is_whole()), (vec![2, 3], false));
        assert_eq!(both.cut(&whole), [1, 4, 5, 13, 16, 17]);
        let mut back = vec![99; 24];
        both.put(&both.cut(&whole), &mut back);
        let expected: Vec<u32> =
            whole.iter().map(|x| if both.cut(&whole).contains(x) { *x } else { 99 }).collect();
        assert_eq!(back, expected);
    }

    #[test]
    fn series_have_the_places_of_the_runs() {
        let count = |slice: &TensorSlice| {
            let series = slice.series();
            let places: Vec<usize> = series
                .iter()
                .flat_map(|series| (0..series.elements).map(|number| series.place_of(number)))
                .collect();
            assert_eq!(places, slice.runs().into_iter().flatten().collect::<Vec<_>>());
            let mut end = 0;
            for one in &series {
                assert_eq!(one.start, end);
                end += one.elements;
            }
            assert_eq!(end, slice.elements());
            series.len()
        };
        assert_eq!(count(&slice(&[], &[])), 1);
        assert_eq!(count(&slice(&[4, 6], &[])), 1);
        assert_eq!(count(&slice(&[4, 6], &[&[[1, 3]]])), 1);
        assert_eq!(count(&slice(&[4, 6], &[&[[0, 4]], &[[2, 5]]])), 1);
        assert_eq!(count(&slice(&[3, 4, 5], &[&[[0, 3]], &[[1, 2]]])), 1);
        // Packed queries, keys and values: columns of all rows, and their bias.
        assert_eq!(count(&slice(&[4, 12], &[&[[0, 4]], &[[2, 4], [6, 8], [10, 12]]])), 1);
        assert_eq!(count(&slice(&[12], &[&[[2, 4], [6, 8], [10, 12]]])), 1);
        // Fewer keys than queries.
        assert_eq!(count(&slice(&[8], &[&[[2, 4], [5, 6], [7, 8]]])), 2);
        assert_eq!(count(&slice(&[2, 8], &[&[[0, 2]], &[[2, 4], [5, 6], [7, 8]]])), 4);
        assert_eq!(count(&slice(&[4, 6], &[&[[0, 1], [2, 3]], &[[1, 2], [4, 6]]])), 4);
    }

    #[test]
    fn a_scalar_is_a_slice_and_columns_of_three_dimensions_are_runs() {
        assert_eq!(slice(&[], &[]).cut(&[7.5]), [7.5]);
        let inner = slice(&[2, 2, 3], &[&[[0, 2]], &[[1, 2]]]);
        assert_eq!(inner.runs(), ranges(&[[3, 6], [9, 12]]));
    }

    #[test]
    fn ranges_that_are_no_slice_are_refused() {
        let whole = TensorSlice::whole(&[4]);
        for ends in [&[[2, 2]][..], &[[0, 5]], &[[2, 3], [0, 1]], &[[0, 2], [1, 3]], &[]] {
            assert!(whole.with_ranges(0, &ranges(ends)).is_err(), "{ends:?}");
        }
        assert!(whole.with_ranges(1, &ranges(&[[0, 1]])).is_err());
        let error = serde_json::from_str::<TensorSlice>(r#"{"dims":[2],"ranges":[[[2,3]]]}"#);
        assert!(error.unwrap_err().to_string().contains("[2..3] are no ranges of dimension 0"));
        let huge = r#"{"dims":[4294967296,4294967296],"ranges":[[[0,1]],[[0,1]]]}"#;
        let error = serde_json::from_str::<TensorSlice>(huge).unwrap_err().to_string();
        assert!(error.contains("more elements than can be counted"), "{error}");
        let of_ones = |dimensions: usize| {
            let (dims, ranges) = (vec![1; dimensions], vec![[[0, 1]]; dimensions]);
            let json = serde_json::json!({ "dims": dims, "ranges": ranges });
            serde_json::from_value::<TensorSlice>(json).map_err(|error| error.to_string())
        };
        assert!(of_ones(DIMENSIONS_MAX).unwrap().is_whole());
        let error = of_ones(100_000).unwrap_err();
        assert!(error.contains("100000 dimensions has more than the 16"), "{error}");
        let error = serde_json::from_str::<TensorSlice>(r#"{"dims":[2],"ranges":[]}"#);
        assert!(error.is_err());
        let json = r#"{"dims":[4,2],"ranges":[[[0,1],[2,4]],[[0,2]]]}"#;
        let read: TensorSlice = serde_json::from_str(json).unwrap();
        assert_eq!(read, slice(&[4, 2], &[&[[0, 1], [2, 4]]]));
        assert_eq!(serde_json::to_string(&read).unwrap(), json);
    }
}
