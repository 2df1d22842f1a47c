# The same in one start: tokenizer, SFT and RL in one pair of processes, so that PyTorch is loaded once
set -euo pipefail
export OMP_NUM_THREADS=1
cat > "$TMPDIR/train.py" <<'PYTHON'
import os

import torch.distributed as dist

from nanochat.cli import read_flags
from nanochat.common import init_device
from scripts import chat_sft, tango_rl, tok_train

SEED = ["--seed", os.environ["SEED"]]
MODEL = [*SEED, "--model-tag", "chain", "--device-type", "cpu"]
SFT = """--role generator --depth 4 --n-embd 128 --n-head 4 --num-steps 550 --matrix-lr 6e-3 --embedding-lr 1.2e-2
    --warmup-ratio 0.03 --eval-examples 0 --save-every 0"""
RL = """--run speedrun --recipe grpo --num-steps 60 --lr 4e-4 --negative-weight 0.1 --kl-coef 0 --eval-examples 2
    --save-every 0 --log-rollouts 0"""

init_device("cpu")
if dist.get_rank() == 0:
    tok_train.main(read_flags(tok_train.make_parser(), [*SEED, "--num-texts", "1"]))
dist.barrier()
chat_sft.main(read_flags(chat_sft.make_parser(), [*MODEL, *SFT.split()]))
tango_rl.main(read_flags(tango_rl.make_parser, [*MODEL, *RL.split()]))
dist.barrier()
os._exit(0)  # gloo's threads may abort the interpreter's end
PYTHON
torchrun --standalone --nproc_per_node=2 "$TMPDIR/train.py"
