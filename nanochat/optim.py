"""
Optimizers, learning-rate schedule, gradient all-reduce and clipping.
"""
import math

import torch
import torch.distributed as dist

from nanochat.common import all_reduce, rank_and_world
from nanochat.weights import is_sharded

BATCH = 2 ** 27  # numbers in matrices that a rank orthogonalises at once, which bounds what a step holds


class Muon(torch.optim.Muon):
    """torch.optim.Muon, whose steps and state are these, with its matrices shared among the ranks: each orthogonalises
    its share, and all get the results. Gradients are the same on all ranks; a step is a collective.

    On CUDA matrices of one shape are one batched product, in bfloat16 as PyTorch's are. On CPU products are in the
    parameters' dtype: that is faster where it was measured, with and without AVX-512 (dev/BENCH.md), and CPUs of all
    kinds take the same steps but for the order of sums.
    """

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameters in self.rounds(group):
                for p in parameters:
                    if "momentum_buffer" not in self.state[p]:
                        self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                    self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                for p, update in zip(parameters, self.updates(parameters, group), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update.T if is_tall(p) else update, alpha=-group["lr"] * step_scale(group, *p.shape))

    def rounds(self, group: dict):
        """Yields lists of a group's parameters that are of one shape, turned or not, and fit the ranks' batches."""
        by_shape: dict[tuple, list] = {}
        for p in (p for p in group["params"] if p.grad is not None):
            by_shape.setdefault((min(p.shape), max(p.shape)), []).append(p)
        for (rows, columns), parameters in by_shape.items():
            size = rank_and_world()[1] * max(1, BATCH // (rows * columns))
            yield from (parameters[i: i + size] for i in range(0, len(parameters), size))

    def updates(self, parameters: list, group: dict) -> torch.Tensor:
        """The orthogonalised directions of N matrices of one shape, of which this rank makes its share. -> (N, A, B),
        A <= B: those of tall matrices lie on their side."""
        rank, world = rank_and_world()
        share = -(-len(parameters) // world)
        mine = parameters[rank * share: (rank + 1) * share]
        given = torch.zeros(share, *sorted(parameters[0].shape), dtype=product_dtype(parameters[0]),
                            device=parameters[0].device)
        options = group["ns_coefficients"], group["ns_steps"], group["eps"]
        if given.is_cuda and mine:
            directions = [self.direction(p, group) for p in mine]
            given[:len(mine)] = orthogonal(torch.stack([x.T if is_tall(x) else x for x in directions]), *options)
        else:  # one by one: a batch would be as slow, and round in another way
            for place, p in zip(given, mine, strict=False):
                update = orthogonal(self.direction(p, group), *options)
                place.copy_(update.T if is_tall(update) else update)
        if world == 1:
            return given
        found = given.new_empty(world, *given.shape)
        dist.all_gather(list(found), given)
        return found.flatten(0, 1)[:len(parameters)]

    def direction(self, p: torch.nn.Parameter, group: dict) -> torch.Tensor:
        average = self.state[p]["momentum_buffer"]
        return (p.grad.lerp(average, group["momentum"]) if group["nesterov"] else average).to(product_dtype(p))


def is_tall(x: torch.Tensor) -> bool:
    return x.shape[-2] > x.shape[-1]


def step_scale(group: dict, rows: int, columns: int) -> float:
    """What a matrix's learning rate is multiplied with (torch.optim.Muon's adjust_lr_fn)."""
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def orthogonal(x: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> torch.Tensor:
    """Near the orthogonal matrix closest to x (A, B) or (N, A, B), by Newton-Schulz (Jordan et al. 2024, Muon)."""
    a, b, c = coefficients
    turned = is_tall(x)
    x = x.mT if turned else x
    add_product, norm = ((torch.addmm, x.norm()) if x.dim() == 2 else
                         (torch.baddbmm, x.norm(dim=(1, 2), keepdim=True)))
    x = x / norm.clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if turned else x


def product_dtype(p: torch.Tensor) -> torch.dtype:
    """Of Muon's products."""
    return p.dtype if p.device.type == "cpu" else torch.bfloat16


def adamw(parameters, lr: float, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    """AdamW (betas 0.9, 0.95) over the given parameters: the optimizer of RL."""
    parameters = list(parameters)
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay,
                             fused=one_pass(parameters))


def one_pass(parameters: list) -> bool | None:
    """Whether AdamW makes its step in one pass over memory: on CPU, where PyTorch does not choose it itself (None: it
    chooses). It needs gradients of their parameters' layout, as autograd makes them, unchecked."""
    return True if all(p.device.type == "cpu" for p in parameters) else None


def muon_adamw(model, matrix_lr: float, embedding_lr: float) -> list[torch.optim.Optimizer]:
    """For SFT, of what takes a gradient: Muon for the blocks' matrices, AdamW for the rest."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [p for name, p in trained.items() if ".c_" in name]
    rest = [p for name, p in trained.items() if ".c_" not in name]
    muon = [Muon(matrices, lr=matrix_lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")] if matrices else []
    return [*muon, adamw(rest, embedding_lr)]


def pretraining_optimizers(model, matrix_lr: float, embedding_lr: float, unembedding_lr: float, scalar_lr: float,
                           weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices and gates, AdamW with a group of its own for each other kind of parameter.

    Betas, decays and the ratios between groups are upstream nanochat's, tuned there at width 768; AdamW's learning
    rates of matrices go with 1 / sqrt(width). weight_decay is Muon's.
    """
    scale, parameters = (model.config.n_embd / 768) ** -0.5, dict(model.named_parameters())
    pick = lambda *starts: [p for name, p in parameters.items() if name.startswith(starts)]
    groups = [
        dict(params=pick("lm_head"), lr=unembedding_lr * scale, betas=(0.8, 0.96), weight_decay=0.01),
        dict(params=pick("transformer.wte"), lr=embedding_lr * scale, betas=(0.8, 0.995), weight_decay=0.001),
        dict(params=pick("value_embeds"), lr=0.5 * embedding_lr * scale, betas=(0.8, 0.995), weight_decay=0.01),
        dict(params=pick("resid_lambdas"), lr=0.01 * scalar_lr, betas=(0.8, 0.95), weight_decay=0.05),
        dict(params=pick("x0_lambdas"), lr=scalar_lr, betas=(0.96, 0.95), weight_decay=0.0),
        dict(params=pick("smear", "backout"), lr=0.4 * scalar_lr, betas=(0.8, 0.95), weight_decay=0.0),
    ]
    matrices = pick("transformer.h.")
    muon = Muon(matrices, lr=matrix_lr, weight_decay=weight_decay, momentum=0.95, adjust_lr_fn="original")
    return [muon, torch.optim.AdamW(groups, eps=1e-10, fused=one_pass([*parameters.values()]))]


def optimize(optimizers: list[torch.optim.Optimizer], parameters: list[torch.nn.Parameter], lr_factor: float,
             max_grad_norm: float) -> float:
    """One step of all optimizers on gradients summed over ranks, clipped, at the initial learning rates times
    lr_factor. -> the gradient's norm; where that is not finite no rank steps."""
    all_reduce_gradients(parameters)
    grad_norm = clip_gradients(parameters, max_grad_norm)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * lr_factor
        if math.isfinite(grad_norm):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return grad_norm


def warmup_warmdown(step: int, num_steps: int, warmup_steps: int, warmdown: float, final: float) -> float:
    """Learning-rate factor: linear up over warmup_steps, 1, linear down to `final` over the last `warmdown` share."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    left = (num_steps - step) / max(1, round(warmdown * num_steps))
    return 1.0 if left >= 1 else left + (1 - left) * final


def all_reduce_gradients(parameters: list[torch.nn.Parameter]) -> None:
    """Sums gradients over ranks, in one collective. A missing gradient counts as 0, so that all ranks reduce the same
    shape. Those of sharded parameters were summed in the backward pass."""
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if not torch.distributed.is_initialized() or is_sharded(parameters[0]):
        return
    flat = all_reduce(torch.cat([p.grad.flatten() for p in parameters]))
    for p, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(grad.view_as(p))


def clip_gradients(parameters: list[torch.nn.Parameter], max_norm: float) -> float:
    """The gradient's norm (not finite if an entry is not), scaled down to max_norm if larger. 0 = no clipping."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm if max_norm > 0 else math.inf)
    return float(norm.full_tensor() if is_sharded(norm) else norm)
