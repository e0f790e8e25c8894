"""Writes samples of operators: arguments from PyTorch's tests, and what PyTorch makes of them.

Run:    python3 tests/pytorch/op_samples.py --out FILE [--whole]      (a minute; no network)
Made by: Python 3.11.7, PyTorch 2.15.0 on the CPU, NumPy 2.4.6, safetensors 0.8.0, and expecttest
0.3.0, which PyTorch's testing module imports.

The samples are those of `op_db` in `torch.testing._internal.common_methods_invocations`, for the
operators of TABLE in all their variants, in float32 (in int64 where there is no float32), made for
gradients where the operator has them. The file has up to KEPT_SAMPLES of each variant, with at most
KEPT_ELEMENTS elements per tensor, in at most KEPT_BYTES, those with the most varied arguments
first; with `--whole`, all that are usable.

A sample is usable if

- its arguments are tensors, numbers, truth values, strings, None, or nested lists of these,
- its tensors, results too, are of float32, int64 or bool, have 1 to LARGEST elements, and at most
  HIGHEST_RANK dimensions,
- PyTorch computes it without an exception, twice the same whatever the seed, and in float32 about
  the same as in float64: not so where it takes its own epsilon or limit from the type.

Results and gradients were computed in float64 from the float32 arguments, on one thread, and are
rounded to float32. The gradient of each differentiable result is a fixed pattern of its indices.
Arguments are stored as they were before the call: running averages are changed by it.

The file is of safetensors, with F32 and I64 (also for truth values), and sample N has the tensors

- `N/in/K`: those in the arguments, counted in their order (a tensor that is twice there, once),
- `N/out/K`: all results, tuples and lists flattened,
- `N/dout/K`: the gradient of result K, where it is differentiable,
- `N/grad/K`: the gradient of argument K, where PyTorch has one.

The metadata's only key is `samples`, a list in JSON with an object for each sample: `op`,
`variant`, `args`, `kwargs`, `outputs` (how many) and `gradients` (each K). A tensor is `{"tensor":
K, "requires_grad": BOOL}`; infinities and NaN are the strings "inf", "-inf" and "nan". Arguments
have the order of `op_db`, which for a few differs from the function's own (`where`: value,
condition, other value; `einsum`: tensors, equation; `embedding`: weight, index).
"""

import argparse
import collections
import json
import math
import pathlib
import random
import warnings

import numpy as np
import torch
from safetensors.numpy import load, save
from torch.testing._internal import common_methods_invocations as invocations

# Operators by their names in `op_db`; those that it lacks are printed.
TABLE = {
    "unary": """
        abs neg reciprocal exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square sin cos tan asin
        acos atan sinh cosh tanh asinh acosh atanh sigmoid erf erfc logit sinc sign floor ceil round
        trunc frac positive deg2rad rad2deg clamp clamp_min clamp_max nan_to_num""",
    "activations": """
        nn.functional.relu nn.functional.relu6 nn.functional.gelu nn.functional.silu
        nn.functional.mish nn.functional.softplus nn.functional.softsign nn.functional.elu
        nn.functional.selu nn.functional.celu nn.functional.leaky_relu nn.functional.hardswish
        nn.functional.hardsigmoid nn.functional.hardtanh nn.functional.hardshrink
        nn.functional.softshrink nn.functional.tanhshrink nn.functional.threshold
        nn.functional.logsigmoid nn.functional.prelu nn.functional.glu""",
    "binary": """
        add sub rsub mul div true_divide maximum minimum fmax fmin pow float_power atan2 hypot eq ne
        lt le gt ge where lerp addcmul addcdiv xlogy logaddexp heaviside copysign""",
    # Variants of `max` and `min` are binary too.
    "reductions": """
        sum mean amax amin max min prod std var logsumexp norm softmax log_softmax
        nn.functional.softmin argmax argmin topk cumsum sort any all count_nonzero""",
    "layout": """
        reshape view permute transpose t swapaxes movedim squeeze unsqueeze expand broadcast_to
        repeat tile flatten cat stack hstack vstack chunk split narrow select flip roll tril triu
        diag index_select gather scatter take_along_dim masked_fill nn.functional.one_hot
        nn.functional.pad""",
    "products": """
        matmul mm bmm addmm baddbmm addbmm mv dot inner outer einsum nn.functional.linear
        nn.functional.bilinear""",
    "pictures": """
        nn.functional.conv1d nn.functional.conv2d nn.functional.conv_transpose1d
        nn.functional.conv_transpose2d nn.functional.max_pool1d nn.functional.max_pool2d
        nn.functional.avg_pool1d nn.functional.avg_pool2d nn.functional.adaptive_avg_pool2d
        nn.functional.interpolate nn.functional.upsample_nearest nn.functional.pixel_shuffle""",
    "norms": """
        nn.functional.layer_norm nn.functional.group_norm nn.functional.batch_norm
        nn.functional.rms_norm nn.functional.instance_norm nn.functional.local_response_norm
        nn.functional.normalize""",
    "losses": """
        nn.functional.cross_entropy nn.functional.nll_loss nn.functional.binary_cross_entropy
        nn.functional.binary_cross_entropy_with_logits nn.functional.mse_loss nn.functional.l1_loss
        nn.functional.smooth_l1_loss nn.functional.huber_loss nn.functional.kl_div
        nn.functional.hinge_embedding_loss nn.functional.margin_ranking_loss
        nn.functional.soft_margin_loss nn.functional.poisson_nll_loss
        nn.functional.gaussian_nll_loss nn.functional.cosine_similarity
        nn.functional.pairwise_distance""",
    "other": """
        nn.functional.embedding nn.functional.scaled_dot_product_attention
        nn.functional.dropout""",
}
LARGEST, HIGHEST_RANK = 4096, 5
KEPT_SAMPLES, KEPT_ELEMENTS, KEPT_BYTES = 6, 512, 1_900_000
# What a tensor adds to a file's header, about.
TENSOR_BYTES = 80
# By how much float32 may differ from float64: of the value, of the tensor's largest, and whatever
# they are.
OF_VALUE, OF_LARGEST, ANYWAY = 1e-3, 1e-4, 1e-6
ARGUMENTS = (torch.float32, torch.int64, torch.bool)
RESULTS = (torch.float64, torch.float32, torch.int64, torch.bool)


class TooLargeError(Exception):
    """The sample has a tensor with too many elements or dimensions."""


class RefusedError(Exception):
    """The sample is not usable; the message says why."""


class Sample:
    """A usable sample: its description, and its tensors by name without the number."""

    def __init__(self, description, tensors):
        self.description = description
        self.tensors = tensors

    def elements(self):
        """Returns how many elements its largest tensor has."""
        return max(tensor.size for tensor in self.tensors.values())

    def bytes(self):
        """Returns how many bytes it adds to a file, about."""
        text = json.dumps(json.dumps(self.description))
        return len(text) + sum(TENSOR_BYTES + tensor.nbytes for tensor in self.tensors.values())

    def features(self):
        """Returns what tells its arguments from those of other samples."""
        shapes = {
            name: tensor.shape for name, tensor in self.tensors.items() if name.startswith("in/")}
        together = [self.description["args"], self.description["kwargs"]]
        found = {
            ("shapes", tuple(shapes.values())),
            ("together", json.dumps(together), tuple(shapes.values()))}

        def add(place, value):
            if isinstance(value, dict):
                shape = shapes[f"in/{value['tensor']}"]
                found.update([(place, "rank", len(shape)), (place, "shape", shape)])
                found.add((place, "requires_grad", value["requires_grad"]))
            elif isinstance(value, list):
                found.add((place, "length", len(value)))
                for index, item in enumerate(value):
                    add((place, index), item)
            else:
                found.add((place, type(value).__name__, value))

        add("args", self.description["args"])
        for name, value in self.description["kwargs"].items():
            add(name, value)
        return found


# What PyTorch computes.


def check(tensor, types):
    """Raises unless the tensor is one that a usable sample may have."""
    if tensor.layout != torch.strided or tensor.dtype not in types:
        raise RefusedError(f"a tensor of {str(tensor.dtype).removeprefix('torch.')}")
    if tensor.numel() == 0:
        raise RefusedError("no elements")
    if tensor.numel() > LARGEST or tensor.dim() > HIGHEST_RANK:
        raise TooLargeError


def described(value, tensors):
    """Returns an argument in the form of the metadata, and collects its tensors."""
    if isinstance(value, torch.Tensor):
        check(value, ARGUMENTS)
        known = [index for index, tensor in enumerate(tensors) if tensor is value]
        if not known:
            known = [len(tensors)]
            tensors.append(value)
        return {"tensor": known[0], "requires_grad": value.requires_grad}
    if type(value) in (list, tuple, torch.Size):
        return [described(item, tensors) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise RefusedError(f"an argument of {type(value).__name__}")


def replaced(value, copies):
    """Returns an argument with its tensors replaced by those of the dictionary."""
    if isinstance(value, torch.Tensor):
        return copies[id(value)]
    if type(value) in (list, tuple):
        return type(value)(replaced(item, copies) for item in value)
    return value


def flattened(results):
    """Returns the tensors of nested results in their order."""
    if isinstance(results, torch.Tensor):
        return [results]
    if isinstance(results, (list, tuple)):
        return [tensor for item in results for tensor in flattened(item)]
    raise RefusedError(f"a result of {type(results).__name__}")


def pattern(shape, index):
    """Returns the gradient of a result: multiples of 1/32 in both signs, none of them 0."""
    places = torch.arange(math.prod(shape), dtype=torch.float64)
    return (((37 * places + 17 * index + 11) % 61 - 30.5) / 32).reshape(shape)


def compute(op, args, kwargs, tensors, dtype, seed):
    """Returns the results, their gradients, and those of the arguments (by number, all three)."""
    copies = [
        tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
        .requires_grad_(tensor.requires_grad) for tensor in tensors]
    by_id = {id(tensor): copy for tensor, copy in zip(tensors, copies)}
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    try:
        results = flattened(op(
            *(replaced(value, by_id) for value in args),
            **{name: replaced(value, by_id) for name, value in kwargs.items()}))
        for result in results:
            check(result, RESULTS)
        gradients = {
            index: pattern(result.shape, index).to(result.dtype)
            for index, result in enumerate(results) if result.requires_grad}
        wanted = [index for index, copy in enumerate(copies) if copy.requires_grad]
        found = []
        if gradients and wanted:
            found = torch.autograd.grad(
                [results[index] for index in gradients], [copies[index] for index in wanted],
                list(gradients.values()), allow_unused=True)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        raise RefusedError(f"raises {type(error).__name__}") from error
    return (
        {index: result.detach() for index, result in enumerate(results)}, gradients,
        {index: tensor for index, tensor in zip(wanted, found) if tensor is not None})


def near(single, double):
    """Says whether float32 came near to float64."""
    single, double = single.double(), double.double()
    finite = double[double.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    # What float32 cannot hold is infinite in it.
    return torch.allclose(
        single, double.float().double(), rtol=OF_VALUE, atol=OF_LARGEST * largest + ANYWAY,
        equal_nan=True)


def array(tensor):
    """Returns a tensor in the form of the file."""
    dtype = torch.float32 if tensor.is_floating_point() else torch.int64
    return tensor.detach().to(dtype).contiguous().resolve_neg().numpy()


def usable(info, given):
    """Returns one of PyTorch's samples computed, or raises TooLargeError or RefusedError."""
    tensors = []
    args, kwargs = (given.input, *given.args), given.kwargs
    description = {
        "op": info.name,
        "variant": info.variant_test_name,
        "args": [described(value, tensors) for value in args],
        "kwargs": {name: described(value, tensors) for name, value in kwargs.items()},
    }
    results, gradients, found = compute(info.op, args, kwargs, tensors, torch.float64, seed=1)
    again, _, found_again = compute(info.op, args, kwargs, tensors, torch.float64, seed=2)
    single, _, found_single = compute(info.op, args, kwargs, tensors, torch.float32, seed=1)
    for one, other in ((results, again), (found, found_again)):
        for index, tensor in one.items():
            if not torch.equal(tensor.nan_to_num(), other[index].nan_to_num()):
                raise RefusedError("random")
    for one, other in ((single, results), (found_single, found)):
        if one.keys() != other.keys() or not all(near(one[index], other[index]) for index in one):
            raise RefusedError("differs in float32")
    description["outputs"] = len(results)
    description["gradients"] = list(found)
    parts = {"in": dict(enumerate(tensors)), "out": results, "dout": gradients, "grad": found}
    return Sample(description, {
        f"{part}/{index}": array(tensor)
        for part, numbered in parts.items() for index, tensor in numbered.items()})


def computed(info):
    """Returns the usable samples of an operator's variant, and how many are not, by reason."""
    samples, reasons = [], collections.Counter()
    types = info.supported_dtypes("cpu")
    if torch.float32 in types:
        given = info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd)
    elif torch.int64 in types:
        given = info.sample_inputs("cpu", torch.int64, requires_grad=False)
    else:
        return samples, reasons
    for one in given:
        try:
            samples.append(usable(info, one))
        except TooLargeError:
            reasons["too large"] += 1
        except RefusedError as error:
            reasons[str(error)] += 1
    return samples, reasons


# Which samples are kept.


def varied(samples):
    """Returns small samples in the order in which they add the most that earlier ones had not."""
    left = {
        index: sample.features() for index, sample in enumerate(samples)
        if sample.elements() <= KEPT_ELEMENTS}
    covered, chosen = set(), []
    while left:
        best = max(
            left, key=lambda index: (
                len(left[index] - covered), -samples[index].bytes(), -index))
        if not left[best] - covered:
            break
        covered |= left.pop(best)
        chosen.append(best)
    return chosen


def kept(by_variant):
    """Returns the kept samples of each variant: of each its first, then its second, and so on."""
    orders = [varied(samples) for samples in by_variant]
    chosen = [[] for _ in by_variant]
    left = KEPT_BYTES
    for turn in range(KEPT_SAMPLES):
        for samples, order, indices in zip(by_variant, orders, chosen):
            if turn < len(order) and samples[order[turn]].bytes() <= left:
                indices.append(order[turn])
                left -= samples[order[turn]].bytes()
    return [
        [samples[index] for index in sorted(indices)]
        for samples, indices in zip(by_variant, chosen)]


# The file and what is printed.


def contents(samples):
    """Returns the bytes of the file."""
    tensors = {
        f"{number}/{name}": tensor
        for number, sample in enumerate(samples) for name, tensor in sample.tensors.items()}
    text = json.dumps([sample.description for sample in samples], allow_nan=False)
    written = save(tensors, {"samples": text})
    read = load(written)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].shape == tensor.shape and read[name].dtype == tensor.dtype
        assert read[name].tobytes() == tensor.tobytes()
    return written


def report(rows):
    """Prints for each variant its samples by what became of them."""
    line = "{:<52} {:>7} {:>6} {:>7} {:>9} {:>7}  {}"
    print(line.format("operator", "samples", "usable", "written", "too large", "refused", "why"))
    totals = [0] * 5
    for title, samples, written, reasons in rows:
        large = reasons.pop("too large", 0)
        refused = reasons.total()
        counts = [len(samples) + large + refused, len(samples), written, large, refused]
        why = ", ".join(f"{reason} ({count})" for reason, count in sorted(reasons.items()))
        print(line.format(title, *counts, why or ("" if counts[0] else "not on the CPU")).rstrip())
        totals = [total + count for total, count in zip(totals, counts)]
    print(line.format(f"all {len(rows)} variants", *totals, "").rstrip())


def main():
    """Computes the samples and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the file to write")
    parser.add_argument("--whole", action="store_true", help="write all samples that are usable")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Without the wrapper's fixed seed, what is random is found out.
    invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)

    names = set(" ".join(TABLE.values()).split())
    infos = sorted(
        (info for info in invocations.op_db if info.name in names),
        key=lambda info: (info.name, info.variant_test_name))
    by_variant, reasons = zip(*(computed(info) for info in infos))
    written = by_variant if arguments.whole else kept(by_variant)
    samples = [sample for chosen in written for sample in chosen]
    data = contents(samples)
    assert arguments.whole or len(data) <= KEPT_BYTES
    arguments.out.write_bytes(data)

    titles = [" ".join([info.name, info.variant_test_name]).strip() for info in infos]
    report(list(zip(titles, by_variant, map(len, written), reasons)))
    missing = sorted(names - {info.name for info in infos})
    print("not in op_db:", ", ".join(missing) or "none")
    operators = {sample.description["op"] for sample in samples}
    print(f"{len(operators)} operators, {len(samples)} samples, {len(data)} bytes")


if __name__ == "__main__":
    main()
