"""
The runs of the page of open questions, as data: for each question the arms that answer it, on small chain, and what
they start from. run.py runs them; recipes of their own are in recipes/.

An arm is one run for all questions that have it. Seeds that no setting was chosen on: 41 to 45.
"""
import functools
from dataclasses import replace
from typing import NamedTuple

import torch

from dev.experiments.arms import SMALL, Experiment, Setting, Setup, Start, starts_of
from nanochat.checkpoint import load_meta
from nanochat.flops import matrix_parameters
from nanochat.gpt import GPT
from nanochat.rl.learn.roles import short_name
from nanochat.rl.report.report import Run, is_count
from nanochat.storage.files import found_at

NAME = "questions"
OWN = "dev/experiments/recipes"
RL = (f"--seed {{seed}} --device-type cpu {SMALL.problems} --lr 2e-4 --kl-coef 0 --examples-per-step 16 --num-steps 60 "
      "--eval-every 20 --eval-examples 400")
SIZES = {"64": "--depth 2 --n-embd 64 --n-head 2", "192": "--n-embd 192 --n-head 6"}  # .32 and 3.8 of the weights
LEARNS = "--warmup-steps 10 --verifier-replay 0.5 --verifier-lr 1e-4"
FEW = "--alpha-start 0.7 --alpha-end 0.7 --num-labelled 64"  # constant, without a KL: what some runs collapse at
BLIND = "--no-verifier-balance --no-class-weights"
LOOKUP = ("--task lookup --chain-min-steps 1 --chain-max-steps 3 --chain-share 0 --lookup-keys 200 --lookup-share 0.5 "
          "--lookup-recall-share 0.6")
JUDGING = "--judge analysed --step-rewards verdicts --judged-samples 8 --num-steps 0"  # the judge's scores alone
GIVEN_ON = "{tango}-ver --verifier-source rl"  # the verifier of the arm tango

# Of another seed, with other misconceptions, and a verifier of that seed's generator
OTHER = "--seed 1{seed}"
SOLVES, JUDGES = "--role generator --model-tag {tag}", "--role verifier --verifier-tag {tag} --model-tag"
STARTS = {  # beside those of small chain: the ending of the tag, and flags of the SFT; the later of a flag counts
    "gen_other": ("other", f"{SOLVES} {OTHER}"),
    "ver_other": ("ver-other", f"{JUDGES} {{gen_other}} {OTHER}"),
    "ver_from_gen": ("ver-from-gen", f"{JUDGES} {{gen}} --from-stage sft --from-tag {{gen}}"),
    **{f"gen_{size}": (size, f"{SOLVES} {shape}") for size, shape in SIZES.items()},
    **{f"ver_{size}": (f"ver-{size}", f"{JUDGES} {{gen}} {shape}") for size, shape in SIZES.items()},
    "pro": ("pro", f"{SOLVES} --from-stage sft --from-tag {{gen}} --demo-shares propose:0.5 --num-steps 300"),
    "lookup_gen": ("lookup", f"{SOLVES} {LOOKUP} --num-steps 1000"),
    "lookup_ver": ("lookup-ver", f"{JUDGES} {{lookup_gen}} {LOOKUP} --num-steps 1000"),
}


def grpo(more: str = "", gen: str = "{gen}") -> str:
    """GRPO that weighs wrong answers as the others do."""
    return f"--recipe grpo --negative-weight 0.1 --model-tag {gen} {more}"


def fixed(more: str = "", ver: str = "{ver}", gen: str = "{gen}") -> str:
    return f"--recipe fixed_verifier --model-tag {gen} --verifier-tag {ver} {more}"


def tango(more: str = "--verifier-balance", ver: str = "{ver}", gen: str = "{gen}", recipe: str = "tango") -> str:
    return f"--recipe {recipe} --model-tag {gen} --verifier-tag {ver} {LEARNS} {more}"


def own(recipe: str, more: str = "--verifier-balance") -> str:
    """Tango in another way."""
    return tango(more, recipe=f"{OWN}/{recipe}.py")


def in_order(first: str) -> str:
    return f"--task {OWN}/in_order.py --in-order-problems 960 --in-order-first {first}"


ARMS = {
    "grpo": grpo(), "fixed": fixed(), "tango": tango(),
    "ng_1": tango("--verifier-balance --generator-steps 1"), "ng_10": tango("--verifier-balance --generator-steps 10"),
    "adaptive": own("adaptive"),
    **{f"{who.__name__}_{how}": who(ver=f"{{ver_{how}}}") for who in (fixed, tango)
       for how in ("other", "from_gen", *SIZES)},
    "proposer": own("proposer", "--verifier-balance --proposer-tag {pro} --proposer-lr 1e-4"),
    # another generator, and the verifier as SFT left it or as Tango with the first generator did
    "new_grpo": grpo(gen="{gen_other}"), "new_fixed": fixed(gen="{gen_other}"),
    "new_tango": fixed(ver=GIVEN_ON, gen="{gen_other}"),
    "best_of_fixed": fixed(JUDGING, gen="{gen_other}"),
    "best_of_tango": fixed(JUDGING, ver=GIVEN_ON, gen="{gen_other}"),
    **{f"{first}_{who.__name__}": who(in_order(first)) for first in ("short", "long") for who in (grpo, fixed)},
    "lookup_grpo": grpo(LOOKUP, gen="{lookup_gen}"),
    "lookup_fixed": fixed(LOOKUP, ver="{lookup_ver}", gen="{lookup_gen}"),
    "lookup_tango": tango(f"--verifier-balance {LOOKUP}", ver="{lookup_ver}", gen="{lookup_gen}"),
    "lookup_gold": f"--recipe gold_steps --model-tag {{lookup_gen}} {LOOKUP}",
    "simultaneous": own("simultaneous"), "no_balance": tango(""),
    "tango_kl": tango("--verifier-balance --kl-coef 0.05"),
    **{f"grpo_width_{size}": grpo(gen=f"{{gen_{size}}}") for size in SIZES},
    **{f"{who.__name__}_width_{size}": who(ver=f"{{ver_{size}}}", gen=f"{{gen_{size}}}")
       for size in SIZES for who in (fixed, tango)},
    "few_grpo": grpo("--num-labelled 64 --labelled-share 1"), "few_fixed": fixed(FEW),
    "few_grounded": tango(f"{BLIND} {FEW}"), "few_ungrounded": own("ungrounded", f"{BLIND} {FEW}"),
}


class Question(NamedTuple):
    """words: what is compared; baseline: the arm that others are compared with; arms: these, each with the partner
    that it is compared with too, or ""."""
    words: str
    baseline: str
    arms: dict[str, str]


QUESTIONS = {  # the most telling for its minutes first
    "transfer": Question("a verifier that was co-trained with another generator", "new_grpo",
                         {"new_grpo": "", "new_fixed": "", "new_tango": "new_fixed", "best_of_fixed": "",
                          "best_of_tango": "best_of_fixed"}),
    "interleaving": Question("generator steps to verifier steps, 1 : 0 to 1 : 1, and by the verifier's skill", "tango",
                             {"tango": "", "fixed": "", "ng_1": "", "ng_10": "", "adaptive": ""}),
    "gaming": Question("64 answers, verdicts weigh .7: a verifier grounded in answers, and one in itself", "few_grpo",
                       {"few_grpo": "", "few_fixed": "", "few_grounded": "few_fixed",
                        "few_ungrounded": "few_grounded"}),
    "asymmetry": Question("verifiers of .32, 1 and 3.8 times the generator's weights", "grpo",
                          {"grpo": "", "fixed": "", "tango": "fixed", "fixed_64": "fixed", "tango_64": "fixed_64",
                           "fixed_192": "fixed", "tango_192": "fixed_192"}),
    "stability": Question("simultaneous updates, a KL, and no balance", "tango",
                          {"tango": "", "ng_1": "", "simultaneous": "ng_1", "tango_kl": "", "no_balance": ""}),
    "initialisation": Question("a verifier of another seed, and one that starts from the generator", "tango",
                               {"tango": "fixed", "fixed": "", "fixed_other": "fixed", "tango_other": "fixed_other",
                                "fixed_from_gen": "fixed", "tango_from_gen": "fixed_from_gen"}),
    "curriculum": Question("the same problems, short or long ones first", "grpo",
                           {"grpo": "", "fixed": "", "short_grpo": "", "short_fixed": "fixed", "long_grpo": "",
                            "long_fixed": "fixed"}),
    "proposing": Question("a third model that proposes half of the problems", "tango", {"tango": "", "proposer": ""}),
    "lookup": Question("task lookup: letters stand for numbers", "lookup_grpo",
                       {"lookup_grpo": "", "lookup_fixed": "", "lookup_tango": "lookup_fixed", "lookup_gold": ""}),
    "width_64": Question("both models of 2 layers of width 64", "grpo_width_64",
                         {"grpo_width_64": "", "fixed_width_64": "", "tango_width_64": "fixed_width_64"}),
    "width_192": Question("both models of width 192", "grpo_width_192",
                          {"grpo_width_192": "", "fixed_width_192": "", "tango_width_192": "fixed_width_192"}),
}
COST = "cost/teraflops"
WATCHED = {"gen/pass1_in": "pass@1", "gen/pass1_out": "pass@1, longer problems", "ver/step_f1_fixed": "step F1",
           "ver/bon_fixed": "best of 8", "ver/maj_fixed": "majority of 8",
           "gen/verdicts/wrong_steps_passed": "wrong steps passed"}


def experiment(arms: list[str]) -> Experiment:
    """These arms, with all starts."""
    starts = starts_of(Setup(NAME, "small_chain", "sft", SMALL.steps, Setting()))
    common = f"--seed {{seed}} --device-type cpu {SMALL.sft} {SMALL.problems}"
    starts |= {name: Start("sft", f"small_chain-s{{seed}}-{ending}", f"{common} {flags}")
               for name, (ending, flags) in STARTS.items()}
    starts["tango"] = Start("run", f"{NAME}-tango-s{{seed}}", f"{RL} {ARMS['tango']}")  # the arm itself
    return Experiment(NAME, starts, {arm: f"{RL} {ARMS[arm]}" for arm in arms})


# What a run costs

def row_of(question: str, run: Run) -> Run:
    """A run as one of the question's, whose points have COST and what is watched alone."""
    flops = flops_by_step(run)
    kept = lambda point: {name: value for name, value in point.items() if is_count(name) or name in WATCHED}
    points = [kept(point) | {COST: flops[point["record"]] / 1e12} for point in run.points]
    return replace(run, task=question, points=points)


def flops_by_step(run: Run) -> list[float]:
    """FLOPs before each of its steps and at its end: 2 for each weight that multiplies a token where it is sampled, or
    where the verifier reads it as a part of a solution, and 6 more where it is trained. Problems, evaluations and
    attention are not counted; equal solutions are, each time."""
    sizes, found = {role: num_weights(start) for role, start in run.config["starts"].items()}, [0.0]
    for record in run.records:
        logged = {role: [record.get(f"{short_name(role)}/{name}") for name in
                         ("num_rollouts", "completions/mean_length", "sampled_tokens")] for role in sizes}
        trained = {role: num * length for role, (num, length, _) in logged.items() if num}
        sampled = sum(tokens or 0 for *_, tokens in logged.values())  # of all roles, under the first one's name
        # what no role learns from: verdicts on solutions, or solutions that are judged
        other = ([role for role in sizes if role not in trained] or list(sizes))[-1]
        rest = sampled - sum(trained.values())
        found.append(found[-1] + sum(8 * sizes[role] * tokens for role, tokens in trained.items())
                     + 2 * sizes[other] * rest)
        if "verifier" in sizes:
            read = trained.get("generator", rest)
            found[-1] += (8 if "verifier" in trained else 2) * sizes["verifier"] * read
    return found


@functools.cache
def num_weights_of(path: str) -> int:
    with torch.device("meta"):
        return matrix_parameters(GPT(load_meta(path)[1]))


def num_weights(start: dict) -> int:
    """Of the checkpoint that a role started from, those that multiply every token."""
    return num_weights_of(found_at(start["source"], start["tag"], f"meta_{start['step']:06d}.json"))
