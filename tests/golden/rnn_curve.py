"""Trains PyTorch's LSTM or GRU beside a run of `potluck train`: from the run's initial values, on
the same text in the same order, with the same rates; prints both curves and their difference.

    potluck train --data TEXT --set model.kind=rnn --set model.stateful=true --out RUN \\
        --set train.checkpoint_keep=1000
    python3 tests/golden/rnn_curve.py RUN       (needs torch and safetensors, no network)

The run must begin at step 0 without dropout, whose random numbers are others in PyTorch. It must be
stateful: then batches are those that PyTorch's example of a word language model makes, one stretch
of the text per sample, and states are carried without a gradient.
"""

import json
import pathlib
import sys
import time
import tomllib

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn


class Model(nn.Module):
    def __init__(self, config, vocabulary):
        super().__init__()
        width = config["width"]
        layer = {"lstm": nn.LSTM, "gru": nn.GRU}[config["cell"]]
        self.embedding = nn.Embedding(vocabulary, width)
        self.rnn = layer(width, width, config["layers"], batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens, state):
        hidden, state = self.rnn(self.embedding(tokens), state)
        return self.head(hidden), state


def detached(state):
    return tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()


def streams(tokens, batch, context):
    """Yields (inputs, targets, begins) for ever: row k goes through part k of the text in order."""
    part = (len(tokens) - context) // batch
    while True:
        for index in range(part // context):
            starts = [k * part + index * context for k in range(batch)]
            rows = torch.stack([tokens[s:s + context + 1] for s in starts])
            yield rows[:, :-1], rows[:, 1:], index == 0


def main(run):
    first = run / "checkpoints/step-00000000"
    if not first.exists():
        sys.exit(f"{first} is gone: train with --set train.checkpoint_keep=1000")
    meta = json.loads((first / "manifest.json").read_text())["meta"]
    config = tomllib.loads(meta["run"])
    if not config["model"]["stateful"] or config["model"]["dropout"] > 0:
        sys.exit("the run is not stateful, or has dropout")
    characters = {c: i for i, c in enumerate(meta["tokenizer"]["chars"])}
    text = pathlib.Path(config["data"]["path"]).read_text()
    tokens = torch.tensor([characters[c] for c in text])
    tokens = tokens[:int((1 - config["data"]["held_out"]) * len(tokens))]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if "loss" in record]

    torch.set_num_threads(2)
    model = Model(config["model"], len(characters))
    model.load_state_dict(load_file(first / "parameters.safetensors"))
    optim = config["optim"]
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": optim["weight_decay"]},
              {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(optim["beta1"], optim["beta2"]), eps=optim["eps"])
    batches = streams(tokens, config["train"]["batch"], config["model"]["context"])
    state, worst, seconds, ours_ms = None, 0.0, [], []
    print("  step   potluck   PyTorch  difference")
    for record, (inputs, targets, begins) in zip(records, batches):
        begun = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = record["lr"]
        logits, state = model(inputs, None if begins else detached(state))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        if optim["clip"] > 0:
            nn.utils.clip_grad_norm_(model.parameters(), optim["clip"])
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
        ours_ms.append(record["ms"])
        difference = abs(loss.item() - record["loss"])
        worst = max(worst, difference / loss.item())
        step = record["step"]
        if step in (1, 10) or step % max(1, len(records) // 10) == 0:
            print(f"{step:6} {record['loss']:9.5f} {loss.item():9.5f}  {difference:.1e}")
    last = len(records) // 10 or 1
    ours = sum(record["loss"] for record in records[-last:]) / last
    print(f"largest relative difference {worst:.1e}; mean of our last {last} losses {ours:.4f}")
    per_step = config["train"]["batch"] * config["model"]["context"]
    median = lambda values: sorted(values)[len(values) // 2]
    print(f"tokens/s: potluck {1e3 * per_step / median(ours_ms):.0f}, "
          f"PyTorch {per_step / median(seconds):.0f} (one after the other)")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
