#!/usr/bin/env bash
# Everything that needs a GPU, in parts of a few minutes: benchmarks/gpu.sh OUT COMMIT PART...
# Works in a checkout that is not installed, with the dependencies in PYTHONPATH. JSON files go to OUT;
# `python -m benchmarks head-page OUT/head-*.json` makes docs/benchmarks/head.md of them. The part `sizes` takes at most nine
# minutes: it runs tests and, in processes beside them, compiles all kernels; then it measures the loss, the head at all sizes and
# with reference measures, one after the other, and prints the table of goals last. `pages` needs no GPU: it makes
# docs/benchmarks/sizes.md and its figure, loss-gpu.md and the README's table from what `sizes` left in OUT. DEVICE=cpu and
# SIZES="100x8x4 ..." rehearse. LIMIT is the seconds after which `sizes` ends.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1 commit=$2
shift 2
mkdir -p "$out"
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
device=${DEVICE:-cuda}
bench() { python3 -m benchmarks "$@"; }
head() { bench head --commit "$commit" "$@"; }

# What is most in doubt comes first.
sizes=${SIZES:-2059906 5994 17982 93431x512x1024 360232 1000000 93431x512x512 8000000}
loss_shapes=${SHAPES:-256x5994 1024x17982 1024x93431}

begin() { # SECONDS: for all that `try` runs from now on
    deadline=$((SECONDS + $1))
}

try() { # SECONDS NAME COMMAND...: what fails or runs out of time is said, and the rest goes on
    local left=$((deadline - SECONDS)) seconds=$1 name=$2 begun=$SECONDS status=0
    shift 2
    if [ "$left" -lt 10 ]; then
        echo "$name: no time left"
        return
    fi
    timeout -k 5 "$((left < seconds ? left : seconds))" "$@" >"$out/$name.log" 2>&1 || status=$?
    echo "$name: $((SECONDS - begun)) s, exit status $status"
    [ "$status" = 0 ] || tail -n 6 "$out/$name.log"
}

measure_loss() { # REPEATS NAME OPTIONS...
    local repeats=$1 name=$2
    shift 2
    # shellcheck disable=SC2086  # several words
    try 150 "$name" python3 -m benchmarks loss --device "$device" --commit "$commit" --shapes $loss_shapes \
        --dtypes float32 bfloat16 --repeats "$repeats" "$@"
}

measure_sizes() { # NAME REPEATS SECONDS LIMIT SIZES OPTIONS...: each in a process of its own, as an error of a GPU ends one
    local name=$1 repeats=$2 seconds=$3 limit=$4 sizes=$5 size
    shift 5
    for size in $sizes; do
        try "$limit" "$name-$size" python3 -m benchmarks sizes --device "$device" --commit "$commit" --sizes "$size" \
            --repeats "$repeats" --seconds "$seconds" --json "$out/$name-$size.json" "$@"
    done
}

gpu_tests() { # NAME ARGUMENTS...
    local name=$1
    shift
    try 200 "tests-$name" python3 -m pytest -q --maxfail 20 --tb short -m "${MARK:-gpu}" -p no:cacheprovider "$@"
}

warm_up() { # all tests; and compile what the sizes need, side by side
    local size paths=tests/heads/test_paths_gpu.py
    gpu_tests directions $paths -k direction &
    gpu_tests paths $paths -k "not direction" &
    gpu_tests matrix tests/heads --ignore $paths &
    gpu_tests rest tests/kernels tests/losses/test_fused.py tests/evaluation/test_all_pairs.py tests/training/test_process.py \
        tests/training/test_loop.py &
    for size in $sizes; do
        case $size in 1000000 | 8000000) continue ;; esac # the same kernels, and no room for all
        measure_sizes warm 1 0.1 160 "$size" --goals &
    done
    measure_loss 1 warm-loss &
    wait
}

references() { # REPEATS
    try 100 references python3 -m benchmarks head --commit "$commit" --screen float16 --parts references --repeats "$1" \
        --json "$out/head-references.json"
}

show_goals() {
    local losses=()
    [ -f "$out/loss.json" ] && losses=(--loss "$out/loss.json")
    python3 -m benchmarks sizes --from "$out"/sizes-*.json "${losses[@]}" --page "$out/goals.md" >/dev/null || true
    grep -hE '^[0-9]+ (passed|failed)|^=+ .*(passed|failed|error)|no tests ran' "$out"/tests-*.log || true
    sed -n '/^## Goals/,/^## Step time/p' "$out/goals.md" | grep '^|' || true
}

measure() {
    local first=${sizes%% *} rest=${sizes#* }
    begin "${LIMIT:-520}"
    warm_up
    rm -f "$out"/warm-*.json
    measure_sizes sizes 60 5 90 "$first"
    measure_loss 30 loss --json "$out/loss.json"
    [ "$device" = cpu ] || references 12
    [ "$rest" = "$first" ] || measure_sizes sizes 60 5 90 "$rest"
    try 60 kernels python3 -m benchmarks kernels --device "$device" --commit "$commit" ${SIZES:+--sizes $SIZES} --json "$out/kernels.json"
    show_goals
}

pages() {
    local losses=()
    [ -f "$out/loss.json" ] && losses=(--loss "$out/loss.json")
    python3 -m benchmarks sizes --from "$out"/sizes-*.json "${losses[@]}" --page "${PAGES:-docs/benchmarks}/sizes.md" \
        --figure "${PAGES:-docs/benchmarks}/sizes.svg" --readme "${README:-README.md}" >/dev/null
    [ ! -f "$out/loss.json" ] ||
        python3 -m benchmarks loss --from "$out/loss.json" --page "${PAGES:-docs/benchmarks}/loss-gpu.md" >/dev/null
}

for part in "$@"; do
    echo "== $part"
    case $part in
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
        measure
        ;;
    pages)
        pages
        ;;
    sizes-grid)
        bench sizes --device cuda --commit "$commit" --grid "$out/sizes-grid.json"
        ;;
    growth)
        head --parts growth --repeats 4 --json "$out/head-growth.json"
        ;;
    reference)
        begin 300
        references 20
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
