//! Angles of rotary positions, with the scalings by which models extend their context.

use std::f64::consts::TAU;

/// Angles of rotary positions (Su et al. 2021): pair `i` of a head of `d` columns is rotated by
/// `position * theta^(-2i/d)`, scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryAngles {
    pub theta: f64,
    pub scaling: RotaryScaling,
}

/// Scaling of the frequencies, as Hugging Face's `rope_type` names it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RotaryScaling {
    /// `default`: none.
    None,
    /// `linear`: all are divided by the factor (Chen et al. 2023).
    Linear { factor: f64 },
    /// `llama3`: frequencies with wavelengths above `context / low` are divided by the factor, with
    /// wavelengths below `context / high` kept, and between them interpolated (Llama 3.1).
    Llama3 { factor: f64, low: f64, high: f64, context: f64 },
}

impl RotaryAngles {
    /// Returns the table `(positions, d)`: `d/2` cosines, then the sines, of each position.
    pub fn table(&self, dims: &[usize]) -> Vec<f64> {
        let [positions, d] = *dims else { panic!("a table of angles is (positions, d)") };
        let frequencies = self.frequencies(d);
        let mut table = Vec::with_capacity(positions * d);
        for position in 0..positions {
            let angles: Vec<f64> =
                frequencies.iter().map(|frequency| position as f64 * frequency).collect();
            table.extend(angles.iter().map(|angle| libm::cos(*angle)));
            table.extend(angles.iter().map(|angle| libm::sin(*angle)));
        }
        table
    }

    /// Returns the angle per position of each pair of columns of a head of `d`.
    pub fn frequencies(&self, d: usize) -> Vec<f64> {
        (0..d / 2).map(|pair| self.frequency(pair, d)).collect()
    }

    /// Angle per position of a pair of columns of a head.
    fn frequency(&self, pair: usize, d: usize) -> f64 {
        let plain = libm::pow(self.theta, -2.0 * pair as f64 / d as f64);
        match self.scaling {
            RotaryScaling::None => plain,
            RotaryScaling::Linear { factor } => plain / factor,
            RotaryScaling::Llama3 { factor, low, high, context } => {
                let wavelength = TAU / plain;
                if wavelength < context / high {
                    return plain;
                }
                if wavelength > context / low {
                    return plain / factor;
                }
                let smooth = (context / wavelength - low) / (high - low);
                (1.0 - smooth) * plain / factor + smooth * plain
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frequencies(scaling: RotaryScaling) -> Vec<f64> {
        let angles = RotaryAngles { theta: 10_000.0, scaling };
        (0..4).map(|pair| angles.frequency(pair, 8)).collect()
    }

    #[test]
    fn frequencies_fall_by_a_constant_factor() {
        for (got, wanted) in frequencies(RotaryScaling::None).iter().zip([1.0, 0.1, 0.01, 0.001]) {
            assert!((got - wanted).abs() < 1e-15, "{got} for {wanted}");
        }
        let slower = frequencies(RotaryScaling::Linear { factor: 4.0 });
        assert!((slower[1] - 0.025).abs() < 1e-15, "{slower:?}");
    }

    /// Wavelengths 6.3, 63, 628 and 6283 of a model of 512 positions.
    #[test]
    fn llama3_scales_what_is_longer_than_the_context() {
        let scaling = RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, context: 512.0 };
        let [kept, near, long, longest] = frequencies(scaling)[..] else { panic!("4 pairs") };
        assert_eq!((kept, longest), (1.0, 0.001f64 / 8.0));
        assert!((near - 0.1).abs() < 1e-15, "63 is below 128: {near}");
        assert!((long - 0.01 / 8.0).abs() < 1e-15, "628 is above 512: {long}");
        // In the middle of the interpolation: 512 / wavelength = 2.5.
        let theta = (TAU * 2.5 / 512.0_f64).powi(-4);
        let angles = RotaryAngles { theta, scaling };
        let plain = theta.powf(-0.25);
        let between = angles.frequency(1, 8);
        assert!((between - plain * (0.5 / 8.0 + 0.5)).abs() < 1e-12, "{between}");
    }

    #[test]
    fn a_table_has_cosines_then_sines_of_each_position() {
        let angles = RotaryAngles { theta: 10_000.0, scaling: RotaryScaling::None };
        let table = angles.table(&[3, 4]);
        assert_eq!(table[..4], [1.0, 1.0, 0.0, 0.0]);
        let expected = [2f64.cos(), 0.02f64.cos(), 2f64.sin(), 0.02f64.sin()];
        for (got, wanted) in table[8..].iter().zip(expected) {
            assert!((got - wanted).abs() < 1e-15, "{table:?}");
        }
    }
}
