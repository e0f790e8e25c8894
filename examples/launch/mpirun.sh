#!/usr/bin/env bash
# A run started by mpirun of Open MPI (4 or 5), or by mpiexec.hydra of MPICH or Intel MPI. On the
# first machine of the list, which has the data:
#
#   potluck secret --out code      (once; then copy the file to the others, at the same path)
#   ./mpirun.sh HOSTS              (a file with the name of one machine a line)
set -eu
if (($# != 1)); then
    echo "usage: ./mpirun.sh HOSTS" >&2
    exit 2
fi
world="$(grep -c . "$1")"
export POTLUCK_ADDRESS
POTLUCK_ADDRESS="$(head -n 1 "$1"):7717"

# One process per machine, which uses all of its devices, on all of its cores.
case "$(mpirun --version)" in
*"Open MPI"* | *OpenRTE*)
    start=(mpirun --hostfile "$1" -np "$world" --map-by node --bind-to none -x POTLUCK_ADDRESS)
    ;;
*) start=(mpiexec.hydra -f "$1" -n "$world" -ppn 1) ;;
esac

# A signal to this script ends the run, saved.
is_over=""
trap 'is_over=1; kill -TERM "$processes"' TERM INT HUP

# What a restart heals: exit code 75, and a process that was killed, of which Open MPI makes 128
# and more, and Hydra the number of the signal alone.
is_healed() {
    case "$1" in
    75 | 6 | 7 | 9 | 11 | 15) true ;;
    130) false ;; # Ctrl-C
    *) (($1 > 128)) ;;
    esac
}

# At most so many attempts.
for attempt in {1..50}; do
    # MPI starts no single process again, for which the others would wait: --wait is short.
    "${start[@]}" potluck launch config.toml --out run --secret-file code \
        --wait 60 --status 9464 &
    processes=$!
    # A signal to this script ends a wait before its time.
    until
        exit=0
        wait "$processes" || exit=$?
        ! kill -0 "$processes" 2>/dev/null
    do :; done
    if [[ -n $is_over ]] || ! is_healed "$exit"; then
        break
    fi
    echo "mpirun.sh: attempt $attempt ended with exit code $exit" >&2
done
exit "$exit"
