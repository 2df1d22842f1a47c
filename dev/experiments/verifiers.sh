#!/usr/bin/env bash
# Every kind of verifier in one table: trained from the same SFT checkpoints, judging the same solutions, then rewarding
# the same generator. Finished runs are reused, interrupted ones go on. JOBS is the number of cores unless set; all of it
# is in NANOCHAT_BASE_DIR, ~/.cache/nanochat-tango-verifiers unless set. On 2 cores three seeds take two to three hours.
#   bash dev/experiments/verifiers.sh
#   bash dev/experiments/verifiers.sh --seeds "1" --verifiers "grpo sft orm prm_gold" --out curves
set -euo pipefail
case " $* " in *" -h "*|*" --help "*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
source "$(dirname "$0")/../../runs/setup.sh"
export OMP_NUM_THREADS=1 WANDB_MODE=${WANDB_MODE:-disabled}
export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat-tango-verifiers}
exec python -m dev.experiments.run_verifiers "$@"
