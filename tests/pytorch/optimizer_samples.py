"""Writes samples of optimizers and schedules: settings from PyTorch's tests, and what PyTorch makes
of them.

Run:    python3 tests/pytorch/optimizer_samples.py --out FILE        (seconds; no network)
Made by: Python 3.11.7, PyTorch 2.15.0 on the CPU, and expecttest 0.3.0, which PyTorch's testing
module imports.

The settings of optimizers are those of `optim_inputs_func` in `optim_db` of
`torch.testing._internal.common_optimizers`, each once, for the optimizers of OPTIMIZERS, and
those of SETTINGS. Those of schedules are the `scheduler_inputs` there, each schedule by itself, and
those of SCHEDULES.

The file is JSON with the keys

- `start`: the values of one parameter, and `gradients`, those of each step, which are multiples of
  1/64, so that float32 has them,
- `optimizers`: a list of `optimizer` (its class), `settings` (its arguments) and `values`, those of
  the parameter after each step, computed in float64,
- `schedules`: a list of `schedule` (its class), `settings`, `lr` (that of the optimizer) and
  `rates`, those of the first steps in float64.

A schedule that is no function of the step has `refused`, the reason, in place of `rates`.
"""

import argparse
import json
import random

import torch
from torch.optim import lr_scheduler
from torch.testing._internal.common_optimizers import optim_db

OPTIMIZERS = ["SGD", "Adam", "AdamW", "RMSprop"]
ELEMENTS, STEPS, RATES = 6, 8, 40
LR = 0.125

# Settings that `optim_inputs_func` lacks.
SETTINGS = [
    ("SGD", {"lr": 0.125, "momentum": 0.5, "nesterov": True}),
    ("Adam", {"lr": 0.03, "betas": [0.8, 0.95], "eps": 1e-3, "weight_decay": 0.2}),
    ("AdamW", {"lr": 0.03, "betas": [0.8, 0.95], "eps": 1e-3, "weight_decay": 0.2}),
    ("RMSprop", {"lr": 0.03, "alpha": 0.9, "momentum": 0.9}),
    ("RMSprop", {"lr": 0.03, "alpha": 0.75, "momentum": 0.5, "eps": 1e-3, "weight_decay": 0.2}),
]

# Arguments that `scheduler_inputs` lacks, by the names of PyTorch.
SCHEDULES = [
    ("StepLR", {"step_size": 1, "gamma": 0.5}),
    ("StepLR", {"step_size": 7, "gamma": 0.1}),
    ("ExponentialLR", {"gamma": 0.9}),
    ("ExponentialLR", {"gamma": 1.0}),
    ("CosineAnnealingLR", {"T_max": 40}),
    ("CosineAnnealingLR", {"T_max": 40, "eta_min": 0.0125}),
    ("LinearLR", {"start_factor": 1.0, "end_factor": 0.25, "total_iters": 30}),
    ("ConstantLR", {"factor": 1.0, "total_iters": 5}),
    ("OneCycleLR", {"max_lr": 0.125, "total_steps": 40}),
    ("OneCycleLR", {"max_lr": 0.125, "total_steps": 40, "pct_start": 0.1}),
    ("OneCycleLR", {"max_lr": 0.125, "total_steps": 40, "pct_start": 0.45, "div_factor": 4.0,
                    "final_div_factor": 10.0}),
    ("OneCycleLR", {"max_lr": 0.125, "total_steps": 40, "anneal_strategy": "linear"}),
    ("OneCycleLR", {"max_lr": 0.125, "total_steps": 40, "three_phase": True}),
]

# Attributes of schedules that are their arguments.
ARGUMENTS = ["step_size", "gamma", "T_max", "eta_min", "start_factor", "end_factor", "factor",
             "total_iters"]


def in_columns(text, width=99):
    """Breaks JSON into lines behind commas that are in no string."""
    lines, start, at, in_string = [], 0, 0, False
    for place, character in enumerate(text):
        if character == '"' and text[place - 1] != "\\":
            in_string = not in_string
        if place - start >= width and at > start:
            lines.append(text[start:at])
            start = at
        if character == "," and not in_string:
            at = place + 1
    return "\n".join([*lines, text[start:]]) + "\n"


def plain(value):
    """The value of an argument as JSON has it."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value


def values_of(cls, settings, start, gradients):
    parameter = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = cls([parameter], **settings)
    values = []
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        values.append(parameter.tolist())
    return values


def optimizers(start, gradients):
    given = []
    for info in optim_db:
        if info.optim_cls.__name__ in OPTIMIZERS:
            inputs = info.optim_inputs_func(device="cpu")
            given += [(info.optim_cls, sample.kwargs) for sample in inputs]
    given += [(getattr(torch.optim, name), settings) for name, settings in SETTINGS]
    samples = []
    for cls, arguments in given:
        settings = {key: plain(value) for key, value in arguments.items()}
        entry = {"optimizer": cls.__name__, "settings": settings}
        if entry not in [{key: known[key] for key in entry} for known in samples]:
            samples.append(entry | {"values": values_of(cls, arguments, start, gradients)})
    return samples


def new_optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)


def rates_of(optimizer, schedule):
    rates = []
    for step in range(RATES):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step + 1 < RATES:
            schedule.step()
    return rates


def schedules():
    samples = []
    made = []
    for info in optim_db:
        for makers in info.scheduler_inputs or []:
            for maker in makers:
                optimizer = new_optimizer()
                schedule = maker(optimizer)
                known = {key: getattr(schedule, key) for key in ARGUMENTS if hasattr(schedule, key)}
                made.append((type(schedule).__name__, known, optimizer, schedule))
    for name, settings in SCHEDULES:
        optimizer = new_optimizer()
        extra = {"cycle_momentum": False} if name == "OneCycleLR" else {}
        schedule = getattr(lr_scheduler, name)(optimizer, **settings, **extra)
        made.append((name, settings, optimizer, schedule))
    for name, settings, optimizer, schedule in made:
        entry = {"schedule": name, "settings": settings, "lr": LR}
        if entry in [{key: known[key] for key in entry} for known in samples]:
            continue
        if name == "ReduceLROnPlateau":
            samples.append(entry | {"refused": "it follows the values of a metric"})
        else:
            samples.append(entry | {"rates": rates_of(optimizer, schedule)})
    return samples


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True)
    out = parser.parse_args().out
    draw = random.Random(7)
    start = [draw.randrange(-128, 129) / 64 for _ in range(ELEMENTS)]
    gradients = [[draw.randrange(-128, 129) / 64 for _ in range(ELEMENTS)] for _ in range(STEPS)]
    samples = {"start": start, "gradients": gradients}
    samples["optimizers"] = optimizers(start, gradients)
    samples["schedules"] = schedules()
    with open(out, "w") as file:
        file.write(in_columns(json.dumps(samples, separators=(",", ":"))))
    print(f"{len(samples['optimizers'])} of optimizers, {len(samples['schedules'])} of schedules")


if __name__ == "__main__":
    main()
