#!/usr/bin/env bash
# Everything that needs a GPU, in parts of a few minutes: benchmarks/gpu.sh OUT COMMIT PART...
# Works in a checkout that is not installed, with the dependencies in PYTHONPATH. JSON files go to OUT;
# `python -m benchmarks head-page OUT/head-*.json` makes docs/benchmarks/head.md of them.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1 commit=$2
shift 2
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
bench() { python3 -m benchmarks "$@"; }
head() { bench head --commit "$commit" "$@"; }

for part in "$@"; do
    echo "== $part"
    case $part in
    tests)
        python3 -m pytest -q -p no:cacheprovider tests/heads/test_paths_gpu.py tests/heads/test_fused_chunks.py \
            tests/kernels/test_triton_head.py tests/training/test_running_ahead.py tests/training/test_process.py tests/evaluation/test_all_pairs.py -m "gpu or not slow"
        ;;
    head)
        head --screen float16 --paths sparse,chunked,common --parts products,paths --repeats 8 --json "$out/head-paths.json"
        head --screen float16 --settings several --parts settings,errors --repeats 6 --json "$out/head-settings.json"
        ;;
    head-bf16)
        head --screen bfloat16 --paths sparse,chunked --parts products,paths --repeats 8 --json "$out/head-bf16.json"
        ;;
    head-bf16-settings)
        head --screen bfloat16 --settings several --parts settings --repeats 4 --json "$out/head-bf16-settings.json"
        ;;
    sizes)
        bench sizes --device cuda --commit "$commit" --json "$out/sizes.json"
        ;;
    sizes-grid)
        bench sizes --device cuda --commit "$commit" --grid "$out/sizes-grid.json"
        ;;
    growth)
        head --parts growth --repeats 4 --json "$out/head-growth.json"
        ;;
    end-to-end)
        head --parts end-to-end --backbone iresnet100 --batch 512 --repeats 3 --seconds 2 --json "$out/head-e2e.json"
        ;;
    scaling)
        bench scaling --measure --device cuda --json "$out/scaling.json"
        ;;
    train)
        bench train --set data.batch_size=512 --commit "$commit" --json "$out/train.json"
        ;;
    *)
        echo "unknown part: $part" >&2
        exit 2
        ;;
    esac
done
