"""Search-R1, R1-Searcher, SSRL: what is read of a text, rewards by hand, masks, what a step of each is made of."""
import copy
from dataclasses import replace

import pytest
import torch
from test_dpo import are_equal, moved_by, parsed, random_play
from test_lookup import RIGHT
from test_search import vocabulary, writing_only

from nanochat.kernels.losses import PolicyLoss
from nanochat.recipes.search import r1_searcher, search_r1, ssrl
from nanochat.recipes.search.r1_searcher import is_formed
from nanochat.recipes.search.search_r1 import answers_once, read_queries
from nanochat.recipes.search.ssrl import form_reward, information_mask
from nanochat.rl.credit.advantages import PRESETS, source_advantages
from nanochat.rl.credit.rewards import terminal_rewards
from nanochat.rl.play.play import Update
from tasks.formats import COMPACT, PAPER

RECIPES = {"search_r1": search_r1, "r1_searcher": r1_searcher, "ssrl": ssrl}


def test_queries_and_their_information():
    read = lambda text: read_queries(COMPACT, text)
    assert read(RIGHT) == [("c", "7"), ("g", "3")] and read("") == read("4+7:1;=1") == []
    assert read("<c>();") == [("c", "")]
    assert {read(text) for text in ("<c>;=1", "<c>(7;", "(7);", "<c>(7)(8);", "<<c>(7);", "<c> (7);", "<c>(7);>",
                                    "<c>()(7)")} == {None}
    assert read_queries(PAPER, "<q>a</q><i>b\nc</i>") == [("a", "b\nc")]  # marks of several characters
    assert read_queries(PAPER, "<q>a</q> <i>b</i>") is None


def test_one_answer_at_the_end():
    ends = lambda text, stopped=True: answers_once(COMPACT, text, stopped)
    assert ends("=3") is ends("4+7:1;=1") is True and ends("=3", False) is False
    assert {ends(text) for text in ("", "=", "=3=3", "=<c>(7)", "4+7:1;")} == {False}


def test_the_form_that_r1_searcher_asks_for():
    formed = lambda text, num, stopped=True: is_formed(COMPACT, text, stopped, num)
    assert formed(RIGHT, 2) is formed("4+7:1;=1", 0) is formed("<c>();=1", 1) is True
    assert formed(RIGHT, 2, False) is formed(RIGHT, 1) is False  # one of the two it wrote itself
    assert formed("<c>;(7)=1", 1) is formed("<c>(7);", 1) is False


def test_the_form_that_ssrl_pays():
    pays = lambda text, stopped=True: form_reward(COMPACT, text, stopped)
    assert pays(RIGHT) == pays("<c>(7);4+7:1;=1") == 1 and pays("4+7:1;=1") == 0.5 and pays(RIGHT, False) == 0
    assert {pays(text) for text in ("<c>();=1", "<>(7);=1", "<c>;=1", "<c>(7);")} == {0}


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


@pytest.fixture
def stepped(base, monkeypatch):
    """(recipe, flags) -> a play whose models write queries and answers, and the updates of one step."""
    def step(recipe: str, *flags: str):
        t = writing_only("<>abcde()=1;", monkeypatch, recipe, "--max-new-tokens", "14", *flags)
        return t, list(RECIPES[recipe].play(t))
    return step


def earned(recipe: str, stage: int, outcome: bool | None, text: str, ended: bool, forced: str) -> float | None:
    """What a solution earns by its text and what was forced in it."""
    if recipe == "search_r1":
        return outcome
    if recipe == "ssrl":
        return None if outcome is None else 0.9 * outcome + 0.1 * form_reward(COMPACT, text, ended)
    num = forced.count("(")  # of each query that was answered
    formed, searches = is_formed(COMPACT, text, ended, num), num > 0 and read_queries(COMPACT, text) is not None
    if stage == 1:
        return (searches + formed) / 2
    return None if outcome is None else outcome - 2 * (not formed)


@pytest.mark.parametrize("recipe, stage", [("search_r1", 0), ("ssrl", 0), ("r1_searcher", 1), ("r1_searcher", 2)])
def test_a_step_pays_and_masks_as_it_should(stepped, recipe, stage):
    t, (update,) = stepped(recipe, *(["--stage1-steps", str(2 - stage)] if stage else []))
    (rollouts, advantages), = update.parts
    forced = [t.tokenizer.decode(row[mask].tolist())
              for row, mask in zip(rollouts.tokens, rollouts.forced, strict=True)]
    rewards = [earned(recipe, stage, t.task.check(None, text), text, *more)
               for text, *more in zip(rollouts.texts, rollouts.stopped.tolist(), forced, strict=True)]
    assert rollouts.columns["reward"] == [None if r is None else float(r) for r in rewards]
    preset = PRESETS["reinforce++" if recipe == "r1_searcher" else "grpo"]
    torch.testing.assert_close(advantages, source_advantages(
        terminal_rewards(rewards, rollouts.lengths), rollouts.group_id, rollouts.mask, preset))
    assert rollouts.forced.any() and (update.loss, update.aggregation) == (None, None)
    if recipe == "ssrl":
        assert (rollouts.forced == information_mask(t.tokenizer, COMPACT, rollouts)).all()
    assert 0 < t.metrics["gen/masked"] < 1 and t.metrics.get("gen/stage", 0) == stage


def test_the_weight_of_the_kl_is_the_authors():
    """R1-Searcher's for Llama, MARS's and SSRL's."""
    found = {recipe: parsed(recipe, "--task", "lookup").kl_coef for recipe in ("r1_searcher", "mars", "ssrl")}
    assert found == {"r1_searcher": 1e-4, "mars": 0, "ssrl": 1e-3}


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
    assert set(found) == {f"gen/{name}_{split}" for name in ("pass1", "uncounted", f"{other}_pass1")
                          for split in ("in", "out")}
    searching = [tool for tool in tools if tool is not None]
    assert len(tools) == 4 and len(searching) == len(set(map(id, searching))) == 2
