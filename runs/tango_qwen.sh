#!/usr/bin/env bash
# The paper's run with pretrained models: import, SFT of the generator, RL Tango, evaluation, export. All sizes do the
# same stages.
#
#   bash runs/tango_qwen.sh                    Qwen2.5-Math-7B, verified by Qwen2.5-7B, on 8 GPUs of 80 GB
#   SCALE=1.5b bash runs/tango_qwen.sh         Qwen2.5-Math-1.5B, verified by Qwen2.5-1.5B, on one GPU of 80 GB
#   SCALE=tiny bash runs/tango_qwen.sh         three random layers and the chain task on a CPU: a rehearsal without a
#                                              download, under 10 minutes
#
# As the paper: the models, the problems (Eurus-2), 5 rollouts of 256 problems, 3 generator steps per verifier step
# after 40 warm-up steps, 200 generator steps, eq. 3 and 7 with alpha .1 -> .001, lr 1e-6, KL .001, gamma .8. Not as
# the paper: its SFT data is not public, so SFT has MATH's worked solutions, 100 steps of 64 and not 800 (give
# SFT_CONVERSATIONS=file.jsonl for your own); the 1.5B version has 64 problems per step. Nobody has run the two large
# sizes yet: memory and hours that the script prints are computed.
# Run it again after it was stopped: every stage goes on from its last checkpoint. WANDB_RUN=name logs to wandb.
set -euo pipefail
[ $# = 0 ] || { echo "$1: is no flag of this script; its first lines say which variables it takes" >&2; exit 2; }
source "$(dirname "$0")/setup.sh"
SCALE=${SCALE:-7b}
[ -n "${WANDB_RUN:-}" ] || export WANDB_MODE=disabled
export OMP_NUM_THREADS=1
DEVICE=
# --lr: of both roles; --kl-coef: weight of the KL to the starting models; --micro-batch-tokens: through a model at
# once; --max-rows: rollouts per GPU that decode together; --recompute: blocks run again in the backward pass (these
# three: memory, not results). --save-every: a 7B pair's set takes 183 GB on disk. --eval-examples: of MATH-500, greedy.
PAPER="--step-rewards verdicts --credit to_go --negative-weight 1 --no-verify-distinct"  # the defaults are not the paper's
RL="$PAPER --task eurus --num-steps 200 --warmup-steps 40 --generator-steps 3 --verifier-steps 1 --num-samples 5
    --alpha-start 0.1 --alpha-end 0.001 --gamma 0.8 --kl-coef 0.001 --lr 1e-6 --temperature 1.0 --max-new-tokens 2048
    --verifier-max-new-tokens 2048 --recompute --micro-batch-tokens 8192 --eval-every 20 --eval-examples 500
    --save-every 100"
SFT="--task math --num-steps 100 --examples-per-step 64 --embedding-lr 5e-6 --micro-batch-tokens 8192 --recompute"
[ -z "${SFT_CONVERSATIONS:-}" ] ||
    SFT="${SFT/--num-steps 100/--num-steps 800} --conversations $SFT_CONVERSATIONS --conversations-share 1.0"
EVAL="-a math|aime|amc|olympiad -m 2048 --max-rows 64"
PROCESSBENCH="--processbench Qwen/ProcessBench"
case $SCALE in
7b)
    export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat-qwen7b}
    NPROC=${NPROC:-8} GENERATOR=Qwen/Qwen2.5-Math-7B VERIFIER=Qwen/Qwen2.5-7B TAG=qwen7b JUDGE=qwen7b-ver
    RL="$RL --examples-per-step 256 --max-rows 32 --shard" SFT="$SFT --shard"
    ;;
1.5b)
    export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat-qwen1.5b}
    NPROC=${NPROC:-1} GENERATOR=Qwen/Qwen2.5-Math-1.5B VERIFIER=Qwen/Qwen2.5-1.5B TAG=qwen1.5b JUDGE=qwen1.5b-ver
    RL="$RL --examples-per-step 64 --max-rows 64"
    ;;
tiny)
    export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat-qwen-tiny}
    NPROC=${NPROC:-2} GENERATOR=$NANOCHAT_BASE_DIR/random-generator VERIFIER=$NANOCHAT_BASE_DIR/random-verifier
    TAG=qwen-tiny JUDGE=qwen-tiny-judge
    DEVICE="--device-type cpu"
    CHAIN="--task chain --chain-modulus 3 --chain-min-steps 1 --chain-max-steps 3"
    SFT="$CHAIN --num-steps 400 --embedding-lr 2e-3 --recompute --shard --max-new-tokens 48"
    RL="$PAPER $CHAIN --num-steps 20 --warmup-steps 5 --examples-per-step 32 --num-samples 8 --max-new-tokens 48
        --verifier-max-new-tokens 64 --lr 1e-4 --kl-coef 0 --recompute --shard --eval-examples 100 --save-every 5"
    EVAL="-x 100"
    PROCESSBENCH=
    ;;
*) echo "SCALE=$SCALE: 7b, 1.5b or tiny" >&2; exit 2 ;;
esac
RUN=${WANDB_RUN:-tango-$TAG}
SAVED=$NANOCHAT_BASE_DIR/chatsft_checkpoints
launch() { torchrun --standalone --nproc_per_node="$NPROC" "$@"; }
stage() { echo; echo "== $* ($SECONDS s)"; }

stage "Models"
if [ "$SCALE" = tiny ]; then
    SHAPE="--shape qwen2.5-0.5b --n-layer 3 --n-embd 128 --vocab-size 320 --sequence-len 512 --std 0.05 --dtype float32"
    [ -d "$GENERATOR" ] || python -m scripts.hf_random $SHAPE --seed 0 --to "$GENERATOR"
    [ -d "$VERIFIER" ] || python -m scripts.hf_random $SHAPE --seed 1 --to "$VERIFIER"
fi
imported() { [ -e "$SAVED/$2/meta_000000.json" ] || python -m scripts.hf_import --source "$1" --model-tag "$2"; }
imported "$GENERATOR" "$TAG-start"
imported "$VERIFIER" "$JUDGE"

stage "What RL will take"
launch scripts/tango_rl.py -- --model-tag "$TAG-start" --verifier-tag "$JUDGE" $RL $DEVICE --dry-run

stage "SFT of the generator"
launch scripts/chat_sft.py -- --run "$RUN-sft" --role generator --model-tag "$TAG" --from-stage sft \
    --from-tag "$TAG-start" $SFT $DEVICE --resume-from-step auto
launch scripts/chat_eval.py -- -i sft -g "$TAG" $EVAL $DEVICE
# A large verifier has been through instruction data; random layers learn their format here.
if [ "$SCALE" = tiny ]; then
    launch scripts/chat_sft.py -- --run "$RUN-ver" --role verifier --model-tag "$TAG" --from-stage sft \
        --from-tag "$JUDGE" $SFT $DEVICE --resume-from-step auto
fi

stage "RL Tango"  # writes chatrl_checkpoints/<run>-gen and <run>-ver
launch scripts/tango_rl.py -- --run "$RUN" --model-tag "$TAG" $RL $DEVICE --resume-from-step auto
python -m scripts.report "$RUN"

stage "Evaluation"
launch scripts/chat_eval.py -- -i rl -g "$RUN-gen" $EVAL $DEVICE
launch scripts/verifier_eval.py -- --verifier-tag "$RUN-ver" --verifier-source rl $PROCESSBENCH \
    --generator-tag "$RUN-gen" --generator-source rl --num-samples 8 --num-verifications 4 --temperature 1 \
    --max-problems 100 --max-rows 64 $DEVICE

stage "Export"
for role in gen ver; do
    [ -d "$NANOCHAT_BASE_DIR/$RUN-$role" ] ||
        python -m scripts.hf_export --model-tag "$RUN-$role" --to "$NANOCHAT_BASE_DIR/$RUN-$role"
done
