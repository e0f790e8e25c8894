//! Augmentation of pictures: random crops and flips, a pure function of (seed, step, sample).

use super::{DataError, SampleDescription, has_channels_last};
use potluck_core::rng::Key;
use potluck_core::{Setting, Site, Wording};

/// Site of the random numbers of augmentation.
const SITE: Site = Site(u32::MAX - 2);

fn refused(why: Wording) -> DataError {
    DataError::Invalid { name: "augmentation".into(), place: String::new(), why }
}

/// Random changes of training pictures `(channels, height, width)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Augmentation {
    height: usize,
    width: usize,
    crop: usize,
    flip: bool,
    /// Value of the padding of each channel: black, as pictures are normalized.
    padding: Vec<f32>,
}

impl Augmentation {
    /// Creates random changes of pictures of a data set: each is padded on all sides by `crop`
    /// black pixels and cropped to its size at a random place (0: not cropped), and with `flip` one
    /// in two is mirrored left to right.
    ///
    /// # Errors
    /// Returns `DataError::Invalid` if the samples are not pictures `[channels, height, width]`, or
    /// have no pixels, or if `crop` is larger than the pictures.
    pub fn new(samples: &SampleDescription, crop: usize, flip: bool) -> Result<Self, DataError> {
        let shape = &samples.shape;
        let [channels, height, width] = shape[..] else {
            return Err(refused(Wording::new(format_args!(
                "{} and {} change pictures, and the samples have the shape {shape:?}; leave them \
                 out",
                Setting::Crop,
                Setting::Flip
            ))));
        };
        if has_channels_last(shape) {
            return Err(refused(Wording::new(format_args!(
                "{} and {} change pictures of channels, height and width, and those of {shape:?} \
                 have their channels last; save them as by numpy.transpose(pictures, (0, 3, 1, 2))",
                Setting::Crop,
                Setting::Flip
            ))));
        }
        if shape.contains(&0) {
            return Err(refused(format!("pictures of the shape {shape:?} have no pixels").into()));
        }
        // A larger shift would leave only padding.
        if crop > height.max(width) {
            return Err(refused(Wording::new(format_args!(
                "{} = {crop} is more than the size of the pictures, {height} x {width}; lower it",
                Setting::Crop
            ))));
        }

        let mut padding = vec![0.0; channels];
        for (black, scale) in padding.iter_mut().zip(&samples.normalization.features) {
            *black = scale.normalize(0.0);
        }
        Ok(Self { height, width, crop, flip, padding })
    }

    /// Returns the shape of the pictures: channels, height, width.
    pub fn shape(&self) -> [usize; 3] {
        [self.padding.len(), self.height, self.width]
    }

    /// Changes the picture in a slot of the batch of a step, in place; `draw` is the seed, the step
    /// and the slot.
    ///
    /// # Panics
    /// If the picture does not have the shape of the augmentation.
    pub fn apply(&self, draw: (u64, u64, u32), picture: &mut [f32]) {
        let (seed, step, slot) = draw;
        let size = self.height * self.width;
        assert_eq!(picture.len(), size * self.padding.len(), "a picture of another shape");
        let key = Key::new(seed).site(SITE).step(step);
        let [place, flip] = key.words([slot, 0]);
        let (down, right) = self.shift(place);
        let is_flipped = self.flip && flip & 1 == 1;
        if (down, right) == (0, 0) && !is_flipped {
            return;
        }
        for (channel, padding) in picture.chunks_mut(size).zip(&self.padding) {
            let from = channel.to_vec();
            for (index, to) in channel.iter_mut().enumerate() {
                let mut column = index % self.width;
                if is_flipped {
                    column = self.width - 1 - column;
                }
                let row = (index / self.width) as isize + down;
                let column = column as isize + right;
                let is_inside = (0..self.height as isize).contains(&row)
                    && (0..self.width as isize).contains(&column);
                *to = if is_inside {
                    from[row as usize * self.width + column as usize]
                } else {
                    *padding
                };
            }
        }
    }

    /// Offset of the crop from the picture, in pixels down and to the right.
    fn shift(&self, word: u32) -> (isize, isize) {
        let places = 2 * self.crop as u32 + 1;
        let offset = |word: u32| (word % places) as isize - self.crop as isize;
        (offset(word & 0xFFFF), offset(word >> 16))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MeanStd, Normalization, TargetNames};
    use std::collections::HashSet;

    /// Describes samples whose black is -1 in the first channel, and -2 in the second.
    fn pictures(shape: &[usize]) -> SampleDescription {
        let features = [1.0, 2.0].map(|mean| MeanStd { mean, std: 1.0 }).to_vec();
        SampleDescription {
            shape: shape.to_vec(),
            columns: Vec::new(),
            target_columns: Vec::new(),
            targets: TargetNames::Values(vec!["y".into()]),
            normalization: Normalization { features, targets: Vec::new() },
        }
    }

    fn picture() -> Vec<f32> {
        (1..=18).map(|value| value as f32).collect()
    }

    fn augmented(crop: usize, flip: bool, at: (u64, u64, u32)) -> Vec<f32> {
        let augmentation = Augmentation::new(&pictures(&[2, 3, 3]), crop, flip).unwrap();
        let mut picture = picture();
        augmentation.apply(at, &mut picture);
        picture
    }

    #[test]
    fn samples_that_are_no_pictures_are_refused() {
        let refused = |shape: &[usize], crop| {
            Augmentation::new(&pictures(shape), crop, true).unwrap_err().to_string()
        };
        assert!(refused(&[12], 1).contains("change pictures, and the samples have the shape [12]"));
        assert!(refused(&[1, 0, 4], 1).contains("have no pixels"));
        assert!(refused(&[28, 28, 1], 1).contains("have their channels last"));
        assert!(refused(&[1, 4, 4], 5).contains("more than the size of the pictures, 4 x 4"));
    }

    #[test]
    fn pictures_without_figures_for_each_channel_are_padded_with_black() {
        let augmentation = Augmentation::new(&pictures(&[3, 1, 1]), 1, false).unwrap();
        let mut padded = HashSet::new();
        for slot in 0..100 {
            let mut picture = [5.0; 3];
            augmentation.apply((1, 1, slot), &mut picture);
            padded.insert(picture.map(f32::to_bits));
        }
        assert_eq!(
            padded,
            HashSet::from([[5.0; 3], [-1.0, -2.0, 0.0]].map(|p| p.map(f32::to_bits)))
        );
    }

    #[test]
    #[should_panic(expected = "a picture of another shape")]
    fn a_picture_of_another_shape_is_a_mistake_of_the_caller() {
        let augmentation = Augmentation::new(&pictures(&[2, 3, 3]), 1, true).unwrap();
        augmentation.apply((1, 1, 1), &mut [0.0; 9]);
    }

    #[test]
    fn half_of_the_pictures_are_mirrored() {
        let flipped = [3, 2, 1, 6, 5, 4, 9, 8, 7, 12, 11, 10, 15, 14, 13, 18, 17, 16];
        let flipped = flipped.map(|value| value as f32).to_vec();
        let all: Vec<Vec<f32>> = (0..200).map(|slot| augmented(0, true, (7, 1, slot))).collect();
        let count = all.iter().filter(|found| **found == flipped).count();
        assert!((70..130).contains(&count), "{count}");
        assert_eq!(all.iter().filter(|found| **found == picture()).count(), 200 - count);
    }

    #[test]
    fn crops_come_from_every_place_of_the_padded_picture() {
        let at = |slot| augmented(1, false, (7, 1, slot));
        let found: HashSet<Vec<u32>> =
            (0..300).map(|slot| at(slot).iter().map(|v| v.to_bits()).collect()).collect();
        assert_eq!(found.len(), 9);
        let upper_left = [-1, -1, -1, -1, 1, 2, -1, 4, 5, -2, -2, -2, -2, 10, 11, -2, 13, 14];
        let bits = upper_left.map(|value| (value as f32).to_bits()).to_vec();
        assert!(found.contains(&bits));
    }

    #[test]
    fn changes_depend_on_the_seed_the_step_and_the_sample_alone() {
        let slots = |seed, step| -> Vec<Vec<f32>> {
            (0..50).map(|slot| augmented(1, true, (seed, step, slot))).collect()
        };
        assert_eq!(slots(1, 1), slots(1, 1));
        assert_ne!(slots(1, 1), slots(2, 1));
        assert_ne!(slots(1, 1), slots(1, 2));
        assert_eq!(augmented(0, false, (1, 1, 1)), picture());
    }
}
