"""DPO: pairs, coefficients, the update against autograd. And the random models with which all recipes are tested."""
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
from nanochat.rl.play.pairs import learn_from_pairs, pair_coefficients
from nanochat.rl.play.play import Play
from nanochat.rl.play.sampling import Sampler
from nanochat.rl.play.updates import apply_update
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


def random_model(vocab_size: int = 265, seed: int = 0) -> GPT:
    """A model in float64 whose every parameter is random."""
    model = GPT(GPTConfig(128, vocab_size, 2, 2, 1, 32, "L"), torch.float64).double()
    draw = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        scale = p.shape[1] ** -0.5 if p.dim() == 2 else 0.5
        p.data = scale * torch.randn(p.shape, generator=draw, dtype=torch.float64)
    return model


def random_play(recipe: str, *flags: str) -> Play:
    """A step of a recipe with random models in float64 and plain SGD with rate 1. A hash of a solution's text says
    whether it is right, wrong or not scorable: random models write random text, so groups hold all three.
    It counts where the text is cut, too, as it hardly ever ends."""
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
    totals = dict.fromkeys(roles, args.num_steps) | getattr(recipe, "updates", lambda args: {})(args)
    t = Play(args, Run("r", CPU, *rank_and_world(), ""), Sampler(task, tokenizer, args.seed), roles,
             recipe.draws(args), totals, RunState(role_steps=dict.fromkeys(roles, 0)), PolicyLoss())

    def check(rollouts):
        rollouts.columns["uncounted"] = [None] * len(rollouts)
        return t.check_texts(rollouts.problems(), rollouts.texts)
    t.check = check
    return t


def drawn_by(t: Play) -> dict:
    """What a step draws from here on, by the names of its draws."""
    drawn, sample = {}, t.sample

    def recorded(draw, *args, **options):
        drawn[draw] = sample(draw, *args, **options)
        return drawn[draw]
    t.sample = recorded
    return drawn


def writing(t: Play, texts: dict[str, list[str]]) -> Play:
    """The play, whose draws of these names give these completions over and over, in place of random ones. t.asked: draw
    -> the prompt of each; t.tools: draw -> the tool that it may call."""
    t.asked, t.tools, drawn = {}, {}, t.sample

    def sample(draw, prompts, num=None, *, role="", tool=None, **more):
        if draw not in texts:
            return drawn(draw, prompts, num, role=role, tool=tool, **more)
        prompts = [prompt for prompt in prompts for _ in range(num or t.draws[draw].num_samples)]
        t.asked[draw], t.tools[draw] = prompts, tool
        given = [texts[draw][n % len(texts[draw])] for n in range(len(prompts))]
        return t.written(role or t.draws[draw].role, prompts, given).with_prompts(prompts)
    t.sample = sample
    return t


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def are_equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def moved_by(t: Play, update, role: str = "generator") -> dict[str, torch.Tensor]:
    """How far an update moves a role's weights back: with SGD at rate 1 its gradient."""
    before = weights_of(t.roles[role].model)
    assert apply_update(t, update)["skipped"] == 0
    return {name: before[name] - after for name, after in weights_of(t.roles[role].model).items()}


def logits_of(model, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Of each of a completion's tokens, from a plain forward over prompt and completion. -> (T, V)"""
    return model.head(model.trunk(torch.tensor([prompt + completion]))[0, len(prompt) - 1: -1]).double()


def logprobs_after(model, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """log pi of a completion's tokens. -> (T,)"""
    logprobs = torch.log_softmax(logits_of(model, prompt, completion), dim=-1)
    return logprobs.gather(1, torch.tensor(completion)[:, None])[:, 0]


def token_logprobs(model, rollouts) -> list[torch.Tensor]:
    """The same of each rollout."""
    return [logprobs_after(model, prompt.ids, completion)
            for prompt, completion in zip(rollouts.prompt_of(), rollouts.completions(), strict=True)]


def log_likelihoods(model, rollouts) -> list[torch.Tensor]:
    """log pi of each whole completion."""
    return [row.sum() for row in token_logprobs(model, rollouts)]


def verdict_odds(t: Play, role: str, rollouts) -> list[torch.Tensor]:
    """log p(T) - log p(F) before each token of each completion, from plain forwards."""
    logits = [logits_of(t.roles[role].model, prompt.ids, completion) / t.args.temperature
              for prompt, completion in zip(rollouts.prompt_of(), rollouts.completions(), strict=True)]
    return [row[:, ord("T")] - row[:, ord("F")] for row in logits]  # the tokenizer is bytewise


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


def assert_learns(t: Play, update, loss: torch.Tensor, tolerance: float = 1e-5) -> None:
    """An update moves its role by the gradient of a loss."""
    expected = gradient_of(loss, t.roles[update.role].model)
    assert_close(moved_by(t, update, update.role), expected, tolerance)


def of_one_and_two_ranks(share, folder) -> list[dict]:
    """What share(folder), a function of a test's module, keeps in the folder: alone, and as either of two ranks."""
    share(str(folder))
    on_two_ranks(share, str(folder))
    return [torch.load(folder / f"{name}.pt", weights_only=True) for name in ("0of1", "0of2", "1of2")]


def keep(t: Play, found: dict, folder: str) -> None:
    torch.save(found, f"{folder}/{t.run.rank}of{t.run.world}.pt")


def test_a_group_gives_as_many_pairs_as_use_no_rollout_twice():
    # Group 7: right 0, 4; wrong 2, 3, 5 -> (0, 2), (4, 3). Group 9: right 1, none wrong.
    # Group 8: right 8, wrong 6, 7 neither.
    outcomes, group_id = [True, True, False, False, True, False, False, None, True], [7, 9, 7, 7, 7, 7, 8, 8, 8]
    assert right_and_wrong(outcomes, group_id) == ([0, 4, 8], [2, 3, 6])
    for outcomes in ([], [True, True], [False, False], [None, True], [None, None]):
        assert right_and_wrong(outcomes, [0] * len(outcomes)) == ([], [])


def test_coefficients_of_a_rollout_in_several_pairs_add_up():
    """Pulls beta sigma(-u): 0.05, 2 * 0.025, 0.05. Rollout 0 is chosen twice, 2 rejected twice, 1 once each."""
    u, weights = torch.tensor([0.0, math.log(3), 0.0]), torch.tensor([1.0, 2.0, 1.0])
    found = pair_coefficients(u, weights, [0, 0, 1], [1, 2, 2], 3, 0.1, torch.ones(3))
    assert found.tolist() == pytest.approx([0.05 + 0.05, -0.05 + 0.05, -0.05 - 0.05], abs=1e-8)


def test_the_update_takes_the_gradient_of_the_papers_loss(base):
    """Sampling, checking, pairing, selecting, scoring and averaging included; policy and reference differ."""
    t = random_play("dpo", "--beta", "0.3")
    update, = recipes.load("dpo").play(t)
    (rollouts, _), = update.parts
    pairs, texts = [], rollouts.texts
    for g in range(len(rollouts.prompts)):
        rows = [n for n in range(len(rollouts)) if rollouts.group_id[n] == g]
        right, wrong = ([n for n in rows if rollouts.columns["outcome"][n] is kind] for kind in (True, False))
        assert len(right) == len(wrong) > 0
        pairs += zip(right, wrong, strict=True)
    assert len(pairs) > len(rollouts.prompts) > 1  # some group has several
    assert all(rollouts.columns["paired_with"][a] == texts[b] for w, l in pairs for a, b in ((w, l), (l, w)))
    assert not rollouts.sampler_logprobs[rollouts.mask].isnan().any()  # the policy drew them
    generator = t.roles["generator"]
    loss = literal_loss(generator.model, generator.reference, rollouts, pairs, 0.3)
    assert t.metrics["gen/pair_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert t.metrics["gen/num_pairs"] == len(pairs)
    assert_learns(t, update, loss)


def test_where_policy_and_reference_agree_the_loss_is_log_2(base):
    t = random_play("dpo")
    t.roles["generator"].reference = t.roles["generator"].model
    update, = recipes.load("dpo").play(t)
    assert t.metrics["gen/pair_loss"] == pytest.approx(math.log(2), rel=1e-12) and t.metrics["gen/margin"] == 0
    assert t.metrics["gen/pair_accuracy"] == 0  # a tie is not ranked rightly
    assert update.parts[0][1].abs().unique().tolist() == pytest.approx([2 * 0.1 / 2])  # 2 rollouts for each pair


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
    keep(t, found | {"num_rollouts": len(update.parts[0][0]), "moved": moved_by(t, update)}, folder)


def test_a_rank_without_pairs_takes_part_in_the_step_of_the_others(base, tmp_path):
    one, first, second = of_one_and_two_ranks(play_share, tmp_path)
    assert one["num_rollouts"] == first["num_rollouts"] > 0 == second["num_rollouts"]
    for found in (first, second):
        assert found["num_pairs"] == one["num_pairs"]
        assert found["pair_loss"] == pytest.approx(one["pair_loss"], rel=1e-6)
        assert_close(found["moved"], one["moved"], 1e-5)


def test_two_equal_completions_count_in_the_mean_and_pull_nothing(base):
    t = random_play("dpo")
    prompts = t.solve_prompts([t.task.problem("rl", 0)] * 4)
    rollouts = t.written("generator", prompts, ["0+1:1;=1", "0+1:2;=2", "0+1:1;=1", "0+1:1;=1"])
    update, = learn_from_pairs(t, "generator", rollouts, [0, 2], [1, 3],
                               t.logprobs("generator", rollouts, reference=True))
    advantages = update.parts[0][1]
    assert not advantages[2:].any() and advantages[:2].any() and t.metrics["gen/frac_equal"] == 0.5
    generator = t.roles["generator"]
    assert_learns(t, update, literal_loss(generator.model, generator.reference, rollouts, [(0, 1), (2, 3)], 0.1))


# Recipe, settings that do not go together, and how they are refused
REFUSED = [
    ("alphaproof", "--curriculum variants", "--curriculum variants: of which theorems"),
    ("alphaproof", "--curriculum variants --task last_letter", "--task last_letter: has no variants, which"),
    ("constitutional_ai", "--task last_letter", "--task last_letter: has no principles, violations, which"),
    *((recipe, "--num-samples 1", "--num-samples 1: must be at least 2, ")
      for recipe in ("constitutional_ai", "dapo", "debate", "dpo", "score", "self_rewarding", "think_rm_policy")),
    ("cooper", "--task last_letter", "--task last_letter: has no corrupt"),
    ("coverrl", "--verifier-head trunk", "--verifier-head trunk: both roles"),
    ("coverrl", "--verifier-optimizer own", "--verifier-optimizer own: one model learns from both roles"),
    ("coverrl", "--num-votes 3", "--num-votes 3: must be at least --num-samples 4"),
    ("dapo", "--overlong-buffer 29", "--overlong-buffer 29: must be at most --max-new-tokens 28"),
    ("debate_judge", "--verifications 1", "--verifications 1: must be at least 2, for a group"),
    *((recipe, f"--combine stratified --advantage {advantage}", "--combine stratified: compares within groups, and")
      for recipe in ("fixed_verifier", "progress_rewards") for advantage in ("reinforce", "reinforce++")),
    ("fixed_verifier", "--combine filtered --credit min", "--credit min: with --combine filtered steps earn nothing"),
    ("gold_steps", "--combine filtered --credit to_go", "--credit to_go: with --combine filtered steps earn nothing"),
    ("tango", "--combine filtered --weigh-by-j", "--weigh-by-j: is a factor on alpha"),
    ("fixed_verifier", "--verifications 2", "--verifications 2: the judge generative reads one here"),
    ("fixed_verifier", "--judge steps", "--judge steps: gives chances, and --step-rewards posterior"),
    ("fixed_verifier", "--judge analysed --step-rewards verdicts --verify-relabelled", "--verify-relabelled: is for"),
    *((recipe, "--task last_letter --verify-relabelled", "--verify-relabelled: nothing can be relabelled in task last")
      for recipe in ("tango", "fixed_verifier", "outcome_verifier")),
    ("fixed_verifier", "--judge pair --judged-samples 1", "--judged-samples 1: the judge pair is shown 2 solutions"),
    ("fixed_verifier", "--judge graded --num-samples 1", "--num-samples 1: the judge graded is shown 2 solutions"),
    ("fixed_verifier", "--judge scores --num-judged 5", "--num-samples 4: the judge scores is shown 5 solutions"),
    ("fixed_verifier", "--judge steps --num-judged 2", "--num-judged 2: the judge steps has no use for it; scores"),
    ("fixed_verifier", "--judge end --prm-aggregate min", "--prm-aggregate min: the judge end has no use"),
    ("fixed_verifier", "--judge tokens --verifications 1", "--verifications 1: the judge tokens has no use"),
    ("marti", "--num-agents 3", "--num-samples 4: must be a multiple of --num-agents 3"),
    ("marti", "--graph chain --num-agents 3", "--num-agents 3: a chain has two"),
    ("magrpo", "--task last_letter", "--task last_letter: has no joint, half_outcomes, agrees, which"),
    ("mars", "--task chain", "--task chain: has no documents, which"),
    ("mars", "--task lookup --calculator", "--calculator: .* one tool"),
    ("mars", "--task lookup --lookup-noise 12 --bin-size 6", "--bin-size 6: .* --most-bins is 4"),  # of any key
    ("mars", "--task lookup --lookup-keys 100 --lookup-noise 3 --bin-size 6", "--bin-size 6: a document has"),
    *((recipe, "--task last_letter", "--task last_letter: has no read_problem, hint_of, refusals, which")
      for recipe in ("medvlsynther", "multi_agent_evolve")),
    *(("ppo", f"--lm-coef 0.1 {flags}", "--lm-coef 0.1: needs --aggregation token and --updates-per-batch 1")
      for flags in ("--aggregation sequence", "--aggregation token --updates-per-batch 2")),
    *(("prime", flags, flags) for flags in ("--accuracy-filter 0.8 0.2", "--advantage grpo")),
    ("prm", "--prm-labels progress --until-first-error", "--until-first-error: with --prm-labels progress"),
    ("prm", "--prm-labels progress --prm-aggregate product", "--prm-aggregate product: with --prm-labels progress"),
    ("progress_rewards", "--best-of 9", "--best-of 9: of --continuations 8"),
    *((recipe, flags, words) for recipe in ("search_r1", "r1_searcher", "ssrl", "ssp") for flags, words in (
        ("--task chain", "--task chain: has no tool"), ("--task lookup --calculator", "--calculator: .* one tool"))),
    *(("self_verify", f"--verifier-head {head}", f"--verifier-head {head}: this recipe is about one model")
      for head in ("own", "frozen", "trunk")),
    ("self_verify", "--verifier-optimizer own", "--verifier-optimizer own: both kinds of steps are updates of one"),
    ("spct", "--num-judged 5", "--num-solutions 4: must be at least --num-judged 5"),
    ("ssp", "--task lookup --least-queries 5 --most-queries 4", "--least-queries 5: more than --most-queries 4"),
    ("think_rm_policy", "--grades graded --choice-weight length", "--choice-weight length: graded choices count by"),
    ("think_rm_policy", "--advantage rloo", "--advantage rloo: the advantages are of differences"),
    ("ttrl", "--num-votes 3", "--num-votes 3: must be at least --num-samples 4")]


@pytest.mark.parametrize("recipe, flags, words", REFUSED)
def test_settings_that_do_not_go_together_are_refused_in_one_line(recipe, flags, words):
    args = parsed(recipe, *flags.split())
    with pytest.raises(BadInput, match=f"^{words}[^\n]*$"):
        recipes.load(recipe).check(args, make_task(args))


@pytest.mark.parametrize("flags", ["--combine filtered", *(f"--combine stratified --advantage {name}"
                                                           for name in ("grpo", "rloo", "dr_grpo"))])
@pytest.mark.parametrize("recipe", ["tango", "gold_steps", "outcome_verifier", "progress_rewards"])
def test_ways_to_combine_that_go_together_are_let_pass(recipe, flags):
    args = parsed(recipe, *flags.split())
    recipes.load(recipe).check(args, make_task(args))
