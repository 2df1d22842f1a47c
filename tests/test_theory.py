"""--log-theory: update sparsity and pass@k by hand, what a run logs, a continued run, and a run without it."""
import json
from itertools import combinations
from math import comb
from types import SimpleNamespace

import pytest
import torch
from test_dpo import parsed, random_play

from nanochat.rl.measure.evals import SPLITS
from nanochat.rl.measure.theory import num_unchanged, sampled, solver_of, theory_scores, update_sparsity
from scripts import tango_rl


def test_a_weight_within_the_tolerance_is_unchanged():
    """bf16 has steps of 2^-8 = 3.9e-3 below 1, and of 2^-7 above: -1e-3 and 3e-3 are none. 1.1e-5 stays apart."""
    before = torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0])
    now = before + torch.tensor([0.9e-5, 1.1e-5, 0.0, -1e-3, 3e-3])
    assert num_unchanged(before, now) == 2 and num_unchanged(before.bfloat16(), now.bfloat16()) == 4


def test_pass_at_k_is_the_share_of_samples_of_k_that_hold_a_right_one():
    """4 samples: of one problem 1 is right, of another none, of a third all."""
    found = sampled([1, 0, 4], 4)
    shares = {k: [sum(any(sample) for sample in combinations(row, k)) / comb(4, k)
                  for row in ([1, 0, 0, 0], [0] * 4, [1] * 4)] for k in (1, 2, 4)}
    assert shares == {1: [1 / 4, 0, 1], 2: [1 / 2, 0, 1], 4: [1, 0, 1]}
    for k, row in shares.items():
        assert found[f"pass_at_{k}"] == pytest.approx(sum(row) / 3)
    # Outcomes 1, 0, 0, 0 have the unbiased variance 3/16 * 4/3 = 1/4; the others 0.
    assert found["outcome_variance"] == pytest.approx(1 / 4 / 3) and len(found) == 4
    assert list(sampled([3], 6)) == ["pass_at_1", "pass_at_2", "pass_at_4", "outcome_variance"]
    assert set(sampled([], 4).values()) == {None}


def test_sparsity_counts_the_weights_that_a_role_trains(monkeypatch):
    """Of 6 weights 4 are the role's; two of these have moved, one of them by less than bf16 tells."""
    model = torch.nn.Module()
    model.ours, model.others = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(2))
    model.config, files = None, {"ours": torch.ones(4), "others": torch.zeros(2)}
    monkeypatch.setattr("nanochat.rl.measure.theory.weights_in", lambda path, config: files)
    role = SimpleNamespace(model=model, parameters=[model.ours], start=SimpleNamespace(path=lambda part: part))
    t = SimpleNamespace(device=torch.device("cpu"), args=SimpleNamespace(shard=False))
    assert update_sparsity(t, role) == {"update_sparsity": 1, "update_sparsity_bf16": 1}
    with torch.no_grad():
        model.ours += torch.tensor([0.0, 1e-3, 0.0, 0.1])
    assert update_sparsity(t, role) == {"update_sparsity": 2 / 4, "update_sparsity_bf16": 3 / 4}


@pytest.mark.parametrize("recipe, solver", [("spin", "generator"), ("tango", "generator"), ("rm_r1", None)])
def test_who_solves_is_trained(base, recipe, solver):
    assert solver_of(random_play(recipe)) == solver


def test_every_problem_is_asked_as_often_and_nothing_is_counted(base):
    t = random_play("grpo", "--log-theory", "3", "--theory-samples", "5")
    t.evaluating = True
    asked, solve = [], t.solve
    t.solve = lambda draw, problems, n, **more: asked.append((draw, len(problems), n, more)) or solve(
        draw, problems, n, **more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanochat.rl.measure.theory.update_sparsity", lambda t, role: {})
        found = theory_scores(t)
    assert asked == [("theory", 3, 5, {"role": "generator"})] * len(SPLITS)
    assert t.sampled == t.num_drawn == 0
    assert {f"gen/pass_at_{k}_{ending}" for k in (1, 2, 4) for ending in SPLITS.values()} < set(found)


def log(base, run: str) -> list[dict]:
    lines = (base / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k.startswith("gen/")} for line in lines]


def test_a_run_logs_it_goes_on_bit_for_bit_and_is_else_the_same_as_without(base):
    theory = ["--log-theory", "2", "--theory-samples", "4", "--eval-every", "1"]
    tango_rl.main(parsed("grpo", "--run", "with", "--num-steps", "2", *theory))
    tango_rl.main(parsed("grpo", "--run", "without", "--num-steps", "2", "--eval-every", "1"))
    tango_rl.main(parsed("grpo", "--run", "stopped", "--num-steps", "1", *theory))
    tango_rl.main(parsed("grpo", "--run", "stopped", "--num-steps", "2", "--resume-from-step", "1", *theory))
    first, second = log(base, "with")
    added = {name for name in first if "pass_at" in name or "variance_" in name or "sparsity" in name}
    assert len(added) == 2 * 3 + 2 + 2
    assert first["gen/update_sparsity"] == first["gen/update_sparsity_bf16"] == 1
    assert second["gen/update_sparsity"] < 1 or second["gen/grad_norm"] == first["gen/grad_norm"] == 0
    assert log(base, "stopped") == [first, second]
    assert log(base, "without") == [{k: v for k, v in row.items() if k not in added} for row in (first, second)]
