//! Texts of the WGSL compute shaders of potluck. `potluck-kernels` composes and dispatches them.

/// Pairs of the names of texts in a directory, and the texts.
macro_rules! texts {
    ($directory:literal: $($name:literal)*) => {
        &[$(($name, include_str!(concat!($directory, $name, ".wgsl")))),*]
    };
}

/// All shader files as (file stem, text), sorted by stem.
pub const FILES: &[(&str, &str)] = texts! { "":
    "adamw" "adamw_bf16" "attention" "attention_coop" "attention_tiles" "batch_norm" "bf16" "binary"
    "cache_update" "cached_attention" "cached_attention_merge" "conv" "conv_depthwise"
    "conv_parts" "conv_shared"
    "conv_shared_weight" "conv_weights" "copy" "cross_entropy" "cross_entropy_grad"
    "cross_entropy_subgroups" "dropout" "embedding" "embedding_rows" "fused" "fused_vectors"
    "gather" "group_norm" "hash" "join_cross_entropy" "layer_norm" "layer_norm_group"
    "layer_norm_rows" "matmul" "matmul_shared" "matmul_split_k" "matmul_vector" "norm" "passes"
    "peak" "pool" "recurrent_gru" "recurrent_lstm" "rotary" "row_blocks" "row_sums" "sgd"
    "sgd_bf16" "softmax" "spin" "squared_error" "sum" "unary" "update" "update_bf16"
};

/// All shared snippets as (name, text), in the order in which a shader that uses several has them;
/// a shader includes one by a line `// uses lib/NAME` in its head.
pub const LIBRARY: &[(&str, &str)] = texts! { "lib/":
    "attention" "bf16_pair" "classes" "column_sum" "decay" "decay4" "loss" "grid" "elementwise"
    "joined" "nan"
    "operand_f32" "operand_integer" "product_coop" "product_tile" "tile_blocks" "index" "run" "span"
    "recurrent" "rng" "value" "value4" "store"
};

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn the_lists_name_all_files() {
        for (list, directory) in [(FILES, "."), (LIBRARY, "lib")] {
            let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join(directory);
            let mut stems = Vec::new();
            for entry in fs::read_dir(directory).unwrap() {
                let name = entry.unwrap().file_name().into_string().unwrap();
                stems.extend(name.strip_suffix(".wgsl").map(String::from));
            }
            let mut listed: Vec<&str> = list.iter().map(|(name, _)| *name).collect();
            listed.sort_unstable();
            stems.sort_unstable();
            assert_eq!(listed, stems);
        }
        assert!(FILES.is_sorted());
    }
}
