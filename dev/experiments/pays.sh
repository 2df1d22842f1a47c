#!/usr/bin/env bash
# When does co-training pay? The same arms at several settings of a dial, on chains worked by small models:
#   grpo           no verifier
#   fixed_merged   a verifier that had SFT and is not trained. Its step rewards take the outcome into account and are
#                  merged with it before normalising; equal solutions are verified once
#   gentle_merged  the same, and the verifier is trained at a tenth of the generator's rate
#   gold_steps     gold step labels, the oracle; where there are few answers ttrl, which uses none
# and at the settings usual and kl0 also what lies between the paper's way and these:
#   fixed_verifier   the paper's step rewards: verdicts, normalised apart from the outcome; every solution is verified
#   tango            the same, and the verifier is trained
#   fixed_posterior  fixed_merged, with step rewards normalised apart from the outcome
# A dial turns one thing of the setting called usual (step rewards of weight .7, a KL of weight .05 to the start, 120
# generator steps), which is part of every dial:
#   start     how good the verifier is before RL: weak, usual, strong
#   pressure  the weight of step rewards: alpha30 (.3), usual (.7); and kl0, without the KL
#   labels    how many problems have a known answer: n64, n256, usual (all of them)
# Without --dial all three are turned. On 2 cores a seed takes 40 to 45 minutes. Each dial gets a table and a report in
# a folder of its name in --out (dev/curves unless given, where the reported ones are). --settings takes some settings
# of one dial, --arms some arms. Other flags, JOBS and NANOCHAT_BASE_DIR are those of fig4.sh.
#   bash dev/experiments/pays.sh --seeds "21 22 23 24 25" --out curves
#   bash dev/experiments/pays.sh --dial pressure --settings "alpha30 usual" --arms "tango grpo"
set -euo pipefail
case " $* " in *" -h "*|*" --help "*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
source "$(dirname "$0")/../../runs/setup.sh"
export OMP_NUM_THREADS=1 WANDB_MODE=${WANDB_MODE:-disabled}
export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat-tango-fig4}
case " $* " in *" --dial "*|*" --dial="*) ;; *) set -- --dial "start pressure labels" "$@" ;; esac
exec python -m dev.experiments.run_arms "$@"
