#!/usr/bin/env bash
# The controlled experiment: from the same SFT checkpoints and problems, arms that differ in one thing (on chain and the
# mixture GRPO also in its own learning rate); then curves and a paired comparison.
# A run is one process of one thread, JOBS of them at a time. Finished runs are reused, interrupted ones go on.
# JOBS is the number of cores unless set; all of it is in NANOCHAT_BASE_DIR, ~/.cache/nanochat-tango-fig4 unless set.
# Arms also come as alpha_<0.x> and ng_<1 to 10>, as other recipes (prime, dpo, spin), and these and grpo with another
# rate (grpo_2e-4). prime_outcome is PRIME without process rewards. With --start refine all arms start from a second SFT,
# which teaches the form of a second attempt; critique_grpo and score, which have two turns, need it.
# On 2 cores three seeds of the main arms take about 40 minutes (chain), an hour (last_letter) or two (mixture).
#   bash runs/fig4.sh                                                  # chain, seeds 1 2 3, the main arms
#   bash runs/fig4.sh --task last_letter --seeds "1 2" --steps 20 --arms "tango grpo"
#   bash runs/fig4.sh --arms "$(bash runs/fig4.sh --list ablations)" --seeds "1 2" --out dev/curves/ablations
set -euof pipefail
LIST= TASK=chain SEEDS="1 2 3" START=sft STEPS=default ARMS=default OUT=dev/curves CORES=$(env -u OMP_NUM_THREADS nproc)
JOBS=${JOBS:-$CORES}
MAIN="tango grpo grpo_2e-4 fixed_verifier fixed_generator gold_steps outcome_verifier"
ABLATIONS="tango grpo gold_steps alpha_0.3 alpha_1 ng_1 alpha_0.1 ng_5 no_class_weights no_balance no_replay
merged_rewards rloo reinforce_pp no_balance_no_weights ng_10 alpha_0.05 small_verifier large_verifier shared_half shared_all"
OTHERS="prime prime_outcome dpo spin critique_grpo score"
TUNED="grpo|${OTHERS// /|}"  # arms that also come with another rate
COMMAND="bash runs/fig4.sh${*:+$(printf ' %q' "$@")}"
refuse() { echo "error: $1" >&2; exit 2; }
while [ $# -gt 0 ]; do
    case $1 in -h|--help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; exit ;; esac
    [ $# -gt 1 ] || refuse "$1: needs a value (--task, --seeds, --start, --steps, --arms, --out, --list)"
    case $1 in
        --task) TASK=$2 ;; --seeds) SEEDS=$2 ;; --start) START=$2 ;; --steps) STEPS=$2 ;; --arms) ARMS=$2 ;; --out) OUT=$2 ;;
        --list) LIST=$2 ;;
        *) refuse "$1: there are --task, --seeds, --start, --steps, --arms, --out, --list" ;;
    esac
    shift 2
done

WARMUP=40
MODEL="--depth 4 --n-embd 128 --n-head 4"
CHAIN="--chain-answer final"  # the final result alone is the answer: a wrong chain can be right by luck
# SFT shows up to 5 words, and 1 demonstration in 20 of up to 12: after it (seed 0) lists of 2 to 5 are solved, 6 to 8
# now and then, 9 and 10 not.
WORDS="--last-letter-max-words 10 --last-letter-max-letters 4 --last-letter-full-share 0.05"
LONG="--sequence-len 576 --max-new-tokens 208"
LONG_RL="--max-new-tokens 208 --eval-examples 200" LONG_VERDICT="--verifier-max-new-tokens 224" VERDICT=""
REFINE_SFT="--num-steps 200 --refine-share 0.5 --matrix-lr 2e-3 --embedding-lr 2e-3"  # an SFT after the generator's
VERIFIER_SFT=""  # later flags override earlier ones, here and below
case $TASK in  # learning rates and alpha were chosen from tries on seed 0 (dev/LOG.md)
    chain)
        TASK_FLAGS="$CHAIN --chain-share 0.45 --chain-min-steps 3 --chain-max-steps 10"
        SFT_FLAGS="--sequence-len 384"  # room for a second attempt
        TASK_RL="--lr 2e-4" ALPHA="--alpha-start 0.5 --alpha-end 0.05" GRPO_FLAGS="--lr 4e-4" TASK_STEPS=60 ;;
    last_letter)  # for GRPO seed 0 said 2e-4, but seeds 1 to 3 said 1e-4
        TASK_FLAGS="--task last_letter $WORDS" SFT_FLAGS=$LONG
        TASK_RL="$LONG_RL --lr 1e-4" VERDICT=$LONG_VERDICT
        ALPHA="--alpha-start 0.1 --alpha-end 0.01" GRPO_FLAGS="" TASK_STEPS=40 ;;
    mixture)  # both in one run, with longer chains of which more is taught wrongly
        TASK_FLAGS="--task mixture $CHAIN --chain-share 0.5 --chain-min-steps 4 --chain-max-steps 12 $WORDS"
        SFT_FLAGS="$LONG --num-steps 1000"
        VERIFIER_SFT="--num-steps 2500"  # after 1000 it objects to little on last_letter (dev/LOG.md)
        TASK_RL="$LONG_RL --lr 2e-4" VERDICT=$LONG_VERDICT
        ALPHA="--alpha-start 0.3 --alpha-end 0.03" GRPO_FLAGS="--lr 1e-4" TASK_STEPS=100 ;;
    *) refuse "--task $TASK: there are chain, last_letter, mixture" ;;
esac
[[ $JOBS =~ ^[1-9][0-9]*$ ]] || refuse "JOBS $JOBS: must be a number from 1"
[[ $START =~ ^(sft|refine)$ ]] || refuse "--start $START: there are sft, refine"
[ "$STEPS" != default ] || STEPS=$TASK_STEPS
[ "$ARMS" != default ] || ARMS=$MAIN
[[ $STEPS =~ ^[1-9][0-9]*$ ]] || refuse "--steps $STEPS: must be a number from 1"
RL_FLAGS="--eval-every 10 --kl-coef 0 $TASK_RL"
JUDGING="$VERDICT --verifier-balance --verifier-replay 0.5 --verifier-lr 1e-4"  # what trains a verifier

has_verifier() { [[ ! $1 =~ ^(gold_steps|($TUNED)(_[1-9]e-[1-9])?)$ ]]; }  # one that had SFT
role_flags() {  # arm, tag of its verifier: the flags of its recipe that the other arms of the recipe have too
    has_verifier "$1" || [ "$1" = gold_steps ] || return 0
    case $1 in
        gold_steps) echo "$ALPHA" ;;
        fixed_verifier) echo "--verifier-tag $2 $VERDICT $ALPHA" ;;
        fixed_generator) echo "--verifier-tag $2 $JUDGING" ;;
        *) echo "--verifier-tag $2 --warmup-steps $WARMUP $JUDGING $ALPHA" ;;
    esac
}
arm_flags() {  # what makes an arm; nothing for one that this task or start does not have
    case $1 in
        *_[1-9]e-[1-9]) [[ ${1%_*} =~ ^($TUNED)$ ]] && echo "$(arm_flags "${1%_*}") --lr ${1##*_}" ;;
        prime) echo "--recipe prime --lr 2e-4 --prm-lr 3e-5 --process-norm none --accuracy-filter 0.05 0.95" ;;
        prime_outcome) echo "$(arm_flags prime) --prm-freeze-after 0" ;;  # without process rewards
        dpo) echo "--recipe dpo --lr 4e-4" ;;
        spin) echo "--recipe spin --lr 3e-5" ;;
        grpo) echo "--recipe grpo $GRPO_FLAGS" ;;
        critique_grpo) [ "$START" = refine ] && echo "--recipe critique_grpo --lr 2e-4" ;;
        score) [ "$START" = refine ] && echo "--recipe score --lr 2e-4 --stage1-steps $((STEPS / 3))" ;;
        tango|fixed_verifier|gold_steps|outcome_verifier) echo "--recipe $1" ;;
        fixed_generator) echo "--recipe fixed_generator --num-steps $((WARMUP + (STEPS - 1) / 3))" ;;
        alpha_1) echo "--alpha-start 1 --alpha-end 1" ;;  # constant
        alpha_0.[0-9]|alpha_0.[0-9][0-9]) echo "--alpha-start ${1#alpha_} --alpha-end ${1#alpha_}e-1" ;;
        ng_[1-9]|ng_10) echo "--generator-steps ${1#ng_}" ;;
        no_class_weights) echo "--no-class-weights" ;;
        no_balance) echo "--no-verifier-balance" ;;
        no_balance_no_weights) echo "--no-verifier-balance --no-class-weights" ;;
        no_replay) echo "--verifier-replay 0" ;;
        merged_rewards) echo "--combine rewards" ;;
        shared_half) echo "--verifier-shared-layers 2" ;;
        shared_all) echo "--verifier-shared-layers 4" ;;
        small_verifier|large_verifier) ;;
        rloo) echo "--advantage rloo" ;;
        reinforce_pp) echo "--advantage reinforce++" ;;
        *) return 1 ;;
    esac
}
verifier_of() {  # arms whose verifier has an SFT of its own: its tag's ending, and the flags of that SFT
    case $1 in
        shared_half) echo "-half --verifier-shared-layers 2" ;;
        shared_all) echo "-all --verifier-shared-layers 4" ;;
        small_verifier) echo "-small --depth 2 --n-embd 64 --n-head 2" ;;
        large_verifier) echo "-large --depth 6 --n-embd 192 --n-head 6" ;;
    esac
}
all_arms() {  # that this task and start have
    for arm in $(printf '%s\n' $MAIN $ABLATIONS $OTHERS | awk '!seen[$0]++'); do
        ! arm_flags "$arm" > /dev/null || echo "$arm"
    done
}
for arm in $ARMS; do arm_flags "$arm" > /dev/null || refuse "--arms $arm: there are $(all_arms | xargs)"; done
for seed in $SEEDS; do [[ $seed =~ ^(0|[1-9][0-9]{0,8})$ ]] || refuse "--seeds $seed: must be numbers from 0"; done
for list in "--seeds $SEEDS" "--arms $ARMS"; do
    words=(${list#* })
    [ ${#words[@]} -gt 0 ] || refuse "$list: is empty"
    [ -z "$(printf '%s\n' "${words[@]}" | sort | uniq -d)" ] || refuse "$list: something is there twice"
done

sft_tag() {  # seed, sft|refine|arm: the tag of the SFT of its generator, of second attempts, of an arm's verifier
    local ending
    case $2 in
        sft) ending= ;;
        refine) ending=-refine ;;
        *) read -r ending _ <<< "$(verifier_of "$2")"; ending=-ver$ending ;;
    esac
    echo "$TASK-s$1$ending"
}
starts_of() { echo "$START"; if has_verifier "$1"; then echo "$1"; fi; }  # arm: the SFTs that it starts from
flags_of() {  # seed, arm: all of a run's flags
    echo --model-tag "$(sft_tag "$1" "$START")" $(role_flags "$2" "$(sft_tag "$1" "$2")") --seed "$1" \
        --device-type cpu --num-steps "$STEPS" $RL_FLAGS $TASK_FLAGS $(arm_flags "$2")
}
case $LIST in
    "") ;;
    ablations) echo $ABLATIONS; exit ;;
    flags)  # of seed 0
        for arm in $(all_arms); do echo "$arm $(flags_of 0 "$arm")"; done
        exit ;;
    *) refuse "--list $LIST: there are ablations, flags" ;;
esac

cd "$(dirname "$0")/.."
export NANOCHAT_BASE_DIR=${NANOCHAT_BASE_DIR:-$HOME/.cache/nanochat-tango-fig4}
export OMP_NUM_THREADS=1 WANDB_MODE=${WANDB_MODE:-disabled}
LOGS=$NANOCHAT_BASE_DIR/logs
logged() {  # name of the log, command
    local log=$LOGS/$1.log
    shift
    "$@" > "$log" 2>&1 || { echo "failed: $* (see $log)" >&2; tail -n 3 "$log" >&2; return 1; }
}

sft_flags() {  # seed, sft|refine|arm: all flags of that SFT
    local tag flags common="--seed $1 --device-type cpu $MODEL $SFT_FLAGS"
    tag=$(sft_tag "$1" sft)
    read -r _ flags <<< "$(verifier_of "$2")"
    case $2 in
        sft) echo --role generator --model-tag "$tag" $common $TASK_FLAGS ;;
        refine)
            echo --role generator --model-tag "$tag-refine" --from-stage sft --from-tag "$tag" $common $TASK_FLAGS \
                $REFINE_SFT ;;
        *)
            echo --role verifier --model-tag "$tag" --verifier-tag "$(sft_tag "$@")" $common $VERIFIER_SFT $TASK_FLAGS \
                $flags ;;
    esac
}
sft() {  # seed, sft|refine|arm
    local tag flags
    tag=$(sft_tag "$@") flags=$(sft_flags "$@")
    if ! has_model "chatsft_checkpoints/$tag"; then
        echo "$flags" > "$LOGS/sft-$tag.flags"
        logged "sft-$tag" python -m scripts.chat_sft $flags
    fi
}
rl() {  # seed, arm
    local run=$NAME-$2-s$1 flags
    if [ ! -f "$NANOCHAT_BASE_DIR/runs/$run/summary.json" ]; then
        flags=$(flags_of "$1" "$2")
        echo "$flags" > "$LOGS/$run.flags"
        logged "$run" python -m scripts.tango_rl --run "$run" --resume-from-step auto $flags
    fi
    echo "$(date +%H:%M) $run"
}
NAME=$TASK  # runs of other lengths or starts are other runs
[ "$START" = sft ] || NAME=${NAME}_$START
[ "$STEPS" = "$TASK_STEPS" ] || NAME=${NAME}_$STEPS
pairs() { for arm in $ARMS; do for seed in $SEEDS; do echo "$seed $arm"; done; done; }
same_flags() {  # folder, name of its log, flags
    [ ! -d "$NANOCHAT_BASE_DIR/$1" ] || [ "$(cat "$LOGS/$2.flags" 2> /dev/null)" = "$3" ] ||
        refuse "$NANOCHAT_BASE_DIR/$1 was made with other flags (see $LOGS/$2.flags): set NANOCHAT_BASE_DIR to a new \
folder"
}
while read -r seed arm; do
    for start in sft $(starts_of "$arm"); do
        tag=$(sft_tag "$seed" "$start")
        same_flags "chatsft_checkpoints/$tag" "sft-$tag" "$(sft_flags "$seed" "$start")"
    done
    same_flags "runs/$NAME-$arm-s$seed" "$NAME-$arm-s$seed" "$(flags_of "$seed" "$arm")"
done < <(pairs)
mkdir -p "$LOGS"
mkdir -p "$OUT" 2> /dev/null || refuse "--out $OUT: cannot be made"
source runs/setup.sh

export NAME TASK START STEPS WARMUP MODEL TUNED REFINE_SFT GRPO_FLAGS SFT_FLAGS VERIFIER_SFT RL_FLAGS TASK_FLAGS LOGS
export VERDICT JUDGING ALPHA
export -f logged has_model has_verifier role_flags arm_flags verifier_of sft_tag sft_flags flags_of
export -f sft rl
each() { xargs -r -P "$JOBS" -L 1 bash -euo pipefail -c "$1"' "$@"' _; }  # runs function $1 on every line of arguments

[ -f "$NANOCHAT_BASE_DIR/tokenizer/tokenizer.pkl" ] || logged tokenizer python -m scripts.tok_train --task chain
for seed in $SEEDS; do echo "$seed sft"; done | each sft
pairs | while read -r seed arm; do
    for start in $(starts_of "$arm"); do echo "$(sft_tag "$seed" "$start") $seed $start"; done
done | sort -u -k 1,1 | cut -d " " -f 2- | each sft
started=$SECONDS failed=0
pairs | each rl || failed=1
{
    echo "\`$COMMAND\`, $CORES cores of $(lscpu | sed -n 's/^Model name: *//p'), $JOBS runs of one thread at a time;" \
        "this call's RL took $(((SECONDS - started) / 60)) minutes (finished runs are not run again)."
    echo
    finished=$(pairs | while read -r seed arm; do
        run=$NAME-$arm-s$seed
        [ ! -f "$NANOCHAT_BASE_DIR/runs/$run/summary.json" ] || { echo "$run"; continue; }
        echo "not finished, left out: $run" >&2
    done)
    python -m scripts.report --out "$OUT" $finished
} > "$LOGS/$NAME.md"
mv "$LOGS/$NAME.md" "$OUT/$NAME.md"
cat "$OUT/$NAME.md"
exit $failed
