#!/usr/bin/env bash
# Runs the tests of adapters on llvmpipe under Khronos' validation layer, with its checks of
# synchronization and, where it accepts the adapter, of what shaders access. A message whose id is
# not in known.tsv is a failure.
#   run.sh FOLDER COMMAND..     FOLDER: for settings and messages; COMMAND runs the tests
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
folder="$1"
shift
messages="$folder/messages"

readonly FEATURE=VK_VALIDATION_FEATURE_ENABLE

# Runs a command under the layer with these checks; its messages go to a file.
under_layer() {
    local checks="$1" IFS=,
    shift
    mkdir -p "$folder"
    rm -f "$messages"
    cat >"$folder/vk_layer_settings.txt" <<SETTINGS
khronos_validation.debug_action = VK_DBG_LAYER_ACTION_LOG_MSG
khronos_validation.report_flags = error,warn
khronos_validation.log_filename = $messages
khronos_validation.enables = $checks
SETTINGS
    POTLUCK_TEST_ADAPTERS=vulkan:llvmpipe VK_LAYER_SETTINGS_PATH="$folder" \
        VK_INSTANCE_LAYERS=VK_LAYER_KHRONOS_validation "$@"
    if [[ ! -e $messages ]]; then
        echo "the validation layer was not loaded" >&2
        return 1
    fi
}

# The ids of the messages, each once.
ids() { grep -o '\[ [A-Za-z][A-Za-z0-9_-]* \]' "$messages" | tr -d '[ ]' | sort -u || true; }

# A layer that says nothing may be one that looks at nothing: advice is always given.
under_layer "${FEATURE}_BEST_PRACTICES_EXT" "$@" hashes
if [[ -z $(ids) ]]; then
    echo "the validation layer says nothing where it gives advice" >&2
    exit 1
fi

under_layer "${FEATURE}_SYNCHRONIZATION_VALIDATION_EXT,${FEATURE}_GPU_ASSISTED_EXT" "$@"
unknown=0
while read -r id; do
    [[ -n $id ]] || continue
    if grep -q "^$id	" "$here/known.tsv"; then
        echo "known: $id"
    else
        echo "unknown: $(grep -F -m 1 "[ $id ]" "$messages")" >&2
        unknown=$((unknown + 1))
    fi
done <<<"$(ids)"
if ((unknown)); then
    echo "the validation layer has $unknown messages that are not in tests/validation/known.tsv" >&2
    exit 1
fi
