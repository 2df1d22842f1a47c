"""Stricter verifiers: solutions relabelled, alpha by J."""
import random
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from conftest import train
from test_dpo import random_play, writing
from test_tango_rl import AT_THE_END, records
from test_tasks import task_of

from nanochat.recipes.tango import _judged, tango
from nanochat.recipes.tango._judged import stricter
from nanochat.rl.credit.rewards import VerdictSkill
from nanochat.rl.records.prompts import parse_verification
from tasks.common import Problem
from tasks.formats import COMPACT

T, F = True, False
TWO_STEPS = "0+0:0;0+1:1;=1"
FLAGS = {"by_j": ["--weigh-by-j"], "relabelled": ["--verify-relabelled"],
         "all": ["--weigh-by-j", "--verify-relabelled"]}


def read(*texts: str) -> list:
    return [parse_verification(COMPACT, text, 2) for text in texts]


@pytest.mark.parametrize("how", FLAGS)
@pytest.mark.parametrize("recipe", ["tango", "fixed_verifier"])
def test_each_runs_with_a_trained_and_an_untrained_verifier(base, recipe, how):
    train(*AT_THE_END, "--recipe", recipe, "--num-steps", "2", *FLAGS[how])
    log = [r for r in records(base, "r") if r["role"] == "generator"]
    assert [r["gen/skipped"] for r in log] == [0, 0]
    assert all(("gen/verdict_skill" in r) == (how in ("by_j", "all")) for r in log)


# Relabelled

@pytest.mark.parametrize("texts, steps, verdict", [
    (["T;F;=T", "T;T;=T"], [T, F], T), (["T;F;=T", "F;T;=F", "T;T;=T"], [F, F], F),
    (["T;T;=T", "F;=F"], [T, T], F),      # no verdict for each step: only its final one counts
    (["T;=F", "T;T;="], [T, T], F), (["F;F;=", "T;T;=T"], [F, F], T),
    (["T;=T", "F;F;F;=T"], None, T), (["T", "x"], None, None)])
def test_a_step_and_the_whole_are_right_if_all_that_can_be_read_say_so(texts, steps, verdict):
    said = stricter(*read(*texts))
    assert (said.usable_steps, said.verdict) == (steps, verdict)
    assert ("no_final_verdict" in said.unmet) == (verdict is None)
    assert [stricter(v) for v in read(*texts)] == read(*texts)  # one alone says what it says


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
    t = random_play("tango", "--verify-relabelled")
    writing(t, {"solutions": [TWO_STEPS], "verdicts": ["T;T;=T"], "verdicts_relabelled": ["T;F;=F"]})
    solutions = t.solve("solutions", t.problems())
    judged = _judged.written(t, solutions)
    assert judged.steps == [[T, F]] * 32 and judged.finals == [F] * 32
    asked, other = t.asked["verdicts"], t.asked["verdicts_relabelled"]
    assert len(asked) == len(other) == 4 and [p.problem.index for p in asked] == [p.problem.index for p in other]
    for before, after in zip(asked, other, strict=True):  # modulo 3 the unit is 2
        assert after.solution.text == "0+0:0;0+2:2;=2" and after.solution.step_ends == before.solution.step_ends
        assert after.problem.prompt != before.problem.prompt or "1" not in before.problem.prompt


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
