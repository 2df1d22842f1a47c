"""
The controlled experiments as data: tasks, arms and dials, and the flags of every SFT and run that follow from them.

An arm is one way to train. A dial is something around the arms, and a setting one position of it: the same arms run at
every setting. Families of self-play are in arms_selfplay.py, verifiers in arms_verifiers.py, and run.py runs them all:
each is an Experiment. Where a flag comes twice, the later one counts.
"""
import re
from itertools import product
from typing import NamedTuple

from nanochat.cli import check_choices
from nanochat.common import BadInput
from nanochat.rl.credit.rewards import CREDIT as CREDITS


class Start(NamedTuple):
    """A process that others start from. kind: import (of SmolLM2), sft, labels (of label_steps) or run; tag: of its
    checkpoint, of the folder of its labels, or the run's name."""
    kind: str
    tag: str
    flags: str


class Experiment(NamedTuple):
    """Arms that are compared, seed by seed. In flags {seed}, {next} and {tag} stand for the seed, for the next one of 1
    to 3, and for the own tag; the name of a start stands for its tag, or for the file of its labels."""
    name: str                # the word before the first dash of its runs' names
    starts: dict[str, Start]
    arms: dict[str, str]     # flags of each


# Tables

class Task(NamedTuple):
    """Flags for one task. Learning rates and alpha were chosen from tries on seed 0 (dev/LOG.md)."""
    problems: str           # of all scripts
    sft: str                # of every SFT
    rl: str                 # of every RL run
    alpha: str
    steps: int              # of the generator
    grpo: str = ""          # GRPO's own learning rate
    verdict: str = ""       # of runs with a verifier
    verifier_sft: str = ""


CHAIN = "--chain-answer final"  # the final result alone is the answer: a wrong chain can be right by luck
SMALL = Task(  # a smaller model and batch: for what needs many runs
    f"{CHAIN} --chain-share 0.45 --chain-min-steps 3 --chain-max-steps 10",
    sft="--sequence-len 256 --depth 3 --n-embd 96 --n-head 3 --num-steps 800",
    rl="--lr 2e-4 --examples-per-step 16 --eval-every 40 --eval-examples 200",
    alpha="--alpha-start 0.5 --alpha-end 0.05", steps=60)
# SFT shows up to 5 words, and 1 demonstration in 20 of up to 12: after it (seed 0) lists of 2 to 5 are solved, 6 to 8
# now and then, 9 and 10 not.
WORDS = "--last-letter-max-words 10 --last-letter-max-letters 4 --last-letter-full-share 0.05"
LONG = "--max-new-tokens 208"
TASKS = {
    "chain": Task(
        f"{CHAIN} --chain-share 0.45 --chain-min-steps 3 --chain-max-steps 10",
        sft="--sequence-len 384",  # room for a second attempt
        rl="--lr 2e-4", alpha="--alpha-start 0.5 --alpha-end 0.05", steps=60, grpo="--lr 4e-4"),
    "small_chain": SMALL,
    "common_chain": SMALL._replace(problems=f"{SMALL.problems} --chain-common-share 1"),
    "brittle": Task(  # at 3e-4 every learned reward is gamed at once (dev/tuning.md)
        "--task brittle --chain-min-steps 2 --chain-max-steps 3",
        sft="--sequence-len 256 --depth 3 --n-embd 96 --n-head 3 --num-steps 600",
        rl="--lr 5e-5 --eval-every 20 --eval-examples 200", alpha="--alpha-start 0.5 --alpha-end 0.05", steps=120),
    "last_letter": Task(  # for GRPO seed 0 said 2e-4, but seeds 1 to 3 said 1e-4
        f"--task last_letter {WORDS}", sft=f"--sequence-len 576 {LONG}", rl=f"{LONG} --eval-examples 200 --lr 1e-4",
        alpha="--alpha-start 0.1 --alpha-end 0.01", steps=40, verdict="--verifier-max-new-tokens 224"),
    "mixture": Task(  # both in one run, with longer chains of which more is taught wrongly
        f"--task mixture {CHAIN} --chain-share 0.5 --chain-min-steps 4 --chain-max-steps 12 {WORDS}",
        sft=f"--sequence-len 576 {LONG} --num-steps 1000", rl=f"{LONG} --eval-examples 200 --lr 2e-4",
        alpha="--alpha-start 0.3 --alpha-end 0.03", steps=100, grpo="--lr 1e-4",
        verdict="--verifier-max-new-tokens 224",
        verifier_sft="--num-steps 2500"),  # after 1000 it objects to little on last_letter (dev/LOG.md)
}
MODEL = "--depth 4 --n-embd 128 --n-head 4"
# an SFT after the generator's
REFINE_SFT = "--num-steps 200 --demo-shares refine:0.5 --matrix-lr 2e-3 --embedding-lr 2e-3"
RL = "--eval-every 10 --kl-coef 0"
# where the defaults are not the paper's
EQ7, TO_GO = "--combine advantages --negative-weight 1", "--credit to_go"
PAPER = f"--step-rewards verdicts {EQ7} {TO_GO} --no-verify-distinct"
JUDGING = "--verifier-balance --verifier-replay 0.5 --verifier-lr 1e-4"  # what trains a verifier
WARMUP = 40

MAIN = ["tango", "grpo", "grpo_2e-4", "fixed_verifier", "fixed_generator", "gold_steps", "outcome_verifier"]
ABLATIONS = ["tango", "grpo", "gold_steps", "alpha_0.3", "alpha_1", "ng_1", "alpha_0.1", "ng_5", "no_class_weights",
             "no_balance", "no_replay", "merged_rewards", "rloo", "reinforce_pp", "no_balance_no_weights", "ng_10",
             "alpha_0.05", "small_verifier", "large_verifier", "shared_half", "shared_all"]
HEADS = ["tango_merged", "grpo", "grpo_both", "own_both", "frozen_half", "trunk_half", "trunk", "trunk_own", "prompt",
         "prompt_own", "prompt_summed"]
COOPER = ["grpo", "cooper", "cooper_frozen", "cooper_rule"]
REFITS = ["refit_0", "refit_1", "refit_20"]
LEARNING = ["grpo", "gold_merged", "fixed_merged", "tango_merged", "ppo", *REFITS, "progress", "progress_self", "ties",
            "flips"]
HALF = "--examples-per-step 16 --eval-every 20"
POSTERIOR = "--step-rewards posterior --verify-distinct"
SAYS = {"gold": "--recipe gold_steps", "fixed": "--recipe fixed_verifier", "tango": "--recipe tango"}
USES = {"paper": "", "posterior": "", "pooled": "--combine rewards", "weighted": "--negative-weight 0.3",
        "tenth": "--negative-weight 0.1", "by_j": "--negative-weight 0.1 --weigh-by-j",
        "stratified": "--combine stratified", "filtered": "--combine filtered"}
CREDIT = ["grpo_half", "grpo_half_4e-4", "grpo_weighted", "grpo_tenth", "grpo_tenth_4e-4",
          *(f"{who}_{use}_{credit}_0.3" for who in ("gold", "fixed") for use in ("paper", "pooled", "weighted")
            for credit in ("to_go", "own_step")),
          *(f"fixed_{use}_0.3" for use in ("posterior_own_step", "tenth_min", "stratified_own_step",
                                           "filtered_own_step")),
          *(f"tango_{use}_0.3" for use in ("paper_to_go", "paper_own_step", "pooled_to_go", "pooled_own_step",
                                           "weighted_own_step")),
          *(f"{who}_tenth_own_step_0.3" for who in SAYS), "fixed_tenth_own_step_0.7", "gold_tenth_min_0.3",
          "tango_by_j_own_step_0.3", "fixed_by_j_own_step_0.3", "fixed_by_j_own_step_0.7",
          *(f"fixed_{use}_0.7" for use in ("paper_to_go", "pooled_to_go", "weighted_own_step")),
          *(f"{who}_{use}_0.7" for who in ("gold", "tango")
            for use in ("paper_to_go", "pooled_to_go", "tenth_own_step"))]
# The defaults, and what makes a verdict stricter or a bad verifier less heard: each with the verifier of SFT and with
# one that is trained gently.
NEW = f"{POSTERIOR} --combine advantages --credit own_step --negative-weight 0.1"
GENTLE = "--recipe tango --verifier-lr 2e-5 --warmup-steps 10"
STRICTER_BY = {"new": "", "relabelled": "--verify-relabelled", "by_j": "--weigh-by-j"}
STRICTER = ["grpo_light", *(f"{who}_{how}" for how in STRICTER_BY for who in ("fixed", "gentle"))]
LISTS = {"ablations": ABLATIONS, "heads": HEADS, "cooper": COOPER, "learning": LEARNING, "credit": CREDIT,
         "stricter": STRICTER}
OTHERS = ["prime", "prime_outcome", "dpo", "spin", "critique_grpo", "score", "ttrl", *COOPER[1:], *LEARNING[4:]]
# they also come with another rate (grpo_2e-4), and use no verifier of SFT
TUNED = ["grpo", "grpo_half", "grpo_tenth", *OTHERS]
GOLD = ["gold_steps", "gold_merged"]     # gold labels in place of a verifier
TWO_TURNS = ["critique_grpo", "score"]   # need --start refine
MERGED = f"--recipe tango {POSTERIOR} --combine rewards"
ONE_CHECKPOINT = HEADS[2:]  # both roles start from one, of chat_sft --role both
PRIME = "--recipe prime --lr 2e-4"


def credit_arm(name: str) -> str:
    """The flags of an arm such as fixed_pooled_to_go_0.3: who says which steps are right, how that is used with the
    outcome, which tokens it moves, and alpha."""
    who, use, credit, alpha = re.fullmatch(rf"([a-z]+)_({'|'.join(USES)})_([a-z_]+)_([0-9.]+)", name).groups()
    taken = "" if use == "paper" or who == "gold" else POSTERIOR
    return f"{SAYS[who]} {taken} {USES[use]} --credit {credit} {HALF} --alpha-start {alpha} --alpha-end {alpha}e-1"


ARMS = {  # {grpo}: of the task; {verifier_steps}: as many as Tango's verifier has; {third}: of the steps
    **{name: f"--recipe {name}" for name in ("tango", "fixed_verifier", "gold_steps", "outcome_verifier")},
    "grpo": "--recipe grpo {grpo}",
    "fixed_generator": "--recipe fixed_generator --num-steps {verifier_steps}",
    "gentle": GENTLE,  # a verifier that changes little
    "fixed_verify_all": "--recipe fixed_verifier --step-rewards posterior",
    "fixed_posterior": f"--recipe fixed_verifier {POSTERIOR}",
    "tango_posterior": f"--recipe tango {POSTERIOR}",
    "gentle_posterior": f"{GENTLE} {POSTERIOR}",
    "fixed_merged": f"--recipe fixed_verifier {POSTERIOR} --combine rewards",
    "gold_merged": "--recipe gold_steps --combine rewards",
    "tango_merged": MERGED,
    "gentle_merged": f"{GENTLE} {POSTERIOR} --combine rewards",
    "alpha_1": "--alpha-start 1 --alpha-end 1",                       # constant
    "no_class_weights": "--no-class-weights",
    "no_balance": "--no-verifier-balance",
    "no_balance_no_weights": "--no-verifier-balance --no-class-weights",
    "no_replay": "--verifier-replay 0",
    "merged_rewards": "--combine rewards",
    "shared_half": "--verifier-head frozen --verifier-shared-layers 2",
    "shared_all": "--verifier-head frozen",
    "grpo_both": "--recipe grpo {grpo}",  # from the one checkpoint
    "own_both": MERGED,                   # two models that start from it
    "frozen_half": f"{MERGED} --verifier-head frozen --verifier-shared-layers 2",
    "trunk": f"{MERGED} --verifier-head trunk",
    "trunk_half": f"{MERGED} --verifier-head trunk --verifier-shared-layers 2",
    "trunk_own": f"{MERGED} --verifier-head trunk --verifier-optimizer own",
    "prompt": f"{MERGED} --verifier-head prompt",
    "prompt_own": f"{MERGED} --verifier-head prompt --verifier-optimizer own",
    "prompt_summed": f"{MERGED} --verifier-head prompt --verifier-updates summed",
    "small_verifier": "",
    "large_verifier": "",
    "rloo": "--advantage rloo",
    "reinforce_pp": "--advantage reinforce++",
    "prime": PRIME,
    "prime_outcome": f"{PRIME} --prm-freeze-after 0",  # without process rewards
    "dpo": "--recipe dpo --lr 4e-4",
    "spin": "--recipe spin --lr 3e-5",
    "critique_grpo": "--recipe critique_grpo --lr 2e-4",
    "score": "--recipe score --lr 2e-4 --stage1-steps {third}",
    "ttrl": "--recipe ttrl --lr 2e-4",
    "cooper": "--recipe cooper --rm-pretrain 200",
    "cooper_frozen": "--recipe cooper --rm-pretrain 200 --rm-update none",
    "cooper_rule": "--recipe cooper --rm-pretrain 0 --rm-update none --policy-reward rule",
    "ppo": "--recipe ppo",
    **{f"refit_{k}": f"--recipe refit --refit-every {k} --verifier-lr 1e-3" for k in (0, 1, 20)},
    "progress": "--recipe progress_rewards --continuations 4 --best-of 2",
    "progress_self": "--recipe progress_rewards --continuations 4 --best-of 1",  # the prover as it is
    "ties": "--recipe simulated_judge --judge-ties 0.5",      # as accurate as each other
    "flips": "--recipe simulated_judge --judge-flips 0.25",
    "grpo_half": f"--recipe grpo {HALF}",
    "grpo_weighted": f"--recipe grpo {HALF} --negative-weight 0.3",
    "grpo_light": "--recipe grpo --negative-weight 0.1",  # of the dials, whose task has half of the problems anyway
    "grpo_tenth": f"--recipe grpo {HALF} --negative-weight 0.1",
    **{name: credit_arm(name) for name in map("_".join, product(SAYS, USES, CREDITS, ("0.1", "0.3", "0.7")))
       if not name.startswith("gold_by_j")},
    **{f"{who}_{how}": f"{recipe} {NEW} {own}" for how, own in STRICTER_BY.items()
       for who, recipe in (("fixed", SAYS["fixed"]), ("gentle", GENTLE))},
}
NUMBERED = {r"alpha_(0\.[0-9]{1,2})": "--alpha-start {0} --alpha-end {0}e-1", "ng_([1-9]|10)": "--generator-steps {0}"}
VERIFIERS = {  # SFTs of verifiers, named after the arm that has one of its own: the tag's ending, and its own flags
    "ver": ("", ""),
    "shared_half": ("-half", "--verifier-shared-layers 2"),
    "shared_all": ("-all", "--verifier-shared-layers 4"),
    "small_verifier": ("-small", "--depth 2 --n-embd 64 --n-head 2"),
    "large_verifier": ("-large", "--depth 6 --n-embd 192 --n-head 6"),
    # Judges of several solutions learn to quote from one first: those that learn it with the rest did not (dev/LOG.md).
    "long": ("-long", "--sequence-len 512"),
    **{form: (f"-{form}", f"--sequence-len 512 --from-stage sft --from-tag {{long}} --verifier-form {form} "
                          f"--num-steps {steps}")
       for form, steps in (("pair", 300), ("solve_pair", 900), ("scores", 300))},  # to solve is new to it
}


class Setting(NamedTuple):
    """One position of a dial: what differs from the task's usual flags."""
    arms: dict[str, str] = {}                           # those that there are: flags of each; without any, all
    by_default: tuple[str, ...] = tuple(MAIN)           # those that run
    steps: int = 0                                      # 0: the task's
    verifier_sft: str = ""                              # flags of the SFT of the verifier alone
    ending: str = ""                                    # of that verifier's tag


DIAL_TASK = "small_chain"
PARTNERS = {  # what an arm is compared with, beside GRPO
    **dict.fromkeys(["tango", "gentle", "fixed_posterior"], "fixed_verifier"),
    **dict.fromkeys(["fixed_verify_all", "tango_posterior", "gentle_posterior", "fixed_merged"], "fixed_posterior"),
    **dict.fromkeys(["tango_merged", "gentle_merged"], "fixed_merged"),
    "gold_merged": "gold_steps", "fixed_new": "fixed_merged",
    **{f"fixed_{how}": "fixed_new" for how in STRICTER_BY if how != "new"},
    **{f"gentle_{how}": f"fixed_{how}" for how in STRICTER_BY},
}
PAYS = ["grpo", "grpo_light", "fixed_verifier", *PARTNERS, "gold_steps", "ttrl"]
ALONE = ["grpo", "grpo_light", "ttrl"]  # with neither a verifier nor gold steps
STAGES = ("fixed_verifier", "tango", "fixed_posterior")  # from the paper to what runs at every setting


def at(alpha: float = 0.7, kl: float = 0.05, num_labelled: int = 0, also: tuple[str, ...] = (), **how) -> Setting:
    """A setting: 120 steps with a constant alpha, where an arm has one, and this KL to the start. also: further arms
    that run by default. Gold steps, which need all gold answers, stand beside the arms, or with fewer answers TTRL,
    which uses none. GRPO can only learn from problems with an answer."""
    flags = dict.fromkeys(PAYS, f"--kl-coef {kl}")
    for arm in flags.keys() - ALONE:
        flags[arm] += f" --alpha-start {alpha} --alpha-end {alpha}"
    if num_labelled:
        flags = {arm: own for arm, own in flags.items() if arm not in GOLD}
        for arm in flags.keys() - {"ttrl"}:
            flags[arm] += f" --num-labelled {num_labelled}" + " --labelled-share 1" * (arm in ALONE)
    by_default = ("grpo", *also, "fixed_merged", "gentle_merged", "ttrl" if num_labelled else "gold_steps")
    return Setting(flags, by_default, steps=120, **how)


USUAL = at(also=STAGES)
DIALS = {  # each turns one thing of the usual setting
    # how good the verifier is before RL: the share of the facts that it is taught wrongly
    "start": {"weak": at(verifier_sft="--chain-verifier-share 0.7", ending="-weak"), "usual": USUAL,
              "strong": at(verifier_sft="--chain-verifier-share 0.05", ending="-strong")},
    # how much weight step rewards have, and a generator that no KL holds back
    "pressure": {"alpha30": at(alpha=0.3), "usual": USUAL, "kl0": at(kl=0, also=STAGES)},
    # how many problems have a gold answer
    "labels": {"n64": at(num_labelled=64), "n256": at(num_labelled=256), "usual": USUAL}}


# Names and flags

class Setup(NamedTuple):
    """What the same arms are run at."""
    name: str
    task: str
    start: str
    steps: int
    setting: Setting


def setup(args, name: str, setting: Setting) -> Setup:
    """That of one setting. Runs of other starts, settings or lengths have other names."""
    usual = setting.steps or TASKS[args.task].steps
    steps = int(args.steps or usual)
    parts = [args.task, args.start if args.start != "sft" else "", name, str(steps) if steps != usual else ""]
    return Setup("_".join(filter(None, parts)), args.task, args.start, steps, setting)


def without_kl(arm: str) -> str:
    """tango of tango_kl0.05: any arm also comes with a weight of the KL to the start."""
    return re.sub(r"_kl0\.[0-9]{1,3}$", "", arm)


def has_verifier(plain: str) -> bool:
    """Whether an arm has a verifier that had SFT."""
    return not re.fullmatch(rf"(gold_.*|grpo_[a-z]+|({'|'.join(TUNED)})(_[1-9]e-[1-9])?)", plain)


def arm_flags(e: Setup, arm: str) -> str | None:
    """What makes an arm; None where there is no such arm for this task and start."""
    if (plain := without_kl(arm)) != arm:
        flags = arm_flags(e, plain)
        return None if flags is None else f"{flags} --kl-coef {arm.removeprefix(f'{plain}_kl')}"
    other, _, rate = arm.rpartition("_")
    if re.fullmatch("[1-9]e-[1-9]", rate):
        flags = arm_flags(e, other) if other in TUNED else None
        return flags and f"{flags} --lr {rate}"
    if arm in TWO_TURNS and e.start != "refine" or arm.startswith("shared_") and e.task == DIAL_TASK:  # 3 layers
        return None
    if arm in ARMS:
        return ARMS[arm].format(grpo=TASKS[e.task].grpo, verifier_steps=WARMUP + (e.steps - 1) // 3, third=e.steps // 3)
    found = [(re.fullmatch(pattern, arm), flags) for pattern, flags in NUMBERED.items()]
    return next((flags.format(*match.groups()) for match, flags in found if match), None)


def has_arm(e: Setup, arm: str) -> bool:
    return arm_flags(e, arm) is not None and without_kl(arm) in (e.setting.arms or [without_kl(arm)])


def all_arms(e: Setup) -> list[str]:
    """The arms that are listed; others come with a number or a rate."""
    listed = e.setting.arms or [*MAIN, *ABLATIONS, *OTHERS, *PAYS, *HEADS]
    return [arm for arm in dict.fromkeys(listed) if has_arm(e, arm)]


def starts_of(e: Setup) -> dict[str, Start]:
    """All SFTs: the generator, its second attempts, a generator that learns to verify too, and verifiers."""
    task = TASKS[e.task]
    common = f"--seed {{seed}} --device-type cpu {MODEL} {task.sft}"
    verifying = f"{common} {task.verifier_sft} {task.problems}"
    from_gen = "--model-tag {tag} --from-stage sft --from-tag {gen}"
    made = {"gen": ("", f"--role generator --model-tag {{tag}} {common} {task.problems}"),
            "refine": ("-refine", f"--role generator {from_gen} {common} {task.problems} {REFINE_SFT}"),
            # a step has as many demonstrations of either role as the SFT of that role alone
            "both": ("-both", f"--role both {from_gen} {verifying} --examples-per-step 48")}
    for name, (ending, own) in VERIFIERS.items():
        made[name] = (f"-ver{ending}{e.setting.ending}", f"--role verifier --model-tag {{gen}} --verifier-tag {{tag}} "
                                                         f"{verifying} {own} {e.setting.verifier_sft}")
    return {name: Start("sft", f"{e.task}-s{{seed}}{ending}", flags) for name, (ending, flags) in made.items()}


def role_flags(e: Setup, arm: str) -> str:
    """The flags of an arm's roles, which the other arms of its recipe have too."""
    task = TASKS[e.task]
    if not has_verifier(arm):
        if arm.startswith("refit_"):
            return f"{task.alpha} --combine rewards --negative-weight 1 {TO_GO} --verifier-tag {{gen}}"
        return f"{task.alpha} {EQ7} {TO_GO}" if arm.startswith("gold_") else ""
    start = "both" if arm in ONE_CHECKPOINT else arm if arm in VERIFIERS else "ver"
    tag = f"--verifier-tag {{{start}}}"
    both = f"{tag} --warmup-steps {WARMUP} {task.verdict} {JUDGING} {task.alpha}"
    flags = {"fixed_verifier": f"{tag} {task.verdict} {task.alpha} {PAPER}",
             "fixed_generator": f"{tag} {task.verdict} {JUDGING}",
             "outcome_verifier": f"{both} {EQ7} --no-verify-distinct"}
    recipe = next((name for name in flags if f"--recipe {name}" in ARMS.get(arm, "")), "tango")
    return flags.get(recipe, f"{both} {PAPER}")


def rl_flags(e: Setup, arm: str) -> str:
    """All flags of a run but its name."""
    task, plain = TASKS[e.task], without_kl(arm)
    start = "both" if plain in ONE_CHECKPOINT else "refine" if e.start == "refine" else "gen"
    return (f"--model-tag {{{start}}} {role_flags(e, plain)} --seed {{seed}} --device-type cpu --num-steps {e.steps} "
            f"{RL} {task.rl} {task.problems} {e.setting.arms.get(plain, '')} {arm_flags(e, arm)}")


def experiment(e: Setup, arms: list[str]) -> Experiment:
    return Experiment(e.name, starts_of(e), {arm: rl_flags(e, arm) for arm in arms})


# What is asked for

def chosen(flag: str, text: str, there=None) -> list[str]:
    """The words of a flag. Raises BadInput where there are none, one comes twice, or one is not there."""
    words = text.split()
    if not words or len(set(words)) < len(words):
        raise BadInput(f"--{flag} {text}: {'something is there twice' if words else 'is empty'}")
    for word in words:
        if there is not None and word not in there:
            raise BadInput(f"--{flag} {word}: there are {', '.join(there)}")
    return words


def check_steps(args) -> None:
    """Raises BadInput for a --steps that is no number."""
    if args.steps is not None and not re.fullmatch("[1-9][0-9]{0,8}", args.steps):
        raise BadInput(f"--steps {args.steps}: must be a number from 1 to 999999999")


def setups_of(args) -> dict[str, list[Setup]]:
    """Those of each dial, one for every setting; without a dial the one that there is, under "". Raises BadInput for
    what there is not."""
    dials = [] if args.dial is None else chosen("dial", args.dial, DIALS)
    args.task = args.task or (DIAL_TASK if dials else "chain")
    args.start = args.start or "sft"
    check_choices(args, {"task": TASKS, "start": ("sft", "refine")})
    check_steps(args)
    if args.settings is not None and len(dials) != 1:
        raise BadInput(f"--settings {args.settings}: of which --dial? Name one of {', '.join(DIALS)}")
    if not dials:
        return {"": [setup(args, "", Setting())]}
    if args.task != DIAL_TASK:
        raise BadInput(f"--task {args.task}: --dial is for {DIAL_TASK}")
    names = {dial: list(DIALS[dial]) for dial in dials}
    if args.settings is not None:
        names[dials[0]] = chosen("settings", args.settings, DIALS[dials[0]])
    return {dial: [setup(args, name, DIALS[dial][name]) for name in names[dial]] for dial in dials}


def arms_of(e: Setup, text: str | None) -> list[str]:
    """The arms to run, by default the main ones. Raises BadInput for what there is not."""
    arms = list(e.setting.by_default) if text is None else chosen("arms", text)
    for arm in arms:
        if not has_arm(e, arm):
            raise BadInput(f"--arms {arm}: there are {' '.join(all_arms(e))}")
    return arms
