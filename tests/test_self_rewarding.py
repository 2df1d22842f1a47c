"""Self-Rewarding: points and pairs by hand, what a step is made of, snapshots, gold answers that change nothing."""
import math

import pytest
from test_dpo import are_equal, drawn_by, random_play, weights_of, writing
from test_ttrl import assert_gold_answers_change_nothing

from nanochat import recipes
from nanochat.recipes.self_play.self_rewarding import POINTS, best_and_worst
from nanochat.rl.records.prompts import parse_verification
from nanochat.rl.verify.judges import Judgment, shares
from tasks.chain import COMPACT

self_rewarding = recipes.load("self_rewarding")
G, K = 4, 3
FLAGS = ["--num-samples", str(G), "--iteration-steps", "2", "--examples-per-step", "3", "--max-new-tokens", "12",
         "--verifier-max-new-tokens", "12"]


@pytest.mark.parametrize("texts, additive, verdict", [
    (["1+1:2T;2+1:3T;=T"], 5, 1),
    (["1+1:2F;2+1:3F;=F"], 0, 0),
    (["1+1:2T;2+1:3F;=F"], 2, 0),                          # half of the steps
    (["1+1:2T;2+1:3T;=F"], 4, 0),                          # all steps, and yet
    (["1+1:2T;2+1:3T;=T", "1+1:2T;2+1:3F;=F"], 3.5, 0.5),  # the mean of 5 and 2
    (["1+1:2T;2+1:3T;=T", "nonsense"], 5, 1),              # what cannot be read is left out
    (["1+1:2T;=T"], None, 1),                              # a step too few: nothing is said of steps
    (["1+1:2T;2+1:3T;"], None, None),                      # no final verdict
    (["nonsense", ""], None, None)])
def test_points_of_a_judgment(texts, additive, verdict):
    judgment = shares([parse_verification(COMPACT, text, 2) for text in texts], 0)
    assert POINTS["additive"](judgment) == additive and POINTS["verdict"](judgment) == verdict


def test_points_without_steps_and_the_best_and_the_worst_of_a_group_by_hand():
    pair = lambda *points: best_and_worst(points, [0] * 4)
    assert pair(1, 5, 0, 3) == ([1], [2]) and pair(5, 5, 0, 0) == ([0], [2])  # of equal ones the first
    assert pair(3, None, 4, None) == ([2], [0])                               # None is neither
    assert pair(2, 2, 2, 2) == pair(2, None, None, 2) == pair(None, 4, None, None) == pair(*[None] * 4) == ([], [])
    assert best_and_worst([1, 2, 9, 8, 7, 7], [0, 0, 1, 1, 2, 2]) == ([1, 2], [0, 3])
    assert best_and_worst([], []) == ([], [])
    # Thirds that add up to the same are no pair.
    assert [POINTS["additive"](Judgment([], final, 0)) for final in (1.0, 0.0, None)] == [1, 0, None]
    assert len({POINTS["additive"](Judgment(steps, 0.0, 0)) for steps in ([1 / 3, 1, 1], [1, 1, 1 / 3])}) == 1


def judging(*flags: str, step: int = 0):
    """A step in which the snapshot's verifications say what they are told to: of each problem's four solutions that the
    second is right three times and the fourth never, of the others they cannot be read."""
    t = random_play("self_rewarding", *FLAGS, *flags)
    t.steps["generator"] = t.state.step = step
    return writing(t, {"verdicts": [text for text in ("", "=T", "", "=F") for _ in range(K)]})


def test_the_snapshot_writes_and_judges_and_the_generator_learns_its_order(base):
    t = judging("--points", "verdict")
    drawn, (update,) = drawn_by(t), self_rewarding.play(t)
    solutions, ((rollouts, advantages),) = drawn["candidates"], update.parts
    assert len(solutions) == 3 * G and len(drawn["verdicts"]) == 3 * G * K
    assert {t.draws[draw].role for draw in drawn} == {"snapshot"}
    best, worst = solutions.texts[1::G], solutions.texts[3::G]
    assert rollouts.texts == best + worst and update.role == "generator"
    told_apart = [w != l for w, l in zip(best, worst, strict=True)]
    assert (advantages[:3, 0] > 0).tolist() == (advantages[3:, 0] < 0).tolist() == told_apart
    assert rollouts.prompt_of()[0].ids == t.solve_prompts(solutions.problems()[:1])[0].ids  # no verification is learned
    assert rollouts.sampler_logprobs.isnan().all()
    assert t.metrics["gen/num_pairs"] == 3 and t.metrics["gen/no_pair"] == 0 and t.metrics["gen/unjudged"] == 0.5
    outcomes = [t.task.check(None, text) for text in solutions.texts]
    told = [(w, l) for w, l in zip(outcomes[1::G], outcomes[3::G], strict=True) if {w, l} == {True, False}]
    assert t.metrics["gen/right_order"] == (sum(w for w, _ in told) / len(told) if told else None)
    assert t.metrics["gen/unscorable"] == pytest.approx(outcomes.count(None) / len(outcomes))
    assert t.metrics["sna/reward"] == 0.5 and t.metrics["sna/verdicts/abstained"] is not None
    assert rollouts.columns["judgments"] == [["=T"] * K] * 3 + [["=F"] * K] * 3  # what the judge wrote is logged


@pytest.mark.parametrize("step", [2, 3])
def test_an_iteration_begins_with_a_snapshot_of_the_generator_which_then_stays(base, step):
    t = judging("--points", "verdict", step=step)
    before, generator = (weights_of(t.roles[name].model) for name in ("snapshot", "generator"))
    list(self_rewarding.play(t))
    assert are_equal(weights_of(t.roles["snapshot"].model), generator if step == 2 else before)
    assert (t.metrics["gen/pair_loss"] == pytest.approx(math.log(2), rel=1e-12)) == (step == 2)
    assert t.metrics["gen/iteration"] == 1


def test_no_gold_answer_enters_an_update(base):
    def played(change):
        t = judging("--points", "verdict", step=3)
        change(t.task)
        return list(self_rewarding.play(t))
    assert_gold_answers_change_nothing(played)


def test_without_a_judgment_that_can_be_read_there_is_no_update(base):
    t = random_play("self_rewarding", *FLAGS)  # random models write no verification
    t.read_verifications = lambda rollouts: [parse_verification(COMPACT, "", 1)] * len(rollouts)
    assert list(self_rewarding.play(t)) == []
    assert t.metrics["gen/num_pairs"] == 0 and t.metrics["gen/no_pair"] == t.metrics["gen/unjudged"] == 1


def test_the_evaluation_asks_the_same_weights_in_both_roles(base):
    t = random_play("self_rewarding", *FLAGS, "--verifier-max-new-tokens", "14")
    t.evaluating, limits = True, []
    sample = t.sampler.sample
    t.sampler.sample = lambda model, prompts, num, stream, limit, *rest: (
        limits.append((stream[0], limit)) or sample(model, prompts, num, stream, limit, *rest))
    scores = self_rewarding.evaluate(t)
    assert {"gen/pass1_in", "gen/pass1_out", "gen/balanced_acc_current", "gen/balanced_acc_fixed"} <= scores.keys()
    assert not [name for name in scores if not name.startswith("gen/")]
    assert set(limits) == {("fixed", 12), ("current", 12), ("eval", 12), ("eval", 14)}  # a solution, a verification
