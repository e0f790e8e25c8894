//! Refusals of a trainer before it computes: graphs without a gradient, and values of inputs that
//! its graph does not know.

use std::sync::Arc;

use potluck_core::HostTensor;
use potluck_data::{Dataset, Split, TextData, TextWindows, TokenizerKind};
use potluck_graph::optim::Optimizer;
use potluck_graph::{Builder, Graph, IGNORE_INDEX, Init, Op, Pool2dOptions, differentiate};
use potluck_train::{FitLength, FitOptions, Trainer, TrainerOptions};

const ROWS: u32 = 5;
const CLASSES: u32 = 4;
const CONTEXT: usize = 3;

fn trainer(graph: Graph, batch: usize) -> Result<Trainer, String> {
    let optimizer = Optimizer::Sgd { momentum: 0.0, weight_decay: 0.0 };
    let mut options = TrainerOptions::new("cpu", optimizer, batch);
    options.micro_batch_size = 1;
    Trainer::new(graph, &options).map_err(|error| error.to_string())
}

#[test]
fn graphs_without_gradient_are_refused() {
    let mut b = Builder::new();
    let x = b.input("x", &[1, 2, 2, 3]);
    let weight = b.parameter("weight", &[3], Init::Ones);
    let scaled = b.mul(x, weight).unwrap();
    let op = Op::AvgPool2dGrad { options: Pool2dOptions::new(2), size: [4, 4] };
    let y = b.apply(op, &[scaled]).unwrap();
    let target = b.input("target", &[1, 4, 4, 3]);
    b.squared_error_loss(y, target).unwrap();
    let told = trainer(b.finish(), 2).err().unwrap();
    assert!(told.contains("avg_pool2d_grad 2x2 to 4x4 of (b, 2, 2, 3)"), "{told}");
    assert!(told.contains("node 1 (avg_pool2d_grad) has no gradient"), "{told}");

    let told = trainer(differentiate(text_model()).unwrap(), 2).err().unwrap();
    assert!(told.contains("differentiated already; give the forward graph"), "{told}");
}

fn text_model() -> Graph {
    let mut b = Builder::new();
    let table = b.parameter("table", &[ROWS as usize, 6], Init::Normal { std: 0.5 });
    let tokens = b.input_ids("tokens", &[1, CONTEXT]);
    let x = b.embedding(tokens, table).unwrap();
    let head = b.parameter("head", &[CLASSES as usize, 6], Init::Normal { std: 0.5 });
    let logits = b.linear(x, head, None).unwrap();
    b.output("logits", logits);
    let targets = b.input_ids("targets", &[1, CONTEXT]);
    b.cross_entropy_loss(logits, targets).unwrap();
    b.finish()
}

#[test]
fn ids_out_of_range_are_refused() {
    let mut trainer = trainer(text_model(), 2).unwrap();
    let batch = |token: u32, target: u32| {
        let tokens = HostTensor::Int(vec![0, 1, 2, 3, token, 1]);
        [("tokens", tokens), ("targets", HostTensor::Int(vec![0, 1, 2, 3, 1, target]))]
    };
    let outside = ROWS;
    let of_token = "input tokens: sample 1, position 1: 5 is no row of its table, which has 5; \
                    give ids less than 5";
    assert_eq!(trainer.step(&batch(outside, 0), 0.1).unwrap_err().to_string(), of_token);
    assert_eq!(trainer.evaluate_rows(2, &batch(outside, 0)).unwrap_err().to_string(), of_token);
    let tokens = &batch(outside, 0)[..1];
    assert_eq!(trainer.predict("logits", 2, tokens).unwrap_err().to_string(), of_token);
    let ignored = trainer.step(&batch(IGNORE_INDEX, 0), 0.1).unwrap_err().to_string();
    assert!(ignored.contains("is no row of its table"), "{ignored}");

    for target in [CLASSES, IGNORE_INDEX - 99] {
        let told = trainer.step(&batch(0, target), 0.1).unwrap_err().to_string();
        let expected = format!(
            "input targets: sample 1, position 2: {target} is none of the 4 classes; give a \
             target less than 4, or 4294967295 (graph::IGNORE_INDEX) for one that does not count"
        );
        assert_eq!(told, expected);
        assert_eq!(trainer.evaluate_rows(2, &batch(0, target)).unwrap_err().to_string(), expected);
    }
    assert_eq!(trainer.steps(), 0);
    let evaluation = trainer.evaluate_rows(2, &batch(0, IGNORE_INDEX)).unwrap();
    assert_eq!(evaluation.targets, 5);
    assert!(trainer.step(&batch(0, IGNORE_INDEX), 0.1).unwrap().updated);
}

/// Texts of ten characters, of which the model knows fewer.
#[test]
fn data_out_of_range_name_the_sample() {
    let text = TextData::from_bytes("digits", b"01234567890123456789", TokenizerKind::Char, 0.3, 3);
    let data: Arc<dyn Dataset> =
        Arc::new(TextWindows { text: Arc::new(text.unwrap()), context: CONTEXT });
    let mut trainer = trainer(text_model(), 2).unwrap();
    let mut told = vec![trainer.evaluate(&data, Split::Validation, 0).unwrap_err().to_string()];
    let predicted = trainer.predict_data(&data, Split::Validation, "logits");
    told.push(predicted.unwrap_err().to_string());
    let options = FitOptions::constant(FitLength::Steps(50), 0.1);
    told.push(trainer.fit(&data, &options).unwrap_err().to_string());
    for told in told {
        assert!(told.contains("tokens: sample "), "{told}");
        assert!(told.contains("position "), "{told}");
    }
}
