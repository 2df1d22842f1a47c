"""
Writes tests/fixtures/upstream_logits.json: what models must compute, in float64 and from the formulas alone.

    python tests/make_upstream_fixture.py

Weights are numbers of a closed formula (no random generator, whose draws may change), so the file holds only each
model's configuration, its input and parts of the logits. These come from `reference_logits` of test_gpt, which runs
nothing of the model; its rotary angles apart, which test_gpt checks on their own. dev/check_upstream.py compares with
upstream's own code.
"""
import json
import math
import zlib
from pathlib import Path

import torch
from test_gpt import reference_logits

from nanochat.gpt import GPT, GPTConfig

FIXTURE = Path(__file__).parent / "fixtures" / "upstream_logits.json"
VOCAB_SIZE, NUM_IDS, NUM_GREEDY = 265, 140, 4
# beyond 128 the short window leaves tokens out
ROWS = [0, 1, 2, 17, 128, 129, 130, 131, 133, 134, 135, 136, 137, 138, 139]
COLUMNS = [0, 1, 63, 64, 100, 191, 192, 255, 256, 264]
# What a file is like, its model's shape and the windows of its layers. "old": from before windows and residual lambdas.
CASES = {
    "_orig_mod": (GPTConfig(256, VOCAB_SIZE, 5, 4, 2, 48, "SSL"), [128, 128, 256, 128, 256]),
    "bf16": (GPTConfig(300, VOCAB_SIZE, 2, 6, 2, 72, "SL"), [128, 300]),
    "old": (GPTConfig(256, VOCAB_SIZE, 3, 4, 1, 48, "L"), [256, 256, 256]),
}


def formula(name: str, *shape: int) -> torch.Tensor:
    """Numbers between -1 and 1 that look random: sin(0.7 k^2 + h) of an entry's index k and a hash h of the parameter's
    name. float64."""
    k = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(0.7 * k * k + zlib.crc32(name.encode()) % 1000).view(shape)


def is_embedding(name: str) -> bool:
    return name == "transformer.wte.weight" or name.startswith("value_embeds.")


def make_weights(case: str) -> dict[str, torch.Tensor]:
    """The weights of a case by upstream's names, fp32 as in its file; embeddings of the bf16 case in bfloat16."""
    config, weights = CASES[case][0], {}
    centers = {"resid_lambdas": 1.0, "x0_lambdas": 0.3, "smear_lambda": 0.5, "backout_lambda": 0.3}
    for name, p in GPT(config).state_dict().items():
        values = formula(name, *p.shape)
        if name in centers:
            values = centers[name] + 0.1 * values
        elif not is_embedding(name):
            values = values * (2 / p.shape[1]) ** 0.5
        weights[name] = values.to(torch.bfloat16 if case == "bf16" and is_embedding(name) else torch.float32)
    if case == "old":
        del weights["resid_lambdas"], weights["x0_lambdas"]
    return weights


def make_case(case: str) -> dict:
    """The configuration, the input, logits of some rows and columns, and the tokens that a greedy continuation adds."""
    config, windows = CASES[case]
    weights = {"resid_lambdas": torch.ones(config.n_layer), "x0_lambdas": torch.zeros(config.n_layer),
               **make_weights(case)}
    weights = {name: p.double() for name, p in weights.items()}
    ids, greedy = [(k * k * 31 + 7 * k) % VOCAB_SIZE for k in range(NUM_IDS)], []
    for _ in range(NUM_GREEDY):
        logits = 15 * torch.tanh(reference_logits(weights, config, ids + greedy, windows) / 15)
        best, second = logits[-1].topk(2).values.tolist()
        assert best - second > 1e-3
        greedy.append(int(logits[-1].argmax()))
    return {"model_config": config.asdict(), "ids": ids, "rows": ROWS, "columns": COLUMNS,
            "logits": logits[ROWS][:, COLUMNS].tolist(), "greedy": greedy}


if __name__ == "__main__":
    FIXTURE.parent.mkdir(exist_ok=True)
    with torch.no_grad():
        cases = {case: make_case(case) for case in CASES}
    text = json.dumps(cases).replace("], [", "],\n [").replace('"bf16"', '\n"bf16"').replace('"old"', '\n"old"')
    FIXTURE.write_text(text + "\n")
