"""
The comparisons of self-play, teams, own judges, missing labels and tools as data: families of arms that start from the
same SFT checkpoints, with what is watched of them. run.py runs them.
"""
from typing import NamedTuple

from dev.experiments.arms import Experiment, Start

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
CRITIC = "--recipe ppo --aggregation token --model-tag {gen} --critic-tag {ver} --critic-lr 1e-3"
PLAIN = "--chain-answer final --chain-share 0.45 --chain-min-steps 2 --chain-max-steps 5"
BY_JUDGE = f"{BRIEF} --verifier-max-new-tokens 64"
MAE = "--recipe multi_agent_evolve --model-tag {both} --examples-per-step 8 --num-samples 4 --max-new-tokens 72 " \
      "--verifier-max-new-tokens 72"
KEYS = "--task lookup --chain-min-steps 1 --chain-max-steps 3"
SEARCHING = "--model-tag {gen} --max-new-tokens 96"
READING = "--recipe mars --model-tag {gen} --max-new-tokens 24 --condense-tokens 4 --most-turns 4 --bin-size 9"
ARGUING = "--model-tag {gen} --verifier-tag {pair} --max-new-tokens 48 --verifier-max-new-tokens 120 " \
         "--lr 5e-5 --num-samples 8 --num-steps 60 --eval-every 15"
LOGGED = "--eval-every 20 --log-theory 50"
THEORY = f"{BRIEF} {LOGGED}"
PROVING = "--model-tag {gen} --eval-every 20"  # an evaluation has 8 attempts at each theorem beside the greedy one
VOTING = "--chain-answer final --chain-modulus 5 --chain-share 1 --chain-min-steps 1 --chain-max-steps 3"
SAMPLED = "--model-tag {gen} --lr 5e-5 --max-new-tokens 48 --eval-every 20 --log-theory 100 --theory-samples 16"
VOTED = {"gen/pass_at_1_in": "pass@1, sampled", "gen/pass_at_1_out": "pass@1, sampled, longer problems",
         "gen/pass1_in": "greedy pass@1", "gen/label_accuracy": "pseudo labels that are right",
         "gen/majority_ratio": "votes for the majority"}
TARGETS = f"--recipe alphaproof {PROVING} --targets-of test_out --num-targets 40"


class Family(NamedTuple):
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
                 "ver/balanced_acc_current": "balanced accuracy of the verifier",
                 "ver/balanced_acc_fixed": "the same, solutions of the start"}),
    "votes": Family(
        "majority votes that are right: each fact is taught wrongly, in 30% of its demonstrations",
        f"{VOTING} --chain-wrongness 0.3", {"gen": f"{GEN} 800"},
        {"grpo": f"--recipe grpo {SAMPLED}", "ttrl": f"--recipe ttrl {SAMPLED}",
         "ttrl_fast": f"--recipe ttrl {SAMPLED} --lr 2e-4"}, "grpo", VOTED),
    "wrong_votes": Family(
        "majority votes that are wrong: each fact is taught wrongly, in 70% of its demonstrations",
        f"{VOTING} --chain-wrongness 0.7", {"gen": f"{GEN} 800"},
        {"grpo": f"--recipe grpo {SAMPLED}", "ttrl": f"--recipe ttrl {SAMPLED}"}, "grpo", VOTED),
    "self_verify": Family(
        "one model that solves and verifies, taught as much wrongly as a verifier as it is as a generator",
        f"{MISLED} --chain-verifier-share 0.4 --chain-verifier-wrongness 0.8",
        {"gen": f"{GEN} 500", "both": f"{BOTH} 500"},
        {"generation": f"--recipe self_verify --verifier-steps 0 {JUDGED}",
         "turns": f"--recipe self_verify --num-steps 72 {JUDGED}",  # as many generator steps
         "verification": f"--recipe self_verify --warmup-steps 60 {JUDGED}",
         "coverrl": f"--recipe coverrl {JUDGED}", "ttrl": f"--recipe ttrl {BRIEF}",
         "few_labels": f"--recipe tango --verifier-head prompt --num-labelled 64 --warmup-steps 20 --alpha-start 0.7 "
                       f"--alpha-end 0.7 --combine rewards --credit to_go --negative-weight 1 {JUDGED}",
         "grpo_few_labels": f"--recipe grpo --num-labelled 64 --labelled-share 1 {BRIEF}"},
        "generation", {**SOLVED, "ver/balanced_acc_fixed": "balanced accuracy, the start's solutions",
                       "ver/balanced_acc_current": "balanced accuracy, present solutions"}),
    "kernel": Family(
        "proofs against a kernel that is never wrong", "--task rewrite", {"gen": f"{GEN} 800"},
        {"grpo": f"--recipe alphaproof --learner grpo {PROVING}",
         "expert_iteration": f"--recipe alphaproof {PROVING}",
         "gold_steps": f"--recipe gold_steps --combine rewards --credit to_go --negative-weight 1 {PROVING}",
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
    "proposers": Family(
        "problems of one's own", PLAIN,
        {"gen": f"{GEN} 500", "both": f"{BOTH} 500 --demo-shares propose:0.3",
         "ver": f"--role verifier --model-tag {{gen}} {SHAPE} --num-steps 500"},
        {"grpo": f"--recipe grpo {BRIEF}", "mae": MAE, "mae_grounded": f"{MAE} --judge-reward grounded",
         "mae_grounded_azr": f"{MAE} --judge-reward grounded --proposer-reward azr",
         "medvlsynther": f"--recipe medvlsynther {BY_JUDGE} --verifier-tag {{ver}} --examples-per-step 128",
         "medvlsynther_unfiltered": f"--recipe medvlsynther {BY_JUDGE} --verifier-tag {{ver}} --min-score 0"},
        "grpo", {**SOLVED, "gen/proposals/valid": "proposals that are problems",
                 "gen/proposals/difficulty": "difficulty", "gen/judge/score": "judge's score",
                 "gen/rewards/outcome/mean": "right by gold", "gen/balanced_acc_current": "judge, balanced accuracy"}),
    "search_self_play": Family(
        "questions of one's own, with a search",
        "--task lookup --chain-modulus 5 --chain-share 0.2 --lookup-share 0.2 --lookup-key-share 0.8 "
        "--lookup-recall-share 0.1 --chain-min-steps 2 --chain-max-steps 3",
        {"gen": f"{GEN} 1200 --demo-shares propose:0.5"},
        {"search_r1": f"--recipe search_r1 {SEARCHING} --num-samples 5 --examples-per-step 24",
         "ssp": f"--recipe ssp {SEARCHING} --num-samples 5 --examples-per-step 24 --kl-coef 0.01",
         "ssp_no_filter": f"--recipe ssp --no-filter {SEARCHING} --num-samples 5 --examples-per-step 24 "
                          f"--kl-coef 0.01",
         "ssp_parabola": f"--recipe ssp --proposer-reward parabola {SEARCHING} --num-samples 5 --examples-per-step 24 "
                         f"--kl-coef 0.01"},
        "search_r1", {**SOLVED, "gen/proposals/valid": "questions that pass",
                      "gen/proposals/solved": "answered rightly", "gen/proposals/queries": "keys in a question"}),
    "tools": Family(
        "what must be looked up, where memory is half wrong",
        f"{KEYS} --chain-share 0 --lookup-keys 200 --lookup-share 0.5 --lookup-recall-share 0.6",
        {"gen": f"{GEN} 1000"},
        {"grpo": f"--recipe grpo {SEARCHING}",  # from memory: nothing answers its queries
         "search_r1": f"--recipe search_r1 {SEARCHING}",
         "search_r1_no_mask": f"--recipe search_r1 --no-mask-information {SEARCHING}",
         "r1_searcher": f"--recipe r1_searcher --stage1-steps 20 {SEARCHING}",
         "ssrl": f"--recipe ssrl {SEARCHING}"},
        "grpo", {**SOLVED, "gen/search_pass1_in": "with the search that training lacked",
                 "gen/memory_pass1_in": "without the search", "gen/queries": "queries"}),
    "readers": Family(
        "a reasoner and a reader of noisy documents", f"{KEYS} --chain-share 0 --lookup-keys 200 --lookup-noise 5",
        {"gen": f"{GEN} 1600 --demo-shares reason:0.7 condense:0.2"},
        {"frozen_reader": f"{READING} --system1 frozen", "reasoner": f"{READING} --system1 shared", "mars": READING,
         "mars_unbalanced": f"{READING} --no-balance", "search_o1": f"{READING} --num-steps 0"},
        "frozen_reader", {**SOLVED, "gen/condensed/right": "documents read rightly", "gen/queries_in": "queries"}),
    "teams": Family(
        "two agents with one reward", "--task halves --chain-share 0.2 --chain-min-steps 1 --chain-max-steps 3",
        {"gen": f"{GEN} 800 --demo-shares first:0.4 second:0.4"},
        {"frozen_partner": "--recipe magrpo --frozen second --model-tag {gen} --max-new-tokens 36 --num-steps 150",
         "aligned": "--recipe magrpo --model-tag {gen} --max-new-tokens 36 --num-steps 150",
         "cross": "--recipe magrpo --joint cross --num-samples 4 --model-tag {gen} --max-new-tokens 36 "
                  "--examples-per-step 32 --num-steps 150"},
        "frozen_partner", {"joint/sampled_in": "right together, sampled", "joint/pass1_in": "right together, greedy",
                           "joint/sampled_agree_in": "one convention, sampled"}),
    "rounds": Family(
        "answers after the others' answers, or after a verification", PLAIN,
        {"gen": f"{GEN} 500", "both": f"{BOTH} 500 --demo-shares refine:0.4"},
        {"grpo": f"--recipe grpo {BRIEF}",
         **{f"debate_{shaping}": f"--recipe marti --graph debate --shaping {shaping} {BY_JUDGE}"
            for shaping in ("none", "margin", "quality")},
         "chain_margin": f"--recipe marti --graph chain --shaping margin {BY_JUDGE}",
         "critique_grpo": f"--recipe critique_grpo {BRIEF}",
         "critique_grpo_verifier": f"--recipe critique_grpo_verifier --verifier-tag {{both}} {BY_JUDGE}"},
        "grpo", {**SOLVED, "gen/final_in": "last answers that are right", "gen/first_in": "first answers"}),
    "debates": Family(
        "arguments for opposite answers before a judge", f"{PLAIN} --chain-verifier-share 0.1",
        {"gen": f"{GEN} 600 --demo-shares argue:0.4",
         "ver": f"--role verifier --model-tag {{gen}} {SHAPE} --num-steps 600",
         "pair": f"--role verifier --model-tag {{gen}} --from-stage sft --from-tag {{ver}} {SHAPE} --num-steps 400 "
                 f"--verifier-form pair --bare-share 0.4"},
        {"debate": f"--recipe debate {ARGUING}", "consultancy": f"--recipe debate {ARGUING} --protocol consultancy",
         "debate_judge": f"--recipe debate_judge {ARGUING}"},
        "debate", {"gen/judge_accuracy_in": "judge right, debate",
                   "gen/win_rate_against_start_in": "wins against the start",
                   "gen/single_accuracy_in": "judge right, one consultant",
                   "gen/consultant_win_rate_in": "consultant's wins"}),
    "own_judge": Family(
        "what a model makes of its own judgments", f"{PLAIN} --chain-verifier-share 0.1",
        {"gen": f"{GEN} 500", "both": f"{BOTH} 500 --demo-shares revise:0.3"},
        {"grpo": f"--recipe grpo {BRIEF}",
         "self_rewarding": f"--recipe self_rewarding {BY_JUDGE} --num-samples 4 --iteration-steps 20",
         "constitutional_ai": f"--recipe constitutional_ai {BY_JUDGE} --num-samples 4 --sl-steps 30"},
        "grpo", {**SOLVED, "gen/violated_in": "solutions that break a principle",
                 "gen/balanced_acc_current": "as a judge, balanced accuracy"}),
    "theory": Family(
        "how much of a model moves, and whether it solves what it could not: RL on given problems, self-play, and "
        "cross-entropy on its own right solutions",
        PLAIN, {"gen": f"{GEN} 500", "both": f"{BOTH} 500 --demo-shares propose:0.3"},
        {"grpo": f"--recipe grpo {THEORY}", "expert_iteration": f"--recipe alphaproof {THEORY}",
         "mae_grounded": f"{MAE} --judge-reward grounded {LOGGED}"},
        "grpo", {**SOLVED, "gen/pass_at_64_in": "pass@64", "gen/pass_at_64_out": "pass@64, longer problems",
                 "gen/update_sparsity": "weights that stay", "gen/update_sparsity_bf16": "weights that stay, in bf16",
                 "gen/outcome_variance_in": "variance of outcomes", "gen/entropy": "entropy"}),
    "optimisers": Family(
        "optimisers of outcome rewards", LONG_CHAIN,
        {"gen": f"{GEN} 800", "ver": f"--role verifier --model-tag {{gen}} {SHAPE} --num-steps 800"},
        {"grpo": "--recipe grpo --num-steps 126 --model-tag {gen}",  # about as many tokens as dapo
         "dapo": "--recipe dapo --model-tag {gen}",
         "clip": FOUR, "clip_higher": f"{FOUR} --clip-high 0.28",
         "cispo": f"{FOUR} --loss cispo --clip-low 1 --clip-high 0.28 --aggregation token",
         "gspo": f"{FOUR} --sequence-ratio --clip-low 3e-4 --clip-high 4e-4",
         "ppo": CRITIC, "vapo": f"{CRITIC} --gae-alpha 0.25 --value-pretrain 20 --lm-coef 0.1"},
        "grpo", {**SOLVED, "gen/frac_reward_zero_std": "groups without signal", "gen/entropy": "entropy"}),
}


def experiment(name: str, arms: list[str]) -> Experiment:
    """These arms of a family, with all its starts."""
    family = FAMILIES[name]
    common, starts = f"--seed {{seed}} --device-type cpu {family.problems}", {}
    for start, flags in family.starts.items():
        saved_as = "--verifier-tag" if "--role verifier" in flags else "--model-tag"
        starts[start] = Start("sft", f"{name}-{start}-s{{seed}}", f"{common} {saved_as} {{tag}} {flags}")
    return Experiment(name, starts, {arm: f"{common} {RL} {family.arms[arm]}" for arm in arms})
