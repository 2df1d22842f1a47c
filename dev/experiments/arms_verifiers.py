"""
The comparison of verifiers as data: what each is trained on, how it is read, and the flags of every process.

A verifier is trained once per seed, judges the same solutions as the others, and then rewards a generator from the same
start. run.py runs it.
"""
from typing import NamedTuple

from dev.experiments.arms import TASKS, Experiment, Setting, Setup, Start, starts_of

TASK = "small_chain"
STEPS = 60  # of the generator that a verifier rewards
NAME = "verifiers"
COMMON = f"--seed {{seed}} --device-type cpu {TASKS[TASK].problems}"
NUM_LABELLED = "--first 1000000 --num-problems 600 --num-samples 4"  # problems that no run of RL gets to
LABELS = {  # methods of label_steps; all label the same solutions
    "gold": "--method gold",
    "shepherd": "--method math_shepherd_soft --num-completions 8",
    "omega": "--method omega_prm --num-completions 8",
    "rpe": "--method rpe --num-completions 8",
    "pav": "--method pav --num-completions 8 --best-of 4",
    "omega_strong": "--method omega_prm --num-completions 8",
    "gold_strong": "--method gold",
}
# labels of completions, and gold labels of solutions, that are sampled by the generator that gold labels have rewarded
STRONG = "_strong"
SUPERVISED = "--num-steps 300 --examples-per-step 32 --lr 5e-4 --kl-coef 0"
# Also of those that learn as SFT, but from texts of their own: at 5e-4 they fell apart.
RL_JUDGE = "--num-steps 80 --kl-coef 0 --lr 1e-4"
RL_PAIRS = "--num-steps 80 --examples-per-step 32 --num-solutions 8 --eval-examples 300 --kl-coef 0 --lr 1e-4"
LONG = "--verifier-max-new-tokens 192"
OF_SEVERAL = {"preferred": "", "pair": LONG, "solve_pair": LONG, "scores": LONG}  # judges of several solutions
ALPHA = "--kl-coef 0 --alpha-start 0.3 --alpha-end 0.03"
REWARD = f"{ALPHA} --combine rewards --credit to_go --negative-weight 1"
NOW = "_own_step"  # arms whose rewards move their own steps' tokens, with wrong answers that weigh .1, as the defaults
REWARD_NOW = f"{ALPHA} --combine advantages --credit own_step --negative-weight 0.1"
OWN = {  # flags of the arms that are not a generator which a fixed verifier rewards by REWARD
    "grpo": "--recipe grpo --kl-coef 0",
    "grpo_tenth": "--recipe grpo --kl-coef 0 --negative-weight 0.1",
    "oracle": f"--recipe gold_steps {REWARD}",
    "think_rm_policy": "--recipe think_rm_policy --kl-coef 0 --verifier-tag {train_think_rm}-ver "
                       f"--verifier-source rl {LONG}",
    "supervisor": f"--recipe supervisor {SUPERVISED} --lr 1e-4 --eval-every 100 --model-tag {{oracle}}-gen "
                  "--model-source rl --supervisor-tag {gen} --labels {gold_strong} --judged-samples 8",
}


class Verifier(NamedTuple):
    """judge: how it is read (verify.judges), "" for the rewards that need none; start: the SFT that it begins from;
    recipe: flags of its training, "" = none; labels: of what it is trained on."""
    words: str
    judge: str = ""
    start: str = "ver"
    recipe: str = ""
    labels: str = ""


VERIFIERS = {
    "grpo": Verifier("none: GRPO"),
    "grpo_tenth": Verifier("none: GRPO, wrong answers weigh .1"),
    "oracle": Verifier("gold step labels"),
    "sft": Verifier("generative, SFT", "analysed"),
    "tango": Verifier("generative, RL on outcomes (Tango)", "analysed",
                      recipe=f"--recipe fixed_generator {RL_JUDGE} --verifier-balance --verifier-replay 0.5"),
    "genprm": Verifier("generative, own analyses that agree with gold (GenPRM)", "analysed",
                       recipe=f"--recipe genprm {RL_JUDGE} --examples-per-step 32", labels="gold"),
    "genrm": Verifier("verdict as next token, outcomes (GenRM)", "verdict", recipe=f"--recipe genrm {SUPERVISED}",
                      labels="gold"),
    "orm": Verifier("at the end, outcomes (ORM)", "end", "gen", f"--recipe orm {SUPERVISED}", "gold"),
    "orm_tokens": Verifier("at every token, outcomes (Cobbe)", "tokens", "gen",
                           f"--recipe orm --orm-places tokens {SUPERVISED}", "gold"),
    "prm_gold": Verifier("after steps, gold labels (PRM)", "steps", "gen", f"--recipe prm {SUPERVISED}", "gold"),
    "prm_shepherd": Verifier("after steps, completions (Math-Shepherd)", "steps", "gen",
                             f"--recipe prm {SUPERVISED}", "shepherd"),
    "prm_omega": Verifier("up to the first error, found by search (OmegaPRM)", "steps", "gen",
                          f"--recipe prm --until-first-error {SUPERVISED}", "omega"),
    "prm_strong": Verifier("the same, found with completions of the oracle's generator", "steps", "gen",
                           f"--recipe prm --until-first-error {SUPERVISED}", "omega_strong"),
    "prm_pav": Verifier("after steps, progress under a prover (PAV)", "steps", "gen",
                        f"--recipe prm --prm-labels progress {SUPERVISED}", "pav"),
    "genprm_rpe": Verifier("generative, own analyses that agree with relative progress (GenPRM)", "analysed",
                           recipe=f"--recipe genprm {RL_JUDGE} --examples-per-step 32", labels="rpe"),
    "critic_rm": Verifier("own critiques, then a score of pairs (Critic-RM)", "analysed",
                          recipe=f"--recipe critic_rm {RL_JUDGE}", labels="gold"),
    "gram": Verifier("pairs, choice at once (GRAM)", "preferred", "pair", f"--recipe gram {SUPERVISED}", "gold"),
    "think_rm": Verifier("pairs, both worked again, RL (Think-RM)", "pair", "pair", f"--recipe think_rm {RL_PAIRS}"),
    "rm_r1": Verifier("pairs, solves first, RL (RM-R1)", "solve_pair", "solve_pair", f"--recipe rm_r1 {RL_PAIRS}"),
    "spct": Verifier("scores of two, RL (SPCT)", "scores", "scores", f"--recipe spct {RL_PAIRS} --kl-coef 0.08"),
    "think_rm_policy": Verifier("no rewards: choices of think_rm between all pairs (Think-RM's policy)", "pair"),
    "supervisor": Verifier("gains of the answer's log-probability, no reward (Ton et al.)"),
    **{f"{name}{NOW}": Verifier(f"{name}, its rewards at their own steps, wrong answers weigh .1")
       for name in ("sft", "genprm", "prm_gold", "prm_pav")},
}


def label_flags(labels: str) -> str:
    """Flags of label_steps. Gold labels come with the solutions, which the others label."""
    by = "{oracle}-gen --generator-source rl" if labels.endswith(STRONG) else "{gen}"
    which = NUM_LABELLED if labels.startswith("gold") else "--solutions {gold}"
    return f"--generator-tag {by} {COMMON} {LABELS[labels]} {which} --out {{tag}}"


def training_flags(v: Verifier) -> str:
    """Flags of the run that trains a verifier."""
    given = f"--labels {{{v.labels}}}" if v.labels else ""
    given += " --judged-samples 8" if v.labels and v.judge not in OF_SEVERAL else ""
    return (f"--model-tag {{gen}} {COMMON} --verifier-tag {{{v.start}}} --eval-examples 100 --examples-per-step 16 "
            f"{v.recipe} {given}")


def reward_flags(name: str) -> str:
    """Flags of the run in which a verifier rewards a generator, or of an arm of OWN."""
    as_reward, name = REWARD_NOW if name.endswith(NOW) else REWARD, name.removesuffix(NOW)
    v, common = VERIFIERS[name], f"--model-tag {{gen}} {COMMON} {TASKS[TASK].rl} --num-steps {STEPS} --eval-every 20"
    if name in OWN:
        return f"{common} {OWN[name]}"
    trained = f"{{train_{name}}}-ver --verifier-source rl {OF_SEVERAL.get(v.judge, '')}"
    return (f"{common} --recipe fixed_verifier --judge {v.judge} --step-rewards verdicts {as_reward} "
            f"--verifier-tag {trained if v.recipe else f'{{{v.start}}}'} --judged-samples 8")


def experiment(names: list[str]) -> Experiment:
    """The runs that these verifiers reward. What they start from: SFTs, labels, and runs that train a verifier, or a
    generator whose completions label."""
    starts = starts_of(Setup(NAME, TASK, "sft", STEPS, Setting()))
    starts |= {labels: Start("labels", f"{TASK}-{labels}-s{{seed}}", label_flags(labels)) for labels in LABELS}
    starts |= {f"train_{name}": Start("run", f"{NAME}-train_{name}-s{{seed}}", training_flags(v))
               for name, v in VERIFIERS.items() if v.recipe}
    starts["oracle"] = Start("run", f"{NAME}-oracle-s{{seed}}", reward_flags("oracle"))
    return Experiment(NAME, starts, {name: reward_flags(name) for name in names})
