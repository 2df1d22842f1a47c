"""
The comparisons of self-play, teams, own judges, missing labels and tools as data: families of arms that start from the
same SFT checkpoints, with what is watched of them. scripts/run_selfplay.py runs them.
"""
import re
from dataclasses import dataclass

SHAPE = "--sequence-len 256 --depth 3 --n-embd 96 --n-head 3"
GEN = f"--role generator {SHAPE} --num-steps"
BOTH = f"--role both --from-stage sft --from-tag {{gen}} {SHAPE} --examples-per-step 48 --num-steps"
RL = "--lr 2e-4 --kl-coef 0 --examples-per-step 16 --num-steps 60 --eval-every 10 --eval-examples 200"
SOLVED = {"gen/pass1_in": "pass@1", "gen/pass1_out": "pass@1, longer problems"}
# Facts that are shown wrongly so often that a wrong answer has the majority.
MISLED = "--chain-answer final --chain-share 0.4 --chain-wrongness 0.8 --chain-min-steps 1 --chain-max-steps 4"
BRIEF = "--model-tag {both} --max-new-tokens 48"
JUDGED = f"{BRIEF} --verifier-max-new-tokens 56"
LONG_CHAIN = "--chain-answer final --chain-share 0.45 --chain-min-steps 3 --chain-max-steps 10"
FOUR = "--recipe grpo --updates-per-batch 4 --lr 1e-4 --model-tag {gen}"  # at one update there is nothing to clip
TARGETS = "--recipe alphaproof --model-tag {gen} --targets-of test_out --num-targets 40"


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
        "votes in place of gold answers, where a wrong answer often has the majority; the verifier is taught rightly",
        f"{MISLED} --chain-verifier-share 0.05", {"gen": f"{GEN} 500", "both": f"{BOTH} 500"},
        {"grpo": f"--recipe grpo {BRIEF}", "ttrl": f"--recipe ttrl {BRIEF}", "coverrl": f"--recipe coverrl {JUDGED}",
         "coverrl_own": f"--recipe coverrl --verifier-head own --verifier-tag {{both}} {JUDGED}"},
        "grpo", {**SOLVED, "gen/label_accuracy": "pseudo labels that are right",
                 "ver/balanced_acc_current": "balanced accuracy of the verifier"}),
    "self_verify": Family(
        "one model that solves and verifies, taught as much wrongly as a verifier as it is as a generator",
        f"{MISLED} --chain-verifier-share 0.4 --chain-verifier-wrongness 0.8",
        {"gen": f"{GEN} 500", "both": f"{BOTH} 500"},
        {"generation": f"--recipe self_verify --verifier-steps 0 {JUDGED}",
         "turns": f"--recipe self_verify --num-steps 72 {JUDGED}",  # as many generator steps
         "verification": f"--recipe self_verify --warmup-steps 60 {JUDGED}",
         "coverrl": f"--recipe coverrl {JUDGED}", "ttrl": f"--recipe ttrl {BRIEF}",
         "few_labels": f"--recipe tango --verifier-head prompt --num-labelled 64 --warmup-steps 20 --alpha-start 0.7 "
                       f"--alpha-end 0.7 {JUDGED}",
         "grpo_few_labels": f"--recipe grpo --num-labelled 64 {BRIEF}"},
        "generation", {**SOLVED, "ver/balanced_acc_fixed": "balanced accuracy, the start's solutions",
                       "ver/balanced_acc_current": "balanced accuracy, present solutions"}),
    "kernel": Family(
        "proofs against a kernel that is never wrong", "--task rewrite", {"gen": f"{GEN} 800"},
        {"grpo": "--recipe alphaproof --learner grpo --model-tag {gen}",
         "expert_iteration": "--recipe alphaproof --model-tag {gen}",
         "gold_steps": "--recipe gold_steps --combine rewards --model-tag {gen}",
         "targets": f"{TARGETS} --num-steps 80",  # about as many tokens
         "variants": f"{TARGETS} --curriculum variants",
         "variants_alone": f"{TARGETS} --curriculum variants --target-share 0"},
        "grpo", {"gen/pass1_in": "proved greedily", "gen/pass1_out": "proved greedily, longer",
                 "gen/targets/pass1": "targets proved greedily"}),
    "claims": Family(
        "proofs, or what is only claimed to be proved, from demonstrations that leave out a third of the steps",
        "--task rewrite --rewrite-skips 0.3", {"gen": f"{GEN} 800"},
        {"kernel": "--recipe alphaproof --learner grpo --model-tag {gen}",
         "claim": "--recipe alphaproof --learner grpo --reward claim --model-tag {gen}"},
        "kernel", {"gen/pass1_in": "proved greedily", "gen/claimed_falsely": "claimed, not proved"}),
    "optimisers": Family(
        "optimisers of outcome rewards", LONG_CHAIN,
        {"gen": f"{GEN} 800", "ver": f"--role verifier --model-tag {{gen}} {SHAPE} --num-steps 800"},
        {"grpo": "--recipe grpo --num-steps 126 --model-tag {gen}",  # about as many tokens as dapo
         "dapo": "--recipe dapo --model-tag {gen}",
         "clip": FOUR, "clip_higher": f"{FOUR} --clip-high 0.28",
         "cispo": f"{FOUR} --loss cispo --clip-low 1 --clip-high 0.28 --aggregation token",
         "gspo": f"{FOUR} --sequence-ratio --clip-low 3e-4 --clip-high 4e-4",
         "ppo": "--recipe ppo --aggregation token --model-tag {gen} --critic-tag {ver}",
         "vapo": "--recipe ppo --aggregation token --gae-alpha 0.25 --value-pretrain 20 --lm-coef 0.1 --model-tag {gen} "
                 "--critic-tag {ver}"},
        "grpo", {**SOLVED, "gen/frac_reward_zero_std": "groups without signal", "gen/entropy": "entropy"}),
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
