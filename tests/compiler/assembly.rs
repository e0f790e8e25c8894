//! Assembly of GPUs, as Mesa's drivers print it: basic blocks, and what their instructions do.

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
            if begins_block(line) {
                blocks.push(Self::default());
            } else if let (Some(block), Some(name)) = (blocks.last_mut(), operation(line)) {
                block.count(name);
            }
        }
        blocks.into_iter().max_by_key(|block| block.multiply_adds).unwrap_or_default()
    }

    fn count(&mut self, name: &str) {
        self.instructions += 1;
        let begins = |all: &[&str]| all.iter().any(|one| name.starts_with(one));
        // A dual instruction of AMD holds two operations.
        let of_vectors = name.strip_prefix("v_dual_").or(name.strip_prefix("v_"));
        let is_product = |name: &str| {
            ["fma", "mad", "pk_fma", "wmma", "dot"].iter().any(|one| name.starts_with(one))
        };
        let of_others = begins(&["ffma", "mad", "hmma"]);
        self.multiply_adds += usize::from(of_others || of_vectors.is_some_and(is_product));
        self.workgroup +=
            usize::from(begins(&["ds_", "ld.shared", "st.shared", "send.slm", "local_"]));
        let of_memory = ["buffer_", "global_", "flat_", "ld.global", "st.global", "device_"];
        self.memory += usize::from(begins(&of_memory));
        self.scratch += usize::from(begins(&["scratch_", "ld.local", "st.local", "stack_"]));
    }

    /// Returns the share of multiply-adds, in percent.
    pub fn share(&self) -> usize {
        100 * self.multiply_adds / self.instructions.max(1)
    }
}

/// Returns true for the label of a basic block: `BB1:` of AMD's, `block 1 L1 [0] -> {` of NVIDIA's,
/// `block1 {` of Apple's, and `L1:` of Intel's.
fn begins_block(line: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|one| one.is_ascii_digit());
    let is_label_of_intel =
        line.strip_prefix('L').and_then(|rest| rest.strip_suffix(':')).is_some_and(is_number);
    line.starts_with("BB") && line.contains(':') || line.starts_with("block") || is_label_of_intel
}

/// Returns the name of an instruction, behind its predicate (`(W)`, `@!p0`) and its results
/// (`r1 = `); `None` for comments, and for the end of a block.
fn operation(line: &str) -> Option<&str> {
    let mut rest = line;
    if rest.starts_with('(') {
        rest = rest.split_once(')')?.1;
    } else if rest.starts_with('@') {
        rest = rest.split_once(' ')?.1;
    }
    let code = rest.split_once(" // ").map_or(rest, |(code, _)| code);
    rest = code.split_once(" = ").map_or(code, |(_, instruction)| instruction);
    rest.split_whitespace().next().filter(|name| !name.starts_with([';', '/', '{', '}']))
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

#[test]
fn hot_loops_are_found_in_the_assembly_of_every_vendor() {
    let nvidia = "block.u 0 L1 [] -> {\n      ur0     = s2r sr[0x25]    // delay=1 wr:0\n} -> [1]\n\
                  block 1 L2 [0, 1] -> {\n      p0 null = plop3 pT pT up0 LUT[0xaa] LUT[0x0]\n\
                  r8..12  = ld.shared.b128 [r1]\n  r3      = ffma.ftz r4 r5 r3 // wt=11\n\
                  @!p0  r3 = ffma.ftz r4 r5 r3\n@p0 bra L2\n} -> [1, 2]";
    let intel = "(W)     mov (8)     r87     r0.1<0>\nL12:\n\
                 send.slm (16)     r79     r69    null:0  0x00000000\n\
                 (W)     sync.nop (1)    null   {$3.src}\n\
                 (+f0.0) mad (16)    r16:f   r10:f   r64.1<0>:f   r14<1>:f {@1,$2.dst}\n\
                 mad (16)    r16:f   r10:f   r64.1<0>:f   r14<1>:f\n(W) while (16)  JIP: L12\nL40:";
    let apple = "block0 {\n   $r1 = get_sr #0x50\n} -> block1\n\nblock1 {\n\
                 $r3:$r4 = local_load ^r6, #0x0\n   wait #0x0, slot 0\n\
                 $r2 = ffma ^r3, u11, ^r2\n   r2 = ffma ^r3, u25, ^r2\n   while_icmp ^r3, u28\n\
                 } -> block1 block2 from block0 block1";
    let expected =
        HotLoop { instructions: 5, multiply_adds: 2, workgroup: 1, memory: 0, scratch: 0 };
    for text in [nvidia, intel, apple] {
        assert_eq!(HotLoop::of(text), expected, "{text}");
    }
}
