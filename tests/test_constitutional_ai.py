"""Constitutional AI: critiques and preferences by hand, what both stages learn, demonstrations of revisions."""
import random

import pytest
import torch
from test_dpo import (are_equal, assert_learns, drawn_by, log_likelihoods, parsed, random_play, verdict_odds,
                      weights_of, writing)
from test_ttrl import assert_gold_answers_change_nothing

from nanochat import recipes
from nanochat.recipes.self_play.constitutional_ai import critique, preference, preference_rewards
from nanochat.rl.records.prompts import parse_verification
from tasks import make_task
from tasks.chain import COMPACT, Chain
from tasks.common import Problem

cai = recipes.load("constitutional_ai")
FLAGS = ["--num-samples", "4", "--examples-per-step", "3", "--max-new-tokens", "12", "--verifier-max-new-tokens", "12",
         "--revisions", "2", "--sl-steps", "1"]
PROBLEM = Problem("rl", 0, "1+2*2", "0")  # modulo 3: 1+2:0;0*2:0;=0


def chain(*flags: str) -> Chain:
    return make_task(parsed("constitutional_ai", *flags))


def test_what_a_solution_breaks():
    broken = lambda solution: chain().violations(PROBLEM, solution)
    assert broken("1+2:0;0*2:0;=0") == [] and broken("1+2:1;1*2:2;=2") == ["results"]
    assert broken("2+2:1;1*2:2;=2") == ["operands"] and broken("2+2:1;=1") == ["operands", "complete"]
    assert {tuple(broken(text)) for text in ("1+2:0;=0", "=0", "", "1+2:0")} == {("complete",)}
    assert broken("1+2:0;0*2:1;1+1:2;=2") == ["operands", "results"]  # a step too many copies nothing


@pytest.mark.parametrize("text, found", [
    ("1+2:0T;0*2:0T;=T", {"operands": "", "results": "", "complete": ""}),
    ("1+2:0F;0*2:0T;=F", {"operands": "", "results": "1", "complete": ""}),
    ("1+2:0T;?F;=F", {"operands": "2", "results": "", "complete": ""}),
    ("?F;0*2:1F;=F", {"operands": "1", "results": "2", "complete": ""}),
    ("1+2:0F;0*2:1F;=F", {"results": "1"}),             # the first
    ("1+2:0T;0*2:0T;=F", {"results": "", "complete": "3"}),  # nothing is wrong, and yet the whole is
    ("1+2:0T;0*2:0T;", {"results": None, "complete": None}),
    ("1+2:0T;=T", {"operands": None}), ("nonsense", {"operands": None})])
def test_a_critique_is_the_first_step_that_breaks_the_principle(text, found):
    verification = parse_verification(COMPACT, text, 2)
    for principle, expected in found.items():
        assert critique(chain(), principle, verification) == expected


def test_a_preference_is_of_one_right_and_one_wrong():
    for one, other, expected in ((0.8, 0.5, 0.8), (0.5, 0.8, 0.2), (0.8, 0.2, 16 / 17),  # .64 / (.64 + .04)
                                 (0.3, 0.3, 0.5), (1, 0, 1), (0, 1, 0), (1, 1, 0.5), (0, 0, 0.5), (1, 0.5, 1)):
        assert preference(one, other, 1.0) == pytest.approx(expected)
        assert preference(one, other, 0.6) == pytest.approx(min(0.6, max(0.4, expected)))


def test_a_reward_is_the_mean_preference_over_the_others_of_the_group():
    # .8 over .5: .8; .8 over .2: 16/17; .5 over .2: .8
    found = preference_rewards([0.8, 0.5, 0.2], 3, 1.0)
    assert found == pytest.approx([(0.8 + 16 / 17) / 2, (0.2 + 0.8) / 2, (1 / 17 + 0.2) / 2])
    assert preference_rewards([0.8, 0.5, None], 3, 0.6) == [0.6, 0.4, None]
    assert preference_rewards([0.8, None, None, 0.5], 2, 1.0) == [None] * 4  # none to compare with
    assert preference_rewards([], 2, 1.0) == []


def test_a_demonstration_keeps_what_stands_before_the_step_and_breaks_no_principle_after_it():
    """With a critic without misconceptions."""
    task, kinds = chain("--chain-verifier-share", "0", "--chain-max-steps", "4", "--chain-answer", "all"), set()
    for i in range(200):
        problem = task.problem("sft", i)
        quoted, revised = task.revise_demo(problem, random.Random(i))
        solution, number = quoted["solution"], quoted["critique"]
        kinds.add((number == "", tuple(task.violations(problem, solution))))
        if not number:
            assert revised == solution
            continue
        k, errors = int(number) - 1, task.step_errors(problem, solution)
        spans = task.fmt.step_spans(solution)
        kept = solution[: spans[k - 1][1]] if k else ""
        assert revised.startswith(kept) and "complete" not in task.violations(problem, revised)
        assert task.step_errors(problem, revised)[k:] == [None] * (len(task.fmt.step_spans(revised)) - k)
        assert task.violations(problem, solution) and (k == len(errors) or errors[k])
        stated = "".join(revised[e - 2] for _, e in task.fmt.step_spans(revised))
        assert task.fmt.answer(revised) == stated
    assert {(False, ("results",)), (False, ("complete",)), (False, ("operands",)), (True, ())} <= kinds


def saying(said: list[str], *flags: str, step: int = 0):
    """A step in which verifications are these texts, one after the other and again."""
    t = random_play("constitutional_ai", *FLAGS, *flags)
    t.steps["generator"] = t.state.step = step
    writing(t, {draw: said for draw in t.draws if draw.startswith(("critiques", "feedback"))})
    t.drew = drawn_by(t)
    t.read_verifications = lambda rollouts: [parse_verification(COMPACT, text, text.count(";"))
                                             for text in rollouts.texts]
    return t


def test_what_is_learned_are_the_revisions_after_the_problem_alone(base):
    t = saying(["0F;=F", "0T;=T", "cannot be read"])
    t.tokenizer.stop_tokens = [*t.tokenizer.stop_tokens, *range(40, 130)]  # random models end what they write
    update, = cai.play(t)
    responses = t.drew["responses"]
    expected = [(prompt.ids, text) for r in range(2) for n, (prompt, text) in enumerate(zip(
        responses.prompt_of(), t.drew[f"revisions_{r}"].texts, strict=True))
        if n % 3 < 2 and t.drew[f"revisions_{r}"].stopped[n]]
    (rollouts, weights), = update.parts
    assert [(p.ids, text) for p, text in zip(rollouts.prompt_of(), rollouts.texts, strict=True)] == expected
    assert expected and rollouts.sampler_logprobs.isnan().all()
    assert t.metrics["gen/critiques/unread"] == pytest.approx(1 / 3) and t.metrics["phase"] == "revisions"
    generator, before = t.roles["generator"].model, weights_of(t.roles["start"].model)
    loss = -torch.stack(log_likelihoods(generator, rollouts)).sum() / rollouts.lengths.sum()  # the mean over tokens
    assert_learns(t, update, loss)
    assert are_equal(before, weights_of(t.roles["start"].model))


def test_the_start_revises_what_it_wrote_last_by_the_number_of_a_step(base, monkeypatch):
    monkeypatch.setattr(cai, "drawn_principle", lambda t, problem, number: ("results", "complete")[number])
    t = saying(["0F;=F", "0T;=F", "cannot be read"])
    list(cai.play(t))
    problems, before = t.drew["responses"].problems(), t.drew["responses"].texts
    for r, numbers in enumerate((["1", "", ""], ["", "2", ""])):
        prompts = t.prompts("refine_prompt", problems, solution=before, critique=numbers)
        assert [p.ids for p in t.drew[f"revisions_{r}"].prompt_of()] == [p.ids for p in prompts]
        before = t.drew[f"revisions_{r}"].texts
    assert t.metrics["gen/critiques/blamed"] == pytest.approx(2 / 6)


def test_principles_are_drawn_by_the_problem(base):
    t = random_play("constitutional_ai", *FLAGS)
    drawn = [[cai.drawn_principle(t, Problem("rl", i, "1+1", "2"), r) for i in range(40)] for r in range(2)]
    assert set(drawn[0]) == {"operands", "results", "complete"} and drawn[0] != drawn[1]


def test_where_no_critique_can_be_read_nothing_is_learned(base):
    t = saying(["cannot be read"])
    assert list(cai.play(t)) == [] and t.metrics["gen/critiques/unread"] == 1


def test_the_policy_earns_the_preferences_and_no_gold_answer(base):
    """A chance is that of the final verdict's token by the start."""
    def played(change):
        t = saying(["0T;=T", "0F;=F", "0T;=T", "cannot be read"], step=1)
        change(t.task)
        update, = cai.play(t)
        (rollouts, advantages), = update.parts
        chances, odds = rollouts.columns["chance"], verdict_odds(t, "start", t.drew["feedback"])
        assert chances == [None if n % 4 == 3 else pytest.approx(torch.sigmoid(row[-2]).item(), rel=1e-4)
                           for n, row in enumerate(odds)]
        assert rollouts.columns["reward"] == preference_rewards(chances, 4, 0.6)
        assert t.metrics["gen/feedback/unread"] == 0.25 and not advantages[3::4].any()
        return [update]
    assert_gold_answers_change_nothing(played)


def test_the_evaluation_counts_broken_principles_beside_pass_at_1(base, capsys):
    """Solutions that cannot be scored count as wrong, and it is said."""
    t = random_play("constitutional_ai", *FLAGS)
    t.evaluating, check, n = True, t.task.check, t.args.eval_examples
    t.task.check = lambda problem, text: check(problem, text) if problem.split == "test_out" else None
    scores = cai.evaluate(t)
    assert scores["gen/pass1_in"] == 0 and 0 <= scores["gen/pass1_out"] <= 1
    assert f"WARNING: {n} of {n} solutions of test_in cannot be scored and count as wrong" in capsys.readouterr().out
    for split in ("in", "out"):
        kinds = [scores[f"gen/violations/{principle}_{split}"] for principle in t.task.principles]
        assert max(kinds) <= scores[f"gen/violated_{split}"] <= min(1, sum(kinds))
