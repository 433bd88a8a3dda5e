#!/usr/bin/env bash
# One process per GPU on 4 nodes of 8 GPUs, by SLURM.
#
#   sbatch examples/launch/slurm.sh
#
# Replace: nodes, GPUs and partition of your cluster; $SCRATCH, a file system that all nodes share.
# SLURM sends SIGTERM two minutes before the time limit, the run saves, and the job is queued again; so it is after a lost
# process (status 70, as after any error in one of several processes) or if the last files were not saved (74). The run
# resumes. Other errors end the job.
# Run: two processes that find each other by the variables of `srun` (tests/runtime/test_processes.py). Not run: on a
# cluster.
#SBATCH --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8
#SBATCH --signal=TERM@120 --requeue
folder="${SCRATCH:?set it to a folder that all nodes share}/qwen3_1.7b"
status=0
srun --kill-on-bad-exit=1 tunix-like train examples/gsm8k/qwen3_1.7b.yaml training.output_dir="$folder" || status=$?
case $status in
  70 | 74 | 75 | 1[3-9]?)
    [ "${SLURM_RESTART_COUNT:-0}" -ge 20 ] || scontrol requeue "$SLURM_JOB_ID"
    ;;
esac
exit "$status"
