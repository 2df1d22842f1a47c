"""SPIN: its update against autograd of the paper's loss in fp64, snapshots, demonstrations."""
import math
from dataclasses import replace

import pytest
import torch
from test_dpo import are_equal, assert_learns, literal_loss, parsed, random_play, token_logprobs, weights_of

from nanochat import recipes
from nanochat.common import BadInput
from nanochat.recipes.self_play.spin import demonstrations, sft_problems
from scripts import tango_rl
from tasks import make_task

G = 3
FLAGS = ["--num-samples", str(G), "--iteration-steps", "2"]
spin = recipes.load("spin")


def test_the_update_takes_the_gradient_of_the_papers_loss(base):
    """Each demonstration against G samples of the opponent; sampling, joining, scoring and averaging included."""
    t = random_play("spin", *FLAGS)
    t.steps["generator"] = t.state.step = 1  # in the middle of an iteration the opponent stays another model
    generator, opponent = t.roles["generator"].model, t.roles["opponent"].model
    before = weights_of(opponent)
    update, = spin.play(t)
    (rollouts, _), = update.parts
    texts = [text for problem in sft_problems(t) for text in demonstrations(t, [problem]).texts]
    P = len(texts)
    assert rollouts.texts[:P] == texts and len(rollouts) == P + P * G
    of = rollouts.problems()
    pairs = [(p, n) for p in range(P) for n in range(P, len(rollouts)) if of[n] == of[p]]
    assert len(pairs) == P * G and t.metrics["gen/iteration"] == 0
    assert len(rollouts.prompts) == P and torch.bincount(rollouts.group_id).tolist() == [1 + G] * P  # each prompt once
    assert rollouts.sampler_logprobs[rollouts.mask].isnan().all()  # the policy drew none
    loss = literal_loss(generator, opponent, rollouts, pairs, 0.1)
    assert t.metrics["gen/pair_loss"] == pytest.approx(loss.item(), rel=1e-5) and abs(loss.item() - math.log(2)) > 0.01
    assert_learns(t, update, loss)
    assert are_equal(before, weights_of(opponent))


def test_an_iteration_begins_with_the_loss_log_2_against_a_snapshot(base):
    t = random_play("spin", *FLAGS)
    t.steps["generator"] = 2  # the second iteration begins
    update, = spin.play(t)
    assert are_equal(*(weights_of(t.roles[name].model) for name in ("opponent", "generator")))
    assert t.metrics["gen/iteration"] == 1 and t.metrics["gen/margin"] == 0
    assert t.metrics["gen/pair_loss"] == pytest.approx(math.log(2), rel=1e-12)
    # P * (1 + G) rollouts for P * G pairs: beta / 2 * (1 + G) / G for each sample, G times that for a demonstration.
    advantages, P = update.parts[0][1], len(update.parts[0][0].prompts)
    assert advantages[P:].unique().tolist() == pytest.approx([-0.05 * (1 + G) / G])
    assert advantages[:P].unique().tolist() == pytest.approx([0.05 * (1 + G)])


def test_steps_go_on_through_the_problems_of_sft(base):
    t, dealt = random_play("spin", *FLAGS), []
    for t.state.step in (0, 1):
        dealt += sft_problems(t)
    assert [(problem.split, problem.index) for problem in dealt] == [("sft", i) for i in range(8)]


def test_demonstrations_carry_misconceptions_unless_the_task_is_told_otherwise(base):
    shown = {}
    for wrongness in ("0", "1"):
        t = random_play("spin", "--chain-share", "1", "--chain-wrongness", wrongness)
        problems = [t.task.problem("sft", i) for i in range(12)]
        right = make_task(t.args).check
        shown[wrongness] = [right(p, text) for p, text in zip(problems, demonstrations(t, problems).texts, strict=True)]
    assert all(shown["0"]) and not any(shown["1"])


def test_the_evaluation_tells_how_unlikely_held_out_demonstrations_are(base):
    t = random_play("spin", "--eval-examples", "3")
    t.evaluating = True
    scores, shown = spin.evaluate(t), demonstrations(t, t.problems(3, "test_in"))
    nll = [-row.mean().item() for row in token_logprobs(t.roles["generator"].model, shown)]
    assert scores["gen/nll"] == pytest.approx(sum(nll) / 3, rel=1e-5) and {"gen/pass1_in", "gen/pass1_out"} < {*scores}


def test_problems_that_demonstrations_are_of_must_fit_too(base, monkeypatch):
    """SPIN alone takes its problems from the split of SFT."""
    task = type(make_task(parsed("spin")))
    problem_of = task.problem
    long = lambda problem: replace(problem, prompt="1" + "+1" * 100) if problem.split == "sft" else problem
    monkeypatch.setattr(task, "problem", lambda self, split, index: long(problem_of(self, split, index)))
    with pytest.raises(BadInput, match="the opponent's longest prompt and completion"):
        tango_rl.main(parsed("spin", "--dry-run"))
    tango_rl.main(parsed("grpo", "--dry-run"))
