"""
Critique-GRPO: the chosen refinement, its shaped coefficients, what the update sees, and runs from end to end.

    python -m pytest tests/test_critique_grpo.py -q
"""
import copy
import json
import statistics
import zlib

import pytest
import torch
from conftest import TASK_FLAGS

from nanochat.common import BadInput
from nanochat.gpt import GPT, GPTConfig
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.kernels.losses import PolicyLoss
from nanochat.recipes.policy import critique_grpo
from nanochat.recipes.policy.critique_grpo import CRITIQUES, first_best, shaped
from nanochat.rl.credit.aggregation import AGGREGATIONS
from nanochat.rl.learn.packing import pack
from nanochat.rl.learn.roles import Role
from nanochat.rl.learn.trainer import update
from nanochat.rl.play.play import Play
from nanochat.rl.records.prompts import Prompt, generator_prompt
from nanochat.rl.records.rollouts import Rollouts
from nanochat.rl.run import steps
from scripts import tango_rl
from tasks import make_task
from tasks.chain import Chain
from tasks.common import Problem

FLAGS = [*TASK_FLAGS, "--device-type", "cpu", "--model-tag", "tiny", "--max-new-tokens", "28", "--save-every", "0",
         "--examples-per-step", "4", "--num-samples", "4", "--eval-examples", "8", "--lr", "1e-3",
         "--temperature", "2"]  # second attempts that differ: SFT has shown the model no such prompt
C = 0.1


# Helpers, also of test_score_recipe

def parsed(*flags: str):
    return tango_rl.make_parser([*FLAGS, *flags]).parse_args([*FLAGS, *flags])


def train(*flags: str) -> None:
    tango_rl.main(parsed("--run", "r", *flags))


def records(base) -> list[dict]:
    return [json.loads(line) for line in (base / "runs" / "r" / "metrics.jsonl").read_text().splitlines()]


def moved(base, tag: str, role: str) -> bool:
    """Whether a role of a run of two steps is no longer its SFT checkpoint."""
    before = torch.load(base / "chatsft_checkpoints" / tag / "model_000200.pt", weights_only=True)
    after = torch.load(base / "chatrl_checkpoints" / f"r-{role}" / "model_000002.pt", weights_only=True)
    return not all(torch.allclose(before[name].float(), after[name].float()) for name in before)


def watched(monkeypatch) -> tuple[list, list[dict[str, Rollouts]]]:
    """What a run yields and draws, filled in while it goes: per step (update, logprobs of its parts before it, logprobs
    under the starting weights or None), and per step the rollouts by draw."""
    updates, drawn = [], []
    apply, sample = steps.apply_update, Play.sample

    def watched_apply(t, wanted):
        now = [t.logprobs("generator", rollouts) for rollouts, _ in wanted.parts]
        start = None
        if t.roles["generator"].reference is not None:
            start = [t.logprobs("generator", rollouts, reference=True) for rollouts, _ in wanted.parts]
        updates.append((wanted, now, start))
        return apply(t, wanted)

    def watched_sample(t, draw, *args, **options):
        rollouts = sample(t, draw, *args, **options)
        if not t.evaluating:
            drawn.extend({} for _ in range(t.step + 1 - len(drawn)))
            drawn[t.step][draw] = copy.deepcopy(rollouts)
        return rollouts

    monkeypatch.setattr(steps, "apply_update", watched_apply)
    monkeypatch.setattr(Play, "sample", watched_sample)
    return updates, drawn


def by_text(solution: str) -> bool | None:
    """An outcome that a model need not learn to reach: half of all texts are right, a few cannot be scored."""
    kind = zlib.crc32(solution.encode()) % 16
    return None if kind == 0 else kind > 8


def tiny_model(seed: int = 0) -> GPT:
    """A random model in float64."""
    model = GPT(GPTConfig(128, 265, 2, 2, 1, 48, "L"), torch.float64).double()
    draw = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        scale = p.shape[1] ** -0.5 if p.dim() == 2 else 0.5
        p.data = scale * torch.randn(p.shape, generator=draw, dtype=torch.float64)
    return model


def random_rollouts(prompt_lengths: list[int], lengths: list[int], seed: int = 0) -> Rollouts:
    """As many completions of these lengths after each random prompt."""
    draw = torch.Generator().manual_seed(seed)
    prompts = [Prompt(torch.randint(265, (n,), generator=draw).tolist()) for n in prompt_lengths]
    lengths = torch.tensor(lengths)
    N, T = len(lengths), int(lengths.max())
    group_id = torch.arange(len(prompts)).repeat_interleave(N // len(prompts))
    return Rollouts(prompts, group_id, torch.randint(265, (N, T), generator=draw), torch.zeros(N, T), lengths,
                    torch.ones(N, dtype=torch.bool))


def plain_logprobs(model, rollouts: Rollouts) -> list[torch.Tensor]:
    """Logprobs of each rollout's tokens from a forward over its prompt and completion, with gradient."""
    rows = []
    for prompt, completion in zip(rollouts.prompt_of(), rollouts.completions(), strict=True):
        hidden = model.trunk(torch.tensor([prompt.ids + completion]))[0, len(prompt.ids) - 1: -1]
        rows.append(torch.log_softmax(model.head(hidden), dim=-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
    return rows


def padded(rows: list[torch.Tensor], width: int) -> torch.Tensor:
    return torch.stack([torch.nn.functional.pad(row.detach(), (0, width - len(row))) for row in rows])


def update_gradient(model, parts: list, aggregation: str) -> list[torch.Tensor]:
    """The gradient that one update takes on parts: how far plain SGD of rate 1 moves the weights back."""
    moved = copy.deepcopy(model)
    lengths = torch.cat([rollouts.lengths for rollouts, _ in parts])
    batches = []
    for rollouts, advantages in parts:
        weights = AGGREGATIONS[aggregation](rollouts.lengths.double(), float(lengths.sum()), float(len(lengths)), 20)
        batches += pack(rollouts, advantages, weights, 10 ** 9, keep_idle=False)
    parameters = list(moved.parameters())
    role = Role("generator", moved, parameters, torch.optim.SGD(parameters, lr=1.0))
    cpu = torch.device("cpu")
    update(role, batches, PolicyLoss("reinforce"), lr=1.0, max_grad_norm=0.0, temperature=1.0, device=cpu)
    return [old.detach() - new.detach() for old, new in zip(model.parameters(), parameters, strict=True)]


def assert_close(found: list[torch.Tensor], expected, tolerance: float) -> None:
    """Equal up to `tolerance` of the largest entry."""
    scale = max(float(x.abs().max()) for x in expected)
    assert scale > 1e-6
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) <= tolerance * scale


# The formulas

def test_the_first_right_refinement_is_chosen_else_a_wrong_one_else_the_first():
    assert first_best([False, True, True, None], 4) == [1]
    assert first_best([None, False, False, None], 4) == [1]
    assert first_best([None, None], 2) == [0]
    assert first_best([False, False, True, False, None, True], 2) == [0, 2, 5]  # groups of two


def test_shaped_coefficients_by_hand():
    A, probs = torch.tensor(2.0), torch.tensor([0.1, 1.0, 0.5, 1e-8])
    # at pi = c: 2 * .1 * .1 / .2^2 = 2 / 4; at 1: 2 * .1 / 1.1^2; at .5: 2 * .1 * .5 / .6^2; far below c: 2 * pi / c
    expected = torch.tensor([0.5, 0.2 / 1.21, 0.1 / 0.36, 2e-7])
    torch.testing.assert_close(shaped(A, probs.log(), C), expected, rtol=1e-5, atol=0)


def test_a_token_of_probability_c_moves_the_most():
    probs = torch.linspace(0.001, 1, 1000, dtype=torch.float64)  # .001, .002, ...
    coefficients = shaped(torch.ones(()), probs.log(), C)
    assert probs[coefficients.argmax()].item() == pytest.approx(C) and coefficients.max().item() == pytest.approx(0.25)
    assert torch.equal(shaped(-torch.ones(()), probs.log(), C), -coefficients)


def test_shaped_coefficients_are_the_gradient_of_the_papers_loss():
    logprobs = torch.linspace(-12, 0, 25, dtype=torch.float64, requires_grad=True)
    probs = logprobs.exp()
    (-0.7 * probs / (probs + C)).sum().backward()  # the loss of a refined token is -A f(pi)
    coefficients = shaped(torch.tensor(0.7), logprobs.detach(), C)
    torch.testing.assert_close(-coefficients, logprobs.grad, rtol=1e-6, atol=0)


def test_one_update_is_the_gradient_of_the_mixed_loss():
    """-A ratio on sampled tokens, -A pi / (pi + c) on the refinement's; by autograd and by finite differences."""
    model, rollouts = tiny_model(), random_rollouts([7], [5, 3, 6, 2])
    A, T = torch.tensor([[1.5], [-0.5], [-0.7], [0.3]]).double(), 6
    old = padded(plain_logprobs(model, rollouts), T)

    def loss(model):
        rows = plain_logprobs(model, rollouts)
        ratios = [(row - o[: len(row)]).exp() for row, o in zip(rows, old, strict=True)]
        refined = rows[0].exp() / (rows[0].exp() + C)
        means = [-(a * x).mean() for a, x in zip(A, [refined, *ratios[1:]], strict=True)]  # over a rollout's tokens
        return sum(means) / 4

    coefficients = A.expand(-1, T).clone()
    coefficients[0] = shaped(A[0], old[0], C)
    found = update_gradient(model, [(rollouts, coefficients)], "sequence")
    assert_close(found, torch.autograd.grad(loss(model), list(model.parameters())), 1e-5)
    draw = torch.Generator().manual_seed(3)
    direction = [torch.randn(p.shape, generator=draw, dtype=torch.float64) for p in model.parameters()]
    values = []
    for sign in (1, -1):
        shifted = copy.deepcopy(model)
        with torch.no_grad():
            for p, d in zip(shifted.parameters(), direction, strict=True):
                p += sign * 1e-4 * d  # logits are fp32: a smaller step drowns in rounding
            values.append(float(loss(shifted)))
    slope = sum(float((g * d).sum()) for g, d in zip(found, direction, strict=True))
    assert abs(slope) > 1e-3 and (values[0] - values[1]) / 2e-4 == pytest.approx(slope, rel=5e-3)


@pytest.mark.parametrize("kind, solution, critique", [
    ("simple", "1+1:2;2*2:1;=21", "T"), ("simple", "1+1:2;=2", "F"), ("simple_gt", "1+1:2;2*2:1;=21", "T=21"),
    ("simple_gt", "nonsense", "F=21"), ("steps", "1+1:2;2*2:1;=21", "T"), ("steps", "1+1:2;2*2:0;=20", "2F"),
    ("steps", "1+1:0;0*2:0;=00", "1F"), ("steps", "1+1:2;2*2:1;=22", "F"), ("steps", "", "F"),
])
def test_critiques_of_solutions(kind, solution, critique):
    """1+1*2 from left to right modulo 3: 1+1 = 2, 2*2 = 1, so the answer of all results is 21."""
    task = make_task(parsed("--chain-answer", "all"))
    problem = Problem("rl", 0, "1+1*2", "21")
    assert CRITIQUES[kind](task, problem, solution, task.check(problem, solution)) == critique


@pytest.mark.parametrize("flags", [["--critique", "rude"], ["--shaping", "0"], ["--shaping", "nan"],
                                   ["--updates-per-batch", "2"]])
def test_settings_that_cannot_work_are_refused(flags):
    args = parsed("--recipe", "critique_grpo", *flags)
    with pytest.raises(BadInput, match=flags[0]):
        critique_grpo.check(args, make_task(args))


# Runs

def test_the_update_sees_the_refinement_after_the_problem_alone(base, monkeypatch):
    """Refinements take the first slots, no token of a critique's prompt is trained, and the coefficients are shaped."""
    monkeypatch.setattr(Chain, "check", lambda self, problem, solution: by_text(solution))
    updates, drawn = watched(monkeypatch)
    train("--recipe", "critique_grpo", "--num-steps", "2", "--kl-coef", "0")
    num_shaped = 0
    for (wanted, (logprobs,), _), draws in zip(updates, drawn, strict=True):
        solutions, refined, (mixed, coefficients) = draws["solutions"], draws["refined"], wanted.parts[0]
        task, tokenizer = make_task(parsed()), load_tokenizer(str(base / "tokenizer"))
        assert len(wanted.parts) == 1 and len(mixed) == len(solutions) == len(refined) == 16
        for n, prompt in enumerate(refined.prompt_of()):  # what a refinement was asked
            problem, first = prompt.problem, solutions.texts[n]
            mark = {True: "T=", False: "F=", None: ""}[by_text(first)]
            said = mark + problem.answer if mark else ""
            assert prompt.ids == tokenizer.render_prompt(f"{first}|{said}|{problem.prompt}")
        for i in range(0, 16, 4):
            outcomes = [by_text(text) for text in refined.texts[i: i + 4]]
            order = [n for kind in (True, False, None) for n in range(4) if outcomes[n] is kind]
            assert mixed.texts[i: i + 4] == [refined.texts[i + order[0]], *solutions.texts[i + 1: i + 4]]
            assert len(set(mixed.group_id[i: i + 4].tolist())) == 1
            kept = [by_text(text) for text in mixed.texts[i: i + 4]]
            known = [float(o) for o in kept if o is not None]
            scale = statistics.stdev(known) + 1e-6 if len(set(known)) > 1 else None
            for g, outcome in enumerate(kept):
                n, length = i + g, int(mixed.lengths[i + g])
                assert mixed.prompt_of()[n].ids == generator_prompt(tokenizer, task.fmt, mixed.problems()[n].prompt)
                drawn_here = ~mixed.sampler_logprobs[n, :length].isnan()
                assert bool(drawn_here.any()) == bool(drawn_here.all()) == (g > 0)
                A = 0.0 if scale is None or outcome is None else (outcome - statistics.mean(known)) / scale
                probs = logprobs[n, :length].exp()
                expected = torch.full((length,), A) if g else A * C * probs / (probs + C) ** 2
                torch.testing.assert_close(coefficients[n, :length], expected, rtol=1e-3, atol=1e-5)
                num_shaped += int(g == 0 and A != 0)
    assert num_shaped >= 2 and wanted.loss == PolicyLoss("reinforce")


@pytest.mark.parametrize("outcome, replaced", [(False, 0.0), (True, 1.0)])
def test_wrong_refinements_can_be_kept_out(base, monkeypatch, outcome, replaced):
    monkeypatch.setattr(Chain, "check", lambda self, problem, solution: outcome)
    updates, drawn = watched(monkeypatch)
    train("--recipe", "critique_grpo", "--num-steps", "1", "--right-refinements-only", "--critique", "steps")
    record, (mixed, coefficients) = records(base)[0], updates[0][0].parts[0]
    assert record["gen/refined/replaced"] == replaced and record["gen/refined/frac_reward_zero_std"] == 1
    assert bool((coefficients == 0).all())
    first = drawn[0]["refined" if replaced else "solutions"]
    assert mixed.texts[::4] == first.texts[::4]


def test_what_is_logged_agrees_with_what_was_drawn(base, monkeypatch):
    monkeypatch.setattr(Chain, "check", lambda self, problem, solution: by_text(solution))
    _, drawn = watched(monkeypatch)
    train("--recipe", "critique_grpo", "--num-steps", "1")
    old, new = ([by_text(text) for text in drawn[0][draw].texts] for draw in ("solutions", "refined"))
    mean = lambda values: pytest.approx(statistics.mean([v for v in values if v is not None]))
    record = records(base)[0]
    assert record["gen/reward"] == mean(old) and record["gen/refined/accuracy"] == mean(new)
    assert record["gen/refined/accuracy_of_wrong"] == mean([b for a, b in zip(old, new, strict=True) if a is False])
    assert record["gen/unscorable"] == old.count(None) / 16 and record["gen/refined/replaced"] == 1
    hopeless = [i for i in range(0, 16, 4) if True not in old[i: i + 4]]
    rescued = [True in new[i: i + 4] for i in hopeless]
    assert record["gen/refined/rescued"] == (sum(rescued) / len(rescued) if rescued else None)


def test_with_a_verifier_its_text_is_the_critique_and_only_the_generator_moves(base, monkeypatch):
    updates, drawn = watched(monkeypatch)
    train("--recipe", "critique_grpo_verifier", "--num-steps", "2", "--verifier-max-new-tokens", "36")
    tokenizer = load_tokenizer(str(base / "tokenizer"))
    for draws in drawn:
        rows = zip(draws["refined"].prompt_of(), draws["solutions"].texts, draws["critiques"].texts, strict=True)
        for prompt, first, critique in rows:
            assert prompt.ids == tokenizer.render_prompt(f"{first}|{critique}|{prompt.problem.prompt}")
    assert [wanted.role for wanted, _, _ in updates] == ["generator"] * 2
    assert moved(base, "tiny", "gen") and not moved(base, "tiny-ver", "ver")
    assert not list((base / "chatrl_checkpoints" / "r-ver").glob("optim*"))
    assert "gen/critiques/balanced_acc" in records(base)[0]
