#!/usr/bin/env bash
# One or several TPU slices on a GKE cluster that XPK manages.
#
#   pip install xpk
#   REGISTRY=... STORAGE=... examples/launch/xpk.sh CLUSTER PROJECT ZONE SLICES [options of xpk, such as --spot]
#   PATHWAYS=1 BUCKET=gs://BUCKET REGISTRY=... STORAGE=... examples/launch/xpk.sh CLUSTER PROJECT ZONE SLICES
#
# Replace: REGISTRY, where the images are (Dockerfile); STORAGE, a storage of the cluster (`xpk storage create`) that is
# mounted at /runs, on a file system (Filestore; not a mounted bucket, which has no locks).
# Run: both commands with xpk 1.16 and `--dry-run --skip-validation --output-manifest-file`, which needs no cluster. The
# manifest for Pathways follows the schema of JobSet 0.12; the other has empty fields and a rule without a name, as XPK
# writes them. Not run: on a cluster.
set -euo pipefail
usage="usage: xpk.sh CLUSTER PROJECT ZONE SLICES"
cluster=${1:?$usage} project=${2:?$usage} zone=${3:?$usage} slices=${4:?$usage}
image="${REGISTRY:?set it to the registry of your images}/tunix-like"
train="HF_HOME=/runs/huggingface tunix-like train examples/gsm8k/qwen3_1.7b.yaml training.output_dir=/runs/qwen3_1.7b"
kind=(create --docker-image="$image:tpu")
if [ -n "${PATHWAYS:-}" ]; then
  kind=(create-pathways --docker-image="$image:pathways"
    --pathways-gcs-location="${BUCKET:?set it to gs://BUCKET}/pathways")
fi
exec xpk workload "${kind[@]}" --workload=tunix-like --cluster="$cluster" --project="$project" --zone="$zone" \
  --tpu-type=v5litepod-16 --num-slices="$slices" --max-restarts=20 --termination-grace-period-seconds=300 \
  --storage="${STORAGE:?set it to a storage of the cluster}" --command="$train" "${@:5}"
