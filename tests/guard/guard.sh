#!/usr/bin/env bash
# Records what potluck computes and prints for a few small runs, and compares two such records: for
# changes that must not change behaviour (moves, renames, refactorings).
#
#   tests/guard/guard.sh record DIR            the present tree's record
#   tests/guard/guard.sh compare OLD NEW       equal byte by byte, or the first differences
#   tests/guard/guard.sh compare OLD NEW TABLE equal once the renames of TABLE are applied to OLD
#
# A record holds the text of every shader and, for runs of 20 steps, files by the first word of
# their name: the output of --explain, what was decided (decided-), the sample, and the bits
# (bits-): losses, gradient norms and hashes of the tensors of the checkpoints at steps 10 and 20.
# The runs are on the CPU device with 1 and 3 ranks, on llvmpipe and SwiftShader, a pipeline of 2,
# 2 nodes, a star, a CNN and a GRU; each is recorded once more (-resumed) after it lost its last
# checkpoint and went on from step 10. Autotuning is off and the cache is empty. Figures depend on
# the processor: compare records of one machine. SwiftShader is left out where it is not installed.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"

usage() {
    sed -n '5,7s/^# *//p' "${BASH_SOURCE[0]}" >&2
    exit 2
}

# About 20 kB that a small model learns something about; no part of the project's own text, which
# changes with every commit.
write_text() {
    awk 'BEGIN {
        split("the cook brings bread and soup to a table of guests who sing", words, " ")
        for (i = 0; i < 4000; i++)
            printf "%s%s", words[1 + (i * i + 7 * int(i / 5)) % 13], i % 9 == 8 ? "\n" : " "
    }' >"$1"
}

write_configuration() {
    cat >"$1" <<'TOML'
[model]
layers = 2
heads = 2
width = 32
context = 32
bias = true
dropout = 0.1
[data]
path = "text.txt"
[train]
batch = 9
micro_batch_size = 2
steps = 20
log_every = 5
eval_every = 10
checkpoint_every = 10
sample_tokens = 40
[optim]
lr = 4e-3
TOML
}

# 600 pictures of 12 x 12 pixels in 3 classes, as MNIST has them: a brighter bar at a place that the
# class decides, and noise. No byte is 0 or above 127, which not every awk writes.
write_pictures() {
    local directory="$1" count=600
    mkdir -p "$directory"
    {
        printf '\0\0\10\3\0\0\2\130\0\0\0\14\0\0\0\14'
        LC_ALL=C awk -v count="$count" 'BEGIN {
            noise = 1
            for (i = 0; i < count; i++)
                for (p = 0; p < 144; p++) {
                    noise = (noise * 137 + 71) % 8191
                    bar = int(p / 12) == 2 + 3 * (i % 3) ? 70 : 0
                    printf "%c", 1 + noise % 50 + bar
                }
        }'
    } >"$directory/train-images-idx3-ubyte"
    {
        printf '\0\0\10\1\0\0\2\130'
        for ((i = 0; i < count; i++)); do
            printf "\\$((i % 3))"
        done
    } >"$directory/train-labels-idx1-ubyte"
}

write_configuration_of() {
    local kind="$1" more="$2"
    printf '[model]\nkind = "%s"\n%s\n' "$kind" "$more"
    printf '[train]\nbatch = 9\nsteps = 20\nlog_every = 5\n'
    printf 'eval_every = 10\ncheckpoint_every = 10\n'
}

# Keys whose value would otherwise be measured.
fixed=(--set train.tune_s=0)
fixed_for_ranks=("${fixed[@]}" --set parallel.shares=4,3,2 --set faults.hash_every=5)
fixed_for_ranks+=(--set parallel.message_kib=4)

# The lines of metrics.jsonl without what depends on the clock.
without_times() {
    grep -oE '"(step|loss|val_loss|grad_norm|lr)":[^,}]*' "$1" \
        | paste -sd' ' | sed 's/ "step"/\n"step"/g'
}

# What a run computed and decided, once as it was and once resumed from step 10. What follows the
# name are arguments, CONFIG among them.
record_run() {
    local name="$1" run="$work/$1"
    shift
    (cd "$work" && "$program" train "$@" --out "$run") >"$out/sample-$name.txt" 2>"$work/log"
    record_outcome "$name" "$run"
    rm -r "$run"/checkpoints/step-*20
    (cd "$work" && "$program" train --resume "$run") >"$out/sample-$name-resumed.txt" 2>"$work/log"
    record_outcome "$name-resumed" "$run"
}

record_outcome() {
    local name="$1" run="$2" file
    {
        without_times "$run/metrics.jsonl"
        for file in "$run"/checkpoints/step-*/*.safetensors; do
            printf '%s  %s\n' "$(sha256sum <"$file" | cut -d' ' -f1)" "${file#"$run/checkpoints/"}"
        done
    } >"$out/bits-$name.txt"
    cp "$run/resolved.toml" "$out/decided-$name.txt"
}

# A run of two nodes with one CPU device each, on this machine.
record_nodes() {
    local name="$1" run="$work/$1"
    shift
    (umask 077 && "$program" secret >"$work/code")
    train_on_nodes "$@" --out "$run" >"$out/sample-$name.txt"
    record_outcome "$name" "$run"
    rm -r "$run"/checkpoints/step-*20
    train_on_nodes --resume "$run" >"$out/sample-$name-resumed.txt"
    record_outcome "$name-resumed" "$run"
}

train_on_nodes() {
    local port=$((20000 + RANDOM % 20000)) joined
    (cd "$work" && exec "$program" join "127.0.0.1:$port" --devices cpu --secret-file "$work/code" \
        --wait 60) >"$work/joined" 2>&1 &
    joined=$!
    (cd "$work" && "$program" train "$@" --nodes 2 --listen "127.0.0.1:$port" \
        --secret-file "$work/code") 2>"$work/log"
    wait "$joined"
}

# Takes out what differs from one record of the same program to the next.
without_machine() {
    sed -e "s|$work|.|g" -e 's/ of [0-9.]* [KMGT]iB, which are available/ of what is available/'
}

record_explanations() {
    local name="$1" kind
    shift
    for kind in graph dot memory program communication config; do
        (cd "$work" && "$program" train small.toml "$@" --explain "$kind") 2>"$work/log" |
            without_machine >"$out/$kind-$name.txt"
    done
}

record_all() {
    local name="$1"
    shift
    record_explanations "$name" "$@"
    record_run "$name" small.toml "$@"
}

# A file per first word of a shader's title.
split_shaders() {
    awk -v out="$2" '/^==> .* <==$/ { file = out "/shader-" $2 ".txt" } { print > file }' "$1"
}

record() {
    cd "$root"
    cargo build --quiet --workspace --bins
    program="$(cargo metadata --no-deps --format-version 1 --quiet |
        sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p')/debug/potluck"
    work="$(mktemp -d)"
    trap 'status=$?; ((status)) && cat "$work/log" >&2; rm -rf "$work"' EXIT
    mkdir -p "$1"
    out="$(cd "$1" && pwd -P)"
    export POTLUCK_CACHE="$work/cache" XDG_RUNTIME_DIR="$work"
    unset POTLUCK_FAULT
    write_text "$work/text.txt"
    write_configuration "$work/small.toml"
    POTLUCK_WRITE_SHADERS="$work/shaders.txt" \
        cargo test --quiet --workspace --test library -- every_shader_is_portable >"$work/log" 2>&1
    split_shaders "$work/shaders.txt" "$out"
    write_pictures "$work/pictures"
    local data=$'[data]\npath = "pictures"'
    write_configuration_of cnn $'channels = [4, 8]\nhidden = [16]\n'"$data" >"$work/cnn.toml"
    data=$'[data]\npath = "text.txt"'
    write_configuration_of rnn $'cell = "gru"\nwidth = 32\ncontext = 24\n'"$data" >"$work/gru.toml"
    record_all cpu-1 --devices cpu "${fixed[@]}"
    record_all cpu-3 --devices 'cpu*3' "${fixed_for_ranks[@]}" --set parallel.reduce_site=host
    fixed_for_ranks+=(--set parallel.reduce_site=device)
    record_run cpu-3-on-device small.toml --devices 'cpu*3' "${fixed_for_ranks[@]}"
    record_run star small.toml --devices 'cpu*3' "${fixed_for_ranks[@]}" \
        --set parallel.collective=star
    record_all pipeline-2 --devices 'cpu*2' "${fixed[@]}" --pipeline 2 \
        --set parallel.blocks_per_stage=2,2
    record_nodes nodes-2 small.toml --devices cpu "${fixed[@]}" --set parallel.shares=5,4 \
        --set parallel.reduce_site=host
    record_run cnn cnn.toml --devices cpu "${fixed[@]}"
    record_run gru gru.toml --devices cpu "${fixed[@]}"
    record_all llvmpipe --devices vulkan:llvmpipe "${fixed[@]}"
    if [[ "$("$program" devices 2>/dev/null)" == *SwiftShader* ]]; then
        record_run swiftshader small.toml --devices vulkan:swiftshader "${fixed[@]}"
    fi
    printf 'recorded %s files in %s\n' "$(find "$out" -type f | wc -l)" "$out"
}

# The sed script that applies a table: a line has a shell pattern of files, the old word and the new
# one, between tabs. A word is not part of a longer one.
renames_for() {
    local name="$1" table="$2"
    local pattern old new
    while IFS=$'\t' read -r pattern old new; do
        # shellcheck disable=SC2053
        if [[ -n $pattern && $pattern != '#'* && $name == $pattern ]]; then
            printf 's/(^|[^A-Za-z0-9_])%s($|[^A-Za-z0-9_])/\\1%s\\2/g\n' \
                "$(sed 's/[][\.*^$(){}?+|/]/\\&/g' <<<"$old")" "$(sed 's/[\&/]/\\&/g' <<<"$new")"
        fi
    done <"$table"
}

# A file of the old record with the renames. Twice, because two neighbours share the character
# between them.
renamed() {
    sed -E -f "$3" "$1" | sed -E -f "$3" >"$3.renamed"
    settled "$3.renamed" "$2"
}

# With a table, what renames move is set aside: the width of columns, the order of sorted lines, and
# comments in shaders, which are prose.
settled() {
    case "$2:$(head -c 3 "$1")" in
    /dev/null:*) cat "$1" ;;
    *:==*) sed -E 's#//.*##; s/ +/ /g; s/ $//' "$1" | grep -v '^ *$' ;;
    *) tr -s ' ' <"$1" | sort ;;
    esac
}

compare() {
    local old="$1" new="$2" table="${3:-/dev/null}" name script differ=0
    script="$(mktemp)"
    # Expanded now: it is gone when the shell ends.
    trap "rm -f '$script'" EXIT
    if ! diff <(ls "$old") <(ls "$new"); then
        differ=1
    fi
    for name in $(ls "$old"); do
        [[ -e $new/$name ]] || continue
        renames_for "$name" "$table" >"$script"
        if ! diff <(renamed "$old/$name" "$table" "$script") \
            <(settled "$new/$name" "$table") >"$script.diff"; then
            printf '%s differs:\n' "$name"
            head -n 20 "$script.diff"
            differ=1
        fi
        rm -f "$script".*
    done
    ((differ)) || printf 'equal: %s files\n' "$(ls "$old" | wc -l)"
    return "$differ"
}

case "${1:-}" in
record) [[ $# == 2 ]] || usage; record "$2" ;;
compare) [[ $# == 3 || $# == 4 ]] || usage; compare "${@:2}" ;;
*) usage ;;
esac
