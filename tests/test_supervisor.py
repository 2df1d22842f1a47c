"""Supervisor: its update against the gradient of the answers' likelihood, gains by hand and against label_steps."""
import json
import math

import pytest
import torch
from conftest import TASK_FLAGS, parse, rl_flags
from test_dpo import logprobs_after
from test_supervised import after_steps, check_update, play_on_labels, relabelled

from nanochat.common import BadInput
from nanochat.recipes.verifiers import supervisor
from nanochat.rl.verify.labelled import as_rollouts, labelled_of_step
from nanochat.rl.verify.prefixes import answer_logprob
from scripts import label_steps, tango_rl


def beginnings(row) -> list[str]:
    """A solution's text up to each step, from none to all."""
    return [row.solution[:end] for end in [0, *after_steps(row.solution)]]


def true_nll(t, row, begun: str) -> torch.Tensor:
    """-log p of the gold answer and its end, after the problem, a beginning and "="."""
    prompt = [*t.tokenizer.render_prompt(row.problem.prompt), *t.tokenizer.encode(begun + "=")]
    answer = [*t.tokenizer.encode(row.problem.answer), t.tokenizer.assistant_end]
    return -logprobs_after(t.roles["supervisor"].model, prompt, answer).sum()


def test_a_supervisor_learns_the_answers_tokens_alone(base):
    """With all beginnings: the mean of their answers' losses, whose tokens and no others have a coefficient."""
    t = play_on_labels("supervisor", "--prefixes", "9", "--examples-per-step", "8")
    rows = labelled_of_step(t)
    assert {row.outcome for row in rows} == {True, False, None}  # none is left out, all have the gold answer
    update, = supervisor.play(t)
    (answers, weights), = update.parts
    losses = [true_nll(t, row, begun) for row in rows for begun in beginnings(row)]
    assert len(answers) == len(losses) == sum(len(row.labels) + 1 for row in rows)
    assert answers.texts == [row.problem.answer for row in rows for _ in beginnings(row)]
    assert torch.equal(weights > 0, answers.mask)
    loss = sum(losses) / len(losses)
    assert t.metrics["sup/nll"] == pytest.approx(loss.item(), rel=1e-5)
    check_update(t, update, loss, "supervisor")


def test_beginnings_are_drawn_anew_in_each_step_and_alike_on_all_ranks(base):
    """Of K + 1 beginnings min(N, K + 1), without repetition; every one is drawn at some step."""
    t = play_on_labels("supervisor", "--prefixes", "1")
    rows = labelled_of_step(t)
    cuts = supervisor.cuts_of(t, as_rollouts(t, "supervisor", rows))
    whole = [supervisor.drawn(t, row, cut) for row, cut in zip(rows, cuts, strict=True)]
    alone = [supervisor.drawn(t, row, cut) for row, cut in reversed(list(zip(rows, cuts, strict=True)))]
    assert alone == whole[::-1] and all(len(row) == 1 for row in whole)
    two = next(n for n, cut in enumerate(cuts) if len(cut.step_ends) == 2)
    seen = []
    for t.state.step in range(40):
        seen += supervisor.drawn(t, rows[two], cuts[two])
    assert set(seen) == {0, 1, 2}
    t.args.prefixes = 2
    for t.state.step in range(9):
        found = supervisor.drawn(t, rows[two], cuts[two])
        assert len(found) == 2 and found == sorted(set(found))
    t.args.prefixes = 3
    assert supervisor.drawn(t, rows[two], cuts[two]) == [0, 1, 2]


def test_what_gains_are_made_of_is_the_likelihood_of_the_answer_and_what_label_steps_finds(base):
    t = play_on_labels("supervisor")
    rows, model = labelled_of_step(t), t.roles["supervisor"].model
    cuts = supervisor.cuts_of(t, as_rollouts(t, "supervisor", rows))
    for row, cut in zip(rows, cuts, strict=True):
        asked = [(cut, k) for k in range(len(cut.step_ends) + 1)]
        by_hand = [-true_nll(t, row, begun).item() for begun in beginnings(row)]
        assert supervisor.answer_logprobs(t, supervisor.gold_answers(t, asked)) == pytest.approx(by_hand, rel=1e-5)
        theirs = [found.value for found in answer_logprob(asked, model, t.sampler, 1, 1)]
        assert theirs == pytest.approx(by_hand, rel=1e-5)
    assert {len(cut.step_ends) for cut in cuts} == {1, 2}

def test_scores_of_gains_by_hand():
    """Gains 1, -1 (gold right, wrong); 0, -2, 3 (right, wrong, right), of which the last stands after the error; and
    one whose gold labels are not known."""
    rows = [[[-2.0, -1.0, -2.0], [True, False]], [[-3.0, -3.0, -5.0, -2.0], [True, False, True]], [[-1.0, -9.0], []]]
    assert supervisor.gain_scores(rows) == {"step_auc": 1.0, "step_accuracy": 1.0, "first_error_auc": 1.0}
    # A right step loses .5: below it is only the wrong one of -2. The gain of 3 is after the first error.
    rows[1] = [[-3.0, -3.5, -5.5, -2.5], [True, False, True]]
    rows[0] = [[-2.0, -1.0, -1.25], [True, False]]
    # right: 1, -.5, 3; wrong: -.25, -2: 5 of 6 pairs; without the 3: 3 of 4
    assert supervisor.gain_scores(rows) == {"step_auc": 5 / 6, "step_accuracy": 0.8, "first_error_auc": 0.75}
    assert supervisor.gain_scores([]) == supervisor.gain_scores(rows[2:]) == dict.fromkeys(
        ("step_auc", "step_accuracy", "first_error_auc"))


def test_labels_of_any_kind_will_do_but_there_must_be_a_file(base):
    """Information gains are no chances, and are not read."""
    t = play_on_labels("supervisor")
    relabelled(t, lambda labels: [-7.5] * len(labels))
    supervisor.check(t.args, t.task)
    t.args.labels = ""
    with pytest.raises(BadInput, match="--labels: name the labelled solutions"):
        supervisor.check(t.args, t.task)


def test_its_checkpoint_labels_steps(base):
    """label_steps then finds other gains, on the same solutions, than under the model that it began from."""
    flags = rl_flags("--recipe", "supervisor", "--run", "r", "--num-steps", "2", "--judged-samples", "2")
    tango_rl.main(parse(tango_rl, flags))
    summary = json.loads((base / "runs" / "r" / "summary.json").read_text())
    before, after = summary["before"], summary["after"]
    assert before.keys() == after.keys() and all(
        math.isfinite(after[f"sup/{name}_fixed"]) for name in ("nll_none", "nll_whole", "step_accuracy"))
    assert before["sup/nll_none_fixed"] != after["sup/nll_none_fixed"]  # the solutions stay, the supervisor moves
    found = {}
    for out, asked in (("before", []), ("after", ["--supervisor-tag", "r-sup", "--supervisor-source", "rl"])):
        label_steps.main(parse(label_steps, [
            *TASK_FLAGS, "--device-type", "cpu", "--generator-tag", "tiny", "--method", "information_gain",
            "--num-problems", "3", "--num-samples", "1", *asked, "--out", f"{base}/{out}.jsonl"]))
        found[out] = [json.loads(line) for line in (base / f"{out}.jsonl").read_text().splitlines()]
    for one, two in zip(*found.values(), strict=True):
        assert one["ids"] == two["ids"] and one["values"] != two["values"]
