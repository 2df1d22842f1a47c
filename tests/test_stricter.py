"""Stricter verifiers: the strictest of several, solutions relabelled, flaws that cost, trust by labels, alpha by J."""
import random
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from conftest import train
from test_dpo import parsed, random_play, writing
from test_tango_rl import AT_THE_END, records
from test_tasks import task_of

from nanochat import recipes
from nanochat.common import BadInput
from nanochat.recipes.tango import _judged, fixed_verifier, tango
from nanochat.rl.credit.advantages import PRESETS, source_advantages
from nanochat.rl.credit.rewards import VerdictSkill, VerdictTrust, terminal_rewards
from nanochat.rl.records.prompts import parse_verification
from nanochat.rl.verify.judges import strictest
from tasks.common import Problem
from tasks.formats import COMPACT

T, F = True, False
TWO_STEPS = "0+0:0;0+1:1;=1"
FLAGS = {"strictest": ["--verifications", "2"], "flaws": ["--flawed-reward", "0.5", "--alpha-start", "0", "--alpha-end",
                                                           "0"],
         "calibrated": ["--step-rewards", "calibrated", "--num-calibration", "3"], "by_j": ["--weigh-by-j"],
         "relabelled": ["--verify-relabelled"],
         "all": ["--verifications", "2", "--flawed-reward", "0.5", "--step-rewards", "calibrated", "--weigh-by-j",
                 "--verify-relabelled"]}


def read(*texts: str) -> list:
    return [parse_verification(COMPACT, text, 2) for text in texts]


@pytest.mark.parametrize("how", FLAGS)
@pytest.mark.parametrize("recipe", ["tango", "fixed_verifier"])
def test_each_runs_with_a_trained_and_an_untrained_verifier(base, recipe, how):
    train(*AT_THE_END, "--recipe", recipe, "--num-steps", "2", *FLAGS[how])
    log = [r for r in records(base, "r") if r["role"] == "generator"]
    assert [r["gen/skipped"] for r in log] == [0, 0]
    for name, by in (("gen/flawed", ("flaws", "all")), ("gen/verdict_skill", ("by_j", "all"))):
        assert all((name in r) == (how in by) for r in log)


# The strictest of several

@pytest.mark.parametrize("texts, steps, verdict", [
    (["T;F;=T", "T;T;=T"], [T, F], T), (["T;F;=T", "F;T;=F", "T;T;=T"], [F, F], F),
    (["T;T;=T", "F;=F"], [T, T], F),      # no verdict for each step: only its final one counts
    (["T;=F", "T;T;="], [T, T], F), (["F;F;=", "T;T;=T"], [F, F], T),
    (["T;=T", "F;F;F;=T"], None, T), (["T", "x"], None, None)])
def test_a_step_and_the_whole_are_right_if_all_that_can_be_read_say_so(texts, steps, verdict):
    said = strictest(read(*texts))
    assert (said.usable_steps, said.verdict) == (steps, verdict)
    assert ("no_final_verdict" in said.unmet) == (verdict is None)
    assert [strictest([v]) for v in read(*texts)] == read(*texts)  # one alone says what it says


@pytest.mark.parametrize("recipe", ["tango", "fixed_verifier"])
@pytest.mark.parametrize("distinct", [True, False])
def test_each_solution_is_verified_k_times_and_what_is_alike_once(base, recipe, distinct):
    t = random_play(recipe, "--verifications", "3", *["--no-verify-distinct"] * (not distinct))
    writing(t, {"solutions": [TWO_STEPS, "0+0:0;0+1:1;=2"], "verdicts": ["T;F;=T", "T;T;=T", "x", *["F;T;=F"] * 3]})
    solutions = t.solve("solutions", t.problems())
    judged = _judged.written(t, solutions)
    assert judged.steps == [[T, F], [F, T]] * 16 and judged.finals == solutions.columns["verdict"] == [T, F] * 16
    assert len(t.asked["verdicts"]) == 3 * (4 * 2 if distinct else 32)  # 4 problems, 2 of 8 solutions differ
    assert t.metrics["gen/verified"] == (0.25 if distinct else 1)


# Relabelled

def test_a_chain_relabelled_by_hand():
    """Modulo 10 by the unit 3: 3 + 5 = 8 becomes 9 + 15 = 24, and 8 * 2 = 16 becomes 24 * 2 = 48."""
    task, unit = task_of("chain", "--chain-answer", "final"), SimpleNamespace(choice=lambda units: units[0])
    problem, text = task.relabelled(Problem("rl", 7, "3+5*2", "6"), "3+5:8;8*2:6;=6", unit)
    assert (problem, text) == (Problem("rl", 7, "9+5*2", "8"), "9+5:4;4*2:8;=8")
    every, _ = task_of("chain").relabelled(Problem("rl", 7, "3+5*2", "86"), "", unit)
    assert every.answer == "48"


@pytest.mark.parametrize("modulus", [2, 3, 4, 7, 9, 10])
@pytest.mark.parametrize("answer", ["final", "all"])
def test_a_relabelled_text_is_as_right_as_before_whatever_it_is(modulus, answer):
    task = task_of("chain", "--chain-modulus", str(modulus), "--chain-answer", answer)
    rng, seen, others = random.Random(0), set(), 0
    for i in range(300):
        problem = task.problem("rl", i)
        text = task.solution_demo(problem, rng)
        for _ in range(rng.choice((0, 0, 1, 3))):  # any marks and digits in it
            k = rng.randrange(len(text))
            text = text[:k] + rng.choice("0123456789+-*:;=?") + text[k + rng.randrange(2):]
        other, said = task.relabelled(problem, text, rng)
        labels, outcome = task.step_labels(problem, text), task.check(problem, text)
        assert (task.step_labels(other, said), task.check(other, said)) == (labels, outcome), (problem, text)
        assert (other.split, other.index, len(other.prompt)) == (problem.split, problem.index, len(problem.prompt))
        seen |= {*labels, outcome}
        differ = [a != b for a, b in zip(*map(COMPACT.step_bodies, (text, said)), strict=True)]
        others += sum(differ) / max(1, len(labels))
    assert seen == {T, F} and (others > 0.7 * 300) == (modulus > 2)


def test_only_what_passes_as_it_is_and_relabelled_is_right(base):
    t = random_play("tango", "--verify-relabelled", "--verifications", "2")
    writing(t, {"solutions": [TWO_STEPS], "verdicts": ["T;T;=T"], "verdicts_relabelled": ["T;T;=T", "T;F;=F"]})
    solutions = t.solve("solutions", t.problems())
    judged = _judged.written(t, solutions)
    assert judged.steps == [[T, F]] * 32 and judged.finals == [F] * 32
    asked, other = t.asked["verdicts"], t.asked["verdicts_relabelled"]
    assert len(asked) == len(other) == 2 * 4 and [p.problem.index for p in asked] == [p.problem.index for p in other]
    for before, after in zip(asked, other, strict=True):  # modulo 3 the unit is 2
        assert after.solution.text == "0+0:0;0+2:2;=2" and after.solution.step_ends == before.solution.step_ends
        assert after.problem.prompt != before.problem.prompt or "1" not in before.problem.prompt


# Flaws that cost

def test_a_right_answer_with_a_flaw_earns_less():
    told: dict = {}
    t = SimpleNamespace(args=SimpleNamespace(flawed_reward=0.5), mean=lambda values: values,
                        log=lambda role, values: told.update(values))
    steps = [[T, T], [T, F], [F], None, None, [], [0.9, 0.4], None]
    finals = [F, T, F, F, None, F, 0.9, 0.6]
    outcomes = [T, T, F, T, T, T, T, None]
    rewards = _judged.less_if_flawed(t, SimpleNamespace(columns={"outcome": outcomes}), outcomes,
                                     _judged.Judged(steps, finals))
    assert rewards == [1, 0.5, 0, 0.5, 1, 0.5, 0.5, None]
    assert told == {"flawed": [F, T, T, F, T, T]}  # of the right ones


@pytest.mark.parametrize("rewards, sign", [([1, 0.5, 0, 0], 1), ([1, 0.5, 0, 0.5], 0), ([1, 1, 0.5, 0], -1)])
def test_flawed_ones_are_encouraged_until_right_ones_are_the_majority(rewards, sign):
    lengths = torch.ones(4, dtype=torch.long)
    advantages = source_advantages(terminal_rewards(rewards, lengths), torch.zeros(4, dtype=torch.long),
                                   torch.ones(4, 1, dtype=torch.bool), PRESETS["grpo"])
    assert advantages[rewards.index(0.5), 0].sign() == sign


def test_without_step_rewards_flaws_are_all_that_verdicts_do(base):
    """The group of a problem has as many right as wrong solutions; half of the right ones are flawed."""
    flags = ["--alpha-start", "0", "--alpha-end", "0", "--num-samples", "4", "--negative-weight", "1"]
    solutions = [f"{TWO_STEPS[:-1]}{n}" for n in range(4)]
    for reward, expected in ((1.0, [1.0, 1.0, 0.0, 0.0]), (0.5, [1.0, 0.5, 0.0, 0.0])):
        t = random_play("fixed_verifier", *flags, "--flawed-reward", str(reward))
        t.task.check = lambda problem, text: text[-1] in "01"
        writing(t, {"solutions": solutions, "verdicts": ["T;T;=T", "T;F;=T", "F;F;=F", "T;T;=T"]})
        update, = fixed_verifier.play(t)
        rollouts, advantages = update.parts[0]
        values = torch.tensor(expected)
        plain = (values - values.mean()) / (values.std() + 1e-6)
        assert advantages.allclose((plain.repeat(4)[:, None] * rollouts.mask).to(advantages.dtype))
        assert t.metrics["gen/reward"] == pytest.approx(values.mean().item())


# Trust by gold labels

def test_calibrated_trust_by_hand_and_on_ranks():
    """Of three steps judged right two are, of one judged wrong none; what is believed before counts along."""
    trust = VerdictTrust()
    trust.calibrate([[T, T], [T, F], None], [[T, F], [T, F], [T]])
    assert trust.counts == [2, 3, 0, 1]
    trust.observe([[T], [F, F]], [F, T])  # outcomes say how much luck there is, and nothing else
    assert trust.right_if_right == pytest.approx((2 + 9) / (3 + 10))
    assert trust.right_if_wrong == pytest.approx(4 / 11) and trust.luck > VerdictTrust().luck
    trust.calibrate([[F]], [[T]])
    assert trust.counts == pytest.approx([1.8, 2.7, 1, 1.9])
    alone, shared = VerdictTrust(**asdict(trust)), VerdictTrust(**asdict(trust))
    alone.calibrate([[T], [T]], [[T], [T]])
    shared.calibrate([[T]], [[T]], lambda x: 2 * x)  # another rank has just the same
    assert asdict(alone) == asdict(shared)


def test_the_same_solutions_calibrate_in_each_step_by_what_the_verifier_says_then(base):
    """Two solutions, each with a right and a wrong step, both of which pass."""
    t = random_play("tango", "--step-rewards", "calibrated", "--num-calibration", "2",
                    "--verifier-max-new-tokens", "36")
    writing(t, {"calibration": [TWO_STEPS], "calibration_verdicts": ["T;T;=T"]})
    t.task.step_labels = lambda problem, text: [T, F][: text.count(";")] if text == TWO_STEPS else [F] * len(
        COMPACT.step_spans(text))
    list(tango.generator_step(t, tango.written))
    assert t.metrics["gen/trust/right_if_right"] == pytest.approx((2 + 9) / (4 + 10))
    assert t.metrics["gen/trust/right_if_wrong"] == pytest.approx(0.4)
    assert {p.problem.split for p in t.asked["calibration"]} == {"sft"}
    t.done.clear()
    t.asked.clear()
    list(tango.generator_step(t, tango.written))
    assert "calibration" not in t.asked and len(t.asked["calibration_verdicts"]) == 2
    assert t.metrics["gen/trust/right_if_right"] == pytest.approx((1.9 * 2 + 9) / (1.9 * 4 + 10))


def test_calibration_needs_gold_labels_of_steps():
    for recipe in ("tango", "fixed_verifier"):
        args = parsed(recipe, "--step-rewards", "calibrated")
        with pytest.raises(BadInput, match="^--step-rewards calibrated: task math has no gold labels of steps$"):
            recipes.load(recipe).check(args, SimpleNamespace(name="math", has_step_labels=False))


# Alpha by J

def test_j_by_hand_in_batches_and_on_ranks():
    """One of two right solutions is judged right, and the only wrong one: 2/4 - 2/3 by Laplace's rule."""
    skill = VerdictSkill()
    assert skill.observe([T, F, T, None, T], [T, T, F, F, None]) == pytest.approx(2 / 4 - 2 / 3)
    assert skill.observe([F, F], [F, F]) == pytest.approx(1.9 / 3.8 - 1.9 / 4.9)
    assert VerdictSkill().observe([], []) == 0
    alone, shared = VerdictSkill(), VerdictSkill()
    alone.observe([T, T], [T, T])
    shared.observe([T], [T], lambda x: 2 * x)
    assert asdict(alone) == asdict(shared)


@pytest.mark.parametrize("lies, j", [(False, 9 / 10 - 1 / 10), (True, 1 / 10 - 9 / 10)])
def test_alpha_follows_j_and_is_never_negative(base, lies, j):
    """Of 8 right and 8 wrong solutions all are judged as they are, or the other way round."""
    t = random_play("tango", "--weigh-by-j", "--alpha-start", "0.5", "--alpha-end", "0.5", "--num-samples", "4")
    t.task.check = lambda problem, text: text[-1] in "01"
    verdicts = ["F;F;=F", "T;T;=T"] if lies else ["T;T;=T", "F;F;=F"]
    writing(t, {"solutions": [f"{TWO_STEPS[:-1]}{n}" for n in (0, 2)], "verdicts": verdicts})
    list(tango.generator_step(t, tango.written))
    assert t.metrics["gen/verdict_skill"] == pytest.approx(j)
    assert t.metrics["gen/alpha"] == pytest.approx(0.5 * max(0, j))
    assert t.memory["skill"]["sums"] == [0 if lies else 8, 8, 8 if lies else 0, 8]
