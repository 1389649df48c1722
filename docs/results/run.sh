#!/usr/bin/env bash
# Experiments on one GPU: docs/results/run.sh OUT COMMIT DATA NAME...
# DATA holds omniglot32/omniglot32.npz and audiomnist60/. Pages go to OUT; runs stay in RUNS
# (runs/experiments), where a second call continues. Works in a checkout that is not installed, with
# the dependencies in PYTHONPATH.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$1 commit=$2 data=$3
shift 3
runs=${RUNS:-runs/experiments}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1

# Small runs share a GPU well only through NVIDIA's service for that; without it they take turns.
export CUDA_MPS_PIPE_DIRECTORY=${CUDA_MPS_PIPE_DIRECTORY:-/tmp/mps} CUDA_MPS_LOG_DIRECTORY=/tmp/mps
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY"
if nvidia-cuda-mps-control -d; then
    trap 'echo quit | nvidia-cuda-mps-control' EXIT
else
    unset CUDA_MPS_PIPE_DIRECTORY
fi

for name in "$@"; do
    options=(--devices cuda --out "$runs/$name" --commit "$commit" --page "$out/$name.md")
    case $name in
    demo-search) options+=(--search-only --jobs 12) ;;
    omniglot) options+=(--data "$data/omniglot32/omniglot32.npz" --jobs 18) ;;
    audiomnist) options+=(--data "$data/audiomnist60" --jobs 18) ;;
    strokes-10k) options+=(--jobs 18) ;;
    strokes-1m) options+=(--jobs 9) ;;
    esac
    SECONDS=0
    python3 -m qmargin compare "$name" "${options[@]}" >"$out/$name.log" 2>&1
    echo "$name: status $? after $SECONDS s"
done
