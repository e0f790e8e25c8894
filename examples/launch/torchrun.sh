#!/usr/bin/env bash
# A run started by torchrun. On each machine, with its number:
#
#   potluck secret --out code      (once; then copy the file to the others)
#   ./torchrun.sh HEAD MACHINES NUMBER
#   ./torchrun.sh n1 4 0           (on the machine n1, which has the data)
#   ./torchrun.sh n1 4 1           (on the second one)
#
# torchrun listens at TCP port 29500 of the first machine, and potluck at UDP port 29500 there.
set -eu
if (($# != 3)); then
    echo "usage: ./torchrun.sh HEAD MACHINES NUMBER" >&2
    exit 2
fi

# With a fixed place of the first machine, a process that ends is started again by itself while the
# others stay; torchrun starts it at most so often, whatever its exit code was.
exec torchrun --nnodes "$2" --node-rank "$3" --nproc-per-node 1 \
    --master-addr "$1" --master-port 29500 --max-restarts 50 --no-python \
    potluck launch config.toml --out run --secret-file code --status 9464
