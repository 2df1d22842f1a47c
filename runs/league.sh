#!/usr/bin/env bash
# The league of systems: each from the same checkpoints, with one budget of sampled tokens, settings by one rule. Results
# go to dev/LEAGUE.md, dev/league.html (open it in a browser) and dev/curves/league. Runs are processes of one thread,
# JOBS of them at a time: as many as there are cores, unless set. What is stored is not run again; what was interrupted
# goes on. On 2 cores one system at one task takes about 20 minutes, SFTs and GRPO beside it, all of it over ten hours.
#   bash runs/league.sh --help
#   bash runs/league.sh --systems "tango dapo" --tasks chain --seeds "1 2 3"
#   bash runs/league.sh --systems my/few.py --tasks chain     # a recipe of your own, among the others
#   bash runs/league.sh --tasks words --seeds "1 2 3"         # a real model, alone; it takes a GPU where there is one
set -euo pipefail
source "$(dirname "$0")/setup.sh"
export OMP_NUM_THREADS=1 WANDB_MODE=${WANDB_MODE:-disabled}
export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat-tango-league}
exec python -m dev.experiments.league "$@"
