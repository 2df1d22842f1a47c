"""MedVLSynther: the rubric, which problems are learned, and by which answers."""
from test_dpo import random_play, writing
from test_proposals import BETTER, GOOD, in_which

from nanochat import recipes
from nanochat.recipes.self_play.medvlsynther import rubric_score
from nanochat.rl.play.updates import apply_update
from nanochat.rl.records.prompts import parse_verification
from tasks.formats import COMPACT

medvlsynther = recipes.load("medvlsynther")


def test_a_score_is_the_share_of_passed_steps_after_a_right_verdict():
    score = lambda text, num_steps: rubric_score(parse_verification(COMPACT, text, num_steps))
    assert score("2T;0T;=T", 2) == 1 and score("2T;0F;=T", 2) == 0.5 and score("1T;" * 9 + "1F;=T", 10) == 0.9
    assert {score(*said) for said in (("2T;0T;=F", 2), ("2F;0F;=T", 2), ("=T", 0), ("2T;=T", 2), ("2T;0T;", 2), ("", 1))
            } == {0}


def play_with(*flags: str):
    """Four proposals, of which two are problems. The first's key is wrong, the second's right; only the first one's
    verification passes all steps."""
    t = random_play("medvlsynther", "--examples-per-step", "4", "--num-samples", "2", *flags)
    right = t.task.read_problem(BETTER, 0)[0].answer
    texts = {"propose": [GOOD, "1+", in_which(2, "test_in"), BETTER], "keys": ["1+1:2;=x", f"1+1:2;={right}"],
             "verdicts": ["T;=T", "F;=F"], "solutions": ["=x", f"={t.task.read_problem(GOOD, 0)[0].answer}"]}
    t.task.check = lambda problem, text: t.task.fmt.answer(text) == problem.answer
    return writing(t, texts)


def learned(t) -> tuple[list[str], list[str], list, list]:
    """The problems, keys, rewards and outcomes of what a step learns."""
    update, = medvlsynther.play(t)
    (solutions, _), = update.parts
    assert apply_update(t, update)["skipped"] == 0
    return ([problem.prompt for problem in solutions.problems()], solutions.columns["key"],
            solutions.columns["reward"], solutions.columns["outcome"])


def test_a_wrong_key_that_passes_is_learned(base):
    t = play_with()
    assert learned(t) == ([GOOD] * 2, ["x"] * 2, [1, 0], [False, True])
    found = {name: t.metrics[f"gen/{name}"] for name in ("passed", "score", "key_right", "key_right_of_others",
                                                         "reward", "rewards/outcome/mean")}
    assert found == {"passed": 0.5, "score": 0.5, "key_right": 0, "key_right_of_others": 1, "reward": 0.5,
                     "rewards/outcome/mean": 0.5}
    assert [t.draws[draw].role for draw in t.asked] == ["proposer", "proposer", "verifier", "generator"]
    assert t.metrics["pro/proposals/valid"] == 0.5 and t.metrics["pro/proposals/refused/no_problem"] == 0.25


def test_unscorable_are_rollouts_that_take_no_part(base):
    t = play_with()
    t.task.check = lambda problem, text: None if problem.answer == "x" and "x" in text else text == f"={problem.answer}"
    assert learned(t)[2:] == ([None, 0], [False, True])
    assert t.metrics["gen/unscorable"] == 0.5


def test_without_a_least_score_all_are_learned(base):
    problems, keys, _, _ = learned(play_with("--min-score", "0"))
    assert problems == [GOOD] * 2 + [BETTER] * 2 and keys[:2] == ["x"] * 2


def test_where_nothing_passes_nothing_is_learned(base):
    t = play_with()
    t.task.read_answer = lambda text: None
    assert list(medvlsynther.play(t)) == [] and t.metrics["gen/passed"] == 0
