"""Times training steps of a GPT in PyTorch: batch, layers, heads, width, context, vocabulary and
steps are given; prints a line of JSON."""

import json
import sys
import time

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, heads, width):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        qkv = self.qkv(self.norm_1(x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers, heads, width, context, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(heads, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return functional.cross_entropy(logits.float(), targets.flatten())


def find_device():
    if torch.cuda.is_available():
        return "cuda", torch.cuda.get_device_name()
    if torch.backends.mps.is_available():
        return "mps", "Apple GPU (mps)"
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return "xpu", torch.xpu.get_device_name()
    return "cpu", f"the CPU, {torch.get_num_threads()} threads"


def wait(device):
    if device != "cpu":
        getattr(torch, device).synchronize()


def measure(device, batch, sizes, steps, autocast):
    torch.manual_seed(1)
    model = Gpt(*sizes).to(device)
    fused = {"fused": True} if device == "cuda" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **fused)
    context, vocabulary = sizes[3], sizes[4]
    ids = torch.randint(vocabulary, (batch, context), device=device)
    targets = torch.randint(vocabulary, (batch, context), device=device)
    times = []
    for _ in range(steps + 3):
        wait(device)
        begun = time.perf_counter()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            loss = model(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait(device)
        times.append(time.perf_counter() - begun)
    return sorted(times[3:])[steps // 2]


def main():
    batch, layers, heads, width, context, vocabulary, steps = map(int, sys.argv[1:])
    sizes = (layers, heads, width, context, vocabulary)
    device, name = find_device()
    precisions = [("f32", False, False)]
    if device == "cuda":
        precisions += [("tf32", True, False), ("bf16", True, True)]
    rows = []
    for precision, tf32, autocast in precisions:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        seconds = measure(device, batch, sizes, steps, autocast)
        row = {"precision": precision, "ms": 1e3 * seconds}
        rows.append({**row, "tokens_per_s": batch * context / seconds})
    print(json.dumps({"torch": torch.__version__, "device": name, "rows": rows}))


main()
