"""Writes the golden data of language models in the Hugging Face form: what the library transformers
makes of small random models of each family.

Run:    python3 tests/golden/make_language.py [FOLDER]
        (half a minute; needs torch, transformers, safetensors and numpy, no network)
Made by: Python 3.11.7, PyTorch 2.15.0 on the CPU, transformers 5.23.0, safetensors 0.8.0,
         NumPy 2.4.6.

One safetensors file per case is written into FOLDER, or beside this script. Each holds the initial
parameters under the names, and in the shapes, in which `save_pretrained` writes them (`init/NAME`),
four batches (`batch/K/...`), and from them: the logits of batch 0 (`logits`, in f64); the gradient
of its mean loss (`grad/NAME`), over the targets that are not ignored; and the losses of 20 steps of
AdamW, each before its update (`adamw/losses`, in f64). Step s uses batch s % 4; only batch 0 has
ignored targets. `wrong/logits` has one detail wrong and must be refused. In the metadata are the
text of the model's config.json and the sizes.

Everything is computed in f64 from the f32 weights. transformers cannot do that: it normalizes,
takes the softmax and finds the angles in f32, whatever the model's type. So the models are written
out below, and each must agree with transformers, unchanged and in f32, in logits, gradients and
losses. All random numbers come from NumPy's `RandomState`, whose streams are frozen.
"""

import json
import math
import os
import pathlib
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

from make import (ADAMW, BATCHES, DEVIATION, LIMIT, adamw, check_gradients, gradients, ignore_some,
                  nmse, stored, write)

ADAMW_STEPS = 20
# What f32 may differ from f64: NMSE of logits and gradients, relative difference of losses.
LOGITS_DRIFT, GRADIENTS_DRIFT, LOSSES_DRIFT = 1e-12, 1e-11, 1e-6
# Runs that start from weights with other last two bits.
NUDGES, NUDGE = 16, 2.0**-21


# Models: functions from parameters by name and tokens (b, t) to logits (b, t, v). They read the
# config.json alone, as an importer does. `config["fault"]` is not transformers': it plants a fault.


def attend(q, k, v, scale):
    """Causal attention of (b, heads, t, d), as (b, t, heads * d)."""
    t = q.shape[2]
    future = torch.ones(t, t, dtype=torch.bool).triu(1)
    weights = (q @ k.transpose(2, 3) * scale).masked_fill(future, -math.inf).softmax(dim=3)
    return (weights @ v).transpose(1, 2).flatten(2)


def gpt2_logits(p, tokens, config):
    """GPT-2. Its linear weights are (in, out), other than those of all other families.

    The fault `transposed` takes the square weight behind attention as (out, in).
    """
    def norm(x, name):
        weight, bias = p[f"{name}.weight"], p[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, config["layer_norm_epsilon"])

    def linear(x, name, transposed=False):
        weight = p[f"{name}.weight"]
        return x @ (weight.T if transposed else weight) + p[f"{name}.bias"]

    approximate = {"gelu_new": "tanh", "gelu": "none"}[config["activation_function"]]
    heads = config["n_head"]
    d = config["n_embd"] // heads
    b, t = tokens.shape
    x = p["transformer.wte.weight"][tokens] + p["transformer.wpe.weight"][:t]
    for n in range(config["n_layer"]):
        name = f"transformer.h.{n}"
        qkv = linear(norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn")
        q, k, v = (z.view(b, t, heads, d).transpose(1, 2) for z in qkv.chunk(3, dim=2))
        y = attend(q, k, v, d**-0.5)
        x = x + linear(y, f"{name}.attn.c_proj", config.get("fault") == "transposed")
        h = linear(norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc")
        x = x + linear(F.gelu(h, approximate=approximate), f"{name}.mlp.c_proj")
    return F.linear(norm(x, "transformer.ln_f"), p["transformer.wte.weight"])


def turns(rope, inverse):
    """How often each frequency turns within the context before its extension."""
    return rope["original_max_position_embeddings"] * inverse / (2 * math.pi)


def frequencies(config, d):
    """Angle per position of each pair in a head of width d.

    The fault `steps` leaves the middle frequencies of llama3 scaling as they are.
    """
    rope = config["rope_parameters"]
    inverse = rope["rope_theta"] ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    if rope["rope_type"] == "linear":
        return inverse / rope["factor"]
    if rope["rope_type"] == "llama3":
        # 1 keeps a frequency, 0 divides it by the factor, and between them both are mixed.
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = ((turns(rope, inverse) - low) / (high - low)).clamp(0, 1)
        if config.get("fault") == "steps":
            keep = keep.ceil()
        return inverse * (keep + (1 - keep) / rope["factor"])
    assert rope["rope_type"] == "default"
    return inverse


def rotate(x, angles, interleaved):
    """Turns the pairs (i, i + d / 2) of x (b, heads, t, d), or (2 i, 2 i + 1) for the fault."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(3)
    a, b = x.chunk(2, dim=3)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=3)


def llama_logits(p, tokens, config):
    """Llama, Qwen2, Qwen3, Mistral and SmolLM3. Biases and norms of queries and keys are there if
    the file has them.

    Faults: `interleaved` turns the wrong pairs, `late_norm` normalizes queries and keys behind the
    rotation, `unbiased_keys` has no bias of keys, `striped` deals out the key heads in turn.
    """
    fault = config.get("fault")

    def norm(x, name):
        weight = p.get(f"{name}.weight")
        if weight is None:
            return x
        square = x.square().mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(square + config["rms_norm_eps"]) * weight

    def linear(x, name):
        return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    d = config.get("head_dim") or config["hidden_size"] // heads
    (b, t), layers, group = tokens.shape, config["num_hidden_layers"], heads // key_heads
    rotary = config.get("no_rope_layers") or [1] * layers
    angles = torch.arange(t, dtype=torch.float64)[:, None] * frequencies(config, d)
    embedding = p["model.embed_tokens.weight"]
    x = embedding[tokens]
    for n in range(layers):
        name = f"model.layers.{n}"
        attn = f"{name}.self_attn"
        h = norm(x, f"{name}.input_layernorm")
        q, k, v = (linear(h, f"{attn}.{part}_proj") for part in "qkv")
        if fault == "unbiased_keys":
            k = k - p[f"{attn}.k_proj.bias"]
        q, k, v = (z.view(b, t, -1, d).transpose(1, 2) for z in (q, k, v))
        if fault != "late_norm":
            q, k = norm(q, f"{attn}.q_norm"), norm(k, f"{attn}.k_norm")
        if rotary[n]:
            q, k = (rotate(z, angles, fault == "interleaved") for z in (q, k))
        if fault == "late_norm":
            q, k = norm(q, f"{attn}.q_norm"), norm(k, f"{attn}.k_norm")
        if fault == "striped":
            k, v = (z.repeat(1, group, 1, 1) for z in (k, v))
        else:
            k, v = (z.repeat_interleave(group, dim=1) for z in (k, v))
        x = x + linear(attend(q, k, v, d**-0.5), f"{attn}.o_proj")
        h = norm(x, f"{name}.post_attention_layernorm")
        gate, up = linear(h, f"{name}.mlp.gate_proj"), linear(h, f"{name}.mlp.up_proj")
        x = x + linear(F.silu(gate) * up, f"{name}.mlp.down_proj")
    head = embedding if config["tie_word_embeddings"] else p["lm_head.weight"]
    return F.linear(norm(x, "model.norm"), head)


def logits_of(p, tokens, config):
    return (gpt2_logits if config["model_type"] == "gpt2" else llama_logits)(p, tokens, config)


def loss_of(p, batch, case):
    """Mean cross-entropy over the targets that are not ignored."""
    logits = logits_of(p, batch["tokens"], case["config"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def library_logits(p, tokens, model):
    """transformers' own; a tied head follows the embedding."""
    return torch.func.functional_call(model, p, (tokens,), {"use_cache": False}).logits


def library_loss(p, batch, case):
    """transformers' own; `shift_labels` are targets that are shifted already."""
    model = case["model"]
    logits = library_logits(p, batch["tokens"], model)
    return model.loss_function(logits, None, logits.shape[-1], shift_labels=batch["targets"])


# Cases. `library` are arguments of transformers' configuration, `wrong` what a wrong reader would
# have in its place.

ROPE = {"rope_type": "default", "rope_theta": 500.0}
LLAMA3 = ROPE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                 "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
BATCH = {"batch": 3, "adamw_steps": ADAMW_STEPS}
CASES = {
    # The sequences are shorter than the table of positions. No dropout, which the defaults have.
    "hf_gpt2": BATCH | {
        "family": "gpt2", "tokens": 11, "seed": 21, "wrong": {"fault": "transposed"},
        "library": {"vocab_size": 61, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3,
                    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}},
    "hf_llama": BATCH | {
        "family": "llama", "tokens": 12, "seed": 72, "wrong": {"fault": "interleaved"},
        "library": {"vocab_size": 67, "hidden_size": 24, "intermediate_size": 37,
                    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
                    "max_position_embeddings": 32, "rms_norm_eps": 1e-5}},
    "hf_llama3": BATCH | {
        "family": "llama", "tokens": 13, "seed": 23, "wrong": {"fault": "steps"},
        "library": {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 37, "head_dim": 12,
                    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                    "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
                    "attention_bias": True, "tie_word_embeddings": True,
                    "rope_parameters": LLAMA3}},
    "hf_llama_linear": BATCH | {
        "family": "llama", "tokens": 13, "seed": 24, "wrong": {"rope_parameters": ROPE},
        "library": {"vocab_size": 71, "hidden_size": 24, "intermediate_size": 41,
                    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1,
                    "max_position_embeddings": 32,
                    "rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.5}}},
    "hf_qwen2": BATCH | {
        "family": "qwen2", "tokens": 9, "seed": 45, "wrong": {"fault": "unbiased_keys"},
        "library": {"vocab_size": 83, "hidden_size": 24, "intermediate_size": 43,
                    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                    "max_position_embeddings": 32, "tie_word_embeddings": True,
                    "rope_parameters": ROPE | {"rope_theta": 1e6}}},
    "hf_qwen3": BATCH | {
        "family": "qwen3", "tokens": 10, "seed": 26, "wrong": {"fault": "late_norm"},
        "library": {"vocab_size": 73, "hidden_size": 24, "intermediate_size": 31, "head_dim": 10,
                    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                    "max_position_embeddings": 32,
                    "rope_parameters": ROPE | {"rope_theta": 1e6}}},
    "hf_mistral": BATCH | {
        "family": "mistral", "tokens": 12, "seed": 37, "wrong": {"fault": "striped"},
        "library": {"vocab_size": 79, "hidden_size": 24, "intermediate_size": 35,
                    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
                    "max_position_embeddings": 32, "sliding_window": None}},
    # The second of the three layers is without rotation.
    "hf_smollm3": BATCH | {
        "family": "smollm3", "tokens": 11, "seed": 28, "wrong": {"no_rope_layers": [1, 1, 1]},
        "library": {"vocab_size": 97, "hidden_size": 24, "intermediate_size": 33,
                    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                    "max_position_embeddings": 32, "no_rope_layer_interval": 2,
                    "pad_token_id": None}},
}


def build(case):
    """transformers' model in f32, with attention by plain products instead of PyTorch's kernel."""
    config = transformers.AutoConfig.for_model(
        case["family"], bos_token_id=0, eos_token_id=0, **case["library"])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval()


def init(model, random):
    """Random parameters in f32 in which no tensor is constant, by name; a tied head is left out."""
    parameters = {}
    for name, tensor in sorted(model.named_parameters()):
        n = DEVIATION * random.standard_normal(tuple(tensor.shape))
        value = n + 1 if tensor.dim() == 1 and name.endswith(".weight") else n
        parameters[name] = torch.from_numpy(value.astype(np.float32))
    return parameters


def batch_of(case, random, ignoring):
    """Sequences in which 3 of 4 tokens follow from the one before; with `ignoring`, a fifth of the
    targets is ignored."""
    shape, v = (case["batch"], case["tokens"] + 1), case["library"]["vocab_size"]
    text = random.randint(v, size=shape)
    for t in range(1, shape[1]):
        follows = random.random_sample(shape[0]) < 0.75
        text[:, t] = np.where(follows, (3 * text[:, t - 1] + 5) % v, text[:, t])
    tokens, targets = text[:, :-1].copy(), text[:, 1:].copy()
    if ignoring:
        ignore_some(targets, random)
    return {"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}


def saved(case, start):
    """The text of config.json by `save_pretrained`, whose tensors are those of `start`."""
    model = case["model"]
    missing, unexpected = model.load_state_dict(start, strict=False)
    tied = case["library"].get("tie_word_embeddings", model.config.tie_word_embeddings)
    assert missing == ["lm_head.weight"] * tied and not unexpected, (missing, unexpected)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(f"{folder}/model.safetensors")
        assert tensors.keys() == start.keys(), tensors.keys() ^ start.keys()
        assert all(torch.equal(tensors[k], start[k]) for k in start)
        return pathlib.Path(folder, "config.json").read_text()


# Checks beside those of `make.py`.


def check_library(case, start, batches, logits, grads, losses):
    """transformers, unchanged and in f32, has these logits, gradients and losses."""
    library = case | {"loss_of": library_loss}
    with torch.no_grad():
        logits_drift = nmse(library_logits(start, batches[0]["tokens"], case["model"]), logits)
    assert logits_drift < LOGITS_DRIFT, f"transformers' logits have NMSE {logits_drift:.1e}"
    in_f32 = gradients(library, start, batches[0], torch.float32)
    grad_drift = max(nmse(in_f32[k], grads[k]) for k in grads)
    assert grad_drift < GRADIENTS_DRIFT, f"transformers' gradients have NMSE {grad_drift:.1e}"
    in_f32 = adamw(library, start, batches, torch.float32)[:ADAMW_STEPS]
    losses_drift = max(abs(a - b) / b for a, b in zip(in_f32, losses))
    assert losses_drift < LOSSES_DRIFT, f"transformers' losses differ by {losses_drift:.1e}"
    return logits_drift, grad_drift, losses_drift


def check_stable(case, start, batches, losses):
    """The losses in f32 do not hang on the last bits of anything: where a gradient is nearly zero,
    AdamW steps by the sign of its rounding errors. Returns the largest relative difference."""
    random, worst = np.random.RandomState(case["seed"] + 100), 0.0
    for _ in range(NUDGES):
        signs = {k: torch.from_numpy(random.randint(-1, 2, size=v.shape)) for k, v in start.items()}
        nudged = {k: v * (1 + signs[k] * NUDGE) for k, v in start.items()}
        in_f32 = adamw(case, nudged, batches, torch.float32)[:ADAMW_STEPS]
        worst = max(worst, *(abs(a - b) / b for a, b in zip(in_f32, losses)))
    assert worst < LOSSES_DRIFT, f"other last bits change losses by {worst:.1e}: take another seed"
    return worst


def check_learning(losses):
    for k in range(BATCHES):
        of_batch = losses[k::BATCHES]
        assert of_batch[-1] < 0.95 * of_batch[0], f"AdamW does not learn batch {k}: {of_batch}"


def check_branches(config):
    """llama3 scaling keeps a frequency, divides one, and mixes one."""
    rope, d = config["rope_parameters"], config["head_dim"]
    plain = frequencies(config | {"rope_parameters": rope | {"rope_type": "default"}}, d)
    n = turns(rope, plain)
    kept, divided = n > rope["high_freq_factor"], n < rope["low_freq_factor"]
    counts = [branch.sum().item() for branch in (kept, ~kept & ~divided, divided)]
    print(f"  frequencies kept, mixed, divided: {counts}")
    assert min(counts) > 0


def check_finer(case, p, tokens, logits):
    """How small the faults of an epsilon and of the other GELU are."""
    config = case["config"]
    name = "rms_norm_eps" if "rms_norm_eps" in config else "layer_norm_epsilon"
    finer = {"the other epsilon": {name: 1.1e-5 - config[name]}}
    if config["model_type"] == "gpt2":
        finer["the other GELU"] = {"activation_function": "gelu"}
    for what, change in finer.items():
        distance = nmse(logits_of(p, tokens, config | change), logits)
        print(f"  {what} would give logits with NMSE {distance:.1e}")
        assert distance > 1e3 * LOGITS_DRIFT, "the fault is too small to be refused"


# Files.


def metadata(name, case):
    """The case's sizes and settings, as the strings that the format wants."""
    entries = {"case": name, "batches": BATCHES, "config": case["config_text"]}
    entries |= {k: case[k] for k in ("family", "batch", "tokens", "adamw_steps", "seed", "wrong")}
    entries |= {f"adamw_{k}": v for k, v in ADAMW.items()}
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in entries.items()}


def stored_f64(tensor):
    return "F64", tensor.detach().contiguous().numpy().astype("<f8")


def make(name, case, folder):
    """Computes, checks and writes one case; returns what its row of the table says."""
    random = np.random.RandomState(case["seed"])
    case = case | {"model": build(case), "loss_of": loss_of}
    start = init(case["model"], random)
    batches = [batch_of(case, random, ignoring=k == 0) for k in range(BATCHES)]
    text = saved(case, start)
    case |= {"config_text": text, "config": json.loads(text)}
    print(f"{name}: {len(start)} tensors, {sum(v.numel() for v in start.values())} parameters")
    if case["library"].get("rope_parameters") is LLAMA3:
        check_branches(case["config"])

    tokens, exact = batches[0]["tokens"], {k: v.double() for k, v in start.items()}
    logits = logits_of(exact, tokens, case["config"])
    grads = gradients(case, start, batches[0])
    losses = adamw(case, start, batches, torch.float64)[:ADAMW_STEPS]
    print(f"  AdamW loss {losses[0]:.6f} (step 1), {losses[-1]:.6f} (step {len(losses)})")
    check_learning(losses)
    differences, _ = check_gradients(case, start, batches[0], grads)
    print(f"  gradients against central differences {differences:.1e}")
    drifts = check_library(case, start, batches, logits, grads, losses)
    nudged = check_stable(case, start, batches, losses)
    print(f"  f32 runs from other last bits: AdamW losses {nudged:.1e}")
    check_finer(case, exact, tokens, logits)
    wrong = logits_of(exact, tokens, case["config"] | case["wrong"])
    distance = nmse(wrong, logits)
    assert distance > LIMIT, f"the planted fault is too small to be refused: NMSE {distance:.1e}"

    values = {f"init/{k}": stored(v) for k, v in start.items()}
    for k, batch in enumerate(batches):
        values |= {f"batch/{k}/{part}": stored(v) for part, v in batch.items()}
    values |= {f"grad/{k}": stored(v) for k, v in grads.items()}
    values |= {"logits": stored_f64(logits), "wrong/logits": stored(wrong)}
    values["adamw/losses"] = stored_f64(torch.tensor(losses, dtype=torch.float64))
    path = folder / f"{name}.safetensors"
    write(path, values, metadata(name, case))
    return [path.stat().st_size, *drifts, distance]


def main():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    here = pathlib.Path(__file__).resolve().parent
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here
    rows = {name: make(name, case, folder) for name, case in CASES.items()}
    print("\ntransformers in f32 against these values in f64, and the planted fault")
    print(f"{'case':16} {'bytes':>7} {'logits':>8} {'grad':>8} {'losses':>8} {'wrong':>8}")
    for name, (size, *distances) in rows.items():
        print(f"{name:16} {size:7} " + " ".join(f"{d:8.1e}" for d in distances))
    total = sum(row[0] for row in rows.values())
    print(f"{'together':16} {total:7}")
    assert total < 1_200_000, "the golden data has grown beyond 1.2 MB"


if __name__ == "__main__":
    main()
