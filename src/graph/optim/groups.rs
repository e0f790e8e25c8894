//! Parameter groups: parameters that the optimizer updates with separate rates, or not at all,
//! chosen by patterns of their names.

use std::fmt;
use std::str::FromStr;

use crate::{Graph, ParameterKind, UpdateRates};

/// Treatment of the parameters of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GroupRule {
    /// They keep their values; see [`ParameterKind::Frozen`].
    Frozen,
    /// They are updated at these rates. A weight decay applies to all of them, whatever their
    /// dimensions.
    Rates(UpdateRates),
}

/// Parameters whose names match a pattern, and their treatment.
///
/// As text, the pattern followed by `frozen`, or by `lr_scale=X`, `weight_decay=Y` or both:
/// `*.bias lr_scale=2 weight_decay=0`.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterGroup {
    /// Pattern of whole names: `*` matches any number of characters, `?` matches one.
    pub names: String,
    pub rule: GroupRule,
}

/// Error of a text that is not a parameter group, or of groups that do not fit a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParameterGroupError {
    #[error(
        "'{0}' is no parameter group; write a pattern of names and behind it 'frozen', or \
         'lr_scale=X', 'weight_decay=Y' or both, as in \"*.bias weight_decay=0\""
    )]
    Syntax(String),
    #[error("'{text}' sets {key} to {value}; it must be a number {range}")]
    Range { text: String, key: &'static str, value: String, range: &'static str },
    #[error(
        "no trained parameter is called '{pattern}' that no group before has; the model's first is \
         '{first}'"
    )]
    NoParameter { pattern: String, first: String },
    #[error("all parameters are frozen, so that there is nothing to train")]
    NothingTrained,
}

/// Number of a group: its name, the numbers that it may be, and words for them.
#[derive(Clone, Copy)]
struct GroupNumber {
    key: &'static str,
    is_allowed: fn(f32) -> bool,
    range: &'static str,
}

const LR_SCALE: GroupNumber = GroupNumber {
    key: "lr_scale",
    is_allowed: |value| value > 0.0 && value <= UpdateRates::MAX,
    range: "above 0, at most 1000",
};

const WEIGHT_DECAY: GroupNumber = GroupNumber {
    key: "weight_decay",
    is_allowed: |value| (0.0..=UpdateRates::MAX).contains(&value),
    range: "from 0 to 1000",
};

impl ParameterGroup {
    /// Checks the numbers of a group, which code can set to any.
    fn check(&self) -> Result<(), ParameterGroupError> {
        let GroupRule::Rates(UpdateRates { lr_scale, weight_decay }) = self.rule else {
            return Ok(());
        };
        let mut numbers = vec![(LR_SCALE, lr_scale)];
        if let Some(weight_decay) = weight_decay {
            numbers.push((WEIGHT_DECAY, weight_decay));
        }
        for (GroupNumber { key, is_allowed, range }, number) in numbers {
            if !is_allowed(number) {
                let (text, value) = (self.to_string(), number.to_string());
                return Err(ParameterGroupError::Range { text, key, value, range });
            }
        }
        Ok(())
    }
}

impl FromStr for ParameterGroup {
    type Err = ParameterGroupError;

    fn from_str(text: &str) -> Result<Self, ParameterGroupError> {
        let mut words = text.split_whitespace();
        let syntax = || ParameterGroupError::Syntax(text.to_string());
        let names = words.next().ok_or_else(syntax)?.to_string();
        let settings: Vec<&str> = words.collect();
        if settings == ["frozen"] {
            return Ok(Self { names, rule: GroupRule::Frozen });
        }
        let mut lr_scale = None;
        let mut weight_decay = None;
        for setting in &settings {
            let (key, value) = setting.split_once('=').ok_or_else(syntax)?;
            let (known, GroupNumber { key, is_allowed, range }) = match key {
                "lr_scale" => (&mut lr_scale, LR_SCALE),
                "weight_decay" => (&mut weight_decay, WEIGHT_DECAY),
                _ => return Err(syntax()),
            };
            let number = match value.parse::<f32>() {
                Ok(number) if is_allowed(number) => number,
                _ => {
                    let text = text.to_string();
                    let value = value.to_string();
                    return Err(ParameterGroupError::Range { text, key, value, range });
                }
            };
            if known.replace(number).is_some() {
                return Err(syntax());
            }
        }
        if settings.is_empty() {
            return Err(syntax());
        }
        let rates = UpdateRates { lr_scale: lr_scale.unwrap_or(1.0), weight_decay };
        Ok(Self { names, rule: GroupRule::Rates(rates) })
    }
}

impl fmt::Display for ParameterGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names)?;
        match self.rule {
            GroupRule::Frozen => f.write_str(" frozen"),
            GroupRule::Rates(UpdateRates { lr_scale, weight_decay }) => {
                write!(f, " lr_scale={lr_scale}")?;
                match weight_decay {
                    Some(weight_decay) => write!(f, " weight_decay={weight_decay}"),
                    None => Ok(()),
                }
            }
        }
    }
}

/// Applies to each trained parameter of a forward graph the rule of the first group that matches
/// it. Running averages belong to no group.
///
/// # Errors
/// Returns [`ParameterGroupError`] if a rate of a group is out of its range, if a pattern matches
/// no trained parameter, or if all parameters are frozen.
pub fn assign_groups(
    mut graph: Graph,
    groups: &[ParameterGroup],
) -> Result<Graph, ParameterGroupError> {
    for group in groups {
        group.check()?;
    }
    let mut is_used = vec![false; groups.len()];
    for parameter in &mut graph.parameters {
        if parameter.kind != ParameterKind::Trained {
            continue;
        }
        let first = groups.iter().position(|group| fits(&group.names, &parameter.whole.name));
        let Some(index) = first else { continue };
        is_used[index] = true;
        match groups[index].rule {
            GroupRule::Frozen => parameter.kind = ParameterKind::Frozen,
            GroupRule::Rates(rates) => {
                parameter.rates = rates;
                parameter.decay |= rates.weight_decay.is_some();
            }
        }
    }
    if let Some(unused) = is_used.iter().position(|is_used| !is_used) {
        let first = match graph.parameters.iter().find(|parameter| !parameter.kind.is_state()) {
            Some(parameter) => parameter.whole.name.clone(),
            None => String::new(),
        };
        return Err(ParameterGroupError::NoParameter {
            pattern: groups[unused].names.clone(),
            first,
        });
    }
    let mut parameters = graph.parameters.iter();
    let is_left = parameters.any(|parameter| parameter.kind == ParameterKind::Trained);
    if !groups.is_empty() && !is_left {
        return Err(ParameterGroupError::NothingTrained);
    }
    Ok(graph)
}

fn fits(pattern: &str, name: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let name: Vec<char> = name.chars().collect();
    // Position after the last star in the pattern, and the end of its match in the name.
    let mut star: Option<(usize, usize)> = None;
    let mut at = 0;
    let mut matched = 0;
    while matched < name.len() {
        match pattern.get(at) {
            Some('*') => {
                at += 1;
                star = Some((at, matched));
            }
            Some(wanted) if *wanted == '?' || *wanted == name[matched] => {
                at += 1;
                matched += 1;
            }
            _ => {
                // Let the star match one more character.
                let Some((after, tried)) = &mut star else { return false };
                *tried += 1;
                at = *after;
                matched = *tried;
            }
        }
    }
    pattern[at..].iter().all(|rest| *rest == '*')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Builder, Init};

    #[test]
    fn patterns_stand_for_whole_names() {
        let cases = [
            ("h.0.bias", "h.0.bias", true),
            ("h.0", "h.0.bias", false),
            ("*.bias", "h.0.bias", true),
            ("*.bias", "h.0.bias.more", false),
            ("h.*.w*t", "h.11.attn.weight", true),
            ("h.?.weight", "h.1.weight", true),
            ("h.?.weight", "h.11.weight", false),
            ("*ab*ab", "abaabab", true),
            ("*", "", true),
            ("?", "", false),
            ("h**", "h", true),
        ];
        for (pattern, name, expected) in cases {
            assert_eq!(fits(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn texts_are_read_or_refused() {
        let read = |text: &str| text.parse::<ParameterGroup>();
        for text in ["*.bias frozen", "a lr_scale=0.5", "a lr_scale=1 weight_decay=0.25"] {
            assert_eq!(read(text).unwrap().to_string(), text);
        }
        assert_eq!(read(" a  weight_decay=0 ").unwrap().to_string(), "a lr_scale=1 weight_decay=0");
        for text in
            ["", "a", "a thawed", "a frozen lr_scale=1", "a lr=1", "a lr_scale=1 lr_scale=2"]
        {
            assert_eq!(read(text), Err(ParameterGroupError::Syntax(text.into())), "{text}");
        }
        for text in ["a lr_scale=0", "a lr_scale=inf", "a weight_decay=-1", "a weight_decay=x"] {
            let error = read(text).unwrap_err();
            assert!(matches!(error, ParameterGroupError::Range { .. }), "{text}: {error}");
        }
    }

    #[test]
    fn rates_out_of_their_range_are_refused_in_code_as_in_texts() {
        let graph = || {
            let mut b = Builder::new();
            b.parameter("weight", &[2, 3], Init::Zeros);
            b.finish()
        };
        let assign = |lr_scale: f32, weight_decay: Option<f32>| {
            let rule = GroupRule::Rates(UpdateRates { lr_scale, weight_decay });
            assign_groups(graph(), &[ParameterGroup { names: "*".into(), rule }])
        };
        assert!(assign(1000.0, Some(0.0)).is_ok() && assign(0.5, None).is_ok());
        for lr_scale in [0.0, -1.0, 1001.0, f32::INFINITY, f32::NAN] {
            let error = assign(lr_scale, None).unwrap_err();
            let is_of_scale = matches!(&error, ParameterGroupError::Range { key: "lr_scale", .. });
            assert!(is_of_scale, "{lr_scale}: {error}");
        }
        for weight_decay in [-0.1, 1001.0, f32::INFINITY, f32::NAN] {
            let error = assign(1.0, Some(weight_decay)).unwrap_err();
            let is_of_decay =
                matches!(&error, ParameterGroupError::Range { key: "weight_decay", .. });
            assert!(is_of_decay, "{weight_decay}: {error}");
        }
        let text = assign(0.0, None).unwrap_err().to_string();
        assert_eq!(
            text,
            "'* lr_scale=0' sets lr_scale to 0; it must be a number above 0, at most 1000"
        );
    }

    #[test]
    fn the_first_group_counts_and_every_group_has_parameters() {
        let graph = || {
            let mut b = Builder::new();
            b.parameter("in.weight", &[2, 3], Init::Zeros);
            b.parameter("in.bias", &[2], Init::Zeros);
            b.parameter("out.bias", &[2], Init::Zeros);
            b.state("out.mean", &[2], Init::Zeros, 0.1);
            b.finish()
        };
        let assign = |groups: &[&str]| {
            let groups: Vec<ParameterGroup> =
                groups.iter().map(|text| text.parse().unwrap()).collect();
            assign_groups(graph(), &groups)
        };
        let found = assign(&["out.* frozen", "*.bias lr_scale=2 weight_decay=0.5"]).unwrap();
        let of = |index: usize| (found.parameters[index].kind, found.parameters[index].rates);
        let (plain, own) =
            (UpdateRates::default(), UpdateRates { lr_scale: 2.0, weight_decay: Some(0.5) });
        assert_eq!(of(0), (ParameterKind::Trained, plain));
        assert_eq!(of(1), (ParameterKind::Trained, own));
        assert!(found.parameters[1].decay);
        assert_eq!(of(2), (ParameterKind::Frozen, plain));
        assert_eq!(of(3), (ParameterKind::State { momentum: 0.1 }, plain));
        let refused = |groups: &[&str]| assign(groups).unwrap_err();
        let none = ParameterGroupError::NoParameter {
            pattern: "*.mean".into(),
            first: "in.weight".into(),
        };
        assert_eq!(refused(&["*.mean frozen"]), none);
        assert_eq!(refused(&["* frozen"]), ParameterGroupError::NothingTrained);
        // All that it fits is in the group before.
        let none = refused(&["*.bias lr_scale=2", "out.* frozen"]);
        assert!(none.to_string().contains("'out.*'"), "{none}");
        assert_eq!(assign(&[]).unwrap(), graph());
    }
}
