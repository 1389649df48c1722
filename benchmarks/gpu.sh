#!/usr/bin/env bash
# Everything that needs a GPU, in parts of a few minutes: benchmarks/gpu.sh OUT COMMIT PART...
# Works in a checkout that is not installed, with the dependencies in PYTHONPATH. JSON files go to OUT;
# `python -m benchmarks head-page OUT/head-*.json` makes docs/benchmarks/head.md of them. The part `goals` takes at most nine
# minutes: tests and, in processes beside them, the compilation of all kernels; then the goals, one after the other.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1 commit=$2
shift 2
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
bench() { python3 -m benchmarks "$@"; }
head() { bench head --commit "$commit" "$@"; }

gpu_tests="tests/heads tests/kernels tests/losses/test_fused.py tests/evaluation/test_all_pairs.py
    tests/training/test_process.py tests/training/test_loop.py"

warm_up() { # compile what the sizes need, each in a process of its own
    for size in 5994 17982 93431x512x512 93431x512x1024 360232 2059906; do
        timeout 150 python3 -m benchmarks sizes --goals --device cuda --sizes "$size" --repeats 1 --seconds 0.1 \
            >"$out/warm-$size.log" 2>&1 &
    done
    timeout 150 python3 -m benchmarks loss --device cuda --shapes 256x5994 1024x17982 1024x93431 --dtypes float32 bfloat16 --repeats 1 \
        >"$out/warm-loss.log" 2>&1 &
}

goals() { # whatever fails or runs out of time, the rest goes on
    warm_up
    timeout 170 python3 -m pytest -q --maxfail 5 -m gpu -p no:cacheprovider $gpu_tests >"$out/tests.log" 2>&1 || true
    tail -n 25 "$out/tests.log"
    wait
    timeout 60 python3 -m benchmarks loss --device cuda --shapes 256x5994 1024x17982 1024x93431 --dtypes float32 bfloat16 \
        --repeats 20 --json "$out/loss.json" >"$out/loss.log" 2>&1 || tail -n 5 "$out/loss.log"
    timeout 210 python3 -m benchmarks sizes --goals --device cuda --commit "$commit" --repeats 40 --seconds 2 \
        --json "$out/goals.json" >"$out/goals.log" 2>&1 || tail -n 5 "$out/goals.log"
    losses=()
    [ -f "$out/loss.json" ] && losses=(--loss "$out/loss.json")
    python3 -m benchmarks sizes --from "$out/goals.json" "${losses[@]}" --page "$out/goals.md" |
        sed -n '/^Goals/,/^Step time/p' || true
    timeout 60 python3 -m benchmarks kernels --device cuda --commit "$commit" --json "$out/kernels.json" || true
}

for part in "$@"; do
    echo "== $part"
    case $part in
    tests)
        python3 -m pytest -q -p no:cacheprovider tests/heads/test_paths_gpu.py tests/heads/test_fused_chunks.py \
            tests/kernels/test_triton_head.py tests/training/test_running_ahead.py tests/training/test_process.py tests/evaluation/test_all_pairs.py -m "gpu or not slow"
        ;;
    goals)
        goals
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
    reference)
        head --screen float16 --parts references --repeats 20 --json "$out/head-references.json"
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
