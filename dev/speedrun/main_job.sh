# The main job, as runs/runcpu.sh has it: SFT of generator and verifier, 80 generator steps of Tango.
set -euo pipefail
export OMP_NUM_THREADS=1
MODEL="--depth 4 --n-embd 128 --n-head 4 --model-tag chain --seed $SEED --device-type cpu"
launch() { torchrun --standalone --nproc_per_node=2 "$@"; }

python -m scripts.tok_train --seed "$SEED"
launch scripts/chat_sft.py -- --role generator $MODEL
launch scripts/chat_sft.py -- --role verifier $MODEL
launch scripts/tango_rl.py -- --run speedrun --model-tag chain --seed "$SEED" --device-type cpu --num-steps 80 \
    --eval-every 20 --kl-coef 0 --warmup-steps 40 --verifier-balance --verifier-replay 0.5
