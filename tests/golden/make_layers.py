"""Writes the golden data: what PyTorch computes for small convolutional, residual and recurrent
models.

Run:    python3 tests/golden/make_layers.py     (seconds; needs torch and numpy, no network)
Made by: Python 3.11.7, PyTorch 2.15.0 on the CPU, NumPy 2.4.6.

What a file holds is described in `make.py`, which makes those of the other models. Here each also
has a planted wrong gradient (`wrong/NAME`). Two more things are in `resnet_batch`:

- Running averages of batch normalization, `init/..running_mean` and so on, and in `sgd10` what
  PyTorch's own make of them in 10 steps; and `eval/loss`, the loss of batch 0 outside of training
  by those of `init`.
- `pieces/..`: training on all 64 samples of the four batches in each step, in pieces of 8 samples
  that are normalized each by itself: the gradient of the mean loss, the parameters and running
  averages after 3 steps of SGD, and 20 losses of AdamW. A running average takes, once per step, the
  mean of what the pieces have, weighted by their samples.
"""

import functools
import math

import numpy as np
import torch
import torch.nn.functional as F

from make import (BATCHES, IGNORED, LIMIT, adamw, check_gradients, check_runs, gpt_batch, gradients,
                  ignore_some, leaves, make_all, nmse, save, sgd)

EPS, MOMENTUM = 1e-5, 0.1
PIECE, PIECES_SGD_STEPS, PIECES_ADAMW_STEPS = 8, 3, 20
# Step of central differences: short, because ReLU and maxima have kinks.
DIFFERENCE = 1e-8
STATES = ("running_mean", "running_var")
RNN_PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


# Models: functions from parameters by name and one batch to the mean loss. `wrong` plants the
# case's fault.


def cross_entropy(logits, batch, reduction="mean"):
    targets = batch["targets"].flatten()
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction=reduction)


def cnn_loss(p, batch, case, wrong=False):
    """Convolutions that keep the size, each with a pooling behind it, then linear layers.

    `wrong` moves the input of the second convolution by one column.
    """
    x = batch["inputs"].to(p["fc1.weight"].dtype)
    for n in range(1, len(case["channels"]) + 1):
        if wrong and n == 2:
            x = F.pad(x, (1, 0))[..., :-1]
        x = F.conv2d(x, p[f"conv{n}.weight"], p[f"conv{n}.bias"], padding=2)
        x = F.max_pool2d(F.relu(x), 2)
    x = x.flatten(1)
    for n in range(1, len(case["hidden"]) + 1):
        x = F.relu(F.linear(x, p[f"fc{n}.weight"], p[f"fc{n}.bias"]))
    return cross_entropy(F.linear(x, p[f"fc{n + 1}.weight"], p[f"fc{n + 1}.bias"]), batch)


def groups(channels):
    """The most groups of 8 that divide the channels."""
    return next(n for n in (8, 4, 2, 1) if channels % n == 0)


def normalize(p, name, x, case, wrong, states, training):
    """Batch or group normalization; with `states`, running averages are updated in place, or take
    the place of the batch's statistics outside of training.

    `wrong` divides by the unbiased variance, or takes half as many groups.
    """
    weight, bias = p[f"{name}.weight"], p[f"{name}.bias"]
    if case["norm"] == "group":
        count = groups(x.shape[1]) // (2 if wrong else 1)
        return F.group_norm(x, count, weight, bias, EPS)
    if wrong:
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=1, keepdim=True)
        y = (x - mean) / (variance + EPS).sqrt()
        return y * weight[:, None, None] + bias[:, None, None]
    running = [states[f"{name}.{state}"] for state in STATES] if states else [None, None]
    return F.batch_norm(x, *running, weight, bias, training, MOMENTUM, EPS)


def resnet_loss(p, batch, case, wrong=False, states=None, reduction="mean", training=True):
    """The residual network of He et al. 2016, section 4.2, with convolutions as shortcuts."""
    def conv_norm(x, conv, norm, stride=1):
        weight = p[f"{conv}.weight"]
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[2] // 2)
        return normalize(p, norm, x, case, wrong, states, training)

    x = batch["inputs"].to(p["fc.weight"].dtype)
    x = F.relu(conv_norm(x, "conv1", "bn1"))
    for stage in range(3):
        for block in range(case["blocks"]):
            name, stride = f"layer{stage + 1}.{block}", 2 if stage > 0 and block == 0 else 1
            y = F.relu(conv_norm(x, f"{name}.conv1", f"{name}.bn1", stride))
            y = conv_norm(y, f"{name}.conv2", f"{name}.bn2")
            if stride > 1:
                x = conv_norm(x, f"{name}.downsample.0", f"{name}.downsample.1", stride)
            x = F.relu(x + y)
    return cross_entropy(F.linear(x.mean((2, 3)), p["fc.weight"], p["fc.bias"]), batch, reduction)


def of_pieces(p, batch, case, states=None):
    """The mean loss of a batch in pieces that are normalized each by itself.

    PyTorch with a momentum of one leaves a piece's own statistics in the running averages.
    """
    total, samples = 0.0, len(batch["inputs"])
    means = {k: torch.zeros_like(v) for k, v in states.items()} if states else {}
    for first in range(0, samples, PIECE):
        piece = {k: v[first:first + PIECE] for k, v in batch.items()}
        own = {k: v.clone() for k, v in states.items()} if states else None
        total = total + resnet_loss(p, piece, case, states=own, reduction="sum")
        for name, mean in means.items():
            # running = 0.9 old + 0.1 piece
            statistic = (own[name] - (1 - MOMENTUM) * states[name]) / MOMENTUM
            mean += statistic * len(piece["inputs"]) / samples
    for name, mean in means.items():
        states[name].mul_(1 - MOMENTUM).add_(MOMENTUM * mean)
    return total / (batch["targets"] != IGNORED).sum()


def rnn_loss(p, batch, case, wrong=False, own_loop=False):
    """Embedding, layers of PyTorch's LSTM or GRU from a state of zeros, and a head.

    `wrong` doubles the bias of the LSTM's forget gate in layer 0, or resets the hidden values of a
    GRU before their product instead of behind it.
    """
    x = p["embedding.weight"][batch["tokens"]]
    weights = [[p[f"rnn.{part}_l{layer}"] for part in RNN_PARTS]
               for layer in range(case["layers"])]
    if own_loop or wrong and case["cell"] == "gru":
        for of_layer in weights:
            x = OWN_LAYERS[case["cell"]](x, of_layer, wrong)
    else:
        if wrong:
            doubled = torch.ones(4, case["width"], dtype=x.dtype)
            doubled[1] = 2
            weights[0][2:] = [bias * doubled.flatten() for bias in weights[0][2:]]
        zeros = x.new_zeros(case["layers"], len(x), case["width"])
        flat = [weight for of_layer in weights for weight in of_layer]
        rest = (True, case["layers"], 0.0, False, False, True)
        if case["cell"] == "lstm":
            x = torch.lstm(x, (zeros, zeros), flat, *rest)[0]
        else:
            x = torch.gru(x, zeros, flat, *rest)[0]
    return cross_entropy(F.linear(x, p["head.weight"], p["head.bias"]).flatten(0, 1), batch)


def own_lstm(x, weights, _):
    """The formulas in PyTorch's documentation of `LSTM`."""
    w_ih, w_hh, b_ih, b_hh = weights
    h = c = x.new_zeros(len(x), w_hh.shape[1])
    steps = []
    for t in range(x.shape[1]):
        gates = F.linear(x[:, t], w_ih, b_ih) + F.linear(h, w_hh, b_hh)
        i, f, g, o = gates.chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        steps.append(h)
    return torch.stack(steps, 1)


def own_gru(x, weights, wrong):
    """The formulas in PyTorch's documentation of `GRU`, or those of Cho et al. 2014 (`wrong`)."""
    w_ih, w_hh, b_ih, b_hh = weights
    width = w_hh.shape[1]
    h = x.new_zeros(len(x), width)
    steps = []
    for t in range(x.shape[1]):
        from_x = F.linear(x[:, t], w_ih, b_ih).chunk(3, 1)
        from_h = F.linear(h, w_hh, b_hh).chunk(3, 1)
        r, z = ((a + b).sigmoid() for a, b in zip(from_x[:2], from_h))
        product = F.linear(r * h, w_hh[2 * width:], b_hh[2 * width:]) if wrong else r * from_h[2]
        h = (1 - z) * (from_x[2] + product).tanh() + z * h
        steps.append(h)
    return torch.stack(steps, 1)


OWN_LAYERS = {"lstm": own_lstm, "gru": own_gru}


# Cases: their sizes, initial parameters and data.

# Heights and widths of pictures differ, and odd ones are halved.
PICTURES = {"batch": 16, "classes": 5}
RESNET = PICTURES | {"kind": "resnet", "blocks": 1, "sgd_lr": 0.05, "loss_of": resnet_loss}
RNN = {"kind": "rnn", "layers": 2, "width": 16, "context": 10, "vocabulary": 31, "batch": 16,
       "sgd_lr": 0.1, "adamw_lr": 1e-2, "loss_of": rnn_loss}
CASES = {
    "cnn": PICTURES | {"kind": "cnn", "picture": [1, 12, 10], "channels": [6, 12], "hidden": [24],
                       "sgd_lr": 0.05, "seed": 11, "faulty": "conv1.weight", "loss_of": cnn_loss},
    "resnet_batch": RESNET | {"picture": [3, 10, 8], "width": 4, "norm": "batch", "seed": 312,
                              "faulty": "layer3.0.conv1.weight"},
    "resnet_group": RESNET | {"picture": [2, 10, 8], "width": 6, "norm": "group", "seed": 13,
                              "faulty": "layer3.0.conv1.weight"},
    "lstm": RNN | {"cell": "lstm", "seed": 14, "faulty": "rnn.weight_hh_l0"},
    "gru": RNN | {"cell": "gru", "seed": 15, "faulty": "rnn.weight_hh_l0"},
}


def cnn_shapes(case):
    """Names and shapes of the parameters; a convolution's weight is (o, c, kh, kw)."""
    (inputs, *size), shapes = case["picture"], {}
    for n, outputs in enumerate(case["channels"], 1):
        shapes |= {f"conv{n}.weight": (outputs, inputs, 5, 5), f"conv{n}.bias": (outputs,)}
        inputs, size = outputs, [s // 2 for s in size]
    inputs *= size[0] * size[1]
    for n, outputs in enumerate(case["hidden"] + [case["classes"]], 1):
        shapes |= {f"fc{n}.weight": (outputs, inputs), f"fc{n}.bias": (outputs,)}
        inputs = outputs
    return shapes


def resnet_shapes(case):
    """Names and shapes of the parameters, torchvision's, and of running averages."""
    shapes, width = {}, case["width"]

    def add(conv, norm, outputs, inputs, kernel):
        shapes[f"{conv}.weight"] = (outputs, inputs, kernel, kernel)
        parts = ("weight", "bias") + (STATES if case["norm"] == "batch" else ())
        shapes.update({f"{norm}.{part}": (outputs,) for part in parts})

    add("conv1", "bn1", width, case["picture"][0], 3)
    inputs = width
    for stage in range(3):
        for block in range(case["blocks"]):
            name, outputs = f"layer{stage + 1}.{block}", width << stage
            add(f"{name}.conv1", f"{name}.bn1", outputs, inputs, 3)
            add(f"{name}.conv2", f"{name}.bn2", outputs, outputs, 3)
            if inputs != outputs:
                add(f"{name}.downsample.0", f"{name}.downsample.1", outputs, inputs, 1)
            inputs = outputs
    return shapes | {"fc.weight": (case["classes"], inputs), "fc.bias": (case["classes"],)}


def rnn_shapes(case):
    """Names and shapes of the parameters: PyTorch's of `Embedding`, `LSTM` or `GRU`, `Linear`."""
    c, v = case["width"], case["vocabulary"]
    columns = {"lstm": 4, "gru": 3}[case["cell"]] * c
    shapes = {"embedding.weight": (v, c)}
    for layer in range(case["layers"]):
        sizes = ((columns, c), (columns, c), (columns,), (columns,))
        shapes |= {f"rnn.{part}_l{layer}": size for part, size in zip(RNN_PARTS, sizes)}
    return shapes | {"head.weight": (v, c), "head.bias": (v,)}


SHAPES = {"cnn": cnn_shapes, "resnet": resnet_shapes, "rnn": rnn_shapes}


def init(case, random):
    """Random parameters and running averages in f32, in which no tensor is constant."""
    parameters = {}
    for name, shape in SHAPES[case["kind"]](case).items():
        n = random.standard_normal(shape)
        if len(shape) == 1:
            is_one = name.endswith((".weight", ".running_var"))
            value = (0.1 if case["kind"] != "rnn" else 0.5) * n + (1.0 if is_one else 0.0)
        elif name == "embedding.weight":
            value = n
        elif case["kind"] == "rnn":
            # Wide enough that gates saturate and faults in them show in the gradients.
            value = n * (2.0 if name == "head.weight" else 1.5) / math.sqrt(shape[1])
        else:
            value = n * math.sqrt((2 if len(shape) == 4 else 1) / math.prod(shape[1:]))
        parameters[name] = torch.from_numpy(value.astype(np.float32))
    return parameters


def picture_batch(case, random, patterns):
    """Noise, and on it the pattern of the class; a fifth of the targets is ignored."""
    targets = random.randint(case["classes"], size=case["batch"])
    noise = random.standard_normal((case["batch"], *case["picture"]))
    inputs = (noise + patterns[targets]).astype(np.float32)
    ignore_some(targets, random)
    return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}


def data(case, random):
    """The batches that a run goes through again and again."""
    if case["kind"] == "rnn":
        return [gpt_batch(case, random) for _ in range(BATCHES)]
    patterns = random.standard_normal((case["classes"], *case["picture"]))
    return [picture_batch(case, random, patterns) for _ in range(BATCHES)]


# What is computed from them.


def sgd_with_states(case, start, states, batches, dtype=torch.float32):
    """The parameters and running averages after plain SGD."""
    states = {k: v.to(dtype, copy=True) for k, v in states.items()}
    loss_of = functools.partial(case["loss_of"], states=states) if states else case["loss_of"]
    return sgd(case | {"loss_of": loss_of}, start, batches, dtype) | states


def sgd_of_pieces(case, start, states, batches, dtype=torch.float32):
    """The parameters and running averages after 3 steps of SGD on all batches together."""
    states = {k: v.to(dtype, copy=True) for k, v in states.items()}
    p = leaves(start, dtype)
    optimizer = torch.optim.SGD(p.values(), lr=case["sgd_lr"], foreach=False)
    for _ in range(PIECES_SGD_STEPS):
        optimizer.zero_grad()
        of_pieces(p, batches[0], case, states=states).backward()
        optimizer.step()
    return {k: v.detach() for k, v in p.items()} | states


def pieces(case, start, states, batches):
    """What training on all samples in each step gives, in pieces of 8."""
    whole = {part: torch.cat([batch[part] for batch in batches]) for part in batches[0]}
    case = case | {"loss_of": of_pieces}
    batches = [whole] * BATCHES
    grads = gradients(case, start, whole)
    params = sgd_of_pieces(case, start, states, batches)
    losses = adamw(case, start, batches, torch.float32)
    differences, drift = check_gradients(case, start, whole, grads, DIFFERENCE)
    exact = sgd_of_pieces(case, start, states, batches, torch.float64)
    sgd_drift = max(nmse(params[k], exact[k]) for k in params)
    losses = losses[:PIECES_ADAMW_STEPS]
    assert losses[-1] < 0.8 * losses[0], f"AdamW only went from {losses[0]} to {losses[-1]}"
    exact = adamw(case, start, batches, torch.float64)
    adamw_drift = max(abs(a - b) / b for a, b in zip(losses, exact))
    print(f"  pieces: against central differences {differences:.1e}, f32 against f64: gradients "
          f"{drift:.1e}, SGD {sgd_drift:.1e}, AdamW losses {adamw_drift:.1e}")
    assert sgd_drift < 1e-11 and adamw_drift < 1e-5
    at_once = gradients(case | {"loss_of": resnet_loss}, start, whole)
    least = min(nmse(at_once[k], grads[k]) for k in grads)
    print(f"  normalizing the 64 samples at once would give gradients with NMSE {least:.1e} up")
    assert least > LIMIT, "pieces and whole batches give the same gradients"
    # The weighted mean of the statistics is not one update per piece.
    one_by_one = {k: v.clone() for k, v in states.items()}
    with torch.no_grad():
        for first in range(0, len(whole["inputs"]), PIECE):
            piece = {k: v[first:first + PIECE] for k, v in whole.items()}
            resnet_loss(start, piece, case, states=one_by_one)
    once = {k: v.clone() for k, v in states.items()}
    with torch.no_grad():
        of_pieces(start, whole, case, states=once)
    assert min(nmse(one_by_one[k], once[k]) for k in states) > LIMIT
    return {"grad": grads, "sgd3": params, "adamw": {"losses": torch.tensor(losses)}}


def evaluate(case, initial, states, batch):
    """The loss outside of training, which is far from that of training."""
    p, states = ({k: v.double() for k, v in of.items()} for of in (initial, states))
    loss = resnet_loss(p, batch, case, states=states, training=False)
    of_training = resnet_loss(p, batch, case)
    print(f"  loss outside of training {loss:.6f}, in training {of_training:.6f}")
    assert abs(loss - of_training) > 0.1
    return loss.reshape(1)


# Checks beside those of `make.py`.


def check_states(case, start, states, batches, params):
    """Running averages are those of PyTorch's own module, and far from where they began."""
    exact = sgd_with_states(case, start, states, batches, torch.float64)
    for name in states:
        drift, moved = nmse(params[name], exact[name]), nmse(params[name], states[name])
        assert drift < 1e-11, f"{name} in f32 has NMSE {drift:.1e} against f64"
        assert moved > 1e-4, f"{name} hardly moves"
    if not states:
        return
    module = torch.nn.BatchNorm2d(case["width"])
    for name, buffer in module.named_buffers():
        if name in STATES:
            buffer.copy_(states[f"bn1.{name}"])
    inputs, weight = batches[0]["inputs"], start["conv1.weight"]
    module(F.conv2d(inputs, weight, padding=1))
    ours = {k: v.clone() for k, v in states.items()}
    with torch.no_grad():
        resnet_loss(start, batches[0], case, states=ours)
    for name in STATES:
        assert torch.equal(getattr(module, name), ours[f"bn1.{name}"])


def check_layers(case, start, batch, grads):
    """A loop over time by the documented formulas gives the gradients of PyTorch's layers."""
    own = gradients(case, start, batch, own_loop=True)
    distance = max(nmse(own[k], grads[k]) for k in grads)
    print(f"  a loop by the documented formulas: NMSE {distance:.1e}")
    assert distance < 1e-25, f"the documented formulas give NMSE {distance:.1e}"


def plant(case, start, batch, grads):
    """The gradient that a fault gives, which a comparison must refuse."""
    name = case["faulty"]
    wrong = gradients(case, start, batch, wrong=True)[name]
    distance = nmse(wrong, grads[name])
    print(f"  planted wrong gradient of {name}: NMSE {distance:.2e}")
    assert distance > LIMIT, "the planted fault is too small to be refused"
    return {f"wrong/{name}": wrong}


def make(name, case, folder):
    """Computes, checks and writes one case; returns the file's size in bytes."""
    random = np.random.RandomState(case["seed"])
    initial, batches = init(case, random), data(case, random)
    states = {k: v for k, v in initial.items() if k.endswith(STATES)}
    start = {k: v for k, v in initial.items() if k not in states}
    grads = gradients(case, start, batches[0])
    params = sgd_with_states(case, start, states, batches)
    losses = adamw(case, start, batches, torch.float32)
    print(f"{name}: {len(start)} tensors, {sum(v.numel() for v in start.values())} parameters")
    print(f"  AdamW loss {losses[0]:.6f} (step 1), {losses[-1]:.6f} (step {len(losses)})")
    differences, drift = check_gradients(case, start, batches[0], grads, DIFFERENCE)
    print(f"  gradients against central differences {differences:.1e}, f32 against f64 {drift:.1e}")
    drifts = check_runs(case, start, batches, {k: params[k] for k in start}, losses)
    print(f"  f32 against f64: SGD NMSE {drifts[0]:.1e}, AdamW losses {drifts[1]:.1e}")
    check_states(case, start, states, batches, params)
    if case["kind"] == "rnn":
        check_layers(case, start, batches[0], grads)
    values = {"adamw/losses": torch.tensor(losses)} | plant(case, start, batches[0], grads)
    parts = {"init": initial, "grad": grads, "sgd10": params}
    parts |= {f"batch/{k}": batch for k, batch in enumerate(batches)}
    if states:
        together = pieces(case, start, states, batches)
        parts |= {f"pieces/{k}": v for k, v in together.items()}
        parts["eval"] = {"loss": evaluate(case, initial, states, batches[0])}
        case = case | {"piece": PIECE, "pieces_sgd_steps": PIECES_SGD_STEPS}
    for prefix, of_prefix in parts.items():
        values |= {f"{prefix}/{k}": v for k, v in of_prefix.items()}
    return save(name, case, values, folder)


def main():
    assert max(make_all(make, CASES)) < 205_000, "a file of golden data has grown beyond 205 KB"


if __name__ == "__main__":
    main()
