"""Critic-RM: pairs of critiques by hand, and updates against the gradient of the loss."""
import pytest
import torch
from test_dpo import token_logprobs, verdict_odds
from test_supervised import check_update, play_on_labels
from torch.nn.functional import logsigmoid

from nanochat.recipes.reward_models import critic_rm
from nanochat.rl.verify.labelled import as_rollouts, pairs_of_step

MARK = {True: "T", False: "F"}


def critic(*flags: str, texts: list[str | None] | None = None):
    """A step whose verifier writes these critiques, two of each solution; of a text that is None the true one. -> the
    step, its solutions, their critiques as rollouts"""
    t = play_on_labels("critic_rm", *flags, "--examples-per-step", "3", num=24)
    rows = [row for pair in pairs_of_step(t, "verifier") for row in pair]
    gold = ["".join(MARK[label > 0] + ";" for label in row.labels) + f"={MARK[row.outcome]}" for row in rows]
    prompts = t.verify_prompts(as_rollouts(t, "verifier", rows))
    said = [text or gold[n // 2] for n, text in enumerate(texts or [None] * 12)]
    critiques = t.written("verifier", [prompts[n // 2] for n in range(12)], said)

    def verify(draw, solutions, copies):
        assert draw == "critiques" and copies == [row.copy for row in rows]
        return critiques
    t.verify = verify
    return t, rows, critiques


# A solution that is right, its wrong counterpart, and so on: two critiques of each. None: the true one
TEXTS = [None, None, "x", None,   # one pair, and one of the right solution left over
         None, "=F", "=T", "x",   # none of the wrong solution is kept: no pair
         "x", None, None, None]   # one pair
PAIRS = [(0, 3), (9, 10)]


def plain(t, critiques) -> tuple[torch.Tensor, torch.Tensor]:
    """The LM loss of the paired critiques and the margins of the pairs, by plain forwards."""
    logprobs, odds = token_logprobs(t.roles["verifier"].model, critiques), verdict_odds(t, "verifier", critiques)
    lm = torch.cat([logprobs[n] for pair in PAIRS for n in pair])
    s = [row[-2] for row in odds]  # the verdict is the last token before the end
    return -lm.mean(), torch.stack([s[w] - s[l] for w, l in PAIRS])


@pytest.mark.parametrize("of_each, pairs", [
    ([0, 0, 1, 2, 3, 3, 3], [0, 2, 3, 4]),  # the shorter side decides
    ([0, 0, 2, 3], [2, 3]),                 # 0 has no wrong counterpart that was kept
    ([1, 1, 3], []), ([], []),
    ([0, 0, 1, 1], [0, 2, 1, 3])])          # the first with the first, the second with the second
def test_the_kept_critiques_of_a_right_solution_are_paired_with_those_of_the_wrong_one(of_each, pairs):
    assert critic_rm.in_pairs(of_each) == pairs


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_update_is_the_gradient_of_both_losses(base, share, capsys):
    t, rows, critiques = critic("--bt-start", str(share), texts=TEXTS)
    assert [row.outcome for row in rows] == [True, False] * 3
    update, = critic_rm.play(t)
    lm, margins = plain(t, critiques)
    pair = -logsigmoid(margins).mean()
    assert (t.metrics["ver/kept"], t.metrics["ver/num_pairs"], t.metrics["ver/bt_share"]) == (7, 2, share)
    assert t.metrics["ver/reward"] == pytest.approx(7 / 12)
    assert t.metrics["ver/pair_loss"] == pytest.approx(pair.item(), rel=1e-4)
    assert "cannot be read" not in capsys.readouterr().out
    check_update(t, update, (1 - share) * lm + share * pair)


def test_lambda_goes_linearly_from_its_start_to_its_end(base):
    t, _, _ = critic("--bt-start", "0.2", "--bt-end", "0.8")
    seen = []
    for step in (0, 1, 3):  # of 4 updates
        t.steps["verifier"] = step
        list(critic_rm.play(t))
        seen.append(t.metrics["ver/bt_share"])
    assert seen == pytest.approx([0.2, 0.4, 0.8])


def test_where_nothing_is_kept_nothing_is_learned_and_what_cannot_be_read_is_told_once(base, capsys):
    t, _, _ = critic("--bt-start", "0.5", texts=["x"] * 12)
    for _ in range(2):
        assert list(critic_rm.play(t)) == [] and t.metrics["ver/kept"] == t.metrics["ver/num_pairs"] == 0
    assert capsys.readouterr().out.count("most verifications cannot be read: was the verifier taught this form") == 1
