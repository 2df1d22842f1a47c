"""Proposed problems: which texts are, what a proposer earns, the pool, and the three roles of Multi-Agent Evolve."""
import random
from itertools import product

import pytest
import torch
from test_dpo import keep, of_one_and_two_ranks, parsed, random_play, writing

from nanochat import recipes
from nanochat.recipes.self_play.multi_agent_evolve import JUDGE_REWARDS, judge_score, proposer_reward, role_advantages
from nanochat.rl.credit.advantages import whiten
from nanochat.rl.play.proposals import azr, drawn, earns, one_minus, parabola, propose, spread
from nanochat.rl.play.updates import apply_update
from nanochat.rl.records.prompts import parse_verification
from tasks import make_task
from tasks.common import in_split
from tasks.formats import COMPACT

mae = recipes.load("multi_agent_evolve")


def chain(*flags: str):
    return make_task(parsed("multi_agent_evolve", *flags))  # one or two operations, modulo 3


def in_which(length: int, split: str) -> str:
    """An expression of so many operations whose text is one of the split."""
    places = ["012", *["+-*", "012"] * length]
    return next(text for text in map("".join, product(*places)) if in_split(text, split))


def test_what_is_a_problem_and_what_is_refused_for_a_reason():
    read = lambda *texts: {chain().read_problem(text, 3) for text in texts}
    assert read("", "1+", "+1", "1+3", "1 + 2", "1+2\n", "１+2", "1/2", "T", "=1") == {(None, "no_problem")}
    assert read("1+1=2", "1+1:2", "1+1;", "1+1=") == {(None, "with_answer")}
    assert read("1") == {(None, "too_short")} and read("1+1+1+1", "1+" * 500 + "1") == {(None, "too_long")}
    text = in_which(2, "rl")
    problem, reason = chain("--chain-answer", "final").read_problem(text, 7)
    assert (problem.split, problem.index, problem.prompt, reason) == ("proposed", 7, text, "")
    value = int(text[0])
    for op, b in zip(text[1::2], text[2::2], strict=True):
        value = {"+": value + int(b), "-": value - int(b), "*": value * int(b)}[op] % 3
    assert problem.answer == str(value)
    task = chain()
    assert task.read_problem(in_which(2, "test_in"), 0) == (None, "held_out")
    assert task.read_problem(in_which(2, "sft"), 0)[1] == ""
    tested = {task.problem("test_in", i).prompt for i in range(20)}
    assert {task.read_problem(text, 0)[1] for text in tested} == {"held_out"}


def test_demonstrations_are_new_problems_of_sft_and_some_are_refused():
    task, reasons = chain(), []
    for i in range(300):
        problem = task.problem("sft", i)
        quoted, text = task.propose_demo(problem, random.Random(i))
        reasons.append(task.read_problem(text, i)[1])
        assert quoted == {"hint": problem.prompt} and reasons[-1] in ("", "no_problem", "with_answer", "too_long")
    assert 30 < 300 - reasons.count("") < 90 and len(set(reasons)) == 4  # a fifth
    assert task.propose_demo(problem, random.Random(1)) == task.propose_demo(problem, random.Random(1))


def test_rewards_by_the_share_of_right_solutions_and_of_what_is_refused():
    for p, rewards in ((0.0, (1, 0, 0)), (0.25, (0.75, 0.75, 0.75)), (0.5, (0.5, 0.5, 1)), (1.0, (0, 0, 0))):
        assert (one_minus(p), azr(p), parabola(p)) == pytest.approx(rewards)
    asked = [("", 0.25), ("", None), ("cut", None), ("no_problem", 0.25), ("held_out", None)]
    assert [earns(refusal, p, one_minus) for refusal, p in asked] == [0.75, None, 0, 0, None]


@pytest.mark.parametrize("text, num_steps, score", [
    ("2T;0T;=T", 2, 1.0),            # 10
    ("2T;0F;=F", 2, (2 - 1) / 9),    # half of the steps right: half of the way from 1 to 3
    ("2F;0F;=F", 2, 0.0),            # 1
    ("2T;0T;=F", 2, (2 - 1) / 9),    # no step is blamed, and one must be wrong
    ("2T;" * 8 + "0F;=F", 9, 16 / 81),  # 1 + 2 * 8 / 9: no problem is kept for it, which takes 0.7
    ("2T;=F", 1, 0.0), ("=F", 0, 0.0), ("=T", 0, 1.0),
    ("2T;0T;", 2, 0.5), ("2T;=T", 2, 0.5), ("", 2, 0.5), ("2;0T;=T", 2, 0.5)])
def test_a_score_by_hand(text, num_steps, score):
    assert judge_score(parse_verification(COMPACT, text, num_steps)) == pytest.approx(score)


def test_the_loss_is_that_of_the_authors_settings():
    args = parsed("multi_agent_evolve")
    assert (args.entropy_coef, args.kl_coef, args.aggregation, args.num_attempts) == (1e-3, 0, "token", 3)


def test_what_proposer_solver_and_judge_earn():
    for scores, reward in (([1, 1, 1], 1 + 0 + 1), ([1, 0, 0], 1 + 2 / 3 + 1), ([0, 0, 0], 1), ([0.5, 0.5, 0.5], 1.5),
                           ([0.7, 0.1, 0.1], 0.7 + 0.7 + 1), ([0.69, 0.1, 0.1], 0.69 + 1)):  # .7 is the bar
        assert proposer_reward(scores) == pytest.approx(reward / 3)


def test_what_a_judge_earns():
    right = parse_verification(COMPACT, "2T;=T", 1)
    assert [JUDGE_REWARDS["format"](right, outcome) for outcome in (True, False, None)] == [1, 1, 1]
    assert [JUDGE_REWARDS["grounded"](right, outcome) for outcome in (True, False, None)] == [2, 1, None]
    assert JUDGE_REWARDS["grounded"](parse_verification(COMPACT, "2T;", 1), True) == 0.5  # two criteria unmet


def play_with(texts: dict[str, list[str]], *flags: str):
    """A step in which each label gives these completions, over and over."""
    P = len(texts["propose"]) // 2
    t = random_play("multi_agent_evolve", "--examples-per-step", str(P), "--num-samples", "2", "--num-attempts", "2",
                    *flags)
    t.task.check = lambda problem, text: t.task.fmt.answer(text) == problem.answer
    return writing(t, texts)


GOOD, BETTER = in_which(1, "rl"), in_which(2, "rl")
TEXTS = {"propose": [GOOD, "1+1=2", in_which(2, "test_in"), BETTER],
         "attempts": ["1+1:2;=2", "1+1:2;=2"], "attempt_scores": ["T;=T", "F;=F", "F;=F", "F;=F"],
         "solutions": ["1+1:2;=2", "1+1:2;", "1+1:2;=2", "1+1:2;=2"], "judge": ["T;=T", "F;=F", "F;=F", "T;=T"]}


def test_a_step_by_hand(base):
    t = play_with(TEXTS)
    update, = mae.play(t)
    (proposals, _), (solutions, _), (judgments, _) = update.parts
    # GOOD has scores 1 and 0: quality 1, difficulty .5. BETTER has 0 and 0: it is not kept.
    assert proposals.columns["reward"] == [pytest.approx(2.5 / 3), 0, None, pytest.approx(1 / 3)]
    assert proposals.columns["refused"] == ["", "with_answer", "held_out", ""]
    assert t.memory["pool"] == [[2 * t.task.problem("rl", 0).index, GOOD]]
    assert [prompt.problem.prompt for prompt in t.asked["attempts"]] == [GOOD, GOOD, BETTER, BETTER]
    # the second solution has no answer
    assert solutions.columns["reward"] == [1, 0, 0.5, 1] and solutions.columns["judge_score"] == [1, 0, 0, 1]
    assert judgments.columns["reward"] == [1, 1, 1, 1]
    found = {name: t.metrics[f"gen/{name}"] for name in (
        "proposals/valid", "proposals/refused/with_answer", "proposals/refused/held_out", "proposals/refused/cut",
        "proposals/kept", "proposals/distinct", "proposals/quality", "proposals/difficulty", "judge/score",
        "pool_size")}
    assert found == {"proposals/valid": 0.5, "proposals/refused/with_answer": 0.25, "proposals/refused/held_out": 0.25,
                     "proposals/refused/cut": 0, "proposals/kept": 0.5, "proposals/distinct": 1,
                     "proposals/quality": 0.5, "proposals/difficulty": 0.75, "judge/score": 0.5, "pool_size": 0}
    assert apply_update(t, update)["skipped"] == 0 and t.steps["generator"] == 1  # once for all roles


def test_each_role_is_whitened_by_itself(base):
    """Jointly whitened, the judge's rewards, which are all 1, would be pushed up."""
    update, = mae.play(play_with(TEXTS))
    (proposals, earned), (solutions, solved), (_, judged) = update.parts
    assert not judged.any() and earned[0, 0] > 0 > earned[1, 0]
    assert not earned[2].any()  # a text of a test split
    # of one token each: rewards 1, 0, .5; mean .5, unbiased standard deviation .5
    t = random_play("multi_agent_evolve")
    rollouts = t.written("generator", t.solve_prompts(t.problems())[:3], [[1], [2], [3]])
    assert role_advantages([1.0, 0.0, 0.5], rollouts, t.reduce)[:, 0].tolist() == pytest.approx([1, -1, 0], abs=1e-5)
    both = torch.tensor([[1.0], [0.0], [0.5], [1.0], [1.0], [1.0]])
    assert whiten(both, torch.ones(6, 1))[3, 0] > 0.5
    assert role_advantages([1.0, 0.0, None], rollouts, t.reduce)[:, 0].tolist() == pytest.approx(
        [0.5 ** 0.5, -(0.5 ** 0.5), 0], abs=1e-5)


def test_no_gold_answer_enters_an_update_unless_it_is_asked_for(base):
    rewards = {}
    for outcome in (True, False, None):
        for flags in ((), ("--judge-reward", "grounded"), ("--proposer-reward", "azr")):
            t = play_with(TEXTS, *flags)
            t.task.check = lambda problem, text, outcome=outcome: outcome
            update, = mae.play(t)
            rewards[(outcome, *flags)] = [rollouts.columns["reward"] for rollouts, _ in update.parts]
    assert rewards[True,] == rewards[False,] == rewards[None,]
    grounded = {outcome: rewards[outcome, "--judge-reward", "grounded"] for outcome in (True, False, None)}
    assert grounded[True][2] == [2, 1, 1, 2] and grounded[False][2] == [1, 2, 2, 1]
    assert grounded[None][2] == [None] * 4 and grounded[True][:2] == rewards[True,][:2]
    by_gold = {outcome: rewards[outcome, "--proposer-reward", "azr"][0] for outcome in (True, False, None)}
    assert by_gold == {True: [0, 0, None, 0], False: [0, 0, None, 0], None: [None, 0, None, None]}


def test_the_pool_is_what_the_solver_is_asked_and_references_stand_in(base):
    t = play_with(TEXTS, "--pool-size", "3")
    t.memory["pool"] = [[10, GOOD], [11, BETTER], [12, GOOD]]
    update, = mae.play(t)
    asked = {(p.problem.split, p.problem.index, p.problem.prompt) for p in t.asked["solutions"]}
    assert len(asked) == 2 and asked < {("proposed", 10, GOOD), ("proposed", 11, BETTER), ("proposed", 12, GOOD)}
    assert t.memory["pool"][:2] == [[11, BETTER], [12, GOOD]] and len(t.memory["pool"]) == 3
    found, *rest = drawn(t, [[10, GOOD]])
    assert (found.split, found.index, found.prompt) == ("proposed", 10, GOOD) and rest == [None]
    found, *rest = drawn(t, [[10, GOOD], [11, GOOD], [12, GOOD]])  # a text that was proposed several times
    assert (found.prompt, rest) == (GOOD, [None])


def test_an_evaluation_has_the_limits_of_solutions_and_of_verifications(base):
    t, limits = random_play("multi_agent_evolve", "--max-new-tokens", "8", "--verifier-max-new-tokens", "20"), []
    t.evaluating, draw = True, t.sample
    t.sample = lambda *args, **options: limits.append((rollouts := draw(*args, **options)).limit) or rollouts
    mae.evaluate(t)
    # the start's solutions, pass@1 and verdicts on its examples; the present ones; then what is judged
    assert limits == [*[8] * 4, 20, 8, *[20] * 3]


def test_a_completion_without_an_end_is_no_problem(base):
    t = play_with(TEXTS)
    written = t.written
    t.written = lambda role, prompts, texts: written(role, prompts, [t.tokenizer.encode(text) for text in texts])
    found = propose(t, "generator", t.problems(), 2, "propose")
    assert found.refusals == ["cut"] * 4 and found.valid == [] and spread([], found.problems) == [None] * 4


def play_share(folder: str) -> None:
    """Two steps on this rank's problems. What is proposed follows from the reference."""
    t = random_play("multi_agent_evolve", "--num-samples", "2", "--num-attempts", "2", "--max-new-tokens", "12",
                    "--verifier-max-new-tokens", "12")
    sampled = t.sample

    def sample(draw, *args, **options):
        rollouts = sampled(draw, *args, **options)
        if draw == "propose":
            texts = [(GOOD, BETTER, "no")[problem.index % 3] for problem in rollouts.problems()]
            prompts = rollouts.prompt_of()
            rollouts = t.written("generator", prompts, texts).with_prompts(prompts)
        return rollouts
    t.sample = sample
    list(mae.play(t))
    t.state.step, t.done = 1, set()
    update, = mae.play(t)
    rows = [[problem.split, problem.index, text, round(a, 4)] for rollouts, advantages in update.parts
            for problem, text, a in zip(rollouts.problems(), rollouts.texts, advantages[:, 0].tolist(), strict=True)]
    keep(t, {"rows": rows, "metrics": t.metrics, "pool": t.memory["pool"]}, folder)


def test_two_ranks_propose_and_pool_as_one_does(base, tmp_path):
    one, first, second = of_one_and_two_ranks(play_share, tmp_path)
    assert sorted(first["rows"] + second["rows"]) == sorted(one["rows"])
    for found in (first, second):
        assert found["pool"] == one["pool"] and found["metrics"].keys() == one["metrics"].keys()
        for name, value in one["metrics"].items():
            assert found["metrics"][name] == (None if value is None else pytest.approx(value, rel=1e-9)), name
