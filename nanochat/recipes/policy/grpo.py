"""GRPO (Shao et al. 2024): the generator alone, rewarded by its answers; the baseline of all others. arXiv 2402.03300.

A right solution earns 1, a wrong one 0. The advantage is the reward less the mean over the problem's solutions, divided
by their standard deviation. --advantage names its relatives: rloo (Ahmadian et al. 2024), dr_grpo with --aggregation
constant (Liu et al. 2025), reinforce++ (Hu 2025).

Departures:
1. The reward is the task's check of the answer. The paper trains a reward model.
2. --kl-coef is 1e-3, not 0.04.
"""
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import pass_at_1
from nanochat.rl.measure.observe import observe
from nanochat.rl.play.play import Draw, Update

STATUS = "works: the baseline; sampled pass@1 of SmolLM2-135M rises by 4.9 ± 1.3 in twelve steps"
ROLES = {"generator": RoleSpec("--model-tag")}
evaluate = pass_at_1


def draws(args):
    return {"solutions": Draw("generator", args.examples_per_step, args.num_samples, args.max_new_tokens, trained=True)}


def play(t):
    solutions = t.solve("solutions", t.problems())       # a group of each problem
    rewards = t.rewards(solutions)                       # by the gold answer
    advantages = t.advantages(solutions, rewards)        # less the group's mean, over its standard deviation
    observe(t, "generator", solutions, rewards, advantages)
    yield Update("generator", [(solutions, advantages)])
