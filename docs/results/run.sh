#!/usr/bin/env bash
# Experiments on one GPU, a few minutes at a time: docs/results/run.sh OUT COMMIT DATA NAME...
#
# DATA holds omniglot32/omniglot32.npz and audiomnist60/. NAME is that of an experiment, or a YAML
# file. Runs stay in RUNS (runs/experiments), where a second call continues. After MINUTES (9) runs
# are asked to save and stop. OUT gets the pages and logs, in one archive with everything that a later
# call needs to continue elsewhere: STATE=OUT/OF/BEFORE restores it. The archive has results and
# journals of all runs, and checkpoints of unfinished ones as long as it stays below MEGABYTES (60);
# it is cut into files of at most 15 MiB. Options for all experiments are in OPTIONS, such as
# OPTIONS="--arms arcface cosface q_margin". DEVICE is cuda. Works in a checkout that is not
# installed, with the dependencies in PYTHONPATH.
set -uo pipefail
out=$(realpath -m "$1") commit=$2 data=$(realpath -m "$3")
shift 3
here=$PWD
cd "$(dirname "$0")/../.."
below() { realpath -m --relative-base="$PWD" "$1"; } # pages show no folders above the checkout
runs=$(below "${RUNS:-runs/experiments}") data=$(below "$data") minutes=${MINUTES:-9} python=${PYTHON:-python3}
device=${DEVICE:-cuda} saving=${SAVING:-60} # seconds of that for runs that stop, and for the archive
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
read -ra options <<<"${OPTIONS:-}"
mkdir -p "$runs" "$out"

if [ -n "${STATE:-}" ]; then # what is there is as new or newer
    cat "$(cd "$here" && realpath "$STATE")"/state.tar.gz.* | tar -xzf - -C "$runs" --skip-old-files || exit 2
fi

# Small runs share a GPU well only through NVIDIA's service for that; without it they take turns.
if [ "$device" != cpu ]; then
    export CUDA_MPS_PIPE_DIRECTORY=${CUDA_MPS_PIPE_DIRECTORY:-/tmp/mps} CUDA_MPS_LOG_DIRECTORY=/tmp/mps
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY"
    if nvidia-cuda-mps-control -d; then
        trap 'echo quit | nvidia-cuda-mps-control' EXIT
    else
        unset CUDA_MPS_PIPE_DIRECTORY
    fi
fi

pack() { # one archive, of paths below RUNS
    cd "$runs" || exit 2
    local unfinished run size total=0 most=$((${MEGABYTES:-60} * 1000000)) list
    list=$(mktemp)
    find . -type f ! -path './*/data/*' ! -path '*/checkpoints/*' ! -name '*.safetensors' ! -name lock >"$list"
    total=$(tr '\n' '\0' <"$list" | tar -czf - --null -T - | wc -c)
    mapfile -t unfinished < <(find . -type d -name checkpoints | while read -r folder; do
        [ -e "${folder%/*}/result.json" ] && continue
        newest=$(find "$folder" -maxdepth 1 -name 'step-*' | sort | tail -n 1)
        [ -z "$newest" ] || printf '%s %s\n' "$(du -sb "$newest" | cut -f1)" "$newest"
    done | sort -n)
    for run in ${unfinished[@]+"${unfinished[@]}"}; do
        size=${run%% *}
        if ((total + size < most)); then
            total=$((total + size))
            find "${run#* }" -type f >>"$list"
        else
            echo "not in the archive: ${run#* }, $size bytes"
        fi
    done
    rm -f "$out"/state.tar.gz.*
    tr '\n' '\0' <"$list" | tar -czf - --null -T - | split -b 15M -a 2 -d - "$out/state.tar.gz."
    rm "$list"
    du -cb "$out"/state.tar.gz.* | tail -n 1
}

failed=0
for name in "$@"; do
    label=$(basename "$name" .yaml) jobs=18 own=()
    case $name in
    *.yaml) name=$(below "$(cd "$here" && realpath "$name")") jobs=${JOBS:-2} ;;
    demo-search) own=(--search-only) jobs=12 ;;
    omniglot) own=(--data "$data/omniglot32/omniglot32.npz") ;;
    audiomnist) own=(--data "$data/audiomnist60") ;;
    people-100k | strokes-1m) jobs=9 ;;
    esac
    left=$((minutes * 60 - saving - SECONDS))
    ((left > 0)) || break
    mkdir -p "$runs/pages"
    began=$SECONDS
    timeout --signal=TERM --kill-after="$saving" "$left" "$python" -m qmargin compare "$name" \
        --devices "$device" --jobs "${JOBS:-$jobs}" --out "$runs/$label" --commit "$commit" \
        --page "$runs/pages/$label.md" ${own[@]+"${own[@]}"} ${options[@]+"${options[@]}"} >>"$runs/pages/$label.log" 2>&1
    status=$?
    echo "$label: status $status after $((SECONDS - began)) s"
    tail -n 3 "$runs/pages/$label.log"
    ((status == 0)) || failed=$status
done
(pack)
exit "$failed"
