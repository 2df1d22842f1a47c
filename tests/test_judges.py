"""
Judges: verdicts found among tokens, shares and chances by hand, and the one evaluation of all.
"""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import parse, rl_flags
from test_dpo import drawn_by, random_play, verdict_odds, writing
from test_log_odds import BYTES

from nanochat.recipes.tango import fixed_verifier
from nanochat.rl.records.prompts import Verification, parse_verification
from nanochat.rl.verify.comparing import GROUP_SCORES
from nanochat.rl.verify.judge_evals import judged_scores
from nanochat.rl.verify.judges import AGGREGATES, JUDGES, JUDGE_DRAWS, OF_THE_WHOLE, Judgment, shares
from nanochat.rl.verify.spots import Spot, spot_of, verdict_spots
from nanochat.tokenizer import Tokenizer
from scripts import tango_rl
from tasks.common import Problem
from tasks.formats import COMPACT, PAPER


@pytest.fixture(scope="module")
def merging() -> Tokenizer:
    """A tokenizer in which a verdict shares tokens with what stands beside it: "=T" and "=F" are one token each."""
    tokenizer = Tokenizer.train(iter(["=T", "=F"] * 50), 267)
    assert [len(tokenizer.encode(text)) for text in ("=T", "=F")] == [1, 1]
    return tokenizer


# Verdicts among tokens

def test_a_verdict_stands_where_its_mark_is_if_it_can_be_read(merging):
    text = "3+5:8T;8*2:5F;=F"
    tokens, v = BYTES.encode(text), parse_verification(COMPACT, text, 2)
    T, F = BYTES.encode("TF")
    assert verdict_spots(BYTES, COMPACT, tokens, v, 2) == [Spot(5, T, F), Spot(12, T, F), Spot(15, T, F)]
    assert [text[spot.position] for spot in verdict_spots(BYTES, COMPACT, tokens, v, 2)] == ["T", "F", "F"]
    text = ("<step_verification><step>so \\boxed{INCORRECT}</step></step_verification>"
            "<final_verification>\\boxed{CORRECT}</final_verification>")
    tokens, v = BYTES.encode(text), parse_verification(PAPER, text, 1)
    step, final = verdict_spots(BYTES, PAPER, tokens, v, 1)
    assert (chr(step.right), chr(step.wrong)) == ("C", "I")
    assert text[step.position:].startswith("INCORRECT") and text[final.position:].startswith("CORRECT")
    cut = parse_verification(COMPACT, "T;F;=F", 3)  # two steps of three
    assert [spot and spot.position for spot in verdict_spots(BYTES, COMPACT, BYTES.encode("T;F;=F"), cut, 3)] == [
        None, None, None, 5]
    none = parse_verification(COMPACT, "T;F;=", 2)
    assert [spot and spot.position for spot in verdict_spots(BYTES, COMPACT, BYTES.encode("T;F;="), none, 2)] == [
        0, 2, None]
    tokens, v = merging.encode("=F"), parse_verification(COMPACT, "=F", 0)
    assert verdict_spots(merging, COMPACT, tokens, v, 0) == [Spot(0, *merging.encode("=T"), *merging.encode("=F"))]
    tokens = [*BYTES.encode("=T")]  # its bytes one by one, where one token would do
    assert spot_of(merging, COMPACT, tokens, 1) == Spot(1, *BYTES.encode("TF"))  # "T" alone begins a token
    other = replace(COMPACT, final_open="", correct="=T", incorrect="=F")
    assert spot_of(merging, other, tokens, 0) is None


# Judgments

def test_shares_are_of_the_verifications_that_can_be_read_and_steps_make_a_solution():
    said = [Verification([True, False], True, ()), Verification([True, True], None, ("no_final_verdict",)),
            Verification([True], False, ("step_count_mismatch",))]
    assert shares(said, 9) == Judgment([1.0, 0.5], 0.5, 9) and shares(said[2:], 3) == Judgment(None, 0.0, 3)
    assert shares([Verification([], None, ("step_count_mismatch", "no_final_verdict"))], 1) == Judgment(None, None, 1)
    assert [make([0.5, 0.25, 0.8]) for make in AGGREGATES.values()] == [pytest.approx(0.1), 0.25, 0.8]
    assert list(AGGREGATES) == ["product", "min", "last"]


@pytest.fixture
def judged(base):
    """A step of random models, and two solutions of a problem."""
    t = random_play("fixed_verifier", "--verifications", "2", "--prm-aggregate", "product")
    prompts = t.solve_prompts([Problem("rl", 0, "1+1*2", "1")] * 2)
    return t, t.written("generator", prompts, ["1+1:2;2*2:1;=1", "1+1:2;=2"])


def test_judges_by_log_odds_read_after_steps_at_the_end_and_at_a_verdict(judged):
    t, solutions = judged  # which the verifier reads as its own completions
    a, b = ([torch.sigmoid(x).item() for x in row] for row in verdict_odds(t, "verifier", solutions))
    close = lambda judgment, steps, final, tokens: (
        judgment.steps == (None if steps is None else pytest.approx(steps, rel=1e-4))
        and judgment.final == pytest.approx(final, rel=1e-4) and judgment.tokens == tokens)
    one, two = JUDGES["steps"](t, "verifier", solutions)
    assert close(one, [a[6], a[12]], a[6] * a[12], 2) and close(two, [b[6]], b[6], 1)
    one, two = JUDGES["end"](t, "verifier", solutions)
    assert close(one, None, a[14], 1) and close(two, None, b[8], 1)
    one, two = JUDGES["tokens"](t, "verifier", solutions)
    assert close(one, [a[6], a[12]], a[14], 15) and close(two, [b[6]], b[8], 9)
    nothing = t.written("verifier", t.solve_prompts([Problem("rl", 1, "1+1", "2")]), ["=2"])
    assert JUDGES["steps"](t, "verifier", nothing) == [Judgment([], None, 0)]  # without steps it has no chance
    t, solutions = judged
    one, _ = JUDGES["verdict"](t, "verifier", solutions)
    forced = t.written("verifier", t.verify_prompts(solutions), ["=T", "=T"])
    s = verdict_odds(t, "verifier", forced)[0]
    assert one.steps is None and one.tokens == 1 and one.final == pytest.approx(torch.sigmoid(s[1]).item(), rel=1e-4)


def test_judges_that_write_average_over_their_texts_and_a_missing_verdict_counts_a_half(judged):
    t, solutions = judged
    texts = ["8T;1F;=T", "T;=F", "T;=F", "no"]  # two of each solution; the second one misses a step
    prompts = t.verify_prompts(solutions)
    written = t.written("verifier", [prompts[n // 2] for n in range(4)], texts)
    t.verify = lambda *args, role: written
    one, two = JUDGES["analysed"](t, "verifier", solutions)
    V = [torch.sigmoid(row).tolist() for row in verdict_odds(t, "verifier", written)]
    assert one.steps == pytest.approx([(V[0][1] + 0.5) / 2, (V[0][4] + 0.5) / 2], rel=1e-4)
    assert one.final == pytest.approx((V[0][7] + V[1][3]) / 2, rel=1e-4)
    assert two.steps == pytest.approx([(V[2][0] + 0.5) / 2], rel=1e-4)
    assert two.final == pytest.approx((V[2][3] + 0.5) / 2, rel=1e-4)
    assert (one.tokens, two.tokens) == (9 + 5, 5 + 3)  # end tokens too
    assert JUDGES["generative"](t, "verifier", solutions) == [Judgment([1.0, 0.0], 0.5, 14), Judgment([1.0], 0.0, 8)]


# Judges of several: a ring of three solutions, and one of two that are alike

@pytest.fixture
def several(judged):
    """(judge, its texts) -> the judgments, and the prompts that it was asked. The solutions are a, b, c of one problem,
    d and d of another."""
    t, _ = judged
    t.args.num_judged = 3
    one, other = t.solve_prompts([Problem("rl", 0, "1+1*2", "1"), Problem("rl", 1, "1+1", "2")])
    prompts = [one, one, one, other, other]
    solutions = t.written("generator", prompts, ["1+1:2;=2", "=1", "=0", "=2", "=2"]).with_prompts(prompts)

    def judge(name: str, *texts: str):
        writing(t, {"verdicts": list(texts)})
        judgments = JUDGES[name](t, "verifier", solutions)
        assert len(texts) == len(t.asked["verdicts"])  # two of each set
        return judgments, [BYTES.decode(prompt.ids[2:-2]) for prompt in t.asked["verdicts"][::2]]
    return judge


def test_a_chance_is_the_share_of_duels_won_or_of_the_highest_score(several, capsys):
    # a against b: a, a; b against c: c, unreadable; c against a: a, c
    (a, b, c, d, e), asked = several("pair", "=A", "=A", "=B", "no", "=B", "=A")
    assert asked == ["1+1*2|1+1:2;=2|=1|A", "1+1*2|=1|=0|A", "1+1*2|=0|1+1:2;=2|A"]
    assert [j.final for j in (a, b, c, d, e)] == [3 / 4, 0, 2 / 3, 0.5, 0.5]
    assert [j.tokens for j in (a, b, c, d, e)] == [6, 6, 6, 0, 0]  # half of four texts of 3 tokens, their ends too
    assert {j.steps for j in (a, b, c, d, e)} == {None}
    texts = ["=10,5,0", "no", "=4,0,9", "no", "=0,10,6", "no", *["no"] * 4]  # a b c, b c a, c a b; d d d twice
    (a, b, c, d, e), asked = several("scores", *texts)
    assert asked[1] == "1+1*2|=1|=0|1+1:2;=2|S" and len(asked) == 5
    assert [j.final for j in (a, b, c)] == pytest.approx([(1 + 0.9 + 1) / 3, (0.5 + 0.4 + 0.6) / 3, 0])
    assert (d.final, e.final) == (None, None)
    assert capsys.readouterr().out.count("taught this form (chat_sft --verifier-form scores)?") == 1
    assert a.tokens == pytest.approx((8 + 7 + 8 + 3 * 3) / 3)


def test_every_judge_says_what_it_is_given():
    assert JUDGES.keys() == JUDGE_DRAWS.keys()
    args = SimpleNamespace(verifications=3, verifier_max_new_tokens=9, max_new_tokens=20, num_judged=4)
    for judge, quoted, prompt in (("graded", 40, "1+1|||AS"), ("scores", 80, "1+1|||||S"), ("generative", 20, "1+1|")):
        draw = JUDGE_DRAWS[judge](args, 2, 5, 7)
        assert (draw.num_prompts, draw.num_samples, draw.times, draw.quoted) == (10, 3, 7, quoted)
        assert BYTES.decode(draw.wrap(BYTES, COMPACT, "1+1")[2:-2]).startswith(prompt)


# As the reward of a generator

@pytest.mark.parametrize("judge", [name for name in JUDGES if name != "generative"])
def test_the_chances_of_any_judge_reward_a_generator(base, judge):
    t = random_play("fixed_verifier", "--judge", judge, "--step-rewards", "verdicts", "--max-new-tokens", "12",
                    "--verifier-max-new-tokens", "12")
    said = {"graded": ["=A1", "no", "=B3"], "scores": ["=9,4", "no", "=1,0"], "analysed": ["T;=T", "=F", "no"]}
    writing(t, {"verdicts": said.get(judge, ["=A", "no", "=B"])} if judge in (*GROUP_SCORES, "analysed") else {})
    drawn, (update,) = drawn_by(t), fixed_verifier.play(t)
    solutions, name = drawn["solutions"], "verdict" if judge in OF_THE_WHOLE else "steps"
    t.done.clear()
    judgments = JUDGES[judge](t, "verifier", solutions)
    steps, finals = [j.steps for j in judgments], [j.final for j in judgments]
    assert (solutions.columns["step_chances"], solutions.columns["chance"]) == (steps, finals)
    assert update.parts[0][1].any() and f"gen/variance/{name}" in t.metrics and "gen/verdicts/brier" in t.metrics
    assert (steps == [None] * len(steps)) == (judge in OF_THE_WHOLE)
    told = [chance for row in (finals, *filter(None, steps)) for chance in row if chance is not None]
    assert {0 <= chance <= 1 for chance in told} == {True} and len(set(told)) > 1
    t.evaluating = True
    assert "ver/brier_fixed" in fixed_verifier.evaluate(t)


@pytest.mark.parametrize("judge, verifier, words", [
    ("steps", "tiny", []), ("verdict", "tiny-ver", []), ("preferred", "tiny-ver", ["pair"]),
    ("solve_pair", "tiny-ver", ["of form steps (chat_sft --verifier-form), and is asked for form solve_pair here"]),
    ("verdict", "tiny", ["tiny was trained as a generator, and is the verifier here"])])
def test_a_start_is_warned_of_where_it_was_not_taught_what_it_is_asked(base, capsys, judge, verifier, words):
    tango_rl.main(parse(tango_rl, rl_flags("--recipe", "fixed_verifier", "--judge", judge, "--step-rewards", "verdicts",
                                           "--verifier-tag", verifier, "--max-new-tokens", "24", "--dry-run")))
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING: tiny")]
    assert len(warnings) == len(words) and all(map(str.__contains__, warnings, words))


# Scores

def test_scores_of_a_judge_by_hand():
    #      answer outcome labels         steps       final tokens
    one = [["1", True, [True, True], [0.9, 0.8], 0.9, 4],
           ["2", False, [True, False], [0.7, 0.6], 0.6, 6]]
    two = [["3", False, [False], [0.2], 0.4, 2], ["3", False, [False], None, None, 0]]
    found = judged_scores([one, two])
    # right steps .9 .8 .7 against wrong ones .6 .2: all ranked right
    assert found["step_auc"] == 1 and found["outcome_auc"] == 1
    # the same steps, as no wrong one has another after it
    assert found["first_error_auc"] == 1
    # right: 3 hits of 3, said 4; wrong: 1 hit of 3, said 1
    assert found["step_f1"] == pytest.approx((2 * 3 / 7 + 2 * 1 / 4) / 2)
    # erroneous: the second of one is missed, the first of two is found, the last says nothing; correct: none claimed
    assert found["first_error_f1"] == pytest.approx(2 * (1 / 3) * 1 / (1 / 3 + 1))
    # outcomes: right 1 hit, actual 1, said 2; wrong 1 hit of 3, said 1
    assert found["outcome_f1"] == pytest.approx((2 / 3 + 2 / 4) / 2)
    assert found["brier"] == pytest.approx((0.01 + 0.36 + 0.16) / 3)
    assert found["ece"] == pytest.approx((0.1 + 0.6 + 0.4) / 3)
    assert (found["pass@1"], found["bon"], found["weighted"], found["tokens"]) == (0.25, 0.5, 0.5, 3)
    assert found["abstained"] == 0.25
    row = ["1", False, [True, False, True, True, False], [0.9, 0.3, 0.2, 0.1, 0.8], 0.5, 1]
    found = judged_scores([[row]])
    assert found["first_error_auc"] == 1                      # .9 against .3
    assert found["step_auc"] == pytest.approx((2 + 0 + 0) / 6)  # .9 .2 .1 against .3 .8: only .9 is above any
    outcomes = judged_scores([[["1", True, [True], None, 0.5, 1], ["2", None, [False], None, 0.9, 1]]])
    assert {outcomes[name] for name in ("step_f1", "step_auc", "first_error_f1", "first_error_auc")} == {None}
    assert outcomes["outcome_f1"] == outcomes["abstained"] == 0 <= outcomes["ece"]  # .5 is not above .5
    steps = judged_scores([[["1", True, [True], [0.9], None, 1], ["2", False, [False], None, None, 1]]])
    assert steps["outcome_f1"] is steps["ece"] is None and steps["abstained"] == 0.5
    assert steps["step_f1"] == pytest.approx((1 + 0) / 2) and set(judged_scores([]).values()) == {None}
