"""
Solutions judged together: who stands together and in which place, how a judge of pairs is scored, what its judgments
are worth; and the rewards of the recipes that train one.
"""
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from test_dpo import drawn_by, parsed, random_play, writing

from nanochat import recipes
from nanochat.common import BadInput
from nanochat.recipes.reward_models.spct import likelier_half, ranked_right
from nanochat.recipes.reward_models.think_rm import binary_reward, graded_reward, true_choice
from nanochat.rl.credit.advantages import difference_advantages
from nanochat.rl.verify.comparing import (GROUP_SCORES, Candidates, balanced_places, chose_right, lined_up, mean_vote,
                                          one_right, pair_scores, round_robin)
from nanochat.rl.verify.forms import form_prompt
from tasks import make_task
from tasks.common import Problem
from tasks.formats import COMPACT

SHORT = ["--max-new-tokens", "16", "--verifier-max-new-tokens", "24"]


def test_candidates_are_one_right_entry_and_the_first_wrong_ones_and_a_ring_shows_each_in_every_place():
    T, F = True, False
    assert one_right([F, T, T, F], 2) == [1, 0] and one_right([T, None, F], 2) == [0, 2]
    assert one_right([F, T, F, F], 3) == [1, 0, 2] and one_right([F, T], 3) is None
    assert {one_right(outcomes, 2) for outcomes in ((T, T), (F, F), (None, None), ())} == {None}
    assert one_right([None, F, T], 1) == [1] and one_right([T, F], 1) == [0]
    assert one_right([None], 1) is one_right([], 1) is None
    groups = [7, 7, 2, 7, 2]  # rollouts 0, 1 and 3; 2 and 4
    assert round_robin(groups, 2) == [[0, 1], [1, 3], [3, 0], [2, 4], [4, 2]]
    assert round_robin(groups[:2] + groups[3:4], 3) == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    assert round_robin(groups, 1) == [[0], [1], [3], [2], [4]] and round_robin([], 2) == []


def test_every_place_comes_equally_often_up_to_one_in_an_order_of_its_own():
    for num, num_places in ((32, 2), (33, 2), (0, 2), (1, 2), (10, 3)):
        counts = Counter(balanced_places(num, num_places, random.Random(num)))
        assert sum(counts.values()) == num
        assert max(counts.values(), default=0) - min((counts[i] for i in range(num_places)), default=0) <= 1
    assert balanced_places(5, 2, None) == [0, 1, 0, 1, 0]
    drawn = [balanced_places(32, 2, random.Random(seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert ["".join(lined_up(["r", "a", "b"], place)) for place in range(3)] == ["rab", "arb", "abr"]


def test_a_right_choice_is_for_the_place_of_the_right_solution():
    for choice, right, hit in ((1, 0, True), (-1, 1, True), (3, 0, True), (-3, 1, True), (1, 1, False), (-1, 0, False),
                               (None, 0, False), (None, 1, False)):
        assert chose_right(choice, right) is hit


@pytest.mark.parametrize("recipe, texts, metric", [("rm_r1", ["=A", "=B", "x"], "pair_acc"),
                                                   ("spct", ["=9,3", "=3,9", "=3,3"], "ranked_right")])
def test_rm_r1_and_spct_pay_1_for_the_right_one_and_minus_1_for_all_else(base, recipe, texts, metric):
    t = writing(random_play(recipe, *SHORT, "--num-solutions", "8", "--examples-per-step", "8"),
                {"verifications": texts})
    update, = recipes.load(recipe).play(t)
    rollouts, _ = update.parts[0]
    hits = [text == texts[right] for text, right in zip(rollouts.texts, rollouts.columns["right"], strict=True)]
    assert rollouts.columns["reward"] == [1.0 if hit else -1.0 for hit in hits] and len(set(rollouts.texts)) == 3
    assert t.metrics[f"ver/{metric}"] == pytest.approx(sum(hits) / len(hits))


@pytest.mark.parametrize("choice, truth, binary, graded", [
    (2, 2, 1, 1), (1, 2, 1, 0.5), (3, 2, 1, 0.5), (-2, 2, 0, 0), (-2, -2, 1, 1), (-1, -2, 1, 0.5), (2, -2, 0, 0),
    (None, 2, 0, 0), (None, -2, 0, 0)])
def test_think_rm_pays_1_for_the_exact_grade_and_a_half_for_the_sign(choice, truth, binary, graded):
    assert binary_reward(choice, truth) == binary and graded_reward(choice, truth) == graded


def test_the_true_grade_counts_wrong_steps():
    task = make_task(parsed("think_rm", "--chain-answer", "final"))
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
def test_spct_asks_for_the_strictly_highest_score(scores, right, hit):
    assert ranked_right(scores, right) is hit


def test_votes_are_added_up_ties_stay_wrong_and_the_likelier_half_is_kept():
    votes = [[5, 6], None, [9, 6], [3, 5]]  # sums 17, 17
    assert mean_vote([None], 2) == [None, None]
    assert mean_vote(votes, 2) == [17 / 3, 17 / 3] and not ranked_right(mean_vote(votes, 2), 0)
    assert ranked_right(mean_vote(votes[:3], 2), 0) and ranked_right(mean_vote(votes[:1], 2), 1)
    assert not ranked_right(mean_vote([None, None], 2), 0)
    assert not ranked_right(mean_vote([[1], [0]], 1), 0) and not ranked_right(mean_vote([[1], [0]], 1), -1)
    assert likelier_half(["a", "b", "c", "d"], [-3.0, -1.0, -2.0, -1.0]) == ["b", "d"]
    assert likelier_half(["a", "b"], [-1.0, -1.0]) == ["a"] and likelier_half(["a"], [-9.0]) == ["a"]


def test_scores_of_a_judge_by_hand():
    rows = [[0, 1, -1],      # right in both orders
            [1, 1, 1],       # A twice: right once, inconsistent
            [0, -1, 1],      # wrong twice, consistently
            [1, -1, None]]   # right, then unreadable
    assert pair_scores(rows) == {"pair_acc": 4 / 8, "swap_consistent": 2 / 4, "first_chosen": 4 / 7,
                                 "parse_fail": 1 / 8, "num_pairs": 4}
    assert set(pair_scores([]).values()) == {None, 0}
    always_a = pair_scores([[place, 1, 1] for place in (0, 1, 0)])
    assert (always_a["pair_acc"], always_a["swap_consistent"], always_a["first_chosen"]) == (0.5, 0, 1)




def scores(form: str, num: int, *texts: str, stopped: bool = True) -> list:
    t, many = SimpleNamespace(task=SimpleNamespace(fmt=COMPACT)), len(texts)
    return GROUP_SCORES[form](t, SimpleNamespace(texts=list(texts), stopped=torch.tensor([stopped] * many)), num)


def test_what_choices_and_scores_give_to_each():
    assert scores("pair", 2, "T;F;=A", "=B", "=", "=A2") == [[1, 0], [0, 1], None, None]
    assert scores("solve_pair", 2, "=A") == [[1, 0]] and scores("pair", 2, "=A", stopped=False) == [None]
    half_way = pytest.approx([1 / 3, 2 / 3])
    assert scores("graded", 2, "=A3", "=B3", "=B1", "=A") == [[1, 0], [0, 1], half_way, None]
    assert scores("scores", 3, "=10,0,7", "=0,0,0", "=11,0,0", "=1,1") == [[1, 0, 0.7], [0, 0, 0], None, None]
    assert scores("scores", 1, "=1", "=0", "=2") == [[1], [0], None]  # of a single one 1 is the highest


def test_difference_advantages_by_hand():
    # sums of rows over G: 1.5, -1.5; sum of squares 18 over 2 * 2 * 1: 4.5
    d = torch.tensor([[0.0, 3.0], [-3.0, 0.0]])
    torch.testing.assert_close(difference_advantages(d, eps=0.0), torch.tensor([1.5, -1.5]) / 4.5 ** 0.5)
    for num in (3, 1):  # differences that are none, and a group of one
        assert difference_advantages(torch.zeros(num, num)).tolist() == [0] * num


STEPS = [("rm_r1", "solve_pair", []), ("rm_r1", "pair", ["--judge", "only"]), ("think_rm", "pair", []),
         ("think_rm", "graded", ["--grades", "graded"]), ("spct", "scores", []),
         ("spct", "scores", ["--num-judged", "1"])]


@pytest.mark.parametrize("recipe, form, flags", STEPS)
def test_the_verifier_judges_candidates_of_whom_one_is_right_and_alone_learns(base, recipe, form, flags):
    t, num = random_play(recipe, *SHORT, "--num-solutions", "8", "--examples-per-step", "8", *flags), 2 - ("1" in flags)
    drawn, (update,) = drawn_by(t), recipes.load(recipe).play(t)
    (rollouts, _), = update.parts
    assert update.role == "verifier" and drawn["verifications"] is rollouts
    rows = zip(rollouts.prompt_of(), rollouts.columns["right"], rollouts.columns["turns"], strict=True)
    for prompt, right, turns in rows:
        texts = [text for _, text in turns]
        outcomes = [t.task.check(None, text) for text in texts]
        assert prompt.ids == form_prompt(t.tokenizer, t.task.fmt, form, prompt.problem.prompt, texts)
        assert len(texts) == num and outcomes.count(False) == num - outcomes.count(True)
        assert right == (outcomes.index(True) if any(outcomes) else -1) and (num == 1 or any(outcomes))
    assert {*rollouts.columns["right"]} == ({0, 1} if num == 2 else {0, -1})


def test_a_step_without_a_pair_is_no_update_and_the_scores_are_none(base):
    t = random_play("rm_r1", *SHORT)
    t.task.check = lambda problem, text: False
    assert list(recipes.load("rm_r1").play(t)) == []
    t.evaluating = True
    scores = recipes.load("rm_r1").evaluate(t)
    assert scores["ver/pair_acc_in"] is None and scores["ver/num_pairs_in"] == 0


@pytest.mark.parametrize("recipe, form", [("rm_r1", "solve_pair"), ("spct", "scores")])
def test_a_verifier_of_another_form_is_noticed(base, capsys, recipe, form):
    t = random_play(recipe, *SHORT)
    t.evaluating = True
    recipes.load(recipe).evaluate(t)
    assert capsys.readouterr().out.count(f"taught this form (chat_sft --verifier-form {form})?") == 1


def test_settings_that_cannot_work_are_refused():
    task = SimpleNamespace(name="math", has_step_labels=False)
    with pytest.raises(BadInput, match="--grades graded: task math has no gold labels of steps"):
        recipes.load("think_rm").check(parsed("think_rm", "--grades", "graded"), task)
