"""MARS: packing, advantages and draws by hand, what a trajectory's prompts hold, what is trained."""
import random
from collections import Counter

import pytest
import torch
from test_dpo import parsed, random_play

from nanochat import engine
from nanochat.common import BadInput
from nanochat.recipes.search import mars
from nanochat.recipes.search.mars import (asked, balanced, balanced_rows, first_fit_decreasing, last_turns, packed,
                                          run_episodes, system_advantages)
from nanochat.rl.credit.advantages import PRESETS
from nanochat.rl.learn.roles import needed
from tasks import make_task
from tasks.formats import COMPACT, PAPER

SMALL = ["--task", "lookup", "--lookup-noise", "3", "--chain-modulus", "3", "--max-new-tokens", "8",
         "--most-turns", "3", "--condense-tokens", "2", "--most-bins", "2", "--bin-size", "6", "--num-samples", "6"]


def test_first_fit_decreasing_by_hand_and_too_many_or_too_long_documents_are_refused():
    assert first_fit_decreasing([4, 8, 1, 4, 2, 1], 10) == [[1, 4], [0, 3, 2, 5]]  # 8 2 and 4 4 1 1, both full
    assert first_fit_decreasing([], 10) == [] and first_fit_decreasing([5, 5, 5], 10) == [[0, 1], [2]]
    assert first_fit_decreasing([11, 2, 10], 10) == [[0], [2], [1]] and first_fit_decreasing([0, 0], 1) == [[0, 1]]
    args = parsed("mars", "--task", "lookup", "--bin-size", "6", "--most-bins", "2")
    assert packed(["a1", "b2c3d4", "e5"], args) == ["b2c3d4", "a1e5"] and packed([], args) == []
    with pytest.raises(BadInput, match="--bin-size 6.* 3 prompts, and --most-bins is 2"):
        packed(["a1b2c3", "d4e5f6", "g7"], args)
    with pytest.raises(BadInput, match="--bin-size 6: a document has 8 characters"):
        packed(["a1", "b2c3d4e5"], args)
    args.advantage = "reinforce++"
    with pytest.raises(BadInput, match="--advantage reinforce.*: is over tokens"):
        mars.check(args, make_task(args))


@pytest.mark.parametrize("system1", mars.SYSTEM1)
def test_a_frozen_reader_is_loaded_only_where_it_reads(system1):
    loaded = needed(mars.ROLES, mars.draws(parsed("mars", "--task", "lookup", "--system1", system1)))
    assert ("reader" in loaded) == (system1 == "frozen") and "generator" in loaded


def test_either_system_is_normalised_over_its_own_samples():
    """Two trajectories, right and wrong, of which the right one asked three times and the wrong one once."""
    two = system_advantages([True, False], [0, 0], PRESETS["grpo"])
    torch.testing.assert_close(two, torch.tensor([0.5, -0.5]) / (0.5 ** 0.5 + 1e-6))
    one = system_advantages([True, True, True, False], [0, 0, 0, 0], PRESETS["grpo"])
    torch.testing.assert_close(one, torch.tensor([0.25, 0.25, 0.25, -0.75]) / (0.5 + 1e-6))  # std of 1 1 1 0: 1/2
    rewards = [True, False, None, True, True]  # of two problems: what is not known abstains, equal ones teach nothing
    assert system_advantages(rewards, [0, 0, 0, 1, 1], PRESETS["grpo"])[2:].tolist() == [0, 0, 0]
    assert system_advantages([], [], PRESETS["grpo"]).shape == (0,)


def test_a_draw_has_the_wanted_number_and_repeats_only_where_it_must_and_is_even():
    for num in (1, 4, 5, 6, 11):
        drawn = balanced([3, 4, 6, 8, 9], num, random.Random(num))
        assert len(drawn) == num and drawn == sorted(drawn) and set(drawn) <= {3, 4, 6, 8, 9}
        assert len(set(drawn)) == min(num, 5)
    assert balanced([], 4, random.Random(0)) == []
    even = Counter(balanced([0, 1, 2], 1, random.Random(i))[0] for i in range(2000))
    assert all(abs(even[i] / 2000 - 1 / 3) < 0.04 for i in range(3))  # over three standard errors


def test_a_problem_without_queries_draws_nothing_and_draws_do_not_depend_on_the_others():
    rows = balanced_rows([0, 0, 0, 2, 2], [7, 8, 9], {0: 2, 1: 2, 2: 3}, "0-1")
    assert len(rows) == 5 and {n < 3 for n in rows[:2]} == {True} and set(rows[2:]) == {3, 4}
    assert balanced_rows([0, 0, 0], [7], {0: 2}, "0-1") == rows[:2]  # as another rank has it


def test_a_turn_ends_with_a_query_or_not():
    assert [asked(COMPACT, text) for text in ("<c>", "4+7:1;<g>", "<a<c>", "<>")] == ["c", "g", "c", ""]
    assert {asked(COMPACT, text) for text in ("", "=3", "<c", "c>", "<c>;")} == {None}
    assert asked(PAPER, "<think>a<q>b c</q>") == "b c" and asked(PAPER, "<q>b</q> ") is None


@pytest.fixture
def t(base, monkeypatch):
    """A step of random models whose turns mostly end with a query."""
    return writing_words(monkeypatch)


def writing_words(monkeypatch, *flags: str):
    """Each token of a completion is one of a few, by its place: most turns are "<a>", "<b>" or begin so."""
    t = random_play("mars", *SMALL, *flags)
    END, pick = t.tokenizer.stop_tokens[0], engine.pick
    allowed = torch.full((4, t.tokenizer.vocab_size), float("-inf"))
    for place, texts in enumerate(("<=", "ab", ">", ";")):
        allowed[place, t.tokenizer.encode(texts)] = 0.0
    allowed[0, t.tokenizer.encode("<")] = 1.5
    allowed[2:, END] = torch.tensor([-3.0, 2.0])
    monkeypatch.setattr(engine, "pick", lambda logits, keys, place, *rest: pick(
        0.1 * logits + allowed[place.clamp(max=3)], keys, place, *rest))
    t.task.facts |= {"a": "1", "b": "2"}
    t.task.check = lambda problem, text: None if ";" in text else text[1:2] == "a"
    return t


def test_a_turn_stands_after_what_was_asked_and_found_before(t):
    problems = [p for p in t.problems() for _ in range(6)]
    turns, condensed = run_episodes(t, problems)
    contexts, nums, last = [""] * len(problems), [0] * len(problems), [""] * len(problems)
    live = list(range(len(problems)))
    for k in range(3):
        said, written = (rollouts.select([n for n, call in enumerate(rollouts.draws) if call == f"{label}{k}"])
                         for rollouts, label in ((turns, "turn"), (condensed, "condense")))
        assert said.columns["trajectory"] == live
        assert [p.ids for p in said.prompt_of()] == [
            t.tokenizer.render_prompt(f"{COMPACT.quote(contexts[n])}|G|{problems[n].prompt}") for n in live]
        texts = dict(zip(live, said.texts, strict=True))
        for n, text in texts.items():
            last[n] = text
        live = [n for n, text in texts.items() if asked(COMPACT, text) is not None] if k < 2 else []
        expected = [(n, text) for n in live for text in packed(t.task.documents(asked(COMPACT, texts[n])), t.args)]
        of_written = written.columns["trajectory"]
        assert list(zip(of_written, written.columns["document"], strict=True)) == expected
        assert [p.ids for p in written.prompt_of()] == [t.tokenizer.render_prompt(
            f"{text}|{COMPACT.quote(asked(COMPACT, texts[n]))}|C") for n, text in expected]
        for n in live:
            found = "".join(text for m, text in zip(of_written, written.texts, strict=True) if m == n)
            contexts[n] += f"{texts[n]}({found});"
            nums[n] += 1
    assert mars.num_queries(turns) == nums and max(nums) == 2
    assert last_turns(turns).texts == last and last_turns(turns).problems() == problems


def test_both_systems_get_their_trajectorys_advantage_and_no_token_of_the_other(t):
    """The last turn alone is checked."""
    check, seen = t.task.check, []
    t.task.check = lambda problem, text: seen.append(text) or check(problem, text)
    (update,) = mars.play(t)
    (turns, A2), (condensed, A1) = update.parts
    last = last_turns(turns)
    assert sorted(seen) == sorted(last.texts) and last.columns["outcome"] == [check(None, text) for text in last.texts]
    assert turns.forced is None and condensed.forced is None  # what each wrote itself, and nothing else
    G, of_turn = 6, turns.columns["trajectory"]
    outcome_of = dict(zip(of_turn, turns.columns["outcome"], strict=True))
    two = system_advantages([outcome_of[k] for k in range(len(outcome_of))], [k // G for k in range(len(outcome_of))],
                            PRESETS["grpo"])
    assert torch.equal(A2, two[of_turn][:, None].expand_as(A2)) and A2.abs().max() > 0
    assert condensed.columns["outcome"] == [outcome_of[k] for k in condensed.columns["trajectory"]]
    num_condensed, num_turns = (Counter(k // G for k in numbers) for numbers in (condensed.columns["trajectory"],
                                                                                of_turn))
    assert num_condensed == num_turns and max(num_turns.values()) > G  # of each problem; all of them ask
    assert t.metrics["gen/condensed/share_of_samples"] == 0.5


def test_drawing_samples_changes_no_advantage(base, monkeypatch):
    """Of each sample that was drawn, the advantage is the one that it has without a draw."""
    found = {}
    for flag in ("--no-balance", "--balance"):
        t = writing_words(monkeypatch, flag)
        (update,) = mars.play(t)
        rollouts, advantages = update.parts[1]
        rows = zip(rollouts.columns["trajectory"], rollouts.columns["document"], rollouts.columns["query"],
                   rollouts.completions(), advantages[:, 0].tolist(), strict=True)
        found[flag] = [(k, document, query, tuple(tokens), a) for k, document, query, tokens, a in rows]
        monkeypatch.undo()
        monkeypatch.setenv("NANOCHAT_BASE_DIR", str(base))
    assert found["--balance"] and set(found["--balance"]) <= set(found["--no-balance"])
    assert len(found["--balance"]) != len(found["--no-balance"])
    assert len({a for *_, a in found["--balance"]}) > 2  # of several problems, right and wrong


@pytest.mark.parametrize("system1, reader, num_parts", [
    ("trained", "generator", 2), ("shared", "generator", 1), ("frozen", "reader", 1)])
def test_who_reads_and_whether_it_learns_from_it(base, monkeypatch, system1, reader, num_parts):
    """In training and in evaluations. A frozen reader has no optimizer."""
    t, readers, sampled = writing_words(monkeypatch, "--system1", system1), set(), set()
    sample = t.sampler.sample
    t.sampler.sample = lambda model, prompts, num, stream, *rest: (
        (readers if stream[0].startswith("condense") else sampled).add(id(model))
        or sample(model, prompts, num, stream, *rest))
    (update,) = mars.play(t)
    assert len(update.parts) == num_parts and "trajectory" in update.parts[0][0].columns
    assert t.metrics["gen/condensed/share_of_samples"] == (0.5 if num_parts == 2 else 0)
    t.evaluating = True
    mars.evaluate(t)
    assert readers == {id(t.roles[reader].model)} and sampled == {id(t.roles["generator"].model)}
    assert t.roles["reader"].optimizer is None and update.role == "generator"


@pytest.mark.parametrize("condense", ["2", "12"])
def test_the_evaluation_is_of_both_systems_each_with_its_own_limit(base, monkeypatch, condense):
    t = writing_words(monkeypatch, "--condense-tokens", condense)
    t.evaluating, limits = True, set()
    sample = t.sampler.sample
    t.sampler.sample = lambda model, prompts, num, stream, limit, *rest: (
        limits.add((stream[0][:-1], limit)) or sample(model, prompts, num, stream, limit, *rest))
    found = mars.evaluate(t)
    assert limits == {("turn", 8), ("condense", int(condense))}
    assert set(found) == {f"gen/{name}_{split}" for name in ("pass1", "queries") for split in ("in", "out")}
    assert all(0 <= value <= 2 for value in found.values())
