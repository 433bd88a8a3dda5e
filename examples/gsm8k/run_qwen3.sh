#!/usr/bin/env bash
# GSM8K with Qwen3-0.6B: installs what the machine needs, trains, evaluates.
#
#   examples/gsm8k/run_qwen3.sh [estimator] [key=value ...]
#   examples/gsm8k/run_qwen3.sh maxrl training.max_steps=50
#   EXTRA=tpu examples/gsm8k/run_qwen3.sh             # or cuda12, cuda13 (default: by what the machine has)
#   EXTRA=none examples/gsm8k/run_qwen3.sh rloo       # install nothing
#
# The estimator defaults to rloo. Everything after it is handed to `tunix-like train`. A second call resumes.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

estimator=rloo
if [[ $# -gt 0 && $1 != *=* ]]; then
  estimator=$1
  shift
fi

if [[ -z ${EXTRA:-} ]]; then
  if command -v nvidia-smi >/dev/null; then EXTRA=cuda12; else EXTRA=tpu; fi
fi
if [[ $EXTRA != none ]]; then
  python3 -m pip install -e "$root[$EXTRA,hub]"
fi

seed=0 run=
for argument in "$@"; do
  case $argument in
    training.seed=*) seed=${argument#*=} ;;
    training.output_dir=*) run=${argument#*=} ;;
  esac
done
run=${run:-runs/qwen3_0.6b-$estimator-s$seed}
python3 -m tunix_like train "$root/examples/gsm8k/qwen3_0.6b.yaml" \
  algorithm.advantage_estimator="$estimator" "$@" training.output_dir="$run"
python3 -m tunix_like eval "$run"
