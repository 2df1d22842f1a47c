"""A run notices that its sampler has other weights than its trainer, and stops."""
import pytest
import torch
from conftest import train
from test_dpo import random_play
from test_play import play_of, rollouts_of, tiny_model
from test_tango_rl import records

from nanochat.checkpoint import load_file
from nanochat.common import Diverged
from nanochat.rl.learn.heads import share_layers
from nanochat.rl.play.play import Update
from nanochat.rl.play.updates import apply_update
from nanochat.rl.run.progress import LARGEST_GAP, check_apart, count_apart
from nanochat.weights import copy_of

# The entropy bonus moves every weight in every step, whatever the rewards are.
LARGE_STEPS = ["--recipe", "grpo", "--run", "r", "--num-steps", "5", "--lr", "0.02", "--entropy-coef", "0.1",
               "--eval-examples", "4", "--save-every", "1"]
MAX, MEAN = "rollout_logprobs_diff_max", "rollout_probs_diff_mean"


def sample_from_the_start(monkeypatch) -> None:
    copies: dict = {}  # each model is sampled from a copy that was made once
    monkeypatch.setattr("nanochat.engine.inference_model",
                        lambda model: copies.get(model) or copies.setdefault(model, copy_of(model)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_that_is_sampled_from_its_starting_weights_stops_by_itself(base, monkeypatch, capsys, dtype):
    monkeypatch.setenv("NANOCHAT_DTYPE", dtype)
    sample_from_the_start(monkeypatch)
    with pytest.raises(Diverged, match=f"step 3: three times in a row the generator's sampler and trainer differed "
                                       f"by more than {dtype} explains .* sampled from other weights") as stopped:
        train(*LARGE_STEPS)
    assert "\n" not in str(stopped.value)
    bar, gaps = LARGEST_GAP[getattr(torch, dtype)], [r[f"gen/{MAX}"] for r in records(base, "r")]
    assert len(gaps) == 4 and gaps[0] <= bar and min(gaps[1:]) > bar
    assert [r["gen/rollout_apart"] for r in records(base, "r")] == [0, 1, 2, 3]
    out = capsys.readouterr().out.splitlines()
    assert [line.partition(" (")[0] for line in out if line.startswith("WARNING: ")] == [
        f"WARNING: the generator's sampler and trainer differ by more than {dtype} explains"]
    lines = [line for line in out if line.startswith("step ")]
    assert ["WARNING: sampler and trainer differ" in line for line in lines] == [False, True, True, True]


def test_a_sound_run_of_the_same_flags_goes_on_also_if_saved_before_this_was_counted(base, capsys):
    train(*LARGE_STEPS)
    straight, path = records(base, "r"), base / "runs" / "r" / "state_000003.pt"
    assert [r["gen/rollout_apart"] for r in straight] == [0] * 5
    assert "sampler and trainer differ" not in capsys.readouterr().out
    saved = load_file(str(path))
    assert saved.pop("apart_in_a_row") == {"generator": 0}
    torch.save(saved, path)
    train(*LARGE_STEPS, "--resume-from-step", "3")
    assert [r["gen/loss"] for r in records(base, "r")] == [r["gen/loss"] for r in straight]


def drawn(t, role: str, off: float = 0.25):
    """Rollouts whose sampler was off by so much, under a role's own label."""
    rollouts = rollouts_of()
    logprobs = t.logprobs(role, rollouts)
    rollouts.sampler_logprobs = logprobs + off * (logprobs != 0)
    rollouts.draws = [role] * len(rollouts)
    t.drawn[role] = t.roles[role].model
    return rollouts


def made(t, role: str, *rollouts, **options) -> dict:
    return apply_update(t, Update(role, [(part, torch.ones(part.tokens.shape)) for part in rollouts], **options))


def pair():
    return play_of(generator=tiny_model(0), verifier=tiny_model(1))


def test_after_a_roles_first_update_of_a_step_nothing_can_be_compared():
    """Of several passes the first counts. A role has moved where weights were copied to it, too."""
    t = pair()
    later, copied = ({role: drawn(t, role) for role in ("generator", "verifier")} for _ in range(2))
    metrics = made(t, "generator", drawn(t, "generator"), num_updates=3)
    assert metrics[MAX] == pytest.approx(0.25, abs=1e-4) and 0 < metrics[MEAN] < 0.05
    assert not {MAX, MEAN} & made(t, "generator", later["generator"]).keys()
    assert made(t, "verifier", later["verifier"])[MAX] == pytest.approx(0.25, abs=1e-4)
    t = pair()
    t.copy_weights("generator", "verifier")
    assert MAX in made(t, "generator", copied["generator"]) and MAX not in made(t, "verifier", copied["verifier"])


@pytest.mark.parametrize("trains", [True, False], ids=["trunk", "frozen"])
@pytest.mark.parametrize("num_shared", [1, 2])
def test_an_update_of_a_shared_trunk_moves_both_roles(num_shared, trains):
    t = pair()
    generator, verifier = t.roles["generator"], t.roles["verifier"]
    private = share_layers(generator.model, verifier.model, num_shared)
    verifier.parameters = list(verifier.model.parameters()) if trains else private
    verifier.optimizer = torch.optim.SGD(verifier.parameters, lr=1.0)
    verifier.trunk_of, verifier.num_shared = "generator", num_shared
    rollouts = {role: drawn(t, role) for role in t.roles}
    # what the verifier alone trains is none of the generator's
    assert MAX in made(t, "verifier", rollouts["verifier"])
    assert (MAX in made(t, "generator", rollouts["generator"])) != trains
    t.moved = set()
    assert MAX in made(t, "generator", rollouts["generator"]) and MAX not in made(t, "verifier", rollouts["verifier"])


def test_what_another_model_drew_is_not_compared():
    t = pair()
    own, others = drawn(t, "generator", off=0.01), drawn(t, "verifier")
    assert made(t, "generator", own, others)[MAX] == pytest.approx(0.01, abs=1e-4)
    t = pair()
    metrics = made(t, "generator", drawn(t, "verifier"))
    assert metrics[MAX] is metrics[MEAN] is None
    t = pair()
    t.roles["verifier"].model = t.roles["generator"].model  # --verifier-head prompt
    assert made(t, "generator", drawn(t, "verifier"))[MAX] == pytest.approx(0.25, abs=1e-4)


def test_greedy_draws_and_those_from_the_top_k_are_not_compared(base):
    for top_k, greedy in ((0, False), (0, True), (5, False)):
        t = random_play("grpo")
        t.sampler.top_k = top_k
        rollouts = t.solve("solutions", t.problems(), 2, greedy=greedy)
        gap = made(t, "generator", rollouts)[MAX]
        assert (gap is None) == bool(top_k or greedy) and (gap or 0) < 1e-5


def test_three_in_a_row_stop_a_run_and_one_that_cannot_be_told_is_passed_over():
    t = pair()
    t.roles["generator"].model.compute_dtype = torch.bfloat16
    seen = []
    for gap in (0.51, 0.49, float("nan"), None, 0.51):
        logged = count_apart(t, ["generator"], {f"gen/{MAX}": gap})
        check_apart(t, {"step": 0})
        seen.append(logged["gen/rollout_apart"])
    assert seen == [1, 0, 1, None, 2] and count_apart(t, ["verifier"], {f"ver/{MAX}": 0.11}) == {"ver/rollout_apart": 1}
    count_apart(t, ["generator"], {f"gen/{MAX}": 0.6})
    with pytest.raises(Diverged, match="step 7: .* the generator's .* bfloat16 explains .*now by 0.6 .* where 0.5 is"):
        check_apart(t, {"step": 7, f"gen/{MAX}": 0.6})
