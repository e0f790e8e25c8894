//! Assembly of AMD GPUs, as the driver prints it: basic blocks, and what their instructions do.

use serde::{Deserialize, Serialize};

/// Basic block with the most multiply-adds: the hot loop of a kernel that computes products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HotLoop {
    pub instructions: usize,
    pub multiply_adds: usize,
    /// Accesses of workgroup memory, of buffers, and of scratch memory.
    pub workgroup: usize,
    pub memory: usize,
    pub scratch: usize,
}

impl HotLoop {
    /// Returns the hot loop of an assembly text.
    pub fn of(assembly: &str) -> Self {
        let mut blocks = vec![Self::default()];
        for line in assembly.lines().map(str::trim) {
            if line.starts_with("BB") && line.contains(':') {
                blocks.push(Self::default());
            } else if let Some(block) = blocks.last_mut()
                && let Some(name) = line.split_whitespace().next()
                && !name.starts_with(';')
            {
                block.count(name);
            }
        }
        blocks.into_iter().max_by_key(|block| block.multiply_adds).unwrap_or_default()
    }

    fn count(&mut self, name: &str) {
        self.instructions += 1;
        let begins = |all: &[&str]| all.iter().any(|one| name.starts_with(one));
        // A dual instruction holds two operations.
        let name_of_operation = name.strip_prefix("v_dual_").or(name.strip_prefix("v_"));
        let is_product = |name: &str| {
            ["fma", "mad", "pk_fma", "wmma", "dot"].iter().any(|one| name.starts_with(one))
        };
        self.multiply_adds += usize::from(name_of_operation.is_some_and(is_product));
        self.workgroup += usize::from(begins(&["ds_"]));
        self.memory += usize::from(begins(&["buffer_", "global_", "flat_"]));
        self.scratch += usize::from(begins(&["scratch_"]));
    }

    /// Returns the share of multiply-adds, in percent.
    pub fn share(&self) -> usize {
        100 * self.multiply_adds / self.instructions.max(1)
    }
}

#[test]
fn the_block_with_the_most_multiply_adds_is_the_hot_loop() {
    let text = "BB0:\n\tv_mov_b32_e32 v1, v0 ; 7e0\n\tv_fma_f32 v1, v2, v3, v4\nBB1:\n\
                \tds_read_b128 v[0:3], v9\n\tv_fmac_f32_e32 v1, v2, v3\n\
                \tv_dual_fmac_f32 v1, v2, v3 :: v_dual_fmac_f32 v4, v5, v6\n\
                \tscratch_store_b32 off, v1\n; a comment\nBB2:\n\ts_endpgm";
    let found = HotLoop::of(text);
    let expected =
        HotLoop { instructions: 4, multiply_adds: 2, workgroup: 1, memory: 0, scratch: 1 };
    assert_eq!(found, expected);
    assert_eq!(found.share(), 50);
}
