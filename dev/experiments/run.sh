#!/usr/bin/env bash
# Runs an experiment (fig4, pays, selfplay, verifiers, smol, questions): SFTs, runs, then a table, a csv and curves. A
# run is one process of one thread, JOBS of them at a time: as many as there are cores, unless set. Finished runs are
# reused, interrupted ones go on. All of it is in NANOCHAT_BASE_DIR, unless set ~/.cache/nanochat-tango-fig4 (fig4 and
# pays), -selfplay, -verifiers, -questions or -smollm2. On 2 cores three seeds of fig4 take 40 minutes (chain) to two
# hours (mixture), a seed of pays 45 minutes, selfplay and three seeds of verifiers two to three hours each. Of smol a
# seed of GRPO, a fixed verifier and Tango takes two hours with scores, after SFTs of half an hour. A run takes 7 GB of
# memory.
#   bash dev/experiments/run.sh --help        # all flags, and examples
#   bash dev/experiments/run.sh --list flags  # the flags of every arm; selfplay --list: of every process
set -euo pipefail
case ${1:-} in selfplay | verifiers | questions) base=$1 ;; smol) base=smollm2 ;; *) base=fig4 ;; esac
source "$(dirname "$0")/../../runs/setup.sh"
export OMP_NUM_THREADS=1 WANDB_MODE=${WANDB_MODE:-disabled}
export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat-tango-$base}
exec python -m dev.experiments.run "$@"
