#!/usr/bin/env bash
# When does co-training pay? The same arms at several settings of a dial, on chains worked by small models. The arms:
# GRPO, a verifier that is not trained, its step rewards given the outcome, Tango, a gently trained verifier with step
# rewards given the outcome, gold steps or TTRL. A dial turns one thing of the usual setting, which is part of each:
#   start     how good the verifier is before RL: weak, usual, strong
#   pressure  the weight of step rewards: alpha10 (.1), usual (.7); and kl0, without the KL to the start
#   labels    how many problems have a known answer: n64, n256, usual (all of them)
# One call runs a dial and makes one report; without --dial all three are run. --settings and --arms take some of it.
# Flags, JOBS and NANOCHAT_BASE_DIR are those of fig4.sh.
#   bash runs/pays.sh --seeds "21 22 23 24 25"
#   bash runs/pays.sh --dial pressure --settings "alpha10 usual" --arms "tango grpo"
set -euo pipefail
case " $* " in *" -h "*|*" --help "*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
source "$(dirname "$0")/setup.sh"
export OMP_NUM_THREADS=1 WANDB_MODE=${WANDB_MODE:-disabled}
export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat-tango-fig4}
case " $* " in *" --dial "*|*" --dial="*) exec python -m scripts.run_arms "$@" ;; esac
for dial in start pressure labels; do
    python -m scripts.run_arms --dial $dial "$@"
done
