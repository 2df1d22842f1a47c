"""
Critic-RM: pairs of critiques by hand, and updates against the gradient of the loss at both ends of lambda and between.

    python -m pytest tests/test_critic_rm.py -q
"""
import pytest
import torch
from test_supervised import BYTES, F, T, check_update, log_likelihood, play_on_labels
from torch.nn.functional import logsigmoid

from nanochat.recipes.reward_models import critic_rm
from nanochat.rl.play.play import Play
from nanochat.rl.verify.labelled import pairs_of_step

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
            assert draw == "critiques" and copies == [row.copy for row in rows]
            prompts = t.verify_prompts(solutions)
            return t.written("verifier", [prompts[n // 2] for n in range(12)], said)

        monkeypatch.setattr(Play, "verify", verify)
        return t, rows, said
    return of


# A solution that is right, its wrong counterpart, and so on: two critiques of each. None: the true one
TEXTS = [None, None, "x", None,   # one pair, and one of the right solution left over
         None, "=F", "=T", "x",   # none of the wrong solution is kept: no pair
         "x", None, None, None]   # one pair
PAIRS = [(0, 3), (9, 10)]
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
def test_the_update_is_the_gradient_of_both_losses(critic, share, capsys):
    t, rows, said = critic("--bt-start", str(share), texts=TEXTS)
    assert [row.outcome for row in rows] == [True, False] * 3
    update, = critic_rm.play(t)
    lm, margins = plain(t, rows, said)
    pair = -logsigmoid(margins).mean()
    assert (t.metrics["ver/kept"], t.metrics["ver/num_pairs"], t.metrics["ver/bt_share"]) == (7, 2, share)
    assert t.metrics["ver/reward"] == pytest.approx(7 / 12)
    assert t.metrics["ver/pair_loss"] == pytest.approx(pair.item(), rel=1e-4)
    assert "cannot be read" not in capsys.readouterr().out
    check_update(t, update, (1 - share) * lm + share * pair)


def test_lambda_goes_linearly_from_its_start_to_its_end(critic):
    t, _, _ = critic("--bt-start", "0.2", "--bt-end", "0.8")
    seen = []
    for step in (0, 3, 9):  # of 10 updates
        t.steps["verifier"] = step
        list(critic_rm.play(t))
        seen.append(t.metrics["ver/bt_share"])
    assert seen == pytest.approx([0.2, 0.4, 0.8])


def test_where_nothing_is_kept_nothing_is_learned_and_what_cannot_be_read_is_told_once(critic, capsys):
    t, _, _ = critic("--bt-start", "0.5", texts=["x"] * 12)
    for _ in range(2):
        assert list(critic_rm.play(t)) == [] and t.metrics["ver/kept"] == t.metrics["ver/num_pairs"] == 0
    assert capsys.readouterr().out.count("most verifications cannot be read: was the verifier taught this form") == 1


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
