#!/usr/bin/env bash
# Two runs of the main job's setting side by side: one goes on undisturbed, the other is ended by SIGTERM or SIGKILL
# about every minute and started again. Then a plot of what the first one held, and whether both are the same in every
# bit. Needs the pair that runs/runcpu.sh trains by SFT. 2 cores, an hour, 20 GB of checkpoints.
#   bash runs/soak.sh
#   MINUTES=5 bash runs/soak.sh
set -euo pipefail
[ $# = 0 ] || { echo "$1: is no flag of this script; its first lines say which variables it takes" >&2; exit 2; }
MINUTES=${MINUTES:-60} OUT=${OUT:-dev/curves/soak}
source "$(dirname "$0")/setup.sh"
export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat-tango-cpu}
export OMP_NUM_THREADS=1 WANDB_MODE=disabled
FLAGS="--model-tag chain-s0 --seed 0 --device-type cpu --num-steps 2000 --eval-every 50 --kl-coef 0 --warmup-steps 40
    --verifier-balance --verifier-replay 0.5 --save-every 10 --keep 0"

trap 'kill $(jobs -p) 2> /dev/null || true' EXIT  # nothing goes on after it
timeout "${MINUTES}m" python -m scripts.tango_rl --run chain-long-s0 $FLAGS > /dev/null &
python dev/soak.py --minutes "$MINUTES" kill -- \
    python -m scripts.tango_rl --run chain-soak-s0 --resume-from-step auto $FLAGS
wait || true  # timeout ends the long run by SIGTERM
python dev/soak.py plot chain-long-s0 --out "$OUT"
python dev/soak.py compare chain-long-s0 chain-soak-s0
