"""Critique-GRPO: the chosen refinement, its shaped coefficients, the gradient of an update, what is logged."""
import statistics

import pytest
import torch
from test_dpo import are_equal, assert_learns, drawn_by, moved_by, parsed, random_play, token_logprobs, weights_of

from nanochat import recipes
from nanochat.kernels.losses import PolicyLoss
from nanochat.recipes.policy import critique_grpo
from nanochat.recipes.policy.critique_grpo import CRITIQUES, first_best, shaped
from nanochat.rl.records.prompts import generator_prompt
from tasks import make_task
from tasks.common import Problem

C, G = 0.1, 8


def test_the_first_right_refinement_is_chosen_else_a_wrong_one_else_the_first():
    assert first_best([False, True, True, None], 4) == [1]
    assert first_best([None, False, False, None], 4) == [1]
    assert first_best([None, None], 2) == [0]
    assert first_best([False, False, True, False, None, True], 2) == [0, 2, 5]  # groups of two


def test_shaped_coefficients_by_hand():
    A, probs = torch.tensor(2.0), torch.tensor([0.1, 1.0, 0.5, 1e-8])
    # at pi = c: 2 * .1 * .1 / .2^2 = 2 / 4; at 1: 2 * .1 / 1.1^2; at .5: 2 * .1 * .5 / .6^2; far below c: 2 * pi / c
    expected = torch.tensor([0.5, 0.2 / 1.21, 0.1 / 0.36, 2e-7])
    torch.testing.assert_close(shaped(A, probs.log(), C), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind, solution, critique", [
    ("simple", "1+1:2;2*2:1;=21", "T"), ("simple", "1+1:2;=2", "F"), ("simple_gt", "1+1:2;2*2:1;=21", "T=21"),
    ("simple_gt", "nonsense", "F=21"), ("steps", "1+1:2;2*2:1;=21", "T"), ("steps", "1+1:2;2*2:0;=20", "2F"),
    ("steps", "1+1:0;0*2:0;=00", "1F"), ("steps", "1+1:2;2*2:1;=22", "F"), ("steps", "", "F"),
])
def test_critiques_of_solutions(kind, solution, critique):
    """1+1*2 from left to right modulo 3: 1+1 = 2, 2*2 = 1, so the answer of all results is 21."""
    task = make_task(parsed("critique_grpo", "--chain-answer", "all"))
    problem = Problem("rl", 0, "1+1*2", "21")
    assert CRITIQUES[kind](task, problem, solution, task.check(problem, solution)) == critique


def played(*flags: str, recipe: str = "critique_grpo", check=None):
    """A step, its update, and what was drawn."""
    t = random_play(recipe, *flags)
    t.task.check = check or t.task.check
    drawn = drawn_by(t)
    update, = recipes.load(recipe).play(t)
    return t, update, drawn


def test_the_update_takes_the_gradient_of_the_papers_loss_on_refinements_after_the_problem_alone(base):
    """-A ratio on sampled tokens, -A pi / (pi + c) on the refinement, which takes a group's first slot."""
    t, update, drawn = played()
    solutions, refined, ((mixed, _),) = drawn["solutions"], drawn["refined"], update.parts
    outcome, model, losses, num_shaped = (lambda text: t.task.check(None, text)), t.roles["generator"].model, [], 0
    assert update.loss == PolicyLoss("reinforce") and len(mixed) == len(solutions) == len(refined) == 4 * G
    said = []
    for prompt, first in zip(refined.prompt_of(), solutions.texts, strict=True):  # what a refinement was asked
        mark = {True: "T=", False: "F=", None: ""}[outcome(first)]
        said.append(mark and mark + prompt.problem.answer)
        assert prompt.ids == t.tokenizer.render_prompt(f"{first}|{said[-1]}|{prompt.problem.prompt}")
    rows = token_logprobs(model, mixed)
    for i in range(0, 4 * G, G):
        order = sorted(range(i, i + G), key=lambda n: (True, False, None).index(outcome(refined.texts[n])))
        assert mixed.texts[i: i + G] == [refined.texts[order[0]], *solutions.texts[i + 1: i + G]]
        asked = [["first attempt", solutions.texts[order[0]]], ["critique", said[order[0]]]]
        assert mixed.columns["turns"][i: i + G] == [asked, *[[]] * (G - 1)]
        assert len(set(mixed.group_id[i: i + G].tolist())) == 1 and mixed.problems()[i] == solutions.problems()[i]
        found = [outcome(text) for text in mixed.texts[i: i + G]]
        known = [float(o) for o in found if o is not None]
        assert mixed.columns["outcome"][i: i + G] == found and len(set(known)) == 2
        for g, o in enumerate(found):
            n = i + g
            assert mixed.prompt_of()[n].ids == generator_prompt(t.tokenizer, t.task.fmt, mixed.problems()[n].prompt)
            A = 0.0 if o is None else (o - statistics.mean(known)) / (statistics.stdev(known) + 1e-6)
            probs = rows[n].exp()
            losses.append(-A * (rows[n] if g else probs / (probs + C)).mean())  # over a rollout's tokens
            num_shaped += g == 0 and A != 0
            drawn_here = ~mixed.sampler_logprobs[n, : len(probs)].isnan()
            assert bool(drawn_here.any()) == bool(drawn_here.all()) == (g > 0)
    assert num_shaped >= 2
    assert_learns(t, update, sum(losses) / len(losses))


@pytest.mark.parametrize("outcome, replaced", [(False, 0.0), (True, 1.0)])
def test_wrong_refinements_can_be_kept_out(base, outcome, replaced):
    t, update, drawn = played("--right-refinements-only", "--critique", "steps", check=lambda problem, text: outcome)
    (mixed, coefficients), = update.parts
    assert t.metrics["gen/refined/replaced"] == replaced and t.metrics["gen/refined/frac_reward_zero_std"] == 1
    assert not coefficients.any() and mixed.texts[::G] == drawn["refined" if replaced else "solutions"].texts[::G]


def test_what_is_logged_agrees_with_what_was_drawn(base):
    t, _, drawn = played()
    old, new = ([t.task.check(None, text) for text in drawn[draw].texts] for draw in ("solutions", "refined"))
    mean = lambda values: pytest.approx(statistics.mean([v for v in values if v is not None]))
    found = {name.removeprefix("gen/"): value for name, value in t.metrics.items()}
    assert found["reward"] == mean(old) and found["refined/accuracy"] == mean(new)
    assert found["refined/accuracy_of_wrong"] == mean([b for a, b in zip(old, new, strict=True) if a is False])
    assert found["unscorable"] == old.count(None) / len(old) and found["refined/replaced"] == 1
    # Of 4 groups the last two have a right solution, the second and the last a right refinement: one is rescued.
    t = random_play("critique_grpo", "--num-samples", "2")
    critique_grpo.log_refinements(t, [False, None, False, False, True, False, True, False],
                                  [False, None, False, True, False, False, True, True], [None, False] * 4)
    assert t.metrics["gen/refined/rescued"] == 1 / 2 and t.metrics["gen/refined/frac_reward_zero_std"] == 1


def test_with_a_verifier_its_text_is_the_critique_and_only_the_generator_moves(base):
    t, update, drawn = played("--verifier-max-new-tokens", "36", recipe="critique_grpo_verifier")
    rows = zip(drawn["refined"].prompt_of(), drawn["solutions"].texts, drawn["critiques"].texts, strict=True)
    for prompt, first, critique in rows:
        assert prompt.ids == t.tokenizer.render_prompt(f"{first}|{critique}|{prompt.problem.prompt}")
    before = weights_of(t.roles["verifier"].model)
    assert any(x.any() for x in moved_by(t, update).values()) and t.roles["verifier"].optimizer is None
    assert are_equal(before, weights_of(t.roles["verifier"].model)) and "gen/critiques/balanced_acc" in t.metrics
