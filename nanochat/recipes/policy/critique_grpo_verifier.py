"""Critique-GRPO with a verifier (Zhang et al. 2025): a generative verifier's text is the critique. arXiv 2506.03106.

The verifier is RL Tango's, as its SFT left it. Departures beside those of recipe critique_grpo: it sees no gold
solution, as GPT-4o does in the paper, and it also judges right solutions, about which the paper's rule speaks.
"""
from nanochat.cli import at_least
from nanochat.recipes.policy import critique_grpo
from nanochat.recipes.policy.critique_grpo import SHOWN, check, evaluate  # noqa: F401
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.observe import gathered_verdict_scores
from nanochat.rl.play.play import Draw
from nanochat.rl.records.prompts import empty_verifier_prompt

STATUS = "runs: 20.4 ± 10.3 below GRPO at its tokens, and no gain at equal steps is shown"
ROLES = critique_grpo.ROLES | {"verifier": RoleSpec("--verifier-tag", "-ver", trained=False)}


def add_args(group):
    critique_grpo.add_refinement_args(group)
    group.add_argument("--verifier-max-new-tokens", type=at_least(1), default=112)


def draws(args):
    num_solutions = args.examples_per_step * args.num_samples
    return critique_grpo.draws(args, critique_tokens=args.verifier_max_new_tokens) | {
        "critiques": Draw("verifier", num_solutions, 1, args.verifier_max_new_tokens, wrap=empty_verifier_prompt,
                          quoted=args.max_new_tokens)}


def by_verifier(t, solutions, outcomes):
    """The text of a verification of each solution."""
    verifications = t.read_verifications(t.verify("critiques", solutions))
    scores = gathered_verdict_scores(t, solutions, outcomes, verifications)
    t.log("generator", {f"critiques/{name}": value for name, value in scores.items()})
    return [v.text for v in verifications]


def play(t):
    yield from critique_grpo.play(t, by_verifier)
