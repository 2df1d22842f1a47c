"""Fixed generator: RL Tango's verifier alone, judging a generator as SFT left it. arXiv 2505.15034, section 4.3.

The verifier is rewarded as in recipe tango. The solutions that it judges never get better.

Departures: 1, 3 and 5 of recipe tango.
"""
from nanochat.recipes.tango import tango
from nanochat.recipes.tango.tango import TABLE, evaluate  # noqa: F401
from nanochat.rl.learn.roles import RoleSpec

STATUS = ("works: on chain step F1 rises by 11.4 ± 6.4 without a step label; on small chain that is not shown "
          "(+0.6 ± 4.5)")
ROLES = {"generator": RoleSpec("--model-tag", trained=False),
         "verifier": RoleSpec("--verifier-tag", "-ver", lr="--verifier-lr", shares="generator")}
SHOWN = {"verifier": ["balanced_acc", "step_f1"]}
add_args, draws, play = tango.add_verifier_args, tango.verifier_draws, tango.verifier_step
