#!/usr/bin/env bash
# Unpacks an archive of `./x dist` where programs of its system run, and trains there.
#   archives.sh linux ARCHIVE ROOTS      in a Debian 11, whose C library is older than most
#   archives.sh windows ARCHIVE ROOTS    under wine in a Debian 13, with llvmpipe as the GPU
# The Debians are made once in the directory ROOTS with debootstrap, as root.
set -euo pipefail

system="$1"
archive="$2"
roots="$3"

skip() {
    echo "skipped: archive for $system: $*"
    echo "test result: ok. 1 passed; 0 failed"
    exit 0
}

failed() {
    echo "archive for $system: $*" >&2
    echo "test result: FAILED. 0 passed; 1 failed"
    exit 1
}

# Makes a Debian: directory, release, and packages besides the smallest set.
make_root() {
    local root="$1" release="$2" packages="$3"
    [[ ! -e $root/made ]] || return 0
    command -v debootstrap >/dev/null || skip "there is no debootstrap to make Debian $release with"
    mkdir -p "$roots"
    rm -rf "$root"
    debootstrap --variant=minbase ${packages:+"--include=$packages"} "$release" "$root" \
        >"$root.log" 2>&1 || skip "Debian $release cannot be had: $(tail -n 1 "$root.log")"
    touch "$root/made"
}

# Runs a command in a Debian, in place of this shell, with mounts of its own that end with it.
enter() {
    local root="$1"
    shift
    exec unshare --mount sh -c '
        root=$1; shift
        for place in proc sys dev; do mount --rbind /$place "$root/$place"; done
        exec chroot "$root" env -i HOME=/tmp PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 "$@"
    ' sh "$root" "$@"
}

# Runs the program, which has to print a text, with what it is given; $1 is the text.
prints() {
    local text="$1" status=0
    shift
    ("$@") >"$output" 2>&1 || status=$?
    cat "$output"
    ((status == 0)) || failed "$* ended with $status"
    grep -qF -- "$text" "$output" || failed "$* did not print '$text'"
}

output="$(mktemp)"
trap 'rm -f "$output"' EXIT

try_linux() {
    local root="$roots/debian-11" folder
    make_root "$root" bullseye ""
    rm -rf "$root/opt/potluck"
    mkdir -p "$root/opt/potluck"
    tar -xzf "$archive" -C "$root/opt/potluck" --strip-components 1
    folder="$root/opt/potluck"
    for file in README.md LICENSE-MIT LICENSE-APACHE THIRD-PARTY-LICENSES \
        man/man1/potluck-train.1 completions/{potluck,_potluck,potluck.fish,potluck.ps1}; do
        [[ -s $folder/$file ]] || failed "$file is missing"
    done
    prints "the built-in CPU device" enter "$root" /opt/potluck/potluck devices
    rm -rf "$root/tmp/a run"
    prints "step 20/20" enter "$root" \
        /opt/potluck/potluck train --steps 20 --devices cpu --out "/tmp/a run"
    prints "step 30/30" enter "$root" \
        /opt/potluck/potluck train --resume "/tmp/a run" --steps 30 --log-every 1
}

readonly WINE_PACKAGES=wine,wine64,xvfb,mesa-vulkan-drivers,libvulkan1,libgl1,libegl1,\
libx11-6,libxext6,libxrender1,libxcursor1,libxi6,libxrandr2,libxcomposite1,libxfixes3,libxinerama1

# The same in the Debian of wine. Without mscoree and mshtml, wine asks for no downloads.
wine() {
    enter "$roots/wine" env DISPLAY=:97 WINEPREFIX=/opt/wine WINEARCH=win64 WINEDEBUG=-all \
        WINEDLLOVERRIDES='mscoree,mshtml=' XDG_RUNTIME_DIR=/tmp "$@"
}

try_windows() {
    local root="$roots/wine" program run="my runs/stopped"
    make_root "$root" trixie "$WINE_PACKAGES"
    rm -rf "$root/opt/potluck" "$root/my runs"
    mkdir -p "$root/opt/potluck" "$root/my runs"
    python3 -m zipfile -e "$archive" "$root/opt/potluck"
    program="$(cd "$root" && echo opt/potluck/*/potluck.exe)"
    enter "$root" Xvfb :97 >/dev/null 2>&1 &
    screen=$!
    trap 'kill "$screen" 2>/dev/null; rm -f "$output"' EXIT
    prints "llvmpipe" wine wine "/$program" devices
    ! grep -F "memory     unknown" "$output" || failed "the host's memory is not known"
    local device
    for device in cpu vulkan:llvmpipe; do
        prints "step 50/50" wine wine "/$program" train --steps 50 --devices "$device" \
            --log-every 10 --out "/my runs/${device#*:}"
    done
    interrupt "/$program" "$root/$run"
    # The record was open when it was cut, and the run has a space in its name.
    prints "step 400/400" wine wine "/$program" train --resume "/$run" --steps 400 --log-every 10
}

# Stops a run with Ctrl-C, which wine makes of SIGINT: program, and the run's directory.
interrupt() {
    local program="$1" directory="$2" metrics="$2/metrics.jsonl" status=0 waited=0
    wine wine "$program" train --steps 3000 --devices cpu --out "/${directory#"$roots/wine/"}" \
        >"$output" 2>&1 &
    local run=$!
    until [[ -e $metrics && $(wc -l <"$metrics") -ge 20 ]]; do
        sleep 0.2
        waited=$((waited + 1))
        ((waited < 600)) || failed "the run has not come to step 20: $(cat "$output")"
    done
    kill -INT "$run"
    wait "$run" || status=$?
    cat "$output"
    ((status == 130)) || failed "Ctrl-C ended the run with $status, not 130"
    grep -q "interrupted" "$output" || failed "the run does not say that it was interrupted"
}

case "$system" in
linux) try_linux ;;
windows) try_windows ;;
esac
echo "test result: ok. 1 passed; 0 failed"
