//! Tests of all families in the registry: a new family is tested by its entry there.

use std::collections::HashSet;

use super::*;
use crate::keys::ConfigEnum;
use potluck_graph::Parameter;
use potluck_graph::model::AttentionBias;
use potluck_graph::model::names::their_name;

fn data_of(family: &Family) -> DataShape {
    match family.trained_on {
        TrainedOn::Tokens => DataShape::Tokens { vocabulary: 65 },
        TrainedOn::Samples => DataShape::Samples { shape: vec![5], outputs: 3, has_classes: false },
        TrainedOn::Pictures => {
            DataShape::Samples { shape: vec![3, 32, 32], outputs: 10, has_classes: true }
        }
    }
}

fn parameters(graph: &Graph) -> HashSet<(&str, &[usize])> {
    let of = |parameter: &'_ Parameter| graph.tensor(parameter.tensor).shape.dims();
    graph.parameters.iter().map(|parameter| (&*parameter.name, of(parameter))).collect()
}

#[test]
fn families_are_told_apart_by_their_names() {
    let names: HashSet<&str> = FAMILIES.iter().map(|family| family.name).collect();
    assert_eq!(names.len(), FAMILIES.len());
    assert_eq!(KINDS.len(), FAMILIES.len());
    for family in FAMILIES {
        assert_eq!((family.new)().family().name, family.name);
        let is_of_tokens = OF_TOKENS.contains(&family.name);
        assert_eq!(is_of_tokens, family.trained_on == TrainedOn::Tokens, "{}", family.name);
    }
}

#[test]
fn models_are_equal_if_their_keys_are() {
    for family in FAMILIES {
        for other in FAMILIES {
            assert_eq!(*(family.new)() == *(other.new)(), family.name == other.name);
        }
        let (model, mut changed) = ((family.new)(), (family.new)());
        for key in model.keys().into_iter().filter(|key| key.name == "dropout") {
            changed.set(key.name, 0.5.into());
            assert!(*changed != *model && *changed.clone() == *changed, "{}", family.name);
        }
    }
}

#[test]
fn a_function_that_is_no_activation_is_a_value_that_no_key_accepts() {
    let mut gpt = gpt::GptFamily { activation: Unary::Scale(2.0), ..Default::default() };
    let accepts = gpt.keys().into_iter().find(|key| key.name == "activation").unwrap().accepts;
    let value = gpt.value("activation").unwrap();
    assert_eq!((value.to_string(), accepts.check(value)), ("\"Scale(2.0)\"".into(), None));
    gpt.set("activation", "relu".into());
    assert_eq!(gpt.activation, Unary::Relu);
}

#[test]
fn a_model_of_defaults_is_built_for_its_data() {
    for family in FAMILIES {
        let (model, data) = ((family.new)(), data_of(family));
        assert_eq!(model.check(), Ok(()), "{}", family.name);
        let graph = model.graph(&data).unwrap();
        let bound = model.parameters_at_least();
        assert!(bound < graph.parameter_count() as u64, "{}: {bound}", family.name);
        let next = model.next_token_graph(&data, None).unwrap();
        let is_of_tokens = family.trained_on == TrainedOn::Tokens;
        assert_eq!(model.context().is_some(), is_of_tokens, "{}", family.name);
        if let Some(next) = next {
            assert!(is_of_tokens && parameters(&next) == parameters(&graph), "{}", family.name);
        }
        assert!(!model.summary().is_empty(), "{}", family.name);
    }
}

#[test]
fn the_bound_of_a_model_of_tokens_is_not_far_below() {
    for name in OF_TOKENS {
        let family = family(name).unwrap();
        let model = (family.new)();
        let all = model.graph(&data_of(family)).unwrap().parameter_count() as u64;
        assert!(model.parameters_at_least() * 2 > all, "{name}: of {all}");
    }
    let mut mlp = (family("mlp").unwrap().new)();
    mlp.set("hidden", Value::IntList(vec![64, 32, 16]));
    assert_eq!(mlp.parameters_at_least(), 64 * 32 + 32 * 16);
}

#[test]
fn data_of_another_kind_are_refused_with_a_family_for_them() {
    let tokens = DataShape::Tokens { vocabulary: 65 };
    let values = DataShape::Samples { shape: vec![5], outputs: 3, has_classes: false };
    for family in FAMILIES {
        let model = (family.new)();
        for (data, fits) in [
            (&tokens, family.trained_on == TrainedOn::Tokens),
            (&values, family.trained_on == TrainedOn::Samples),
        ] {
            match model.graph(data) {
                Ok(_) => assert!(fits, "{}", family.name),
                Err(error) => {
                    let error = error.to_string();
                    assert!(!fits && error.contains("set model.kind = \""), "{error}");
                }
            }
        }
    }
}

#[test]
fn pictures_that_are_halved_to_nothing_are_refused() {
    let mut cnn = (family("cnn").unwrap().new)();
    cnn.set("channels", Value::IntList(vec![2; 4]));
    let small = DataShape::Samples { shape: vec![8, 12], outputs: 2, has_classes: true };
    let error = cnn.graph(&small).unwrap_err().to_string();
    assert!(error.contains("12x8 are too small for 4 poolings; shorten"), "{error}");
}

#[test]
fn pictures_with_their_channels_last_are_refused() {
    for kind in ["cnn", "resnet"] {
        let model = (family(kind).unwrap().new)();
        let of = |shape: Vec<usize>| {
            model.graph(&DataShape::Samples { shape, outputs: 2, has_classes: true })
        };
        let error = of(vec![32, 40, 3]).unwrap_err().to_string();
        assert!(error.contains("channels last; save them as by numpy.transpose"), "{error}");
        let error = of(vec![32, 32, 1]).unwrap_err().to_string();
        assert!(error.contains("channels last; save them as by numpy.transpose"), "{error}");
        assert!(of(vec![3, 32, 40]).is_ok());
    }
}

#[test]
fn presets_are_models_of_their_family_with_the_published_number_of_parameters() {
    let published = [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("smollm2-135m", 134_515_008),
        ("smollm2-360m", 361_821_120),
        ("tinyllama-1.1b", 1_100_048_384),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-0.6b", 596_049_920),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.1-8b", 8_030_261_248),
        ("mistral-7b", 7_241_732_096),
    ];
    let mut names = HashSet::new();
    for family in FAMILIES {
        for preset in family.presets {
            assert!(names.insert(preset.name), "{} is there twice", preset.name);
            let mut section = ModelSection::default();
            section.set(PRESET.name, preset.name.into());
            section.set(KIND.name, section.kind_of_preset().unwrap().into());
            assert_eq!(section.check_preset(), Ok(()));
            for (full_name, value) in section.preset_values() {
                let key = section.keys().into_iter().find(|key| key.full_name == full_name);
                let key = key.unwrap_or_else(|| panic!("{}: {full_name}", preset.name));
                assert_eq!(key.accepts.check(value.clone()), Some(value.clone()), "{full_name}");
                section.set(key.name, value);
            }
            assert!((preset.values)().iter().all(|(name, _)| *name != "model.context"));
            assert_eq!(section.check(), Ok(()), "{}", preset.name);
            // On data with fewer tokens, which do not change the model.
            let graph = section.graph(&data_of(family)).unwrap();
            let count = published.iter().find(|(name, _)| *name == preset.name);
            let (_, count) = count.unwrap_or_else(|| panic!("{} has no count", preset.name));
            assert_eq!(graph.parameter_count(), *count, "{}", preset.name);
            assert!(section.parameters_at_least() < *count as u64, "{}", preset.name);
        }
    }
    assert_eq!(names.len(), PRESETS.len());
}

/// Number of parameters of a llama of these sizes, by the formula of its layers.
fn llama_count(model: &llama::LlamaFamily) -> usize {
    let (width, heads) = (model.width, model.heads);
    let kv_heads = model.kv_heads.unwrap();
    let columns = model.head_width.unwrap_or(width / heads);
    let (queries, keys) = (heads * columns, kv_heads * columns);
    let biases = match model.attention_bias {
        AttentionBias::None => 0,
        AttentionBias::Qkv => queries + 2 * keys,
        AttentionBias::All => queries + 2 * keys + width,
    };
    let norms = 2 * width + if model.qk_norm { 2 * columns } else { 0 };
    let matrices = 2 * width * (queries + keys) + 3 * width * model.mlp_width.unwrap();
    let tables = if model.tie { 1 } else { 2 } * model.vocabulary.unwrap() * width;
    tables + model.layers * (matrices + biases + norms) + width
}

#[test]
fn presets_of_llamas_have_all_their_values_and_the_parameters_of_the_formula() {
    for preset in llama::FAMILY.presets {
        let mut model = llama::LlamaFamily::default();
        for (full_name, value) in (preset.values)() {
            model.set(full_name.strip_prefix("model.").unwrap(), value);
        }
        let data = DataShape::Tokens { vocabulary: 65 };
        let count = model.graph(&data).unwrap().parameter_count();
        assert_eq!(count, llama_count(&model), "{}", preset.name);
        let (rope, window) = (model.rope_scaling, model.sliding_window);
        let positions = model.positions.unwrap();
        let of_preset = match preset.name {
            "smollm2-135m" | "smollm2-360m" => (8192, 1e5, 1e-5, "none", 0),
            "tinyllama-1.1b" => (2048, 1e4, 1e-5, "none", 0),
            "qwen2.5-0.5b" => (32_768, 1e6, 1e-6, "none", 0),
            "qwen3-0.6b" => (40_960, 1e6, 1e-6, "none", 0),
            "llama-3.2-1b" | "llama-3.1-8b" => (131_072, 5e5, 1e-5, "llama3", 0),
            "mistral-7b" => (32_768, 1e4, 1e-5, "none", 4096),
            other => panic!("{other} has no values here"),
        };
        let rope = rope.word().unwrap();
        let values = (positions, model.rope_theta, model.norm_eps, rope, window);
        assert_eq!(values, of_preset, "{}", preset.name);
        let factor = if preset.name == "llama-3.2-1b" { 32.0 } else { 8.0 };
        let of_scaling = (model.rope_factor, model.rope_low_freq, model.rope_high_freq);
        assert_eq!((of_scaling, model.rope_context), ((factor, 1.0, 4.0), 8192));
    }
}

#[test]
fn sizes_of_a_llama_that_are_left_out_follow_the_others() {
    let data = DataShape::Tokens { vocabulary: 65 };
    let graph = llama::LlamaFamily::default().graph(&data).unwrap();
    let parameters = parameters(&graph);
    for (name, shape) in [
        ("model.layers.3.self_attn.k_proj.weight", [64, 64]),
        ("model.layers.3.mlp.gate_proj.weight", [192, 64]),
    ] {
        assert!(parameters.contains(&(name, &shape)), "{name}");
    }
    let model = llama::LlamaFamily { kv_heads: Some(2), width: 96, ..Default::default() };
    let graph = model.graph(&data).unwrap();
    let shape = |name: &str| {
        let parameter = graph.parameters.iter().find(|known| known.name.ends_with(name)).unwrap();
        graph.tensor(parameter.tensor).shape.dims().to_vec()
    };
    assert_eq!(shape("v_proj.weight"), [48, 96]);
    assert_eq!(shape("down_proj.weight"), [96, 256]);
    let summary = "4 layers, 4 heads that share 2 of keys, width 96, context 64";
    assert_eq!(model.summary(), summary);
}

#[test]
fn a_llama_whose_sizes_contradict_each_other_is_refused() {
    let plain = llama::LlamaFamily::default;
    let refused = |model: llama::LlamaFamily| match model.check() {
        Ok(()) => "fine".into(),
        Err(error) => error.to_string(),
    };
    for (model, why) in [
        (
            llama::LlamaFamily { kv_heads: Some(3), ..plain() },
            "model.kv_heads expects a number that divides model.heads = 4, got 3",
        ),
        (
            llama::LlamaFamily { heads: 3, ..plain() },
            "model.heads expects a number by which model.width = 64 is divided into even widths, \
             got 3; or set model.head_width",
        ),
        (
            llama::LlamaFamily { head_width: Some(7), ..plain() },
            "model.head_width expects an even number of columns, got 7",
        ),
        (llama::LlamaFamily { heads: 3, head_width: Some(10), ..plain() }, "fine"),
        (
            llama::LlamaFamily { positions: Some(63), ..plain() },
            "model.positions expects at least model.context = 64, got 63",
        ),
        (
            llama::LlamaFamily { sliding_window: 63, ..plain() },
            "model.sliding_window = 63 is shorter than model.context = 64, and attention over a \
             window is not supported; set model.context to at most 63, or the window to 0",
        ),
        (llama::LlamaFamily { sliding_window: 64, ..plain() }, "fine"),
        (
            llama::LlamaFamily {
                rope_scaling: llama::RopeScaling::Llama3,
                rope_low_freq: 4.0,
                ..plain()
            },
            "model.rope_high_freq expects a number above model.rope_low_freq = 4.0, got 4.0",
        ),
    ] {
        assert_eq!(refused(model), why);
    }
}

#[test]
fn names_in_files_are_there_for_every_parameter_of_a_family_that_has_such() {
    for family in FAMILIES {
        let model = (family.new)();
        let graph = model.graph(&data_of(family)).unwrap();
        let known = model.names().len();
        assert_eq!(known > 0, matches!(family.name, "gpt" | "llama"), "{}", family.name);
        for parameter in graph.parameters.iter().filter(|_| known > 0) {
            assert!(their_name(model.names(), &parameter.name).is_some(), "{}", parameter.name);
        }
    }
}

#[test]
fn spare_positions_are_rows_that_no_sample_reaches() {
    let data = DataShape::Tokens { vocabulary: 65 };
    let plain = gpt::GptFamily::default();
    let of = |positions| gpt::GptFamily { positions: Some(positions), ..plain.clone() };
    assert_eq!(of(64).graph(&data).unwrap(), plain.graph(&data).unwrap());
    let graph = of(100).graph(&data).unwrap();
    assert!(parameters(&graph).contains(&("wpe.weight", &[100, 64])));
    assert_eq!(graph.nodes.len(), plain.graph(&data).unwrap().nodes.len() + 1);
    assert_eq!(of(100).summary(), "4 layers, 4 heads, width 64, context 64 of 100 positions");
    let error = of(63).check().unwrap_err().to_string();
    assert_eq!(error, "model.positions expects at least model.context = 64, got 63");
}

#[test]
fn a_vocabulary_may_be_larger_than_that_of_the_data_and_not_smaller() {
    let data = DataShape::Tokens { vocabulary: 65 };
    let of = |vocabulary| gpt::GptFamily { vocabulary: Some(vocabulary), ..Default::default() };
    let graph = of(70).graph(&data).unwrap();
    assert!(parameters(&graph).contains(&("wte.weight", &[70, 64])));
    assert!(of(65).graph(&data).unwrap() == gpt::GptFamily::default().graph(&data).unwrap());
    let error = of(64).next_token_graph(&data, None).unwrap_err().to_string();
    assert!(error.starts_with("model.vocabulary expects at least the 65 tokens"), "{error}");
    assert!(error.contains("got 64"), "{error}");
    let llama = llama::LlamaFamily { vocabulary: Some(3), ..Default::default() };
    let error = llama.graph(&data).unwrap_err().to_string();
    assert!(error.starts_with("model.vocabulary expects at least the 65 tokens"), "{error}");
}
