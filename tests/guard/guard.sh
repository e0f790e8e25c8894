#!/usr/bin/env bash
# Records what potluck computes and prints for a few small runs, and compares two such records: for
# changes that must not change behaviour (moves, renames, refactorings).
#
#   tests/guard/guard.sh record DIR            the present tree's record
#   tests/guard/guard.sh compare OLD NEW       equal byte by byte, or the first differences
#   tests/guard/guard.sh compare OLD NEW TABLE equal once the renames of TABLE are applied to OLD
#
# A record holds the text of every shader and, for runs of 20 steps on the CPU device with 1 and 3
# ranks and on llvmpipe: the output of --explain, losses, gradient norms, resolved.toml, the sample,
# and hashes of the checkpoints at steps 10 and 20. Autotuning is off and the cache is empty.
# Figures depend on the processor: compare records of one machine.
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
micro_batch = 2
steps = 20
log_every = 5
eval_every = 10
checkpoint_every = 10
sample_tokens = 40
TOML
}

# Keys whose value would otherwise be measured.
fixed=(--set train.tune_s=0)
fixed_for_ranks=("${fixed[@]}" --set parallel.shares=4,3,2 --set parallel.hash_every=5)
fixed_for_ranks+=(--set parallel.chunk_kib=4)

# The lines of metrics.jsonl without what depends on the clock.
without_times() {
    grep -oE '"(step|loss|val_loss|grad_norm|lr)":[^,}]*' "$1" \
        | paste -sd' ' | sed 's/ "step"/\n"step"/g'
}

# One run of 20 steps: what it computed, and what it printed at its end.
record_run() {
    local name="$1" run="$work/$1" file
    shift
    (cd "$work" && "$program" train small.toml "$@" --out "$run") \
        >"$out/sample-$name.txt" 2>"$work/log"
    {
        without_times "$run/metrics.jsonl"
        for file in "$run"/checkpoints/step-*/*.safetensors; do
            printf '%s  %s\n' "$(sha256sum <"$file" | cut -d' ' -f1)" "${file#"$run/checkpoints/"}"
        done
        cat "$run/resolved.toml"
    } >"$out/run-$name.txt"
}

record_explanations() {
    local name="$1" kind
    shift
    for kind in graph dot memory program communication config; do
        (cd "$work" && "$program" train small.toml "$@" --explain "$kind") \
            >"$out/$kind-$name.txt" 2>"$work/log"
    done
}

record_all() {
    local name="$1"
    shift
    record_explanations "$name" "$@"
    record_run "$name" "$@"
}

# A file per first word of a shader's title.
split_shaders() {
    awk -v out="$2" '/^==> .* <==$/ { file = out "/shader-" $2 ".txt" } { print > file }' "$1"
}

record() {
    cd "$root"
    cargo build --quiet --bin potluck
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
        cargo test --quiet --test library -- every_shader_is_portable >"$work/log" 2>&1
    split_shaders "$work/shaders.txt" "$out"
    record_all cpu-1 --devices cpu "${fixed[@]}"
    record_all cpu-3 --devices 'cpu*3' "${fixed_for_ranks[@]}" --set parallel.reduce_site=host
    fixed_for_ranks+=(--set parallel.reduce_site=device)
    record_run cpu-3-on-device --devices 'cpu*3' "${fixed_for_ranks[@]}"
    record_all llvmpipe --devices vulkan:llvmpipe "${fixed[@]}"
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
