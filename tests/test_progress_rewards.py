"""Progress rewards: the values of prefixes by a prover that is known, what they make of steps."""
from types import SimpleNamespace

import pytest
import torch
from test_dpo import random_play, writing

from nanochat.common import BadInput
from nanochat.recipes.policy import progress_rewards
from nanochat.rl.credit.advantages import PRESETS, blend
from nanochat.rl.credit.rewards import CREDIT, at_step_ends, step_rewards, terminal_rewards

TEXTS = ["1+1:2;2+1:0;=20", "1+1:2;2+1:1;=21", "=2"]
LONG_FIRST = ["1+1:2;2+1:0;0+0:0;=200", "1+1:2;2+1:1;=21", "1+1:2;2+1:0;=20"]


def measured(t, worth, texts=TEXTS):
    """The step values of solutions where a continuation is right as worth(text of the prefix, number of it) says, and
    the prefixes that were asked for."""
    problem, numbers = t.task.problem("rl", 0), {}
    solutions = t.written("generator", t.solve_prompts([problem] * len(texts)), texts)
    writing(t, {"continued": ["x"]})

    def check(problem, text):
        begun = text.removesuffix("x")
        numbers[begun] = numbers.get(begun, -1) + 1
        return worth(begun, numbers[begun])

    t.task.check = check
    step_ends = [s.step_ends for s in t.read_solutions(solutions)]
    found, bare = progress_rewards.step_values(t, solutions, step_ends), len(t.solve_prompts([problem])[0].ids)
    asked = t.asked["continued"][:: t.args.continuations]
    return found, [t.tokenizer.decode(prompt.ids[bare:]) for prompt in asked]


def half_of_good(begun: str, number: int) -> bool | None:
    """Of four continuations from nothing one is right, after a right first step two, after two right ones all."""
    return number < {"": 1, "1+1:2;": 2, "1+1:2;2+1:0;": 4}.get(begun, 0)


@pytest.mark.parametrize("method, flags, expected", [
    # Q = 1/4, 1/2, 1 and 1/4, 1/2, 0
    ("pav", ["--best-of", "1"], [[0.25, 0.5], [0.25, -0.5], []]),
    # the best of two: 1 - C(3,2)/C(4,2) = 1/2, 1 - C(2,2)/C(4,2) = 5/6, 1 and 1/2, 5/6, 0
    ("pav", ["--best-of", "2"], [[1 / 3, 1 / 6], [1 / 3, -5 / 6], []]),
    ("math_shepherd", [], [[1.0, 1.0], [1.0, 0.0], []]), ("math_shepherd_soft", [], [[0.5, 1.0], [0.5, 0.0], []]),
    ("rpe", [], [[1.0, 1.0], [1.0, 0.0], []])])
def test_step_values_by_hand(base, method, flags, expected):
    t = random_play("progress_rewards", "--step-values", method, "--continuations", "4", *flags)
    found, asked = measured(t, half_of_good)
    assert [pytest.approx(row) for row in expected] == found
    assert len(asked) == len(set(asked))  # the second solution's first step is the first one's
    first = [""] if method in ("pav", "rpe") else []
    assert sorted(asked) == sorted([*first, "1+1:2;", "1+1:2;2+1:0;", "1+1:2;2+1:1;"])


def test_a_solution_abstains_where_a_prefix_cannot_be_scored_or_it_is_too_long(base):
    t = random_play("progress_rewards", "--continuations", "4", "--best-of", "2")
    found, _ = measured(t, lambda begun, number: None if begun == "1+1:2;2+1:1;" and number > 0 else True)
    assert found == [[0.0, 0.0], None, []]
    t = random_play("progress_rewards", "--most-steps", "1")
    assert measured(t, lambda begun, number: True)[0] == [None, None, []]


def test_a_solution_that_is_too_long_leaves_the_others_their_own_prefixes(base):
    t = random_play("progress_rewards", "--continuations", "4", "--best-of", "1", "--most-steps", "2")
    found, asked = measured(t, half_of_good, LONG_FIRST)
    assert found == [None, [0.25, -0.5], [0.25, 0.5]]
    assert sorted(asked) == ["", "1+1:2;", "1+1:2;2+1:0;", "1+1:2;2+1:1;"]


def test_values_stand_at_the_steps_ends_as_they_are():
    rewards = at_step_ends([[1, 3], [0, 1], []], [[0.25, -2.0], None, []], "cpu")
    assert rewards.values.tolist() == [[0.25, -2.0], [0.0, 0.0], [0.0, 0.0]]
    assert rewards.token_index[0].tolist() == [1, 3] and rewards.valid.all(dim=1).tolist() == [True, False, False]
    assert not rewards.valid[1:].any()
    tango = step_rewards([[1, 3], [2]], [[True, False], [0.75]], "cpu")
    assert tango.values.tolist() == [[0.5, -0.5], [0.5, 0.0]]
    with pytest.raises(ValueError, match="rollout 0 has 2 steps and 1 verdicts"):
        at_step_ends([[1, 3]], [[0.5]], "cpu")


def test_with_alpha_0_the_outcomes_alone_reward(base):
    found = []
    for flags in (["--alpha", "0"], ["--alpha", "0", "--step-values", "math_shepherd"],
                  ["--alpha", "5", "--combine", "rewards"]):  # no step differs here, but zeros move the mean
        t = random_play("progress_rewards", "--continuations", "2", "--best-of", "1", *flags)
        update, = progress_rewards.play(t)
        found.append(update.parts[0][1])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2]) and found[0].any()


def expected_gradient(credit: str, alpha: float, prover: list[float]) -> torch.Tensor:
    """That of a policy which takes two steps, one token each, 0 or 1, over all four solutions; right is 01 alone. What
    rewards are the outcome, and alpha times the progress of a prover that is right with these chances at the start,
    after a first 0 and after a first 1."""
    logits = torch.tensor([[0.3, -0.2], [0.5, 0.1], [-0.4, 0.2]], requires_grad=True)  # first, after 0, after 1
    solutions = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    right = [False, True, False, False]
    progress = [[prover[1 + a] - prover[0], float(y) - prover[1 + a]]
                for (a, _), y in zip(solutions.tolist(), right, strict=True)]
    logprobs = logits.log_softmax(dim=1)
    taken = torch.stack([logprobs[0, solutions[:, 0]], logprobs[1 + solutions[:, 0], solutions[:, 1]]], dim=1)  # (4, 2)
    sources = [(1.0, terminal_rewards(right, torch.full((4,), 2))),
               (alpha, CREDIT[credit](at_step_ends([[0, 1]] * 4, progress, "cpu")))]
    advantages = blend(sources, torch.zeros(4, dtype=torch.long), torch.ones(4, 2) > 0, PRESETS["reinforce"])
    (taken.sum(dim=1).exp().detach() * (advantages * taken).sum(dim=1)).sum().backward()
    return logits.grad


def test_progress_to_go_is_a_baseline_and_teaches_nothing_a_steps_own_progress_does():
    """PAV eq. 5. To go it is Q(end) - Q(before), so that any prover's gradient is 1 + alpha times the outcome's."""
    weak, strong, outcome = [0.2, 0.3, 0.1], [0.5, 1.0, 0.0], expected_gradient("own_step", 0.0, [0.0] * 3)
    own = [expected_gradient("own_step", 3.0, prover) for prover in (weak, strong)]
    assert not torch.allclose(own[0], own[1], rtol=0.1) and own[1][0, 0] > own[0][0, 0] > outcome[0, 0] > 0
    for prover in (weak, strong):  # to_go halves each of two steps
        torch.testing.assert_close(expected_gradient("to_go", 2 * 3.0, prover), 4 * outcome)
    with pytest.raises(BadInput, match="--credit to_go: with --step-values pav it cancels"):
        progress_rewards.check(SimpleNamespace(best_of=1, continuations=1, step_values="pav", credit="to_go",
                                                combine="advantages"), None)
