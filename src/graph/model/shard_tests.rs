//! Tests of what the ranks of a tensor group compute of models.

use std::ops::Range;

use super::{GptConfig, MlpConfig, MlpLoss, gpt, mlp};
use crate::{
    Builder, ColumnRange, Graph, Init, Node, Op, ParameterSplit, Reduction, ShardError, SplitUnit,
    Unary, differentiate, shard,
};

/// Equal shares and unlike ones.
const SHARES: [&[f64]; 4] = [&[1.0, 1.0], &[1.0, 3.0], &[1.0, 1.0, 1.0], &[1.0, 2.0, 1.0]];

fn small_gpt() -> Graph {
    let config = GptConfig {
        vocabulary: 200,
        context: 4,
        positions: 4,
        layers: 2,
        heads: 4,
        width: 32,
        bias: true,
        dropout: 0.1,
        tie: true,
        activation: Unary::Gelu,
    };
    gpt(&config).unwrap()
}

fn differentiated(graph: &Graph, shares: &[f64], position: usize) -> Graph {
    differentiate(shard(graph, shares, position).unwrap().graph).unwrap()
}

#[test]
fn ranks_of_a_gpt_number_heads_rows_and_classes_as_the_whole_does() {
    let graph = small_gpt();
    let heads: [&[Range<usize>]; 4] =
        [&[0..2, 2..4], &[0..1, 1..4], &[0..2, 2..3, 3..4], &[0..1, 1..3, 3..4]];
    let thirds = &[0..64, 64..128, 128..200];
    let rows: [&[Range<usize>]; 4] = [&[0..128, 128..200], &[0..64, 64..200], thirds, thirds];
    for ((shares, heads), rows) in SHARES.into_iter().zip(heads).zip(rows) {
        for (position, (heads, rows)) in heads.iter().zip(rows).enumerate() {
            let part = differentiated(&graph, shares, position);
            let mut found = [0; 3];
            for node in &part.nodes {
                let own = |input: usize| &part.tensor(node.inputs[input]).shape;
                match node.op {
                    Op::Attention(options) | Op::AttentionGrad(options) => {
                        let first = options.first_head;
                        assert_eq!(first..first + options.heads, *heads, "{shares:?}");
                        found[0] += 1;
                    }
                    Op::Embedding { first } => {
                        assert_eq!(first..first + own(1).dims()[0], *rows, "{shares:?}");
                        found[1] += 1;
                    }
                    Op::EmbeddingGrad { first, rows: count } => {
                        assert_eq!(first..first + count, *rows, "{shares:?}");
                        found[1] += 1;
                    }
                    Op::LinearCrossEntropy { classes, .. }
                    | Op::LinearCrossEntropyGrad { classes, .. } => {
                        let first = classes.first;
                        assert_eq!(first..first + own(1).dims()[0], *rows, "{shares:?}");
                        assert_eq!(classes.all, 200);
                        found[2] += 1;
                    }
                    Op::AllReduce(Reduction::CrossEntropy { classes }) => {
                        assert_eq!(classes, 200);
                    }
                    _ => {}
                }
            }
            assert_eq!(found, [4, 2, 2], "{shares:?}");
        }
    }
}

#[test]
fn ranks_of_a_perceptron_number_columns_as_the_whole_does() {
    let config = MlpConfig {
        widths: vec![3, 130, 5],
        activation: Unary::Relu,
        dropout: 0.5,
        loss: MlpLoss::CrossEntropy,
    };
    let graph = mlp(&config).unwrap();
    let columns: [&[Range<usize>]; 4] = [
        &[0..64, 64..130],
        &[0..32, 32..130],
        &[0..64, 64..96, 96..130],
        &[0..32, 32..96, 96..130],
    ];
    for (shares, columns) in SHARES.into_iter().zip(columns) {
        for (position, expected) in columns.iter().enumerate() {
            let part = differentiated(&graph, shares, position);
            let mut found = 0;
            for node in &part.nodes {
                if let Op::Dropout { columns, .. } = node.op {
                    let ColumnRange { first, all } = columns.unwrap();
                    let width = part.tensor(node.inputs[0]).shape.last();
                    assert_eq!((first..first + width, all), (expected.clone(), 130));
                    found += 1;
                }
            }
            assert_eq!(found, 2, "the forward and the backward pass");
        }
    }
}

#[test]
fn a_shard_is_not_divided_again() {
    let part = shard(&small_gpt(), &[1.0, 1.0], 1).unwrap().graph;
    for shares in [&[1.0][..], &[1.0, 1.0]] {
        assert_eq!(shard(&part, shares, 0), Err(ShardError::Divided));
        // By its parameters alone, too.
        let unnamed = Graph { tensor_rank: None, ..part.clone() };
        assert_eq!(shard(&unnamed, shares, 0), Err(ShardError::Divided));
    }
}

#[test]
fn outputs_are_columns_or_refused() {
    let shards = |dimension| {
        let mut b = Builder::new();
        let w = b.parameter("w", &[64, 96], Init::Zeros);
        b.output("w", w);
        b.split_parameters(|_| Some(ParameterSplit::new(dimension, SplitUnit::Columns)));
        shard(&b.finish(), &[1.0, 1.0], 1)
    };
    let part = shards(1).unwrap();
    assert_eq!(part.outputs, [std::iter::once(64..96).collect::<Vec<_>>()]);
    let own = part.graph.tensor(part.graph.output("w").unwrap());
    assert_eq!((&*own.name, own.shape.dims()), ("w/1", &[64, 32][..]));
    let error = shards(0).unwrap_err().to_string();
    let expected = "w is read behind the forward pass, and cannot be divided over ranks: a \
                    rank has rows of it, and not columns";
    assert_eq!(error, expected);

    // The statistics of some heads.
    let mut graph = small_gpt();
    let is_attention = |node: &&Node| matches!(node.op, Op::Attention(_));
    let attention = graph.nodes.iter().find(is_attention).unwrap().outputs[1];
    graph.outputs.push(("lse".into(), attention));
    let error = shard(&graph, &[1.0, 1.0], 0).unwrap_err().to_string();
    assert!(error.starts_with("lse is read") && error.ends_with("not columns"), "{error}");
}

/// Its gradient comes together with the gradient of its input, which all ranks need.
#[test]
fn a_head_in_chunks_that_no_rank_divides_is_refused() {
    let mut b = Builder::new();
    let (x, targets) = (b.input("x", &[3, 64]), b.input_ids("targets", &[3]));
    let weights = ["up", "down", "head"].map(|name| b.parameter(name, &[64, 64], Init::Zeros));
    let [up, down, head] = weights;
    let y = b.linear(x, up, None).unwrap();
    let y = b.linear(y, down, None).unwrap();
    b.linear_cross_entropy_loss(y, head, targets, 2).unwrap();
    b.split_parameters(|name| match name {
        "up" => Some(ParameterSplit::new(0, SplitUnit::Columns)),
        "down" => Some(ParameterSplit::new(1, SplitUnit::Columns)),
        _ => None,
    });
    let error = shard(&b.finish(), &[1.0, 1.0], 0).unwrap_err().to_string();
    assert!(error.contains("its weight is not divided by rows"), "{error}");
}
