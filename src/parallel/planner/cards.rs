//! Cards by name, with the peaks of their data sheets and the fractions of them that the kernels of
//! this project are expected to reach: for plans of machines that are not here.

use potluck_core::format::listed;

/// Designer of a card, on which the fractions of the peaks depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CardMaker {
    /// Cards for desktops, whose matrix units sum in f32 at half rate.
    GeForce,
    /// Cards for data centers, with stacked memory, whose matrix units are fed by instructions that
    /// no portable shader has.
    NvidiaDataCenter,
    /// RDNA 2, one instruction at a time.
    AmdRdna2,
    /// RDNA 3 and later, whose data sheets count two instructions at a time.
    AmdRdna3,
    IntelArc,
    Apple,
}

/// Fractions of the data sheet's peaks that kernels reach.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReachedFractions {
    /// Matrix products in f32, of the vector units.
    pub product: f64,
    /// Attention in f32, of the vector units.
    pub attention: f64,
    /// Products of f16 operands with f32 sums, of the matrix units.
    pub matrix: f64,
    /// Memory bandwidth.
    pub bandwidth: f64,
}

/// Fractions on GeForce, by estimates from the traffic of the tiles in shared memory; those of
/// matrix units between the 0.32 reported for cooperative matrices on a 3090 and 0.5.
const GEFORCE: ReachedFractions =
    ReachedFractions { product: 0.50, attention: 0.35, matrix: 0.42, bandwidth: 0.82 };

/// As on GeForce, but a fifth of the matrix units, without warp-group instructions, and less of the
/// stacked memory's bandwidth.
const DATA_CENTER: ReachedFractions =
    ReachedFractions { product: 0.50, attention: 0.35, matrix: 0.20, bandwidth: 0.62 };

/// Of single issue: 0.75 of it in products, and 0.50 in attention.
const RDNA2: ReachedFractions =
    ReachedFractions { product: 0.75, attention: 0.50, matrix: 0.45, bandwidth: 0.80 };

/// Half of [`RDNA2`], because the peak counts dual issue.
const RDNA3: ReachedFractions =
    ReachedFractions { product: 0.375, attention: 0.25, matrix: 0.45, bandwidth: 0.80 };

/// Of the data sheet, of which an A770 reaches 14 of 19.7 TFLOP/s in multiply-adds: half of those
/// in products, and 0.30 in attention.
const ARC: ReachedFractions =
    ReachedFractions { product: 0.355, attention: 0.21, matrix: 0.0, bandwidth: 0.75 };

/// By the figures of an M2.
const APPLE: ReachedFractions =
    ReachedFractions { product: 0.55, attention: 0.40, matrix: 0.0, bandwidth: 0.85 };

impl CardMaker {
    /// Returns the fractions of the peaks that kernels reach on the maker's cards.
    pub const fn reached(self) -> ReachedFractions {
        match self {
            Self::GeForce => GEFORCE,
            Self::NvidiaDataCenter => DATA_CENTER,
            Self::AmdRdna2 => RDNA2,
            Self::AmdRdna3 => RDNA3,
            Self::IntelArc => ARC,
            Self::Apple => APPLE,
        }
    }
}

/// Connection of a card with its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CardBus {
    /// PCI Express of this generation, with this number of lanes.
    Pcie { generation: u32, lanes: u32 },
    /// The card is in the processor, and has the memory of the host.
    Shared,
}

impl CardBus {
    /// Returns the nominal bytes per second in each direction; `None` if the host has the memory.
    pub fn nominal_bytes_per_s(self) -> Option<f64> {
        match self {
            Self::Shared => None,
            Self::Pcie { generation, lanes } => {
                // 8 GT/s of 128 in 130 bits from generation 3 on, and twice as much with each.
                let lane = 8e9 * 128.0 / 130.0 / 8.0 * 2f64.powi(generation as i32 - 3);
                Some(lane * f64::from(lanes))
            }
        }
    }
}

/// Card, with the peaks of its data sheet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Card {
    /// Name without those of its maker.
    pub name: &'static str,
    /// Names under which drivers know it, if they do not end with `name`.
    others: &'static [&'static str],
    pub maker: CardMaker,
    /// Peak in f32 of the vector units, in TFLOP/s.
    pub f32_tflops: f64,
    /// Peak of the matrix units with f16 operands and f32 sums, in TFLOP/s; `None` if shaders
    /// cannot use them.
    pub matrix_tflops: Option<f64>,
    /// Memory bandwidth in GB/s.
    pub gb_s: f64,
    /// Memory in GiB; `None` if it is the host's.
    pub gib: Option<f64>,
    pub bus: CardBus,
}

const fn card(
    name: &'static str,
    maker: CardMaker,
    peaks: [f64; 3],
    gib: u32,
    bus: [u32; 2],
) -> Card {
    let [f32_tflops, matrix, gb_s] = peaks;
    Card {
        name,
        others: &[],
        maker,
        f32_tflops,
        matrix_tflops: if matrix > 0.0 { Some(matrix) } else { None },
        gb_s,
        gib: Some(gib as f64),
        bus: CardBus::Pcie { generation: bus[0], lanes: bus[1] },
    }
}

const fn shared(name: &'static str, maker: CardMaker, peaks: [f64; 3]) -> Card {
    Card { gib: None, bus: CardBus::Shared, ..card(name, maker, peaks, 0, [0, 0]) }
}

use CardMaker::{AmdRdna2, AmdRdna3, Apple, GeForce, IntelArc, NvidiaDataCenter};

/// All cards, by maker. Peaks are those of the makers' data sheets, good to a few percent: f32
/// TFLOP/s, TFLOP/s of the matrix units (0: none that a shader can use), GB/s; then GiB, and the
/// generation and lanes of PCI Express.
pub const CARDS: &[Card] = &[
    card("RTX 3060", GeForce, [12.7, 25.0, 360.0], 12, [4, 16]),
    card("RTX 3070", GeForce, [20.3, 41.0, 448.0], 8, [4, 16]),
    card("RTX 3080", GeForce, [29.8, 60.0, 760.0], 10, [4, 16]),
    card("RTX 3090", GeForce, [35.6, 71.0, 936.0], 24, [4, 16]),
    card("RTX 4060", GeForce, [15.1, 30.0, 272.0], 8, [4, 8]),
    card("RTX 4060 Ti", GeForce, [22.1, 44.0, 288.0], 8, [4, 8]),
    card("RTX 4070", GeForce, [29.1, 58.0, 504.0], 12, [4, 16]),
    card("RTX 4070 Ti", GeForce, [40.1, 80.0, 504.0], 12, [4, 16]),
    card("RTX 4080", GeForce, [48.7, 97.0, 717.0], 16, [4, 16]),
    card("RTX 4090", GeForce, [82.6, 165.0, 1_008.0], 24, [4, 16]),
    card("RTX 5070", GeForce, [30.9, 62.0, 672.0], 12, [5, 16]),
    card("RTX 5070 Ti", GeForce, [43.9, 88.0, 896.0], 16, [5, 16]),
    card("RTX 5080", GeForce, [56.3, 113.0, 960.0], 16, [5, 16]),
    card("RTX 5090", GeForce, [104.8, 210.0, 1_792.0], 32, [5, 16]),
    Card {
        others: &["A100", "A100 SXM4 80GB", "A100 PCIe 80GB"],
        ..card("A100 80 GB", NvidiaDataCenter, [19.5, 312.0, 2_039.0], 80, [4, 16])
    },
    Card {
        others: &["H100", "H100 80GB HBM3"],
        ..card("H100 SXM", NvidiaDataCenter, [67.0, 989.0, 3_350.0], 80, [5, 16])
    },
    card("H200", NvidiaDataCenter, [67.0, 989.0, 4_800.0], 141, [5, 16]),
    card("RX 6600", AmdRdna2, [8.9, 0.0, 224.0], 8, [4, 8]),
    card("RX 6700 XT", AmdRdna2, [13.2, 0.0, 384.0], 12, [4, 16]),
    card("RX 6800 XT", AmdRdna2, [20.7, 0.0, 512.0], 16, [4, 16]),
    card("RX 6900 XT", AmdRdna2, [23.0, 0.0, 512.0], 16, [4, 16]),
    card("RX 7600", AmdRdna3, [21.8, 44.0, 288.0], 8, [4, 8]),
    card("RX 7700 XT", AmdRdna3, [35.2, 70.0, 432.0], 12, [4, 16]),
    card("RX 7800 XT", AmdRdna3, [37.3, 75.0, 624.0], 16, [4, 16]),
    card("RX 7900 XTX", AmdRdna3, [61.4, 123.0, 960.0], 24, [4, 16]),
    card("RX 9070 XT", AmdRdna3, [48.7, 195.0, 640.0], 16, [5, 16]),
    shared("Radeon 890M", AmdRdna3, [11.9, 24.0, 120.0]),
    card("Arc A770", IntelArc, [19.7, 0.0, 560.0], 16, [4, 16]),
    card("Arc B580", IntelArc, [14.6, 0.0, 456.0], 12, [4, 8]),
    shared("M1", Apple, [2.6, 0.0, 68.0]),
    shared("M2", Apple, [3.6, 0.0, 100.0]),
    shared("M3 Max", Apple, [14.1, 0.0, 400.0]),
    shared("M4 Max", Apple, [18.4, 0.0, 546.0]),
];

/// Name that no card has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no card \"{name}\" in the table; the names most like it are {}", listed(nearest))]
pub struct UnknownCard {
    pub name: String,
    /// Three names of cards, the most similar first.
    pub nearest: Vec<&'static str>,
}

/// Words of drivers and shops that do not tell cards apart.
const PLAIN_WORDS: [&str; 9] =
    ["nvidia", "geforce", "amd", "radeon", "intel", "apple", "graphics", "laptop", "gpu"];

/// Letters and digits of a name without its plain words.
fn key_of(name: &str) -> String {
    let lower = name.to_lowercase().replace("(r)", " ").replace("(tm)", " ");
    let mut key = String::new();
    for word in lower.split(|character: char| !character.is_alphanumeric()) {
        if !PLAIN_WORDS.contains(&word) {
            key += word;
        }
    }
    key
}

/// Shortest end of a name that stands for all of it.
const END_MIN: usize = 4;

/// Returns the card of a name, in any case and spelling: `RTX 4090`, `rtx4090`, `4090` and
/// `NVIDIA GeForce RTX 4090` are one.
///
/// # Errors
/// Returns [`UnknownCard`] for a name that is not in the table, or that is the end of several.
pub fn card_named(name: &str) -> Result<&'static Card, UnknownCard> {
    let key = key_of(name);
    for card in CARDS {
        let is_other = card.others.iter().any(|other| key_of(other) == key);
        if key_of(card.name) == key || is_other {
            return Ok(card);
        }
    }
    if key.len() >= END_MIN {
        let mut ending = CARDS.iter().filter(|card| key_of(card.name).ends_with(&key));
        if let (Some(card), None) = (ending.next(), ending.next()) {
            return Ok(card);
        }
    }
    let mut nearest: Vec<&Card> = CARDS.iter().collect();
    nearest.sort_by_key(|card| edits(&key, &key_of(card.name)));
    let nearest = nearest.iter().take(3).map(|card| card.name).collect();
    Err(UnknownCard { name: name.into(), nearest })
}

/// Number of characters to insert, remove or replace to turn one text into the other (Levenshtein
/// 1966).
fn edits(from: &str, to: &str) -> usize {
    let mut row: Vec<usize> = (0..=to.chars().count()).collect();
    for (index, left) in from.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = index + 1;
        for (column, right) in to.chars().enumerate() {
            let replaced = diagonal + usize::from(left != right);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(row[column] + 1).min(diagonal + 1);
        }
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn card_is_found_by_any_spelling() {
        let found = |name: &str| card_named(name).map(|card| card.name);
        for name in ["RTX 4090", "rtx4090", "4090", "NVIDIA GeForce RTX 4090", "rtx-4090"] {
            assert_eq!(found(name), Ok("RTX 4090"), "{name}");
        }
        for (name, card) in [
            ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
            ("AMD Radeon 890M Graphics", "Radeon 890M"),
            ("Intel(R) Arc(TM) A770 Graphics", "Arc A770"),
            ("Apple M2", "M2"),
            ("NVIDIA H100 80GB HBM3", "H100 SXM"),
            ("NVIDIA A100-SXM4-80GB", "A100 80 GB"),
            ("a100", "A100 80 GB"),
        ] {
            assert_eq!(found(name), Ok(card), "{name}");
        }
        for card in CARDS {
            assert_eq!(found(card.name), Ok(card.name));
        }
    }

    #[test]
    fn card_like_another_is_not_taken_for_it() {
        for name in ["RTX 3060 Ti", "RX 7900", "RX 6800", "M3", "H100 PCIe", "60", "", "xt"] {
            let error = card_named(name).unwrap_err();
            assert_eq!(error.nearest.len(), 3, "{name}");
        }
        let error = card_named("RTX 4099").unwrap_err().to_string();
        let expected = "there is no card \"RTX 4099\" in the table; the names most like it are \
                        RTX 4090, ";
        assert!(error.starts_with(expected), "{error}");
    }

    #[test]
    fn peaks_and_fractions_are_plausible() {
        for card in CARDS {
            let ReachedFractions { product, attention, matrix, bandwidth } = card.maker.reached();
            for fraction in [product, attention, bandwidth] {
                assert!((0.1..1.0).contains(&fraction), "{}", card.name);
            }
            assert!(attention <= product, "{}", card.name);
            assert_eq!(matrix > 0.0, card.maker != IntelArc && card.maker != Apple);
            assert!(card.matrix_tflops.is_none_or(|rate| rate > card.f32_tflops));
            assert_eq!(card.gib.is_none(), card.bus == CardBus::Shared, "{}", card.name);
        }
        let bus = CardBus::Pcie { generation: 4, lanes: 16 };
        let nominal = bus.nominal_bytes_per_s().unwrap();
        assert!((nominal - 31.5e9).abs() < 0.1e9, "{nominal}");
        assert_eq!(edits("kitten", "sitting"), 3);
    }
}
