"""Loads a trained model.kind = "cnn" into PyTorch, and compares it with potluck on all digits.

python load_cnn.py RUN MNIST [PROGRAM]: MNIST has the IDX files of one part, gzipped or not.
"""
import csv, gzip, io, json, numpy, pathlib, subprocess, sys, tomllib, torch
from safetensors.torch import load_file
from torch import nn

run, data, program = *sys.argv[1:3], (sys.argv[3:] or ["potluck"])[0]
step = max(pathlib.Path(run).glob("checkpoints/step-" + "[0-9]" * 8))
meta = json.loads((step / "manifest.json").read_text())["meta"]
config = tomllib.loads(meta["model"])["model"]
samples = meta["description"]["samples"]

layers, channels = nn.Sequential(), samples["shape"][0]
for number, outputs in enumerate(config["channels"], 1):
    layers.add_module(f"conv{number}", nn.Conv2d(channels, outputs, 5, padding=2))
    layers.append(nn.ReLU()).append(nn.MaxPool2d(2))
    channels = outputs
layers.append(nn.Flatten())  # channels, then rows, then columns: potluck flattens in the same order
widths = [*config["hidden"], len(samples["targets"]["classes"])]
for number, outputs in enumerate(widths, 1):
    layers.add_module(f"fc{number}", nn.LazyLinear(outputs))
    if number < len(widths):
        layers.append(nn.ReLU())

def idx(pattern, header):
    (path,) = pathlib.Path(data).glob(pattern)
    unpack = gzip.decompress if path.suffix == ".gz" else bytes
    return numpy.frombuffer(unpack(path.read_bytes()), numpy.uint8, offset=header)

pictures = torch.tensor(idx("*-images-idx3-ubyte*", 16)).view(-1, *samples["shape"]) / 255
scale = samples["normalization"]["features"][0]  # one per channel, of the training part
pictures = (pictures - scale["mean"]) / scale["std"]
labels = torch.tensor(idx("*-labels-idx1-ubyte*", 8)).long()
layers.load_state_dict(load_file(step / "parameters.safetensors"))
with torch.no_grad():
    logits = layers(pictures)
loss = nn.functional.cross_entropy(logits, labels).item()

on_data = ["--data", data, "--devices", "cpu"]
told = subprocess.check_output([program, "predict", run, *on_data], text=True)
rows = list(csv.reader(io.StringIO(told)))[1:]
theirs = torch.tensor([[float(value) for value in row[3:]] for row in rows])
apart = (logits.softmax(1) - theirs).abs().max().item()
evaluated = json.loads(subprocess.check_output([program, "eval", "--json", run, *on_data]))["loss"]
print(f"probabilities of {len(rows)} samples: at most {apart:.1e} apart")
print(f"loss: {loss:.7f} here, {evaluated:.7f} by potluck")
assert apart < 1e-5 and abs(loss - evaluated) < 1e-5
print("they agree")
