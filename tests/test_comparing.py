"""
Solutions judged together: who stands together and in which place, how a judge of pairs is scored, what its judgments
are worth; and the rewards of the recipes that train one.

    python -m pytest tests/test_comparing.py -q
"""
import json
import random
import zlib
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import TASK_FLAGS, parse, rl_flags

from nanochat import recipes
from nanochat.common import BadInput
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.recipes.reward_models.rm_r1 import choice_reward
from nanochat.recipes.reward_models.spct import likelier_half, rank_reward, ranked_right
from nanochat.recipes.reward_models.think_rm import binary_reward, graded_reward, true_choice
from nanochat.rl.credit.advantages import PRESETS, difference_advantages, source_advantages
from nanochat.rl.credit.rewards import terminal_rewards
from nanochat.rl.play.play import Play
from nanochat.rl.run import steps
from nanochat.rl.verify.comparing import (GROUP_SCORES, Candidates, balanced_places, chose_right, lined_up, mean_scores,
                                          one_right, pair_scores, round_robin)
from nanochat.storage.files import path_of
from scripts import tango_rl
from tasks import make_task
from tasks.chain import Chain
from tasks.common import Problem
from tasks.formats import COMPACT


# Who stands together

@pytest.mark.parametrize("outcomes, num, places", [
    ([False, True, True, False], 2, [1, 0]), ([True, None, False], 2, [0, 2]),
    ([False, True, False, False], 3, [1, 0, 2]), ([False, True], 3, None), ([True, True], 2, None),
    ([False, False], 2, None), ([None, None], 2, None), ([], 2, None),
    ([None, False, True], 1, [1]), ([True, False], 1, [0]), ([None], 1, None), ([], 1, None)])
def test_a_lineup_is_one_right_entry_and_the_first_wrong_ones(outcomes, num, places):
    assert one_right(outcomes, num) == places


def test_the_right_one_is_moved_to_its_place():
    assert ["".join(lined_up(["r", "a", "b"], place)) for place in range(3)] == ["rab", "arb", "abr"]


@pytest.mark.parametrize("num, num_places", [(32, 2), (33, 2), (0, 2), (1, 2), (10, 3)])
def test_every_place_comes_equally_often_up_to_one(num, num_places):
    for seed in range(5):
        counts = Counter(balanced_places(num, num_places, random.Random(seed)))
        assert sum(counts.values()) == num
        assert max(counts.values(), default=0) - min((counts[i] for i in range(num_places)), default=0) <= 1
    assert balanced_places(5, 2, None) == [0, 1, 0, 1, 0]


def test_places_differ_from_step_to_step_and_hang_on_nothing_else():
    drawn = [balanced_places(32, 2, random.Random(f"0-{step}-places")) for step in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


# What a choice earns. A is place 0, B is place 1

CHOICES = [(1, 0, True), (-1, 1, True), (3, 0, True), (-3, 1, True), (1, 1, False), (-1, 0, False), (None, 0, False),
           (None, 1, False)]


@pytest.mark.parametrize("choice, right, hit", CHOICES)
def test_rm_r1_pays_1_for_the_right_choice_and_minus_1_for_all_else(choice, right, hit):
    assert chose_right(choice, right) is hit and choice_reward(choice, right) == (1.0 if hit else -1.0)


@pytest.mark.parametrize("choice, truth, binary, graded", [
    (2, 2, 1, 1), (1, 2, 1, 0.5), (3, 2, 1, 0.5), (-2, 2, 0, 0), (-2, -2, 1, 1), (-1, -2, 1, 0.5), (2, -2, 0, 0),
    (None, 2, 0, 0), (None, -2, 0, 0)])
def test_think_rm_pays_1_for_the_exact_grade_and_a_half_for_the_sign(choice, truth, binary, graded):
    assert binary_reward(choice, truth) == binary and graded_reward(choice, truth) == graded


def test_the_true_grade_counts_wrong_steps():
    task = make_task(parse(tango_rl, rl_flags("--recipe", "think_rm", "--chain-answer", "final")))
    problem = Problem("rl", 0, "1+1*2", "1")
    right, wrong, worse = "1+1:2;2*2:1;=1", "1+1:2;2*2:0;=0", "1+1:0;0*2:2;=2"
    choice = lambda texts, place: true_choice(task, Candidates(problem, texts, place))
    assert (choice([right, wrong], 0), choice([wrong, right], 1)) == (1, -1)
    assert (choice([right, worse], 0), choice([worse, right], 1)) == (2, -2)
    assert choice([right, "=0"], 0) == 1  # no step is wrong, the answer is


@pytest.mark.parametrize("scores, right, hit", [
    ([10, 3], 0, True), ([3, 10], 1, True), ([3, 10], 0, False), ([1, 0], 0, True),
    ([10, 10], 0, False), ([10, 10], 1, False), ([0, 0], 0, False),                  # a tie is wrong
    ([5, 9, 9], 1, False), ([5, 9, 8], 1, True), ([5, 9, 8], 0, False), (None, 0, False), (None, -1, False),
    ([1], 0, True), ([0], 0, False), ([0], -1, True), ([1], -1, False)])             # one: its score is the truth
def test_spct_pays_for_the_strictly_highest_score(scores, right, hit):
    assert ranked_right(scores, right) is hit and rank_reward(scores, right) == (1.0 if hit else -1.0)


def test_votes_are_added_up_and_ties_stay_wrong():
    votes = [[5, 6], None, [9, 6], [3, 5]]  # sums 17, 17
    assert mean_scores(votes, 2) == [17 / 3, 17 / 3] and not ranked_right(mean_scores(votes, 2), 0)
    assert ranked_right(mean_scores(votes[:3], 2), 0) and ranked_right(mean_scores(votes[:1], 2), 1)
    assert not ranked_right(mean_scores([None, None], 2), 0)
    assert not ranked_right(mean_scores([[1], [0]], 1), 0) and not ranked_right(mean_scores([[1], [0]], 1), -1)


def test_the_filter_keeps_the_likelier_half_and_at_least_one():
    assert likelier_half(["a", "b", "c", "d"], [-3.0, -1.0, -2.0, -1.0]) == ["b", "d"]
    assert likelier_half(["a", "b"], [-1.0, -1.0]) == ["a"] and likelier_half(["a"], [-9.0]) == ["a"]


# A judge of pairs: rows of the right place, the choice, the choice in the other order

def test_scores_of_a_judge_by_hand():
    rows = [[0, 1, -1],      # right in both orders
            [1, 1, 1],       # A twice: right once, inconsistent
            [0, -1, 1],      # wrong twice, consistently
            [1, -1, None]]   # right, then unreadable
    assert pair_scores(rows) == {"pair_acc": 4 / 8, "swap_consistent": 2 / 4, "first_chosen": 4 / 7,
                                 "parse_fail": 1 / 8, "num_pairs": 4}
    assert set(pair_scores([]).values()) == {None, 0}


def test_a_judge_that_always_says_a_has_half_of_the_pairs_and_no_consistency():
    scores = pair_scores([[place, 1, 1] for place in (0, 1, 0)])
    assert (scores["pair_acc"], scores["swap_consistent"], scores["first_chosen"]) == (0.5, 0, 1)


# What judgments are worth to a generator

def test_in_a_ring_each_stands_beside_those_after_it_and_in_every_place_once():
    groups = [7, 7, 2, 7, 2]  # rollouts 0, 1 and 3; 2 and 4
    assert round_robin(groups, 2) == [[0, 1], [1, 3], [3, 0], [2, 4], [4, 2]]
    assert round_robin(groups[:2] + groups[3:4], 3) == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    assert round_robin(groups, 1) == [[0], [1], [3], [2], [4]] and round_robin([], 2) == []


def scores(form: str, num: int, *texts: str, stopped: bool = True) -> list:
    t, many = SimpleNamespace(task=SimpleNamespace(fmt=COMPACT)), len(texts)
    return GROUP_SCORES[form](t, SimpleNamespace(texts=list(texts), stopped=torch.tensor([stopped] * many)), num)


def test_what_a_choice_gives_to_both():
    assert scores("pair", 2, "T;F;=A", "=B", "=", "=A2") == [[1, 0], [0, 1], None, None]
    assert scores("solve_pair", 2, "=A") == [[1, 0]] and scores("pair", 2, "=A", stopped=False) == [None]
    half_way = pytest.approx([1 / 3, 2 / 3])
    assert scores("graded", 2, "=A3", "=B3", "=B1", "=A") == [[1, 0], [0, 1], half_way, None]


def test_what_scores_give_to_each():
    assert scores("scores", 3, "=10,0,7", "=0,0,0", "=11,0,0", "=1,1") == [[1, 0, 0.7], [0, 0, 0], None, None]
    assert scores("scores", 1, "=1", "=0", "=2") == [[1], [0], None]  # of a single one 1 is the highest


def test_mean_scores_by_hand():
    assert mean_scores([[10, 4], None, [7, 4]], 2) == [8.5, 4.0] and mean_scores([None], 2) == [None, None]


# Think-RM's difference matrix

def test_difference_advantages_by_hand():
    # sums of rows over G: 1.5, -1.5; sum of squares 18 over 2 * 2 * 1: 4.5
    d = torch.tensor([[0.0, 3.0], [-3.0, 0.0]])
    torch.testing.assert_close(difference_advantages(d, eps=0.0), torch.tensor([1.5, -1.5]) / 4.5 ** 0.5)


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 0.0], [0.3, -2.0, 5.0], [1.0, 0.0]])
def test_on_differences_of_rewards_they_are_grpos_z_scores(rewards):
    r = torch.tensor(rewards)
    grpo = source_advantages(terminal_rewards(rewards, torch.ones(len(r), dtype=torch.long)),
                             torch.zeros(len(r), dtype=torch.long), 1, PRESETS["grpo"])[:, 0]
    torch.testing.assert_close(difference_advantages(r[:, None] - r[None, :]), grpo, rtol=1e-5, atol=1e-5)


def test_differences_that_are_none_and_a_group_of_one_get_nothing():
    assert difference_advantages(torch.zeros(3, 3)).tolist() == [0, 0, 0]
    assert difference_advantages(torch.zeros(1, 1)).tolist() == [0]


# Runs

JUDGE = ["--verifier-tag", "tiny-judge", "--num-steps", "2", "--num-solutions", "8", "--save-every", "0"]


def train(*flags: str) -> None:
    tango_rl.main(parse(tango_rl, rl_flags("--run", "r", *JUDGE, *flags)))


def records(base) -> list[dict]:
    return [json.loads(line) for line in (base / "runs" / "r" / "metrics.jsonl").read_text().splitlines()]


def half_right(self, problem, solution: str) -> bool:
    """An outcome that a model need not learn to reach: half of all texts are right."""
    return zlib.crc32(solution.encode()) % 2 == 0


RUNS = [("rm_r1", "|WA", []), ("rm_r1", "|A", ["--judge", "only"]), ("think_rm", "|A", []),
        ("think_rm", "|AS", ["--grades", "graded"]), ("spct", "|S", []), ("spct", "|S", ["--num-judged", "1"])]


@pytest.mark.parametrize("recipe, mark, flags", RUNS)
def test_the_verifier_judges_lineups_of_one_right_solution_and_alone_learns(base, monkeypatch, recipe, mark, flags):
    monkeypatch.setattr(Chain, "check", half_right)
    sample, drawn, updates = Play.sample, [], []

    def watched(t, draw, prompts, *args, **options):
        if draw == "verifications":
            drawn.extend(prompts)
        return sample(t, draw, prompts, *args, **options)
    apply = steps.apply_update
    monkeypatch.setattr(Play, "sample", watched)
    monkeypatch.setattr(steps, "apply_update", lambda t, wanted: updates.append(wanted) or apply(t, wanted))
    train("--recipe", recipe, *flags)
    tokenizer, num = load_tokenizer(path_of("tokenizer")), 1 if "1" in flags else 2
    for prompt in drawn:
        problem, *solutions, form = tokenizer.decode(prompt.ids[2:-2]).split("|")
        assert problem == prompt.problem.prompt and f"|{form}" == mark and len(solutions) == num
        if num == 2:
            assert sorted(half_right(None, None, text) for text in solutions) == [False, True]
    assert len(drawn) >= 2 and {wanted.role for wanted in updates} == {"verifier"}
    columns = [wanted.parts[0][0].columns for wanted in updates]
    places = [(place, [half_right(None, None, text) for _, text in turns])
              for column in columns for place, turns in zip(column["right"], column["turns"], strict=True)]
    assert all(place == (outcomes.index(True) if any(outcomes) else -1) for place, outcomes in places)
    assert {place for place, _ in places} == ({0, 1} if num == 2 else {0, -1})
    assert (base / "runs" / "r" / "report.html").stat().st_size > 10000


def test_a_step_without_a_pair_is_no_update_and_the_scores_are_none(base, monkeypatch):
    monkeypatch.setattr(Chain, "check", lambda self, problem, solution: False)
    train("--recipe", "rm_r1")
    assert [record["without_update"] for record in records(base)] == [1, 1]
    after = json.loads((base / "runs" / "r" / "summary.json").read_text())["after"]
    assert after["ver/pair_acc_in"] is None and after["ver/num_pairs_in"] == 0


@pytest.mark.parametrize("recipe, form", [("rm_r1", "solve_pair"), ("spct", "scores")])
def test_a_verifier_of_another_form_is_noticed(base, capsys, monkeypatch, recipe, form):
    monkeypatch.setattr(Chain, "check", half_right)
    train("--recipe", recipe, "--verifier-tag", "tiny-ver")
    assert capsys.readouterr().out.count(f"taught this form (chat_sft --verifier-form {form})?") == 1


@pytest.mark.parametrize("recipe, flags, words", [
    ("rm_r1", ["--judge", "both"], "--judge both: there are solve, only"),
    ("rm_r1", ["--num-solutions", "1"], "--num-solutions 1"),
    ("think_rm", ["--grades", "five"], "--grades five: there are binary, graded"),
    ("think_rm", ["--verifier-max-new-tokens", "0"], "--verifier-max-new-tokens 0"),
    ("think_rm", ["--grades", "graded", "--task", "math"], "no gold labels of steps"),
    ("spct", ["--num-judged", "0"], "--num-judged 0: must be from 1 to 26"),
    ("spct", ["--num-judged", "5"], "--num-solutions 4: must be at least --num-judged 5")])
def test_settings_that_cannot_work_are_refused(recipe, flags, words):
    args = parse(tango_rl, [*TASK_FLAGS, "--recipe", recipe, *flags])
    task = type("Unlabelled", (), {"name": "math", "has_step_labels": False}) if "math" in flags else None
    with pytest.raises(BadInput, match=words):
        recipes.load(recipe).check(args, task)
