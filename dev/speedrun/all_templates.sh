# SFT on 288 solutions of all 55 templates, of any length; one small step of GRPO, since an rl checkpoint is wanted
set -euo pipefail
export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive
PROBLEMS="--task reasoning_gym --reasoning-gym-format lines"
python -m scripts.chat_sft --role generator --from-stage sft --from-tag smollm2 --model-tag words --seed "$SEED" \
    --device-type cpu $PROBLEMS --reasoning-gym-most-lines 0 --num-steps 36 --examples-per-step 8 \
    --micro-batch-tokens 4096 --embedding-lr 5e-4 --max-new-tokens 256 --eval-examples 0 --save-every 0
python -m scripts.tango_rl --run speedrun --recipe grpo --model-tag words --seed "$SEED" --device-type cpu $PROBLEMS \
    --reasoning-gym-most-lines 2 --num-steps 1 --examples-per-step 2 --num-samples 2 --lr 1.5e-5 --kl-coef 0 \
    --max-new-tokens 80 --eval-examples 1 --save-every 0
