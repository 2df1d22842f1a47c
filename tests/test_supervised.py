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
from test_log_odds import assert_update_is, play_of, random_model, true_log_odds
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from nanochat.common import BadInput
from nanochat.recipes.reward_models import orm, prm
from nanochat.recipes.verifiers import genprm, genrm
from nanochat.rl.records.prompts import Verification
from nanochat.rl.verify.labelled import Labelled, as_rollouts, labelled_of_step
from nanochat.rl.verify.spots import forced_verdicts, spot_of
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
    """The one update of a step, and the labelled solutions that it learns from, as the recipe orders them."""
    rows = [row for row in labelled_of_step(t) if row.outcome is not None or not known]
    update, = recipe.play(t)
    return update, rows


def check_update(t, update, loss) -> None:
    assert update.aggregation == "rollout" and update.loss.name == "reinforce"
    assert_update_is(t.roles["verifier"].model, update.parts, loss)


# Updates

@pytest.mark.parametrize("places", ["end", "tokens"])
@pytest.mark.parametrize("loss", ["bce", "squared"])
def test_an_orm_learns_the_outcome_where_it_is_asked(labelled_play, places, loss):
    t = labelled_play("orm", "--orm-places", places, "--orm-loss", loss)
    update, rows = learned(t, orm)
    losses = []
    for n, row in enumerate(rows):
        s = true_log_odds(t.roles["verifier"].model, update.parts[0][0], n)
        s = s if places == "tokens" else s[-1:]
        y = torch.full_like(s, float(row.outcome))
        losses += list(binary_cross_entropy_with_logits(s, y, reduction="none") if loss == "bce"
                       else (torch.sigmoid(s) - y) ** 2 / 2)
    assert {row.outcome for row in rows} == {True, False}
    check_update(t, update, sum(losses) / len(losses))


def test_an_orm_goes_on_to_model_right_solutions(labelled_play):
    t = labelled_play("orm", "--lm-coef", "0.5")
    update, rows = learned(t, orm)
    model, rollouts = t.roles["verifier"].model, update.parts[0][0]
    scores = [true_log_odds(model, rollouts, n)[-1] * (1 if row.outcome else -1) for n, row in enumerate(rows)]
    right = torch.cat([log_likelihood(model, rollouts.prompt_of()[n].ids, rollouts.completions()[n])
                       for n, row in enumerate(rows) if row.outcome])
    check_update(t, update, -sum(map(logsigmoid, scores)) / len(rows) - 0.5 * right.mean())


def test_a_prm_learns_each_steps_label_after_the_step(labelled_play):
    t = labelled_play("prm")
    update, rows = learned(t, prm, known=False)
    s = torch.cat([true_log_odds(t.roles["verifier"].model, update.parts[0][0], n)[after_steps(row.solution)]
                   for n, row in enumerate(rows)])
    labels = torch.tensor([label for row in rows for label in row.labels], dtype=torch.float64)
    assert {0.0, 1.0} == set(labels.tolist())
    check_update(t, update, binary_cross_entropy_with_logits(s, labels))


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


def test_a_genprm_learns_the_analyses_whose_verdicts_agree_with_the_labels(labelled_play, monkeypatch):
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


def test_where_no_analysis_agrees_nothing_is_learned(labelled_play, monkeypatch):
    t = labelled_play("genprm")
    monkeypatch.setattr(type(t), "verify", lambda t, draw, solutions, copies: t.written(
        "verifier", [p for p in t.verify_prompts(solutions) for _ in range(2)], ["x"] * 2 * len(solutions)))
    assert list(genprm.play(t)) == [] and t.metrics["ver/kept"] == 0


# Labels

def test_labels_can_be_made_hard_and_end_with_the_first_error():
    labels = [1.0, 0.25, 0.0, 1.0, 0.0]
    assert prm.learned_labels(labels, "soft", False) == labels
    assert prm.learned_labels(labels, "hard", False) == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert prm.learned_labels(labels, "soft", True) == [1.0, 0.25, 0.0]
    assert prm.learned_labels([1.0, 0.25], "hard", True) == [1.0, 1.0]
    assert prm.learned_labels([], "soft", True) == []


def test_progress_is_learned_as_half_of_1_and_it():
    """V = (1 + A) / 2 at its ends, and 2V - 1 is A again."""
    progress = [-1.0, -0.5, 0.0, 0.25, 1.0]
    learned = prm.learned_labels(progress, "progress", False)
    assert learned == [0.0, 0.25, 0.5, 0.625, 1.0] and [2 * V - 1 for V in learned] == progress


def test_a_prm_of_progress_reads_labels_from_minus_1_to_1_and_takes_the_gradient_of_their_cross_entropy(labelled_play):
    t = labelled_play("prm", "--prm-labels", "progress")
    path = Path(t.args.labels)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | {"labels": [1.5 * label - 0.75 for label in line["labels"]]}) + "\n"
                            for line in lines))
    prm.check(t.args, t.task)
    update, rows = learned(t, prm, known=False)
    s = torch.cat([true_log_odds(t.roles["verifier"].model, update.parts[0][0], n)[after_steps(row.solution)]
                   for n, row in enumerate(rows)])
    labels = torch.tensor([label for row in rows for label in row.labels], dtype=torch.float64)
    assert {-0.75, 0.75} == set(labels.tolist())
    check_update(t, update, binary_cross_entropy_with_logits(s, (1 + labels) / 2))
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


def test_the_verdict_of_a_genrm_is_a_token_of_its_own_here():
    assert spot_of(BYTES, COMPACT, BYTES.encode("=T"), 1) == (1, T, F)


class Contextual:
    """Writes a T after "=" as a token of its own."""
    OWN, TEXT = 300, staticmethod(lambda ids: [T if token == 300 else token for token in ids])

    def __getattr__(self, name):
        return getattr(BYTES, name)

    def encode(self, text: str) -> list[int]:
        ids, (equals,) = BYTES.encode(text), BYTES.encode("=")
        return [self.OWN if (before, token) == (equals, T) else token
                for before, token in zip([0, *ids], ids, strict=False)]

    def token_bytes(self, token: int) -> bytes:
        return BYTES.token_bytes(*self.TEXT([token]))

    def decode(self, ids: list[int]) -> str:
        return BYTES.decode(self.TEXT(ids))


def test_a_verdict_that_has_other_tokens_in_a_text_is_refused_by_name(labelled_play):
    t = labelled_play("genrm")
    t.sampler.tokenizer = Contextual()
    solutions = as_rollouts(t, "verifier", labelled_of_step(t)[:2])
    forced_verdicts(t, "verifier", solutions, [False, False])
    with pytest.raises(BadInput, match="format compact: in '=T' this tokenizer writes 'T' in other tokens than by"):
        forced_verdicts(t, "verifier", solutions, [False, True])


def test_verifications_that_cannot_be_read_are_told(labelled_play, capsys):
    t = labelled_play("genprm", "--verifier-max-new-tokens", "4")
    t.draws["analyses"] = genprm.written_draw(t.args, 6, 1, 1)._replace(num_samples=2)
    list(genprm.play(t))
    assert "most verifications cannot be read: was the verifier taught this form" in capsys.readouterr().out


# Runs

def test_a_label_without_an_outcome_is_left_out_of_outcome_models(labelled_play):
    t = labelled_play("orm", "--examples-per-step", "8")  # the eighth has none
    update, rows = learned(t, orm)
    assert len(rows) == len(update.parts[0][0]) == 7 and t.metrics["ver/num_labels"] == 7


def test_a_judge_is_evaluated_on_the_same_solutions_before_and_after(base):
    flags = rl_flags("--recipe", "prm", "--run", "r", "--num-steps", "2", "--prm-aggregate", "product")
    tango_rl.main(parse(tango_rl, flags))
    summary = json.loads((base / "runs" / "r" / "summary.json").read_text())
    before, after = summary["before"], summary["after"]
    for name in ("ver/pass@1_fixed", "ver/maj_fixed", "ver/tokens_fixed"):
        assert before[name] == after[name] is not None
    assert before["ver/brier_fixed"] != after["ver/brier_fixed"]


@pytest.mark.parametrize("recipe, flags, complaint", [
    ("orm", ["--orm-places", "steps"], "--orm-places steps: there are end, tokens"),
    ("orm", ["--orm-loss", "mse"], "--orm-loss mse: there are bce, squared"),
    ("orm", ["--lm-coef", "-1"], "--lm-coef -1.0: must be at least 0"),
    ("prm", ["--prm-labels", "gold"], "--prm-labels gold: there are soft, hard, progress"),
    ("prm", ["--prm-labels", "progress", "--until-first-error"], "--until-first-error: with --prm-labels progress"),
    ("prm", ["--prm-labels", "progress", "--prm-aggregate", "product"], "--prm-aggregate product: with --prm-labels"),
    ("prm", ["--prm-aggregate", "mean"], "--prm-aggregate mean: there are product, min, last"),
    ("prm", ["--judged-samples", "0"], "--judged-samples 0: must be at least 1"),
    ("genrm", ["--solution-coef", "-1"], "--solution-coef -1.0: must be at least 0"),
    ("genprm", ["--label-bar", "0"], "--label-bar 0.0: must be above 0"),
    ("genprm", ["--verifications", "0"], "--verifications 0: must be at least 1")])
def test_settings_that_cannot_work_are_refused(base, recipe, flags, complaint):
    with pytest.raises(BadInput, match=complaint):
        tango_rl.main(parse(tango_rl, rl_flags("--recipe", recipe, *flags)))


@pytest.mark.parametrize("recipe", ["orm", "prm", "genrm", "genprm", "critic_rm", "gram", "supervisor", "refit", "dpo",
                                    "spin", "prime", "cooper", "score", "critique_grpo", "critique_grpo_verifier"])
def test_coefficients_hold_for_one_optimizer_step_and_more_are_refused_before_anything_is_written(base, recipe):
    with pytest.raises(BadInput, match="--updates-per-batch 2: the coefficients hold for one optimizer step"):
        tango_rl.main(parse(tango_rl, rl_flags("--recipe", recipe, "--run", "r", "--updates-per-batch", "2")))
    assert not (base / "runs").exists()


@pytest.mark.parametrize("recipe", ["orm", "prm", "genrm", "genprm", "critic_rm", "gram", "supervisor"])
def test_a_labelled_solution_that_no_context_holds_is_refused_before_anything_is_written(base, recipe):
    path = base / "labels.jsonl"
    row = json.loads(path.read_text().splitlines()[-1])
    long = {"solution": "1+1:2;" * 100 + "=2", "labels": [1.0] * 100}
    path.write_text(path.read_text() + json.dumps(row | long) + "\n")
    complaint = (f"the {'supervisor' if recipe == 'supervisor' else 'verifier'}'s longest prompt and completion .*"
                 f"leave the longest solutions out of --labels .*that of problem {row['index']} of rl has ")
    with pytest.raises(BadInput, match=complaint):
        tango_rl.main(parse(tango_rl, rl_flags("--recipe", recipe, "--run", "r")))
    assert not (base / "runs").exists()


def test_task_flags_that_were_left_out_are_named_before_labels_are_read(base):
    flags = [flag for flag in rl_flags("--recipe", "prm", "--run", "r") if flag not in TASK_FLAGS[:2]]
    with pytest.raises(BadInput, match="was trained with --chain-modulus 3"):
        tango_rl.main(parse(tango_rl, flags))
