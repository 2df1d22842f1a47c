"""MARTI: shaped rewards by hand, who reads what, what each turn earns and is compared with, the evaluation."""
import pytest
from test_dpo import parsed, random_play, writing

from nanochat import recipes
from nanochat.recipes.policy.marti import means_before, shaped
from tasks import make_task

marti = recipes.load("marti")
CHAIN = ["--graph", "chain", "--verifier-max-new-tokens", "20"]


def test_shaped_rewards_at_the_corners_and_what_a_team_is_measured_by():
    """R + .5 (R - Q) and R + .5 (Q R - (1 - Q)(1 - R))."""
    for R, Q, margin, quality in ((0, 0, 0.0, -0.5), (1, 0, 1.5, 1.0), (0, 1, -0.5, 0.0), (1, 1, 1.0, 1.5),
                                  (1, 0.5, 1.25, 1.25), (0, 0.5, -0.25, -0.25)):
        assert shaped(R, Q, 0.5, "margin") == margin and shaped(R, Q, 0.5, "quality") == quality
        assert shaped(R, Q, 0.5, "none") == shaped(R, Q, 0, "margin") == shaped(R, Q, 0, "quality") == R
    for shaping in ("none", "margin", "quality"):  # without a turn before it a reward stays as it is
        assert [shaped(R, None, 0.5, shaping) for R in (0, 1, None)] == [0, 1, None]
        assert shaped(None, 1, 0.5, shaping) is None
    first, second = [1, 0, 0, 0], [1, 1, None, 0]
    assert means_before([], 2, 2) == [None, None] and means_before([[]], 0, 2) == []
    assert means_before([first], 4, 1) == first and means_before([first], 4, 2) == [0.5, 0.5, 0, 0]
    assert means_before([first, second], 4, 1) == [1, 0.5, 0, 0]
    assert means_before([first, second], 4, 2) == [3 / 4, 3 / 4, 0, 0]
    assert means_before([[None, 1], [None, None]], 2, 1) == [None, 1]


def played(*flags: str, texts=None):
    """A step and its update."""
    t = writing(random_play("marti", "--examples-per-step", "2", "--num-samples", "4", *flags), texts or {})
    t.task.check = outcome if texts else t.task.check
    update, = marti.play(t)
    return t, [part for part, _ in update.parts], [advantages[:, 0].tolist() for _, advantages in update.parts]


def test_in_a_debate_each_agent_reads_the_next_one_s_answer(base):
    for team in (2, 4):
        t, (first, final), _ = played("--num-agents", str(team))
        for n, (one, two) in enumerate(zip(first.prompt_of(), final.prompt_of(), strict=True)):
            other = first.texts[n - n % team + (n + 1) % team]
            assert one.problem == two.problem
            assert two.ids == t.tokenizer.render_prompt(f"{other}||{two.problem.prompt}")
        assert len({(prompt.problem, prompt.copy) for prompt in final.prompts}) == 8  # each has noise of its own


def test_in_a_chain_the_last_answer_stands_after_the_first_and_its_verification(base):
    t, (first, judged, final), _ = played(*CHAIN)
    for n, prompt in enumerate(judged.prompt_of()):
        assert prompt.ids == t.verify_prompts(first).pop(n).ids
    for n, prompt in enumerate(final.prompt_of()):
        text = f"{first.texts[n]}|{judged.texts[n]}|{prompt.problem.prompt}"
        assert prompt.ids == t.tokenizer.render_prompt(text)


RIGHT = {"=1": True, "=0": False, "=?": None}


def outcome(problem, text):
    return RIGHT[text]


def centred(values) -> list[float]:
    known = [value for value in values if value is not None]
    return [0 if value is None else value - sum(known) / len(known) for value in values]


@pytest.mark.parametrize("shaping, shaped_rewards", [
    # two teams of two at each problem; the first one was right once (Q .5), the second one never
    ("none", [1, 0, 0, 1]),
    ("margin", [1.25, -0.25, 0, 1.5]),
    ("quality", [1.25, -0.25, -0.5, 1])])
def test_what_a_debate_earns_by_hand(base, shaping, shaped_rewards):
    texts = {"solutions": ["=1", "=0", "=0", "=0"], "final": ["=1", "=0", "=0", "=1"]}
    t, (first, final), advantages = played("--shaping", shaping, "--advantage", "dr_grpo", texts=texts)
    assert first.columns["shaped_reward"] == first.columns["outcome"] == [1, 0, 0, 0] * 2
    assert final.columns["shaped_reward"] == shaped_rewards * 2 and final.columns["outcome"] == [1, 0, 0, 1] * 2
    assert advantages[0] == pytest.approx(centred([1, 0, 0, 0]) * 2)  # each turn has a baseline of its own
    assert advantages[1] == pytest.approx(centred(shaped_rewards) * 2)
    found = {name: t.metrics[f"gen/{name}"] for name in (
        "reward", "first/accuracy", "final/accuracy", "final/shaped_reward", "final/delta", "final/wrong_to_right",
        "final/right_to_wrong", "unscorable")}
    assert found == pytest.approx({
        "reward": 1 / 4, "first/accuracy": 1 / 4, "final/accuracy": 2 / 4, "final/delta": 1 / 4,
        "final/shaped_reward": sum(shaped_rewards) / 4, "final/wrong_to_right": 1 / 4, "final/right_to_wrong": 0,
        "unscorable": 0})


def test_what_a_chain_earns_by_hand(base):
    """A verifier that is right about a right and about a wrong answer, is wrong, and says nothing that can be read."""
    texts = {"solutions": ["=1", "=0", "=0", "=1"], "verifications": ["=T", "=F", "=T", "T"],
             "final": ["=1", "=1", "=0", "=0"]}
    t, (first, judged, final), advantages = played(*CHAIN, "--shaping", "quality", "--advantage", "dr_grpo",
                                                   texts=texts)
    assert first.columns["shaped_reward"] == [1, 0, 0, 1] * 2
    # R 1 1 0 0 with Q 1 0 0 1: R + .5 (Q R - (1 - Q)(1 - R))
    assert judged.columns["outcome"] == [1, 1, 0, 0] * 2 and judged.columns["shaped_reward"] == [1.5, 1, -0.5, 0] * 2
    # R 1 1 0 0 with Q 1 .5 0 .5
    assert final.columns["shaped_reward"] == [1.5, 1.25, -0.5, -0.25] * 2
    for found, rollouts in zip(advantages, (first, judged, final), strict=True):
        assert found == pytest.approx(centred(rollouts.columns["shaped_reward"][:4]) * 2)
    assert t.metrics["gen/verdicts/parse_fail"] == 1 / 4 and t.metrics["gen/judged/accuracy"] == 1 / 2


def test_what_cannot_be_scored_earns_nothing_and_is_left_out_of_means(base):
    texts = {"solutions": ["=?", "=1", "=?", "=?"], "final": ["=1", "=?", "=1", "=0"]}
    t, (first, final), advantages = played("--shaping", "margin", "--advantage", "dr_grpo", texts=texts)
    # the first team's mean is 1; of the second one nothing is known
    assert final.columns["shaped_reward"] == [1, None, 1, 0] * 2
    assert advantages == [[0] * 8, pytest.approx([1 / 3, 0, 1 / 3, -2 / 3] * 2)]
    assert t.metrics["gen/unscorable"] == 1
    texts = {"solutions": ["=?"], "verifications": ["=T"], "final": ["=0"]}
    t, (_, judged, final), _ = played(*CHAIN, texts=texts)
    assert set(judged.columns["shaped_reward"]) == {None} and set(final.columns["shaped_reward"]) == {0}


TEAM = ["--num-agents", "4"]


@pytest.mark.parametrize("flags, first, final, expected, num_unknown", [
    (TEAM, ["=1", "=0"], ["=1", "=0", "=1", "=0"], {"pass1": 0, "final": 1, "first": 1 / 2}, 0),
    (TEAM, ["=1", "=0"], ["=0", "=1", "=1", "=0"], {"pass1": 0, "final": 0, "first": 1 / 2}, 0),
    (TEAM, ["=1", "=?"], ["=?"], {"pass1": 0, "final": 0, "first": 1 / 2}, 2),
    (CHAIN, ["=1"], ["=1", "=0"], {"pass1": 1, "final": 1 / 2, "first": 1, "judged": 0}, 0),
    # of the verdicts those on "=0" are right, and those on "=?" are neither
    (CHAIN, ["=1", "=0", "=?", "=?"], ["=0"], {"pass1": 1 / 4, "final": 0, "first": 1 / 4, "judged": 1 / 2}, 1)])
def test_a_debate_is_evaluated_by_its_majority_and_a_chain_by_its_last_answer(base, capsys, flags, first, final,
                                                                              expected, num_unknown):
    t = random_play("marti", "--num-samples", "4", "--eval-examples", "4", *flags)
    t.task.check, t.evaluating = outcome, True
    writing(t, {"eval": ["=0"], "solutions": first, "verifications": ["=F"], "final": final})
    scores = marti.evaluate(t)
    for split in ("in", "out"):
        assert {name: scores.pop(f"gen/{name}_{split}") for name in expected} == expected
        assert scores.pop(f"gen/uncounted_{split}", 0) == 0
    assert not scores and capsys.readouterr().out.count("of test_in cannot be scored") == num_unknown
    assert t.asked.keys() - {"eval"} == t.draws.keys()  # with the limits of training


def test_a_chain_needs_no_whole_debates():
    args = parsed("marti", "--graph", "chain", "--num-samples", "3")
    marti.check(args, make_task(args))
    assert marti.draws(args).keys() == {"solutions", "verifications", "final"}
    assert marti.draws(parsed("marti")).keys() == {"solutions", "final"}
