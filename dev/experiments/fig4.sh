#!/usr/bin/env bash
# The controlled experiment: from the same SFT checkpoints and problems, arms that differ in one thing (on chain and the
# mixture GRPO also in its own learning rate); then curves and a paired comparison.
# A run is one process of one thread, JOBS of them at a time. Finished runs are reused, interrupted ones go on.
# JOBS is the number of cores unless set; all of it is in NANOCHAT_BASE_DIR, ~/.cache/nanochat-tango-fig4 unless set.
# Arms also come as alpha_<0.x> and ng_<1 to 10>, as other recipes (prime, dpo, spin), and these and grpo with another
# rate (grpo_2e-4). Any arm comes with a weight of the KL to its start, too (tango_kl0.05). prime_outcome is PRIME
# without process rewards. With --start refine all arms start from a second SFT, which teaches the form of a second
# attempt; critique_grpo and score, which have two turns, need it.
# Tango and its relatives use step rewards as the paper does; tango_merged, fixed_merged and gold_merged as the defaults
# of tango_rl do.
# On 2 cores three seeds of the main arms take about 40 minutes (chain), an hour (last_letter) or two (mixture).
#   bash dev/experiments/fig4.sh                                                  # chain, seeds 1 2 3, the main arms
#   bash dev/experiments/fig4.sh --task last_letter --seeds "1 2" --steps 20 --arms "tango grpo"
#   bash dev/experiments/fig4.sh --arms "$(bash dev/experiments/fig4.sh --list ablations)" --seeds "1 2" --out dev/curves/ablations
set -euo pipefail
case " $* " in *" -h "*|*" --help "*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
source "$(dirname "$0")/../../runs/setup.sh"
export OMP_NUM_THREADS=1 WANDB_MODE=${WANDB_MODE:-disabled}
export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat-tango-fig4}
exec python -m dev.experiments.run_arms "$@"
