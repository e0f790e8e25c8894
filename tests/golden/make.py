"""Writes the golden data: what PyTorch computes for four small models.

Run:    python3 tests/golden/make.py        (seconds; needs torch and numpy, no network)
Made by: Python 3.11.7, PyTorch 2.15.0 on the CPU, NumPy 2.4.6.

One safetensors file per case is written beside this script. Each holds the initial parameters and
four batches, and from them: the gradient of the mean loss of batch 0, computed in f64 from the f32
weights; the parameters after 10 steps of plain SGD; and the losses of 50 steps of AdamW. Both runs
start from the initial parameters, are in f32 on one thread, and use batch s % 4 in step s.

All random numbers come from NumPy's `RandomState`, whose streams are frozen. The f32 runs depend on
the order of sums inside the matrix library, so another CPU or version may change their last bits;
they are run again in f64 to show that nothing in them amplifies such differences.
"""

import json
import math
import pathlib
import struct

import numpy as np
import torch
import torch.nn.functional as F

BATCHES = 4
SGD_STEPS = 10
ADAMW_STEPS = 50
ADAMW = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
# The weights are wider than the usual 0.02, so that attention is far from uniform and a fault in
# queries or keys shows in the gradients.
DEVIATION = 0.2
# In PyTorch an ignored target is -100; the files hold the largest u32 in its place.
IGNORED, IGNORED_U32 = -100, 2**32 - 1
ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
# The planted fault must be refused by comparisons as loose as this NMSE. Finer faults, such as one
# GELU taken for the other, need the second limit, which f32 still meets with room to spare.
LIMIT, TIGHT_LIMIT = 1e-6, 1e-9


# Models: functions from parameters by name and one batch to the mean loss.


def attention(p, name, x, heads, v_scale):
    """Causal self-attention of x (b, t, c); `v_scale` is 1 but for the planted fault."""
    b, t, c = x.shape
    qkv = F.linear(x, p[f"{name}.c_attn.weight"], p.get(f"{name}.c_attn.bias"))
    q, k, v = (z.view(b, t, heads, c // heads).transpose(1, 2) for z in qkv.split(c, dim=2))
    scores = q @ k.transpose(2, 3) / math.sqrt(c // heads)
    future = torch.ones(t, t, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(dim=3)
    y = (weights @ (v * v_scale)).transpose(1, 2).reshape(b, t, c)
    return F.linear(y, p[f"{name}.c_proj.weight"], p.get(f"{name}.c_proj.bias"))


def gpt_loss(p, batch, case, wrong=False):
    """Mean cross-entropy of a GPT-2 over the targets that are not ignored.

    `wrong` scales the values by 1.01 in the attention of block 0.
    """
    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p.get(f"{name}.bias"), 1e-5)

    def linear(x, name):
        return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    tokens, targets = batch["tokens"], batch["targets"]
    x = p["wte.weight"][tokens] + p["wpe.weight"][: tokens.shape[1]]
    for n in range(case["layers"]):
        v_scale = 1.01 if wrong and n == 0 else 1.0
        h = norm(x, f"h.{n}.ln_1")
        x = x + attention(p, f"h.{n}.attn", h, case["heads"], v_scale)
        h = linear(norm(x, f"h.{n}.ln_2"), f"h.{n}.mlp.c_fc")
        x = x + linear(ACTIVATIONS[case["activation"]](h), f"h.{n}.mlp.c_proj")
    head = p["wte.weight"] if case["tied"] else p["lm_head.weight"]
    logits = F.linear(norm(x, "ln_f"), head)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def mlp_loss(p, batch, case):
    """Mean cross-entropy or squared error of a stack of linear layers."""
    x = batch["inputs"].to(p["layers.0.weight"].dtype)
    last = len(case["widths"]) - 2
    for n in range(last + 1):
        x = F.linear(x, p[f"layers.{n}.weight"], p[f"layers.{n}.bias"])
        if n < last:
            x = ACTIVATIONS[case["activation"]](x)
    if case["loss"] == "squared_error":
        return F.mse_loss(x, batch["targets"].to(x.dtype))
    return F.cross_entropy(x, batch["targets"], ignore_index=IGNORED)


# Cases: their sizes, initial parameters and data.

GPT = {"layers": 2, "width": 24, "context": 12, "vocabulary": 31, "batch": 4,
       "norm_eps": 1e-5, "loss": "cross_entropy", "loss_of": gpt_loss}
MLP = {"batch": 16, "loss_of": mlp_loss}
CASES = {
    "gpt": GPT | {"heads": 2, "activation": "gelu", "bias": True, "tied": True,
                  "sgd_lr": 0.1, "seed": 1},
    "gpt_plain": GPT | {"heads": 3, "activation": "gelu_tanh", "bias": False, "tied": False,
                        "sgd_lr": 0.1, "seed": 2},
    "mlp": MLP | {"widths": [10, 32, 24, 5], "activation": "relu", "loss": "cross_entropy",
                  "sgd_lr": 0.1, "seed": 3},
    "mlp_mse": MLP | {"widths": [6, 20, 3], "activation": "gelu_tanh", "loss": "squared_error",
                      "sgd_lr": 0.1, "seed": 9},
}


def gpt_shapes(case):
    """Names and shapes of the parameters; a linear weight is (out, in)."""
    c, v = case["width"], case["vocabulary"]
    shapes = {"wte.weight": (v, c), "wpe.weight": (case["context"], c)}

    def add(name, *shape):
        shapes[f"{name}.weight"] = shape
        if case["bias"]:
            shapes[f"{name}.bias"] = shape[:1]

    for n in range(case["layers"]):
        add(f"h.{n}.ln_1", c)
        add(f"h.{n}.attn.c_attn", 3 * c, c)
        add(f"h.{n}.attn.c_proj", c, c)
        add(f"h.{n}.ln_2", c)
        add(f"h.{n}.mlp.c_fc", 4 * c, c)
        add(f"h.{n}.mlp.c_proj", c, 4 * c)
    add("ln_f", c)
    if not case["tied"]:
        shapes["lm_head.weight"] = (v, c)
    return shapes


def mlp_shapes(case):
    """Names and shapes of the parameters; a weight is (out, in)."""
    shapes = {}
    for n, (inner, outer) in enumerate(zip(case["widths"], case["widths"][1:])):
        shapes |= {f"layers.{n}.weight": (outer, inner), f"layers.{n}.bias": (outer,)}
    return shapes


def init(case, random):
    """Random parameters in f32, in which no tensor is constant: a zero bias or a gain of one would
    hide a fault."""
    is_gpt = case["loss_of"] is gpt_loss
    parameters = {}
    for name, shape in (gpt_shapes if is_gpt else mlp_shapes)(case).items():
        n = random.standard_normal(shape)
        if len(shape) == 1:
            value = 0.1 * n + (1.0 if name.endswith(".weight") else 0.0)
        elif not is_gpt:
            value = n / math.sqrt(shape[1])
        elif name.endswith("c_proj.weight"):
            value = n * DEVIATION / math.sqrt(2 * case["layers"])
        else:
            value = n * DEVIATION
        parameters[name] = torch.from_numpy(value.astype(np.float32))
    return parameters


def ignore_some(targets, random):
    """Marks a fifth of the targets as ignored, in place."""
    chosen = random.permutation(targets.size)[: round(targets.size / 5)]
    targets.reshape(-1)[chosen] = IGNORED


def gpt_batch(case, random):
    """Sequences in which 3 of 4 tokens follow from the one before, and a fifth of the targets is
    ignored."""
    shape, v = (case["batch"], case["context"] + 1), case["vocabulary"]
    text = random.randint(v, size=shape)
    for t in range(1, shape[1]):
        follows = random.random_sample(shape[0]) < 0.75
        text[:, t] = np.where(follows, (3 * text[:, t - 1] + 5) % v, text[:, t])
    tokens, targets = text[:, :-1].copy(), text[:, 1:].copy()
    ignore_some(targets, random)
    return {"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}


def mlp_batch(case, random, teacher):
    """Normal inputs of deviation 2, and as targets what a random linear map says of them: its
    largest output, or its outputs bent by a sine."""
    inputs = 2 * random.standard_normal((case["batch"], case["widths"][0])).astype(np.float32)
    outputs = inputs / 2 @ teacher
    if case["loss"] == "squared_error":
        targets = np.sin(outputs).astype(np.float32)
    else:
        targets = outputs.argmax(axis=1)
        ignore_some(targets, random)
    return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}


def data(case, random):
    """The batches that a run goes through again and again."""
    if case["loss_of"] is gpt_loss:
        return [gpt_batch(case, random) for _ in range(BATCHES)]
    teacher = random.standard_normal((case["widths"][0], case["widths"][-1]))
    return [mlp_batch(case, random, teacher) for _ in range(BATCHES)]


# What is computed from them.


def leaves(parameters, dtype):
    return {k: v.detach().clone().to(dtype).requires_grad_() for k, v in parameters.items()}


def gradients(case, start, batch, dtype=torch.float64, **fault):
    """The gradient of the mean loss for every parameter, by default in f64 from f32 weights."""
    p = leaves(start, dtype)
    case["loss_of"](p, batch, case, **fault).backward()
    return {k: v.grad for k, v in p.items()}


def train(case, p, batches, optimizer, steps):
    """Trains `p` in place; returns the mean loss of each step's batch before its update."""
    losses = []
    for step in range(steps):
        loss = case["loss_of"](p, batches[step % BATCHES], case)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(case, start, batches, dtype):
    """The parameters after plain SGD: no momentum, no decay, no clipping."""
    p = leaves(start, dtype)
    optimizer = torch.optim.SGD(p.values(), lr=case["sgd_lr"], foreach=False)
    train(case, p, batches, optimizer, SGD_STEPS)
    return {k: v.detach() for k, v in p.items()}


def adamw(case, start, batches, dtype):
    """The losses of AdamW at a constant rate; only tensors of two dimensions decay."""
    p = leaves(start, dtype)
    groups = [
        {"params": [v for v in p.values() if v.dim() >= 2], "weight_decay": ADAMW["weight_decay"]},
        {"params": [v for v in p.values() if v.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (ADAMW["beta1"], ADAMW["beta2"])
    lr = case.get("adamw_lr", ADAMW["lr"])
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=ADAMW["eps"], foreach=False)
    return train(case, p, batches, optimizer, ADAMW_STEPS)


# Checks: each keeps the data from becoming too weak to refuse a fault.


def nmse(value, reference):
    """Sum of squared differences over the sum of squares of the reference."""
    value, reference = value.double(), reference.double()
    return (((value - reference) ** 2).sum() / (reference**2).sum()).item()


def check_gradients(case, start, batch, grads, step=1e-5):
    """The step-1 gradients agree with central differences along a random direction per tensor,
    none is nearly zero, and f32 comes close to them."""
    random = np.random.RandomState(case["seed"] + 100)
    p = {k: v.double() for k, v in start.items()}
    worst = 0.0
    for name, grad in grads.items():
        assert (grad**2).mean() > 1e-6, f"the gradient of {name} is nearly zero"
        direction = torch.from_numpy(random.standard_normal(grad.shape)) * step
        high, low = (case["loss_of"](p | {name: p[name] + s * direction}, batch, case).item()
                     for s in (1, -1))
        error = abs((high - low) / 2 - (grad * direction).sum().item())
        worst = max(worst, error / (grad.norm() * direction.norm()).item())
    assert worst < 1e-6, f"a gradient differs from central differences by {worst:.1e}"
    in_f32 = gradients(case, start, batch, torch.float32)
    drift = max(nmse(in_f32[k], grads[k]) for k in grads)
    assert drift < TIGHT_LIMIT / 100, f"gradients in f32 have NMSE {drift:.1e} against f64"
    return worst, drift


def check_activation(case, start, batch, grads):
    """Taking one GELU for the other shows at the tight limit; returns the largest NMSE."""
    other = {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}[case["activation"]]
    swapped = gradients(case | {"activation": other}, start, batch)
    largest = max(nmse(swapped[k], grads[k]) for k in grads)
    assert largest > 10 * TIGHT_LIMIT, f"the other GELU only gives NMSE {largest:.1e}"
    return largest


def check_runs(case, start, batches, params, losses):
    """AdamW learns, and both f32 runs stay close to the same runs in f64."""
    assert losses[-1] < 0.8 * losses[0], f"AdamW only went from {losses[0]} to {losses[-1]}"
    for k in range(BATCHES):
        of_batch = losses[k::BATCHES]
        assert of_batch[-1] < 0.8 * of_batch[0], f"AdamW does not learn batch {k}"
    exact = sgd(case, start, batches, torch.float64)
    sgd_drift = max(nmse(params[k], exact[k]) for k in params)
    assert sgd_drift < 1e-11, f"SGD in f32 has NMSE {sgd_drift:.1e} against f64"
    for name in params:
        moved = nmse(params[name], start[name])
        assert moved > 1e-6, f"SGD hardly moves {name}: NMSE {moved:.1e}"
    exact = adamw(case, start, batches, torch.float64)
    adamw_drift = max(abs(a - b) / b for a, b in zip(losses, exact))
    assert adamw_drift < 1e-5, f"AdamW losses in f32 differ from f64 by {adamw_drift:.1e}"
    return sgd_drift, adamw_drift


def check(case, start, batches, grads, params, losses):
    """All checks of one case, with what they measured."""
    differences, grad_drift = check_gradients(case, start, batches[0], grads)
    sgd_drift, adamw_drift = check_runs(case, start, batches, params, losses)
    print(f"  gradients against central differences {differences:.1e}")
    print(f"  f32 against f64: gradients NMSE {grad_drift:.1e}, SGD NMSE {sgd_drift:.1e}, "
          f"AdamW losses {adamw_drift:.1e}")
    if case["activation"] != "relu":
        swapped = check_activation(case, start, batches[0], grads)
        print(f"  the other GELU would give gradients with NMSE {swapped:.1e}")


# Files.


def write(path, tensors, metadata):
    """Writes a safetensors file: the header's length as a little-endian u64, the header in JSON
    padded with spaces to 8 bytes, then the tensors' bytes without gaps."""
    header, offset = {"__metadata__": metadata}, 0
    for name, (dtype, array) in tensors.items():
        end = offset + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, array in tensors.values():
            file.write(array.tobytes())


def stored(tensor):
    """The file's type and array: integers become u32, floats f32."""
    array = tensor.detach().contiguous().numpy()
    if tensor.dtype == torch.int64:
        return "U32", np.where(array == IGNORED, IGNORED_U32, array).astype("<u4")
    return "F32", array.astype("<f4")


def metadata(name, case):
    """The case's sizes and settings, as the strings that the format wants."""
    entries = {"case": name, "batches": BATCHES, "sgd_steps": SGD_STEPS,
               "adamw_steps": ADAMW_STEPS}
    entries |= {k: v for k, v in case.items() if k != "loss_of"}
    entries |= {f"adamw_{k}": v for k, v in ADAMW.items() if f"adamw_{k}" not in case}
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in entries.items()}


def plant(case, start, batch, grads):
    """The gradient that a fault gives, which a comparison must refuse."""
    name = "h.0.attn.c_attn.weight"
    wrong = gradients(case, start, batch, wrong=True)[name]
    distance = nmse(wrong, grads[name])
    print(f"  planted wrong gradient of {name}: NMSE {distance:.2e}")
    assert distance > LIMIT, "the planted fault is too small to be refused"
    return {f"wrong/{name}": wrong}


def make(name, case, folder):
    """Computes, checks and writes one case; returns the file's size in bytes."""
    random = np.random.RandomState(case["seed"])
    start, batches = init(case, random), data(case, random)
    grads = gradients(case, start, batches[0])
    params = sgd(case, start, batches, torch.float32)
    losses = adamw(case, start, batches, torch.float32)
    print(f"{name}: {len(start)} tensors, {sum(v.numel() for v in start.values())} parameters")
    print(f"  AdamW loss {losses[0]:.6f} (step 1), {losses[-1]:.6f} (step {len(losses)})")
    check(case, start, batches, grads, params, losses)
    values = {}
    for prefix, of_prefix in (("init", start), ("grad", grads), ("sgd10", params)):
        values |= {f"{prefix}/{k}": v for k, v in of_prefix.items()}
    values["adamw/losses"] = torch.tensor(losses)
    for k, batch in enumerate(batches):
        values |= {f"batch/{k}/{part}": v for part, v in batch.items()}
    if name == "gpt":
        values |= plant(case, start, batches[0], grads)
    return save(name, case, values, folder)


def save(name, case, values, folder):
    """Writes the file of a case; returns its size in bytes."""
    path = folder / f"{name}.safetensors"
    write(path, {k: stored(v) for k, v in values.items()}, metadata(name, case))
    return path.stat().st_size


def make_all(make, cases):
    """Writes the file of each case beside this one; returns their sizes in bytes."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    folder = pathlib.Path(__file__).resolve().parent
    sizes = {name: make(name, case, folder) for name, case in cases.items()}
    print(f"bytes: {sizes}, together {sum(sizes.values())}")
    return sizes.values()


def main():
    assert sum(make_all(make, CASES)) < 700_000, "the golden data has grown beyond 700 KB"


if __name__ == "__main__":
    main()
