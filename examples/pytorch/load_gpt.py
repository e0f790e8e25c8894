"""Loads a trained model.kind = "gpt" into PyTorch, and compares its loss with potluck's on a text.

python load_gpt.py RUN TEXT [PROGRAM]; the tokenizer of the run is "char".
"""
import json, pathlib, subprocess, sys, tomllib, torch
from safetensors.torch import load_file
from torch import nn

class Block(nn.Module):
    def __init__(self, width, heads, bias, activation):
        super().__init__()
        self.heads, self.activation = heads, activation
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        linear = lambda inputs, outputs: nn.Linear(inputs * width, outputs * width, bias=bias)
        self.attn = nn.ModuleDict({"c_attn": linear(1, 3), "c_proj": linear(1, 1)})
        self.mlp = nn.ModuleDict({"c_fc": linear(1, 4), "c_proj": linear(4, 1)})

    def forward(self, x):
        parts = self.attn["c_attn"](self.ln_1(x)).chunk(3, -1)  # queries, keys, values
        heads = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.attn["c_proj"](y.transpose(1, 2).flatten(2))
        return x + self.mlp["c_proj"](self.activation(self.mlp["c_fc"](self.ln_2(x))))

run, text, program = *sys.argv[1:3], (sys.argv[3:] or ["potluck"])[0]
step = max(pathlib.Path(run).glob("checkpoints/step-" + "[0-9]" * 8))
meta = json.loads((step / "manifest.json").read_text())["meta"]
c = tomllib.loads(meta["model"])["model"]
gelu = nn.GELU({"gelu": "none", "gelu_tanh": "tanh"}[c["activation"]])
weights = load_file(step / "parameters.safetensors")
blocks = [Block(c["width"], c["heads"], c["bias"], gelu) for _ in range(c["layers"])]
parts = {name: nn.Embedding(*weights[f"{name}.weight"].shape) for name in ("wte", "wpe")}
parts |= {"h": nn.Sequential(*blocks), "ln_f": nn.LayerNorm(c["width"], bias=c["bias"])}
model = nn.ModuleDict(parts)
head = weights.pop("lm_head.weight", weights["wte.weight"])  # not in the file if it is tied
model.load_state_dict(weights)

ids = {char: id for id, char in enumerate(meta["tokenizer"]["chars"])}
tokens = torch.tensor([ids[char] for char in pathlib.Path(text).read_bytes().decode()])
count = (len(tokens) - 1) // c["context"]  # windows side by side; the rest is left out
inputs, targets = (tokens[at : at + count * c["context"]].view(count, -1) for at in (0, 1))
with torch.no_grad():
    x = model["h"](model["wte"](inputs) + model["wpe"].weight[: c["context"]])
    logits = (model["ln_f"](x) @ head.T).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, targets.flatten()).item()
words = [program, "eval", run, "--data", text, "--devices", "cpu", "--json"]
theirs = json.loads(subprocess.check_output(words))
print(f"loss of {theirs['targets']} targets: {loss:.7f} here, {theirs['loss']:.7f} by potluck")
assert targets.numel() == theirs["targets"] and abs(loss - theirs["loss"]) < 1e-5
print("they agree")
