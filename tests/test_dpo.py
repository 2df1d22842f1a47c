"""
DPO: pairs and coefficients by hand, the update against autograd of the paper's loss in fp64, ranks, a short run.

    python -m pytest tests/test_dpo.py -q
"""
import json
import math
import zlib

import pytest
import torch
from conftest import TASK_FLAGS, on_two_ranks, parse
from torch.nn.functional import logsigmoid

from nanochat import recipes
from nanochat.common import BadInput, rank_and_world
from nanochat.gpt import GPT, GPTConfig
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.kernels.losses import PolicyLoss
from nanochat.recipes.policy.dpo import right_and_wrong
from nanochat.rl.learn.roles import Role
from nanochat.rl.learn.state import RunState
from nanochat.rl.play.pairs import learn_from_pairs, margins, pair_coefficients
from nanochat.rl.play.play import Play, apply_update
from nanochat.rl.play.sampling import Sampler
from nanochat.storage.files import path_of
from nanochat.storage.run import Run
from scripts import tango_rl
from tasks import make_task

CPU = torch.device("cpu")
FLAGS = [*TASK_FLAGS, "--device-type", "cpu", "--model-tag", "tiny", "--max-new-tokens", "28",
         "--examples-per-step", "4", "--num-samples", "4", "--eval-examples", "8", "--lr", "1e-3", "--num-steps", "4",
         "--save-every", "1"]


def parsed(recipe: str, *flags: str):
    return parse(tango_rl, ["--recipe", recipe, *FLAGS, *flags])


def random_model(vocab_size: int, seed: int) -> GPT:
    """A model in float64 whose every parameter is random."""
    model = GPT(GPTConfig(128, vocab_size, 2, 2, 1, 32, "L"), torch.float64).double()
    draw = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        scale = p.shape[1] ** -0.5 if p.dim() == 2 else 0.5
        p.data = scale * torch.randn(p.shape, generator=draw, dtype=torch.float64)
    return model


def random_play(recipe: str, *flags: str) -> Play:
    """A step of a recipe with random models in float64 and plain SGD with rate 1. A hash of a solution's text says
    whether it is right, wrong or not scorable: random models write random text, so groups hold all three."""
    args, recipe = parsed(recipe, "--max-grad-norm", "0", "--num-samples", "8", *flags), recipes.load(recipe)
    tokenizer, task = load_tokenizer(path_of("tokenizer")), make_task(args)
    task.check = lambda problem, text: (True, True, False, False, None)[zlib.crc32(text.encode()) % 5]
    roles = {}
    for seed, (name, spec) in enumerate(recipe.ROLES.items()):
        model = random_model(tokenizer.vocab_size, seed)
        reference = random_model(tokenizer.vocab_size, 10 + seed).requires_grad_(False) if spec.reference else None
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=1.0) if spec.trained else None
        roles[name] = Role(name, model, parameters, optimizer, reference, 1.0)
    return Play(args, Run("r", CPU, *rank_and_world(), ""), Sampler(task, tokenizer, args.seed), roles,
                recipe.draws(args), {"generator": args.num_steps},
                RunState(role_steps=dict.fromkeys(roles, 0)), PolicyLoss())


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def moved_by(t: Play, update) -> dict[str, torch.Tensor]:
    """How far an update moves the generator's weights back: with SGD at rate 1 its gradient."""
    before = weights_of(t.roles["generator"].model)
    assert apply_update(t, update)["skipped"] == 0
    return {name: before[name] - after for name, after in weights_of(t.roles["generator"].model).items()}


def log_likelihoods(model, rollouts) -> list[torch.Tensor]:
    """log pi of each whole completion, from plain forwards over prompt and completion."""
    found = []
    for prompt, completion in zip(rollouts.prompt_of(), rollouts.completions(), strict=True):
        hidden = model.trunk(torch.tensor([prompt.ids + completion]))[0, len(prompt.ids) - 1: -1]  # (T, C)
        logprobs = torch.log_softmax(model.head(hidden), dim=-1)
        found.append(logprobs.gather(1, torch.tensor(completion)[:, None]).sum())
    return found


def literal_loss(model, reference, rollouts, pairs, beta: float) -> torch.Tensor:
    """Eq. 7 of DPO, written out: the mean over pairs (chosen, rejected)."""
    pi, ref = log_likelihoods(model, rollouts), log_likelihoods(reference, rollouts)
    return -torch.stack([logsigmoid(beta * ((pi[w] - ref[w]) - (pi[l] - ref[l]))) for w, l in pairs]).mean()


def gradient_of(loss: torch.Tensor, model) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def assert_close(a: dict, b: dict, tolerance: float) -> None:
    """Equal up to `tolerance` of the largest entry."""
    scale = max(float(x.abs().max()) for x in b.values())
    assert scale > 1e-6 and a.keys() == b.keys()
    for name in b:
        assert (a[name] - b[name]).abs().max() <= tolerance * scale, name


# By hand

def test_a_group_gives_as_many_pairs_as_use_no_rollout_twice():
    # Group 7: right 0, 4; wrong 2, 3, 5 -> (0, 2), (4, 3). Group 9: right 1, none wrong.
    # Group 8: right 8, wrong 6, 7 neither.
    outcomes, group_id = [True, True, False, False, True, False, False, None, True], [7, 9, 7, 7, 7, 7, 8, 8, 8]
    assert right_and_wrong(outcomes, group_id) == ([0, 4, 8], [2, 3, 6])
    assert right_and_wrong(outcomes, group_id, most=1) == ([0, 8], [2, 6])


@pytest.mark.parametrize("outcomes", [[], [True, True], [False, False], [None, True], [None, None]])
def test_a_group_without_both_kinds_gives_no_pair(outcomes):
    assert right_and_wrong(outcomes, [0] * len(outcomes)) == ([], [])


def test_the_margin_is_beta_times_the_difference_of_log_ratios():
    # 0.1 * (1 - -1) = 0.2, 0.1 * (3 - 5) = -0.2
    u = margins(torch.tensor([1.0, 3.0, -1.0, 5.0]), [0, 1], [2, 3], 0.1)
    assert u.tolist() == pytest.approx([0.2, -0.2])


@pytest.mark.parametrize("u, pull", [
    (0.0, 0.05),                      # beta / 2 where the pair is not told apart
    (math.log(3), 0.025),             # sigma(-log 3) = 1 / (1 + 3)
    (-math.log(3), 0.075),            # 1 / (1 + 1/3)
    (800.0, 0.0), (-800.0, 0.1)])     # nothing where it is ranked rightly by far, beta where wrongly: no overflow
def test_a_pair_pulls_by_beta_sigma_of_minus_u(u, pull):
    u, one = torch.tensor([u], dtype=torch.float64), torch.ones(1)
    assert pair_coefficients(u, one, [1], [0], 3, 0.1, one).tolist() == pytest.approx([-pull, pull, 0.0])


def test_coefficients_of_a_rollout_in_several_pairs_add_up():
    # Pulls 0.05, 2 * 0.025, 0.05: rollout 0 is chosen twice, 2 rejected twice, 1 once each.
    u, weights = torch.tensor([0.0, math.log(3), 0.0]), torch.tensor([1.0, 2.0, 1.0])
    found = pair_coefficients(u, weights, [0, 0, 1], [1, 2, 2], 3, 0.1, torch.ones(3))
    assert found.tolist() == pytest.approx([0.05 + 0.05, -0.05 + 0.05, -0.05 - 0.05], abs=1e-8)


# Against the literal loss

@pytest.mark.parametrize("most", [0, 1])
def test_the_update_takes_the_gradient_of_the_papers_loss(base, most):
    """Sampling, checking, pairing, selecting, scoring and averaging included; policy and reference differ."""
    t = random_play("dpo", "--pairs-per-problem", str(most), "--beta", "0.3")
    update, = recipes.load("dpo").play(t)
    (rollouts, _), = update.parts
    pairs = []
    for g in range(len(rollouts.prompts)):
        rows = [n for n in range(len(rollouts)) if rollouts.group_id[n] == g]
        right, wrong = ([n for n in rows if rollouts.columns["outcome"][n] is kind] for kind in (True, False))
        assert len(right) == len(wrong) > 0 and (not most or len(right) == 1)
        pairs += zip(right, wrong, strict=True)
    assert len(pairs) > 2 and (most or len(pairs) > len(rollouts.prompts))  # some group has several, unless told not to
    generator = t.roles["generator"]
    loss = literal_loss(generator.model, generator.reference, rollouts, pairs, 0.3)
    expected = gradient_of(loss, generator.model)
    assert t.metrics["gen/pair_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert t.metrics["gen/num_pairs"] == len(pairs)
    assert_close(moved_by(t, update), expected, 1e-5)


def test_where_policy_and_reference_agree_the_loss_is_log_2(base):
    t = random_play("dpo")
    t.roles["generator"].reference = t.roles["generator"].model
    update, = recipes.load("dpo").play(t)
    assert t.metrics["gen/pair_loss"] == pytest.approx(math.log(2), rel=1e-12) and t.metrics["gen/margin"] == 0
    assert t.metrics["gen/pair_accuracy"] == 0  # a tie is not ranked rightly
    advantages = update.parts[0][1]
    assert advantages.abs().unique().tolist() == pytest.approx([2 * 0.1 / 2])  # 2 rollouts for each pair


def test_without_a_pair_there_is_no_update(base):
    t = random_play("dpo")
    t.task.check = lambda problem, text: None
    assert list(recipes.load("dpo").play(t)) == []
    assert t.metrics["gen/num_pairs"] == 0 and t.metrics["gen/pair_loss"] is None and t.metrics["gen/unscorable"] == 1


def play_share(folder: str) -> None:
    """One step on this rank's problems, of which every other one has no solution that can be scored."""
    t = random_play("dpo")
    scored = t.task.check
    t.task.check = lambda problem, text: scored(problem, text) if problem.index % 2 == 0 else None
    update, = recipes.load("dpo").play(t)
    found = {name: t.metrics[f"gen/{name}"] for name in ("num_pairs", "pair_loss")}
    found |= {"num_rollouts": len(update.parts[0][0]), "moved": moved_by(t, update)}
    torch.save(found, f"{folder}/rank{t.run.rank}of{t.run.world}.pt")


def test_a_rank_without_pairs_takes_part_in_the_step_of_the_others(base, tmp_path):
    play_share(str(tmp_path))
    on_two_ranks(play_share, str(tmp_path))
    names = ("rank0of1", "rank0of2", "rank1of2")
    one, first, second = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in names)
    assert one["num_rollouts"] == first["num_rollouts"] > 0 == second["num_rollouts"]
    for found in (first, second):
        assert found["num_pairs"] == one["num_pairs"]
        assert found["pair_loss"] == pytest.approx(one["pair_loss"], rel=1e-6)
        assert_close(found["moved"], one["moved"], 1e-5)


def test_two_equal_completions_count_in_the_mean_and_pull_nothing(base):
    t = random_play("dpo")
    prompts = t.solve_prompts([t.task.problem("rl", 0)] * 4)
    rollouts = t.written("generator", prompts, ["0+1:1;=1", "0+1:2;=2", "0+1:1;=1", "0+1:1;=1"])
    reference = t.logprobs("generator", rollouts, reference=True)
    update, = learn_from_pairs(t, "generator", rollouts, [0, 2], [1, 3], reference)
    advantages = update.parts[0][1]
    assert not advantages[2:].any() and advantages[:2].any() and t.metrics["gen/frac_equal"] == 0.5
    generator = t.roles["generator"]
    loss = literal_loss(generator.model, generator.reference, rollouts, [(0, 1), (2, 3)], 0.1)
    expected = gradient_of(loss, generator.model)
    assert_close(moved_by(t, update), expected, 1e-5)


# A run

@pytest.mark.parametrize("flags", [["--beta", "0"], ["--beta", "nan"], ["--updates-per-batch", "2"],
                                   ["--num-samples", "1"], ["--pairs-per-problem", "-1"]])
def test_settings_that_cannot_work_are_refused(flags):
    with pytest.raises(BadInput, match=flags[0]):
        args = parsed("dpo", *flags)
        recipes.load("dpo").check(args, make_task(args))


def records(base, name: str) -> list[dict]:
    with open(base / "runs" / "r" / name) as f:
        return [json.loads(line) for line in f]


def test_a_run_logs_its_pairs_and_moves_the_generator_where_there_are_some(base):
    tango_rl.main(parsed("dpo", "--run", "r"))
    folder = base / "chatrl_checkpoints" / "r-gen"
    before = torch.load(base / "chatsft_checkpoints" / "tiny" / "model_000200.pt", weights_only=True)
    names = {"num_pairs", "pair_loss", "pair_accuracy", "margin", "log_ratio/chosen", "log_ratio/rejected", "reward",
             "unscorable"}
    log = records(base, "metrics.jsonl")
    for step, record in enumerate(log):
        assert {f"gen/{name}" for name in names} <= record.keys()
        after = torch.load(folder / f"model_{step + 1:06d}.pt", weights_only=True)
        has_moved = any(not torch.equal(before[name], after[name]) for name in before)
        assert has_moved == (record["gen/num_pairs"] > 0) == ("without_update" not in record)
        if has_moved:
            assert record["gen/rollout_logprobs_diff_max"] < 1e-4 and record["gen/skipped"] == 0
        before = after
    has_pairs = any(record["gen/num_pairs"] for record in log)  # whether the tiny start is right now and then
    assert (base / "runs" / "r" / "rollouts.jsonl").exists() == has_pairs
    for rollout in records(base, "rollouts.jsonl") if has_pairs else []:
        assert rollout["paired_with"] != rollout["solution"]
        assert all((a > 0) == rollout["outcome"] for a in rollout["advantages"])  # the right one is chosen
