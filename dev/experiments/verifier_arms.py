"""
The comparison of verifiers as data: what each is trained on, how it is read, and the flags of every process.

A verifier is trained once per seed, judges the same solutions as the others, and then rewards a generator from the same
start. dev/experiments/run_verifiers.py runs it.
"""
from dataclasses import dataclass

from dev.experiments.arms import TASKS, Experiment, Setting, sft

TASK = "small_chain"
STEPS = 60  # of the generator that a verifier rewards
E = Experiment("verifiers", TASK, "sft", STEPS, Setting())
NUM_LABELLED = "--first 1000000 --num-problems 600 --num-samples 4"  # problems that no run of RL gets to
LABELS = {  # methods of label_steps; all label the same solutions
    "gold": "--method gold",
    "shepherd": "--method math_shepherd_soft --num-completions 8",
    "omega": "--method omega_prm --num-completions 8",
    "rpe": "--method rpe --num-completions 8",
    "pav": "--method pav --num-completions 8 --best-of 4",
    "omega_strong": "--method omega_prm --num-completions 8",
}
STRONG = "_strong"  # labels whose completions are sampled by the generator that gold labels have rewarded
SUPERVISED = "--num-steps 300 --examples-per-step 32 --lr 5e-4 --kl-coef 0"
# Also of those that learn as SFT, but from texts of their own: at 5e-4 they fell apart.
RL_JUDGE = "--num-steps 80 --kl-coef 0 --lr 1e-4"
RL_PAIRS = "--num-steps 80 --examples-per-step 32 --num-solutions 8 --eval-examples 300 --kl-coef 0 --lr 1e-4"
LONG = "--verifier-max-new-tokens 192"
OF_SEVERAL = {"preferred": "", "pair": LONG, "solve_pair": LONG, "scores": LONG}  # judges of several solutions
REWARD = "--kl-coef 0 --alpha-start 0.3 --alpha-end 0.03 --combine rewards"


@dataclass(frozen=True)
class Verifier:
    """judge: how it is read (verify.judges), "" for the rewards that need none; start: whose SFT checkpoint it begins
    from, or the form of verifications that its SFT taught; recipe: flags of its training, "" = none; labels: of what
    it is trained on."""
    words: str
    judge: str = ""
    start: str = "verifier"
    recipe: str = ""
    labels: str = ""


VERIFIERS = {
    "grpo": Verifier("none: GRPO"),
    "oracle": Verifier("gold step labels"),
    "sft": Verifier("generative, SFT", "analysed"),
    "tango": Verifier("generative, RL on outcomes (Tango)", "analysed",
                      recipe=f"--recipe fixed_generator {RL_JUDGE} --verifier-balance --verifier-replay 0.5"),
    "genprm": Verifier("generative, own analyses that agree with gold (GenPRM)", "analysed",
                       recipe=f"--recipe genprm {RL_JUDGE} --examples-per-step 32", labels="gold"),
    "genrm": Verifier("verdict as next token, outcomes (GenRM)", "verdict", recipe=f"--recipe genrm {SUPERVISED}",
                      labels="gold"),
    "orm": Verifier("at the end, outcomes (ORM)", "end", "generator", f"--recipe orm {SUPERVISED}", "gold"),
    "orm_tokens": Verifier("at every token, outcomes (Cobbe)", "tokens", "generator",
                           f"--recipe orm --orm-places tokens {SUPERVISED}", "gold"),
    "prm_gold": Verifier("behind steps, gold labels (PRM)", "steps", "generator", f"--recipe prm {SUPERVISED}", "gold"),
    "prm_shepherd": Verifier("behind steps, completions (Math-Shepherd)", "steps", "generator",
                             f"--recipe prm {SUPERVISED}", "shepherd"),
    "prm_omega": Verifier("up to the first error, found by search (OmegaPRM)", "steps", "generator",
                          f"--recipe prm --until-first-error {SUPERVISED}", "omega"),
    "prm_strong": Verifier("the same, found with completions of the oracle's generator", "steps", "generator",
                           f"--recipe prm --until-first-error {SUPERVISED}", "omega_strong"),
    "prm_pav": Verifier("behind steps, progress under a prover (PAV)", "steps", "generator",
                        f"--recipe prm --prm-labels progress {SUPERVISED}", "pav"),
    "genprm_rpe": Verifier("generative, own analyses that agree with relative progress (GenPRM)", "analysed",
                           recipe=f"--recipe genprm {RL_JUDGE} --examples-per-step 32", labels="rpe"),
    "critic_rm": Verifier("own critiques, then a score of pairs (Critic-RM)", "analysed",
                          recipe=f"--recipe critic_rm {RL_JUDGE}", labels="gold"),
    "gram": Verifier("pairs, choice at once (GRAM)", "preferred", "pair", f"--recipe gram {SUPERVISED}", "gold"),
    "think_rm": Verifier("pairs, both worked again, RL (Think-RM)", "pair", "pair", f"--recipe think_rm {RL_PAIRS}"),
    "rm_r1": Verifier("pairs, solves first, RL (RM-R1)", "solve_pair", "solve_pair", f"--recipe rm_r1 {RL_PAIRS}"),
    "spct": Verifier("scores of two, RL (SPCT)", "scores", "scores", f"--recipe spct {RL_PAIRS} --kl-coef 0.08"),
}


def kind_of(start: str) -> str:
    """The SFT that a start names, as dev/experiments/arms.py has it."""
    return {"generator": "sft", "verifier": "fixed_verifier"}.get(start, start)


def tag_of(seed: str, start: str) -> str:
    """The tag of an SFT checkpoint."""
    return sft(E, seed, kind_of(start))[0]


def reward_name(seed: str, name: str) -> str:
    """The name of the run in which a verifier rewards a generator."""
    return f"{E.name}-{name}-s{seed}"


def common_flags(seed: str) -> str:
    task = TASKS[TASK]
    return f"--model-tag {tag_of(seed, 'generator')} --seed {seed} --device-type cpu {task.problems}"


def label_flags(seed: str, labels: str, solutions: str, out: str) -> str:
    """Flags of label_steps. solutions: the file whose solutions are labelled, "" samples them."""
    which = f"--solutions {solutions}" if solutions else NUM_LABELLED
    strong = f"{reward_name(seed, 'oracle')}-gen --generator-source rl"
    return (f"--generator-tag {strong if labels.endswith(STRONG) else tag_of(seed, 'generator')} --seed {seed} "
            f"--device-type cpu {TASKS[TASK].problems} {LABELS[labels]} {which} --out {out}")


def training_flags(seed: str, name: str, labels: str) -> str:
    """Flags of the run that trains a verifier. labels: the file."""
    v = VERIFIERS[name]
    given = f"--labels {labels}" if v.labels else ""
    given += " --judged-samples 8" if v.labels and v.judge not in OF_SEVERAL else ""
    return (f"{common_flags(seed)} --verifier-tag {tag_of(seed, v.start)} --eval-examples 100 --examples-per-step 16 "
            f"{v.recipe} {given}")


def reward_flags(seed: str, name: str, trained: str) -> str:
    """Flags of the run in which a verifier rewards a generator. trained: the tag of its RL checkpoint."""
    v, task = VERIFIERS[name], TASKS[TASK]
    common = f"{common_flags(seed)} {task.rl} --num-steps {STEPS} --eval-every 20"
    if name == "grpo":
        return f"{common} --recipe grpo --kl-coef 0"
    if name == "oracle":
        return f"{common} --recipe gold_steps {REWARD}"
    verifier = f"{trained} --verifier-source rl {OF_SEVERAL.get(v.judge, '')}" if v.recipe else tag_of(seed, v.start)
    return (f"{common} --recipe fixed_verifier --judge {v.judge} --step-rewards verdicts {REWARD} "
            f"--verifier-tag {verifier} --judged-samples 8")
