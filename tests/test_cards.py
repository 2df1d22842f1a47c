"""Rollouts as rollouts.jsonl keeps them, and as the report shows them."""
import pytest
import torch
from test_report import ROLLOUT

from nanochat.rl.records.prompts import Prompt
from nanochat.rl.records.rollouts import Rollouts
from nanochat.rl.report.cards import card, cards, evenly, segments
from nanochat.rl.run.rollout_log import of_first_problems, token_ends
from nanochat.tokenizer import MIN_VOCAB_SIZE, Tokenizer
from tasks.common import Problem

BYTES = Tokenizer.train(iter([]), MIN_VOCAB_SIZE)  # ids below 256 are bytes


def test_all_rollouts_of_the_first_problems_are_kept():
    problems = [Problem("rl", 7, "a", "1"), Problem("rl", 3, "b", "1"), Problem("rl", 7, "a", "1")]
    group_id = torch.tensor([0, 0, 1, 1, 2, 2])
    zeros = torch.zeros(6, 1)
    rollouts = Rollouts([Prompt([0], problem, i) for i, problem in enumerate(problems)], group_id, zeros.long(), zeros,
                        group_id, group_id > 0)
    assert of_first_problems(rollouts, 1) == [0, 1, 4, 5] and of_first_problems(rollouts, 0) == []
    assert of_first_problems(rollouts, 2) == of_first_problems(rollouts, 9) == list(range(6))


@pytest.mark.parametrize("tokens, ends", [
    (BYTES.encode("ab"), [1, 2]),
    ([*BYTES.encode("a"), BYTES.assistant_end], [1, 1]),                       # the end token has no text
    (BYTES.encode("a\u00e9b"), [1, 1, 2, 3]),                                  # two bytes, one character
    ([*b"x", 0xC3, *b"y"], [1, 1, 3]),                         # a broken character is one, too
    ([97, 0xC3], [1, 2]),                                                      # and where the text breaks off
    ([], [])])
def test_tokens_end_where_their_text_does(tokens, ends):
    assert token_ends(BYTES, tokens) == ends
    text = BYTES.decode([t for t in tokens if t not in BYTES.stop_tokens])
    assert not ends or ends[-1] == len(text)


@pytest.mark.parametrize("start, end, expected", [
    (0, 6, [["abc", 1.0], ["d", -1.0], ["ef", None]]),  # no token says anything about "ef"
    (1, 4, [["bc", 1.0], ["d", -1.0]]), (2, 3, [["c", 1.0]]), (4, 6, [["ef", None]]), (3, 3, [])])
def test_text_is_cut_where_the_advantage_changes(start, end, expected):
    assert segments("abcdef", start, end, [2, 3, 4], [1.0, 1.0, -1.0]) == expected
    # the end token is a segment without text
    assert segments("ab", 0, 2, [1, 2, 2], [0.5, 0.5, 0.5]) == [["ab", 0.5], ["", 0.5]]
    assert segments("ab", 0, 1, [1, 2, 2], [0.5, 0.5, 0.5]) == [["a", 0.5]]
    assert segments("", 0, 0, [0], [0.5]) == [["", 0.5]] and segments("", 0, 0, [], []) == []


def test_a_rollout_is_cut_at_its_steps_and_a_verifiers_shows_its_own_advantages():
    shown = card(ROLLOUT)
    assert ([(s["text"], s["label"], s["verdict"], s["advantage"]) for s in shown["steps"]]
            == [([["3+5:8;", 0.5]], True, True, 0.5), ([["8*2:7;", -1.0]], False, False, -1.0)])
    assert shown["answer"] == [["=7", -2.0], ["", -2.0]]
    assert (shown["learned"], shown["advantage"], shown["judged"]) == ("answer", -2.0, True)
    assert shown["verification"] == [["3+5:8T;8*2:6F;=F", None]]  # it was not learned from
    shown = card({**ROLLOUT, "advantages": [1.0, 1.0, 0.0, 0.0, -1.0, -1.0, *[0.5] * 9]})
    assert shown["steps"][0]["text"] == [["3+", 1.0], ["5:", 0.0], ["8;", -1.0]]
    assert shown["steps"][0]["advantage"] == 0.0
    shown = card({**ROLLOUT, "role": "verifier", "verification": "TF", "token_ends": [1, 2], "advantages": [1.0, 0.0],
                  "step_verdicts": [True]})
    assert [(s["verdict"], s["advantage"]) for s in shown["steps"]] == [(True, None), (None, None)]
    assert shown["steps"][0]["text"] == [["3+5:8;", None]] and shown["answer"] == [["=7", None]]
    assert (shown["verification"], shown["learned"], shown["advantage"]) == ([["T", 1.0], ["F", 0.0]], "verification",
                                                                            0.5)


def test_what_was_written_after_a_solution_is_shown_with_its_advantages_and_its_facts():
    written = {**ROLLOUT, "verification": None, "step_verdicts": None, "completion": "=6", "token_ends": [1, 2],
               "advantages": [1.0, 0.0], "reward": 0.123456, "turns": [["critique", "no"]]}
    shown = card({**written, "weights": [1, 2], "nothing": None})
    assert (shown["completion"], shown["learned"], shown["advantage"]) == ([["=", 1.0], ["6", 0.0]], "completion", 0.5)
    assert [s["advantage"] for s in shown["steps"]] == [None, None] and shown["answer"] == [["=7", None]]
    assert (shown["reward"], shown["turns"], shown["facts"]) == (0.123456, [["critique", "no"]], {"weights": [1, 2]})
    assert card(ROLLOUT)["facts"] == {} and card(ROLLOUT)["turns"] == [] and "verification" not in shown
    plain = {**ROLLOUT, "role": "policy", "verification": None, "step_verdicts": None}
    assert [s["advantage"] for s in card(plain)["steps"]] == [0.5, -1.0]
    assert card({**ROLLOUT, "role": "policy"})["learned"] == "verification"
    assert card({**ROLLOUT, "role": "policy"}, solver="policy")["advantage"] == -2.0


@pytest.mark.parametrize("said, player", [
    ({"call": "judge"}, "generator: judge"), ({"call": "generator"}, "generator"), ({"call": ""}, "generator"),
    ({}, "generator")])  # older records do not say
def test_a_role_that_is_asked_for_several_things_is_several_players(said, player):
    shown = card({**ROLLOUT, **said})
    assert (shown["player"], shown["role"], shown["facts"]) == (player, "generator", {})


def test_rollouts_without_steps_or_judgment_and_older_ones_are_shown_too():
    shown = card({**ROLLOUT, "solution": "<b>", "step_spans": [], "step_ends": [], "step_labels": [],
                  "token_ends": [3], "advantages": [0.25], "verification": None, "step_verdicts": None,
                  "verdict": None})
    assert (shown["steps"], shown["answer"], shown["advantage"], shown["judged"]) == ([], [["<b>", 0.25]], 0.25, False)
    # these did not say where tokens end: no underlines
    shown = card({name: value for name, value in ROLLOUT.items() if name != "token_ends"})
    assert [s["text"] for s in shown["steps"]] == [[["3+5:8;", None]], [["8*2:7;", None]]]
    assert [s["advantage"] for s in shown["steps"]] == [0.5, -1.0]


def test_groups_are_kept_whole_and_evenly_spread():
    """Ten steps of two problems of three rollouts each; two verifications of the first one in every step."""
    rollouts = [{**ROLLOUT, "step": step, "problem": problem} for step in range(10) for problem in "aabbab"]
    rollouts += [{**ROLLOUT, "step": 0, "problem": "a", "role": "verifier"}] * 2
    shown = cards(rollouts, "generator", 12)
    assert [(c["group"], c["step"], c["problem"]) for c in shown] == [
        *[(0, 0, "a")] * 5, *[(1, 3, "a")] * 3, *[(2, 6, "b")] * 3]
    assert [c["role"] for c in shown[:5]] == ["generator"] * 3 + ["verifier"] * 2
    assert len(cards(rollouts, "generator", 1)) == 5 and cards([], "generator", 10) == []
    assert len(cards(rollouts, "generator", 1000)) == len(rollouts)
    assert evenly(list(range(10)), 5) == [0, 2, 4, 6, 8] and evenly([1, 2], 5) == [1, 2]
