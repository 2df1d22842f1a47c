"""The verbs of a recipe: rollouts, scores in their order, updates of several parts; what a recipe gets wrong."""
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest
import torch
from conftest import random_model

from nanochat.own_code import run_file
from nanochat.common import BadInput, StopRequested
from nanochat.kernels.losses import PolicyLoss
from nanochat.optim import adamw
from nanochat.recipes.tango._pool import completions_of, extended
from nanochat.rl.learn.packing import pack
from nanochat.rl.learn.roles import Role
from nanochat.rl.learn.state import RunState, check_memory
from nanochat.rl.learn.trainer import GAPS, update
from nanochat.rl.play import updates
from nanochat.rl.play.play import Draw, Play, Update
from nanochat.rl.play.sampling import Sampler
from nanochat.rl.play.updates import apply_update
from nanochat.rl.records.prompts import Prompt, empty_verifier_prompt, generator_prompt, quoting_prompt, refine_prompt
from nanochat.rl.records.rollouts import Rollouts, join
from nanochat.rl.run import steps
from nanochat.rl.run.progress import health_warnings, print_step
from nanochat.storage.run import Run
from tasks.common import Problem

CPU = torch.device("cpu")
PROBLEMS = [Problem("rl", i, f"problem {i}", "1") for i in range(3)]


def tiny_model(seed: int = 0):
    return random_model(seed=seed)


def rollouts_of(widths=(3, 5), group: int = 2, lengths=(4, 2, 3, 5), seed: int = 0) -> Rollouts:
    draw = torch.Generator().manual_seed(seed)
    prompts = [Prompt(torch.randint(265, (n,), generator=draw).tolist(), problem)
               for n, problem in zip(widths, PROBLEMS)]  # noqa: B905
    lengths = torch.tensor(lengths)
    N, T = len(lengths), int(lengths.max())
    tokens = torch.randint(265, (N, T), generator=draw) * (torch.arange(T) < lengths[:, None])
    logprobs = -torch.rand(N, T, generator=draw) * (torch.arange(T) < lengths[:, None])
    return Rollouts(prompts, torch.arange(len(prompts)).repeat_interleave(group), tokens, logprobs, lengths,
                    torch.ones(N, dtype=torch.bool), limit=6, texts=[f"text {n}" for n in range(N)],
                    columns={"outcome": [True, False, None, True]})


def play_of(**roles) -> Play:
    """A run of roles without a task, on one rank."""
    args = SimpleNamespace(micro_batch_tokens=12, prefix_sharing=True, shard=False, temperature=1.0,
                           aggregation="sequence", updates_per_batch=1, lr_schedule="constant", warmup_ratio=0.0,
                           max_grad_norm=0.0, token_budget=0)
    made = {name: Role(name, model, list(model.parameters()), torch.optim.SGD(model.parameters(), lr=1.0), lr=1.0)
            for name, model in roles.items()}
    draws = {name: Draw(name, 4, 4, 6) for name in roles}
    tokenizer = SimpleNamespace(stop_tokens=[7], assistant_end=7, encode=lambda text: [ord(c) for c in text],
                                decode=lambda ids: "".join(map(chr, ids)))
    return Play(args, Run("r", CPU, 0, 1, ""), Sampler(None, tokenizer, 0), made, draws, dict.fromkeys(roles, 10),
                RunState(role_steps=dict.fromkeys(roles, 0)), PolicyLoss("reinforce"))


def test_sharded_ranks_run_their_largest_micro_batches_side_by_side():
    t, rollouts = play_of(), rollouts_of((3, 5, 1), 2, (4, 2, 3, 5, 1, 1))
    t.args.shard, t.args.micro_batch_tokens = True, 1  # each row is one: 4 + 3, 2 + 3, 3 + 5, 5 + 5, two of 1 + 1
    t.reduce = lambda tensor, op: tensor + 1  # another rank has seven
    batches = t.even(t.micro_batches(rollouts, torch.ones(6, 5), torch.ones(6), keep_idle=True))
    assert [batch.prompt_ids.numel() + batch.tokens.numel() for batch in batches] == [10, 8, 7, 5, 2, 2, 2]
    assert [len(batch.index) for batch in batches] == [5, 3, 4, 2, 1, 1, 0]


def test_what_prompts_about_one_problem_begin_with_goes_through_the_model_once(monkeypatch):
    ran, model = [], random_model()
    trunk = model.trunk
    monkeypatch.setattr(model, "trunk", lambda ids, **options: (ran.append(tuple(ids.shape)), trunk(ids, **options))[1])
    prompts = [Prompt([*range(9 * p, 9 * p + 9), rest], PROBLEMS[p], copy=rest) for p in (0, 1) for rest in (1, 2, 3)]
    sampler = play_of().sampler
    sampler.tokenizer.decode = str
    sampler.sample(model, prompts, 1, ("verify",), 4)
    assert ran[:2] == [(2, 9), (6, 1)]  # two starts, then the last tokens of six prompts
    ran.clear()
    sampler.sample(model, prompts, 2, ("verify",), 4)
    assert ran[:2] == [(6, 10), (12, 1)]


def test_rewards_are_as_many_as_rollouts():
    with pytest.raises(ValueError, match="^3 rewards of 4 rollouts: one for each is needed$"):
        play_of().advantages(rollouts_of(), [1.0, 0.0, None])


def test_rollouts_are_selected_and_joined_with_all_that_is_theirs():
    rollouts = rollouts_of()
    chosen = rollouts.select([3, 0])
    assert torch.equal(chosen.tokens, rollouts.tokens[[3, 0]]) and chosen.lengths.tolist() == [5, 4]
    assert chosen.texts == ["text 3", "text 0"] and chosen.columns == {"outcome": [True, True]}
    assert [p.ids for p in chosen.prompt_of()] == [rollouts.prompts[1].ids, rollouts.prompts[0].ids]
    assert torch.equal(chosen.sampler_logprobs, rollouts.sampler_logprobs[[3, 0]])
    rollouts.draws = ["attempts", "attempts", "", "judge"]
    assert rollouts.select([3, 0]).draws == ["judge", "attempts"] and chosen.draws == []
    alone = rollouts.select([2])
    assert len(alone.prompts) == 1 and alone.group_id.tolist() == [0]
    nobody = rollouts.select([])
    assert len(nobody) == 0 and nobody.prompts == [] and nobody.tokens.shape == (0, 5)
    rollouts, more = rollouts_of(), rollouts_of(lengths=(1, 2, 7, 1), seed=1)
    more.prompts = [rollouts.prompts[1], Prompt([1, 2], PROBLEMS[2])]
    whole = join([rollouts, more])
    assert whole.group_id.tolist() == [0, 0, 1, 1, 1, 1, 2, 2] and len(whole.prompts) == 3
    assert whole.tokens.shape == (8, 7) and whole.completions() == rollouts.completions() + more.completions()
    assert whole.texts[4] == "text 0" and whole.columns["outcome"] == [True, False, None, True] * 2
    more.columns, more.draws = {}, ["judge"] * 4
    assert join([rollouts, more]).draws == [""] * 4 + ["judge"] * 4
    assert join([rollouts, more]).columns == {}  # what only one part says is nothing of the whole
    rollouts, more = rollouts_of(), rollouts_of(seed=1)
    rollouts.forced, more.targets = torch.zeros(4, 5, dtype=torch.bool), more.tokens + 1
    rollouts.forced[0, 1] = True
    whole = join([rollouts, more])
    assert whole.forced.sum() == 1 and whole.num_trained().tolist() == [3, 2, 3, 5, 4, 2, 3, 5]
    assert torch.equal(whole.targets, torch.cat([rollouts.tokens, more.tokens + 1]))


def test_after_another_prompt_a_completion_was_not_drawn_and_equal_prompts_are_a_group():
    rollouts = rollouts_of()
    other = Prompt([9, 9], PROBLEMS[0])
    moved = rollouts.with_prompts([other, other, rollouts.prompts[1], rollouts.prompts[1]])
    assert (moved.sampler_logprobs[:2].isnan().all()
            and torch.equal(moved.sampler_logprobs[2:], rollouts.sampler_logprobs[2:]))
    assert moved.group_id.tolist() == [0, 0, 1, 1] and moved.prompts[0].ids == [9, 9]
    assert torch.equal(moved.tokens, rollouts.tokens) and not rollouts.sampler_logprobs.isnan().any()
    rollouts, ids = rollouts_of(), [1, 2, 3]
    groups = lambda prompts: rollouts.with_prompts(prompts).group_id.tolist()
    assert groups([Prompt(ids, PROBLEMS[0], copy) for copy in (0, 0, 1, 1)]) == [0, 0, 1, 1]
    assert groups([Prompt(ids, PROBLEMS[0]), Prompt(ids, PROBLEMS[1])] * 2) == [0, 1, 0, 1]


def naive_logprobs(model, rollouts: Rollouts, targets: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(rollouts.tokens.shape, dtype=torch.float64)
    for n, (prompt, completion) in enumerate(zip(rollouts.prompt_of(), rollouts.completions(), strict=True)):
        logits = model(torch.tensor([prompt.ids + completion]))[0]
        for i in range(len(completion)):
            out[n, i] = torch.log_softmax(logits[len(prompt.ids) - 1 + i].double(), dim=-1)[targets[n, i]]
    return out


@torch.no_grad()
def test_logprobs_are_in_the_order_of_the_rollouts_and_of_what_is_asked_for_and_none_of_what_is_forced():
    rollouts = rollouts_of().select([3, 0, 2, 1])
    t = play_of(generator=tiny_model())
    torch.testing.assert_close(t.logprobs("generator", rollouts).double(),
                               naive_logprobs(tiny_model(), rollouts, rollouts.tokens), rtol=0, atol=1e-5)
    targets = (rollouts.tokens + 17) % 265
    asked = t.logprobs("generator", replace(rollouts, targets=targets)).double()
    torch.testing.assert_close(asked, naive_logprobs(tiny_model(), rollouts, targets), rtol=0, atol=1e-5)
    t.roles["generator"].reference = tiny_model(1)
    old = t.logprobs("generator", rollouts, reference=True).double()
    torch.testing.assert_close(old, naive_logprobs(tiny_model(1), rollouts, rollouts.tokens), rtol=0, atol=1e-5)
    assert t.logprobs("generator", rollouts.select([])).shape == (0, 5)
    whole, rollouts.forced = t.logprobs("generator", rollouts), torch.zeros(4, 5, dtype=torch.bool)
    rollouts.forced[0, 2] = True
    scored = t.logprobs("generator", rollouts)
    assert scored[0, 2] == 0 and torch.equal(scored[~rollouts.forced], whole[~rollouts.forced])


def test_written_completions_end_and_have_no_sampler():
    t = play_of(generator=tiny_model())
    rollouts = t.written("generator", [Prompt([1], PROBLEMS[0]), Prompt([1, 2], PROBLEMS[1])], ["abc", "d"])
    assert (rollouts.completions() == [[97, 98, 99, 7], [100, 7]]
            and rollouts.stopped.all() and rollouts.texts == ["abc", "d"])
    assert rollouts.sampler_logprobs.isnan().all() and rollouts.limit == 6
    given = t.written("generator", [Prompt([1], PROBLEMS[0])], [[97, 98]])
    assert given.completions() == [[97, 98]] and not given.stopped.any()
    assert len(t.written("generator", [], [])) == 0
    with pytest.raises(BadInput, match="context is 64"):
        t.written("generator", [Prompt([1] * 60, PROBLEMS[0])], ["abcde"])


def gradient_of(t: Play, wanted: Update) -> tuple[dict, dict]:
    """How far plain SGD of rate 1 moves the weights back, and the metrics."""
    model = t.roles[wanted.role].model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    metrics = apply_update(t, wanted)
    return {name: before[name] - p.detach() for name, p in model.named_parameters()}, metrics


@pytest.mark.parametrize("per", ["sequence", "token", "constant", "rollout"])
def test_parts_share_one_step_as_if_they_were_one(per):
    rollouts = rollouts_of()
    advantages = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
    whole, metrics = gradient_of(play_of(generator=tiny_model()),
                                 Update("generator", [(rollouts, advantages)], aggregation=per))
    parts = [(rollouts.select(rows), advantages[rows]) for rows in ([0, 1], [2, 3])]
    split, split_metrics = gradient_of(play_of(generator=tiny_model()), Update("generator", parts, aggregation=per))
    for name in whole:
        torch.testing.assert_close(split[name], whole[name], rtol=1e-9, atol=1e-12)
    assert split_metrics["loss"] == pytest.approx(metrics["loss"]) and metrics["skipped"] == 0


def test_an_update_is_made_whatever_a_recipe_left_of_gradients_and_no_torch_default_may_change():
    """With another default dtype, kernels would read what is no fp32."""
    wanted = lambda: Update("generator", [(rollouts_of(), ONES)])
    expected, _ = gradient_of(play_of(generator=tiny_model()), wanted())
    with torch.no_grad():
        moved, _ = gradient_of(play_of(generator=tiny_model()), wanted())
    assert all(torch.equal(moved[name], expected[name]) for name in moved)
    t = play_of(generator=tiny_model())
    try:
        torch.set_default_dtype(torch.float64)
        for verb in (t.check_stop, lambda: run_file("--recipe", "my.py", "")):
            with pytest.raises(BadInput, match="defaults have been set to float64 and cpu: they must stay float32"):
                verb()
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_update_on_targets_raises_their_logprob_and_a_rollout_sum_is_one():
    """Coefficient 1 on every token, sum over tokens: the gradient is that of the targets' log-likelihood."""
    rollouts = rollouts_of(widths=(3,), group=1, lengths=(4,))
    rollouts.columns, rollouts.targets = {}, (rollouts.tokens + 31) % 265
    moved, _ = gradient_of(play_of(generator=tiny_model()),
                           Update("generator", [(rollouts, torch.ones(1, 4))], aggregation="rollout"))
    model = tiny_model()
    logits = model(torch.tensor([rollouts.prompts[0].ids + rollouts.completions()[0]]))[0, 2:6]
    torch.log_softmax(logits.double(), dim=-1).gather(1, rollouts.targets.T).sum().backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(moved[name], -p.grad, rtol=1e-4, atol=1e-5)  # weights of tokens are fp32
    # Two rollouts of 4 and 2 tokens, coefficient 1: loss = -(sum of all logprobs) / 2.
    rollouts = rollouts_of(widths=(3,), group=2, lengths=(4, 2))
    rollouts.columns = {}
    t = play_of(generator=tiny_model())
    total = t.logprobs("generator", rollouts).sum().item()
    _, metrics = gradient_of(t, Update("generator", [(rollouts, torch.ones(2, 4))], aggregation="rollout"))
    assert metrics["loss"] == pytest.approx(-total / 2, rel=1e-5)


def test_tokens_without_a_sampler_show_no_difference_from_it():
    """The mean is over the 10 tokens that were drawn, not over all 14."""
    rollouts, model = rollouts_of(), tiny_model()
    logprobs = play_of(generator=model).logprobs("generator", rollouts)
    rollouts.sampler_logprobs = logprobs + 0.01
    rollouts.sampler_logprobs[0] = float("nan")
    batch, = pack(rollouts, torch.ones(4, 5), torch.ones(4), 10 ** 9, True)
    metrics = update(Role("generator", model, list(model.parameters()), adamw(model.parameters(), 0.0)), [batch],
                     PolicyLoss("reinforce"), lr=0.0, max_grad_norm=0.0, temperature=1.0, device=CPU)
    assert metrics["rollout_logprobs_diff_max"] == pytest.approx(0.01, rel=1e-3)
    drawn = logprobs[1:][logprobs[1:] != 0].double()
    assert (metrics["rollout_probs_diff_mean"]
            == pytest.approx(float((drawn.exp() - (drawn + 0.01).exp()).abs().mean()), rel=1e-3))


def test_every_skipped_update_is_counted_and_a_rate_decays_by_the_updates_of_its_own_role(monkeypatch):
    t, results = play_of(generator=tiny_model()), iter([1, 0])
    monkeypatch.setattr(updates, "update", lambda *args, **options: {
        "loss": 0.0, "skipped": next(results), **dict.fromkeys(GAPS)})
    assert apply_update(t, Update("generator", [(rollouts_of(), torch.ones(4, 5))], num_updates=2))["skipped"] == 1
    assert t.state.skipped_in_a_row == {"generator": 1} and t.steps["generator"] == 1
    # linear: 1 at a role's first update, .1 at its last: the generator has 10, the verifier 3.
    t, rates = play_of(generator=tiny_model(), verifier=tiny_model()), []
    t.args.lr_schedule, t.totals = "linear", {"generator": 10, "verifier": 3}
    monkeypatch.setattr(updates, "update", lambda role, *args, lr, **options: rates.append(round(lr, 6)) or {
        "skipped": 0, **dict.fromkeys(GAPS)})
    for role in ("verifier", "generator", "verifier", "verifier"):
        apply_update(t, Update(role, [(rollouts_of(), torch.ones(4, 5))]))
    assert rates == [1.0, 1.0, 0.55, 0.1]
    t.args.warmup_ratio, t.totals["generator"] = 0.5, 4
    for _ in range(3):
        apply_update(t, Update("generator", [(rollouts_of(), torch.ones(4, 5))]))
    assert rates[4:] == [1.0, 1.0, 0.1]  # its second one to its last


def test_a_stop_ends_a_step_until_its_first_update_with_shards_on_all_ranks_together():
    """A rank that left out a micro-batch which the others gather weights in would leave them waiting."""
    t = play_of(generator=tiny_model())
    assert not t.breaks_off()
    t.run.stop_signal = True
    assert t.breaks_off() and t.should_stop()
    for stop in (t.check_stop, lambda: t.logprobs("generator", rollouts_of())):
        with pytest.raises(StopRequested):
            stop()
    t.args.shard = True
    with pytest.raises(StopRequested):
        t.breaks_off()
    t.has_moved = True
    t.check_stop()
    assert not t.should_stop() and not t.breaks_off()
    t.args.shard = False
    assert not t.breaks_off()


def test_a_step_that_is_thrown_away_leaves_no_trace_in_the_memory():
    state = RunState(role_steps={"generator": 2}, memory={"pool": {"tokens": torch.ones(2, 2)}, "phase": "warmup"})
    before = state.snapshot()
    state.memory["pool"]["tokens"].add_(1)
    state.memory |= {"phase": "generator", "new": 1}
    state.role_steps["generator"] = 3
    state.restore(before)
    assert state.memory.keys() == {"pool", "phase"} and state.memory["phase"] == "warmup"
    assert state.role_steps == {"generator": 2} and torch.equal(state.memory["pool"]["tokens"], torch.ones(2, 2))


def test_a_pool_keeps_the_last_ones_whatever_their_lengths():
    def pool(rows, first):
        width = max(map(len, rows))
        return {"problem": torch.arange(first, first + len(rows)), "lengths": torch.tensor([len(row) for row in rows]),
                "tokens": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
                "outcome": torch.ones(len(rows), dtype=torch.bool)}
    kept = extended(pool([[1], [2, 2], [3]], 0), pool([[4, 4, 4], [5, 5, 5]], 10), 4)
    assert (kept["problem"].tolist() == [1, 2, 10, 11]
            and completions_of(kept, [0, 1, 2, 3]) == [[2, 2], [3], [4, 4, 4], [5, 5, 5]])
    assert extended(None, pool([[1], [2]], 0), 1)["problem"].tolist() == [1]


def test_numbers_that_are_not_finite_are_null_in_the_log(tmp_path):
    Run("r", CPU, 0, 1, str(tmp_path)).append("x.jsonl", {
        "step": 0, "loss": math.nan, "grad": math.inf, "kl": None, "lr": 0.1, "rows": [1.0, math.inf],
        "more": {"x": math.nan}})
    assert json.loads((tmp_path / "x.jsonl").read_text()) == {
        "step": 0, "loss": None, "grad": None, "kl": None, "lr": 0.1, "rows": [1.0, None], "more": {"x": None}}


@pytest.mark.parametrize("right, without_signal, gap, dtype, words", [
    (0.5, 0.5, 0.2, torch.bfloat16, ""), (0.5, 0.5, 0.2, torch.float32, "sampler and trainer disagree"),
    (0.5, 0.5, 0.6, torch.bfloat16, "sampler and trainer disagree"),
    (0.5, 0.5, math.nan, torch.float32, "sampler and trainer disagree"),
    (0.0, 1.0, 0.0, torch.float32, "no sampled solution is right"), (0.95, 0.5, 0.0, torch.float32, ""),
    (0.3, 0.9, 0.0, torch.float32, ""), (1.0, 1.0, 0.0, torch.float32, "leaves little to learn"),
    (0.95, 0.89, 0.0, torch.float32, "pass@1 is 95%, and 89% of the groups give no signal")])
def test_what_is_wrong_with_a_start_is_warned_of(right, without_signal, gap, dtype, words):
    """Logits of 16 to 32 are spaced .125 in bf16: two of them may well be .2 off, in fp32 they may not."""
    sampled = {"pass@1": right, "end_token_rate": 1.0, "frac_reward_zero_std": without_signal}
    warnings = health_warnings(sampled, {}, gap, dtype)
    assert len(warnings) == bool(words) and words in "".join(warnings)
    assert len(health_warnings(sampled, {}, gap, dtype, learns=False)) == ("sampler" in words)


@pytest.mark.parametrize("name, role, prompts, samples, words", [
    ("more", "", 1, 1, "'more' .* declare no such name"), ("more", "generator", 1, 1, "declare no such name"),
    ("generator", "judge", 1, 1, "of a role 'judge': there are generator, verifier"),
    ("generator", "verifier", 1, 1, "1 x 1 of verifier as 'generator'"),
    ("generator", "generator", 3, 1, "3 x 1 of generator"), ("generator", "generator", 2, 5, "2 x 5 of generator")])
def test_what_is_not_declared_is_not_sampled_and_nothing_twice_in_a_step(name, role, prompts, samples, words):
    """Declared are 4 prompts on two ranks, 4 samples each."""
    t = play_of(generator=tiny_model(), verifier=tiny_model())
    t.run.world = 2
    with pytest.raises(BadInput, match=words):
        t._limit(name, role, None, prompts, samples)
    t.done.clear()
    assert t._limit("generator", "generator", None, 2, 4) == 6
    with pytest.raises(BadInput, match="'generator' twice in a step"):
        t._limit("generator", "generator", None, 2, 4)


def changed(columns: dict) -> Rollouts:
    rollouts = rollouts_of()
    rollouts.columns = columns
    return rollouts


ONES = torch.ones(4, 5)
BAD_UPDATES = [
    ("generator", "play yields a str, not an Update"),
    (Update("verifier", [(rollouts_of(), ONES)]), "an Update of 'verifier'; the roles that are trained are generator"),
    *[(Update("generator", parts), "must be a list of pairs")
      for parts in (iter([(rollouts_of(), ONES)]), [], [rollouts_of()], [(rollouts_of(), ONES.long())])],
    *[(Update("generator", [(changed(columns), ONES)]), words) for columns, words in (
        ({"x": [1]}, "column 'x' of 4 rollouts .* it has 1"), ({"x": list(ONES)}, "Tensor is not JSON"),
        ({"step": [1] * 4}, "column 'step' .* the loop itself writes step"), ({(1, 2): [1] * 4}, "not tuple"))],
    *[(Update("generator", [(rollouts_of(), ONES)], **options), words) for options, words in (
        (dict(aggregation="line"), "names 'line'; there are"), (dict(loss=PolicyLoss("abc")), "names 'abc'; there are"),
        (dict(loss=PolicyLoss(kl="k9")), "names 'k9'"), (dict(lr=-1.0), "has lr -1.0 and num_updates 1: they must be"),
        (dict(num_updates=0), "num_updates 0: they must be"), (dict(num_updates=0.5), "num_updates 0.5"),
        (dict(loss=PolicyLoss(kl_coef=0.1)), "a KL to its start, which is not kept"))]]


@pytest.mark.parametrize("wanted, words", BAD_UPDATES)
def test_an_update_that_cannot_be_made_is_refused(wanted, words):
    t = play_of(generator=tiny_model(), verifier=tiny_model())
    t.roles["verifier"].optimizer = None
    with pytest.raises(BadInput, match=words):
        apply_update(t, wanted)
    assert not t.has_moved


@pytest.mark.parametrize("role, values, words", [
    ("generator", {"loss": torch.ones(())}, "loss of the generator is a Tensor"),
    ("generator", {"x": 10 ** 400}, "x of the generator is a number of 1329 bits"),
    (None, {"step": 99}, "'step' of the step, which the loop does itself"),
    ("judge", {"x": 9}, "metrics of a role 'judge': there are generator")])
def test_what_is_no_number_or_of_no_role_is_not_logged(role, values, words):
    with pytest.raises(BadInput, match=words):
        play_of(generator=tiny_model()).log(role, values)


def test_scores_steps_and_shapes_that_a_recipe_gives_wrongly_are_named():
    t, given = play_of(generator=tiny_model()), []
    t.args.recipe, t.args.log_theory, t.args.eval_every = "mine", 0, 1
    recipe = SimpleNamespace(evaluate=lambda t: given[-1], play=lambda t: None)
    for scores, words in ((None, "evaluate gives a NoneType"), ({"x": "good"}, "evaluate gives 'x' as a str"),
                          ({"x": 10 ** 400}, "evaluate gives 'x' as a number of 1329 bits"), ({1: 2}, "gives 1 as 2"),
                          ({"gen_step": 1}, "logs 'gen_step' of the step, which the loop")):
        given.append(scores)
        with pytest.raises(BadInput, match=words):
            steps.held_out(t, recipe)
    with pytest.raises(BadInput, match="play gives a NoneType: it must yield an Update"):
        steps.play(t, recipe, 3)
    recipe.play = lambda t: iter([Update("generator", [(rollouts_of(), ONES)])] * 5)
    with pytest.raises(BadInput, match="has yielded 4 Updates in one step and does not end"):
        steps.play(t, recipe, 3)
    rollouts, t = rollouts_of(), play_of(generator=tiny_model())
    for shape in ((4, 1), (4, 4), (3, 5)):
        with pytest.raises(ValueError, match=r"advantages have the shape .* the rollouts' tokens \(4, 5\)"):
            apply_update(t, Update("generator", [(rollouts, torch.ones(shape))]))
    with pytest.raises(ValueError, match="targets have the shape"):
        t.logprobs("generator", replace(rollouts, targets=torch.zeros(4, 4, dtype=torch.long)))

def test_a_memory_that_would_not_come_back_as_it_is_is_refused():
    check_memory({"pool": {"tokens": torch.ones(2)}, "phase": "warmup", "n": [1, 2.0], 3: None})
    for value in (PROBLEMS[0], {1, 2}, CPU, [PROBLEMS[0]], (1, {2}), numpy.float64(1), [1.0, numpy.int64(1)],
                  torch.ones(1, requires_grad=True), torch.nn.Parameter(torch.ones(1), requires_grad=False),
                  {frozenset(): 1}):
        with pytest.raises(ValueError, match=r"memory\['x'\].* is a "):
            check_memory({"x": value})


def test_an_evaluation_takes_no_problem_from_training_and_has_the_limit_of_what_it_asks_for():
    t = play_of(generator=tiny_model())
    t.sampler.task = SimpleNamespace(name="numbers", problem=lambda split, index: Problem(split, index, "1+1", "2"))
    drawn = lambda *args: [problem.index for problem in t.problems(*args)]
    t.args.examples_per_step, t.evaluating = 2, True
    assert drawn() == drawn() == [0, 1] and t.num_drawn == 0
    t.evaluating = False
    assert drawn() == [0, 1] and drawn(3) == [2, 3, 4] and t.num_drawn == 5
    # Of its draw where that is declared, else of the draws with such prompts, else of all of the role's.
    t = play_of(generator=tiny_model())
    t.draws = {"solutions": Draw("generator", 4, 2, 8), "second": Draw("generator", 4, 2, 6, wrap=refine_prompt),
               "judge": Draw("generator", 4, 2, 12, wrap=empty_verifier_prompt), "theirs": Draw("verifier", 4, 2, 20)}
    t.evaluating, t.read_solutions, asked = True, lambda solutions: [], []
    limit = lambda name, wrap: t._limit(name, "generator", wrap, 9, 9)
    assert limit("second", None) == 6 and limit("judge", generator_prompt) == 12
    assert limit("eval", generator_prompt) == 8 and limit("eval", empty_verifier_prompt) == 12
    assert limit("eval", None) == limit("theirs", None) == limit("eval", quoting_prompt) == 12
    t.sampler.sample = lambda model, prompts, num, stream, limit, *more: asked.append(limit) or rollouts_of()
    t.refine("eval", rollouts_of().select([]), [], 1, role="generator")
    assert asked == [6]


def test_every_draw_and_every_step_has_noise_of_its_own_and_evaluations_have_the_same_in_all():
    t, streams = play_of(generator=tiny_model()), []
    t.draws = {name: Draw("generator", 4, 2, 8) for name in ("solutions", "second")}
    t.sampler.sample = lambda model, prompts, num, stream, *more: streams.append(stream) or rollouts_of()
    for t.state.step, t.evaluating in ((0, False), (1, False), (1, True), (2, True)):
        t.done.clear()
        for name in t.draws:
            t.sample(name, [])
    assert len(set(streams[:6])) == 6 and streams[4:6] == streams[6:]


def test_a_snapshot_carries_its_step_through():
    t = play_of(generator=tiny_model(), opponent=tiny_model(1))
    t.copy_weights("generator", "opponent")
    pairs = list(zip(*(t.roles[name].model.parameters() for name in ("opponent", "generator")), strict=True))
    assert t.has_moved and all(torch.equal(ours, theirs) and ours is not theirs for ours, theirs in pairs)


def test_a_step_without_an_update_shows_what_the_recipe_shows(capsys):
    record = {"step": 3, "gen/no_pair": 1.0, "gen/pair_loss": None, "gen/entropy": 0.5, "timing_s/step": 2.0}
    for roles, shown, line in (([], ["pair_loss", "no_pair"], "no update (generator | pair loss - | no pair 1.000) | "),
                               (["generator"], ["no_pair"], "generator | entropy 0.500 | grad - | no pair 1.000 | ")):
        print_step(record, roles, {"generator": shown}, 60)
        assert capsys.readouterr().out.startswith(f"step    3 {line}")
    for name, value, warning in (("gen/stepless", None, ""), ("gen/stepless", 0.5, ""),
                                 ("gen/stepless", 0.51, " | WARNING: answers without steps"),
                                 ("gen/wrong_passed", 0.31, " | WARNING: lenient verifier"), ("gen/reward", None, ""),
                                 ("gen/skipped", 1, " | WARNING: not finite, skipped"), ("ver/skipped", 1, "")):
        print_step(record | {name: value}, ["generator"], {}, 60)
        assert capsys.readouterr().out.startswith(f"step    3 generator | entropy 0.500 | grad -{warning} | 2.0s")
