#!/usr/bin/env bash
set -uo pipefail

usage() {
    cat <<'TEXT'
usage: benchmarks/run.sh OUT [PART ...]

Checks and benchmarks, each under a time limit of its own; results go as JSON
into the folder OUT.

parts (default: all, in this order)
  checks    the tests that need GPUs
  kernels   the kernels alone, next to cuBLAS
  ops       products with a collective, next to cuBLAS and NCCL
  record    a profile of the machine, and what predictions are checked by
  steps     denoising steps of whole models, next to diffusers

environment variables
  LIMIT     seconds for each benchmark (default: 600)
  RANKS     GPUs of ops, record and steps (default: 2); with several numbers,
            such as "1 2 4 8", steps are measured with each: a scaling curve
  PROFILES  of ops, record and steps (default: nvlink no-p2p consumer).
            nvlink is the machine as it is, whatever its links are; no-p2p is
            NCCL through host memory; consumer is that with 24 SMs to compute
  MODELS    of steps (default: CogVideoX-2b CogVideoX-5b CogVideoX1.5-5b
            Wan2.1-T2V-1.3B Wan2.1-T2V-14B)
  LAYERS    of steps: shorten the transformers to so many layers
  WAYS      of steps: only ways whose names contain one of the texts a|b|c
  PREDICT   of steps: predict layers from this profile, too, such as
            h200-x2-nvlink
  SHAPES    of kernels and ops: M,N,K/M,N,K/... (default: those of the models)

two consumer cards, as they are:
  PROFILES=nvlink MODELS="CogVideoX-5b Wan2.1-T2V-1.3B" benchmarks/run.sh OUT
how layers get faster with one to eight GPUs, next to the prediction:
  RANKS="1 2 4 8" WAYS=fodit LAYERS=6 PROFILES=nvlink PREDICT=h200-x2-nvlink \
      benchmarks/run.sh OUT steps
a few layers only:
  LAYERS=6 WAYS="fodit, ulysses" PROFILES=no-p2p benchmarks/run.sh OUT steps
TEXT
}

case " $* " in
    *" -h "* | *" --help "*) usage; exit 0 ;;
    "  ") usage >&2; exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$1
shift
what=${*:-checks kernels ops record steps}
profiles=${PROFILES:-nvlink no-p2p consumer}
all_ranks=${RANKS:-2}
ranks=${all_ranks##* } # the last one
models=${MODELS:-CogVideoX-2b CogVideoX-5b CogVideoX1.5-5b Wan2.1-T2V-1.3B Wan2.1-T2V-14B}
mkdir -p "$out"
failed=0

run() {
    echo "== $*"
    timeout "${LIMIT:-600}" "$@" || { failed=1; echo "== failed: $*" >&2; }
}

on_gpus() {
    run python3 -m torch.distributed.run --standalone --nproc-per-node "$@"
}

for part in $what; do
    case $part in
        checks) run python3 -m pytest -q -s tests/gpu ;;
        kernels) run python3 -m fodit.bench kernels ${SHAPES:+--shapes "$SHAPES"} --save "$out/kernels.json" ;;
        ops)
            for profile in $profiles; do
                on_gpus "$ranks" -m fodit.bench ops --profile "$profile" ${SHAPES:+--shapes "$SHAPES"} \
                    --save "$out/ops-x$ranks-$profile.json"
            done ;;
        record)
            for profile in $profiles; do
                on_gpus "$ranks" -m fodit.tune.record "$out" --link "$profile"
            done ;;
        steps)
            for profile in $profiles; do
                for count in $all_ranks; do
                    on_gpus "$count" -m fodit.bench step --model "${models// /,}" --profile "$profile" \
                        ${LAYERS:+--layers "$LAYERS"} ${WAYS:+--ways "$WAYS"} ${PREDICT:+--predict-from "$PREDICT"} \
                        --save "$out/step-x$count-{model}-$profile.json"
                done
            done ;;
        *) echo "no part $part: checks, kernels, ops, record or steps" >&2; exit 2 ;;
    esac
done
exit $failed
