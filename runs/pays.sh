#!/usr/bin/env bash
# When does co-training pay? The same arms (GRPO, a fixed verifier, Tango, Tango with a gentle verifier, gold steps,
# TTRL) at several settings of one dial, on chains worked by small models:
#   start     how good the verifier is before RL: weak, usual, strong, operands (shown wrong operands)
#   pressure  how much weight its step rewards have: alpha10, alpha30, alpha70 (constant), alpha70_operands; 120 steps
#   labels    how many problems have a known answer: n32, n64, n256
# One call runs all settings of a dial; --settings takes some of them. Every setting gets a report of its own.
# Flags, JOBS and NANOCHAT_BASE_DIR are those of fig4.sh.
#   bash runs/pays.sh --dial pressure --seeds "21 22 23 24 25"
#   bash runs/pays.sh --dial pressure --settings "alpha10 alpha70" --arms "tango grpo"
set -euo pipefail
case " $* " in
    *" -h "*|*" --help "*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;;
    *" --dial "*|*" --dial="*) ;;
    *) echo "error: --dial is missing (see bash runs/pays.sh --help)" >&2; exit 2 ;;
esac
source "$(dirname "$0")/setup.sh"
export OMP_NUM_THREADS=1 WANDB_MODE=${WANDB_MODE:-disabled}
export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat-tango-fig4}
exec python -m scripts.run_arms "$@"
