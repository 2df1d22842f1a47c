"""The update: shared prompts, micro-batches and ranks change nothing; what a bad batch does not do."""
import copy
import math

import pytest
import torch
from conftest import on_two_ranks, random_model, randomized

from nanochat import gpt
from nanochat.common import all_reduce
from nanochat.engine import generate, row_key
from nanochat.hf.decoder import Decoder, DecoderConfig
from nanochat.kernels.losses import PolicyLoss
from nanochat.optim import adamw
from nanochat.rl.learn import trainer
from nanochat.rl.learn.packing import pack, token_weights
from nanochat.rl.learn.roles import Role
from nanochat.rl.learn.trainer import completion_hidden, score, update
from nanochat.rl.measure.watched import warnings_in
from nanochat.rl.records.prompts import Prompt
from nanochat.rl.records.rollouts import Rollouts
from nanochat.weights import copy_of

CPU = torch.device("cpu")
EVERYTHING = 10 ** 9  # max_tokens of one micro-batch


def tiny_model(n_layer=2, seed=0):
    return random_model(n_layer, seed, context=256, window="SSL")


def random_rollouts(prompt_lengths, completion_lengths, seed=0):
    """One group per prompt; completion_lengths are those of all rollouts, group by group."""
    draw = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(265, (n,), generator=draw).tolist() for n in prompt_lengths]
    lengths = torch.tensor(completion_lengths)
    N, T = len(lengths), int(lengths.max())
    tokens = torch.randint(265, (N, T), generator=draw) * (torch.arange(T) < lengths[:, None])
    group_id = torch.arange(len(prompts)).repeat_interleave(N // len(prompts))
    return Rollouts([Prompt(ids) for ids in prompts], group_id, tokens, torch.zeros(N, T), lengths,
                    torch.ones(N, dtype=torch.bool))


def random_advantages(rollouts, seed=1):
    return torch.randn(rollouts.tokens.shape, generator=torch.Generator().manual_seed(seed))


def packed(rollouts, advantages, aggregation="token", max_tokens=EVERYTHING, keep_idle=False, reduce=lambda x: x):
    weights = token_weights(rollouts.lengths, aggregation, 20, reduce)
    return pack(rollouts, advantages, weights, max_tokens, keep_idle)


def role_of(model, optimizer=None, reference=None):
    parameters = list(model.parameters())
    return Role("generator", model, parameters, optimizer or torch.optim.SGD(parameters, lr=1.0), reference)


def step(role, batches, loss=None, lr=1.0, max_grad_norm=0.0, temperature=1.0):
    return update(role, batches, loss or PolicyLoss(), lr=lr, max_grad_norm=max_grad_norm, temperature=temperature,
                  device=CPU)


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradient(batches, model=None, loss=None, reference=None, **options):
    """The gradient that an update takes: how far plain SGD with rate 1 moves the weights back."""
    model = copy.deepcopy(model or tiny_model())
    before, metrics = weights_of(model), step(role_of(model, reference=reference), batches, loss, **options)
    assert metrics["skipped"] == 0
    return {name: before[name] - after for name, after in weights_of(model).items()}, metrics


def gradient_of(value, model):
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(value, parameters), strict=True))


def assert_close(a, b, tolerance):
    """Equal up to `tolerance` of the largest entry."""
    scale = max(float(x.abs().max()) for x in b.values())
    assert scale > 1e-6 and a.keys() == b.keys()
    for name in b:
        assert (a[name] - b[name]).abs().max() <= tolerance * scale, name


def full_rows(model, rollouts, n):
    """Hidden states (T, C) that predict rollout n's tokens, from a plain forward over prompt + completion."""
    prompt, completion = rollouts.prompts[int(rollouts.group_id[n])].ids, rollouts.completions()[n]
    return model.trunk(torch.tensor([prompt + completion]))[0, len(prompt) - 1: -1]


def token_logprobs(model, rollouts, n, temperature=1.0):
    logits = model.head(full_rows(model, rollouts, n)) / temperature
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(rollouts.completions()[n])[:, None])[:, 0]


def batch_rows(batch, rollouts):
    return [next(n for n in range(len(rollouts.tokens)) if torch.equal(rollouts.tokens[n, : len(row)], row))
            for row in batch.tokens]


# contexts of up to 138 and 147 tokens: the window of 128 ends inside prompt and completion
BOUNDARY = ([126, 3, 135], [12, 5, 1, 9, 12, 2])


def test_hidden_states_and_gradients_after_a_shared_prompt_equal_those_of_plain_rows():
    model, rollouts = tiny_model(n_layer=4), random_rollouts(*BOUNDARY)
    advantages = random_advantages(rollouts)
    batch, = packed(rollouts, advantages)
    hidden, rows = completion_hidden(model, batch), batch_rows(batch, rollouts)
    plain = {n: full_rows(model, rollouts, n) for n in range(6)}
    assert sorted(rows) == list(range(6))
    for row, n in zip(hidden, rows, strict=True):
        assert (row[: rollouts.lengths[n]] - plain[n]).abs().max() < 1e-10
    direction = torch.randn(48, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    parameters = [p for name, p in model.named_parameters() if name != "lm_head.weight"]
    sums = [(hidden[batch.mask] @ direction * batch.advantages[batch.mask]).sum(),
            sum((plain[n] @ direction * advantages[n, : rollouts.lengths[n]]).sum() for n in range(6))]
    for a, b in zip(*(torch.autograd.grad(x, parameters) for x in sums), strict=True):
        assert b.abs().max() > 0 and (a - b).abs().max() < 1e-10 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("model", [
    tiny_model(), randomized(Decoder(DecoderConfig("qwen2", 256, 265, 2, 4, 2, 48, 12, 64, 1e-6, 1e4, None, True, False,
                                                   False, False, True), torch.float64).double(), 0)],
    ids=["GPT", "Decoder"])
def test_an_update_runs_no_padding_through_the_products(model, monkeypatch):
    rollouts, seen = random_rollouts([3, 20], [9, 2, 30, 1]), [0, 0]
    batches = packed(rollouts, random_advantages(rollouts))
    hooks = [block.mlp.register_forward_hook(lambda block, given, _, i=i: seen.__setitem__(
        i, seen[i] + given[0].shape[:-1].numel())) for i, block in enumerate(model.blocks)]
    gradients = gradient(batches, model)[0]
    for hook in hooks:
        hook.remove()
    # Of the last block each prompt has its last token; the last token of a completion predicts nothing.
    assert len(batches) == 1 and seen == [3 + 20 + 8 + 1 + 29, 2 + 8 + 1 + 29]
    monkeypatch.setattr(gpt, "first_columns", lambda lengths, T: None)  # all of them
    assert_close(gradients, gradient(batches, model)[0], 1e-12)


def test_completions_of_one_token_need_no_second_forward():
    model, rollouts = tiny_model(), random_rollouts([4, 7], [1, 1, 1, 1])
    batch, = packed(rollouts, random_advantages(rollouts))
    assert completion_hidden(model, batch).shape == (4, 1, 48)
    expected = torch.cat([token_logprobs(model, rollouts, n) for n in batch_rows(batch, rollouts)])
    torch.testing.assert_close(score(model, batch, 1.0), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@torch.no_grad()
def test_scores_equal_plain_forwards_and_what_the_sampler_recorded(temperature):
    model, prompts = tiny_model(), [[3, 1, 4], [1, 5, 9, 2, 6]]
    out = generate(model, prompts, 3, max_new_tokens=9, stop_tokens=list(range(30)),
                   keys=[row_key(i) for i in range(6)], temperature=temperature)
    rollouts = Rollouts([Prompt(ids) for ids in prompts], torch.arange(6) // 3, out.tokens, out.logprobs, out.lengths,
                        out.stopped)
    for batch in packed(rollouts, torch.ones_like(out.logprobs), max_tokens=20):
        logprobs = score(model, batch, temperature)
        torch.testing.assert_close(logprobs, batch.sampler_logprobs[batch.mask], rtol=0, atol=1e-5)
        plain = torch.cat([token_logprobs(model, rollouts, n, temperature) for n in batch_rows(batch, rollouts)])
        torch.testing.assert_close(logprobs, plain, rtol=0, atol=1e-5)
    with torch.enable_grad():
        _, metrics = gradient(packed(rollouts, torch.ones_like(out.logprobs)), temperature=temperature)
    assert metrics["rollout_logprobs_diff_max"] < 1e-4 and metrics["rollout_probs_diff_mean"] < 1e-5


def test_of_no_tokens_nothing_is_a_mean_and_nothing_is_called_deterministic():
    """Groups of equal rewards train no token: of the entropy nothing is known. 0 would warn of another trouble."""
    rollouts, role = random_rollouts([4, 7], [1, 2, 1, 1]), role_of(tiny_model())
    equal = torch.zeros(rollouts.tokens.shape)  # advantages
    idle, seen = (step(role, packed(rollouts, equal, keep_idle=keep), lr=0.0) for keep in (False, True))
    means = ("entropy", "clip_ratio/low", "clip_ratio/high")
    assert [idle[name] for name in means] == [None] * 3 and idle["grad_norm"] == idle["skipped"] == 0
    assert seen["entropy"] > 1 and seen["clip_ratio/low"] == 0
    told = lambda metrics: [w.name for w in warnings_in({f"gen/{k}": v for k, v in metrics.items()}, "generator")]
    assert told(idle) == told(seen) == [] and told(seen | {"entropy": 0.0}) == ["entropy"]


RAGGED = ([9, 4], [5, 2, 7, 1, 3, 7, 6, 4])  # N = 8 rollouts in 2 groups


def test_micro_batches_do_not_change_the_gradient():
    rollouts, results = random_rollouts(*RAGGED), []
    # One unit of 4 rows takes at most 9 + 4*7 = 37 tokens, both together 2*37 = 74.
    for max_tokens, num_batches in [(EVERYTHING, 1), (40, 2), (1, 8)]:
        batches = packed(rollouts, random_advantages(rollouts), "sequence", max_tokens)
        assert len(batches) == num_batches
        results.append(gradient(batches))
    for grads, metrics in results[1:]:
        assert_close(grads, results[0][0], 1e-5)
        for name in ("loss", "grad_norm", "entropy"):
            assert metrics[name] == pytest.approx(results[0][1][name], rel=1e-5)


@pytest.mark.parametrize("loss", [PolicyLoss(), PolicyLoss("reinforce", entropy_coef=0.1)])
def test_without_prefix_sharing_the_gradient_is_the_same(loss):
    rollouts = random_rollouts([9, 140], [5, 2, 7, 1, 3, 7, 6, 4])
    weights = token_weights(rollouts.lengths, "sequence", 20, lambda x: x)
    shared, repeated = (pack(rollouts, random_advantages(rollouts), weights, EVERYTHING, False, sharing)
                        for sharing in (True, False))
    assert [len(batch.prompt_ids) for batch in shared] == [2] and [len(batch.prompt_ids) for batch in repeated] == [8]
    assert_close(gradient(repeated, loss=loss)[0], gradient(shared, loss=loss)[0], 1e-10)


def test_every_rollout_is_in_exactly_one_micro_batch():
    rollouts = random_rollouts([9, 4, 30], [5, 2, 7, 1, 3, 7, 6, 4, 2])
    advantages = random_advantages(rollouts)
    for max_tokens in (1, 12, 25, 40, 64, EVERYTHING):
        batches = packed(rollouts, advantages, max_tokens=max_tokens)
        rows = [n for batch in batches for n in batch_rows(batch, rollouts)]
        assert sorted(rows) == list(range(9))
        for batch in batches:
            U, B = len(batch.prompt_ids), len(batch.tokens)
            assert U == 1 or batch.prompt_ids.numel() + batch.tokens.numel() <= max_tokens
            for row, n in enumerate(batch_rows(batch, rollouts)):
                prompt, T = rollouts.prompts[int(rollouts.group_id[n])].ids, int(rollouts.lengths[n])
                assert batch.prompt_ids[row // (B // U), : len(prompt)].tolist() == prompt
                assert batch.mask[row].sum() == T and batch.mask[row, :T].all()
                assert torch.equal(batch.advantages[row, :T], advantages[n, :T])


@pytest.mark.parametrize("aggregation, weights", [
    ("token", [1 / 8] * 3), ("sequence", [1 / 3, 1 / 9, 1 / 12]), ("constant", [1 / 30] * 3)])
def test_token_weights_are_taken_over_the_whole_batch(aggregation, weights):
    """8 tokens of 3 rollouts of at most 10; then with another rank that has as many."""
    of = lambda reduce: token_weights(torch.tensor([1, 3, 4]), aggregation, 10, reduce).tolist()
    assert of(lambda x: x) == pytest.approx(weights)
    assert of(lambda sizes: 2 * sizes) == pytest.approx([weight / 2 for weight in weights])


def test_groups_without_advantages_are_left_out_and_change_nothing():
    rollouts = random_rollouts(*RAGGED)
    advantages = random_advantages(rollouts)
    advantages[:4] = 0
    left_out, kept = packed(rollouts, advantages), packed(rollouts, advantages, keep_idle=True)
    assert sum(len(batch.tokens) for batch in left_out) == 4 and sum(len(batch.tokens) for batch in kept) == 8
    assert_close(gradient(left_out)[0], gradient(kept)[0], 1e-5)
    # The group that is left counts as half of the batch: alone, its weights would be larger.
    grads = gradient(packed(rollouts.select([4, 5, 6, 7]), advantages[4:]))[0]
    share = float(rollouts.lengths[4:].sum() / rollouts.lengths.sum())
    assert_close(gradient(left_out)[0], {name: share * g for name, g in grads.items()}, 1e-5)
    batch, = packed(rollouts, torch.zeros(8, 7).index_put((torch.tensor(5), torch.tensor(2)), torch.tensor(1.0)))
    assert sorted(batch_rows(batch, rollouts)) == [4, 5, 6, 7]  # with one advantage a group is kept whole
    rollouts, model = random_rollouts(*RAGGED), tiny_model()
    advantages, before = torch.zeros(8, 7), weights_of(model)
    assert packed(rollouts, advantages) == []
    for batches in ([], packed(rollouts, advantages, keep_idle=True)):
        metrics = step(role_of(model), batches)
        assert metrics["grad_norm"] == 0 and metrics["loss"] == 0 and metrics["skipped"] == 0
    assert all(torch.equal(before[name], after) for name, after in weights_of(model).items())


def test_on_policy_the_gradient_is_that_of_reinforce():
    model, rollouts = tiny_model(), random_rollouts(*RAGGED)
    advantages = random_advantages(rollouts)
    num_tokens = int(rollouts.lengths.sum())
    loss = sum(-(advantages[n, : rollouts.lengths[n]] * token_logprobs(model, rollouts, n, 0.8)).sum() / num_tokens
               for n in range(8))
    expected = gradient_of(loss, model)
    # all ratios are 1
    ratio_loss = -sum(float(advantages[n, : rollouts.lengths[n]].sum()) for n in range(8)) / num_tokens
    for name, value in (("ppo_clip", ratio_loss), ("reinforce", loss.item())):
        grads, metrics = gradient(packed(rollouts, advantages), model, PolicyLoss(name), temperature=0.8)
        assert_close(grads, expected, 1e-5)
        assert metrics["loss"] == pytest.approx(value, rel=1e-4)


def test_tokens_beyond_the_clip_range_give_no_gradient():
    """All ratios are e^1 > 1.2: clipped where A > 0, taken in full where A < 0."""
    rollouts = random_rollouts([4], [3, 3])
    batch, = packed(rollouts, torch.tensor([[1.0] * 3, [-1.0] * 3]))
    batch.old_logprobs = score(tiny_model(), batch, 1.0) - 1
    grads, metrics = gradient([batch])
    assert metrics["clip_ratio/high"] == pytest.approx(0.5) and metrics["clip_ratio/low"] == 0
    assert_close(grads, gradient(packed(rollouts, torch.tensor([[0.0] * 3, [-math.e] * 3])))[0], 1e-5)


def literal_gspo(log_ratios, logprobs, advantages, low, high):
    """Eq. 5 of GSPO: the mean over sequences of -min(s A, clip(s) A) with s = exp(mean log ratio)."""
    s = torch.stack([row.mean().exp() for row in log_ratios])
    return -torch.minimum(s * advantages, s.clamp(1 - low, 1 + high) * advantages).mean()


def literal_cispo(log_ratios, logprobs, advantages, low, high):
    """Eq. 4 of MiniMax-M1: the mean over tokens of -sg(clip(ratio)) A log pi."""
    weights = [row.detach().exp().clamp(1 - low, 1 + high) * A for row, A in zip(log_ratios, advantages, strict=True)]
    return -(torch.cat(weights) * torch.cat(logprobs)).mean()


@pytest.mark.parametrize("loss, aggregation, literal", [
    (PolicyLoss(clip_low=0.03, clip_high=0.05, sequence_ratio=True), "sequence", literal_gspo),
    (PolicyLoss("cispo", clip_low=0.03, clip_high=0.05), "token", literal_cispo)])
def test_the_second_update_on_a_batch_takes_the_gradient_of_the_papers_loss(loss, aggregation, literal):
    """At the first all ratios are 1. After it some are outside of the clip range and some inside."""
    model, rollouts = tiny_model(), random_rollouts(*RAGGED)
    old = [token_logprobs(model, rollouts, n).detach() for n in range(8)]
    of_rollout = random_advantages(rollouts)[:, 0]
    batches = packed(rollouts, of_rollout[:, None].expand(rollouts.tokens.shape), aggregation, max_tokens=40)
    for batch in batches:
        batch.old_logprobs = score(model, batch, 1.0)
    metrics = step(role_of(model), batches, loss, lr=0.001)
    assert len(batches) > 1 and metrics["clip_ratio/low"] == metrics["clip_ratio/high"] == 0
    logprobs = [token_logprobs(model, rollouts, n) for n in range(8)]
    log_ratios = [now - before for now, before in zip(logprobs, old, strict=True)]
    value = literal(log_ratios, logprobs, of_rollout.double(), loss.clip_low, loss.clip_high)
    expected = gradient_of(value, model)
    grads, metrics = gradient(batches, model, loss)
    assert_close(grads, expected, 1e-4)
    assert metrics["loss"] == pytest.approx(value.item(), rel=1e-4)
    assert 0 < metrics["clip_ratio/low"] + metrics["clip_ratio/high"] < 1


def test_kl_to_a_copy_of_oneself_changes_nothing_and_to_another_model_pulls():
    model, rollouts, loss = tiny_model(), random_rollouts(*RAGGED), PolicyLoss(kl_coef=0.5)
    plain, copied, other = (
        gradient(packed(rollouts, random_advantages(rollouts)), model, loss if reference else None, reference)
        for reference in (None, copy_of(model), copy_of(tiny_model(seed=1))))
    assert copied[1]["kl"] < 1e-6 < other[1]["kl"]
    assert_close(copied[0], plain[0], 1e-5)
    with pytest.raises(AssertionError):
        assert_close(other[0], plain[0], 1e-2)


def test_the_step_is_clipped_and_its_norm_before_that_and_its_rate_are_reported():
    rollouts = random_rollouts(*RAGGED)
    batches = packed(rollouts, 100 * random_advantages(rollouts))
    norm_of = lambda grads: math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    grads, metrics = gradient(batches)
    norm = norm_of(grads)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5) and norm > 0.5
    clipped, metrics = gradient(batches, max_grad_norm=0.5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5) and norm_of(clipped) == pytest.approx(0.5, rel=1e-4)
    small, metrics = gradient(batches, lr=0.25)
    assert metrics["lr"] == 0.25
    assert_close(small, {name: 0.25 * g for name, g in grads.items()}, 1e-6)


@pytest.mark.parametrize("poison", ["inf advantage", "nan advantage", "nan weight", "inf gradient"])
def test_a_step_that_is_not_finite_moves_nothing(poison):
    model, rollouts = tiny_model(), random_rollouts(*RAGGED)
    role = role_of(model, adamw(model.parameters(), 1e-3))
    assert step(role, packed(rollouts, random_advantages(rollouts)), lr=1e-3)["skipped"] == 0
    advantages = random_advantages(rollouts)
    if poison == "nan weight":
        model.transformer.h[1].mlp.c_fc.weight.data[3, 4] = math.nan
    elif poison == "inf gradient":  # after a finite loss
        model.lm_head.weight.register_hook(lambda grad: grad * math.inf)
    else:
        advantages[5, 2] = float(poison.split()[0])
    before, state = weights_of(model), copy.deepcopy(role.optimizer.state_dict())
    metrics = step(role, packed(rollouts, advantages, max_tokens=40), lr=1e-3, max_grad_norm=1.0)
    assert metrics["skipped"] == 1
    assert all(torch.equal(before[name].view(torch.int64), after.view(torch.int64))
               for name, after in weights_of(model).items())
    for index, entry in role.optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state["state"][index][key]) for key, value in entry.items())
    assert all(p.grad is None for p in model.parameters())


def test_a_stop_is_looked_for_before_every_micro_batch_and_moves_nothing(monkeypatch):
    rollouts, asked, run = random_rollouts([9, 4, 6], [5, 2, 7, 3, 3, 7, 6, 4, 2], 0), [], []
    batches, model = packed(rollouts, random_advantages(rollouts), max_tokens=12), tiny_model()
    before, options = weights_of(model), dict(lr=1.0, max_grad_norm=0.0, temperature=1.0, device=CPU)
    monkeypatch.setattr(trainer, "completion_hidden", lambda *args: (run.append(1), completion_hidden(*args))[1])

    def stop():
        raise KeyboardInterrupt
    for breaks_off in (lambda: (asked.append(1), len(asked) == 3)[1], lambda: False):
        with pytest.raises(KeyboardInterrupt):
            update(role_of(model), batches, PolicyLoss(), **options, check_stop=stop, breaks_off=breaks_off)
        assert all(torch.equal(before[name], after) for name, after in weights_of(model).items())
    assert len(batches) > 3 and len(asked) == 3 and len(run) == 2 + len(batches)


def train_share(rank, world):
    """Weights and metrics of three AdamW steps on every world-th of 3 groups, the last one poisoned on rank 0 alone."""
    model, metrics = tiny_model(), []
    role = role_of(model, adamw(model.parameters(), 1e-3))
    for seed in (0, 1, 2):
        whole = random_rollouts([9, 4, 6], [5, 2, 7, 3, 3, 7, 6, 4, 2], seed)
        advantages = random_advantages(whole, seed + 10)
        advantages[6:] *= seed != 1  # in the second step rank 0 keeps one of its two groups
        advantages[:3] *= seed != 1  # ... and then none: it still takes part in every collective
        if seed == 2:
            advantages[0, 0] = math.inf
        mine = [n for n in range(9) if whole.group_id[n] % world == rank]
        batches = packed(whole.select(mine), advantages[mine], "sequence", 40, reduce=all_reduce)
        metrics.append(step(role, batches, lr=1e-3, max_grad_norm=1.0))
    return weights_of(model), metrics


def save_share(folder):
    rank = torch.distributed.get_rank()
    torch.save(train_share(rank, 2), f"{folder}/rank{rank}.pt")


def test_two_gloo_ranks_equal_one(tmp_path):
    expected, expected_metrics = train_share(0, 1)
    on_two_ranks(save_share, str(tmp_path))
    results = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert [m["skipped"] for m in expected_metrics] == [0, 0, 1]
    start = weights_of(tiny_model())
    assert max((start[name] - p).abs().max() for name, p in expected.items()) > 1e-3
    for weights, metrics in results:
        for name, p in expected.items():
            assert (weights[name] - p).abs().max() < 1e-6, name
            assert torch.equal(weights[name], results[0][0][name])  # the ranks cannot drift apart
        assert [m["skipped"] for m in metrics] == [0, 0, 1]
        for ours, theirs in zip(metrics[:2], expected_metrics[:2], strict=True):
            assert ours["kl"] is None  # no reference, nothing measured
            assert ours | {"kl": 0} == pytest.approx(theirs | {"kl": 0}, rel=1e-4, abs=1e-7)
