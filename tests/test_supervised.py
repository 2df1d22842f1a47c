"""
Recipes that train a verifier on labelled solutions: their updates against the gradient of the paper's loss, what is
learned from which label, and what is refused.

    python -m pytest tests/test_supervised.py -q
"""
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import TASK_FLAGS, parse, rl_flags, write_labelled
from test_dpo import assert_refused, random_model
from test_log_odds import assert_update_is, play_of, true_log_odds
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from nanochat.common import BadInput
from nanochat.recipes.reward_models import orm, prm
from nanochat.recipes.verifiers import genprm, genrm
from nanochat.rl.records.prompts import Verification
from nanochat.rl.verify import spots
from nanochat.rl.verify.labelled import Labelled, as_rollouts, labelled_of_step
from nanochat.tokenizer import Tokenizer
from scripts import tango_rl
from tasks import make_task
from tasks.formats import COMPACT

BYTES = Tokenizer.train(iter([]), 265)
T, F = BYTES.encode("TF")


def play_on_labels(folder, recipe: str, *flags: str, num: int = 8):
    """A run of one role with a recipe's flags, on a file of `num` labelled solutions."""
    path = folder / "labels.jsonl"
    args = parse(tango_rl, ["--recipe", recipe, "--labels", str(path), "--chain-modulus", "3", "--chain-max-steps", "2",
                            "--examples-per-step", "6", "--num-samples", "2", *flags])
    task = make_task(args)
    write_labelled(path, task, num)
    t = play_of(random_model())
    t.sampler.task, t.sampler.tokenizer = task, BYTES
    args.micro_batch_tokens, args.max_grad_norm = 60, 0.0
    t.args = args
    return t


@pytest.fixture
def labelled_play(tmp_path):
    """(recipe, flags) -> a run of one role with that recipe's flags, on a file of labelled solutions."""
    return partial(play_on_labels, tmp_path)


def after_steps(text: str) -> list[int]:
    """The positions after the steps of a text of single-byte tokens."""
    return [end for _, end in COMPACT.step_spans(text)]


def log_likelihood(model, prompt: list[int], completion: list[int]) -> torch.Tensor:
    logits = model.head(model.trunk(torch.tensor([prompt + completion]))[0, len(prompt) - 1: -1])
    return torch.log_softmax(logits.double(), dim=-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def learned(t, recipe, known: bool = True) -> tuple:
    """The one update of a step, and the labelled solutions that it learns from."""
    rows = [row for row in labelled_of_step(t) if row.outcome is not None or not known]
    update, = recipe.play(t)
    return update, rows


def check_update(t, update, loss) -> None:
    assert update.aggregation == "rollout" and update.loss.name == "reinforce"
    assert_update_is(t.roles["verifier"].model, update.parts, loss)


# Updates

@pytest.mark.parametrize("places, loss", [("end", "bce"), ("tokens", "bce"), ("end", "squared")])
def test_an_orm_learns_the_outcome_where_it_is_asked(labelled_play, places, loss):
    t = labelled_play("orm", "--orm-places", places, "--orm-loss", loss, "--examples-per-step", "8")
    update, rows = learned(t, orm)
    assert len(rows) == len(update.parts[0][0]) == 7  # the eighth has no outcome
    losses = []
    for n, row in enumerate(rows):
        s = true_log_odds(t.roles["verifier"].model, update.parts[0][0], n)
        s = s if places == "tokens" else s[-1:]
        y = torch.full_like(s, float(row.outcome))
        losses += list(binary_cross_entropy_with_logits(s, y, reduction="none") if loss == "bce"
                       else (torch.sigmoid(s) - y) ** 2 / 2)
    assert {row.outcome for row in rows} == {True, False} and t.metrics["ver/num_labels"] == len(losses)
    check_update(t, update, sum(losses) / len(losses))


def test_an_orm_goes_on_to_model_right_solutions(labelled_play):
    t = labelled_play("orm", "--lm-coef", "0.5")
    update, rows = learned(t, orm)
    model, rollouts = t.roles["verifier"].model, update.parts[0][0]
    scores = [true_log_odds(model, rollouts, n)[-1] * (1 if row.outcome else -1) for n, row in enumerate(rows)]
    right = torch.cat([log_likelihood(model, rollouts.prompt_of()[n].ids, rollouts.completions()[n])
                       for n, row in enumerate(rows) if row.outcome])
    check_update(t, update, -sum(map(logsigmoid, scores)) / len(rows) - 0.5 * right.mean())


def check_prm(t, chance) -> None:
    """That a step of a prm takes the gradient of the cross-entropy after each step, against a chance of its label."""
    update, rows = learned(t, prm, known=False)
    s = torch.cat([true_log_odds(t.roles["verifier"].model, update.parts[0][0], n)[after_steps(row.solution)]
                   for n, row in enumerate(rows)])
    labels = torch.tensor([label for row in rows for label in row.labels], dtype=torch.float64)
    assert len(labels.unique()) == 2
    check_update(t, update, binary_cross_entropy_with_logits(s, chance(labels)))


def test_a_prm_learns_each_steps_label_after_the_step(labelled_play):
    check_prm(labelled_play("prm"), lambda labels: labels)


def test_a_prm_of_progress_learns_labels_from_minus_1_to_1(labelled_play):
    t = labelled_play("prm", "--prm-labels", "progress")
    path = Path(t.args.labels)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | {"labels": [1.5 * label - 0.75 for label in line["labels"]]}) + "\n"
                            for line in lines))
    prm.check(t.args, t.task)
    check_prm(t, lambda labels: (1 + labels) / 2)
    t.args.prm_labels = "soft"
    with pytest.raises(BadInput, match="has the label -0.75; labels are from 0 to 1 here"):
        prm.check(t.args, t.task)


def test_a_prm_learns_nothing_after_the_first_error(labelled_play):
    t = labelled_play("prm", "--until-first-error")
    update, rows = learned(t, prm, known=False)
    first = [row.labels.index(0.0) if 0.0 in row.labels else len(row.labels) for row in rows]
    wanted = [after_steps(row.solution)[: k + 1] for row, k in zip(rows, first, strict=True)]
    assert [row.nonzero()[:, 0].tolist() for row in update.parts[0][1]] == wanted
    assert any(k + 1 < len(row.labels) for row, k in zip(rows, first, strict=True))


@pytest.mark.parametrize("coef", ["0", "0.25"])
def test_a_genrm_learns_the_verdicts_token_and_may_learn_to_solve(labelled_play, coef):
    t = labelled_play("genrm", "--solution-coef", coef)
    update, rows = learned(t, genrm)
    model, verdicts = t.roles["verifier"].model, update.parts[0][0]
    fmt, losses, right = t.task.fmt, [], []
    for n, row in enumerate(rows):
        prompt = BYTES.render_prompt(fmt.verifier_prompt.format(
            problem=row.problem.prompt, solution=row.solution, num_steps=len(row.labels)))
        assert verdicts.prompt_of()[n].ids == prompt
        losses.append(-log_likelihood(model, prompt, BYTES.encode("=T" if row.outcome else "=F"))[1])
        if row.outcome:
            right.append(log_likelihood(model, BYTES.render_prompt(row.problem.prompt),
                                        [*BYTES.encode(row.solution), BYTES.assistant_end]))
    check_update(t, update, sum(losses) / len(losses) - float(coef) * torch.cat(right).mean())


def test_a_genprm_learns_the_analyses_whose_verdicts_agree_with_the_labels(labelled_play, monkeypatch, capsys):
    t = labelled_play("genprm", "--kept-per-solution", "1")
    rows, mark = labelled_of_step(t), {True: "T", False: "F"}
    gold = ["".join(mark[label > 0] + ";" for label in row.labels) + f"={mark[row.outcome is not False]}"
            for row in rows]
    texts = [text for n, good in enumerate(gold) for text in (["x", good] if n % 2 else [good, good])]

    def verify(t, draw, solutions, copies):
        assert (draw, copies) == ("analyses", [row.copy for row in rows])
        prompts = t.verify_prompts(solutions)
        return t.written("verifier", [prompts[n // 2] for n in range(len(texts))], texts)

    monkeypatch.setattr(type(t), "verify", verify)
    update, = genprm.play(t)
    model, (kept, _) = t.roles["verifier"].model, update.parts[0]
    assert kept.texts == gold
    likelihoods = [log_likelihood(model, kept.prompt_of()[n].ids, kept.completions()[n]) for n in range(len(gold))]
    check_update(t, update, -torch.cat(likelihoods).mean())
    assert t.metrics["ver/kept"] == 6 and t.metrics["ver/reward"] == 0.75
    texts[:] = ["x"] * 12
    t.done.clear()
    assert list(genprm.play(t)) == [] and t.metrics["ver/kept"] == 0
    assert capsys.readouterr().out.count("most verifications cannot be read: was the verifier taught this form") == 1


# Labels

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


def test_of_a_solution_the_first_analyses_that_agree_are_kept():
    agree = [False, True, True, False, False, False, True, True, True]
    assert genprm.kept_rows(agree, 3, 0) == [1, 2, 6, 7, 8]
    assert genprm.kept_rows(agree, 3, 2) == [1, 2, 6, 7]


def test_a_verdict_that_has_other_tokens_in_a_text_is_refused_by_name(labelled_play, monkeypatch):
    t, find = labelled_play("genrm"), spots.spot_of
    solutions = as_rollouts(t, "verifier", labelled_of_step(t)[:2])
    monkeypatch.setattr(spots, "spot_of", lambda tokenizer, fmt, tokens, *more: (
        None if T in tokens else find(tokenizer, fmt, tokens, *more)))
    spots.forced_verdicts(t, "verifier", solutions, [False, False])
    with pytest.raises(BadInput, match="format compact: in '=T' this tokenizer writes 'T' in other tokens than by"):
        spots.forced_verdicts(t, "verifier", solutions, [False, True])


# Runs and refusals

def test_a_judge_is_evaluated_on_the_same_solutions_before_and_after(base):
    flags = rl_flags("--recipe", "prm", "--run", "r", "--num-steps", "2", "--prm-aggregate", "product")
    tango_rl.main(parse(tango_rl, flags))
    summary = json.loads((base / "runs" / "r" / "summary.json").read_text())
    before, after = summary["before"], summary["after"]
    for name in ("ver/pass@1_fixed", "ver/maj_fixed", "ver/tokens_fixed"):
        assert before[name] == after[name] is not None
    assert before["ver/brier_fixed"] != after["ver/brier_fixed"]


@pytest.mark.parametrize("words, flags", [
    ("--until-first-error: with --prm-labels progress", ["--until-first-error"]),
    ("--prm-aggregate product: with --prm-labels progress", ["--prm-aggregate", "product"])])
def test_progress_knows_no_error_and_makes_no_product(words, flags):
    assert_refused("prm", words, "--prm-labels", "progress", *flags)


def assert_nothing_begins(base, complaint: str, recipe: str, *flags: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        tango_rl.main(parse(tango_rl, rl_flags("--recipe", recipe, "--run", "r", *flags)))
    assert not (base / "runs").exists()


def test_coefficients_hold_for_one_optimizer_step_and_more_are_refused_before_anything_is_written(base):
    for recipe in ("orm", "prm", "genrm", "genprm", "critic_rm", "gram", "supervisor", "refit", "dpo", "spin", "prime",
                   "cooper", "score", "critique_grpo", "critique_grpo_verifier", "constitutional_ai", "debate",
                   "self_rewarding", "magrpo", "alphaproof"):
        assert_nothing_begins(base, "--updates-per-batch 2: the coefficients hold for one optimizer step", recipe,
                              "--updates-per-batch", "2")


def test_a_labelled_solution_that_no_context_holds_is_refused_before_anything_is_written(base):
    path = base / "labels.jsonl"
    row = json.loads(path.read_text().splitlines()[-1])
    long = {"solution": "1+1:2;" * 100 + "=2", "labels": [1.0] * 100}
    path.write_text(path.read_text() + json.dumps(row | long) + "\n")
    for recipe in ("orm", "prm", "genrm", "genprm", "critic_rm", "gram", "supervisor"):
        role = "supervisor" if recipe == "supervisor" else "verifier"
        assert_nothing_begins(base, f"the {role}'s longest prompt and completion .*leave the longest solutions out of "
                                    f"--labels .*that of problem {row['index']} of rl has ", recipe)


def test_task_flags_that_were_left_out_are_named_before_labels_are_read(base):
    flags = [flag for flag in rl_flags("--recipe", "prm", "--run", "r") if flag not in TASK_FLAGS[:2]]
    with pytest.raises(BadInput, match="was trained with --chain-modulus 3"):
        tango_rl.main(parse(tango_rl, flags))
