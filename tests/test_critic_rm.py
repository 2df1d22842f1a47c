"""
Critic-RM: pairs of critiques by hand, and updates against the gradient of the loss at both ends of lambda and between.

    python -m pytest tests/test_critic_rm.py -q
"""
import pytest
import torch
from conftest import parse, rl_flags
from test_supervised import BYTES, F, T, check_update, log_likelihood, play_on_labels
from torch.nn.functional import logsigmoid

from nanochat.common import BadInput
from nanochat.recipes.reward_models import critic_rm
from nanochat.recipes.verifiers import genprm
from nanochat.rl.play.play import Play
from nanochat.rl.verify.labelled import pairs_of_step
from scripts import tango_rl

MARK = {True: "T", False: "F"}


@pytest.fixture
def critic(tmp_path, monkeypatch):
    """(flags, texts of a step) -> a run whose verifier writes these critiques, two of each solution; of a text that is
    None the true one."""
    def of(*flags: str, texts: list[str | None] | None = None):
        t = play_on_labels(tmp_path, "critic_rm", "--examples-per-step", "3", *flags, num=24)
        rows = [row for pair in pairs_of_step(t, "verifier") for row in pair]
        gold = ["".join(MARK[label > 0] + ";" for label in row.labels) + f"={MARK[row.outcome]}" for row in rows]
        said = [text or gold[n // 2] for n, text in enumerate(texts or [None] * 12)]

        def verify(t, draw, solutions, copies):
            assert draw in ("critiques", "analyses") and copies == [row.copy for row in rows]
            prompts = t.verify_prompts(solutions)
            return t.written("verifier", [prompts[n // 2] for n in range(12)], said)

        monkeypatch.setattr(Play, "verify", verify)
        return t, rows, said
    return of


def test_critiques_that_cannot_be_read_are_told_once(critic, capsys):
    t, _, _ = critic("--bt-start", "0.5", texts=["x"] * 7 + [None] * 5)
    for _ in range(2):
        list(critic_rm.play(t))
    assert capsys.readouterr().out.count("most verifications cannot be read: was the verifier taught this form") == 1
    t, _, _ = critic("--bt-start", "0.5")
    list(critic_rm.play(t))
    assert "cannot be read" not in capsys.readouterr().out


# A solution that is right, its wrong counterpart, and so on: two critiques of each. None: the true one
TEXTS = [None, None, "x", None,   # one pair, and one of the right solution left over
         None, "=F", "=T", "x",   # none of the wrong solution is kept: no pair
         "x", None, None, None]   # one pair
KEPT = [0, 1, 3, 4, 9, 10, 11]
PAIRS = [(0, 3), (9, 10)]
PAIRED = [n for pair in PAIRS for n in pair]


def plain(t, rows, said) -> tuple[torch.Tensor, torch.Tensor]:
    """The LM loss of the paired critiques and the margins of the pairs, by plain forwards."""
    model, fmt = t.roles["verifier"].model, t.task.fmt
    prompts = [BYTES.render_prompt(fmt.verifier_prompt.format(
        problem=row.problem.prompt, solution=row.solution, num_steps=len(row.labels))) for row in rows]
    lm = torch.cat([log_likelihood(model, prompts[n // 2], [*BYTES.encode(said[n]), BYTES.assistant_end])
                    for pair in PAIRS for n in pair])

    def score(n: int) -> torch.Tensor:
        stem = BYTES.encode(said[n])[:-1]  # the verdict is its last token
        return (log_likelihood(model, prompts[n // 2], [*stem, T])[-1]
                - log_likelihood(model, prompts[n // 2], [*stem, F])[-1])

    return -lm.mean(), torch.stack([score(w) - score(l) for w, l in PAIRS])


# Pairs

@pytest.mark.parametrize("of_each, pairs", [
    ([0, 0, 1, 2, 3, 3, 3], [0, 2, 3, 4]),  # the shorter side decides
    ([0, 0, 2, 3], [2, 3]),                 # 0 has no wrong counterpart that was kept
    ([1, 1, 3], []), ([], []),
    ([0, 0, 1, 1], [0, 2, 1, 3])])          # the first with the first, the second with the second
def test_the_kept_critiques_of_a_right_solution_are_paired_with_those_of_the_wrong_one(of_each, pairs):
    assert critic_rm.in_pairs(of_each) == pairs


# Updates

@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_update_is_the_gradient_of_both_losses(critic, share):
    t, rows, said = critic("--bt-start", str(share), texts=TEXTS)
    assert [row.outcome for row in rows] == [True, False] * 3
    update, = critic_rm.play(t)
    lm, margins = plain(t, rows, said)
    pair = -logsigmoid(margins).mean()
    assert (t.metrics["ver/kept"], t.metrics["ver/num_pairs"], t.metrics["ver/bt_share"]) == (7, 2, share)
    assert t.metrics["ver/reward"] == pytest.approx(7 / 12)
    assert t.metrics["ver/pair_loss"] == pytest.approx(pair.item(), rel=1e-4)
    check_update(t, update, (1 - share) * lm + share * pair)


def test_with_lambda_0_it_is_genprm_on_the_same_critiques(critic, monkeypatch):
    t, rows, said = critic("--bt-start", "0", texts=TEXTS)
    update, = critic_rm.play(t)
    monkeypatch.setattr(genprm, "labelled_of_step", lambda t: rows)
    t.args.label_bar, t.args.kept_per_solution = 0.5, 0
    other, = genprm.play(t)
    (mine, a), = update.parts
    (theirs, b), = other.parts
    assert mine.texts == [said[n] for n in PAIRED] and theirs.texts == [said[n] for n in KEPT]
    paired = [KEPT.index(n) for n in PAIRED]
    assert torch.equal(mine.tokens, theirs.tokens[paired])
    assert torch.allclose(a / a.sum(), b[paired] / b[paired].sum())  # all tokens of them alike


def test_with_lambda_1_only_the_verdicts_of_paired_critiques_move(critic):
    t, _, said = critic("--bt-start", "1", texts=TEXTS)
    update, = critic_rm.play(t)
    signs = {0: 1, 3: -1, 9: 1, 10: -1}  # of the right solution's log-odds of T, of the wrong one's
    for (rollouts, coefficients), token, way in zip(update.parts, (T, F), (1, -1), strict=True):
        for row, n in enumerate(PAIRED):
            at, = coefficients[row].nonzero()[:, 0].tolist()
            assert at == len(said[n]) - 1 and rollouts.targets[row, at] == token
            assert (coefficients[row, at] > 0) == (way * signs[n] > 0)


def test_a_pairs_coefficients_by_hand(critic):
    t, rows, said = critic("--bt-start", "1", texts=TEXTS)
    update, = critic_rm.play(t)
    coefficients = update.parts[0][1].sum(dim=1)
    # of a mean over 2 pairs in an update that averages over the 8 rollouts of both parts
    for (w, l), margin in zip(PAIRS, plain(t, rows, said)[1].detach(), strict=True):
        pull = torch.sigmoid(-margin).item() * 8 / 2
        assert coefficients[PAIRED.index(w)].item() == pytest.approx(pull, rel=1e-4)
        assert coefficients[PAIRED.index(l)].item() == pytest.approx(-pull, rel=1e-4)


def test_lambda_goes_linearly_from_its_start_to_its_end(critic):
    t, _, _ = critic("--bt-start", "0.2", "--bt-end", "0.8")
    seen = []
    for step in (0, 3, 9):  # of 10 updates
        t.steps["verifier"] = step
        list(critic_rm.play(t))
        seen.append(t.metrics["ver/bt_share"])
    assert seen == pytest.approx([0.2, 0.4, 0.8])


def test_where_nothing_is_kept_nothing_is_learned(critic):
    t, _, _ = critic("--bt-start", "0.5", texts=["x"] * 12)
    assert list(critic_rm.play(t)) == [] and t.metrics["ver/kept"] == t.metrics["ver/num_pairs"] == 0


def test_without_critiques_the_verdict_alone_is_scored(critic):
    t, rows, _ = critic("--critiques", "none", "--bt-start", "0")
    update, = critic_rm.play(t)
    model, fmt, s = t.roles["verifier"].model, t.task.fmt, []
    for row in rows:
        prompt = BYTES.render_prompt(fmt.verifier_prompt.format(
            problem=row.problem.prompt, solution=row.solution, num_steps=len(row.labels)))
        s.append(log_likelihood(model, prompt, BYTES.encode("=T"))[1]
                 - log_likelihood(model, prompt, BYTES.encode("=F"))[1])
    margins = torch.stack(s[::2]) - torch.stack(s[1::2])
    assert t.metrics["ver/bt_share"] == 1 and t.metrics["ver/num_pairs"] == 3 and "ver/kept" not in t.metrics
    check_update(t, update, -logsigmoid(margins).mean())


# What is refused

@pytest.mark.parametrize("flags, complaint", [
    (["--bt-start", "-0.1"], "--bt-start -0.1: must be from 0 to 1"),
    (["--bt-end", "1.5"], "--bt-end 1.5: must be from 0 to 1"),
    (["--bt-end", "nan"], "nan"),
    (["--critiques", "teacher"], "--critiques teacher: there are self, none")])
def test_settings_that_cannot_work_are_refused(base, flags, complaint):
    with pytest.raises(BadInput, match=complaint):
        tango_rl.main(parse(tango_rl, rl_flags("--recipe", "critic_rm", *flags)))
