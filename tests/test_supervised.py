"""
Recipes that train a verifier on labelled solutions: their updates against the gradient of the paper's loss, what is
learned from which label, and what is refused.
"""
import json
from pathlib import Path

import pytest
import torch
from conftest import TASK_FLAGS, parse, rl_flags
from test_dpo import assert_learns, log_likelihoods, random_play, token_logprobs, verdict_odds
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from nanochat.common import BadInput
from nanochat.recipes.reward_models import orm, prm
from nanochat.recipes.verifiers import genprm, genrm
from nanochat.rl.records.prompts import Verification
from nanochat.rl.verify import spots
from nanochat.rl.verify.labelled import Labelled, as_rollouts, labelled_of_step
from nanochat.storage.files import path_of
from scripts import tango_rl
from tasks.formats import COMPACT


def play_on_labels(recipe: str, *flags: str, num: int = 8):
    """A step of random models on a file of `num` labelled solutions; see test_dpo."""
    path = Path(path_of("labels.jsonl"))
    path.write_text("".join(path.read_text().splitlines(True)[:num]))
    t = random_play(recipe, "--labels", str(path), "--examples-per-step", "6", "--num-samples", "2", *flags)
    del t.task.check  # the task's own
    return t


def after_steps(text: str) -> list[int]:
    """The positions after the steps of a text, whose tokens are bytes."""
    return [end for _, end in COMPACT.step_spans(text)]


def learned(t, recipe, known: bool = True) -> tuple:
    """The one update of a step, and the labelled solutions that it learns from."""
    rows = [row for row in labelled_of_step(t) if row.outcome is not None or not known]
    update, = recipe.play(t)
    return update, rows


def check_update(t, update, loss, role: str = "verifier") -> None:
    """That an update takes the gradient of a loss."""
    assert (update.role, update.aggregation, update.loss.name) == (role, "rollout", "reinforce")
    assert_learns(t, update, loss)


@pytest.mark.parametrize("places, loss", [("end", "bce"), ("tokens", "bce"), ("end", "squared")])
def test_an_orm_learns_the_outcome_where_it_is_asked(base, places, loss):
    t = play_on_labels("orm", "--orm-places", places, "--orm-loss", loss, "--examples-per-step", "8")
    update, rows = learned(t, orm)
    assert len(rows) == len(update.parts[0][0]) == 7  # the eighth has no outcome
    losses = []
    for row, s in zip(rows, verdict_odds(t, "verifier", update.parts[0][0]), strict=True):
        s = s if places == "tokens" else s[-1:]
        y = torch.full_like(s, float(row.outcome))
        losses += list(binary_cross_entropy_with_logits(s, y, reduction="none") if loss == "bce"
                       else (torch.sigmoid(s) - y) ** 2 / 2)
    assert {row.outcome for row in rows} == {True, False} and t.metrics["ver/num_labels"] == len(losses)
    check_update(t, update, sum(losses) / len(losses))


def test_an_orm_goes_on_to_model_right_solutions(base):
    t = play_on_labels("orm", "--lm-coef", "0.5")
    update, rows = learned(t, orm)
    rollouts = update.parts[0][0]
    odds, found = verdict_odds(t, "verifier", rollouts), token_logprobs(t.roles["verifier"].model, rollouts)
    scores = [s[-1] * (1 if row.outcome else -1) for row, s in zip(rows, odds, strict=True)]
    right = torch.cat([logprobs for row, logprobs in zip(rows, found, strict=True) if row.outcome])
    check_update(t, update, -sum(map(logsigmoid, scores)) / len(rows) - 0.5 * right.mean())


def check_prm(t, chance) -> None:
    """That a step of a prm takes the gradient of the cross-entropy after each step, against a chance of its label."""
    update, rows = learned(t, prm, known=False)
    odds = verdict_odds(t, "verifier", update.parts[0][0])
    s = torch.cat([found[after_steps(row.solution)] for row, found in zip(rows, odds, strict=True)])
    labels = torch.tensor([label for row in rows for label in row.labels], dtype=torch.float64)
    assert len(labels.unique()) == 2
    check_update(t, update, binary_cross_entropy_with_logits(s, chance(labels)))


def test_a_prm_learns_each_steps_label_after_the_step(base):
    check_prm(play_on_labels("prm"), lambda labels: labels)


def relabelled(t, change) -> None:
    """Gives each solution of the file change(its labels)."""
    path = Path(t.args.labels)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row | {"labels": change(row["labels"])}) + "\n" for row in rows))


def test_a_prm_of_progress_learns_labels_from_minus_1_to_1(base):
    t = play_on_labels("prm", "--prm-labels", "progress")
    relabelled(t, lambda labels: [1.5 * label - 0.75 for label in labels])
    prm.check(t.args, t.task)
    check_prm(t, lambda labels: (1 + labels) / 2)
    t.args.prm_labels = "soft"
    with pytest.raises(BadInput, match="has the label -0.75; labels are from 0 to 1 here"):
        prm.check(t.args, t.task)


def test_a_prm_learns_nothing_after_the_first_error(base):
    t = play_on_labels("prm", "--until-first-error", "--examples-per-step", "24", num=24)
    relabelled(t, lambda labels: [0.0, 1.0] if len(labels) > 1 else labels)
    update, rows = learned(t, prm, known=False)
    assert [row.nonzero()[:, 0].tolist() for row in update.parts[0][1]] == [
        after_steps(row.solution)[:1] for row in rows]
    assert {len(row.labels) for row in rows} == {1, 2}


@pytest.mark.parametrize("coef", ["0", "0.25"])
def test_a_genrm_learns_the_verdicts_token_and_may_learn_to_solve(base, coef):
    t = play_on_labels("genrm", "--solution-coef", coef)
    update, rows = learned(t, genrm)
    verdicts, right = update.parts[0][0], [row for row in rows if row.outcome]
    assert verdicts.texts == ["=T" if row.outcome else "=F" for row in rows]
    assert [prompt.ids for prompt in verdicts.prompt_of()] == [
        t.tokenizer.render_prompt(f"{row.problem.prompt}|{row.solution}|{len(row.labels)}") for row in rows]
    solved = t.written("verifier", t.solve_prompts([row.problem for row in right]), [row.solution for row in right])
    model = t.roles["verifier"].model
    loss = -torch.stack([row[1] for row in token_logprobs(model, verdicts)]).mean()
    check_update(t, update, loss - float(coef) * torch.cat(token_logprobs(model, solved)).mean())


def test_a_genprm_learns_the_analyses_whose_verdicts_agree_with_the_labels(base, capsys):
    t = play_on_labels("genprm")
    rows, mark = labelled_of_step(t), {True: "T", False: "F"}
    gold = ["".join(mark[label > 0] + ";" for label in row.labels) + f"={mark[row.outcome is not False]}"
            for row in rows]
    texts = [text for n, good in enumerate(gold) for text in (["x", good] if n % 2 else [good, good])]

    def verify(draw, solutions, copies):
        assert (draw, copies) == ("analyses", [row.copy for row in rows])
        prompts = t.verify_prompts(solutions)
        return t.written("verifier", [prompts[n // 2] for n in range(len(texts))], texts)

    t.verify = verify
    update, = genprm.play(t)
    model, (kept, _) = t.roles["verifier"].model, update.parts[0]
    assert kept.texts == [text for n, good in enumerate(gold) for text in [good] * (2 - n % 2)]
    check_update(t, update, -torch.stack(log_likelihoods(model, kept)).sum() / kept.lengths.sum())
    assert t.metrics["ver/kept"] == 9 and t.metrics["ver/reward"] == 0.75
    texts[:] = ["x"] * 12
    t.done.clear()
    assert list(genprm.play(t)) == [] and t.metrics["ver/kept"] == 0
    assert capsys.readouterr().out.count("most verifications cannot be read: was the verifier taught this form") == 1


def test_labels_can_be_made_hard_or_progress_and_end_with_the_first_error():
    labels, progress = [1.0, 0.25, 0.0, 1.0, 0.0], [-1.0, -0.5, 0.0, 0.25, 1.0]
    assert prm.learned_labels(labels, "soft", False) == labels
    assert prm.learned_labels(labels, "hard", False) == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert prm.learned_labels(labels, "soft", True) == [1.0, 0.25, 0.0]
    assert prm.learned_labels([1.0, 0.25], "hard", True) == [1.0, 1.0] and prm.learned_labels([], "soft", True) == []
    assert prm.learned_labels(progress, "progress", False) == [0.0, 0.25, 0.5, 0.625, 1.0]  # V = (1 + A) / 2


def test_an_analysis_agrees_when_all_its_verdicts_do():
    row = lambda labels, outcome: Labelled(None, "", outcome, labels)
    said = Verification([True, False], False, ())
    assert genprm.agrees(said, row([0.5, 0.4], False), 0.5)
    assert not genprm.agrees(said, row([0.5, 0.5], False), 0.5)
    assert not genprm.agrees(said, row([1.0, 0.0], True), 0.5)
    assert genprm.agrees(said, row([1.0, 0.0], None), 0.5)   # no outcome: any final verdict
    assert not genprm.agrees(Verification([True, False], None, ("no_final_verdict",)), row([1.0, 0.0], None), 0.5)
    assert not genprm.agrees(Verification([True], False, ("step_count_mismatch",)), row([1.0, 0.0], False), 0.5)
    assert not genprm.agrees(Verification([], False, ("missing_tags",)), row([], False), 0.5)


def test_a_verdict_that_has_other_tokens_in_a_text_is_refused_by_name(base, monkeypatch):
    t, find = play_on_labels("genrm"), spots.spot_of
    solutions = as_rollouts(t, "verifier", labelled_of_step(t)[:2])
    monkeypatch.setattr(spots, "spot_of", lambda tokenizer, fmt, tokens, *more: (
        None if ord("T") in tokens else find(tokenizer, fmt, tokens, *more)))
    spots.forced_verdicts(t, "verifier", solutions, [False, False])
    with pytest.raises(BadInput, match="format compact: in '=T' this tokenizer writes 'T' in other tokens than by"):
        spots.forced_verdicts(t, "verifier", solutions, [False, True])


def test_a_judge_is_evaluated_on_the_same_solutions_before_and_after(base):
    flags = rl_flags("--recipe", "prm", "--run", "r", "--num-steps", "2", "--prm-aggregate", "product")
    tango_rl.main(parse(tango_rl, flags))
    summary = json.loads((base / "runs" / "r" / "summary.json").read_text())
    before, after = summary["before"], summary["after"]
    for name in ("ver/pass@1_fixed", "ver/maj_fixed", "ver/tokens_fixed"):
        assert before[name] == after[name] is not None
    assert before["ver/brier_fixed"] != after["ver/brier_fixed"]


def assert_nothing_begins(base, complaint: str, recipe: str, *flags: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        tango_rl.main(parse(tango_rl, rl_flags("--recipe", recipe, "--run", "r", *flags)))
    assert not (base / "runs").exists()


def test_what_cannot_be_learned_is_refused_before_anything_is_written(base):
    for recipe in ("orm", "prm", "genrm", "genprm", "critic_rm", "gram", "supervisor", "refit", "dpo", "spin", "prime",
                   "cooper", "score", "critique_grpo", "critique_grpo_verifier", "constitutional_ai", "debate",
                   "self_rewarding", "magrpo", "alphaproof"):
        assert_nothing_begins(base, "--updates-per-batch 2: the coefficients hold for one optimizer step", recipe,
                              "--updates-per-batch", "2")
    path = base / "labels.jsonl"
    row = json.loads(path.read_text().splitlines()[-1])
    long = {"solution": "1+1:2;" * 100 + "=2", "labels": [1.0] * 100}
    path.write_text(path.read_text() + json.dumps(row | long) + "\n")
    for recipe in ("orm", "prm", "genrm", "genprm", "critic_rm", "gram", "supervisor"):
        role = "supervisor" if recipe == "supervisor" else "verifier"
        assert_nothing_begins(base, f"the {role}'s longest prompt and completion .*leave the longest solutions out of "
                                    f"--labels .*that of problem {row['index']} of rl has ", recipe)
    flags = [flag for flag in rl_flags("--recipe", "prm", "--run", "r") if flag not in TASK_FLAGS[:2]]
    with pytest.raises(BadInput, match="was trained with --chain-modulus 3"):
        tango_rl.main(parse(tango_rl, flags))
