"""Cooper: which pairs the reward model learns from, its updates against autograd, what the policy is rewarded with."""
import math
import random
from types import SimpleNamespace

import pytest
import torch
from test_dpo import assert_learns, parsed, random_play, verdict_odds
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from nanochat.recipes.reward_models import cooper


def rule_of(words: str):
    """A rule that accepts texts with any of these characters, and nothing else."""
    return lambda problem, text: any(c in text for c in words)


def play_of(*flags: str, rule=rule_of("0123"), corrupt=lambda problem, text, rng: "no digits here"):
    """A step of random models; see test_dpo."""
    t = random_play("cooper", "--rm-pretrain", "0", *flags)
    t.task.rule, t.task.corrupt = rule, corrupt
    return t


def scored(t, problems, completions: list[list[int]]) -> torch.Tensor:
    """s of solutions by plain forwards, after the problem and its gold answer, ended where they were cut."""
    ends = t.tokenizer.stop_tokens
    rows = [row if row[-1] in ends else [*row, ends[0]] for row in completions]
    rollouts = t.written("rm", cooper.with_answers(t, problems), rows)
    return torch.stack([row[-1] for row in verdict_odds(t, "rm", rollouts)])


def pairs_of(accepted, rule, corrupt):
    """Of two groups of three solutions, a to f."""
    problems = [SimpleNamespace(index=n // 3) for n in range(6)]
    solutions = SimpleNamespace(columns={"accepted": accepted}, group_id=torch.tensor([0, 0, 0, 1, 1, 1]),
                                problems=lambda: problems, texts=list("abcdef"))
    t = SimpleNamespace(args=SimpleNamespace(seed=0), step=0, each=lambda f, items: [f(x) for x in items],
                        task=SimpleNamespace(check=None, rule=rule, corrupt=corrupt))
    return cooper.pairs_of(t, solutions)


def test_a_pair_is_the_first_solution_that_the_rule_accepts_and_its_corrupted_version():
    found = pairs_of([False, True, True, None, False, True], lambda p, text: False, lambda p, text, rng: text + "!")
    assert found == ([1, 5], ["b!", "f!"])
    found = pairs_of([False, None, False, True, True, True], lambda p, text: False, lambda p, text, rng: text + "!")
    assert found == ([3], ["d!"])  # the first problem has none
    assert pairs_of([True] * 6, lambda p, text: None, lambda p, text, rng: text) == ([], [])


@pytest.mark.parametrize("needed, chosen", [(1, [0]), (3, [0]), (4, [])])
def test_a_version_that_the_rule_does_not_refuse_is_tried_three_times(needed, chosen):
    tries = []

    def corrupt(problem, text, rng):
        tries.append(text)
        return "wrong" if len(tries) >= needed else "still right"

    accepted = [True, False, False, False, False, False]
    assert pairs_of(accepted, lambda p, text: text != "wrong", corrupt) == (chosen, ["wrong"] * len(chosen))
    assert len(tries) == min(needed, 3)


def test_the_pairs_update_takes_the_gradient_of_the_papers_loss(base):
    """The mean over the problems that have a pair; the others weigh nothing."""
    t = play_of(rule=rule_of("01"))
    generator, rm = cooper.play(t)
    solutions, _ = generator.parts[0]
    chosen, wrong = cooper.pairs_of(t, solutions)
    assert (generator.role, rm.role) == ("generator", "rm") and 0 < len(chosen) < len(solutions.prompts)
    tokens, problems = solutions.completions(), solutions.problems()
    of = [problems[n] for n in chosen]
    margins = scored(t, of, [tokens[n] for n in chosen]) - scored(t, of, [t.tokenizer.encode(text) for text in wrong])
    loss = -logsigmoid(margins).mean()
    assert t.metrics["rm/pair_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert t.metrics["rm/has_pair"] == len(chosen) / len(solutions.prompts)
    assert_learns(t, rm, loss)


def test_where_no_solution_is_accepted_or_it_is_frozen_the_reward_model_learns_nothing(base):
    t = play_of(rule=lambda problem, text: False)
    update, = cooper.play(t)
    assert update.role == "generator" and t.metrics["rm/has_pair"] == 0 and t.metrics["rm/pair_loss"] is None
    update, = cooper.play(play_of("--rm-update", "none"))
    assert update.role == "generator"
    assert [cooper.updates(parsed("cooper", "--rm-pretrain", "3", "--rm-update", kind))["rm"]
            for kind in ("none", "pairs")] == [3, 3 + 4]


def test_pretraining_takes_the_gradient_of_the_cross_entropy_of_outcomes(base):
    t = play_of("--rm-pretrain", "1")
    update, = cooper.play(t)
    rollouts = update.parts[0][0]
    outcomes = torch.tensor([float(o) for o in t.check(rollouts)], dtype=torch.float64)
    assert 0 < outcomes.mean() < 1 and len(rollouts) < 4 * 8  # what cannot be scored is left out
    loss = binary_cross_entropy_with_logits(scored(t, rollouts.problems(), rollouts.completions()), outcomes)
    assert t.metrics["rm/bce"] == pytest.approx(loss.item(), rel=1e-5)
    assert_learns(t, update, loss)


def test_the_reward_model_reads_the_gold_answer(base):
    t = play_of()
    problem = t.task.problem("rl", 0)
    prompt, = cooper.with_answers(t, [problem])
    assert f"{problem.answer}|{problem.prompt}" in t.tokenizer.decode(prompt.ids)


def test_the_rewards_of_log_odds():
    s, accepted = torch.tensor([0.0, math.log(3), -1.0]), [True, None, False]
    assert cooper.POLICY_REWARDS["chance"](s, accepted) == pytest.approx([0.5, 0.75, 1 / (1 + math.e)])
    assert list(map(bool, cooper.POLICY_REWARDS["verdict"](s, accepted))) == [False, True, False]
    assert cooper.POLICY_REWARDS["rule"](s, accepted) == accepted


@pytest.mark.parametrize("reward", ["chance", "rule"])
def test_gold_outcomes_are_logged_beside_the_reward_and_do_not_change_it(base, reward):
    found = []
    for gold in (True, False):
        t = play_of("--policy-reward", reward)
        t.task.check = lambda problem, text, gold=gold: gold
        update = next(cooper.play(t))
        assert t.metrics["gen/rewards/outcome/mean"] == gold
        found.append((update.parts[0][1], t.metrics["gen/reward"]))
    assert torch.equal(found[0][0], found[1][0]) and found[0][0].any() and found[0][1] == found[1][1]


def test_held_out_gold_accuracy_stands_beside_what_the_reward_model_gives(base):
    t = play_of()
    t.evaluating = True
    t.task.check = lambda problem, text: True
    t.task.rule = lambda problem, text: False
    found = cooper.evaluate(t)
    assert found["gen/pass1_in"] == found["gen/pass1_out"] == 1 and found["gen/rule_in"] == 0
    assert 0 < found["gen/proxy_in"] < 1


def test_random_streams_of_a_problem_differ_from_step_to_step():
    t = SimpleNamespace(args=SimpleNamespace(seed=0), step=0)
    problem = SimpleNamespace(index=3)
    first = cooper.drawing(t, problem).random()
    assert first == cooper.drawing(t, problem).random() != random.Random(0).random()
    t.step = 1
    assert cooper.drawing(t, problem).random() != first
