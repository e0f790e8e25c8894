//! Counter-based random numbers: a value is a pure function of a key and a counter, so that a
//! run can be resumed, resharded or replayed at any sample without any generator state.
//!
//! Threefry-2x32 with 20 rounds: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy
//! as 1, 2, 3", SC 2011. It needs additions, rotations and exclusive ors of 32 bits only, so
//! `shaders/lib/rng.wgsl` computes the same bits on every device.

use super::Site;

const ROTATIONS: [[u32; 4]; 2] = [[13, 15, 26, 6], [17, 29, 16, 24]];
const PARITY: u32 = 0x1BD1_1BDA;

/// One block of Threefry-2x32-20: two random words from a key and a counter.
// Inlined into loops that are compiled for several instruction sets, where it becomes vectors.
#[inline(always)]
pub fn threefry2x32(key: [u32; 2], counter: [u32; 2]) -> [u32; 2] {
    let keys = [key[0], key[1], PARITY ^ key[0] ^ key[1]];
    let mut x = [counter[0].wrapping_add(keys[0]), counter[1].wrapping_add(keys[1])];
    for group in 0..5 {
        for rotation in ROTATIONS[group % 2] {
            x[0] = x[0].wrapping_add(x[1]);
            x[1] = x[1].rotate_left(rotation) ^ x[0];
        }
        let injected = group + 1;
        x[0] = x[0].wrapping_add(keys[injected % 3]);
        x[1] = x[1].wrapping_add(keys[(injected + 1) % 3]).wrapping_add(injected as u32);
    }
    x
}

/// Random-number key for one purpose in one step: all random numbers at a [`Site`] are drawn from
/// it with the sample id and the element's index as the counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Key(pub [u32; 2]);

impl Key {
    /// Returns the key of a whole run.
    pub fn new(seed: u64) -> Self {
        Self([seed as u32, (seed >> 32) as u32])
    }

    /// Returns the key of a step of a run. Steps count from 1; 0 is for random numbers drawn
    /// before the first step.
    #[must_use]
    pub fn step(self, step: u64) -> Self {
        Self(threefry2x32(self.0, [step as u32, (step >> 32) as u32 | 0x8000_0000]))
    }

    /// Returns the key of a site within this key's scope.
    #[must_use]
    pub fn site(self, site: Site) -> Self {
        Self(threefry2x32(self.0, [site.0, 0x4000_0000]))
    }

    /// Returns two random words for a counter.
    pub fn words(self, counter: [u32; 2]) -> [u32; 2] {
        threefry2x32(self.0, counter)
    }

    /// Returns a number from the standard normal distribution (Box and Muller 1958), for counter
    /// `index`.
    pub fn normal(self, index: u64) -> f64 {
        let [a, b] = self.words([index as u32, (index >> 32) as u32]);
        // In (0, 1], so that the logarithm is finite.
        let u = (f64::from(a) + 1.0) / 4_294_967_296.0;
        let angle = std::f64::consts::TAU * f64::from(b) / 4_294_967_296.0;
        // Not the platform's functions: their last digits differ between platforms.
        (-2.0 * libm::log(u)).sqrt() * libm::cos(angle)
    }

    /// Returns a number uniform in `[0, 1)`, for counter `index`.
    pub fn uniform(self, index: u64) -> f64 {
        let [a, _] = self.words([index as u32, (index >> 32) as u32]);
        f64::from(a) / 4_294_967_296.0
    }
}

/// Returns the threshold for dropout with probability `p`, the smallest word that is kept: a word
/// `w` is kept if `w >= drop_threshold(p)`.
pub fn drop_threshold(p: f32) -> u32 {
    (f64::from(p) * 4_294_967_296.0).min(4_294_967_295.0) as u32
}

/// Returns the factor of values that dropout with probability `p` keeps, `1 / (1 - p)`; 0 for
/// `p = 1`, whose threshold still keeps one word of 2^32.
pub fn kept_factor(p: f32) -> f64 {
    if p < 1.0 { 1.0 / (1.0 - f64::from(p)) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers published with the authors' reference implementation.
    #[test]
    fn threefry_gives_the_published_words() {
        assert_eq!(threefry2x32([0, 0], [0, 0]), [0x6b20_0159, 0x99ba_4efe]);
        assert_eq!(threefry2x32([!0, !0], [!0, !0]), [0x1cb9_96fc, 0xbb00_2be7]);
        assert_eq!(
            threefry2x32([0x1319_8a2e, 0x0370_7344], [0x243f_6a88, 0x85a3_08d3]),
            [0xc492_3a9c, 0x483d_f7a0]
        );
    }

    #[test]
    fn normals_have_mean_zero_and_variance_one() {
        let key = Key::new(7).site(Site(3));
        let values: Vec<f64> = (0..40_000).map(|i| key.normal(i)).collect();
        let mean = values.iter().sum::<f64>() / 40_000.0;
        let variance = values.iter().map(|v| v * v).sum::<f64>() / 40_000.0 - mean * mean;
        assert!(mean.abs() < 0.02, "{mean}");
        assert!((variance - 1.0).abs() < 0.03, "{variance}");
    }

    #[test]
    fn keys_differ_by_seed_step_and_site() {
        let keys = [
            Key::new(1),
            Key::new(2),
            Key::new(1).step(1),
            Key::new(1).step(2),
            Key::new(1).site(Site(1)),
            Key::new(1).step(1).site(Site(1)),
        ];
        for (i, a) in keys.iter().enumerate() {
            assert!(keys[..i].iter().all(|b| a != b));
        }
    }
}
