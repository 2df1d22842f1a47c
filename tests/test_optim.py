"""Optimizers against their formulas, the learning-rate schedule, clipping."""
import copy
import math

import pytest
import torch
from conftest import on_ranks, randomized
from torch.utils.flop_counter import FlopCounterMode

from nanochat import optim
from nanochat.checkpoint import restore_optimizer
from nanochat.common import rank_and_world
from nanochat.flops import muon_flops
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import (Muon, adamw, all_reduce_gradients, clip_gradients, muon_adamw, orthogonal, product_dtype)
from nanochat.rl.learn.heads import share_layers


def tiny_model(seed=0, n_layer=3):
    return randomized(GPT(GPTConfig(64, 265, n_layer, 2, 1, 48, "L")), seed)


def parameter(*values):
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_follows_its_formula(weight_decay):
    p = parameter(1.0, -2.0, 0.5)
    optimizer = adamw([p], 1e-2, weight_decay) if weight_decay else adamw([p], 1e-2)  # unless asked, none
    x, m, v = p.detach().clone(), torch.zeros(3).double(), torch.zeros(3).double()
    draw = torch.Generator().manual_seed(0)
    for t in range(1, 6):
        grad = torch.randn(3, generator=draw, dtype=torch.float64)
        p.grad = grad.clone()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad ** 2
        x = x * (1 - 1e-2 * weight_decay) - 1e-2 * (m / (1 - 0.9 ** t)) / ((v / (1 - 0.95 ** t)).sqrt() + 1e-8)
        torch.testing.assert_close(p.detach(), x, rtol=1e-12, atol=1e-12)


def test_adamw_makes_one_pass_on_cpu_and_goes_on_from_states_that_were_saved_before_it_did():
    draw, before, after = torch.Generator().manual_seed(0), parameter(1.0, -2.0, 0.5), parameter(1.0, -2.0, 0.5)
    old, new = torch.optim.AdamW([before], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0), adamw([after], 1e-2)
    assert not old.param_groups[0]["fused"]
    for step in range(6):
        before.grad = torch.randn(3, generator=draw, dtype=torch.float64)
        after.grad = before.grad.clone()
        old.step()
        new.step()
        assert (before - after).abs().max() < 1e-15 and new.param_groups[0]["fused"]
        if step == 2:
            restore_optimizer(new, copy.deepcopy(old.state_dict()), "a file")
    restore_optimizer(old, copy.deepcopy(new.state_dict()), "a file")  # as on another device
    assert not old.param_groups[0]["fused"]


def groups_of(optimizers):
    return [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]


def test_muon_takes_the_blocks_matrices_alone():
    model = tiny_model()
    muon, rest = optimizers = muon_adamw(model, 1e-3, 2e-3)
    listed = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert len(listed) == len({id(p) for p in listed}) and set(listed) == set(model.parameters())
    assert isinstance(muon, torch.optim.Muon) and isinstance(rest, torch.optim.AdamW)
    expected = {id(p) for block in model.transformer.h
                for layer in (block.attn.c_q, block.attn.c_k, block.attn.c_v, block.attn.c_proj,
                              block.mlp.c_fc, block.mlp.c_proj)
                for p in layer.parameters()}
    assert groups_of([muon])[0] == expected and len(expected) == 18
    assert muon.param_groups[0]["lr"] == 1e-3 and rest.param_groups[0]["lr"] == 2e-3


@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_frozen_parameters_are_left_out(num_layers):
    generator, verifier = tiny_model(0), tiny_model(1)
    private = share_layers(generator, verifier, num_layers)
    generator.requires_grad_(False)
    for p in private:
        p.requires_grad_(True)
    before = [p.detach().clone() for p in generator.parameters()]
    optimizers = muon_adamw(verifier, 1e-3, 1e-3)
    assert set().union(*groups_of(optimizers)) == {id(p) for p in private}
    verifier(torch.tensor([[1, 2, 3]])).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(generator.parameters(), before, strict=True))


def test_clipping_returns_the_norm_before_it_and_scales_down():
    """Small gradients and no limit change nothing; a missing one counts as 0; one that is not finite shows."""
    a, b = parameter(0.0, 0.0), parameter(0.0)

    def norm_of(x, y, limit: float) -> float:
        a.grad, b.grad = torch.tensor([x, 0.0]).double(), torch.tensor([y]).double()
        return clip_gradients([a, b], limit)
    assert norm_of(3.0, 4.0, 1.0) == pytest.approx(5.0)
    assert a.grad.tolist() == pytest.approx([0.6, 0.0], rel=1e-5) and b.grad.tolist() == pytest.approx([0.8], rel=1e-5)
    for limit in (0.0, 10.0):
        assert norm_of(3.0, 4.0, limit) == pytest.approx(5.0)
        assert a.grad.tolist() == [3.0, 0.0] and b.grad.tolist() == [4.0]
    assert not any(math.isfinite(norm_of(1.0, bad, 1.0)) for bad in (math.inf, -math.inf, math.nan))
    a.grad, b.grad = None, torch.tensor([5.0]).double()
    all_reduce_gradients([a, b])
    assert a.grad.tolist() == [0.0, 0.0] and b.grad.tolist() == [5.0]


SHAPES = [(24, 8), (8, 24), (16, 16), (16, 16), (24, 8), (2, 12), (16, 16)]


def muon_steps(kind, rule: str, decay: float = 0.1, nesterov: bool = True, batch: int = 10 ** 9, device="cpu"):
    """Three steps from the same start and gradients -> the parameters and the optimizer."""
    draw = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=draw).to(device)) for shape in SHAPES]
    optimizer = kind(parameters, lr=0.1, weight_decay=decay, adjust_lr_fn=rule, nesterov=nesterov)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim, "BATCH", batch)
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=draw).to(device)
            optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("rule, decay, nesterov", [("match_rms_adamw", 0.0, True), ("original", 0.1, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_muon_takes_pytorchs_steps(monkeypatch, dtype, rule, decay, nesterov):
    """From the same gradients, to the bit; in fp32 but for the rounding of bfloat16, which is about a hundredth of a
    step. States can be exchanged."""
    monkeypatch.setattr(optim, "product_dtype", lambda p: dtype)
    (ours, mine), (theirs, pytorchs) = (muon_steps(kind, rule, decay, nesterov) for kind in (Muon, torch.optim.Muon))
    for p, q in zip(ours, theirs, strict=True):
        if dtype == torch.bfloat16:
            assert torch.equal(p, q)
        else:
            assert 0 < (p - q).norm() < 0.02 * q.norm()
    pytorchs.load_state_dict(mine.state_dict())
    assert all(torch.equal(pytorchs.state[q]["momentum_buffer"], mine.state[p]["momentum_buffer"])
               for p, q in zip(ours, theirs, strict=True))


def test_muons_rounds_change_no_step():
    """Two matrices of 256 numbers at once, or one."""
    found = [muon_steps(Muon, "original", batch=batch)[0] for batch in (10 ** 9, 512, 1)]
    assert all(torch.equal(p, q) for other in found[1:] for p, q in zip(found[0], other, strict=True))


def shared_steps(folder: str) -> None:
    rank, world = rank_and_world()
    with FlopCounterMode(display=False) as count:
        parameters, optimizer = muon_steps(Muon, "original", batch=512 if world == 2 else 10 ** 9)
    torch.save({"parameters": [p.data for p in parameters], "flops": count.get_total_flops(),
                "state": optimizer.state_dict()}, f"{folder}/{rank}.pt")


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_muons_matrices_and_take_the_steps_of_one(tmp_path, world):
    """Weights and momenta to the bit. One rank makes the products of all seven matrices three times, each of two or
    three those of its share."""
    with FlopCounterMode(display=False) as count:
        alone, optimizer = muon_steps(Muon, "original")
    on_ranks(world, shared_steps, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(world)]
    for rank in ranks:
        assert all(torch.equal(p, q) for p, q in zip(alone, rank["parameters"], strict=True))
        assert all(torch.equal(entry["momentum_buffer"], rank["state"]["state"][i]["momentum_buffer"])
                   for i, entry in optimizer.state_dict()["state"].items())
    assert count.get_total_flops() == 3 * muon_flops(SHAPES)
    assert sum(rank["flops"] for rank in ranks) == count.get_total_flops()
    assert max(rank["flops"] for rank in ranks) == 3 * muon_flops(SHAPES, world) < 0.7 * count.get_total_flops()


@pytest.mark.gpu
def test_a_gpus_batches_are_pytorchs_steps_to_bf16s_rounding():
    (ours, _), (theirs, _) = (muon_steps(kind, "original", device="cuda") for kind in (Muon, torch.optim.Muon))
    assert all((p - q).norm() < 0.02 * q.norm() for p, q in zip(ours, theirs, strict=True))


def test_muons_newton_schulz_makes_singular_values_alike():
    """A batch is orthogonalised as its matrices are, one that is taller as its transpose."""
    x, options = torch.randn(5, 12, 30, generator=torch.Generator().manual_seed(1)), ((3.4445, -4.775, 2.0315), 5, 1e-7)
    for batch in (x, x.mT):
        alone = torch.stack([orthogonal(matrix, *options) for matrix in batch])
        torch.testing.assert_close(orthogonal(batch, *options), alone, rtol=1e-4, atol=1e-5)
        values = torch.linalg.svdvals(alone)
        assert values.min() > 0.5 and values.max() < 1.5
    assert torch.allclose(orthogonal(x[0].T, *options), orthogonal(x[0], *options).T, atol=1e-5)
    assert [product_dtype(torch.empty(2, 2, device=device)) for device in ("cpu", "meta")] == [torch.float32,
                                                                                             torch.bfloat16]
