#!/usr/bin/env bash
# All checks and benchmarks, each under a time limit of its own; results as JSON into OUT. Two GPUs, but for "kernels".
#   benchmarks/run.sh OUT [checks|kernels|ops|record|steps ...]        (default: all)
# LIMIT seconds each (default 600). PROFILES, MODELS, LAYERS, WAYS and SHAPES narrow the benchmarks; for example
#   LAYERS=6 WAYS="fodit, ulysses" PROFILES=no-p2p benchmarks/run.sh OUT steps
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?"usage: benchmarks/run.sh OUT [checks|kernels|ops|record|steps ...]"}
shift
what=${*:-checks kernels ops record steps}
profiles=${PROFILES:-nvlink no-p2p consumer}
models=${MODELS:-CogVideoX-2b CogVideoX-5b CogVideoX1.5-5b Wan2.1-T2V-1.3B Wan2.1-T2V-14B}
mkdir -p "$out"
failed=0

run() {
    echo "== $*"
    timeout "${LIMIT:-600}" "$@" || { failed=1; echo "== failed: $*" >&2; }
}

bench() {
    run python3 -m torch.distributed.run --standalone --nproc-per-node 2 -m fodit.bench "$@"
}

for part in $what; do
    case $part in
        checks) run python3 -m pytest -q -s tests/gpu ;;
        kernels) run python3 -m fodit.bench kernels ${SHAPES:+--shapes "$SHAPES"} --save "$out/kernels.json" ;;
        ops)
            for profile in $profiles; do
                bench ops --profile "$profile" ${SHAPES:+--shapes "$SHAPES"} --save "$out/ops-$profile.json"
            done ;;
        record)
            for profile in $profiles; do
                run python3 -m torch.distributed.run --standalone --nproc-per-node 2 -m fodit.tune.record "$out" \
                    --link "$profile"
            done ;;
        steps)
            for profile in $profiles; do
                bench step --model "${models// /,}" --profile "$profile" ${LAYERS:+--layers "$LAYERS"} \
                    ${WAYS:+--ways "$WAYS"} --save "$out/step-{model}-$profile.json"
            done ;;
        *) echo "no part $part: checks, kernels, ops, record or steps" >&2; exit 2 ;;
    esac
done
exit $failed
