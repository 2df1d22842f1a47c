"""GRAM: the smoothed coefficients by hand, both stages against the gradient of their losses, a generator's reward."""
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import parse, rl_flags
from test_dpo import logprobs_after, token_logprobs
from test_supervised import check_update, play_on_labels
from torch.nn.functional import logsigmoid

from nanochat.common import BadInput
from nanochat.recipes.reward_models import gram
from nanochat.rl.verify.comparing import Candidates, forced_choices, turned
from nanochat.rl.verify.judges import JUDGES
from nanochat.rl.verify.labelled import read_labelled
from nanochat.rl.verify.spots import log_odds_at
from scripts import tango_rl


def played(*flags: str):
    return play_on_labels("gram", "--examples-per-step", "4", *flags, num=24)


def true_log_odds_of_a(t, line: Candidates) -> torch.Tensor:
    """log p(A) - log p(B) of a pair, by a plain forward."""
    prompt, encode = t.tokenizer.render_prompt("|".join([line.problem.prompt, *line.texts, "A"])), t.tokenizer.encode
    a, b = (logprobs_after(t.roles["verifier"].model, prompt, encode(f"={choice}"))[1] for choice in "AB")
    return a - b


def test_smoothed_coefficients_by_hand():
    coefficients = lambda s, y: gram.smoothed_coefficients(torch.tensor([s]), torch.tensor([y]), 0.1).item()
    assert coefficients(0.0, 1.0) == pytest.approx(0.95 - 0.5) and coefficients(0.0, 0.0) == pytest.approx(0.05 - 0.5)
    assert coefficients(math.log(19), 1.0) == pytest.approx(0.0, abs=1e-6)  # sigma = .95: as sure as it should be
    assert coefficients(50.0, 1.0) == pytest.approx(-0.05)                  # too sure is pulled back
    for s in (-2.0, 0.3, 1.0):                                              # the other order: mirrored
        assert coefficients(s, 1.0) == pytest.approx(-coefficients(-s, 0.0))


def test_the_choice_takes_the_gradient_of_the_smoothed_cross_entropy_over_both_choices(base):
    t = played("--pretrain-steps", "0", "--label-smoothing", "0.2")
    update, = gram.play(t)
    rollouts = update.parts[0][0]
    shown = [Candidates(problem, [text for _, text in turns], right) for problem, turns, right in
             zip(rollouts.problems(), rollouts.columns["turns"], rollouts.columns["right"], strict=True)]
    assert len(shown) == 4 and sorted(line.right for line in shown) == [0, 0, 1, 1]
    for line in shown:
        assert [t.task.check(line.problem, text) for text in line.texts] == [line.right == 0, line.right == 1]
    assert rollouts.texts == ["=A" if line.right == 0 else "=B" for line in shown]
    D = torch.stack([true_log_odds_of_a(t, line) * (1 if line.right == 0 else -1) for line in shown])
    assert t.metrics["ver/margin"] == pytest.approx(D.mean().item(), rel=1e-4)
    assert t.metrics["ver/pair_loss"] == pytest.approx(-logsigmoid(D).mean().item(), rel=1e-4)
    check_update(t, update, (-logsigmoid(D) + 0.1 * D).mean())


def test_pretraining_models_both_solutions_after_the_problem(base):
    t = played("--pretrain-steps", "1")
    update, = gram.play(t)
    rollouts, solutions = update.parts[0][0], {}
    for row in read_labelled(t.args.labels, t.task):
        solutions.setdefault(row.problem, []).append(row.solution)
    for problem, text in zip(rollouts.problems(), rollouts.texts, strict=True):
        assert sorted(text[1:].split("|")) == sorted(solutions[problem])  # two of each in this file
    assert [p.ids for p in rollouts.prompt_of()] == [t.tokenizer.render_prompt(p.prompt) for p in rollouts.problems()]
    nll = -torch.cat(token_logprobs(t.roles["verifier"].model, rollouts)).mean()
    assert len(rollouts) == 4 and t.metrics["ver/solution_nll"] == pytest.approx(nll.item(), rel=1e-4)
    check_update(t, update, nll)


def test_pretraining_sees_no_label_and_the_labels_come_after_it(base):
    found = []
    for outcome in ({}, {"outcome": None}):
        t = played("--pretrain-steps", "1")
        path = Path(t.args.labels)
        path.write_text("".join(json.dumps(json.loads(line) | outcome) + "\n" for line in open(path)))
        read_labelled.cache_clear()
        update, = gram.play(t)
        found.append(update.parts[0][0].texts)
        assert "ver/pair_loss" not in t.metrics
        if not outcome:
            t.state.step, t.done = 1, set()
            list(gram.play(t))
            assert "ver/pair_loss" in t.metrics
    assert found[0] == found[1]


@pytest.fixture
def pairs(base):
    """A run, and two pairs of solutions."""
    t = played()
    one, two = (t.task.problem("rl", i) for i in (0, 1))
    return t, [Candidates(one, ["1+1:2;=2", "1+1:0;=0"], 0), Candidates(two, ["=1", "0*2:0;=0"], 1)]


def test_a_choice_is_read_from_its_log_odds_in_either_order(pairs, monkeypatch):
    t, shown = pairs
    both = shown + turned(shown)
    assert [line.right for line in both] == [0, 1, 1, 0] and both[2].texts == shown[0].texts[::-1]
    s = log_odds_at(t, "verifier", *forced_choices(t, "verifier", both))
    assert s.tolist() == pytest.approx([true_log_odds_of_a(t, line).item() for line in both], rel=1e-4)
    assert gram.likelier(t, both) == [1 if x > 0 else -1 for x in s.tolist()]
    monkeypatch.setattr(gram, "log_odds_at", lambda *args: torch.tensor([2.0, -0.5, 0.0]))
    assert gram.likelier(t, both[:3]) == [1, -1, None]


def test_a_generator_earns_the_chance_to_be_chosen_over_its_greedy_solution(pairs):
    t, (one, two) = pairs
    prompts = t.solve_prompts([one.problem, one.problem, two.problem])
    solutions = t.written("verifier", prompts, [*one.texts, two.texts[0]])
    t.roles["generator"] = t.roles["verifier"]

    def solve(draw, problems, greedy):
        assert (draw, greedy) == ("reference", True)
        return t.written("verifier", t.solve_prompts(problems), ["1+1:0;=0", "=2"][: len(problems)])

    t.solve = solve
    judgments = JUDGES["preferred"](t, "verifier", solutions)
    wins = lambda problem, text, other: (
        torch.sigmoid(true_log_odds_of_a(t, Candidates(problem, [text, other], 0)))
        + torch.sigmoid(-true_log_odds_of_a(t, Candidates(problem, [other, text], 0)))).item() / 2
    assert [j.final for j in judgments] == pytest.approx(
        [wins(one.problem, "1+1:2;=2", "1+1:0;=0"), 0.5, wins(two.problem, "=1", "=2")], rel=1e-5)
    assert [j.tokens for j in judgments] == [2 + 9, 2, 2 + 3] and {j.steps for j in judgments} == {None}


def test_a_file_without_pairs_is_refused_unless_it_is_for_pretraining_alone(base):
    rows = [json.loads(line) for line in (base / "labels.jsonl").read_text().splitlines()]
    check = lambda chosen, *flags: (
        (base / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen)),
        read_labelled.cache_clear(),
        tango_rl.main(parse(tango_rl, rl_flags("--recipe", "gram", "--run", "r", "--dry-run", *flags))))
    unlabelled = [{**row, "outcome": None} for row in rows]
    check(unlabelled, "--pretrain-steps", "4")  # of 4
    with pytest.raises(BadInput, match="has no problem with a right and a wrong solution"):
        check(unlabelled, "--pretrain-steps", "3")
    with pytest.raises(BadInput, match="has no problem with two solutions"):
        check(rows[::2], "--pretrain-steps", "4")
