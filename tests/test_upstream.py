"""Checkpoints as upstream writes them, loaded and run: logits of the formulas in float64, from a fixture
(make_upstream_fixture.py). What is missing, damaged or hostile in such a file: test_checkpoint.py."""
import json

import pytest
import torch
from make_upstream_fixture import CASES, FIXTURE, make_weights
from test_decode_cache import decoded
from test_gpt import reference_logits

from nanochat.checkpoint import load_model
from nanochat.engine import generate, run_prompts

EXPECTED = json.loads(FIXTURE.read_text())
STAGES = {"base": "base_checkpoints", "sft": "chatsft_checkpoints", "rl": "chatrl_checkpoints"}
NUM_PREFILLED = 120  # decoding goes on beyond the short window of 128


def write_checkpoint(base, stage: str, case: str) -> None:
    """The two files of a model, by torch.save and json alone. The meta of upstream's RL has nothing but
    model_config."""
    weights, config = make_weights(case), dict(EXPECTED[case]["model_config"])
    if case == "_orig_mod":
        weights = {f"_orig_mod.{name}": p for name, p in weights.items()}
    if case == "old":
        del config["window_pattern"]
    meta = {"model_config": config} if stage == "rl" else {"step": 9, "val_bpb": 1.25, "model_config": config,
                                                           "user_config": {"run": "dummy"}}
    folder = base / STAGES[stage] / "d4"
    folder.mkdir(parents=True)
    torch.save(weights, folder / "model_000009.pt")
    (folder / "meta_000009.json").write_text(json.dumps(meta, indent=2))


@pytest.fixture(params=list(CASES))
def case(request):
    return request.param


@pytest.fixture
def load(case, tmp_path, monkeypatch):
    """Writes the case as a checkpoint of a stage and loads it."""
    def write_and_load(stage="sft"):
        monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
        write_checkpoint(tmp_path, stage, case)
        return load_model(stage, "d4", torch.device("cpu"), torch.float32)[0]
    return write_and_load


def assert_logits(case: str, logits: torch.Tensor, start: int = 0) -> None:
    """logits (T, V) of the tokens from position `start` on."""
    expected = EXPECTED[case]
    kept = [i for i, row in enumerate(expected["rows"]) if row >= start]
    rows = [expected["rows"][i] - start for i in kept]
    gap = logits[rows][:, expected["columns"]].double() - torch.tensor(expected["logits"], dtype=torch.float64)[kept]
    assert len(kept) >= 11 and gap.abs().max() < 1e-5


def test_the_fixture_is_the_reference(case):
    # Its first rows, of three tokens; all of them take half a minute.
    expected, (config, windows) = EXPECTED[case], CASES[case]
    assert expected["model_config"] == config.asdict()
    old = {"resid_lambdas": torch.ones(config.n_layer), "x0_lambdas": torch.zeros(config.n_layer)}
    weights = {name: p.double() for name, p in {**old, **make_weights(case)}.items()}
    logits = 15 * torch.tanh(reference_logits(weights, config, expected["ids"][:3], windows) / 15)
    assert expected["rows"][:3] == [0, 1, 2]
    torch.testing.assert_close(logits[:, expected["columns"]].tolist(), expected["logits"][:3], rtol=0, atol=1e-9)


@pytest.mark.parametrize("stage", STAGES)
@torch.no_grad()
def test_a_forward_gives_the_logits_of_the_formulas(load, case, stage):
    model = load(stage)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_logits(case, model(torch.tensor([EXPECTED[case]["ids"]]))[0])


@torch.no_grad()
def test_prefill_and_decode_give_the_logits_of_the_formulas(load, case):
    # The second row of the batch shares the prompt and draws other tokens: it must leave the first alone.
    model, ids = load(), EXPECTED[case]["ids"]
    prompt, rows = ids[:NUM_PREFILLED], [(0, ids[NUM_PREFILLED:]), (0, ids[NUM_PREFILLED - 9: -9])]
    hidden = torch.cat([run_prompts(model, [prompt])[1], decoded(model, [prompt], rows, [0, 0])[0]])
    assert_logits(case, model.head(hidden), start=NUM_PREFILLED - 1)


@torch.no_grad()
def test_greedy_completions_of_ragged_prompts_are_the_likeliest_tokens(load, case):
    # The whole input goes on as the formulas say; it and shorter prompts, as forwards over all their tokens say.
    model, ids, num = load(), EXPECTED[case]["ids"], len(EXPECTED[case]["greedy"])
    prompts = [ids[:1], ids, ids[:5], ids[:127], ids[:128]]
    out = generate(model, prompts, 1, max_new_tokens=num, stop_tokens=[], keys=list(range(len(prompts))),
                   temperature=0.0)
    assert out.tokens[1].tolist() == EXPECTED[case]["greedy"]
    for prompt, tokens in zip(prompts, out.tokens.tolist(), strict=True):
        logits = model(torch.tensor([prompt + tokens]))[0]
        assert tokens == logits[len(prompt) - 1: -1].argmax(dim=1).tolist()
