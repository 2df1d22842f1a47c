"""
The comparisons of self-play, teams, own judges, missing labels and tools as data: families of arms that start from the
same SFT checkpoints, with what is watched of them. scripts/run_selfplay.py runs them.
"""
import re
from dataclasses import dataclass

SHAPE = "--sequence-len 256 --depth 3 --n-embd 96 --n-head 3"
SFT = f"{SHAPE} --num-steps 800"
BOTH = f"--role both --from-stage sft --from-tag {{gen}} {SFT} --examples-per-step 48"  # a generator learns to verify
RL = "--lr 2e-4 --kl-coef 0 --examples-per-step 16 --num-steps 60 --eval-every 10 --eval-examples 200"
CHAIN = "--chain-answer final --chain-share 0.45 --chain-min-steps 3 --chain-max-steps 10"
ACCURACY = {"gen/pass1_in": "pass@1", "gen/pass1_out": "pass@1, longer problems"}


@dataclass(frozen=True)
class Family:
    """words: what it compares; problems: flags of the task, for all scripts; starts: name -> flags of an SFT, where
    {name} is the tag of one before it; arms: name -> flags of a run, with such tags too; baseline: the arm that others
    are compared with; watched: metric of an evaluation, or one that the recipe shows -> its words. The first one is
    compared."""
    words: str
    problems: str
    starts: dict[str, str]
    arms: dict[str, str]
    baseline: str
    watched: dict[str, str]


FAMILIES = {
    "no_labels": Family(
        "without gold answers", CHAIN, {"gen": f"--role generator {SFT}"},
        {"grpo": "--recipe grpo --model-tag {gen}", "ttrl": "--recipe ttrl --model-tag {gen}"},
        "grpo", {**ACCURACY, "gen/label_accuracy": "pseudo labels that are right"}),
}


def starts_of(flags: str) -> list[str]:
    """The SFT checkpoints that flags name, in their order."""
    return re.findall(r"\{(\w+)\}", flags)


def needed(family: Family, arms: list[str]) -> list[str]:
    """The starts that these arms need, and those that these need, in the family's order."""
    found = {start for arm in arms for start in starts_of(family.arms[arm])}
    for start in reversed(family.starts):
        found |= set(starts_of(family.starts[start])) if start in found else set()
    return [start for start in family.starts if start in found]


def flags_of(name: str, seed: str, flags: str) -> str:
    """All flags of a process of a family, with the tags of its checkpoints."""
    family = FAMILIES[name]
    tags = {start: f"{name}-{start}-s{seed}" for start in family.starts}
    return " ".join(f"--seed {seed} --device-type cpu {family.problems} {flags.format(**tags)}".split())
