//! Random numbers by seed.

use potluck_core::rng::threefry2x32;

/// Random words, as many as are asked for: a key and how many were drawn.
pub struct Dice(pub u32, pub u32);

impl Dice {
    pub fn word(&mut self) -> u32 {
        self.1 = self.1.wrapping_add(1);
        threefry2x32([self.0, 0], [self.1, 0])[0]
    }

    pub fn below(&mut self, end: usize) -> usize {
        self.word() as usize % end
    }

    /// Of any sign and of magnitudes far apart, so that sums in another order differ.
    pub fn value(&mut self) -> f32 {
        let mantissa = (self.word() as i32) as f32 / 2f32.powi(31);
        mantissa * 2f32.powi((self.word() % 24) as i32 - 12)
    }
}
