"""Compares potluck with transformers on tiny random models of all families that it reads: greedy
texts, losses, exports in both directions, GGUF files, and losses of training.

Run:    ./x oracle      (a few minutes; makes an environment in target/oracle)
        python3 tests/oracle/models.py POTLUCK [FAMILY ..]     in an environment of one's own

POTLUCK is the program. POTLUCK_OLDER_TRANSFORMERS names a directory with transformers 4.57, as of
`pip install --target`, which reads the exports too. Ends with 1 if a comparison fails, and says
which.
"""

import copy
import json
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

VOCABULARY, CONTEXT, NEW = 320, 128, 60
# What rounding may change: NMSE of logits, relative difference of losses.
F32, GGUF_F32, LOSS, TRAINED = 1e-12, 1e-10, 2e-6, 1e-5
TRAINED_STEPS, TRAINED_CONTEXT = 20, 32
PROMPTS = ("Before we", "O", "The king and all his men went to the")
SHARED = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}
# transformers takes a GPT-2 in GGUF for one of 1,024 positions.
GPT2 = {
    "vocab_size": VOCABULARY, "n_positions": 1024, "n_embd": 64, "n_layer": 3, "n_head": 4,
    "bos_token_id": 0, "eos_token_id": 0,
}
FAMILIES = {
    "gpt2": ("GPT2", GPT2),
    "llama": ("Llama", SHARED),
    "llama3": ("Llama", SHARED | {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", SHARED | {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", SHARED),
    # transformers takes a Qwen3 in GGUF for one with heads of 128 columns.
    "qwen3": ("Qwen3", SHARED | {"head_dim": 128}),
    "smollm2": ("Llama", SHARED | {"tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", SHARED | {"num_hidden_layers": 5}),
}
# transformers reads no GGUF of the others, or none with scaled positions.
GGUF = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm2")
LAYOUTS = {
    "one device": ["--devices", "cpu"],
    "a pipeline": ["--devices", "cpu*2", "--pipeline", "2"],
    "a tensor group": ["--devices", "cpu*2", "--tensor", "2"],
}


OLDER = os.environ.get("POTLUCK_OLDER_TRANSFORMERS")
# Writes the logits of models, each a directory, to a file.
OF_OLDER = """
import sys, torch, transformers
assert transformers.__version__.startswith("4.57."), transformers.__version__
out, ids, *models = sys.argv[1:]
ids, logits = torch.tensor([[int(word) for word in ids.split(",")]]), {}
for name in models:
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    with torch.no_grad():
        logits[name] = model.eval()(ids).logits[0].double()
torch.save(logits, out)
"""


class Checks:
    def __init__(self):
        self.failed = []

    def check(self, holds, what):
        print(("ok      " if holds else "FAILED  ") + what, flush=True)
        if not holds:
            self.failed.append(what)


def tokenizer_of(text):
    """Byte pair encoding with GPT-2's pattern, trained on a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet,
        show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def model_of(family):
    """A random model whose logits differ enough for greedy texts not to depend on rounding."""
    torch.manual_seed(0)
    name, config = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**copy.deepcopy(config))
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    model = getattr(transformers, head)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def logits_of(model, ids):
    return model(torch.tensor([ids])).logits[0].double()


def nmse(found, expected):
    return ((found - expected).square().sum() / expected.square().sum()).item()


class Program:
    def __init__(self, path, folder):
        self.path, self.folder = path, folder

    def run(self, *words):
        ran = subprocess.run([self.path, *words], cwd=self.folder, capture_output=True, timeout=600)
        if ran.returncode != 0:
            raise RuntimeError(f"{' '.join(words)}: {ran.stderr.decode()}")
        return ran.stdout.decode()


def greedy(model, tokenizer, prompt):
    ids = tokenizer.encode(prompt).ids
    made = model.generate(
        torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
        pad_token_id=0)[0].tolist()
    return prompt + tokenizer.decode(made[len(ids):], skip_special_tokens=False) + "\n"


def texts(checks, family, model, tokenizer, program):
    expected = "-----\n".join(greedy(model, tokenizer, prompt) for prompt in PROMPTS)
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    options = [*prompts, "--tokens", str(NEW), "--temperature", "0", "--ignore-end", "--set",
               f"model.context={CONTEXT}"]
    for where, layout in LAYOUTS.items():
        for cache in ([], ["--no-cache"]):
            text = program.run("generate", family, *layout, *options, *cache)
            with_cache = "without cache" if cache else "with cache"
            checks.check(text == expected, f"{family}: greedy texts on {where}, {with_cache}")


@torch.no_grad()
def loss_of(model, ids):
    """The mean loss of the windows that `potluck eval` takes."""
    losses = []
    for start in range(0, len(ids) - CONTEXT, CONTEXT):
        window = torch.tensor([ids[start:start + CONTEXT + 1]])
        logits = model(window[:, :-1]).logits.double()
        losses.append(torch.nn.functional.cross_entropy(logits[0], window[0, 1:]).item())
    return sum(losses) / len(losses)


def exports_in_older(checks, family, program, ids, expected):
    """Compares what transformers 4.57 computes of exports, by their names."""
    out = program.folder / "older.pt"
    words = [sys.executable, "-c", OF_OLDER, str(out), ",".join(map(str, ids)), *expected]
    subprocess.run(
        words, cwd=program.folder, env=os.environ | {"PYTHONPATH": OLDER}, check=True, timeout=600)
    logits = torch.load(out)
    for name, wanted in expected.items():
        error = nmse(logits[name], wanted)
        checks.check(error <= F32, f"{family}: {name} in transformers 4.57, NMSE {error:.1e}")


def exports(checks, family, model, tokenizer, program, ids):
    expected = logits_of(model, ids)
    of_exports = {}
    for dtype in ("f32", "f16", "bf16"):
        rounded = copy.deepcopy(model)
        kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
        with torch.no_grad():
            for parameter in rounded.parameters():
                parameter.copy_(parameter.to(kind).float())
        for shards in ([], ["--shard-size", "50KB"]):
            out = f"{family}-{dtype}{'-shards' if shards else ''}"
            program.run("export", family, "--out", out, "--dtype", dtype, *shards)
            back = AutoModelForCausalLM.from_pretrained(program.folder / out, dtype=torch.float32)
            of_exports[out] = logits_of(rounded, ids)
            error = nmse(logits_of(back.eval(), ids), of_exports[out])
            checks.check(error <= F32, f"{family}: export in {dtype} {shards}, NMSE {error:.1e}")
            again = f"{out}-again"
            program.run("export", out, "--out", again, "--dtype", dtype)
            back = AutoModelForCausalLM.from_pretrained(program.folder / again, dtype=torch.float32)
            error = nmse(logits_of(back.eval(), ids), of_exports[out])
            checks.check(error <= F32, f"{family}: {out} read again, NMSE {error:.1e}")
    if OLDER:
        exports_in_older(checks, family, program, ids, of_exports)
    loss = json.loads(program.run(
        "eval", family, "--data", "text.txt", "--devices", "cpu", "--json", "--set",
        f"model.context={CONTEXT}"))["loss"]
    wanted = loss_of(model, tokenizer.encode((program.folder / "text.txt").read_text()).ids)
    error = abs(loss - wanted) / wanted
    checks.check(error <= LOSS, f"{family}: loss of a text {loss:.6f}, off by {error:.1e}")
    if family not in GGUF:
        return
    for dtype in ("f32", "f16", "q8_0"):
        out = f"{family}-{dtype}.gguf"
        program.run("export", family, "--format", "gguf", "--dtype", dtype, "--out", out)
        back = AutoModelForCausalLM.from_pretrained(
            program.folder, gguf_file=out, dtype=torch.float32).eval()
        wanted = expected
        if dtype != "f32":
            wanted = logits_of(rounded_as_gguf(model, dtype), ids)
        error = nmse(logits_of(back, ids), wanted)
        checks.check(error <= GGUF_F32, f"{family}: GGUF in {dtype}, NMSE {error:.1e}")
        same = transformers.AutoTokenizer.from_pretrained(program.folder, gguf_file=out)
        text = (program.folder / "text.txt").read_text()[:2000]
        found = same(text, add_special_tokens=False)["input_ids"]
        checks.check(found == tokenizer.encode(text).ids, f"{family}: tokens of {out}")


def rounded_as_gguf(model, dtype):
    """The model with its matrices rounded as the file has them."""
    rounded = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in rounded.named_parameters():
            if parameter.dim() != 2 or name.endswith("wpe.weight"):
                continue
            if dtype == "f16":
                parameter.copy_(parameter.half().float())
                continue
            # Rows of GPT-2 are (in, out) there, and blocks are of inputs.
            is_transposed = isinstance(rounded, transformers.GPT2LMHeadModel) and ".h." in name
            matrix = parameter.T if is_transposed else parameter
            blocks = matrix.reshape(-1, 32)
            factor = blocks.abs().amax(dim=1, keepdim=True) / 127
            scaled = blocks / factor.where(factor > 0, 1)
            whole = scaled.sign() * (scaled.abs() + 0.5).floor()
            found = (whole * factor.half().float()).reshape(matrix.shape)
            parameter.copy_(found.T if is_transposed else found)
    return rounded


def training(checks, family, program, ids):
    """Losses of 20 steps of AdamW from a checkpoint. The data are one window, which is then every
    sample, because the order in which a run draws samples is its own."""
    (program.folder / "train.bin").write_bytes(
        torch.tensor(ids[:TRAINED_CONTEXT + 1], dtype=torch.uint16).numpy().tobytes())
    model = AutoModelForCausalLM.from_pretrained(
        program.folder / family, dtype=torch.float32, attn_implementation="eager")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), eps=1e-8)
    window = torch.tensor([ids[:TRAINED_CONTEXT + 1]])
    wanted = []
    for _ in range(TRAINED_STEPS):
        logits = model(window[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits[0], window[0, 1:])
        wanted.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sets = {
        "train.steps": TRAINED_STEPS, "train.batch": 2, "model.context": TRAINED_CONTEXT,
        "train.micro_batch_size": 1, "optim.lr": 1e-3, "optim.beta2": 0.99,
        "optim.weight_decay": 0.1, "schedule.kind": "constant", "schedule.warmup": 0,
        "optim.clip": 0, "data.held_out": 0, "train.sample_tokens": 0, "train.log_every": 1,
    }
    if family == "gpt2":
        sets["model.dropout"] = 0
    flags = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    for where, layout in LAYOUTS.items():
        out = f"run-{family}-{where.replace(' ', '-')}"
        program.run("train", "--init", family, "--data", "train.bin", *layout, *flags, "--out",
                    out, "--quiet")
        lines = (program.folder / out / "metrics.jsonl").read_text().splitlines()
        found = [event["loss"] for event in map(json.loads, lines) if "loss" in event]
        error = max(abs(f - w) / w for f, w in zip(found, wanted, strict=True))
        checks.check(error <= TRAINED, f"{family}: 20 losses on {where}, off by {error:.1e}")


def main():
    program, *wanted = sys.argv[1:]
    checks = Checks()
    text = "".join(
        f"In the year {year} king {name} had {year % 97} ships, and {year % 13} men in each.\n"
        for year in range(1000, 1900, 3) for name in ("Olaf", "Harald", "Sweyn"))
    tokenizer = tokenizer_of(text)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "text.txt").write_text(text[:20000])
        program = Program(os.path.abspath(program), folder)
        for family in wanted or FAMILIES:
            model = model_of(family)
            model.save_pretrained(folder / family)
            tokenizer.save(str(folder / family / "tokenizer.json"))
            ids = tokenizer.encode(text).ids[:CONTEXT]
            texts(checks, family, model, tokenizer, program)
            exports(checks, family, model, tokenizer, program, ids)
            training(checks, family, program, ids)
    print(f"{len(checks.failed)} of the comparisons failed")
    sys.exit(1 if checks.failed else 0)


if __name__ == "__main__":
    main()
