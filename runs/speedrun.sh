#!/usr/bin/env bash
# From nothing to a co-trained chat model, straight through: tokenizer, pretraining, SFT of the generator, SFT of the
# verifier, RL Tango on GSM8K, evaluation, a chat in which the verifier judges each step.
#
#   bash runs/speedrun.sh                  8 H100 GPUs, one node; hours and dollars are printed first
#                                          (scripts/plan_cost.py computes them)
#   SCALE=tiny bash runs/speedrun.sh       the very same stages on 2 CPU cores in under 10 minutes: 1M parameters,
#                                          generated text, the chain task; on a GPU with DEVICE="--device-type cuda"
#
# Run it again after it was stopped: every stage goes on from its last checkpoint, finished ones say so. WANDB_RUN=name
# logs to wandb.
set -euo pipefail
[ $# = 0 ] || { echo "$1: is no flag of this script; its first lines say which variables it takes" >&2; exit 2; }
source "$(dirname "$0")/setup.sh"
SCALE=${SCALE:-full}
[ -n "${WANDB_RUN:-}" ] || export WANDB_MODE=disabled
export OMP_NUM_THREADS=1
case $SCALE in
full)
    export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat}
    NPROC=${NPROC:-8}
    TAG=d24
    DATA=$NANOCHAT_BASE_DIR/base_data_climbmix  # upstream's folder: its shards are found
    DEVICE=
    VOCAB=32768
    # --depth: the one dial; width, batch size, learning rates and weight decay follow (scripts/base_train.py).
    # --target-param-data-ratio: tokens per weight, a little below the best for the compute, as upstream's speedrun.
    # --window-pattern L: every layer sees all tokens; S pays with kernels that skip what is masked.
    # --device-batch-size: rows of 2048 tokens through a GPU at once (memory, not results). --save-every: steps between
    # checkpoints.
    BASE="--depth 24 --target-param-data-ratio 8 --window-pattern L --device-batch-size 16 --save-every 1000"
    # --split-tokens: validation text for bits per byte.
    BASE_EVAL="--split-tokens 20971520"
    TASK="--task gsm8k"
    # --matrix-lr, --embedding-lr: of Muon and AdamW, a quarter of what training from nothing takes.
    # --micro-batch-tokens: through a GPU at once.
    SFT="--matrix-lr 1e-3 --embedding-lr 1e-3 --micro-batch-tokens 32768 --save-every 250"
    # Nineteen in twenty examples are everyday conversations (one pass), the rest GSM8K's solutions, one line a step
    # (6 passes). --examples-per-step: per optimizer step, over all GPUs. --pack: several to a row of 2048 tokens.
    GENERATOR_SFT="--num-steps 1500 --examples-per-step 256 --conversations HuggingFaceTB/smol-smoltalk
                   --conversations-share 0.95 --pack"
    # --num-sampled: solutions of the SFT generator, half of what the verifier learns to judge; --max-new-tokens: their
    # length limit.
    VERIFIER_SFT="--num-steps 300 --examples-per-step 128 --num-sampled 4096 --max-new-tokens 256"
    # --num-steps: of the generator; a verifier step follows every three, and --warmup-steps come first, as in the
    # paper. --examples-per-step problems with --num-samples rollouts each. --max-new-tokens, --verifier-max-new-tokens:
    # length limits. --lr: AdamW, of both. --kl-coef: weight of the KL to the SFT models. --eval-every: generator steps
    # between evaluations on --eval-examples held-out problems.
    RL="--num-steps 200 --warmup-steps 40 --examples-per-step 64 --num-samples 8 --max-new-tokens 256
        --verifier-max-new-tokens 384 --lr 1e-5 --kl-coef 1e-3 --micro-batch-tokens 32768 --eval-every 50
        --eval-examples 640 --save-every 50"
    EVAL="-m 256 -a gsm8k|ARC-Easy|ARC-Challenge|MMLU"
    QUESTION="Tom has 3 boxes with 12 pencils each and gives away 7 pencils. How many pencils does he have left?"
    ;;
tiny)
    export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat-tango-tiny}
    NPROC=${NPROC:-2}
    TAG=tiny
    DATA=$NANOCHAT_BASE_DIR/text
    DEVICE=${DEVICE:---device-type cpu}
    VOCAB=265  # bytes, no merges
    # 1M parameters, 1M tokens. The learning rates are four times the defaults and the weight decay is 0: the rules are
    # for longer runs (dev/LOG.md).
    BASE="--depth 4 --n-embd 128 --n-head 4 --sequence-len 256 --window-pattern L --num-iterations 250
          --total-batch-size 4096 --device-batch-size 8 --matrix-lr 0.08 --embedding-lr 1.2 --unembedding-lr 0.032
          --weight-decay 0 --warmup-steps 20 --eval-every 100 --eval-tokens 32768 --save-every 100"
    BASE_EVAL="--split-tokens 65536 --device-batch-size 8"
    TASK="--task chain"
    SFT="--save-every 100"
    GENERATOR_SFT="--num-steps 250"
    VERIFIER_SFT="--num-steps 250 --num-sampled 1024"
    # Without KL, with as many right as wrong solutions to judge, half of them past ones: runs/runcpu.sh, half as long.
    RL="--num-steps 40 --warmup-steps 20 --eval-every 20 --kl-coef 0 --verifier-balance --verifier-replay 0.5
        --eval-examples 200 --save-every 20"
    EVAL="-x 200"
    QUESTION="3+5*2-4+1"
    ;;
*) echo "SCALE=$SCALE: full or tiny" >&2; exit 2 ;;
esac
RUN=${WANDB_RUN:-speedrun-$TAG}
launch() { torchrun --standalone --nproc_per_node="$NPROC" "$@"; }
stage() { echo; echo "== $* ($SECONDS s)"; }

stage "What this will take"
[ "$SCALE" = tiny ] || python -m scripts.plan_cost --gpus "$NPROC" --base "$BASE" --generator-sft "$GENERATOR_SFT" \
    --verifier-sft "$VERIFIER_SFT" --rl "$RL" --base-eval "$BASE_EVAL"

stage "Text"
if [ "$SCALE" = tiny ]; then  # 20,000 documents: problem, solution and verification on a line
    [ -f "$DATA/shard_00003.jsonl" ] ||  # they come all at once
        python -m scripts.task_text $TASK --out "$DATA"
else  # 105 shards of 250M characters, the last for validation: 104 can be dealt to 8 ranks
    hf download karpathy/climbmix-400b-shuffle --repo-type dataset \
        --include "shard_000*.parquet" "shard_0010[0-4].parquet" --local-dir "$DATA"
fi

stage "Tokenizer"  # --if-missing: models are made for one tokenizer, so it is never trained twice
python -m scripts.tok_train $TASK --data "$DATA" --vocab-size "$VOCAB" --if-missing
python -m scripts.tok_eval

stage "Pretraining"  # --resume-from-step auto, here and below: go on where it was
launch scripts/base_train.py -- --run "$RUN-base" --model-tag "$TAG" --data "$DATA" $BASE $DEVICE \
    --resume-from-step auto
VAL=$(ls "$DATA"/shard_* | tail -n 1)
launch scripts/base_eval.py -- --model-tag "$TAG" --val-data "$VAL" $BASE_EVAL $DEVICE

stage "SFT of the generator"
launch scripts/chat_sft.py -- --run "$RUN-sft" --role generator --model-tag "$TAG" --from-stage base \
    $TASK $SFT $GENERATOR_SFT $DEVICE --resume-from-step auto
launch scripts/chat_eval.py -- -i sft -g "$TAG" $EVAL $DEVICE

stage "SFT of the verifier"  # from the base model too: a judge that does not share the generator's mistakes
launch scripts/chat_sft.py -- --run "$RUN-ver" --role verifier --model-tag "$TAG" --from-stage base \
    $TASK $SFT $VERIFIER_SFT $DEVICE --resume-from-step auto

stage "RL Tango"  # writes chatrl_checkpoints/<run>-gen and <run>-ver
launch scripts/tango_rl.py -- --run "$RUN" --model-tag "$TAG" $TASK $RL $DEVICE --resume-from-step auto
python -m scripts.report "$RUN"

stage "Evaluation"
launch scripts/chat_eval.py -- -i rl -g "$RUN-gen" $EVAL $DEVICE

stage "A question, and the verifier's judgment of each step"
python -m scripts.chat_cli -i rl -g "$RUN-gen" --verifier "$RUN-ver" -p "$QUESTION" -t 0 $DEVICE
echo
echo "All in $NANOCHAT_BASE_DIR. To talk on: NANOCHAT_BASE_DIR=$NANOCHAT_BASE_DIR" \
    "python -m scripts.chat_cli -i rl -g $RUN-gen --verifier $RUN-ver"
