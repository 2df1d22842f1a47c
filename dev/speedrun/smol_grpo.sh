# The arm grpo of runs/smol.sh in small: SFT on two-step problems of 19 templates, then GRPO on them
set -euo pipefail
export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive
PROBLEMS="--task reasoning_gym --reasoning-gym-format lines --reasoning-gym-most-lines 2"

python -m scripts.chat_sft --role generator --from-stage sft --from-tag smollm2 --model-tag words --seed "$SEED" \
    --device-type cpu $PROBLEMS --num-steps 80 --examples-per-step 8 --micro-batch-tokens 4096 --embedding-lr 5e-4 \
    --max-new-tokens 80 --eval-examples 0 --save-every 0
python -m scripts.tango_rl --run speedrun --recipe grpo --model-tag words --seed "$SEED" --device-type cpu $PROBLEMS \
    --num-steps 15 --examples-per-step 8 --num-samples 8 --lr 1.5e-5 --kl-coef 0 --max-new-tokens 80 \
    --eval-examples 1 --save-every 0
