"""The calculator in sampling and in RL: its tokens are forced, recorded, and never trained."""
import json
from dataclasses import replace

import pytest
import torch
from conftest import random_model, train
from test_engine_graphs import emulate
from test_trainer import gradient, gradient_of, token_logprobs

from nanochat.calculator import Calculator
from nanochat.engine import generate, row_key
from nanochat.kernels.losses import PolicyLoss
from nanochat.rl.learn.packing import pack, token_weights
from nanochat.rl.learn.trainer import score
from nanochat.rl.records.prompts import Prompt
from nanochat.rl.records.rollouts import Rollouts
from nanochat.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(iter([]), 265)
PYTHON_START, PYTHON_END, OUTPUT_START, OUTPUT_END = (
    TOKENIZER.special(f"<|{name}|>") for name in ("python_start", "python_end", "output_start", "output_end"))
CALL = [PYTHON_START, *TOKENIZER.encode("12/60"), PYTHON_END]
OUTPUT = [OUTPUT_START, *TOKENIZER.encode("0.2"), OUTPUT_END]


def model_of(seed=0):
    return random_model(seed=seed, dtype=torch.float32, n_embd=32)


class Script:
    """A tool that makes each row say its lines: {row: {position: token}}; notes what it is told."""
    def __init__(self, lines):
        self.lines, self.heard, self.position = lines, [], {}
    def __call__(self, rows, tokens):
        due = {}
        for row, token in zip(rows, tokens, strict=True):
            self.heard.append((row, token))
            self.position[row] = self.position.get(row, 0) + 1
            if self.position[row] in self.lines.get(row, {}):
                due[row] = self.lines[row][self.position[row]]
        return due


def sample(model, tool=None, prompts=((1, 2, 3), (4,)), num_samples=2, new=12, stop=(), **options):
    keys = [row_key("tools", i) for i in range(len(prompts) * num_samples)]
    return generate(model, [list(p) for p in prompts], num_samples, max_new_tokens=new, stop_tokens=list(stop),
                    keys=keys, tool=tool, **options)


def rollouts_of(model, tool) -> Rollouts:
    out = sample(model, tool)
    return Rollouts([Prompt([1, 2, 3]), Prompt([4])], torch.tensor([0, 0, 1, 1]), out.tokens, out.logprobs,
                    out.lengths, out.stopped, out.forced)


@torch.no_grad()
def test_a_forced_token_stands_where_the_tool_put_it_and_the_row_goes_on_from_it():
    """Sampled tokens have the logprobs of a full forward over all that stands before them, forced or not."""
    model, expected = model_of(), torch.zeros(4, 12, dtype=torch.bool)
    out = rollouts_of(model, Script({1: {3: 77, 4: 78}, 2: {1: 9}}))
    expected[1, 3] = expected[1, 4] = expected[2, 1] = True
    assert torch.equal(out.forced, expected) and out.tokens[1, 3:5].tolist() == [77, 78] and out.tokens[2, 1] == 9
    assert (out.sampler_logprobs[out.forced] == 0).all()
    logprobs = torch.stack([token_logprobs(model, out, row) for row in range(4)])
    torch.testing.assert_close(out.sampler_logprobs[~expected], logprobs[~expected], rtol=1e-4, atol=1e-4)


def test_a_silent_tool_changes_nothing_and_without_one_nothing_is_masked():
    with_tool, without = sample(model_of(), Script({})), sample(model_of())
    assert torch.equal(with_tool.tokens, without.tokens) and torch.equal(with_tool.logprobs, without.logprobs)
    assert not with_tool.forced.any() and without.forced is None
    rollouts = rollouts_of(model_of(), Script({}))
    plain = replace(rollouts, forced=None)
    batches = [pack(r, torch.ones(4, 12), torch.ones(4), 10 ** 6, False) for r in (rollouts, plain)]
    assert all(torch.equal(a.mask, b.mask) and torch.equal(a.index, b.index) for a, b in zip(*batches, strict=True))
    assert plain.num_trained().tolist() == rollouts.num_trained().tolist() == [12] * 4


def test_the_tool_hears_every_token_until_the_row_ends_which_a_stop_token_beneath_a_forced_one_does_not():
    """The last token of all is for nobody: there is none to force after it."""
    tool = Script({})
    out = sample(model_of(), tool, prompts=[(1, 2, 3), (4,), (7, 8)], num_samples=8, new=40, stop=range(0, 40))
    assert out.stopped.any()
    for row in range(24):
        said = out.tokens[row, : out.lengths[row]].tolist()
        assert ([token for r, token in tool.heard if r == row]
                == (said[:-1] if out.stopped[row] or len(said) == 40 else said))
    plain = sample(model_of()).tokens[0].tolist()
    assert plain.index(plain[1]) == 1  # row 0 would draw this at position 1
    out = sample(model_of(), Script({0: {1: 77}}), stop=[plain[1]])
    assert out.tokens[0, 1] == 77 and out.lengths[0] > 2


class Calls:
    """Makes each row write CALL from a position of its own on; the rest is the calculator's."""
    def __init__(self):
        self.calculator, self.position = Calculator(TOKENIZER), {}
    def __call__(self, rows, tokens):
        for row in rows:
            self.position[row] = self.position.get(row, 0) + 1
        due = {row: CALL[self.position[row] - 1 - row % 5] for row in rows
               if 0 <= self.position[row] - 1 - row % 5 < len(CALL)}
        return due | self.calculator(rows, tokens)


@pytest.mark.parametrize("max_rows", [1, 3, 7])
def test_rows_that_refill_places_have_the_calculator_too(max_rows):
    prompts = [(1, 2, 3), (4,), (7, 8), (9,), (6, 5, 4, 3)]
    options = dict(prompts=prompts, num_samples=4, new=30, stop=range(0, 25))
    whole = sample(model_of(), Calls(), **options)
    out = sample(model_of(), Calls(), max_rows=max_rows, **options)
    assert torch.equal(out.tokens, whole.tokens) and torch.equal(out.forced, whole.forced)
    assert out.lengths.tolist() == whole.lengths.tolist() and len(set(whole.lengths.tolist())) > 4
    torch.testing.assert_close(out.logprobs, whole.logprobs, rtol=0, atol=1e-5)
    called = [row for row in range(20) if int(whole.forced[row].sum()) >= len(CALL) + len(OUTPUT)]
    assert len(called) > 5
    for row in called:
        at = 1 + row % 5
        assert whole.tokens[row, at: at + len(CALL) + len(OUTPUT)].tolist() == CALL + OUTPUT


@pytest.mark.parametrize("max_rows", [3, 1024])
@pytest.mark.parametrize("graphs", [False, True])
def test_rows_wait_for_a_tool_where_it_says_that_it_acts(monkeypatch, graphs, max_rows):
    class Doubles:
        """Puts two tokens after each of 100 .. 119."""
        def __init__(self):
            self.rest = {}  # row -> its second token
        def __call__(self, rows, tokens):
            due = {}
            for row, token in zip(rows, tokens, strict=True):
                if token in range(100, 120):
                    due[row], self.rest[row] = token + 50, token + 71
                elif self.rest.get(row):
                    due[row] = self.rest.pop(row)
            return due
    options = dict(prompts=[(1, 2, 3), (4,), (7, 8)], num_samples=8, new=25, stop=range(0, 20))
    always, tool = Doubles(), Doubles()
    whole = sample(model_of(), always, **options)
    if graphs:
        emulate(monkeypatch, check_every=3)
    tool.triggers = list(range(100, 120))
    out = sample(model_of(), tool, max_rows=max_rows, **options)
    assert torch.equal(out.tokens, whole.tokens) and torch.equal(out.forced, whole.forced)
    torch.testing.assert_close(out.logprobs, whole.logprobs, rtol=0, atol=1e-5)
    assert whole.forced.sum() > 20 and out.lengths.tolist() == whole.lengths.tolist()
    for tokens, forced, length in zip(whole.tokens.tolist(), whole.forced.tolist(), whole.lengths.tolist(),
                                      strict=True):
        for t in range(length - 2):
            if tokens[t] in range(100, 120):
                assert tokens[t + 1: t + 3] == [tokens[t] + 50, tokens[t] + 71] and all(forced[t + 1: t + 3])


LINES = {0: {2: 50, 3: 51}, 1: {1: 60}, 3: {11: 61}}  # row 3's last token


def test_forced_tokens_are_neither_trained_nor_counted():
    model = model_of()
    rollouts = rollouts_of(model, Script(LINES))
    assert rollouts.num_trained().tolist() == [10, 11, 12, 11]
    weights = token_weights(rollouts.num_trained(), "sequence", 12, lambda x: x)
    torch.testing.assert_close(weights, 1 / (4 * torch.tensor([10.0, 11, 12, 11])))
    batches = pack(rollouts, torch.ones(4, 12), weights, 10 ** 6, False)
    assert sum(len(batch.index) for batch in batches) == 44
    for batch in batches:
        assert (batch.at_trained(batch.sampler_logprobs) != 0).all()  # a forced token's is 0
        # The trainer scores what was sampled as the sampler did, with what was forced before it in place.
        torch.testing.assert_close(score(model, batch, 1.0), batch.at_trained(batch.sampler_logprobs), rtol=1e-4,
                                   atol=1e-4)


def test_the_gradient_is_that_of_the_sampled_tokens_alone():
    advantages, model = torch.linspace(-1, 1, 48).view(4, 12), model_of()
    rollouts = rollouts_of(model, Script(LINES))
    kept = ~rollouts.forced
    total = -sum((advantages[n] * token_logprobs(model, rollouts, n))[kept[n]].mean() for n in range(4)) / 4
    weights = token_weights(rollouts.num_trained(), "sequence", 12, lambda x: x)
    grads, _ = gradient(pack(rollouts, advantages, weights, 40, False), model, PolicyLoss("reinforce"))
    for name, wanted in gradient_of(total, model).items():
        torch.testing.assert_close(grads[name], wanted, rtol=1e-3, atol=1e-5)


def test_rl_with_the_calculator_runs_and_sampler_and_trainer_agree(base):
    """The crafted generator never calls it: the run equals one without, token for token."""
    logs = []
    for name, more in (("with", ["--calculator"]), ("without", [])):
        train("--run", name, "--recipe", "grpo", "--num-steps", "1", *more)
        logs.append(json.loads((base / "runs" / name / "metrics.jsonl").read_text()))
    assert logs[0]["gen/loss"] == logs[1]["gen/loss"] and logs[0]["gen/rollout_logprobs_diff_max"] < 1e-3
