"""
The league as data: tasks, systems, and the flags of every process that follow from them. league.py runs it.

All systems of a task start from one checkpoint per seed, which SFT taught both roles, and may sample the same number of
tokens, over all roles. What trains a judge first is paid from the same budget: half of it for one that learns by
sampling, an eighth for labelled solutions. Each system has three tries on the tuning seeds: learning rates of the
generator.
"""
import zlib
from functools import cache
from typing import NamedTuple

from dev.experiments import arms_smol
from dev.experiments.arms import Experiment, Start
from nanochat import recipes
from nanochat.common import BadInput
from nanochat.own_code import is_file, short
from nanochat.rl.verify.judges import GROUP_SCORES
from scripts import tango_rl

BASELINE, WEIGHTED = "grpo", "grpo_tenth"  # what all are compared with
TUNING_SEEDS = ("101", "102", "103")
RATES = ("1e-4", "2e-4", "4e-4")
SHAPE = "--depth 3 --n-embd 96 --n-head 3"
CHAIN = "--chain-answer final --chain-share 0.55 --chain-min-steps 3 --chain-max-steps 8"
WORDS = "--last-letter-max-words 6 --last-letter-max-letters 4 --last-letter-full-share 0.05"
BOTH = "--role both --examples-per-step 48"
RL = "--num-steps 100000 --kl-coef 0 --examples-per-step 16 --eval-examples 200 --save-every 0 --log-rollouts 1"
FORMS = {"pair": 300, "solve_pair": 900, "scores": 300}  # steps of a further SFT: to solve is new to a judge of pairs
LABELS_SHARE, JUDGE_SHARE = 8, 2  # parts of the budget: an eighth for labelled solutions, half for a judge's sampling


class Task(NamedTuple):
    """Flags of a task's processes. A real model has one SFT, and a seed is one of RL."""
    problems: str             # of all scripts
    sft: str                  # of every SFT
    gen: str                  # of the generator's besides
    both: str                 # of the one of both roles; "" where nobody verifies
    rl: str                   # of all that samples solutions
    verdict: str = ""         # of what samples verifications
    solution_tokens: int = 0  # of a labelled solution, in the mean at most
    steps: str = ""           # of runs besides
    supervised: str = "--num-steps 200 --examples-per-step 32 --lr 5e-4"  # of a judge's training that samples nothing
    source: str = ""          # the tag of a real model
    rates: tuple[str, ...] = ()  # in place of the systems' own
    scoring: str = ""         # of chat_eval, which scores a real model by sampling
    device: str = "--device-type cpu"  # "": a GPU, where there is one


TASKS = {
    # a wrong chain can be right by luck, as in real mathematics
    "chain": Task(CHAIN, f"--sequence-len 384 {SHAPE}", "--num-steps 600",
                  f"{BOTH} --num-steps 500 --demo-shares refine:0.15 revise:0.1 propose:0.1",
                  "--max-new-tokens 64", "--verifier-max-new-tokens 96", 36),
    # chains and last letters in one run
    "mixture": Task(f"--task mixture {CHAIN} {WORDS}", f"--sequence-len 448 {SHAPE}", "--num-steps 800",
                    f"{BOTH} --num-steps 900 --demo-shares refine:0.15",
                    "--max-new-tokens 128", "--verifier-max-new-tokens 144", 62),
    # wrong answers have the majority: for systems that see no answers
    "misled": Task("--chain-answer final --chain-share 0.4 --chain-wrongness 0.8 --chain-min-steps 1 "
                   "--chain-max-steps 4 --chain-verifier-share 0.05", f"--sequence-len 256 {SHAPE}",
                   "--num-steps 500", f"{BOTH} --num-steps 500", "--max-new-tokens 48", "--verifier-max-new-tokens 56"),
    # what must be looked up, where memory is half wrong: for agents that search
    "lookup": Task("--task lookup --chain-min-steps 1 --chain-max-steps 3 --chain-share 0 --lookup-keys 200 "
                   "--lookup-share 0.5 --lookup-recall-share 0.6", f"--sequence-len 256 {SHAPE}", "--num-steps 1000",
                   "", "--max-new-tokens 96"),
    # proofs that a kernel accepts
    "rewrite": Task("--task rewrite", f"--sequence-len 256 {SHAPE}", "--num-steps 800", "", ""),
    # a real model, SmolLM2-135M, on word problems of two steps (gsm_symbolic)
    "words": Task(arms_smol.PROBLEMS, "--examples-per-step 16 --micro-batch-tokens 4096 --embedding-lr 5e-4 "
                  "--max-new-tokens 80 --keep 1", "--num-steps 120",
                  "--role both --examples-per-step 32 --num-steps 120 --num-sampled 512",
                  "--max-new-tokens 80", arms_smol.VERDICTS, 80,
                  "--examples-per-step 8 --eval-examples 100 --eval-every 25",
                  supervised="--num-steps 30 --examples-per-step 8 --lr 2e-5", source="smollm2", rates=("1.5e-5",),
                  scoring="-a reasoning_gym --temperature 1 --num-samples 4 --max-problems 400", device=""),
}


class System(NamedTuple):
    """One row. flags: beside those of all; recipe: where it is not the row's name; given: what it learns from; rates:
    its tries; judge: how the verifier is read that it trains, and that then rewards a generator; form: of that
    verifier's SFT; tasks: that it is for; every: steps of its first role between evaluations."""
    flags: str = ""
    recipe: str = ""
    given: str = "answers"
    rates: tuple[str, ...] = RATES
    judge: str = ""
    form: str = ""
    tasks: tuple[str, ...] = ("chain", "mixture")
    every: int = 12


BALANCED = "--verifier-balance --verifier-replay 0.5"
WARMUP = f"--warmup-steps 3 {BALANCED}"  # verifier steps before the first of the generator: a tenth of the budget
SUPERVISED = "{supervised}"  # the task's
GOLD, NOTHING = "answers, gold steps", "nothing"
ALL = ("chain", "mixture", "misled")
BEST = ("chain", "mixture", "words")  # of the ten that end highest on chain, and of the paper's Tango
SYSTEMS = {
    "grpo": System(tasks=tuple(TASKS)),
    "grpo_tenth": System("--negative-weight 0.1", "grpo", tasks=(*ALL, "rewrite", "words")),
    "dapo": System(every=6),
    "dpo": System(rates=("2e-4", "4e-4", "8e-4"), tasks=BEST),
    "ppo": System(tasks=BEST),
    "prime": System(),
    "critique_grpo": System(every=6),
    "critique_grpo_verifier": System(tasks=("chain",)),  # the mixture's critiques do not fit into its context
    "score": System("--stage1-steps 10", every=6),
    "marti": System(every=6),
    "progress_rewards": System("--continuations 4 --best-of 2", every=2),
    "simulated_judge": System("--judge-flips 0.25", given="answers, 1 in 4 flipped"),
    "tango": System(WARMUP, tasks=(*ALL, "words"), every=6),
    "tango_paper": System(f"{WARMUP} --step-rewards verdicts --credit to_go --negative-weight 1 --no-verify-distinct",
                          "tango", tasks=BEST, every=6),
    "fixed_verifier": System(tasks=(*ALL, "words")),
    "fixed_generator": System(BALANCED, judge="analysed"),
    "gold_steps": System(given=GOLD, tasks=(*ALL, "rewrite", "words")),
    "outcome_verifier": System(WARMUP, every=6),
    "refit": System("--verifier-lr 1e-3"),
    "self_verify": System(tasks=(*ALL, "words")),
    "cooper": System("--rm-pretrain 20", tasks=("chain",)),  # the mixture cannot make a right solution wrong
    "orm": System(SUPERVISED, judge="end", tasks=BEST, every=100),
    "prm": System(SUPERVISED, given=GOLD, judge="steps", tasks=BEST, every=100),
    "genrm": System(SUPERVISED, judge="verdict", tasks=BEST, every=100),
    "genprm": System(given=GOLD, judge="analysed"),
    "critic_rm": System(judge="analysed"),
    "gram": System(SUPERVISED, judge="preferred", form="pair", tasks=("chain",), every=100),
    "think_rm": System("--num-solutions 8", judge="pair", form="pair", tasks=("chain",), every=3),
    "rm_r1": System("--num-solutions 8", judge="solve_pair", form="solve_pair", tasks=("chain",), every=3),
    "spct": System("--num-solutions 8 --kl-coef 0.08", judge="scores", form="scores", tasks=("chain",), every=3),
    "alphaproof": System(tasks=("chain", "mixture", "rewrite")),
    "spin": System("--iteration-steps 20", given="demonstrations", rates=("1e-5", "3e-5", "1e-4")),
    "ttrl": System(given=NOTHING, tasks=ALL),
    "coverrl": System(given=NOTHING, tasks=ALL),
    "self_rewarding": System("--iteration-steps 10", given=NOTHING),
    "constitutional_ai": System("--sl-steps 15", given="principles", tasks=("chain",), every=6),
    "multi_agent_evolve": System("--num-samples 4", given=NOTHING, tasks=("chain",)),
    "medvlsynther": System(given=NOTHING, tasks=("chain",)),
    "search_r1": System(tasks=("lookup",)),
    "r1_searcher": System("--stage1-steps 20", tasks=("lookup",)),
    "ssrl": System(tasks=("lookup",)),
}
# Recipes without a row
LEFT_OUT = {
    "supervisor": "it labels steps, and rewards nobody",
    "think_rm_policy": "its judge is the one of think_rm, which has a row",
    "debate": "its models argue for given answers: what counts is whether the judge is right, not what is solved",
    "debate_judge": "as debate",
    "magrpo": "two agents write a half each: there is nothing that GRPO could do alone",
    "ssp": "its SFT teaches how to propose questions, which no other system of the task has",
    "mars": "its two systems need an SFT of their own, of turns",
}


def system_of(name: str) -> System:
    """The row of this name; of a recipe outside of the repository, by its path, one with defaults. Raises BadInput."""
    if is_file(name):
        try:
            recipes.load(name)
        except BadInput as error:
            raise BadInput(str(error).replace("--recipe", "--systems", 1)) from None
        return System(recipe=name, given="see the file", tasks=tuple(TASKS))
    if name in LEFT_OUT:
        raise BadInput(f"--systems {name} has no row: {LEFT_OUT[name]}")
    if name not in SYSTEMS:
        raise BadInput(f"--systems {name}: there are {', '.join(SYSTEMS)}, and files (a path that ends in .py)")
    return SYSTEMS[name]


def check_names(names: list[str]) -> None:
    """Raises BadInput for a recipe outside of the repository whose runs would have another system's names."""
    taken: dict[str, str] = {}
    for name in dict.fromkeys([*SYSTEMS, *names]):
        if (other := taken.setdefault(short(name), name)) != name:
            raise BadInput(f"--systems {name}: its runs would have the names of {other}'s; give the file another name")


def recipe_of(name: str) -> str:
    return system_of(name).recipe or name


def family_of(name: str) -> str:
    """The folder of its recipe; of a file outside of the repository: outside."""
    return "outside" if is_file(recipe_of(name)) else recipes.modules()[recipe_of(name)].split(".")[-2]


def mark_of(name: str) -> int | None:
    """A number that changes with the text of a recipe outside of the repository."""
    return zlib.crc32(recipes.load(name).text.encode()) if is_file(name) else None


@cache
def has_flags(recipe: str) -> frozenset[str]:
    return frozenset(tango_rl.make_parser(["--recipe", recipe])._option_string_actions)


# Flags

def starts_of(task_name: str, budget: int) -> dict[str, Start]:
    """The SFTs of a task, and labelled solutions. All systems begin from `start`, and judges of several solutions go on
    from it."""
    task = TASKS[task_name]
    seed = "0" if task.source else "{seed}"
    tag, common = f"league_{task_name}-s{seed}", f"--seed {seed} {task.device} {task.problems}"
    sft, on = f"{task.sft} {common}", "--from-stage sft --from-tag"
    source = f"{on} {{source}}" if task.source else ""
    starts = {"gen": Start("sft", f"{tag}-gen", f"--role generator --model-tag {{tag}} {source} {sft} {task.gen}"),
              "start": Start("sft", f"{tag}-both", f"--model-tag {{tag}} {on} {{gen}} {sft} {task.both}")}
    if not task.both:
        return {"start": starts["gen"]}
    for form, steps in FORMS.items():
        judge = f"--role verifier --model-tag {{start}} --verifier-tag {{tag}} {on} {{start}} {sft}"
        starts[form] = Start("sft", f"{tag}-{form}", f"{judge} --verifier-form {form} --num-steps {steps}")
    if task.source:
        starts["source"] = Start("import", task.source, "{tag}")
    num_problems = budget // LABELS_SHARE // (4 * max(1, task.solution_tokens))
    which = f"--first 1000000 --num-problems {num_problems} --num-samples 4"  # problems that no run of RL gets to
    starts["labels"] = Start("labels", f"{tag}-labels-{num_problems}", f"--method gold --generator-tag {{start}} "
                             f"{common} {task.rl} {which} --out {{tag}}")
    return starts


def role_flags(recipe: str, task: Task, own_start: str = "start") -> str:
    """The checkpoints of a recipe's roles, and how long verifications may be."""
    tags = {spec.tag for spec in recipes.load(recipe).ROLES.values()} - {"--model-tag"}
    verdict = task.verdict if "--verifier-max-new-tokens" in has_flags(recipe) else ""
    return " ".join(["--model-tag {start}", *(f"{tag} {{{own_start}}}" for tag in sorted(tags)), verdict])


def allowances(name: str, budget: int) -> tuple[int, int]:
    """Tokens that a system may sample for labelled solutions, and to train its judge, before it rewards."""
    system = system_of(name)
    takes_labels = bool(system.judge) and "--labels" in has_flags(recipe_of(name))
    samples = bool(system.judge) and SUPERVISED not in system.flags
    return takes_labels * (budget // LABELS_SHARE), samples * (budget // JUDGE_SHARE)


def training_flags(name: str, task: Task, budget: int) -> str:
    """Flags of the run that trains a system's judge."""
    system, recipe = system_of(name), recipe_of(name)
    labels, sampling = allowances(name, budget)
    given = ("--labels {labels}" if labels else "") + (" --judged-samples 1" if labels and not system.form else "")
    own = role_flags(recipe, task, system.form or "start")
    return (f"--recipe {recipe} {own} --seed {{seed}} {task.device} {task.problems} {RL} --eval-every {system.every} "
            f"{task.rl} {task.steps} --eval-examples 100 {given} --token-budget {sampling} "
            f"{system.flags.replace(SUPERVISED, task.supervised)}")


def run_flags(name: str, task: Task, budget: int, rate: str) -> str:
    """Flags of the run that trains the generator."""
    system, recipe = system_of(name), recipe_of(name)
    own, flags = role_flags(recipe, task), system.flags
    if system.judge:
        trained = f"{{train_{name}}}-ver --verifier-source rl"
        judged = 2 if system.judge in GROUP_SCORES else 1  # solutions of a problem that evaluations show it
        recipe, flags = "fixed_verifier", f"--judge {system.judge} --step-rewards verdicts --judged-samples {judged}"
        own = f"--model-tag {{start}} --verifier-tag {trained} {task.verdict}"
    every = 12 if system.judge else system.every
    return (f"--recipe {recipe} {own} --seed {{seed}} {task.device} {task.problems} {RL} --eval-every {every} "
            f"{task.rl} {task.steps} --token-budget {budget - sum(allowances(name, budget))} {flags} --lr {rate}")


def rates_of(name: str, task_name: str) -> tuple[str, ...]:
    """The tries of a system."""
    return TASKS[task_name].rates or system_of(name).rates


def arm_of(name: str, rate: str) -> str:
    """The arm of a try, which is part of its runs' names."""
    return f"{short(name)}_{rate}"


def experiment(task_name: str, budget: int, tries: list[tuple[str, str]]) -> Experiment:
    """Tries, each a system and a rate, at one task."""
    task, starts = TASKS[task_name], starts_of(task_name, budget)
    for name in dict.fromkeys(name for name, _ in tries):
        if system_of(name).judge:
            starts[f"train_{name}"] = Start("run", f"league_{task_name}_{budget}-train_{name}-s{{seed}}",
                                            training_flags(name, task, budget))
    return Experiment(f"league_{task_name}_{budget}", starts,
                      {arm_of(name, rate): run_flags(name, task, budget, rate) for name, rate in tries})
