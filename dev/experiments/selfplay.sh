#!/usr/bin/env bash
# Self-play, teams, own judges, missing labels, tools and a perfect verifier: each system beside the baseline of its
# family, from the same SFT checkpoints. Finished runs are reused, interrupted ones go on. JOBS is the number of cores
# unless set; all of it is in NANOCHAT_BASE_DIR, ~/.cache/nanochat-tango-selfplay unless set.
#   bash dev/experiments/selfplay.sh
#   bash dev/experiments/selfplay.sh --families "no_labels" --seeds "1" --out curves
#   bash dev/experiments/selfplay.sh --families teams --arms "aligned"
#   bash dev/experiments/selfplay.sh --list    prints the families, their arms and all flags
set -euo pipefail
case " $* " in *" -h "*|*" --help "*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
source "$(dirname "$0")/../../runs/setup.sh"
export OMP_NUM_THREADS=1 WANDB_MODE=${WANDB_MODE:-disabled}
export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat-tango-selfplay}
exec python -m dev.experiments.run_selfplay "$@"
