"""
Steps that are written again: what is kept, what it costs and what the lead is by hand; runs of tiny models.

    python -m pytest tests/test_step_retry.py -q
"""
import json
from statistics import mean
from types import SimpleNamespace

import pytest
from test_verifier_eval import VERIFIER

from dev.experiments import step_retry
from dev.experiments.step_retry import Attempt, judgment_ends, leads, take_step, take_verdict
from nanochat.cli import script_main
from nanochat.common import BadInput
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.storage.files import path_of
from tasks.common import Problem
from tasks.formats import COMPACT, PAPER

PROBLEM = Problem("test_in", 0, "1+2*2", "0")


@pytest.fixture
def tokenizer(base):
    return load_tokenizer(path_of("tokenizer"))


def attempt(tokenizer, ids: str = "", judged: str = "", **more) -> Attempt:
    return Attempt(PROBLEM, 0, [1], tokenizer.encode(ids), tokenizer.encode(judged), ids.count(";"), **more)


# A step and its judgment

def test_a_step_is_cut_where_it_ends_and_what_is_none_ends_the_solution(tokenizer):
    one = attempt(tokenizer)
    assert tokenizer.decode(take_step(tokenizer, COMPACT, one, tokenizer.encode("1+2:0;0*2:0;=0"), 99)) == "1+2:0;"
    assert one.spent == len(tokenizer.encode("1+2:0;")) and not one.is_done and one.ids == []
    two = attempt(tokenizer, "1+2:0;", spent=7)
    assert tokenizer.decode(take_step(tokenizer, COMPACT, two, tokenizer.encode("0*2:0;=0"), 99)) == "0*2:0;"
    assert two.spent == 7 + len(tokenizer.encode("0*2:0;"))
    drawn = [*tokenizer.encode("=0"), tokenizer.stop_tokens[0]]
    one = attempt(tokenizer, "1+2:0;")
    assert take_step(tokenizer, COMPACT, one, drawn, 99) is None
    assert one.is_done and one.spent == 3 and tokenizer.decode(one.ids[:-1]) == "1+2:0;=0"
    cut = attempt(tokenizer, "1+2:0;")
    assert take_step(tokenizer, COMPACT, cut, tokenizer.encode("0*2:0;"), 9) is None  # its end is beyond the limit
    assert cut.is_done and len(cut.ids) == 9 and cut.spent == 3
    for fmt, text, parts in ((COMPACT, "1T;?F;=F", ["1T;", "1T;?F;"]), (COMPACT, "1T;2", ["1T;"]), (COMPACT, "", []),
                             (PAPER, "<step_verification><step>x</step><step>",
                              ["<step_verification><step>x</step>"])):
        tokens = tokenizer.encode(text)
        assert [tokenizer.decode(tokens[:end]) for end in judgment_ends(tokenizer, fmt, tokens)] == parts


@pytest.mark.parametrize("drawn, verdict, tries, kept, judged", [
    ("0*2:0T;=T", True, 0, True, "1T;0*2:0T;"),
    ("0*2:1F;=F", False, 1, False, "1T;"),           # written again, after the same
    ("0*2:1F;=F", False, 2, True, "1T;0*2:1F;"),     # the last try stays
    ("0*2;=F", None, 0, True, "1T;0*2;"),            # a judgment without a verdict rejects nothing
    ("=T;0F;=F", None, 0, True, ""),                 # nor does a final judgment in its place: the verifier begins anew
    ("nonsense", None, 0, True, "")])                # nor does what is none
def test_what_is_rejected_is_written_again(tokenizer, drawn, verdict, tries, kept, judged):
    one, step = attempt(tokenizer, "1+2:0;", "1T;", tries=tries), tokenizer.encode("0*2:0;")
    take_verdict(tokenizer, COMPACT, one, step, tokenizer.encode(drawn), 2)
    assert one.said == [verdict] and tokenizer.decode(one.judged) == judged
    assert tokenizer.decode(one.ids) == ("1+2:0;0*2:0;" if kept else "1+2:0;")
    assert (one.num_steps, one.tries) == ((2, 0) if kept else (1, tries + 1))
    read = drawn[: drawn.find(";") + 1] or drawn
    assert one.spent == len(tokenizer.encode(read))  # after it nothing would have been written


# The lead

def test_the_lead_is_over_votes_with_as_many_tokens():
    """A solution has 10 tokens: 1 vote costs 10, 2 cost 20. The loop costs 10 * sqrt(2) tokens, half way in logs."""
    row = {"verdicts": [[]] * 2, "step_verdicts": [[]] * 2, "verification_lengths": [[0]] * 2, "lengths": [10, 10]}
    rows = [{**row, "index": 0, "answers": ["0", "0"], "outcomes": [True, True],
             "retry": {"1": {"outcomes": [True, False], "tokens": [10 * 2 ** 0.5] * 2}}},
            {**row, "index": 1, "answers": [None, "0"], "outcomes": [False, True],
             "retry": {"1": {"outcomes": [True, True], "tokens": [10 * 2 ** 0.5] * 2}}}]
    args = SimpleNamespace(num_draws=1000, seed=0, num_samples=2, retries=[1])
    single, (found,) = leads(args, rows)
    # One vote is right in 1 and .5 of the draws, two always, as what cannot be read has no vote.
    assert single == pytest.approx(0.75, abs=0.03) and found.voted == pytest.approx((1 + 0.75) / 2, abs=0.03)
    assert found.verified == 0.75 and found.lead == pytest.approx(0.75 - 0.875, abs=0.03)
    assert found.tokens == pytest.approx(10 * 2 ** 0.5)
    args.num_samples = 1
    with pytest.raises(BadInput, match="--num-samples 1: so many votes cost 10 tokens"):
        leads(args, rows)


# Runs

FLAGS = [*VERIFIER, "--generator-tag", "tiny", "--max-problems", "3", "--num-samples", "16", "--num-attempts", "2",
         "--retries", "1", "3"]


def run(*flags: str) -> None:
    script_main(step_retry.main, step_retry.make_parser(), [*FLAGS, "--num-draws", "4", *flags])


def test_a_run_reports_accuracy_against_tokens(base, tmp_path, capsys):
    out = tmp_path / "o.json"
    run("--out", str(out))
    found, shown = json.loads(out.read_text()), capsys.readouterr().out
    assert found["problems"] == 3 and [one["chosen"][0] for one in found["leads"]] == [["retry", 1, 1], ["retry", 1, 3]]
    for retries, lead in zip((1, 3), found["leads"], strict=True):
        tried = [row["retry"][str(retries)] for row in found["samples"]]
        assert lead["verified"] == mean(outcome for one in tried for outcome in one["outcomes"])
        assert lead["tokens"] == pytest.approx(mean(tokens for one in tried for tokens in one["tokens"]))
        verdicts = [v for one in tried for said in one["said"] for v in said]
        assert found["judgments"][str(retries)]["rejected"] == verdicts.count(False) / len(verdicts)
        for said, text in ((said, text) for one in tried for said, text in zip(one["said"], one["texts"], strict=True)):
            num_steps = len(COMPACT.step_spans(text))
            assert num_steps <= len(said) <= (num_steps + 1) * (1 + retries)
    assert "a single pass is right in" in shown and "retries" in shown


@pytest.mark.parametrize("flags, words", [
    (["--retries", "0"], "--retries 0: must be numbers from 1"), (["--retries", "2", "2"], "--retries 2 2"),
    (["--num-samples", "6"], "--num-samples 6: must be a power of two"),
    (["--generator-temperature", "0"], "temp"),
    (["--num-verifications", "2"], "--num-verifications: each step has one"),
    (["--calculator"], "--calculator: steps are written"), (["--score", "steps"], "--score: a step has a verdict"),
    (["--max-problems", "1"], "--max-problems 1: the interval"), (["--num-attempts", "0"], "--num-attempts 0"),
    (["--generator-tag", "nobody"], "nobody")])
def test_the_script_refuses(base, capsys, flags, words):
    with pytest.raises(SystemExit) as stop:
        run(*flags)
    assert stop.value.code == 2 and words in capsys.readouterr().err


def test_a_verifier_that_writes_no_judgments_is_warned_of(base, capsys):
    """The generator in its place."""
    run("--verifier-tag", "tiny")
    assert "% of the verifications are malformed" in capsys.readouterr().out
