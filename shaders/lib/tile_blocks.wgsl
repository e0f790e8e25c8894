// Tiles of a product and the blocks of its operands that the SIZE invocations of a workgroup copy:
// BK terms of BM rows of a and of BN columns of b at a time, in blocks of four by four, at most one
// of each operand per invocation. For lib/product_tile and lib/product_coop.

const A_QUADS = BM / 4u;
const B_QUADS = BN / 4u;
const K_QUADS = BK / 4u;
const A_BLOCKS = A_QUADS * K_QUADS;
const B_BLOCKS = B_QUADS * K_QUADS;
const_assert A_BLOCKS <= SIZE && B_BLOCKS <= SIZE;

// Rows of tiles that are walked together, down first: workgroups that run at a time then share
// rows of a and columns of b in the cache.
const STRIP = 8u;

// Row and column of a tile among those of its product.
fn place(tile: u32) -> vec2u {
    let first = tile / (STRIP * p.tiles_across) * STRIP;
    let height = min(STRIP, p.tiles_down - first);
    let within = tile - first * p.tiles_across;
    return vec2u(first + within % height, within / height);
}

// Number of elements from `at` on, of `size`.
fn left(size: u32, at: u32) -> u32 {
    return size - min(size, at);
}

// Block of four rows or columns and four terms that invocation `t` copies: its place across the
// terms, and its first term. Neighbouring invocations read neighbouring addresses.
fn block(t: u32, quads: u32, by_terms: bool) -> vec2u {
    return 4u * select(vec2u(t % quads, t / quads), vec2u(t / K_QUADS, t % K_QUADS), by_terms);
}

// Blocks that an invocation copies: the first invocations those of a, the last ones those of b.

fn a_block(local: u32) -> vec2u {
    return block(local, A_QUADS, A_BY_TERMS);
}

fn b_block(local: u32) -> vec2u {
    return block(SIZE - 1u - local, B_QUADS, B_BY_TERMS);
}
