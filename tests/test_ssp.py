"""Search Self-Play: questions that lookup reads, the filter, what both roles earn, what is trained, and the pool."""
import random
from dataclasses import replace

import pytest
from test_dpo import parsed, random_play, writing

from nanochat import recipes
from nanochat.common import BadInput
from nanochat.recipes.search.ssp import FILTERED, why_filtered
from nanochat.rl.play.updates import apply_update
from tasks import make_task
from tasks.common import Problem, in_split

ssp = recipes.load("ssp")
FLAGS = ["--task", "lookup", "--chain-modulus", "10", "--chain-min-steps", "1", "--chain-max-steps", "3"]


def lookup(*flags: str):
    return make_task(parsed("ssp", *FLAGS, *flags))


def keys_to(task, *digits: int) -> list[str]:
    """Different keys that stand for these digits."""
    found: list[str] = []
    for digit in digits:
        found.append(next(key for key, value in task.facts.items() if value == str(digit) and key not in found))
    return found


def test_a_question_stands_after_the_search_and_has_the_true_answer():
    task = lookup()
    c, = keys_to(task, 7)
    problem, reason = task.read_problem(f"<{c}>(7);4+7:1;=4+{c}", 5)
    assert (problem, reason) == (Problem("proposed", 5, f"4+{c}", "1"), "")
    assert task.queries_of(problem.prompt) == [c] and task.queries_of("4+2") == []
    assert task.read_problem(f"=4+{c}*{c}", 0)[0].answer == "7"                   # (4 + 7) * 7 = 77
    assert task.read_problem(f"anything=4+{c}", 0)[0].prompt == f"4+{c}"


def test_what_is_no_question_is_refused_for_a_reason():
    read = lambda text: lookup().read_problem(text, 0)
    assert {read(text) for text in ("", "4+c", "=", "=4+", "=c+4", "=4+c=1", "=4+c;", "=4")} == {(None, "no_problem")}
    assert read("=4+1+1+1+1") == (None, "too_long")


def test_a_question_that_comes_to_a_text_of_a_test_split_is_held_out():
    """Also where a key stands for a digit of it."""
    task = lookup()
    plain = next(text for text in (f"{a}+{b}" for a in range(10) for b in range(10)) if in_split(text, "test_in"))
    key, = keys_to(task, int(plain[2]))
    assert task.read_problem(f"={plain[:2]}{key}", 0) == task.read_problem(f"={plain}", 0) == (None, "held_out")
    tested = {task.problem("test_in", i).prompt for i in range(20)}
    assert {task.read_problem(f"={text}", 0)[1] for text in tested} == {"held_out"}


def test_a_demonstration_leads_from_an_answer_to_a_question_that_may_have_it():
    task, right = lookup(), []
    for i in range(100):
        problem = task.problem("sft", i)
        quoted, text = task.propose_demo(problem, random.Random(i))
        assert text == task.solution_demo(problem, random.Random(i)).replace(f"={quoted['hint']}", f"={problem.prompt}")
        read, reason = task.read_problem(text, i)
        right.append(why_filtered(task, read, problem.answer, text, 1) if read else reason)
    assert 0 < right.count("") < 100 and set(right) <= {"", "too_long", *FILTERED}


def question(task, *, shown: str, asked: list[str], prompt: str) -> str:
    problem = replace(task.read_problem(f"={prompt}", 0)[0])
    text = "".join(f"<{key}>({task.facts[key]});" for key in asked) + f"={prompt}"
    return why_filtered(task, problem, shown, text, 2)


def test_a_question_passes_with_two_queries_that_are_enough():
    task = lookup()
    c, g = keys_to(task, 7, 3)
    prompt = f"4+{c}*{g}"                                                             # (4 + 7) * 3 = 33
    assert question(task, shown="3", asked=[c, g], prompt=prompt) == ""
    assert question(task, shown="2", asked=[c, g], prompt=prompt) == "another_answer"
    assert question(task, shown="3", asked=[c], prompt=prompt) == "few_queries"
    assert question(task, shown="3", asked=[c, g, c], prompt=prompt) == "query_twice"
    other, = keys_to(task, 5)
    assert question(task, shown="3", asked=[c, other], prompt=prompt) == "not_found"  # g is from memory
    assert question(task, shown="3", asked=[c, other, g], prompt=prompt) == ""
    assert question(task, shown="1", asked=[c, other], prompt=f"4+{c}") == ""
    assert question(task, shown="1", asked=[c, other], prompt=f"4+{c}*1") == "answer_shown"
    assert why_filtered(task, task.read_problem(f"=4+{c}", 0)[0], "1", f"<{c}>7;<{g}=4+{c}", 1) == "few_queries"


def play_with(proposed, answered: list[str], *flags: str):
    """A step of two answers, 3 and 5, of which proposed(task) gives the proposals; the solver's texts come over and
    over."""
    t = random_play("ssp", *FLAGS, "--examples-per-step", "2", "--num-samples", "2", *flags)
    t.task.check = lambda problem, text: t.task.fmt.answer(text) == problem.answer
    problem_of = t.task.problem
    t.task.problem = lambda split, index: replace(problem_of(split, index), answer="35"[index % 2])
    return writing(t, {"propose": proposed(t.task), "solutions": answered})


def good_and_bad(task) -> list[str]:
    """A question that has the answer 3, and one that should have 5 and has 3."""
    c, g = keys_to(task, 7, 3)
    search = f"<{c}>(7);4+7:1;<{g}>(3);1*3:3;=4+{c}*{g}"
    return [search, search]


def test_a_step_by_hand(base):
    t = play_with(good_and_bad, ["=3", "=1"])
    update, = ssp.play(t)
    (proposals, raw), (solutions, grpo) = update.parts
    assert proposals.columns["refused"] == ["", "another_answer"] and proposals.columns["reward"] == [0.5, 0]
    # the raw reward at every token, and GRPO's z-score: mean .5, unbiased standard deviation sqrt(.5)
    assert raw[0].unique().tolist() == [0.5] and not raw[1].any()
    assert grpo[:, 0].tolist() == pytest.approx([0.5 ** 0.5, -(0.5 ** 0.5)], rel=1e-5) and len(solutions) == 2
    assert t.memory["pool"] == [[proposals.problems()[0].index, proposals.texts[0]]]
    found = {name: t.metrics[f"gen/proposals/{name}"] for name in (
        "valid", "refused/another_answer", "refused/cut", "queries", "solved", "unsolvable", "reused", "empty",
        "reward")}
    assert found == {"valid": 0.5, "refused/another_answer": 0.5, "refused/cut": 0, "queries": 2, "solved": 0.5,
                     "unsolvable": 0, "reused": 0, "empty": 0.5, "reward": 0.25}
    assert t.metrics["gen/reward"] == 0.5 and None not in t.tools.values()  # both search


def test_an_older_question_takes_the_place_of_a_filtered_one_until_the_pool_is_emptied(base):
    for step, asked in ((1, 4), (10, 2)):
        t = play_with(good_and_bad, ["=3", "=1"])
        old, _ = good_and_bad(t.task)
        t.state.step, t.memory["pool"] = step, [[77, old], [78, old.replace("=4", "=5")]]
        update, = ssp.play(t)
        assert len(t.asked["solutions"]) == asked and update.parts[0][0].columns["solved"] == [0.5, None]
        assert len(t.memory["pool"]) == (3 if step == 1 else 1)
        assert {prompt.problem.index for prompt in t.asked["solutions"][2:]} <= {77, 78}


def test_without_the_filter_what_nobody_can_answer_pays_most(base):
    """The negative control: the second question is taken to have the answer 5, and its true answer is wrong there."""
    t = play_with(good_and_bad, ["=3"], "--no-filter")
    update, = ssp.play(t)
    proposals = update.parts[0][0]
    assert [prompt.problem.answer for prompt in t.asked["solutions"]] == ["3", "3", "5", "5"]
    assert proposals.columns["reward"] == [0, 1] and proposals.columns["refused"] == ["", ""]
    assert t.metrics["gen/proposals/unsolvable"] == 0.5 and t.memory["pool"] == []


@pytest.mark.parametrize("reward, earned", [("one_minus", 1), ("azr", 0), ("parabola", 0)])
def test_what_is_never_answered_pays_by_the_reward_that_is_asked_for(base, reward, earned):
    update, = ssp.play(play_with(good_and_bad, ["=9"], "--proposer-reward", reward))
    assert update.parts[0][0].columns["reward"] == [earned, 0]


def test_without_a_question_there_is_nothing_to_solve(base):
    t = play_with(lambda task: ["no", "=4+"], [])
    update, = ssp.play(t)
    assert t.asked["solutions"] == [] and len(update.parts[1][0]) == 0
    assert apply_update(t, update)["skipped"] == 0 and t.memory["pool"] == []


def test_information_is_no_token_of_a_proposer(base):
    """A real search after what is sampled: its tokens are forced, and no gradient is theirs."""
    t = random_play("ssp", *FLAGS, "--examples-per-step", "2", "--num-samples", "2", "--max-new-tokens", "16")
    c, = keys_to(t.task, 7)
    wanted = iter(t.tokenizer.encode(f"<{c}>"))
    model = t.roles["generator"].model
    head = model.head

    def leaning(hidden):  # towards a query, token by token
        logits = head(hidden)
        if (token := next(wanted, None)) is not None:
            logits[..., token] += 1e6
        return logits
    model.head = leaning
    rollouts = t.sample("propose", t.prompts("propose_prompt", t.problems(), hint=["3", "5"]), tool=ssp.search_of(t))
    texts = [text[: len(f"<{c}>(7)")] for text in rollouts.texts]
    assert texts == [f"<{c}>(7)"] * 2 and rollouts.forced.any(dim=1).all()
    assert not rollouts.mask[rollouts.forced].any()


def test_a_task_that_cannot_say_what_a_question_needs_is_refused(monkeypatch):
    args = parsed("ssp", *FLAGS)
    task = make_task(args)
    monkeypatch.delattr(type(task), "queries_of")
    with pytest.raises(BadInput, match="--task lookup: .*queries_of"):
        ssp.check(args, task)
