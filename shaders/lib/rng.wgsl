// Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw, SC 2011): two random words from a key
// and a counter, the same bits as `threefry2x32` of src/base/rng.rs. The rounds are written out,
// because not every driver unrolls loops.
const RNG_PARITY: u32 = 0x1BD11BDAu;

fn threefry2x32(key: vec2u, counter: vec2u) -> vec2u {
    let key2 = RNG_PARITY ^ key.x ^ key.y;
    var a = counter.x + key.x;
    var b = counter.y + key.y;
    a += b; b = ((b << 13u) | (b >> 19u)) ^ a;
    a += b; b = ((b << 15u) | (b >> 17u)) ^ a;
    a += b; b = ((b << 26u) | (b >> 6u)) ^ a;
    a += b; b = ((b << 6u) | (b >> 26u)) ^ a;
    a += key.y; b += key2 + 1u;
    a += b; b = ((b << 17u) | (b >> 15u)) ^ a;
    a += b; b = ((b << 29u) | (b >> 3u)) ^ a;
    a += b; b = ((b << 16u) | (b >> 16u)) ^ a;
    a += b; b = ((b << 24u) | (b >> 8u)) ^ a;
    a += key2; b += key.x + 2u;
    a += b; b = ((b << 13u) | (b >> 19u)) ^ a;
    a += b; b = ((b << 15u) | (b >> 17u)) ^ a;
    a += b; b = ((b << 26u) | (b >> 6u)) ^ a;
    a += b; b = ((b << 6u) | (b >> 26u)) ^ a;
    a += key.x; b += key.y + 3u;
    a += b; b = ((b << 17u) | (b >> 15u)) ^ a;
    a += b; b = ((b << 29u) | (b >> 3u)) ^ a;
    a += b; b = ((b << 16u) | (b >> 16u)) ^ a;
    a += b; b = ((b << 24u) | (b >> 8u)) ^ a;
    a += key.y; b += key2 + 4u;
    a += b; b = ((b << 13u) | (b >> 19u)) ^ a;
    a += b; b = ((b << 15u) | (b >> 17u)) ^ a;
    a += b; b = ((b << 26u) | (b >> 6u)) ^ a;
    a += b; b = ((b << 6u) | (b >> 26u)) ^ a;
    a += key2; b += key.x + 5u;
    return vec2u(a, b);
}

