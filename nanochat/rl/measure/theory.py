"""
What RL does to a model beside its pass@1, with --log-theory: how many of its weights move, and whether it solves what
it could not solve before. These are measures of Chae et al. 2025 (arXiv 2510.27072), who compare self-play, RL on given
problems and SFT by them; the third, the entropy per token, is logged with every update.
"""
import torch

from nanochat.checkpoint import weights_in
from nanochat.common import wide_dtype
from nanochat.rl.learn.roles import Role, short_name
from nanochat.rl.measure.evals import SPLITS, are_right
from nanochat.rl.measure.scores import pass_at_k, share_of
from nanochat.rl.play.play import Play
from nanochat.rl.records.prompts import generator_prompt
from nanochat.weights import is_sharded, part_of

TOLERANCE = 1e-5  # a weight that is no farther from its start counts as unchanged
DTYPES = {"update_sparsity": torch.float32, "update_sparsity_bf16": torch.bfloat16}


def theory_scores(t: Play) -> dict:
    """The update sparsity of each trained role, and how sampled solutions fare of the one that solves, if one does."""
    found, solver = {}, solver_of(t)
    for name, role in t.roles.items():
        sparsity = update_sparsity(t, role) if role.optimizer is not None else {}
        found |= {f"{short_name(name)}/{key}": value for key, value in sparsity.items()}
    for split, ending in SPLITS.items() if solver else ():
        counts, k = solved(t, solver, split), t.args.theory_samples
        found |= {f"{short_name(solver)}/{key}_{ending}": value for key, value in sampled(counts, k).items()}
    return found


def solver_of(t: Play) -> str | None:
    """The generator where it is trained, else the first trained role that samples after a problem alone."""
    solving = [draw.role for draw in t.draws.values() if not draw.teacher_forced and draw.wrap is generator_prompt]
    return next((name for name in ("generator", *solving) if name in t.roles and t.roles[name].optimizer), None)


def update_sparsity(t: Play, role: Role) -> dict[str, float]:
    """The share of the weights that a role's updates move which are as they were at its start, up to TOLERANCE: as they
    are trained, and rounded to bf16, as models are saved and compared in the literature. There a small step is none."""
    start = weights_in(role.start.path("model.pt"), role.model.config)
    moves = {id(p) for p in role.parameters}
    unchanged = torch.zeros(1 + len(DTYPES), dtype=wide_dtype(t.device), device=t.device)
    for name, p in role.model.named_parameters():
        if id(p) in moves:
            before, now = (part_of(start[name], p), p.to_local()) if is_sharded(p) else (start[name], p)
            pairs = [(before.to(now.device, dtype), now.detach().to(dtype)) for dtype in DTYPES.values()]
            unchanged += torch.stack([torch.tensor(now.numel(), device=t.device),
                                      *(num_unchanged(*pair) for pair in pairs)])
    num, *same = (t.reduce(unchanged) if t.args.shard else unchanged).tolist()
    return {key: value / num for key, value in zip(DTYPES, same, strict=True)}


def num_unchanged(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """How many entries of two tensors of a dtype differ by at most TOLERANCE. -> ()"""
    return ((now.float() - before.float()).abs() <= TOLERANCE).sum()


def solved(t: Play, role: str, split: str) -> list[int]:
    """How many of --theory-samples solutions of each of --log-theory problems are right."""
    n, problems = t.args.theory_samples, t.problems(t.args.log_theory, split)
    outcomes = t.check(t.solve("theory", problems, n, role=role))
    rows = t.gather([outcomes[i: i + n] for i in range(0, len(outcomes), n)])
    right = are_right([outcome for row in rows for outcome in row], split)
    return [sum(right[i: i + n]) for i in range(0, len(right), n)]


def sampled(counts: list[int], num_samples: int) -> dict[str, float | None]:
    """pass@k for each power of two up to the number of samples, and the unbiased variance of a problem's outcomes, both
    as means over problems. counts: right samples of each problem."""
    n = num_samples
    return ({f"pass_at_{k}": share_of([pass_at_k(n, c, k) for c in counts])
             for k in (2 ** i for i in range(n.bit_length()))}
            | {"outcome_variance": share_of([c * (n - c) / (n * (n - 1)) for c in counts])})
