#!/usr/bin/env bash
# The main job on a laptop CPU, from nothing to a co-trained pair: tokenizer, SFT of generator and verifier, verifier
# warm-up, interleaved RL, evaluation. 4 to 12 minutes on 2 cores. Finished stages are reused; an interrupted one goes
# on where it was.
#   bash runs/runcpu.sh
#   SEED=1 bash runs/runcpu.sh
#   ARM=fixed_verifier bash runs/runcpu.sh     # from the same SFT checkpoints, with a verifier that RL leaves alone
#   ARM=paper bash runs/runcpu.sh              # or with step rewards as in the paper (eq. 3 and 7)
set -euo pipefail
[ $# = 0 ] || { echo "$1: is no flag of this script; its first lines say which variables it takes" >&2; exit 2; }
SEED=${SEED:-0} ARM=${ARM:-tango}
RUN=chain-$ARM-s$SEED JUDGING="--warmup-steps 40 --verifier-balance --verifier-replay 0.5"
case $ARM in
    tango) RUN=chain-s$SEED FLAGS=$JUDGING ;;
    fixed_verifier) FLAGS="--recipe fixed_verifier" ;;
    paper) FLAGS="$JUDGING --step-rewards verdicts --credit to_go --negative-weight 1 --no-verify-distinct" ;;
    *) echo "ARM $ARM: there are tango fixed_verifier paper" >&2; exit 2 ;;
esac
source "$(dirname "$0")/setup.sh"
# Not after 2: what the user gave cannot work, and a line has said so.
trap '[[ $? = [02] ]] || echo "Not finished. Run the same command again: it goes on where it was." >&2' EXIT
# A base directory of its own: a user's checkpoints and tokenizer in ~/.cache/nanochat are never touched.
export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat-tango-cpu}
export OMP_NUM_THREADS=1 WANDB_MODE=${WANDB_MODE:-disabled}
NPROC=${NPROC:-2}  # two ranks of one thread are a little faster than one of two at this size
TAG=chain-s$SEED
launch() { torchrun --standalone --nproc_per_node="$NPROC" "$@"; }

if ! [ -d "$NANOCHAT_BASE_DIR" ]; then
    echo "What the end looks like, by the pair that comes with the project. After it yours is trained, from nothing."
    python -m scripts.demo pair --num-problems 2 --num-scored 0 --device-type cpu
fi

python -m scripts.tok_train --seed "$SEED" --if-missing

# 1M parameters: 4 layers of width 128
MODEL="--depth 4 --n-embd 128 --n-head 4 --model-tag $TAG --seed $SEED --device-type cpu"
launch scripts/chat_sft.py -- --role generator $MODEL --resume-from-step auto
launch scripts/chat_sft.py -- --role verifier $MODEL --resume-from-step auto

# A finished run prints its table again.
launch scripts/tango_rl.py -- --run "$RUN" --resume-from-step auto --model-tag "$TAG" --seed "$SEED" --device-type cpu \
    --num-steps 80 --eval-every 20 --kl-coef 0 $FLAGS

# Curves, settings, health and rollouts on one page, to be opened in a browser.
python -m scripts.report "$RUN"

# What RL changed, on five held-out problems. The last line names the page again.
python -m scripts.demo "$RUN" --device-type cpu
