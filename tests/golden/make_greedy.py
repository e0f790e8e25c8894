"""Writes the golden texts of language models: what transformers makes of three prompts of unlike
lengths, token by token, with the small models of make_language.py.

Run:    python3 tests/golden/make_greedy.py
        (ten seconds; needs torch, transformers and safetensors, no network)
Made by: Python 3.11.7, PyTorch 2.15.0 on the CPU, transformers 5.23.0, safetensors 0.8.0.

greedy.json.gz has for each case the ids of the prompts, and of the 60 most likely tokens behind
each. The models have 96 positions: those with rotary ones by their configuration, and GPT-2 by a
longer table, in which row i is row i % 16 times 1 + i // 16 / 4. All logits are multiplied by 8,
through the last norm, so that texts do not depend on rounding: the most likely token is ahead of
the next one by at least MARGIN.
"""

import gzip
import json
import os
import pathlib
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

POSITIONS, NEW, MARGIN = 96, 60, 2e-3
PROMPTS = (3, 1, 17)
LAST_NORMS = ("transformer.ln_f.weight", "transformer.ln_f.bias", "model.norm.weight")


def model_of(path):
    """Returns the model of a file, in f32, with more positions and sharper logits."""
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["config"])
        names = [name for name in file.keys() if name.startswith("init/")]
        tensors = {name.removeprefix("init/"): file.get_tensor(name) for name in names}
    for name in LAST_NORMS:
        if name in tensors:
            tensors[name] = tensors[name] * 8
    if config["model_type"] == "gpt2":
        config["n_positions"] = POSITIONS
        table = tensors["transformer.wpe.weight"]
        factors = [1 + i // len(table) / 4 for i in range(POSITIONS)]
        rows = [table[i % len(table)] * factor for i, factor in enumerate(factors)]
        tensors["transformer.wpe.weight"] = torch.stack(rows)
    else:
        config["max_position_embeddings"] = max(POSITIONS, config["max_position_embeddings"])
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def greedy(model, prompt):
    """Returns the most likely tokens behind a prompt, and how far ahead of others they are."""
    ids, margin = list(prompt), float("inf")
    for _ in range(NEW):
        best, second = model(torch.tensor([ids])).logits[0, -1].topk(2)[0].tolist()
        margin = min(margin, best - second)
        ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    return ids[len(prompt):], margin


def main():
    folder = pathlib.Path(__file__).parent
    cases = {}
    for path in sorted(folder.glob("hf_*.safetensors")):
        model = model_of(path)
        random = torch.Generator().manual_seed(len(cases))
        texts = []
        for length in PROMPTS:
            while True:
                vocabulary = model.config.vocab_size
                prompt = torch.randint(vocabulary, (length,), generator=random).tolist()
                text, margin = greedy(model, prompt)
                if margin >= MARGIN and len(set(text)) >= 4:
                    break
            texts.append({"prompt": prompt, "text": text})
        cases[path.stem] = texts
        print(path.stem, [len(set(text["text"])) for text in texts])
    lines = [f'"{name}": {json.dumps(texts)}' for name, texts in cases.items()]
    text = "{" + ",\n".join(lines) + "}\n"
    (folder / "greedy.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
