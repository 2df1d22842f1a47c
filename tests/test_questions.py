"""The recipes and the task of the open questions (dev/experiments/recipes), and what a run costs."""
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import parse
from test_dpo import random_play, writing

from dev.experiments import arms_questions
from dev.experiments.arms_questions import ARMS, COST, QUESTIONS, STARTS, flops_by_step, row_of
from nanochat import recipes
from nanochat.common import BadInput
from nanochat.rl.report.report import Run
from scripts import tango_rl
from tasks import make_task

OWN = arms_questions.OWN
JUDGED = ["--warmup-steps", "1", "--verifier-max-new-tokens", "36"]
VERDICTS = ["T;=T", "T;=T", "F;=F", "x"] * 2  # eight verifications of a solution


def play_of(name: str, *flags: str):
    return random_play(f"{OWN}/{name}.py", *JUDGED, *flags), recipes.load(f"{OWN}/{name}.py")


def roles_of_steps(t, recipe, num: int) -> list[str]:
    """The roles that each step updates, in order. Updates are counted, and not made."""
    found = []
    for step in range(num):
        t.state.step, t.done, t.metrics = step, set(), {}
        found.append("+".join(update.role for update in recipe.play(t)))
        for role in found[-1].split("+"):
            t.steps[role] += 1
    return found


def test_both_models_are_updated_in_each_step_after_the_warm_up(base):
    t, recipe = play_of("simultaneous")
    assert roles_of_steps(t, recipe, 3) == ["verifier", "verifier+generator", "verifier+generator"]
    assert recipe.updates(t.args) == {"generator": 4, "verifier": 5}


def test_all_of_a_step_is_sampled_before_either_model_moves(base):
    t, recipe = play_of("simultaneous", "--warmup-steps", "0")
    assert next(recipe.play(t)).role == "verifier"
    assert t.done == {"judged", "verifications", "solutions", "verdicts"}


def test_the_verifier_has_a_step_after_verdicts_below_the_mean_of_those_before(base, monkeypatch):
    t, recipe = play_of("adaptive")
    skills = iter([0.6, 0.5, 0.55, None, 0.5])  # means before: -, .6, .55, -, .55

    def turn(t, earn):
        t.metrics["gen/verdicts/balanced_acc"] = next(skills)
        return [SimpleNamespace(role="generator")]
    monkeypatch.setattr(recipe.tango, "generator_turn", turn)
    monkeypatch.setattr(recipe.tango, "verifier_step", lambda t: [SimpleNamespace(role="verifier")])
    assert roles_of_steps(t, recipe, 8) == ["verifier", *["generator"] * 2, "verifier", *["generator"] * 3, "verifier"]


def test_an_ungrounded_verifier_earns_by_what_most_of_its_group_say(base, monkeypatch):
    """Two say T, one F, one cannot be read, twice: 1 for T, and .8 times the form of each; gold has no say."""
    t, recipe = play_of("ungrounded", "--no-class-weights")
    earned = []
    monkeypatch.setattr(recipe, "observe_verifier", lambda t, *rest: earned.append(rest[-1]))
    update, = recipe.verifier_step(writing(t, {"verifications": VERDICTS}))
    forms = [recipe.format_reward(v.unmet) for v in t.read_verifications(update.parts[0][0])]
    agree = [float(text == "T;=T") for text in VERDICTS] * (len(forms) // 8)
    assert earned == [[a + 0.8 * form for a, form in zip(agree, forms, strict=True)]] and update.role == "verifier"


def test_most_say_nothing_where_they_tie_or_none_can_be_read():
    most = recipes.load(f"{OWN}/ungrounded.py").most
    assert [most(row) for row in ([True, True, False], [False, None], [True, False], [None, None])] == [
        True, False, None, None]


def test_an_ungrounded_verifier_refuses_what_knows_the_outcomes():
    recipe = recipes.load(f"{OWN}/ungrounded.py")
    for flags in (["--verifier-balance", "--no-class-weights"], ["--class-weights"]):
        args = parse(tango_rl, ["--recipe", f"{OWN}/ungrounded.py", *flags])
        with pytest.raises(BadInput, match="know the outcomes"):
            recipe.check(args, make_task(args))


def test_a_proposer_earns_by_the_share_that_is_right_of_what_it_proposed(base):
    """Of two places one proposal is a problem, which replaces the given one, and one is none; 8 solutions each."""
    t, recipe = play_of("proposer", "--warmup-steps", "0", "--verifier-replay", "0.5")
    t = writing(t, {"proposals": ["1+1", "nothing"]})
    generator, proposer = recipe.play(t)
    solutions, proposals = generator.parts[0][0], proposer.parts[0][0]
    problems = solutions.problems()[::8]
    assert [problem.split for problem in problems] == ["proposed", "rl", "rl", "rl"]
    assert problems[0].prompt == "1+1" and (generator.role, proposer.role) == ("generator", "proposer")
    outcomes = [o for o in solutions.columns["outcome"][:8] if o is not None]
    share = sum(outcomes) / len(outcomes)
    assert 0 < share < 1 and proposals.columns["reward"] == [4 * share * (1 - share), 0.0]
    assert t.memory["pool"]["problem"].tolist() and set(t.memory["pool"]["problem"].tolist()) <= {1, 2, 3}


def task_of(*flags: str):
    return make_task(parse(tango_rl, [*flags, "--chain-min-steps", "1", "--chain-max-steps", "3", "--seed", "3"]))


def test_problems_in_order_are_chains_own_by_length(base):
    plain, text = task_of(), lambda task, split, num: [task.problem(split, index).prompt for index in range(num)]
    for first, sign in (("short", 1), ("long", -1)):
        task = task_of("--task", f"{OWN}/in_order.py", "--in-order-problems", "20", "--in-order-first", first)
        found = text(task, "rl", 24)
        assert found[:20] == sorted(text(plain, "rl", 20), key=lambda prompt: sign * len(prompt)) != found[:20:-1]
        assert found[20:] == text(plain, "rl", 24)[20:] and text(task, "test_in", 5) == text(plain, "test_in", 5)
        assert [task.problem("rl", index).index for index in (0, 19, 20)] == [0, 19, 20]


def test_a_question_has_arms_partners_and_a_baseline_that_there_are():
    assert {arm for question in QUESTIONS.values() for arm in question.arms} == set(ARMS)
    for question in QUESTIONS.values():
        assert question.baseline in question.arms
        assert {partner for partner in question.arms.values() if partner} <= set(question.arms)
    assert all(f"{{{name}}}" in " ".join([*ARMS.values(), *(flags for _, flags in STARTS.values())]) for name in STARTS)


def test_a_run_costs_by_its_tokens_and_the_weights_of_who_reads_and_learns(tmp_path, monkeypatch):
    """Weights 10 and 100. A generator step: 5 tokens learned and read, 7 verdicts: 8 * 10 * 5 + 2 * 100 * (5 + 7) =
    2800. A verifier step: 4 learned, 3 of solutions: 8 * 100 * (4 + 3) + 2 * 10 * 3 = 5660. Without a verifier 400."""
    monkeypatch.setattr(arms_questions, "num_weights", lambda start: start["size"])
    records = [{"gen/num_rollouts": 1, "gen/completions/mean_length": 5.0, "gen/sampled_tokens": 12},
               {"ver/num_rollouts": 2, "ver/completions/mean_length": 2.0, "ver/sampled_tokens": 7}]
    points = [{"gen_step": n, "sampled_tokens": n, "record": n, "gen/pass1_in": 0.5, "gen/entropy": 1} for n in (0, 2)]
    config = {"starts": {"generator": {"size": 10}, "verifier": {"size": 100}}}
    run = Run("questions-tango-s1", "questions", "tango", 1, config, {}, points, records, [], [], [])
    assert flops_by_step(run) == [0.0, 2800.0, 8460.0]
    alone = replace(run, config={"starts": {"generator": {"size": 10}}},
                    records=[records[0] | {"gen/sampled_tokens": 5}])
    assert flops_by_step(alone) == [0.0, 400.0]
    row = row_of("asymmetry", run)
    assert row.task == "asymmetry" and [point[COST] for point in row.points] == [0.0, 8460.0 / 1e12]
    assert "gen/entropy" not in row.points[0] and json.dumps(row.points)
