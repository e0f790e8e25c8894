//! Augmentation of pictures: random crops and flips, a pure function of (seed, step, sample).

use crate::base::Site;
use crate::base::rng::Key;

/// Site of the random numbers of augmentation.
const SITE: Site = Site(u32::MAX - 2);

/// Random changes of pictures `(channels, height, width)` that are trained on.
#[derive(Clone, Debug, PartialEq)]
pub struct Augmentation {
    pub channels: usize,
    pub height: usize,
    pub width: usize,
    /// Pixels by which a picture is padded on each side before it is cropped to its size at a
    /// random place; 0: not cropped.
    pub crop: usize,
    /// True to mirror half of the pictures left to right.
    pub flip: bool,
    /// Value of the padding by channel: black, as pictures are normalized.
    pub padding: Vec<f32>,
}

impl Augmentation {
    /// Changes the picture in slot `slot` of the batch of a step, in place.
    pub fn apply(&self, (seed, step, slot): (u64, u64, u32), picture: &mut [f32]) {
        let key = Key::new(seed).site(SITE).step(step);
        let [place, flip] = key.words([slot, 0]);
        let (down, right) = self.shift(place);
        let is_flipped = self.flip && flip & 1 == 1;
        if (down, right) == (0, 0) && !is_flipped {
            return;
        }
        let size = self.height * self.width;
        for (channel, padding) in picture.chunks_mut(size).zip(&self.padding) {
            let from = channel.to_vec();
            for (index, to) in channel.iter_mut().enumerate() {
                let (row, column) = (index / self.width, index % self.width);
                let column = if is_flipped { self.width - 1 - column } else { column };
                let (row, column) = (row as isize + down, column as isize + right);
                let is_inside = (0..self.height as isize).contains(&row)
                    && (0..self.width as isize).contains(&column);
                *to = match is_inside {
                    true => from[row as usize * self.width + column as usize],
                    false => *padding,
                };
            }
        }
    }

    /// Returns by how many pixels the crop lies below and right of the picture.
    fn shift(&self, word: u32) -> (isize, isize) {
        let places = 2 * self.crop as u32 + 1;
        let offset = |word: u32| (word % places) as isize - self.crop as isize;
        (offset(word & 0xFFFF), offset(word >> 16))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn picture() -> Vec<f32> {
        (1..=18).map(|value| value as f32).collect()
    }

    fn augmented(crop: usize, flip: bool, at: (u64, u64, u32)) -> Vec<f32> {
        let padding = vec![-1.0, -2.0];
        let (channels, height, width) = (2, 3, 3);
        let augmentation = Augmentation { channels, height, width, crop, flip, padding };
        let mut picture = picture();
        augmentation.apply(at, &mut picture);
        picture
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
