"""Writes the golden tokenizers: small byte-level BPE files with the patterns of GPT-2, Llama 3 and
Qwen2, one with spaces as in SentencePiece, and what Python's tokenizers makes of adversarial lines.

Run:    python3 tests/golden/make_tokenizers.py     (seconds; needs tokenizers, no network)
Made by: Python 3.11.7, tokenizers 0.23.3.

`tokenizers.json.gz` is `{"lines": [..], "files": {NAME: {"json": TEXT, "ids": [[..], ..]}}}`: the
ids of each line, without those that a template adds, and with special tokens taken as text.
"""

import gzip
import json
import pathlib
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors, trainers

LINES = 1000
VOCABULARY = 420
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<s>", "<pad>"]
WORDS = [
    "the", "The", "quick", "brown", "don't", "WE'LL", "it's", "naïve", "Ünïcödé",
    "straße", "日本語", "中文字符", "한국어", "Привет", "мир", "שלום", "مرحبا", "हिन्दी", "ไทย",
    "e\u0301", "n\u0303", "A\u030a", "\u1e9b\u0323", "ﬁ", "Ⅷ", "½", "①", "١٢٣",
    "12345678", "3.14159", "0x1F", "1,000,000", "👍", "👩‍👩‍👧‍👦", "🇩🇪", "\u200d",
    "\ufeff", "\u00a0", "\u2028", "\u3000", "\x00", "\x7f", "```", "!!!", "...", "->",
    "==", "/*", "*/", "&&", "http://a.b/c?d=e", "snake_case", "camelCase",
    "<|endoftext|>", "<|im_start|>", "<s>", "<pad>", "</s>", "[MASK]", "'s", "'S",
    "'ll", "'LL", "▁", "Ġ", "Ċ", "<0x0A>", "\ufffd",
]
GAPS = ["", " ", "  ", "   ", " " * 9, "\n", "\n\n", "\r\n", "\r", "\t", "\t\t ", " \n ", "\u00a0 ",
        "\u2003", "\x0b", "\x0c"]


def lines():
    """Returns words in any order with gaps of all kinds, and lines of any characters."""
    rng = random.Random(7)
    made = ["", " ", "\n", "  ", "a", "hello world", "Hello, world!\n"]
    planes = [(0, 0x7f), (0x80, 0x24f), (0x300, 0x36f), (0x370, 0x5ff), (0x900, 0xdff),
              (0x1100, 0x11ff), (0x2000, 0x206f), (0x3040, 0x30ff), (0x4e00, 0x4eff),
              (0xac00, 0xacff), (0xfb00, 0xfeff), (0x1f300, 0x1f64f), (0xe0000, 0xe007f)]
    while len(made) < LINES:
        parts = []
        for _ in range(rng.randrange(1, 12)):
            if rng.random() < 0.85:
                parts.append(rng.choice(WORDS))
            else:
                first, last = rng.choice(planes)
                count = rng.randrange(1, 4)
                parts.append("".join(chr(rng.randint(first, last)) for _ in range(count)))
            parts.append(rng.choice(GAPS))
        made.append("".join(parts))
    return made


def byte_level(pattern):
    """Returns a byte-level BPE tokenizer, with GPT-2's own pattern or with another."""
    tokenizer = Tokenizer(models.BPE())
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def with_spaces():
    """Returns a BPE tokenizer as Llama 2 and Mistral have it, with bytes for what is unknown."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0)])
    return tokenizer


def trained(tokenizer, corpus, special, alphabet):
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special,
                                  initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken("camelCase", normalized=False)])
    return tokenizer


def main():
    corpus = lines()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # An empty pattern is ByteLevel's own.
    kinds = {"gpt2": byte_level(None), "llama3": byte_level(LLAMA3), "qwen2": byte_level(QWEN2)}
    qwen2 = kinds["qwen2"]
    qwen2.normalizer = normalizers.NFC()
    for tokenizer in kinds.values():
        trained(tokenizer, corpus, SPECIAL, alphabet)
    spaces = with_spaces()
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trained(spaces, [line for line in corpus if line.isascii()], pieces, [])
    kinds["llama2"] = spaces
    files = {}
    for name, tokenizer in kinds.items():
        text = tokenizer.to_str()
        tokenizer.encode_special_tokens = True
        ids = [tokenizer.encode(line, add_special_tokens=False).ids for line in corpus]
        files[name] = {"json": text, "ids": ids}
    where = pathlib.Path(__file__).parent / "tokenizers.json.gz"
    data = json.dumps({"lines": corpus, "files": files}, ensure_ascii=False, separators=(",", ":"))
    where.write_bytes(gzip.compress(data.encode(), 9, mtime=0))
    print(where.name, where.stat().st_size, list(files))


if __name__ == "__main__":
    main()
