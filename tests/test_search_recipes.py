"""
Search-R1, R1-Searcher, SSRL: what is read of a text, rewards by hand, masks, what a step of each is made of.

    python -m pytest tests/test_search_recipes.py -q
"""
import copy
from dataclasses import replace

import pytest
import torch
from test_dpo import are_equal, assert_refused, moved_by, random_play
from test_lookup import RIGHT
from test_search import vocabulary

from nanochat import engine
from nanochat.kernels.losses import PolicyLoss
from nanochat.recipes.search import r1_searcher, search_r1, ssrl
from nanochat.recipes.search.r1_searcher import is_formed, stage1_reward, stage2_reward
from nanochat.recipes.search.search_r1 import answers_once, read_queries
from nanochat.recipes.search.ssrl import form_reward, information_mask, reward_of
from nanochat.rl.credit.advantages import PRESETS, source_advantages
from nanochat.rl.credit.rewards import terminal_rewards
from nanochat.rl.play.play import Update
from tasks.formats import COMPACT, PAPER

RECIPES = {"search_r1": search_r1, "r1_searcher": r1_searcher, "ssrl": ssrl}


# What is read

def test_queries_and_their_information():
    read = lambda text: read_queries(COMPACT, text)
    assert read(RIGHT) == [("c", "7"), ("g", "3")] and read("") == read("4+7:1;=1") == []
    assert read("<c>();") == [("c", "")]
    assert {read(text) for text in ("<c>;=1", "<c>(7;", "(7);", "<c>(7)(8);", "<<c>(7);", "<c> (7);", "<c>(7);>",
                                    "<c>()(7)")} == {None}
    assert read_queries(PAPER, "<q>a</q><i>b\nc</i>") == [("a", "b\nc")]  # marks of several characters
    assert read_queries(PAPER, "<q>a</q> <i>b</i>") is None


@pytest.mark.parametrize("text, stopped, ok", [
    ("=3", True, True), ("4+7:1;=1", True, True), ("=3", False, False), ("", True, False), ("=", True, False),
    ("=3=3", True, False), ("=<c>(7)", True, False), ("4+7:1;", True, False)])
def test_one_answer_at_the_end(text, stopped, ok):
    assert answers_once(COMPACT, text, stopped) is ok


# Rewards

@pytest.mark.parametrize("text, stopped, num_queries, formed", [
    (RIGHT, True, 2, True), (RIGHT, False, 2, False), ("4+7:1;=1", True, 0, True),
    (RIGHT, True, 1, False),  # one of the two it wrote itself
    ("<c>();=1", True, 1, True), ("<c>;(7)=1", True, 1, False), ("<c>(7);", True, 1, False)])
def test_the_form_that_r1_searcher_asks_for(text, stopped, num_queries, formed):
    assert is_formed(COMPACT, text, stopped, num_queries) is formed


def test_stage_1_pays_the_search_and_the_form_and_the_answer_only_if_told():
    pairs = [(searches, formed) for searches in (0, 1) for formed in (0, 1)]
    for outcome in (True, False, None):
        assert [stage1_reward(*pair, outcome) for pair in pairs] == [0, 0.5, 0.5, 1]
    # the released code: +1 or -1 for the answer
    assert [stage1_reward(True, True, o, 1.0) for o in (True, False, None)] == [2.0, 0.0, None]
    assert stage1_reward(False, False, False, 1.0) == -1.0


def test_stage_2_pays_the_answer_less_a_penalty_for_its_form():
    assert [stage2_reward(f, o, 2.0) for f in (True, False) for o in (True, False, None)] == [1, 0, None, -1, -2, None]
    assert stage2_reward(False, True, 1.0) == 0


@pytest.mark.parametrize("text, stopped, reward", [
    (RIGHT, True, 1.0), ("<c>(7);4+7:1;=1", True, 1.0), ("4+7:1;=1", True, 0.5), (RIGHT, False, 0.0),
    ("<c>();=1", True, 0.0), ("<>(7);=1", True, 0.0), ("<c>;=1", True, 0.0), ("<c>(7);", True, 0.0)])
def test_the_form_that_ssrl_pays(text, stopped, reward):
    assert form_reward(COMPACT, text, stopped) == reward


def test_ssrl_pays_nine_tenths_for_the_answer_and_one_for_the_form():
    assert [reward_of(*pair) for pair in [(True, 1.0), (True, 0.0), (False, 0.5), (False, 0.0), (None, 1.0)]] == [
        pytest.approx(1.0), 0.9, 0.05, 0.0, None]


# Masks

def rollouts_of(t, texts: list[str]):
    problems = [t.task.problem("rl", i) for i in range(len(texts))]
    return t.written("generator", t.solve_prompts(problems), texts)


def test_what_the_policy_wrote_as_information_is_masked(base):
    t = random_play("ssrl", "--task", "lookup")
    texts = [RIGHT, "4+7:1;=1", "<c>(7", "(a)(b)é(c)"]
    mask = information_mask(t.tokenizer, COMPACT, rollouts_of(t, texts))
    found = ["".join(c for c, m in zip(text.encode().decode("latin-1"), row, strict=False) if m)
             for text, row in zip(texts, mask.tolist(), strict=True)]
    assert found == ["(7)(3)", "", "", "(a)(b)(c)"] and not mask[:, -1].any()


def test_a_token_is_masked_that_begins_in_information(base):
    t, tokenizer = random_play("ssrl", "--task", "lookup"), vocabulary(">(", ");")
    rollouts = replace(rollouts_of(t, ["x"]), tokens=torch.tensor([tokenizer.encode("<c>(7);1")]),
                       lengths=torch.tensor([6]))
    assert information_mask(tokenizer, COMPACT, rollouts).tolist() == [[False, False, False, True, True, False]]


# A step

WORDS = "<>abcde()=1;"


@pytest.fixture
def stepped(base, monkeypatch):
    """A function (recipe, flags) -> (play, the updates of one step) with models that write WORDS alone."""
    pick = engine.pick

    def step(recipe: str, *flags: str):
        t = random_play(recipe, "--task", "lookup", "--max-new-tokens", "14", *flags)
        keep = torch.full((t.tokenizer.vocab_size,), float("-inf"))
        keep[t.tokenizer.encode(WORDS) + t.tokenizer.stop_tokens[:1]] = 0.0
        monkeypatch.setattr(engine, "pick", lambda logits, *rest: pick(0.1 * logits + keep, *rest))
        return t, list(RECIPES[recipe].play(t))
    return step


def expected_rewards(recipe: str, t, rollouts, stage: int) -> list[float | None]:
    """What each solution earns, from its text."""
    outcomes = [t.task.check(None, text) for text in rollouts.texts]
    if recipe == "search_r1":
        return outcomes
    ended = rollouts.stopped.tolist()
    if recipe == "ssrl":
        forms = [form_reward(COMPACT, *row) for row in zip(rollouts.texts, ended, strict=True)]
        return [reward_of(*row) for row in zip(outcomes, forms, strict=True)]
    # each query that was answered has one "(" that was forced
    nums = [t.tokenizer.decode(row[forced].tolist()).count("(") for row, forced in zip(rollouts.tokens, rollouts.forced,
                                                                                       strict=True)]
    formed = [is_formed(COMPACT, *row) for row in zip(rollouts.texts, ended, nums, strict=True)]
    searches = [num > 0 and read_queries(COMPACT, text) is not None
                for num, text in zip(nums, rollouts.texts, strict=True)]
    return ([stage1_reward(*row) for row in zip(searches, formed, outcomes, strict=True)] if stage == 1 else
            [stage2_reward(*row, 2.0) for row in zip(formed, outcomes, strict=True)])


@pytest.mark.parametrize("recipe, stage", [("search_r1", 0), ("ssrl", 0), ("r1_searcher", 1), ("r1_searcher", 2)])
def test_a_step_pays_and_masks_as_it_should(stepped, recipe, stage):
    t, (update,) = stepped(recipe, *(["--stage1-steps", str(2 - stage)] if stage else []))
    (rollouts, advantages), = update.parts
    rewards = expected_rewards(recipe, t, rollouts, stage)
    assert rollouts.columns["reward"] == [None if r is None else float(r) for r in rewards]
    preset = PRESETS["reinforce++" if recipe == "r1_searcher" else "grpo"]
    torch.testing.assert_close(advantages, source_advantages(
        terminal_rewards(rewards, rollouts.lengths), rollouts.group_id, rollouts.tokens.shape[1], preset))
    assert rollouts.forced.any() and (update.loss, update.aggregation) == (None, None)
    if recipe == "ssrl":
        assert (rollouts.forced == information_mask(t.tokenizer, COMPACT, rollouts)).all()
    assert 0 < t.metrics["gen/masked"] < 1 and t.metrics.get("gen/stage", 0) == stage


def test_without_the_mask_information_is_trained_as_what_nobody_drew(stepped):
    t, (update,) = stepped("search_r1", "--no-mask-information")
    (rollouts, _), = update.parts
    assert rollouts.forced is None and t.metrics["gen/masked"] == 0
    drawn = ~rollouts.sampler_logprobs.isnan()
    assert drawn.any() and not drawn.all()


def test_what_ssrl_masks_gets_no_gradient(stepped):
    t, (update,) = stepped("ssrl")
    (rollouts, advantages), = update.parts
    model, found = t.roles["generator"].model, []
    start = copy.deepcopy(model.state_dict())
    for other in (advantages, advantages.masked_fill(rollouts.forced, 50.0)):
        model.load_state_dict(start)
        found.append(moved_by(t, Update("generator", [(rollouts, other)], PolicyLoss("reinforce"))))
    assert any(x.any() for x in found[0].values()) and are_equal(*found)


@pytest.mark.parametrize("recipe", RECIPES)
def test_both_ways_are_evaluated(stepped, monkeypatch, recipe):
    t, _ = stepped(recipe)
    t.evaluating, tools = True, []
    solve = t.solve
    monkeypatch.setattr(t, "solve", lambda *args, tool, **more: tools.append(tool) or solve(*args, tool=tool, **more))
    found = RECIPES[recipe].evaluate(t)
    other = "search" if recipe == "ssrl" else "memory"
    assert set(found) == {f"gen/{name}_{split}" for name in ("pass1", f"{other}_pass1") for split in ("in", "out")}
    searching = [tool for tool in tools if tool is not None]
    assert len(tools) == 4 and len(searching) == len(set(map(id, searching))) == 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_settings_that_cannot_work_are_refused(recipe):
    assert_refused(recipe, "--task chain: has no search", "--task", "chain")
    assert_refused(recipe, "--calculator: .* one tool", "--task", "lookup", "--calculator")
