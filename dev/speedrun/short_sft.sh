# Faster SFT: 550 steps in place of 700, embeddings at three times the rate; then 60 steps of GRPO
set -euo pipefail
export OMP_NUM_THREADS=1
launch() { torchrun --standalone --nproc_per_node=2 "$@"; }

python -m scripts.tok_train --seed "$SEED" --num-texts 1
launch scripts/chat_sft.py -- --role generator --depth 4 --n-embd 128 --n-head 4 --model-tag chain --seed "$SEED" \
    --device-type cpu --num-steps 550 --matrix-lr 6e-3 --embedding-lr 1.2e-2 --warmup-ratio 0.03 --eval-examples 0 \
    --save-every 0
launch scripts/tango_rl.py -- --run speedrun --recipe grpo --model-tag chain --seed "$SEED" --device-type cpu \
    --num-steps 60 --lr 4e-4 --negative-weight 0.1 --kl-coef 0 --eval-examples 2 --save-every 0 --log-rollouts 0
